"""Gates of heads: runs with gated heads, and the posterior of the gates, exact for one slice or by Gibbs sampling."""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from bnet_transformer.compiler.batch_interventions import resolve_interventions
from bnet_transformer.compiler.gather import ExecutionState, ValueChange, batch_to_request, gates_to_changes
from bnet_transformer.compiler.module import CompiledModule, find_default_output
from bnet_transformer.data import Batch
from bnet_transformer.data.batch import find_deciding_stacks
from bnet_transformer.declare import Network, NodeSpec
from bnet_transformer.errors import BNetError, UnsupportedError, unknown_name_error
from bnet_transformer.inference.factors import align_evidence, evidence_log_prob, mask_unobserved
from bnet_transformer.reference import ATOL

# --------------------------------------------------------------------------------------------------------------------
# Runs of sentences with gated heads: the sites where heads are summed, the likelihood of a run, batches of runs.
#
# A site is a group of heads that a later node sums, `a = sum_nu W_o^nu a^nu`. The likelihood is that of the
# observations, or a Normal around the output of the full net. A batch has many gate settings of one slice, or one
# setting for each sentence. For many settings of one slice, all values that do not depend on its heads are computed
# once per sentence.


MEMORY_BUDGET = 2**29  # bytes of the activations of a run
WORDS_PER_PART = 4096  # words in one batch, which is enough to use the processor fully


@dataclass(frozen=True)
class HeadSite:
    """The heads of one slice.

    Args:
        spec: The group of the heads.
        side_inputs: The groups that do not depend on the heads, and that needed descendants of the heads use.
        plate_sizes: The sizes of the plates of heads.
    """

    spec: NodeSpec
    side_inputs: tuple[int, ...]
    plate_sizes: tuple[int, ...]

    @property
    def num_heads(self) -> int:
        """The number of heads, over all plates of heads."""
        return math.prod(self.plate_sizes)

    @property
    def name(self) -> str:
        """The name of the group, such as `a_0`."""
        return self.spec.group.name


def find_head_sites(network: Network, role: str | None, target_indices: Collection[int]) -> tuple[HeadSite, ...]:
    """Find the sites of a net that are ancestors of the targets, of one role or of all; all have as many heads."""
    graph = network.graph
    needed = graph.ancestral_set(target_indices)
    matches = [spec for spec in network.specs if spec.group.index in needed and _is_summed(network, spec)]
    if not matches:
        choices = [spec.group.name for spec in network.choices]
        expected = "a net that sums heads: a plate of heads that a later node sums over"
        if not choices:
            raise BNetError("net", expected=expected)
        hint = "Use posterior('c') or bt.fit for a mixture of heads, or build the net with combine='concat'"
        raise BNetError("net", expected=expected, actual=f"heads chosen by {choices[0]}", hint=hint)
    roles = list(dict.fromkeys(spec.group.stem for spec in matches))
    if role is not None:
        if role not in roles:
            raise unknown_name_error("role of heads", role, roles)
        matches = [spec for spec in matches if spec.group.stem == role]
    sites = tuple(
        HeadSite(
            spec,
            _find_side_inputs(network, spec.group.index, needed),
            tuple(graph.plate_sizes[plate] for plate in spec.group.plates),
        )
        for spec in matches
    )
    if len({site.num_heads for site in sites}) > 1:
        counts = ", ".join(f"{site.name} {site.num_heads}" for site in sites)
        expected = "the same number of heads in each slice"
        raise BNetError("role", expected=expected, actual=counts, allowed=", ".join(roles))
    return sites


def _is_summed(network: Network, spec: NodeSpec) -> bool:
    """Return True for a function of each word and head whose children all sum it over the plates of heads."""
    group = spec.group
    if spec.tpm.is_random or group.word_stack is None or not group.plates or not spec.shape:
        return False
    children = {edge.child for edge in network.graph.out_edges[group.index]}
    parents = [parent for child in children for parent in network.specs[child].parents if parent.index == group.index]
    return bool(parents) and all(parent.over == group.plates for parent in parents)


def _find_side_inputs(network: Network, index: int, needed: set[int]) -> tuple[int, ...]:
    """Find the word-dependent groups that needed descendants of a group read and that do not descend from it."""
    graph, descendants = network.graph, {index}
    order = [i for component in graph.components for i in component if i in needed]
    for i in order:
        if any(edge.parent in descendants for edge in graph.in_edges[i]):
            descendants.add(i)
    decided = find_deciding_stacks(network, [network.specs[i] for i in order])
    read = {edge.parent for i in descendants - {index} for edge in graph.in_edges[i]} - descendants
    computed = [i for i in sorted(read) if decided[i] and graph.in_edges[i]]
    return tuple(i for i in computed if not network.specs[i].tpm.is_random)


def infer_targets(network: Network, corpus: Batch, output: str | None) -> tuple[str, ...]:
    """Return the observed groups; without observations the output, by default the default output of the module."""
    if corpus.evidence:
        return tuple(corpus.evidence)
    name = find_default_output(network) if output is None else output
    spec = network.get_spec(name)
    if not spec.shape and not spec.tpm.is_random:
        raise BNetError("output", expected="a node group with vector values, or a readout", actual=name)
    return (name,)


@dataclass(frozen=True)
class CorpusPart:
    """Sentences of one length.

    Args:
        indices: The indices of the sentences.
        batch: The sentences.
        site_values: The values of the sites and side inputs with all heads on, by group.
        full_output: The output with all heads on; None with observations.
        off_values: What the values of each site become if its heads are off, by group; none if they become zero.
    """

    indices: Tensor
    batch: Batch
    site_values: Mapping[int, Tensor]
    full_output: Tensor | None
    off_values: Mapping[int, Tensor] = field(default_factory=dict)

    def __len__(self) -> int:
        return len(self.indices)


