"""Searches for good orders of compiler passes: a protocol for compilers, a Gymnasium environment for any such
compiler, and two compilers.

`compiler` is the protocol. `xla` runs XLA's HLO passes (the extra `xla`), `rules` applies rewrite rules to ONNX
graphs. `environment` needs Gymnasium (the extra `train`). Importing this package loads none of these modules.
"""

from xrlflow.passes.compiler import (
    Applied,
    Comparison,
    Compiler,
    CompilerError,
    Metric,
    Module,
    ModuleGraph,
    Summary,
    run,
)

__all__ = [
    "Applied",
    "Comparison",
    "Compiler",
    "CompilerError",
    "Metric",
    "Module",
    "ModuleGraph",
    "Summary",
    "run",
]
