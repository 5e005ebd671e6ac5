// @ts-check
/** The panel: what is known of the sentence, or of the node that is selected. */

import { html, labelOf } from "./scene.js";

/**
 * @typedef {import("./net.js").Net} Net
 * @typedef {import("./net.js").About} About
 * @typedef {import("./reads.js").Reading} Reading
 * @typedef {import("./reads.js").Read} Read
 * @typedef {{what: string, ids: number[]}} Kin
 * @typedef {{about: About, net: Net, ids: number[], reads: {title: string, key: string, rows: {word: string, at: number, share: number}[], note: string}[],
 *   kin: Kin[], mark: string, onMark: (what: string) => void, onNode: (name: string) => void, host: any, say: (text: string) => void}} Facts
 */

const FEW = 400;
const MATHML = "http://www.w3.org/1998/Math/MathML";

/** MathML from nested lists. @param {any} told @returns {Element} */
function math(told) {
  const [tag, marks, inside] = told, found = document.createElementNS(MATHML, tag);
  for (const [name, value] of Object.entries(marks)) found.setAttribute(name, String(value));
  if (typeof inside === "string") found.textContent = inside;
  else found.append(...inside.map(math));
  return found;
}

/** A bar with its number. @param {number} share @param {string} [kind] */
function bar(share, kind = "") {
  const found = html("span", { class: `bar ${kind}` });
  found.style.setProperty("--share", String(share));
  return found;
}

/** @param {string} title @param {string} key @param {...(Node|string)} parts */
const part = (title, key, ...parts) => html("section", { "data-part": key }, html("h3", {}, title), ...parts);

/** A word, kept from the text around it. @param {string} text */
const said = (text) => html("bdi", {}, text);

/** Prior and posterior of discrete nodes. @param {About} about */
function posteriors(about) {
  return about.posteriors.map((/** @type {any} */ told) => {
    const title = html("h3", {}, told.seen ? `P(${told.node} | what is seen)` : `P(${told.node})`);
    const rows = told.states.map((/** @type {[string, number, number, number]} */ [label, before, after]) => html("tr", { "data-state": label },
      html("th", { scope: "row" }, said(label)), html("td", { class: "wide" }, ...(told.seen ? [bar(before, "prior")] : []), bar(after)),
      html("td", { class: "number", "data-share": after }, after.toFixed(3))));
    const table = html("table", { class: "bars" }, html("tbody", {}, ...rows));
    const legend = told.seen ? [html("p", { class: "small" }, "pale: before what is seen")] : [];
    const more = told.more ? [html("p", { class: "small" }, `and ${told.more.toLocaleString("en")} states of less`)] : [];
    return html("section", { "data-posterior": told.node }, title, table, ...legend, ...more);
  });
}

/** The probability that each head is in; of a posterior with its interval. @param {About} about */
function inclusion(about) {
  const told = about.inclusion;
  if (!told) return [];
  const rows = told.rows.map((/** @type {string} */ name, /** @type {number} */ k) => html("tr", {}, html("th", { scope: "row" }, name),
    ...told.shares[k].map((/** @type {number} */ share, /** @type {number} */ head) => {
      const ends = told.low ? [told.low[k][head], told.high[k][head]] : [];
      const more = told.low ? `, from ${ends[0].toFixed(2)} to ${ends[1].toFixed(2)}; log Bayes factor ${told.log_bayes[k][head].toFixed(1)}` : "";
      const what = `${name}, head ${head}: ${told.low ? share.toFixed(2) : share}${more}`;
      const cell = html("td", { class: told.low ? "cell ranged" : "cell", "data-inclusion": `${k}_${head}`, "data-share": share, title: what, "aria-label": what }, share.toFixed(2).replace(/^0/, ""));
      cell.style.setProperty("--share", String(share));
      ends.forEach((end, side) => cell.style.setProperty(side ? "--high" : "--low", String(end)));
      return cell;
    })));
  const note = told.note ? [html("p", { class: "small" }, told.note)] : [];
  return [part(told.title, "inclusion", html("table", { class: "cells" }, html("tbody", {}, ...rows)), ...note)];
}

