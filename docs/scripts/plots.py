"""Make the plots of pages: run their Python blocks in order, and write `figure` where a picture follows.

``python docs/scripts/plots.py`` writes `docs/plots/*.png`, the same bytes each time with the same versions. Names of
pages select some of them (`plots.py heads.md`).
"""

from __future__ import annotations

import contextlib
import re
import sys
import tempfile
from pathlib import Path
from types import ModuleType

DOCS = Path(__file__).resolve().parents[1]
PAGES = ("plots.md", "heads.md", "roles.md", "contributions.md", "lens.md", "circuits.md", "results.md")
PART = re.compile(r"^```python\n(?P<code>.*?)^```$|^!\[[^\]]*\]\((?P<picture>[^)]+)\)", re.MULTILINE | re.DOTALL)


def main() -> None:
    """Run the pages, in an empty folder, because some of them write files."""
    with tempfile.TemporaryDirectory() as folder, contextlib.chdir(folder):
        for name in sys.argv[1:] or PAGES:
            run_page(DOCS / name)


def run_page(path: Path) -> None:
    """Run one page."""
    page = sys.modules["plots_page"] = ModuleType("plots_page")
    for part in PART.finditer(path.read_text(encoding="utf-8")):
        if part["code"]:
            exec(compile(part["code"], str(path), "exec"), page.__dict__)
            continue
        if not part["picture"].startswith("plots/"):  # the output of an experiment
            continue
        picture = DOCS / part["picture"]
        picture.parent.mkdir(exist_ok=True)
        page.__dict__["figure"].savefig(picture, dpi=110, metadata={"Software": None})
        print(picture.relative_to(DOCS.parent), f"{picture.stat().st_size // 1024} kB")


if __name__ == "__main__":
    main()
