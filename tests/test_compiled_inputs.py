"""Inputs of modules and inference: errors on invalid input; values at absent words have no effect."""

import copy

import pytest
import torch

import bnet_transformer as bt
from bnet_transformer import reference
from bnet_transformer.compiler import CompiledModule
from bnet_transformer.inference import Evidence, log_evidence, posterior
from bnet_transformer.tpm import Add, Categorical, Embed, Given, Normal, Pool
from tests.cases import batch_evidence, close, get_case

D = torch.float64
L = torch.long
X = torch.zeros(2, 3, 4)


def chapter(**options: object) -> CompiledModule:
    return bt.bayesuvius(4, **{"heads": 3, "slices": 2, "observe": Categorical(3), **options}).module()


@pytest.mark.parametrize(
    "inputs, message",
    [
        ({"want": "x_1"}, r"want: expected a list of names of node groups; got 'x_1'. Pass want=\['x_1'\]"),
        ({"want": ["x_1_2"]}, "the name of a group; got the node 'x_1_2'. Pass the group of this node, 'x_1'"),
        ({"want": ["x_1_-1"]}, "the name of a group; got the node 'x_1_-1'. Pass the group of this node, 'x_1'"),
        ({"do": {"x_*_-1": X}}, "got 'x_\\*_-1', a name of several nodes. Pass .*, 'x_0', 'x_1', 'x_2'"),
        ({"x": X.double()}, r"x: expected torch.float32, the type of the parameters; got torch.float64. .* net.to\("),
        ({"x": X.long()}, r"x: expected real numbers \(torch.float32"),
        ({"x": X[:, :0]}, "words: expected an integer of at least 1; got 0"),
        ({"do": {"c": torch.tensor(3)}}, r"do\['c'\]: expected states from 0 to 2; got 3"),
        ({"do": {"c": torch.tensor(1.0)}}, "integers, the states; got torch.float32"),
        ({"do": {"c": torch.zeros(3, dtype=L)}}, r"do\['c'\]: expected \[batch\] of shape \(2,\); got shape \(3,\)"),
        ({"do": {"x_1": X[:, :2]}}, r"\[batch, word, 4\] of shape \(2, 3, 4\); got shape \(2, 2, 4\)"),
        ({"given": {"q_0": X}}, r"given\['q_0'\]: expected an input node; allowed: x_0"),
        ({"given": {"x_0": X + 1}}, r"pass x or given\['x_0'\], not both"),
        ({"mask": torch.ones(2, 3)}, "mask: expected booleans of shape"),
        ({"mask": torch.tensor([[True] * 3, [False] * 3])}, "mask, sentence 1: all words are masked"),
    ],
)
def test_bad_input_to_a_module(inputs, message):
    with pytest.raises(bt.BNetError, match=message):
        chapter()(**{"x": X, **inputs})


@pytest.mark.parametrize(
    "ids, message",
    [
        (torch.tensor([[0, 2]]), r"x: expected ids from 0 to 1; got 2"),
        (torch.tensor([[0.0, 1.0]]), "integers, the ids; got torch.float32"),
        (torch.zeros(1, 2, 4, dtype=L), r"\[batch, word\] of shape \(1, 2\)"),
    ],
)
def test_bad_ids(ids, message):
    module = chapter(vocabulary=["a", "b"])
    with pytest.raises(bt.BNetError, match=message):
        module(ids)
    ids_ = torch.tensor([[1, 0]])
    for kind in (torch.uint8, torch.int16, torch.int32):
        assert module(ids_.to(kind)).equal(module(ids_))


def test_x_fills_what_given_leaves_open():
    word = {"plates": ["word"]}
    two = [bt.Node("x", Given(4), **word), bt.Node("k", Given(4), **word)]
    more = [bt.Node("s", Given(states=3, default=0), **word), bt.Node("e", Embed(4), ["s"], **word)]
    stack = bt.Stack(
        [bt.Node("x", Add(), ["x", "x"], **word)], [*two, *more], [bt.Node("z", Add(), list("xke"), **word)]
    )
    module = bt.BNet(bt.Declaration([stack])).module()
    output = module(X + 2, given={"x_0": X + 1})
    assert output.equal(module(given={"x_0": X + 1, "k": X + 2})) and output.equal(module(X + 1, given={"k": X + 2}))
    with pytest.raises(bt.BNetError, match=r"pass x or given\['x_0'\], not both"):
        module(X, given={"x_0": X + 1, "k": X + 2})  # not s, which has a default


