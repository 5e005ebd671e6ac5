"""The true circuit of a compiled program: the edges from writers to readers that have an effect.

Writers, readers and edges are those of `net.edges()`. A writer adds to the residual stream: the embedding `embed`, a
head `a_slice_head`, or a feed-forward step `ffn_slice`; positions do not depend on the words, so they are no writer. A
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
from html import escape
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from bnet_transformer._core.checks import check_float, check_int, check_seed
from bnet_transformer._core.memory import translate_memory_errors
from bnet_transformer._core.saved_results import SavedResult
from bnet_transformer.errors import BNetError
from bnet_transformer.interventions.edges.structure import EdgeStructure
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
class TrueEdges(SavedResult):
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

    def _repr_html_(self) -> str:
        """The counts and the true edges as HTML."""
        frame = self.to_dataframe()
        true = frame[frame["by effect"] | frame["by structure"]]
        return f"<p>{escape(repr(self)[1:-1])}</p>{true.to_html(index=False, float_format='{:.3g}'.format)}"


@translate_memory_errors("true_edges")
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
    ['a_0_0 -> y', 'embed -> v_0_0']
    """
    pairs, is_exhaustive = _make_pairs(compiled, sentences, check_int("max_pairs", max_pairs), check_seed(seed))
    tolerance = check_float("tolerance", tolerance, above=0)
    counts = dict.fromkeys(list_edges(compiled), 0)
    for start in range(0, len(pairs), CHUNK):
        runs = PairRuns(compiled, pairs[start : start + CHUNK], tolerance)
        for edge, changed in runs.iter_effects():
            counts[edge] += int(changed.sum())
    effects = {edge: count / len(pairs) for edge, count in counts.items()}
    return TrueEdges(effects, structural_edges(compiled), len(pairs), is_exhaustive)


def list_edges(compiled: Compiled) -> tuple[str, ...]:
    """The names of all edges from a writer to a later reader, as in `net.edges()`.

    Args:
        compiled: The compiled program.

    Returns:
        The names, in the order of the readers and then of the writers.
    """
    return EdgeStructure.of_network(compiled.net.network).edges.names


def structural_edges(compiled: Compiled) -> frozenset[str]:
    """The edges whose reader uses a variable that the writer writes; constant directions are no variables.

    No writer writes `indices`, because positions do not depend on the words.

    Args:
        compiled: The compiled program.

    Returns:
        The names of the edges.
    """
    layout = compiled.layout
    writes = {sop: "embed" for sop in compiled.program.variables.values() if sop.kind == "tokens"}
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
    sources = ((source, reader) for reader, sops in reads for sop in sops for source, _ in list_sources(sop))
    return frozenset(f"{writes[source]} -> {reader}" for source, reader in sources if source in writes)


class PairRuns:
    """The runs of pairs of sentences of one length, and those with one corrupted edge."""

    def __init__(self, compiled: Compiled, pairs: Sequence[Pair], tolerance: float) -> None:
        self.compiled, self.tolerance = compiled, tolerance
        self.structure = EdgeStructure.of_network(compiled.net.network)
        self.writers = [writer.spec.group.name for writer in self.structure.writer_groups]
        self.readers = [reader.target.group.name for reader in self.structure.reader_groups]
        self.ids = compiled.to_ids([pair[0] for pair in pairs])
        self.base = self._run(self.ids, want=[*dict.fromkeys([*self.writers, *self.readers])])
        self.other = self._run(compiled.to_ids([pair[1] for pair in pairs]), want=self.writers)

    def iter_effects(self) -> Iterator[tuple[str, Tensor]]:
        """Each edge with the pairs in which its corruption changes the output, `[pair]`."""
        groups = self.structure.reader_groups
        for sources, numbers in itertools.groupby(range(len(groups)), key=lambda r: tuple(groups[r].sources)):
            readers = list(numbers)  # those of one sublayer are computed in one run
            for w in sources:
                for h, writer in enumerate(self.structure.get_writer_names(w)):
                    values = self._compute_readers(readers, sources, w, h)
                    for r in readers:
                        for k, reader in enumerate(self.structure.get_reader_names(r)):
                            yield f"{writer} -> {reader}", self._find_changes(r, k, values[self.readers[r]])

    def _compute_readers(self, readers: Sequence[int], sources: Sequence[int], w: int, h: int) -> dict[str, Tensor]:
        """The values of readers if they read one writer in the other run."""
        values = {self.writers[source]: self.base[self.writers[source]] for source in sources}
        name, count = self.writers[w], len(self.structure.get_writer_names(w))
        values[name] = self._replace(name, h, count, self.other[name])
        return self._run(self.ids, do=values, want=[self.readers[r] for r in readers])

    def _find_changes(self, r: int, k: int, value: Tensor) -> Tensor:
        """The pairs in which the output changes if one reader has the value of its group, `[pair]`."""
        group = self.readers[r]
        if self.structure.reader_groups[r].is_readout:
            return self._differs(value, self.base[group])
        replaced = self._replace(group, k, len(self.structure.get_reader_names(r)), value)
        changed = ((replaced - self.base[group]).abs() > UNCHANGED).flatten(1).any(1)
        if changed.any():
            readouts = self._run(self.ids[changed], do={group: replaced[changed]}, want=["y"])["y"]
            changed[changed.clone()] = self._differs(readouts, self.base["y"][changed])
        return changed

    def _replace(self, group: str, k: int, count: int, value: Tensor) -> Tensor:
        """The value of a group in the base run with that of one of its members replaced."""
        if count == 1:
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
