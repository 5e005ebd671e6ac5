"""What a fit gives back: the fitted net, what is known of its parameters, and the questions that one asks of it."""

from __future__ import annotations

import html
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Generic

import torch
from torch import Tensor

from bnet_transformer.compiler import Module
from bnet_transformer.errors import BNetError, unknown, whole
from bnet_transformer.inference.exact import posterior
from bnet_transformer.inference.fit.corpus import Corpus, corpus_of, task_of_mixture, words_of_corpus
from bnet_transformer.inference.fit.heads import Heads, cosines, heads_of
from bnet_transformer.inference.fit.matching import Comparison, matched, overlap_of, rand_index
from bnet_transformer.inference.fit.objective import Objective, learned_of
from bnet_transformer.inference.fit.predictive import Check, checked, predicted
from bnet_transformer.network import Member, Network
from bnet_transformer.training.result import N

if TYPE_CHECKING:
    import arviz as az
    import pandas as pd

USED = 100  # draws of the posterior of which a predictive likelihood is the mean
AT_ONCE = 1024


@dataclass(frozen=True)
class Fit(Generic[N]):
    """A fitted net, and how it came to be.

    `net` has the fitted parameters: the best restart's (`map`, `em`), the means of the posterior (`svi`, `nuts`), which
    `samples` holds, `[chain, draw, *shape]`, tables as probabilities, heads matched between draws. `bounds` is the
    objective by step, per sentence; `measured` the held-out log evidence of a sentence, as `(step, restart, value)`.
    `log_likelihoods` is that of each sentence of the data under each draw; `choices` the approximate posterior of every
    choice, `[sentence, *plates, word, state]`, where they were sampled. `approximate` says what is not exact.
    """

    net: N
    method: str
    sentences: int
    judged_on: str
    restart: int = 0
    finished: bool = True
    approximate: str | None = None
    learned: tuple[str, ...] = field(default=(), repr=False)
    budget: int = field(default=2**16, repr=False)
    bounds: tuple[float, ...] = field(default=(), repr=False)
    measured: tuple[tuple[int, int, float], ...] = field(default=(), repr=False)
    samples: Mapping[str, Tensor] = field(default_factory=dict, repr=False)
    log_likelihoods: Tensor | None = field(default=None, repr=False)
    divergent: tuple[int, ...] = field(default=(), repr=False)
    choices: Mapping[str, Tensor] = field(default_factory=dict, repr=False)

    @property
    def network(self) -> Network:
        """The declaration with the fitted parameters."""
        return self.net if isinstance(self.net, Network) else self.net.network

    @property
    def selectors(self) -> tuple[str, ...]:
        """The selectors of heads: the choices that hang on no other node, and that something reads."""
        return tuple(member.family.name for member in self._selectors())

    @property
    def pi(self) -> Tensor:
        """`P(c)`, of the first selector; `theta` has them all."""
        if not self.selectors:
            raise BNetError("pi", expected="a net with a selector", got="one without")
        return self.theta[self._selectors()[0].owner]

    @property
    def theta(self) -> dict[str, Tensor]:
        """The tables of all choices by the node that owns them, `[*states of the parents, state]`."""
        graph, store = self.network.graph, self.network.parameters
        chosen = [m for m in self.network.members if m.tpm.kind == "discrete" and graph.out_of[m.family.index]]
        return {
            m.owner: store[f"{m.owner}.logits"].detach().softmax(-1) for m in chosen if f"{m.owner}.logits" in store
        }

    @property
    def atoms(self) -> dict[str, Tensor]:
        """The learned weights: matrices of heads and atoms, and what else was learned that is no table."""
        tables = {f"{owner}.logits" for owner in self.theta}
        return {name: self.network.parameters[name].detach() for name in self.learned if name not in tables}

    @property
    def heads(self) -> Heads:
        """The heads of the first selector."""
        return self.heads_of()

    def heads_of(self, selector: str | None = None) -> Heads:
        """The heads of a selector: usage, effective and dead heads, invariants."""
        return heads_of(self.network, self._selector(selector))

    def interval(self, name: str, share: float = 0.9) -> tuple[Tensor, Tensor]:
        """Between which values a parameter lies with a probability, from the samples of its posterior."""
        if not self.samples:
            raise BNetError("interval", expected="a fit with a posterior", got=self.method, allowed="svi, nuts")
        if name not in self.samples:
            raise unknown("parameter", name, self.samples)
        if not 0 < share < 1:
            raise BNetError("share", expected="a share between 0 and 1", got=share)
        low, high = (
            torch.quantile(self.samples[name].flatten(0, 1), q, dim=0) for q in ((1 - share) / 2, (1 + share) / 2)
        )
        return low, high

    def responsibilities(self, x: object, y: object, *, selector: str | None = None) -> Tensor:
        """`P(c | x, y)`: of each sentence `[sentence, head]`, or of each of its words `[sentence, word, head]`."""
        return self._responsibilities(corpus_of(self.network, (x, y)), self._selector(selector).family.name)

    def predict(self, x: object, *, readout: str | None = None) -> Tensor:
        """`P(y | x)` of a discrete readout, the mean of a real one: the choices summed out; mean over the samples."""
        member, corpus = self._readout(readout), self._words(x)
        networks = self._draws(USED)
        return torch.stack([predicted(net, member.family.name, corpus) for net in networks]).mean(0)

    def log_likelihood(self, data: object) -> Tensor:
        """`log P(y | x)` of each sentence, under the net; of a posterior, the log of the mean over its draws."""
        corpus = corpus_of(self.network, data)
        learned = learned_of(self.network, task_of_mixture(self.network).readouts, None, None)
        objective = Objective(self.network, learned, self.budget)
        parts = [corpus] if objective.of_corpus else corpus.parts(AT_ONCE)
        found = []
        with torch.no_grad():
            for net in self._draws(USED):
                found.append(torch.cat([objective.log_evidence(net.parameters, part) for part in parts]))
        return torch.stack(found).logsumexp(0) - torch.tensor(float(len(found))).log()

    def check(self, data: object, statistics: object = None, *, draws: int = 100, readout: str | None = None) -> Check:
        """Posterior predictive checks: statistics of the data beside those of so many draws of as many sentences."""
        corpus, member = corpus_of(self.network, data), self._readout(readout)
        nets = self._draws(whole("draws", draws))
        states = member.tpm.states if member.tpm.kind == "discrete" else None
        return checked(lambda k: nets[k % len(nets)], member.family.name, corpus, statistics, draws, states)

    def compare(self, other: Fit[Any], data: object, *, selector: str | None = None) -> Comparison:
        """This fit beside another on the same (held-out) sentences: heads matched, ARI, difference of likelihoods."""
        if not isinstance(other, Fit):
            raise BNetError("compare", expected="a Fit", got=other)
        corpus = corpus_of(self.network, data)
        a = self._responsibilities(corpus, self._selector(selector).family.name)
        b = other._responsibilities(corpus, other._selector(selector).family.name)
        match = matched(overlap := overlap_of(a, b))
        gain = self.log_likelihood(corpus) - other.log_likelihood(corpus)
        error = float(gain.double().std() / len(gain) ** 0.5) if len(gain) > 1 else float("nan")
        mine, theirs = self.heads_of(selector), other.heads_of(selector)
        return Comparison(
            match,
            overlap,
            rand_index(a.argmax(-1), b.argmax(-1)),
            float(gain.double().mean()),
            error,
            {k: _of_match(v, theirs.A[k], match) for k, v in mine.A.items() if k in theirs.A},
            {k: _of_match(v, theirs.OV[k], match) for k, v in mine.OV.items() if k in theirs.OV},
        )

    def to_arviz(self) -> az.InferenceData:
        """The samples as ArviZ's InferenceData: posterior, invariants of the labels of heads, log likelihoods."""
        from bnet_transformer.inference.fit.samples import to_arviz

        return to_arviz(self)

    def save(self, path: str | Path) -> None:
        """Write the fit to one safetensors file: the net, the samples, the measures; `bt.load` reads it."""
        from bnet_transformer.inference.fit.saved import save

        save(self, path)

    def to_dataframe(self) -> pd.DataFrame:
        """One row for each measure of each restart."""
        import pandas as pd

        return pd.DataFrame(self.measured, columns=["step", "restart", "log evidence of a sentence"])

    def _repr_html_(self) -> str:
        told = f"{self.method} of {self.sentences:,} sentences, {len(self.bounds)} steps, restart {self.restart}"
        told += f", judged on {self.judged_on}" + ("" if self.finished else ", interrupted")
        told += "" if self.approximate is None else f"; approximate: {self.approximate}"
        heads = self.heads._repr_html_() if self.selectors else ""
        return f"<p>{html.escape(repr(self.net))}<br>{html.escape(told)}</p>{heads}"

    def _selectors(self) -> list[Member]:
        graph = self.network.graph
        return [
            m
            for m in self.network.members
            if m.tpm.kind == "discrete" and not m.inputs and graph.out_of[m.family.index]
        ]

    def _selector(self, name: str | None) -> Member:
        known = {member.family.name: member for member in self._selectors()}
        if not known:
            raise BNetError("selector", expected="a net with a selector", got="one without")
        if name is None:
            return next(iter(known.values()))
        if name not in known:
            raise unknown("selector", name, known)
        return known[name]

    def _readout(self, name: str | None) -> Member:
        known = {member.family.name: member for member in task_of_mixture(self.network).readouts}
        if name is not None and name not in known:
            raise unknown("readout", name, known)
        return known[name] if name is not None else next(iter(known.values()))

    def _responsibilities(self, corpus: Corpus, selector: str) -> Tensor:
        module = Module(self.network).eval()
        of_corpus = self.network.member(selector).scope == "corpus"
        parts = [corpus] if of_corpus else corpus.parts(AT_ONCE)
        found = [posterior(module, selector, part.evidence, part.x, part.mask, budget=self.budget) for part in parts]
        return torch.cat(found)

    def _words(self, x: object) -> Corpus:
        """Sentences of which nothing is observed."""
        return x if isinstance(x, Corpus) else words_of_corpus(self.network, x)

    def _draws(self, most: int) -> list[Network]:
        """Nets of the posterior, evenly taken from its samples; the net itself where it has none."""
        if not self.samples:
            return [self.network]
        flat = {name: value.flatten(0, 1) for name, value in self.samples.items()}
        count = len(next(iter(flat.values())))
        places = torch.linspace(0, count - 1, min(most, count)).round().long().tolist()
        tables = {f"{owner}.logits" for owner in self.theta}
        return [
            self.network.with_parameters(
                {
                    **self.network.parameters,
                    **{name: value[k].log() if name in tables else value[k] for name, value in flat.items()},
                }
            )
            for k in places
        ]


def _of_match(a: Tensor, b: Tensor, match: tuple[int, ...]) -> Tensor:
    """The cosine of each head's matrix and that of its match; NaN where it has none."""
    table = cosines(a, b) if a.shape[1:] == b.shape[1:] else torch.full((len(a), len(b)), torch.nan)
    return torch.stack([table[h, m] if m >= 0 else table.new_tensor(torch.nan) for h, m in enumerate(match)])
