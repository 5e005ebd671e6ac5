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
from bnet_transformer.pretrained.family import BESIDE, Where
from bnet_transformer.pretrained.keys import entries, owner_of, part_of
from bnet_transformer.tpm import Embed

LEAVES = {
    **{role: role for role in ("embed", "position", "segment_embed", "embed_norm")},
    **{role: role for role in ("q", "k", "v", "mix", "norm1", "norm2", "norm")},
    **{role: role for role in ("dense", "transform_norm", "logits", "tags", "pooler", "class_dense", "classifier")},
    **{role: role for role in ("cross_q", "cross_k", "cross_v", "cross_mix", "cross_norm")},
    "ffn": "ffn_out",
}
BOTH = {"a": "mix", "cross_a": "cross_mix", "scaled": "logits"}
POST = {
    **BOTH,
    **{"add": "x_0", "add1": "norm1", "cross_add": "cross_norm", "add2": "norm2", "transform": "transform_norm"},
}
PRE = {**BOTH, "add1": "norm2", "x": "norm"}
CROSSED = {"add1": "cross_norm", "cross_add": "norm2"}  # where a pre-norm slice reads another stack in between
TOLD = {"": "", "enc": "encoder_", "dec": "decoder_"}  # how the tensors of a stack are called that a model returns
NAME = re.compile(r"(?P<stem>[A-Za-z]\w*?)(?P<indices>(?:_(?:\d+|\*))*)")
PLACE = re.compile(r"(?P<place>\w*(?:states|attentions)\[\d+\]|[\w.]+)(?:\[(?P<index>[^\]]*)\])?")


@dataclass(frozen=True)
class Place:
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

    def index(self, at: Mapping[str, str]) -> str:
        """The index of a head and a word."""
        heads = "_".join(at.get(plate, "*") for plate in self.plates)
        if heads not in self.spans:
            raise UnknownNameError("name", expected="heads that lie side by side", actual=heads, allowed="a head each")
        told = {"word": at.get("word", "*").replace("*", ":"), "heads": self.spans[heads]}
        parts = [told.get(dim, ":") for dim in self.dims]
        if all(part == ":" for part in parts):
            return ""
        all_words = self.dims[0] == "word" and parts[0] == ":"
        return f"[..., {', '.join(parts[1:])}]" if all_words else f"[:, {', '.join(parts)}]"

    def told(self, index: str | None) -> list[str] | None:
        """The head and the word that an index tells; None where it is none of these nodes."""
        dims = ("batch", *self.dims)
        parts = _dims(index, len(dims))
        if len(parts) != len(dims):
            return None
        at = dict(zip(dims, parts, strict=True))
        span, word = at.pop("heads"), at.pop("word", ":")
        heads = {columns: head for head, columns in self.spans.items()}
        if span not in heads or not (word == ":" or word.isdecimal()) or set(at.values()) != {":"}:
            return None
        words = ["*" if word == ":" else str(int(word))] if "word" in self.dims else []
        return [*(heads[span].split("_") if self.plates else []), *words]


READ = ("heads", "word", "read")


def to_hugging_face(net: BNet, name: str) -> str:
    """Hugging Face's key for a parameter (`W_q_2.value`), or its name for nodes (`q_2_3_*`)."""
    _check_asked(net, name)
    keys = _keys(net)
    if name in keys:
        return keys[name][0]
    if "." in name:
        raise unknown_name_error("parameter", name, keys)
    return _to_theirs(net, name, "name", _places(net))


def to_lens(net: BNet, name: str) -> str:
    """TransformerLens' name for nodes of a net: `q_2_3_*` is `blocks.2.attn.hook_q[..., 3, :]`.

    The last state is told as the end of the last block, and `j` as the pattern of the attention, `P(j | i)`.
    """
    _check_asked(net, name)
    return _to_theirs(net, name, "hook", _hooks(net))


