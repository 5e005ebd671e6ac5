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
from bnet_transformer.compiler.course import ExecutionRequest, ExecutionState
from bnet_transformer.compiler.module import CompiledModule
from bnet_transformer.data.encode import encode_value
from bnet_transformer.errors import BNetError, BudgetError, EvidenceError, UnsupportedError
from bnet_transformer.inference.joint_posterior import joint_log_probs
from bnet_transformer.inference.query import Query, build_length_inputs, enumerate_joint_states, group_interventions
from bnet_transformer.inference.sentence_state import SentenceState
from bnet_transformer.reference import BUDGET, GroundModel, evaluation_order, find_open_choices, locate_node
from bnet_transformer.reference.asking import check_discrete_node, has_ancestor_choices

MEMORY = 2**29  # bytes that are used at once, unless a user says otherwise


def state_of(sentence: object) -> SentenceState | None:
    """The state of a sentence, None of what is no sentence."""
    state = getattr(sentence, "state", None)
    return state if isinstance(state, SentenceState) else None


@dataclass(frozen=True)
class Examples:
    """Sentences of one net, all of as many words, with as much set in each: what one batch can hold.

    `world` is the first sentence: its names, its arrows and its words are those of all.
    """

    module: CompiledModule
    worlds: tuple[GroundModel, ...]
    tokens: tuple[Mapping[str, Sequence[str]], ...]

    @property
    def world(self) -> GroundModel:
        """The first sentence."""
        return self.worlds[0]

    def __len__(self) -> int:
        return len(self.worlds)

    def set_to(self, states: Mapping[int, Tensor]) -> Examples:
        """The same sentences with choices set that are open in them."""
        if not states:
            return self
        open_ = {node: state for node, state in states.items() if node not in self.world.do}
        return replace(self, worlds=tuple(world.surgery(open_) for world in self.worlds))

    def parts(self, size: int) -> Iterator[Examples]:
        """The sentences in order, so many at a time."""
        for start in range(0, len(self), size):
            some = slice(start, start + size)
            yield replace(self, worlds=self.worlds[some], tokens=self.tokens[some])

    def course(
        self, families: Collection[int], readings: Collection[int] = (), nudges: Mapping[int, Tensor] | None = None
    ) -> ExecutionState:
        """Run all sentences at once. No family may need a choice that is open (`routing` finds those).

        Args:
            families: The families whose values are kept, `[1 or N, *plates, word, *shape]`.
            readings: The families whose attention `P(j | i)` is kept.
            nudges: Zeros that are added to the values of some families, so that they have a gradient.
        """
        graph = self.world.network.graph
        want = tuple(graph.groups[index].name for index in sorted(families))
        above = {*families, *readings, *graph.ancestors([*families, *readings])}
        done = [group_interventions(world, above) for world in self.worlds]
        whole = {name: torch.cat([each["do"][name] for each in done]) for name in done[0]["do"]}
        request = ExecutionRequest(
            want,
            build_length_inputs(self.world),
            do=whole,
            patched=_stacked([each["patched"] for each in done]),
            attention_rows=_stacked([each["rows"] for each in done]),
            given={name: torch.stack([world.inputs[name] for world in self.worlds]) for name in self.world.inputs},
            record_attention=frozenset(readings),
            perturbations=nudges,
            training=False,
        )
        with torch.set_grad_enabled(bool(nudges)):
            course, plan = self.module.run(request)
        if plan.enumerated:
            name = graph.groups[plan.enumerated[0]].name
            raise UnsupportedError(name, expected="a choice that no value decides", actual="one that values decide")
        return course


def _stacked(each: Sequence[Mapping[str, tuple[Tensor, Tensor]]]) -> dict[str, tuple[Tensor, Tensor]]:
    """What is told of families, sentence by sentence, as one batch."""
    pairs = {name: [told[name] for told in each] for name in each[0]}
    return {name: (torch.cat([v for v, _ in told]), torch.cat([w for _, w in told])) for name, told in pairs.items()}


def form_of(world: GroundModel) -> Hashable:
    """What the sentences of one batch have in common: their words, and what is set and given in which shape."""
    values = [*world.do.items(), *world.inputs.items()]
    shapes = frozenset((key, value.shape, value.dtype) for key, value in values)
    return tuple(world.ground.word_counts.items()), frozenset(world.attention_rows), shapes


