"""Variable elimination on the factor graph of a sentence: equal to brute force; its scopes and its cost."""

import math
import random
import time
from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import given, settings, strategies as st
from scipy.special import logsumexp

import bnet_transformer as bt
from bnet_transformer import reference
from bnet_transformer.inference.contraction import (
    LogTable,
    compute_joint_table,
    compute_marginals,
    find_best_states,
    find_constrained_order,
    find_elimination_order,
    sum_out,
)
from bnet_transformer.inference.factor_graph import FactorGraph, build_factor_graph
from bnet_transformer.inference.most_probable import plan_marginal_map
from bnet_transformer.inference.posteriors import JointPlan, plan_conditioning, plan_node_posteriors
from bnet_transformer.inference.query import Query
from bnet_transformer.tpm import Attention, Categorical, Codebook, Given, Linear, Normal, Pool, Select
from tests.cases import close, jitter

D = torch.float64
WORD = ["word"]


def build_net(nodes, readout, prologue=(), slices=1, dim=2):
    """A net of one stack with given vectors x, in float64, with spread parameters."""
    start = [bt.Node("x", Given(dim), plates=WORD), *prologue]
    stack = bt.Stack(nodes, start, readout, slices=slices)
    return jitter(bt.BNet(bt.Declaration([stack])), 1.0).to(D)


def with_zeros(net: bt.BNet, pick: random.Random, share: float = 0.3) -> bt.BNet:
    """The net with probabilities of 0 in the tables of its discrete nodes; the first state stays possible."""
    tables = {name: net.parameters[name].clone() for name in sorted(net.network.unconditional_logit_names)}
    for table in tables.values():
        for row in table.reshape(-1, table.shape[-1]):
            row[1:][torch.tensor([pick.random() < share for _ in row[1:]], dtype=torch.bool)] = -torch.inf
    return net.replace(tables)


def chain(pick: random.Random) -> bt.BNet:
    """A chain, or several that interact, along the words; a readout of the word's states."""
    arrows = lambda *roles: [bt.Arrow(role, "before") for role in roles]  # noqa: E731
    kind = pick.choice(["first order", "second order", "product", "with x", "all earlier words"])
    if kind == "product":
        nodes = [
            bt.Node("c", Categorical(2), arrows("c"), WORD),
            bt.Node("d", Categorical(3), [*arrows("d"), *(["c"] if pick.random() < 0.5 else [])], WORD),
        ]
        return build_net(nodes, [bt.Node("y", Categorical(2), ["c", "d"], WORD)])
    if kind == "all earlier words":
        nodes = [
            bt.Node("e", Select(2), ["c"], WORD, shape=(2,)),
            bt.Node("p", Pool("sum"), [bt.Arrow("e", "earlier")], WORD, shape=(2,)),
            bt.Node("c", Categorical(3), [*(arrows("c") if pick.random() < 0.5 else []), "p"], WORD),
        ]
        return build_net(nodes, [bt.Node("y", Categorical(2), ["e"], WORD)])
    nodes = [bt.Node("c", Categorical(3), [*arrows("c"), *(["x"] if kind == "with x" else [])], WORD)]
    if kind == "second order":
        nodes = [
            bt.Node("p", Select(2), arrows("c"), WORD),
            bt.Node("c", Categorical(3), [*arrows("c"), *arrows("p")], WORD),
        ]
    mean = bt.Node("m", Select(2), ["c"], WORD)
    return build_net([*nodes, mean], [bt.Node("y", Normal(0.7), ["m"], WORD)])


