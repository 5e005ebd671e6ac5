"""Make the film of `docs/serve.md`: drive the live page of the net `tiny` in Chromium, and write its frames.

``python docs/scripts/film.py`` writes `docs/serve/film.gif` and `docs/serve/still.png`. It requires the extra `dev`,
and Chromium. The scenes name elements by their attributes, so they do not depend on the layout.
"""

from __future__ import annotations

import io
import shutil
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from PIL import Image, ImageDraw
from playwright.sync_api import Locator, Page, sync_playwright

FOLDER = Path(__file__).resolve().parents[1] / "serve"
WIDTH, HEIGHT, CAPTION = 960, 620, 40  # CSS pixels; the caption is below the page
SCALE = 2  # for screens with a high density, and for a film that is shown at its full width
STILL = 10  # the frame that represents the film
SENTENCE, OTHER = "a bird sang a bird", "a bird ran a bird"

OVERLAY = """([height, caption]) => {
  document.querySelector("#serve").style.height = `${height - caption}px`;
  const namespace = "http://www.w3.org/2000/svg";
  const bar = document.createElement("div"), mark = document.createElement("div");
  const cursor = document.createElementNS(namespace, "svg"), path = document.createElementNS(namespace, "path");
  Object.assign(bar, { id: "film-caption" });
  Object.assign(bar.style, { position: "fixed", left: 0, right: 0, bottom: 0, height: `${caption}px`, zIndex: 99,
    background: "#1f2937", color: "#fff", font: "600 17px system-ui, sans-serif", display: "flex",
    alignItems: "center", justifyContent: "center" });
  Object.assign(mark, { id: "film-mark" });
  Object.assign(mark.style, { position: "fixed", zIndex: 98, pointerEvents: "none", border: "2.5px solid #d97706",
    borderRadius: "8px", boxSizing: "border-box" });
  cursor.id = "film-cursor";
  Object.assign(cursor.style, { position: "fixed", width: "52px", height: "52px", zIndex: 100, pointerEvents: "none" });
  const shape = { d: "M26 26v19l4.6-4.3 3 7 3.4-1.5-3-6.8h6.2z", fill: "#111", stroke: "#fff", "stroke-width": 1.5 };
  for (const [key, value] of Object.entries(shape)) path.setAttribute(key, value);
  cursor.append(path);
  document.body.append(bar, mark, cursor);
}"""
DRAW = """([text, { x, y, width, height }, isClicked]) => {
  const padding = 5;
  document.querySelector("#film-caption").textContent = text;
  Object.assign(document.querySelector("#film-mark").style, { left: `${x - padding}px`, top: `${y - padding}px`,
    width: `${width + 2 * padding}px`, height: `${height + 2 * padding}px` });
  Object.assign(document.querySelector("#film-cursor").style, { left: `${x + width * 0.6 - 26}px`,
    top: `${y + height * 0.6 - 26}px`, display: isClicked ? "" : "none" });
}"""


class Film:
    """The live page, and the frames of it."""

    def __init__(self, page: Page) -> None:
        self.page = page
        self.frames: list[Image.Image] = []
        self.seconds: list[float] = []
        page.wait_for_selector(".node", state="attached")
        page.evaluate(OVERLAY, [HEIGHT, CAPTION])
        page.evaluate("dispatchEvent(new Event('resize'))")

    def find(self, selector: str) -> Locator:
        """The first element of a selector."""
        return self.page.locator(selector).first

    def add(self, caption: str, target: Locator, seconds: float = 1.8, *, is_clicked: bool = False) -> None:
        """Add a frame with a frame around an element, and the cursor if it is clicked next."""
        target.scroll_into_view_if_needed()
        self.page.mouse.move(1, HEIGHT - 1)
        self.wait()
        self.page.evaluate(DRAW, [caption, target.bounding_box(), is_clicked])
        frame = Image.open(io.BytesIO(self.page.screenshot())).convert("RGB")
        ImageDraw.Draw(frame).rectangle((0, 0, frame.width - 1, frame.height - 1), outline="#c4c9d1", width=SCALE)
        self.frames.append(frame)
        self.seconds.append(seconds)

    def wait(self) -> None:
        """Wait until the page is drawn."""
        self.page.wait_for_selector(".live:not(.running)")
        self.page.wait_for_timeout(400)  # the end of animations

    def click(self, selector: str) -> None:
        """Click an element, and wait for the answer."""
        self.find(selector).click()
        self.page.wait_for_timeout(100)
        self.wait()

    def add_prediction(self, action: str, caption: str, seconds: float = 2.6) -> None:
        """Press the button of an action, and add a frame with the prediction after it."""
        self.click(f'[data-action="{action}"]')
        self.page.keyboard.press("Escape")
        self.add(caption, self.find('[data-posterior="y_4"]'), seconds)

    def choose(self, name: str) -> None:
        """Select a node."""
        self.find(f'[data-node="{name}"]').dispatch_event("click")
        self.wait()

    def write(self, folder: Path) -> None:
        """Write the film and its still, with the same colours in all frames: these files are smaller."""
        folder.mkdir(exist_ok=True)
        width, height = self.frames[0].size
        strip = Image.new("RGB", (width, height * len(self.frames)))
        for k, frame in enumerate(self.frames):
            strip.paste(frame, (0, k * height))
        palette = strip.quantize(256, method=Image.Quantize.MAXCOVERAGE)
        frames = [frame.quantize(palette=palette, dither=Image.Dither.NONE) for frame in self.frames]
        durations = [round(1000 * seconds) for seconds in self.seconds]
        options: dict[str, Any] = {"append_images": frames[1:], "duration": durations, "loop": 0, "optimize": True}
        frames[0].save(folder / "film.gif", save_all=True, **options)
        frames[STILL].save(folder / "still.png", optimize=True)


