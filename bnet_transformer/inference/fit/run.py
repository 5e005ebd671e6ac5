"""`fit`: a net with choices and sentences in, what can be known of its parameters out; `explain_fit`: how, before."""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable, Collection
from dataclasses import dataclass, replace
from inspect import signature
from pathlib import Path
from typing import Any, cast

import torch

from bnet_transformer._core.distributed import device_of, ranks
from bnet_transformer._core.hashing import digest_of
from bnet_transformer._core.options import name_config_of_options
from bnet_transformer._core.torch_context import own_random, with_gradients
from bnet_transformer.compiler.plan import MEETING
from bnet_transformer.cost.count import plan_flops
from bnet_transformer.data import Batch, read_batch
from bnet_transformer.errors import (
    BNetError,
    BudgetError,
    ReadingError,
    number,
    one_of,
    seed_of,
    whole,
    within_memory,
)
from bnet_transformer.files.checkpoint import Checkpoints, kept_by
from bnet_transformer.inference.factors import OVER_BUDGET, Question, analyse_question
from bnet_transformer.inference.fit.ascent import USUAL
from bnet_transformer.inference.fit.methods import EM, MAP, NUTS, SVI, FitProblem, Method, PointMethod
from bnet_transformer.inference.fit.nuts import fit_nuts
from bnet_transformer.inference.fit.objective import Objective, learned_of
from bnet_transformer.inference.fit.point import fit_point
from bnet_transformer.inference.fit.result import Fit
from bnet_transformer.inference.fit.variational import fit_svi
from bnet_transformer.inference.route import Route
from bnet_transformer.network import Network, network_of
from bnet_transformer.reference import BUDGET
from bnet_transformer.training.configs import LoopConfig
from bnet_transformer.training.result import N

# Every method: its config, and the function that solves a problem by it. A new method is one row.
METHODS: dict[type[Method], Callable[[FitProblem, Any], Fit[Network]]] = {
    MAP: fit_point,
    EM: fit_point,
    SVI: fit_svi,
    NUTS: fit_nuts,
}
OF_THE_LOOP = ("every", "checkpoints", "device", "progress")
DRAWN = "method=bt.SVI(choices='sampled') draws them"
WAYS = {  # what a fit can do about choices that cannot be summed, for what other questions can do
    MEETING: "method=bt.SVI(choices='sampled')",
    OVER_BUDGET: "a larger budget=; method=bt.SVI(choices='sampled')",
}


