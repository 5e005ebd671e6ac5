// @ts-check
/** The panel: the facts of the sentence, or of the selected node. */

import { htmlElement, renderLabel } from "./elements.js";

/**
 * @typedef {import("./ground_graph.js").GroundGraph} GroundGraph
 * @typedef {import("./ground_graph.js").Description} Description
 * @typedef {import("./attention.js").PageAttention} PageAttention
 * @typedef {import("./attention.js").AttentionEntry} AttentionEntry
 * @typedef {{relation: string, ids: number[]}} Relatives
 * @typedef {{head: number, word: string, index: number, weight: number}} HeadEntry  the strongest word of a head
 * @typedef {{description: Description, graph: GroundGraph, ids: number[], tables: {title: string, key: string, rows: {word: string, index: number, weight: number}[], heads: HeadEntry[], note: string}[],
 *   relatives: Relatives[], highlight: string, onHighlight: (relation: string) => void, onSelect: (name: string) => void, onHead: (head: number) => void, host: any, announce: (text: string) => void}} NodeFacts
 */

const MAX_LISTED = 400; // names of a list that are shown at once
const MAX_ROWS = 12; // rows of a table that are shown at once
const MATHML = "http://www.w3.org/1998/Math/MathML";

/** MathML from nested lists. @param {any} tree @returns {Element} */
function renderMathml(tree) {
  const [tag, attributes, children] = tree, element = document.createElementNS(MATHML, tag);
  for (const [name, value] of Object.entries(attributes)) element.setAttribute(name, String(value));
  if (typeof children === "string") element.textContent = children;
  else element.append(...children.map(renderMathml));
  return element;
}

/** A bar with its number. @param {number} fraction @param {string} [kind] */
function renderBar(fraction, kind = "") {
  const element = htmlElement("span", { class: `bar ${kind}` });
  element.style.setProperty("--fraction", String(fraction));
  return element;
}

/** A section of the panel. @param {string} title @param {string} key @param {...(Node|string)} children */
const renderSection = (title, key, ...children) => htmlElement("section", { "data-part": key }, htmlElement("h3", {}, title), ...children);

/** The name of a table for screen readers; its section shows it as a heading. @param {string} text */
const renderCaption = (text) => htmlElement("caption", { class: "unseen" }, text);

/** A word whose direction of writing does not affect the text around it. @param {string} text */
const isolateText = (text) => htmlElement("bdi", {}, text);

/** The first rows of a table, and a button that shows the others. @template T @param {T[]} items @param {(item: T) => HTMLElement} renderRow @param {string} label */
function renderRows(items, renderRow, label) {
  const body = htmlElement("tbody", {}, ...items.slice(0, MAX_ROWS).map(renderRow)), remaining = items.slice(MAX_ROWS);
  const more = remaining.length ? [htmlElement("button", { type: "button", class: "quiet", onclick: (/** @type {any} */ event) => { body.append(...remaining.map(renderRow)); event.target.remove(); } }, label)] : [];
  return { body, more };
}

/** Prior and posterior of discrete nodes. @param {Description} description */
function renderPosteriors(description) {
  return description.posteriors.map((/** @type {any} */ posterior) => {
    const name = posterior.has_evidence ? `P(${posterior.node} | evidence)` : `P(${posterior.node})`, title = htmlElement("h3", {}, name);
    const rows = posterior.states.map((/** @type {[string, number, number, number]} */ [label, prior, probability]) => htmlElement("tr", { "data-state": label },
      htmlElement("th", { scope: "row" }, isolateText(label)), htmlElement("td", { class: "bar-cell" }, ...(posterior.has_evidence ? [renderBar(prior, "prior")] : []), renderBar(probability)),
      htmlElement("td", { class: "number", "data-weight": probability }, probability.toFixed(3))));
    const table = htmlElement("table", { class: "bars" }, renderCaption(name), htmlElement("tbody", {}, ...rows));
    const legend = posterior.has_evidence ? [htmlElement("p", { class: "small" }, "pale: prior")] : [];
    const more = posterior.num_omitted ? [htmlElement("p", { class: "small" }, `${posterior.num_omitted.toLocaleString("en")} less probable states are omitted`)] : [];
    return htmlElement("section", { "data-posterior": posterior.node }, title, table, ...legend, ...more);
  });
}

