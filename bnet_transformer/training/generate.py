"""`generate`: prompts in, words out."""

from __future__ import annotations

import html
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import Tensor

from bnet_transformer.compiler import Module
from bnet_transformer.data.examples import Example, pad_examples
from bnet_transformer.data.task import Task, check_has_words
from bnet_transformer.errors import (
    BNetError,
    in_unicode,
    not_endless,
    number,
    one_of,
    room_for,
    seed_of,
    unknown,
    whole,
    within_memory,
)
from bnet_transformer.network import Network, network_of
from bnet_transformer.tpm.arrays import is_plain
from bnet_transformer.training.decoding import Prompts, by_beams, greedy, one_by_one, sampler, speaker_of
from bnet_transformer.training.incremental import told_by
from bnet_transformer.training.task import infer_trainable_task

if TYPE_CHECKING:
    import pandas as pd

METHODS = ("greedy", "beam", "sample")


@dataclass(frozen=True)
class Generated:
    """What was generated after each prompt, the stop word left out: ids, words, their log probability."""

    ids: tuple[tuple[int, ...], ...]
    words: tuple[tuple[str, ...], ...]
    scores: tuple[float, ...]

    @property
    def texts(self) -> tuple[str, ...]:
        """The words of each row, joined by spaces."""
        return tuple(" ".join(row) for row in self.words)

    def __len__(self) -> int:
        return len(self.ids)

    def __str__(self) -> str:
        return "\n".join(self.texts)

    def to_dataframe(self) -> pd.DataFrame:
        """One row for each prompt: `text`, `words` (how many), `score`."""
        import pandas as pd

        return pd.DataFrame(
            {
                "text": [in_unicode(text) for text in self.texts],
                "words": [len(row) for row in self.ids],
                "score": self.scores,
            }
        )

    def _repr_html_(self) -> str:
        rows = "".join(
            f"<tr><td>{html.escape(text)}</td><td>{score:.4f}</td></tr>"
            for text, score in zip(self.texts, self.scores, strict=True)
        )
        return f"<table><tr><th>words</th><th>log P</th></tr>{rows}</table>"


@within_memory("generate")
def generate(
    network: Network,
    prompt: object = None,
    *,
    method: str = "greedy",
    length: int = 64,
    beams: int | None = None,
    penalty: float | None = None,
    temperature: float | None = None,
    top_k: int | None = None,
    top_p: float | None = None,
    start: object = None,
    stop: object = None,
    seed: int = 0,
    cached: bool = True,
) -> Generated:
    """At most `length` new words after each prompt, up to the word `stop`.

    A prompt is text, a list of ids, or an array; a list of these (strings are texts) is a batch. A net of two stacks
    takes its sources, and `start`, or a mapping from stack. `method` is "greedy", "sample" (by `temperature`, 1 by
    default, among the `top_k` likeliest, or the fewest that have a share of `top_p`) or "beam" (of width `beams`, 4 by
    default, with the length `penalty` of Wu et al., 0.6). With `cached=False` every word computes all words anew: the
    same, slowly.

    >>> import bnet_transformer as bt
    >>> net = bt.decoder(8, heads=2, slices=1, vocabulary=["the", "cat", "sat"])
    >>> found = net.generate(["the cat"], length=3)
    >>> len(found.words[0]), found.words[0][0] in {"the", "cat", "sat"}
    (3, True)
    """
    network = network_of(network)
    network.one_type()
    places = sorted({str(value.device) for value in network.parameters.values()})
    if len(places) > 1:
        raise BNetError("generate", expected="a net on one device", got=", ".join(places))
    one_of("method", method, METHODS)
    one_of("cached", cached, (True, False))
    options = {"beams": beams, "penalty": penalty, "temperature": temperature, "top_k": top_k, "top_p": top_p}
    _check_options(method, options)
    temperature, top_p, penalty = (None if each is None else float(each) for each in (temperature, top_p, penalty))
    seed = seed_of(seed)
    check_has_words(network, "generate")
    task = infer_trainable_task(network, generates=True)
    _, stack = told_by(task)
    x, mask, prompts = _read(task, stack, prompt, whole("length", length), start, stop)
    task.words[stack].check_length(prompts.end, begun=True)
    told = len(prompts.ids) * (whole("beams", beams or 4) if method == "beam" else 1)
    room_for("generate", 8 * told * prompts.end, "fewer or shorter prompts, a smaller length= or beams=")
    place = next(iter(network.parameters.values())).device
    with torch.inference_mode():
        module = Module(network).eval()
        begun = {name: value.to(place) for name, value in x.items()} | {stack: prompts.ids[:, : prompts.shortest]}
        speaker = speaker_of(module, task, begun, mask, prompts.end, cached=cached)
        if method == "beam":
            ids, scores = by_beams(speaker, prompts, beams or 4, 0.6 if penalty is None else penalty)
        else:
            pick = greedy if method == "greedy" else sampler(temperature or 1.0, top_k, top_p, seed, place)
            ids, scores = one_by_one(speaker, prompts, pick)
    words = tuple(task.words[stack].decode(row) for row in ids)
    return Generated(tuple(map(tuple, ids)), words, tuple(scores.tolist()))


