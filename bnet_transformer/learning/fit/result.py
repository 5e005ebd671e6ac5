"""What a fit gives back: the fitted net, what is known of its parameters, and the questions that one asks of it."""

from __future__ import annotations

import html
import math
import os
import tempfile
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Generic, cast

import torch
from torch import Tensor

from bnet_transformer._core import files
from bnet_transformer._core.checks import check_fraction as check_share, check_int, check_mapping
from bnet_transformer._core.distributed import DistributedContext, distributed_context, is_distributed
from bnet_transformer._core.memory import translate_memory_errors
from bnet_transformer._core.torch_context import enable_gradients, fork_torch_rng, seed_rngs
from bnet_transformer.bridges.pyro import PyroModel
from bnet_transformer.compiler import CompiledModule, ExecutionRequest
from bnet_transformer.compiler.execution_state import gather_parents
from bnet_transformer.data import Batch, read_batch
from bnet_transformer.data.task import infer_fit_task
from bnet_transformer.declare import Network, NodeSpec, as_network, io
from bnet_transformer.errors import BNetError, BudgetError, FileError, UnsupportedError, unknown_name_error
from bnet_transformer.inference.exact import (
    eliminate_choices,
    get_batch_size,
    get_full_shape,
    has_posterior_dim,
    posterior,
)
from bnet_transformer.inference.factors import Factor, check_elimination_budget, find_ancestor_choices, log_prior
from bnet_transformer.learning.fit import head_summary as heads
from bnet_transformer.learning.fit.head_summary import Comparison, Heads, find_selectors, samples_to_parameters
from bnet_transformer.learning.fit.problem import LOG_EVIDENCE, FitObjective, select_learnable
from bnet_transformer.learning.training import single_process
from bnet_transformer.learning.training.loop import N
from bnet_transformer.reference import BUDGET

if TYPE_CHECKING:
    import arviz as az
    import pandas as pd

MAX_POSTERIOR_DRAWS = 100  # draws of the posterior of which predictions, responsibilities and likelihoods are the means
SENTENCES_PER_PART = 1024
MISSING_OPTION = "bt.fit(..., missing=True)"  # its questions take NaN as it does
FORMAT, VERSION, FILE_DESCRIPTION = "bnet_transformer fit", 1, "a fit that save wrote"
HEADER_FIELDS = (
    *("method", "sentences", "evaluated_on", "criterion", "restart", "finished", "approximate"),
    *("learned", "budget", "missing", "divergent", "matched", "effective_sample_size"),
)
FILE_KEYS = {"evaluated_on": "judged_on", "criterion": "judged_by"}  # fields that have another key in files and JSON
MAX_LIKELIHOOD_NUMEL = 2**26  # numbers of a table of log likelihoods that is still made


@dataclass(frozen=True)
class Check:
    """Statistics of a `readout` of the data beside those of draws of the net; `p` is the share of draws above it, ties
    halved."""

    observed: Mapping[str, float]
    mean: Mapping[str, float]
    spread: Mapping[str, float]
    p: Mapping[str, float]
    readout: str = ""

    def to_dataframe(self) -> pd.DataFrame:
        """One row for each statistic."""
        import pandas as pd

        columns = {"observed": self.observed, "mean": self.mean, "spread": self.spread, "p": self.p}
        return pd.DataFrame(columns).rename_axis(self.readout or None)

    def _repr_html_(self) -> str:
        told = html.escape(f"posterior predictive checks of {self.readout}")
        return f"<div>{told}{self.to_dataframe().to_html()}</div>"


