"""The inputs of commands: the net, the sentences, and the values, states and names that the user types. The outputs:
printed lines or JSON, and files of JSON, tables and images, written atomically."""

from __future__ import annotations

import csv
import json
import math
import os
import re
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from io import BytesIO
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar, cast

import click

from bnet_transformer._core.checks import is_integer, parse_float
from bnet_transformer._core.tokens import as_labels, distinguish, name_columns
from bnet_transformer.cli.group import Count, escape_control
from bnet_transformer.errors import BNetError, FileError

if TYPE_CHECKING:
    import pandas as pd

    from bnet_transformer.bnet import BNet
    from bnet_transformer.sentence import Sentence


T = TypeVar("T")


# --------------------------------------------------------------------------------------------------------------------
# The inputs: the net and the sentences.


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


# --------------------------------------------------------------------------------------------------------------------
# The inputs: values, states, names and words.


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


# --------------------------------------------------------------------------------------------------------------------
# The outputs.


IMAGES = (".pdf", ".png", ".svg")  # suffixes of files
TABLES = (".csv", ".json")
DEFAULT_ROWS = 20


@dataclass(frozen=True)
class Answer:
    """What a command computed. Its text, JSON, CSV and images are made from this, by `Output.write`.

    Args:
        result: The result of the library: `bt.plot` draws it, and its frame is the table of a csv file.
        fields: The attributes of the result in the JSON document.
        more: Other entries of the JSON document.
        lines: The lines that are printed.
        table: The table of a csv file, if it is not the frame of the result.
        plot: The options of `bt.plot`.
        save: Writes a file of another suffix, or without a result of any suffix.
    """

    result: Any = None
    fields: Sequence[str] = ()
    more: Mapping[str, Any] = field(default_factory=dict)
    lines: Sequence[str] = ()
    table: pd.DataFrame | None = None
    plot: Mapping[str, Any] = field(default_factory=dict)
    save: Callable[[str], object] | None = None

    @property
    def document(self) -> dict[str, Any]:
        """The JSON document."""
        return {**{name: getattr(self.result, name) for name in self.fields}, **self.more}

    def make_table(self) -> pd.DataFrame:
        """The table of a csv file."""
        if self.table is not None:
            return self.table
        table: pd.DataFrame = self.result.to_dataframe()
        return table if table.index.name is None else table.reset_index()

    def write(self, out: str, document: Mapping[str, Any]) -> None:
        """Write a file in the format of its suffix; the document contains that of the answer."""
        suffix = Path(out).suffix.lower()
        if self.save is not None and (self.result is None or suffix not in (*TABLES, *IMAGES)):
            self.save(out)
            return
        if suffix == ".json":
            data = (format_json(document) + "\n").encode()
        elif suffix == ".csv":
            # Words are quoted, because a word may contain "\r", at which CSV readers start a new row.
            data = self.make_table().to_csv(index=False, quoting=csv.QUOTE_NONNUMERIC).encode()
        else:
            from bnet_transformer.plots.registry import plot

            buffer = BytesIO()
            plot(self.result, **self.plot).figure.savefig(buffer, format=suffix[1:], dpi=200)
            data = buffer.getvalue()
        from bnet_transformer._core.files import atomic_write

        with atomic_write(Path(out)) as temporary:
            temporary.write_bytes(data)


@dataclass(frozen=True)
class Output:
    """The output files of a result, and whether JSON is printed.

    Args:
        out: The file to write; its suffix is the format: {formats}. May be repeated. {} is the sentence's number.
        json: Print one JSON document.
    """

    out: tuple[str, ...] = ()
    json: bool = False
    formats: tuple[str, ...] = ()

    def check(self, count: int | None = None, combined_suffixes: tuple[str, ...] = ()) -> None:
        """Raise an error for files that cannot be written; for several sentences, a name requires {}.

        This check runs before the results are computed.

        Args:
            count: The number of sentences; None if one file contains all sentences.
            combined_suffixes: The suffixes of files that may contain all sentences.
        """
        for out in self.out:
            path = Path(out)
            if path.suffix.lower() not in self.formats:
                actual, allowed = repr(path.suffix), ", ".join(sorted(self.formats))
                raise BNetError(f"suffix of {out}", expected="a supported format", actual=actual, allowed=allowed)
            if not path.resolve().parent.is_dir():
                raise BNetError(f"-o {out}: the folder {path.parent} does not exist", hint="Create it first")
            if count is None and "{}" in out:
                hint = f"Use -o {out.replace('{}', '')}"
                raise BNetError(f"-o {out}: one file contains all sentences, so the name has no {{}}", hint=hint)
            if count is not None and count > 1 and "{}" not in out and not out.lower().endswith(combined_suffixes):
                hint = f"Use -o {path.with_name(f'{path.stem}-{{}}{path.suffix}')}"
                subject = f"-o {out}: {count} sentences require a name with {{}} for the number of the sentence"
                raise BNetError(subject, hint=hint)

    def write(
        self, command: str, answers: Sequence[Answer], texts: Sequence[str] = ("",), key: str = "", **fields: Any
    ) -> None:
        """Write the files of the answers, and print them.

        Args:
            command: The command, in the JSON document.
            answers: The answer for each sentence, or one for all.
            texts: The sentence of each answer. A table without {} in its name contains all answers.
            key: The key of the answers in the JSON document; without it the document is that of one answer.
            **fields: Fields of the JSON document that precede the answers.
        """
        header = {"command": command, **fields}
        parts = [answer.document for answer in answers]
        document = header | {key: parts} if key else header | {"files": self.out, **parts[0]}
        lines = [line for text, answer in zip(texts, answers, strict=True) for line in (f"# {text}", *answer.lines)]
        lines = lines if len(answers) > 1 else lines[1:]
        for out in self.out:
            if not key:
                files = [(out, answers[0], document)]
            elif out.lower().endswith(TABLES) and "{}" not in out and answers[0].save is None:
                files = [(out, Answer(table=_join_tables(texts, answers)), document)]
            else:
                numbered = enumerate(zip(answers, parts, strict=True))
                files = [(number_path(out, k), answer, header | {key: [part]}) for k, (answer, part) in numbered]
            for path, answer, part in files:
                answer.write(path, part)
                lines.append(f"written: {path}")
        self.print_document(document, lines)

    def print_document(self, document: Mapping[str, Any], lines: Sequence[str]) -> None:
        """Print one JSON document (`--json`), or lines."""
        click.echo(format_json(document) if self.json else escape_control("\n".join(lines)))


