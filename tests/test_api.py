"""Nets and sentences as users call them: values, graphs, devices, and errors for invalid input."""

import subprocess
import sys

import networkx as nx
import numpy as np
import pytest
import torch

import bnet_transformer as bt
from bnet_transformer.tpm import Add, Categorical, Given, Normal
from tests.cases import CASES


@pytest.fixture
def net() -> bt.BNet:
    return bt.bayesuvius(4, heads=3, slices=2, observe=Categorical(3))


@pytest.fixture
def s(net: bt.BNet) -> bt.Sentence:
    return net.sentence("the cat sat")


def test_importing_the_package_does_not_import_torch():
    code = "import sys, bnet_transformer; assert 'torch' not in sys.modules and 'networkx' not in sys.modules"
    subprocess.run([sys.executable, "-W", "error", "-c", code], check=True)


def test_every_public_name_is_there_twice():
    for _ in range(2):
        for name in bt.__all__:
            assert getattr(bt, name) is not None
    assert callable(bt.bayesuvius) and callable(bt.models.bayesuvius)
    assert set(bt.__all__) <= set(dir(bt))
    with pytest.raises(AttributeError):
        bt.nonsense  # noqa: B018


def test_words_are_text_lists_ids_or_vectors(net):
    text, words = net.sentence("the cat sat"), net.sentence(["the", "cat", "sat"])
    assert text.words == words.words == ("the", "cat", "sat")
    assert text["x_0_1"].equal(words["x_0_1"])
    x = torch.randn(2, 4)
    assert net.sentence(x=x)["x_0_1"].equal(x[1])
    assert net.sentence("two words", x=x.numpy())["x_0_0"].equal(x[0])
    known = bt.bayesuvius(4, vocabulary=["a", "b", "c"])
    for message in ("c a", ["c", "a"], [2, 0], np.array([2, 0]), torch.tensor([2, 0])):
        assert known.sentence(message).words == ("c", "a")
        assert known.sentence(message)["token_0"].item() == 2


def test_one_word_has_one_vector_everywhere(net):
    s = net.sentence("cat and cat")
    assert s["x_0_0"].equal(s["x_0_2"]) and s["x_0_0"].equal(net.sentence("a cat")["x_0_1"])
    assert not s["x_0_0"].equal(bt.bayesuvius(4, seed=1).sentence("cat")["x_0_0"])


def test_values_lead_with_the_open_choices(s):
    assert s["c"].tolist() == [0, 1, 2]
    assert s["W_q_0"].shape == (3, 4, 4) and s["x_0_0"].shape == (4,)
    assert s["x_2_1"].shape == (3, 4) and s.do(c=1)["x_2_1"].allclose(s["x_2_1"][1])
    assert s.observe(c=1)["x_2_1"].allclose(s["x_2_1"][1])
    codebook = bt.bayesuvius(4, heads=2, atoms=(2, 3, 4)).sentence("a b")
    assert codebook["q_0_0"].shape == (2, 4) and codebook["x_1_0"].shape == (2, 3, 4, 4)


def test_tpms_are_distributions(s):
    c, x, y = s.tpm("c"), s.tpm("x_1_0"), s.tpm("y_0")
    assert c.probs.tolist() == pytest.approx([1 / 3] * 3)
    assert x.log_prob(s["x_1_0"]).tolist() == [0, 0, 0] and y.probs.shape == (3, 3)
    assert s.do(c=0).tpm("y_0").probs.shape == (3,) and s.tpm("x_0_0").v.equal(s["x_0_0"])
    real = bt.bayesuvius(4, heads=2, observe=Normal(0.5)).sentence("a b")
    assert real.tpm("y_1").mean.shape == (2, 4) and real.tpm("y_1").batch_shape == (2,)


def test_attention_is_returned_where_it_exists_and_otherwise_refused(s):
    assert s.attention(1).shape == (3, 3, 3)
    concat = bt.bayesuvius(4, heads=5, combine="concat").sentence("a b")
    assert concat.attention(0).shape == (5, 2, 2)
    with pytest.raises(bt.BNetError, match="from 0 to 1"):
        s.attention(2)
    with pytest.raises(bt.UnknownNameError):
        s.attention(0, role="y")
    cayley = next(c for c in CASES if c.name == "cayley").sentence
    with pytest.raises(bt.BNetError, match="Cayley"):
        cayley.attention(0)
    three = next(c for c in CASES if c.name == "three stacks").sentence
    with pytest.raises(bt.BNetError, match="role="):
        three.attention(0)
    assert three.do(c=0, b=0).attention(0, role="dec_left").shape == (2, 2)


