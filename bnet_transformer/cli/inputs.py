"""The inputs of commands: the net, the sentences, and the values, states and names that the user types."""

from __future__ import annotations

import os
import re
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar, cast

import click

from bnet_transformer._core.checks import is_integer, parse_float
from bnet_transformer._core.tokens import as_labels
from bnet_transformer.errors import BNetError, FileError

if TYPE_CHECKING:
    from bnet_transformer.bnet import BNet
    from bnet_transformer.sentence import Sentence

T = TypeVar("T")


@dataclass(frozen=True)
class TextSource:
    """The sentences of a command.

    Args:
        sentences: The sentences.
        file: A file with one sentence in each line; - is the standard input, also as a SENTENCE.
    """

    sentences: tuple[str, ...]
    file: str | None = None

    def read_texts(self) -> list[str]:
        """Return the sentences of the command line, of the lines of a file, or of the standard input.

        Raises:
            BNetError: There are no sentences, both sources are given, or the text is not UTF-8.
        """
        source = "-" if self.file is None and self.sentences == ("-",) else self.file
        if source is None:
            return self._read_arguments()
        if self.sentences and self.file is not None:
            raise BNetError("give SENTENCES or --file, not both")
        subject = "standard input" if source == "-" else f"--file {source}"
        if source == "-" and sys.stdin is None:
            raise BNetError(subject, expected="a readable file", actual="a closed stream")
        try:
            with click.open_file(source, encoding="utf-8-sig") as file:
                texts = [line.strip() for line in file if line.strip()]
        except OSError as error:
            raise BNetError(subject, expected="a readable file", actual=error.strerror or str(error)) from error
        except UnicodeError as error:
            raise BNetError(f"{subject} is not valid UTF-8", hint="Convert the file to UTF-8") from error
        if not texts:
            raise BNetError(f"{subject} contains no sentences", hint="Write one sentence in each line")
        return _check_text(subject, texts)

    def read_columns(self) -> list[list[str]]:
        """The tab-separated columns of each sentence."""
        return [[part.strip() for part in text.split("\t")] for text in self.read_texts()]

    def _read_arguments(self) -> list[str]:
        """The sentences of the command line."""
        if not self.sentences:
            raise BNetError("no sentence is given", hint="Give SENTENCES or --file")
        first = self.sentences[0]
        if len(self.sentences) == 1 and os.path.isfile(first):
            raise BNetError(f"{first} is a file, not a sentence", hint=f"Use --file {first}")
        if not all(text.strip() for text in self.sentences):
            raise BNetError("SENTENCES", expected="sentences with words", actual="an empty sentence")
        return _check_text("SENTENCES", list(self.sentences))


def _check_text(subject: str, texts: list[str]) -> list[str]:
    """Return the texts; raise an error for NUL and for surrogates, which represent invalid UTF-8 bytes (PEP 383)."""
    for text in texts:
        if "\0" in text or any("\ud800" <= letter <= "\udfff" for letter in text):
            raise BNetError(subject, expected="text in UTF-8", actual="invalid bytes")
    return texts


