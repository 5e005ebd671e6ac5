// @ts-check
/** The ground graph of the description: names, node numbers and arrows, and queries of its structure. */

/**
 * @typedef {{name: string, role: string, stack: string, slice: number|null, step: number|null, plates: string[], dims: number[],
 *   word_stack: string|null, row: number, depth: number, is_state: boolean, has_attention_edges: boolean, kind: string, tpm: string, is_learnable: boolean,
 *   value_shape: number[], label: [string, string, string[]], is_selector: boolean, equation: number}} Group  `dims`: the number of nodes along each plate, words last
 * @typedef {{columnsOf: number[][], rowsOf: number[][]}} Relation  a sparse boolean matrix: the columns of each row, and the rows of each column
 * @typedef {{parent: number, child: number, plates: Relation, words: Relation, hue: string}} Edge  the arrows between two groups: their adjacency over plates times that over words
 * @typedef {{name: string, num_slices: number, words: string[], full_words: Record<string, string>, special: number[], hidden: number[]}} Stack  `special`: the special tokens; `hidden`: the words that are not shown
 * @typedef {Record<string, any>} Description
 */

/** Unpack a boolean matrix, eight entries a byte, the first in the highest bit. @param {[number, number, number]} table @param {Uint8Array} buffer @returns {Relation} */
function readBitTable([numRows, numColumns, offset], buffer) {
  /** @type {number[][]} */
  const columnsOf = Array.from({ length: numRows }, () => []);
  /** @type {number[][]} */
  const rowsOf = Array.from({ length: numColumns }, () => []);
  for (let i = 0, k = 0; i < numRows; i++) for (let j = 0; j < numColumns; j++, k++)
    if ((buffer[offset + (k >> 3)] >> (7 - (k & 7))) & 1) { columnsOf[i].push(j); rowsOf[j].push(i); }
  return { columnsOf, rowsOf };
}

export class GroundGraph {
  /** @param {Description} description @param {Uint8Array} buffer */
  constructor(description, buffer) {
    /** @type {Group[]} */
    this.groups = description.groups;
    /** @type {number[]} */
    this.groupOrder = description.group_order;
    /** @type {Stack[]} */
    this.stacks = description.stacks.map((/** @type {Stack} */ stack) => ({ ...stack, hidden: [] }));
    this.dims = this.groups.map((group) => group.dims);
    this.counts = this.dims.map((sizes) => sizes.reduce((a, b) => a * b, 1));
    this.offsets = [0];
    for (const count of this.counts) this.offsets.push(this.offsets[this.offsets.length - 1] + count);
    /** @type {Map<string, number>} */
    this.groupByName = new Map(this.groups.map((group, k) => [group.name, k]));
    /** @type {Relation[]} */
    this.relations = description.bit_tables.map((/** @type {[number, number, number]} */ table) => readBitTable(table, buffer));
    /** @type {Edge[]} */
    this.edges = description.edges.map((/** @type {any} */ [parent, child, plates, words, hue]) => ({ parent, child, plates: this.relations[plates], words: this.relations[words], hue }));
    /** @type {Map<number, {i: Int32Array, j: Int32Array, rowStart: number[]}>} */
    this.pairsOf = new Map();
    this.edgesInto = this.groups.map((_, k) => this.edges.filter((edge) => edge.child === k));
    this.edgesOutOf = this.groups.map((_, k) => this.edges.filter((edge) => edge.parent === k));
    /** @type {Set<number>} nodes without incoming arrows, because do set them */
    this.severed = new Set(description.severed);
  }

  /** The pairs of a relation in the order of its rows; row i has the pairs rowStart[i] to rowStart[i + 1] (compressed sparse rows). @param {number} index */
  pairs(index) {
    const known = this.pairsOf.get(index);
    if (known) return known;
    const { columnsOf } = this.relations[index], rowStart = [0];
    for (const row of columnsOf) rowStart.push(rowStart[rowStart.length - 1] + row.length);
    const i = new Int32Array(rowStart[columnsOf.length]), j = new Int32Array(i.length);
    columnsOf.forEach((row, k) => { i.fill(k, rowStart[k], rowStart[k + 1]); j.set(row, rowStart[k]); });
    const pairs = { i, j, rowStart };
    this.pairsOf.set(index, pairs);
    return pairs;
  }

  /** The words of a group that are not shown. @param {number} group @returns {Set<number>} */
  hiddenWords(group) {
    return new Set(this.stacks.find((stack) => stack.name === this.groups[group].word_stack)?.hidden);
  }

  /** The index of a node's group, by binary search in the offsets. @param {number} node */
  groupOf(node) {
    let low = 0, high = this.groups.length - 1;
    while (low < high) {
      const middle = (low + high + 1) >> 1;
      if (this.offsets[middle] <= node) low = middle; else high = middle - 1;
    }
    return low;
  }

  /** The indices of a node along its group's plates, the word last. @param {number} node */
  indices(node) {
    const group = this.groupOf(node);
    let remainder = node - this.offsets[group];
    return this.dims[group].map((_, k, sizes) => {
      const stride = sizes.slice(k + 1).reduce((a, b) => a * b, 1);
      const index = Math.floor(remainder / stride);
      remainder -= index * stride;
      return index;
    });
  }

  /** The word of a node, or null. @param {number} node */
  wordOf(node) {
    return this.groups[this.groupOf(node)].word_stack === null ? null : /** @type {number} */ (this.indices(node).at(-1));
  }

