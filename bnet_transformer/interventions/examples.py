"""Examples (sentences that are computed as one batch) and the metric of their runs."""

from __future__ import annotations

import functools
import inspect
import math
from collections.abc import Callable, Collection, Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any

import numpy as np
import torch
from torch import Tensor

from bnet_transformer import reference
from bnet_transformer._core.naming import split_pattern
from bnet_transformer._core.results import Fields, get_parameter_names, register_codec
from bnet_transformer._core.stats import digest_words
from bnet_transformer._core.tensors import IntArray
from bnet_transformer.compiler.gather import ExecutionState, NodePatches, ValueChange, build_request
from bnet_transformer.compiler.module import CompiledModule
from bnet_transformer.data.do_values import Swap, is_intervention
from bnet_transformer.data.encode import encode_value
from bnet_transformer.errors import BNetError, BudgetError, EvidenceError, UnsupportedError, format_count
from bnet_transformer.graph import find_family
from bnet_transformer.inference.plan import Obstacle, find_mixed_type_fault
from bnet_transformer.inference.posteriors import plan_joint
from bnet_transformer.inference.query import Query, enumerate_joint_states
from bnet_transformer.inference.values import SentenceState
from bnet_transformer.reference import (
    BUDGET,
    GroundModel,
    check_discrete_node,
    evaluation_order,
    find_open_choices,
    has_ancestor_choices,
    locate_node,
)

# --------------------------------------------------------------------------------------------------------------------
# Examples: sentences of one net and one length that are computed as one batch.


DEFAULT_MEMORY = 2**29  # the default number of bytes that are used at once
Overrides = Mapping[int, tuple[Tensor, Tensor]]  # values `[example, *plates, word, *shape]`, and masks, by group


def get_sentence_state(sentence: object) -> SentenceState | None:
    """The state of a sentence; None if the object is not a sentence."""
    state = getattr(sentence, "state", None)
    return state if isinstance(state, SentenceState) else None


