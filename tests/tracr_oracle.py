"""Outputs of models that tracr compiles (Lindner et al. 2023), for `test_programs_tracr.py`.

    python tracr_oracle.py < requests.json > outputs.json

This script runs in an environment with `tracr-pypi`, which requires jax, and without bnet_transformer. A request has a
program of `PROGRAMS`, the vocabulary, the maximum number of words, `causal` and sentences as lists of tokens. The
outputs of a request have, for each sentence, the value of each word.
"""

import json
import sys

from tracr.compiler import compiling, lib
from tracr.rasp import rasp


def shift():
    return lib.shift_by(1, rasp.tokens)


def double_histogram():
    count = lib.make_hist()
    return rasp.SelectorWidth(rasp.Select(count, count, rasp.Comparison.EQ))


def is_mode():
    count = lib.make_hist()
    return rasp.Map(lambda n: n == 0, rasp.SelectorWidth(rasp.Select(count, count, rasp.Comparison.GT)))


def lookup():
    return rasp.Aggregate(rasp.Select(rasp.indices, rasp.tokens, rasp.Comparison.EQ), rasp.tokens)


def either():
    one, two = (lib.shift_by(k, rasp.tokens) for k in (1, 2))
    return rasp.SequenceMap(lambda s, t: "x" in (s, t), one, two)


PROGRAMS = {
    "shift": shift,
    "reverse": lambda: lib.make_reverse(rasp.tokens),
    "histogram": lib.make_hist,
    "double histogram": double_histogram,
    "fraction": lambda: lib.make_frac_prevs(rasp.tokens == "x"),
    "sort": lambda: lib.make_sort_unique(rasp.tokens, rasp.tokens),
    "balance": lambda: lib.make_pair_balance(rasp.tokens, "(", ")"),
    "mode": is_mode,
    "lookup": lookup,
    "either": either,
}


def run_request(request):
    program = PROGRAMS[request["program"]]()
    model = compiling.compile_rasp_to_model(
        program, set(request["vocabulary"]), request["max_words"], causal=request["causal"], compiler_bos="BOS"
    )
    outputs = [model.apply(["BOS", *sentence]).decoded[1:] for sentence in request["sentences"]]
    return [[value.item() if hasattr(value, "item") else value for value in row] for row in outputs]


if __name__ == "__main__":
    json.dump([run_request(request) for request in json.load(sys.stdin)], sys.stdout)