def windows(pick: random.Random) -> bt.BNet:
    """Choices of words under attention with windows, in one to three slices, with or without a chain."""
    reach = pick.choice([bt.Reach("window", 1), bt.Reach("recent", 1), bt.Reach("causal")])
    reads = pick.choice([[], ["x"], [bt.Arrow("c", "before")]])
    weight = pick.choice([Select((2, 2)), Codebook(2, (2, 2))])
    nodes = [
        bt.Node("c", Categorical(2), reads, WORD),
        bt.Node("W", weight, ["c"], WORD),
        bt.Node("v", Linear(), ["W", "x"], WORD),
        bt.Node("x", Attention(residual=True), ["x", bt.Arrow("x", reach), bt.Arrow("v", reach), "x"], WORD),
    ]
    small = isinstance(weight, Select) and not reads
    readout = pick.choice([Categorical(2), Normal(0.8)])
    return build_net(nodes, [bt.Node("y", readout, ["x"], WORD)], slices=pick.choice([1, 2, 2, 3]) if small else 1)


def plates(pick: random.Random) -> bt.BNet:
    """A net without words: choices with a plate, and a graph with loops."""
    nodes = [
        bt.Node("a", Categorical(2)),
        bt.Node("b", Categorical(3), ["a"]),
        bt.Node("s", Categorical(2), ["a"], plates=["site"]),
        bt.Node("t", Categorical(2), ["s", "b"], plates=["site"]),
        bt.Node("m", Select(2), ["t"], plates=["site"]),
        bt.Node("e", Categorical(2), ["b"]),
        bt.Node("y", pick.choice([Normal(0.7), Categorical(2)]), ["m"], plates=["site"]),
    ]
    return jitter(bt.BNet(bt.Declaration(nodes=nodes, plates=[bt.Plate("site", 2)])), 1.0).to(D)


def draw_sentence(pick: random.Random) -> bt.Sentence:
    """A random net, a sentence with interventions, and evidence that was drawn from it on some of its nodes."""
    net = with_zeros(pick.choice([chain, windows, windows, plates])(pick), pick)
    s = net.sentence("a b c"[: pick.choice([3, 5])]) if net.network.graph.word_stacks else net.sentence()
    specs = [spec for spec in net.network.specs if spec.tpm.kind == "discrete"]
    discrete = [n for spec in specs for n in s.ground.select_nodes(spec.group).tolist()]
    for node in discrete:
        if pick.random() < 0.15:
            s = s.do({s.ground.name(node): 0})
    samples = s.sample(1, seed=pick.randrange(100))
    left = {name: value[0] for name, value in samples.states.items() if s.ground.id(name) not in s.state.model.do}
    evidence = {name: value for name, value in left.items() if pick.random() < (0.7 if name[0] == "y" else 0.15)}
    fixed = {s.ground.name(node): value for node, value in s.state.model.do.items()}
    values = s.do({name: value for name, value in left.items() if name not in fixed})
    for spec in net.network.specs:  # evidence on values: of functions, and of choices that are vectors
        node = s.ground.name(int(s.ground.select_nodes(spec.group)[0]))
        is_value = spec.tpm.kind == "deterministic" or (spec.tpm.kind == "discrete" and spec.shape)
        if is_value and spec.group.role in ("x", "m", "W") and node not in fixed and pick.random() < 0.3:
            evidence[node] = values[node]
    return s.observe(evidence)


def find_best(query: Query, count: int):
    """The most probable joint states of all latent choices: the nodes, their states and log probabilities."""
    query = query.without_input_evidence()
    return plan_marginal_map(replace(query, nodes=tuple(query.without_target_evidence().choices)), count).run()


class BruteForce:
    """`log P(choices, evidence)` in every joint state, by the reference."""

    def __init__(self, query: Query) -> None:
        self.choices = query.choices
        runs = reference.enumerate_runs(query.model, self.choices, query.fixed, 2**20)
        logs = [reference.log_joint(run, self.choices, query.evidence) for run in runs]
        sizes = [query.model.count_states(node) for node in self.choices]
        self.table = torch.tensor(logs, dtype=D).reshape(sizes)

    def sum_out(self, nodes) -> torch.Tensor:
        """`log P(nodes, evidence)`, `[*states]`."""
        summed = [k for k, node in enumerate(self.choices) if node not in nodes]
        table = self.table.logsumexp(summed) if summed else self.table
        order = sorted(nodes)
        return table.permute([order.index(node) for node in nodes])


