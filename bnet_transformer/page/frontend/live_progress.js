// @ts-check
/** The line of the live page that shows which answers are awaited, for how long, and a button that cancels them. */

import { htmlElement } from "./elements.js";

/** @typedef {import("./live_client.js").Client} Client */

const DELAY = 600, INTERVAL = 200, LOADED_INTERVAL = 1000; // milliseconds; a quick answer shows no line
const SUBJECTS = /** @type {Record<string, string>} */ ({ page: "computing", lens: "computing the lens", patch: "computing the patch", file: "writing the file" });

export class Progress {
  /** @type {Set<string>} */ loaded = new Set(); // the models that the server has loaded
  model = ""; // the model of the awaited page
  /** @type {ReturnType<typeof setInterval>|undefined} */ timer;
  lastRequest = 0;

  /** @param {Client} client */
  constructor(client) {
    this.client = client;
    this.subject = htmlElement("span", { role: "status" });
    this.seconds = htmlElement("span", { "aria-hidden": true });
    const cancel = htmlElement("button", { type: "button", "data-command": "cancel", onclick: () => client.cancel() }, "cancel");
    this.line = htmlElement("p", { hidden: true }, this.subject, this.seconds, cancel);
    this.element = htmlElement("div", { class: "live-progress" }, this.line);
    client.onPending = () => this.#handlePending();
  }

  /** Start or stop the clock. */
  #handlePending() {
    if (this.client.pending.size) this.timer ??= setInterval(() => this.#draw(), INTERVAL);
    else {
      clearInterval(this.timer);
      this.timer = undefined;
      this.subject.textContent = "";
      this.line.hidden = true;
    }
  }

  /** Draw the request that has waited for the longest time. */
  #draw() {
    const [kind, { start }] = [...this.client.pending].reduce((first, next) => (next[1].start < first[1].start ? next : first));
    const elapsed = performance.now() - start, isLoading = kind === "page" && !this.loaded.has(this.model);
    if (elapsed < DELAY) return;
    if (isLoading && performance.now() - this.lastRequest > LOADED_INTERVAL) this.#refreshLoaded();
    this.line.hidden = false; // first, because text of a hidden element is not announced
    const subject = isLoading ? `loading ${this.model}` : SUBJECTS[kind];
    if (this.subject.textContent !== subject) this.subject.textContent = subject; // else it would be announced again
    this.seconds.textContent = `${Math.floor(elapsed / 1000)} s`;
  }

  /** Ask the server which models are loaded. */
  async #refreshLoaded() {
    this.lastRequest = performance.now();
    try { this.loaded = new Set((await this.client.listModels()).loaded); } catch { /* the awaited request reports the error */ }
  }
}
