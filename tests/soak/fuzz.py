"""Every parser, fed with spoilt inputs: a value that comes back the same, or one clear refusal; nothing is run.

    python -m tests.soak.fuzz "net file" --seconds 60 --corpus FOLDER      one parser, by atheris

Hypothesis spoils sound inputs by their grammar and by bytes; atheris, where it is installed, is led by coverage. Each
parser has a process of its own, with a bound on its memory: a crash or a hang of a library is seen as well.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import os
import re
import subprocess
import sys
import time
from functools import partial
from pathlib import Path

from tests.soak.probing import LONGEST, Found, Probe, Setup, Tally, child, folder

LAW = "read and written back the same, or one BNetError; at most 10 s of work; no program, code, pickle or socket"
MEMORY = 4 * 2**30  # bytes that a parser may take beyond what its process has at first
NAMES = (
    "net file",
    "signed net",
    "safetensors header",
    "declaration",
    "class of a stranger",
    "checkpoint",
    "checkpoint of a fit",
    "fit file",
    "HDF5",
    "parts of HDF5",
    "config.json",
    "index of weights",
    "widget's message",
    "completed line",
    "pretrained weights",
    "tokenizer.json",
    "vocabulary files",
    "text",
    "graph JSON",
    "token stream",
    "name",
    "value on a command line",
    "file of sentences",
    "command line",
)
NEEDS = {  # the package without which a parser is left out, here and in tests/test_fuzz.py
    "widget's message": "anywidget",
    "parts of HDF5": "h5py",
    "signed net": "tokenizers",
    "HDF5": "h5py",
    "tokenizer.json": "tokenizers",
    "vocabulary files": "tokenizers",
    "text": "tokenizers",
}
PER_TRY = 20  # inputs


def probe_hypothesis(name: str, setup: Setup) -> Found:
    """So many inputs, drawn from a seed."""
    tally = Tally(f"{name}, by hypothesis", LAW)
    if not importlib.util.find_spec(NEEDS.get(name, "json")):
        return Found(tally.probe, LAW, 0, seen=f"needs {NEEDS[name]}", left_out=True)
    with folder() as place:
        out = place / "found.json"
        made = child(hunt, name, setup.times * PER_TRY, setup.seed, LONGEST / 2, out)
        made.join(2 * LONGEST)
        if made.is_alive():
            made.kill()
            made.join()
        told = json.loads(out.read_text()) if out.exists() else {"inputs": 1, "faults": []}
        if made.exitcode or not out.exists():
            told["faults"].append(f"the process ended with {made.exitcode}")
    tally.tries = told["inputs"]
    tally.failures += [f"{name}, seed {setup.seed}: {fault}" for fault in told["faults"]]
    return tally.found(f"{told['inputs']} inputs")


def hunt(name: str, count: int, seed: int, seconds: float, out: Path) -> None:
    """Feed a parser; every fault once, by where it was raised, with the shortest input that raises it."""
    import hypothesis

    from tests import fuzzing

    parser, began = fuzzing.all_parsers()[name], time.monotonic()
    _bound_memory()
    inputs, faults = 0, {}

    @hypothesis.seed(seed)
    @hypothesis.settings(
        max_examples=count, deadline=None, database=None, phases=[hypothesis.Phase.generate],
        suppress_health_check=list(hypothesis.HealthCheck),
    )  # fmt: skip
    @hypothesis.given(fuzzing.inputs(parser))
    def run(data: bytes) -> None:
        nonlocal inputs
        if time.monotonic() - began > seconds:
            return
        inputs += 1
        try:
            parser.target(data)
        except BaseException as error:  # a panic of Rust is no Exception
            key = (type(error).__name__, _place(error))
            if key not in faults or len(data) < len(faults[key][1]):
                faults[key] = (str(error)[:200], data)

    run()
    told = [f"{kind} at {where}: {said} of {data[:300]!r}" for (kind, where), (said, data) in faults.items()]
    out.write_text(json.dumps({"inputs": inputs, "faults": told}))


def _place(error: BaseException) -> str:
    """Where an error was raised."""
    trace = error.__traceback__
    while trace is not None and trace.tb_next is not None:
        trace = trace.tb_next
    return "" if trace is None else f"{Path(trace.tb_frame.f_code.co_filename).name}:{trace.tb_lineno}"


def _bound_memory() -> None:
    """Bound what this process may still take, where the system can (not macOS, not Windows)."""
    if sys.platform != "linux":
        return
    import resource

    pages = int(Path("/proc/self/statm").read_text().split()[0])
    resource.setrlimit(resource.RLIMIT_AS, (pages * resource.getpagesize() + MEMORY,) * 2)


def probe_atheris(name: str, setup: Setup) -> Found:
    """Inputs led by coverage, for some seconds, from a corpus of sound ones."""
    tally = Tally(f"{name}, by atheris", LAW)
    missing = [each for each in ("atheris", NEEDS.get(name, "json")) if not importlib.util.find_spec(each)]
    if missing:
        why = f"{missing[0]} is not installed: pip install -c constraints.txt -e '.[soak]'"
        return Found(tally.probe, LAW, 0, seen=why, left_out=True)
    seconds = max(2, setup.times // 5)
    with folder() as place:
        command = [sys.executable, "-m", "tests.soak.fuzz", name, "--seconds", str(seconds), "--corpus", str(place)]
        command += ["--seed", str(setup.seed + 1)]
        try:
            done = subprocess.run(command, capture_output=True, timeout=seconds + 3 * LONGEST, env=_environment())
            said, status = (done.stdout + done.stderr).decode("utf-8", "replace"), done.returncode
        except subprocess.TimeoutExpired:
            said, status = "a hang", 124
        tally.tries = max([1, *map(int, re.findall(r"stat::number_of_executed_units: (\d+)", said))])
        crashes = [path.read_bytes() for path in sorted(place.glob("fault-*"))]
    if status:
        raised = re.findall(r"^[\w.]*(?:Error|Exception|Executed)\b.*$", said, re.MULTILINE)
        told = raised[-1] if raised else said.strip().rpartition("\n")[2]
        tally.failures.append(f"{name}, seed {setup.seed}: {told[:300]} of {crashes[0][:300] if crashes else b''!r}")
    return tally.found(f"{seconds} s")


def _environment() -> dict[str, str]:
    return {**os.environ, "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}


def main() -> None:
    """One parser, by atheris, in this process; it ends with the process."""
    parser = argparse.ArgumentParser(prog="python -m tests.soak.fuzz", description=(__doc__ or "").splitlines()[0])
    parser.add_argument("name", choices=NAMES)
    parser.add_argument("--seconds", type=int, default=60)
    parser.add_argument("--corpus", type=Path, required=True, help="a folder; faults are put there as well")
    parser.add_argument("--seed", type=int, default=1)
    asked = parser.parse_args()
    import atheris

    with atheris.instrument_imports(include=["bnet_transformer"]):
        from tests import fuzzing

        fed = fuzzing.all_parsers()[asked.name]
        for data in fed.sound:  # what is imported when it is needed, is imported now
            fed.target(data)
    corpus = asked.corpus / "corpus"
    corpus.mkdir(parents=True, exist_ok=True)
    for k, data in enumerate([*fed.sound, *fuzzing.chances(fed, 8)]):
        (corpus / f"sound-{k}").write_bytes(data)
    options = {"max_total_time": asked.seconds, "seed": asked.seed, "timeout": 0, "print_final_stats": 1}
    options |= {"rss_limit_mb": MEMORY // 2**20, "max_len": 2**16}
    told = [f"-{name}={value}" for name, value in options.items()]
    arguments = [sys.argv[0], str(corpus), f"-artifact_prefix={asked.corpus}/fault-", *told]

    def changed(data: bytes, most: int, seed: int) -> bytes:
        found = fuzzing.change_of(fed, data, seed)
        return atheris.Mutate(data, most) if found is None or len(found) > most else found

    atheris.Setup(arguments, fed.target, custom_mutator=changed)
    atheris.Fuzz()


def plan(setup: Setup) -> list[tuple[Probe, Setup]]:
    """Every parser, by each fuzzer."""
    return [(partial(probe, name), setup) for name in NAMES for probe in (probe_hypothesis, probe_atheris)]


if __name__ == "__main__":
    main()
