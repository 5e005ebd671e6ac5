"""Several processes have what one has: fits, what is asked of many sentences, and runs of which a rank was killed."""

import os
import socket
import subprocess
import sys
from pathlib import Path

import pytest
import torch

import bnet_transformer as bt
from bnet_transformer.training import parallel
from bnet_transformer.training.parallel import ALONE, Ranks, alone, digest_of
from tests import parallel_jobs as jobs

pytestmark = pytest.mark.skipif(
    not torch.distributed.is_available() or not torch.distributed.is_gloo_available(), reason="this torch has no gloo"
)
ROOT = Path(__file__).resolve().parent.parent
ENVIRONMENT = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}


def same(got, wanted, where=""):
    """Equal numbers, however deep they lie."""
    if isinstance(wanted, dict):
        assert got.keys() == wanted.keys(), where
        for name, each in wanted.items():
            same(got[name], each, f"{where} {name}")
    elif isinstance(wanted, list | tuple):
        assert len(got) == len(wanted), where
        for k, (a, b) in enumerate(zip(got, wanted, strict=True)):
            same(a, b, f"{where} [{k}]")
    else:
        a, b = (torch.as_tensor(each) for each in (got, wanted))
        torch.testing.assert_close(a, b, rtol=1e-6, atol=1e-6, equal_nan=True, msg=lambda told: f"{where}: {told}")


@pytest.mark.slow
def test_two_processes_of_which_one_is_killed_twice_have_what_one_has(tmp_path):
    """Training and a fit go on from their checkpoints; then all fits, and all that is asked of many sentences."""
    command = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", "--max-restarts", "2"]
    done = subprocess.run(
        [sys.executable, *command, str(ROOT / "tests/parallel_jobs.py"), "together", str(tmp_path)],
        env=ENVIRONMENT, capture_output=True, timeout=600,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr.decode()[-3000:]
    first, second = (torch.load(tmp_path / f"together{rank}") for rank in range(2))
    assert first.pop("restarts") == second.pop("restarts") == [2]
    same(second, first)
    train, found = jobs.trained(), jobs.fitted()
    same(first.pop("train"), [train.losses, dict(train.net.parameters)])
    same(first.pop("fit"), jobs.numbers(found))
    same(first, jobs.fits(7) | jobs.of_fits(7) | jobs.of_heads(7))
    # Chains kept by two processes go on in one, and are those that never stopped.
    more = jobs.chains(tmp_path / "chains", "changed", draws=2)
    same(jobs.numbers(more), jobs.numbers(jobs.chains(None, False, draws=2)))


@pytest.mark.slow
def test_three_processes_with_two_sentences_and_what_they_refuse(tmp_path):
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = str(free.getsockname()[1])
    told = {"WORLD_SIZE": "3", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
    command = [sys.executable, str(ROOT / "tests/parallel_jobs.py"), "apart", str(tmp_path)]
    options = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT}
    children = [
        subprocess.Popen(command, env={**ENVIRONMENT, **told, "RANK": str(rank), "LOCAL_RANK": str(rank)}, **options)
        for rank in range(3)
    ]
    try:
        said = [child.communicate(timeout=600)[0].decode() for child in children]
    finally:
        for child in children:
            child.kill()
    assert [child.returncode for child in children] == [0, 0, 1], "\n".join(said)
    assert "this rank fails" in said[2]
    one = jobs.fits(2) | jobs.of_fits(2) | jobs.of_heads(2)
    for rank in range(2):
        found = torch.load(tmp_path / f"apart{rank}")
        data, question, rate, selector, gone = found.pop("refused")
        assert "torchrun, fit" in data and "other data on rank 1" in data
        assert "torchrun, responsibilities" in question and "log_likelihood on rank 2" in question
        assert "torchrun, train" in rate and "other rate on rank 1" in rate
        assert "torchrun, responsibilities" in selector and "other selector on rank 1" in selector
        assert "every rank to come to the same point" in gone
        found.pop("by itself", None)
        same(found, one)


def test_shares_are_put_together_in_the_order_of_one_process():
    sentences = torch.arange(7)
    shares = [Ranks(rank, 3, torch.device("cpu")).mine(sentences) for rank in range(3)]
    assert [share.tolist() for share in shares] == [[0, 3, 6], [1, 4], [2, 5]]
    for rank, share in enumerate(shares):
        here = Ranks(rank, 3, torch.device("cpu"))
        assert here.places(torch.arange(len(share))).tolist() == share.tolist()
        assert here.mine([*range(7)]) == share.tolist()
    assert ALONE.mine(sentences) is sentences and ALONE.gathered(sentences) is sentences


def test_a_digest_tells_every_number_and_every_name():
    told = {"a": torch.arange(4.0), "b": [1, "x", None]}
    others = (
        {"a": torch.arange(4.0) + 1e-6, "b": [1, "x", None]},
        {"a": torch.arange(4), "b": [1, "x", None]},
        {"a": torch.arange(4.0).reshape(2, 2), "b": [1, "x", None]},
        {"c": torch.arange(4.0), "b": [1, "x", None]},
        {"a": torch.arange(4.0), "b": [1, "y", None]},
    )
    assert digest_of(told) == digest_of({name: told[name] for name in ("b", "a")})
    assert len({digest_of(each) for each in (told, *others)}) == 6


def test_by_itself_a_process_waits_for_nobody(monkeypatch):
    monkeypatch.setenv("WORLD_SIZE", "2")
    monkeypatch.setenv("RANK", "0")
    with alone(), parallel.ranks(torch.device("cpu")) as here:
        assert here.world == 1
    with alone():
        assert bt.train(bt.decoder(8, heads=2, slices=1, vocabulary=["a", "b"]), ["a b"], steps=1).steps == 1
