"""Options that live in a config: a keyword that a function does not have is answered with the config that has it."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from dataclasses import fields
from typing import Any, ParamSpec, TypeVar

from bnet_transformer.errors import BNetError, unknown

P = ParamSpec("P")
R = TypeVar("R")


def name_config_of_options(**configs: tuple[type[Any], ...]) -> Callable[[Callable[P, R]], Callable[P, R]]:
    """Decorate a function so that an unknown keyword raises an error that names the config with that option.

    Args:
        **configs: For each parameter that takes a config, the frozen dataclasses that it takes.

    Returns:
        A decorator; the signature of the function stays as it is.

    Raises:
        BNetError: By the decorated function, for a keyword that is an option of a config.
        UnknownNameError: By the decorated function, for any other keyword that it does not have.
    """

    def decorate(function: Callable[P, R]) -> Callable[P, R]:
        known = inspect.signature(function).parameters
        name = getattr(function, "__name__", "")

        @functools.wraps(function)
        def checked(*args: P.args, **options: P.kwargs) -> R:
            for option in options.keys() - known.keys():
                raise _misplaced(name, option, list(known), configs)
            return function(*args, **options)

        return checked

    return decorate


def _misplaced(function: str, option: str, known: list[str], configs: dict[str, tuple[type[Any], ...]]) -> BNetError:
    """The error of an option that the function does not have."""
    options = {kind: {field.name for field in fields(kind)} for kinds in configs.values() for kind in kinds}
    homes = [
        f"{parameter}=bt.{kind.__name__}({option}=...)"
        for parameter, kinds in configs.items()
        for kind in kinds
        if option in options[kind]
    ]
    if not homes:
        return unknown(f"{function} option", option, [*known, *sorted(set().union(*options.values()))])
    return BNetError(
        option, expected=f"an option of {function}", got="an option of a config", allowed=" or ".join(homes)
    )
