"""TransformerLens' names for the nodes of a net, and ours.

    blocks.2.attn.hook_q[..., 3, :]         <->   q_2_3_*     slice 2, head 3, every word
    blocks.2.attn.hook_q[:, 5, 3, :]        <->   q_2_3_5     word 5 alone
    blocks.2.attn.hook_pattern[:, 3, 5, :]  <->   j_2_3_5     the word that word 5 reads: P(j | i)

A star stands for every head or word. What TransformerLens has no hook for is an error that lists what it has.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass

from bnet_transformer.bnet import BNet
from bnet_transformer.errors import BNetError, unknown
from bnet_transformer.pretrained.families import FAMILIES, family_of
from bnet_transformer.pretrained.keys import asked_of, check_indices

HEAD = "head"
HEADS = ("q", "k", "v", "a", "j")
READ = "j"
# Role -> the hooks of a TransformerBridge (TransformerLens 4.3) that hold it; the first is the one that is told.
COMMON = {
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
POST = {
    **COMMON,
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
PRE = {
    **COMMON,
    "norm1": ("blocks.{t}.ln1.hook_out", "blocks.{t}.attn.hook_in"),
    "mix": ("blocks.{t}.hook_attn_out", "blocks.{t}.attn.hook_out", "blocks.{t}.attn.o.hook_out"),
    "add1": ("blocks.{t}.hook_resid_mid", "blocks.{t}.ln2.hook_in"),
    "norm2": ("blocks.{t}.ln2.hook_out", "blocks.{t}.mlp.hook_in"),
    "norm": ("ln_final.hook_out", "unembed.hook_in"),
}
EMBED = {"hook_embed": ("embed", 0)}
NAME = re.compile(r"(?P<stem>[A-Za-z]\w*?)(?P<indices>(?:_(?:\d+|\*))*)")
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
    found = NAME.fullmatch(name)
    role, told = (found["stem"], found["indices"].split("_")[1:]) if found else (name, [])
    if role not in hooks.by_role or role == "x_next":
        raise unknown("role with a hook", name, [each for each in hooks.by_role if each != "x_next"])
    axes = hooks.axes(role)
    if len(told) != len(axes) or (axes[0] == "slice" and told[0] == "*"):
        raise BNetError("name", expected=f"{'_'.join([role, *axes])}, with * for every head or word", got=name)
    at = dict(zip(axes, told, strict=True))
    check_indices(net.network, at, role, name)
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
    parts = ["..."] if index is None else index.split(",")
    rank = 4 if role in HEADS else 3
    if parts.count("...") == 1 and len(parts) <= rank + 1:
        at = parts.index("...")
        parts[at : at + 1] = [":"] * (rank - len(parts) + 1)
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
    hooks = {role: each for role, each in (PRE if family.norm == "pre" else POST).items() if role in known}
    return Hooks(hooks, graph.slices[""])
