"""The Pyro reading against the reference: joint, evidence and posteriors of every case, and what Pyro does with it."""

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
SEEN = [case for case in CASES if case.evidence]
MEETS = "word, two slices"  # a word's value depends on other words' choices
MARKOV = "hidden Markov"  # a word's choice depends on the choice before
SUMMED = [case for case in SEEN if case.name not in (MEETS, MARKOV)]


@pytest.fixture(autouse=True)
def _fresh_store():
    pyro.clear_param_store()
    pyro.set_rng_seed(0)


@dataclass(frozen=True)
class Asked:
    """A case as a model with its arguments."""

    sentence: bt.Sentence
    model: PyroModel
    arguments: dict[str, object]


def asked(case: Case, dtype: torch.dtype = D) -> Asked:
    s = case.net.to(dtype).sentence(case.text).observe(case.evidence)
    y: dict[str, Tensor] = {}
    observed: dict[str, Tensor] = {}
    for node, value in s.state.evidence.items():
        family = s.ground.group_of(node)
        shape = (1, *s.ground.shapes[family.index])
        y.setdefault(family.name, torch.zeros((*shape, *value.shape), dtype=value.dtype))
        observed.setdefault(family.name, torch.zeros(shape, dtype=torch.bool))
        at = node - int(s.ground.offsets[family.index])
        y[family.name].view(-1, *value.shape)[at] = value
        observed[family.name].view(-1)[at] = True
    given = {name: value[None] for name, value in s.state.encoded.given.items()}
    return Asked(s, PyroModel(s.net.network), {"given": given, "y": y, "observed_mask": observed})


def with_tables(asked: Asked) -> tuple[PyroModel, float]:
    """The model with the Dirichlet rows at the net's own tables, and the log density of these."""
    rows = {s: asked.model.network.parameters[p].softmax(-1) for p, s in asked.model.priors.items()}
    model = pyro.condition(asked.model, data=rows)
    trace = poutine.trace(model).get_trace(**_drawable(asked))
    trace.compute_log_prob()
    return model, sum(float(trace.nodes[name]["log_prob_sum"]) for name in rows)


def _drawable(asked: Asked) -> dict[str, object]:
    """The arguments, with states for what cannot be drawn word after word."""
    if "z_0" not in asked.model.sites:
        return asked.arguments
    words = asked.sentence.ground.word_counts[""]
    return {**asked.arguments, "y": {**asked.arguments["y"], "z_0": torch.arange(words)[None] % 2}}  # type: ignore[dict-item]


def nothing(*_: object, **__: object) -> None:
    """A guide without sites."""


def log_marginal(model: object, asked: Asked) -> float:
    elbo = TraceEnum_ELBO(max_plate_nesting=asked.model.max_plate_nesting)
    return -elbo.loss(model, nothing, **asked.arguments)


def check_joint(given: Asked, tolerance: float) -> None:
    """The log density of a trace, less that of the tables, is the reference's log joint of its states."""
    model, prior = with_tables(given)
    trace = poutine.trace(model).get_trace(**_drawable(given))
    ground, states = given.sentence.ground, dict(given.sentence.state.evidence)
    for member in given.sentence.net.network.specs:
        family = member.group
        if family.name in given.model.sites and family.name not in given.arguments["y"]:
            value = trace.nodes[family.name]["value"]
            shape = () if member.tpm.kind == "discrete" else member.shape
            flat = value.reshape(-1, *shape)
            states |= {int(ground.offsets[family.index]) + k: state for k, state in enumerate(flat)}
    run = reference.ReferenceRun(given.sentence.state.model, states)
    expected = sum(float(run.log_prob(node)) for node in states)
    assert float(trace.log_prob_sum()) - prior == pytest.approx(expected, rel=tolerance, abs=tolerance)


