"""The Pyro model against the reference: joint, evidence and posteriors of every case; handlers and SVI."""

from __future__ import annotations

from dataclasses import dataclass

import pyro
import pytest
import torch
from pyro import poutine
from pyro.infer import SVI, Predictive, TraceEnum_ELBO, infer_discrete
from torch import Tensor

import bnet_transformer as bt
from bnet_transformer import reference
from bnet_transformer.bridges.pyro import PyroModel
from bnet_transformer.tpm import Categorical, Normal
from tests.cases import CASES, Case

D = torch.float64
IDS = {"ids": lambda case: case.name}
OBSERVED = [case for case in CASES if case.evidence]
COUPLED = ("word, two slices", "windowed selectors")  # a word's value depends on other words' choices
CHAINS = ("hidden Markov", "backward chain", "factorial chains", "tagger")  # a choice depends on a neighbour's
SUMMED = [case for case in OBSERVED if case.name not in (*COUPLED, *CHAINS)]


@pytest.fixture(autouse=True)
def _fresh_store():
    pyro.clear_param_store()
    pyro.set_rng_seed(0)


@dataclass(frozen=True)
class InferenceProblem:
    """A case as a Pyro model with its arguments."""

    sentence: bt.Sentence
    model: PyroModel
    arguments: dict[str, object]


def make_problem(case: Case, dtype: torch.dtype = D) -> InferenceProblem:
    s = case.net.to(dtype).sentence(case.text).observe(case.evidence)
    y: dict[str, Tensor] = {}
    observed: dict[str, Tensor] = {}
    for node, value in s.state.evidence.items():
        group = s.ground.group_of(node)
        shape = (1, *s.ground.shapes[group.index])
        y.setdefault(group.name, torch.zeros((*shape, *value.shape), dtype=value.dtype))
        observed.setdefault(group.name, torch.zeros(shape, dtype=torch.bool))
        index = node - int(s.ground.offsets[group.index])
        y[group.name].view(-1, *value.shape)[index] = value
        observed[group.name].view(-1)[index] = True
    given = {name: value[None] for name, value in s.state.encoded.given.items()}
    return InferenceProblem(s, PyroModel(s.net.network), {"given": given, "y": y, "observed_mask": observed})


def fix_tables(problem: InferenceProblem) -> tuple[PyroModel, float]:
    """The model conditioned on the tables of the net as Dirichlet rows, and the log density of these."""
    rows = {s: problem.model.network.parameters[p].softmax(-1) for p, s in problem.model.priors.items()}
    model = pyro.condition(problem.model, data=rows)
    trace = poutine.trace(model).get_trace(**problem.arguments)
    trace.compute_log_prob()
    return model, sum(float(trace.nodes[name]["log_prob_sum"]) for name in rows)


def empty_guide(*_: object, **__: object) -> None:
    """A guide without sites."""


def log_marginal(model: object, problem: InferenceProblem) -> float:
    elbo = TraceEnum_ELBO(max_plate_nesting=problem.model.max_plate_nesting)
    return -elbo.loss(model, empty_guide, **problem.arguments)


def check_joint(problem: InferenceProblem, tolerance: float) -> None:
    """Check that the log density of a trace, minus that of the tables, is the reference's log joint of its states."""
    model, prior = fix_tables(problem)
    trace = poutine.trace(model).get_trace(**problem.arguments)
    ground, states = problem.sentence.ground, dict(problem.sentence.state.evidence)
    for spec in problem.sentence.net.network.specs:
        group = spec.group
        if group.name in problem.model.sites and group.name not in problem.arguments["y"]:
            value = trace.nodes[group.name]["value"]
            shape = () if spec.tpm.kind == "discrete" else spec.shape
            flat = value.reshape(-1, *shape)
            states |= {int(ground.offsets[group.index]) + k: state for k, state in enumerate(flat)}
    run = reference.ReferenceRun(problem.sentence.state.model, states)
    expected = sum(float(run.log_prob(node)) for node in states)
    assert float(trace.log_prob_sum()) - prior == pytest.approx(expected, rel=tolerance, abs=tolerance)


