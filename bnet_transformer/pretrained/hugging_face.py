"""Hugging Face's names for the parameters and the nodes of a net, and ours.

    bert.encoder.layer.2.attention.self.query.weight                   <->   W_q_2.value
    bert.encoder.layer.2.attention.self.query.output[:, 5, 96:128]     <->   q_2_3_5      what leaves a module
    bert.encoder.layer.2.attention.output.dense.input[..., 96:128]     <->   a_2_3_*      what enters a module
    hidden_states[2], attentions[2][:, 3, 5, :]                        <->   x_2_*, j_2_3_5

A star stands for every head or word. The names are those in the model of `transformers` that has what the net has: the
bare one, where the net has no readout.
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
from bnet_transformer.pretrained.families import family_of
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
        parts = ["..."] if index is None else index.split(",")
        rank = {"word": 3, "sentence": 2, "read": 4}[self.dims]
        if parts.count("...") == 1 and len(parts) <= rank + 1:
            at = parts.index("...")
            parts[at : at + 1] = [":"] * (rank - len(parts) + 1)
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
    found = NAME.fullmatch(name)
    role, told = (found["stem"], found["indices"].split("_")[1:]) if found else (name, [])
    places = _places(net)
    own = [place for place in places if place.role == role]
    if not own:
        raise unknown("role with a name", name, dict.fromkeys(place.role for place in places))
    axes = own[0].axes
    if len(told) != len(axes) or (axes[:1] == ["slice"] and told[0] == "*"):
        wanted = f"{'_'.join([role, *axes])}, with * for every head or word"
        raise BNetError("name", expected=wanted, got=name)
    at = dict(zip(axes, told, strict=True))
    check_indices(net.network, at, role, name)
    place = next(place for place in own if place.slice is None or place.slice == int(at["slice"]))
    return place.tensor + place.index(at)


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
