"""The answers of the live page: the page of a state, its lens, and the sweep that patches one sentence into another."""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from bnet_transformer._core.cancellation import check_cancelled
from bnet_transformer._core.tokens import distinguish
from bnet_transformer.declare import Network
from bnet_transformer.errors import BNetError
from bnet_transformer.figures.labels import format_token
from bnet_transformer.inference.selection import find_state_group
from bnet_transformer.interventions.sweeps import explain_sweep, sweep
from bnet_transformer.page.description import PageOptions, describe_sentence
from bnet_transformer.page.render import render_html
from bnet_transformer.residual_stream import Contributions
from bnet_transformer.sentence import Sentence
from bnet_transformer.serve.page_state import PageState, Question
from bnet_transformer.serve.sentences import LiveSentence, SentenceSource, check_flops, parse_state

SWEEP_MEMORY = 2**27  # bytes of one batch of cells; a sweep can be cancelled between batches
PATCH_AXES = ("slice", "word")


def describe_page(source: SentenceSource, tab: str, state: PageState) -> tuple[dict[str, Any], bytes]:
    """Return the description and the buffer of the page of a state, as for `explore`, and what the live page adds."""
    state = source.choose_text(tab, state)
    live = source.build(tab, state)
    description, buffer, fault = _describe(live, state)
    network = live.current.net.network
    kinds = {k: spec.tpm.kind for k, spec in enumerate(network.specs)}
    description["live"] = {
        "text": state.text,
        "words": len(live.current.words),
        "discrete": [k for k, kind in kinds.items() if kind == "discrete"],
        "readouts": [network.specs[k].group.name for k in _find_readouts(network)],
        "metric": _find_default_metric(live.current),
        "roles": _list_patch_roles(network),
        "contributions_error": fault,
    }
    return description, buffer


def render_file(source: SentenceSource, tab: str, state: PageState) -> bytes:
    """Return the HTML file of the page of a state, which requires no server."""
    description, buffer, _ = _describe(source.build(tab, state), state)
    return render_html(description, buffer)


def _describe(live: LiveSentence, state: PageState) -> tuple[dict[str, Any], bytes, str]:
    """The description and the buffer of a page, and the error of its contributions, such as after another `undo`."""
    check_cancelled()
    contributions, fault = None, ""
    try:
        contributions = _compute_contributions(live.current, state.contributions)
    except BNetError as error:
        fault = str(error)
    fixed, ground = live.current.state.model.do, live.current.ground
    posterior = [name for name in state.posterior if ground.id(name) not in fixed]  # `do` leaves no posterior
    options = PageOptions(posterior=posterior, contributions=contributions)
    check_cancelled()
    return *describe_sentence(live.current.state, options, live.clean.state), fault


def _compute_contributions(sentence: Sentence, question: Question | None) -> Contributions | None:
    """The contributions to a readout: to the logit of its most probable state, if the question names no state."""
    if question is None:
        return None
    states = [parse_state(sentence, question.node, text) for text in question.of]
    of = None if not states else states[0] if len(states) == 1 else tuple(states)
    result = sentence.contributions(question.node, of)
    if not isinstance(result, Contributions):
        raise BNetError("contributions", expected="a readout", actual=question.node)
    return result


def _find_readouts(network: Network) -> list[int]:
    """The groups of discrete nodes without children."""
    graph = network.graph
    return [k for k, spec in enumerate(network.specs) if spec.tpm.kind == "discrete" and not graph.out_edges[k]]


def _find_default_metric(sentence: Sentence) -> str:
    """The node whose change the sweep measures by default: the last readout, or the last hidden state."""
    network, ground = sentence.net.network, sentence.ground
    states = [spec.group.index for spec in network.specs if network.is_word_state(spec.group)]
    groups = [*states, *_find_readouts(network)]
    return ground.name(int(ground.select_nodes(network.graph.groups[groups[-1]])[-1])) if groups else ""


