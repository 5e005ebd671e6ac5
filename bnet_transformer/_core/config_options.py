"""Options of configs: an unknown keyword of a function raises an error that names the config with this option."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from dataclasses import fields
from typing import Any, ParamSpec, TypeVar

from bnet_transformer.errors import BNetError, unknown_name_error

P = ParamSpec("P")
R = TypeVar("R")


def suggest_config_for_options(**configs: tuple[type[Any], ...]) -> Callable[[Callable[P, R]], Callable[P, R]]:
    """Decorate a function so that an unknown keyword raises an error that names the config with this option.

    Args:
        **configs: For each parameter that accepts a config, the frozen dataclasses that it accepts.

    Returns:
        A decorator, which preserves the signature of the function. The decorated function raises `BNetError` for a
        keyword that is an option of a config, and `UnknownNameError` for any other unknown keyword.
    """

    configs_of_option: dict[str, list[str]] = {}  # for each option, the code that sets it
    for parameter, kinds in configs.items():
        for kind in kinds:
            for field in fields(kind):
                configs_of_option.setdefault(field.name, []).append(f"{parameter}=bt.{kind.__name__}({field.name}=...)")

    def decorate(function: Callable[P, R]) -> Callable[P, R]:
        known = inspect.signature(function).parameters
        name = getattr(function, "__name__", "")

        @functools.wraps(function)
        def checked(*args: P.args, **options: P.kwargs) -> R:
            for option in options.keys() - known.keys():
                if option not in configs_of_option:
                    raise unknown_name_error(f"{name} option", option, [*known, *sorted(configs_of_option)])
                hint = f"Pass {' or '.join(configs_of_option[option])}"
                raise BNetError(option, expected=f"an option of {name}, not of a config", hint=hint)
            return function(*args, **options)

        return checked

    return decorate
