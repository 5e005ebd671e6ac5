"""Learning: what changes parameters, and what runs a trained net forward.

`training` trains by gradient, generates and forecasts; `fit` finds the parameters of nets with choices (MAP, EM, SVI,
NUTS); `checkpoint` has the saved state of a run that both resume from.
"""
