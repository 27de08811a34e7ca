"""Parts of kernels that are written with TVM's builder: loops, vectors, products as tiles of accumulators."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

SCHEDULED = "tirx.is_scheduled"
OPAQUE = 8
FLOAT = "float32"
LOCAL = "local"


def pieces(extent: int, lanes: int) -> list[tuple[int, int]]:
    """Split `extent` into vectors of `lanes`, and into vectors of half of them, a quarter, ... at the end: [(start,
    length)]."""
    result, start = [], 0
    while start < extent:
        while lanes > extent - start:
            lanes //= 2
        result.append((start, lanes))
        start += lanes
    return result


def along(extent: int, lanes: int, body: Callable[[Any, int], None]) -> None:
    """Call `body` for each piece (start, length) of `extent`: in a loop over full vectors, then for the shorter
    vectors."""
    from tvm.script.ir_builder import tirx as T

    whole = extent // lanes
    if whole:
        with T.serial(0, whole) as turn:
            body(turn * lanes, lanes)
    for start, length in pieces(extent % lanes, lanes):
        body(number(whole * lanes + start), length)


def number(value: int) -> Any:
    """A constant index."""
    from tvm import tirx

    return tirx.const(value, "int32")


def ramp(first: Any, lanes: int) -> Any:
    """The indices of a vector that begins at `first`."""
    from tvm import tirx

    return first if lanes == 1 else tirx.Ramp(first, 1, lanes)


def spread(value: float, lanes: int) -> Any:
    """A vector that has `value` in all lanes."""
    from tvm import tirx

    one = tirx.const(value, FLOAT)
    return one if lanes == 1 else tirx.Broadcast(one, lanes)


def lanes_of(vector: Any) -> int:
    """The lanes of a vector, or of vector indices."""
    return int(vector.ty.dtype.lanes)


def where(condition: Any | None, body: Callable[[], None]) -> None:
    """Write `body` under a condition (None: without a condition)."""
    from tvm.script.ir_builder import tirx as T

    if condition is None:
        body()
    else:
        with T.If(condition), T.Then():
            body()


def prefetch(buffer: Any, index: Sequence[Any]) -> None:
    """Fetch an element of a buffer into the caches, because it will be read soon."""
    from tvm import tirx
    from tvm.script.ir_builder import tirx as T

    address = tirx.call_intrin("handle", "tirx.address_of", buffer[tuple(index)])
    read, locality, data = (tirx.const(n, "int32") for n in (0, 3, 1))
    T.evaluate(tirx.call_intrin("void", "tirx.prefetch", address, read, locality, data))


def tiles(extent: int, size: int, body: Callable[[Any, int], None]) -> None:
    """Call `body` for each piece (start, length) of `extent`: in a loop over pieces of `size`, then for the
    remainder."""
    from tvm.script.ir_builder import tirx as T

    whole, remainder = divmod(extent, size)
    if whole:
        with T.serial(0, whole) as turn:
            body(turn * size, size)
    if remainder:
        body(number(whole * size), remainder)


def product(
    tile: tuple[int, int, int], reduction: int,
    a: Callable[[Any, Any], Any], b: Callable[[Any, Any], Any], leave: Callable[[Any, Any, Any], None],
    ahead: Callable[[Any], None] | None = None,
) -> None:  # fmt: skip
    """Compute a tile (rows, columns, lanes) of accumulators: the sums over r of a(i, r) b(r, n).

    `leave` stores results: it gets a row, the first column of a vector, and the sums of this vector. `ahead` is called
    for each r, to prefetch what is read later.
    """
    from tvm import tirx
    from tvm.script.ir_builder import tirx as T

    rows, columns, lanes = tile
    sums = T.alloc_buffer((rows, columns), FLOAT, scope=LOCAL)

    def each(body: Callable[[Any, Any], None]) -> None:
        with (
            T.unroll(0, rows) as i,
            T.unroll(0, columns // lanes) as vector,
            T.vectorized(0, lanes) as lane,
        ):
            body(i, vector * lanes + lane)

    each(lambda i, n: T.buffer_store(sums, tirx.const(0.0, FLOAT), [i, n]))
    with T.serial(0, reduction) as r:
        if ahead is not None:
            ahead(r)
        each(lambda i, n: T.buffer_store(sums, sums[i, n] + a(i, r) * b(r, n), [i, n]))
    with T.unroll(0, rows) as i, T.unroll(0, columns // lanes) as vector:
        leave(i, vector * lanes, sums[i, ramp(vector * lanes, lanes)])