@pytest.mark.parametrize("case", SEEN, **IDS)
def test_the_joint_the_evidence_and_the_posterior_are_the_references(case: Case):
    given = asked(case)
    check_joint(given, 1e-10)
    if case not in SUMMED or case.name == "codebook, two slices":  # of which "slice, codebook" has all
        return
    model, prior = with_tables(given)
    expected = float(reference.log_evidence(given.sentence.state.model, given.sentence.state.evidence))
    if any(m.tpm.kind == "discrete" and m.group.name not in given.arguments["y"] for m in given.model.random_specs):
        result = log_marginal(model, given)
    else:
        result = float(poutine.trace(model).get_trace(**given.arguments).log_prob_sum())
    assert result - prior == pytest.approx(expected, rel=1e-8, abs=1e-8)
    if "c" in given.model.sites:
        elbo = TraceEnum_ELBO(max_plate_nesting=given.model.max_plate_nesting)
        shares = elbo.compute_marginals(model, nothing, **given.arguments)["c"].probs.flatten()
        torch.testing.assert_close(shares, given.sentence.posterior("c"), rtol=1e-8, atol=1e-8)


@pytest.mark.parametrize("case", SEEN[::6], **IDS)
def test_the_joint_in_float32(case: Case):
    check_joint(asked(case, torch.float32), 1e-5)


def test_what_it_cannot_sum_out_it_refuses_by_name():
    given = asked(next(c for c in CASES if c.name == MEETS))
    with pytest.raises(bt.BNetError, match="c_0: expected a choice whose words do not meet"):
        log_marginal(given.model, given)
    given = asked(next(c for c in CASES if c.name == MARKOV))
    with pytest.raises(bt.BNetError, match="z_0: expected a value"):
        log_marginal(given.model, given)


def small(**options: object) -> tuple[bt.BNet, PyroModel, Tensor]:
    options = {"heads": 3, "observe": Categorical(3), **options}
    net = bt.bayesuvius(4, **options).to(D)  # type: ignore[arg-type]
    return net, PyroModel(net.network), torch.randn(2, 3, 4, dtype=D)


def test_a_batch_is_its_sentences_and_a_corpus_selector_is_one():
    y = torch.tensor([[0, 1, 2], [2, 2, 0]])
    for per in ("sentence", "corpus"):
        net, model, x = small(per=per)
        elbo = TraceEnum_ELBO(max_plate_nesting=model.max_plate_nesting)
        item = torch.stack(
            [
                reference.log_evidence(s.state.model, s.state.evidence, s.ground.id("c"))
                for x_, y_ in zip(x, y, strict=True)
                for s in [net.sentence(x=x_).observe({f"y_{i}": int(v) for i, v in enumerate(y_)})]
            ]
        )
        prior = torch.log_softmax(net.parameters["c.logits"], -1)
        full = item.logsumexp(-1).sum() if per == "sentence" else (prior + (item - prior).sum(0)).logsumexp(0)
        assert -elbo.loss(model, nothing, x, y) == pytest.approx(float(full), abs=1e-10)
        if per == "sentence":  # Pyro itself refuses to scale a sum inside a corpus-wide choice
            assert -elbo.loss(model, nothing, x, y, total=20) == pytest.approx(10 * float(full), abs=1e-9)


@pytest.mark.parametrize("options", [{"per": "word"}, {"observe": Normal(0.5)}], ids=str)
def test_padding_changes_nothing(options):
    _, model, x = small(**options)
    y = torch.randn(2, 3, 4, dtype=D) if "observe" in options else torch.tensor([[0, 1, 2], [2, 2, 0]])
    mask = torch.tensor([[True] * 3 + [False] * 2] * 2)
    longer = torch.cat([x, torch.full((2, 2, 4), torch.nan, dtype=D)], 1)
    nonsense = torch.full_like(y[:, :2], -100 if y.dtype == torch.long else torch.inf)
    y_longer = torch.cat([y, nonsense], 1)
    elbo = TraceEnum_ELBO(max_plate_nesting=model.max_plate_nesting)
    short = elbo.loss(model, nothing, x, y)
    assert elbo.loss(model, nothing, longer, y_longer, mask=mask) == pytest.approx(short, abs=1e-10)
    conditioned = pyro.condition(model, data=model.data({"y": torch.cat([y, y[:, :2]], 1)}))  # Pyro wants states
    assert elbo.loss(conditioned, nothing, longer, mask=mask) == pytest.approx(short, abs=1e-10)


