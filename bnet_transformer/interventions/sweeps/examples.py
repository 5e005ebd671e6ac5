"""Examples, sentences of one net and of one length that are computed as one batch, and the metric of their runs.

Choices above what a sweep sets and asks are the same in both runs; the outcomes are averaged over their joint states.
The metric is a number for each example, from what some nodes came to (their *outcomes*): the value of a deterministic
node, the log probabilities of a discrete one, the mean of a continuous one.
"""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable, Collection, Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from bnet_transformer import reference
from bnet_transformer.compiler.execution_state import ExecutionRequest, ExecutionState
from bnet_transformer.compiler.module import CompiledModule
from bnet_transformer.data.encode import encode_value
from bnet_transformer.errors import BNetError, BudgetError, EvidenceError, UnsupportedError
from bnet_transformer.inference.joint_posterior import joint_log_probs
from bnet_transformer.inference.query import Query, build_length_inputs, enumerate_joint_states, group_interventions
from bnet_transformer.inference.sentence_state import SentenceState
from bnet_transformer.reference import BUDGET, GroundModel, evaluation_order, find_open_choices, locate_node
from bnet_transformer.reference.node_tables import check_discrete_node, has_ancestor_choices

DEFAULT_MEMORY = 2**29  # bytes that are used at once, unless a user says otherwise


def get_sentence_state(sentence: object) -> SentenceState | None:
    """The state of a sentence, None of what is no sentence."""
    state = getattr(sentence, "state", None)
    return state if isinstance(state, SentenceState) else None


@dataclass(frozen=True)
class Examples:
    """Sentences of one net, all of as many words, with as much set in each: what one batch can hold.

    `model` is the first sentence: its names, its arrows and its words are those of all.
    """

    module: CompiledModule
    models: tuple[GroundModel, ...]
    tokens: tuple[Mapping[str, Sequence[str]], ...]

    @property
    def model(self) -> GroundModel:
        """The first sentence."""
        return self.models[0]

    def __len__(self) -> int:
        return len(self.models)

    def with_choices(self, states: Mapping[int, Tensor]) -> Examples:
        """The same sentences with choices set that are open in them."""
        if not states:
            return self
        open_ = {node: state for node, state in states.items() if node not in self.model.do}
        return replace(self, models=tuple(world.surgery(open_) for world in self.models))

    def split(self, size: int) -> Iterator[Examples]:
        """The sentences in order, so many at a time."""
        for start in range(0, len(self), size):
            some = slice(start, start + size)
            yield replace(self, models=self.models[some], tokens=self.tokens[some])

    def run(
        self,
        groups: Collection[int],
        record_attention: Collection[int] = (),
        perturbations: Mapping[int, Tensor] | None = None,
    ) -> ExecutionState:
        """Run all sentences at once. No family may need a choice that is open (`routing` finds those).

        Args:
            groups: The families whose values are kept, `[1 or N, *plates, word, *shape]`.
            record_attention: The families whose attention `P(j | i)` is kept.
            perturbations: Zeros that are added to the values of some families, so that they have a gradient.
        """
        graph = self.model.network.graph
        want = tuple(graph.groups[index].name for index in sorted(groups))
        above = {*groups, *record_attention, *graph.ancestors([*groups, *record_attention])}
        done = [group_interventions(world, above) for world in self.models]
        whole = {name: torch.cat([each["do"][name] for each in done]) for name in done[0]["do"]}
        request = ExecutionRequest(
            want,
            build_length_inputs(self.model),
            do=whole,
            patched=_stack_sentences([each["patched"] for each in done]),
            attention_rows=_stack_sentences([each["attention_rows"] for each in done]),
            given={name: torch.stack([world.inputs[name] for world in self.models]) for name in self.model.inputs},
            record_attention=frozenset(record_attention),
            perturbations=perturbations,
            training=False,
        )
        with torch.set_grad_enabled(bool(perturbations)):
            course, plan = self.module.run(request)
        if plan.enumerated:
            name = graph.groups[plan.enumerated[0]].name
            raise UnsupportedError(name, expected="a choice that no value decides", actual="one that values decide")
        return course


