"""The messages with which the front end intervenes: `do` with names and settings, and `undo` with names.

The page of a widget and the live page send them. `bnet_transformer.page` describes names and settings.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from bnet_transformer._core.checks import check_choice, check_int
from bnet_transformer.errors import BNetError
from bnet_transformer.graph import find_family
from bnet_transformer.interventions import Zero

SETTINGS = ("zero", "node", "state", "other")


@dataclass(frozen=True)
class History:
    """A sentence, and the messages that lead to it.

    Args:
        start: The sentence before all messages.
        sentence: The sentence after them.
        steps: The messages, as JSON.
        nodes_before: For each message, the ids of the nodes that are set before it.
    """

    start: Any
    sentence: Any
    steps: tuple[dict[str, Any], ...] = ()
    nodes_before: tuple[frozenset[int], ...] = ()

    def apply(self, message: Mapping[str, Any]) -> History:
        """Return the history after one message; an `undo` of exactly the last `do` removes this `do`.

        Args:
            message: The message.
        """
        sentence = apply_message(self.sentence, self.start, message)
        if message.get("undo") == []:
            return History(self.start, sentence)
        before, after = (frozenset(item.state.interventions) for item in (self.sentence, sentence))
        is_undo = "undo" in message
        if is_undo and self.steps and "do" in self.steps[-1] and after == self.nodes_before[-1]:
            return History(self.start, sentence, self.steps[:-1], self.nodes_before[:-1])
        step = {"undo": list(message["undo"])} if is_undo else {"do": copy.deepcopy(message["do"])}
        return History(self.start, sentence, (*self.steps, step), (*self.nodes_before, before))


def apply_message(
    sentence: Any, initial_sentence: Any, message: Mapping[str, Any], get_other: Callable[[], Any] | None = None
) -> Any:
    """Return the sentence after one message.

    Args:
        sentence: The sentence before the message.
        initial_sentence: The sentence before all messages, which is the result of `undo` without names.
        message: The message.
        get_other: Returns the sentence whose values the setting `other` copies; None without such a sentence.
    """
    match dict(message):
        case {"do": [*pairs]} if all(map(_is_pair, pairs)):
            return sentence.do({name: _get_value(sentence, name, setting, get_other) for name, setting in pairs})
        case {"undo": []}:
            return initial_sentence
        case {"undo": [*names]}:
            return sentence.undo(*names)
    raise BNetError("message", expected="do with names and settings, or undo with names", actual=dict(message))


def _is_pair(item: object) -> bool:
    """Whether an item is a pair of a name and a setting."""
    return isinstance(item, list | tuple) and len(item) == 2 and isinstance(item[0], str) and isinstance(item[1], dict)


def _get_value(sentence: Any, name: str, setting: Mapping[str, object], get_other: Callable[[], Any] | None) -> object:
    """Return the value of a setting; the value of another node is its value in the current sentence."""
    kind = setting.get("set")
    check_choice("setting", kind, SETTINGS)
    if kind == "state":
        return check_int("state", setting.get("state"), minimum=0)
    if kind == "other" and get_other is None:
        raise BNetError(name, expected="another sentence to patch from", actual="none", hint="Enter its words first")
    if kind == "other" and get_other is not None:
        return get_other()
    if kind == "zero":
        return Zero()
    source = setting.get("from")
    if find_family(sentence.ground, source).nodes == find_family(sentence.ground, name).nodes:
        raise BNetError(name, expected="the name of another node, whose value is patched in", actual=source)
    return sentence[source]
