"""Examples: sentences of one net and one length that are computed as one batch; and the metric of their runs.

The metric is a number for each example, computed from the *outcomes* of some nodes: the value of a deterministic node,
the log probabilities of a discrete node, the mean of a continuous node.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Collection, Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from bnet_transformer.compiler.execution_state import ExecutionRequest, ExecutionState
from bnet_transformer.compiler.module import CompiledModule
from bnet_transformer.data.encode import encode_value
from bnet_transformer.errors import BNetError, EvidenceError, UnsupportedError
from bnet_transformer.inference.query import build_length_inputs, group_interventions
from bnet_transformer.inference.sentence_state import SentenceState
from bnet_transformer.reference import GroundModel
from bnet_transformer.reference.node_tables import check_discrete_node

DEFAULT_MEMORY = 2**29  # the default number of bytes that are used at once
Overrides = Mapping[int, tuple[Tensor, Tensor]]  # values `[example, *plates, word, *shape]`, and masks, by group
METRIC_FORMS = (
    "a mapping {node: state} or {node: (state, state)}, or a function whose parameters are names of nodes or roles"
)


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

    def with_choices(self, states: Mapping[int, Tensor]) -> Examples:
        """The same sentences with their latent choices set to these states."""
        if not states:
            return self
        open_states = {node: state for node, state in states.items() if node not in self.model.do}
        return replace(self, models=tuple(model.surgery(open_states) for model in self.models))

    def split(self, size: int) -> Iterator[Examples]:
        """Split the sentences, in order, into parts of `size`."""
        for start in range(0, len(self), size):
            part = slice(start, start + size)
            yield replace(self, models=self.models[part], tokens=self.tokens[part])

    def run(
        self,
        groups: Collection[int],
        record_attention: Collection[int] = (),
        perturbations: Mapping[int, Tensor] | None = None,
        overrides: Overrides | None = None,
    ) -> ExecutionState:
        """Run all sentences in one batch. No group may depend on a latent choice; `routing` excludes such groups.

        Args:
            groups: The node groups whose values are recorded, `[1 or N, *plates, word, *shape]`.
            record_attention: The node groups whose attention `P(j | i)` is recorded.
            perturbations: Zeros that are added to the values of some groups, so that they have a gradient.
            overrides: Values that replace those of some nodes, and the masks of these nodes, by group.

        Returns:
            The state of the execution, with the values and the attention.
        """
        graph = self.model.network.graph
        names = tuple(graph.groups[index].name for index in sorted(groups))
        ancestors = {*groups, *record_attention, *graph.ancestors([*groups, *record_attention])}
        interventions = [group_interventions(model, ancestors) for model in self.models]
        do_values = {name: torch.cat([item["do"][name] for item in interventions]) for name in interventions[0]["do"]}
        patched = _stack_sentences([item["patched"] for item in interventions])
        for index, (values, mask) in (overrides or {}).items():
            if index in ancestors:
                _override_values(graph.groups[index].name, values, mask, do_values, patched)
        request = ExecutionRequest(
            names,
            build_length_inputs(self.model),
            do=do_values,
            patched=patched,
            attention_rows=_stack_sentences([item["attention_rows"] for item in interventions]),
            given={name: torch.stack([model.inputs[name] for model in self.models]) for name in self.model.inputs},
            record_attention=frozenset(record_attention),
            perturbations=perturbations,
            training=False,
        )
        with torch.set_grad_enabled(bool(perturbations)):
            state, plan = self.module.run(request)
        if plan.enumerated:
            name = graph.groups[plan.enumerated[0]].name
            raise UnsupportedError(f"{name} is a latent choice, which one run cannot compute", hint=f"Set {name} by do")
        return state


def _override_values(
    name: str, values: Tensor, mask: Tensor, do: dict[str, Tensor], patched: dict[str, tuple[Tensor, Tensor]]
) -> None:
    """Replace the values of some nodes of a group in the values that `do` sets, or set these nodes."""
    selected = mask.reshape(*mask.shape, *[1] * (values.dim() - mask.dim()))
    if name in do:
        do[name] = torch.where(selected, values.to(do[name].dtype), do[name])
    elif name in patched:
        before, was_set = patched[name]
        patched[name] = torch.where(selected, values, before), mask | was_set
    else:
        patched[name] = values, mask


def _stack_sentences(by_sentence: Sequence[Mapping[str, tuple[Tensor, Tensor]]]) -> dict[str, tuple[Tensor, Tensor]]:
    """Concatenate the values of groups, and the masks of the nodes that are set, along the sentences."""
    columns = {name: zip(*(tensors[name] for tensors in by_sentence), strict=True) for name in by_sentence[0]}
    return {name: (torch.cat(values), torch.cat(masks)) for name, (values, masks) in columns.items()}


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
        hint = "Or align words in a sweep: words={word: word of the other sentence}"
        raise BNetError("corrupt", expected=expected, actual=_format_word_counts(corrupt_model), hint=hint)
    return clean_examples, corrupt_examples


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
        return _parse_metric_function(examples.model, metric)
    raise BNetError("metric", expected=METRIC_FORMS, actual=metric)


def _parse_metric_function(model: GroundModel, function: Callable[..., object]) -> Metric:
    """The metric of a function whose parameters are names of nodes."""
    try:
        parameters = inspect.signature(function).parameters.values()
    except (TypeError, ValueError) as error:
        raise BNetError("metric", expected=METRIC_FORMS, actual=function) from error
    named_kinds = (inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY)
    names = [p.name for p in parameters if p.kind in named_kinds and p.default is inspect.Parameter.empty]
    if not names or any(p.kind == inspect.Parameter.POSITIONAL_ONLY for p in parameters):
        raise BNetError("metric", expected=METRIC_FORMS, actual="a function without parameters that name nodes")
    nodes = {name: _find_metric_nodes(model, name) for name in names}

    def call_by_name(outcomes: Mapping[int, Tensor]) -> object:
        return function(**{name: _stack_nodes(outcomes, ids, shape) for name, (ids, shape) in nodes.items()})

    return Metric(tuple(dict.fromkeys(node for ids, _ in nodes.values() for node in ids)), call_by_name)


def _find_metric_nodes(model: GroundModel, name: str) -> tuple[list[int], tuple[int, ...]]:
    """The nodes of a parameter of a metric: one node, or all nodes of a role or of a role in one slice.

    Returns:
        The nodes, and the sizes of their axes: `()` for one node, `(*plates, word)` for one node group, and
        `(slice, *plates, word)` for a role with several slices.
    """
    ground = model.ground
    template = ground.template
    if template.parse_name(name, ground.word_counts) is not None:
        return [ground.id(name)], ()
    groups = (template.by_name[name],) if name in template.by_name else template.by_stem.get(name, ())
    if not groups:
        return [ground.id(name)], ()  # raises the error for an unknown name
    (shape, *different) = {(ground.shapes[group.index], ground.axes(group)) for group in groups}
    if different:
        expected = "a role whose nodes have the same axes in all slices"
        raise BNetError(f"metric of {name}", expected=expected, actual="groups with different axes")
    nodes = [node for group in groups for node in ground.select_nodes(group).tolist()]
    return nodes, shape[0] if len(groups) == 1 else (len(groups), *shape[0])


def _stack_nodes(outcomes: Mapping[int, Tensor], nodes: Sequence[int], shape: tuple[int, ...]) -> Tensor:
    """The outcomes `[example, *shape]` of one node, or of all nodes of a role, `[example, *axes, *shape]`."""
    if not shape:
        return outcomes[nodes[0]]
    stacked = torch.stack([outcomes[node] for node in nodes], 1)
    return stacked.reshape(len(stacked), *shape, *stacked.shape[2:])


def _parse_metric_mapping(examples: Examples, mapping: Mapping[Any, Any]) -> Metric:
    """The metric `log P(node = state)`, or the difference of two."""
    if len(mapping) != 1:
        hint = "For several nodes pass a function with their names as parameters"
        raise BNetError("metric", expected="one node and its state", actual=f"{len(mapping)} nodes", hint=hint)
    ((name, value),) = mapping.items()
    model = examples.model
    node = model.ground.id(name)
    check_discrete_node(model, node)
    is_pair = isinstance(value, tuple)
    if is_pair and len(value) != 2:
        raise BNetError(
            f"metric of {name}", expected="a state, or a tuple of two states", actual=f"{len(value)} states"
        )
    states = [_parse_states(examples, node, item) for item in (value if is_pair else (value,))]

    def gather_log_probs(outcomes: Mapping[int, Tensor]) -> Tensor:
        logs = outcomes[node]
        first, *second = (logs.gather(-1, s.to(logs.device).expand(logs.shape[:-1])[..., None])[..., 0] for s in states)
        return first - second[0] if is_pair else first

    return Metric((node,), gather_log_probs, is_batched=True)


def _parse_states(examples: Examples, node: int, value: object) -> Tensor:
    """Encode the state for each example, `[example]`, from one state for all or a list with one for each."""
    if isinstance(value, Tensor) and value.dim() == 1:
        value = value.tolist()
    is_list = isinstance(value, Sequence) and not isinstance(value, str)
    items = list(value) if is_list else [value] * len(examples)  # type: ignore[call-overload]
    name = examples.model.ground.name(node)
    if len(items) != len(examples):
        expected = f"a state, or a list of {len(examples)}, one for each example"
        raise BNetError(f"metric of {name}", expected=expected, actual=f"{len(items)} states")
    states = []
    for model, state in zip(examples.models, items, strict=True):
        states.append(encode_value(model, node, state, evidence=True))
        if states[-1].is_floating_point() or states[-1].dim():
            raise EvidenceError(f"metric of {name}", expected="a state", actual=state)
    return torch.stack(states)
