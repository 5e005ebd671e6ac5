"""Products that are folded, batched, or computed by Gram matrices equal the separate products."""

import itertools
from collections import Counter

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

import bnet_transformer as bt
from bnet_transformer import reference
from bnet_transformer.compiler import CompiledModule, evaluate
from bnet_transformer.compiler.fused import apply_maps, expand_table
from bnet_transformer.compiler.plan import PlanRequest
from bnet_transformer.inference import Evidence, factors, factors as readout, log_evidence, posterior
from bnet_transformer.tpm import (
    Attention,
    Categorical,
    Dot,
    Given,
    Linear,
    Normal,
    Normaliser,
    Relative,
    Select,
    Weight,
)
from bnet_transformer.tpm.random import lookup, squared_distance
from tests.cases import bucketed, close

D = torch.float64
NETS = [
    {},
    {"slices": 2},
    {"mask": "causal"},
    {"atoms": (2, 3, 4), "residual": True},
    {"atoms": 2, "slices": 2},
    {"atoms": 3, "mask": "causal", "value_dim": 4},
    {"per": "corpus"},
    {"per": "slice", "slices": 2},
    {"key_dim": 2},
    {"key_dim": 6, "scale": None},
    {"combine": "concat", "slices": 2},
    {"per": "word"},
]


def make_net(options, observe=None) -> bt.BNet:
    return bt.bayesuvius(4, **{"heads": 3, **options}, observe=observe or Normal(0.7)).to(D)


def make_unfolded(net: bt.BNet) -> CompiledModule:
    module = net.module()
    module.max_width = 10**9  # more words than any sentence has
    return module


def compute_gradients(module: CompiledModule, loss: torch.Tensor) -> list[torch.Tensor]:
    parameters = [p for p in module.parameters() if p.requires_grad]
    return list(torch.autograd.grad(loss, parameters, allow_unused=True, materialize_grads=True))


@pytest.mark.parametrize("words", [3, 20])  # explicit products, torch's own attention
@pytest.mark.parametrize("options", NETS, ids=str)
def test_folded_maps_change_no_value(options, words):
    if options.get("per") == "word" and words > 3:
        pytest.skip("as for few")
    net, x = make_net(options), torch.randn(5, words, 4, dtype=D)
    mask = torch.arange(words) < torch.tensor([words, words - 1, 2, 1, words])[:, None]
    name = f"x_{options.get('slices', 1)}"
    for mask_ in (None, mask):
        folded, unfolded = net.module(), make_unfolded(net)
        a, b = (module(x, mask_, want=[name])[name] for module in (folded, unfolded))
        close(a, b)
        observed = torch.ones(5, words, dtype=torch.bool) if mask_ is None else mask_
        losses = [torch.where(observed[:, :, None], value, 0).square().sum() for value in (a, b)]
        pairs = zip(compute_gradients(folded, losses[0]), compute_gradients(unfolded, losses[1]), strict=True)
        for folded_grad, unfolded_grad in pairs:
            close(folded_grad, unfolded_grad, 1e-08)


@pytest.mark.parametrize("constant", ["q", "k", "v", "qkv"])
@pytest.mark.parametrize("reach", ["every", "causal", bt.Reach("window", 1)], ids=str)
def test_an_attention_reads_values_that_are_the_same_for_all_words(constant, reach):
    """A choice of the first word decides q, k or v of all words: its value has one word."""
    same = bt.Node("m", Select(2), [bt.Arrow("a", "first")], ["word"])
    slots = [bt.Arrow("m" if slot in constant else "x", "same" if slot == "q" else reach) for slot in "qkv"]
    nodes = [bt.Node("a", Categorical(2), [], ["word"]), same, bt.Node("p", Attention(), slots, ["word"])]
    readout = bt.Node("y", Normal(0.7), ["p"], ["word"])
    net = bt.BNet(bt.Declaration([bt.Stack(nodes, [bt.Node("x", Given(2), plates=["word"])], [readout])])).to(D)
    torch.manual_seed(0)
    net = net.replace({name: torch.randn_like(value) for name, value in net.parameters.items()})
    s = net.sentence(torch.randn(3, 2, dtype=D)).observe({"y_1": torch.randn(2, dtype=D)})
    close(s.log_prob(), reference.log_evidence(s.state.model, s.state.evidence))


def test_maps_are_folded_where_it_pays():
    """`W_q^T W_k` for whole-width heads with many words; not for narrow heads, few words, or a requested q."""
    module = make_net({}).module()
    q, x = (module.network.graph.get_group(name).index for name in ("q_0", "x_1"))
    assert q not in {i for group in module.plan(PlanRequest((x,), fold=True)).components for i in group}
    assert x in module.plan(PlanRequest((x,), fold=True)).folds
    assert not module.plan(PlanRequest((x,))).folds
    assert not module.plan(PlanRequest((x, q), fold=True)).folds
    for options in ({"key_dim": 2}, {"atoms": 5}):
        other = make_net(options)
        output = other.network.graph.get_group("x_1").index
        assert not other.module().plan(PlanRequest((output,), fold=True)).folds


