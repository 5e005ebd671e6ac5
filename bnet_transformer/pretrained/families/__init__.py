"""The model families: each file contains some as data, in its `FAMILIES`. To add a family, add a value or a file."""

import importlib
import pkgutil

from bnet_transformer.declare import Network
from bnet_transformer.errors import BNetError
from bnet_transformer.pretrained.family import ModelFamily

_modules = [importlib.import_module(f"{__name__}.{info.name}") for info in pkgutil.iter_modules(__path__)]
_families: list[ModelFamily] = [family for module in _modules for family in module.FAMILIES]

FAMILIES: dict[str, ModelFamily] = {family.name: family for family in sorted(_families, key=lambda f: f.name)}


def register_family(family: ModelFamily) -> ModelFamily:
    """Register a model family, so that `from_pretrained` reads models of its `model_type`.

    Registering an equal family again changes nothing.

    Args:
        family: The family; its name is the `model_type` of its configs.

    Returns:
        The family.

    Raises:
        BNetError: If another family has this name.
    """
    if not isinstance(family, ModelFamily):
        raise BNetError("family", expected="a ModelFamily", actual=family)
    if FAMILIES.get(family.name, family) != family:
        raise BNetError("family", expected="a name that no other family has", actual=family.name)
    return FAMILIES.setdefault(family.name, family)


def family_of(network: Network) -> ModelFamily:
    """Return the model family of a pretrained net; raise an error for any other net."""
    family = FAMILIES.get(network.declaration.name)
    if family is None:
        expected, allowed = "a pretrained net", ", ".join(FAMILIES)
        raise BNetError("net", expected=expected, actual=network.declaration.name, allowed=allowed)
    return family
