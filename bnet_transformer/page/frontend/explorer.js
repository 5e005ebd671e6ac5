// @ts-check
/** The explorer of one sentence: its settings, its drawing and its view. */

import { PageAttention } from "./attention.js";
import { AttentionLines } from "./attention_lines.js";
import { renderControls } from "./controls.js";
import { htmlElement, keepFocus, keepTyped, nodeKey, renderChange, renderLineBatches, renderLines, renderNode, replaceContent, svgElement } from "./elements.js";
import { downloadBlob, svgToPng, viewToSvg } from "./export.js";
import { GroundGraph } from "./ground_graph.js";
import { addListeners } from "./input.js";
import { computeLayout, getSections } from "./layout.js";
import { renderNodeFacts, renderOverview } from "./panel.js";
import { Printout } from "./printout.js";
import { compareViews, isEqual, parseView, readView, sectionKeys, viewSettings } from "./view_state.js";
import { Viewport } from "./viewport.js";

/**
 * @typedef {import("./layout.js").Box} Box
 * @typedef {import("./elements.js").Line} Line
 * @typedef {import("./controls.js").Settings} Settings
 * @typedef {{description: import("./ground_graph.js").Description, buffer: Uint8Array}} PageData
 */

const MAX_LINES = 20_000; // lines of attention that are drawn at once
const MAX_UNFOLDED_ARROWS = 500; // a sentence with more arrows before interventions is folded initially, so that a link shows the same slices in each state
const REPORT_DELAY = 200; // milliseconds without another change of a setting, until the host is informed
const MAX_FREE_WORDS = 24; // for a sentence with more words, only the strongest entries of each word are drawn initially

/** Draw a sentence into an element; a `host` with `do` makes it live, and one with `handleState` is informed of changes of the view. @param {HTMLElement} root @param {PageData} data @param {any} [host] */
export function mount(root, data, host) {
  const explorer = new Explorer(root, data, host ?? null);
  return { update: (/** @type {PageData} */ next) => keepTyped(explorer.panel, () => explorer.setData(next)), getState: () => explorer.getState(), setState: (/** @type {unknown} */ state) => explorer.setState(state), select: (/** @type {string} */ name) => explorer.selectName(name), refreshPanel: () => keepTyped(explorer.panel, () => explorer.renderPanel()), announce: (/** @type {string} */ text) => { explorer.status.textContent = text; }, remove: () => explorer.remove() };
}

export class Explorer extends AttentionLines {
  /** @type {Set<number>} */ interventions = new Set();
  /** @type {Set<number>} */ evidence = new Set();
  /** @type {Map<Box, SVGElement>} */ elements = new Map();
  /** @type {Map<Element, Box>} */ boxByElement = new Map();
  /** @type {{key: string, row: number, element: SVGElement}[]} the nodes in the order of their boxes */ renderedNodes = [];
  /** @type {Box|null} */ focus = null;
  /** @type {number[]} */ selected = [];
  /** @type {Map<number, string>} the names of single nodes with their words, while the structure is the same */ namesByNode = new Map();
  structure = "";
  background = svgElement("g", { class: "back", "aria-hidden": "true" });
  foreground = svgElement("g", { class: "front", "aria-hidden": "true" });
  listeners = new AbortController();
  numPlates = 1;
  hasPlates = false;
  highlight = "";
  query = "";
  matchIndex = 0;
  /** @type {import("./view_state.js").View} before all changes */ initialView = /** @type {any} */ (undefined);
  reportedState = "{}"; // the last state, as text, that the host knows
  timer = 0;

  /** @param {HTMLElement} root @param {PageData} data @param {any} host */
  constructor(root, data, host) {
    super();
    this.root = root;
    this.handleState = host?.handleState ?? (() => {});
    this.host = host?.do && { ...host, do: (/** @type {any} */ content) => this.awaitHost(host.do(content)), undo: (/** @type {any} */ content) => this.awaitHost(host.undo(content)) };
    this.viewport = new Viewport(root.dataset.page !== undefined);
    this.toolbar = htmlElement("div", { class: "toolbar", role: "toolbar", "aria-label": "display settings" });
    this.panel = htmlElement("aside", { class: "panel", "aria-label": "facts", tabindex: 0 });
    this.status = htmlElement("div", { class: "status", role: "status", "aria-live": "polite" });
    this.footer = htmlElement("div", { class: "footer" });
    root.classList.add("bnet");
    this.frame = htmlElement("div", { class: "frame" }, this.toolbar, this.viewport.view, this.panel, this.footer, this.status);
    root.replaceChildren(this.frame);
    this.setData(data);
    this.printout = new Printout(this);
    addListeners(this);
    this.resizeObserver = new ResizeObserver(() => this.viewport.resize());
    this.resizeObserver.observe(this.viewport.view);
  }

