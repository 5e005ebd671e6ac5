"""`fit`: a net with choices and sentences in, what can be known of its parameters out; `explain_fit`: how, before.

`fit_from_pyro` makes the same of what a user found with Pyro on `net.pyro()`, by a model, guide or kernel of their own.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, replace
from inspect import signature
from pathlib import Path
from typing import Any, cast

import pyro.poutine as poutine
import torch
from pyro.infer import MCMC, Importance
from torch import Tensor
from torch.distributions import Distribution

from bnet_transformer._core.checks import check_choice, check_float, check_int, check_mapping, check_seed
from bnet_transformer._core.config_options import suggest_config_for_options
from bnet_transformer._core.distributed import distributed_context, resolve_device
from bnet_transformer._core.hashing import compute_digest, derive_seed
from bnet_transformer._core.memory import check_memory, translate_memory_errors
from bnet_transformer._core.torch_context import enable_gradients, fork_torch_rng, seed_rngs
from bnet_transformer.bridges.pyro import PyroModel
from bnet_transformer.bridges.pyro.checks import check_probabilities
from bnet_transformer.compiler.plan import CROSS_WORD_HINT
from bnet_transformer.cost.net_cost import count_plan_flops
from bnet_transformer.data import Batch, read_batch
from bnet_transformer.declare import Network, as_network
from bnet_transformer.errors import BNetError, BudgetError, UnsupportedError, unknown_name_error
from bnet_transformer.inference.factors import OVER_BUDGET_HINT, EliminationProblem, build_elimination_problem
from bnet_transformer.inference.routing import Route
from bnet_transformer.learning.checkpoint import Checkpoints, lock_checkpoints
from bnet_transformer.learning.fit.head_summary import (
    align_heads,
    find_representative,
    log_likelihoods,
    samples_to_parameters,
)
from bnet_transformer.learning.fit.problem import (
    EM,
    MAP,
    NUTS,
    SVI,
    FitObjective,
    FitProblem,
    Method,
    PointMethod,
    select_learnable,
)
from bnet_transformer.learning.fit.restarts import DEFAULT_BATCH_SIZE, fit_point, replace_learned
from bnet_transformer.learning.fit.result import Fit
from bnet_transformer.learning.fit.sampling import fit_nuts, fit_svi
from bnet_transformer.learning.training.configs import LoopConfig
from bnet_transformer.learning.training.loop import N
from bnet_transformer.reference import BUDGET

# Every method: its config, and the function that solves a problem by it. A new method is one row.
METHODS: dict[type[Method], Callable[[FitProblem, Any], Fit[Network]]] = {
    MAP: fit_point,
    EM: fit_point,
    SVI: fit_svi,
    NUTS: fit_nuts,
}
MIN_EFFECTIVE_DRAWS = 20.0  # effective draws below which importance sampling tells little
RESULT_FORMS = "pyro.infer.MCMC or Importance after its run, a mapping of samples, or a guide"
LOOP_OPTIONS = ("every", "checkpoints", "device", "progress")
SAMPLED_CHOICES_HINT = "method=bt.SVI(choices='sampled') draws them"
ALTERNATIVES = {  # what a fit can do about choices that cannot be summed, for what other questions can do
    CROSS_WORD_HINT: "method=bt.SVI(choices='sampled')",
    OVER_BUDGET_HINT: "a larger budget=; method=bt.SVI(choices='sampled')",
}


@suggest_config_for_options(method=tuple(METHODS), checkpoints=(Checkpoints,))
@enable_gradients()
def fit(
    net: N,
    data: object,
    *,
    method: Method | str = "map",
    held_out: object = None,
    batch: int | None = None,
    spread: float | None = None,
    learn: Collection[str] | None = None,
    missing: bool = False,
    budget: int = BUDGET,
    every: int | None = None,
    checkpoints: Checkpoints | str | Path | None = None,
    seed: int = 0,
    device: str | torch.device | None = None,
    progress: bool | None = None,
) -> Fit[N]:
    """Fit the parameters of a net with choices to sentences and what is observed of them; the net stays as it is.

    All methods share one objective, the exact log evidence plus the log prior: Dirichlet on the tables where the net
    has a `prior`, Normal of a `spread` on the weights. Of several restarts a tenth of `data` is held out where
    `held_out` is None; the best then goes on with all sentences for a quarter of the steps more. Ctrl-C gives the best
    so far. Under torchrun each process takes its share of each batch.

    Args:
        net: A net with a readout.
        data: A list of pairs (sentence, observed), or a tuple (x, y) of arrays or lists.
        method: `bt.MAP`, `bt.EM`, `bt.SVI` or `bt.NUTS` with their options, or `"map"`, `"em"`, `"svi"`, `"nuts"` for
            one with its defaults.
        held_out: Data, in the forms of `data`, that choose the best restart and step of MAP and EM.
        batch: Sentences of a step; None for 256, or all of fewer.
        spread: The standard deviation of a Normal prior on every weight; None for no prior. SVI and NUTS need one.
        learn: The names of the parameters to learn; None for all above a readout.
        missing: True takes a word whose numbers are all NaN as not observed.
        budget: The most joint states of a sentence that are summed.
        every: Steps from one measure, and checkpoint, to the next; None for ten in a fit.
        checkpoints: Where checkpoints go, and whether the fit goes on from one; a folder alone begins a new fit. NUTS
            has none.
        seed: The seed of restarts, minibatches and draws.
        device: Where to compute; None for where the net is.
        progress: True for a progress bar, False for none, None for one in a terminal.

    Returns:
        The fitted net, what is known of its parameters, and the questions that one asks of a fit.

    Raises:
        BNetError: Where an option is out of its range or does not go with the net, or every restart diverged.
        BudgetError: Where more joint states than `budget` would be summed.
        UnsupportedError: Where choices of different words meet, so that they cannot be summed word by word.

    >>> import bnet_transformer as bt
    >>> words = ["the", "cat", "sat"]
    >>> net = bt.bayesuvius(4, heads=2, vocabulary=words, observe=bt.tpm.Categorical(3), prior=1.0)
    >>> data = [("the cat sat", "cat the sat"), ("sat the cat", "the sat cat")]
    >>> f = bt.fit(net, data, method=bt.EM(steps=4))
    >>> f.pi.shape, f.net
    (torch.Size([2]), <BNet bayesuvius: ...>)
    """
    config = resolve_method(method)
    loop = LoopConfig(every, Checkpoints.from_value(checkpoints), progress)
    if isinstance(config, NUTS) and checkpoints is not None:
        wanted = "None: the state of Pyro's sampler cannot be saved"
        allowed = "Ctrl-C, which gives the draws so far, and f.save(path); method=bt.MAP(), bt.EM() or bt.SVI()"
        raise BNetError("checkpoints", expected=wanted, actual="a folder, with nuts", allowed=allowed)
    problem = create_problem(net, data, config, held_out, batch, spread, learn, missing, budget, seed)
    try:
        fitted = _solve(replace(problem, loop=loop), config, resolve_device(device, problem.objective.network))
    except (BudgetError, UnsupportedError) as error:
        if error.allowed not in ALTERNATIVES:
            raise
        raise type(error)(
            error.subject, expected=error.expected, actual=error.actual, allowed=ALTERNATIVES[error.allowed]
        ) from error
    made = fitted.net if isinstance(net, Network) else cast(Callable[[Network], Any], type(net))(fitted.net)
    return replace(fitted, net=made, missing=missing, data=problem.corpus)  # type: ignore[return-value]


def resolve_method(method: Method | str) -> Method:
    """The config of a method, which a caller may give by its name alone.

    Args:
        method: A config, or its `name`.

    Returns:
        The config; of a name, one with default options.

    Raises:
        BNetError: Where there is no such method.
    """
    if isinstance(method, Method):
        return method
    named = {kind.name: kind for kind in METHODS}
    check_choice("method", method, named)
    return named[method]()


def create_problem(
    net: object,
    data: object,
    method: Method,
    held_out: object = None,
    batch: int | None = None,
    spread: float | None = None,
    learn: Collection[str] | None = None,
    missing: bool = False,
    budget: int = BUDGET,
    seed: int = 0,
) -> FitProblem:
    """What `fit` is asked, checked as a whole; the arguments are those of `fit`.

    Returns:
        The problem, on the device of the net.

    Raises:
        BNetError: Where an option is out of its range, or does not go with the net or the method.
    """
    network = as_network(net)
    network.check_single_dtype()
    check_choice("missing", missing, (True, False))
    batch = None if batch is None else check_int("batch", batch)
    spread = None if spread is None else check_float("spread", spread, above=0)
    if held_out is not None and not method.is_point:
        wanted = "None: held-out sentences choose among the restarts and steps of a point estimate"
        allowed = "method=bt.MAP(...) or bt.EM(...); f.log_likelihood(held_out) of the fit"
        raise BNetError("held_out", expected=wanted, actual=f"data, with {method.name}", allowed=allowed)
    corpus = read_batch(network, data, missing=missing)
    judge = None if held_out is None else read_batch(network, held_out, "held_out", missing=missing)
    learned = select_learnable(network, tuple(network.get_spec(name) for name in corpus.evidence), learn, spread)
    problem = FitProblem(
        FitObjective(network, learned, check_int("budget", budget)), corpus, judge, batch, check_seed(seed)
    )
    _check_tables(problem.objective, method)
    _check_corpus_choices(problem)
    _check_spread(problem.objective, method)
    size = sum(network.parameters[name].nbytes for name in learned.names)
    if isinstance(method, PointMethod):  # parameters and the two moments of Adam
        check_memory(f"{method.restarts} restarts", 3 * method.restarts * size, "fewer restarts=")
    elif isinstance(method, SVI | NUTS):
        draws = method.draws * (method.chains if isinstance(method, NUTS) else 1)
        check_memory(f"{draws} draws", draws * size, "fewer draws=, chains= or names in learn=")
    return problem


def _solve(problem: FitProblem, method: Method, device: torch.device) -> Fit[Network]:
    """The fit by a method, on the device and in the processes that there are."""
    objective, loop, judge = problem.objective, problem.loop, problem.held_out
    network = objective.network
    settings = {  # what a resumed fit must share with the fit that wrote the checkpoint
        **method.settings,
        "batch": problem.batch,
        "spread": objective.learned.spread,
        "seed": problem.seed,
        "learn": list(objective.learned.names),
        "sentences": len(problem.corpus),
        "data": problem.corpus.digest() + ("" if judge is None else judge.digest()),
        "parameters": compute_digest(network.parameters),
    }
    with (
        translate_memory_errors("fit"),
        distributed_context(device) as here,
        fork_torch_rng(here.device),
        lock_checkpoints(loop.checkpoints, here.is_main_process),
    ):
        if (
            here.world_size > 1 and objective.has_corpus_choice and not isinstance(method, NUTS)
        ):  # whose chains have all sentences
            wanted = "choices of sentences or words: a share of a corpus with one draw has no evidence of its own"
            raise BNetError("torchrun", expected=wanted, actual="per='corpus'", allowed="one process")
        alike = {"net": network, "budget": objective.budget, "loop": (method, loop.shared_settings)}
        here.assert_same("fit", **settings, **alike, checkpoint=loop.has_checkpoint)
        objective.to(here.device)
        corpus, judge = problem.corpus.to(here.device), None if judge is None else judge.to(here.device)
        there = replace(problem, corpus=corpus, held_out=judge, settings=settings, ranks=here)
        return METHODS[type(method)](there, method)


def _check_tables(objective: FitObjective, method: Method) -> None:
    """Refuse to learn a table where the density of its prior has no greatest value, or none at probabilities of 0."""
    for name, concentration in objective.learned.tables.items():
        flat = concentration == 1.0
        if not (method.is_point and flat) and bool(objective.network.parameters[name].isneginf().any()):
            got = f"method={method.name!r}" + ("" if flat else f", prior={concentration:g}")
            wanted = "method='em' or 'map' and no prior for a table with probabilities of 0"
            raise BNetError(name, expected=wanted, actual=got, allowed=f"learn= without {name}")
        if concentration < 1 and method.is_point:
            least = "a concentration of at least 1: below it the posterior density has no greatest value"
            raise BNetError(f"the prior of {name}", expected=least, actual=concentration, allowed="svi, nuts")


def _check_corpus_choices(problem: FitProblem) -> None:
    """Refuse minibatches of sentences that share one draw, and say what such a net is."""
    if not problem.objective.has_corpus_choice:
        return
    if problem.batch is not None and problem.batch < len(problem.corpus):
        wanted = f"all {len(problem.corpus)} sentences at each step: they share one draw, and a part of them is biased"
        raise BNetError("batch", expected=wanted, actual=problem.batch, allowed="per='sentence'")
    told = "per='corpus' is model selection, not a mixture: its log odds grow with the data, and one head takes all"
    warnings.warn(told, stacklevel=6)


def _check_spread(objective: FitObjective, method: Method) -> None:
    """Refuse a spread that the type of the net cannot square, and a posterior of weights without one."""
    learned, dtype = objective.learned, objective.network.dtype
    spread, real = learned.spread, torch.finfo(dtype)
    if spread is not None and not real.tiny <= spread * spread <= real.max:
        raise BNetError("spread", expected=f"a standard deviation whose square {dtype} can hold", actual=spread)
    if not method.is_point and learned.weights and spread is None:
        got = f"none for {', '.join(learned.weights[:3])}"
        allowed = "spread=1.0, say"
        if learned.tables:
            allowed += f"; learn={[*learned.tables]}, which leaves the weights as they are"
        raise BNetError(
            "spread", expected="a prior on the weights: their standard deviation", actual=got, allowed=allowed
        )


def explain_fit(net: object, data: object, *, method: Method | str = "map", **options: Any) -> Route:
    """Say how `fit` computes a step, with the same arguments, without fitting.

    Args:
        net: As for `fit`.
        data: As for `fit`.
        method: As for `fit`.
        **options: The other options of `fit`. Checkpoints, the device and the progress bar change no route, and no
            checkpoint is read or written.

    Returns:
        The route: the algorithm, the joint states of the choices of a sentence, the FLOPs of the compiled passes of a
        step (all restarts; without those of the gradient, about twice as many), and the node that rules elimination
        out, if any. Where it is ruled out and choices are not drawn, `fit` refuses.

    Raises:
        BNetError: Where `fit` would refuse an option.

    >>> import bnet_transformer as bt
    >>> net = bt.bayesuvius(4, heads=2, vocabulary=["the", "cat"], observe=bt.tpm.Categorical(2))
    >>> route = explain_fit(net, [("the cat", "cat the"), ("cat the", "the cat")], method=bt.EM())
    >>> route.algorithm, route.states
    ('elimination', 2)
    """
    config = resolve_method(method)
    problem = create_problem(net, data, config, **{k: v for k, v in options.items() if k not in LOOP_OPTIONS})
    objective, corpus = problem.objective, problem.corpus
    structure, states, names, (node, fault) = analyse_choices(objective, corpus)
    title = f"fit by {config.name}"
    if isinstance(config, SVI) and config.choices == "sampled":
        reason = "choices='sampled' was asked for"
        reason += f", and elimination cannot: {fault}" if fault else "; elimination could sum them"
        return Route(title, "sampling", reason, node, states, is_exact=False)
    if fault is not None:
        reason = f"elimination cannot sum the choices: {fault}; {SAMPLED_CHOICES_HINT}"
        return Route(title, "sampling", reason, node, states, is_exact=False)
    flops = count_step_flops(problem, config, structure)
    if not structure.enumerated:
        return Route(title, "compiled", "no choice is open: one pass gives the log evidence", flops=flops)
    reason = f"the choices of each sentence ({names}) are summed out of the exact log evidence"
    if not objective.learned.weights:
        reason += "; only tables are learned, so the likelihoods of all joint states are computed once"
    return Route(title, "elimination", reason, states=states, flops=flops)


explain_fit.__signature__ = signature(fit)  # type: ignore[attr-defined]  # what help() shows and bt.explain checks


def analyse_choices(
    objective: FitObjective, corpus: Batch
) -> tuple[EliminationProblem, int, str, tuple[str | None, str | None]]:
    """What the log evidence of sentences needs of the net, whatever the numbers.

    Args:
        objective: The log evidence, with its budget.
        corpus: The sentences; of their evidence the structure alone counts.

    Returns:
        The question; the most joint states of choices on which one observed family depends; these choices; and where
        they cannot be summed the name of the node and the fault in words, else None and None.
    """
    forms = {k: (told.observed is None, told.value.is_floating_point()) for k, told in corpus.evidence.items()}
    question = build_elimination_problem(objective.module, forms, None, (), ())
    network, words = objective.network, {stack: value.shape[1] for stack, value in corpus.x.items()}
    counts = (
        (math.prod(network.count_states(i, words) for i in above), [network.specs[i].group.name for i in above])
        for above in question.ancestor_choices.values()
    )
    states, names = max(counts, default=(1, []))
    told, fault = ", ".join(names), question.fault
    if fault is not None:
        return question, states, told, (fault.subject, str(fault))
    if states > objective.budget:
        over = f"{told} have {states:,} joint states, more than budget={objective.budget:,}"
        return question, states, told, (told, over)
    return question, states, told, (None, None)


def count_step_flops(problem: FitProblem, method: Method, elimination: EliminationProblem) -> int | None:
    """The FLOPs of the compiled passes of one step; None where a TPM does not say what its products are."""
    objective, corpus = problem.objective, problem.corpus
    network = objective.network
    want = (*elimination.outputs, *(network.specs[index].group.name for index in elimination.factor_groups))
    known = frozenset(network.graph.get_group(name).index for name in elimination.fixed)
    words = {stack: value.shape[1] for stack, value in corpus.x.items()}
    is_whole = objective.has_corpus_choice or isinstance(method, NUTS)
    sentences = len(corpus) if is_whole else min(problem.batch or DEFAULT_BATCH_SIZE, len(corpus))
    plan = objective.module.plan(tuple(dict.fromkeys(want)), known, elimination.enumerated)
    flops = count_plan_flops(network, plan, words, known, sentences)
    sets = method.restarts if isinstance(method, PointMethod) else method.chains if isinstance(method, NUTS) else 1
    return None if flops is None else sets * flops


@dataclass(frozen=True)
class SiteSamples:
    """Draws of Pyro's sites, `[chain, draw, *shape]`, and what is known of how they were made."""

    values: Mapping[str, Tensor]
    divergent: tuple[int, ...] = ()
    approximate: str | None = None
    effective_sample_size: float | None = None
    is_point: bool = False  # all draws are one: of a guide of Delta sites