@dataclass(frozen=True)
class Examples:
    """Sentences of one net that can be one batch: they have the same numbers of words and the same set nodes.

    Args:
        module: The compiled net.
        models: The ground model of each sentence.
        tokens: The tokens of each sentence, by stack.
        special: The indices of the special tokens of each sentence, by stack.
    """

    module: CompiledModule
    models: tuple[GroundModel, ...]
    tokens: tuple[Mapping[str, Sequence[str]], ...]
    special: tuple[Mapping[str, Sequence[int]], ...] = ()

    @property
    def model(self) -> GroundModel:
        """The first sentence; all sentences have the same names, arrows and word counts."""
        return self.models[0]

    def __len__(self) -> int:
        return len(self.models)

    def digest_pairs(self, partners: Examples | None) -> tuple[str, ...]:
        """A digest of the words of each sentence and of its partner; empty if the words of one are unknown."""
        sides = [side for side in (self, partners) if side is not None]
        digests = [map(digest_words, side.tokens, side.special or ({},) * len(side)) for side in sides]
        return tuple("/".join(pair) if all(pair) else "" for pair in zip(*digests, strict=True))

    def find_obstacle(self, groups: Collection[int]) -> Obstacle | None:
        """The obstacle to computing the values, or distributions, of groups in one compiled run; None if it can."""
        model, graph = self.model, self.model.network.graph
        ancestors = {*groups, *graph.ancestors(groups)}
        mixed = find_mixed_type_fault(model, model.do, relevant=ancestors)
        if mixed is not None:
            return mixed
        needs = self.module.find_requirements(build_request(model, tuple(sorted(groups)), ancestors).structure)
        if needs.enumerated:
            name = graph.groups[min(needs.enumerated)].name
            return Obstacle(name, f"{name} is a latent choice that the sweep does not enumerate", f"set {name} by do")
        return None if needs.fault is None else Obstacle(needs.fault.node, needs.fault.reason, needs.fault.remedy)

    def with_choices(self, states: Mapping[int, Tensor]) -> Examples:
        """The same sentences with their latent choices set to these states."""
        if not states:
            return self
        open_states = {node: state for node, state in states.items() if node not in self.model.do}
        return replace(self, models=tuple(model.surgery(open_states) for model in self.models))

    def select(self, part: slice) -> Examples:
        """Some of the sentences."""
        return replace(self, models=self.models[part], tokens=self.tokens[part], special=self.special[part])

    def split(self, size: int) -> Iterator[Examples]:
        """Split the sentences, in order, into parts of `size`."""
        return (self.select(slice(start, start + size)) for start in range(0, len(self), size))

    def run(
        self,
        groups: Collection[int],
        record_attention: Collection[int] = (),
        perturbations: Mapping[int, Tensor] | None = None,
        overrides: Overrides | None = None,
    ) -> ExecutionState:
        """Run all sentences in one batch. No group may depend on a latent choice.

        Args:
            groups: The node groups whose values are recorded, `[1 or N, *plates, word, *shape]`.
            record_attention: The node groups whose attention `P(j | i)` is recorded.
            perturbations: Zeros that are added to the values of some groups, so that they have a gradient.
            overrides: Values that replace those of some nodes, and the masks of these nodes, by group.

        Returns:
            The state of the execution, with the values and the attention.
        """
        graph = self.model.network.graph
        ancestors = {*groups, *record_attention, *graph.ancestors([*groups, *record_attention])}
        requests = [build_request(model, tuple(sorted(groups)), ancestors, training=False) for model in self.models]
        known = {index: torch.cat([request.known[index] for request in requests]) for index in requests[0].known}
        patched = _stack_sentences([request.patched for request in requests])
        for index, (values, mask) in (overrides or {}).items():
            if index in ancestors:
                is_input = self.model.network.specs[index].tpm.kind == "input"
                _override_values(index, values, mask, {} if is_input else known, patched)
        request = replace(
            requests[0],
            known=known,
            patched=patched,
            attention_rows=_stack_sentences([request.attention_rows for request in requests]),
            record_attention=frozenset(record_attention),
        )
        axis = 1 + len(graph.plate_sizes)
        with torch.set_grad_enabled(bool(perturbations)):
            changes = {index: [_add_to_values(leaf, axis)] for index, leaf in (perturbations or {}).items()}
            state, plan = self.module.execute(replace(request, changes=changes))
        if plan.enumerated:
            name = graph.groups[plan.enumerated[0]].name
            raise UnsupportedError(f"{name} is a latent choice, which one run cannot compute", hint=f"Set {name} by do")
        return state


def _add_to_values(tensor: Tensor, axis: int) -> ValueChange:
    """The sum of the value of a group and a tensor with the words along `axis`, as a change of a request."""
    by_word = tensor.split(1, axis)  # once: a slice for each word would have a gradient of the size of the tensor
    return lambda value, word: value + (tensor if word is None else by_word[word]).to(value.device)


def _override_values(
    index: int, values: Tensor, mask: Tensor, known: dict[int, Tensor], patched: dict[int, tuple[Tensor, Tensor]]
) -> None:
    """Replace the values of some nodes of a group in the values that are known, or set these nodes."""
    selected = mask.reshape(*mask.shape, *[1] * (values.dim() - mask.dim()))
    if index in known:
        known[index] = torch.where(selected, values.to(known[index].dtype), known[index])
    elif index in patched:
        before, was_set = patched[index]
        patched[index] = torch.where(selected, values, before), mask | was_set
    else:
        patched[index] = values, mask


def _stack_sentences(by_sentence: Sequence[NodePatches]) -> dict[int, tuple[Tensor, Tensor]]:
    """Concatenate the values of groups, and the masks of the nodes that are set, along the sentences."""
    columns = {index: zip(*(tensors[index] for tensors in by_sentence), strict=True) for index in by_sentence[0]}
    return {index: (torch.cat(values), torch.cat(masks)) for index, (values, masks) in columns.items()}


def get_batch_key(model: GroundModel) -> Hashable:
    """The key that sentences of one batch share: word counts, and the shapes of the nodes that are set or given."""
    values = [*model.do.items(), *model.inputs.items()]
    shapes = frozenset((key, value.shape, value.dtype) for key, value in values)
    return tuple(model.ground.word_counts.items()), frozenset(model.attention_rows), shapes


