"""The state of the live page, which every request carries and which the fragment of the address contains."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from bnet_transformer._core.checks import check_names
from bnet_transformer.errors import BNetError, BudgetError

MAX_NAMES = 64  # of nodes with evidence, or whose posteriors are shown


@dataclass(frozen=True)
class Limits:
    """The limits of one request, and of the server.

    Args:
        words: The maximum number of words of a sentence.
        flops: The maximum number of floating-point operations of one run of the net, and of all runs of a sweep.
        steps: The maximum number of interventions and undos of a state.
        body: The maximum number of bytes of a request.
        sentences: The number of sentences whose values are kept for the next request.
        threads: The number of answers that are computed at the same time.
        jobs: The maximum number of requests that run or wait.
        connections: The maximum number of connections.
        transfer_seconds: The maximum number of seconds in which a request arrives, and in which a client reads no part
            of an answer.
    """

    words: int = 256
    flops: float = 2e13
    steps: int = 64
    body: int = 1_000_000
    sentences: int = 6
    threads: int = 4
    jobs: int = 64
    connections: int = 100
    transfer_seconds: float = 30


@dataclass(frozen=True)
class Question:
    """A node and states of it: the readout of contributions, or the metric of a sweep.

    Args:
        node: The name of the node; empty for the default.
        of: A state, or two states whose difference is the question; empty for the value of the node.
    """

    node: str = ""
    of: tuple[str, ...] = ()


@dataclass(frozen=True)
class PageState:
    """The state of the live page.

    Args:
        model: The name of the model.
        text: The sentence; the texts of several stacks are separated by `|`. Empty for an example.
        steps: The messages of `do` and `undo`, in their order.
        evidence: The observed state of nodes, as its index or as text.
        posterior: The nodes whose posteriors are shown, in addition to selectors.
        contributions: The readout whose contributions are shown; None for no contributions.
        other: The sentence whose values are patched into this one.
        patch: The metric of the sweep.
        roles: The role of the nodes that the sweep patches; empty for the hidden states.
    """

    model: str
    text: str
    steps: tuple[Mapping[str, Any], ...] = ()
    evidence: tuple[tuple[str, str | int], ...] = ()
    posterior: tuple[str, ...] = ()
    contributions: Question | None = None
    other: str = ""
    patch: Question = Question()
    roles: str = ""

    def get_key(self, num_steps: int) -> tuple[str, ...]:
        """The text that identifies the sentence after some steps, without evidence."""
        steps = json.dumps([dict(step) for step in self.steps[:num_steps]], sort_keys=True)
        return self.model, self.text, steps, self.other if '"other"' in steps else ""


def parse_page_state(document: object, limits: Limits) -> PageState:
    """Return the state that a JSON document describes.

    Args:
        document: The document: an object with the fields of `PageState`; `model` and `text` are required.
        limits: The limits of a request.

    Returns:
        The state.

    Raises:
        BNetError: A field is unknown or has another type.
        BudgetError: The state has too many steps or names, or its text is too long.
    """
    fields = _check_type("state", document, dict)
    check_names("field of the state", fields, list(PageState.__dataclass_fields__))
    texts = {name: _check_type(name, fields.get(name, ""), str) for name in ("model", "text", "other", "roles")}
    for name in ("text", "other"):
        _check_text(name, texts[name], limits)
    steps = [_check_type("step", step, dict) for step in _check_type("steps", fields.get("steps", []), list)]
    _check_count("steps", len(steps), limits.steps)
    evidence = _check_type("evidence", fields.get("evidence", {}), dict)
    _check_count("evidence", len(evidence), MAX_NAMES)
    values = tuple((name, _check_observed(name, value)) for name, value in evidence.items())
    posterior = _check_texts("posterior", fields.get("posterior", []))
    _check_count("posterior", len(posterior), MAX_NAMES)
    contributions = fields.get("contributions")
    question = None if contributions is None else _parse_question("contributions", contributions)
    patch = _parse_question("patch", fields.get("patch", {}))
    return PageState(
        steps=tuple(steps), evidence=values, posterior=posterior, contributions=question, patch=patch, **texts
    )


def _check_type(subject: str, value: object, kind: type[Any]) -> Any:
    """Return a value of JSON if it has the type."""
    if not isinstance(value, kind) or isinstance(value, bool):
        names: dict[type[Any], str] = {dict: "an object", list: "a list", str: "a text"}
        raise BNetError(subject, expected=f"{names[kind]} in JSON", actual=value)
    return value


def _check_texts(subject: str, value: object) -> tuple[str, ...]:
    """Return a list of texts."""
    return tuple(_check_type(subject, item, str) for item in _check_type(subject, value, list))


def _check_count(subject: str, count: int, maximum: int) -> None:
    """Raise an error if a list is too long."""
    if count > maximum:
        hint = "Undo all interventions, and set fewer nodes" if subject == "steps" else None
        raise BudgetError(subject, expected=f"at most {maximum} entries", actual=count, hint=hint)


def _check_observed(name: str, value: object) -> str | int:
    """Return the observed state of a node: its index, or text."""
    if isinstance(value, bool) or not isinstance(value, str | int):
        raise BNetError(name, expected="the index of a state, or a text", actual=value)
    return value


def _check_text(subject: str, text: str, limits: Limits) -> None:
    """Raise an error for a text that is too long to be split into words, and for text that is not Unicode."""
    if len(text) > 40 * limits.words:
        expected = f"at most {limits.words} words and {40 * limits.words:,} characters"
        raise BudgetError(subject, expected=expected, actual=f"{len(text):,} characters", hint="Use a shorter sentence")
    if "\0" in text or any("\ud800" <= letter <= "\udfff" for letter in text):
        raise BNetError(subject, expected="text in UTF-8", actual="invalid characters")


def _parse_question(subject: str, value: object) -> Question:
    """Return a node and its states."""
    fields = _check_type(subject, value, dict)
    check_names(f"field of {subject}", fields, ("node", "of"))
    node, of = _check_type(subject, fields.get("node", ""), str), _check_texts(subject, fields.get("of", []))
    if len(of) > 2:
        raise BNetError(subject, expected="one state, or two states", actual=f"{len(of)} states")
    return Question(node, of)
