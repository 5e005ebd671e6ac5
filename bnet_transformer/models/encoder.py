"""The encoder of the vanilla transformer (Vaswani et al. 2017), and with a readout a BERT-like net.

    x_0 = sqrt(d) E[token] + position
    a^h_i = sum_j v^h_j softmax_j(q^h_i . k^h_j / sqrt(d_k))     mix_i = sum_h W_o^h a^h_i + b
    norm1 = norm(x + mix)                                         x' = norm(norm1 + ffn(norm1))

`norm="pre"` norms what enters a sublayer instead, `x' = x + sublayer(norm(x))`, and once more after the last slice.
"""

from __future__ import annotations

from bnet_transformer.bnet import BNet
from bnet_transformer.declare import Declaration, Stack
from bnet_transformer.models._builders import BlockBuilder, Vocabulary, get_positions, is_tied, list_words, parse_mask
from bnet_transformer.tpm import TPM


def encoder(
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
    mask: object = None,
    readout: TPM | str | None = None,
    pool: str | None = None,
    transform: str | None = None,
    tie: bool = True,
    seed: int = 0,
) -> BNet:
    """A vanilla encoder: every word reads every word, unless `mask` says otherwise.

    Args:
        dim: The width of a word's state.
        heads: Heads of a slice.
        slices: How many slices.
        hidden: The width within the feed-forward node; None for 4 dim.
        features: The width of real-valued words, which are mapped to dim.
        vocabulary: A list of words or their number; None where words are vectors.
        words: The maximum number of words for `positions="learned"`.
        positions: The position encoding: `"sinusoidal"`, `"learned"`, a TPM, or None.
        norm: `"post"` or `"pre"`.
        final_norm: Whether a norm follows the last slice; None for `norm="pre"` alone.
        activation: The activation of the feed-forward node.
        bias: Whether maps have a bias.
        dropout: The probability with which training drops a number.
        mask: Which words a word reads; None for all.
        readout: `"word"` for a word of the vocabulary (or its features) at each word, as the masked word of BERT; a
            Categorical or Normal readout of each word or of `pool`; or None.
        pool: `"first"`, `"last"`, `"mean"` or `"sum"` for a readout of the sentence.
        transform: An activation, `s(W x + b)` before the readout.
        tie: Whether embedding and readout share one table.
        seed: The seed of the parameters.

    >>> import bnet_transformer as bt
    >>> s = bt.encoder(dim=8, heads=2, slices=1, vocabulary=["the", "cat", "sat"]).sentence("the cat sat")
    >>> s["q_0_1_2"].shape, s["x_1_2"].shape, s.attention(0).shape      # head 1, word 2
    (torch.Size([4]), torch.Size([8]), torch.Size([2, 3, 3]))
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
        Declaration([stack], builder.build_embedding_table(vocabulary, tied=tied), builder.plates, name="encoder"),
        seed=seed,
    )