/** A switch for each head of a plate, where a host can set it to zero. @param {About} about @param {any} host */
function switches(about, host) {
  const families = about.families.filter((/** @type {any} */ f, /** @type {number} */ k) => f.plates.join() === "head" && about.readings.some((/** @type {any} */ r) => r.family === k));
  if (!host || !families.length) return [];
  const done = Object.keys(about.done), heads = Array.from({ length: about.sizes.head }, (_, head) => head);
  const rows = families.map((/** @type {any} */ f) => html("tr", {}, html("th", { scope: "row" }, f.name), ...heads.map((head) => {
    const own = `${f.name}_${head}_`, off = done.some((name) => name.startsWith(own)), what = `${f.name}, head ${head}`;
    const turn = () => (off ? host.undo([`${own}*`]) : host.do([[`${own}*`, { set: "zero" }]]));
    return html("td", {}, html("button", { type: "button", class: "switch", "data-switch": `${f.name}_${head}`, "aria-pressed": !off, "aria-label": what, title: `${what} is ${off ? "off" : "on"}`, onclick: turn }, String(head)));
  })));
  return [part("Heads that are on", "switches", html("table", { class: "cells" }, html("tbody", {}, ...rows)))];
}

/** What was set and what is seen. @param {About} about @param {any} host */
function settings(about, host) {
  const groups = [["set by do", about.done, "do"], ["seen", about.seen, "seen"]].filter(([, told]) => Object.keys(told).length);
  return groups.map(([title, told, key]) => part(title, key, ...listed(Object.entries(told), ([name, value]) => html("li", { "data-name": name }, html("code", {}, name), " = ", said(value))),
    ...(key === "do" && host ? [html("button", { type: "button", "data-do": "undo-all", onclick: () => host.undo([]) }, "undo all")] : [])));
}

/** A list, its first items at once. @template T @param {T[]} items @param {(item: T) => HTMLElement} made */
function listed(items, made) {
  const list = html("ul", { class: "names" }, ...items.slice(0, FEW).map(made));
  if (items.length <= FEW) return [list];
  const more = html("button", { type: "button", class: "quiet" }, `show all ${items.length.toLocaleString("en")}`);
  more.addEventListener("click", () => { for (const item of items.slice(FEW)) list.append(made(item)); more.remove(); });
  return [list, more];
}

/** The panel where nothing is selected. @param {About} about @param {any} host @returns {HTMLElement[]} */
export function overview(about, host) {
  const [nodes, arrows] = about.counts.map((/** @type {number} */ count) => count.toLocaleString("en"));
  const words = about.stacks.reduce((/** @type {number} */ sum, /** @type {any} */ stack) => sum + stack.words.length, 0);
  const heads = about.heads ? ` Reads are those of head${about.heads.length > 1 ? "s" : ""} ${about.heads.join(", ")} alone.` : "";
  const exact = about.readings.length ? `P(j | i) is kept in steps of 1/${about.steps}, so it is exact to 1/${2 * about.steps}.${heads}` : "No word reads another with a P(j | i) here.";
  const notes = about.notes.map((/** @type {string} */ note) => html("p", { class: "note" }, note));
  return [
    html("h2", {}, said(about.title.length > 100 ? `${about.title.slice(0, 99)}…` : about.title)),
    html("p", { class: "small" }, `${words ? `${words} words, ` : ""}${nodes} nodes and ${arrows} arrows; the net ${about.net}.`),
    ...posteriors(about), ...inclusion(about), ...switches(about, host), ...settings(about, host), ...notes,
    part("How to read it", "help",
      signs(about),
      html("p", { class: "small" }, ...(words ? ["Point at a word to see what it reads (solid) and who reads it (dashed); click a node for its facts. ", exact] : ["Click a node for its facts."])),
      html("dl", { class: "keys" }, ...[["arrows", "move"], ["Enter", "select"], ["f", "fold or unfold the slice"], ["h", "fold or unfold heads"], ["/", "search"], ["+ − 0", "zoom, fit"], ["Esc", "let go"]]
        .flatMap(([key, what]) => [html("dt", {}, html("kbd", {}, key)), html("dd", {}, what)]))),
  ];
}

