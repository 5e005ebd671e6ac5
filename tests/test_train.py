"""Training: the loss is the reference's, steps are torch's, resume is exact, two processes equal one."""

import math
import os
import signal

import numpy as np
import pytest
import torch
from torch.nn import functional

import bnet_transformer as bt
from bnet_transformer.data import Batch
from bnet_transformer.data.batch import infer_trainable_task
from bnet_transformer.data.dataset import ExampleReader, read_dataset
from bnet_transformer.inference import Evidence, log_evidence
from bnet_transformer.learning import training
from bnet_transformer.learning.loop import FILE_NAME
from bnet_transformer.learning.training import create_schedule
from bnet_transformer.tpm import Categorical, Normal
from tests import flat_options

D = torch.float64
WORDS = list("abcdefg")


def make_net(**options) -> bt.BNet:
    return bt.decoder(8, heads=2, slices=1, vocabulary=WORDS, **{"dropout": 0.0, **options}).to(D)


def make_s2s(**options) -> bt.BNet:
    return bt.encoder_decoder(8, heads=2, slices=1, vocabulary=WORDS, **{"dropout": 0.0, **options}).to(D)


SENTENCES = ["a b c d", "b c", "g f e d c b a", "a a b", "d e f"]
PAIRS = [("a b c", "g a b"), ("b", "g b c d e"), ("e f g a", "g g")]


def first_loss(net: bt.BNet, data: object, **options) -> float:
    return flat_options.train(net, data, **{"steps": 1, "batch": 100, **options}).losses[0]


# the loss is minus the reference's log probability


def test_the_loss_of_next_words_is_the_references():
    net = make_net()
    parts = [net.sentence(s).tpm(f"y_{i}").log_prob(torch.tensor(WORDS.index(s.split()[i + 1])))
             for s in SENTENCES for i in range(len(s.split()) - 1)]  # fmt: skip
    assert first_loss(net, SENTENCES) == pytest.approx(-float(torch.stack(parts).mean()), abs=1e-12)


def test_the_loss_of_pairs_is_the_references():
    net, parts = make_s2s(), []
    for source, target in PAIRS:
        words = ["g", *target.split(), "a"]
        s = net.sentence({"enc": source, "dec": words[:-1]})
        parts += [s.tpm(f"dec_y_{i}").log_prob(torch.tensor(WORDS.index(w))) for i, w in enumerate(words[1:])]
    assert first_loss(net, PAIRS, start="g", stop="a") == pytest.approx(-float(torch.stack(parts).mean()), abs=1e-12)


@pytest.mark.parametrize("pool", [None, "mean"])
def test_the_loss_of_real_readouts_is_the_references(pool):
    net = bt.encoder(4, heads=2, slices=1, readout=Normal(0.7, dim=3), pool=pool, dropout=0.0).to(D)
    x = [torch.randn(n, 4, dtype=D) for n in (3, 5, 2)]
    y = [torch.randn(*(() if pool else (len(sentence),)), 3, dtype=D) for sentence in x]
    parts = []
    for words, observed in zip(x, y, strict=True):
        s = net.sentence(x=words)
        parts += (
            [s.tpm("y").log_prob(observed)] if pool else [s.tpm(f"y_{i}").log_prob(v) for i, v in enumerate(observed)]
        )
    expected = -float(torch.stack(parts).mean())
    assert first_loss(net, list(zip(x, y, strict=True))) == pytest.approx(expected, abs=1e-12)


def test_the_loss_of_masked_words_counts_what_is_observed():
    net = bt.encoder(8, heads=2, slices=1, vocabulary=WORDS, readout="word", dropout=0.0).to(D)
    data = [("a b g d", [None, -1, 2, None]), ("a g", [-1, 1])]
    parts = [net.sentence("a b g d").tpm("y_2").log_prob(torch.tensor(2))]
    parts += [net.sentence("a g").tpm("y_1").log_prob(torch.tensor(1))]
    assert first_loss(net, data) == pytest.approx(-float(torch.stack(parts).mean()), abs=1e-12)


