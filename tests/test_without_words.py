"""Bayesian networks without words: declarations, queries, figures and files, as of every other net.

The oracles are pgmpy's variable elimination on tables written by hand, sums over all joint states, closed forms.
"""

import itertools
import json
import math

import networkx as nx
import numpy as np
import pyro
import pytest
import torch
from click.testing import CliRunner
from pyro.infer import TraceEnum_ELBO

import bnet_transformer as bt
from bnet_transformer.cli import main
from bnet_transformer.figures.graph_layout import minimize_crossings
from bnet_transformer.inference import Evidence, log_evidence
from bnet_transformer.tpm import Add, Attention, Categorical, Given, Linear, Normal, Select, Weight
from tests.cases import hidden_states, jitter, no_slices, sites
from tests.discrete_networks import PARENTS, D, asia, check_posteriors, draw_samples, joint, marginal, site_density

# declarations


def test_a_declaration_needs_no_stack_but_a_node():
    net = bt.BNet(bt.Declaration(nodes=[bt.Node("rain", Categorical(2))]))
    assert net.check() and net.sentence().words == () and net.network.graph.word_stacks == ()
    for empty in (bt.Declaration(), bt.Declaration([bt.Stack()])):
        with pytest.raises(bt.BNetError, match="at least one node"):
            bt.BNet(empty)
    with pytest.raises(bt.BNetError, match="slices"):
        bt.Stack([bt.Node("x", Categorical(2))], slices=0)


def test_a_stack_without_slices_is_its_prologue_and_epilogue():
    x = bt.Node("x", Given(3), plates=["word"])
    net = bt.BNet(bt.Declaration([bt.Stack(prologue=[x])]))
    vectors = torch.randn(2, 5, 3)
    assert net.declaration.stacks[0].slices == 0 and torch.equal(net.module()(vectors), vectors)
    net = jitter(no_slices()).to(D)
    s = net.sentence("cat the")
    assert s.parents("y_1") == ["x_1"] and list(s.ground.word_counts.values()) == [2]
    trained = bt.train(net, [("the cat", [0, 1]), ("sat", [1])], steps=30, optimizer=bt.AdamW(rate=0.1), progress=False)
    assert trained.losses[-1] < trained.losses[0]


def test_only_stacks_with_words_take_a_sentence():
    side = bt.Stack(prologue=[bt.Node("z", Categorical(2))], name="side")
    x, W = bt.Node("x", Given(3), plates=["word"]), bt.Node("W", Select((3, 3)), ["side.z"])
    enc = bt.Stack([W, bt.Node("x", Linear(), ["W", "x"], plates=["word"])], [x], name="enc")
    net = bt.BNet(bt.Declaration([enc, side]))
    assert net.sentence("a b")["enc_x_1_1"].shape == (2, 3)
    assert net.module()(torch.zeros(4, 2, 3), want=["enc_x_1"])["enc_x_1"].shape == (2, 4, 2, 3)
    with pytest.raises(bt.UnknownNameError, match="side"):
        net.sentence({"enc": "a b", "side": "c"})


# queries


@pytest.mark.parametrize("evidence", [{}, {"xray": 1, "dysp": 0}, {"asia": 1, "either": 1}])
def test_posteriors_are_those_of_pgmpy(evidence):
    check_posteriors(asia(), evidence)


def test_evidence_surgery_and_counterfactuals_are_sums_over_all_states():
    net = asia()
    s, full = net.sentence(), joint(net)
    assert float(s.log_prob({"xray": 1, "smoke": 0})) == pytest.approx(
        math.log(marginal(full, "xray", {"smoke": 0})[1])
    )
    expected = marginal(joint(net, {"either": 1}), "lung", {"dysp": 1})
    np.testing.assert_allclose(s.do(either=1).posterior("lung", {"dysp": 1}), expected / expected.sum(), atol=1e-12)
    assert s.do(either="yes").parents("either") == []
    # with no observed node below the intervention, a counterfactual of a root is its posterior
    probs = s.counterfactual("smoke", {"lung": 1}, {"bronc": 1}).probabilities
    np.testing.assert_allclose(probs, s.posterior("smoke", {"bronc": 1}), atol=1e-12)