def test_do_and_condition_on_a_selector_and_a_readout():
    net, model, x = small(atoms=2)
    y = torch.tensor([[0, 1, 2], [2, 2, 0]])
    elbo = TraceEnum_ELBO(max_plate_nesting=model.max_plate_nesting)
    sentences = [
        net.sentence(x=x_).observe({f"y_{i}": int(v) for i, v in enumerate(y_)}) for x_, y_ in zip(x, y, strict=True)
    ]
    done = sum(float(reference.log_evidence(s.state.model, s.state.evidence)) for s in (s.do(c=1) for s in sentences))
    for model_, more in [
        (poutine.do(model, data={"c": torch.tensor(1)}), {}),
        (poutine.do(model, data=model.data({"c": torch.ones(2, dtype=torch.long)})), {}),
        (model, {"do": {"c": torch.ones(2, dtype=torch.long)}}),
    ]:
        assert -elbo.loss(model_, nothing, x, y, **more) == pytest.approx(done, abs=1e-10)
    observed = sum(
        float(reference.log_evidence(s.state.model, s.state.evidence)) for s in (s.observe(W_q_0=0) for s in sentences)
    )
    data = model.data({"W_q_0": torch.zeros(2, dtype=torch.long), "y": y})
    assert -elbo.loss(pyro.condition(model, data=data), nothing, x) == pytest.approx(observed, abs=1e-10)


def test_do_of_each_words_own_choice():
    net, model, x = small(per="word")
    c = torch.tensor([[0, 2, 1], [1, 1, 0]])
    result = model(x, do={"c_0": c}, record=["x_1"])["x_1"]
    done = net.sentence(x=x[0]).do({f"c_0_{i}": int(state) for i, state in enumerate(c[0])})
    torch.testing.assert_close(result[0, 0], torch.stack([done[f"x_1_{i}"] for i in range(3)]))


def test_do_of_a_deterministic_family():
    net, model, x = small(slices=2)
    patch = torch.randn(2, 3, 4, dtype=D)
    result = model(x, do={"x_1": patch, "c": torch.tensor([2, 2])}, record=["x_2"])["x_2"]
    nodes = {f"x_1_{i}": patch[0, i] for i in range(3)}
    torch.testing.assert_close(result[0, 1], net.sentence(x=x[0]).do({**nodes, "c": 2})["x_2_1"])


def test_conditioning_what_is_no_site_is_an_error():
    _, model, x = small()
    for data, given in (
        ({"x_1": torch.zeros(2, 3, 4)}, "condition on x_1: expected a random site of the model; got a deterministic"),
        ({"q_0_1": torch.zeros(4)}, "condition on q_0_1: expected the name of a whole family"),
        ({"y_1": torch.tensor(1)}, "allowed: 'y'"),
        ({"c": torch.tensor([0, 1])}, "the 2 dims of sentence, plates and word"),
    ):
        with pytest.raises(bt.BNetError, match=given):
            pyro.condition(model, data=data)(x, record=["x_1"])
    with pytest.raises(bt.BNetError, match="do on x_1"):
        poutine.do(model, data={"x_1": torch.zeros(2, 3, 4)})(x)


def test_do_and_evidence_on_one_node():
    _, model, x = small()
    y, c = torch.tensor([[0, 1, 2], [2, 2, 0]]), torch.tensor([0, 1])
    both = model.data({"c": c, "y": y})
    for given, more in (
        (poutine.do(pyro.condition(model, data=both), data={"c": both["c"]}), {}),
        (pyro.condition(poutine.do(model, data={"c": both["c"]}), data=both), {}),
        (poutine.do(model, data={"y": both["y"]}), {"y": y}),
        (model, {"y": {"c": c}, "do": {"c": c}}),
    ):
        with pytest.raises(bt.EvidenceError, match="do or evidence on a node, not both"):
            given(x, **more)
    with pytest.raises(bt.BNetError, match=r"condition on c: .* a set by do= node"):
        pyro.condition(model, data=both)(x, do={"c": c})


GOOD = {"c": torch.tensor([0, 1]), "y": torch.randn(2, 3, 4, dtype=D)}


