"""A step reads nothing off the device and compiles to one graph: by training and by fits."""

import math
from functools import partial

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

import bnet_transformer as bt
from bnet_transformer._core import torch_context as late
from bnet_transformer._core.distributed import DistributedContext
from bnet_transformer.data import Batch, Evidence
from bnet_transformer.data.task import infer_task, infer_trainable_task
from bnet_transformer.learning.training import load_checkpoint
from bnet_transformer.learning.training.configs import TrainConfig
from bnet_transformer.learning.training.trainer import Trainer, TrainingLoss
from bnet_transformer.tpm import Normal
from tests import flat_options
from tests.cases import CASES, vanilla

D, CPU = torch.float64, torch.device("cpu")
WORDS = list("abcdefg")
TEXT = ["a b c d", "b c", "g f e d c b a", "a a b", "d e f"]
train = partial(flat_options.train, progress=False)

# what makes the host wait for a GPU: a number read, a shape that hangs on numbers, a tensor made of numbers of the host
WAITS = {
    "_local_scalar_dense", "item", "is_nonzero", "nonzero", "masked_select", "_unique2", "unique_dim", "equal",
    "repeat_interleave", "_linalg_check_errors", "lift_fresh", "lift",
}  # fmt: skip


class NoWait(TorchDispatchMode):
    """Refuses every operation that a GPU would have to be waited for."""

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        name = func._schema.name.removeprefix("aten::")
        by_mask = name in ("index", "index_put", "index_put_") and any(
            isinstance(item, torch.Tensor) and item.dtype == torch.bool for item in args[1]
        )
        assert name not in WAITS and not by_mask, f"a step that waits: {func}"
        return func(*args, **(kwargs or {}))


def test_what_waits_is_noticed():
    for wait in (float, bool, torch.nonzero, lambda x: x[x > 0], lambda x: torch.tensor([2.0])):
        with pytest.raises(AssertionError, match="waits"), NoWait():
            wait(torch.ones(1))


def batch_of(net: bt.BNet) -> Batch:
    """Three sentences of four words, or as many as the net must have; one shorter where its mask allows."""
    task, seed = infer_task(net.network), torch.Generator().manual_seed(0)
    x, observed = {}, {}
    for stack, of in task.encoders.items():
        count = of.exact_length or min(4, of.max_length or 4)
        real = torch.randn(3, count, *of.spec.shape, generator=seed, dtype=net.network.dtype)
        x[stack] = real if of.states is None else torch.randint(of.states, (3, count), generator=seed)
    for readout in task.readouts:
        family = readout.group
        shape = [3, *(net.network.graph.plate_sizes[plate] for plate in family.plates)]
        shape += [x[family.word_stack].shape[1]] if family.word_stack is not None else []
        real = torch.randn(*shape, *readout.shape, generator=seed, dtype=net.network.dtype)
        states = readout.tpm.states or 2
        observed[family.name] = real if readout.tpm.kind == "continuous" else torch.randint(states, shape)
    ragged = {s: v for s, v in x.items() if task.needs_mask(s) and task.encoders[s].exact_length is None}
    mask = {
        s: torch.arange(v.shape[1]) < torch.tensor([[v.shape[1]], [v.shape[1] - 1], [1]]) for s, v in ragged.items()
    }
    return Batch(x, mask or None, {name: Evidence(value) for name, value in observed.items()})


def run_of(net: bt.BNet) -> Trainer:
    return Trainer(
        infer_trainable_task(net.network),
        TrainConfig(optimizer=bt.AdamW(clip=1.0)),
        10,
        DistributedContext(0, 1, CPU),
        None,
        {},
    )


def can_train(case) -> bool:
    try:
        return bool(infer_trainable_task(case.net.network))
    except bt.BNetError:
        return False