def test_words_are_their_own_labels():
    """Of a masked word, and of a decoder's outputs, as text, as a list with gaps, as ids."""
    masked = bt.encoder(8, heads=2, slices=1, vocabulary=WORDS, readout="word", dropout=0.0).to(D)
    assert first_loss(masked, [("a b c", ["a", None, "g"])]) == first_loss(masked, [("a b c", [0, -1, 6])])
    assert first_loss(masked, [("a b c", "a e g")]) == first_loss(masked, [("a b c", [0, 4, 6])])
    words = {"enc": "a b", "dec": "c d"}
    assert first_loss(make_s2s(), [{**words, "dec_y": "d g"}]) == first_loss(make_s2s(), [{**words, "dec_y": [3, 6]}])
    kinds = Categorical(2, labels=("no", "yes"))
    tagged = bt.encoder(8, heads=2, slices=1, vocabulary=WORDS, readout=kinds, dropout=0.0).to(D)
    assert first_loss(tagged, [("a b", "no yes")]) == first_loss(tagged, [("a b", ["no", 1])])
    for net, data in ((masked, [("a b", ["a", "z"])]), (masked, [("a b", "a z")]), (tagged, [("a b", "a b")])):
        with pytest.raises(bt.BNetError, match=r"word of the sentence|label of y"):
            first_loss(net, data)


def test_labels_and_classes_and_mappings():
    labels = ("no", "yes")
    net = bt.encoder(8, heads=2, slices=1, vocabulary=WORDS, readout=Categorical(2, labels=labels), pool="first").to(D)
    loss = first_loss(net, [("a b", "yes"), ("c", "no")])
    assert loss == first_loss(net, [{"": "a b", "y": 1}, {"": "c", "y": 0}])


def test_smoothing_is_torchs_and_held_out_losses_have_none():
    net, ids = make_net(), torch.randint(0, 7, (5, 6))
    logits = net.module().eval()(ids[:, :-1]).detach().flatten(0, 1)
    smooth = functional.cross_entropy(logits, ids[:, 1:].flatten(), label_smoothing=0.2)
    result = bt.train(net, ids, steps=1, batch=5, smoothing=0.2, optimizer=bt.AdamW(rate=1e-12), held_out=ids)
    assert result.losses[0] == pytest.approx(float(smooth), abs=1e-12)
    plain = functional.cross_entropy(logits, ids[:, 1:].flatten())
    assert result.held_out[0][1] == pytest.approx(float(plain), abs=1e-8)


def test_a_loss_of_the_users_needs_no_readout():
    net = bt.decoder(4, heads=2, slices=1, readout=None, dropout=0.0).to(D)
    x = torch.randn(3, 5, 4, dtype=D)

    def loss(module: torch.nn.Module, batch: Batch) -> torch.Tensor:
        return module(batch.x).square().mean() + batch.observed["observed"].mean()

    expected = net.module().eval()(x).square().mean() + 2
    data = [(words, torch.full((1,), 2.0)) for words in x]
    assert first_loss(net, data, loss=loss) == pytest.approx(float(expected.detach()), abs=1e-12)
    with pytest.raises(bt.BNetError, match="one number"):
        first_loss(net, data, loss=lambda module, batch: 1.0)


def test_a_loss_of_the_users_may_sum_choices_out():
    net = bt.bayesuvius(4, heads=3, vocabulary=WORDS, observe=Categorical(2), residual=True).to(D)
    data = [("a b c", [0, 1, 1]), ("d e f", [1, 1, 0])]

    def loss(module: torch.nn.Module, batch: Batch) -> torch.Tensor:
        return -log_evidence(module, {"y": Evidence(batch.observed["y"])}, batch.x).mean()

    parts = []
    for text, observed in data:
        s = net.sentence(text)
        log_p = torch.stack([s.tpm(f"y_{i}").log_prob(torch.tensor(v)) for i, v in enumerate(observed)])
        parts.append((log_p.sum(0) + s.tpm("c").logits.log_softmax(-1)).logsumexp(0))
    result = bt.train(net, data, steps=20, batch=2, optimizer=bt.AdamW(rate=0.05), loss=loss)
    assert result.losses[0] == pytest.approx(-float(torch.stack(parts).mean()), abs=1e-10)
    assert result.losses[-1] < result.losses[0]


