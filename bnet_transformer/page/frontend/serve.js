// @ts-check
/** Entry point of the live page: a sentence is typed, the server computes its page, and each action is a new state in the history. */

import { htmlElement } from "./elements.js";
import { downloadBlob } from "./export.js";
import { mount } from "./explorer.js";
import { LiveHistory } from "./live_history.js";
import { addStep, createState, decodeState, undoSteps } from "./live_state.js";
import { Client, RejectedError, Superseded, TokenError } from "./live_client.js";
import { Progress } from "./live_progress.js";
import { renderNodeSections, renderSentenceSections } from "./live_panel.js";

/** @typedef {import("./live_state.js").LiveState} LiveState */

class LivePage {
  client = new Client();
  progress = new Progress(this.client);
  /** @type {LiveState|null} */ state = null;
  /** @type {any} */ data = null;
  /** @type {ReturnType<typeof mount>|null} */ view = null;
  /** @type {{lens: any, patch: any}} */ tables = { lens: null, patch: null };
  theme = "auto";
  selection = ""; // the node that the explorer shows; `state.selected` may be that of an earlier state
  /** @type {LiveState|null} the state whose page is awaited: the next change starts from it */ awaited = null;
  isChanging = false; // whether the awaited state is a change, and not that of an entry of the history
  entries = new LiveHistory();

