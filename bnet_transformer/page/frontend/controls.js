// @ts-check
/** The toolbar: form elements that call `updateSettings` or `runCommand`. */

import { htmlElement } from "./elements.js";

/**
 * @typedef {{head: string, states: Record<string, number>|null, minWeight: number, top: number, allWords: boolean, unfoldHeads: boolean, showWeights: boolean, showSpecial: boolean, theme: string}} Settings
 * @typedef {{settings: Settings, numPlates: number, hasPlates: boolean, heads: number[]|null, choices: [string, number][], hasMean: boolean, hasAttention: boolean, hasWeights: boolean, hasSpecial: boolean, toolbar: HTMLElement,
 *   updateSettings: (changes: Partial<Settings>) => void, runCommand: (command: string, value?: string) => void}} ControlOptions
 */

/** A control with its label. @param {string} text @param {...(Node|string)} children */
const labelledField = (text, ...children) => htmlElement("label", { class: "field" }, htmlElement("span", {}, text), ...children);

/** A drop-down list. @param {string} name @param {[string, string][]} options @param {string} chosen @param {(value: string) => void} change */
function selectField(name, options, chosen, change) {
  const element = /** @type {HTMLSelectElement} */ (htmlElement("select", { name }, ...options.map(([value, text]) => htmlElement("option", { value, selected: value === chosen }, text))));
  element.addEventListener("change", () => change(element.value));
  return element;
}

/** A check box with its label, and its purpose as a tip. @param {string} name @param {string} text @param {string} purpose @param {boolean} isChecked @param {(isChecked: boolean) => void} change */
function checkbox(name, text, purpose, isChecked, change) {
  const element = /** @type {HTMLInputElement} */ (htmlElement("input", { type: "checkbox", name, title: purpose, checked: isChecked }));
  element.addEventListener("change", () => change(element.checked));
  return htmlElement("label", { class: "field check" }, element, htmlElement("span", {}, text));
}

/** A button that runs a command. @param {string} command @param {string} text @param {string} label @param {(command: string) => void} runCommand */
const commandButton = (command, text, label, runCommand) => htmlElement("button", { type: "button", "data-command": command, "aria-label": label, title: label, onclick: () => runCommand(command) }, text);

/** The elements of the toolbar that apply to the sentence. @param {ControlOptions} options @returns {HTMLElement[]} */
export function renderControls(options) {
  const { settings, updateSettings, runCommand, toolbar } = options, elements = [];
  if (options.numPlates > 1) {
    const heads = Array.from({ length: options.numPlates }, (_, k) => options.heads?.[k] ?? k);
    elements.push(labelledField("head", selectField("head", [["mean", "mean"], ["all", "all"], ...heads.map((head) => /** @type {[string, string]} */ ([String(head), String(head)]))], settings.head, (head) => updateSettings({ head }))));
  }
  if (options.choices.length) elements.push(...renderStateSelectors(options));
  if (options.hasAttention) {
    const output = htmlElement("output", {}, settings.minWeight.toFixed(2));
    const slider = /** @type {HTMLInputElement} */ (htmlElement("input", { type: "range", name: "min_weight", min: 0, max: 1, step: 0.01, value: settings.minWeight, "aria-label": "minimum P(j | i) to draw" }));
    slider.addEventListener("input", () => { output.textContent = Number(slider.value).toFixed(2); updateSettings({ minWeight: Number(slider.value) }); });
    const top = /** @type {HTMLInputElement} */ (htmlElement("input", { type: "number", name: "top", min: 1, max: 999, value: settings.top || "", placeholder: "all", "aria-label": "number of strongest reads to draw for each word" }));
    top.addEventListener("input", () => updateSettings({ top: Math.max(0, Math.floor(Number(top.value)) || 0) }));
    elements.push(labelledField("P ≥", slider, output), labelledField("top", top), checkbox("all_words", "all words", "draw the reads of all words", settings.allWords, (allWords) => updateSettings({ allWords })));
  }
  if (options.hasPlates) elements.push(checkbox("unfold_heads", "unfold heads", "a row for each head", settings.unfoldHeads, (unfoldHeads) => updateSettings({ unfoldHeads })));
  if (options.hasWeights) elements.push(checkbox("show_weights", "weights", "show weights and selectors", settings.showWeights, (showWeights) => updateSettings({ showWeights })));
  if (options.hasSpecial) elements.push(checkbox("show_special", "special", "show special tokens, such as [CLS]", settings.showSpecial, (showSpecial) => updateSettings({ showSpecial })));
  const search = /** @type {HTMLInputElement} */ (htmlElement("input", { type: "search", name: "search", placeholder: "find a word", "aria-label": "find a word", autocomplete: "off" }));
  search.addEventListener("input", () => runCommand("search", search.value));
  search.addEventListener("keydown", (event) => { if (event.key === "Enter") runCommand("next", search.value); if (event.key === "Escape") { search.value = ""; runCommand("search", ""); search.blur(); } });
  const theme = selectField("theme", [["auto", "auto"], ["light", "light"], ["dark", "dark"]], settings.theme, (name) => updateSettings({ theme: name }));
  theme.setAttribute("aria-label", "colours");
  // In a narrow window, a button folds the settings.
  const toggle = htmlElement("button", { type: "button", class: "fold-settings", "data-command": "settings", "aria-label": "settings", title: "settings", "aria-expanded": toolbar.classList.contains("open"),
    onclick: () => toggle.setAttribute("aria-expanded", String(toolbar.classList.toggle("open"))) }, "☰");
  return [toggle, htmlElement("div", { class: "settings" }, ...elements), htmlElement("div", { class: "tools" }, search,
    htmlElement("span", { class: "group" }, commandButton("fold", "▸", "fold all slices", runCommand), commandButton("unfold", "▾", "unfold all slices", runCommand)),
    htmlElement("span", { class: "group" }, commandButton("out", "−", "zoom out", runCommand), commandButton("fit", "fit", "fit to the window; again: show the whole net", runCommand), commandButton("in", "+", "zoom in", runCommand)),
    htmlElement("div", { class: "settings" }, htmlElement("span", { class: "group" }, commandButton("svg", "SVG", "save this view as SVG", runCommand), commandButton("png", "PNG", "save this view as PNG", runCommand)), theme))];
}

/** Selectors for the states of the open choices, or the posterior mean. @param {ControlOptions} options */
function renderStateSelectors(options) {
  const { settings, updateSettings, choices } = options, isSingle = choices.length === 1;
  const meanOption = /** @type {[string, string][]} */ (options.hasMean ? [["mean", "posterior mean"]] : []);
  const stateOptions = isSingle ? Array.from({ length: choices[0][1] }, (_, k) => /** @type {[string, string]} */ ([String(k), `${choices[0][0]} = ${k}`])) : [/** @type {[string, string]} */ (["set", "states"])];
  const selected = settings.states === null ? "mean" : isSingle ? String(settings.states[choices[0][0]] ?? 0) : "set";
  const elements = [labelledField(isSingle ? choices[0][0] : "selectors", selectField("states", [...meanOption, ...stateOptions], selected, (value) => (
    updateSettings({ states: value === "mean" ? null : isSingle ? { [choices[0][0]]: Number(value) } : Object.fromEntries(choices.map(([name]) => [name, 0])) }))))];
  if (!isSingle && settings.states) for (const [name, size] of choices)
    elements.push(labelledField(name, selectField(`state-${name}`, Array.from({ length: size }, (_, k) => [String(k), String(k)]), String(settings.states[name] ?? 0), (value) => updateSettings({ states: { ...settings.states, [name]: Number(value) } }))));
  return elements;
}
