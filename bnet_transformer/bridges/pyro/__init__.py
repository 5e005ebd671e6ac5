"""The net as a Pyro model with plates and enumeration.

`model` contains `PyroModel`. `checks` converts values and distributions to Pyro's shapes and classes, and raises errors
for mistakes that Pyro would ignore silently.
"""

from bnet_transformer.bridges.pyro.model import PyroModel

__all__ = ["PyroModel"]
