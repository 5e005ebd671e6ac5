"""One page in several windows, a page that is written over while it is open, a widget that is shown twice."""

from __future__ import annotations

import base64
import importlib.util
import json
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import torch

import bnet_transformer as bt
from bnet_transformer.inference import Zero
from tests.browsing import CHROMIUM, NEEDED, chromium
from tests.soak import jobs
from tests.soak.probing import Found, Setup, Tally, child, folder

NEEDS = ("playwright", "anywidget")


@contextmanager
def tabs(count: int) -> Iterator[list[Any]]:
    """Tabs of one window of a browser, and none of them complained."""
    said: list[str] = []
    with chromium() as browser:
        context = browser.new_context(viewport={"width": 1280, "height": 800}, reduced_motion="reduce")
        made = [context.new_page() for _ in range(count)]
        for page in made:
            page.on("pageerror", lambda error: said.append(str(error)))
            page.on("console", lambda told: said.append(told.text) if told.type in ("error", "warning") else None)
        yield made
        context.close()
    if said:
        raise AssertionError(f"the page said: {said}")


def opened(page: Any, file: Path) -> Any:
    """A page of a file, drawn."""
    page.goto(file.as_uri())
    page.wait_for_selector(".node", state="attached")
    return page


def shown(page: Any) -> str:
    """All that a page shows, once it stands still."""
    page.mouse.move(1, 1)
    page.evaluate("() => new Promise(done => requestAnimationFrame(() => requestAnimationFrame(done)))")
    told: str = page.content()
    return told


STEPS: dict[str, list[Callable[[Any], object]]] = {
    "one": [
        lambda page: page.locator('[data-node="x_1_2"]').click(),
        lambda page: page.keyboard.press("+"),
        lambda page: page.locator('[name="search"]').fill("the"),
        lambda page: page.locator('[name="search"]').press("Enter"),
    ],
    "other": [
        lambda page: page.keyboard.press("ArrowRight"),
        lambda page: page.keyboard.press("-"),
        lambda page: page.locator('[name="search"]').fill("cat"),
        lambda page: page.locator('[data-node="x_0_0"]').click(),
    ],
}


def probe_windows(setup: Setup) -> Found:
    """Two tabs of one file, in which different things are done in turn."""
    tally = Tally("a page opened twice (Chromium)", "each tab shows what it shows alone; the file stays as it was")
    with folder() as place, tabs(2) as (one, other):
        file = place / "a.html"
        jobs.told_net().sentence(jobs.SAID[0]).explore(file)
        whole, alone = file.read_bytes(), {}
        for name, steps in STEPS.items():
            opened(one, file)
            for step in steps:
                step(one)
            alone[name] = shown(one)
        for seed, draw in setup.tries():
            order = [name for name, steps in STEPS.items() for _ in steps]
            draw.shuffle(order)
            pages, left = {"one": opened(one, file), "other": opened(other, file)}, {n: [*s] for n, s in STEPS.items()}
            for name in order:
                pages[name].bring_to_front()
                left[name].pop(0)(pages[name])
            for name, page in pages.items():
                page.bring_to_front()
                tally.add(shown(page) == alone[name], f"seed {seed}: tab {name} differs")
        tally.add(file.read_bytes() == whole and [*place.iterdir()] == [file], "the file changed")
        tally.add(alone["one"] != alone["other"], "nothing was done")
    return tally.found("click, keys, zoom, search, in an order drawn anew")


def probe_rewritten(setup: Setup) -> Found:
    """A page stays open while `explore` writes over its file, and is loaded anew."""
    law = "what is open stays as it is; loaded anew it is one of the two that are written, whole"
    tally = Tally("a page written over while it is open (Chromium)", law)
    with folder() as place, tabs(2) as (one, other):
        file, wholes = place / "a.html", []
        for which in (1, 0):
            jobs.written(file, file.name, which)
            wholes.append(shown(opened(other, file)))
        for seed, draw in setup.tries():
            before = shown(opened(one, file))
            writer = child(jobs.writing, file, file.name, place / f"ready {seed}")
            try:
                kinds = set()
                for _ in range(10):
                    other.wait_for_timeout(draw.uniform(0, 30))
                    kinds.add(shown(opened(other, file)))
                same = shown(one) == before
                one.reload()
                kinds.add(shown(opened(one, file)))
            finally:
                writer.kill()
                writer.join()
            tally.add(same and kinds <= {*wholes}, f"seed {seed}: {'another page' if same else 'what is open changed'}")
    return tally.found("11 loads beside a writer")


CELLS = """<!doctype html><html lang="en"><meta charset="utf-8"><title>cells</title><body><div></div><div></div>"""
RUN = """async ([script, style, models, views]) => {
  const bytes = (text) => new DataView(Uint8Array.from(atob(text), (letter) => letter.charCodeAt(0)).buffer);
  const sheet = new CSSStyleSheet();
  await sheet.replace(style);
  document.adoptedStyleSheets = [sheet];
  const module = await import(URL.createObjectURL(new Blob([script], { type: "text/javascript" })));
  const made = models.map((held, number) => {
    const heard = {}, traits = { about: held.about, block: bytes(held.block) };
    const fire = (what, told) => [...(heard[what] ?? [])].forEach((call) => call(told));
    return {
      get: (name) => traits[name],
      on: (what, call) => (heard[what] ??= []).push(call),
      off: (what, call) => { heard[what] = heard[what].filter((other) => other !== call); },
      send: async (content) => {
        const { answer, changed } = await window.toPython(number, content);
        for (const [name, value] of Object.entries(changed)) traits[name] = name === "block" ? bytes(value) : value;
        for (const name of Object.keys(changed)) fire(`change:${name}`);
        fire("msg:custom", answer);
      },
    };
  });
  const cells = [...document.querySelectorAll("div")];
  for (const [at, number] of views.entries()) await module.default.render({ model: made[number], el: cells[at] });
}"""


