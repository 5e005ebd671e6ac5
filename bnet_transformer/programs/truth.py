"""The true circuit of a compiled program: the edges from writers to readers that have an effect.

A writer adds to the residual stream: the embedding `x_0`, a head `a_slice_head`, or a feed-forward step `ffn_slice`. A
reader is the query, key or value of a head (`q_slice_head`), a feed-forward step, or the readout `y`. An edge is all
words together, and its name has no word: `"a_0_1 -> q_2_3"`.

An edge is true *by effect* if in some pair of sentences a corruption of this edge only changes the output: the reader
is computed from the writers in the run of the first sentence, with this writer's output in the run of the second one,
and then the rest of the net runs with the reader at this value. An edge is true *by structure* if the reader uses a
variable that the writer writes. The two differ where a path has no influence, such as that of a copy which is read only
where another one is missing.
"""

from __future__ import annotations

import itertools
import random
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from bnet_transformer._core.checks import check_float, check_int, check_seed
from bnet_transformer.errors import BNetError
from bnet_transformer.programs.compiled import Compiled
from bnet_transformer.programs.layout import list_sources
from bnet_transformer.programs.sops import Aggregate, SelectedShare, SOp, Value

if TYPE_CHECKING:
    import pandas as pd

Words = tuple[Value, ...]
Pair = tuple[Words, Words]
UNCHANGED = 1e-6  # a reader that differs by less is not changed
MAX_SENTENCES = 5000  # that are enumerated
CHUNK = 1024  # pairs in one run


@dataclass(frozen=True, eq=False, repr=False)
class TrueEdges:
    """The true circuit of a compiled program.

    Attributes:
        effects: For each edge from a writer to a later reader, the share of the pairs of sentences in which its
            corruption changes the output.
        structural: The edges whose reader uses a variable that the writer writes.
        num_pairs: The number of pairs of sentences.
        is_exhaustive: Whether these are all pairs of sentences of the given length. Otherwise an effect that occurs in
            rare pairs can be missing.
    """

    effects: Mapping[str, float]
    structural: frozenset[str]
    num_pairs: int
    is_exhaustive: bool

    @property
    def edges(self) -> frozenset[str]:
        """The edges that are true by effect."""
        return frozenset(edge for edge, share in self.effects.items() if share > 0)

    @property
    def without_effect(self) -> frozenset[str]:
        """The edges that are true by structure, but have no effect."""
        return self.structural - self.edges

    def to_dataframe(self) -> pd.DataFrame:
        """A data frame with a row for each edge."""
        import pandas as pd

        rows = [
            {"edge": edge, "effect": share, "by effect": share > 0, "by structure": edge in self.structural}
            for edge, share in self.effects.items()
        ]
        return pd.DataFrame(rows, columns=["edge", "effect", "by effect", "by structure"])

    def __repr__(self) -> str:
        counts = f"{len(self.edges)} by effect, {len(self.structural)} by structure"
        pairs = f"{self.num_pairs} pairs{'' if self.is_exhaustive else ', a sample'}"
        return f"<TrueEdges: of {len(self.effects)} edges {counts}; {pairs}>"


def true_edges(
    compiled: Compiled,
    sentences: Sequence[object] | None = None,
    *,
    max_pairs: int = 1024,
    tolerance: float = 1e-3,
    seed: int = 0,
) -> TrueEdges:
    """The true circuit of a compiled program, by effect and by structure.

    Args:
        compiled: The compiled program.
        sentences: The sentences from which pairs are formed, all of one length. None (default) for all sentences of
            `max_words` words for which the program is defined; from more than 5000, a sample.
        max_pairs: The number of pairs. If there are more ordered pairs, this number is drawn, half of them with one
            word replaced. Default 1024.
        tolerance: The change of a numeric output that counts as a change; for states, another most probable value
            does. Default 0.001.
        seed: The seed of the drawn pairs. Default 0.

    Returns:
        The edges with their effects.

    Raises:
        BNetError: There are fewer than two sentences, or they differ in length or do not fit the program.

    >>> from bnet_transformer import programs
    >>> before = programs.select(programs.indices, programs.indices, lambda j, i: j == i - 1)
    >>> compiled = programs.compile(programs.aggregate(before, programs.tokens), vocabulary="ab", max_words=3)
    >>> sorted(true_edges(compiled).edges)
    ['a_0_0 -> y', 'x_0 -> v_0_0']
    """
    pairs, is_exhaustive = _make_pairs(compiled, sentences, check_int("max_pairs", max_pairs), check_seed(seed))
    tolerance = check_float("tolerance", tolerance, above=0)
    counts = dict.fromkeys(list_edges(compiled), 0)
    for start in range(0, len(pairs), CHUNK):
        runs = _PairRuns(compiled, pairs[start : start + CHUNK], tolerance)
        for edge, changed in runs.iter_effects():
            counts[edge] += int(changed.sum())
    effects = {edge: count / len(pairs) for edge, count in counts.items()}
    return TrueEdges(effects, structural_edges(compiled), len(pairs), is_exhaustive)


