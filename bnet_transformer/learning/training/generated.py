"""The result of `generate`: the new words, their log probabilities, and the drawn states of choices."""

from __future__ import annotations

import html
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from torch import Tensor

from bnet_transformer._core.saved_results import SavedResult

if TYPE_CHECKING:
    import pandas as pd


@dataclass(frozen=True)
class Generated(SavedResult):
    """The new words after each prompt, without the stop word.

    Attributes:
        ids: The ids of the new words of each prompt.
        words: The new words of each prompt.
        scores: The log probability of the new words of each prompt, including the stop word that ends them.
        texts: The text of the new words of each prompt: as the tokenizer of the net decodes their ids, or the words
            joined by spaces.
        log_probs: The log probability of each new word of each prompt, given the words before it.
        states: With `choices="draw"`: the drawn states of the latent choices, by node group, `[prompt, *plates]`, or
            `[prompt, *plates, word]` for choices of words. The last word has no states, because no word follows it. In
            shorter rows, the states after the last word are to be ignored.
    """

    _shapes = "ids words scores texts: any prompt; log_probs: any prompt?; states: {_} int prompt *_"

    ids: tuple[tuple[int, ...], ...]
    words: tuple[tuple[str, ...], ...]
    scores: tuple[float, ...]
    texts: tuple[str, ...]
    log_probs: tuple[tuple[float, ...], ...] = ()
    states: Mapping[str, Tensor] = field(default_factory=dict, repr=False, compare=False)

    def __len__(self) -> int:
        return len(self.ids)

    def __str__(self) -> str:
        return "\n".join(self.texts)

    def to_dataframe(self) -> pd.DataFrame:
        """Return one row for each prompt, with the columns `text`, `words` (the number of new words) and `score`."""
        import pandas as pd

        return pd.DataFrame({"text": self.texts, "words": list(map(len, self.ids)), "score": self.scores})

    def _repr_html_(self) -> str:
        rows = "".join(
            f"<tr><td>{html.escape(text)}</td><td>{score:.4f}</td></tr>"
            for text, score in zip(self.texts, self.scores, strict=True)
        )
        return f"<table><tr><th>words</th><th>log P</th></tr>{rows}</table>"
