"""From torch's own modules to our parameters: the same numbers under the names of `encoder`, `recurrent` and others."""

from __future__ import annotations

import itertools
from collections.abc import Mapping

import torch
from torch import Tensor, nn

from bnet_transformer.axes import join, stem_of
from bnet_transformer.bnet import BNet
from bnet_transformer.errors import BNetError
from bnet_transformer.network import Member
from bnet_transformer.tpm import FeedForward, Norm, Recur
from bnet_transformer.tpm.steps import ACTIVATIONS

TAKEN = "nn.Transformer, its encoder, its decoder, a layer of them, nn.MultiheadAttention, nn.RNN, nn.LSTM"
LAYERS = (nn.TransformerEncoderLayer, nn.TransformerDecoderLayer)
RECURRENT = {nn.RNN: ("x",), nn.LSTM: ("input", "forget", "candidate", "output")}  # in the order of torch's rows
ATTENTION = ("W_q", "W_k", "W_v", "W_o", "q", "k", "v", "mix")


def weights_of(module: nn.Module, stack: str | None = None, *, net: BNet | None = None) -> dict[str, Tensor]:
    """The weights of torch's module as parameters of `encoder` or `encoder_decoder`, for `net.replace`.

    A `Transformer` is an `encoder_decoder`, a `TransformerDecoder` its stack `dec`, a `TransformerEncoder` an
    `encoder` (or `decoder`); a single layer or `MultiheadAttention` is slice 0 of one. An `RNN` or `LSTM` is a
    `recurrent` net, whose one bias is the sum of their two. `stack` names another stack.
    With the `net` that is to have them, a copy that would be no whole one is refused: parameters of its slices and
    final norms that the module does not have, those of the module that it does not have, another activation.

    >>> sorted(weights_of(nn.MultiheadAttention(8, 2, bias=False)))
    ['W_k_0.value', 'W_o_0.value', 'W_q_0.value', 'W_v_0.value']
    """
    if net is not None and not isinstance(net, BNet):
        raise BNetError("net", expected="the net that is to have the weights", got=net)
    if stack is not None and not isinstance(stack, str):
        raise BNetError("stack", expected="the name of a stack, a string", got=stack)
    found: dict[str, Tensor] = {}
    for part, name in _stacks(module, stack).items():
        weights = _weights(part, name)
        if net is not None:
            _check_whole(net, name, part, weights)
        found |= weights
    return found


def _stacks(module: nn.Module, stack: str | None) -> dict[nn.Module, str]:
    """The stacks of a module and their names with us."""
    if not isinstance(module, nn.Module):
        raise BNetError("module", expected="a transformer of torch", got=module, allowed=TAKEN)
    if isinstance(module, nn.Transformer):
        if stack is not None:
            raise BNetError("stack", expected="None: a Transformer has the stacks enc and dec", got=stack)
        return {module.encoder: "enc", module.decoder: "dec"}
    crossed = isinstance(module, nn.TransformerDecoder | nn.TransformerDecoderLayer)
    return {module: "dec" if crossed and stack is None else stack or ""}


def _weights(module: nn.Module, stack: str) -> dict[str, Tensor]:
    """The weights of one stack."""
    names = _Names(stack)
    if isinstance(module, nn.TransformerEncoder | nn.TransformerDecoder):
        found = {} if module.norm is None else names.norm("norm", None, module.norm)
        for t, layer in enumerate(module.layers):
            found |= names.layer(t, layer)
        return found
    if isinstance(module, nn.MultiheadAttention):
        return names.attention(0, "", module)
    if isinstance(module, nn.RNN | nn.LSTM):
        return names.recurrent(module)
    return names.layer(0, module)


def _check_whole(net: BNet, stack: str, module: nn.Module, weights: Mapping[str, Tensor]) -> None:
    """Refuse a copy into the slices and the final norm of a stack that leaves some of either side out."""
    members = [member for member in net.network.members if member.family.stack == stack]
    inside = [m for m in members if m.family.role == "norm" or _in_slice(m, net.network.graph.slices[stack])]
    if isinstance(module, nn.MultiheadAttention):
        inside = [member for member in inside if member.family.role in ATTENTION]
    ours = {f"{member.owner}.{name}" for member in inside for name in member.parameters}
    sides = (("the module has no", ours - weights.keys()), ("the net has no", weights.keys() - ours))
    told = [f"{who} {', '.join(sorted(names)[:4])} ({len(names)} in all)" for who, names in sides if names]
    if told:
        wanted, allowed = (
            "the parameters of the module, all of them",
            "slices=, bias=, norm=, final_norm= as it has them",
        )
        raise BNetError("net", expected=wanted, got="; ".join(told), allowed=allowed)
    x = torch.linspace(-4, 4, 65)
    theirs = [each.activation for each in module.modules() if isinstance(each, LAYERS)]
    theirs += [getattr(torch, module.nonlinearity)] if isinstance(module, nn.RNN) else []
    steps = Recur if isinstance(module, nn.RNN) else FeedForward
    mine = {m.tpm.activation for m in inside if isinstance(m.tpm, steps)}
    for activation, name in itertools.product(theirs, sorted(mine)):
        if not torch.allclose(activation(x), ACTIVATIONS[name](x), atol=1e-6):
            raise BNetError("activation", expected=f"that of the net, {name!r}", got=activation)


def _in_slice(member: Member, slices: int) -> bool:
    return member.family.step is not None and 0 <= member.family.step < slices


class _Names:
    """The names of one stack's parameters."""

    def __init__(self, stack: str) -> None:
        self.stack = stack

    def layer(self, t: int, layer: nn.Module) -> dict[str, Tensor]:
        """One slice."""
        if not isinstance(layer, LAYERS):
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

    def recurrent(self, module: nn.RNN | nn.LSTM) -> dict[str, Tensor]:
        """All slices of a recurrent net."""
        if module.bidirectional or module.proj_size:
            got = "bidirectional" if module.bidirectional else f"proj_size={module.proj_size}"
            raise BNetError("module", expected="words read from the first to the last, states not projected", got=got)
        if module.dropout and module.num_layers > 1:
            wanted, allowed = "no dropout between layers, for a recurrent net has none", "module.dropout = 0.0"
            raise BNetError("module", expected=wanted, got=f"dropout={module.dropout}", allowed=allowed)
        roles = RECURRENT[type(module)]
        found: dict[str, Tensor] = {}
        for t in range(module.num_layers):
            parts = {"W": f"weight_ih_l{t}", "U": f"weight_hh_l{t}"}
            values = {name: getattr(module, theirs) for name, theirs in parts.items()}
            if module.bias:
                values["bias"] = getattr(module, f"bias_ih_l{t}") + getattr(module, f"bias_hh_l{t}")
            for k, role in enumerate(roles):
                place = t + 1 if role == "x" else t
                found |= self._named(role, place, {name: v.chunk(len(roles))[k] for name, v in values.items()})
        return found

    def norm(self, role: str, t: int | None, norm: nn.Module) -> dict[str, Tensor]:
        """Gain and bias of a layer norm."""
        if not isinstance(norm, nn.LayerNorm) or norm.weight is None or norm.eps != Norm().eps:
            raise BNetError("norm", expected=f"a LayerNorm with a gain and eps={Norm().eps}", got=norm)
        return self._named(role, t, {"gain": norm.weight, "bias": norm.bias})

    def _named(self, role: str, t: int | None, values: dict[str, Tensor | None]) -> dict[str, Tensor]:
        owner = join(stem_of(self.stack, role), () if t is None else (t,))
        return {f"{owner}.{name}": v.detach().clone().contiguous() for name, v in values.items() if v is not None}
