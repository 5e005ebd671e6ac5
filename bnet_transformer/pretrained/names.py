"""The names that other libraries give to the parts of a model, and ours: TransformerLens' hooks, Hugging Face's keys.

    blocks.2.attn.hook_q[..., 3, :]   <->   q_2_3_*          slice 2, head 3, every word
    blocks.2.attn.hook_q[:, 5, 3, :]  <->   q_2_3_5          word 5 alone
    encoder.layer.2.attention.self.query.weight   <->   W_q_2.value

A star stands for every head or word. What a library has no name for is an error that lists what it has.
"""

from __future__ import annotations

import re
from collections.abc import Mapping

from bnet_transformer.axes import join
from bnet_transformer.errors import BNetError, unknown
from bnet_transformer.face import BNet
from bnet_transformer.pretrained.families import FAMILIES
from bnet_transformer.pretrained.keys import entries

HEADS = ("q", "k", "v", "a")
COMMON = {
    "embed": "hook_embed",
    "position": "hook_pos_embed",
    "segment_embed": "hook_token_type_embed",
    "q": "blocks.{t}.attn.hook_q",
    "k": "blocks.{t}.attn.hook_k",
    "v": "blocks.{t}.attn.hook_v",
    "a": "blocks.{t}.attn.hook_z",
    "mix": "blocks.{t}.hook_attn_out",
    "add1": "blocks.{t}.hook_resid_mid",
    "ffn": "blocks.{t}.hook_mlp_out",
    "x": "blocks.{t}.hook_resid_pre",
}
POST = {
    **COMMON,
    "norm1": "blocks.{t}.hook_normalized_resid_mid",
    "add2": "blocks.{t}.hook_resid_post",
    "x_last": "blocks.{t}.hook_normalized_resid_post",
}
PRE = {
    **COMMON,
    "norm1": "blocks.{t}.ln1.hook_normalized",
    "norm2": "blocks.{t}.ln2.hook_normalized",
    "x_last": "blocks.{t}.hook_resid_post",
    "norm": "ln_final.hook_normalized",
}
NAME = re.compile(r"(?P<stem>[A-Za-z]\w*?)(?P<indices>(?:_(?:\d+|\*))*)")
HOOK = re.compile(r"(?P<hook>[a-z_.0-9]+?)(?:\[(?P<index>[^\]]*)\])?")


def to_lens(net: BNet, name: str) -> str:
    """TransformerLens' name for nodes of a net: `q_2_3_*` is `blocks.2.attn.hook_q[..., 3, :]`.

    The last state is told as the end of the last block.
    """
    hooks, slices = _hooks(net)
    found = NAME.fullmatch(name)
    stem, indices = (found["stem"], found["indices"].split("_")[1:]) if found else (name, [])
    if stem not in hooks or stem == "x_last":
        raise unknown("role with a hook", name, [each for each in hooks if each != "x_last"])
    count = ("{t}" in hooks[stem]) + (stem in HEADS) + 1
    if len(indices) != count or (indices[:1] == ["*"] and "{t}" in hooks[stem]):
        axes = [*(["slice"] if "{t}" in hooks[stem] else []), *(["head"] if stem in HEADS else []), "word"]
        raise BNetError("name", expected=f"{'_'.join([stem, *axes])}, with * for every head or word", got=name)
    hook = hooks[stem]
    if "{t}" in hook:
        t = int(indices.pop(0))
        last = stem == "x" and t == slices
        if not 0 <= t < slices + (stem == "x"):
            raise BNetError("name", expected=f"a slice from 0 to {slices - (stem != 'x')}", got=name)
        hook = hooks["x_last"].format(t=slices - 1) if last else hook.format(t=t)
    *head, word = indices
    if stem not in HEADS:
        return hook if word == "*" else f"{hook}[:, {word}, :]"
    if word == "*":
        return hook if head == ["*"] else f"{hook}[..., {head[0]}, :]"
    return f"{hook}[:, {word}, {':' if head == ['*'] else head[0]}, :]"


def from_lens(net: BNet, name: str) -> str:
    """Our name for what TransformerLens calls so: `blocks.2.attn.hook_q[..., 3, :]` is `q_2_3_*`."""
    hooks, slices = _hooks(net)
    found = HOOK.fullmatch(name.replace(" ", ""))
    hook, index = (found["hook"], found["index"]) if found else (name, None)
    whole = {form.replace("{t}", str(t)): (stem, t) for stem, form in hooks.items() for t in range(slices)}
    if hook not in whole:
        raise unknown("hook", hook, whole)
    stem, t = whole[hook]
    if stem == "x_last":
        stem, t = "x", t + 1
    start = [t] if "{t}" in hooks[stem] else []
    return "_".join([join(stem, start), *_stars(name, index, heads=stem in HEADS)])


def _stars(name: str, index: str | None, *, heads: bool) -> list[str]:
    """The head and the word of an index `[batch, word, head, feature]`, stars where it takes all."""
    parts = ["..."] if index is None else index.split(",")
    rank = 4 if heads else 3
    if "..." in parts:
        at = parts.index("...")
        parts[at : at + 1] = [":"] * (rank - len(parts) + 1)
    plain = all(part == ":" or part.isdecimal() for part in parts)
    if len(parts) != rank or not plain or parts[0] != ":" or parts[-1] != ":":
        form = "[batch, word, head, feature]" if heads else "[batch, word, feature]"
        raise BNetError("hook", expected=f"an index {form} with all of the batch and of the features", got=name)
    own = ["*" if part == ":" else part for part in parts[1:-1]]
    return own[::-1]


def _hooks(net: BNet) -> tuple[Mapping[str, str], int]:
    """The hooks of a net by role, and how many slices it has."""
    slices = dict(net.network.graph.slices)
    if list(slices) != [""]:
        raise BNetError("net", expected="one stack", got=f"{len(slices)} stacks")
    roles = [node.role for node in net.declaration.stacks[0].slice]
    if "norm1" not in roles or "q" not in roles:
        raise BNetError("net", expected="the slices of a vanilla transformer", got=", ".join(roles))
    hooks = PRE if roles.index("norm1") < roles.index("q") else POST
    known = {*net.network.graph.by_stem, "x_last"}
    return {stem: hook for stem, hook in hooks.items() if stem in known}, slices[""]


def to_hugging_face(net: BNet, parameter: str) -> str:
    """Hugging Face's key for a parameter of a pretrained net: `W_q_2.value` is `....2.attention.self.query.weight`."""
    keys = _keys(net)
    if parameter not in keys:
        raise unknown("parameter", parameter, keys)
    return keys[parameter]


def from_hugging_face(net: BNet, key: str) -> tuple[str, ...]:
    """Our parameters that lie in a weight of Hugging Face: one, or q, k and v that lie side by side."""
    keys = _keys(net)
    prefix = FAMILIES[net.declaration.name].prefix
    found = tuple(name for name, theirs in keys.items() if theirs == key.removeprefix(prefix))
    if not found:
        raise unknown("key", key, keys.values())
    return found


def _keys(net: BNet) -> dict[str, str]:
    if net.declaration.name not in FAMILIES:
        raise BNetError("net", expected="a pretrained net of " + ", ".join(FAMILIES), got=net.declaration.name)
    return {entry.name: entry.keys[0] for entry in entries(net.network, FAMILIES[net.declaration.name])}