def list_edges(compiled: Compiled) -> tuple[str, ...]:
    """The names of all edges from a writer to a later reader.

    Args:
        compiled: The compiled program.

    Returns:
        The names, in the order of the readers and then of the writers.
    """
    return tuple(
        f"{writer} -> {reader}"
        for group, _ in _list_readers(compiled)
        for reader in _list_members(compiled, group)
        for source in _list_writers(compiled, group)
        for writer in _list_members(compiled, source)
    )


def structural_edges(compiled: Compiled) -> frozenset[str]:
    """The edges whose reader uses a variable that the writer writes; constant directions are no variables.

    Args:
        compiled: The compiled program.

    Returns:
        The names of the edges.
    """
    layout = compiled.layout
    writes: dict[SOp, str] = {}
    reads: list[tuple[str, tuple[SOp, ...]]] = [("y", (compiled.program.output,))]
    for t, (heads, steps) in enumerate(zip(layout.heads, layout.steps, strict=True)):
        for h, sop in enumerate(heads):
            assert isinstance(sop, Aggregate | SelectedShare)
            writes[sop] = f"a_{t}_{h}"
            terms = sop.selector.terms
            reads.append((f"q_{t}_{h}", tuple(term.queries for term in terms)))
            reads.append((f"k_{t}_{h}", tuple(term.keys for term in terms)))
            reads.append((f"v_{t}_{h}", (sop.values,) if isinstance(sop, Aggregate) else ()))
        for sop in steps:
            writes[sop] = f"ffn_{t}"
            reads.append((f"ffn_{t}", sop.parents))
    pairs = {
        (writes.get(source, "x_0"), reader) for reader, sops in reads for sop in sops for source, _ in list_sources(sop)
    }
    return frozenset(f"{writer} -> {reader}" for writer, reader in pairs)


def _list_readers(compiled: Compiled) -> list[tuple[str, int]]:
    """The groups of readers, each with its sublayer: 2 t for attention, 2 t + 1 for the feed-forward step."""
    slices = len(compiled.layout.heads)
    readers = [(f"{role}_{t}", 2 * t + (role == "ffn")) for t in range(slices) for role in ("q", "k", "v", "ffn")]
    return [*readers, ("y", 2 * slices)]


def _list_writers(compiled: Compiled, reader: str) -> list[str]:
    """The groups of writers before a reader."""
    end = dict(_list_readers(compiled))[reader]
    return ["x_0", *(f"{('a', 'ffn')[k % 2]}_{k // 2}" for k in range(end))]


def _list_members(compiled: Compiled, group: str) -> list[str]:
    """The writers or readers of a group: one for each head."""
    if group[0] not in "aqkv":
        return [group]
    num_heads = compiled.net.network.graph.plate_sizes["head"]
    return [f"{group}_{h}" for h in range(num_heads)]


