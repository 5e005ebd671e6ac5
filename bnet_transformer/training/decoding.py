"""Choosing words one by one: greedy, by sampling, by beams."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from bnet_transformer.compiler import Module
from bnet_transformer.data.task import Task
from bnet_transformer.training.incremental import WordByWord, filled

COLD = 1e-37  # colder, the likeliest word is certain in every floating type; hotter than 1 / COLD all are equal


class Speaker(Protocol):
    """What tells the distribution of the next word, for some rows of words."""

    log_probs: Tensor

    def step(self, ids: Tensor) -> Tensor:
        """Each row gets a word; the log probabilities of the one after it."""

    def reorder(self, rows: Tensor) -> None:
        """Row r becomes what row `rows[r]` was."""

    def repeat(self, times: int) -> None:
        """Each row several times."""


class Anew:
    """A speaker that computes all words anew for each: what `WordByWord` must equal."""

    def __init__(
        self, module: Module, task: Task, x: Mapping[str, Tensor], mask: Mapping[str, Tensor] | None, readout: str
    ) -> None:
        self.module, self.x, self.mask, self.readout = module, dict(x), dict(mask or {}), readout
        self.stack = task.next_word or ""
        self.exact = task.words[self.stack].exact
        self._tell()

    def _tell(self) -> None:
        ids = self.x[self.stack]
        found = self.module({**self.x, self.stack: filled(ids, self.exact)}, self.mask or None, want=[self.readout])
        self.log_probs: Tensor = found[self.readout][:, ids.shape[1] - 1].log_softmax(-1)

    def step(self, ids: Tensor) -> Tensor:
        self.x[self.stack] = torch.cat([self.x[self.stack], ids[:, None]], 1)
        self._tell()
        return self.log_probs

    def reorder(self, rows: Tensor) -> None:
        self.x[self.stack] = self.x[self.stack][rows]

    def repeat(self, times: int) -> None:
        self.x = {stack: value.repeat_interleave(times, 0) for stack, value in self.x.items()}
        self.mask = {stack: value.repeat_interleave(times, 0) for stack, value in self.mask.items()}
        self.log_probs = self.log_probs.repeat_interleave(times, 0)


@dataclass(frozen=True)
class Prompts:
    """Where words are to be chosen: the prompts `[batch, word]`, their lengths, how many new words, which one ends."""

    ids: Tensor
    lengths: Tensor
    new: int
    stop: int | None

    @property
    def shortest(self) -> int:
        """The words that all prompts have."""
        return int(self.lengths.min())

    @property
    def end(self) -> int:
        """The words that the longest row may come to."""
        return int(self.lengths.max()) + self.new

    def forced(self, log_probs: Tensor, place: int) -> Tensor:
        """Within a prompt its own word is certain; `[batch, ..., states]`."""
        inside = place < self.lengths
        if not bool(inside.any()):
            return log_probs
        column = self.ids[:, min(place, self.ids.shape[1] - 1)]
        own = torch.full((len(column), log_probs.shape[-1]), -torch.inf, dtype=log_probs.dtype, device=column.device)
        own.scatter_(1, column[:, None], 0.0)
        shape = (-1, *[1] * (log_probs.dim() - 1))
        return torch.where(inside.reshape(shape), own.reshape(len(own), *[1] * (log_probs.dim() - 2), -1), log_probs)

    def said(self, rows: Tensor, place: int) -> Tensor:
        """Where the stop word, chosen at a place, ends a row: `rows` are the words chosen."""
        if self.stop is None:
            return torch.zeros_like(rows, dtype=torch.bool)
        return (rows == self.stop) & (place >= self.lengths)


Pick = Callable[[Tensor], Tensor]


def one_by_one(speaker: Speaker, prompts: Prompts, pick: Pick) -> tuple[list[list[int]], Tensor]:
    """Each word picked from its distribution; the new words of each row, and their log probability."""
    batch = len(prompts.ids)
    score = torch.zeros(batch, dtype=speaker.log_probs.dtype, device=prompts.ids.device)
    done = torch.zeros(batch, dtype=torch.bool, device=prompts.ids.device)
    length = torch.full_like(prompts.lengths, prompts.new)
    chosen: list[Tensor] = []
    for place in range(prompts.shortest, prompts.end):
        log_probs = prompts.forced(speaker.log_probs, place)
        word = pick(log_probs)
        score = score + torch.where(done, 0.0, log_probs.gather(1, word[:, None])[:, 0])
        chosen.append(word)
        said = prompts.said(word, place) & ~done
        length = torch.where(said, place - prompts.lengths, length)
        done = done | said | (place - prompts.lengths + 1 >= prompts.new)
        if bool(done.all()):
            break
        speaker.step(word)
    return _cut(torch.stack(chosen, 1), prompts, length), score


def by_beams(speaker: Speaker, prompts: Prompts, beams: int, penalty: float) -> tuple[list[list[int]], Tensor]:
    """The likeliest words among `beams` for each row, by `log P / ((5 + n) / 6)^penalty` of n words (Wu et al. 2016).

    A row ends when no live beam can come to a better score than its best ended one.
    """
    batch, states = speaker.log_probs.shape
    speaker.repeat(beams)
    device, first = prompts.ids.device, prompts.shortest
    score = torch.full((batch, beams), -torch.inf, dtype=speaker.log_probs.dtype, device=device)
    score[:, 0] = 0.0
    words = torch.zeros(batch, beams, prompts.end - first, dtype=torch.long, device=device)
    best = torch.full((batch,), -torch.inf, dtype=score.dtype, device=device)
    ended, total, length = words[:, 0].clone(), best.clone(), torch.zeros_like(prompts.lengths)
    done = torch.zeros(batch, dtype=torch.bool, device=device)
    start = torch.arange(batch, device=device)[:, None] * beams

    def offer(rows: Tensor, scores: Tensor, texts: Tensor, n: Tensor, least: int) -> None:
        """Take ended beams `[batch, beams]` of n words where they are better than the best so far."""
        nonlocal best, ended, total, length
        value, beam = (scores / _share(n, penalty)[:, None]).max(1)
        better = rows & (value > best)
        best = torch.where(better, value, best)
        total = torch.where(better, scores.gather(1, beam[:, None])[:, 0], total)
        ended = torch.where(better[:, None], texts[torch.arange(batch, device=device), beam], ended)
        length = torch.where(better, n - least, length)

    for place in range(first, prompts.end):
        n = place - prompts.lengths + 1
        live = ~done & (n >= 1)
        found = prompts.forced(speaker.log_probs.reshape(batch, beams, states), place)
        reached = score[:, :, None] + found
        if prompts.stop is not None:
            offer(live, reached[:, :, prompts.stop], words, n, 1)
            reached[:, :, prompts.stop].masked_fill_((n >= 1)[:, None], -torch.inf)
        score, flat = reached.flatten(1).topk(beams, 1)
        parent, word = flat // states, flat % states
        words = words.gather(1, parent[:, :, None].expand_as(words))
        words[:, :, place - first] = word
        offer(live & (n == prompts.new), score, words, n, 0)
        done = done | (n >= prompts.new) | (score[:, 0] / _share(n.clamp(min=prompts.new), penalty) <= best)
        if bool(done.all()):
            break
        rows = (start + parent).flatten()
        if not bool((rows == torch.arange(len(rows), device=device)).all()):
            speaker.reorder(rows)
        speaker.step(word.flatten())
    return _cut(ended, prompts, length), total


def _share(n: Tensor, penalty: float) -> Tensor:
    """The length penalty, `((5 + n) / 6)^penalty`."""
    return ((5 + n.clamp(min=0)).to(torch.float64) / 6) ** penalty


def _cut(chosen: Tensor, prompts: Prompts, length: Tensor) -> list[list[int]]:
    """The new words of each row, of all that were chosen from the shortest prompt on."""
    skip = (prompts.lengths - prompts.shortest).tolist()
    return [row[a : a + n] for row, a, n in zip(chosen.tolist(), skip, length.tolist(), strict=True)]


def sampler(temperature: float, top_k: int | None, top_p: float | None, seed: int, device: torch.device) -> Pick:
    """A word drawn from `P^(1/temperature)`, of the `top_k` likeliest, of the fewest with a share of `top_p`."""
    temperature = min(max(temperature, COLD), 1 / COLD)
    generator = torch.Generator(device).manual_seed(seed)

    def pick(log_probs: Tensor) -> Tensor:
        tempered = ((log_probs - log_probs.amax(-1, keepdim=True)) / temperature).log_softmax(-1)
        if top_k is not None and top_k < tempered.shape[-1]:
            least = tempered.topk(top_k, -1).values[:, -1:]
            tempered = tempered.masked_fill(tempered < least, -torch.inf).log_softmax(-1)
        if top_p is not None:
            ordered, places = tempered.sort(-1, descending=True)
            before = ordered.exp().cumsum(-1) - ordered.exp()
            past = (before >= top_p) & (before > 0)  # never the likeliest, however small the share
            tempered = tempered.masked_fill(past.gather(1, places.argsort(-1)), -torch.inf)
        return torch.multinomial(tempered.softmax(-1), 1, generator=generator)[:, 0]

    return pick


def greedy(log_probs: Tensor) -> Tensor:
    """The likeliest word."""
    return log_probs.argmax(-1)


def speaker_of(
    module: Module, task: Task, x: Mapping[str, Tensor], mask: Mapping[str, Tensor] | None, end: int, *, cached: bool
) -> Speaker:
    """A speaker for rows of at most `end` words."""
    if cached:
        return WordByWord(module, task, x, mask, end)
    return Anew(module, task, x, mask, task.readouts[0].family.name)