@dataclass(frozen=True)
class SentenceQuery(TextSource):
    """The sentences of a query and their net, with interventions and evidence.

    Args:
        model: The net: tiny, minilm, smollm2, a folder of a Hugging Face model, a GGUF file, a Hugging Face id, or a
            net.safetensors.
        do: Set NODE=VALUE by do; NODE is a node, a node group or a pattern such as q_1_*_2. VALUE is a state, a word
            (in double quotes if it is a number or starts with a space: "7", " Mary"), numbers separated by commas,
            zero, or mean (over the words). May be repeated.
        given: Observe NODE=VALUE as evidence, with values as for --do except zero and mean. May be repeated.
        input: The value NODE=VALUE of an input node that the text does not contain. May be repeated.
        pair: A second sentence, which follows the first one.
    """

    model: str = "tiny"
    do: tuple[str, ...] = ()
    given: tuple[str, ...] = ()
    input: tuple[str, ...] = ()
    pair: str | None = None

    def read_texts(self) -> list[str]:
        """Return the sentences; for a saved net without words, one empty sentence if none is given."""
        is_saved = not self.sentences and self.file is None and os.path.isfile(self.model)
        is_wordless = is_saved and not load_model(self.model).network.graph.word_stacks
        return [""] if is_wordless else super().read_texts()

    def iter_sentences(self, texts: Sequence[str]) -> Iterator[Sentence]:
        """Load the net, and iterate over the bnets of texts; in a terminal, several texts have a progress bar."""
        from tqdm import tqdm

        net = load_model(self.model)
        bar = tqdm(texts, unit="sentence", leave=False, disable=None if len(texts) > 1 else True)
        return (self.build_sentence(net, text) for text in bar)

    def build_sentence(self, net: BNet, text: str) -> Sentence:
        """The bnet of a text with the values of `--input`, `--do` and `--given`."""

        def parse_in_shape(option: str, texts: Sequence[str]) -> dict[str, object]:
            return {name: _match_shape(net, name, value) for name, value in parse_values(option, texts).items()}

        s = net.sentence(split_stacks(net, text), pair=self.pair, given=parse_in_shape("--input", self.input) or None)
        s = s.do(parse_in_shape("--do", self.do)) if self.do else s
        return s.observe(parse_in_shape("--given", self.given)) if self.given else s


def load_model(model: str) -> BNet:
    """Load the net of `--model`: a file that `save` wrote, or a source of `from_pretrained`."""
    from bnet_transformer.pretrained.gguf import is_gguf

    if os.path.isfile(model) and not is_gguf(Path(model)):
        from bnet_transformer.bnet import load_net

        return load_net(model)
    if model.endswith(".safetensors"):
        raise FileError(f"the file {model} does not exist", hint="Pass a net that save, fit or train wrote")
    from bnet_transformer.pretrained import from_pretrained

    return from_pretrained(model)


def check_model(model: str) -> None:
    """Raise the error of `load_model` for a text that names no model, without loading weights.

    Of a model of the hub only the form of its id is checked, because other checks can require the network.
    """
    from bnet_transformer._core.files import open_safetensors, read_header
    from bnet_transformer._core.results import is_result
    from bnet_transformer.declare import io
    from bnet_transformer.pretrained.gguf import gguf_to_source, is_gguf
    from bnet_transformer.pretrained.source import PACKAGES, check_hub_id, find_package_path, folder_to_source

    path = Path(model)
    if model in PACKAGES:
        find_package_path(model)
    elif os.path.isdir(model):
        folder_to_source(path)
    elif os.path.isfile(model) and is_gguf(path):
        gguf_to_source(path, has_tokenizer=True)
    elif os.path.isfile(model):
        if is_result(path):
            from bnet_transformer.bnet import check_has_net

            check_has_net(path)
        else:
            with open_safetensors(path, io.EXPECTED) as file:
                read_header(path, file, io.EXPECTED, io.FORMAT, io.VERSION)
    elif model.endswith((".safetensors", ".gguf")) or model.startswith((".", "/")):
        raise FileError(model, expected="a folder, a GGUF file or a saved net; it does not exist")
    elif model != "tiny":
        check_hub_id(model)


def split_stacks(net: BNet, text: str) -> object:
    """Return the argument of `net.sentence`: the text, None for a net without words, or the texts of stacks by name."""
    from bnet_transformer.data.encode import split_stack_texts

    return split_stack_texts(net.network, text)


def _match_shape(net: BNet, name: str, value: object) -> object:
    """Return the value for a node; a number becomes a vector if the node is a vector of length 1."""
    groups = [g for g in net.network.graph.groups if name == g.name or name.startswith(f"{g.name}_")]
    group = max(groups, key=lambda g: len(g.name), default=None)  # x_0_1 may be a node of group x_0 or of group x
    if group is None or not isinstance(value, int | float):
        return value
    spec = net.network.specs[group.index]
    return [value] if spec.shape == (1,) and not spec.tpm.is_index_valued else value


