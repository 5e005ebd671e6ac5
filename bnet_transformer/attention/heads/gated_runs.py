"""Runs of sentences with gated heads: the sites where heads are summed, the likelihood of a run, batches of runs.

A site is a group of heads that a later node sums, `a = sum_nu W_o^nu a^nu`. The likelihood is that of the observations,
or a Normal around the output of the full net. A batch has many gate settings of one slice, or one setting for each
sentence. For many settings of one slice, all values that do not depend on its heads are computed once per sentence.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from bnet_transformer._core.distributed import SINGLE_PROCESS, DistributedContext
from bnet_transformer.compiler.execution_state import ExecutionRequest, ExecutionState
from bnet_transformer.compiler.module import CompiledModule, find_default_output
from bnet_transformer.compiler.plan import Plan
from bnet_transformer.data import Batch
from bnet_transformer.data.task import find_deciding_stacks
from bnet_transformer.declare import Network, NodeSpec
from bnet_transformer.errors import BNetError, UnsupportedError, unknown_name_error
from bnet_transformer.inference.factors import align_evidence, evidence_log_prob, mask_unobserved
from bnet_transformer.reference import ATOL

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
    side_inputs: tuple[str, ...]
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


def _find_side_inputs(network: Network, index: int, needed: set[int]) -> tuple[str, ...]:
    """Find the word-dependent groups that needed descendants of a group read and that do not descend from it."""
    graph, descendants = network.graph, {index}
    order = [i for component in graph.components for i in component if i in needed]
    for i in order:
        if any(edge.parent in descendants for edge in graph.in_edges[i]):
            descendants.add(i)
    decided = find_deciding_stacks(network, [network.specs[i] for i in order])
    read = {edge.parent for i in descendants - {index} for edge in graph.in_edges[i]} - descendants
    specs = [network.specs[i] for i in sorted(read) if decided[i] and network.graph.in_edges[i]]
    return tuple(m.group.name for m in specs if not m.tpm.is_random)


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
        site_values: The values of the sites and side inputs with all heads on, by name.
        full_output: The output with all heads on; None with observations.
    """

    indices: Tensor
    batch: Batch
    site_values: Mapping[str, Tensor]
    full_output: Tensor | None

    def __len__(self) -> int:
        return len(self.indices)


@dataclass(frozen=True)
class GatedRuns:
    """A net, its sites, the sentences (under torchrun those of this rank), and the targets of the likelihood.

    With observations, `log P` of a sentence is `log P(y | x, gates)` of the `targets`, up to a constant. Without them
    it is `- |f(gates) - f(all on)|^2 / 2` of an output f, which is `log Normal(f(all on); f(gates), sigma)` times
    `sigma^2`.
    """

    module: CompiledModule
    sites: tuple[HeadSite, ...]
    corpus: Batch
    targets: tuple[str, ...]
    num_heads: int
    ranks: DistributedContext = SINGLE_PROCESS

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
        site_names = dict.fromkeys(name for site in sites for name in (site.name, *site.side_inputs))
        output = () if self.is_observed else self.targets
        names, network = (*site_names, *output), self.module.network
        for indices, corpus in self.corpus.split_by_length(network, max_words) if len(self.corpus) else ():
            values: list[Tensor] = []
            if names:
                execution, plan = self.execute(ExecutionRequest(names, corpus.x, training=False))
                values = [self.module.compute_output(execution, index) for index in plan.outputs]
            site_values = dict(zip(site_names, values, strict=False))
            yield CorpusPart(indices, corpus, site_values, values[-1] if output else None)

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
        a = part.site_values[site.name]
        a = a.expand(len(part), *a.shape[1:])  # one row for all sentences if it depends on none of their words
        gates = gates.to(a)
        num_dims = a.dim() - 1 - len(site.plate_sizes)
        gated = (a[:, None] * gates.reshape(1, count, *site.plate_sizes, *[1] * num_dims)).flatten(0, 1)
        side_values = {name: part.site_values[name] for name in site.side_inputs}
        do = {k: v if len(v) == 1 else v.repeat_interleave(count, 0) for k, v in side_values.items()}
        do[site.name] = gated
        full = None if part.full_output is None else part.full_output.repeat_interleave(count, 0)
        return self._log_probs(corpus, full, do=do).reshape(len(part), count).double()

    def gated_log_probs(self, part: CorpusPart, gates: Tensor) -> Tensor:
        """Compute `log P` of each sentence of a part with its gates in all sites, `[sentence, site, head]`."""
        by_site = {site.name: gates[:, k].reshape(len(gates), *site.plate_sizes) for k, site in enumerate(self.sites)}
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
        execution, plan = self.execute(ExecutionRequest(self.targets, batch.x, training=False, **options))
        if not self.is_observed:
            # A value, log probabilities or a mean.
            value = self.module.compute_output(execution, plan.outputs[0])
            difference = value - (value if full_output is None else full_output)
            return -0.5 * difference.square().flatten(1).sum(-1).to(execution.log_dtype)
        total = torch.zeros(1, dtype=execution.log_dtype, device=execution.device)
        for name in self.targets:
            spec = self.module.network.get_spec(name)
            evidence = align_evidence(execution, spec, batch.evidence[name])
            table = mask_unobserved(evidence, evidence_log_prob(execution, spec.group.index, spec, evidence, ATOL))
            total = total + table.sum(tuple(range(1, table.dim())))
        return total

    def execute(self, request: ExecutionRequest) -> tuple[ExecutionState, Plan]:
        """Run a net that has no latent choices."""
        execution, plan = self.module.run(request)
        if plan.enumerated:
            name = self.module.network.specs[plan.enumerated[0]].group.name
            raise UnsupportedError(name, expected="a net without latent choices", actual="a latent choice")
        return execution, plan

    def log_prob_table(self, gates: Tensor, update_progress: Callable[[int], object]) -> Tensor:
        """Compute `log P` of each sentence of all ranks for each gate setting, `[site, sentence, setting]`."""
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
        return self.ranks.all_gather(table.transpose(0, 1)).transpose(0, 1) if self.ranks.world_size > 1 else table

    def gradient_part_size(self) -> int:
        """Return the number of words of a part for gradients, which need the activations of every slice."""
        return max(1, min(WORDS_PER_PART, MEMORY_BUDGET // (self.bytes_per_word() * len(self.sites))))

    def bytes_per_word(self) -> int:
        """Return the bytes per word of a run: a small multiple of its widest values."""
        network = self.module.network
        sizes, specs = network.graph.plate_sizes, [m for m in network.specs if m.group.word_stack is not None]
        width = max(math.prod(m.shape) * math.prod(sizes[p] for p in m.group.plates) for m in specs)
        return 16 * width * torch.finfo(network.default_dtype).bits // 8
