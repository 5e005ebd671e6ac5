"""Evidence on values, interventions on values, rows of attention, and the arrows that surgery leaves."""

import itertools
import math
import random

import networkx as nx
import pytest
import torch

import bnet_transformer as bt
from bnet_transformer import reference
from bnet_transformer.inference import Evidence, posterior
from bnet_transformer.interventions import Attend, Mean, Noise, Zero
from bnet_transformer.tpm import Attention, Dot, Given, Normal
from tests.cases import close, get_case, two_head_net

D = torch.float64


def compute_both(s, name, evidence):
    """Return a posterior by elimination and by the reference."""
    observed = s.observe(evidence).state.evidence
    yield s.posterior(name, evidence)
    yield reference.posterior(s.state.model, s.ground.id(name), observed)


# evidence on values


def test_other_words_and_sentences_do_not_change_evidence():
    """In float32 a word outside the attention, or another sentence of the batch, may be arbitrarily large."""
    net = bt.bayesuvius(dim=4, heads=3, mask="causal")
    x = torch.randn(3, 4, generator=torch.Generator().manual_seed(0))
    large = torch.cat([x[:2], 1e5 * x[2:]])
    s = net.sentence(x=large)
    value = s.do(c=2)["x_1_0"]
    for result in compute_both(s, "c", {"x_1_0": value}):
        close(result, torch.tensor([0.0, 0.0, 1.0]))
    for evidence in (torch.full((4,), 9.0), value * (1 + 3e-4)):
        with pytest.raises(bt.EvidenceError, match="x_1_0"):
            s.posterior("c", {"x_1_0": evidence})
    batch, values = torch.stack([x, large]), torch.zeros(2, 3, 4)
    values[:, 0] = value
    observed = torch.tensor([[True, False, False]] * 2)
    result = posterior(net.module(), "c", {"x_1": Evidence(values, observed)}, batch)
    close(result, torch.tensor([[0.0, 0.0, 1.0]] * 2))


def test_a_nets_own_values_fit_again():
    """Values computed for all states, for one, by the reference and in a batch are evidence of the same state."""
    dim = 64
    net = bt.bayesuvius(dim=dim, heads=4, slices=3, residual=True)
    s, expected = net.sentence("the cat sat"), torch.tensor([0.0, 0.0, 1.0, 0.0])
    fits = [s["x_3_1"][2], s.do(c=2)["x_3_1"]]
    fits.append(reference.ReferenceRun(s.state.model, {s.ground.id("c"): torch.tensor(2)}).value(s.ground.id("x_3_1")))
    with torch.no_grad():
        fits.append(net.module()(s.state.encoded.given["x_0"].expand(8, 3, dim))[2, 5, 1])
    partial = s.do(x_1_0=torch.zeros(dim))  # the reference computes these
    for sentence, values in ((s, fits), (partial, [partial["x_3_1"][2]])):
        for value in values:
            for result in compute_both(sentence, "c", {"x_3_1": value}):
                close(result, expected)
        perturbed = values[0] * (1 + 3e-4)
        for query in (sentence.posterior, lambda *args, s=sentence: list(compute_both(s, *args))):
            with pytest.raises(bt.EvidenceError, match="x_3_1"):
                query("c", {"x_3_1": perturbed})
    result = s.counterfactual("c", {"x_0_0": Zero()}, {"x_3_1": fits[0]})
    close(result.probabilities, expected)
    assert set(s.sample(9, {"x_3_1": fits[1]})["c"].tolist()) == {2}


def test_the_rounding_is_of_the_node_itself_and_there_is_none_in_float64():
    for dtype, rounding in ((torch.float64, 0), (torch.float32, 2**-12), (torch.bfloat16, 2**-4)):
        computed = torch.tensor([[4.0, 0.0], [0.0, 1.0]], dtype=dtype)
        for fraction, fits in ((0.5, True), (1.5, False)):
            observed = computed + torch.tensor([[0.0, 4.0], [0.0, 1.0]], dtype=dtype) * fraction * rounding
            assert reference.is_close(computed, observed, 0.0, 1).tolist() == [fits or not rounding] * 2
        nearby = computed + torch.tensor([[0.0, 0.0], [0.25, 0.0]], dtype=dtype)
        assert reference.is_close(computed, nearby, 0.0, 1).tolist() == [True, False]
        assert bool(reference.is_close(computed, nearby, 0.25, 2))
    with pytest.raises(bt.EvidenceError):
        s = bt.bayesuvius(4, heads=2).to(D).sentence("a b")
        s.limits(atol=0).posterior("c", {"x_1_0": s["x_1_0"][0] + 1e-9})


