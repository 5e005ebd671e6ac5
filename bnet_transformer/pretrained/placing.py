"""Weights on the devices that a `device_map` names, brought there one by one as they are asked for."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

import torch
from torch import Tensor

from bnet_transformer.errors import BNetError
from bnet_transformer.pretrained.keys import Weights

FORMS = 'a device ("cuda:0"), or {"": 0}, {"bert.embeddings": "cpu", "bert.encoder.layer.0": 0, ...}'


@dataclass(frozen=True)
class Placed:
    """Weights, each on the device of the longest module name of a map that its key starts with.

    A tensor that several of our parameters are parts of is brought once. Where there is a map of one device, it is
    that of `""`.
    """

    weights: Weights
    devices: Mapping[str, torch.device]
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
            self.brought[key] = self.weights.tensor(key).to(self._device(key))
        return self.brought[key]

    def _device(self, key: str) -> torch.device:
        names = [name for name in self.devices if not name or key == name or key.startswith(f"{name}.")]
        if not names:
            raise BNetError("device_map", expected="a device for every weight", got=f"none for {key}", allowed=FORMS)
        return self.devices[max(names, key=len)]


def placed(weights: Weights, device_map: object) -> Weights:
    """Weights where a map puts them; None leaves them where they lie."""
    if device_map is None:
        return weights
    told = device_map if isinstance(device_map, Mapping) else {"": device_map}
    if not told or not all(isinstance(name, str) for name in told):
        raise BNetError("device_map", expected="names of modules, with a device each", got=device_map, allowed=FORMS)
    return Placed(weights, {name: _device(place) for name, place in told.items()})


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
