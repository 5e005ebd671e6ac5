"""Outputs of models that tracr compiles (Lindner et al. 2023), for `test_programs_tracr.py`.

    python tracr_oracle.py < requests.json > outputs.json

This script runs in an environment with `tracr-pypi`, which requires jax, and without bnet_transformer. A request has a
program of `build_program`, the vocabulary, the maximum number of words, `causal` and sentences as lists of tokens. The
outputs of a request have, for each sentence, the value of each word.
"""

import json
import sys


def build_program(name):
    """A program of tracr's language with the name of a program of the corpus."""
    from tracr.compiler import lib  # pytest imports this file where tracr is not installed
    from tracr.rasp import rasp

    tokens, equal, greater = rasp.tokens, rasp.Comparison.EQ, rasp.Comparison.GT
    match name:
        case "shift":
            return lib.shift_by(1, tokens)
        case "reverse":
            return lib.make_reverse(tokens)
        case "histogram":
            return lib.make_hist()
        case "double histogram":
            count = lib.make_hist()
            return rasp.SelectorWidth(rasp.Select(count, count, equal))
        case "fraction":
            return lib.make_frac_prevs(tokens == "x")
        case "sort":
            return lib.make_sort_unique(tokens, tokens)
        case "balance":
            return lib.make_pair_balance(tokens, "(", ")")
        case "mode":
            count = lib.make_hist()
            return rasp.Map(lambda n: n == 0, rasp.SelectorWidth(rasp.Select(count, count, greater)))
        case "lookup":
            return rasp.Aggregate(rasp.Select(rasp.indices, tokens, equal), tokens)
        case "either":
            one, two = (lib.shift_by(k, tokens) for k in (1, 2))
            return rasp.SequenceMap(lambda s, t: "x" in (s, t), one, two)
    raise ValueError(name)


def run_request(request):
    from tracr.compiler import compiling

    program, vocabulary = build_program(request["program"]), set(request["vocabulary"])
    options = {"causal": request["causal"], "compiler_bos": "BOS"}
    model = compiling.compile_rasp_to_model(program, vocabulary, request["max_words"], **options)
    outputs = [model.apply(["BOS", *sentence]).decoded[1:] for sentence in request["sentences"]]
    return [[value.item() if hasattr(value, "item") else value for value in row] for row in outputs]


if __name__ == "__main__":
    json.dump([run_request(request) for request in json.load(sys.stdin)], sys.stdout)