def test_labels_name_states():
    net = bt.bayesuvius(4, vocabulary=["the", "cat"], observe=Categorical(2))
    s = net.sentence("the cat")
    assert s.posterior("c", {"y_0": "cat"}).equal(s.posterior("c", {"y_0": 1}))
    assert s.do(token_0="cat")["x_0_0"].equal(s["x_0_1"])
    with pytest.raises(bt.EvidenceError, match="near matches are cat"):
        s.observe(y_0="cta")


def test_sentences_do_not_change_each_other(net, s):
    before = s["x_1_0"].clone()
    s.do(c=1), s.observe(c=0), s.do(x_0_0=torch.zeros(4))
    assert s["x_1_0"].equal(before) and "do c" not in repr(s) and "do c" in repr(s.do(c=1))
    with pytest.raises(TypeError):
        net.parameters["c.logits"] = torch.zeros(3)


def test_the_folded_graph(net):
    graph = net.graph()
    assert isinstance(graph, nx.MultiDiGraph) and "x_2" in graph and "q_1" in graph
    assert set(graph.successors("c")) == {f"W_{r}_{t}" for r in "qkv" for t in range(2)}
    assert "word" in graph.nodes["q_0"]["plates"] and graph.nodes["c"]["kind"] == "stochastic"


def test_the_ground_graph_and_its_filters(s):
    full = s.graph()
    assert len(full) == len(s.ground) and full.number_of_edges() == s.ground.count_arrows()
    x = full.nodes["x_1_2"]
    assert (x["role"], x["slice"], x["word"], x["token"], x["kind"]) == ("x", 1, 2, "sat", "deterministic")
    assert full.nodes["x_0_0"]["kind"] == "observed" and full.nodes["y_0"]["kind"] == "stochastic"
    assert s.observe(y_0=1).graph().nodes["y_0"]["kind"] == "observed"
    assert len(s.graph(weights=False, slices=0)) == 15
    selection = s.graph(words=["cat", 2], weights=False)
    assert {n["word"] for _, n in selection.nodes(data=True)} == {1, 2}
    assert set(selection) <= set(full) and set(selection.edges) <= set(full.edges)
    assert s.do(x_1_0=torch.zeros(4)).graph().in_degree("x_1_0") == 0
    with pytest.raises(bt.BudgetError, match="arrows"):
        s.graph(limit=10)
    for bad in ({"slices": 2}, {"slices": []}, {"words": "dog"}, {"words": 3}, {"heads": 0}, {"slices": "a"}):
        with pytest.raises(bt.BNetError):
            s.graph(**bad)


def test_arrows_carry_what_is_read(s):
    graph = s.do(c=2).graph(attention=True)
    attention = s.do(c=2).attention(0)
    for i in range(3):
        for j in range(3):
            for role in "kv":
                assert graph[f"{role}_0_{j}"][f"x_1_{i}"]["weight"] == pytest.approx(float(attention[i, j]), abs=1e-6)
    assert "weight" not in graph["x_0_0"]["q_0_0"]
    mean = torch.einsum("c,cij->ij", s.posterior("c", {"y_0": 1}).double(), s.attention(0).double())
    observed = s.observe(y_0=1).graph(attention=True)
    assert observed["k_0_1"]["x_1_0"]["weight"] == pytest.approx(float(mean[0, 1]), abs=1e-6)
    filtered = s.do(c=2).graph(min_weight=0.4)
    weights = [w for _, _, w in filtered.edges(data="weight") if w is not None]
    assert weights and min(weights) >= 0.4 and filtered.has_edge("x_0_0", "q_0_0")


def test_given_nodes_of_other_kinds():
    label = bt.Node("z", Given(2))
    words = [bt.Node("x", Given(4), plates=["word"]), bt.Node("extra", Given(4), plates=["word"])]
    stack = bt.Stack([bt.Node("x", Add(), ["x", "extra"], plates=["word"])], words)
    net = bt.BNet(bt.Declaration([stack], [label]))
    s = net.sentence("a b", given={"z": [1.0, 2.0], "extra": torch.ones(2, 4)})
    assert s["x_1_0"].equal(s["x_0_0"] + 1) and s["z"].tolist() == [1.0, 2.0]
    with pytest.raises(bt.BNetError, match="extra"):
        net.sentence("a b", given={"z": [1.0, 2.0]})
    with pytest.raises(bt.BNetError, match=r"\(2, 4\)"):
        net.sentence("a b", given={"z": [1.0, 2.0], "extra": torch.ones(3, 4)})


def test_several_stacks_require_a_mapping():
    x = [bt.Node("x", Given(4), plates=["word"])]
    copy = [bt.Node("x", Add(), ["x"], plates=["word"])]
    net = bt.BNet(bt.Declaration([bt.Stack(copy, x, name="enc"), bt.Stack(copy, x, name="dec")]))
    s = net.sentence({"enc": "a b", "dec": "c"})
    assert s.words == ("a", "b", "c") and s["dec_x_1_0"].equal(s["dec_x_0_0"])
    with pytest.raises(bt.BNetError, match="'enc', 'dec'"):
        net.sentence("a b")
    with pytest.raises(bt.BNetError, match="'dec'"):
        net.sentence({"enc": "a b"})


