"""Which algorithm answers a question, why, how exact it is and what it costs.

A question has a short table of rules, fastest algorithm first. Each rule names its algorithm and finds the fault in the
structure of the net, the evidence and the interventions for which the algorithm cannot answer; the first rule without a
fault applies. Nothing is computed, and no exception decides. `router` has the tables of single sentences.

Algorithms:

- `graph`: the structure of the graph; no number is computed.
- `compiled`: one batched pass of the compiled net.
- `elimination`: the choices are eliminated from the factors of the compiled net.
- `conditioning`: the states of the nodes that are asked for are a batch; the other choices are eliminated.
- `enumeration`: all joint states of the choices are a batch of the compiled net.
- `sampling`: draws, which are approximate.
- `sequential`: one run for each cell of a sweep, slow.
- `reference`: node by node in Python, slow.
"""

from __future__ import annotations

import html
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Generic, TypeVar

from bnet_transformer.errors import ReadingError

S = TypeVar("S")
SLOW = 2**16  # node evaluations one by one, some 10 s, from which a slow route warns before it starts
FAST = ("graph", "compiled", "elimination")  # what is not one of these has a node that is the reason


class PerformanceWarning(UserWarning):
    """A question takes a slow algorithm; the message names the node that is the reason, and the cost."""


@dataclass(frozen=True)
class Route:
    """How a question is answered. `print` it, or read the fields.

    Args:
        question: The question, such as `"posterior of c"`.
        algorithm: Its name, as above.
        reason: The rule that applied, in words.
        node: The node or family that rules out a faster algorithm; None where the fastest one applies.
        states: Joint states of the choices that are computed.
        flops: Floating-point operations of the compiled passes; None where no compiled pass answers.
        evaluations: Nodes that are evaluated one by one in Python.
        is_exact: False for draws and for first-order effects.
        parts: The routes of parts of the question, where they are answered in different ways.
        choices: The ground ids of the choices whose joint states are computed.
    """

    question: str
    algorithm: str
    reason: str
    node: str | None = None
    states: int = 1
    flops: int | None = None
    evaluations: int = 0
    is_exact: bool = True
    parts: tuple[Route, ...] = ()
    choices: tuple[int, ...] = field(default=(), repr=False)

    @property
    def is_slow(self) -> bool:
        """True where nodes are evaluated one by one, often enough to notice."""
        return self.evaluations > SLOW

    def warn_if_slow(self) -> None:
        """Warn, before it starts, of what will take long."""
        if self.is_slow:
            warnings.warn(str(self), PerformanceWarning, stacklevel=3)

    def __str__(self) -> str:
        cost = [f"{self.states:,} joint states"] if self.states > 1 else []
        cost += [f"{self.flops:,} FLOPs"] if self.flops is not None else []
        cost += [f"{self.evaluations:,} node evaluations in Python"] if self.evaluations else []
        exact = "exact" if self.is_exact else "approximate"
        told = f"{self.question}: {self.algorithm} ({exact}; {', '.join(cost) or 'one state'}), because {self.reason}"
        return "\n  ".join([told, *map(str, self.parts)])

    def _repr_html_(self) -> str:
        return f"<p>{html.escape(str(self))}</p>"


@dataclass(frozen=True)
class Obstacle:
    """Why an algorithm cannot answer, where it is no error to ask it: the next rule applies."""

    what: str
    reason: str

    def __str__(self) -> str:
        return f"{self.what} is {self.reason}"


Fault = Obstacle | ReadingError  # a ReadingError is what the algorithm raises to whoever asks it directly


@dataclass(frozen=True)
class Rule(Generic[S]):
    """One line of a table of rules.

    Args:
        algorithm: Its name, as above.
        reason: Why the algorithm is the one to take where no fault is found, in words.
        fault: What finds, in the structure of a question, why the algorithm cannot answer it; None where it can.
    """

    algorithm: str
    reason: str
    fault: Callable[[S], Fault | None] = lambda _: None


def choose(question: str, rules: Sequence[Rule[S]], subject: S) -> Route:
    """The route by the first rule without a fault; the fault of the rule before it is its reason.

    The last rule has to apply to everything.
    """
    before: Fault | None = None
    for rule in rules:
        fault = rule.fault(subject)
        if fault is None:
            if before is None or rule.algorithm in FAST:
                return Route(question, rule.algorithm, rule.reason)
            return Route(question, rule.algorithm, f"{rule.reason}; not faster, for {fault_text(before)}", before.what)
        before = fault
    raise AssertionError(f"no rule for {question}")


def fault_text(fault: Fault) -> str:
    """A fault in words, for the reason of a route."""
    if isinstance(fault, Obstacle):
        return str(fault)
    return f"{fault.what} would need {fault.expected}, and there is {fault.got}"
