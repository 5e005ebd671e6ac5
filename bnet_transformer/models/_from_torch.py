"""Convert the weights of torch's modules to parameters of `encoder`, `encoder_decoder`, `decoder` and `recurrent`."""

from __future__ import annotations

import itertools
from collections.abc import Mapping

import torch
from torch import Tensor, nn

from bnet_transformer._core.naming import join_name, join_stem
from bnet_transformer.bnet import BNet
from bnet_transformer.errors import BNetError
from bnet_transformer.tpm import FeedForward, Norm, Recur
from bnet_transformer.tpm.steps import ACTIVATIONS

SUPPORTED_MODULES = "nn.Transformer, its encoder, its decoder, a layer of them, nn.MultiheadAttention, nn.RNN, nn.LSTM"
LAYER_TYPES = (nn.TransformerEncoderLayer, nn.TransformerDecoderLayer)
RECURRENT_ROLES = {nn.RNN: ("x",), nn.LSTM: ("input", "forget", "candidate", "output")}  # in the order of torch's rows
RoleParameters = tuple[str, int | None, dict[str, Tensor | None]]  # a role, its slice, its parameters
ATTENTION_ROLES = ("W_q", "W_k", "W_v", "W_o", "q", "k", "v", "mix")


def weights_of(module: nn.Module, stack: str | None = None, *, net: BNet | None = None) -> dict[str, Tensor]:
    """The weights of a torch module as parameters of a net, for `net.replace`.

    The weights of an `nn.Transformer` are those of an `encoder_decoder`, and an `nn.TransformerDecoder` is its stack
    `dec`. An `nn.TransformerEncoder` is an `encoder` (or `decoder`). A single layer and an `nn.MultiheadAttention` are
    slice 0 of a net. An `nn.RNN` or `nn.LSTM` is a `recurrent` net; its bias is the sum of torch's two biases.

    Args:
        module: The torch module.
        stack: The name of the stack in the names of the parameters. None (default) for `"dec"` if the module has cross
            attention, otherwise for no name.
        net: The net for the weights. If it is given, the function checks that the slices and final norms of the net
            have exactly the parameters of the module, and the same activation. Default None.

    Returns:
        Copies of the parameters by name.

    Raises:
        BNetError: If the module is not supported, or does not correspond to `net`.

    >>> sorted(weights_of(nn.MultiheadAttention(8, 2, bias=False)))
    ['W_k_0.value', 'W_o_0.value', 'W_q_0.value', 'W_v_0.value']
    """
    if net is not None and not isinstance(net, BNet):
        raise BNetError("net", expected="the BNet for the weights", actual=net)
    if stack is not None and not isinstance(stack, str):
        raise BNetError("stack", expected="the name of a stack, a string", actual=stack)
    parameters: dict[str, Tensor] = {}
    for part, name in _get_stacks(module, stack).items():
        weights = _convert_stack(part, name)
        if net is not None:
            _check_complete(net, name, part, weights)
        parameters |= weights
    return parameters


def _get_stacks(module: nn.Module, stack: str | None) -> dict[nn.Module, str]:
    """The parts of a module that are stacks, and the names of the stacks."""
    if not isinstance(module, nn.Module):
        raise BNetError("module", expected="a supported torch module", actual=module, allowed=SUPPORTED_MODULES)
    if isinstance(module, nn.Transformer):
        if stack is not None:
            raise BNetError("stack", expected="None, because a Transformer has the stacks enc and dec", actual=stack)
        return {module.encoder: "enc", module.decoder: "dec"}
    crossed = isinstance(module, nn.TransformerDecoder | nn.TransformerDecoderLayer)
    return {module: "dec" if crossed and stack is None else stack or ""}


def _convert_stack(module: nn.Module, stack: str) -> dict[str, Tensor]:
    """The parameters of one stack."""
    if isinstance(module, nn.TransformerEncoder | nn.TransformerDecoder):
        parts = [] if module.norm is None else [_convert_norm("norm", None, module.norm)]
        for t, layer in enumerate(module.layers):
            parts += _convert_layer(t, layer)
    elif isinstance(module, nn.MultiheadAttention):
        parts = _convert_attention(0, "", module)
    elif isinstance(module, nn.RNN | nn.LSTM):
        parts = _convert_recurrent(module)
    else:
        parts = _convert_layer(0, module)
    parameters: dict[str, Tensor] = {}
    for role, step, values in parts:
        owner = join_name(join_stem(stack, role), () if step is None else (step,))
        tensors = {name: value for name, value in values.items() if value is not None}
        parameters |= {f"{owner}.{name}": value.detach().clone().contiguous() for name, value in tensors.items()}
    return parameters


