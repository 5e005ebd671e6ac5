"""The logit lens: the readout applied to every state `x_t` of every word, as if `x_t` were the last state.

The lens of slice t is the readout under `do(x_T = x_t)` for all words (nostalgebraist 2020, "interpreting GPT: the
logit lens"). All that is between `x_T` and the readout is applied, such as a final norm. The readout was trained for
`x_T` only. Early states have another basis, so that their lens is biased (Belrose et al. 2023, "Eliciting latent
predictions from transformers with the tuned lens"): a tuned lens maps `x_t` by an affine map before.
"""

from __future__ import annotations

import itertools
import math
import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor
from torch.distributions import Categorical

from bnet_transformer._core.checks import check_float, check_fraction, check_int, check_seed, resolve_index
from bnet_transformer._core.process import check_memory, translate_memory_errors
from bnet_transformer._core.results import Fields, Result, load_result, register_codec
from bnet_transformer._core.tensors import enable_gradients
from bnet_transformer._core.tokens import as_labels, distinguish
from bnet_transformer.compiler.gather import batch_to_request
from bnet_transformer.compiler.module import CompiledModule
from bnet_transformer.data.batch import Batch, encode_batch
from bnet_transformer.declare import Network, as_network
from bnet_transformer.errors import (
    BNetError,
    BudgetError,
    FileError,
    UnsupportedError,
    format_count,
    unknown_name_error,
)
from bnet_transformer.inference.contraction import JointRows
from bnet_transformer.inference.factor_graph import locate_words, propagate_variables, select_marks
from bnet_transformer.inference.posteriors import plan_node_posteriors, plan_state_probs
from bnet_transformer.inference.query import parse_indices, to_list, with_sentence_scope
from bnet_transformer.inference.values import NodeEvaluator, SentenceState
from bnet_transformer.reference import GroundModel, has_ancestor_choices
from bnet_transformer.residual_stream.lens_path import (
    DivergenceFrom,
    LensPath,
    compute_log_probs,
    entropy,
    find_lens_path,
    get_word_values,
)

if TYPE_CHECKING:
    import pandas as pd


# --------------------------------------------------------------------------------------------------------------------
# The latent choices on which the words of a lens depend, and the runs of the net that contain their joint states.


MAX_RUNS = 256  # of the net, in each of which all latent choices are set


@dataclass(frozen=True, eq=False)
class ChoiceRuns:
    """Runs of the net in which all latent choices are set, and the weight of each run for each word of the readout.

    Attributes:
        choices: The ground ids of the choices.
        states: Their states in each run, `[run, choice]`.
        log_weights: The log posterior probability of the joint state of the choices on which a word depends, `[run,
            word]`; -inf in a run that repeats a joint state of these choices, or in which it is impossible.
        averaged: The ground ids of the choices on which at least one word depends.
    """

    choices: tuple[int, ...]
    states: Tensor
    log_weights: Tensor
    averaged: tuple[int, ...]

    def set_choices(self, evaluator: NodeEvaluator, run: int) -> NodeEvaluator:
        """The evaluator of the sentence with the choices at their states of one run."""
        if not self.choices:
            return evaluator
        states = dict(zip(self.choices, self.states[run][:, None], strict=True))
        batched = evaluator.with_batched_states(states, evaluator.module)
        return NodeEvaluator(batched.module, batched.model, {})


def find_choice_runs(state: SentenceState, path: LensPath) -> ChoiceRuns:
    """The runs for the mean of a lens over the posterior of the latent choices on which each word depends.

    Choices on which no word depends together are set in the same runs. So the number of runs is about the largest
    number of joint states on which one word depends, and not the product over all words.

    Raises:
        BudgetError: The number of runs is too large.
    """
    model, ground, readout = state.model, state.ground, path.readout.group
    nodes, choices = ground.select_nodes(readout).tolist(), find_lens_choices(state.evaluator, path)
    if not choices:
        return ChoiceRuns((), torch.zeros(1, 0, dtype=torch.long), torch.zeros(1, len(nodes), dtype=torch.float64), ())
    counts = [model.count_states(choice) for choice in choices]
    scopes = _find_scopes(state, path, nodes, choices, counts)
    # The largest scope is checked first: many large scopes are slow to combine.
    largest = max(scopes, key=len)
    num_runs = math.prod(counts[k] for k in largest)
    if num_runs <= MAX_RUNS:
        rows = JointRows.build(scopes, counts, locate_words(model, choices))
        num_runs = rows.num_rows
    if num_runs > MAX_RUNS:
        expected = f"at most {MAX_RUNS} runs, for the joint states of the latent choices on which a word depends"
        hint = f"Set or observe some of them, such as s.do({ground.name(choices[largest[0]])}=0).lens()"
        raise BudgetError(f"lens of {readout.name}", expected=expected, actual=format_count(num_runs), hint=hint)
    log_weights = torch.full((rows.num_rows, len(nodes)), -math.inf, dtype=torch.float64)
    posteriors = _compute_posteriors(state, choices, scopes)
    for k, scope in enumerate(scopes):
        log_weights[torch.from_numpy(rows.find_rows(scope).ravel()), k] = posteriors[scope].log().cpu()
    states = torch.zeros(rows.num_rows, len(choices), dtype=torch.long)
    for k, row_states in rows.get_states().items():
        states[:, k] = torch.from_numpy(row_states)
    is_used = log_weights.isfinite().any(1)
    averaged = tuple(choices[k] for k in sorted(rows.colours))
    return ChoiceRuns(tuple(choices), states[is_used], log_weights[is_used], averaged)


