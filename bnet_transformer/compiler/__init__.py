"""The compiler: it translates a declaration to batched tensor operations.

The pipeline, in the order in which data flows:

    module     `CompiledModule`: contains the parameters; a call checks the tensors of a user, and `execute` runs all
               passes of an `ExecutionRequest`, which it trusts
    batch_interventions
               the names and values of `do` -> the fields of a request
    plan       `network_to_plan`: the node groups to compute, in order; choices to enumerate; products to fuse
    gather     `ExecutionState`: the layout, the parameters and the values computed so far; `gather_parents`: the inputs
               of a TPM, aligned with the words of its node
    evaluate   `plan_to_values`: one tensor for each node group; `Scan` for recurrence
    fused      linear maps and attention as few large products
"""

from bnet_transformer.compiler.gather import ExecutionRequest
from bnet_transformer.compiler.module import CompiledModule
from bnet_transformer.compiler.plan import ExecutionPlan

__all__ = ["CompiledModule", "ExecutionPlan", "ExecutionRequest"]