def parse_examples(subject: str, sentences: object) -> Examples:
    """Validate one sentence, or a list of them, as the examples of one batch."""
    items: list[Any] = list(sentences) if isinstance(sentences, list | tuple) else [sentences]
    states = [state for item in items if (state := get_sentence_state(item)) is not None]
    if not states or len(states) < len(items):
        actual = next((item for item in items if get_sentence_state(item) is None), items)
        raise BNetError(subject, expected="a Sentence, or a list of sentences", actual=actual)
    first = states[0]
    for k, item in enumerate(states):
        name = f"{subject}[{k}]" if isinstance(sentences, list | tuple) else subject
        if item.model.network is not first.model.network:
            raise BNetError(
                name, expected="a sentence of the same net as the first", actual="a sentence of another net"
            )
        if item.model.ground.word_counts != first.model.ground.word_counts:
            expected = f"a sentence of {_format_word_counts(first.model)}, like {subject}[0]"
            raise BNetError(name, expected=expected, actual=_format_word_counts(item.model))
        if item.evidence:
            observed = ", ".join(item.model.ground.name(node) for node in item.evidence)
            expected, hint = "a sentence without evidence", "Use do() to set a node"
            raise EvidenceError(name, expected=expected, actual=f"evidence on {observed}", hint=hint)
        if get_batch_key(item.model) != get_batch_key(first.model):
            expected = f"interventions on the same nodes as in {subject}[0]"
            hint = "Set the same nodes in each sentence, or pass the sentences in separate calls"
            raise BNetError(name, expected=expected, hint=hint)
    special = tuple(s.encoded.find_special_words(s.network) for s in states)
    return Examples(first.module, tuple(s.model for s in states), tuple(s.tokens for s in states), special)


def parse_example_pair(clean: object, corrupt: object, *, has_alignment: bool = False) -> tuple[Examples, Examples]:
    """Validate the clean and the corrupt sentences: equally many, of one net and, without an alignment, one length."""
    clean_examples, corrupt_examples = parse_examples("clean", clean), parse_examples("corrupt", corrupt)
    if len(clean_examples) != len(corrupt_examples):
        expected = f"as many sentences as clean, {len(clean_examples)}"
        raise BNetError("corrupt", expected=expected, actual=len(corrupt_examples))
    clean_model, corrupt_model = clean_examples.model, corrupt_examples.model
    if clean_model.network is not corrupt_model.network:
        raise BNetError("corrupt", expected="sentences of the same net as clean", actual="sentences of another net")
    if clean_model.ground.word_counts != corrupt_model.ground.word_counts and not has_alignment:
        expected = f"sentences of {_format_word_counts(clean_model)}, like clean"
        hint = "Or align words: words={word: word of the other sentence}"
        raise BNetError("corrupt", expected=expected, actual=_format_word_counts(corrupt_model), hint=hint)
    return clean_examples, corrupt_examples


def parse_sides(
    clean: object, corrupt: object, *, is_noise: bool, words: object, hint: str
) -> tuple[Examples | None, Examples, object]:
    """Validate the sentences of both sides, of which one may be what the values become.

    Args:
        clean: The clean sentence or sentences, or with `is_noise=False` an intervention.
        corrupt: The corrupt sentence or sentences, or with `is_noise=True` an intervention.
        is_noise: Whether the clean sentences are changed, instead of the corrupt ones.
        words: The alignment of words, as the user passed it.
        hint: What to do if the sentences that are changed are an intervention.

    Returns:
        The sentences that provide the values (None without them), those that are changed, and the intervention (None
        for the values of sentences).
    """
    sides = {"clean": clean, "corrupt": corrupt}
    source_name, base_name = ("corrupt", "clean") if is_noise else ("clean", "corrupt")
    if is_intervention(sides[base_name]):
        raise BNetError(base_name, expected="sentences, which are changed", actual=sides[base_name], hint=hint)
    intervention = sides[source_name] if is_intervention(sides[source_name]) else None
    if intervention is not None and not isinstance(intervention, Swap):
        if words is not None:
            expected, actual = "sentences on both sides", "an ablation or a change, which has no other run"
            raise BNetError("words", expected=expected, actual=actual)
        return None, parse_examples(base_name, sides[base_name]), intervention
    if isinstance(intervention, Swap):
        sides[source_name] = intervention.target
    pair = parse_example_pair(*sides.values(), has_alignment=words is not None)
    return (*(pair[::-1] if is_noise else pair), intervention)


