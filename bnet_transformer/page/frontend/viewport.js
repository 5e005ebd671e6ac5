// @ts-check
/** The viewport: the grid, with the words above and the slices at the left. Panning changes only a transform and does not redraw. */

import { htmlElement, svgElement } from "./elements.js";
import { slantedHeight, textWidth } from "./layout.js";

const MAX_STRIP_WIDTH = 92; // width of the strip of slices
const MIN_SCALE = 0.2;
const READABLE_SCALES = { boxes: 0.5, dots: 0.62 }; // the minimum scale of `fit` for nodes with labels in a narrow window, and for dots
const NARROW_WIDTH = 560;
const FIT_SCALES = [1.3, 2.6]; // the maximum scale of `fit`, in a small view and in a large one
const FIT_HEIGHT = 620; // of a view with the maximum scale 1
const MIN_SHRINK = 0.74; // of the text of words that would overlap
const WORD_GAP = 5; // between two words
const TARGET_HEIGHT = 24; // of the buttons of slices

/**
 * @typedef {import("./layout.js").Layout} Layout
 * @typedef {import("./ground_graph.js").GroundGraph} GroundGraph
 */

export class Viewport {
  /** @param {boolean} isPage  true in an HTML file, in which the wheel pans; in a notebook, the wheel scrolls the notebook */
  constructor(isPage) {
    this.x = 0;
    this.y = 0;
    this.scale = 1;
    this.isFitted = true; // until the user pans or zooms
    this.grid = svgElement("svg", { class: "stage", role: "grid", "aria-label": "nodes: words are columns, slices are rows" });
    this.words = svgElement("svg", { class: "strip-words", role: "presentation" });
    this.slices = svgElement("svg", { class: "strip-slices", role: "group", "aria-label": "slices" });
    // The transforms are those of the parents: if the transform of an SVG changes, Chromium computes its layout again.
    this.panes = [this.grid, this.words, this.slices].map((svg) => htmlElement("div", { class: "pane" }, svg));
    this.main = htmlElement("div", { class: "main" }, this.panes[0]);
    this.top = htmlElement("div", { class: "top" }, this.panes[1]);
    this.left = htmlElement("div", { class: "left" }, this.panes[2]);
    this.view = htmlElement("div", { class: "view" }, this.main, this.top, this.left, htmlElement("div", { class: "corner" }));
    /** @type {Layout|null} */
    this.layout = null;
    /** @type {GroundGraph|null} */
    this.graph = null;
    this.isComplete = true; // whether the last fit shows the full layout
    this.isForced = false; // whether it was asked to, at any scale
    this.isCrowded = false; // whether the words of the last fit are slanted, because they would overlap
    this.isTouch = false; // whether the last pointer was a finger
    this.headerHeight = 0;
    this.stripWidth = 0;
    this.unit = 1; // the size of a pixel of text: larger in large windows
    this.strips = ""; // what the strips show
    this.size = { width: 0, height: 0 }; // of the view with its strips; reading it from the page computes the page's layout
    this.#addListeners(isPage);
  }

