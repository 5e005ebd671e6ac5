"""Numbers as text: in cells, at bars, and along axes with a common power of ten."""

from __future__ import annotations

from typing import Any

import numpy as np
from matplotlib.ticker import Formatter

from bnet_transformer._core.arrays import FloatArray

MIN_UNSCALED, MAX_UNSCALED = 0.01, 1e5  # if the largest number is outside this range, a power of ten is a common factor
MAX_POWER = 15
SUPERSCRIPTS = str.maketrans("0123456789-", "⁰¹²³⁴⁵⁶⁷⁸⁹⁻")


def choose_unit(*arrays: FloatArray) -> tuple[float, str]:
    """The factor that scales numbers to a readable size, and the text for their label.

    >>> choose_unit(np.array([0.002, -0.001])), choose_unit(np.array([2.0]))
    ((1000.0, ', in 10⁻³'), (1.0, ''))
    """
    largest = max(float(np.abs(array[np.isfinite(array)]).max(initial=0.0)) for array in arrays)
    power = 0
    while 0 < largest < MIN_UNSCALED and largest * 10.0**power < 0.1 and power < MAX_POWER:
        power += 3
    while largest >= MAX_UNSCALED and largest * 10.0**power >= 1000 and power > -MAX_POWER:
        power -= 3
    return 10.0**power, f", in 10{str(-power).translate(SUPERSCRIPTS)}" if power else ""


def format_number(value: float, largest: float, *, is_integer: bool = False, short: bool = True) -> str:
    """A number with two decimals, three if `largest` is below 0.1, or three digits if it is at least 100.

    The text "0" is for exactly 0, and no text is "-0".

    With `short`, numbers of at most 1 have no leading zero.

    >>> [format_number(value, 1.0) for value in (0.25, 0.0, -0.001, -0.5, 1.0)]
    ['.25', '0', '.00', '−.50', '1.00']
    >>> [format_number(value, 12345.0) for value in (12345.0, -1234.5, 12.34)]
    ['12345', '−1234', '12.3']
    """
    if value == 0:
        return "0"
    decimals = 0 if is_integer else 2 if largest >= 0.1 else 3
    if is_integer or largest < 100 or abs(value) < 0.01:
        text = f"{abs(value):.{decimals}f}"
    else:
        text = format_digits(abs(value))
    is_rounded_to_zero = not text.strip("0.")
    text = text[1:] if short and largest <= 1 and text.startswith("0.") else text
    return ("−" if value < 0 and not is_rounded_to_zero else "") + text


def format_digits(value: float, digits: int = 3, *, sign: bool = False) -> str:
    """A number with some significant digits, with all digits before the decimal point below `MAX_UNSCALED`.

    With `sign`, positive numbers have a plus sign.

    >>> format_digits(12345.6), format_digits(-0.12345), format_digits(2.0, sign=True), format_digits(1.5e-7)
    ('12346', '−0.123', '+2', '1.5e−07')
    """
    is_long = 10**digits - 0.5 <= abs(value) < MAX_UNSCALED
    return f"{value:{'+' if sign else ''}{'.0f' if is_long else f'.{digits}g'}}".replace("-", "−")


class UnitFormatter(Formatter):
    """Formats the ticks of an axis in a common power of ten, which the label of the axis has.

    Args:
        unit: The factor of the numbers.
    """

    def __init__(self, unit: float = 1.0) -> None:
        self.unit = unit
        self.tick_positions: FloatArray = np.zeros(0)

    def set_locs(self, locs: Any) -> None:
        """Set the positions of the ticks, which determine the number of decimals.

        Args:
            locs: The positions.
        """
        self.tick_positions = np.asarray(locs, dtype=float)

    def __call__(self, x: float, pos: int | None = None) -> str:
        decimals = count_decimals(np.array([*self.tick_positions, x]) * self.unit)
        text = f"{abs(x * self.unit):.{decimals}f}"
        return ("−" if x < 0 and text.strip("0.") else "") + text


def count_decimals(numbers: FloatArray) -> int:
    """The number of decimals that distinguish evenly spaced numbers.

    >>> count_decimals(np.array([0.0, 0.25, 0.5])), count_decimals(np.array([0.0, 20.0]))
    (2, 0)
    """
    steps = np.diff(np.unique(numbers))
    step = float(steps[steps > 1e-9 * float(np.abs(numbers).max())].min(initial=np.inf))
    tolerance = 1e-3 * (step if np.isfinite(step) else max(float(np.abs(numbers).max()), 1e-9))
    return next((d for d in range(12) if bool((np.abs(np.round(numbers, d) - numbers) < tolerance).all())), 12)
