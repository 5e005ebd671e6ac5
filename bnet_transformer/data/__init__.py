"""Data of any form as tensors: text, ids, vectors, pairs and images -> sentences -> batches -> data sets.

`words` encodes the words of one stack, `encode` one sentence and the values of `do` and evidence, `batch` holds many
sentences as tensors, `columns` reads the data of a net without words, `dataset` reads data of any form.
"""

from bnet_transformer.data.batch import Evidence

__all__ = ["Evidence"]