/** The probability that each head is included; for a posterior, with its interval. @param {Description} description */
function renderInclusion(description) {
  const inclusion = description.inclusion;
  if (!inclusion) return [];
  const rows = inclusion.rows.map((/** @type {string} */ name, /** @type {number} */ k) => htmlElement("tr", {}, htmlElement("th", { scope: "row" }, name),
    ...inclusion.probabilities[k].map((/** @type {number} */ probability, /** @type {number} */ head) => {
      const isPosterior = Boolean(inclusion.low), interval = isPosterior && inclusion.low[k][head] !== null ? [inclusion.low[k][head], inclusion.high[k][head]] : [];
      const range = interval.length ? `, from ${interval[0].toFixed(2)} to ${interval[1].toFixed(2)}` : "";
      const more = isPosterior ? `${range}; log Bayes factor ${inclusion.log_bayes[k][head].toFixed(1)}` : "";
      const label = `${name}, head ${head}: ${isPosterior ? probability.toFixed(2) : probability}${more}`;
      const cell = htmlElement("td", { class: interval.length ? "cell ranged" : "cell", "data-inclusion": `${k}_${head}`, "data-weight": probability, title: label, "aria-label": label }, probability.toFixed(2).replace(/^0/, ""));
      cell.style.setProperty("--fraction", String(probability));
      interval.forEach((bound, side) => cell.style.setProperty(side ? "--high" : "--low", String(bound)));
      return cell;
    })));
  const note = inclusion.note ? [htmlElement("p", { class: "small" }, inclusion.note)] : [];
  return [renderSection(inclusion.title, "inclusion", htmlElement("div", { class: "wide" }, htmlElement("table", { class: "cells" }, renderCaption(inclusion.title), htmlElement("tbody", {}, ...rows))), ...note)];
}

/** The largest parts of a readout, with signed bars; a click selects the node of a writer. @param {any} readout @param {(name: string) => void} onSelect */
function renderContributions(readout, onSelect) {
  const signed = (/** @type {number|null} */ value) => (value === null ? "–" : `${value < 0 ? "−" : "+"}${Math.abs(value).toPrecision(3)}`);
  const greatest = Math.max(...readout.parts.map((/** @type {any} */ entry) => Math.abs(entry.part)), 1e-300);
  const renderRow = (/** @type {any} */ entry) => htmlElement("tr", { "data-writer": entry.writer, "data-weight": entry.part },
    htmlElement("th", { scope: "row" }, htmlElement("button", { type: "button", class: "name", "data-name": entry.node, title: `${entry.writer}, ${entry.kind}: show ${entry.node}`, onclick: () => onSelect(entry.node) }, entry.writer)),
    htmlElement("td", { class: "bar-cell signed" }, renderBar(Math.abs(entry.part) / greatest, entry.part < 0 ? "negative" : "positive")),
    htmlElement("td", { class: "number" }, signed(entry.part)), ...(readout.has_effects ? [htmlElement("td", { class: "number", "data-effect": entry.effect ?? "" }, signed(entry.effect))] : []));
  const head = htmlElement("thead", {}, htmlElement("tr", {}, ...["writer", "", "part", ...(readout.has_effects ? ["effect"] : [])].map((text) => (text ? htmlElement("th", { scope: "col" }, text) : htmlElement("td", {})))));
  const { body, more } = renderRows(readout.parts, renderRow, `show ${readout.parts.length - MAX_ROWS} more`);
  const norms = readout.norms.length ? `The scales of norms are held fixed: ${readout.norms.slice(0, 4).join(", ")}${readout.norms.length > 4 ? ` and ${readout.norms.length - 4} more` : ""}.` : "No norms are on the paths.";
  const effects = readout.has_effects ? " Effect: the readout minus that of a run in which the writer is zero." : "";
  const omitted = readout.num_omitted ? [htmlElement("p", { class: "small" }, `${readout.num_omitted.toLocaleString("en")} smaller parts sum to ${signed(readout.omitted)}.`)] : [];
  return htmlElement("section", { "data-part": "contributions", "data-total": readout.value }, htmlElement("h3", {}, "Contributions to ", isolateText(readout.of)),
    htmlElement("p", { class: "small" }, `The parts sum to ${signed(readout.value)}. ${norms}${effects}`), htmlElement("table", { class: "bars" }, renderCaption(`contributions to ${readout.of}`), head, body), ...more, ...omitted);
}