@dataclass(frozen=True)
class Fit(Generic[N]):
    """A fitted net, and how it came to be.

    `net` has the fitted parameters: the best restart's (`map`, `em`), the mean of the guide (`svi`), a draw that stands
    for all (`nuts`: its tables and invariants are nearest their means). `samples` holds the posterior, `[chain, draw,
    *shape]`, tables as probabilities; `matched` names the selectors whose heads are in one order in all draws, those of
    which no order is likelier than another. `statistics` is what NUTS tells of each draw, `[chain, draw]`. `bounds` is
    the objective by step, per sentence. `measured` holds what the fit was judged by, per sentence, as `(step, restart,
    value)`, on the sentences `evaluated_on`. `criterion` says what that is: of `map` and `em` the log evidence of held-out
    sentences, else the log posterior density (the log prior up to a constant), which is the log evidence where there is
    no prior. `choices` is the approximate posterior of every choice, `[sentence, *plates, word, state]`, where they
    were sampled. `effective_sample_size` is that of the weights of importance sampling. `approximate` says what is not
    exact. `data` is what it was fitted to, which `save` leaves out.
    """

    net: N
    method: str
    sentences: int
    evaluated_on: str
    restart: int = 0
    finished: bool = True
    approximate: str | None = None
    learned: tuple[str, ...] = field(default=(), repr=False)
    budget: int = field(default=BUDGET, repr=False)
    bounds: tuple[float, ...] = field(default=(), repr=False)
    measured: tuple[tuple[int, int, float], ...] = field(default=(), repr=False)
    samples: Mapping[str, Tensor] = field(default_factory=dict, repr=False)
    divergent: tuple[int, ...] = field(default=(), repr=False)
    choices: Mapping[str, Tensor] = field(default_factory=dict, repr=False)
    missing: bool = field(default=False, repr=False)
    data: Batch | None = field(default=None, repr=False, compare=False)
    statistics: Mapping[str, Tensor] = field(default_factory=dict, repr=False)
    matched: tuple[str, ...] = field(default=(), repr=False)
    criterion: str = LOG_EVIDENCE
    known_likelihoods: Tensor | None = field(default=None, repr=False)
    effective_sample_size: float | None = field(default=None, repr=False)
    _likelihood_cache: dict[bool, Tensor | None] = field(default_factory=dict, init=False, repr=False, compare=False)

    @classmethod
    def from_pyro(
        cls,
        net: N,
        data: object,
        result: object,
        *,
        sites: Mapping[str, str] | None = None,
        arguments: tuple[object, ...] = (),
        num_samples: int = 500,
        missing: bool = False,
        budget: int = 2**16,
        seed: int = 0,
    ) -> Fit[N]:
        """The fit that a result of Pyro is: of your own model, guide or kernel on `net.pyro()`.

        A site is one of a parameter where it has its name (`"W_v_0.values"`), its name with `_` for `.`
        (`"W_v_0_values"`), or the name that `net.pyro()` gives to a table (`"theta_c"`, of `"c.logits"`). Tables are
        probabilities. Parameters without a site stay as the net has them. Sites of choices, such as `"c"`, are ignored:
        given the parameters the fit sums choices out exactly. Heads that no part of the net names are put in the order
        of the likeliest draw, as those of NUTS are.

        Args:
            net: The net of which `net.pyro()` was fitted.
            data: The sentences and what was observed of them, in the forms of `bt.fit`.
            result: One of: `pyro.infer.MCMC` after its run; samples by site, `[draw, *shape]` or
                `[chain, draw, *shape]`; a guide, of which `num_samples` are drawn (of one of Delta sites, such as
                `AutoDelta`, the point); `pyro.infer.Importance` after its run, whose weighted draws are resampled
                systematically to `num_samples`.
            sites: Site -> parameter, for sites of other names.
            arguments: What a guide is called with.
            num_samples: Draws of a guide, or of resampling.
            missing: As for `bt.fit`.
            budget: As for `bt.fit`.
            seed: The seed of a guide's draws and of resampling.

        Returns:
            The fit, with `method="pyro"`. `approximate` says what is not exact, and `effective_sample_size` how many
            draws weighted ones count as.

        Raises:
            BNetError: Where a site or its values do not match the net; names of sites have near names.

        >>> import torch
        >>> import bnet_transformer as bt
        >>> net = bt.bayesuvius(4, heads=2, vocabulary=["the", "cat"], observe=bt.tpm.Categorical(2), prior=1.0)
        >>> data = [("the cat", "cat the"), ("cat the", "the cat")]
        >>> draws = torch.distributions.Dirichlet(torch.ones(2)).sample((100,))
        >>> f = bt.Fit.from_pyro(net, data, {"theta_c": draws})
        >>> f.samples["c.logits"].shape
        torch.Size([1, 100, 2])
        """
        from bnet_transformer.learning.fit.methods import fit_from_pyro

        network = as_network(net)
        made = fit_from_pyro(network, data, result, sites, arguments, num_samples, missing, budget, seed)
        held = made.net if isinstance(net, Network) else cast(Callable[[Network], Any], type(net))(made.net)
        return replace(made, net=held)  # type: ignore[return-value]

    @property
    def network(self) -> Network:
        """The declaration with the fitted parameters."""
        return as_network(self.net)

    @property
    def selectors(self) -> tuple[str, ...]:
        """The selectors of heads: the choices that hang on no other node, and that something reads."""
        return tuple(member.group.name for member in find_selectors(self.network))

    @property
    def pi(self) -> Tensor:
        """`P(c)`, of the first selector; `theta` has them all."""
        return self.theta[self._find_selector(None).param_prefix]

    @property
    def theta(self) -> dict[str, Tensor]:
        """The tables of discrete nodes by their owner, `[*states of the parents, state]`; posterior means."""
        store, samples = self.network.parameters, self.samples
        found = {name: samples[name].mean((0, 1)) for name in self.network.unconditional_logit_names if name in samples}
        found = {name: store[name].detach().softmax(-1) for name in self.network.unconditional_logit_names} | found
        return {name.removesuffix(".logits"): table for name, table in found.items()}

    @property
    def atoms(self) -> dict[str, Tensor]:
        """The learned weights as `net` has them: matrices of heads and atoms, and what else is no table."""
        tables, store = self.network.unconditional_logit_names, self.network.parameters
        return {name: store[name].detach() for name in self.learned if name not in tables}

    @property
    def heads(self) -> Heads:
        """The heads of the first selector."""
        return self.heads_of()

    @translate_memory_errors("heads_of")
    def heads_of(self, selector: str | None = None) -> Heads:
        """The heads of a selector: usage, effective and dead heads, invariants; of a posterior their means."""
        chosen = self._find_selector(selector)
        return heads.summarize_heads(self.network, chosen, self.theta[chosen.param_prefix], self.samples)

    @property
    def log_likelihoods(self) -> Tensor | None:
        """The log evidence of each sentence of the data under each draw, `[chain, draw, sentence]`, made when asked.

        None without draws, where choices were drawn or belong to the whole corpus, and past 2^26 numbers.
        """
        shared = is_distributed()  # then others would wait for what one has made alone
        if shared not in self._likelihood_cache:
            self._likelihood_cache[shared] = (
                self._likelihood_cache[True] if True in self._likelihood_cache else self._compute_log_likelihoods()
            )
        return self._likelihood_cache[shared]

    def _compute_log_likelihoods(self) -> Tensor | None:
        """The same, made."""
        if self.known_likelihoods is not None or self.data is None or not self.samples or self.choices:
            return self.known_likelihoods
        learned = select_learnable(self.network, infer_fit_task(self.network).readouts, self.learned, None)
        objective = FitObjective(self.network, learned, self.budget)
        lead = next(iter(self.samples.values())).shape[:2]
        if objective.has_corpus_choice or lead.numel() * len(self.data) > MAX_LIKELIHOOD_NUMEL:
            return None
        with self._shard_sentences("log_likelihoods", self.data) as here:
            sets = {k: v.to(here.device) for k, v in samples_to_parameters(self.network, self.samples).items()}
            own = here.shard(self.data)
            objective.to(here.device)
            found = heads.log_likelihoods(objective, own, sets).T if len(own) else torch.zeros(0)
            return here.all_gather(found).to(self.network.device).T.reshape(*lead, -1)

    @translate_memory_errors("interval")
    def interval(self, name: str, share: float = 0.9) -> tuple[Tensor, Tensor]:
        """Between which values a parameter, or `A x_1` or `OV x_1` of the heads, lies with a probability.

        From the samples of the posterior. `f.heads.cosine` has the names of the invariants.
        """
        if not self.samples:
            raise BNetError("interval", expected="a fit with a posterior", actual=self.method, allowed="svi, nuts")
        check_share("share", share)
        return heads.interval(self.network, self.samples, name, share)

    @translate_memory_errors("responsibilities")
    def responsibilities(self, data: object, *, selector: str | None = None) -> Tensor:
        """The probability of each head given a sentence and what is observed of it, `P(c | x, y)`.

        Args:
            data: sentences and what is observed of them, in any form that `fit` takes.
            selector: the choice whose states are the heads; by default the first one.

        Returns:
            `[sentence, head]`, or `[sentence, word, head]` where a head is drawn for each word; of a posterior the
            mean over its draws.
        """
        corpus, member, budget = self._read_data(data), self._find_selector(selector), self.budget
        of_corpus, name = member.scope == "corpus", member.group.name

        def ask(net: Network, own: Batch) -> Tensor:
            module, parts = CompiledModule(net).eval(), [own] if of_corpus else own.parts(SENTENCES_PER_PART)
            return torch.cat(
                [posterior(module, name, p.evidence, p.x, p.mask, given=p.given, budget=budget) for p in parts]
            )

        with self._shard_sentences("responsibilities", corpus, of_corpus, selector=name) as here:
            return self._mean_over_draws(here, corpus, ask)

    @translate_memory_errors("predict")
    def predict(self, data: object = None, *, readout: str | None = None) -> Tensor:
        """Predict a readout from sentences alone: the choices are summed out.

        Args:
            data: sentences, in any form that `fit` takes; what they say of readouts is left out. For a net without
                words the columns of its given nodes, or None where it has no inputs.
            readout: the readout; by default the first that nothing reads.

        Returns:
            `P(y | x)` of a discrete readout `[sentence, word, state]`, the mean of a real one; of a posterior the mean
            over its draws.
        """
        name, corpus = self._find_readout(readout).group.name, read_batch(self.network, data, observed="none")

        def ask(net: Network, own: Batch) -> Tensor:
            return predict_readout(net, name, own.parts(SENTENCES_PER_PART), self.budget)

        with self._shard_sentences("predict", corpus, readout=name) as here:
            return self._mean_over_draws(here, corpus, ask)

    @translate_memory_errors("log_likelihood")
    def log_likelihood(self, data: object) -> Tensor:
        """`log P(y | x)` of each sentence, under the net; of a posterior, the log of the mean over its draws."""
        corpus = self._read_data(data)
        learned = select_learnable(self.network, infer_fit_task(self.network).readouts, None, None)
        objective = FitObjective(self.network, learned, self.budget)
        with torch.no_grad(), self._shard_sentences("log_likelihood", corpus, objective.has_corpus_choice) as here:
            own = here.shard(corpus)
            objective.to(here.device)
            parts, found = [own] if objective.has_corpus_choice else own.parts(SENTENCES_PER_PART), []
            for net in self._posterior_networks(MAX_POSTERIOR_DRAWS, here) if len(own) else ():
                found.append(torch.cat([objective.log_evidence(net.parameters, part) for part in parts]))
            mean = torch.stack(found).logsumexp(0) - math.log(len(found)) if found else torch.zeros(0)
            return here.all_gather(mean).to(self.network.device)

    @translate_memory_errors("check")
    def check(self, data: object, statistics: object = None, *, draws: int = 100, readout: str | None = None) -> Check:
        """Posterior predictive checks: statistics of the data beside those of so many draws of as many sentences."""
        corpus = self._read_data(data)
        member = self._find_readout(readout, corpus)
        nets = self._posterior_networks(check_int("draws", draws))
        states = member.tpm.states if member.tpm.kind == "discrete" else None
        return check_posterior_predictive(nets, member.group.name, corpus, statistics, draws, states)

    @translate_memory_errors("compare")
    def compare(self, other: Any, data: object = None, *, selector: str | None = None) -> Comparison:
        """This fit beside another on the same (held-out) sentences: heads matched, ARI, difference of likelihoods.

        Without data, on those that both were fitted to, by leave-one-out where both have samples and ArviZ is there.
        With data, the other may be a net, such as the one that made the sentences.
        """
        if not isinstance(other, Fit):
            if not isinstance(getattr(other, "network", other), Network):
                raise BNetError("compare", expected="a Fit, or a net", actual=other)
            other = Fit(other, "none", 0, "nothing")
        return heads.compare(self, other, data, selector, self._find_selector(selector))

    @translate_memory_errors("to_arviz")
    def to_arviz(self) -> az.InferenceData:
        """The samples as ArviZ's InferenceData: posterior, invariants of the labels of heads, log likelihoods."""
        return heads.to_arviz(self)

    def save(self, path: str | Path) -> None:
        """Write the fit to one safetensors file: the net, the samples, the measures; `bt.load` reads it."""
        tensors = {"net": torch.frombuffer(bytearray(io.to_bytes(self.network)), dtype=torch.uint8)}
        tensors["bounds"] = torch.tensor(self.bounds, dtype=torch.float64)
        tensors["measured"] = torch.tensor(self.measured, dtype=torch.float64).reshape(-1, 3)
        for part in ("samples", "choices", "statistics"):
            values = getattr(self, part).items()
            tensors |= {f"{part}/{name}": value.detach().cpu().contiguous() for name, value in values}
        with single_process():  # files are written by one rank
            known = self.log_likelihoods
        if known is not None:
            tensors["log_likelihoods"] = known.detach().cpu().contiguous()
        header = {FILE_KEYS.get(name, name): getattr(self, name) for name in HEADER_FIELDS}
        head = {"format": FORMAT, "version": VERSION, "told": header}
        files.write_tensors(path, head, tensors)

    def to_dataframe(self) -> pd.DataFrame:
        """One row for each measure of each restart."""
        import pandas as pd

        return pd.DataFrame(self.measured, columns=["step", "restart", f"{self.criterion} of a sentence"])

    def _repr_html_(self) -> str:
        told = f"{self.method} of {self.sentences:,} sentences, {len(self.bounds)} steps, restart {self.restart}"
        told += f", judged on {self.evaluated_on} by the {self.criterion}" + ("" if self.finished else ", interrupted")
        told += "" if self.approximate is None else f"; approximate: {self.approximate}"
        if self.samples and self.method == "nuts" and len(self.matched) < len(self.selectors):
            own = ", ".join(name for name in self.selectors if name not in self.matched)
            told += f"; heads of {own} as each draw has them: what is not learned tells them apart"
        shown = self.heads._repr_html_() if self.selectors else ""
        return f"<p>{html.escape(repr(self.net))}<br>{html.escape(told)}</p>{shown}"

    def _find_selector(self, name: str | None) -> NodeSpec:
        known = {member.group.name: member for member in find_selectors(self.network)}
        if not known:
            wanted = "a net with a selector that hangs on no other node"
            others = [member.group.name for member in self.network.choices]
            got = f"{', '.join(others[:4])}, whose parents decide" if others else "none"
            allowed = "posterior(...) of a node of a sentence of f.net" if others else None
            raise BNetError("selector", expected=wanted, actual=got, allowed=allowed)
        if name is None:
            return next(iter(known.values()))
        if not isinstance(name, str) or name not in known:
            raise unknown_name_error("selector", name, known)
        return known[name]

    def _find_readout(self, name: str | None, corpus: Batch | None = None) -> NodeSpec:
        """The readout of that name, of those that a corpus observes; by default the first that nothing reads."""
        every, reads = infer_fit_task(self.network).readouts, self.network.graph.out_edges
        known = {m.group.name: m for m in every if corpus is None or m.group.name in corpus.evidence}
        if name is not None and (not isinstance(name, str) or name not in known):
            raise unknown_name_error("readout", name, known)
        leaves = [member for member in known.values() if not reads[member.group.index]]
        return known[name] if name is not None else [*leaves, *known.values()][0]

    def _mean_over_draws(
        self, ranks: DistributedContext, corpus: Batch, fn: Callable[[Network, Batch], Tensor]
    ) -> Tensor:
        """The mean over draws of the posterior of what each of the sentences is answered, `[sentence, ...]`."""
        own = ranks.shard(corpus)
        nets = self._posterior_networks(MAX_POSTERIOR_DRAWS, ranks) if len(own) else []
        mean = sum((fn(net, own) / len(nets) for net in nets), torch.zeros(()))
        return ranks.all_gather(mean if nets else torch.zeros(0)).to(self.network.device)

    @contextmanager
    def _shard_sentences(
        self, operation: str, corpus: Batch, has_corpus_choice: bool = False, **settings: object
    ) -> Iterator[DistributedContext]:
        """The ranks that share the sentences of a question and agree on its settings; this one alone where sentences
        share a draw. Where choices were drawn and cannot be summed, one error says what can be asked all the same."""
        with (
            nullcontext(DistributedContext(0, 1, self.network.device))
            if has_corpus_choice
            else distributed_context(self.network.device) as here
        ):
            told = {"budget": self.budget, **settings}
            here.assert_same(operation, net=self.network, samples=self.samples, data=corpus, **told)
            try:
                yield here
            except (BudgetError, UnsupportedError) as error:
                if not self.choices:
                    raise
                raise UnsupportedError(
                    "a fit with choices='sampled'",
                    expected="a question about the sentences that it was fitted to: others have no table of choices",
                    actual=f"one that needs the choices summed ({error.subject})",
                    allowed="f.choices, P(c | x, y) of the data; f.check(data); f.to_arviz(); for all others a net "
                    "whose choices can be summed (per='sentence', fewer slices or atoms, a larger budget=)",
                ) from error

    def _read_data(self, data: object) -> Batch:
        """Data in any form, as the fit took it."""
        return read_batch(self.network, data, missing=self.missing, missing_option=MISSING_OPTION)

    def _posterior_networks(self, max_draws: int, ranks: DistributedContext | None = None) -> list[Network]:
        """Nets of the posterior, evenly taken from its samples; the net itself where it has none."""
        nets = [self.network]
        if self.samples:
            sets, own = samples_to_parameters(self.network, self.samples), self.network.parameters
            count = len(next(iter(sets.values())))
            taken = torch.linspace(0, count - 1, min(max_draws, count)).round().long().tolist()
            nets = [self.network.with_parameters({**own, **{name: v[k] for name, v in sets.items()}}) for k in taken]
        return nets if ranks is None else [ranks.to_device(net) for net in nets]


