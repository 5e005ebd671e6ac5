"""Weights on the devices that a `device_map` names, in the type that is asked for, brought there one by one."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field

import torch
from torch import Tensor

from bnet_transformer.errors import BNetError, unknown
from bnet_transformer.pretrained.family import BESIDE, Family
from bnet_transformer.pretrained.keys import Weights, is_within, short

FORMS = 'a device ("cuda:0"), "auto", or {"": 0}, {"bert.embeddings": "cpu", "bert.encoder.layer.0": 0, ...}'
EMPTY = re.compile(r"\w*drop(out)?|rotary_emb|\w*act(ivation)?(_fn)?|\w*loss_fct")  # what has no weights, in any map


@dataclass(frozen=True)
class Placed:
    """Weights, each on the device of the longest module name of a map that it is of, and in a type where one is asked.

    A tensor that several of our parameters are parts of is brought once. Where there is a map of one device, it is
    that of `""`; without any, tensors stay where they lie.
    """

    family: Family
    weights: Weights
    devices: Mapping[str, torch.device] | None
    dtype: torch.dtype | None = None
    brought: dict[str, Tensor] = field(default_factory=dict)

    @property
    def where(self) -> str:
        """How a message calls them."""
        return self.weights.where

    def keys(self) -> list[str]:
        """All keys."""
        return self.weights.keys()

    def tensor(self, key: str) -> Tensor:
        """The tensor of a key, on its device."""
        if key not in self.brought:
            found = self.weights.tensor(key)
            device = found.device if self.devices is None else self._device(key, self.devices)
            try:
                self.brought[key] = found.to(device, self.dtype or found.dtype)
            except torch.OutOfMemoryError as error:
                got = f"none for {key} ({found.nbytes:,} bytes)"
                raise BNetError("device_map", expected=f"room on {device}", got=got, allowed=FORMS) from error
        return self.brought[key]

    def _device(self, key: str, devices: Mapping[str, torch.device]) -> torch.device:
        known = names_of(self.family, key)
        names = [name for name in devices if not name or any(is_within(each, name) for each in known)]
        if not names:
            raise BNetError("device_map", expected="a device for every weight", got=f"none for {key}", allowed=FORMS)
        return devices[max(names, key=self._depth)]

    def _depth(self, name: str) -> int:
        """How long a name is, the prefix of the family aside."""
        return len(f"{name}.".removeprefix(self.family.prefix)) if name else -1


def names_of(family: Family, key: str) -> list[str]:
    """A key as the file has it, and as the model has it: with the prefix of the family and without."""
    today = short(family, key)
    beside = [family.where(part).key for part in BESIDE if part in family.modules]
    whole = [] if any(is_within(today, each) for each in beside) else [f"{family.prefix}{today}"]
    return [key, today, *whole]


def placed(family: Family, weights: Weights, device_map: object, dtype: torch.dtype | None = None) -> Weights:
    """Weights where a map puts them, in a type; None leaves them where and as they are."""
    if device_map is None:
        return weights if dtype is None else Placed(family, weights, None, dtype)
    told = device_map if isinstance(device_map, Mapping) else {"": _only() if device_map == "auto" else device_map}
    if not told or not all(isinstance(name, str) for name in told):
        raise BNetError("device_map", expected="names of modules, with a device each", got=device_map, allowed=FORMS)
    known = dict.fromkeys(_modules(family, weights))
    for name in told:
        if name and name not in known and not EMPTY.fullmatch(name.rpartition(".")[2]):
            raise unknown("module of device_map", name, known)
    return Placed(family, weights, {name: _device(place) for name, place in told.items()}, dtype)


def _modules(family: Family, weights: Weights) -> Iterator[str]:
    """The names of all weights and of the modules around them; a readout may have none of its own."""
    parts = [family.where(part).key for part in family.modules]
    names = [f"{key}.weight" for key in parts if "{t}" not in key] + list(weights.keys())
    for key in names:
        for name in names_of(family, key):
            pieces = name.split(".")
            yield from (".".join(pieces[:k]) for k in range(len(pieces), 0, -1))


def _device(place: object) -> torch.device:
    """A device that is there, and holds numbers: nothing is left on disk."""
    wanted = "a device of this machine"
    if not isinstance(place, str | int | torch.device) or isinstance(place, bool) or str(place) in ("disk", "meta"):
        raise BNetError("device_map", expected=wanted, got=place, allowed=FORMS)
    try:
        device = torch.device(place)
        torch.empty(0, device=device)
    except (RuntimeError, AssertionError) as error:  # of no known name; not built in, or not there
        raise BNetError("device_map", expected=wanted, got=place, allowed=FORMS) from error
    return device


def _only() -> torch.device:
    """The one accelerator of the machine; the CPU, where it has none."""
    found = torch.accelerator.current_accelerator(check_available=True)
    count = torch.accelerator.device_count()
    if found is not None and count > 1:
        wanted = "a device for each module: auto does not choose among several"
        raise BNetError("device_map", expected=wanted, got=f"{count} devices {found.type}", allowed=FORMS)
    return torch.device("cpu") if found is None else torch.device(found.type, 0)
