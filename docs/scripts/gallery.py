"""Make the pictures of `docs/gallery.md`: run its Python blocks, and the last statement of each in both themes.

``python docs/scripts/gallery.py`` writes `docs/gallery/*`, the same bytes each time with the same versions. The last
statement of a block with pictures is a call of `draw` or `bt.plot`; the script adds the theme and the width.
"""

from __future__ import annotations

import ast
import contextlib
import io
import re
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

DOCS = Path(__file__).resolve().parents[1]
PAGE = DOCS / "gallery.md"
BLOCK = re.compile(
    r"^```python\n(?P<code>.*?)^```$(?P<pictures>\s+\| light \| dark \|\n\|---\|---\|\n[^\n]*)?",
    re.MULTILINE | re.DOTALL,
)
LINK = re.compile(r"\]\((gallery/[^)]+)\)")
COLUMN: dict[str, str] = {"width": "column"}  # the width of every picture
DPI, COLOURS = 160, 128


def main() -> None:
    """Run the page in an empty folder, and remove pictures that it no longer has."""
    pictures = {DOCS / name for _, links in read_blocks() for name in links}
    (DOCS / "gallery").mkdir(exist_ok=True)
    for path in set((DOCS / "gallery").iterdir()) - pictures:
        path.unlink()
    page = sys.modules["gallery_page"] = ModuleType("gallery_page")
    with tempfile.TemporaryDirectory() as folder, contextlib.chdir(folder):
        for code, links in read_blocks():
            run_block(code, links, page.__dict__)
    print(f"docs/gallery: {len(pictures)} pictures, {sum(p.stat().st_size for p in pictures) // 1024} kB")


def read_blocks() -> Iterator[tuple[str, list[str]]]:
    """The Python blocks of the page, each with the pictures after it: light and dark, or none."""
    for block in BLOCK.finditer(PAGE.read_text(encoding="utf-8")):
        yield block["code"], LINK.findall(block["pictures"] or "")


def run_block(code: str, links: list[str], page: dict[str, object]) -> None:
    """Run a block; with links, run its last statement once for each theme."""
    tree = ast.parse(code)
    last = tree.body.pop() if links else None
    exec(compile(tree, str(PAGE), "exec"), page)
    for theme, link in zip(("light", "dark"), links, strict=bool(links)):
        themed = ast.parse(ast.unparse(last)).body[0]
        call = themed.value
        assert isinstance(call, ast.Call), code
        options = {"theme": theme, **COLUMN}
        call.keywords += [ast.keyword(name, ast.Constant(value)) for name, value in options.items()]
        path = DOCS / link
        if isinstance(themed, ast.Expr):  # x.draw("a.svg") or bt.draw(x, "a.svg")
            call.args[-1] = ast.Constant(str(path))
        module = ast.fix_missing_locations(ast.Module([themed], []))
        exec(compile(module, str(PAGE), "exec"), page)
        if isinstance(themed, ast.Assign):
            save_plot(page["figure"], path)


def save_plot(figure: object, path: Path) -> None:
    """Write a plot as a PNG with a palette."""
    from PIL import Image

    buffer = io.BytesIO()
    figure.savefig(buffer, dpi=DPI, metadata={"Software": None})  # type: ignore[attr-defined]
    Image.open(buffer).convert("RGB").quantize(COLOURS, dither=Image.Dither.NONE).save(path, optimize=True)


if __name__ == "__main__":
    main()
