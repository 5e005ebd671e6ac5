// @ts-check
/** The page on paper: the sentence, the whole graph in bands that fit the width of a page, its legend and its notes. */

import { htmlElement, svgElement } from "./elements.js";
import { renderLegend, renderNotes } from "./panel.js";

/**
 * @typedef {import("./layout.js").Layout} Layout
 * @typedef {{frame: HTMLElement, footer: HTMLElement, description: any, graph: import("./ground_graph.js").GroundGraph, layout: Layout, selected: number[],
 *   elements: Map<import("./layout.js").Box, SVGElement>, background: SVGElement, foreground: SVGElement, settings: import("./controls.js").Settings, viewport: import("./viewport.js").Viewport}} Printable
 */

const MAX_WIDTH = 1400; // of a graph that is printed without a break
const BAND_WIDTH = 1050; // of the bands of a wider graph
const MAX_ASPECT = 1.6; // a graph that is higher, relative to its width, continues on the next page
const LABEL_SPACE = 34; // for the slanted label of the last word

export class Printout {
  /** @param {Printable} explorer */
  constructor(explorer) {
    this.explorer = explorer;
    this.figure = htmlElement("div", { class: "printout" });
    this.remarks = htmlElement("div", { class: "printout" });
    this.listeners = new AbortController();
    explorer.frame.prepend(this.figure);
    explorer.frame.append(this.remarks);
    const media = matchMedia("print"), { signal } = this.listeners;
    media.addEventListener("change", () => (media.matches ? this.build() : this.clear()), { signal });
    addEventListener("beforeprint", () => this.build(), { signal });
    addEventListener("afterprint", () => this.clear(), { signal });
  }

  remove() { this.listeners.abort(); }

  clear() {
    this.figure.replaceChildren();
    this.remarks.replaceChildren();
  }

  /** Copy the graph in its current state. */
  build() {
    const { description, footer, layout, selected, settings } = this.explorer;
    const title = htmlElement("h1", {}, htmlElement("bdi", {}, description.title)), starts = findBands(layout), width = Math.max(...starts.slice(1).map((end, k) => end - starts[k]));
    this.figure.replaceChildren(title, ...starts.slice(0, -1).map((start, k) => this.#renderBand(start, starts[k + 1], width)), htmlElement("p", { class: "small" }, footer.textContent ?? ""));
    this.remarks.replaceChildren(...(selected.length ? [renderLegend(description), ...renderNotes(description, settings.showSpecial)] : []));
  }

  /** The words, slices and nodes of one band. @param {number} start @param {number} end @param {number} width  that of the widest band, so that all have the same scale */
  #renderBand(start, end, width) {
    const { background, elements, foreground, graph, layout, viewport: { grid, stripWidth, unit } } = this.explorer;
    const boxes = layout.boxes.filter(({ x }) => x >= start && x < end), bottom = Math.max(...boxes.map(({ y, height }) => y + height / 2), 0) + 24, left = stripWidth / unit, top = layout.headerHeight;
    const total = left + width + (layout.isSlanted ? LABEL_SPACE : 0), height = top + bottom;
    const words = layout.words.filter(({ x }) => x >= start && x < end).map((word) => {
      const x = left + word.x - start;
      return svgElement("text", { class: "word", "text-anchor": layout.isSlanted ? "start" : "middle", transform: layout.isSlanted ? `translate(${x + 3} ${top - 7}) rotate(-46)` : `translate(${x} ${top - 12})` }, word.text);
    });
    const states = layout.states.map(({ y, group }) => {
      const { label, slice, stack } = graph.groups[group];
      return svgElement("text", { class: "state-name", x: left - 12, y: top + y + 4, "text-anchor": "end", "font-size": 11 }, `${stack ? `${stack} ` : ""}`, svgElement("tspan", { class: "math" }, label[0]), ...(slice === null ? [] : [svgElement("tspan", { dy: -4, "font-size": 8 }, String(slice))]));
    });
    const sections = layout.sections.map((section) => svgElement("text", { class: "state-name", x: 4, y: top + section.y + 4, "font-size": 11 }, section.label));
    const copies = boxes.map((box) => {
      const copy = /** @type {Element} */ (elements.get(box)?.cloneNode(true));
      for (const name of ["role", "tabindex", "aria-label", "aria-selected"]) copy.removeAttribute(name);
      return copy;
    });
    const content = svgElement("g", { class: grid.getAttribute("class") ?? "" }, background.cloneNode(true), foreground.cloneNode(true), ...copies);
    const nodes = svgElement("svg", { x: left, y: top, width: end - start, height: bottom, viewBox: `${start} 0 ${end - start} ${bottom}` }, content);
    const band = svgElement("svg", { class: height < MAX_ASPECT * total ? "band" : "band long", viewBox: `0 0 ${total} ${height}` }, svgElement("g", { class: "strip-words", "font-size": layout.isSlanted ? 10.5 : 12.5 }, ...words), ...states, ...sections, nodes);
    band.style.maxWidth = `${1.3 * total}px`;
    return band;
  }
}

/** The edges of the bands: a graph that is too wide for a page is divided between two words. @param {Layout} layout */
function findBands(layout) {
  const count = layout.width > MAX_WIDTH ? Math.ceil(layout.width / BAND_WIDTH) : 1, positions = layout.words.map(({ x }) => x).sort((a, b) => a - b);
  const gaps = positions.slice(1).map((x, k) => (x + positions[k]) / 2);
  const nearest = (/** @type {number} */ x) => gaps.reduce((best, gap) => (Math.abs(gap - x) < Math.abs(best - x) ? gap : best), x + layout.width);
  const inner = gaps.length ? Array.from({ length: count - 1 }, (_, k) => nearest(((k + 1) * layout.width) / count)) : [];
  return [0, ...new Set(inner), layout.width];
}
