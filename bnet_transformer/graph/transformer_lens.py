"""The hooks of TransformerLens and the nodes that they hold.

The table has the hooks by role of node, for nets that normalise after a residual sum and for nets that normalise
before. `pretrained.name_mapping` maps names by it in both directions, and `unknown_node_error` names the node in the
error for a name such as `blocks.0.hook_resid_pre`. The state and the parts of attention are found from the edges of the
template graph, whatever their roles are called; the others are found by role.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from typing import TYPE_CHECKING

from bnet_transformer._core.naming import WORD, join_name, join_stem
from bnet_transformer.errors import UnknownNameError, unknown_name_error

if TYPE_CHECKING:
    from bnet_transformer.graph.template_graph import NodeGroup, TemplateGraph

FIRST_STATE, NEXT_STATE = "first x", "next x"
# Role -> the hooks of a TransformerBridge (TransformerLens 4.3) that hold it; `to_lens` returns the first.
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
    FIRST_STATE: ("hook_embed", "embed_ln.hook_out"),
}
PRE_NORM_HOOKS = {
    **COMMON_HOOKS,
    "embed": ("embed.hook_out", "hook_embed"),
    "norm1": ("blocks.{t}.ln1.hook_out", "blocks.{t}.attn.hook_in"),
    "mix": ("blocks.{t}.hook_attn_out", "blocks.{t}.attn.hook_out", "blocks.{t}.attn.o.hook_out"),
    "add1": ("blocks.{t}.hook_resid_mid", "blocks.{t}.ln2.hook_in"),
    "norm2": ("blocks.{t}.ln2.hook_out", "blocks.{t}.mlp.hook_in"),
    "norm": ("ln_final.hook_out", "unembed.hook_in"),
}
# Hooks of a HookedTransformer by another name. `hook_normalized` is the node itself where the scale and bias of the
# norm are folded into the next weights, which is the default of TransformerLens.
HOOK_ALIASES = {"hook_normalized": "hook_out", "attn.hook_attn_out": "hook_attn_out"}
HOOK_PATTERN = re.compile(
    r"(?:(?P<blocks>blocks|encoder|decoder)\.(?P<t>\d{1,9})\.)?(?P<point>(?:\w+\.)*hook_\w+)(?:\[.*\])?", re.ASCII
)
STACK_BLOCKS = {"encoder": "enc", "decoder": "dec"}


def unknown_node_error(subject: str, name: object, names: Iterable[str], template: TemplateGraph) -> UnknownNameError:
    """The error for an unknown node: it names the equivalent of a hook of TransformerLens, or else near matches.

    Args:
        subject: The argument, as the message names it.
        name: The unknown name.
        names: The known names.
        template: The template graph of the net.

    >>> import bnet_transformer as bt
    >>> s = bt.bayesuvius(dim=4).sentence("the cat sat")
    >>> print(unknown_node_error("node", "blocks.0.hook_resid_pre", [], s.ground.template))
    node: expected a name of this net; got 'blocks.0.hook_resid_pre'. This hook of TransformerLens is x_0_word here, \
