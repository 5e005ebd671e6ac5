"""Texts to learn from: sentences, and what is observed of them behind a tab; the vocabulary that they have."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import click

from bnet_transformer.cli import shared
from bnet_transformer.errors import BNetError

if TYPE_CHECKING:
    from bnet_transformer.bnet import BNet
    from bnet_transformer.files.checkpoint import Checkpoints

UNSEEN = "_"
OBSERVED = ("next", "words", "label")


@dataclass(frozen=True)
class Lines:
    """Sentences, and (`told`) what stands behind the tab of each, where there is one."""

    texts: tuple[str, ...]
    told: tuple[str, ...] | None

    @property
    def vocabulary(self) -> list[str]:
        """The words of the sentences, in the order in which they are met."""
        return list(dict.fromkeys(word for text in self.texts for word in text.split()))

    def observed(self, wanted: str | None) -> str:
        """What is observed of a sentence: its next words; behind a tab a word for each of its words, or a label."""
        if self.told is None:
            if wanted not in (None, "next"):
                raise BNetError("--observe", expected="lines with a tab, and what is observed behind it", got="none")
            return "next"
        if wanted == "next":
            raise BNetError("--observe next", expected="lines without a tab", got="what is observed behind one")
        each = [len(a.split()) == len(b.split()) for a, b in zip(self.texts, self.told, strict=True)]
        if wanted == "words" and not all(each):
            k = each.index(False)
            wanted_ = "as many words behind the tab as before it (_ for one that is not observed)"
            raise BNetError(f"sentence {k}", expected=wanted_, got=f"{self.texts[k]} | {self.told[k]}")
        return wanted or ("words" if all(each) and any(" " in text for text in self.texts) else "label")

    def labels(self, observed: str) -> list[str]:
        """The labels that are observed, in alphabetical order."""
        found = {part for told in self.told or () for part in (told.split() if observed == "words" else [told])}
        return sorted(found - {UNSEEN})

    def pairs(self, observed: str, known: Sequence[str] = ()) -> list[tuple[object, object]]:
        """Sentences with what is observed of each; `known` are the labels that are names, be they numbers."""
        if observed == "next":
            parted = [text.split() for text in self.texts]
            for words in parted:
                if len(words) < 2:
                    raise BNetError("sentence", expected="at least 2 words, the second to be told", got=" ".join(words))
            return [(words[:-1], words[1:]) for words in parted]
        whole = [told.split() if observed == "words" else told for told in self.told or ()]
        states = [_state(t, known) if isinstance(t, str) else [_state(each, known) for each in t] for t in whole]
        return list(zip(self.texts, states, strict=True))


def checkpoint_options() -> Callable[[shared.F], shared.F]:
    """When it is measured and kept, when it ends early, and how it goes on: `--patience` to `--changed`."""
    return shared.options(
        click.option("--patience", type=int, help="End after so many measures without a better one."),
        click.option("--every", type=int, help="Measure, and keep a checkpoint, every so many steps."),
        click.option("--checkpoint", "folder", help="A folder for checkpoints."),
        click.option("--resume", is_flag=True, help="Go on from the checkpoint, as it began."),
        click.option("--changed", is_flag=True, help="Go on with another rate, or number of steps, too."),
    )


def checkpoints_of(folder: str | None, *, resume: bool, changed: bool) -> Checkpoints | None:
    """The config of the options `--checkpoint`, `--resume` and `--changed`.

    Args:
        folder: The folder of `--checkpoint`.
        resume: `--resume`.
        changed: `--changed`.

    Returns:
        The config; None without a folder.

    Raises:
        BNetError: Where a run is to go on, and there is no folder.
    """
    from bnet_transformer.files.checkpoint import Checkpoints

    if folder is None:
        if resume or changed:
            raise BNetError("--resume", expected="--checkpoint with a folder", got="none")
        return None
    return Checkpoints(folder, "changed" if changed else resume)


def lines_of(told: Sequence[str], source: str | None) -> Lines:
    """The sentences of the command line or of a file, parted at the tab."""
    texts = shared.sentences_of(told, source)
    parted = [[part.strip() for part in text.split("\t")] for text in texts]
    if all(len(parts) == 1 for parts in parted):
        return Lines(tuple(texts), None)
    for k, parts in enumerate(parted):
        if len(parts) != 2 or not all(parts):
            got = f"{len(parts)} parts in sentence {k}"
            raise BNetError("SENTENCES", expected="one tab in each, or in none", got=got)
    return Lines(tuple(parts[0] for parts in parted), tuple(parts[1] for parts in parted))


def check_words(net: BNet) -> None:
    """Refuse to tell next words of text that a tokenizer parts, or that two stacks read."""
    if net.network.tokenizer is not None or len(net.network.graph.word_stacks) > 1:
        got = "a tokenizer" if net.network.tokenizer is not None else "several stacks"
        raise BNetError("--model", expected="a net of one stack that splits text on spaces", got=got, allowed="bt.fit")


def _state(part: str, known: Sequence[str]) -> object:
    """A label, or the number of a state; -1 for what is not observed."""
    if part in known:
        return part
    return -1 if part == UNSEEN else int(part) if shared.is_whole(part) else part
