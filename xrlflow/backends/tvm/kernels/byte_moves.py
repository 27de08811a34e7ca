"""The kernel that transposes matrices of bytes, in registers.

A transposition that stores vectors loads their bytes one by one. This kernel loads 16 vectors of 16 bytes, interleaves
them four times in pairs, and stores 16 vectors.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from xrlflow.backends.tvm.kernels.building import OPAQUE, SCHEDULED, number, ramp
from xrlflow.backends.tvm.schedules.blocks import WORTH_A_THREAD
from xrlflow.backends.tvm.toolchain.import_tvm import tvm

BLOCK = 16
"""The number of rows and columns that are transposed at once, and so the least number that a matrix may have."""


def transposition(
    matrices: tuple[int, int, int], shape: Sequence[int], result: Sequence[int], kind: str
) -> Any:
    """The PrimFunc that transposes `matrices` of bytes: [batch, rows, columns] to [batch, columns, rows]. `shape` and
    `result` are the shapes of the tensors that hold them, with more dimensions."""
    tvm()
    from tvm import tirx
    from tvm.script.ir_builder import IRBuilder
    from tvm.script.ir_builder import tirx as T

    batch, rows, columns = matrices
    blocks, more = rows // BLOCK, min(rows % BLOCK, 1)
    with IRBuilder() as builder:
        with T.prim_func(is_private=True, s_tir=True):
            T.func_attr({SCHEDULED: True, "op_pattern": OPAQUE, "tirx.noalias": True})
            source = T.arg("x", T.buffer(tuple(shape), kind))
            target = T.arg("out", T.buffer(tuple(result), kind))
            large = batch * rows * columns >= WORTH_A_THREAD
            tasks = T.parallel(0, batch * blocks) if large else T.serial(0, batch * blocks)
            with T.sblock("root"), tasks as task, T.sblock("transposition"):
                T.reads([])
                T.writes([])
                x = T.decl_buffer((batch, rows, columns), kind, data=source.data)
                out = T.decl_buffer((batch, columns, rows), kind, data=target.data)

                block = task % blocks
                # The last blocks overlap those before them. The same task has both, since tasks run in parallel.
                with (
                    T.serial(0, 1 + tirx.Select(block == blocks - 1, number(more), number(0))) as turn,
                    T.serial(0, -(-columns // BLOCK)) as column,
                ):
                    row = tirx.Min((block + turn) * BLOCK, number(rows - BLOCK))
                    first = tirx.Min(column * BLOCK, number(columns - BLOCK))
                    _block(x, out, task // blocks, row, first)
        return builder.get()


def _block(x: Any, out: Any, matrix: Any, row: Any, column: Any) -> None:
    """Transpose a block of one matrix."""
    from tvm import tirx
    from tvm.script.ir_builder import tirx as T

    vectors = [T.bind(x[matrix, row + i, ramp(column, BLOCK)]) for i in range(BLOCK)]
    half = BLOCK // 2
    turns = half.bit_length()
    for turn in range(turns):
        paired = []
        for a, b in zip(vectors[:half], vectors[half:]):
            for first in (0, half):
                at = [number(first + i // 2 + BLOCK * (i % 2)) for i in range(BLOCK)]
                mixed = tirx.Shuffle([a, b], at)
                paired.append(mixed if turn == turns - 1 else T.bind(mixed))
        vectors = paired
    for i, vector in enumerate(vectors):
        T.buffer_store(out, vector, [matrix, column + i, ramp(row, BLOCK)])
