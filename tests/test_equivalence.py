"""Every case, read in every way: the reference, compiled net, elimination, batches, padding and surgery agree."""

import random
from contextlib import suppress

import pytest
import torch

import bnet_transformer as bt
from bnet_transformer import reference
from bnet_transformer.inference import Evidence, log_evidence, posterior
from bnet_transformer.inference.selection import find_attention_spec
from bnet_transformer.interventions import Attend
from bnet_transformer.reference.node_tables import compute_read_mask, split_choices
from bnet_transformer.tpm import Attention
from tests.cases import CASES, Case, batch_evidence, batch_inputs, close, get_case

pytestmark = pytest.mark.usefixtures("each_run_once")

D, L = torch.float64, torch.long
IDS = {"ids": lambda case: case.name}
LONG = ("word, codebook", "codebook, two slices", "slice, codebook")  # many joint states for the sums
MEET = {"word, two slices": ("x_2", "y"), "hidden Markov": ("z_0",)}  # of words: a batch refuses, a sentence answers
FIXED = ("shared slices", "vanilla encoder-decoder, pre-norm", "vanilla decoder, learned")  # in their number of words
WIDE = ("codebook, two slices", "slice, codebook")  # of 64 and 128 joint states


def discrete(s: bt.Sentence) -> list[int]:
    """The nodes that are choices, and neither set nor seen in a state."""
    fixed = {**reference.get_fixed(s.state.model, s.state.evidence), **s.state.model.do}
    families = [m.group for m in s.net.network.specs if m.tpm.kind == "discrete"]
    return [node for family in families for node in s.ground.select_nodes(family).tolist() if node not in fixed]


def ends(s: bt.Sentence, member) -> list[int]:
    """The first and the last node of a family."""
    nodes = s.ground.select_nodes(member.group).tolist()
    return list(dict.fromkeys([nodes[0], nodes[-1]]))


# values, distributions and attention


def agree(s: bt.Sentence, first: int = 0) -> None:
    """In a joint state of all choices each answer is the reference's: the ends of each family (from `first` on), and
    what reads."""
    world = s.state.model
    fixed = reference.get_fixed(world, s.state.evidence)
    pick = random.Random(len(s.ground))
    states = {node: pick.randrange(world.count_states(node)) for node in discrete(s)}
    run = reference.ReferenceRun(world, {**fixed, **{node: torch.tensor(state) for node, state in states.items()}})

    def at(nodes: list[int]) -> tuple[int, ...]:
        return tuple(states[choice] for choice in reference.find_open_choices(world, nodes, fixed)) if states else ()

    for member in s.net.network.specs:
        for node in ends(s, member)[first:] or ends(s, member):
            name, known = s.ground.name(node), node in fixed or node in world.do
            if known or member.tpm.kind != "continuous":
                close(s[name][at([node])], run.value(node))
            if member.tpm.is_random or member is s.net.network.specs[-1]:
                actual, peer = s.tpm(name), run.distribution(node)
                kinds = {"continuous": ("mean", "stddev"), "discrete": ("logits",)}
                for subject in kinds.get(member.tpm.kind, ("v",)) if node not in world.do else ("v",):
                    close(getattr(actual, subject)[at(reference.parents(world, node))], getattr(peer, subject))
    for t in range(s.net.network.graph.depth):
        for role in sorted({m.group.stem for m in s.net.network.specs if m.has_word_attention and m.group.step == t}):
            member = find_attention_spec(world, t, role)
            try:
                table = s.attention(t, role=role)
            except bt.BNetError:
                nodes = world.ground.select_nodes(member.group).tolist()
                above = {
                    n: reference.find_open_choices(world, reference.attention_parents(world, n), fixed) for n in nodes
                }
                is_set = any(node in world.do for node in nodes)
                assert is_set or not member.tpm.has_attention or split_choices(world, above) is None
                continue
            assert (table >= 0).all() and not table[..., ~torch.from_numpy(compute_read_mask(world, member))].any()
            if role != "s":  # its normaliser is a sigmoid
                close(table.sum(-1), torch.ones_like(table[..., 0]))
            for node in ends(s, member):
                words, shares = run.attention(node)
                index = at(reference.attention_parents(world, node))
                index = index or (0,) * (table.dim() - len(member.group.plates) - 2)
                row = torch.zeros(table.shape[-1], dtype=D).index_add(0, torch.tensor(words), shares)
                close(table[(*index, *s.ground.unravel_index(node)[1])], row)


def summed(left_out):
    """The cases with evidence; of those with many joint states the slow tests make the sums."""
    cases = [case for case in CASES if case.evidence and case.name not in left_out]
    return [pytest.param(case, marks=[pytest.mark.slow] * (case.name in LONG)) for case in cases]


