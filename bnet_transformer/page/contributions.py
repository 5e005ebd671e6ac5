"""The contributions that the page shows in the panel of a readout."""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from typing import Any

import torch

from bnet_transformer._core.naming import join_name
from bnet_transformer.errors import BNetError, format_value
from bnet_transformer.figures.labels import format_token
from bnet_transformer.inference import SentenceState
from bnet_transformer.residual_stream import Contributions
from bnet_transformer.residual_stream.contributions import fix_choices
from bnet_transformer.residual_stream.readout import compute_readout
from bnet_transformer.residual_stream.results import ContributionTable, rank_writers
from bnet_transformer.residual_stream.writers import Writer

MAX_PARTS = 100  # the number of the largest parts that the page contains; it shows the sum of the others
EXPECTED = "the result of contributions(...) for a node of this sentence, or a list of such results"


def parse_contributions(contributions: object) -> tuple[Contributions, ...]:
    """Return the results of an option of the page."""
    if contributions is None:
        return ()
    items = contributions if isinstance(contributions, list | tuple) else [contributions]
    for k, item in enumerate(items):
        if not isinstance(item, Contributions):
            text = f"{type(item).__name__} {format_value(item, 40)}" if not isinstance(item, ContributionTable) else ""
            actual = (text or type(item).__name__) + (f", item {k} of the list" if items is contributions else "")
            hint = "For paths of two and attention scores use bt.plot(result)"
            raise BNetError("contributions", expected=EXPECTED, actual=actual, hint=hint)
    return tuple(items)


def describe_contributions(state: SentenceState, results: Sequence[Contributions]) -> list[dict[str, Any]]:
    """Return the parts of each readout for JSON, largest first, each with the node of its writer."""
    return [_describe_result(state, result) for result in results]


def _describe_result(state: SentenceState, result: Contributions) -> dict[str, Any]:
    """The parts of one readout."""
    _check_sentence(state, result)
    _check_value(state, result)
    parts = result.parts.double()
    order = rank_writers(parts, len(parts))
    shown, omitted = order[:MAX_PARTS], order[MAX_PARTS:]
    effects = None if result.effects is None else result.effects.double().tolist()
    return {
        "node": result.node,
        "of": format_token(result.of, None) + result.describe_choices(),
        "value": float(result.value),
        "norms": list(result.norms),
        "has_effects": effects is not None,
        "parts": [
            {
                "writer": result.writers[k].name,
                "kind": result.writers[k].kind,
                "node": _name_node(state, result, result.writers[k]),
                "part": float(parts[k]),
                "effect": None if effects is None or math.isnan(effects[k]) else effects[k],
            }
            for k in shown
        ],
        "num_omitted": len(omitted),
        "omitted": float(parts[omitted].sum()),
    }


def _check_sentence(state: SentenceState, result: Contributions) -> None:
    """Raise an error if the words of a result, its node or its writers are not those of the sentence."""
    names = {spec.group.name: spec.group for spec in state.network.specs}
    sizes = state.network.graph.plate_sizes
    words = tuple(itertools.chain.from_iterable(state.tokens.values()))
    if result.words[:-1] != words:
        actual = f"a result for the words {' '.join(result.words[:-1])!r}"
        raise BNetError("contributions", expected=EXPECTED, actual=actual)
    state.ground.id(result.node)
    for writer in result.writers:
        plates = () if writer.group not in names else names[writer.group].plates
        is_inside = len(plates) == len(writer.plates) and all(
            k < sizes[plate] for k, plate in zip(writer.plates, plates, strict=True)
        )
        if writer.group not in names or not is_inside:
            raise BNetError("contributions", expected=EXPECTED, actual=f"a result with the writer {writer.name}")


def _check_value(state: SentenceState, result: Contributions) -> None:
    """Raise an error if the readout has another value in this sentence, as after another `do`."""
    if result.readout is None:  # an older file
        hint = "Call contributions(...) of this sentence"
        raise BNetError("contributions", expected=EXPECTED, actual="a result without its readout", hint=hint)
    state, choices, _ = fix_choices(state, state.ground.id(result.node))
    value = compute_readout(state, result.node, result.readout)
    rounding = torch.finfo(result.value.dtype).eps ** 0.5
    if (
        choices != result.choices
        or value is None
        or value.shape != result.value.shape
        or not bool(
            torch.isclose(value.to(result.value), result.value, rtol=rounding, atol=rounding, equal_nan=True).all()
        )
    ):
        actual = f"a result for other interventions, observations or parameters: {result.of} differs at {result.node}"
        hint = "Call contributions(...) of this sentence"
        raise BNetError("contributions", expected=EXPECTED, actual=actual, hint=hint)


def _name_node(state: SentenceState, result: Contributions, writer: Writer) -> str:
    """The node of a writer: at the word of the readout if it writes there, else at the last of its words."""
    if not writer.words:
        return join_name(writer.group, writer.plates)
    _, index = state.ground.unravel_index(state.ground.id(result.node))
    word = index[-1] if index and index[-1] in writer.words else writer.words[-1]
    return join_name(writer.group, (*writer.plates, word))
