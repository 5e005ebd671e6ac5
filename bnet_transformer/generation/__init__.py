"""Generation with nets: new words after prompts, samples of sentences, and forecasts of real-valued words.

`decoder` computes one word at a time with a KV cache; in nets with latent choices it sums them out or draws them.
`generate` chooses the words (greedy, sampling, beam search); `compiler.batch_interventions` sets and changes nodes at
each word (steering). `forecast` (`iterate`) continues series of real-valued words.
"""

from bnet_transformer.generation.forecast import iterate as iterate, windows as windows
from bnet_transformer.generation.generate import Generated as Generated, generate as generate

__all__ = ["Generated", "generate", "iterate", "windows"]
