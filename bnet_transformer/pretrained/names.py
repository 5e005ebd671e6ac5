"""The mapping between names of Hugging Face or TransformerLens and names of a net, for parameters and nodes.

    bert.encoder.layer.2.attention.self.query.weight                   <->   W_q_2.value
    bert.encoder.layer.2.attention.self.query.output[:, 5, 96:128]     <->   q_2_3_5      the output of a module
    bert.encoder.layer.2.attention.output.dense.input[..., 96:128]     <->   a_2_3_*      the input of a module
    hidden_states[2], attentions[2][:, 3, 5, :]                        <->   x_2_*, j_2_3_5

A star is every head or word. The names of Hugging Face are those of the class with the net's readout, or of the model
without a head. The names of TransformerLens:

    blocks.2.attn.hook_q[..., 3, :]         <->   q_2_3_*     slice 2, head 3, every word
    blocks.2.attn.hook_q[:, 5, 3, :]        <->   q_2_3_5     only word 5
    blocks.2.attn.hook_pattern[:, 3, 5, :]  <->   j_2_3_5     attention of word 5: P(j | i)

A node without a hook raises an error that lists the nodes with a hook.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import product

from bnet_transformer._core.naming import (
    FIRST_STATE,
    NEXT_STATE,
    POST_NORM_HOOKS,
    PRE_NORM_HOOKS,
    join_stem,
    split_pattern,
)
from bnet_transformer.bnet import BNet
from bnet_transformer.declare import Network, as_network
from bnet_transformer.errors import BNetError, UnknownNameError, unknown_name_error
from bnet_transformer.graph import NodeGroup
from bnet_transformer.pretrained.families import FAMILIES, family_of
from bnet_transformer.pretrained.family import READOUT_ONLY_PARTS, WeightLocation
from bnet_transformer.pretrained.weights import map_parameters, parse_owner, resolve_part
from bnet_transformer.tpm import Embed

OUTPUT_PARTS = {
    **{role: role for role in ("embed", "position", "segment_embed", "embed_norm")},
    **{role: role for role in ("q", "k", "v", "mix", "norm1", "norm2", "norm")},
    **{role: role for role in ("dense", "transform_norm", "logits", "tags", "pooler", "class_dense", "classifier")},
    **{role: role for role in ("cross_q", "cross_k", "cross_v", "cross_mix", "cross_norm")},
    "ffn": "ffn_out",
}
INPUT_PARTS = {"a": "mix", "cross_a": "cross_mix", "scaled": "logits", "neuron": "ffn_out"}
POST_INPUT_PARTS = {
    **INPUT_PARTS,
    **{"add": "x_0", "add1": "norm1", "cross_add": "cross_norm", "add2": "norm2", "transform": "transform_norm"},
}
PRE_INPUT_PARTS = {**INPUT_PARTS, "add1": "norm2", "x": "norm"}
CROSS_INPUT_PARTS = {"add1": "cross_norm", "cross_add": "norm2"}  # for pre-norm slices with cross attention
STACK_PREFIXES = {"": "", "enc": "encoder_", "dec": "decoder_"}  # prefixes of the tensors that a model returns
TENSOR_PATTERN = re.compile(r"(?P<tensor>\w*(?:states|attentions)\[\d+\]|[\w.]+)(?:\[(?P<index>[^\]]*)\])?", re.ASCII)


@dataclass(frozen=True)
class HookPoint:
    """The tensor of a library that contains the nodes of a role and a slice, and its layout.

    Args:
        tensor: The name of the tensor.
        role: The role of the nodes.
        slice: The slice of the nodes.
        dims: The dims after the batch: `"word"`, `"heads"` (the dim that `spans` divide), others.
        plates: The plates of the nodes, such as `"head"`.
        spans: The columns or indices in the dim `"heads"`, by the index of the plates, `*` for all.
    """

    tensor: str
    role: str
    slice: int | None = None
    dims: tuple[str, ...] = ("word", "heads")
    plates: tuple[str, ...] = ()
    spans: Mapping[str, str] = field(default_factory=lambda: {"": ":"})

    @property
    def axes(self) -> list[str]:
        """The axes in the name of a node, in their order."""
        words = ["word"] if "word" in self.dims else []
        return [*([] if self.slice is None else ["slice"]), *self.plates, *words]

    def format_index(self, indices: Mapping[str, str]) -> str:
        """Return the index of a head and a word into the tensor, such as `[:, 5, 96:128]`."""
        heads = "_".join(indices.get(plate, "*") for plate in self.plates)
        if heads not in self.spans:
            expected = "heads whose columns are contiguous in the tensor"
            raise UnknownNameError("name", expected=expected, actual=heads, hint="Pass one head at a time")
        by_dim = {"word": indices.get("word", "*").replace("*", ":"), "heads": self.spans[heads]}
        parts = [by_dim.get(dim, ":") for dim in self.dims]
        if all(part == ":" for part in parts):
            return ""
        all_words = self.dims[0] == "word" and parts[0] == ":"
        return f"[..., {', '.join(parts[1:])}]" if all_words else f"[:, {', '.join(parts)}]"

    def parse_index(self, index: str | None) -> list[str] | None:
        """Return the head and the word of an index into the tensor; None if it selects no such node."""
        dims = ("batch", *self.dims)
        parts = _split_index(index, len(dims))
        if len(parts) != len(dims):
            return None
        by_dim = dict(zip(dims, parts, strict=True))
        span, word = by_dim.pop("heads"), by_dim.pop("word", ":")
        heads = {columns: head for head, columns in self.spans.items()}
        if span not in heads or not re.fullmatch(r":|-?\d+", word, re.ASCII) or set(by_dim.values()) != {":"}:
            return None
        words = ["*" if word == ":" else str(int(word))] if "word" in self.dims else []
        return [*(heads[span].split("_") if self.plates else []), *words]


ATTENTION_DIMS = ("heads", "word", "read")


def to_hugging_face(net: BNet, name: str) -> str:
    """Convert a name to Hugging Face: a parameter (`W_q_2.value`) to its key, nodes (`q_2_3_*`) to a tensor and index.

    Args:
        net: A pretrained net.
        name: The name of a parameter or of nodes.

    Returns:
        The name in Hugging Face.

    Raises:
        UnknownNameError: If Hugging Face has no such tensor.
    """
    _check_arguments(net, name)
    keys = _list_parameter_keys(net)
    if name in keys:
        return keys[name][0]
    if "." in name:
        raise unknown_name_error("parameter", name, keys)
    return _export_name(net, name, "name", list_hook_points(net))


def to_lens(net: BNet, name: str) -> str:
    """Convert the name of nodes to TransformerLens: `q_2_3_*` is `blocks.2.attn.hook_q[..., 3, :]`.

    The last state is the end of the last block, and `j` is the pattern of attention, `P(j | i)`.

    Args:
        net: A pretrained net.
        name: The name of nodes.

    Returns:
        The hook, with an index.

    Raises:
        UnknownNameError: If TransformerLens has no such hook.
    """
    _check_arguments(net, name)
    return _export_name(net, name, "hook", _list_hooks(net))


def from_hugging_face(net: BNet, key: str) -> tuple[str, ...]:
    """Convert a key or a tensor of Hugging Face to names in a net; a tensor may contain several parameters (q, k, v).

    Args:
        net: A pretrained net.
        key: The key or the tensor, with or without the prefix of the family (`bert.`).

    Returns:
        The names of parameters or of nodes.

    Raises:
        UnknownNameError: If the net has no such parameter or node.
    """
    _check_arguments(net, key)
    prefix, keys = family_of(net.network).prefix, _list_parameter_keys(net)
    short = key.removeprefix(prefix)
    names = tuple(name for name, aliases in keys.items() if short in {alias.removeprefix(prefix) for alias in aliases})
    points = [replace(point, tensor=point.tensor.removeprefix(prefix)) for point in list_hook_points(net)]
    return names or (_import_name(net, "key", short, points, [aliases[0] for aliases in keys.values()]),)


def from_lens(net: BNet, name: str) -> str:
    """Convert a hook of TransformerLens to a name in a net: `blocks.2.attn.hook_q[..., 3, :]` is `q_2_3_*`.

    Args:
        net: A pretrained net.
        name: The hook, with or without an index.

    Returns:
        The name of the nodes.

    Raises:
        UnknownNameError: If there is no such hook.
    """
    _check_arguments(net, name)
    return _import_name(net, "hook", name, _list_hooks(net))


def _check_arguments(net: object, name: object) -> None:
    """Raise an error unless the arguments are a net and a string."""
    as_network(net)
    if not isinstance(name, str):
        raise BNetError("name", expected="a string", actual=name)


def _export_name(net: BNet, name: str, kind: str, points: Sequence[HookPoint]) -> str:
    """Return the library's name for nodes of a net."""
    role, numbers = split_pattern(name)
    parts = ["*" if number is None else str(number) for number in numbers]
    matches = [point for point in points if point.role == role]
    if not matches:
        raise unknown_name_error(f"role with a {kind}", name, dict.fromkeys(point.role for point in points))
    axes = matches[0].axes
    parts += ["*"] * (len(axes) - len(parts))
    if len(parts) > len(axes) or (axes[:1] == ["slice"] and parts[0] == "*"):
        raise BNetError("name", expected=f"{'_'.join([role, *axes])}, with * for every head or word", actual=name)
    indices = dict(zip(axes, parts, strict=True))
    _check_indices(net.network, indices, role, name)
    point = next(point for point in matches if point.slice is None or point.slice == int(indices["slice"]))
    return point.tensor + point.format_index(indices)


