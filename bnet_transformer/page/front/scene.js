// @ts-check
/** The picture: boxes, arrows and labels as SVG. User text reaches it by textContent alone. */

/**
 * @typedef {import("./net.js").Net} Net
 * @typedef {import("./layout.js").Box} Box
 * @typedef {import("./layout.js").Layout} Layout
 * @typedef {{width: [number, number], opacity: [number, number], dashes: Record<string, number[]>}} Look
 * @typedef {{from: Box, to: Box, hue: string, share: number|null, kind: string, ends?: [number, number], branch?: boolean, around?: number}} Line  `ends`: the nodes;  `branch`: of a rail that is drawn
 */

const SVG = "http://www.w3.org/2000/svg";
const LEVELS = 12;

/** An SVG element. @param {string} tag @param {Record<string, string|number>} [marks] @param {...(Node|string)} parts @returns {SVGElement} */
export function svg(tag, marks = {}, ...parts) {
  const found = document.createElementNS(SVG, tag);
  for (const [name, value] of Object.entries(marks)) found.setAttribute(name, typeof value === "number" ? String(Math.round(value * 100) / 100) : value);
  found.append(...parts);
  return found;
}

/** An HTML element. @param {string} tag @param {Record<string, any>} [marks] @param {...(Node|string)} parts @returns {HTMLElement} */
export function html(tag, marks = {}, ...parts) {
  const found = document.createElement(tag);
  for (const [name, value] of Object.entries(marks)) {
    if (name.startsWith("on")) found.addEventListener(name.slice(2), value);
    else if (name.startsWith("aria-")) found.setAttribute(name, String(value));
    else if (value === true) found.setAttribute(name, "");
    else if (value !== false && value !== null && value !== undefined) found.setAttribute(name, String(value));
  }
  found.append(...parts);
  return found;
}

/** The label of a node as spans: its letter, the word below, the slice and other plates above. @param {Net} net @param {number} family @param {number|null} word @param {number|null} plate @param {number} size @param {string} [tag] */
export function labelOf(net, family, word, plate, size, tag = "tspan") {
  const { letter: [text, style, below], slice, plates } = net.families[family];
  const sub = [...below, ...(word === null ? [] : [String(word)])].join(",");
  const sup = (slice === null ? "" : String(slice)) + (plates.length && plate !== null ? `(${plate})` : "");
  if (tag !== "tspan") {
    return [html("i", { class: style }, text), ...(sub ? [html("sub", {}, sub)] : []), ...(sup ? [html("sup", {}, sup)] : [])];
  }
  const spans = [svg("tspan", { class: style }, text)];
  if (sub) spans.push(svg("tspan", { dy: 0.26 * size, "font-size": 0.72 * size }, sub));
  if (sup) spans.push(svg("tspan", { dy: (sub ? -0.62 : -0.36) * size, "font-size": 0.72 * size }, sup));
  return spans;
}

/** The fill, border and dash of a node, as `figures.style` has them. @param {Net} net @param {Box} box @param {Set<number>} done @param {Set<number>} seen */
function signs(net, box, done, seen) {
  const family = net.families[box.family];
  const set = box.ids.every((id) => done.has(id)), observed = family.kind === "observed" || box.ids.every((id) => seen.has(id));
  const partly = !set && box.ids.some((id) => done.has(id));
  return {
    fill: set ? "do" : observed ? "observed" : "paper",
    double: set || (family.kind === "deterministic" && !observed),
    dashed: family.learnable && !set,
    partly,
  };
}