def test_separation_is_that_of_networkx():
    s = asia().sentence()
    graph = s.graph()
    for x, y in itertools.combinations(PARENTS, 2):
        for given in ([], ["either"], ["smoke", "dysp"]):
            if not {x, y} & set(given):
                assert bool(s.separated(x, y, given)) == nx.is_d_separator(graph, {x}, {y}, set(given))
    assert set(s.blanket("either")) == {"tub", "lung", "xray", "dysp", "bronc"}


def test_samples_follow_the_joint():
    net = asia()
    states = torch.stack([draw_samples(net, 20_000)[name] for name in PARENTS], 1)
    flat = (states * 2 ** torch.arange(len(PARENTS) - 1, -1, -1)).sum(1)
    frequencies = torch.bincount(flat, minlength=2 ** len(PARENTS)) / len(flat)
    assert np.abs(frequencies.numpy() - joint(net).reshape(-1)).sum() < 0.1


def test_a_plate_and_a_real_readout_have_their_closed_form():
    net = jitter(sites(), 1.0).to(D)
    y = torch.randn(5, 2, 2, dtype=D)
    actual = log_evidence(net.module(), {"y": Evidence(y)})
    torch.testing.assert_close(actual, site_density(net, y))
    observed = {f"y_{k}": y[0, k] for k in range(2)}
    torch.testing.assert_close(net.sentence().log_prob(observed), site_density(net, y)[0])


# compiled, and in Pyro


def test_a_batch_follows_from_evidence_do_and_given_nodes():
    net = asia()
    module, rain = net.module(), torch.tensor([0, 1, 1])
    actual = log_evidence(module, {"dysp": Evidence(rain), "smoke": Evidence(1 - rain)})
    prior = marginal(joint(net), "dysp", {})
    assert actual.shape == (3,) and prior.shape == (2,)
    expected = [math.log(marginal(joint(net), "dysp", {"smoke": 1 - int(k)})[int(k)]) for k in rain]
    np.testing.assert_allclose(actual.detach(), expected)
    logits = module(want=["lung"], do={"smoke": rain})["lung"]
    torch.testing.assert_close(logits, net.parameters["lung.logits"].log_softmax(-1)[rain])
    linear = bt.BNet(
        bt.Declaration(nodes=[bt.Node("u", Given(3)), bt.Node("W", Weight((2, 3))), bt.Node("m", Linear(), ["W", "u"])])
    )
    u = torch.randn(4, 3)
    torch.testing.assert_close(linear.module()(given={"u": u}), u @ linear.parameters["W.value"].T)
    torch.testing.assert_close(linear.sentence(given={"u": u[0]})["m"], linear.parameters["W.value"] @ u[0])


def test_pyro_sums_what_elimination_sums():
    for net, y in (
        (asia(), {"dysp": torch.tensor([0, 1, 1]), "asia": torch.tensor([1, 1, 0])}),
        (jitter(sites()).to(D), {"y": torch.randn(3, 2, 2, dtype=D)}),
    ):
        model = net.pyro()
        elbo = TraceEnum_ELBO(max_plate_nesting=model.max_plate_nesting)
        total = log_evidence(net.module(), {name: Evidence(value) for name, value in y.items()}).detach().sum()
        assert -elbo.loss(model, lambda **_: None, y=y) == pytest.approx(float(total))
        fixed = pyro.condition(model, data=model.data(y))
        assert -elbo.loss(fixed, lambda: None) == pytest.approx(float(total))


def test_pyro_draws_the_requested_number_of_sentences():
    net, count = asia(), 20_000
    torch.manual_seed(0)
    samples = net.pyro()(batch=count)
    frequencies = [float(samples[name].double().mean()) for name in PARENTS]
    np.testing.assert_allclose(frequencies, [marginal(joint(net), name, {})[1] for name in PARENTS], atol=0.02)
    with pytest.raises(bt.BNetError, match="batch"):
        net.pyro()(y={"asia": torch.tensor([0, 1])}, batch=3)


