"""Rows of chains of head selectors along words: the net's own pass, posteriors and EM steps, compared with peers."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

import bnet_transformer as bt
from benchmarks.harness import Figure, differences, figure, measure_peak, ratios, time_calls
from benchmarks.limits import measure_limit
from benchmarks.mixtures import use_one_thread
from bnet_transformer.compiler import CompiledModule
from bnet_transformer.inference import Evidence, factors, posterior
from bnet_transformer.tpm import Attention, Categorical, Concat, Given, Linear, Normal, Select, Weight

WORD, HEADS = ["word"], ["head", "word"]
DIM = 8  # of the nets whose posteriors are measured
TARGETS = {(16, 1024, 1): 3.0, (16, 1024, 64): 1.0}  # states, words, sentences: maximum ratio to the C of hmmlearn
PATH_WORDS = 2_000
EM_SENTENCES, EM_WORDS, EM_STATES, EM_STEPS = 256, 64, 16, 10

Array = NDArray[np.float64]


def net_pass() -> list[Figure]:
    """The pass of a net with a chain of head selectors (each word picks one of K heads of queries, keys and values),
    compared with a concat net of K heads of the same width: without gradients, and forward and backward. Once the
    states of the selectors are enumerated, once they are given for each word. Processor time, one thread."""
    figures = []
    with use_one_thread():
        for heads, dim, words in ((4, 8, 1024), (16, 8, 128), (16, 8, 1024), (16, 64, 128), (16, 64, 1024)):
            figures += _compare_passes(heads, dim, words)
    return figures


def posteriors_of_all_words() -> list[Figure]:
    """P(c_i | y) of all words i of a chain of head selectors (d=8, Normal readout of each word, float64), split into
    the net's own pass (the values of x and the log likelihoods of y, for each state of each word) and the rest, for one
    sentence and for 64 together. Peers get the log likelihoods and the tables: the C functions of hmmlearn (forward,
    backward, and the posterior in numpy; sentence by sentence), Pyro's `DiscreteHMM` (the gradient of its log
    probability), Pyro's TraceEnum_ELBO (16 words), and pgmpy's VariableElimination (the middle word only). The results
    are compared too. Processor time, one thread."""
    figures = []
    with use_one_thread():
        for states in (4, 16):
            for words in (16, 128, 1024):
                for sentences in (1, 64):
                    figures += _compare_posteriors(states, words, sentences)
    return figures


def em_step() -> list[Figure]:
    """A step of `bt.EM` on the tables of a Gaussian hidden Markov model (16 states, 256 sentences of 64 words, 8
    numbers each, float64), compared with an iteration of `hmmlearn.hmm.GaussianHMM` that updates the same tables, and
    with one that updates its means too; and P(c_i | y) compared with `GaussianHMM.predict_proba`. The time of a step is
    that of ten steps in a longer fit. Processor time, one thread."""
    with use_one_thread():
        return _compare_em()


def best_path() -> list[Figure]:
    """`Sentence.most_probable` of a Gaussian hidden Markov model (16 states, 8 numbers for each of 2,000 words,
    float64), compared with `Sentence.log_prob` of the same evidence, and with hmmlearn's Viterbi algorithm, `decode`.
    hmmlearn has neither a graph nor an encoding of evidence. The same for a plate of 5 discrete chains, which hmmlearn
    does not have. Processor time, one thread."""
    with use_one_thread():
        net, _, _ = _create_hidden_markov()
        model = _create_hmmlearn(net, 1, "")
        y = model.sample(PATH_WORDS, 0)[0]
        s = net.sentence(x=torch.zeros(PATH_WORDS, DIM, dtype=torch.float64))
        s = s.observe({f"y_{i}": value for i, value in enumerate(y)})
        calls: dict[str, Callable[[], Any]] = {
            "most_probable": s.most_probable,
            "log_prob": s.log_prob,
            "hmmlearn's Viterbi": lambda: model.decode(y),
        }
        best, (log_prob, path) = calls["most_probable"](), calls["hmmlearn's Viterbi"]()
        assert best.states[0].tolist() == path.tolist()
        spent = time_calls(calls, runs=9, clock=time.process_time)
        subject = f"{EM_STATES} states, {PATH_WORDS:,} words: "
        figures = [figure(f"{subject}{name}", seconds, "s") for name, seconds in spent.items()]
        for name, target in (("log_prob", 3.0), ("hmmlearn's Viterbi", None)):
            figures.append(
                figure(
                    f"{subject}most_probable / {name}", ratios(spent["most_probable"], spent[name]), "", target=target
                )
            )
        figures.append(figure(f"{subject}difference of log P", abs(float(best.log_probs[0]) - log_prob), ""))
        figures.append(figure(f"{subject}peak memory of the job", measure_peak(s.most_probable), "MB"))
        chains = _create_plate_of_chains(5, EM_STATES).sentence(PATH_WORDS)
        chains = chains.observe({"e_0": torch.randint(EM_STATES, (5, PATH_WORDS))})
        calls = {"most_probable": chains.most_probable, "log_prob": chains.log_prob}
        spent, subject = time_calls(calls, runs=5, clock=time.process_time), f"5 chains in a plate, {subject}"
        figures += [figure(f"{subject}{name}", seconds, "s") for name, seconds in spent.items()]
        compared = ratios(spent["most_probable"], spent["log_prob"])
        return [*figures, figure(f"{subject}most_probable / log_prob", compared, "", target=3.0)]


def _compare_passes(heads: int, dim: int, words: int) -> list[Figure]:
    """The figures of the pass of one size."""
    torch.manual_seed(0)
    x, c = torch.randn(1, words, dim), torch.randint(heads, (1, words))
    chain, concat = create_chain(heads, dim).module(), _create_concat(heads, dim).module()
    settings: dict[str, tuple[CompiledModule, dict[str, Tensor] | None]] = {
        "concat": (concat, None),
        "enumerated": (chain, None),
        "given": (chain, {"c_0": c}),
    }

    def run(name: str) -> Tensor:
        module, do = settings[name]
        state, plan = module.execute(module.check_request(["x_1"], x, do=do))
        return state.values[plan.outputs[0]]

    def run_back(name: str) -> None:
        run(name).square().mean().backward()

    calls: dict[str, Callable[[], object]] = {}
    for name in settings:
        calls[name] = partial(torch.no_grad()(run), name)
        calls[f"{name}, backward"] = partial(run_back, name)
    spent = time_calls(calls, runs=9, warm=2, clock=time.process_time)
    subject = f"{heads} heads, d={dim}, {words:,} words: "
    figures = [figure(f"{subject}concat net", spent["concat"], "s")]
    for name in ("enumerated", "given"):
        figures.append(figure(f"{subject}{name}", spent[name], "s"))
        for suffix in ("", ", backward"):
            compared = ratios(spent[name + suffix], spent["concat" + suffix])
            figures.append(figure(f"{subject}{name}{suffix} / concat", compared, "", target=3.0))
    if (heads, dim, words) == (16, 64, 1024):
        figures += measure_limit(calls["enumerated"], spent["enumerated"], name=f"{subject}enumerated")
    return figures


def _compare_posteriors(states: int, words: int, sentences: int) -> list[Figure]:
    """The figures of the posteriors of one size."""
    torch.manual_seed(0)
    module = create_chain(states, DIM).to(torch.float64).module().eval()
    x, y = torch.randn(sentences, words, DIM).double(), 0.3 * torch.randn(sentences, words, DIM).double()
    initial, table = (module.store[f"c_0/{name}"].detach().softmax(-1) for name in ("initial", "logits"))
    log_likelihoods = _compute_log_likelihoods(module, x, y)
    arrays = initial.numpy(), table.numpy(), np.ascontiguousarray(log_likelihoods.numpy())
    pairs = table.log().expand(words, states, states).clone()
    pairs[0] = initial.log()  # Pyro's chain has a transition before the first word

    calls: dict[str, Callable[[], Any]] = {
        "ours": lambda: posterior(module, "c_0", {"y": Evidence(y)}, x),
        "hmmlearn's C": lambda: _posteriors_of_hmmlearn(*arrays),
        "Pyro's DiscreteHMM": lambda: _posteriors_of_discrete_hmm(initial.log(), pairs, log_likelihoods),
    }
    results = {name: torch.as_tensor(call()) for name, call in calls.items()}
    with _record_passes(module) as (passes, likelihoods):
        spent = time_calls(calls, runs=21 if sentences * words < 10_000 else 5, clock=time.process_time)
    count = len(spent["ours"])
    evaluation = [a + b for a, b in zip(passes[-count:], likelihoods[-count:], strict=True)]
    remainder = differences(spent["ours"], evaluation)
    subject = f"{states} states, {words:,} words, {sentences} {'sentence' if sentences == 1 else 'sentences'}: "
    target = TARGETS.get((states, words, sentences))
    middle, single = words // 2, sentences == 1
    figures = [
        figure(f"{subject}own pass", evaluation, "s"),
        figure(f"{subject}rest", remainder, "s"),
        figure(f"{subject}rest / hmmlearn's C", ratios(remainder, spent["hmmlearn's C"]), "", target=target),
    ]
    figures += [figure(f"{subject}{name}", spent[name], "s") for name in list(calls)[1:]]
    errors = [(results["ours"] - results[name]).abs().max().item() for name in list(calls)[1:]]
    if single and words <= 16:
        start = time.process_time()
        expected = _posteriors_of_trace_enum(initial.log(), table.log(), log_likelihoods[0])
        figures.append(figure(f"{subject}Pyro's TraceEnum_ELBO", time.process_time() - start, "s"))
        errors.append((results["ours"][0] - expected).abs().max().item())
    if single and words <= 128:
        model = _create_pgmpy(*arrays)
        start = time.process_time()
        observed = {f"e{i}": 1 for i in range(words)}
        values = torch.as_tensor(model.query([f"c{middle}"], observed, show_progress=False).values)
        figures.append(figure(f"{subject}pgmpy, one word", time.process_time() - start, "s"))
        errors.append((results["ours"][0, middle] - values).abs().max().item())
    figures.append(figure(f"{subject}greatest difference from a peer", max(errors), ""))
    return [*figures, figure(f"{subject}peak memory of the job", measure_peak(calls["ours"]), "MB")]


def _compare_em() -> list[Figure]:
    """The figures of EM steps, and of posteriors by the public method of hmmlearn."""
    net, x, y = _create_hidden_markov()
    data, tables = y.flatten(0, 1).numpy(), ["c_0.initial", "c_0.logits"]
    lengths = [EM_WORDS] * EM_SENTENCES

    def fit(steps: int) -> Any:
        method = bt.EM(steps=steps)
        return bt.fit(net, (x, y), method=method, learn=tables, every=10**6, progress=False)

    def fit_hmmlearn(steps: int, params: str) -> Any:
        return _create_hmmlearn(net, steps, params).fit(data, lengths)

    module = net.module().eval()
    model = _create_hmmlearn(net, 1, "st")
    fits = {
        "ours": fit,
        "hmmlearn": partial(fit_hmmlearn, params="st"),
        "hmmlearn with means": partial(fit_hmmlearn, params="stm"),
    }
    calls: dict[str, Callable[[], Any]] = {
        f"{name}, {count}": partial(function, count) for count in (1, 1 + EM_STEPS) for name, function in fits.items()
    }
    calls["posterior"] = lambda: posterior(module, "c_0", {"y": Evidence(y)}, x)
    calls["predict_proba"] = lambda: model.predict_proba(data, lengths)
    probs = torch.as_tensor(calls["predict_proba"]()).unflatten(0, (EM_SENTENCES, EM_WORDS))
    fitted, fitted_model = fit(1 + EM_STEPS).net.parameters, fit_hmmlearn(1 + EM_STEPS, "st")
    error = (fitted["c_0.logits"].softmax(-1) - torch.as_tensor(fitted_model.transmat_)).abs().max().item()
    spent = time_calls(calls, runs=7, clock=time.process_time)
    steps = {
        name: [seconds / EM_STEPS for seconds in differences(spent[f"{name}, {1 + EM_STEPS}"], spent[f"{name}, 1"])]
        for name in fits
    }
    return [
        figure("EM step", steps["ours"], "s"),
        figure("EM iteration of hmmlearn", steps["hmmlearn"], "s"),
        figure("EM iteration of hmmlearn, with means", steps["hmmlearn with means"], "s"),
        figure("EM step / hmmlearn", ratios(steps["ours"], steps["hmmlearn"]), ""),
        figure(f"greatest difference of the tables after {1 + EM_STEPS} steps", error, ""),
        figure("fit of one step: peak memory of the job", measure_peak(lambda: fit(1)), "MB"),
        figure("posteriors", spent["posterior"], "s"),
        figure("posteriors of hmmlearn", spent["predict_proba"], "s"),
        figure("posteriors / hmmlearn", ratios(spent["posterior"], spent["predict_proba"]), ""),
        figure("greatest difference of posteriors", (calls["posterior"]() - probs).abs().max().item(), ""),
    ]


# the nets


def create_chain(heads: int, dim: int) -> bt.BNet:
    """Return a net of one slice in which each word picks a head, and the picks are a Markov chain along the words."""
    pick = {"head": "c"}
    reads = [bt.Arrow("q", pick=pick), *(bt.Arrow(r, "every", pick=pick) for r in "kv")]
    nodes = [
        *_create_projections(dim),
        bt.Node("c", Categorical(heads), [bt.Arrow("c", "before")], plates=WORD),
        bt.Node("x", Attention(), reads, plates=WORD),
    ]
    return _create_net(nodes, heads, dim)


def _create_plate_of_chains(chains: int, states: int) -> bt.BNet:
    """Return the net of a hidden Markov model in each plate."""
    latent = bt.Node("z", Categorical(states), [bt.Arrow("z", "before")], plates=HEADS)
    stack = bt.Stack([latent, bt.Node("e", Categorical(states), ["z"], plates=HEADS)])
    return bt.BNet(bt.Declaration([stack], plates=[bt.Plate("head", chains)]), seed=0).to(torch.float64)


def _create_concat(heads: int, dim: int) -> bt.BNet:
    """Return the net whose words have all heads, summed by W_o."""
    nodes = [
        *_create_projections(dim),
        bt.Node("a", Attention(), ["q", bt.Arrow("k", "every"), bt.Arrow("v", "every")], plates=HEADS),
        bt.Node("W_o", Weight((dim, dim)), plates=["head"]),
        bt.Node("x", Concat(), ["W_o", "a"], plates=WORD),
    ]
    return _create_net(nodes, heads, dim)


def _create_projections(dim: int) -> list[bt.Node]:
    """Return the weights, queries, keys and values of all heads."""
    weights = [bt.Node(f"W_{r}", Weight((dim, dim)), plates=["head"]) for r in "qkv"]
    return weights + [bt.Node(r, Linear(), [f"W_{r}", "x"], plates=HEADS) for r in "qkv"]


def _create_net(nodes: list[bt.Node], heads: int, dim: int) -> bt.BNet:
    """Return the net with these nodes in its slice and a Normal readout of each word."""
    readout = bt.Node("y", Normal(0.5), ["x"], plates=WORD)
    stack = bt.Stack(nodes, [bt.Node("x", Given(dim), plates=WORD)], [readout])
    return bt.BNet(bt.Declaration([stack], plates=[bt.Plate("head", heads)]))


def _create_hidden_markov() -> tuple[bt.BNet, Tensor, Tensor]:
    """Return a Gaussian hidden Markov model, words without effect, and observations drawn from the model."""
    nodes = [
        bt.Node("c", Categorical(EM_STATES), [bt.Arrow("c", "before")], plates=WORD),
        bt.Node("x", Select((DIM,)), ["c"], plates=WORD),
    ]
    readout = bt.Node("y", Normal(0.8), ["x"], plates=WORD)
    stack = bt.Stack(nodes, [bt.Node("x", Given(DIM), plates=WORD)], [readout])
    net = bt.BNet(bt.Declaration([stack])).to(torch.float64)
    generator = np.random.default_rng(0)
    samples = [_create_hmmlearn(net, 1, "").sample(EM_WORDS, generator.integers(2**31))[0] for _ in range(EM_SENTENCES)]
    y = torch.as_tensor(np.stack(samples))
    start = bt.BNet(net.declaration, seed=1).to(torch.float64).parameters  # the fits start at other tables
    return net.replace({name: start[name] for name in ("c_0.initial", "c_0.logits")}), torch.zeros_like(y), y


# peers


def _create_hmmlearn(net: bt.BNet, steps: int, params: str) -> Any:
    """Return the model of hmmlearn with the parameters of a Gaussian hidden Markov model."""
    from hmmlearn.hmm import GaussianHMM

    model = GaussianHMM(EM_STATES, "spherical", params=params, init_params="", n_iter=steps, tol=-np.inf)
    model.n_features = DIM
    model.startprob_, model.transmat_ = (
        net.parameters[name].softmax(-1).numpy() for name in ("c_0.initial", "c_0.logits")
    )
    model.means_ = net.parameters["x_1.values"].numpy()
    model.covars_ = np.full(EM_STATES, float(net.parameters["y.log_sigma"].exp()) ** 2)
    return model


def _posteriors_of_hmmlearn(initial: Array, table: Array, log_likelihoods: Array) -> Array:
    """Return the posteriors `[sentence, word, state]` by the C functions of hmmlearn."""
    from hmmlearn import _hmmc

    posteriors = np.empty_like(log_likelihoods)
    for k, values in enumerate(log_likelihoods):
        log_joint = _hmmc.forward_log(initial, table, values)[1] + _hmmc.backward_log(initial, table, values)
        probs = np.exp(log_joint - log_joint.max(1, keepdims=True))
        posteriors[k] = probs / probs.sum(1, keepdims=True)
    return posteriors


def _posteriors_of_discrete_hmm(initial: Tensor, pairs: Tensor, log_likelihoods: Tensor) -> Tensor:
    """Return the posteriors as the gradient of the log probability of Pyro's `DiscreteHMM`."""
    import pyro.distributions as dist

    class Table(dist.TorchDistribution):  # type: ignore[misc]
        """The likelihood of each state, as the distribution of an observation without a value."""

        has_rsample, arg_constraints = False, {}

        def __init__(self, table: Tensor) -> None:
            self.table = table
            super().__init__(table.shape, validate_args=False)

        def expand(self, batch_shape: tuple[int, ...], _instance: object = None) -> Table:
            return Table(self.table.expand(batch_shape))

        def log_prob(self, value: Tensor) -> Tensor:
            return self.table

    with torch.enable_grad():
        table = log_likelihoods.detach().requires_grad_()
        model = dist.DiscreteHMM(initial, pairs, Table(table), validate_args=False)
        total = model.log_prob(torch.zeros(table.shape[:-1], dtype=table.dtype)).sum()
        (posteriors,) = torch.autograd.grad(total, table)
    return posteriors