/** One node. @param {Net} net @param {Box} box @param {Set<number>} done @param {Set<number>} seen @param {boolean} roomy @param {number|null} moved */
export function node(net, box, done, seen, roomy, moved) {
  const { fill, double, dashed, partly } = signs(net, box, done, seen), family = net.families[box.family];
  const role = (family.role.match(/(?:^|_)([qkv])$/) ?? [])[1];
  /** @type {Record<string, string>} */
  const names = box.ids.length === 1 ? { "data-node": net.name(box.ids[0]) } : { "data-nodes": `${family.name}_*${box.word === null ? "" : `_${box.word}`}` };
  const group = svg("g", { ...names, class: `node${dashed ? " learnable" : ""}${role && !family.role.startsWith("W_") ? ` ${role}` : ""}${partly ? " partly" : ""}`,
    role: "gridcell", tabindex: -1, transform: `translate(${Math.round(box.x * 10) / 10} ${Math.round(box.y * 10) / 10})` });
  if (box.dot) {
    group.append(svg("circle", { r: 9, class: "target" }));
    group.append(svg("circle", { r: 4.4, class: `shape dot fill-${fill}` }));
    if (moved !== null && moved > 0.002) group.append(svg("circle", { r: 7.4, class: "moved", "stroke-opacity": Math.min(1, 0.15 + moved) }));
    return group;
  }
  const { wide, tall } = box, low = tall < 20, round = low ? 3 : 5;
  const frame = (/** @type {number} */ inset, /** @type {string} */ kind) => svg("rect", { x: inset - wide / 2, y: inset - tall / 2, width: wide - 2 * inset, height: tall - 2 * inset, rx: round - inset / 2, class: kind });
  if (box.under) for (const k of low ? [1] : [2, 1]) {
    const behind = frame(0, "behind");
    behind.setAttribute("transform", `translate(${2.5 * k} ${2.5 * k})`);
    group.append(behind);
  }
  group.append(frame(0, `shape fill-${fill}`));
  if (double) group.append(frame(low ? 1.6 : 2.5, "inner"));
  if (moved !== null && moved > 0.002) {
    const most = wide - 10;
    group.append(svg("rect", { x: -most / 2, y: tall / 2 + 2.5, width: most * Math.min(1, moved), height: 2.6, rx: 1.3, class: "moved-bar" }));
  }
  const size = roomy ? 12 : low ? 8.5 : 10.5, text = svg("text", { y: size * 0.34, "font-size": size, "text-anchor": "middle" });
  if (roomy || !low) text.append(...labelOf(net, box.family, roomy || box.word === null ? box.word : null, box.plate, size));
  else {
    text.setAttribute("class", family.letter[1]);
    text.textContent = family.letter[0];
    if (family.letter[2].length) text.append(svg("tspan", { dy: 0.26 * size, "font-size": 0.72 * size }, family.letter[2].join(",")));
  }
  group.append(text);
  return group;
}

/** The way of an arrow: from row to row one smooth curve, from a weight along a rail, within a row a low arch. @param {Line} line */
export function way({ from, to, branch, around }) {
  const r = (/** @type {number} */ value) => Math.round(value * 10) / 10;
  if (around !== undefined) {
    const low = from.y + from.tall / 2, high = to.y - to.tall / 2 - 14, side = to.x < around ? -6 : 6;
    return `M${r(from.x)} ${r(low)}q0 9 6 9H${r(around - 6)}q6 0 6 6V${r(high - 6)}q0 6 ${side} 6H${r(to.x - side)}q${side} 0 ${side} 6V${r(high + 11.5)}`;
  }
  if (from.row < 0) return rail(from, to, branch ?? false, r);
  const down = to.y > from.y + 1, flat = Math.abs(to.y - from.y) <= 1;
  if (flat) {
    const side = to.x > from.x ? 1 : -1, y = from.y - from.tall / 2 - 1, rise = 12 + 0.12 * Math.abs(to.x - from.x);
    return `M${r(from.x + 4 * side)} ${r(y)}C${r(from.x + 8 * side)} ${r(y - rise)} ${r(to.x - 8 * side)} ${r(y - rise)} ${r(to.x - 4 * side)} ${r(y)}`;
  }
  const y0 = from.y + (down ? 1 : -1) * (from.tall / 2 + 1), y1 = to.y - (down ? 1 : -1) * (to.tall / 2 + 2.5), middle = (y1 - y0) / 2;
  return `M${r(from.x)} ${r(y0)}C${r(from.x)} ${r(y0 + middle)} ${r(to.x)} ${r(y1 - middle)} ${r(to.x)} ${r(y1)}`;
}