OBSERVED = [
    Normal(0.7),
    Normal(0.7, dim=3),
    Normal(0.7, dim=9),
    Normal(0.7, learnable=True),
    Categorical(3),
    Categorical(40),
]


@pytest.mark.parametrize("k, options", list(enumerate(NETS)), ids=str)
def test_a_readout_above_an_attention_is_the_plain_one(k, options, monkeypatch):
    """By Gram matrices and by explicit mixes, two readouts for each net."""
    for observe in (OBSERVED[k % len(OBSERVED)], OBSERVED[(k + 3) % len(OBSERVED)]):
        module, x = make_net(options, observe).module(), torch.randn(5, 3, 4, dtype=D)
        is_normal = isinstance(observe, Normal)
        observed = torch.randn(5, 3, observe.dim or 4, dtype=D) if is_normal else torch.randint(3, (5, 3))
        y = Evidence(observed, torch.rand(5, 3) > 0.3)
        mask = torch.arange(3) < torch.tensor([3, 3, 2, 1, 3])[:, None]
        for evidence, mask_ in ((Evidence(y.value), None), (y, mask)):
            with monkeypatch.context() as patch:
                patch.setattr(factors, "find_deferred_attention", lambda *_: {})
                expected = log_evidence(module, {"y": evidence}, x, mask_)
            expected_grads = compute_gradients(module, expected.sum())
            for gram in (True, False):
                with monkeypatch.context() as patch:
                    patch.setattr(readout, "_is_gram_cheaper", lambda *_, gram=gram: gram)
                    result = log_evidence(module, {"y": evidence}, x, mask_)
                close(result, expected)
                for grad, expected_grad in zip(compute_gradients(module, result.sum()), expected_grads, strict=True):
                    close(grad, expected_grad, 1e-08)


@pytest.mark.parametrize("options", [{"atoms": 4}, {"atoms": 3, "slices": 2}, {"atoms": 4, "residual": True}], ids=str)
def test_gram_matrices_give_posteriors(options, monkeypatch):
    net = make_net(options)
    module, x, y = net.module(), torch.randn(5, 3, 4, dtype=D), torch.randn(5, 3, 4, dtype=D)
    for name in ("c", "W_q_0", "W_v_0"):
        result = posterior(module, name, {"y": Evidence(y)}, x)
        with monkeypatch.context() as patch:
            patch.setattr(factors, "find_deferred_attention", lambda *_: {})
            expected = posterior(module, name, {"y": Evidence(y)}, x)
        close(result, expected, 1e-09)


def test_gram_matrices_are_used_where_they_pay(monkeypatch):
    calls = []
    gram_squared_error = readout._gram_squared_error
    monkeypatch.setattr(readout, "_gram_squared_error", lambda *args: calls.append(1) or gram_squared_error(*args))
    y = Evidence(torch.randn(2, 8, 16))
    for options, expected in (({"atoms": 8}, 1), ({"heads": 3}, 0)):
        calls.clear()
        module = bt.bayesuvius(16, **options, observe=Normal()).module()
        log_evidence(module, {"y": y}, torch.randn(2, 8, 16))
        assert len(calls) == expected
    module = bt.bayesuvius(16, atoms=8, observe=Categorical(3)).module()
    log_evidence(module, {"y": Evidence(torch.zeros(2, 8, dtype=torch.long))}, torch.randn(2, 8, 16))
    assert len(calls) == 0


def test_evidence_on_the_attention_counts():
    """Evidence on the value of the attention counts as well as evidence on the readout."""
    net = make_net({"atoms": 3})
    module, x = net.module(), torch.randn(1, 3, 4, dtype=D)
    values = module(x, want=["x_1"])["x_1"]
    y = torch.randn(1, 3, 4, dtype=D)
    observed = values[1, 2, 0][None] if values.dim() == 6 else values[1, 2, 0, 0][None]
    result = posterior(module, "W_v_0", {"y": Evidence(y), "x_1": Evidence(observed.reshape(1, 3, 4).detach())}, x)
    assert result.max() == 1


