"""Costs: FLOPs equal torch's counter, sizes those of the values, path lengths and steps those of networkx."""

from __future__ import annotations

import itertools

import networkx as nx
import numpy as np
import pytest
import torch
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode

import bnet_transformer as bt
from bnet_transformer.compiler.plan import PlanRequest
from bnet_transformer.cost import Cost, Polynomial
from bnet_transformer.cost.flop_counter import FlopCounter, SizeTable
from bnet_transformer.tpm import (
    TPM,
    Add,
    Affine,
    Attention,
    Bilinear,
    Categorical,
    Cayley,
    Codebook,
    Dot,
    FeedForward,
    Given,
    Linear,
    Norm,
    Pool,
    Weight,
)
from tests.cases import CASES, HEADS, WORD, every, projections
from tests.custom_tpms import Gate, Recurrent
from tests.sweep_oracle import get_refusal

REFUSED = ("word, two slices", "windowed selectors")
"""The net whose readout cannot be computed in batches."""


def draw_inputs(net: bt.BNet, words: dict[str, int], batch: int) -> Tensor | dict[str, Tensor]:
    """Return input for a module: vectors or ids for each stack."""
    x = {}
    for stack, n in words.items():
        inputs = [m for m in net.network.specs if m.tpm.kind == "input" and m.group.word_stack == stack]
        spec = next(iter([m for m in inputs if m.tpm.is_index_valued] or inputs))
        if spec.tpm.is_index_valued:
            x[stack] = torch.randint(0, spec.tpm.states, (batch, n))
        else:
            x[stack] = torch.randn(batch, n, *spec.shape, dtype=net.network.dtype)
    return x if len(x) > 1 else next(iter(x.values()))


def flops_of(net: bt.BNet, words: dict[str, int], batch: int) -> int:
    """Return the FLOPs of a forward pass from torch's counter."""
    with FlopCounterMode(display=False) as counter, sdpa_kernel(SDPBackend.MATH), torch.no_grad():
        net.module()(draw_inputs(net, words, batch))
    return counter.get_total_flops() + count_solve_flops(net, words, batch)


def count_solve_flops(net: bt.BNet, words: dict[str, int], batch: int) -> int:
    """Return FLOPs of linear systems, which torch does not count: n^3 to factorize, n^2 d for d right-hand sides."""
    (n, *_) = words.values()
    widths = [m.shape[0] for m in net.network.specs if isinstance(m.tpm, Cayley)]
    return sum(2 * batch * n**2 * (n + d) for d in widths)


def count_words(net: bt.BNet, n: int) -> dict[str, int]:
    """Return word counts for stacks, one more in each further stack; smaller where positions are learned, because of
    the tables."""
    words = {stack: n + k for k, stack in enumerate(net.network.graph.word_stacks)}
    for spec in net.network.specs:
        if spec.tpm.max_words is not None:
            words[spec.group.word_stack] = min(words[spec.group.word_stack], spec.tpm.max_words)
        for parent in spec.parents:
            if parent.reach.kind == "mask":
                parent_stack = net.network.specs[parent.index].group.word_stack
                words |= {spec.group.word_stack: len(parent.reach.table), parent_stack: len(parent.reach.table[0])}
    return words


WORDLESS = [case for case in CASES if not case.net.network.graph.word_stacks]
TABLES = ("factorial chains", "tagger")  # nets without matrix products
COUNTED = [case for case in CASES if case.name not in (*REFUSED, *TABLES) and case not in WORDLESS]
FREE = [case for case in COUNTED if min(count_words(case.net, 40).values()) == 40]
"""Those for any number of words."""


@pytest.mark.parametrize("case", COUNTED, ids=lambda case: case.name)
def test_flops_are_those_that_torch_counts(case):
    for n, batch in ((3, 2), (17, 1)):
        words = count_words(case.net, n)
        assert case.net.cost(words, batch=batch).flops == flops_of(case.net, words, batch) > 0, words


