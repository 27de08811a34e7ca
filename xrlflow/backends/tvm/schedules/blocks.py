"""Functions that all schedulers share: they read a function's blocks, and inline the blocks around the anchor (the
block that does the work)."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

from xrlflow.backends.tvm.schedules.ratings import Tile

# The scope of a tile: a thread's stack. LLVM turns it into registers.
LOCAL = "local"
_UNROLLED = 64
# The number of vectors of results that are computed at the same time if neighbours in memory belong to different
# results.
ABREAST = 4
# Functions with fewer operations run in one thread: waking another thread takes some microseconds.
WORTH_A_THREAD = 30_000


def blocks_of(sch: Any) -> list[Any]:
    """The function's blocks in execution order."""
    return list(sch.get_child_blocks(sch.get_sblock("root")))


def name_of(sch: Any, block: Any) -> str:
    """The name of a block. It identifies the block, since two handles of one block are not equal."""
    return str(sch.get(block).name_hint)


def inline_scalars(sch: Any) -> None:
    """Inline blocks that only compute scalars, so that `can_have_partial_sums` may become true."""
    outputs = outputs_of(sch)
    for block in blocks_of(sch):
        if not list(sch.get_loops(block)) and name_of(sch, block) not in outputs:
            sch.compute_inline(block)


def can_have_partial_sums(sch: Any) -> bool:
    """Whether TVM's rfactor works: it fails with an internal error if there is a block without loops next to the block
    that is split."""
    return all(list(sch.get_loops(block)) for block in blocks_of(sch))


def outputs_of(sch: Any) -> set[str]:
    return {name_of(sch, block) for block in sch.get_output_blocks(sch.get_sblock("root"))}


def anchors_of(sch: Any) -> list[Any]:
    """The blocks that compute a reduction (candidates for the anchor)."""
    return [b for b in blocks_of(sch) if any(int(v.iter_type) == 2 for v in sch.get(b).iter_vars)]


def extent_of(variable: Any) -> int | None:
    extent = variable.dom.extent
    return int(extent) if hasattr(extent, "value") else None


def extents_of(sch: Any, block: Any) -> list[int]:
    return [extent_of(v) or 1 for v in sch.get(block).iter_vars]


def uses(indices: Sequence[Any], variable: Any) -> bool:
    from tvm.tirx.analysis import undefined_vars

    return any(any(v.same_as(variable) for v in undefined_vars(index, [])) for index in indices)


def index_map(function: Any, dimensions: int, sch: Any, block: Any) -> Any:
    from tvm.tirx import IndexMap

    kind = str(sch.get(block).iter_vars[0].var.ty.dtype)
    return IndexMap.from_func(function, ndim=dimensions, index_dtype=kind)


def inline_copies(sch: Any, block: Any) -> None:
    """Inline blocks that only copy (pads of 0) into the anchor."""
    from tvm import tirx
    from tvm.ir.expr import TensorLoad

    for producer in sch.get_producers(block):
        node = sch.get(producer)
        if isinstance(node.body, tirx.BufferStore) and isinstance(node.body.value, TensorLoad):
            sch.compute_inline(producer)


def inline_epilogue(sch: Any, block: Any) -> tuple[Any | None, list[Any]]:
    """Inline the blocks after the anchor. Returns the block that runs on each tile (or None), and the blocks that run
    later.

    Blocks with as many elements as the anchor are inlined into the last of them. A block that broadcasts the result to
    more elements (the gate of a squeeze-and-excitation block) would repeat the work, so it runs later. Operands of the
    last block that do not depend on the anchor (a mask, a slice of another tensor) are inlined, too: TVM moves a block
    under the anchor's loops only together with everything that it reads.
    """
    anchor = name_of(sch, block)
    outputs = outputs_of(sch)
    elements = elements_used(sch, block)
    behind = [b for b in blocks_of(sch) if name_of(sch, b) != anchor and _behind(sch, anchor, b)]
    alike = [b for b in behind if elements_of(sch, b) == elements and not _spreads(sch, anchor, b, elements)]
    last = name_of(sch, alike[-1]) if alike else None
    later = [b for b in behind if name_of(sch, b) in outputs and name_of(sch, b) != last]
    independent = [
        b
        for b in blocks_of(sch)
        if last is not None
        and name_of(sch, b) not in outputs | {anchor}
        and _behind(sch, name_of(sch, b), alike[-1])
        and not _behind(sch, anchor, b)
        and not _behind(sch, name_of(sch, b), block)
    ]
    for other in independent:
        sch.compute_inline(other)
    for middle in behind:
        if name_of(sch, middle) not in outputs | {last}:
            sch.compute_inline(middle)
    return (alike[-1] if alike else None), later


def elements_of(sch: Any, block: Any) -> int:
    node = sch.get(block)
    return math.prod(extent_of(v) or 1 for v in node.iter_vars if int(v.iter_type) == 0)


def elements_used(sch: Any, block: Any) -> int:
    """The number of those results of a block that are used: fewer than all if the only consumer of the block crops
    them."""
    from tvm.ir.expr import TensorLoad

    consumers = list(sch.get_consumers(block))
    if len(consumers) != 1:
        return elements_of(sch, block)
    node = sch.get(consumers[0])
    value = getattr(node.body, "value", None)
    if not isinstance(value, TensorLoad) or len(value.indices) != len(node.body.indices):
        return elements_of(sch, block)
    if not all(a.same_as(b) for a, b in zip(value.indices, node.body.indices)):
        return elements_of(sch, block)
    return elements_of(sch, consumers[0])


def _spreads(sch: Any, anchor: str, block: Any, elements: int) -> bool:
    """Whether a block with more elements lies between the anchor and this block."""
    return any(
        name_of(sch, p) != anchor
        and (elements_of(sch, p) > elements or _spreads(sch, anchor, p, elements))
        and _behind(sch, anchor, p)
        for p in sch.get_producers(block)
    )


def _behind(sch: Any, anchor: str, block: Any) -> bool:
    """Whether a block depends on the anchor."""
    frontier = list(sch.get_producers(block))
    while frontier:
        current = frontier.pop()
        if name_of(sch, current) == anchor:
            return True
        frontier.extend(sch.get_producers(current))
    return False


def unroll(sch: Any, reductions: Sequence[Any]) -> None:
    """Unroll the reductions if they have few steps; otherwise (for large kernels) unroll only the innermost loops."""
    steps = 1
    for loop in reversed(reductions):
        steps *= int(sch.get(loop).extent)
        if steps > _UNROLLED:
            return
        sch.unroll(loop)


def vectorize_tile(sch: Any, final: Any, tile: Tile, outside: int) -> None:
    """Write a tile to memory: unroll the loops inside the `outside` outermost loops, and vectorise the last loop."""
    inside = sch.get_loops(final)[outside:]
    vectors, lane = sch.split(inside[-1], [None, tile.lanes])
    sch.vectorize(lane)
    for loop in (*inside[:-1], vectors):
        sch.unroll(loop)
