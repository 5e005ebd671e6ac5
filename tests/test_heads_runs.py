"""Runs of gated heads: the table of log P by a plain loop; ablation, gradient importance, damage."""

import itertools
import math

import numpy as np
import pytest
import torch

import bnet_transformer as bt
from bnet_transformer.attention import damage
from bnet_transformer.attention.gates import gate_settings
from bnet_transformer.attention.inclusion import create_runs
from bnet_transformer.interventions import Zero
from bnet_transformer.tpm import Add, Attention, Categorical, Concat, Dot, Given, Linear, Normal, Positions, Weight
from tests.cases import CASES, HEADS, WORD, every, jitter, projections
from tests.gate_helpers import (
    BY_NAME,
    TEXTS,
    VOCABULARY,
    D,
    close,
    concat_net,
    get_names,
    get_output,
    inclusion,
    log_prob,
    no_progress,
    run_without,
)

# the table, by a loop


def compute_table(net, sites, sentences, evidence, output=None):
    """Return `[site, sentence, setting]`, one sentence and one setting at a time."""
    heads = net.network.graph.plate_sizes["head"] * net.network.graph.plate_sizes.get("group", 1)
    result = torch.empty(len(sites), len(sentences), 2**heads, dtype=D)
    for k, sentence in enumerate(sentences):
        s = net.sentence(x=sentence) if isinstance(sentence, torch.Tensor) else net.sentence(sentence)
        full_run = run_without(s)
        expected = None if evidence is not None else get_output(s, full_run, output)
        for site, setting in itertools.product(range(len(sites)), range(2**heads)):
            off = [(sites[site], h) for h in range(heads) if not setting >> h & 1]
            run = run_without(s, *off) if off else full_run
            result[site, k, setting] = log_prob(s, run, None if evidence is None else evidence[k], output, expected)
    return result


SUMMED = {
    "concat": 1,
    "grouped": 2,
    "bucketed": 2,
    "vanilla decoder, features": 1,
    "encoder, post-norm": 2,
    "encoder, pre-norm": 2,
    "integrator": 1,
    "positioned": 1,
    "vanilla encoder": 2,
    "vanilla encoder, masked word": 1,
    "vanilla encoder, class": 1,
    "vanilla decoder, causal": 2,
    "neurons": 1,
    "vanilla decoder, learned": 1,
    "vanilla encoder-decoder": 3,
    "vanilla encoder-decoder, pre-norm": 3,
}
LENGTHS = (2, 1)


def make_inputs(case, net):
    """Sentences of several lengths for the net of a case, and evidence on each readout."""
    rng, network = np.random.default_rng(3), net.network
    has_table = case.name in ("vanilla encoder-decoder, pre-norm", "shared slices")  # a mask for one word count
    sentences, observed = [], []
    for n in LENGTHS:
        words = {stack.name: n + (stack.name == "enc") for stack in network.declaration.stacks}
        words = {"enc": 3, "dec": 2, "": 3} if has_table else words
        inputs, evidence = {}, {}
        for spec in network.specs:
            prefix = () if spec.group.word_stack is None else (words[spec.group.word_stack],)
            if spec.tpm.kind == "input":
                dims = (*prefix, *spec.shape)
                inputs[spec.group.word_stack] = (
                    torch.from_numpy(rng.normal(size=dims))
                    if spec.shape
                    else rng.integers(spec.tpm.states, size=dims).tolist()
                )
            elif spec.tpm.is_random and not network.graph.out_edges[spec.group.index]:
                dims = (*prefix, *(spec.shape if spec.tpm.kind == "continuous" else ()))
                samples = (
                    rng.normal(size=dims) if spec.tpm.kind == "continuous" else rng.integers(spec.tpm.states, size=dims)
                )
                evidence[spec.group.name] = samples.tolist()
        sentences.append(inputs if len(inputs) > 1 else inputs[""])
        observed.append(evidence)
    return sentences, observed


def merge_evidence(sentence, evidence):
    """A sentence and its evidence, as one mapping."""
    return {**(sentence if isinstance(sentence, dict) else {"": sentence}), **evidence}


