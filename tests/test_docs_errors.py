"""`docs/errors.md` has a row for every message: each place in the package that makes an error is read by `ast`.

A message is `what: expected this`. What is computed stands as `…`, in what is read here and on the page. A name is
followed to what is assigned to it, and a parameter to what callers pass: a helper's messages are those of its callers.
"""

from __future__ import annotations

import ast
import itertools
import re
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import bnet_transformer

PACKAGE = Path(bnet_transformer.__file__).parent
PAGE = PACKAGE.parent / "docs" / "errors.md"
HOLE = "…"
KINDS = {"BNetError", "UnknownNameError", "EvidenceError", "ReadingError", "BudgetError", "FileError", "Fault"}
KINDS |= {"DisagreementError"}
Function = ast.FunctionDef | ast.AsyncFunctionDef
DEPTH = 4  # names of names, helpers of helpers


class Room:
    """One file: its tree, its calls, what is assigned and imported at its top."""

    def __init__(self, path: Path) -> None:
        self.path, self.tree = path, ast.parse(path.read_text(encoding="utf-8"))
        self.imported: dict[str, str] = {}
        self.scopes: dict[ast.Call, Function | None] = {}  # of each call the function that it stands in
        todo: list[tuple[ast.AST, Function | None]] = [(self.tree, None)]
        while todo:
            node, scope = todo.pop()
            if isinstance(node, ast.ImportFrom) and node.module:
                self.imported |= {each.asname or each.name: node.module for each in node.names}
            elif isinstance(node, ast.Call):
                self.scopes[node] = scope
            elif isinstance(node, Function):
                scope = node
            todo += [(below, scope) for below in ast.iter_child_nodes(node)]

    @cache  # noqa: B019 (rooms live as long as the test)
    def assignments(self, scope: Function | None) -> dict[str, list[ast.expr]]:
        """All that is assigned to names in a function, or at the top of the room."""
        found: dict[str, list[ast.expr]] = {}
        for node in ast.walk(scope) if scope else self.tree.body:
            if isinstance(node, ast.AnnAssign) and node.value is not None:
                pairs = [(node.target, node.value)]
            elif isinstance(node, ast.Assign):
                pairs = [(target, node.value) for target in node.targets]
            else:
                continue
            for target, value in pairs:
                if isinstance(target, ast.Tuple) and isinstance(value, ast.Tuple):
                    pairs += zip(target.elts, value.elts, strict=True)
                elif isinstance(target, ast.Name):
                    found.setdefault(target.id, []).append(value)
        return found

    def assigned(self, name: str, scope: Function | None) -> list[ast.expr]:
        return self.assignments(scope).get(name, [])


@cache
def rooms() -> tuple[Room, ...]:
    return tuple(Room(path) for path in sorted(PACKAGE.rglob("*.py")))


def called(node: ast.Call) -> str | None:
    return node.func.id if isinstance(node.func, ast.Name) else getattr(node.func, "attr", None)


def texts(
    node: ast.expr | None, room: Room, scope: Function | None, depth: int = DEPTH, within: frozenset[str] = frozenset()
) -> set[str]:
    """What an expression may say, with a hole for what is computed; `within` are names that are being followed."""

    def again(each: ast.expr) -> set[str]:
        return texts(each, room, scope, depth, within)

    match node:
        case ast.Constant(value=str(value)):
            return {value}
        case ast.JoinedStr(values=parts):
            said = [again(part.value) if isinstance(part, ast.FormattedValue) else again(part) for part in parts]
            return {re.sub(f"{HOLE}+", HOLE, "".join(each)) for each in itertools.product(*said)}
        case ast.IfExp(body=one, orelse=other):
            return again(one) | again(other)
        case ast.BinOp(op=ast.Add(), left=left, right=right):
            return {one + other for one in again(left) for other in again(right)}
        case ast.BoolOp(values=values):
            return set().union(*map(again, values))
        case ast.Subscript(value=ast.Name(id=name)) if depth and isinstance(
            table := next(iter(room.assigned(name, None)), None), ast.Dict
        ):
            return set().union(*(texts(value, room, None, depth - 1) for value in table.values))
        case ast.Name(id=name) if depth and name not in within:
            return _named(name, room, scope, depth, within | {name})
    return {HOLE}


