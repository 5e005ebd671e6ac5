// @ts-check
/** Where everything stands: words are columns, states and the nodes of unfolded slices are rows, weights at the left. */

/**
 * @typedef {import("./net.js").Net} Net
 * @typedef {{key: string, stack: string, step: number, label: string, families: number[]}} Section
 * @typedef {{ids: number[], family: number, word: number|null, plate: number|null, x: number, y: number, wide: number,
 *   tall: number, under: boolean, dot: boolean, row: number, column: number}} Box
 * @typedef {{open: Set<string>, weights: boolean, heads: boolean, plate: number|"mean"|"all"}} Folds
 * @typedef {{boxes: Box[], words: {x: number, text: string, whole: string, stack: string, word: number}[],
 *   states: {y: number, family: number}[], sections: (Section & {y: number, open: boolean})[], wide: number, tall: number,
 *   roomy: boolean, slant: boolean, head: number}} Layout
 */

const ROOMY = 24; // words up to which boxes have labels
const RAIL = 35; // between weights that stand above one another
const BESIDE = 9; // between the nodes of a cell

/** About how wide a text is. @param {string} text @param {number} size */
export function widthOf(text, size) {
  let ems = 0;
  for (const letter of text) ems += letter > "\u2e7f" ? 1.1 : "iljtfr.,:;'|!()[] ".includes(letter) ? 0.36 : letter >= "A" && letter <= "Z" || "mw—…".includes(letter) ? 0.82 : 0.62;
  return ems * size;
}

/** The parts that fold: what comes before the first slice, each slice, what comes after the last. @param {Net} net @returns {Section[]} */
export function sectionsOf(net) {
  /** @type {Map<string, Section>} */
  const found = new Map();
  net.families.forEach((family, k) => {
    if (family.state || family.step === null || family.depth) return;
    const depth = net.stacks.find((stack) => stack.name === family.stack)?.slices ?? 0;
    const key = `${family.stack}:${family.step}`;
    const what = family.step < 0 ? "input" : family.step >= depth ? "output" : `slice ${family.step}`;
    const section = found.get(key) ?? { key, stack: family.stack, step: family.step, label: `${family.stack} ${what}`.trim(), families: [] };
    section.families.push(k);
    found.set(key, section);
  });
  return [...found.values()];
}

/** The folded label of a family: its letter, and what stands below. @param {import("./net.js").Family} family */
const short = (family) => family.letter[0] + family.letter[2].join("");

/** True for what chooses for more than one row: it stands beside all of them, folded or not. @param {import("./net.js").Family} family */
const chooses = (family) => family.selector && family.depth > 0 && (family.depth > 1 || family.slice === null);