@pytest.mark.parametrize("case", CASES, **IDS)
def test_answers_are_the_references(case: Case):
    """As the words come; and after surgery on some nodes of a family, which moves what is below, given evidence."""
    s = case.sentence
    agree(s)
    created = [m for m in s.net.network.specs if m.tpm.kind == "deterministic" and m.parents]
    created = [m for m in created if not m.tpm.is_index_valued]
    if not created:
        return
    member = created[len(created) // 3]
    names = list(s.ground.iter_names(member.group))
    some = names[len(names) // 2 :]
    done = s.do({name: torch.randn(member.shape, dtype=D) for name in some})
    agree(done.observe(case.evidence), 1)
    below = {*some, *s.descendants(*some)}
    assert {*some, *done.descendants(*some)} == below and not any(map(done.parents, some))
    for other in created:
        name = s.ground.name(ends(s, other)[0])
        assert name in below or done[name].equal(s[name]), name


@pytest.mark.parametrize("name", ["word", "word, codebook", "word, two slices", "marginal", "hidden Markov"])
def test_answers_with_a_choice_of_one_word_set_or_seen_are_the_references(name):
    s = get_case(name).sentence
    for member in s.net.network.specs:
        if member.tpm.kind == "discrete" and member.group.word_stack is not None:
            node = s.ground.name(ends(s, member)[-1])
            agree(s.do({node: 0}), 1)
            agree(s.observe({node: 0}), 1)


def padded(s: bt.Sentence, more: int = 2) -> tuple[dict[str, torch.Tensor], dict[str, torch.Tensor]]:
    """The given values of a sentence with more words, nonsense in them, and the mask that says so."""
    given, mask = {}, {}
    for name, value in s.state.encoded.given.items():
        family = s.net.network.graph.by_name[name]
        if family.word_stack is not None:
            axis, count = len(family.plates), s.ground.word_counts[family.word_stack]
            nonsense = torch.full_like(value.narrow(axis, 0, 1), -100 if value.dtype == L else torch.nan)
            value = torch.cat([value, *[nonsense] * more], axis)
            mask[family.word_stack] = (torch.arange(count + more) < count)[None]
        given[name] = value[None]
    return given, mask


@pytest.mark.parametrize("case", CASES, **IDS)
def test_the_module_computes_what_sentences_answer(case: Case):
    """Every family in one pass, padded as it is, in float32 and bfloat16; and gradients of all that matters."""
    s, module = case.sentence, case.net.module().eval()
    meet = MEET.get(case.name, ())
    members = [m for m in s.net.network.specs if m.tpm.kind != "continuous" and m.group.name not in meet]
    names = [m.group.name for m in members]
    result = module(given=batch_inputs(s), want=names)
    long = result
    if case.name not in FIXED and s.state.encoded.given:
        given, mask = padded(s)
        long = module(given=given, mask=mask, want=names)
    for member in members:
        shape, value, more = s.ground.shapes[member.group.index], result[member.group.name], long[member.group.name]
        close(more[tuple(slice(0, n) for n in value.shape)], value)
        if member.tpm.is_random:
            continue
        prefix = value.dim() - len(member.shape) - len(shape) - 1
        assert tuple(value.shape[prefix + 1 :]) == (*shape, *member.shape)
        answers = s.state.evaluator
        for node in ends(s, member):
            one = s[s.ground.name(node)]
            close(value[(slice(None),) * prefix + (0, *s.ground.unravel_index(node)[1])].reshape(one.shape), one)
            assert answers.route(answers.value_query(node)).algorithm == "compiled"
    given = {name: value.float() if value.is_floating_point() else value for name, value in batch_inputs(s).items()}
    single = case.net.to(torch.float32).module().eval()(given=given, want=names)
    for name in names:
        close(single[name].to(result[name].dtype), result[name], 2e-5)
    if not meet:
        _check_halves_and_gradients(s, module)


def _check_halves_and_gradients(s: bt.Sentence, module) -> None:
    value = module(given=batch_inputs(s))
    half = {name: item.bfloat16() if item.is_floating_point() else item for name, item in batch_inputs(s).items()}
    rounded = s.net.to(torch.bfloat16).module().eval()(given=half)
    assert rounded.dtype == torch.bfloat16
    assert (rounded - value).abs().max() <= 5e-2 * value.abs().max().clamp(min=1)
    if "j_0" in s.net.network.graph.by_name:  # a word that is read is a state, and has no gradient
        return
    value.square().sum().backward()
    graph = s.net.network.graph
    above = graph.ancestral_set([graph.get_group(module.output).index])
    for member in s.net.network.specs:
        if member.tpm.kind == "deterministic" and member.group.index in above:
            for name in member.parameters:
                grad = module.store[f"{member.param_prefix}/{name}"].grad
                assert grad is not None and torch.isfinite(grad).all(), name


@pytest.mark.parametrize("name", ["concat", "encoder, pre-norm", "three stacks", "grouped", "encoder-decoder", "word"])
def test_readings_of_a_batch_are_the_sentences(name):
    """`P(j | i)` of all families at once, against one after the other."""
    s = get_case(name).sentence
    readings, _ = s.state.module.attention_weights(given=batch_inputs(s))
    assert readings
    for family, result in readings.items():
        member = s.net.network.get_spec(family)
        query = s.state.evaluator.attention_query(member)
        table = s.state.evaluator.compute(query, s.state.evaluator.route(query))
        close(result.select(table.dim() - len(member.group.plates) - 2, 0), table)


def test_set_nodes_count_where_maps_are_folded_into_attention():
    """With more words than a vector is wide, q and k are no values of their own, unless one of them is set."""
    s = bt.bayesuvius(4, heads=2).to(D).sentence("a b c d e f g h i j")
    done = s.do(c=1, q_0_3=torch.randn(4, dtype=D))
    for name in ("x_1_3", "x_1_4"):
        close(done[name], reference.values(done.state.model, done.ground.id(name), {}))
    assert not done["x_1_3"].allclose(s.do(c=1)["x_1_3"])


# probability


class Loop:
    """The reference's runs in all joint states of the choices of a sentence, but for readouts that nothing reads."""

    def __init__(self, s: bt.Sentence) -> None:
        world, observed = s.state.model, s.state.evidence
        self.choices = [node for node in discrete(s) if node in observed or s.ground.children(node)]
        self.runs = [*reference.enumerate_runs(world, self.choices, reference.get_fixed(world, observed))]
        logs = [sum((run.log_prob(node) for node in (*self.choices, *observed)), torch.zeros(())) for run in self.runs]
        self.total = torch.stack(logs).logsumexp(0)
        self.share = torch.stack(logs).softmax(0)

    def joint(self, nodes: list[int]) -> torch.Tensor:
        """`P(nodes | evidence)`, a dim for each node."""
        given_state = [torch.stack([self._of(run, node) for run in self.runs]) for node in nodes]
        table = self.share[:, None]
        for item in given_state:
            table = (table[:, :, None] * item[:, None, :]).flatten(1)
        return table.sum(0).reshape([item.shape[1] for item in given_state])

    def _of(self, run: reference.ReferenceRun, node: int) -> torch.Tensor:
        """`P(node | joint state)`: a choice is in its state, a readout has its distribution."""
        if node not in self.choices:
            return run.distribution(node).probs
        return torch.nn.functional.one_hot(run.states[node], run.model.count_states(node)).to(D)


@pytest.mark.parametrize("case", summed(()), **IDS)
def test_probabilities_are_sums_over_all_states(case: Case):
    """Of a sentence and of a batch, padded or not: by the reference, by elimination, and by pgmpy."""
    s = case.sentence.observe(case.evidence)
    loop, world, query = Loop(s), s.state.model, discrete(s)
    close(reference.log_evidence(world, s.state.evidence), loop.total)
    close(s.log_prob(), loop.total)
    for node in query[:1]:
        close(reference.posterior(world, node, s.state.evidence), loop.joint([node]))
    of_families = [ends(s, m)[0] for m in s.net.network.specs if m.tpm.kind == "discrete"]
    some = [node for node in of_families if node in query][:3]
    if len(some) > 1:
        close(s.posterior([*map(s.ground.name, some)]), loop.joint(some))
    if len(some) > 0 and case.name not in WIDE:
        from pgmpy.inference import VariableElimination

        model, names = s.to_pgmpy(), [*map(s.ground.name, some)]
        peer = VariableElimination(model).query(names, evidence=model.graph["evidence"], show_progress=False)
        order = [peer.variables.index(name) for name in names]
        close(torch.tensor(peer.values).permute(order), loop.joint(some), 1e-8)
    root = next((node for node in query if not s.ground.parents(node)), None)
    for node in [node for node in query if root not in (None, node)][:2]:  # at a root, seeing is doing
        name, set_ = s.ground.name(node), {s.ground.name(root): 0}
        close(s.posterior(name, set_), case.sentence.do(set_).posterior(name, case.evidence))
    question = {"evidence": batch_evidence(s), "given": batch_inputs(s)}
    if case.name in MEET:
        with pytest.raises(bt.BNetError):
            log_evidence(case.net.module(), **question)
    else:
        can_be_longer = case.name not in FIXED and s.state.encoded.given
        _check_batch(s, loop, question, padded_question(s, question["evidence"]) if can_be_longer else question)


def _check_batch(s: bt.Sentence, loop: Loop, question: dict, longer: dict) -> None:
    module = s.net.module().eval()
    close(log_evidence(module, **question).flatten()[0], loop.total)
    close(log_evidence(module, **longer).flatten()[0], loop.total)
    padded_too = True  # for one family
    for member in s.net.network.specs:
        name, shape = member.group.name, s.ground.shapes[member.group.index]
        if member.tpm.kind == "discrete" and name not in question["evidence"]:
            result = posterior(module, name, **question)
            assert tuple(result.shape[:-1]) == (1, *shape)
            nodes = ends(s, member)
            for node in nodes:
                close(result[(0, *s.ground.unravel_index(node)[1])], loop.joint([node]))
            close(s.posterior(s.ground.name(nodes[-1])), loop.joint(nodes[-1:]))
            if padded_too:
                close(posterior(module, name, **longer)[tuple(slice(0, n) for n in result.shape)], result)
                padded_too = False
    _check_slope(module, question)


def padded_question(s: bt.Sentence, seen: dict[str, Evidence]) -> dict:
    """The question of a longer sentence whose last words are nonsense, evidence on them too, and a mask."""
    longer, graph = {}, s.net.network.graph
    for name, passed in seen.items():
        value, observed = passed.value, passed.observed
        if graph.by_name[name].word_stack is not None:
            axis = 1 + len(graph.by_name[name].plates)
            nonsense = torch.full_like(value.narrow(axis, 0, 1), 99 if value.dtype == L else torch.inf)
            value = torch.cat([value, nonsense, nonsense], axis)
            observed = torch.cat([observed, *[torch.ones_like(observed.narrow(axis, 0, 1))] * 2], axis)
        longer[name] = Evidence(value, observed)
    given, mask = padded(s)
    return {"evidence": longer, "given": given, "mask": mask}


def _check_slope(module, question: dict) -> None:
    """The gradient of the log evidence is its slope along a random direction of all parameters together."""
    route = {name: torch.randn_like(value) for name, value in module.store.items() if value.requires_grad}
    log_evidence(module, **question).sum().backward()
    slope = sum((module.store[n].grad * item).sum() for n, item in route.items() if module.store[n].grad is not None)
    step, sides = 1e-5, []
    for sign in (1, -1):
        moved = bt.BNet(
            module.network.with_parameters(
                {
                    n: value + sign * step * route.get(n.replace(".", "/"), 0)
                    for n, value in module.network.parameters.items()
                }
            )
        )
        sides.append(log_evidence(moved.module().eval(), **question).sum().detach())
    close(slope, (sides[0] - sides[1]) / (2 * step), 1e-5)


def operated(s: bt.Sentence) -> bt.Sentence:
    """The sentence with half the nodes of a family set, a row of attention, and a choice of one word."""
    members = [m for m in s.net.network.specs if m.tpm.kind != "input" and not m.tpm.is_index_valued]
    values = [m for m in members if m.tpm.kind == "deterministic"]
    member = values[len(values) // 3]
    names = list(s.ground.iter_names(member.group))
    done = s.do({name: torch.randn(member.shape, dtype=D) for name in names[len(names) // 2 :]})
    readers = [m for m in values if isinstance(m.tpm, Attention) and m.group.word_stack is not None and m is not member]
    for reader in readers[:1]:
        with suppress(bt.BNetError):  # an attention that has no rows P(j | i)
            row = Attend([1.0, *[0.0] * (max(s.ground.word_counts.values()) - 1)])
            done = done.do({next(s.ground.iter_names(reader.group)): row})
    for choice in [m for m in members if m.tpm.kind == "discrete" and m.group.word_stack is not None][:1]:
        done = done.do({list(s.ground.iter_names(choice.group))[-1]: 0})
    return done


@pytest.mark.parametrize("case", summed(("sprinkler", "hidden states", *WIDE)), **IDS)
def test_after_surgery_on_some_nodes_probabilities_are_sums_and_not_by_the_reference(case, without_the_reference):
    done = operated(case.sentence)
    s = done.observe({k: v for k, v in case.evidence.items() if done.ground.id(k) not in done.state.model.do})
    loop, query = Loop(s), discrete(s)
    expected = {node: loop.joint([node]) for node in (*query[:2], *query[-1:])}
    with without_the_reference():
        close(s.log_prob(), loop.total)
        for node, share in expected.items():
            close(s.posterior(s.ground.name(node)), share, 1e-9)
