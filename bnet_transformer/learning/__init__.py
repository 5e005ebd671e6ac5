"""Learning parameters, and generation with trained nets.

`training` trains by gradient descent, generates text and forecasts series. `fit` fits nets with latent choices by MAP,
EM, Laplace, SVI or NUTS. Both save and resume runs with `checkpoint`.
"""
