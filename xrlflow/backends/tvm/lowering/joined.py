"""Joins a sequence of kernels to one function, so that they can be timed together as they run in a model."""

from __future__ import annotations

from typing import Any

from xrlflow.backends.protocol import Array, BackendError
from xrlflow.backends.tvm.lowering.plan import COPY, Call, ExecutionPlan, Location, plan_of, sequence
from xrlflow.backends.tvm.toolchain.import_tvm import from_json, tvm

_OUTSIDE = (Location.INPUT, Location.CONSTANT, Location.OUTPUT)


def joined(module: Any) -> tuple[Any, tuple[Array, ...]]:
    """The kernels of a scheduled module as one PrimFunc, and the constants that it reads. Its parameters are the inputs
    of "main", the constants and the outputs.

    Raises BackendError for a module that does more than call kernels one after the other.
    """
    tvm()
    from tvm.script.ir_builder import IRBuilder
    from tvm.script.ir_builder import tirx as T

    module = sequence(module)
    plan = plan_of(module)
    _check(plan)
    outside = [n for n, tensor in enumerate(plan.tensors) if tensor.location in _OUTSIDE]
    outside.sort(key=lambda n: (_OUTSIDE.index(plan.tensors[n].location), plan.tensors[n].offset))
    with IRBuilder() as builder:
        with T.prim_func(is_private=True, s_tir=True):
            T.func_attr({"tirx.noalias": True})
            buffers = {
                n: T.arg(f"tensor{n}", T.buffer(plan.tensors[n].shape, plan.tensors[n].dtype))
                for n in outside
            }
            with T.sblock("root"):
                for n, tensor in enumerate(plan.tensors):
                    if n not in buffers:
                        buffers[n] = T.sblock_alloc_buffer(tensor.shape, tensor.dtype)
                for number, call in enumerate(plan.calls):
                    kernel = module[call.kernel]
                    if any(call.kernel == earlier.kernel for earlier in plan.calls[:number]):
                        kernel = _copy(kernel)
                    T.add_to_parent(_called(kernel, [buffers[n] for n in call.arguments]))
        return builder.get(), plan.constants


def _check(plan: ExecutionPlan) -> None:
    """Raise BackendError if the plan calls something other than a kernel, or if a call reads a tensor that no earlier
    call has written (a view of another tensor)."""
    written = {
        n for n, tensor in enumerate(plan.tensors) if tensor.location in (Location.INPUT, Location.CONSTANT)
    }
    for call in plan.calls:
        if call.kernel == COPY or min(call.arguments) < 0 or not written.issuperset(call.arguments[:-1]):
            raise BackendError(f"{_title(call)} cannot be part of one function")
        written.add(call.arguments[-1])


def _title(call: Call) -> str:
    return "a copy" if call.kernel == COPY else f"kernel {call.kernel}"


def _copy(kernel: Any) -> Any:
    """A copy of the kernel with variables of its own, since a function may define a variable only once."""
    return from_json(tvm().ir.save_json(kernel))


def _called(kernel: Any, buffers: list[Any]) -> Any:
    """The statement that runs a kernel with these buffers as its parameters."""
    from tvm import ir, s_tir, tirx

    regions = [tirx.BufferRegion(buffer, [ir.Range(0, n) for n in buffer.shape]) for buffer in buffers]
    renamed = [s_tir.stmt.MatchBufferRegion(*pair) for pair in zip(kernel.params, regions)]
    block = s_tir.SBlock([], regions[:-1], regions[-1:], "call", kernel.body, match_buffers=renamed)
    return s_tir.SBlockRealize([], True, block)
