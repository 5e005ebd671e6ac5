// @ts-check
/** Entry point of the HTML file: decodes the embedded description and buffer, and mounts the explorer. */

import { mount } from "./explorer.js";

/** The text of an element of the page. @param {string} id */
const elementText = (id) => /** @type {HTMLElement} */ (document.getElementById(id)).textContent ?? "";

const bytes = Uint8Array.from(atob(elementText("bnet-buffer")), (letter) => letter.charCodeAt(0));
const compressed = new Blob([bytes]).stream().pipeThrough(new DecompressionStream("gzip"));
mount(/** @type {HTMLElement} */ (document.getElementById("bnet")), {
  description: JSON.parse(elementText("bnet-description")),
  buffer: new Uint8Array(await new Response(compressed).arrayBuffer()),
});
