"""From torch's own transformers to our parameters: the same numbers under the names of `encoder` and its kin."""

from __future__ import annotations

from torch import Tensor, nn

from bnet_transformer.axes import join, stem_of
from bnet_transformer.errors import BNetError
from bnet_transformer.tpm import Norm

TAKEN = "nn.Transformer, nn.TransformerEncoder, nn.TransformerDecoder, a layer of them, nn.MultiheadAttention"


def weights_of(module: nn.Module, stack: str | None = None) -> dict[str, Tensor]:
    """The weights of torch's module as parameters of `encoder` or `encoder_decoder`, for `net.replace`.

    A `Transformer` is an `encoder_decoder`, a `TransformerDecoder` its stack `dec`, a `TransformerEncoder` an
    `encoder` (or `decoder`); a single layer or `MultiheadAttention` is slice 0 of one. `stack` names another stack.

    >>> sorted(weights_of(nn.MultiheadAttention(8, 2, bias=False)))
    ['W_k_0.value', 'W_o_0.value', 'W_q_0.value', 'W_v_0.value']
    """
    if isinstance(module, nn.Transformer):
        if stack is not None:
            raise BNetError("stack", expected="None: a Transformer has the stacks enc and dec", got=stack)
        return {**weights_of(module.encoder, "enc"), **weights_of(module.decoder, "dec")}
    crossed = isinstance(module, nn.TransformerDecoder | nn.TransformerDecoderLayer)
    names = _Names("dec" if crossed and stack is None else stack or "")
    if isinstance(module, nn.TransformerEncoder | nn.TransformerDecoder):
        found = {} if module.norm is None else names.norm("norm", None, module.norm)
        for t, layer in enumerate(module.layers):
            found |= names.layer(t, layer)
        return found
    if isinstance(module, nn.MultiheadAttention):
        return names.attention(0, "", module)
    return names.layer(0, module)


class _Names:
    """The names of one stack's parameters."""

    def __init__(self, stack: str) -> None:
        self.stack = stack

    def layer(self, t: int, layer: nn.Module) -> dict[str, Tensor]:
        """One slice."""
        if not isinstance(layer, nn.TransformerEncoderLayer | nn.TransformerDecoderLayer):
            raise BNetError("module", expected="a transformer of torch", got=type(layer).__name__, allowed=TAKEN)
        found = self.attention(t, "", layer.self_attn)
        norms = [(layer.norm1, "norm1")]
        last = layer.norm2
        if isinstance(layer, nn.TransformerDecoderLayer):
            found |= self.attention(t, "cross_", layer.multihead_attn)
            norms.append((layer.norm2, "cross_norm"))
            last = layer.norm3
        for norm, role in norms:
            found |= self.norm(role, t, norm)
        found |= self.norm("norm2", t, last) if layer.norm_first else self.norm("x", t + 1, last)
        pairs = {"in": layer.linear1, "out": layer.linear2}
        for name, linear in pairs.items():
            found |= self._named("ffn", t, {f"weight_{name}": linear.weight, f"bias_{name}": linear.bias})
        return found

    def attention(self, t: int, prefix: str, module: nn.MultiheadAttention) -> dict[str, Tensor]:
        """The weights of all heads, a plate of them leading."""
        dim, heads = module.embed_dim, module.num_heads
        if module.in_proj_weight is None or module.bias_k is not None or module.add_zero_attn:
            got = "kdim or vdim of their own, add_bias_kv or add_zero_attn"
            raise BNetError("MultiheadAttention", expected="keys and values as wide as queries, none added", got=got)
        found: dict[str, Tensor] = {}
        weights = module.in_proj_weight.chunk(3)
        biases = [None] * 3 if module.in_proj_bias is None else module.in_proj_bias.chunk(3)
        for role, weight, bias in zip("qkv", weights, biases, strict=True):
            found |= self._named(f"W_{prefix}{role}", t, {"value": weight.reshape(heads, -1, dim)})
            found |= self._named(prefix + role, t, {"bias": None if bias is None else bias.reshape(heads, -1)})
        out = module.out_proj
        found |= self._named(f"W_{prefix}o", t, {"value": out.weight.reshape(dim, heads, -1).movedim(1, 0)})
        return found | self._named(f"{prefix}mix", t, {"bias": out.bias})

    def norm(self, role: str, t: int | None, norm: nn.Module) -> dict[str, Tensor]:
        """Gain and bias of a layer norm."""
        if not isinstance(norm, nn.LayerNorm) or norm.weight is None or norm.eps != Norm().eps:
            raise BNetError("norm", expected=f"a LayerNorm with a gain and eps={Norm().eps}", got=norm)
        return self._named(role, t, {"gain": norm.weight, "bias": norm.bias})

    def _named(self, role: str, t: int | None, values: dict[str, Tensor | None]) -> dict[str, Tensor]:
        owner = join(stem_of(self.stack, role), () if t is None else (t,))
        return {f"{owner}.{name}": v.detach().clone().contiguous() for name, v in values.items() if v is not None}