def split_by_length(clean: object, corrupt: object, words: object) -> list[tuple[tuple[int, ...], object, object]]:
    """The examples of each length: their numbers, and both sides.

    There is one part, without numbers, if the lengths are equal, if words are aligned, or if the sides are no lists of
    sentences of equal number.
    """
    sides = [side.target if isinstance(side, Swap) else side for side in (clean, corrupt)]
    lengths = [[_get_length(sentence) for sentence in side] for side in sides if isinstance(side, list | tuple)]
    is_valid = len({len(side) for side in lengths}) == 1 and all(None not in side for side in lengths)
    if not is_valid or words is not None:
        return [((), clean, corrupt)]
    numbers: dict[object, list[int]] = {}
    for k, length in enumerate(zip(*lengths, strict=True)):
        if len({*length}) > 1:
            actual = f"{length[0]} and {length[1]} words"
            hint = "Pairs have equal lengths, or align words: words={word: word of the other sentence}"
            raise BNetError(f"corrupt[{k}]", expected=f"as many words as clean[{k}]", actual=actual, hint=hint)
        numbers.setdefault(length, []).append(k)

    def select(side: Any, part: Sequence[int]) -> object:
        if isinstance(side, Swap):
            return Swap(select(side.target, part), side.basis)
        return [side[k] for k in part] if isinstance(side, list | tuple) else side

    if len(numbers) < 2:
        return [((), clean, corrupt)]
    return [(tuple(part), select(clean, part), select(corrupt, part)) for part in numbers.values()]


def _get_length(sentence: object) -> tuple[int, ...] | None:
    """The number of words of each stack; None if the object is no sentence."""
    state = get_sentence_state(sentence)
    return None if state is None else tuple(state.model.ground.word_counts.values())


def has_difference(first: Examples, second: Examples) -> bool:
    """True if the inputs, the set values or the set rows of attention differ in some pair of examples."""
    for one, other in zip(first.models, second.models, strict=True):
        for name in ("inputs", "do", "attention_rows"):
            values, peer_values = getattr(one, name), getattr(other, name)
            is_same = values.keys() == peer_values.keys()
            if not is_same or any(not torch.equal(values[key], peer_values[key]) for key in values):
                return True
    return False


def _format_word_counts(model: GroundModel) -> str:
    """The number of words of each stack, as text."""
    return " and ".join(
        f"{count} words" + (f" ({stack})" if stack else "") for stack, count in model.ground.word_counts.items()
    )


def _to_fields(examples: Examples) -> Fields:
    """The sentences without the compiled net, which their net determines."""
    tokens, special = (tuple(map(dict, values)) for values in (examples.tokens, examples.special))
    return {"models": examples.models, "tokens": tokens, "special": special}


def _from_fields(fields: Fields) -> Examples:
    """The sentences of `_to_fields`."""
    models = fields["models"]
    return Examples(CompiledModule(models[0].network).eval(), models, fields["tokens"], fields["special"])


STORED_TYPES = {
    "models": tuple[GroundModel, ...],
    "tokens": tuple[Mapping[str, Sequence[str]], ...],
    "special": tuple[Mapping[str, Sequence[int]], ...],
}
register_codec(Examples, _to_fields, lambda fields, trust: _from_fields(fields), STORED_TYPES)


# --------------------------------------------------------------------------------------------------------------------
# Latent choices that are ancestors of the patched nodes or of the outcomes.
#
# They have the same state in both runs of a sweep, and outcomes are averaged over their joint states.


