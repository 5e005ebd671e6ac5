"""The page as a notebook widget: the same front end through anywidget, with a `do` that runs the net again.

The front end (`widget.js`) sends `{"id": n, "do": [[name, setting], ...]}` or `{"id": n, "undo": [name, ...]}`; an
empty list of names removes all interventions of the widget. `bnet_transformer.page` describes names and settings. The
answer is `{"id": n}`, after the traits of the new page, or `{"id": n, "error": text}`. Every view of the widget
receives the answer; the id belongs to one view.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import anywidget
import traitlets

from bnet_transformer.errors import BNetError
from bnet_transformer.page.messages import apply_message
from bnet_transformer.page.render import bundle_script, render_style_sheet


class Widget(anywidget.AnyWidget):
    """The page of a sentence in a notebook.

    Where no widget runs, such as on GitHub or in a file of nbconvert without the widget's state, the figure of the
    sentence is shown.

    Args:
        sentence: The sentence that the page shows initially.
        describe: Returns the description and the buffer of the page of a sentence.
        draw: Returns the SVG of a sentence.

    Attributes:
        sentence: The current sentence, with the interventions made in the page.
    """

    _esm = bundle_script("widget")
    _css = render_style_sheet()
    description = traitlets.Dict().tag(sync=True)
    buffer = traitlets.Bytes().tag(sync=True)

    def __init__(
        self, sentence: Any, describe: Callable[[Any], tuple[dict[str, Any], bytes]], draw: Callable[[Any], str]
    ) -> None:
        self.initial_sentence = self.sentence = sentence
        self._describe, self._draw = describe, draw
        description, buffer = describe(sentence)
        super().__init__(description=description, buffer=buffer)
        self.on_msg(self._handle_message)

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
            sentence = apply_message(self.sentence, self.initial_sentence, message)
            description, buffer = self._describe(sentence)
        except Exception as error:
            self.send(answer | {"error": str(error) or type(error).__name__})
            if isinstance(error, BNetError):
                return
            raise  # an error of the library or of a user's TPM is also shown in the log of the notebook
        self.sentence = sentence
        with self.hold_sync():
            self.description, self.buffer = description, buffer
        self.send(answer)
