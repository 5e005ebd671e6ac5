"""The tuned lens: an affine map per slice, fitted on a corpus, that corrects the bias of the logit lens.

The map of slice t is `x_t + A_t x_t + b_t`, the identity before training. It minimises `KL(end || lens)`, averaged over
the words of the corpus (Belrose et al. 2023, "Eliciting latent predictions from transformers with the tuned lens"). The
maps of all slices are trained together, but their losses have no common parameter.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor

from bnet_transformer._core.checks import check_float, check_fraction, check_int, check_seed
from bnet_transformer._core.process import check_memory
from bnet_transformer._core.results import Result, load_result
from bnet_transformer._core.tensors import enable_gradients
from bnet_transformer.compiler import CompiledModule
from bnet_transformer.compiler.gather import batch_to_request
from bnet_transformer.data import Batch
from bnet_transformer.data.batch import encode_batch
from bnet_transformer.declare import Network, as_network
from bnet_transformer.errors import BNetError, FileError
from bnet_transformer.residual_stream.lens import (
    DivergenceFrom,
    LensPath,
    compute_log_probs,
    find_lens_path,
    get_word_values,
)


@dataclass(frozen=True, eq=False, repr=False)
class TunedLens(Result):
    """The result of `bt.fit_lens`: an affine map `x_t + A_t x_t + b_t` for every state but the last.

    `s.lens(tuned=...)` applies it. A tuned lens belongs to the net on which it was fitted; the readout, the states and
    some entries of each parameter are compared.

    Attributes:
        readout: The name of the readout.
        states: The names of the states `x_0`, ..., `x_T`.
        weights: The matrices `A_t`, `[slice, feature, feature]`, for `x_0` to `x_(T-1)`.
        biases: The vectors `b_t`, `[slice, feature]`.
        plain_kl: `KL(end || lens)` of the logit lens on the held-out sentences, in nats, averaged over words,
            `[slice]`.
        kl: The same of the tuned lens.
        num_words: The number of words of the training sentences.
        num_held_out_words: The number of words of the held-out sentences.
        seed: The seed of the split and of the order of the sentences.
        parameters: Some entries of each parameter of the net, to recognise it, `[entry]`; None if it is not known.
    """

    _shapes = (
        "weights: real slice feature feature; biases: real slice feature; plain_kl kl: real slice; parameters: real _"
    )

    readout: str
    states: tuple[str, ...]
    weights: Tensor = field(repr=False)
    biases: Tensor = field(repr=False)
    plain_kl: Tensor
    kl: Tensor
    num_words: int
    num_held_out_words: int
    seed: int = 0
    parameters: Tensor | None = field(default=None, repr=False)

    @property
    def notes(self) -> tuple[str, ...]:
        """What limits the fit, as sentences: few words, slices that it does not improve."""
        notes = []
        num_features = self.biases.shape[-1]
        if self.num_words < num_features:
            notes.append(
                f"The corpus has {self.num_words:,} words for training, fewer than the {num_features:,} features of a "
                "state: it does not determine the maps."
            )
        worse = [name for name, plain, tuned in zip(self.states, self.plain_kl, self.kl, strict=False) if tuned > plain]
        if worse:
            notes.append(f"On held-out sentences, the logit lens is better for {', '.join(worse)}.")
        return tuple(notes)

    def translate(self, states: Tensor) -> Tensor:
        """Apply the maps.

        Args:
            states: The states `x_0` to `x_T`, `[slice, ..., feature]`.

        Returns:
            The mapped states, of the same shape; the last one is unchanged.
        """
        weights, biases = self.weights.to(states), self.biases.to(states)
        early = states[:-1]
        mapped = early + torch.einsum("tij,t...j->t...i", weights, early)
        mapped = mapped + biases.reshape(len(biases), *[1] * (states.dim() - 2), -1)
        return torch.cat([mapped, states[-1:]])

    def check_net(self, network: Network, path: LensPath) -> None:
        """Raise an error for another net than that of the fit.

        Args:
            network: The net to whose states the maps are applied.
            path: The path of its lens.

        Raises:
            BNetError: The tuned lens was fitted for another readout, for other states, or on other parameters.
        """
        expected = (path.readout.group.name, path.state_names, path.states[-1].shape)
        actual = (self.readout, self.states, tuple(self.biases.shape[-1:]))
        hint = "Fit it on this net by bt.fit_lens"
        if actual != expected:
            texts = [f"a tuned lens of {y}: {x[0]} to {x[-1]}, shape {shape}" for y, x, shape in (expected, actual)]
            raise BNetError("tuned", expected=texts[0], actual=texts[1], hint=hint)
        if self.parameters is not None and not _is_same_net(self.parameters, sample_parameters(network)):
            actual_text = "one that was fitted on another net, or before the parameters changed"
            raise BNetError("tuned", expected="a tuned lens of this net", actual=actual_text, hint=hint)

    @classmethod
    def load(cls, path: str | os.PathLike[str]) -> TunedLens:
        """Read a tuned lens that `save` wrote, as `bt.load` does.

        Args:
            path: The path of the file.

        Returns:
            The tuned lens.

        Raises:
            FileError: The file is no tuned lens, or is damaged.

        >>> import tempfile, bnet_transformer as bt
        >>> from bnet_transformer.residual_stream import TunedLens
        >>> net = bt.decoder(8, heads=2, slices=2, norm="pre", vocabulary=["the", "cat", "sat"])
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     bt.fit_lens(net, ["the cat sat", "cat the"], steps=1).save(f"{folder}/lens.safetensors")
        ...     net.sentence("the cat").lens(tuned=TunedLens.load(f"{folder}/lens.safetensors")).is_tuned
        True
        """
        description = "a tuned lens that save wrote"
        result = load_result(path, description=description)
        if not isinstance(result, cls):
            raise FileError(str(path), expected=description, actual=type(result).__name__)
        return result

    def _get_columns(self) -> Mapping[str, Any]:
        return {"state": self.states[:-1], "logit_lens": self.plain_kl, "tuned_lens": self.kl}

    def __repr__(self) -> str:
        count = f"{self.num_words:,} words, {self.num_held_out_words:,} held out"
        kl = f"mean held-out KL {float(self.plain_kl.mean()):.3g} -> {float(self.kl.mean()):.3g} nats"
        return " ".join([f"<TunedLens of {self.readout}: {len(self.kl)} slices, {count}, {kl}>", *self.notes])

    def _get_notes(self) -> Sequence[str]:
        return ()  # the caption contains them


@enable_gradients()
def fit_lens(
    net: object,
    sentences: Sequence[object],
    *,
    readout: str | None = None,
    steps: int = 250,
    rate: float = 1e-3,
    batch: int = 16,
    held_out: float = 0.2,
    seed: int = 0,
) -> TunedLens:
    """Fit a tuned lens: an affine map per slice that minimises `KL(end || lens)` on a corpus.

    Adam trains the maps, and its rate decays linearly to 0. Features are standardised for training, so that one rate
    fits all slices; the result maps the states as they are. The states of the corpus are in memory during the fit.

    Args:
        net: The net.
        sentences: The corpus: a list of texts, of lists of words or of ids, as for `net.batch`.
        readout: The name of the readout; None for the only one.
        steps: The number of steps of Adam. A step uses `batch` sentences.
        rate: The initial rate of Adam.
        batch: The number of sentences of a step.
        held_out: The fraction of the sentences on which the KL is reported, and which are not trained on.
        seed: The seed of the split and of the order of the sentences.

    Returns:
        The tuned lens, with the held-out KL of every slice before and after the fit.

    Raises:
        BNetError: The net has no discrete readout of a state, its states depend on latent choices, there are fewer than
            2 sentences, or the fit diverges.

    >>> import bnet_transformer as bt
    >>> net = bt.decoder(8, heads=2, slices=2, norm="pre", vocabulary=["the", "cat", "sat"])
    >>> tuned = bt.fit_lens(net, ["the cat sat", "cat the", "sat sat the", "the the cat"], steps=5)
    >>> tuned.weights.shape, tuned.kl.shape, net.sentence("the cat").lens(tuned=tuned).is_tuned
    (torch.Size([2, 8, 8]), torch.Size([2]), True)
    """
    network = as_network(net)
    path = find_lens_path(network, readout)
    steps, size, seed = check_int("steps", steps, minimum=0), check_int("batch", batch), check_seed(seed)
    rate, fraction = check_float("rate", rate, above=0), check_fraction("held_out", held_out)
    if isinstance(sentences, str) or not isinstance(sentences, Sequence) or len(sentences) < 2:
        raise BNetError("sentences", expected="a list of at least 2 sentences", actual=sentences)
    generator = torch.Generator().manual_seed(seed)
    order = torch.randperm(len(sentences), generator=generator).tolist()
    count = min(max(1, round(fraction * len(order))), len(order) - 1)
    # A copy of the module without gradients: only the maps are trained. Tensors are shared, not copied.
    module = CompiledModule(network).eval().requires_grad_(False)
    corpora = []
    for indices in (order[count:], order[:count]):
        groups = [[sentences[k] for k in indices[start : start + size]] for start in range(0, len(indices), size)]
        corpora.append([_read_part(module, path, encode_batch(network, group)) for group in groups])
    train, test = corpora
    maps = AffineMaps(path, train)
    plain = _mean_divergence(maps, module, path, test)
    _train(maps, module, path, train, steps, rate, generator)
    tuned = _mean_divergence(maps, module, path, test)
    weights, biases = maps.fold_scales()
    if not bool(weights.isfinite().all()) or not bool(tuned.isfinite().all()):
        raise BNetError(f"fit_lens: the fit with rate {rate:g} diverges", hint="Use a smaller rate=")
    num_words, num_held_out = (sum(int(part.weights.sum()) for part in parts) for parts in corpora)
    names = path.readout.group.name, path.state_names
    counts = num_words, num_held_out
    return TunedLens(*names, weights.cpu(), biases.cpu(), plain, tuned, *counts, seed, sample_parameters(network))


def sample_parameters(network: Network) -> Tensor:
    """At most three entries along each dim of each parameter, `[entry]`: a fast fingerprint of a large net."""
    parts = []
    for name in sorted(network.parameters):
        value = network.parameters[name].detach()
        corners = value[tuple(slice(None, None, max(1, size // 2)) for size in value.shape)]
        parts.append(corners.to("cpu").flatten())
    return torch.cat(parts) if parts else torch.zeros(0)


def _is_same_net(expected: Tensor, actual: Tensor) -> bool:
    """Whether two fingerprints are equal up to the rounding of a net that was converted to another dtype."""
    rounding = max(torch.finfo(value.dtype).eps for value in (expected, actual))
    tolerance = 0.0 if expected.dtype == actual.dtype else rounding
    return expected.shape == actual.shape and torch.allclose(
        expected.double(), actual.double(), rtol=tolerance, atol=tolerance, equal_nan=True
    )


@dataclass(frozen=True, eq=False)
class TextPart:
    """Some sentences of a corpus, their states, and which of their distributions count.

    Attributes:
        batch: The sentences.
        states: The states `x_0` to `x_T`, `[slice, sentence, word, feature]`.
        present: True for words of the states, `[sentence, word]`.
        weights: 1 for each word of the readout and 0 for padding, `[sentence, word]`.
    """

    batch: Batch
    states: Tensor
    present: Tensor
    weights: Tensor


@torch.no_grad()
def _read_part(module: CompiledModule, path: LensPath, batch: Batch) -> TextPart:
    """Compute the states of some sentences."""
    last, count = path.states[-1], len(batch)
    num_words = batch.x[last.group.stack].shape[1]
    check_memory("sentences", 4 * len(path.states) * count * num_words * last.shape[0], "fewer sentences")
    request = batch_to_request(module.network, batch, tuple(spec.group.index for spec in path.states))
    execution = module.execute(request)[0]
    states = torch.stack([get_word_values(execution, spec, count, num_words) for spec in path.states])

    def make_mask(stack: str | None) -> Tensor:
        if stack is None:
            return torch.ones(count, 1, dtype=torch.bool, device=states.device)
        mask = None if batch.mask is None else batch.mask.get(stack)
        shape = batch.x[stack].shape[:2]
        return torch.ones(shape, dtype=torch.bool, device=states.device) if mask is None else mask

    weights = make_mask(path.readout.group.word_stack).to(states)
    return TextPart(batch, states, make_mask(last.group.stack), weights)


class AffineMaps(torch.nn.Module):
    """The affine maps of all slices, on standardised features; the identity before training.

    The update of x is `scale_T (A z + b)`, where z are the features of `x_t` with mean 0 and variance 1 over the words
    of the corpus, and `scale_T` the standard deviation of the features of `x_T`. These are all affine maps, but their
    gradients have one scale in all slices, although the norm of the states grows with depth.
    """

    def __init__(self, path: LensPath, parts: Sequence[TextPart]) -> None:
        super().__init__()
        num_features = path.states[-1].shape[0]
        words = torch.cat([part.states[:, part.present] for part in parts], 1)  # [slice, word, feature]
        means, scales = words.mean(1), words.std(1, correction=0)
        floor = 1e-3 * scales.square().mean(-1, keepdim=True).sqrt() + torch.finfo(words.dtype).eps
        self.means, self.scales = means[:-1], torch.maximum(scales, floor)[:-1]
        self.output_scale = torch.maximum(scales, floor)[-1]
        shape = len(path.states) - 1, num_features
        self.weights = torch.nn.Parameter(words.new_zeros(*shape, num_features))
        self.biases = torch.nn.Parameter(words.new_zeros(shape))

    def forward(self, states: Tensor, slices: slice) -> Tensor:
        """The mapped states of some slices, `[slice, sentence, word, feature]`."""
        flat = states[slices].flatten(1, 2)
        standardised = (flat - self.means[slices][:, None]) / self.scales[slices][:, None]
        update = torch.baddbmm(self.biases[slices][:, None], standardised, self.weights[slices].mT)
        return (flat + self.output_scale * update).reshape(states[slices].shape)

    @torch.no_grad()
    def fold_scales(self) -> tuple[Tensor, Tensor]:
        """The matrices and vectors for states that are not standardised."""
        weights = self.output_scale[:, None] * self.weights / self.scales[:, None, :]
        biases = self.output_scale * self.biases - (weights @ self.means[..., None]).squeeze(-1)
        return weights, biases


def _train(
    maps: AffineMaps,
    module: CompiledModule,
    path: LensPath,
    parts: Sequence[TextPart],
    steps: int,
    rate: float,
    generator: torch.Generator,
) -> None:
    """Minimise the divergence by Adam, with a linear decay of the rate."""
    optimizer = torch.optim.Adam(maps.parameters(), lr=rate)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1 - step / max(1, steps))
    queue: list[int] = []
    for _ in range(steps):
        queue = queue or torch.randperm(len(parts), generator=generator).tolist()
        part = parts[queue.pop()]
        optimizer.zero_grad()
        for divergence in _iter_divergences(maps, module, path, part):
            divergence.sum().div(part.weights.sum()).backward()
        optimizer.step()
        schedule.step()


@torch.no_grad()
def _mean_divergence(maps: AffineMaps, module: CompiledModule, path: LensPath, parts: Sequence[TextPart]) -> Tensor:
    """The divergence of each slice, averaged over the words of some sentences, `[slice]`."""
    totals = [torch.cat(list(_iter_divergences(maps, module, path, part))) for part in parts]
    num_words = torch.stack([part.weights.sum() for part in parts]).sum()
    return (torch.stack(totals).sum(0) / num_words).cpu()


def _iter_divergences(maps: AffineMaps, module: CompiledModule, path: LensPath, part: TextPart) -> Iterator[Tensor]:
    """`KL(end || lens)`, summed over words: `[slice]` for some slices at a time, which bounds the memory."""
    with torch.no_grad():
        divergence = DivergenceFrom(_apply_readout(module, path, part, part.states[-1:]))
    count = len(path.states) - 1
    step = path.count_chunk_rows(part.weights.numel())
    for start in range(0, count, step):
        slices = slice(start, min(start + step, count))
        log_probs = _apply_readout(module, path, part, maps(part.states, slices))
        yield (divergence(log_probs) * part.weights).sum((1, 2))


def _apply_readout(module: CompiledModule, path: LensPath, part: TextPart, states: Tensor) -> Tensor:
    """The log probabilities of the readout of some states, `[slice, sentence, word, state]`."""
    count = len(states)

    def repeat(value: Tensor) -> Tensor:
        return value if count == 1 else value.repeat(count, *[1] * (value.dim() - 1))

    batch = part.batch.map(repeat)
    request = batch_to_request(module.network, batch, (path.readout.group.index,))
    request = replace(request, known={**request.known, path.states[-1].group.index: states.flatten(0, 1)})
    log_probs = compute_log_probs(module.execute(request)[0], path.readout)
    return log_probs.expand(count * len(part.batch), *part.weights.shape[1:], -1).reshape(
        count, *part.weights.shape, -1
    )