def fit_from_pyro(
    network: Network,
    data: object,
    result: object,
    sites: Mapping[str, str] | None,
    arguments: tuple[object, ...],
    num_samples: int,
    missing: bool,
    budget: int,
    seed: int,
) -> Fit[Network]:
    """The fit that Pyro's samples, or a guide, are; `Fit.from_pyro` has the arguments."""
    network.check_single_dtype()
    corpus = read_batch(network, data, missing=missing)
    seed, num_samples = check_seed(seed), check_int("num_samples", num_samples)
    with fork_torch_rng(network.device):
        seed_rngs(derive_seed(seed, "from pyro"), network.device)
        draws = _read_samples(result, arguments, num_samples)
    samples = _to_parameter_samples(network, draws.values, check_mapping("sites", sites))
    readouts = tuple(network.get_spec(name) for name in corpus.evidence)
    objective = FitObjective(
        network, select_learnable(network, readouts, list(samples), None), check_int("budget", budget)
    )
    matched: tuple[str, ...] = ()
    if draws.is_point:
        shown = {name: value[0] for name, value in samples_to_parameters(network, samples).items()}
    else:
        *_, (_, fault) = analyse_choices(objective, corpus)
        if fault is None:  # heads in the order of the likeliest draw
            lead = next(iter(samples.values())).shape[:2]
            density = log_likelihoods(objective, corpus, samples_to_parameters(network, samples)).sum(1).reshape(lead)
            samples, matched = align_heads(objective, corpus, samples, density)
        shown = find_representative(network, samples)
    return Fit(
        replace_learned(network, shown),
        "pyro",
        len(corpus),
        "nothing",
        samples={} if draws.is_point else samples,
        matched=matched,
        divergent=draws.divergent,
        effective_sample_size=draws.effective_sample_size,
        learned=objective.learned.names,
        budget=objective.budget,
        approximate=draws.approximate,
        missing=missing,
        data=corpus,
    )


