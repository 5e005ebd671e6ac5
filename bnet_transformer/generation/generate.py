"""`generate`: new words after prompts, by greedy decoding, sampling or beam search."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor

from bnet_transformer._core.checks import check_choice, check_float, check_int, check_mapping, check_seed
from bnet_transformer._core.process import check_memory, translate_memory_errors
from bnet_transformer._core.results import Result
from bnet_transformer._core.tensors import is_dense
from bnet_transformer.compiler import CompiledModule
from bnet_transformer.compiler.batch_interventions import resolve_interventions
from bnet_transformer.data.batch import Task, check_has_words, find_next_word_readout, infer_trainable_task
from bnet_transformer.data.dataset import Example, pad_examples
from bnet_transformer.data.encode import split_by_stack
from bnet_transformer.declare import Network, as_network
from bnet_transformer.errors import BNetError
from bnet_transformer.generation.decoder import ChoiceSampler, FilteringDecoder, IncrementalDecoder
from bnet_transformer.graph import GroundGraph
from bnet_transformer.inference import Samples
from bnet_transformer.inference.sampling import count_words

# --------------------------------------------------------------------------------------------------------------------
# The result of `generate`: the new words, their log probabilities, and the drawn states of choices.


@dataclass(frozen=True)
class Generated(Result):
    """The new words after each prompt, without the stop word.

    Attributes:
        ids: The ids of the new words of each prompt.
        words: The new words of each prompt.
        scores: The log probability of the new words of each prompt, including the stop word that ends them.
        texts: The text of the new words of each prompt: as the tokenizer of the net decodes their ids, or the words
            joined by spaces.
        log_probs: The log probability of each new word of each prompt, given the words before it.
        states: With `choices="draw"`: the drawn states of the latent choices, by node group, `[prompt, *plates]`, or
            `[prompt, *plates, word]` for choices of words. The last word has no states, because no word follows it. In
            shorter rows, the states after the last word are to be ignored.
    """

    _shapes = "ids words scores texts: any prompt; log_probs: any prompt?; states: {_} int prompt *_"

    ids: tuple[tuple[int, ...], ...]
    words: tuple[tuple[str, ...], ...]
    scores: tuple[float, ...]
    texts: tuple[str, ...]
    log_probs: tuple[tuple[float, ...], ...] = ()
    states: Mapping[str, Tensor] = field(default_factory=dict, repr=False, compare=False)

    def __len__(self) -> int:
        return len(self.ids)

    def __str__(self) -> str:
        return "\n".join(self.texts)

    @property
    def caption(self) -> str:
        """The number of texts, in one line."""
        plural = "s" * (len(self.texts) != 1)
        return f"{len(self.texts)} text{plural}, with the number of new words and their log probability"

    def _get_columns(self) -> Mapping[str, Any]:
        return {"text": self.texts, "words": list(map(len, self.ids)), "score": self.scores}


# --------------------------------------------------------------------------------------------------------------------
# `generate`: new words after prompts, by greedy decoding, sampling or beam search.

MIN_TEMPERATURE = 1e-37  # below it the likeliest word has probability 1 in every dtype; above its inverse all are equal
Sampler = Callable[[Tensor], Tensor]
Decoder = IncrementalDecoder | FilteringDecoder


@translate_memory_errors("generate")
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
    do: Mapping[str, object] | None = None,
    do_from: str = "start",
    choices: str = "sum",
    seed: int = 0,
) -> Generated:
    """Generate new words after each prompt.

    In a net with latent choices, each word is predicted given the words before it, summed over all choices. With
    interventions (`do`), the words are those of the net after these interventions at every word.

    Args:
        network: A net whose readout predicts the next word.
        prompt: Text, a list of ids, or an array. A list of these is a batch; a list of strings is a batch of texts. For
            a net with two stacks: the source sentences, or a mapping from stack to words. None begins with `start`.
        method: `"greedy"`, `"sample"` or `"beam"`.
        length: The maximum number of new words.
        beams: The beam width of beam search, 4 by default.
        penalty: The length penalty of beam search (Wu et al. 2016), 0.6 by default.
        temperature: The temperature of sampling, 1 by default.
        top_k: Sample only from the `top_k` likeliest words; None for all words.
        top_p: Sample only from the smallest set of likeliest words with a total probability of at least `top_p`
            (nucleus sampling); None for all words.
        start: The word before each prompt. By default the first word of the inputs of the decoder, if the model defines
            it (encoder-decoder models) and there is no prompt in its stack.
        stop: The word that ends a row; by default no word does.
        do: Interventions: a mapping from a node group (`"x_5"`), a role, a name without its word (`"a_3_5"` is head 5
            of slice 3) or a pattern to a value of `Sentence.do`, which applies at every word; or from the name of a
            node at a word of the prompt (`"x_5_0"`). Values are tensors, states, `Zero()`, `Mean(sentences)`, another
            sentence, whose values apply at the words that it has, and changes of the value: `Shift(vector)`,
            `Scale(factor)`, a function, `Noise`, `Swap`, `Project`, `Set`; at words of the prompt also
            `Attend(weights)`. If a value depends on latent choices, a change applies in each of their states.
        do_from: `"start"` (default): interventions without a word apply at every word, of the prompt and new. `"new"`:
            they apply at new words only.
        choices: `"sum"` (default): latent choices are summed out. `"draw"`, with `method="sample"`: those of the prompt
            are drawn from their posterior given the prompt, those of each new word given the words and choices before
            it, and words are sampled given the choices.
        seed: The seed of sampling.

    Returns:
        The new words of each prompt, their log probabilities, and the drawn states of choices.

    Raises:
        BNetError: If an option is out of range or belongs to another method, or the net cannot generate.

    >>> import bnet_transformer as bt
    >>> net = bt.decoder(8, heads=2, slices=1, vocabulary=["the", "cat", "sat"])
    >>> found = net.generate(["the cat"], length=3)
    >>> len(found.words[0]), found.words[0][0] in {"the", "cat", "sat"}
    (3, True)
    """
    network = as_network(network)
    network.check_single_dtype()
    devices = sorted({str(value.device) for value in network.parameters.values()})
    if len(devices) > 1:
        raise BNetError("generate", expected="a net on one device", actual=", ".join(devices))
    check_choice("method", method, ("greedy", "beam", "sample"))
    check_choice("do_from", do_from, ("start", "new"))
    check_choice("choices", choices, ("sum", "draw"))
    if choices == "draw" and method != "sample":
        expected = f"'sum', because method={method!r} does not sample"
        raise BNetError("choices", expected=expected, actual=choices, hint="Use method='sample'")
    options = {"beams": beams, "penalty": penalty, "temperature": temperature, "top_k": top_k, "top_p": top_p}
    _check_options(method, options)
    temperature, top_p, penalty = (None if x is None else float(x) for x in (temperature, top_p, penalty))
    seed = check_seed(seed)
    check_has_words(network, "generate")
    task = infer_trainable_task(network, is_generation=True)
    _, stack = find_next_word_readout(task)
    x, mask, prompts = _encode_prompts(task, stack, prompt, check_int("length", length), start, stop)
    task.encoders[stack].check_length(prompts.max_length, is_prefix=True)
    rows = len(prompts.ids) * (check_int("beams", beams or 4) if method == "beam" else 1)
    check_memory("generate", 8 * rows * prompts.max_length, "fewer or shorter prompts, a smaller length= or beams=")
    device = network.device
    decoder: Decoder
    with torch.no_grad() if task.has_choices else torch.inference_mode():
        module = CompiledModule(network).eval()
        prefix = {name: value.to(device) for name, value in x.items()} | {stack: prompts.ids[:, : prompts.min_length]}
        sizes = {name: words.shape[1] for name, words in x.items()}
        shortest = sizes | {name: int(present.sum(1).min()) for name, present in (mask or {}).items()}
        sizes[stack], shortest[stack] = task.encoders[stack].exact_length or prompts.max_length, prompts.min_length
        first_word = prompts.lengths if do_from == "new" else None
        interventions = resolve_interventions(network, check_mapping("do", do), sizes, shortest, stack, first_word)
        generator = torch.Generator(device).manual_seed(seed)
        choice_sampler = None
        if task.has_choices:
            if choices == "draw":
                data = prompts.ids, prompts.lengths
                choice_sampler = ChoiceSampler(module, task, stack, *data, generator, interventions)
            decoder = FilteringDecoder(module, task, prefix, mask, interventions, choice_sampler)
        else:
            decoder = IncrementalDecoder(module, task, prefix, mask, prompts.max_length, interventions)
        if method == "beam":
            ids, scores, log_probs = beam_search(decoder, prompts, beams or 4, 0.6 if penalty is None else penalty)
        else:
            sampler = create_sampler(temperature or 1.0, top_k, top_p, generator)
            likeliest = partial(torch.argmax, dim=-1)
            ids, scores, log_probs = decode_words(decoder, prompts, likeliest if method == "greedy" else sampler)
    encoder = task.encoders[stack]
    words = tuple(encoder.decode(row) for row in ids)
    tokenizer = encoder.tokenizer
    texts = tuple(map(" ".join, words)) if tokenizer is None else tuple(map(tokenizer.decode, ids))
    count = max(len(row) + size for row, size in zip(ids, prompts.lengths.tolist(), strict=True)) - 1
    states = {} if choice_sampler is None else choice_sampler.get_states(count)
    return Generated(tuple(map(tuple, ids)), words, tuple(scores.tolist()), texts, tuple(map(tuple, log_probs)), states)


def _check_options(method: str, options: Mapping[str, object]) -> None:
    """Raise an error for options of another method, and for values out of range."""
    for name, value in options.items():
        if value is None:
            continue
        if name in ("beams", "top_k"):
            check_int(name, value)
        elif name == "penalty":
            check_float(name, value, minimum=0)
        elif check_float(name, value, above=0) > 1 and name == "top_p":
            raise BNetError(name, expected="a number above 0 and at most 1", actual=value)
        required = "beam" if name in ("beams", "penalty") else "sample"
        if method != required:
            expected = f"None, because method={method!r} does not use it"
            raise BNetError(name, expected=expected, actual=value, hint=f"Use method={required!r}")


def _encode_prompts(
    task: Task, stack: str, prompt: object, length: int, start: object, stop: object
) -> tuple[dict[str, Tensor], dict[str, Tensor] | None, Prompts]:
    """Return the words of the other stacks as a batch with its mask, and the prompts of `stack`."""
    other_stacks = [name for name in task.stacks if name != stack]
    prompts = {} if prompt is None else split_by_stack("prompt", prompt, task.stacks, stack)
    batches = {name: _to_batch(value) for name, value in prompts.items()}
    encoder = task.encoders[stack]
    batch = max((len(rows) for rows in batches.values()), default=1)
    if start is None and stack not in batches and task.network.tokenizer is not None:
        start = task.network.tokenizer.start_token_id  # the start word of the model
    begin = [] if start is None else [encoder.id(start)]
    rows = [[*begin, *encoder.encode(row).tolist()] for row in batches.get(stack, [])] or [begin]
    if not rows[0]:
        subject = f"prompt of stack {stack!r}" if stack else "prompt"
        raise BNetError(subject, expected="at least one word", hint="Pass words, or start=")
    rows = rows * batch if len(rows) == 1 else rows
    for name in other_stacks:
        if len(batches.get(name, [])) != batch or len(rows) != batch:
            actual = {name: len(batches.get(name, [])), stack: len(rows)}
            raise BNetError("prompt", expected="the same number of sentences in every stack", actual=actual)
    words = {name: [task.encoders[name].encode(row) for row in batches[name]] for name in other_stacks}
    for name in other_stacks:
        task.encoders[name].check_length(max(len(row) for row in words[name]))
    prompt_ids = [torch.tensor(row) for row in rows]
    examples = [Example({n: words[n][k] for n in other_stacks} | {stack: prompt_ids[k]}, {}) for k in range(batch)]
    padded = pad_examples(task, examples)
    device = task.network.device
    mask = {name: value.to(device) for name, value in (padded.mask or {}).items() if name != stack}
    end = None if stop is None else encoder.id(stop)
    ids, lengths = padded.x[stack].to(device), torch.tensor([len(row) for row in rows], device=device)
    return {name: padded.x[name] for name in other_stacks}, mask or None, Prompts(ids, lengths, length, end)


def _to_batch(value: object) -> Sequence[object]:
    """Return one sentence as a batch of one sentence, and a batch as it is."""
    if isinstance(value, str):
        return [value]
    if isinstance(value, np.ndarray) or is_dense(value):
        return [value] if value.ndim == 1 else list(value)
    if not isinstance(value, Sequence) or not value:
        raise BNetError("prompt", expected="text, ids, or a list of them", actual=value)
    return [value] if all(isinstance(word, int | np.integer) for word in value) else value


@dataclass(frozen=True)
class Prompts:
    """The padded prompts `[batch, word]`, their lengths, the maximum number of new words, and the stop word."""

    ids: Tensor
    lengths: Tensor
    max_new_words: int
    stop_id: int | None

    @property
    def min_length(self) -> int:
        """The length of the shortest prompt."""
        return int(self.lengths.min())

    @property
    def max_length(self) -> int:
        """The maximum length of a row, including its new words."""
        return int(self.lengths.max()) + self.max_new_words

    def force_prompt_words(self, log_probs: Tensor, position: int) -> Tensor:
        """Set the probability of the prompt's word to 1 at a position inside a prompt; `[batch, ..., states]`.

        All rows start to generate after the shortest prompt, so the words of longer prompts are forced choices.
        """
        inside = position < self.lengths
        if not bool(inside.any()):
            return log_probs
        column = self.ids[:, min(position, self.ids.shape[1] - 1)]
        forced = torch.full((len(column), log_probs.shape[-1]), -torch.inf, dtype=log_probs.dtype, device=column.device)
        forced.scatter_(1, column[:, None], 0.0)
        dims = [1] * (log_probs.dim() - 2)
        return torch.where(inside.reshape(-1, *dims, 1), forced.reshape(len(forced), *dims, -1), log_probs)

    def is_stop_word(self, words: Tensor, position: int) -> Tensor:
        """Return which of the words chosen at a position are stop words that end their rows; prompt words are not."""
        if self.stop_id is None:
            return torch.zeros_like(words, dtype=torch.bool)
        return (words == self.stop_id) & (position >= self.lengths)


DecodedWords = tuple[list[list[int]], Tensor, list[list[float]]]  # ids, log probability of rows, and of each word


def decode_words(decoder: Decoder, prompts: Prompts, sample_word: Sampler) -> DecodedWords:
    """Choose words one by one with `sample_word`. Return the new words of each row and their log probability."""
    batch = len(prompts.ids)
    score = torch.zeros(batch, dtype=decoder.log_probs.dtype, device=prompts.ids.device)
    done = torch.zeros(batch, dtype=torch.bool, device=prompts.ids.device)
    length = torch.full_like(prompts.lengths, prompts.max_new_words)
    chosen: list[Tensor] = []
    chosen_log_probs: list[Tensor] = []
    for position in range(prompts.min_length, prompts.max_length):
        log_probs = prompts.force_prompt_words(decoder.log_probs, position)
        word = sample_word(log_probs)
        chosen.append(word)
        chosen_log_probs.append(log_probs.gather(1, word[:, None])[:, 0])
        score = score + torch.where(done, 0.0, chosen_log_probs[-1])
        has_stopped = prompts.is_stop_word(word, position) & ~done
        length = torch.where(has_stopped, position - prompts.lengths, length)
        done = done | has_stopped | (position - prompts.lengths + 1 >= prompts.max_new_words)
        if bool(done.all()):
            break
        decoder.step(word)
    ids, log_probs = torch.stack(chosen, 1), torch.stack(chosen_log_probs, 1)
    return _extract_new_words(ids, prompts, length), score, _extract_new_words(log_probs, prompts, length)


def beam_search(decoder: Decoder, prompts: Prompts, beams: int, penalty: float) -> DecodedWords:
    """Beam search: find the new words of each row with the best `log P / ((5 + n) / 6)^penalty`, and their `log P`."""
    # Wu et al. 2016, equation 14. log P only decreases with more words and the penalty only increases, so the score of
    # a live beam is at most log P / penalty(max_new_words). If this bound does not exceed the best ended beam, the row
    # is done. At the first step all beams of a row are equal, so only beam 0 has a finite score.
    batch, states = decoder.log_probs.shape
    decoder.repeat(beams)
    device, first = prompts.ids.device, prompts.min_length
    score = torch.full((batch, beams), -torch.inf, dtype=decoder.log_probs.dtype, device=device)
    score[:, 0] = 0.0
    words = torch.zeros(batch, beams, prompts.max_length - first, dtype=torch.long, device=device)
    word_log_probs = torch.zeros(words.shape, dtype=score.dtype, device=device)
    best = torch.full((batch,), -torch.inf, dtype=score.dtype, device=device)
    ended_log_probs = word_log_probs[:, 0].clone()
    ended, total, length = words[:, 0].clone(), best.clone(), torch.zeros_like(prompts.lengths)
    done = torch.zeros(batch, dtype=torch.bool, device=device)
    start = torch.arange(batch, device=device)[:, None] * beams

    def offer(rows: Tensor, scores: Tensor, n: Tensor, stop_length: int) -> None:
        """Update the best ended beam of each row with ended beams `[batch, beams]` of n words."""
        nonlocal best, ended, ended_log_probs, total, length
        value, beam = (scores / _length_penalty(n, penalty)[:, None]).max(1)
        better = rows & (value > best)
        best = torch.where(better, value, best)
        total = torch.where(better, scores.gather(1, beam[:, None])[:, 0], total)
        at = torch.arange(batch, device=device), beam
        ended = torch.where(better[:, None], words[at], ended)
        ended_log_probs = torch.where(better[:, None], word_log_probs[at], ended_log_probs)
        length = torch.where(better, n - stop_length, length)

    for position in range(first, prompts.max_length):
        n = position - prompts.lengths + 1
        live = ~done & (n >= 1)
        log_probs = prompts.force_prompt_words(decoder.log_probs.reshape(batch, beams, states), position)
        reached = score[:, :, None] + log_probs
        if prompts.stop_id is not None:
            offer(live, reached[:, :, prompts.stop_id], n, 1)
            reached[:, :, prompts.stop_id].masked_fill_((n >= 1)[:, None], -torch.inf)
        score, flat = reached.flatten(1).topk(beams, 1)
        parent, word = flat // states, flat % states
        words = words.gather(1, parent[:, :, None].expand_as(words))
        words[:, :, position - first] = word
        word_log_probs = word_log_probs.gather(1, parent[:, :, None].expand_as(words))
        word_log_probs[:, :, position - first] = log_probs.flatten(1).gather(1, flat)
        offer(live & (n == prompts.max_new_words), score, n, 0)
        bound = score[:, 0] / _length_penalty(n.clamp(min=prompts.max_new_words), penalty)
        done = done | (n >= prompts.max_new_words) | (bound <= best)
        if bool(done.all()):
            break
        rows = (start + parent).flatten()
        if not bool((rows == torch.arange(len(rows), device=device)).all()):
            decoder.reorder(rows)
        decoder.step(word.flatten())
    return _extract_new_words(ended, prompts, length), total, _extract_new_words(ended_log_probs, prompts, length)


def _length_penalty(n: Tensor, penalty: float) -> Tensor:
    """The length penalty, `((5 + n) / 6)^penalty`."""
    return ((5 + n.clamp(min=0)).to(torch.float64) / 6) ** penalty


def _extract_new_words(chosen: Tensor, prompts: Prompts, length: Tensor) -> list[list[Any]]:
    """Select the new words of each row, or their numbers, from the words chosen after the shortest prompt."""
    skip = (prompts.lengths - prompts.min_length).tolist()
    return [row[a : a + n] for row, a, n in zip(chosen.tolist(), skip, length.tolist(), strict=True)]


def create_sampler(temperature: float, top_k: int | None, top_p: float | None, generator: torch.Generator) -> Sampler:
    """Create a function that samples a word from `P^(1/temperature)`, restricted by `top_k` and `top_p`."""
    # Nucleus sampling (Holtzman et al. 2020): keep the smallest set of likeliest words with probability >= top_p. So a
    # word is removed if the words before it already have a total probability of top_p.
    temperature = min(max(temperature, MIN_TEMPERATURE), 1 / MIN_TEMPERATURE)

    def sample_word(log_probs: Tensor) -> Tensor:
        tempered = ((log_probs - log_probs.amax(-1, keepdim=True)) / temperature).log_softmax(-1)
        if top_k is not None and top_k < tempered.shape[-1]:
            kth = tempered.topk(top_k, -1).values[:, -1:]
            tempered = tempered.masked_fill(tempered < kth, -torch.inf).log_softmax(-1)
        if top_p is not None:
            ordered, order = tempered.sort(-1, descending=True)
            before = ordered.exp().cumsum(-1) - ordered.exp()
            past = (before >= top_p) & (before > 0)  # never the likeliest word, however small top_p is
            tempered = tempered.masked_fill(past.gather(1, order.argsort(-1)), -torch.inf)
        return torch.multinomial(tempered.softmax(-1), 1, generator=generator)[:, 0]

    return sample_word


# --------------------------------------------------------------------------------------------------------------------
# Ancestral samples of nets that generate their words: choices, then words, each of which is the input of the next.


def sample_words(network: Network, n: int, words: object, start: object, seed: int) -> Samples:
    """Draw the latent choices and the words of sentences from the joint distribution of a net.

    Args:
        network: A net whose readout predicts the next word.
        n: The number of samples.
        words: The number of words of each sentence, without the start word.
        start: The word before the first word; by default the start word of the tokenizer.
        seed: The seed of the random numbers.

    Returns:
        The samples of the choices and of the readouts: `y_0` is the word after the start word.
    """
    length = check_int("words", words)
    try:
        task = infer_trainable_task(network, is_generation=True)
        readout, stack = find_next_word_readout(task)
    except BNetError as error:
        expected = "a net that generates its words: without an input node, or with a readout of the next word"
        hint = "Use net.sentence(...).sample(n), which samples the random nodes of a sentence with these inputs"
        raise BNetError(
            "sample", expected=expected, actual=error.parts.get("actual") or str(error), hint=hint
        ) from error
    if len(task.stacks) > 1:
        given = ", ".join(repr(name) for name in task.stacks if name != stack)
        hint = "Use net.generate(sentences, method='sample', choices='draw')"
        raise BNetError("sample", expected="a net with one stack", actual=f"given words of {given}", hint=hint)
    if start is None and network.tokenizer is not None:
        start = network.tokenizer.start_token_id
    if start is not None and not isinstance(start, str | int | np.integer):
        raise BNetError("start", expected="a word or its id", actual=start)
    if start is None:
        raise BNetError("start", expected="the word before the first word, because the net has no start word")
    check_memory("sample", 8 * n * (length + 1), "a smaller n= or words=")
    prompts = [[task.encoders[stack].id(start)]] * n
    choices = "draw" if task.has_choices else "sum"
    result = generate(network, prompts, method="sample", length=length, choices=choices, seed=seed)
    states: dict[str, Tensor] = {}
    labels: dict[str, tuple[str, ...]] = {}
    ground = GroundGraph(network.graph, {stack: length})
    for name, value in {**result.states, readout.group.name: torch.tensor(result.ids)}.items():
        spec = network.get_spec(name)
        names = list(ground.iter_names(spec.group))
        states |= dict(zip(names, value.reshape(n, -1).unbind(1), strict=True))
        node_labels = getattr(spec.tpm, "labels", None)
        if node_labels is None and spec is readout:
            node_labels = network.vocabularies.get(stack)
        labels |= {} if node_labels is None else dict.fromkeys(names, tuple(node_labels))
    groups = [network.get_spec(name).group for name in (*result.states, readout.group.name)]
    return Samples(states, n, labels, result.texts, count_words(ground, groups))
