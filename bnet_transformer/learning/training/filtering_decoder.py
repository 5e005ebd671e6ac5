"""Decoding of nets with latent choices: the next word, given the words so far, summed over all choices exactly.

`P(y_t | y_(<t), x_(<=t))` averages the readout over the posterior of the choices, given the words so far. In a chain
along words this is forward filtering. Each step is one exact posterior of the readout: there is no cache, so that a
sentence of n words takes O(n^2) words of computation.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from bnet_transformer.compiler import CompiledModule
from bnet_transformer.data import Evidence
from bnet_transformer.data.task import Task
from bnet_transformer.inference import posterior
from bnet_transformer.learning.training.incremental_decoding import find_next_word_readout, pad_to_length


class FilteringDecoder:
    """Computes the readout for one new word after another, for a batch of rows; it replaces `IncrementalDecoder`.

    Args:
        module: The compiled net.
        task: The task of the net; its readout predicts the next word.
        x: The words of each stack, `[rows, word]`.
        mask: The masks of the other stacks.
    """

    def __init__(
        self, module: CompiledModule, task: Task, x: Mapping[str, Tensor], mask: Mapping[str, Tensor] | None
    ) -> None:
        self.readout, self.stack = find_next_word_readout(task)
        self.module, self.x, self.mask = module, dict(x), dict(mask or {})
        self.exact_length = task.encoders[self.stack].exact_length
        self.log_probs = self._compute_log_probs()

    def _compute_log_probs(self) -> Tensor:
        """Compute the log probabilities of the word after the last one, `[rows, states]`."""
        # The readout of word i is word i + 1: all readouts but the last are observed.
        ids, name = self.x[self.stack], self.readout.group.name
        count = ids.shape[1]
        padded = pad_to_length(ids, self.exact_length)
        value = torch.cat([padded[:, 1:], torch.zeros_like(padded[:, :1])], 1)
        observed = (torch.arange(padded.shape[1], device=ids.device) < count - 1).expand(value.shape)
        evidence, x = {name: Evidence(value, observed)}, {**self.x, self.stack: padded}
        probs = posterior(self.module, name, evidence, x, self.mask or None)
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

    def reorder(self, rows: Tensor) -> None:
        """Replace row r by row `rows[r]`."""
        self.x = {stack: value[rows] for stack, value in self.x.items()}
