"""Products of rows with constant weights, as one kernel.

Weights are packed into panels of columns when the model is compiled. Each task (iteration of the parallel loop) owns
some panels, so that each core reads its weights once. A chunk of a panel (`CHUNK` terms of each sum) stays in the
first-level cache while all tiles of rows are multiplied with it; meanwhile the next chunk is prefetched (Goto and van
de Geijn, Anatomy of High-Performance Matrix Multiplication, 2008). The sums of chunks are added up in a buffer of the
task: the rounding error of a single accumulator grows with the number of its terms.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import numpy.typing as npt

from xrlflow.backends.tvm.kernels.building import (
    FLOAT,
    LOCAL,
    OPAQUE,
    SCHEDULED,
    number,
    pieces,
    prefetch,
    product,
    ramp,
    tiles,
)
from xrlflow.backends.tvm.kernels.steps import Extra, Step, extras_of, kind_of, stepped
from xrlflow.backends.tvm.toolchain.import_tvm import tvm
from xrlflow.backends.tvm.toolchain.target import Machine

# The number of terms that one accumulator sums.
CHUNK = 128
_MOST_ROWS = 14
# If rows are divided into many blocks, each block has at least this many tiles.
_LEAST_TILES = 4
# Times in multiply-adds of vectors: loading a number for a tile; loading a vector of weights from the first-level
# cache; reading a vector from the third-level cache; reading a vector from memory.
_BROADCAST, _VECTOR, _FAR, _MEMORY = 0.6, 0.9, 1.0, 11.5
_LAST_LEVEL = 8 << 20
# The number of floats in a cache line.
_LINE = 16


@dataclass(frozen=True, slots=True)
class Product:
    """steps(x w). `image`: the shape of x, [.., row, term]; `out`: [.., row, column]. Weights are [term, column]."""

    image: tuple[int, ...]
    out: tuple[int, ...]
    steps: tuple[Step, ...] = ()

    @property
    def rows(self) -> int:
        return math.prod(self.image[:-1])

    @property
    def terms(self) -> int:
        return self.image[-1]

    @property
    def columns(self) -> int:
        return self.out[-1]

    @property
    def extras(self) -> list[Extra]:
        return extras_of(self.steps)

    @property
    def kind(self) -> str:
        """The type of the results."""
        return kind_of(self.steps)


@dataclass(frozen=True, slots=True)
class ProductBlocking:
    """The blocking of a product.

    `rows` x `columns`: a tile of accumulators, in vectors of `lanes`. `block`: the number of rows that a task computes.
    `parts`: the number of tasks among which the panels are divided. `ahead`: weights are prefetched by one chunk, since
    they come from beyond the second-level cache.
    """

    rows: int
    columns: int
    lanes: int
    block: int
    parts: int
    ahead: bool = False

    def panels(self, workload: Product) -> int:
        return -(-workload.columns // self.columns)

    def numbers(self, workload: Product) -> dict[str, int]:
        """See `layer_kernels.KernelBlocking`."""
        return {
            "rows": self.rows, "vectors": self.columns // self.lanes, "lanes": self.lanes, "parts": self.parts,
            "ahead": int(self.ahead), "blocks": -(-workload.rows // self.block),
        }  # fmt: skip

    def __str__(self) -> str:
        parts, ahead = f" in {self.parts} parts" * (self.parts > 1), ", fetched ahead" * self.ahead
        return f"{self.rows}x{self.columns} by {self.block}{parts}{ahead}"


def blockings(workload: Product, machine: Machine) -> Iterator[ProductBlocking]:
    """The blockings to choose from, each with and without prefetched weights."""
    ahead = _is_far(workload, machine)
    for blocking in _blockings(workload, machine):
        yield replace(blocking, ahead=ahead)
        yield replace(blocking, ahead=not ahead)


def _blockings(workload: Product, machine: Machine) -> Iterator[ProductBlocking]:
    """The blockings to choose from, all with the same `ahead`: they differ in the rows and columns of tiles, and in how
    rows and panels are divided among tasks."""
    lanes = machine.lanes
    while lanes > 4 and lanes // 2 >= workload.columns:
        lanes //= 2
    for rows in range(1, min(_MOST_ROWS, workload.rows) + 1):
        for vectors in range(1, min(6, -(-workload.columns // lanes)) + 1):
            if not machine.keeps(rows, vectors):
                continue
            panels = -(-workload.columns // (vectors * lanes))
            for parts in range(1, min(machine.cores, panels) + 1):
                for blocks in _blocks(-(-workload.rows // rows), machine.cores):
                    yield ProductBlocking(rows, vectors * lanes, lanes, -(-workload.rows // blocks), parts)


def _blocks(limit: int, cores: int) -> Iterator[int]:
    """The numbers of tasks among which the rows may be divided, up to `limit`: a few tasks for each core, then
    multiples of the number of cores, so that the rows of a task fit in caches."""
    yield from range(1, min(2 * cores, limit) + 1)
    more = 4 * cores
    while more <= limit // _LEAST_TILES:
        yield more
        more *= 2


def best_blocking(workload: Product, machine: Machine, columns: int | None = None) -> ProductBlocking:
    """The blocking with the least estimated time. `columns`: only blockings with tiles of so many columns."""
    best = min(
        (b for b in _blockings(workload, machine) if columns in (None, b.columns)),
        key=lambda blocking: _time_of_term(workload, blocking, machine),
    )
    # One row reads weights as fast as memory allows: prefetches only disturb (0.98 of ONNX Runtime's speed, not 1.09).
    return replace(best, ahead=workload.rows > 1 and _is_far(workload, machine))


def with_rows(workload: Product, rows: int) -> Product:
    """The product with another number of rows."""
    return replace(workload, image=(rows, workload.terms), out=(rows, workload.columns))


def _is_far(workload: Product, machine: Machine) -> bool:
    """Whether weights come from beyond the second-level cache."""
    return _weight_bytes(workload) > machine.second_level // 2


def _weight_bytes(workload: Product) -> int:
    return 4 * workload.terms * workload.columns


def cost(workload: Product, blocking: ProductBlocking, machine: Machine) -> float:
    """The estimated time of the busiest core, in multiply-adds of vectors."""
    return workload.terms * _time_of_term(workload, blocking, machine)


def _time_of_term(workload: Product, blocking: ProductBlocking, machine: Machine) -> float:
    """The estimated time of the busiest core for one term of the sums, in multiply-adds of vectors."""
    vectors = blocking.columns // blocking.lanes

    def tile(rows: int) -> float:
        """The estimated time of a tile of this many rows. With fewer than 8 accumulators, multiplications wait for one
        another."""
        return max(rows * vectors, 8) + _BROADCAST * rows + _VECTOR * vectors

    whole, remainder = divmod(blocking.block, blocking.rows)
    panel = whole * tile(blocking.rows) + (tile(remainder) if remainder else 0.0)
    size = _weight_bytes(workload)
    if size > machine.second_level // 2:
        panel += vectors * (_MEMORY if size > _LAST_LEVEL else _FAR)
    if 4 * blocking.block * workload.terms > machine.second_level // 2:
        panel += _FAR * blocking.block / blocking.lanes
    tasks = -(-workload.rows // blocking.block) * blocking.parts
    return -(-tasks // machine.cores) * -(-blocking.panels(workload) // blocking.parts) * panel


def packed(
    weights: npt.NDArray[np.float32], workload: Product, blocking: ProductBlocking
) -> npt.NDArray[np.float32]:
    """The weights of a product as its kernel reads them: `panels`."""
    return panels(weights, blocking.columns)


def panels(weights: npt.NDArray[np.float32], width: int) -> npt.NDArray[np.float32]:
    """Panels [panel, term, column] of weights [.., term, column]; columns after the last are 0."""
    columns = weights.shape[-1]
    wide = weights.reshape(-1, columns)
    if columns % width:
        wide = np.pad(wide, ((0, 0), (0, -columns % width)))
    return np.ascontiguousarray(wide.reshape(len(wide), -1, width).transpose(1, 0, 2))


def chunk_of(depth: int) -> int:
    """The number of terms of a chunk: about `CHUNK`, chosen so that all chunks of a sum of `depth` terms are as equal
    as possible."""
    return -(-depth // max(1, round(depth / CHUNK)))


def kernel(workload: Product, blocking: ProductBlocking) -> Any:
    """The PrimFunc with parameters x, weights (`packed`), the extra operands of the steps in their order, and the
    result."""
    tvm()
    from tvm.script.ir_builder import IRBuilder
    from tvm.script.ir_builder import tirx as T

    with IRBuilder() as builder:
        with T.prim_func(is_private=True, s_tir=True):
            T.func_attr({SCHEDULED: True, "op_pattern": OPAQUE, "tirx.noalias": True})
            x = T.arg("x", T.buffer(workload.image, FLOAT))
            weights = T.arg(
                "weights", T.buffer((blocking.panels(workload), workload.terms, blocking.columns), FLOAT)
            )
            shapes = [workload.out[-1:] if extra.by_channel else workload.out for extra in workload.extras]
            extras = [T.arg(f"x{i}", T.buffer(shape, FLOAT)) for i, shape in enumerate(shapes)]
            out = T.arg("out", T.buffer(workload.out, workload.kind))
            blocks = -(-workload.rows // blocking.block)
            count = blocking.parts * blocks
            tasks = T.parallel(0, count) if count > 1 else T.serial(0, count)
            with T.sblock("root"), tasks as task, T.sblock("product"):
                T.reads([])
                T.writes([])
                _Task(workload, blocking, x, weights, extras, out).write(task // blocks, task % blocks)
        return builder.get()


class _Task:
    """Writes the loops of one task (iteration of the parallel loop) into the function that is being built."""

    def __init__(
        self,
        workload: Product,
        blocking: ProductBlocking,
        x: Any,
        weights: Any,
        extras: Sequence[Any],
        out: Any,
    ) -> None:
        from tvm.script.ir_builder import tirx as T

        self._workload, self._blocking = workload, blocking
        self._x, self._weights, self._extras, self._out = x, weights, extras, out
        self._sums = T.alloc_buffer((blocking.block, blocking.columns), FLOAT)
        self._done = T.alloc_buffer((len(workload.steps) + 1, blocking.lanes), FLOAT, scope=LOCAL)

    def write(self, part: Any, block: Any) -> None:
        from tvm import tirx
        from tvm.script.ir_builder import tirx as T

        workload, blocking = self._workload, self._blocking
        panels, blocks = blocking.panels(workload), -(-workload.rows // blocking.block)
        remainder = workload.columns % blocking.columns

        def panel_of(panel: Any, height: int) -> None:
            """Multiply a panel with the first `height` rows of the block."""
            if not remainder:
                self._panel(panel, block * blocking.block, height, blocking.columns)
                return
            with T.If(panel < panels - 1):
                with T.Then():
                    self._panel(panel, block * blocking.block, height, blocking.columns)
                with T.Else():
                    self._panel(number(panels - 1), block * blocking.block, height, remainder)

        def rows_of(height: int) -> None:
            # The first `more` parts have one panel more than the others.
            least, more = divmod(panels, blocking.parts)
            first = part * least + tirx.Min(part, number(more))
            with T.serial(
                0, least + tirx.Select(part < more, number(1), number(0)) if more else least
            ) as turn:
                panel_of(first + turn, height)

        last = workload.rows - (blocks - 1) * blocking.block
        if last == blocking.block:
            rows_of(blocking.block)
        else:
            with T.If(block < blocks - 1):
                with T.Then():
                    rows_of(blocking.block)
                with T.Else():
                    rows_of(last)

    def _panel(self, panel: Any, first: Any, height: int, width: int) -> None:
        """Multiply `height` rows from `first` on with the first `width` columns of a panel, and store the results."""
        from tvm import tirx
        from tvm.script.ir_builder import tirx as T

        workload, blocking = self._workload, self._blocking
        vectors = -(-width // blocking.lanes)
        chunk = chunk_of(workload.terms)
        chunks = -(-workload.terms // chunk)
        turns = -(-height // blocking.rows)

        # Weights lie in the order in which they are read: each step of a tile prefetches a few weights of the next
        # chunk.
        fetched = -(-blocking.columns // (_LINE * turns))
        step = -(-blocking.columns // (fetched * turns))

        def some(start: Any, length: Any, more: bool) -> None:
            def tile(begin: Any, rows: int) -> None:
                def ahead(r: Any) -> None:
                    for turn in range(fetched):
                        offset = (((begin // blocking.rows) * chunk + r) * fetched + turn) * step
                        index = [panel, start + chunk + offset // blocking.columns, offset % blocking.columns]
                        prefetch(self._weights, index)

                def leave(i: Any, n: Any, total: Any) -> None:
                    at = [begin + i, ramp(n, blocking.lanes)]
                    T.buffer_store(self._sums, self._sums[tuple(at)] + total if more else total, at)

                product(
                    (rows, vectors * blocking.lanes, blocking.lanes), length,
                    lambda i, r: self._x[(*self._row(first + begin + i), start + r)],
                    lambda r, n: self._weights[panel, start + r, n],
                    leave,
                    ahead if blocking.ahead else None,
                )  # fmt: skip

            tiles(height, blocking.rows, tile)

        some(number(0), min(chunk, workload.terms), False)
        if chunks > 1:
            with T.serial(1, chunks) as turn:
                remaining = workload.terms - turn * chunk
                some(
                    turn * chunk,
                    chunk if workload.terms % chunk == 0 else tirx.Min(remaining, number(chunk)),
                    True,
                )
        self._leave(panel, first, height, width)

    def _row(self, row: Any) -> list[Any]:
        """The indices of a row in all dimensions but the last (the column)."""
        indices: list[Any] = []
        sizes = self._workload.image[:-1]
        for at in reversed(range(len(sizes))):
            outer = math.prod(sizes[:at])
            if sizes[at] == 1:
                indices.insert(0, number(0))
            elif outer == 1:
                indices.insert(0, row)
            else:
                indices.insert(0, row % sizes[at])
                row = row // sizes[at]
        return indices

    def _leave(self, panel: Any, first: Any, height: int, width: int) -> None:
        """Store the results after the steps."""
        from tvm.script.ir_builder import tirx as T

        workload, blocking = self._workload, self._blocking

        def vector(row: Any, start: Any, lanes: int) -> None:
            value = self._sums[row, ramp(start, lanes)]
            index = [*self._row(first + row), ramp(panel * blocking.columns + start, lanes)]
            T.buffer_store(self._out, stepped(workload.steps, self._extras, value, index, self._done), index)

        whole = width // blocking.lanes
        with T.serial(0, height) as row:
            if whole:
                with T.serial(0, whole) as turn:
                    vector(row, turn * blocking.lanes, blocking.lanes)
            for start, lanes in pieces(width % blocking.lanes, blocking.lanes):
                vector(row, number(whole * blocking.lanes + start), lanes)
