// @ts-check
/** The lines to draw: attention between hidden states or nodes, and arrows of unfolded slices; and attention as text and tables. */

import { PageAttention } from "./attention.js";
import { GroundGraph } from "./ground_graph.js";

/**
 * @typedef {import("./layout.js").Box} Box
 * @typedef {import("./elements.js").Line} Line
 * @typedef {import("./controls.js").Settings} Settings
 */

const MAX_ARROWS = 2_500; // arrows of unfolded slices that are drawn at once

export class AttentionLines {
  /** @type {import("./ground_graph.js").Description} */ description = {};
  /** @type {GroundGraph} */ graph = /** @type {any} */ (null);
  /** @type {PageAttention[]} */ attentions = [];
  /** @type {Settings} */ settings = /** @type {any} */ (null);
  /** @type {Set<string>} the sections that are unfolded */ openSections = new Set();
  /** @type {import("./layout.js").Layout} */ layout = /** @type {any} */ (null);
  /** @type {Map<number, Box>} */ boxByNode = new Map();
  /** @type {Map<number, Box[]>} */ boxesByGroup = new Map();

  /** The name of a box, with its word. @param {Box} box */
  describeBox(box) {
    const group = this.graph.groups[box.group], name = box.ids.length === 1 ? this.graph.nodeName(box.ids[0]) : `${group.name}, ${box.ids.length} nodes`;
    const stack = this.graph.stacks.find((candidate) => candidate.name === group.word_stack);
    return stack && box.word !== null ? `${name}, “${stack.words[box.word]}”` : name;
  }

  /** The views in which an attention is shown by the settings: one for each head, or one. @param {PageAttention} attention */
  getViews(attention) {
    const { head, unfoldHeads } = this.settings, states = this.settings.states, numPlates = attention.description.num_plates;
    if (numPlates === 1) return [{ plate: /** @type {number|"mean"} */ (0), states }];
    const isPerHead = head === "all" || (unfoldHeads && this.openSections.has(this.sectionKey(attention)));
    if (isPerHead && (head === "all" || head === "mean")) return Array.from({ length: numPlates }, (_, plate) => ({ plate: /** @type {number|"mean"} */ (plate), states }));
    return [{ plate: head === "mean" ? /** @type {number|"mean"} */ ("mean") : this.plateIndex(Number(head)), states }];
  }

  /** The index of a head among the heads of the page. @param {number} head */
  plateIndex(head) { return this.description.heads ? this.description.heads.indexOf(head) : head; }

  /** The key of the section that contains an attention. @param {PageAttention} attention */
  sectionKey(attention) {
    const group = this.graph.groups[attention.description.group];
    return `${group.stack}:${group.step}`;
  }

  /** A function from an entry of the attention to its line: between states or, in an unfolded slice, between nodes. @param {PageAttention} attention @returns {(entry: import("./attention.js").AttentionEntry, kind: string) => Line|null} */
  makeLineBuilder(attention) {
    const { description } = attention, { graph } = this, isPerHead = this.settings.head === "all" && description.num_plates > 1;
    const isUnfolded = this.openSections.has(this.sectionKey(attention)) || description.target_state === null || description.source_state === null;
    const [sourceGroup, targetGroup] = isUnfolded ? [description.source_group, description.group] : [/** @type {number} */ (description.source_state), /** @type {number} */ (description.target_state)];
    const edgeHue = isUnfolded ? graph.edges.find((edge) => edge.parent === description.source_group && edge.child === description.group)?.hue ?? "accent" : "accent";
    const [hasSourcePlates, hasTargetPlates] = [sourceGroup, targetGroup].map((group) => graph.numPlates(group) > 1);
    const isWordless = graph.groups[targetGroup].word_stack === null;
    return (entry, kind) => {
      const plate = typeof entry.plate === "number" ? this.description.heads?.[entry.plate] ?? entry.plate : 0;
      const sourceNode = graph.nodeId(sourceGroup, hasSourcePlates ? plate : 0, entry.j), targetNode = graph.nodeId(targetGroup, hasTargetPlates ? plate : 0, isWordless ? null : entry.i);
      const source = this.boxByNode.get(sourceNode), target = this.boxByNode.get(targetNode);
      return source && target && !graph.severed.has(targetNode) ? { source, target, hue: isPerHead ? `head-${Number(entry.plate) % 8}` : edgeHue, weight: entry.weight, kind, nodes: [sourceNode, targetNode] } : null;
    };
  }