@name_config_of_options(method=tuple(METHODS), checkpoints=(Checkpoints,))
@with_gradients()
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
        ReadingError: Where choices of different words meet, so that they cannot be summed word by word.

    >>> import bnet_transformer as bt
    >>> words = ["the", "cat", "sat"]
    >>> net = bt.bayesuvius(4, heads=2, vocabulary=words, observe=bt.tpm.Categorical(3), prior=1.0)
    >>> data = [("the cat sat", "cat the sat"), ("sat the cat", "the sat cat")]
    >>> f = bt.fit(net, data, method=bt.EM(steps=4))
    >>> f.pi.shape, f.net
    (torch.Size([2]), <BNet bayesuvius: ...>)
    """
    config = method_of(method)
    loop = LoopConfig(every, Checkpoints.of(checkpoints), progress)
    if isinstance(config, NUTS) and checkpoints is not None:
        wanted = "None: the state of Pyro's sampler cannot be saved"
        allowed = "Ctrl-C, which gives the draws so far, and f.save(path); method=bt.MAP(), bt.EM() or bt.SVI()"
        raise BNetError("checkpoints", expected=wanted, got="a folder, with nuts", allowed=allowed)
    question = question_of(net, data, config, held_out, batch, spread, learn, missing, budget, seed)
    try:
        fitted = _solved(question, config, loop, device_of(device, question.objective.network))
    except (BudgetError, ReadingError) as error:
        if error.allowed not in WAYS:
            raise
        raise type(error)(error.what, expected=error.expected, got=error.got, allowed=WAYS[error.allowed]) from error
    made = fitted.net if isinstance(net, Network) else cast(Callable[[Network], Any], type(net))(fitted.net)
    return replace(fitted, net=made, missing=missing, data=question.corpus)  # type: ignore[return-value]


def method_of(method: Method | str) -> Method:
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
    one_of("method", method, named)
    return named[method]()


@dataclass(frozen=True)
class FitQuestion:
    """What `fit` is asked, checked: the objective, the sentences, and the options that all methods share."""

    objective: Objective
    corpus: Batch
    held_out: Batch | None
    batch: int | None
    spread: float | None
    seed: int

    def settings(self, method: Method) -> dict[str, Any]:
        """What a resumed fit must share with the fit that wrote the checkpoint."""
        return {
            **method.settings,
            "batch": self.batch,
            "spread": self.spread,
            "seed": self.seed,
            "learn": list(self.objective.learned.names),
            "sentences": len(self.corpus),
            "data": self.corpus.digest() + ("" if self.held_out is None else self.held_out.digest()),
            "parameters": digest_of(self.objective.network.parameters),
        }


def question_of(
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
) -> FitQuestion:
    """What `fit` is asked, checked as a whole; the arguments are those of `fit`.

    Returns:
        The question.

    Raises:
        BNetError: Where an option is out of its range, or does not go with the net or the method.
    """
    network = network_of(net)
    network.one_type()
    one_of("missing", missing, (True, False))
    batch = None if batch is None else whole("batch", batch)
    spread = None if spread is None else number("spread", spread, above=0)
    if held_out is not None and not method.is_point:
        wanted = "None: held-out sentences choose among the restarts and steps of a point estimate"
        allowed = "method=bt.MAP(...) or bt.EM(...); f.log_likelihood(held_out) of the fit"
        raise BNetError("held_out", expected=wanted, got=f"data, with {method.name}", allowed=allowed)
    corpus = read_batch(network, data, missing=missing)
    judge = None if held_out is None else read_batch(network, held_out, "held_out", missing=missing)
    learned = learned_of(network, tuple(network.member(name) for name in corpus.evidence), learn, spread)
    objective = Objective(network, learned, whole("budget", budget))
    question = FitQuestion(objective, corpus, judge, batch, spread, seed_of(seed))
    _check(question, method)
    size = sum(network.parameters[name].numel() * network.parameters[name].element_size() for name in learned.names)
    method.check_memory(size)
    return question


def _solved(question: FitQuestion, method: Method, loop: LoopConfig, device: torch.device) -> Fit[Network]:
    """The fit by a method, on the device and in the processes that there are."""
    objective, settings = question.objective, question.settings(method)
    with within_memory("fit"), ranks(device) as here, own_random(here.device), kept_by(loop.checkpoints, here.first):
        if here.world > 1 and objective.of_corpus and not isinstance(method, NUTS):  # whose chains have all sentences
            wanted = "choices of sentences or words: a share of a corpus with one draw has no evidence of its own"
            raise BNetError("torchrun", expected=wanted, got="per='corpus'", allowed="one process")
        alike = {"net": objective.network, "budget": objective.budget, "loop": (method, loop.shared)}
        here.assert_same("fit", **settings, **alike, checkpoint=loop.has_checkpoint)
        objective.to(here.device)
        corpus, judge = (None if c is None else c.to(here.device) for c in (question.corpus, question.held_out))
        assert corpus is not None
        problem = FitProblem(objective, corpus, judge, question.batch, question.seed, loop, settings, here)
        solve = next(solve for kind, solve in METHODS.items() if isinstance(method, kind))
        return solve(problem, method)


def _check(question: FitQuestion, method: Method) -> None:
    """Refuse what does not go with the net."""
    objective, corpus = question.objective, question.corpus
    learned = objective.learned
    _check_zeros(objective, method)
    if objective.of_corpus:
        if question.batch is not None and question.batch < len(corpus):
            wanted = f"all {len(corpus)} sentences at each step: they share one draw, and a part of them is biased"
            raise BNetError("batch", expected=wanted, got=question.batch, allowed="per='sentence'")
        warnings.warn(
            "per='corpus' is model selection, not a mixture: its log odds grow with the data, and one head takes all",
            stacklevel=6,
        )
    sparse = {name: concentration for name, concentration in learned.tables.items() if concentration < 1}
    if sparse and method.is_point:
        name, concentration = next(iter(sparse.items()))
        raise BNetError(
            f"the prior of {name}",
            expected="a concentration of at least 1: below it the posterior density has no greatest value",
            got=concentration,
            allowed="svi, nuts",
        )
    spread, real = question.spread, torch.finfo(objective.network.dtype)
    if spread is not None and not real.tiny <= spread * spread <= real.max:
        square = f"a standard deviation whose square {real.dtype} can hold"
        raise BNetError("spread", expected=square, got=spread)
    if not method.is_point and learned.weights and spread is None:
        got = f"none for {', '.join(learned.weights[:3])}"
        allowed = "spread=1.0, say"
        if learned.tables:
            allowed += f"; learn={[*learned.tables]}, which leaves the weights as they are"
        raise BNetError("spread", expected="a prior on the weights: their standard deviation", got=got, allowed=allowed)


def _check_zeros(objective: Objective, method: Method) -> None:
    """Refuse to learn a table with probabilities of 0 where its prior has no density there."""
    for name, concentration in objective.learned.tables.items():
        if method.is_point and concentration == 1.0:
            continue
        if bool(objective.network.parameters[name].isneginf().any()):
            got = f"method={method.name!r}" + ("" if concentration == 1.0 else f", prior={concentration:g}")
            allowed = f"learn= without {name}"
            wanted = "method='em' or 'map' and no prior for a table with probabilities of 0"
            raise BNetError(name, expected=wanted, got=got, allowed=allowed)


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
    config = method_of(method)
    question = question_of(net, data, config, **{k: v for k, v in options.items() if k not in OF_THE_LOOP})
    objective, corpus = question.objective, question.corpus
    structure = structure_of(objective, corpus)
    states, names = most_states(objective, corpus, structure)
    node, fault = elimination_fault(objective, corpus)
    title = f"fit by {config.name}"
    if isinstance(config, SVI) and config.choices == "sampled":
        reason = "choices='sampled' was asked for"
        reason += f", and elimination cannot: {fault}" if fault else "; elimination could sum them"
        return Route(title, "sampling", reason, node, states, is_exact=False)
    if fault is not None:
        return Route(
            title, "sampling", f"elimination cannot sum the choices: {fault}; {DRAWN}", node, states, is_exact=False
        )
    flops = step_flops(question, config, structure)
    if not structure.free:
        return Route(title, "compiled", "no choice is open: one pass gives the log evidence", flops=flops)
    reason = f"the choices of each sentence ({names}) are summed out of the exact log evidence"
    if not objective.learned.weights:
        reason += "; only tables are learned, so the likelihoods of all joint states are computed once"
    return Route(title, "elimination", reason, states=states, flops=flops)


explain_fit.__signature__ = signature(fit)  # type: ignore[attr-defined]  # what help() shows and bt.explain checks


def structure_of(objective: Objective, corpus: Batch) -> Question:
    """What the log evidence of sentences needs of the net, whatever the numbers."""
    forms = {k: (told.observed is None, told.value.is_floating_point()) for k, told in corpus.evidence.items()}
    return analyse_question(objective.module, forms, None, (), ())


def elimination_fault(objective: Objective, corpus: Batch) -> tuple[str | None, str | None]:
    """Why the choices of sentences cannot be summed, and the node for which; None and None where they can.

    Args:
        objective: The log evidence, with its budget.
        corpus: The sentences; of their evidence the structure alone counts.

    Returns:
        The name of the node, and the fault in words.
    """
    structure = structure_of(objective, corpus)
    if structure.fault is not None:
        return structure.fault.what, str(structure.fault)
    states, names = most_states(objective, corpus, structure)
    if states > objective.budget:
        return names, f"{names} have {states:,} joint states, more than budget={objective.budget:,}"
    return None, None


def most_states(objective: Objective, corpus: Batch, structure: Question) -> tuple[int, str]:
    """The most joint states of choices on which the value of one observed family depends, and these choices."""
    network, words = objective.network, {stack: value.shape[1] for stack, value in corpus.x.items()}
    counts = [
        (
            math.prod(network.count_states(i, words) for i in above),
            ", ".join(network.members[i].family.name for i in above),
        )
        for above in structure.choices.values()
    ]
    return max(counts, default=(1, ""))


def step_flops(question: FitQuestion, method: Method, structure: Question) -> int | None:
    """The FLOPs of the compiled passes of one step; None where a TPM does not say what its products are."""
    objective, corpus = question.objective, question.corpus
    network, module = objective.network, objective.module
    members = network.members
    want = tuple(dict.fromkeys([*structure.want, *(members[index].family.name for index in structure.needed)]))
    known = frozenset(network.graph.family(name).index for name in structure.settled)
    words = {stack: value.shape[1] for stack, value in corpus.x.items()}
    is_whole = objective.of_corpus or isinstance(method, NUTS)
    sentences = len(corpus) if is_whole else min(question.batch or USUAL, len(corpus))
    flops = plan_flops(network, module.plan(want, known, structure.free), words, known, sentences)
    sets = method.restarts if isinstance(method, PointMethod) else method.chains if isinstance(method, NUTS) else 1
    return None if flops is None else sets * flops