/** Whether all words of a head are set to zero ("off"), some of its words are set otherwise ("mixed"), or none is set ("on"), and the pattern of its nodes. @param {Description} description @param {import("./ground_graph.js").Group} group @param {number} head */
function readHead(description, group, head) {
  const prefix = `${group.name}_${head}_`, values = Object.entries(description.interventions).filter(([name]) => name.startsWith(prefix)).map(([, value]) => value);
  const isOff = values.length > 0 && values.length === group.dims.at(-1) && values.every((value) => value === "zero" || value === "0");
  return { pattern: `${prefix}*`, status: !values.length ? "on" : isOff ? "off" : "mixed" };
}

/** Switch a head off in all words, or on again. @param {any} host @param {{pattern: string, status: string}} state */
const toggleHead = (host, { pattern, status }) => () => (status === "off" ? host.undo([pattern]) : host.do([[pattern, { set: "zero" }]]));

/** A switch for each head of a plate, if a host can set heads to zero. @param {Description} description @param {any} host */
function renderHeadSwitches(description, host) {
  const groups = description.groups.filter((/** @type {any} */ group, /** @type {number} */ k) => group.plates.join() === "head" && description.attention.some((/** @type {any} */ attention) => attention.group === k));
  if (!host || !groups.length) return [];
  const heads = Array.from({ length: description.plate_sizes.head }, (_, head) => head);
  const rows = groups.map((/** @type {any} */ group) => htmlElement("tr", {}, htmlElement("th", { scope: "row" }, group.name), ...heads.map((head) => {
    const state = readHead(description, group, head), label = `${group.name}, head ${head}`, isOn = state.status === "mixed" ? "mixed" : state.status === "on";
    const title = `${label} is ${state.status === "mixed" ? "set in some words, or not to zero" : state.status}`;
    return htmlElement("td", {}, htmlElement("button", { type: "button", class: "switch", "data-switch": `${group.name}_${head}`, "aria-pressed": isOn, "aria-label": label, title, onclick: toggleHead(host, state) }, String(head)));
  })));
  return [renderSection("Active heads", "switches", htmlElement("div", { class: "wide" }, htmlElement("table", { class: "cells" }, renderCaption("active heads: slices are rows, heads are columns"), htmlElement("tbody", {}, ...rows))))];
}

/** The values that do sets; nodes that have the same value in all words are one entry, whose word is a star. @param {Description} description @returns {Record<string, string>} */
function collapseWords(description) {
  const values = description.interventions, result = /** @type {Record<string, string>} */ ({});
  const names = new Set(Object.keys(values)), groups = description.groups.filter((/** @type {import("./ground_graph.js").Group} */ group) => group.word_stack !== null && Number(group.dims.at(-1)) > 1);
  for (const { name, dims } of groups) {
    const plates = dims.slice(0, -1).reduce((/** @type {string[]} */ prefixes, /** @type {number} */ size) => prefixes.flatMap((prefix) => Array.from({ length: size }, (_, k) => `${prefix}_${k}`)), [name]);
    for (const prefix of plates) {
      if (!names.has(`${prefix}_0`)) continue;
      const words = Array.from({ length: dims.at(-1) }, (_, word) => `${prefix}_${word}`);
      if (!words.every((word) => names.has(word) && values[word] === values[words[0]])) continue;
      result[`${prefix}_*`] = values[words[0]];
      for (const word of words) names.delete(word);
    }
  }
  return { ...result, ...Object.fromEntries(Object.entries(values).filter(([key]) => names.has(key))) };
}

