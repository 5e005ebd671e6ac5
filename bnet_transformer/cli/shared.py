"""What commands share: options, the net, the sentences, evidence and `do` as people write them."""

from __future__ import annotations

import math
import os
import re
import sys
from collections.abc import Callable, Iterable, Sequence
from dataclasses import fields
from typing import TYPE_CHECKING, Any, TypeVar, cast

import click
from click.shell_completion import CompletionItem

from bnet_transformer.errors import BNetError, FileError

if TYPE_CHECKING:
    from bnet_transformer.bnet import BNet
    from bnet_transformer.sentence import Sentence

MODEL = "tiny, minilm, a folder of Hugging Face, an id of the hub, or a net.safetensors that save wrote."
F = TypeVar("F", bound=Callable[..., Any])
T = TypeVar("T")


# options


def options(*each: Callable[[Any], Any]) -> Callable[[F], F]:
    """Several options as one, in the order in which help shows them."""

    def with_them(function: F) -> F:
        for option in reversed(each):
            function = option(function)
        return function

    return with_them


def sentences_option() -> Callable[[F], F]:
    """SENTENCES, or a file of them."""
    return options(
        click.argument("sentences", nargs=-1, metavar="[SENTENCE]..."),
        click.option("-f", "--file", "source", shell_complete=_files,
                     help="A file of sentences, one in each line; - is the standard input, also as a SENTENCE."),
    )  # fmt: skip


def model_option(default: str | None = "tiny", note: str = "The net") -> Callable[[F], F]:
    """`--model`."""
    told = f"{note}: {MODEL}"
    return click.option("-m", "--model", default=None if default is None else [default], shell_complete=_models,
                        help=told, metavar="MODEL", show_default=default is not None, multiple=True,
                        callback=_one_model)  # fmt: skip


def _one_model(ctx: click.Context, param: click.Parameter, told: tuple[str, ...]) -> str | None:
    """The one net that is told, where one is."""
    if len(told) > 1:
        raise BNetError("--model", expected="one net", got=", ".join(told))
    if told and not told[0].strip():
        raise BNetError("--model", expected="the name of a net, or a file", got="an empty one")
    return told[0] if told else None


def json_option() -> Callable[[F], F]:
    """`--json`."""
    return click.option("--json", "as_json", is_flag=True, help="Tell everything as one JSON document.")


def out_option(suffixes: Sequence[str], *, required: bool = False) -> Callable[[F], F]:
    """`-o`, once or several times."""
    told = f"The file to write, by its suffix: {', '.join(suffixes)}. May be repeated; {{}} is the sentence's number."

    def complete(ctx: click.Context, param: click.Parameter, incomplete: str) -> list[CompletionItem]:
        return _suffixed(incomplete, suffixes)

    return click.option(
        "-o", "--out", "outs", metavar="FILE", shell_complete=complete, multiple=True, required=required, help=told
    )


VALUE = 'A state, a word (in quotes of its own, if it is "7"), or numbers with commas between; may be repeated.'
DO = "Set nodes: a name, a family, a pattern such as q_1_*_2; zero sets zeros, mean the mean over the words."


def do_options() -> Callable[[F], F]:
    """`--do` and `--given`, each NAME=VALUE."""
    return options(
        do_option(),
        click.option("--given", "given", multiple=True, metavar="NAME=VALUE", help=f"See a node to be so. {VALUE}"),
    )


def do_option() -> Callable[[F], F]:
    """`--do` alone."""
    return click.option("--do", "done", multiple=True, metavar="NAME=VALUE", help=f"{DO} {VALUE}")


def input_option() -> Callable[[F], F]:
    """`--input`: the values of given nodes."""
    told = f"The value of a given node that the sentence does not have. {VALUE}"
    return click.option("--input", "inputs", multiple=True, metavar="NAME=VALUE", help=told)


def _files(ctx: click.Context, param: click.Parameter, incomplete: str) -> list[CompletionItem]:
    return [CompletionItem(incomplete, type="file")]


def _models(ctx: click.Context, param: click.Parameter, incomplete: str) -> list[CompletionItem]:
    """The names of nets, and files."""
    found = [CompletionItem(name) for name in ("tiny", "minilm") if name.startswith(incomplete)]
    return [*found, CompletionItem(incomplete, type="file")]


