r"""The equations: those of the chapter, their forms, and those of reaches, slices and stacks."""

from __future__ import annotations

import re
from dataclasses import replace

import pytest
import torch

import bnet_transformer as bt
from bnet_transformer.equations import align_equations, equations, estimate_width
from bnet_transformer.errors import BNetError, UnknownNameError
from bnet_transformer.tpm import Add, Affine, Attention, Bilinear, Categorical, Dot, Normal, Score, Weight
from tests.cases import every
from tests.equation_nets import VECTOR, WORD, make_net, mixed, right

# the chapter


CHAPTER = {
    "c": r"P(c) = \pi_c",
    "W_v_t": r"P(W_v^t \mid c) = \delta(W_v^t, W_{v,c}^t)",
    "W_q_t": r"P(W_q^t \mid c) = \delta(W_q^t, W_{q,c}^t)",
    "W_k_t": r"P(W_k^t \mid c) = \delta(W_k^t, W_{k,c}^t)",
    "v_t": r"P(v_i^t \mid W_v^t, x_i^t) = \mathbb{I}(\, v_i^t = W_v^t x_i^t \,)",
    "q_t": r"P(q_i^t \mid W_q^t, x_i^t) = \mathbb{I}(\, q_i^t = W_q^t x_i^t \,)",
    "k_t": r"P(k_i^t \mid W_k^t, x_i^t) = \mathbb{I}(\, k_i^t = W_k^t x_i^t \,)",
    "x_(t+1)": r"P(x_i^{t+1} \mid q_i^t, k_.^t, v_.^t) = \mathbb{I}\Big(\, x_i^{t+1} = "
    r"\underbrace{\sum_{j \in \mathcal{S}} v_j^t \, \underbrace{\frac{e^{(q_i^t)^\top k_j^t}}"
    r"{\sum_{j' \in \mathcal{S}} e^{(q_i^t)^\top k_{j'}^t}}}_{P(j \mid i)}}_{\mathbb{E}_{j \mid i}[v_j^t]} \,\Big)",
}


def test_the_chapters_equations() -> None:
    rows = bt.bayesuvius(4, slices=6, heads=3).equations()
    assert {name: str(rows[name]) for name in CHAPTER} == CHAPTER
    assert [row.name for row in rows if row.name not in CHAPTER] == ["x_0"], (
        "one row for each template, not for each slice"
    )
    assert r"t = 0, \ldots, T-1, \quad T = 6" in str(rows)


@pytest.mark.parametrize(
    ("form", "linear", "attention"),
    [
        ("row", r"X^t (W_q^t)^\top", r"\operatorname{softmax}\left(\frac{Q^t (K^t)^\top}{\sqrt{4}}\right) V^t + X^t"),
        ("column", r"W_q^t X^t", r"V^t \operatorname{softmax}\left(\frac{(K^t)^\top Q^t}{\sqrt{4}}\right) + X^t"),
        (
            "einstein",
            r"(W_q^t)_{ab} X_{ib}^t",
            r"V_{ja}^t \operatorname{softmax}_j\left(\frac{1}{\sqrt{4}} Q_{ib}^t K_{jb}^t\right) + X_{ia}^t",
        ),
    ],
)
def test_the_forms_of_the_other_seeds(form: str, linear: str, attention: str) -> None:
    net = bt.bayesuvius(4, scale=None, residual=True)
    assert (right(net, "q_t", form), right(net, "x_(t+1)", form)) == (linear, attention)


def test_seed_000_is_a_softmax_over_queries_in_column_form() -> None:
    net = mixed(Attention(Bilinear(), over="queries"), bt.Node("A", Weight((4, 4))))
    assert (
        right(net, "x_(t+1)", "column") == r"X^t \operatorname{softmax}_{\text{queries}}\left((X^t)^\top A^t X^t\right)"
    )
    assert r"e" in right(net, "x_(t+1)") and "softmax over the queries" in right(net, "x_(t+1)")