/** @param {Net} net @param {Folds} folds @returns {Layout} */
export function layout(net, folds) {
  const roomy = net.stacks.reduce((sum, stack) => sum + stack.words.length, 0) <= ROOMY;
  const sections = sectionsOf(net);
  const shown = (/** @type {number} */ k) => {
    const family = net.families[k];
    if (family.state) return true;
    if (family.depth) return chooses(family) || (folds.weights && (family.step === null ? folds.open.size > 0 : folds.open.has(`${family.stack}:${family.step}`)));
    return family.step === null || folds.open.has(`${family.stack}:${family.step}`);
  };
  const families = net.order.filter(shown);
  const inRows = families.filter((k) => !net.families[k].depth), weights = families.filter((k) => net.families[k].depth);
  const size = (/** @type {number} */ k) => boxSize(net, k, roomy);
  const unfolded = (/** @type {number} */ k) => (folds.heads && net.families[k].words !== null ? net.plates(k) : 1);
  const columns = placeColumns(net, inRows, roomy, size);
  const rails = weights.filter((k) => !chooses(net.families[k]));
  const rows = placeRows(net, inRows, rails, roomy, size, unfolded);
  const left = placeWeights(net, weights, rails, rows, size);
  /** @type {Box[]} */
  const boxes = [];
  const shift = left.wide;
  for (const k of weights) {
    const place = /** @type {{x: number, y: number}} */ (left.at.get(k));
    boxes.push(box(net, k, null, folds, 0, place.x + shift, place.y, size(k), -1, -1, false));
  }
  for (const k of inRows) {
    const family = net.families[k], row = /** @type {{y: number, tall: number, index: number}} */ (rows.at.get(family.row));
    const cell = inRows.filter((other) => net.families[other].row === family.row && net.families[other].words === family.words);
    const wide = cell.reduce((sum, other) => sum + size(other).wide + BESIDE, -BESIDE);
    let before = 0;
    for (const other of cell) { if (other === k) break; before += size(other).wide + BESIDE; }
    const across = family.words === null ? [columns.middle(family.stack)] : columns.at[family.words];
    across.forEach((middle, word) => {
      for (let plate = 0; plate < unfolded(k); plate++) {
        const x = middle + shift - wide / 2 + before + size(k).wide / 2, y = row.y + (size(k).tall + 4) * plate;
        boxes.push(box(net, k, family.words === null ? null : word, folds, plate, x, y, size(k), row.index, word, unfolded(k) > 1));
      }
    });
  }
  const words = net.stacks.flatMap((stack) => (columns.at[stack.name] ?? []).map((x, word) => (
    { x: x + shift, text: stack.words[word], whole: stack.whole[word] ?? stack.words[word], stack: stack.name, word })));
  const states = inRows.filter((k) => net.families[k].state && net.families[k].words !== null).map((family) => ({ y: rows.middle(net.families[family].row), family }));
  const marks = placeSections(net, sections, folds, rows);
  const slant = !roomy;
  const head = slant ? Math.min(96, 22 + 0.72 * Math.max(...words.map((word) => widthOf(word.text, 10.5)))) : 34;
  return { boxes, words, states, sections: marks, wide: shift + columns.wide + 24, tall: rows.tall + 24, roomy, slant, head };
}

/** @param {Net} net @param {number} k @param {boolean} roomy */
function boxSize(net, k, roomy) {
  const family = net.families[k], text = widthOf(family.letter[0], 11.5) + widthOf(family.letter[2].join(","), 8);
  if (roomy) return { wide: Math.max(text + (family.words === null && family.slice === null ? 22 : 34), 40), tall: 26 };
  if (family.depth || family.words === null) return { wide: Math.max(text + 30, 34), tall: 22 };
  return family.state ? { wide: 10, tall: 10 } : { wide: Math.max(16, 7 + widthOf(short(family), 7)), tall: 14 };
}

/** @param {Net} net @param {number} k @param {number|null} word @param {Folds} folds @param {number} plate @param {number} x @param {number} y @param {{wide: number, tall: number}} size @param {number} row @param {number} column @param {boolean} open @returns {Box} */
function box(net, k, word, folds, plate, x, y, size, row, column, open) {
  const family = net.families[k], plates = net.plates(k);
  const heads = family.plates.length === 1 && family.plates[0] === "head";
  const one = open ? plate : plates === 1 ? 0 : heads && typeof folds.plate === "number" ? folds.plate : null;
  const ids = one === null ? Array.from({ length: plates }, (_, p) => net.id(k, p, word)) : [net.id(k, one, word)];
  const dot = family.state && size.wide <= 10;
  return { ids, family: k, word, plate: plates === 1 ? null : one, x, y: y + size.tall / 2, ...size, under: one === null, dot, row, column };
}

/** @param {Net} net @param {number[]} inRows @param {boolean} roomy @param {(k: number) => {wide: number}} size */
function placeColumns(net, inRows, roomy, size) {
  /** @type {Record<string, number[]>} */
  const at = {};
  let x = 18;
  for (const stack of net.stacks) {
    const own = inRows.filter((k) => net.families[k].words === stack.name);
    if (!own.length) continue;
    /** @type {Map<number, number>} */
    const cells = new Map();
    for (const k of own) cells.set(net.families[k].row, (cells.get(net.families[k].row) ?? -BESIDE) + size(k).wide + BESIDE);
    const need = Math.max(...cells.values());
    at[stack.name] = stack.words.map((word) => {
      const wide = Math.max(need, roomy ? widthOf(word, 12.5) : 14) + (roomy ? 20 : 10);
      x += wide;
      return x - wide / 2;
    });
    x += 56;
  }
  const wide = x - 56 + 18;
  const middle = (/** @type {string} */ stack) => {
    const own = at[stack] ?? Object.values(at).flat();
    return own.length ? (Math.min(...own) + Math.max(...own)) / 2 : 40;
  };
  return { at, wide: Math.max(wide, 120), middle };
}

