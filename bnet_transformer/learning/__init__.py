"""Learning of parameters, and generation with trained nets.

`training` trains by gradient, generates text and forecasts series. `fit` fits nets with choices (MAP, EM, SVI, NUTS).
Both save and resume runs by `checkpoint`.
"""
