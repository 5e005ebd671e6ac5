"""Learning parameters.

`training` trains by gradient descent. `fit` fits nets with latent choices by MAP, EM, Laplace, SVI or NUTS, and
`calibration` checks its posteriors by simulation. Training and fits take their steps in
`loop`, which saves and resumes runs.
"""