@pytest.mark.parametrize("case", OBSERVED, **IDS)
def test_the_joint_the_evidence_and_the_posterior_are_the_references(case: Case):
    problem = make_problem(case)
    check_joint(problem, 1e-10)
    if case not in SUMMED or case.name == "codebook, two slices":  # of which "slice, codebook" has all
        return
    model, prior = fix_tables(problem)
    expected = float(reference.log_evidence(problem.sentence.state.model, problem.sentence.state.evidence))
    if any(m.tpm.kind == "discrete" and m.group.name not in problem.arguments["y"] for m in problem.model.random_specs):
        result = log_marginal(model, problem)
    else:
        result = float(poutine.trace(model).get_trace(**problem.arguments).log_prob_sum())
    assert result - prior == pytest.approx(expected, rel=1e-8, abs=1e-8)
    if "c" in problem.model.sites:
        elbo = TraceEnum_ELBO(max_plate_nesting=problem.model.max_plate_nesting)
        posterior = elbo.compute_marginals(model, empty_guide, **problem.arguments)["c"].probs.flatten()
        torch.testing.assert_close(posterior, problem.sentence.posterior("c"), rtol=1e-8, atol=1e-8)


@pytest.mark.parametrize("case", OBSERVED[::6], **IDS)
def test_the_joint_in_float32(case: Case):
    check_joint(make_problem(case, torch.float32), 1e-5)


def test_what_it_cannot_sum_out_it_refuses_by_name():
    problem = make_problem(next(c for c in CASES if c.name == COUPLED[0]))
    with pytest.raises(bt.BNetError, match="c_0: expected a choice whose words do not interact"):
        log_marginal(problem.model, problem)
    problem = make_problem(next(c for c in CASES if c.name == CHAINS[0]))
    with pytest.raises(bt.BNetError, match="z_0: expected a choice whose words do not interact"):
        log_marginal(problem.model, problem)


@pytest.mark.parametrize("case", [case for case in OBSERVED if case.name in ("codebook", "corpus", *CHAINS)], **IDS)
def test_summed_choices_are_one_factor(case: Case):
    problem = make_problem(case)
    model = PyroModel(problem.sentence.net.network, choices="summed")
    rows = {s: model.network.parameters[p].softmax(-1) for p, s in model.priors.items()}
    trace = poutine.trace(pyro.condition(model, data=rows)).get_trace(**problem.arguments)
    trace.compute_log_prob()
    assert {*trace.nodes} >= {"log_evidence", *rows} and not {*problem.model.sites} & {*trace.nodes} - {*rows}
    log_prob = float(trace.nodes["log_evidence"]["log_prob_sum"])
    assert log_prob == pytest.approx(float(problem.sentence.log_prob()), abs=1e-10)


def test_summed_nodes_have_no_sites():
    problem = make_problem(next(c for c in CASES if c.name == CHAINS[0]))
    model = PyroModel(problem.sentence.net.network, choices="summed")
    with pytest.raises(bt.BNetError, match="observations"):
        model(given=problem.arguments["given"])
    with pytest.raises(bt.BNetError, match="record"):
        model(**problem.arguments, record=["m_0"])
    for handler, arguments in ((pyro.condition, problem.arguments), (pyro.do, {"given": problem.arguments["given"]})):
        with pytest.raises(bt.BNetError, match=r"z_0: .*choices are summed out.*y="):
            handler(model, data={"z_0": torch.zeros(1, 3).long()})(**arguments)


@pytest.mark.parametrize("name", CHAINS[1:])
def test_draws_of_a_chain_have_the_frequencies_of_the_net(name):
    """Many sentences, drawn word by word, against the exact prior of pairs of neighbouring words."""
    case, n = next(c for c in CASES if c.name == name), 4000
    given = {name: value[None].expand(n, *value.shape) for name, value in case.sentence.state.encoded.given.items()}
    draws = PyroModel(case.net.network, "own")(given=given)
    for spec in case.net.network.specs:
        group = spec.group
        if spec.tpm.kind != "discrete" or group.word_stack is None:
            continue
        pair = [f"{group.name}_{word}" for word in (0, 1)]
        expected, states = case.sentence.posterior(pair), draws[group.name].reshape(n, -1)
        counts = torch.zeros(expected.shape).index_put_((states[:, 0], states[:, 1]), torch.ones(n), accumulate=True)
        assert bool(((counts / n - expected).abs() < 4.5 * (expected / n).sqrt() + 1e-9).all())


