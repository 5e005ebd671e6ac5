"""Which states a lens reads, and the nodes through which the readout depends on the last of them."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass

import torch
from torch import Tensor

from bnet_transformer.compiler.gather import ExecutionState
from bnet_transformer.declare import Network, NodeSpec
from bnet_transformer.errors import BNetError
from bnet_transformer.inference.values import compute_table
from bnet_transformer.tpm import Norm

MAX_CHUNK_ENTRIES = 2**22  # log probabilities at once: 16 MB in float32


@dataclass(frozen=True)
class LensPath:
    """The states of a stack, and the readout of the last of them.

    Attributes:
        readout: The readout.
        states: The states `x_0`, ..., `x_T`.
        between: The groups on the paths from `x_T` to the readout, parents first.
    """

    readout: NodeSpec
    states: tuple[NodeSpec, ...]
    between: tuple[NodeSpec, ...]

    @property
    def state_names(self) -> tuple[str, ...]:
        """The names of the states."""
        return tuple(spec.group.name for spec in self.states)

    @property
    def norm(self) -> str | None:
        """The names of the norms between the last state and the readout; None without a norm."""
        return ", ".join(spec.group.name for spec in self.between if isinstance(spec.tpm, Norm)) or None

    def count_chunk_rows(self, num_words: int) -> int:
        """The number of rows of `num_words` words whose log probabilities are computed at once."""
        return max(1, MAX_CHUNK_ENTRIES // (num_words * (self.readout.tpm.states or 1)))


def find_lens_path(network: Network, readout: object = None) -> LensPath:
    """The path of a lens.

    Args:
        network: The net.
        readout: The name of the readout; None for the only one.

    Raises:
        BNetError: There is no such readout, or it does not depend on a state over the words of a stack.
    """
    spec = _find_readout(network, readout)
    last = _find_last_state(network, spec)
    groups = network.graph.by_stem[last.group.stem]
    specs = [network.specs[group.index] for group in groups if group.slice is not None]
    states = tuple(m for m in specs if m.group.slice <= last.group.slice and m.shape == last.shape)  # type: ignore[operator]
    inner = network.graph.descendants([last.group.index]) & network.graph.ancestral_set([spec.group.index])
    inner -= {last.group.index, spec.group.index}
    return LensPath(spec, states, tuple(m for m in network.ancestral_specs(spec) if m.group.index in inner))


def _find_readout(network: Network, name: object) -> NodeSpec:
    """The readout with this name, or the only one that depends on a state."""
    leaves = [m for m in network.specs if m.tpm.is_random and not network.graph.out_edges[m.group.index]]
    if name is not None:
        spec = network.specs[network.graph.get_group(name).index]  # type: ignore[arg-type]
        _check_readout(spec, leaves)
        return spec
    readouts = [m for m in leaves if _is_discrete(m) and not m.group.plates and _find_states(network, m)]
    if len(readouts) > 1:
        names = ", ".join(m.group.name for m in readouts)
        raise BNetError("lens: the net has several readouts", hint=f"Pass readout=: {names}")
    if not readouts:
        names = ", ".join(f"{m.group.name} ({type(m.tpm).__name__})" for m in leaves)
        actual = f"a net with the readouts {names}" if leaves else "a net without a readout"
        hint = "Declare a discrete readout, such as Node('y', Categorical(n), ['x'], plates=['word'])"
        raise BNetError("lens", expected="a discrete readout of a hidden state", actual=actual, hint=hint)
    return readouts[0]


def _check_readout(spec: NodeSpec, leaves: Collection[NodeSpec]) -> None:
    """Raise an error for a group that is no discrete readout without plates."""
    if spec not in leaves or not _is_discrete(spec) or spec.group.plates:
        plates = f" with the plates {', '.join(spec.group.plates)}" if spec.group.plates else ""
        actual = f"{spec.group.name}, a node of kind {spec.tpm.kind!r}{plates}"
        allowed = ", ".join(m.group.name for m in leaves if _is_discrete(m) and not m.group.plates)
        expected = "a discrete node without children and without plates other than word"
        raise BNetError("readout", expected=expected, actual=actual, allowed=allowed or None)


def _is_discrete(spec: NodeSpec) -> bool:
    """True for a discrete node with a fixed number of states."""
    return spec.tpm.kind == "discrete" and spec.tpm.states is not None


def _find_states(network: Network, readout: NodeSpec) -> list[NodeSpec]:
    """The states over words on which a readout depends, but not only through later states."""
    result, visited = dict[int, NodeSpec](), set[int]()
    frontier = [parent.index for parent in readout.parents]
    while frontier:
        index = frontier.pop()
        if index in visited:
            continue
        visited.add(index)
        spec = network.specs[index]
        if network.is_word_state(spec.group) and spec.tpm.kind in ("deterministic", "input"):
            result[index] = spec
        else:
            frontier += (edge.parent for edge in network.graph.in_edges[index])
    return [result[index] for index in sorted(result)]


def _find_last_state(network: Network, readout: NodeSpec) -> NodeSpec:
    """The last state that a readout reads: of its stack if there is one, else of the last stack."""
    states = _find_states(network, readout)
    if not states:
        expected = "a readout that depends on a hidden state of the words of a stack"
        raise BNetError("lens", expected=expected, actual=readout.group.name)
    same_stack = [m for m in states if m.group.stack == readout.group.stack]
    return max(same_stack or states, key=lambda m: (m.group.slice or 0, m.group.index))


def compute_log_probs(execution: ExecutionState, readout: NodeSpec) -> Tensor:
    """`log P(readout | parents)` after a run, `[row, word, state]`; one word for a readout without words."""
    return _select_rows(execution, compute_table("logits", readout, execution)[1])


def get_word_values(execution: ExecutionState, spec: NodeSpec, batch: int, num_words: int) -> Tensor:
    """The value of a state after a run, `[row, word, feature]`."""
    return _select_rows(execution, execution.values[spec.group.index]).expand(batch, num_words, -1)


def _select_rows(execution: ExecutionState, value: Tensor) -> Tensor:
    """A value in the layout as `[row, word, feature]`; an error if it depends on latent choices."""
    layout = execution.layout
    if any(value.shape[dim] > 1 for dim in range(layout.rank) if dim not in (layout.batch_dim, layout.word_dim)):
        names = [execution.network.specs[index].group.name for index in layout.enumerated]
        listed = ", ".join(names[:6]) + (", …" if len(names) > 6 else "")
        expected, actual = "a net without latent choices", f"states that depend on {listed}"
        hint = "Fit a net whose heads are summed (combine='concat'); s.lens() is the mean over latent choices"
        raise BNetError("tuned lens", expected=expected, actual=actual, hint=hint)
    return value.reshape(value.shape[layout.batch_dim], value.shape[layout.word_dim], -1)


def entropy(log_probs: Tensor) -> Tensor:
    """The entropy in nats over the last dim; `0 log 0` is 0."""
    terms = log_probs.exp().mul_(log_probs)
    total = terms.sum(-1)
    if bool(total.isnan().any()) and not bool(log_probs.isnan().any()):
        total = terms.nansum(-1)
    return -total


class DivergenceFrom:
    """Computes `KL(end || lens)` in nats over the last dim; states with probability 0 at the end do not count.

    Args:
        end: The log probabilities of the end, `[..., state]`.
    """

    def __init__(self, end: Tensor) -> None:
        self.log_probs, self.probs = end, end.exp()
        self.has_zeros = bool(end.isneginf().any())

    def __call__(self, log_probs: Tensor) -> Tensor:
        """The divergence of log probabilities, `[..., state]`, from the end."""
        terms = self.probs * (self.log_probs - log_probs)
        if self.has_zeros:
            terms = torch.where(self.log_probs.isneginf(), 0.0, terms)
        return terms.sum(-1)