class _PairRuns:
    """The runs of pairs of sentences of one length, and those with one corrupted edge."""

    def __init__(self, compiled: Compiled, pairs: Sequence[Pair], tolerance: float) -> None:
        self.compiled, self.tolerance = compiled, tolerance
        names = [*_list_writers(compiled, "y"), *(group for group, _ in _list_readers(compiled))]
        self.ids = compiled.to_ids([pair[0] for pair in pairs])
        self.base = self._run(self.ids, want=[*dict.fromkeys(names)])
        other = self._run(compiled.to_ids([pair[1] for pair in pairs]), want=_list_writers(compiled, "y"))
        self.other = other

    def iter_effects(self) -> Iterator[tuple[str, Tensor]]:
        """Each edge with the pairs in which its corruption changes the output, `[pair]`."""
        groups = itertools.groupby(_list_readers(self.compiled), key=lambda reader: reader[1])
        for names in ([group for group, _ in items] for _, items in groups):
            for source in _list_writers(self.compiled, names[0]):
                for h, writer in enumerate(_list_members(self.compiled, source)):
                    values = self._compute_readers(names, source, h)
                    for group, value in values.items():
                        for k, reader in enumerate(_list_members(self.compiled, group)):
                            yield f"{writer} -> {reader}", self._find_changes(group, k, value)

    def _compute_readers(self, names: list[str], source: str, h: int) -> dict[str, Tensor]:
        """The values of readers if they read one writer in the other run."""
        writers = {name: self.base[name] for name in _list_writers(self.compiled, names[0])}
        return self._run(self.ids, do={**writers, source: self._replace(source, h, self.other[source])}, want=names)

    def _find_changes(self, group: str, k: int, value: Tensor) -> Tensor:
        """The pairs in which the output changes if one reader has the value of its group, `[pair]`."""
        if group == "y":
            return self._differs(value, self.base["y"])
        replaced = self._replace(group, k, value)
        changed = ((replaced - self.base[group]).abs() > UNCHANGED).flatten(1).any(1)
        if changed.any():
            readouts = self._run(self.ids[changed], do={group: replaced[changed]}, want=["y"])["y"]
            changed[changed.clone()] = self._differs(readouts, self.base["y"][changed])
        return changed

    def _replace(self, group: str, k: int, value: Tensor) -> Tensor:
        """The value of a group in the base run with that of one member replaced."""
        if len(_list_members(self.compiled, group)) == 1:
            return value
        replaced = self.base[group].clone()
        replaced[:, k] = value[:, k]
        return replaced

    def _differs(self, readouts: Tensor, base: Tensor) -> Tensor:
        """The pairs in which the output of a word differs, `[pair]`; the readout of BOS is no output."""
        readouts, base = (values[:, int(self.compiled.has_bos) :] for values in (readouts, base))
        if self.compiled.output_values:
            return (readouts.argmax(-1) != base.argmax(-1)).any(1)
        return ((readouts - base).abs() > self.tolerance).flatten(1).any(1)

    @torch.no_grad()
    def _run(self, ids: Tensor, *, want: list[str], do: Mapping[str, Tensor] | None = None) -> dict[str, Tensor]:
        """Values of groups, by name."""
        values = self.compiled.module(ids, want=want, do=do)
        assert isinstance(values, dict)
        return values


def _make_pairs(
    compiled: Compiled, sentences: Sequence[object] | None, max_pairs: int, seed: int
) -> tuple[list[Pair], bool]:
    """Pairs of sentences, and whether these are all pairs."""
    generator, is_sample = random.Random(seed), False
    if sentences is None:
        items, is_sample = list_sentences(compiled, compiled.program.max_words, generator)
    else:
        items = list(dict.fromkeys(compiled.program.parse(sentence) for sentence in sentences))
    if len(items) < 2 or len({len(words) for words in items}) > 1:
        raise BNetError("sentences", expected="at least two different sentences of one length", actual=len(items))
    if len(items) * (len(items) - 1) <= max_pairs:
        return list(itertools.permutations(items, 2)), not is_sample
    neighbours: dict[tuple[int, Words], list[Words]] = {}
    for words in items:
        for i in range(len(words)):
            neighbours.setdefault((i, (*words[:i], None, *words[i + 1 :])), []).append(words)
    pairs: dict[Pair, None] = {}
    for k in range(20 * max_pairs):
        words = generator.choice(items)
        i = generator.randrange(len(words))
        other = generator.choice(neighbours[i, (*words[:i], None, *words[i + 1 :])] if k % 2 else items)
        if other != words:
            pairs[words, other] = None
        if len(pairs) == max_pairs:
            break
    return [*pairs], False


def list_sentences(compiled: Compiled, length: int, generator: random.Random) -> tuple[list[Words], bool]:
    """The sentences of one length for which a program is defined, and whether they are only a sample.

    Args:
        compiled: The compiled program.
        length: The number of words.
        generator: The generator of the sample.

    Returns:
        The sentences, all of them up to 5000, and whether they are a sample.
    """
    vocabulary = compiled.program.vocabulary
    is_sample = len(vocabulary) ** length > MAX_SENTENCES
    if is_sample:
        draws = (tuple(generator.choice(vocabulary) for _ in range(length)) for _ in range(MAX_SENTENCES))
        candidates = [*dict.fromkeys(draws)]
    else:
        candidates = [*itertools.product(vocabulary, repeat=length)]
    return [words for words in candidates if is_defined(compiled, words)], is_sample


def is_defined(compiled: Compiled, words: Words) -> bool:
    """Whether the program has a value for a sentence: no aggregate has several categorical values.

    Args:
        compiled: The compiled program.
        words: The tokens of the sentence.

    Returns:
        False if the evaluation raises an error.
    """
    try:
        compiled.run(words)
    except BNetError:
        return False
    return True
