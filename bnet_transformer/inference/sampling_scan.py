"""Samples of groups that depend on each other at neighbouring words, drawn word by word for all samples at once."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

from torch import Tensor

from bnet_transformer.compiler.evaluate import Scan, WordStep
from bnet_transformer.compiler.execution_state import ExecutionState
from bnet_transformer.compiler.gather import pad_dims
from bnet_transformer.declare import NodeSpec
from bnet_transformer.tpm.base import Shape


class SamplingScan(Scan):
    """A scan of one recurrent component that draws the states of its discrete groups, each word from its TPM.

    Nodes of these groups with an entry in `state.patched` have this value for their children.

    Args:
        state: The state of a run with the values of all groups outside the component.
        component: The groups of the component, in the order of their computation at one word.
        shapes: For each sampled group, the shape of its states, `[*layout]`.
        draw_states: A function from logits `[..., states]` to a sample of each row, `[...]`.
        known_states: The states of some nodes of sampled groups, `[*layout]`, and the mask of these nodes.
    """

    def __init__(
        self,
        state: ExecutionState,
        component: Sequence[int],
        shapes: Mapping[int, Shape],
        draw_states: Callable[[Tensor], Tensor],
        known_states: Mapping[int, tuple[Tensor, Tensor]] | None = None,
    ) -> None:
        super().__init__(state, component)
        self.shapes, self.draw_states = shapes, draw_states
        self.known_states = {
            index: (self.split_by_word(states), self.split_by_word(mask))
            for index, (states, mask) in (known_states or {}).items()
        }
        self.states: dict[int, list[Tensor]] = {index: [] for index in shapes}

    def build_step(self, spec: NodeSpec) -> WordStep:
        """The step of one group; a sampled group is drawn from its TPM."""
        index = spec.group.index
        if index not in self.states:
            return super().build_step(spec)

        def sample_word(word: int) -> None:
            context, parents = self.gather_word(spec, word)
            logits = spec.tpm.logits(context, *parents)
            sampled = self.draw_states(logits.expand(*self.shapes[index][:-1], 1, logits.shape[-1]))
            if index in self.known_states:
                states, mask = self.known_states[index]
                sampled = sampled.where(~mask[word], states[word])
            self.states[index].append(sampled)
            self.append_value(index, word, pad_dims(self.state, spec, spec.tpm.emit(context, sampled)))

        return sample_word

    def sample(self) -> dict[int, Tensor]:
        """Draw the states of all words of each sampled group, `[*layout]`."""
        self.run()
        return {index: self.concat(states) for index, states in self.states.items()}
