"""The mapping from the keys of a pretrained model's weights to the parameters of a net, and device maps.

No tensor is copied: the parameters are views of the weights. A map of all heads, `[heads * width, dim]`, becomes
`[heads, width, dim]`, and `W_o`, `[dim, heads * width]`, becomes `[heads, dim, width]`. Grouped heads have two dims.
"""

from __future__ import annotations

import functools
import math
import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from types import MappingProxyType

import torch
from torch import Tensor

from bnet_transformer._core.distributed import check_device
from bnet_transformer.declare import Network
from bnet_transformer.errors import BNetError, FileError, unknown_name_error
from bnet_transformer.pretrained.family import READOUT_ONLY_PARTS, ModelFamily, WeightLocation

TABLE = "W_embed"
FLOAT_DTYPES = (torch.float64, torch.float32, torch.float16, torch.bfloat16)
LEGACY_SUFFIXES = {".gamma": ".weight", ".beta": ".bias"}  # names of layer norms in files of 2018
DEVICE_MAP_FORMS = 'a device ("cuda:0"), "auto", or {"": 0}, {"bert.embeddings": "cpu", "bert.encoder.layer.0": 0, ...}'
PARAMETERLESS_MODULES = re.compile(r"\w*drop(out)?|rotary_emb|\w*act(ivation)?(_fn)?|\w*loss_fct")


@dataclass(frozen=True)
class StateDict:
    """The tensors of a model by key, which are read one by one.

    Args:
        origin: The name of the source for error messages.
        keys: The keys.
        get_tensor: A function that returns the tensor of a key.
    """

    origin: str
    keys: tuple[str, ...]
    get_tensor: Callable[[str], Tensor]


@dataclass(frozen=True)
class ParameterMapping:
    """The tensor of the weights that a parameter of a net is a view of, and the view.

    Args:
        name: The name of the parameter.
        parts: The part of each key.
        shape: The shape of the parameter.
        keys: The possible keys of the tensor, in order of precedence.
        location: The layout of the tensor.
        head_axis: The axis of a map that contains the heads: `"in"` (the rows of W_q), `"out"` (the columns of W_o), or
            None.
        kernel_shape: The channels, rows and columns of a convolution, which are the last dim of the parameter.
    """

    name: str
    parts: tuple[str, ...]
    shape: tuple[int, ...]
    keys: tuple[str, ...]
    location: WeightLocation
    head_axis: str | None = None
    kernel_shape: tuple[int, ...] = ()

    @property
    def source_shape(self) -> tuple[int, ...]:
        """The shape of the tensor in the weights, by the inverse of `view`."""
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
        """The shape of the matrix or bias of one head."""
        return self.shape[-2:] if self.name.endswith(".value") else self.shape[-1:]

    @property
    def num_heads(self) -> int:
        """The number of heads, over all groups."""
        return math.prod(self.shape[: len(self.shape) - len(self.head_shape)])

    def view(self, tensor: Tensor) -> Tensor:
        """Return the parameter, `[*shape]`, as a view of the tensor in the weights, `[*source_shape]`."""
        tensor = tensor.reshape(self.source_shape[self.location.leading_dims :])
        tensor = tensor.flatten(-len(self.kernel_shape)) if self.kernel_shape else tensor
        tensor = tensor.mT if self.location.transposed and tensor.dim() == 2 else tensor
        tensor = tensor[self.location.row_offset :]
        chunk, count = self.location.chunk
        if self.location.is_interleaved:  # [head, q k v, width]: GPT-NeoX
            tensor = tensor.reshape(self.num_heads, count, *self.head_shape)[:, chunk]
        elif count > 1:  # [q k v, head, width]: GPT-2
            tensor = tensor.chunk(count)[chunk]
        if self.head_axis == "in":
            tensor = tensor.reshape(self.shape)
        if self.head_axis == "out":
            out, width = self.head_shape
            tensor = tensor.reshape(out, self.num_heads, width).movedim(1, 0).unflatten(0, self.shape[:-2])
        return tensor


