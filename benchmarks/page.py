"""Rows of the interactive page: size and time compared with BertViz on equal attentions, and its speed in Chromium."""

from __future__ import annotations

import importlib.util
import itertools
import json
import shutil
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from benchmarks.harness import Figure, figure, limit_runs, measure_peak, ratios, run_in_process

SLICES, HEADS, PANNED = 12, 12, 128
LENGTHS = {32: (None, None), 128: (5.0, 1.5), 256: (16.0, None)}  # number of words: targets of the page, MB and seconds
CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser")
SCRIPT = {"EvaluateScript", "EventDispatch", "FireAnimationFrame", "FunctionCall", "RunMicrotasks", "TimerFire"}


def written_pages() -> list[Figure]:
    """The page of a sentence (`s.draw`), compared with BertViz's `head_view` and `model_view`, written to HTML, with
    the same attentions: 12 slices of 12 heads, every word attends to every word, an encoder of random weights whose
    rows are as peaked as those of trained nets. The attentions are computed before the clock starts; then our page is
    measured once more from the sentence, including attentions and first imports. Our page stores one byte per read, and
    gzip compresses the weak reads; without any compression the page would be four thirds of these bytes. BertViz's
    pages also load d3, jQuery and RequireJS from the web when they are opened; ours loads nothing. Each in a fresh
    process, in turn."""
    views = [view for view in ("head_view", "model_view") if importlib.util.find_spec("bertviz")]
    if not views:
        print("BertViz is not installed (make test-all installs it): only our page is measured", file=sys.stderr)
    rows = []
    for words, targets in LENGTHS.items():
        runs: dict[str, list[tuple[float, float, float]]] = {method: [] for method in ("whole", "ours", *views)}
        for _ in range(limit_runs(3 if words < 256 else 2)):
            for method, results in runs.items():
                results.append(run_in_process(_write, method, words))
        seconds = {method: [run[0] for run in results] for method, results in runs.items()}
        size = {method: [run[1] for run in results] for method, results in runs.items()}
        peak = {method: [run[2] for run in results] for method, results in runs.items()}
        rows += [
            figure(f"{words} words: ours", size["ours"], "MB", target=targets[0]),
            figure(f"{words} words: bytes of its reads before gzip", SLICES * HEADS * words**2 / 1e6, "MB"),
            *(figure(f"{words} words: BertViz's {view}", size[view], "MB") for view in views),
            *(figure(f"{words} words: {view} over ours, size", ratios(size[view], size["ours"]), "") for view in views),
            figure(f"{words} words: ours, written", seconds["ours"], "s", target=targets[1]),
            figure(f"{words} words: ours, from the sentence", seconds["whole"], "s"),
            *(figure(f"{words} words: {view}, written", seconds[view], "s") for view in views),
            figure(f"{words} words: ours, peak memory of the job", peak["ours"], "MB"),
            *(figure(f"{words} words: {view}, peak memory of the job", peak[view], "MB") for view in views),
        ]
    return rows


def page_in_chromium() -> list[Figure]:
    """The same pages opened from disk in Chromium (headless, no GPU), with a fresh context each time: first contentful
    paint, from the start of the navigation; then, at 128 words, the time of all script (events, animation frames,
    promises: the union of their spans in Chromium's trace) between one frame and the next, in frames with script, while
    the view is dragged and while the wheel zooms; once as the page opens, once with every read of every head above the
    threshold drawn."""
    if CHROMIUM is None or importlib.util.find_spec("playwright") is None:
        print("no Chromium, or no Playwright: nothing is measured in a browser", file=sys.stderr)
        return []
    with tempfile.TemporaryDirectory() as folder, chromium() as browser:
        files = {words: Path(folder, f"{words}.html") for words in LENGTHS}
        rows = []
        for words, file in files.items():
            _sentence(words).draw(file)
            paints = [_first_paint(browser, file) for _ in range(limit_runs(7))]
            rows.append(figure(f"{words} words: first contentful paint", [paint for paint, _ in paints], "ms"))
            rows.append(figure(f"{words} words: memory of the script", [memory for _, memory in paints], "MB"))
        for label, all_reads in (("as it opens", False), ("all strong reads drawn", True)):
            rows += _panned(browser, files[PANNED], label, all_reads)
    return rows


@contextmanager
def chromium() -> Iterator[Any]:
    """Start Debian's Chromium, driven by Playwright."""
    from playwright.sync_api import sync_playwright

    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox"])
        yield browser
        browser.close()


def _sentence(words: int) -> Any:
    """Return a sentence in a random encoder with twelve slices of twelve heads. Its query weights are scaled so that
    rows are as peaked as trained rows: the largest P(j | i) of a word is a third on average."""
    import torch

    import bnet_transformer as bt

    torch.set_num_threads(2)
    vocabulary = [f"word{k}" for k in range(256)]
    net = bt.encoder(48, heads=HEADS, slices=SLICES, vocabulary=vocabulary)
    sharp = {name: 8.0 * value for name, value in net.parameters.items() if name.startswith("W_q")}
    return net.replace(sharp).sentence(vocabulary[:words])


