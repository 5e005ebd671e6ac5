"""Rows of the live page: from a click on `do` to the drawn answer, the first page after the start, and memory."""

from __future__ import annotations

import importlib.util
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from benchmarks.harness import Figure, differences, figure, limit_runs, peak_memory
from benchmarks.page import CHROMIUM, chromium

MODEL, WORDS, SLICES = "minilm", 128, 6
SENTENCE = " ".join(("the cat sat on the mat because it was tired and then " * 11).split()[: WORDS - 2])
NUM_REQUESTS = 200
PAUSE = 300  # milliseconds between the click that selects a node and the click on do: the selection is drawn
CLICK = """async () => {
  const frame = () => new Promise(requestAnimationFrame), live = document.querySelector('.live');
  performance.clearResourceTimings();
  const start = performance.now();
  document.querySelector('[data-action="zero"]').click();
  while (!live.classList.contains('running')) await frame();
  const entry = () => performance.getEntriesByType('resource').find((item) => item.name.endsWith('/api/page'));
  while (live.classList.contains('running') || !entry()) await new Promise((done) => setTimeout(done));
  await frame();
  await new Promise((done) => setTimeout(done)); // after the frame is painted
  const { requestStart, responseStart, responseEnd } = entry();
  return [performance.now() - start, responseStart - requestStart, responseEnd - requestStart];
}"""
LOAD = f"import bnet_transformer as bt; bt.from_pretrained({MODEL!r})"


def live_page() -> list[Figure]:
    """The live page (`bnet-transformer serve`) of MiniLM with 128 words, with the server in a separate process and
    Chromium (headless, no GPU) on the same computer. A click sets a hidden state to zero, in each slice in turn; the
    answer is drawn when the frame with the new page is painted. The server's share is the time from the request to the
    first byte of its answer. The first page is measured from the start of the process, and compared with a process that
    imports the package and loads the model; then the browser is already running. The memory of the server is its
    peak memory, after the first clicks and after 200 further ones, or fewer with `--runs`."""
    if CHROMIUM is None or importlib.util.find_spec("playwright") is None:
        print("no Chromium, or no Playwright: nothing is measured in a browser", file=sys.stderr)
        return []
    loads, firsts = [], []
    with chromium() as browser:
        for _ in range(limit_runs(3)):
            start = time.perf_counter()
            subprocess.run([sys.executable, "-c", LOAD], check=True)
            loads.append(time.perf_counter() - start)
            start = time.perf_counter()
            with _run_server() as (_, url):
                page = _open_page(browser, url)
                firsts.append(time.perf_counter() - start)
                page.context.close()
        with _run_server() as (process, url):
            page = _open_page(browser, url)
            _fill(page, SENTENCE)
            clicks = [_click(page, k) for k in range(limit_runs(5 * SLICES) + 1)][1:]
            memory = [peak_memory(process.pid)]
            num_requests = limit_runs(NUM_REQUESTS)
            for k in range(num_requests):
                _click(page, k)
            memory.append(peak_memory(process.pid))
    click_times, shares, received = zip(*clicks, strict=True)
    return [
        figure(f"{WORDS} words: from click to drawn answer", click_times, "ms", target=150.0),
        figure(f"{WORDS} words: the server's share", shares, "ms", target=80.0),
        figure(f"{WORDS} words: until the answer is received", received, "ms"),
        figure("a process that imports the package and loads the model", loads, "s"),
        figure("first page, from the start of the process", firsts, "s"),
        figure("first page, beyond loading the model", differences(firsts, loads), "s", target=2.0),
        figure(f"memory of the server with {WORDS} words", memory[0], "MB"),
        figure(f"memory of the server after {num_requests} further answers", memory[1], "MB"),
    ]


@contextmanager
def _run_server() -> Iterator[tuple[subprocess.Popen[str], str]]:
    """Run the command in a process, and return the process and its address."""
    command = [sys.executable, "-m", "bnet_transformer.cli", "serve", MODEL, "--no-browser", "--port", "0"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        try:
            assert process.stdout is not None
            yield process, process.stdout.readline().strip()
        finally:
            process.terminate()


def _open_page(browser: Any, url: str) -> Any:
    """Open the page, and wait for its first sentence."""
    page = browser.new_context(viewport={"width": 1280, "height": 800}).new_page()
    page.goto(url)
    page.wait_for_selector(".node", state="attached")
    return page


def _fill(page: Any, sentence: str) -> None:
    """Show another sentence."""
    with page.expect_response(lambda response: response.url.endswith("/api/page")):
        page.locator('[name="text"]').fill(sentence)
        page.keyboard.press("Enter")
    page.wait_for_selector(".live:not(.running)")


def _click(page: Any, k: int) -> tuple[float, float, float]:
    """Set a hidden state to zero, and undo it; return milliseconds until it is drawn, and of its request."""
    page.locator(f'[data-node="x_{k % SLICES}_{10 + k % 97}"]').dispatch_event("click")
    page.wait_for_timeout(PAUSE)
    result: tuple[float, float, float] = tuple(page.evaluate(CLICK))
    with page.expect_response(lambda response: response.url.endswith("/api/page")):
        page.locator('[data-command="back"]').click()
    page.wait_for_selector(".live:not(.running)")
    return result
