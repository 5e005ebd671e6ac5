"""Runs of gated heads: the table of log P by a plain loop; ablation, gradient importance, damage."""

import itertools
import math

import numpy as np
import pytest
import torch

import bnet_transformer as bt
from bnet_transformer.attention import damage
from bnet_transformer.attention.heads.gate_posterior import gate_settings
from bnet_transformer.attention.heads.head_inclusion import create_runs
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


def table_by_loop(net, sites, sentences, given, output=None):
    """`[site, sentence, setting]`: a sentence and a setting at a time."""
    heads = net.network.graph.plate_sizes["head"] * net.network.graph.plate_sizes.get("group", 1)
    result = torch.empty(len(sites), len(sentences), 2**heads, dtype=D)
    for k, text in enumerate(sentences):
        s = net.sentence(x=text) if isinstance(text, torch.Tensor) else net.sentence(text)
        entire = run_without(s)
        full = None if given is not None else get_output(s, entire, output)
        for site, setting in itertools.product(range(len(sites)), range(2**heads)):
            off = [(sites[site], h) for h in range(heads) if not setting >> h & 1]
            run = run_without(s, *off) if off else entire
            result[site, k, setting] = log_prob(s, run, None if given is None else given[k], output, full)
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
    "vanilla decoder, learned": 1,
    "vanilla encoder-decoder": 3,
    "vanilla encoder-decoder, pre-norm": 3,
}
LENGTHS = (2, 1, 2)


def said_to(item, net):
    """Sentences of several lengths that a case's net reads, and something observed of each readout."""
    rng, network = np.random.default_rng(3), net.network
    table = item.name in ("vanilla encoder-decoder, pre-norm", "shared slices")  # who reads whom, for so many words
    sentences, observed = [], []
    for n in LENGTHS:
        words = {stack.name: n + (stack.name == "enc") for stack in network.declaration.stacks}
        words = {"enc": 3, "dec": 2, "": 3} if table else words
        text, given = {}, {}
        for m in network.specs:
            prefix = () if m.group.word_stack is None else (words[m.group.word_stack],)
            if m.tpm.kind == "input":
                local = (*prefix, *m.shape)
                text[m.group.word_stack] = (
                    torch.from_numpy(rng.normal(size=local))
                    if m.shape
                    else rng.integers(m.tpm.states, size=local).tolist()
                )
            elif m.tpm.is_random and not network.graph.out_edges[m.group.index]:
                local = (*prefix, *(m.shape if m.tpm.kind == "continuous" else ()))
                samples = (
                    rng.normal(size=local) if m.tpm.kind == "continuous" else rng.integers(m.tpm.states, size=local)
                )
                given[m.group.name] = samples.tolist()
        sentences.append(text if len(text) > 1 else text[""])
        observed.append(given)
    return sentences, observed


def both(sentence, given):
    """A sentence with what is observed of it, as a mapping."""
    return {**(sentence if isinstance(sentence, dict) else {"": sentence}), **given}


def check_table(net, data, sentences, given, output=None):
    """`runs.table` is what the loop finds."""
    runs = create_runs(net.network, data, output, should_observe=given is not None)
    sites = [site.name for site in runs.sites]
    created = runs.log_prob_table(gate_settings(runs.num_heads), no_progress)
    output = runs.targets[0] if given is None else None
    close(created, table_by_loop(net, sites, sentences, given, output))
    assert float((created - created[..., -1:]).abs().amax()) > 1e-3
    return sites


@pytest.mark.slow
@pytest.mark.parametrize("name", SUMMED)
def test_the_table_is_one_sentence_and_one_setting_at_a_time(name):
    """Of what is observed, and around the output, wherever heads are summed; by the reference, head by head at zero."""
    net = BY_NAME[name].net
    sentences, given = said_to(BY_NAME[name], net)
    if given[0]:
        data = [both(*pair) for pair in zip(sentences, given, strict=True)]
        assert len(check_table(net, data, sentences, given)) == SUMMED[name]
    if not given[0] or SUMMED[name] == 1:
        assert len(check_table(net, sentences, sentences, None)) == SUMMED[name]


def test_cases_without_summed_heads_are_refused():
    for item in CASES:
        if item.name not in SUMMED and item.text is not None:
            net = item.net
            with pytest.raises(bt.BNetError, match="heads that are summed"):
                inclusion(net, said_to(item, net)[0][:1])


def test_heads_that_no_word_decides_have_a_table():
    """Queries, keys and values of places alone: what the heads read is one value for all sentences."""
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


def test_several_readouts_count_together_and_what_is_not_seen_counts_nothing():
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
    given = [{"y": [1, None, 0], "z": torch.randn(3, 4).tolist()}, {"y": [2, 2], "z": torch.randn(2, 4).tolist()}]
    check_table(net, [both(*pair) for pair in zip(x, given, strict=True)], x, given)


