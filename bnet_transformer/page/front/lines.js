// @ts-check
/** What becomes a line: reads between states or nodes, arrows of unfolded slices, and what a word reads in words. */

import { Net } from "./net.js";
import { Reading } from "./reads.js";

/**
 * @typedef {import("./layout.js").Box} Box
 * @typedef {import("./scene.js").Line} Line
 * @typedef {import("./controls.js").Ask} Ask
 */

const ARROWS = 2_500; // arrows of unfolded slices that are drawn at once

export class Lines {
  /** @type {import("./net.js").About} */ about = {};
  /** @type {Net} */ net = /** @type {any} */ (null);
  /** @type {Reading[]} */ readings = [];
  /** @type {Ask} */ ask = /** @type {any} */ (null);
  /** @type {Set<string>} the sections that are unfolded */ open = new Set();
  /** @type {import("./layout.js").Layout} */ layout = /** @type {any} */ (null);
  /** @type {Map<number, Box>} */ boxOf = new Map();
  /** @type {Map<number, Box[]>} */ boxesOf = new Map();

  /** What a box is, in words. @param {Box} box */
  said(box) {
    const family = this.net.families[box.family], name = box.ids.length === 1 ? this.net.name(box.ids[0]) : `${family.name}, ${box.ids.length} nodes`;
    const stack = this.net.stacks.find((each) => each.name === family.words);
    return stack && box.word !== null ? `${name}, “${stack.words[box.word]}”` : name;
  }

  /** The ways in which a reading is looked at. @param {Reading} reading */
  hows(reading) {
    const { head, heads } = this.ask, states = this.ask.states, plates = reading.told.plates;
    if (plates === 1) return [{ plate: /** @type {number|"mean"} */ (0), states }];
    const each = head === "all" || (heads && this.open.has(this.sectionOf(reading)));
    if (each && (head === "all" || head === "mean")) return Array.from({ length: plates }, (_, plate) => ({ plate: /** @type {number|"mean"} */ (plate), states }));
    return [{ plate: head === "mean" ? /** @type {number|"mean"} */ ("mean") : this.plateOf(Number(head)), states }];
  }

  /** The place of a head among those that are told. @param {number} head */
  plateOf(head) { return this.about.heads ? this.about.heads.indexOf(head) : head; }

  /** @param {Reading} reading */
  sectionOf(reading) {
    const family = this.net.families[reading.told.family];
    return `${family.stack}:${family.step}`;
  }

  /** How the reads of a reading become lines: between states or, in an unfolded slice, between nodes. @param {Reading} reading @returns {(read: import("./reads.js").Read, kind: string) => Line|null} */
  liner(reading) {
    const { told } = reading, { net } = this, every = this.ask.head === "all" && told.plates > 1;
    const unfolded = this.open.has(this.sectionOf(reading)) || told.into === null || told.out === null;
    const [out, into] = unfolded ? [told.from, told.family] : [/** @type {number} */ (told.out), /** @type {number} */ (told.into)];
    const own = unfolded ? net.links.find((link) => link.parent === told.from && link.child === told.family)?.hue ?? "accent" : "accent";
    const [manyOut, manyInto] = [out, into].map((family) => net.plates(family) > 1);
    const wordless = net.families[into].words === null;
    return (read, kind) => {
      const plate = typeof read.plate === "number" ? this.about.heads?.[read.plate] ?? read.plate : 0;
      const source = net.id(out, manyOut ? plate : 0, read.j), target = net.id(into, manyInto ? plate : 0, wordless ? null : read.i);
      const from = this.boxOf.get(source), to = this.boxOf.get(target);
      return from && to && !net.cut.has(target) ? { from, to, hue: every ? `head-${Number(read.plate) % 8}` : own, share: read.share, kind, ends: [source, target] } : null;
    };
  }