@dataclass(frozen=True)
class GatedRuns:
    """A net, its sites, the sentences, and the targets of the likelihood.

    With observations, `log P` of a sentence is `log P(y | x, gates)` of the `targets`, up to a constant. Without them
    it is `- |f(gates) - f(all on)|^2 / 2` of an output f, which is `log Normal(f(all on); f(gates), sigma)` times
    `sigma^2`. `corrupt` is what the value of a head that is off becomes; None for zero.
    """

    module: CompiledModule
    sites: tuple[HeadSite, ...]
    corpus: Batch
    targets: tuple[str, ...]
    num_heads: int
    corrupt: object = None
    _changes_off: dict[object, Mapping[int, ValueChange]] = field(default_factory=dict, repr=False)

    def find_off_values(self, batch: Batch) -> Mapping[int, ValueChange]:
        """The function from the values of each site to those of heads that are off, by group; none for zero."""
        if self.corrupt is None:
            return {}
        network = self.module.network
        counts = batch_to_request(network, batch).word_counts
        if (key := tuple(counts.items())) not in self._changes_off:
            do = {site.name: self.corrupt for site in self.sites}
            try:
                groups = resolve_interventions(network, do, counts, counts).groups
            except BNetError as error:
                raise BNetError(f"corrupt: {error}") from error
            self._changes_off[key] = {group.spec.group.index: group for group in groups}
        return self._changes_off[key]

    @property
    def target_indices(self) -> tuple[int, ...]:
        """The indices of the targets."""
        return tuple(self.module.network.graph.get_group(name).index for name in self.targets)

    @property
    def is_observed(self) -> bool:
        """True if the targets are observed; False if the target is an output."""
        return bool(self.corpus.evidence)

    @torch.no_grad()
    def parts(self, max_words: int = WORDS_PER_PART, *, should_keep_values: bool = False) -> Iterator[CorpusPart]:
        """Iterate over the sentences in parts of about `max_words` words, each run once with all heads on.

        Args:
            max_words: The number of words of a part.
            should_keep_values: True if parts contain the values of the sites and of their side inputs.
        """
        sites = self.sites if should_keep_values else ()
        groups = dict.fromkeys(index for site in sites for index in (site.spec.group.index, *site.side_inputs))
        output = () if self.is_observed else self.target_indices
        outputs, network = (*groups, *output), self.module.network
        for indices, corpus in self.corpus.split_by_length(network, max_words):
            values: list[Tensor] = []
            if outputs:
                execution = self.execute(outputs, corpus)
                values = [self.module.compute_output(execution, index) for index in outputs]
            site_values = dict(zip(groups, values, strict=False))
            off_values = dict[int, Tensor]()
            for index, change in self.find_off_values(corpus).items() if sites else ():
                execution.values[index] = change(execution.values[index], None)  # the run has no further use
                off_values[index] = self.module.compute_output(execution, index)
            yield CorpusPart(indices, corpus, site_values, values[-1] if output else None, off_values)

    @torch.no_grad()
    def log_probs_by_setting(self, site: HeadSite, part: CorpusPart, gates: Tensor) -> Tensor:
        """Compute `log P` of each sentence of a part for each gate setting of a site.

        Args:
            site: The site; the heads of all other sites are on.
            part: The sentences, with the values of the sites.
            gates: The gate settings, `[setting, head]`.

        Returns:
            `log P` in float64, `[sentence, setting]`.
        """
        count = len(gates)
        corpus = part.batch.repeat(count)
        # The heads of a slice are gated by setting their values to gates times values (`do`). The side inputs are set
        # as well, so only the descendants of the site are computed again.
        a = part.site_values[site.spec.group.index]
        a = a.expand(len(part), *a.shape[1:])  # one row for all sentences if it depends on none of their words
        gates = gates.to(a)
        num_dims = a.dim() - 1 - len(site.plate_sizes)
        gates = gates.reshape(1, count, *site.plate_sizes, *[1] * num_dims)
        off = part.off_values.get(site.spec.group.index)
        gated = (a[:, None] * gates if off is None else torch.lerp(off[:, None], a[:, None], gates)).flatten(0, 1)
        side_values = {index: part.site_values[index] for index in site.side_inputs}
        do = {k: v if len(v) == 1 else v.repeat_interleave(count, 0) for k, v in side_values.items()}
        do[site.spec.group.index] = gated
        full = None if part.full_output is None else part.full_output.repeat_interleave(count, 0)
        return self._log_probs(corpus, full, do=do).reshape(len(part), count).double()

    def gated_log_probs(self, part: CorpusPart, gates: Tensor) -> Tensor:
        """Compute `log P` of each sentence of a part with its gates in all sites, `[sentence, site, head]`."""
        by_site = {
            site.spec.group.index: gates[:, k].reshape(len(gates), *site.plate_sizes)
            for k, site in enumerate(self.sites)
        }
        return self._log_probs(part.batch, part.full_output, gates=by_site)

    @torch.no_grad()
    def log_probs_by_chain(self, part: CorpusPart, gates: Tensor) -> Tensor:
        """Compute `log P` of each sentence of a part for each of its gate settings.

        Args:
            part: The sentences.
            gates: The gates, `[sentence, chain, site, head]`.

        Returns:
            `log P` in float64 on the processor, `[sentence, chain]`.
        """
        network, chains = self.module.network, gates.shape[1]
        full = part.full_output
        full = full if full is None or len(full) == 1 else full.repeat_interleave(chains, 0)
        rows = replace(part, batch=part.batch.repeat(chains), full_output=full)
        flat = gates.flatten(0, 1).to(network.device, network.dtype)
        return self.gated_log_probs(rows, flat).reshape(gates.shape[:2]).double().cpu()

    def _log_probs(self, batch: Batch, full_output: Tensor | None, **options: Any) -> Tensor:
        """Compute `log P` of each sentence; `full_output` is the output with all heads on."""
        execution = self.execute(self.target_indices, batch, **options)
        if not self.is_observed:
            # A value, log probabilities or a mean.
            value = self.module.compute_output(execution, self.target_indices[0])
            difference = value - (value if full_output is None else full_output)
            return -0.5 * difference.square().flatten(1).sum(-1).to(execution.log_dtype)
        total = torch.zeros(1, dtype=execution.log_dtype, device=execution.device)
        for index, item in batch.index_evidence(self.module.network).items():
            spec = self.module.network.specs[index]
            evidence = align_evidence(execution, spec, item)
            table = mask_unobserved(evidence, evidence_log_prob(execution, index, spec, evidence, ATOL))
            total = total + table.sum(tuple(range(1, table.dim())))
        return total

    def execute(
        self,
        outputs: tuple[int, ...],
        batch: Batch,
        do: Mapping[int, Tensor] | None = None,
        gates: Mapping[int, Tensor] | None = None,
    ) -> ExecutionState:
        """Run a net that has no latent choices.

        Args:
            outputs: The groups to compute.
            batch: The sentences, of equal length.
            do: The values of groups that are set.
            gates: The gates of sites.
        """
        network = self.module.network
        changes = gates_to_changes(network, gates or {}, self.find_off_values(batch) if gates else {})
        request = batch_to_request(network, batch, outputs, changes=changes, training=False)
        execution, plan = self.module.execute(replace(request, known={**request.known, **(do or {})}))
        if plan.enumerated:
            name = network.specs[plan.enumerated[0]].group.name
            raise UnsupportedError(name, expected="a net without latent choices", actual="a latent choice")
        return execution

    def log_prob_table(self, gates: Tensor, update_progress: Callable[[int], object]) -> Tensor:
        """Compute `log P` of each sentence for each gate setting, `[site, sentence, setting]`."""
        table = torch.empty(len(self.sites), len(self.corpus), len(gates), dtype=torch.float64)
        width = self.bytes_per_word()
        max_words = max(1, WORDS_PER_PART // len(gates))  # a word is computed once for each setting
        for part in self.parts(max_words, should_keep_values=True):
            words = sum(x.shape[1] for x in part.batch.x.values())
            chunk_size = max(1, min(WORDS_PER_PART, MEMORY_BUDGET // width) // max(1, words * len(part)))
            for k, site in enumerate(self.sites):
                for start in range(0, len(gates), chunk_size):
                    chunk = slice(start, start + chunk_size)
                    table[k, part.indices, chunk] = self.log_probs_by_setting(site, part, gates[chunk]).cpu()
                    update_progress(len(part) * len(gates[chunk]))
        return table

    def gradient_part_size(self) -> int:
        """Return the number of words of a part for gradients, which need the activations of every slice."""
        return max(1, min(WORDS_PER_PART, MEMORY_BUDGET // (self.bytes_per_word() * len(self.sites))))

    def bytes_per_word(self) -> int:
        """Return the bytes per word of a run: a small multiple of its widest values."""
        network = self.module.network
        sizes, specs = network.graph.plate_sizes, [m for m in network.specs if m.group.word_stack is not None]
        width = max(math.prod(m.shape) * math.prod(sizes[p] for p in m.group.plates) for m in specs)
        return 16 * width * torch.finfo(network.default_dtype).bits // 8


# --------------------------------------------------------------------------------------------------------------------
# The posterior of gates: exactly for one slice, or for all slices at once with relaxed gates.
#
# For one slice, `log P(y_s | gates)` is computed for every gate setting, and the gates are summed out:
#
#     p(rho | y) = prod_s sum_xi [prod_nu rho_nu^xi_nu (1 - rho_nu)^(1 - xi_nu)] P(y_s | xi)        (rho_nu ~ Beta(1,
#     1))
#
# Samples of rho come from sequential Monte Carlo with Gibbs moves. Collapsed Gibbs sweeps then give samples, inclusion
# probabilities and Bayes factors.
#
# For all slices at once, the method is stochastic variational inference with relaxed gates. The approximation is
# `q(rho) prod_s q(xi_s | rho)` with `q(xi_s = 1 | rho) = sigmoid(logit rho + e_s)`, independently for each head. A head
# that no likelihood depends on keeps its prior.


COARSE_POINTS, FINE_POINTS = 33, 81  # grid points: to find the mode of a density, and to integrate it
MIN_COARSE_POINTS = 4  # minimum number of coarse points near the mode
LOG_DENSITY_CUTOFF = 30.0  # nats below the mode at which the grid ends
CHUNK_NUMEL = 2**22  # elements (sentences x points) of one chunk
MIN_RHO = 1e-12  # the minimum rho
NUM_POPULATIONS, POPULATION_SIZE = 8, 64  # independent populations; the errors are estimated from their spread
GIBBS_SWEEPS = 2  # Gibbs sweeps at each power
MIN_ESS_FRACTION = 0.5  # minimum effective sample size of a step, as a fraction of the samples
MAX_BRIDGE_GAP = 2.0  # maximum difference in nats of both estimates of the integral for bridge sampling
RELAXATION_STRIDE = 12  # one of this many gates is relaxed at a time
WARMUP_FRACTION = 1 / 2  # fraction of the rounds in which the power rises and estimates are not averaged
MIN_UPDATE_RATE = 0.2  # minimum weight of the latest estimate
INTERACTION_DRAWS = 32  # samples of rho over which the odds of pairs of gates are averaged


@dataclass(frozen=True)
class GatePosterior:
    """The posterior of the heads of one slice, or of all slices, with a dim of slices before the dim of heads.

    Args:
        rho: Samples of rho, `[draw, head]`.
        rho_error: The Monte Carlo error of the mean of rho, `[head]`; NaN if it is not known.
        log_bayes: The log Bayes factor of each head, `[head]`.
        error: The Monte Carlo error of `log_bayes`, `[head]`.
        inclusion: The probability of each gate, `[sentence, head]`.
        interaction: The mean log odds ratio of two gates of a sentence, `[head, head]`; None unless all settings were
            run.
        rhat: R-hat of rho, `[slice, head]`; None without chains.
    """

    rho: Tensor
    rho_error: Tensor
    log_bayes: Tensor
    error: Tensor
    inclusion: Tensor
    interaction: Tensor | None
    rhat: Tensor | None = None


def exact_gate_posterior(
    log_probs: Tensor, draws: int, generator: torch.Generator, update_progress: Callable[[int], object]
) -> GatePosterior:
    """Compute the gate posterior of one slice from `log P` of each sentence and setting, `[sentence, setting]`."""
    heads = int(math.log2(log_probs.shape[1]))
    halves = [split_by_gate(log_probs, head) for head in range(heads)]
    rho, evidence, mean_error = run_smc(log_probs, generator)
    update_progress(1)
    samples, log_integrals, inclusion = [], [], torch.zeros(len(log_probs), heads, dtype=torch.float64)
    rows = -(-draws // len(rho))
    for _ in range(rows):
        rho, log_integral, probs = _collapsed_gibbs_sweep(halves, rho, generator)
        samples.append(rho)
        log_integrals.append(log_integral)
        inclusion += probs / rows
    bayes_factors = torch.stack(
        [
            _log_bayes_factor(log_probs, half, head, by_head, evidence, generator, update_progress)
            for head, (half, by_head) in enumerate(zip(halves, torch.stack(log_integrals).unbind(-1), strict=True))
        ]
    )
    interaction = _interaction(log_probs, samples[-1][:: max(1, len(rho) // INTERACTION_DRAWS)])
    log_bayes, error = bayes_factors.unbind(1)
    rho = torch.cat(samples)[:draws]
    rho_error = torch.hypot(mean_error, rho.std(0, correction=0) / draws**0.5)
    return GatePosterior(rho, rho_error, log_bayes, error, inclusion, interaction)


def _collapsed_gibbs_sweep(
    halves: list[tuple[Tensor, Tensor]], rho: Tensor, generator: torch.Generator
) -> tuple[Tensor, Tensor, Tensor]:
    """Run one Gibbs sweep over rho, with the gates summed out.

    Returns:
        The new samples, `[draw, head]`; the log integral of each conditional density, `[draw, head]`; the mean of
        the gates, `[sentence, head]`.
    """
    rho, log_integral, inclusion = rho.clone(), torch.empty_like(rho), []
    for head, half in enumerate(halves):
        ratio = log_likelihood_ratio(*half, drop_head(rho, head))
        rho[:, [head]], log_integral[:, head] = sample_rho(ratio, 1, generator)
        inclusion.append(torch.sigmoid(ratio + torch.logit(rho[:, head])[:, None]).mean(0))
    return rho, log_integral, torch.stack(inclusion, 1)


def _log_bayes_factor(
    log_probs: Tensor,
    half: tuple[Tensor, Tensor],
    head: int,
    log_integrals: Tensor,
    evidence: Tensor,
    generator: torch.Generator,
    update_progress: Callable[[int], object],
) -> Tensor:
    """Compute the log Bayes factor of a head and its error; `log_integrals` are over the posterior, `[row, draw]`."""
    log_probs_off = log_probs.reshape(len(log_probs), -1, 2, 2**head)[:, :, 0].flatten(1)
    (rho, evidence_off, _), samples = run_smc(log_probs_off, generator), []
    for _ in range(len(log_integrals)):
        rho = gibbs_step(log_probs_off, rho, generator)
        samples.append(sample_rho(log_likelihood_ratio(*half, rho), 1, generator)[1])
    update_progress(1)
    rows = torch.stack(samples)
    # Given the other rho, the integral I of the conditional density over rho_nu, relative to its value at 0, is a Bayes
    # factor. The Bayes factor of the head is the mean of I over the posterior with rho_nu = 0, and also one over the
    # mean of 1 / I over the posterior with free rho_nu. Bridge sampling combines both (Bennett 1976, Efficient
    # estimation of free energy differences). If they do not overlap, the ratio of the SMC evidences is used.
    estimate, gap = _bridge_by_group(rows, log_integrals, NUM_POPULATIONS, dim=1)
    if gap > MAX_BRIDGE_GAP:
        error = (evidence - evidence_off).std() / NUM_POPULATIONS**0.5
        return torch.stack([log_mean_exp(evidence) - log_mean_exp(evidence_off), error])
    return estimate


def _bridge_by_group(restricted: Tensor, free: Tensor, count: int, dim: int = 0) -> tuple[Tensor, float]:
    """Estimate a log Bayes factor and its error, `[2]`, from groups of samples along a dim; and the gap of bounds."""
    groups = zip(restricted.tensor_split(count, dim), free.tensor_split(count, dim), strict=True)
    bridges = torch.stack([bridge_sampling(zero.flatten(), any_rho.flatten()) for zero, any_rho in groups])
    restricted, free = restricted.flatten(), free.flatten()
    # The two estimates are biased in opposite directions.
    gap = -log_mean_exp(-free) - log_mean_exp(restricted)
    error = torch.hypot(bridges.std() / count**0.5, gap / 4)
    return torch.stack([bridge_sampling(restricted, free), error]), float(gap)


def bridge_sampling(restricted: Tensor, free: Tensor) -> Tensor:
    """Estimate the log mean of e^x under `rho_nu = 0`, from samples of x with `rho_nu = 0` and with free `rho_nu`."""
    # Fixed-point iteration of Meng and Wong 1996 (Simulating ratios of normalizing constants), for equal sample sizes.
    estimate = (log_mean_exp(restricted) - log_mean_exp(-free)) / 2
    for _ in range(50):
        log_off = log_mean_exp(restricted - torch.logaddexp(restricted, estimate))
        estimate = log_off - log_mean_exp(-torch.logaddexp(free, estimate))
    return estimate


def log_mean_exp(log_values: Tensor) -> Tensor:
    """Compute the log of the mean of e^x."""
    return log_values.logsumexp(0) - math.log(len(log_values))


def _interaction(log_probs: Tensor, rho: Tensor) -> Tensor:
    """Compute the log odds ratio of each pair of gates, averaged over sentences and samples, `[head, head]`.

    The diagonal is zero. Given rho, gates that enter the likelihood independently have an odds ratio of exactly 1.
    """
    heads, bits = rho.shape[1], gate_settings(rho.shape[1])
    result = torch.zeros(heads, heads, dtype=torch.float64)
    for prior in log_prior(rho):
        log = log_probs + prior
        for a in range(heads):
            for b in range(a):
                off, only_a, only_b, both = (
                    log[:, (bits[:, a] == x) & (bits[:, b] == y)].logsumexp(1)
                    for x, y in ((0, 0), (1, 0), (0, 1), (1, 1))
                )
                result[a, b] += (both + off - only_a - only_b).mean() / len(rho)
    return result + result.T


def gate_settings(num_heads: int) -> Tensor:
    """Return all gate settings, `[2^heads, heads]`; in the last one all gates are on.

    >>> gate_settings(2)
    tensor([[0., 0.],
            [1., 0.],
            [0., 1.],
            [1., 1.]], dtype=torch.float64)
    """
    return (torch.arange(2**num_heads)[:, None] >> torch.arange(num_heads) & 1).double()


def run_smc(log_probs: Tensor, generator: torch.Generator) -> tuple[Tensor, Tensor, Tensor]:
    """Sample rho by sequential Monte Carlo.

    Args:
        log_probs: `log P` of each sentence and setting, `[sentence, setting]`.
        generator: The random generator.

    Returns:
        The samples, `[draw, head]`; the estimate of the log evidence by each population, `[population]`; and the Monte
        Carlo error of the mean of rho, `[head]`.
    """
    # Sequential Monte Carlo sampler (Del Moral, Doucet and Jasra 2006) on the tempered densities
    # `prod_s sum_xi P(xi | rho) P(y_s | xi)^power`. Power 0 is the prior, so every mode has samples; power 1 is the
    # posterior. Gibbs moves leave each density invariant, so the product of the mean weights estimates the evidence.
    # The next power is the largest at which the effective sample size is high enough.
    heads = int(math.log2(log_probs.shape[1]))
    rho = torch.rand(NUM_POPULATIONS * POPULATION_SIZE, heads, generator=generator, dtype=torch.float64)
    rho = rho.clamp(MIN_RHO, 1 - MIN_RHO)
    evidence, power = torch.zeros(NUM_POPULATIONS, dtype=torch.float64), 0.0
    log = tempered_log_likelihood(log_probs, rho, power)
    while power < 1:
        power, next_log = _next_power(log_probs, rho, power, log)
        weight = (next_log - log).reshape(NUM_POPULATIONS, POPULATION_SIZE)
        evidence += weight.logsumexp(1) - math.log(POPULATION_SIZE)
        rho = gibbs_step(power * log_probs, rho[_resample(weight, generator)], generator)
        log = tempered_log_likelihood(log_probs, rho, power)
    # The mean of rho is a ratio of estimates, sum_k Z_k m_k / sum_k Z_k, over populations with evidence Z_k and mean
    # m_k. Its error is that of the delta method. Populations are independent, so it includes the error of the weights
    # of modes between which the moves do not mix.
    shares, means = evidence.softmax(0), rho.reshape(NUM_POPULATIONS, POPULATION_SIZE, heads).mean(1)
    deviations = shares[:, None] * (means - shares @ means)
    mean_error = (deviations.square().sum(0) * NUM_POPULATIONS / (NUM_POPULATIONS - 1)).sqrt()
    # Mix the populations in proportion to their evidence estimates, by systematic resampling.
    count = NUM_POPULATIONS * POPULATION_SIZE
    positions = (torch.arange(count) + torch.rand(1, generator=generator, dtype=torch.float64)) / count
    population = torch.searchsorted(evidence.softmax(0).cumsum(0), positions).clamp(max=NUM_POPULATIONS - 1)
    selected = population * POPULATION_SIZE + torch.arange(count) % POPULATION_SIZE
    return rho[selected[torch.randperm(count, generator=generator)]], evidence, mean_error


def tempered_log_likelihood(log_probs: Tensor, rho: Tensor, power: float) -> Tensor:
    """Compute `sum_s log sum_xi P(xi | rho) P(y_s | xi)^power` of each sample."""
    maximum = log_probs.amax(1, keepdim=True)
    scaled = (power * (log_probs - maximum)).exp()
    return (log_prior(rho).exp() @ scaled.T).log().sum(1) + power * maximum.sum()


def gibbs_step(log_probs: Tensor, rho: Tensor, generator: torch.Generator) -> Tensor:
    """Take Gibbs steps: sample the gates of each sentence given rho, then rho given the gates."""
    rho, halves = rho.clone(), [split_by_gate(log_probs, head) for head in range(rho.shape[1])]
    for head, half in [*enumerate(halves)] * GIBBS_SWEEPS:
        ratio = log_likelihood_ratio(*half, drop_head(rho, head))
        probs = torch.sigmoid(ratio + torch.logit(rho[:, head])[:, None])
        num_on = (torch.rand(probs.shape, generator=generator, dtype=torch.float64) < probs).sum(1)
        # A sample of Beta(1 + on, 1 + off) as a ratio of gamma variables, because these accept a generator.
        counts = (1.0 + num_on.double(), 1.0 + (len(log_probs) - num_on).double())
        on, off = (torch._standard_gamma(count, generator=generator) for count in counts)
        rho[:, head] = (on / (on + off)).clamp(MIN_RHO, 1 - MIN_RHO)
    return rho


def split_by_gate(log_probs: Tensor, head: int) -> tuple[Tensor, Tensor]:
    """Split `P(y_s | setting)` into the settings with a gate off and with the gate on.

    Returns:
        `[side, setting of the others, sentence]`, where each side is divided by its maximum so that neither underflows,
        and the logs of these maxima.
    """
    halves = log_probs.reshape(len(log_probs), -1, 2, 2**head).permute(2, 1, 3, 0).flatten(1, 2)
    maximum = halves.amax(1, keepdim=True)
    return (halves - maximum).exp(), maximum


def log_likelihood_ratio(halves: Tensor, scales: Tensor, rho: Tensor) -> Tensor:
    """Compute `log P(y_s | gate on) - log P(y_s | gate off)`, other gates summed out given rho, `[draw, sentence]`."""
    off, on = ((log_prior(rho).exp() @ halves).log() + scales).unbind()
    return on - off


def log_prior(rho: Tensor) -> Tensor:
    """Compute the log probability of each gate setting, `[draw, setting]`."""
    bits = gate_settings(rho.shape[1])
    return rho.log() @ bits.T + torch.log1p(-rho) @ (1 - bits).T


def drop_head(rho: Tensor, head: int) -> Tensor:
    """Return the rho of all other heads."""
    return rho[:, [k for k in range(rho.shape[1]) if k != head]]


def _next_power(log_probs: Tensor, rho: Tensor, power: float, log_likelihoods: Tensor) -> tuple[float, Tensor]:
    """Find the next power, with a large enough effective sample size, and the log likelihood at this power."""
    low, high = power, 1.0
    log_at_high = tempered_log_likelihood(log_probs, rho, high)
    while _min_ess_fraction(log_at_high - log_likelihoods) < MIN_ESS_FRACTION and high - low > 1e-3 * (high - power):
        middle = (low + high) / 2
        log_at_middle = tempered_log_likelihood(log_probs, rho, middle)
        if _min_ess_fraction(log_at_middle - log_likelihoods) < MIN_ESS_FRACTION:
            high, log_at_high = middle, log_at_middle
        else:
            low = middle
    return high, log_at_high


def _min_ess_fraction(log_weights: Tensor) -> float:
    """Return the minimum over populations of the effective sample size, as a fraction of the population."""
    weights = log_weights.reshape(NUM_POPULATIONS, POPULATION_SIZE).softmax(1)
    return float((1 / weights.square().sum(1)).min()) / POPULATION_SIZE


def _resample(log_weights: Tensor, generator: torch.Generator) -> Tensor:
    """Resample systematically within each population; return the indices of the selected samples."""
    start = torch.rand(NUM_POPULATIONS, 1, generator=generator, dtype=torch.float64)
    positions = (torch.arange(POPULATION_SIZE) + start) / POPULATION_SIZE
    indices = torch.searchsorted(log_weights.softmax(1).cumsum(1), positions).clamp(max=POPULATION_SIZE - 1)
    return (indices + POPULATION_SIZE * torch.arange(NUM_POPULATIONS)[:, None]).flatten()


def sample_rho(log_ratios: Tensor, num_samples: int, generator: torch.Generator) -> tuple[Tensor, Tensor]:
    """Sample rho from the density `prod_s (1 - rho + rho e^ratio_s)` of each row, and compute its log integral.

    Args:
        log_ratios: The log likelihood ratios, `[row, sentence]`.
        num_samples: The number of samples of each row.
        generator: The random generator.

    Returns:
        The samples, `[row, draw]`, and the log integrals, `[row]`.
    """
    # The conditional density of one rho is log-concave and one-dimensional, so a grid around its mode integrates it.
    # Its piecewise linear interpolation is sampled by inversion: within a piece the cumulative is quadratic.
    grid, log = log_density_grid(log_ratios)
    maximum = log.amax(1, keepdim=True)
    weight = (log - maximum).exp()
    pieces = 0.5 * (weight[:, 1:] + weight[:, :-1]) * (grid[:, 1:] - grid[:, :-1])
    total = pieces.sum(1)
    below = pieces.cumsum(1)
    u = torch.rand(len(log_ratios), num_samples, generator=generator, dtype=torch.float64) * total[:, None]
    piece = torch.searchsorted(below, u).clamp(max=pieces.shape[1] - 1)
    remainder = u - (below.gather(1, piece) - pieces.gather(1, piece))
    left, right = weight.gather(1, piece), weight.gather(1, piece + 1)
    start, width = grid.gather(1, piece), grid.diff(dim=1).gather(1, piece)
    area = remainder / width.clamp(min=1e-300)
    fraction = 2 * area / (left + (left.square() + 2 * (right - left) * area).clamp(min=0).sqrt()).clamp(min=1e-300)
    rho = start + width * fraction.clamp(0, 1)
    return rho.clamp(MIN_RHO, 1 - MIN_RHO), total.log() + maximum[:, 0]


def log_density_grid(log_ratios: Tensor) -> tuple[Tensor, Tensor]:
    """Compute `sum_s log(1 - rho + rho e^ratio_s)` of each row on a grid near its mode.

    Returns:
        The points and the values, `[row, point]`.
    """
    low = torch.zeros(len(log_ratios), 1, dtype=torch.float64)
    top = torch.ones_like(low)
    # The density is log-concave, so it is high on one interval. With many sentences this interval is narrow, so the
    # grid is refined until it has enough points there.
    is_coarse = True
    while is_coarse:
        grid = _grid_points(low, top, COARSE_POINTS)
        log = _log_density(log_ratios, grid)
        high = log >= log.amax(1, keepdim=True) - LOG_DENSITY_CUTOFF
        positions = torch.arange(COARSE_POINTS).expand_as(high)
        first = torch.where(high, positions, COARSE_POINTS).amin(1, keepdim=True).sub(1).clamp(min=0)
        last = torch.where(high, positions, -1).amax(1, keepdim=True).add(1).clamp(max=COARSE_POINTS - 1)
        low, top = grid.gather(1, first), grid.gather(1, last)
        is_coarse = bool((last - first < MIN_COARSE_POINTS).any()) and bool((top - low > 1e-12).all())
    grid = _grid_points(low, top, FINE_POINTS)
    return grid, _log_density(log_ratios, grid)


def _grid_points(low: Tensor, high: Tensor, count: int) -> Tensor:
    """Return points of an interval, denser at its ends."""
    fractions = torch.sin(torch.linspace(0, math.pi / 2, count, dtype=torch.float64)).square()
    return low + (high - low) * fractions


def _log_density(log_ratios: Tensor, rho: Tensor) -> Tensor:
    """Compute the log density of each row at its points.

    The larger of the two terms of each sentence is factored out first, so that nothing overflows. The other term
    underflows only far below the mode.
    """
    total = torch.zeros_like(rho)
    for part in log_ratios.split(max(1, CHUNK_NUMEL // rho.numel()), 1):
        maximum = part.clamp(min=0)
        on, off = (part - maximum).exp()[:, :, None], (-maximum).exp()[:, :, None]
        total += torch.addcmul(off, on - off, rho[:, None, :]).log().sum(1) + maximum.sum(1, keepdim=True)
    return total


class _GateLogOdds:
    """`e_s` of each gate: the current value, and the mean and variance of the estimates after the warmup."""

    def __init__(self, shape: tuple[int, ...]) -> None:
        self.current, self.num_updates = (torch.zeros(shape, dtype=torch.float64) for _ in range(2))
        self.sum, self.squares, self.count = (torch.zeros(shape, dtype=torch.float64) for _ in range(3))

    def update(self, sentence_ids: Tensor, is_relaxed: Tensor, slopes: Tensor, is_counted: bool) -> None:
        """Move the log odds of the relaxed gates towards the slopes."""
        self.num_updates[sentence_ids] += is_relaxed
        rate = (1 / self.num_updates[sentence_ids].clamp(min=1)).clamp(min=MIN_UPDATE_RATE)
        rate = torch.where(is_relaxed, rate, 0.0)
        self.current[sentence_ids] += rate * (slopes - self.current[sentence_ids])
        if is_counted:
            self.sum[sentence_ids] += torch.where(is_relaxed, slopes, 0.0)
            self.squares[sentence_ids] += torch.where(is_relaxed, slopes.square(), 0.0)
            self.count[sentence_ids] += is_relaxed

    def mean_and_variance(self) -> tuple[Tensor, Tensor]:
        """Return the mean estimate of each gate, and the variance of this mean."""
        mean = self.sum / self.count
        spread = (self.squares / self.count - mean.square()).clamp(min=0)
        return mean, spread / (self.count - 1).clamp(min=1)


def count_passes(num_gates: int) -> int:
    """Return the number of passes that relax each gate once."""
    return min(num_gates, RELAXATION_STRIDE)


def relaxed_gate_posterior(
    runs: GatedRuns,
    scale: float,
    rounds: int,
    draws: int,
    generator: torch.Generator,
    update_progress: Callable[[int], object],
) -> GatePosterior:
    """Compute the posterior of all gates by stochastic variational inference.

    Args:
        runs: The gated runs.
        scale: The factor by which `log P` of a run is multiplied.
        rounds: The number of rounds; a round relaxes each gate of each sentence once.
        draws: The number of samples of rho.
        generator: The random generator.
        update_progress: A function that receives the number of finished runs.
    """
    # The optimal e_s, given the other factors, is `E[log P(y_s | on) - log P(y_s | off)]` over the other gates, which
    # is the integral of d log P / d gate from off to on. A uniform relaxed gate samples that integral, and one backward
    # pass gives the slopes of all relaxed gates. A step towards them is a natural gradient step (Hoffman et al. 2013).
    # The estimate is biased by the gates that are relaxed together, one in RELAXATION_STRIDE. The optimal q(rho) is
    # `prod_s (1 - rho + rho exp e_s)`. Dependent gates have many optima, so the power of the likelihood rises from 0 to
    # 1 during the warmup, and the estimates after it are averaged.
    shape = len(runs.corpus), len(runs.sites), runs.num_heads
    log_odds, parts = _GateLogOdds(shape), list(runs.parts(runs.gradient_part_size()))
    warmup = max(1, round(WARMUP_FRACTION * rounds))
    for step in range(rounds):
        power = min(1.0, (step + 1) / warmup) ** 2
        for offset in range(count_passes(shape[1] * shape[2])):
            rho = sample_rho(power * log_odds.current.flatten(1).T, 1, generator)[0].reshape(shape[1:])
            uniforms = torch.rand(2, *shape, generator=generator, dtype=torch.float64).transpose(0, 1)
            for part in parts:
                probs = torch.sigmoid(torch.logit(rho) + power * log_odds.current[part.indices])
                is_relaxed, slope = _relaxed_slopes(runs, part, probs, offset, uniforms[part.indices])
                log_odds.update(part.indices, is_relaxed, scale * slope, step >= warmup)
                update_progress(len(part))
    mean, variance = (inclusion.flatten(1) for inclusion in log_odds.mean_and_variance())
    rho, log_bayes = sample_rho(mean.T, draws, generator)
    inclusion = torch.sigmoid(torch.logit(rho[:, :64].T)[:, None] + mean).mean(0)  # [sentence, site * head]
    error = (inclusion.square() * variance).sum(0).sqrt()
    return GatePosterior(
        rho.T.reshape(draws, *shape[1:]),
        torch.full(shape[1:], torch.nan, dtype=torch.float64),  # the approximation has no error
        log_bayes.reshape(shape[1:]),
        error.reshape(shape[1:]),
        inclusion.reshape(shape),
        None,
    )


def _relaxed_slopes(
    runs: GatedRuns, part: CorpusPart, probabilities: Tensor, offset: int, uniforms: Tensor
) -> tuple[Tensor, Tensor]:
    """Return which gates are relaxed in each sentence, and the gradient of `log P` with respect to all gates.

    A gate that is not relaxed is on with the probability in `probabilities`.
    """
    threshold, values = uniforms.unbind(1)
    gates, count = (threshold < probabilities).double(), probabilities[0].numel()
    offsets = torch.arange(count) + part.indices[:, None] + offset
    is_relaxed = (offsets % count_passes(count) == 0).reshape(probabilities.shape)
    network = runs.module.network
    leaf = torch.where(is_relaxed, values, gates).to(network.device, network.dtype).requires_grad_()
    (slope,) = torch.autograd.grad(runs.gated_log_probs(part, leaf).sum(), leaf)
    return is_relaxed, slope.double().cpu()


# --------------------------------------------------------------------------------------------------------------------
# The joint posterior of the gates of all slices, by Gibbs sampling with the exact likelihood.
#
# Several chains sample the shares rho and the gates of each sentence in all slices. A step of a gate runs every
# sentence with this gate flipped, samples rho with the gate summed out, then the gate. If heads have large effects,
# such chains stay in one of several modes of a sentence. So the gate settings of a sentence that occur while the
# likelihood is tempered are stored with their likelihoods, and each later sweep samples the gates again among these.
# This needs no run.


MAX_RHAT = 1.1  # above it, the chains of a head disagree: neither its interval nor the error of its mean is given
NUM_FREE = 8  # chains in which no share is fixed
NUM_GROUPS = 4  # groups of these chains; the error of a Bayes factor is estimated from their spread
GIBBS_WARMUP_FRACTION = 1 / 4  # fraction of the sweeps in which the power of the likelihood rises to 1
MIN_POWER = 1e-3  # the power of the likelihood in the first sweep
MAX_SETTINGS = 256  # settings that are stored for each sentence
CERTAIN = 1e6  # the log likelihood ratio, in nats, of a gate that is certain


class _StoredSettings:
    """The most probable of the gate settings of each sentence that were run, without duplicates."""

    def __init__(self, num_sentences: int, num_gates: int) -> None:
        self.gates = torch.zeros(num_sentences, 0, num_gates, dtype=torch.bool)
        self.log_probs = torch.zeros(num_sentences, 0, dtype=torch.float64)  # -inf for a duplicate
        # A setting is identified by a sum of random 64-bit integers, one for each gate that is on.
        fixed = torch.Generator().manual_seed(0)
        self.weights = torch.randint(-(2**62), 2**62, (num_gates,), generator=fixed)

    def keys(self, gates: Tensor) -> Tensor:
        """Return the integers that identify settings, `[...]`, from `[..., gate]`."""
        return torch.where(gates, self.weights, 0).sum(-1)

    def add(self, gates: Tensor, log_probs: Tensor) -> None:
        """Add settings, `[sentence, setting, gate]`, with their `log P`, `[sentence, setting]`."""
        gates, log_probs = torch.cat([self.gates, gates], 1), torch.cat([self.log_probs, log_probs], 1)
        keys, order = self.keys(gates).sort(dim=1, stable=True)
        log_probs = log_probs.gather(1, order)
        log_probs[:, 1:].masked_fill_(keys[:, 1:] == keys[:, :-1], -torch.inf)
        self.log_probs, selected = log_probs.topk(min(MAX_SETTINGS, keys.shape[1]), 1)
        index = order.gather(1, selected)
        self.gates = gates.gather(1, index[..., None].expand(-1, -1, gates.shape[-1]))

    def sample(
        self, gates: Tensor, log_probs: Tensor, log_odds: Tensor, uniforms: Tensor
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Sample the gates of each sentence and chain among the stored settings, if they are one of these.

        Args:
            gates: The gates, `[sentence, chain, gate]`.
            log_probs: Their `log P`, `[sentence, chain]`.
            log_odds: The log odds of the shares, `[chain, gate]`.
            uniforms: A uniform random number for each sentence and chain.

        Returns:
            The gates; their `log P`; and `log P(y_s | on) - log P(y_s | off)` of each gate, the other gates summed out
            over the stored settings, `[sentence, chain, gate]`. Outside of these, the gate itself is certain. The chain
            of another head is left out.
        """
        gates, log_probs, num_stored = gates.clone(), log_probs.clone(), self.gates.shape[1]
        ratios = torch.where(gates, CERTAIN, -CERTAIN).double()
        log_all_off = -functional.softplus(log_odds).sum(1)
        size = max(1, CHUNK_NUMEL // (num_stored * max(gates.shape[1:])))
        for part in torch.arange(len(gates)).split(size):
            stored, stored_log_probs = self.gates[part], self.log_probs[part, None]
            is_same = self.keys(stored)[:, None] == self.keys(gates[part])[..., None]
            is_stored = (is_same & stored_log_probs.isfinite()).any(-1)
            log = stored_log_probs + (stored.double() @ log_odds.T).mT + log_all_off[:, None]
            cumulative = log.softmax(-1).cumsum(-1)
            index = torch.searchsorted(cumulative, uniforms[part, :, None] * cumulative[..., -1:])[..., 0]
            sampled = stored.gather(1, index[..., None].expand(-1, -1, gates.shape[-1]))
            gates[part] = torch.where(is_stored[..., None], sampled, gates[part])
            log_probs[part] = torch.where(is_stored, self.log_probs[part].gather(1, index), log_probs[part])
            for gate in range(gates.shape[-1]):
                chains, is_on = [*range(NUM_FREE), NUM_FREE + gate], stored[:, None, :, gate]
                terms = log[:, chains]
                on, off = (terms.masked_fill(mask, -torch.inf).logsumexp(-1) for mask in (~is_on, is_on))
                ratio = (on - off - log_odds[chains, gate]).clamp(-CERTAIN, CERTAIN)
                at = part[:, None], torch.tensor(chains), gate
                ratios[at] = torch.where(is_stored[:, chains], ratio, ratios[at])
        return gates, log_probs, ratios


class _GateChains:
    """Chains that sample the share of each head, and the gates of each sentence.

    Attributes:
        is_zero: True if a chain fixes the share of a head at 0, `[chain, gate]`.
        gates: The gates, `[sentence, chain, gate]`.
        log_probs: The scaled `log P` of each sentence in each chain, `[sentence, chain]`.
        log_odds: The log odds of the shares, `[chain, gate]`.
    """

    def __init__(
        self, runs: GatedRuns, scale: float, generator: torch.Generator, update_progress: Callable[[int], object]
    ) -> None:
        self.runs, self.scale, self.generator, self.update_progress = runs, scale, generator, update_progress
        self.shape = len(runs.sites), runs.num_heads
        num_gates = math.prod(self.shape)
        # For the Bayes factors, one more chain for each head has `rho = 0` for this head.
        self.is_zero = torch.cat([torch.zeros(NUM_FREE, num_gates), torch.eye(num_gates)]).bool()
        self.parts = list(runs.parts(max(1, runs.gradient_part_size() // len(self.is_zero))))
        rho = torch.rand(self.is_zero.shape, generator=generator, dtype=torch.float64).clamp(MIN_RHO, 1 - MIN_RHO)
        self.log_odds = torch.where(self.is_zero, -CERTAIN, torch.logit(rho))
        self.gates = self.draw_uniforms()[..., :-1] < torch.sigmoid(self.log_odds)
        self.log_probs = self.compute_log_probs(self.gates)

    def compute_log_probs(self, gates: Tensor) -> Tensor:
        """Compute the scaled `log P` of each sentence in each chain, `[sentence, chain]`."""
        log_probs = torch.zeros(gates.shape[:2], dtype=torch.float64)
        for part in self.parts:
            settings = gates[part.indices].unflatten(-1, self.shape)
            log_probs[part.indices] = self.scale * self.runs.log_probs_by_chain(part, settings)
            self.update_progress(len(part) * gates.shape[1])
        return log_probs

    def draw_uniforms(self) -> Tensor:
        """Draw a uniform number for each gate, and one more, `[sentence, chain, gate + 1]`."""
        chains, num_gates = self.is_zero.shape
        shape = len(self.runs.corpus), chains, num_gates + 1
        return torch.rand(shape, generator=self.generator, dtype=torch.float64)

    def sample_gate(self, gate: int, power: float, uniforms: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Sample the share of a gate with the gate summed out, then the gate, under a power of the likelihood.

        Returns:
            The gates with this one flipped, and their `log P`; the probability that the gate is on,
            `[sentence, chain]`; and the log integral of the density of the share, `[chain]`.
        """
        flipped, is_on = self.gates.clone(), self.gates[..., gate]
        flipped[..., gate] = ~is_on
        log_flipped = self.compute_log_probs(flipped)
        ratio = power * torch.where(is_on, self.log_probs - log_flipped, log_flipped - self.log_probs)
        rho, log_integral = sample_rho(ratio.T, 1, self.generator)
        self.log_odds[:, gate] = torch.where(self.is_zero[:, gate], -CERTAIN, torch.logit(rho[:, 0]))
        probs = torch.sigmoid(ratio + self.log_odds[:, gate])
        will_be_on = uniforms < probs
        self.log_probs = torch.where(will_be_on == is_on, self.log_probs, log_flipped)
        self.gates[..., gate] = will_be_on
        return flipped, log_flipped, probs, log_integral


def gibbs_gate_posterior(
    runs: GatedRuns,
    scale: float,
    rounds: int,
    draws: int,
    generator: torch.Generator,
    update_progress: Callable[[int], object],
) -> GatePosterior:
    """Compute the posterior of all gates by Gibbs sampling.

    The arguments are those of `relaxed_gate_posterior`; a round is a sweep of each chain, and a fourth are warmup.
    """
    # Let r_s be the likelihood ratio of a gate on and off in a sentence, given the other gates of the sentence. Given
    # these, the share of the head has a density proportional to `prod_s (1 - rho + rho r_s)`: its gates are summed out.
    # So rho and all gates of one head are sampled together (van Dyk and Park 2008, Partially collapsed Gibbs samplers),
    # and the share of a head without effect is independent from sweep to sweep.
    # The stored settings do not change after the warmup. If the setting of a sentence is one of these, it is sampled
    # from the posterior restricted to them, and else it stays, so this step too leaves the posterior invariant. The
    # power of the likelihood rises geometrically in the warmup, so the stored settings include several modes.
    chains = _GateChains(runs, scale, generator, update_progress)
    shape, count, num_gates = chains.shape, len(runs.corpus), math.prod(chains.shape)
    stored, num_warmup = _StoredSettings(count, num_gates), max(1, round(GIBBS_WARMUP_FRACTION * rounds))
    stored.add(chains.gates, chains.log_probs)
    for sweep in range(num_warmup):
        uniforms, power = chains.draw_uniforms(), MIN_POWER ** (1 - (sweep + 1) / num_warmup)
        run = [chains.sample_gate(gate, power, uniforms[..., gate])[:2] for gate in range(num_gates)]
        stored.add(*(torch.cat(values, 1) for values in zip(*run, strict=True)))
    num_on, by_flips, by_settings = [], [], []  # of each sweep after the warmup, [chain, gate]
    inclusion = torch.zeros(count, num_gates, dtype=torch.float64)
    for _ in range(rounds - num_warmup):
        uniforms, log_integrals = chains.draw_uniforms(), torch.empty_like(chains.log_odds)
        for gate in range(num_gates):
            *_, probs, log_integrals[:, gate] = chains.sample_gate(gate, 1.0, uniforms[..., gate])
            inclusion[:, gate] += probs[:, :NUM_FREE].mean(1) / (rounds - num_warmup)
        chains.gates, chains.log_probs, ratios = stored.sample(
            chains.gates, chains.log_probs, chains.log_odds, uniforms[..., -1]
        )
        num_on.append(chains.gates[:, :NUM_FREE].sum(0).double())
        by_flips.append(log_integrals)
        by_settings.append(sample_rho(ratios.flatten(1).T, 1, generator)[1].reshape(log_integrals.shape))
    counts = torch.stack(num_on, 1)
    rho, rhat = _sample_shares(counts, count, draws, generator)
    by_state = torch.stack([torch.stack(by_flips, 1), torch.stack(by_settings, 1)])  # [kind, chain, sweep, gate]
    bayes_factors = [_estimate_log_bayes(by_state[..., gate], gate) for gate in range(num_gates)]
    log_bayes, error = torch.stack(bayes_factors).unbind(1)
    return GatePosterior(
        rho.reshape(draws, *shape),
        _estimate_rho_error(counts, count, draws, rhat).reshape(shape),
        log_bayes.reshape(shape),
        error.reshape(shape),
        inclusion.reshape(count, *shape),
        None,
        rhat.reshape(shape),
    )


def _sample_shares(num_on: Tensor, count: int, draws: int, generator: torch.Generator) -> tuple[Tensor, Tensor]:
    """Sample rho given the gates of each state of the chains, and compute R-hat from one sample of each state.

    Args:
        num_on: The numbers of sentences with the gate on, `[chain, sweep, gate]`.
        count: The number of sentences.
        draws: The number of samples.
        generator: The random generator.

    Returns:
        The samples, `[draw, gate]`, evenly over the states, and R-hat, `[gate]`.
    """
    # Given the gates, the shares are independent Beta variables, here ratios of gamma variables, because these accept a
    # generator.
    num_states = num_on[..., 0].numel()
    counts = num_on.expand(-(-draws // num_states), *num_on.shape)
    on, off = (torch._standard_gamma(1 + values, generator=generator) for values in (counts, count - counts))
    rho = (on / (on + off)).clamp(MIN_RHO, 1 - MIN_RHO)
    selected = torch.linspace(0, rho[..., 0].numel() - 1, draws, dtype=torch.float64).round().long()
    return rho.flatten(0, 2)[selected], split_rhat(rho[0])


def _estimate_rho_error(num_on: Tensor, count: int, draws: int, rhat: Tensor) -> Tensor:
    """Compute the Monte Carlo error of the mean of rho, `[gate]`; NaN if the chains of a gate disagree.

    Args:
        num_on: The numbers of sentences with the gate on, `[chain, sweep, gate]`.
        count: The number of sentences.
        draws: The number of samples.
        rhat: R-hat of each gate.
    """
    # The chains are independent, so the spread of their means includes the correlation of successive sweeps. Given the
    # gates, rho is Beta(1 + on, 1 + off). If chains do not mix between modes, the number of chains in a mode is not an
    # estimate of its probability, so that no error is known.
    a, total = 1 + num_on, count + 2
    mean, variance = a / total, a * (total - a) / (total**2 * (total + 1))
    spread = (mean.flatten(0, 1).var(0) + variance.mean((0, 1))) / draws
    error = (mean.mean(1).var(0) / len(mean) + spread).sqrt()
    return torch.where(rhat <= MAX_RHAT, error, torch.nan)


def split_rhat(samples: Tensor) -> Tensor:
    """Compute the split R-hat of samples `[chain, draw, ...]`, which is near 1 if chains agree; NaN below 4 draws."""
    # Each chain is split in two halves (Gelman et al. 2013, Bayesian Data Analysis, section 11.4).
    half = samples.shape[1] // 2
    halves = torch.cat([samples[:, :half], samples[:, -half:]])
    within, between = halves.var(1).mean(0), halves.mean(1).var(0)
    return ((half - 1) / half + between / within).sqrt()


def _estimate_log_bayes(log_integrals: Tensor, head: int) -> Tensor:
    """Compute the log Bayes factor of a head and its error, `[2]`.

    Args:
        log_integrals: The log integral of the density of rho in each state of the chains, relative to its value at 0:
            given the other gates, and with all stored settings summed out, `[kind, chain, sweep]`.
        head: The index of the head.
    """
    # As in the exact method, the Bayes factor is the mean of such an integral over the posterior with rho = 0, and one
    # over the mean of its inverse over the free posterior. Bridge sampling combines both. With either kind of integral
    # this is right, so that with the smaller error is used: that of the stored settings if heads have large effects.
    estimates = []
    for by_chain in log_integrals:
        free, restricted = by_chain[:NUM_FREE], by_chain[NUM_FREE + head]
        estimates.append(_bridge_by_group(restricted, free, NUM_GROUPS)[0])
    return min(estimates, key=lambda estimate: float(estimate[1]))
