"""Checks of annotations in the graph and the reference, one seed for every test, and shared fixtures."""

import gc
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager

import pytest
import torch
from beartype.claw import beartype_package
from hypothesis import settings

CHECKED_MODULES = [
    "graph.ground_graph",
    "graph.traversal",
    "reference.ground_model",
    "reference.run",
    "reference.enumeration",
]  # beartype uses the global random state, so it excludes modules that a fit calls

for module_name in CHECKED_MODULES:
    beartype_package(f"bnet_transformer.{module_name}")

torch.set_num_threads(1)
gc.disable()  # imports and collection create no garbage, and scanning them takes seconds
settings.register_profile("quiet", deadline=None)
settings.load_profile("quiet")


def pytest_collection_finish() -> None:
    """Freeze what was imported, so that later garbage collections skip it."""
    gc.freeze()
    gc.set_threshold(50_000, 20, 20)
    gc.enable()


@pytest.fixture(autouse=True)
def _one_seed() -> None:
    torch.manual_seed(0)


@pytest.fixture
def cached_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    """The reference creates the run of each joint state once, and later queries reuse what it has computed."""
    from bnet_transformer import reference
    from bnet_transformer.reference import enumeration, node_tables

    enumerate_runs, cache = reference.enumerate_runs, {}

    def cached_enumerate_runs(model, choices, fixed, budget=reference.BUDGET):
        key = (id(model), tuple(choices), tuple((node, id(value)) for node, value in fixed.items()), budget)
        if key not in cache:
            cache[key] = (model, fixed, list(enumerate_runs(model, choices, fixed, budget)))  # keeps keys alive
        return iter(cache[key][-1])

    for module in (node_tables, enumeration, reference):
        monkeypatch.setattr(module, "enumerate_runs", cached_enumerate_runs)


@pytest.fixture
def forbid_reference(monkeypatch: pytest.MonkeyPatch) -> Callable[[], AbstractContextManager[None]]:
    """A context in which every use of the reference fails, so that answers must be computed in batches."""

    from bnet_transformer import reference

    def refuse(*_: object) -> None:
        raise AssertionError("the reference was used")

    @contextmanager
    def context() -> Iterator[None]:
        with monkeypatch.context() as patch:
            patch.setattr(reference.ReferenceRun, "__init__", refuse)
            yield

    return context
