"""`python -m experiments.tiny [--write]`: train the net of `bt.from_pretrained("tiny")`, which the package contains.

A sentence has one of three kinds, drawn once. Its first three words are random. Each later word depends on only one
earlier word, by its kind:

    grammar   on the word before it: determiner -> noun -> verb -> preposition -> determiner
    echo      it is the word two before it          refrain   it is the word three before it

and with probability 0.1 it is a random word instead. So the true distribution is a mixture of three Markov chains with
known entropy. The net is the chapter's: one head for each sentence, drawn by `c`, that selects `W_q`, `W_k`, `W_v`. It
is trained by its exact marginal likelihood.
"""

from __future__ import annotations

import argparse
import time
from itertools import permutations
from pathlib import Path

import torch
from torch import Tensor

import bnet_transformer as bt
from bnet_transformer.compiler import CompiledModule
from bnet_transformer.inference import Evidence, log_evidence, posterior
from bnet_transformer.tpm import Add, Attention, Categorical, Dot, Embed, Given, Linear, Select, Sinusoid

GROUPS = (
    ("the", "a"),
    ("cat", "dog", "bird", "mat", "log", "tree"),
    ("sat", "ran", "sang", "slept"),
    ("on", "by", "under", "near"),
)
WORDS = tuple(word for group in GROUPS for word in group)
KINDS = ("grammar", "echo", "refrain")
SHARES = (0.5, 0.3, 0.2)
NOISE, FREE, LENGTH = 0.1, 3, 12
DIM = 32
FILE = Path(__file__).parent.parent / "bnet_transformer" / "pretrained" / "tiny.safetensors"


def create_declaration() -> bt.Declaration:
    """Return the net: embeddings and positions, one slice whose head each sentence draws, the next word as readout."""
    word = ["word"]
    stack = bt.Stack(
        prologue=[
            bt.Node("token", Given(states=len(WORDS)), plates=word),
            bt.Node("embed", Embed(DIM), ["token"], word),
            bt.Node("position", Sinusoid(DIM, base=100.0), plates=word),
            bt.Node("x", Add(), ["embed", "position"], word),
        ],
        slice=[
            *(bt.Node(f"W_{role}", Select((DIM, DIM)), ["c"]) for role in "qkv"),
            *(bt.Node(role, Linear(), [f"W_{role}", "x"], word) for role in "qkv"),
            bt.Node("x", Attention(Dot(None)), ["q", bt.Arrow("k", "causal"), bt.Arrow("v", "causal")], word),
        ],
        epilogue=[bt.Node("y", Categorical(len(WORDS)), ["x"], word)],
        vocabulary=WORDS,
    )
    return bt.Declaration([stack], [bt.Node("c", Categorical(len(KINDS)))], name="tiny")


def grammar_transitions() -> Tensor:
    """Return `P(next word | word)` of the grammar, without noise."""
    table = torch.zeros(len(WORDS), len(WORDS))
    for group, after in zip(GROUPS, GROUPS[1:] + GROUPS[:1], strict=True):
        for word in group:
            weights = torch.arange(len(after), 0, -1.0)
            shift = group.index(word) % len(after)
            table[WORDS.index(word), [WORDS.index(item) for item in after]] = weights.roll(shift) / weights.sum()
    return table


def log_likelihoods(sentences: Tensor) -> Tensor:
    """Return `log P(word | earlier words, kind)` of each word after the first three: `[kind, sentence, word]`."""
    words = sentences[:, FREE:]
    grammar = grammar_transitions()[sentences[:, FREE - 1 : -1], words]
    echo, refrain = ((words == sentences[:, FREE - back : -back]).float() for back in (2, 3))
    return ((1 - NOISE) * torch.stack([grammar, echo, refrain]) + NOISE / len(WORDS)).log()


def sample_sentences(count: int, seed: int) -> tuple[Tensor, Tensor]:
    """Return sentences and their kinds."""
    generator = torch.Generator().manual_seed(seed)
    kinds = torch.multinomial(torch.tensor(SHARES), count, True, generator=generator)
    words = torch.randint(len(WORDS), (count, LENGTH), generator=generator)
    table = grammar_transitions()
    for i in range(FREE, LENGTH):
        samples = torch.multinomial(table[words[:, i - 1]], 1, generator=generator)[:, 0]
        next_words = torch.stack([samples, words[:, i - 2], words[:, i - 3]])[kinds, torch.arange(count)]
        is_noise = torch.rand(count, generator=generator) < NOISE
        words[:, i] = torch.where(is_noise, words[:, i], next_words)
    return words, kinds


