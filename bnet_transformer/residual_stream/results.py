"""Results: contributions of writers to a logit, of paths of two, and of pairs of writers to a score; readouts."""

from __future__ import annotations

import itertools
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from numbers import Real
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from bnet_transformer._core.checks import check_choice, check_int
from bnet_transformer._core.naming import join_name
from bnet_transformer._core.results import Fields
from bnet_transformer._core.stats import EffectTable, SentenceValues
from bnet_transformer._core.tensors import is_dense, rank_by_size, to_numpy
from bnet_transformer._core.tokens import distinguish
from bnet_transformer.compiler.linear import evaluate_affine
from bnet_transformer.data.encode import encode_value, to_reals
from bnet_transformer.declare import NodeSpec
from bnet_transformer.errors import NOT_GIVEN, BNetError, UnknownNameError, UnsupportedError, unknown_name_error
from bnet_transformer.graph import NodeGroup
from bnet_transformer.graph.template_graph import get_attention_name
from bnet_transformer.inference import SentenceState
from bnet_transformer.inference.posteriors import plan_state_probs
from bnet_transformer.interventions.cells import find_attention_groups
from bnet_transformer.residual_stream.linear_paths import LinearRun, Step, Values, Writer
from bnet_transformer.tpm import Attention

if TYPE_CHECKING:
    import pandas as pd


KINDS = ("input", "attention", "feed-forward", "bias")
TOP_COUNT = 10
SCALE_NOTE = "an identity at this sentence with the scales of norms held fixed, not an effect"


@dataclass(frozen=True, eq=False)
class ReadoutDirection:
    """A readout without its node and net, as in a file.

    Args:
        direction: The vector u.
        label: The function in words.
        states: The one or two states whose logits it contains; None for a vector.
    """

    _shapes = "direction: real *_"

    direction: Tensor
    label: str
    states: tuple[int, ...] | None


@dataclass(frozen=True, eq=False, repr=False)
class ContributionTable(EffectTable):
    """The base class of contributions: a table that prints its largest entries.

    Attributes:
        node: The name of the readout.
        norms: The names of the norms whose scale was held fixed.
        choices: The latent choices on which the node depends, at the states that the contributions are of: the most
            probable joint state.
        choice_prob: The posterior probability of this joint state; 1 without latent choices.
        digest: A digest of the words of the sentence; empty if they are unknown.
    """

    _number_format = "{:+.4f}"

    node: str
    norms: tuple[str, ...]
    choices: Mapping[str, int] = field(default_factory=dict, kw_only=True)
    choice_prob: float = field(default=1.0, kw_only=True)
    digest: str = field(default="", kw_only=True)

    def _to_sentence_values(self) -> SentenceValues:
        columns = dict(self._get_columns())
        parts = columns.pop("part")
        columns.pop("effect", None)
        keys = [columns[name] for name in columns if name not in ("kind", "group")]
        cells = tuple(" | ".join(map(str, row)) for row in zip(*keys, strict=True))
        settings = {"node": self.node, "of": getattr(self, "of", "")}
        return SentenceValues(
            "part", cells, columns, to_numpy(parts)[:, None], settings=settings, digests=(self.digest,)
        )

    def __repr__(self) -> str:
        return self._format_text()

    def _get_shown_rows(self) -> list[int]:
        return rank_by_size(self.to_dataframe()["part"].to_numpy(), TOP_COUNT)

    def describe_choices(self) -> str:
        """The states of the latent choices in words, such as " for the most probable choices c = 1 (P = 0.63)"."""
        if not self.choices:
            return ""
        states = [f"{name} = {state}" for name, state in self.choices.items()]
        states = [*states[:4], f"… ({len(states)})"] if len(states) > 5 else states
        noun = "choice" if len(states) == 1 else "choices"
        return f" for the most probable {noun} {', '.join(states)} (P = {self.choice_prob:.2g})"

    def _describe_norms(self) -> str:
        """The norms whose scale was held fixed, in words."""
        if not self.norms:
            return "no norms on the paths"
        names = ", ".join(self.norms[:4]) + (f", … ({len(self.norms)})" if len(self.norms) > 4 else "")
        return f"scales of norms held fixed: {names}"


