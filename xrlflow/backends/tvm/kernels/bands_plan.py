"""Chooses the blockings of kernels for inverted residuals (see `bands`), by estimated time."""

from __future__ import annotations

import math
from collections.abc import Iterator

from xrlflow.backends.tvm.kernels.bands import BandBlocking, ConvBlock, Tile
from xrlflow.backends.tvm.kernels.steps import Step
from xrlflow.backends.tvm.toolchain.target import Machine

# This many accumulators keep the multipliers busy.
_BUSY = 10
_MOST_ROWS, _MOST_VECTORS, _MOST_BLOCK = 14, 4, 96
# The kernel unrolls the loop over all taps, of which there may be at most the first number. For images of at most
# `_FEW_PIXELS` pixels, pointwise convolutions in kernels of their own have poor tiles.
_MOST_TAPS, _FEW_PIXELS = 49, 256
# An expansion sums all channels of a pixel in one accumulator, while the direct kernel sums in chunks. With more terms
# than this, it rounds more. (Error divided by ONNX Runtime's, for positive pixels: 0.9 to 1.2 up to 256 terms, 1.4 to
# 1.5 with 384 terms, 1.6 to 1.7 with 512 terms.)
_MOST_TERMS = 256
# Times in multiply-adds of vectors: a step on a vector; a step that calls a function; storing and loading a vector of
# sums; reading a vector that has left the second-level cache; reading a vector of weights from the third-level cache.
_STEP, _FUNCTION, _SUM, _SPILLED, _FAR = 2.0, 30.0, 2.0, 10.0, 1.0


def untuned_blocking(workload: ConvBlock, machine: Machine) -> BandBlocking | None:
    """The blocking that an untuned compilation uses for an inverted residual; None: one kernel for each convolution."""
    return best_blocking(workload, machine) if gains(workload, machine) else None


def best_blocking(workload: ConvBlock, machine: Machine) -> BandBlocking:
    """The blocking with the least estimated time."""
    return min(blockings(workload, machine), key=lambda blocking: cost(workload, blocking, machine))