def _import_name(net: BNet, kind: str, key: str, points: Sequence[HookPoint], known_names: Sequence[str] = ()) -> str:
    """Return the name of nodes in a net for a tensor with an index; `known_names` extend the near matches."""
    match = TENSOR_PATTERN.fullmatch(key.replace(" ", ""))
    matches = [point for point in points if match and point.tensor == match["tensor"]]
    if not match or not matches:
        raise unknown_name_error(kind, key, [*known_names, *(point.tensor for point in points)])
    for point in matches:
        head_and_word = point.parse_index(match["index"])
        if head_and_word is not None:
            indices = [*([] if point.slice is None else [str(point.slice)]), *head_and_word]
            _check_indices(net.network, dict(zip(point.axes, indices, strict=True)), point.role, key)
            return "_".join([point.role, *indices])
    forms = ", ".join(point.tensor + point.format_index(dict.fromkeys(point.plates, "0")) for point in matches)
    raise BNetError("name", expected="an index that selects whole nodes", actual=key, allowed=forms)


def _check_indices(network: Network, indices: Mapping[str, str], role: str, name: str) -> None:
    """Raise an error for a slice, a head or a word that a net does not have."""
    stack, role, _ = parse_owner(network, role)
    max_words = [spec.tpm.max_words for spec in network.specs if spec.tpm.max_words is not None]
    slices = network.graph.slices[stack] + (role == "x")  # T slices have T + 1 states
    counts = {**network.graph.plate_sizes, "slice": slices, "word": min(max_words, default=math.inf)}
    for axis, index in indices.items():
        lowest = -counts[axis] if axis == "word" else 0  # a negative word counts from the end, here and in the tensor
        if index != "*" and not lowest <= int(index) < counts[axis]:
            raise BNetError("name", expected=f"a {axis} index from 0 to {counts[axis] - 1}", actual=name)