@pytest.mark.parametrize("order", [("c", "W_q_0"), ("W_q_0", "c")])
def test_a_matrix_that_several_atoms_are_leaves_each_of_them_its_share(order):
    """P(c, m | the matrix of atoms 0 and 1) = pi_c theta_cm over those two."""
    net = two_head_net(heads=3, atoms=3)
    parameters = dict(net.parameters)
    atoms = parameters["W_q_0.atoms"].clone()
    atoms[1] = atoms[0]
    s = net.replace({**parameters, "W_q_0.atoms": atoms}).sentence("the cat sat")
    pi, theta = (parameters[name].softmax(-1) for name in ("c.logits", "W_q_0.logits"))
    expected = pi[:, None] * theta
    expected[:, 2] = 0
    expected = expected / expected.sum()
    close(s.posterior(order, {"W_q_0": atoms[0]}), expected if order[0] == "c" else expected.T)
    with_y = s.posterior(order, {"W_q_0": atoms[0], "y_2": 1})
    likelihood = torch.stack([s.do(c=k).log_prob({"W_q_0": atoms[0], "y_2": 1}).exp() for k in range(3)]) * pi
    close(with_y.sum(order.index("W_q_0")), likelihood / likelihood.sum())
    probs = s.posterior("W_q_0", {"W_q_0": atoms[0]})
    mixed = sum(probs[m] * s.reads(evidence={"W_q_0": m}).matrix for m in (0, 1))
    close(s.reads(evidence={"W_q_0": atoms[0]}).matrix, mixed)


# do


def test_a_later_do_counts_and_undoing_it_does_not_bring_the_earlier_back():
    s = two_head_net(combine="concat").sentence("the cat sat")
    one, two = torch.ones(4, dtype=D), 2 * torch.ones(4, dtype=D)
    again = s.do(x_0_1=one).do(x_0_1=two)
    close(again["x_0_1"], two)
    close(again["x_1_0"], s.do(x_0_1=two)["x_1_0"])
    row = Attend([1.0, 0, 0])
    close(s.do(a_0_0_1=one).do(a_0_0_1=row)["a_0_0_1"], s["v_0_0_0"])
    fixed = s.do(a_0_0_1=row).do(a_0_0_1=one)
    close(fixed["a_0_0_1"], one)
    assert fixed.parents("a_0_0_1") == [] and not fixed.state.model.attention_rows
    close(fixed.undo("a_0_0_1")["x_1_1"], s["x_1_1"])


def test_earlier_interventions_apply_to_every_query():
    """Counterfactuals and rollout refer to the sentence after `do`; samples follow its evidence."""
    s = two_head_net(slices=2, heads=3).sentence("the cat sat")
    closed = s.do(c=1)
    close(closed.counterfactual("x_2_1", {}).mean, closed["x_2_1"])
    patched = closed.do(q_0_1=Zero())
    close(patched.counterfactual("x_2_1", {"q_1_0": Zero()}).mean, patched.do(q_1_0=Zero())["x_2_1"])
    result = patched.reads(residual=0.0)
    close(result.matrix, patched.attention(1) @ patched.attention(0))
    close(result.attention[0, 0, 1], torch.full((3,), 1 / 3, dtype=D))
    samples = s.observe(y_1=2, c=1).sample(50)
    assert set(samples["y_1"].tolist()) == {2} and set(samples["c"].tolist()) == {1}