MATRICES = {
    (Dot(), "keys", "row"): (r"Q^t (K^t)^\top", lambda q, k, A: q @ k.T),
    (Dot(), "keys", "column"): (r"(K^t)^\top Q^t", lambda q, k, A: (k @ q.T).T),
    (Dot(), "queries", "row"): (r"K^t (Q^t)^\top", lambda q, k, A: k @ q.T),
    (Dot(), "queries", "column"): (r"(Q^t)^\top K^t", lambda q, k, A: (q @ k.T).T),
    (Bilinear(), "keys", "row"): (r"Q^t A^t (K^t)^\top", lambda q, k, A: q @ A @ k.T),
    (Bilinear(), "keys", "column"): (r"(K^t)^\top (A^t)^\top Q^t", lambda q, k, A: (k @ A.T @ q.T).T),
    (Bilinear(), "queries", "row"): (r"K^t (A^t)^\top (Q^t)^\top", lambda q, k, A: k @ A.T @ q.T),
    (Bilinear(), "queries", "column"): (r"(Q^t)^\top A^t K^t", lambda q, k, A: (q @ A @ k.T).T),
}


@pytest.mark.parametrize(("score", "over", "form"), MATRICES)
def test_the_matrix_of_scores_is_what_the_tpm_computes(score: Score, over: str, form: str) -> None:
    """Each matrix formula, transcribed in torch, equals the attention TPM word by word."""
    formula, scores = MATRICES[score, over, form]
    extra = ["A"] if isinstance(score, Bilinear) else []
    arrows = ["q", every("k")] if over == "keys" else [every("q"), "k"]
    nodes = [bt.Node(role, Affine(4), ["x"], plates=WORD) for role in "qkv"] + [bt.Node("A", Weight((4, 4)))]
    tpm = Attention(score, over=over)
    net = make_net(*nodes, bt.Node("x", tpm, [*arrows, every("v"), *extra], plates=WORD)).to(torch.float64)
    softmax = r"\operatorname{softmax}" + ("" if over == "keys" else r"_{\text{queries}}")
    mixes = {"row": rf"{softmax}\left({formula}\right) V^t", "column": rf"V^t {softmax}\left({formula}\right)"}
    assert right(net, "x_(t+1)", form) == mixes[form]
    s = net.sentence("the cat sat")
    q, k, v, x = (torch.stack([s[f"{r}_{i}"] for i in range(3)]) for r in ("q_0", "k_0", "v_0", "x_1"))
    torch.testing.assert_close(scores(q, k, s["A_0"]).softmax(-1) @ v, x, rtol=1e-10, atol=1e-10)


# selectors, heads, codebooks


@pytest.mark.parametrize(
    ("options", "name", "expected"),
    [
        ({"per": "slice"}, "c_t", r"P(c^t) = \pi_{c^t}^t"),
        ({"per": "slice"}, "W_q_t", r"P(W_q^t \mid c^t) = \delta(W_q^t, W_{q,c^t}^t)"),
        ({"per": "word"}, "c_t", r"P(c_i^t) = \pi_{c_i^t}^t"),
        ({"per": "word"}, "q_t", r"P(q_i^{t,h} \mid W_q^{t,h}, x_i^t) = \mathbb{I}(\, q_i^{t,h} = W_q^{t,h} x_i^t \,)"),
        ({"atoms": 3}, "W_k_t", r"P(W_k^t = \text{atom } m \mid c) = \theta_{c,m}^{W_k,t}"),
        ({"atoms": 3, "per": "word"}, "m_q_t", r"P(m_{q,i}^t \mid c_i^t) = \theta_{c_i^t,m_{q,i}^t}^{m_q,t}"),
        ({"combine": "concat"}, "W_o_t", r"P(W_o^{t,h}) = \delta(W_o^{t,h}, \hat{W}_o^{t,h})"),
        ({"observe": Normal(0.5)}, "y", r"P(y_i \mid x_i^T) = \mathcal{N}\left(y_i;\; x_i^T,\; 0.5^2 I\right)"),
        (
            {"observe": Categorical(3)},
            "y",
            r"P(y_i \mid x_i^T) = \operatorname{softmax}\left(W^y x_i^T + b^y\right)_{y_i}",
        ),
        (
            {"observe": Categorical(3, pool="mean")},
            "y",
            r"P(y \mid x_.^T) = "
            r"\operatorname{softmax}\left(W^y \, \frac{1}{n} \sum_{j \in \mathcal{S}} x_j^T + b^y\right)_y",
        ),
    ],
)
def test_the_places_of_the_selector(options: dict[str, object], name: str, expected: str) -> None:
    assert str(bt.bayesuvius(4, **options).equations()[name]) == expected  # type: ignore[arg-type]