  /** The node of a group at a plate (its flat index) and a word. @param {number} group @param {number} plate @param {number|null} word */
  nodeId(group, plate, word) {
    const n = this.groups[group].word_stack === null ? 1 : /** @type {number} */ (this.dims[group].at(-1));
    return this.offsets[group] + plate * n + (word ?? 0);
  }

  /** The product of the sizes of a group's plates, words excluded. @param {number} group */
  numPlates(group) {
    return this.counts[group] / (this.groups[group].word_stack === null ? 1 : /** @type {number} */ (this.dims[group].at(-1)));
  }

  /** @param {number} node */
  nodeName(node) {
    return [this.groups[this.groupOf(node)].name, ...this.indices(node)].join("_");
  }

  /** The name of nodes of a group; a plate along which they differ is a star: `a_0_*_2`. @param {number[]} nodes */
  nameOf(nodes) {
    const [first, ...remaining] = nodes.map((node) => this.indices(node));
    return [this.groups[this.groupOf(nodes[0])].name, ...first.map((index, axis) => (remaining.every((indices) => indices[axis] === index) ? index : "*"))].join("_");
  }

  /** The node with this name, or -1. @param {string} name */
  findNode(name) {
    const nodes = this.findNodes(name);
    return nodes.length === 1 ? nodes[0] : -1;
  }

  /** The nodes with this name, in which a star may replace the index of a plate. @param {string} name */
  findNodes(name) {
    const parts = name.split("_");
    for (let k = parts.length; k > 0; k--) {
      const group = this.groupByName.get(parts.slice(0, k).join("_")), texts = parts.slice(k);
      if (group === undefined || texts.length !== this.dims[group].length) continue;
      const { dims, plates } = this.groups[group];
      return texts.reduce((flats, text, axis) => {
        const choices = text === "*" && axis < plates.length ? Array.from({ length: dims[axis] }, (_, index) => index) : /^(0|[1-9]\d*)$/.test(text) && Number(text) < dims[axis] ? [Number(text)] : [];
        return flats.flatMap((flat) => choices.map((index) => flat * dims[axis] + index));
      }, [0]).map((flat) => this.offsets[group] + flat);
    }
    return [];
  }

  // structure

  /** Call `visit` with the parents (where `isUp`) or children of a node along some edges. @param {number} node @param {boolean} isUp @param {Edge[]} edges @param {(other: number) => void} visit */
  visitNeighbours(node, isUp, edges, visit) {
    // The adjacency of an edge is the Kronecker product of those of plates and of words, and a node's index in its group is
    // plate * (number of words) + word: its neighbours are all pairs of a neighbouring plate and a neighbouring word.
    const index = node - this.offsets[this.groupOf(node)], direction = isUp ? "columnsOf" : "rowsOf";
    for (const edge of edges) {
      const plates = edge.plates[direction], words = edge.words[direction], start = this.offsets[isUp ? edge.parent : edge.child];
      const stride = edge.words[isUp ? "rowsOf" : "columnsOf"].length, ends = words[index % words.length];
      for (const plate of plates[Math.floor(index / words.length)])
        for (let k = 0, first = start + plate * stride; k < ends.length; k++) visit(first + ends[k]);
    }
  }

  /** The parents of a node, or its children. @param {number} node @param {boolean} isUp @param {Edge[]} [edges] */
  neighbours(node, isUp, edges) {
    /** @type {number[]} */
    const nodes = [];
    this.visitNeighbours(node, isUp, edges ?? (isUp ? this.edgesInto : this.edgesOutOf)[this.groupOf(node)], (other) => nodes.push(other));
    return nodes;
  }

  /** The nodes that can be reached from some nodes along arrows, or against them where `isUp`, in ascending order. @param {number[]} nodes @param {boolean} isUp */
  reachable(nodes, isUp) {
    const visited = new Uint8Array(this.offsets[this.offsets.length - 1]), edges = isUp ? this.edgesInto : this.edgesOutOf;
    const remaining = [...this.counts], stack = [...nodes], result = /** @type {number[]} */ ([]);
    for (const node of nodes) { visited[node] = 1; remaining[this.groupOf(node)]--; }
    for (let node = stack.pop(); node !== undefined; node = stack.pop())
      for (const edge of edges[this.groupOf(node)]) {
        const group = isUp ? edge.parent : edge.child;
        if (!remaining[group]) continue; // every node of the group is visited: its arrows, most of the graph's, need not be followed
        this.visitNeighbours(node, isUp, [edge], (other) => { if (!visited[other]) { visited[other] = 1; remaining[group]--; stack.push(other); result.push(other); } });
      }
    return [...Int32Array.from(result).sort()]; // a typed array sorts by number
  }

  /** @param {number} node */
  parents(node) { return this.neighbours(node, true).sort((a, b) => a - b); }

  /** @param {number} node */
  children(node) { return this.neighbours(node, false).sort((a, b) => a - b); }

  /** @param {number[]} nodes */
  ancestors(nodes) { return this.reachable(nodes, true); }

  /** @param {number[]} nodes */
  descendants(nodes) { return this.reachable(nodes, false); }

  /** The Markov blanket: parents, children, and the children's other parents. @param {number} node */
  blanket(node) {
    const children = this.children(node);
    const blanket = new Set([...this.parents(node), ...children, ...children.flatMap((child) => this.parents(child))]);
    blanket.delete(node);
    return [...blanket].sort((a, b) => a - b);
  }
}
