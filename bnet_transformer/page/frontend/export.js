// @ts-check
/** Export of the current view as an SVG file, and as PNG. */

import { svgElement } from "./elements.js";

const STYLE_PROPERTIES = ["fill", "stroke", "stroke-width", "stroke-opacity", "fill-opacity", "stroke-dasharray", "stroke-linecap", "opacity", "font-family", "font-size", "font-style", "font-weight", "text-anchor"];

/** A copy of an element with the computed style written into attributes; null if it is invisible. @param {Element} element @returns {Element|null} */
function inlineStyles(element) {
  const style = getComputedStyle(element);
  if (style.display === "none" || element.classList.contains("target")) return null;
  const copy = /** @type {Element} */ (element.cloneNode(false));
  for (const name of ["class", "role", "tabindex", "style", "aria-label", "aria-selected", "aria-expanded", "aria-colindex", "aria-rowindex"]) copy.removeAttribute(name);
  if (element.tagName !== "g" && element.tagName !== "svg") for (const name of STYLE_PROPERTIES) {
    const value = style.getPropertyValue(name);
    if (value && !(name === "stroke-dasharray" && value === "none") && !(name.startsWith("font") && element.tagName !== "text" && element.tagName !== "tspan") && !(value === "1" && name.endsWith("opacity"))) copy.setAttribute(name, value.replace(/^(-?[\d.]+)px$/, "$1"));
  }
  else if (style.opacity !== "1") copy.setAttribute("opacity", style.opacity);
  for (const child of element.childNodes) {
    const childCopy = child instanceof Element ? inlineStyles(child) : child.cloneNode();
    if (childCopy) copy.append(childCopy);
  }
  return copy;
}

/** The visible part of the layers as the text of an SVG file. @param {HTMLElement} view @param {{svg: SVGElement, x: number, y: number, scale: number, clip: DOMRect}[]} layers @param {string} title @param {string} paper */
export function viewToSvg(view, layers, title, paper) {
  const { width, height, left, top } = view.getBoundingClientRect();
  const root = svgElement("svg", { xmlns: "http://www.w3.org/2000/svg", width, height, viewBox: `0 0 ${width} ${height}` });
  const name = svgElement("title");
  name.textContent = title;
  root.append(name, svgElement("rect", { width, height, fill: paper }));
  layers.forEach((layer, k) => {
    const { clip } = layer, id = `clip-${k}`;
    const isInView = (/** @type {Element} */ element) => {
      const box = element.getBoundingClientRect();
      return box.right >= clip.left - 4 && box.left <= clip.right + 4 && box.bottom >= clip.top - 4 && box.top <= clip.bottom + 4;
    };
    root.append(svgElement("clipPath", { id }, svgElement("rect", { x: clip.left - left, y: clip.top - top, width: clip.width, height: clip.height })));
    const content = svgElement("g", { transform: `translate(${layer.x + clip.left - left} ${layer.y + clip.top - top}) scale(${layer.scale})` });
    for (const child of layer.svg.children) {
      const group = /** @type {Element} */ (child.cloneNode(false));
      for (const attribute of ["class", "role"]) group.removeAttribute(attribute);
      for (const element of child.children) { const copy = isInView(element) ? inlineStyles(element) : null; if (copy) group.append(copy); }
      content.append(group);
    }
    root.append(svgElement("g", { "clip-path": `url(#${id})` }, content));
  });
  return `<?xml version="1.0" encoding="UTF-8"?>\n${new XMLSerializer().serializeToString(root)}\n`;
}

/** An SVG as a PNG, at twice the resolution. @param {string} text @param {number} width @param {number} height @returns {Promise<Blob>} */
export async function svgToPng(text, width, height) {
  const url = URL.createObjectURL(new Blob([text], { type: "image/svg+xml" })), image = new Image();
  try {
    await new Promise((resolve, reject) => { image.onload = resolve; image.onerror = reject; image.src = url; });
    const canvas = document.createElement("canvas"), scale = Math.min(2, 8000 / Math.max(width, height));
    canvas.width = Math.round(width * scale);
    canvas.height = Math.round(height * scale);
    /** @type {CanvasRenderingContext2D} */ (canvas.getContext("2d")).drawImage(image, 0, 0, canvas.width, canvas.height);
    return await new Promise((resolve, reject) => canvas.toBlob((blob) => (blob ? resolve(blob) : reject(new Error("the browser cannot create a PNG of this size"))), "image/png"));
  } finally { URL.revokeObjectURL(url); }
}

/** Save a file through the browser. @param {Blob} blob @param {string} name */
export function downloadBlob(blob, name) {
  const link = document.createElement("a"), url = URL.createObjectURL(blob);
  link.href = url;
  link.download = name;
  link.click();
  setTimeout(() => URL.revokeObjectURL(url), 10_000);
}
