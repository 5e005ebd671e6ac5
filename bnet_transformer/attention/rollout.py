"""Attention rollout: the words of a slice from which a later hidden state is computed, along the attention TPMs.

The product of attention TPMs over slices (rollout: Abnar and Zuidema 2020) is exact in an auxiliary Markov chain that
moves, slice by slice, from a word of the last state to a word that it attends to. It is not a posterior of the bnet.
With a selector the products are averaged, `sum_c P(c | e) prod_t A_t(c)`, not the matrices. Summed heads are averaged
in each slice, with equal weights or over the heads whose gates are on. Given the inclusion probabilities, gates of
different slices are independent, so the mean of the products is the product of the means.
"""

from __future__ import annotations

import heapq
import itertools
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from bnet_transformer import reference
from bnet_transformer._core.checks import check_choice, check_float, check_int
from bnet_transformer._core.naming import join_stem
from bnet_transformer._core.stats import ComparableResult, SentenceValues
from bnet_transformer._core.tensors import to_numpy
from bnet_transformer.attention.inclusion import Inclusion
from bnet_transformer.declare import NodeSpec
from bnet_transformer.errors import BNetError, BudgetError
from bnet_transformer.graph import NodeGroup
from bnet_transformer.inference.plan import Plan, find_slowest
from bnet_transformer.inference.posteriors import plan_state_probs
from bnet_transformer.inference.query import (
    Query,
    find_attention_spec,
    find_state_group,
    iter_chunks,
    with_sentence_scope,
)
from bnet_transformer.inference.values import NodeEvaluator
from bnet_transformer.reference import GroundModel, compute_read_mask, find_open_choices, has_ancestor_choices

if TYPE_CHECKING:
    import pandas as pd

MAX_FLOWS = 2**16  # maximum flows (state x output word x source word) through three or more slices
MAX_PATH_PRODUCTS = 2**28  # maximum products in the search for paths
SPECIAL_TOKENS = "special tokens"  # the label of their total share in tables
FLOW_RESOLUTION = 2**30  # units in a flow of 1, because scipy takes integer capacities


def check_chain(model: GroundModel, specs: Sequence[NodeSpec], slices: Sequence[int]) -> None:
    """Raise an error for a chain through a node set by do: its value is not computed from the earlier slices.

    A chain may begin at a state set by do.
    """
    path = find_value_path_groups(model, specs, slices)
    cut = [node for node in sorted(model.do) if model.ground.group_of(node).index in path]
    if cut:
        names = [model.ground.name(node) for node in cut[:6]] + ["…"] * (len(cut) > 6)
        raise BNetError(
            f"reads of slices {slices[0]} to {slices[-1]}" if len(slices) > 1 else f"reads of slice {slices[0]}",
            expected="a chain of attention without nodes set by do",
            actual=f"{', '.join(names)} set by do",
            hint="Choose slices= before or after these nodes (a chain may begin at such a state), or call undo(...)",
        )


def find_value_path_groups(model: GroundModel, attention_specs: Sequence[NodeSpec], slices: Sequence[int]) -> set[int]:
    """Find the groups on value paths between the state that enters the first slice and the state after the last.

    Groups that determine only the attention weights (q, k and their ancestors) are not included.
    """
    specs, stack = model.network.specs, attention_specs[0].group.stack
    groups = [spec.group for spec in specs]
    enters = {group.index for group in groups if _is_entering_state(group, stack, slices[0])}
    leaves = {group.index for group in groups if _is_entering_state(group, stack, slices[-1] + 1)}
    ancestors, descendants = set(leaves), set(enters)
    for spec in reversed(specs):
        if spec.group.index in ancestors - enters:
            ancestors |= _get_value_parents(spec)
    for spec in specs:
        if spec.tpm.kind != "discrete" and _get_value_parents(spec) & descendants:
            descendants.add(spec.group.index)
    return {reader.group.index for reader in attention_specs} | (ancestors & descendants - enters)


def _is_entering_state(group: NodeGroup, stack: str, slice_: int) -> bool:
    """Return True for the state that enters a slice: the output of the previous slice, or of the prologue."""
    return group.stack == stack and group.slice == slice_ and group.step == slice_ - 1


def _get_value_parents(spec: NodeSpec) -> set[int]:
    """Return the parents of a group whose values enter its value, and not only its attention weights."""
    attention_slots = set(spec.tpm.attention_slots()) if spec.has_word_attention else set()
    excluded = attention_slots if attention_slots < set(spec.tpm.get_slots()) else set()
    return {parent.index for parent in spec.parents if parent.slot not in excluded}


