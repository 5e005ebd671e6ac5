"""Make the screenshots of `docs/explore.md`, in `docs/explore`: its pages in Chromium, driven by Playwright."""

from __future__ import annotations

import shutil
import sys
import tempfile
from pathlib import Path

import bnet_transformer as bt
from bnet_transformer.tpm import Categorical

FOLDER = Path(__file__).resolve().parents[1] / "explore"


def main() -> None:
    """Write the pages, open them in Chromium, and save screenshots."""
    chromium = shutil.which("chromium") or shutil.which("chromium-browser")
    try:
        from playwright.sync_api import sync_playwright
    except ImportError:
        chromium = None
    if chromium is None:
        sys.exit("no Chromium, or no Playwright: the screenshots of docs/explore.md are not made")
    FOLDER.mkdir(exist_ok=True)
    with tempfile.TemporaryDirectory() as folder, sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=chromium, args=["--no-sandbox"])
        words = ["the", "cat", "sat", "on", "mat"]
        net = bt.bayesuvius(dim=8, slices=2, heads=4, mask="causal", vocabulary=words, observe=Categorical(5))
        s = net.sentence("the cat sat on the mat").observe(y_5="mat")
        mini = bt.from_pretrained("minilm").sentence("The cat sat on the mat because it was tired")
        for name, sentence, scheme, pointed in (("cat", s, "light", ""), ("mini", mini, "dark", "x_4_8")):
            sentence.draw(f"{folder}/{name}.html")
            page = browser.new_page(color_scheme=scheme, viewport={"width": 1360, "height": 820})
            page.goto(f"file://{folder}/{name}.html")
            page.wait_for_selector(".node")
            if pointed:
                page.click(f'[data-node="{pointed}"]')
                page.wait_for_timeout(400)
            page.screenshot(path=FOLDER / f"{name}.png")
        browser.close()
    for path in sorted(FOLDER.iterdir()):
        print(path.relative_to(FOLDER.parent), f"{path.stat().st_size // 1024} kB")


if __name__ == "__main__":
    main()