def check_table(net, data, sentences, evidence, output=None):
    """The table of `runs` equals that of the loop."""
    runs = create_runs(net.network, data, output, should_observe=evidence is not None)
    sites = [site.name for site in runs.sites]
    table = runs.log_prob_table(gate_settings(runs.num_heads), no_progress)
    output = runs.targets[0] if evidence is None else None
    close(table, compute_table(net, sites, sentences, evidence, output))
    assert float((table - table[..., -1:]).abs().amax()) > 1e-3
    return sites


@pytest.mark.slow
@pytest.mark.parametrize("name", SUMMED)
def test_the_table_is_one_sentence_and_one_setting_at_a_time(name):
    """With observed readouts and around the output, in every case of summed heads; the reference sets heads to zero."""
    net = BY_NAME[name].net
    sentences, evidence = make_inputs(BY_NAME[name], net)
    if evidence[0]:
        data = [merge_evidence(*pair) for pair in zip(sentences, evidence, strict=True)]
        assert len(check_table(net, data, sentences, evidence)) == SUMMED[name]
    if not evidence[0] or SUMMED[name] == 1:
        assert len(check_table(net, sentences, sentences, None)) == SUMMED[name]


def test_cases_without_summed_heads_are_refused():
    for case in CASES:
        if case.name not in SUMMED and case.text is not None:
            net = case.net
            with pytest.raises(bt.BNetError, match="a net that sums heads"):
                inclusion(net, make_inputs(case, net)[0][:1])


def test_heads_that_depend_on_no_word_have_a_table():
    """Queries, keys and values only of positions: the output of heads is the same for all sentences."""
    maps = [bt.Node(n.role, n.tpm, [{"x": "place"}.get(a.role, a.role) for a in n.arrows], n.plates)
            for n in projections(heads=True)]  # fmt: skip
    nodes = [
        *maps,
        bt.Node("a", Attention(Dot(None)), ["q", every("k"), every("v")], plates=HEADS),
        bt.Node("W_o", Weight((4, 4)), plates=["head"]),
        bt.Node("x", Concat(residual=True), ["W_o", "a", "x"], plates=WORD),
    ]
    words = [bt.Node("x", Given(4), plates=WORD), bt.Node("place", Positions(8, 4), plates=WORD)]
    stack = bt.Stack(nodes, words, [bt.Node("y", Categorical(3), ["x"], plates=WORD)])
    net = jitter(bt.BNet(bt.Declaration([stack], plates=[bt.Plate("head", 2)], name="places")), 2.0).to(D)
    x = [torch.randn(n, 4, dtype=D) for n in (3, 2, 3)]
    check_table(net, x, x, None)


def test_several_readouts_are_summed_and_unobserved_ones_do_not_count():
    nodes = [
        *projections(heads=True),
        bt.Node("a", Attention(Dot(None)), ["q", every("k"), every("v")], plates=HEADS),
        bt.Node("W_o", Weight((4, 4)), plates=["head"]),
        bt.Node("x", Concat(residual=True), ["W_o", "a", "x"], plates=WORD),
    ]
    readouts = [bt.Node("y", Categorical(3), ["x"], plates=WORD), bt.Node("z", Normal(0.5), ["x"], plates=WORD)]
    stack = bt.Stack(nodes, [bt.Node("x", Given(4), plates=WORD)], readouts)
    net = jitter(bt.BNet(bt.Declaration([stack], plates=[bt.Plate("head", 2)], name="two readouts"))).to(D)
    x = [torch.randn(n, 4, dtype=D) for n in (3, 2)]
    evidence = [{"y": [1, None, 0], "z": torch.randn(3, 4).tolist()}, {"y": [2, 2], "z": torch.randn(2, 4).tolist()}]
    check_table(net, [merge_evidence(*pair) for pair in zip(x, evidence, strict=True)], x, evidence)


def test_small_parts_change_nothing(monkeypatch):
    net = concat_net(observe=Categorical(3), vocabulary=VOCABULARY)
    runs = create_runs(net.network, TEXTS, should_observe=False)
    expected = runs.log_prob_table(gate_settings(3), no_progress)
    monkeypatch.setattr("bnet_transformer.attention.gates.WORDS_PER_PART", 16)
    monkeypatch.setattr("bnet_transformer.attention.gates.MEMORY_BUDGET", 1)
    close(runs.log_prob_table(gate_settings(3), no_progress), expected, 1e-12)