def test_heads_of_different_widths_share_one_product():
    """q, k and v of one vector, with different plates, by one product."""
    nodes = [bt.Node(f"W_{r}", Weight((3 if r == "v" else 2, 4)), plates=["head"] if r != "k" else []) for r in "qkv"]
    nodes += [bt.Node(r, Linear(), [f"W_{r}", "x"], ["head", "word"] if r != "k" else ["word"]) for r in "qkv"]
    arrows = [bt.Arrow("k", "every"), bt.Arrow("v", "every")]
    nodes += [bt.Node("a", Attention(Dot()), ["q", *arrows], ["head", "word"])]
    nodes += [bt.Node("x", Linear(4), ["v0"], ["word"]), bt.Node("v0", Linear(4), ["x"], ["word"])][::-1]
    stack = bt.Stack(nodes, [bt.Node("x", Given(4), plates=["word"])])
    net = bt.BNet(bt.Declaration([stack], plates=[bt.Plate("head", 2)])).to(D)
    x = torch.randn(2, 3, 4, dtype=D)
    module = net.module()
    assert module.plan(PlanRequest((net.network.graph.get_group("a_0").index,))).fused_maps
    s = net.sentence(x=x[1])
    for h, i in itertools.product(range(2), range(3)):
        close(module(x, want=["a_0"])["a_0"][1, h, i], s[f"a_0_{h}_{i}"])


class CallCounter(TorchDispatchMode):
    """Counts the calls of each operation."""

    def __init__(self) -> None:
        super().__init__()
        self.counts = Counter()

    def __torch_dispatch__(self, operation, types, args=(), kwargs=None):
        self.counts[operation.overloadpacket.__name__] += 1
        return operation(*args, **kwargs or {})


@pytest.mark.parametrize("words, is_copied", [(2, False), (40, True)])
def test_weights_are_concatenated_only_for_many_vectors(words, is_copied):
    """A copy of the weights pays only if x would be read again for each map; each map is `W x + b` in both cases."""
    weights = [torch.randn(3, 1, 1, rows, 4, dtype=D, requires_grad=True) for rows in (2, 5)]
    x = torch.randn(1, 2, words, 4, dtype=D, requires_grad=True)
    with CallCounter() as calls:
        outputs = apply_maps(weights, x, [None, None])
    assert (calls.counts["cat"] > 0) == is_copied and calls.counts["mm"] == (1 if is_copied else 2)
    for W, output in zip(weights, outputs, strict=True):
        close(output, torch.einsum("...oi,...i->...o", W, x))
    assert torch.autograd.gradcheck(lambda x, *W: tuple(apply_maps(W, x, [None] * 2)), (x, *weights), fast_mode=True)
    (biased,) = apply_maps([weights[1]], x, [bias := torch.randn(5, dtype=D)])
    close(biased, outputs[1] + bias)


@pytest.mark.parametrize("dims", [(0, 1), (1, 0)])
def test_entries_at_all_states_are_what_a_look_up_finds_and_no_copy(dims):
    table = torch.randn(2, 3, 4, dtype=D)
    states = [
        torch.arange(n).reshape([-1 if k == d else 1 for k in range(4)]) for n, d in zip((2, 3), dims, strict=True)
    ]
    result = expand_table(table, dims, 4)
    close(result, lookup(table, states), 0)
    assert result.untyped_storage().data_ptr() == table.untyped_storage().data_ptr()


def test_weights_of_all_heads_are_the_parameter_itself():
    """Under `do(c=...)` they are those of one head; enumerated, a view of all, without an index operation."""
    net = make_net({})
    module, x = net.module(), torch.randn(5, 3, 4, dtype=D)
    with CallCounter() as calls:
        all_heads = module(x, want=["x_1"])["x_1"]
    assert not calls.counts["index"]
    for c in range(3):
        one_head = module(x, want=["x_1"], do={"c": torch.tensor(c)})["x_1"]
        close(all_heads[c], one_head)


def test_a_bias_that_slices_share_is_made_once():
    net, x = bucketed(), torch.tensor([[0, 2, 1, 1]])
    slices, module = len(net.network.graph.by_stem["a"]), net.module()
    with CallCounter() as calls:
        module(x)
    assert slices > 1 and calls.counts["gather"] == 1
    attention, _ = module.attention_weights(x)
    s = net.sentence(x[0].tolist())
    for t in range(slices):
        close(attention[f"a_{t}"][0], s.attention(slice=t).to(attention[f"a_{t}"].dtype), 1e-05)


def test_squared_distances_of_several_dims():
    a, b = torch.randn(3, 1, 4, 2, dtype=D), torch.randn(5, 4, 2, dtype=D, requires_grad=True)
    expected = (a - b).square().sum((-2, -1))
    close(squared_distance(a, b, (-2, -1)), expected)
    assert torch.autograd.gradcheck(lambda b: squared_distance(a, b, (-2, -1)), b)


