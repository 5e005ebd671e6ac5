// @ts-check
/** The layout: words are columns, states and the nodes of unfolded slices are rows, weights are at the left. */

/**
 * @typedef {import("./ground_graph.js").GroundGraph} GroundGraph
 * @typedef {{key: string, stack: string, step: number, label: string, groups: number[]}} Section
 * @typedef {{ids: number[], group: number, word: number|null, plate: number|null, x: number, y: number, width: number,
 *   height: number, isStacked: boolean, isDot: boolean, row: number, column: number}} Box
 * @typedef {{openSections: Set<string>, showWeights: boolean, unfoldHeads: boolean, plate: number|"mean"|"all"}} LayoutOptions
 * @typedef {{boxes: Box[], words: {x: number, text: string, fullText: string, stack: string, word: number}[],
 *   states: {y: number, group: number}[], sections: (Section & {y: number, isOpen: boolean})[], width: number, height: number,
 *   hasLabels: boolean, isSlanted: boolean, headerHeight: number}} Layout
 */

const MAX_LABELLED_WORDS = 24; // words up to which boxes have labels
const WEIGHT_SPACING = 35; // between weights of the same row
const NODE_GAP = 9; // between the nodes of a cell

/** The approximate width of a text in pixels. @param {string} text @param {number} size */
export function textWidth(text, size) {
  let ems = 0;
  for (const letter of text) ems += letter > "\u2e7f" ? 1.1 : "iljtfr.,:;'|!()[] ".includes(letter) ? 0.36 : letter >= "A" && letter <= "Z" || "mw—…".includes(letter) ? 0.82 : 0.62;
  return ems * size;
}

/** The sections that fold: the nodes before the first slice, each slice, the nodes after the last. @param {GroundGraph} graph @returns {Section[]} */
export function getSections(graph) {
  /** @type {Map<string, Section>} */
  const sections = new Map();
  graph.groups.forEach((group, k) => {
    if (group.is_state || group.step === null || group.depth) return;
    const depth = graph.stacks.find((stack) => stack.name === group.stack)?.num_slices ?? 0;
    const key = `${group.stack}:${group.step}`;
    const position = group.step < 0 ? "input" : group.step >= depth ? "output" : `slice ${group.step}`;
    const section = sections.get(key) ?? { key, stack: group.stack, step: group.step, label: `${group.stack} ${position}`.trim(), groups: [] };
    section.groups.push(k);
    sections.set(key, section);
  });
  return [...sections.values()];
}

/** The short label of a group: its letter and subscripts. @param {import("./ground_graph.js").Group} group */
const shortLabel = (group) => group.label[0] + group.label[2].join("");

/** True for a selector on which several rows depend: it is shown at the left, also in folded views. @param {import("./ground_graph.js").Group} group */
const isGlobalSelector = (group) => group.is_selector && group.depth > 0 && (group.depth > 1 || group.slice === null);

/** Lay out the visible nodes. @param {GroundGraph} graph @param {LayoutOptions} options @returns {Layout} */
export function computeLayout(graph, options) {
  const hasLabels = graph.stacks.reduce((sum, stack) => sum + stack.words.length - stack.hidden.length, 0) <= MAX_LABELLED_WORDS;
  const sections = getSections(graph);
  const isVisible = (/** @type {number} */ k) => {
    const group = graph.groups[k];
    if (group.is_state) return true;
    if (group.depth) return isGlobalSelector(group) || (options.showWeights && (group.step === null ? options.openSections.size > 0 : options.openSections.has(`${group.stack}:${group.step}`)));
    return group.step === null || options.openSections.has(`${group.stack}:${group.step}`);
  };
  const groups = graph.groupOrder.filter(isVisible);
  const inRows = groups.filter((k) => !graph.groups[k].depth), weights = groups.filter((k) => graph.groups[k].depth);
  const size = (/** @type {number} */ k) => boxSize(graph, k, hasLabels);
  const numUnfolded = (/** @type {number} */ k) => (options.unfoldHeads && graph.groups[k].word_stack !== null ? graph.numPlates(k) : 1);
  const columns = layoutColumns(graph, inRows, hasLabels, size);
  const rowWeights = weights.filter((k) => !isGlobalSelector(graph.groups[k]));
  const rows = layoutRows(graph, inRows, rowWeights, hasLabels, size, numUnfolded);
  const weightColumn = layoutWeights(graph, weights, rowWeights, rows, size);
  /** @type {Box[]} */
  const boxes = [];
  const shift = weightColumn.width;
  for (const k of weights) {
    const position = /** @type {{x: number, y: number}} */ (weightColumn.positions.get(k));
    boxes.push(makeBox(graph, k, null, options, 0, position.x + shift, position.y, size(k), -1, -1, false));
  }
  for (const k of inRows) {
    const group = graph.groups[k], row = /** @type {{y: number, height: number, index: number}} */ (rows.positions.get(group.row));
    const cellGroups = inRows.filter((other) => graph.groups[other].row === group.row && graph.groups[other].word_stack === group.word_stack);
    const width = cellGroups.reduce((sum, other) => sum + size(other).width + NODE_GAP, -NODE_GAP);
    let offset = 0;
    for (const other of cellGroups) { if (other === k) break; offset += size(other).width + NODE_GAP; }
    const centres = group.word_stack === null ? [columns.centre(group.stack)] : columns.positions[group.word_stack];
    centres.forEach((centre, word) => {
      if (centre === null) return;
      for (let plate = 0; plate < numUnfolded(k); plate++) {
        const x = centre + shift - width / 2 + offset + size(k).width / 2, y = row.y + (size(k).height + 4) * plate;
        boxes.push(makeBox(graph, k, group.word_stack === null ? null : word, options, plate, x, y, size(k), row.index, word, numUnfolded(k) > 1));
      }
    });
  }
  const words = graph.stacks.flatMap((stack) => (columns.positions[stack.name] ?? []).flatMap((x, word) => (
    x === null ? [] : [{ x: x + shift, text: stack.words[word], fullText: stack.full_words[word] ?? stack.words[word], stack: stack.name, word }])));
  const states = inRows.filter((k) => graph.groups[k].is_state && graph.groups[k].word_stack !== null).map((group) => ({ y: rows.centre(graph.groups[group].row), group }));
  const sectionMarks = layoutSections(graph, sections, options, rows);
  const isSlanted = !hasLabels;
  const headerHeight = isSlanted ? slantedHeight(words) : 34;
  return { boxes, words, states, sections: sectionMarks, width: shift + columns.width + 24, height: rows.height + 24, hasLabels, isSlanted, headerHeight };
}

