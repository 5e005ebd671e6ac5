"""Options of commands from signatures: types and defaults from annotations, help from the `Args:` of docstrings.

Three kinds of signatures become options: that of the command's own function, frozen dataclasses that it takes as
parameters, and functions and configs of the package (`Options`). The last are read from their source by `ast`, because
`--help` must not import torch.
"""

from __future__ import annotations

import ast
import inspect
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import MISSING, dataclass, field, is_dataclass, replace
from functools import cache, cached_property
from importlib import resources
from typing import Any

import click
from click.shell_completion import CompletionItem

from bnet_transformer.errors import BNetError

Count = int  # a whole number of at least 1
SHORT = {"file": "-f", "model": "-m", "out": "-o"}
METAVARS = {"model": "MODEL", "out": "FILE", "do": "NAME=VALUE", "given": "NAME=VALUE", "input": "NAME=VALUE"}
ARGUMENTS = re.compile(r"^ *Args:\n(?P<args>.*?)(?=^ *\w+:\n|^ *>>>|\Z)", re.MULTILINE | re.DOTALL)
ARGUMENT = re.compile(r"^    (?P<name>\w+): (?P<help>.*(?:\n     +.*)*)", re.MULTILINE)


class Numbers(click.ParamType):  # type: ignore[type-arg]  # no parameters in click 8.1
    """Whole numbers with commas between them."""

    name = "numbers"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> list[int]:
        """The numbers of a text."""
        parts = [part.strip() for part in value.split(",")]
        if not all(is_whole(part) for part in parts):
            what = "numbers" if param is None else param.opts[0]
            raise BNetError(what, expected="whole numbers with commas between them", actual=value)
        return [int(part) for part in parts]


class File(click.ParamType):  # type: ignore[type-arg]
    """The name of a file, or (`names`) of something else; a shell completes both."""

    name = "text"

    def __init__(self, *names: str) -> None:
        self.names = names

    def shell_complete(self, ctx: click.Context, param: click.Parameter, incomplete: str) -> list[CompletionItem]:
        """What completes a name that is begun."""
        known = [CompletionItem(name) for name in self.names if name.startswith(incomplete)]
        return [*known, CompletionItem(incomplete, type="file")]


TYPES = {"Count": click.IntRange(min=1), "bool": bool, "int": int, "float": float}
FILES = {"file": File(), "out": File(), "model": File("tiny", "minilm")}


def is_whole(text: str) -> bool:
    """Whether a text is a whole number, of as many digits as can be read."""
    return text.isdecimal() and len(text) <= 1000


@dataclass(frozen=True)
class Parameter:
    """A parameter of a signature: its annotation as text, its default (`MISSING` for none), and what it is for."""

    name: str
    annotation: str
    default: Any = MISSING
    help: str = ""

    def click_type(self) -> Any:
        """The type of its option; of a tuple or list, that of one item."""
        if chosen := re.search(r"Literal\[(.*?)\]", self.annotation):
            return click.Choice(ast.literal_eval(f"[{chosen[1]}]"))
        if "Collection[int]" in self.annotation:
            return Numbers()
        named = (kind for name, kind in TYPES.items() if re.match(rf"{name}\b", self.annotation))
        return next(named, FILES.get(self.name, str))

    def of_click(self, *, is_own: bool, formats: Sequence[str] = ()) -> click.Parameter:
        """The argument of a parameter without a default, the option of one with a default.

        Args:
            is_own: Whether the command itself declares it; of a library function, an option that is not given is None.
            formats: The suffixes that the command writes.
        """
        kind = self.click_type()
        is_multiple = bool(re.search(r"(tuple|Collection|Sequence)\[str", self.annotation))
        if self.default is MISSING:
            settings: dict[str, Any] = {"nargs": -1, "metavar": "[SENTENCE]..."} if is_multiple else {}
            return click.Argument([self.name], type=kind, **settings)
        name = self.name.rstrip("_").replace("_", "-")
        given: dict[str, Any] = {"help": self.help.replace("{formats}", ", ".join(formats)), "default": None}
        if kind is bool:
            both = self.default is True or "None" in self.annotation
            given |= {"is_flag": True, "default": False if is_own and not both else None}
            return click.Option([self.name, f"--{name}/--no-{name}" if both else f"--{name}"], **given)
        if isinstance(self.default, int | float | str):
            given["default"] = self.default if is_own else None
            given["help"] = f"{given['help']} [default: {self.default}]".strip()
        names = [self.name, *([SHORT[name]] if name in SHORT else []), f"--{name}"]
        return click.Option(names, type=kind, multiple=is_multiple, metavar=METAVARS.get(name), **given)


def help_of(docstring: str | None) -> tuple[str, dict[str, str]]:
    """What a docstring says before its sections, and what its `Args:` says of each parameter."""
    text = inspect.cleandoc(docstring or "")
    found = ARGUMENTS.search(text)
    if found is None:
        return text, {}
    told = ARGUMENT.findall(found["args"])
    return text[: found.start()].strip(), {name: " ".join(said.split()).replace("`", "") for name, said in told}


def of_signature(function: Callable[..., Any]) -> list[Parameter]:
    """The parameters of a function, or the fields of a dataclass and of those that it derives from."""
    helps: dict[str, str] = {}
    for kind in reversed(function.__mro__) if isinstance(function, type) else [function]:
        helps |= help_of(kind.__doc__)[1]
    own = inspect.signature(function).parameters.values()
    defaults = {each.name: MISSING if each.default is each.empty else each.default for each in own}
    return [Parameter(p.name, str(p.annotation), defaults[p.name], helps.get(p.name, "")) for p in own]


