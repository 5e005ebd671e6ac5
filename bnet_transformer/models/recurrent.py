"""Recurrent nets: that of Elman (1990), and the LSTM (Hochreiter and Schmidhuber 1997, with the forget gate of 2000).

    rnn     x'_i = tanh(W x_i + U x'_(i-1) + b)

    lstm    input_i = sigmoid(W x_i + U x'_(i-1) + b); forget_i and output_i likewise; candidate_i with tanh
            cell_i = forget_i * cell_(i-1) + input_i * candidate_i          x'_i = output_i * tanh(cell_i)

Word i depends on the previous word, and so on all earlier words; the first word receives zeros. torch calls `x'` h.
"""

from __future__ import annotations

from dataclasses import dataclass

from bnet_transformer._core.checks import check_choice
from bnet_transformer.bnet import BNet
from bnet_transformer.declare import Arrow, Declaration, Node
from bnet_transformer.errors import BNetError
from bnet_transformer.models.builders import WORD, NetOptions, StackBuilder, takes_options
from bnet_transformer.tpm import Gated, Memory, Recur

CELLS = ("rnn", "lstm")
GATE_ACTIVATIONS = {"input": "sigmoid", "forget": "sigmoid", "output": "sigmoid", "candidate": "tanh"}


@dataclass(frozen=True, kw_only=True)
class RecurrentOptions(NetOptions):
    """The options of a recurrent net.

    Args:
        cell: `"lstm"` (default) or `"rnn"`.
    """

    cell: str = "lstm"


@takes_options(RecurrentOptions, slices=1, activation=None)
def recurrent(options: RecurrentOptions) -> BNet:
    """A recurrent net: an LSTM or an Elman network (RNN).

    Args:
        {options}

    Returns:
        The net.

    Raises:
        BNetError: If an option is invalid, or two options exclude each other.

    >>> import bnet_transformer as bt
    >>> net = bt.recurrent(8, vocabulary=["the", "cat", "sat"])
    >>> net.sentence("the cat").tpm("y_1").probs.shape          # the word after "cat"
    torch.Size([3])
    """
    check_choice("cell", options.cell, CELLS)
    if options.activation is not None and options.cell != "rnn":
        expected = "None for an LSTM, because its gates have fixed activations"
        raise BNetError("activation", expected=expected, actual=options.activation)
    builder = StackBuilder(options.dim, options.bias, options.features, vocabulary=options.vocabulary, tie=options.tie)
    dim, bias = builder.dim, builder.bias
    state = Recur(dim, options.activation or "tanh", bias)
    rnn = [Node("x", state, ["x", _previous_word("x")], WORD, shape=(dim,))]
    nodes, embedding = _build_lstm(dim, bias) if options.cell == "lstm" else rnn, builder.build_embedding(mapped=False)
    end = builder.build_readout(options.readout, options.pool, options.transform)
    stack = builder.build_stack(nodes, embedding, end, options.slices)
    return BNet(Declaration([stack], builder.build_embedding_table(), name=options.cell), seed=options.seed)


def _build_lstm(dim: int, bias: bool) -> list[Node]:
    """The nodes of one slice of an LSTM: the gates and the candidate, the cell, and the next state."""
    gates = [
        Node(role, Recur(dim, s, bias), ["x", _previous_word("x")], WORD, shape=(dim,))
        for role, s in GATE_ACTIVATIONS.items()
    ]
    cell = Node("cell", Memory(), ["input", "candidate", "forget", Arrow("cell", "before")], WORD, shape=(dim,))
    return [*gates, cell, Node("x", Gated("tanh"), ["output", "cell"], WORD, shape=(dim,))]


def _previous_word(role: str) -> Arrow:
    """The arrow from the state that this slice computes for the word before."""
    return Arrow(role, "before", slice="next")
