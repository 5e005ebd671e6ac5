"""The compiler: it translates a declaration to batched tensor operations.

The pipeline, in the order in which data flows:

    module            `CompiledModule`: contains the parameters, takes an `ExecutionRequest` and runs all passes
    validate_inputs   checks values and masks, and reshapes values to the layout of a run
    plan              `network_to_plan`: the node groups to compute, in order; choices to enumerate; products to fuse
    execution_state   `ExecutionState`: the layout, the parameters and the values computed so far
    gather            `gather_parents`: the inputs of a TPM, aligned with the words of its node
    evaluate          `plan_to_values`: one tensor for each node group; `Scan` for recurrence
    fused             linear maps and attention as few large products
"""

from bnet_transformer.compiler.execution_state import ExecutionRequest
from bnet_transformer.compiler.module import CompiledModule
from bnet_transformer.compiler.plan import Plan

__all__ = ["CompiledModule", "ExecutionRequest", "Plan"]
