"""Rows of training and decoding: the vanilla transformer compared with `torch.nn.Transformer` with the same weights."""

from __future__ import annotations

from collections.abc import Callable, Mapping

import torch
from torch import Tensor, nn
from torch.nn import functional

import bnet_transformer as bt
from benchmarks.harness import Figure, figure, ratios, time_calls
from benchmarks.limits import measure_limit
from bnet_transformer._core.distributed import DistributedContext
from bnet_transformer.data import Batch, Evidence
from bnet_transformer.data.batch import infer_trainable_task
from bnet_transformer.learning.training import TrainConfig, Trainer

DIM, HEADS, SLICES, VOCABULARY, BATCH, WORDS, NEW = 256, 8, 3, 1000, 16, 32, 32


class TorchTransformer(nn.Module):
    """torch's transformer with one table for both embeddings and the readout, and without positions."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(VOCABULARY, DIM)
        self.core = nn.Transformer(DIM, HEADS, SLICES, SLICES, 4 * DIM, 0.0, batch_first=True)

    def forward(self, source: Tensor, target: Tensor) -> Tensor:
        """Return the logits of the target."""
        return self.decode(self.core.encoder(self.embed(source)), target)

    def embed(self, ids: Tensor) -> Tensor:
        """Return the scaled embeddings of ids."""
        result: Tensor = self.table(ids) * DIM**0.5
        return result

    def decode(self, memory: Tensor, target: Tensor) -> Tensor:
        """Return the logits of the target, given the memory."""
        mask = nn.Transformer.generate_square_subsequent_mask(target.shape[1])
        last = self.core.decoder(self.embed(target), memory, tgt_mask=mask, tgt_is_causal=True)
        logits: Tensor = last @ self.table.weight.mT
        return logits


def training_step() -> list[Figure]:
    """A step of `bt.train` (loss, gradients, clipping, AdamW) on 16 pairs of 32 words, 3 and 3 slices, 256 wide, 8
    heads, compared with the same step written for `torch.nn.Transformer` with the same weights."""
    net, peer, source, target = _create_pair()
    adam = torch.optim.AdamW(peer.parameters(), 1e-3, betas=(0.9, 0.98), eps=1e-9)
    config = TrainConfig(batch=BATCH, optimizer=bt.AdamW(rate=1e-3, clip=1.0))
    batch = Batch({"enc": source, "dec": target[:, :-1]}, None, {"dec_y": Evidence(target[:, 1:])})
    ranks = DistributedContext(0, 1, torch.device("cpu"))
    trainer = Trainer(infer_trainable_task(net.network), config, 1, ranks, lambda step: batch)

    def step() -> float:
        logits = peer(source, target[:, :-1])
        loss = functional.cross_entropy(logits.flatten(0, 1), target[:, 1:].flatten())
        loss.backward()
        nn.utils.clip_grad_norm_(peer.parameters(), 1.0)
        adam.step()
        adam.zero_grad()
        return float(loss.detach())

    def train() -> float:
        trainer.compute(is_interrupted=False, is_due=True)
        trainer.update()
        return trainer.losses[-1]

    assert abs(train() - step()) < 1e-4
    return _compare("bt.train", {"ours": train, "theirs": step}, 15, 1.05)


def decoding() -> list[Figure]:
    """32 words chosen greedily for each of 8 sources of 32 words by `net.generate`, with cached k and v, compared with
    `torch.nn.Transformer`, which caches its memory but not k and v; with the same weights, and the same resulting
    words."""
    net, peer, source, _ = _create_pair()
    source = source[:8]

    def choose() -> Tensor:
        with torch.inference_mode():
            memory, ids = peer.core.encoder(peer.embed(source)), torch.zeros(len(source), 1, dtype=torch.long)
            for _ in range(NEW):
                ids = torch.cat([ids, peer.decode(memory, ids)[:, -1].argmax(-1, keepdim=True)], 1)
        return ids[:, 1:]

    peer.eval()
    assert [list(row) for row in net.generate(source, start=0, length=NEW).ids] == choose().tolist()
    calls = {"ours": lambda: net.generate(source, start=0, length=NEW), "theirs": choose}
    return _compare("net.generate", calls, 9, 1.05)


def _create_pair() -> tuple[bt.BNet, TorchTransformer, Tensor, Tensor]:
    """Return the net and torch's transformer with the same weights."""
    torch.manual_seed(0)
    peer = TorchTransformer().train()
    net = bt.encoder_decoder(
        DIM, heads=HEADS, slices=SLICES, vocabulary=VOCABULARY, positions=None, final_norm=True, dropout=0.0
    )
    table = {"W_embed.value": peer.table.weight.detach().clone()}
    actual = net.replace({**bt.models.weights_of(peer.core), **table})
    return actual, peer, torch.randint(VOCABULARY, (BATCH, WORDS)), torch.randint(VOCABULARY, (BATCH, WORDS + 1))


def _compare(name: str, calls: Mapping[str, Callable[[], object]], runs: int, target: float) -> list[Figure]:
    """Return the figures of our times, theirs, their ratio and the limit."""
    spent = time_calls(calls, runs)
    return [
        figure(name, spent["ours"], "s"),
        figure("torch.nn.Transformer", spent["theirs"], "s"),
        figure("ratio", ratios(spent["ours"], spent["theirs"]), "", target=target),
        *measure_limit(calls["ours"], spent["ours"]),
    ]
