// @ts-check
/** The requests of the live page. The token stays in this tab: it is moved from the address to the session storage. */

import { serverState } from "./live_state.js";

/** @typedef {import("./live_state.js").LiveState} LiveState */

const TOKEN_KEY = "bnet-token";

/** A request that a newer one replaced. */
export class Superseded extends Error {}

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
  /** @type {Map<string, AbortController>} */ pending = new Map();
  tab = Array.from(crypto.getRandomValues(new Uint8Array(12)), (byte) => byte.toString(16).padStart(2, "0")).join("");
  token = takeToken();

  /** Store a token that the user typed. @param {string} token */
  setToken(token) {
    this.token = token;
    sessionStorage.setItem(TOKEN_KEY, token);
  }

  /** The names of the models. @returns {Promise<{models: string[], max_words: number}>} */
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
    for (const [other, controller] of this.pending) if (kind === "page" || kind === other) controller.abort();
    const controller = new AbortController();
    this.pending.set(kind, controller);
    try {
      return await this.#fetch(kind, { method: "POST", body: JSON.stringify({ tab: this.tab, state: serverState(state) }), signal: controller.signal });
    } catch (error) {
      if (controller.signal.aborted) throw new Superseded();
      throw error;
    } finally { if (this.pending.get(kind) === controller) this.pending.delete(kind); }
  }

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
    throw response.status === 401 ? new TokenError(error) : new Error(error);
  }
}
