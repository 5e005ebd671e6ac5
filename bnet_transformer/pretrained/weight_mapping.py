"""The one map from the keys of a pretrained model's weights to our parameters, every shape checked.

Nothing is copied: our parameters are views of theirs. A map of all heads, `[heads * width, dim]`, is seen as
`[heads, width, dim]`; `W_o`, `[dim, heads * width]`, as `[heads, dim, width]`; heads in groups stand in two dims.
"""

from __future__ import annotations

import functools
import math
import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from types import MappingProxyType

import torch
from torch import Tensor

from bnet_transformer._core.distributed import check_device
from bnet_transformer.declare import Network
from bnet_transformer.errors import BNetError, FileError, unknown_name_error
from bnet_transformer.pretrained.family import READOUT_ONLY_PARTS, ModelFamily, WeightLocation

TABLE = "W_embed"
FLOAT_DTYPES = (torch.float64, torch.float32, torch.float16, torch.bfloat16)
LEGACY_SUFFIXES = {".gamma": ".weight", ".beta": ".bias"}  # what layer norms called theirs in files of 2018
DEVICE_MAP_FORMS = 'a device ("cuda:0"), "auto", or {"": 0}, {"bert.embeddings": "cpu", "bert.encoder.layer.0": 0, ...}'
PARAMETERLESS_MODULES = re.compile(
    r"\w*drop(out)?|rotary_emb|\w*act(ivation)?(_fn)?|\w*loss_fct"
)  # what has no weights, in any map


@dataclass(frozen=True)
class StateDict:
    """Tensors by their keys, read one by one; `origin` is how a message calls them."""

    origin: str
    keys: tuple[str, ...]
    get_tensor: Callable[[str], Tensor]


@dataclass(frozen=True)
class ParameterMapping:
    """One of our parameters: its name and shape, and the keys of theirs, each of its part, the first before the others,
    with how it lies there. The sizes of a `kernel_shape` are together the last of ours."""

    name: str
    parts: tuple[str, ...]
    shape: tuple[int, ...]
    keys: tuple[str, ...]
    location: WeightLocation
    head_axis: str | None = None
    kernel_shape: tuple[int, ...] = ()

    @property
    def source_shape(self) -> tuple[int, ...]:
        """The shape that their tensor must have."""
        shape = self.shape
        if self.head_axis == "in":
            shape = (self.num_heads * self.head_shape[0], *self.head_shape[1:])
        if self.head_axis == "out":
            shape = (self.head_shape[0], self.num_heads * self.head_shape[1])
        shape = (self.location.chunk[1] * shape[0] + self.location.row_offset, *shape[1:])
        shape = shape[::-1] if self.location.transposed else shape
        return (*[1] * self.location.leading_dims, *(shape[:-1] + self.kernel_shape if self.kernel_shape else shape))

    @property
    def head_shape(self) -> tuple[int, ...]:
        """The shape of what one head has: of its matrix, or of its bias."""
        return self.shape[-2:] if self.name.endswith(".value") else self.shape[-1:]

    @property
    def num_heads(self) -> int:
        """How many heads there are, of all groups together."""
        return math.prod(self.shape[: len(self.shape) - len(self.head_shape)])

    def view(self, tensor: Tensor) -> Tensor:
        """Our view of their tensor."""
        tensor = tensor.reshape(self.source_shape[self.location.leading_dims :])
        tensor = tensor.flatten(-len(self.kernel_shape)) if self.kernel_shape else tensor
        tensor = tensor.mT if self.location.transposed and tensor.dim() == 2 else tensor
        tensor = tensor[self.location.row_offset :]
        which, count = self.location.chunk
        if self.location.is_interleaved:
            tensor = tensor.reshape(self.num_heads, count, *self.head_shape)[:, which]
        elif count > 1:
            tensor = tensor.chunk(count)[which]
        if self.head_axis == "in":
            tensor = tensor.reshape(self.shape)
        if self.head_axis == "out":
            out, width = self.head_shape
            tensor = tensor.reshape(out, self.num_heads, width).movedim(1, 0).unflatten(0, self.shape[:-2])
        return tensor