/** The signs of the picture. @param {About} about */
function signs(about) {
  const kinds = new Set(about.families.map((/** @type {any} */ f) => f.kind));
  const hues = new Set(about.links.map((/** @type {any} */ link) => link[4]));
  const told = [["double", "deterministic", kinds.has("deterministic")], ["", "stochastic", kinds.has("stochastic")],
    ["dashed", "learnable TPM", about.families.some((/** @type {any} */ f) => f.learnable)],
    ["observed", "observed", kinds.has("observed") || Object.keys(about.seen).length], ["do", "set by do", Object.keys(about.done).length],
    ["line q", "query q", hues.has("q")], ["line k", "key k", hues.has("k")], ["line v", "value v", hues.has("v")], ["line read", "reads", about.readings.length], ["line by", "is read by", about.readings.length]];
  return html("ul", { class: "signs" }, ...told.filter(([, , there]) => there).map(([kind, text]) => html("li", {}, html("span", { class: `sign ${kind}` }), String(text))));
}

/** The panel of a selected node, or of one node in several heads. @param {Facts} facts @returns {HTMLElement[]} */
export function factsOf(facts) {
  const { about, net, ids } = facts, family = net.families[net.familyOf(ids[0])], k = net.familyOf(ids[0]);
  const word = net.wordOf(ids[0]), single = ids.length === 1, plate = single ? net.index(ids[0])[0] : null;
  const stack = family.words === null ? null : net.stacks.find((each) => each.name === family.words);
  const token = stack && word !== null ? stack.whole[word] ?? stack.words[word] : null;
  const title = html("h2", { class: "node-title" }, html("span", { class: "math" }, .../** @type {any[]} */ (labelOf(net, k, word, family.plates.length ? plate : null, 16, "html"))),
    ...(token === null ? [] : [" ", said(`“${token}”`)]));
  const name = single ? net.name(ids[0]) : `${family.name}_*${word === null ? "" : `_${word}`}`;
  const value = single ? about.done[name] ?? about.seen[name] : undefined;
  const kind = single && name in about.done ? "set by do" : single && name in about.seen ? "seen" : family.kind;
  const shape = family.shape.length ? family.shape.join(" × ") : "one number";
  const told = [["name", html("code", { "data-fact": "name" }, name)], ["TPM", html("span", { "data-fact": "tpm" }, `${family.tpm}${family.learnable ? ", learnable" : ""}`)],
    ["kind", html("span", { "data-fact": "kind" }, kind)], ["value", html("span", {}, shape, ...(value === undefined ? [] : [", ", said(value)]))]];
  if (!single) told.push(["nodes", html("span", {}, `${ids.length}, one for each ${family.plates.join(" and ")}`)]);
  const moved = single && about.moved?.[String(k)]?.[word ?? 0];
  if (typeof moved === "number") told.push(["moved", html("span", { "data-fact": "moved", "data-share": moved }, `${(100 * moved).toFixed(1)}% of its length, by what is set`)]);
  const list = html("dl", { class: "facts" }, ...told.flatMap(([what, tells]) => [html("dt", {}, what), html("dd", {}, tells)]));
  return [title, list, ...formula(facts, family.equation), ...live(facts, name, family, word),
    ...posteriors({ ...about, posteriors: about.posteriors.filter((/** @type {any} */ p) => p.node === name) }), ...facts.reads.map(table), kinship(facts)];
}

/** The equation of a family, and its LaTeX to copy. @param {Facts} facts @param {number} which */
function formula(facts, which) {
  const told = facts.about.equations[which];
  if (!told) return [];
  const copy = html("button", { type: "button", class: "quiet", onclick: async () => {
    try { await navigator.clipboard.writeText(told.latex); facts.say("copied"); copy.textContent = "copied"; } catch { facts.say("the browser does not let this page copy"); }
  } }, "copy LaTeX");
  const source = html("details", {}, html("summary", {}, "LaTeX"), html("pre", { "data-fact": "latex" }, told.latex), copy);
  const shown = html("div", { class: "equation", tabindex: 0, "aria-label": told.latex }, ...(told.math ? told.math.map(math) : [html("code", {}, told.latex)]));
  return [part("Equation", "equation", shown, source)];
}

