"""The page as a widget of notebooks: the same front end through anywidget, with a `do` that runs the net again.

`frontend/widget.js` is the other end. It sends `{"id": n, "do": [[name, setting], ...]}` or `{"id": n, "undo": [name, ...]}`
(no names: all that was set here), with names and settings as the package says them. The answer is `{"id": n}`, after
the traits that hold the new page, or `{"id": n, "error": text}`. All views of a widget hear it: an `n` is of one view.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import anywidget
import traitlets

from bnet_transformer._core.checks import check_choice, check_int
from bnet_transformer.errors import BNetError
from bnet_transformer.interventions import Zero
from bnet_transformer.page.render import bundle_script, render_style_sheet


class Widget(anywidget.AnyWidget):
    """The page of a sentence, live. `sentence` is the sentence as it stands, after what was clicked."""

    _esm = bundle_script("widget")
    _css = render_style_sheet()
    description = traitlets.Dict().tag(sync=True)
    buffer = traitlets.Bytes().tag(sync=True)

    def __init__(self, sentence: Any, describe: Callable[[Any], tuple[dict[str, Any], bytes]]) -> None:
        self.initial_sentence = self.sentence = sentence
        self._describe = describe
        description, buffer = describe(sentence)
        super().__init__(description=description, buffer=buffer)
        self.on_msg(self._handle_message)

    def _handle_message(self, _: object, content: object, __: object) -> None:
        """Do what the front end asks, show it, and say that it is done, or why not."""
        told = content if isinstance(content, Mapping) else {}
        answer: dict[str, object] = {"id": told.get("id")}
        try:
            sentence = apply_message(self.sentence, self.initial_sentence, told)
            description, buffer = self._describe(sentence)
        except Exception as error:
            self.send(answer | {"error": str(error) or type(error).__name__})
            if isinstance(error, BNetError):
                return
            raise  # a fault of the library or a stranger's TPM: the page is told, and the notebook's log
        self.sentence = sentence
        with self.hold_sync():
            self.description, self.buffer = description, buffer
        self.send(answer)


def apply_message(sentence: Any, initial_sentence: Any, message: Mapping[str, Any]) -> Any:
    """The sentence after one message; `initial_sentence` is the sentence before any."""
    match dict(message):
        case {"do": pairs}:
            return sentence.do({name: _setting_value(sentence, setting) for name, setting in pairs})
        case {"undo": []}:
            return initial_sentence
        case {"undo": names}:
            return sentence.undo(*names)
    raise BNetError("message", expected="do, with names and settings, or undo, with names", actual=dict(message))


def _setting_value(sentence: Any, setting: Mapping[str, object]) -> object:
    """What a node is set to; the value of another node is that of the sentence as it stands."""
    kind = setting.get("set")
    check_choice("setting", kind, ("zero", "node", "state"))
    if kind == "state":
        return check_int("state", setting.get("state"), minimum=0)
    return Zero() if kind == "zero" else sentence[setting.get("from")]
