"""The net as a Pyro model with plates and enumeration.

`model` has `PyroModel`; `checks` converts values and distributions to Pyro's shapes and classes, and refuses mistakes
that Pyro would ignore silently.
"""

from bnet_transformer.bridges.pyro.model import PyroModel

__all__ = ["PyroModel"]