def _stack_sentences(by_sentence: Sequence[Mapping[str, tuple[Tensor, Tensor]]]) -> dict[str, tuple[Tensor, Tensor]]:
    """What is told of families, sentence by sentence, as one batch."""
    pairs = {name: [told[name] for told in by_sentence] for name in by_sentence[0]}
    return {name: (torch.cat([v for v, _ in told]), torch.cat([w for _, w in told])) for name, told in pairs.items()}


def get_batch_key(model: GroundModel) -> Hashable:
    """What the sentences of one batch have in common: their words, and what is set and given in which shape."""
    values = [*model.do.items(), *model.inputs.items()]
    shapes = frozenset((key, value.shape, value.dtype) for key, value in values)
    return tuple(model.ground.word_counts.items()), frozenset(model.attention_rows), shapes


def parse_examples(subject: str, sentences: object) -> Examples:
    """The examples of one sentence or of several, checked."""
    several: list[Any] = list(sentences) if isinstance(sentences, list | tuple) else [sentences]
    states = [state for each in several if (state := get_sentence_state(each)) is not None]
    if not states or len(states) < len(several):
        got = next((each for each in several if get_sentence_state(each) is None), "none")
        raise BNetError(subject, expected="a Sentence, or a list of them", actual=got)
    first = states[0]
    for k, each in enumerate(states):
        name = f"{subject}[{k}]" if isinstance(sentences, list | tuple) else subject
        if each.model.network is not first.model.network:
            raise BNetError(name, expected="a sentence of the same net as the first", actual="one of another net")
        if each.model.ground.word_counts != first.model.ground.word_counts:
            wanted = f"a sentence of {_format_word_counts(first.model)}, as {subject}[0]"
            raise BNetError(name, expected=wanted, actual=f"one of {_format_word_counts(each.model)}")
        if each.evidence:
            seen = ", ".join(each.model.ground.name(node) for node in each.evidence)
            raise EvidenceError(name, expected="a sentence without evidence", actual=seen, allowed="do() sets a node")
        if get_batch_key(each.model) != get_batch_key(first.model):
            wanted, allowed = (
                f"the same nodes set as in {subject}[0]",
                "do() on the same nodes in each, or a run of each",
            )
            raise BNetError(name, expected=wanted, actual="others", allowed=allowed)
    return Examples(first.module, tuple(s.model for s in states), tuple(s.tokens for s in states))


def parse_example_pair(clean: object, corrupt: object) -> tuple[Examples, Examples]:
    """The clean and the corrupt sentences: as many of both, of one net and one length."""
    theirs, ours = parse_examples("clean", clean), parse_examples("corrupt", corrupt)
    if len(theirs) != len(ours):
        raise BNetError("corrupt", expected=f"as many sentences as clean, {len(theirs)}", actual=len(ours))
    one, other = theirs.model, ours.model
    if one.network is not other.network:
        raise BNetError("corrupt", expected="sentences of the same net as clean", actual="sentences of another net")
    if one.ground.word_counts != other.ground.word_counts:
        raise BNetError(
            "corrupt",
            expected=f"sentences of {_format_word_counts(one)}, as clean",
            actual=f"of {_format_word_counts(other)}",
        )
    return theirs, ours


def _format_word_counts(model: GroundModel) -> str:
    return " and ".join(
        f"{count} words" + (f" ({stack})" if stack else "") for stack, count in model.ground.word_counts.items()
    )


@dataclass(frozen=True)
class EnumeratedChoices:
    """Choices that no value decides (a selector, atoms) and every joint state of them, `[state, node]`."""

    nodes: tuple[int, ...]
    states: Tensor
    examples: Examples = field(repr=False)

    @cached_property
    def log_probs(self) -> Tensor:
        """The log probability of each joint state in each example, `[state, example]`."""
        module, nodes = self.examples.module, self.nodes
        each = [joint_log_probs(Query(module, world, nodes=nodes)).reshape(-1) for world in self.examples.models]
        return torch.stack(each, -1)

    def __iter__(self) -> Iterator[dict[int, Tensor]]:
        for row in self.states:
            yield dict(zip(self.nodes, row.unbind(), strict=True))

    def marginalize(self, outcomes: Sequence[Tensor], *, is_discrete: bool) -> Tensor:
        """An outcome over all states, `[cell, example, *shape]` in each: its mean, or the log of the mean of `P`."""
        if not self.nodes:
            return outcomes[0]
        each = torch.stack(list(outcomes))
        logs = self.log_probs.to(each.dtype).reshape(len(each), 1, -1, *[1] * (each.dim() - 3))
        return (each + logs).logsumexp(0) if is_discrete else (each * logs.exp()).sum(0)


