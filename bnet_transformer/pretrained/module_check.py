"""The checks that a net is the model of `transformers` that it is read from: its modules, and its values.

A net is read from the config and the weights of a model. But activations, scales, the eps of norms and rotary angles
are attributes of its modules, which read the config only when they are built. Both may have been changed since then. So
the model's class builds a second model from the config, with parameters on the meta device (without memory), and the
two models are compared module by module (`check_modules`).

This does not check that a family describes the code of its model. So the net and the model compute a few random words,
and their values are compared, node group by node group (`check_values`).
"""

from __future__ import annotations

import contextlib
import copy
import functools
import threading
import warnings
from collections.abc import Collection, Iterator, Mapping, Sequence
from pathlib import Path
from types import BuiltinFunctionType, FunctionType, MethodType
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.module import register_module_parameter_registration_hook
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_map

from bnet_transformer._core.naming import join_name, join_stem
from bnet_transformer.bnet import BNet
from bnet_transformer.errors import BNetError, format_value
from bnet_transformer.pretrained.names import HookPoint, list_hook_points
from bnet_transformer.pretrained.source import ModelSource

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
VALUE_ADVICE = (
    "The family describes other equations than those of the model: compare its declaration with the code of the model, "
    "as in docs/adapters.md"
)
CHECKED_WORDS, LOGITS = 4, "logits"
SEED = 0  # of the words that are compared
# The largest relative difference of a node group. For random models of all families in float32, bfloat16 and float16,
# with weights of 0.02 to 1, rounding is at most 2e-6. A wrong equation changes values by much more.
TOLERANCE = 1e-5
CONVERSIONS = (torch.ops.aten.to, torch.ops.aten._to_copy)


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
    kind, expected = _find_hf_class(type(model)), "a model that its class builds from its config"
    with _wrap_errors("source", expected, prefix=f"{kind.__name__}, which raised "):
        config = copy.deepcopy(model.config)
        config._attn_implementation = "eager"  # other implementations may need a GPU
        with _register_meta_parameters(), torch.device("cpu"):
            built: nn.Module = kind(config)
    return built


@contextlib.contextmanager
def _wrap_errors(subject: str, expected: str, *, prefix: str = "", hint: str | None = None) -> Iterator[None]:
    """Re-raise errors of any type: a class of a model may be from another package, its config from another model."""
    try:
        yield
    except Exception as error:
        actual = format_value(f"{prefix}{type(error).__name__}: {' '.join(str(error).split())}")
        raise BNetError(subject, expected=expected, actual=actual, hint=hint) from error


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
        meta = nn.Parameter(parameter.to("meta"), requires_grad=parameter.requires_grad)
        meta._is_hf_initialized = True  # type: ignore[attr-defined]  # transformers then draws no values for it
        return meta

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
    # a plain embedding may replace an embedding that scales its rows by 1
    is_unscaled = isinstance(expected, nn.Embedding) and getattr(expected, "embed_scale", None) == 1
    if not is_same_type and not (is_unscaled and type(actual) is nn.Embedding):
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


# values


def load_reference(source: ModelSource, net: BNet) -> Any:
    """Load the model of a folder in `transformers`, in the dtype of its net, without a readout if that has none."""
    folder = Path(source.origin)
    if not folder.is_dir():
        raise BNetError("check=True", expected="a folder or a model of transformers in memory", actual=source.origin)
    try:
        import transformers
    except ImportError as error:
        hint = 'Run pip install "bnet-transformer[pretrained]"'
        raise BNetError("check=True requires the package transformers", hint=hint) from error
    has_readout = any(group.role == "y" for group in net.network.graph.groups)
    kind = getattr(transformers, source.architecture or "", None) if has_readout else transformers.AutoModel
    options = {"dtype": net.network.dtype, "attn_implementation": "eager", "local_files_only": True}
    with _wrap_errors("check=True", f"a model that transformers loads from {folder}"), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        model = (kind or transformers.AutoModel).from_pretrained(folder, use_safetensors=True, **options)
    return model