def test_small_parts_change_nothing(monkeypatch):
    net = concat_net(observe=Categorical(3), vocabulary=VOCABULARY)
    runs = create_runs(net.network, TEXTS, should_observe=False)
    full = runs.log_prob_table(gate_settings(3), no_progress)
    monkeypatch.setattr("bnet_transformer.attention.heads.gated_runs.WORDS_PER_PART", 16)
    monkeypatch.setattr("bnet_transformer.attention.heads.gated_runs.MEMORY_BUDGET", 1)
    close(runs.log_prob_table(gate_settings(3), no_progress), full, 1e-12)


# ablation


def test_ablation_is_zero_before_the_output_projection():
    """Three ways: by surgery on the heads, by their columns of W_o at zero, and around the output or of y."""
    net = concat_net(observe=Categorical(3), vocabulary=VOCABULARY)
    x, y = TEXTS, [[1, 0, 2], [0, 0, 1, 2, 1, 0], [2, 2, 1], [0, 1]]
    observed, around = inclusion(net, (x, y)), inclusion(net, x, sigma=0.7)
    for t, head in itertools.product(range(2), range(3)):
        W = net.parameters[f"W_o_{t}.value"].clone()
        W[head] = 0
        plain = net.replace({f"W_o_{t}.value": W})
        missing, separate = [], []
        for words, states in zip(x, y, strict=True):
            s, cut = net.sentence(words), plain.sentence(words)
            done = s.do({name: Zero() for name in get_names(s, f"a_{t}")[head]})
            log = [[item.tpm(f"y_{i}").logits for i in range(len(states))] for item in (s, cut, done)]
            close(torch.stack(log[1]), torch.stack(log[2]))
            missing.append(sum(float(log[0][i][k] - log[1][i][k]) for i, k in enumerate(states)))
            separate.append(sum(float((a - b).square().sum()) for a, b in zip(*log[:2], strict=True)))
        close(observed.ablation[t, head], torch.tensor(missing, dtype=D).mean())
        close(observed.ablation_error[t, head], torch.tensor(missing, dtype=D).std() / 2)
        close(around.ablation[t, head], torch.tensor(separate, dtype=D).mean() / 2 / 0.7**2)
    assert observed.sigma is None and around.sigma == 0.7
    usual = inclusion(net, x, output="y")
    close(usual.sigma**2, float(2 * around.ablation.mean() * 0.7**2))  # the root mean square distance
    assert float(usual.ablation.mean()) == pytest.approx(0.5)


@pytest.fixture(scope="module")
def bert():
    """A BERT of random weights: the net of it, its own module, sentences of two lengths."""
    from tests.huggingface_models import BERT, init_model

    model = init_model("BertModel", BERT)
    ids = [torch.tensor(row) for row in ([[3, 1, 7, 12], [5, 5, 2, 0]], [[9, 1, 4], [2, 8, 11], [6, 7, 3]])]
    return bt.from_pretrained(model), model, ids


def test_ablation_in_bert_is_zero_columns_before_the_output_projection(bert):
    net, model, ids = bert
    f = inclusion(net, [row.tolist() for part in ids for row in part], sigma=2.0)
    for t, head in itertools.product(range(2), range(3)):

        def zeroed(module, given, head=head):
            context = given[0].clone()
            context[..., 4 * head : 4 * head + 4] = 0
            return (context, *given[1:])

        missing = []
        for part in ids:
            full = model(part).last_hidden_state
            hook = model.encoder.layer[t].attention.output.dense.register_forward_pre_hook(zeroed)
            missing.append((model(part).last_hidden_state - full).square().flatten(1).sum(1) / 2 / 2.0**2)
            hook.remove()
        close(f.ablation[t, head], torch.cat(missing).mean(), 1e-7)


# gradient importance


def attended(net, x, families, loss):
    """`|Att_h(x)^T dL / dAtt_h(x)|` of each head (Michel, Levy and Neubig 2019, equation 2), `[family, head]`: the
    heads of a family are computed, kept, and put in again as leaves."""
    module, result = net.module().eval(), []
    for family in families:
        a = module(x[None], want=[family])[family].detach().requires_grad_()
        (slope,) = torch.autograd.grad(loss(module(x[None], do={family: a})[0]), a)
        result.append((a * slope).sum((0, 2, 3)).abs().detach())
    return torch.stack(result)


@pytest.mark.parametrize("observe", [Normal(0.5, dim=2), Categorical(4, pool="mean")], ids=str)
def test_importance_is_its_published_definition_by_autograd(observe):
    net = concat_net(observe=observe)
    discrete, pooled = observe.kind == "discrete", getattr(observe, "pool", None) is not None
    x, y = [torch.randn(n, 4, dtype=D) for n in (3, 2, 5, 3)], []
    for item in x:
        shape = () if pooled else (len(item),)
        y.append(torch.randint(3, shape) if discrete else torch.randn(*shape, 2, dtype=D))

    def loss(out, given):
        if discrete:
            return -torch.log_softmax(out, -1).gather(-1, given[..., None]).sum()
        return (out - given).square().sum() / 2 / 0.5**2

    f = inclusion(net, list(zip(x, y, strict=True)))
    item = [attended(net, words, ("a_0", "a_1"), lambda out, given=given: loss(out, given))
            for words, given in zip(x, y, strict=True)]  # fmt: skip
    close(f.importance, torch.stack(item).mean(0), 1e-7)  # sigma is kept in single precision
    close(f.importance_error, torch.stack(item).std(0) / 2, 1e-7)