/** The interventions and the evidence. @param {Description} description @param {any} host */
function renderEvidence(description, host) {
  const groups = [["Set by do", collapseWords(description), "do"], ["Evidence", description.evidence, "evidence"]].filter(([, values]) => Object.keys(values).length);
  return groups.map(([title, values, key]) => renderSection(title, key, ...renderList(Object.entries(values), ([name, value]) => htmlElement("li", { "data-name": name }, htmlElement("code", {}, name), " = ", isolateText(value))),
    ...(key === "do" && host ? [htmlElement("button", { type: "button", "data-action": "undo-all", onclick: () => host.undo([]) }, "undo all")] : [])));
}

/** A list that shows its first items, and a button that shows the others. @template T @param {T[]} items @param {(item: T) => HTMLElement} renderItem */
function renderList(items, renderItem) {
  const list = htmlElement("ul", { class: "names" }, ...items.slice(0, MAX_LISTED).map(renderItem));
  if (items.length <= MAX_LISTED) return [list];
  const button = htmlElement("button", { type: "button", class: "quiet" }, `show all ${items.length.toLocaleString("en")}`);
  button.addEventListener("click", () => { for (const item of items.slice(MAX_LISTED)) list.append(renderItem(item)); button.remove(); });
  return [list, button];
}

/** The panel of the sentence, if no node is selected. @param {Description} description @param {any} host @param {boolean} showSpecial @returns {HTMLElement[]} */
export function renderOverview(description, host, showSpecial) {
  const [nodes, arrows] = description.counts.map((/** @type {number} */ count) => count.toLocaleString("en"));
  const words = description.stacks.reduce((/** @type {number} */ sum, /** @type {any} */ stack) => sum + stack.words.length, 0);
  const heads = description.heads ? ` The page contains only head${description.heads.length > 1 ? "s" : ""} ${description.heads.join(", ")}.` : "";
  const resolution = description.attention.length ? `P(j | i) is stored in steps of 1/${description.quantization_steps}, so its error is at most 1/${2 * description.quantization_steps}.${heads}` : "This net has no attention P(j | i) between words.";
  const notes = renderNotes(description, showSpecial);
  return [
    htmlElement("h2", { class: "screen" }, isolateText(description.title.length > 100 ? `${description.title.slice(0, 99)}…` : description.title)),
    htmlElement("p", { class: "small" }, `${words ? `${words} words, ` : ""}${nodes} nodes and ${arrows} arrows; the net ${description.net}.`),
    ...renderPosteriors(description), ...renderInclusion(description), ...renderHeadSwitches(description, host), ...renderEvidence(description, host), ...notes,
    renderSection("Help", "help",
      renderLegend(description),
      htmlElement("p", { class: "small screen" }, words ? "Point at a word to show the words that it attends to (solid) and the words that attend to it (dashed). Click a node for details." : "Click a node for details."),
      ...(words ? [htmlElement("p", { class: "small" }, resolution)] : []),
      htmlElement("dl", { class: "keys screen" }, ...[["arrows", "move"], ["Enter", "select"], ["f", "fold or unfold the slice"], ["h", "fold or unfold heads"], ["/", "search"], ["+ − 0", "zoom, fit"], ["Esc", "deselect"]]
        .flatMap(([key, action]) => [htmlElement("dt", {}, htmlElement("kbd", {}, key)), htmlElement("dd", {}, action)]))),
  ];
}

/** The notes on what the page does not show. @param {Description} description @param {boolean} showSpecial */
export const renderNotes = (description, showSpecial) => [...description.notes, ...(showSpecial || !description.special ? [] : [description.special.note])].map((/** @type {string} */ note) => htmlElement("p", { class: "note" }, note));

