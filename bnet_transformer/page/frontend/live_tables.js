// @ts-check
/** The tables of the live page: the lens, and the effects of patches; words are rows and slices are columns. */

import { htmlElement } from "./elements.js";

const MAX_LARGEST = 3;
const MAX_NUMBERED_COLUMNS = 4; // with more columns, the numbers of a table are not in its cells
const MAX_LABELLED_COLUMNS = 12; // with more columns, a column is narrow and only every fifth one has a label

/** A function from a number to its text with a sign. The greatest number has three digits, and all have its last decimal place; what is zero there is "0". @param {number} greatest  the greatest absolute value */
function makeFormat(greatest) {
  const exponent = Math.floor(Math.log10(greatest)), decimals = Math.max(0, 2 - exponent);
  return (/** @type {number} */ value) => {
    const size = Math.abs(value);
    if (size < 0.5 * 10 ** (exponent - 2)) return "0";
    return `${value < 0 ? "−" : "+"}${decimals > 5 ? size.toExponential(Math.max(0, Math.floor(Math.log10(size)) - exponent + 2)) : size.toFixed(decimals)}`;
  };
}

/** A table with a row for each word, and a line with the number of the cell that is pointed at or focused. @param {string} label @param {string[]} words @param {string[]} columns @param {boolean} isDense @param {(row: number, column: number) => HTMLElement} renderCell */
function renderTable(label, words, columns, isDense, renderCell) {
  const head = htmlElement("thead", {}, htmlElement("tr", {}, htmlElement("th", { scope: "col" }, "word"), ...columns.map((name, k) => htmlElement("th", { scope: "col", "aria-label": name }, isDense && k % 5 ? "" : name))));
  const rows = words.map((word, row) => htmlElement("tr", {}, htmlElement("th", { scope: "row" }, htmlElement("span", { class: "word-index" }, String(row)), htmlElement("bdi", {}, word)), ...columns.map((_, column) => renderCell(row, column))));
  const scroller = htmlElement("div", { class: "scroller", tabindex: 0, role: "region", "aria-label": label }, htmlElement("table", { class: isDense ? "grid-table dense" : "grid-table" }, htmlElement("caption", { class: "unseen" }, `${label}: words are rows, slices are columns`), head, htmlElement("tbody", {}, ...rows)));
  const reading = htmlElement("p", { class: "small screen", "data-fact": "cell", "aria-hidden": "true" }, "Point at a cell to read its number."); // a screen reader reads the label of the cell
  for (const event of ["pointerover", "focusin"]) scroller.addEventListener(event, ({ target }) => {
    const cell = target instanceof Element ? target.closest(".cell") : null;
    if (cell) reading.textContent = cell.getAttribute("aria-label");
  });
  return [scroller, reading];
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
  return [...table, ...lens.notes.map((/** @type {string} */ note) => htmlElement("p", { class: "small" }, note))];
}

/** Whether a place of the table has a node and a finite effect. @param {string|null|undefined} name @param {number|null|undefined} effect */
const isCell = (name, effect) => typeof name === "string" && typeof effect === "number";

/** A value of the metric; JSON has no infinite numbers. @param {number|null} value */
const finite = (value) => (value === null ? "not finite" : value.toPrecision(3));

/** The effect of each patch on the metric. @param {any} patch @param {(name: string) => void} onSelect */
export function renderPatch(patch, onSelect) {
  /** @type {{name: string, effect: number}[]} */
  const cells = patch.names.flatMap((/** @type {(string|null)[]} */ row, /** @type {number} */ slice) => row.flatMap((name, word) => (isCell(name, patch.effects[slice][word]) ? [{ name, effect: patch.effects[slice][word] }] : [])));
  const greatest = Math.max(...cells.map(({ effect }) => Math.abs(effect)), 1e-300), format = makeFormat(greatest);
  const words = patch.words.map((/** @type {string} */ word, /** @type {number} */ k) => (word === patch.other_words[k] ? word : `${word} ← ${patch.other_words[k]}`));
  const table = renderTable(`effects of patches of ${patch.role}`, words, patch.slices, patch.slices.length > MAX_LABELLED_COLUMNS, (word, slice) => {
    const name = patch.names[slice][word], effect = patch.effects[slice][word];
    if (!isCell(name, effect)) return htmlElement("td", {});
    return renderCell(patch.slices.length > MAX_NUMBERED_COLUMNS ? "" : format(effect), `${name}: ${format(effect)}`, effect / greatest, name.split(/[,\s]/)[0], effect, onSelect);
  });
  const largest = cells.filter(({ effect }) => format(effect) !== "0").sort((a, b) => Math.abs(b.effect) - Math.abs(a.effect)).slice(0, MAX_LARGEST);
  return [
    htmlElement("p", { class: "small", "data-fact": "metric" }, `${patch.metric}: ${finite(patch.before)} here, ${finite(patch.after)} in the other sentence. A cell is the change if only this node has its value of the other sentence.`),
    htmlElement("p", { class: "small" }, largest.length ? "Largest: " : "No patch changes it.", ...largest.flatMap(({ name, effect }) => [htmlElement("button", { type: "button", class: "name", "data-name": name, onclick: () => onSelect(name) }, name), ` ${format(effect)} `])),
    ...table,
  ];
}