def make_model(**options: object) -> tuple[bt.BNet, PyroModel, Tensor]:
    options = {"heads": 3, "observe": Categorical(3), **options}
    net = bt.bayesuvius(4, **options).to(D)  # type: ignore[arg-type]
    return net, PyroModel(net.network), torch.randn(2, 3, 4, dtype=D)


def test_a_batch_is_its_sentences_and_a_corpus_selector_is_one():
    y = torch.tensor([[0, 1, 2], [2, 2, 0]])
    for per in ("sentence", "corpus"):
        net, model, x = make_model(per=per)
        elbo = TraceEnum_ELBO(max_plate_nesting=model.max_plate_nesting)
        log_p = torch.stack(
            [
                reference.log_evidence(s.state.model, s.state.evidence, s.ground.id("c"))
                for x_, y_ in zip(x, y, strict=True)
                for s in [net.sentence(x=x_).observe({f"y_{i}": int(v) for i, v in enumerate(y_)})]
            ]
        )
        prior = torch.log_softmax(net.parameters["c.logits"], -1)
        expected = log_p.logsumexp(-1).sum() if per == "sentence" else (prior + (log_p - prior).sum(0)).logsumexp(0)
        assert -elbo.loss(model, empty_guide, x, y) == pytest.approx(float(expected), abs=1e-10)
        if per == "sentence":  # Pyro cannot scale a sum inside a corpus-wide choice
            assert -elbo.loss(model, empty_guide, x, y, total=20) == pytest.approx(10 * float(expected), abs=1e-9)


@pytest.mark.parametrize("options", [{"per": "word"}, {"observe": Normal(0.5)}], ids=str)
def test_padding_changes_nothing(options):
    _, model, x = make_model(**options)
    y = torch.randn(2, 3, 4, dtype=D) if "observe" in options else torch.tensor([[0, 1, 2], [2, 2, 0]])
    mask = torch.tensor([[True] * 3 + [False] * 2] * 2)
    longer = torch.cat([x, torch.full((2, 2, 4), torch.nan, dtype=D)], 1)
    nonsense = torch.full_like(y[:, :2], -100 if y.dtype == torch.long else torch.inf)
    y_longer = torch.cat([y, nonsense], 1)
    elbo = TraceEnum_ELBO(max_plate_nesting=model.max_plate_nesting)
    short = elbo.loss(model, empty_guide, x, y)
    assert elbo.loss(model, empty_guide, longer, y_longer, mask=mask) == pytest.approx(short, abs=1e-10)
    conditioned = pyro.condition(model, data=model.data({"y": torch.cat([y, y[:, :2]], 1)}))  # Pyro requires states
    assert elbo.loss(conditioned, empty_guide, longer, mask=mask) == pytest.approx(short, abs=1e-10)


def test_do_and_condition_on_a_selector_and_a_readout():
    net, model, x = make_model(atoms=2)
    y = torch.tensor([[0, 1, 2], [2, 2, 0]])
    elbo = TraceEnum_ELBO(max_plate_nesting=model.max_plate_nesting)
    sentences = [
        net.sentence(x=x_).observe({f"y_{i}": int(v) for i, v in enumerate(y_)}) for x_, y_ in zip(x, y, strict=True)
    ]
    log_do = sum(float(reference.log_evidence(s.state.model, s.state.evidence)) for s in (s.do(c=1) for s in sentences))
    for model_, options in [
        (poutine.do(model, data={"c": torch.tensor(1)}), {}),
        (poutine.do(model, data=model.data({"c": torch.ones(2, dtype=torch.long)})), {}),
        (model, {"do": {"c": torch.ones(2, dtype=torch.long)}}),
    ]:
        assert -elbo.loss(model_, empty_guide, x, y, **options) == pytest.approx(log_do, abs=1e-10)
    observed = sum(
        float(reference.log_evidence(s.state.model, s.state.evidence)) for s in (s.observe(W_q_0=0) for s in sentences)
    )
    data = model.data({"W_q_0": torch.zeros(2, dtype=torch.long), "y": y})
    assert -elbo.loss(pyro.condition(model, data=data), empty_guide, x) == pytest.approx(observed, abs=1e-10)


