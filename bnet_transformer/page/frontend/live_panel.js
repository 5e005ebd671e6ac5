// @ts-check
/** The sections that the live page adds to the panel: evidence, contributions, the lens, and patches. */

import { htmlElement } from "./elements.js";
import { addStep, removeOther, setEvidence } from "./live_state.js";
import { renderLens, renderPatch } from "./live_tables.js";

/**
 * @typedef {import("./live_state.js").LiveState} LiveState
 * @typedef {{state: LiveState, tables: {lens: any, patch: any}, change: (next: LiveState) => void, select: (name: string) => void}} LiveContext  `tables`: answers of the server, an Error, or null while it computes
 */

/** A section of the panel. @param {string} title @param {string} key @param {...(Node|string)} children */
const renderSection = (title, key, ...children) => htmlElement("section", { "data-live": key }, htmlElement("h3", {}, title), ...children);

/** @param {string} action @param {string} text @param {() => void} onclick */
const renderButton = (action, text, onclick) => htmlElement("button", { type: "button", "data-action": action, onclick }, text);

/** A field of a form. @param {string} name @param {string} label @param {string} value @param {string} [placeholder] */
const renderInput = (name, label, value, placeholder = "") => htmlElement("input", { name, type: "text", "aria-label": label, title: label, value, placeholder, autocomplete: "off", spellcheck: "false" });

/** A form that calls a function with its fields. @param {string} action @param {(fields: Record<string, string>) => void} submit @param {...(Node|string)} children */
function renderForm(action, submit, ...children) {
  const form = /** @type {HTMLFormElement} */ (htmlElement("form", { class: "buttons", "data-action": action }, ...children));
  form.addEventListener("submit", (event) => {
    event.preventDefault();
    submit(Object.fromEntries([...new FormData(form)].map(([name, value]) => [name, String(value)])));
  });
  return form;
}

/** The states of a form: one, or two for a difference. They are not trimmed, because a token can begin with a space. @param {Record<string, string>} fields */
const statesOf = (fields) => [fields.first, fields.second].filter((text) => text !== "");

/** The fields of one state, and of another one that requires the first. @param {string} label @param {string} first @param {string} second */
function renderStateInputs(label, first, second) {
  const inputs = [renderInput("first", label, first, "state"), renderInput("second", "another state, for the difference", second, "minus")];
  const check = () => { /** @type {HTMLInputElement} */ (inputs[0]).required = /** @type {HTMLInputElement} */ (inputs[1]).value !== ""; };
  inputs[1].addEventListener("input", check);
  check();
  return inputs;
}

/** The state of a table: its elements, the line of its error, or a note while it is computed. @param {any} table @param {(table: any) => HTMLElement[]} render */
function renderAnswer(table, render) {
  if (table === null) return [htmlElement("p", { class: "small", role: "status" }, "computing …")];
  if (table instanceof Error) return [htmlElement("p", { class: "note", role: "alert" }, table.message)];
  return render(table);
}

/** The sections of the sentence. @param {any} description @param {LiveContext} context */
export function renderSentenceSections(description, context) {
  const { state, tables, change, select } = context, { live } = description, sections = [];
  const observed = Object.keys(state.evidence);
  if (observed.length) sections.push(renderSection("Remove evidence", "evidence", htmlElement("div", { class: "buttons" }, ...observed.map((name) => renderButton(`forget-${name}`, `${name} ×`, () => change(setEvidence(state, name, null)))))));
  if (live.roles.length) sections.push(renderPatchSection(live, context));
  if (live.readouts.length && live.roles.length) {
    const toggle = renderButton("lens", state.lens ? "hide the lens" : "show the lens", () => change({ ...state, lens: !state.lens }));
    sections.push(renderSection("Lens: the readout of each hidden state", "lens", toggle, ...(state.lens ? renderAnswer(tables.lens, (lens) => renderLens(lens, select)) : [])));
  }
  return sections;
}