def test_float32_is_near_float64(net):
    single, double = net.sentence("the cat sat"), net.to(torch.float64).sentence("the cat sat")
    torch.testing.assert_close(single["x_2_0"].double(), double["x_2_0"], rtol=1e-5, atol=1e-5)
    with pytest.raises(bt.BNetError):
        net.to(torch.int32)


def test_a_net_goes_to_a_device_and_a_type(net):
    on_meta = net.to("meta")
    assert {value.device.type for value in on_meta.parameters.values()} == {on_meta.network.device.type} == {"meta"}
    assert on_meta.module()(torch.zeros(2, 3, 4, device="meta")).device.type == "meta"
    converted = net.to(torch.device("meta"), torch.float64)
    assert (converted.network.dtype, converted.network.default_dtype) == (torch.float64, torch.float64)
    on_cpu = net.to("cpu")
    assert all(torch.equal(on_cpu.parameters[name], value) for name, value in net.parameters.items())
    for bad in (("nonsense",), ("cuda:99",), (3,), (None,), ("cpu", "cpu"), (torch.float32, torch.float64)):
        with pytest.raises(bt.BNetError, match="to: expected a"):
            net.to(*bad)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_a_sentence_is_answered_on_the_device_of_its_net(net):
    on_cpu = net.sentence("the cat sat").do(q_0_1=torch.zeros(4))
    on_gpu = net.to("cuda").sentence("the cat sat").do(q_0_1=torch.zeros(4))
    for name in ("x_0_0", "q_0_1", "x_1_1", "x_2_2"):
        assert on_gpu[name].device.type == "cuda"
        torch.testing.assert_close(on_gpu[name].cpu(), on_cpu[name], rtol=1e-5, atol=1e-5)


def sweep(clean, corrupt, **options):
    return bt.sweep(clean, corrupt, metric={"y_2": ("cat", "dog")}, progress=False, **options).outcomes


GPU_ANSWERS = {
    "sweep of states": lambda clean, corrupt: sweep(clean, corrupt, at="x"),
    "sweep of attention": lambda clean, corrupt: sweep(clean, corrupt, at="j"),
    "sweep of paths": lambda clean, corrupt: sweep(clean, corrupt, at="v -> a"),
    "sweep to first order": lambda clean, corrupt: sweep(clean, corrupt, at="a", method=bt.Gradient()),
    "mean ablation": lambda clean, corrupt: sweep(bt.interventions.Mean([clean, corrupt]), corrupt, at="a"),
    "circuit": lambda clean, corrupt: (
        bt.circuit(clean, corrupt, metric={"y_2": ("cat", "dog")}, threshold=0.01).outcome
    ),
    "lens": lambda clean, corrupt: clean.lens().kl,
    "contributions": lambda clean, corrupt: clean.contributions("y_2", of=("cat", "dog")).parts,
    "paths of two": lambda clean, corrupt: clean.contributions("y_2", of=("cat", "dog"), paths=2).values,
    "scores": lambda clean, corrupt: clean.contributions("j_1_0_2").values,
    "exact effects": lambda clean, corrupt: clean.contributions("y_2", of=("cat", "dog"), exact=True).effects,
    "generation": lambda clean, corrupt: torch.tensor(
        clean.net.generate("the cat", length=3, do={"x_1": bt.interventions.Shift(torch.ones(8))}).log_probs
    ),
}


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@pytest.mark.parametrize("name", GPU_ANSWERS)
def test_answers_on_a_gpu_are_those_of_the_cpu(name):
    words = ["the", "a", "cat", "dog", "sat"]
    net = bt.decoder(8, heads=2, slices=2, norm="pre", vocabulary=words, seed=1)
    on_cpu, on_gpu = (
        GPU_ANSWERS[name](moved.sentence("the cat sat"), moved.sentence("a dog sat")) for moved in (net, net.to("cuda"))
    )
    torch.testing.assert_close(on_gpu.cpu(), on_cpu, rtol=1e-3, atol=1e-4, equal_nan=True, check_dtype=False)


def test_words_and_different_ids_are_refused():
    net = bt.decoder(4, heads=2, slices=1, vocabulary=["a", "b", "c"])
    for text in ("a b", [0, 1]):
        with pytest.raises(bt.BNetError, match=r"given\['token'\]: expected \[0, 1\], the ids of .* got \[2, 2\]"):
            net.sentence(text, given={"token": [2, 2]})
        assert net.sentence(text, given={"token": [0, 1]}).words == ("a", "b")
    assert len(net.sentence(given={"token": [2, 2]}).words) == 2
