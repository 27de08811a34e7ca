"""Compiles kernels that read or write memory of the caller, which may begin at any address.

TVM's kernels assume that tensors begin at multiples of 64 bytes, and crash if vectors of other tensors are moved.
Marked kernels do not assume this. For tensors that do begin at such multiples, they are as fast as unmarked kernels.
"""

from __future__ import annotations

from typing import Any

from xrlflow.backends.tvm.toolchain.stack import rewritten

_MARK = "xrlflow.unaligned"
_ALIGNMENT = "storage_alignment"


def marked(function: Any) -> Any:
    """A primitive function whose tensors may begin at any byte."""
    return function.with_attr(_MARK, True)


def register() -> None:
    """Add the pass for marked functions to the passes that lower kernels, once per process."""
    import tvm
    from tvm import tirx

    passes, finalize_host, finalize_device = tirx.get_tir_pipeline("s_tir")
    lower = tvm.transform.module_pass(_module, opt_level=0, name="AssumeNoAlignment")
    after = tvm.transform.Sequential([passes, lower])
    tirx.register_tir_pipeline("s_tir", lambda: (after, finalize_host, finalize_device))


def _module(mod: Any, context: Any) -> Any:
    from tvm import tirx

    for name, function in mod.functions.items():
        if isinstance(function, tirx.PrimFunc) and _MARK in (function.attrs or {}):
            mod.update_func(name, function.with_body(rewritten(function.body, _forgetful)))
    return mod


def _forgetful(statement: Any) -> Any:
    """The statement, in which tensors are declared to be aligned to 1 byte only."""
    from tvm import tirx

    if isinstance(statement, tirx.AttrStmt) and statement.attr_key == _ALIGNMENT:
        least = tirx.IntImm("int32", 1)
        return tirx.AttrStmt(statement.node, _ALIGNMENT, least, statement.body, statement.span)
    return statement
