"""Infer from a net what data it takes: its words, its readouts, and whether a readout predicts the next word."""

from __future__ import annotations

from dataclasses import dataclass, replace

from bnet_transformer._core.naming import Reach
from bnet_transformer.data.word_encoder import WordEncoder, build_word_counter, word_encoder
from bnet_transformer.declare import Network, NodeSpec
from bnet_transformer.errors import BNetError


def is_backward(reach: Reach) -> bool:
    """True if no word depends on a later word; tables and reaches of width 0 are included."""
    return reach.is_causal or reach.kind == "first" or reach == Reach("window", 0)


@dataclass(frozen=True)
class Task:
    """The readouts of a net, the words of each stack, and the stack whose next word is predicted, if there is one.

    In a stack of real-valued words the next word is predicted only if another stack contains the words before it.
    """

    network: Network
    readouts: tuple[NodeSpec, ...]
    encoders: dict[str, WordEncoder]
    next_word: str | None

    @property
    def stacks(self) -> tuple[str, ...]:
        """The stacks whose words are given."""
        return tuple(self.encoders)

    @property
    def has_choices(self) -> bool:
        """True if a readout depends on a latent choice, over which its probability is summed."""
        needed = {spec.group.index for readout in self.readouts for spec in self.network.ancestral_specs(readout)}
        return any(spec.group.index in needed for spec in self.network.choices)

    def needs_mask(self, stack: str) -> bool:
        """True if a word of a stack could read the padding at its end, or a choice at the padding would be counted."""
        for spec in self.network.choices:
            if spec.group.word_stack == stack:
                return True
        for spec in self.network.specs:
            for parent in spec.parents:
                words = self.network.specs[parent.index].group.word_stack
                if words == stack and (spec.group.word_stack != stack or not is_backward(parent.reach)):
                    return True
        return False


def infer_task(network: Network) -> Task:
    """Infer what data a net takes: its readouts, the words of its stacks, and whether a readout predicts next words.

    Args:
        network: The net, with or without readouts and choices.

    Returns:
        The task. Its readouts are the random nodes without children.

    Raises:
        BNetError: A stack has words but no input node for them.
    """
    readouts = tuple(m for m in network.specs if m.tpm.is_random and not network.graph.out_edges[m.group.index])
    encoders = {}
    for stack in network.graph.word_stacks:
        encoder = word_encoder(network, stack) or build_word_counter(network, stack)
        if encoder is None:
            raise BNetError(f"stack {stack!r}: no input node of this stack takes the words of a sentence")
        encoders[stack] = encoder
    return Task(network, readouts, encoders, _infer_next_word(network, readouts, encoders))


def infer_fit_task(network: Network) -> Task:
    """Infer what data a fit of a net takes: all readouts are observed, and no observation is the next word.

    Args:
        network: The net, which may have choices.

    Returns:
        The task. In a net without words every random node can be observed, so all of them are readouts.

    Raises:
        BNetError: The net has no readout.
    """
    task = infer_task(network)
    if not task.encoders:
        task = replace(task, readouts=tuple(m for m in network.specs if m.tpm.is_random))
    if not task.readouts:
        subject = "net: there is no readout (a Categorical or Normal node without children), hence no likelihood to fit"
        raise BNetError(subject, hint="Build the net with observe=")
    return replace(task, next_word=None)


def check_has_words(network: Network, subject: str, alternative: str | None = None) -> None:
    """Raise an error for a net without words."""
    if not network.graph.word_stacks:
        hint = None if alternative is None else f"Use {alternative}"
        raise BNetError(subject, expected="a net with words", hint=hint)


def _infer_next_word(network: Network, readouts: tuple[NodeSpec, ...], encoders: dict[str, WordEncoder]) -> str | None:
    """The stack whose next word the only readout predicts without reading later words; None without such a stack."""
    if len(readouts) != 1:
        return None
    (readout,) = readouts
    stack = readout.group.word_stack
    if stack is None or readout.group.plates or not _predicts_words(readout, encoders[stack], num_stacks=len(encoders)):
        return None
    return stack if find_noncausal_arrow(network, readout, stack) is None else None


def _predicts_words(readout: NodeSpec, encoder: WordEncoder, num_stacks: int) -> bool:
    """True if the values of a readout are words of a stack; real-valued words count only with several stacks."""
    if readout.tpm.kind == "discrete":
        return readout.tpm.states is not None and readout.tpm.states == encoder.states
    return num_stacks > 1 and encoder.states is None and readout.shape == encoder.spec.shape


def find_noncausal_arrow(network: Network, spec: NodeSpec, stack: str) -> str | None:
    """The first arrow among a node's ancestors by which it depends on later words of a stack; None if there is none.

    Only parents that depend on words of the stack matter; other arrows may connect all words.
    """
    needed = network.ancestral_specs(spec)
    decided = find_deciding_stacks(network, needed)
    for child in needed:
        for parent in child.parents:
            parent_group = network.specs[parent.index].group
            if stack not in decided[parent.index]:
                continue
            if child.group.word_stack != stack or parent_group.word_stack != stack or not is_backward(parent.reach):
                return f"{parent_group.name} -> {child.group.name} ({parent.reach})"
    return None


def find_deciding_stacks(network: Network, specs: list[NodeSpec]) -> dict[int, frozenset[str]]:
    """For each group, the stacks on whose words it depends; `specs` lists all ancestors in topological order."""
    stacks: dict[int, frozenset[str]] = {}
    for spec in specs:
        index, words = spec.group.index, spec.group.word_stack
        parents = (stacks.get(edge.parent, frozenset()) for edge in network.graph.in_edges[index])
        stacks[index] = frozenset(({words} if words is not None else set()).union(*parents))
    return stacks


def infer_trainable_task(network: Network, *, is_generation: bool = False) -> Task:
    """Infer the task of a net that is trained on the log probability of its readouts.

    Args:
        network: The net.
        is_generation: Whether words will be generated, which changes the hints of the errors.

    Returns:
        The task, which has at least one readout.

    Raises:
        BNetError: The net has no readout, a random node that is not discrete and has children, or a choice that all
            sentences share.
    """
    task = infer_task(network)
    out_of = network.graph.out_edges
    latent = [m for m in network.specs if m.tpm.is_random and out_of[m.group.index]]
    unsummable = [m.group.name for m in latent if m.tpm.kind != "discrete" or m.scope == "corpus"]
    if not task.readouts:
        subject = "net: there is no readout (a Categorical or Normal node without children), hence no likelihood"
        hint = "Build the net with observe= or readout=, or pass loss= to train"
        if is_generation:
            subject = (
                "net: there is no readout (a Categorical or Normal node without children) to predict the next word"
            )
            hint = "Build the net with observe= or readout="
        raise BNetError(subject, hint=hint)
    if unsummable:
        expected = (
            "discrete latent choices of words or sentences, which are summed out of the probability of a sentence"
        )
        hint = "Use another net" if is_generation else "Use bt.fit for a choice that all sentences share, or pass loss="
        raise BNetError("net", expected=expected, actual=", ".join(unsummable[:4]), hint=hint)
    return task