  remove() {
    this.listeners.abort();
    clearTimeout(this.timer);
    this.printout.remove();
    this.resizeObserver.disconnect();
    this.root.replaceChildren();
  }

  /** Wait for the host, and show its error if it fails; a host that reports its errors itself answers false. @param {Promise<void|boolean>|void} answer */
  async awaitHost(answer) {
    this.root.classList.add("running");
    this.status.textContent = "";
    try { if ((await answer) !== false) this.status.textContent ||= "done"; } catch (error) {
      this.footer.textContent = this.status.textContent = error instanceof Error ? error.message : String(error);
    } finally { this.root.classList.remove("running"); }
  }

  /** Show a description, initially or after a `do`; settings and selection do not change. @param {PageData} data */
  setData({ description, buffer }) {
    this.description = description;
    const selectedName = this.selected.length ? this.graph.nameOf(this.selected) : "";
    this.graph = new GroundGraph(description, buffer);
    this.attentions = description.attention.map((/** @type {any} */ item) => new PageAttention(this.graph, item, buffer, description.quantization_steps));
    this.interventions = new Set(Object.keys(description.interventions).map((name) => this.graph.findNode(name)));
    this.evidence = new Set(Object.keys(description.evidence).map((name) => this.graph.findNode(name)));
    const words = this.graph.stacks.reduce((sum, stack) => sum + stack.words.length, 0);
    if (!this.settings) {
      const isUnfolded = description.detail === "nodes" || (description.detail === null && description.declared_arrows <= MAX_UNFOLDED_ARROWS) || !this.attentions.length || !this.graph.groups.some((group) => group.is_state);
      this.openSections = new Set(getSections(this.graph).filter((section) => isUnfolded || (words <= MAX_FREE_WORDS && section.label.endsWith("output") && section.groups.length <= 2)).map((section) => section.key));
      const hasNoMean = this.attentions.length && this.attentions.every((attention) => attention.description.choices.length && !attention.description.has_mean);
      this.settings = { head: "mean", states: hasNoMean ? {} : null, minWeight: words <= MAX_FREE_WORDS ? 0.05 : 0.02, top: words <= MAX_FREE_WORDS ? 0 : 2, allWords: true, unfoldHeads: false, showWeights: true, showSpecial: description.special?.is_shown ?? true, theme: description.theme };
    }
    this.hideWords();
    this.selected = this.graph.findNodes(selectedName);
    this.initialView ??= readView(this);
    this.#renderControls();
    this.draw();
  }

  /** Hide the special tokens, if the settings say so: words that are not shown have no boxes, lines or rows of tables. */
  hideWords() {
    for (const stack of this.graph.stacks) stack.hidden = this.settings.showSpecial ? [] : stack.special;
    for (const attention of this.attentions) attention.updateHiddenWords(this.graph);
  }