def enumerate_choices(
    clean: Examples | None, corrupt: Examples, nodes: Sequence[int], outcome_nodes: Sequence[int]
) -> EnumeratedChoices:
    """The choices above some nodes in either run that no value decides."""
    found: set[int] = set()
    for examples in (corrupt,) if clean is None else (clean, corrupt):
        world = examples.model
        asked = [*nodes]
        for node in outcome_nodes:  # what decides it: the parents of a random node, or the node itself
            random = locate_node(world, node)[0].tpm.is_random and node not in world.do
            asked += reference.parents(world, node) if random else [node]
        families = {world.ground.group_of(node).index for node in asked}
        discrete = any(world.network.specs[index].tpm.kind == "discrete" for index in families)
        if not discrete and not has_ancestor_choices(
            world.network, families
        ):  # cheaper to tell than which nodes are open
            continue
        found |= {node for node in find_open_choices(world, asked, {}) if not _is_value_dependent(world, node)}
    free = sorted(found)
    world = corrupt.model
    for node in found.intersection(outcome_nodes):
        wanted, name = "a node that hangs on what is swept", world.ground.name(node)
        raise BNetError(f"metric of {name}", expected=wanted, actual="a choice that is the same in both runs")
    count = math.prod(world.count_states(node) for node in free)
    if count > BUDGET:
        raise BudgetError(
            "sweep",
            expected=f"at most {BUDGET} joint states of the open choices",
            actual=f"{count}",
            allowed="do() on them: " + ", ".join(map(world.ground.name, free[:6])),
        )
    for node in free:
        if node in world.do:
            allowed = f"do({world.ground.name(node)}=...) in the clean sentences"
            raise EvidenceError(
                world.ground.name(node),
                expected="a choice open in both",
                actual="one set in corrupt alone",
                allowed=allowed,
            )
    states = enumerate_joint_states([range(world.count_states(node)) for node in free])
    return EnumeratedChoices(tuple(free), states, corrupt)


def _is_value_dependent(model: GroundModel, node: int) -> bool:
    """True where values decide the distribution of a choice, and not other choices alone."""
    above = [model.spec(each) for each in evaluation_order(model, node, {}, {}) if each != node]
    return any(m.tpm.kind == "input" or (m.tpm.kind != "discrete" and m.parents) for m in above)


METRIC_FORMS = "a mapping {node: state or (state, other state)}, or a function whose parameters are names of nodes"


@dataclass(frozen=True)
class Metric:
    """The ground nodes that a metric looks at, and the function from their outcomes to a number for each example."""

    nodes: tuple[int, ...]
    function: Callable[[Mapping[int, Tensor]], object]
    is_batched: bool = False  # whether it takes all cells at once

    def __call__(self, outcomes: Mapping[int, Tensor]) -> Tensor:
        """From `[cell, example, *shape]` of each node to `[cell, example]`."""
        shape = next(iter(outcomes.values())).shape[:2]
        if self.is_batched:
            return self._evaluate(outcomes, shape)
        each = ({node: value[k] for node, value in outcomes.items()} for k in range(shape[0]))
        return torch.stack([self._evaluate(values, shape[1:]) for values in each])

    def evaluate_with_grad(self, outcomes: Mapping[int, Tensor]) -> Tensor:
        """Of one run, with its gradient: from `[1, example, *shape]` of each node to `[example]`."""
        found = self.function(outcomes if self.is_batched else {node: value[0] for node, value in outcomes.items()})
        return torch.as_tensor(found).reshape(-1)

    def _evaluate(self, outcomes: Mapping[int, Tensor], shape: tuple[int, ...]) -> Tensor:
        """What the function gives, as numbers of that shape; an error of its own as one of the metric."""
        try:
            number = torch.as_tensor(self.function(outcomes))
        except BNetError:
            raise
        except Exception as error:
            got = f"{type(error).__name__}: {error}"
            raise BNetError(
                "metric", expected="a function that returns a number for each example", actual=got
            ) from error
        if number.shape != shape:
            got = f"shape {tuple(number.shape)}"
            hint = "the nodes come as [example, *shape]: index the shape, as in y_5[:, 3]"
            wanted = f"shape {tuple(shape)}, a number for each example"
            raise BNetError("metric", expected=wanted, actual=got, allowed=hint)
        number = number.detach().to(torch.float64)
        if bool(number.isnan().any()):
            raise BNetError("metric", expected="numbers", actual="NaN")
        return number


