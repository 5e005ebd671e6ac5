"""Whether the modules of a model in memory are those that its config makes.

A net is read from the config and the weights of a model, but activations, scales, the eps of norms and angles are in
its modules, which read the config once, when they are built. So the class of the model builds a second one from the
config, with parameters that take no memory, and the two are compared module by module.
"""

from __future__ import annotations

import contextlib
import copy
import threading
from collections.abc import Iterator
from types import BuiltinFunctionType, FunctionType, MethodType
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.module import register_module_parameter_registration_hook

from bnet_transformer.errors import BNetError, shown

PLAIN = (bool, int, float, str, type(None), FunctionType, BuiltinFunctionType, MethodType)
# Attributes that leave what a model computes in evaluation as it is.
HARMLESS = {"training", "layer_idx", "gradient_checkpointing", "use_cache", "name_or_path", "vocab_size", "num_labels"}
HARMLESS |= {"attn_implementation"}
SIZES = {"in_features", "out_features", "num_embeddings", "embedding_dim"}  # told by the weights, which may be resized
# Settings that modules read of their config in every pass.
IN_FORWARD = ("is_causal", "is_decoder", "add_cross_attention", "sliding_window", "layer_types")
REBUILD = "change the config, then build the model from it"


def check_modules(model: Any) -> None:
    """Refuse a model of `transformers` with a module that its config does not make, or makes with other settings."""
    built = _build(model)
    for name, expected in built.named_modules(remove_duplicate=False):
        actual = _submodule(model, name)
        difference = None if actual is None else _difference(expected, actual)
        if difference is not None:
            wanted, got = difference
            what = f"module {name!r} of {type(model).__name__}"
            raise BNetError(what, expected=f"{wanted}, as its config makes it", got=got, allowed=REBUILD)


def _build(model: Any) -> nn.Module:
    """What the class of a model makes of its config; its buffers hold values, its parameters do not."""
    try:
        config = copy.deepcopy(model.config)
        config._attn_implementation = "eager"  # another may not be there for a model on the CPU
        with _parameters_without_memory(), torch.device("cpu"):
            built: nn.Module = type(model)(config)
    except Exception as error:  # of many kinds, for any class may be asked
        got = f"{type(model).__name__}, which raised {type(error).__name__}: {' '.join(str(error).split())}"
        raise BNetError("source", expected="a model that its class builds from its config", got=shown(got)) from error
    return built


@contextlib.contextmanager
def _parameters_without_memory() -> Iterator[None]:
    """Parameters that this thread registers are on the meta device; random numbers go on as if none was drawn."""
    thread = threading.get_ident()

    def to_meta(_: nn.Module, __: str, parameter: nn.Parameter | None) -> nn.Parameter | None:
        if parameter is None or threading.get_ident() != thread:
            return None
        return nn.Parameter(parameter.to("meta"), requires_grad=parameter.requires_grad)

    state = torch.get_rng_state()
    handle = register_module_parameter_registration_hook(to_meta)  # type: ignore[arg-type]  # its result is used
    try:
        yield
    finally:
        handle.remove()
        torch.set_rng_state(state)


def _submodule(model: Any, name: str) -> nn.Module | None:
    """The module of a name; None where a model does without it, as some do without a pooler."""
    found = model
    for piece in name.split(".") if name else ():
        found = found._modules.get(piece)
        if found is None:
            return None
    return found if isinstance(found, nn.Module) else None


def _difference(expected: nn.Module, actual: nn.Module) -> tuple[str, str] | None:
    """What a module should be and what it is, where it computes something else than expected."""
    if isinstance(expected, nn.Dropout | nn.Identity) and isinstance(actual, nn.Dropout | nn.Identity):
        return None  # all are the identity in evaluation
    if type(expected) is not type(actual):
        return type(expected).__name__, type(actual).__name__
    if isinstance(expected, nn.ModuleList | nn.Sequential) and len(expected) != len(actual):  # type: ignore[arg-type]
        return f"{len(expected)} modules", f"{len(actual)}"  # type: ignore[arg-type]
    pairs = [(name, value, vars(actual).get(name, value)) for name, value in _settings(expected).items()]
    if "config" in vars(expected) and "config" in vars(actual):  # of some stacks it is a copy
        made, own = expected.config, actual.config
        pairs += [(name, getattr(made, name, None), getattr(own, name, None)) for name in IN_FORWARD]
    for name, value, other in pairs:
        if not _are_same(value, other):
            return f"{name}={_text(value)}", f"{name}={_text(other)}"
    for name in expected._non_persistent_buffers_set:
        buffer, held = expected._buffers[name], actual._buffers.get(name)
        if buffer is not None and held is not None and not held.is_meta and not _are_close(buffer, held):
            return f"the {name}", "other numbers"
    return None


def _settings(module: nn.Module) -> dict[str, object]:
    """The plain attributes of a module that say what it computes."""
    harmless = set(HARMLESS)
    if isinstance(module, nn.Linear | nn.Embedding):
        harmless |= SIZES
    if isinstance(module, nn.Embedding) or hasattr(module, "base_model_prefix"):
        harmless.add("padding_idx")  # which stops gradients alone; in embeddings it tells where positions start
    return {
        name: value
        for name, value in vars(module).items()
        if not name.startswith("_") and name not in harmless and "drop" not in name and _is_plain(value)
    }


def _is_plain(value: object) -> bool:
    if isinstance(value, tuple | list):
        return all(_is_plain(each) for each in value)
    return isinstance(value, PLAIN)


def _are_same(one: object, other: object) -> bool:
    """Whether two settings are the same; methods are, where they are of the same function."""
    if isinstance(one, MethodType) and isinstance(other, MethodType):
        return one.__func__ is other.__func__
    return type(one) is type(other) and bool(one == other)


def _are_close(one: Tensor, other: Tensor) -> bool:
    """Whether two buffers hold the same numbers, up to the precision of the second, which may have been cast."""
    kind = other.dtype if other.is_floating_point() else torch.float32
    limits, (a, b) = torch.finfo(kind), (each.detach().cpu().double() for each in (one, other))
    eps = 4 * max(limits.eps, torch.finfo(torch.float32).eps)
    return a.shape == b.shape and torch.allclose(a, b, rtol=eps, atol=limits.tiny)


def _text(value: object) -> str:
    return getattr(value, "__qualname__", None) or shown(repr(value))