@dataclass(frozen=True, eq=False, repr=False)
class Contributions(ContributionTable):
    """What each writer adds to a readout; the result of `Sentence.contributions`.

    The parts sum to the readout. They are an identity at this sentence, with the scale of each norm in `norms` held
    fixed; they are not the effects of an intervention, because later nodes depend on the writer too.

    Attributes:
        node: The name of the readout.
        norms: The names of the norms whose scale was held fixed.
        choices: The latent choices on which the node depends, at the states that the contributions are of: the most
            probable joint state.
        choice_prob: The posterior probability of this joint state; 1 without latent choices.
        digest: A digest of the words of the sentence; empty if they are unknown.
        of: The readout in words, such as `"Mary - John"`.
        writers: The writers, from the words to the readout.
        words: The words of all stacks; the last entry, `""`, is for nodes without words.
        values: The part of each writer and word, `[writer, word]`. The word of a head is the word that it
            reads, and that of other writers is their own.
        value: The readout, a number.
        effects: With `exact=True`, for each writer the readout minus the readout of a run in which the output of the
            writer is zero at the words of its row (`writer.words`) and all later nodes follow, `[writer]`; NaN for
            biases. None otherwise.
        readout: The readout as a linear function of the node; after `bt.load`, without its net.
        special: For each of `words`, whether it is a special token; empty if this is unknown.
    """

    _shapes = (
        "writers: any writer; words: any word; special: any word?; values: real writer word; value: real; effects: "
        "real writer"
    )

    of: str
    writers: tuple[Writer, ...] = field(repr=False)
    words: tuple[str, ...] = field(repr=False)
    values: Tensor = field(repr=False)
    value: Tensor = field(repr=False)
    effects: Tensor | None = field(default=None, repr=False)
    readout: ReadoutDirection | None = field(default=None, repr=False)
    special: tuple[bool, ...] = field(default=(), repr=False)

    def _to_fields(self) -> Fields:
        part = self.readout
        part = None if part is None else ReadoutDirection(part.direction, part.label, part.states)
        return {**super()._to_fields(), "readout": part}

    @property
    def parts(self) -> Tensor:
        """The part of each writer, `[writer]`; the sum over the words."""
        return self.values.sum(-1)

    @property
    def total(self) -> Tensor:
        """The sum of all parts, a number, which equals `value` up to rounding."""
        return self.parts.sum(-1)

    def __getitem__(self, name: str) -> Tensor:
        """The part of a writer: the sum of its rows, of which there are two if `do` sets it at some of its words.

        Args:
            name: The name of a writer, such as `"a_3_2"`.

        Returns:
            The part, a number.

        Raises:
            UnknownNameError: There is no such writer.
        """
        names = [writer.name for writer in self.writers]
        if name not in names:
            writer = next((w for w in self.writers if w.axes and f"{name}_".startswith(f"{w.group}_")), None)
            if writer is None:
                raise unknown_name_error("writer", name, names)
            allowed = ", ".join(w.name for w in self.writers if w.group == writer.group)
            raise UnknownNameError("writer", expected=writer.form, actual=repr(name), allowed=allowed)
        return self.parts[..., [k for k, writer in enumerate(self.writers) if writer.name == name]].sum(-1)

    def top(self, count: int = TOP_COUNT) -> list[tuple[str, float]]:
        """The writers with the largest absolute parts.

        Args:
            count: The maximum number of writers.

        Returns:
            Pairs of a name and its part, in decreasing order of the absolute part.
        """
        return [(self.writers[k].name, float(self.parts[k])) for k in rank_by_size(self.parts, count)]

    def by_head(self) -> pd.DataFrame:
        """The parts of heads, also of those that `do` sets: a row for each group of heads, a column for each head.

        In a net with groups of heads, column `1_0` is head 0 of group 1.
        """
        import pandas as pd

        parts = self.parts.tolist()
        heads = [(w, part) for w, part in zip(self.writers, parts, strict=True) if w.is_head and w.kind != "bias"]
        rows: dict[str, dict[tuple[int, ...], float]] = {}
        for writer, part in heads:
            row = rows.setdefault(writer.group, {})
            row[writer.plates] = row.get(writer.plates, 0.0) + part
        columns = dict.fromkeys("_".join(writer.axes) for writer, _ in heads)
        order = sorted({writer.plates for writer, _ in heads})
        table = [[row.get(plates, np.nan) for plates in order] for row in rows.values()]
        names = ["_".join(map(str, plates)) or "all" for plates in order]
        frame = pd.DataFrame(table, index=list(rows), columns=names)
        return frame.rename_axis(index="group", columns=next(iter(columns), "head") or "head")

    def by_word(self) -> pd.DataFrame:
        """The parts by word: for heads the word that they read, for other writers their own word."""
        import pandas as pd

        columns = {}
        for kind in KINDS:
            index = [k for k, writer in enumerate(self.writers) if writer.kind == kind]
            if index:
                columns[kind] = to_numpy(self.values[index].sum(0))
        frame = pd.DataFrame(columns)
        frame.insert(0, "word", list(self.words))
        frame["total"] = to_numpy(self.values.sum(0))
        has_nodes_without_words = bool(self.values[:, -1].any())
        return frame if has_nodes_without_words else frame.iloc[:-1]

    def _get_cells(self) -> dict[str, Sequence[Any]]:
        names = {"writer": "name", "kind": "kind", "group": "group"}
        return {key: [getattr(writer, name) for writer in self.writers] for key, name in names.items()}

    def _get_numbers(self) -> dict[str, Any]:
        return {"part": self.parts} if self.effects is None else {"part": self.parts, "effect": self.effects}

    @property
    def caption(self) -> str:
        """The subject, the value and the convention, in one line."""
        value = f"{float(self.value):.4f}{self.describe_choices()}"
        return f"contributions to {self.of} at {self.node} = {value}; {self._describe_norms()}"


