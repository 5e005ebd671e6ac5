// @ts-check
/** The ground graph as Python tells it: names, numbers, and every arrow, from which structure is answered. */

/**
 * @typedef {{name: string, role: string, stack: string, slice: number|null, step: number|null, plates: string[], places: number[],
 *   words: string|null, row: number, depth: number, state: boolean, reads: boolean, kind: string, tpm: string, learnable: boolean,
 *   shape: number[], letter: [string, string, string[]], selector: boolean, equation: number}} Family  `places`: how many nodes along each plate, words last
 * @typedef {{up: number[][], down: number[][]}} Pairs  for each row its columns, for each column its rows
 * @typedef {{parent: number, child: number, plates: Pairs, words: Pairs, hue: string}} Link  arrows between two families: those of a pair of plates and a pair of words
 * @typedef {{name: string, slices: number, words: string[], whole: Record<string, string>}} Stack
 * @typedef {Record<string, any>} About
 */

/** The pairs of a table of bits, the first in the highest place. @param {[number, number, number]} told @param {Uint8Array} bytes @returns {Pairs} */
function pairsOf([rows, columns, at], bytes) {
  /** @type {number[][]} */
  const up = Array.from({ length: rows }, () => []);
  /** @type {number[][]} */
  const down = Array.from({ length: columns }, () => []);
  for (let i = 0, k = 0; i < rows; i++) for (let j = 0; j < columns; j++, k++)
    if ((bytes[at + (k >> 3)] >> (7 - (k & 7))) & 1) { up[i].push(j); down[j].push(i); }
  return { up, down };
}

export class Net {
  /** @param {About} about @param {Uint8Array} bytes */
  constructor(about, bytes) {
    /** @type {Family[]} */
    this.families = about.families;
    /** @type {number[]} */
    this.order = about.order;
    /** @type {Stack[]} */
    this.stacks = about.stacks;
    this.shapes = this.families.map((family) => family.places);
    this.counts = this.shapes.map((shape) => shape.reduce((a, b) => a * b, 1));
    this.offsets = [0];
    for (const count of this.counts) this.offsets.push(this.offsets[this.offsets.length - 1] + count);
    /** @type {Map<string, number>} */
    this.byName = new Map(this.families.map((f, k) => [f.name, k]));
    /** @type {Pairs[]} */
    this.pairs = about.pairs.map((/** @type {[number, number, number]} */ told) => pairsOf(told, bytes));
    /** @type {Link[]} */
    this.links = about.links.map((/** @type {any} */ [parent, child, plates, words, hue]) => ({ parent, child, plates: this.pairs[plates], words: this.pairs[words], hue }));
    this.into = this.families.map((_, k) => this.links.filter((link) => link.child === k));
    this.outOf = this.families.map((_, k) => this.links.filter((link) => link.parent === k));
    /** @type {Set<number>} the nodes into which no arrow leads any more */
    this.cut = new Set(about.cut);
  }

  /** The number of a node's family. @param {number} node */
  familyOf(node) {
    let low = 0, high = this.families.length - 1;
    while (low < high) {
      const middle = (low + high + 1) >> 1;
      if (this.offsets[middle] <= node) low = middle; else high = middle - 1;
    }
    return low;
  }

  /** The indices of a node along its family's plates, the word last. @param {number} node */
  index(node) {
    const family = this.familyOf(node);
    let rest = node - this.offsets[family];
    return this.shapes[family].map((_, k, shape) => {
      const stride = shape.slice(k + 1).reduce((a, b) => a * b, 1);
      const at = Math.floor(rest / stride);
      rest -= at * stride;
      return at;
    });
  }

  /** The word of a node, or null. @param {number} node */
  wordOf(node) {
    return this.families[this.familyOf(node)].words === null ? null : /** @type {number} */ (this.index(node).at(-1));
  }

  /** The node of a family at a plate (its indices as one) and a word. @param {number} family @param {number} plate @param {number|null} word */
  id(family, plate, word) {
    const n = this.families[family].words === null ? 1 : /** @type {number} */ (this.shapes[family].at(-1));
    return this.offsets[family] + plate * n + (word ?? 0);
  }

  /** How many indices the plates of a family have in all. @param {number} family */
  plates(family) {
    return this.counts[family] / (this.families[family].words === null ? 1 : /** @type {number} */ (this.shapes[family].at(-1)));
  }

  /** @param {number} node */
  name(node) {
    return [this.families[this.familyOf(node)].name, ...this.index(node)].join("_");
  }

  /** The node of that name, or -1. @param {string} name */
  find(name) {
    const parts = name.split("_");
    for (let k = parts.length; k > 0; k--) {
      const family = this.byName.get(parts.slice(0, k).join("_"));
      const rest = parts.slice(k).map(Number);
      if (family !== undefined && rest.length === this.shapes[family].length && rest.every((i, a) => i < this.shapes[family][a]))
        return this.offsets[family] + this.shapes[family].reduce((at, size, a) => at * size + rest[a], 0);
    }
    return -1;
  }

  // structure

  /** Calls with each node at the other end of a node's arrows along some links. @param {number} node @param {boolean} up @param {Link[]} links @param {(other: number) => void} call */
  each(node, up, links, call) {
    const place = node - this.offsets[this.familyOf(node)], way = up ? "up" : "down";
    for (const link of links) {
      const plates = link.plates[way], words = link.words[way], start = this.offsets[up ? link.parent : link.child];
      const many = link.words[up ? "down" : "up"].length, ends = words[place % words.length];
      for (const plate of plates[Math.floor(place / words.length)])
        for (let k = 0, first = start + plate * many; k < ends.length; k++) call(first + ends[k]);
    }
  }

  /** The nodes one arrow away. @param {number} node @param {boolean} up @param {Link[]} [links] */
  beside(node, up, links) {
    /** @type {number[]} */
    const found = [];
    this.each(node, up, links ?? (up ? this.into : this.outOf)[this.familyOf(node)], (other) => found.push(other));
    return found;
  }

  /** All nodes that arrows lead to from some nodes, backwards where `up`. @param {number[]} nodes @param {boolean} up */
  reach(nodes, up) {
    const met = new Uint8Array(this.offsets[this.offsets.length - 1]), ways = up ? this.into : this.outOf;
    const todo = [...nodes], found = /** @type {number[]} */ ([]);
    for (const node of nodes) met[node] = 1;
    for (let node = todo.pop(); node !== undefined; node = todo.pop())
      this.each(node, up, ways[this.familyOf(node)], (other) => { if (!met[other]) { met[other] = 1; todo.push(other); found.push(other); } });
    return [...Int32Array.from(found).sort()];
  }

  /** @param {number} node */
  parents(node) { return this.beside(node, true).sort((a, b) => a - b); }

  /** @param {number} node */
  children(node) { return this.beside(node, false).sort((a, b) => a - b); }

  /** @param {number[]} nodes */
  ancestors(nodes) { return this.reach(nodes, true); }

  /** @param {number[]} nodes */
  descendants(nodes) { return this.reach(nodes, false); }

  /** Parents, children, and the children's other parents. @param {number} node */
  blanket(node) {
    const children = this.children(node);
    const found = new Set([...this.parents(node), ...children, ...children.flatMap((child) => this.parents(child))]);
    found.delete(node);
    return [...found].sort((a, b) => a - b);
  }
}
