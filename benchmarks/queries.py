"""Rows of queries of a bnet: separation on a large ground graph, posteriors of a batch of sentences."""

from __future__ import annotations

import random
import time
from collections.abc import Callable

from benchmarks.harness import Figure, figure, limit_runs, peak_memory, ratios, run_in_process, time_calls
from benchmarks.limits import measure_limit
from bnet_transformer.graph import GroundGraph

QUERIES, SENTENCES, WORDS = 10_000, 1_000, 16

Query = tuple[str, str, list[str]]


def separations_of_512_words() -> list[Figure]:
    """10,000 separation queries by name on a sentence of 512 words, 12 slices, 12 heads (concat), with the public
    method (`s.separations`, a new sentence each time): random nodes x and y given zero to four random nodes, half of
    them from the whole sentence, half from one region (one slice, words and heads below four), in one call; 100 of them
    in one call each; trails and separators. Every word attends to every word; then the same for a causal net. In a
    fresh process; memory is its peak resident memory (VmHWM), before the queries and after each kind."""
    return [row for mask in (None, "causal") for row in run_in_process(_measure_separations, mask)]


def _measure_separations(mask: str | None) -> list[Figure]:
    """Return the figures of separations with a mask."""
    import torch

    import bnet_transformer as bt

    net = bt.bayesuvius(24, slices=12, heads=12, combine="concat", key_dim=2, value_dim=2, mask=mask)
    x, rng = torch.zeros(512, 24), random.Random(0)
    s = net.sentence(x=x)
    ground, subject = s.ground, f"{mask}: " if mask else ""
    low_nodes = [n for f in ground.template.groups if f.slice in (3, 4) for n in _select_low(ground, f.index)]
    queries = []
    for k in range(QUERIES):
        left, right, *given = map(
            ground.name, rng.sample(low_nodes if k % 2 else range(len(ground)), 2 + rng.randint(0, 4))
        )
        queries.append((left, right, given))
    before = peak_memory()
    spent = time_calls({"": lambda: net.sentence(x=x).separations(queries)}, runs=5)[""]
    result, batched = s.separations(queries), peak_memory()
    single = _time_queries(lambda q: s.separated(*q), queries[:100])
    trails = _time_queries(lambda q: s.active_trail(*q), queries[:100])
    small = peak_memory()
    separator = _time_queries(lambda q: s.minimal_separator(*q[:2]), queries[1:12:2])
    return [
        figure(f"{subject}nodes", len(ground), ""),
        figure(f"{subject}arrows", ground.count_arrows(), ""),
        figure(f"{subject}queries that are separated", int(result.sum()), ""),
        figure(f"{subject}10,000 queries in one call", spent, "s", target=10.0),
        figure(f"{subject}one query per call", single, "s"),
        figure(f"{subject}a trail", trails, "s"),
        figure(f"{subject}a minimal separator (both nodes near)", separator, "s"),
        figure(f"{subject}peak memory before", before, "MB"),
        figure(f"{subject}peak memory after the queries in one call", batched, "MB"),
        figure(f"{subject}peak memory after single queries and trails", small, "MB"),
        figure(f"{subject}peak memory after the separators", peak_memory(), "MB"),
    ]


def _select_low(ground: GroundGraph, group_index: int) -> list[int]:
    """Return the nodes of a group whose indices are all below four."""
    group = ground.template.groups[group_index]
    return [n for n in ground.select_nodes(group)[:2048].tolist() if all(i < 4 for i in ground.unravel_index(n)[1])]


def _time_queries(call: Callable[[Query], object], queries: list[Query]) -> list[float]:
    """Return the seconds of each query."""
    spent = []
    for query in queries[: limit_runs(len(queries))]:
        start = time.perf_counter()
        call(query)
        spent.append(time.perf_counter() - start)
    return spent


