"""The sentence of a state of the live page: nets are loaded once, and a small number of sentences keep their values."""

from __future__ import annotations

import asyncio
import threading
from collections import OrderedDict
from collections.abc import Callable, Mapping
from concurrent.futures import Future
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import partial
from itertools import takewhile

from bnet_transformer._core.cancellation import check_cancelled
from bnet_transformer._core.checks import is_integer, parse_float
from bnet_transformer._core.memory import translate_memory_errors
from bnet_transformer.bnet import BNet
from bnet_transformer.data.encode import split_stack_texts
from bnet_transformer.declare import Network
from bnet_transformer.errors import BNetError, BudgetError, UnsupportedError, unknown_name_error
from bnet_transformer.figures.attention_grid import get_attention_specs
from bnet_transformer.inference import SentenceState
from bnet_transformer.page.attention import prepare_attention
from bnet_transformer.page.messages import apply_message
from bnet_transformer.reference.node_tables import has_ancestor_choices
from bnet_transformer.sentence import Sentence
from bnet_transformer.serve.page_state import Limits, PageState

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
                threading.Thread(target=_load_net, args=(self.models[name], load), daemon=True).start()
            return load

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


def _load_net(load: Callable[[], BNet], result: Future[BNet]) -> None:
    """Load a net in a thread."""
    try:
        result.set_result(load())
    except BaseException as error:
        result.set_exception(error)


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
    state.evaluator.prefetch_values(specs)
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