def _suffixed(incomplete: str, suffixes: Sequence[str]) -> list[CompletionItem]:
    """A name with each suffix that fits what is written of it."""
    stem, begun = os.path.splitext(incomplete)
    if not stem or incomplete.endswith("/"):
        return [CompletionItem(incomplete, type="file")]
    if incomplete.endswith("."):
        stem, begun = incomplete[:-1], "."
    found = [CompletionItem(stem + suffix) for suffix in suffixes if suffix.startswith(begun)]
    return [*found, CompletionItem(incomplete, type="file")]


# the net


def net_of(model: str) -> BNet:
    """The net of a model, or of a file that `save` wrote."""
    if os.path.isfile(model):
        from bnet_transformer.bnet import load_net

        return load_net(model)
    if model.endswith(".safetensors"):
        raise FileError(model, expected="a net that save wrote", got="no such file")
    from bnet_transformer.pretrained import from_pretrained

    return from_pretrained(model)


def sentence_of(
    net: BNet,
    text: str,
    *,
    pair: str | None = None,
    inputs: Sequence[str] = (),
    done: Sequence[str] = (),
    given: Sequence[str] = (),
) -> Sentence:
    """The bnet of a text, with its inputs, what is set and seen; the stacks of a net with several are parted by |."""

    def told(what: str, of: Sequence[str]) -> dict[str, object]:
        return {name: _in_shape(net, name, value) for name, value in values(what, of).items()}

    s = net.sentence(said_to(net, text), pair=pair, given=told("--input", inputs) or None)
    if done:
        s = s.do(told("--do", done))
    return s.observe(told("--given", given)) if given else s


def _in_shape(net: BNet, name: str, value: object) -> object:
    """A number of a node of width 1 as its vector."""
    families = [f for f in net.network.graph.families if name == f.name or name.startswith(f"{f.name}_")]
    family = max(families, key=lambda f: len(f.name), default=None)
    if family is None or not isinstance(value, int | float):
        return value
    member = net.network.members[family.index]
    return [value] if member.shape == (1,) and not member.tpm.reads_by_index else value


def said_to(net: BNet, text: str) -> object:
    """A text as the net takes it."""
    stacks = net.network.graph.word_stacks
    if not stacks and text:
        raise BNetError("sentence", expected="None: the net has no words", got=text)
    if len(stacks) < 2:
        return text or None
    parts = [part.strip() for part in text.split("|")]
    if len(parts) != len(stacks):
        wanted = f"{len(stacks)} texts with | between them, for the stacks {', '.join(stacks)}"
        raise BNetError("sentence", expected=wanted, got=text)
    return dict(zip(stacks, parts, strict=True))


# sentences


def sentences_of(told: Sequence[str], source: str | None, model: str | None = None) -> list[str]:
    """Sentences from the command line, or from the lines of a file or of the standard input.

    For a `model` that is the file of a net without words it is one sentence, which is empty.
    """
    unsaid = not told and source is None and model is not None and os.path.isfile(model)
    if model is not None and unsaid and not net_of(model).network.graph.word_stacks:
        return [""]
    if source is None and tuple(told) == ("-",):
        told, source = (), "-"
    if source is None:
        return _told(told)
    if told:
        raise BNetError("SENTENCES", expected="sentences, or --file with some", got="both")
    where = "standard input" if source == "-" else f"--file {source}"
    if source == "-" and sys.stdin is None:
        raise BNetError(where, expected="a file that can be read", got="a closed one")
    try:
        with click.open_file(source, encoding="utf-8-sig") as file:
            found = [line.strip() for line in file if line.strip()]
    except OSError as error:
        raise BNetError(where, expected="a file that can be read", got=error.strerror or str(error)) from error
    except UnicodeError as error:
        raise BNetError(where, expected="text in UTF-8", got="other bytes") from error
    if not found:
        raise BNetError(where, expected="sentences, one in each line", got="none")
    return _sound(where, found)


def _told(told: Sequence[str]) -> list[str]:
    """The sentences that stand on the command line themselves."""
    if not told:
        raise BNetError("SENTENCES", expected="sentences, or --file with some", got="none")
    if len(told) == 1 and os.path.isfile(told[0]):
        raise BNetError("SENTENCES", expected="a sentence", got="the name of a file", allowed=f"--file {told[0]}")
    if not all(text.strip() for text in told):
        raise BNetError("SENTENCES", expected="sentences with words", got="an empty one")
    return _sound("SENTENCES", list(told))