  /** The arrows between the nodes of unfolded slices; null if there are too many. @returns {Line[]|null} */
  buildArrows() {
    const { graph } = this;
    /** @type {Line[]} */
    const lines = [];
    if (this.layout.boxes.filter((box) => !graph.groups[box.group].is_state).length > MAX_ARROWS / 2) return null;
    for (const edge of graph.edges) {
      const groups = [graph.groups[edge.parent], graph.groups[edge.child]];
      if (groups.every((group) => group.is_state && group.word_stack !== null) && !this.attentions.some((attention) => attention.description.group === edge.child && this.openSections.has(this.sectionKey(attention)))) continue;
      const getWeight = this.getWeightLookup(edge.parent, edge.child);
      for (const target of this.boxesByGroup.get(edge.child) ?? []) {
        const parents = target.ids.flatMap((id) => graph.neighbours(id, true, [edge]));
        for (const source of new Set(parents.map((id) => this.boxByNode.get(id)))) {
          if (!source) continue;
          const weight = getWeight ? getWeight(target, source) : null;
          if (weight !== null && weight < this.settings.minWeight) continue;
          lines.push({ source, target, hue: edge.hue, weight, kind: "arrow" });
          if (lines.length > MAX_ARROWS) return null;
        }
      }
    }
    // Arrows from a weight to a row share one horizontal line. Only the longest arrow draws it, and the others branch off:
    // overlapping dashes and opacities would add up.
    /** @type {Map<string, Line>} */
    const farthest = new Map();
    for (const line of lines) if (line.source.row < 0) {
      const { source, target } = line, rail = `${source.group} ${target.row} ${target.row < 0 && target.y < source.y} ${target.row < 0 ? "" : target.y}`, best = farthest.get(rail)?.target;
      line.isBranch = true;
      if (!best || (target.row < 0 ? Math.abs(target.y - source.y) > Math.abs(best.y - source.y) : target.x > best.x)) farthest.set(rail, line);
    }
    for (const line of farthest.values()) line.isBranch = false;
    if (graph.stacks.every((stack) => !stack.words.length)) this.routeAroundBoxes(lines);
    return lines;
  }

  /** Route arrows that skip a row, in a net without words, to the right of the boxes between. @param {Line[]} lines */
  routeAroundBoxes(lines) {
    lines.filter((line) => line.target.row - line.source.row > 1).forEach((line, lane) => {
      const between = this.layout.boxes.filter((box) => box.row >= line.source.row && box.row < line.target.row);
      line.detourX = Math.max(...between.map((box) => box.x + box.width / 2)) + 14 + 6 * lane;
    });
  }

  /** A function from two boxes to P(j | i) of the arrow between them; null if the arrow has no attention weight. @param {number} parent @param {number} child */
  getWeightLookup(parent, child) {
    const attention = this.attentions.find((attention) => attention.description.group === child && attention.description.word_parents.includes(parent));
    if (!attention) return null;
    return (/** @type {Box} */ target, /** @type {Box} */ source) => {
      if (target.plate !== null && this.plateIndex(target.plate) < 0) return null;
      const plate = target.plate !== null && attention.description.num_plates > 1 ? this.plateIndex(target.plate) : attention.description.num_plates > 1 ? "mean" : 0;
      return attention.weight({ plate, states: this.settings.states }, target.word ?? 0, source.word ?? 0);
    };
  }

  /** The attentions in which a node attends (none if do set the node), and those in which it is attended to. @param {number} node */
  getAttentionRoles(node) {
    const group = this.graph.groupOf(node), isSet = this.graph.severed.has(node);
    const asTarget = isSet ? [] : this.attentions.filter((attention) => attention.description.target_state === group || attention.description.group === group);
    const asSource = this.attentions.filter((attention) => attention.description.source_state === group || (attention.description.word_parents.includes(group) && (attention.description.source_state === null || attention.description.source_state !== group)));
    return { asTarget, asSource };
  }

  /** The lines of one box: to the words that it attends to, to the words that attend to it, and if `withArrows` its other arrows. @param {Box} box @param {boolean} withArrows @returns {Line[]} */
  linesOfBox(box, withArrows) {
    const { asTarget, asSource } = this.getAttentionRoles(box.ids[0]), { minWeight } = this.settings, word = box.word ?? 0;
    /** @type {Line[]} */
    const lines = [];
    for (const [attentions, kind] of /** @type {[PageAttention[], string][]} */ ([[asTarget, "source"], [asSource, "reader"]])) for (const attention of attentions) {
      const buildLine = this.makeLineBuilder(attention);
      for (const view of this.getViews(attention)) {
        if (!this.isInPlate(box, attention, view.plate)) continue;
        const entries = kind === "source" ? attention.sourcesOf(view, word) : attention.readersOf(view, word);
        for (const entry of entries) {
          const line = entry.weight >= minWeight && entry.weight > 0 ? buildLine(entry, kind) : null;
          if (line) lines.push(line);
        }
      }
    }
    if (!withArrows) return lines;
    const boxIds = new Set(box.ids), visited = new Set();
    for (const [ids, isUp] of /** @type {[number[], boolean][]} */ ([[box.ids.flatMap((id) => this.graph.parents(id)), true], [box.ids.flatMap((id) => this.graph.children(id)), false]]))
      for (const id of ids) {
        const other = this.boxByNode.get(id), key = other && `${isUp}${this.layout.boxes.indexOf(other)}`;
        if (!other || boxIds.has(id) || visited.has(key)) continue;
        visited.add(key);
        const [source, target] = isUp ? [other, box] : [box, other], edge = this.graph.edges.find((candidate) => candidate.parent === source.group && candidate.child === target.group);
        const getWeight = edge && this.getWeightLookup(source.group, target.group), weight = getWeight ? getWeight(target, source) : null;
        if (weight !== null && (weight < minWeight || lines.some((line) => line.source === source && line.target === target))) continue;
        lines.push({ source, target, hue: edge?.hue ?? "grey", weight, kind: "arrow", nodes: [source.ids[0], target.ids[0]] });
      }
    return lines;
  }