def test_one_sentence_for_many_values_of_do():
    module = chapter()
    states, x = torch.randn(5, 3, 4), torch.randn(1, 3, 4)
    done = module(x, do={"x_1": states})
    separate = torch.cat([module(x, do={"x_1": state[None]}) for state in states], 1)
    torch.testing.assert_close(done, separate)
    with pytest.raises(bt.BNetError, match=r"do\['c'\]: expected \[batch\] of shape \(5,\)"):
        module(x, do={"x_1": states, "c": torch.zeros(4, dtype=L)})


def test_several_stacks_are_distinguished():
    case = get_case("three stacks")
    module, s = case.net.module(), case.sentence
    x = {stack: s.state.encoded.given[f"{stack}_x_0"][None] for stack in ("enc", "side", "dec")}
    assert module(x).shape == module(given={f"{stack}_x_0": value for stack, value in x.items()}).shape
    with pytest.raises(bt.BNetError, match=r"x\['side'\]: expected torch.float64"):
        module({**x, "side": x["side"].float()})
    with pytest.raises(bt.BNetError, match="mask: expected a mapping from stack: enc, side, dec"):
        module(x, torch.ones(1, 2, dtype=bool))
    with pytest.raises(bt.BNetError, match="no value for dec_x_0, stack 'dec'"):
        module({stack: x[stack] for stack in ("enc", "side")})


def test_a_word_that_is_there_must_have_a_word_to_read():
    rows = [[False, True, False], [True, True, True], [True, False, True]]
    net = bt.bayesuvius(4, mask=rows, observe=Categorical(3))
    mask = torch.tensor([[True] * 3, [True, False, True]])
    for call in (lambda: net.module()(X, mask), lambda: net.pyro()(X, mask=mask)):
        with pytest.raises(bt.BNetError, match="mask, sentence 1, word 0 of x_1: expected at least one word of k"):
            call()
    real = bt.bayesuvius(4, heads=5, mask=rows, observe=Normal(1.0)).module()
    with pytest.raises(bt.BNetError, match="mask, sentence 1, word 0 of x_1"):
        log_evidence(real, {"y": Evidence(X)}, X, mask)
    absent = torch.tensor([[True] * 3, [False, False, True]])  # an absent word may attend to no word
    assert net.module()(X, absent).isfinite().all()
    with pytest.raises(bt.BNetError, match="word 0 of x_1: expected at least one word of k_0 to read"):
        bt.bayesuvius(4, mask="earlier").module()(X)
    with pytest.raises(bt.BNetError, match="at most 8 words"):
        get_case("encoder, post-norm").net.module()(torch.zeros(1, 9, dtype=L))


def test_an_empty_sum_is_zero_with_and_without_a_mask():
    stack = bt.Stack(
        [bt.Node("x", Pool("sum"), [bt.Arrow("x", "earlier")], plates=["word"])],
        [bt.Node("x", Given(4), plates=["word"])],
    )
    module, x = bt.BNet(bt.Declaration([stack])).module(), torch.randn(1, 3, 4)
    assert module(x, torch.tensor([[True, True, False]]))[0, :2].equal(module(x)[0, :2])
    assert module(x)[0, 0].equal(torch.zeros(4))


# evidence


def make_query(**changes: object) -> dict[str, object]:
    return {"evidence": {"y": Evidence(torch.zeros(2, 3, dtype=L))}, "x": X, **changes}


@pytest.mark.parametrize(
    "changes, message",
    [
        ({"evidence": {"y_1": Evidence(torch.zeros(2, dtype=L))}}, "the node 'y_1'. Pass the group of this node, 'y'"),
        ({"evidence": {"y": torch.zeros(2, 3, dtype=L)}}, r"evidence\['y'\]: expected Evidence\(value, observed\)"),
        ({"evidence": {"y": Evidence(torch.zeros(2, 4, dtype=L))}}, r"shape \(2, 3\); got shape \(2, 4\)"),
        ({"evidence": {"y": Evidence(torch.full((2, 3), 3))}}, r"evidence\['y'\]: expected states from 0 to 2; got 3"),
        ({"evidence": {"x_0": Evidence(X)}}, "x_0: an input node cannot be observed"),
        (
            {"evidence": {"y": Evidence(torch.zeros(2, 3, dtype=L), torch.ones(3, 2, dtype=bool))}},
            r"booleans of shape \(2, 3\), true for observed nodes; got torch.bool of shape \(3, 2\)",
        ),
        ({"do": {"y": torch.zeros(2, 3, dtype=L)}}, "y: set it by do or observe it, not both"),
    ],
)
def test_bad_evidence(changes, message):
    module = chapter(atoms=2)
    for fn in (log_evidence, lambda module, **query: posterior(module, "W_q_0", **query)):
        with pytest.raises(bt.BNetError, match=message):
            fn(module, **make_query(**changes))