def map_parameters(network: Network, family: ModelFamily) -> Iterator[ParameterMapping]:
    """Where each parameter of a net lies in the weights of its family; two entries may read one key."""
    cut = next((m.tpm.image for m in network.specs if m.tpm.image is not None), None)  # the patches of an image
    for name, shape in network.shapes.items():
        owner, _, parameter = name.rpartition(".")
        stack, stem, slice_ = parse_owner(network, owner)
        last = "bias" if parameter.startswith("bias") else "weight"
        part, heads = _find_part(stem, parameter, gated=f"{owner}.weight_gate" in network.shapes)
        if stem == "x":  # the first state, or what the slice before makes (which is any, where slices share)
            part, slice_ = ("x_0", None) if slice_ == 0 else ("norm2", None if slice_ is None else slice_ - 1)
        parts = _list_table_parts(network, family) if stem == TABLE else [resolve_part(family, stack, part)]
        where = family.locate(parts[0])
        options = [f"{family.locate(each).key}.{last}" for each in parts]
        if last == "bias":
            options, where = locate_bias(where)
            parts = [parts[0], *["logits"] * (len(options) - 1)]
        elif where.is_tensor_key:
            options = [where.key]
        keys = tuple(key.replace("{t}", str(slice_)) for key in options)
        kernel = (cut.channels, cut.high, cut.wide) if cut is not None and where.is_conv and last == "weight" else ()
        yield ParameterMapping(name, tuple(parts), shape, keys, where, heads, kernel)


def parse_owner(network: Network, name: str) -> tuple[str, str, int | None]:
    """The stack of a node's name, its role and its slice."""
    stack = next((s.name for s in network.declaration.stacks if s.name and name.startswith(f"{s.name}_")), "")
    found = re.fullmatch(r"(\w+?)(?:_(\d+))?", name[len(stack) + 1 :] if stack else name)
    assert found is not None
    return stack, found[1], None if found[2] is None else int(found[2])


def _find_part(stem: str, parameter: str, *, gated: bool) -> tuple[str, str | None]:
    """The part that holds a parameter of a role, and whether heads lie along what comes in or goes out."""
    mapped, mixed = re.fullmatch(r"(?:W_)?((?:cross_)?[qkv])", stem), re.fullmatch(r"W_(cross_)?o", stem)
    if mapped:
        return mapped[1], "in"
    if mixed:
        return f"{mixed[1] or ''}mix", "out"
    if stem == "ffn":
        which = parameter.rpartition("_")[2]
        return f"ffn_{which}_gated" if gated and which == "in" else f"ffn_{which}", None
    return stem, None


def resolve_part(family: ModelFamily, stack: str, part: str) -> str:
    """A part of a stack as a family names it: its own, or that of any stack."""
    plain = {"x_0": "embed"}.get(part, part.removesuffix("_gated"))
    names = [f"{stack}_{part}", part, f"{stack}_{plain}", plain] if stack else [part, plain]
    return next((name for name in names if name in family.modules), plain)


def _list_table_parts(network: Network, family: ModelFamily) -> list[str]:
    """The parts of a table that several nodes read: that of all, and those of each."""
    graph = network.graph
    readers = [graph.groups[bundle.child] for bundle in graph.edges if graph.groups[bundle.parent].role == TABLE]
    own = [resolve_part(family, each.stack, "embed" if each.role == "x" else each.role) for each in readers]
    words = {each.stack for each in readers if each.role in ("embed", "x")}
    whole = ["embed"] if "embed" in family.modules and words == {s.name for s in network.declaration.stacks} else []
    return list(dict.fromkeys([*own, *whole]))  # its own first: what is shared is what loading ties them to


def locate_bias(location: WeightLocation) -> tuple[list[str], WeightLocation]:
    """The keys of the bias of a part, and how it lies there."""
    if isinstance(location.bias, WeightLocation):
        return [location.bias.key], location.bias
    others = [] if location.bias is None else [location.bias]
    return [f"{location.key}.bias", *others], WeightLocation(
        location.key, chunk=location.chunk, row_offset=location.row_offset, is_interleaved=location.is_interleaved
    )