# the steps are torch's


def test_steps_are_those_of_a_loop_written_out():
    net, ids = make_net(), torch.randint(0, 7, (6, 5))
    options = {"rate": 2.0, "schedule": "noam", "warmup": 3, "clip": 0.3, "weight_decay": 0.1, "seed": 5}
    result = flat_options.train(net, ids, steps=5, batch=6, **options)
    module = bt.BNet(net.declaration).to(D).replace({k: v.clone() for k, v in net.parameters.items()}).module()
    matrices = [v for k, v in module.store.items() if not k.endswith(("bias", "gain", "bias_in", "bias_out"))]
    vectors = [v for k, v in module.store.items() if k.endswith(("bias", "gain", "bias_in", "bias_out"))]
    groups = [{"params": matrices}, {"params": vectors, "weight_decay": 0.0}]
    adam = torch.optim.AdamW(groups, betas=(0.9, 0.98), eps=1e-9, weight_decay=0.1)
    losses = []
    for step in range(1, 6):
        loss = functional.cross_entropy(module(ids[:, :-1]).flatten(0, 1), ids[:, 1:].flatten())
        adam.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(module.parameters(), 0.3)
        for group in adam.param_groups:
            group["lr"] = 2.0 * 8**-0.5 * min(step**-0.5, step * 3**-1.5)
        adam.step()
        losses.append(float(loss.detach()))
    assert result.losses == pytest.approx(losses, abs=1e-10)
    for name, value in result.net.parameters.items():
        torch.testing.assert_close(value, module.store[name.replace(".", "/")].detach(), rtol=1e-8, atol=1e-8)


def test_rates():
    constant, cosine = (create_schedule(kind, 0.1, 4, 24, None) for kind in ("constant", "cosine"))
    assert [constant(s) for s in (1, 4, 20)] == pytest.approx([0.025, 0.1, 0.1])
    assert [cosine(s) for s in (2, 4, 14, 24)] == pytest.approx([0.05, 0.1, 0.05, 0.0], abs=1e-12)


def test_training_learns_without_changing_the_callers_net():
    net = bt.decoder(16, heads=2, slices=1, vocabulary=WORDS, dropout=0.1)
    before = {name: value.clone() for name, value in net.parameters.items()}
    state = torch.get_rng_state()
    result = bt.train(
        net, ["a b c d e f g"] * 8, steps=60, batch=8, optimizer=bt.AdamW(rate=1e-2), held_out=["a b c d e f g"]
    )
    assert (
        result.held_out[-1][1] < 0.05 < result.losses[0]
        and result.net.generate("a", length=6).texts[0] == "b c d e f g"
    )
    assert all(torch.equal(value, net.parameters[name]) for name, value in before.items())
    assert torch.equal(state, torch.get_rng_state()) and not any(
        p.requires_grad for p in result.net.parameters.values()
    )


def test_seeds_decide_order_and_dropout():
    net = make_net(dropout=0.3)
    one, same, other = (bt.train(net, SENTENCES, steps=4, batch=2, seed=seed) for seed in (1, 1, 2))
    assert one.losses == same.losses != other.losses
    constant = bt.train(net, ["a b c d e f g a b"], steps=3, optimizer=bt.AdamW(rate=1e-12))
    assert len({round(loss, 6) for loss in constant.losses}) == 3  # each step draws new dropout
    torch.manual_seed(99)
    assert bt.train(net, SENTENCES, steps=4, batch=2, seed=1).losses == one.losses


