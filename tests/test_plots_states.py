"""Plots of states over the words show the states, their labels and their probabilities, for any length."""

import numpy as np
import pytest
import torch
from matplotlib.colors import to_hex

import bnet_transformer as bt
from bnet_transformer.figures.picture import HEAD_COLOURS
from bnet_transformer.inference import GroupPosterior, GroupStates, RankedStates
from tests.cases import get_case
from tests.test_plots import HOSTILE, get_cells, get_ticks, render

BLUE, ORANGE, GREEN = HEAD_COLOURS["light"][:3]


def make_states(paths, labels=None, num_states=3):
    """Return the result of a chain with these k paths."""
    states = torch.tensor(paths)
    k, n = states.shape
    names = tuple(f"c_0_{i}" for i in range(n))
    group = GroupStates("c_0", names, states, torch.ones(n, dtype=torch.bool), num_states, labels, "")
    log_probs = -torch.arange(1.0, k + 1).double()
    return RankedStates(names, states, log_probs, 0.0, (group,), {"": tuple(f"w{i}" for i in range(n))})


def get_texts(ax):
    return [text.get_text() for text in ax.texts]


def get_rectangles(ax):
    """Return (left, right, middle, colour) of each cell."""
    rectangles = []
    for collection in ax.collections:
        for path, colour in zip(collection.get_paths(), collection.get_facecolors(), strict=True):
            (x0, y0), (x1, y1) = path.vertices.min(0), path.vertices.max(0)
            rectangles.append((round(x0 + 0.1), round(x1 - 0.1), (y0 + y1) / 2, to_hex(colour)))
    return rectangles


def test_cells_have_colours_and_labels_of_their_states():
    ax = bt.plot(make_states([[0, 1, 1, 2], [0, 1, 0, 2]], labels=("a", "b", "c"))).axes[0]
    assert [colour for *_, colour in get_rectangles(ax)][:4] == [BLUE, ORANGE, ORANGE, GREEN]
    assert [text for text in get_texts(ax) if text in "abc"] == list("abbcabac")
    assert get_ticks(ax) == ["w0", "w1", "w2", "w3"] and ax.get_legend() is None
    # In the second row only the state that differs has its full colour.
    second = [colour for _, _, y, colour in get_rectangles(ax) if round(y) == 1]
    assert second[2] == BLUE and not {BLUE, ORANGE, GREEN} & {*second[:2], second[3]}
    assert {"−1.00", "0.368", "−2.00", "0.135"} <= {*get_texts(ax)}


def test_a_long_sentence_has_bands_of_equal_states_and_a_legend():
    path = [0] * 300 + [1] + [2] * 599
    other = [0] * 300 + [2] * 600
    figure = bt.plot(make_states([path, other], labels=("noun", "verb", "other")))
    ax = figure.axes[0]
    bands = get_rectangles(ax)
    assert [(left, right) for left, right, y, _ in bands if round(y) == 0] == [(0, 299), (300, 300), (301, 899)]
    assert [colour for *_, y, colour in bands if round(y) == 0] == [BLUE, ORANGE, GREEN]
    assert [colour == GREEN for *_, y, colour in bands if round(y) == 1] == [False, True, False]
    assert [text.get_text() for text in ax.get_legend().get_texts()] == ["0 = noun", "1 = verb", "2 = other"]
    assert get_texts(ax)[9:11] == ["0", "2"] and len(get_ticks(ax)) < 12
    assert len(render(figure, "svg")) < 60_000


@pytest.mark.parametrize("name", ["two selectors", "slice, codebook", "word, codebook", "sites", "three stacks"])
def test_each_explained_node_has_a_cell_with_its_state(name):
    case = get_case(name)
    result = case.sentence.most_probable(case.evidence, count=2)
    figure = bt.plot(result, theme="dark")
    texts = [text for ax in figure.axes for text in get_texts(ax)]
    cells = [text.rpartition(" = ")[2] for text in texts[9:]]  # after the ranks and their probabilities
    expected = [label for node in result.nodes for label in result.labels(node)]
    assert sorted(cells) == sorted(expected)
    assert sum(len(get_rectangles(ax)) for ax in figure.axes) == len(expected)


def test_observed_nodes_are_grey_and_nodes_without_words_are_above_the_words():
    s = get_case("word").sentence.observe(c_0_1=2)
    figure = bt.plot(s.most_probable())
    assert get_rectangles(figure.axes[0])[1][3] == "#d9dce1"
    mixed = make_states([[0, 1, 1, 2]])
    single = GroupStates("g", ("g",), torch.tensor([1]), torch.tensor(True), 2)
    both = RankedStates(("g",), torch.ones(1, 1), mixed.log_probs, 0.0, (single, *mixed.groups), mixed.tokens)
    ax = bt.plot(both).axes[0]
    assert get_texts(ax)[4:6] == ["g = 1", "0"] and get_rectangles(ax)[0][2] == 0 and get_ticks(ax, "y") == ["c_0"]


@pytest.mark.slow
def test_only_the_top_states_are_shown():
    result = get_case("word").sentence.most_probable({"y_0": 1}, count=20)
    assert "10" in get_texts(bt.plot(result).axes[0]) and "11" not in get_texts(bt.plot(result).axes[0])
    assert len(get_rectangles(bt.plot(result, top=2).axes[0])) == 6
    with pytest.raises(bt.BNetError, match="top"):
        bt.plot(result, top=0)


@pytest.mark.slow
def test_hostile_words_and_labels_are_drawn():
    result = make_states([list(range(len(HOSTILE)))], labels=HOSTILE, num_states=len(HOSTILE))
    for kind in ("png", "svg", "pdf"):
        assert render(bt.plot(RankedStates(**{**vars(result), "tokens": {"": HOSTILE}})), kind)


def test_posteriors_of_a_group_are_a_heat_map_of_states_by_words():
    s = get_case("word").sentence
    result = s.posteriors("c_0", {"y_1": 1})
    figure = bt.plot(result)
    np.testing.assert_allclose(get_cells(figure), result.probabilities.T)
    assert get_ticks(figure.axes[0]) == list(s.words) and get_ticks(figure.axes[0], "y") == ["0", "1", "2"]
    probs = torch.rand(2, 200, 3)
    long = GroupPosterior("c_0", probs, ("head", "word", "state"), {"word": ("w",) * 200})
    panels = bt.plot(long)
    np.testing.assert_allclose(get_cells(panels, 1), probs[1].T)
    assert [ax.get_title() for ax in panels.axes[:2]] == ["head 0", "head 1"] and "w" not in get_ticks(panels.axes[1])
    one = get_case("sprinkler").sentence.posteriors("rain", {"wet": 1})
    assert get_ticks(bt.plot(one).axes[0]) == ["no", "yes"]
