"""Creates options of commands from signatures: types and defaults from annotations, help from `Args:` of docstrings.

Three kinds of signatures become options: the signature of the command's function, frozen dataclasses among its
parameters, and functions and configs of the package (`ApiOptions`). The latter are parsed from their source by `ast`,
because `--help` must not import torch.
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

from bnet_transformer._core.checks import is_integer
from bnet_transformer.errors import BNetError

Count = int  # in an annotation: an integer of at least 1
SHORT_OPTIONS = {"file": "-f", "model": "-m", "out": "-o"}
METAVARS = {
    "sentences": "[SENTENCE]...",
    "models": "[MODEL]...",
    "model": "MODEL",
    "out": "FILE",
    "do": "NAME=VALUE",
    "given": "NAME=VALUE",
    "input": "NAME=VALUE",
}
ARGS_SECTION_PATTERN = re.compile(r"^ *Args:\n(?P<args>.*?)(?=^ *\w+:\n|^ *>>>|\Z)", re.MULTILINE | re.DOTALL)
STATED_DEFAULT = re.compile(r" Default \S+?\.?$")  # the command line shows defaults as [default: X]
ARG_PATTERN = re.compile(r"^    (?P<name>\w+): (?P<help>.*(?:\n     +.*)*)", re.MULTILINE)


class IntegerList(click.ParamType):  # type: ignore[type-arg]  # no parameters in click 8.1
    """Integers separated by commas."""

    name = "numbers"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> list[int]:
        """Return the integers of a text."""
        parts = [part.strip() for part in value.split(",")]
        if not all(is_integer(part) for part in parts):
            subject = "numbers" if param is None else param.opts[0]
            raise BNetError(subject, expected="integers separated by commas", actual=value)
        return [int(part) for part in parts]


class FileName(click.ParamType):  # type: ignore[type-arg]
    """The name of a file, or one of some `names`; a shell can complete both."""

    name = "text"

    def __init__(self, *names: str) -> None:
        self.names = names

    def shell_complete(self, ctx: click.Context, param: click.Parameter, incomplete: str) -> list[CompletionItem]:
        """The names that start with `incomplete`, and the files."""
        known = [CompletionItem(name) for name in self.names if name.startswith(incomplete)]
        return [*known, CompletionItem(incomplete, type="file")]


CLICK_TYPES = {"Count": click.IntRange(min=1), "bool": bool, "int": int, "float": float}
FILE_NAME_TYPES = {
    "file": FileName(),
    "out": FileName(),
    **dict.fromkeys(("model", "models"), FileName("tiny", "minilm", "smollm2")),
}


@dataclass(frozen=True)
class SignatureParameter:
    """A parameter of a signature: its name, its annotation as text, its default (`MISSING` if required), its help."""

    name: str
    annotation: str
    default: Any = MISSING
    help: str = ""

    def get_click_type(self) -> Any:
        """The click type of the option; for a tuple or list, the type of one item."""
        if literal := re.search(r"Literal\[(.*?)\]", self.annotation):
            return click.Choice(ast.literal_eval(f"[{literal[1]}]"))
        if "Collection[int]" in self.annotation:
            return IntegerList()
        named = (kind for name, kind in CLICK_TYPES.items() if re.match(rf"{name}\b", self.annotation))
        return next(named, FILE_NAME_TYPES.get(self.name, str))

    def to_click(self, *, is_command: bool, formats: Sequence[str] = ()) -> click.Parameter:
        """The click argument of a parameter without a default, the click option of one with a default.

        Args:
            is_command: Whether the command itself declares the parameter. The option of a library function is None if
                it is not given, so that the default of the library applies.
            formats: The suffixes of the files that the command writes.
        """
        kind = self.get_click_type()
        is_multiple = bool(re.search(r"(tuple|Collection|Sequence)\[str", self.annotation))
        if self.default is MISSING:
            settings: dict[str, Any] = {"nargs": -1, "metavar": METAVARS[self.name]} if is_multiple else {}
            return click.Argument([self.name], type=kind, **settings)
        name = self.name.rstrip("_").replace("_", "-")
        text = STATED_DEFAULT.sub("", self.help).replace("{formats}", ", ".join(formats))
        attrs: dict[str, Any] = {"help": text, "default": None}
        if kind is bool:
            is_on_off = self.default is True or "None" in self.annotation
            attrs |= {"is_flag": True, "default": False if is_command and not is_on_off else None}
            return click.Option([self.name, f"--{name}/--no-{name}" if is_on_off else f"--{name}"], **attrs)
        if isinstance(self.default, int | float | str):
            attrs["default"] = self.default if is_command else None
            attrs["help"] = f"{attrs['help']} [default: {self.default}]".strip()
        names = [self.name, *([SHORT_OPTIONS[name]] if name in SHORT_OPTIONS else []), f"--{name}"]
        return click.Option(names, type=kind, multiple=is_multiple, metavar=METAVARS.get(name), **attrs)


def parse_docstring(docstring: str | None) -> tuple[str, dict[str, str]]:
    """Return the text of a docstring before its `Args:`, and the text of `Args:` for each parameter."""
    text = inspect.cleandoc(docstring or "")
    section = ARGS_SECTION_PATTERN.search(text)
    if section is None:
        return text, {}
    args = ARG_PATTERN.findall(section["args"])
    return text[: section.start()].strip(), {name: " ".join(help.split()).replace("`", "") for name, help in args}


def read_signature(function: Callable[..., Any]) -> list[SignatureParameter]:
    """The parameters of a function, or the fields of a dataclass and of its bases."""
    helps: dict[str, str] = {}
    for item in reversed(function.__mro__) if isinstance(function, type) else [function]:
        helps |= parse_docstring(item.__doc__)[1]
    parameters = inspect.signature(function).parameters.values()
    defaults = {p.name: MISSING if p.default is p.empty else p.default for p in parameters}
    return [SignatureParameter(p.name, str(p.annotation), defaults[p.name], helps.get(p.name, "")) for p in parameters]


@cache
def _parse_definitions(file: str) -> dict[str, Any]:
    """The functions and classes of a file of the package by name, as syntax trees."""
    text = resources.files("bnet_transformer").joinpath(file).read_text("utf-8")
    return {n.name: n for n in ast.walk(ast.parse(text)) if isinstance(n, ast.FunctionDef | ast.ClassDef)}


def read_source_signature(file: str, name: str) -> dict[str, SignatureParameter]:
    """The parameters of a function, or the fields of a dataclass and its bases in the file, read from the source.

    Args:
        file: A file of the package, such as `learning/fit/methods.py`.
        name: The name of a function, method or class there.

    Returns:
        The parameters by name; a default that is not a constant in the source is None.
    """
    definitions = _parse_definitions(file)
    helps = parse_docstring(ast.get_docstring(definitions[name]))[1]
    parameters: dict[str, SignatureParameter] = {}
    for key, annotation, default in _iter_parameters(definitions[name], definitions):
        constant = default.value if isinstance(default, ast.Constant) else None
        parameters[key] = SignatureParameter(key, ast.unparse(annotation), constant, helps.get(key, ""))
    return parameters


def _iter_parameters(node: Any, definitions: Mapping[str, Any]) -> Iterator[tuple[str, ast.expr, ast.expr | None]]:
    """The name, annotation and default of each parameter of a function, or of each field of a class."""
    if isinstance(node, ast.ClassDef):
        for base in node.bases:
            if isinstance(base, ast.Name) and base.id in definitions:
                yield from _iter_parameters(definitions[base.id], definitions)
        for field_ in node.body:
            if isinstance(field_, ast.AnnAssign) and "ClassVar" not in ast.unparse(field_.annotation):
                yield ast.unparse(field_.target), field_.annotation, field_.value
        return
    required = [None] * (len(node.args.args) - len(node.args.defaults))
    defaults = [*required, *node.args.defaults, *node.args.kw_defaults]
    for arg, default in zip([*node.args.args, *node.args.kwonlyargs], defaults, strict=True):
        if arg.annotation is not None:  # self has no annotation
            yield arg.arg, arg.annotation, default


@dataclass(frozen=True)
class ApiOptions:
    """Options that a command passes to functions or configs of the package, as a mapping of the given options.

    Args:
        file: The file of the package that declares them.
        names: Functions or classes in the file; parameters of the same name become one option.
        only: The parameters that become options; all by default.
        help_prefix: Text before the help of each option.
        defaults: Defaults of the command, which replace the defaults of the library.
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
        prefix, defaults = self.help_prefix, self.defaults
        parameters = [known[name] for name in self.only or known]
        helps = [prefix + p.help[:1].lower() + p.help[1:] if prefix else p.help for p in parameters]
        return [
            replace(p, default=defaults.get(p.name, p.default), help=text.strip())
            for p, text in zip(parameters, helps, strict=True)
        ]