def from_hugging_face(net: BNet, key: str) -> tuple[str, ...]:
    """Ours for a key or a name of Hugging Face: one, or q, k and v whose maps lie side by side.

    The prefix of the family (`bert.`) may be left out, or be there for a bare model.
    """
    _check_asked(net, key)
    prefix, keys = family_of(net.network).prefix, _keys(net)
    bare = key.removeprefix(prefix)
    found = tuple(name for name, theirs in keys.items() if bare in {each.removeprefix(prefix) for each in theirs})
    places = [replace(place, tensor=place.tensor.removeprefix(prefix)) for place in _places(net)]
    return found or (_from_theirs(net, "key", bare, places, [theirs[0] for theirs in keys.values()]),)


def from_lens(net: BNet, name: str) -> str:
    """Our name for what TransformerLens calls so: `blocks.2.attn.hook_q[..., 3, :]` is `q_2_3_*`."""
    _check_asked(net, name)
    return _from_theirs(net, "hook", name, _hooks(net))


def _check_asked(net: object, name: object) -> None:
    """Refuse what is no net, and what is no name."""
    as_network(net)
    if not isinstance(name, str):
        raise BNetError("name", expected="a name, a string", actual=name)


def _to_theirs(net: BNet, name: str, kind: str, places: Sequence[Place]) -> str:
    """Their name for nodes of ours."""
    found = NAME.fullmatch(name)
    role, told = (found["stem"], found["indices"].split("_")[1:]) if found else (name, [])
    own = [place for place in places if place.role == role]
    if not own:
        raise unknown_name_error(f"role with a {kind}", name, dict.fromkeys(place.role for place in places))
    axes = own[0].axes
    if len(told) != len(axes) or (axes[:1] == ["slice"] and told[0] == "*"):
        wanted = f"{'_'.join([role, *axes])}, with * for every head or word"
        raise BNetError("name", expected=wanted, actual=name)
    at = dict(zip(axes, told, strict=True))
    _check_indices(net.network, at, role, name)
    place = next(place for place in own if place.slice is None or place.slice == int(at["slice"]))
    return place.tensor + place.index(at)


def _from_theirs(net: BNet, kind: str, key: str, places: Sequence[Place], others: Sequence[str] = ()) -> str:
    """Our name for nodes, from a tensor with an index; `others` are further names that they know."""
    told = PLACE.fullmatch(key.replace(" ", ""))
    own = [place for place in places if told and place.tensor == told["place"]]
    if not told or not own:
        raise unknown_name_error(kind, key, [*others, *(place.tensor for place in places)])
    for place in own:
        at = place.told(told["index"])
        if at is not None:
            indices = [*([] if place.slice is None else [str(place.slice)]), *at]
            _check_indices(net.network, dict(zip(place.axes, indices, strict=True)), place.role, key)
            return "_".join([place.role, *indices])
    forms = ", ".join(place.tensor + place.index(dict.fromkeys(place.plates, "0")) for place in own)
    raise BNetError("name", expected="an index of whole nodes", actual=key, allowed=f"as {forms}")


def _check_indices(network: Network, at: Mapping[str, str], role: str, name: str) -> None:
    """Refuse a slice, a head or a word that a net does not have; there is one more slice of states."""
    stack, role, _ = owner_of(network, role)
    longest = [m.tpm.max_words for m in network.specs if m.tpm.max_words is not None]
    slices = network.graph.slices[stack] + (role == "x")
    counts = {**network.graph.plate_sizes, "slice": slices, "word": min(longest, default=math.inf)}
    for axis, index in at.items():
        if index != "*" and int(index) >= counts[axis]:
            raise BNetError("name", expected=f"a {axis} from 0 to {counts[axis] - 1}", actual=name)


def _dims(index: str | None, rank: int) -> list[str]:
    """What an index says of each dim of a tensor; an ellipsis stands for all that it leaves out."""
    parts = ["..."] if index is None else index.split(",")
    if parts.count("...") == 1 and len(parts) <= rank + 1:
        at = parts.index("...")
        parts[at : at + 1] = [":"] * (rank - len(parts) + 1)
    return parts