@pytest.mark.parametrize(
    "slices, pool, where, count",
    [(2, None, "x_2", 3 ** (3 + 1)), (3, None, "x_2", 3 ** (2 * 3 + 1)), (1, "mean", "y", 3**3)],
)
def test_joint_states_of_interacting_choices_are_counted(slices, pool, where, count):
    """`K^(n(T-1)+1)` for each word's marginal, `K^n` under a readout of all words."""
    module = chapter(per="word", slices=slices, observe=Categorical(3, pool=pool))
    observed = {"y": Evidence(torch.zeros((2, 3) if pool is None else (2,), dtype=L))}
    message = f"cannot eliminate c_0 .*: {where} depends on c_0 at several words .up to {count:,} joint states .*"
    for call in (
        lambda: log_evidence(module, observed, X),
        lambda: posterior(module, "c_0", observed, X),
        lambda: module(X),
    ):
        with pytest.raises(bt.BNetError, match=message):
            call()


def test_nan_is_named_with_its_position():
    net = bt.bayesuvius(4, heads=3, observe=Normal(1.0)).to(D)
    x, y = torch.randn(2, 3, 3, 4, dtype=D)
    x[1, 2, 0] = torch.nan
    present = torch.tensor([[True] * 3, [True, True, False], [True] * 3])
    for fn in (log_evidence, lambda module, *given, **more: posterior(module, "c", *given, **more)):
        with pytest.raises(bt.EvidenceError, match="x_0_2 of sentence 1: expected finite numbers; got nan"):
            fn(net.module(), {"y": Evidence(y)}, x)
        with pytest.raises(bt.EvidenceError, match="q_0_0 of sentence 0: expected finite numbers; got inf"):
            fn(net.module(), {"y": Evidence(y)}, x, present, do={"q_0": torch.full((1, 3, 4), torch.inf, dtype=D)})
        assert fn(net.module(), {"y": Evidence(y)}, x, present).isfinite().all()
        broken = copy.deepcopy(net.module())
        broken.store["W_v_0/values"].data.fill_(torch.nan)  # as after a training step that diverged
        with pytest.raises(bt.BNetError, match=r"parameter W_v_0\.values: expected numbers; got NaN"):
            fn(broken, {"y": Evidence(y)}, x, present)


@pytest.mark.parametrize("options", [{}, {"slices": 2, "residual": True}], ids=str)
def test_a_density_that_underflows_is_not_called_zero(options):
    module, y = bt.bayesuvius(4, observe=Normal(1.0), **options).to(D).module(), torch.randn(2, 3, 4, dtype=D)
    y[1, 2, 0] = 1e14
    assert log_evidence(module, {"y": Evidence(y)}, y.clamp(max=1)).tolist()[1] == pytest.approx(-0.5e28, rel=1e-6)
    y[1, 2, 0] = 1e20
    with pytest.raises(
        bt.EvidenceError, match=r"of sentence 1: .* log density is above -5e\+29 .* got a lower log density"
    ):
        log_evidence(module, {"y": Evidence(y)}, y.clamp(max=1))


def test_a_selector_of_the_corpus_takes_one_state():
    module = chapter(per="corpus")
    state = {"c": Evidence(torch.tensor([1]))}
    observed = log_evidence(module, {**make_query()["evidence"], **state}, X)
    done = log_evidence(module, make_query()["evidence"], X, do={"c": torch.tensor(1)}).sum()
    torch.testing.assert_close(observed, (done + torch.tensor(1 / 3).log())[None])
    with pytest.raises(bt.BNetError, match=r"expected one value for all sentences, of shape \(\); got shape \(2,\)"):
        log_evidence(module, {"c": Evidence(torch.tensor([1, 1]))}, X)