def _check_options(method: str, options: Mapping[str, object]) -> None:
    """Refuse options of another method, and numbers that are none."""
    for name, value in options.items():
        if value is None:
            continue
        if name in ("beams", "top_k"):
            whole(name, value)
        elif name == "penalty" and number(name, value) < 0:
            raise BNetError(name, expected="a number of at least 0", got=value)
        elif number(name, value, above=None if name == "penalty" else 0) > 1 and name == "top_p":
            raise BNetError(name, expected="a share above 0, at most 1", got=value)
        wanted = "beam" if name in ("beams", "penalty") else "sample"
        if method != wanted:
            allowed = f"method={wanted!r}"
            raise BNetError(name, expected=f"None: method={method!r} has no use for it", got=value, allowed=allowed)


def _read(
    task: Task, stack: str, prompt: object, length: int, start: object, stop: object
) -> tuple[dict[str, Tensor], dict[str, Tensor] | None, Prompts]:
    """The words of every stack as a batch, and the prompts of the one that is told."""
    others = [name for name in task.stacks if name != stack]
    if isinstance(prompt, Mapping):
        for name in prompt:
            if name not in task.stacks:
                raise unknown("stack", name, task.stacks)
        said = {name: _several(value) for name, value in prompt.items()}
    elif not others:
        said = {} if prompt is None else {stack: _several(prompt)}
    elif len(others) == 1 and prompt is not None:
        said = {others[0]: _several(prompt)}
    else:
        raise BNetError("prompt", expected=f"a mapping from stack ({', '.join(others)})", got=prompt)
    of = task.words[stack]
    batch = max((len(rows) for rows in said.values()), default=1)
    if start is None and stack not in said and task.network.tokenizer is not None:
        start = task.network.tokenizer.start  # where the model says with which word its outputs start
    begin = [] if start is None else [of.id(start)]
    rows = [[*begin, *of.encode(row).tolist()] for row in said.get(stack, [])] or [begin]
    if not rows[0]:
        raise BNetError("prompt", expected=f"words to begin with in stack {stack!r}, or start=", got="none")
    rows = rows * batch if len(rows) == 1 else rows
    for name in others:
        if len(said.get(name, [])) != batch or len(rows) != batch:
            got = {name: len(said.get(name, [])), stack: len(rows)}
            raise BNetError("prompt", expected="as many sentences in every stack", got=got)
    words = {name: [task.words[name].encode(row) for row in said[name]] for name in others}
    for name in others:
        task.words[name].check_length(max(len(row) for row in words[name]))
    told = [torch.tensor(row) for row in rows]
    made = pad_examples(task, [Example({n: words[n][k] for n in others} | {stack: told[k]}, {}) for k in range(batch)])
    device = next(iter(task.network.parameters.values())).device
    mask = {name: value.to(device) for name, value in (made.mask or {}).items() if name != stack}
    end = None if stop is None else of.id(stop)
    ids, lengths = made.x[stack].to(device), torch.tensor([len(row) for row in rows], device=device)
    return {name: made.x[name] for name in others}, mask or None, Prompts(ids, lengths, length, end)


def _several(value: object) -> Sequence[object]:
    """One sentence as a batch of one; a batch as it is."""
    if isinstance(value, str):
        return [value]
    wanted = "text, ids, or a list of them"
    if isinstance(value, Tensor) and not is_plain(value):
        raise BNetError("prompt", expected=wanted, got=value)
    if isinstance(value, Tensor | np.ndarray):
        return [value] if value.ndim == 1 else list(value)
    if not isinstance(value, Sequence) or not value:
        raise BNetError("prompt", expected=wanted, got=value)
    not_endless("prompt", value)
    if all(isinstance(word, int | np.integer) for word in value):
        return [value]
    return value
