"""The architectures: each file has a function with the name of the file, which returns a `BNet`.

To add an architecture, add a file; its function becomes `bt.models.<name>`. Files with names that begin with `_` are
shared code. `weights_of` converts the weights of torch's modules, and `shift_right` computes a decoder's inputs from
its outputs.
"""

import importlib
import pkgutil

from bnet_transformer.models._builders import shift_right
from bnet_transformer.models._from_torch import weights_of

ARCHITECTURES = [module.name for module in pkgutil.iter_modules(__path__) if not module.name.startswith("_")]

for _name in ARCHITECTURES:
    globals()[_name] = getattr(importlib.import_module(f"{__name__}.{_name}"), _name)

__all__ = [*ARCHITECTURES, "shift_right", "weights_of"]
