"""Report the phrases of `docs/style.md` in pages, docstrings, comments and messages; or count them.

    python .ci/check_prose.py            list them, with their lines
    python .ci/check_prose.py --count    count them and the words of check_names.py, by kind of text
    python .ci/check_prose.py --count --against FOLDER

Code, quotations and the word list itself are not checked. The first column of the table of `docs/style.md` is the list.
"""

from __future__ import annotations

import argparse
import ast
import io
import json
import re
import sys
import tokenize
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

from check_names import FOLDERS, iter_refused_names, list_code_files

ROOT = Path(__file__).resolve().parents[1]
STYLE = Path("docs/style.md")
KINDS = ("identifiers", "docstrings", "comments", "messages", "pages")
_CODE = re.compile(r"^(```|~~~).*?^\1|`[^`]*`|\$\$.*?\$\$|\]\([^)]*\)|https?://\S+", re.MULTILINE | re.DOTALL)
_QUOTED = re.compile(r"\"[^\"\n]*(?:\n[^\"\n]+)?\"|“[^”]*”|^>.*$", re.MULTILINE)
_EXAMPLE = re.compile(r"^ *>>> .*?(?=^\s*$|\Z)", re.MULTILINE | re.DOTALL)


def read_phrases(text: str) -> list[str]:
    """The phrases of the first column of the word list.

    >>> read_phrases("| not | but |\\n|---|---|\\n| is told, hangs on | depends on |")
    ['is told', 'hangs on']
    """
    rows = text.partition("| not | but |\n|---|---|\n")[2].splitlines()
    return [phrase.strip() for row in rows for phrase in row.split("|")[1].split(",")]


def compile_phrases(phrases: list[str]) -> re.Pattern[str]:
    """A pattern that finds any of the phrases as whole words, also across a line break."""
    longest_first = sorted(phrases, key=len, reverse=True)
    alternatives = "|".join(phrase.replace(" ", r"\s+") for phrase in longest_first)
    return re.compile(rf"\b(?:{alternatives})\b", re.IGNORECASE)


def blank(text: str, *patterns: re.Pattern[str]) -> str:
    """The text with what matches a pattern replaced by spaces; lines keep their numbers."""
    for pattern in patterns:
        text = pattern.sub(lambda match: re.sub(r"[^\n]", " ", match[0]), text)
    return text


def iter_python_texts(source: str, messages: bool) -> Iterator[tuple[str, int, str]]:
    """The docstrings, comments and, on request, the other strings of Python code: kind, first line, text."""
    docstrings = set()
    tree = ast.parse(source)
    for node in ast.walk(tree):
        is_documented = isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef)
        if is_documented and ast.get_docstring(node, clean=False) is not None:
            constant = node.body[0].value
            docstrings.add(id(constant))
            yield "docstrings", constant.lineno, blank(constant.value, _EXAMPLE)
    for node in ast.walk(tree):
        is_text = isinstance(node, ast.Constant) and isinstance(node.value, str) and id(node) not in docstrings
        if messages and is_text and " " in node.value:  # a string without a space is a key or a name
            yield "messages", node.lineno, node.value
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if token.type == tokenize.COMMENT:
            yield "comments", token.start[0], token.string


def iter_texts(root: Path) -> Iterator[tuple[Path, str, int, str]]:
    """Every text of the project that is checked: its file, kind, first line and content."""
    for folder in FOLDERS:
        for path in sorted((root / folder).rglob("*")):
            if path.suffix == ".py":
                for kind, line, text in iter_python_texts(path.read_text("utf-8"), folder == "bnet_transformer"):
                    yield path, kind, line, text
            elif path.suffix == ".ipynb":
                for cell in json.loads(path.read_text("utf-8"))["cells"]:
                    if cell["cell_type"] == "markdown":
                        yield path, "pages", 1, "".join(cell["source"])
    for path in sorted([*root.glob("*.md"), *(root / "docs").rglob("*.md")]):
        if path.relative_to(root) != STYLE:
            yield path, "pages", 1, path.read_text("utf-8")


def iter_phrases(root: Path, pattern: re.Pattern[str]) -> Iterator[tuple[Path, str, int, str]]:
    """Each phrase of the list in the texts of a project: its file, kind, line and the phrase."""
    for path, kind, first, text in iter_texts(root):
        checked = blank(text, _CODE, _QUOTED)
        for match in pattern.finditer(checked):
            yield path, kind, first + checked.count("\n", 0, match.start()), " ".join(match[0].split())


def count_words(root: Path, pattern: re.Pattern[str]) -> dict[str, int]:
    """The number of listed words in identifiers and of listed phrases in each kind of text."""
    counts = Counter(kind for _, kind, _, _ in iter_phrases(root, pattern))
    counts["identifiers"] = sum(1 for path in list_code_files(root, FOLDERS) for _ in iter_refused_names(path, root))
    return {kind: counts[kind] for kind in KINDS}


def main(argv: list[str] | None = None) -> int:
    """List the phrases, or print their numbers."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--count", action="store_true", help="count the phrases")
    parser.add_argument("--against", type=Path, metavar="FOLDER", help="count those of another checkout too")
    parser.add_argument("--only", metavar="TEXT", default="", help="list only files whose path contains this")
    args = parser.parse_args(argv)
    pattern = compile_phrases(read_phrases((ROOT / STYLE).read_text("utf-8")))
    if args.count:
        before = count_words(args.against, pattern) if args.against else {}
        for kind, count in count_words(ROOT, pattern).items():
            print(f"{kind:12}{count:8,}" + (f"   before {before[kind]:8,}" if before else ""))
        return 0
    matches = [row for row in iter_phrases(ROOT, pattern) if args.only in str(row[0])]
    for path, _, line, phrase in matches:
        print(f"{path.relative_to(ROOT)}:{line}: {phrase!r}: docs/style.md has a better phrase")
    return bool(matches)


if __name__ == "__main__":
    sys.exit(main())
