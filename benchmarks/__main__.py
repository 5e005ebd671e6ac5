"""`python -m benchmarks [row or page ...] [--runs N] [--json FILE] [--markdown FILE]`: measure rows, print tables."""

from __future__ import annotations

import argparse
import os
import shlex
import sys
from collections.abc import Sequence

from benchmarks import (
    chains,
    compiled,
    contributions,
    edges,
    fits,
    growth,
    heads,
    imports,
    induction,
    lens,
    mixtures,
    page,
    pretrained,
    queries,
    recurrent,
    report,
    serve,
    smollm2_edges,
    structure,
    sweeps,
    vanilla,
)
from benchmarks.harness import MAX_RUNS, Row

GRAPHS = "networkx objects and names, no tensor work"
IMPORTS = "the files that a process reads and executes for an import"
SEARCH = "a search in a graph of integers"
MEMORY = "the row measures memory, not time"
ACCURACY = "the row measures accuracy, not speed"
STRINGS = "string work and gzip"
BROWSER = "drawing by a browser"
RATIO = "the row compares queries with each other"
RECURSIONS = "recursions along the words, without large products"
SEARCHES = "the row measures searches, not a fixed amount of work"
BACKWARD = "the forward pass dominates, which llama-forward compares with its limit"
STUDY = "the row compares the parts of a study with a forward pass, which smollm2-forward-32 compares with its limit"
SLOPES = "the row measures growth, not speed"