  /** Whether a box shows this plate of an attention. @param {Box} box @param {PageAttention} attention @param {number|"mean"} plate */
  isInPlate(box, attention, plate) {
    return box.plate === null || (attention.description.num_plates === 1 && !this.description.heads) || plate === "mean" || this.plateIndex(box.plate) === plate;
  }

  /** For screen readers: the words that a box attends to most, and those that attend to it most, as a sentence. @param {Box} box */
  summarizeBox(box) {
    const { asTarget, asSource } = this.getAttentionRoles(box.ids[0]), word = box.word ?? 0, parts = [this.describeBox(box)];
    const listStrongest = (/** @type {any[]} */ entries, /** @type {PageAttention} */ attention, /** @type {"i"|"j"} */ end) => entries.slice(0, 3).filter((entry) => entry.weight > 0).map((entry) => {
      const group = this.graph.groups[end === "j" ? attention.description.source_group : attention.description.group];
      return `“${this.graph.stacks.find((stack) => stack.name === group.word_stack)?.words[entry[end]] ?? ""}” ${entry.weight.toFixed(2)}`;
    }).join(", ");
    for (const attention of asTarget) { const views = this.getViews(attention), text = listStrongest(attention.sourcesOf(views.length > 1 ? { ...views[0], plate: "mean" } : views[0], word), attention, "j"); if (text) parts.push(`attends to ${text}`); }
    for (const attention of asSource) { const views = this.getViews(attention), text = listStrongest(attention.readersOf(views.length > 1 ? { ...views[0], plate: "mean" } : views[0], word), attention, "i"); if (text) parts.push(`attended to by ${text}`); }
    return parts.join("; ");
  }

  /** Tables of P(j | i) for a node's word: the words that it attends to, and the words that attend to it. @param {number[]} ids */
  attentionTables(ids) {
    const group = this.graph.groupOf(ids[0]), { asTarget, asSource } = this.getAttentionRoles(ids[0]), word = this.graph.wordOf(ids[0]) ?? 0;
    const hasPlate = this.graph.numPlates(group) > 1 && ids.length === 1;
    const makeTable = (/** @type {PageAttention} */ attention, /** @type {boolean} */ isTarget) => {
      const head = hasPlate && (attention.description.num_plates > 1 || this.description.heads) ? this.plateIndex(this.graph.indices(ids[0])[0]) : null, views = this.getViews(attention);
      const plate = head ?? (views.length > 1 ? "mean" : views[0].plate), view = { plate, states: this.settings.states };
      const wordGroup = this.graph.groups[isTarget ? attention.description.source_group : attention.description.group], stack = this.graph.stacks.find((candidate) => candidate.name === wordGroup.word_stack);
      const rows = head === -1 ? [] : (isTarget ? attention.sourcesOf(view, word) : attention.readersOf(view, word)).map((entry) => ({ index: isTarget ? entry.j : entry.i, word: stack?.words[isTarget ? entry.j : entry.i] ?? "", weight: entry.weight }));
      const heads = !isTarget || plate !== "mean" ? [] : Array.from({ length: attention.description.num_plates }, (_, k) => {
        const entry = attention.strongestSource({ ...view, plate: k }, word);
        return { head: this.description.heads?.[k] ?? k, index: entry?.j ?? 0, word: entry ? stack?.words[entry.j] ?? "" : "", weight: entry?.weight ?? 0 };
      }).filter(({ weight }) => weight > 0).sort((a, b) => b.weight - a.weight || a.head - b.head);
      const name = this.graph.groups[attention.description.group].name, plateText = attention.description.num_plates === 1 && !this.description.heads ? "" : plate === "mean" ? `mean over ${attention.description.num_plates} heads` : `head ${this.description.heads?.[plate] ?? plate}`;
      const states = !attention.description.choices.length ? "" : view.states ? attention.description.choices.map(([choice]) => `${choice} = ${view.states?.[choice] ?? 0}`).join(", ") : "posterior mean";
      const hiddenMass = isTarget && attention.hiddenSources.size ? `special tokens, not listed: ${attention.hiddenMass(view, word).toFixed(2)}` : "";
      return { title: isTarget ? "Attends to" : "Attended to by", isVisible: head !== -1, key: `${isTarget ? "reads" : "readers"}-${name}`, rows, heads, note: [`P(j | i) of ${name}`, plateText, states, hiddenMass].filter(Boolean).join(", ") };
    };
    return [...asTarget.map((attention) => makeTable(attention, true)), ...asSource.map((attention) => makeTable(attention, false))].filter(({ isVisible }) => isVisible);
  }
}
