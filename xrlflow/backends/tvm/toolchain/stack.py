"""Keeps small buffers on the stack, where LLVM turns them into registers.

TVM takes a kernel's local buffers from its pool of workspaces (other buffers from 1,024 bytes on). Each tile of an
output would call the pool to get memory, to clear it and to release it, and its accumulators would be in memory instead
of registers.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

_MAX_BYTES = 4096
CODE = "small buffers on the stack, long sums in chunks, rarely three, windows in registers"
"""A text that stands for the machine code of schedules, in addition to TVM's version. Measured times are stored with
this text, so it must change whenever that code changes."""
# TVM's annotation of an allocation that is left to code generation (LowerTVMBuiltin).
_ON_STACK = "disable_lower_builtin"


def register() -> None:
    """Add this module's pass to the passes that lower kernels, once per process."""
    from tvm import tirx

    passes, finalize_host, finalize_device = tirx.get_tir_pipeline("s_tir")
    tirx.register_tir_pipeline("s_tir", lambda: (_then(passes), finalize_host, finalize_device))


def _then(passes: Any) -> Any:
    import tvm

    return tvm.transform.Sequential(
        [passes, tvm.transform.module_pass(_module, opt_level=0, name="KeepOnStack")]
    )


def _module(mod: Any, context: Any) -> Any:
    from tvm import tirx

    for name, function in mod.functions.items():
        if isinstance(function, tirx.PrimFunc):
            mod.update_func(name, function.with_body(rewritten(function.body, _marked)))
    return mod


def _marked(statement: Any) -> Any:
    """The statement, with `_ON_STACK` if it allocates a small buffer."""
    from tvm import tirx

    if isinstance(statement, tirx.AllocBuffer) and _is_small(statement.buffer):
        annotations = {**statement.annotations, _ON_STACK: tirx.IntImm("bool", 1)}
        return tirx.AllocBuffer(statement.buffer, annotations, statement.span)
    return statement


def rewritten(statement: Any, change: Callable[[Any], Any]) -> Any:
    """A TVM statement after `change` was applied to each statement inside it, and then to the statement itself."""
    from tvm import tirx

    def inside(part: Any) -> Any:
        return rewritten(part, change)

    if isinstance(statement, tirx.SeqStmt):
        statement = tirx.SeqStmt([inside(s) for s in statement.seq])
    elif isinstance(statement, tirx.AttrStmt):
        statement = tirx.AttrStmt(
            statement.node, statement.attr_key, statement.value, inside(statement.body), statement.span
        )
    elif isinstance(statement, tirx.For):
        statement = tirx.For(
            statement.loop_var, statement.min, statement.extent, statement.kind, inside(statement.body),
            statement.thread_binding, statement.annotations, statement.step, statement.span,
        )  # fmt: skip
    elif isinstance(statement, tirx.IfThenElse):
        otherwise = statement.else_case
        statement = tirx.IfThenElse(
            statement.condition,
            inside(statement.then_case),
            None if otherwise is None else inside(otherwise),
            statement.span,
        )
    return change(statement)


def _is_small(buffer: Any) -> bool:
    from tvm import tirx

    if not all(isinstance(n, tirx.IntImm) for n in buffer.shape):
        return False
    return math.prod(int(n) for n in buffer.shape) * int(buffer.dtype.itemsize) <= _MAX_BYTES