  /** The arrows of unfolded slices between what stands there; null where they are too many. @returns {Line[]|null} */
  arrows() {
    const { net } = this;
    /** @type {Line[]} */
    const found = [];
    if (this.layout.boxes.filter((box) => !net.families[box.family].state).length > ARROWS / 2) return null;
    for (const link of net.links) {
      const families = [net.families[link.parent], net.families[link.child]];
      if (families.every((family) => family.state && family.words !== null) && !this.readings.some((r) => r.told.family === link.child && this.open.has(this.sectionOf(r)))) continue;
      const shares = this.shares(link.parent, link.child);
      for (const to of this.boxesOf.get(link.child) ?? []) {
        const parents = to.ids.flatMap((id) => net.beside(id, true, [link]));
        for (const from of new Set(parents.map((id) => this.boxOf.get(id)))) {
          if (!from) continue;
          const share = shares ? shares(to, from) : null;
          if (share !== null && share < this.ask.least) continue;
          found.push({ from, to, hue: link.hue, share, kind: "arrow" });
          if (found.length > ARROWS) return null;
        }
      }
    }
    /** @type {Map<string, Line>} */
    const far = new Map();
    for (const line of found) if (line.from.row < 0) {
      const { from, to } = line, key = `${from.family} ${to.row} ${to.row < 0 && to.y < from.y} ${to.row < 0 ? "" : to.y}`, best = far.get(key)?.to;
      line.branch = true;
      if (!best || (to.row < 0 ? Math.abs(to.y - from.y) > Math.abs(best.y - from.y) : to.x > best.x)) far.set(key, line);
    }
    for (const line of far.values()) line.branch = false;
    if (net.stacks.every((stack) => !stack.words.length)) this.goAround(found);
    return found;
  }

  /** Leads arrows that skip a row of a net without words beside the boxes between, not behind them. @param {Line[]} lines */
  goAround(lines) {
    lines.filter((line) => line.to.row - line.from.row > 1).forEach((line, lane) => {
      const between = this.layout.boxes.filter((box) => box.row >= line.from.row && box.row < line.to.row);
      line.around = Math.max(...between.map((box) => box.x + box.wide / 2)) + 14 + 6 * lane;
    });
  }

  /** P(j | i) of the arrow between two boxes, where one is read along it. @param {number} parent @param {number} child */
  shares(parent, child) {
    const reading = this.readings.find((r) => r.told.family === child && r.told.over.includes(parent));
    if (!reading) return null;
    return (/** @type {Box} */ to, /** @type {Box} */ from) => {
      if (to.plate !== null && this.plateOf(to.plate) < 0) return null;
      const plate = to.plate !== null && reading.told.plates > 1 ? this.plateOf(to.plate) : reading.told.plates > 1 ? "mean" : 0;
      return reading.share({ plate, states: this.ask.states }, to.word ?? 0, from.word ?? 0);
    };
  }

  /** The readings in which a node reads, none where it is set, and those in which it is read. @param {number} node */
  roles(node) {
    const family = this.net.familyOf(node), set = this.net.cut.has(node);
    const mine = set ? [] : this.readings.filter((r) => r.told.into === family || r.told.family === family);
    const theirs = this.readings.filter((r) => r.told.out === family || (r.told.over.includes(family) && (r.told.out === null || r.told.out !== family)));
    return { mine, theirs };
  }

  /** The lines of one box: what it reads, who reads it; of a node in an unfolded slice its arrows. @param {Box} box @param {boolean} arrows @returns {Line[]} */
  linesOf(box, arrows) {
    const { mine, theirs } = this.roles(box.ids[0]), { least } = this.ask, word = box.word ?? 0;
    /** @type {Line[]} */
    const found = [];
    for (const [readings, kind] of /** @type {[Reading[], string][]} */ ([[mine, "read"], [theirs, "by"]])) for (const reading of readings) {
      const liner = this.liner(reading);
      for (const how of this.hows(reading)) {
        if (!this.ofPlate(box, reading, how.plate)) continue;
        const reads = kind === "read" ? reading.reads(how, word) : reading.readers(how, word);
        for (const read of reads) {
          const line = read.share >= least && read.share > 0 ? liner(read, kind) : null;
          if (line) found.push(line);
        }
      }
    }
    if (!arrows) return found;
    const own = new Set(box.ids), boxes = new Set();
    for (const [ids, up] of /** @type {[number[], boolean][]} */ ([[box.ids.flatMap((id) => this.net.parents(id)), true], [box.ids.flatMap((id) => this.net.children(id)), false]]))
      for (const id of ids) {
        const other = this.boxOf.get(id), key = other && `${up}${this.layout.boxes.indexOf(other)}`;
        if (!other || own.has(id) || boxes.has(key)) continue;
        boxes.add(key);
        const [from, to] = up ? [other, box] : [box, other], link = this.net.links.find((each) => each.parent === from.family && each.child === to.family);
        const shares = link && this.shares(from.family, to.family), share = shares ? shares(to, from) : null;
        if (share !== null && (share < least || found.some((line) => line.from === from && line.to === to))) continue;
        found.push({ from, to, hue: link?.hue ?? "grey", share, kind: "arrow", ends: [from.ids[0], to.ids[0]] });
      }
    return found;
  }

