// @ts-check
/** A page of its own: read what stands in it, unpack it, draw it. */

import { mount } from "./explore.js";

/** The text of an element of the page. @param {string} id */
const textOf = (id) => /** @type {HTMLElement} */ (document.getElementById(id)).textContent ?? "";

const bytes = Uint8Array.from(atob(textOf("bnet-bytes")), (letter) => letter.charCodeAt(0));
const packed = new Blob([bytes]).stream().pipeThrough(new DecompressionStream("gzip"));
mount(/** @type {HTMLElement} */ (document.getElementById("bnet")), {
  about: JSON.parse(textOf("bnet-about")),
  bytes: new Uint8Array(await new Response(packed).arrayBuffer()),
});