def posteriors_of_1000_sentences() -> list[Figure]:
    """Posteriors in one batch of 1,000 sentences (16 words, d=32, 8 heads, Categorical(8) readout of each word), on two
    threads: P(c | y), and with 4 atoms for each of W_q, W_k, W_v (64 joint states under 8 heads) P(c | y) and P(W_q |
    y). Each in a fresh process; memory is its peak resident memory (VmHWM), before and after."""
    rows = []
    for atoms, queries in ((None, ("c",)), (4, ("c", "W_q_0"))):
        for query in queries:
            rows += run_in_process(_measure_posteriors, atoms, query)
    return rows


def _measure_posteriors(atoms: int | None, query: str) -> list[Figure]:
    """Return the figures of a posterior query."""
    import torch

    import bnet_transformer as bt
    from bnet_transformer.inference import Evidence, posterior
    from bnet_transformer.tpm import Categorical

    torch.manual_seed(0)
    torch.set_num_threads(2)
    module = bt.bayesuvius(32, heads=8, atoms=atoms, observe=Categorical(8)).module()
    x, y = torch.randn(SENTENCES, WORDS, 32), torch.randint(8, (SENTENCES, WORDS))
    before = peak_memory()
    result = posterior(module, query, {"y": Evidence(y)}, x)
    assert result.shape[0] == SENTENCES and torch.allclose(result.sum(-1), torch.ones(SENTENCES), atol=1e-4)
    after = peak_memory()
    job = lambda: posterior(module, query, {"y": Evidence(y)}, x)  # noqa: E731
    spent = time_calls({"": job}, runs=7)[""]
    subject = f"P({query} | y)" + (f", {atoms} atoms" if atoms else "")
    return [
        figure(subject, spent, "s"),
        figure(f"{subject}: peak memory before", before, "MB"),
        figure(f"{subject}: peak memory after", after, "MB"),
        *measure_limit(job, spent, name=subject),
    ]


def posteriors_after_an_ablation() -> list[Figure]:
    """P(next word) of a vocabulary of 50,257 after one head is set to zero at 12 words (decoder, d=64, 4 heads, 2
    slices), compared with `tpm` of the same node; every call sets the head in a new sentence. Then a net with
    interacting choices (9 words, 2 heads for each word, 2 slices: 512 joint states of the first slice): `log_prob` and
    100 draws of `sample`, compared with `posterior`. In a fresh process; memory is its peak resident memory (VmHWM)."""
    return run_in_process(_measure_ablated)


def _measure_ablated() -> list[Figure]:
    """Return the figures of queries after an ablation."""
    import bnet_transformer as bt
    from bnet_transformer.interventions import Zero
    from bnet_transformer.tpm import Categorical

    words = [f"w{k}" for k in range(50_257)]
    net, text = bt.decoder(dim=64, heads=4, slices=2, vocabulary=words), " ".join(words[:12])
    head = {f"v_1_1_{i}": Zero() for i in range(12)}
    ablate = lambda: net.sentence(text).do(head)  # noqa: E731
    before = peak_memory()
    spent = time_calls({"tpm": lambda: ablate().tpm("y_11"), "P": lambda: ablate().posterior("y_11")}, runs=7)
    after = peak_memory()
    mixed = bt.bayesuvius(4, slices=2, heads=2, per="word", observe=Categorical(3)).sentence(" ".join("abcabcabc"))
    times = time_calls(
        {
            "posterior": lambda: mixed.posterior("c_0_0", {"y_0": 1}),
            "log_prob": lambda: mixed.log_prob({"y_0": 1}),
            "sample": lambda: mixed.sample(100, {"y_0": 1}),
        },
        runs=7,
    )
    return [
        figure("tpm after an ablation", spent["tpm"], "s"),
        figure("posterior after an ablation", spent["P"], "s"),
        figure("posterior / tpm", ratios(spent["P"], spent["tpm"]), "", target=3.0),
        figure("ablation: peak memory before", before, "MB"),
        figure("ablation: peak memory after", after, "MB"),
        figure("interacting choices: posterior", times["posterior"], "s"),
        figure("interacting choices: log_prob / posterior", ratios(times["log_prob"], times["posterior"]), ""),
        figure("interacting choices: sample / posterior", ratios(times["sample"], times["posterior"]), ""),
    ]
