// @ts-check
/** Attention P(j | i) of one node group: a byte for each pair of words that its mask allows, in every slot and plate. */

/**
 * @typedef {import("./ground_graph.js").GroundGraph} GroundGraph
 * @typedef {{group: number, source_group: number, target_state: number|null, source_state: number|null, choices: [string, number][],
 *   word_parents: number[], has_mean: boolean, num_slots: number, num_plates: number, mask: number, offset: number}} AttentionDescription
 * @typedef {{plate: number|"mean", states: Record<string, number>|null}} AttentionView  one plate or the mean over plates, at states of the latent choices; `states` null: the posterior mean
 * @typedef {{i: number, j: number, weight: number, plate: number|"mean"}} AttentionEntry
 */

export class PageAttention {
  /** @type {Set<number>} */ hiddenTargets = new Set();
  /** @type {Set<number>} */ hiddenSources = new Set();

  /** @param {GroundGraph} graph @param {AttentionDescription} description @param {Uint8Array} buffer @param {number} steps */
  constructor(graph, description, buffer, steps) {
    this.description = description;
    this.steps = steps;
    const { i, j, rowStart } = graph.pairs(description.mask);
    this.numWords = rowStart.length - 1;
    this.i = i;
    this.j = j;
    this.rowStart = rowStart;
    this.updateHiddenWords(graph);
    this.buffer = buffer.subarray(description.offset, description.offset + description.num_slots * description.num_plates * this.i.length);
    /** @type {Map<string, Float32Array>} */
    this.cache = new Map();
  }

  /** Read again which words are not shown. @param {GroundGraph} graph */
  updateHiddenWords(graph) {
    this.hiddenTargets = graph.hiddenWords(this.description.group);
    this.hiddenSources = graph.hiddenWords(this.description.source_group);
  }

  /** The slot of a view: the mean, or a joint state of the choices, where the last choice varies fastest; -1 if there is none. @param {AttentionView} view */
  slotIndex(view) {
    const { choices, has_mean: hasMean } = this.description;
    if (!choices.length) return 0;
    if (view.states === null) return hasMean ? 0 : -1;
    const index = choices.reduce((sum, [name, size]) => sum * size + (view.states?.[name] ?? 0), 0);
    return index + (hasMean ? 1 : 0);
  }

  /** P(j | i) of every pair, for one plate or averaged over plates; null if the view has no slot. @param {AttentionView} view */
  weights(view) {
    const slot = this.slotIndex(view), key = `${slot} ${view.plate}`, count = this.i.length;
    if (slot < 0) return null;
    let weights = this.cache.get(key);
    if (!weights) {
      weights = new Float32Array(count);
      const plates = this.description.num_plates === 1 ? [0] : view.plate === "mean" ? Array.from({ length: this.description.num_plates }, (_, p) => p) : [view.plate];
      for (const plate of plates) {
        const base = (slot * this.description.num_plates + plate) * count;
        for (let k = 0; k < count; k++) weights[k] += this.buffer[base + k];
      }
      for (let k = 0; k < count; k++) weights[k] /= this.steps * plates.length;
      if (this.cache.size > 24) this.cache.clear();
      this.cache.set(key, weights);
    }
    return weights;
  }

  /** P(j | i) of one pair; null if the mask excludes it. @param {AttentionView} view @param {number} i @param {number} j */
  weight(view, i, j) {
    const weights = this.weights(view);
    if (!weights) return null;
    for (let k = this.rowStart[i]; k < this.rowStart[i + 1]; k++) if (this.j[k] === j) return weights[k];
    return null;
  }

  /** The words that word i attends to, strongest first. @param {AttentionView} view @param {number} i @returns {AttentionEntry[]} */
  sourcesOf(view, i) {
    const weights = this.weights(view);
    if (!weights) return [];
    const entries = [];
    for (let k = this.rowStart[i]; k < this.rowStart[i + 1]; k++) if (!this.hiddenSources.has(this.j[k])) entries.push({ i, j: this.j[k], weight: weights[k], plate: view.plate });
    return entries.sort((a, b) => b.weight - a.weight || a.j - b.j);
  }

  /** The word that word i attends to most in one plate; null if it attends to none. Only the row is read. @param {AttentionView & {plate: number}} view @param {number} i @returns {AttentionEntry|null} */
  strongestSource(view, i) {
    const slot = this.slotIndex(view), base = (slot * this.description.num_plates + view.plate) * this.i.length;
    let best = -1;
    for (let k = this.rowStart[i]; k < this.rowStart[i + 1]; k++) if (!this.hiddenSources.has(this.j[k]) && (best < 0 || this.buffer[base + k] > this.buffer[base + best])) best = k;
    return slot < 0 || best < 0 ? null : { i, j: this.j[best], weight: this.buffer[base + best] / this.steps, plate: view.plate };
  }

  /** The sum of P(j | i) over the words j that are not shown. @param {AttentionView} view @param {number} i */
  hiddenMass(view, i) {
    const weights = this.weights(view);
    let mass = 0;
    if (weights) for (let k = this.rowStart[i]; k < this.rowStart[i + 1]; k++) if (this.hiddenSources.has(this.j[k])) mass += weights[k];
    return mass;
  }

  /** The words that attend to word j, strongest first. @param {AttentionView} view @param {number} j @returns {AttentionEntry[]} */
  readersOf(view, j) {
    const weights = this.weights(view);
    if (!weights) return [];
    const entries = [];
    for (let k = 0; k < weights.length; k++) if (this.j[k] === j && !this.hiddenTargets.has(this.i[k])) entries.push({ i: this.i[k], j, weight: weights[k], plate: view.plate });
    return entries.sort((a, b) => b.weight - a.weight || a.i - b.i);
  }

  /** The `top` strongest entries of each row, with weights of at least `minWeight`. @param {AttentionView} view @param {number} minWeight @param {number} top @returns {AttentionEntry[]} */
  strongestEntries(view, minWeight, top) {
    const weights = this.weights(view), entries = [];
    if (!weights) return [];
    for (let i = 0; i < this.numWords; i++) {
      if (this.hiddenTargets.has(i)) continue;
      /** @type {number[]} the selected pairs of the row, strongest first if `top` limits them */
      const selected = [];
      for (let k = this.rowStart[i]; k < this.rowStart[i + 1]; k++) {
        const weight = weights[k];
        if (this.hiddenSources.has(this.j[k])) continue;
        if (weight < minWeight || weight <= 0 || (selected.length >= top && weight <= weights[selected[selected.length - 1]])) continue;
        // Insertion sort into at most `top` pairs. Without a limit all pairs are drawn, and their order does not matter.
        let index = selected.length;
        if (top < Infinity) while (index && weights[selected[index - 1]] < weight) index--;
        selected.splice(index, 0, k);
        if (selected.length > top) selected.pop();
      }
      for (const k of selected) entries.push({ i, j: this.j[k], weight: weights[k], plate: view.plate });
    }
    return entries;
  }
}
