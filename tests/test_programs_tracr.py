"""Compiled programs have the outputs of the models that tracr compiles, in another environment."""

import json
import os
import random
import subprocess
import sys
from pathlib import Path

import pytest

from bnet_transformer.programs.corpus import get_program

ORACLE = Path(__file__).parent / "tracr_oracle.py"
PYTHON = Path(os.environ.get("TRACR_PYTHON", Path(sys.prefix) / "tracr" / "bin" / "python"))
NAMES = [
    *("shift", "reverse", "histogram", "double histogram", "fraction", "sort", "balance", "mode", "lookup"),
    "either",
]
NUM_SENTENCES = 4


@pytest.fixture(scope="module")
def tracr_outputs():
    """The sentences of each program, and the outputs of tracr."""
    if not PYTHON.exists():
        pytest.skip("the oracle of compiled programs: make tracr")
    requests = []
    for name in NAMES:
        known = get_program(name)
        sentences = [words for words in known.list_sentences() if len(words) == known.max_words]
        sentences = random.Random(3).sample(sentences, NUM_SENTENCES)
        request = {"program": name, "vocabulary": [*known.vocabulary], "max_words": known.max_words}
        requests.append({**request, "causal": known.causal, "sentences": sentences})
    run = subprocess.run([PYTHON, ORACLE], input=json.dumps(requests), capture_output=True, text=True, check=True)
    return {r["program"]: (r["sentences"], out) for r, out in zip(requests, json.loads(run.stdout), strict=True)}


@pytest.mark.slow
@pytest.mark.parametrize("name", NAMES)
def test_outputs_are_those_of_the_model_that_tracr_compiles(tracr_outputs, name):
    compiled = get_program(name).compiled
    sentences, expected = tracr_outputs[name]
    outputs = compiled.predict(sentences)
    # A word without a value has no meaningful output in tracr, which has no state for it.
    compared = [
        (a, b) for row in zip(outputs, expected, strict=True) for a, b in zip(*row, strict=True) if a is not None
    ]
    assert len(compared) >= NUM_SENTENCES
    if compiled.program.output.is_numeric:
        assert all(a == pytest.approx(b, abs=1e-5) for a, b in compared)  # tracr computes in float32
    else:
        assert all(a == b for a, b in compared)