def examples_of(what: str, sentences: object) -> Examples:
    """The examples of one sentence or of several, checked."""
    several: list[Any] = list(sentences) if isinstance(sentences, list | tuple) else [sentences]
    states = [state for each in several if (state := state_of(each)) is not None]
    if not states or len(states) < len(several):
        got = next((each for each in several if state_of(each) is None), "none")
        raise BNetError(what, expected="a Sentence, or a list of them", actual=got)
    first = states[0]
    for k, each in enumerate(states):
        name = f"{what}[{k}]" if isinstance(sentences, list | tuple) else what
        if each.model.network is not first.model.network:
            raise BNetError(name, expected="a sentence of the same net as the first", actual="one of another net")
        if each.model.ground.word_counts != first.model.ground.word_counts:
            wanted = f"a sentence of {_words(first.model)}, as {what}[0]"
            raise BNetError(name, expected=wanted, actual=f"one of {_words(each.model)}")
        if each.evidence:
            seen = ", ".join(each.model.ground.name(node) for node in each.evidence)
            raise EvidenceError(name, expected="a sentence without evidence", actual=seen, allowed="do() sets a node")
        if form_of(each.model) != form_of(first.model):
            wanted, allowed = f"the same nodes set as in {what}[0]", "do() on the same nodes in each, or a run of each"
            raise BNetError(name, expected=wanted, actual="others", allowed=allowed)
    return Examples(first.module, tuple(s.model for s in states), tuple(s.tokens for s in states))


def pair(clean: object, corrupt: object) -> tuple[Examples, Examples]:
    """The clean and the corrupt sentences: as many of both, of one net and one length."""
    theirs, ours = examples_of("clean", clean), examples_of("corrupt", corrupt)
    if len(theirs) != len(ours):
        raise BNetError("corrupt", expected=f"as many sentences as clean, {len(theirs)}", actual=len(ours))
    one, other = theirs.world, ours.world
    if one.network is not other.network:
        raise BNetError("corrupt", expected="sentences of the same net as clean", actual="sentences of another net")
    if one.ground.word_counts != other.ground.word_counts:
        raise BNetError("corrupt", expected=f"sentences of {_words(one)}, as clean", actual=f"of {_words(other)}")
    return theirs, ours


def _words(world: GroundModel) -> str:
    return " and ".join(
        f"{count} words" + (f" ({stack})" if stack else "") for stack, count in world.ground.word_counts.items()
    )


@dataclass(frozen=True)
class Choices:
    """Choices that no value decides (a selector, atoms) and every joint state of them, `[state, node]`."""

    nodes: tuple[int, ...]
    states: Tensor
    examples: Examples = field(repr=False)

    @cached_property
    def log_probs(self) -> Tensor:
        """The log probability of each joint state in each example, `[state, example]`."""
        module, nodes = self.examples.module, self.nodes
        each = [joint_log_probs(Query(module, world, nodes=nodes)).reshape(-1) for world in self.examples.worlds]
        return torch.stack(each, -1)

    def __iter__(self) -> Iterator[dict[int, Tensor]]:
        for row in self.states:
            yield dict(zip(self.nodes, row.unbind(), strict=True))

    def averaged(self, found: Sequence[Tensor], *, discrete: bool) -> Tensor:
        """An outcome over all states, `[cell, example, *shape]` in each: its mean, or the log of the mean of `P`."""
        if not self.nodes:
            return found[0]
        each = torch.stack(list(found))
        logs = self.log_probs.to(each.dtype).reshape(len(each), 1, -1, *[1] * (each.dim() - 3))
        return (each + logs).logsumexp(0) if discrete else (each * logs.exp()).sum(0)


def choices_of(clean: Examples | None, corrupt: Examples, nodes: Sequence[int], outcomes: Sequence[int]) -> Choices:
    """The choices above some nodes in either run that no value decides."""
    found: set[int] = set()
    for examples in (corrupt,) if clean is None else (clean, corrupt):
        world = examples.world
        asked = [*nodes]
        for node in outcomes:  # what decides it: the parents of a random node, or the node itself
            random = locate_node(world, node)[0].tpm.is_random and node not in world.do
            asked += reference.parents(world, node) if random else [node]
        families = {world.ground.group_of(node).index for node in asked}
        discrete = any(world.network.specs[index].tpm.kind == "discrete" for index in families)
        if not discrete and not has_ancestor_choices(
            world.network, families
        ):  # cheaper to tell than which nodes are open
            continue
        found |= {node for node in find_open_choices(world, asked, {}) if not _decided(world, node)}
    free = sorted(found)
    world = corrupt.world
    for node in found.intersection(outcomes):
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
    return Choices(tuple(free), states, corrupt)


