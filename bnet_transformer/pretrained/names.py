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
from dataclasses import dataclass, field
from itertools import product

from bnet_transformer.axes import stem_of
from bnet_transformer.bnet import BNet
from bnet_transformer.errors import BNetError, UnknownNameError, unknown
from bnet_transformer.graph import Family as Node
from bnet_transformer.pretrained.families import FAMILIES, family_of
from bnet_transformer.pretrained.family import BESIDE, Where
from bnet_transformer.pretrained.keys import asked_of, check_indices, entries, part_of
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
PLACE = re.compile(r"(?P<place>[\w.]+(?:\[\d+\])?)(?:\[(?P<index>[^\]]*)\])?")


@dataclass(frozen=True)
class Place:
    """Where the nodes of a role and a slice lie: a tensor, and what an index of it says.

    `dims` is `word` ([batch, word, feature]), `sentence` ([batch, feature]) or `read` ([batch, head, word, word read]).
    `spans` are the columns (of `read`: the heads) of each entry of the `plates`, by its indices; under a star of all.
    """

    tensor: str
    role: str
    slice: int | None = None
    dims: str = "word"
    plates: tuple[str, ...] = ()
    spans: Mapping[str, str] = field(default_factory=lambda: {"": ":"})

    @property
    def axes(self) -> list[str]:
        """The indices of a name, in their order."""
        words = [] if self.dims == "sentence" else ["word"]
        return [*([] if self.slice is None else ["slice"]), *self.plates, *words]

    def index(self, at: Mapping[str, str]) -> str:
        """The index of a head and a word."""
        word, heads = at.get("word", "*").replace("*", ":"), "_".join(at.get(plate, "*") for plate in self.plates)
        if heads not in self.spans:
            raise UnknownNameError("name", expected="heads that lie side by side", got=heads, allowed="a head each")
        columns = ":" if self.dims == "read" else self.spans[heads]
        inner = {"word": [word], "sentence": [], "read": [self.spans[heads], word]}[self.dims]
        if all(each == ":" for each in (*inner, columns)):
            return ""
        return f"[..., {columns}]" if inner == [":"] else f"[:, {', '.join([*inner, columns])}]"

    def told(self, index: str | None) -> list[str] | None:
        """The head and the word that an index tells; None where it is none of these nodes."""
        rank = {"word": 3, "sentence": 2, "read": 4}[self.dims]
        parts = _dims(index, rank)
        heads = {columns: head for head, columns in self.spans.items()}
        if len(parts) != rank or parts[0] != ":" or (self.dims == "read" and parts[-1] != ":"):
            return None
        span = parts.pop(1) if self.dims == "read" else parts.pop()
        words = parts[1:2] if self.dims != "sentence" else []
        if span not in heads or not all(each == ":" or each.isdecimal() for each in words):
            return None
        inner = ["*" if each == ":" else str(int(each)) for each in words]
        return [*(heads[span].split("_") if self.plates else []), *inner]


def to_hugging_face(net: BNet, name: str) -> str:
    """Hugging Face's key for a parameter (`W_q_2.value`), or its name for nodes (`q_2_3_*`)."""
    asked_of(net, name)
    keys = _keys(net)
    if name in keys:
        return keys[name][0]
    if "." in name:
        raise unknown("parameter", name, keys)
    role, told = _role(name)
    places = _places(net)
    own = [place for place in places if place.role == role]
    if not own:
        raise unknown("role with a name", name, dict.fromkeys(place.role for place in places))
    at = _indices(net, name, role, told, own[0].axes)
    place = next(place for place in own if place.slice is None or place.slice == int(at["slice"]))
    return place.tensor + place.index(at)


def _role(name: str) -> tuple[str, list[str]]:
    """The role and the indices of a name of ours."""
    found = NAME.fullmatch(name)
    return (found["stem"], found["indices"].split("_")[1:]) if found else (name, [])


def _indices(net: BNet, name: str, role: str, told: list[str], axes: list[str]) -> dict[str, str]:
    """The indices of a name by their axes, which the net has."""
    if len(told) != len(axes) or (axes[:1] == ["slice"] and told[0] == "*"):
        wanted = f"{'_'.join([role, *axes])}, with * for every head or word"
        raise BNetError("name", expected=wanted, got=name)
    at = dict(zip(axes, told, strict=True))
    check_indices(net.network, at, role, name)
    return at


