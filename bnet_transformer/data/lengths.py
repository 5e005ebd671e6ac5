"""The sentences of a question about heads, in parts of equal length: no padding is computed."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace

import torch
from torch import Tensor

from bnet_transformer.data.batch import Evidence
from bnet_transformer.data.corpus import Corpus, corpus_of, words_of_corpus
from bnet_transformer.data.task import check_has_words, task_of
from bnet_transformer.errors import BNetError
from bnet_transformer.network import Network


def sentences_of(network: Network, data: object, *, seen: bool) -> Corpus:
    """Sentences with what is observed of them, where they tell it and it is wanted (`seen`).

    Pairs tell it, tuples of two or mappings; so do the sentences of a net that tells the next word.
    """
    check_has_words(network, "sentences")
    task = task_of(network, likelihood=False)
    if isinstance(data, Corpus):
        return data.like(network)
    paired = task.readouts and _is_paired(data, set(task.stacks))
    if seen and (paired or (task.next_word is not None and len(task.stacks) == 1)):
        return corpus_of(network, data, "sentences", option=None, task=None if paired else task, told=True)
    if paired:
        raise BNetError("sentences", expected="sentences alone, where sigma= or output= asks for the output of the net",
                        got="pairs of sentences and what is observed of them")  # fmt: skip
    return words_of_corpus(network, data, told=True)


def _is_paired(data: object, stacks: set[str]) -> bool:
    """True for pairs, or mappings that name more than the stacks."""
    if isinstance(data, tuple):
        return len(data) == 2
    if not isinstance(data, list) or not data:
        return False
    return all((isinstance(each, tuple) and len(each) == 2)
               or (isinstance(each, Mapping) and not set(each) <= stacks) for each in data)  # fmt: skip


def parts(network: Network, corpus: Corpus, words: int) -> Iterator[tuple[Tensor, Corpus]]:
    """Sentences of one length, of about so many words in all, with their numbers."""
    lengths = torch.stack([_lengths(corpus, stack) for stack in corpus.x], 1)
    kinds, kind = lengths.unique(dim=0, return_inverse=True)
    for k, length in enumerate(kinds.tolist()):
        which = (kind == k).nonzero()[:, 0]
        size = max(1, words // max(1, sum(length)))
        for some in which.split(size):
            yield some, cut(network, corpus.take(some), dict(zip(corpus.x, length, strict=True)))


def _lengths(corpus: Corpus, stack: str) -> Tensor:
    """How many words each sentence has."""
    x = corpus.x[stack]
    if corpus.mask is None or stack not in corpus.mask:
        return torch.full((len(x),), x.shape[1])
    return corpus.mask[stack].long().sum(-1).cpu()


def cut(network: Network, corpus: Corpus, lengths: Mapping[str, int]) -> Corpus:
    """Sentences of one length without their padding."""

    def of(name: str, value: Tensor | None) -> Tensor | None:
        family = network.graph.family(name)
        if value is None or family.words is None:
            return value
        return value.narrow(1 + len(family.plates), 0, lengths[family.words])

    evidence = {}
    for name, told in corpus.evidence.items():
        value = of(name, told.value)
        assert value is not None
        evidence[name] = Evidence(value, of(name, told.observed))
    x = {stack: value[:, : lengths[stack]] for stack, value in corpus.x.items()}
    return Corpus(x, None, evidence)


def repeated(corpus: Corpus, times: int) -> Corpus:
    """Each sentence several times, one after another."""
    if times == 1:
        return corpus

    def of(value: Tensor) -> Tensor:
        return value.repeat_interleave(times, 0)

    evidence = {
        name: Evidence(of(told.value), None if told.observed is None else of(told.observed))
        for name, told in corpus.evidence.items()
    }
    return replace(corpus, x={stack: of(value) for stack, value in corpus.x.items()}, evidence=evidence)