@enable_gradients()
def predict_readout(network: Network, name: str, parts: Sequence[Batch], budget: int) -> Tensor:
    """`P(y | x)` of a discrete readout, `[sentence, word, state]`; `E[y | x]` of a real one; choices summed out."""
    module, member = CompiledModule(network).eval(), network.get_spec(name)
    if member.tpm.kind == "discrete":
        each = [posterior(module, name, {}, p.x, p.mask, given=p.given, budget=budget) for p in parts]
        return torch.cat(each)
    above = network.ancestral_specs(member)
    free = [m.group.index for m in above if m.tpm.kind == "discrete" and network.graph.out_edges[m.group.index]]
    for part in parts[:1]:
        _, words, *_ = module.validate_inputs(part.x, part.given)
        choices = find_ancestor_choices(network, member.group.index, {*free}, set())
        check_elimination_budget(network, member.group.index, choices, words, budget)
    return torch.cat([_predict_mean(module, member, free, part) for part in parts])


def _predict_mean(module: CompiledModule, spec: NodeSpec, open_choices: list[int], batch: Batch) -> Tensor:
    """`E[y | x]` of a real readout, `[sentence, word, feature]`, the free choices summed out."""
    network, name = module.network, spec.group.name
    with torch.no_grad():
        course, _ = module.run(
            ExecutionRequest((name,), batch.x, batch.mask, batch.given, enumerate_too=frozenset(open_choices))
        )
        at, parents = gather_parents(course, spec)
        mean = spec.tpm.distribution(at, *parents).mean
        priors = [Factor(network.specs[i], log_prior(course, i, network.specs[i])) for i in open_choices]
    family, first = spec.group, course.layout.batch_dim
    shape = get_full_shape(
        course, family.plates, family.word_stack, get_batch_size([Factor(spec, mean[..., 0])], course)
    )
    # The derivative at 0 of log E[exp(t . mean)] by t is the mean of the means.
    tilt = torch.zeros(*shape, *spec.shape, dtype=mean.dtype, device=mean.device, requires_grad=True)
    total = eliminate_choices(course, [*priors, Factor(spec, (tilt * mean).sum(-1))])
    (found,) = torch.autograd.grad(total.sum(), tilt)
    kept = [n for k, n in enumerate(shape[first:]) if has_posterior_dim(course, family, first + k)]
    return found.flatten(0, first).reshape(*kept, *spec.shape)


