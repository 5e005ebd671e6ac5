// @ts-check
/** SVG and HTML elements of nodes, labels, lines and arrows. User text is only set as textContent, so it cannot become markup. */

/**
 * @typedef {import("./ground_graph.js").GroundGraph} GroundGraph
 * @typedef {import("./layout.js").Box} Box
 * @typedef {import("./layout.js").Layout} Layout
 * @typedef {{width: [number, number], opacity: [number, number], dashes: Record<string, number[]>}} LineStyle
 * @typedef {{source: Box, target: Box, hue: string, weight: number|null, kind: string, nodes?: [number, number], isBranch?: boolean, detourX?: number}} Line  `nodes`: source and target;  `isBranch`: starts on the shared line of a weight, which another arrow draws;  `detourX`: the x of a route to the right of the boxes between
 */

const SVG = "http://www.w3.org/2000/svg";
const NUM_OPACITY_LEVELS = 12;

/** An SVG element. @param {string} tag @param {Record<string, string|number>} [attributes] @param {...(Node|string)} children @returns {SVGElement} */
export function svgElement(tag, attributes = {}, ...children) {
  const element = document.createElementNS(SVG, tag);
  for (const [name, value] of Object.entries(attributes)) element.setAttribute(name, typeof value === "number" ? String(Math.round(value * 100) / 100) : value);
  element.append(...children);
  return element;
}

/** An HTML element. @param {string} tag @param {Record<string, any>} [attributes] @param {...(Node|string)} children @returns {HTMLElement} */
export function htmlElement(tag, attributes = {}, ...children) {
  const element = document.createElement(tag);
  for (const [name, value] of Object.entries(attributes)) {
    if (name.startsWith("on")) element.addEventListener(name.slice(2), value);
    else if (name.startsWith("aria-")) element.setAttribute(name, String(value));
    else if (value === true) element.setAttribute(name, "");
    else if (value !== false && value !== null && value !== undefined) element.setAttribute(name, String(value));
  }
  element.append(...children);
  return element;
}

/** Run a function that replaces the forms of a container; what the user typed and did not submit stays. @param {HTMLElement} container @param {() => void} render */
export function keepTyped(container, render) {
  const list = () => /** @type {HTMLInputElement[]} */ ([...container.querySelectorAll("form[data-action] input[name]")]);
  const key = (/** @type {HTMLInputElement} */ input) => `${input.form?.dataset.action} ${input.name}`;
  const typed = new Map(list().filter((input) => input.value !== input.defaultValue).map((input) => [key(input), input]));
  render();
  for (const input of list()) {
    const earlier = typed.get(key(input));
    if (earlier && earlier !== input && input.defaultValue === earlier.defaultValue) input.value = earlier.value;
  }
}

/** Run a function that replaces the children of a container. If one had the focus, the element with the same function gets it, else the first control of its section, else the container. @param {HTMLElement} container @param {() => void} render */
export function keepFocus(container, render) {
  const active = /** @type {Element|null} */ (/** @type {any} */ (container.getRootNode()).activeElement);
  const attribute = active && container.contains(active) && active !== container ? ["data-action", "data-switch", "data-highlight", "data-command", "data-name", "name"].find((name) => active.hasAttribute(name)) : undefined;
  const value = attribute && active?.getAttribute(attribute), parts = ["data-part", "data-live", "data-relation"].flatMap((name) => {
    const part = active?.closest(`[${name}]`);
    return part && container.contains(part) ? [`[${name}="${CSS.escape(part.getAttribute(name) ?? "")}"]`] : [];
  });
  const hadFocus = active !== null && container.contains(active);
  render();
  if (!hadFocus || (active && container.contains(active) && active.isConnected)) return;
  const same = attribute ? [...container.querySelectorAll(`[${attribute}="${CSS.escape(value ?? "")}"]`)] : [];
  const neighbours = parts.flatMap((part) => [...container.querySelectorAll(`${part} :is(button, input, select, summary)`)]);
  const target = /** @type {HTMLElement} */ (same.find((element) => parts.every((part) => element.closest(part))) ?? same[0] ?? neighbours[0] ?? container);
  if (active instanceof HTMLInputElement && target instanceof HTMLInputElement && active.name === target.name && target.type === "text") target.value = active.value; // the user is typing
  target.focus({ preventScroll: true });
}

