"""Under pytest the inner rooms check their own annotations; every test starts from one seed."""

import pytest
import torch
from beartype.claw import beartype_package
from hypothesis import settings

INNER = ["graph.folded", "graph.ground", "graph.walk", "reference"]

for room in INNER:
    beartype_package(f"bnet_transformer.{room}")

torch.set_num_threads(1)
settings.register_profile("quiet", deadline=None)
settings.load_profile("quiet")


@pytest.fixture(autouse=True)
def _one_seed() -> None:
    torch.manual_seed(0)