def _decided(world: GroundModel, node: int) -> bool:
    """True where values decide the distribution of a choice, and not other choices alone."""
    above = [world.spec(each) for each in evaluation_order(world, node, {}, {}) if each != node]
    return any(m.tpm.kind == "input" or (m.tpm.kind != "discrete" and m.parents) for m in above)


FORMS = "a mapping {node: state or (state, other state)}, or a function whose parameters are names of nodes"


@dataclass(frozen=True)
class Metric:
    """The ground nodes that a metric looks at, and the function from their outcomes to a number for each example."""

    nodes: tuple[int, ...]
    function: Callable[[Mapping[int, Tensor]], object]
    many: bool = False  # whether it takes all cells at once

    def __call__(self, outcomes: Mapping[int, Tensor]) -> Tensor:
        """From `[cell, example, *shape]` of each node to `[cell, example]`."""
        shape = next(iter(outcomes.values())).shape[:2]
        if self.many:
            return self._checked(outcomes, shape)
        each = ({node: value[k] for node, value in outcomes.items()} for k in range(shape[0]))
        return torch.stack([self._checked(values, shape[1:]) for values in each])

    def number(self, outcomes: Mapping[int, Tensor]) -> Tensor:
        """Of one run, with its gradient: from `[1, example, *shape]` of each node to `[example]`."""
        found = self.function(outcomes if self.many else {node: value[0] for node, value in outcomes.items()})
        return torch.as_tensor(found).reshape(-1)

    def _checked(self, outcomes: Mapping[int, Tensor], shape: tuple[int, ...]) -> Tensor:
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


def metric_of(examples: Examples, metric: object) -> Metric:
    """A metric from what a person says: a node and its states, or a function of nodes."""
    if isinstance(metric, Mapping):
        return _of_states(examples, metric)
    if callable(metric):
        return _of_function(examples.world, metric)
    raise BNetError("metric", expected=FORMS, actual=metric)


def _of_function(world: GroundModel, function: Callable[..., object]) -> Metric:
    try:
        parameters = inspect.signature(function).parameters.values()
    except (TypeError, ValueError) as error:
        raise BNetError("metric", expected=FORMS, actual=function) from error
    plain = (inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY)
    names = [p.name for p in parameters if p.kind in plain and p.default is inspect.Parameter.empty]
    if not names or any(p.kind == inspect.Parameter.POSITIONAL_ONLY for p in parameters):
        raise BNetError("metric", expected=FORMS, actual="a function without such parameters")
    nodes = {world.ground.id(name): name for name in names}

    def of(outcomes: Mapping[int, Tensor]) -> object:
        return function(**{name: outcomes[node] for node, name in nodes.items()})

    return Metric(tuple(nodes), of)


def _of_states(examples: Examples, told: Mapping[Any, Any]) -> Metric:
    """`log P(node = state)`, or the difference of two."""
    if len(told) != 1:
        allowed = "a function of several nodes: lambda y_0, y_1: ..."
        raise BNetError("metric", expected="one node and its state", actual=f"{len(told)} nodes", allowed=allowed)
    ((name, wanted),) = told.items()
    world = examples.world
    node = world.ground.id(name)
    check_discrete_node(world, node)
    two = isinstance(wanted, tuple)
    if two and len(wanted) != 2:
        raise BNetError(f"metric of {name}", expected="a state, or a tuple of two", actual=f"{len(wanted)} of them")
    states = [_states(examples, node, each) for each in (wanted if two else (wanted,))]

    def of(outcomes: Mapping[int, Tensor]) -> Tensor:
        logs = outcomes[node]
        found = [logs.gather(-1, state.to(logs.device).expand(logs.shape[:-1])[..., None])[..., 0] for state in states]
        return found[0] - found[1] if two else found[0]

    return Metric((node,), of, many=True)


def _states(examples: Examples, node: int, wanted: object) -> Tensor:
    """The state for each example: one for all, or a list of as many."""
    if isinstance(wanted, Tensor) and wanted.dim() == 1:
        wanted = wanted.tolist()
    several = isinstance(wanted, Sequence) and not isinstance(wanted, str)
    each = list(wanted) if several else [wanted] * len(examples)  # type: ignore[call-overload]
    name = examples.world.ground.name(node)
    if len(each) != len(examples):
        wanted_count = f"a state, or a list of {len(examples)}, one for each example"
        raise BNetError(f"metric of {name}", expected=wanted_count, actual=f"{len(each)} states")
    states = []
    for world, state in zip(examples.worlds, each, strict=True):
        states.append(encode_value(world, node, state, evidence=True))
        if states[-1].is_floating_point() or states[-1].dim():
            raise EvidenceError(f"metric of {name}", expected="a state", actual=state)
    return torch.stack(states)