such as x_0_0. To set all of them: do(x_0=...), or at=['x_0'] in a sweep.
    """
    match = HOOK_PATTERN.fullmatch(name) if isinstance(name, str) else None
    if match is None:
        return unknown_name_error(subject, name, names)
    hint = _describe_hook(template, match)
    return UnknownNameError(subject, expected="a name of this net", actual=repr(name), hint=hint)


def get_attention_name(group: NodeGroup) -> str:
    """The name of the rows of attention of a group in sweeps: `j`, `dec_cross_j`."""
    role = "j" if group.role in ("a", "x") else f"{group.role.removesuffix('_a')}_j"
    return join_stem(group.stack, role)


def _describe_hook(template: TemplateGraph, match: re.Match[str]) -> str:
    """The nodes that a hook holds, in a sentence without its full stop."""
    point, t = match["point"], None if match["t"] is None else int(match["t"])
    for alias, hook in HOOK_ALIASES.items():
        point = re.sub(rf"(^|\.){re.escape(alias)}$", rf"\g<1>{hook}", point)
    if t is not None:
        point = f"blocks.{{t}}.{point}"
    only_stack = STACK_BLOCKS.get(match["blocks"] or "")
    stacks = [stack for stack in template.slices if only_stack in (None, stack)]
    matches: list[tuple[str, NodeGroup]] = []
    for stack in stacks:
        hooks = POST_NORM_HOOKS if _is_post_norm(template, stack) else PRE_NORM_HOOKS
        groups = ((role, _find_group(template, stack, role, t)) for role, points in hooks.items() if point in points)
        matches += [(role, group) for role, group in groups if group is not None]
    if not matches:
        depth = max((template.slices[stack] for stack in stacks), default=0)
        if t is not None and t >= depth:
            return f"Block t of TransformerLens is slice t here, and this net has {depth} slices, counted from 0"
        return "This net has no node for this hook of TransformerLens"
    return "This hook of TransformerLens is " + ". Or: ".join(_describe_group(template, *pair) for pair in matches)


def _describe_group(template: TemplateGraph, role: str, group: NodeGroup) -> str:
    """The names of the nodes of a group, with an example."""
    axes = [*group.plates, *([WORD] if group.word_stack is not None else [])]
    names, first = "_".join([group.name, *axes]), join_name(group.name, [0] * len(axes))
    if role == "j":
        attentions = [other for other in template.groups if other.step == group.step and _has_queries(template, other)]
        option, at = "" if len(attentions) == 1 else f", role={group.stem!r}", get_attention_name(group)
        query = f"s.attention({group.step or 0}{option})"
        return f"P(j | i) of {names} here: {query}, do({first}=Attend(row)), or at={at!r} in a sweep"
    every = f", such as {first}. To set all of them: do({group.name}=...), or at=['{group.name}'] in a sweep"
    return f"{names} here" + (every if axes else "")


def _is_post_norm(template: TemplateGraph, stack: str) -> bool:
    """Whether the first norm of a slice follows its attention."""
    norm, attention = template.by_name.get(f"{join_stem(stack, 'norm1')}_0"), _find_attention(template, stack, 0)
    return norm is not None and attention is not None and attention.index in template.ancestors([norm.index])


def _find_group(template: TemplateGraph, stack: str, role: str, t: int | None) -> NodeGroup | None:
    """The group of a role of the table in slice t; None where the net has none."""
    if role in ("x", FIRST_STATE, NEXT_STATE):
        number = (t or 0) + (role == NEXT_STATE)
        slices = template.slices[stack]
        states = [
            groups
            for groups in template.by_stem.values()  # the state is the role that has one slice more than the stack
            if groups[0].stack == stack and {group.slice for group in groups} == set(range(slices + 1))
        ]
        return states[0][number] if states and (t or 0) < slices else None
    if role in ("q", "k", "v", "j", "a"):
        attention = _find_attention(template, stack, t or 0)
        if attention is None or role in ("j", "a"):
            return attention
        return template.groups[_get_parent(template, attention, role)]
    stem = join_stem(stack, role)
    return template.by_name.get(stem if t is None else join_name(stem, (t,)))


def _find_attention(template: TemplateGraph, stack: str, t: int) -> NodeGroup | None:
    """The first group in slice t of a stack that has queries, and keys of the same stack."""
    for group in template.groups:
        if (group.stack, group.step) == (stack, t):
            keys = _get_parent(template, group, "k")
            if _has_queries(template, group) and keys >= 0 and template.groups[keys].word_stack == stack:
                return group
    return None


def _has_queries(template: TemplateGraph, group: NodeGroup) -> bool:
    """Whether a group is attention: it has a parent in the slot q."""
    return _get_parent(template, group, "q") >= 0


def _get_parent(template: TemplateGraph, group: NodeGroup, slot: str) -> int:
    """The index of the parent in a slot of attention (q, k or v); -1 without a parent."""
    edges = template.in_edges[group.index]
    return next((edge.parent for edge in edges if any(name.rstrip(".") == slot for name in edge.slots)), -1)
