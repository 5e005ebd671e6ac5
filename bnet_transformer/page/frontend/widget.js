// @ts-check
// Entry point of the anywidget: mounts the explorer on the widget's traits, and sends do, undo and the view to Python.

import { mount } from "./explorer.js";

/**
 * The part of anywidget's model that is used: traits by name, and messages.
 * @typedef {{get(name: string): any, set(name: string, value: any): void, save_changes(): void, on(event: string, listener: (...values: any[]) => void): void,
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

  const readState = () => ({ selected: model.get("selected"), ...model.get("view") });

  // A message changes several traits, and each causes an event; the page is drawn once, after these events.
  /** @type {Set<string>} */
  const changed = new Set();
  const update = () => {
    const [isPage, isState] = ["page", "state"].map((part) => changed.has(part));
    changed.clear();
    if (isPage) view.update(readPage());
    if (isState) view.setState(readState()); // nothing is drawn if this view shows the state
  };
  const scheduleUpdate = (/** @type {string} */ part) => {
    if (!changed.size) queueMicrotask(update);
    changed.add(part);
  };
  const schedulePage = () => scheduleUpdate("page"), scheduleState = () => scheduleUpdate("state");

  const view = mount(el, readPage(), {
    /** @param {[string, object][]} pairs */
    do: (pairs) => sendRequest({ do: pairs }),
    /** @param {string[]} names */
    undo: (names) => sendRequest({ undo: names }),
    /** @param {import("./view_state.js").ViewState} state */
    handleState: ({ selected = null, ...settings }) => {
      model.set("selected", selected);
      model.set("view", settings);
      model.save_changes();
    },
  });
  view.setState(readState());
  // Keys of the page are not shortcuts of the notebook: in JupyterLab, "x" cuts the cell. Those with Control or Command are.
  const keys = new AbortController();
  el.addEventListener("keydown", (event) => { if (!event.ctrlKey && !event.metaKey) event.stopPropagation(); }, { signal: keys.signal });
  const listeners = /** @type {const} */ ([["msg:custom", handleAnswer], ["change:description", schedulePage], ["change:buffer", schedulePage], ["change:selected", scheduleState], ["change:view", scheduleState]]);
  for (const [event, listener] of listeners) model.on(event, listener);
  return () => {
    for (const [event, listener] of listeners) model.off(event, listener);
    keys.abort();
    view.remove();
  };
}

export default { render };