class SignatureCommand(click.Command):
    """A command whose arguments (no default) and options (a default) are the parameters of its function.

    A parameter annotated with a frozen dataclass becomes options for its fields. A parameter named in `forwarded`
    receives the mapping of the options that were given. The class is the `cls=` of `click.command`, which passes all
    arguments except the last two.

    Args:
        name: The name of the command.
        callback: The function that it calls.
        params: Parameters that decorators of click declare; it must be empty.
        help: The docstring of the function.
        short_help: The line of the command in the help of the group.
        formats: The suffixes of the files that the command writes.
        **forwarded: For a parameter of the function, the options of the package that it receives.
    """

    def __init__(
        self,
        name: str,
        callback: Callable[..., None],
        params: Sequence[click.Parameter],
        help: str,
        short_help: str,
        formats: Sequence[str] = (),
        **forwarded: Sequence[ApiOptions],
    ) -> None:
        text, call = parse_docstring(help)[0], self.call_function
        super().__init__(name, callback=call, params=list(params), help=text, short_help=short_help)
        self.function, self.formats, self.forwarded = callback, formats, forwarded

    @cached_property
    def parameter_groups(self) -> dict[str, tuple[Callable[..., Any], list[SignatureParameter]]]:
        """For each parameter of the function: the callable that creates its value, and the options of that callable."""
        groups: dict[str, tuple[Callable[..., Any], list[SignatureParameter]]] = {}
        for parameter in read_signature(self.function):
            name, kind = parameter.name, self.function.__globals__.get(parameter.annotation)
            if name in self.forwarded:
                groups[name] = _get_given_options, [p for o in self.forwarded[name] for p in o.read_parameters()]
            elif isinstance(kind, type) and is_dataclass(kind):
                groups[name] = kind, read_signature(kind)
            else:
                groups[name] = _get_single_value, [parameter]
        return groups

    @cached_property
    def click_parameters(self) -> list[click.Parameter]:
        """The arguments and options; they are created when the command is used, not when the group lists it."""
        return [
            p.to_click(is_command=make is not _get_given_options, formats=self.formats)
            for make, parameters in self.parameter_groups.values()
            for p in parameters
            if p.name != "formats"
        ]

    def get_params(self, ctx: click.Context) -> list[click.Parameter]:
        return [*self.click_parameters, *super().get_params(ctx)]

    def call_function(self, **values: Any) -> None:
        """Call the function with the values of the options, grouped by its parameters."""
        values["formats"] = self.formats
        groups = self.parameter_groups.items()
        self.function(**{name: make(**{p.name: values[p.name] for p in options}) for name, (make, options) in groups})


def _get_single_value(**value: Any) -> Any:
    """The value of the only parameter."""
    return next(iter(value.values()))


def _get_given_options(**options: Any) -> dict[str, Any]:
    """The options that were given."""
    return {name: value for name, value in options.items() if value not in (None, ())}