def weights_to_parameters(
    network: Network, family: ModelFamily, weights: StateDict, tied_keys: Mapping[str, str] = MappingProxyType({})
) -> tuple[dict[str, Tensor], list[str]]:
    """Our parameters, views of theirs, and the keys that no node reads, which must be of some readout.

    `tied_keys` names, for keys that the weights lack, those that are read in their place.
    """
    place = index_keys(family, weights)
    place |= {key: place[source] for key, source in tied_keys.items()}
    read = set(tied_keys.values())
    found = {}
    for entry in map_parameters(network, family):
        options = [canonical_key(family, key) for key in entry.keys]
        key = next((key for key in options if key in place), None)
        if key is None:
            wanted = f"a weight {entry.keys[0]!r} of shape {entry.source_shape}, for {entry.name}"
            allowed = "readout=None reads the states alone" if entry.parts[0] in READOUT_ONLY_PARTS else None
            raise FileError(weights.origin, expected=wanted, actual="none", allowed=allowed)
        tensor = weights.get_tensor(place[key]).detach()
        if tuple(tensor.shape) != entry.source_shape:
            wanted = f"{place[key]} of shape {entry.source_shape}, for {entry.name}"
            raise FileError(weights.origin, expected=wanted, actual=f"shape {tuple(tensor.shape)}")
        if tensor.dtype not in FLOAT_DTYPES:
            wanted = f"{place[key]} in one of {', '.join(map(str, FLOAT_DTYPES))}"
            raise FileError(weights.origin, expected=wanted, actual=f"{tensor.dtype}")
        found[entry.name] = entry.view(tensor)
        read.update(options)
    kinds = sorted({str(value.dtype) for value in found.values()})
    if len(kinds) > 1:
        allowed = "dtype=torch.float32 brings all to one"
        raise FileError(
            weights.origin, expected="weights of one floating type", actual=", ".join(kinds), allowed=allowed
        )
    return found, _check_unused_keys(family, weights, place, read)


def _check_unused_keys(
    family: ModelFamily, weights: StateDict, canonical_keys: Mapping[str, str], used_keys: set[str]
) -> list[str]:
    """The keys that no node reads; none may be within the slices, nor of a module that is read."""
    buffers = [re.escape(buffer).replace(r"\{t\}", r"\d+") for buffer in family.buffers]
    left = {
        n: key
        for n, key in canonical_keys.items()
        if n not in used_keys and not any(re.fullmatch(b, n) for b in buffers)
    }
    parts = [part for part in ("embed", "position", "q", "ffn_in", "enc_q", "dec_q") if part in family.modules]
    inside = {family.locate(part).key.split(".")[0] for part in parts}
    modules = {name.rpartition(".")[0] for name in used_keys if name.endswith((".weight", ".bias"))}
    strange = [key for n, key in left.items() if n.split(".")[0] in inside or n.rpartition(".")[0] in modules]
    if strange:
        wanted = f"the weights of a {family.name}, and no others within its slices or of what is read"
        raise FileError(weights.origin, expected=wanted, actual=", ".join(sorted(strange)[:6]))
    return sorted(left.values())


def has_readout_weights(family: ModelFamily, weights: StateDict) -> bool:
    """True where the weights hold some of what a bare model has not."""
    beside = {family.locate(part).key for part in READOUT_ONLY_PARTS if part in family.modules}
    return any(is_in_module(canonical_key(family, key), module) for key in weights.keys for module in beside)


def is_in_module(key: str, module: str) -> bool:
    """True where a key, or a module, is of a module."""
    return key == module or key.startswith(f"{module}.")


def are_tensors_equal(family: ModelFamily, weights: StateDict, *keys: str | None) -> bool:
    """False where the weights hold the tensors of two keys with different values."""
    present = index_keys(family, weights)
    if keys[0] == keys[1] or not all(key in present for key in keys):
        return True
    one, other = (weights.get_tensor(present[key]) for key in keys if key is not None)
    same = one.data_ptr() == other.data_ptr() and one.stride() == other.stride()
    return one.shape == other.shape and (same or torch.equal(one, other.to(one.device)))


def index_keys(family: ModelFamily, weights: StateDict) -> dict[str, str]:
    """The keys of weights, by what they are without the prefix of the family, in today's words."""
    return {canonical_key(family, key): key for key in weights.keys}