  /** @param {boolean} isPage */
  #addListeners(isPage) {
    /** @type {Map<number, {x: number, y: number}>} the pointers that are down: two of them zoom */
    const pointers = new Map();
    let scrollTimer = 0;
    this.isDragged = false;
    this.view.addEventListener("pointerdown", (event) => {
      if (event.button !== 0) return;
      if (!pointers.size) this.isDragged = false;
      pointers.set(event.pointerId, { x: event.clientX, y: event.clientY });
      this.isTouch = event.pointerType === "touch";
    });
    this.view.addEventListener("pointermove", (event) => {
      const last = pointers.get(event.pointerId), next = { x: event.clientX, y: event.clientY };
      if (!last || !(event.buttons & 1)) { pointers.delete(event.pointerId); return; }
      if (!this.isDragged && Math.hypot(next.x - last.x, next.y - last.y) < 4) return;
      if (!this.isDragged) { this.isDragged = true; this.view.setPointerCapture(event.pointerId); this.view.classList.add("moving", "dragged"); }
      pointers.set(event.pointerId, next);
      const [other] = [...pointers].filter(([id]) => id !== event.pointerId).map(([, point]) => point);
      if (other) this.#pinch(last, next, other);
      else {
        const { y } = this;
        this.pan(next.x - last.x, next.y - last.y);
        if (this.isTouch) this.#scrollPage(y + next.y - last.y - this.y);
      }
    });
    for (const name of ["pointerup", "pointercancel"]) this.view.addEventListener(name, (event) => {
      pointers.delete(/** @type {PointerEvent} */ (event).pointerId);
      if (!pointers.size) this.view.classList.remove("moving", "dragged");
    });
    this.view.addEventListener("wheel", (event) => {
      if (!event.ctrlKey && !event.metaKey && !isPage && !event.shiftKey) return;
      if (event.ctrlKey || event.metaKey) {
        event.preventDefault();
        const { left, top } = this.main.getBoundingClientRect();
        this.zoom(Math.exp(-event.deltaY * 0.0022), event.clientX - left, event.clientY - top);
        return;
      }
      const { x, y } = this, isSideways = event.shiftKey || Math.abs(event.deltaX) > Math.abs(event.deltaY);
      clearTimeout(scrollTimer);
      this.view.classList.add("moving");
      scrollTimer = setTimeout(() => { if (!pointers.size) this.view.classList.remove("moving"); }, 160);
      this.pan(event.shiftKey && !event.deltaX ? -event.deltaY : -event.deltaX, event.shiftKey ? 0 : -event.deltaY);
      if (isSideways || this.x !== x || this.y !== y) event.preventDefault(); // at an edge of the graph, the wheel scrolls the page
    }, { passive: false });
  }

  /** Zoom and move while one of two fingers moves. @param {{x: number, y: number}} last @param {{x: number, y: number}} next @param {{x: number, y: number}} other */
  #pinch(last, next, other) {
    const { left, top } = this.main.getBoundingClientRect(), distance = (/** @type {{x: number, y: number}} */ point) => Math.max(1, Math.hypot(point.x - other.x, point.y - other.y));
    this.zoom(distance(next) / distance(last), (next.x + other.x) / 2 - left, (next.y + other.y) / 2 - top);
    this.pan((next.x - last.x) / 2, (next.y - last.y) / 2);
  }

  /** A finger that cannot move the graph any further moves the page. @param {number} dy */
  #scrollPage(dy) {
    if (Math.abs(dy) < 0.5) return;
    let element = this.view.parentElement;
    while (element && !(element.scrollHeight > element.clientHeight && /auto|scroll/.test(getComputedStyle(element).overflowY))) element = element.parentElement;
    (element ?? document.scrollingElement)?.scrollBy(0, -dy);
  }

  /** The point of the layout at a pointer. @param {MouseEvent} event */
  toLayout(event) {
    const { left, top } = this.main.getBoundingClientRect();
    return { x: (event.clientX - left - this.x) / this.scale, y: (event.clientY - top - this.y) / this.scale };
  }

  /** Show a new layout: rebuild the strips, and fit it if its size changed. @param {Layout} layout @param {GroundGraph} graph */
  setLayout(layout, graph) {
    const isResized = this.layout?.width !== layout.width || this.layout?.height !== layout.height;
    this.layout = layout;
    this.graph = graph;
    if (!this.size.width) { this.#measure(); this.#sizeStrips(); this.#measure(); } // in a narrow window, the height of the view follows from the layout
    this.#sizeStrips();
    const { stripWidth } = this;
    this.grid.setAttribute("width", String(layout.width));
    this.grid.setAttribute("height", String(layout.height));
    const strips = JSON.stringify([layout.words, layout.states.map(({ y, group }) => [y, graph.groups[group].name]), layout.sections, stripWidth, this.isSlanted]);
    if (strips !== this.strips) this.#renderStrips(layout, graph);
    if (isResized) this.fit();
    else { this.applyTransform(); if (strips !== this.strips) this.updateStrips(); }
    this.strips = strips;
  }

  /** Set the sizes of the strips, and the height of the full graph in a narrow window. */
  #sizeStrips() {
    const layout = /** @type {Layout} */ (this.layout);
    this.headerHeight = (this.isCrowded ? slantedHeight(layout.words) : layout.headerHeight) * this.unit;
    this.stripWidth = this.unit * Math.min(MAX_STRIP_WIDTH, 26 + Math.max(30, ...layout.sections.map((section) => textWidth(`▸ ${section.label}`, 11))));
    const scale = Math.min(FIT_SCALES[0], Math.max(this.readableScale, (this.size.width - this.stripWidth) / layout.width));
    this.view.style.setProperty("--head", `${this.headerHeight}px`);
    this.view.style.setProperty("--left", `${this.stripWidth}px`);
    this.view.style.setProperty("--content", `${Math.round(this.headerHeight + scale * layout.height)}px`);
  }

  /** Render the words and the slices. @param {Layout} layout @param {GroundGraph} graph */
  #renderStrips(layout, graph) {
    const { isSlanted, stripWidth, unit } = this;
    this.words.classList.toggle("slanted", isSlanted);
    this.words.replaceChildren(svgElement("g", {}, ...layout.words.map((word) => {
      const text = svgElement("text", { class: "word", "data-word": word.word, "data-stack": word.stack, "text-anchor": isSlanted ? "start" : "middle" });
      text.textContent = word.text;
      text.append(svgElement("title"));
      /** @type {Element} */ (text.lastChild).textContent = `${word.word} ${word.fullText}`;
      return text;
    })));
    const states = layout.states.map(({ group }) => {
      const { label, slice, stack } = graph.groups[group];
      const text = svgElement("text", { class: "state-name", x: stripWidth - 12 * unit, "text-anchor": "end" });
      text.append(...(stack ? [svgElement("tspan", { class: "stack" }, `${stack} `)] : []), svgElement("tspan", { class: "math" }, label[0]), ...(slice === null ? [] : [svgElement("tspan", { dy: -4 * unit, "font-size": "0.73em" }, String(slice))]));
      return text;
    });
    const sections = layout.sections.map((section) => {
      const text = svgElement("text", { x: 12 * unit, y: 4 * unit });
      text.textContent = `${section.isOpen ? "▾" : "▸"} ${section.label}`;
      return svgElement("g", { class: "section", role: "button", tabindex: 0, "data-slice-section": section.key, "aria-expanded": String(section.isOpen), "aria-label": `${section.isOpen ? "fold" : "unfold"} ${section.label}` },
        svgElement("rect", { x: 4, y: (-TARGET_HEIGHT / 2) * unit, width: stripWidth - 12, height: TARGET_HEIGHT * unit, rx: 4, class: "target" }), text);
    });
    this.slices.replaceChildren(svgElement("g", {}, ...states), svgElement("g", {}, ...sections));
  }

  /** Move the labels of the strips: their font size does not scale. */
  updateStrips() {
    const { layout, scale, unit, headerHeight, isSlanted } = this;
    if (!layout) return;
    // Words that would overlap are smaller, if that is enough. Otherwise `fit` slants them, and words that overlap nevertheless are hidden.
    const shrink = isSlanted ? 1 : Math.max(MIN_SHRINK, Math.min(1, this.wordShrink));
    this.words.style.fontSize = shrink < 1 ? `calc(${Math.round(125 * shrink) / 10} * var(--u))` : "";
    let free = -1e9; // the left end of the space right of the last visible word
    [.../** @type {Element} */ (this.words.firstChild).children].forEach((text, k) => {
      const { x: centre, text: label } = layout.words[k], x = centre * scale, half = unit * (isSlanted ? 6.5 : (shrink * textWidth(label, 12.5)) / 2);
      const isVisible = x - half >= free;
      if (isVisible) free = x + half + (isSlanted ? 0 : WORD_GAP * unit);
      text.setAttribute("visibility", isVisible ? "visible" : "hidden");
      text.setAttribute("transform", isSlanted ? `translate(${x + 3 * unit} ${headerHeight - 7 * unit}) rotate(-46)` : `translate(${x} ${headerHeight - 12 * unit})`);
    });
    const [states, sections] = this.slices.children;
    [...states.children].forEach((text, k) => text.setAttribute("transform", `translate(0 ${layout.states[k].y * scale + 4 * unit})`));
    let top = -1e9; // the buttons of slices do not overlap
    [...sections.children].forEach((group, k) => {
      top = Math.max(layout.sections[k].y * scale, top + TARGET_HEIGHT * unit);
      group.setAttribute("transform", `translate(0 ${top})`);
    });
    this.words.setAttribute("width", String(layout.width * scale + 120));
    this.words.setAttribute("height", String(headerHeight));
    this.slices.setAttribute("width", String(this.stripWidth));
    this.slices.setAttribute("height", String(layout.height * scale + 60));
  }

  /** The size of the visible part of the grid. */
  get viewSize() {
    if (!this.size.width) this.#measure();
    return { width: Math.max(0, this.size.width - this.stripWidth), height: Math.max(0, this.size.height - this.headerHeight) };
  }

  /** Read the size of the view, and that of its text, from the page. */
  #measure() {
    this.size = { width: this.view.clientWidth, height: this.view.clientHeight };
    this.unit = parseFloat(getComputedStyle(this.view).getPropertyValue("--u")) || 1;
  }

  /** Whether the words are slanted: those of a long sentence, or those that would overlap. */
  get isSlanted() { return Boolean(this.layout?.isSlanted) || this.isCrowded; }

  /** The factor of the size of horizontal words at which the closest two have a space between them. */
  get wordShrink() {
    const { words } = /** @type {Layout} */ (this.layout);
    return Math.min(...words.slice(1).map(({ x, text }, k) => (2 * this.scale * (x - words[k].x)) / (this.unit * (textWidth(text, 12.5) + textWidth(words[k].text, 12.5) + 8))));
  }

  /** The minimum scale of `fit`: a small net is shown as a whole, except in a narrow window. */
  get readableScale() { return this.layout?.isSlanted ? READABLE_SCALES.dots : this.size.width <= NARROW_WIDTH ? READABLE_SCALES.boxes : MIN_SCALE; }

  /** The scale at which the full layout is in view. */
  get fullScale() {
    const { width, height } = this.viewSize, { layout } = this;
    return layout ? Math.min(width / layout.width, height / layout.height, Math.min(Math.max(height / FIT_HEIGHT, FIT_SCALES[0]), FIT_SCALES[1])) : 1;
  }

  /** Clamp the offset and move the layers to it. */
  applyTransform() {
    const { layout } = this;
    if (!layout) return;
    // Content that fits stays inside the view; larger content moves at most 40 pixels past its edges.
    const { width, height } = this.viewSize, clamp = (/** @type {number} */ offset, /** @type {number} */ size, /** @type {number} */ available) => (
      size <= available ? Math.min(Math.max(offset, 0), available - size) : Math.min(Math.max(offset, available - size - 40), 40));
    this.x = clamp(this.x, layout.width * this.scale, width);
    this.y = clamp(this.y, layout.height * this.scale, height);
    const [grid, words, slices] = this.panes;
    grid.style.transform = `translate(${this.x}px,${this.y}px) scale(${this.scale})`;
    words.style.transform = `translate(${this.x}px,0)`;
    slices.style.transform = `translate(0,${this.y}px)`;
  }

  /** Move the content. @param {number} dx @param {number} dy */
  pan(dx, dy) {
    const { x, y } = this;
    this.x += dx;
    this.y += dy;
    this.applyTransform();
    if (this.x !== x || this.y !== y) this.isFitted = false;
  }

  /** Scale the content about a point. @param {number} factor @param {number} [x] @param {number} [y]  the point that does not move */
  zoom(factor, x = this.viewSize.width / 2, y = this.viewSize.height / 2) {
    const scale = Math.min(Math.max(this.scale * factor, Math.min(MIN_SCALE, this.fullScale)), 4), ratio = scale / this.scale;
    this.x = x - (x - this.x) * ratio;
    this.y = y - (y - this.y) * ratio;
    this.scale = scale;
    this.isFitted = false;
    this.applyTransform();
    this.updateStrips();
  }

  /** Set the scale at which the full layout is in view, or as much of it as is readable. */
  #fitScale() {
    const { width, height } = this.viewSize, { fullScale, readableScale } = this, layout = /** @type {Layout} */ (this.layout);
    this.isComplete = this.isForced || fullScale >= readableScale;
    this.scale = this.isComplete ? fullScale : Math.min(Math.max(height / layout.height, width / layout.width, readableScale), 1);
  }

  /** Show the full layout, or as much of it as is readable at once. @param {boolean} [isForced]  show all of it, also if it is not readable */
  fit(isForced = false) {
    if (!this.layout) return;
    this.isFitted = true;
    this.isForced = isForced;
    this.#fitScale();
    const isCrowded = !this.layout.isSlanted && this.wordShrink < MIN_SHRINK;
    if (isCrowded !== this.isCrowded) {
      this.isCrowded = isCrowded;
      this.#sizeStrips();
      this.#renderStrips(this.layout, /** @type {GroundGraph} */ (this.graph));
      this.#fitScale(); // a higher header gives a smaller scale, at which the words are still crowded
    }
    const { width } = this.viewSize;
    this.x = Math.max(0, (width - this.layout.width * this.scale) / 2);
    this.y = 0;
    this.applyTransform();
    this.updateStrips();
  }

  /** After a change of the view's size: fit again, unless the user panned or zoomed. */
  resize() {
    const { unit } = this;
    this.#measure();
    if (!this.layout || !this.graph) return;
    this.#sizeStrips();
    if (this.unit !== unit) this.#renderStrips(this.layout, this.graph);
    if (this.unit !== unit && !this.isFitted) this.updateStrips();
    if (this.isFitted) this.fit(this.isForced); else this.applyTransform();
  }

  /** Pan until a point is in view. @param {number} x @param {number} y */
  reveal(x, y) {
    const { width, height } = this.viewSize, point = { x: this.x + x * this.scale, y: this.y + y * this.scale };
    this.pan(point.x < 60 ? 60 - point.x : point.x > width - 60 ? width - 60 - point.x : 0, point.y < 40 ? 40 - point.y : point.y > height - 40 ? height - 40 - point.y : 0);
  }

  /** The SVG layers with their transforms and clips, for the export. */
  layers() {
    return [
      { svg: this.grid, x: this.x, y: this.y, scale: this.scale, clip: this.main.getBoundingClientRect() },
      { svg: this.words, x: this.x, y: 0, scale: 1, clip: this.top.getBoundingClientRect() },
      { svg: this.slices, x: 0, y: this.y, scale: 1, clip: this.left.getBoundingClientRect() },
    ];
  }
}