ROWS = (
    Row("arrows-128", "structure", structure.arrows_of_128_words),
    Row("arrows-512", "structure", structure.arrows_of_512_words),
    Row("networkx-128", "structure", structure.networkx_of_128_words, GRAPHS),
    Row("import-over-torch", "structure", imports.import_over_torch, IMPORTS),
    Row("import-package", "structure", imports.import_package, IMPORTS),
    Row("encoder-forward", "compiled", compiled.encoder_forward),
    Row("encoder-training", "compiled", compiled.encoder_training),
    Row("mixture-step", "compiled", mixtures.mixture_step),
    Row("codebook-step", "compiled", mixtures.codebook_step),
    Row("codebook-categorical-step", "compiled", mixtures.codebook_categorical_step),
    Row("head-posteriors", "compiled", mixtures.head_posteriors),
    Row("mixture-step-32", "fit", mixtures.mixture_step_of_32),
    Row("codebook-step-32", "fit", mixtures.codebook_step_of_32),
    Row("restarts", "fit", fits.batched_restarts),
    Row("recovery-small", "fit", fits.recovery_with_2_features, SEARCHES),
    Row("recovery-wide", "fit", fits.recovery_with_8_features, SEARCHES),
    Row("separations-512", "queries", queries.separations_of_512_words, SEARCH),
    Row("posteriors-1000", "queries", queries.posteriors_of_1000_sentences),
    Row("posteriors-ablated", "queries", queries.posteriors_after_an_ablation, RATIO),
    Row("chain-pass", "chains", chains.net_pass),
    Row("chain-posteriors", "chains", chains.posteriors_of_all_words, RECURSIONS),
    Row("chain-path", "chains", chains.best_path, RECURSIONS),
    Row("chain-em", "chains", chains.em_step, RECURSIONS),
    Row("sweep-slice-word", "sweeps", sweeps.sweep_of_slices_and_words),
    Row("sweep-slice-word-small", "sweeps", sweeps.sweep_of_slices_and_words_small),
    Row("sweep-slice-head", "sweeps", sweeps.sweep_of_slices_and_heads),
    Row("sweep-arrows", "sweeps", sweeps.sweep_of_all_arrows),
    Row("sweep-neurons", "sweeps", sweeps.sweep_of_neurons),
    Row("ablations", "sweeps", sweeps.ablations),
    Row("attribution", "sweeps", sweeps.attribution),
    Row("trace", "sweeps", sweeps.trace_of_all_nodes),
    Row("contributions", "contributions", contributions.contributions_of_all_heads, BACKWARD),
    Row("sweep-memory", "sweeps", sweeps.memory_of_a_sweep, MEMORY),
    Row("lens", "lens", lens.lens_of_64_words),
    Row("edges-first-order", "edges", edges.all_edges_to_first_order),
    Row("edges-exact", "edges", edges.exact_edges),
    Row("edges-smollm2", "edges", smollm2_edges.study_of_a_circuit, STUDY),
    Row("induction-by-hand", "circuits", induction.planted_by_hand, ACCURACY),
    Row("induction-trained", "circuits", induction.planted_by_training, ACCURACY),
    Row("circuit-search", "circuits", induction.search_of_4_slices, SEARCHES),
    Row("gated-runs", "heads", heads.gated_runs),
    Row("inclusion-memory", "heads", heads.memory_of_inclusion, MEMORY),
    Row("inclusion-growth", "heads", heads.growth_with_heads),
    Row("training-step", "vanilla", vanilla.training_step),
    Row("decoding", "vanilla", vanilla.decoding),
    Row("minilm-forward", "pretrained", pretrained.minilm_forward),
    Row("minilm-forward-long", "pretrained", pretrained.minilm_forward_long),
    Row("minilm-attentions", "pretrained", pretrained.minilm_attentions),
    Row("minilm-load", "pretrained", pretrained.minilm_load),
    Row("minilm-check", "pretrained", pretrained.minilm_check, RATIO),
    Row("smollm2-check", "pretrained", pretrained.smollm2_check, RATIO),
    Row("llama-forward", "pretrained", pretrained.llama_forward),
    Row("llama-forward-padded", "pretrained", pretrained.llama_forward_padded),
    Row("llama-attentions", "pretrained", pretrained.llama_attentions),
    Row("llama-load", "pretrained", pretrained.llama_load),
    Row("smollm2-forward-32", "smollm2", pretrained.smollm2_forward_32),
    Row("smollm2-forward-128", "smollm2", pretrained.smollm2_forward_128),
    Row("smollm2-load", "smollm2", pretrained.smollm2_load),
    Row("t5-forward", "pretrained", pretrained.t5_forward),
    Row("t5-forward-padded", "pretrained", pretrained.t5_forward_padded),
    Row("t5-attentions", "pretrained", pretrained.t5_attentions),
    Row("t5-load", "pretrained", pretrained.t5_load),
    Row("rnn-forward", "recurrent", recurrent.rnn_forward),
    Row("lstm-forward", "recurrent", recurrent.lstm_forward),
    Row("lstm-training", "recurrent", recurrent.lstm_training),
    Row("pages-written", "page", page.written_pages, STRINGS),
    Row("page-in-chromium", "page", page.page_in_chromium, BROWSER),
    Row("live-page", "serve", serve.live_page, BROWSER),
    Row("growth-forward", "growth", growth.of_the_forward_pass, SLOPES),
    Row("growth-training", "growth", growth.of_a_training_step, SLOPES),
    Row("growth-elimination", "growth", growth.of_elimination, SLOPES),
    Row("growth-ground", "growth", growth.of_the_ground_graph, SLOPES),
    Row("growth-sweep", "growth", growth.of_a_sweep, SLOPES),
)


def main(argv: Sequence[str] | None = None) -> int:
    """Measure the named rows, or all rows."""
    pages = list(dict.fromkeys(row.page for row in ROWS))
    parser = argparse.ArgumentParser(prog="python -m benchmarks", description=__doc__)
    known = [*pages, *(row.name for row in ROWS)]
    parser.add_argument("--runs", type=int, metavar="N", help="at most N runs of each call, for a quick check")
    args = report.parse_arguments(parser, known, f"a row or a page of rows: {', '.join(known)}", argv)
    if args.runs is not None and args.runs < 1:
        parser.error(f"--runs: expected at least 1; got {args.runs}")
    if args.runs is not None:
        os.environ[MAX_RUNS] = str(args.runs)
    selected = [row for row in ROWS if not args.rows or {row.name, row.page} & set(args.rows)]
    figures = {}
    for row in selected:
        print(f"measuring {row.name} ...", file=sys.stderr, flush=True)
        figures[row] = row.measure_figures()
    command = "python -m benchmarks " + shlex.join(sys.argv[1:] if argv is None else argv)
    title = "Benchmarks: " + ", ".join(dict.fromkeys(row.page for row in selected))
    report.write_report(args, title, command, figures, report.describe_conditions())
    return 0


if __name__ == "__main__":
    sys.exit(main())