def _posteriors_of_trace_enum(initial: Tensor, table: Tensor, log_likelihoods: Tensor) -> Tensor:
    """Return the posteriors of one sentence by Pyro's enumeration."""
    import pyro
    import pyro.distributions as dist
    from pyro.infer import TraceEnum_ELBO, config_enumerate

    @config_enumerate  # type: ignore[untyped-decorator]
    def model() -> None:
        c = None
        for i in pyro.markov(range(len(log_likelihoods))):
            c = pyro.sample(f"c{i}", dist.Categorical(logits=initial if c is None else table[c]))
            pyro.factor(f"e{i}", log_likelihoods[i][c])

    marginals = TraceEnum_ELBO(max_plate_nesting=0).compute_marginals(model, lambda: None)
    return torch.stack([marginals[f"c{i}"].probs.reshape(-1) for i in range(len(log_likelihoods))])


def _create_pgmpy(initial: Array, table: Array, log_likelihoods: Array) -> Any:
    """Return pgmpy's elimination on the chain of the first sentence, with the likelihoods as observed binary nodes."""
    from pgmpy.factors.discrete import TabularCPD
    from pgmpy.inference import VariableElimination
    from pgmpy.models import DiscreteBayesianNetwork

    (values, *_), states = log_likelihoods, len(initial)
    words = range(len(values))
    edges = [(f"c{i - 1}", f"c{i}") for i in words[1:]] + [(f"c{i}", f"e{i}") for i in words]
    network = DiscreteBayesianNetwork(edges)
    for i in words:
        chance = 0.999 * np.exp(values[i] - values[i].max())
        parents = {} if i == 0 else {"evidence": [f"c{i - 1}"], "evidence_card": [states]}
        network.add_cpds(TabularCPD(f"c{i}", states, initial[:, None] if i == 0 else table.T, **parents))
        network.add_cpds(TabularCPD(f"e{i}", 2, np.stack([1 - chance, chance]), [f"c{i}"], [states]))
    return VariableElimination(network)


# measurement


def _compute_log_likelihoods(module: CompiledModule, x: Tensor, y: Tensor) -> Tensor:
    """Return `log P(y_i | c_i)`, `[sentence, word, state]`."""
    with torch.no_grad():
        mean = module(x, want=["x_1"])["x_1"]
        distance = torch.distributions.Normal(mean, module.store["y/log_sigma"].exp())
        return distance.log_prob(y).sum(-1).movedim(0, -1).contiguous()


@contextmanager
def _record_passes(module: CompiledModule) -> Iterator[tuple[list[float], list[float]]]:
    """Record the seconds of each run of a module, and of each log likelihood of evidence."""
    times: tuple[list[float], list[float]] = [], []
    run, log_likelihood = module.execute, factors.evidence_log_prob

    def time_call(function: Callable[..., Any], seconds: list[float]) -> Callable[..., Any]:
        def timed(*args: Any) -> Any:
            start = time.process_time()
            result = function(*args)
            seconds.append(time.process_time() - start)
            return result

        return timed

    module.__dict__["execute"] = time_call(run, times[0])
    factors.evidence_log_prob = time_call(log_likelihood, times[1])
    try:
        yield times
    finally:
        del module.__dict__["execute"]
        factors.evidence_log_prob = log_likelihood
