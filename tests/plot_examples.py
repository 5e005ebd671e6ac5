"""One small result of each kind that `bt.plot` draws, and of each view with its own form."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import cache
from typing import Any

import torch

import bnet_transformer as bt
from bnet_transformer.attention import learn_tan
from bnet_transformer.attention.inclusion import damage
from bnet_transformer.inference import GroupStates, RankedStates
from bnet_transformer.interventions.counterfactual import Counterfactual
from bnet_transformer.learning.calibration import Calibration
from bnet_transformer.learning.fit import Check, Comparison, ModelComparison
from bnet_transformer.learning.fit.result import as_fit
from bnet_transformer.learning.training import Trained
from bnet_transformer.plots.heat_maps import make_labelled_array
from bnet_transformer.tpm import Categorical, Normal
from tests.cases import get_case

WORDS = ["the", "cat", "sat", "on", "mat", "dog", "ran", "by", "a"]
TEXT = "the cat sat on a mat by the dog"
TEXTS = ["the cat sat on a mat", "a dog ran by the mat", "the dog sat by a cat", "a cat ran on the dog"]


@dataclass(frozen=True)
class Example:
    """A result of some type, and options of its plot."""

    kind: str
    build: Callable[[], object]
    options: Mapping[str, object] = field(default_factory=dict)


@cache
def selector_net() -> bt.BNet:
    """The net of the chapter with a selector of three heads."""
    return bt.bayesuvius(4, slices=2, heads=3, mask="causal", vocabulary=WORDS, observe=Categorical(9), seed=1)


@cache
def head_net() -> bt.BNet:
    """A decoder with a plate of heads."""
    return bt.decoder(8, heads=4, slices=3, norm="pre", vocabulary=WORDS, seed=1)


@cache
def sentence() -> bt.Sentence:
    """A sentence of `selector_net`."""
    return selector_net().sentence(TEXT)


@cache
def head_sentence() -> bt.Sentence:
    """A sentence of `head_net`."""
    return head_net().sentence(TEXT)


@cache
def reads() -> Any:
    """Attention over slices of `head_net`."""
    return head_sentence().reads(residual=0.3)


@cache
def data() -> tuple[torch.Tensor, torch.Tensor]:
    """Inputs and observations of a fit."""
    generator = torch.Generator().manual_seed(1)
    return torch.randn(24, 3, 3, generator=generator), torch.randn(24, 3, 3, generator=generator)


@cache
def fit() -> Any:
    """A fit with a history."""
    net = bt.bayesuvius(3, heads=3, key_dim=2, observe=Normal(0.3))
    return bt.fit(net, data(), method=bt.MAP(restarts=3, steps=12, optimizer="first-order"), progress=False)


@cache
def inclusion() -> Any:
    """The importance of heads."""
    net = bt.encoder(8, heads=4, slices=2, vocabulary=WORDS, seed=1)
    dead = net.parameters["W_o_1.value"].clone()
    dead[2] = 0
    return bt.inclusion(net.replace({"W_o_1.value": dead}), TEXTS, draws=100, progress=False)


@cache
def pair(lists: bool = False) -> tuple[Any, Any]:
    """A clean and a corrupt sentence, or four of each."""
    texts = [("the cat sat on a", "the dog ran on a"), ("the dog sat on a", "the cat ran on a")]
    texts += [("a cat sat on a", "a dog ran on a"), ("a dog ran on a", "a cat sat on a")]
    clean, corrupt = ([head_net().sentence(text[k]) for text in texts] for k in (0, 1))
    return (clean, corrupt) if lists else (clean[0], corrupt[0])


METRIC = {"y_4": ("cat", "dog")}


def sweep(*, lists: bool = False, select: Mapping[str, int] = {}, **options: Any) -> Any:
    """A sweep of `pair`."""
    result = bt.sweep(*pair(lists), metric=METRIC, **options)
    return result.select(**select) if select else result


def contributions(**options: Any) -> Any:
    """Contributions to a logit of a small decoder."""
    s = get_case("vanilla decoder, causal").sentence
    return s.contributions("logits_2", of=("cat", "sat"), **options)


def ranked_states() -> RankedStates:
    """The states of a chain along nine words."""
    states = torch.tensor([[0, 1, 1, 2, 0, 1, 2, 0, 1], [0, 1, 0, 2, 0, 1, 2, 2, 1], [0, 1, 1, 2, 1, 1, 2, 0, 0]])
    names = tuple(f"c_0_{i}" for i in range(9))
    group = GroupStates("c_0", names, states, torch.ones(9, dtype=torch.bool), 3, ("copy", "turn", "stop"), "")
    log_probs = -torch.arange(1.0, 4).double()
    return RankedStates(names, states, log_probs, 0.0, (group,), {"": tuple(TEXT.split())})


def model_comparison() -> ModelComparison:
    """Fits with one to four heads, of which one is far below the others."""
    fits = {k: as_fit(bt.bayesuvius(2, heads=k, observe=Normal(1.0))) for k in (1, 2, 3, 4)}
    base, noise = torch.tensor([0.0, 1.0, 2.0, 3.0]).double(), torch.tensor([0.1, -0.1, 0.1, -0.1]).double()
    return ModelComparison(
        fits, torch.stack([base - 9 + noise, base - 0.05 + noise, base, base - 0.02 - noise]), "density", ()
    )


def faithfulness_curves() -> Any:
    """Curves of two rankings of edges."""
    (clean, *_), (corrupt, *_) = pair(True)
    scores = {"sweep of arrows": bt.sweep(clean, corrupt, at="v -> a", metric=METRIC)}
    return bt.faithfulness_curves([clean] * 3, [corrupt] * 3, metric=METRIC, scores=scores)


def calibration() -> Calibration:
    """Ranks of four quantities, of which one is calibrated."""
    ranks = torch.arange(50) % 20
    values = {
        "log_likelihood": ranks,
        "wet_predicted": ranks // 4,
        "rain_sorted": 5 + ranks // 2,
        "entropy": ranks // 2,
    }
    return Calibration("nuts", values, {name: torch.full((50,), 19) for name in values}, 50)


def samples_of_real_node() -> Any:
    """Samples of a node with four features."""
    net = bt.bayesuvius(4, heads=2, observe=Normal(0.5), seed=1)
    return net.sentence("a b").sample(200, seed=1)


def roles() -> Any:
    """The roles of the heads of `head_net`."""
    return bt.roles(head_net(), TEXTS)


def random_array(*shape: int, seed: int = 0, scale: float = 1.0) -> torch.Tensor:
    """Normal random numbers."""
    return scale * torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).double()


EXAMPLES: Mapping[str, Example] = {
    "attention": Example("SentenceLike", sentence),
    "attention, heads": Example("SentenceLike", head_sentence),
    "attention, many heads": Example(
        "SentenceLike", lambda: bt.decoder(24, heads=12, slices=4, vocabulary=WORDS, seed=1).sentence(TEXT)
    ),
    "attention, one head": Example("SentenceLike", head_sentence, {"slice": 0, "head": 1}),
    "attention, long": Example(
        "SentenceLike", lambda: head_net().sentence(" ".join([TEXT] * 4)), {"slice": 0, "head": 1}
    ),
    "posterior": Example("SentenceLike", sentence, {"node": "y_3", "evidence": {"y_2": "mat"}}),
    "joint posterior": Example("SentenceLike", sentence, {"node": ["c", "y_3"]}),
    "sentences": Example(
        "list", lambda: [selector_net().sentence(text).observe(y_1="mat") for text in TEXTS], {"node": "c"}
    ),
    "reads": Example("Reads", reads),
    "reads, flow": Example("Reads", reads, {"word": 8}),
    "reads, entropy": Example("Reads", reads, {"show": "entropy"}),
    "lens": Example("Lens", lambda: head_sentence().lens()),
    "lens, target": Example("Lens", lambda: head_sentence().lens(), {"target": "sat"}),
    "lens, rank": Example("Lens", lambda: head_sentence().lens(), {"target": "sat", "show": "rank"}),
    "tuned lens": Example("TunedLens", lambda: bt.fit_lens(head_net(), TEXTS, steps=1)),
    "tan": Example("Tan", lambda: sentence().tan("roles")),
    "tree": Example("TanTree", lambda: sentence().tan_tree(slice=0)),
    "corpus tan": Example(
        "CorpusTan", lambda: learn_tan([0, 0, 1, 1], [[0, 1, 0], [1, 1, 0], [0, 0, 1], [1, 0, 0]], ["a", "b", "c"])
    ),
    "counterfactual": Example(
        "Counterfactual", lambda: sentence().counterfactual("y_3", do={"c": 0}, evidence={"y_3": 1})
    ),
    "counterfactual mean": Example(
        "Counterfactual", lambda: Counterfactual("x", values=random_array(2, 6), weights=torch.tensor([0.5, 0.5]))
    ),
    "samples": Example("Samples", lambda: sentence().sample(50, seed=1), {"node": "y_0"}),
    "samples, real": Example("Samples", samples_of_real_node, {"node": "y_0"}),
    "posteriors of a group": Example("GroupPosterior", lambda: get_case("word").sentence.posteriors("c_0", {"y_1": 1})),
    "most probable states": Example("RankedStates", ranked_states),
    "contributions": Example("Contributions", contributions),
    "contributions, exact": Example("Contributions", lambda: contributions(exact=True), {"by": "writer"}),
    "contributions, heads": Example("Contributions", contributions, {"by": "head"}),
    "contributions, words": Example("Contributions", contributions, {"by": "word"}),
    "paths of two": Example("PathContributions", lambda: contributions(paths=2)),
    "score": Example(
        "ScoreContributions", lambda: get_case("vanilla decoder, causal").sentence.contributions("j_1_0_2")
    ),
    "sweep": Example("Sweep", lambda: sweep(at="x")),
    "sweep, errors": Example("Sweep", lambda: sweep(at="x", lists=True)),
    "sweep, intervals": Example("Sweep", lambda: sweep(at="x", lists=True), {"intervals": True}),
    "sweep, heads": Example("Sweep", lambda: sweep(at="a", over=("slice", "head"), lists=True)),
    "sweep, three axes": Example("Sweep", lambda: sweep(at="a")),
    "sweep, arrows": Example("Sweep", lambda: sweep(at="v -> a", select={"slice": 1})),
    "sweep, list": Example("Sweep", lambda: sweep(at=["x_1_1", "x_2_4", "a_1_0_4", "ffn_1_4"], lists=True)),
    "mediation": Example(
        "Mediation", lambda: bt.mediation(*pair(True), through="a", over=("slice", "head"), metric=METRIC)
    ),
    "mediation, maps": Example("Mediation", lambda: bt.mediation(*pair(True), through="x", metric=METRIC)),
    "faithfulness curves": Example("FaithfulnessCurves", faithfulness_curves),
    "fit": Example("Fit", fit),
    "fit, theta": Example("Fit", fit, {"show": "theta"}),
    "heads of a fit": Example("Heads", lambda: fit().heads),
    "heads of a fit, cosine": Example("Heads", lambda: fit().heads, {"show": "cosine"}),
    "comparison": Example(
        "Comparison", lambda: Comparison((1, 0), torch.tensor([[1.0, 5.0], [4.0, 0.0]]), 0.5, 0.1, 0.2, {}, {})
    ),
    "model comparison": Example("ModelComparison", model_comparison),
    "check": Example(
        "Check",
        lambda: Check(
            {"mean": 1.0, "variance": 0.4, "autocorrelation": 0.1},
            {"mean": 0.0, "variance": 0.5, "autocorrelation": 0.3},
            {"mean": 0.5, "variance": 0.1, "autocorrelation": 0.1},
            {"mean": 0.05, "variance": 0.4, "autocorrelation": 0.03},
        ),
    ),
    "calibration": Example("Calibration", calibration),
    "calibration, one": Example("Calibration", calibration, {"quantity": "rain_sorted"}),
    "inclusion": Example("Inclusion", inclusion),
    "inclusion, log bayes": Example("Inclusion", inclusion, {"show": "log_bayes"}),
    "inclusion, intervals": Example("Inclusion", inclusion, {"show": "intervals"}),
    "damage": Example("Damage", lambda: damage(inclusion(), progress=False)),
    "roles": Example("Roles", roles),
    "role": Example("Roles", roles, {"relation": "previous"}),
    "training": Example(
        "Trained", lambda: Trained(None, tuple(1 / k for k in range(1, 301)), ((3, 0.5), (200, 0.1)), 300)
    ),
    "cost": Example("Cost", lambda: head_net().cost(words=9)),
    "bars": Example("ndarray", lambda: random_array(6).numpy(), {"axes": "feature", "error": [0.2] * 6}),
    "many bars": Example("Tensor", lambda: random_array(40).abs(), {"axes": "state"}),
    "small numbers": Example("Tensor", lambda: random_array(3, 5, scale=1e-5), {"axes": ("slice", "head")}),
    "intervals": Example(
        "LabelledArray",
        lambda: make_labelled_array(random_array(4, 6), ("slice", "head"), error=torch.full((4, 6), 0.3)),
    ),
    "many intervals": Example(
        "LabelledArray",
        lambda: make_labelled_array(random_array(12, 12), ("slice", "head"), error=torch.full((12, 12), 0.3)),
    ),
    "three axes": Example("Tensor", lambda: random_array(3, 2, 4), {"axes": ("sentence", "head", "word")}),
    "distribution of states": Example("Categorical", lambda: sentence().do(c=0).tpm("y_1")),
    "distribution": Example("Distribution", lambda: samples_of_real_node_net().tpm("y_0")),
}


def samples_of_real_node_net() -> bt.Sentence:
    """A sentence with a real node without latent choices."""
    return bt.bayesuvius(4, heads=2, observe=Normal(0.5), seed=1).sentence("a b").do(c=1)


@cache
def build(name: str) -> object:
    """The result of an example."""
    return EXAMPLES[name].build()
