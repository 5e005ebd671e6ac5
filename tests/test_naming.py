"""Node names: formatting and parsing are inverse, bad roles raise errors, reaches match their definitions."""

import keyword

import numpy as np
import pytest
from hypothesis import given, settings, strategies as st

from bnet_transformer._core.naming import (
    KINDS_WITH_WIDTH,
    REACH_KINDS,
    Reach,
    as_reach,
    find_role_fault,
    join_name,
    join_stem,
    split_name,
)
from bnet_transformer.errors import BNetError

roles = st.from_regex(r"[A-Za-z][A-Za-z0-9_]{0,8}", fullmatch=True).filter(lambda role: find_role_fault(role) is None)


@settings(max_examples=30)
@given(stack=st.just("") | roles, role=roles, indices=st.lists(st.integers(0, 10**6), max_size=4))
def test_names_parse_back(stack, role, indices):
    stem = join_stem(stack, role)
    assert split_name(join_name(stem, indices)) == (stem, tuple(indices))
    name = join_name(stem, indices)
    assert name.isidentifier() and not keyword.iskeyword(name)


@given(st.text(max_size=30))
def test_any_text_splits_into_itself(text):
    stem, indices = split_name(text)
    assert join_name(stem, indices) == text


@pytest.mark.parametrize("name", ["x_01_2", "x_1_", "x__1", "x_1.5", "x_١"])
def test_near_names_do_not_parse_as_ground_names(name):
    assert split_name(name)[0] != "x"


@pytest.mark.parametrize("role", ["x_1", "1x", "", "x-y", "lambda", "match", "enc", "x_", "é", 3, "a b"])
def test_bad_roles_are_refused(role):
    assert find_role_fault(role, stacks=["enc"]) is not None


@pytest.mark.parametrize("kind", [kind for kind in REACH_KINDS if kind not in (*KINDS_WITH_WIDTH, "mask")])
def test_reach_matrices_against_their_definition(kind):
    rule = {
        "same": lambda i, j: i == j,
        "every": lambda i, j: True,
        "causal": lambda i, j: j <= i,
        "earlier": lambda i, j: j < i,
        "before": lambda i, j: j == i - 1,
        "after": lambda i, j: j == i + 1,
        "rest": lambda i, j: i == j and i > 0,
        "first": lambda i, j: j == 0,
        "last": lambda i, j: j == 3,
    }[kind]
    reach = Reach(kind)
    matrix = reach.matrix(4, 4)
    assert matrix.tolist() == [[rule(i, j) for j in range(4)] for i in range(4)]
    assert reach.is_single == bool((matrix.sum(1) <= 1).all())
    if kind != "first":
        assert reach.is_causal == bool(~np.triu(matrix, 1).any())
    assert reach.is_strictly_causal == bool(~np.triu(matrix).any())


@settings(max_examples=30)
@given(st.integers(1, 6), st.integers(1, 6), st.integers(0, 3))
def test_empty_reads_agree_with_the_table(children, parents, width):
    is_square = children == parents
    plain = [
        kind
        for kind in REACH_KINDS
        if kind not in (*KINDS_WITH_WIDTH, "mask") and (is_square or kind not in ("same", "rest"))
    ]
    kinds = [*map(Reach, plain), *(Reach(kind, width) for kind in KINDS_WITH_WIDTH)]
    for reach in [*kinds, as_reach(np.tri(children, parents, width - 2, dtype=bool))]:
        empty = np.flatnonzero(~reach.matrix(children, parents).any(1))
        assert reach.first_empty_row(children, parents) == (int(empty[0]) if len(empty) else None), reach


@given(st.integers(0, 5), st.integers(1, 6))
def test_window(width, n):
    matrix = Reach("window", width).matrix(n, n)
    assert matrix.tolist() == [[abs(i - j) <= width for j in range(n)] for i in range(n)]
    recent = Reach("recent", width)
    assert recent.matrix(n, n).tolist() == [[0 <= i - j <= width for j in range(n)] for i in range(n)]
    assert (
        recent.is_causal
        and not recent.is_strictly_causal
        and not recent.is_single
        and str(recent) == f"recent({width})"
    )


def test_a_mask_is_its_table():
    table = np.array([[True, False], [True, True]])
    reach = as_reach(table)
    assert (reach.matrix(2, 2) == table).all() and reach.is_causal and not reach.is_strictly_causal
    with pytest.raises(BNetError, match="2 words that read 2"):
        reach.matrix(3, 3)


BAD = ["nonsense", "window", "recent", [[1, 0], [0, 1]], [True, False], 3.5, object(), [[True], []]]


@pytest.mark.parametrize("value", BAD)
def test_bad_reaches_are_refused(value):
    with pytest.raises(BNetError):
        as_reach(value)


@settings(max_examples=50)
@given(st.data())
def test_counting_arrows_makes_no_table_of_them(data):
    kind = data.draw(st.sampled_from([kind for kind in REACH_KINDS if kind != "mask"]))
    children, parents = (data.draw(st.integers(1, 7)) for _ in range(2))
    parents = children if kind in ("same", "rest") else parents
    reach = Reach(kind, data.draw(st.integers(0, 4)) if kind in KINDS_WITH_WIDTH else 0)
    i, j = (np.array(sorted(data.draw(st.sets(st.integers(0, n - 1))))) for n in (children, parents))
    i, j = i.astype(np.int64), j.astype(np.int64)
    assert reach.count_arrows(i, j, children, parents) == reach.matrix(children, parents)[np.ix_(i, j)].sum()
