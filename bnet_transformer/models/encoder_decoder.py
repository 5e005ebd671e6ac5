"""The vanilla transformer (Vaswani et al. 2017): an encoder, and a decoder that reads its last state.

    cross_q_i = W_cross_q norm1_i     cross_k_j = W_cross_k enc_x_j     cross_v_j = W_cross_v enc_x_j
    cross_a_i = sum_j cross_v_j softmax_j(cross_q_i . cross_k_j / sqrt(d_k)),   j over the encoder's words

The decoder's words are the outputs shifted right by one (`bt.models.shift_right`): `dec_y_i` is output i, and it
depends on the outputs before i and on all words of the encoder. One table serves both embeddings and the readout.
"""

from __future__ import annotations

from collections.abc import Mapping

from bnet_transformer._core.checks import check_int, check_mapping, check_names
from bnet_transformer._core.naming import Reach
from bnet_transformer.bnet import BNet
from bnet_transformer.declare import Declaration, Stack
from bnet_transformer.errors import BNetError
from bnet_transformer.models._builders import BlockBuilder, Vocabulary, get_positions, is_tied, list_words, parse_mask
from bnet_transformer.tpm import TPM

DEFAULT_MASKS: dict[str, object] = {"enc": None, "dec": "causal", "cross": None}


def encoder_decoder(
    dim: int = 512,
    *,
    heads: int = 8,
    slices: int | Mapping[str, int] = 6,
    hidden: int | None = None,
    features: int | None = None,
    vocabulary: Vocabulary = None,
    target_vocabulary: Vocabulary = None,
    words: int | None = None,
    positions: TPM | str | None = "sinusoidal",
    norm: str = "post",
    final_norm: bool | None = None,
    activation: str = "relu",
    bias: bool = True,
    dropout: float = 0.1,
    mask: Mapping[str, object] | None = None,
    readout: TPM | str | None = "auto",
    tie: bool = True,
    seed: int = 0,
) -> BNet:
    """The vanilla transformer, by default of the base size: 6 slices, 8 heads, 512 wide, 2048 in the feed-forward map.

    The arguments are those of `encoder` and `decoder`. Both stacks share `features` or `vocabulary`, and with `tie`
    one table serves both embeddings and the readout; with a `target_vocabulary` the table is the decoder's and the
    readout's.
    `mask` maps `"enc"`, `"dec"` (causal by default) and `"cross"` to a mask: which words a word reads; `slices` may map
    `"enc"` and `"dec"` to numbers of slices.

    >>> import bnet_transformer as bt
    >>> net = bt.encoder_decoder(dim=8, heads=2, slices=1, vocabulary=["the", "cat", "sat"])
    >>> s = net.sentence({"enc": "the cat sat", "dec": "the cat"})
    >>> s.attention(0, role="dec_cross_a").shape                # [head, word, word that is read]
    torch.Size([2, 2, 3])
    """
    builder = BlockBuilder(dim, bias, features, dropout, heads, hidden, norm, final_norm, activation)
    target = vocabulary if target_vocabulary is None else target_vocabulary
    tied = is_tied(tie, target)
    position_tpm = get_positions(positions, dim, words)
    reaches, num_slices = _parse_masks(mask), _parse_slices(slices)
    enc = Stack(
        builder.build_slice(reaches["enc"]),
        builder.build_embedding(vocabulary, position_tpm, tied=tied and target_vocabulary is None),
        builder.build_final_norm(),
        slices=num_slices["enc"],
        name="enc",
        vocabulary=list_words(vocabulary),
    )
    dec = Stack(
        builder.build_slice(reaches["dec"], reaches["cross"]),
        builder.build_embedding(target, position_tpm, tied=tied),
        [*builder.build_final_norm(), *builder.build_readout(readout, target, tied=tied)],
        slices=num_slices["dec"],
        name="dec",
        vocabulary=list_words(target),
    )
    return BNet(
        Declaration(
            [enc, dec], builder.build_embedding_table(target, tied=tied), builder.plates, name="encoder-decoder"
        ),
        seed=seed,
    )


def _parse_slices(slices: object) -> dict[str, int]:
    """The number of slices of each stack."""
    by_stack = slices if isinstance(slices, Mapping) else {"enc": slices, "dec": slices}
    if {*by_stack} != {"enc", "dec"}:
        raise BNetError("slices", expected="a number, or one for 'enc' and one for 'dec'", actual=slices)
    return {name: check_int(f"slices of {name!r}", value) for name, value in by_stack.items()}


def _parse_masks(mask: Mapping[str, object] | None) -> dict[str, Reach]:
    """The reaches in the encoder, in the decoder, and from the decoder to the encoder."""
    given = check_mapping("mask", mask)
    check_names("mask", given, DEFAULT_MASKS)
    reaches = {name: parse_mask(value, f"mask of {name!r}") for name, value in {**DEFAULT_MASKS, **given}.items()}
    if reaches["cross"].kind not in ("every", "mask"):
        expected = "which of the encoder's words a word reads: the words of two sentences have no common order"
        allowed = "None, a table of booleans [decoder's word, encoder's word]"
        raise BNetError("mask of 'cross'", expected=expected, actual=str(reaches["cross"]), allowed=allowed)
    return reaches
