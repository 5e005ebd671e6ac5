// @ts-check
/** The viewport: the grid, with the words above and the slices at the left. Panning changes only a transform and does not redraw. */

import { htmlElement, svgElement } from "./elements.js";
import { textWidth } from "./layout.js";

const MAX_STRIP_WIDTH = 92; // width of the strip of slices
const MIN_SCALE = 0.2; // the minimum scale of `fit`, for a short sentence
const MIN_READABLE_SCALE = 0.62; // the same for a long sentence, whose nodes are dots

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
    this.main = htmlElement("div", { class: "main" }, this.grid);
    this.top = htmlElement("div", { class: "top" }, this.words);
    this.left = htmlElement("div", { class: "left" }, this.slices);
    this.view = htmlElement("div", { class: "view" }, this.main, this.top, this.left, htmlElement("div", { class: "corner" }));
    /** @type {Layout|null} */
    this.layout = null;
    this.strips = ""; // what the strips show
    this.size = { width: 0, height: 0 }; // of the view with its strips; reading it from the page computes the page's layout
    this.#addListeners(isPage);
  }

  /** @param {boolean} isPage */
  #addListeners(isPage) {
    /** @type {{x: number, y: number}|null} */
    let pointer = null;
    this.isDragged = false;
    this.view.addEventListener("pointerdown", (event) => { if (event.button === 0) { pointer = { x: event.clientX, y: event.clientY }; this.isDragged = false; } });
    this.view.addEventListener("pointermove", (event) => {
      if (!pointer || !(event.buttons & 1)) { pointer = null; return; }
      if (!this.isDragged && Math.hypot(event.clientX - pointer.x, event.clientY - pointer.y) < 4) return;
      if (!this.isDragged) { this.isDragged = true; this.view.setPointerCapture(event.pointerId); this.view.classList.add("moving"); }
      this.pan(event.clientX - pointer.x, event.clientY - pointer.y);
      pointer = { x: event.clientX, y: event.clientY };
    });
    for (const name of ["pointerup", "pointercancel"]) this.view.addEventListener(name, () => { pointer = null; this.view.classList.remove("moving"); });
    this.view.addEventListener("wheel", (event) => {
      if (!event.ctrlKey && !event.metaKey && !isPage && !event.shiftKey) return;
      event.preventDefault();
      if (event.ctrlKey || event.metaKey) {
        const { left, top } = this.main.getBoundingClientRect();
        this.zoom(Math.exp(-event.deltaY * 0.0022), event.clientX - left, event.clientY - top);
      } else this.pan(event.shiftKey && !event.deltaX ? -event.deltaY : -event.deltaX, event.shiftKey ? 0 : -event.deltaY);
    }, { passive: false });
  }

  /** Show a new layout: rebuild the strips, and fit it if its size changed. @param {Layout} layout @param {GroundGraph} graph */
  setLayout(layout, graph) {
    const isResized = this.layout?.width !== layout.width || this.layout?.height !== layout.height;
    const stripWidth = Math.min(MAX_STRIP_WIDTH, 26 + Math.max(30, ...layout.sections.map((section) => textWidth(`▸ ${section.label}`, 11))));
    this.layout = layout;
    this.headerHeight = layout.headerHeight;
    this.stripWidth = stripWidth;
    this.view.style.setProperty("--head", `${layout.headerHeight}px`);
    this.view.style.setProperty("--left", `${stripWidth}px`);
    this.grid.setAttribute("width", String(layout.width));
    this.grid.setAttribute("height", String(layout.height));
    const strips = JSON.stringify([layout.words, layout.states.map(({ y, group }) => [y, graph.groups[group].name]), layout.sections, stripWidth, layout.isSlanted]);
    if (strips !== this.strips) this.#renderStrips(layout, graph);
    if (isResized) this.fit();
    else { this.applyTransform(); if (strips !== this.strips) this.updateStrips(); }
    this.strips = strips;
  }

  /** Render the words and the slices. @param {Layout} layout @param {GroundGraph} graph */
  #renderStrips(layout, graph) {
    const { stripWidth } = this;
    this.words.replaceChildren(svgElement("g", {}, ...layout.words.map((word) => {
      const text = svgElement("text", { class: "word", "data-word": word.word, "data-stack": word.stack, "font-size": layout.isSlanted ? 10.5 : 12.5, "text-anchor": layout.isSlanted ? "start" : "middle" });
      text.textContent = word.text;
      text.append(svgElement("title"));
      /** @type {Element} */ (text.lastChild).textContent = `${word.word} ${word.fullText}`;
      return text;
    })));
    const states = layout.states.map(({ group }) => {
      const { label, slice, stack } = graph.groups[group], size = 11;
      const text = svgElement("text", { class: "state-name", x: stripWidth - 12, "font-size": size, "text-anchor": "end" });
      text.append(...(stack ? [svgElement("tspan", { class: "stack" }, `${stack} `)] : []), svgElement("tspan", { class: "math" }, label[0]), ...(slice === null ? [] : [svgElement("tspan", { dy: -4, "font-size": 8 }, String(slice))]));
      return text;
    });
    const sections = layout.sections.map((section) => {
      const text = svgElement("text", { x: 12, y: 4, "font-size": 11 });
      text.textContent = `${section.isOpen ? "▾" : "▸"} ${section.label}`;
      return svgElement("g", { class: "section", role: "button", tabindex: 0, "data-slice-section": section.key, "aria-expanded": String(section.isOpen), "aria-label": `${section.isOpen ? "fold" : "unfold"} ${section.label}` },
        svgElement("rect", { x: 4, y: -10, width: stripWidth - 12, height: 20, rx: 4, class: "target" }), text);
    });
    this.slices.replaceChildren(svgElement("g", {}, ...states), svgElement("g", {}, ...sections));
  }

  /** Move the labels of the strips: their font size does not scale. */
  updateStrips() {
    const { layout, scale } = this;
    if (!layout) return;
    let free = -1e9; // the right end of the last visible word: a word that would overlap it is hidden
    [.../** @type {Element} */ (this.words.firstChild).children].forEach((text, k) => {
      const { x: centre, text: label } = layout.words[k], x = centre * scale, half = layout.isSlanted ? 6.5 : textWidth(label, 12.5) / 2;
      const isVisible = x - half >= free;
      if (isVisible) free = x + half;
      text.setAttribute("visibility", isVisible ? "visible" : "hidden");
      text.setAttribute("transform", layout.isSlanted ? `translate(${x + 3} ${layout.headerHeight - 7}) rotate(-46)` : `translate(${x} ${layout.headerHeight - 12})`);
    });
    const [states, sections] = this.slices.children;
    [...states.children].forEach((text, k) => text.setAttribute("transform", `translate(0 ${layout.states[k].y * scale + 4})`));
    [...sections.children].forEach((group, k) => group.setAttribute("transform", `translate(0 ${layout.sections[k].y * scale})`));
    this.words.setAttribute("width", String(layout.width * scale + 120));
    this.words.setAttribute("height", String(layout.headerHeight));
    this.slices.setAttribute("width", String(this.stripWidth));
    this.slices.setAttribute("height", String(layout.height * scale + 60));
  }

  /** The size of the visible part of the grid. */
  get viewSize() {
    if (!this.size.width) this.#measure();
    return { width: Math.max(0, this.size.width - this.stripWidth), height: Math.max(0, this.size.height - this.headerHeight) };
  }

  /** Read the size of the view from the page. */
  #measure() { this.size = { width: this.view.clientWidth, height: this.view.clientHeight }; }

  /** Clamp the offset and move the layers to it. */
  applyTransform() {
    const { layout } = this;
    if (!layout) return;
    // Content that fits stays inside the view; larger content moves at most 40 pixels past its edges.
    const { width, height } = this.viewSize, clamp = (/** @type {number} */ offset, /** @type {number} */ size, /** @type {number} */ available) => (
      size <= available ? Math.min(Math.max(offset, 0), available - size) : Math.min(Math.max(offset, available - size - 40), 40));
    this.x = clamp(this.x, layout.width * this.scale, width);
    this.y = clamp(this.y, layout.height * this.scale, height);
    this.grid.style.transform = `translate(${this.x}px,${this.y}px) scale(${this.scale})`;
    this.words.style.transform = `translate(${this.x}px,0)`;
    this.slices.style.transform = `translate(0,${this.y}px)`;
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
    const scale = Math.min(Math.max(this.scale * factor, 0.2), 4), ratio = scale / this.scale;
    this.x = x - (x - this.x) * ratio;
    this.y = y - (y - this.y) * ratio;
    this.scale = scale;
    this.isFitted = false;
    this.applyTransform();
    this.updateStrips();
  }

  /** Show the full layout, or as much of it as is readable at once. */
  fit() {
    if (!this.layout) return;
    const { width, height } = this.viewSize, fullScale = Math.min(width / this.layout.width, height / this.layout.height, 1.3);
    this.isFitted = true;
    this.scale = fullScale >= (this.layout.isSlanted ? MIN_READABLE_SCALE : MIN_SCALE) ? fullScale : Math.min(Math.max(height / this.layout.height, MIN_READABLE_SCALE), 1);
    this.x = Math.max(0, (width - this.layout.width * this.scale) / 2);
    this.y = 0;
    this.applyTransform();
    this.updateStrips();
  }

  /** After a change of the view's size: fit again, unless the user panned or zoomed. */
  resize() {
    this.#measure();
    if (this.isFitted) this.fit(); else this.applyTransform();
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