def test_noise_and_means_over_words_use_the_sentence_after_do():
    s = two_head_net(combine="concat", slices=2, residual=True).sentence("the cat sat")
    other = s.net.sentence("a dog ran")
    plain = {"x_1_0": other, "a_0_1_2": Attend([0, 0, 1.0])}
    first = s.do(plain)
    for name, patch in (("x_2_1", Noise(0.1, seed=3)), ("x_2_1", Mean()), ("x_1_2", Mean())):
        joint, nested, reverse = s.do({name: patch, **plain}), first.do({name: patch}), s.do({name: patch}).do(plain)
        assert torch.equal(joint[name], nested[name]) and not torch.allclose(joint[name], reverse[name])
    close(s.do({**plain, "x_1_2": Mean()})["x_1_2"], torch.stack([first[f"x_1_{i}"] for i in range(3)]).mean(0))
    noisy = s.do({"x_1": Noise(0.1), "x_2": Noise(0.1), **{"q_0_0_0": Zero()}})
    above = s.do(q_0_0_0=Zero()).do({"x_1": Noise(0.1)})
    close(noisy["x_1_2"], above["x_1_2"])
    close(noisy["x_2_1"], above.do({"x_2_1": Noise(0.1)})["x_2_1"])  # around its value with the noise above it


def test_constants_are_set_with_any_latent_choice():
    s = bt.bayesuvius(dim=4, heads=2, slices=2, atoms=3, observe=Normal(0.5)).sentence("the cat sat")
    for name, shape in (("q_1_0", 4), ("W_q_0", (4, 4)), ("y_1", 4)):
        cut = s.do({name: Zero()})
        assert torch.equal(cut[name], torch.zeros(shape)) and cut.parents(name) == []
    plain = bt.bayesuvius(dim=4, heads=2, slices=2).sentence("the cat sat")
    close(plain.do({"q_1_*": Zero()}).attention(1), torch.full((2, 3, 3), 1 / 3), 1e-6)
    close(plain.do({"x_1_*": Zero()})["x_2_0"], torch.zeros(2, 4))
    patch = {"x_1_*": plain.do(c=1)}
    close(plain.do(patch)["x_2_1"], torch.stack([plain.do(c=k).do(patch)["x_2_1"] for k in (0, 1)]))
    for value in (plain, Mean([plain]), Mean(), Noise(0.1)):
        with pytest.raises(bt.EvidenceError, match=r"x_1_0.*do\(c"):
            plain.do(x_1_0=value)
    for name in ("c", "y_0"):
        with pytest.raises(bt.EvidenceError, match=f"{name}.*real values"):
            two_head_net().sentence("the cat sat").do({name: Zero()})
    for name in ("W_q_0", "c"):
        with pytest.raises(bt.EvidenceError, match=f"{name}.*over words"):
            s.do({name: Mean()})
    for sentences in (["a"], 3, [], plain, "ab", {"a": plain}, [plain, 2]):
        with pytest.raises(bt.BNetError, match="Mean: expected a list of sentences"):
            Mean(sentences)


def test_a_word_that_cannot_be_read_is_no_state():
    net = bt.bayesuvius(4, heads=2, mask="causal", observe=Normal(0.3), attention="marginal").to(D)
    s = net.sentence("a b c")
    with pytest.raises(bt.EvidenceError, match=r"j_0: expected a word to which it may attend: \[0\]; got 2"):
        s.do(j_0=2)
    close(s.do(j_2=1)["z_2"], s["v_0_1"])


# a row of attention


def find_spec(s, name):
    """The spec of a node, and its index in the group."""
    group, index = s.ground.parse_name(name)
    return s.net.network.specs[group.index], index


def make_row(s, name, seed=0):
    """Return a random row of attention over the words to which a node attends."""
    spec, index = find_spec(s, name)
    values = next(parent for parent in spec.parents if parent.slot == "v.")
    words = reference.find_slot_parents(s.state.model, spec, index, values, {})[2]
    row = torch.zeros(s.ground.word_counts[s.net.network.specs[values.index].group.word_stack], dtype=D)
    row[words] = torch.rand(len(words), generator=torch.Generator().manual_seed(seed), dtype=D) + 0.1
    return Attend(row / row.sum())