# ablation


@pytest.mark.slow
def test_ablation_is_zero_before_the_output_projection():
    """Computed by surgery on the heads and by zero columns of W_o; around the output and of y."""
    net = concat_net(observe=Categorical(3), vocabulary=VOCABULARY)
    x, y = TEXTS, [[1, 0, 2], [0, 0, 1, 2, 1, 0], [2, 2, 1], [0, 1]]
    observed, around = inclusion(net, (x, y)), inclusion(net, x, sigma=0.7)
    for t, head in itertools.product(range(2), range(3)):
        W = net.parameters[f"W_o_{t}.value"].clone()
        W[head] = 0
        zeroed_net = net.replace({f"W_o_{t}.value": W})
        drops, distances = [], []
        for words, states in zip(x, y, strict=True):
            s, zeroed = net.sentence(words), zeroed_net.sentence(words)
            ablated = s.do({name: Zero() for name in get_names(s, f"a_{t}")[head]})
            logits = [[sentence.tpm(f"y_{i}").logits for i in range(len(states))] for sentence in (s, zeroed, ablated)]
            close(torch.stack(logits[1]), torch.stack(logits[2]))
            drops.append(sum(float(logits[0][i][k] - logits[1][i][k]) for i, k in enumerate(states)))
            distances.append(sum(float((a - b).square().sum()) for a, b in zip(*logits[:2], strict=True)))
        close(observed.ablation[t, head], torch.tensor(drops, dtype=D).mean())
        close(observed.ablation_error[t, head], torch.tensor(drops, dtype=D).std() / 2)
        close(around.ablation[t, head], torch.tensor(distances, dtype=D).mean() / 2 / 0.7**2)
    assert observed.sigma is None and around.sigma == 0.7
    default = inclusion(net, x, output="y")
    close(default.sigma**2, float(2 * around.ablation.mean() * 0.7**2))  # the root mean square distance
    assert float(default.ablation.mean()) == pytest.approx(0.5)


@pytest.fixture(scope="module")
def bert():
    """A BERT with random weights: its net, its module, sentences of two lengths."""
    from tests.huggingface_models import BERT, init_model

    model = init_model("BertModel", BERT)
    ids = [torch.tensor(row) for row in ([[3, 1, 7, 12], [5, 5, 2, 0]], [[9, 1, 4], [2, 8, 11], [6, 7, 3]])]
    return bt.from_pretrained(model), model, ids


def test_ablation_in_bert_is_zero_columns_before_the_output_projection(bert):
    net, model, ids = bert
    f = inclusion(net, [row.tolist() for part in ids for row in part], sigma=2.0)
    for t, head in itertools.product(range(2), range(3)):

        def zero_head(module, args, head=head):
            context = args[0].clone()
            context[..., 4 * head : 4 * head + 4] = 0
            return (context, *args[1:])

        drops = []
        for part in ids:
            expected = model(part).last_hidden_state
            hook = model.encoder.layer[t].attention.output.dense.register_forward_pre_hook(zero_head)
            drops.append((model(part).last_hidden_state - expected).square().flatten(1).sum(1) / 2 / 2.0**2)
            hook.remove()
        close(f.ablation[t, head], torch.cat(drops).mean(), 1e-7)


# gradient importance


def compute_importance(net, x, groups, loss):
    """`|Att_h(x)^T dL / dAtt_h(x)|` of each head (Michel, Levy and Neubig 2019, equation 2), `[family, head]`: the
    outputs of heads are computed, detached, and set by `do` as leaves."""
    module, importances = net.module().eval(), []
    for group in groups:
        a = module(x[None], want=[group])[group].detach().requires_grad_()
        (gradient,) = torch.autograd.grad(loss(module(x[None], do={group: a})[0]), a)
        importances.append((a * gradient).sum((0, 2, 3)).abs().detach())
    return torch.stack(importances)


