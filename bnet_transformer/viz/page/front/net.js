// @ts-check
/** The ground graph: names, numbers and structure, made from the folded graph as `bnet_transformer.graph` makes them. */

/**
 * @typedef {{name: string, role: string, stack: string, slice: number|null, step: number|null, plates: string[],
 *   words: string|null, row: number, depth: number, state: boolean, kind: string, tpm: string, learnable: boolean,
 *   shape: number[], letter: [string, string, string[]], selector: boolean, equation: number}} Family
 * @typedef {{kind: string, width?: number, table?: string, wide?: number}} Reach
 * @typedef {{parent: number, child: number, reaches: number[], hue: string}} Bundle
 * @typedef {{name: string, slices: number, words: string[], whole: Record<string, string>}} Stack
 * @typedef {Record<string, any>} About
 */

/** The bits of base64 text, the first in the highest place. @param {string} text @param {number} count */
export function unpackBits(text, count) {
  const bytes = bytesOf(text);
  return Uint8Array.from({ length: count }, (_, k) => (bytes[k >> 3] >> (7 - (k & 7))) & 1);
}

/** The bytes of base64 text. @param {string} text */
export function bytesOf(text) {
  const plain = atob(text);
  const bytes = new Uint8Array(plain.length);
  for (let k = 0; k < plain.length; k++) bytes[k] = plain.charCodeAt(k);
  return bytes;
}

export class Net {
  /** @param {About} about */
  constructor(about) {
    /** @type {Family[]} */
    this.families = about.families;
    /** @type {number[]} */
    this.order = about.order;
    /** @type {Record<string, number>} */
    this.sizes = about.sizes;
    /** @type {Stack[]} */
    this.stacks = about.stacks;
    /** @type {Record<string, number>} */
    this.words = Object.fromEntries(this.stacks.map((stack) => [stack.name, stack.words.length]));
    /** @type {(Reach & {bits?: Uint8Array})[]} */
    this.reaches = about.reaches.map((/** @type {Reach} */ reach) =>
      reach.table ? { ...reach, bits: unpackBits(reach.table, atob(reach.table).length * 8) } : reach);
    /** @type {Bundle[]} */
    this.bundles = about.bundles.map((/** @type {any} */ [parent, child, reaches, hue]) => ({ parent, child, reaches, hue }));
    this.shapes = this.families.map((f) =>
      [...f.plates.map((plate) => this.sizes[plate]), ...(f.words === null ? [] : [this.words[f.words]])]);
    this.counts = this.shapes.map((shape) => shape.reduce((a, b) => a * b, 1));
    this.offsets = [0];
    for (const count of this.counts) this.offsets.push(this.offsets[this.offsets.length - 1] + count);
    this.into = this.families.map((_, k) => this.bundles.filter((b) => b.child === k));
    this.outOf = this.families.map((_, k) => this.bundles.filter((b) => b.parent === k));
    /** @type {Map<string, number>} */
    this.byName = new Map(this.families.map((f, k) => [f.name, k]));
    this.cut = this.#grouped(about.cut);
    this.rows = this.#grouped(Object.keys(about.rows).map(Number).filter((node) => !about.cut.includes(node)));
    /** @type {Record<string, Record<string, number[]>>} */
    this.kept = about.rows;
  }

  /** Nodes by their family, as places in it. @param {number[]} nodes */
  #grouped(nodes) {
    /** @type {Map<number, number[]>} */
    const found = new Map();
    for (const node of nodes) {
      const family = this.familyOf(node);
      found.set(family, [...(found.get(family) ?? []), node - this.offsets[family]]);
    }
    return found;
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
    return this.families[family].plates.reduce((size, plate) => size * this.sizes[plate], 1);
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

