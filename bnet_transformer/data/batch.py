"""Sentences of any lengths as one batch of tensors: padded, with a mask of the words that are there."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from bnet_transformer.data.encode import EncodedSentence, encode_sentence, family_of_words
from bnet_transformer.errors import BNetError
from bnet_transformer.network import Network


@dataclass(frozen=True)
class Evidence:
    """What was seen of a family: values `[batch, *plates, word, *shape]`, and where (`observed`; all by default)."""

    value: Tensor
    observed: Tensor | None = None


@dataclass(frozen=True)
class Batch:
    """Sentences as the tensors that a module takes: `x` and `given` padded, `mask` true where a word is.

    Where there are several stacks, `x` and `mask` are mappings from stack, which are empty in a net without words. What
    stands at absent words is never read.
    """

    sentences: tuple[EncodedSentence, ...]
    x: Tensor | dict[str, Tensor]
    mask: Tensor | dict[str, Tensor]
    given: dict[str, Tensor]


def sentences_to_batch(network: Network, sentences: Sequence[object], pairs: Sequence[object] | None = None) -> Batch:
    """Sentences of any lengths, each as `encode_sentence` reads it, padded to the longest."""
    if isinstance(sentences, str) or not isinstance(sentences, Sequence) or not len(sentences):
        raise BNetError("sentences", expected="a list of sentences, at least one", got=sentences)
    several = isinstance(pairs, Sequence) and not isinstance(pairs, str)
    if pairs is not None and not (several and len(pairs) == len(sentences)):
        got = len(pairs) if several else pairs
        raise BNetError("pairs", expected=f"{len(sentences)}, one for each sentence", got=got)
    read = [
        encode_sentence(network, said, pair=None if pairs is None else pairs[k]) for k, said in enumerate(sentences)
    ]
    values = {name: _padded(network, name, [each.given[name] for each in read]) for name in read[0].given}
    x: dict[str, Tensor] = {}
    mask: dict[str, Tensor] = {}
    for stack in network.graph.word_stacks:
        main = family_of_words(network, stack, {})
        if main is not None:
            x[stack] = values.pop(main.family.name)
        counts = torch.tensor([each.words[stack] for each in read])
        mask[stack] = (torch.arange(int(counts.max())) < counts[:, None]).to(network.device)
    if len(mask) != 1:
        return Batch(tuple(read), x, mask, values)
    (stack,) = mask
    if stack not in x:
        raise BNetError("batch", expected="a net whose words are given", got="one without a node for them")
    return Batch(tuple(read), x[stack], mask[stack], values)


def _padded(network: Network, name: str, values: Sequence[Tensor]) -> Tensor:
    """Values of one `Given` family, `[batch, *plates, word, *shape]`, zero where a sentence has ended."""
    family = network.member(name).family
    if family.words is None:
        return torch.stack(list(values))
    axis = len(family.plates)
    shape = list(values[0].shape)
    shape[axis] = max(value.shape[axis] for value in values)
    found = values[0].new_zeros(len(values), *shape)
    for row, value in zip(found, values, strict=True):
        row.narrow(axis, 0, value.shape[axis]).copy_(value)
    return found
