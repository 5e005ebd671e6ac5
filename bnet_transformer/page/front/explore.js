// @ts-check
/** One view of a sentence: what is asked, what is drawn of it, and what pointer and keys do. */

import { controls } from "./controls.js";
import { asPng, download, viewAsSvg } from "./export.js";
import { layout, sectionsOf } from "./layout.js";
import { Lines } from "./lines.js";
import { Net } from "./net.js";
import { factsOf, overview } from "./panel.js";
import { Reading } from "./reads.js";
import { html, many, node, single, svg } from "./scene.js";
import { Stage } from "./stage.js";

/**
 * @typedef {import("./layout.js").Box} Box
 * @typedef {import("./scene.js").Line} Line
 * @typedef {import("./controls.js").Ask} Ask
 * @typedef {{about: import("./net.js").About, bytes: Uint8Array}} Data
 */

const MOST = 20_000; // reads that are drawn at once
const PLAIN = 500; // arrows up to which a sentence comes unfolded
const FEW = 24; // words up to which the reads of all are drawn freely

/** Draw a sentence into an element; `host` makes `do` live. @param {HTMLElement} root @param {Data} data @param {any} [host] */
export function mount(root, data, host) {
  const view = new View(root, data, host ?? null);
  return { update: (/** @type {Data} */ next) => view.take(next), remove: () => view.remove() };
}

class View extends Lines {
  /** @type {Set<number>} */ done = new Set();
  /** @type {Set<number>} */ seen = new Set();
  /** @type {Map<Box, SVGElement>} */ elements = new Map();
  /** @type {Map<Element, Box>} */ boxAt = new Map();
  /** @type {Box|null} */ focus = null;
  /** @type {number[]} */ selected = [];
  back = svg("g", { class: "back", "aria-hidden": "true" });
  front = svg("g", { class: "front", "aria-hidden": "true" });
  plates = 1;
  mark = "";
  query = "";
  place = 0;

  /** @param {HTMLElement} root @param {Data} data @param {any} host */
  constructor(root, data, host) {
    super();
    this.root = root;
    this.host = host && { do: (/** @type {any} */ told) => this.ran(host.do(told)), undo: (/** @type {any} */ told) => this.ran(host.undo(told)) };
    this.stage = new Stage(root.dataset.page !== undefined);
    this.bar = html("div", { class: "bar-of-controls", role: "toolbar", "aria-label": "what is shown" });
    this.panel = html("aside", { class: "panel", "aria-label": "facts" });
    this.status = html("div", { class: "status", role: "status", "aria-live": "polite" });
    this.note = html("div", { class: "foot" });
    root.classList.add("bnet");
    root.replaceChildren(this.bar, this.stage.view, this.panel, this.note, this.status);
    this.take(data);
    this.#listen();
    this.resized = new ResizeObserver(() => this.stage.resize());
    this.resized.observe(this.stage.view);
  }

  remove() {
    this.resized.disconnect();
    this.root.replaceChildren();
  }

  /** Wait for the host, and say what it refuses. @param {Promise<void>|void} answer */
  async ran(answer) {
    this.root.classList.add("running");
    try { await answer; this.status.textContent = "done"; } catch (error) {
      this.note.textContent = this.status.textContent = error instanceof Error ? error.message : String(error);
    } finally { this.root.classList.remove("running"); }
  }

  /** Take a description: the first, or one after a `do`. @param {Data} data */
  take({ about, bytes }) {
    this.about = about;
    this.net = new Net(about, bytes);
    this.readings = about.readings.map((/** @type {any} */ told) => new Reading(this.net, told, bytes, about.steps));
    this.done = new Set(Object.keys(about.done).map((name) => this.net.find(name)));
    this.seen = new Set(Object.keys(about.seen).map((name) => this.net.find(name)));
    const words = this.net.stacks.reduce((sum, stack) => sum + stack.words.length, 0);
    if (!this.ask) {
      const all = about.detail === "nodes" || (about.detail === null && about.counts[1] <= PLAIN) || !this.readings.length || !this.net.families.some((family) => family.state);
      this.open = new Set(sectionsOf(this.net).filter((section) => all || (words <= FEW && section.label.endsWith("output") && section.families.length <= 2)).map((section) => section.key));
      const meanless = this.readings.length && this.readings.every((reading) => reading.told.choices.length && !reading.told.mean);
      this.ask = { head: "mean", states: meanless ? {} : null, least: words <= FEW ? 0.05 : 0.02, top: words <= FEW ? 0 : 2, every: true, heads: false, weights: true, theme: about.theme };
    }
    this.selected = this.selected.filter((id) => id < this.net.offsets[this.net.offsets.length - 1]);
    this.#controls();
    this.draw();
  }

