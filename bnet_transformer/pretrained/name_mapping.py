"""The names that Hugging Face and TransformerLens give to the parameters and the nodes of a net, and ours.

    bert.encoder.layer.2.attention.self.query.weight                   <->   W_q_2.value
    bert.encoder.layer.2.attention.self.query.output[:, 5, 96:128]     <->   q_2_3_5      what leaves a module
    bert.encoder.layer.2.attention.output.dense.input[..., 96:128]     <->   a_2_3_*      what enters a module
    hidden_states[2], attentions[2][:, 3, 5, :]                        <->   x_2_*, j_2_3_5

A star stands for every head or word. The names are those in the model of `transformers` that has what the net has: the
bare one, where the net has no readout. Those of TransformerLens:

    blocks.2.attn.hook_q[..., 3, :]         <->   q_2_3_*     slice 2, head 3, every word
    blocks.2.attn.hook_q[:, 5, 3, :]        <->   q_2_3_5     word 5 alone
    blocks.2.attn.hook_pattern[:, 3, 5, :]  <->   j_2_3_5     the word that word 5 reads: P(j | i)

What TransformerLens has no hook for is an error that lists what it has.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import product

from bnet_transformer._core.naming import join_stem
from bnet_transformer.bnet import BNet
from bnet_transformer.declare import Network, as_network
from bnet_transformer.errors import BNetError, UnknownNameError, unknown_name_error
from bnet_transformer.graph import NodeGroup as Node
from bnet_transformer.pretrained.families import FAMILIES, family_of
from bnet_transformer.pretrained.family import READOUT_ONLY_PARTS, WeightLocation
from bnet_transformer.pretrained.weight_mapping import map_parameters, parse_owner, resolve_part
from bnet_transformer.tpm import Embed

OUTPUT_PARTS = {
    **{role: role for role in ("embed", "position", "segment_embed", "embed_norm")},
    **{role: role for role in ("q", "k", "v", "mix", "norm1", "norm2", "norm")},
    **{role: role for role in ("dense", "transform_norm", "logits", "tags", "pooler", "class_dense", "classifier")},
    **{role: role for role in ("cross_q", "cross_k", "cross_v", "cross_mix", "cross_norm")},
    "ffn": "ffn_out",
}
INPUT_PARTS = {"a": "mix", "cross_a": "cross_mix", "scaled": "logits"}
POST_INPUT_PARTS = {
    **INPUT_PARTS,
    **{"add": "x_0", "add1": "norm1", "cross_add": "cross_norm", "add2": "norm2", "transform": "transform_norm"},
}
PRE_INPUT_PARTS = {**INPUT_PARTS, "add1": "norm2", "x": "norm"}
CROSS_INPUT_PARTS = {
    "add1": "cross_norm",
    "cross_add": "norm2",
}  # where a pre-norm slice reads another stack in between
STACK_PREFIXES = {
    "": "",
    "enc": "encoder_",
    "dec": "decoder_",
}  # how the tensors of a stack are called that a model returns
NODE_PATTERN = re.compile(r"(?P<stem>[A-Za-z]\w*?)(?P<indices>(?:_(?:\d+|\*))*)")
TENSOR_PATTERN = re.compile(r"(?P<tensor>\w*(?:states|attentions)\[\d+\]|[\w.]+)(?:\[(?P<index>[^\]]*)\])?")


@dataclass(frozen=True)
class ActivationLocation:
    """Where the nodes of a role and a slice lie: a tensor, and what an index of it says.

    `dims` are those of the tensor behind its batch: `word`, `heads` (all that the `spans` divide), others.
    `spans` are the columns, or the numbers, of each entry of the `plates`, by its indices; under a star of all.
    """

    tensor: str
    role: str
    slice: int | None = None
    dims: tuple[str, ...] = ("word", "heads")
    plates: tuple[str, ...] = ()
    spans: Mapping[str, str] = field(default_factory=lambda: {"": ":"})

    @property
    def axes(self) -> list[str]:
        """The indices of a name, in their order."""
        words = ["word"] if "word" in self.dims else []
        return [*([] if self.slice is None else ["slice"]), *self.plates, *words]

    def format_index(self, indices: Mapping[str, str]) -> str:
        """The index of a head and a word."""
        heads = "_".join(indices.get(plate, "*") for plate in self.plates)
        if heads not in self.spans:
            raise UnknownNameError("name", expected="heads that lie side by side", actual=heads, allowed="a head each")
        told = {"word": indices.get("word", "*").replace("*", ":"), "heads": self.spans[heads]}
        parts = [told.get(dim, ":") for dim in self.dims]
        if all(part == ":" for part in parts):
            return ""
        all_words = self.dims[0] == "word" and parts[0] == ":"
        return f"[..., {', '.join(parts[1:])}]" if all_words else f"[:, {', '.join(parts)}]"

    def parse_index(self, index: str | None) -> list[str] | None:
        """The head and the word that an index tells; None where it is none of these nodes."""
        dims = ("batch", *self.dims)
        parts = _split_index(index, len(dims))
        if len(parts) != len(dims):
            return None
        at = dict(zip(dims, parts, strict=True))
        span, word = at.pop("heads"), at.pop("word", ":")
        heads = {columns: head for head, columns in self.spans.items()}
        if span not in heads or not (word == ":" or word.isdecimal()) or set(at.values()) != {":"}:
            return None
        words = ["*" if word == ":" else str(int(word))] if "word" in self.dims else []
        return [*(heads[span].split("_") if self.plates else []), *words]


ATTENTION_DIMS = ("heads", "word", "read")


def to_hugging_face(net: BNet, name: str) -> str:
    """Hugging Face's key for a parameter (`W_q_2.value`), or its name for nodes (`q_2_3_*`)."""
    _check_arguments(net, name)
    keys = _list_parameter_keys(net)
    if name in keys:
        return keys[name][0]
    if "." in name:
        raise unknown_name_error("parameter", name, keys)
    return _export_name(net, name, "name", _list_locations(net))


