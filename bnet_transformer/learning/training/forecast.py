"""`iterate`: a net of real-valued words goes on from a window, reading its own predictions; `windows` of a series."""

from __future__ import annotations

import math
from collections.abc import Mapping
from contextlib import nullcontext
from dataclasses import dataclass

import torch
from torch import Tensor

from bnet_transformer._core.checks import check_choice, check_int, check_seed
from bnet_transformer._core.memory import check_memory, translate_memory_errors
from bnet_transformer._core.torch_context import fork_torch_rng, seed_rngs
from bnet_transformer.compiler import CompiledModule, ExecutionRequest
from bnet_transformer.compiler.gather import gather_parents
from bnet_transformer.compiler.module import find_default_output
from bnet_transformer.data.encode import split_by_stack
from bnet_transformer.data.task import Task, check_has_words, find_noncausal_arrow, infer_task
from bnet_transformer.data.word_encoder import to_reals
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
    """The next `steps` words after a window of real-valued words, `[..., steps, dim]`.

    The window is `[..., word, dim]`; the leading dims are a batch. Each word's output tells the word `ahead` further
    on, so the last `ahead` outputs are new words, and the net reads them next. By default that is 1 where no word
    reads a later one, and otherwise the number of words in the window. The net reads as many of the last words as the
    window has; with `grow` all words from the first. A net of two stacks reads the window in the one and
    goes on in the other, from the last word of the window, or from the words that a mapping from stack says. A
    Normal readout goes on with its mean, or with `sample` with what is drawn of it, by `seed`. `module` is one of this
    net in evaluation, where there is one already.

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
        raise BNetError("seed", expected="0: without sample=True nothing is drawn", actual=seed)
    if module is not None and (
        not isinstance(module, CompiledModule) or module.network is not network or module.training
    ):
        raise BNetError(
            "module", expected="net.module().eval() of this very net, or None", actual=type(module).__name__
        )
    steps, teller = check_int("steps", steps), find_forecast_output(network)
    if sample and teller.spec.tpm.kind != "continuous":
        raise BNetError("sample", expected="a net with a Normal readout", actual=f"the state {teller.spec.group.name}",
                        allowed="sample=False")  # fmt: skip
    x, lead = _read_window(teller, window)
    begun, size = x[teller.stack].shape[1], math.prod((*lead, steps, *teller.spec.shape))
    check_memory("steps", 2 * size * x[teller.stack].element_size(), "fewer steps=")  # told, and looked through
    new, grow = teller.resolve_ahead(begun, ahead), teller.should_grow(grow)
    longest = begun + new * ((steps - 1) // new) if grow else begun
    teller.task.encoders[teller.stack].check_length(longest)
    module, tell = module or CompiledModule(network).eval(), _sample_words if sample else _predict_mean
    words = x[teller.stack]
    told = words.new_empty(len(words), steps, *teller.spec.shape)
    with torch.no_grad(), fork_torch_rng(words.device) if sample else nullcontext():
        if sample:
            seed_rngs(seed, words.device)
        for step in range(0, steps, new):
            found = tell(module, teller, {**x, teller.stack: words})[:, -new:]
            told[:, step : step + new] = found[:, : steps - step]
            words = torch.cat([words, found], 1)
            words = words if grow else words[:, -begun:]
        _check_finite(told)
    return told.reshape(*lead, steps, *teller.spec.shape)


def windows(series: object, words: int, ahead: int) -> tuple[Tensor, Tensor]:
    """All windows of a series `[..., word, dim]`, and of each word the one `ahead` further on: `[window, word, dim]`.

    It is a pair of arrays for `train`, after which `iterate` with the same `ahead` goes on with the series: that is 1
    where no word reads a later one, and otherwise `words`, unless `iterate` is told.

    >>> x, y = windows([[0.0], [1.0], [2.0], [3.0]], words=2, ahead=1)
    >>> x.tolist(), y.tolist()
    ([[[0.0], [1.0]], [[1.0], [2.0]]], [[[1.0], [2.0]], [[2.0], [3.0]]])
    """
    found = to_reals("series", series)
    words, ahead = check_int("words", words), check_int("ahead", ahead)
    if found.dim() < 2 or found.shape[-2] < words + ahead:
        wanted = f"[..., word, dim], at least {words + ahead} words: {words} and {ahead} further on"
        raise BNetError("series", expected=wanted, actual=f"shape {tuple(found.shape)}")
    cut = found.unfold(-2, words, 1).movedim(-1, -2)  # [..., window, word, dim]
    many = found.shape[-2] - words - ahead + 1
    x, y = cut[..., :many, :, :], cut[..., ahead : ahead + many, :, :]
    return x.reshape(-1, *x.shape[-2:]), y.reshape(-1, *y.shape[-2:])


@dataclass(frozen=True)
class ForecastOutput:
    """The output of a net that is a new word: its family, the stack that it goes on in, and what it reads of later."""

    task: Task
    spec: NodeSpec
    stack: str
    later_arrow: str | None

    def resolve_ahead(self, num_read: int, requested: int | None) -> int:
        """How many words further on an output tells, where so many words are read."""
        pooled, name = self.spec.group.word_stack is None, self.spec.group.name
        if requested is None:
            return 1 if pooled or self.later_arrow is None else num_read
        if check_int("ahead", requested) > (1 if pooled else num_read):
            expected = (
                f"1, for {name} is one for all words" if pooled else f"at most the {num_read} words of the window"
            )
            raise BNetError("ahead", expected=expected, actual=requested)
        return requested

    def should_grow(self, requested: bool | None) -> bool:
        """True where all words from the first are read, and not as many as there were at first."""
        check_choice("grow", requested, (True, False, None))
        if requested and self.later_arrow is not None and self.spec.group.word_stack is not None:
            expected = "a net in which no word reads a later one"
            raise BNetError("grow", expected=expected, actual=self.later_arrow, allowed="grow=False")
        return len(self.task.stacks) > 1 and self.later_arrow is None if requested is None else requested


def find_forecast_output(network: Network) -> ForecastOutput:
    """What a net goes on with, or the error that says why it cannot."""
    network.check_single_dtype()
    check_has_words(network, "iterate")
    task = infer_task(network)
    names = [readout.group.name for readout in task.readouts] or [find_default_output(network)]
    member = network.get_spec(names[0])
    family, name = member.group, member.group.name
    home = (
        family.word_stack if family.word_stack is not None else family.stack if len(task.stacks) > 1 else task.stacks[0]
    )
    if len(names) > 1 or family.plates or member.tpm.kind == "discrete" or home not in task.encoders:
        wanted = "a net with one real-valued readout, or state, that tells a word"
        told = ", ".join(f"{each} ({type(network.get_spec(each).tpm).__name__})" for each in names)
        raise BNetError("iterate", expected=wanted, actual=told, allowed="generate, for words of a vocabulary")
    needed = network.ancestral_specs(member)
    _check_inputs(task, needed)
    if member.shape != task.encoders[home].spec.shape:
        expected = f"words of shape {task.encoders[home].spec.shape}, as are read"
        raise BNetError("iterate", expected=expected, actual=f"{name} of shape {member.shape}")
    if task.encoders[home].spec not in needed:
        raise BNetError("iterate", expected="an output that follows from the words", actual=name)
    return ForecastOutput(task, member, home, find_noncausal_arrow(network, member, home))


def _check_inputs(task: Task, specs: list[NodeSpec]) -> None:
    """Refuse what cannot be known of the words to come: choices, words of a vocabulary, further given nodes."""
    main = {of.spec.group.index for of in task.encoders.values()}
    for each in specs:
        name, tpm = each.group.name, each.tpm
        if tpm.kind == "input":
            if tpm.default is None and tpm.states is not None:
                got = f"{name}, one of {tpm.states} states"
                raise BNetError("iterate", expected="words that are vectors", actual=got, allowed="generate")
            if tpm.default is None and each.group.index not in main:
                raise BNetError("iterate", expected="no given nodes but the words", actual=name)
        elif tpm.is_random and each is not specs[-1]:
            expected = "no random choice beneath what is told"
            raise BNetError("iterate", expected=expected, actual=name, allowed="combine='concat'")


def _read_window(output: ForecastOutput, window: object) -> tuple[dict[str, Tensor], tuple[int, ...]]:
    """The words of every stack as `[batch, word, dim]`, and the leading dims of the batch."""
    task, stack = output.task, output.stack
    others = [name for name in task.stacks if name != stack]
    said = split_by_stack("window", window, task.stacks, stack)
    for name in others:
        if name not in said:
            raise BNetError(
                "window", expected=f"words of stack {name!r}", actual=f"only {', '.join(said) or 'nothing'}"
            )
    found = {name: _to_vectors(output, name, value) for name, value in said.items()}
    if stack not in found:
        found[stack] = _get_start_word(output, found[others[0]])
    leads = {name: tuple(value.shape[: -1 - len(task.encoders[name].spec.shape)]) for name, value in found.items()}
    lead = leads[stack]
    if any(other != lead for other in leads.values()):
        raise BNetError("window", expected="the same leading dims in every stack", actual=leads)
    for name in others:
        task.encoders[name].check_length(found[name].shape[len(lead)])
    return {name: value.reshape(-1, *value.shape[len(lead) :]) for name, value in found.items()}, lead


def _to_vectors(output: ForecastOutput, stack: str, window: object) -> Tensor:
    """A window as a tensor of the net's type, on its device."""
    what = f"window of stack {stack!r}" if len(output.task.stacks) > 1 else "window"
    shape, value = output.task.encoders[stack].spec.shape, to_reals(what, window)
    rank = 1 + len(shape)
    if value.dim() < rank or tuple(value.shape[value.dim() - len(shape) :]) != shape or not value.numel():
        wanted = f"[..., word, {', '.join(map(str, shape))}], at least one word"
        raise BNetError(what, expected=wanted, actual=f"shape {tuple(value.shape)}")
    if not bool(value.isfinite().all()):
        *row, word = (~value.isfinite())[..., None].flatten(value.dim() - len(shape)).any(-1).nonzero()[0].tolist()
        where = f" of the window {row if len(row) > 1 else row[0]}" if row else ""
        raise BNetError(what, expected="finite numbers", actual=f"a NaN or an infinite one at word {word}{where}")
    return value.to(output.task.network.device, output.task.network.dtype)