@dataclass(frozen=True)
class TableOutput(Output):
    """The output files of a table, and the number of printed rows.

    Args:
        top: The number of rows to print, by default 20.
        all_: Print all rows.
    """

    top: Count | None = None
    all_: bool = False

    @property
    def num_rows(self) -> int:
        """The maximum number of rows that are printed without `--all`."""
        return DEFAULT_ROWS if self.top is None else self.top

    def check(self, count: int | None = None, combined_suffixes: tuple[str, ...] = ()) -> None:
        if self.all_ and self.top is not None:
            raise BNetError("give --top or --all, not both")
        super().check(count, combined_suffixes)

    def format_rows(self, table: pd.DataFrame, by: str | None = None) -> list[str]:
        """Return the printed lines of a table: the rows with the largest absolute values in the column `by`."""
        if by is not None and not self.all_:
            from bnet_transformer._core.tensors import rank_by_size

            table = table.iloc[rank_by_size(table[by].to_numpy())]
        top = (table if self.all_ else table.head(self.num_rows)).copy()
        for name in top:
            if top[name].dtype == object:  # of labels
                top[name] = distinguish(top[name])
        hidden = len(table) - len(top)
        return [*format_table(top), *([f"... and {hidden} more (--all)"] if hidden else [])]


def _join_tables(texts: Sequence[str], answers: Sequence[Answer]) -> pd.DataFrame:
    """The tables of all sentences, one below the other, with the column `sentence` first."""
    import pandas as pd

    tables = []
    for text, answer in zip(texts, answers, strict=True):
        table = answer.make_table()
        table = table.set_axis(name_columns(table, ["sentence"]), axis=1)
        table.insert(0, "sentence", text)
        tables.append(table)
    return pd.concat(tables, ignore_index=True)


def answer_sentences(
    command: str,
    query: SentenceQuery,
    output: Output,
    answer: Callable[[Sentence], Answer],
    combined_suffixes: tuple[str, ...] = TABLES,
) -> list[dict[str, Any]]:
    """Answer a question about each sentence, and write and print the answers.

    Args:
        command: The command, in the JSON document.
        query: The sentences, their net and their values.
        output: Where the answers go.
        answer: Computes the answer for one sentence.
        combined_suffixes: The suffixes of files that may contain all answers.

    Returns:
        The JSON document of each answer.
    """
    texts = query.read_texts()
    output.check(len(texts), combined_suffixes)
    answers = []
    for k, (text, s) in enumerate(zip(texts, query.iter_sentences(texts), strict=True)):
        result = answer(s)
        files = {} if result.save is None else {"files": [number_path(out, k) for out in output.out]}
        more = {"sentence": text, "words": s.words, **files, **result.document}
        answers.append(replace(result, fields=(), more=more))
    output.write(command, answers, texts, "sentences", model=query.model)
    return [result.document for result in answers]


def number_path(out: str, number: int) -> str:
    """Return the file of a sentence: {} in the name becomes the number of the sentence."""
    return str(Path(out.replace("{}", str(number))))


def to_json_value(value: Any) -> Any:
    """Convert a value to JSON types: tensors and tables become lists, nan and inf become null.

    >>> to_json_value({"a": (1, float("nan")), "b": "x"})
    {'a': [1, None], 'b': 'x'}
    """
    if isinstance(value, Mapping):
        return {str(key): to_json_value(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [to_json_value(item) for item in value]
    if isinstance(value, bool | int | str | None):
        return value
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if hasattr(value, "to_dict") and hasattr(value, "columns"):
        return json.loads(value.to_json(orient="records", double_precision=15))
    return to_json_value(value.tolist() if hasattr(value, "tolist") else str(value))


def format_json(document: Mapping[str, Any]) -> str:
    """Return a JSON document as text on one line."""
    return json.dumps(to_json_value(document), allow_nan=False)


def format_table(table: pd.DataFrame, *, index: bool = False) -> list[str]:
    """Return a table as lines, with or without its index; missing values are dashes."""
    lines = table.to_string(index=index, float_format="{:.3f}".format, na_rep="-").splitlines()
    return [line.rstrip() for line in lines]
