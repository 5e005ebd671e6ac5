"""The answers of the live page: its state, the nets and sentences that it keeps, pages, the lens and sweeps."""

from __future__ import annotations

import asyncio
import inspect
import json
import math
import threading
from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import partial
from itertools import takewhile
from typing import Any

import torch
from torch import Tensor

from bnet_transformer._core.checks import check_names, is_integer, parse_float
from bnet_transformer._core.process import check_cancelled, translate_memory_errors
from bnet_transformer._core.tokens import distinguish
from bnet_transformer.bnet import BNet
from bnet_transformer.data.encode import split_stack_texts
from bnet_transformer.declare import Network
from bnet_transformer.errors import BNetError, BudgetError, UnsupportedError, unknown_name_error
from bnet_transformer.figures.attention_grid import get_attention_specs
from bnet_transformer.figures.fonts import format_token
from bnet_transformer.inference import SentenceState
from bnet_transformer.inference.plan import get_planner
from bnet_transformer.inference.query import find_state_group
from bnet_transformer.interventions.sweep import sweep
from bnet_transformer.page.description import PageOptions, describe_sentence, prepare_attention
from bnet_transformer.page.html import render_html
from bnet_transformer.page.widget import apply_message
from bnet_transformer.reference import has_ancestor_choices
from bnet_transformer.residual_stream import Contributions
from bnet_transformer.sentence import Sentence

# --------------------------------------------------------------------------------------------------------------------
# The state of the live page, which every request carries and which the fragment of the address contains.


MAX_NAMES = 64  # of nodes with evidence, or whose posteriors are shown


@dataclass(frozen=True)
class Limits:
    """The limits of one request, and of the server.

    Args:
        words: The maximum number of words of a sentence.
        flops: The maximum number of floating-point operations of one run of the net, and of all runs of a sweep.
        steps: The maximum number of interventions and undos of a state.
        body: The maximum number of bytes of a request.
        sentences: The number of sentences whose values are kept for the next request.
        threads: The number of answers that are computed at the same time.
        jobs: The maximum number of requests that run or wait.
        connections: The maximum number of connections.
        transfer_seconds: The maximum number of seconds in which a request arrives, and in which a client reads no part
            of an answer.
    """

    words: int = 256
    flops: float = 2e13
    steps: int = 64
    body: int = 1_000_000
    sentences: int = 6
    threads: int = 4
    jobs: int = 64
    connections: int = 100
    transfer_seconds: float = 30


@dataclass(frozen=True)
class Question:
    """A node and states of it: the readout of contributions, or the metric of a sweep.

    Args:
        node: The name of the node; empty for the default.
        of: A state, or two states whose difference is the question; empty for the value of the node.
    """

    node: str = ""
    of: tuple[str, ...] = ()


@dataclass(frozen=True)
class PageState:
    """The state of the live page.

    Args:
        model: The name of the model.
        text: The sentence; the texts of several stacks are separated by `|`. Empty for an example.
        steps: The messages of `do` and `undo`, in their order.
        evidence: The observed state of nodes, as its index or as text.
        posterior: The nodes whose posteriors are shown, in addition to selectors.
        contributions: The readout whose contributions are shown; None for no contributions.
        other: The sentence whose values are patched into this one.
        patch: The metric of the sweep.
        roles: The role of the nodes that the sweep patches; empty for the hidden states.
    """

    model: str
    text: str
    steps: tuple[Mapping[str, Any], ...] = ()
    evidence: tuple[tuple[str, str | int], ...] = ()
    posterior: tuple[str, ...] = ()
    contributions: Question | None = None
    other: str = ""
    patch: Question = Question()
    roles: str = ""

    def get_key(self, num_steps: int) -> tuple[str, ...]:
        """The text that identifies the sentence after some steps, without evidence."""
        steps = json.dumps([dict(step) for step in self.steps[:num_steps]], sort_keys=True)
        return self.model, self.text, steps, self.other if '"other"' in steps else ""


