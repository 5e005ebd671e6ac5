"""Check that the relative links of the Markdown pages lead to a file, and their #anchors to a heading.

Run it from any folder: ``python docs/scripts/check_links.py``. It needs only Python. It prints one line for each broken
link, and exits with 1 if there is one. Links to the web are not followed.
"""

import re
import sys
from collections import Counter
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from urllib.parse import unquote, urlsplit

ROOT = Path(__file__).resolve().parents[2]
FENCE = re.compile(r"\s*(```+|~~~+)")
INLINE_CODE = re.compile(r"(?<!`)(`+)(?!`)[^\n]*?(?<!`)\1(?!`)")
# [text](target "title"), ![image](target) and the definition line [name]: target
LINK = re.compile(r"\]\(\s*<?([^)\s>]+)>?[^)]*\)|^\s*\[[^\]]+\]:\s+<?([^\s>]+)", re.MULTILINE)
HEADING = re.compile(r"#{1,6}\s+(.+?)\s*#*\s*$")
ANCHOR = re.compile(r"<a\s+(?:id|name)=[\"']([^\"']+)")


def iter_prose(page: Path) -> Iterator[tuple[int, str]]:
    """Return the numbered lines of a page, without its fenced code."""
    fence = ""
    for number, line in enumerate(page.read_text(encoding="utf-8").splitlines(), start=1):
        mark = FENCE.match(line)
        if mark and not fence:
            fence = mark[1]
        elif mark and mark[1].startswith(fence) and line.strip() == mark[1]:
            fence = ""
        elif not fence:
            yield number, line


@cache
def find_anchors(page: Path) -> frozenset[str]:
    """Return the anchors of a page: its headings, as slugs of GitHub, and its ``<a id=...>``."""
    result: set[str] = set()
    slug_counts: Counter[str] = Counter()
    for _, line in iter_prose(page):
        result.update(ANCHOR.findall(line))
        if heading := HEADING.match(line):
            title = re.sub(r"!?\[([^\]]*)\]\([^)]*\)", r"\1", heading[1])  # of a linked heading only the text counts
            slug = re.sub(r"[^\w\- ]", "", title.lower()).replace(" ", "-")
            result.add(f"{slug}-{slug_counts[slug]}" if slug_counts[slug] else slug)
            slug_counts[slug] += 1
    return frozenset(result)


def find_fault(page: Path, target: str) -> str | None:
    """Return the fault of a link on a page, or None."""
    parts = urlsplit(target)
    if parts.scheme or parts.netloc:
        return None
    path = (page.parent / unquote(parts.path)).resolve() if parts.path else page
    if not path.is_relative_to(ROOT):
        return "leads out of the repository"
    if not path.exists():
        return "no such file"
    if parts.fragment and path.suffix == ".md" and unquote(parts.fragment) not in find_anchors(path):
        return "no such heading"
    return None


def main() -> int:
    """Check every page, print the faults, return the exit code."""
    pages = [*sorted(ROOT.glob("*.md")), *sorted((ROOT / "docs").rglob("*.md"))]
    count, broken = 0, 0
    for page in pages:
        numbers, lines = zip(*iter_prose(page), strict=True) if page.stat().st_size else ((), ())
        text = INLINE_CODE.sub("", "\n".join(lines))  # whole, because a link may continue on the next line
        for match in LINK.finditer(text):
            target = match[1] or match[2]
            count += 1
            if problem := find_fault(page, target):
                broken += 1
                number = numbers[text.count("\n", 0, match.start())]
                print(f"{page.relative_to(ROOT)}:{number}: {target}: {problem}")
    print(f"{len(pages)} pages, {count} links, {broken} broken")
    return 1 if broken else 0


if __name__ == "__main__":
    sys.exit(main())
