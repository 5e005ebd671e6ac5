"""The families, one file each: `FAMILY` says what sets it apart. To add one, add a file."""

import importlib
import pkgutil

from bnet_transformer.errors import BNetError
from bnet_transformer.network import Network
from bnet_transformer.pretrained.family import Family

FAMILIES: dict[str, Family] = {}

for _found in pkgutil.iter_modules(__path__):
    _family: Family = importlib.import_module(f"{__name__}.{_found.name}").FAMILY
    FAMILIES[_family.name] = _family


def register(family: Family) -> Family:
    """Make a family of yours known by its name, which is the `model_type` of its configs; it is returned.

    To register the same family again changes nothing; another under a name that is taken is refused.
    """
    if not isinstance(family, Family):
        raise BNetError("register", expected="a Family", got=family)
    if FAMILIES.get(family.name, family) != family:
        raise BNetError("register", expected="a name that no other family has", got=family.name)
    return FAMILIES.setdefault(family.name, family)


def family_of(network: Network) -> Family:
    """The family of a pretrained net."""
    found = FAMILIES.get(network.declaration.name)
    if found is None:
        raise BNetError("net", expected="a pretrained net of " + ", ".join(FAMILIES), got=network.declaration.name)
    return found
