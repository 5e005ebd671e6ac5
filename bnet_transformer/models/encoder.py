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

    `hidden` is 4 dim by default; `vocabulary` a list of words or their number (None: words are vectors); `features`
    the width of real-valued words, which are mapped to dim; `words` the most that `positions="learned"` can place;
    `readout="word"` a word of the vocabulary (or the features) at each word (the masked word of BERT), a Categorical
    or Normal one of each word or of `pool` ("first", "last", "mean", "sum"); `transform` an
    activation, `s(W x + b)` before the readout; `tie` gives embedding and readout one table.

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