@dataclass(frozen=True, eq=False, repr=False)
class PathContributions(ContributionTable):
    """The paths of two: what each writer adds to a readout through the values of each head.

    The attention `P(j | i)` of the head and the scales of all norms on the path are held fixed. A row sums to the part
    of its head in `Contributions`.

    Attributes:
        node: The name of the readout.
        norms: The names of the norms whose scale was held fixed.
        choices: The latent choices on which the node depends, at the states that the contributions are of: the most
            probable joint state.
        choice_prob: The posterior probability of this joint state; 1 without latent choices.
        digest: A digest of the words of the sentence; empty if they are unknown.
        of: The readout in words.
        heads: The heads that add to the readout, the last of the two.
        writers: The writers whose outputs are values of these heads, the first of the two.
        values: The part of each path, `[head, writer]`.
    """

    _shapes = "heads: any head; writers: any writer; values: real head writer"

    of: str
    heads: tuple[Writer, ...] = field(repr=False)
    writers: tuple[Writer, ...] = field(repr=False)
    values: Tensor = field(repr=False)

    def to_dataframe(self) -> pd.DataFrame:
        """A data frame with one row for each path whose part is not 0: its writer, its head, and its part."""
        return super().to_dataframe().query("part != 0").reset_index(drop=True)

    def _get_cells(self) -> dict[str, Sequence[Any]]:
        heads, writers = ([writer.name for writer in axis] for axis in (self.heads, self.writers))
        return {"writer": writers * len(heads), "head": [head for head in heads for _ in writers]}

    def _get_numbers(self) -> dict[str, Any]:
        return {"part": self.values.flatten()}

    @property
    def caption(self) -> str:
        """The subject, the size and the convention, in one line."""
        size = f"{len(self.writers)} writers through {len(self.heads)} heads"
        subject = f"paths of two to {self.of} at {self.node}{self.describe_choices()}"
        return f"{subject}: {size}; attention held fixed; {self._describe_norms()}"