class SizeRecorder(TorchDispatchMode):
    """Records the largest number of entries of a tensor that an operation returns."""

    def __init__(self) -> None:
        super().__init__()
        self.largest = 0

    def __torch_dispatch__(self, operation, types, args=(), kwargs=None):
        result = operation(*args, **kwargs or {})
        outputs = result if isinstance(result, tuple | list) else [result]
        self.largest = max([self.largest, *(x.numel() for x in outputs if isinstance(x, torch.Tensor))])
        return result


def net_with_head_and_part(normaliser: str, value_plates: list[str]) -> bt.BNet:
    """Each word picks a head and a part of rotary keys with a bias by distance, and an entry of the values."""
    words = ["word"]
    pick = {"head": "c", "part": "m"}
    nodes = [
        bt.Node("b", Weight((5,))),
        *(bt.Node(f"W_{r}", Weight((4, 4)), plates=["head", "part"]) for r in "qk"),
        bt.Node("W_v", Weight((4, 4)), plates=value_plates),
        *(bt.Node(r, Linear(), [f"W_{r}", "x"], plates=["head", "part", "word"]) for r in "qk"),
        bt.Node("v", Linear(), ["W_v", "x"], plates=[*value_plates, "word"]),
        *(bt.Node(r, Categorical(k), plates=words) for r, k in (("c", 3), ("m", 2))),
        bt.Node(
            "x",
            Attention(Dot(None, rotary=100.0), Normaliser(normaliser), bias=Relative(2)),
            [
                bt.Arrow("q", pick=pick),
                bt.Arrow("k", "causal", pick=pick),
                bt.Arrow("v", "causal", pick={plate: pick[plate] for plate in value_plates}),
                "b",
            ],
            plates=words,
        ),
    ]
    stack = bt.Stack(nodes, [bt.Node("x", Given(4), plates=words)], [bt.Node("y", Normal(0.5), ["x"], plates=words)])
    return bt.BNet(bt.Declaration([stack], plates=[bt.Plate("head", 3), bt.Plate("part", 2)])).to(D)


WORD_NETS = [
    {},
    {"mask": "causal", "residual": True, "scale": None},
    {"atoms": (2, 3, 4), "slices": 2},
    ("softmax", ["head"]),
    ("softmax", ["head", "part"]),
    ("sigmoid", ["head", "part"]),
]


@pytest.mark.parametrize("words", [4, 20])  # explicit products, torch's own attention
@pytest.mark.parametrize("options", WORD_NETS, ids=str)
def test_given_heads_of_each_word_equal_a_gather(options, words, monkeypatch):
    is_bayesuvius = isinstance(options, dict)
    net = make_net({**options, "per": "word"}) if is_bayesuvius else net_with_head_and_part(*options)
    module, x = net.module(), torch.randn(1, words, 4, dtype=D)
    counts = {m.group.name: m.tpm.states for m in module.network.specs if m.tpm.kind == "discrete"}
    do = {name: torch.randint(count, (5, words)) for name, count in counts.items()}
    mask = torch.arange(words) < torch.tensor([words, words - 1, 2, 1, words])[:, None]
    name = f"x_{options.get('slices', 1) if is_bayesuvius else 1}"
    readers = [] if "sigmoid" in options else None  # its weights are not a distribution

    def compute(inputs, mask_):
        attention, values = module.attention_weights(inputs, mask_, nodes=readers, do=do, want=[name])
        plain = module(inputs, mask_, do=do, want=[name])[name]
        close(plain, values[name])
        observed = torch.ones(5, words, dtype=torch.bool) if mask_ is None else mask_
        gradients = compute_gradients(module, torch.where(observed[:, :, None], plain, 0).square().sum())
        return [plain, *attention.values(), *gradients]

    for inputs, mask_ in ((x, None), (x.expand(5, -1, -1), mask)):
        result = compute(inputs, mask_)
        with monkeypatch.context() as patch:
            patch.setattr(evaluate, "find_word_picks", lambda *_: {})
            expected = compute(inputs, mask_)
        for actual, gathered in zip(result, expected, strict=True):
            close(actual, gathered, 1e-09)


def test_given_heads_of_each_word_copy_no_keys_for_each_word():
    module, n = bt.bayesuvius(8, heads=4, per="word").module(), 64
    with SizeRecorder() as sizes:
        output = module(torch.randn(1, n, 8), do={"c_0": torch.randint(4, (1, n))}, want=["x_1"])["x_1"]
        output.square().sum().backward()
    assert sizes.largest <= 4 * n * n


def test_padding_is_not_copied_for_each_state_of_a_choice():
    module, n = bt.bayesuvius(8, heads=4, per="word").module(), 128
    mask = torch.arange(n) < torch.tensor([[n], [n - 1], [1]])
    with torch.no_grad(), SizeRecorder() as sizes:
        output = module(torch.randn(3, n, 8), mask, want=["x_1"])["x_1"]
    assert output.shape == (4, 3, n, 8) and sizes.largest <= 3 * n * n