def test_a_row_changes_the_weights_and_keeps_the_values():
    s = two_head_net(combine="concat", slices=2).sentence("the cat sat")
    other, row = s.net.sentence("the dog sat"), Attend([0, 1.0, 0])
    first = s.do({"x_0_1": other, "a_0_0_2": row})
    for patched in (first, s.do(x_0_1=other).do(a_0_0_2=row), s.do(a_0_0_2=row).do(x_0_1=other)):
        assert torch.equal(patched["a_0_0_2"], patched["v_0_0_1"]) and torch.equal(patched["x_2_0"], first["x_2_0"])
        assert patched.parents("a_0_0_2") == ["v_0_0_0", "v_0_0_1", "v_0_0_2"]
        assert "a_0_0_2" in patched.descendants("v_0_0_1") and "a_0_0_2" not in patched.descendants("k_0_0_1")
        close(patched.tpm("a_0_0_2").v, patched["v_0_0_1"])
        plain = s.do(x_0_1=other)
        close(patched.attention(0)[0], torch.stack([*plain.attention(0)[0, :2], row.weights]))
        close(patched.attention(0)[1], plain.attention(0)[1])
        A = [patched.attention(t).mean(0) for t in (0, 1)]
        close(patched.reads(residual=0.0).matrix, A[1] @ A[0])
    assert torch.equal(first.do(q_0_0_2=Zero(), k_0_0_1=Zero())["a_0_0_2"], first["a_0_0_2"])
    assert torch.equal(first.undo()["x_2_0"], s["x_2_0"]) and "do x_0_1, a_0_0_2" in repr(first)
    close(s.counterfactual("x_2_0", {"a_0_0_2": row}).mean, s.do(a_0_0_2=row)["x_2_0"])
    weights = {(a, b): attrs["weight"] for a, b, attrs in first.graph(attention=True).in_edges("a_0_0_2", data=True)}
    assert weights == {("v_0_0_0", "a_0_0_2"): 0, ("v_0_0_1", "a_0_0_2"): 1, ("v_0_0_2", "a_0_0_2"): 0}


@pytest.mark.parametrize("options", [{"residual": True}, {"atoms": 2}])
def test_a_row_is_the_same_for_every_open_choice(options):
    s = two_head_net(slices=2, **options).sentence("the cat sat")
    row = torch.tensor([0.25, 0.75, 0.0], dtype=D)
    patched = s.do(x_1_1=Attend(row))
    extra = s["x_0_1"] if options.get("residual") else 0
    close(patched["x_1_1"], 0.25 * s["v_0_0"] + 0.75 * s["v_0_1"] + extra)
    close(patched.attention(0)[..., 1, :], row.expand(*s.attention(0).shape[:-2], 3))
    close(patched.attention(0)[..., 0, :], s.attention(0)[..., 0, :])
    states = ("c",) if "atoms" not in options else tuple(f"W_{r}_{t}" for t in (0, 1) for r in "qkv")
    for chosen in itertools.product((0, 1), repeat=len(states)):
        fixed = patched.do(dict(zip(states, chosen, strict=True)))
        run = reference.ReferenceRun(fixed.state.model, {})
        for name in ("x_1_1", "x_2_0"):
            close(fixed[name], run.value(fixed.ground.id(name)))
    if "atoms" not in options:
        log_probs = torch.stack([patched.do(c=k).log_prob({"y_0": 2}) for k in (0, 1)])
        close(patched.posterior("c", {"y_0": 2}), (log_probs + s.posterior("c").log()).softmax(0))


def make_net_reading_neighbours():
    """Return a net whose words attend to the others, never to themselves, by x in every slot: with a row, x_i is no
    longer a parent."""
    mask = bt.Reach("mask", table=((False, True, True), (True, False, True), (True, True, False)))
    read, every, word = bt.Arrow("x", mask), bt.Arrow("a", "every"), ["word"]
    a = bt.Node("a", Attention(Dot()), ["x", read, read], plates=word)
    x = bt.Node("x", Attention(residual=True), ["x", every, every, "x"], plates=word)
    stack = bt.Stack([a, x], [bt.Node("x", Given(4), plates=word)], slices=2)
    return bt.BNet(bt.Declaration([stack], name="among others")).to(D).sentence("a b c")


NETS = {
    "chapter, two slices": ("x_1_1", "x_2_2"),
    "encoder-decoder": ("dec_a_0_1", "enc_a_1_2", "dec_cross_a_0_1"),
    "three stacks": ("dec_left_0_0", "enc_x_1_1"),
    "positioned": ("a_0_1_1",),
    "shared slices": ("a_0_2", "a_2_1"),
    "among others": ("a_0_1", "x_1_2", "a_1_0"),
}


def set_rows(name):
    s = make_net_reading_neighbours() if name == "among others" else get_case(name).sentence
    return s, s.do({node: make_row(s, node, k) for k, node in enumerate(NETS[name])})