/** The form of a patch, and its result. @param {any} live @param {LiveContext} context */
function renderPatchSection(live, { state, tables, change, select }) {
  const { node, of } = state.patch, role = state.roles || live.roles[0];
  const roles = htmlElement("select", { name: "roles", "aria-label": "nodes to patch" }, ...live.roles.map((/** @type {string} */ name) => htmlElement("option", { value: name, selected: name === role }, name)));
  const form = renderForm("patch", (fields) => change({ ...state, other: fields.other.trim(), roles: fields.roles, patch: { node: fields.node.trim(), of: statesOf(fields) } }),
    renderInput("other", "another sentence with the same number of words", state.other, "another sentence"),
    htmlElement("label", { class: "field" }, "patch", roles), htmlElement("label", { class: "field" }, "effect on", renderInput("node", "the node whose change is measured", node || live.metric)),
    ...renderStateInputs("a state of the node", of[0] ?? "", of[1] ?? ""), htmlElement("button", { type: "submit" }, "patch"));
  const hide = state.other ? [renderButton("unpatch", "remove", () => change(removeOther(state)))] : [];
  form.append(...hide);
  return renderSection("Patch another sentence into this one", "patch", form, ...(state.other ? renderAnswer(tables.patch, (patch) => renderPatch(patch, select)) : []));
}

/** The sections of one selected node. @param {any} description @param {string} name @param {any} group @param {number} index @param {LiveContext} context */
export function renderNodeSections(description, name, group, index, context) {
  const { state, change } = context, sections = [];
  const isSet = name in description.interventions;
  if (description.live.discrete.includes(index) && !isSet) sections.push(renderEvidenceSection(description, name, context));
  if (description.live.readouts.includes(group.name) && !isSet) sections.push(renderContributionsSection(description, name, context));
  if (state.other && group.kind === "deterministic" && group.word_stack !== null && !isSet)
    sections.push(renderSection("Patch", "patch-node", renderButton("other", "set to its value in the other sentence", () => change(addStep(state, [[name, { set: "other" }]])))));
  return sections;
}

/** Buttons that observe the node, and its posterior. @param {any} description @param {string} name @param {LiveContext} context */
function renderEvidenceSection(description, name, { state, change }) {
  if (name in description.evidence) return renderSection("Evidence", "evidence", renderButton("forget", "remove this evidence", () => change(setEvidence(state, name, null))));
  const posterior = description.posteriors.find((/** @type {any} */ item) => item.node === name);
  const buttons = posterior ? posterior.states.map((/** @type {[string, number, number, number]} */ [label, , , index]) => renderButton(`observe-${index}`, `${name} = ${label}`, () => change(setEvidence(state, name, index))))
    : [renderButton("posterior", "show the posterior", () => change({ ...state, posterior: [...state.posterior, name] }))];
  if (state.posterior.includes(name)) buttons.push(renderButton("no-posterior", "hide the posterior", () => change({ ...state, posterior: state.posterior.filter((other) => other !== name) })));
  const form = renderForm("observe", ({ value }) => { if (value) change(setEvidence(state, name, value)); }, renderInput("value", `the observed state of ${name}`, "", "observe a state"), htmlElement("button", { type: "submit" }, "observe"));
  return renderSection("Observe", "evidence", htmlElement("div", { class: "buttons" }, ...buttons), form);
}

/** The form of the contributions to a readout. @param {any} description @param {string} name @param {LiveContext} context */
function renderContributionsSection(description, name, { state, change }) {
  const isShown = state.contributions?.node === name, [first = "", second = ""] = isShown ? state.contributions?.of ?? [] : [];
  const form = renderForm("contributions", (fields) => change({ ...state, contributions: { node: name, of: statesOf(fields) } }),
    ...renderStateInputs("the state whose logit is decomposed; by default the most probable one", first, second), htmlElement("button", { type: "submit" }, "show"));
  if (isShown) form.append(renderButton("no-contributions", "hide", () => change({ ...state, contributions: null })));
  const fault = isShown ? description.live.contributions_error : "";
  return renderSection("Contributions to the logit", "contributions", form, ...(fault ? [htmlElement("p", { class: "note", role: "alert" }, fault)] : []));
}
