"""The words of an axis without special tokens, with a note about what is not shown."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from bnet_transformer._core.arrays import FloatArray
from bnet_transformer._core.checks import check_choice
from bnet_transformer.errors import BNetError
from bnet_transformer.figures.special_tokens import describe_omission
from bnet_transformer.plots.canvas import Canvas


def select_words(
    canvas: Canvas, tokens: Sequence[str], flags: Sequence[bool], special: bool, masses: FloatArray | None = None
) -> list[int]:
    """The indices of the words to show: all, or with `special=False` those that are no special tokens.

    `masses` are the shares of attention that go to each word, `[..., j]`, with NaN for none; the note has the mean
    share that goes to the words that are not shown.
    """
    check_choice("special", special, (True, False))
    if special:
        return list(range(len(tokens)))
    if len(flags) != len(tokens):
        hint = "Compute the result from sentences, or select words by other options"
        raise BNetError(
            "special", expected="True: the special tokens of this result are unknown", actual=special, hint=hint
        )
    shown = [k for k, is_special in enumerate(flags) if not is_special]
    if not shown:
        raise BNetError("special", expected="words that are no special tokens", actual="all words are special")
    hidden = [k for k in range(len(tokens)) if flags[k]]
    if hidden:
        share = None if masses is None else float(np.nansum(masses[..., hidden], -1).mean())
        canvas.add_note(f"{describe_omission([tokens[k] for k in hidden], 'shown', share)}.")
    return shown