@pytest.mark.parametrize("name", NETS)
def test_the_graph_keeps_only_the_arrows_of_values(name):
    s, patched = set_rows(name)
    before, graph = s.graph(), patched.graph()
    for node in NETS[name]:
        spec, index = find_spec(s, node)
        sources = [parent for parent in spec.parents if parent.slot in ("v.", "x")]
        expected = {
            n for parent in sources for n in reference.find_slot_parents(s.state.model, spec, index, parent, {})[1]
        }
        assert set(graph.predecessors(node)) == set(map(s.ground.name, expected))
    removed = set(before.edges) - set(graph.edges)
    assert removed and {child for _, child in removed} <= set(NETS[name]) and set(graph.edges) < set(before.edges)
    assert patched.ground.count_arrows() == graph.number_of_edges()
    for node in graph:
        assert set(patched.parents(node)) == set(graph.predecessors(node))
        assert set(patched.children(node)) == set(graph.successors(node))
        assert set(patched.ancestors(node)) == nx.ancestors(graph, node)
        assert set(patched.descendants(node)) == nx.descendants(graph, node)


@pytest.mark.parametrize("name", NETS)
def test_the_compiled_reading_the_reference_and_the_graph_agree_on_rows(name):
    """A row mixes the values; interventions on nodes that are no longer ancestors change nothing."""
    s, patched = set_rows(name)
    open_ids = reference.find_open_choices(patched.state.model, range(len(patched.ground)), {})
    s, patched = (sentence.do({patched.ground.name(n): 0 for n in open_ids}) for sentence in (s, patched))
    run = reference.ReferenceRun(patched.state.model, {})
    for spec in patched.net.network.specs:
        for node in patched.ground.select_nodes(spec.group).tolist() if spec.tpm.kind == "deterministic" else ():
            close(patched[patched.ground.name(node)], run.value(node))
    for k, node in enumerate(NETS[name]):
        spec, index = find_spec(s, node)
        slots = {p.slot: reference.find_slot_parents(s.state.model, spec, index, p, {}) for p in spec.parents}
        _, ids, words = slots["v."]
        row = make_row(s, node, k).weights
        expected = sum(row[j] * patched[patched.ground.name(n)] for j, n in zip(words, ids, strict=True))
        expected = expected + (patched[patched.ground.name(slots["x"][1][0])] if "x" in slots else 0)
        close(patched[node], expected)
        for parent in set(s.parents(node)) - set(patched.parents(node)):
            if find_spec(s, parent)[0].tpm.kind == "deterministic" and node not in patched.descendants(parent):
                close(patched.do({parent: Zero()})[node], patched[node], 0)


@pytest.mark.parametrize("name", NETS)
def test_separation_under_rows_is_networkxs(name):
    _, patched = set_rows(name)
    graph, pick = patched.graph(), random.Random(4)
    names, queries = list(graph), []
    while len(queries) < 80:
        x, y, *given = pick.sample(names, pick.randint(2, 5))
        neighbours = [*NETS[name], *graph.predecessors(pick.choice(NETS[name]))]
        x = pick.choice(neighbours) if pick.random() < 0.5 else x
        if x not in (y, *given):
            queries.append((x, y, given))
    expected = [nx.is_d_separator(graph, {x}, {y}, set(given)) for x, y, given in queries]
    assert patched.separations(queries).tolist() == expected and len(set(expected)) == 2
    for (x, y, given), is_separated in list(zip(queries, expected, strict=True))[:15]:
        trail = patched.active_trail(x, y, given)
        assert (trail is None) == is_separated
        for a, b, forward in zip(trail.nodes, trail.nodes[1:], trail.forward, strict=False) if trail else ():
            assert graph.has_edge(*((a, b) if forward else (b, a)))
        result = patched.minimal_separator(x, y)
        if result is not None:
            assert nx.is_d_separator(graph, {x}, {y}, set(result))
        closed = patched.separated(x, y, given, deterministic=True)
        assert bool(closed) or not is_separated


