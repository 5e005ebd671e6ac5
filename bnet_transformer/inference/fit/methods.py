"""The methods of `fit` as configs, each with the options that are its own, and the problem that a method solves.

To add a method, write its config and its function `config, problem -> Fit` in one file, and add a row to `METHODS` in
`run.py`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from typing import Any, ClassVar

from bnet_transformer._core.distributed import ALONE, Ranks
from bnet_transformer.data import Batch
from bnet_transformer.errors import BNetError, number, one_of, put, whole
from bnet_transformer.inference.fit.objective import Objective
from bnet_transformer.training.loop_config import LoopConfig


@dataclass(frozen=True)
class FitProblem:
    """What a method is given besides its own options.

    Args:
        objective: The log evidence and the log prior of the learned parameters.
        corpus: The sentences to learn from, on the device of `ranks`.
        held_out: The sentences that choose among restarts and steps; None where the caller gave none.
        batch: Sentences of a step; None for the default of the method.
        seed: The seed of all that the method draws.
        loop: Measures, checkpoints and the progress bar.
        settings: What a resumed fit must share with the fit that wrote the checkpoint.
        ranks: The processes that share the work.
    """

    objective: Objective
    corpus: Batch
    held_out: Batch | None
    batch: int | None
    seed: int
    loop: LoopConfig = field(default_factory=LoopConfig)
    settings: Mapping[str, Any] = field(default_factory=dict)
    ranks: Ranks = ALONE


@dataclass(frozen=True, kw_only=True)
class Method:
    """A method of `fit` and its options."""

    name: ClassVar[str]
    is_point: ClassVar[bool] = False  # it gives one set of parameters; the others sample a posterior, and need priors

    @property
    def settings(self) -> dict[str, Any]:
        """The options that a resumed fit must share with the fit that wrote the checkpoint."""
        return {"method": self.name, **{each.name: getattr(self, each.name) for each in fields(self)}}


@dataclass(frozen=True, kw_only=True)
class IterativeMethod(Method):
    """A method that takes steps of Adam up the gradient of a bound."""

    steps: int = 300
    rate: float = 0.05
    clip: float | None = None
    anneal: float | None = None

    def __post_init__(self) -> None:
        put(self, steps=whole("steps", self.steps), rate=number("rate", self.rate, above=0))
        if self.clip is not None:
            put(self, clip=number("clip", self.clip, above=0))
        if self.anneal is not None and not 0 < number("anneal", self.anneal) <= 1:
            raise BNetError("anneal", expected="the power from which likelihoods rise to 1, a share", got=self.anneal)

    @property
    def pruning_steps(self) -> tuple[int, ...]:
        """The steps after which the worse half of the restarts is dropped."""
        return ()

    def likelihood_power(self, step: int) -> float:
        """The power of the likelihoods at a step: it rises to 1 over the first half of the steps."""
        if self.anneal is None:
            return 1.0
        return min(1.0, self.anneal + (1 - self.anneal) * 2 * step / self.steps)


@dataclass(frozen=True, kw_only=True)
class PointMethod(IterativeMethod):
    """A method that gives the best of several restarts, which are one batched dimension."""

    is_point: ClassVar[bool] = True

    restarts: int = 1
    prune: bool = True

    def __post_init__(self) -> None:
        super().__post_init__()
        put(self, restarts=whole("restarts", self.restarts))
        one_of("prune", self.prune, (True, False))

    @property
    def pruning_steps(self) -> tuple[int, ...]:
        """The steps after which the worse half of the restarts is dropped: a quarter and a half of them."""
        return (self.steps // 4, self.steps // 2) if self.prune and self.restarts > 2 else ()


@dataclass(frozen=True, kw_only=True)
class MAP(PointMethod):
    """The greatest posterior density, by Adam on the log evidence plus the log prior.

    Args:
        steps: Steps of Adam.
        rate: The highest rate; it rises for a twentieth of the steps and falls to 0 as a cosine.
        clip: The greatest length of the gradient; None for any.
        anneal: The power from which likelihoods rise to 1 over the first half of the steps; None for 1 throughout.
        restarts: Sets of parameters that are followed at once; the first begins at the net's own, others are drawn.
        prune: True drops the worse half of the restarts after a quarter and after a half of the steps.

    Raises:
        BNetError: Where an option is out of its range.

    >>> import bnet_transformer as bt
    >>> bt.MAP(restarts=4, steps=40).pruning_steps
    (10, 20)
    """

    name: ClassVar[str] = "map"


@dataclass(frozen=True, kw_only=True)
class EM(PointMethod):
    """Expectation maximisation: tables in closed form from expected counts, weights by Adam between.

    Where tables alone are learned every step is the closed form of all sentences: then `rate`, `clip` and `inner`, and
    the `batch` of `fit`, are refused.

    Args:
        inner: Steps of the weights from one closed form of the tables to the next.
        steps: Steps in all, those of the weights included.
        rate: The highest rate of the weights; it rises for a twentieth of the steps and falls to 0 as a cosine.
        clip: The greatest length of the gradient; None for any.
        anneal: The power from which likelihoods rise to 1 over the first half of the steps; None for 1 throughout.
        restarts: Sets of parameters that are followed at once; the first begins at the net's own, others are drawn.
        prune: True drops the worse half of the restarts after a quarter and after a half of the steps.

    Raises:
        BNetError: Where an option is out of its range.

    >>> import bnet_transformer as bt
    >>> bt.EM(inner=5).settings["method"]
    'em'
    """

    name: ClassVar[str] = "em"

    inner: int = 10

    def __post_init__(self) -> None:
        super().__post_init__()
        put(self, inner=whole("inner", self.inner))


@dataclass(frozen=True, kw_only=True)
class SVI(IterativeMethod):
    """Stochastic variational inference by a mean-field guide: a Dirichlet for each row of a table, a Normal for each
    weight. The exact log evidence is a factor of the model; the spread of the posterior comes out too small.

    Args:
        steps: Steps of Adam.
        rate: The highest rate; it rises for a twentieth of the steps and falls to 0 as a cosine.
        clip: The greatest length of the gradient; None for any.
        anneal: The power from which likelihoods rise to 1 over the first half of the steps, for sampled choices alone.
        draws: Draws of the guide that are the samples of the posterior.
        choices: `"exact"` sums choices out. `"sampled"` draws them from a table for each sentence and word, where they
            are too many to be summed; that is approximate.

    Raises:
        BNetError: Where an option is out of its range, or `anneal` is set with exact choices.

    >>> import bnet_transformer as bt
    >>> bt.SVI(choices="sampled", anneal=0.01).steps
    1000
    """

    name: ClassVar[str] = "svi"

    steps: int = 1000
    draws: int = 500
    choices: str = "exact"

    def __post_init__(self) -> None:
        super().__post_init__()
        put(self, draws=whole("draws", self.draws))
        one_of("choices", self.choices, ("exact", "sampled"))
        if self.anneal is not None and self.choices == "exact":
            wanted = "None, for the bound of summed choices is not annealed"
            raise BNetError("anneal", expected=wanted, got=self.anneal, allowed="choices='sampled'")


@dataclass(frozen=True, kw_only=True)
class NUTS(Method):
    """Samples of the posterior by Pyro's No-U-Turn sampler on the exact log evidence.

    Args:
        chains: Chains, which take a draw each in turn.
        draws: Draws of each chain.
        warmup: Steps of each chain before its draws, in which step size and mass matrix are adapted.

    Raises:
        BNetError: Where an option is out of its range.

    >>> import bnet_transformer as bt
    >>> bt.NUTS(chains=2, draws=100).warmup
    300
    """

    name: ClassVar[str] = "nuts"

    chains: int = 4
    draws: int = 500
    warmup: int = 300

    def __post_init__(self) -> None:
        for option in ("chains", "draws", "warmup"):
            put(self, **{option: whole(option, getattr(self, option))})
