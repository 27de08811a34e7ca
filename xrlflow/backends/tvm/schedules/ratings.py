"""Tiles of accumulators for a contraction, with ratings of their expected speed."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from xrlflow.backends.tvm.toolchain.target import Machine

_MOST_ROWS = 14
# The speed of a tile that LLVM does not keep in registers, relative to other tiles.
_SPILLS = 0.5
# Rows whose distance is a multiple of this number of bytes share a set of an 8-way first-level cache.
_PAGE = 4096
_WAYS = 8


@dataclass(frozen=True, slots=True)
class Tile:
    """Accumulators in registers: `rows` x `columns` values, the columns in vectors of `lanes`."""

    rows: int
    columns: int
    lanes: int


@dataclass(frozen=True, slots=True)
class TileBlocking:
    """The blocking of a contraction: its tile, and the order of tiles: whether the tiles of one column follow each
    other, or the tiles of one row."""

    tile: Tile
    columns_first: bool

    def __str__(self) -> str:
        tile, first = self.tile, "columns" if self.columns_first else "rows"
        return f"{tile.rows}x{tile.columns} of {tile.lanes}, {first} first"


@dataclass(frozen=True, slots=True)
class Grid:
    """The outputs of a contraction: `rows` x `columns`, each the sum of `reduction` products.

    Rows of the broadcast operand are at least `row_stride` bytes apart. `pad_rows`, `pad_columns`: they may be padded
    to multiples of a tile. `channelwise`: nothing is broadcast, each column has its own weights.
    """

    rows: int
    columns: int
    row_stride: int
    reduction: int
    pad_rows: bool = False
    pad_columns: bool = False
    channelwise: bool = False


def tile_of(grid: Grid, machine: Machine) -> Tile:
    """The tile of a contraction: the tile of `rated_tiles` with the best rating (of equal ratings, the first)."""
    rated = list(rated_tiles(grid, machine))
    highest = max(value for value, _ in rated)
    return next(tile for value, tile in rated if value > highest - 1e-9)


def rated_tiles(grid: Grid, machine: Machine) -> Iterator[tuple[float, Tile]]:
    """Tiles that fit into the registers, with their ratings.

    - A step of the reduction loads rows + columns / lanes operands for rows x columns / lanes multiply-adds, so a
      squarer tile loads less. But the vectors come from the second-level cache, where the panel is, and cost as much as
      three broadcasts: a higher tile loads fewer of them. (For 21 shapes that networks have, the tile chosen by these
      ratings took 1.02 times as long as the best one on average, at most 1.11; without this rule 1.06 and 1.33.)
    - A tile may not need more registers than there are, and is slower if LLVM spills some.
    - With fewer than 8 accumulators, multipliers wait for their own results.
    - Rows must not evict each other from the first-level cache, and a panel of reduction x columns must fit in half of
      the second-level cache.
    - A tile divides the output. If the output may be padded, useless work is weighed against the better shape.

    For channelwise tiles see `_channelwise`.
    """
    if grid.channelwise:
        yield from _channelwise(grid, machine)
        return
    most = _WAYS if grid.row_stride % _PAGE == 0 else _MOST_ROWS
    for lanes in (n for n in (machine.lanes, machine.lanes // 2, machine.lanes // 4, 1) if n >= 1):
        for vectors in range(1, 9):
            width = vectors * lanes
            if grid.columns % width and not (grid.pad_columns and lanes > 1):
                continue
            if vectors > 1 and grid.reduction * width * 4 > machine.second_level // 2:
                continue
            for height in range(1, min(grid.rows, most) + 1):
                accumulators = height * vectors
                if grid.rows % height and not grid.pad_rows:
                    continue
                if accumulators + vectors + 1 > machine.registers:
                    continue
                speed = 1.0 if machine.keeps(height, vectors) else _SPILLS
                busy = min(1.0, accumulators / 8)
                loads = (height + vectors) / accumulators
                far = 1.0 / height
                useful = _useful(grid.rows, height) * _useful(grid.columns, width)
                yield (
                    useful * busy * speed * (lanes / machine.lanes) / (1.0 + 0.5 * loads + far),
                    Tile(height, width, lanes),
                )


def _channelwise(grid: Grid, machine: Machine) -> Iterator[tuple[float, Tile]]:
    """Tiles of a channelwise contraction, with their ratings.

    Every product loads its own operand. Only the weights are shared, if they stay in registers next to the accumulators
    while the tile moves along a row. Two accumulators keep the multipliers busy, since loads take most of the time;
    more accumulators are not faster (measured: 1.4 to 2.2 times as fast as the tile of a product).
    """
    for lanes in (n for n in (machine.lanes, machine.lanes // 2, machine.lanes // 4, 1) if n >= 1):
        for vectors in range(1, 5):
            if grid.columns % (vectors * lanes):
                continue
            for height in range(1, min(grid.rows, _MOST_ROWS) + 1):
                accumulators = height * vectors
                if grid.rows % height or accumulators + 1 > machine.registers:
                    continue
                in_registers = grid.reduction * vectors + accumulators + 1 <= machine.registers
                busy = min(1.0, accumulators / 2) / (1.0 + 0.015 * accumulators)
                yield (
                    busy * (lanes / machine.lanes) * (1.0 if in_registers else 0.7),
                    Tile(height, vectors * lanes, lanes),
                )


def _useful(extent: int, step: int) -> float:
    """The useful fraction of a padded dimension, reduced by the cost of the padded copy."""
    padded = -(-extent // step) * step
    return extent / padded * (0.9 if padded != extent else 1.0)