/** P(j | i) as bars. @param {{title: string, key: string, rows: {word: string, at: number, share: number}[], note: string}} told */
function table(told) {
  const row = (/** @type {{word: string, at: number, share: number}} */ each) => html("tr", { "data-word": each.at, "data-share": each.share.toFixed(4) },
    html("th", { scope: "row" }, html("span", { class: "at" }, String(each.at)), said(each.word)), html("td", { class: "wide" }, bar(each.share)), html("td", { class: "number" }, each.share.toFixed(2)));
  const body = html("tbody", {}, ...told.rows.slice(0, 12).map(row)), rest = told.rows.slice(12);
  const more = rest.length ? [html("button", { type: "button", class: "quiet", onclick: (/** @type {any} */ event) => { body.append(...rest.map(row)); event.target.remove(); } }, `all ${told.rows.length} words`)] : [];
  return part(told.title, told.key, html("p", { class: "small" }, told.note), html("table", { class: "bars" }, body), ...more);
}

/** Ancestors, descendants, blanket: how many, which, and a way to mark them. @param {Facts} facts */
function kinship(facts) {
  const groups = facts.kin.map(({ what, ids }) => {
    const details = html("details", { "data-kin": what, "data-count": ids.length }, html("summary", {}, html("span", {}, what), html("span", { class: "count" }, ids.length.toLocaleString("en"))));
    details.addEventListener("toggle", () => {
      if (/** @type {HTMLDetailsElement} */ (details).open && details.childElementCount === 1)
        details.append(...listed(ids, (id) => {
          const name = facts.net.name(id);
          return html("li", {}, html("button", { type: "button", class: "name", "data-name": name, onclick: () => facts.onNode(name) }, name));
        }));
    });
    const mark = html("button", { type: "button", class: "quiet", "aria-pressed": facts.mark === what, "data-mark": what, onclick: () => facts.onMark(facts.mark === what ? "" : what) }, "mark");
    return html("div", { class: "kin" }, details, mark);
  });
  return part("In the graph", "kin", ...groups);
}

/** What a host can do with a node. @param {Facts} facts @param {string} name @param {import("./net.js").Family} family @param {number|null} word */
function live(facts, name, family, word) {
  const { host, about } = facts;
  if (!host) return [];
  const buttons = [], act = (/** @type {any} */ setting) => () => host.do([[name, setting]]);
  const states = about.posteriors.find((/** @type {any} */ p) => p.node === name)?.states;
  const done = facts.ids.some((id) => facts.net.name(id) in about.done);
  if (done) buttons.push(html("button", { type: "button", "data-do": "undo", onclick: () => host.undo([name]) }, "undo"));
  else if (states) buttons.push(...states.map((/** @type {[string, number, number, number]} */ [, , , state]) => html("button", { type: "button", "data-do": `state-${state}`, onclick: act({ set: "state", state }) }, `do(${name} = ${state})`)));
  else if (family.kind === "deterministic" && family.words !== null) {
    buttons.push(html("button", { type: "button", "data-do": "zero", onclick: act({ set: "zero" }) }, "set to zero"));
    if (family.plates.includes("head") && family.plates.length === 1) {
      const heads = facts.ids.length > 1 ? Array.from({ length: facts.ids.length }, (_, h) => h) : [facts.net.index(facts.ids[0])[0]];
      buttons.push(...heads.map((head) => {
        const pattern = `${family.name}_${head}_*`, off = Object.keys(about.done).some((key) => key.startsWith(`${family.name}_${head}_`));
        return html("button", { type: "button", "data-do": `head-${head}`, "aria-pressed": off, onclick: () => (off ? host.undo([pattern]) : host.do([[pattern, { set: "zero" }]])) }, `${off ? "head on" : "head off"} ${head}`);
      }));
    }
    if (facts.ids.length === 1 && word !== null) {
      const stack = /** @type {any} */ (facts.net.stacks.find((each) => each.name === family.words));
      const pick = /** @type {HTMLSelectElement} */ (html("select", { "data-do": "patch", "aria-label": "take the value of another word" }, html("option", { value: "" }, "take the value of …"),
        ...stack.words.map((/** @type {string} */ text, /** @type {number} */ at) => html("option", { value: at, disabled: at === word }, `${at} ${text}`))));
      pick.addEventListener("change", () => { if (pick.value) host.do([[name, { set: "node", from: name.replace(/_\d+$/, `_${pick.value}`) }]]); });
      buttons.push(pick);
    }
  }
  return buttons.length ? [part("do", "live", html("div", { class: "buttons" }, ...buttons))] : [];
}