def check_values(net: BNet, model: Any) -> None:
    """Raise an error for a net whose values on some random words are not those of its model of `transformers`.

    Both compute the same words in float32 or a wider type. If the values differ, both compute in float64: the rounding
    that scores without a scale amplify is then still small. The error names the first node group that differs.
    """
    graph, module, sentence = net.network.graph, net._module, _draw_sentence(net, model)
    batch, inputs = net.batch([sentence]), _make_inputs(model, sentence)
    points: dict[str, HookPoint] = {}
    for point in list_hook_points(net):
        name = point.role if point.slice is None else join_name(point.role, (point.slice,))
        if "_".join("*" * len(point.plates)) in point.spans and "read" not in point.dims:
            points.setdefault(name, point)
    readouts = [graph.groups[graph.in_edges[g.index][0].parent].name for g in graph.groups if g.role == "y"]
    dtypes = {net.network.dtype, *(weight.dtype for weight in model.parameters() if weight.is_floating_point())}
    for dtype in (torch.float32, torch.float64):
        with torch.inference_mode(False), torch.no_grad(), contextlib.ExitStack() as modes:
            if any(torch.promote_types(other, dtype) != other for other in dtypes):
                # Below autograd, operations are converted before they check that their inputs have one type.
                modes.enter_context(torch._C._AutoDispatchBelowAutograd())
                modes.enter_context(WiderType(dtype))
            peers = _compute_peers(model, list(points.values()), inputs)
            if LOGITS in peers:  # a model may change the output of its last module
                points |= {name: HookPoint(LOGITS, name) for name in readouts}
            values = module(batch.x, batch.mask, given=batch.given, want=list(points))
        differences = _compute_differences(values, peers, points)
        if all(difference <= TOLERANCE for difference in differences.values()):
            break
    if not differences:
        expected = f"a module of {type(model).__name__} whose values are those of a node group"
        raise BNetError("source", expected=expected, hint="Use check=False to omit this check")
    names = sorted(differences, key=lambda name: graph.by_name[name].index)
    faults = [name for name in names if differences[name] > TOLERANCE]
    if faults:
        largest = max(faults, key=lambda name: differences[name])
        subject, first = f"net of the family {net.declaration.name}", faults[0]
        expected = f"the values of {type(model).__name__} on a few random words, up to {TOLERANCE:.0e} of their norm"
        actual = f"a relative difference of {differences[largest]:.2g} at {largest}"
        actual += f"; the first node group that differs is {first}, by {differences[first]:.2g}"
        raise BNetError(subject, expected=expected, actual=actual, hint=VALUE_ADVICE)


class WiderType(TorchDispatchMode):
    """Compute each operation of a block in at least a floating-point type, whatever type the code requests.

    An operation converts only its own inputs, so that at most one weight of a model has a copy at a time. A table that
    the code computes in a wider type and then rounds, such as sinusoidal positions, is rounded.
    """

    def __init__(self, dtype: torch.dtype) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.dtype = dtype

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        is_conversion = func.overloadpacket in CONVERSIONS
        is_rounding = is_conversion and torch.promote_types(args[0].dtype, self.dtype) != self.dtype
        if not is_rounding and not func._schema.is_mutable:  # a change of a copy would be lost
            args, kwargs = tree_map(self._widen, (args, kwargs))
        return tree_map(self._widen, func(*args, **kwargs))

    def _widen(self, value: Any) -> Any:
        """Return a tensor in at least the type, and a type as at least this type; other values are not changed."""
        if isinstance(value, Tensor):
            return value.to(self._widen(value.dtype))
        is_type = isinstance(value, torch.dtype) and value.is_floating_point
        return torch.promote_types(value, self.dtype) if is_type else value


def _draw_sentence(net: BNet, model: Any) -> Any:
    """Draw the ids of a few words for each stack, or an image."""
    network, generator = net.network, torch.Generator().manual_seed(SEED)
    image = next((spec.tpm.image for spec in network.specs if spec.tpm.image is not None), None)
    if image is not None:
        shape = (image.channels, image.rows, image.columns)
        return torch.randn(shape, generator=generator, device="cpu").to(network.dtype)
    count = min([CHECKED_WORDS, *(spec.tpm.max_words for spec in network.specs if spec.tpm.max_words is not None)])
    ids, padding = {}, getattr(model.config, "pad_token_id", None)
    for stack in network.graph.slices:
        states = network.get_spec(join_stem(stack, "token")).tpm.states
        assert states is not None
        words = torch.randint(states, (count,), generator=generator, device="cpu").tolist()
        ids[stack] = [(k + 1) % states if k == padding else k for k in words]  # a model may mask words of padding
    return ids[""] if list(ids) == [""] else ids


