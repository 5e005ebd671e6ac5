"""Report everyday words in identifiers, class names that occur twice, and modules named by such a word.

    python .ci/check_names.py            of the whole project
    python .ci/check_names.py FOLDER...  of these folders

A name is the term of the field for which a reader would search. The words below describe an action on a value ("found",
"kept") and not the value. Names of test functions are sentences, and are not checked.
"""

from __future__ import annotations

import ast
import json
import re
import sys
from collections import defaultdict
from collections.abc import Iterable, Iterator
from pathlib import Path

EVERYDAY = """
alike alone anything apart ask asked asking bare begun beside climb drawn each everything far few found gone
good got held here hears judged keeps kept late lead leads least listen look looks lost made many met mine most
much near nothing once others ours own owns place placed places rest rise room said saying seen settle settled
settling several some sound stand stands stay stays strange stranger strangers tall teller telling tells theirs
there thing things tired together told turns unseen untaken untold want wanted wants way ways what whole who
whose why wide widest worth
"""
WORDS = frozenset(EVERYDAY.split())
# Identifiers that contain such a word, because it is the technical term or because users type it.
ALLOWED = {
    "held_out": "data that training does not use",
    "most_probable": "the most probable explanation (MPE)",
    "want": "the public argument of modules and costs",
}
# The same in one file: names of other libraries, public fields and commands.
ALLOWED_IN = {
    "bnet_transformer/cli/questions.py": {"ask"},  # a command
    "bnet_transformer/serve/server.py": {"connection_made", "connection_lost"},  # methods of asyncio.Protocol
    "bnet_transformer/tpm/base.py": {"wide"},  # a field of Patches, stored in saved nets
}
JAVASCRIPT = frozenset(("forEach", "some"))  # methods of JavaScript's arrays
FOLDERS = ("bnet_transformer", "tests", "benchmarks", "experiments", "docs/scripts", "notebooks", ".ci")
_PARTS = re.compile(r"[A-Z]+(?![a-z])|[A-Z]?[a-z]+")
_JS_SKIPPED = re.compile(r"/\*.*?\*/|//[^\n]*|\"(?:\\.|[^\"\\\n])*\"|'(?:\\.|[^'\\\n])*'", re.DOTALL)
_JS_NAMES = re.compile(r"[A-Za-z_$][\w$]*")


def split_words(identifier: str) -> list[str]:
    """The words of an identifier in snake or camel case.

    >>> split_words("_NodeGroup"), split_words("kv_cache")
    (['node', 'group'], ['kv', 'cache'])
    """
    return [part.lower() for part in _PARTS.findall(identifier)]


def find_refused_words(identifier: str) -> list[str]:
    """The words of an identifier that are not allowed; words that an allowed name covers are not."""
    for allowed in ALLOWED:
        identifier = re.sub(rf"(?<![a-zA-Z]){allowed}(?![a-z])", "", identifier, flags=re.IGNORECASE)
    return [word for word in split_words(identifier) if word in WORDS]


def iter_defined_names(tree: ast.AST) -> Iterator[tuple[int, str]]:
    """The identifiers that Python code defines, with their lines."""
    for node in ast.walk(tree):
        match node:
            case ast.FunctionDef(name=name) | ast.AsyncFunctionDef(name=name):
                if not name.startswith("test_"):
                    yield node.lineno, name
            case ast.ClassDef(name=name):
                yield node.lineno, name
            case ast.arg(arg=name):
                yield node.lineno, name
            case ast.Name(id=name, ctx=ast.Store()):
                yield node.lineno, name
            case ast.Attribute(attr=name, ctx=ast.Store(), value=ast.Name(id="self" | "cls")):
                yield node.lineno, name
            case ast.alias(asname=str(name)):
                yield node.lineno, name
            case ast.ExceptHandler(name=str(name)) | ast.MatchAs(name=str(name)) | ast.MatchStar(name=str(name)):
                yield node.lineno, name


def iter_javascript_code(text: str) -> Iterator[tuple[int, str]]:
    """The characters of JavaScript outside of comments, strings and the text of templates, with their positions."""
    position, stack = 0, [""]  # what is open, innermost last: a template "`", a placeholder "$", a brace "{"
    while position < len(text):
        character = text[position]
        if stack[-1] == "`":
            if text.startswith("${", position):
                stack.append("$")
                position += 1
            elif character == "`":
                stack.pop()
            position += 2 if character == "\\" else 1
            continue
        if skipped := _JS_SKIPPED.match(text, position):
            position = skipped.end()
            continue
        if character in "`{":
            stack.append(character)
        elif character == "}":
            stack.pop()
        yield position, character if character != "`" else " "
        position += 1


def iter_javascript_names(text: str) -> Iterator[tuple[int, str]]:
    """All identifiers of JavaScript, with their lines."""
    code = [character if character == "\n" else " " for character in text]
    for position, character in iter_javascript_code(text):
        code[position] = character
    for number, line in enumerate("".join(code).split("\n"), 1):
        for match in _JS_NAMES.finditer(line):
            if match[0] not in JAVASCRIPT:
                yield number, match[0]


def read_code(path: Path) -> str:
    """The code of a file; of a notebook, that of its cells, without magics."""
    text = path.read_text(encoding="utf-8")
    if path.suffix != ".ipynb":
        return text
    cells = ["".join(cell["source"]) for cell in json.loads(text)["cells"] if cell["cell_type"] == "code"]
    return "\n".join(line for cell in cells for line in cell.splitlines() if not line.lstrip().startswith(("%", "!")))


def list_code_files(root: Path, folders: Iterable[str]) -> list[Path]:
    """The Python and JavaScript files and the notebooks in folders of a checkout."""
    paths = [path for folder in folders for path in sorted((root / folder).rglob("*"))]
    return [p for p in paths if p.suffix in (".py", ".js", ".ipynb") and ".ipynb_checkpoints" not in p.parts]


def iter_refused_names(path: Path, root: Path = Path()) -> Iterator[tuple[int, str]]:
    """The identifiers of a file of a checkout that contain a word of the list, with their lines."""
    code = read_code(path)
    names = iter_javascript_names(code) if path.suffix == ".js" else iter_defined_names(ast.parse(code))
    allowed = ALLOWED_IN.get(path.as_posix().removeprefix(f"{root.as_posix()}/"), ())
    return ((line, name) for line, name in names if name not in allowed and find_refused_words(name))


def check_file(path: Path) -> Iterator[str]:
    """The faults of the names in a file, one line each."""
    stem = "" if path.suffix == ".ipynb" else path.stem.removeprefix("test_")
    for word in find_refused_words(stem):
        yield f"{path}: module named by {word!r}"
    for line, name in sorted(set(iter_refused_names(path))):
        for word in find_refused_words(name):
            yield f"{path}:{line}: {word!r} in {name}"


def find_repeated_classes(package: Path) -> Iterator[str]:
    """Class names of the package that are defined more than once."""
    lines = defaultdict(list)
    for path in sorted(package.rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.ClassDef):
                lines[node.name.lstrip("_")].append(f"{path}:{node.lineno}")
    for name, definitions in sorted(lines.items()):
        if len(definitions) > 1:
            yield f"class {name} is defined {len(definitions)} times: {', '.join(definitions)}"


def main(folders: list[str]) -> int:
    """Print every fault, and how many there are; the exit status is 1 if there is one."""
    faults = [fault for path in list_code_files(Path(), folders) for fault in check_file(path)]
    faults += find_repeated_classes(Path("bnet_transformer"))
    if faults:
        print(*faults, f"{len(faults)} names to change", sep="\n")
    return bool(faults)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:] or list(FOLDERS)))
