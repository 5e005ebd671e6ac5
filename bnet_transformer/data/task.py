"""What a net is trained for: its readouts, and whether they tell the next word of a stack that reads no later one."""

from __future__ import annotations

from dataclasses import dataclass

from bnet_transformer.axes import Reach
from bnet_transformer.data.words import Words, words_of
from bnet_transformer.errors import BNetError
from bnet_transformer.network import Member, Network


def backward(reach: Reach) -> bool:
    """True where no word reads a later one, whatever the kind of the reach: by its table, by its width."""
    return reach.backward or reach.kind == "first" or reach == Reach("window", 0)


@dataclass(frozen=True)
class Task:
    """The readouts of a net, the words of each stack, and the stack whose next word is told, where there is one.

    A stack of real-valued words tells its next word where it goes on from what another stack reads.
    """

    network: Network
    readouts: tuple[Member, ...]
    words: dict[str, Words]
    next_word: str | None

    @property
    def stacks(self) -> tuple[str, ...]:
        return tuple(self.words)

    def masks(self, stack: str) -> bool:
        """True where padding at the end of a stack could be read by a word that is there."""
        for member in self.network.members:
            for given in member.inputs:
                words = self.network.members[given.parent].family.words
                if words == stack and (member.family.words != stack or not backward(given.reach)):
                    return True
        return False


def task_of(network: Network, *, likelihood: bool = True, generates: bool = False) -> Task:
    """The task of a net; without `likelihood` (the loss is somebody else's) it needs no readout, and may choose.

    Where it `generates` words, what is wrong with it is told as that.
    """
    readouts = tuple(m for m in network.members if m.tpm.is_random and not _readers(network, m))
    choices = [m.family.name for m in network.members if m.tpm.is_random and _readers(network, m)]
    if likelihood and not readouts:
        wanted, ways = "a readout to train on: a net without observe= has no likelihood", ", or loss= of train"
        if generates:
            wanted, ways = "a readout that tells the next word", ""
        got = "no Categorical or Normal node that nothing reads"
        raise BNetError("net", expected=wanted, got=got, allowed=f"observe= or readout= of the net{ways}")
    if likelihood and choices:
        other = "a net with combine='concat'"
        wanted, ways = "train follows one gradient", f"bt.fit, which sums choices out; loss= of yours; {other}"
        if generates:
            wanted, ways = "each word is chosen from one distribution", other
        wanted = f"no random choice beneath the readouts: {wanted}"
        raise BNetError("net", expected=wanted, got=", ".join(choices[:4]), allowed=ways)
    words = {stack: words_of(network, stack) for stack in network.graph.word_stacks}
    return Task(network, readouts, words, _next_word(network, readouts, words))


def check_has_words(network: Network, what: str, allowed: str | None = None) -> None:
    """Refuse a net without words, where all that is asked is of words."""
    if not network.graph.word_stacks:
        raise BNetError(what, expected="a net with words", got="a net without words", allowed=allowed)


def _next_word(network: Network, readouts: tuple[Member, ...], words: dict[str, Words]) -> str | None:
    """The stack whose next word the one readout tells, having read no later word."""
    if len(readouts) != 1:
        return None
    (told,) = readouts
    stack = told.family.words
    if stack is None or told.family.plates or not _tells_words(told, words[stack], among=len(words)):
        return None
    return stack if later(network, told, stack) is None else None


def _tells_words(told: Member, words: Words, among: int) -> bool:
    """True for a readout whose values are words of a stack; of real-valued words, where there are several stacks."""
    if told.tpm.kind == "discrete":
        return told.tpm.states is not None and told.tpm.states == words.states
    return among > 1 and words.states is None and told.shape == words.member.shape


def later(network: Network, member: Member, stack: str) -> str | None:
    """The first arrow above a node by which a word learns of later words of a stack; None if there is none."""
    needed = above(network, member)
    decided = decided_by(network, needed)
    for child in needed:
        for given in child.inputs:
            parent = network.members[given.parent].family
            if stack not in decided[given.parent]:
                continue
            if child.family.words != stack or parent.words != stack or not backward(given.reach):
                return f"{parent.name} -> {child.family.name} ({given.reach})"
    return None


def above(network: Network, member: Member) -> list[Member]:
    """A node and all its ancestors, in order."""
    found = {member.family.index}
    todo = [member.family.index]
    while todo:
        parents = {bundle.parent for bundle in network.graph.into[todo.pop()]} - found
        found |= parents
        todo += parents
    order = [index for group in network.graph.groups for index in group if index in found]
    return [network.members[index] for index in order]


def decided_by(network: Network, members: list[Member]) -> dict[int, frozenset[str]]:
    """For each family the stacks whose words decide its value; families in order, their ancestors among them."""
    found: dict[int, frozenset[str]] = {}
    for member in members:
        index, words = member.family.index, member.family.words
        parents = (found.get(bundle.parent, frozenset()) for bundle in network.graph.into[index])
        found[index] = frozenset(({words} if words is not None else set()).union(*parents))
    return found


def _readers(network: Network, member: Member) -> bool:
    return bool(network.graph.out_of[member.family.index])