@contextmanager
def cells(page: Any, place: Path, widgets: list[Any], views: list[int]) -> Iterator[list[Any]]:
    """Two cells of a notebook, each with a view of one of the widgets; every view of a widget hears its answers."""
    answers: list[dict[str, Any]] = []
    for widget in widgets:
        widget.send = lambda content, buffers=None: answers.append(content)

    def held(widget: Any) -> dict[str, Any]:
        return {"about": widget.about, "block": base64.b64encode(widget.block).decode()}

    def to_python(number: int, content: dict[str, Any]) -> dict[str, Any]:
        widget = widgets[number]
        before = held(widget)
        widget._handle_custom_msg(content, [])
        changed = {name: value for name, value in held(widget).items() if value != before[name]}
        return {"answer": answers[-1], "changed": json.loads(json.dumps(changed))}

    file = place / "cells.html"
    file.write_text(CELLS)
    page.goto(file.as_uri())
    page.expose_function("toPython", to_python)
    page.evaluate(RUN, [widgets[0]._esm, widgets[0]._css, [held(widget) for widget in widgets], views])
    yield [page.locator("body > div").nth(at) for at in (0, 1)]


def _on(cell: Any, switch: str, state: str) -> Any:
    return cell.locator(f'[data-switch="{switch}"][aria-pressed="{state}"]')


def _heads() -> bt.Sentence:
    return bt.bayesuvius(6, slices=2, heads=3, combine="concat", residual=True).sentence(jobs.SAID[0])


def probe_apart(setup: Setup) -> Found:
    """Two widgets of one sentence."""
    tally = Tally("two widgets of one sentence (Chromium)", "what is set in one is not set in the other")
    s = _heads()
    widgets = [s.widget(), s.widget()]
    with folder() as place, tabs(1) as (page,), cells(page, place, widgets, [0, 1]) as (one, other):
        one.locator('[data-switch="a_0_1"]').click()
        _on(one, "a_0_1", "false").wait_for()
        tally.add(_on(other, "a_0_1", "true").count() == 1 and widgets[1].sentence is s, "the other widget changed")
        other.locator('[data-switch="a_1_0"]').click()
        _on(other, "a_1_0", "false").wait_for()
        tally.add(_on(one, "a_1_0", "true").count() == 1, "the first widget changed")
        for widget, off in zip(widgets, ("a_0_1_*", "a_1_0_*"), strict=True):
            same = torch.equal(widget.sentence["x_2_3"], s.do({off: Zero()})["x_2_3"])
            tally.add(same, f"not the sentence with {off} off")
    return tally.found()


def probe_views(setup: Setup) -> Found:
    """Two views of one widget."""
    law = "what is set is set in both; what is selected is each view's own; a refusal is told where it was asked"
    tally = Tally("one widget shown twice (Chromium)", law)
    s = _heads()
    widget = s.widget()
    with folder() as place, tabs(1) as (page,), cells(page, place, [widget], [0, 0]) as (one, other):
        one.locator('[data-node="x_1_2"]').click()
        one.locator('.panel [data-fact="name"]').wait_for()
        tally.add(not other.locator('.panel [data-fact="name"]').count(), "selected in the other view too")
        page.keyboard.press("Escape")
        one.locator('[data-switch="a_0_1"]').click()
        for cell in (one, other):
            _on(cell, "a_0_1", "false").wait_for()
        other.locator('[data-switch="a_0_1"]').click()
        for cell in (one, other):
            _on(cell, "a_0_1", "true").wait_for()
        tally.add(torch.equal(widget.sentence["x_2_3"], s["x_2_3"]), "not the sentence as it was")
        heard, widget._describe = widget._describe, _refusing(widget._describe)  # of two that ask at once, the first
        page.evaluate(
            """() => { for (const [at, name] of [[0, "a_0_0"], [1, "a_0_2"]])
            document.querySelectorAll("body > div")[at].querySelector(`[data-switch="${name}"]`).click(); }"""
        )
        one.locator(".status", has_text="refused").wait_for()
        _on(other, "a_0_2", "false").wait_for()
        widget._describe = heard
        told = other.locator(".status").inner_text()
        tally.add(told == "done", f"the other view was told: {told}")
    return tally.found()


def _refusing(describe: Callable[[Any], Any]) -> Callable[[Any], Any]:
    """What refuses once."""
    asked: list[int] = []

    def described(sentence: Any) -> Any:
        asked.append(1)
        if len(asked) == 1:
            raise bt.BNetError("head", expected="another", got="this one", allowed="it is refused")
        return describe(sentence)

    return described


PROBES = (probe_windows, probe_rewritten, probe_apart, probe_views)


def told(probe: Callable[[Setup], Found], setup: Setup) -> Found:
    """What a probe finds where there is a browser; where there is none it is left out, and says so."""
    if CHROMIUM is None or not all(map(importlib.util.find_spec, NEEDS)):
        name = (probe.__doc__ or "").splitlines()[0].rstrip(".")
        return Found(name, "", 0, seen=f"needs {NEEDED}, and anywidget", left_out=True)
    return probe(setup)


def plan(setup: Setup) -> list[tuple[Callable[[Setup], Found], Setup]]:
    """A tenth of `times` for each."""
    few = Setup(max(1, setup.times // 10), setup.seed)
    return [(partial(told, probe), few) for probe in PROBES]
