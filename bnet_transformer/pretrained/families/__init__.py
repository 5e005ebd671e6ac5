"""The families, one file each: `FAMILY` says what sets it apart. To add one, add a file."""

import importlib
import pkgutil

from bnet_transformer.pretrained.family import Family

FAMILIES: dict[str, Family] = {}

for _found in pkgutil.iter_modules(__path__):
    _family: Family = importlib.import_module(f"{__name__}.{_found.name}").FAMILY
    FAMILIES[_family.name] = _family