def _sound(where: str, texts: list[str]) -> list[str]:
    """Refuse what is no text: NUL, and bytes of the command line that were no UTF-8."""
    for text in texts:
        if "\0" in text or any("\ud800" <= letter <= "\udfff" for letter in text):
            raise BNetError(where, expected="text in UTF-8", got="other bytes")
    return texts


def along(items: Sequence[T], what: str) -> Iterable[T]:
    """The items, with a bar in a terminal where there are several."""
    from tqdm import tqdm

    found: Iterable[T] = tqdm(items, unit=what, leave=False, disable=None if len(items) > 1 else True)
    return found


# what people write


def values(what: str, told: Sequence[str]) -> dict[str, object]:
    """`name=value`, several: a state, a word or numbers for each node."""
    found: dict[str, object] = {}
    for each in told:
        name, sign, value = each.partition("=")
        name = name.strip()
        if not sign or not name or not value.strip():
            raise BNetError(what, expected="NAME=VALUE", got=each)
        if name in found:
            raise BNetError(f"{what} {name}", expected="one value", got="two")
        found[name] = value_of(value.strip(), set_it=what == "--do")
    return found


def states(what: str, told: str) -> list[object]:
    """States with commas between them, each as in `values`: a whole number, or a word, in quotes if it is "7"."""
    parts: list[str] = re.findall(r'\s*(".+?"|[^,]*?)\s*,', told + ",")
    if not all(parts):
        raise BNetError(what, expected="states with commas between them", got=told)
    return [value_of(part, set_it=False) for part in parts]


def is_whole(text: str) -> bool:
    """Whether a text is a whole number, of as many digits as can be read."""
    return text.isdecimal() and len(text) <= 1000


def value_of(text: str, *, set_it: bool) -> object:
    """A state, a vector, a word; for `do` also what sets a node whatever its shape."""
    if set_it and text in ("zero", "mean"):
        from bnet_transformer.inference import Mean, Zero

        return Zero() if text == "zero" else Mean()
    if len(text) > 2 and text[0] == text[-1] == '"':  # a word as it stands, be it a number
        return text[1:-1]
    if is_whole(text):
        return int(text)
    try:
        found = [float(part) for part in text.removesuffix(",").split(",")]
    except ValueError:
        return text
    if not all(map(math.isfinite, found)):
        return text
    return found if "," in text else found[0]


def names(what: str, told: str) -> list[str]:
    """Names with commas between them."""
    found = [part.strip() for part in told.split(",")]
    if not all(found):
        raise BNetError(what, expected="names with commas between them", got=told)
    return found


def numbers(what: str, told: str | None) -> list[int] | None:
    """Whole numbers with commas between them; None where nothing is told."""
    if told is None:
        return None
    parts = told.split(",")
    if not all(is_whole(part.strip()) for part in parts):
        raise BNetError(what, expected="whole numbers with commas between them", got=told)
    return [int(part) for part in parts]


def words(told: str | None, alone: Sequence[str]) -> list[int | str] | None:
    """Words by number or as they stand, and those that stand alone."""
    parts = [] if told is None else names("--words", told)
    named: list[int | str] = [int(part) if is_whole(part) else part for part in parts]
    return None if told is None and not alone else [*named, *alone]


def config_of(kind: type[T], options: dict[str, Any], others: Sequence[type[Any]] = (), chosen: str = "") -> T:
    """The config of some options, which are taken out of them.

    Args:
        kind: The class of the config.
        options: The options that were given, by their names in Python.
        others: Configs that could be chosen in place of this one; their options are refused.
        chosen: How this one is chosen on the command line, for the error.

    Returns:
        The config with those options, and its defaults for all else.

    Raises:
        BNetError: Where an option is one of `others` alone.
    """
    names = {field.name for field in fields(cast(Any, kind))}
    for name in sorted(options):
        homes = [other.name for other in others if name in {field.name for field in fields(other)}]
        if homes and name not in names:
            option, allowed = f"--{name.replace('_', '-')}", " or ".join(f"--method {home}" for home in homes)
            raise BNetError(option, expected=f"an option of {chosen}", got="one that it does not have", allowed=allowed)
    return kind(**{name: options.pop(name) for name in names & options.keys()})


def known(**asked: object) -> dict[str, Any]:
    """The options that were told: all but those that are None or empty."""
    return {name: value for name, value in asked.items() if value is not None and value != ()}