  /** @param {HTMLElement} root */
  constructor(root) {
    this.root = root;
    this.model = /** @type {HTMLSelectElement} */ (htmlElement("select", { name: "model", "aria-label": "model" }));
    this.text = /** @type {HTMLInputElement} */ (htmlElement("input", { name: "text", type: "text", "aria-label": "sentence", placeholder: "a sentence; empty for an example", autocomplete: "off", spellcheck: "false" }));
    this.undoButton = this.#button("back", "undo", "undo the last change", () => this.#undo());
    this.redoButton = this.#button("forward", "redo", "redo the change", () => { this.entries.go(1); this.#updateButtons(); });
    this.saveButton = this.#button("save", "save", "save this page as a file for others", () => this.save());
    this.form = htmlElement("form", { class: "live-form", role: "search", "aria-label": "sentence" }, this.model, this.text, htmlElement("button", { type: "submit" }, "show"),
      htmlElement("span", { class: "group" }, this.undoButton, this.redoButton), this.saveButton);
    this.message = htmlElement("p", { class: "live-message", role: "alert" });
    this.content = htmlElement("main", { class: "live-content" });
    root.replaceChildren(this.form, this.message, this.progress.element, this.content);
    this.form.addEventListener("submit", (event) => { event.preventDefault(); this.#submit(); });
    this.model.addEventListener("change", () => this.#changeModel());
    root.addEventListener("change", ({ target }) => { if (target instanceof HTMLSelectElement && target.name === "theme") root.dataset.theme = this.theme = target.value; });
    addEventListener("popstate", () => this.#restore());
  }

  /** @param {string} command @param {string} text @param {string} label @param {() => void} onclick */
  #button(command, text, label, onclick) {
    return /** @type {HTMLButtonElement} */ (htmlElement("button", { type: "button", "data-command": command, title: label, "aria-label": label, disabled: true, onclick }, text));
  }

  /** List the models, and show the state of the address; without one, or if it is rejected, an example of the first model. */
  async start() {
    try {
      const { models, loaded } = await this.client.listModels();
      this.progress.loaded = new Set(loaded);
      this.model.replaceChildren(...models.map((name) => htmlElement("option", { value: name }, name)));
      const example = createState(models[0], ""), replace = (/** @type {LiveState} */ next) => this.entries.replace(next);
      let state = null, fault = null;
      try { state = decodeState(location.hash, models[0]); } catch (error) { fault = error; }
      if (state) {
        try { await this.#show(state, replace, true); } catch (error) {
          if (!(error instanceof RejectedError)) throw error;
          fault = error;
        }
      }
      if (!state || fault) await this.#show(example, fault && state ? () => { this.entries.shown = -1; } : replace); // the address of a rejected state can be corrected
      if (fault) this.#report(fault);
    } catch (error) { this.#report(error); }
  }

  /** Show the state of the address, after undo, redo, or a change of the address; undo and redo do not change the settings of the view. */
  async #restore() {
    const isVisited = history.state !== null;
    if (!this.entries.arrive()) { this.#updateButtons(); return; }
    this.isChanging = false;
    this.#updateButtons();
    try {
      const state = decodeState(location.hash, this.model.options[0].value);
      if (state) await this.#show(state, (next) => this.entries.replace(next), !isVisited);
    } catch (error) {
      if (isVisited && !(error instanceof Superseded)) this.entries.comeBack(); // an address that the user typed can be corrected
      this.#report(error);
    }
  }

  /** Undo the last change; one whose answer is awaited is cancelled. */
  #undo() {
    if (this.isChanging) this.client.cancel();
    else this.entries.go(-1);
    this.#updateButtons();
  }

  #updateButtons() {
    const active = document.activeElement;
    this.undoButton.disabled = !this.entries.canUndo && !this.isChanging;
    this.redoButton.disabled = !this.entries.canRedo;
    if (active instanceof HTMLButtonElement && active.disabled) [this.undoButton, this.redoButton].find((button) => !button.disabled)?.focus();
  }

  /** Show the sentence of the form. */
  async #submit() {
    try { await this.change(createState(this.model.value, this.text.value.trim())); } catch (error) { this.#report(error); }
  }

  /** Show the sentence of the form in another model; if this model does not accept it, show an example of the model. */
  async #changeModel() {
    const model = this.model.value, text = this.text.value.trim();
    try { await this.change(createState(model, text)); } catch (error) {
      try {
        if (!(error instanceof RejectedError) || !text) throw error;
        await this.change(createState(model, ""));
        this.#report(`${error.message}; an example of ${model} is shown`);
      } catch (fault) {
        if (fault instanceof Superseded) return;
        if (this.state) this.model.value = this.state.model;
        this.#report(fault);
      }
    }
  }

  /** Show a new state, and add it to the history. @param {LiveState} next */
  async change(next) {
    this.isChanging = true;
    try { await this.#show(next, (state) => this.entries.push(state)); } catch (error) {
      if (!(error instanceof Superseded)) this.entries.comeBack(); // if it replaced an undo
      throw error;
    } finally { if (!this.awaited) { this.isChanging = false; this.#updateButtons(); } }
  }

  /** The settings of the view. */
  #settings() {
    const { selected, ...settings } = this.view?.getState() ?? {};
    return settings;
  }

  /** Ask the server for the page of a state, and draw it; if this fails, nothing changes. @param {LiveState} requested @param {(state: LiveState) => void} commit  called with the state, whose text is not empty if the net has words @param {boolean} [isLink]  whether the view is that of the state */
  async #show(requested, commit, isLink = false) {
    const typed = this.text.value, selection = this.selection;
    let state = requested;
    this.awaited = requested;
    this.root.classList.add("running");
    this.progress.model = requested.model;
    try {
      const data = await this.client.fetchPage(requested);
      this.progress.loaded.add(requested.model);
      state = { ...requested, text: data.description.live.text };
      const isSame = this.state?.model === state.model && this.state.text === state.text;
      if (isSame && !isLink) state.view = this.#settings();
      if (isSame && !isLink && (this.selection !== selection || !state.selected)) state.selected = this.selection; // the user selected another node, or the entry has none
      this.state = state;
      this.awaited = null;
      commit(state);
      this.#draw(data, isSame, isLink);
      if (this.text.value === typed) this.text.value = this.state.text; // else the user has typed the next sentence
    } finally {
      if (this.awaited === requested) this.awaited = null;
      this.root.classList.toggle("running", this.client.pending.has("page"));
    }
    this.#refreshTable("lens", state.lens);
    this.#refreshTable("patch", state.other !== "");
  }

  /** Draw a page; the settings of the view do not change if the sentence is the same. @param {any} data @param {boolean} isSame @param {boolean} isLink */
  #draw(data, isSame, isLink) {
    const state = /** @type {LiveState} */ (this.state);
    this.message.textContent = "";
    this.data = data;
    data.description.theme = this.theme;
    this.tables = { lens: null, patch: null };
    document.title = `${data.description.title.slice(0, 80)} — ${state.model}`;
    this.model.value = state.model;
    this.#updateButtons();
    this.saveButton.disabled = false;
    if (isSame && this.view) this.view.update(data);
    else {
      this.view?.remove();
      this.selection = "";
      const root = htmlElement("div", { "data-page": "" });
      this.content.replaceChildren(root);
      this.view = mount(root, data, this.#host());
    }
    if (isLink || !isSame) this.view.setState({ selected: state.selected || null, ...state.view });
    else if (state.selected && state.selected !== this.selection) this.view.select(state.selected);
    this.view.announce(`shown: ${data.description.title.slice(0, 80)}, ${Object.keys(data.description.interventions).length} set by do, ${Object.keys(data.description.evidence).length} observed`);
  }

  /** What the explorer calls. */
  #host() {
    const current = () => /** @type {LiveState} */ (this.awaited ?? this.state);
    return {
      /** @param {[string, object][]} pairs */
      do: (pairs) => this.#changeQuietly(addStep(current(), pairs)),
      /** @param {string[]} names */
      undo: (names) => this.#changeQuietly(undoSteps(current(), names)),
      /** @param {any} description @param {string[]} names */
      renderSections: (description, names) => this.#renderSections(description, names),
      /** @param {import("./view_state.js").ViewState} view */
      handleState: ({ selected, ...view }) => {
        this.selection = selected ?? "";
        if (!this.state) return;
        this.state = { ...this.state, selected: this.selection, view };
        this.entries.update(this.state);
      },
    };
  }

