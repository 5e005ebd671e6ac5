"""Training by gradient descent, text generation and forecasts, for any declaration: `train`, `generate` and `iterate`.

`configs` contains the options, `trainer` the loss and one step, and `loop` (`train`) the loop over the steps with
evaluation and checkpoints. `incremental_decoding` computes one word at a time with a KV cache, and `generate` chooses
the words; `decoding_interventions` sets and shifts nodes at each word. In nets with latent choices `filtering_decoder`
sums them out, and `choice_sampler` draws them. `sample_words` draws sentences without a prompt. `forecast` (`iterate`)
continues series of real-valued words.
"""

from bnet_transformer._core.distributed import single_process
from bnet_transformer.learning.training.configs import AdamW, EarlyStopping, Execution
from bnet_transformer.learning.training.forecast import iterate, windows
from bnet_transformer.learning.training.generate import generate
from bnet_transformer.learning.training.generated import Generated
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
