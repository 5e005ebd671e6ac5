"""Sweeps of the scores of attention: rows and entries before the softmax, which normalises them again."""

import pytest
import torch

import bnet_transformer as bt
from bnet_transformer.reference import AttentionRow
from tests.cases import get_case
from tests.sweep_oracle import D, Oracle, forbid_shared_runs, get_outputs, get_refusal, make_metric, make_pair, set_rows
from tests.test_sweeps import READERS, check, close, make_net, make_sentences
from tests.test_sweeps_first_order import add_noise, check_effects

DOTS = {
    "concat": ("score", "a", "q", "k"),
    "vanilla decoder, causal": ("score", "a", "q", "k"),
    "vanilla encoder-decoder, pre-norm": ("dec_cross_score", "dec_cross_a", "dec_cross_q", "dec_cross_k"),
}


def set_score(role, index, word, queries, keys):
    """Set a row to the softmax of its scores `scale * q k`, where the score of one word is the clean one."""

    def patch(clean, corrupt):
        model = corrupt.model
        node = model.ground.id("_".join([role, *map(str, index)]))
        words, row = corrupt.attention(node)
        spec = model.spec(node)

        def compute_score(run, word):
            query, key = (
                run.value(model.ground.id("_".join([stem, *map(str, (*index[:-1], i))])))
                for stem, i in ((queries, index[-1]), (keys, word))
            )
            return key @ query * spec.tpm.score.get_scale(len(query))

        scores = {j: compute_score(corrupt, j) for j in words}
        close(torch.stack([*scores.values()]).softmax(0), row)
        scores[word] = compute_score(clean, word)
        weights = torch.zeros(model.ground.word_counts[model.network.get_source_stack(spec)], dtype=D)
        weights[list(scores)] = torch.stack([*scores.values()]).softmax(0)
        return {node: AttentionRow(weights)}

    return patch


@pytest.mark.parametrize("name", DOTS)
def test_entries_of_scores(name):
    """The row is normalised again, with the other scores of the run: by hand, from queries and keys."""
    role, *parts = DOTS[name]
    clean, corrupt = make_pair(get_case(name))
    names = get_outputs(corrupt)
    oracle = Oracle(clean, corrupt, tuple(names))
    axes = ("slice", "head", "word", "read")
    result = bt.sweep(clean, corrupt, at=role, over=axes, metric=make_metric(names))
    assert result.axes == axes
    cells = [*result.names]
    for cell in (cells[0], cells[len(cells) // 3], cells[-1]):
        *index, word = cell
        assert result.names[cell] == f"{role}_{'_'.join(map(str, index))}[{word}]"
        check(result, oracle, {cell: set_score(parts[0], index, word, *parts[1:])})


@pytest.mark.parametrize("name", READERS)
def test_rows_of_scores_are_rows_of_attention(name):
    """The softmax of the same scores; to first order the derivative by the scores, also of entries."""
    role = READERS[name][0].removesuffix("j") + "score"
    clean, corrupt = make_pair(get_case(name))
    query = {"metric": make_metric(get_outputs(corrupt))}
    rows = bt.sweep(clean, corrupt, at=READERS[name][0], **query)
    scores = bt.sweep(clean, corrupt, at=role, **query)
    close(scores.outcomes, rows.outcomes)
    both = bt.sweep(clean, corrupt, at=[READERS[name][0], role], over=("slice", "word"), **query)
    for item in both.parts:
        axes = both.part(item).axes
        close(both.part(item).outcomes, bt.sweep(clean, corrupt, at=item, over=axes, **query).outcomes)
    sides, over = (add_noise(corrupt), corrupt), (*scores.axes, "read")
    for axes in (scores.axes, over):
        exact = bt.sweep(*sides, at=role, over=axes, **query)
        check_effects(bt.sweep(*sides, at=role, over=axes, method=bt.Gradient(), **query), exact)


def test_scores_of_several_slices_are_those_of_the_patched_run():
    """A cell that sets an entry in both slices: after the first, the other scores of the second are others."""
    clean, corrupt = make_sentences(make_net(observe=bt.tpm.Categorical(3)))
    query = {"metric": make_metric(["y_0", "x_2_2"])}
    joined = bt.sweep(clean, corrupt, at="score", over=("head", "word"), **query)
    close(joined.outcomes, bt.sweep(clean, corrupt, at="j", over=("head", "word"), **query).outcomes)
    oracle = Oracle(clean, corrupt, ("y_0", "x_2_2"))
    nodes = [corrupt.ground.id(f"a_{t}_1_2") for t in range(2)]
    check(joined, oracle, {(1, 2): set_rows(nodes)})


def test_what_scores_are_not_set(monkeypatch):
    clean, corrupt = make_sentences(make_net(observe=bt.tpm.Categorical(3)))
    query = {"at": "score", "metric": {"y_2": 1}}
    forbid_shared_runs(monkeypatch)
    assert "scores cannot share a run" in get_refusal(bt.sweep, clean, corrupt, **query)
