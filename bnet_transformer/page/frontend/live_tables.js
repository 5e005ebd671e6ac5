// @ts-check
/** The tables of the live page: the lens, and the effects of patches; words are rows and slices are columns. */

import { htmlElement } from "./elements.js";

const MAX_LARGEST = 3;
const MAX_LABELLED_COLUMNS = 12; // with more columns, a column is narrow and only every fifth one has a label

/** A number with its sign. @param {number} value */
const signed = (value) => `${value < 0 ? "−" : "+"}${Math.abs(value).toPrecision(3)}`;

/** A table with a row for each word. @param {string} label @param {string[]} words @param {string[]} columns @param {boolean} isDense @param {(row: number, column: number) => HTMLElement} renderCell */
function renderTable(label, words, columns, isDense, renderCell) {
  const head = htmlElement("thead", {}, htmlElement("tr", {}, htmlElement("th", { scope: "col" }, "word"), ...columns.map((name, k) => htmlElement("th", { scope: "col", "aria-label": name }, isDense && k % 5 ? "" : name))));
  const rows = words.map((word, row) => htmlElement("tr", {}, htmlElement("th", { scope: "row" }, htmlElement("span", { class: "word-index" }, String(row)), htmlElement("bdi", {}, word)), ...columns.map((_, column) => renderCell(row, column))));
  return htmlElement("div", { class: "scroller", tabindex: 0, role: "region", "aria-label": label }, htmlElement("table", { class: isDense ? "grid-table dense" : "grid-table" }, htmlElement("caption", { class: "unseen" }, `${label}: words are rows, slices are columns`), head, htmlElement("tbody", {}, ...rows)));
}

/** A cell whose colour shows a fraction from -1 to 1, and which selects a node. @param {string} text @param {string} label @param {number} fraction @param {string|null} name @param {number} weight @param {(name: string) => void} onSelect */
function renderCell(text, label, fraction, name, weight, onSelect) {
  const button = htmlElement("button", { type: "button", class: "cell", "data-name": name ?? "", "data-weight": weight, "aria-label": label, title: label, disabled: name === null, onclick: () => onSelect(name ?? "") }, text);
  const cell = htmlElement("td", { class: fraction < 0 ? "negative" : "positive" }, button);
  cell.style.setProperty("--fraction", String(Math.abs(fraction)));
  return cell;
}

/** The most probable state of the readout for each hidden state. @param {any} lens @param {(name: string) => void} onSelect */
export function renderLens(lens, onSelect) {
  const table = renderTable(`lens of ${lens.readout}`, lens.words, lens.states, false, (word, slice) => {
    const label = lens.labels[slice][word], probability = lens.probabilities[slice][word], name = `${lens.states[slice]}_${word}`;
    return renderCell(label, `${name}: “${label}”, P = ${probability.toFixed(3)}`, probability, name, probability, onSelect);
  });
  return [table, ...lens.notes.map((/** @type {string} */ note) => htmlElement("p", { class: "small" }, note))];
}

/** Whether a place of the table has a node and a finite effect. @param {string|null|undefined} name @param {number|null|undefined} effect */
const isCell = (name, effect) => typeof name === "string" && typeof effect === "number";

/** A value of the metric; JSON has no infinite numbers. @param {number|null} value */
const finite = (value) => (value === null ? "not finite" : value.toPrecision(3));

/** The effect of each patch on the metric. @param {any} patch @param {(name: string) => void} onSelect */
export function renderPatch(patch, onSelect) {
  /** @type {{name: string, effect: number}[]} */
  const cells = patch.names.flatMap((/** @type {(string|null)[]} */ row, /** @type {number} */ slice) => row.flatMap((name, word) => (isCell(name, patch.effects[slice][word]) ? [{ name, effect: patch.effects[slice][word] }] : [])));
  const greatest = Math.max(...cells.map(({ effect }) => Math.abs(effect)), 1e-300);
  const words = patch.words.map((/** @type {string} */ word, /** @type {number} */ k) => (word === patch.other_words[k] ? word : `${word} ← ${patch.other_words[k]}`));
  const table = renderTable(`effects of patches of ${patch.role}`, words, patch.slices, patch.slices.length > MAX_LABELLED_COLUMNS, (word, slice) => {
    const name = patch.names[slice][word], effect = patch.effects[slice][word];
    if (!isCell(name, effect)) return htmlElement("td", {});
    return renderCell("", `${name}: ${signed(effect)}`, effect / greatest, name.split(/[,\s]/)[0], effect, onSelect);
  });
  const largest = [...cells].sort((a, b) => Math.abs(b.effect) - Math.abs(a.effect)).slice(0, MAX_LARGEST);
  return [
    htmlElement("p", { class: "small", "data-fact": "metric" }, `${patch.metric}: ${finite(patch.before)} here, ${finite(patch.after)} in the other sentence. A cell is the change if only this node has its value of the other sentence.`),
    htmlElement("p", { class: "small" }, "Largest: ", ...largest.flatMap(({ name, effect }) => [htmlElement("button", { type: "button", class: "name", "data-name": name, onclick: () => onSelect(name) }, name), ` ${signed(effect)} `])),
    table,
  ];
}