@pytest.mark.parametrize(
    "name, value, in_data, told",
    [
        ("c", torch.tensor([0, -1]), True, "states from 0 to 2; got -1"),
        ("c", torch.tensor([0.0, 1.0]), True, "whole numbers, the states; got torch.float32"),
        ("c", torch.tensor([0, 1, 2]), False, r"shape \(2, 1\).*; got shape \(3, 1\)"),
        ("y", GOOD["y"] * torch.nan, True, "finite numbers; got nan"),
        ("y", GOOD["y"].float(), True, "torch.float64, as the net; got torch.float32"),
        ("y", GOOD["y"][..., :3], True, r"got shape \(2, 3, 3\)"),
        ("y", GOOD["y"][:, :2], False, r"shape \(2, 3, 4\).*; got shape \(2, 2, 4\)"),
        ("y", GOOD["y"].tolist(), True, "a tensor; got"),
    ],
)
def test_what_handlers_bring_in_is_checked(name, value, in_data, told):
    """By `model.data`, and, where that is passed by or cannot know, in the run."""
    _, model, x = small(observe=Normal(1.0))
    raw = value
    if isinstance(value, Tensor):
        raw = value.unsqueeze(-1) if name == "c" else value
        if in_data:
            with pytest.raises(bt.BNetError, match=rf"data\['{name}'\].*{told}"):
                model.data({name: value})
        else:
            assert model.data({name: value})[name].equal(raw)
    for how, handler in (("condition", poutine.condition), ("do", poutine.do)):
        if how == "do" and not isinstance(value, Tensor):
            continue  # Pyro refuses it
        with pytest.raises(bt.BNetError, match=f"{how} on {name}: .*{told}"):
            handler(model, data={name: raw})(x)
    with pytest.raises(bt.BNetError, match=rf"y\['{name}'\]: "):
        model(x, {name: value})


def test_do_sets_all_sentences_to_one_value_and_condition_sees_each():
    _, model, x = small()
    one = model.data({"c": torch.tensor([2])})
    done = poutine.do(model, data=one)(x, record=["x_1"])["x_1"]
    assert done.equal(model(x, do={"c": torch.tensor(2)}, record=["x_1"])["x_1"])
    with pytest.raises(bt.BNetError, match=r"condition on c: expected shape \(2, 1\)"):
        pyro.condition(model, data=one)(x)


def test_many_draws_at_once_are_conditioned_on():
    _, model, x = small(prior=1.0, atoms=2)
    samples = Predictive(model, num_samples=5, parallel=True)(x)
    again = Predictive(model, samples, parallel=True, return_sites=["c", "W_q_0", "y"])(x)
    assert all(again[name].equal(samples[name]) for name in again) and again["y"].shape == (5, 2, 3)


@pytest.mark.parametrize("state", [-1, 3])
def test_a_guide_draws_states_that_there_are(state):
    _, model, x = small()

    def guide(x: Tensor, y: Tensor) -> None:
        with pyro.plate("sentence", 2, dim=-2):
            pyro.sample("c", pyro.distributions.Delta(torch.full((2, 1), state)))

    with pytest.raises(bt.BNetError, match=f"c: expected states from 0 to 2; got {state}"):
        TraceEnum_ELBO(max_plate_nesting=2).loss(model, guide, x, torch.zeros(2, 3, dtype=torch.long))


def test_tables_that_are_no_probabilities():
    _, model, x = small(prior=1.0)
    for rows, given in (
        ([0.5, 0.5], r"shape \(3,\); got shape \(2,\)"),
        ([0.5, 0.6, -0.1], "rows of probabilities"),
        ([0.5, 0.5, torch.nan], "rows of probabilities"),
    ):
        data = {"theta_c": torch.tensor(rows, dtype=D)}
        for ask in (lambda: model.data(data), lambda: poutine.do(model, data=data)(x)):  # noqa: B023
            with pytest.raises(bt.BNetError, match=f"theta_c.*{given}"):
                ask()
    assert "c" in pyro.condition(model, data=model.data({"theta_c": torch.tensor([0.5, 0.5, 0.0], dtype=D)}))(x)


