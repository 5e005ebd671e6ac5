"""Encode data of any form (text, ids, vectors, pairs, images, columns) as sentences, batches and data sets of tensors.

The pipeline, in the order in which data flows:

    encode         the words of one stack (text, ids, vectors, an image) -> a tensor; one sentence ->
                   `EncodedSentence`; a value of `do` or evidence -> a tensor
    do_values      the values of `do`: constants, values in other sentences, changes `t = f(v)`
    batch          many sentences, padded, with masks and evidence -> `Batch`; infers from a net what data it takes
    checks         checks of the tensors that users pass, which turn names into indices of node groups
    dataset        data of any form -> `Dataset`, minibatches by step: sentences, columns, arrays, streams of tokens
"""

from bnet_transformer.data.batch import Batch, Evidence
from bnet_transformer.data.dataset import Dataset, read_batch
from bnet_transformer.data.encode import EncodedSentence, encode_sentence

__all__ = ["Batch", "Dataset", "EncodedSentence", "Evidence", "encode_sentence", "read_batch"]