def _dims(index: str | None, rank: int) -> list[str]:
    """What an index says of each dim of a tensor; an ellipsis stands for all that it leaves out."""
    parts = ["..."] if index is None else index.split(",")
    if parts.count("...") == 1 and len(parts) <= rank + 1:
        at = parts.index("...")
        parts[at : at + 1] = [":"] * (rank - len(parts) + 1)
    return parts


def from_hugging_face(net: BNet, key: str) -> tuple[str, ...]:
    """Ours for a key or a name of Hugging Face: one, or q, k and v whose maps lie side by side.

    The prefix of the family (`bert.`) may be left out, or be there for a bare model.
    """
    asked_of(net, key)
    prefix, keys = family_of(net.network).prefix, _keys(net)
    bare = key.removeprefix(prefix)
    found = tuple(name for name, theirs in keys.items() if bare in {each.removeprefix(prefix) for each in theirs})
    if found:
        return found
    told = PLACE.fullmatch(bare.replace(" ", ""))
    places = [place for place in _places(net) if told and place.tensor.removeprefix(prefix) == told["place"]]
    if not told or not places:
        names = [theirs[0] for theirs in keys.values()] + [place.tensor for place in _places(net)]
        raise unknown("key", key, names)
    for place in places:
        found_at = place.told(told["index"])
        if found_at is not None:
            indices = [*([] if place.slice is None else [str(place.slice)]), *found_at]
            check_indices(net.network, dict(zip(place.axes, indices, strict=True)), place.role, key)
            return ("_".join([place.role, *indices]),)
    forms = ", ".join(place.tensor + place.index(dict.fromkeys(place.plates, "0")) for place in places)
    raise BNetError("name", expected="an index of whole nodes", got=key, allowed=f"as {forms}")


def _places(net: BNet) -> list[Place]:
    """The tensors that hold the nodes of a net, in the model of `transformers` that has what the net has."""
    graph = net.network.graph
    found = [place for stack in graph.slices for place in _returned(net, stack)]
    for each in graph.families:
        place = _around_module(net, each)
        found += [] if place is None else [place]
    return found


def _returned(net: BNet, stack: str) -> list[Place]:
    """The states and attentions of a stack that a model returns."""
    family, graph = family_of(net.network), net.network.graph
    slices, called = graph.slices[stack], TOLD[stack]
    plain = family.norm == "post" or not family.last_normed
    x, norm = stem_of(stack, "x"), stem_of(stack, "norm")
    found = [Place(f"{called}hidden_states[{t}]", x, t) for t in range(slices + plain)]
    found += [] if plain else [Place(f"{called}hidden_states[{slices}]", norm)]
    for role, name in (("a", f"{called}attentions"), ("cross_a", "cross_attentions")):
        for each in graph.by_stem.get(stem_of(stack, role), ()):
            spans = _spans([graph.sizes[plate] for plate in each.plates])
            read = stem_of(stack, f"{role[:-1]}j")
            found.append(Place(f"{name}[{each.slice}]", read, each.slice, "read", each.plates, spans))
    return found


def _around_module(net: BNet, each: Node) -> Place | None:
    """Where the nodes of a family leave a module, or enter one."""
    family, graph, member = family_of(net.network), net.network.graph, net.network.members[each.index]
    slices, post = graph.slices.get(each.stack, 0), family.norm == "post"
    if each.role == "x" and (post or each.slice != slices):
        return None
    enters = {**POST, "add": "embed_norm" if "embed_norm" in family.modules else "x_0"} if post else PRE
    if not post and stem_of(each.stack, "cross_a") in graph.by_stem:
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
    dims = "word" if each.words is not None else "sentence"
    spans = _spans([graph.sizes[plate] for plate in each.plates], member.shape[0], where)
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
    whole = part not in BESIDE and any(each.role == "y" for each in net.network.graph.families)
    return f"{family_of(net.network).prefix}{key}" if whole else key


def _keys(net: BNet) -> dict[str, tuple[str, ...]]:
    """The keys of each parameter, the one that counts first."""
    found = {}
    for entry in entries(net.network, family_of(net.network)):
        found[entry.name] = tuple(_key(net, part, key) for part, key in zip(entry.parts, entry.keys, strict=True))
    return found


# TransformerLens

HEAD = "head"
HEADS = ("q", "k", "v", "a", "j")
READ = "j"
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
    "x_next": ("blocks.{t}.hook_resid_post", "blocks.{t}.hook_out"),
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
EMBED = {"hook_embed": ("embed", 0)}
HOOK = re.compile(r"(?P<hook>[A-Za-z_.0-9]+?)(?:\[(?P<index>[^\]]*)\])?")


