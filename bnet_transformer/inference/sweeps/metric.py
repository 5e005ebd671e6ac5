"""The metric of a run: a number for each example, from what some nodes came to (their *outcomes*).

An outcome is the value of a deterministic node, the log probabilities of a discrete one, the mean of a continuous one.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from bnet_transformer.asking import must_be_discrete
from bnet_transformer.data.encode import encode_value
from bnet_transformer.errors import BNetError, EvidenceError
from bnet_transformer.inference.sweeps.examples import Examples
from bnet_transformer.reference import World

FORMS = "a mapping {node: state or (state, other state)}, or a function whose parameters are names of nodes"


@dataclass(frozen=True)
class Metric:
    """The ground nodes that a metric looks at, and the function from their outcomes to a number for each example."""

    nodes: tuple[int, ...]
    function: Callable[[Mapping[int, Tensor]], object]
    many: bool = False  # whether it takes all cells at once

    def __call__(self, outcomes: Mapping[int, Tensor]) -> Tensor:
        """From `[cell, example, *shape]` of each node to `[cell, example]`."""
        if self.many:
            return self._checked(self.function(outcomes), next(iter(outcomes.values())).shape[:2])
        cells = len(next(iter(outcomes.values())))
        each = ({node: value[k] for node, value in outcomes.items()} for k in range(cells))
        return torch.stack([self.of_one(values) for values in each])

    def number(self, outcomes: Mapping[int, Tensor]) -> Tensor:
        """Of one run, with its gradient: from `[1, example, *shape]` of each node to `[example]`."""
        found = self.function(outcomes if self.many else {node: value[0] for node, value in outcomes.items()})
        return torch.as_tensor(found).reshape(-1)

    def of_one(self, outcomes: Mapping[int, Tensor]) -> Tensor:
        """From `[example, *shape]` of each node to `[example]`."""
        shape = next(iter(outcomes.values())).shape[:1]
        try:
            found = self.function(outcomes)
        except BNetError:
            raise
        except Exception as error:
            got = f"{type(error).__name__}: {error}"
            raise BNetError("metric", expected="a function that returns a number for each example", got=got) from error
        return self._checked(found, shape)

    def _checked(self, found: object, shape: tuple[int, ...]) -> Tensor:
        """What a function gave, as numbers of that shape."""
        count = shape[-1]
        try:
            number = torch.as_tensor(found)
        except (TypeError, ValueError, RuntimeError) as error:
            raise BNetError("metric", expected=f"a number for each of {count} examples", got=found) from error
        if number.is_complex() or number.dtype == torch.bool:
            raise BNetError("metric", expected="real numbers", got=f"{number.dtype}")
        if tuple(number.shape) != tuple(shape):
            got = f"shape {tuple(number.shape)}"
            hint = "the nodes come as [example, *shape]: index the shape, as in y_5[:, 3]"
            raise BNetError("metric", expected=f"shape ({count},), a number for each example", got=got, allowed=hint)
        number = number.detach().to(torch.float64)
        if bool(number.isnan().any()):
            raise BNetError("metric", expected="numbers", got="NaN")
        return number


def metric_of(examples: Examples, metric: object) -> Metric:
    """A metric from what a person says: a node and its states, or a function of nodes."""
    if isinstance(metric, Mapping):
        return _of_states(examples, metric)
    if callable(metric):
        return _of_function(examples.world, metric)
    raise BNetError("metric", expected=FORMS, got=metric)


def _of_function(world: World, function: Callable[..., object]) -> Metric:
    try:
        parameters = inspect.signature(function).parameters.values()
    except (TypeError, ValueError) as error:
        raise BNetError("metric", expected=FORMS, got=function) from error
    plain = (inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY)
    names = [p.name for p in parameters if p.kind in plain and p.default is inspect.Parameter.empty]
    if not names or any(p.kind == inspect.Parameter.POSITIONAL_ONLY for p in parameters):
        raise BNetError("metric", expected=FORMS, got="a function without such parameters")
    nodes = {world.ground.id(name): name for name in names}

    def of(outcomes: Mapping[int, Tensor]) -> object:
        return function(**{name: outcomes[node] for node, name in nodes.items()})

    return Metric(tuple(nodes), of)


def _of_states(examples: Examples, told: Mapping[Any, Any]) -> Metric:
    """`log P(node = state)`, or the difference of two."""
    if len(told) != 1:
        allowed = "a function of several nodes: lambda y_0, y_1: ..."
        raise BNetError("metric", expected="one node and its state", got=f"{len(told)} nodes", allowed=allowed)
    ((name, wanted),) = told.items()
    world = examples.world
    node = world.ground.id(name)
    must_be_discrete(world, node)
    two = isinstance(wanted, tuple)
    if two and len(wanted) != 2:
        raise BNetError(f"metric of {name}", expected="a state, or a tuple of two", got=f"{len(wanted)} of them")
    states = [_states(examples, node, each) for each in (wanted if two else (wanted,))]

    if two and torch.equal(*states):
        raise BNetError(f"metric of {name}", expected="two different states", got=wanted)

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
        raise BNetError(f"metric of {name}", expected=wanted_count, got=f"{len(each)} states")
    states = []
    for world, state in zip(examples.worlds, each, strict=True):
        states.append(encode_value(world, node, state, evidence=True))
        if states[-1].is_floating_point() or states[-1].dim():
            raise EvidenceError(f"metric of {name}", expected="a state", got=state)
    return torch.stack(states)
