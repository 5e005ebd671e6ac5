"""Shared by the tests in a browser: an installed Chromium, and a page in it whose console and requests are checked."""

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
    """A browser without a window."""
    from playwright.sync_api import sync_playwright

    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox"])
        yield browser
        browser.close()


class BrowserPage:
    """One page of a browser for all files, since a new page takes a second.

    A file must not complain, ask the reader, or send for anything.
    """

    def __init__(self, browser: Any) -> None:
        self.page = browser.new_context(accept_downloads=True).new_page()
        self.faults: list[str] = []
        self.sent: list[str] = []
        self.page.on("console", lambda message: self._fault(message.type in ("error", "warning"), message.text))
        self.page.on("pageerror", lambda error: self._fault(True, str(error)))
        self.page.on("dialog", lambda dialog: (self._fault(True, f"dialog {dialog.message}"), dialog.dismiss()))
        self.page.on("popup", lambda popup: self._fault(True, f"popup {popup.url}"))
        self.page.route("**/*", self._handle_request)

    def _fault(self, is_fault: bool, text: str) -> None:
        if is_fault:
            self.faults.append(text)

    def _handle_request(self, route: Any) -> None:
        self.sent.append(route.request.url)
        if route.request.url.startswith("file:"):
            route.continue_()
        else:
            route.abort()

    @contextlib.contextmanager
    def open_file(
        self, file: Path, ready: str = ".node", size: tuple[int, int] = (1280, 800), **media: str
    ) -> Iterator[Any]:
        """The page with a file from disk, its `ready` there; `media` are a colour scheme and reduced motion."""
        self.faults.clear()
        self.sent.clear()
        self.page.mouse.move(0, 0)
        self.page.set_viewport_size({"width": size[0], "height": size[1]})
        self.page.emulate_media(**{"color_scheme": "light", "reduced_motion": "no-preference", **media})
        self.page.goto(file.as_uri())
        self.page.wait_for_selector(ready, state="attached")
        try:
            yield self.page
        finally:
            if self.faults:
                print("the page said:", *self.faults, sep="\n  ")
        assert not self.faults and self.sent == [file.as_uri()], (self.faults, self.sent)


@contextlib.contextmanager
def open_browser_page() -> Iterator[BrowserPage]:
    """A page for the tests of a module, one after another."""
    with launch_chromium() as browser:
        yield BrowserPage(browser)


def download_file(page: Any, press: Callable[[], object]) -> tuple[str, bytes]:
    """The name and the bytes of the file that a button saves."""
    with page.expect_download() as waiting:
        press()
    return waiting.value.suggested_filename, Path(waiting.value.path()).read_bytes()