def add_residual(attention: Tensor, residual: float) -> Tensor:
    """Compute `(1 - residual) P(j | i) + residual 1(j = i)`."""
    return (1 - residual) * attention + residual * torch.eye(attention.shape[-1], dtype=attention.dtype)


def attention_rollout(transitions: Tensor) -> Tensor:
    """Compute the product `A_T ... A_1 A_0` of `[..., slice, word, word]`."""
    product = transitions[..., 0, :, :]
    for t in range(1, transitions.shape[-3]):
        product = transitions[..., t, :, :] @ product
    return product


def max_flow(transitions: Tensor) -> Tensor:
    """Compute the maximum flow between each output word and each source word, with transitions as capacities.

    Args:
        transitions: The transitions of the chain, `[..., slice, word, word]`.

    Returns:
        The flows, `[..., word, word]`.

    Raises:
        BudgetError: If three or more slices have more than `MAX_FLOWS` flows.
    """
    *batch_shape, count, n, _ = transitions.shape
    if count == 1:
        return transitions[..., 0, :, :].clone()
    # In a layered graph, the flow through two slices is limited at each middle word by the smaller of two capacities.
    if count == 2:
        return torch.minimum(transitions[..., 1, :, :, None], transitions[..., 0, None, :, :]).sum(-2)
    problems = transitions.reshape(-1, count, n, n)
    if len(problems) * n * n > MAX_FLOWS:
        expected, actual = f"at most {MAX_FLOWS:,} flows (states x words x words)", f"{len(problems) * n * n:,}"
        hint = "Use method='rollout', fewer words or slices, or do or evidence on choices"
        raise BudgetError("reads by flow", expected=expected, actual=actual, hint=hint)
    flows = torch.stack([_max_flow_matrix(to_numpy(problem)) for problem in problems])
    return flows.to(transitions).reshape(*batch_shape, n, n)


def _max_flow_matrix(transitions: NDArray[np.float64]) -> Tensor:
    """Compute the maximum flow from each word of the last layer to each word of the first layer."""
    count, n, _ = transitions.shape
    capacity = np.zeros(((count + 1) * n, (count + 1) * n))
    for t, step in enumerate(transitions):
        capacity[(t + 1) * n : (t + 2) * n, t * n : (t + 1) * n] = step
    pairs = itertools.product(range(count * n, (count + 1) * n), range(n))
    flows = [_max_flow_value(capacity, source, sink) for source, sink in pairs]
    return torch.tensor(flows, dtype=torch.float64).reshape(n, n)


def _max_flow_value(capacity: NDArray[np.float64], source: int, sink: int) -> float:
    """Compute the maximum flow in two passes, which bound the rounding error."""
    from scipy.sparse import csr_matrix
    from scipy.sparse.csgraph import maximum_flow

    # scipy's maximum_flow takes int32 capacities. The first pass uses coarse units. The second pass works on the
    # residual capacities, in units that are finer by the number of edges.
    total, scale, residual = 0.0, 1.0, capacity
    num_edges = np.count_nonzero(capacity)
    for _ in range(2):
        unit = scale / FLOW_RESOLUTION
        flow = maximum_flow(csr_matrix(np.floor(np.minimum(residual, scale) / unit).astype(np.int32)), source, sink)
        total += flow.flow_value * unit
        residual = np.maximum(residual - flow.flow.toarray() * unit, 0.0)
        scale = num_edges * unit  # rounding loses at most one unit for each edge
    return total


