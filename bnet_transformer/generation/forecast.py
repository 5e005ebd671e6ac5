"""`iterate`: autoregressive forecasts of a net with real-valued words; `windows`: training data from a series."""

from __future__ import annotations

import math
from collections.abc import Mapping
from contextlib import nullcontext
from dataclasses import dataclass

import torch
from torch import Tensor

from bnet_transformer._core.checks import check_choice, check_int, check_seed
from bnet_transformer._core.process import check_memory, translate_memory_errors
from bnet_transformer._core.tensors import fork_torch_rng, seed_rngs
from bnet_transformer.compiler import CompiledModule
from bnet_transformer.compiler.gather import batch_to_request, gather_parents
from bnet_transformer.compiler.module import find_default_output
from bnet_transformer.data import Batch
from bnet_transformer.data.batch import Task, check_has_words, find_noncausal_arrow, infer_task
from bnet_transformer.data.encode import split_by_stack, to_reals
from bnet_transformer.declare import Network, NodeSpec, as_network
from bnet_transformer.errors import BNetError

Values = Mapping[str, Tensor]


@translate_memory_errors("iterate")
def iterate(
    network: Network,
    window: object,
    steps: int,
    *,
    ahead: int | None = None,
    grow: bool | None = None,
    sample: bool = False,
    seed: int = 0,
    module: CompiledModule | None = None,
) -> Tensor:
    """Forecast the next `steps` words after a window of real-valued words.

    The output of each word predicts the word `ahead` positions later. The last `ahead` outputs are therefore new words,
    and the net reads them in the next pass.

    Args:
        network: A net with one real-valued readout or hidden state.
        window: The first words, `[..., word, dim]`; leading dims are a batch. A net with two stacks reads the window in
            one stack and continues in the other, from the last word of the window. A mapping from stack to words
            gives the words of both stacks.
        steps: The number of new words.
        ahead: The number of positions between a word and the word that it predicts. By default 1 for a causal net, and
            otherwise the number of words of the window.
        grow: True reads all words from the first one. False reads as many of the last words as the window has. By
            default only a net with two stacks in which no word depends on a later one grows.
        sample: True samples from a Normal readout, False uses its mean.
        seed: The seed of the samples.
        module: A compiled module of this net in evaluation mode, to reuse it; None compiles the net.

    Returns:
        The new words, `[..., steps, dim]`.

    Raises:
        BNetError: If an option is out of range, or the net cannot forecast words.

    >>> import torch
    >>> import bnet_transformer as bt
    >>> net = bt.volume_preserving(dim=3, slices=1)
    >>> net.iterate(torch.zeros(4, 3), steps=5).shape           # a window of 4 words, and 5 further ones
    torch.Size([5, 3])
    """
    network = as_network(network)
    check_choice("sample", sample, (True, False))
    check_seed(seed)
    if seed and not sample:
        raise BNetError("seed", expected="0, because it is used only with sample=True", actual=seed)
    is_usable = isinstance(module, CompiledModule) and module.network is network and not module.training
    if module is not None and not is_usable:
        expected = "None, or net.module().eval() of the same net"
        raise BNetError("module", expected=expected, actual=type(module).__name__)
    steps, output = check_int("steps", steps), find_forecast_output(network)
    if sample and output.spec.tpm.kind != "continuous":
        actual = f"{output.spec.group.name}, which has no distribution"
        raise BNetError("sample", expected="a net with a Normal readout", actual=actual, hint="Use sample=False")
    x, dims = _read_window(output, window)
    num_read, size = x[output.stack].shape[1], math.prod((*dims, steps, *output.spec.shape))
    # Factor 2: the forecast, and the check that it is finite.
    check_memory("steps", 2 * size * x[output.stack].element_size(), "fewer steps=")
    ahead, grow = output.resolve_ahead(num_read, ahead), output.should_grow(grow)
    longest = num_read + ahead * ((steps - 1) // ahead) if grow else num_read
    output.task.encoders[output.stack].check_length(longest)
    module, predict = module or CompiledModule(network).eval(), _sample_words if sample else _predict_mean
    words = x[output.stack]
    forecast = words.new_empty(len(words), steps, *output.spec.shape)
    with torch.no_grad(), fork_torch_rng(words.device) if sample else nullcontext():
        if sample:
            seed_rngs(seed, words.device)
        for step in range(0, steps, ahead):
            new_words = predict(module, output, {**x, output.stack: words})[:, -ahead:]
            forecast[:, step : step + ahead] = new_words[:, : steps - step]
            words = torch.cat([words, new_words], 1)
            words = words if grow else words[:, -num_read:]
        _check_finite(forecast)
    return forecast.reshape(*dims, steps, *output.spec.shape)


def windows(series: object, words: int, ahead: int) -> tuple[Tensor, Tensor]:
    """Return all windows of a series, and the same windows `ahead` positions later.

    The pair is training data for `train`. `iterate` with the same `ahead` then continues the series. The default
    `ahead` of `iterate` is 1 for a causal net, and otherwise `words`.

    Args:
        series: The series, `[..., word, dim]`; leading dims are several series.
        words: The number of words of a window.
        ahead: The number of positions between a word and its target.

    Returns:
        The windows and their targets, both `[window, word, dim]`.

    Raises:
        BNetError: If the series has fewer than `words + ahead` words.

    >>> x, y = windows([[0.0], [1.0], [2.0], [3.0]], words=2, ahead=1)
    >>> x.tolist(), y.tolist()
    ([[[0.0], [1.0]], [[1.0], [2.0]]], [[[1.0], [2.0]], [[2.0], [3.0]]])
    """
    values = to_reals("series", series)
    words, ahead = check_int("words", words), check_int("ahead", ahead)
    if values.dim() < 2 or values.shape[-2] < words + ahead:
        expected = f"shape [..., word, dim] with at least {words + ahead} words: words={words} plus ahead={ahead}"
        raise BNetError("series", expected=expected, actual=f"shape {tuple(values.shape)}")
    cut = values.unfold(-2, words, 1).movedim(-1, -2)  # [..., window, word, dim]
    count = values.shape[-2] - words - ahead + 1
    x, y = cut[..., :count, :, :], cut[..., ahead : ahead + count, :, :]
    return x.reshape(-1, *x.shape[-2:]), y.reshape(-1, *y.shape[-2:])


@dataclass(frozen=True)
class ForecastOutput:
    """The output of a net that predicts words.

    `spec` is the node, and `stack` the stack that it continues. `later_arrow` is an arrow by which a word depends on
    a later word; it is None for a causal net.
    """

    task: Task
    spec: NodeSpec
    stack: str
    later_arrow: str | None

    def resolve_ahead(self, num_read: int, requested: int | None) -> int:
        """Return the number of positions between a word and the word that it predicts, for `num_read` input words."""
        pooled, name = self.spec.group.word_stack is None, self.spec.group.name
        if requested is None:
            return 1 if pooled or self.later_arrow is None else num_read
        if check_int("ahead", requested) > (1 if pooled else num_read):
            expected = f"at most {num_read}, the number of words of the window"
            expected = f"1, because {name} has one value for all words" if pooled else expected
            raise BNetError("ahead", expected=expected, actual=requested)
        return requested

    def should_grow(self, requested: bool | None) -> bool:
        """Return True if all words from the first one are read, and not only as many as the window has."""
        check_choice("grow", requested, (True, False, None))
        if requested and self.later_arrow is not None and self.spec.group.word_stack is not None:
            expected = "a net in which no word depends on a later word"
            raise BNetError("grow", expected=expected, actual=self.later_arrow, hint="Use grow=False")
        return len(self.task.stacks) > 1 and self.later_arrow is None if requested is None else requested


def find_forecast_output(network: Network) -> ForecastOutput:
    """Find the output that predicts words; raise an error that names the reason if there is none."""
    network.check_single_dtype()
    check_has_words(network, "iterate")
    task = infer_task(network)
    names = [readout.group.name for readout in task.readouts] or [find_default_output(network)]
    spec = network.get_spec(names[0])
    group, name = spec.group, spec.group.name
    stack = group.word_stack
    if stack is None:
        stack = group.stack if len(task.stacks) > 1 else task.stacks[0]
    if len(names) > 1 or group.plates or spec.tpm.kind == "discrete" or stack not in task.encoders:
        expected = "a net with one real-valued readout or hidden state that predicts a word"
        actual = ", ".join(f"{name} ({type(network.get_spec(name).tpm).__name__})" for name in names)
        hint = "Use generate for words of a vocabulary"
        raise BNetError("iterate", expected=expected, actual=actual, hint=hint)
    needed = network.ancestral_specs(spec)
    _check_inputs(task, needed)
    if spec.shape != task.encoders[stack].spec.shape:
        expected = f"an output of shape {task.encoders[stack].spec.shape}, the shape of the words"
        raise BNetError("iterate", expected=expected, actual=f"{name} of shape {spec.shape}")
    if task.encoders[stack].spec not in needed:
        raise BNetError("iterate", expected="an output that depends on the words", actual=name)
    return ForecastOutput(task, spec, stack, find_noncausal_arrow(network, spec, stack))


def _check_inputs(task: Task, specs: list[NodeSpec]) -> None:
    """Raise an error for inputs and choices that have no value at new words."""
    word_inputs = {encoder.spec.group.index for encoder in task.encoders.values()}
    for spec in specs:
        name, tpm = spec.group.name, spec.tpm
        if tpm.kind == "input":
            if tpm.default is None and tpm.states is not None:
                actual = f"{name}, which has {tpm.states} states"
                raise BNetError("iterate", expected="words that are vectors", actual=actual, hint="Use generate")
            if tpm.default is None and spec.group.index not in word_inputs:
                raise BNetError("iterate", expected="a net with no given nodes other than the words", actual=name)
        elif tpm.is_random and spec is not specs[-1]:
            expected = "a net in which the forecast does not depend on latent choices"
            raise BNetError("iterate", expected=expected, actual=name, hint="Use a net with combine='concat'")


def _read_window(output: ForecastOutput, window: object) -> tuple[dict[str, Tensor], tuple[int, ...]]:
    """Return the words of every stack as `[batch, word, dim]`, and the leading dims of the batch."""
    task, stack = output.task, output.stack
    other_stacks = [name for name in task.stacks if name != stack]
    given = split_by_stack("window", window, task.stacks, stack)
    for name in other_stacks:
        if name not in given:
            raise BNetError("window", expected=f"words of stack {name!r}; it is missing")
    vectors = {name: _to_vectors(output, name, value) for name, value in given.items()}
    if stack not in vectors:
        vectors[stack] = _get_start_word(output, vectors[other_stacks[0]])
    ranks = {name: 1 + len(task.encoders[name].spec.shape) for name in vectors}
    dims_by_stack = {name: tuple(value.shape[: -ranks[name]]) for name, value in vectors.items()}
    dims = dims_by_stack[stack]
    if any(other_dims != dims for other_dims in dims_by_stack.values()):
        raise BNetError("window", expected="the same leading dims in every stack", actual=dims_by_stack)
    for name in other_stacks:
        task.encoders[name].check_length(vectors[name].shape[len(dims)])
    return {name: value.reshape(-1, *value.shape[len(dims) :]) for name, value in vectors.items()}, dims


def _to_vectors(output: ForecastOutput, stack: str, window: object) -> Tensor:
    """Convert a window to a tensor with the dtype and device of the net."""
    subject = f"window of stack {stack!r}" if len(output.task.stacks) > 1 else "window"
    shape, value = output.task.encoders[stack].spec.shape, to_reals(subject, window)
    rank = 1 + len(shape)
    if value.dim() < rank or tuple(value.shape[value.dim() - len(shape) :]) != shape or not value.numel():
        expected = f"shape [..., word, {', '.join(map(str, shape))}] with at least one word"
        raise BNetError(subject, expected=expected, actual=f"shape {tuple(value.shape)}")
    if not bool(value.isfinite().all()):
        *row, word = (~value.isfinite())[..., None].flatten(value.dim() - len(shape)).any(-1).nonzero()[0].tolist()
        where = f" of the window {row if len(row) > 1 else row[0]}" if row else ""
        raise BNetError(subject, expected="finite numbers", actual=f"a NaN or infinity at word {word}{where}")
    return value.to(output.task.network.device, output.task.network.dtype)


def _get_start_word(output: ForecastOutput, window: Tensor) -> Tensor:
    """Return the first word of the second stack, which is the last word of the window."""
    shape = output.task.encoders[output.stack].spec.shape
    last = window.narrow(window.dim() - 1 - len(shape), -1, 1)
    if tuple(last.shape[last.dim() - len(shape) :]) != shape:
        hint = "Pass a mapping from stack to words, which contains the first words of this stack"
        expected = f"words of shape {shape}, as in stack {output.stack!r}"
        raise BNetError("window", expected=expected, actual=f"shape {tuple(window.shape)}", hint=hint)
    return last


def _predict_mean(module: CompiledModule, output: ForecastOutput, x: Values) -> Tensor:
    """Compute the means of the predicted words, `[batch, word, dim]`; one word for a readout without words."""
    name = output.spec.group.name
    words: Tensor = module(x, want=[name])[name]
    words = words.unsqueeze(1) if output.spec.group.word_stack is None else words
    return words.expand(len(x[output.stack]), *words.shape[1:])


def _sample_words(module: CompiledModule, output: ForecastOutput, x: Values) -> Tensor:
    """Sample the predicted words from their distributions, `[batch, word, dim]`."""
    spec = output.spec
    state, _ = module.execute(batch_to_request(module.network, Batch(x), (spec.group.index,)))
    context, parents = gather_parents(state, spec)
    distribution = spec.tpm.distribution(context, *parents)
    dims = [len(x[output.stack]), *[1] * (state.layout.rank - 1)]  # no enumerated choices: the batch dim is first
    dims[state.layout.word_dim] = 1 if spec.group.word_stack is None else x[output.stack].shape[1]
    words: Tensor = distribution.expand(torch.Size(dims)).sample()
    return words.reshape(dims[0], -1, *spec.shape)


def _check_finite(forecast: Tensor) -> None:
    """Raise an error if a forecast contains a number that is not finite; it names the first such step and window."""
    off = ~forecast.reshape(*forecast.shape[:2], -1).isfinite().all(-1)
    if bool(off.any()):
        step = int(off.any(0).nonzero()[0])
        actual = f"a NaN or infinity at step {step + 1} of window {int(off[:, step].nonzero()[0])}"
        hint = f"Use at most steps={step}" if step else None
        raise BNetError("iterate", expected="a forecast of finite numbers", actual=actual, hint=hint)