def parse_page_state(document: object, limits: Limits) -> PageState:
    """Return the state that a JSON document describes.

    Args:
        document: The document: an object with the fields of `PageState`; `model` and `text` are required.
        limits: The limits of a request.

    Returns:
        The state.

    Raises:
        BNetError: A field is unknown or has another type.
        BudgetError: The state has too many steps or names, or its text is too long.
    """
    fields = _check_type("state", document, dict)
    check_names("field of the state", fields, list(PageState.__dataclass_fields__))
    texts = {name: _check_type(name, fields.get(name, ""), str) for name in ("model", "text", "other", "roles")}
    for name in ("text", "other"):
        _check_text(name, texts[name], limits)
    steps = [_check_type("step", step, dict) for step in _check_type("steps", fields.get("steps", []), list)]
    _check_count("steps", len(steps), limits.steps)
    evidence = _check_type("evidence", fields.get("evidence", {}), dict)
    _check_count("evidence", len(evidence), MAX_NAMES)
    for name, value in evidence.items():
        if isinstance(value, bool) or not isinstance(value, str | int):
            raise BNetError(name, expected="the index of a state, or a text", actual=value)
    posterior = _check_texts("posterior", fields.get("posterior", []))
    _check_count("posterior", len(posterior), MAX_NAMES)
    contributions = fields.get("contributions")
    question = None if contributions is None else _parse_question("contributions", contributions)
    patch = _parse_question("patch", fields.get("patch", {}))
    return PageState(
        steps=tuple(steps),
        evidence=tuple(evidence.items()),
        posterior=posterior,
        contributions=question,
        patch=patch,
        **texts,
    )


def _check_type(subject: str, value: object, kind: type[Any]) -> Any:
    """Return a value of JSON if it has the type."""
    if not isinstance(value, kind) or isinstance(value, bool):
        names: dict[type[Any], str] = {dict: "an object", list: "a list", str: "a text"}
        raise BNetError(subject, expected=f"{names[kind]} in JSON", actual=value)
    return value


def _check_texts(subject: str, value: object) -> tuple[str, ...]:
    """Return a list of texts."""
    return tuple(_check_type(subject, item, str) for item in _check_type(subject, value, list))


def _check_count(subject: str, count: int, maximum: int) -> None:
    """Raise an error if a list is too long."""
    if count > maximum:
        hint = "Undo all interventions, and set fewer nodes" if subject == "steps" else None
        raise BudgetError(subject, expected=f"at most {maximum} entries", actual=count, hint=hint)


def _check_text(subject: str, text: str, limits: Limits) -> None:
    """Raise an error for a text that is too long to be split into words, and for text that is not Unicode."""
    if len(text) > 40 * limits.words:
        expected = f"at most {limits.words} words and {40 * limits.words:,} characters"
        raise BudgetError(subject, expected=expected, actual=f"{len(text):,} characters", hint="Use a shorter sentence")
    if "\0" in text or any("\ud800" <= letter <= "\udfff" for letter in text):
        raise BNetError(subject, expected="text in UTF-8", actual="invalid characters")


def _parse_question(subject: str, value: object) -> Question:
    """Return a node and its states."""
    fields = _check_type(subject, value, dict)
    check_names(f"field of {subject}", fields, ("node", "of"))
    node, of = _check_type(subject, fields.get("node", ""), str), _check_texts(subject, fields.get("of", []))
    if len(of) > 2:
        raise BNetError(subject, expected="one state, or two states", actual=f"{len(of)} states")
    return Question(node, of)


# --------------------------------------------------------------------------------------------------------------------
# The sentence of a state of the live page: nets are loaded once, and a small number of sentences keep their values.


Key = tuple[str, ...]

EXAMPLE = "the cat sat on the mat"
EXAMPLE_LENGTHS = (6, 3, 2, 1)  # some nets limit the number of words


@dataclass(frozen=True)
class LiveSentence:
    """The sentence of a state of the live page.

    Args:
        current: The sentence with its interventions and evidence.
        clean: The sentence without both.
    """

    current: Sentence
    clean: Sentence