def find_best_paths(weights: Tensor, transitions: Tensor, word: int, count: int) -> list[tuple[float, tuple[int, ...]]]:
    """Find the `count` most probable paths from a word down through all slices, most probable first; exact (A*).

    Args:
        weights: `P(state)`, `[state]`.
        transitions: The transitions in each state, `[state, slice, word, word]`.
        word: The word of the last state.
        count: The number of paths.

    Returns:
        For each path its probability `sum_s weights[s] prod_t transitions[s, t, i_(t+1), i_t]`, and its words.
    """
    # A* search. The bound of a partial path is the sum over states of its probability times the largest probability of
    # any completion in that state. The best completion of a sum is at most the sum of the best completions, so the
    # bound is admissible, and for a complete path it equals the probability. So paths leave the heap in order of
    # probability.
    depth, work = transitions.shape[1], 0
    bounds_to_go = [transitions.new_ones(transitions.shape[0], transitions.shape[-1])]  # [state, word]
    for t in range(depth):
        bounds_to_go.append((transitions[:, t] * bounds_to_go[-1][:, None, :]).amax(-1))
    heap: list[tuple[float, tuple[int, ...]]] = [(-1.0, (word,))]
    paths: list[tuple[float, tuple[int, ...]]] = []
    while heap and len(paths) < count:
        total, words = heapq.heappop(heap)
        if len(words) > depth:
            paths.append((-total, words))
            continue
        work += transitions.shape[0] * transitions.shape[-1]
        if work > MAX_PATH_PRODUCTS:
            expected, hint = f"at most {MAX_PATH_PRODUCTS:,} products", "Use fewer slices, or a smaller count="
            raise BudgetError("search for paths", expected=expected, hint=f"{hint}, or do or evidence on choices")
        probs, last = path_probs(weights, transitions, words), depth - len(words)
        bounds = (probs[:, None] * transitions[:, last, words[-1]] * bounds_to_go[last]).sum(0)
        for j, bound in enumerate(bounds.tolist()):  # for a complete path the bound is the probability
            if bound > 0:
                heapq.heappush(heap, (-bound, (*words, j)))
    return paths


def path_probs(weights: Tensor, transitions: Tensor, words: tuple[int, ...]) -> Tensor:
    """Compute `P(state, words)` of a path that starts at the last slice, `[state]`."""
    last, probs = transitions.shape[1] - 1, weights
    for k, (i, j) in enumerate(itertools.pairwise(words)):
        probs = probs * transitions[:, last - k, i, j]
    return probs


@dataclass(frozen=True)
class Path:
    """A path of words in the chain, from the last state to the first, and its probability.

    Attributes:
        words: The indices of the words, from the last state to the first.
        tokens: The tokens of these words.
        probability: The probability of the path, summed over the states of the latent choices.
        choices: The most probable state of each latent choice, given the path.
        share: The posterior probability of these states, given the path.
    """

    words: tuple[int, ...]
    tokens: tuple[str, ...]
    probability: float
    choices: dict[str, int]
    share: float

    def __str__(self) -> str:
        states = ", ".join(f"{name}={state}" for name, state in self.choices.items())
        detail = f"; {self.share:.2f} of it with {states}" if states else ""
        return f"{' <- '.join(self.tokens)} ({self.probability:.3f}{detail})"


