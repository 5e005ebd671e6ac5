"""Exact inference: the log evidence of a batch of sentences and the posterior of a discrete family, by elimination."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from bnet_transformer._core.torch_context import with_gradients
from bnet_transformer.compiler.course import Course, SomeNodes
from bnet_transformer.compiler.module import Module, Values
from bnet_transformer.compiler.told import readable
from bnet_transformer.data import Evidence
from bnet_transformer.errors import BNetError, tolerance, whole
from bnet_transformer.graph import Family
from bnet_transformer.inference.elimination import batch_of, eliminated, full_shape
from bnet_transformer.inference.factors import Factor, question_to_factors
from bnet_transformer.inference.impossible_evidence import check_possible
from bnet_transformer.reference import ATOL, BUDGET


def log_evidence(
    module: Module,
    evidence: Mapping[str, Evidence],
    x: Values | None = None,
    mask: Values | None = None,
    *,
    do: Mapping[str, Tensor] | None = None,
    patched: SomeNodes | None = None,
    rows: SomeNodes | None = None,
    given: Mapping[str, Tensor] | None = None,
    budget: int = BUDGET,
    atol: float = ATOL,
    check: bool = True,
    dtype: torch.dtype | None = None,
) -> Tensor:
    """`log P(evidence)` of each sentence, `[batch]`; of the whole batch, `[1]`, under a selector of the corpus.

    `do` sets whole families. `patched` sets some nodes of a family: values, and which nodes, `[batch, *plates, word]`;
    `rows` sets the attention weights of some nodes in the same form. `check=False` does not look at the result (on an
    accelerator that waits for it): of evidence that is impossible it is then at most -5e29. `dtype` is the type of the
    result, by default that of log probabilities in the net; float64 keeps apart what differs by less than float32 can
    tell beside a large likelihood.

    >>> import torch
    >>> import bnet_transformer as bt
    >>> from bnet_transformer.inference import Evidence, log_evidence
    >>> module = bt.bayesuvius(dim=4, observe=bt.tpm.Categorical(3)).module()
    >>> log_evidence(module, {"y": Evidence(torch.tensor([[0, 2, 1]]))}, torch.zeros(1, 3, 4)).shape      # [batch]
    torch.Size([1])
    """
    _check_asked(module, budget, atol)
    course, factors = question_to_factors(
        module, evidence, None, x, mask, do=do, patched=patched, rows=rows, given=given, atol=atol, budget=budget
    )
    total = eliminated(course, factors, dtype)
    if check and readable(total):
        check_possible(course, factors, total)
    return total


@with_gradients()
def posterior(
    module: Module,
    query: str,
    evidence: Mapping[str, Evidence],
    x: Values | None = None,
    mask: Values | None = None,
    *,
    do: Mapping[str, Tensor] | None = None,
    patched: SomeNodes | None = None,
    rows: SomeNodes | None = None,
    given: Mapping[str, Tensor] | None = None,
    budget: int = BUDGET,
    atol: float = ATOL,
) -> Tensor:
    """`P(query | evidence)` for a discrete family: `[batch, *plates, word, states]`; batch is 1 for one of the corpus.

    Evidence on a family that is a function of others counts for the states that reproduce it: no entry is off by more
    than `atol + r m`, with m the largest entry, made or seen, of that very node in that state and sentence, and r the
    rounding of the floating type (0 in float64, 2^-12 in float32: `reference.fits`).

    It is the gradient of the log evidence by the log probability of each state (Darwiche 2003).

    >>> import torch
    >>> import bnet_transformer as bt
    >>> from bnet_transformer.inference import Evidence, posterior
    >>> module = bt.bayesuvius(dim=4, observe=bt.tpm.Categorical(3)).module()
    >>> posterior(module, "c", {"y": Evidence(torch.tensor([[0, 2, 1]]))}, torch.zeros(1, 3, 4)).shape  # [batch, state]
    torch.Size([1, 2])
    """
    _check_asked(module, budget, atol)
    network = module.network
    index = network.graph.family(query).index
    member = network.members[index]
    if member.tpm.kind != "discrete":
        names = ", ".join(m.family.name for m in network.members if m.tpm.kind == "discrete")
        got = f"a {member.tpm.kind} one"
        raise BNetError(query, expected="a discrete family", got=got, allowed=names or "none: this net has none")
    if query in (do or ()):
        raise BNetError(query, expected="a family that is still random", got="one that is set by do=")
    with torch.no_grad():
        course, factors = question_to_factors(
            module, evidence, query, x, mask, do=do, patched=patched, rows=rows, given=given, atol=atol, budget=budget
        )
    place = course.layout.enumerated.index(index)
    batch = 1 if member.scope == "corpus" else batch_of(factors, course)
    shape = full_shape(course, member.family.plates, member.family.words, batch)
    shape[place] = course.count_states(index)
    tilt = torch.zeros(shape, dtype=course.log_dtype, device=course.device, requires_grad=True)
    total = eliminated(course, [*factors, Factor(member, tilt)])
    (share,) = torch.autograd.grad(total.sum(), tilt)
    check_possible(course, factors, total)
    kept = [k for k in range(course.layout.rank) if k >= course.layout.batch and keeps(course, member.family, k)]
    return share.movedim(place, -1).reshape([share.shape[k] for k in kept] + [shape[place]])


def _check_asked(module: object, budget: object, atol: object) -> None:
    """Refuse a net in place of its module, and a budget and a tolerance that are none."""
    if not isinstance(module, Module):
        raise BNetError("module", expected="a compiled net", got=type(module).__name__, allowed="net.module()")
    whole("budget", budget)
    tolerance("atol", atol)


def keeps(course: Course, family: Family, k: int) -> bool:
    """True where dim k of the layout is one that a family's posterior keeps."""
    layout = course.layout
    if k == layout.word:
        return family.words is not None
    return k == layout.batch or layout.plates[k - layout.batch - 1] in family.plates
