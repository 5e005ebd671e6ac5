// @ts-check
/** The bar of controls: each is an ordinary form element that tells `change` what is asked. */

import { html } from "./scene.js";

/**
 * @typedef {{head: string, states: Record<string, number>|null, least: number, top: number, every: boolean, heads: boolean, weights: boolean, theme: string}} Ask
 * @typedef {{ask: Ask, plates: number, plated: boolean, heads: number[]|null, choices: [string, number][], mean: boolean, reads: boolean, weights: boolean,
 *   change: (told: Partial<Ask>) => void, act: (what: string, value?: string) => void}} Told
 */

/** A control with its label. @param {string} text @param {...(Node|string)} parts */
const field = (text, ...parts) => html("label", { class: "field" }, html("span", {}, text), ...parts);

/** @param {string} name @param {[string, string][]} options @param {string} chosen @param {(value: string) => void} change */
function select(name, options, chosen, change) {
  const found = /** @type {HTMLSelectElement} */ (html("select", { name }, ...options.map(([value, text]) => html("option", { value, selected: value === chosen }, text))));
  found.addEventListener("change", () => change(found.value));
  return found;
}

/** @param {string} name @param {string} text @param {boolean} on @param {(on: boolean) => void} change */
function check(name, text, on, change) {
  const box = /** @type {HTMLInputElement} */ (html("input", { type: "checkbox", name, checked: on }));
  box.addEventListener("change", () => change(box.checked));
  return html("label", { class: "field check" }, box, html("span", {}, text));
}

/** @param {string} what @param {string} text @param {string} label @param {(what: string) => void} act */
const button = (what, text, label, act) => html("button", { type: "button", "data-act": what, "aria-label": label, title: label, onclick: () => act(what) }, text);

/** @param {Told} told @returns {HTMLElement[]} */
export function controls(told) {
  const { ask, change, act } = told, found = [];
  if (told.plates > 1) {
    const numbers = Array.from({ length: told.plates }, (_, k) => told.heads?.[k] ?? k);
    found.push(field("head", select("head", [["mean", "mean"], ["all", "all"], ...numbers.map((head) => /** @type {[string, string]} */ ([String(head), String(head)]))], ask.head, (head) => change({ head }))));
  }
  if (told.choices.length) found.push(...choosers(told));
  if (told.reads) {
    const shown = html("output", {}, ask.least.toFixed(2));
    const least = /** @type {HTMLInputElement} */ (html("input", { type: "range", name: "least", min: 0, max: 1, step: 0.01, value: ask.least, "aria-label": "least P(j | i) that is drawn" }));
    least.addEventListener("input", () => { shown.textContent = Number(least.value).toFixed(2); change({ least: Number(least.value) }); });
    const top = /** @type {HTMLInputElement} */ (html("input", { type: "number", name: "top", min: 1, max: 999, value: ask.top || "", placeholder: "all", "aria-label": "strongest reads of each word that are drawn" }));
    top.addEventListener("input", () => change({ top: Math.max(0, Math.floor(Number(top.value)) || 0) }));
    found.push(field("P ≥", least, shown), field("top", top), check("every", "all words", ask.every, (every) => change({ every })));
  }
  if (told.plated) found.push(check("heads", "unfold heads", ask.heads, (heads) => change({ heads })));
  if (told.weights) found.push(check("weights", "weights", ask.weights, (weights) => change({ weights })));
  const search = /** @type {HTMLInputElement} */ (html("input", { type: "search", name: "search", placeholder: "find a word", "aria-label": "find a word", autocomplete: "off" }));
  search.addEventListener("input", () => act("search", search.value));
  search.addEventListener("keydown", (event) => { if (event.key === "Enter") act("next", search.value); if (event.key === "Escape") { search.value = ""; act("search", ""); search.blur(); } });
  found.push(html("span", { class: "gap" }), search,
    html("span", { class: "group" }, button("fold", "▸", "fold all slices", act), button("unfold", "▾", "unfold all slices", act)),
    html("span", { class: "group" }, button("out", "−", "zoom out", act), button("fit", "fit", "fit to the window", act), button("in", "+", "zoom in", act)),
    html("span", { class: "group" }, button("svg", "SVG", "save this view as SVG", act), button("png", "PNG", "save this view as PNG", act)),
    select("theme", [["auto", "auto"], ["light", "light"], ["dark", "dark"]], ask.theme, (theme) => change({ theme })));
  /** @type {HTMLElement} */ (found.at(-1)).setAttribute("aria-label", "colours");
  return found;
}

/** The states of the open choices, or the posterior mean. @param {Told} told */
function choosers(told) {
  const { ask, change, choices } = told, one = choices.length === 1;
  const mean = /** @type {[string, string][]} */ (told.mean ? [["mean", "posterior mean"]] : []);
  const options = one ? Array.from({ length: choices[0][1] }, (_, k) => /** @type {[string, string]} */ ([String(k), `${choices[0][0]} = ${k}`])) : [/** @type {[string, string]} */ (["set", "states"])];
  const chosen = ask.states === null ? "mean" : one ? String(ask.states[choices[0][0]] ?? 0) : "set";
  const found = [field(one ? choices[0][0] : "selectors", select("states", [...mean, ...options], chosen, (value) => (
    change({ states: value === "mean" ? null : one ? { [choices[0][0]]: Number(value) } : Object.fromEntries(choices.map(([name]) => [name, 0])) }))))];
  if (!one && ask.states) for (const [name, size] of choices)
    found.push(field(name, select(`state-${name}`, Array.from({ length: size }, (_, k) => [String(k), String(k)]), String(ask.states[name] ?? 0), (value) => change({ states: { ...ask.states, [name]: Number(value) } }))));
  return found;
}
