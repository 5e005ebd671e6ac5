"""The reference: the chapter computed by hand, evidence and do by hand, and the laws of the nets."""

import itertools

import pytest
import torch

import bnet_transformer as bt
from bnet_transformer.tpm import Categorical
from tests.cases import CASES, Case, close, get_case, jitter

D = torch.float64
IDS = {"ids": lambda case: case.name}


def compute_state(net: bt.BNet, x: torch.Tensor, head: int, slices: int, scale: float = 1.0) -> torch.Tensor:
    """The chapter's equations for one head, in matrices."""
    for t in range(slices):
        q, k, v = (x @ net.parameters[f"W_{r}_{t}.values"][head].T for r in "qkv")
        x = torch.softmax(scale * q @ k.T, -1) @ v
    return x


@pytest.mark.parametrize("slices, heads, words", [(1, 1, 1), (1, 3, 4), (3, 2, 3)])
def test_the_chapters_equations(slices, heads, words):
    net = bt.bayesuvius(5, slices=slices, heads=heads).to(D)
    x = torch.randn(words, 5, dtype=D)
    s = net.sentence(x=x)
    for head, i in itertools.product(range(heads), range(words)):
        expected = compute_state(net, x, head, slices)[i]
        close(s[f"x_{slices}_{i}"][head], expected)
        close(s.do(c=head)[f"x_{slices}_{i}"], expected)


def test_multi_head_attention_is_torchs():
    """combine='concat' with 1/sqrt(d_k) is torch.nn.MultiheadAttention without biases."""
    torch.manual_seed(0)
    mha = torch.nn.MultiheadAttention(6, 2, bias=False, batch_first=True, dtype=D)
    net = bt.bayesuvius(6, heads=2, combine="concat", key_dim=3, value_dim=3, scale=None, mask="causal").to(D)
    parts = mha.in_proj_weight.detach().reshape(3, 2, 3, 6)
    weights = {f"W_{r}_0.value": parts[k] for k, r in enumerate("qkv")}
    out = mha.out_proj.weight.detach().reshape(6, 2, 3).permute(1, 0, 2)
    s = net.replace({**weights, "W_o_0.value": out}).sentence(x=(x := torch.randn(4, 6, dtype=D)))
    hidden = torch.triu(torch.ones(4, 4, dtype=torch.bool), 1)
    expected, attention = mha(x[None], x[None], x[None], attn_mask=hidden, average_attn_weights=False)
    actual = torch.stack([s[f"x_1_{i}"] for i in range(4)])
    close(actual, expected[0].detach())
    close(s.attention(0), attention[0].detach())


def test_attention_over_a_plate():
    """A collection may be the entries of a plate: a word that attends to its own heads."""
    nodes = [
        bt.Node("h", bt.tpm.Linear(4), ["x"], plates=["head", "word"]),
        bt.Node("x", bt.tpm.Attention(), ["x", "h", "h"], plates=["word"]),
    ]
    stack = bt.Stack(nodes, [bt.Node("x", bt.tpm.Given(4), plates=["word"])])
    net = bt.BNet(bt.Declaration([stack], plates=[bt.Plate("head", 3)])).to(D)
    s = net.sentence("a b")
    h = torch.stack([s[f"h_0_{k}_1"] for k in range(3)])
    close(s["x_1_1"], torch.softmax(h @ s["x_0_1"], 0) @ h)


def test_a_codebook_by_hand():
    """sum_c pi_c theta_q[c, m] ... : observed y, and W_q = m observed or set."""
    net = jitter(bt.bayesuvius(3, heads=2, atoms=2, observe=Categorical(2))).to(D)
    p = net.parameters
    x = torch.randn(2, 3, dtype=D)
    s = net.sentence(x=x)
    pi = torch.softmax(p["c.logits"], 0)
    theta = [torch.softmax(p[f"W_{r}_0.logits"], -1) for r in "qkv"]
    joint = torch.zeros(2, 2, 2, 2, dtype=D)
    for c, *m in itertools.product(range(2), repeat=4):
        q, k, v = (x @ p[f"W_{r}_0.atoms"][a].T for r, a in zip("qkv", m, strict=True))
        out = torch.softmax(q @ k.T, -1) @ v
        like = torch.softmax(p["y.logits"] + out @ p["y.weight"].T, -1)[0, 1]
        joint[c, m[0], m[1], m[2]] = pi[c] * theta[0][c, m[0]] * theta[1][c, m[1]] * theta[2][c, m[2]] * like
    normalise = lambda weights: weights / weights.sum()  # noqa: E731
    close(s.posterior("c", {"y_0": 1}), normalise(joint.sum((1, 2, 3))))
    close(s.posterior("W_k_0", {"y_0": 1}), normalise(joint.sum((0, 1, 3))))
    close(s.posterior("c", {"W_q_0": 1, "y_0": 1}), normalise(joint[:, 1].sum((1, 2))))
    close(s.posterior("c", {"W_q_0": p["W_q_0.atoms"][1], "y_0": 1}), normalise(joint[:, 1].sum((1, 2))))
    joint_do = joint[:, 1] / theta[0][:, 1, None, None]
    close(s.do(W_q_0=1).posterior("c", {"y_0": 1}), normalise(joint_do.sum((1, 2))))
    close(s.do(W_q_0=1).posterior("c"), normalise(pi))
    close(s.posterior("c", {"W_q_0": 1}), normalise(pi * theta[0][:, 1]))