def check_ranked(result, logs: torch.Tensor, count: int) -> None:
    """Assert that ranked joint states are the `count` largest entries of a table."""
    nodes, states, log_probs = result
    expected = torch.sort(logs.flatten(), descending=True)[0]
    expected = expected[expected > -math.inf][:count]
    assert tuple(states.shape) == (len(expected), len(nodes)) and len(set(map(tuple, states.tolist()))) == len(states)
    close(log_probs, expected)
    close(logs[tuple(states.unbind(1))].reshape(-1), log_probs)


@settings(max_examples=10, deadline=None)
@given(st.integers(0, 10**6))
def test_every_algorithm_equals_brute_force(seed):
    pick = random.Random(seed)
    s = draw_sentence(pick)
    query = s.limits(budget=2**20).state.query().without_input_evidence()
    brute = BruteForce(query)
    nodes = tuple(pick.sample(brute.choices, min(len(brute.choices), pick.randint(0, 2))))
    expected, query = brute.sum_out(nodes), replace(query, nodes=nodes)
    assert expected.isfinite().any()
    graph, conditioning = build_factor_graph(query), plan_conditioning("joint probability", query)
    assert isinstance(graph, FactorGraph) and graph.find_excess(graph.order) is None
    close(graph.compute_joint(), expected)
    assert isinstance(conditioning, JointPlan)
    close(conditioning.plan.run(), expected)
    if nodes:
        close(s.posterior([*map(s.ground.name, nodes)]), expected.flatten().softmax(0).reshape(expected.shape))
    close(s.log_prob(), expected.flatten().logsumexp(0))
    joint = replace(query, nodes=tuple(brute.choices))
    for node, probs in plan_node_posteriors(joint).run().items() if joint.nodes else ():
        close(probs, brute.sum_out([node]).softmax(0))
    count = pick.randint(1, 6)
    check_ranked(find_best(replace(query, nodes=()), count), brute.table, count)
    if nodes:
        check_ranked(plan_marginal_map(query, count).run(), expected, count)


# tables


def draw_tables(pick: random.Random) -> tuple[list[int], list[LogTable]]:
    """The sizes of variables, and random tables with zeros and ties."""
    sizes = [pick.choice([1, 2, 3]) for _ in range(pick.randint(1, 6))]
    rng, tables, variables = (
        np.random.default_rng(pick.randrange(10**6)),
        [LogTable((), np.array(0.5))],
        range(len(sizes)),
    )
    for variable in variables:
        scope = tuple(sorted({variable, *pick.sample(variables, pick.randint(0, min(len(sizes), 3)))}))
        values = np.round(rng.normal(size=[sizes[k] for k in scope]))
        tables.append(LogTable(scope, np.where(rng.random(values.shape) < 0.2, -np.inf, values)))
    return sizes, tables


