// @ts-check
// The widget's side of a notebook: draws the page from what Python tells, and asks Python to set nodes.

import { mount } from "./explore.js";

/**
 * What anywidget gives: traits by name, messages, and the cell.
 * @typedef {{get(name: string): any, on(what: string, call: (...told: any[]) => void): void,
 *   off(what: string, call: (...told: any[]) => void): void, send(content: object): void}} Model
 */

/** @param {{model: Model, el: HTMLElement}} cell */
function render({ model, el }) {
  /** @type {Map<string, {good: () => void, bad: (error: Error) => void}>} */
  const waiting = new Map();
  const own = Math.random().toString(36).slice(2); // every view of a widget hears every answer, also those to others
  let asked = 0;

  const page = () => {
    const block = model.get("block");
    return { about: model.get("about"), bytes: new Uint8Array(block.buffer, block.byteOffset, block.byteLength) };
  };

  /** @param {object} what @returns {Promise<void>} */
  const ask = (what) =>
    new Promise((good, bad) => {
      const id = `${own} ${++asked}`;
      waiting.set(id, { good, bad });
      model.send({ id, ...what });
    });

  /** @param {{id: string, error?: string}} answer */
  const heard = ({ id, error }) => {
    const one = waiting.get(id);
    waiting.delete(id);
    if (error === undefined) one?.good();
    else one?.bad(new Error(error));
  };

  let stale = false;
  const changed = () => {
    if (!stale) queueMicrotask(() => ((stale = false), view.update(page())));
    stale = true;
  };

  const view = mount(el, page(), {
    /** @param {[string, object][]} pairs */
    do: (pairs) => ask({ do: pairs }),
    /** @param {string[]} names */
    undo: (names) => ask({ undo: names }),
  });
  const heeded = /** @type {const} */ ([["msg:custom", heard], ["change:about", changed], ["change:block", changed]]);
  for (const [what, call] of heeded) model.on(what, call);
  return () => {
    for (const [what, call] of heeded) model.off(what, call);
    view.remove();
  };
}

export default { render };