def test_do_of_each_words_own_choice():
    net, model, x = make_model(per="word")
    c = torch.tensor([[0, 2, 1], [1, 1, 0]])
    result = model(x, do={"c_0": c}, record=["x_1"])["x_1"]
    expected = net.sentence(x=x[0]).do({f"c_0_{i}": int(state) for i, state in enumerate(c[0])})
    torch.testing.assert_close(result[0, 0], torch.stack([expected[f"x_1_{i}"] for i in range(3)]))


def test_do_of_a_deterministic_family():
    net, model, x = make_model(slices=2)
    patch = torch.randn(2, 3, 4, dtype=D)
    result = model(x, do={"x_1": patch, "c": torch.tensor([2, 2])}, record=["x_2"])["x_2"]
    nodes = {f"x_1_{i}": patch[0, i] for i in range(3)}
    torch.testing.assert_close(result[0, 1], net.sentence(x=x[0]).do({**nodes, "c": 2})["x_2_1"])


def test_conditioning_what_is_no_site_is_an_error():
    _, model, x = make_model()
    for data, message in (
        ({"x_1": torch.zeros(2, 3, 4)}, "condition on x_1: expected a random site of the model; got a deterministic"),
        ({"q_0_1": torch.zeros(4)}, "condition on q_0_1: expected the name of a node group"),
        ({"y_1": torch.tensor(1)}, "Use 'y'"),
        ({"c": torch.tensor([0, 1])}, "the 2 dims of sentence, plates and word"),
    ):
        with pytest.raises(bt.BNetError, match=message):
            pyro.condition(model, data=data)(x, record=["x_1"])
    with pytest.raises(bt.BNetError, match="do on x_1"):
        poutine.do(model, data={"x_1": torch.zeros(2, 3, 4)})(x)


def test_do_and_evidence_on_one_node():
    _, model, x = make_model()
    y, c = torch.tensor([[0, 1, 2], [2, 2, 0]]), torch.tensor([0, 1])
    evidence = model.data({"c": c, "y": y})
    for handled, options in (
        (poutine.do(pyro.condition(model, data=evidence), data={"c": evidence["c"]}), {}),
        (pyro.condition(poutine.do(model, data={"c": evidence["c"]}), data=evidence), {}),
        (poutine.do(model, data={"y": evidence["y"]}), {"y": y}),
        (model, {"y": {"c": c}, "do": {"c": c}}),
    ):
        with pytest.raises(bt.EvidenceError, match="do or evidence on a node, not both"):
            handled(x, **options)
    with pytest.raises(bt.BNetError, match=r"condition on c: .* a node that do= sets, .*Leave c out of do="):
        pyro.condition(model, data=evidence)(x, do={"c": c})


VALID = {"c": torch.tensor([0, 1]), "y": torch.randn(2, 3, 4, dtype=D)}


