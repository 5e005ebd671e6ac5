"""Check the site that `make docs` built: every link and picture of its pages leads to a file, and to an anchor in it.

Run it as ``python docs/scripts/check_site.py [FOLDER]``. It reads only the HTML files, so it finds faults that Sphinx
accepts. It counts links to the web without following them: `make docs-links` does that. A formula must not contain
LaTeX that its converter did not convert.
"""

from __future__ import annotations

import sys
from functools import cache
from html.parser import HTMLParser
from pathlib import Path
from urllib.parse import unquote, urlsplit

ROOT = Path(__file__).resolve().parents[2]
FETCHED = {"script": "src", "link": "href", "img": "src", "iframe": "src", "video": "src", "object": "data"}
FETCHED["source"] = "srcset"  # of a picture, with one file


class Page(HTMLParser):
    """The anchors of a page (`ids`), its `links`, the resources it loads (`parts`), and unconverted LaTeX (`left`)."""

    def __init__(self, path: Path) -> None:
        super().__init__()
        self.ids: set[str] = set()
        self.links: list[str] = []
        self.parts: list[str] = []
        self.left: list[str] = []
        self.inside: list[str] = []
        self.feed(path.read_text(encoding="utf-8"))

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        """Collect the anchors, links and resources of a tag."""
        attributes = {name: value for name, value in attrs if value}
        self.ids.update(value for name, value in attributes.items() if name == "id" or (name == "name" and tag == "a"))
        if tag == "a" and "href" in attributes:
            self.links.append(attributes["href"])
        if (
            tag in FETCHED
            and FETCHED[tag] in attributes
            and attributes.get("rel") not in ("canonical", "search", "index", "next")
        ):
            self.parts.append(attributes[FETCHED[tag]])
        if tag == "math" or self.inside:
            self.inside.append(tag)
        if self.inside and attributes.get("linebreak") == "newline":  # browsers break no formula
            self.left.append(r"\\")

    def handle_endtag(self, tag: str) -> None:
        """Track the end of elements inside formulas."""
        if self.inside:
            self.inside.pop()

    def handle_data(self, data: str) -> None:
        """Collect unconverted LaTeX of the text."""
        if self.inside and ("\\" in data or (data.strip() == "&" and self.inside[-1] != "mtext")):
            self.left.append(data.strip())


@cache
def read_page(path: Path) -> Page:
    """Read a page once."""
    return Page(path)


def find_fault(site: Path, page: Path, target: str) -> str | None:
    """Return the fault of a link of a page, or None."""
    parts = urlsplit(target)
    if parts.scheme or parts.netloc:
        return None
    path = (page.parent / unquote(parts.path)).resolve() if parts.path else page
    path = path / "index.html" if path.is_dir() else path
    if not path.is_relative_to(site):
        return "leads out of the site"
    if not path.is_file():
        return "no such file"
    if parts.fragment and path.suffix == ".html" and unquote(parts.fragment) not in read_page(path).ids:
        return "no such anchor"
    return None


def find_faults(site: Path) -> tuple[list[str], int, int, int]:
    """Return the faults, and the numbers of pages, of links, and of links to the web."""
    pages = sorted(site.rglob("*.html"))
    result, links, web = [], 0, 0
    for path in pages:
        page = read_page(path)
        for target in (*page.links, *page.parts):
            links, web = links + 1, web + bool(urlsplit(target).netloc)
            if problem := find_fault(site, path, target):
                result.append(f"{path.relative_to(site)}: {target}: {problem}")
        result += [
            f"{path.relative_to(site)}: {part}: fetched from the web" for part in page.parts if urlsplit(part).netloc
        ]
        result += [
            f"{path.relative_to(site)}: {latex}: unconverted LaTeX in a formula" for latex in dict.fromkeys(page.left)
        ]
    return result, len(pages), links, web


def main() -> int:
    """Check every page, print the faults, return the exit code."""
    site = Path(sys.argv[1] if len(sys.argv) > 1 else ROOT / "build" / "docs").resolve()
    result, pages, links, web = find_faults(site)
    print("\n".join([*result, f"{pages} pages, {links} links, {len(result)} broken, {web} to the web (not followed)"]))
    return 1 if result or not pages else 0


if __name__ == "__main__":
    sys.exit(main())
