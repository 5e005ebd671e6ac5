"""Make the figures of `docs/figures.md`: run its Python blocks in order, in the folder `docs/figures`.

``python docs/scripts/figures.py`` writes the same bytes each time with the same versions.
"""

from __future__ import annotations

import os
import re
from pathlib import Path

PAGE = Path(__file__).resolve().parents[1] / "figures.md"
BLOCK = re.compile(r"^```python\n(.*?)^```$", re.MULTILINE | re.DOTALL)


def main() -> None:
    """Run the page."""
    folder = PAGE.with_suffix("")
    folder.mkdir(exist_ok=True)
    os.chdir(folder)
    page: dict[str, object] = {}
    for block in BLOCK.findall(PAGE.read_text(encoding="utf-8")):
        exec(compile(block, str(PAGE), "exec"), page)
    for path in sorted(folder.iterdir()):
        print(path.relative_to(PAGE.parent.parent), f"{path.stat().st_size // 1024} kB")


if __name__ == "__main__":
    main()
