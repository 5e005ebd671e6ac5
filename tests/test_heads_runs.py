"""Runs of gated heads: the table of log P by a plain loop; ablation, gradient importance, damage; bad input."""

import itertools
import math

import numpy as np
import pytest
import torch

import bnet_transformer as bt
from bnet_transformer import reference
from bnet_transformer.inference import Zero, damage
from bnet_transformer.inference.heads.gates import runs_of
from bnet_transformer.inference.heads.posterior import settings
from bnet_transformer.tpm import Add, Attention, Categorical, Concat, Dot, Given, Linear, Normal, Positions, Weight
from tests.cases import CASES, HEADS, WORD, every, jolted, projections

D = torch.float64
BY_NAME = {case.name: case for case in CASES}
VOCABULARY = ["the", "cat", "sat", "on", "a", "dog", "ran", "off", "mat"]
TEXTS = ["the cat sat", "a dog ran off the mat", "the dog sat", "a cat"]


def quiet(_):
    """No bar."""


def inclusion(net, data, **options):
    return bt.inclusion(net, data, progress=False, **{"draws": 64, **options})


def concat(**options):
    told = {"heads": 3, "slices": 2, "combine": "concat", "residual": True, **options}
    return jolted(bt.bayesuvius(4, **told)).to(D)


def close(got, wanted, tolerance=1e-9):
    torch.testing.assert_close(torch.as_tensor(got), torch.as_tensor(wanted), rtol=tolerance, atol=tolerance)


# the table, by a loop


def nodes_of(s, family):
    """The names of the nodes of a family, `[head, word]`."""
    ground = s.ground
    found = ground.folded.by_name[family]
    return np.array([ground.name(n) for n in ground.nodes(found).tolist()]).reshape(ground.shapes[found.index])


def run_of(s, *off):
    """A run by the reference, node by node, in which these heads are set to zero: (family, head)."""
    done = s.do({name: Zero() for family, head in off for name in nodes_of(s, family)[head].ravel()})
    return reference.Run(done._world, {})


def output_of(s, run, family):
    """The nodes of a family in a run: values, log probabilities, means."""
    kind = s.net.network.member(family).tpm.kind
    ids = [s.ground.id(name) for name in nodes_of(s, family).ravel()]
    if kind == "deterministic":
        return torch.stack([run.value(node) for node in ids])
    found = [run.distribution(node) for node in ids]
    return torch.stack([each.logits if kind == "discrete" else each.mean for each in found])


def log_p(s, run, told, output, full):
    """`log P` of what is told of families in a run, or `-|f - full|^2 / 2` of an output f."""
    if told is None:
        return -0.5 * (output_of(s, run, output) - full).square().sum()
    total = torch.zeros((), dtype=D)
    for family, values in told.items():
        names = nodes_of(s, family).ravel()
        for name, value in zip(names, values if nodes_of(s, family).ndim else [values], strict=True):
            if value is not None:
                seen = torch.tensor(value, dtype=None if isinstance(value, int) else D)
                total += run.distribution(s.ground.id(name)).log_prob(seen).sum()
    return total


def table_by_loop(net, sites, sentences, told, output=None):
    """`[site, sentence, setting]`: a sentence and a setting at a time."""
    heads = net.network.graph.sizes["head"]
    found = torch.empty(len(sites), len(sentences), 2**heads, dtype=D)
    for k, said in enumerate(sentences):
        s = net.sentence(x=said) if isinstance(said, torch.Tensor) else net.sentence(said)
        whole = run_of(s)
        full = None if told is not None else output_of(s, whole, output)
        for site, setting in itertools.product(range(len(sites)), range(2**heads)):
            off = [(sites[site], h) for h in range(heads) if not setting >> h & 1]
            run = run_of(s, *off) if off else whole
            found[site, k, setting] = log_p(s, run, None if told is None else told[k], output, full)
    return found