def _read_samples(result: object, arguments: tuple[object, ...], num_samples: int) -> SiteSamples:
    """Draws of every site of what Pyro gave."""
    if isinstance(result, MCMC):
        try:
            values = result.get_samples(group_by_chain=True)
        except (AttributeError, TypeError) as error:  # it has no draws yet
            raise BNetError("result", expected="a run of it, with its arguments, before", actual="no draw") from error
        by_chain = result.diagnostics().get("divergences", {})
        return SiteSamples(values, tuple(len(draws) for draws in by_chain.values()))
    if isinstance(result, Importance):
        log_weights = [*map(torch.as_tensor, result.log_weights)]
        return _resample_systematically(_stack_traces(result.exec_traces), torch.stack(log_weights), num_samples)
    if isinstance(result, Mapping):
        named = all(isinstance(name, str) for name in result)
        if not result or not named or any(isinstance(v, tuple | Distribution) for v in result.values()):
            raise BNetError("result", expected="a mapping from the names of sites to samples", actual=result)
        return SiteSamples({name: torch.as_tensor(values) for name, values in result.items()})
    if callable(result) and not isinstance(result, Distribution):
        with torch.no_grad():
            traces = [poutine.trace(result).get_trace(*arguments) for _ in range(num_samples)]
        values = {name: value[None] for name, value in _stack_traces(traces).items()}
        is_point = all(bool((value == value[:, :1]).all()) for value in values.values())  # a guide of Delta sites
        note = None if is_point else "draws of a guide: as near to the posterior as its family allows"
        return SiteSamples(values, approximate=note, is_point=is_point)
    raise BNetError("result", expected=RESULT_FORMS, actual=result)


