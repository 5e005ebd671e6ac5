// @ts-check
/** What is read: P(j | i) of every reader, a byte for each pair of words that can be, in every slot and plate. */

/**
 * @typedef {import("./net.js").Net} Net
 * @typedef {{family: number, from: number, into: number|null, out: number|null, choices: [string, number][],
 *   over: number[], mean: boolean, slots: number, plates: number, pairs: number, at: number}} Told
 * @typedef {{plate: number|"mean", states: Record<string, number>|null}} How  `states` null: the posterior mean
 * @typedef {{i: number, j: number, share: number, plate: number|"mean"}} Read
 */

export class Reading {
  /** @param {Net} net @param {Told} told @param {Uint8Array} bytes @param {number} steps */
  constructor(net, told, bytes, steps) {
    this.told = told;
    this.steps = steps;
    const { up } = net.pairs[told.pairs];
    this.words = up.length;
    this.i = Int32Array.from(up.flatMap((row, i) => row.map(() => i)));
    this.j = Int32Array.from(up.flat());
    this.start = [0]; // where the pairs of each row start
    for (const row of up) this.start.push(this.start[this.start.length - 1] + row.length);
    this.bytes = bytes.subarray(told.at, told.at + told.slots * told.plates * this.i.length);
    /** @type {Map<string, Float32Array>} */
    this.known = new Map();
  }

  /** The slot of a way to look: of the mean, or of these states of the choices. @param {How} how */
  slot(how) {
    const { choices, mean } = this.told;
    if (!choices.length) return 0;
    if (how.states === null) return mean ? 0 : -1;
    const at = choices.reduce((sum, [name, size]) => sum * size + (how.states?.[name] ?? 0), 0);
    return at + (mean ? 1 : 0);
  }

  /** P(j | i) of every pair: of one plate, or the mean over them; null where it is not told. @param {How} how */
  matrix(how) {
    const slot = this.slot(how), key = `${slot} ${how.plate}`, count = this.i.length;
    if (slot < 0) return null;
    let found = this.known.get(key);
    if (!found) {
      found = new Float32Array(count);
      const plates = this.told.plates === 1 ? [0] : how.plate === "mean" ? Array.from({ length: this.told.plates }, (_, p) => p) : [how.plate];
      for (const plate of plates) {
        const base = (slot * this.told.plates + plate) * count;
        for (let k = 0; k < count; k++) found[k] += this.bytes[base + k];
      }
      for (let k = 0; k < count; k++) found[k] /= this.steps * plates.length;
      if (this.known.size > 24) this.known.clear();
      this.known.set(key, found);
    }
    return found;
  }

  /** P(j | i) of one pair. @param {How} how @param {number} i @param {number} j */
  share(how, i, j) {
    const shares = this.matrix(how);
    if (!shares) return null;
    for (let k = this.start[i]; k < this.start[i + 1]; k++) if (this.j[k] === j) return shares[k];
    return null;
  }

  /** What word i reads, strongest first. @param {How} how @param {number} i @returns {Read[]} */
  reads(how, i) {
    const shares = this.matrix(how);
    if (!shares) return [];
    const found = [];
    for (let k = this.start[i]; k < this.start[i + 1]; k++) found.push({ i, j: this.j[k], share: shares[k], plate: how.plate });
    return found.sort((a, b) => b.share - a.share || a.j - b.j);
  }

  /** Who reads word j, strongest first. @param {How} how @param {number} j @returns {Read[]} */
  readers(how, j) {
    const shares = this.matrix(how);
    if (!shares) return [];
    const found = [];
    for (let k = 0; k < shares.length; k++) if (this.j[k] === j) found.push({ i: this.i[k], j, share: shares[k], plate: how.plate });
    return found.sort((a, b) => b.share - a.share || a.i - b.i);
  }

  /** The strongest `top` reads of each word, of at least so much. @param {How} how @param {number} least @param {number} top @returns {Read[]} */
  strongest(how, least, top) {
    const shares = this.matrix(how), found = [];
    if (!shares) return [];
    for (let i = 0; i < this.words; i++) {
      /** @type {number[]} the pairs of the row that are kept, the strongest first where there are too many */
      const kept = [];
      for (let k = this.start[i]; k < this.start[i + 1]; k++) {
        const share = shares[k];
        if (share < least || share <= 0 || (kept.length >= top && share <= shares[kept[kept.length - 1]])) continue;
        let at = kept.length;
        if (top < Infinity) while (at && shares[kept[at - 1]] < share) at--;
        kept.splice(at, 0, k);
        if (kept.length > top) kept.pop();
      }
      for (const k of kept) found.push({ i, j: this.j[k], share: shares[k], plate: how.plate });
    }
    return found;
  }
}