class SentenceSource:
    """Builds the sentences of states. Requests of one tab must not run at the same time; those of several tabs can.

    Args:
        models: For each name of a model, a function that loads it.
        limits: The limits of a request.
    """

    def __init__(self, models: Mapping[str, Callable[[], BNet]], limits: Limits) -> None:
        self.models, self.limits = dict(models), limits
        self._loads: dict[str, Future[BNet]] = {}
        self._lock = threading.Lock()
        self._sentences: OrderedDict[Key, Sentence] = OrderedDict()

    def load(self, name: str) -> Future[BNet]:
        """Return the future of the net of a model, which a thread loads on first use, and again after an error.

        A load cannot be interrupted, so no job runs it. A job waits for it in the event loop, by `wait_for_net`.
        """
        if name not in self.models:
            raise unknown_name_error("model", name, self.models)
        with self._lock:
            load = self._loads.get(name)
            if load is None or (load.done() and load.exception() is not None):
                load = self._loads[name] = Future()
                threading.Thread(target=partial(self._load, name, load), daemon=True).start()
            return load

    def _load(self, name: str, result: Future[BNet]) -> None:
        """Load a net in a thread."""
        try:
            result.set_result(self.models[name]())
        except BaseException as error:
            result.set_exception(error)

    def list_loaded(self) -> list[str]:
        """The models that are loaded."""
        with self._lock:
            return [name for name, load in self._loads.items() if load.done() and load.exception() is None]

    async def wait_for_net(self, name: str) -> None:
        """Return when a model is loaded; an error of its load is raised."""
        loop, loaded, load = asyncio.get_running_loop(), asyncio.Event(), self.load(name)

        def notify(_: Future[BNet]) -> None:
            with suppress(RuntimeError):  # the server was stopped, and its loop is closed
                loop.call_soon_threadsafe(loaded.set)

        load.add_done_callback(notify)
        await loaded.wait()
        with translate_memory_errors(f"model {name}"):
            load.result()

    def get_net(self, name: str) -> BNet:
        """Return the net of a model, which is loaded on first use; this blocks the thread until it is loaded."""
        return self.load(name).result()

    def choose_text(self, tab: str, state: PageState) -> PageState:
        """Return a state with a text: an empty one is replaced by a sentence that the net accepts, if it has words."""
        network = self.get_net(state.model).network
        if state.text.strip() or not network.graph.word_stacks:
            return state
        fault: BNetError | None = None
        for length in EXAMPLE_LENGTHS:
            text = build_example(network, length)
            try:
                self.build_clean(tab, state.model, text)
                return replace(state, text=text)
            except BNetError as error:
                fault = fault or error
        assert fault is not None
        raise fault

    def build(self, tab: str, state: PageState) -> LiveSentence:
        """Return the sentence of a state; `tab` identifies the tab, whose sentences no other tab uses."""
        current = self._build_step(tab, state, len(state.steps))
        clean = self.build_clean(tab, state.model, state.text)
        if state.evidence:
            observed = {name: parse_state(current, name, value) for name, value in state.evidence}
            key = (tab, *state.get_key(len(state.steps)), repr(state.evidence))
            current = self._get(key, partial(current.observe, observed))
        return LiveSentence(current, clean)

    def build_clean(self, tab: str, model: str, text: str) -> Sentence:
        """Return the sentence of a text."""
        state = PageState(model, text)
        return self._get((tab, *state.get_key(0)), partial(self._build_text, model, text))

    def build_other(self, tab: str, state: PageState, base: Sentence) -> Sentence:
        """Return the other sentence of a state, with the discrete nodes that `do` sets in a sentence of the state.

        Without a state of its choices a node has no single value, so both sentences need the same states.
        """
        other, values = self.build_clean(tab, state.model, state.other), {}
        for node, value in base.state.interventions.items():
            if base.state.model.spec(node).tpm.kind == "discrete":
                values[base.ground.name(node)] = value
        return other.do(values) if values else other

    def _build_text(self, model: str, text: str) -> Sentence:
        """Build the sentence of a text, if it is not too long."""
        net = self.get_net(model)
        sentence = net.sentence(split_stack_texts(net.network, text))
        counts = sentence.state.encoded.word_counts
        if sum(counts.values()) > self.limits.words:
            expected, actual = f"at most {self.limits.words} words", f"{sum(counts.values())} words"
            hint = "Use a shorter sentence, or start the server with a larger --max-words"
            raise BudgetError("sentence", expected=expected, actual=actual, hint=hint)
        with suppress(UnsupportedError):  # without one batched pass, the budget of joint states limits the work
            check_flops("sentence", net.cost(counts or None).flops or 0, self.limits)
        return keep_values(sentence)

    def _build_step(self, tab: str, state: PageState, count: int) -> Sentence:
        """Return the sentence after the first steps; it is computed from the last one of them that is known."""
        if not count:
            return self.build_clean(tab, state.model, state.text)
        key = (tab, *state.get_key(count))

        def build() -> Sentence:
            before, clean = self._build_step(tab, state, count - 1), self._build_step(tab, state, 0)
            get_other = partial(self.build_other, tab, state, before) if state.other else None
            return keep_values(apply_message(before, clean, state.steps[count - 1], get_other))

        return self._get(key, build)

    def _get(self, key: Key, build: Callable[[], Sentence]) -> Sentence:
        """Return a sentence, which is built if it is not among the last ones that were used."""
        with self._lock:
            sentence = self._sentences.get(key)
            if sentence is not None:
                self._sentences.move_to_end(key)
                return sentence
        check_cancelled()
        sentence = build()
        with self._lock:
            self._sentences[key] = sentence
            while len(self._sentences) > self.limits.sentences:
                self._sentences.popitem(last=False)
        return sentence


