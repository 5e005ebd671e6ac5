"""The families: `FAMILIES` of each file are values that say what sets them apart. To add one, add a value or a file."""

import importlib
import pkgutil

from bnet_transformer.declare import Network
from bnet_transformer.errors import BNetError
from bnet_transformer.pretrained.family import ModelFamily

_modules = [importlib.import_module(f"{__name__}.{found.name}") for found in pkgutil.iter_modules(__path__)]
_families: list[ModelFamily] = sorted((each for file in _modules for each in file.FAMILIES), key=lambda each: each.name)

FAMILIES: dict[str, ModelFamily] = {family.name: family for family in _families}


def register_family(family: ModelFamily) -> ModelFamily:
    """Make a family of yours known by its name, which is the `model_type` of its configs; it is returned.

    To register the same family again changes nothing; another under a name that is taken is refused.
    """
    if not isinstance(family, ModelFamily):
        raise BNetError("register", expected="a Family", actual=family)
    if FAMILIES.get(family.name, family) != family:
        raise BNetError("register", expected="a name that no other family has", actual=family.name)
    return FAMILIES.setdefault(family.name, family)


def family_of(network: Network) -> ModelFamily:
    """The family of a pretrained net."""
    found = FAMILIES.get(network.declaration.name)
    if found is None:
        raise BNetError("net", expected="a pretrained net of " + ", ".join(FAMILIES), actual=network.declaration.name)
    return found