@pytest.mark.parametrize(
    "name, value, in_data, message",
    [
        ("c", torch.tensor([0, -1]), True, "states from 0 to 2; got -1"),
        ("c", torch.tensor([0.0, 1.0]), True, "integers, which are states; got torch.float32"),
        ("c", torch.tensor([0, 1, 2]), False, r"shape \(2, 1\).*; got shape \(3, 1\)"),
        ("y", VALID["y"] * torch.nan, True, "finite numbers; got nan"),
        ("y", VALID["y"].float(), True, "torch.float64, the dtype of the net; got torch.float32"),
        ("y", VALID["y"][..., :3], True, r"got shape \(2, 3, 3\)"),
        ("y", VALID["y"][:, :2], False, r"shape \(2, 3, 4\).*; got shape \(2, 2, 4\)"),
        ("y", VALID["y"].tolist(), True, "a tensor; got"),
    ],
)
def test_what_handlers_bring_in_is_checked(name, value, in_data, message):
    """By `model.data`, or, without it, during the run."""
    _, model, x = make_model(observe=Normal(1.0))
    raw = value
    if isinstance(value, Tensor):
        raw = value.unsqueeze(-1) if name == "c" else value
        if in_data:
            with pytest.raises(bt.BNetError, match=rf"data\['{name}'\].*{message}"):
                model.data({name: value})
        else:
            assert model.data({name: value})[name].equal(raw)
    for kind, handler in (("condition", poutine.condition), ("do", poutine.do)):
        if kind == "do" and not isinstance(value, Tensor):
            continue  # Pyro raises an error
        with pytest.raises(bt.BNetError, match=f"{kind} on {name}: .*{message}"):
            handler(model, data={name: raw})(x)
    with pytest.raises(bt.BNetError, match=rf"y\['{name}'\]: "):
        model(x, {name: value})


def test_do_sets_all_sentences_to_one_value_and_condition_sees_each():
    _, model, x = make_model()
    one = model.data({"c": torch.tensor([2])})
    done = poutine.do(model, data=one)(x, record=["x_1"])["x_1"]
    assert done.equal(model(x, do={"c": torch.tensor(2)}, record=["x_1"])["x_1"])
    with pytest.raises(bt.BNetError, match=r"condition on c: expected shape \(2, 1\)"):
        pyro.condition(model, data=one)(x)


def test_many_draws_at_once_are_conditioned_on():
    _, model, x = make_model(prior=1.0, atoms=2)
    samples = Predictive(model, num_samples=5, parallel=True)(x)
    again = Predictive(model, samples, parallel=True, return_sites=["c", "W_q_0", "y"])(x)
    assert all(again[name].equal(samples[name]) for name in again) and again["y"].shape == (5, 2, 3)


@pytest.mark.parametrize("state", [-1, 3])
def test_a_guide_draws_states_that_there_are(state):
    _, model, x = make_model()

    def guide(x: Tensor, y: Tensor) -> None:
        with pyro.plate("sentence", 2, dim=-2):
            pyro.sample("c", pyro.distributions.Delta(torch.full((2, 1), state)))

    with pytest.raises(bt.BNetError, match=f"c: expected states from 0 to 2; got {state}"):
        TraceEnum_ELBO(max_plate_nesting=2).loss(model, guide, x, torch.zeros(2, 3, dtype=torch.long))


def test_tables_that_are_no_probabilities():
    _, model, x = make_model(prior=1.0)
    for rows, message in (
        ([0.5, 0.5], r"shape \(3,\); got shape \(2,\)"),
        ([0.5, 0.6, -0.1], "rows of probabilities"),
        ([0.5, 0.5, torch.nan], "rows of probabilities"),
    ):
        data = {"theta_c": torch.tensor(rows, dtype=D)}
        for call in (lambda: model.data(data), lambda: poutine.do(model, data=data)(x)):  # noqa: B023
            with pytest.raises(bt.BNetError, match=f"theta_c.*{message}"):
                call()
    assert "c" in pyro.condition(model, data=model.data({"theta_c": torch.tensor([0.5, 0.5, 0.0], dtype=D)}))(x)


def test_unobserved_values_change_no_gradient():
    net, model, x = make_model(observe=Normal(1.0))
    y, observed = torch.randn(2, 3, 4, dtype=D), torch.tensor([[True, False, True], [True] * 3])
    sigma = net.parameters["y.log_sigma"]
    gradients = []
    for fill in (0.0, torch.nan):
        filled = torch.where(observed.unsqueeze(-1), y, fill)
        leaf = torch.zeros_like(sigma, requires_grad=True)
        trace = poutine.trace(model).get_trace(
            x, filled, observed_mask={"y": observed}, do={"c": torch.tensor([0, 1])}, parameters={"y.log_sigma": leaf}
        )
        gradients.append(torch.autograd.grad(trace.log_prob_sum(), leaf)[0])
    assert gradients[0].isfinite().all() and gradients[0].equal(gradients[1])