@dataclass(frozen=True, eq=False, repr=False)
class ScoreContributions(ContributionTable):
    """What each pair of writers adds to the attention scores of a word: one on the side of the query, one of the key.

    The scores are those before a soft-cap and before the softmax, and are centred: the mean over the words j that the
    word attends to is subtracted, because a constant does not change the softmax. The parts sum to the centred scores.
    Without a softmax a constant matters, so the scores are not centred; then `is_centred` is False.

    Attributes:
        node: The name of the row of attention, such as `"j_1_0_9"`.
        norms: The names of the norms whose scale was held fixed.
        choices: The latent choices on which the node depends, at the states that the contributions are of: the most
            probable joint state.
        choice_prob: The posterior probability of this joint state; 1 without latent choices.
        digest: A digest of the words of the sentence; empty if they are unknown.
        queries: The writers on the side of the query.
        keys: The writers on the side of the key.
        words: The words j that the word attends to.
        indices: The index j of each of these words in its sentence.
        values: The part of each pair in the centred score of each word, `[query writer, key writer, word]`.
        positions: The part of the bias by distance, `[word]`; zeros without one.
        scores: The centred scores, `[word]`.
        weights: The attention `P(j | i)` of these words, `[word]`.
        effects: With `exact=True`, for each writer by name, the centred scores minus those of a run in which the output
            of the writer is zero at all words and all later nodes follow, `[word]`. None otherwise.
        is_centred: Whether the mean over the words is subtracted from the scores and their parts.
    """

    _shapes = (
        "queries: any query; keys: any key; words indices: any word; values: real query key word; positions scores "
        "weights: real word; effects: {_} real word"
    )

    queries: tuple[Writer, ...] = field(repr=False)
    keys: tuple[Writer, ...] = field(repr=False)
    words: tuple[str, ...]
    indices: tuple[int, ...]
    values: Tensor = field(repr=False)
    positions: Tensor = field(repr=False)
    scores: Tensor = field(repr=False)
    weights: Tensor = field(repr=False)
    effects: Mapping[str, Tensor] | None = field(default=None, repr=False)
    is_centred: bool = True

    @property
    def total(self) -> Tensor:
        """The sum of all parts, `[word]`, which equals `scores` up to rounding."""
        return self.values.sum((-3, -2)) + self.positions

    def by_writer(self, side: str = "key") -> pd.DataFrame:
        """The parts of the writers of one side, summed over those of the other side.

        Args:
            side: `"query"` or `"key"` (default).

        Returns:
            A data frame with a row for each writer and a column for each word j, such as `"3 cat"`, without the bias by
            distance.
        """
        import pandas as pd

        check_choice("side", side, ("query", "key"))
        writers, dim = (self.queries, 1) if side == "query" else (self.keys, 0)
        parts = to_numpy(self.values.sum(dim))
        names = pd.Index([writer.name for writer in writers], name=side)
        return pd.DataFrame(parts, index=names, columns=pd.Index(self._word_labels, name="word"))

    @property
    def _word_labels(self) -> list[str]:
        """The index j and the text of each word, such as `"3 cat"`."""
        return [f"{j} {word}" for j, word in zip(self.indices, self.words, strict=True)]

    def at_word(self, word: int | None = None) -> tuple[int, Tensor]:
        """The table of pairs for one word j.

        Args:
            word: The index j of the word; by default the word with the largest weight.

        Returns:
            The position of the word in `words`, and a tensor `[query writer, key writer]`.

        Raises:
            BNetError: The row does not read this word.
        """
        values = self.values
        if word is not None and check_int("word", word, minimum=0) not in self.indices:
            first, last = self.indices[0], self.indices[-1]
            is_gapless = last - first == len(self.indices) - 1
            allowed = f"{first} to {last}" if is_gapless else ", ".join(map(str, self.indices))
            raise BNetError(
                "word", expected=f"the index j of a word that {self.node} reads", actual=word, allowed=allowed
            )
        k = int(self.weights.argmax()) if word is None else self.indices.index(word)
        return k, values[..., k]

    def top(self, count: int = TOP_COUNT, word: int | None = None) -> list[tuple[str, str, float]]:
        """The pairs of writers with the largest absolute parts in the score of one word j.

        Args:
            count: The maximum number of pairs.
            word: The index j of the word; by default the word with the largest weight.

        Returns:
            Triples of the writer on the side of the query, the writer on the side of the key, and the part of the pair,
            in decreasing order of the absolute part.
        """
        table = self.at_word(word)[1]
        pairs = [divmod(k, len(self.keys)) for k in rank_by_size(table.flatten(), count)]
        return [(self.queries[q].name, self.keys[k].name, float(table[q, k])) for q, k in pairs]

    def _get_columns(self, positions: Sequence[int] | None = None) -> Mapping[str, Any]:
        """The columns of the pairs, and of the bias by distance, in the scores of some words; by default of all."""
        positions = range(len(self.words)) if positions is None else positions
        words = [self._word_labels[k] for k in positions]
        queries, keys = ([writer.name for writer in axis] for axis in (self.queries, self.keys))
        rows = list(itertools.product(queries, keys, words))
        parts = self.values[..., positions].flatten()
        if bool(self.positions.any()):
            rows += [("position", "position", word) for word in words]
            parts = torch.cat([parts, self.positions[positions]])
        return dict(zip(("query", "key", "word"), zip(*rows, strict=True), strict=True)) | {"part": parts}

    def to_dataframe(self, word: int | str | None = None) -> pd.DataFrame:
        """A data frame with one row for each pair of writers, and one for the bias by distance, in the score of a word.

        Args:
            word: The index j of the word, or `"all"` for the rows of all words; by default the word with the largest
                weight.

        Returns:
            A data frame with the columns `query`, `key`, `word` and `part`.
        """
        import pandas as pd

        positions = None if word == "all" else [self.at_word(word)[0]]  # type: ignore[arg-type]
        columns = dict(self._get_columns(positions))
        return pd.DataFrame(columns | {"part": to_numpy(columns["part"])})

    @property
    def caption(self) -> str:
        """The subject, the size and the convention, in one line."""
        size = f"{len(self.queries)} x {len(self.keys)} writers, {len(self.words)} words"
        convention = "centred" if self.is_centred else "not centred, as there is no softmax"
        subject = f"contributions to the scores of {self.node}{self.describe_choices()}"
        return f"{subject}: {size}; {convention}; {self._describe_norms()}"