def default_statistics(num_states: int | None) -> dict[str, Callable[[Tensor], Tensor]]:
    """The statistics that are looked at where none are told."""
    if num_states is not None:
        return {f"share of {k}": lambda y, k=k: (y == k).double().mean() for k in range(num_states)}  # type: ignore[misc]
    return {"mean": torch.mean, "variance": lambda y: y.flatten(0, -2).var(0).mean(), "kurtosis": _kurtosis}


def _kurtosis(y: Tensor) -> Tensor:
    values = y.flatten(0, -2)
    return (values - values.mean(0)).pow(4).mean() / values.var(0).square().mean()


def _evaluate_statistic(name: str, statistic: Any, y: Tensor) -> float:
    """What a statistic is of what was observed."""
    wanted = "a function of what is observed that returns a number"
    if not callable(statistic):
        raise BNetError(f"statistic {name}", expected=wanted, actual=statistic)
    found = statistic(y.clone())  # a statistic may change what it sees
    try:
        return float(found)
    except (TypeError, ValueError, RuntimeError) as error:
        raise BNetError(f"statistic {name}", expected=wanted, actual=found) from error


def check_posterior_predictive(
    networks: Sequence[Network], name: str, corpus: Batch, statistics: object, draws: int, num_states: int | None
) -> Check:
    """Posterior predictive checks: each draw takes a net of the posterior, and sentences of that net.

    Statistics see what was observed and nothing else: all of it, or its words one after the other where some are not.
    """
    told = dict(check_mapping("statistics", statistics)) or default_statistics(num_states)
    seen_of = corpus.evidence[name]

    def shown(y: Tensor) -> Tensor:
        return y if seen_of.observed is None else y[seen_of.observed]

    observed = {what: _evaluate_statistic(what, of, shown(seen_of.value)) for what, of in told.items()}
    rows = []
    for k in range(draws):
        network = networks[k % len(networks)]
        with fork_torch_rng(network.device), torch.no_grad():
            seed_rngs(k, network.device)
            found = PyroModel(network, parameters="own")(
                corpus.x, mask=corpus.mask, given=corpus.given, batch=len(corpus)
            )
        y = shown(found[name].reshape(seen_of.value.shape))
        rows.append([_evaluate_statistic(what, of, y) for what, of in told.items()])
    table, own = (torch.tensor(values, dtype=torch.float64) for values in (rows, list(observed.values())))
    share = ((table > own).double() + 0.5 * (table == own).double() + 0 * (table + own)).mean(0)  # NaN stays NaN
    spread = table.std(0) if draws > 1 else table[0] * torch.nan
    of = [dict(zip(told, values.tolist(), strict=True)) for values in (table.mean(0), spread, share)]
    return Check(observed, of[0], of[1], of[2], name)