def blockings(workload: ConvBlock, machine: Machine) -> Iterator[BandBlocking]:
    """The blockings to choose from."""
    lanes = machine.lanes
    while lanes > 1 and (
        workload.middle[3] < lanes or (workload.project is None and workload.middle[3] % lanes)
    ):
        lanes //= 2
    height, shapes = workload.middle[1], tuple(_tiles(machine, lanes))
    project = min(shapes, key=lambda tile: _product(workload.out[2], workload.out[3], 1, tile, lanes))
    bands = {-(-height // n) for n in range(1, min(height, 32) + 1)}
    for columns in sorted({tile.columns for tile in shapes}):
        of = [tile for tile in shapes if tile.columns == columns]
        expand = min(of, key=lambda tile: _product(workload.image[2], columns, 1, tile, lanes))
        for block in range(
            columns, min(_MOST_BLOCK, -(-workload.middle[3] // columns) * columns) + 1, columns
        ):
            for band in bands:
                for parts in range(1, machine.cores + 1):
                    blocking = BandBlocking(expand, project, lanes, block, band, parts)
                    share = -(-blocking.blocks(workload) // parts)
                    if share * (parts - 1) < blocking.blocks(workload):
                        yield blocking


def _tiles(machine: Machine, lanes: int) -> Iterator[Tile]:
    """The tiles of accumulators that fit into the registers."""
    for vectors in range(1, _MOST_VECTORS + 1):
        most = max(rows for rows in range(1, _MOST_ROWS + 1) if rows == 1 or machine.keeps(rows, vectors))
        for rows in range(max(1, most // 2), most + 1):
            yield Tile(rows, vectors * lanes)


def cost(workload: ConvBlock, blocking: BandBlocking, machine: Machine) -> float:
    """The estimated time until the busiest core has finished, in multiply-adds of vectors at a core's peak."""
    return math.fsum(terms(workload, blocking, machine).values())


def terms(workload: ConvBlock, blocking: BandBlocking, machine: Machine) -> dict[str, float]:
    """The parts of `cost`."""
    lanes, rows = blocking.lanes, blocking.rows(workload)
    tasks = workload.out[0] * blocking.bands(workload) * blocking.parts
    # Every task counts with all its rows, even if rows of the last task lie below the image.
    shares = -(-tasks // machine.cores) * -(-blocking.blocks(workload) // blocking.parts)
    vectors = blocking.block // lanes
    width, out = workload.image[2], workload.out[2]
    wide = vectors * rows * workload.width
    parts = {"expand": 0.0, "project": 0.0, "sums": 0.0, "far": 0.0}
    weights = workload.window[0] * workload.window[1] * vectors
    if workload.expand is not None:
        parts["expand"] = rows * _product(width, blocking.block, workload.image[3], blocking.expand, lanes)
        parts["steps"] = wide * _steps(workload.expand)
        weights += workload.image[3] * vectors
    else:
        parts["steps"] = 2.0 * wide
    taps = workload.window[0] * workload.window[1]
    parts["filter"] = blocking.band * out * vectors * (taps + 2.0)
    parts["steps"] += blocking.band * out * vectors * _steps(workload.depthwise)
    if workload.project is not None:
        columns = blocking.panels(workload) * blocking.project.columns
        parts["project"] = blocking.band * _product(out, columns, blocking.block, blocking.project, lanes)
        parts["sums"] = _SUM * blocking.band * out * columns / lanes
        weights += blocking.block * columns // lanes
    used = 4 * lanes * (wide + weights)
    if workload.project is not None:
        used += 4 * blocking.band * out * blocking.panels(workload) * blocking.project.columns
    parts["spilled"] = _SPILLED * wide if used > machine.second_level // 2 else 0.0
    parts["far"] = _FAR * weights
    total = {name: shares * value for name, value in parts.items()}
    if workload.project is not None:
        total["leave"] = (
            math.prod(workload.out[:3])
            / machine.cores
            * blocking.panels(workload)
            * blocking.project.columns
            / lanes
            * (_steps(workload.project) + blocking.parts)
        )
    return total


def _steps(steps: tuple[Step, ...]) -> float:
    """The estimated time for the steps on a vector and for storing this vector, in multiply-adds of vectors."""
    return 1.0 + math.fsum(_FUNCTION if step.operator == "relax.sigmoid" else _STEP for step in steps)


def _product(width: int, columns: int, channels: int, tile: Tile, lanes: int) -> float:
    """The estimated time for the products of a row of pixels with panels of weights, in multiply-adds of vectors. With
    fewer than `_BUSY` accumulators, multiplications wait for one another."""
    vectors = tile.columns // lanes
    whole, remainder = divmod(width, tile.rows)
    pieces = [(tile.rows, whole)] + ([(remainder, 1)] if remainder else [])
    panels = -(-columns // tile.columns)
    return (
        panels
        * channels
        * math.fsum(count * max(rows * vectors, _BUSY, rows + vectors) for rows, count in pieces)
    )


def gains(workload: ConvBlock, machine: Machine) -> bool:
    """Whether one fused kernel is usually faster than one kernel for each convolution.

    Measured on Zen 3, with 1 and 2 threads: with an expansion, the fused kernel was 1.04 to 1.6 times as fast; for a
    depthwise convolution and a projection without an expansion, 0.84 to 0.99 times at 112x112 and 56x56, and 1.03 to
    1.18 times at 14x14 and 7x7.
    """
    return possible(workload, machine) and (
        workload.expand is not None or math.prod(workload.middle[1:3]) <= _FEW_PIXELS
    )


def possible(workload: ConvBlock, machine: Machine) -> bool:
    """Whether one kernel may compute the workload: it must not round much more than one kernel for each convolution."""
    if workload.middle[3] < machine.lanes or math.prod(workload.window) > _MOST_TAPS:
        return False
    return workload.expand is None or workload.image[3] <= _MOST_TERMS