@dataclass(frozen=True)
class Reads(ComparableResult):
    """`P(source word | output word)` in the chain of attention TPMs, as `matrix[i, j]`.

    Attributes:
        matrix: The probability that output word i is computed from source word j, `[word, word]`.
        attention: The attention TPM `P(j | i)` of each slice in each state of the latent choices, averaged over heads
            unless one head is selected, `[state, slice, word, word]`.
        weights: The probability of each state of the latent choices, `[state]`.
        choices: The states of the latent choices by name, for each state.
        tokens: The tokens of the words.
        slices: The indices of the slices.
        residual: The probability that a step of the chain stays at its word.
        head: A description of the heads and choices over which attention is averaged.
        method: `"rollout"` or `"flow"`.
        head_entropies: The entropy of the TPM of each head in nats, `[slice, head, word]`.
        readable: The pairs of words that have an arrow, `[slice, word, word]`.
        state: The role of the hidden states that the chain connects, such as `x` or `dec_x`.
        special: For each word, whether it is a special token; empty if this is unknown.
        has_special: False if tables and displays leave special tokens out. `matrix` always contains them.
        digest: A digest of the words of the sentence; empty if they are unknown.
    """

    _number_format, _max_rows = "{:.3f}", None
    _shapes = (
        "tokens: any word; special: any word?; slices: any slice; choices: any state; weights: float state; matrix: "
        "float word word; attention: float state slice word word; head_entropies: float slice _ word; readable: bool "
        "slice word word"
    )

    matrix: Tensor
    attention: Tensor = field(repr=False)
    weights: Tensor = field(repr=False)
    choices: tuple[dict[str, int], ...] = field(repr=False)
    tokens: tuple[str, ...]
    slices: tuple[int, ...]
    residual: float
    head: str
    method: str
    head_entropies: Tensor = field(repr=False)
    readable: Tensor = field(repr=False)
    state: str = "x"
    special: tuple[bool, ...] = field(default=(), repr=False)
    has_special: bool = True
    digest: str = field(default="", repr=False)

    @property
    def shown_words(self) -> tuple[int, ...]:
        """The indices of the words in tables: all, or those that are no special tokens."""
        is_special = self.special or (False,) * len(self.tokens)
        return tuple(i for i in range(len(self.tokens)) if self.has_special or not is_special[i])

    @property
    def special_mass(self) -> Tensor:
        """The probability that each output word is computed from special tokens, `[word]`."""
        sources = [j for j, is_special in enumerate(self.special) if is_special]
        return self.matrix[:, sources].sum(-1)

    @property
    def chain(self) -> Tensor:
        """The transitions of the chain, `[state, slice, word, word]`: `(1 - residual) P(j | i) + residual 1(j = i)`."""
        return add_residual(self.attention, self.residual)

    @property
    def entropies(self) -> Tensor:
        """The entropy in nats of each `attention` TPM, averaged over the latent choices, `[slice, word]`.

        Heads are averaged before the entropy is computed. So it is at least the mean of `head_entropies`, because
        entropy is concave.
        """
        return torch.einsum("s,stn->tn", self.weights, torch.special.entr(self.attention).sum(-1))

    def paths(self, word: int, count: int = 1) -> tuple[Path, ...]:
        """Find the most probable paths of words from a word of the last state, summed over the latent choices.

        The search is exact (A*).

        Args:
            word: The index of the word.
            count: The number of paths, 1 by default.

        Returns:
            The paths, most probable first.

        Raises:
            BNetError: If there is no such word.
            BudgetError: If the search needs too many products.
        """
        n, count = len(self.tokens), check_int("count", count)
        if check_int("word", word, minimum=0) >= n:
            raise BNetError("word", expected=f"the index of a word, from 0 to {n - 1}", actual=word)
        chain, result = self.chain, []
        for probability, words in find_best_paths(self.weights, chain, word, count):
            probs = path_probs(self.weights, chain, words)
            best = int(probs.argmax())
            tokens = tuple(self.tokens[i] for i in words)
            result.append(Path(words, tokens, probability, self.choices[best], float(probs[best] / probs.sum())))
        return tuple(result)

    def to_dataframe(self) -> pd.DataFrame:
        """Return one row for each output word and each source word.

        Without special tokens, the last row of each output word has the share of all special tokens, with source -1.
        Shares are not divided by the sum of those that remain.
        """
        import pandas as pd

        tokens, words, masses, rows = list(self.tokens), self.shown_words, self.special_mass.tolist(), []
        for i in words:
            shares = [(j, tokens[j], float(self.matrix[i, j])) for j in words]
            shares += [] if self.has_special else [(-1, SPECIAL_TOKENS, masses[i])]
            rows += [(i, tokens[i], *share) for share in shares]
        return pd.DataFrame(rows, columns=["output", "output_token", "source", "source_token", "share"])

    def _to_sentence_values(self) -> SentenceValues:
        frame = self.to_dataframe()
        cells = tuple(f"{row.output} <- {row.source}" for row in frame.itertuples())
        columns = {name: frame[name].tolist() for name in frame.columns[:-1]}
        settings = {"words": len(self.tokens), "slices": self.slices, "average over heads": self.head}
        settings |= {"method": self.method, "residual": self.residual, "state": self.state}
        shares = frame[["share"]].to_numpy()
        return SentenceValues("share of reads", cells, columns, shares, settings=settings, digests=(self.digest,))

    @property
    def caption(self) -> str:
        """The method, the slices and the head, in one line."""
        return f"{self.method} over slices {list(self.slices)}, residual {self.residual:g}, {self.head}"

    def _get_shown_frame(self) -> pd.DataFrame:
        import pandas as pd

        words = list(self.shown_words)
        tokens = [self.tokens[i] for i in words]
        frame = pd.DataFrame(to_numpy(self.matrix[words][:, words]), tokens, tokens)
        return frame if self.has_special else frame.assign(**{SPECIAL_TOKENS: to_numpy(self.special_mass[words])})