def _check_complete(net: BNet, stack: str, module: nn.Module, weights: Mapping[str, Tensor]) -> None:
    """Raise an error unless a stack of the net has exactly these parameters and the same activation."""
    specs = [spec for spec in net.network.specs if spec.group.stack == stack]
    steps = range(net.network.graph.slices.get(stack, 0))
    inside = [m for m in specs if m.group.role == "norm" or m.group.step in steps]
    if isinstance(module, nn.MultiheadAttention):
        inside = [spec for spec in inside if spec.group.role in ATTENTION_ROLES]
    net_parameters = {f"{spec.param_prefix}.{name}" for spec in inside for name in spec.parameters}
    sides = ("the module has no", net_parameters - weights.keys()), ("the net has no", weights.keys() - net_parameters)
    differences = [f"{side} {', '.join(sorted(names)[:4])} ({len(names)} in all)" for side, names in sides if names]
    if differences:
        hint = "Build the net with the slices=, bias=, norm= and final_norm= of the module"
        raise BNetError("net", expected="the parameters of the module", actual="; ".join(differences), hint=hint)
    x = torch.linspace(-4, 4, 65)  # torch's activation is a function or a module, so values are compared
    activations = [layer.activation for layer in module.modules() if isinstance(layer, LAYER_TYPES)]
    activations += [getattr(torch, module.nonlinearity)] if isinstance(module, nn.RNN) else []
    kind = Recur if isinstance(module, nn.RNN) else FeedForward
    net_activations = {m.tpm.activation for m in inside if isinstance(m.tpm, kind)}
    for activation, name in itertools.product(activations, sorted(net_activations)):
        if not torch.allclose(activation(x), ACTIVATIONS[name](x), atol=1e-6):
            raise BNetError("activation of the module", expected=f"that of the net, {name!r}", actual=activation)


def _convert_layer(t: int, layer: nn.Module) -> list[RoleParameters]:
    """The parameters of one slice."""
    if not isinstance(layer, LAYER_TYPES):
        raise BNetError(
            "module", expected="a supported torch module", actual=type(layer).__name__, allowed=SUPPORTED_MODULES
        )
    parts = [*_convert_attention(t, "", layer.self_attn), _convert_norm("norm1", t, layer.norm1)]
    last = layer.norm2
    if isinstance(layer, nn.TransformerDecoderLayer):
        parts += [*_convert_attention(t, "cross_", layer.multihead_attn), _convert_norm("cross_norm", t, layer.norm2)]
        last = layer.norm3
    parts.append(_convert_norm("norm2", t, last) if layer.norm_first else _convert_norm("x", t + 1, last))
    for name, linear in (("in", layer.linear1), ("out", layer.linear2)):
        parts.append(("ffn", t, {f"weight_{name}": linear.weight, f"bias_{name}": linear.bias}))
    return parts


def _convert_attention(t: int, prefix: str, module: nn.MultiheadAttention) -> list[RoleParameters]:
    """The parameters of multi-head attention; the plate of heads is the first dim."""
    dim, heads = module.embed_dim, module.num_heads
    if module.in_proj_weight is None or module.bias_k is not None or module.add_zero_attn:
        expected = "no option kdim, vdim, add_bias_kv or add_zero_attn"
        raise BNetError("MultiheadAttention", expected=expected)
    parts: list[RoleParameters] = []
    weights = module.in_proj_weight.chunk(3)
    biases = [None] * 3 if module.in_proj_bias is None else module.in_proj_bias.chunk(3)
    for role, weight, bias in zip("qkv", weights, biases, strict=True):
        parts.append((f"W_{prefix}{role}", t, {"value": weight.reshape(heads, -1, dim)}))
        parts.append((prefix + role, t, {"bias": None if bias is None else bias.reshape(heads, -1)}))
    out = module.out_proj
    parts.append((f"W_{prefix}o", t, {"value": out.weight.reshape(dim, heads, -1).movedim(1, 0)}))
    return [*parts, (f"{prefix}mix", t, {"bias": out.bias})]


def _convert_recurrent(module: nn.RNN | nn.LSTM) -> list[RoleParameters]:
    """The parameters of all slices of a recurrent net, from torch's matrices with the rows of all gates."""
    if module.bidirectional or module.proj_size:
        actual = "bidirectional" if module.bidirectional else f"proj_size={module.proj_size}"
        expected = "a module with one direction and without projection"
        raise BNetError("module", expected=expected, actual=actual)
    if module.dropout and module.num_layers > 1:
        expected = "no dropout between layers, which a recurrent net does not have"
        actual = f"dropout={module.dropout}"
        raise BNetError("module", expected=expected, actual=actual, hint="Set module.dropout = 0.0")
    roles = RECURRENT_ROLES[type(module)]
    parts: list[RoleParameters] = []
    for t in range(module.num_layers):
        values = {name: getattr(module, f"weight_{suffix}_l{t}") for name, suffix in (("W", "ih"), ("U", "hh"))}
        if module.bias:
            values["bias"] = getattr(module, f"bias_ih_l{t}") + getattr(module, f"bias_hh_l{t}")
        for k, role in enumerate(roles):
            rows = {name: value.chunk(len(roles))[k] for name, value in values.items()}
            parts.append((role, t + 1 if role == "x" else t, rows))
    return parts


def _convert_norm(role: str, t: int | None, norm: nn.Module) -> RoleParameters:
    """The gain and the bias of a layer norm."""
    if not isinstance(norm, nn.LayerNorm) or norm.weight is None or norm.eps != Norm().eps:
        raise BNetError("norm", expected=f"a LayerNorm with a gain and eps={Norm().eps}", actual=norm)
    return role, t, {"gain": norm.weight, "bias": norm.bias}