def test_impossible_evidence_is_named():
    net = bt.bayesuvius(4, heads=3, atoms=2, observe=Normal(1.0)).to(D)
    module, x = net.module(), torch.randn(3, 3, 4, dtype=D)
    q = module(x, want=["q_0"])["q_0"]
    value = q[0].clone()
    value[1, 2] = q[1, 1, 2]
    for fn in (lambda e, **m: log_evidence(module, e, x, **m), lambda e, **m: posterior(module, "c", e, x, **m)):
        message = "q_0_2 of sentence 1: expected evidence that is possible in some state of the net; got "
        with pytest.raises(
            bt.EvidenceError, match=message + "a value of probability zero given the evidence before it"
        ):
            fn({"y": Evidence(x), "q_0": Evidence(value)})
        mask = torch.ones(3, 3, dtype=bool)
        mask[1, 0], mask[1, 1] = False, False
        assert fn({"q_0": Evidence(value, mask)}).isfinite().all()
        padding = torch.tensor([[True] * 3, [True, True, False], [True] * 3])
        assert fn({"q_0": Evidence(value)}, mask=padding).isfinite().all()
        with pytest.raises(bt.EvidenceError, match=r"k_0_0 of sentence 0: .*probability zero:"):
            fn({"k_0": Evidence(torch.zeros_like(value)), "y": Evidence(x)})
        with pytest.raises(bt.EvidenceError, match=r"W_k_0 of sentence 2.*zero:"):
            fn({"W_k_0": Evidence(net.parameters["W_k_0.atoms"][[0, 1, 1]] + torch.tensor([0, 0, 1])[:, None, None])})
        with pytest.raises(bt.EvidenceError, match=r"y.* of sentence 1: expected finite numbers"):
            fn({"y": Evidence(x.index_fill(0, torch.tensor(1), torch.nan))})
    impossible = log_evidence(module, {"q_0": Evidence(value)}, x, check=False)
    assert impossible[1] < -5e29 and impossible[[0, 2]].isfinite().all() and not impossible.isnan().any()


def test_impossible_evidence_under_a_selector_of_the_corpus_names_its_sentence():
    net = bt.bayesuvius(4, heads=3, per="corpus").to(D)
    module, x = net.module(), torch.randn(3, 2, 4, dtype=D)
    q = module(x, want=["q_0"])["q_0"]
    value = torch.stack([q[0, 0], q[0, 1], q[2, 2]])
    with pytest.raises(bt.EvidenceError, match=r"q_0_0 of sentence 2.*given the evidence before it"):
        log_evidence(module, {"q_0": Evidence(value)}, x)


def test_evidence_that_determines_a_choice_gives_the_references_posterior():
    """A group observed at all nodes: its descendants use its state, and its factor counts."""
    s = get_case("codebook").sentence.observe({"W_q_0": 1, "c": 0, "y_1": 2})
    given = {k: v[None] for k, v in s.state.encoded.given.items()}
    observed = {name: Evidence(item.value) if name != "y" else item for name, item in batch_evidence(s).items()}
    actual = log_evidence(s.net.module(), observed, given=given)
    close(actual[0], reference.log_evidence(s.state.model, s.state.evidence))


def test_a_real_choice_with_children_must_be_observed_at_all_words():
    nodes = [bt.Node("z", Normal(0.5), ["x"], plates=["word"]), bt.Node("x", Add(), ["x", "z"], plates=["word"])]
    stack = bt.Stack(
        nodes, [bt.Node("x", Given(2), plates=["word"])], [bt.Node("y", Categorical(2), ["x"], plates=["word"])]
    )
    net = bt.BNet(bt.Declaration([stack])).to(D)
    s = net.sentence(x=[[0.1, 0.2], [0.3, -0.4]]).observe(z_0_0=(1.0, 0.5), z_0_1=(0.0, 0.1), y_0=1)
    observed, x = batch_evidence(s), s.state.encoded.given["x_0"][None]
    with pytest.raises(bt.BNetError, match="z_0"):
        log_evidence(net.module(), observed, x)
    observed["z_0"] = Evidence(observed["z_0"].value)
    expected = reference.log_evidence(s.state.model, s.state.evidence)
    close(log_evidence(net.module(), observed, x)[0], expected)
