"""Hugging Face's names for the parameters and the nodes of a net, and ours.

    bert.encoder.layer.2.attention.self.query.weight                   <->   W_q_2.value
    bert.encoder.layer.2.attention.self.query.output[:, 5, 96:128]     <->   q_2_3_5      what leaves a module
    bert.encoder.layer.2.attention.output.dense.input[..., 96:128]     <->   a_2_3_*      what enters a module
    hidden_states[2], attentions[2][:, 3, 5, :]                        <->   x_2_*, j_2_3_5

A star stands for every head or word. The names are those in the model of `transformers` that has what the net has: the
bare one, where the net has no readout.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field

from bnet_transformer.errors import BNetError, unknown
from bnet_transformer.face import BNet
from bnet_transformer.pretrained.families import family_of
from bnet_transformer.pretrained.keys import check_indices, entries

BESIDE = ("dense", "transform_norm", "logits", "class_dense", "classifier", "tags")  # parts that a bare model has not
LEAVES = {
    **{role: role for role in ("embed", "position", "segment_embed", "q", "k", "v", "mix", "norm1", "norm2", "norm")},
    **{role: role for role in ("dense", "transform_norm", "logits", "tags", "pooler", "class_dense", "classifier")},
    "ffn": "ffn_out",
}
POST = {"a": "mix", "add": "x_0", "add1": "norm1", "add2": "norm2", "transform": "transform_norm"}
PRE = {"a": "mix", "add1": "norm2"}
NAME = re.compile(r"(?P<stem>[A-Za-z]\w*?)(?P<indices>(?:_(?:\d+|\*))*)")
PLACE = re.compile(r"(?P<place>[\w.]+(?:\[\d+\])?)(?:\[(?P<index>[^\]]*)\])?")


@dataclass(frozen=True)
class Place:
    """Where the nodes of a role and a slice lie: a tensor, and what an index of it says.

    `dims` is `word` ([batch, word, feature]), `sentence` ([batch, feature]) or `read` ([batch, head, word, word read]).
    `spans` are the columns of each head, and under a star of all.
    """

    tensor: str
    role: str
    slice: int | None = None
    dims: str = "word"
    spans: Mapping[str, str] = field(default_factory=lambda: {"*": ":"})

    @property
    def axes(self) -> list[str]:
        """The indices of a name, in their order."""
        heads = ["head"] if self.dims == "read" or len(self.spans) > 1 else []
        words = [] if self.dims == "sentence" else ["word"]
        return [*([] if self.slice is None else ["slice"]), *heads, *words]

    def index(self, at: Mapping[str, str]) -> str:
        """The index of a head and a word."""
        head, word = (":" if at.get(axis, "*") == "*" else at[axis] for axis in ("head", "word"))
        columns = ":" if self.dims == "read" else self.spans[at.get("head", "*")]
        inner = {"word": [word], "sentence": [], "read": [head, word]}[self.dims]
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
        plain = all(each == ":" or each.isdecimal() for each in parts[1:-1])
        if len(parts) != rank or parts[0] != ":" or parts[-1] not in heads or not plain:
            return None
        inner = ["*" if each == ":" else str(int(each)) for each in parts[1:-1]]
        return [heads[parts[-1]], *inner] if len(self.spans) > 1 else inner


def to_hugging_face(net: BNet, name: str) -> str:
    """Hugging Face's key for a parameter (`W_q_2.value`), or its name for nodes (`q_2_3_*`)."""
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
    check_indices(net.network, at, role == "x", name)
    place = next(place for place in own if place.slice is None or place.slice == int(at["slice"]))
    return place.tensor + place.index(at)


def from_hugging_face(net: BNet, key: str) -> tuple[str, ...]:
    """Ours for a key or a name of Hugging Face: one, or q, k and v whose maps lie side by side.

    The prefix of the family (`bert.`) may be left out, or be there for a bare model.
    """
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
            check_indices(net.network, dict(zip(place.axes, indices, strict=True)), place.role == "x", key)
            return ("_".join([place.role, *indices]),)
    forms = ", ".join(place.tensor + place.index({"head": "0"} if len(place.spans) > 1 else {}) for place in places)
    raise BNetError("name", expected="an index of whole nodes", got=key, allowed=f"as {forms}")


def _places(net: BNet) -> list[Place]:
    """The tensors that hold the nodes of a net, in the model of `transformers` that has what the net has."""
    family, graph = family_of(net.network), net.network.graph
    slices, post = graph.slices[""], family.norm == "post"
    found = [Place(f"hidden_states[{t}]", "x", t) for t in range(slices + post)]
    found += [Place(f"attentions[{t}]", "j", t, "read") for t in range(slices)]
    enters = POST if post else {**PRE, "x": "norm"}
    for stem, families in graph.by_stem.items():
        for each in families:
            if stem == "x" and (post or each.slice != slices):
                continue
            side, part = ("input", enters[stem]) if stem in enters else ("output", LEAVES.get(stem))
            if part is not None and part in family.modules:
                where = family.where(part)
                module = _key(net, part, where.key.replace("{t}", str(each.slice)))
                dims = "word" if each.words is not None else "sentence"
                member = net.network.members[each.index]
                spans = _spans(graph.sizes["head"], member.shape[0], where.part) if each.plates else {"*": ":"}
                found.append(Place(f"{module}.{side}", stem, each.slice, dims, spans))
    if not post:
        found.append(Place(f"hidden_states[{slices}]", "norm"))
    return found


def _spans(heads: int, width: int, part: tuple[int, int]) -> dict[str, str]:
    """The columns of all heads and of each, where several maps lie side by side or one alone."""
    which, count = part
    start = which * heads * width
    each = {str(h): f"{start + h * width}:{start + (h + 1) * width}" for h in range(heads)}
    return {"*": ":" if count == 1 else f"{start}:{start + heads * width}", **each}


def _key(net: BNet, part: str, key: str) -> str:
    """A key as the model has it: a model with a readout has a prefix before all but its readout."""
    whole = "y" in net.network.graph.by_stem and part not in BESIDE
    return f"{family_of(net.network).prefix}{key}" if whole else key


def _keys(net: BNet) -> dict[str, tuple[str, ...]]:
    """The keys of each parameter, the one that counts first."""
    found = {}
    for entry in entries(net.network, family_of(net.network)):
        parts = [entry.part, *["logits"] * (len(entry.keys) - 1)]  # a second key is the readout's
        found[entry.name] = tuple(_key(net, part, key) for part, key in zip(parts, entry.keys, strict=True))
    return found