def plan_reads(
    query: Query,
    tokens: Sequence[str],
    slices: Sequence[int],
    *,
    role: str | None,
    residual: float,
    head: int | None,
    method: str,
    inclusion: Inclusion | None = None,
    evaluator: NodeEvaluator | None = None,
) -> Plan[Reads]:
    """The plan of the words of the first state of some slices from which each word of their last state is computed.

    Its cost is that of the posterior of the latent choices; without choices it is that of the slowest slice.

    Args:
        query: The sentence, its evidence, and the limits.
        tokens: The tokens of the words.
        slices: The indices of consecutive slices.
        role: The role with attention, if a slice has several.
        residual: The probability that a step stays at its word.
        head: The index of one head; None for the mean over heads.
        method: `"rollout"` or `"flow"`.
        inclusion: The posterior of gates, which weights the heads; None for equal weights.
        evaluator: An evaluator of this sentence without evidence, to reuse it.

    Returns:
        The plan of the chain and its matrix.
    """
    residual, model = _check_options(method, residual, slices), query.model
    specs = [find_attention_spec(model, t, role) for t in slices]
    check_chain(model, specs, slices)
    average = _build_head_average(specs, head, inclusion)
    choices = find_choices_read(model, specs)
    sizes = [model.count_states(choice) for choice in choices]
    evaluator = evaluator or NodeEvaluator(query.module, model, {})
    plans = [] if choices else evaluator.plan_attentions(specs)

    def iter_tables(states: Tensor) -> Iterator[tuple[slice, list[Tensor]]]:
        if choices:
            yield from iter_attention_by_state(evaluator, choices, states, specs)
            return
        evaluator.prefetch("attention", specs)
        yield slice(0, 1), [plan.run()[None] for plan in plans]

    def compute(probs: Tensor) -> Reads:
        possible = probs.nonzero()[:, 0]
        states = torch.stack(torch.unravel_index(possible, sizes), 1) if choices else torch.zeros(1, 0).long()
        probs, steps, entropies = probs[possible], [], torch.zeros(len(slices), 1, 1, dtype=torch.float64)
        for chunk, tables in iter_tables(states):
            by_slice = [_select_heads(model, table.double(), t, head) for t, table in zip(slices, tables, strict=True)]
            steps.append(torch.stack([average(k, table) for k, table in enumerate(by_slice)], 1))
            by_head = [torch.einsum("s,shi->hi", probs[chunk], torch.special.entr(table).sum(-1)) for table in by_slice]
            entropies = entropies + torch.stack(by_head)
        attention = torch.cat(steps)
        stack = specs[0].group.stack
        state = find_state_group(model.network, stack)
        chain = add_residual(attention, residual)
        return Reads(
            torch.einsum("s,sij->ij", probs, attention_rollout(chain) if method == "rollout" else max_flow(chain)),
            attention,
            probs,
            tuple(dict(zip(map(model.ground.name, choices), row, strict=True)) for row in states.tolist()),
            tuple(tokens),
            tuple(slices),
            residual,
            _describe_heads(model, choices, head, inclusion),
            method,
            entropies,
            torch.from_numpy(np.stack([compute_read_mask(model, spec) for spec in specs])),
            join_stem(stack, "x" if state is None else state.role),
        )

    if not choices:
        return find_slowest(plans).with_run(lambda: compute(torch.ones(1, dtype=torch.float64)))
    posterior = plan_state_probs(replace(query, nodes=tuple(choices)))
    question, count = f"reads of slices {[*slices]}", max(math.prod(sizes), posterior.states)
    return replace(posterior, question=question, states=count).then(compute)


def _check_options(method: str, residual: float, slices: Sequence[int]) -> float:
    """Raise an error for invalid options of a chain; return the checked `residual`."""
    check_choice("method", method, ("rollout", "flow"))
    if not 0 <= (residual := check_float("residual", residual)) <= 1:
        raise BNetError("residual", expected="a probability from 0 to 1", actual=residual)
    if list(slices) != list(range(min(slices), max(slices) + 1)):
        raise BNetError("slices", expected="consecutive slices", actual=list(slices))
    return residual


def _build_head_average(
    specs: Sequence[NodeSpec], head: int | None, inclusion: Inclusion | None
) -> Callable[[int, Tensor], Tensor]:
    """Create a function from `P(j | i)` of each head of a slice, `[state, head, word, word]`, to the mean over heads.

    With `inclusion`, the mean is over the heads whose gates are on; if all are off, a word attends to itself.
    """
    if inclusion is None:
        return lambda _, by_head: by_head.mean(1)
    if not isinstance(inclusion, Inclusion):
        raise BNetError("inclusion", expected="a result of bt.inclusion", actual=inclusion)
    if head is not None:
        raise BNetError("head", expected="None, because inclusion= weights all heads", actual=head)
    indices = [inclusion.slice_index(spec.group.name) for spec in specs]
    head_weights, all_off = inclusion.shares()

    def average(k: int, attention: Tensor) -> Tensor:
        if attention.shape[1] != head_weights.shape[1]:
            expected = f"{attention.shape[1]} heads, as in the net"
            raise BNetError("inclusion", expected=expected, actual=f"{head_weights.shape[1]} heads")
        identity = torch.eye(attention.shape[-1], dtype=attention.dtype)
        return torch.einsum("h,shij->sij", head_weights[indices[k]], attention) + all_off[indices[k]] * identity

    return average