@dataclass(frozen=True)
class Hooks:
    """The hooks of a net by role, and how many slices it has."""

    by_role: Mapping[str, tuple[str, ...]]
    slices: int

    def axes(self, role: str) -> list[str]:
        """The indices of a role's name, in their order."""
        sliced = ["slice"] if "{t}" in self.by_role[role][0] else []
        return [*sliced, *([HEAD] if role in HEADS else []), "word"]


def to_lens(net: BNet, name: str) -> str:
    """TransformerLens' name for nodes of a net: `q_2_3_*` is `blocks.2.attn.hook_q[..., 3, :]`.

    The last state is told as the end of the last block, and `j` as the pattern of the attention, `P(j | i)`.
    """
    asked_of(net, name)
    hooks = _hooks(net)
    role, told = _role(name)
    if role not in hooks.by_role or role == "x_next":
        raise unknown("role with a hook", name, [each for each in hooks.by_role if each != "x_next"])
    at = _indices(net, name, role, told, hooks.axes(role))
    hook = hooks.by_role[role][0]
    if "slice" in at:
        t = int(at["slice"])
        last = role == "x" and t == hooks.slices
        hook = hooks.by_role["x_next"][0].format(t=t - 1) if last else hook.format(t=t)
    return hook + _index(role, at.get(HEAD), at["word"])


def _index(role: str, head: str | None, word: str) -> str:
    """The index of a head and a word in `[batch, word, head, feature]`, or `[batch, head, word, word read]` for j."""
    own = [word] if head is None else [head, word] if role == READ else [word, head]
    if all(each == "*" for each in own):
        return ""
    if word == "*" and role != READ:
        return f"[..., {head}, :]"
    return f"[:, {', '.join(':' if each == '*' else each for each in own)}, :]"


def from_lens(net: BNet, name: str) -> str:
    """Our name for what TransformerLens calls so: `blocks.2.attn.hook_q[..., 3, :]` is `q_2_3_*`."""
    asked_of(net, name)
    hooks = _hooks(net)
    found = HOOK.fullmatch(name.replace(" ", ""))
    hook, index = (found["hook"], found["index"]) if found else (name, None)
    whole = {
        form.format(t=t): (role, t)
        for role, forms in hooks.by_role.items()
        for form in forms
        for t in range(hooks.slices)
    }
    whole |= dict.fromkeys(("hook_embed", "embed_ln.hook_out"), ("x", 0)) if "add" in hooks.by_role else EMBED
    if hook not in whole:
        raise unknown("hook", hook, whole)
    role, t = whole[hook]
    role, t = ("x", t + 1) if role == "x_next" else (role, t)
    told = [*([str(t)] if "slice" in hooks.axes(role) else []), *_stars(name, index, role)]
    check_indices(net.network, dict(zip(hooks.axes(role), told, strict=True)), role, name)
    return "_".join([role, *told])


def _stars(name: str, index: str | None, role: str) -> list[str]:
    """The head and the word of an index of a hook, stars where it takes all."""
    rank = 4 if role in HEADS else 3
    parts = _dims(index, rank)
    plain = all(part == ":" or part.isdecimal() for part in parts)
    if len(parts) != rank or not plain or parts[0] != ":" or parts[-1] != ":":
        form = "[batch, word, head, feature]" if role in HEADS else "[batch, word, feature]"
        form = "[batch, head, word, word read]" if role == READ else form
        raise BNetError("hook", expected=f"an index {form} with all of the first and of the last", got=name)
    own = ["*" if part == ":" else str(int(part)) for part in parts[1:-1]]
    return own if role == READ else own[::-1]


def _hooks(net: BNet) -> Hooks:
    """The hooks of a net, of a family that TransformerLens has."""
    family = family_of(net.network)
    if not family.in_lens:
        allowed = "the families " + ", ".join(name for name, each in FAMILIES.items() if each.in_lens)
        raise BNetError("net", expected="a family that TransformerLens has", got=family.name, allowed=allowed)
    graph = net.network.graph
    known = {*graph.by_stem, "x_next", READ}
    hooks = {role: each for role, each in (PRE_HOOKS if family.norm == "pre" else POST_HOOKS).items() if role in known}
    return Hooks(hooks, graph.slices[""])
