"""On every case the reference, the compiled net, elimination, batches, padding and surgery agree."""

import random
from contextlib import suppress

import pytest
import torch

import bnet_transformer as bt
from bnet_transformer import reference
from bnet_transformer.inference import Evidence, log_evidence, posterior
from bnet_transformer.inference.query import find_attention_spec
from bnet_transformer.interventions import Attend
from bnet_transformer.reference import compute_read_mask, split_choices
from bnet_transformer.tpm import Attention
from tests.cases import CASES, Case, batch_evidence, batch_inputs, close, get_case

pytestmark = pytest.mark.usefixtures("cached_runs")

D, L = torch.float64, torch.long
IDS = {"ids": lambda case: case.name}
LONG = ("word, codebook", "codebook, two slices", "slice, codebook")  # many joint states for the sums
CHAINS = {"hidden Markov": ("z_0",), "backward chain": ("c_0",), "factorial chains": ("a_0", "b_0", "d_0")}
CHAINS["tagger"] = ("tag_0",)
WINDOWS = {"windowed selectors": ("p_0", "c_0", "v_0", "x_1", "y")}
MEET = {"word, two slices": ("x_2", "y"), **CHAINS, **WINDOWS}  # groups for which only a sentence answers, not a batch
FIXED = ("shared slices", "vanilla encoder-decoder, pre-norm", "vanilla decoder, learned")  # fixed word counts
LARGE = ("codebook, two slices", "slice, codebook")  # of 64 and 128 joint states


def get_choices(s: bt.Sentence) -> list[int]:
    """Return the discrete random nodes that are neither set nor observed."""
    fixed = {**reference.get_fixed(s.state.model, s.state.evidence), **s.state.model.do}
    groups = [m.group for m in s.net.network.specs if m.tpm.kind == "discrete"]
    return [node for group in groups for node in s.ground.select_nodes(group).tolist() if node not in fixed]


def get_ends(s: bt.Sentence, spec) -> list[int]:
    """The first and the last node of a group."""
    nodes = s.ground.select_nodes(spec.group).tolist()
    return list(dict.fromkeys([nodes[0], nodes[-1]]))


# values, distributions and attention


def check_answers(s: bt.Sentence, first: int = 0) -> None:
    """Check, in a joint state of all choices, that values at the ends of each group (from `first` on) and rows of
    attention equal those of the reference."""
    model = s.state.model
    fixed = reference.get_fixed(model, s.state.evidence)
    pick = random.Random(len(s.ground))
    states = {node: pick.randrange(model.count_states(node)) for node in get_choices(s)}
    run = reference.ReferenceRun(model, {**fixed, **{node: torch.tensor(state) for node, state in states.items()}})

    def get_index(nodes: list[int]) -> tuple[int, ...]:
        return tuple(states[choice] for choice in reference.find_open_choices(model, nodes, fixed)) if states else ()

    for spec in s.net.network.specs:
        for node in get_ends(s, spec)[first:] or get_ends(s, spec):
            name, is_known = s.ground.name(node), node in fixed or node in model.do
            if is_known or spec.tpm.kind != "continuous":
                close(s[name][get_index([node])], run.value(node))
            if spec.tpm.is_random or spec is s.net.network.specs[-1]:
                actual, peer = s.tpm(name), run.distribution(node)
                kinds = {"continuous": ("mean", "stddev"), "discrete": ("logits",)}
                for field in kinds.get(spec.tpm.kind, ("v",)) if node not in model.do else ("v",):
                    close(getattr(actual, field)[get_index(reference.parents(model, node))], getattr(peer, field))
    for t in range(s.net.network.graph.depth):
        for role in sorted({m.group.stem for m in s.net.network.specs if m.has_word_attention and m.group.step == t}):
            spec = find_attention_spec(model, t, role)
            try:
                table = s.attention(t, role=role)
            except bt.BNetError:
                nodes = model.ground.select_nodes(spec.group).tolist()
                open_choices = {
                    n: reference.find_open_choices(model, reference.attention_parents(model, n), fixed) for n in nodes
                }
                is_set = any(node in model.do for node in nodes)
                assert is_set or not spec.tpm.has_attention or split_choices(model, open_choices) is None
                continue
            assert (table >= 0).all() and not table[..., ~torch.from_numpy(compute_read_mask(model, spec))].any()
            if role != "s":  # its normaliser is a sigmoid
                close(table.sum(-1), torch.ones_like(table[..., 0]))
            for node in get_ends(s, spec):
                words, weights = run.attention(node)
                index = get_index(reference.attention_parents(model, node))
                index = index or (0,) * (table.dim() - len(spec.group.plates) - 2)
                row = torch.zeros(table.shape[-1], dtype=D).index_add(0, torch.tensor(words), weights)
                close(table[(*index, *s.ground.unravel_index(node)[1])], row)


