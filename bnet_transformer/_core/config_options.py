"""Options that belong to a config: an unknown keyword raises an error that names the config with that option."""

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
    """Decorate a function so that an unknown keyword raises an error that names the config with that option.

    Args:
        **configs: For each parameter that takes a config, the frozen dataclasses that it takes.

    Returns:
        A decorator; the signature of the function stays as it is.

    Raises:
        BNetError: By the decorated function, for a keyword that is an option of a config.
        UnknownNameError: By the decorated function, for any other keyword that it does not have.
    """

    configs_of_option: dict[str, list[str]] = {}  # of each option the ways to write it
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
                expected, allowed = f"an option of {name}", " or ".join(configs_of_option[option])
                raise BNetError(option, expected=expected, actual="an option of a config", allowed=allowed)
            return function(*args, **options)

        return checked

    return decorate