def test_an_epoch_has_every_example_once():
    dataset = read_dataset(
        ExampleReader(infer_trainable_task(make_net().network)), torch.arange(7)[:, None].expand(7, 3), 3, 0, None
    )
    assert dataset.epoch == 3
    orders = [[int(k) for step in range(3) for k in dataset(3 * e + step).x[""][:, 0]] for e in range(2)]
    assert [sorted(order) for order in orders] == [list(range(7))] * 2 and orders[0] != orders[1]
    assert bt.train(make_net(), SENTENCES, epochs=2, batch=2).steps == 6


def test_forms_of_data_are_one(tmp_path):
    ids = torch.randint(0, 7, (6, 5))
    net, losses = make_net(), []
    texts = [" ".join(WORDS[k] for k in row) for row in ids]
    for data in (ids, ids.numpy(), ids.tolist(), texts, [text.split() for text in texts], lambda step: ids):
        losses.append(bt.train(net, data, steps=1, batch=6).losses[0])
    assert losses == pytest.approx([losses[0]] * 6, abs=1e-12)
    stream = torch.randint(0, 7, (21,)).numpy().astype(np.uint16)
    np.save(tmp_path / "a.npy", stream)
    stream.tofile(tmp_path / "a.bin")
    rows = [stream[k : k + 6].astype(int).tolist() for k in range(0, 20, 5)]
    expected = bt.train(net, rows, steps=3, batch=2).losses
    for data in (stream, tmp_path / "a.npy", str(tmp_path / "a.bin")):
        assert bt.train(net, data, steps=3, batch=2, words=5).losses == expected
    windows = [*rows[:3], stream[15:19].astype(int).tolist()]  # the last window has the remaining words
    assert (
        bt.train(net, stream[:19], epochs=2, batch=2, words=5).losses
        == bt.train(net, windows, epochs=2, batch=2).losses
    )
    pair = (torch.randint(0, 7, (4, 3)), torch.randint(0, 7, (4, 5)))
    pairs = [(a.tolist(), b.tolist()) for a, b in zip(*pair, strict=True)]
    assert first_loss(make_s2s(), pair) == first_loss(make_s2s(), pairs)


def test_bfloat16_is_near_and_keeps_parameters():
    net = bt.decoder(16, heads=2, slices=1, vocabulary=WORDS, dropout=0.0)
    ids = torch.randint(0, 7, (4, 20))
    rounded, exact = (
        bt.train(net, ids, steps=3, batch=4, execution=bt.Execution(precision=p)) for p in ("bfloat16", "float32")
    )
    assert rounded.losses == pytest.approx(exact.losses, rel=0.02) and rounded.losses != exact.losses
    assert rounded.net.network.dtype == torch.float32


def test_it_stops_early_and_gives_the_best():
    net = make_net()
    result = bt.train(
        net,
        ["a b c d"],
        steps=400,
        batch=1,
        optimizer=bt.AdamW(rate=0.05),
        early_stopping=bt.EarlyStopping(patience=3),
        held_out=["d a c b", "b a d"],
        every=2,
    )
    losses = [loss for _, loss in result.held_out]
    best = losses.index(min(losses))
    assert result.steps < 400 and len(losses) == best + 1 + 3
    last_loss = bt.train(result.net, ["d a c b", "b a d"], steps=1, batch=2, optimizer=bt.AdamW(rate=1e-9)).losses[0]
    assert last_loss == pytest.approx(min(losses), abs=1e-9)


def test_the_result_of_training():
    result = bt.train(make_net(), SENTENCES, steps=4, batch=2, held_out=SENTENCES, every=2)
    frame = result.to_dataframe()
    assert list(frame.index) == [1, 2, 3, 4] and frame["loss"].tolist() == list(result.losses)
    assert frame["held_out"].notna().tolist() == [False, True, False, True]
    assert isinstance(bt.train(make_net().network, SENTENCES, steps=1).net, type(make_net().network))