# values, states, names and words


def parse_values(option: str, texts: Sequence[str]) -> dict[str, object]:
    """Return the values of nodes by name, from several `NAME=VALUE`."""
    values: dict[str, object] = {}
    for text in texts:
        name, sign, value = (part.strip() for part in text.partition("="))
        if not sign or not name or not value:
            raise BNetError(option, expected="NAME=VALUE", actual=text)
        if name in values:
            raise BNetError(f"{option} has two values for {name}", hint="Give each node one value")
        values[name] = parse_value(value, is_intervention=option == "--do")
    return values


def parse_states(option: str, text: str) -> list[object]:
    """Return states separated by commas: integers or words; a word that is a number is quoted, `"7"`."""
    parts = [part.strip() for part in re.findall(r'\s*+("[^"]++"(?=\s*+,)|[^,]*+)\s*+,', text + ",")]
    if not all(parts):
        raise BNetError(option, expected="states separated by commas", actual=text)
    return [parse_value(part, is_intervention=False) for part in parts]


def parse_value(text: str, *, is_intervention: bool) -> object:
    """Return a state, a vector of floats, or a word; with `is_intervention` also `zero` and `mean`."""
    if is_intervention and text in ("zero", "mean"):
        from bnet_transformer.interventions import Mean, Zero

        return Zero() if text == "zero" else Mean()
    if len(text) > 2 and text[0] == text[-1] == '"':  # a quoted word, which may be a number
        return text[1:-1]
    if is_integer(text):
        return int(text)
    numbers = [parse_float(part.strip()) for part in text.removesuffix(",").split(",")]
    if None in numbers:  # nan and inf are treated as words
        return text
    return numbers if "," in text else numbers[0]


def parse_names(option: str, text: str) -> list[str]:
    """Return names separated by commas."""
    names = [part.strip() for part in text.split(",")]
    if not all(names):
        raise BNetError(option, expected="names separated by commas", actual=text)
    return names


def find_word(option: str, text: str, words: Sequence[str]) -> int:
    """Return the index of a word, from its index as text, or from the word if it occurs once."""
    positions = as_labels(words).find_all(text)
    if len(positions) > 1:
        hint = f"Use the index of one of them: {', '.join(map(str, positions))}"
        raise BNetError(option, expected="a word that occurs once", actual=text, hint=hint)
    if positions:
        return positions[0]
    if not is_integer(text) or int(text) >= len(words):
        allowed = ", ".join(words[:20])
        raise BNetError(option, expected=f"a word, or an index up to {len(words) - 1}", actual=text, allowed=allowed)
    return int(text)


def make_config(
    config_class: type[T], options: dict[str, Any], alternatives: Sequence[type[Any]] = (), choice: str = ""
) -> T:
    """Create a config from the options that are its fields, and remove these from `options`.

    Args:
        config_class: The class of the config.
        options: The options that were given, by their names in Python.
        alternatives: Other configs that could be chosen; their options cause an error.
        choice: The option of the command line that chooses this config, for the error.

    Returns:
        The config, with its defaults for the fields that no option sets.

    Raises:
        BNetError: An option is a field of only `alternatives`.
    """
    names = {field.name for field in fields(cast(Any, config_class))}
    for name in sorted(options):
        owners = [c.name for c in alternatives if name in {field.name for field in fields(c)}]
        if owners and name not in names:
            hint = f"Use {' or '.join(f'--method {owner}' for owner in owners)}"
            raise BNetError(f"--{name.replace('_', '-')} is not an option of {choice}", hint=hint)
    return config_class(**{name: options.pop(name) for name in names & options.keys()})