/** The label of a node as spans: its letter, the word as subscript, the slice and other plates as superscript. @param {GroundGraph} graph @param {number} group @param {number|null} word @param {number|null} plate @param {number} size @param {string} [tag] */
export function renderLabel(graph, group, word, plate, size, tag = "tspan") {
  const { label: [letter, style, subscripts], slice, plates } = graph.groups[group];
  const sub = [...subscripts, ...(word === null ? [] : [String(word)])].join(",");
  const sup = (slice === null ? "" : String(slice)) + (plates.length && plate !== null ? `(${plate})` : "");
  if (tag !== "tspan") {
    return [htmlElement("i", { class: style }, letter), ...(sub ? [htmlElement("sub", {}, sub)] : []), ...(sup ? [htmlElement("sup", {}, sup)] : [])];
  }
  const spans = [svgElement("tspan", { class: style }, letter)];
  if (sub) spans.push(svgElement("tspan", { dy: 0.26 * size, "font-size": 0.72 * size }, sub));
  if (sup) spans.push(svgElement("tspan", { dy: (sub ? -0.62 : -0.36) * size, "font-size": 0.72 * size }, sup));
  return spans;
}

/** The fill, border and dash of a node, as defined in `figures.style`. @param {GroundGraph} graph @param {Box} box @param {Set<number>} interventions @param {Set<number>} evidence */
function nodeStyle(graph, box, interventions, evidence) {
  const group = graph.groups[box.group];
  const isSet = box.ids.every((id) => interventions.has(id)), isObserved = group.kind === "observed" || box.ids.every((id) => evidence.has(id));
  const isPartial = !isSet && box.ids.some((id) => interventions.has(id));
  return {
    fill: isSet ? "do" : isObserved ? "observed" : "paper",
    isDouble: isSet || (group.kind === "deterministic" && !isObserved),
    isDashed: group.is_learnable && !isSet,
    isPartial,
  };
}

/** A text that differs if the element of a node differs, except for its change. @param {GroundGraph} graph @param {Box} box @param {Set<number>} interventions @param {Set<number>} evidence @param {boolean} hasLabels @param {string} name */
export function nodeKey(graph, box, interventions, evidence, hasLabels, name) {
  const { fill, isDouble, isDashed, isPartial } = nodeStyle(graph, box, interventions, evidence);
  return `${name} ${box.row} ${box.x} ${box.y} ${box.width} ${box.height} ${box.plate} ${fill} ${isDouble} ${isDashed} ${isPartial} ${hasLabels}`;
}

/** Show how much the interventions changed a node: a ring of a dot, or a bar below a box. @param {SVGElement} element @param {Box} box @param {number|null} relativeChange */
export function renderChange(element, box, relativeChange) {
  const change = relativeChange !== null && relativeChange > 0.002 ? Math.round(100 * Math.min(1, relativeChange)) / 100 : null;
  const text = change === null ? "" : String(change);
  if ((element.dataset.change ?? "") === text) return;
  element.querySelector(".change, .change-bar")?.remove();
  if (change === null) { delete element.dataset.change; return; }
  element.dataset.change = text;
  const { width, height } = box, maxWidth = width - 10;
  element.append(box.isDot ? svgElement("circle", { r: 7.4, class: "change", "stroke-opacity": Math.min(1, 0.15 + change) })
    : svgElement("rect", { x: -maxWidth / 2, y: height / 2 + 2.5, width: maxWidth * change, height: 2.6, rx: 1.3, class: "change-bar" }));
}

/** Make an element equal to another one, without removing it from the page. @param {SVGElement} element @param {SVGElement} content */
export function replaceContent(element, content) {
  for (const name of element.getAttributeNames()) if (!content.hasAttribute(name)) element.removeAttribute(name);
  for (const { name, value } of content.attributes) if (name !== "tabindex") element.setAttribute(name, value);
  element.replaceChildren(...content.childNodes);
}