def to_lens(net: BNet, name: str) -> str:
    """TransformerLens' name for nodes of a net: `q_2_3_*` is `blocks.2.attn.hook_q[..., 3, :]`.

    The last state is told as the end of the last block, and `j` as the pattern of the attention, `P(j | i)`.
    """
    _check_arguments(net, name)
    return _export_name(net, name, "hook", _list_hook_locations(net))


def from_hugging_face(net: BNet, key: str) -> tuple[str, ...]:
    """Ours for a key or a name of Hugging Face: one, or q, k and v whose maps lie side by side.

    The prefix of the family (`bert.`) may be left out, or be there for a bare model.
    """
    _check_arguments(net, key)
    prefix, keys = family_of(net.network).prefix, _list_parameter_keys(net)
    bare = key.removeprefix(prefix)
    found = tuple(name for name, theirs in keys.items() if bare in {each.removeprefix(prefix) for each in theirs})
    places = [replace(place, tensor=place.tensor.removeprefix(prefix)) for place in _list_locations(net)]
    return found or (_import_name(net, "key", bare, places, [theirs[0] for theirs in keys.values()]),)


def from_lens(net: BNet, name: str) -> str:
    """Our name for what TransformerLens calls so: `blocks.2.attn.hook_q[..., 3, :]` is `q_2_3_*`."""
    _check_arguments(net, name)
    return _import_name(net, "hook", name, _list_hook_locations(net))


def _check_arguments(net: object, name: object) -> None:
    """Refuse what is no net, and what is no name."""
    as_network(net)
    if not isinstance(name, str):
        raise BNetError("name", expected="a name, a string", actual=name)


