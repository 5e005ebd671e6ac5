"""The Pyro reading: a declaration as a Pyro model with plates and enumeration.

`pyro_model` makes it; `checks` refuses what Pyro would pass over in silence, `shapes` turns values and distributions
into Pyro's form.
"""

from bnet_transformer.pyro_reading.model import PyroModel, pyro_model

__all__ = ["PyroModel", "pyro_model"]