def is_fit(path: str | os.PathLike[str]) -> bool:
    """True for a file that `save` wrote; whatever else is wrong with a file is for those to say who read it."""
    return files.has_format(path, FILE_DESCRIPTION, FORMAT)


def load(path: str | os.PathLike[str], *, trust: bool | str | Collection[str] = ()) -> Fit[Network]:
    """The fit that `save` wrote, every byte of it compared with its hash."""
    where = files.as_path(path)
    head, tensors = files.read_tensors(where, FILE_DESCRIPTION, FORMAT, VERSION)
    with files.wrap_read_errors(where, FILE_DESCRIPTION):
        names = {key: name for name, key in FILE_KEYS.items()}
        told: dict[str, Any] = {
            names.get(k, k): tuple(v) if isinstance(v, list) else v for k, v in head["told"].items()
        }
        parts: dict[str, Any] = {"samples": {}, "statistics": {}, "choices": {}}
        for name, value in tensors.items():
            part, _, own = name.partition("/")
            if own:
                parts[part][own] = value
        return Fit(
            _load_network(where, tensors["net"], trust),
            **told,
            **parts,
            bounds=tuple(tensors["bounds"].tolist()),
            measured=tuple((int(step), int(who), score) for step, who, score in tensors["measured"].tolist()),
            known_likelihoods=tensors.get("log_likelihoods"),
        )


def _load_network(source: Path, content: Tensor, trust: bool | str | Collection[str]) -> Network:
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "net.safetensors")
        path.write_bytes(content.numpy().tobytes())
        try:
            return io.load(path, trust=trust)
        except FileError as error:
            raise FileError(str(source), expected=error.expected, actual=error.actual, allowed=error.allowed) from error