def test_a_part_of_the_corpus_cannot_sum_its_selector_out():
    _, model, x = make_model(per="corpus")
    y = torch.tensor([[0, 1, 2], [2, 2, 0]])
    elbo = TraceEnum_ELBO(max_plate_nesting=model.max_plate_nesting)
    with pytest.raises(
        bt.BNetError,
        match="total: expected all sentences of the corpus in x, because they share one draw of the enumerated c",
    ):
        elbo.loss(model, empty_guide, x, y, total=20)
    assert elbo.loss(model, empty_guide, x, y, total=2) == pytest.approx(elbo.loss(model, empty_guide, x, y))
    log_joints = [
        float(poutine.trace(model).get_trace(x, {"y": y, "c": torch.tensor([1])[0]}, total=n).log_prob_sum())
        for n in (2, 20)
    ]
    prior = float(torch.log_softmax(model.network.parameters["c.logits"], -1)[1])
    assert log_joints[1] - prior == pytest.approx(10 * (log_joints[0] - prior))


def test_a_model_around_it_may_condition_its_own_sites():
    _, model, x = make_model()

    def outer_model():
        pyro.sample("scale", pyro.distributions.Normal(0.0, 1.0))
        model(x, torch.zeros(2, 3, dtype=torch.long))

    assert "c" in poutine.trace(pyro.condition(outer_model, data={"scale": torch.tensor(1.0)})).get_trace().nodes


REFUSED = [
    ({"y": torch.zeros(2, 3)}, "integers, which are states"),
    ({"y": torch.full((2, 3), 3)}, "states from 0 to 2"),
    ({"y": {"x_1": torch.zeros(2, 3, 4)}}, "random node group of y"),
    ({"observed_mask": {"y": torch.ones(2, 3, dtype=torch.bool)}}, "they are missing"),
    ({"y": {"c": torch.tensor([0, 1])}, "observed_mask": {"c": torch.tensor([True, False])}}, "a readout"),
    ({"y": {"c": torch.tensor([0, 1])}, "do": {"c": torch.tensor([0, 1])}}, "not both"),
    ({"y": torch.zeros(2, 3, dtype=torch.long), "observed_mask": {"y": [[True] * 3] * 2}}, "booleans of shape"),
    ({"total": 1}, "at least 2, the number of sentences"),
    ({"y": [[0, 1, 2]] * 2}, "y: expected a mapping"),
    ({"do": {"c": torch.tensor([0, 3])}}, r"do\['c'\]: expected states from 0 to 2; got 3"),
    ({"do": {"x_1_0": torch.zeros(2, 4)}}, "got the node 'x_1_0'. Pass the group of this node, 'x_1'"),
    ({"mask": torch.zeros(2, 3, dtype=torch.bool)}, "mask, sentence 0: all words are masked"),
    ({"parameters": {"c.logits": torch.zeros(2)}}, "c.logits: expected shape"),
]


def test_bad_input():
    _, model, x = make_model()
    for arguments, message in REFUSED:
        with pytest.raises(bt.BNetError, match=message):
            model(x, **arguments)


def test_svi_learns_a_table_and_a_matrix():
    net, model, x = make_model(prior=1.0)
    y = torch.tensor([[0, 1, 2], [2, 2, 0]])

    def guide(x: Tensor, y: Tensor) -> None:
        rows = pyro.param("rows", torch.ones(3, dtype=D), constraint=pyro.distributions.constraints.positive)
        pyro.sample("theta_c", pyro.distributions.Dirichlet(rows))

    def learned_model(x: Tensor, y: Tensor) -> None:
        model(x, y, parameters={"y.weight": pyro.param("weight", net.parameters["y.weight"].clone())})

    svi = SVI(learned_model, guide, pyro.optim.Adam({"lr": 0.05}), TraceEnum_ELBO(max_plate_nesting=2))
    losses = [svi.step(x, y) for _ in range(20)]
    assert sum(losses[-5:]) < sum(losses[:5])


