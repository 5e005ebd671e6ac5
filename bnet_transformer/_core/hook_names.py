"""The hooks of TransformerLens by role of node, for nets that normalise after a residual sum, and before it.

`pretrained.names` maps names by these tables in both directions, and `unknown_node_error` of the template graph
names the node in the error for a name such as `blocks.0.hook_resid_pre`.
"""

from __future__ import annotations

import re

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