  #controls() {
    /** @type {Map<string, number>} */
    const choices = new Map(this.readings.flatMap((reading) => reading.told.choices));
    const plates = Math.max(1, ...this.readings.map((reading) => reading.told.plates));
    this.plates = plates;
    this.plated = this.net.families.some((family, k) => family.words !== null && this.net.plates(k) > 1);
    this.root.dataset.theme = this.ask.theme;
    this.bar.replaceChildren(...controls({
      ask: this.ask, plates, plated: this.plated, heads: this.about.heads, choices: [...choices], reads: this.readings.length > 0,
      mean: this.readings.some((reading) => reading.told.mean), weights: this.net.families.some((family) => family.depth > 0),
      change: (told) => this.change(told), act: (what, value) => this.act(what, value),
    }));
  }

  /** @param {Partial<Ask>} told */
  change(told) {
    Object.assign(this.ask, told);
    if ("theme" in told) { this.root.dataset.theme = this.ask.theme; return; }
    if ("states" in told) this.#controls();
    if ("head" in told || "heads" in told || "weights" in told) this.draw();
    else { this.lines(); this.pointed(this.focus); if ("states" in told) this.facts(); }
  }

  // drawing

  /** Place and draw everything: after unfolding, not while panning. */
  draw() {
    const { net, ask } = this, plate = ask.head === "mean" || ask.head === "all" ? ask.head : Number(ask.head);
    this.layout = layout(net, { open: this.open, weights: ask.weights, heads: ask.heads, plate });
    for (const known of [this.boxOf, this.boxesOf, this.elements, this.boxAt]) known.clear();
    for (const box of this.layout.boxes) {
      for (const id of box.ids) this.boxOf.set(id, box);
      const own = this.boxesOf.get(box.family);
      if (own) own.push(box); else this.boxesOf.set(box.family, [box]);
    }
    /** @type {Map<number, SVGElement>} */
    const rows = new Map();
    for (const box of this.layout.boxes) {
      const moved = this.about.moved?.[String(box.family)]?.[box.word ?? 0] ?? null;
      const element = node(net, box, this.done, this.seen, this.layout.roomy, moved);
      element.setAttribute("aria-label", this.said(box));
      this.elements.set(box, element);
      this.boxAt.set(element, box);
      const row = rows.get(box.row) ?? svg("g", { role: "row" });
      rows.set(box.row, row);
      row.append(element);
    }
    const cells = svg("g", { class: "nodes", role: "presentation" }, ...[...rows].sort((a, b) => a[0] - b[0]).map(([, row]) => row));
    this.stage.grid.replaceChildren(this.back, this.front, cells);
    this.stage.take(this.layout, net);
    const old = this.focus;
    this.focus = old ? this.boxOf.get(old.ids[0]) ?? null : null;
    const first = this.focus ?? this.layout.boxes.find((box) => box.row === 0) ?? this.layout.boxes[0];
    if (first) this.elements.get(first)?.setAttribute("tabindex", "0");
    this.lines();
    this.pointed(this.focus);
    this.facts();
  }

  /** The reads of all words, and the arrows of unfolded slices. */
  lines() {
    /** @type {Line[]} */
    let lines = [];
    const arrows = this.arrows(), { least, top, every } = this.ask;
    if (every) for (const reading of this.readings) {
      if (arrows && this.open.has(this.sectionOf(reading))) continue;
      const liner = this.liner(reading);
      for (const how of this.hows(reading)) for (const read of reading.strongest(how, least, top || Infinity)) {
        const line = liner(read, "read");
        if (line) lines.push(line);
      }
    }
    const found = lines.length;
    if (found > MOST) lines = lines.sort((a, b) => (b.share ?? 0) - (a.share ?? 0)).slice(0, MOST);
    const shown = lines.length < found ? `the strongest ${MOST.toLocaleString("en")} of ${found.toLocaleString("en")} reads are drawn` : every && this.readings.length ? `${found.toLocaleString("en")} reads of P(j | i) ≥ ${least.toFixed(2)}${top ? `, the strongest ${top} of each word` : ""}` : "";
    const kept = arrows === null ? "of unfolded slices the arrows of the selected node are drawn" : arrows.some((line) => line.share !== null) ? `k and v arrows are as wide and dark as P(j | i), those below ${least.toFixed(2)} left out` : "";
    this.note.textContent = [found || !arrows?.length ? shown : "", kept].filter(Boolean).join("; ");
    if (this.ask.head === "all") this.note.append(...this.keyOfHeads());
    this.note.dataset.reads = String(lines.length);
    this.back.replaceChildren(...many([...(arrows ?? []), ...lines], this.about.look));
  }

  /** Which colour is which head. */
  keyOfHeads() {
    return Array.from({ length: this.plates }, (_, plate) => html("span", { class: `key hue-head-${plate % 8}` }, `head ${this.about.heads?.[plate] ?? plate}`));
  }

  /** Show the lines of a box, of the selected one where there is none. @param {Box|null} box @param {Box[]} [boxes] */
  pointed(box, boxes) {
    const chosen = this.selected.length ? this.boxOf.get(this.selected[0]) ?? null : null;
    const shown = boxes ?? (box ? [box] : chosen ? [chosen] : []);
    const lines = shown.flatMap((each) => this.linesOf(each, each === chosen));
    this.front.replaceChildren(...single(lines, this.about.look, this.net));
    this.stage.grid.classList.toggle("pointing", shown.length > 0);
    for (const element of this.stage.grid.querySelectorAll(".node.at, .node.near")) element.classList.remove("at", "near");
    for (const each of shown) this.elements.get(each)?.classList.add("at");
    for (const line of lines) for (const end of [line.from, line.to]) if (!shown.includes(end)) this.elements.get(end)?.classList.add("near");
  }

  /** The panel: of the selected node, or of the sentence. */
  facts() {
    const ids = this.selected, { net, about } = this;
    for (const element of this.stage.grid.querySelectorAll(".node.selected")) { element.classList.remove("selected"); element.removeAttribute("aria-selected"); }
    const kin = !ids.length ? [] : [
      ...(ids.length === 1 ? [{ what: "parents", ids: net.parents(ids[0]) }, { what: "children", ids: net.children(ids[0]) }] : []),
      { what: "ancestors", ids: net.ancestors(ids) }, { what: "descendants", ids: net.descendants(ids) },
      ...(ids.length === 1 ? [{ what: "blanket", ids: net.blanket(ids[0]) }] : [])];
    const marked = new Set(kin.find(({ what }) => what === this.mark)?.ids ?? []);
    this.stage.grid.classList.toggle("marking", this.mark !== "" && ids.length > 0);
    for (const [box, element] of this.elements) element.classList.toggle("marked", box.ids.some((id) => marked.has(id)));
    if (!ids.length) { this.panel.replaceChildren(...overview(about, this.host)); return; }
    const chosen = this.boxOf.get(ids[0]), element = chosen && this.elements.get(chosen);
    if (element) { element.classList.add("selected"); element.setAttribute("aria-selected", "true"); }
    const back = html("button", { type: "button", class: "quiet close", "aria-label": "back to the sentence", onclick: () => this.select([]) }, "×");
    this.panel.replaceChildren(back, ...factsOf({
      about, net, ids, mark: this.mark, host: this.host, reads: this.tables(ids), say: (text) => { this.status.textContent = text; },
      kin,
      onMark: (what) => { this.mark = what; this.facts(); }, onNode: (name) => { this.select([net.find(name)]); },
    }));
    this.panel.scrollTop = 0;
  }

  // what people do

  /** @param {number[]} ids */
  select(ids) {
    this.selected = ids.filter((id) => id >= 0);
    if (!ids.length) this.mark = "";
    this.facts();
    this.pointed(this.selected.length ? null : this.focus);
    if (this.selected.length) this.status.textContent = `selected ${this.net.name(this.selected[0])}`;
  }

  /** Move the focus to a box. @param {Box|null} box @param {boolean} [quiet] */
  at(box, quiet) {
    if (!box) return;
    if (this.focus) this.elements.get(this.focus)?.setAttribute("tabindex", "-1");
    for (const element of this.stage.grid.querySelectorAll('[tabindex="0"]')) element.setAttribute("tabindex", "-1");
    this.focus = box;
    const element = this.elements.get(box);
    element?.setAttribute("tabindex", "0");
    if (!quiet) element?.focus({ preventScroll: true });
    this.stage.view.scrollTo(0, 0);
    this.stage.reveal(box.x, box.y);
    this.pointed(box);
    this.status.textContent = this.told(box);
  }

  /** The nearest box in a direction. @param {Box} box @param {number} dx @param {number} dy */
  beside(box, dx, dy) {
    const cost = (/** @type {Box} */ other) => {
      const along = (other.x - box.x) * dx + (other.y - box.y) * dy, across = Math.abs((other.x - box.x) * dy) + Math.abs((other.y - box.y) * dx);
      return along > 1 ? along + (dx ? 40 : 4) * across : Infinity;
    };
    return this.layout.boxes.reduce((/** @type {Box|null} */ best, other) => (cost(other) < (best ? cost(best) : Infinity) ? other : best), null);
  }

  /** @param {string} key */
  fold(key) {
    if (this.open.has(key)) this.open.delete(key); else this.open.add(key);
    this.draw();
    this.status.textContent = `${key.split(":").join(" slice ").trim()} ${this.open.has(key) ? "unfolded" : "folded"}`;
  }

  /** @param {string} what @param {string} [value] */
  act(what, value = "") {
    const { stage } = this;
    if (what === "in" || what === "out") stage.zoom(what === "in" ? 1.25 : 0.8);
    if (what === "fit") stage.fit();
    if (what === "fold" || what === "unfold") { this.open = new Set(what === "fold" ? [] : sectionsOf(this.net).map((section) => section.key)); this.draw(); stage.fit(); }
    if (what === "search" || what === "next") this.search(value, what === "next");
    if (what === "svg" || what === "png") this.save(what);
  }

  /** @param {string} query @param {boolean} next */
  search(query, next) {
    const texts = [...this.stage.words.querySelectorAll(".word")], wanted = query.trim().toLowerCase();
    const found = texts.filter((text) => wanted && this.whole(text).toLowerCase().includes(wanted));
    for (const text of texts) text.classList.toggle("found", found.includes(text));
    this.status.textContent = wanted ? `${found.length} of ${texts.length} words` : "";
    if (!found.length) return;
    this.place = next && this.query === wanted ? (this.place + 1) % found.length : 0;
    this.query = wanted;
    const { word, stack } = /** @type {SVGElement} */ (found[this.place]).dataset;
    const box = this.layout.boxes.find((each) => this.net.families[each.family].words === stack && each.word === Number(word));
    if (box) this.at(box, true);
  }

  /** @param {Element} text */
  whole(text) { return text.querySelector("title")?.textContent?.replace(/^\d+ /, "") ?? ""; }

  /** @param {string} kind */
  async save(kind) {
    const view = this.stage.view, paper = getComputedStyle(this.root).backgroundColor;
    const text = viewAsSvg(view, this.stage.layers(), `the bnet of “${this.about.title}”`, paper);
    const blob = kind === "svg" ? new Blob([text], { type: "image/svg+xml" }) : await asPng(text, view.clientWidth, view.clientHeight);
    download(blob, `bnet.${kind}`);
  }

  #listen() {
    const { view, grid, words } = this.stage;
    const boxFrom = (/** @type {Event} */ event) => {
      const element = /** @type {Element} */ (event.target).closest?.(".node");
      return element ? this.boxAt.get(element) ?? null : null;
    };
    grid.addEventListener("pointerover", (event) => { if (!this.stage.dragged || !event.buttons) this.pointed(boxFrom(event)); });
    grid.addEventListener("pointerleave", () => this.pointed(null));
    words.addEventListener("pointerover", (event) => {
      const text = /** @type {Element} */ (event.target).closest(".word");
      if (!text) return;
      const { word, stack } = /** @type {SVGElement} */ (text).dataset;
      this.pointed(null, this.layout.boxes.filter((box) => this.net.families[box.family].state && this.net.families[box.family].words === stack && box.word === Number(word)));
    });
    words.addEventListener("pointerleave", () => this.pointed(null));
    view.addEventListener("click", (event) => {
      if (this.stage.dragged) return;
      const target = /** @type {Element} */ (event.target), section = /** @type {SVGElement|null} */ (target.closest("[data-section]"));
      const box = boxFrom(event);
      if (section) this.fold(/** @type {string} */ (section.dataset.section));
      else if (box) { this.at(box); this.select(box.ids); } else if (target.closest(".main")) this.select([]);
    });
    grid.addEventListener("focusin", (event) => {
      const box = boxFrom(event), byKeys = /** @type {Element} */ (event.target).matches(":focus-visible"); // what a pointer focuses must not move under it
      if (box && byKeys && box !== this.focus) this.at(box, true);
    });
    (this.root.dataset.page === undefined ? this.root : document).addEventListener("keydown", (event) => this.key(/** @type {KeyboardEvent} */ (event)));
  }

  /** @param {KeyboardEvent} event */
  key(event) {
    const target = /** @type {HTMLElement} */ (event.target);
    if (event.altKey || event.ctrlKey || event.metaKey) return;
    if (target.closest("input, select, textarea")) return;
    const section = /** @type {any} */ (target.closest("[data-section]"));
    const ways = /** @type {Record<string, [number, number]>} */ ({ ArrowLeft: [-1, 0], ArrowRight: [1, 0], ArrowUp: [0, -1], ArrowDown: [0, 1] });
    const box = this.focus ?? this.layout.boxes.find((each) => each.row === 0) ?? null;
    const inGrid = target.closest(".stage") !== null || target === document.body || target === this.root;
    if (section && (event.key === "Enter" || event.key === " ")) {
      const key = section.dataset.section;
      this.fold(key);
      for (const each of this.stage.slices.querySelectorAll("[data-section]")) if (/** @type {any} */ (each).dataset.section === key) /** @type {any} */ (each).focus();
    } else if (ways[event.key] && inGrid) this.at(this.focus && box ? this.beside(box, ...ways[event.key]) ?? box : box);
    else if (event.key === "Enter" && inGrid && box) this.select(box.ids);
    else if (event.key === "+" || event.key === "=") this.act("in");
    else if (event.key === "-") this.act("out");
    else if (event.key === "0") this.act("fit");
    else if (event.key === "h" && this.plated) { this.change({ heads: !this.ask.heads }); this.#controls(); }
    else if (event.key === "/") /** @type {HTMLElement|null} */ (this.bar.querySelector("[name=search]"))?.focus();
    else if (event.key === "f" && box) {
      const family = this.net.families[box.family], steps = family.state ? [family.slice ?? 0, (family.slice ?? 1) - 1] : [family.step];
      const key = steps.map((step) => `${family.stack}:${step}`).find((each) => sectionsOf(this.net).some((one) => one.key === each));
      if (key) { this.fold(key); this.at(this.boxOf?.get(box.ids[0]) ?? this.focus); }
    } else if (event.key === "Escape") { this.select([]); this.focus = null; this.pointed(null); } else return;
    event.preventDefault();
  }
}
