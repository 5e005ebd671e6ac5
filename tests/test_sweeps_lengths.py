"""Sweeps of sentences of unequal lengths, and metrics of roles and of the last word."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

import bnet_transformer as bt
from bnet_transformer.interventions import Mean, Swap, Zero
from tests.cases import CASES, Case, close

VOCABULARY = ["the", "cat", "dog", "sat", "ran"]
CLEAN = ["the cat sat", "the cat", "the cat sat the cat", "cat sat the"]
CORRUPT = ["the dog ran", "the dog", "the dog sat the dog", "dog sat the"]
HEADS = ("slice", "head")


def build_pairs(**options: Any) -> tuple[list[bt.Sentence], list[bt.Sentence]]:
    """Pairs of sentences of 2, 3 and 5 words of a small decoder in float64."""
    options = {"dim": 8, "heads": 2, "slices": 2, "vocabulary": VOCABULARY, **options}
    net = bt.decoder(**options).to(torch.float64)
    return [net.sentence(text) for text in CLEAN], [net.sentence(text) for text in CORRUPT]


def last_word(y: torch.Tensor) -> torch.Tensor:
    """The log odds of two words after the last word."""
    return y[:, -1, 1] - y[:, -1, 2]


@pytest.mark.parametrize(
    "options",
    [
        {"at": "a", "over": HEADS},
        {"at": "a", "over": HEADS, "direction": "noise"},
        {"at": "a", "over": HEADS, "method": bt.Gradient(check=2)},
        {"at": ["x", "v"], "over": HEADS},
        {"at": ["a_0_1", "a_1_*_*"]},
        {"at": {"first": ["a_0_0_*", "v_0_1"], "second": ["x_1"]}},
        {"at": "v -> a", "over": HEADS},
        {"at": "edges"},
    ],
    ids=str,
)
def test_examples_of_unequal_lengths_have_the_effects_of_single_sweeps(options: dict[str, Any]) -> None:
    clean, corrupt = build_pairs()
    result = bt.sweep(clean, corrupt, metric={"y_-1": ("cat", "dog")}, progress=False, **options)
    for k, (one, other) in enumerate(zip(clean, corrupt, strict=True)):
        metric = {f"y_{len(one.words) - 1}": ("cat", "dog")}
        single = bt.sweep(one, other, metric=metric, progress=False, **options)
        assert single.names == result.names and single.axes == result.axes
        close(result.effects[..., k], single.effects[..., 0])
        close(torch.stack([result.clean, result.corrupt])[:, k], torch.cat([single.clean, single.corrupt]))


@pytest.mark.parametrize("direction", ["denoise", "noise"])
def test_subspaces_of_sentences_of_unequal_lengths(direction: str) -> None:
    clean, corrupt = build_pairs()
    options: dict[str, Any] = {"at": "a", "over": HEADS, "metric": {"y_-1": ("cat", "dog")}, "direction": direction}

    def swap(one: Any, other: Any) -> tuple[Any, Any]:
        return (Swap(one, [0, 2]), other) if direction == "denoise" else (one, Swap(other, [0, 2]))

    result = bt.sweep(*swap(clean, corrupt), progress=False, **options)
    for k, pair in enumerate(zip(clean, corrupt, strict=True)):
        close(result.effects[..., k], bt.sweep(*swap(*pair), progress=False, **options).effects[..., 0])


@pytest.mark.parametrize("source", [Zero(), "mean"], ids=str)
def test_ablations_of_unequal_lengths(source: Any) -> None:
    clean, _ = build_pairs()
    value = Mean([clean[2]]) if source == "mean" else source
    result = bt.sweep(value, clean, at="a", over=HEADS, metric=lambda y, examples: last_word(y))
    for k, s in enumerate(clean):
        for t in range(2):
            for h in range(2):
                y = f"y_{len(s.words) - 1}"
                ablated = [sentence.tpm(y).logits.log_softmax(-1) for sentence in (s.do({f"a_{t}_{h}_*": value}), s)]
                close(result.effects[t, h, k], (ablated[0] - ablated[1])[1] - (ablated[0] - ablated[1])[2])


def test_states_of_a_list_belong_to_their_examples() -> None:
    clean, corrupt = build_pairs()
    words = ["cat", "sat", "ran", "the"]
    result = bt.sweep(clean, corrupt, at="a", over=HEADS, metric={"y_-1": (words, "dog")})
    for k, (one, other) in enumerate(zip(clean, corrupt, strict=True)):
        metric = {f"y_{len(one.words) - 1}": (words[k], "dog")}
        close(
            result.values.new_tensor(result.effects[..., k].tolist()),
            bt.sweep(one, other, at="a", over=HEADS, metric=metric).values,
        )
    arrays = {"y_-1": (np.array([1, 3, 4, 0]), torch.tensor(2))}
    close(bt.sweep(clean, corrupt, at="a", over=HEADS, metric=arrays).values, result.values)
    for metric in ({"y_-1": words[:2]}, {"y_-1": ("dog", words[:1])}, {"y_-1": np.array([1, 3])}):  # 2 of 3 words
        with pytest.raises(bt.BNetError, match="a list of 4, one for each example"):
            bt.sweep(clean, corrupt, at="a", over=HEADS, metric=metric)


def test_means_over_sentences_of_other_lengths() -> None:
    """Longer sentences give their first words; shorter ones are an error that names their length."""
    clean, corrupt = build_pairs()
    long, short, s = clean[2], clean[1], corrupt[0]
    result = bt.sweep(Mean([long, clean[0]]), s, at="a", metric={"y_2": "cat"})
    for name in ("a_0_1_1", "a_1_0_2"):
        single = s.do({name: (long[name] + clean[0][name]) / 2})
        close(result.outcomes[result.index_of(name)], single.tpm("y_2").logits.log_softmax(-1)[None, 1])
    for direction in ("denoise", "noise"):
        sides = [Mean([long, short]), s][:: 1 if direction == "denoise" else -1]
        for over in (None, HEADS):
            with pytest.raises(bt.EvidenceError, match="of 2 words"):
                bt.sweep(*sides, at="a", over=over, metric={"y_2": "cat"}, direction=direction)


@pytest.mark.parametrize("options", [{}, {"memory": 1}, {"method": bt.Gradient()}, {"direction": "noise"}], ids=str)
@pytest.mark.parametrize("order", [(0, 1, 2, 3), (0, 3), (1, 0, 3)], ids=str)
def test_functions_receive_the_indices_of_their_examples(options: dict[str, Any], order: tuple[int, ...]) -> None:
    """Compared with one pair at a time, whose label is a constant."""
    clean, corrupt = ([side[k] for k in order] for side in build_pairs())
    labels = torch.tensor([1, 3, 4, 0])[: len(order)]

    def read(y: torch.Tensor, examples: torch.Tensor) -> torch.Tensor:
        return y[torch.arange(len(y)), -1, labels[examples]]

    result = bt.sweep(clean, corrupt, at="a", over=HEADS, metric=read, progress=False, **options)
    for k, pair in enumerate(zip(clean, corrupt, strict=True)):
        single = bt.sweep(*pair, at="a", over=HEADS, metric=lambda y, k=k: y[:, -1, labels[k]], **options)
        close(result.effects[..., k], single.effects[..., 0])
    if len({len(s.words) for s in clean}) > 1:
        for metric in (lambda y: y[:, -1, 0], 3):
            with pytest.raises(bt.BNetError, match="examples"):
                bt.sweep(clean, corrupt, at="a", over=HEADS, metric=metric, **options)


def test_circuits_and_mediations_pass_the_indices_of_their_examples() -> None:
    clean, corrupt = ([side[0], side[3], side[0]] for side in build_pairs())
    labels = torch.tensor([1, 3, 4])

    def read(y: torch.Tensor, examples: torch.Tensor) -> torch.Tensor:
        return y[torch.arange(len(y)), -1, labels[examples]]

    options: dict[str, Any] = {"edges": "* -> *", "at": "edges"}
    for edges in (options, {"edges": "* -> *"}):
        result = bt.circuit(clean, corrupt, metric=read, **edges)
        singles = [
            bt.circuit(*pair, metric={"y_2": VOCABULARY[label]}, **edges)
            for *pair, label in zip(clean, corrupt, labels.tolist(), strict=True)
        ]
        close(result.clean, torch.cat([single.clean for single in singles]))
        close(result.corrupt, torch.cat([single.corrupt for single in singles]))
    for metric in (read, {"y_2": [VOCABULARY[label] for label in labels]}):
        result = bt.circuit(clean, corrupt, metric=metric, **options)
        with pytest.raises(bt.BNetError, match="metric"):  # the labels are those of other pairs
            result.run(clean[::-1], corrupt[::-1])
    swapped = result.run(clean[::-1], corrupt[::-1], metric={"y_2": [VOCABULARY[label] for label in labels.flip(0)]})
    close(swapped.clean, result.clean.flip(0))
    through = bt.mediation(clean, corrupt, through="a", metric=read)
    for k, label in enumerate(labels.tolist()):
        single = bt.mediation(clean[k], corrupt[k], through="a", metric={"y_2": VOCABULARY[label]})
        close(through.direct_outcomes[..., k], single.direct_outcomes[..., 0])


def test_pairs_must_have_equal_lengths() -> None:
    clean, corrupt = build_pairs()
    with pytest.raises(bt.BNetError, match=r"corrupt\[0\]"):
        bt.sweep(clean, corrupt[1:] + corrupt[:1], at="a", over=HEADS, metric={"y_-1": "cat"})


def test_mediation_and_explain_take_unequal_lengths() -> None:
    clean, corrupt = build_pairs()
    options = {"metric": {"y_-1": "cat"}, "over": HEADS}
    result = bt.mediation(clean, corrupt, through="a", **options)
    single = bt.mediation(clean[2], corrupt[2], through="a", **options)
    close(result.direct_outcomes[..., 2], single.direct_outcomes[..., 0])
    route = bt.explain("sweep", clean, corrupt, at="a", **options)
    assert route == bt.explain("sweep", [clean[2]], [corrupt[2]], at="a", **options)


def has_discrete_words(case: Case) -> bool:
    """True for a net with a discrete node at each word."""
    return any(s.tpm.kind == "discrete" and s.group.word_stack is not None for s in case.net.network.specs)


@pytest.mark.parametrize("case", [case for case in CASES if has_discrete_words(case)][::2], ids=lambda case: case.name)
def test_the_metric_of_a_role_is_the_mean_over_its_nodes(case: Case) -> None:
    """Compared with the metric as a function of the same nodes, for readouts with words of every net."""
    s = case.sentence
    graph = s.net.network.graph
    specs = [spec for spec in s.net.network.specs if spec.group.word_stack is not None and spec.tpm.kind == "discrete"]
    specs = [spec for spec in specs if not graph.out_edges[spec.group.index] and spec.tpm.states]
    if not specs:
        return
    spec = specs[-1]
    names = [s.ground.name(node) for node in s.ground.select_nodes(spec.group).tolist()]
    roles = [item.group.stem for item in s.net.network.specs if not item.tpm.is_random and item.tpm.kind != "input"]
    at = roles[-1] if roles else spec.group.stem

    def run(metric: object) -> torch.Tensor | str:
        try:
            return bt.sweep(Zero(), s, at={"all": [at]}, metric=metric, progress=False).outcomes
        except bt.BNetError as error:
            return type(error).__name__

    singles = [run({name: 0}) for name in names]
    of_role = run({spec.group.stem: 0})
    if any(isinstance(value, str) for value in singles):
        assert isinstance(of_role, str)
        return
    close(of_role, torch.stack(singles).mean(0))
    last = run({f"{names[-1].rpartition('_')[0]}_-1": 0})
    close(last, singles[-1])