/** The height of words that are slanted. @param {{text: string}[]} words */
export const slantedHeight = (words) => Math.min(96, 22 + 0.72 * Math.max(...words.map((word) => textWidth(word.text, 10.5))));

/** The size of the boxes of group k. @param {GroundGraph} graph @param {number} k @param {boolean} hasLabels */
function boxSize(graph, k, hasLabels) {
  const group = graph.groups[k], text = textWidth(group.label[0], 11.5) + textWidth(group.label[2].join(","), 8);
  if (hasLabels) return { width: Math.max(text + (group.word_stack === null && group.slice === null ? 22 : 34), 40), height: 26 };
  if (group.depth || group.word_stack === null) return { width: Math.max(text + 30, 34), height: 22 };
  return group.is_state ? { width: 10, height: 10 } : { width: Math.max(16, 7 + textWidth(shortLabel(group), 7)), height: 14 };
}

/** The box of one node, or of a stack of nodes that share a word. @param {GroundGraph} graph @param {number} k @param {number|null} word @param {LayoutOptions} options @param {number} plate @param {number} x @param {number} y @param {{width: number, height: number}} size @param {number} row @param {number} column @param {boolean} isUnfolded @returns {Box} */
function makeBox(graph, k, word, options, plate, x, y, size, row, column, isUnfolded) {
  const group = graph.groups[k], plates = graph.numPlates(k);
  const isHeadPlate = group.plates.length === 1 && group.plates[0] === "head";
  const shownPlate = isUnfolded ? plate : plates === 1 ? 0 : isHeadPlate && typeof options.plate === "number" ? options.plate : null;
  const ids = shownPlate === null ? Array.from({ length: plates }, (_, p) => graph.nodeId(k, p, word)) : [graph.nodeId(k, shownPlate, word)];
  const isDot = group.is_state && size.width <= 10;
  return { ids, group: k, word, plate: plates === 1 ? null : shownPlate, x, y: y + size.height / 2, ...size, isStacked: shownPlate === null, isDot, row, column };
}

/** The centres of the word columns, as wide as the widest row of nodes; null for a word that is not shown. @param {GroundGraph} graph @param {number[]} inRows @param {boolean} hasLabels @param {(k: number) => {width: number}} size */
function layoutColumns(graph, inRows, hasLabels, size) {
  /** @type {Record<string, (number|null)[]>} */
  const positions = {};
  let x = 18;
  for (const stack of graph.stacks) {
    const groups = inRows.filter((k) => graph.groups[k].word_stack === stack.name);
    if (!groups.length) continue;
    /** @type {Map<number, number>} */
    const cells = new Map();
    for (const k of groups) cells.set(graph.groups[k].row, (cells.get(graph.groups[k].row) ?? -NODE_GAP) + size(k).width + NODE_GAP);
    const minWidth = Math.max(...cells.values());
    positions[stack.name] = stack.words.map((word, index) => {
      if (stack.hidden.includes(index)) return null;
      const width = Math.max(minWidth, hasLabels ? textWidth(word, 12.5) : 14) + (hasLabels ? 20 : 10);
      x += width;
      return x - width / 2;
    });
    x += 56;
  }
  const width = x - 56 + 18;
  const centre = (/** @type {string} */ stack) => {
    const centres = (positions[stack] ?? Object.values(positions).flat()).filter((centre) => centre !== null);
    return centres.length ? (Math.min(...centres) + Math.max(...centres)) / 2 : 40;
  };
  return { positions, width: Math.max(width, 120), centre };
}