@pytest.mark.parametrize("case", [case for case in CASES if can_train(case)], ids=lambda case: case.name)
def test_a_step_of_training_reads_nothing(case):
    run, fed = run_of(case.net), None
    for _ in range(2):
        fed = run.prepare_batch(batch_of(case.net))
        with NoWait():
            run.compute_gradients(fed)
            run.update_parameters()
    ((loss, length, _), *more) = run.drain_losses(all=True)
    assert len(more) == 1 and math.isfinite(loss + length) and run.losses[0] != run.losses[1]


# what is heard some steps later


@pytest.mark.parametrize("lag", [3, 50])
def test_losses_that_come_late_are_the_same(lag, tmp_path, monkeypatch):
    net = bt.decoder(8, heads=2, slices=1, vocabulary=WORDS)
    options = {"steps": 12, "batch": 2, "rate": 0.01, "held_out": TEXT, "every": 4}
    at_once = train(net, TEXT, **options)
    monkeypatch.setattr(late.DeferredScalars, "for_device", classmethod(lambda cls, device: cls(lag)))
    later = train(net, TEXT, checkpoints=tmp_path, **{**options, "steps": 8})
    later = train(net, TEXT, checkpoints=bt.Checkpoints(tmp_path, resume=True), **options)
    assert later.losses == at_once.losses and later.held_out == at_once.held_out
    assert all(torch.equal(value, later.net.parameters[name]) for name, value in at_once.net.parameters.items())


@pytest.mark.parametrize("lag", [0, 3, 50])
def test_a_run_that_diverges_writes_nothing_of_it(lag, tmp_path, monkeypatch):
    """A loss that is no number from step 8 on: the step is told, and the checkpoint is of before it."""
    net, query = bt.decoder(4, heads=2, slices=1, readout=None, dropout=0.0), []

    def data(step):
        query.append(step)
        return [(torch.ones(3, 4), torch.full((1,), math.nan if step >= 7 else 1.0))]

    def loss(module, batch):
        return module(batch.x).square().mean() * batch.observed["observed"].mean()

    monkeypatch.setattr(late.DeferredScalars, "for_device", classmethod(lambda cls, device: cls(lag)))
    with pytest.raises(bt.BNetError, match=r"step 8: .*got loss nan.*keeps the last good checkpoint, of step 6"):
        train(net, data, steps=100, loss=loss, checkpoints=tmp_path, every=3)
    assert max(query) == 7 + min(lag, 2)  # a checkpoint that is due after step 9 hears of all
    result = load_checkpoint(net, tmp_path)
    assert (
        result.steps == 6
        and len(result.losses) == 6
        and all(v.isfinite().all() for v in result.net.parameters.values())
    )


def test_parameters_that_lie_otherwise_are_stepped_and_resumed_alike(tmp_path):
    """A step takes parameters, gradients and their means as they lie: transposed parameters are no others."""
    net = bt.decoder(8, heads=2, slices=1, vocabulary=WORDS, dropout=0.0)
    turned = net.replace({k: v.mT.contiguous().mT if v.dim() > 1 else v for k, v in net.parameters.items()})
    assert not all(value.is_contiguous() for value in turned.parameters.values())
    options = {"batch": 2, "rate": 0.01, "steps": 8}
    plain = train(net, TEXT, **options)
    train(turned, TEXT, checkpoints=tmp_path, **{**options, "steps": 4})
    resumed = train(turned, TEXT, checkpoints=bt.Checkpoints(tmp_path, resume=True), **options)
    assert resumed.losses == pytest.approx(plain.losses, abs=1e-5)


# one graph

