"""Options of commands from signatures: types and defaults from annotations, help from the `Args:` of docstrings.

Three kinds of signatures become options: that of the command's own function, frozen dataclasses that it takes as
parameters, and functions and configs of the package (`ForwardedOptions`). The last are read from their source by `ast`, because
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
SHORT_OPTIONS = {"file": "-f", "model": "-m", "out": "-o"}
METAVARS = {"model": "MODEL", "out": "FILE", "do": "NAME=VALUE", "given": "NAME=VALUE", "input": "NAME=VALUE"}
ARGS_SECTION_PATTERN = re.compile(r"^ *Args:\n(?P<args>.*?)(?=^ *\w+:\n|^ *>>>|\Z)", re.MULTILINE | re.DOTALL)
ARG_PATTERN = re.compile(r"^    (?P<name>\w+): (?P<help>.*(?:\n     +.*)*)", re.MULTILINE)


class IntegerList(click.ParamType):  # type: ignore[type-arg]  # no parameters in click 8.1
    """Whole numbers with commas between them."""

    name = "numbers"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> list[int]:
        """The numbers of a text."""
        parts = [part.strip() for part in value.split(",")]
        if not all(is_integer(part) for part in parts):
            what = "numbers" if param is None else param.opts[0]
            raise BNetError(what, expected="whole numbers with commas between them", actual=value)
        return [int(part) for part in parts]


class FileName(click.ParamType):  # type: ignore[type-arg]
    """The name of a file, or (`names`) of something else; a shell completes both."""

    name = "text"

    def __init__(self, *names: str) -> None:
        self.names = names

    def shell_complete(self, ctx: click.Context, param: click.Parameter, incomplete: str) -> list[CompletionItem]:
        """What completes a name that is begun."""
        known = [CompletionItem(name) for name in self.names if name.startswith(incomplete)]
        return [*known, CompletionItem(incomplete, type="file")]


CLICK_TYPES = {"Count": click.IntRange(min=1), "bool": bool, "int": int, "float": float}
FILE_NAME_TYPES = {"file": FileName(), "out": FileName(), "model": FileName("tiny", "minilm")}


def is_integer(text: str) -> bool:
    """Whether a text is a whole number, of as many digits as can be read."""
    return text.isdecimal() and len(text) <= 1000


@dataclass(frozen=True)
class SignatureParameter:
    """A parameter of a signature: its annotation as text, its default (`MISSING` for none), and what it is for."""

    name: str
    annotation: str
    default: Any = MISSING
    help: str = ""

    def get_click_type(self) -> Any:
        """The type of its option; of a tuple or list, that of one item."""
        if chosen := re.search(r"Literal\[(.*?)\]", self.annotation):
            return click.Choice(ast.literal_eval(f"[{chosen[1]}]"))
        if "Collection[int]" in self.annotation:
            return IntegerList()
        named = (kind for name, kind in CLICK_TYPES.items() if re.match(rf"{name}\b", self.annotation))
        return next(named, FILE_NAME_TYPES.get(self.name, str))

    def to_click(self, *, is_command: bool, formats: Sequence[str] = ()) -> click.Parameter:
        """The argument of a parameter without a default, the option of one with a default.

        Args:
            is_command: Whether the command itself declares it; of a library function, an option that is not given is None.
            formats: The suffixes that the command writes.
        """
        kind = self.get_click_type()
        is_multiple = bool(re.search(r"(tuple|Collection|Sequence)\[str", self.annotation))
        if self.default is MISSING:
            settings: dict[str, Any] = {"nargs": -1, "metavar": "[SENTENCE]..."} if is_multiple else {}
            return click.Argument([self.name], type=kind, **settings)
        name = self.name.rstrip("_").replace("_", "-")
        given: dict[str, Any] = {"help": self.help.replace("{formats}", ", ".join(formats)), "default": None}
        if kind is bool:
            both = self.default is True or "None" in self.annotation
            given |= {"is_flag": True, "default": False if is_command and not both else None}
            return click.Option([self.name, f"--{name}/--no-{name}" if both else f"--{name}"], **given)
        if isinstance(self.default, int | float | str):
            given["default"] = self.default if is_command else None
            given["help"] = f"{given['help']} [default: {self.default}]".strip()
        names = [self.name, *([SHORT_OPTIONS[name]] if name in SHORT_OPTIONS else []), f"--{name}"]
        return click.Option(names, type=kind, multiple=is_multiple, metavar=METAVARS.get(name), **given)


def parse_docstring(docstring: str | None) -> tuple[str, dict[str, str]]:
    """What a docstring says before its sections, and what its `Args:` says of each parameter."""
    text = inspect.cleandoc(docstring or "")
    found = ARGS_SECTION_PATTERN.search(text)
    if found is None:
        return text, {}
    told = ARG_PATTERN.findall(found["args"])
    return text[: found.start()].strip(), {name: " ".join(said.split()).replace("`", "") for name, said in told}


def read_signature(function: Callable[..., Any]) -> list[SignatureParameter]:
    """The parameters of a function, or the fields of a dataclass and of those that it derives from."""
    helps: dict[str, str] = {}
    for kind in reversed(function.__mro__) if isinstance(function, type) else [function]:
        helps |= parse_docstring(kind.__doc__)[1]
    own = inspect.signature(function).parameters.values()
    defaults = {each.name: MISSING if each.default is each.empty else each.default for each in own}
    return [SignatureParameter(p.name, str(p.annotation), defaults[p.name], helps.get(p.name, "")) for p in own]


@cache
def _parse_definitions(file: str) -> dict[str, Any]:
    """The functions and classes of a file of the package by name, as syntax trees."""
    text = resources.files("bnet_transformer").joinpath(file).read_text("utf-8")
    return {n.name: n for n in ast.walk(ast.parse(text)) if isinstance(n, ast.FunctionDef | ast.ClassDef)}


def read_source_signature(file: str, name: str) -> dict[str, SignatureParameter]:
    """The parameters of a function, or the fields of a dataclass and its bases in the file, read from the source.

    Args:
        file: A file of the package, such as `inference/fit/run.py`.
        name: The name of a function, method or class there.
    """
    named = _parse_definitions(file)
    helps = parse_docstring(ast.get_docstring(named[name]))[1]
    found: dict[str, SignatureParameter] = {}
    for own, annotation, default in _iterate_parameters(named[name], named):
        constant = default.value if isinstance(default, ast.Constant) else None
        found[own] = SignatureParameter(own, ast.unparse(annotation), constant, helps.get(own, ""))
    return found


def _iterate_parameters(node: Any, definitions: Mapping[str, Any]) -> Iterator[tuple[str, ast.expr, ast.expr | None]]:
    """Name, annotation and default of each parameter, of each field of a class."""
    if isinstance(node, ast.ClassDef):
        for base in node.bases:
            if isinstance(base, ast.Name) and base.id in definitions:
                yield from _iterate_parameters(definitions[base.id], definitions)
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
class ForwardedOptions:
    """Options that a command hands on to functions or configs of the package; those that are given come as a mapping.

    Args:
        file: The file of the package that declares them.
        names: Functions or classes there; options of the same name are one.
        only: The options that are handed on; all by default.
        help_prefix: What stands before the help of each.
        defaults: Defaults of the command in place of the library's.
    """

    file: str
    names: tuple[str, ...]
    only: tuple[str, ...] = ()
    help_prefix: str = ""
    defaults: Mapping[str, Any] = field(default_factory=dict)

    def read_parameters(self) -> list[SignatureParameter]:
        """The parameters, in the order of `only`, or of the signatures."""
        known: dict[str, SignatureParameter] = {}
        for name in self.names:
            known = read_source_signature(self.file, name) | known
        chosen = [known[name] for name in self.only or known]
        return [
            replace(p, default=self.defaults.get(p.name, p.default), help=(self.help_prefix + p.help).strip())
            for p in chosen
        ]


class SignatureCommand(click.Command):
    """A command whose parameters are those of its function: arguments (no default) and options (a default).

    A parameter that is annotated with a frozen dataclass stands for its fields; one named in `forwarded` is the mapping
    of those options that were given. It is the `cls` of `click.command`, which gives it all but the last two.

    Args:
        name: The name of the command.
        callback: The function that it calls.
        params: None: those of a command that click declares.
        help: The docstring of the function.
        short_help: What the group says of it.
        formats: The suffixes of the files that it writes.
        **forwarded: For a parameter of the function, the options of the package that it takes.
    """

    def __init__(
        self,
        name: str,
        callback: Callable[..., None],
        params: Sequence[click.Parameter],
        help: str,
        short_help: str,
        formats: Sequence[str] = (),
        **forwarded: Sequence[ForwardedOptions],
    ) -> None:
        super().__init__(
            name, callback=self.call_function, params=list(params), help=parse_docstring(help)[0], short_help=short_help
        )
        self.function, self.formats, self.forwarded = callback, formats, forwarded

    @cached_property
    def parameter_groups(self) -> dict[str, tuple[Callable[..., Any], list[SignatureParameter]]]:
        """For each parameter of the function: what makes its value, and the parameters that it is made of."""
        groups: dict[str, tuple[Callable[..., Any], list[SignatureParameter]]] = {}
        for own in read_signature(self.function):
            kind = self.function.__globals__.get(own.annotation)
            if own.name in self.forwarded:
                handed_on = [each for options in self.forwarded[own.name] for each in options.read_parameters()]
                groups[own.name] = _get_given_options, handed_on
            elif isinstance(kind, type) and is_dataclass(kind):
                groups[own.name] = kind, read_signature(kind)
            else:
                groups[own.name] = _get_single_value, [own]
        return groups

    @cached_property
    def click_parameters(self) -> list[click.Parameter]:
        """The arguments and options; made when the command is used, not when the group lists it."""
        return [
            each.to_click(is_command=make is not _get_given_options, formats=self.formats)
            for make, parameters in self.parameter_groups.values()
            for each in parameters
            if each.name != "formats"
        ]

    def get_params(self, ctx: click.Context) -> list[click.Parameter]:
        return [*self.click_parameters, *super().get_params(ctx)]

    def call_function(self, **values: Any) -> None:
        """Call the function with the values of the options, grouped as its parameters are."""
        values["formats"] = self.formats
        groups = self.parameter_groups.items()
        self.function(
            **{own: make(**{each.name: values[each.name] for each in inside}) for own, (make, inside) in groups}
        )


def _get_single_value(**value: Any) -> Any:
    """The value of the one parameter that there is."""
    return next(iter(value.values()))


def _get_given_options(**options: Any) -> dict[str, Any]:
    """The options that were given."""
    return {name: value for name, value in options.items() if value not in (None, ())}