def test_a_word_reads_with_the_head_that_its_selector_picks() -> None:
    equation = bt.bayesuvius(4, per="word", mask="causal").equations("row")["x_(t+1)"]
    assert equation.left == r"P(X_{i:}^{t+1} \mid Q_{i:}^{t,.}, K^{t,.}, V^{t,.}, c_i^t)"
    assert r"Q_{i:}^{t,c_i^t} (K^{t,c_i^t})^\top + M_{i:}^{\mathrm{causal}}\right) V^{t,c_i^t}" in equation.right


def test_heads_are_summed() -> None:
    concat = bt.bayesuvius(4, combine="concat", residual=True)
    assert right(concat, "x_(t+1)") == r"\sum_{h} W_o^{t,h} a_i^{t,h} + x_i^t"
    assert right(concat, "x_(t+1)", "row") == r"\sum_{h} A^{t,h} (W_o^{t,h})^\top + X^t"
    assert right(concat, "x_(t+1)", "einstein") == r"(W_o^{t,h})_{ab} A_{ib}^{t,h} + X_{ia}^t"
    assert r"h \in \{0, 1\} \quad \text{(head)}" in concat.equations().where


# reaches


TABLE = ((True, False), (True, True))


@pytest.mark.parametrize(
    ("reach", "shown", "total", "mask"),
    [
        ("every", "x_.^t", r"j \in \mathcal{S}", None),
        ("causal", r"x_{\le i}^t", r"j \le i", r"M_{ij}^{\mathrm{causal}} = 0 \text{ if } j \le i"),
        ("earlier", "x_{<i}^t", "j < i", r"M_{ij}^{\mathrm{earlier}} = 0 \text{ if } j < i"),
        (
            bt.Reach("window", 2),
            "x_{i-2:i+2}^t",
            r"|j-i| \le 2",
            r"M_{ij}^{\mathrm{window}\,2} = 0 \text{ if } |j-i| \le 2",
        ),
        (
            bt.Reach("mask", table=TABLE),
            r"x_{\mathcal{M}_i}^t",
            r"j \in \mathcal{M}_i",
            r"M_{ij}^{\mathrm{mask}} = 0 \text{ if } j \in \mathcal{M}_i",
        ),
    ],
)
def test_a_sum_runs_over_the_words_that_the_mask_allows(
    reach: object, shown: str, total: str, mask: str | None
) -> None:
    net = mixed(Attention(), reach=reach)
    word, row, primed = net.equations()["x_(t+1)"], net.equations("row"), total.replace("j", "j'", 1)
    assert shown in word.left and rf"\sum_{{{total}}}" in word.right
    assert rf"\sum_{{{primed}}}" in word.right
    name = re.sub("_{ij}", "", mask.split(" = ")[0]) if mask else None
    assert (name is None) or f"+ {name}" in row["x_(t+1)"].right
    assert mask is None or any(line.startswith(mask) for line in row.where)


def test_single_reaches_name_the_word() -> None:
    nodes = [bt.Node("p", Add(), [bt.Arrow("x", reach)], plates=WORD) for reach in ("before", "first", "last")]
    expected = ["x_{i-1}^t", "x_0^t", "x_{n-1}^t"], ["X_{i-1,:}^t", "X_{0:}^t", "X_{n-1,:}^t"]
    for k, node in enumerate(nodes):
        net = make_net(node, bt.Node("x", Add(), ["p"], plates=WORD))
        assert (right(net, "p_t"), right(net, "p_t", "row")) == (expected[0][k], expected[1][k])
    assert "x_{-1} = 0" in make_net(nodes[0], bt.Node("x", Add(), ["p"], plates=WORD)).equations().where


