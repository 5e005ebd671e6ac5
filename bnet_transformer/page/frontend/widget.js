// @ts-check
// Entry point of the anywidget: mounts the explorer on the widget's traits, and sends do and undo to Python.

import { mount } from "./explorer.js";

/**
 * The part of anywidget's model that is used: traits by name, and messages.
 * @typedef {{get(name: string): any, on(event: string, listener: (...values: any[]) => void): void,
 *   off(event: string, listener: (...values: any[]) => void): void, send(content: object): void}} WidgetModel
 */

/** @param {{model: WidgetModel, el: HTMLElement}} cell */
function render({ model, el }) {
  /** @type {Map<string, {resolve: () => void, reject: (error: Error) => void}>} */
  const pendingRequests = new Map();
  const viewId = Math.random().toString(36).slice(2); // every view of the widget receives each answer; the id identifies the view that sent the request
  let requestCount = 0;

  const readPage = () => {
    const buffer = model.get("buffer");
    return { description: model.get("description"), buffer: new Uint8Array(buffer.buffer, buffer.byteOffset, buffer.byteLength) };
  };

  /** @param {object} content @returns {Promise<void>} */
  const sendRequest = (content) =>
    new Promise((resolve, reject) => {
      const id = `${viewId} ${++requestCount}`;
      pendingRequests.set(id, { resolve, reject });
      model.send({ id, ...content });
    });

  /** @param {{id: string, error?: string}} answer */
  const handleAnswer = ({ id, error }) => {
    const request = pendingRequests.get(id);
    pendingRequests.delete(id);
    if (error === undefined) request?.resolve();
    else request?.reject(new Error(error));
  };

  // An answer changes both traits, and each causes an event; the page is drawn once, after both events.
  let isStale = false;
  const scheduleUpdate = () => {
    if (!isStale) queueMicrotask(() => ((isStale = false), view.update(readPage())));
    isStale = true;
  };

  const view = mount(el, readPage(), {
    /** @param {[string, object][]} pairs */
    do: (pairs) => sendRequest({ do: pairs }),
    /** @param {string[]} names */
    undo: (names) => sendRequest({ undo: names }),
  });
  const listeners = /** @type {const} */ ([["msg:custom", handleAnswer], ["change:description", scheduleUpdate], ["change:buffer", scheduleUpdate]]);
  for (const [event, listener] of listeners) model.on(event, listener);
  return () => {
    for (const [event, listener] of listeners) model.off(event, listener);
    view.remove();
  };
}

export default { render };
