"""Ancestral samples of nets that generate their words: choices, then words, each of which is the input of the next."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from bnet_transformer._core.checks import check_int
from bnet_transformer.data.task import infer_trainable_task
from bnet_transformer.declare import Network
from bnet_transformer.errors import BNetError
from bnet_transformer.graph import GroundGraph
from bnet_transformer.inference import Samples
from bnet_transformer.inference.sampling import count_words
from bnet_transformer.learning.training.generate import generate
from bnet_transformer.learning.training.incremental_decoding import find_next_word_readout


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