def _export_name(net: BNet, name: str, kind: str, locations: Sequence[ActivationLocation]) -> str:
    """Their name for nodes of ours."""
    found = NODE_PATTERN.fullmatch(name)
    role, told = (found["stem"], found["indices"].split("_")[1:]) if found else (name, [])
    own = [place for place in locations if place.role == role]
    if not own:
        raise unknown_name_error(f"role with a {kind}", name, dict.fromkeys(place.role for place in locations))
    axes = own[0].axes
    if len(told) != len(axes) or (axes[:1] == ["slice"] and told[0] == "*"):
        wanted = f"{'_'.join([role, *axes])}, with * for every head or word"
        raise BNetError("name", expected=wanted, actual=name)
    at = dict(zip(axes, told, strict=True))
    _check_indices(net.network, at, role, name)
    place = next(place for place in own if place.slice is None or place.slice == int(at["slice"]))
    return place.tensor + place.format_index(at)


def _import_name(
    net: BNet, kind: str, key: str, locations: Sequence[ActivationLocation], known_names: Sequence[str] = ()
) -> str:
    """Our name for nodes, from a tensor with an index; `known_names` are further names that they know."""
    told = TENSOR_PATTERN.fullmatch(key.replace(" ", ""))
    own = [place for place in locations if told and place.tensor == told["tensor"]]
    if not told or not own:
        raise unknown_name_error(kind, key, [*known_names, *(place.tensor for place in locations)])
    for place in own:
        at = place.parse_index(told["index"])
        if at is not None:
            indices = [*([] if place.slice is None else [str(place.slice)]), *at]
            _check_indices(net.network, dict(zip(place.axes, indices, strict=True)), place.role, key)
            return "_".join([place.role, *indices])
    forms = ", ".join(place.tensor + place.format_index(dict.fromkeys(place.plates, "0")) for place in own)
    raise BNetError("name", expected="an index of whole nodes", actual=key, allowed=f"as {forms}")


def _check_indices(network: Network, indices: Mapping[str, str], role: str, name: str) -> None:
    """Refuse a slice, a head or a word that a net does not have; there is one more slice of states."""
    stack, role, _ = parse_owner(network, role)
    longest = [m.tpm.max_words for m in network.specs if m.tpm.max_words is not None]
    slices = network.graph.slices[stack] + (role == "x")
    counts = {**network.graph.plate_sizes, "slice": slices, "word": min(longest, default=math.inf)}
    for axis, index in indices.items():
        if index != "*" and int(index) >= counts[axis]:
            raise BNetError("name", expected=f"a {axis} from 0 to {counts[axis] - 1}", actual=name)


def _split_index(index: str | None, rank: int) -> list[str]:
    """What an index says of each dim of a tensor; an ellipsis stands for all that it leaves out."""
    parts = ["..."] if index is None else index.split(",")
    if parts.count("...") == 1 and len(parts) <= rank + 1:
        at = parts.index("...")
        parts[at : at + 1] = [":"] * (rank - len(parts) + 1)
    return parts


def _list_locations(net: BNet) -> list[ActivationLocation]:
    """The tensors that hold the nodes of a net, in the model of `transformers` that has what the net has."""
    graph = net.network.graph
    found = [place for stack in graph.slices for place in _list_output_locations(net, stack)]
    for each in graph.groups:
        place = _locate_module(net, each)
        found += [] if place is None else [place]
    return found


def _list_output_locations(net: BNet, stack: str) -> list[ActivationLocation]:
    """The states and attentions of a stack that a model returns."""
    family, graph = family_of(net.network), net.network.graph
    slices, called = graph.slices[stack], STACK_PREFIXES[stack]
    plain = family.norm == "post" or not family.has_normed_last_state
    x, norm = join_stem(stack, "x"), join_stem(stack, "norm")
    found = [ActivationLocation(f"{called}hidden_states[{t}]", x, t) for t in range(slices + plain)]
    found += [] if plain else [ActivationLocation(f"{called}hidden_states[{slices}]", norm)]
    for role, name in (("a", f"{called}attentions"), ("cross_a", "cross_attentions")):
        for each in graph.by_stem.get(join_stem(stack, role), ()):
            spans = _compute_spans([graph.plate_sizes[plate] for plate in each.plates])
            read = join_stem(stack, f"{role[:-1]}j")
            found.append(
                ActivationLocation(f"{name}[{each.slice}]", read, each.slice, ATTENTION_DIMS, each.plates, spans)
            )
    return found


