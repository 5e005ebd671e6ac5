"""A hidden Markov model with Gaussian readouts: evidence, posteriors, best path and EM step are those of hmmlearn."""

import numpy as np
import pytest
import torch

import bnet_transformer as bt
from bnet_transformer.inference import Evidence, log_evidence, posterior
from bnet_transformer.tpm import Categorical, Given, Normal, Select
from tests.cases import close

hmm = pytest.importorskip("hmmlearn.hmm", reason='the oracle of chains: pip install "bnet-transformer[peers]"')

STATES, DIM, SENTENCES, WORDS = 3, 2, 4, 9


def make_pair():
    """The net and the model of hmmlearn with the same parameters; the words of the net have no effect."""
    words = ["word"]
    nodes = [
        bt.Node("c", Categorical(STATES), [bt.Arrow("c", "before")], plates=words),
        bt.Node("x", Select((DIM,)), ["c"], plates=words),
    ]
    readout = bt.Node("y", Normal(0.8), ["x"], plates=words)
    stack = bt.Stack(nodes, [bt.Node("x", Given(DIM), plates=words)], [readout])
    net = bt.BNet(bt.Declaration([stack]), seed=1).to(torch.float64)
    initial = torch.tensor([0.5, 0.5, 0.0])  # with zeros
    table = torch.tensor([[0.7, 0.3, 0.0], [0.1, 0.6, 0.3], [0.2, 0.2, 0.6]])
    net = net.replace({"c_0.initial": initial.double().log(), "c_0.logits": table.double().log()})
    model = hmm.GaussianHMM(STATES, "spherical", params="st", init_params="", n_iter=1)
    model.n_features = DIM
    model.startprob_, model.transmat_ = (
        net.parameters[name].softmax(-1).numpy() for name in ("c_0.initial", "c_0.logits")
    )
    model.means_ = net.parameters["x_1.values"].numpy()
    model.covars_ = np.full(STATES, float(net.parameters["y.log_sigma"].exp()) ** 2)
    return net, model


def draw_words(lengths):
    y = torch.randn(len(lengths), WORDS, DIM, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    return torch.zeros_like(y), y, torch.arange(WORDS) < torch.tensor(lengths)[:, None]


def test_evidence_and_posteriors_are_those_of_hmmlearn():
    net, model = make_pair()
    lengths = [WORDS, 1, 5, WORDS]
    x, y, mask = draw_words(lengths)
    arguments = net.module(), {"y": Evidence(y, mask)}, x, mask
    with torch.no_grad():
        evidence, probs = log_evidence(*arguments), posterior(arguments[0], "c_0", *arguments[1:])
    for k, length in enumerate(lengths):
        expected, expected_probs = model.score_samples(y[k, :length].numpy())
        close(evidence[k].item(), expected)
        close(probs[k, :length].numpy(), expected_probs)


def test_the_most_probable_path_is_that_of_hmmlearn():
    net, model = make_pair()
    x, y, _ = draw_words([WORDS] * SENTENCES)
    for words, values in zip(x, y, strict=True):
        best = net.sentence(x=words).most_probable({f"y_{i}": value for i, value in enumerate(values)})
        log_prob, path = model.decode(values.numpy())
        assert best.states[0].tolist() == path.tolist()
        close(best.log_probs[0].item(), log_prob)


def test_the_path_of_a_long_sentence_is_that_of_hmmlearn():
    net, model = make_pair()
    values, _ = model.sample(2_000, random_state=0)
    s = net.sentence(x=torch.zeros(len(values), DIM, dtype=torch.float64))
    best = s.most_probable({f"y_{i}": value for i, value in enumerate(values)})
    log_prob, path = model.decode(values)
    assert best.states[0].tolist() == path.tolist()
    close(best.log_probs[0].item(), log_prob)


def test_an_em_step_is_that_of_hmmlearn():
    net, model = make_pair()
    x, y, _ = draw_words([WORDS] * SENTENCES)
    fit = bt.fit(
        net, (x, y), method=bt.EM(steps=1, optimizer="first-order"), learn=["c_0.initial", "c_0.logits"], progress=False
    )
    model.fit(y.flatten(0, 1).numpy(), [WORDS] * SENTENCES)
    close(fit.net.parameters["c_0.initial"].softmax(-1).numpy(), model.startprob_)
    close(fit.net.parameters["c_0.logits"].softmax(-1).numpy(), model.transmat_)
    assert not np.allclose(net.parameters["c_0.logits"].softmax(-1).numpy(), model.transmat_, atol=0.01)