# figures and files


def crossings(rows: dict[str, int], position: dict[str, int], arrows: list[tuple[str, str]]) -> int:
    """Pairs of arrows between the same neighbouring rows that cross."""
    pairs = itertools.combinations([a for a in arrows if rows[a[1]] == rows[a[0]] + 1], 2)
    return sum(
        rows[a] == rows[c] and (position[a] - position[c]) * (position[b] - position[d]) < 0 for (a, b), (c, d) in pairs
    )


def test_rows_are_ordered_so_that_arrows_cross_little():
    rows = {"asia": 0, "smoke": 0, "tub": 1, "lung": 1, "bronc": 2, "either": 2, "xray": 3, "dysp": 3}
    arrows = [(parent, child) for child, parents in PARENTS.items() for parent in parents]
    as_declared = {name: list(rows).index(name) for name in rows}
    assert crossings(rows, as_declared, arrows) > crossings(rows, minimize_crossings(rows, arrows), arrows) == 0


def test_figures_name_the_net_and_leave_nothing_out(tmp_path):
    s = asia().sentence().observe(dysp="yes")
    picture = s.picture()
    assert {box.name for box in picture.boxes} == set(PARENTS) and "asia" in picture.title and not picture.caption
    assert {box.name for box in s.picture(weights=False).boxes} == set(PARENTS)
    for suffix in ("svg", "png", "dot", "tex", "json", "graphml", "bif", "html"):
        s.draw(tmp_path / f"asia.{suffix}")
    assert "image/svg+xml" in s._repr_mimebundle_()[0] or s.widget() is not None


def test_advice_above_the_limit_of_arrows_can_be_followed(tmp_path):
    s = asia().sentence()
    for options in ({"detail": "nodes"}, {}):
        with pytest.raises(bt.BudgetError) as caught:
            s.draw(tmp_path / "asia.svg", limit=3, **options)
        assert "detail=" not in str(caught.value)
        s.draw(tmp_path / "asia.svg", limit=int(str(caught.value).rpartition("limit=")[2].rstrip(".")), **options)


def test_advice_over_budget_answers_the_question():
    nodes = [bt.Node(f"a{k}", Categorical(4)) for k in range(10)]
    nodes.append(bt.Node("y", Categorical(2), [node.role for node in nodes[:6]]))
    s = jitter(bt.BNet(bt.Declaration(nodes=nodes))).sentence()
    for call in (
        lambda s: s.posterior("a0", {"y": 1}),
        lambda s: s.log_prob({"y": 1}),
        lambda s: s.sample(3, {"y": 1}),
    ):
        with pytest.raises(bt.BudgetError) as caught:
            call(s.limits(budget=16))
        assert "bt.fit" not in str(caught.value) and "budget=" in str(caught.value) and "sample" in str(caught.value)
        call(s.limits(budget=4**6))
    assert s.sample(3)["y"].shape == (3,)


def test_a_saved_net_is_the_same(tmp_path):
    for net in (asia(), jitter(sites()), jitter(hidden_states()), jitter(no_slices())):
        net.save(tmp_path / "net.safetensors")
        loaded = bt.load(tmp_path / "net.safetensors")
        assert loaded.declaration == net.declaration
        assert all(value.equal(net.parameters[name]) for name, value in loaded.parameters.items())


def test_commands_need_no_sentence(tmp_path):
    path = str(tmp_path / "asia.safetensors")
    net = asia()
    net.save(path)
    result = CliRunner().invoke(main, ["ask", "posterior", "lung", "--model", path, "--given", "dysp=yes", "--json"])
    assert result.exit_code == 0, result.output
    assert f"{float(net.sentence().posterior('lung', {'dysp': 1})[0]):.6f}"[:7] in result.output
    drawing = CliRunner().invoke(main, ["draw", "--model", path, "-o", str(tmp_path / "asia.svg")])
    assert drawing.exit_code == 0 and (tmp_path / "asia.svg").exists()
    assert CliRunner().invoke(main, ["ask", "posterior", "lung", "a b", "--model", path]).exit_code