/** @param {Net} net @param {number[]} inRows @param {number[]} rails @param {boolean} roomy @param {(k: number) => {tall: number}} size @param {(k: number) => number} unfolded */
function placeRows(net, inRows, rails, roomy, size, unfolded) {
  /** @type {Map<number, {y: number, tall: number, index: number}>} */
  const at = new Map();
  const numbers = [...new Set(inRows.map((k) => net.families[k].row))].sort((a, b) => a - b);
  const top = net.families.some(chooses) ? 48 : 34;
  let y = top;
  /** @type {number|null} */
  let before = null;
  numbers.forEach((number, index) => {
    const own = inRows.filter((k) => net.families[k].row === number);
    const tall = Math.max(...own.map((k) => unfolded(k) * (size(k).tall + 4) - 4));
    const folded = before !== null && own.some((k) => net.families[k].state) && number - before > 1;
    const reads = own.some((k) => net.families[k].reads);
    const gap = before === null ? 0 : folded ? (roomy ? 88 : 74) : reads ? (roomy ? 64 : 52) : roomy ? 34 : 24;
    y += Math.max(gap, RAIL * rails.filter((k) => net.families[k].row === number).length + (rails.length ? 14 : 0));
    at.set(number, { y, tall, index });
    y += tall;
    before = number;
  });
  const middle = (/** @type {number} */ number) => {
    const own = at.get(number);
    if (own) return own.y + own.tall / 2;
    const below = numbers.find((n) => n > number), above = [...numbers].reverse().find((n) => n < number);
    const low = below === undefined ? y + 24 : /** @type {any} */ (at.get(below)).y;
    const high = above === undefined ? top - 24 : /** @type {any} */ (at.get(above)).y + /** @type {any} */ (at.get(above)).tall;
    return (low + high) / 2;
  };
  return { at, tall: y, middle };
}

/** @param {Net} net @param {number[]} weights @param {number[]} rails @param {{at: Map<number, any>, middle: (n: number) => number}} rows @param {(k: number) => {wide: number, tall: number}} size */
function placeWeights(net, weights, rails, rows, size) {
  /** @type {Map<number, {x: number, y: number}>} */
  const at = new Map();
  const wide = Math.max(0, ...rails.map((k) => size(k).wide));
  const others = weights.filter((k) => !rails.includes(k));
  const own = Math.max(0, ...others.map((k) => size(k).wide));
  const total = (wide ? wide + 26 : 0) + (own ? own + 40 : 0);
  for (const k of rails) {
    const row = rows.at.get(net.families[k].row), beside = rails.filter((other) => net.families[other].row === net.families[k].row);
    const y = row ? row.y - 16 - RAIL * (beside.length - beside.indexOf(k)) : rows.middle(net.families[k].row) - size(k).tall / 2;
    at.set(k, { x: -26 - wide / 2, y });
  }
  let top = 8;
  for (const k of others.sort((a, b) => Number(net.families[a].slice !== null) - Number(net.families[b].slice !== null))) {
    const below = net.outOf[k].map((link) => at.get(link.child)?.y).filter((each) => each !== undefined);
    const middle = below.length ? below.reduce((a, b) => a + b, 0) / below.length : rows.middle(net.families[k].row) - size(k).tall / 2;
    const y = net.families[k].slice === null ? top : Math.max(top, middle);
    at.set(k, { x: 14 - total + own / 2, y });
    top = y + size(k).tall + 8;
  }
  return { at, wide: total };
}

/** @param {Net} net @param {Section[]} sections @param {Folds} folds @param {{middle: (n: number) => number}} rows */
function placeSections(net, sections, folds, rows) {
  let last = -8;
  return sections.map((section) => {
    const numbers = section.families.map((k) => net.families[k].row);
    return { ...section, y: (rows.middle(Math.min(...numbers)) + rows.middle(Math.max(...numbers))) / 2, open: folds.open.has(section.key) };
  }).sort((a, b) => a.y - b.y).map((section) => {
    last = Math.max(section.y, last + 18);
    return { ...section, y: last };
  });
}