def find_lens_choices(evaluator: NodeEvaluator, path: LensPath) -> list[int]:
    """The latent choices on which the readout or a state of the lens depends, by ground id."""
    ground, readout = evaluator.model.ground, path.readout.group
    if not has_ancestor_choices(evaluator.model.network, [readout.index, *(m.group.index for m in path.states)]):
        return []
    values = {parent for node in ground.select_nodes(readout).tolist() for parent in ground.parents(node)}
    values |= {node for spec in path.states for node in ground.select_nodes(spec.group).tolist()}
    return evaluator.find_open_choices(sorted(values))


def _find_scopes(
    state: SentenceState, path: LensPath, nodes: Sequence[int], choices: Sequence[int], counts: Sequence[int]
) -> list[tuple[int, ...]]:
    """The positions of the choices with several states on which each readout depends, in any slice of the lens."""
    ground = state.ground
    last = ground.select_nodes(path.states[-1].group).tolist()
    # Under do(x_T = x_t), a readout depends on the choices after x_T, and on those of x_t at each word of x_T that it
    # reads. So the nodes of x_T, cut from their parents, are unknown values, which are variables as the choices are.
    after = replace(state.model, ground=ground.surgery({*ground.cut_nodes, *last}))
    marks = propagate_variables(after, [*choices, *last], [*counts, *(2 for _ in last)])
    is_parent = select_marks(after, marks, nodes, len(choices) + len(last))
    marks = propagate_variables(state.model, choices, counts)
    tables = [
        select_marks(state.model, marks, ground.select_nodes(m.group).tolist(), len(choices)) for m in path.states
    ]
    reads = is_parent[:, len(choices) :].astype(np.float32)  # as numbers: products of booleans are slow
    depends = is_parent[:, : len(choices)] | (reads @ np.logical_or.reduce(tables).astype(np.float32) > 0)
    return [tuple(np.flatnonzero(row).tolist()) for row in depends]


def _compute_posteriors(
    state: SentenceState, choices: Sequence[int], scopes: Sequence[tuple[int, ...]]
) -> dict[tuple[int, ...], Tensor]:
    """The posterior probabilities of the joint states of each scope, `[joint state]`."""
    posteriors: dict[tuple[int, ...], Tensor] = {(): torch.ones(1, dtype=torch.float64)}
    singles = {scope for scope in scopes if len(scope) == 1}
    if singles:  # together: they have two passes in common
        by_node = plan_node_posteriors(state.query([choices[k] for (k,) in sorted(singles)])).run()
        posteriors |= {(k,): by_node[choices[k]] for (k,) in singles}
    for scope in set(scopes) - posteriors.keys():
        posteriors[scope] = plan_state_probs(state.query([choices[k] for k in scope])).run()
    return posteriors


MAX_SHOWN_WORDS = 12  # columns of words in a notebook


@dataclass(frozen=True, eq=False)
class LensReader:
    """Computes the distributions of a lens, some slices at a time, so that they are never in memory together.

    Args:
        evaluator: The evaluator of the sentence.
        path: The states and the readout.
        states: The states to which the readout is applied, in each run, `[run, slice, word, feature]`.
        runs: The runs of the net, with the states of the latent choices in each.
    """

    _shapes = (
        "choices: any choice; states: real run slice word *_; run_states: int run choice; log_weights: float64 run _"
    )

    evaluator: NodeEvaluator
    path: LensPath
    states: Tensor
    runs: ChoiceRuns
    _by_state: dict[int, tuple[Tensor, Tensor]] = field(default_factory=dict, repr=False)

    @translate_memory_errors("lens")
    @torch.no_grad()
    def compute(self, slices: slice) -> Tensor:
        """The log probabilities of some slices, averaged over the runs, `[slice, word, state]`."""
        if not self.runs.choices:
            return self._compute_in_run(self.evaluator, self.states[0, slices])
        total: Tensor | None = None
        for run, (states, weights) in enumerate(zip(self.states, self.runs.log_weights, strict=True)):
            log_probs = self._compute_in_run(self.runs.set_choices(self.evaluator, run), states[slices])
            weights = weights.to(log_probs)[:, None]
            part = torch.where(weights.isneginf(), -torch.inf, log_probs + weights)  # also if the run gives NaN
            total = part if total is None else torch.logaddexp(total, part)
        assert total is not None
        return total

    def _compute_in_run(self, evaluator: NodeEvaluator, states: Tensor) -> Tensor:
        """The log probabilities of some slices without latent choices, `[slice, word, state]`."""
        model, last = evaluator.model, self.path.states[-1].group
        assigned = dict(zip(model.ground.select_nodes(last).tolist(), states.unbind(1), strict=True))
        batched = evaluator.with_batched_states(assigned, with_sentence_scope(evaluator.module))
        readout = self.path.readout
        outputs = {parent.index for parent in readout.parents}
        outputs |= {selector for parent in readout.parents for _, selector in parent.pick}
        ancestral_set = model.network.graph.ancestral_set([readout.group.index])
        log_probs = compute_log_probs(batched.execute(sorted(outputs), ancestral_set), readout)
        num_words = model.ground.word_counts[readout.group.word_stack] if readout.group.word_stack is not None else 1
        # A value that does not depend on the state, because nodes after it are set, has one row, or one word.
        return log_probs.expand(len(states), num_words, -1)

    def iter_chunks(self, count: int) -> Iterator[Tensor]:
        """The log probabilities of the first slices, some slices at a time, in order: `[slice, word, state]`."""
        step = self.path.count_chunk_rows(self.states.shape[2])
        for start in range(0, count, step):
            yield self.compute(slice(start, min(start + step, count)))

    def read_state(self, state: int) -> tuple[Tensor, Tensor]:
        """The probability and the rank of a state of the readout, `[slice, word]` each, computed on first use."""
        if state not in self._by_state:
            probs, ranks = [], []
            for log_probs in self.iter_chunks(self.states.shape[1]):
                column = log_probs[..., state]
                probs.append(column.exp())
                ranks.append(1 + (log_probs > column[..., None]).sum(-1))
            self._by_state[state] = torch.cat(probs).cpu(), torch.cat(ranks).cpu()
        return self._by_state[state]


