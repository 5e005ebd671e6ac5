"""The page as a notebook widget: the same front end through anywidget, with a `do` that runs the net again.

The front end (`widget.js`) sends `{"id": n, "do": [[name, setting], ...]}` or `{"id": n, "undo": [name, ...]}`; an
empty list of names removes all interventions of the widget. `bnet_transformer.page` describes names and settings. The
answer is `{"id": n}`, after the traits of the new page, or `{"id": n, "error": text}`. Every view of the widget
receives the answer; the id belongs to one view. The traits `selected` and `view` are changed from both sides.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import anywidget
import traitlets

from bnet_transformer._core.checks import check_mapping, check_names
from bnet_transformer.errors import BNetError
from bnet_transformer.page.messages import History
from bnet_transformer.page.render import bundle_script, render_style_sheet
from bnet_transformer.page.view_state import check_selected, check_view

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