def _stack_traces(traces: list[Any]) -> dict[str, Tensor]:
    """The values of the sites that were drawn in each of some traces, `[draw, *shape]`."""
    if not traces:
        raise BNetError("result", expected="a run of it, with its arguments, before", actual="no draw")
    drawn = [name for name, site in traces[0].nodes.items() if _is_latent(site)]
    return {name: torch.stack([trace.nodes[name]["value"].detach() for trace in traces]) for name in drawn}


def _is_latent(site: Mapping[str, Any]) -> bool:
    """True for a site that holds a value of the posterior: not observed, no plate, no helper of an AutoGuide."""
    if site["type"] != "sample" or site["is_observed"] or type(site["fn"]).__name__ == "_Subsample":
        return False
    return not (site["infer"] or {}).get("is_auxiliary", False) and isinstance(site["value"], Tensor)


def _resample_systematically(values: Mapping[str, Tensor], log_weights: Tensor, num_samples: int) -> SiteSamples:
    """Weighted draws as draws that count alike, by systematic resampling.

    One uniform number places `num_samples` evenly spaced points on the cumulative weights, so that a draw of weight w
    is taken either floor(w n) or ceil(w n) times: of all unbiased ways the one with the least variance in practice
    (Douc, Cappe and Moulines 2005). The effective sample size is `1 / sum w^2` of the weights before (Kong 1992).
    """
    if not bool((log_weights > -torch.inf).any()) or bool(log_weights.isnan().any()):
        raise BNetError("result", expected="log weights, one of them finite", actual="none that is")
    weights = log_weights.detach().double().softmax(0)
    size = float(1 / weights.square().sum())
    told = f"importance sampling: {len(weights)} draws count as {size:.1f}"
    if size < MIN_EFFECTIVE_DRAWS:
        warnings.warn(f"{told}; a guide nearer to the posterior gives more", stacklevel=5)
    start = torch.rand((), dtype=torch.float64).item()
    points = (torch.arange(num_samples, dtype=torch.float64, device=weights.device) + start) / num_samples
    taken = torch.searchsorted(weights.cumsum(0), points).clamp(max=len(weights) - 1)
    note = f"{told}; resampled to {num_samples}"
    return SiteSamples({name: value[taken][None] for name, value in values.items()}, (), note, size)