# --------------------------------------------------------------------------------------------------------------------
# Readouts: a linear function of a node, its value at a sentence, and its derivative by the linear parents.


OF_FORMS = "a state or its label, a pair of them, or a vector"


@dataclass(frozen=True)
class Readout(ReadoutDirection):
    """A linear function of a node: `u . z` with its logits, its mean or its value z.

    Args:
        node: The ground id of the node.
        spec: Its group.
        index: Its index along the plates, and its word if it has one.
    """

    node: int
    spec: NodeSpec
    index: tuple[int, ...]

    @property
    def word(self) -> int | None:
        """The word of the node; None without one."""
        return self.index[-1] if self.spec.group.word_stack is not None else None


def parse_readout(state: SentenceState, name: str, of: object) -> Readout:
    """The readout of a node; an error for a node that is no affine function of its parents."""
    model, subject = state.model, f"contributions to {name}"
    node = model.ground.id(name)
    group, index = model.ground.unravel_index(node)
    spec = state.network.specs[group.index]
    if node in model.do or spec.tpm.kind == "input":
        expected = "a node that depends on others"
        actual = "a node that is set by do" if node in model.do else "an input"
        raise BNetError(subject, expected=expected, actual=actual)
    if not spec.tpm.linear_parents(*spec.tpm_parents):
        expected = "a node that is a sum or a linear map of its parents, a norm, or a readout of these"
        hint = _suggest_nodes(state, spec, index)
        raise UnsupportedError(subject, expected=expected, actual=f"the TPM {type(spec.tpm).__name__}", hint=hint)
    shape = (model.count_states(node),) if spec.tpm.kind == "discrete" else spec.shape
    if len(shape) != 1:
        raise UnsupportedError(subject, expected="a vector or a discrete node", actual=f"shape {shape}")
    direction, label, states = _parse_direction(state, node, shape[0], of)
    return Readout(direction, label, states, node, spec, index)


def name_attention_row(group: NodeGroup, index: tuple[int, ...]) -> str:
    """The name of a row of attention, such as `j_1_0_9`."""
    return join_name(get_attention_name(group), (*(() if group.slice is None else (group.slice,)), *index))