def _named(name: str, room: Room, scope: Function | None, depth: int, within: frozenset[str]) -> set[str]:
    values = room.assigned(name, scope) if scope else []
    found = set().union(*(texts(value, room, scope, depth - 1, within) for value in values))
    parameters = [] if scope is None else [*scope.args.posonlyargs, *scope.args.args, *scope.args.kwonlyargs]
    if scope and name in [each.arg for each in parameters]:
        return found | _passed(name, scope, depth)
    if not found:
        found = set().union(*(texts(value, room, None, depth - 1) for value in room.assigned(name, None)))
    if not found and name in room.imported:
        home = [each for each in rooms() if _module(each.path) == room.imported[name]]
        found = set().union(*(_named(name, each, None, depth - 1, within) for each in home))
    return found or {HOLE}


def _module(path: Path) -> str:
    return ".".join(path.relative_to(PACKAGE.parent).with_suffix("").parts).removesuffix(".__init__")


@cache
def calls() -> dict[str, list[tuple[Room, ast.Call]]]:
    found: dict[str, list[tuple[Room, ast.Call]]] = {}
    for room in rooms():
        for node in room.scopes:
            if name := called(node):
                found.setdefault(name, []).append((room, node))
    return found


def _passed(name: str, function: Function, depth: int) -> set[str]:
    """What callers pass for a parameter, and its default."""
    args = [each.arg for each in (*function.args.posonlyargs, *function.args.args) if each.arg not in ("self", "cls")]
    found: set[str] = set()
    for room, call in calls().get(function.name, []) if depth > 1 else []:
        given = {key.arg: key.value for key in call.keywords} | dict(zip(args, call.args, strict=False))
        if name in given:
            found |= texts(given[name], room, room.scopes[call], depth - 1)
    return found or {HOLE}


@cache
def sites() -> dict[str, str]:
    """Each message that the package makes, and a place that makes it."""
    found = {}
    for name in KINDS:
        for room, call in calls().get(name, []):
            given = {key.arg: key.value for key in call.keywords}
            names = ("node", "expected", "got") if name == "Fault" else ("what",)
            given |= dict(zip(names, call.args, strict=False))
            if "expected" not in given:
                continue
            scope = room.scopes[call]
            what, expected = texts(given.get(names[0]), room, scope, 1), texts(given["expected"], room, scope)
            for one, other in itertools.product(what, expected - {HOLE}):  # what is only known when it is said
                found[f"{one}: expected {other}"] = f"{room.path.relative_to(PACKAGE)}, line {call.lineno}"
    return found


def rows() -> Iterator[str]:
    """The messages of the page: code in the first cell of a row."""
    for line in PAGE.read_text(encoding="utf-8").splitlines():
        if line.startswith("| `"):
            first = re.split(r"(?<!\\)\|", line)[1].replace("\\|", "|")
            codes = (one or other for one, other in re.findall(r"``(.+?)``|`(.+?)`", first))
            yield from (each.strip() for each in codes if ": expected " in each)


def letters(message: str) -> int:
    return len(re.findall("[a-z]", message.split(": expected ", 1)[1]))


def matching(row: str) -> list[str]:
    """The messages that a row is of: those that it fits, and of which it says a third at least."""
    fits = re.compile(".*".join(map(re.escape, row.split(HOLE))), re.DOTALL)
    return [message for message in sites() if fits.fullmatch(message) and 3 * letters(row) >= letters(message)]


def test_every_message_has_a_row_and_every_row_a_message():
    found = {row: matching(row) for row in rows()}
    lacking = sites().keys() - set().union(*found.values())
    said = [f"{message}  ({sites()[message]})" for message in sorted(lacking)]
    assert not lacking, "\n".join(["docs/errors.md has no row for these messages:", *said])
    stale = [row for row, messages in found.items() if not messages]
    assert not stale, "\n".join(["no message of the package is like these rows of docs/errors.md:", *stale])


def test_rows_say_what_is_expected():
    told = list(rows())
    assert len(told) == len(set(told)), sorted({row for row in told if told.count(row) > 1})
    assert not [row for row in told if not row.split(": expected ", 1)[1].strip(HOLE)]


def test_what_is_read_is_what_is_raised():
    assert "slice: expected a slice from 0 to …" in sites()  # as it stands
    assert "…: expected a whole number of at least …" in sites()  # of a helper
    assert "…: expected a vector of width … (the residual is added)" in sites()  # what callers pass on
    assert len(sites()) > 700
