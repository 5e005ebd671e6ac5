"""The Pyro reading: a declaration as a Pyro model with plates and enumeration.

`PyroModel` is it; `checks` turns values and distributions into Pyro's form, and refuses what Pyro would pass over in
silence.
"""

from bnet_transformer.bridges.pyro.model import PyroModel

__all__ = ["PyroModel"]
