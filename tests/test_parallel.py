"""Several processes give the results of one: training, fits, roles of heads, runs in which a rank was killed."""

import os
import socket
import subprocess
import sys
import threading
from pathlib import Path

import numpy as np
import pytest
import torch

import bnet_transformer as bt
from bnet_transformer._core import distributed as parallel
from bnet_transformer._core.distributed import SINGLE_PROCESS, DistributedContext, single_process
from bnet_transformer._core.files import compute_digest
from bnet_transformer.tpm import Categorical
from tests import parallel_jobs as jobs

pytestmark = pytest.mark.skipif(
    not torch.distributed.is_available() or not torch.distributed.is_gloo_available(), reason="this torch has no gloo"
)
ROOT = Path(__file__).resolve().parent.parent
ENVIRONMENT = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}


def check_equal(actual, expected, path=""):
    """Check that nested containers hold equal numbers."""
    if isinstance(expected, dict):
        assert actual.keys() == expected.keys(), path
        for name, value in expected.items():
            check_equal(actual[name], value, f"{path} {name}")
    elif isinstance(expected, list | tuple):
        assert len(actual) == len(expected), path
        for k, (a, b) in enumerate(zip(actual, expected, strict=True)):
            check_equal(a, b, f"{path} [{k}]")
    else:
        a, b = (torch.as_tensor(value) for value in (actual, expected))
        torch.testing.assert_close(a, b, rtol=1e-6, atol=1e-6, equal_nan=True, msg=lambda message: f"{path}: {message}")


@pytest.mark.slow
def test_two_processes_with_a_rank_killed_twice_equal_one_process(tmp_path):
    """Training and a fit resume from their checkpoints; then all fits, and the analyses that ranks share."""
    command = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", "--max-restarts", "2"]
    process = subprocess.run(
        [sys.executable, *command, str(ROOT / "tests/parallel_jobs.py"), "run_all", str(tmp_path)],
        env=ENVIRONMENT, capture_output=True, timeout=600,
    )  # fmt: skip
    assert process.returncode == 0, process.stderr.decode()[-3000:]
    first, second = (torch.load(tmp_path / f"run_all{rank}") for rank in range(2))
    assert first.pop("restarts") == second.pop("restarts") == [2]
    check_equal(second, first)
    train, result = jobs.run_training(), jobs.run_fit()
    check_equal(first.pop("train"), [train.losses, train.held_out, dict(train.net.parameters)])
    check_equal(first.pop("fit"), jobs.numbers(result))
    check_equal(first, jobs.run_fits(7) | jobs.analyze_attention(7))