/** The legend of the graph. @param {Description} description */
export function renderLegend(description) {
  const kinds = new Set(description.groups.map((/** @type {any} */ group) => group.kind));
  const hues = new Set(description.edges.map((/** @type {any} */ edge) => edge[4]));
  const entries = [["double", "deterministic", kinds.has("deterministic")], ["", "stochastic", kinds.has("stochastic")],
    ["dashed", "learnable TPM", description.groups.some((/** @type {any} */ group) => group.is_learnable)],
    ["observed", "observed", kinds.has("observed") || Object.keys(description.evidence).length], ["do", "set by do", Object.keys(description.interventions).length], ["changed", "change by do", description.relative_changes],
    ["line q", "query q", hues.has("q")], ["line k", "key k", hues.has("k")], ["line v", "value v", hues.has("v")], ["line source", "attends to", description.attention.length], ["line reader", "attended to by", description.attention.length]];
  return htmlElement("ul", { class: "signs" }, ...entries.filter(([, , isVisible]) => isVisible).map(([kind, text]) => htmlElement("li", {}, htmlElement("span", { class: `sign ${kind}` }), String(text))));
}

/** The panel of a selected node, or of one node in several heads. @param {NodeFacts} facts @returns {HTMLElement[]} */
export function renderNodeFacts(facts) {
  const { description, graph, ids } = facts, groupIndex = graph.groupOf(ids[0]), group = graph.groups[groupIndex];
  const word = graph.wordOf(ids[0]), isSingle = ids.length === 1, plate = isSingle ? graph.indices(ids[0])[0] : null;
  const stack = group.word_stack === null ? null : graph.stacks.find((candidate) => candidate.name === group.word_stack);
  const token = stack && word !== null ? stack.full_words[word] ?? stack.words[word] : null;
  const title = htmlElement("h2", { class: "node-title" }, htmlElement("span", { class: "math" }, .../** @type {any[]} */ (renderLabel(graph, groupIndex, word, group.plates.length ? plate : null, 16, "html"))),
    ...(token === null ? [] : [" ", isolateText(`“${token}”`)]));
  const name = isSingle ? graph.nodeName(ids[0]) : `${group.name}_*${word === null ? "" : `_${word}`}`;
  const value = isSingle ? description.interventions[name] ?? description.evidence[name] : undefined;
  const kind = isSingle && name in description.interventions ? "set by do" : isSingle && name in description.evidence ? "observed" : group.kind;
  const shape = group.value_shape.length ? group.value_shape.join(" × ") : "scalar";
  const entries = [["name", htmlElement("code", { "data-fact": "name" }, name)], ["TPM", htmlElement("span", { "data-fact": "tpm" }, `${group.tpm}${group.is_learnable ? ", learnable" : ""}`)],
    ["kind", htmlElement("span", { "data-fact": "kind" }, kind)], ["value", htmlElement("span", {}, shape, ...(value === undefined ? [] : [", ", isolateText(value)]))]];
  if (!isSingle) entries.push(["nodes", htmlElement("span", {}, `${ids.length}, one per ${group.plates.join(" and ")}`)]);
  const relativeChange = isSingle && description.relative_changes?.[String(groupIndex)]?.[word ?? 0];
  if (typeof relativeChange === "number") entries.push(["change", htmlElement("span", { "data-fact": "change", "data-weight": relativeChange }, `${(100 * relativeChange).toFixed(1)}% of its norm, by the interventions`)]);
  const list = htmlElement("dl", { class: "facts" }, ...entries.flatMap(([term, content]) => [htmlElement("dt", {}, term), htmlElement("dd", {}, content)]));
  return [title, list, ...renderEquation(facts, group.equation), ...renderInterventions(facts, name, group, word),
    ...renderPosteriors({ ...description, posteriors: description.posteriors.filter((/** @type {any} */ posterior) => posterior.node === name) }),
    ...description.contributions.filter((/** @type {any} */ readout) => isSingle && readout.node === name).map((/** @type {any} */ readout) => renderContributions(readout, facts.onSelect)), ...facts.tables.flatMap((table) => [renderAttentionTable(table), ...renderHeadTable(table, facts.onHead)]), renderRelatives(facts)];
}

