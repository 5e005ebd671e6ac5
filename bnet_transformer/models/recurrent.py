"""Recurrent nets: that of Elman (1990), and the LSTM (Hochreiter and Schmidhuber 1997, with the forget gate of 2000).

    rnn     x'_i = tanh(W x_i + U x'_(i-1) + b)

    lstm    input_i = sigmoid(W x_i + U x'_(i-1) + b); forget_i and output_i likewise; candidate_i with tanh
            cell_i = forget_i * cell_(i-1) + input_i * candidate_i          x'_i = output_i * tanh(cell_i)

Word i depends on the previous word, and so on all earlier words; the first word receives zeros. torch calls `x'` h.
"""

from __future__ import annotations

from bnet_transformer._core.checks import check_choice
from bnet_transformer.bnet import BNet
from bnet_transformer.declare import Arrow, Declaration, Node
from bnet_transformer.errors import BNetError
from bnet_transformer.models.builders import WORD, StackBuilder, Vocabulary
from bnet_transformer.tpm import TPM, Gated, Memory, Recur

CELLS = ("rnn", "lstm")
GATE_ACTIVATIONS = {"input": "sigmoid", "forget": "sigmoid", "output": "sigmoid", "candidate": "tanh"}


def recurrent(
    dim: int = 512,
    *,
    cell: str = "lstm",
    slices: int = 1,
    features: int | None = None,
    vocabulary: Vocabulary = None,
    activation: str | None = None,
    bias: bool = True,
    readout: TPM | str | None = "auto",
    pool: str | None = None,
    transform: str | None = None,
    tie: bool = True,
    seed: int = 0,
) -> BNet:
    """A recurrent net: an LSTM or an Elman network (RNN).

    Args:
        dim: The width of the state. Default 512.
        cell: `"lstm"` (default) or `"rnn"`.
        slices: The number of slices, which torch calls layers. Default 1.
        features: The width of words that are vectors. None (default) for `dim`.
        vocabulary: The words as a list, or their number. None (default) for words that are vectors.
        activation: The activation of an RNN: `"relu"`, `"gelu"`, `"gelu_tanh"`, `"silu"`, `"tanh"`, `"sigmoid"` or
            `"identity"`. None (default) for `"tanh"`. An LSTM accepts only None.
        bias: Whether there are biases. Default True.
        readout: The readout `y`: `"word"` for the next word, or the next vector if there are `features`; a
            `Categorical` or `Normal`; or None. `"auto"` (default) is `"word"` if there is a vocabulary or features,
            else None.
        pool: A readout of the sentence instead of each word: from its `"first"` or `"last"` word, or from the `"mean"`
            or `"sum"` of the words. None (default) for each word.
        transform: The activation s of a map `s(W x + b)` before the readout. None (default) for no map.
        tie: Whether embedding and readout share one table. Default True.
        seed: The seed of the initial parameters. Default 0.

    Returns:
        The net.

    Raises:
        BNetError: If an option is invalid, or two options exclude each other.

    >>> import bnet_transformer as bt
    >>> net = bt.recurrent(8, vocabulary=["the", "cat", "sat"])
    >>> net.sentence("the cat").tpm("y_1").probs.shape          # the word after "cat"
    torch.Size([3])
    """
    check_choice("cell", cell, CELLS)
    if activation is not None and cell != "rnn":
        expected = "None for an LSTM, because its gates have fixed activations"
        raise BNetError("activation", expected=expected, actual=activation)
    builder = StackBuilder(dim, bias, features, vocabulary=vocabulary, tie=tie)
    state = Recur(builder.dim, activation or "tanh", bias)
    rnn = [Node("x", state, ["x", _previous_word("x")], WORD, shape=(builder.dim,))]
    nodes, embedding = _build_lstm(builder.dim, bias) if cell == "lstm" else rnn, builder.build_embedding(mapped=False)
    stack = builder.build_stack(nodes, embedding, builder.build_readout(readout, pool, transform), slices)
    return BNet(Declaration([stack], builder.build_embedding_table(), name=cell), seed=seed)


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