/** From a weight: along its rail, or by a lane at the left to a row that it does not stand above. @param {Box} from @param {Box} to @param {boolean} branch @param {(value: number) => number} r */
function rail(from, to, branch, r) {
  const x = r(from.x + from.wide / 2), top = to.y - to.tall / 2, left = r(to.x - to.wide / 2 - 2);
  if (Math.abs(to.y - from.y) < from.tall / 2) return `M${x} ${r(to.y)}H${left}`;
  if (to.row < 0) return `M${r(from.x)} ${r(branch ? to.y : from.y + (to.y > from.y ? 0.5 : -0.5) * from.tall)}V${r(to.y)}H${left}`;
  if (from.y > top - 4) return `M${x} ${r(from.y)}H${left}`;
  const far = !to.plate && top - from.y > 125, y = far ? top - 14 : from.y, start = branch ? `M${r(to.x - 7)} ${r(y)}` : `M${x} ${r(from.y)}${far ? `H${x + 9}V${r(y)}` : ""}H${r(to.x - 7)}`;
  return `${start}Q${r(to.x)} ${r(y)} ${r(to.x)} ${r(y + 7)}V${r(top - 2)}`;
}

/** The head of an arrow: a small triangle where it ends. @param {Box} from @param {Box} to */
function tip(from, to) {
  const r = (/** @type {number} */ value) => Math.round(value * 10) / 10;
  const sideways = from.row < 0 && (to.row < 0 || from.y > to.y - to.tall / 2 - 4);
  if (sideways) return `M${r(to.x - to.wide / 2)} ${r(to.y)}l-5.5 -2v4Z`;
  const down = to.y > from.y + 1 || from.row < 0 ? 1 : -1, y = to.y - down * to.tall / 2;
  return `M${r(to.x)} ${r(y)}l-2 ${-5.5 * down}h4Z`;
}

/** Lines one by one, each with its data: of one word. @param {Line[]} lines @param {Look} look @param {Net} net */
export function single(lines, look, net) {
  return lines.map((line) => {
    const share = line.share ?? 0.3;
    const path = svg("path", { d: way(line), class: `line ${line.kind} hue-${line.hue}`, "stroke-width": look.width[0] + look.width[1] * share,
      "stroke-opacity": line.share === null ? 0.9 : Math.min(1, 0.2 + look.opacity[0] + look.opacity[1] * share), "data-source": line.ends ? net.name(line.ends[0]) : "", "data-target": line.ends ? net.name(line.ends[1]) : "" });
    if (line.share !== null) path.setAttribute("data-weight", String(Math.round(line.share * 1e4) / 1e4));
    const dash = line.kind === "by" ? [5, 3.4] : line.kind === "arrow" ? look.dashes[line.hue] ?? [] : [];
    if (dash.length) path.setAttribute("stroke-dasharray", dash.map((length) => Math.max(0.9, look.width[0] + look.width[1] * share) * length).join(" "));
    return line.kind === "arrow" ? svg("g", { class: "arrow" }, path, svg("path", { d: tip(line.from, line.to), class: `tip hue-${line.hue}` })) : path;
  });
}

/** Many lines as few paths, one for each colour and level of strength. @param {Line[]} lines @param {Look} look */
export function many(lines, look) {
  /** @type {Map<string, string[]>} */
  const ways = new Map();
  /** @type {Map<string, string[]>} */
  const tips = new Map();
  for (const line of lines) {
    if (line.kind === "arrow") tips.set(line.hue, [...(tips.get(line.hue) ?? []), tip(line.from, line.to)]);
    const key = `${line.hue} ${line.share === null ? -1 : Math.min(LEVELS - 1, Math.floor(line.share * LEVELS))} ${line.kind}`;
    const own = ways.get(key);
    if (own) own.push(way(line)); else ways.set(key, [way(line)]);
  }
  const heads = [...tips].map(([hue, parts]) => svg("path", { d: parts.join(""), class: `tip hue-${hue}` }));
  const paths = [...ways].sort((a, b) => Number(a[0].split(" ")[1]) - Number(b[0].split(" ")[1])).map(([key, parts]) => {
    const [hue, level, kind] = key.split(" "), share = level === "-1" ? null : (Number(level) + 0.5) / LEVELS;
    const path = svg("path", { d: parts.join(""), class: `lines ${kind} hue-${hue}`, "data-count": parts.length,
      "stroke-width": share === null ? 0.9 : look.width[0] + look.width[1] * share, "stroke-opacity": share === null ? 0.55 : look.opacity[0] + look.opacity[1] * share });
    const dash = kind === "arrow" ? look.dashes[hue] ?? [] : [];
    if (dash.length) path.setAttribute("stroke-dasharray", dash.join(" "));
    return path;
  });
  return [...paths, ...heads];
}
