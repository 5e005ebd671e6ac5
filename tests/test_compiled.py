"""The compiled reading against the reference: every family of every case, do, padding, gradients, torch.compile."""

import itertools

import pytest
import torch

import bnet_transformer as bt
from bnet_transformer.compiler import Module
from bnet_transformer.tpm import Categorical, Given, Normal
from tests.cases import CASES, Case

D = torch.float64
IDS = {"ids": lambda case: case.name}


def module_of(case: Case) -> Module:
    return case.net.module().eval()


def batch_of(s: bt.Sentence) -> dict[str, torch.Tensor]:
    return {name: value[None] for name, value in s._intake.given.items()}


@pytest.mark.parametrize("dtype, tolerance", [(D, 1e-10), (torch.float32, 1e-5)], ids=["float64", "float32"])
@pytest.mark.parametrize("case", CASES, **IDS)
def test_every_family_is_the_references(case: Case, dtype, tolerance):
    net = case.net.to(dtype)
    s, module = net.sentence(case.said), net.module().eval()
    for member in net.network.members:
        family = member.family
        if member.tpm.kind != "deterministic" or isinstance(member.tpm, Given):
            continue
        try:
            got = module(given=batch_of(s), want=[family.name])[family.name]
        except bt.BNetError as error:
            assert case.name == "word, two slices" and "read" in str(error)
            continue
        shape = s.ground.shapes[family.index]
        lead = got.dim() - len(member.shape) - len(shape) - 1
        assert tuple(got.shape[lead + 1 :]) == (*shape, *member.shape)
        for index in itertools.product(*map(range, shape)):
            name = "_".join([family.name, *map(str, index)])
            one = got[(slice(None),) * lead + (0, *index)]
            torch.testing.assert_close(one, s[name], rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("case", [c for c in CASES if c.evidence], **IDS)
def test_readouts_are_the_references(case: Case):
    s, module = case.sentence, module_of(case)
    for member in s.net.network.members:
        if not member.family.role.startswith(("y", "label")):
            continue
        try:
            got = module(given=batch_of(s), want=[member.family.name])[member.family.name]
        except bt.BNetError:
            assert case.name == "word, two slices"
            continue
        words = member.family.words is not None
        for i in range(s.ground.words[member.family.words]) if words else [None]:
            tpm = s.tpm(member.family.name if i is None else f"{member.family.name}_{i}")
            expected = tpm.mean if member.tpm.kind == "continuous" else torch.log_softmax(tpm.logits, -1)
            one = got.select(-3, 0)[..., i, :] if words else got.select(-2, 0)
            torch.testing.assert_close(one, expected, rtol=1e-10, atol=1e-10)


def test_a_batch_is_its_sentences():
    module = bt.bayesuvius(4, slices=2, heads=3, residual=True).to(D).module()
    x = torch.randn(5, 3, 4, dtype=D)
    one_by_one = torch.cat([module(x[k : k + 1]) for k in range(5)], 1)
    torch.testing.assert_close(module(x), one_by_one, rtol=1e-12, atol=1e-12)


def test_what_comes_before_the_selector_is_shared_by_its_states():
    module = bt.bayesuvius(4, slices=2, heads=3, vocabulary=["a", "b"]).module()
    found = module(torch.tensor([[0, 1]]), want=["x_0", "q_0", "x_2"])
    assert [tuple(found[name].shape) for name in ("x_0", "q_0", "x_2")] == [(1, 2, 4), (3, 1, 2, 4), (3, 1, 2, 4)]


@pytest.mark.parametrize("options", [{}, {"per": "word"}, {"combine": "concat"}, {"mask": "causal"}], ids=str)
def test_padding_changes_nothing(options):
    module = bt.bayesuvius(4, heads=2, residual=True, observe=Categorical(3, pool="mean"), **options).to(D).module()
    x = torch.randn(2, 3, 4, dtype=D)
    longer = torch.cat([x, 7 * torch.randn(2, 2, 4, dtype=D)], 1)
    mask = torch.tensor([[True] * 3 + [False] * 2] * 2)
    names = ["x_1"] if options.get("per") == "word" else ["x_1", "y"]
    short, long = module(x, want=names), module(longer, mask, want=names)
    torch.testing.assert_close(long["x_1"][..., :3, :], short["x_1"], rtol=1e-12, atol=1e-12)
    if "y" in names:
        torch.testing.assert_close(long["y"], short["y"], rtol=1e-12, atol=1e-12)


def test_do_is_an_argument():
    net = bt.bayesuvius(4, slices=2, heads=3).to(D)
    s, module = net.sentence("the cat sat"), net.module()
    x = s._intake.given["x_0"][None]
    state = module(x, do={"c": torch.tensor(2)})
    torch.testing.assert_close(state[0, 1], s.do(c=2)["x_2_1"], rtol=1e-12, atol=1e-12)
    patch = torch.randn(3, 4, dtype=D)
    patched = module(x, do={"x_1": patch[None]})
    done = s.do({f"x_1_{i}": patch[i] for i in range(3)})
    torch.testing.assert_close(patched[:, 0, 1], done["x_2_1"], rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("words", [3, 20])
def test_do_of_each_words_own_choice(words):
    """The reader's choice picks its query and the keys and values that it reads, explicit or fused."""
    net = bt.bayesuvius(4, heads=3, per="word").to(D)
    x = torch.randn(words, 4, dtype=D)
    choice = [i % 3 for i in range(words)]
    got = net.module()(x[None], do={"c_0": torch.tensor([choice])})
    done = net.sentence(x=x).do({f"c_0_{i}": c for i, c in enumerate(choice)})
    for i in (0, 1, words - 1):
        torch.testing.assert_close(got[..., 0, i, :].squeeze(), done[f"x_1_{i}"], rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("case", [c for c in CASES if c.name not in ("word, two slices", "marginal")], **IDS)
def test_gradients_reach_the_parameters_that_matter(case: Case):
    module, s = module_of(case), case.sentence
    wanted = [m for m in s.net.network.members if m.tpm.kind == "deterministic" and m.parameters]
    module(given=batch_of(s), want=[module.output])[module.output].square().sum().backward()
    above = {f.name for f in _above(s, module.output)}
    for member in wanted:
        if member.family.name in above:
            for name in member.parameters:
                grad = module.store[f"{member.owner}/{name}"].grad
                assert grad is not None and torch.isfinite(grad).all()


def _above(s: bt.Sentence, name: str):
    graph, found, stack = s.net.network.graph, set(), [s.net.network.graph.family(name)]
    while stack:
        family = stack.pop()
        if family not in found:
            found.add(family)
            stack += [graph.families[b.parent] for b in graph.into[family.index]]
    return found


def test_gradients_are_finite_differences():
    net = bt.bayesuvius(3, heads=2, residual=True, observe=Normal(0.5)).to(D)
    module = net.module()
    x = torch.randn(1, 3, 3, dtype=D, requires_grad=True)
    assert torch.autograd.gradcheck(lambda x: module(x), (x,))


def test_the_module_shares_the_nets_parameters():
    net = bt.bayesuvius(4)
    module = net.module()
    assert module.store["W_q_0/values"].data_ptr() == net.parameters["W_q_0.values"].data_ptr()
    assert set(module.state_dict()) == {f"store.{name.replace('.', '/')}" for name in net.parameters}
    other = bt.bayesuvius(4, seed=1).module()
    other.load_state_dict(module.state_dict())
    x = torch.randn(1, 3, 4)
    assert other(x).equal(module(x))


def test_it_compiles_without_a_break():
    module = bt.bayesuvius(4, slices=2, heads=3, mask="causal", observe=Categorical(3)).module()
    x = torch.randn(2, 3, 4)
    compiled = torch.compile(module, fullgraph=True, backend="eager")
    torch.testing.assert_close(compiled(x), module(x))


@pytest.mark.parametrize(
    "ask, told",
    [
        (lambda m: m(torch.zeros(2, 3, 5)), r"shape \(2, 3, 5\)"),
        (lambda m: m(torch.zeros(3)), r"\[batch, word\]"),
        (lambda m: m(), "a value for every given node"),
        (lambda m: m(torch.zeros(1, 3, 4), want=["x_9"]), "near matches"),
        (lambda m: m(torch.zeros(1, 3, 4), torch.ones(1, 3)), "booleans"),
        (lambda m: m(torch.zeros(1, 3, 4), torch.ones(1, 2, dtype=torch.bool)), r"\(1, 3\)"),
        (lambda m: m(torch.zeros(1, 3, 4), do={"z": torch.zeros(1)}), "near matches|known name"),
    ],
)
def test_bad_input(ask, told):
    with pytest.raises(bt.BNetError, match=told):
        ask(bt.bayesuvius(4).module())