# checkpoints


@pytest.fixture
def run_path(tmp_path):
    """A folder with a checkpoint after four steps."""
    bt.train(make_net(), SENTENCES, steps=4, batch=2, checkpoints=tmp_path / "run")
    return tmp_path / "run"


def test_a_checkpoint_of_another_run_or_with_other_bytes_is_refused(run_path):
    """Another net, setting, loss or data, or fewer steps than are done."""
    nets = [make_net(bias=False), make_net(activation="gelu"), make_net().to(torch.float32)]
    nets.append(bt.decoder(16, heads=2, slices=1, vocabulary=WORDS, dropout=0.0).to(D))
    changes = [{"batch": 3}, {"seed": 3, "rate": 0.1}, {"resume": False}, {"held_out": SENTENCES}, {"steps": 3}]
    changes += [{"loss": lambda module, batch: module(batch.x).square().mean()}, {"data": SENTENCES[1:]}]
    options = {"data": SENTENCES, "steps": 8, "batch": 2, "folder": run_path, "resume": True}
    for net, other in [*((net, {}) for net in nets), *((make_net(), other) for other in changes)]:
        with pytest.raises(bt.BNetError):
            flat_options.train(net, **{**options, **other})
            pytest.fail(str(other))
    assert flat_options.train(make_net(), **{**options, "steps": 4}).steps == 4
    content = bytearray((run_path / FILE_NAME).read_bytes())
    content[-9] ^= 1
    for broken in (bytes(content), bytes(content[:100]), b"", b"no such thing" * 9):
        (run_path / FILE_NAME).write_bytes(broken)
        with pytest.raises(bt.FileError):
            bt.train(make_net(), SENTENCES, steps=8, batch=2, checkpoints=bt.Checkpoints(run_path, resume=True))


GROWING = {"batch": 20, "rate": 40.0, "warmup": 200, "every": 1, "bound": 3.0}  # the loss is above 3 after some steps


def _run_until_divergence(folder, **options):
    """Train with a growing rate until the loss diverges; returns the net, the data and the error."""
    net = bt.decoder(8, heads=2, slices=1, vocabulary=7, dropout=0.0)
    ids = torch.randint(0, 7, (20, 6), generator=torch.Generator().manual_seed(0))
    with pytest.raises(bt.BNetError, match="loss") as error:
        flat_options.train(net, ids, **{"steps": 300, "folder": folder, **GROWING, **options})
    return net, ids, str(error.value)


@pytest.mark.parametrize("is_last", [False, True], ids=["on the way", "after the last step"])
def test_a_checkpoint_has_parameters_with_a_finite_loss(tmp_path, is_last):
    """Parameters are saved after their loss is computed, not after that of the step before."""
    net, ids, message = _run_until_divergence(tmp_path / "a")
    num_steps = int(message.split()[1].rstrip(":")) - 1
    if is_last:  # the step that diverges is the last: no later batch shows it
        net, ids, message = _run_until_divergence(tmp_path / "b", steps=num_steps)
    loaded = training.load_checkpoint(net, tmp_path / ("b" if is_last else "a"))
    assert loaded.steps == num_steps - 1 == len(loaded.losses) and f"from step {loaded.steps} " in message
    assert loaded.steps > 0 and first_loss(loaded.net, ids) < 3


