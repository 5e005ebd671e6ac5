"""The decoder-only transformer, such as GPT, which predicts the next word at each word.

    x_0 = sqrt(d) E[token] + position     a^h_i = sum_(j <= i) v^h_j softmax_j(q^h_i . k^h_j / sqrt(d_k))
    P(y_i | words up to i) = softmax(E x_i)_(y_i)

It is the encoder with a causal mask. `y_i` is the word that follows word i.
"""

from __future__ import annotations

from bnet_transformer.bnet import BNet
from bnet_transformer.declare import Declaration, Stack
from bnet_transformer.models._builders import BlockBuilder, Vocabulary, get_positions, is_tied, list_words, parse_mask
from bnet_transformer.tpm import TPM


def decoder(
    dim: int = 512,
    *,
    heads: int = 8,
    slices: int = 6,
    hidden: int | None = None,
    features: int | None = None,
    vocabulary: Vocabulary = None,
    words: int | None = None,
    positions: TPM | str | None = "sinusoidal",
    norm: str = "post",
    final_norm: bool | None = None,
    activation: str = "relu",
    bias: bool = True,
    dropout: float = 0.1,
    mask: object = "causal",
    readout: TPM | str | None = "auto",
    pool: str | None = None,
    transform: str | None = None,
    tie: bool = True,
    seed: int = 0,
) -> BNet:
    """A decoder-only transformer, such as GPT: each word attends to itself and earlier words and predicts the next.

    Args:
        dim: The width of the hidden state of a word. Default 512.
        heads: The number of heads in each slice. Default 8.
        slices: The number of slices (layers). Default 6.
        hidden: The width of the hidden layer of the feed-forward map. None (default) for `4 * dim`.
        features: The width of words that are vectors, which a learnable map takes to `dim`. None (default) for width
            `dim` without a map.
        vocabulary: The words as a list, or their number. None (default) for words that are vectors.
        words: The maximum number of words, which `positions="learned"` requires. None (default) otherwise.
        positions: The position encoding: `"sinusoidal"` (default), `"learned"`, a TPM without parents, or None.
        norm: The place of the norms: `"post"` (default) after the residual sum, `"pre"` before each sublayer, or
            `"parallel"` before both sublayers, which then run in parallel.
        final_norm: Whether a norm follows the last slice. None (default): True unless `norm="post"`.
        activation: The activation of the feed-forward map: `"relu"` (default), `"gelu"`, `"gelu_tanh"`, `"silu"`,
            `"tanh"`, `"sigmoid"` or `"identity"`.
        bias: Whether linear maps and norms have a bias. Default True.
        dropout: The probability with which training sets an entry to zero, from 0 to below 1. Default 0.1.
        mask: The words to which each word attends: `"causal"` (default), None for every word, a `Reach`, or a table of
            booleans `[word, word]`.
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
    >>> s = bt.decoder(dim=8, heads=2, slices=1, vocabulary=["the", "cat", "sat"]).sentence("the cat sat")
    >>> s.tpm("y_2").probs.shape                                # the word after "sat"
    torch.Size([3])
    >>> s.attention(0)[:, 0]                                    # the first word attends only to itself
    tensor([[1., 0., 0.],
            [1., 0., 0.]])
    """
    builder = BlockBuilder(dim, bias, features, dropout, heads, hidden, norm, final_norm, activation)
    tied = is_tied(tie, vocabulary)
    stack = Stack(
        builder.build_slice(parse_mask(mask)),
        builder.build_embedding(vocabulary, get_positions(positions, dim, words), tied=tied),
        [*builder.build_final_norm(), *builder.build_readout(readout, vocabulary, pool, transform, tied=tied)],
        slices=slices,
        vocabulary=list_words(vocabulary),
    )
    return BNet(
        Declaration([stack], builder.build_embedding_table(vocabulary, tied=tied), builder.plates, name="decoder"),
        seed=seed,
    )
