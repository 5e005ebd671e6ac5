"""The choice of the quick tests, one seed for every test, and shared fixtures."""

import gc
import itertools
import zlib
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager

import pytest
import torch
from hypothesis import settings

MAX_QUICK = 2  # parameter sets of a test that are all quick; of more sets, every third one is

torch.set_num_threads(1)
gc.disable()  # imports and collection create no garbage, and scanning them takes seconds
settings.register_profile("quiet", deadline=None)
settings.load_profile("quiet")


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Mark two of three sets of parameters of a long list as slow; the name of the test decides which ones.

    So each case is quick in about a third of the tests over all cases.
    """
    quick = [item for item in items if not item.get_closest_marker("slow")]
    for test, sets in itertools.groupby(quick, key=lambda item: item.nodeid.partition("[")[0]):
        group = list(sets)
        if len(group) > MAX_QUICK:
            quick_position = zlib.crc32(test.encode()) % 3
            for k, item in enumerate(group):
                if k % 3 != quick_position:
                    item.add_marker(pytest.mark.slow)


def pytest_collection_finish() -> None:
    """Freeze what was imported, so that later garbage collections skip it."""
    gc.freeze()
    gc.set_threshold(50_000, 20, 20)
    gc.enable()


@pytest.fixture(autouse=True)
def _one_seed() -> None:
    torch.manual_seed(0)


@pytest.fixture(scope="session", autouse=True)
def _validate_requests() -> None:
    """Check each request of a compiled net, also those that the library trusts because it has built them itself."""
    from bnet_transformer.compiler import CompiledModule

    CompiledModule.validates_requests = True


@pytest.fixture
def cached_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    """The reference creates the run of each joint state once, and later queries reuse what it has computed."""
    from bnet_transformer import reference

    enumerate_runs, cache = reference.enumerate_runs, {}

    def cached_enumerate_runs(model, choices, fixed, budget=reference.BUDGET):
        key = (id(model), tuple(choices), tuple((node, id(value)) for node, value in fixed.items()), budget)
        if key not in cache:
            cache[key] = (model, fixed, list(enumerate_runs(model, choices, fixed, budget)))  # keeps keys alive
        return iter(cache[key][-1])

    for module in (reference, reference, reference):
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
