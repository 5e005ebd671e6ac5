"""Interventions: values that are set, and what they change.

`sweeps` patches groups of nodes in one batch (patching, ablation, mediation), `circuits` searches the arrows that a
behaviour needs, `counterfactual` asks what would have been. `Zero`, `Mean`, `Noise` and `Attend` are values of `do`.
"""

from bnet_transformer.inference.intervention_values import Attend as Attend, Mean as Mean, Noise as Noise, Zero as Zero
