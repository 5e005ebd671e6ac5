"""Whether the modules of a model in memory are those that its config makes.

A net is read from the config and the weights of a model, but activations, scales, the eps of norms and angles are in
its modules, which read the config once, when they are built. So the model's class of `transformers` builds a second
model from the config, with parameters that take no memory, and the two are compared module by module.
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

from bnet_transformer.errors import BNetError, format_value

PLAIN_TYPES = (bool, int, float, str, type(None), FunctionType, BuiltinFunctionType, MethodType)
# Attributes that leave what a model computes in evaluation as it is; the last three serve rotary positions whose angles
# depend on the length of a sentence, which no family reads.
IGNORED_ATTRIBUTES = {"training", "layer_idx", "gradient_checkpointing", "use_cache", "name_or_path", "vocab_size"}
IGNORED_ATTRIBUTES |= {"num_labels", "attn_implementation", "loss_type", "chunk_size_feed_forward"}
IGNORED_ATTRIBUTES |= {"max_seq_len_cached", "original_max_seq_len", "original_inv_freq"}
SIZE_ATTRIBUTES = {
    "in_features",
    "out_features",
    "num_embeddings",
    "embedding_dim",
}  # those of the weights, which may be resized
# Settings that modules read of their config in every pass.
FORWARD_SETTINGS = ("is_causal", "is_decoder", "add_cross_attention", "sliding_window", "layer_types")
REBUILD_ADVICE = (
    "change the config, build the model from it (not quantised, without adapters), load the weights into that"
)
# Casting a model rounds its buffers for good; casting back does not restore them.
CAST_ADVICE = (
    "load it with {name}.from_pretrained(folder, dtype=...), which keeps buffers in float32, or leave the model in "
    "float32 and pass dtype= to bt.from_pretrained; if its config was changed, build the model from it"
)


def check_modules(model: Any) -> None:
    """Refuse a model of `transformers` with a module that its config does not make, or makes with other settings."""
    built = _build_from_config(model)
    for name, expected in built.named_modules(remove_duplicate=False):
        actual = _get_submodule(model, name)
        if actual is None:
            continue
        what = f"module {name!r} of {type(model).__name__}"
        difference = _find_difference(expected, actual, is_root=not name)
        if difference is not None:
            wanted, got = difference
            raise BNetError(what, expected=f"{wanted}, as its config makes it", actual=got, allowed=REBUILD_ADVICE)
        buffer = _find_changed_buffer(expected, actual)
        if buffer is not None:
            cast = expected.get_buffer(buffer).is_floating_point()
            allowed = CAST_ADVICE.format(name=type(model).__name__) if cast else REBUILD_ADVICE
            raise BNetError(what, expected=f"{buffer}, as its config makes it", actual="other numbers", allowed=allowed)


def _build_from_config(model: Any) -> nn.Module:
    """The model that `transformers` builds from a config; its buffers hold values, its parameters do not."""
    kind = _find_hf_class(type(model))
    try:
        config = copy.deepcopy(model.config)
        config._attn_implementation = "eager"  # another may not be there for a model on the CPU
        with _register_meta_parameters(), torch.device("cpu"):
            built: nn.Module = kind(config)
    except Exception as error:  # of many kinds, for any class may be asked
        got = f"{kind.__name__}, which raised {type(error).__name__}: {' '.join(str(error).split())}"
        raise BNetError(
            "source", expected="a model that its class builds from its config", actual=format_value(got)
        ) from error
    return built


def _find_hf_class(model_class: type) -> type:
    """The nearest class of `transformers` that is a whole model, for a subclass may take other arguments.

    It is the class itself where there is none.
    """
    for each in model_class.__mro__:
        whole = getattr(each, "forward", None) is not nn.Module.forward  # a PreTrainedModel has no forward of its own
        if each.__module__.startswith("transformers.models.") and whole:
            return each
    return model_class


@contextlib.contextmanager
def _register_meta_parameters() -> Iterator[None]:
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


def _get_submodule(model: Any, name: str) -> nn.Module | None:
    """The module of a name; None where a model does without it, as some do without a pooler."""
    try:
        found: nn.Module = model.get_submodule(name)
    except AttributeError:
        return None
    return found


def _find_difference(expected: nn.Module, actual: nn.Module, *, is_root: bool) -> tuple[str, str] | None:
    """What a module should be and what it is, where it computes something else than expected.

    The `is_root` model may be of a subclass.
    """
    if isinstance(expected, nn.Dropout | nn.Identity) and isinstance(actual, nn.Dropout | nn.Identity):
        return None  # all are the identity in evaluation
    same = isinstance(actual, type(expected)) if is_root else type(expected) is type(actual)
    if not same and not _is_unscaled_embedding(expected, actual):
        wanted, got = (f"{kind.__module__}.{kind.__qualname__}" for kind in (type(expected), type(actual)))
        return wanted, got
    if isinstance(expected, nn.ModuleList | nn.Sequential) and len(expected) != len(actual):  # type: ignore[arg-type]
        return f"{len(expected)} modules", f"{len(actual)}"  # type: ignore[arg-type]
    pairs = [(name, value, vars(actual).get(name, value)) for name, value in _get_settings(expected).items()]
    if "config" in vars(expected) and "config" in vars(actual):  # of some stacks it is a copy
        made, own = expected.config, actual.config
        pairs += [(name, getattr(made, name, None), getattr(own, name, None)) for name in FORWARD_SETTINGS]
    for name, value, other in pairs:
        if not _are_settings_equal(value, other):
            return f"{name}={_format_setting(value)}", f"{name}={_format_setting(other)}"
    return None


def _is_unscaled_embedding(expected: nn.Module, actual: nn.Module) -> bool:
    """Whether a plain table stands in place of one that scales its rows by 1."""
    scale = getattr(expected, "embed_scale", None)
    return type(actual) is nn.Embedding and isinstance(expected, nn.Embedding) and scale == 1


def _find_changed_buffer(expected: nn.Module, actual: nn.Module) -> str | None:
    """The name of a buffer that is not saved and whose numbers are not those expected."""
    for name in sorted(expected._non_persistent_buffers_set - IGNORED_ATTRIBUTES):
        one, other = expected._buffers[name], actual._buffers.get(name)
        if one is not None and other is not None and not other.is_meta and not _are_buffers_close(one, other):
            return name
    return None


def _get_settings(module: nn.Module) -> dict[str, object]:
    """The plain attributes of a module that say what it computes."""
    ignored = set(IGNORED_ATTRIBUTES)
    if isinstance(module, nn.Linear | nn.Embedding):
        ignored |= SIZE_ATTRIBUTES
    if isinstance(module, nn.Embedding) or hasattr(module, "base_model_prefix"):
        ignored.add("padding_idx")  # which stops gradients alone; in embeddings it tells where positions start
    return {
        name: value
        for name, value in vars(module).items()
        if not name.startswith("_") and name not in ignored and "drop" not in name and _is_plain(value)
    }


def _is_plain(value: object) -> bool:
    if isinstance(value, tuple | list):
        return all(_is_plain(each) for each in value)
    return isinstance(value, PLAIN_TYPES)


def _are_settings_equal(expected: object, actual: object) -> bool:
    """Whether two settings are the same; methods are, where they are of the same function."""
    if isinstance(expected, MethodType) and isinstance(actual, MethodType):
        return expected.__func__ is actual.__func__
    return type(expected) is type(actual) and bool(expected == actual)


def _are_buffers_close(expected: Tensor, actual: Tensor) -> bool:
    """Whether two buffers hold the same numbers, up to rounding in float32.

    A buffer that was cast to a type of less precision is not close: a model computes with its rounded numbers, and the
    angles of rotary positions multiply the error by the position.
    """
    a, b = (each.detach().cpu().double() for each in (expected, actual))
    limits = torch.finfo(torch.float32)
    return a.shape == b.shape and torch.allclose(a, b, rtol=4 * limits.eps, atol=limits.tiny)


def _format_setting(value: object) -> str:
    return getattr(value, "__qualname__", None) or format_value(repr(value))