@dataclass(frozen=True, eq=False, repr=False)
class Lens(Result):
    """The result of `s.lens()`: the distribution of the readout for every state of every word.

    Row t of each tensor is the state `x_t`; the last row is the readout of the net (the end). The most probable words,
    the entropy and the divergence are stored. Full distributions are computed when a method requires them, by the net
    of the sentence, so that a large vocabulary needs little memory.

    Attributes:
        readout: The name of the readout.
        states: The names of the states `x_0`, ..., `x_T`.
        words: The tokens of the words; the name of the readout if it has no words.
        labels: The labels of the states of the readout, such as the words of the vocabulary.
        top_states: The most probable states of the readout, most probable first, `[slice, word, k]`.
        top_probabilities: Their probabilities, `[slice, word, k]`.
        entropy: The entropy of each distribution in nats, `[slice, word]`.
        kl: `KL(end || lens)` in nats, `[slice, word]`: 0 in the last row.
        norm: The name of the norm that is applied between a state and the readout; None if there is none.
        is_tuned: Whether a tuned lens maps the states.
        reader: Computes the distributions from the states.
        special: For each word, whether it is a special token; empty if this is unknown.
        averaged: The names of the latent choices over whose posterior the distributions are averaged.

    >>> import bnet_transformer as bt
    >>> net = bt.decoder(8, heads=2, slices=2, norm="pre", vocabulary=["the", "cat", "sat"])
    >>> lens = net.sentence("the cat sat").lens()
    >>> lens.states, lens.entropy.shape, lens.kl[-1].tolist(), lens.norm
    (('x_0', 'x_1', 'x_2'), torch.Size([3, 3]), [0.0, 0.0, 0.0], 'norm')
    """

    _max_rows = None
    _shapes = (
        "states: any slice; words: any word; labels: any label; special: any word?; top_states: int<label slice word "
        "top; top_probabilities: real slice word top; entropy kl: real slice word; reader.states: real _ slice *_"
    )

    readout: str
    states: tuple[str, ...]
    words: tuple[str, ...]
    labels: tuple[str, ...]
    top_states: Tensor
    top_probabilities: Tensor
    entropy: Tensor
    kl: Tensor
    norm: str | None
    is_tuned: bool
    reader: LensReader
    special: tuple[bool, ...] = ()
    averaged: tuple[str, ...] = ()

    @property
    def notes(self) -> tuple[str, ...]:
        """What the lens applies, and what biases it, as sentences."""
        applied = f"{self.norm} is applied to every state" if self.norm else "no norm is applied to the states"
        bias = (
            "Affine maps that were fitted on a corpus correct the bias of early slices."
            if self.is_tuned
            else "Early slices are biased: the readout was trained for the last state, and earlier states have another "
            "basis. A tuned lens (bt.fit_lens) corrects this."
        )
        names = ", ".join(self.averaged[:6]) + (", …" if len(self.averaged) > 6 else "")
        mean = (f"The distributions are averaged over the posterior of {names}.",) if self.averaged else ()
        return f"Before {self.readout}, {applied}.", bias, *mean

    def top(self, slice: int | str, word: int, count: int = 5) -> list[tuple[str, float]]:
        """The most probable words of one state of one word.

        Args:
            slice: The index of the state, from 0 for `x_0` or from -1 for the last state, or its name, such as `"x_2"`.
            word: The index of the word, from 0 for the first or from -1 for the last word.
            count: The number of words, 5 by default.

        Returns:
            Pairs of a label and its probability, most probable first.

        Raises:
            BNetError: There is no such slice or word.

        >>> import bnet_transformer as bt
        >>> net = bt.decoder(8, heads=2, slices=2, norm="pre", vocabulary=["the", "cat", "sat"])
        >>> len(net.sentence("the cat sat").lens().top(0, 2, count=3))
        3
        """
        (t,) = self.parse_slices(slice)
        i = resolve_index("word", word, len(self.words))
        count = min(check_int("count", count), len(self.labels))
        probs, states = self.top_probabilities[t, i], self.top_states[t, i]
        if count > len(states):
            probs, states = self.distribution(t).probs[i].topk(count)
        labels = distinguish(self.labels[state] for state in states[:count].tolist())
        return list(zip(labels, probs[:count].tolist(), strict=True))

    def distribution(self, slice: int | str) -> Categorical:
        """The distributions of one state of all words.

        Args:
            slice: The index of the state, from 0 for `x_0` or from -1 for the last state, or its name, such as `"x_2"`.

        Returns:
            A Categorical with the batch shape `[word]`.

        Raises:
            BNetError: There is no such slice.

        >>> import bnet_transformer as bt
        >>> net = bt.decoder(8, heads=2, slices=2, norm="pre", vocabulary=["the", "cat", "sat"])
        >>> net.sentence("the cat").lens().distribution(1).probs.shape
        torch.Size([2, 3])
        """
        (t,) = self.parse_slices(slice)
        return Categorical(logits=self.reader.compute(_as_slice(t))[0].cpu(), validate_args=False)

    def probability(self, state: str | int) -> Tensor:
        """The probability of one state of the readout, such as a word, in every distribution.

        Args:
            state: The label of the state, such as `"Mary"`, or its index.

        Returns:
            A tensor `[slice, word]`.

        Raises:
            UnknownNameError: There is no such label.

        >>> import bnet_transformer as bt
        >>> net = bt.decoder(8, heads=2, slices=2, norm="pre", vocabulary=["the", "cat", "sat"])
        >>> net.sentence("the cat").lens().probability("sat").shape
        torch.Size([3, 2])
        """
        return self.reader.read_state(self.parse_state(state))[0]

    def rank(self, state: str | int) -> Tensor:
        """The rank of one state of the readout by probability, 1 for the most probable.

        Args:
            state: The label of the state, such as `"Mary"`, or its index.

        Returns:
            A tensor of integers, `[slice, word]`.

        Raises:
            UnknownNameError: There is no such label.

        >>> import bnet_transformer as bt
        >>> net = bt.decoder(8, heads=2, slices=2, norm="pre", vocabulary=["the", "cat", "sat"])
        >>> lens = net.sentence("the cat").lens()
        >>> lens.rank(lens.top(2, 0)[0][0])[2, 0].item()
        1
        """
        return self.reader.read_state(self.parse_state(state))[1]

    def parse_state(self, state: object) -> int:
        """The index of a state of the readout.

        Args:
            state: The label of the state, or its index.

        Returns:
            The index.

        Raises:
            UnknownNameError: There is no such label.
        """
        if isinstance(state, str):
            number = as_labels(self.labels).find(state, f"state of {self.readout}")
            if number is None:
                raise unknown_name_error(f"state of {self.readout}", state, self.labels)
            return number
        return parse_indices(f"state of {self.readout}", state, len(self.labels))[0]

    def parse_slices(self, slices: object) -> list[int]:
        """The indices of states.

        Args:
            slices: The index of a state, also from the end (-1), its name, or a list of these.

        Returns:
            The indices, in increasing order.

        Raises:
            BNetError: There is no such state.
        """
        numbers = []
        for item in to_list(slices):
            if isinstance(item, str) and item not in self.states:
                raise unknown_name_error("slice", item, self.states)
            numbers.append(self.states.index(item) if isinstance(item, str) else item)
        return parse_indices("slice", numbers, len(self.states), is_from_end=True)

    def _get_columns(self) -> Mapping[str, Any]:
        rows, columns = self.entropy.shape
        return {
            "slice": [t for t in range(rows) for _ in range(columns)],
            "word": list(range(columns)) * rows,
            "token": list(self.words) * rows,
            "top": distinguish(self.labels[state] for state in self.top_states[..., 0].flatten().tolist()),
            "probability": self.top_probabilities[..., 0].flatten(),
            "entropy": self.entropy.flatten(),
            "kl": self.kl.flatten(),
        }

    def __repr__(self) -> str:
        kind = "tuned" if self.is_tuned else "logit lens, biased in early slices"
        states = f"{self.states[0]} to {self.states[-1]}"
        return f"<Lens of {self.readout}: {states}, {len(self.words)} words, norm {self.norm}, {kind}>"

    def _get_shown_frame(self) -> pd.DataFrame:
        import pandas as pd

        tops = self.top_states[..., 0].tolist(), self.top_probabilities[..., 0].tolist()
        pairs = [zip(*row, strict=True) for row in zip(*tops, strict=True)]
        rows = [[f"{self.labels[state]} ({share:.2f})" for state, share in row] for row in pairs]
        columns = [f"{i}: {word}" for i, word in enumerate(self.words)]
        return pd.DataFrame(rows, list(self.states), columns).iloc[::-1, :MAX_SHOWN_WORDS]


