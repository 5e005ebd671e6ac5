"""`fit` and `train` with the options of their configs side by side, for tests that go over tables of options."""

from __future__ import annotations

from dataclasses import fields, replace

import bnet_transformer as bt
from bnet_transformer.learning.fit.methods import resolve_method


def configured(config, options):
    """A config with those of the options that are its own, which are taken out of them."""
    names = {field.name for field in fields(config)} & options.keys()
    return replace(config, **{name: options.pop(name) for name in names})


def checkpointed(options):
    """`folder` and `resume` as the config that they are of, which are taken out of the options."""
    if "folder" not in options:
        return {}
    folder, resume = options.pop("folder"), options.pop("resume", False)
    return {} if folder is None else {"checkpoints": bt.Checkpoints(folder, resume)}


def fit(net, data, *, method="map", **options):
    """`bt.fit` with the options of the method, and of checkpoints, beside its own."""
    return bt.fit(net, data, method=configured(resolve_method(method), options), **checkpointed(options), **options)


def train(net, data, **options):
    """`bt.train` with the options of its configs beside its own."""
    for name, kind in (("optimizer", bt.AdamW), ("early_stopping", bt.EarlyStopping), ("execution", bt.Execution)):
        options[name] = configured(options.get(name, kind()), options)
    return bt.train(net, data, **checkpointed(options), **options)