def map_parameters(network: Network, family: ModelFamily) -> Iterator[ParameterMapping]:
    """Iterate over the mappings of the parameters of a net; several parameters may be views of one tensor."""
    patches = next((spec.tpm.image for spec in network.specs if spec.tpm.image is not None), None)
    for name, shape in network.shapes.items():
        owner, _, parameter = name.rpartition(".")
        stack, stem, slice_ = parse_owner(network, owner)
        last = "bias" if parameter.startswith("bias") else "weight"
        part, head_axis = _find_part(stem, parameter, gated=f"{owner}.weight_gate" in network.shapes)
        if stem == "x":  # x_t is the output of the norm at the end of slice t - 1, x_0 of the embeddings
            part, slice_ = ("x_0", None) if slice_ == 0 else ("norm2", None if slice_ is None else slice_ - 1)
        parts = _list_table_parts(network, family) if stem == TABLE else [resolve_part(family, stack, part)]
        location = family.locate(parts[0])
        keys = [f"{family.locate(part).key}.{last}" for part in parts]
        if last == "bias":
            keys, location = locate_bias(location)
            parts = [parts[0], *["logits"] * (len(keys) - 1)]
        elif location.is_tensor_key:
            keys = [location.key]
        keys = [key.replace("{t}", str(slice_)) for key in keys]
        kernel: tuple[int, ...] = ()
        if patches is not None and location.is_conv and last == "weight":
            kernel = patches.channels, patches.high, patches.wide
        yield ParameterMapping(name, tuple(parts), shape, tuple(keys), location, head_axis, kernel)


def parse_owner(network: Network, name: str) -> tuple[str, str, int | None]:
    """Return the stack, the role and the slice in the name of a node group."""
    stack = next((s.name for s in network.declaration.stacks if s.name and name.startswith(f"{s.name}_")), "")
    match = re.fullmatch(r"(\w+?)(?:_(\d+))?", name[len(stack) + 1 :] if stack else name)
    assert match is not None
    return stack, match[1], None if match[2] is None else int(match[2])


def _find_part(stem: str, parameter: str, *, gated: bool) -> tuple[str, str | None]:
    """Return the part that contains a parameter of a role, and the axis of its heads."""
    qkv, output = re.fullmatch(r"(?:W_)?((?:cross_)?[qkv])", stem), re.fullmatch(r"W_(cross_)?o", stem)
    if qkv:
        return qkv[1], "in"
    if output:
        return f"{output[1] or ''}mix", "out"
    if stem in ("ffn", "neuron"):  # with neurons as nodes, the parameters of `ffn` are `weight` and `bias`
        side = parameter.rpartition("_")[2] if "_" in parameter else "out"
        return f"ffn_{side}_gated" if gated and side == "in" else f"ffn_{side}", None
    return stem, None


def resolve_part(family: ModelFamily, stack: str, part: str) -> str:
    """Return the name of a part in a family: the part of the stack, or the part of all stacks."""
    plain = {"x_0": "embed"}.get(part, part.removesuffix("_gated"))
    names = [f"{stack}_{part}", part, f"{stack}_{plain}", plain] if stack else [part, plain]
    return next((name for name in names if name in family.modules), plain)


def _list_table_parts(network: Network, family: ModelFamily) -> list[str]:
    """List the parts whose keys may contain the shared table of words."""
    graph = network.graph
    children = [graph.groups[edge.child] for edge in graph.edges if graph.groups[edge.parent].role == TABLE]
    parts = [resolve_part(family, group.stack, "embed" if group.role == "x" else group.role) for group in children]
    stacks = {group.stack for group in children if group.role in ("embed", "x")}
    # The key of a reader comes before the key of all stacks, to which `transformers` ties the others when it loads.
    if "embed" in family.modules and stacks == {s.name for s in network.declaration.stacks}:
        parts.append("embed")
    return list(dict.fromkeys(parts))


def locate_bias(location: WeightLocation) -> tuple[list[str], WeightLocation]:
    """Return the keys of the bias of a part, and its location; a bias is a vector, so it is not transposed."""
    if isinstance(location.bias, WeightLocation):
        return [location.bias.key], location.bias
    keys = [f"{location.key}.bias", *([] if location.bias is None else [location.bias])]
    return keys, replace(location, transposed=False, bias=None, is_tensor_key=False, leading_dims=0, is_conv=False)