def compute_lens(state: SentenceState, readout: object = None, tuned: TunedLens | None = None, top: int = 10) -> Lens:
    """The lens of a sentence.

    Args:
        state: The sentence.
        readout: The name of the readout; None for the only one.
        tuned: A tuned lens of the same net; None for the logit lens.
        top: The number of the most probable words that are stored.

    Returns:
        The lens.

    Raises:
        BNetError: There is no such readout, or its nodes are set.
        BudgetError: A word depends on latent choices with too many joint states.
    """
    path = find_lens_path(state.network, readout)
    check_int("top", top)
    evaluator = state.evaluator
    if tuned is not None:
        if not hasattr(tuned, "check_net"):
            raise BNetError("tuned", expected="a tuned lens, the result of bt.fit_lens", actual=tuned)
        tuned.check_net(state.network, path)
    _check_readout_is_not_set(state, path)
    runs = find_choice_runs(state, path)
    parts = [read_states(runs.set_choices(evaluator, run), path) for run in range(len(runs.states))]
    states = torch.stack([part if tuned is None else tuned.translate(part) for part in parts])
    reader = LensReader(evaluator, path, states, runs)
    return _summarise(state, reader, path, top, is_tuned=tuned is not None)


def _check_readout_is_not_set(state: SentenceState, path: LensPath) -> None:
    """Raise an error for a readout that is set."""
    nodes = state.ground.select_nodes(path.readout.group).tolist()
    is_set = [state.ground.name(node) for node in nodes if node in state.model.do]
    if is_set:
        expected, hint = "a readout that is not set by do", f"Call undo({is_set[0]!r})"
        raise BNetError("lens", expected=expected, actual=f"{is_set[0]}, set by do", hint=hint)