@dataclass(frozen=True)
class EnumeratedChoices:
    """Latent choices that depend on no value (a selector, atoms), and all their joint states, `[state, node]`.

    Args:
        nodes: Ground ids of the choices.
        states: Their joint states, `[state, node]`.
        examples: The sentences, which give the probabilities of the states.
    """

    nodes: tuple[int, ...]
    states: Tensor
    examples: Examples = field(repr=False)

    @cached_property
    def log_probs(self) -> Tensor:
        """The log probability of each joint state in each example, `[state, example]`."""
        module, nodes = self.examples.module, self.nodes
        columns = [plan_joint(Query(module, model, nodes=nodes)).run() for model in self.examples.models]
        return torch.stack(columns, -1)

    def __iter__(self) -> Iterator[dict[int, Tensor]]:
        for row in self.states:
            yield dict(zip(self.nodes, row.unbind(), strict=True))

    def expand(self, examples: Examples) -> Examples:
        """The sentences in the first joint state, those in the second one, and so on."""
        count = len(self.states)
        models = tuple(model for states in self for model in examples.with_choices(states).models)
        return replace(examples, models=models, tokens=examples.tokens * count, special=examples.special * count)

    def marginalize(self, outcomes: Sequence[Tensor], *, is_discrete: bool) -> Tensor:
        """Average an outcome over the joint states.

        Args:
            outcomes: The outcome in each joint state, `[cell, example, *shape]` each.
            is_discrete: Whether outcomes are log probabilities; then the probabilities are averaged.

        Returns:
            The mean, or the log of the mean probabilities, `[cell, example, *shape]`.
        """
        if not self.nodes:
            return outcomes[0]
        stacked = torch.stack(list(outcomes))
        log_probs = self.log_probs.to(stacked.dtype).reshape(len(stacked), 1, -1, *[1] * (stacked.dim() - 3))
        return (stacked + log_probs).logsumexp(0) if is_discrete else (stacked * log_probs.exp()).sum(0)


def enumerate_choices(
    source: Examples | None,
    base: Examples,
    nodes: Sequence[int],
    outcome_nodes: Sequence[int],
    side_names: tuple[str, str] = ("clean", "corrupt"),
) -> EnumeratedChoices:
    """Find the latent choices of either run that depend on no value, and are therefore enumerated.

    Args:
        source: The examples that provide values; None for an ablation.
        base: The examples that are patched, with equal lengths.
        nodes: Ground ids of the nodes that cells set, or read.
        outcome_nodes: Ground ids of the nodes that the metric reads.
        side_names: The names of both sides in errors.

    Returns:
        The ancestral choices of these nodes, with all their joint states.

    Raises:
        BudgetError: There are more joint states than the budget.
        EvidenceError: A choice is set in one run only.
    """
    choices: set[int] = set()
    for examples in (base,) if source is None else (source, base):
        model = examples.model
        queried = [*nodes]
        for node in outcome_nodes:  # the outcome of a random node is a function of its parents
            is_random = locate_node(model, node)[0].tpm.is_random and node not in model.do
            queried += reference.parents(model, node) if is_random else [node]
        groups = {*np.unique(np.searchsorted(model.ground.offsets, queried, side="right") - 1).tolist()}
        has_discrete = any(model.network.specs[index].tpm.kind == "discrete" for index in groups)
        if not has_discrete and not has_ancestor_choices(model.network, groups):
            continue  # a fast test on groups, before the search over nodes
        choices |= {node for node in find_open_choices(model, queried, {}) if not _is_value_dependent(model, node)}
    open_choices = sorted(choices)
    model = base.model
    for node in choices.intersection(outcome_nodes):
        name = model.ground.name(node)
        expected = "a node that depends on the patched nodes"
        raise BNetError(f"metric of {name}", expected=expected, actual="a choice with the same state in both runs")
    count = math.prod(model.count_states(node) for node in open_choices)
    if count > BUDGET:
        raise BudgetError(
            "sweep",
            expected=f"at most {BUDGET:,} joint states of the latent choices",
            actual=format_count(count),
            hint="Set some of them by do: " + ", ".join(map(model.ground.name, open_choices[:6])),
        )
    for node in open_choices:
        if node in model.do:
            name = model.ground.name(node)
            hint = f"Set it also in the {side_names[0]} sentences by do({name}=...)"
            raise EvidenceError(f"{name} is set in the {side_names[1]} sentences only", hint=hint)
    states = enumerate_joint_states([range(model.count_states(node)) for node in open_choices])
    return EnumeratedChoices(tuple(open_choices), states, base)


