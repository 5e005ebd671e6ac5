// @ts-check
/** The handlers of pointer and keyboard. */

import { getSections } from "./layout.js";

/**
 * @typedef {import("./layout.js").Box} Box
 * @typedef {import("./explorer.js").Explorer} Explorer
 */

/** Handle the pointer and the keys until the explorer is removed. @param {Explorer} explorer */
export function addListeners(explorer) {
  const { view, grid, words } = explorer.viewport;
  const boxFrom = (/** @type {Event} */ event) => {
    const element = /** @type {Element} */ (event.target).closest?.(".node");
    return element ? explorer.boxByElement.get(element) ?? null : null;
  };
  const closestBox = (/** @type {MouseEvent} */ event) => { // a finger is less precise than a mouse
    if (!explorer.viewport.isTouch || !/** @type {Element} */ (event.target).closest(".main")) return null;
    const { x, y } = explorer.viewport.toLayout(event), reach = 16 / explorer.viewport.scale;
    const distance = (/** @type {Box} */ box) => Math.hypot(Math.max(0, Math.abs(box.x - x) - box.width / 2), Math.max(0, Math.abs(box.y - y) - box.height / 2));
    return explorer.layout.boxes.reduce((/** @type {Box|null} */ best, box) => (distance(box) < (best ? distance(best) : reach) ? box : best), null);
  };
  grid.addEventListener("pointerover", (event) => { if (!explorer.viewport.isDragged || !event.buttons) explorer.highlightBoxes(boxFrom(event)); });
  grid.addEventListener("pointerleave", () => explorer.highlightBoxes(null));
  words.addEventListener("pointerover", (event) => {
    const text = /** @type {Element} */ (event.target).closest(".word");
    if (!text) return;
    const { word, stack } = /** @type {SVGElement} */ (text).dataset;
    explorer.highlightBoxes(null, explorer.layout.boxes.filter((box) => explorer.graph.groups[box.group].is_state && explorer.graph.groups[box.group].word_stack === stack && box.word === Number(word)));
  });
  words.addEventListener("pointerleave", () => explorer.highlightBoxes(null));
  view.addEventListener("click", (event) => {
    if (explorer.viewport.isDragged) return;
    const target = /** @type {Element} */ (event.target), section = /** @type {SVGElement|null} */ (target.closest("[data-slice-section]"));
    const box = boxFrom(event) ?? closestBox(event);
    if (section) explorer.toggleSection(/** @type {string} */ (section.dataset.sliceSection));
    else if (box) { explorer.focusBox(box); explorer.select(box.ids); } else if (target.closest(".main")) explorer.select([]);
  });
  grid.addEventListener("focusin", (event) => {
    const box = boxFrom(event), byKeys = /** @type {Element} */ (event.target).matches(":focus-visible"); // a box that the pointer focuses must not move
    if (box && byKeys && box !== explorer.focus) explorer.focusBox(box, true);
  });
  (explorer.root.dataset.page === undefined ? explorer.root : document).addEventListener("keydown", (event) => handleKey(explorer, /** @type {KeyboardEvent} */ (event)), { signal: explorer.listeners.signal });
}

/** Handle the keys that the panel lists. @param {Explorer} explorer @param {KeyboardEvent} event */
function handleKey(explorer, event) {
  const target = /** @type {HTMLElement} */ (event.target);
  if (event.altKey || event.ctrlKey || event.metaKey) return;
  if (target.closest("input, select, textarea") && !(event.key === "Escape" && target.closest(".panel"))) return;
  const section = /** @type {any} */ (target.closest("[data-slice-section]"));
  const directions = /** @type {Record<string, [number, number]>} */ ({ ArrowLeft: [-1, 0], ArrowRight: [1, 0], ArrowUp: [0, -1], ArrowDown: [0, 1] });
  const box = explorer.focus ?? explorer.layout.boxes.find((item) => item.row === 0) ?? null;
  const inGrid = target.closest(".stage") !== null || target === document.body || target === explorer.root;
  if (section && (event.key === "Enter" || event.key === " ")) {
    const key = section.dataset.sliceSection;
    explorer.toggleSection(key);
    for (const item of explorer.viewport.slices.querySelectorAll("[data-slice-section]")) if (/** @type {any} */ (item).dataset.sliceSection === key) /** @type {any} */ (item).focus();
  } else if (directions[event.key] && inGrid) explorer.focusBox(explorer.focus && box ? explorer.boxInDirection(box, ...directions[event.key]) ?? box : box);
  else if (event.key === "Enter" && inGrid && box) explorer.select(box.ids);
  else if (event.key === "+" || event.key === "=") explorer.runCommand("in");
  else if (event.key === "-") explorer.runCommand("out");
  else if (event.key === "0") explorer.runCommand("fit");
  else if (event.key === "h" && explorer.hasPlates) explorer.updateSettings({ unfoldHeads: !explorer.settings.unfoldHeads });
  else if (event.key === "/") /** @type {HTMLElement|null} */ (explorer.toolbar.querySelector("[name=search]"))?.focus();
  else if (event.key === "f" && box) {
    const group = explorer.graph.groups[box.group], steps = group.is_state ? [group.slice ?? 0, (group.slice ?? 1) - 1] : [group.step];
    const key = steps.map((step) => `${group.stack}:${step}`).find((item) => getSections(explorer.graph).some((section) => section.key === item));
    if (key) { explorer.toggleSection(key); explorer.focusBox(explorer.boxByNode?.get(box.ids[0]) ?? explorer.focus); }
  } else if (event.key === "Escape") {
    const selected = explorer.boxByNode.get(explorer.selected[0]), isInPanel = explorer.panel.contains(target);
    explorer.select([]);
    if (isInPanel && selected) explorer.elements.get(selected)?.focus({ preventScroll: true });
  } else return;
  event.preventDefault();
}
