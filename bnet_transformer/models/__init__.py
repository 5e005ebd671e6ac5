"""The architectures, one file each: a function of the file's name that returns a `BNet` of its declaration.

To add one, add a file; `bt.models.name` is there.
"""

import importlib
import pkgutil

__all__ = [found.name for found in pkgutil.iter_modules(__path__)]

for _name in __all__:
    globals()[_name] = getattr(importlib.import_module(f"{__name__}.{_name}"), _name)