NETS = {
    "vanilla": vanilla("decoder", slices=1, vocabulary=WORDS),
    "geometric": lambda: bt.geometric(4, heads=2, slices=1, add=True, observe=Normal(0.5)),
    "chapter": lambda: bt.bayesuvius(4, heads=2, combine="concat", observe=Normal(0.5)),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", ["chapter", "vanilla"])
def test_a_step_is_one_graph(name):
    net = NETS[name]()
    batch, task = batch_of(net), infer_trainable_task(net.network)
    losses, slopes = [], []
    torch._dynamo.reset()  # nothing of the nets that other tests compiled
    for compiled in (False, True):
        objective = TrainingLoss(net.module(), task, 0.0).eval()  # dropout would be drawn otherwise
        full = torch.compile(objective, fullgraph=True, backend="eager") if compiled else objective
        loss = full(batch)
        loss.backward()
        losses.append(loss)
        slopes.append([value.grad for value in objective.parameters() if value.grad is not None])
    torch.testing.assert_close(*losses, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(*slopes, rtol=1e-4, atol=1e-5)


@pytest.mark.slow
def test_training_compiled_is_training(monkeypatch):
    """Of the geometric net, as one graph."""
    net, local, graphs = NETS["geometric"](), torch.compile, []
    x, y = (torch.randn(12, 3, 4, generator=torch.Generator().manual_seed(s)) for s in (0, 1))

    def counted(graph, inputs):
        graphs.append(graph)
        return graph.forward

    monkeypatch.setattr(torch, "compile", lambda function, **options: local(function, backend=counted, **options))
    plain = train(net, (x, y), steps=4, batch=4)
    torch._dynamo.reset()
    result = train(net, (x, y), steps=4, batch=4, execution=bt.Execution(compile=True))
    assert result.losses == pytest.approx(plain.losses, abs=1e-5)
    assert 1 <= len(graphs) <= 2  # one for steps, one for the last loss


@pytest.mark.slow
def test_sentences_of_more_lengths_than_are_compiled_train_on(monkeypatch):
    net, local = bt.decoder(4, heads=1, slices=1, vocabulary=5), torch.compile
    monkeypatch.setattr(torch, "compile", lambda function, **options: local(function, backend="eager", **options))
    plain = train(net, [[0, 1, 2], [1, 2, 3, 4]], steps=2, batch=1)
    torch._dynamo.reset()
    with torch._dynamo.config.patch(recompile_limit=1):
        result = train(net, [[0, 1, 2], [1, 2, 3, 4]], steps=2, batch=1, execution=bt.Execution(compile=True))
    assert result.losses == pytest.approx(plain.losses, abs=1e-5)


# on a GPU

gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")


@gpu
@pytest.mark.parametrize("name", NETS)
def test_a_step_on_a_gpu_waits_for_nothing(name):
    from torch.profiler import ProfilerActivity, profile

    net = NETS[name]().to("cuda")
    run = Trainer(
        infer_trainable_task(net.network),
        TrainConfig(),
        20,
        DistributedContext(0, 1, torch.device("cuda", 0)),
        None,
        {},
    )

    def step():
        run.compute_gradients(run.prepare_batch(batch_of(net.to("cpu"))))
        run.update_parameters()

    for _ in range(3):
        step()
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        with profile(activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA]) as observed:
            for _ in range(4):
                step()
    finally:
        torch.cuda.set_sync_debug_mode("default")
    names = [event.key for event in observed.key_averages()]
    assert not [name for name in names if "StreamSynchronize" in name or "Pageable" in name]


# a readout whose spread is learned


@pytest.mark.parametrize("method", ["map", "em"])
def test_the_spread_of_a_readout_is_learned(method):
    """With everything else still, the likeliest sigma is the root of the mean square of what is left over."""
    net = bt.bayesuvius(3, heads=2, observe=Normal(1.0, learnable=True)).to(D)
    x, noise = (torch.randn(40, 3, 3, generator=torch.Generator().manual_seed(s), dtype=D) for s in (0, 1))
    still = {name: torch.zeros_like(v) for name, v in net.parameters.items() if name[0] not in "cy"}
    net = net.replace({**net.parameters, **still})  # all values are zero, whatever the head
    learn = ["y.log_sigma", "c.logits"] if method == "em" else ["y.log_sigma"]
    result = flat_options.fit(net, (x, 0.3 * noise), method=method, steps=150, rate=0.1, learn=learn, progress=False)
    sigma = float(result.net.parameters["y.log_sigma"].exp())
    assert sigma == pytest.approx(float((0.3 * noise).square().mean().sqrt()), rel=2e-3)
