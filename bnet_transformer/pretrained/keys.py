"""The one map from the keys of a pretrained model's weights to our parameters, every shape checked.

Nothing is copied: our parameters are views of theirs. A map of all heads, `[heads * width, dim]`, is seen as
`[heads, width, dim]`; `W_o`, `[dim, heads * width]`, as `[heads, dim, width]`.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from bnet_transformer.errors import BNetError, FileError
from bnet_transformer.network import Network
from bnet_transformer.pretrained.family import Family, Where

FLOATING = (torch.float64, torch.float32, torch.float16, torch.bfloat16)
FORMER = {".gamma": ".weight", ".beta": ".bias"}  # what layer norms called theirs in files of 2018


class Weights(Protocol):
    """Tensors by their keys, read one by one."""

    @property
    def where(self) -> str:
        """How a message calls them."""

    def keys(self) -> list[str]:
        """All keys."""

    def tensor(self, key: str) -> Tensor:
        """The tensor of a key."""


@dataclass(frozen=True)
class Entry:
    """One of our parameters: its name, part and shape, and the keys of theirs, the first before the others, with how it
    lies there."""

    name: str
    part: str
    shape: tuple[int, ...]
    keys: tuple[str, ...]
    where: Where
    heads: str | None = None

    @property
    def theirs(self) -> tuple[int, ...]:
        """The shape that their tensor must have."""
        shape = self.shape
        if self.heads == "in":
            shape = (shape[0] * shape[1], *shape[2:])
        if self.heads == "out":
            shape = (shape[1], shape[0] * shape[2])
        shape = (self.where.part[1] * shape[0] + self.where.skip, *shape[1:])
        return shape[::-1] if self.where.transposed else shape

    def view(self, found: Tensor) -> Tensor:
        """Our view of their tensor."""
        found = found.mT if self.where.transposed and found.dim() == 2 else found
        found = found[self.where.skip :]
        which, count = self.where.part
        found = found.chunk(count)[which] if count > 1 else found
        if self.heads == "in":
            found = found.reshape(self.shape)
        if self.heads == "out":
            heads, out, width = self.shape
            found = found.reshape(out, heads, width).movedim(1, 0)
        return found


def entries(network: Network, family: Family) -> Iterator[Entry]:
    """Where each parameter of a net lies in the weights of its family; two entries may read one key."""
    for name, shape in network.shapes.items():
        owner, _, parameter = name.rpartition(".")
        stem, slice_ = _slice(owner)
        last = "bias" if parameter.startswith("bias") else "weight"
        heads = None
        if stem in ("W_q", "W_k", "W_v", "q", "k", "v"):
            part, heads = stem[-1], "in"
        elif stem == "W_o":
            part, heads = "mix", "out"
        elif stem == "ffn":
            part = f"ffn_{parameter.rpartition('_')[2]}"
        elif stem == "x":
            part, slice_ = ("x_0", None) if slice_ == 0 else ("norm2", (slice_ or 0) - 1)
        else:
            part = {"W_embed": "embed"}.get(stem, stem)
        where = family.where(part)
        options = [f"{where.key}.{last}"]
        if last == "bias" and where.bias is not None:
            options.append(where.bias)
        if stem == "W_embed":
            options.append(f"{family.where('logits').key}.weight")  # the same table, under a second key
        if last == "bias":
            where = Where(where.key, part=where.part, skip=where.skip)
        yield Entry(name, part, shape, tuple(key.replace("{t}", str(slice_)) for key in options), where, heads)


def _slice(owner: str) -> tuple[str, int | None]:
    found = re.fullmatch(r"(\w+?)_(\d+)", owner)
    return (found[1], int(found[2])) if found else (owner, None)


def weights_to_parameters(network: Network, family: Family, weights: Weights) -> tuple[dict[str, Tensor], list[str]]:
    """Our parameters, views of theirs, and the keys that no node reads, which must be of some readout."""
    place = {short(family, key): key for key in weights.keys()}  # noqa: SIM118
    read: set[str] = set()
    found = {}
    for entry in entries(network, family):
        options = [short(family, key) for key in entry.keys]
        key = next((key for key in options if key in place), None)
        if key is None:
            wanted = f"a weight {entry.keys[0]!r} of shape {entry.theirs}, for {entry.name}"
            raise FileError(weights.where, expected=wanted, got="none")
        tensor = weights.tensor(place[key]).detach()
        if tuple(tensor.shape) != entry.theirs:
            wanted = f"{place[key]} of shape {entry.theirs}, for {entry.name}"
            raise FileError(weights.where, expected=wanted, got=f"shape {tuple(tensor.shape)}")
        if tensor.dtype not in FLOATING:
            wanted = f"{place[key]} in one of {', '.join(map(str, FLOATING))}"
            raise FileError(weights.where, expected=wanted, got=f"{tensor.dtype}")
        found[entry.name] = entry.view(tensor)
        read.update(options)
    buffers = [re.escape(buffer).replace(r"\{t\}", r"\d+") for buffer in family.buffers]
    left = [key for name, key in place.items() if name not in read and not any(re.fullmatch(b, name) for b in buffers)]
    inside = {family.where(part).key.split(".")[0] for part in ("embed", "position", "q", "ffn_in")}
    strange = [key for key in left if short(family, key).split(".")[0] in inside]
    if strange:
        wanted = f"the weights of a {family.name} and no others within its slices"
        raise FileError(weights.where, expected=wanted, got=", ".join(sorted(strange)[:6]))
    return found, sorted(left)


def is_shared(family: Family, weights: Weights) -> bool:
    """False where the weights hold a table of the readout beside that of the words, with other values.

    A config that says tied is then wrong, and `transformers` does not tie them either.
    """
    place = {short(family, key): key for key in weights.keys()}  # noqa: SIM118
    both = [place.get(f"{family.where(part).key}.weight") for part in ("embed", "logits")]
    if None in both:
        return True
    words, logits = (weights.tensor(str(key)) for key in both)
    same = words.data_ptr() == logits.data_ptr() and words.stride() == logits.stride()
    return words.shape == logits.shape and (same or torch.equal(words, logits))


def check_indices(network: Network, at: Mapping[str, str], states: bool, name: str) -> None:
    """Refuse a slice, a head or a word that a net does not have; there is one more slice of `states`."""
    longest = next(m.tpm.longest for m in network.members if m.tpm.longest is not None)
    counts = {"slice": network.graph.slices[""] + states, "head": network.graph.sizes["head"], "word": longest}
    for axis, index in at.items():
        if index != "*" and int(index) >= counts[axis]:
            raise BNetError("name", expected=f"a {axis} from 0 to {counts[axis] - 1}", got=name)


def short(family: Family, key: str) -> str:
    """A key without the prefix of the family, in today's words."""
    for former, now in FORMER.items():
        if key.endswith(former):
            key = key[: -len(former)] + now
    return key.removeprefix(family.prefix)
