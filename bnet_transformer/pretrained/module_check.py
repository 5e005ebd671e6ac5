"""The check that the modules of a model in memory are those that its config builds.

A net is read from the config and the weights of a model. But activations, scales, the eps of norms and rotary angles
are attributes of its modules, which read the config only when they are built. Both may have been changed since then. So
the model's class builds a second model from the config, with parameters on the meta device (without memory), and the
two models are compared module by module.
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
# Attributes that do not change the outputs in evaluation mode. The last three are for rotary positions whose angles
# depend on the length of a sentence, which no family supports.
IGNORED_ATTRIBUTES = {"training", "layer_idx", "gradient_checkpointing", "use_cache", "name_or_path", "vocab_size"}
IGNORED_ATTRIBUTES |= {"num_labels", "attn_implementation", "loss_type", "chunk_size_feed_forward"}
IGNORED_ATTRIBUTES |= {"max_seq_len_cached", "original_max_seq_len", "original_inv_freq"}
# Sizes of weights, which may be resized. The weights themselves are checked when they are read.
SIZE_ATTRIBUTES = {"in_features", "out_features", "num_embeddings", "embedding_dim"}
# Settings that modules read from their config in every forward pass.
FORWARD_SETTINGS = ("is_causal", "is_decoder", "add_cross_attention", "sliding_window", "layer_types")
REBUILD_ADVICE = (
    "Change the config, build the model from it (not quantised, without adapters), and load the weights into this model"
)
# Casting a model rounds its buffers permanently; casting back does not restore them.
CAST_ADVICE = (
    "Load it with {name}.from_pretrained(folder, dtype=...), which keeps buffers in float32, or leave the model in "
    "float32 and pass dtype= to bt.from_pretrained; if its config was changed, build the model from it"
)


def check_modules(model: Any) -> None:
    """Raise an error for a model of `transformers` with a module other than the module that its config builds."""
    built = _build_from_config(model)
    for name, expected in built.named_modules(remove_duplicate=False):
        actual = _get_submodule(model, name)
        if actual is None:
            continue
        subject = f"module {name!r} of {type(model).__name__}"
        difference = _find_difference(expected, actual, is_root=not name)
        if difference is not None:
            wording = f"{difference[0]}, as its config builds it"
            raise BNetError(subject, expected=wording, actual=difference[1], hint=REBUILD_ADVICE)
        buffer = _find_changed_buffer(expected, actual)
        if buffer is not None:
            is_float = expected.get_buffer(buffer).is_floating_point()
            hint = CAST_ADVICE.format(name=type(model).__name__) if is_float else REBUILD_ADVICE
            wording = f"{buffer}, as its config builds it"
            raise BNetError(subject, expected=wording, actual="other values", hint=hint)


def _build_from_config(model: Any) -> nn.Module:
    """Build the model of the config of a model with `transformers`, with its parameters on the meta device."""
    kind = _find_hf_class(type(model))
    try:
        config = copy.deepcopy(model.config)
        config._attn_implementation = "eager"  # other implementations may need a GPU
        with _register_meta_parameters(), torch.device("cpu"):
            built: nn.Module = kind(config)
    except Exception as error:  # of any type: the class may be from another package
        expected = "a model that its class builds from its config"
        actual = f"{kind.__name__}, which raised {type(error).__name__}: {' '.join(str(error).split())}"
        raise BNetError("source", expected=expected, actual=format_value(actual)) from error
    return built


def _find_hf_class(model_class: type) -> type:
    """Find the first model class of `transformers` in the MRO, because a subclass may take other arguments.

    If there is none, the class itself is returned.
    """
    for base in model_class.__mro__:
        has_forward = getattr(base, "forward", None) is not nn.Module.forward  # PreTrainedModel itself has no forward
        if base.__module__.startswith("transformers.models.") and has_forward:
            return base
    return model_class


@contextlib.contextmanager
def _register_meta_parameters() -> Iterator[None]:
    """Register parameters of this thread on the meta device in a block; restore the random state after it."""
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
    """Return the module of a name; None if a model does not have it, as some have no pooler."""
    try:
        module: nn.Module = model.get_submodule(name)
    except AttributeError:
        return None
    return module


def _find_difference(expected: nn.Module, actual: nn.Module, *, is_root: bool) -> tuple[str, str] | None:
    """Find the first difference that changes the outputs of a module, as `(expected, actual)`; None if there is none.

    The root (`is_root`) may be an instance of a subclass.
    """
    if isinstance(expected, nn.Dropout | nn.Identity) and isinstance(actual, nn.Dropout | nn.Identity):
        return None  # all of them are the identity in evaluation mode
    is_same_type = isinstance(actual, type(expected)) if is_root else type(expected) is type(actual)
    if not is_same_type and not _is_unscaled_embedding(expected, actual):
        kinds = [f"{kind.__module__}.{kind.__qualname__}" for kind in (type(expected), type(actual))]
        return kinds[0], kinds[1]
    if isinstance(expected, nn.ModuleList | nn.Sequential) and len(expected) != len(actual):  # type: ignore[arg-type]
        return f"{len(expected)} modules", f"{len(actual)}"  # type: ignore[arg-type]
    pairs = [(name, value, vars(actual).get(name, value)) for name, value in _get_settings(expected).items()]
    if "config" in vars(expected) and "config" in vars(actual):  # some stacks have a copy of the config
        a, b = expected.config, actual.config
        pairs += [(name, getattr(a, name, None), getattr(b, name, None)) for name in FORWARD_SETTINGS]
    for name, value, other in pairs:
        if not _are_settings_equal(value, other):
            return f"{name}={_format_setting(value)}", f"{name}={_format_setting(other)}"
    return None


def _is_unscaled_embedding(expected: nn.Module, actual: nn.Module) -> bool:
    """Return True if a plain embedding replaces an embedding that scales its rows by 1."""
    scale = getattr(expected, "embed_scale", None)
    return type(actual) is nn.Embedding and isinstance(expected, nn.Embedding) and scale == 1


def _find_changed_buffer(expected: nn.Module, actual: nn.Module) -> str | None:
    """Find a buffer that is not part of the weights and whose values differ from the expected ones."""
    for name in sorted(expected._non_persistent_buffers_set - IGNORED_ATTRIBUTES):
        a, b = expected._buffers[name], actual._buffers.get(name)
        if a is not None and b is not None and not b.is_meta and not _are_buffers_close(a, b):
            return name
    return None


def _get_settings(module: nn.Module) -> dict[str, object]:
    """Return the attributes of a module that may change its outputs: numbers, strings and functions."""
    ignored = set(IGNORED_ATTRIBUTES)
    if isinstance(module, nn.Linear | nn.Embedding):
        ignored |= SIZE_ATTRIBUTES
    if isinstance(module, nn.Embedding) or hasattr(module, "base_model_prefix"):
        ignored.add("padding_idx")  # it only masks gradients (in other modules it sets the first position)
    return {
        name: value
        for name, value in vars(module).items()
        if not name.startswith("_") and name not in ignored and "drop" not in name and _is_plain(value)
    }


def _is_plain(value: object) -> bool:
    """Return True if a value has a type that is compared, or is a list of such values."""
    if isinstance(value, tuple | list):
        return all(_is_plain(item) for item in value)
    return isinstance(value, PLAIN_TYPES)


def _are_settings_equal(expected: object, actual: object) -> bool:
    """Return True if two settings are equal; bound methods are equal if their functions are."""
    if isinstance(expected, MethodType) and isinstance(actual, MethodType):
        return expected.__func__ is actual.__func__
    return type(expected) is type(actual) and bool(expected == actual)


def _are_buffers_close(expected: Tensor, actual: Tensor) -> bool:
    """Return True if two buffers are equal up to rounding in float32.

    A buffer that was cast to lower precision is not equal. The model computes with the rounded values, and for rotary
    angles the error of a frequency is multiplied by the position.
    """
    a, b = (buffer.detach().cpu().double() for buffer in (expected, actual))
    limits = torch.finfo(torch.float32)
    return a.shape == b.shape and torch.allclose(a, b, rtol=4 * limits.eps, atol=limits.tiny)


def _format_setting(value: object) -> str:
    """Return the name of a function, or the value of a setting."""
    return getattr(value, "__qualname__", None) or format_value(repr(value))
