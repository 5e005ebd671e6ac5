"""A training step reads nothing from the device and compiles to one graph, in training and in fits."""

import math
from functools import partial

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

import bnet_transformer as bt
from bnet_transformer._core import tensors
from bnet_transformer._core.distributed import DistributedContext
from bnet_transformer.compiler import CompiledModule
from bnet_transformer.data import Batch, Evidence
from bnet_transformer.data.batch import infer_task, infer_trainable_task
from bnet_transformer.inference import contraction
from bnet_transformer.inference.factors import build_elimination_problem
from bnet_transformer.learning.training import TrainConfig, Trainer, TrainingLoss, load_checkpoint
from bnet_transformer.tpm import Normal
from tests import flat_options
from tests.cases import CASES, vanilla

D, CPU = torch.float64, torch.device("cpu")
WORDS = list("abcdefg")
TEXT = ["a b c d", "b c", "g f e d c b a", "a a b", "d e f"]
train = partial(flat_options.train, progress=False)

# operations that make the host wait for a GPU: numbers read, shapes that depend on values, tensors copied from the host
SYNCHRONISING = {
    "_local_scalar_dense", "item", "is_nonzero", "nonzero", "masked_select", "_unique2", "unique_dim", "equal",
    "repeat_interleave", "_linalg_check_errors", "lift_fresh", "lift",
}  # fmt: skip


class NoSynchronisation(TorchDispatchMode):
    """Raises an error for every operation that synchronises the host with a GPU."""

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        name = func._schema.name.removeprefix("aten::")
        by_mask = name in ("index", "index_put", "index_put_") and any(
            isinstance(index, torch.Tensor) and index.dtype == torch.bool for index in args[1]
        )
        assert name not in SYNCHRONISING and not by_mask, f"a step that waits: {func}"
        return func(*args, **(kwargs or {}))


def test_synchronising_operations_are_detected():
    for wait in (float, bool, torch.nonzero, lambda x: x[x > 0], lambda x: torch.tensor([2.0])):
        with pytest.raises(AssertionError, match="waits"), NoSynchronisation():
            wait(torch.ones(1))


def make_batch(net: bt.BNet) -> Batch:
    """Return three sentences of four words, or of the number that the net requires; one is shorter where its mask
    allows."""
    task, seed = infer_task(net.network), torch.Generator().manual_seed(0)
    x, observed = {}, {}
    for stack, encoder in task.encoders.items():
        num_words = encoder.exact_length or min(4, encoder.max_length or 4)
        values = torch.randn(3, num_words, *encoder.spec.shape, generator=seed, dtype=net.network.dtype)
        x[stack] = values if encoder.states is None else torch.randint(encoder.states, (3, num_words), generator=seed)
    for readout in task.readouts:
        group = readout.group
        shape = [3, *(net.network.graph.plate_sizes[plate] for plate in group.plates)]
        shape += [x[group.word_stack].shape[1]] if group.word_stack is not None else []
        values = torch.randn(*shape, *readout.shape, generator=seed, dtype=net.network.dtype)
        states = readout.tpm.states or 2
        observed[group.name] = values if readout.tpm.kind == "continuous" else torch.randint(states, shape)
    ragged = {s: v for s, v in x.items() if task.needs_mask(s) and task.encoders[s].exact_length is None}
    mask = {
        s: torch.arange(v.shape[1]) < torch.tensor([[v.shape[1]], [v.shape[1] - 1], [1]]) for s, v in ragged.items()
    }
    return Batch(x, mask or None, {name: Evidence(value) for name, value in observed.items()})


def make_trainer(net: bt.BNet) -> Trainer:
    return Trainer(
        infer_trainable_task(net.network),
        TrainConfig(optimizer=bt.AdamW(clip=1.0)),
        10,
        DistributedContext(0, 1, CPU),
        lambda step: make_batch(net),
    )


def can_train(case) -> bool:
    try:
        task = infer_trainable_task(case.net.network)
    except bt.BNetError:
        return False
    forms = {readout.group.index: (True, readout.tpm.kind == "continuous") for readout in task.readouts}
    return build_elimination_problem(case.net.module(), forms, None, (), ()).fault is None


@pytest.mark.parametrize("case", [case for case in CASES if can_train(case)], ids=lambda case: case.name)
def test_a_training_step_reads_nothing_from_the_device(case, monkeypatch):
    monkeypatch.setattr(contraction, "MAX_TREE_SIZE", 0)  # the tree reads its numbers, but only on a CPU
    monkeypatch.setattr(CompiledModule, "validates_requests", False)
    trainer, batch = make_trainer(case.net), None
    for _ in range(2):
        batch = trainer.prepare_batch(make_batch(case.net))
        with NoSynchronisation():
            trainer.compute_gradients(batch)
            trainer.update()
    trainer.drain_losses(all=True)
    assert len(trainer.losses) == 2 and trainer.losses[0] != trainer.losses[1]


# deferred scalars


@pytest.mark.parametrize("lag", [3, 50])
def test_deferred_losses_are_equal(lag, tmp_path, monkeypatch):
    net = bt.decoder(8, heads=2, slices=1, vocabulary=WORDS)
    options = {"steps": 12, "batch": 2, "rate": 0.01, "held_out": TEXT, "every": 4}
    immediate = train(net, TEXT, **options)
    monkeypatch.setattr(tensors.DeferredScalars, "for_device", classmethod(lambda cls, device: cls(lag)))
    deferred = train(net, TEXT, checkpoints=tmp_path, **{**options, "steps": 8})
    deferred = train(net, TEXT, checkpoints=bt.Checkpoints(tmp_path, resume=True), **options)
    assert deferred.losses == immediate.losses and deferred.held_out == immediate.held_out
    assert all(torch.equal(value, deferred.net.parameters[name]) for name, value in immediate.net.parameters.items())