def canonical_key(family: ModelFamily, key: str) -> str:
    """A key without the prefix of the family, in today's words."""
    for former, now in LEGACY_SUFFIXES.items():
        if key.endswith(former):
            key = key[: -len(former)] + now
    key = key.removeprefix(family.prefix)
    for piece, today in family.key_mapping.items():
        key = re.sub(piece, today, key)
    return key


# devices and types: weights are brought there one by one


def dispatch_weights(
    family: ModelFamily,
    weights: StateDict,
    devices: Mapping[str, torch.device] | None,
    dtype: torch.dtype | None = None,
) -> StateDict:
    """Weights, each on the device of the longest module name of a map that it is of, and in a type where one is asked.

    Without a map tensors stay where they lie. A tensor that several of our parameters are parts of is brought once.
    """

    @functools.cache
    def get_tensor(key: str) -> Tensor:
        found = weights.get_tensor(key)
        device = found.device if devices is None else _find_key_device(family, key, devices)
        try:
            return found.to(device, dtype or found.dtype)
        except torch.OutOfMemoryError as error:
            got = f"none for {key} ({found.nbytes:,} bytes)"
            raise BNetError("device_map", expected=f"room on {device}", actual=got, allowed=DEVICE_MAP_FORMS) from error

    return StateDict(weights.origin, weights.keys, get_tensor)


def _find_key_device(family: ModelFamily, key: str, devices: Mapping[str, torch.device]) -> torch.device:
    """The device of the longest name that a key is of, the prefix of the family aside."""
    known = list_key_aliases(family, key)
    names = [name for name in devices if not name or any(is_in_module(each, name) for each in known)]
    if not names:
        raise BNetError(
            "device_map", expected="a device for every weight", actual=f"none for {key}", allowed=DEVICE_MAP_FORMS
        )
    return devices[max(names, key=lambda name: len(f"{name}.".removeprefix(family.prefix)) if name else -1)]


def list_key_aliases(family: ModelFamily, key: str) -> list[str]:
    """A key as the file has it, and as the model has it: with the prefix of the family and without."""
    today = canonical_key(family, key)
    beside = [family.locate(part).key for part in READOUT_ONLY_PARTS if part in family.modules]
    whole = [] if any(is_in_module(today, each) for each in beside) else [f"{family.prefix}{today}"]
    return [key, today, *whole]


def apply_device_map(
    family: ModelFamily, weights: StateDict, device_map: object, dtype: torch.dtype | None = None
) -> StateDict:
    """Weights where a map puts them, in a type; None leaves them where and as they are."""
    if device_map is None:
        return weights if dtype is None else dispatch_weights(family, weights, None, dtype)
    told = (
        device_map
        if isinstance(device_map, Mapping)
        else {"": _get_single_accelerator() if device_map == "auto" else device_map}
    )
    known = dict.fromkeys(_list_modules(family, weights))
    for name in told:
        if name and name not in known and not PARAMETERLESS_MODULES.fullmatch(name.rpartition(".")[2]):
            raise unknown_name_error("module of device_map", name, known)
    return dispatch_weights(family, weights, {name: check_device(place) for name, place in told.items()}, dtype)


def _list_modules(family: ModelFamily, weights: StateDict) -> Iterator[str]:
    """The names of all weights and of the modules around them; a readout may have none of its own."""
    parts = [family.locate(part).key for part in family.modules]
    names = [f"{key}.weight" for key in parts if "{t}" not in key] + list(weights.keys)
    for key in names:
        for name in list_key_aliases(family, key):
            pieces = name.split(".")
            yield from (".".join(pieces[:k]) for k in range(len(pieces), 0, -1))


def _get_single_accelerator() -> torch.device:
    """The one accelerator of the machine; the CPU, where it has none."""
    found = torch.accelerator.current_accelerator(check_available=True)
    count = torch.accelerator.device_count()
    if found is not None and count > 1:
        wanted = "a device for each module: auto does not choose among several"
        raise BNetError("device_map", expected=wanted, actual=f"{count} devices {found.type}", allowed=DEVICE_MAP_FORMS)
    return torch.device("cpu") if found is None else torch.device(found.type, 0)
