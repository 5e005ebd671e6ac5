"""Runs of sentences whose heads are gated: many settings of the gates of one slice at once, or one for each sentence.

Of a slice all that its heads do not change is computed once for each sentence; a run begins at the gated heads.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from bnet_transformer._core.distributed import ALONE, Ranks
from bnet_transformer.compiler.course import Course, Request
from bnet_transformer.compiler.module import Module
from bnet_transformer.compiler.plan import Plan
from bnet_transformer.data import Batch
from bnet_transformer.inference.heads.likelihood import Around, Likelihood
from bnet_transformer.inference.heads.sites import Site

ROWS = 4096  # words that are computed at once: enough to keep a processor busy


@dataclass(frozen=True)
class Part:
    """Sentences of one length, which they are, what the sites have as they are, and the full output."""

    which: Tensor
    corpus: Batch
    values: Mapping[str, Tensor]
    full: Tensor | None

    @property
    def device(self) -> torch.device:
        """Where its tensors lie."""
        return next(iter(self.corpus.x.values())).device

    def __len__(self) -> int:
        return len(self.which)


@dataclass(frozen=True)
class Runs:
    """A net, its sites, the sentences (under torchrun this rank's share of them), and how likely a run is."""

    module: Module
    sites: tuple[Site, ...]
    corpus: Batch
    likelihood: Likelihood
    heads: int
    ranks: Ranks = ALONE

    @property
    def like(self) -> Tensor:
        """A parameter, whose type and device are those of the net."""
        found: Tensor = next(iter(self.module.store.values()))
        return found

    @torch.no_grad()
    def parts(self, words: int = ROWS, *, values: bool = False) -> Iterator[Part]:
        """The sentences in parts of about so many words, each run once with all heads on; the `values` of the sites
        are kept where they are asked for."""
        kept = dict.fromkeys(name for site in self.sites for name in (site.name, *site.beside) if values)
        around = isinstance(self.likelihood, Around)
        if not len(self.corpus):
            return
        for which, corpus in self.corpus.parts_by_length(self.module.network, words):
            names = [*kept, *([self.likelihood.families[0]] if around else [])]
            found = self._values(names, corpus) if names else {}
            full = found[self.likelihood.families[0]] if around else None
            yield Part(which, corpus, {name: found[name] for name in kept}, full)

    def _values(self, names: list[str], corpus: Batch) -> dict[str, Tensor]:
        course, plan = self.module.run(Request(tuple(names), corpus.x, training=False))
        self.likelihood.check(plan, self.module.network)
        own = zip(names, plan.wanted, strict=True)
        return {name: self.module.wanted(course, name, index) for name, index in own}

    @torch.no_grad()
    def settings(self, site: Site, part: Part, gates: Tensor) -> Tensor:
        """`log P` of each sentence of a part under each setting of a site's gates `[setting, head]`: in float64."""
        count = len(gates)
        corpus = part.corpus.repeat(count)
        a = part.values[site.name]
        a = a.expand(len(part), *a.shape[1:])  # one for all sentences, where it hangs on no word of theirs
        gates = gates.to(a)
        own = a.dim() - 1 - len(site.plates)
        gated = (a[:, None] * gates.reshape(1, count, *site.plates, *[1] * own)).flatten(0, 1)
        set_ = {name: self._each(part.values[name], count) for name in site.beside} | {site.name: gated}
        full = None if part.full is None else part.full.repeat_interleave(count, 0)
        return self._log(corpus, full, do=set_).reshape(len(part), count).double()

    @staticmethod
    def _each(value: Tensor, times: int) -> Tensor:
        """A value for each setting; that of one sentence is seen by all."""
        return value if len(value) == 1 else value.repeat_interleave(times, 0)

    def gated(self, part: Part, gates: Tensor) -> Tensor:
        """`log P` of each sentence of a part under its own gates in all sites, `[sentence, site, head]`."""
        told = {site.name: gates[:, k].reshape(len(gates), *site.plates) for k, site in enumerate(self.sites)}
        return self._log(part.corpus, part.full, gates=told)

    def _log(self, corpus: Batch, full: Tensor | None, **options: Mapping[str, Tensor]) -> Tensor:
        course, plan = self.course(corpus, **options)
        return self.likelihood.log(self.module, course, plan, corpus, full)

    def course(self, corpus: Batch, **options: Mapping[str, Tensor]) -> tuple[Course, Plan]:
        """A run as the likelihood asks for it."""
        course, plan = self.module.run(Request(self.likelihood.families, corpus.x, training=False, **options))  # type: ignore[arg-type]
        self.likelihood.check(plan, self.module.network)
        return course, plan

    def table(self, gates: Tensor, told: Callable[[int], None], memory: int) -> Tensor:
        """`log P` of each sentence of all ranks under each setting of a site's gates: `[site, sentence, setting]`."""
        found = torch.empty(len(self.sites), len(self.corpus), len(gates), dtype=torch.float64)
        width = self.width()
        for part in self.parts(self.words(gates), values=True):
            words = sum(x.shape[1] for x in part.corpus.x.values())
            most = max(1, min(ROWS, memory // width) // max(1, words * len(part)))
            for k, site in enumerate(self.sites):
                for start in range(0, len(gates), most):
                    some = slice(start, start + most)
                    found[k, part.which, some] = self.settings(site, part, gates[some]).cpu()
                    told(len(part) * len(gates[some]))
        return self.ranks.all_gather(found.transpose(0, 1)).transpose(0, 1) if self.ranks.world > 1 else found

    @staticmethod
    def words(gates: Tensor) -> int:
        """How many words of sentences go together, where each has so many settings."""
        return max(1, ROWS // len(gates))

    def fitting(self, memory: int) -> int:
        """How many words go together where slopes are asked for, and what every slice makes is kept."""
        return max(1, min(ROWS, memory // (self.width() * len(self.sites))))

    def width(self) -> int:
        """Bytes for each word of a run: a few of its widest values."""
        network = self.module.network
        sizes, members = network.graph.sizes, [m for m in network.members if m.family.words is not None]
        wide = max(math.prod(m.shape) * math.prod(sizes[p] for p in m.family.plates) for m in members)
        return 16 * wide * torch.finfo(network.floating).bits // 8
