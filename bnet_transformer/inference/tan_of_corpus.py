"""The tree of words over a corpus of sentences: their classes, and the word that each word reads most."""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from typing import Any

import numpy as np
from torch import Tensor

from bnet_transformer import asking
from bnet_transformer._core.distributed import device_of, ranks
from bnet_transformer.errors import BNetError
from bnet_transformer.inference.corpus_tan import CorpusTan, corpus_tan
from bnet_transformer.inference.joint_posterior import joint_posterior
from bnet_transformer.inference.rollout import reads
from bnet_transformer.inference.sentence_state import SentenceState
from bnet_transformer.tpm.arrays import own_tensor


def tan_of_corpus(
    states: Sequence[SentenceState], classes: object, slice_: int, head: int | None, role: str | None
) -> CorpusTan:
    """The TAN of sentences of one length: boxes are words, and the code of a word is the word that it reads most.

    Args:
        states: The sentences; ranks share them.
        classes: A label for each sentence, or a discrete node: the class is its most probable state given the
            evidence of the sentence, and counts as evidence itself.
        slice_: The slice that reads.
        head: The head that reads; all on average where None.
        role: The role that reads.

    Raises:
        BNetError: The sentences differ in length, one has no evidence for its class, or labels are missing.
    """
    network = states[0].network if states else None
    if network is None or len({len(s.tokens[_slices(s, slice_, role)[0]]) for s in states}) != 1:
        raise BNetError("sentences", expected="sentences of one length, at least one", got="others, or none")
    node = classes if isinstance(classes, str) else None
    if node is not None and not all(state.evidence for state in states):
        wanted = f"evidence (observe) on each sentence, for {classes} is its class"
        raise BNetError("sentences", expected=wanted, got="one without", allowed="classes=, a list of labels")
    labels = _labels(classes, len(states)) if node is None else [None] * len(states)
    with ranks(device_of(None, network)) as here:
        data = [(state.encoded.given, state.evidence) for state in states]
        here.assert_same("tan of a corpus", net=network, data=data, settings=(labels, node, slice_, head, role))
        shard = here.shard([*zip(states, labels, strict=True)])
        every = here.all_gather_object([_class_and_codes(s, node, label, slice_, head, role) for s, label in shard])
    rows = [every[k % len(every)][k // len(every)] for k in range(len(states))]
    if node is not None:  # labels that a user gave stay this rank's own objects
        labels = [label for label, _ in rows]
    number = {label: k for k, label in enumerate(dict.fromkeys(labels))}
    table = np.array([codes for _, codes in rows])
    boxes = [f"word_{i}" for i in range(table.shape[1])]
    return corpus_tan([number[label] for label in labels], table, boxes)


def _slices(state: SentenceState, slice_: int, role: str | None) -> tuple[str, list[int]]:
    return asking.slices_that_read(state.network, slice_, role)


def _class_and_codes(
    state: SentenceState, node: str | None, label: Hashable, slice_: int, head: int | None, role: str | None
) -> tuple[Hashable, list[int]]:
    """The class of a sentence, and the word that each of its words reads most."""
    if node is not None:
        number = state.ground.id(node)
        asking.must_be_discrete(state.world, number)
        label = int(joint_posterior(state.query([number])).argmax())
        state = state if number in state.evidence else state.with_evidence({node: label})
    stack, slices = _slices(state, slice_, role)
    options: dict[str, Any] = {"role": role, "residual": 0.0, "head": head, "method": "rollout"}
    result = reads(state.query(), state.tokens[stack], slices, **options)
    codes: list[int] = result.matrix.argmax(-1).tolist()
    return label, codes


def _labels(classes: object, count: int) -> list[Hashable]:
    """A label for each sentence, from a list, an array or a tensor of them."""
    try:
        values = (own_tensor(classes) if isinstance(classes, Tensor) else classes).tolist()  # type: ignore[attr-defined]
    except (TypeError, AttributeError):
        values = classes
    entries: list[Any] = list(values) if isinstance(values, Sequence) and not isinstance(values, str) else []
    labels = [entry.item() if isinstance(entry, Tensor | np.generic) else entry for entry in entries]
    if len(labels) != count:
        raise BNetError("classes", expected=f"{count} labels, or a discrete node", got=classes)
    for label in labels:
        if not isinstance(label, str | int | float) or label != label:
            raise BNetError("classes", expected="labels that are names or numbers", got=label)
    return labels
