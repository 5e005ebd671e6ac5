"""The metric of the runs of a sweep: a number for each example, computed from the *outcomes* of some nodes.

An outcome is the value of a deterministic node, the log probabilities of a discrete node, or the mean of a continuous
node. A function with the parameter `examples` receives the indices of the examples of a call: without it, a function
that refers to data of the examples is only right if one call has all of them.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from bnet_transformer._core.arrays import IntArray
from bnet_transformer._core.naming import split_pattern
from bnet_transformer._core.saved_results import get_parameter_names
from bnet_transformer.data.encode import encode_value
from bnet_transformer.errors import BNetError, EvidenceError
from bnet_transformer.graph import find_family
from bnet_transformer.interventions.sweeps.examples import Examples
from bnet_transformer.reference import GroundModel
from bnet_transformer.reference.node_tables import check_discrete_node

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
    """Parse a metric: a mapping from a node to its states, or a function of nodes."""
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
