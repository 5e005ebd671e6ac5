"""Variable elimination on the factor graph of a sentence: equal to brute force, in every algorithm; its scopes and cost."""

import itertools
import math
import random
from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import given, settings, strategies as st

import bnet_transformer as bt
from bnet_transformer import reference
from bnet_transformer.inference.contraction import (
    LogTable,
    compute_joint_table,
    find_best_states,
    find_constrained_order,
    find_elimination_order,
    sum_out,
)
from bnet_transformer.inference.factor_graph import FactorGraph, build_factor_graph
from bnet_transformer.inference.joint_posterior import (
    _joint_log_probs,
    find_marginal_map,
    find_most_probable,
    route_marginal_map,
)
from bnet_transformer.inference.query import Query
from bnet_transformer.inference.routing import JointPlan, plan_conditioning, route_joint
from bnet_transformer.tpm import Add, Attention, Categorical, Codebook, Given, Linear, Normal, Select
from tests.cases import close, get_case, jitter

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
    kind = pick.choice(["first order", "second order", "product", "with x"])
    if kind == "product":
        nodes = [
            bt.Node("c", Categorical(2), arrows("c"), WORD),
            bt.Node("d", Categorical(3), [*arrows("d"), *(["c"] if pick.random() < 0.5 else [])], WORD),
        ]
        return build_net(nodes, [bt.Node("y", Categorical(2), ["c", "d"], WORD)])
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
    reads = [pick.choice([[], ["x"], [bt.Arrow("c", "before")]])][0]
    weight = pick.choice([Select((2, 2)), Codebook(2, (2, 2))])
    nodes = [
        bt.Node("c", Categorical(2), reads, WORD),
        bt.Node("W", weight, ["c"], WORD),
        bt.Node("v", Linear(), ["W", "x"], WORD),
        bt.Node("x", Attention(residual=True), ["x", bt.Arrow("x", reach), bt.Arrow("v", reach), "x"], WORD),
    ]
    small = isinstance(weight, Select) and not reads
    readout = pick.choice([Categorical(2), Normal(0.8)])
    return build_net(nodes, [bt.Node("y", readout, ["x"], WORD)], slices=pick.choice([1, 2]) if small else 1)


def plates(pick: random.Random) -> bt.BNet:
    """A net without words: choices with a plate, and a graph with loops."""
    nodes = [
        bt.Node("a", Categorical(2)),
        bt.Node("b", Categorical(3), ["a"]),
        bt.Node("s", Categorical(2), ["a"], plates=["site"]),
        bt.Node("t", Categorical(2), ["s", "b"], plates=["site"]),
        bt.Node("m", Select(2), ["t"], plates=["site"]),
        bt.Node("pool", Add(), [bt.Arrow("m", over="site")]) if False else bt.Node("e", Categorical(2), ["b"]),
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
    drawn = s.sample(1, seed=pick.randrange(100))
    left = {name: value[0] for name, value in drawn.states.items() if s.ground.id(name) not in s.state.model.do}
    evidence = {name: value for name, value in left.items() if pick.random() < (0.7 if name[0] == "y" else 0.15)}
    fixed = {s.ground.name(node): value for node, value in s.state.model.do.items()}
    values = s.do({name: value for name, value in left.items() if name not in fixed})
    for spec in net.network.specs:  # evidence on values: of functions, and of choices that are vectors
        node = s.ground.name(int(s.ground.select_nodes(spec.group)[0]))
        is_value = spec.tpm.kind == "deterministic" or (spec.tpm.kind == "discrete" and spec.shape)
        if is_value and spec.group.role in ("x", "m", "W") and node not in fixed and pick.random() < 0.3:
            evidence[node] = values[node]
    return s.observe(evidence)


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
        others = [k for k, node in enumerate(self.choices) if node not in nodes]
        table = self.table.logsumexp(others) if others else self.table
        order = sorted(nodes)
        return table.permute([order.index(node) for node in nodes])


def check_ranked(found, logs: torch.Tensor, count: int) -> None:
    """Assert that ranked joint states are the `count` largest entries of a table."""
    nodes, states, log_probs = found
    expected = torch.sort(logs.flatten(), descending=True)[0]
    expected = expected[expected > -math.inf][:count]
    assert tuple(states.shape) == (len(expected), len(nodes)) and len(set(map(tuple, states.tolist()))) == len(states)
    close(log_probs, expected)
    close(logs[tuple(states.unbind(1))].reshape(-1), log_probs)


@settings(max_examples=40, deadline=None)
@given(st.integers(0, 10**6))
def test_every_algorithm_equals_brute_force(seed):
    pick = random.Random(seed)
    s = draw_sentence(pick)
    query = s.state.query(budget=2**20).without_input_evidence()
    brute = BruteForce(query)
    nodes = tuple(pick.sample(brute.choices, min(len(brute.choices), pick.randint(0, 2))))
    expected, query = brute.sum_out(nodes), replace(query, nodes=nodes)
    assert expected.isfinite().any()
    graph, conditioning, route = build_factor_graph(query), plan_conditioning(query), route_joint(query)
    assert isinstance(graph, FactorGraph) and graph.find_excess(graph.order) is None
    close(graph.compute_joint(), expected)
    assert isinstance(conditioning, JointPlan)
    close(_joint_log_probs(query, replace(route, plan=conditioning, choices=conditioning.nodes)), expected)
    if brute.choices:
        everything = plan_conditioning(replace(query, nodes=tuple(brute.choices)))
        close(
            _joint_log_probs(replace(query, nodes=tuple(brute.choices)), replace(route, plan=everything)), brute.table
        )
    if nodes:
        close(s.posterior([*map(s.ground.name, nodes)]), expected.flatten().softmax(0).reshape(expected.shape))
    close(s.log_prob(), expected.flatten().logsumexp(0))
    count = pick.randint(1, 6)
    check_ranked(find_most_probable(replace(query, nodes=()), count), brute.table, count)
    if nodes:
        check_ranked(find_marginal_map(query, count), expected, count)