def weights_to_parameters(
    network: Network, family: ModelFamily, weights: StateDict, tied_keys: Mapping[str, str] = MappingProxyType({})
) -> tuple[dict[str, Tensor], list[str]]:
    """Map the weights to the parameters of a net, as views; also return the keys that no node uses.

    Args:
        network: The net.
        family: The family of the model.
        weights: The weights.
        tied_keys: For each key that the weights do not contain, the key that is read in its place.

    Raises:
        FileError: If a weight is missing or has a wrong shape or dtype, or if an unused key does not belong to a
            readout.
    """
    index = index_keys(family, weights)
    index |= {key: index[source] for key, source in tied_keys.items()}
    used = set(tied_keys.values())
    parameters = {}
    for mapping in map_parameters(network, family):
        keys = [canonicalize_key(family, key) for key in mapping.keys]
        key = next((index[key] for key in keys if key in index), None)
        if key is None:
            expected = f"a weight {mapping.keys[0]!r} of shape {mapping.source_shape} for {mapping.name}; it is missing"
            is_readout = mapping.parts[0] in READOUT_ONLY_PARTS
            hint = "Use readout=None for only the hidden states" if is_readout else None
            raise FileError(weights.origin, expected=expected, hint=hint)
        tensor = weights.get_tensor(key).detach()
        if tuple(tensor.shape) != mapping.source_shape:
            expected = f"{key} of shape {mapping.source_shape} for {mapping.name}"
            raise FileError(weights.origin, expected=expected, actual=f"shape {tuple(tensor.shape)}")
        if tensor.dtype not in FLOAT_DTYPES:
            expected = f"{key} in one of {', '.join(map(str, FLOAT_DTYPES))}"
            raise FileError(weights.origin, expected=expected, actual=f"{tensor.dtype}")
        parameters[mapping.name] = mapping.view(tensor)
        used.update(keys)
    dtypes = sorted({str(value.dtype) for value in parameters.values()})
    if len(dtypes) > 1:
        expected, hint = "weights of one floating-point dtype", "Use dtype=torch.float32 to convert all of them"
        raise FileError(weights.origin, expected=expected, actual=", ".join(dtypes), hint=hint)
    return parameters, _check_unused_keys(family, weights, index, used)


def _check_unused_keys(family: ModelFamily, weights: StateDict, index: Mapping[str, str], used: set[str]) -> list[str]:
    """Return the keys that no node uses; raise an error for keys in the slices or in a module that is read.

    Such a weight would change what the model computes, so the weights belong to another family.
    """
    buffers = "|".join(re.escape(buffer).replace(r"\{t\}", r"\d+") for buffer in family.buffers)
    unused = {n: key for n, key in index.items() if n not in used and not (buffers and re.fullmatch(buffers, n))}
    parts = [part for part in ("embed", "position", "q", "ffn_in", "enc_q", "dec_q") if part in family.modules]
    roots = {family.locate(part).key.split(".")[0] for part in parts}
    modules = {name.rpartition(".")[0] for name in used if name.endswith((".weight", ".bias"))}
    refused = [key for n, key in unused.items() if n.split(".")[0] in roots or n.rpartition(".")[0] in modules]
    if refused:
        expected = f"the weights of a {family.name}, without other weights in its slices or in modules that are read"
        raise FileError(weights.origin, expected=expected, actual=", ".join(sorted(refused)[:6]))
    return sorted(unused.values())


def has_readout_weights(family: ModelFamily, weights: StateDict) -> bool:
    """Return True if the weights contain those of a readout."""
    modules = _list_readout_modules(family)
    return any(is_in_module(canonicalize_key(family, key), module) for key in weights.keys for module in modules)


def _list_readout_modules(family: ModelFamily) -> list[str]:
    """List the keys of the modules that a model without a readout does not have."""
    return [family.locate(part).key for part in READOUT_ONLY_PARTS if part in family.modules]


def is_in_module(key: str, module: str) -> bool:
    """Return True if a key is the key of a module or of a part of it."""
    return key == module or key.startswith(f"{module}.")


def are_tensors_equal(family: ModelFamily, weights: StateDict, *keys: str | None) -> bool:
    """Return True if the tensors of two keys are equal, or the weights do not contain one of them."""
    present = index_keys(family, weights)
    if keys[0] == keys[1] or not all(key in present for key in keys):
        return True
    a, b = (weights.get_tensor(present[key]) for key in keys if key is not None)
    is_same = a.data_ptr() == b.data_ptr() and a.stride() == b.stride()  # the same tensor: its values are equal
    return a.shape == b.shape and (is_same or torch.equal(a, b.to(a.device)))


def index_keys(family: ModelFamily, weights: StateDict) -> dict[str, str]:
    """Return the keys of weights by canonical key."""
    return {canonicalize_key(family, key): key for key in weights.keys}


def canonicalize_key(family: ModelFamily, key: str) -> str:
    """Return a key without the prefix of the family and without legacy names."""
    for suffix, replacement in LEGACY_SUFFIXES.items():
        if key.endswith(suffix):
            key = key[: -len(suffix)] + replacement
    key = key.removeprefix(family.prefix)
    for pattern, replacement in family.key_mapping.items():
        key = re.sub(pattern, replacement, key)
    return key


# devices and dtypes