@torch.no_grad()
def read_states(evaluator: NodeEvaluator, path: LensPath) -> Tensor:
    """The states of a sentence, `[slice, word, feature]`."""
    fault = evaluator.find_table_fault("value", path.states, ())
    if fault is not None:
        raise fault if isinstance(fault, Exception) else UnsupportedError(f"lens: {fault}", hint=fault.remedy)
    network, group = evaluator.model.network, path.states[-1].group
    num_words = evaluator.model.ground.word_counts[group.stack]
    indices = [spec.group.index for spec in path.states]
    execution = evaluator.execute(indices, network.graph.ancestral_set(indices))
    return torch.cat([get_word_values(execution, spec, 1, num_words) for spec in path.states])


def _summarise(state: SentenceState, reader: LensReader, path: LensPath, top: int, *, is_tuned: bool) -> Lens:
    """The most probable words, the entropy and the divergence of every distribution."""
    ground, readout = state.ground, path.readout
    node = int(ground.select_nodes(readout.group)[0])
    num_states = state.model.count_states(node)
    stack = readout.group.word_stack
    words = (readout.group.name,) if stack is None else tuple(state.tokens[stack])
    check_memory("lens", 12 * len(path.states) * len(words) * min(top, num_states), "a smaller top=")
    last = len(path.states) - 1
    end = reader.compute(_as_slice(last))
    divergence = DivergenceFrom(end)
    parts: list[tuple[Tensor, ...]] = []
    for log_probs in itertools.chain(reader.iter_chunks(last), [end]):
        logs, states = log_probs.topk(min(top, num_states))
        # rounding can make the divergence of equal distributions slightly negative
        parts.append((states, logs.exp(), entropy(log_probs), divergence(log_probs).clamp_min(0)))
    top_states, probs, entropies, kl = (torch.cat(tensors).cpu() for tensors in zip(*parts, strict=True))
    if bool(entropies.isnan().any()):
        raise BNetError(f"lens of {readout.group.name}", expected="numbers", actual="NaN")
    labels = state.labels(node) or tuple(map(str, range(num_states)))
    names = readout.group.name, path.state_names, words, labels
    flags = (False,) * len(words) if stack is None else state.encoded.flag_special_words(state.network, stack)
    averaged = tuple(map(ground.name, reader.runs.averaged))
    return Lens(*names, top_states, probs, entropies, kl, path.norm, is_tuned, reader, flags, averaged)


def _as_slice(index: int) -> slice:
    """The slice of one index."""
    return slice(index, index + 1)


def _to_fields(reader: LensReader) -> Fields:
    """The sentence, the states and the runs; the net determines the path."""
    evaluator, runs = reader.evaluator, reader.runs
    fields = {"model": evaluator.model, "evidence": evaluator.evidence, "states": reader.states}
    fields |= {"choices": list(runs.choices), "run_states": runs.states, "log_weights": runs.log_weights}
    return {**fields, "averaged": list(runs.averaged), "readout": reader.path.readout.group.name}


def _from_fields(fields: Fields) -> LensReader:
    """The reader of `_to_fields`."""
    network = fields["model"].network
    evaluator = NodeEvaluator(CompiledModule(network).eval(), fields["model"], fields["evidence"])
    model = evaluator.model
    unknown = [node for node in evaluator.evidence if not 0 <= node < len(model.ground)]
    path, rows = find_lens_path(network, fields["readout"]), fields["run_states"]
    choices = [] if unknown else find_lens_choices(evaluator, path)
    sizes = torch.tensor([model.count_states(choice) for choice in choices], dtype=torch.long)
    if (
        unknown
        or choices != fields["choices"]
        or not {*fields["averaged"]} <= {*choices}
        or not bool(((rows >= 0) & (rows < sizes)).all())
    ):
        expected = f"the nodes of the net, and the states of its latent choices {choices}"
        raise BNetError("lens", expected=expected, actual=unknown or fields["choices"])
    runs = ChoiceRuns(tuple(choices), rows, fields["log_weights"], tuple(fields["averaged"]))
    return LensReader(evaluator, path, fields["states"], runs)


STORED_TYPES = {
    "model": GroundModel,
    "evidence": Mapping[int, Tensor],
    "states": Tensor,
    "choices": list[int],
    "run_states": Tensor,
    "log_weights": Tensor,
    "averaged": list[int],
    "readout": str,
}
register_codec(LensReader, _to_fields, lambda fields, trust: _from_fields(fields), STORED_TYPES)


# --------------------------------------------------------------------------------------------------------------------
# The tuned lens: an affine map per slice, fitted on a corpus, that corrects the bias of the logit lens.
#
# The map of slice t is `x_t + A_t x_t + b_t`, the identity before training. It minimises `KL(end || lens)`, averaged
# over the words of the corpus (Belrose et al. 2023). The maps of all slices are trained together, but their losses have
# no common parameter.