def test_vectorized_particles():
    _, model, x = make_model(atoms=2, prior=1.0)
    y = torch.tensor([[0, 1, 2], [2, 2, 0]])

    def guide(x: Tensor, y: Tensor) -> None:
        for name in model.sites[:4]:
            table = model.network.parameters[name.removeprefix("theta_") + ".logits"]
            rows = pyro.distributions.Dirichlet(torch.ones_like(table))
            pyro.sample(name, rows.to_event(table.dim() - 1))

    def loss(particles: int, **options: bool) -> float:
        elbo = TraceEnum_ELBO(max_plate_nesting=model.max_plate_nesting, num_particles=particles, **options)
        return elbo.loss(model, guide, x, y)

    losses = torch.tensor([loss(1) for _ in range(30)])
    assert abs(loss(30, vectorize_particles=True) - losses.mean()) < 6 * losses.std() / 30**0.5


def test_svi_draws_choices_that_cannot_be_summed_out():
    _, model, x = make_model(per="word", slices=2)

    def guide(x: Tensor, y: Tensor) -> None:
        logits = pyro.param("logits", torch.zeros(2, 1, 3, 3, dtype=D))
        with pyro.plate("sentence", 2, dim=-3), pyro.plate("word", 3, dim=-1):
            pyro.sample("c_0", pyro.distributions.Categorical(logits=logits))

    for particles in ({}, {"num_particles": 5, "vectorize_particles": True}):
        elbo = TraceEnum_ELBO(max_plate_nesting=model.max_plate_nesting, **particles)
        svi = SVI(model, guide, pyro.optim.Adam({"lr": 0.05}), elbo)
        assert torch.isfinite(torch.tensor(svi.step(x, torch.tensor([[0, 1, 2], [2, 2, 0]]))))
    enumerated = TraceEnum_ELBO(max_plate_nesting=model.max_plate_nesting)
    with pytest.raises(bt.BNetError, match="words do not interact"):
        enumerated.loss(model, pyro.infer.config_enumerate(guide, expand=True), x, torch.zeros(2, 3, dtype=torch.long))


@pytest.mark.parametrize("temperature", [0, 1])
def test_infer_discrete(temperature):
    net, model, x = make_model(atoms=2)
    y = torch.tensor([[0, 1, 2], [2, 2, 0]])
    first = -1 - model.max_plate_nesting
    result = infer_discrete(model, first_available_dim=first, temperature=temperature)(x, y)
    assert result["c"].shape == (2, 1) and result["W_q_0"].shape == (2, 1)
    if temperature == 0:
        states = {name: int(result[name][0]) for name in ("c", "W_q_0", "W_k_0", "W_v_0")}
        s = net.sentence(x=x[0])
        open_ids = [s.ground.id(name) for name in states]
        evidence = s.observe({f"y_{i}": int(v) for i, v in enumerate(y[0])}).state.evidence
        runs = list(reference.enumerate_runs(s.state.model, open_ids, evidence))
        best = max(runs, key=lambda run: sum(float(run.log_prob(node)) for node in [*open_ids, *evidence]))
        assert states == {name: int(best.states[s.ground.id(name)]) for name in states}


def test_it_is_drawn_with_plates():
    _, model, x = make_model(per="word", prior=1.0)
    graph = pyro.render_model(model, model_args=(x, torch.zeros(2, 3, dtype=torch.long)), render_distributions=True)
    for text in ("cluster_sentence", "cluster_word", "theta_c_0 -> c_0", "c_0 -> y"):
        assert text in graph.source
    nodes = poutine.trace(model).get_trace(x).nodes  # one site for each node group, for any number of words
    assert {name for name in nodes if not name.startswith("_")} == {"sentence", "word", "theta_c_0", "c_0", "y"}


def test_wanted_families_are_recorded():
    _, model, x = make_model()
    trace = poutine.trace(model).get_trace(x, record=["x_1"])
    assert trace.nodes["x_1"]["value"].shape == (2, 3, 4) and trace.nodes["x_1"]["infer"]["_deterministic"]
