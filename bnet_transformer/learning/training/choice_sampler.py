"""Draw the states of latent choices during decoding: first those of the prompt, then those of each new word.

The choices of the prompt are drawn from their joint posterior given its words, one node after another:
`P(c_1 | words) P(c_2 | c_1, words) ...`. The choices of a new word are drawn given the words and the choices so far: no
word depends on them yet, so they have the distribution of their TPM, and one run computes it.
The words are drawn given the choices. So words and choices have the joint distribution of the net, given the prompt.
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from bnet_transformer.compiler import CompiledModule
from bnet_transformer.compiler.execution_state import ExecutionRequest
from bnet_transformer.data import Evidence
from bnet_transformer.data.task import Task
from bnet_transformer.declare import NodeSpec
from bnet_transformer.errors import BNetError
from bnet_transformer.inference import posterior
from bnet_transformer.learning.training.decoding_interventions import DecodingInterventions, build_arguments


@dataclass
class ChoiceSampler:
    """Draws the choices on which the next word depends, for a batch of rows.

    Args:
        module: The compiled net.
        task: The task of the net.
        stack: The stack in which words are generated.
        prompts: The padded prompts, `[rows, word]`.
        lengths: The number of words of each prompt, `[rows]`.
        generator: The random numbers.
        interventions: The interventions at each word.
    """

    module: CompiledModule
    task: Task
    stack: str
    prompts: Tensor
    lengths: Tensor
    generator: torch.Generator
    interventions: DecodingInterventions | None = None
    states: dict[str, Tensor] = field(default_factory=dict)
    has_state: dict[str, Tensor] = field(default_factory=dict)

    def draw(self, x: Mapping[str, Tensor], mask: Mapping[str, Tensor] | None, count: int) -> dict[str, Tensor]:
        """Draw the choices of a new word; return the states of all choices that `do` does not set.

        Args:
            x: The words so far, `[rows, word]`, with the padding that the net requires.
            mask: The masks of the other stacks.
            count: The number of words so far.

        Returns:
            The states by node group, `[rows, *plates, word]`.
        """
        specs, size = self._find_choices(build_arguments(self.interventions, x)), x[self.stack].shape[1]
        if not self.states and specs:
            self._draw_prompt(specs, x, mask)
        per_word = [spec for spec in specs if spec.group.word_stack == self.stack]
        for spec in per_word:
            self._extend(spec.group.name, size)
        is_new = count - 1 >= self.lengths
        if bool(is_new.any()):
            counts = torch.full_like(self.lengths, count)
            self._draw_nodes(per_word, count - 1, is_new, x, mask, counts, is_leaf=True)
        return {spec.group.name: self._narrow(spec.group.name, self.states, size) for spec in specs}

    def get_states(self, count: int) -> dict[str, Tensor]:
        """The drawn states of the first `count` words, `[rows, *plates, word]`."""
        return {name: self._narrow(name, self.states, count) for name in self.states}

    def _find_choices(self, arguments: Mapping[str, Any]) -> list[NodeSpec]:
        """The choices on which the next word depends and that `do` does not set, parents first."""
        network = self.module.network
        needed = network.ancestral_specs(self.task.readouts[0])
        choices = {spec.group.index for spec in network.choices}
        set_names = arguments.get("do", {})
        return [spec for spec in needed if spec.group.index in choices and spec.group.name not in set_names]

    def _narrow(self, name: str, tensors: Mapping[str, Tensor], size: int) -> Tensor:
        """The tensor of a choice at the first words."""
        is_per_word = self.module.network.get_spec(name).group.word_stack == self.stack
        return tensors[name][..., :size] if is_per_word else tensors[name]

    def _extend(self, name: str, size: int) -> None:
        """Add words without drawn states, up to a number of words."""
        missing = max(0, size - self.states[name].shape[-1])
        self.states[name] = functional.pad(self.states[name], (0, missing))
        self.has_state[name] = functional.pad(self.has_state[name], (0, missing))

    def _draw_prompt(
        self, specs: Sequence[NodeSpec], x: Mapping[str, Tensor], mask: Mapping[str, Tensor] | None
    ) -> None:
        """Draw the choices without words and those of the words of each prompt, given the full prompts."""
        words = max(self.prompts.shape[1], x[self.stack].shape[1])
        x = {**x, self.stack: functional.pad(self.prompts, (0, words - self.prompts.shape[1]))}
        graph = self.module.network.graph
        for spec in specs:
            stack = spec.group.word_stack
            sizes = [graph.plate_sizes[plate] for plate in spec.group.plates]
            sizes += [] if stack is None else [x[stack].shape[1]]
            self.states[spec.group.name] = self.prompts.new_zeros(len(self.prompts), *sizes)
            self.has_state[spec.group.name] = self.states[spec.group.name].bool()
        outside = [spec for spec in specs if spec.group.word_stack != self.stack]
        inside = [spec for spec in specs if spec.group.word_stack == self.stack]
        is_leaf = bool((self.lengths == 1).all())  # no readout is observed
        rows = torch.ones_like(self.lengths, dtype=torch.bool)
        self._draw_nodes(outside, None, rows, x, mask, self.lengths, is_leaf=is_leaf)
        for word in range(int(self.lengths.max())):
            self._draw_nodes(inside, word, word < self.lengths, x, mask, self.lengths, is_leaf=is_leaf)

    def _draw_nodes(
        self,
        specs: Sequence[NodeSpec],
        word: int | None,
        rows: Tensor,
        x: Mapping[str, Tensor],
        mask: Mapping[str, Tensor] | None,
        counts: Tensor,
        *,
        is_leaf: bool,
    ) -> None:
        """Draw nodes of some rows, one after another, given the words and the states that are drawn already.

        Args:
            specs: The choices.
            word: The word of the nodes; None for all nodes.
            rows: The rows with new states, `[rows]`.
            x: The words.
            mask: The masks of the other stacks.
            counts: The number of words of each row, all except the last of which have an observed readout.
            is_leaf: Whether no observed readout depends on these nodes.
        """
        size, names = x[self.stack].shape[1], [spec.group.name for spec in specs]
        arguments = drop_shifts(build_arguments(self.interventions, x), names) if specs else {}
        words = {self.task.readouts[0].group.name: observe_next_words(x[self.stack], counts[:, None] - 1)}
        for spec in specs:
            name, is_recurrent = spec.group.name, spec.group.index in self.module.network.graph.recurrent
            states, has_state = self.states[name], self.has_state[name]
            for index in itertools.product(*map(range, states.shape[1:])):
                if word is not None and index[-1] != word:
                    continue
                if is_leaf and not is_recurrent:
                    probs = self._compute_conditional(spec, x, mask, arguments)
                else:
                    evidence = {**words, **self._collect_evidence(size)}
                    probs = posterior(self.module, name, evidence, x, mask, **arguments)
                at: tuple[slice | int, ...] = (slice(None), *index)
                sampled = torch.multinomial(probs[at].expand(len(rows), -1), 1, generator=self.generator)[:, 0]
                states[at] = torch.where(rows, sampled, states[at])
                has_state[at] |= rows

    def _collect_evidence(self, size: int) -> dict[str, Evidence]:
        """The drawn states of the first `size` words as evidence, by node group."""
        return {
            name: Evidence(self._narrow(name, self.states, size), self._narrow(name, self.has_state, size))
            for name, masks in self.has_state.items()
            if bool(masks.any())
        }

    def _compute_conditional(
        self, spec: NodeSpec, x: Mapping[str, Tensor], mask: Mapping[str, Tensor] | None, arguments: Mapping[str, Any]
    ) -> Tensor:
        """The distribution of a choice given the drawn states, `[rows or 1, *plates, word, state]`."""
        name, size = spec.group.name, x[self.stack].shape[1]
        states = {other: self._narrow(other, self.states, size) for other in self.states if other != name}
        fields = {**arguments, "do": {**arguments.get("do", {}), **states}}
        execution, _ = self.module.run(ExecutionRequest((name,), x, mask, **fields))
        return self.module.compute_output(execution, spec.group.index).exp()


def observe_next_words(ids: Tensor, counts: int | Tensor) -> Evidence:
    """The evidence of the words after the first `counts` words: the readout of word i is word i + 1.

    Args:
        ids: The words, `[rows, word]`.
        counts: The number of observed readouts, one for all rows or `[rows, 1]`.
    """
    value = torch.cat([ids[:, 1:], torch.zeros_like(ids[:, :1])], 1)
    observed = (torch.arange(ids.shape[1], device=ids.device) < counts).expand(value.shape)
    return Evidence(value, observed)


def drop_shifts(arguments: Mapping[str, Any], choices: Sequence[str]) -> dict[str, Any]:
    """The arguments of `posterior`; an error for a shift, which cannot be added in each state of latent choices."""
    if arguments.get("perturbations"):
        expected = "a net without latent choices, or with all of them set"
        hint = f"Set {', '.join(choices)} in do= too"
        raise BNetError("Shift", expected=expected, actual=f"latent choices {', '.join(choices)}", hint=hint)
    return {name: value for name, value in arguments.items() if name != "perturbations"}
