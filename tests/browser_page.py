"""A headless Chromium for tests of HTML pages, whose console messages and requests are checked."""

from __future__ import annotations

import contextlib
import importlib.util
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser")
NEEDED = "a Chromium (Debian: apt-get install chromium) and Playwright (pip install playwright)"

needs_chromium = pytest.mark.skipif(
    CHROMIUM is None or importlib.util.find_spec("playwright") is None, reason=f"the page is tested in {NEEDED}"
)


@contextlib.contextmanager
def launch_chromium() -> Iterator[Any]:
    """Start a headless browser."""
    from playwright.sync_api import sync_playwright

    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox"])
        yield browser
        browser.close()


class BrowserPage:
    """One page of a browser for all files, since a new page takes a second.

    A file must not log errors, open dialogs or request anything.
    """

    def __init__(self, browser: Any) -> None:
        self.page = browser.new_context(accept_downloads=True).new_page()
        self.faults: list[str] = []
        self.requests: list[str] = []
        self.page.on("console", lambda message: self._add_fault(message.type in ("error", "warning"), message.text))
        self.page.on("pageerror", lambda error: self._add_fault(True, str(error)))
        self.page.on("dialog", lambda dialog: (self._add_fault(True, f"dialog {dialog.message}"), dialog.dismiss()))
        self.page.on("popup", lambda popup: self._add_fault(True, f"popup {popup.url}"))
        self.page.route("**/*", self._handle_request)

    def _add_fault(self, is_fault: bool, text: str) -> None:
        if is_fault:
            self.faults.append(text)

    def _handle_request(self, route: Any) -> None:
        self.requests.append(route.request.url)
        if route.request.url.startswith("file:"):
            route.continue_()
        else:
            route.abort()

    @contextlib.contextmanager
    def open_file(
        self, file: Path, ready: str = ".node", size: tuple[int, int] = (1280, 800), fragment: str = "", **media: str
    ) -> Iterator[Any]:
        """Open a file from disk and wait for the selector `ready`; `media` are a colour scheme and reduced motion."""
        self.faults.clear()
        self.requests.clear()
        self.page.mouse.move(0, 0)
        self.page.set_viewport_size({"width": size[0], "height": size[1]})
        self.page.emulate_media(
            **{"media": "screen", "color_scheme": "light", "reduced_motion": "no-preference", **media}
        )
        self.page.goto(file.as_uri() + fragment)
        self.page.wait_for_selector(ready, state="attached")
        try:
            yield self.page
        finally:
            if self.faults:
                print("the page said:", *self.faults, sep="\n  ")
        assert not self.faults and self.requests == [file.as_uri()], (self.faults, self.requests)


@contextlib.contextmanager
def open_browser_page() -> Iterator[BrowserPage]:
    """Open one page for all tests of a module."""
    with launch_chromium() as browser:
        yield BrowserPage(browser)


def download_file(page: Any, click: Callable[[], object]) -> tuple[str, bytes]:
    """Return the name and the bytes of the file that a click downloads."""
    with page.expect_download() as download:
        click()
    return download.value.suggested_filename, Path(download.value.path()).read_bytes()
