"""Decoding of nets with latent choices: the next word, given the words so far.

By default, `P(y_t | y_(<t), x_(<=t))` averages the readout over the posterior of the choices, given the words so far.
In a chain along words this is forward filtering. Each step is one exact posterior of the readout: there is no cache, so
that a sentence of n words takes O(n^2) words of computation. If all choices have states, because `do` sets them or
because they are drawn (`ChoiceSampler`), each step is one run of the net with these states.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from bnet_transformer.compiler import CompiledModule
from bnet_transformer.compiler.execution_state import ExecutionRequest
from bnet_transformer.data.task import Task
from bnet_transformer.inference import posterior
from bnet_transformer.learning.training.choice_sampler import ChoiceSampler, drop_shifts, observe_next_words
from bnet_transformer.learning.training.decoding_interventions import DecodingInterventions, build_arguments
from bnet_transformer.learning.training.incremental_decoding import (
    compute_next_word,
    find_next_word_readout,
    pad_to_length,
)


class FilteringDecoder:
    """Computes the readout for one new word after another, for a batch of rows; it replaces `IncrementalDecoder`.

    Args:
        module: The compiled net.
        task: The task of the net; its readout predicts the next word.
        x: The words of each stack, `[rows, word]`.
        mask: The masks of the other stacks.
        interventions: The interventions at each word.
        sampler: Draws the states of choices; None to sum them out.
    """

    def __init__(
        self,
        module: CompiledModule,
        task: Task,
        x: Mapping[str, Tensor],
        mask: Mapping[str, Tensor] | None,
        interventions: DecodingInterventions | None = None,
        sampler: ChoiceSampler | None = None,
    ) -> None:
        self.readout, self.stack = find_next_word_readout(task)
        self.module, self.x, self.mask = module, dict(x), dict(mask or {})
        self.exact_length = task.encoders[self.stack].exact_length
        self.interventions, self.sampler = interventions, sampler
        needed = {spec.group.index for spec in module.network.ancestral_specs(self.readout)}
        self.choices = [spec.group.name for spec in module.network.choices if spec.group.index in needed]
        self.log_probs = self._compute_log_probs()

    def _compute_log_probs(self) -> Tensor:
        """Compute the log probabilities of the word after the last one, `[rows, states]`."""
        ids, name = self.x[self.stack], self.readout.group.name
        count = ids.shape[1]
        x, mask = {**self.x, self.stack: pad_to_length(ids, self.exact_length)}, self.mask or None
        arguments = build_arguments(self.interventions, x)
        if self.sampler is not None:
            states = self.sampler.draw(x, mask, count)
            arguments = {**arguments, "do": {**arguments.get("do", {}), **states}}
        if all(choice in arguments.get("do", {}) for choice in self.choices):
            execution, _ = self.module.run(ExecutionRequest((name,), x, mask, **arguments))
            return compute_next_word(execution, self.readout, count - 1).expand(len(ids), -1)
        evidence = {name: observe_next_words(x[self.stack], count - 1)}
        probs = posterior(self.module, name, evidence, x, mask, **drop_shifts(arguments, self.choices))
        return probs[:, count - 1].log()

    def step(self, ids: Tensor) -> Tensor:
        """Append one word to each row (`ids`, `[rows]`); return the log probabilities of the next, `[rows, states]`."""
        self.x[self.stack] = torch.cat([self.x[self.stack], ids[:, None]], 1)
        self.log_probs = self._compute_log_probs()
        return self.log_probs

    def repeat(self, times: int) -> None:
        """Repeat each row `times` times, for beam search: row r becomes rows `r * times` to `(r + 1) * times - 1`."""
        self.x = {stack: value.repeat_interleave(times, 0) for stack, value in self.x.items()}
        self.mask = {stack: value.repeat_interleave(times, 0) for stack, value in self.mask.items()}
        self.log_probs = self.log_probs.repeat_interleave(times, 0)
        if self.interventions is not None:
            self.interventions.repeat(times)

    def reorder(self, rows: Tensor) -> None:
        """Replace row r by row `rows[r]`."""
        self.x = {stack: value[rows] for stack, value in self.x.items()}
