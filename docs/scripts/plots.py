"""Make the pictures of `docs/plots.md`: run its python blocks in order, write `figure` where a picture follows.

``python docs/scripts/plots.py`` writes `docs/plots/*.png`, the same bytes each time with the same versions.
"""

from __future__ import annotations

import re
import sys
from pathlib import Path
from types import ModuleType

PAGE = Path(__file__).resolve().parents[1] / "plots.md"
PART = re.compile(r"^```python\n(?P<code>.*?)^```$|^!\[[^\]]*\]\((?P<picture>[^)]+)\)", re.MULTILINE | re.DOTALL)


def main() -> None:
    """Run the page."""
    page = sys.modules["plots_page"] = ModuleType("plots_page")
    for part in PART.finditer(PAGE.read_text(encoding="utf-8")):
        if part["code"]:
            exec(compile(part["code"], str(PAGE), "exec"), page.__dict__)
            continue
        path = PAGE.parent / part["picture"]
        path.parent.mkdir(exist_ok=True)
        page.__dict__["figure"].savefig(path, dpi=110, metadata={"Software": None})
        print(path.relative_to(PAGE.parent.parent), f"{path.stat().st_size // 1024} kB")


if __name__ == "__main__":
    main()