def _locate_module(net: BNet, group: Node) -> ActivationLocation | None:
    """Where the nodes of a family leave a module, or enter one."""
    family, graph, member = family_of(net.network), net.network.graph, net.network.specs[group.index]
    slices, post = graph.slices.get(group.stack, 0), family.norm == "post"
    if group.role == "x" and (post or group.slice != slices):
        return None
    enters = (
        {**POST_INPUT_PARTS, "add": "embed_norm" if "embed_norm" in family.modules else "x_0"}
        if post
        else PRE_INPUT_PARTS
    )
    if not post and join_stem(group.stack, "cross_a") in graph.by_stem:
        enters = enters | CROSS_INPUT_PARTS
    side, part = ("input", enters[group.role]) if group.role in enters else ("output", OUTPUT_PARTS.get(group.role))
    named = "" if part is None else resolve_part(family, group.stack, part)
    if named not in family.modules or named.removeprefix(f"{group.stack}_") != part:
        return None
    where = family.locate(named)
    many = family.shared and group.slice is not None and slices > 1  # one module, called for every slice
    outside = isinstance(member.tpm, Embed) and member.tpm.scale != 1  # some families scale what leaves the module
    outside = outside or isinstance(where.bias, WeightLocation)  # which is added to what leaves it
    if many or outside or where.is_tensor_key or where.is_conv:
        return None
    module = _qualify_key(net, named, where.key.replace("{t}", str(group.slice)))
    dims = ("word", "heads") if group.word_stack is not None else ("heads",)
    spans = _compute_spans([graph.plate_sizes[plate] for plate in group.plates], member.shape[0], where)
    return ActivationLocation(f"{module}.{side}", group.stem, group.slice, dims, group.plates, spans)


def _compute_spans(sizes: Sequence[int], width: int = 0, location: WeightLocation | None = None) -> dict[str, str]:
    """The columns of all heads, of those of each group and of each head, where several maps lie side by side or one
    alone; the heads themselves, where it is not told how columns lie."""
    heads, found = math.prod(sizes), {}
    for told in range(len(sizes) + 1):
        many = math.prod(sizes[told:])
        for k, index in enumerate(product(*map(range, sizes[:told]))):
            name = "_".join([*map(str, index), *["*"] * (len(sizes) - told)])
            columns = _format_columns(k * many, many, heads, width, location, is_every_head=not told)
            if columns is not None:
                found[name] = columns
    return found


def _format_columns(
    first_head: int, num_selected: int, heads: int, width: int, location: WeightLocation | None, *, is_every_head: bool
) -> str | None:
    """The columns of some heads, or their numbers; None where they do not lie side by side."""
    which, count = (0, 1) if location is None else location.chunk
    if is_every_head and count == 1:
        return ":"
    if location is None:
        return str(first_head) if num_selected == 1 else f"{first_head}:{first_head + num_selected}"
    if location.is_interleaved:
        start = (first_head * count + which) * width
        return f"{start}:{start + width}" if num_selected == 1 else None
    start = (which * heads + first_head) * width
    return f"{start}:{start + num_selected * width}"


def _qualify_key(net: BNet, part: str, key: str) -> str:
    """A key as the model has it: a model with a readout has a prefix before all but its readout."""
    whole = part not in READOUT_ONLY_PARTS and any(each.role == "y" for each in net.network.graph.groups)
    return f"{family_of(net.network).prefix}{key}" if whole else key


def _list_parameter_keys(net: BNet) -> dict[str, tuple[str, ...]]:
    """The keys of each parameter, the one that counts first."""
    found = {}
    for entry in map_parameters(net.network, family_of(net.network)):
        found[entry.name] = tuple(
            _qualify_key(net, part, key) for part, key in zip(entry.parts, entry.keys, strict=True)
        )
    return found


# TransformerLens

