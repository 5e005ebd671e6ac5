"""Known programs: from a program in the language RASP to a net that computes it, with the circuit that is true of it.

`language` builds s-ops and selectors -> `program` (variables, values, evaluation in Python; also as a bnet of its
variables, without weights) -> `compiled` (directions of the residual stream, slices, heads and hidden units: the net,
and its true circuit). `corpus` is a list of programs.
"""

from bnet_transformer.programs.compiled import Compiled, TrueEdges, compile, true_edges
from bnet_transformer.programs.corpus import CORPUS, KnownProgram, get_program
from bnet_transformer.programs.language import (
    Selector,
    SOp,
    aggregate,
    fallback,
    indices,
    linear_sequence_map,
    map,
    select,
    selector_width,
    sequence_map,
    tokens,
)
from bnet_transformer.programs.program import Program

__all__ = [
    "CORPUS",
    "Compiled",
    "KnownProgram",
    "Program",
    "SOp",
    "Selector",
    "TrueEdges",
    "aggregate",
    "compile",
    "fallback",
    "get_program",
    "indices",
    "linear_sequence_map",
    "map",
    "select",
    "selector_width",
    "sequence_map",
    "tokens",
    "true_edges",
]
