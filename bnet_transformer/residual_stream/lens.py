"""The logit lens: the readout applied to every state `x_t` of every word, as if `x_t` were the last state.

The lens of slice t is the readout under `do(x_T = x_t)` for all words (nostalgebraist 2020, "interpreting GPT: the
logit lens"). All that is between `x_T` and the readout is applied, such as a final norm. The readout was trained for
`x_T` only. Early states have another basis, so that their lens is biased (Belrose et al. 2023, "Eliciting latent
predictions from transformers with the tuned lens"): a tuned lens maps `x_t` by an affine map before.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor
from torch.distributions import Categorical

from bnet_transformer._core.checks import check_int, resolve_index
from bnet_transformer._core.process import check_memory, translate_memory_errors
from bnet_transformer._core.results import Fields, Result, register_codec
from bnet_transformer._core.tokens import as_labels, distinguish
from bnet_transformer.compiler.gather import ExecutionState
from bnet_transformer.compiler.module import CompiledModule
from bnet_transformer.declare import Network, NodeSpec
from bnet_transformer.errors import BNetError, BudgetError, UnsupportedError, format_count, unknown_name_error
from bnet_transformer.inference.contraction import JointRows
from bnet_transformer.inference.factor_graph import locate_words, propagate_variables, select_marks
from bnet_transformer.inference.posteriors import plan_node_posteriors, plan_state_probs
from bnet_transformer.inference.query import parse_indices, to_list, with_sentence_scope
from bnet_transformer.inference.values import NodeEvaluator, SentenceState, compute_table
from bnet_transformer.reference import GroundModel, has_ancestor_choices
from bnet_transformer.tpm import Norm

if TYPE_CHECKING:
    import pandas as pd


# --------------------------------------------------------------------------------------------------------------------
# The states that a lens reads, and the nodes through which the readout depends on the last of them.


MAX_CHUNK_ENTRIES = 2**22  # log probabilities at once: 16 MB in float32


@dataclass(frozen=True)
class LensPath:
    """The states of a stack, and the readout of the last of them.

    Attributes:
        readout: The readout.
        states: The states `x_0`, ..., `x_T`.
        between: The groups on the paths from `x_T` to the readout, parents first.
    """

    readout: NodeSpec
    states: tuple[NodeSpec, ...]
    between: tuple[NodeSpec, ...]

    @property
    def state_names(self) -> tuple[str, ...]:
        """The names of the states."""
        return tuple(spec.group.name for spec in self.states)

    @property
    def norm(self) -> str | None:
        """The names of the norms between the last state and the readout; None without a norm."""
        return ", ".join(spec.group.name for spec in self.between if isinstance(spec.tpm, Norm)) or None

    def count_chunk_rows(self, num_words: int) -> int:
        """The number of rows of `num_words` words whose log probabilities are computed at once."""
        return max(1, MAX_CHUNK_ENTRIES // (num_words * (self.readout.tpm.states or 1)))


def find_lens_path(network: Network, readout: object = None) -> LensPath:
    """The path of a lens.

    Args:
        network: The net.
        readout: The name of the readout; None for the only one.

    Raises:
        BNetError: There is no such readout, or it does not depend on a state over the words of a stack.
    """
    spec = _find_readout(network, readout)
    candidates = _find_states(network, spec)
    if not candidates:
        expected = "a readout that depends on a hidden state of the words of a stack"
        raise BNetError("lens", expected=expected, actual=spec.group.name)
    same_stack = [m for m in candidates if m.group.stack == spec.group.stack]
    last = max(same_stack or candidates, key=lambda m: (m.group.slice or 0, m.group.index))
    groups = network.graph.by_stem[last.group.stem]
    specs = [network.specs[group.index] for group in groups if group.slice is not None]
    states = tuple(m for m in specs if m.group.slice <= last.group.slice and m.shape == last.shape)  # type: ignore[operator]
    inner = network.graph.descendants([last.group.index]) & network.graph.ancestral_set([spec.group.index])
    inner -= {last.group.index, spec.group.index}
    return LensPath(spec, states, tuple(m for m in network.ancestral_specs(spec) if m.group.index in inner))


def _find_readout(network: Network, name: object) -> NodeSpec:
    """The readout with this name, or the only one that depends on a state."""
    leaves = [m for m in network.specs if m.tpm.is_random and not network.graph.out_edges[m.group.index]]
    if name is not None:
        spec = network.specs[network.graph.get_group(name).index]  # type: ignore[arg-type]
        _check_readout(spec, leaves)
        return spec
    readouts = [m for m in leaves if _is_discrete(m) and not m.group.plates and _find_states(network, m)]
    if len(readouts) > 1:
        names = ", ".join(m.group.name for m in readouts)
        raise BNetError("lens: the net has several readouts", hint=f"Pass readout=: {names}")
    if not readouts:
        names = ", ".join(f"{m.group.name} ({type(m.tpm).__name__})" for m in leaves)
        actual = f"a net with the readouts {names}" if leaves else "a net without a readout"
        hint = "Declare a discrete readout, such as Node('y', Categorical(n), ['x'], plates=['word'])"
        raise BNetError("lens", expected="a discrete readout of a hidden state", actual=actual, hint=hint)
    return readouts[0]


def _check_readout(spec: NodeSpec, leaves: Collection[NodeSpec]) -> None:
    """Raise an error for a group that is no discrete readout without plates."""
    if spec not in leaves or not _is_discrete(spec) or spec.group.plates:
        plates = f" with the plates {', '.join(spec.group.plates)}" if spec.group.plates else ""
        actual = f"{spec.group.name}, a node of kind {spec.tpm.kind!r}{plates}"
        allowed = ", ".join(m.group.name for m in leaves if _is_discrete(m) and not m.group.plates)
        expected = "a discrete node without children and without plates other than word"
        raise BNetError("readout", expected=expected, actual=actual, allowed=allowed or None)


def _is_discrete(spec: NodeSpec) -> bool:
    """True for a discrete node with a fixed number of states."""
    return spec.tpm.kind == "discrete" and spec.tpm.states is not None


def _find_states(network: Network, readout: NodeSpec) -> list[NodeSpec]:
    """The states over words on which a readout depends, but not only through later states."""
    result, visited = dict[int, NodeSpec](), set[int]()
    frontier = [parent.index for parent in readout.parents]
    while frontier:
        index = frontier.pop()
        if index in visited:
            continue
        visited.add(index)
        spec = network.specs[index]
        if network.is_word_state(spec.group) and spec.tpm.kind in ("deterministic", "input"):
            result[index] = spec
        else:
            frontier += (edge.parent for edge in network.graph.in_edges[index])
    return [result[index] for index in sorted(result)]


def compute_log_probs(execution: ExecutionState, readout: NodeSpec) -> Tensor:
    """`log P(readout | parents)` after a run, `[row, word, state]`; one word for a readout without words."""
    return _select_rows(execution, compute_table("logits", readout, execution)[1])


def get_word_values(execution: ExecutionState, spec: NodeSpec, batch: int, num_words: int) -> Tensor:
    """The value of a state after a run, `[row, word, feature]`."""
    return _select_rows(execution, execution.values[spec.group.index]).expand(batch, num_words, -1)


def _select_rows(execution: ExecutionState, value: Tensor) -> Tensor:
    """A value in the layout as `[row, word, feature]`; an error if it depends on latent choices."""
    layout = execution.layout
    if any(value.shape[dim] > 1 for dim in range(layout.rank) if dim not in (layout.batch_dim, layout.word_dim)):
        names = [execution.network.specs[index].group.name for index in layout.enumerated]
        listed = ", ".join(names[:6]) + (", …" if len(names) > 6 else "")
        expected, actual = "a net without latent choices", f"states that depend on {listed}"
        hint = "Fit a net whose heads are summed (combine='concat'); s.lens() is the mean over latent choices"
        raise BNetError("tuned lens", expected=expected, actual=actual, hint=hint)
    return value.reshape(value.shape[layout.batch_dim], value.shape[layout.word_dim], -1)


def entropy(log_probs: Tensor) -> Tensor:
    """The entropy in nats over the last dim; `0 log 0` is 0."""
    terms = log_probs.exp().mul_(log_probs)
    total = terms.sum(-1)
    if bool(total.isnan().any()) and not bool(log_probs.isnan().any()):
        total = terms.nansum(-1)
    return -total


class DivergenceFrom:
    """Computes `KL(end || lens)` in nats over the last dim; states with probability 0 at the end do not count.

    Args:
        end: The log probabilities of the end, `[..., state]`.
    """

    def __init__(self, end: Tensor) -> None:
        self.log_probs, self.probs = end, end.exp()
        self.has_zeros = bool(end.isneginf().any())

    def __call__(self, log_probs: Tensor) -> Tensor:
        """The divergence of log probabilities, `[..., state]`, from the end."""
        terms = self.probs * (self.log_probs - log_probs)
        if self.has_zeros:
            terms = torch.where(self.log_probs.isneginf(), 0.0, terms)
        return terms.sum(-1)


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


def compute_lens(state: SentenceState, readout: object = None, tuned: Any = None, top: int = 10) -> Lens:
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
    is_set = [node for node in state.ground.select_nodes(path.readout.group).tolist() if node in state.model.do]
    if is_set:
        name = state.ground.name(is_set[0])
        expected = "a readout that is not set by do"
        raise BNetError("lens", expected=expected, actual=f"{name}, set by do", hint=f"Call undo({name!r})")
    runs = find_choice_runs(state, path)
    parts = [read_states(runs.set_choices(evaluator, run), path) for run in range(len(runs.states))]
    states = torch.stack([part if tuned is None else tuned.translate(part) for part in parts])
    reader = LensReader(evaluator, path, states, runs)
    return _summarise(state, reader, path, top, is_tuned=tuned is not None)


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
    """The slice of one index; for methods with a parameter `slice`."""
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
