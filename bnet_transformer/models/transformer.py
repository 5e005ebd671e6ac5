"""The transformer (Vaswani et al. 2017): encoder, decoder-only (GPT), and encoder with decoder."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

from bnet_transformer._core.checks import check_int, check_mapping, check_names
from bnet_transformer._core.naming import Reach
from bnet_transformer.bnet import BNet
from bnet_transformer.declare import Declaration
from bnet_transformer.errors import BNetError
from bnet_transformer.models.builders import TransformerOptions, Vocabulary, parse_mask, takes_options

# --------------------------------------------------------------------------------------------------------------------
# The encoder of the transformer (Vaswani et al. 2017); with a readout of words it is a net such as BERT.
#
#     x_0 = sqrt(d) E[token] + position
#     a^h_i = sum_j v^h_j softmax_j(q^h_i . k^h_j / sqrt(d_k))     mix_i = sum_h W_o^h a^h_i + b
#     norm1 = norm(x + mix)                                         x' = norm(norm1 + ffn(norm1))
#
# With `norm="pre"` the norm is before each sublayer, `x' = x + sublayer(norm(x))`, and once more after the last slice.


@takes_options(TransformerOptions, readout=None)
def encoder(options: TransformerOptions) -> BNet:
    """A transformer encoder, such as BERT: each word attends to every word.

    Args:
        {options}

    Returns:
        The net.

    Raises:
        BNetError: If an option is invalid, or two options exclude each other.

    >>> import bnet_transformer as bt
    >>> s = bt.encoder(dim=8, heads=2, slices=1, vocabulary=["the", "cat", "sat"]).sentence("the cat sat")
    >>> s["q_0_1_2"].shape, s["x_1_2"].shape, s.attention(0).shape      # head 1, word 2
    (torch.Size([4]), torch.Size([8]), torch.Size([2, 3, 3]))
    """
    return _build_stack("encoder", options)


def _build_stack(name: str, options: TransformerOptions) -> BNet:
    """The net of one stack: the encoder and the decoder."""
    builder = options.builder
    nodes, embedding = builder.build_slice(parse_mask(options.mask)), builder.build_embedding(options.position_tpm)
    end = [*builder.build_final_norm(), *builder.build_readout(options.readout, options.pool, options.transform)]
    stack = builder.build_stack(nodes, embedding, end, options.slices)
    return BNet(Declaration([stack], builder.build_embedding_table(), builder.plates, name=name), seed=options.seed)


# --------------------------------------------------------------------------------------------------------------------
# The decoder-only transformer, such as GPT, which predicts the next word at each word.
#
#     x_0 = sqrt(d) E[token] + position     a^h_i = sum_(j <= i) v^h_j softmax_j(q^h_i . k^h_j / sqrt(d_k))
#     P(y_i | words up to i) = softmax(E x_i)_(y_i)
#
# It is the encoder with a causal mask. `y_i` is the word that follows word i.


@takes_options(TransformerOptions, mask="causal")
def decoder(options: TransformerOptions) -> BNet:
    """A decoder-only transformer, such as GPT: each word attends to itself and earlier words and predicts the next.

    Args:
        {options}

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
    return _build_stack("decoder", options)


# --------------------------------------------------------------------------------------------------------------------
# The transformer of Vaswani et al. (2017): an encoder, and a decoder that attends to the encoder's last state.
#
#     cross_q_i = W_cross_q norm1_i     cross_k_j = W_cross_k enc_x_j     cross_v_j = W_cross_v enc_x_j
#     cross_a_i = sum_j cross_v_j softmax_j(cross_q_i . cross_k_j / sqrt(d_k)),   j over the encoder's words
#
# The decoder's words are the outputs shifted right by one (`bt.models.shift_right`). `dec_y_i` is output i, which
# depends on the outputs before i and on all words of the encoder. Both embeddings and the readout share one table.


DEFAULT_MASKS: dict[str, object] = {"enc": None, "dec": "causal", "cross": None}


@dataclass(frozen=True, kw_only=True)
class TwoStackOptions(TransformerOptions):
    """The options of an encoder with a decoder.

    Args:
        target_vocabulary: The words of the decoder, if they differ; they then have a separate table. None (default)
            for `vocabulary`.
    """

    target_vocabulary: Vocabulary = None


@takes_options(TwoStackOptions)
def encoder_decoder(options: TwoStackOptions) -> BNet:
    """The transformer of Vaswani et al. (2017): an encoder, and a decoder that attends to its output.

    The defaults are the base size: 6 slices, 8 heads, width 512, and 2048 in the feed-forward map. The stacks are named
    `enc` and `dec`.

    Args:
        {options}

    Returns:
        The net.

    Raises:
        BNetError: If an option is invalid, or two options exclude each other.

    >>> import bnet_transformer as bt
    >>> net = bt.encoder_decoder(dim=8, heads=2, slices=1, vocabulary=["the", "cat", "sat"])
    >>> s = net.sentence({"enc": "the cat sat", "dec": "the cat"})
    >>> s.attention(0, role="dec_cross_a").shape                # [head, word, attended word]
    torch.Size([2, 2, 3])
    """
    is_shared = options.target_vocabulary is None
    encoding = replace(options.builder, tie=options.tie and is_shared)
    decoding = options.builder if is_shared else replace(options.builder, vocabulary=options.target_vocabulary)
    positions, reaches, num_slices = options.position_tpm, _parse_masks(options.mask), _parse_slices(options.slices)
    nodes, embedding = encoding.build_slice(reaches["enc"]), encoding.build_embedding(positions)
    enc = encoding.build_stack(nodes, embedding, encoding.build_final_norm(), num_slices["enc"], "enc")
    nodes, embedding = decoding.build_slice(reaches["dec"], reaches["cross"]), decoding.build_embedding(positions)
    end = [*decoding.build_final_norm(), *decoding.build_readout(options.readout, options.pool, options.transform)]
    dec = decoding.build_stack(nodes, embedding, end, num_slices["dec"], "dec")
    table = decoding.build_embedding_table()
    return BNet(Declaration([enc, dec], table, decoding.plates, name="encoder-decoder"), seed=options.seed)


def _parse_slices(slices: object) -> dict[str, int]:
    """The number of slices of each stack."""
    by_stack = slices if isinstance(slices, Mapping) else {"enc": slices, "dec": slices}
    if {*by_stack} != {"enc", "dec"}:
        raise BNetError("slices", expected="an integer, or a mapping with 'enc' and 'dec'", actual=slices)
    return {name: check_int(f"slices of {name!r}", value) for name, value in by_stack.items()}


def _parse_masks(mask: Mapping[str, object] | None) -> dict[str, Reach]:
    """The reaches in the encoder, in the decoder, and from the decoder to the encoder."""
    given = check_mapping("mask", mask)
    check_names("mask", given, DEFAULT_MASKS)
    reaches = {name: parse_mask(value, f"mask of {name!r}") for name, value in {**DEFAULT_MASKS, **given}.items()}
    if reaches["cross"].kind not in ("every", "mask"):
        expected = "a mask without an order of words, because words of two sentences have no common order"
        allowed = "None, a table of booleans [word of the decoder, word of the encoder]"
        raise BNetError("mask of 'cross'", expected=expected, actual=str(reaches["cross"]), allowed=allowed)
    return reaches