@pytest.mark.slow
def test_a_diverged_run_resumes_with_other_rates(tmp_path):
    net, ids, message = _run_until_divergence(tmp_path)
    assert "resume='changed') and a rate= below 40" in message
    options = {"steps": 60, "folder": tmp_path, **GROWING}
    with pytest.raises(bt.BNetError, match=r"rate=40.0.*resume='changed'"):
        flat_options.train(net, ids, resume=True, **{**options, "rate": 1e-3})
    before = training.load_checkpoint(net, tmp_path)
    lower_rate = {**options, "rate": 1e-3, "schedule": "cosine", "warmup": 0, "clip": 1.0}
    result = flat_options.train(net, ids, resume="changed", **lower_rate)
    assert result.steps == 60 and result.losses[: before.steps] == before.losses
    assert (
        flat_options.train(net, ids, resume=True, **lower_rate).losses == result.losses
    )  # the settings of the checkpoint are new
    with pytest.raises(bt.BNetError, match=r"seed=0.*seed=1"):
        flat_options.train(net, ids, resume="changed", seed=1, **lower_rate)


def test_what_a_checkpoint_holds(tmp_path):
    options = {"batch": 2, "held_out": SENTENCES[:2], "every": 1, "patience": 4, "rate": 0.3, "steps": 30}
    result = flat_options.train(make_net(), SENTENCES, checkpoints=tmp_path, **options)
    best, last = (training.load_checkpoint(make_net(), tmp_path, best=best) for best in (True, False))
    assert (best.steps, best.losses, best.held_out) == (result.steps, result.losses, result.held_out)
    assert all(torch.equal(value, result.net.parameters[name]) for name, value in best.net.parameters.items())
    assert (
        first_loss(last.net, SENTENCES[:2])
        == pytest.approx(result.held_out[-1][1], abs=1e-9)
        != min(result.held_out)[1]
    )
    with pytest.raises(bt.BNetError, match="checkpoint of this net"):
        training.load_checkpoint(make_net(bias=False), tmp_path)
    with pytest.raises(bt.FileError, match="no such file"):
        training.load_checkpoint(make_net(), tmp_path / "none")


def test_a_user_defined_loss_is_recognised(tmp_path):
    def make_loss(factor: float, form: str = ""):
        if form == "less":
            return lambda module, batch: factor - module(batch.x).square().mean()
        if form == "twice":
            return lambda module, batch: factor * 2 * module(batch.x).square().mean()
        if form == "sizes":
            return lambda module, batch: factor * module(batch.x).abs().mean()
        return lambda module, batch: factor * module(batch.x).square().mean()

    options = {"batch": 2, "folder": tmp_path, "resume": True}
    net, expected = make_net(), bt.train(make_net(), SENTENCES, steps=6, batch=2, loss=make_loss(1.0))
    flat_options.train(net, SENTENCES, steps=3, loss=make_loss(1.0), **options)
    assert flat_options.train(net, SENTENCES, steps=6, loss=make_loss(1.0), **options).losses == expected.losses
    for form in ("less", "twice", "sizes"):
        with pytest.raises(bt.BNetError, match="loss="):
            flat_options.train(net, SENTENCES, steps=8, loss=make_loss(1.0, form), **options)


def test_a_loss_may_ignore_parameters(tmp_path):
    def loss(module: torch.nn.Module, batch: Batch) -> torch.Tensor:
        return module.store["W_q_0/value"].square().mean()

    options = {"batch": 2, "loss": loss}
    flat_options.train(make_net(), SENTENCES, steps=2, checkpoints=tmp_path, **options)
    result = flat_options.train(
        make_net(), SENTENCES, steps=4, checkpoints=bt.Checkpoints(tmp_path, resume=True), **options
    )
    assert result.losses == flat_options.train(make_net(), SENTENCES, steps=4, **options).losses
    assert torch.equal(result.net.parameters["W_k_0.value"], make_net().parameters["W_k_0.value"])


def test_a_causal_table_trains_on_next_words():
    ids = torch.randint(0, 7, (4, 6))
    table = make_net(mask=np.tri(5, dtype=bool))
    assert first_loss(table, ids) == pytest.approx(first_loss(make_net(), ids), abs=1e-12)
    assert bt.train(table, ids.flatten()[:21], words=5, steps=2).steps == 2
    for data, words in ((ids[:, :5], None), (torch.randint(0, 7, (20,)), 5), (torch.randint(0, 7, (20,)), 4)):
        with pytest.raises(bt.BNetError, match="5 words, the size of the net's mask table"):
            bt.train(table, data, words=words, steps=1)