def _split_index(index: str | None, rank: int) -> list[str]:
    """Return the index of each dim of a tensor, with an ellipsis expanded."""
    parts = ["..."] if index is None else index.split(",")
    if parts.count("...") == 1 and len(parts) <= rank + 1:
        k = parts.index("...")
        parts[k : k + 1] = [":"] * (rank - len(parts) + 1)
    return parts


def list_hook_points(net: BNet) -> list[HookPoint]:
    """List the tensors of a model of `transformers` that contain nodes: returned tensors, module inputs and outputs."""
    graph = net.network.graph
    points = [_locate_module(net, group) for group in graph.groups]
    outputs = [point for stack in graph.slices for point in _list_outputs(net, stack)]
    return outputs + [point for point in points if point is not None]


def _list_outputs(net: BNet, stack: str) -> list[HookPoint]:
    """List the hidden states and attentions of a stack that a model returns."""
    family, graph = family_of(net.network), net.network.graph
    slices, prefix = graph.slices[stack], STACK_PREFIXES[stack]
    is_unnormed = family.norm == "post" or not family.has_normed_last_state
    x, norm = join_stem(stack, "x"), join_stem(stack, "norm")
    points = [HookPoint(f"{prefix}hidden_states[{t}]", x, t) for t in range(slices + is_unnormed)]
    points += [] if is_unnormed else [HookPoint(f"{prefix}hidden_states[{slices}]", norm)]
    for role, name in (("a", f"{prefix}attentions"), ("cross_a", "cross_attentions")):
        j = join_stem(stack, f"{role[:-1]}j")
        for group in graph.by_stem.get(join_stem(stack, role), ()):
            spans = _compute_spans([graph.plate_sizes[plate] for plate in group.plates])
            points.append(HookPoint(f"{name}[{group.slice}]", j, group.slice, ATTENTION_DIMS, group.plates, spans))
    return points


