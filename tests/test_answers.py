"""What a sentence answers by the compiled reading is what the reference answers, on every case."""

import pytest
import torch

import bnet_transformer as bt
from bnet_transformer import asking, reference
from bnet_transformer.errors import ReadingError
from bnet_transformer.graph import Selection
from bnet_transformer.inference import arrow_weights
from bnet_transformer.inference.query import word_counts
from tests.cases import CASES

HEAVY = {"codebook, two slices", "slice, codebook"}  # thousands of joint states for the reference
LIGHT = [case for case in CASES if case.name not in HEAVY]
EXACT = {"rtol": 1e-10, "atol": 1e-10}

pytestmark = pytest.mark.usefixtures("each_run_once")


def outcome(ask):
    """What a question gives, or the error that refuses it."""
    try:
        return ask()
    except bt.BNetError as error:
        return type(error), str(error)


def same(ours, theirs):
    if isinstance(theirs, torch.Tensor):
        assert ours.shape == theirs.shape and ours.dtype == theirs.dtype
        torch.testing.assert_close(ours, theirs, **EXACT)
    elif isinstance(theirs, torch.distributions.Distribution):
        assert type(ours) is type(theirs)
        normal = isinstance(theirs, torch.distributions.Independent)
        for name in ("mean", "stddev") if normal else ("logits", "v"):
            if hasattr(theirs, name):
                same(getattr(ours, name), getattr(theirs, name))
    elif isinstance(theirs, dict):
        assert {k: w for k, w in ours.items() if w} == pytest.approx({k: w for k, w in theirs.items() if w}, abs=1e-9)
    else:
        assert ours == theirs


def agree(s: bt.Sentence, *, whole: bool = True):
    """The value and distribution of the first and last node of each family; every reading and weight.

    Else of the last nodes alone, of every third family: the reference is slow.
    """
    families = [list(s.ground.family_names(family)) for family in s.net.network.graph.families]
    families = families if whole else [[names[-1]] for names in families[::-3]]
    for name in dict.fromkeys(name for names in families for name in (names[0], names[-1])):
        node = s.ground.id(name)
        same(outcome(lambda n=name: s[n]), outcome(lambda k=node: reference.values(s.state.world, k, s.state.evidence)))
        same(
            outcome(lambda n=name: s.tpm(n)),
            outcome(lambda k=node: asking.distribution(s.state.world, k, s.state.evidence)),
        )
    if not whole:
        return
    for slice_ in range(s.net.network.graph.depth):
        roles = {m.family.stem for m in s.net.network.members if m.reads_words} | {None}
        for role in sorted(roles, key=str):
            theirs = outcome(lambda t=slice_, r=role: asking.attention(s.state.world, t, r, s.state.evidence))
            same(outcome(lambda t=slice_, r=role: s.attention(t, role=r)), theirs)
    theirs = outcome(lambda: asking.arrow_weights(s.state.world, Selection(), s.state.evidence))
    same(outcome(lambda: arrow_weights(s.state.query(), s.state.answers, Selection())), theirs)


@pytest.mark.parametrize("case", LIGHT, ids=lambda case: case.name)
def test_answers_are_the_references(case):
    s = case.sentence
    agree(s)
    if case.evidence:
        agree(s.observe(case.evidence))


@pytest.mark.parametrize("case", LIGHT, ids=lambda case: case.name)
def test_answers_after_surgery_are_the_references(case):
    """Some nodes of a family are set, then all of another."""
    s = case.sentence
    members = [m for m in s.net.network.members if m.tpm.kind == "deterministic" and not m.tpm.reads_by_index]
    torch.manual_seed(1)
    chosen = {len(members) // 3, 2 * len(members) // 3, len(members) - 1} if members else ()
    for member in [members[k] for k in sorted(chosen)]:
        names = list(s.ground.family_names(member.family))
        some = {name: torch.randn(member.shape, dtype=torch.float64) for name in names[len(names) // 2 :]}
        agree(s.do(some), whole=False)


@pytest.mark.parametrize("name", ["word", "word, codebook", "word, two slices", "marginal", "hidden Markov"])
def test_answers_with_a_choice_of_one_word_set_or_seen_are_the_references(name):
    s = next(case for case in CASES if case.name == name).sentence
    for member in s.net.network.members:
        if member.tpm.kind == "discrete" and member.family.words is not None:
            node = list(s.ground.family_names(member.family))[-1]
            agree(s.do({node: 0}))
            agree(s.observe({node: 0}))


@pytest.mark.parametrize("case", [case for case in CASES if case.name in HEAVY], ids=lambda case: case.name)
def test_heavy_answers_are_the_references(case):
    s = case.sentence
    for name in ("x_1_2", "W_q_0"):
        same(s[name], reference.values(s.state.world, s.ground.id(name), {}))


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_answers_are_compiled(case):
    """The reference answers what structure forbids to compute at once, and nothing else."""
    s = case.sentence
    for member in s.net.network.members:
        if member.tpm.kind == "deterministic":
            node = s.ground.id(next(s.ground.family_names(member.family)))
            meet = case.name == "word, two slices" and member.family.name == "x_2"  # the choices of words
            answers = s.state.answers
            assert answers.route(answers.value_query(node)).algorithm == ("enumeration" if meet else "compiled")


@pytest.mark.parametrize("case", LIGHT, ids=lambda case: case.name)
def test_readings_of_a_batch_are_the_sentences(case):
    """`P(j | i)` of all families at once, against one after the other."""
    s = case.sentence
    module = s.state.module
    inputs = {name: value[None] for name, value in s.state.encoded.given.items()}
    try:
        readings, _ = module.readings(word_counts(s.state.world), given=inputs)
    except ReadingError:
        return
    for name, found in readings.items():
        member = s.net.network.member(name)
        query = s.state.answers.reading_query(member)
        table = s.state.answers.compute(query, s.state.answers.route(query))
        batch = table.dim() - len(member.family.plates) - 2
        torch.testing.assert_close(found.select(batch, 0), table, **EXACT)


def test_set_nodes_count_where_maps_are_folded_into_attention():
    """With more words than a vector is wide, q and k are no values of their own, unless one of them is set."""
    s = bt.bayesuvius(4, heads=2).to(torch.float64).sentence("a b c d e f g h i j")
    done = s.do(c=1, q_0_3=torch.randn(4, dtype=torch.float64))
    agree_on = [done.ground.id(name) for name in ("x_1_3", "x_1_4")]
    for node in agree_on:
        same(done.state.answers.value(node), reference.values(done.state.world, node, {}))
    assert not done["x_1_3"].allclose(s.do(c=1)["x_1_3"])
