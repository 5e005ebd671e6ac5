// @ts-check
/** The requests of the live page. The token stays in this tab: it is moved from the address to the session storage. */

import { serverState } from "./live_state.js";

/** @typedef {import("./live_state.js").LiveState} LiveState */

const TOKEN_KEY = "bnet-token";

/** A request that a newer one replaced. */
export class Superseded extends Error {}

/** A request that the user cancelled. */
export class Cancelled extends Error {
  constructor() { super("cancelled"); }
}

/** A request that the server rejects, because the state is not valid or too expensive. */
export class RejectedError extends Error {}

/** A request without the right token. */
export class TokenError extends Error {}

/** The token of the address, which is removed from it, or of the session. @returns {string} */
export function takeToken() {
  const token = new URLSearchParams(location.search).get("token");
  if (token !== null) {
    sessionStorage.setItem(TOKEN_KEY, token);
    history.replaceState(history.state, "", location.pathname + location.hash);
  }
  return sessionStorage.getItem(TOKEN_KEY) ?? "";
}

export class Client {
  /** @type {Map<string, {controller: AbortController, start: number}>} */ pending = new Map(); // `start`: its time in milliseconds
  onPending = () => {}; // called after a change of `pending`
  tab = Array.from(crypto.getRandomValues(new Uint8Array(12)), (byte) => byte.toString(16).padStart(2, "0")).join("");
  token = takeToken();

  /** Store the token that the user typed, alone or as part of an address. @param {string} text */
  setToken(text) {
    this.token = text.match(/[?&]token=([^&#]*)/)?.[1] ?? text.trim();
    sessionStorage.setItem(TOKEN_KEY, this.token);
  }

  /** The names of the models. @returns {Promise<{models: string[], loaded: string[], max_words: number}>} */
  async listModels() { return (await this.#fetch("models", { method: "GET" })).json(); }

  /** The description and the buffer of the page of a state. @param {LiveState} state */
  async fetchPage(state) {
    const bytes = new Uint8Array(await (await this.#post("page", state)).arrayBuffer()), length = new DataView(bytes.buffer).getUint32(0, true);
    return { description: JSON.parse(new TextDecoder().decode(bytes.subarray(4, 4 + length))), buffer: bytes.subarray(4 + length) };
  }

  /** The lens of a state, or its patch. @param {"lens"|"patch"} kind @param {LiveState} state */
  async fetchTable(kind, state) { return (await this.#post(kind, state)).json(); }

  /** The HTML file of a state. @param {LiveState} state */
  async fetchFile(state) { return (await this.#post("file", state)).blob(); }

  /** Send a request; an earlier one of the same kind is aborted, and a page aborts all. @param {string} kind @param {LiveState} state */
  async #post(kind, state) {
    for (const [other, { controller }] of this.pending) if (kind === "page" || kind === other) controller.abort();
    const controller = new AbortController();
    this.pending.set(kind, { controller, start: performance.now() });
    this.onPending();
    try {
      return await this.#fetch(kind, { method: "POST", body: JSON.stringify({ tab: this.tab, state: serverState(state) }), signal: controller.signal });
    } catch (error) {
      const { aborted, reason } = controller.signal;
      if (aborted) throw reason instanceof Cancelled ? reason : new Superseded();
      throw error;
    } finally {
      if (this.pending.get(kind)?.controller === controller) this.pending.delete(kind);
      this.onPending();
    }
  }

  /** Abort all requests; the server then stops their work. */
  cancel() { for (const { controller } of this.pending.values()) controller.abort(new Cancelled()); }

  /** @param {string} kind @param {RequestInit} options */
  async #fetch(kind, options) {
    let response;
    try {
      response = await fetch(`/api/${kind}`, { ...options, headers: { authorization: `Bearer ${this.token}`, "content-type": "application/json" } });
    } catch (error) {
      if (options.signal?.aborted) throw error;
      throw new Error("the server does not answer: check that bnet-transformer serve is running");
    }
    if (response.ok) return response;
    const { error } = await response.json().catch(() => ({ error: `the server answered with the status ${response.status}` }));
    throw response.status === 401 ? new TokenError(error) : response.status === 422 ? new RejectedError(error) : new Error(error);
  }
}
