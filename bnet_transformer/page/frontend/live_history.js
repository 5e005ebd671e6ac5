// @ts-check
/** The history of the live page: the browser's current entry, and the entry whose state is shown, which is another one while an answer is awaited. */

import { encodeState } from "./live_state.js";

/** @typedef {import("./live_state.js").LiveState} LiveState */

const LAST_KEY = "bnet-last-entry";

export class LiveHistory {
  entry = 0; // the position of the browser's current entry
  shown = 0; // the position of the entry whose state is shown; -1 if the address of the current entry was rejected
  last = 0; // the position of the last entry, to which `redo` can go
  isReturning = false;

  constructor() {
    const position = history.state?.position;
    if (position === undefined) return;
    this.entry = this.shown = position;
    this.last = Math.max(position, Number(sessionStorage.getItem(LAST_KEY)) || 0); // a reload does not remove later entries
  }

  get canUndo() { return this.entry > 0; }

  get canRedo() { return this.entry < this.last; }

  /** Go to another entry of this page; `popstate` follows. @param {number} steps */
  go(steps) {
    if (this.entry + steps < 0 || this.entry + steps > this.last) return;
    this.entry += steps; // at once, because the browser may be asked again before `popstate`
    history.go(steps);
  }

  /** Note the entry at which the browser is; false if this is the return to the entry that is shown. @returns {boolean} */
  arrive() {
    const position = history.state?.position;
    this.entry = position ?? this.entry + 1; // without a state, the user changed the address
    if (position === undefined) this.#setLast(this.entry);
    const isReturn = this.isReturning && this.entry === this.shown;
    this.isReturning = false;
    return !isReturn;
  }

  /** Return to the entry that is shown, because the state of the current one is not shown. */
  comeBack() {
    if (this.entry === this.shown || this.shown < 0) return;
    this.isReturning = true;
    this.go(this.shown - this.entry);
  }

  /** Add an entry after the current one. @param {LiveState} state */
  push(state) {
    this.entry = this.shown = this.entry + 1;
    this.#setLast(this.entry);
    history.pushState({ position: this.entry }, "", encodeState(state));
  }

  /** Show the state of the current entry, or update its address. @param {LiveState} state */
  replace(state) {
    this.shown = this.entry;
    history.replaceState({ position: this.entry }, "", encodeState(state));
  }

  /** Update the address of the state that is shown, if the browser is at its entry. @param {LiveState} state */
  update(state) { if (this.entry === this.shown) this.replace(state); }

  /** @param {number} position */
  #setLast(position) {
    this.last = position;
    sessionStorage.setItem(LAST_KEY, String(position));
  }
}
