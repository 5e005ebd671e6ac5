"""The readout that all models share: what is observed of each word, or of the sentence."""

from __future__ import annotations

from collections.abc import Sequence

from bnet_transformer.errors import BNetError
from bnet_transformer.network import Arrow, Node
from bnet_transformer.tpm import TPM, Categorical, Normal

WORD, HEADS = ["word"], ["head", "word"]


def observed(observe: TPM | None, role: str = "x", over: Sequence[str] = WORD) -> list[Node]:
    """The node of what is observed: what stands over words, or the sentence where the readout pools."""
    if observe is None:
        return []
    if not isinstance(observe, Categorical | Normal):
        raise BNetError("observe", expected="a readout", got=observe, allowed="Categorical(n), Normal(sigma), None")
    if observe.pool:
        return [Node("y", observe, [Arrow(role, "every")])]
    return [Node("y", observe, [role], plates=over)]
