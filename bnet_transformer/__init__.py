"""bnet_transformer: a transformer read as a dynamical Bayesian network.

    import bnet_transformer as bt

    net = bt.bayesuvius(dim=8, slices=2, heads=4)
    s = net.sentence("the cat sat on the mat")

Heavy parts are imported when they are first used; `import bnet_transformer` does not import torch.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from bnet_transformer import models as models
    from bnet_transformer import tpm as tpm
    from bnet_transformer.axes import Reach as Reach
    from bnet_transformer.bnet import BNet as BNet
    from bnet_transformer.bnet import load as load
    from bnet_transformer.errors import BNetError as BNetError
    from bnet_transformer.errors import BudgetError as BudgetError
    from bnet_transformer.errors import DeclarationError as DeclarationError
    from bnet_transformer.errors import EvidenceError as EvidenceError
    from bnet_transformer.errors import FileError as FileError
    from bnet_transformer.errors import ReadingError as ReadingError
    from bnet_transformer.errors import UnknownNameError as UnknownNameError
    from bnet_transformer.files.checkpoint import Checkpoints as Checkpoints
    from bnet_transformer.inference.circuits import circuit as circuit
    from bnet_transformer.inference.explain import explain as explain
    from bnet_transformer.inference.fit import EM as EM
    from bnet_transformer.inference.fit import MAP as MAP
    from bnet_transformer.inference.fit import NUTS as NUTS
    from bnet_transformer.inference.fit import SVI as SVI
    from bnet_transformer.inference.fit import Fit as Fit
    from bnet_transformer.inference.fit import fit as fit
    from bnet_transformer.inference.heads import inclusion as inclusion
    from bnet_transformer.inference.heads import roles as roles
    from bnet_transformer.inference.sweeps import mediation as mediation
    from bnet_transformer.inference.sweeps import sweep as sweep
    from bnet_transformer.models.bayesuvius import bayesuvius as bayesuvius
    from bnet_transformer.models.decoder import decoder as decoder
    from bnet_transformer.models.encoder import encoder as encoder
    from bnet_transformer.models.encoder_decoder import encoder_decoder as encoder_decoder
    from bnet_transformer.models.geometric import geometric as geometric
    from bnet_transformer.models.recurrent import recurrent as recurrent
    from bnet_transformer.models.volume_preserving import volume_preserving as volume_preserving
    from bnet_transformer.network import Arrow as Arrow
    from bnet_transformer.network import Declaration as Declaration
    from bnet_transformer.network import Node as Node
    from bnet_transformer.network import Plate as Plate
    from bnet_transformer.network import Stack as Stack
    from bnet_transformer.pretrained import from_pretrained as from_pretrained
    from bnet_transformer.pretrained.geometric_file import load_geometric as load_geometric
    from bnet_transformer.sentence import Sentence as Sentence
    from bnet_transformer.training import AdamW as AdamW
    from bnet_transformer.training import EarlyStopping as EarlyStopping
    from bnet_transformer.training import Execution as Execution
    from bnet_transformer.training import train as train
    from bnet_transformer.viz.plots.kinds import plot as plot

__version__ = "0.1.0"

_NAMES = {  # of each module
    "": "models tpm",
    "axes": "Reach",
    "bnet": "BNet load",
    "errors": "BNetError BudgetError DeclarationError EvidenceError FileError ReadingError UnknownNameError",
    "files.checkpoint": "Checkpoints",
    "inference.circuits": "circuit",
    "inference.explain": "explain",
    "inference.fit": "EM Fit MAP NUTS SVI fit",
    "inference.heads": "inclusion roles",
    "inference.sweeps": "mediation sweep",
    "models": "bayesuvius decoder encoder encoder_decoder geometric recurrent volume_preserving",
    "network": "Arrow Declaration Node Plate Stack",
    "pretrained": "from_pretrained",
    "pretrained.geometric_file": "load_geometric",
    "sentence": "Sentence",
    "training": "AdamW EarlyStopping Execution train",
    "viz.plots.kinds": "plot",
}
_HOME = {name: home for home, names in _NAMES.items() for name in names.split()}

__all__ = [*_HOME]


def __getattr__(name: str) -> Any:
    home = _HOME.get(name)
    if home is None:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    module = importlib.import_module(f"{__name__}.{home or name}")
    found = getattr(module, name) if home else module
    globals()[name] = found
    return found


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