@pytest.mark.parametrize("lag", [0, 3, 50])
def test_a_run_that_diverges_writes_nothing_of_it(lag, tmp_path, monkeypatch):
    """A loss that is NaN from step 8 on: the error names the step, and the checkpoint is from before it."""
    net, steps = bt.decoder(4, heads=2, slices=1, readout=None, dropout=0.0), []

    def data(step):
        steps.append(step)
        return [(torch.ones(3, 4), torch.full((1,), math.nan if step >= 7 else 1.0))]

    def loss(module, batch):
        return module(batch.x).square().mean() * batch.observed["observed"].mean()

    monkeypatch.setattr(tensors.DeferredScalars, "for_device", classmethod(lambda cls, device: cls(lag)))
    with pytest.raises(bt.BNetError, match=r"step 8: .*got loss nan.*Resume from step 6"):
        train(net, data, steps=100, loss=loss, checkpoints=tmp_path, every=3)
    assert max(steps) == 7 + min(lag, 2)  # a checkpoint after step 9 includes all of them
    result = load_checkpoint(net, tmp_path)
    assert (
        result.steps == 6
        and len(result.losses) == 6
        and all(v.isfinite().all() for v in result.net.parameters.values())
    )


def test_parameters_with_another_memory_layout_give_equal_steps(tmp_path):
    """A step uses parameters, gradients and means in their memory layout: transposed ones give the same result."""
    net = bt.decoder(8, heads=2, slices=1, vocabulary=WORDS, dropout=0.0)
    transposed = net.replace({k: v.mT.contiguous().mT if v.dim() > 1 else v for k, v in net.parameters.items()})
    assert not all(value.is_contiguous() for value in transposed.parameters.values())
    options = {"batch": 2, "rate": 0.01, "steps": 8}
    plain = train(net, TEXT, **options)
    train(transposed, TEXT, checkpoints=tmp_path, **{**options, "steps": 4})
    resumed = train(transposed, TEXT, checkpoints=bt.Checkpoints(tmp_path, resume=True), **options)
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
    batch, task = make_batch(net), infer_trainable_task(net.network)
    losses, gradients = [], []
    torch._dynamo.reset()  # clears the nets that other tests compiled
    for compiled in (False, True):
        objective = TrainingLoss(net.module(), task, 0.0).eval()  # dropout would differ
        step = torch.compile(objective, fullgraph=True, backend="eager") if compiled else objective
        loss = step(batch)
        loss.backward()
        losses.append(loss)
        gradients.append([value.grad for value in objective.parameters() if value.grad is not None])
    torch.testing.assert_close(*losses, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(*gradients, rtol=1e-4, atol=1e-5)


@pytest.mark.slow
def test_training_compiled_is_training(monkeypatch):
    """Of the geometric net, as one graph."""
    net, original, graphs = NETS["geometric"](), torch.compile, []
    x, y = (torch.randn(12, 3, 4, generator=torch.Generator().manual_seed(s)) for s in (0, 1))

    def record(graph, inputs):
        graphs.append(graph)
        return graph.forward

    monkeypatch.setattr(torch, "compile", lambda function, **options: original(function, backend=record, **options))
    plain = train(net, (x, y), steps=4, batch=4)
    torch._dynamo.reset()
    result = train(net, (x, y), steps=4, batch=4, execution=bt.Execution(compile=True))
    assert result.losses == pytest.approx(plain.losses, abs=1e-5)
    assert 1 <= len(graphs) <= 2  # one graph for steps, one for the last loss


@pytest.mark.slow
def test_sentences_of_more_lengths_than_are_compiled_train_on(monkeypatch):
    net, original = bt.decoder(4, heads=1, slices=1, vocabulary=5), torch.compile
    monkeypatch.setattr(torch, "compile", lambda function, **options: original(function, backend="eager", **options))
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
    trainer = Trainer(
        infer_trainable_task(net.network),
        TrainConfig(),
        20,
        DistributedContext(0, 1, torch.device("cuda", 0)),
        lambda step: make_batch(net),
    )

    def step():
        trainer.compute_gradients(trainer.prepare_batch(make_batch(net.to("cpu"))))
        trainer.update()

    for _ in range(3):
        step()
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        with profile(activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA]) as profiler:
            for _ in range(4):
                step()
    finally:
        torch.cuda.set_sync_debug_mode("default")
    names = [event.key for event in profiler.key_averages()]
    assert not [name for name in names if "StreamSynchronize" in name or "Pageable" in name]


# a readout with a learned standard deviation


@pytest.mark.parametrize("method", ["map", "em"])
def test_the_spread_of_a_readout_is_learned(method):
    """With everything else fixed, the maximum-likelihood sigma is the root mean square of the residuals."""
    net = bt.bayesuvius(3, heads=2, observe=Normal(1.0, learnable=True)).to(D)
    x, noise = (torch.randn(20, 3, 3, generator=torch.Generator().manual_seed(s), dtype=D) for s in (0, 1))
    zeros = {name: torch.zeros_like(v) for name, v in net.parameters.items() if name[0] not in "cy"}
    net = net.replace({**net.parameters, **zeros})  # all values are zero for any head
    learn = ["y.log_sigma", "c.logits"] if method == "em" else ["y.log_sigma"]
    result = flat_options.fit(net, (x, 0.3 * noise), method=method, steps=80, rate=0.1, learn=learn, progress=False)
    sigma = float(result.net.parameters["y.log_sigma"].exp())
    assert sigma == pytest.approx(float((0.3 * noise).square().mean().sqrt()), rel=5e-3)