@dataclass(frozen=True, eq=False, repr=False)
class TunedLens(Result):
    """The result of `bt.fit_lens`: an affine map `x_t + A_t x_t + b_t` for every state but the last.

    `s.lens(tuned=...)` applies it. A tuned lens belongs to the net on which it was fitted; the readout, the states and
    some entries of each parameter are compared.

    Attributes:
        readout: The name of the readout.
        states: The names of the states `x_0`, ..., `x_T`.
        weights: The matrices `A_t`, `[slice, feature, feature]`, for `x_0` to `x_(T-1)`.
        biases: The vectors `b_t`, `[slice, feature]`.
        plain_kl: `KL(end || lens)` of the logit lens on the held-out sentences, in nats, averaged over words,
            `[slice]`.
        kl: The same of the tuned lens.
        num_words: The number of words of the training sentences.
        num_held_out_words: The number of words of the held-out sentences.
        seed: The seed of the split and of the order of the sentences.
        parameters: Some entries of each parameter of the net, to recognise it, `[entry]`; None if it is not known.
    """

    _shapes = (
        "weights: real slice feature feature; biases: real slice feature; plain_kl kl: real slice; parameters: real _"
    )

    readout: str
    states: tuple[str, ...]
    weights: Tensor = field(repr=False)
    biases: Tensor = field(repr=False)
    plain_kl: Tensor
    kl: Tensor
    num_words: int
    num_held_out_words: int
    seed: int = 0
    parameters: Tensor | None = field(default=None, repr=False)

    @property
    def notes(self) -> tuple[str, ...]:
        """What limits the fit, as sentences: few words, slices that it does not improve."""
        notes = []
        num_features = self.biases.shape[-1]
        if self.num_words < num_features:
            notes.append(
                f"The corpus has {self.num_words:,} words for training, fewer than the {num_features:,} features of a "
                "state: it does not determine the maps."
            )
        worse = [name for name, plain, tuned in zip(self.states, self.plain_kl, self.kl, strict=False) if tuned > plain]
        if worse:
            notes.append(f"On held-out sentences, the logit lens is better for {', '.join(worse)}.")
        return tuple(notes)

    def translate(self, states: Tensor) -> Tensor:
        """Apply the maps.

        Args:
            states: The states `x_0` to `x_T`, `[slice, ..., feature]`.

        Returns:
            The mapped states, of the same shape; the last one is unchanged.
        """
        weights, biases = self.weights.to(states), self.biases.to(states)
        early = states[:-1]
        mapped = early + torch.einsum("tij,t...j->t...i", weights, early)
        mapped = mapped + biases.reshape(len(biases), *[1] * (states.dim() - 2), -1)
        return torch.cat([mapped, states[-1:]])

    def check_net(self, network: Network, path: LensPath) -> None:
        """Raise an error for another net than that of the fit.

        Args:
            network: The net to whose states the maps are applied.
            path: The path of its lens.

        Raises:
            BNetError: The tuned lens was fitted for another readout, for other states, or on other parameters.
        """
        expected = (path.readout.group.name, path.state_names, path.states[-1].shape)
        actual = (self.readout, self.states, tuple(self.biases.shape[-1:]))
        hint = "Fit it on this net by bt.fit_lens"
        if actual != expected:
            texts = [f"a tuned lens of {y}: {x[0]} to {x[-1]}, shape {shape}" for y, x, shape in (expected, actual)]
            raise BNetError("tuned", expected=texts[0], actual=texts[1], hint=hint)
        if self.parameters is not None and not _is_same_net(self.parameters, sample_parameters(network)):
            actual_text = "one that was fitted on another net, or before the parameters changed"
            raise BNetError("tuned", expected="a tuned lens of this net", actual=actual_text, hint=hint)

    @classmethod
    def load(cls, path: str | os.PathLike[str]) -> TunedLens:
        """Read a tuned lens that `save` wrote, as `bt.load` does.

        Args:
            path: The path of the file.

        Returns:
            The tuned lens.

        Raises:
            FileError: The file is no tuned lens, or is damaged.

        >>> import tempfile, bnet_transformer as bt
        >>> from bnet_transformer.residual_stream import TunedLens
        >>> net = bt.decoder(8, heads=2, slices=2, norm="pre", vocabulary=["the", "cat", "sat"])
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     bt.fit_lens(net, ["the cat sat", "cat the"], steps=1).save(f"{folder}/lens.safetensors")
        ...     net.sentence("the cat").lens(tuned=TunedLens.load(f"{folder}/lens.safetensors")).is_tuned
        True
        """
        description = "a tuned lens that save wrote"
        result = load_result(path, description=description)
        if not isinstance(result, cls):
            raise FileError(str(path), expected=description, actual=type(result).__name__)
        return result

    def _get_columns(self) -> Mapping[str, Any]:
        return {"state": self.states[:-1], "logit_lens": self.plain_kl, "tuned_lens": self.kl}

    def __repr__(self) -> str:
        count = f"{self.num_words:,} words, {self.num_held_out_words:,} held out"
        kl = f"mean held-out KL {float(self.plain_kl.mean()):.3g} -> {float(self.kl.mean()):.3g} nats"
        return " ".join([f"<TunedLens of {self.readout}: {len(self.kl)} slices, {count}, {kl}>", *self.notes])

    def _get_notes(self) -> Sequence[str]:
        return ()  # the caption contains them


