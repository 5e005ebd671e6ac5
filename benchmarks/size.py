"""Line counts of each part of the package, of the tests, of the pages and of the page's script.

    python -m benchmarks.size [--against FOLDER] [--check] [--write-limits]

Lines of code and blank lines count. Docstrings and comment lines do not, because these should grow. Pages (Markdown in
`docs/`, the README, the CHANGELOG and CONTRIBUTING) count as a whole. With `--against`, the script also counts another
checkout and prints the ratio. `--check` compares the package with the limits of `ratchet.json`: its lines and files,
its circles of imports and its public names.
"""

from __future__ import annotations

import argparse
import ast
import io
import tokenize
from collections import Counter
from collections.abc import Sequence
from pathlib import Path

from benchmarks.ratchet import check_figures, count_public_names, find_circles

ROOT = Path(__file__).resolve().parent.parent
DOCUMENTED = ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef


def count_code_lines(source: str) -> int:
    """Count the lines of Python source, without docstrings and comment lines.

    >>> count_code_lines('def f():\\n    \"\"\"Return 1.\"\"\"\\n    # the one\\n    return 1\\n')
    2
    """
    skipped: set[int] = set()
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, DOCUMENTED) and ast.get_docstring(node, clean=False) is not None:
            skipped.update(range(node.body[0].lineno, (node.body[0].end_lineno or 0) + 1))
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if token.type == tokenize.COMMENT and token.line.strip().startswith("#"):
            skipped.add(token.start[0])
    return len(source.splitlines()) - len(skipped)


def count_lines(root: Path) -> dict[str, int]:
    """Count the lines of a checkout.

    Args:
        root: The folder that contains `bnet_transformer`, `tests` and `docs`.

    Returns:
        The number of lines of each part of the package, and of the sums.
    """
    package, parts = root / "bnet_transformer", Counter[str]()
    for path in package.rglob("*.py"):
        first, *inner = path.relative_to(package).parts
        parts[f"package: {first}" if inner else "package: its modules"] += count_code_lines(
            path.read_text(encoding="utf-8")
        )
    script = [path for path in package.rglob("*") if path.suffix in (".js", ".css", ".html")]
    pages = [*(root / "docs").rglob("*.md"), *(root / f"{name}.md" for name in ("README", "CHANGELOG", "CONTRIBUTING"))]
    tests = (root / "tests").rglob("*.py")
    return {
        **dict(sorted(parts.items(), key=lambda item: -item[1])),
        "package": parts.total(),
        "tests": sum(count_code_lines(path.read_text(encoding="utf-8")) for path in tests),
        "pages": sum(len(path.read_text(encoding="utf-8").splitlines()) for path in pages),
        "script of the page": sum(len(path.read_text(encoding="utf-8").splitlines()) for path in script),
        "files of the package": sum(1 for _ in package.rglob("*.py")),
    }


def main(argv: Sequence[str] | None = None) -> int:
    """Count the lines and print them."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.size", description=__doc__)
    parser.add_argument("--against", type=Path, metavar="FOLDER", help="also count another checkout")
    parser.add_argument("--check", action="store_true", help="fail if a figure is over its limit")
    parser.add_argument("--write-limits", action="store_true", help="lower the limits to the figures, then check")
    args = parser.parse_args(argv)
    current = count_lines(ROOT)
    if args.check or args.write_limits:
        circles = find_circles()
        for circle in circles:
            print("circle of imports:", *circle)
        figures = {name: n for name, n in current.items() if "package" in name} | {"circles of imports": len(circles)}
        return check_figures("size", figures | count_public_names(), args.write_limits)
    before = count_lines(args.against) if args.against else {}
    for name in [*current, *(name for name in before if name not in current)]:
        lines, old = current.get(name, 0), before.get(name)
        print(f"{name:28}{lines:8,}" + (f"   before {old:8,}   ratio {lines / old:.2f}" if old else ""))
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