def _is_value_dependent(model: GroundModel, node: int) -> bool:
    """True if the distribution of a choice depends on values, not only on other choices."""
    ancestors = [model.spec(ancestor) for ancestor in evaluation_order(model, node, {}, {}) if ancestor != node]
    return any(m.tpm.kind == "input" or (m.tpm.kind != "discrete" and m.parents) for m in ancestors)


# --------------------------------------------------------------------------------------------------------------------
# The metric of the runs of a sweep: a number for each example, computed from the *outcomes* of some nodes.
#
# An outcome is the value of a deterministic node, the log probabilities of a discrete node, or the mean of a continuous
# node. A function with the parameter `examples` receives the indices of the examples of a call: without it, a function
# that refers to data of the examples is only right if one call has all of them.


METRIC_FORMS = (
    "a mapping {node: state} or {node: (state, state)} of a node or a role, or a function whose parameters are names "
    "of nodes or roles, and 'examples' for the indices of the examples"
)
FUNCTION_OF = "function of"
EXAMPLES = "examples"  # the parameter of a function that receives the indices of the examples


@dataclass(frozen=True)
class Metric:
    """A function from the outcomes of some ground nodes to a number for each example.

    Args:
        nodes: Ground ids of the nodes.
        function: A function of the outcomes of the nodes, `[example, *shape]` each, or `[cell, example, *shape]`.
        is_batched: Whether the function takes all cells at once.
    """

    nodes: tuple[int, ...]
    function: Callable[[Mapping[int, Tensor]], object]
    is_batched: bool = False

    def __call__(self, outcomes: Mapping[int, Tensor]) -> Tensor:
        """Map the outcomes, `[cell, example, *shape]` of each node, to numbers, `[cell, example]`."""
        shape = next(iter(outcomes.values())).shape[:2]
        if self.is_batched:
            return self._evaluate(outcomes, shape)
        cells = ({node: value[k] for node, value in outcomes.items()} for k in range(shape[0]))
        return torch.stack([self._evaluate(values, shape[1:]) for values in cells])

    def evaluate_with_grad(self, outcomes: Mapping[int, Tensor]) -> Tensor:
        """The metric of one run, with a gradient: from `[1, example, *shape]` of each node to `[example]`."""
        values = self.function(outcomes if self.is_batched else {node: value[0] for node, value in outcomes.items()})
        return torch.as_tensor(values).reshape(-1)

    def _evaluate(self, outcomes: Mapping[int, Tensor], shape: tuple[int, ...]) -> Tensor:
        """Call the function, wrap its errors, and check that it returns numbers of this shape."""
        try:
            number = torch.as_tensor(self.function(outcomes))
        except BNetError:
            raise
        except Exception as error:
            actual = f"{type(error).__name__}: {error}"
            expected = "a function that returns a number for each example"
            raise BNetError("metric", expected=expected, actual=actual) from error
        if number.shape != shape:
            actual = f"shape {tuple(number.shape)}"
            hint = "The function receives nodes as [example, *shape]: index the shape, as in y_5[:, 3]"
            expected = f"numbers of shape {tuple(shape)}, one for each example"
            raise BNetError("metric", expected=expected, actual=actual, hint=hint)
        number = number.detach().to("cpu", torch.float64)
        if bool(number.isnan().any()):
            raise BNetError("metric", expected="numbers", actual="NaN")
        return number


def parse_metric(examples: Examples, metric: object) -> Metric:
    """Parse a metric: a mapping from a node to its states, or a function of nodes; a parsed one is unchanged."""
    if isinstance(metric, Metric):
        return metric
    if isinstance(metric, Mapping):
        return _parse_metric_mapping(examples, metric)
    if callable(metric):
        return _parse_metric_function(examples, metric)
    raise BNetError("metric", expected=METRIC_FORMS, actual=metric)