def test_what_is_not_seen_changes_no_gradient():
    net, model, x = small(observe=Normal(1.0))
    y, shown = torch.randn(2, 3, 4, dtype=D), torch.tensor([[True, False, True], [True] * 3])
    sigma = net.parameters["y.log_sigma"]
    result = []
    for hidden in (0.0, torch.nan):
        given = torch.where(shown.unsqueeze(-1), y, hidden)
        free = torch.zeros_like(sigma, requires_grad=True)
        trace = poutine.trace(model).get_trace(
            x, given, observed_mask={"y": shown}, do={"c": torch.tensor([0, 1])}, parameters={"y.log_sigma": free}
        )
        result.append(torch.autograd.grad(trace.log_prob_sum(), free)[0])
    assert result[0].isfinite().all() and result[0].equal(result[1])


def test_a_part_of_the_corpus_cannot_sum_its_selector_out():
    _, model, x = small(per="corpus")
    y = torch.tensor([[0, 1, 2], [2, 2, 0]])
    elbo = TraceEnum_ELBO(max_plate_nesting=model.max_plate_nesting)
    with pytest.raises(bt.BNetError, match="total: expected all sentences of the corpus in x, for c is one draw"):
        elbo.loss(model, nothing, x, y, total=20)
    assert elbo.loss(model, nothing, x, y, total=2) == pytest.approx(elbo.loss(model, nothing, x, y))
    samples = [
        float(poutine.trace(model).get_trace(x, {"y": y, "c": torch.tensor([1])[0]}, total=n).log_prob_sum())
        for n in (2, 20)
    ]
    prior = float(torch.log_softmax(model.network.parameters["c.logits"], -1)[1])
    assert samples[1] - prior == pytest.approx(10 * (samples[0] - prior))


def test_a_model_around_it_may_condition_its_own_sites():
    _, model, x = small()

    def around():
        pyro.sample("scale", pyro.distributions.Normal(0.0, 1.0))
        model(x, torch.zeros(2, 3, dtype=torch.long))

    assert "c" in poutine.trace(pyro.condition(around, data={"scale": torch.tensor(1.0)})).get_trace().nodes


REFUSED = [
    ({"y": torch.zeros(2, 3)}, "whole numbers"),
    ({"y": torch.full((2, 3), 3)}, "states from 0 to 2"),
    ({"y": {"x_1": torch.zeros(2, 3, 4)}}, "random family of y"),
    ({"observed_mask": {"y": torch.ones(2, 3, dtype=torch.bool)}}, "what is seen, in y"),
    ({"y": {"c": torch.tensor([0, 1])}, "observed_mask": {"c": torch.tensor([True, False])}}, "a readout"),
    ({"y": {"c": torch.tensor([0, 1])}, "do": {"c": torch.tensor([0, 1])}}, "not both"),
    ({"y": torch.zeros(2, 3, dtype=torch.long), "observed_mask": {"y": [[True] * 3] * 2}}, "booleans of shape"),
    ({"total": 1}, "at least the 2 sentences"),
    ({"y": [[0, 1, 2]] * 2}, "y: expected a mapping"),
    ({"do": {"c": torch.tensor([0, 3])}}, r"do\['c'\]: expected states from 0 to 2; got 3"),
    ({"do": {"x_1_0": torch.zeros(2, 4)}}, "one node; allowed: 'x_1'"),
    ({"mask": torch.zeros(2, 3, dtype=torch.bool)}, "mask, sentence 0: expected at least one word"),
    ({"parameters": {"c.logits": torch.zeros(2)}}, "c.logits: expected shape"),
]


def test_bad_input():
    _, model, x = small()
    for arguments, given in REFUSED:
        with pytest.raises(bt.BNetError, match=given):
            model(x, **arguments)


def test_svi_learns_a_table_and_a_matrix():
    net, model, x = small(prior=1.0)
    y = torch.tensor([[0, 1, 2], [2, 2, 0]])

    def guide(x: Tensor, y: Tensor) -> None:
        rows = pyro.param("rows", torch.ones(3, dtype=D), constraint=pyro.distributions.constraints.positive)
        pyro.sample("theta_c", pyro.distributions.Dirichlet(rows))

    def learned(x: Tensor, y: Tensor) -> None:
        model(x, y, parameters={"y.weight": pyro.param("weight", net.parameters["y.weight"].clone())})

    svi = SVI(learned, guide, pyro.optim.Adam({"lr": 0.05}), TraceEnum_ELBO(max_plate_nesting=2))
    losses = [svi.step(x, y) for _ in range(20)]
    assert sum(losses[-5:]) < sum(losses[:5])


