"""Rows of the import times: whole processes, those compared run in turn."""

from __future__ import annotations

from benchmarks.harness import Figure, differences, figure, interleaved, peak_of_python, processes_clock, python

TORCH = "import torch"
BOTH = "import torch, bnet_transformer; bnet_transformer.BNet"
ALONE = "import bnet_transformer, sys; assert 'torch' not in sys.modules"


def import_over_torch() -> list[Figure]:
    """`python -c "import torch, bnet_transformer; bnet_transformer.BNet"` against `python -c "import torch"`:
    whole processes, in turn."""
    calls = {"torch": python(TORCH), "both": python(BOTH)}
    spent = interleaved(calls, runs=15)
    work = interleaved(calls, runs=7, clock=processes_clock)
    return [
        figure("torch", spent["torch"], "s"),
        figure("torch and BNet", spent["both"], "s"),
        figure("more than torch", differences(spent["both"], spent["torch"]), "s", target=0.2),
        figure("more than torch, processor time", differences(work["both"], work["torch"]), "s"),
        figure("peak memory of torch", peak_of_python(TORCH), "MB"),
        figure("peak memory of torch and BNet", peak_of_python(BOTH), "MB"),
    ]


def import_alone() -> list[Figure]:
    """`python -c "import bnet_transformer"` against `python -c pass`: whole processes, in turn. The process
    itself asserts that torch is not imported."""
    spent = interleaved({"alone": python(ALONE), "nothing": python("pass")}, runs=21)
    return [
        figure("python alone", spent["nothing"], "s"),
        figure("import bnet_transformer", spent["alone"], "s", target=0.3),
        figure("peak memory", peak_of_python(ALONE), "MB"),
    ]
