"""The methods by which the effects of interventions are computed: exactly, or from gradients."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from bnet_transformer._core.checks import check_choice, check_int, check_options, check_seed, set_frozen
from bnet_transformer.errors import BNetError

EXACT: Literal["exact"] = "exact"
EXACT_HINT = 'Use method="exact"'
MIDPOINT, LEFT, ACTIVATIONS = RULES = ("midpoint", "left", "activations")


@dataclass(frozen=True, kw_only=True)
class Gradient:
    """Estimates of effects from gradients, as `method=` of `bt.sweep`; no cell is run.

    An intervention that sets the value v to t has a strength s from 0 to 1: it sets v + s (t - v). The exact effect is
    that of strength 1. The estimate is the derivative of the metric with respect to s at strength 0, which is the
    gradient at v times t - v: attribution patching, and edge attribution patching (EAP) of edges. With `steps`, the
    gradient is averaged over runs between the corrupt and the clean run (integrated gradients, EAP-IG).

    Args:
        steps: The number of runs over which the gradient is averaged; 0 for the gradient at the run that is patched.
        rule: The runs: `"midpoint"`, which is the default, and `"left"`, a left Riemann sum from the corrupt run, as
            the package EAP-IG defines it, interpolate the inputs, or the embeddings of tokens. `"activations"`, for
            edges, sets one group of writers after the other to interpolated values (EAP-IG on activations).
        check: The number of cells that are also run, to check the estimates: half of them those with the largest
            estimates, the others drawn at random.
        seed: The seed of this draw.

    Raises:
        BNetError: If an option is out of range, or there is a rule without steps.

    >>> import bnet_transformer as bt
    >>> bt.Gradient(steps=8, rule="left").describe()
    'to first order over 8 steps (left)'
    """

    steps: int = 0
    rule: Literal["midpoint", "left", "activations"] | None = None
    check: int = 0
    seed: int = 0

    def __post_init__(self) -> None:
        check_options(self, check_int, "steps", "check", minimum=0)
        set_frozen(self, seed=check_seed(self.seed))
        check_choice("rule", self.rule, (None, *RULES))
        if self.rule is not None and not self.steps:
            raise BNetError("rule", expected="None with steps=0, which is the gradient at one run", actual=self.rule)

    def list_fractions(self) -> list[float]:
        """The runs over which the gradient is averaged, as fractions of the way from the corrupt to the clean run."""
        shift = {LEFT: 0.0, ACTIVATIONS: 1.0}.get(self.rule or MIDPOINT, 0.5)
        return [(k + shift) / self.steps for k in range(self.steps)]

    def describe(self) -> str:
        """The method as text, such as `"to first order over 8 steps"`."""
        runs = f" over {self.steps} steps" if self.steps else ""
        return f"to first order{runs}" + (f" ({self.rule})" if self.rule not in (None, MIDPOINT) else "")


def resolve_method(method: object) -> Gradient | None:
    """Check `method=`: None for `"exact"`, else the gradient method."""
    if isinstance(method, Gradient):
        return method
    if method != EXACT:
        raise BNetError("method", expected="'exact' or bt.Gradient(...)", actual=method)
    return None
