"""Small tasks whose kernels are TVM's own."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any

from xrlflow.backends.tvm.toolchain.import_tvm import tvm
from xrlflow.tuning.tasks import Task, extract_tasks


def target() -> Any:
    """A target with AVX2 and two cores, on any machine. Nothing is built for it."""
    return tvm().target.Target({"kind": "llvm", "mcpu": "core-avx2", "num-cores": 2})


def module(build: Callable[..., Any], *shapes: tuple[int, ...]) -> Any:
    """A Relax module with float32 inputs of these shapes, legalized and fused."""
    relax = tvm().relax
    builder = relax.BlockBuilder()
    inputs = [relax.Var(f"x{i}", relax.TensorType(shape, "float32")) for i, shape in enumerate(shapes)]
    with builder.function("main", inputs):
        with builder.dataflow():
            output = builder.emit_output(build(relax.op, *inputs))
        builder.emit_func_output(output)
    passes = ("LegalizeOps", "AnnotateTIROpPattern", "FuseOps", "FuseTIR", "DeadCodeElimination")
    return tvm().transform.Sequential([getattr(relax.transform, name)() for name in passes])(builder.get())


@cache
def matmul(n: int = 8) -> Task:
    """A product of two square matrices."""
    return extract_tasks(module(lambda op, a, b: op.matmul(a, b), (n, n), (n, n)), target())[0]


@cache
def knobless() -> Task:
    """An addition without knobs."""
    return extract_tasks(module(lambda op, x: op.add(x, x), (1,)), target())[0]