@settings(max_examples=40, deadline=None)
@given(st.integers(0, 10**6))
def test_sums_maxima_and_marginals_of_tables(seed):
    pick = random.Random(seed)
    sizes, tables = draw_tables(pick)
    scopes, variables = [table.scope for table in tables], range(len(sizes))
    full = sum(t.values.reshape([sizes[k] if k in t.scope else 1 for k in variables]) for t in tables)
    chosen = pick.sample(variables, pick.randint(0, len(sizes)))
    order = find_elimination_order(scopes, sizes, chosen)
    assert sorted([*order.variables, *chosen]) == [*variables]
    summed = logsumexp(full, axis=tuple(k for k in variables if k not in chosen)) if len(chosen) < len(sizes) else full
    ranks = np.argsort(np.argsort(chosen))
    np.testing.assert_allclose(
        compute_joint_table(tables, order, sizes, chosen), np.transpose(summed, ranks) if chosen else summed, atol=1e-12
    )
    order = find_elimination_order(scopes, sizes)
    total, marginals = compute_marginals(tables, order, sizes)
    assert (total == -np.inf) == (full.max() == -np.inf)
    for k, logs in marginals.items():
        np.testing.assert_allclose(
            np.exp(logs), np.exp(full - total).sum(tuple(j for j in variables if j != k)), atol=1e-12
        )
    # the k largest, ties by the smallest states
    count = pick.randint(1, 7)
    states, logs = find_best_states(tables, order, sizes, count)
    flat = [i for i in np.argsort(-full.ravel(), kind="stable") if full.ravel()[i] > -np.inf][:count]
    assert (
        np.stack([states[k] for k in variables], 1).tolist()
        == np.stack(np.unravel_index(np.array(flat, dtype=np.int64), sizes), 1).tolist()
    )
    assert logs.tolist() == full.ravel()[flat].tolist()
    # the same after a sum over other variables
    first, last = find_constrained_order([*scopes, *((k,) for k in chosen)], sizes, chosen)
    assert (sorted(first.variables), sorted(last.variables)) == (sorted({*variables} - {*chosen}), sorted(chosen))
    _, logs = find_best_states(sum_out(tables, first.variables, sizes), last, sizes, count)
    expected = np.sort(np.ravel(summed))[::-1]
    np.testing.assert_allclose(logs, expected[expected > -np.inf][:count], atol=1e-12)


# long sentences


def hidden_chain(words: int, states: int = 4, dtype: torch.dtype = D, scale: float = 1.0) -> bt.Sentence:
    """A chain of discrete states along the words with a real readout of each, observed."""
    nodes = [bt.Node("c", Categorical(states), [bt.Arrow("c", "before")], WORD), bt.Node("m", Select(2), ["c"], WORD)]
    net = build_net(nodes, [bt.Node("y", Normal(0.7), ["m"], WORD)]).to(dtype)
    generator = torch.Generator().manual_seed(3)
    values = scale * torch.randn(words, 2, generator=generator, dtype=D)
    s = net.sentence(torch.zeros(words, 2, dtype=dtype))
    return s.observe({f"y_{i}": value.to(dtype) for i, value in enumerate(values)})


def chain_terms(s: bt.Sentence) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """The log tables of a hidden chain: `[state]`, transitions `[state, state]`, likelihoods `[word, state]`."""
    p = {name: value.double() for name, value in s.net.parameters.items()}
    means, log_sigma = p["m_0.values"], p["y.log_sigma"]
    y = torch.stack([s.state.evidence[s.ground.id(f"y_{i}")] for i in range(len(s.state.evidence))]).double()
    likelihood = torch.distributions.Normal(means, log_sigma.exp()).log_prob(y[:, None]).sum(-1)
    return p["c_0.initial"].log_softmax(0).numpy(), p["c_0.logits"].log_softmax(1).numpy(), likelihood.numpy()


def run_forward(initial, transitions, likelihoods, reduce=logsumexp) -> float:
    """The forward algorithm; with a maximum it is that of Viterbi."""
    message = initial + likelihoods[0]
    for likelihood in likelihoods[1:]:
        message = reduce(message[:, None] + transitions, axis=0) + likelihood
    return float(reduce(message, axis=0))


@pytest.mark.slow
def test_a_chain_of_1000_words_is_that_of_the_forward_algorithm():
    s = hidden_chain(1000)
    terms, query = chain_terms(s), s.state.query()
    start = time.perf_counter()
    graph = build_factor_graph(query)
    assert isinstance(graph, FactorGraph) and (graph.order.states, graph.rows) == (16, 8)
    assert graph.order.entries <= 16 * 1000
    total = graph.compute_joint()
    close(float(total), run_forward(*terms), 1e-9)
    _, states, log_probs = find_best(query, 2)
    close(float(log_probs[0]), run_forward(*terms, np.max), 1e-9)
    assert states.shape == (2, 1000) and log_probs[1] < log_probs[0]
    samples = graph.draw(50, torch.Generator().manual_seed(1))
    assert time.perf_counter() - start < 10  # 1 s without load
    initial, transitions, _ = terms
    first, second = (samples[s.ground.id(f"c_0_{i}")] for i in (0, 1))
    assert initial[first].min() > -np.inf and transitions[first, second].min() > -np.inf