# slices and stacks


def test_an_arrow_from_a_fixed_slice_and_from_another_stack() -> None:
    enc = bt.Stack([bt.Node("x", Affine(4), ["x"], plates=WORD)], [VECTOR], slices=3, name="enc")
    node = bt.Node("x", Attention(), ["x", every("enc.x"), every("enc.x")], plates=WORD)
    skip = bt.Node("skip", Add(), ["x", bt.Arrow("x", slice="first"), bt.Arrow("enc.x", "first", slice=1)], plates=WORD)
    dec = bt.Stack([skip, node], [VECTOR], slices=2, name="dec")
    rows = bt.BNet(bt.Declaration([enc, dec])).equations()
    assert rows["dec_skip_t"].right.endswith(
        r"= x_i^{\mathrm{dec},t} + x_i^{\mathrm{dec},0} + x_0^{\mathrm{enc},1} \,)"
    )
    assert r"\sum_{j \in \mathcal{S}_{\mathrm{enc}}} x_j^{\mathrm{enc},T_{\mathrm{enc}}}" in rows["dec_x_(t+1)"].right
    assert rows["enc_x_(t+1)"].right.endswith(
        r"= W^{x,\mathrm{enc},t+1} x_i^{\mathrm{enc},t} + b^{x,\mathrm{enc},t+1} \,)"
    )


def test_shared_parameters_have_no_slice() -> None:
    net = make_net(bt.Node("x", Affine(4), ["x"], plates=WORD, shared=True), slices=3)
    assert right(net, "x_(t+1)") == "W^x x_i^t + b^x"


def test_slices_that_differ_are_distinguished() -> None:
    network = make_net(bt.Node("x", Affine(4), ["x"], plates=WORD), slices=4).network
    last_spec = network.get_spec("x_4")
    first = network.get_spec("x_0").group.index
    changed = replace(last_spec, parents=(replace(last_spec.parents[0], index=first),))
    specs = tuple(changed if spec is last_spec else spec for spec in network.specs)
    rows = [row for row in equations(replace(network, specs=specs)) if row.name == "x_(t+1)"]
    assert [row.slices for row in rows] == [(0, 1, 2), (3,)]
    assert [row.left for row in rows] == [r"P(x_i^{t+1} \mid x_i^t)", r"P(x_i^{t+1} \mid x_i^0)"]
    assert str(rows[1]).endswith(r"\qquad (t = 3)")


# the result


def test_the_form_must_be_known() -> None:
    with pytest.raises(BNetError, match="allowed: 'word', 'row', 'column', 'einstein'"):
        bt.bayesuvius(4).equations("matrix")


def test_a_row_is_found_by_name() -> None:
    with pytest.raises(UnknownNameError, match="near matches are x_0, q_t"):
        _ = bt.bayesuvius(4).equations()["q_0"]


def test_rows_are_a_dictionary_by_name() -> None:
    equations = bt.encoder_decoder(8, heads=2, slices=2, vocabulary=["a"]).equations()
    assert dict(equations) == dict(equations.items()) == {row.name: row for row in equations.rows}
    assert equations.values() == tuple(equations[name] for name in equations.keys())  # noqa: SIM118
    by_name = dict(equations.items())
    for name in (*by_name, "z", "x"):
        assert (name in equations) == (name in by_name)
        assert equations.get(name) is by_name.get(name) and equations.get(name, 0) is by_name.get(name, 0)
    assert all(row in equations and row.name in equations for row in equations)


def test_wide_rows_are_broken_between_left_and_right() -> None:
    assert align_equations([("a", "b"), ("P(c)", "d")]) == ["a &= b", "P(c) &= d"]
    assert align_equations([("a", "b" * 30), ("c" * 70, "d" * 30)]) == [
        "a &= " + "b" * 30,
        "& " + "c" * 70,
        r"& \quad = " + "d" * 30,
    ]
    assert estimate_width(r"\frac{a + b}{c}") < estimate_width("a + b + c")
