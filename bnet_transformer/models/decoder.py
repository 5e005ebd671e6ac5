"""The decoder of the vanilla transformer without an encoder: a GPT-like net, which predicts the next word of each word.

    x_0 = sqrt(d) E[token] + position     a^h_i = sum_(j <= i) v^h_j softmax_j(q^h_i . k^h_j / sqrt(d_k))
    P(y_i | words up to i) = softmax(E x_i)_(y_i)

It is the encoder with a causal mask: `y_i` is the word that follows word i.
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
    """A vanilla decoder: a word reads itself and the words before it, and its readout is the next word.

    Args:
        dim: The width of a word's state.
        heads: Heads of a slice.
        slices: How many slices.
        hidden: The width within the feed-forward node; None for 4 dim.
        features: The width of real-valued words, which are mapped to dim.
        vocabulary: A list of words or their number; None where words are vectors.
        words: The most words that `positions="learned"` can place.
        positions: Where a word stands: `"sinusoidal"`, `"learned"`, a TPM, or None.
        norm: `"post"` or `"pre"`.
        final_norm: Whether a norm follows the last slice; None for `norm="pre"` alone.
        activation: The activation of the feed-forward node.
        bias: Whether maps have a bias.
        dropout: The share of numbers that training drops.
        mask: Which words a word reads.
        readout: `"word"` for the next word, a readout of each word, or None; `"auto"` is `"word"` where there is a
            vocabulary or features.
        pool: `"first"`, `"last"`, `"mean"` or `"sum"` for a readout of the sentence.
        transform: An activation, `s(W x + b)` before the readout.
        tie: Whether embedding and readout share one table.
        seed: The seed of the parameters.

    >>> import bnet_transformer as bt
    >>> s = bt.decoder(dim=8, heads=2, slices=1, vocabulary=["the", "cat", "sat"]).sentence("the cat sat")
    >>> s.tpm("y_2").probs.shape                                # the word after "sat"
    torch.Size([3])
    >>> s.attention(0)[:, 0]                                    # the first word reads itself alone
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
