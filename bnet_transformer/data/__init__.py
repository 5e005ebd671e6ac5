"""Data of any form as tensors: text, ids, vectors, pairs, images and columns -> sentences -> batches -> data sets.

`words` encodes the words of one stack, `encode` one sentence and the values of `do` and evidence. `batch` holds many
sentences as tensors. `task` says what words and readouts a net has, `examples` reads one sentence with what is observed
of it, and the columns of a net without words, `dataset` data of any form: also whole arrays and streams of tokens.
"""

from bnet_transformer.data.batch import Batch, Evidence
from bnet_transformer.data.dataset import Dataset, read_batch
from bnet_transformer.data.encode import EncodedSentence, encode_sentence

__all__ = ["Batch", "Dataset", "EncodedSentence", "Evidence", "encode_sentence", "read_batch"]
