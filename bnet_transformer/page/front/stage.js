// @ts-check
/** The stage: the grid with the words pinned above and the slices at the left. Panning is a transform, never a redraw. */

import { widthOf } from "./layout.js";
import { html, svg } from "./scene.js";

const LEFT = 92; // at most, the strip of slices
const LEAST = 0.2; // the scale down to which the whole of a short sentence is shown
const READABLE = 0.62; // and of a long one, whose nodes are dots

/**
 * @typedef {import("./layout.js").Layout} Layout
 * @typedef {import("./net.js").Net} Net
 */

export class Stage {
  /** @param {boolean} page  a page of its own, where the wheel pans */
  constructor(page) {
    this.x = 0;
    this.y = 0;
    this.scale = 1;
    this.fitted = true; // until someone pans or zooms
    this.grid = svg("svg", { class: "stage", role: "grid", "aria-label": "nodes: words are columns, slices are rows" });
    this.words = svg("svg", { class: "strip-words", role: "presentation" });
    this.slices = svg("svg", { class: "strip-slices", role: "group", "aria-label": "slices" });
    this.main = html("div", { class: "main" }, this.grid);
    this.top = html("div", { class: "top" }, this.words);
    this.left = html("div", { class: "left" }, this.slices);
    this.view = html("div", { class: "view" }, this.main, this.top, this.left, html("div", { class: "corner" }));
    /** @type {Layout|null} */
    this.layout = null;
    this.#listen(page);
  }