def _write(method: str, words: int) -> tuple[float, float, float]:
    """Return the seconds to write the page, its size in MB, and the peak memory in MB."""
    s = _sentence(words)
    if method == "whole":
        s.net.module()
    else:
        attentions = [s.attention(t) for t in range(SLICES)]
    with tempfile.TemporaryDirectory() as folder:
        file, seconds = Path(folder, "page.html"), []
        if method not in ("ours", "whole"):
            import bertviz

            view, tensors = getattr(bertviz, method), [attention.detach()[None].float() for attention in attentions]

        def write() -> None:
            start = time.perf_counter()
            if method in ("ours", "whole"):
                s.draw(file)
            else:
                file.write_text(view(tensors, list(s.words), html_action="return").data, encoding="utf-8")
            seconds.append(time.perf_counter() - start)

        peak = measure_peak(write)
        return seconds[0], file.stat().st_size / 1e6, peak


def _first_paint(browser: Any, file: Path) -> tuple[float, float]:
    """Return milliseconds from the start of a navigation to the first contentful paint, and MB of the script's heap
    then."""
    context = browser.new_context(viewport={"width": 1280, "height": 800})
    page = context.new_page()
    page.goto(file.as_uri())
    page.wait_for_selector(".node", state="attached")
    painted = "() => performance.getEntriesByName('first-contentful-paint')[0]?.startTime ?? null"
    page.wait_for_function(painted)
    paint, memory = page.evaluate(painted), page.evaluate("() => performance.memory.usedJSHeapSize / 1e6")
    context.close()
    return float(paint), float(memory)


def _panned(browser: Any, file: Path, label: str, all_reads: bool) -> list[Figure]:
    """Return the script time per frame while the mouse drags and the wheel zooms."""
    context = browser.new_context(viewport={"width": 1280, "height": 800})
    page = context.new_page()
    page.goto(file.as_uri())
    page.wait_for_selector(".node", state="attached")
    if all_reads:
        page.locator('[name="head"]').select_option("all")
        page.locator('[name="top"]').fill("")
    num_reads = int(page.locator(".footer").get_attribute("data-reads"))
    drags = _traced(browser, page, _drag)
    zooms = _traced(browser, page, _zoom)
    context.close()
    return [
        figure(f"{label}: reads drawn", num_reads, ""),
        figure(f"{label}: dragged, script per frame", drags, "ms", target=8.0),
        figure(f"{label}: dragged, the slowest frame of a hundred", _slow(drags), "ms"),
        figure(f"{label}: zoomed, script per frame", zooms, "ms"),
        figure(f"{label}: zoomed, the slowest frame of a hundred", _slow(zooms), "ms"),
    ]


def _drag(page: Any) -> None:
    """Drag the view in both directions, with one event per frame."""
    box = page.locator(".main").bounding_box()
    x, y = box["x"] + box["width"] / 2, box["y"] + box["height"] / 2
    page.mouse.move(x, y)
    page.mouse.down()
    for step in range(240):
        page.mouse.move(x - 300 * abs((step / 40) % 2 - 1), y + 40 * (step % 2))
        time.sleep(0.008)
    page.mouse.up()


def _zoom(page: Any) -> None:
    """Zoom in and out with the wheel and Control."""
    page.keyboard.down("Control")
    for step in range(120):
        page.mouse.wheel(0, -40 if (step // 20) % 2 else 40)
        time.sleep(0.008)
    page.keyboard.up("Control")


def _traced(browser: Any, page: Any, move: Any) -> list[float]:
    """Return milliseconds of script in each frame with script while the view moves, from Chromium's trace."""
    page.wait_for_timeout(500)
    frame = ["devtools.timeline.frame", "disabled-by-default-devtools.timeline.frame"]
    categories = ["devtools.timeline", "disabled-by-default-devtools.timeline", *frame]
    browser.start_tracing(page=page, categories=categories)
    move(page)
    events = json.loads(browser.stop_tracing())["traceEvents"]
    spans = [e for e in events if e.get("ph") == "X" and e["name"] in SCRIPT]
    threads = [(e["pid"], e["tid"]) for e in spans]
    main = max(set(threads), key=threads.count)
    frames = sorted(e["ts"] for e in events if e["name"] == "BeginMainThreadFrame" and (e["pid"], e["tid"]) == main)
    script = _union([(e["ts"], e["ts"] + e["dur"]) for e in spans if (e["pid"], e["tid"]) == main])
    spent = (
        sum(min(b, end) - max(a, start) for a, b in script if a < end and b > start) / 1e3
        for start, end in itertools.pairwise(frames)
    )
    return [duration for duration in spent if duration]


def _union(spans: list[tuple[float, float]]) -> list[tuple[float, float]]:
    """Return the union of spans: an event's span contains those of the functions that it calls, which count once."""
    merged: list[tuple[float, float]] = []
    for start, end in sorted(spans):
        if merged and start <= merged[-1][1]:
            merged[-1] = merged[-1][0], max(merged[-1][1], end)
        else:
            merged.append((start, end))
    return merged


def _slow(frames: list[float]) -> float:
    """Return the 99th percentile of the frames."""
    return sorted(frames)[int(0.99 * (len(frames) - 1))]