def _list_patch_roles(network: Network) -> list[str]:
    """The roles that a sweep can patch, of deterministic nodes of words, with the hidden states first."""
    states = [find_state_group(network, stack) for stack in network.graph.word_stacks]
    roles = [group.stem for group in states if group is not None and group.slice is not None]
    for spec in network.specs:
        group = spec.group
        if (
            spec.tpm.kind == "deterministic"
            and group.word_stack is not None
            and group.slice is not None
            and spec.parents
        ):
            roles.append(group.stem)
    return list(dict.fromkeys(roles))


def compute_lens(source: SentenceSource, tab: str, state: PageState) -> dict[str, Any]:
    """Return the lens of a state: for each hidden state of each word, the most probable state of the readout."""
    result = source.build(tab, state).current.lens()
    check_cancelled()
    states, probabilities = result.top_states[..., 0], result.top_probabilities[..., 0]
    return {
        "readout": result.readout,
        "states": list(result.states),
        "words": [format_token(word) for word in result.words],
        "labels": [[*map(format_token, distinguish(result.labels[k] for k in row))] for row in states.tolist()],
        "probabilities": probabilities.double().tolist(),
        "notes": list(result.notes),
    }


def compute_patch(source: SentenceSource, tab: str, state: PageState) -> dict[str, Any]:
    """Return the sweep that patches each hidden state of the other sentence into the sentence of a state.

    The sentence of the state is the run that is patched; the other sentence has the values. The effect of a cell is the
    change of the metric, so a cell with the effect of the whole difference carries the answer.
    """
    base, other = _build_pair(source, tab, state)
    network = base.net.network
    role = state.roles or next(iter(_list_patch_roles(network)), "")
    if not role:
        raise BNetError("patch", expected="a net with slices of words", actual="no such nodes")
    clean = source.build_other(tab, replace(state, other=state.text), base)
    metric, text = _build_metric(base, clean, other, state.patch)
    options: dict[str, Any] = {"at": role, "metric": metric, "memory": SWEEP_MEMORY}
    groups = network.graph.by_stem.get(role, ())
    if any("head" in group.plates for group in groups):
        options["over"] = PATCH_AXES
    route = explain_sweep(other, base, **options)
    check_flops("patch", float(route.flops or 0), source.limits)
    check_cancelled()
    result = sweep(other, base, progress=False, **options)
    if result.axes != PATCH_AXES:
        axes = " and ".join(result.axes)
        raise BNetError("role", expected="nodes with slices and words", actual=f"{role} with {axes}")
    stack = groups[0].word_stack  # the words of the table are those of the nodes that are patched
    assert stack is not None
    assert result.clean is not None and result.corrupt is not None
    shape = result.values.shape
    names = [[result.names.get((row, column)) for column in range(shape[1])] for row in range(shape[0])]
    return {
        "metric": text,
        "role": role,
        "slices": [str(position) for position in result.positions["slice"]],
        "words": [format_token(word) for word in base.state.tokens[stack]],
        "other_words": [format_token(word) for word in other.state.tokens[stack]],
        "names": names,
        "effects": [[_finite(value) for value in row] for row in result.values.tolist()],
        "before": _finite(float(result.corrupt[0])),
        "after": _finite(float(result.clean[0])),
    }


