"""Known programs: from a program in the language RASP to a net that computes it, with the circuit that is true of it.

`language` (s-ops and selectors) -> `program` (variables, values, evaluation in Python) -> `layout` (directions of the
residual stream, slices) -> `weights` (heads, hidden units) -> `compiled` (the net). `truth` computes the circuit, and
`corpus` is a list of programs.
"""

from bnet_transformer.programs.compiled import Compiled, compile
from bnet_transformer.programs.language import (
    SOp,
    Selector,
    aggregate,
    fallback,
    indices,
    linear_map,
    map,
    select,
    selector_width,
    sequence_map,
    tokens,
)
from bnet_transformer.programs.program import Program

__all__ = [
    "Compiled",
    "Program",
    "SOp",
    "Selector",
    "aggregate",
    "compile",
    "fallback",
    "indices",
    "linear_map",
    "map",
    "select",
    "selector_width",
    "sequence_map",
    "tokens",
]