def test_an_interrupt_finishes_the_step_and_keeps_a_checkpoint(tmp_path):
    def data(step: int) -> list[str]:
        if step == 2:
            os.kill(os.getpid(), signal.SIGINT)
        return SENTENCES

    before = signal.getsignal(signal.SIGINT)
    with pytest.raises(KeyboardInterrupt):
        bt.train(make_net(), data, steps=9, checkpoints=tmp_path, every=100)
    assert signal.getsignal(signal.SIGINT) is before
    result = bt.train(make_net(), lambda step: SENTENCES, steps=9, checkpoints=bt.Checkpoints(tmp_path, resume=True))
    assert result.losses == bt.train(make_net(), lambda step: SENTENCES, steps=9).losses


# bad input


CLASSES = {"vocabulary": WORDS, "readout": Categorical(3), "pool": "mean"}
LABELS, NONE = bt.encoder(8, heads=2, slices=1, **CLASSES), bt.encoder(8, heads=2, slices=1, vocabulary=WORDS)
REAL = bt.encoder(4, heads=2, slices=1, readout=Normal(1.0))
STREAM, X = np.zeros(20, dtype=np.uint16), torch.randn(4, 3, 4)
WRONG = {
    "neither steps nor epochs": (make_net(), SENTENCES, {"steps": None}),
    "both": (make_net(), SENTENCES, {"epochs": 1}),
    "a schedule without warmup": (make_net(), SENTENCES, {"schedule": "noam"}),
    "another precision": (make_net(), SENTENCES, {"precision": "float32"}),
    "windows of sentences": (make_net(), SENTENCES, {"words": 4}),
    "patience without data": (make_net(), SENTENCES, {"patience": 2}),
    "an unknown start": (make_net(), SENTENCES, {"start": "h"}),
    "a constant loss": (make_net(), SENTENCES, {"loss": lambda module, batch: torch.tensor(1.0)}),
    "a start of real words": (REAL, (X, X), {"start": [9.0] * 4}),
    "a stop of classes": (LABELS, [("a b", 1)], {"stop": [9.0] * 4}),
    "a start of windows": (make_net(), STREAM, {"words": 4, "start": "a"}),
    "no readout": (NONE, SENTENCES, {}),
    "a shared selector": (
        bt.bayesuvius(4, heads=2, per="corpus", vocabulary=WORDS, observe=Categorical(7)), SENTENCES, {}
    ),
    "one word": (make_net(), ["a b", "c"], {}),
    "no pair": (make_s2s(), SENTENCES, {}),
    "a target for each word": (LABELS, [("a b", [0, 1])], {}),
    "past learned positions": (make_net(positions="learned", words=3), ["a b c d e"], {}),
    "nothing observed": (
        bt.encoder(8, heads=2, slices=1, vocabulary=WORDS, readout="word"), [("a b", [None, None])], {}
    ),
    "a NaN": (REAL, [(torch.full((2, 4), math.nan), torch.ones(2, 4))], {}),
    "an infinite value": (REAL, [(torch.ones(2, 4), torch.full((2, 4), math.inf))], {}),
    "a stream without windows": (make_net(), STREAM, {}),
    "a series": (bt.recurrent(4, features=3), torch.zeros(20, 30, 3), {}),
}  # fmt: skip


def test_bad_input_is_refused():
    for name, (net, data, options) in WRONG.items():
        with pytest.raises(bt.BNetError):
            flat_options.train(net, data, **{"steps": 1, **options})
            pytest.fail(name)


def test_a_share_of_a_small_batch_is_never_empty():
    batch = Batch({"": torch.zeros(3, 2)}, None, {})
    assert [len(batch.shard(k, 4)) for k in range(4)] == [1, 1, 1, 1]
