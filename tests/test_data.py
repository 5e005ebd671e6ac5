"""Data in every accepted form give equal results; batches are sliced, repeated and sharded by sentence."""

import numpy as np
import pandas as pd
import pytest
import torch

import bnet_transformer as bt
from bnet_transformer.data import Batch, Evidence, encode_sentence, read_batch
from bnet_transformer.data.batch import infer_fit_task, infer_task, pad, split_missing
from bnet_transformer.data.dataset import ExampleReader, read_dataset
from bnet_transformer.tpm import Categorical

WORDS = ["a", "b", "c", "d"]
X, Y = [[0, 1, 2], [3, 2, 1]], [[1, 0, 1], [0, 0, 1]]


def mixture(combine: str = "select") -> bt.BNet:
    return bt.bayesuvius(4, heads=2, combine=combine, vocabulary=WORDS, observe=Categorical(2)).to(torch.float64)


def make_forms(net: bt.BNet) -> list[object]:
    """Return the same two sentences in every accepted form."""
    texts = ["a b c", "d c b"]
    pairs = list(zip(texts, Y, strict=True))
    task = infer_fit_task(net.network)
    return [
        *(pairs, list(zip(X, Y, strict=True)), (X, Y), (texts, Y), (torch.tensor(X), torch.tensor(Y))),
        *((np.array(X), np.array(Y, dtype=np.int32)), (np.array(texts), Y)),
        *([{"": x, "y": y} for x, y in pairs], {"": texts, "y": Y}, pd.DataFrame({"": texts, "y": Y})),
        *(read_batch(net.network, pairs), read_dataset(ExampleReader(task), pairs)),
    ]


@pytest.mark.slow
def test_every_form_of_data_gives_equal_results():
    net = mixture()
    trained = bt.bayesuvius(4, heads=2, vocabulary=WORDS, combine="concat", observe=net.declaration.nodes[-1].tpm)
    first, *remaining = make_forms(net)
    f = bt.fit(net, first, method=bt.MAP(restarts=1, steps=2), progress=False)

    def query_all(data):
        return (
            bt.fit(net, data, method=bt.MAP(restarts=1, steps=1), progress=False).bounds,
            *(query(data).tolist() for query in (f.responsibilities, f.predict, f.log_likelihood)),
            f.check(data, draws=1).observed,
            bt.train(trained, data, steps=1, batch=2, progress=False).losses,
            bt.inclusion(trained, data, draws=8, progress=False).mean.tolist(),
        )

    expected = query_all(first)
    for k, data in enumerate(remaining):
        assert query_all(data) == expected, f"form {k + 1}"


def test_sentences_alone_and_with_what_is_observed_predict_the_same():
    net = mixture()
    f = bt.fit(net, make_forms(net)[0], method=bt.MAP(restarts=1, steps=2), progress=False)
    for data in (["a b c", "d c b"], X, np.array(X), torch.tensor(X), {"": X}):
        assert torch.equal(f.predict(data), f.predict(make_forms(net)[0]))


@pytest.mark.slow
def test_several_stacks_take_tuples_mappings_and_columns():
    net = bt.encoder_decoder(8, heads=2, slices=1, vocabulary=WORDS, dropout=0.0)
    rows = [("a b", "c d a"), ("d", "b c a")]
    mappings = [{"enc": enc, "dec": dec} for enc, dec in rows]
    columns = {"enc": [enc for enc, _ in rows], "dec": [dec for _, dec in rows]}
    losses = [bt.train(net, data, steps=2, batch=2, progress=False).losses for data in (rows, mappings, columns)]
    assert losses[0] == losses[1] == losses[2]
    result = [bt.inclusion(net, data, output="dec_x_1", progress=False).mean for data in (rows, mappings, columns)]
    assert torch.equal(result[0], result[1]) and torch.equal(result[0], result[2])


def test_a_sentence_and_a_batch_encode_words_alike():
    for net, text in ((mixture(), "a b c"), (bt.bayesuvius(4), "any words"), (bt.bayesuvius(4), torch.randn(3, 4))):
        main = infer_task(net.network).encoders[""].spec.group.name
        value = encode_sentence(net.network, text).given[main]
        assert torch.equal(net.batch([text]).x[""][0], value)
        assert torch.equal(read_batch(net.network, [text], observed="none").x[""][0], value)


def test_gaps_are_split_from_values_and_put_back():
    states, reals = torch.tensor([[1, -1]]), torch.tensor([[[1.0, 2.0], [torch.nan, torch.nan]]])
    batch = Batch({}, None, {"s": split_missing(states), "r": split_missing(reals)})
    assert batch.evidence["s"].value.tolist() == [[1, 0]] and batch.count == 2
    assert torch.equal(batch.observed["s"], states) and torch.equal(batch.observed["r"].isnan(), reals.isnan())


def test_parts_of_a_batch_have_no_padding_and_miss_no_sentence():
    net = mixture()
    batch = read_batch(net.network, [("a b c", Y[0]), ("d", [1]), ("c b", [0, None])], mask_padding=True)
    positions = []
    for indices, part in batch.split_by_length(net.network, 100):
        assert part.mask is None and part.x[""].shape[1] == part.evidence["y"].value.shape[1]
        assert torch.equal(part.observed["y"], batch.take(indices).observed["y"][:, : part.x[""].shape[1]])
        positions += indices.tolist()
    assert sorted(positions) == [0, 1, 2]
    assert batch.repeat(2).x[""][:2].tolist() == [batch.x[""][0].tolist()] * 2
    assert [len(batch.shard(rank, 2)) for rank in range(2)] == [2, 1]
    assert batch.take(slice(1)).shard(1, 2).count == 0 and batch.equals(batch.take(torch.arange(3)))