def _suggest_nodes(state: SentenceState, spec: NodeSpec, index: tuple[int, ...]) -> str:
    """Names of a readout and of a row of attention in this sentence, near a node that is neither."""
    ground, network, hints = state.ground, state.network, []
    leaves = [m for m in network.specs if not network.graph.out_edges[m.group.index]]
    readout = next((m.group for m in leaves if m.tpm.linear_parents(*m.tpm_parents)), None)
    if readout is not None:
        hints.append(f"Use a readout such as {ground.name(int(ground.select_nodes(readout)[-1]))}")
    groups = [group for members in find_attention_groups(state.model).values() for group in members]
    if spec.group in groups:
        hints.append(f"for its scores of attention use {name_attention_row(spec.group, index)}")
    elif groups:
        group = next((g for g in groups if g.slice == spec.group.slice), groups[0])
        last = tuple(size - 1 for size in ground.shapes[group.index])
        hints.append(f"for scores of attention a row such as {name_attention_row(group, last)}")
    return "; ".join(hints)


def _parse_direction(
    state: SentenceState, node: int, size: int, of: object
) -> tuple[Tensor, str, tuple[int, ...] | None]:
    """The vector u of a readout, its name, and its states."""
    dtype, device = state.network.dtype, state.network.device
    name = state.ground.name(node)
    vector = _to_vector(of)
    if vector is not None:
        if tuple(vector.shape) != (size,) or not bool(vector.isfinite().all()):
            raise BNetError("of", expected=f"a finite vector of {size} numbers", actual=f"shape {tuple(vector.shape)}")
        return vector.to(device, dtype), "a direction", None
    label_node = _find_label_node(state, node, size)
    if of is None and label_node is not None:
        of = int(plan_state_probs(state.query([label_node])).run().argmax())
    pair = tuple(of) if isinstance(of, tuple | list) else (of,)
    if of is None or len(pair) not in (1, 2):
        hint = f'For example contributions("{name}", of=0), or of=(0, 1) for a difference'
        raise BNetError("of", expected=OF_FORMS, hint=hint, actual=NOT_GIVEN if of is None else of)
    states = [_parse_state(state, label_node, name, size, item) for item in pair]
    labels = None if label_node is None else state.labels(label_node)
    direction = torch.zeros(size, dtype=dtype, device=device)
    for k, sign in zip(states, (1.0, -1.0), strict=False):
        direction[k] += sign
    names = distinguish(labels[k] if labels else f"state {k}" for k in states)
    return direction, " - ".join(names) if len(pair) == 2 else f"logit of {names[0]}", tuple(states)


def _to_vector(of: object) -> Tensor | None:
    """A tensor, an array or a list of real numbers as a tensor; None for states, which are integers or labels."""
    if isinstance(of, list | tuple):
        has_reals = any(isinstance(item, float | np.floating) for item in of)
        is_vector = has_reals and all(isinstance(item, Real) and not isinstance(item, bool) for item in of)
    elif isinstance(of, np.ndarray):
        is_vector = np.issubdtype(of.dtype, np.floating)
    else:
        is_vector = is_dense(of) and of.is_floating_point()
    return to_reals("of", of) if is_vector else None


def _find_label_node(state: SentenceState, node: int, size: int) -> int | None:
    """The discrete node whose states are the entries of a node: the node itself, or a child that uses it as logits."""
    model, network = state.model, state.network
    if model.spec(node).tpm.kind == "discrete":
        return node
    for child in model.ground.children(node):
        spec = model.spec(child)
        if spec.tpm.kind == "discrete" and spec.tpm.states == size and not network.graph.out_edges[spec.group.index]:
            return child
    return None


def _parse_state(state: SentenceState, label_node: int | None, name: str, size: int, item: object) -> int:
    """A state from its number or its label."""
    if label_node is not None:
        return int(encode_value(state.model, label_node, item, evidence=True))
    if isinstance(item, bool) or not isinstance(item, int) or not 0 <= item < size:
        expected = f"an integer from 0 to {size - 1}; the entries of {name} have no labels"
        raise BNetError("of", expected=expected, actual=item)
    return item