def test_commands_take_the_values_of_given_nodes(tmp_path):
    nodes = [
        bt.Node("u", Given(3)),
        bt.Node("v", Given(1)),
        bt.Node("z", Categorical(2), ["u"]),
        bt.Node("m", Select((1,)), ["z"]),
        bt.Node("b", Add(), ["m", "v"]),
        bt.Node("y", Normal(1.0), ["b"]),
    ]
    net, path = jitter(bt.BNet(bt.Declaration(nodes=nodes)), 1.0), str(tmp_path / "net.safetensors")
    net.save(path)
    inputs = ["--input", "u=1,2,3", "--input", "v=0.5", "--model", path]
    s = net.sentence(given={"u": [1.0, 2.0, 3.0], "v": [0.5]})
    for options, sentence in (
        (["--given", "y=1.3"], s.observe(y=[1.3])),
        (["--given", "y=1"], s.observe(y=[1.0])),
        (["--do", "b=2", "--given", "y=1,"], s.do(b=[2.0]).observe(y=[1.0])),
    ):
        result = CliRunner().invoke(main, ["ask", "posterior", "z", *inputs, *options, "--json"])
        assert result.exit_code == 0, result.output
        probs = json.loads(result.output)["sentences"][0]["probabilities"]
        np.testing.assert_allclose(probs, sentence.posterior("z"), atol=1e-6)
    for command in (["ask", "separated", "z", "u", "--given", "y"], ["draw", "-o", str(tmp_path / "net.svg")]):
        result = CliRunner().invoke(main, [*command, *inputs])
        assert result.exit_code == 0, result.output
    assert CliRunner().invoke(main, ["ask", "posterior", "z", "--model", path]).exit_code


# features that need words


@pytest.mark.parametrize(
    "call",
    [
        lambda net, s: s.attention(0),
        lambda net, s: s.reads(),
        lambda net, s: s.tan("words"),
        lambda net, s: s.tan_tree(),
        lambda net, s: s.graph(slices=0),
        lambda net, s: s.draw("x.svg", detail="words"),
        lambda net, s: bt.plot(s),
        lambda net, s: net.tan([s, s], [0, 1]),
        lambda net, s: net.sentence("a b"),
        lambda net, s: net.sentence(x=torch.zeros(2, 2)),
        lambda net, s: net.batch(["a b"]),
        lambda net, s: net.cost(6),
        lambda net, s: net.generate("a"),
        lambda net, s: net.iterate(torch.zeros(2, 2), 2),
        lambda net, s: net.module()(torch.zeros(2, 2, 2)),
        lambda net, s: net.module()(mask=torch.ones(2, 2, dtype=torch.bool)),
        lambda net, s: bt.train(net, ["a b"]),
        lambda net, s: bt.roles(net, ["a b"]),
        lambda net, s: bt.inclusion(net, ["a b"]),
        lambda net, s: bt.fit(net, {"asia": [1]}, method=bt.MAP(steps=1), progress=False).responsibilities("a"),
    ],
)
def test_what_needs_words_is_refused(call):
    net = asia()
    with pytest.raises(bt.BNetError):
        call(net, net.sentence())


def test_slices_without_words_read_none():
    s = hidden_states().sentence()
    for call in (s.reads, s.tan_tree, lambda: s.attention(0)):
        with pytest.raises(bt.BNetError):
            call()
    node = bt.Node("a", Attention(), ["q", bt.Arrow("k", "every"), bt.Arrow("v", "every")])
    with pytest.raises(bt.DeclarationError, match="a collection"):
        bt.BNet(bt.Declaration(nodes=[*(bt.Node(r, Weight(2)) for r in "qkv"), node]))