def test_rows_that_cannot_be():
    s = two_head_net(combine="concat", mask="causal").sentence("the cat sat")
    for node, row, match in (
        ("a_0_0_1", [0, 0, 1.0], r"words to which it can attend, \[0, 1\]"),
        ("a_0_0_2", [0.5, 0.5], "3 probabilities"),
        ("q_0_0_1", [1.0, 0, 0], "Attention"),
        ("x_1_0", [1.0, 0, 0], "Attention"),
    ):
        with pytest.raises(bt.EvidenceError, match=match):
            s.do({node: Attend(row)})
    close(s.do(a_0_0_1=Attend([0.5, 0.5]))["a_0_0_1"], (s["v_0_0_0"] + s["v_0_0_1"]) / 2)
    with pytest.raises(bt.EvidenceError, match="without pick="):
        two_head_net(per="word").sentence("a b").do(x_1_0=Attend([1.0, 0]))


# the chain that reads follow


CHAINS = {"concat": None, "chapter, two slices": None, "encoder, post-norm": None, "encoder-decoder": "enc_a"}


@pytest.mark.slow
@pytest.mark.parametrize(("name", "role"), CHAINS.items(), ids=str)
def test_a_chain_that_do_cuts_is_refused(name, role):
    """Only nodes on a path from the first state to the last that avoids q and k raise errors."""
    s = get_case(name).sentence
    stack = "enc" if role else ""
    start = "enc_" if role else ""
    graph = s.graph()
    graph.remove_nodes_from([n for n in s.ground.names if n.startswith((f"{start}q_", f"{start}k_"))])
    words, depth = len(s.state.tokens[stack]), s.net.network.graph.slices[stack]
    s = s.do(c=0) if "c" in s.ground.names else s
    for slices in ("all", *range(depth)):
        first, last = (0, depth) if slices == "all" else (slices, slices + 1)
        starts, ends = ([f"{start}x_{t}_{i}" for i in range(words)] for t in (first, last))
        reachable = set().union(*(nx.descendants(graph, n) for n in starts))
        route = reachable & set(ends).union(*(nx.ancestors(graph, n) for n in ends))
        for spec in s.net.network.specs:
            if spec.tpm.kind == "deterministic" and not spec.tpm.is_index_valued:
                node = s.ground.name(s.ground.select_nodes(spec.group).tolist()[-1])
                patched = s.do({node: Zero()})
                if node in route:
                    with pytest.raises(bt.BNetError, match=f"{node} set by do.*undo"):
                        patched.reads(slices, role=role)
                else:
                    close(patched.reads(slices, role=role).matrix.sum(-1), torch.ones(words))


# counterfactuals


def test_observed_nodes_may_be_set_to_other_values():
    s = two_head_net(atoms=2).sentence("the cat sat")
    observed, given = s.observe(W_q_0=0), s.counterfactual("y_2", {"W_q_0": 1}, {"W_q_0": 0})
    result = observed.counterfactual("y_2", {"W_q_0": 1})
    close(result.probabilities, given.probabilities)
    probs = observed.posterior(["c", "W_k_0", "W_v_0"])
    expected = sum(
        probs[c, k, v] * s.do(c=c, W_q_0=1, W_k_0=k, W_v_0=v).posterior("y_2")
        for c, k, v in itertools.product((0, 1), repeat=3)
    )
    close(result.probabilities, expected)
    with pytest.raises(bt.EvidenceError, match="not both"):
        observed.do(W_q_0=1)


def test_a_query_of_a_set_node_is_its_set_value():
    s = two_head_net(heads=3).sentence("the cat sat")
    result = s.counterfactual("c", {"c": 1}, {"y_2": 1})
    close(result.probabilities, torch.tensor([0.0, 1.0, 0.0]))
    ids = get_case("encoder, post-norm").sentence
    token = ids.counterfactual("token_1", {"token_1": 3})
    assert float(token.mean) == 3


# budgets


def test_a_budget_that_is_advised_can_be_given():
    s = two_head_net(per="word", slices=2).sentence("a b")
    for call in (
        lambda s: s.separated("x_1_0", "x_2_1", verify=True),
        lambda s: s.sample(2, {"y_0": 1}),
        lambda s: s.tan_tree(1),
    ):
        with pytest.raises(bt.BudgetError, match="budget="):
            call(s.limits(budget=3))
        call(s.limits(budget=2**12))
    assert math.isfinite(float(s.limits(budget=2**12).log_prob({"y_0": 1})))