@pytest.mark.parametrize("case", FREE, ids=lambda case: case.name)
def test_polynomials_hold_for_other_numbers_of_words(case):
    words = count_words(case.net, 20)
    cost = case.net.cost(words)
    symbols = {stack: f"n_{stack}" if len(words) > 1 else "n" for stack in words}
    for n in (18, 29):
        longer = {stack: n + 2 * k for k, stack in enumerate(words)}
        assert cost.flops_in_words({symbols[stack]: m for stack, m in longer.items()}) == flops_of(case.net, longer, 1)
        assert cost.flops_in_words(longer) == case.net.cost(longer).flops  # the mapping of `cost(words=)`
        assert [row.value_bytes_in_words(longer) for row in cost.rows] == [
            row.value_bytes for row in case.net.cost(longer).rows
        ]
    again = case.net.cost(23)
    assert [row.value_bytes_in_words(23) for row in cost.rows] == [row.value_bytes for row in again.rows]


@pytest.mark.parametrize("case", COUNTED, ids=lambda case: case.name)
def test_numbers_of_parameters_and_values_are_exact(case):
    net = case.net
    words = count_words(net, 3)
    cost = net.cost(words, batch=2)
    assert cost.parameters == sum(value.numel() for value in net.parameters.values())
    assert cost.parameter_bytes == 8 * cost.parameters
    module = net.module()
    outputs = tuple(group.index for group in net.network.graph.groups)
    try:
        module.plan(PlanRequest(outputs))
    except bt.BNetError:  # not all of them can be computed at once
        outputs = (net.network.graph.get_group(module.output).index,)
    names = [net.network.graph.groups[index].name for index in outputs]
    state, _ = module.execute(module.check_request(names, draw_inputs(net, words, 2)))
    fold = 2 * max(words.values()) > module.max_width
    counting = FlopCounter(module.plan(PlanRequest(outputs, fold=fold)), SizeTable(net.network, words, 2))
    symbols = {counting.sizes.word_size(stack).symbol: n for stack, n in words.items()}
    for index, value in state.values.items():
        spec = net.network.specs[index]
        if spec.tpm.kind == "deterministic":
            assert counting.entries[index].exact(symbols) == value.numel(), spec.family.name
    word_free = {m.group.stem for m in net.network.specs if m.group.index in net.network.graph.word_independent}
    assert all(row.value_bytes == 0 for row in cost.rows if row.template in word_free)


@pytest.mark.parametrize("case", WORDLESS, ids=lambda case: case.name)
def test_a_net_without_words_costs_what_its_tables_hold(case):
    net = case.net
    cost = net.cost()
    with FlopCounterMode(display=False) as counter, torch.no_grad():
        net.module()()
    assert cost.flops == counter.get_total_flops() and cost.words == {}
    assert cost.parameters == sum(value.numel() for value in net.parameters.values())
    with pytest.raises(bt.BNetError, match="no words"):
        net.cost(3)


@pytest.mark.parametrize("name", REFUSED)
def test_what_cannot_be_computed_has_no_cost(name):
    (case,) = (case for case in CASES if case.name == name)
    with pytest.raises(bt.BNetError, match="cannot eliminate c_0 exactly in a batch"):
        case.net.cost(3)


def word_net(nodes: list[bt.Node], *, slices: int = 1, epilogue: tuple[bt.Node, ...] = (), width: int = 8) -> bt.BNet:
    """A net of one stack over vectors."""
    stack = bt.Stack(nodes, [bt.Node("x", Given(width), plates=WORD)], epilogue, slices=slices)
    return bt.BNet(bt.Declaration([stack], plates=[bt.Plate("head", 2)], name="small"))


def attention_net(reach: object, slices: int = 1, *, residual: bool = False) -> bt.BNet:
    """Attention of the words themselves, by a reach."""
    arrow = bt.Arrow("x", reach)
    residual_parents = ["x"] if residual else []
    node = bt.Node("x", Attention(residual=residual), ["x", arrow, arrow, *residual_parents], plates=WORD)
    return word_net([node], slices=slices)


def get_orders(cost: Cost) -> dict[str, str]:
    """Return the order of each template of a slice."""
    return {row.template: row.order for row in cost.rows if row.block == "slice"}