def describe_metric(metric: object) -> str:
    """The node and the states of a metric, such as `log P(y_4 = cat) - log P(y_4 = dog)`.

    Args:
        metric: The metric, as the user passed it; of a loaded result, the place of a function.

    Returns:
        The metric in words: of a function the names of its parameters.

    >>> describe_metric({"y_4": ("cat", "dog")}), describe_metric(lambda x_1_2: x_1_2[:, 0])
    ('log P(y_4 = cat) - log P(y_4 = dog)', 'function of x_1_2')
    """
    if not isinstance(metric, Mapping):
        return f"{FUNCTION_OF} {', '.join(get_parameter_names(metric))}"
    ((name, value),) = metric.items()
    return " - ".join(f"log P({name} = {_describe_states(side)})" for side in _list_sides(value))


def explain_unchecked_metric(description: str) -> tuple[str, ...]:
    """The note that two functions with the same parameters can differ; empty for other metrics."""
    if not description.startswith(FUNCTION_OF):
        return ()
    return (f"the metric is a {description}: it cannot be checked that both results have the same function",)


def _describe_states(states: object) -> str:
    """The state of all examples, or the fact that each example has its state."""
    if _is_state_list(states):
        return "states of each example"
    return str(states.item() if isinstance(states, Tensor | np.generic | np.ndarray) else states)


def has_example_data(metric: object) -> bool:
    """Whether a metric refers to data of each example: by a list of states, or by the parameter `examples`."""
    if not isinstance(metric, Mapping):
        return EXAMPLES in get_parameter_names(metric)
    return any(_is_state_list(side) for value in metric.values() for side in _list_sides(value))


def _list_sides(value: object) -> tuple[object, ...]:
    """The states of a metric, of which a tuple has two."""
    return value if isinstance(value, tuple) else (value,)


def _is_state_list(value: object) -> bool:
    """True for a list of states, one for each example."""
    is_array = isinstance(value, Tensor | np.ndarray)
    return value.ndim == 1 if is_array else isinstance(value, Sequence) and not isinstance(value, str)  # type: ignore[attr-defined]


def split_metric(
    model: GroundModel, metric: object, examples: Sequence[Sequence[int]], *, has_words: bool
) -> list[object]:
    """The metric of each part of the examples, with the states or the indices of these examples.

    Args:
        model: The first sentence.
        metric: The metric; in a mapping, a list of states has one for each example.
        examples: The numbers of the examples of each part.
        has_words: Whether the metric may name a word by its index from the start.
    """
    for name in _get_node_names(metric) if not has_words else ():
        matches = model.ground.template.match_groups(name, {})
        has_number = any(group.word_stack is not None and index[-1] is not None for group, index in matches)
        if has_number and (split_pattern(str(name))[1][-1] or 0) >= 0:
            stem = str(name).rpartition("_")[0]
            expected = "nodes without a word, because the sentences differ in length"
            hint = f'Use the role {stem!r}, or the last word, metric={{"{stem}_-1": ...}}'
            raise BNetError(f"metric of {name}", expected=expected, hint=hint)
    if not isinstance(metric, Mapping):
        if not callable(metric):
            return [metric] * len(examples)  # `parse_metric` raises the error
        if not has_example_data(metric):
            expected = "a function with a parameter 'examples', because the sentences differ in length"
            hint = "It receives the indices of the examples of a call, for data of examples: labels[examples]"
            raise BNetError("metric", expected=expected, actual="a function that is called for each length", hint=hint)
        return [functools.partial(metric, **{EXAMPLES: torch.tensor(numbers)}) for numbers in examples]
    count = sum(map(len, examples))

    def select(value: object, numbers: Sequence[int]) -> object:
        if isinstance(value, tuple):
            return tuple(select(item, numbers) for item in value)
        return [value[k] for k in numbers] if _is_state_list(value) else value  # type: ignore[index]

    for name, value in metric.items():
        for side in _list_sides(value):
            _check_state_count(name, side, count)
    return [{name: select(value, numbers) for name, value in metric.items()} for numbers in examples]


def _check_state_count(name: object, states: object, count: int) -> None:
    """Raise an error for a list of states with another number of states than examples."""
    if _is_state_list(states) and len(states) != count:  # type: ignore[arg-type]
        expected = f"a state, or a list of {count}, one for each example"
        raise BNetError(f"metric of {name}", expected=expected, actual=f"{len(states)} states")  # type: ignore[arg-type]