def test_padding_is_on_the_axis_of_words():
    padded = pad([torch.ones(2, 1), torch.ones(2, 3)], 1, -1)
    assert padded.tolist() == [[[1, -1, -1]] * 2, [[1, 1, 1]] * 2]


@pytest.mark.parametrize(
    "data, message",
    [
        ({"": ["a b"], "y": [[0, 1], [1, 0]]}, "columns of equal length"),
        ({"": "a b"}, "one for each stack and readout"),
        ((["a b"], [[0, 7]]), r"data\[0\], y: expected states from 0 to 1"),
        ((torch.tensor([[0, 9]]), torch.tensor([[0, 1]])), r"data\[0\], sentence: expected ids from 0 to 3"),
        (lambda step: [], "expected pairs"),
    ],
)
def test_bad_data_are_refused_with_their_place(data, message):
    with pytest.raises(bt.BNetError, match=message):
        bt.fit(mixture(), data, method=bt.MAP(steps=1), progress=False)


def test_evidence_is_one_class():
    assert bt.inference.Evidence is Evidence


def test_pairs_of_several_stacks_are_a_sentence_and_its_observations():
    """The same batch in every form, also for `fit`, `train`, `inclusion` and `roles`."""
    net = bt.encoder_decoder(8, heads=2, slices=1, vocabulary=["a", "b", "c", "d"])
    y = ["a c", "a c d"]
    x = [{"enc": "a b", "dec": "b a"}, {"enc": "a b c", "dec": "b a c"}]
    mappings = [{**sentence, "dec_y": observed} for sentence, observed in zip(x, y, strict=True)]
    expected = read_batch(net.network, mappings)
    options = {"draws": 10, "role": "dec_a", "progress": False}
    posterior = bt.inclusion(net, mappings, **options)
    assert posterior.likelihood == "P(dec_y | x)"
    for pairs in (list(zip(x, y, strict=True)), (x, y), [(s, {"dec_y": o}) for s, o in zip(x, y, strict=True)]):
        batch = read_batch(net.network, pairs)
        assert all(torch.equal(batch.x[stack], expected.x[stack]) for stack in expected.x)
        assert torch.equal(batch.observed["dec_y"], expected.observed["dec_y"])
        assert torch.equal(bt.inclusion(net, pairs, **options).log_bayes, posterior.log_bayes)
        assert bt.fit(net, pairs, method=bt.MAP(steps=1), progress=False).sentences == 2
        assert len(bt.train(net, pairs, steps=1, progress=False).losses) == 1
    sources_and_targets = [tuple(sentence.values()) for sentence in x]
    roles = [bt.roles(net, data, role="dec_a", relations=["first"]).mean for data in (x, sources_and_targets, pairs)]
    assert torch.equal(roles[0], roles[1]) and torch.equal(roles[0], roles[2])
    with pytest.raises(bt.BNetError, match="dec_y"):
        bt.fit(net, [(x[0], ["d", "e"])], progress=False)


def test_values_of_a_batch_without_a_row_for_each_sentence_are_those_of_all_sentences():
    words = ["word"]
    inputs = [bt.Node("x", bt.tpm.Given(4), plates=words), bt.Node("z", bt.tpm.Given(4), plates=words)]
    nodes = [bt.Node("s", bt.tpm.Add(), ["x", "z"], plates=words), bt.Node("y", Categorical(3), ["s"], plates=words)]
    net = bt.BNet(bt.Declaration([bt.Stack([], inputs, nodes)]), seed=0)
    x, y, z = torch.randn(3, 3, 4), torch.tensor([0, 1, 2]), torch.randn(3, 4)
    present = torch.tensor([True, False, True])
    full = Batch({"": x}, None, {"y": Evidence(y.expand(3, 3), present.expand(3, 3))}, {"z": z.expand(3, 3, 4)})
    rows = [
        Batch({"": x}, None, {"y": Evidence(y, present)}, {"z": z}),
        Batch({"": x}, None, {"y": Evidence(y[None], present[None])}, {"z": z[None]}),
    ]
    for batch in rows:
        assert read_batch(net.network, batch).equals(read_batch(net.network, full))
        for size in (1, 2):
            options = {"steps": 2, "batch": size, "progress": False}
            assert bt.train(net, batch, **options).losses == bt.train(net, full, **options).losses


def test_data_read_for_another_net_are_checked():
    words = bt.decoder(4, heads=2, slices=1, vocabulary=["a", "b", "c"])
    dataset = read_dataset(ExampleReader(infer_task(words.network)), torch.tensor([[2, 1], [1, 2]]), 2)
    with pytest.raises(bt.BNetError):
        bt.train(bt.bayesuvius(4, heads=2, observe=Categorical(3)), dataset, steps=1, progress=False)


def test_a_loss_of_the_user_reads_any_targets():
    net = bt.bayesuvius(4, heads=2, observe=Categorical(3))
    targets = Batch({"": torch.randn(3, 3, 4)}, None, {"y": Evidence(torch.randn(3))})
    trained = bt.train(
        net,
        targets,
        steps=1,
        progress=False,
        loss=lambda module, batch: (module(batch.x).mean() - batch.evidence["y"].value.mean()) ** 2,
    )
    assert len(trained.losses) == 1
