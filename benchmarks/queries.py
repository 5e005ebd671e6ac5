"""Rows of questions to a bnet: separation on a large ground graph, posteriors of a batch of sentences."""

from __future__ import annotations

import random
import time
from collections.abc import Callable

from benchmarks.harness import Figure, figure, fresh, interleaved, peak_memory, ratios, runs_of
from benchmarks.limits import of_the_limit
from bnet_transformer.graph import GroundGraph

QUERIES, SENTENCES, WORDS = 10_000, 1_000, 16

Asked = tuple[str, str, list[str]]


def separations_of_512_words() -> list[Figure]:
    """10,000 separation queries by name to a sentence of 512 words, 12 slices, 12 heads (concat), as a user asks them
    (`s.separations`, a new sentence each time): random nodes x and y given none to four random others, half of them
    anywhere, half near each other (one slice, words and heads below four), in one call; 100 of them in a call each;
    trails and separators. Every word reads every word; then the same of a causal net. In a fresh process; memory is its
    peak resident memory (VmHWM), before the queries and after each kind."""
    return [row for mask in (None, "causal") for row in fresh(_separations, mask)]


def _separations(mask: str | None) -> list[Figure]:
    import torch

    import bnet_transformer as bt

    net = bt.bayesuvius(24, slices=12, heads=12, combine="concat", key_dim=2, value_dim=2, mask=mask)
    x, pick = torch.zeros(512, 24), random.Random(0)
    s = net.sentence(x=x)
    ground, subject = s.ground, f"{mask}: " if mask else ""
    close = [n for f in ground.template.groups if f.slice in (3, 4) for n in _low(ground, f.index)]
    questions = []
    for k in range(QUERIES):
        left, right, *given = map(
            ground.name, pick.sample(close if k % 2 else range(len(ground)), 2 + pick.randint(0, 4))
        )
        questions.append((left, right, given))
    before = peak_memory()
    spent = interleaved({"": lambda: net.sentence(x=x).separations(questions)}, runs=5)[""]
    result, batched = s.separations(questions), peak_memory()
    single = _each(lambda q: s.separated(*q), questions[:100])
    trails = _each(lambda q: s.active_trail(*q), questions[:100])
    small = peak_memory()
    separator = _each(lambda q: s.minimal_separator(*q[:2]), questions[1:12:2])
    return [
        figure(f"{subject}nodes", len(ground), ""),
        figure(f"{subject}arrows", ground.count_arrows(), ""),
        figure(f"{subject}queries that are separated", int(result.sum()), ""),
        figure(f"{subject}10,000 queries in one call", spent, "s", target=10.0),
        figure(f"{subject}one query in a call of its own", single, "s"),
        figure(f"{subject}a trail", trails, "s"),
        figure(f"{subject}a minimal separator (both nodes near)", separator, "s"),
        figure(f"{subject}peak memory before", before, "MB"),
        figure(f"{subject}peak memory after the queries in one call", batched, "MB"),
        figure(f"{subject}peak memory after single queries and trails", small, "MB"),
        figure(f"{subject}peak memory after the separators", peak_memory(), "MB"),
    ]


def _low(ground: GroundGraph, family: int) -> list[int]:
    """The nodes of a family whose word and other indices lie below four."""
    local = ground.template.groups[family]
    return [n for n in ground.select_nodes(local)[:2048].tolist() if all(i < 4 for i in ground.unravel_index(n)[1])]


def _each(ask: Callable[[Asked], object], questions: list[Asked]) -> list[float]:
    spent = []
    for question in questions[: runs_of(len(questions))]:
        start = time.perf_counter()
        ask(question)
        spent.append(time.perf_counter() - start)
    return spent


def posteriors_of_1000_sentences() -> list[Figure]:
    """Posteriors in one batch of 1,000 sentences (16 words, d=32, 8 heads, Categorical(8) readout of each word), on two
    threads: P(c | y), and with 4 atoms for each of W_q, W_k, W_v (64 joint states under 8 heads) P(c | y) and
    P(W_q | y). Each in a fresh process; memory is its peak resident memory (VmHWM), before and after."""
    rows = []
    for atoms, queries in ((None, ("c",)), (4, ("c", "W_q_0"))):
        for query in queries:
            rows += fresh(_posteriors, atoms, query)
    return rows


def _posteriors(atoms: int | None, query: str) -> list[Figure]:
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
    spent = interleaved({"": job}, runs=7)[""]
    subject = f"P({query} | y)" + (f", {atoms} atoms" if atoms else "")
    return [
        figure(subject, spent, "s"),
        figure(f"{subject}: peak memory before", before, "MB"),
        figure(f"{subject}: peak memory after", after, "MB"),
        *of_the_limit(job, spent, name=subject),
    ]


def posteriors_after_an_ablation() -> list[Figure]:
    """P(next word) of a vocabulary of 50,257 after one head is set to zero at 12 words (decoder, d=64, 4 heads, 2
    slices), beside `tpm` of the same node; every call sets the head in a new sentence. Then a net whose choices meet
    (9 words, 2 heads for each word, 2 slices: 512 joint states of the first slice): `log_prob` and 100 draws of
    `sample` beside `posterior`. In a fresh process; memory is its peak resident memory (VmHWM)."""
    return fresh(_ablated)


def _ablated() -> list[Figure]:
    import bnet_transformer as bt
    from bnet_transformer.interventions import Zero
    from bnet_transformer.tpm import Categorical

    words = [f"w{k}" for k in range(50_257)]
    net, text = bt.decoder(dim=64, heads=4, slices=2, vocabulary=words), " ".join(words[:12])
    head = {f"v_1_1_{i}": Zero() for i in range(12)}
    ablated = lambda: net.sentence(text).do(head)  # noqa: E731
    before = peak_memory()
    spent = interleaved({"tpm": lambda: ablated().tpm("y_11"), "P": lambda: ablated().posterior("y_11")}, runs=7)
    after = peak_memory()
    mixed = bt.bayesuvius(4, slices=2, heads=2, per="word", observe=Categorical(3)).sentence(" ".join("abcabcabc"))
    meeting = interleaved(
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
        figure("choices that meet: posterior", meeting["posterior"], "s"),
        figure("choices that meet: log_prob / posterior", ratios(meeting["log_prob"], meeting["posterior"]), ""),
        figure("choices that meet: sample / posterior", ratios(meeting["sample"], meeting["posterior"]), ""),
    ]