def parse_metric(examples: Examples, metric: object) -> Metric:
    """A metric from what a person says: a node and its states, or a function of nodes."""
    if isinstance(metric, Mapping):
        return _parse_metric_mapping(examples, metric)
    if callable(metric):
        return _parse_metric_function(examples.model, metric)
    raise BNetError("metric", expected=METRIC_FORMS, actual=metric)


def _parse_metric_function(model: GroundModel, function: Callable[..., object]) -> Metric:
    try:
        parameters = inspect.signature(function).parameters.values()
    except (TypeError, ValueError) as error:
        raise BNetError("metric", expected=METRIC_FORMS, actual=function) from error
    plain = (inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY)
    names = [p.name for p in parameters if p.kind in plain and p.default is inspect.Parameter.empty]
    if not names or any(p.kind == inspect.Parameter.POSITIONAL_ONLY for p in parameters):
        raise BNetError("metric", expected=METRIC_FORMS, actual="a function without such parameters")
    nodes = {model.ground.id(name): name for name in names}

    def of(outcomes: Mapping[int, Tensor]) -> object:
        return function(**{name: outcomes[node] for node, name in nodes.items()})

    return Metric(tuple(nodes), of)


def _parse_metric_mapping(examples: Examples, mapping: Mapping[Any, Any]) -> Metric:
    """`log P(node = state)`, or the difference of two."""
    if len(mapping) != 1:
        allowed = "a function of several nodes: lambda y_0, y_1: ..."
        raise BNetError("metric", expected="one node and its state", actual=f"{len(mapping)} nodes", allowed=allowed)
    ((name, wanted),) = mapping.items()
    world = examples.model
    node = world.ground.id(name)
    check_discrete_node(world, node)
    two = isinstance(wanted, tuple)
    if two and len(wanted) != 2:
        raise BNetError(f"metric of {name}", expected="a state, or a tuple of two", actual=f"{len(wanted)} of them")
    states = [_parse_states(examples, node, each) for each in (wanted if two else (wanted,))]

    def of(outcomes: Mapping[int, Tensor]) -> Tensor:
        logs = outcomes[node]
        found = [logs.gather(-1, state.to(logs.device).expand(logs.shape[:-1])[..., None])[..., 0] for state in states]
        return found[0] - found[1] if two else found[0]

    return Metric((node,), of, is_batched=True)


def _parse_states(examples: Examples, node: int, value: object) -> Tensor:
    """The state for each example: one for all, or a list of as many."""
    if isinstance(value, Tensor) and value.dim() == 1:
        value = value.tolist()
    several = isinstance(value, Sequence) and not isinstance(value, str)
    each = list(value) if several else [value] * len(examples)  # type: ignore[call-overload]
    name = examples.model.ground.name(node)
    if len(each) != len(examples):
        wanted_count = f"a state, or a list of {len(examples)}, one for each example"
        raise BNetError(f"metric of {name}", expected=wanted_count, actual=f"{len(each)} states")
    states = []
    for world, state in zip(examples.models, each, strict=True):
        states.append(encode_value(world, node, state, evidence=True))
        if states[-1].is_floating_point() or states[-1].dim():
            raise EvidenceError(f"metric of {name}", expected="a state", actual=state)
    return torch.stack(states)
