"""Under pytest the inner rooms check their own annotations; every test starts from one seed."""

import gc
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager

import pytest
import torch
from beartype.claw import beartype_package
from hypothesis import settings

INNER = [
    "graph.ground_graph",
    "graph.traversal",
    "reference.ground_model",
    "reference.run",
    "reference.enumeration",
]  # beartype draws from random: not what a fit calls

for room in INNER:
    beartype_package(f"bnet_transformer.{room}")

torch.set_num_threads(1)
gc.disable()  # nothing of what is imported and collected is garbage: to look at it again and again takes seconds
settings.register_profile("quiet", deadline=None)
settings.load_profile("quiet")


def pytest_collection_finish() -> None:
    """What was imported stays, so that later collections of garbage, which are rare, do not look at it."""
    gc.freeze()
    gc.set_threshold(50_000, 20, 20)
    gc.enable()


@pytest.fixture(autouse=True)
def _one_seed() -> None:
    torch.manual_seed(0)


@pytest.fixture
def each_run_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """The reference makes the run of each joint state once: asked of another node, it goes on with what it knows.

    Values, distributions and readings of many nodes are then those of the same runs, at a fraction of the time.
    """
    from bnet_transformer import reference
    from bnet_transformer.reference import enumeration, node_tables

    plain, created = reference.enumerate_runs, {}

    def runs(world, free, known, budget=reference.BUDGET):
        key = (id(world), tuple(free), tuple((node, id(value)) for node, value in known.items()), budget)
        if key not in created:
            created[key] = (world, known, list(plain(world, free, known, budget)))  # what has a key stays alive
        return iter(created[key][-1])

    for module in (node_tables, enumeration, reference):
        monkeypatch.setattr(module, "enumerate_runs", runs)


@pytest.fixture
def without_the_reference(monkeypatch: pytest.MonkeyPatch) -> Callable[[], AbstractContextManager[None]]:
    """A context in which the reference cannot be used: all that is answered in it is computed in batches."""

    from bnet_transformer import reference

    def refuse(*_: object) -> None:
        raise AssertionError("the reference was used")

    @contextmanager
    def context() -> Iterator[None]:
        with monkeypatch.context() as patch:
            patch.setattr(reference.ReferenceRun, "__init__", refuse)
            yield

    return context