@pytest.mark.parametrize("dtype", [torch.float32, D])
def test_zeros_and_large_gaps_that_reverse_later(dtype):
    """State 0 cannot be left. The first word favours it by some 2,000 nats, the next words favour state 1 by more."""
    nodes = [bt.Node("c", Categorical(2), [bt.Arrow("c", "before")], WORD), bt.Node("m", Select(2), ["c"], WORD)]
    net = build_net(nodes, [bt.Node("y", Normal(0.04), ["m"], WORD)])
    tables = {"c_0.logits": [[0.0, -math.inf], [0.0, 0.0]], "m_0.values": [[0.0, 0.0], [2.0, 2.0]]}
    net = net.replace({name: torch.tensor(value, dtype=D) for name, value in tables.items()}).to(dtype)
    values = torch.tensor([[0.4, 0.4], [1.6, 1.6], [1.6, 1.6], [0.0, 0.1], [2.0, 2.0]], dtype=dtype)
    s = net.sentence(torch.zeros(5, 2, dtype=dtype)).observe({f"y_{i}": value for i, value in enumerate(values)})
    terms = chain_terms(s)
    assert np.ptp(terms[2], axis=1).max() > 2000
    tolerance = 1e-10 if dtype == D else 1e-5
    graph = build_factor_graph(s.state.query())
    close(float(graph.compute_joint()), run_forward(*terms), tolerance)
    _, states, log_probs = find_best(s.state.query(), 40)
    close(float(log_probs[0]), run_forward(*terms, np.max), tolerance)
    assert len(states) == 6 and all(row == sorted(row, reverse=True) for row in states.tolist())  # 1 .. 1 0 .. 0
    assert all(bool(probs.isfinite().all()) for probs in graph.compute_marginals().values())


