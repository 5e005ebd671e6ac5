"""Special tokens that a figure leaves out: which words they are, and how much attention goes to them."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace

from bnet_transformer.errors import BNetError
from bnet_transformer.figures.attention_grid import StateAttention
from bnet_transformer.figures.labels import format_token
from bnet_transformer.graph import NodeSelection
from bnet_transformer.inference import SentenceState

MAX_NAMED_TOKENS = 4  # in a caption or a note


def exclude_words(
    tokens: Mapping[str, Sequence[str]], words: Mapping[str, Collection[int]], special: Mapping[str, Collection[int]]
) -> dict[str, list[int]]:
    """Return the selected words of each stack without special tokens; stacks without a selection stay without one."""
    remaining = {stack: [int(word) for word in selected] for stack, selected in words.items()}
    for stack, indices in special.items():
        selected = remaining.get(stack, range(len(tokens[stack])))
        remaining[stack] = [word for word in selected if word not in indices]
        if not remaining[stack]:
            name = f"the words of the stack {stack}" if stack else "the words"
            raise BNetError("special", expected="words that are no special tokens", actual=f"{name}: all are special")
    return remaining


def exclude_special_words(state: SentenceState, selection: NodeSelection) -> NodeSelection:
    """Return a selection of nodes without those of special tokens."""
    special = state.encoded.find_special_words(state.network)
    return replace(selection, words=exclude_words(state.tokens, selection.words, special))


def describe_special_words(
    tokens: Mapping[str, Sequence[str]],
    words: Mapping[str, Collection[int]],
    special: Mapping[str, Collection[int]],
    attentions: Sequence[StateAttention] = (),
) -> str:
    """Return a caption with the special tokens that are not drawn, and the share of attention that goes to them.

    The share is the mean of `P(j special | i)` over the drawn words i and over `attentions`.
    """
    if not any(special.values()):
        return ""
    hidden = [tokens[stack][k] for stack, ids in special.items() for k in sorted(ids)]
    masses = []
    for attn in attentions:
        rows = sorted(words[attn.target[0]])
        masses += attn.weights[rows][:, sorted(special.get(attn.source[0], ()))].sum(1).tolist()
    return describe_omission(hidden, "drawn", sum(masses) / len(masses) if masses else None)


def describe_omission(hidden: Sequence[str], verb: str, share: float | None = None) -> str:
    """Return a sentence without full stop: which special tokens are not drawn or shown, and their share of attention.

    Args:
        hidden: The token of each word that is left out.
        verb: The participle, "drawn" or "shown".
        share: The mean share of the attention of the other words that goes to them; None for no statement.

    >>> describe_omission(["[CLS]"], "drawn", 0.25)
    'The special token [CLS] is not drawn; 25.0% of the attention of the words drawn goes to it'
    """
    names = list(dict.fromkeys(map(format_token, hidden)))
    joined = " and ".join(filter(None, [", ".join(names[:-1]), names[-1]]))
    listed = f" {joined}" if len(names) <= MAX_NAMED_TOKENS else ""
    noun, be, pronoun = ("token", "is", "it") if len(hidden) == 1 else ("tokens", "are", "them")
    text = f"The special {noun}{listed} {be} not {verb}"
    return text if share is None else f"{text}; {share:.1%} of the attention of the words {verb} goes to {pronoun}"
