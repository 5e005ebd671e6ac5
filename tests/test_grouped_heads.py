"""Head h of a net with groups of heads is the same head in sweeps, circuits, roles, inclusion and reads."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

import bnet_transformer as bt
from bnet_transformer.attention.gates import GatedRuns, find_head_sites
from bnet_transformer.interventions import Zero
from tests.cases import close, get_case

HEADS = ("slice", "head")


def build_llama() -> bt.Sentence:
    """A sentence of a small Llama with two groups of two heads."""
    models = pytest.importorskip("tests.huggingface_models")
    config = models.T.LlamaConfig(**models.LLAMA, num_key_value_heads=2)
    torch.manual_seed(0)
    model = models.T.LlamaForCausalLM(config).to(torch.float64)
    return bt.from_pretrained(model).sentence([3, 4, 5, 7])


BUILDERS = [
    pytest.param(lambda: get_case("grouped").sentence, id="grouped"),
    pytest.param(build_llama, id="llama", marks=pytest.mark.slow),
]


def iter_heads(s: bt.Sentence) -> Iterator[tuple[int, int, str]]:
    """The slice and the number of each head, and the pattern of its nodes."""
    sizes = s.net.network.graph.plate_sizes
    for t in range(s.net.network.graph.depth):
        for h in range(sizes["group"] * sizes["head"]):
            group, head = divmod(h, sizes["head"])
            yield t, h, f"a_{t}_{group}_{head}_*"


def get_text(s: bt.Sentence) -> object:
    """The ids or the words of the sentence."""
    return list(s.words) if s.net.network.vocabularies else [3, 4, 5, 7]


def roles_of_first(attention: torch.Tensor, alpha: float) -> torch.Tensor:
    """The mean share of the first word in one sentence, with the prior weight of each of two relations."""
    share = attention[..., 0].mean(-1)
    return (share + alpha) / (1 + 2 * alpha)


def ablate(s: bt.Sentence, pattern: str) -> torch.Tensor:
    """The change of the last readout's log probabilities by a head that is zero."""
    last = f"y_{len(s.words) - 1}"
    return s.do({pattern: 0}).posterior(last).log() - s.posterior(last).log()


@pytest.mark.parametrize("build", BUILDERS)
def test_a_head_is_the_same_head_in_every_analysis(build) -> None:
    s = build()
    last = f"y_{len(s.words) - 1}"
    sweep = bt.sweep(Zero(), s, at="a", over=HEADS, metric={last: 1}, progress=False)
    rows = bt.sweep(Zero(), s, at=["a", "q"], over=HEADS, metric={last: 1}, progress=False).part("a")
    roles = bt.roles(s.net, [get_text(s)], relations=["first"])
    attention = s.attention().flatten(1, 2)
    for t, h, pattern in iter_heads(s):
        effect = ablate(s, pattern)[1]
        close(sweep.effects[t, h, 0], effect, 1e-8)
        close(rows.effects[t, h, 0], effect, 1e-8)
        assert sweep.names[t, h] == pattern and sweep.select(head=h).names[(t,)] == pattern
        close(s.reads(t, head=h, residual=0.0).matrix, attention[t, h], 1e-8)
    assert sweep.values.shape == attention.shape[:2] == roles.mean.shape[:2]
    close(roles.mean[..., 0], roles_of_first(attention, roles.alpha), 1e-6)


@pytest.mark.parametrize("build", BUILDERS)
def test_a_gate_of_inclusion_is_that_of_a_head(build) -> None:
    s = build()
    sites = find_head_sites(s.net.network, None, [s.net.network.get_spec("y").group.index])
    runs = GatedRuns(s.net.module().eval(), sites, s.net.batch([get_text(s)]), ("y",), sites[0].num_heads)
    (part,) = runs.parts(should_keep_values=True)
    full = torch.stack([s.posterior(f"y_{i}").log() for i in range(len(s.words))])
    for t, h, pattern in iter_heads(s):
        gates = torch.ones(1, sites[0].num_heads)
        gates[0, h] = 0
        ablated = s.do({pattern: 0})
        without = torch.stack([ablated.posterior(f"y_{i}").log() for i in range(len(s.words))])
        expected = -0.5 * (without - full).square().sum()
        close(runs.log_probs_by_setting(sites[t], part, gates)[0, 0], expected, 1e-8)


@pytest.mark.parametrize("build", BUILDERS)
def test_axes_with_groups_are_separate(build) -> None:
    s = build()
    sizes = s.net.network.graph.plate_sizes
    metric = {f"y_{len(s.words) - 1}": 1}
    by_head = bt.sweep(Zero(), s, at="a", over=HEADS, metric=metric, progress=False)
    by_group = bt.sweep(Zero(), s, at="a", over=("slice", "group", "head"), metric=metric, progress=False)
    shape = (-1, sizes["group"], sizes["head"], 1)
    close(by_head.effects.reshape(*shape), by_group.effects)
    groups = bt.sweep(Zero(), s, at="a", over=("slice", "group"), metric=metric, progress=False)
    close(groups.effects[1, 1, 0], ablate(s, "a_1_1_*_*")[1], 1e-8)
    other = s.net.sentence([3, 4, 5, 9] if len(s.words) == 4 else "the cat cat")
    arrows = bt.sweep(other, s, at="v -> a", over=HEADS, metric=metric, progress=False)
    separate = bt.sweep(other, s, at="v -> a", over=("slice", "group", "head"), metric=metric, progress=False)
    close(arrows.effects.reshape(*shape), separate.effects)
    assert arrows.positions["head"] == tuple(range(sizes["group"] * sizes["head"]))
    circuit = bt.circuit(other, s, metric=metric, threshold=1e9, over=HEADS, candidates="v -> a")
    assert any(name.endswith("a_1_1_0_*") for name in circuit.edge_names)
