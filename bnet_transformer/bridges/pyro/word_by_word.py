"""The distribution of random groups that depend on each other at neighbouring words, as one Pyro site for each group.

Given all values, the log probabilities of the words are those of their TPMs, so they are computed at once. Samples are
drawn word by word: the state of a word is drawn from its TPM, given the states of the words before it (or after it).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

import torch
from pyro.distributions.torch_distribution import TorchDistribution
from torch import Tensor
from torch.distributions import Categorical, constraints

from bnet_transformer.compiler.evaluate import Scan
from bnet_transformer.compiler.execution_state import ExecutionState
from bnet_transformer.compiler.gather import gather_parents
from bnet_transformer.declare import NodeSpec
from bnet_transformer.inference.sampling_scan import SamplingScan
from bnet_transformer.tpm.base import broadcast_shapes


class ComponentSampler:
    """Samples of the groups of one recurrent component, drawn together on first use.

    Args:
        state: The state of the run; the values of all groups outside the component are computed.
        component: The groups, in the order of their computation at one word.
        sizes: For each random group, its sizes along sentences, plates and words.
    """

    def __init__(self, state: ExecutionState, component: Sequence[int], sizes: Mapping[int, Sequence[int]]) -> None:
        self.state, self.component = state, component
        self.sampled_groups = [index for index in sizes if index not in state.known]
        self.samples: dict[int, Tensor] = {}
        scan, shapes = Scan(state, component), []
        for index in sizes:  # the dims of enumerated sites on which the component depends
            spec = state.network.specs[index]
            context, parents = scan.gather_word(spec, 0)
            shapes.append(spec.tpm.logits(context, *parents).shape[:-1])
        shape = broadcast_shapes(*shapes)
        self.shapes = {index: broadcast_shapes(shape, size) for index, size in sizes.items()}

    def sample(self, index: int, shape: Sequence[int]) -> Tensor:
        """The states of a group; `shape` has dims of particles before those of the group."""
        if index not in self.samples:
            particles = tuple(shape[: len(shape) - len(self.shapes[index])])
            shapes = {k: (*particles, *self.shapes[k]) for k in self.sampled_groups}
            draw_states = lambda logits: Categorical(logits=logits, validate_args=False).sample()  # noqa: E731
            with torch.no_grad():
                self.samples = SamplingScan(self.state, self.component, shapes, draw_states).sample()
        return self.samples[index].reshape(torch.Size(shape))

    def log_prob(self, spec: NodeSpec, value: Tensor) -> Tensor:
        """`log P` of each word, given the values of the other words."""
        context, parents = gather_parents(self.state, spec)
        log_prob: Tensor = Categorical(logits=spec.tpm.logits(context, *parents), validate_args=False).log_prob(value)
        return log_prob


class WordByWord(TorchDistribution):
    """The distribution of the states of a random group that depends on itself at the neighbouring word."""

    arg_constraints: ClassVar[dict[str, Any]] = {}
    support = constraints.nonnegative_integer
    has_enumerate_support = False

    def __init__(self, sampler: ComponentSampler, spec: NodeSpec, batch_shape: Sequence[int]) -> None:
        self.sampler, self.spec = sampler, spec
        super().__init__(torch.Size(batch_shape), torch.Size(), validate_args=False)

    def sample(self, sample_shape: Sequence[int] = ()) -> Tensor:
        """Draw the states of all words."""
        return self.sampler.sample(self.spec.group.index, (*sample_shape, *self.batch_shape))

    def log_prob(self, value: Tensor) -> Tensor:
        """The log probability of the state of each word, given the others."""
        return self.sampler.log_prob(self.spec, value)

    def expand(self, batch_shape: Sequence[int], _instance: Any = None) -> WordByWord:
        """The distribution with more leading dims."""
        return WordByWord(self.sampler, self.spec, batch_shape)
