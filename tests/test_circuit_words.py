"""Circuits of sentences with an alignment of words (`words=`): node by node by the reference, and by sweeps."""

import pytest
import torch

import bnet_transformer as bt
from bnet_transformer import reference
from bnet_transformer.interventions import Mean, Swap, Zero
from bnet_transformer.interventions.acdc import CircuitPairs
from tests.cases import close, get_case
from tests.edge_oracle import CircuitRun
from tests.sweep_oracle import get_refusal, make_metric
from tests.test_circuit_ablations import CircuitOfArrows, draw_masks
from tests.test_circuits import examples
from tests.test_edges import make_fixed_pair

VOCABULARY = ["the", "a", "cat", "dog", "sat", "ran"]
WORDS = {0: 0, 1: 2, 2: 4}
METRIC = {"y_3": ("cat", "dog")}


def make_pairs():
    """Clean sentences of 4 words and corrupt ones of 5 words."""
    net = bt.decoder(8, heads=2, slices=2, hidden=8, vocabulary=VOCABULARY, seed=3).to(torch.float64)
    clean = [net.sentence(text) for text in ("the cat sat the", "a dog ran the")]
    return net, clean, [net.sentence(text) for text in ("the a dog ran sat", "cat cat the sat ran")]


class AlignedValues:
    """The value of the aligned word in another sentence, within some entries; else that in the run of the circuit."""

    def __init__(self, run, other, words, entries=None):
        self.run, self.other, self.words, self.entries = run, other, words, entries

    def value(self, node):
        value, (group, index) = self.run.value(node), self.run.model.ground.unravel_index(node)
        if group.word_stack is not None:
            words = self.words.get(group.word_stack, self.words) if self.words else {}
            if index[-1] not in words:
                return value
            index = (*index[:-1], words[index[-1]])
        other = self.other.value(self.other.model.ground.id("_".join([group.name, *map(str, index)])))
        if self.entries is None:
            return other
        is_within = torch.zeros(value.numel(), dtype=torch.bool)
        is_within[self.entries] = True
        return torch.where(is_within.reshape(value.shape), other, value)


def compare(at, clean, corrupt, words, names, entries=None, **options):
    """Compare circuits with the reference."""
    sides = clean, corrupt if entries is None else Swap(corrupt, entries)
    candidates = options.get("candidates")
    runs = CircuitPairs.parse(*sides, make_metric(names), at, None, candidates, 2**29, words).build_runs()
    metric, ground = make_metric(names), clean[0].ground
    nodes, masks = [ground.id(name) for name in names], draw_masks(len(runs.edge_names))
    for mask, actual in zip(masks, runs.evaluate(torch.tensor(masks)), strict=True):
        removed = set()
        for edge, is_retained in zip(runs.edge_names, mask, strict=True) if at != "edges" else ():
            source, *targets = map(ground.id, edge.split(" -> "))
            removed |= set() if is_retained else {(source, t) for t in targets or ground.children(source)}
        outcomes = []
        for s, other in zip(clean, corrupt, strict=True):
            models = s.state.model, s.state.model
            run = CircuitRun(*models, runs.structure, mask) if at == "edges" else CircuitOfArrows(models[0], removed)
            run.left_out = AlignedValues(run, reference.ReferenceRun(other.state.model, {}), words, entries)
            outcomes.append(run.get_outcomes(nodes))
        close(actual, metric(*(torch.stack(values) for values in zip(*outcomes, strict=True))))
    return runs


@pytest.mark.parametrize("entries", [None, [0, 3]], ids=str)
@pytest.mark.parametrize("at", ["arrows", "nodes", "edges"])
def test_circuits_of_aligned_words_equal_runs_node_by_node(at, entries):
    _, clean, corrupt = make_pairs()
    options = {} if entries is None or at == "edges" else {"candidates": ["v", "a"] if at == "nodes" else ["v -> a"]}
    runs = compare(at, clean, corrupt, WORDS, ["y_3", "y_1"], entries, **options)
    assert at == "edges" or not any(
        "_3 ->" in name or (name.endswith("_3") and at == "nodes") for name in runs.edge_names
    )


@pytest.mark.parametrize("at", ["arrows", "nodes"])
@pytest.mark.parametrize("name", ["chapter, two slices", "concat", "three stacks"])
def test_words_of_sentences_of_equal_lengths(name, at):
    clean, corrupt, nodes = examples(name)
    counts = clean[0].ground.word_counts
    words = {stack: {i: (i + 1) % count for i in range(count - 1)} for stack, count in counts.items()}
    words = words if len(counts) > 1 else next(iter(words.values()))
    compare(at, clean, corrupt, words, [clean[0].ground.name(node) for node in nodes])


@pytest.mark.parametrize("name", ["concat", "vanilla decoder, learned"])
def test_words_of_edges_of_equal_lengths(name):
    clean, corrupt, names = make_fixed_pair(get_case(name))
    compare("edges", [clean], [corrupt], {0: 1, 1: 0}, names)


