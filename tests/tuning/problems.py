"""Small tasks that several tests use."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any

from xrlflow.backends.tvm.import_tvm import tvm
from xrlflow.tuning.tasks import Task, extract_tasks


def target() -> Any:
    """A machine with AVX2 and two cores, whatever the tests run on: nothing is built here."""
    return tvm().target.Target({"kind": "llvm", "mcpu": "core-avx2", "num-cores": 2})


def module(build: Callable[..., Any], *shapes: tuple[int, ...]) -> Any:
    """A Relax module of float32 inputs of these shapes, legalized and fused."""
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
    """Two square matrices: tiles of three loops, unrolling, and where the result is gathered."""
    return extract_tasks(module(lambda op, a, b: op.matmul(a, b), (n, n), (n, n)), target())[0]


@cache
def convolution() -> Task:
    """A padded convolution: the padding's place is a knob."""
    build = lambda op, x, w: op.nn.conv2d(x, w, padding=1, data_layout="NHWC", kernel_layout="HWIO")  # noqa: E731
    return extract_tasks(module(build, (1, 8, 8, 4), (3, 3, 4, 8)), target())[0]


@cache
def softmax() -> Task:
    """Four blocks, two reductions that may be factored: sketches with different knobs."""
    return extract_tasks(module(lambda op, x: op.nn.softmax(x), (16, 64)), target())[0]


@cache
def knobless() -> Task:
    """One addition: nothing to decide."""
    return extract_tasks(module(lambda op, x: op.add(x, x), (1,)), target())[0]