def _to_parameter_samples(
    network: Network, values: Mapping[str, Tensor], sites: Mapping[str, str]
) -> dict[str, Tensor]:
    """The samples of parameters, `[chain, draw, *shape]`, tables as probabilities, from those of sites.

    A site has the parameter's own name, that with `_` for `.`, that of a table in `net.pyro()`, or one that is told.
    """
    known = {name: name for name in network.shapes} | {name.replace(".", "_"): name for name in network.shapes}
    known |= {f"theta_{name.removesuffix('.logits')}": name for name in network.unconditional_logit_names}
    known |= {site: name for name, site in PyroModel(network).priors.items()}
    families = {member.group.name for member in network.specs}
    for site, name in sites.items():
        if name not in network.shapes:
            raise unknown_name_error("parameter", name, network.shapes)
        known[site] = name
    missing = sites.keys() - values.keys()
    if missing:
        raise unknown_name_error("site of the result", min(missing), values)
    found: dict[str, Tensor] = {}
    for site, value in values.items():
        if site not in known and site in families:
            continue  # a choice that was drawn: it is summed out, given the parameters
        if site not in known:
            raise unknown_name_error("site", site, known)
        name = known[site]
        if name in found:
            raise BNetError(site, expected="one site for each parameter", actual=f"two for {name}")
        found[name] = _reshape_samples(network, name, site, value)
    if not found:
        raise BNetError("result", expected=f"a site for some parameter: {', '.join(known)}", actual=", ".join(values))
    leads = {tuple(value.shape[:2]) for value in found.values()}
    if len(leads) > 1:
        raise BNetError("result", expected="as many draws of every site", actual=", ".join(map(str, leads)))
    return found


def _reshape_samples(network: Network, name: str, site: str, value: Tensor) -> Tensor:
    """Samples of one parameter as `[chain, draw, *shape]`, checked, in the type and on the device of the parameter."""
    own = network.parameters[name]
    lead = value.dim() - own.dim()
    fits = lead in (1, 2) and value.shape[lead:] == own.shape and 0 not in value.shape[:lead]
    if not value.is_floating_point() or not fits:
        wanted = f"real numbers [draw, {', '.join(map(str, own.shape))}], or [chain, draw, ...], of {name}"
        raise BNetError(site, expected=wanted, actual=f"{value.dtype} of shape {tuple(value.shape)}")
    value = (value[None] if lead == 1 else value).detach().to(own)
    if not bool(value.isfinite().all()):
        raise BNetError(site, expected="finite numbers", actual="NaN or infinity")
    if name in network.unconditional_logit_names:
        check_probabilities(site, value, own)
    return value