def dispatch_weights(
    family: ModelFamily,
    weights: StateDict,
    devices: Mapping[str, torch.device] | None,
    dtype: torch.dtype | None = None,
) -> StateDict:
    """Move the weights to the devices of a map, in a dtype, each when it is first read.

    Tensors are moved one by one, so the host never holds the whole model. A tensor of several parameters (q, k, v) is
    moved once.

    Args:
        family: The family.
        weights: The weights.
        devices: The device of each module by name; the longest name that contains a key applies. None moves no weight.
        dtype: The dtype; None for the dtype of the weights.
    """

    @functools.cache
    def get_tensor(key: str) -> Tensor:
        tensor = weights.get_tensor(key)
        device = tensor.device if devices is None else _find_key_device(family, key, devices)
        try:
            return tensor.to(device, dtype or tensor.dtype)
        except torch.OutOfMemoryError as error:
            expected, actual = f"enough memory on {device}", f"{key} ({tensor.nbytes:,} bytes), which does not fit"
            raise BNetError("device_map", expected=expected, actual=actual, allowed=DEVICE_MAP_FORMS) from error

    return StateDict(weights.origin, weights.keys, get_tensor)


def _find_key_device(family: ModelFamily, key: str, devices: Mapping[str, torch.device]) -> torch.device:
    """Return the device of the longest module name that contains a key, without the prefix of the family."""
    aliases = list_key_aliases(family, key)
    names = [name for name in devices if not name or any(is_in_module(alias, name) for alias in aliases)]
    if not names:
        expected = f"a device for every weight; it is missing for {key}"
        raise BNetError("device_map", expected=expected, allowed=DEVICE_MAP_FORMS)
    return devices[max(names, key=lambda name: len(f"{name}.".removeprefix(family.prefix)) if name else -1)]


def list_key_aliases(family: ModelFamily, key: str) -> list[str]:
    """Return a key as in the file, without the prefix of the family, and with it unless it belongs to a readout."""
    canonical = canonicalize_key(family, key)
    is_readout = any(is_in_module(canonical, module) for module in _list_readout_modules(family))
    return [key, canonical, *([] if is_readout else [f"{family.prefix}{canonical}"])]


def promote_weight_dtypes(weights: StateDict) -> torch.dtype:
    """Return the floating-point dtype to which all weights can be converted exactly."""
    dtypes = {weights.get_tensor(key).dtype for key in weights.keys}
    return functools.reduce(torch.promote_types, (dtype for dtype in dtypes if dtype.is_floating_point))


def apply_device_map(
    family: ModelFamily, weights: StateDict, device_map: object, dtype: torch.dtype | None = None
) -> StateDict:
    """Move the weights to the devices of a map, in a dtype; None leaves them unchanged.

    Args:
        family: The family.
        weights: The weights.
        device_map: A device, `"auto"`, or a mapping from modules to devices, as in `transformers`.
        dtype: The floating-point dtype.

    Raises:
        UnknownNameError: If the map contains a module that the model does not have.
    """
    if device_map is None:
        return weights if dtype is None else dispatch_weights(family, weights, None, dtype)
    device = _get_single_accelerator() if isinstance(device_map, str) and device_map == "auto" else device_map
    devices = device_map if isinstance(device_map, Mapping) else {"": device}
    known = dict.fromkeys(_list_modules(family, weights))
    for name in devices:
        if name and name not in known and not PARAMETERLESS_MODULES.fullmatch(name.rpartition(".")[2]):
            raise unknown_name_error("module of device_map", name, known)
    return dispatch_weights(family, weights, {name: check_device(device) for name, device in devices.items()}, dtype)


def _list_modules(family: ModelFamily, weights: StateDict) -> Iterator[str]:
    """Iterate over the names of all weights, also of a tied readout, and of the modules that contain them."""
    parts = [family.locate(part).key for part in family.modules]
    names = [f"{key}.weight" for key in parts if "{t}" not in key] + list(weights.keys)
    for key in names:
        for name in list_key_aliases(family, key):
            pieces = name.split(".")
            yield from (".".join(pieces[:k]) for k in range(len(pieces), 0, -1))


def _get_single_accelerator() -> torch.device:
    """Return the accelerator of the machine, or the CPU without one; raise an error if there are several."""
    device = torch.accelerator.current_accelerator(check_available=True)
    count = torch.accelerator.device_count()
    if device is not None and count > 1:
        expected = "a device for each module, because 'auto' does not choose among several devices"
        actual = f"{count} {device.type} devices"
        raise BNetError("device_map", expected=expected, actual=actual, allowed=DEVICE_MAP_FORMS)
    return torch.device("cpu") if device is None else torch.device(device.type, 0)
