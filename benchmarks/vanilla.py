"""Rows of training and decoding: the vanilla transformer against `torch.nn.Transformer` with the same weights."""

from __future__ import annotations

from collections.abc import Callable, Mapping

import torch
from torch import Tensor, nn
from torch.nn import functional

import bnet_transformer as bt
from benchmarks.harness import Figure, figure, interleaved, ratios
from benchmarks.limits import of_the_limit
from bnet_transformer._core.distributed import DistributedContext
from bnet_transformer.data import Batch, Evidence
from bnet_transformer.data.task import infer_trainable_task
from bnet_transformer.learning.training.configs import TrainConfig
from bnet_transformer.learning.training.trainer import Trainer

DIM, HEADS, SLICES, VOCABULARY, BATCH, WORDS, NEW = 256, 8, 3, 1000, 16, 32, 32


class Theirs(nn.Module):
    """torch's transformer with one table for both embeddings and the readout, and no positions."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(VOCABULARY, DIM)
        self.core = nn.Transformer(DIM, HEADS, SLICES, SLICES, 4 * DIM, 0.0, batch_first=True)

    def forward(self, source: Tensor, target: Tensor) -> Tensor:
        return self.validate_values(self.core.encoder(self.embed(source)), target)

    def embed(self, ids: Tensor) -> Tensor:
        result: Tensor = self.table(ids) * DIM**0.5
        return result

    def validate_values(self, memory: Tensor, target: Tensor) -> Tensor:
        mask = nn.Transformer.generate_square_subsequent_mask(target.shape[1])
        last = self.core.decoder(self.embed(target), memory, tgt_mask=mask, tgt_is_causal=True)
        logits: Tensor = last @ self.table.weight.mT
        return logits


def training_step() -> list[Figure]:
    """A step of `bt.train` (loss, gradients, clipping, AdamW) on 16 pairs of 32 words, 3 and 3 slices, 256 wide, 8
    heads, against the same step written out for `torch.nn.Transformer` with the same weights."""
    actual, peer, source, target = _pair()
    adam = torch.optim.AdamW(peer.parameters(), 1e-3, betas=(0.9, 0.98), eps=1e-9)
    config = TrainConfig(batch=BATCH, optimizer=bt.AdamW(rate=1e-3, clip=1.0))
    run = Trainer(
        infer_trainable_task(actual.network), config, 1, DistributedContext(0, 1, torch.device("cpu")), None, {}
    )
    batch = Batch({"enc": source, "dec": target[:, :-1]}, None, {"dec_y": Evidence(target[:, 1:])})

    def step() -> float:
        logits = peer(source, target[:, :-1])
        loss = functional.cross_entropy(logits.flatten(0, 1), target[:, 1:].flatten())
        loss.backward()
        nn.utils.clip_grad_norm_(peer.parameters(), 1.0)
        adam.step()
        adam.zero_grad()
        return float(loss.detach())

    def train() -> float:
        run.compute_gradients(run.prepare_batch(batch))
        ((loss, *_),) = run.drain_losses(all=True)
        run.update_parameters()
        return loss

    assert abs(train() - step()) < 1e-4
    return _figures("bt.train", {"ours": train, "theirs": step}, 15, 1.05)


def decoding() -> list[Figure]:
    """32 words chosen greedily for each of 8 sources of 32 words by `net.generate`, with k and v kept, against
    `torch.nn.Transformer`, which keeps its memory and no k and v; the same weights, and the words are the same."""
    actual, peer, source, _ = _pair()
    source = source[:8]

    def choose() -> Tensor:
        with torch.inference_mode():
            memory, ids = peer.core.encoder(peer.embed(source)), torch.zeros(len(source), 1, dtype=torch.long)
            for _ in range(NEW):
                ids = torch.cat([ids, peer.validate_values(memory, ids)[:, -1].argmax(-1, keepdim=True)], 1)
        return ids[:, 1:]

    peer.eval()
    assert [list(row) for row in actual.generate(source, start=0, length=NEW).ids] == choose().tolist()
    calls = {"ours": lambda: actual.generate(source, start=0, length=NEW), "theirs": choose}
    return _figures("net.generate", calls, 9, 1.05)


def _pair() -> tuple[bt.BNet, Theirs, Tensor, Tensor]:
    torch.manual_seed(0)
    peer = Theirs().train()
    net = bt.encoder_decoder(
        DIM, heads=HEADS, slices=SLICES, vocabulary=VOCABULARY, positions=None, final_norm=True, dropout=0.0
    )
    table = {"W_embed.value": peer.table.weight.detach().clone()}
    actual = net.replace({**bt.models.weights_of(peer.core), **table})
    return actual, peer, torch.randint(VOCABULARY, (BATCH, WORDS)), torch.randint(VOCABULARY, (BATCH, WORDS + 1))


def _figures(name: str, calls: Mapping[str, Callable[[], object]], runs: int, target: float) -> list[Figure]:
    spent = interleaved(calls, runs)
    return [
        figure(name, spent["ours"], "s"),
        figure("torch.nn.Transformer", spent["theirs"], "s"),
        figure("ratio", ratios(spent["ours"], spent["theirs"]), "", target=target),
        *of_the_limit(calls["ours"], spent["ours"]),
    ]
