"""Which algorithm a fit takes, why, and what a step costs; from the structure alone, before anything is fitted."""

from __future__ import annotations

import math
from inspect import signature
from typing import Any

from bnet_transformer.cost.count import plan_flops
from bnet_transformer.data import Batch
from bnet_transformer.inference.factors import Question, analyse_question
from bnet_transformer.inference.fit.ascent import USUAL
from bnet_transformer.inference.fit.methods import NUTS, SVI, Method, PointMethod
from bnet_transformer.inference.fit.objective import Objective
from bnet_transformer.inference.fit.run import FitQuestion, fit, method_of, question_of
from bnet_transformer.inference.route import Route

OF_THE_LOOP = ("every", "checkpoints", "device", "progress")
DRAWN = "method=bt.SVI(choices='sampled') draws them"


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