def _locate_module(net: BNet, group: NodeGroup) -> HookPoint | None:
    """Find the module whose input or output are the nodes of a group; None if there is none."""
    family, graph, spec = family_of(net.network), net.network.graph, net.network.specs[group.index]
    slices, is_post = graph.slices.get(group.stack, 0), family.norm == "post"
    if group.role == "x" and (is_post or group.slice != slices):
        return None
    inputs = POST_INPUT_PARTS if is_post else PRE_INPUT_PARTS
    if is_post and "embed_norm" in family.modules:
        inputs = inputs | {"add": "embed_norm"}
    if not is_post and join_stem(group.stack, "cross_a") in graph.by_stem:
        inputs = inputs | CROSS_INPUT_PARTS
    side, part = ("input", inputs[group.role]) if group.role in inputs else ("output", OUTPUT_PARTS.get(group.role))
    name = "" if part is None else resolve_part(family, group.stack, part)
    if name not in family.modules or name.removeprefix(f"{group.stack}_") != part:
        return None
    location = family.locate(name)
    # Some values are not the output of one module call: a module shared by all slices is called several times, and a
    # scale of the embeddings or a bias with a separate key is applied after the module.
    is_reused = family.shared and group.slice is not None and slices > 1
    is_changed = (isinstance(spec.tpm, Embed) and spec.tpm.scale != 1) or isinstance(location.bias, WeightLocation)
    if is_reused or is_changed or location.is_tensor_key or location.is_conv:
        return None
    module = _qualify_key(net, name, location.key.replace("{t}", str(group.slice)))
    dims = ("word", "heads") if group.word_stack is not None else ("heads",)
    spans = _compute_spans([graph.plate_sizes[plate] for plate in group.plates], spec.shape[0], location)
    return HookPoint(f"{module}.{side}", group.stem, group.slice, dims, group.plates, spans)


