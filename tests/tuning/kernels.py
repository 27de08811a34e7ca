"""Small kernels that tests build and run. Some of them fail."""

from __future__ import annotations

from typing import Any

from xrlflow.backends.tvm.toolchain.import_tvm import tvm
from xrlflow.tuning.knobs import Candidate
from xrlflow.tuning.tasks import Task, module_key


def target(cores: int = 2) -> Any:
    return tvm().target.Target({"kind": "llvm", "num-cores": cores})


def matmul(size: int = 16, columns: int | None = None) -> Task:
    """The product of a [size, size] matrix with a [size, columns] matrix."""
    te = tvm().te
    columns = size if columns is None else columns
    x, w = te.placeholder((size, size), name="X"), te.placeholder((size, columns), name="W")
    k = te.reduce_axis((0, size), "k")
    y = te.compute((size, columns), lambda i, j: te.sum(x[i, k] * w[k, j], axis=k), name="Y")
    return Task.of(f"matmul{size}x{columns}", te.create_prim_func([x, w, y]), target())


def calls(function: str, dtype: str = "float32") -> Candidate:
    """A kernel that only calls a C function without arguments."""
    te, tirx = tvm().te, tvm().tirx
    x = te.placeholder((4,), name="X", dtype=dtype)
    y = te.extern((4,), [x], lambda i, o: tirx.call_extern("int32", function), name="Y", dtype=dtype)
    return Candidate(None, [[], []], tvm().IRModule({"main": te.create_prim_func([x, y])}), function)


def unscheduled(task: Task) -> Candidate:
    return Candidate(None, [[], []], task.mod, "as it is")


def scheduled(task: Task, inner: int, parallel: bool = False) -> Candidate:
    """The product of `task`, with its columns split by `inner` and vectorised."""
    schedule = tvm().s_tir.Schedule(task.mod)
    block = schedule.get_sblock("Y")
    i, j, k = schedule.get_loops(block)
    outer, vector = schedule.split(j, [None, inner])
    schedule.reorder(i, outer, k, vector)
    if parallel:
        schedule.parallel(i)
    schedule.vectorize(vector)
    schedule.decompose_reduction(block, k)
    record = tvm().s_tir.meta_schedule.database.TuningRecord
    workload = tvm().s_tir.meta_schedule.database.Workload(task.mod)
    trace = record(schedule.trace, workload).as_json()[0]
    return Candidate(None, trace, schedule.mod, module_key(schedule.mod))
