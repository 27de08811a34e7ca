"""The kernel that finds the least and the greatest number of a tensor, in one pass over it."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

from xrlflow.backends.tvm.kernels.building import FLOAT, LOCAL, OPAQUE, SCHEDULED, number, ramp
from xrlflow.backends.tvm.schedules.blocks import WORTH_A_THREAD
from xrlflow.backends.tvm.toolchain.import_tvm import tvm

WIDTH = 32
"""The number of running extremes, and so the least number of elements that a tensor may have."""
_TASKS = 16


def extremes(shape: Sequence[int]) -> Any:
    """The PrimFunc with parameters tensor, least number and greatest number (both without dimensions). A NaN is
    ignored, or hides the numbers before it."""
    tvm()
    from tvm import tirx
    from tvm.script.ir_builder import IRBuilder
    from tvm.script.ir_builder import tirx as T

    size = math.prod(shape)
    vectors = -(-size // WIDTH)
    tasks = min(_TASKS, vectors) if size >= WORTH_A_THREAD else 1
    share = -(-vectors // tasks)
    both = (tirx.Min, tirx.Max)
    with IRBuilder() as builder:
        with T.prim_func(is_private=True, s_tir=True):
            T.func_attr({SCHEDULED: True, "op_pattern": OPAQUE, "tirx.noalias": True})
            source = T.arg("x", T.buffer(tuple(shape), FLOAT))
            results = [T.arg(name, T.buffer((), FLOAT)) for name in ("least", "greatest")]
            with T.sblock("root"), T.serial(0, 1), T.sblock("extremes"):
                T.reads([])
                T.writes([])
                x = T.decl_buffer((size,), FLOAT, data=source.data)
                parts = [T.alloc_buffer((tasks, WIDTH), FLOAT) for _ in both]
                lanes = ramp(number(0), WIDTH)
                with T.parallel(0, tasks) if tasks > 1 else T.serial(0, 1) as task:
                    running = [T.alloc_buffer((WIDTH,), FLOAT, scope=LOCAL) for _ in both]

                    def vector(turn: Any) -> Any:
                        """A vector of the task. The last vectors overlap, and are read several times."""
                        first = tirx.Min((task * share + turn) * WIDTH, number(size - WIDTH))
                        return T.bind(x[ramp(first, WIDTH)])

                    for buffer in running:
                        T.buffer_store(buffer, vector(number(0)), [lanes])
                    with T.serial(1, share) as turn:
                        value = vector(turn)
                        for buffer, better in zip(running, both):
                            T.buffer_store(buffer, better(buffer[lanes], value), [lanes])
                    for buffer, part in zip(running, parts):
                        T.buffer_store(part, buffer[lanes], [task, lanes])
                for result, part, better in zip(results, parts, both):
                    T.buffer_store(result, part[0, 0], [])
                    with T.serial(0, tasks) as task, T.serial(0, WIDTH) as lane:
                        T.buffer_store(result, better(result[()], part[task, lane]), [])
        return builder.get()