def _compute_spans(sizes: Sequence[int], width: int = 0, location: WeightLocation | None = None) -> dict[str, str]:
    """Compute the spans of a tensor's dim for all heads, the heads of each group, and each head.

    Args:
        sizes: The sizes of the plates.
        width: The number of columns of a head.
        location: The layout of the columns; None if the dim counts heads.

    Returns:
        The spans, such as `96:128`, by the index of the plates, such as `3` or `*`.
    """
    heads, spans = math.prod(sizes), {}
    for depth in range(len(sizes) + 1):
        count = math.prod(sizes[depth:])
        for k, index in enumerate(product(*map(range, sizes[:depth]))):
            name = "_".join([*map(str, index), *["*"] * (len(sizes) - depth)])
            columns = _format_columns(k * count, count, heads, width, location, is_every_head=not depth)
            if columns is not None:
                spans[name] = columns
    return spans


def _format_columns(
    first_head: int, num_selected: int, heads: int, width: int, location: WeightLocation | None, *, is_every_head: bool
) -> str | None:
    """Format the columns or indices of some heads as a span; None if the columns are not contiguous."""
    chunk, count = (0, 1) if location is None else location.chunk
    if is_every_head and count == 1:
        return ":"
    if location is None:
        return str(first_head) if num_selected == 1 else f"{first_head}:{first_head + num_selected}"
    if location.is_interleaved:
        start = (first_head * count + chunk) * width
        return f"{start}:{start + width}" if num_selected == 1 else None
    start = (chunk * heads + first_head) * width
    return f"{start}:{start + num_selected * width}"


def _qualify_key(net: BNet, part: str, key: str) -> str:
    """Return a key as in the model: a model with a readout has a prefix before all keys except those of the readout."""
    has_prefix = part not in READOUT_ONLY_PARTS and any(group.role == "y" for group in net.network.graph.groups)
    return f"{family_of(net.network).prefix}{key}" if has_prefix else key


def _list_parameter_keys(net: BNet) -> dict[str, tuple[str, ...]]:
    """Return the keys of each parameter by name, in order of precedence."""
    mappings = map_parameters(net.network, family_of(net.network))
    return {m.name: tuple(map(partial(_qualify_key, net), m.parts, m.keys)) for m in mappings}


# TransformerLens


def _list_hooks(net: BNet) -> list[HookPoint]:
    """List the hooks of TransformerLens that contain nodes; raise an error for a family without known hooks."""
    family, graph = family_of(net.network), net.network.graph
    if not family.in_transformer_lens:
        allowed = ", ".join(name for name, known in FAMILIES.items() if known.in_transformer_lens)
        reason = "which TransformerLens does not have"
        if len(graph.slices) > 1:
            reason = "whose stacks have other hooks (encoder_blocks, decoder_blocks), which are not translated"
        elif family.is_vision:
            reason = "whose embeddings of images have other hooks, which are not translated"
        expected, hint = "a family whose hooks in TransformerLens are known", "Use to_hugging_face"
        raise BNetError("net", expected=expected, actual=f"{family.name}, {reason}", allowed=allowed, hint=hint)
    is_post = family.norm == "post"
    points = []
    for role, hooks in (POST_NORM_HOOKS if is_post else PRE_NORM_HOOKS).items():
        stem = {FIRST_STATE: "x", NEXT_STATE: "x", "j": "a"}.get(role, role)
        if stem not in graph.by_stem:
            continue
        plates = graph.by_stem[stem][0].plates  # heads, or groups and heads: `k` and `v` have only groups
        dims = ATTENTION_DIMS if role == "j" else ("word", "heads", "feature") if plates else ("word", "heads")
        spans = _compute_spans([graph.plate_sizes[plate] for plate in plates])
        slices = range(graph.slices[""]) if "{t}" in hooks[0] else (None,)
        for hook, t in product(hooks, slices):
            node, k = ("x", t + 1) if role == NEXT_STATE and t is not None else (role, t)
            node, k = ("x", 0) if role == FIRST_STATE else (node, k)
            points.append(HookPoint(hook.format(t=t), node, k, dims, plates, spans))
    return points