def run_three_ranks(job, folder):
    """Return the outputs and exit statuses of three processes, without torchrun."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = str(probe.getsockname()[1])
    env = {"WORLD_SIZE": "3", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
    command = [sys.executable, str(ROOT / "tests/parallel_jobs.py"), job, str(folder)]
    options = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT}
    children = [
        subprocess.Popen(command, env={**ENVIRONMENT, **env, "RANK": str(rank), "LOCAL_RANK": str(rank)}, **options)
        for rank in range(3)
    ]
    try:
        outputs = [child.communicate(timeout=600)[0].decode() for child in children]
    finally:
        for child in children:
            child.kill()
    return outputs, [child.returncode for child in children]


@pytest.mark.slow
def test_three_processes_with_two_sentences_and_what_they_refuse(tmp_path):
    outputs, statuses = run_three_ranks("run_unequal", tmp_path)
    assert statuses == [0, 0, 1], "\n".join(outputs)
    assert "this rank fails" in outputs[2]
    expected = jobs.run_fits(2) | jobs.analyze_attention(2)
    for rank in range(2):
        result = torch.load(tmp_path / f"run_unequal{rank}")
        data, call, rate, removed, closed = result.pop("refused")
        assert "torchrun, fit" in data and "other data on rank 1" in data
        assert "torchrun, roles" in call and "train on rank 2" in call
        assert "torchrun, train" in rate and "other rate on rank 1" in rate
        assert all("another rank failed or stopped" in message for message in (removed, closed))
        result.pop("by itself", None), result.pop("queries")
        check_equal(result, expected)


def test_shares_are_put_together_in_the_order_of_one_process():
    sentences = torch.arange(7)
    shards = [DistributedContext(rank, 3, torch.device("cpu")).shard(sentences) for rank in range(3)]
    assert [shard.tolist() for shard in shards] == [[0, 3, 6], [1, 4], [2, 5]]
    for rank, shard in enumerate(shards):
        context = DistributedContext(rank, 3, torch.device("cpu"))
        assert context.global_indices(torch.arange(len(shard))).tolist() == shard.tolist()
        assert context.shard([*range(7)]) == shard.tolist()
    assert SINGLE_PROCESS.shard(sentences) is sentences and SINGLE_PROCESS.all_gather(sentences) is sentences


def test_a_digest_depends_on_every_number_and_every_name():
    value = {"a": torch.arange(4.0), "b": [1, "x", None]}
    variants = (
        {"a": torch.arange(4.0) + 1e-6, "b": [1, "x", None]},
        {"a": torch.arange(4), "b": [1, "x", None]},
        {"a": torch.arange(4.0).reshape(2, 2), "b": [1, "x", None]},
        {"c": torch.arange(4.0), "b": [1, "x", None]},
        {"a": torch.arange(4.0), "b": [1, "y", None]},
    )
    assert compute_digest(value) == compute_digest({name: value[name] for name in ("b", "a")})
    assert len({compute_digest(variant) for variant in (value, *variants)}) == 6


class Label:
    """A plain object: its repr has its address."""

    def __init__(self, name):
        self.name = name


def test_a_digest_looks_into_arrays_objects_and_sets():
    array, words = np.arange(9999.0), {f"word {k}" for k in range(50)}
    other = array.copy()
    other[5000] += 1
    assert "..." in repr(array) and compute_digest(array) == compute_digest(array.copy()) != compute_digest(other)
    assert compute_digest(words) == compute_digest({*[*words][::-1]}) != compute_digest(words | {"more"})
    triples = (
        (Label("a"), Label("a"), Label("b")),
        (np.array([Label("a"), {1}], object), np.array([Label("a"), {1}], object), np.array([Label("a"), {2}], object)),
        (bt.tpm.Normal(0.5), bt.tpm.Normal(0.5), bt.tpm.Normal(1.0)),
        (lambda x: x, lambda x: x, lambda x: x + 1),
        (array[:0], array[:0], other[:0].astype(int)),
    )
    for value, equal, different in triples:
        assert compute_digest(value) == compute_digest(equal) != compute_digest(different), value
    nets = [bt.decoder(8, heads=2, slices=1, vocabulary=["a"], dropout=p).network for p in (0.1, 0.2)]
    assert compute_digest(nets[0].parameters) == compute_digest(nets[1].parameters) and compute_digest(
        nets[0]
    ) != compute_digest(nets[1])
    cycle = []
    cycle.append(cycle)
    for unsupported in (threading.Lock(), (k for k in ()), cycle):
        with pytest.raises(bt.BNetError, match="objects that ranks can compare"):
            compute_digest(unsupported)


def test_a_digest_stays_when_a_class_of_the_package_moves(monkeypatch):
    net = bt.decoder(8, heads=2, slices=1, vocabulary=["a"]).network
    before = compute_digest([net.declaration, bt.tpm.Linear]), compute_digest(Label("a"))
    for kind in (bt.tpm.Linear, type(net.declaration)):
        monkeypatch.setattr(kind, "__module__", "bnet_transformer.elsewhere")
    monkeypatch.setattr(Label, "__module__", "elsewhere")
    assert before[0] == compute_digest([net.declaration, bt.tpm.Linear]) and before[1] != compute_digest(Label("a"))


def test_by_itself_a_process_waits_for_nobody(monkeypatch):
    monkeypatch.setenv("WORLD_SIZE", "2")
    monkeypatch.setenv("RANK", "0")
    with single_process(), parallel.distributed_context(torch.device("cpu")) as context:
        assert context.world_size == 1
    with single_process():
        assert bt.train(bt.decoder(8, heads=2, slices=1, vocabulary=["a", "b"]), ["a b"], steps=1).steps == 1


@pytest.mark.parametrize(
    "environment",
    [
        {"WORLD_SIZE": "two"},
        {"WORLD_SIZE": "2"},
        {"WORLD_SIZE": "2", "RANK": "one"},
        {"WORLD_SIZE": "2", "RANK": "2"},
        {"WORLD_SIZE": "2", "RANK": "0"},
        {"WORLD_SIZE": "2", "RANK": "0", "MASTER_PORT": "29500"},
        {"WORLD_SIZE": "2", "RANK": "0", "MASTER_ADDR": "localhost", "MASTER_PORT": "99999"},
    ],
)
def test_an_environment_that_is_not_torchruns(environment, monkeypatch):
    for name in ("WORLD_SIZE", "RANK", "MASTER_ADDR", "MASTER_PORT"):
        monkeypatch.delenv(name, raising=False)
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(bt.BNetError, match="torchrun: expected WORLD_SIZE, a smaller RANK, MASTER_ADDR and a free"):
        jobs.fit(jobs.mixture(), jobs.make_vectors(2), steps=1)


def test_a_port_that_is_taken(monkeypatch):
    with socket.socket() as taken:
        taken.bind(("", 0))
        taken.listen()
        port = str(taken.getsockname()[1])
        for name, value in {"WORLD_SIZE": "2", "RANK": "0", "MASTER_ADDR": "localhost", "MASTER_PORT": port}.items():
            monkeypatch.setenv(name, value)
        with pytest.raises(bt.BNetError, match=r"torchrun: expected .* a free MASTER_PORT"):
            jobs.fit(jobs.mixture(), jobs.make_vectors(2), steps=1)


def test_a_fit_seeds_no_generator_but_its_own(monkeypatch):
    def refuse_seed(seed):
        raise AssertionError("this seeds every device of the machine")

    monkeypatch.setattr(torch, "manual_seed", refuse_seed)
    before, data = torch.get_rng_state(), jobs.make_vectors(3)
    word = jobs.mixture("word", slices=2)
    jobs.fit(word, data, method="svi", steps=1, draws=2, spread=1.0, choices="sampled")
    jobs.fit(jobs.mixture(), data, method="nuts", chains=1, draws=1, warmup=1, learn=["c.logits"]).check(data, draws=2)
    assert torch.equal(torch.get_rng_state(), before)


def test_choices_of_words_are_drawn_in_sentences_of_different_lengths():
    net = jobs.mixture("word", slices=2, observe=Categorical(3), vocabulary=jobs.WORDS)
    pairs = [(text, [k % 3 for k in range(len(text.split()))]) for text in jobs.TEXTS]
    f = jobs.fit(net, pairs, method="svi", steps=2, draws=2, spread=1.0, choices="sampled")
    assert {name: tuple(value.shape) for name, value in f.choices.items()} == {"c_0": (7, 6, 2), "c_1": (7, 6, 2)}
    with pytest.raises(bt.UnsupportedError, match=r"choices='sampled'\)\.$"):  # and not what Pyro's trace adds
        jobs.fit(net, pairs, method="svi", steps=2, draws=2, spread=1.0)