def test_orders_follow_from_the_shapes():
    dim, heads = 32, 2
    nodes = [
        *projections(heads=True, width=dim // heads, dim=dim),
        bt.Node("a", Attention(Dot(None)), ["q", every("k"), every("v")], plates=HEADS),
        bt.Node("ffn", FeedForward(4 * dim), ["x"], plates=WORD),
        bt.Node("x", Norm(), ["ffn"], plates=WORD),
    ]
    readout = bt.Node("y", Categorical(1000), ["x"], plates=WORD)
    net = word_net(nodes, epilogue=(readout, bt.Node("s", Pool(), [every("a")], plates=["head"])), width=dim)
    cost = net.cost(words=40, want=["y", "s"])
    orders = get_orders(cost)
    assert (orders["q"], orders["a"], orders["ffn"], orders["x"]) == ("O(n d^2)", "O(n^2 d)", "O(n d hidden)", "0")
    assert cost.order == "O(n^2 d + n d^2 + n d hidden + n d |y|)"
    assert cost.slices[0].order == "O(n^2 d + n d^2 + n d hidden)"
    by_name = {row.template: row for row in cost.rows if row.block != "prologue"}
    assert by_name["a"].flops_in_words == Polynomial({("n", "n"): 4 * dim})  # scores and mix of all heads
    assert by_name["q"].flops_in_words == Polynomial({("n",): 2 * dim**2})
    assert by_name["y"].flops_in_words == Polynomial({("n",): 2 * 1000 * dim})
    assert by_name["s"].flops == 0 and by_name["s"].order == "0"
    (slices,) = cost.slices
    assert (slices.dense_order, slices.dense_parameters) == ("O(n^2 d^2)", (40 * dim) ** 2)
    assert slices.dense_flops == 2 * (40 * dim) ** 2


def test_a_selector_multiplies_only_what_depends_on_it():
    three = bt.bayesuvius(8, heads=3).cost(words=5)
    one = bt.bayesuvius(8, heads=1).cost(words=5)
    assert three.flops == 3 * one.flops
    assert get_orders(three)["x"] == "O(n^2 d |c|)"
    nodes = [
        bt.Node("f", FeedForward(16), ["x"], plates=WORD),
        bt.Node("W", bt.tpm.Select((8, 8)), ["c"]),
        bt.Node("x", Linear(), ["W", "f"], plates=WORD),
    ]
    stack = bt.Stack(nodes, [bt.Node("x", Given(8), plates=WORD)])
    net = bt.BNet(bt.Declaration([stack], [bt.Node("c", Categorical(5))]))
    orders, flops = get_orders(net.cost(4)), {row.template: row.flops for row in net.cost(4).rows if row.flops}
    assert orders == {"W": "0", "f": "O(n d hidden)", "x": "O(n d^2 |c|)"}
    assert flops == {"f": 2 * 2 * 4 * 8 * 16, "x": 2 * 5 * 4 * 8 * 8}


def test_shared_weights_are_counted_once_and_products_in_each_slice():
    def make_net(shared: bool) -> bt.BNet:
        W = bt.Node("W", Weight((8, 8)), shared=shared)
        return word_net([W, bt.Node("x", Linear(), ["W", "x"], plates=WORD)], slices=3)

    one, three = make_net(True).cost(5), make_net(False).cost(5)
    assert (one.parameters, three.parameters) == (64, 192)
    assert one.flops == three.flops == 3 * 2 * 5 * 64


def test_every_score_over_keys_and_over_queries():
    for score, over, n in itertools.product((Bilinear(), Dot(rotary=10.0)), ("keys", "queries"), (5, 19)):
        extra = ["A"] if isinstance(score, Bilinear) else []
        pair = ["x", every("x")] if over == "keys" else [every("x"), "x"]
        nodes = [
            bt.Node("A", Weight((8, 8))),
            bt.Node("x", Attention(score, over=over), [*pair, every("x"), *extra], plates=WORD),
        ]
        net = word_net(nodes, slices=2)
        assert net.cost(n, batch=2).flops == flops_of(net, {"": n}, 2), (score, over, n)


@pytest.mark.parametrize(
    ("role", "orders"),
    [("past", "O(n d |past|)"), ("last", "O(d^2)"), ("alike", "O(n^2 d)"), ("coded", "O(n d^2 head |W|)")],
)
def test_dims_on_which_a_value_does_not_depend_are_not_multiplied(role, orders):
    nodes = [
        bt.Node("past", Categorical(3, pool="mean"), [bt.Arrow("x", "causal")], plates=WORD),
        bt.Node("last", Linear(8), [bt.Arrow("x", "last")], plates=WORD),
        bt.Node("alike", Attention(), ["x", every("x"), every("x")], plates=HEADS),
        bt.Node("coded", Linear(), ["W", "x"], plates=HEADS),
        bt.Node("x", Add(), ["x"], plates=WORD),
    ]
    stack = bt.Stack(nodes, [bt.Node("x", Given(8), plates=WORD)])
    outside = [bt.Node("W", Codebook(3, (8, 8)), plates=["head"])]
    net = bt.BNet(bt.Declaration([stack], outside, plates=[bt.Plate("head", 5)]))
    name = f"{role}_0"
    cost = net.cost(19, batch=2, want=[name])
    with FlopCounterMode(display=False) as counter, sdpa_kernel(SDPBackend.MATH), torch.no_grad():
        net.module()(torch.randn(2, 19, 8), want=[name])
    assert cost.flops == counter.get_total_flops() > 0
    assert get_orders(cost)[role] == cost.order == orders
    module = net.module()
    state, _ = module.execute(module.check_request([name], torch.randn(2, 19, 8)))
    value = state.values.get(net.network.graph.get_group(name).index)
    if value is not None:
        assert next(row for row in cost.rows if row.template == role).value_bytes == 4 * value.numel()


def test_groups_of_several_families_that_read_each_other():
    nodes = [
        bt.Node("g", Recurrent(3), ["x", bt.Arrow("h", "before")], plates=WORD, shape=(3,)),
        bt.Node("h", Recurrent(3), ["g", bt.Arrow("h", "before")], plates=WORD, shape=(3,)),
        bt.Node("past", Pool("sum"), [bt.Arrow("mix", "earlier")], plates=WORD, shape=(8,)),
        bt.Node("mix", Affine(8), ["past"], plates=WORD, shape=(8,)),
        bt.Node("y", Linear(8), ["h"], plates=WORD),
        bt.Node("x", Add(), ["y", "mix"], plates=WORD),
    ]
    net = word_net(nodes, slices=2)
    for n, batch in itertools.product((1, 2, 3, 9), (1, 4)):
        assert net.cost(n, batch=batch).flops == flops_of(net, {"": n}, batch)
    assert net.cost(9).flops_in_words(4) == flops_of(net, {"": 4}, 1)


def test_a_polynomial_requires_every_number_of_words():
    cost = bt.encoder_decoder(8, heads=2, slices=1, vocabulary=5).cost({"enc": 4, "dec": 3})
    for wrong in ({"enc": 4}, {"enc": 4, "deck": 3}, {"enc": 4, "dec": 0}, {"enc": 4, "dec": 2.5}, "x"):
        with pytest.raises(bt.BNetError, match=r"stack|words|n:"):
            cost.flops_in_words(wrong)


# paths and steps

REACHES = [
    "every",
    "causal",
    "earlier",
    "before",
    "first",
    "last",
    bt.Reach("window", 1),
    bt.Reach("window", 2),
    bt.Reach("window", 9),
    bt.Reach("window", 0),
]


def pooled_net(reach: object) -> bt.BNet:
    """Return attention by one reach in a chain of sums: a strict reach twice, and a pool of the sentence where it is
    named."""
    is_single = isinstance(reach, str) and reach in ("before", "first", "last")
    reader = Add() if is_single else Pool("sum")
    nodes = [
        bt.Node("a", reader, [bt.Arrow("x", reach)], plates=WORD),
        bt.Node("b", reader, [bt.Arrow("a", reach)], plates=WORD),
    ]
    return word_net([*nodes, bt.Node("x", Add(), ["b"], plates=WORD)], slices=8)


def find_longest_path(net: bt.BNet, n: int, slices: int) -> int | None:
    """Return, by networkx on the ground graph, the maximum over pairs of words of the fewest arrows between them."""
    graph = net.sentence(x=torch.zeros(n, 8)).graph(weights=True)
    word = nx.get_node_attributes(graph, "word")
    for a, b, data in graph.edges(data=True):
        data["hop"] = int(word.get(b) is not None and word.get(a) != word.get(b))
    result = []
    for i, j in itertools.permutations(range(n), 2):
        lengths = nx.single_source_dijkstra_path_length(graph, f"x_0_{i}", weight="hop")
        distances = [lengths[f"x_{t}_{j}"] for t in range(slices + 1) if f"x_{t}_{j}" in lengths]
        result += [min(distances)] if distances else []
    return max(result) if result else None


@pytest.mark.parametrize("reach", REACHES, ids=str)
def test_the_longest_path_is_that_of_the_ground_graph(reach):
    is_single = isinstance(reach, str) and reach in ("before", "first", "last")
    reader = bt.Node("a", Add() if is_single else Pool("sum"), [bt.Arrow("x", reach)], plates=WORD)
    parents = (["a"], ["a", "x"])
    nets = [word_net([reader, bt.Node("x", Add(), parents_, plates=WORD)], slices=8) for parents_ in parents]
    for net, n in itertools.product((*nets, pooled_net(reach)), (1, 6)):
        assert net.cost(n).slices[0].longest_path == find_longest_path(net, n, 8), (net, n)


@pytest.mark.parametrize("n", [2, 6])
def test_paths_through_a_pool_a_table_and_a_recurrence(n):
    pool = [bt.Node("p", Pool(), [every("x")]), bt.Node("x", Add(), ["x", "p"], plates=WORD)]
    ring = np.eye(n, dtype=bool) | np.roll(np.eye(n, dtype=bool), 1, 1)
    twice = [
        bt.Node("p", Pool(), [every("x")]),
        bt.Node("y", Add(), ["p"], plates=WORD),
        bt.Node("o", Pool(), [every("y")]),
        bt.Node("x", Add(), ["o"], plates=WORD),
    ]
    table = [bt.Node("x", Pool("sum"), [bt.Arrow("x", ring)], plates=WORD)]
    cell = bt.Node("h", Recurrent(3), ["x", bt.Arrow("h", "before")], plates=WORD, shape=(3,))
    for nodes, expected in (
        (pool, 1),
        (twice, 2),
        (table, n - 1),
        ([cell, bt.Node("x", Linear(8), ["h"], plates=WORD)], n - 1),
        ([bt.Node("x", Linear(8), ["x"], plates=WORD)], None),
    ):
        net = word_net(nodes, slices=8)
        assert net.cost(n).slices[0].longest_path == find_longest_path(net, n, 8) == expected


def test_d_is_the_width_of_the_states_and_features_have_one_name():
    decoder = bt.decoder(8, heads=2, slices=1, features=3, dropout=0.0)
    for net, order in (
        (bt.recurrent(6, cell="rnn", features=2, slices=3), "O(n d^2 + n d |x_0|)"),
        (bt.recurrent(6), "O(n d^2)"),
        (decoder, "O(n^2 d + n d^2 + n d hidden + n d |value|)"),
    ):
        assert net.cost(5).order == order


def test_orders_of_paths_and_steps():
    expected_by_reach = {
        "every": (1, "O(1)", 1, "O(1)"),
        "causal": (1, "O(1)", 1, "O(1)"),
        bt.Reach("window", 1): (11, "O(n)", 1, "O(1)"),
        bt.Reach("window", 3): (4, "O(n / 3)", 1, "O(1)"),
        bt.Reach("window", 50): (1, "O(n / 50)", 1, "O(1)"),
    }
    for reach, expected in expected_by_reach.items():
        (block,) = attention_net(reach, residual=True).cost(12).slices
        assert (block.longest_path, block.longest_path_order, block.steps, block.steps_order) == expected
    (scan,) = CASES[[case.name for case in CASES].index("recurrent")].net.cost(12).slices
    assert (scan.longest_path, scan.longest_path_order, scan.steps, scan.steps_order) == (11, "O(n)", 12, "O(n)")


@pytest.mark.parametrize("reach", ["before", "earlier", "table", "before, twice"])
def test_steps_are_the_longest_chain_of_words_in_a_group(reach):
    n = 5
    table = np.zeros((n, n), dtype=bool)
    table[[2, 3, 4], [0, 1, 2]] = True
    back = bt.Arrow("a", table if reach == "table" else reach.partition(",")[0])
    reader = Add() if reach.startswith("before") else Pool("sum")
    again = bt.Arrow("p", "before") if "twice" in reach else "p"
    nodes = [
        bt.Node("p", reader, [back], plates=WORD, shape=(8,)),
        bt.Node("a", Gate(), ["x", again], plates=WORD, shape=(8,)),
        bt.Node("x", Add(), ["a"], plates=WORD),
    ]
    net = word_net(nodes)
    graph = net.sentence(x=torch.zeros(n, 8)).graph()
    for a, b, data in graph.edges(data=True):
        data["wait"] = int(graph.nodes[a]["word"] != graph.nodes[b]["word"])
    (block,) = net.cost(n).slices
    assert block.steps == 1 + nx.dag_longest_path_length(graph, weight="wait")
    assert block.steps_order == ("" if reach == "table" else "O(n)")


def test_a_million_words_cost_no_table_of_pairs():
    """Neither does a scan; a path length that needs such a table is unknown, never absent."""
    n, d = 10**6, 8
    net = bt.encoder_decoder(d, heads=2, slices=1, vocabulary=5)
    assert [(block.longest_path, block.steps) for block in net.cost(n).slices] == [(1, 1), (1, 1)]
    assert net.cost(n).flops == net.cost(50).flops_in_words({"n_enc": n, "n_dec": n})
    by_name = {case.name: case.net for case in CASES}
    (scan,) = by_name["recurrent"].cost(n).slices
    assert (scan.longest_path, scan.steps) == (n - 1, n)
    dec = by_name["encoder-decoder"].cost({"enc": 3, "dec": n}).slices[-1]
    assert (dec.longest_path, dec.longest_path_order) == (None, "unknown")
    assert "unknown" in str(by_name["encoder-decoder"].cost({"enc": 3, "dec": n}))


# text, bad input


class Wordless(TPM):
    """A user-defined TPM that does not declare its products."""

    slots = ("x.", "A")

    def shape(self, *parents):
        return parents[0].shape

    def value(self, context, *parents):
        return parents[0].sum(-2) @ parents[1]


def test_flops_of_a_user_defined_tpm_are_unknown_and_not_zero():
    mix = bt.Node("x", Wordless(), [every("x"), "A"], plates=WORD)
    nodes = [bt.Node("A", Weight((4, 4))), mix]
    cost = bt.BNet(bt.Declaration([bt.Stack(nodes, [bt.Node("x", Given(4), plates=WORD)])])).cost(4)
    row = next(row for row in cost.rows if row.block == "slice" and row.template == "x")
    assert (row.flops, row.flops_in_words, row.order) == (None, None, "unknown")
    assert (cost.flops, cost.flops_in_words, cost.order, cost.slices[0].flops) == (None, None, "unknown", None)
    assert "FLOPs unknown for x" in str(cost) and cost.parameters == 16
    assert cost.to_dataframe()["flops"].isna().sum() == 1


def test_the_table_is_printed_in_three_forms():
    cost = bt.encoder_decoder(8, heads=2, slices=1, vocabulary=5).cost({"enc": 4, "dec": 3})
    frame = cost.to_dataframe()
    assert frame["parameters"].sum() == cost.parameters and frame["flops"].sum() == cost.flops
    assert list(frame["template"]) == [row.template for row in cost.rows]
    text, html = str(cost), cost._repr_html_()
    for row in cost.rows:
        assert row.template in text and f"<td>{row.template}</td>" in html
    assert f"{cost.flops:,}" in text and f"{cost.flops:,}" in html and "n_dec n_enc d" in text
    assert html.count("<tr") == len(cost.rows) + 1 + 2 + len(cost.slices)


def test_polynomials():
    p, q = Polynomial({("n",): 2, (): 1}), Polynomial({("n",): -2, ("m",): 3})
    assert p + q == Polynomial({(): 1, ("m",): 3}) and (p * q)({"n": 5, "m": 7}) == p(5) * q({"n": 5, "m": 7})
    assert str(p * p) == "4 n^2 + 4 n + 1" and str(Polynomial()) == "0"


def test_bad_input_is_refused():
    net = bt.encoder_decoder(4, heads=2, slices=1)
    for words, options, message in [
        (0, {}, "words: expected an integer of at least 1; got 0"),
        ({"enc": 3}, {}, "words of stack 'dec': expected a number of words. Pass a number for each of the stacks"),
        ({"enc": 3, "dec": 2, "den": 1}, {}, "near matches are"),
        ({"enc": 3, "dec": 0}, {}, "words of 'dec'"),
        (3, {"batch": 0}, "batch: expected"),
        (3, {"want": ["dec_xx_1"]}, "dec_x_1"),
        (3, {"want": "dec_x_1"}, "want: expected a list of names of node groups"),
    ]:
        assert message in get_refusal(net.cost, words, **options), message


def test_more_words_than_a_net_is_for():
    with pytest.raises(bt.BNetError, match="at most 4 words"):
        bt.encoder(4, heads=2, slices=1, positions="learned", words=4).cost(5)
    with pytest.raises(bt.BNetError, match="mask"):
        attention_net(np.ones((3, 3), dtype=bool)).cost(4)