  /** @param {boolean} page */
  #listen(page) {
    /** @type {{x: number, y: number}|null} */
    let held = null;
    this.dragged = false;
    this.view.addEventListener("pointerdown", (event) => { if (event.button === 0) { held = { x: event.clientX, y: event.clientY }; this.dragged = false; } });
    this.view.addEventListener("pointermove", (event) => {
      if (!held || !(event.buttons & 1)) { held = null; return; }
      if (!this.dragged && Math.hypot(event.clientX - held.x, event.clientY - held.y) < 4) return;
      if (!this.dragged) { this.dragged = true; this.view.setPointerCapture(event.pointerId); this.view.classList.add("moving"); }
      this.pan(event.clientX - held.x, event.clientY - held.y);
      held = { x: event.clientX, y: event.clientY };
    });
    for (const name of ["pointerup", "pointercancel"]) this.view.addEventListener(name, () => { held = null; this.view.classList.remove("moving"); });
    this.view.addEventListener("wheel", (event) => {
      if (!event.ctrlKey && !event.metaKey && !page && !event.shiftKey) return;
      event.preventDefault();
      if (event.ctrlKey || event.metaKey) {
        const { left, top } = this.main.getBoundingClientRect();
        this.zoom(Math.exp(-event.deltaY * 0.0022), event.clientX - left, event.clientY - top);
      } else this.pan(event.shiftKey && !event.deltaX ? -event.deltaY : -event.deltaX, event.shiftKey ? 0 : -event.deltaY);
    }, { passive: false });
  }

  /** Take a new layout: the strips are made anew, and one of another size is fitted. @param {Layout} layout @param {Net} net */
  take(layout, net) {
    const resized = this.layout?.wide !== layout.wide || this.layout?.tall !== layout.tall;
    const left = Math.min(LEFT, 26 + Math.max(30, ...layout.sections.map((section) => widthOf(`▸ ${section.label}`, 11))));
    this.layout = layout;
    this.head = layout.head;
    this.side = left;
    this.view.style.setProperty("--head", `${layout.head}px`);
    this.view.style.setProperty("--left", `${left}px`);
    this.grid.setAttribute("width", String(layout.wide));
    this.grid.setAttribute("height", String(layout.tall));
    this.words.replaceChildren(svg("g", {}, ...layout.words.map((word) => {
      const text = svg("text", { class: "word", "data-word": word.word, "data-stack": word.stack, "font-size": layout.slant ? 10.5 : 12.5, "text-anchor": layout.slant ? "start" : "middle" });
      text.textContent = word.text;
      text.append(svg("title"));
      /** @type {Element} */ (text.lastChild).textContent = `${word.word} ${word.whole}`;
      return text;
    })));
    const states = layout.states.map(({ family }) => {
      const { letter, slice, stack } = net.families[family], size = 11;
      const text = svg("text", { class: "state-name", x: left - 12, "font-size": size, "text-anchor": "end" });
      text.append(...(stack ? [svg("tspan", { class: "stack" }, `${stack} `)] : []), svg("tspan", { class: "math" }, letter[0]), ...(slice === null ? [] : [svg("tspan", { dy: -4, "font-size": 8 }, String(slice))]));
      return text;
    });
    const sections = layout.sections.map((section) => {
      const text = svg("text", { x: 12, y: 4, "font-size": 11 });
      text.textContent = `${section.open ? "▾" : "▸"} ${section.label}`;
      return svg("g", { class: "section", role: "button", tabindex: 0, "data-section": section.key, "aria-expanded": String(section.open), "aria-label": `${section.open ? "fold" : "unfold"} ${section.label}` },
        svg("rect", { x: 4, y: -10, width: left - 12, height: 20, rx: 4, class: "target" }), text);
    });
    this.slices.replaceChildren(svg("g", {}, ...states), svg("g", {}, ...sections));
    if (resized) this.fit();
    else { this.apply(); this.strips(); }
  }

  /** Place what stands in the strips: labels keep their size. */
  strips() {
    const { layout, scale } = this;
    if (!layout) return;
    let free = -1e9;
    [.../** @type {Element} */ (this.words.firstChild).children].forEach((text, k) => {
      const { x: middle, text: said } = layout.words[k], x = middle * scale, half = layout.slant ? 6.5 : widthOf(said, 12.5) / 2;
      const there = x - half >= free;
      if (there) free = x + half;
      text.setAttribute("visibility", there ? "visible" : "hidden");
      text.setAttribute("transform", layout.slant ? `translate(${x + 3} ${layout.head - 7}) rotate(-46)` : `translate(${x} ${layout.head - 12})`);
    });
    const [states, sections] = this.slices.children;
    [...states.children].forEach((text, k) => text.setAttribute("transform", `translate(0 ${layout.states[k].y * scale + 4})`));
    [...sections.children].forEach((group, k) => group.setAttribute("transform", `translate(0 ${layout.sections[k].y * scale})`));
    this.words.setAttribute("width", String(layout.wide * scale + 120));
    this.words.setAttribute("height", String(layout.head));
    this.slices.setAttribute("width", String(this.side));
    this.slices.setAttribute("height", String(layout.tall * scale + 60));
  }

  /** Room for the grid itself. */
  get room() { return { wide: this.main.clientWidth, tall: this.main.clientHeight }; }

  apply() {
    const { layout } = this;
    if (!layout) return;
    const { wide, tall } = this.room, reach = (/** @type {number} */ at, /** @type {number} */ size, /** @type {number} */ room) => (
      size <= room ? Math.min(Math.max(at, 0), room - size) : Math.min(Math.max(at, room - size - 40), 40));
    this.x = reach(this.x, layout.wide * this.scale, wide);
    this.y = reach(this.y, layout.tall * this.scale, tall);
    this.grid.style.transform = `translate(${this.x}px,${this.y}px) scale(${this.scale})`;
    this.words.style.transform = `translate(${this.x}px,0)`;
    this.slices.style.transform = `translate(0,${this.y}px)`;
  }

  /** @param {number} dx @param {number} dy */
  pan(dx, dy) {
    const { x, y } = this;
    this.x += dx;
    this.y += dy;
    this.apply();
    if (this.x !== x || this.y !== y) this.fitted = false;
  }

  /** @param {number} by @param {number} [x] @param {number} [y]  the point that stays */
  zoom(by, x = this.room.wide / 2, y = this.room.tall / 2) {
    const scale = Math.min(Math.max(this.scale * by, 0.2), 4), ratio = scale / this.scale;
    this.x = x - (x - this.x) * ratio;
    this.y = y - (y - this.y) * ratio;
    this.scale = scale;
    this.fitted = false;
    this.apply();
    this.strips();
  }

  /** The whole, or as much of it as can be read. */
  fit() {
    if (!this.layout) return;
    const { wide, tall } = this.room, whole = Math.min(wide / this.layout.wide, tall / this.layout.tall, 1.3);
    this.fitted = true;
    this.scale = whole >= (this.layout.slant ? READABLE : LEAST) ? whole : Math.min(Math.max(tall / this.layout.tall, READABLE), 1);
    this.x = Math.max(0, (wide - this.layout.wide * this.scale) / 2);
    this.y = 0;
    this.apply();
    this.strips();
  }

  /** The view has another size: what was fitted is fitted again. */
  resize() { if (this.fitted) this.fit(); else this.apply(); }

  /** Bring a place into view. @param {number} x @param {number} y */
  reveal(x, y) {
    const { wide, tall } = this.room, at = { x: this.x + x * this.scale, y: this.y + y * this.scale };
    this.pan(at.x < 60 ? 60 - at.x : at.x > wide - 60 ? wide - 60 - at.x : 0, at.y < 40 ? 40 - at.y : at.y > tall - 40 ? tall - 40 - at.y : 0);
  }

  /** What an export needs. */
  layers() {
    return [
      { svg: this.grid, x: this.x, y: this.y, scale: this.scale, clip: this.main.getBoundingClientRect() },
      { svg: this.words, x: this.x, y: 0, scale: 1, clip: this.top.getBoundingClientRect() },
      { svg: this.slices, x: 0, y: this.y, scale: 1, clip: this.left.getBoundingClientRect() },
    ];
  }
}
