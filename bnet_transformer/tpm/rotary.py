"""Rotary positions (Su et al. 2021): pairs of features of q and k turn by angles that grow with the word's place."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import final

import torch
from torch import Tensor

from bnet_transformer.errors import BNetError, number, put, whole
from bnet_transformer.tpm.notation import numeral, raised
from bnet_transformer.tpm.symbols import Symbols

Turns = dict[tuple[object, ...], list[tuple[Tensor, Tensor, Tensor]]]  # positions, with their cosines and sines


@final
@dataclass(frozen=True)
class Rotary:
    """Features e and e + w/2 of the first w of word i turn by the angle `i f_e`, `f_e = base^(-2e/w) / factor`.

    `width` is w, by default all features; those behind it stay as they are. With `bands=(low, high, length)` only slow
    turns are divided by the factor: those of less than `low` turns in `length` words, not those of more than `high`,
    and the ones between in part, as in Llama 3.

    >>> Rotary(100.0, factor=2.0).frequencies(4)
    tensor([0.5000, 0.0500], dtype=torch.float64)
    """

    base: float = 10000.0
    width: int | None = None
    factor: float = 1.0
    bands: tuple[float, float, int] | None = None

    def __post_init__(self) -> None:
        put(self, base=number("rotary base", self.base, above=0))
        put(self, factor=number("rotary factor", self.factor, above=0))
        if self.width is not None:
            put(self, width=whole("rotary width", self.width, least=2))
        if self.width is not None and self.width % 2:
            raise BNetError("rotary width", expected="an even number (features are paired)", got=self.width)
        if self.bands is not None:
            _check_bands(self.bands)

    def check(self, width: int, name: str, got: str) -> None:
        """Refuse vectors whose features cannot be paired."""
        if self.width is None and width % 2:
            raise BNetError(name, expected="an even width (rotary positions pair it)", got=got)
        if self.width is not None and self.width > width:
            raise BNetError(name, expected=f"at least the {self.width} features that rotary positions turn", got=got)

    def frequencies(self, width: int, device: torch.device | None = None) -> Tensor:
        """The angles by which the pairs of a vector turn from one word to the next."""
        turned = self.width or width
        pairs = torch.arange(turned // 2, device=device, dtype=torch.float64)
        frequency = self.base ** (-2 * pairs / turned)
        if self.bands is None:
            return frequency / self.factor
        low, high, length = self.bands
        kept = ((length * frequency / (2 * math.pi) - low) / (high - low)).clamp(0, 1)
        return (kept + (1 - kept) / self.factor) * frequency

    def turn(self, x: Tensor, position: Tensor, turns: Turns | None = None) -> Tensor:
        """Vectors `[..., d]` of words at these positions, turned; `turns` keeps what turns them for the next ones."""
        turned = self.width or x.shape[-1]
        made = [] if turns is None else turns.setdefault((self, x.shape[-1], x.dtype, x.device), [])
        found = next((turn for turn in made if turn[0] is position), None)
        if found is None:
            angle = position.to(torch.float64)[..., None] * self.frequencies(x.shape[-1], x.device)
            found = position, angle.cos().to(x.dtype), angle.sin().to(x.dtype)
            made.append(found)
        _, cos, sin = found
        a, b, rest = x[..., : turned // 2], x[..., turned // 2 : turned], x[..., turned:]
        return torch.cat([a * cos - b * sin, b * cos + a * sin, rest], -1)

    def define(self, s: Symbols, turn: str, width: int) -> None:
        """Say in LaTeX what the turn of word i is."""
        turned = self.width or width
        angle = rf"i / {raised(self.base, f'2e/{turned}')}"
        if self.bands is not None:
            low, high, length = self.bands
            angle = rf"i f_e, \; f_e = (s_e + \frac{{1 - s_e}}{{{numeral(self.factor)}}}) g_e"
            s.define(rf"g_e = {raised(self.base, f'-2e/{turned}')}")
            span, least = numeral(high - low), numeral(low)
            inside = rf"\frac{{1}}{{{span}}} (\frac{{{length} g_e}}{{2 \pi}} - {least})"
            s.define(rf"s_e = \min(\max({inside}, 0), 1)")
        elif self.factor != 1:
            angle = rf"i / ({numeral(self.factor)} \cdot {raised(self.base, f'2e/{turned}')})"
        some = "" if turned == width else rf" \text{{ for }} e < {turned // 2}"
        pair = rf"e \text{{ and }} e + {turned // 2}"
        s.define(rf"{turn} \text{{ turns features }} {pair} \text{{ by the angle }} {angle}{some}")


def _check_bands(bands: object) -> None:
    """Refuse bands that are no two growing numbers of turns and a number of words."""
    if not isinstance(bands, tuple) or len(bands) != 3:
        raise BNetError("rotary bands", expected="(low, high, length)", got=bands)
    low, high, length = bands
    number("low of the rotary bands", low, above=0)
    number("high of the rotary bands", high, above=low)
    whole("length of the rotary bands", length)