@pytest.mark.parametrize("observe", [Normal(0.5, dim=2), Categorical(4, pool="mean")], ids=str)
def test_importance_is_its_published_definition_by_autograd(observe):
    net = concat_net(observe=observe)
    discrete, pooled = observe.kind == "discrete", getattr(observe, "pool", None) is not None
    x, y = [torch.randn(n, 4, dtype=D) for n in (3, 2, 5, 3)], []
    for words in x:
        shape = () if pooled else (len(words),)
        y.append(torch.randint(3, shape) if discrete else torch.randn(*shape, 2, dtype=D))

    def loss(out, target):
        if discrete:
            return -torch.log_softmax(out, -1).gather(-1, target[..., None]).sum()
        return (out - target).square().sum() / 2 / 0.5**2

    f = inclusion(net, list(zip(x, y, strict=True)))
    importances = [compute_importance(net, words, ("a_0", "a_1"), lambda out, target=target: loss(out, target))
                   for words, target in zip(x, y, strict=True)]  # fmt: skip
    close(f.importance, torch.stack(importances).mean(0), 1e-7)  # sigma is stored in single precision
    close(f.importance_error, torch.stack(importances).std(0) / 2, 1e-7)


def test_importance_of_next_words_is_that_of_the_sum_over_words():
    net = jitter(bt.decoder(4, heads=2, slices=2, hidden=6, vocabulary=VOCABULARY)).to(D)
    f = inclusion(net, TEXTS)
    ids = [torch.tensor([VOCABULARY.index(word) for word in text.split()]) for text in TEXTS]

    def loss(out, target):
        return torch.nn.functional.cross_entropy(out, target, reduction="sum")

    importances = [compute_importance(net, x[:-1], ("a_0", "a_1"), lambda out, x=x: loss(out, x[1:])) for x in ids]
    close(f.importance, torch.stack(importances).mean(0))


def test_importance_around_the_output_is_the_mean_size_of_a_normal_slope(bert):
    """There `dL/dxi = z . J / sigma`, z normal: `sqrt(2 / pi) |J| / sigma` on average. J by autograd through BERT's
    context vectors."""
    net, model, ids = bert
    f = inclusion(net, [row.tolist() for part in ids for row in part], sigma=1.5)
    sizes = []
    for sentence in (row[None] for part in ids for row in part):
        gates = torch.ones(2, 3, dtype=D)

        def run_gated(gates, sentence=sentence):
            hooks = [
                layer.attention.output.dense.register_forward_pre_hook(
                    lambda _, args, g=g: (args[0] * g.repeat_interleave(4), *args[1:])
                )
                for layer, g in zip(model.encoder.layer, gates, strict=True)
            ]
            out = model(sentence).last_hidden_state
            for hook in hooks:
                hook.remove()
            return out

        sizes.append(torch.autograd.functional.jacobian(run_gated, gates).flatten(0, 2).norm(dim=0))
    mean = math.sqrt(2 / math.pi) * torch.stack(sizes).mean(0) / 1.5
    spread = math.sqrt((1 - 2 / math.pi) / 8) * torch.stack(sizes).square().sum(0).sqrt() / len(sizes) / 1.5
    assert bool(((f.importance - mean).abs() < 3.5 * spread).all()) and float((spread / mean).max()) < 0.2


# damage


def compute_drop(net, sentence, off, sigma):
    """Return the drop of `log P` of a sentence with these heads off, by the reference."""
    x, y = sentence if sigma is None else (sentence, None)
    s = net.sentence(x=x)
    full_run, ablated = run_without(s), run_without(s, *off)
    evidence, output = (None, get_output(s, full_run, "y")) if y is None else ({"y": y.tolist()}, None)
    drop = log_prob(s, full_run, evidence, "y", output) - log_prob(s, ablated, evidence, "y", output)
    return drop if sigma is None else drop / sigma**2