def _build_pair(source: SentenceSource, tab: str, state: PageState) -> tuple[Sentence, Sentence]:
    """The sentence of a state and its other sentence; an error if no values of one can be patched into the other."""
    if not state.other.strip():
        raise BNetError("patch", expected="another sentence, whose values are patched into this one", actual="no words")
    if state.evidence:
        names = ", ".join(name for name, _ in state.evidence)
        raise BNetError("patch", expected="no evidence", actual=f"evidence on {names}", hint="Remove it first")
    base = source.build(tab, state).current
    tokens, other_tokens = base.state.tokens, source.build_clean(tab, state.model, state.other).state.tokens
    for stack, words in tokens.items():
        if len(words) != len(other_tokens[stack]):
            suffix = f" of {stack}" if len(tokens) > 1 else ""
            expected = f"{len(words)} words{suffix}, as in this sentence"
            raise BNetError("other sentence", expected=expected, actual=f"{len(other_tokens[stack])} words")
    other = source.build_other(tab, state, base)
    if tokens == other_tokens and base.state.interventions.keys() == other.state.interventions.keys():
        raise BNetError("other sentence", expected="words that differ from this sentence", actual="the same words")
    return base, other


def _finite(value: float) -> float | None:
    """A number for JSON, which has no NaN and no infinity."""
    return value if math.isfinite(value) else None


def _build_metric(base: Sentence, clean: Sentence, other: Sentence, question: Question) -> tuple[object, str]:
    """The metric of a sweep, and its definition as text.

    For a discrete node it is the log probability of a state, or the difference of two. For a vector v it is the
    position of v between its values in both sentences: <v - v0, v1 - v0> / |v1 - v0|^2, which is 0 in this sentence
    without its interventions (`clean`) and 1 in the other one.
    """
    name = question.node or _find_default_metric(base)
    if not name:
        raise BNetError("patch", expected="the name of a node whose change is measured", actual="no name")
    node = base.ground.id(name)
    name = base.ground.name(node)  # an identifier, unlike a name with a word that is counted from the end
    if base.state.model.spec(node).tpm.kind == "discrete":
        of = question.of or _find_changed_states(base, other, name)
        states, labels = [parse_state(base, name, text) for text in of], base.state.labels(node)
        texts = [labels[state] if labels is not None and isinstance(state, int) else str(state) for state in states]
        terms = [f"log P({name} = {format_token(text)})" for text in distinguish(texts)]
        return {name: states[0] if len(states) == 1 else tuple(states)}, " - ".join(terms)
    if question.of:
        raise BNetError("patch", expected=f"no states for {name}, which is a vector", actual=", ".join(question.of))
    start, end = (_compute_vector(sentence, name) for sentence in (clean, other))
    difference = end - start
    if not bool(difference.abs().sum() > 0):
        hint = "Use a node after the words that differ"
        raise BNetError("patch", expected="a node that differs between both sentences", actual=name, hint=hint)
    direction = difference / difference.square().sum()

    def project(**values: Tensor) -> Tensor:
        (value,) = values.values()
        return ((value.reshape(len(value), -1) - start) * direction).sum(-1)

    return _name_parameter(
        project, name
    ), f"position of {name} from its value without interventions (0) to that in the other sentence (1)"


def _compute_vector(sentence: Sentence, name: str) -> Tensor:
    """The value of a node as a vector; an error if it has a value for each state of a latent choice."""
    state = sentence.state
    node, value = state.ground.id(name), sentence[name].detach()
    if tuple(value.shape) != state.model.spec(node).shape:
        choices = [state.ground.name(choice) for choice in state.evaluator.find_open_choices([node])]
        hint = "Set " + ", ".join(f"do({choice} = ...)" for choice in choices) + " first"
        raise BNetError("patch", expected=f"one value of {name}", actual="one for each state of a choice", hint=hint)
    return value.reshape(-1)


def _name_parameter(function: Callable[..., Tensor], name: str) -> Callable[..., Tensor]:
    """The function with a parameter of this name, by which a metric names its node."""
    signature = inspect.Signature([inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY)])
    function.__signature__ = signature  # type: ignore[attr-defined]
    return function


def _find_changed_states(base: Sentence, other: Sentence, name: str) -> Sequence[str]:
    """The most probable state of a node in the other sentence, and in this one if it is another state."""
    states = [int(torch.argmax(sentence.posterior(name))) for sentence in (other, base)]
    return [str(state) for state in dict.fromkeys(states)]
