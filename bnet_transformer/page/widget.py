"""The page as a notebook widget, the messages of its front end, and the state of its view.

The front end (`widget.js`) sends `{"id": n, "do": [[name, setting], ...]}` or `{"id": n, "undo": [name, ...]}`; an
empty list of names removes all interventions of the widget. `bnet_transformer.page` describes names and settings. The
answer is `{"id": n}`, after the traits of the new page, or `{"id": n, "error": text}`. Every view of the widget
receives the answer; the id belongs to one view. The traits `selected` and `view` are changed from both sides.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import anywidget
import traitlets

from bnet_transformer._core.checks import check_choice, check_float, check_int, check_mapping, check_names
from bnet_transformer._core.naming import join_name
from bnet_transformer.errors import BNetError
from bnet_transformer.graph import GroundGraph, find_family
from bnet_transformer.interventions import Zero
from bnet_transformer.page.html import bundle_script, render_style_sheet

# --------------------------------------------------------------------------------------------------------------------
# The messages with which the front end intervenes: `do` with names and settings, and `undo` with names.
#
# The page of a widget and the live page send them. `bnet_transformer.page` describes names and settings.


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


# --------------------------------------------------------------------------------------------------------------------
# The view of the page as JSON: the selected node, and the settings that differ from those of the options.
#
# `frontend/view_state.js` has the same fields. In a link, it ignores invalid fields; here they are errors.


SWITCHES = ("all_words", "unfold_heads", "show_weights", "show_special")
HIGHLIGHTS = ("", "parents", "children", "ancestors", "descendants", "blanket")


def check_selected(ground: GroundGraph, name: object) -> str | None:
    """Return the name of a selected node, or None; a star may replace the index of each plate: `a_0_*_2`.

    Args:
        ground: The graph of the sentence.
        name: The name.
    """
    if name is None:
        return None
    if not isinstance(name, str) or "*" not in name:
        return ground.name(ground.id(name))
    try:
        find_family(ground, name)
    except BNetError as error:
        raise type(error)("selected", **{**error.parts, "actual": repr(name)}) from None
    (group, index), *more_groups = ground.template.match_groups(name, ground.word_counts)
    is_word_open = group.word_stack is not None and index[-1] is None
    if more_groups or not ground.template.has_all_indices(name, group) or is_word_open:
        first = next(ground.iter_names(group))
        expected = "the name of a node, or stars for the indices of its plates"
        hint = f"A star cannot replace a word; try {first}"
        raise BNetError("selected", expected=expected, actual=repr(name), hint=hint)
    sizes = zip(index, ground.shapes[group.index], strict=True)
    return join_name(group.name, ["*" if i is None and size > 1 else i or 0 for i, size in sizes])


def check_view(view: object, ground: GroundGraph, description: Mapping[str, Any]) -> dict[str, Any]:
    """Return the settings of a view as JSON.

    Args:
        view: The settings, by name.
        ground: The graph of the sentence.
        description: The description of the page.

    Raises:
        BNetError: A setting is unknown, or has a value that the page does not have.
    """
    fields, groups, attention = check_mapping("view", view), description["groups"], description["attention"]
    count = max(description["plate_sizes"].get("head", 1), *(item["num_plates"] for item in attention), 1)
    heads = range(count) if description["heads"] is None else description["heads"]
    options: dict[str, Sequence[object]] = {
        **{"unfolded": list_sections(description), "head": ["mean", "all", *heads], "highlight": HIGHLIGHTS},
        **dict.fromkeys(SWITCHES, (True, False)),
    }
    check_names("setting of the view", fields, [*options, "states", "min_weight", "top"])
    for name, value in fields.items():
        if name == "unfolded" and not isinstance(value, list | tuple | range):
            raise BNetError(name, expected="a list of slices", actual=value)
        for item in value if name == "unfolded" else [value] if name in options else ():
            try:
                check_choice(name, item, options[name])
            except BNetError as error:  # quotes, because "2" is not head 2
                raise BNetError(name, **{**error.parts, "actual": repr(item)}) from None
    checked: dict[str, Any] = {**fields}
    if "unfolded" in fields:
        checked["unfolded"] = list(fields["unfolded"])
    if "top" in fields:
        checked["top"] = check_int("top", fields["top"], minimum=0)
    if "min_weight" in fields:
        checked["min_weight"] = check_float("min_weight", fields["min_weight"], minimum=0)
        if checked["min_weight"] > 1:
            raise BNetError("min_weight", expected="a number from 0 to 1", actual=fields["min_weight"])
    if fields.get("states") is not None:
        # A selector that is set has no choices, but its entry is valid: it applies again after `undo`.
        selectors = [group for group in ground.template.groups if groups[group.index]["is_selector"]]
        choices: dict[str, int | None] = {name: None for group in selectors for name in ground.iter_names(group)}
        choices |= {name: count for item in attention for name, count in item["choices"]}
        checked["states"] = _check_states(choices, fields["states"])
    return checked


def list_sections(description: Mapping[str, Any]) -> list[int | str]:
    """Return the names of the slices that can be unfolded: the step of a slice, after the name of its stack."""
    groups = [g for g in description["groups"] if not g["is_state"] and g["step"] is not None and not g["depth"]]
    return list(dict.fromkeys(f"{g['stack']}:{g['step']}" if g["stack"] else int(g["step"]) for g in groups))


def _check_states(choices: Mapping[str, int | None], value: object) -> dict[str, int]:
    """Return the state of each selector whose attention is shown."""
    states = check_mapping("states", value)
    check_names("selector", states, list(choices))
    result = {name: check_int(name, state, minimum=0) for name, state in states.items()}
    for name, state in result.items():
        if (count := choices[name]) is not None and state >= count:
            raise BNetError(name, expected=f"a state from 0 to {count - 1}", actual=state)
    return result


def _check_probability(value: object) -> float:
    """Return the minimum P(j | i) that is drawn."""
    number = check_float("min_weight", value, minimum=0)
    if number > 1:
        raise BNetError("min_weight", expected="a number from 0 to 1", actual=value)
    return number


STATE_FIELDS = ("steps", "selected", "view")


@dataclass(frozen=True)
class Page:
    """A sentence, the messages that lead to it, and its page: a description and a buffer."""

    history: History
    description: dict[str, Any]
    buffer: bytes


class CheckedTrait(traitlets.Any):
    """A trait whose validator is also called for None, which traitlets would accept."""

    allow_none = False


class Widget(anywidget.AnyWidget):
    """The page of a sentence in a notebook.

    Where no widget runs, such as on GitHub or in a file of nbconvert without the widget's state, the figure of the
    sentence is shown.

    `sentence`, `selected` and `view` are traits: `w.observe(f, "selected")` calls `f` after each change, and an invalid
    value raises a `BNetError` and changes nothing. All views of the widget show the same state.

    Args:
        sentence: The sentence that the page shows initially.
        describe: Returns the description and the buffer of the page of a sentence.
        draw: Returns the SVG of a sentence.

    Attributes:
        sentence: The current sentence, with the interventions made in the page. A sentence that is assigned must have
            the same nodes and words; the page then starts at it, and its `undo all` returns to it.
        selected: The name of the selected node, or None. A star stands for all indices of a plate: `"a_0_*_2"` is
            word 2 in all heads of `a_0`.
        view: The settings of the page that differ from those of the options of `Sentence.widget`, such as
            `{"head": 2, "unfolded": [0]}`.
    """

    _esm = bundle_script("widget")
    _css = render_style_sheet()
    description = traitlets.Dict().tag(sync=True)
    buffer = traitlets.Bytes().tag(sync=True)
    sentence = CheckedTrait()
    selected = traitlets.Any(None, allow_none=True).tag(sync=True)
    view = CheckedTrait().tag(sync=True)

    def __init__(
        self, sentence: Any, describe: Callable[[Any], tuple[dict[str, Any], bytes]], draw: Callable[[Any], str]
    ) -> None:
        self._describe, self._draw = describe, draw
        self._page = self._next_page = Page(History(sentence, sentence), *describe(sentence))
        super().__init__(
            sentence=sentence, description=self._page.description, buffer=self._page.buffer, selected=None, view={}
        )
        self.on_msg(self._handle_message)

    @property
    def state(self) -> dict[str, Any]:
        """The state of the page as JSON; assign it to a widget of the same sentence to show the same page.

        Returns:
            `"steps"`, the interventions made in the page since the sentence that Python set, in their order;
            `"selected"` and `"view"`, as the traits. In a state that is assigned, an absent entry has its initial
            value.
        """
        return copy.deepcopy({"steps": list(self._page.history.steps), "selected": self.selected, "view": self.view})

    @state.setter
    def state(self, state: Mapping[str, Any]) -> None:
        fields = check_mapping("state", state)
        check_names("entry of the state", fields, STATE_FIELDS)
        steps = fields.get("steps", [])
        if not isinstance(steps, list | tuple):
            raise BNetError("steps", expected="a list of steps", actual=steps)
        history = History(self._page.history.start, self._page.history.start)
        for step in steps:
            history = history.apply(check_mapping("step", step))
        page = Page(history, *self._describe(history.sentence))
        selected = check_selected(history.sentence.ground, fields.get("selected"))
        view = check_view(fields.get("view"), history.sentence.ground, page.description)
        with self.hold_sync():
            self._show_page(page)
            self.selected, self.view = selected, view

    def _show_page(self, page: Page) -> None:
        """Set the traits to those of a page."""
        self._page = self._next_page = page
        with self.hold_sync():
            self.description, self.buffer = page.description, page.buffer
            self.sentence = page.history.sentence

    @traitlets.validate("sentence")
    def _validate_sentence(self, proposal: Any) -> Any:
        """Describe the page of a sentence that Python sets."""
        sentence, current = proposal["value"], self._page
        if sentence is self._next_page.history.sentence:
            return sentence
        if not isinstance(sentence, type(current.history.sentence)):
            raise BNetError("sentence", expected="a Sentence, such as w.sentence.do(...)", actual=sentence)
        page = Page(History(sentence, sentence), *self._describe(sentence))
        if get_structure(page.description) != get_structure(current.description):
            hint = "For another sentence or net, use its method widget()"
            expected = "a sentence with the nodes and the words of this widget"
            raise BNetError("sentence", expected=expected, actual=sentence, hint=hint)
        self._next_page = page
        return sentence

    @traitlets.observe("sentence")
    def _show_next_page(self, _: object) -> None:
        """Show the page of a sentence that Python set."""
        if self._next_page is not self._page:
            self._show_page(self._next_page)

    @traitlets.validate("selected")
    def _validate_selected(self, proposal: Any) -> str | None:
        """Return the name of the selected node in its usual form."""
        return check_selected(self._page.history.sentence.ground, proposal["value"])

    @traitlets.validate("view")
    def _validate_view(self, proposal: Any) -> dict[str, Any]:
        """Return the settings of the view."""
        if proposal["value"] is None:
            raise BNetError("view", expected="a mapping of settings, {} for those of the options", actual=None)
        return check_view(proposal["value"], self._page.history.sentence.ground, self._page.description)

    def _repr_mimebundle_(self, **options: Any) -> tuple[dict[str, Any], dict[str, Any]]:
        """The view of the widget, and the figure of the current sentence as SVG."""
        content: Any = super()._repr_mimebundle_(**options) or {}  # data, or data and metadata
        data, metadata = content if isinstance(content, tuple) else (content, {})
        return {**data, "image/svg+xml": self._draw(self.sentence), "text/plain": repr(self.sentence)}, dict(metadata)

    def _handle_message(self, _: object, content: object, __: object) -> None:
        """Run a message of the front end, update the traits and send the answer, which is an error if it fails."""
        message = content if isinstance(content, Mapping) else {}
        answer: dict[str, object] = {"id": message.get("id")}
        try:
            history = self._page.history.apply(message)
            page = Page(history, *self._describe(history.sentence))
        except Exception as error:
            self.send(answer | {"error": str(error) or type(error).__name__})
            if isinstance(error, BNetError):
                return
            raise  # an error of the library or of a user's TPM is also shown in the log of the notebook
        self._show_page(page)
        self.send(answer)


def get_structure(description: Mapping[str, Any]) -> tuple[object, ...]:
    """The nodes and the words of a page."""
    return [(group["name"], group["dims"]) for group in description["groups"]], description["stacks"]
