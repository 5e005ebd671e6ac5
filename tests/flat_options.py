"""`fit` and `train` with the fields of their configs as keyword arguments, for tests over tables of options."""

from __future__ import annotations

from dataclasses import fields, replace

import bnet_transformer as bt
from bnet_transformer.learning.fit.methods import resolve_method


def pop_config(config, options):
    """A config updated with the options that are fields of it; these are removed from `options`."""
    names = {field.name for field in fields(config)} & options.keys()
    return replace(config, **{name: options.pop(name) for name in names})


def pop_checkpoints(options):
    """`folder` and `resume`, removed from `options`, as the keyword argument `checkpoints`."""
    if "folder" not in options:
        return {}
    folder, resume = options.pop("folder"), options.pop("resume", False)
    return {} if folder is None else {"checkpoints": bt.Checkpoints(folder, resume)}


def fit(net, data, *, method="map", **options):
    """`bt.fit`, with the fields of the method and of `Checkpoints` as keyword arguments."""
    return bt.fit(net, data, method=pop_config(resolve_method(method), options), **pop_checkpoints(options), **options)


def train(net, data, **options):
    """`bt.train`, with the fields of its configs as keyword arguments."""
    for name, kind in (("optimizer", bt.AdamW), ("early_stopping", bt.EarlyStopping), ("execution", bt.Execution)):
        options[name] = pop_config(options.get(name, kind()), options)
    return bt.train(net, data, **pop_checkpoints(options), **options)