def _compute_peers(model: Any, points: Sequence[HookPoint], inputs: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Compute some inputs with a model in evaluation mode; return the tensors of hook points that it has, by name."""
    tensors: dict[str, Tensor | None] = {}
    modules: dict[str, nn.Module] = {}
    for point in points:
        name = point.tensor.rpartition(".")[0]
        for root in (getattr(model, "base_model", model), model):  # names in a net without a readout have no prefix
            module = _get_submodule(root, name) if name else None
            modules |= {} if module is None else {name: module}

    def record(name: str, _: nn.Module, inputs: tuple[Any, ...], output: Any) -> None:
        values = {f"{name}.output": output, f"{name}.input": inputs[:1]}
        for key, value in values.items():
            value = (value or (None,))[0] if isinstance(value, tuple) else value
            tensors[key] = None if key in tensors else value  # a table of two stacks is called twice

    configs = {id(module.config): module.config for module in model.modules() if "config" in vars(module)}.values()
    expected = f"a forward pass of {type(model).__name__}, which is compared with the net"
    restored = _restore_attributes([*model.modules(), *configs])
    with _wrap_errors("source", expected, hint="Use check=False to omit this check"), restored:
        for name, module in modules.items():
            module.register_forward_hook(functools.partial(record, name))
        for config in configs:
            config.return_dict, config._attn_implementation = True, "eager"  # others may need 16 bits
        model.eval()
        output = model(**inputs, output_hidden_states=True, return_dict=True)
    tensors[LOGITS] = getattr(output, LOGITS, None)
    for kind in ("hidden_states", "encoder_hidden_states", "decoder_hidden_states"):
        states = getattr(output, kind, None)
        tensors |= {f"{kind}[{t}]": state for t, state in enumerate(states or ())}
    return {key: value for key, value in tensors.items() if isinstance(value, Tensor)}


@contextlib.contextmanager
def _restore_attributes(objects: Collection[Any]) -> Iterator[None]:
    """Restore the attributes of modules and configs after a block, and the entries of dictionaries such as hooks.

    `transformers` adds hooks when hidden states are requested, and never removes them.
    """
    tables = [vars(item) for item in objects]
    tables += [value for table in tables for value in table.values() if isinstance(value, dict)]
    saved = [(table, dict(table)) for table in tables]
    try:
        yield
    finally:
        for table, entries in saved:
            for key in table.keys() - entries.keys():
                del table[key]
            table.update(entries)


def _make_inputs(model: Any, sentence: Any) -> dict[str, Tensor]:
    """Return a sentence as the arguments of a model's forward pass."""
    weight = next(model.parameters())
    if isinstance(sentence, Tensor):
        return {"pixel_values": sentence[None].to(weight)}
    keys = {"": "input_ids", "enc": "input_ids", "dec": "decoder_input_ids"}
    stacks = sentence if isinstance(sentence, Mapping) else {"": sentence}
    return {keys[stack]: torch.tensor([ids], device=weight.device) for stack, ids in stacks.items()}


def _compute_differences(
    values: Mapping[str, Tensor], peers: Mapping[str, Tensor], points: Mapping[str, HookPoint]
) -> dict[str, float]:
    """Compute the norm of the difference of each node group from the tensor of its point, relative to its norm."""
    differences = {}
    for name, point in points.items():
        if point.tensor in peers:
            value = values[name].movedim(-2, 1) if point.plates else values[name]  # [batch, *plates, word, width]
            start, _, end = point.spans["_".join("*" * len(point.plates))].partition(":")  # the columns of all heads
            columns = slice(int(start), int(end)) if start else slice(None)
            peer = peers[point.tensor][..., columns].cpu().double().flatten()
            value = value.cpu().double().flatten()
            if value.shape != peer.shape:
                differences[name] = float("inf")
                continue
            value, peer = value[peer.isfinite()], peer[peer.isfinite()]
            difference = (value - peer).norm().nan_to_num(nan=float("inf")).item()
            differences[name] = difference / max(peer.norm().item(), torch.finfo(torch.float64).tiny)
    return differences
