// @ts-check
/** The state of the live page: its fragment in the address, and the states that follow from an action. */

/**
 * @typedef {{node: string, of: string[]}} Question
 * @typedef {{model: string, text: string, steps: any[], evidence: Record<string, string|number>, posterior: string[], contributions: Question|null,
 *   other: string, patch: Question, roles: string, selected: string, lens: boolean,
 *   view: Record<string, any>}} LiveState  `selected`, `lens` and `view` are only used in the browser; `view` has the settings of `view_state.js`
 */

const TYPES = /** @type {Record<string, (value: any) => boolean>} */ ({
  model: (value) => typeof value === "string", text: (value) => typeof value === "string", other: (value) => typeof value === "string",
  roles: (value) => typeof value === "string", selected: (value) => typeof value === "string", lens: (value) => typeof value === "boolean", view: isObject,
  steps: Array.isArray, posterior: Array.isArray, evidence: isObject, patch: isObject, contributions: (value) => value === null || isObject(value),
});

/** @param {any} value */
function isObject(value) { return typeof value === "object" && value !== null && !Array.isArray(value); }

/** The state of a new sentence. @param {string} model @param {string} text @returns {LiveState} */
export const createState = (model, text) => ({ model, text, steps: [], evidence: {}, posterior: [], contributions: null, other: "", patch: { node: "", of: [] }, roles: "", selected: "", lens: false, view: {} });

/** The fragment of a state: its fields that differ from those of a new sentence. @param {LiveState} state */
export function encodeState(state) {
  const initial = /** @type {any} */ (createState("", ""));
  const fields = Object.entries(state).filter(([name, value]) => JSON.stringify(value) !== JSON.stringify(initial[name]));
  return `#${encodeURIComponent(JSON.stringify(Object.fromEntries(fields)))}`;
}

/** The state of a fragment; null for an empty fragment. @param {string} fragment @param {string} model  the default @returns {LiveState|null} */
export function decodeState(fragment, model) {
  if (fragment.length < 2) return null;
  let fields;
  try { fields = JSON.parse(decodeURIComponent(fragment.slice(1))); } catch { fields = null; }
  const isValid = isObject(fields) && Object.entries(fields).every(([name, value]) => TYPES[name]?.(value));
  if (!isValid) throw new Error("the part of the address after # is not a state of this page");
  return { ...createState(model, ""), ...fields };
}

/** The fields of a state that the server needs. @param {LiveState} state */
export function serverState(state) {
  const { selected, lens, view, ...fields } = state;
  return fields;
}

/** The state after `do`. @param {LiveState} state @param {[string, object][]} pairs @returns {LiveState} */
export const addStep = (state, pairs) => ({ ...state, steps: [...state.steps, { do: pairs }] });

/** The state after `undo`; without names, all interventions are removed. The last step is removed if it is exactly what is undone. @param {LiveState} state @param {string[]} names @returns {LiveState} */
export function undoSteps(state, names) {
  if (!names.length) return { ...state, steps: [] };
  const last = state.steps[state.steps.length - 1]?.do;
  const isLast = Array.isArray(last) && last.length === names.length && last.every(([name]) => names.includes(name));
  return { ...state, steps: isLast ? state.steps.slice(0, -1) : [...state.steps, { undo: names }] };
}

/** The state without the other sentence, without the interventions that copy its values, and without their `undo`. @param {LiveState} state @returns {LiveState} */
export function removeOther(state) {
  const copied = new Set(), steps = [];
  for (const step of state.steps) {
    const pairs = (step.do ?? []).filter((/** @type {[string, any]} */ [name, setting]) => {
      const isCopy = setting.set === "other";
      if (isCopy) copied.add(name); else copied.delete(name);
      return !isCopy;
    });
    const names = (step.undo ?? []).filter((/** @type {string} */ name) => !copied.has(name));
    if (pairs.length) steps.push({ do: pairs });
    if (names.length) steps.push({ undo: names });
  }
  return { ...state, steps, other: "", roles: "", patch: { node: "", of: [] } };
}

/** The state with evidence on a node, or without it if the value is null. @param {LiveState} state @param {string} name @param {string|number|null} value @returns {LiveState} */
export function setEvidence(state, name, value) {
  const { [name]: _, ...remaining } = state.evidence;
  return { ...state, evidence: value === null ? remaining : { ...remaining, [name]: value } };
}