def make_params(left_out):
    """Return the parameters of the cases with evidence; those with many joint states are slow tests."""
    cases = [case for case in CASES if case.evidence and case.name not in left_out]
    return [pytest.param(case, marks=[pytest.mark.slow] * (case.name in LONG)) for case in cases]


@pytest.mark.parametrize("case", CASES, **IDS)
def test_answers_are_the_references(case: Case):
    """Without interventions; and after surgery on some nodes of a group, which changes their descendants, given
    evidence."""
    s = case.sentence
    check_answers(s)
    specs = [m for m in s.net.network.specs if m.tpm.kind == "deterministic" and m.parents]
    specs = [m for m in specs if not m.tpm.is_index_valued]
    if not specs:
        return
    spec = specs[len(specs) // 3]
    names = list(s.ground.iter_names(spec.group))
    set_names = names[len(names) // 2 :]
    s_done = s.do({name: torch.randn(spec.shape, dtype=D) for name in set_names})
    check_answers(s_done.observe(case.evidence), 1)
    below = {*set_names, *s.descendants(*set_names)}
    assert {*set_names, *s_done.descendants(*set_names)} == below and not any(map(s_done.parents, set_names))
    for spec_ in specs:
        name = s.ground.name(get_ends(s, spec_)[0])
        assert name in below or s_done[name].equal(s[name]), name


@pytest.mark.parametrize("name", ["word", "word, codebook", "word, two slices", "marginal", "hidden Markov"])
def test_answers_with_a_choice_of_one_word_set_or_observed_are_the_references(name):
    s = get_case(name).sentence
    for spec in s.net.network.specs:
        if spec.tpm.kind == "discrete" and spec.group.word_stack is not None:
            node = s.ground.name(get_ends(s, spec)[-1])
            check_answers(s.do({node: 0}), 1)
            check_answers(s.observe({node: 0}), 1)


def pad_given(s: bt.Sentence, extra: int = 2) -> tuple[dict[str, torch.Tensor], dict[str, torch.Tensor]]:
    """The given values of a sentence, padded with invalid values, and the masks of the padding."""
    given, mask = {}, {}
    for name, value in s.state.encoded.given.items():
        group = s.net.network.graph.by_name[name]
        if group.word_stack is not None:
            axis, count = len(group.plates), s.ground.word_counts[group.word_stack]
            nonsense = torch.full_like(value.narrow(axis, 0, 1), -100 if value.dtype == L else torch.nan)
            value = torch.cat([value, *[nonsense] * extra], axis)
            mask[group.word_stack] = (torch.arange(count + extra) < count)[None]
        given[name] = value[None]
    return given, mask


@pytest.mark.parametrize("case", CASES, **IDS)
def test_the_module_computes_what_sentences_answer(case: Case):
    """Every group in one pass, padded as given, in float32 and bfloat16; and gradients of all relevant inputs."""
    s, module = case.sentence, case.net.module().eval()
    meet = MEET.get(case.name, ())
    specs = [m for m in s.net.network.specs if m.tpm.kind != "continuous" and m.group.name not in meet]
    names = [m.group.name for m in specs]
    result = module(given=batch_inputs(s), want=names)
    padded = result
    if case.name not in FIXED and s.state.encoded.given:
        given, mask = pad_given(s)
        padded = module(given=given, mask=mask, want=names)
    for spec in specs:
        shape, value, more = s.ground.shapes[spec.group.index], result[spec.group.name], padded[spec.group.name]
        close(more[tuple(slice(0, n) for n in value.shape)], value)
        if spec.tpm.is_random:
            continue
        batch_dims = value.dim() - len(spec.shape) - len(shape) - 1
        assert tuple(value.shape[batch_dims + 1 :]) == (*shape, *spec.shape)
        answers = s.state.evaluator
        for node in get_ends(s, spec):
            one = s[s.ground.name(node)]
            close(value[(slice(None),) * batch_dims + (0, *s.ground.unravel_index(node)[1])].reshape(one.shape), one)
            assert answers.plan_value(node).algorithm == "compiled"
    given = {name: value.float() if value.is_floating_point() else value for name, value in batch_inputs(s).items()}
    in_float32 = case.net.to(torch.float32).module().eval()(given=given, want=names)
    for name in names:
        close(in_float32[name].to(result[name].dtype), result[name], 2e-5)
    if not meet:
        _check_halves_and_gradients(s, module)


def _check_halves_and_gradients(s: bt.Sentence, module) -> None:
    value = module(given=batch_inputs(s))
    half = {name: x.bfloat16() if x.is_floating_point() else x for name, x in batch_inputs(s).items()}
    rounded = s.net.to(torch.bfloat16).module().eval()(given=half)
    assert rounded.dtype == torch.bfloat16
    assert (rounded - value).abs().max() <= 5e-2 * value.abs().max().clamp(min=1)
    if "j_0" in s.net.network.graph.by_name or not s.net.network.learnable:  # a state has no gradient
        return
    value.square().sum().backward()
    graph = s.net.network.graph
    ancestors = graph.ancestral_set([graph.get_group(module.output).index])
    for spec in s.net.network.specs:
        if spec.tpm.kind == "deterministic" and spec.group.index in ancestors:
            for name in spec.parameters:
                if f"{spec.param_prefix}.{name}" not in s.net.network.learnable:
                    continue
                grad = module.store[f"{spec.param_prefix}/{name}"].grad
                assert grad is not None and torch.isfinite(grad).all(), name


@pytest.mark.parametrize("name", ["concat", "encoder, pre-norm", "three stacks", "grouped", "encoder-decoder", "word"])
def test_readings_of_a_batch_are_the_sentences(name):
    """`P(j | i)` of all groups at once, compared with one after the other."""
    s = get_case(name).sentence
    attention, _ = s.state.module.attention_weights(given=batch_inputs(s))
    assert attention
    for name_, result in attention.items():
        spec = s.net.network.get_spec(name_)
        expected = s.state.evaluator.plan_attention(spec).run()
        close(result.select(expected.dim() - len(spec.group.plates) - 2, 0), expected)


def test_set_nodes_count_where_maps_are_folded_into_attention():
    """With more words than features of a vector, q and k are not computed separately, unless one of them is set."""
    s = bt.bayesuvius(4, heads=2).to(D).sentence("a b c d e f g h i j")
    done = s.do(c=1, q_0_3=torch.randn(4, dtype=D))
    for name in ("x_1_3", "x_1_4"):
        close(done[name], reference.values(done.state.model, done.ground.id(name), {}))
    assert not done["x_1_3"].allclose(s.do(c=1)["x_1_3"])


# probability


class Enumeration:
    """The reference's runs in all joint states of the choices of a sentence, without readouts that have no children."""

    def __init__(self, s: bt.Sentence) -> None:
        model, observed = s.state.model, s.state.evidence
        self.choices = [node for node in get_choices(s) if node in observed or s.ground.children(node)]
        self.runs = [*reference.enumerate_runs(model, self.choices, reference.get_fixed(model, observed))]
        logs = [sum((run.log_prob(node) for node in (*self.choices, *observed)), torch.zeros(())) for run in self.runs]
        self.total = torch.stack(logs).logsumexp(0)
        self.weights = torch.stack(logs).softmax(0)

    def joint(self, nodes: list[int]) -> torch.Tensor:
        """`P(nodes | evidence)`, a dim for each node."""
        node_probs = [torch.stack([self._node_probs(run, node) for run in self.runs]) for node in nodes]
        joint_probs = self.weights[:, None]
        for probs in node_probs:
            joint_probs = (joint_probs[:, :, None] * probs[:, None, :]).flatten(1)
        return joint_probs.sum(0).reshape([probs.shape[1] for probs in node_probs])

    def _node_probs(self, run: reference.ReferenceRun, node: int) -> torch.Tensor:
        """Return `P(node | joint state)`: a choice is in its state, a readout has its distribution."""
        if node not in self.choices:
            return run.distribution(node).probs
        return torch.nn.functional.one_hot(run.states[node], run.model.count_states(node)).to(D)


@pytest.mark.parametrize("case", make_params(()), **IDS)
def test_probabilities_are_sums_over_all_states(case: Case):
    """Of a sentence and of a batch, padded or not: by the reference, by elimination, and by pgmpy."""
    s = case.sentence.observe(case.evidence)
    enumeration, model, choices = Enumeration(s), s.state.model, get_choices(s)
    close(reference.log_evidence(model, s.state.evidence), enumeration.total)
    close(s.log_prob(), enumeration.total)
    for node in choices[:1]:
        close(reference.posterior(model, node, s.state.evidence), enumeration.joint([node]))
    first_nodes = [get_ends(s, m)[0] for m in s.net.network.specs if m.tpm.kind == "discrete"]
    queried = [node for node in first_nodes if node in choices][:3]
    if len(queried) > 1:
        close(s.posterior([*map(s.ground.name, queried)]), enumeration.joint(queried))
    if len(queried) > 0 and case.name not in LARGE:
        from pgmpy.inference import VariableElimination

        model, names = s.to_pgmpy(), [*map(s.ground.name, queried)]
        peer = VariableElimination(model).query(names, evidence=model.graph["evidence"], show_progress=False)
        order = [peer.variables.index(name) for name in names]
        close(torch.tensor(peer.values).permute(order), enumeration.joint(queried), 1e-8)
    root = next((node for node in choices if not s.ground.parents(node)), None)
    for node in [node for node in choices if root not in (None, node)][:2]:  # at a root, evidence equals do
        name, root_state = s.ground.name(node), {s.ground.name(root): 0}
        close(s.posterior(name, root_state), case.sentence.do(root_state).posterior(name, case.evidence))
    query = {"evidence": batch_evidence(s), "given": batch_inputs(s)}
    if case.name in MEET and case.name not in CHAINS:
        with pytest.raises(bt.BNetError):
            log_evidence(case.net.module(), **query)
    else:
        can_be_longer = case.name not in FIXED and s.state.encoded.given
        _check_batch(s, enumeration, query, pad_query(s, query["evidence"]) if can_be_longer else query)


def _check_batch(s: bt.Sentence, enumeration: Enumeration, query: dict, padded_query: dict) -> None:
    module = s.net.module().eval()
    close(log_evidence(module, **query).flatten()[0], enumeration.total)
    close(log_evidence(module, **padded_query).flatten()[0], enumeration.total)
    check_padding = True  # for one group
    for spec in s.net.network.specs:
        name, shape = spec.group.name, s.ground.shapes[spec.group.index]
        if spec.tpm.kind == "discrete" and name not in query["evidence"]:
            result = posterior(module, name, **query)
            assert tuple(result.shape[:-1]) == (1, *shape)
            nodes = get_ends(s, spec)
            for node in nodes:
                close(result[(0, *s.ground.unravel_index(node)[1])], enumeration.joint([node]))
            close(s.posterior(s.ground.name(nodes[-1])), enumeration.joint(nodes[-1:]))
            if check_padding:
                close(posterior(module, name, **padded_query)[tuple(slice(0, n) for n in result.shape)], result)
                check_padding = False
    _check_slope(module, query)


def pad_query(s: bt.Sentence, evidence: dict[str, Evidence]) -> dict:
    """The query padded with invalid values and invalid evidence, and a mask of the padding."""
    longer, graph = {}, s.net.network.graph
    for name, item in evidence.items():
        value, observed = item.value, item.observed
        if graph.by_name[name].word_stack is not None:
            axis = 1 + len(graph.by_name[name].plates)
            nonsense = torch.full_like(value.narrow(axis, 0, 1), 99 if value.dtype == L else torch.inf)
            value = torch.cat([value, nonsense, nonsense], axis)
            observed = torch.cat([observed, *[torch.ones_like(observed.narrow(axis, 0, 1))] * 2], axis)
        longer[name] = Evidence(value, observed)
    given, mask = pad_given(s)
    return {"evidence": longer, "given": given, "mask": mask}


def _check_slope(module, query: dict) -> None:
    """Check that the gradient of the log evidence is its slope along a random direction of all parameters."""
    direction = {name: torch.randn_like(d) for name, d in module.store.items() if d.requires_grad}
    log_evidence(module, **query).sum().backward()
    slope = sum((module.store[n].grad * d).sum() for n, d in direction.items() if module.store[n].grad is not None)
    step, sides = 1e-5, []
    for sign in (1, -1):
        moved = bt.BNet(
            module.network.with_parameters(
                {
                    n: d + sign * step * direction.get(n.replace(".", "/"), 0)
                    for n, d in module.network.parameters.items()
                }
            )
        )
        sides.append(log_evidence(moved.module().eval(), **query).sum().detach())
    close(slope, (sides[0] - sides[1]) / (2 * step), 1e-5)


def intervene(s: bt.Sentence) -> bt.Sentence:
    """Return the sentence with half the nodes of a group set, a row of attention, and a choice of one word."""
    specs = [m for m in s.net.network.specs if m.tpm.kind != "input" and not m.tpm.is_index_valued]
    values = [m for m in specs if m.tpm.kind == "deterministic"]
    spec = values[len(values) // 3]
    names = list(s.ground.iter_names(spec.group))
    done = s.do({name: torch.randn(spec.shape, dtype=D) for name in names[len(names) // 2 :]})
    readers = [m for m in values if isinstance(m.tpm, Attention) and m.group.word_stack is not None and m is not spec]
    for reader in readers[:1]:
        with suppress(bt.BNetError):  # attention without rows P(j | i)
            row = Attend([1.0, *[0.0] * (max(s.ground.word_counts.values()) - 1)])
            done = done.do({next(s.ground.iter_names(reader.group)): row})
    for choice in [m for m in specs if m.tpm.kind == "discrete" and m.group.word_stack is not None][:1]:
        done = done.do({list(s.ground.iter_names(choice.group))[-1]: 0})
    return done


WITHOUT_VALUES = ("sprinkler", "chest clinic", "hidden states", "factorial chains", "tagger")  # all nodes are random


@pytest.mark.parametrize("case", make_params((*WITHOUT_VALUES, *LARGE)), **IDS)
def test_after_surgery_on_some_nodes_probabilities_are_sums_and_not_by_the_reference(case, forbid_reference):
    done = intervene(case.sentence)
    s = done.observe({k: v for k, v in case.evidence.items() if done.ground.id(k) not in done.state.model.do})
    enumeration, choices = Enumeration(s), get_choices(s)
    expected = {node: enumeration.joint([node]) for node in (*choices[:2], *choices[-1:])}
    with forbid_reference():
        close(s.log_prob(), enumeration.total)
        for node, probs in expected.items():
            close(s.posterior(s.ground.name(node)), probs, 1e-9)
