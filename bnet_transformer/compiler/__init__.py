"""The compiled reading: a declaration as batched tensor operations.

Passes: `network_to_plan` (which families a question needs, which choices it enumerates), then `plan_to_values` (their
values, family by family, in one layout). `CompiledModule` holds the parameters and runs both.
"""

from bnet_transformer.compiler.execution_state import ExecutionRequest
from bnet_transformer.compiler.module import CompiledModule
from bnet_transformer.compiler.plan import Plan

__all__ = ["CompiledModule", "ExecutionRequest", "Plan"]