def build_example(network: Network, length: int) -> str:
    """Return a text with a number of words for each stack: an English sentence, or words of another vocabulary.

    >>> import bnet_transformer as bt
    >>> build_example(bt.decoder(8, heads=2, slices=1, vocabulary=["le", "chat"]).network, 3)
    'le chat'
    """
    texts = []
    for stack in network.graph.word_stacks:
        words, vocabulary = EXAMPLE.split(), network.vocabularies.get(stack)
        if vocabulary is not None:
            words = list(takewhile(set(vocabulary).__contains__, words))
            if len(words) < 2:
                words = [word for word in vocabulary if word.split() == [word] and "|" not in word]
        texts.append(" ".join(words[:length]))
    return " | ".join(texts)


def keep_values(sentence: Sentence) -> Sentence:
    """Compute the values that the next intervention reuses, and drop those of the sentence before the last one."""
    state = sentence.state
    network = state.network
    specs = [spec for spec in network.specs if spec.tpm.kind == "deterministic" and spec.parents]
    specs = [spec for spec in specs if network.graph.out_edges[spec.group.index]]
    specs = [spec for spec in specs if not has_ancestor_choices(network, [spec.group.index])]
    state.evaluator.prefetch("value", specs)
    prepare_attention(state, get_attention_specs(network, None))
    return Sentence(sentence.net, state.drop_previous())


def check_flops(subject: str, flops: float, limits: Limits) -> None:
    """Raise an error for a run of the net, or for a sweep, that is too expensive."""
    if flops > limits.flops:
        expected, actual = f"at most {limits.flops:.0e} floating-point operations", f"{flops:.1e}"
        raise BudgetError(subject, expected=expected, actual=actual, hint="Use shorter sentences, or a smaller model")


def parse_state(sentence: Sentence, name: str, value: str | int) -> object:
    """Return the state of a discrete node that a text names by its label or its index, or the numbers of a value."""
    if isinstance(value, int):
        return value
    state: SentenceState = sentence.state
    node = state.ground.id(name)
    spec = state.model.spec(node)
    if spec.tpm.kind == "discrete" or spec.tpm.is_index_valued:
        labels = state.labels(node)
        is_index = is_integer(value) and (labels is None or value not in labels)
        return int(value) if is_index else value
    numbers = [parse_float(part.strip()) for part in value.split(",")]
    if None in numbers:
        return value
    return numbers if spec.shape else numbers[0]


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
    plan = get_planner(sweep)(other, base, progress=False, **options)
    check_flops("patch", float(plan.flops or 0), source.limits)
    check_cancelled()
    result = plan.run()
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
        of: Sequence[str] = question.of
        if not of:  # the most probable state in the other sentence, and in this one if it is another state
            changed = [int(torch.argmax(sentence.posterior(name))) for sentence in (other, base)]
            of = [str(state) for state in dict.fromkeys(changed)]
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

    # A metric names its node by the name of its parameter.
    signature = inspect.Signature([inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY)])
    project.__signature__ = signature  # type: ignore[attr-defined]
    return project, f"position of {name} from its value without interventions (0) to that in the other sentence (1)"


def _compute_vector(sentence: Sentence, name: str) -> Tensor:
    """The value of a node as a vector; an error if it has a value for each state of a latent choice."""
    state = sentence.state
    node, value = state.ground.id(name), sentence[name].detach()
    if tuple(value.shape) != state.model.spec(node).shape:
        choices = [state.ground.name(choice) for choice in state.evaluator.find_open_choices([node])]
        hint = "Set " + ", ".join(f"do({choice} = ...)" for choice in choices) + " first"
        raise BNetError("patch", expected=f"one value of {name}", actual="one for each state of a choice", hint=hint)
    return value.reshape(-1)