def _get_node_names(metric: object) -> list[str]:
    """The names of the nodes of a metric, as the user passed it."""
    return [
        name for name in (metric if isinstance(metric, Mapping) else get_parameter_names(metric)) if name != EXAMPLES
    ]


def _parse_metric_function(examples: Examples, function: Callable[..., object]) -> Metric:
    """The metric of a function whose parameters are names of nodes, and `examples`."""
    try:
        parameters = inspect.signature(function).parameters.values()
    except (TypeError, ValueError) as error:
        raise BNetError("metric", expected=METRIC_FORMS, actual=function) from error
    names = _get_node_names(function)
    if not names or any(p.kind == inspect.Parameter.POSITIONAL_ONLY for p in parameters):
        raise BNetError("metric", expected=METRIC_FORMS, actual="a function without parameters that name nodes")
    nodes = {name: find_family(examples.model.ground, name).array for name in names}
    indices = {EXAMPLES: torch.arange(len(examples))} if has_example_data(function) else {}

    def call_by_name(outcomes: Mapping[int, Tensor]) -> object:
        return function(**{name: _stack_nodes(outcomes, ids) for name, ids in nodes.items()}, **indices)

    return Metric(tuple(dict.fromkeys(node for ids in nodes.values() for node in ids.ravel().tolist())), call_by_name)


def _stack_nodes(outcomes: Mapping[int, Tensor], nodes: IntArray) -> Tensor:
    """The outcomes of one node, `[example, *shape]`, or of a family of nodes, `[example, *axes, *shape]`."""
    stacked = torch.stack([outcomes[node] for node in nodes.ravel().tolist()], 1)
    return stacked.reshape(len(stacked), *nodes.shape, *stacked.shape[2:])


def _parse_metric_mapping(examples: Examples, mapping: Mapping[Any, Any]) -> Metric:
    """The metric `log P(node = state)` or the difference of two; of a role, the mean over its nodes."""
    if len(mapping) != 1:
        hint = "For several nodes pass a function with their names as parameters"
        raise BNetError("metric", expected="one node and its state", actual=f"{len(mapping)} nodes", hint=hint)
    ((name, value),) = mapping.items()
    model = examples.model
    nodes = find_family(model.ground, name).nodes
    for node in nodes:
        check_discrete_node(model, node)
    is_pair = isinstance(value, tuple)
    if is_pair and len(value) != 2:
        raise BNetError(
            f"metric of {name}", expected="a state, or a tuple of two states", actual=f"{len(value)} states"
        )
    sides = [{node: _parse_states(examples, node, item) for node in nodes} for item in _list_sides(value)]
    if is_pair and all(torch.equal(sides[0][node], sides[1][node]) for node in nodes):
        hint = "The difference of a state and itself is 0 in every run"
        raise BNetError(f"metric of {name}", expected="two different states", actual=value, hint=hint)

    def gather_log_probs(outcomes: Mapping[int, Tensor]) -> Tensor:
        def gather(node: int, states: Tensor) -> Tensor:
            logs = outcomes[node]
            return logs.gather(-1, states.to(logs.device).expand(logs.shape[:-1])[..., None])[..., 0]

        first, *second = (torch.stack([gather(*item) for item in side.items()]).mean(0) for side in sides)
        return first - second[0] if is_pair else first

    return Metric(tuple(nodes), gather_log_probs, is_batched=True)


def _parse_states(examples: Examples, node: int, value: object) -> Tensor:
    """Encode the state for each example, `[example]`, from one state for all or a list with one for each."""
    name = examples.model.ground.name(node)
    _check_state_count(name, value, len(examples))
    if isinstance(value, Tensor | np.ndarray | np.generic):
        value = value.tolist()  # a single state if it has no dims
    items = list(value) if _is_state_list(value) else [value] * len(examples)  # type: ignore[call-overload]
    states = []
    for model, state in zip(examples.models, items, strict=True):
        states.append(encode_value(model, node, state, evidence=True))
        if states[-1].is_floating_point() or states[-1].dim():
            raise EvidenceError(f"metric of {name}", expected="a state", actual=state)
    return torch.stack(states)
