"""Training by gradient, decoding and rollout: `train`, `generate` and `iterate`.

Both work on any declaration. `configs` has the options that belong together, `run` the objective and a step, `loop`
the steps and checkpoints; `incremental` computes one word at a time, and `generate` chooses it.
"""

from bnet_transformer._core.distributed import single_process
from bnet_transformer.learning.training.configs import AdamW, EarlyStopping, Execution
from bnet_transformer.learning.training.forecast import iterate, windows
from bnet_transformer.learning.training.generate import Generated, generate
from bnet_transformer.learning.training.loop import Trained, load_checkpoint, train

__all__ = [
    "AdamW",
    "EarlyStopping",
    "Execution",
    "Generated",
    "Trained",
    "generate",
    "iterate",
    "load_checkpoint",
    "single_process",
    "train",
    "windows",
]