/** One node. @param {GroundGraph} graph @param {Box} box @param {Set<number>} interventions @param {Set<number>} evidence @param {boolean} hasLabels @param {string} name */
export function renderNode(graph, box, interventions, evidence, hasLabels, name) {
  const { fill, isDouble, isDashed, isPartial } = nodeStyle(graph, box, interventions, evidence), group = graph.groups[box.group];
  const role = (group.role.match(/(?:^|_)([qkv])$/) ?? [])[1];
  /** @type {Record<string, string>} */
  const names = box.ids.length === 1 ? { "data-node": graph.nodeName(box.ids[0]) } : { "data-nodes": `${group.name}_*${box.word === null ? "" : `_${box.word}`}` };
  const element = svgElement("g", { ...names, class: `node${isDashed ? " learnable" : ""}${role && !group.role.startsWith("W_") ? ` ${role}` : ""}${isPartial ? " partially-set" : ""}`,
    role: "gridcell", "aria-label": name, tabindex: -1, transform: `translate(${Math.round(box.x * 10) / 10} ${Math.round(box.y * 10) / 10})` });
  if (box.isDot) {
    element.append(svgElement("circle", { r: 9, class: "target" }));
    element.append(svgElement("circle", { r: 4.4, class: `shape dot fill-${fill}` }));
    return element;
  }
  const { width, height } = box, isSmall = height < 20, radius = isSmall ? 3 : 5;
  const makeRect = (/** @type {number} */ inset, /** @type {string} */ kind) => svgElement("rect", { x: inset - width / 2, y: inset - height / 2, width: width - 2 * inset, height: height - 2 * inset, rx: radius - inset / 2, class: kind });
  if (box.isStacked) for (const k of isSmall ? [1] : [2, 1]) {
    const shadow = makeRect(0, "stacked");
    shadow.setAttribute("transform", `translate(${2.5 * k} ${2.5 * k})`);
    element.append(shadow);
  }
  element.append(makeRect(0, `shape fill-${fill}`));
  if (isDouble) element.append(makeRect(isSmall ? 1.6 : 2.5, "inner"));
  const size = hasLabels ? 12 : isSmall ? 8.5 : 10.5, text = svgElement("text", { y: size * 0.34, "font-size": size, "text-anchor": "middle" });
  if (hasLabels || !isSmall) text.append(...renderLabel(graph, box.group, hasLabels || box.word === null ? box.word : null, box.plate, size));
  else {
    text.setAttribute("class", group.label[1]);
    text.textContent = group.label[0];
    if (group.label[2].length) text.append(svgElement("tspan", { dy: 0.26 * size, "font-size": 0.72 * size }, group.label[2].join(",")));
  }
  element.append(text);
  return element;
}

/** The SVG path of an arrow: a smooth curve between rows, a low arch within a row, a horizontal line with a bend from a weight. @param {Line} line */
export function arrowPath({ source, target, isBranch, detourX }) {
  const r = (/** @type {number} */ value) => Math.round(value * 10) / 10;
  if (detourX !== undefined) {
    const low = source.y + source.height / 2, high = target.y - target.height / 2 - 14, side = target.x < detourX ? -6 : 6;
    return `M${r(source.x)} ${r(low)}q0 9 6 9H${r(detourX - 6)}q6 0 6 6V${r(high - 6)}q0 6 ${side} 6H${r(target.x - side)}q${side} 0 ${side} 6V${r(high + 11.5)}`;
  }
  if (source.row < 0) return weightArrowPath(source, target, isBranch ?? false, r);
  const isDown = target.y > source.y + 1, isFlat = Math.abs(target.y - source.y) <= 1;
  if (isFlat) {
    const side = target.x > source.x ? 1 : -1, y = source.y - source.height / 2 - 1, arcHeight = 12 + 0.12 * Math.abs(target.x - source.x);
    return `M${r(source.x + 4 * side)} ${r(y)}C${r(source.x + 8 * side)} ${r(y - arcHeight)} ${r(target.x - 8 * side)} ${r(y - arcHeight)} ${r(target.x - 4 * side)} ${r(y)}`;
  }
  const y0 = source.y + (isDown ? 1 : -1) * (source.height / 2 + 1), y1 = target.y - (isDown ? 1 : -1) * (target.height / 2 + 2.5), middle = (y1 - y0) / 2;
  return `M${r(source.x)} ${r(y0)}C${r(source.x)} ${r(y0 + middle)} ${r(target.x)} ${r(y1 - middle)} ${r(target.x)} ${r(y1)}`;
}

/** The SVG path of an arrow from a weight: horizontal to the target, or down a lane if the target is far below. @param {Box} source @param {Box} target @param {boolean} isBranch @param {(value: number) => number} r */
function weightArrowPath(source, target, isBranch, r) {
  const x = r(source.x + source.width / 2), top = target.y - target.height / 2, left = r(target.x - target.width / 2 - 2);
  if (Math.abs(target.y - source.y) < source.height / 2) return `M${x} ${r(target.y)}H${left}`;
  if (target.row < 0) return `M${r(source.x)} ${r(isBranch ? target.y : source.y + (target.y > source.y ? 0.5 : -0.5) * source.height)}V${r(target.y)}H${left}`;
  if (source.y > top - 4) return `M${x} ${r(source.y)}H${left}`;
  const isDetour = !target.plate && top - source.y > 125, y = isDetour ? top - 14 : source.y, start = isBranch ? `M${r(target.x - 7)} ${r(y)}` : `M${x} ${r(source.y)}${isDetour ? `H${x + 9}V${r(y)}` : ""}H${r(target.x - 7)}`;
  return `${start}Q${r(target.x)} ${r(y)} ${r(target.x)} ${r(y + 7)}V${r(top - 2)}`;
}