  /** Render the toolbar, whose elements depend on description and settings. */
  #renderControls() {
    /** @type {Map<string, number>} */
    const choices = new Map(this.attentions.flatMap((attention) => attention.description.choices));
    const numPlates = Math.max(1, ...this.attentions.map((attention) => attention.description.num_plates));
    this.numPlates = numPlates;
    this.hasPlates = this.graph.groups.some((group, index) => group.word_stack !== null && this.graph.numPlates(index) > 1);
    this.root.dataset.theme = this.settings.theme;
    keepFocus(this.toolbar, () => this.toolbar.replaceChildren(...renderControls({
      hasSpecial: Boolean(this.description.special), toolbar: this.toolbar,
      settings: this.settings, numPlates, hasPlates: this.hasPlates, heads: this.description.heads, choices: [...choices], hasAttention: this.attentions.length > 0,
      hasMean: this.attentions.some((attention) => attention.description.has_mean), hasWeights: this.graph.groups.some((group) => group.depth > 0),
      updateSettings: (changes) => this.updateSettings(changes), runCommand: (command, value) => this.runCommand(command, value),
    })));
  }

  /** Change settings and draw what depends on them. @param {Partial<Settings>} changes */
  updateSettings(changes) {
    Object.assign(this.settings, changes);
    this.reportState(REPORT_DELAY);
    if ("theme" in changes) { this.root.dataset.theme = this.settings.theme; return; }
    if ("states" in changes || "unfoldHeads" in changes) this.#renderControls();
    if ("showSpecial" in changes) this.hideWords();
    if ("showSpecial" in changes || "head" in changes || "unfoldHeads" in changes || "showWeights" in changes) this.draw();
    else { this.drawLines(); this.highlightBoxes(this.focus); if ("states" in changes) this.renderPanel(); }
  }

  // drawing

  /** Compute the layout and draw everything; this runs after unfolding, but not while panning. */
  draw() {
    const { graph, settings } = this, plate = settings.head === "mean" || settings.head === "all" ? settings.head : Number(settings.head);
    this.layout = computeLayout(graph, { openSections: this.openSections, showWeights: settings.showWeights, unfoldHeads: settings.unfoldHeads, plate });
    for (const map of [this.boxByNode, this.boxesByGroup, this.elements, this.boxByElement]) map.clear();
    for (const box of this.layout.boxes) {
      for (const id of box.ids) this.boxByNode.set(id, box);
      const boxes = this.boxesByGroup.get(box.group);
      if (boxes) boxes.push(box); else this.boxesByGroup.set(box.group, [box]);
    }
    const previous = this.focus, isFocused = this.viewport.grid.contains(this.root.ownerDocument.activeElement);
    this.#drawNodes();
    this.viewport.setLayout(this.layout, graph);
    this.focus = previous ? this.boxByNode.get(previous.ids[0]) ?? null : null;
    const first = this.focus ?? this.layout.boxes.find((box) => box.row === 0) ?? this.layout.boxes[0];
    if (first) this.#setTabStop(first);
    if (first && isFocused && !this.viewport.grid.contains(this.root.ownerDocument.activeElement)) this.elements.get(first)?.focus({ preventScroll: true });
    this.drawLines();
    this.highlightBoxes(this.focus);
    this.renderPanel();
  }

  /** Draw the nodes. If the boxes have the rows of the last drawing, as after a change of values, only what differs is replaced, and the keyboard's focus stays. */
  #drawNodes() {
    const { graph, layout: { boxes, hasLabels } } = this, previous = this.renderedNodes;
    const isSameGrid = previous.length > 0 && previous.length === boxes.length && boxes.every((box, k) => box.row === previous[k].row);
    const structure = JSON.stringify([graph.groups.map(({ name, dims }) => [name, dims]), graph.stacks.map(({ words }) => words)]);
    if (structure !== this.structure) this.namesByNode.clear();
    this.structure = structure;
    this.renderedNodes = boxes.map((box, k) => {
      const name = box.ids.length > 1 ? this.describeBox(box) : this.namesByNode.get(box.ids[0]) ?? this.describeBox(box);
      if (box.ids.length === 1) this.namesByNode.set(box.ids[0], name);
      const key = nodeKey(graph, box, this.interventions, this.evidence, hasLabels, name);
      const element = isSameGrid ? previous[k].element : renderNode(graph, box, this.interventions, this.evidence, hasLabels, name);
      if (isSameGrid && previous[k].key !== key) replaceContent(element, renderNode(graph, box, this.interventions, this.evidence, hasLabels, name));
      renderChange(element, box, this.description.relative_changes?.[String(box.group)]?.[box.word ?? 0] ?? null);
      this.elements.set(box, element);
      this.boxByElement.set(element, box);
      return { key, row: box.row, element };
    });
    if (isSameGrid) return;
    /** @type {Map<number, SVGElement[]>} */
    const rows = new Map();
    for (const { row, element } of this.renderedNodes) {
      const elements = rows.get(row);
      if (elements) elements.push(element); else rows.set(row, [element]);
    }
    const cells = svgElement("g", { class: "nodes", role: "presentation" }, ...[...rows].sort((a, b) => a[0] - b[0]).map(([, elements]) => svgElement("g", { role: "row" }, ...elements)));
    this.viewport.grid.replaceChildren(this.background, this.foreground, cells);
  }

  /** Make a box the one that the Tab key reaches. @param {Box} box */
  #setTabStop(box) {
    const next = this.elements.get(box); // setting the attribute of an element with the focus would compute the layout, even if nothing changes
    for (const element of this.viewport.grid.querySelectorAll('[tabindex="0"]')) if (element !== next) element.setAttribute("tabindex", "-1");
    if (next?.getAttribute("tabindex") !== "0") next?.setAttribute("tabindex", "0");
  }

  /** Draw the attention of all words, and the arrows of unfolded slices. */
  drawLines() {
    /** @type {Line[]} */
    let lines = [];
    const arrows = this.buildArrows(), { minWeight, top, allWords } = this.settings;
    if (allWords) for (const attention of this.attentions) {
      if (arrows && this.openSections.has(this.sectionKey(attention))) continue;
      const buildLine = this.makeLineBuilder(attention);
      for (const view of this.getViews(attention)) for (const entry of attention.strongestEntries(view, minWeight, top || Infinity)) {
        const line = buildLine(entry, "source");
        if (line) lines.push(line);
      }
    }
    const numLines = lines.length;
    if (numLines > MAX_LINES) lines = lines.sort((a, b) => (b.weight ?? 0) - (a.weight ?? 0)).slice(0, MAX_LINES);
    const summary = lines.length < numLines ? `Showing the ${MAX_LINES.toLocaleString("en")} strongest of ${numLines.toLocaleString("en")} reads` : allWords && this.attentions.length ? `Showing ${numLines.toLocaleString("en")} reads with P(j | i) ≥ ${minWeight.toFixed(2)}${top ? `, the ${top} strongest of each word` : ""}` : this.attentions.length ? "Point at a word to show the words that it attends to" : "";
    const arrowNote = arrows === null ? "In unfolded slices, only the arrows of the selected node are drawn" : arrows.some((line) => line.weight !== null) ? `Width and contrast of k and v arrows: P(j | i) ≥ ${minWeight.toFixed(2)}` : "";
    this.footer.textContent = [numLines || !arrows?.length ? summary : "", arrowNote].filter(Boolean).map((text) => `${text}.`).join(" ");
    if (this.settings.head === "all") this.footer.append(...this.renderHeadLegend());
    this.footer.dataset.reads = String(lines.length);
    this.background.replaceChildren(...renderLineBatches([...(arrows ?? []), ...lines], this.description.line_style));
  }

  /** The colour of each head. */
  renderHeadLegend() {
    return Array.from({ length: this.numPlates }, (_, plate) => htmlElement("span", { class: `key hue-head-${plate % 8}` }, `head ${this.description.heads?.[plate] ?? plate}`));
  }

  /** Show the lines of some boxes; without boxes, those of the selected box. @param {Box|null} box @param {Box[]} [boxes] */
  highlightBoxes(box, boxes) {
    const selectedBox = this.selected.length ? this.boxByNode.get(this.selected[0]) ?? null : null;
    const highlighted = boxes ?? (box ? [box] : selectedBox ? [selectedBox] : []);
    const lines = highlighted.flatMap((box) => this.linesOfBox(box, box === selectedBox));
    this.foreground.replaceChildren(...renderLines(lines, this.description.line_style, this.graph));
    this.viewport.grid.classList.toggle("pointing", highlighted.length > 0);
    for (const element of this.viewport.grid.querySelectorAll(".node.focused, .node.connected")) element.classList.remove("focused", "connected");
    for (const box of highlighted) this.elements.get(box)?.classList.add("focused");
    for (const line of lines) for (const end of [line.source, line.target]) if (!highlighted.includes(end)) this.elements.get(end)?.classList.add("connected");
  }

  /** Render the panel of the selected node, or of the sentence; a focused control keeps the focus. */
  renderPanel() { keepFocus(this.panel, () => this.#renderPanel()); }

  #renderPanel() {
    const ids = this.selected, { graph, description } = this;
    for (const element of this.viewport.grid.querySelectorAll(".node.selected")) { element.classList.remove("selected"); element.removeAttribute("aria-selected"); }
    const relatives = !ids.length ? [] : [
      ...(ids.length === 1 ? [{ relation: "parents", ids: graph.parents(ids[0]) }, { relation: "children", ids: graph.children(ids[0]) }] : []),
      { relation: "ancestors", ids: graph.ancestors(ids) }, { relation: "descendants", ids: graph.descendants(ids) },
      ...(ids.length === 1 ? [{ relation: "blanket", ids: graph.blanket(ids[0]) }] : [])];
    const highlighted = new Set(relatives.find(({ relation }) => relation === this.highlight)?.ids ?? []);
    this.viewport.grid.classList.toggle("marking", this.highlight !== "" && ids.length > 0);
    for (const element of this.viewport.grid.querySelectorAll(".node.marked")) element.classList.remove("marked");
    if (highlighted.size) for (const [box, element] of this.elements) if (box.ids.some((id) => highlighted.has(id))) element.classList.add("marked");
    if (!ids.length) { this.panel.replaceChildren(...this.#addHostSections(renderOverview(description, this.host, this.settings.showSpecial), -1)); return; }
    const box = this.boxByNode.get(ids[0]), element = box && this.elements.get(box);
    if (element) { element.classList.add("selected"); element.setAttribute("aria-selected", "true"); }
    const backButton = htmlElement("button", { type: "button", class: "quiet close", "aria-label": "back to the sentence", onclick: () => this.select([]) }, "×");
    this.panel.replaceChildren(backButton, ...this.#addHostSections(renderNodeFacts({
      description, graph, ids, highlight: this.highlight, host: this.host, tables: this.attentionTables(ids), announce: (text) => { this.status.textContent = text; },
      relatives,
      onHighlight: (relation) => { this.highlight = relation; this.renderPanel(); this.reportState(); }, onSelect: (name) => this.selectName(name),
      onHead: (head) => { this.updateSettings({ head: String(head) }); this.#renderControls(); },
    }), 2));
  }

  /** Insert the sections of the host at a position of the panel. @param {HTMLElement[]} elements @param {number} position */
  #addHostSections(elements, position) {
    elements.splice(position, 0, ...(this.host?.renderSections?.(this.description, this.selected.map((id) => this.graph.nodeName(id))) ?? []));
    return elements;
  }

  /** Select a node by its name, or several, and move it into view. @param {string} name */
  selectName(name) {
    const ids = this.graph.findNodes(name), box = this.boxByNode.get(ids[0]);
    if (box) this.viewport.reveal(box.x, box.y);
    this.select(ids);
  }

  // interaction

  /** Select the nodes of a box, or none. @param {number[]} ids */
  select(ids) {
    this.selected = ids.filter((id) => id >= 0);
    if (!ids.length) { this.highlight = ""; this.focus = null; }
    this.renderPanel();
    this.panel.scrollTop = 0;
    this.highlightBoxes(this.selected.length ? null : this.focus);
    if (this.selected.length) this.status.textContent = `selected ${this.graph.nodeName(this.selected[0])}`;
    this.reportState();
  }

  // the view state

  /** The view as JSON: the selected node and settings, where they differ from the initial view. */
  getState() { return compareViews(readView(this), this.initialView); }

  /** Show a view; what is not valid in it is ignored, and named in the footer. @param {unknown} state */
  setState(state) {
    const before = readView(this), { view, ignored } = parseView(state, this.initialView, this);
    if (!isEqual(view, before)) this.#showView(view, before);
    this.reportedState = JSON.stringify(compareViews(view, this.initialView));
    this.reportState(); // if the section of the selected node was unfolded
    if (ignored.length) this.footer.textContent = this.status.textContent = `Ignored, because this page has no such node, setting or value: ${ignored.slice(0, 3).join(", ")}`;
  }

  /** Draw another view; a node that was not selected before is shown. @param {import("./view_state.js").View} view @param {import("./view_state.js").View} before */
  #showView(view, before) {
    Object.assign(this.settings, viewSettings(view));
    this.openSections = new Set(sectionKeys(view.unfolded));
    this.selected = this.graph.findNodes(view.selected ?? "");
    this.highlight = view.highlight;
    const isNewNode = view.selected !== before.selected;
    if (isNewNode) this.focus = null;
    if (isNewNode && view.selected && isEqual(view.unfolded, before.unfolded)) {
      const { stack, step, is_state } = this.graph.groups[this.graph.groupOf(this.selected[0])];
      if (!is_state) this.openSections.add(`${stack}:${step}`);
    }
    this.#renderControls();
    this.draw();
    if (!isNewNode) return;
    this.panel.scrollTop = 0;
    if (view.selected) this.focusBox(this.boxByNode.get(this.selected[0]) ?? null, true);
    this.status.textContent = view.selected ? `selected ${view.selected}` : "";
  }

  /** Inform the host of a change of the view, after a time without another change. @param {number} [delay] */
  reportState(delay = 0) {
    clearTimeout(this.timer);
    if (delay) { this.timer = setTimeout(() => this.reportState(), delay); return; }
    const state = this.getState(), text = JSON.stringify(state);
    if (text === this.reportedState) return;
    this.reportedState = text;
    this.handleState(state);
  }

  /** Move the focus to a box. @param {Box|null} box @param {boolean} [isQuiet] */
  focusBox(box, isQuiet) {
    if (!box) return;
    this.focus = box;
    this.#setTabStop(box);
    const element = this.elements.get(box);
    if (!isQuiet) element?.focus({ preventScroll: true });
    this.viewport.view.scrollTo(0, 0);
    this.viewport.reveal(box.x, box.y);
    this.highlightBoxes(box);
    this.status.textContent = this.summarizeBox(box);
  }

  /** The nearest box in a direction. @param {Box} box @param {number} dx @param {number} dy */
  boxInDirection(box, dx, dy) {
    const cost = (/** @type {Box} */ other) => {
      const along = (other.x - box.x) * dx + (other.y - box.y) * dy, across = Math.abs((other.x - box.x) * dy) + Math.abs((other.y - box.y) * dx);
      return along > 1 ? along + (dx ? 40 : 4) * across : Infinity;
    };
    return this.layout.boxes.reduce((/** @type {Box|null} */ best, other) => (cost(other) < (best ? cost(best) : Infinity) ? other : best), null);
  }

  /** Fold or unfold a section. @param {string} key */
  toggleSection(key) {
    if (this.openSections.has(key)) this.openSections.delete(key); else this.openSections.add(key);
    this.draw();
    this.status.textContent = `${key.split(":").join(" slice ").trim()} ${this.openSections.has(key) ? "unfolded" : "folded"}`;
    this.reportState();
  }

  /** Run a command of the toolbar. @param {string} command @param {string} [value] */
  runCommand(command, value = "") {
    const { viewport } = this;
    if (command === "in" || command === "out") viewport.zoom(command === "in" ? 1.25 : 0.8);
    if (command === "fit") viewport.fit(viewport.isFitted && !viewport.isComplete);
    if (command === "fold" || command === "unfold") { this.openSections = new Set(command === "fold" ? [] : getSections(this.graph).map((section) => section.key)); this.draw(); viewport.fit(); this.reportState(); }
    if (command === "search" || command === "next") this.search(value, command === "next");
    if (command === "svg" || command === "png") this.save(command);
  }

  /** Mark the words that contain a text, and focus the first one or the next. @param {string} query @param {boolean} isNext */
  search(query, isNext) {
    const texts = [...this.viewport.words.querySelectorAll(".word")], text = query.trim().toLowerCase();
    const matches = texts.filter((element) => text && this.fullText(element).toLowerCase().includes(text));
    for (const element of texts) element.classList.toggle("match", matches.includes(element));
    this.status.textContent = text ? `${matches.length} of ${texts.length} words` : "";
    if (!matches.length) return;
    this.matchIndex = isNext && this.query === text ? (this.matchIndex + 1) % matches.length : 0;
    this.query = text;
    const { word, stack } = /** @type {SVGElement} */ (matches[this.matchIndex]).dataset;
    const box = this.layout.boxes.find((box) => this.graph.groups[box.group].word_stack === stack && box.word === Number(word));
    if (box) this.focusBox(box, true);
  }

  /** The text of a word before truncation. @param {Element} element */
  fullText(element) { return element.querySelector("title")?.textContent?.replace(/^\d+ /, "") ?? ""; }

  /** Save the view as a file. @param {string} kind  "svg" or "png" */
  async save(kind) {
    const view = this.viewport.view, paper = getComputedStyle(this.root).backgroundColor;
    const text = viewToSvg(view, this.viewport.layers(), `Bnet of “${this.description.title}”`, paper);
    const blob = kind === "svg" ? new Blob([text], { type: "image/svg+xml" }) : await svgToPng(text, view.clientWidth, view.clientHeight);
    downloadBlob(blob, `bnet.${kind}`);
  }
}