  /** Show a new state; an error is reported, and one that a newer request caused is ignored. @param {LiveState} next @returns {Promise<boolean>} whether it is shown */
  async #changeQuietly(next) {
    try { await this.change(next); } catch (error) { this.#report(error); return false; }
    return true;
  }

  /** The sections of the panel. @param {any} description @param {string[]} names @returns {HTMLElement[]} */
  #renderSections(description, names) {
    const state = /** @type {LiveState} */ (this.state);
    // The fields that an action changes; the others are those of the awaited state, if there is one.
    const listChanges = (/** @type {LiveState} */ next) => Object.fromEntries(Object.entries(next).filter(([name, value]) => value !== /** @type {any} */ (state)[name]));
    const context = { state, tables: this.tables, change: (/** @type {LiveState} */ next) => { this.#changeQuietly({ ...(this.awaited ?? state), ...listChanges(next), selected: this.selection }); }, select: (/** @type {string} */ name) => this.view?.select(name) };
    if (!names.length) return renderSentenceSections(description, context);
    if (names.length > 1) return [];
    const index = description.groups.reduce((/** @type {number} */ best, /** @type {any} */ group, /** @type {number} */ k) => ((names[0] === group.name || names[0].startsWith(`${group.name}_`)) && (best < 0 || group.name.length > description.groups[best].name.length) ? k : best), -1);
    return index < 0 ? [] : renderNodeSections(description, names[0], description.groups[index], index, context);
  }

  /** Ask for a table if it is shown, and draw the panel again. @param {"lens"|"patch"} kind @param {boolean} isShown */
  async #refreshTable(kind, isShown) {
    if (!isShown || !this.state) return;
    const state = this.state;
    try { this.tables[kind] = await this.client.fetchTable(kind, state); } catch (error) {
      if (error instanceof Superseded) return;
      this.tables[kind] = error;
    }
    if (this.state.selected) return;
    this.view?.refreshPanel();
    this.view?.announce(this.tables[kind] instanceof Error ? this.tables[kind].message : `the table of the ${kind} is shown`);
  }

  /** Save the page as an HTML file that requires no server. */
  async save() {
    try { downloadBlob(await this.client.fetchFile(/** @type {LiveState} */ (this.state)), "bnet.html"); } catch (error) { this.#report(error); }
  }

  /** Show an error in one line; without the right token, ask for it. @param {unknown} error */
  #report(error) {
    if (error instanceof Superseded) return;
    this.message.textContent = error instanceof Error ? error.message : String(error);
    if (!(error instanceof TokenError)) return;
    const input = /** @type {HTMLInputElement} */ (htmlElement("input", { name: "token", type: "password", "aria-label": "token", placeholder: "token or address", autocomplete: "off" }));
    const form = htmlElement("form", { class: "buttons" }, input, htmlElement("button", { type: "submit" }, "use this token"));
    form.addEventListener("submit", (event) => { event.preventDefault(); this.client.setToken(input.value); this.message.textContent = ""; this.start(); });
    this.message.append(" ", form);
  }
}

new LivePage(/** @type {HTMLElement} */ (document.getElementById("serve"))).start();