def _get_start_word(output: ForecastOutput, window: Tensor) -> Tensor:
    """The word that a second stack begins with: the last one of the window."""
    shape = output.task.encoders[output.stack].spec.shape
    last = window.narrow(window.dim() - 1 - len(shape), -1, 1)
    if tuple(last.shape[last.dim() - len(shape) :]) != shape:
        allowed = "a mapping from stack, with the words to begin with"
        expected = f"words of shape {shape}, as those of stack {output.stack!r}"
        raise BNetError("window", expected=expected, actual=f"shape {tuple(window.shape)}", allowed=allowed)
    return last


def _predict_mean(module: CompiledModule, output: ForecastOutput, x: Values) -> Tensor:
    """The words that are told, `[batch, word, dim]`; one, of a readout of all words."""
    name = output.spec.group.name
    found: Tensor = module(x, want=[name])[name]
    found = found.unsqueeze(1) if output.spec.group.word_stack is None else found
    return found.expand(len(x[output.stack]), *found.shape[1:])


def _sample_words(module: CompiledModule, output: ForecastOutput, x: Values) -> Tensor:
    """The words that are told, drawn from their distributions."""
    member = output.spec
    course, _ = module.run(ExecutionRequest((member.group.name,), x))
    at, parents = gather_parents(course, member)
    distribution = member.tpm.distribution(at, *parents)
    lead = [len(x[output.stack]), *[1] * (course.layout.rank - 1)]  # no open choices: the batch leads
    lead[course.layout.word_dim] = 1 if member.group.word_stack is None else x[output.stack].shape[1]
    drawn: Tensor = distribution.expand(torch.Size(lead)).sample()
    return drawn.reshape(lead[0], -1, *member.shape)


def _check_finite(forecast: Tensor) -> None:
    """Refuse a rollout that left the finite numbers, with the first step and window where it did."""
    off = ~forecast.reshape(*forecast.shape[:2], -1).isfinite().all(-1)
    if bool(off.any()):
        step = int(off.any(0).nonzero()[0])
        got = f"a NaN or an infinite one at step {step + 1} of window {int(off[:, step].nonzero()[0])}"
        allowed = f"at most steps={step}" if step else None
        raise BNetError("iterate", expected="a rollout of finite numbers", actual=got, allowed=allowed)