@enable_gradients()
def fit_lens(
    net: object,
    sentences: Sequence[object],
    *,
    readout: str | None = None,
    steps: int = 250,
    rate: float = 1e-3,
    batch: int = 16,
    held_out: float = 0.2,
    seed: int = 0,
) -> TunedLens:
    """Fit a tuned lens: an affine map per slice that minimises `KL(end || lens)` on a corpus.

    Adam trains the maps, and its rate decays linearly to 0. Features are standardised for training, so that one rate
    fits all slices; the result maps the states as they are. The states of the corpus are in memory during the fit.

    Args:
        net: The net.
        sentences: The corpus: a list of texts, of lists of words or of ids, as for `net.batch`.
        readout: The name of the readout; None for the only one.
        steps: The number of steps of Adam. A step uses `batch` sentences.
        rate: The initial rate of Adam.
        batch: The number of sentences of a step.
        held_out: The fraction of the sentences on which the KL is reported, and which are not trained on.
        seed: The seed of the split and of the order of the sentences.

    Returns:
        The tuned lens, with the held-out KL of every slice before and after the fit.

    Raises:
        BNetError: The net has no discrete readout of a state, its states depend on latent choices, there are fewer than
            2 sentences, or the fit diverges.

    >>> import bnet_transformer as bt
    >>> net = bt.decoder(8, heads=2, slices=2, norm="pre", vocabulary=["the", "cat", "sat"])
    >>> tuned = bt.fit_lens(net, ["the cat sat", "cat the", "sat sat the", "the the cat"], steps=5)
    >>> tuned.weights.shape, tuned.kl.shape, net.sentence("the cat").lens(tuned=tuned).is_tuned
    (torch.Size([2, 8, 8]), torch.Size([2]), True)
    """
    network = as_network(net)
    path = find_lens_path(network, readout)
    steps, size, seed = check_int("steps", steps, minimum=0), check_int("batch", batch), check_seed(seed)
    rate, fraction = check_float("rate", rate, above=0), check_fraction("held_out", held_out)
    if isinstance(sentences, str) or not isinstance(sentences, Sequence) or len(sentences) < 2:
        raise BNetError("sentences", expected="a list of at least 2 sentences", actual=sentences)
    generator = torch.Generator().manual_seed(seed)
    order = torch.randperm(len(sentences), generator=generator).tolist()
    count = min(max(1, round(fraction * len(order))), len(order) - 1)
    # A copy of the module without gradients: only the maps are trained. Tensors are shared, not copied.
    module = CompiledModule(network).eval().requires_grad_(False)
    corpora = []
    for indices in (order[count:], order[:count]):
        groups = [[sentences[k] for k in indices[start : start + size]] for start in range(0, len(indices), size)]
        corpora.append([_read_part(module, path, encode_batch(network, group)) for group in groups])
    train, test = corpora
    maps = AffineMaps(path, train)
    plain = _mean_divergence(maps, module, path, test)
    _train(maps, module, path, train, steps, rate, generator)
    tuned = _mean_divergence(maps, module, path, test)
    weights, biases = maps.fold_scales()
    if not bool(weights.isfinite().all()) or not bool(tuned.isfinite().all()):
        raise BNetError(f"fit_lens: the fit with rate {rate:g} diverges", hint="Use a smaller rate=")
    num_words, num_held_out = (sum(int(part.weights.sum()) for part in parts) for parts in corpora)
    names = path.readout.group.name, path.state_names
    counts = num_words, num_held_out
    return TunedLens(*names, weights.cpu(), biases.cpu(), plain, tuned, *counts, seed, sample_parameters(network))