def create_evidence(words: Tensor) -> dict[str, Evidence]:
    """Observe the words after the first three: `y_i` is word i + 1."""
    observed = torch.arange(LENGTH - 1) >= FREE - 1
    return {"y": Evidence(words[:, 1:], observed.expand(len(words), -1))}


def entropy(words: Tensor) -> float:
    """Return the true `-log P` of each predicted word, in nats: the minimum loss of any net."""
    by_kind = log_likelihoods(words).sum(-1) + torch.tensor(SHARES).log()[:, None]
    return -float(by_kind.logsumexp(0).mean()) / (LENGTH - FREE)


def compute_loss(module: CompiledModule, words: Tensor) -> Tensor:
    """Return `-log P` of the net for each predicted word."""
    return -log_evidence(module, create_evidence(words), words[:, :-1], check=False).mean() / (LENGTH - FREE)


def train(seed: int, steps: int) -> bt.BNet:
    """Train a net from one seed by AdamW with a cosine schedule."""
    net = bt.BNet(create_declaration(), seed=seed)
    module = net.module().train()
    optimiser = torch.optim.AdamW(module.parameters(), lr=1e-2, weight_decay=1e-4)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimiser, 1e-2, total_steps=steps, pct_start=0.1)
    for step in range(steps):
        words, _ = sample_sentences(256, 10_000 * (seed + 1) + step)
        loss = compute_loss(module, words)
        optimiser.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(module.parameters(), 1.0)
        optimiser.step()
        schedule.step()
        if step % 250 == 0:
            print(f"  seed {seed}, step {step}: {loss.item():.4f}", flush=True)
    return net.replace({name.replace("/", "."): value.detach().clone() for name, value in module.store.items()})


def print_summary(net: bt.BNet) -> None:
    """Print the loss and the entropy, and the kind of sentence that each head has learned."""
    words, kinds = sample_sentences(4096, 7)
    module = net.module().eval()
    with torch.no_grad():
        loss = float(compute_loss(module, words))
    probs = posterior(module, "c", create_evidence(words), words[:, :-1])
    mean_probs = torch.stack([probs[kinds == k].mean(0) for k in range(len(KINDS))])
    order = max(permutations(range(3)), key=lambda p: sum(float(mean_probs[k, p[k]]) for k in range(3)))
    accuracy = (probs.argmax(-1) == torch.tensor(order)[kinds]).float().mean()
    prior = net.sentence("the").posterior("c")
    true_entropy = entropy(words)
    print(f"loss {loss:.4f} nats for each word; entropy {true_entropy:.4f}; above it {loss - true_entropy:.4f}")
    for kind, head, true in zip(KINDS, order, SHARES, strict=True):
        mean_prob = mean_probs[KINDS.index(kind), head]
        print(f"  {kind:8} is head {head}: pi = {prior[head]:.3f}, truly {true}; P(c | y) = {mean_prob:.3f}")
    print(f"  the kind of a sentence is inferred correctly {accuracy:.1%} of the time")


def main() -> None:
    """Train from several seeds, select the best, print its summary, and write it with `--write`."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--write", action="store_true", help=f"write {FILE.name} into the package")
    parser.add_argument("--steps", type=int, default=1500)
    parser.add_argument("--seeds", type=int, default=3)
    args = parser.parse_args()
    torch.set_num_threads(1)
    start = time.perf_counter()
    validation, _ = sample_sentences(2048, 5)
    nets = [train(seed, args.steps) for seed in range(args.seeds)]
    with torch.no_grad():
        best = min(nets, key=lambda net: float(compute_loss(net.module().eval(), validation)))
    print_summary(best)
    print(f"{time.perf_counter() - start:.0f} s on one thread")
    if args.write:
        best.save(FILE)
        print(f"wrote {FILE.name}, {FILE.stat().st_size:,} bytes")


if __name__ == "__main__":
    main()