  /** Whether a box has a part in a reading's plate. @param {Box} box @param {Reading} reading @param {number|"mean"} plate */
  ofPlate(box, reading, plate) {
    return box.plate === null || (reading.told.plates === 1 && !this.about.heads) || plate === "mean" || this.plateOf(box.plate) === plate;
  }

  /** What a box reads most and who reads it most, in words. @param {Box} box */
  told(box) {
    const { mine, theirs } = this.roles(box.ids[0]), word = box.word ?? 0, parts = [this.said(box)];
    const list = (/** @type {any[]} */ reads, /** @type {Reading} */ reading, /** @type {"i"|"j"} */ end) => reads.slice(0, 3).filter((read) => read.share > 0).map((read) => {
      const family = this.net.families[end === "j" ? reading.told.from : reading.told.family];
      return `“${this.net.stacks.find((stack) => stack.name === family.words)?.words[read[end]] ?? ""}” ${read.share.toFixed(2)}`;
    }).join(", ");
    for (const reading of mine) { const how = this.hows(reading), text = list(reading.reads(how.length > 1 ? { ...how[0], plate: "mean" } : how[0], word), reading, "j"); if (text) parts.push(`reads ${text}`); }
    for (const reading of theirs) { const how = this.hows(reading), text = list(reading.readers(how.length > 1 ? { ...how[0], plate: "mean" } : how[0], word), reading, "i"); if (text) parts.push(`is read by ${text}`); }
    return parts.join("; ");
  }

  /** P(j | i) of a node's word, both ways. @param {number[]} ids */
  tables(ids) {
    const family = this.net.familyOf(ids[0]), { mine, theirs } = this.roles(ids[0]), word = this.net.wordOf(ids[0]) ?? 0;
    const plated = this.net.plates(family) > 1 && ids.length === 1;
    const table = (/** @type {Reading} */ reading, /** @type {boolean} */ reads) => {
      const head = plated && (reading.told.plates > 1 || this.about.heads) ? this.plateOf(this.net.index(ids[0])[0]) : null, ways = this.hows(reading);
      const plate = head ?? (ways.length > 1 ? "mean" : ways[0].plate), how = { plate, states: this.ask.states };
      const end = this.net.families[reads ? reading.told.from : reading.told.family], stack = this.net.stacks.find((each) => each.name === end.words);
      const rows = head === -1 ? [] : (reads ? reading.reads(how, word) : reading.readers(how, word)).map((read) => ({ at: reads ? read.j : read.i, word: stack?.words[reads ? read.j : read.i] ?? "", share: read.share }));
      const name = this.net.families[reading.told.family].name, heads = reading.told.plates === 1 && !this.about.heads ? "" : plate === "mean" ? `mean over ${reading.told.plates} heads` : `head ${this.about.heads?.[plate] ?? plate}`;
      const states = !reading.told.choices.length ? "" : how.states ? reading.told.choices.map(([each]) => `${each} = ${how.states?.[each] ?? 0}`).join(", ") : "posterior mean";
      return { title: reads ? "Reads" : "Is read by", there: head !== -1, key: `${reads ? "reads" : "readers"}-${name}`, rows, note: [`P(j | i) of ${name}`, heads, states].filter(Boolean).join(", ") };
    };
    return [...mine.map((r) => table(r, true)), ...theirs.map((r) => table(r, false))].filter(({ there }) => there);
  }
}
