"""`fit`, its checks, the table of its methods and the plan of a fit."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Collection
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

import torch
from torch import Tensor

from bnet_transformer._core.checks import check_choice, check_float, check_int, check_seed, suggest_config_for_options
from bnet_transformer._core.distributed import distributed_context, resolve_device
from bnet_transformer._core.files import compute_digest
from bnet_transformer._core.process import check_memory, translate_memory_errors
from bnet_transformer._core.tensors import enable_gradients, fork_torch_rng
from bnet_transformer.compiler.gather import batch_to_request
from bnet_transformer.compiler.plan import CROSS_WORD_HINT
from bnet_transformer.data import Batch, read_batch
from bnet_transformer.declare import Network, as_network
from bnet_transformer.declare.network import restore_type
from bnet_transformer.errors import BNetError, BudgetError, UnsupportedError, format_count
from bnet_transformer.inference.factors import OVER_BUDGET_HINT, FactorRequest, request_factors_unchecked
from bnet_transformer.inference.plan import Plan, planned
from bnet_transformer.learning.fit.diagnostics import describe_data_scale
from bnet_transformer.learning.fit.em import EM, MAP, PointMethod, choose_first_order, count_restarts, fit_point
from bnet_transformer.learning.fit.heads import describe_unidentified
from bnet_transformer.learning.fit.laplace import Laplace, describe_point, fit_laplace
from bnet_transformer.learning.fit.nuts import NUTS, fit_nuts
from bnet_transformer.learning.fit.objective import FitObjective, FitProblem, Method, check_full_batch, select_learnable
from bnet_transformer.learning.fit.restarts import DEFAULT_BATCH_SIZE
from bnet_transformer.learning.fit.result import Fit
from bnet_transformer.learning.fit.svi import SVI, fit_svi
from bnet_transformer.learning.loop import Checkpoints, LoopConfig
from bnet_transformer.learning.training import N
from bnet_transformer.reference import BUDGET

# The config of each method and the function that solves a problem with it. A new method is one row.
METHODS: dict[type[Method], Callable[[FitProblem, Any], Fit[Network]]] = {
    MAP: fit_point,
    EM: fit_point,
    SVI: fit_svi,
    NUTS: fit_nuts,
    Laplace: fit_laplace,
}
R = TypeVar("R")
SAMPLED_CHOICES_HINT = "use method=bt.SVI(choices='sampled'), which samples them"
ALTERNATIVES = {  # the hints of `fit` for choices that cannot be summed; they replace the hints of other queries
    CROSS_WORD_HINT: "Use method=bt.SVI(choices='sampled')",
    OVER_BUDGET_HINT: "Raise budget=, or use method=bt.SVI(choices='sampled')",
}


@suggest_config_for_options(method=tuple(METHODS), checkpoints=(Checkpoints,))
@planned
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
) -> Plan[Fit[N]]:
    """Fit the parameters of a net with latent choices to sentences and observations. `net` itself does not change.

    All methods share one objective, the exact log evidence plus the log prior. The prior is Dirichlet on the tables if
    the net has a `prior`, and Normal with standard deviation `spread` on the weights. MAP and EM also use the Dirichlet
    prior of a discrete node with a vector parent, such as a readout with `prior`. Their first-order steps
    (`optimizer="first-order"`) hold out 10% of `data` to choose among several restarts, unless there is `held_out`
    data; the best restart then continues on all sentences for 25% more steps. Ctrl-C returns the best result so far.
    Under torchrun each process computes a shard of each batch.

    Args:
        net: A net with a readout.
        data: A list of pairs (sentence, observed), or a tuple (x, y) of arrays or lists.
        method: The method with its options, `bt.MAP(...)`, `bt.EM(...)`, `bt.Laplace(...)`, `bt.SVI(...)` or
            `bt.NUTS(...)`; or its name for default options, `"map"`, `"em"`, `"laplace"`, `"svi"` or `"nuts"`.
        held_out: Data, in the forms of `data`, that choose the best restart and step of MAP and EM; None for none.
        batch: The number of sentences of a first-order step; by default 256, or all if there are fewer. Second-order
            steps, Laplace and NUTS use all sentences.
        spread: The standard deviation of a Normal prior on every weight; None for no prior. Laplace, SVI and NUTS
            require it if weights are learned.
        learn: The names of the parameters to learn; None for all parameters on which a readout depends.
        missing: True treats a word whose numbers are all NaN as not observed.
        budget: The maximum number of joint states of the choices of a sentence that are summed.
        every: The number of steps, or of draws of a chain of NUTS, between two evaluations (and checkpoints); None for
            ten evaluations in a fit.
        checkpoints: The folder of checkpoints, and whether the fit resumes from one. A path starts a new fit. None
            writes no checkpoints. A killed fit by NUTS repeats at most the warmup of one chain.
        seed: The seed of restarts, minibatches and draws.
        device: The device of the computation; None for the device of the net.
        progress: True shows a progress bar, False none; None shows one only in a terminal.

    Returns:
        The fit: the fitted net, posterior samples, and queries on new data.

    Raises:
        BNetError: If an option is out of range or does not apply to the net, or every restart diverges.
        BudgetError: If more joint states than `budget` would be summed.
        UnsupportedError: If choices of different words interact, so that they cannot be summed word by word.

    >>> import bnet_transformer as bt
    >>> words = ["the", "cat", "sat"]
    >>> net = bt.bayesuvius(4, heads=2, vocabulary=words, observe=bt.tpm.Categorical(3), prior=1.0)
    >>> data = [("the cat sat", "cat the sat"), ("sat the cat", "the sat cat")]
    >>> f = bt.fit(net, data, method=bt.EM(steps=4))
    >>> f.pi.shape, f.net
    (torch.Size([2]), <BNet bayesuvius: ...>)
    """
    config, network = resolve_method(method), as_network(net)
    loop = LoopConfig(every, Checkpoints.from_value(checkpoints), progress)
    check_choice("missing", missing, (True, False))
    network.check_single_dtype()
    corpus = read_batch(network, data, missing=missing)
    validation = None if held_out is None else read_batch(network, held_out, "held_out", missing=missing)
    options: dict[str, Any] = {"batch": batch, "spread": spread, "learn": learn, "budget": budget, "seed": seed}
    problem = create_problem(network, config, corpus, validation, **options)

    @enable_gradients()
    def compute() -> Fit[N]:
        try:
            fitted = _solve(replace(problem, loop=loop), config, resolve_device(device, network))
        except (BudgetError, UnsupportedError) as error:
            alternative = ALTERNATIVES.get(error.hint or "")
            if alternative is None:
                raise
            raise type(error)(error.subject, **error.parts | {"hint": alternative}) from error
        fitted_net, record = restore_type(net, fitted.net), replace(fitted.record, missing=missing)
        return replace(fitted, net=fitted_net, record=record, data=corpus)  # type: ignore[return-value]

    return _plan_fit(problem, config, compute)


def resolve_method(method: object) -> Method:
    """Convert the name of a method to its config.

    Args:
        method: A config, or its `name`.

    Returns:
        The config; for a name, a config with default options.

    Raises:
        BNetError: If there is no method of this name.
    """
    if isinstance(method, Method):
        return method
    named = {kind.name: kind for kind in METHODS}
    if isinstance(method, type) and method in METHODS:
        hint = f"Use method={method.name!r}, or method=bt.{method.__name__}() with options"
        raise BNetError(
            "method", expected="a name, or an object with options", actual=f"the class {method.__name__}", hint=hint
        )
    check_choice("method", method, named)
    return named[str(method)]()


def create_problem(
    network: Network,
    method: Method,
    corpus: Batch,
    held_out: Batch | None = None,
    *,
    batch: int | None = None,
    spread: float | None = None,
    learn: Collection[str] | None = None,
    budget: int = BUDGET,
    seed: int = 0,
) -> FitProblem:
    """Check the arguments of `fit` and create its problem.

    Returns:
        The problem, on the device of the net.

    Raises:
        BNetError: If an option is out of range, or does not apply to the net or the method.
    """
    batch = None if batch is None else check_int("batch", batch)
    spread = None if spread is None else check_float("spread", spread, above=0)
    if held_out is not None and not method.is_point:
        expected = f"None with method={method.name!r}: held-out sentences choose among the restarts of MAP and EM"
        hint = "Use method=bt.MAP(...) or bt.EM(...), or evaluate the fit with f.log_likelihood(held_out)"
        raise BNetError("held_out", expected=expected, hint=hint)
    learned = select_learnable(network, tuple(network.get_spec(name) for name in corpus.evidence), learn, spread)
    objective = FitObjective(network, learned, check_int("budget", budget))
    problem = FitProblem(objective, corpus, held_out, batch, check_seed(seed))
    _check_prior(objective, method)
    if objective.has_corpus_choice:
        check_full_batch(problem, "per='corpus', by which all sentences share one draw,", "per='sentence'")
        note = (
            "per='corpus' selects a model instead of fitting a mixture: its log odds grow with the number of "
            "sentences, until one head has all the probability"
        )
        warnings.warn(note, stacklevel=5)
    if method.full_batch is not None:
        check_full_batch(problem, *method.full_batch)
    size = sum(network.parameters[name].nbytes for name in learned.names)
    if isinstance(method, PointMethod):  # parameters and the two moments of Adam
        restarts = count_restarts(problem, method)
        check_memory(f"{restarts} restarts", 3 * restarts * size, "fewer restarts=")
    draws = getattr(method, "draws", 0) * getattr(method, "chains", 1)
    check_memory(f"{draws} draws", draws * size, "fewer draws=, chains= or names in learn=")
    return problem


def _solve(problem: FitProblem, method: Method, device: torch.device) -> Fit[Network]:
    """Solve a problem with a method, on a device and in the processes of this run."""
    objective, loop, validation = problem.objective, problem.loop, problem.held_out
    network = objective.network
    settings = {  # a resumed fit must have the same settings
        **method.settings,
        "batch": problem.batch,
        "spread": objective.learned.spread,
        "seed": problem.seed,
        "learn": list(objective.learned.names),
        "sentences": len(problem.corpus),
        "data": problem.corpus.digest() + ("" if validation is None else validation.digest()),
        "parameters": compute_digest(network.parameters),
    }
    with (
        translate_memory_errors("fit"),
        distributed_context(device) as ranks,
        fork_torch_rng(ranks.device),
        loop.lock(ranks.is_main_process),
    ):
        if ranks.world_size > 1 and objective.has_corpus_choice and method.full_batch is None:
            expected = "one process, because with per='corpus' all sentences share one draw and cannot be sharded"
            raise BNetError("torchrun", expected=expected, hint="Run without torchrun, or use per='sentence' or 'word'")
        shared = {"net": network, "budget": objective.budget, "loop": (method, loop.shared_settings)}
        ranks.assert_same("fit", **settings, **shared, checkpoint=loop.has_checkpoint)
        objective.to(ranks.device)
        corpus = problem.corpus.to(ranks.device)
        validation = None if validation is None else validation.to(ranks.device)
        local = replace(problem, corpus=corpus, held_out=validation, settings=settings, ranks=ranks)
        fitted = METHODS[type(method)](local, method)
        if not isinstance(method, PointMethod):
            unidentified = describe_unidentified(objective.network, objective.learned.names)
            fitted = replace(fitted, notes=(*fitted.notes, *unidentified))
        elif fitted.converged and objective.learned.spread is not None:
            fitted = describe_point(local, fitted)
        # The first note, because other notes can be consequences of the scale of the data.
        return replace(fitted, notes=(*describe_data_scale(objective, corpus), *fitted.notes))


def _check_prior(objective: FitObjective, method: Method) -> None:
    """Raise an error if the prior has no density that the method can use.

    The density of a table can have no maximum, or be 0 at the table's zeros. Dirichlet priors of logits with a vector
    parent require a point method: the others sample only tables and weights, and they require a prior of the weights.
    """
    learned, network = objective.learned, objective.network
    no_maximum = "a concentration of at least 1; below 1 the posterior density has no maximum"
    for name, concentration in {**learned.logits, **learned.tables}.items():
        is_table, is_flat = name in learned.tables, bool((concentration == 1).all())
        text, subject = format_concentration(concentration), f"prior of {name}"
        if not is_table and not method.is_point and not is_flat:
            expected = "method='em' or 'map', because the node has a vector parent"
            actual, hint = f"method={method.name!r}, prior={text}", f"Or leave {name} out of learn="
            raise BNetError(subject, expected=expected, actual=actual, hint=hint)
        if is_table and not (method.is_point and is_flat) and bool(network.parameters[name].isneginf().any()):
            actual = f"method={method.name!r}" + ("" if is_flat else f", prior={text}")
            expected = "method='em' or 'map' and no prior, because the table contains probabilities of 0"
            raise BNetError(name, expected=expected, actual=actual, hint=f"Or leave {name} out of learn=")
        if bool((concentration < 1).any()) and (method.is_point or not is_table):
            hint = "Use method='svi' or 'nuts'" if is_table else f"Use a larger prior=, or leave {name} out of learn="
            raise BNetError(subject, expected=no_maximum, actual=text, hint=hint)
    spread, limits = learned.spread, torch.finfo(network.dtype)
    if spread is not None and not limits.tiny <= spread * spread <= limits.max:
        expected = f"a standard deviation whose square is in the range of {network.dtype}"
        raise BNetError("spread", expected=expected, actual=spread)
    if not method.is_point and learned.weights and spread is None:
        hint = "Pass for example spread=1.0"
        if learned.tables:
            hint += f", or learn={[*learned.tables]} to keep the weights fixed"
        names = ", ".join(learned.weights[:3])
        expected = f"the standard deviation of the prior of the weights ({names}), which {method.name} requires"
        raise BNetError("spread", expected=expected, hint=hint)


def format_concentration(concentration: Tensor) -> str:
    """The concentrations of a Dirichlet prior as text."""
    return f"{concentration.item():g}" if concentration.dim() == 0 else f"{concentration.tolist()}"


def _plan_fit(problem: FitProblem, method: Method, run: Callable[[], R]) -> Plan[R]:
    """The plan of a fit: of the log evidence at each step.

    Its joint states are those of the choices of a sentence. Its FLOPs are those of the compiled passes of a step for
    all restarts, without the gradient, which takes about twice as many. If the choices cannot be summed, the node is
    the one that prevents it, and the fit raises an error unless the choices are sampled.
    """
    title, (factor_request, states, names, node, fault) = (
        f"fit by {method.name}",
        analyse_choices(problem.objective, problem.corpus),
    )
    if isinstance(method, SVI) and method.choices == "sampled":
        reason = "the choices are sampled (choices='sampled')"
        reason += f"; elimination is not possible: {fault}" if fault else "; elimination could sum them exactly"
        return Plan(title, "sampling", reason, run, node, states, is_exact=False)
    if fault is not None:
        reason = f"elimination cannot sum the choices: {fault}; {SAMPLED_CHOICES_HINT}"
        return Plan(title, "sampling", reason, run, node, states, is_exact=False)
    flops = partial(count_step_flops, problem, method, factor_request)
    if not factor_request.problem.enumerated:
        reason = "no choice is latent: one pass gives the log evidence"
        return Plan(title, "compiled", reason, run, count_flops=flops)
    reason = f"elimination sums the choices of each sentence ({names}) out of the log evidence exactly"
    if not problem.objective.learned.weights:
        reason += "; only tables are learned, so the likelihoods of all joint states are computed once"
    return Plan(title, "elimination", reason, run, states=states, count_flops=flops)


def analyse_choices(objective: FitObjective, corpus: Batch) -> tuple[FactorRequest, int, str, str | None, str | None]:
    """Analyse the elimination of the choices from the structure, without values.

    Args:
        objective: The log evidence, with its budget.
        corpus: The sentences; only the structure of their evidence is used.

    Returns:
        The request of the factors; the maximum number of joint states of the choices on which one observed node group
        depends; the names of these choices; and, if they cannot be summed, the node and the reason, else None and None.
    """
    network, evidence = objective.network, corpus.index_evidence(objective.network)
    factor_request = request_factors_unchecked(objective.module, evidence, None, batch_to_request(network, corpus))
    specs, fault = network.specs, factor_request.problem.fault
    states, _, scope = factor_request.problem.find_largest_scope(network, factor_request.pass_request.word_counts)
    names = ", ".join(dict.fromkeys(specs[i].group.name for i in scope))
    if fault is not None:
        return factor_request, states, names, fault.node, fault.reason
    if states <= objective.budget:
        return factor_request, states, names, None, None
    excess = f"{names} have {format_count(states)} joint states, more than budget={format_count(objective.budget)}"
    return factor_request, states, names, names, excess


def count_step_flops(problem: FitProblem, method: Method, factor_request: FactorRequest) -> int | None:
    """Count the FLOPs of the compiled passes of one step; None if a TPM does not define its FLOPs."""
    objective, corpus = problem.objective, problem.corpus
    sets, is_full_batch = getattr(method, "chains", 1), method.full_batch is not None or objective.has_corpus_choice
    if isinstance(method, PointMethod):
        sets = count_restarts(problem, method)
        is_full_batch = is_full_batch or choose_first_order(problem, method) is None
    sentences = len(corpus) if is_full_batch else min(problem.batch or DEFAULT_BATCH_SIZE, len(corpus))
    flops = factor_request.count_flops(objective.module, sentences)
    return None if flops is None else sets * flops
