"""What the tests in a browser share: a Chromium that is installed, and pages in it that are watched."""

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
def chromium() -> Iterator[Any]:
    """A browser without a window."""
    from playwright.sync_api import sync_playwright

    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox"])
        yield browser
        browser.close()


class Watched:
    """A page of a browser; when it is closed it must not have complained, asked the reader, or sent for anything."""

    def __init__(self, browser: Any, **options: Any) -> None:
        self.context = browser.new_context(accept_downloads=True, **options)
        self.page = self.context.new_page()
        self.faults: list[str] = []
        self.sent: list[str] = []
        self.page.on("console", lambda told: self._fault(told.type in ("error", "warning"), told.text))
        self.page.on("pageerror", lambda error: self._fault(True, str(error)))
        self.page.on("dialog", lambda dialog: (self._fault(True, f"dialog {dialog.message}"), dialog.dismiss()))
        self.page.on("popup", lambda popup: self._fault(True, f"popup {popup.url}"))
        self.page.route("**/*", self._asked)

    def _fault(self, wrong: bool, what: str) -> None:
        if wrong:
            self.faults.append(what)

    def _asked(self, route: Any) -> None:
        self.sent.append(route.request.url)
        if route.request.url.startswith("file:"):
            route.continue_()
        else:
            route.abort()

    def close(self) -> None:
        """Close it, and say what went wrong."""
        self.context.close()
        assert not self.faults
        assert len(self.sent) <= 1 and all(url.startswith("file:") for url in self.sent), self.sent


@contextlib.contextmanager
def opened(browser: Any, file: Path, ready: str = ".node", **options: Any) -> Iterator[Any]:
    """A file opened from disk, its `ready` there; watched to the end."""
    watched = Watched(browser, **{"viewport": {"width": 1280, "height": 800}, **options})
    try:
        watched.page.goto(file.as_uri())
        watched.page.wait_for_selector(ready, state="attached")
        yield watched.page
    except BaseException:
        watched.context.close()
        if watched.faults:
            print("the page said:", *watched.faults, sep="\n  ")
        raise
    watched.close()


def downloaded(page: Any, press: Callable[[], object]) -> tuple[str, bytes]:
    """The name and the bytes of the file that a button saves."""
    with page.expect_download() as waiting:
        press()
    return waiting.value.suggested_filename, Path(waiting.value.path()).read_bytes()
