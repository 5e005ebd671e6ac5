"""The view of the page as JSON: the selected node, and the settings that differ from those of the options.

`frontend/view_state.js` has the same fields. In a link, it ignores invalid fields; here they are errors.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

from bnet_transformer._core.checks import check_choice, check_float, check_int, check_mapping, check_names
from bnet_transformer._core.naming import join_name
from bnet_transformer.errors import BNetError
from bnet_transformer.graph import GroundGraph, find_family

SWITCHES = ("all_words", "unfold_heads", "show_weights", "show_special")
HIGHLIGHTS = ("", "parents", "children", "ancestors", "descendants", "blanket")


def check_selected(ground: GroundGraph, name: object) -> str | None:
    """Return the name of a selected node, or None; a star may replace the index of each plate: `a_0_*_2`.

    Args:
        ground: The graph of the sentence.
        name: The name.
    """
    if name is None:
        return None
    if not isinstance(name, str) or "*" not in name:
        return ground.name(ground.id(name))
    try:
        find_family(ground, name)
    except BNetError as error:
        raise type(error)("selected", **{**error.parts, "actual": repr(name)}) from None
    (group, index), *more_groups = ground.template.match_groups(name, ground.word_counts)
    is_word_open = group.word_stack is not None and index[-1] is None
    if more_groups or not ground.template.has_all_indices(name, group) or is_word_open:
        first = next(ground.iter_names(group))
        expected = "the name of a node, or stars for the indices of its plates"
        hint = f"A star cannot replace a word; try {first}"
        raise BNetError("selected", expected=expected, actual=repr(name), hint=hint)
    sizes = zip(index, ground.shapes[group.index], strict=True)
    return join_name(group.name, ["*" if i is None and size > 1 else i or 0 for i, size in sizes])


def check_view(view: object, ground: GroundGraph, description: Mapping[str, Any]) -> dict[str, Any]:
    """Return the settings of a view as JSON.

    Args:
        view: The settings, by name.
        ground: The graph of the sentence.
        description: The description of the page.

    Raises:
        BNetError: A setting is unknown, or has a value that the page does not have.
    """
    fields = check_mapping("view", view)
    checks = _make_checks(ground, description)
    check_names("setting of the view", fields, list(checks))
    return {name: checks[name](value) for name, value in fields.items()}


def list_sections(description: Mapping[str, Any]) -> list[int | str]:
    """Return the names of the slices that can be unfolded: the step of a slice, after the name of its stack."""
    groups = [g for g in description["groups"] if not g["is_state"] and g["step"] is not None and not g["depth"]]
    return list(dict.fromkeys(f"{g['stack']}:{g['step']}" if g["stack"] else int(g["step"]) for g in groups))


def _make_checks(ground: GroundGraph, description: Mapping[str, Any]) -> dict[str, Callable[[object], Any]]:
    """For each setting, the function that checks its value and returns it as JSON."""
    groups, attention = description["groups"], description["attention"]
    count = max(description["plate_sizes"].get("head", 1), *(item["num_plates"] for item in attention), 1)
    heads = range(count) if description["heads"] is None else description["heads"]
    # A selector that is set has no choices, but its entry is valid: it applies again after `undo`.
    selectors = [group for group in ground.template.groups if groups[group.index]["is_selector"]]
    choices: dict[str, int | None] = {name: None for group in selectors for name in ground.iter_names(group)}
    choices |= {name: count for item in attention for name, count in item["choices"]}
    return {
        "unfolded": partial(_check_unfolded, list_sections(description)),
        "head": partial(_check_option, "head", ["mean", "all", *heads]),
        "states": partial(_check_states, choices),
        "min_weight": _check_probability,
        "top": lambda value: check_int("top", value, minimum=0),
        **{name: partial(_check_option, name, [True, False]) for name in SWITCHES},
        "highlight": partial(_check_option, "highlight", HIGHLIGHTS),
    }


def _check_option(subject: str, options: Any, value: object) -> object:
    """Return one of the options."""
    try:
        check_choice(subject, value, options)
    except BNetError as error:  # quotes, because "2" is not head 2
        raise BNetError(subject, **{**error.parts, "actual": repr(value)}) from None
    return value


def _check_unfolded(sections: list[int | str], value: object) -> list[object]:
    """Return the unfolded slices."""
    if not isinstance(value, list | tuple | range):
        raise BNetError("unfolded", expected="a list of slices", actual=value)
    return [_check_option("unfolded", sections, item) for item in value]


def _check_states(choices: Mapping[str, int | None], value: object) -> dict[str, int] | None:
    """Return the state of each selector whose attention is shown; None for the posterior mean."""
    if value is None:
        return None
    states = check_mapping("states", value)
    check_names("selector", states, list(choices))
    result = {name: check_int(name, state, minimum=0) for name, state in states.items()}
    for name, state in result.items():
        if (count := choices[name]) is not None and state >= count:
            raise BNetError(name, expected=f"a state from 0 to {count - 1}", actual=state)
    return result


def _check_probability(value: object) -> float:
    """Return the minimum P(j | i) that is drawn."""
    number = check_float("min_weight", value, minimum=0)
    if number > 1:
        raise BNetError("min_weight", expected="a number from 0 to 1", actual=value)
    return number