def _places(net: BNet) -> list[Place]:
    """The tensors that hold the nodes of a net, in the model of `transformers` that has what the net has."""
    graph = net.network.graph
    found = [place for stack in graph.slices for place in _returned(net, stack)]
    for each in graph.groups:
        place = _around_module(net, each)
        found += [] if place is None else [place]
    return found


def _returned(net: BNet, stack: str) -> list[Place]:
    """The states and attentions of a stack that a model returns."""
    family, graph = family_of(net.network), net.network.graph
    slices, called = graph.slices[stack], TOLD[stack]
    plain = family.norm == "post" or not family.last_normed
    x, norm = join_stem(stack, "x"), join_stem(stack, "norm")
    found = [Place(f"{called}hidden_states[{t}]", x, t) for t in range(slices + plain)]
    found += [] if plain else [Place(f"{called}hidden_states[{slices}]", norm)]
    for role, name in (("a", f"{called}attentions"), ("cross_a", "cross_attentions")):
        for each in graph.by_stem.get(join_stem(stack, role), ()):
            spans = _spans([graph.plate_sizes[plate] for plate in each.plates])
            read = join_stem(stack, f"{role[:-1]}j")
            found.append(Place(f"{name}[{each.slice}]", read, each.slice, READ, each.plates, spans))
    return found


def _around_module(net: BNet, each: Node) -> Place | None:
    """Where the nodes of a family leave a module, or enter one."""
    family, graph, member = family_of(net.network), net.network.graph, net.network.specs[each.index]
    slices, post = graph.slices.get(each.stack, 0), family.norm == "post"
    if each.role == "x" and (post or each.slice != slices):
        return None
    enters = {**POST, "add": "embed_norm" if "embed_norm" in family.modules else "x_0"} if post else PRE
    if not post and join_stem(each.stack, "cross_a") in graph.by_stem:
        enters = enters | CROSSED
    side, part = ("input", enters[each.role]) if each.role in enters else ("output", LEAVES.get(each.role))
    named = "" if part is None else part_of(family, each.stack, part)
    if named not in family.modules or named.removeprefix(f"{each.stack}_") != part:
        return None
    where = family.where(named)
    many = family.shared and each.slice is not None and slices > 1  # one module, called for every slice
    outside = isinstance(member.tpm, Embed) and member.tpm.scale != 1  # some families scale what leaves the module
    outside = outside or isinstance(where.bias, Where)  # which is added to what leaves it
    if many or outside or where.bare or where.flat:
        return None
    module = _key(net, named, where.key.replace("{t}", str(each.slice)))
    dims = ("word", "heads") if each.word_stack is not None else ("heads",)
    spans = _spans([graph.plate_sizes[plate] for plate in each.plates], member.shape[0], where)
    return Place(f"{module}.{side}", each.stem, each.slice, dims, each.plates, spans)


def _spans(sizes: Sequence[int], width: int = 0, where: Where | None = None) -> dict[str, str]:
    """The columns of all heads, of those of each group and of each head, where several maps lie side by side or one
    alone; the heads themselves, where it is not told how columns lie."""
    heads, found = math.prod(sizes), {}
    for told in range(len(sizes) + 1):
        many = math.prod(sizes[told:])
        for k, index in enumerate(product(*map(range, sizes[:told]))):
            name = "_".join([*map(str, index), *["*"] * (len(sizes) - told)])
            columns = _columns(k * many, many, heads, width, where, whole=not told)
            if columns is not None:
                found[name] = columns
    return found


def _columns(first: int, many: int, heads: int, width: int, where: Where | None, *, whole: bool) -> str | None:
    """The columns of some heads, or their numbers; None where they do not lie side by side."""
    which, count = (0, 1) if where is None else where.part
    if whole and count == 1:
        return ":"
    if where is None:
        return str(first) if many == 1 else f"{first}:{first + many}"
    if where.within:
        start = (first * count + which) * width
        return f"{start}:{start + width}" if many == 1 else None
    start = (which * heads + first) * width
    return f"{start}:{start + many * width}"


