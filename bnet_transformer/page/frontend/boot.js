// @ts-check
/** Entry point of the HTML file: decodes the embedded description and buffer, and mounts the explorer. The fragment of the address is the view. */

import { mount } from "./explorer.js";
import { formatFragment, parseFragment } from "./view_state.js";

/** The text of an element of the page. @param {string} id */
const elementText = (id) => /** @type {HTMLElement} */ (document.getElementById(id)).textContent ?? "";

/** Write the view into the address. @param {import("./view_state.js").ViewState} state */
function handleState(state) {
  try { history.replaceState(history.state, "", location.href.split("#")[0] + formatFragment(state)); } catch { /* some browsers forbid this in a frame or for a file */ }
}

const bytes = Uint8Array.from(atob(elementText("bnet-buffer")), (letter) => letter.charCodeAt(0));
const compressed = new Blob([bytes]).stream().pipeThrough(new DecompressionStream("gzip"));
const data = { description: JSON.parse(elementText("bnet-description")), buffer: new Uint8Array(await new Response(compressed).arrayBuffer()) };
const view = mount(/** @type {HTMLElement} */ (document.getElementById("bnet")), data, { handleState });
const readFragment = () => view.setState(parseFragment(location.hash));
addEventListener("hashchange", readFragment);
readFragment();