/** The equation of a group, and its LaTeX to copy. @param {NodeFacts} facts @param {number} index */
function renderEquation(facts, index) {
  const equation = facts.description.equations[index];
  if (!equation) return [];
  const copy = htmlElement("button", { type: "button", class: "quiet", onclick: async () => {
    try { await navigator.clipboard.writeText(equation.latex); facts.announce("copied"); copy.textContent = "copied"; } catch { facts.announce("the browser does not allow this page to copy"); }
  } }, "copy LaTeX");
  const source = htmlElement("details", {}, htmlElement("summary", {}, "LaTeX"), htmlElement("pre", { "data-fact": "latex" }, equation.latex), copy);
  const formula = htmlElement("div", { class: "equation", tabindex: 0, "aria-label": equation.latex }, ...(equation.mathml ? equation.mathml.map(renderMathml) : [htmlElement("code", {}, equation.latex)]));
  return [renderSection("Equation", "equation", formula, source)];
}

/** P(j | i) as bars. @param {{title: string, key: string, rows: {word: string, index: number, weight: number}[], note: string}} table */
function renderAttentionTable(table) {
  const renderRow = (/** @type {{word: string, index: number, weight: number}} */ entry) => htmlElement("tr", { "data-word": entry.index, "data-weight": entry.weight.toFixed(4) },
    htmlElement("th", { scope: "row" }, htmlElement("span", { class: "word-index" }, String(entry.index)), isolateText(entry.word)), htmlElement("td", { class: "bar-cell" }, renderBar(entry.weight)), htmlElement("td", { class: "number" }, entry.weight.toFixed(2)));
  const { body, more } = renderRows(table.rows, renderRow, `show all ${table.rows.length} words`);
  return renderSection(table.title, table.key, htmlElement("p", { class: "small" }, table.note), htmlElement("table", { class: "bars" }, renderCaption(`${table.title}: ${table.note}`), body), ...more);
}

/** The strongest word of each head, where the table is their mean; a click on a head shows it. @param {{key: string, heads: HeadEntry[], note: string}} table @param {(head: number) => void} onHead */
function renderHeadTable({ key, heads, note }, onHead) {
  if (!heads.length) return [];
  const renderRow = (/** @type {HeadEntry} */ { head, index, word, weight }) => htmlElement("tr", { "data-head": head, "data-word": index, "data-weight": weight.toFixed(4) },
    htmlElement("th", { scope: "row" }, htmlElement("button", { type: "button", class: "name", title: `show head ${head}`, onclick: () => onHead(head) }, String(head))),
    htmlElement("td", {}, htmlElement("span", { class: "word-index" }, String(index)), isolateText(word)), htmlElement("td", { class: "bar-cell" }, renderBar(weight)), htmlElement("td", { class: "number" }, weight.toFixed(2)));
  const { body, more } = renderRows(heads, renderRow, `show all ${heads.length} heads`), title = "Strongest word of each head";
  const head = htmlElement("thead", {}, htmlElement("tr", {}, ...["head", "word j", "", "P(j | i)"].map((text) => (text ? htmlElement("th", { scope: "col" }, text) : htmlElement("td", {})))));
  return [renderSection(title, key.replace("reads", "heads"), htmlElement("table", { class: "bars" }, renderCaption(`${title}: ${note}`), head, body), ...more)];
}