@cache
def _definitions(file: str) -> dict[str, Any]:
    """The functions and classes of a file of the package by name, as syntax trees."""
    text = resources.files("bnet_transformer").joinpath(file).read_text("utf-8")
    return {n.name: n for n in ast.walk(ast.parse(text)) if isinstance(n, ast.FunctionDef | ast.ClassDef)}


def of_source(file: str, name: str) -> dict[str, Parameter]:
    """The parameters of a function, or the fields of a dataclass and its bases in the file, read from the source.

    Args:
        file: A file of the package, such as `inference/fit/run.py`.
        name: The name of a function, method or class there.
    """
    named = _definitions(file)
    helps = help_of(ast.get_docstring(named[name]))[1]
    found: dict[str, Parameter] = {}
    for own, annotation, default in _declared(named[name], named):
        constant = default.value if isinstance(default, ast.Constant) else None
        found[own] = Parameter(own, ast.unparse(annotation), constant, helps.get(own, ""))
    return found


def _declared(node: Any, named: Mapping[str, Any]) -> Iterator[tuple[str, ast.expr, ast.expr | None]]:
    """Name, annotation and default of each parameter, of each field of a class."""
    if isinstance(node, ast.ClassDef):
        for base in node.bases:
            if isinstance(base, ast.Name) and base.id in named:
                yield from _declared(named[base.id], named)
        for each in node.body:
            if isinstance(each, ast.AnnAssign) and "ClassVar" not in ast.unparse(each.annotation):
                yield ast.unparse(each.target), each.annotation, each.value
        return
    required = [None] * (len(node.args.args) - len(node.args.defaults))
    defaults = [*required, *node.args.defaults, *node.args.kw_defaults]
    for each, default in zip([*node.args.args, *node.args.kwonlyargs], defaults, strict=True):
        if each.annotation is not None:
            yield each.arg, each.annotation, default


@dataclass(frozen=True)
class Options:
    """Options that a command hands on to functions or configs of the package; those that are given come as a mapping.

    Args:
        file: The file of the package that declares them.
        names: Functions or classes there; options of the same name are one.
        only: The options that are handed on; all by default.
        note: What stands before the help of each.
        defaults: Defaults of the command in place of the library's.
    """

    file: str
    names: tuple[str, ...]
    only: tuple[str, ...] = ()
    note: str = ""
    defaults: Mapping[str, Any] = field(default_factory=dict)

    def parameters(self) -> list[Parameter]:
        """The parameters, in the order of `only`, or of the signatures."""
        known: dict[str, Parameter] = {}
        for name in self.names:
            known = of_source(self.file, name) | known
        chosen = [known[name] for name in self.only or known]
        return [
            replace(p, default=self.defaults.get(p.name, p.default), help=(self.note + p.help).strip()) for p in chosen
        ]


class Derived(click.Command):
    """A command whose parameters are those of its function: arguments (no default) and options (a default).

    A parameter that is annotated with a frozen dataclass stands for its fields; one named in `handed_on` is the mapping
    of those options that were given. It is the `cls` of `click.command`, which gives it all but the last two.

    Args:
        name: The name of the command.
        callback: The function that it calls.
        params: None: those of a command that click declares.
        help: The docstring of the function.
        short_help: What the group says of it.
        formats: The suffixes of the files that it writes.
        **handed_on: For a parameter of the function, the options of the package that it takes.
    """

    def __init__(
        self,
        name: str,
        callback: Callable[..., None],
        params: Sequence[click.Parameter],
        help: str,
        short_help: str,
        formats: Sequence[str] = (),
        **handed_on: Sequence[Options],
    ) -> None:
        super().__init__(name, callback=self.call, params=list(params), help=help_of(help)[0], short_help=short_help)
        self.function, self.formats, self.handed_on = callback, formats, handed_on

    @cached_property
    def groups(self) -> dict[str, tuple[Callable[..., Any], list[Parameter]]]:
        """For each parameter of the function: what makes its value, and the parameters that it is made of."""
        groups: dict[str, tuple[Callable[..., Any], list[Parameter]]] = {}
        for own in of_signature(self.function):
            kind = self.function.__globals__.get(own.annotation)
            if own.name in self.handed_on:
                handed_on = [each for options in self.handed_on[own.name] for each in options.parameters()]
                groups[own.name] = _given, handed_on
            elif isinstance(kind, type) and is_dataclass(kind):
                groups[own.name] = kind, of_signature(kind)
            else:
                groups[own.name] = _only, [own]
        return groups

    @cached_property
    def derived(self) -> list[click.Parameter]:
        """The arguments and options; made when the command is used, not when the group lists it."""
        return [
            each.of_click(is_own=make is not _given, formats=self.formats)
            for make, parameters in self.groups.values()
            for each in parameters
            if each.name != "formats"
        ]

    def get_params(self, ctx: click.Context) -> list[click.Parameter]:
        return [*self.derived, *super().get_params(ctx)]

    def call(self, **values: Any) -> None:
        """Call the function with the values of the options, grouped as its parameters are."""
        values["formats"] = self.formats
        groups = self.groups.items()
        self.function(
            **{own: make(**{each.name: values[each.name] for each in inside}) for own, (make, inside) in groups}
        )


def _only(**value: Any) -> Any:
    """The value of the one parameter that there is."""
    return next(iter(value.values()))


def _given(**options: Any) -> dict[str, Any]:
    """The options that were given."""
    return {name: value for name, value in options.items() if value not in (None, ())}