SUMMED = {
    "concat": 1,
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


def said_to(each, net):
    """Sentences of several lengths that a case's net reads, and something observed of each readout."""
    rng, network = np.random.default_rng(3), net.network
    table = each.name in ("vanilla encoder-decoder, pre-norm", "shared slices")  # who reads whom, for so many words
    sentences, observed = [], []
    for n in LENGTHS:
        words = {stack.name: n + (stack.name == "enc") for stack in network.declaration.stacks}
        words = {"enc": 3, "dec": 2, "": 3} if table else words
        said, told = {}, {}
        for m in network.members:
            lead = () if m.family.words is None else (words[m.family.words],)
            if isinstance(m.tpm, Given):
                own = (*lead, *m.shape)
                said[m.family.words] = (
                    torch.from_numpy(rng.normal(size=own)) if m.shape else rng.integers(m.tpm.states, size=own).tolist()
                )
            elif m.tpm.kind != "deterministic" and not network.graph.out_of[m.family.index]:
                own = (*lead, *(m.shape if m.tpm.kind == "continuous" else ()))
                drawn = rng.normal(size=own) if m.tpm.kind == "continuous" else rng.integers(m.tpm.states, size=own)
                told[m.family.name] = drawn.tolist()
        sentences.append(said if len(said) > 1 else said[""])
        observed.append(told)
    return sentences, observed


def both(sentence, told):
    """A sentence with what is observed of it, as a mapping."""
    return {**(sentence if isinstance(sentence, dict) else {"": sentence}), **told}


def check_table(net, data, sentences, told, output=None):
    """`runs.table` is what the loop finds."""
    runs = runs_of(net.network, data, output, seen=told is not None)
    sites = [site.name for site in runs.sites]
    made = runs.table(settings(runs.heads), quiet, 2**29)
    output = runs.likelihood.families[0] if told is None else None
    close(made, table_by_loop(net, sites, sentences, told, output))
    assert float((made - made[..., -1:]).abs().amax()) > 1e-3
    return sites


@pytest.mark.parametrize("name", SUMMED)
def test_the_table_is_one_sentence_and_one_setting_at_a_time(name):
    """Of what is observed, and around the output, wherever heads are summed; by the reference, head by head at zero."""
    net = BY_NAME[name].net
    sentences, told = said_to(BY_NAME[name], net)
    if told[0]:
        data = [both(*pair) for pair in zip(sentences, told, strict=True)]
        assert len(check_table(net, data, sentences, told)) == SUMMED[name]
    if not told[0] or SUMMED[name] == 1:
        assert len(check_table(net, sentences, sentences, None)) == SUMMED[name]


def test_cases_without_summed_heads_are_refused():
    for each in CASES:
        if each.name not in SUMMED:
            net = each.net
            with pytest.raises(bt.BNetError, match="heads that are summed"):
                inclusion(net, said_to(each, net)[0][:1])


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
    net = jolted(bt.BNet(bt.Declaration([stack], plates=[bt.Plate("head", 2)], name="places")), 2.0).to(D)
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
    net = jolted(bt.BNet(bt.Declaration([stack], plates=[bt.Plate("head", 2)], name="two readouts"))).to(D)
    x = [torch.randn(n, 4, dtype=D) for n in (3, 2)]
    told = [{"y": [1, None, 0], "z": torch.randn(3, 4).tolist()}, {"y": [2, 2], "z": torch.randn(2, 4).tolist()}]
    check_table(net, [both(*pair) for pair in zip(x, told, strict=True)], x, told)


def test_small_parts_and_little_memory_change_nothing(monkeypatch):
    net = concat(observe=Categorical(3), vocabulary=VOCABULARY)
    runs = runs_of(net.network, TEXTS, seen=False)
    whole = runs.table(settings(3), quiet, 2**29)
    monkeypatch.setattr("bnet_transformer.inference.heads.runs.ROWS", 16)
    close(runs.table(settings(3), quiet, 1), whole, 1e-12)


# ablation


def test_ablation_is_zero_before_the_output_projection():
    """Three ways: by surgery on the heads, by their columns of W_o at zero, and around the output or of y."""
    net = concat(observe=Categorical(3), vocabulary=VOCABULARY)
    x, y = TEXTS, [[1, 0, 2], [0, 0, 1, 2, 1, 0], [2, 2, 1], [0, 1]]
    seen, around = inclusion(net, (x, y)), inclusion(net, x, sigma=0.7)
    for t, head in itertools.product(range(2), range(3)):
        W = net.parameters[f"W_o_{t}.value"].clone()
        W[head] = 0
        bare = net.replace({f"W_o_{t}.value": W})
        lost, apart = [], []
        for words, states in zip(x, y, strict=True):
            s, cut = net.sentence(words), bare.sentence(words)
            done = s.do({name: Zero() for name in nodes_of(s, f"a_{t}")[head]})
            log = [[each.tpm(f"y_{i}").logits for i in range(len(states))] for each in (s, cut, done)]
            close(torch.stack(log[1]), torch.stack(log[2]))
            lost.append(sum(float(log[0][i][k] - log[1][i][k]) for i, k in enumerate(states)))
            apart.append(sum(float((a - b).square().sum()) for a, b in zip(*log[:2], strict=True)))
        close(seen.ablation[t, head], torch.tensor(lost, dtype=D).mean())
        close(seen.ablation_error[t, head], torch.tensor(lost, dtype=D).std() / 2)
        close(around.ablation[t, head], torch.tensor(apart, dtype=D).mean() / 2 / 0.7**2)
    assert seen.sigma is None and around.sigma == 0.7
    usual = inclusion(net, x, output="y")
    close(usual.sigma**2, float(2 * around.ablation.mean() * 0.7**2))  # the root mean square distance
    assert float(usual.ablation.mean()) == pytest.approx(0.5)


@pytest.fixture(scope="module")
def bert():
    """A BERT of random weights: the net of it, its own module, sentences of two lengths."""
    from tests.hugging import BERT, random_model

    model = random_model("BertModel", BERT)
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

        lost = []
        for part in ids:
            full = model(part).last_hidden_state
            hook = model.encoder.layer[t].attention.output.dense.register_forward_pre_hook(zeroed)
            lost.append((model(part).last_hidden_state - full).square().flatten(1).sum(1) / 2 / 2.0**2)
            hook.remove()
        close(f.ablation[t, head], torch.cat(lost).mean(), 1e-7)


# gradient importance


def attended(net, x, families, loss):
    """`|Att_h(x)^T dL / dAtt_h(x)|` of each head (Michel, Levy and Neubig 2019, equation 2), `[family, head]`: the
    heads of a family are computed, kept, and put in again as leaves."""
    module, found = net.module().eval(), []
    for family in families:
        a = module(x[None], want=[family])[family].detach().requires_grad_()
        (slope,) = torch.autograd.grad(loss(module(x[None], do={family: a})[0]), a)
        found.append((a * slope).sum((0, 2, 3)).abs().detach())
    return torch.stack(found)


@pytest.mark.parametrize("observe", [Categorical(3), Normal(0.5, dim=2), Categorical(4, pool="mean")], ids=str)
def test_importance_is_its_published_definition_by_autograd(observe):
    net = concat(observe=observe)
    discrete, pooled = observe.kind == "discrete", getattr(observe, "pool", None) is not None
    x, y = [torch.randn(n, 4, dtype=D) for n in (3, 2, 5, 3)], []
    for each in x:
        shape = () if pooled else (len(each),)
        y.append(torch.randint(3, shape) if discrete else torch.randn(*shape, 2, dtype=D))

    def loss(out, told):
        if discrete:
            return -torch.log_softmax(out, -1).gather(-1, told[..., None]).sum()
        return (out - told).square().sum() / 2 / 0.5**2

    f = inclusion(net, list(zip(x, y, strict=True)))
    each = [attended(net, words, ("a_0", "a_1"), lambda out, told=told: loss(out, told))
            for words, told in zip(x, y, strict=True)]  # fmt: skip
    close(f.importance, torch.stack(each).mean(0), 1e-7)  # sigma is kept in single precision
    close(f.importance_error, torch.stack(each).std(0) / 2, 1e-7)


def test_importance_of_next_words_is_that_of_the_sum_over_words():
    net = jolted(bt.decoder(4, heads=2, slices=2, hidden=6, vocabulary=VOCABULARY)).to(D)
    f = inclusion(net, TEXTS)
    ids = [torch.tensor([VOCABULARY.index(word) for word in text.split()]) for text in TEXTS]

    def loss(out, after):
        return torch.nn.functional.cross_entropy(out, after, reduction="sum")

    each = [attended(net, x[:-1], ("a_0", "a_1"), lambda out, x=x: loss(out, x[1:])) for x in ids]
    close(f.importance, torch.stack(each).mean(0))


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


# permutations, damage


def permuted(net, orders):
    """The same net with the heads of each slice in another order."""
    told = {f"W_{r}_{t}.value": order for t, order in enumerate(orders) for r in "qkvo"}
    return net.replace({name: net.parameters[name][order] for name, order in told.items()})


def test_a_permutation_of_heads_permutes_the_result():
    net, orders = concat(observe=Normal(0.5)), ([2, 0, 1], [1, 0, 2])
    x, y = torch.randn(8, 3, 4, dtype=D), torch.randn(8, 3, 4, dtype=D)
    for data, options in (((x, y), {}), (x, {"sigma": 3.0})):
        one, two = (inclusion(each, data, draws=1000, **options) for each in (net, permuted(net, orders)))
        for t, order in enumerate(orders):
            for name in ("ablation", "ablation_error", "importance", "importance_error"):
                close(getattr(two, name)[t], getattr(one, name)[t][order])
            close(two.mean[t], one.mean[t][order], 0.05)
            close(two.log_bayes[t], one.log_bayes[t][order], 0.15)
            close(two.inclusion[:, t], one.inclusion[:, t][:, order], 0.05)
            close(two.interaction[t], one.interaction[t][order][:, order], 0.3)
        assert float((one.ablation - two.ablation).abs().max()) > 0.05


def lost_by(net, one, off, sigma):
    """What `log P` of a sentence loses with these heads off, by the reference."""
    x, y = one if sigma is None else (one, None)
    s = net.sentence(x=x)
    full, cut = run_of(s), run_of(s, *off)
    told, output = (None, output_of(s, full, "y")) if y is None else ({"y": y.tolist()}, None)
    lost = log_p(s, full, told, "y", output) - log_p(s, cut, told, "y", output)
    return lost if sigma is None else lost / sigma**2


@pytest.mark.parametrize("sigma", [None, 2.0])
def test_damage_is_that_of_the_heads_off_together(sigma):
    """Of the sentences of the measures and of others, y observed or not; and 6 heads off are all gates off."""
    net, counts = concat(observe=Normal(0.5)), (0, 2, 6)
    data = [torch.randn(n, 4, dtype=D) for n in (2, 1)], [torch.randn(n, 4, dtype=D) for n in (1, 2, 2)]
    if sigma is None:
        data = [[(x, torch.randn(len(x), 4, dtype=D)) for x in part] for part in data]
    f = inclusion(net, data[0], **({} if sigma is None else {"sigma": sigma}))
    for told, held_out in ((data[0], None), (data[1], data[1])):
        found = damage(f, held_out, counts=counts, progress=False)
        assert found.labels["heads off"] == ("0", "2", "6") and found.sentences == len(told)
        known = {}
        for m, name in enumerate(found.labels["measure"]):
            measure = f.measure(name)
            values = [float(measure[at]) for at in found.order[name]]
            assert values == sorted(values) and len(set(found.order[name])) == 6
            for k, count in enumerate(counts):
                off = frozenset((f"a_{t}", head) for t, head in found.order[name][:count])
                if off not in known:
                    known[off] = torch.stack([lost_by(net, one, off, sigma) for one in told])
                close(found.values[m, k], known[off].mean(), 1e-7)
                close(found.error[m, k], known[off].std() / len(told) ** 0.5, 1e-7)
        assert found.values[:, 0].abs().max() < 1e-12
        assert found.to_dataframe()["ablation"].tolist() == found.values[2].tolist()
        assert list(found.to_dataframe().index) == [0, 2, 6]


def test_damage_of_one_role_and_of_one_sentence():
    net = BY_NAME["vanilla encoder-decoder"].net
    data = said_to(BY_NAME["vanilla encoder-decoder"], net)[0]
    f = inclusion(net, data, role="dec_cross_a", sigma=1.0)
    assert f.slices == ("dec_cross_a_0",)
    found = damage(f, data[:1], progress=False)
    assert found.values.shape == (3, 3) and bool(found.error.isnan().all())
    s = net.sentence(data[0])
    off = run_of(s, ("dec_cross_a_0", 0), ("dec_cross_a_0", 1))
    close(found.values[:, -1], -log_p(s, off, None, "dec_y", output_of(s, run_of(s), "dec_y")).expand(3))


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
    net = jolted(bt.BNet(bt.Declaration([stack], plates=plates, name="two roles"))).to(D)
    x = [torch.randn(n, 4, dtype=D) for n in (2, 3)]
    with pytest.raises(bt.BNetError, match=r"a_0 2, b_0 3; allowed: a, b"):
        inclusion(net, x)
    for role, count in (("a", 2), ("b", 3)):
        f = inclusion(net, x, role=role, sigma=1.0)
        found = damage(f, counts=[0, count], progress=False)
        lost = []
        for words in x:
            s = net.sentence(x=words)
            cut = run_of(s, *((f"{role}_0", head) for head in range(count)))
            lost.append(-log_p(s, cut, None, "x_1", output_of(s, run_of(s), "x_1")))
        assert f.log_bayes.shape == (1, count)
        close(found.values[:, 1], torch.stack(lost).mean().expand(3))


# gates


def gated_by_hand(net, x, family, gates, **options):
    """The output where the values of a family are computed, multiplied, and set."""
    module = net.module()
    found = module(x, want=[family], **options)[family]
    own = found.dim() - gates.dim()
    do = {**options.pop("do", {}), family: found * gates.reshape(*gates.shape, *[1] * own)}
    return module(x, do=do, **options)


@pytest.mark.parametrize("words", [2, 40])
@pytest.mark.parametrize("name", ["concat", "chapter, two slices", "codebook", "shared slices", "gated", "experts"])
def test_gates_multiply_the_values_of_a_family(name, words):
    """Also where maps of many words would be folded into an attention, which then is not."""
    net = BY_NAME[name].net
    words = 3 if name == "shared slices" else words
    x, module = torch.randn(2, words, 4, dtype=D), net.module()
    members = net.network.members
    choices = [m.family for m in members if m.tpm.kind == "discrete" and net.network.graph.out_of[m.family.index]]
    free = {family.name: torch.tensor(1) for family in choices if family.words is None}
    free |= {m.family.name: torch.ones(words, dtype=torch.long) for m in members if m.family.stem == "r"}
    tried = 0
    for member in members:
        if member.tpm.kind == "deterministic" and member.family.words is not None:
            gates = torch.rand(2, *(net.network.graph.sizes[plate] for plate in member.family.plates), dtype=D) + 0.5
            told = {member.family.name: gates}
            close(module(x, gates=told, do=free), gated_by_hand(net, x, member.family.name, gates, do=free), 1e-10)
            last = torch.ones_like(gates)
            close(module(x, gates={member.family.name: last}, do=free), module(x, do=free), 1e-10)
            tried += 1
    assert tried >= 4


def test_gates_pass_gradients_and_one_sentence_takes_many():
    net = concat(observe=Normal(0.5))
    x, module = torch.randn(1, 3, 4, dtype=D), net.module()
    many = torch.rand(5, 3, dtype=D).requires_grad_()
    together = module(x, gates={"a_0": many, "x_1": torch.ones(1, dtype=D)})
    close(together, torch.cat([module(x, gates={"a_0": row[None]}) for row in many]))
    (slope,) = torch.autograd.grad(together.sum(), many)
    step = torch.zeros_like(many)
    step[2, 1] = 1e-6
    apart = module(x, gates={"a_0": many + step}) - module(x, gates={"a_0": many - step})
    assert float(apart.sum().detach()) / 2e-6 == pytest.approx(float(slope[2, 1]), rel=1e-6)


@pytest.mark.parametrize(
    ("told", "match"),
    [
        ({"a_0": torch.ones(2, 2, dtype=D)}, r"\[batch, head\] of shape \(2, 3\); got shape \(2, 2\)"),
        ({"a_0": torch.ones(5, 3, dtype=D)}, r"got shape \(5, 3\)"),
        ({"a_0": torch.ones(3, dtype=D)}, r"got shape \(3,\)"),
        ({"x_1": torch.tensor(1.0, dtype=D)}, r"of shape \(2,\); got shape \(\)"),
        ({"a_0": torch.ones(2, 3)}, "float64.*got torch.float32"),
        ({"a_0": torch.ones(2, 3, dtype=torch.long)}, "real numbers.*int64"),
        ({"a_0": [1.0]}, "real numbers"),
        ({"y": torch.ones(2, dtype=D)}, "got states"),
        ({"token_0": torch.ones(2, dtype=D)}, "known name"),
        ({"a_9": torch.ones(2, 3, dtype=D)}, "near matches.*a_0"),
        ([1], "a mapping from names"),
    ],
)
def test_gates_that_fit_no_family_are_refused(told, match):
    with pytest.raises(bt.BNetError, match=match):
        concat(observe=Categorical(3)).module()(torch.randn(2, 3, 4, dtype=D), gates=told)


@pytest.mark.parametrize(
    ("name", "family", "match"),
    [("recurrent", "h_0", "word"), ("hidden Markov", "z_0", "word"), ("vanilla encoder", "y", "random"),
     ("encoder, pre-norm", "token", "states")],
)  # fmt: skip
def test_gates_on_what_is_no_vector_of_its_parents_are_refused(name, family, match):
    net = BY_NAME[name].net
    x = torch.randn(1, 3, 4, dtype=D) if name != "encoder, pre-norm" else torch.tensor([[0, 1, 2]])
    with pytest.raises(bt.ReadingError, match=match):
        net.module()(x, gates={family: torch.ones(1, dtype=D)})


# bad input

X = torch.randn(3, 2, 4, dtype=D, generator=torch.Generator().manual_seed(0))
Y = torch.zeros(3, 2, dtype=torch.long)


@pytest.mark.parametrize(
    ("data", "options", "match"),
    [
        (X, {"sigma": 0}, "sigma: expected a finite number above 0"),
        (X, {"sigma": -1.0}, "above 0"),
        (X, {"sigma": math.nan}, "finite"),
        (X, {"sigma": "one"}, "finite"),
        (X, {"sigma": 1e-200}, "1e-100"),
        (X, {"sigma": 1e200}, "1e-100"),
        ((X, Y), {"sigma": 1.0}, "sentences alone"),
        ((X, Y), {"output": "x_1"}, "sentences alone"),
        (X, {"output": "x_9"}, "known name"),
        (X, {"output": "x_0"}, "heads that are summed"),
        (X, {"output": "W_o_0"}, "heads that are summed"),
        (X, {"role": "b"}, "role of heads.*'b'"),
        (X, {"method": "mcmc"}, "'exact', 'svi'"),
        (X, {"interval": 1}, "between 0 and 1"),
        (X, {"interval": 0}, "between 0 and 1"),
        (X, {"interval": math.nan}, "finite"),
        (X, {"draws": 7}, "at least 8"),
        (X, {"rounds": 2, "method": "svi"}, "at least 3"),
        (X, {"seed": "a"}, "whole number"),
        (X, {"memory": 0}, "at least 1"),
        (X, {"budget": 23}, "24: 3 sentences under 8 settings of 3 gates.*2 sentences.*svi"),
        ([], {}, "a list of sentences"),
        ("the cat", {}, "a list of sentences"),
        (["the cat"], {}, "real numbers"),
        (None, {}, "a list of sentences"),
        (X[:, :, :3], {}, "4"),
        (torch.full((2, 2, 4), math.nan, dtype=D), {}, "finite numbers.*NaN"),
        ((X, Y + 3), {}, "states from 0 to 2|ids from"),
        ((X, Y[:2]), {}, "as many"),
        ([(X[0], None)], {}, "y"),
    ],
)  # fmt: skip
def test_bad_input_is_told(data, options, match):
    with pytest.raises(bt.BNetError, match=match):
        inclusion(concat(observe=Categorical(3)), data, **options)


def test_nets_that_have_no_gates_are_refused():
    with pytest.raises(bt.BNetError, match=r"chosen by c.*combine='concat' sums heads"):
        inclusion(bt.bayesuvius(4, observe=Categorical(3)), torch.randn(3, 2, 4))
    many = bt.bayesuvius(4, heads=13, combine="concat")
    with pytest.raises(bt.BNetError, match=r"at most 12 heads.*8,192 settings.*method='svi'"):
        inclusion(many, torch.randn(1, 2, 4))
    assert inclusion(many, torch.randn(1, 2, 4), method="svi", rounds=3).log_bayes.shape == (1, 13)
    with pytest.raises(bt.BNetError, match="a net"):
        inclusion("minilm", TEXTS)
    silent = concat(slices=1)
    silent = silent.replace({"W_o_0.value": torch.zeros(3, 4, 4, dtype=D)})
    with pytest.raises(bt.BNetError, match=r"sigma: .*no head moves x_1"):
        inclusion(silent, X)


def test_damage_is_asked_of_sentences_like_those_of_the_measures():
    net = concat(observe=Categorical(3))
    seen, around = inclusion(net, (X, Y)), inclusion(net, X)
    with pytest.raises(bt.BNetError, match=r"P\(y \| x\), as the measures"):
        damage(seen, X, progress=False)
    with pytest.raises(bt.BNetError, match="sentences alone"):
        damage(around, (X, Y), progress=False)
    for counts in ([7], [-1], [], 3, ["one"], [0.5]):
        with pytest.raises(bt.BNetError, match="counts"):
            damage(seen, counts=counts, progress=False)


def test_the_net_of_the_user_stays_as_it_was():
    net = concat(observe=Categorical(3))
    kept = {name: value.clone() for name, value in net.parameters.items()}
    module = net.module()
    inclusion(net, (X, Y))
    inclusion(net, X, method="svi", rounds=3)
    assert all(torch.equal(net.parameters[name], value) for name, value in kept.items())
    assert all(value.requires_grad and value.grad is None for value in module.parameters())