def test_impossible_evidence_in_a_long_chain_is_named():
    """State k is followed by k or k + 1, and the readout is the state."""
    nodes = [bt.Node("c", Categorical(3), [bt.Arrow("c", "before")], WORD)]
    net = build_net(nodes, [bt.Node("y", Categorical(3), ["c"], WORD)])
    inf = math.inf
    chain_table = torch.tensor([[0.0, 0.0, -inf], [-inf, 0.0, 0.0], [-inf, -inf, 0.0]], dtype=D)
    net = net.replace({"c_0.logits": chain_table, "y.logits": torch.eye(3, dtype=D).log()})
    s = net.sentence(torch.zeros(60, 2, dtype=D))
    possible = {f"y_{i}": i // 25 for i in range(60)}
    assert math.isfinite(float(s.log_prob(possible)))
    for call in (s.log_prob, lambda e: s.posterior("c_0_3", e), lambda e: s.sample(2, e)):
        with pytest.raises(bt.EvidenceError, match=r"y_40: .*probability zero given the evidence before it"):
            call({**possible, "y_40": 0})
    with pytest.raises(bt.EvidenceError, match="y_40"):
        find_best(s.observe({**possible, "y_40": 0}).state.query(), 1)


# scopes, costs and budgets


def test_windows_cost_their_true_price():
    """Two slices that read three words, K states: K^3 for the slice below and K of the word itself."""
    reach = bt.Reach("window", 1)
    s = bt.bayesuvius(4, heads=3, slices=2, per="word", mask=reach, observe=Categorical(2)).sentence("a b c " * 8)
    evidence = {f"y_{i}": i % 2 for i in range(24)}
    plan = s.explain("posterior", "c_0_5", evidence)
    assert (plan.algorithm, plan.is_exact, plan.rows) == ("variable elimination", True, 3**4 + 2)
    assert plan.states <= 3**4 and plan.entries < 24 * 2 * 3**4 and len(plan.order) == 47
    assert set(plan.scope) <= {*plan.order, "c_0_5"} and str(plan.states) in str(plan)
    assert plan.flops == s.explain("log_prob", evidence).flops
    assert float(s.posterior("c_0_5", evidence).sum()) == pytest.approx(1)


def test_choices_of_the_last_slice_are_summed_word_by_word():
    s = bt.bayesuvius(3, heads=2, slices=2, per="word", observe=Categorical(2)).to(D).sentence("a b c d e")
    evidence = {f"y_{i}": i % 2 for i in range(5)}
    plan = s.explain("log_prob", evidence)
    assert (plan.algorithm, plan.states, len(plan.choices)) == ("conditioning", 2**5, 5)
    graph = build_factor_graph(s.observe(evidence).state.query())
    close(s.log_prob(evidence), graph.compute_joint())


def test_over_budget_the_costliest_scope_is_named():
    s = hidden_chain(30)
    nodes = [s.ground.id(name) for name in ("c_0_3", "c_0_12", "c_0_20")]
    with pytest.raises(bt.BudgetError, match=r"at most 20 joint states of c_0_\d+, .*got 64\. Raise the budget"):
        plan_marginal_map(s.limits(budget=20).state.query(nodes), 1).run()
    assert build_factor_graph(s.limits(budget=64).state.query(nodes)).find_excess() is None
    reach = bt.Reach("window", 1)
    windowed = bt.bayesuvius(4, heads=3, slices=2, per="word", mask=reach, observe=Categorical(2)).sentence(
        "a b c " * 8
    )
    windowed = windowed.limits(budget=80)
    for call in (windowed.log_prob, lambda e: windowed.sample(2, e)):
        with pytest.raises(bt.BudgetError, match=r"at most 80 joint states of c_0_\d+, .* factor of y_\d+; got 81"):
            call({f"y_{i}": 0 for i in range(24)})


def test_chains_with_too_many_joint_states_are_eliminated_one_by_one():
    """Three chains with a common readout have 8^2 pairs of joint states, but no scope has more than 2^4."""
    roles = ["a", "b", "c"]
    nodes = [bt.Node(role, Categorical(2), [bt.Arrow(role, "before")], WORD) for role in roles]
    s = build_net(nodes, [bt.Node("y", Categorical(2), roles, WORD)]).sentence(torch.zeros(6, 2, dtype=D))
    evidence = {f"y_{i}": i % 2 for i in range(6)}
    assert s.explain("log_prob", evidence).algorithm == "elimination"
    plan = s.limits(budget=16).explain("log_prob", evidence)
    assert (plan.algorithm, plan.states) == ("variable elimination", 16)
    close(s.limits(budget=16).log_prob(evidence), s.log_prob(evidence))


def test_a_value_of_no_state_is_impossible():
    pick = random.Random(0)
    nodes = [
        bt.Node("W", Codebook(2, (2, 2)), [], WORD),
        bt.Node("v", Linear(), ["W", "x"], WORD),
        bt.Node("x", Attention(), ["x", bt.Arrow("x", "every"), bt.Arrow("v", "every")], WORD),
    ]
    s = with_zeros(build_net(nodes, [bt.Node("y", Categorical(2), ["x"], WORD)]), pick).sentence("a b")
    for call in (s.log_prob, lambda e: s.posterior("W_0_1", e), lambda e: s.sample(2, e)):
        with pytest.raises(bt.EvidenceError, match=r"W_0_0: .*probability zero"):
            call({"y_0": 1, "W_0_0": torch.full((2, 2), 9.0, dtype=D)})
    with pytest.raises(bt.EvidenceError, match="W_0_0"):
        find_best(s.observe({"y_0": 1, "W_0_0": torch.full((2, 2), 9.0, dtype=D)}).state.query(), 2)