/** The tops of the rows, with more space where slices are folded, attention lines run or weights are shown. @param {GroundGraph} graph @param {number[]} inRows @param {number[]} rowWeights @param {boolean} hasLabels @param {(k: number) => {height: number}} size @param {(k: number) => number} numUnfolded */
function layoutRows(graph, inRows, rowWeights, hasLabels, size, numUnfolded) {
  /** @type {Map<number, {y: number, height: number, index: number}>} */
  const positions = new Map();
  const rowNumbers = [...new Set(inRows.map((k) => graph.groups[k].row))].sort((a, b) => a - b);
  const top = graph.groups.some(isGlobalSelector) ? 48 : 34;
  let y = top;
  /** @type {number|null} */
  let previous = null;
  rowNumbers.forEach((number, index) => {
    const groups = inRows.filter((k) => graph.groups[k].row === number);
    const height = Math.max(...groups.map((k) => numUnfolded(k) * (size(k).height + 4) - 4));
    const isFolded = previous !== null && groups.some((k) => graph.groups[k].is_state) && number - previous > 1;
    const hasAttention = groups.some((k) => graph.groups[k].has_attention_edges);
    const gap = previous === null ? 0 : isFolded ? (hasLabels ? 88 : 74) : hasAttention ? (hasLabels ? 64 : 52) : hasLabels ? 34 : 24;
    y += Math.max(gap, WEIGHT_SPACING * rowWeights.filter((k) => graph.groups[k].row === number).length + (rowWeights.length ? 14 : 0));
    positions.set(number, { y, height, index });
    y += height;
    previous = number;
  });
  const centre = (/** @type {number} */ number) => {
    const position = positions.get(number);
    if (position) return position.y + position.height / 2;
    const below = rowNumbers.find((n) => n > number), above = [...rowNumbers].reverse().find((n) => n < number);
    const low = below === undefined ? y + 24 : /** @type {any} */ (positions.get(below)).y;
    const high = above === undefined ? top - 24 : /** @type {any} */ (positions.get(above)).y + /** @type {any} */ (positions.get(above)).height;
    return (low + high) / 2;
  };
  return { positions, height: y, centre };
}

/** The positions of weights, above their rows at the left, and of global selectors, left of them. @param {GroundGraph} graph @param {number[]} weights @param {number[]} rowWeights @param {{positions: Map<number, any>, centre: (n: number) => number}} rows @param {(k: number) => {width: number, height: number}} size */
function layoutWeights(graph, weights, rowWeights, rows, size) {
  /** @type {Map<number, {x: number, y: number}>} */
  const positions = new Map();
  const width = Math.max(0, ...rowWeights.map((k) => size(k).width));
  const selectors = weights.filter((k) => !rowWeights.includes(k));
  const selectorWidth = Math.max(0, ...selectors.map((k) => size(k).width));
  const total = (width ? width + 26 : 0) + (selectorWidth ? selectorWidth + 40 : 0);
  for (const k of rowWeights) {
    const row = rows.positions.get(graph.groups[k].row), sameRow = rowWeights.filter((other) => graph.groups[other].row === graph.groups[k].row);
    const y = row ? row.y - 16 - WEIGHT_SPACING * (sameRow.length - sameRow.indexOf(k)) : rows.centre(graph.groups[k].row) - size(k).height / 2;
    positions.set(k, { x: -26 - width / 2, y });
  }
  let top = 8;
  for (const k of selectors.sort((a, b) => Number(graph.groups[a].slice !== null) - Number(graph.groups[b].slice !== null))) {
    const childYs = graph.edgesOutOf[k].map((edge) => positions.get(edge.child)?.y).filter((y) => y !== undefined);
    const centre = childYs.length ? childYs.reduce((a, b) => a + b, 0) / childYs.length : rows.centre(graph.groups[k].row) - size(k).height / 2;
    const y = graph.groups[k].slice === null ? top : Math.max(top, centre);
    positions.set(k, { x: 14 - total + selectorWidth / 2, y });
    top = y + size(k).height + 8;
  }
  return { positions, width: total };
}

/** The labels of sections next to their rows, at least 18 pixels apart. @param {GroundGraph} graph @param {Section[]} sections @param {LayoutOptions} options @param {{centre: (n: number) => number}} rows */
function layoutSections(graph, sections, options, rows) {
  let lastY = -8;
  return sections.map((section) => {
    const rowNumbers = section.groups.map((k) => graph.groups[k].row);
    return { ...section, y: (rows.centre(Math.min(...rowNumbers)) + rows.centre(Math.max(...rowNumbers))) / 2, isOpen: options.openSections.has(section.key) };
  }).sort((a, b) => a.y - b.y).map((section) => {
    lastY = Math.max(section.y, lastY + 18);
    return { ...section, y: lastY };
  });
}