def compute_readout(state: SentenceState, name: str, readout: ReadoutDirection) -> Tensor | None:
    """The value of the same readout in another sentence, a number; None if its node is set or has another size."""
    model = state.model
    node = model.ground.id(name)
    group, index = model.ground.unravel_index(node)
    spec = state.network.specs[group.index]
    shape = (model.count_states(node),) if spec.tpm.kind == "discrete" else spec.shape
    if node in model.do or shape != readout.direction.shape or not spec.tpm.linear_parents(*spec.tpm_parents):
        return None
    direction = readout.direction.to(state.network.device, state.network.dtype)
    moved = Readout(direction, readout.label, readout.states, node, spec, index)
    return evaluate_readout(make_run(state, moved), moved, {})[0].detach()


def make_run(state: SentenceState, readout: Readout, further_groups: Collection[int] = ()) -> LinearRun:
    """The run of a sentence with the values on all linear paths to a readout and to further groups."""
    spec, name = readout.spec, state.ground.name(readout.node)
    positions = spec.tpm.linear_parents(*spec.tpm_parents)
    outputs = {parent.index for parent in spec.parents} | {s for parent in spec.parents for _, s in parent.pick}
    groups = frozenset({*(spec.parents[k].index for k in positions), *further_groups})
    return LinearRun(state, f"contributions to {name}", groups, frozenset(outputs))


def evaluate_readout(run: LinearRun, readout: Readout, values: Values) -> Tensor:
    """The readout from some given values of the linear parents, and its constant, `[2]`."""
    spec, slots = readout.spec, readout.spec.tpm.linear_parents(*readout.spec.tpm_parents)
    if isinstance(spec.tpm, Attention):
        raise UnsupportedError(run.subject, expected="a readout", actual="an Attention", hint="Use a later node")
    context, base = run.gather(spec, {}, readout.word)
    parents = run.gather(spec, values, readout.word)[1]
    # The batch has the values and zeros, so that a large matrix of logits is read once for the value and the constant.
    pairs = enumerate(zip(parents, base, strict=True))
    mixed = [torch.cat([new, torch.zeros_like(new)]) if k in slots else old for k, (new, old) in pairs]
    states = readout.states
    if states is not None:
        entries = torch.tensor(states, device=mixed[0].device)
        if (selected := spec.tpm.select_entries(entries, context, *mixed)) is not None:
            context, mixed, states = selected[0], [*selected[1]], tuple(range(len(states)))
    value = evaluate_affine(run.execution, spec, context, mixed, base, readout.word)
    return _project(run.select_node(spec, readout.index, value, 1), readout.direction, states)


class ReadoutSteps(NamedTuple):
    """The pass back from a readout.

    Args:
        value: The readout, a number.
        constant: Its bias, a number.
        steps: The groups on the paths, parents first.
        norms: The norms on the paths.
    """

    value: Tensor
    constant: Tensor
    steps: list[Step]
    norms: tuple[str, ...]


def pull_back_readout(run: LinearRun, readout: Readout) -> ReadoutSteps:
    """The adjoints of the groups on the paths to a readout."""
    spec, word = readout.spec, readout.word
    words = np.array([i == (word or 0) for i in range(run.count_words(spec.group.index))])
    slots = spec.tpm.linear_parents(*spec.tpm_parents)
    seeds = torch.tensor([[1.0, 0.0]], dtype=readout.direction.dtype, device=readout.direction.device)
    output, steps = run.pull_back(
        spec, slots, words, word, lambda values: evaluate_readout(run, readout, values), seeds
    )
    norms = run.list_norms({**{step.spec.group.index: step.words for step in steps}, spec.group.index: words})
    return ReadoutSteps(output[0], output[1], steps, tuple(norms))


def _project(vector: Tensor, direction: Tensor, states: tuple[int, ...] | None) -> Tensor:
    """`u . z` for vectors z, `[..., size]`; entries with u = 0 do not count, even if a logit is -inf."""
    if states is None:
        return vector @ direction
    first, *second = (vector[..., k] for k in states)
    return first - second[0] if second else first