NEXT_STATE = "next x"
# Role -> the hooks of a TransformerBridge (TransformerLens 4.3) that hold it; the first is the one that is told.
COMMON_HOOKS = {
    "embed": ("embed.hook_out",),
    "position": ("hook_pos_embed", "pos_embed.hook_out"),
    "q": ("blocks.{t}.attn.hook_q", "blocks.{t}.attn.q.hook_out"),
    "k": ("blocks.{t}.attn.hook_k", "blocks.{t}.attn.k.hook_out"),
    "v": ("blocks.{t}.attn.hook_v", "blocks.{t}.attn.v.hook_out"),
    "j": ("blocks.{t}.attn.hook_pattern",),
    "a": ("blocks.{t}.attn.hook_z", "blocks.{t}.attn.o.hook_in"),
    "ffn": ("blocks.{t}.hook_mlp_out", "blocks.{t}.mlp.hook_out", "blocks.{t}.mlp.out.hook_out"),
    "x": ("blocks.{t}.hook_resid_pre", "blocks.{t}.hook_in"),
    NEXT_STATE: ("blocks.{t}.hook_resid_post", "blocks.{t}.hook_out"),
    "logits": ("unembed.hook_out", "hook_unembed"),
}
POST_NORM_HOOKS = {
    **COMMON_HOOKS,
    "segment_embed": ("token_type_embed.hook_out",),
    "add": ("embed_ln.hook_in",),
    "mix": ("blocks.{t}.attn.o.hook_out",),
    "add1": ("blocks.{t}.ln1.hook_in",),
    "norm1": ("blocks.{t}.ln1.hook_out", "blocks.{t}.attn.hook_out", "blocks.{t}.hook_attn_out"),
    "add2": ("blocks.{t}.ln2.hook_in", "blocks.{t}.hook_resid_mid"),
    "dense": ("mlm_head.hook_out",),
    "transform": ("ln_final.hook_in",),
    "transform_norm": ("ln_final.hook_out", "unembed.hook_in"),
}
PRE_NORM_HOOKS = {
    **COMMON_HOOKS,
    "norm1": ("blocks.{t}.ln1.hook_out", "blocks.{t}.attn.hook_in"),
    "mix": ("blocks.{t}.hook_attn_out", "blocks.{t}.attn.hook_out", "blocks.{t}.attn.o.hook_out"),
    "add1": ("blocks.{t}.hook_resid_mid", "blocks.{t}.ln2.hook_in"),
    "norm2": ("blocks.{t}.ln2.hook_out", "blocks.{t}.mlp.hook_in"),
    "norm": ("ln_final.hook_out", "unembed.hook_in"),
}


def _list_hook_locations(net: BNet) -> list[ActivationLocation]:
    """The hooks of a net, of a family that TransformerLens has."""
    family, graph = family_of(net.network), net.network.graph
    if not family.in_transformer_lens:
        allowed = "the families " + ", ".join(name for name, each in FAMILIES.items() if each.in_transformer_lens)
        raise BNetError("net", expected="a family that TransformerLens has", actual=family.name, allowed=allowed)
    post = family.norm == "post"
    found = []
    for role, hooks in (POST_NORM_HOOKS if post else PRE_NORM_HOOKS).items():
        stem = {NEXT_STATE: "x", "j": "a"}.get(role, role)
        if stem not in graph.by_stem:
            continue
        plates = ("head",) if role in ("q", "k", "v", "a", "j") else ()
        dims = ATTENTION_DIMS if role == "j" else ("word", "heads", "feature") if plates else ("word", "heads")
        spans = _compute_spans([graph.plate_sizes[plate] for plate in plates])
        slices = range(graph.slices[""]) if "{t}" in hooks[0] else (None,)
        for hook, t in product(hooks, slices):
            at = t + 1 if role == NEXT_STATE and t is not None else t
            found.append(
                ActivationLocation(hook.format(t=t), "x" if role == NEXT_STATE else role, at, dims, plates, spans)
            )
    if not post:
        return [*found, ActivationLocation("hook_embed", "embed")]
    return [*found, *(ActivationLocation(hook, "x", 0) for hook in ("hook_embed", "embed_ln.hook_out"))]
