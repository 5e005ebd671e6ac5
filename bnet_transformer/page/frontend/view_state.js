// @ts-check
/** The view, which is the selected node and the settings: as a small JSON object, and as the fragment of a link. `page/widget.py` has the same fields. */

import { getSections } from "./layout.js";

/**
 * @typedef {import("./controls.js").Settings} Settings
 * @typedef {import("./ground_graph.js").GroundGraph} GroundGraph
 * @typedef {{selected: string|null, unfolded: (number|string)[], head: number|string, states: Record<string, number>|null, min_weight: number, top: number,
 *   all_words: boolean, unfold_heads: boolean, show_weights: boolean, show_special: boolean, highlight: string}} View  `selected` is a node, or several nodes that differ along a plate: `a_0_*_2`
 * @typedef {Partial<View>} ViewState  the fields of a view that differ from those of the initial view
 * @typedef {{graph: GroundGraph, settings: Settings, openSections: Set<string>, selected: number[], highlight: string, attentions: import("./attention.js").PageAttention[], numPlates: number,
 *   description: import("./ground_graph.js").Description}} ViewSource  the part of the explorer that is used
 */

export const RELATIONS = ["parents", "children", "ancestors", "descendants", "blanket"];
/** The setting of each field that is not converted. The theme is a choice of the reader, and zoom and position depend on the window. */
const SETTINGS = /** @type {const} */ ({ states: "states", min_weight: "minWeight", top: "top", all_words: "allWords", unfold_heads: "unfoldHeads", show_weights: "showWeights", show_special: "showSpecial" });

/** @param {unknown} value */
const isObject = (value) => typeof value === "object" && value !== null && !Array.isArray(value);

/** @param {unknown} value @param {unknown} other */
export const isEqual = (value, other) => JSON.stringify(value) === JSON.stringify(other);

/** The name of a section in a view: its step, after the name of its stack. @param {{stack: string, step: number}} section */
const sectionName = ({ stack, step }) => (stack ? `${stack}:${step}` : step);

/** The keys of the sections with these names. @param {(number|string)[]} names */
export const sectionKeys = (names) => names.map((name) => (typeof name === "number" ? `:${name}` : name));

/** The complete view that an explorer shows. @param {ViewSource} source @returns {View} */
export function readView({ graph, settings, openSections, selected, highlight }) {
  const fields = Object.fromEntries(Object.entries(SETTINGS).map(([name, setting]) => [name, settings[setting]]));
  return /** @type {View} */ ({
    selected: selected.length ? graph.nameOf(selected) : null, unfolded: getSections(graph).filter(({ key }) => openSections.has(key)).map(sectionName),
    head: /^\d+$/.test(settings.head) ? Number(settings.head) : settings.head, ...fields, highlight,
  });
}

/** The settings of a view. @param {View} view @returns {Partial<Settings>} */
export function viewSettings(view) {
  return { head: String(view.head), ...Object.fromEntries(Object.entries(SETTINGS).map(([name, setting]) => [setting, /** @type {any} */ (view)[name]])) };
}

/** The fields of a view that differ from those of another. @param {View} view @param {View} initial @returns {ViewState} */
export function compareViews(view, initial) {
  return Object.fromEntries(Object.entries(view).filter(([name, value]) => !isEqual(value, /** @type {any} */ (initial)[name])));
}

/** The view of a state, and the fields that are ignored because they are unknown or have an invalid value. @param {unknown} state @param {View} initial @param {ViewSource} source @returns {{view: View, ignored: string[]}} */
export function parseView(state, initial, source) {
  const checks = new Map(Object.entries(makeChecks(source))), given = isObject(state) ? /** @type {Record<string, any>} */ (state) : {}, ignored = [];
  /** @type {Record<string, any>} */
  const view = { ...initial };
  for (const [name, value] of Object.entries(given)) {
    if (checks.get(name)?.(value)) view[name] = value;
    else ignored.push(`${name} = ${JSON.stringify(value)}`.slice(0, 80));
  }
  const sections = new Set(sectionKeys(view.unfolded));
  view.unfolded = getSections(source.graph).filter(({ key }) => sections.has(key)).map(sectionName);
  if (view.selected === null) view.highlight = "";
  return { view: /** @type {View} */ (view), ignored };
}

/** For each field, whether a value is valid. @param {ViewSource} source @returns {Record<string, (value: any) => boolean>} */
function makeChecks({ graph, attentions, numPlates, description }) {
  const sections = getSections(graph).map(sectionName), heads = description.heads ?? Array.from({ length: Math.max(numPlates, description.plate_sizes.head ?? 1) }, (_, head) => head);
  const choices = new Map(attentions.flatMap((attention) => /** @type {[string, number][]} */ (attention.description.choices)));
  const isBoolean = (/** @type {unknown} */ value) => typeof value === "boolean";
  // A selector that is set has no choices, but its state applies again after `undo`.
  const isSelector = (/** @type {string} */ name) => choices.has(name) || (graph.findNode(name) >= 0 && graph.groups[graph.groupOf(graph.findNode(name))].is_selector);
  const isState = (/** @type {[string, any]} */ [name, state]) => Number.isInteger(state) && state >= 0 && state < (choices.get(name) ?? Infinity) && isSelector(name);
  return {
    selected: (value) => value === null || (typeof value === "string" && graph.findNodes(value).length > 0),
    unfolded: (value) => Array.isArray(value) && value.every((item) => sections.includes(item)),
    head: (value) => value === "mean" || value === "all" || heads.includes(value),
    states: (value) => value === null || (isObject(value) && Object.entries(value).every(isState)),
    min_weight: (value) => typeof value === "number" && value >= 0 && value <= 1, top: (value) => Number.isInteger(value) && value >= 0,
    all_words: isBoolean, unfold_heads: isBoolean, show_weights: isBoolean, show_special: isBoolean, highlight: (value) => value === "" || RELATIONS.includes(value),
  };
}

// links: `#x_3_9`, or with settings `#x_3_9&head=2&unfolded=0,1`; all parts are percent-encoded

/** The fragment of a state; the empty text for the initial view. @param {ViewState} state */
export function formatFragment({ selected, ...settings }) {
  const encode = (/** @type {unknown} */ value) => encodeURIComponent(typeof value === "string" ? value : JSON.stringify(value));
  const parts = Object.entries(settings).map(([name, value]) => `${name}=${Array.isArray(value) ? value.map(encode).join(",") : encode(value)}`);
  return [...(selected ? [encodeURIComponent(selected)] : []), ...parts].map((part, k) => (k ? "&" : "#") + part).join("");
}

/** The state of a fragment; it may have invalid fields. @param {string} fragment @returns {ViewState} */
export function parseFragment(fragment) {
  const fields = fragment.slice(1).split("&").filter(Boolean).map((part) => {
    const position = part.indexOf("="), name = decode(part.slice(0, position)), text = part.slice(position + 1);
    if (position < 0) return ["selected", decode(part)];
    return [name, name === "unfolded" ? text.split(",").filter(Boolean).map(parseValue) : parseValue(text)];
  });
  return Object.fromEntries(fields);
}

/** @param {string} text */
function decode(text) { try { return decodeURIComponent(text); } catch { return text; } }

/** A value of a link: JSON, or else a text. @param {string} text */
function parseValue(text) { try { return JSON.parse(decode(text)); } catch { return decode(text); } }