/** Lists of ancestors, descendants and blanket with their counts, and buttons that highlight them. @param {NodeFacts} facts */
function renderRelatives(facts) {
  const groups = facts.relatives.map(({ relation, ids }) => {
    const details = htmlElement("details", { "data-relation": relation, "data-count": ids.length }, htmlElement("summary", {}, htmlElement("span", {}, relation), htmlElement("span", { class: "count" }, ids.length.toLocaleString("en"))));
    details.addEventListener("toggle", () => {
      if (/** @type {HTMLDetailsElement} */ (details).open && details.childElementCount === 1)
        details.append(...renderList(ids, (id) => {
          const name = facts.graph.nodeName(id);
          return htmlElement("li", {}, htmlElement("button", { type: "button", class: "name", "data-name": name, onclick: () => facts.onSelect(name) }, name));
        }));
    });
    const button = htmlElement("button", { type: "button", class: "quiet", "aria-pressed": facts.highlight === relation, "data-highlight": relation, onclick: () => facts.onHighlight(facts.highlight === relation ? "" : relation) }, "mark");
    return htmlElement("div", { class: "relatives" }, details, button);
  });
  return renderSection("In the graph", "relatives", ...groups);
}

/** The buttons that set a node, if a host can run them. @param {NodeFacts} facts @param {string} name @param {import("./ground_graph.js").Group} group @param {number|null} word */
function renderInterventions(facts, name, group, word) {
  const { host, description } = facts;
  if (!host) return [];
  const buttons = [], intervene = (/** @type {any} */ setting) => () => host.do([[name, setting]]);
  const states = description.posteriors.find((/** @type {any} */ posterior) => posterior.node === name)?.states;
  const isSet = facts.ids.some((id) => facts.graph.nodeName(id) in description.interventions);
  const isVector = group.kind === "deterministic" && group.word_stack !== null && !states;
  if (isSet) buttons.push(htmlElement("button", { type: "button", "data-action": "undo", title: `undo do on ${name}`, onclick: () => host.undo([name]) }, "undo"));
  else if (states) buttons.push(...states.map((/** @type {[string, number, number, number]} */ [label, , , state]) => htmlElement("button", { type: "button", "data-action": `state-${state}`, onclick: intervene({ set: "state", state }) }, `do(${name} = `, isolateText(label), ")")));
  else if (isVector) buttons.push(htmlElement("button", { type: "button", "data-action": "zero", onclick: intervene({ set: "zero" }) }, "set to zero"));
  if (isVector && group.plates.join() === "head") buttons.push(...renderHeadButtons(facts, group));
  if (isVector && !isSet && facts.ids.length === 1 && word !== null) {
    const stack = /** @type {any} */ (facts.graph.stacks.find((candidate) => candidate.name === group.word_stack));
    const picker = /** @type {HTMLSelectElement} */ (htmlElement("select", { "data-action": "patch", "aria-label": "patch in the value of another word" }, htmlElement("option", { value: "" }, "patch in the value of …"),
      ...stack.words.map((/** @type {string} */ text, /** @type {number} */ index) => htmlElement("option", { value: index, disabled: index === word }, `${index} ${text}`))));
    picker.addEventListener("change", () => {
      const { value } = picker;
      picker.value = ""; // after an error, the same word can be chosen again
      if (value) host.do([[name, { set: "node", from: name.replace(/_\d+$/, `_${value}`) }]]);
    });
    buttons.push(picker);
  }
  return buttons.length ? [renderSection("do", "interventions", htmlElement("div", { class: "buttons" }, ...buttons))] : [];
}

/** The buttons that switch the heads of the selected nodes off, in all words. @param {NodeFacts} facts @param {import("./ground_graph.js").Group} group */
function renderHeadButtons({ description, graph, host, ids }, group) {
  const buttons = ids.map((id) => {
    const [head] = graph.indices(id), state = readHead(description, group, head), isPressed = state.status === "mixed" ? "mixed" : state.status === "off";
    const action = `head ${head} ${state.status === "off" ? "on" : "off"}`, label = `switch ${action} (all words)`;
    return htmlElement("button", { type: "button", "data-action": `head-${head}`, "aria-pressed": isPressed, "aria-label": label, title: label, onclick: toggleHead(host, state) }, ids.length > 1 ? action : label);
  });
  return ids.length > 1 ? [htmlElement("span", { class: "small line-start" }, "Switch in all words:"), ...buttons] : buttons;
}
