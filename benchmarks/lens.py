"""Row of the lens: `s.lens()` on a random Llama, compared with a loop over the hidden states of `transformers`."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

import bnet_transformer as bt
from benchmarks.harness import Figure, figure, measure_peak, ratios, time_calls
from benchmarks.limits import measure_limit

WORDS = 64
TOP = 10


def lens_of_64_words() -> list[Figure]:
    """The 10 most probable words, the entropy and KL(end || lens) of each of 31 states of 64 words in a random net with
    the size of SmolLM2-135M (30 slices of 576, a vocabulary of 49,152), from a new sentence to the result, compared
    with a loop over the hidden states of `transformers` that computes the same numbers; no gradients. Before, the
    results are compared."""
    model = _create_model()
    net = bt.from_pretrained(model)
    ids = torch.randint(49152, (WORDS,), generator=torch.Generator().manual_seed(1))
    actual, peer = _create_calls(net, model, ids)
    lens, (probs, entropies, kl) = actual(), peer()
    torch.testing.assert_close(lens.top_probabilities, probs, rtol=1e-3, atol=1e-6)
    torch.testing.assert_close(lens.entropy, entropies, rtol=1e-3, atol=1e-3)
    torch.testing.assert_close(lens.kl, kl, rtol=1e-3, atol=1e-4)
    spent = time_calls({"ours": actual, "theirs": peer}, runs=11)
    peaks = measure_peak(actual), measure_peak(peer)
    return [
        figure("s.lens()", spent["ours"], "s"),
        figure("loop over transformers, sdpa", spent["theirs"], "s"),
        figure("ratio", ratios(spent["ours"], spent["theirs"]), "", target=1.1),
        figure("loop over transformers, peak memory", peaks[1], "MB"),
        figure("ratio of peaks", peaks[0] / peaks[1], "", target=1.1),
        *measure_limit(actual, spent["ours"]),
    ]


def _create_model() -> Any:
    """Return a random Llama with the size of SmolLM2-135M."""
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    sizes = {"vocab_size": 49152, "hidden_size": 576, "intermediate_size": 1536, "num_hidden_layers": 30}
    heads = {"num_attention_heads": 9, "num_key_value_heads": 3, "tie_word_embeddings": True}
    options: Any = {**sizes, **heads, "attn_implementation": "sdpa"}
    model: Any = LlamaForCausalLM(LlamaConfig(**options))
    return model.eval()


def _create_calls(net: Any, model: Any, ids: torch.Tensor) -> tuple[Callable[[], Any], Callable[[], Any]]:
    """Return the calls, ours and theirs."""

    def run_peer() -> Any:
        with torch.no_grad():
            output = model(ids[None], output_hidden_states=True, use_cache=False)
            end = output.logits[0].log_softmax(-1)
            rows = []
            for k, state in enumerate(output.hidden_states):
                is_last = k == len(output.hidden_states) - 1  # transformers has applied the norm to it
                hidden = state[0] if is_last else model.model.norm(state[0])
                log_probs = model.lm_head(hidden).log_softmax(-1)
                probs = log_probs.exp()
                top, _ = log_probs.topk(TOP)
                rows.append((top.exp(), -(probs * log_probs).sum(-1), (end.exp() * (end - log_probs)).sum(-1)))
            return [torch.stack(column) for column in zip(*rows, strict=True)]

    return lambda: net.sentence(ids.tolist()).lens(top=TOP), run_peer
