"""Rows of import times: whole processes, compared in turn."""

from __future__ import annotations

from benchmarks.harness import (
    Figure,
    children_cpu_time,
    differences,
    figure,
    make_python_call,
    measure_python_peak,
    time_calls,
)

TORCH = "import torch"
BOTH = "import torch, bnet_transformer; bnet_transformer.BNet"
PACKAGE = "import bnet_transformer, sys; assert 'torch' not in sys.modules"


def import_over_torch() -> list[Figure]:
    """`python -c "import torch, bnet_transformer; bnet_transformer.BNet"` compared with `python -c "import torch"`:
    whole processes, in turn."""
    calls = {"torch": make_python_call(TORCH), "both": make_python_call(BOTH)}
    spent = time_calls(calls, runs=15)
    work = time_calls(calls, runs=7, clock=children_cpu_time)
    return [
        figure("torch", spent["torch"], "s"),
        figure("torch and BNet", spent["both"], "s"),
        figure("more than torch", differences(spent["both"], spent["torch"]), "s", target=0.2),
        figure("more than torch, processor time", differences(work["both"], work["torch"]), "s"),
        figure("peak memory of torch", measure_python_peak(TORCH), "MB"),
        figure("peak memory of torch and BNet", measure_python_peak(BOTH), "MB"),
    ]


def import_package() -> list[Figure]:
    """`python -c "import bnet_transformer"` compared with `python -c pass`: whole processes, in turn. The process
    asserts that torch is not imported."""
    spent = time_calls({"alone": make_python_call(PACKAGE), "nothing": make_python_call("pass")}, runs=21)
    return [
        figure("python", spent["nothing"], "s"),
        figure("import bnet_transformer", spent["alone"], "s", target=0.3),
        figure("peak memory", measure_python_peak(PACKAGE), "MB"),
    ]
