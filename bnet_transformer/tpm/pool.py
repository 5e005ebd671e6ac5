"""Pooling: one vector from a collection of words."""

from __future__ import annotations

from torch import Tensor

from bnet_transformer.tpm.symbols import Symbols

POOLS = ("mean", "sum")


def pooled(how: str, x: Tensor, mask: Tensor) -> Tensor:
    """`[..., m, d] -> [..., d]` over the words that the mask `[..., m]` reads."""
    weight = mask.to(x.dtype)
    if how == "mean":
        weight = weight / weight.sum(-1, keepdim=True)
    return (weight[..., None] * x).sum(-2)


def pooled_latex(how: str, s: Symbols, slot: str, letter: str = "a") -> str:
    """The pooled collection as the form of `s` shows it, its feature under `letter`."""
    share = "" if how == "sum" else rf"\frac{{1}}{{{s.count(slot)}}} "
    x = s.of(slot, letter)
    if s.form in ("word", "einstein") or s.index(slot) != "j":
        return f"{share}{s.sum(slot)} {x}"
    if not s.over_all(slot):
        s.only("word")
    one, across = r"\mathbf{1}", r"\mathbf{1}^\top"
    if s.whole:
        one = across = f"{one} {across}"
    return f"{share}{across} {x}" if s.form == "row" else f"{share}{x} {one}"
