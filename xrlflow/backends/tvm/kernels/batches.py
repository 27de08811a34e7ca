"""Many small products of matrices, as one kernel.

The second matrix of a product stays in the first-level cache, and is read without packing. If tiles do not divide the
rows or columns, the last tile or vector overlaps the one before it: some results are computed twice, but nothing is
copied or padded.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from xrlflow.backends.tvm.kernels.building import FLOAT, LOCAL, OPAQUE, SCHEDULED, number, ramp, spread
from xrlflow.backends.tvm.kernels.steps import Extra, Step, extras_of, stepped
from xrlflow.backends.tvm.schedules.blocks import WORTH_A_THREAD
from xrlflow.backends.tvm.toolchain.import_tvm import tvm
from xrlflow.backends.tvm.toolchain.target import Machine

_MOST_ROWS = 14
# The time to load and broadcast a number, and to load a vector, in multiply-adds.
_BROADCAST, _VECTOR = 0.6, 0.9


@dataclass(frozen=True, slots=True)
class BatchedProduct:
    """steps(x z): `batch` products of x [.., row, term] and z [.., term, column], with the same first dimensions."""

    batch: tuple[int, ...]
    rows: int
    depth: int
    columns: int
    steps: tuple[Step, ...] = ()

    @property
    def out(self) -> tuple[int, ...]:
        return (*self.batch, self.rows, self.columns)

    @property
    def extras(self) -> list[Extra]:
        return extras_of(self.steps)

    @property
    def flops(self) -> int:
        return 2 * math.prod(self.out) * self.depth


@dataclass(frozen=True, slots=True)
class BatchBlocking:
    """A tile of accumulators: `rows` rows, each with at most `vectors` vectors of `lanes` columns."""

    rows: int
    vectors: int
    lanes: int

    def groups(self, workload: BatchedProduct) -> list[list[int]]:
        """The first column of each vector, in a list for each tile."""
        count = -(-workload.columns // self.lanes)
        starts = [min(i * self.lanes, workload.columns - self.lanes) for i in range(count)]
        tiles = -(-count // self.vectors)
        each, more = divmod(count, tiles)
        ends = [each * (i + 1) + min(i + 1, more) for i in range(tiles)]
        return [starts[begin:end] for begin, end in zip([0, *ends], ends)]


def blockings(workload: BatchedProduct, machine: Machine) -> Iterator[BatchBlocking]:
    """The tiles to choose from. No tile is returned if a vector is longer than a row."""
    for lanes in {machine.lanes, machine.lanes // 2} if machine.in_halves else {machine.lanes}:
        for rows in range(1, min(_MOST_ROWS, workload.rows) + 1):
            for vectors in range(1, min(8, -(-workload.columns // lanes)) + 1):
                if lanes <= workload.columns and machine.keeps(rows, vectors):
                    yield BatchBlocking(rows, vectors, lanes)


def cost(workload: BatchedProduct, blocking: BatchBlocking, machine: Machine) -> float:
    """The estimated time for one term of all sums of a product, in multiply-adds of vectors."""
    share = blocking.lanes / machine.lanes if machine.in_halves else 1.0
    groups = [len(group) for group in blocking.groups(workload)]
    tile = sum(share * max(blocking.rows * n, 8) + _BROADCAST * blocking.rows + _VECTOR * n for n in groups)
    return -(-workload.rows // blocking.rows) * tile


def best_blocking(workload: BatchedProduct, machine: Machine) -> BatchBlocking:
    """The tile with the least estimated time."""
    return min(
        blockings(workload, machine),
        key=lambda blocking: (cost(workload, blocking, machine), -blocking.lanes, blocking.rows),
    )


def kernel(workload: BatchedProduct, blocking: BatchBlocking) -> Any:
    """The PrimFunc with parameters x, z, the extra operands of the steps in their order, and the result."""
    tvm()
    from tvm import tirx
    from tvm.script.ir_builder import IRBuilder
    from tvm.script.ir_builder import tirx as T

    with IRBuilder() as builder:
        with T.prim_func(is_private=True, s_tir=True):
            T.func_attr({SCHEDULED: True, "op_pattern": OPAQUE, "tirx.noalias": True})
            x = T.arg("x", T.buffer((*workload.batch, workload.rows, workload.depth), FLOAT))
            z = T.arg("z", T.buffer((*workload.batch, workload.depth, workload.columns), FLOAT))
            shapes = [workload.out[-1:] if extra.by_channel else workload.out for extra in workload.extras]
            extras = [T.arg(f"x{i}", T.buffer(shape, FLOAT)) for i, shape in enumerate(shapes)]
            out = T.arg("out", T.buffer(workload.out, FLOAT))
            loop = T.parallel if workload.flops >= WORTH_A_THREAD else T.serial
            tasks = loop(0, math.prod(workload.batch))
            with T.sblock("root"), tasks as task, T.sblock("products"):
                T.reads([])
                T.writes([])
                one = _Product(workload, blocking, x, z, extras, out, task)
                with T.serial(0, -(-workload.rows // blocking.rows)) as turn:
                    first = turn * blocking.rows
                    if workload.rows % blocking.rows:
                        first = tirx.Min(first, number(workload.rows - blocking.rows))
                    for group in blocking.groups(workload):
                        one.tile(first, group)
        return builder.get()


class _Product:
    """Writes the loops of one product into the function that is being built."""

    def __init__(
        self,
        workload: BatchedProduct,
        blocking: BatchBlocking,
        x: Any,
        z: Any,
        extras: Sequence[Any],
        out: Any,
        task: Any,
    ) -> None:
        from tvm.script.ir_builder import tirx as T

        self._workload, self._blocking = workload, blocking
        self._x, self._z, self._extras, self._out = x, z, extras, out
        self._batch: list[Any] = []
        for size in reversed(workload.batch):
            self._batch.insert(0, task % size)
            task = task // size
        self._done = T.alloc_buffer((len(workload.steps) + 1, blocking.lanes), FLOAT, scope=LOCAL)

    def tile(self, first: Any, starts: Sequence[int]) -> None:
        """Compute the results of one tile. `first`: its first row; `starts`: the first column of each of its
        vectors."""
        from tvm import tirx
        from tvm.script.ir_builder import tirx as T

        workload, blocking, lanes = self._workload, self._blocking, self._blocking.lanes
        sums = T.alloc_buffer((blocking.rows, len(starts) * lanes), FLOAT, scope=LOCAL)
        positions = [
            (i, v, [i, ramp(number(v * lanes), lanes)])
            for i in range(blocking.rows)
            for v in range(len(starts))
        ]
        for _, _, at in positions:
            T.buffer_store(sums, spread(0.0, lanes), at)
        with T.serial(0, workload.depth) as term:
            for i, v, at in positions:
                factor = tirx.Broadcast(self._x[(*self._batch, first + i, term)], lanes)
                vector = self._z[(*self._batch, term, ramp(number(starts[v]), lanes))]
                T.buffer_store(sums, sums[tuple(at)] + factor * vector, at)
        for i, v, at in positions:
            index = [*self._batch, first + i, ramp(number(starts[v]), lanes)]
            done = stepped(workload.steps, self._extras, sums[tuple(at)], index, self._done)
            T.buffer_store(self._out, done, index)
