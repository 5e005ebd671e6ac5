"""bnet_transformer represents a transformer as a dynamical Bayesian network (bnet).

    import bnet_transformer as bt

    net = bt.bayesuvius(dim=8, slices=2, heads=4)
    s = net.sentence("the cat sat on the mat")

The packages, in the order in which data flows. A TPM is the conditional distribution of one node given its parents
(a CPD), deterministic or random.

- `declare` (nodes, arrows, plates, stacks -> network), `tpm` (conditional distributions), `graph` (template graph,
  ground graph, d-separation);
- `data`: text, ids or vectors -> an encoded sentence -> batches and data sets;
- `reference`: the semantics, node by node; `compiler`: the same as batched tensor operations; `equations`, `cost`;
- `inference`: a query about a sentence -> its plan (the algorithm) -> values, posteriors, samples;
- `interventions` (sweeps, circuits, counterfactuals), `attention` (rollout, TANs, heads), `residual_stream` (the lens),
  `generation` (new words, steering, forecasts), `learning` (fits, training);
- `bridges` (networkx, pgmpy, Pyro), `figures`, `plots`, `page`, and `drawing`, which writes figures to files;
- `sentence` and `bnet`: the classes `Sentence` and `BNet`; `models`, `programs` and `pretrained` create nets; `cli` is
  the command line.

Large dependencies are imported on first use; `import bnet_transformer` does not import torch.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from bnet_transformer import models as models, programs as programs, tpm as tpm
    from bnet_transformer._core.naming import Reach as Reach
    from bnet_transformer.attention.inclusion import inclusion as inclusion
    from bnet_transformer.attention.roles import roles as roles
    from bnet_transformer.bnet import BNet as BNet, from_pgmpy as from_pgmpy, load as load, read_bif as read_bif
    from bnet_transformer.declare import (
        Arrow as Arrow,
        Declaration as Declaration,
        Node as Node,
        Plate as Plate,
        Stack as Stack,
    )
    from bnet_transformer.drawing import draw as draw, picture as picture
    from bnet_transformer.errors import (
        BNetError as BNetError,
        BudgetError as BudgetError,
        DeclarationError as DeclarationError,
        EvidenceError as EvidenceError,
        FileError as FileError,
        UnknownNameError as UnknownNameError,
        UnsupportedError as UnsupportedError,
    )
    from bnet_transformer.interventions.circuit import circuit as circuit
    from bnet_transformer.interventions.curves import faithfulness_curves as faithfulness_curves
    from bnet_transformer.interventions.methods import Gradient as Gradient
    from bnet_transformer.interventions.sweep import mediation as mediation, sweep as sweep
    from bnet_transformer.learning.calibration import calibrate as calibrate
    from bnet_transformer.learning.fit import (
        EM as EM,
        MAP as MAP,
        NUTS as NUTS,
        SVI as SVI,
        Fit as Fit,
        Laplace as Laplace,
        compare as compare,
        fit as fit,
        fit_heads as fit_heads,
    )
    from bnet_transformer.learning.fit.from_pyro import fit_from_pyro as fit_from_pyro
    from bnet_transformer.learning.loop import Checkpoints as Checkpoints
    from bnet_transformer.learning.training import (
        AdamW as AdamW,
        EarlyStopping as EarlyStopping,
        Execution as Execution,
        train as train,
    )
    from bnet_transformer.models.bayesuvius import bayesuvius as bayesuvius
    from bnet_transformer.models.geometric import geometric as geometric, volume_preserving as volume_preserving
    from bnet_transformer.models.recurrent import recurrent as recurrent
    from bnet_transformer.models.transformer import (
        decoder as decoder,
        encoder as encoder,
        encoder_decoder as encoder_decoder,
    )
    from bnet_transformer.plots.registry import plot as plot
    from bnet_transformer.pretrained import from_pretrained as from_pretrained
    from bnet_transformer.pretrained.geometric import load_geometric as load_geometric
    from bnet_transformer.residual_stream import fit_lens as fit_lens
    from bnet_transformer.sentence import Sentence as Sentence, explain as explain

__version__ = "0.1.0"

_EXPORTS = {  # the public names of each module
    "": "models programs tpm",
    "_core.naming": "Reach",
    "attention.inclusion": "inclusion",
    "attention.roles": "roles",
    "bnet": "BNet from_pgmpy load read_bif",
    "declare": "Arrow Declaration Node Plate Stack",
    "drawing": "draw picture",
    "errors": "BNetError BudgetError DeclarationError EvidenceError FileError UnknownNameError UnsupportedError",
    "interventions.circuit": "circuit",
    "interventions.curves": "faithfulness_curves",
    "interventions.methods": "Gradient",
    "interventions.sweep": "mediation sweep",
    "learning.calibration": "calibrate",
    "learning.loop": "Checkpoints",
    "learning.fit": "EM Fit Laplace MAP NUTS SVI compare fit fit_heads",
    "learning.fit.from_pyro": "fit_from_pyro",
    "learning.training": "AdamW EarlyStopping Execution train",
    "models": "bayesuvius decoder encoder encoder_decoder geometric recurrent volume_preserving",
    "plots.registry": "plot",
    "pretrained": "from_pretrained",
    "pretrained.geometric": "load_geometric",
    "residual_stream": "fit_lens",
    "sentence": "Sentence explain",
}
_MODULE_OF = {name: home for home, names in _EXPORTS.items() for name in names.split()}

__all__ = [*_MODULE_OF]


def __getattr__(name: str) -> Any:
    home = _MODULE_OF.get(name)
    if home is None:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    module = importlib.import_module(f"{__name__}.{home or name}")
    value = getattr(module, name) if home else module
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