def test_importance_of_next_words_is_that_of_the_sum_over_words():
    net = jitter(bt.decoder(4, heads=2, slices=2, hidden=6, vocabulary=VOCABULARY)).to(D)
    f = inclusion(net, TEXTS)
    ids = [torch.tensor([VOCABULARY.index(word) for word in text.split()]) for text in TEXTS]

    def loss(out, after):
        return torch.nn.functional.cross_entropy(out, after, reduction="sum")

    item = [attended(net, x[:-1], ("a_0", "a_1"), lambda out, x=x: loss(out, x[1:])) for x in ids]
    close(f.importance, torch.stack(item).mean(0))


def test_importance_around_the_output_is_the_mean_size_of_a_normal_slope(bert):
    """There `dL/dxi = z . J / sigma`, z normal: `sqrt(2 / pi) |J| / sigma` on average. J by autograd through BERT's own
    context vectors."""
    net, model, ids = bert
    f = inclusion(net, [row.tolist() for part in ids for row in part], sigma=1.5)
    sizes = []
    for sentence in (row[None] for part in ids for row in part):
        gates = torch.ones(2, 3, dtype=D)

        def gated(gates, sentence=sentence):
            hooks = [
                layer.attention.output.dense.register_forward_pre_hook(
                    lambda _, given, g=g: (given[0] * g.repeat_interleave(4), *given[1:])
                )
                for layer, g in zip(model.encoder.layer, gates, strict=True)
            ]
            out = model(sentence).last_hidden_state
            for hook in hooks:
                hook.remove()
            return out

        sizes.append(torch.autograd.functional.jacobian(gated, gates).flatten(0, 2).norm(dim=0))
    mean = math.sqrt(2 / math.pi) * torch.stack(sizes).mean(0) / 1.5
    spread = math.sqrt((1 - 2 / math.pi) / 8) * torch.stack(sizes).square().sum(0).sqrt() / len(sizes) / 1.5
    assert bool(((f.importance - mean).abs() < 3.5 * spread).all()) and float((spread / mean).max()) < 0.2


# damage


def lost_by(net, one, off, sigma):
    """What `log P` of a sentence loses with these heads off, by the reference."""
    x, y = one if sigma is None else (one, None)
    s = net.sentence(x=x)
    full, cut = run_without(s), run_without(s, *off)
    given, output = (None, get_output(s, full, "y")) if y is None else ({"y": y.tolist()}, None)
    missing = log_prob(s, full, given, "y", output) - log_prob(s, cut, given, "y", output)
    return missing if sigma is None else missing / sigma**2


@pytest.mark.parametrize("sigma", [None, 2.0])
def test_damage_is_that_of_the_heads_off_together(sigma):
    """Of the sentences of the measures and of others, y observed or not; and 6 heads off are all gates off."""
    net, counts = concat_net(observe=Normal(0.5)), (0, 2, 6)
    data = [torch.randn(n, 4, dtype=D) for n in (2, 1)], [torch.randn(n, 4, dtype=D) for n in (1, 2, 2)]
    if sigma is None:
        data = [[(x, torch.randn(len(x), 4, dtype=D)) for x in part] for part in data]
    f = inclusion(net, data[0], **({} if sigma is None else {"sigma": sigma}))
    for given, held_out in ((data[0], None), (data[1], data[1]))[sigma is not None :]:
        result = damage(f, held_out, counts=counts, progress=False)
        assert result.labels["heads off"] == ("0", "2", "6") and result.sentences == len(given)
        known = {}
        for m, name in enumerate(result.labels["measure"]):
            measure = f.measure(name)
            values = [float(measure[at]) for at in result.order[name]]
            assert values == sorted(values) and len(set(result.order[name])) == 6
            for k, count in enumerate(counts):
                off = frozenset((f"a_{t}", head) for t, head in result.order[name][:count])
                if off not in known:
                    known[off] = torch.stack([lost_by(net, one, off, sigma) for one in given])
                close(result.values[m, k], known[off].mean(), 1e-7)
                close(result.error[m, k], known[off].std() / len(given) ** 0.5, 1e-7)
        assert result.values[:, 0].abs().max() < 1e-12
        assert result.to_dataframe()["ablation"].tolist() == result.values[2].tolist()
        assert list(result.to_dataframe().index) == [0, 2, 6]


def test_damage_of_one_role_and_of_one_sentence():
    net = BY_NAME["vanilla encoder-decoder"].net
    data = said_to(BY_NAME["vanilla encoder-decoder"], net)[0]
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
        missing = []
        for words in x:
            s = net.sentence(x=words)
            cut = run_without(s, *((f"{role}_0", head) for head in range(count)))
            missing.append(-log_prob(s, cut, None, "x_1", get_output(s, run_without(s), "x_1")))
        assert f.log_bayes.shape == (1, count)
        close(result.values[:, 1], torch.stack(missing).mean().expand(3))