  /** @param {number} node */
  parents(node) { return this.#beside([node], true); }

  /** @param {number} node */
  children(node) { return this.#beside([node], false); }

  /** @param {number[]} nodes */
  ancestors(nodes) { return this.#closure(nodes, true); }

  /** @param {number[]} nodes */
  descendants(nodes) { return this.#closure(nodes, false); }

  /** Parents, children, and the children's other parents. @param {number} node */
  blanket(node) {
    const children = this.children(node);
    const found = new Set([...this.parents(node), ...children, ...this.#beside(children, true)]);
    found.delete(node);
    return [...found].sort((a, b) => a - b);
  }

  /** The nodes one arrow away. @param {number[]} nodes @param {boolean} up */
  #beside(nodes, up) {
    const found = new Set();
    for (const [family, mark] of this.#marks(nodes))
      for (const bundle of (up ? this.into : this.outOf)[family])
        for (const node of this.#nodes(up ? bundle.parent : bundle.child, this.step(bundle, mark, up))) found.add(node);
    return /** @type {number[]} */ ([...found]).sort((a, b) => a - b);
  }

  /** @param {number[]} nodes @param {boolean} up */
  #closure(nodes, up) {
    const roots = this.#marks(nodes), fresh = new Map(roots);
    /** @type {Map<number, Uint8Array>} */
    const reached = new Map();
    while (fresh.size) {
      const family = [...fresh.keys()].reduce((a, b) => (up ? Math.max(a, b) : Math.min(a, b)));
      const mark = /** @type {Uint8Array} */ (fresh.get(family));
      fresh.delete(family);
      for (const bundle of (up ? this.into : this.outOf)[family]) {
        const other = up ? bundle.parent : bundle.child;
        const hit = this.step(bundle, mark, up);
        const known = reached.get(other) ?? new Uint8Array(this.counts[other]);
        const next = fresh.get(other) ?? new Uint8Array(this.counts[other]);
        let more = false;
        for (let k = 0; k < hit.length; k++) if (hit[k] && !known[k]) { known[k] = next[k] = 1; more = true; }
        reached.set(other, known);
        if (more) fresh.set(other, next);
      }
    }
    const own = new Set(nodes);
    return [...reached.keys()].sort((a, b) => a - b)
      .flatMap((family) => this.#nodes(family, /** @type {Uint8Array} */ (reached.get(family)))).filter((node) => !own.has(node));
  }

  /** A byte for each node of each family that has one of these. @param {number[]} nodes */
  #marks(nodes) {
    /** @type {Map<number, Uint8Array>} */
    const found = new Map();
    for (const node of nodes) {
      const family = this.familyOf(node);
      const mark = found.get(family) ?? new Uint8Array(this.counts[family]);
      mark[node - this.offsets[family]] = 1;
      found.set(family, mark);
    }
    return found;
  }

  /** @param {number} family @param {Uint8Array} mark */
  #nodes(family, mark) {
    const found = [];
    for (let k = 0; k < mark.length; k++) if (mark[k]) found.push(this.offsets[family] + k);
    return found;
  }

  /** The marks of one family moved along a bundle of arrows, surgery minded. @param {Bundle} bundle @param {Uint8Array} mark @param {boolean} up */
  step(bundle, mark, up) {
    const cut = this.cut.get(bundle.child) ?? [], rows = this.rows.get(bundle.child) ?? [];
    const some = rows.length ? this.kept[this.offsets[bundle.child] + rows[0]][bundle.parent] : undefined;
    if (up) {
      const most = mark.slice(), few = new Uint8Array(mark.length);
      for (const k of cut) most[k] = 0;
      for (const k of rows) { few[k] = most[k]; most[k] = 0; }
      const found = this.#carry(bundle, bundle.reaches, most, true);
      if (some) this.#carry(bundle, some, few, true).forEach((bit, k) => { found[k] |= bit; });
      return found;
    }
    const found = this.#carry(bundle, bundle.reaches, mark, false);
    const more = some && this.#carry(bundle, some, mark, false);
    for (const k of rows) found[k] = more ? more[k] : 0;
    for (const k of cut) found[k] = 0;
    return found;
  }

  /** @param {Bundle} bundle @param {number[]} reaches @param {Uint8Array} mark @param {boolean} up */
  #carry(bundle, reaches, mark, up) {
    const [here, there] = up ? [bundle.child, bundle.parent] : [bundle.parent, bundle.child];
    const shared = this.families[here].plates.filter((plate) => this.families[there].plates.includes(plate));
    const from = this.#keys(here, shared), to = this.#keys(there, shared);
    const n = mark.length / from.length, m = this.counts[there] / to.length;
    const size = shared.reduce((total, plate) => total * this.sizes[plate], 1);
    const gathered = new Uint8Array(size * n), found = new Uint8Array(this.counts[there]);
    from.forEach((key, plate) => { for (let i = 0; i < n; i++) gathered[key * n + i] |= mark[plate * n + i]; });
    const moved = Array.from({ length: size }, (_, key) => this.#move(bundle, reaches, gathered.subarray(key * n, key * n + n), m, up));
    to.forEach((key, plate) => found.set(moved[key], plate * m));
    return found;
  }

  /** For each index of a family's plates, its index along the shared ones. @param {number} family @param {string[]} shared */
  #keys(family, shared) {
    const own = this.families[family].plates, sizes = own.map((plate) => this.sizes[plate]);
    return Array.from({ length: this.plates(family) }, (_, flat) => {
      /** @type {Record<string, number>} */
      const at = {};
      for (let a = own.length - 1, rest = flat; a >= 0; a--) { at[own[a]] = rest % sizes[a]; rest = Math.floor(rest / sizes[a]); }
      return shared.reduce((key, plate) => key * this.sizes[plate] + at[plate], 0);
    });
  }

  /** What words send along reaches. @param {Bundle} bundle @param {number[]} reaches @param {Uint8Array} bits @param {number} m @param {boolean} up */
  #move(bundle, reaches, bits, m, up) {
    if (!bits.some(Boolean)) return new Uint8Array(m);
    if (this.families[bundle.parent].words === null || !reaches.length) return new Uint8Array(m).fill(1);
    const found = new Uint8Array(m), n = bits.length;
    for (const reach of reaches.map((k) => this.reaches[k])) {
      const causal = reach.kind === "causal" || reach.kind === "earlier";
      if (reach.kind === "every") return found.fill(1);
      if (reach.kind === "same") { for (let i = 0; i < m; i++) found[i] |= bits[i]; continue; }
      if (causal && n === m) {
        const strict = reach.kind === "earlier" ? 1 : 0, edge = up ? bits.lastIndexOf(1) : bits.indexOf(1);
        if (up) found.fill(1, 0, edge + 1 - strict); else found.fill(1, edge + strict);
        continue;
      }
      for (let i = 0; i < n; i++) if (bits[i])
        for (let j = 0; j < m; j++) if (up ? holds(reach, i, j, m) : holds(reach, j, i, n)) found[j] = 1;
    }
    return found;
  }
}

/** Whether word i of a child reads word j of its parent, which has so many. @param {Reach & {bits?: Uint8Array}} reach @param {number} i @param {number} j @param {number} parents */
export function holds(reach, i, j, parents) {
  switch (reach.kind) {
    case "same": return i === j;
    case "every": return true;
    case "causal": return j <= i;
    case "earlier": return j < i;
    case "before": return j === i - 1;
    case "rest": return j === i && i > 0;
    case "first": return j === 0;
    case "last": return j === parents - 1;
    case "window": return Math.abs(i - j) <= (reach.width ?? 0);
    case "recent": return j <= i && i - j <= (reach.width ?? 0);
    default: return /** @type {Uint8Array} */ (reach.bits)[i * (reach.wide ?? 0) + j] === 1;
  }
}
