"""Products of rows with constant weights, as one kernel.

Weights are packed into panels of columns when the model is compiled. Each task owns some panels, so that each core
reads its weights once. A chunk of a panel (`CHUNK` terms of each sum) stays in the first-level cache while all tiles of
rows are multiplied with it, and the next chunk is fetched meanwhile (Goto and van de Geijn, Anatomy of High-Performance
Matrix Multiplication, 2008). Sums of chunks are added up in memory of the task: the rounding error of an accumulator
grows with the number of its terms.
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
from xrlflow.backends.tvm.kernels.steps import Extra, Step, extras_of, stepped
from xrlflow.backends.tvm.toolchain.import_tvm import tvm
from xrlflow.backends.tvm.toolchain.target import Machine

# Terms that one accumulator sums up.
CHUNK = 128
_MOST_ROWS = 14
# Tiles of one of many blocks.
_LEAST_TILES = 4
# Multiply-adds that take as long as: loading a number for a tile, or a vector of weights from the first-level cache;
# reading a vector from the third-level cache, or from memory.
_BROADCAST, _VECTOR, _FAR, _MEMORY = 0.6, 0.9, 1.0, 11.5
_LAST_LEVEL = 8 << 20
# The floats in a line of a cache.
_LINE = 16


@dataclass(frozen=True, slots=True)
class Product:
    """steps(x w): `image` is the shape of x, [.., row, term], `out` [.., row, column]; weights are [term, column]."""

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


@dataclass(frozen=True, slots=True)
class ProductBlocking:
    """How a kernel is blocked.

    `rows` x `columns`: a tile of accumulators, in vectors of `lanes`. `block`: the rows of a task. `parts`: among how
    many tasks the panels are divided. `ahead`: weights are fetched a chunk ahead, since they come from beyond the
    second-level cache.
    """

    rows: int
    columns: int
    lanes: int
    block: int
    parts: int
    ahead: bool = False

    def panels(self, form: Product) -> int:
        return -(-form.columns // self.columns)

    def numbers(self, form: Product) -> dict[str, int]:
        """See `ways.KernelBlocking`."""
        return {
            "rows": self.rows, "vectors": self.columns // self.lanes, "lanes": self.lanes, "parts": self.parts,
            "ahead": int(self.ahead), "blocks": -(-form.rows // self.block),
        }  # fmt: skip

    def __str__(self) -> str:
        parts, ahead = f" in {self.parts} parts" * (self.parts > 1), ", fetched ahead" * self.ahead
        return f"{self.rows}x{self.columns} by {self.block}{parts}{ahead}"


def plans(form: Product, machine: Machine) -> Iterator[ProductBlocking]:
    """The blockings to choose from, each with and without weights that are fetched ahead."""
    ahead = _is_far(form, machine)
    for how in _blockings(form, machine):
        yield replace(how, ahead=ahead)
        yield replace(how, ahead=not ahead)


def _blockings(form: Product, machine: Machine) -> Iterator[ProductBlocking]:
    """Rows and columns of tiles, and how rows and panels are divided among tasks."""
    lanes = machine.lanes
    while lanes > 4 and lanes // 2 >= form.columns:
        lanes //= 2
    for rows in range(1, min(_MOST_ROWS, form.rows) + 1):
        for vectors in range(1, min(6, -(-form.columns // lanes)) + 1):
            if not machine.keeps(rows, vectors):
                continue
            panels = -(-form.columns // (vectors * lanes))
            for parts in range(1, min(machine.cores, panels) + 1):
                for blocks in _blocks(-(-form.rows // rows), machine.cores):
                    yield ProductBlocking(rows, vectors * lanes, lanes, -(-form.rows // blocks), parts)


def _blocks(most: int, cores: int) -> Iterator[int]:
    """Among how many tasks the rows are divided, at most `most`: a few for each core. Of many rows, blocks that caches
    hold are more, so many that each core gets as many."""
    yield from range(1, min(2 * cores, most) + 1)
    more = 4 * cores
    while more <= most // _LEAST_TILES:
        yield more
        more *= 2


def plan(form: Product, machine: Machine) -> ProductBlocking:
    """The blocking with the least estimated time."""
    best = min(_blockings(form, machine), key=lambda how: _time_of_term(form, how, machine))
    return replace(best, ahead=_is_far(form, machine))


def _is_far(form: Product, machine: Machine) -> bool:
    """Whether weights come from beyond the second-level cache."""
    return _weight_bytes(form) > machine.second_level // 2


def _weight_bytes(form: Product) -> int:
    return 4 * form.terms * form.columns


def cost(form: Product, how: ProductBlocking, machine: Machine) -> float:
    """The estimated time of the busiest core, in multiply-adds of vectors."""
    return form.terms * _time_of_term(form, how, machine)


def _time_of_term(form: Product, how: ProductBlocking, machine: Machine) -> float:
    """The estimated time of the busiest core for one term of the sums, in multiply-adds of vectors."""
    vectors = how.columns // how.lanes

    def tile(rows: int) -> float:
        """Fewer than 8 accumulators wait for one another."""
        return max(rows * vectors, 8) + _BROADCAST * rows + _VECTOR * vectors

    whole, rest = divmod(how.block, how.rows)
    panel = whole * tile(how.rows) + (tile(rest) if rest else 0.0)
    size = _weight_bytes(form)
    if size > machine.second_level // 2:
        panel += vectors * (_MEMORY if size > _LAST_LEVEL else _FAR)
    if 4 * how.block * form.terms > machine.second_level // 2:
        panel += _FAR * how.block / how.lanes
    tasks = -(-form.rows // how.block) * how.parts
    return -(-tasks // machine.cores) * -(-how.panels(form) // how.parts) * panel


def packed(weights: npt.NDArray[np.float32], form: Product, how: ProductBlocking) -> npt.NDArray[np.float32]:
    """Panels [panel, term, column] of weights [.., term, column]; columns after the last are 0."""
    wide = np.zeros((form.terms, how.panels(form) * how.columns), np.float32)
    wide[:, : form.columns] = weights.reshape(form.terms, form.columns)
    return np.ascontiguousarray(wide.reshape(form.terms, -1, how.columns).transpose(1, 0, 2))


def chunk_of(depth: int) -> int:
    """The terms of a chunk: about `CHUNK`, as equal as can be."""
    return -(-depth // max(1, round(depth / CHUNK)))


def kernel(form: Product, how: ProductBlocking) -> Any:
    """The PrimFunc with parameters x, weights (`packed`), the extras of the steps in their order, and the result."""
    tvm()
    from tvm.script.ir_builder import IRBuilder
    from tvm.script.ir_builder import tirx as T

    with IRBuilder() as builder:
        with T.prim_func(is_private=True, s_tir=True):
            T.func_attr({SCHEDULED: True, "op_pattern": OPAQUE, "tirx.noalias": True})
            x = T.arg("x", T.buffer(form.image, FLOAT))
            weights = T.arg("weights", T.buffer((how.panels(form), form.terms, how.columns), FLOAT))
            shapes = [form.out[-1:] if extra.by_channel else form.out for extra in form.extras]
            extras = [T.arg(f"x{i}", T.buffer(shape, FLOAT)) for i, shape in enumerate(shapes)]
            out = T.arg("out", T.buffer(form.out, FLOAT))
            blocks = -(-form.rows // how.block)
            count = how.parts * blocks
            tasks = T.parallel(0, count) if count > 1 else T.serial(0, count)
            with T.sblock("root"), tasks as task, T.sblock("product"):
                T.reads([])
                T.writes([])
                _Task(form, how, x, weights, extras, out).write(task // blocks, task % blocks)
        return builder.get()


class _Task:
    """Writes the loops of one task into the function that is being built."""

    def __init__(
        self, form: Product, how: ProductBlocking, x: Any, weights: Any, extras: Sequence[Any], out: Any
    ) -> None:
        from tvm.script.ir_builder import tirx as T

        self._form, self._how = form, how
        self._x, self._weights, self._extras, self._out = x, weights, extras, out
        self._sums = T.alloc_buffer((how.block, how.columns), FLOAT)
        self._done = T.alloc_buffer((len(form.steps) + 1, how.lanes), FLOAT, scope=LOCAL)

    def write(self, part: Any, block: Any) -> None:
        from tvm import tirx
        from tvm.script.ir_builder import tirx as T

        form, how = self._form, self._how
        panels, blocks = how.panels(form), -(-form.rows // how.block)
        rest = form.columns % how.columns

        def panel_of(panel: Any, height: int) -> None:
            """One panel with so many rows of the block."""
            if not rest:
                self._panel(panel, block * how.block, height, how.columns)
                return
            with T.If(panel < panels - 1):
                with T.Then():
                    self._panel(panel, block * how.block, height, how.columns)
                with T.Else():
                    self._panel(number(panels - 1), block * how.block, height, rest)

        def rows_of(height: int) -> None:
            # The first parts have one panel more.
            least, more = divmod(panels, how.parts)
            first = part * least + tirx.Min(part, number(more))
            with T.serial(
                0, least + tirx.Select(part < more, number(1), number(0)) if more else least
            ) as turn:
                panel_of(first + turn, height)

        last = form.rows - (blocks - 1) * how.block
        if last == how.block:
            rows_of(how.block)
        else:
            with T.If(block < blocks - 1):
                with T.Then():
                    rows_of(how.block)
                with T.Else():
                    rows_of(last)

    def _panel(self, panel: Any, first: Any, height: int, width: int) -> None:
        """Multiply `height` rows from the `first` on with `width` columns of a panel, and store the results."""
        from tvm import tirx
        from tvm.script.ir_builder import tirx as T

        form, how = self._form, self._how
        vectors = -(-width // how.lanes)
        chunk = chunk_of(form.terms)
        chunks = -(-form.terms // chunk)
        turns = -(-height // how.rows)

        # Weights are in the order in which they are read: each step of a tile fetches a few of the next chunk's.
        fetched = -(-how.columns // (_LINE * turns))
        step = -(-how.columns // (fetched * turns))

        def some(start: Any, length: Any, more: bool) -> None:
            def tile(begin: Any, rows: int) -> None:
                def ahead(r: Any) -> None:
                    for turn in range(fetched):
                        near = (((begin // how.rows) * chunk + r) * fetched + turn) * step
                        place = [panel, start + chunk + near // how.columns, near % how.columns]
                        prefetch(self._weights, place)

                def leave(i: Any, n: Any, total: Any) -> None:
                    at = [begin + i, ramp(n, how.lanes)]
                    T.buffer_store(self._sums, self._sums[tuple(at)] + total if more else total, at)

                product(
                    (rows, vectors * how.lanes, how.lanes), length,
                    lambda i, r: self._x[(*self._row(first + begin + i), start + r)],
                    lambda r, n: self._weights[panel, start + r, n],
                    leave,
                    ahead if how.ahead else None,
                )  # fmt: skip

            tiles(height, how.rows, tile)

        some(number(0), min(chunk, form.terms), False)
        if chunks > 1:
            with T.serial(1, chunks) as turn:
                left = form.terms - turn * chunk
                some(turn * chunk, chunk if form.terms % chunk == 0 else tirx.Min(left, number(chunk)), True)
        self._leave(panel, first, height, width)

    def _row(self, row: Any) -> list[Any]:
        """The indices of a row, without that of the column."""
        found: list[Any] = []
        sizes = self._form.image[:-1]
        for at in reversed(range(len(sizes))):
            outer = math.prod(sizes[:at])
            if sizes[at] == 1:
                found.insert(0, number(0))
            elif outer == 1:
                found.insert(0, row)
            else:
                found.insert(0, row % sizes[at])
                row = row // sizes[at]
        return found

    def _leave(self, panel: Any, first: Any, height: int, width: int) -> None:
        """Store the results of the steps."""
        from tvm.script.ir_builder import tirx as T

        form, how = self._form, self._how

        def vector(row: Any, start: Any, lanes: int) -> None:
            value = self._sums[row, ramp(start, lanes)]
            index = [*self._row(first + row), ramp(panel * how.columns + start, lanes)]
            T.buffer_store(self._out, stepped(form.steps, self._extras, value, index, self._done), index)

        whole = width // how.lanes
        with T.serial(0, height) as row:
            if whole:
                with T.serial(0, whole) as turn:
                    vector(row, turn * how.lanes, how.lanes)
            for start, lanes in pieces(width % how.lanes, how.lanes):
                vector(row, number(whole * how.lanes + start), lanes)