/** The SVG path of an arrow head: a small triangle at the target. @param {Box} source @param {Box} target */
function arrowHeadPath(source, target) {
  const r = (/** @type {number} */ value) => Math.round(value * 10) / 10;
  const isSideways = source.row < 0 && (target.row < 0 || source.y > target.y - target.height / 2 - 4);
  if (isSideways) return `M${r(target.x - target.width / 2)} ${r(target.y)}l-5.5 -2v4Z`;
  const direction = target.y > source.y + 1 || source.row < 0 ? 1 : -1, y = target.y - direction * target.height / 2;
  return `M${r(target.x)} ${r(y)}l-2 ${-5.5 * direction}h4Z`;
}

/** One path for each line, with its nodes and weight as data attributes. @param {Line[]} lines @param {LineStyle} style @param {GroundGraph} graph */
export function renderLines(lines, style, graph) {
  return lines.map((line) => {
    const weight = line.weight ?? 0.3;
    const path = svgElement("path", { d: arrowPath(line), class: `line ${line.kind} hue-${line.hue}`, "stroke-width": style.width[0] + style.width[1] * weight,
      "stroke-opacity": line.weight === null ? 0.9 : Math.min(1, 0.2 + style.opacity[0] + style.opacity[1] * weight), "data-source": line.nodes ? graph.nodeName(line.nodes[0]) : "", "data-target": line.nodes ? graph.nodeName(line.nodes[1]) : "" });
    if (line.weight !== null) path.setAttribute("data-weight", String(Math.round(line.weight * 1e4) / 1e4));
    const dash = line.kind === "reader" ? [5, 3.4] : line.kind === "arrow" ? style.dashes[line.hue] ?? [] : [];
    if (dash.length) path.setAttribute("stroke-dasharray", dash.map((length) => Math.max(0.9, style.width[0] + style.width[1] * weight) * length).join(" "));
    return line.kind === "arrow" ? svgElement("g", { class: "arrow" }, path, svgElement("path", { d: arrowHeadPath(line.source, line.target), class: `tip hue-${line.hue}` })) : path;
  });
}

/** One path for all lines of a colour, kind and opacity level, so that thousands of lines are a few elements. @param {Line[]} lines @param {LineStyle} style */
export function renderLineBatches(lines, style) {
  /** @type {Map<string, string[]>} */
  const pathsByKey = new Map();
  /** @type {Map<string, string[]>} */
  const headsByHue = new Map();
  for (const line of lines) {
    if (line.kind === "arrow") headsByHue.set(line.hue, [...(headsByHue.get(line.hue) ?? []), arrowHeadPath(line.source, line.target)]);
    const key = `${line.hue} ${line.weight === null ? -1 : Math.min(NUM_OPACITY_LEVELS - 1, Math.floor(line.weight * NUM_OPACITY_LEVELS))} ${line.kind}`;
    const batch = pathsByKey.get(key);
    if (batch) batch.push(arrowPath(line)); else pathsByKey.set(key, [arrowPath(line)]);
  }
  const arrowHeads = [...headsByHue].map(([hue, parts]) => svgElement("path", { d: parts.join(""), class: `tip hue-${hue}` }));
  // Weak lines come first, so that strong lines are on top.
  const paths = [...pathsByKey].sort((a, b) => Number(a[0].split(" ")[1]) - Number(b[0].split(" ")[1])).map(([key, parts]) => {
    const [hue, level, kind] = key.split(" "), weight = level === "-1" ? null : (Number(level) + 0.5) / NUM_OPACITY_LEVELS;
    const path = svgElement("path", { d: parts.join(""), class: `lines ${kind} hue-${hue}`, "data-count": parts.length,
      "stroke-width": weight === null ? 0.9 : style.width[0] + style.width[1] * weight, "stroke-opacity": weight === null ? 0.55 : style.opacity[0] + style.opacity[1] * weight });
    const dash = kind === "arrow" ? style.dashes[hue] ?? [] : [];
    if (dash.length) path.setAttribute("stroke-dasharray", dash.join(" "));
    return path;
  });
  return [...paths, ...arrowHeads];
}