def _key(net: BNet, part: str, key: str) -> str:
    """A key as the model has it: a model with a readout has a prefix before all but its readout."""
    whole = part not in BESIDE and any(each.role == "y" for each in net.network.graph.groups)
    return f"{family_of(net.network).prefix}{key}" if whole else key


def _keys(net: BNet) -> dict[str, tuple[str, ...]]:
    """The keys of each parameter, the one that counts first."""
    found = {}
    for entry in entries(net.network, family_of(net.network)):
        found[entry.name] = tuple(_key(net, part, key) for part, key in zip(entry.parts, entry.keys, strict=True))
    return found


# TransformerLens

NEXT = "next x"
# Role -> the hooks of a TransformerBridge (TransformerLens 4.3) that hold it; the first is the one that is told.
HOOKS = {
    "embed": ("embed.hook_out",),
    "position": ("hook_pos_embed", "pos_embed.hook_out"),
    "q": ("blocks.{t}.attn.hook_q", "blocks.{t}.attn.q.hook_out"),
    "k": ("blocks.{t}.attn.hook_k", "blocks.{t}.attn.k.hook_out"),
    "v": ("blocks.{t}.attn.hook_v", "blocks.{t}.attn.v.hook_out"),
    "j": ("blocks.{t}.attn.hook_pattern",),
    "a": ("blocks.{t}.attn.hook_z", "blocks.{t}.attn.o.hook_in"),
    "ffn": ("blocks.{t}.hook_mlp_out", "blocks.{t}.mlp.hook_out", "blocks.{t}.mlp.out.hook_out"),
    "x": ("blocks.{t}.hook_resid_pre", "blocks.{t}.hook_in"),
    NEXT: ("blocks.{t}.hook_resid_post", "blocks.{t}.hook_out"),
    "logits": ("unembed.hook_out", "hook_unembed"),
}
POST_HOOKS = {
    **HOOKS,
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
PRE_HOOKS = {
    **HOOKS,
    "norm1": ("blocks.{t}.ln1.hook_out", "blocks.{t}.attn.hook_in"),
    "mix": ("blocks.{t}.hook_attn_out", "blocks.{t}.attn.hook_out", "blocks.{t}.attn.o.hook_out"),
    "add1": ("blocks.{t}.hook_resid_mid", "blocks.{t}.ln2.hook_in"),
    "norm2": ("blocks.{t}.ln2.hook_out", "blocks.{t}.mlp.hook_in"),
    "norm": ("ln_final.hook_out", "unembed.hook_in"),
}


def _hooks(net: BNet) -> list[Place]:
    """The hooks of a net, of a family that TransformerLens has."""
    family, graph = family_of(net.network), net.network.graph
    if not family.in_lens:
        allowed = "the families " + ", ".join(name for name, each in FAMILIES.items() if each.in_lens)
        raise BNetError("net", expected="a family that TransformerLens has", actual=family.name, allowed=allowed)
    post = family.norm == "post"
    found = []
    for role, hooks in (POST_HOOKS if post else PRE_HOOKS).items():
        stem = {NEXT: "x", "j": "a"}.get(role, role)
        if stem not in graph.by_stem:
            continue
        plates = ("head",) if role in ("q", "k", "v", "a", "j") else ()
        dims = READ if role == "j" else ("word", "heads", "feature") if plates else ("word", "heads")
        spans = _spans([graph.plate_sizes[plate] for plate in plates])
        slices = range(graph.slices[""]) if "{t}" in hooks[0] else (None,)
        for hook, t in product(hooks, slices):
            at = t + 1 if role == NEXT and t is not None else t
            found.append(Place(hook.format(t=t), "x" if role == NEXT else role, at, dims, plates, spans))
    if not post:
        return [*found, Place("hook_embed", "embed")]
    return [*found, *(Place(hook, "x", 0) for hook in ("hook_embed", "embed_ln.hook_out"))]