@pytest.mark.parametrize("sigma", [pytest.param(None, marks=pytest.mark.slow), 2.0])
def test_damage_is_that_of_the_heads_off_together(sigma):
    """For the sentences of the measures and for others, with y observed or not; and 6 heads off means all gates off."""
    net, counts = concat_net(observe=Normal(0.5)), (0, 2, 6)
    data = [torch.randn(n, 4, dtype=D) for n in (2, 1)], [torch.randn(n, 4, dtype=D) for n in (1, 2, 2)]
    if sigma is None:
        data = [[(x, torch.randn(len(x), 4, dtype=D)) for x in part] for part in data]
    f = inclusion(net, data[0], **({} if sigma is None else {"sigma": sigma}))
    for sentences, held_out in ((data[0], None), (data[1], data[1]))[sigma is not None :]:
        result = damage(f, held_out, counts=counts, progress=False)
        assert result.labels["heads off"] == ("0", "2", "6") and result.sentences == len(sentences)
        drops = {}
        for m, name in enumerate(result.labels["measure"]):
            measure = f.measure(name)
            values = [float(measure[at]) for at in result.order[name]]
            assert values == sorted(values) and len(set(result.order[name])) == 6
            for k, count in enumerate(counts):
                off = frozenset((f"a_{t}", head) for t, head in result.order[name][:count])
                if off not in drops:
                    drops[off] = torch.stack([compute_drop(net, sentence, off, sigma) for sentence in sentences])
                close(result.values[m, k], drops[off].mean(), 1e-7)
                close(result.error[m, k], drops[off].std() / len(sentences) ** 0.5, 1e-7)
        assert result.values[:, 0].abs().max() < 1e-12
        assert result.to_dataframe()["ablation"].tolist() == result.values[2].tolist()
        assert list(result.to_dataframe().index) == [0, 2, 6]


def test_damage_of_one_role_and_of_one_sentence():
    net = BY_NAME["vanilla encoder-decoder"].net
    data = make_inputs(BY_NAME["vanilla encoder-decoder"], net)[0]
    f = inclusion(net, data, role="dec_cross_a", sigma=1.0)
    assert f.slices == ("dec_cross_a_0",)
    result = damage(f, data[:1], progress=False)
    assert result.values.shape == (3, 3) and bool(result.error.isnan().all())
    s = net.sentence(data[0])
    off = run_without(s, ("dec_cross_a_0", 0), ("dec_cross_a_0", 1))
    close(result.values[:, -1], -log_prob(s, off, None, "dec_y", get_output(s, run_without(s), "dec_y")).expand(3))


def test_roles_with_other_numbers_of_heads_are_asked_one_at_a_time():
    mates = ["mate", "word"]
    nodes = [
        *projections(heads=True),
        bt.Node("a", Attention(Dot(None)), ["q", every("k"), every("v")], plates=HEADS),
        bt.Node("W_b", Weight((4, 4)), plates=["mate"]),
        bt.Node("u", Linear(), ["W_b", "x"], plates=mates),
        bt.Node("b", Attention(Dot(None)), ["x", every("u"), every("u")], plates=mates),
        bt.Node("side", Concat(mapped=False), ["b"], plates=WORD),
        bt.Node("front", Linear(4), ["side"], plates=WORD),
        bt.Node("W_o", Weight((4, 4)), plates=["head"]),
        bt.Node("mix", Concat(), ["W_o", "a"], plates=WORD),
        bt.Node("x", Add(), ["x", "mix", "front"], plates=WORD),
    ]
    stack = bt.Stack(nodes, [bt.Node("x", Given(4), plates=WORD)])
    plates = [bt.Plate("head", 2), bt.Plate("mate", 3)]
    net = jitter(bt.BNet(bt.Declaration([stack], plates=plates, name="two roles"))).to(D)
    x = [torch.randn(n, 4, dtype=D) for n in (2, 3)]
    with pytest.raises(bt.BNetError, match=r"a_0 2, b_0 3; allowed: a, b"):
        inclusion(net, x)
    for role, count in (("a", 2), ("b", 3)):
        f = inclusion(net, x, role=role, sigma=1.0)
        result = damage(f, counts=[0, count], progress=False)
        drops = []
        for words in x:
            s = net.sentence(x=words)
            ablated = run_without(s, *((f"{role}_0", head) for head in range(count)))
            drops.append(-log_prob(s, ablated, None, "x_1", get_output(s, run_without(s), "x_1")))
        assert f.log_bayes.shape == (1, count)
        close(result.values[:, 1], torch.stack(drops).mean().expand(3))