# laws


SELF_MIXING_NAMES = (
    "chapter | chapter, real | codebook | concat | word, codebook | geometric | geometric, add | integrator | cayley"
    " | triangular | gated | slice"
)
SELF_MIXING = [case for case in CASES if case.name in SELF_MIXING_NAMES.split(" | ")]


@pytest.mark.parametrize("case", SELF_MIXING, **IDS)
def test_permuting_words_permutes_the_outputs(case: Case):
    net = case.net
    x = torch.randn(3, 4, dtype=D)
    order = [2, 0, 1]
    before, after = net.sentence(x=x), net.sentence(x=x[order])
    last_slice = max(g.slice for g in net.network.graph.groups if g.role == "x")
    for i, j in enumerate(order):
        close(after[f"x_{last_slice}_{i}"], before[f"x_{last_slice}_{j}"])


@pytest.mark.parametrize("mask", ["causal", "every"])
@pytest.mark.parametrize("options", [{}, {"per": "word"}, {"combine": "concat"}, {"atoms": 2}], ids=str)
def test_a_causal_word_ignores_later_words(mask, options):
    """In the graph and in the values; without the mask it depends on them."""
    net = bt.bayesuvius(4, mask=mask, residual=True, **options).to(D)
    x = torch.randn(3, 4, dtype=D)
    changed = torch.cat([x[:2], torch.randn(1, 4, dtype=D)])
    s, other = net.sentence(x=x), net.sentence(x=changed)
    for i in (0, 1):
        in_graph = "x_0_2" in s.ancestors(f"x_1_{i}")
        in_numbers = not torch.allclose(s[f"x_1_{i}"], other[f"x_1_{i}"], rtol=0, atol=1e-12)
        assert in_graph == in_numbers == (mask == "every")


def test_a_dropout_is_a_delta_and_never_enumerated():
    s = get_case("encoder, post-norm").sentence
    assert s["drop_0_1"].equal(s["mix_0_1"])
    assert s.tpm("drop_0_1").log_prob(s["mix_0_1"]).item() == 0


# budgets and impossible evidence


def test_above_the_budget_it_refuses_with_the_count():
    s = bt.bayesuvius(3, slices=3, heads=3, per="word", observe=Categorical(2)).sentence("a b c d e")
    with pytest.raises(bt.BudgetError, match=r"at most 65,536 joint states of c_0_0.*got 177,147 states"):
        s["x_3_0"]


def test_impossible_evidence_names_the_node():
    net = bt.bayesuvius(3, heads=2, observe=Categorical(2)).to(D)
    s = net.sentence("a b")
    q = s.do(c=1)["q_0_0"]
    assert s.posterior("c", {"q_0_0": q}).tolist() == [0.0, 1.0]
    with pytest.raises(bt.EvidenceError, match="q_0_0"):
        s.posterior("c", {"y_0": 1, "q_0_0": q + 1})
    with pytest.raises(bt.EvidenceError, match=r"k_0_1.*given the evidence before it"):
        s.posterior("c", {"q_0_0": q, "k_0_1": s.do(c=0)["k_0_1"]})
    with pytest.raises(bt.EvidenceError, match="q_0_0"):
        s.observe(q_0_0=q + 1).graph(attention=True)
    never = net.replace({"c.logits": torch.tensor([0.0, -3000.0], dtype=D)})
    assert never.sentence("a b").posterior("c").tolist() == [1.0, 0.0]