def test_vectorized_particles():
    _, model, x = small(atoms=2, prior=1.0)
    y = torch.tensor([[0, 1, 2], [2, 2, 0]])

    def guide(x: Tensor, y: Tensor) -> None:
        for name in model.sites[:4]:
            table = model.network.parameters[name.removeprefix("theta_") + ".logits"]
            rows = pyro.distributions.Dirichlet(torch.ones_like(table))
            pyro.sample(name, rows.to_event(table.dim() - 1))

    def loss(particles: int, **options: bool) -> float:
        elbo = TraceEnum_ELBO(max_plate_nesting=model.max_plate_nesting, num_particles=particles, **options)
        return elbo.loss(model, guide, x, y)

    separate = torch.tensor([loss(1) for _ in range(30)])
    assert abs(loss(30, vectorize_particles=True) - separate.mean()) < 6 * separate.std() / 30**0.5


def test_svi_draws_choices_that_cannot_be_summed_out():
    _, model, x = small(per="word", slices=2)

    def guide(x: Tensor, y: Tensor) -> None:
        logits = pyro.param("logits", torch.zeros(2, 1, 3, 3, dtype=D))
        with pyro.plate("sentence", 2, dim=-3), pyro.plate("word", 3, dim=-1):
            pyro.sample("c_0", pyro.distributions.Categorical(logits=logits))

    for particles in ({}, {"num_particles": 5, "vectorize_particles": True}):
        elbo = TraceEnum_ELBO(max_plate_nesting=model.max_plate_nesting, **particles)
        svi = SVI(model, guide, pyro.optim.Adam({"lr": 0.05}), elbo)
        assert torch.isfinite(torch.tensor(svi.step(x, torch.tensor([[0, 1, 2], [2, 2, 0]]))))
    enumerated = TraceEnum_ELBO(max_plate_nesting=model.max_plate_nesting)
    with pytest.raises(bt.BNetError, match="words do not meet"):
        enumerated.loss(model, pyro.infer.config_enumerate(guide, expand=True), x, torch.zeros(2, 3, dtype=torch.long))


@pytest.mark.parametrize("temperature", [0, 1])
def test_infer_discrete(temperature):
    net, model, x = small(atoms=2)
    y = torch.tensor([[0, 1, 2], [2, 2, 0]])
    first = -1 - model.max_plate_nesting
    result = infer_discrete(model, first_available_dim=first, temperature=temperature)(x, y)
    assert result["c"].shape == (2, 1) and result["W_q_0"].shape == (2, 1)
    if temperature == 0:
        states = {name: int(result[name][0]) for name in ("c", "W_q_0", "W_k_0", "W_v_0")}
        s = net.sentence(x=x[0])
        free = [s.ground.id(name) for name in states]
        known = s.observe({f"y_{i}": int(v) for i, v in enumerate(y[0])}).state.evidence
        runs = list(reference.enumerate_runs(s.state.model, free, known))
        best = max(runs, key=lambda run: sum(float(run.log_prob(node)) for node in [*free, *known]))
        assert states == {name: int(best.states[s.ground.id(name)]) for name in states}


def test_it_is_drawn_with_plates():
    _, model, x = small(per="word", prior=1.0)
    samples = pyro.render_model(model, model_args=(x, torch.zeros(2, 3, dtype=torch.long)), render_distributions=True)
    for text in ("cluster_sentence", "cluster_word", "theta_c_0 -> c_0", "c_0 -> y"):
        assert text in samples.source
    nodes = poutine.trace(model).get_trace(x).nodes  # one site for each family, however many words
    assert {name for name in nodes if not name.startswith("_")} == {"sentence", "word", "theta_c_0", "c_0", "y"}


def test_wanted_families_are_recorded():
    _, model, x = small()
    trace = poutine.trace(model).get_trace(x, record=["x_1"])
    assert trace.nodes["x_1"]["value"].shape == (2, 3, 4) and trace.nodes["x_1"]["infer"]["_deterministic"]