def sample_parameters(network: Network) -> Tensor:
    """At most three entries along each dim of each parameter, `[entry]`: a fast fingerprint of a large net."""
    parts = []
    for name in sorted(network.parameters):
        value = network.parameters[name].detach()
        corners = value[tuple(slice(None, None, max(1, size // 2)) for size in value.shape)]
        parts.append(corners.to("cpu").flatten())
    return torch.cat(parts) if parts else torch.zeros(0)


def _is_same_net(expected: Tensor, actual: Tensor) -> bool:
    """Whether two fingerprints are equal up to the rounding of a net that was converted to another dtype."""
    rounding = max(torch.finfo(value.dtype).eps for value in (expected, actual))
    tolerance = 0.0 if expected.dtype == actual.dtype else rounding
    return expected.shape == actual.shape and torch.allclose(
        expected.double(), actual.double(), rtol=tolerance, atol=tolerance, equal_nan=True
    )


@dataclass(frozen=True, eq=False)
class TextPart:
    """Some sentences of a corpus, their states, and which of their distributions count.

    Attributes:
        batch: The sentences.
        states: The states `x_0` to `x_T`, `[slice, sentence, word, feature]`.
        present: True for words of the states, `[sentence, word]`.
        weights: 1 for each word of the readout and 0 for padding, `[sentence, word]`.
    """

    batch: Batch
    states: Tensor
    present: Tensor
    weights: Tensor


@torch.no_grad()
def _read_part(module: CompiledModule, path: LensPath, batch: Batch) -> TextPart:
    """Compute the states of some sentences."""
    last, count = path.states[-1], len(batch)
    num_words = batch.x[last.group.stack].shape[1]
    check_memory("sentences", 4 * len(path.states) * count * num_words * last.shape[0], "fewer sentences")
    request = batch_to_request(module.network, batch, tuple(spec.group.index for spec in path.states))
    execution = module.execute(request)[0]
    states = torch.stack([get_word_values(execution, spec, count, num_words) for spec in path.states])

    def make_mask(stack: str | None) -> Tensor:
        if stack is None:
            return torch.ones(count, 1, dtype=torch.bool, device=states.device)
        mask = None if batch.mask is None else batch.mask.get(stack)
        shape = batch.x[stack].shape[:2]
        return torch.ones(shape, dtype=torch.bool, device=states.device) if mask is None else mask

    weights = make_mask(path.readout.group.word_stack).to(states)
    return TextPart(batch, states, make_mask(last.group.stack), weights)


class AffineMaps(torch.nn.Module):
    """The affine maps of all slices, on standardised features; the identity before training.

    The update of x is `scale_T (A z + b)`, where z are the features of `x_t` with mean 0 and variance 1 over the words
    of the corpus, and `scale_T` the standard deviation of the features of `x_T`. These are all affine maps, but their
    gradients have one scale in all slices, although the norm of the states grows with depth.
    """

    def __init__(self, path: LensPath, parts: Sequence[TextPart]) -> None:
        super().__init__()
        num_features = path.states[-1].shape[0]
        words = torch.cat([part.states[:, part.present] for part in parts], 1)  # [slice, word, feature]
        means, scales = words.mean(1), words.std(1, correction=0)
        floor = 1e-3 * scales.square().mean(-1, keepdim=True).sqrt() + torch.finfo(words.dtype).eps
        self.means, self.scales = means[:-1], torch.maximum(scales, floor)[:-1]
        self.output_scale = torch.maximum(scales, floor)[-1]
        shape = len(path.states) - 1, num_features
        self.weights = torch.nn.Parameter(words.new_zeros(*shape, num_features))
        self.biases = torch.nn.Parameter(words.new_zeros(shape))

    def forward(self, states: Tensor, slices: slice) -> Tensor:
        """The mapped states of some slices, `[slice, sentence, word, feature]`."""
        flat = states[slices].flatten(1, 2)
        standardised = (flat - self.means[slices][:, None]) / self.scales[slices][:, None]
        update = torch.baddbmm(self.biases[slices][:, None], standardised, self.weights[slices].mT)
        return (flat + self.output_scale * update).reshape(states[slices].shape)

    @torch.no_grad()
    def fold_scales(self) -> tuple[Tensor, Tensor]:
        """The matrices and vectors for states that are not standardised."""
        weights = self.output_scale[:, None] * self.weights / self.scales[:, None, :]
        biases = self.output_scale * self.biases - (weights @ self.means[..., None]).squeeze(-1)
        return weights, biases


def _train(
    maps: AffineMaps,
    module: CompiledModule,
    path: LensPath,
    parts: Sequence[TextPart],
    steps: int,
    rate: float,
    generator: torch.Generator,
) -> None:
    """Minimise the divergence by Adam, with a linear decay of the rate."""
    optimizer = torch.optim.Adam(maps.parameters(), lr=rate)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1 - step / max(1, steps))
    queue: list[int] = []
    for _ in range(steps):
        queue = queue or torch.randperm(len(parts), generator=generator).tolist()
        part = parts[queue.pop()]
        optimizer.zero_grad()
        for divergence in _iter_divergences(maps, module, path, part):
            divergence.sum().div(part.weights.sum()).backward()
        optimizer.step()
        schedule.step()


@torch.no_grad()
def _mean_divergence(maps: AffineMaps, module: CompiledModule, path: LensPath, parts: Sequence[TextPart]) -> Tensor:
    """The divergence of each slice, averaged over the words of some sentences, `[slice]`."""
    totals = [torch.cat(list(_iter_divergences(maps, module, path, part))) for part in parts]
    num_words = torch.stack([part.weights.sum() for part in parts]).sum()
    return (torch.stack(totals).sum(0) / num_words).cpu()


def _iter_divergences(maps: AffineMaps, module: CompiledModule, path: LensPath, part: TextPart) -> Iterator[Tensor]:
    """`KL(end || lens)`, summed over words: `[slice]` for some slices at a time, which bounds the memory."""
    with torch.no_grad():
        divergence = DivergenceFrom(_apply_readout(module, path, part, part.states[-1:]))
    count = len(path.states) - 1
    step = path.count_chunk_rows(part.weights.numel())
    for start in range(0, count, step):
        slices = slice(start, min(start + step, count))
        log_probs = _apply_readout(module, path, part, maps(part.states, slices))
        yield (divergence(log_probs) * part.weights).sum((1, 2))


def _apply_readout(module: CompiledModule, path: LensPath, part: TextPart, states: Tensor) -> Tensor:
    """The log probabilities of the readout of some states, `[slice, sentence, word, state]`."""
    count = len(states)

    def repeat(value: Tensor) -> Tensor:
        return value if count == 1 else value.repeat(count, *[1] * (value.dim() - 1))

    batch = part.batch.map(repeat)
    request = batch_to_request(module.network, batch, (path.readout.group.index,))
    request = replace(request, known={**request.known, path.states[-1].group.index: states.flatten(0, 1)})
    log_probs = compute_log_probs(module.execute(request)[0], path.readout)
    return log_probs.expand(count * len(part.batch), *part.weights.shape[1:], -1).reshape(
        count, *part.weights.shape, -1
    )