@pytest.mark.parametrize("within", [None, [0, 2]], ids=str)
def test_a_circuit_of_all_nodes_but_one_is_a_cell_of_a_sweep(within):
    _, clean, corrupt = make_pairs()
    other, options = corrupt if within is None else Swap(corrupt, within), {"metric": METRIC, "words": WORDS}
    for over in (("slice", "head"), None):
        chosen = {"at": "nodes", "over": over, "candidates": ["a", "v"], **options}
        names = bt.circuit(clean, other, edges=[], **chosen).edge_names
        swept = bt.sweep(clean, other, at="a", over=over, direction="noise", **options)
        for name in swept.names.values():
            result = bt.circuit(clean, other, edges=[other for other in names if other != name], **chosen)
            close(result.outcome, swept.outcomes[swept.index_of(name)])


def test_the_circuit_without_edges_is_the_other_run_at_aligned_words():
    _, clean, corrupt = make_pairs()
    options = {"metric": {"y_2": ("cat", "dog")}, "words": WORDS}
    expected = bt.sweep(clean, corrupt, at="x", direction="noise", **options).corrupt
    for at in ("arrows", "nodes"):
        close(bt.circuit(clean, corrupt, at=at, edges=[], **options).corrupt, expected)
    identity = {"metric": METRIC, "over": ("slice", "head"), "threshold": "10%"}
    one, other = clean[:1], [clean[0].net.sentence("the dog sat the")]
    circuits = [bt.circuit(one, other, words=words, **identity) for words in (None, {i: i for i in range(4)})]
    assert circuits[0].retained == circuits[1].retained and circuits[0].edge_names == circuits[1].edge_names


@pytest.mark.parametrize("at", ["arrows", "nodes", "edges"])
def test_searches_curves_files_and_other_pairs(at, tmp_path):
    net, clean, corrupt = make_pairs()
    options = {"metric": METRIC, "at": at, "words": WORDS, "over": None if at == "edges" else ("slice", "head")}
    options |= {"candidates": None if at == "edges" else ["v", "a"] if at == "nodes" else ["v -> a", "q -> a"]}
    result = bt.circuit(clean, corrupt, threshold="5%", **options)
    assert 0 < result.edges < result.candidates and result.direction == "noise" and result.marks()
    single = bt.circuit(clean[0], corrupt[0], edges=result.retained, **options)
    close(result.outcome[:1], single.outcome)
    close(single.run(clean, corrupt).outcome, result.outcome)
    zeros = bt.circuit(clean, Zero(), edges=result.retained, **{**options, "words": None})
    close(result.run(clean, Zero()).outcome, zeros.outcome)
    result.save(tmp_path / "circuit.safetensors")
    loaded = bt.load(tmp_path / "circuit.safetensors")
    close((loaded | loaded).outcome, result.outcome)
    curves = bt.faithfulness_curves(
        clean, corrupt, scores=result, shares=(0.5, 1), readout="y_3", baselines=(), **options
    )
    close(curves.outcomes["scores"][0, -1], curves.clean)
    close(curves.empty, result.corrupt)
    assert curves.digests == result.pairs.digests and all(curves.digests)
    pairs = [net.sentence("a cat sat the")], [net.sentence("dog the dog ran cat")]
    searched = bt.circuit(clean, corrupt, threshold="5%", held_out=pairs, **options)
    close(searched.held_out.outcome, result.run(*pairs).outcome)


def test_words_without_a_meaning_are_refused():
    net, clean, corrupt = make_pairs()
    for sides, chosen, message in [
        ((clean, corrupt), {"words": None}, "corrupt[0]: expected as many words as clean[0]"),
        ((clean[0], corrupt[0]), {"words": None}, "Or align words: words="),
        ((clean, corrupt), {"direction": "both"}, "words=, has no corrupt run in which edges are restored"),
        ((clean, Zero()), {}, "words: expected sentences on both sides"),
        ((clean, Mean(corrupt)), {}, "words: expected sentences on both sides"),
        ((clean, corrupt), {"words": {0: 9}}, "words"),
        ((clean, corrupt), {"words": "all"}, "words: expected a mapping, or pairs"),
        (([clean[0], net.sentence("the cat")], corrupt), {}, "clean[1]: expected a sentence of 4 words"),
    ]:
        assert message in get_refusal(bt.circuit, *sides, **{"metric": METRIC, "words": WORDS, **chosen}), message
    residual = bt.bayesuvius(dim=4, heads=1, residual=True)
    pair = residual.sentence("the cat sat"), residual.sentence("the dog")
    options = {"at": "edges", "words": {0: 1, 1: 0}, "metric": lambda x_1_2: x_1_2[:, 0]}
    assert "an ablation, or words=, cannot set a part of" in get_refusal(bt.circuit, *pair, **options)
