"""The transformer (Vaswani et al. 2017): encoder, decoder-only (GPT), and encoder with decoder."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from bnet_transformer._core.checks import check_int, check_mapping, check_names
from bnet_transformer._core.naming import Reach
from bnet_transformer.bnet import BNet
from bnet_transformer.declare import Declaration
from bnet_transformer.errors import BNetError
from bnet_transformer.models.builders import BlockBuilder, Vocabulary, get_positions, parse_mask
from bnet_transformer.tpm import TPM

# --------------------------------------------------------------------------------------------------------------------
# The encoder of the transformer (Vaswani et al. 2017); with a readout of words it is a net such as BERT.
#
#     x_0 = sqrt(d) E[token] + position
#     a^h_i = sum_j v^h_j softmax_j(q^h_i . k^h_j / sqrt(d_k))     mix_i = sum_h W_o^h a^h_i + b
#     norm1 = norm(x + mix)                                         x' = norm(norm1 + ffn(norm1))
#
# With `norm="pre"` the norm is before each sublayer, `x' = x + sublayer(norm(x))`, and once more after the last slice.


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
    """A transformer encoder, such as BERT: each word attends to every word.

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
        mask: The words to which each word attends: None (default) for every word, `"causal"`, a `Reach`, or a table of
            booleans `[word, word]`.
        readout: The readout `y`: `"word"` for a word of the vocabulary (or its vector) at each word, as in the masked
            language model of BERT; a `Categorical` or `Normal`; or None (default).
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
    >>> s = bt.encoder(dim=8, heads=2, slices=1, vocabulary=["the", "cat", "sat"]).sentence("the cat sat")
    >>> s["q_0_1_2"].shape, s["x_1_2"].shape, s.attention(0).shape      # head 1, word 2
    (torch.Size([4]), torch.Size([8]), torch.Size([2, 3, 3]))
    """
    sizes = dim, bias, features, dropout, heads, hidden
    builder = BlockBuilder(*sizes, norm, final_norm, activation, vocabulary=vocabulary, tie=tie)
    position_tpm = get_positions(positions, dim, words)
    return builder.build_net("encoder", mask, slices, position_tpm, readout, pool, transform, seed)


# --------------------------------------------------------------------------------------------------------------------
# The decoder-only transformer, such as GPT, which predicts the next word at each word.
#
#     x_0 = sqrt(d) E[token] + position     a^h_i = sum_(j <= i) v^h_j softmax_j(q^h_i . k^h_j / sqrt(d_k))
#     P(y_i | words up to i) = softmax(E x_i)_(y_i)
#
# It is the encoder with a causal mask. `y_i` is the word that follows word i.


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
    sizes = dim, bias, features, dropout, heads, hidden
    builder = BlockBuilder(*sizes, norm, final_norm, activation, vocabulary=vocabulary, tie=tie)
    position_tpm = get_positions(positions, dim, words)
    return builder.build_net("decoder", mask, slices, position_tpm, readout, pool, transform, seed)


# --------------------------------------------------------------------------------------------------------------------
# The transformer of Vaswani et al. (2017): an encoder, and a decoder that attends to the encoder's last state.
#
#     cross_q_i = W_cross_q norm1_i     cross_k_j = W_cross_k enc_x_j     cross_v_j = W_cross_v enc_x_j
#     cross_a_i = sum_j cross_v_j softmax_j(cross_q_i . cross_k_j / sqrt(d_k)),   j over the encoder's words
#
# The decoder's words are the outputs shifted right by one (`bt.models.shift_right`). `dec_y_i` is output i, which
# depends on the outputs before i and on all words of the encoder. Both embeddings and the readout share one table.


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
    """The transformer of Vaswani et al. (2017): an encoder, and a decoder that attends to its output.

    The defaults are the base size: 6 slices, 8 heads, width 512, and 2048 in the feed-forward map. The stacks are named
    `enc` and `dec`.

    Args:
        dim: The width of the hidden state of a word. Default 512.
        heads: The number of heads in each slice. Default 8.
        slices: The number of slices (layers) of both stacks, or a mapping with `"enc"` and `"dec"`. Default 6.
        hidden: The width of the hidden layer of the feed-forward map. None (default) for `4 * dim`.
        features: The width of words that are vectors, in both stacks; a learnable map takes them to `dim`. None
            (default) for width `dim` without a map.
        vocabulary: The words of both stacks as a list, or their number. None (default) for words that are vectors.
        target_vocabulary: The words of the decoder, if they differ. None (default) for `vocabulary`.
        words: The maximum number of words, which `positions="learned"` requires. None (default) otherwise.
        positions: The position encoding: `"sinusoidal"` (default), `"learned"`, a TPM without parents, or None.
        norm: The place of the norms: `"post"` (default) after the residual sum, or `"pre"` before each sublayer.
        final_norm: Whether a norm follows the last slice. None (default): True unless `norm="post"`.
        activation: The activation of the feed-forward map: `"relu"` (default), `"gelu"`, `"gelu_tanh"`, `"silu"`,
            `"tanh"`, `"sigmoid"` or `"identity"`.
        bias: Whether linear maps and norms have a bias. Default True.
        dropout: The probability with which training sets an entry to zero, from 0 to below 1. Default 0.1.
        mask: A mapping from `"enc"`, `"dec"` and `"cross"` to a mask: None for every word, `"causal"`, a `Reach`, or a
            table of booleans. None (default): causal in the decoder, every word otherwise.
        readout: The readout `y`: `"word"` for the next word, or the next vector if there are `features`; a
            `Categorical` or `Normal`; or None. `"auto"` (default) is `"word"` if there is a vocabulary or features,
            else None.
        tie: Whether one table is the embedding of both stacks and the readout; with `target_vocabulary`, that of the
            decoder and the readout. Default True.
        seed: The seed of the initial parameters. Default 0.

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
    sizes = dim, bias, features, dropout, heads, hidden
    target = vocabulary if target_vocabulary is None else target_vocabulary
    decoding = BlockBuilder(*sizes, norm, final_norm, activation, vocabulary=target, tie=tie)
    encoding = replace(decoding, vocabulary=vocabulary, tie=tie and target_vocabulary is None)
    position_tpm = get_positions(positions, dim, words)
    reaches, num_slices = _parse_masks(mask), _parse_slices(slices)
    nodes, embedding = encoding.build_slice(reaches["enc"]), encoding.build_embedding(position_tpm)
    enc = encoding.build_stack(nodes, embedding, encoding.build_final_norm(), num_slices["enc"], "enc")
    nodes, embedding = decoding.build_slice(reaches["dec"], reaches["cross"]), decoding.build_embedding(position_tpm)
    end = [*decoding.build_final_norm(), *decoding.build_readout(readout)]
    dec = decoding.build_stack(nodes, embedding, end, num_slices["dec"], "dec")
    table = decoding.build_embedding_table()
    return BNet(Declaration([enc, dec], table, decoding.plates, name="encoder-decoder"), seed=seed)


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