def tell(film: Film) -> None:
    """Act the scenes, in their order."""
    page, find = film.page, film.find
    find('[name="text"]').fill(SENTENCE)
    film.add("Type a sentence", find('[name="text"]'), is_clicked=True)
    page.keyboard.press("Enter")
    page.wait_for_selector(f'.panel h2:has-text("{SENTENCE}")')
    film.add("Its Bayesian network: the choice c selects one of three heads", find('[data-node="c"]'), 2.4)
    film.choose("y_2")
    find('[data-action="observe"] input').fill("a")
    film.add("Evidence: the word after “sang” is “a”", find('[data-action="observe"] button'), is_clicked=True)
    film.click('[data-action="observe"] button')
    page.keyboard.press("Escape")
    film.add("The posterior of c moves to head 0", find('[data-posterior="c"]'), 2.6)
    film.click('[data-command="back"]')
    film.choose("c")
    film.add("Undo the evidence, and set the head: do(c = 0)", find('[data-action="state-0"]'), is_clicked=True)
    film.click('[data-action="state-0"]')
    film.choose("y_4")
    film.add_prediction("posterior", "Head 0 predicts “sang” after “a bird sang a bird”")
    film.choose("x_0_2")
    film.add("Set the state of “sang” to zero ...", find('[data-action="zero"]'), is_clicked=True)
    film.add_prediction("zero", "... and this prediction disappears")
    film.click('[data-command="back"]')
    page.keyboard.press("Escape")
    film.click('[data-action="lens"]')
    page.wait_for_selector('[data-live="lens"] .cell')
    film.add("The lens: the most probable word of each hidden state", find('[data-live="lens"] table'), 2.6)
    film.click('[data-action="lens"]')
    for name, value in (("other", OTHER), ("node", "y_4"), ("first", "ran"), ("second", "sang")):
        find(f'[data-live="patch"] [name="{name}"]').fill(value)
    film.add("Patch another sentence into this one", find('[data-live="patch"] [name="other"]'))
    film.click('[data-live="patch"] button[type="submit"]')
    page.wait_for_selector('[data-live="patch"] .cell')
    film.add("Two nodes carry the difference of the answers", find('[data-live="patch"] table'), 2.6)
    film.click('[data-live="patch"] .cell[data-name="x_0_2"]')
    film.add("Give one of them its value of the other sentence ...", find('[data-action="other"]'), is_clicked=True)
    film.add_prediction("other", "... and the prediction is “ran”", 4.5)


@contextmanager
def run_server() -> Iterator[str]:
    """Run the command in a process; the value is the address of the page."""
    command = [sys.executable, "-m", "bnet_transformer.cli", "serve", "tiny", "--no-browser", "--port", "0"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        try:
            assert process.stdout is not None
            yield process.stdout.readline().strip()
        finally:
            process.terminate()


def main() -> None:
    """Make the film."""
    path = shutil.which("chromium") or shutil.which("chromium-browser")
    if path is None:
        sys.exit("the film requires Chromium (Debian: apt-get install chromium)")
    with run_server() as url, sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=path, args=["--no-sandbox"])
        options: dict[str, Any] = {"color_scheme": "light", "reduced_motion": "reduce", "device_scale_factor": SCALE}
        page = browser.new_page(viewport={"width": WIDTH, "height": HEIGHT}, **options)
        page.goto(url)
        film = Film(page)
        tell(film)
        browser.close()
    film.write(FOLDER)
    size = (FOLDER / "film.gif").stat().st_size // 1024
    print(f"docs/serve/film.gif: {len(film.frames)} frames, {sum(film.seconds):.0f} s, {size} kB")


if __name__ == "__main__":
    main()