def _describe_heads(
    model: GroundModel, open_choices: Sequence[int], head: int | None, inclusion: Inclusion | None
) -> str:
    """Describe the heads and choices over which attention is averaged."""
    plate = "head" in model.network.graph.plate_sizes
    heads = f"head {head}" if head is not None else "the mean over heads" if plate else ""
    heads = heads if inclusion is None else "the mean over heads, weighted by their inclusion"
    names = list(dict.fromkeys(model.ground.group_of(node).name for node in open_choices))
    if not names:
        return heads or "one head"
    over = f"averaged over {', '.join(names[:4])}{', …' if len(names) > 4 else ''}"
    return f"{heads}, {over}" if heads else over


def find_choices_read(model: GroundModel, specs: Sequence[NodeSpec]) -> list[int]:
    """Find the latent choices on which the attention of some groups depends."""
    groups = [spec.group for spec in specs]
    if not has_ancestor_choices(model.network, {group.index for group in groups}):
        return []
    nodes = [node for group in groups for node in model.ground.select_nodes(group).tolist()]
    parents = {parent for node in nodes for parent in reference.attention_parents(model, node)}
    return find_open_choices(model, parents, {})


def iter_attention_by_state(
    evaluator: NodeEvaluator, open_choices: Sequence[int], states: Tensor, specs: Sequence[NodeSpec]
) -> Iterator[tuple[slice, list[Tensor]]]:
    """Iterate over chunks of states with `P(j | i)` of some groups, `[S, *plates, word, word]` each.

    Args:
        evaluator: The evaluator of the sentence. Given all its choices, attention does not depend on the evidence.
        open_choices: The latent choices on which the attention depends.
        states: The states of the choices, `[S, choice]`.
        specs: The groups.
    """
    model, module = evaluator.model, with_sentence_scope(evaluator.module)
    first = dict(zip(open_choices, states[:1].unbind(1), strict=True))
    is_one_batch = evaluator.with_batched_states(first, module).find_table_fault("attention", specs, ()) is None
    for chunk in iter_chunks(model, len(states), {spec.group.index for spec in specs}):
        if is_one_batch:
            batch = evaluator.with_batched_states(dict(zip(open_choices, states[chunk].unbind(1), strict=True)), module)
            batch.prefetch("attention", specs)
            yield chunk, [batch.plan_attention(spec).run() for spec in specs]
        else:  # the compiled net cannot compute this batch, because each state has its own plan
            rows = []
            for row in states[chunk]:
                row_model = replace(model, do={**model.do, **dict(zip(open_choices, row, strict=True))})
                row_evaluator = NodeEvaluator(module, row_model, {})
                rows.append([row_evaluator.plan_attention(spec).run() for spec in specs])
            yield chunk, [torch.stack(tables) for tables in zip(*rows, strict=True)]


def _select_heads(model: GroundModel, attention: Tensor, slice_: int, head: int | None) -> Tensor:
    """Return `P(j | i)` of one slice, `[state, head, word, word]`, of one head or of all."""
    n = attention.shape[-1]
    if attention.shape[-2] != n:
        actual = f"{attention.shape[-2]} words that attend to {n} words"
        expected = "words that attend to words of the same stack"
        raise BNetError(f"slice {slice_}", expected=expected, actual=actual, hint="Pass role= of the self-attention")
    heads_table = attention.reshape(len(attention), -1, n, n)
    if head is None:
        return heads_table
    num_heads = heads_table.shape[1]  # over all plates of heads
    if num_heads % model.network.graph.plate_sizes.get("head", num_heads + 1):
        names = [m.group.name for m in model.network.specs if m.tpm.kind == "discrete" and m.group.role == "c"]
        hint = f"Use do or evidence on {', '.join(names)}" if names else "Use head=None"
        raise BNetError("head", expected="None, because the net has no plate of heads", actual=head, hint=hint)
    if check_int("head", head, minimum=0) >= num_heads:
        raise BNetError("head", expected=f"the index of a head, from 0 to {num_heads - 1}", actual=head)
    return heads_table[:, head : head + 1]
