"""Known programs: from a program in the language RASP to a net that computes it, with the circuit that is true of it.

`language` builds `sops` (s-ops and selectors) -> `program` (variables, values, evaluation in Python) -> `layout`
(directions of the residual stream, slices) -> `weights` (heads, hidden units) -> `compiled` (the net). `truth` computes
the circuit, and `corpus` is a list of programs. `variables` is a program as a bnet of its variables, without weights.
"""

from bnet_transformer.programs.compiled import Compiled, compile
from bnet_transformer.programs.corpus import CORPUS, KnownProgram, get_program
from bnet_transformer.programs.language import (
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
from bnet_transformer.programs.sops import Selector, SOp
from bnet_transformer.programs.truth import TrueEdges, true_edges

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
