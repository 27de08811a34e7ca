"""The loops of generated kernels, from the outermost to the innermost: how much each iteration computes and reads.

They are derived from the workload and the blocking, without generating the kernel, since a model that predicts times
needs the loops of thousands of kernels.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from xrlflow.backends.tvm.kernels import bands, direct, products, winograd
from xrlflow.backends.tvm.kernels.layer_kernels import (
    Algorithm,
    KernelChoice,
    LayerWorkload,
    product_of,
    winograd_of,
)
from xrlflow.backends.tvm.schedules import ratings

_FLOAT = 4


@dataclass(frozen=True, slots=True)
class Loop:
    """A loop of `extent` iterations. In one iteration, `work` vectors are multiplied and added. `image`, `weights`,
    `results`: how many different numbers an iteration uses of the image (or of its copies), of the weights, and of the
    sums or results."""

    extent: int
    work: float
    image: float
    weights: float
    results: float

    @property
    def numbers(self) -> tuple[float, ...]:
        return self.extent, self.work, self.image, self.weights, self.results


def loops_of(workload: LayerWorkload, choice: KernelChoice) -> list[Loop]:
    """The loops of a layer's kernel; an empty list for TILES without a blocking."""
    match choice.blocking:
        case ratings.TileBlocking():
            return _tiles(workload, choice.blocking)
        case direct.DirectBlocking():
            assert isinstance(workload, direct.Convolution)
            return _direct(workload, choice.blocking)
        case products.ProductBlocking():
            return _product(product_of(workload), choice.blocking)
        case winograd.WinogradBlocking():
            m = choice.algorithm.m
            assert m is not None
            return _winograd(winograd_of(workload, m), choice.blocking)
    assert choice.algorithm is Algorithm.TILES
    return []


def weights_of(workload: LayerWorkload, choice: KernelChoice) -> int:
    """The number of weights that a layer's kernel reads. Winograd's algorithms transform the weights to a larger number
    of weights."""
    m = choice.algorithm.m
    plain = workload.terms * workload.out[-1]
    return plain if m is None else plain * (m + 2) ** 2 // 9


def _product(workload: products.Product, blocking: products.ProductBlocking) -> list[Loop]:
    """The loops of a product kernel, over tasks, panels, chunks, tiles of rows, and terms."""
    block, columns, terms = min(blocking.block, workload.rows), blocking.columns, workload.terms
    panels, vectors = -(-blocking.panels(workload) // blocking.parts), columns // blocking.lanes
    chunk, rows = products.chunk_of(terms), min(blocking.rows, block)
    return [
        Loop(
            blocking.parts * -(-workload.rows // blocking.block), block * panels * vectors * terms, block * terms,
            terms * columns * panels, block * columns * panels,
        ),
        Loop(panels, block * vectors * terms, block * terms, terms * columns, block * columns),
        Loop(-(-terms // chunk), block * vectors * chunk, block * chunk, chunk * columns, block * columns),
        Loop(-(-block // rows), rows * vectors * chunk, rows * chunk, chunk * columns, rows * columns),
        Loop(chunk, rows * vectors, rows, columns, rows * columns),
    ]  # fmt: skip


def _tiles(workload: LayerWorkload, blocking: ratings.TileBlocking) -> list[Loop]:
    """The loops of TVM's loops in tiles: over tiles along one dimension of the results, tiles along the other
    dimension, taps, chunks of channels, and channels."""
    tile = blocking.tile
    rows, columns, vectors = tile.rows, tile.columns, tile.columns // tile.lanes
    if isinstance(workload, products.Product):
        pixels, taps, channels, wide, groups = workload.rows, 1, workload.terms, workload.columns, 1
    else:
        pixels, taps = math.prod(workload.out[:-1]), math.prod(workload.window)
        channels, wide, groups = workload.channels, workload.columns, workload.groups
        if channels == 1:
            wide, groups = workload.out[-1], 1
    terms, chunk = taps * channels, min(channels, 128)
    down, across = -(-pixels // rows), groups * -(-wide // columns)
    first, second = (across, down) if blocking.columns_first else (down, across)
    work, one = rows * vectors * terms, rows * columns
    extents = (second * rows, terms * columns) if blocking.columns_first else (rows, terms * columns * second)
    return [
        Loop(first, second * work, extents[0] * terms, extents[1], second * one),
        Loop(second, work, rows * terms, terms * columns, one),
        Loop(taps, rows * vectors * channels, rows * channels, channels * columns, one),
        Loop(-(-channels // chunk), rows * vectors * chunk, rows * chunk, chunk * columns, one),
        Loop(chunk, rows * vectors, rows, columns, one),
    ]


def _direct(workload: direct.Convolution, blocking: direct.DirectBlocking) -> list[Loop]:
    """The loops of a direct kernel, over tasks, panels, rows of a task, tiles of pixels, lines of the window, and
    channels."""
    lines, across = workload.window[0] * workload.window[1], workload.window[2]
    band, span, panels = (
        min(blocking.band, workload.results[1]),
        min(blocking.span, workload.results[2]),
        blocking.panels(workload),
    )
    columns = blocking.vectors * blocking.lanes
    tasks = (
        workload.out[0]
        * workload.results[0]
        * blocking.bands(workload)
        * blocking.spans(workload)
        * blocking.units(workload)
    )
    copied = workload.window[0] * blocking.rows(workload) * blocking.width(workload) * blocking.slot(workload)
    line = blocking.width(workload) * blocking.slot(workload)
    weights, pixels = lines * across * workload.channels * columns, min(blocking.pixels, span)
    row = span * blocking.vectors * lines * across * workload.channels
    columns_read = (pixels - 1) * workload.strides[2] + (across - 1) * workload.dilations[2] + 1
    step = pixels * blocking.vectors * across
    return [
        Loop(tasks, panels * band * row, copied, panels * weights, band * span * columns * panels),
        Loop(panels, band * row, copied, weights, band * span * columns),
        Loop(band, row, lines * line, weights, span * columns),
        Loop(
            -(-span // pixels),
            step * lines * workload.channels,
            columns_read * blocking.slot(workload) * lines,
            weights,
            pixels * columns,
        ),
        Loop(
            lines,
            step * workload.channels,
            columns_read * blocking.slot(workload),
            weights // lines,
            pixels * columns,
        ),
        Loop(workload.channels, step, columns_read, across * columns, pixels * columns),
    ]


def _winograd(workload: winograd.WinogradConvolution, blocking: winograd.WinogradBlocking) -> list[Loop]:
    """The loops of a Winograd kernel, over tasks, panels, points, chunks of channels, tiles of rows, and channels."""
    points, vectors = workload.n * workload.n, blocking.columns // blocking.lanes
    panels = -(-blocking.panels(workload) // blocking.parts)
    block, columns, channels = blocking.block, blocking.columns, workload.channels
    chunk = min(channels, winograd.CHUNK)
    point = block * vectors * channels
    return [
        Loop(
            workload.groups * -(-workload.tiles // block) * blocking.parts, panels * points * point,
            points * block * channels, points * channels * columns * panels,
            workload.m * workload.m * block * columns * panels,
        ),
        Loop(panels, points * point, points * block * channels, points * channels * columns, points * block * columns),
        Loop(points, point, block * channels, channels * columns, block * columns),
        Loop(-(-channels // chunk), block * vectors * chunk, block * chunk, chunk * columns, block * columns),
        Loop(
            -(-block // blocking.rows), blocking.rows * vectors * chunk, blocking.rows * chunk, chunk * columns,
            blocking.rows * columns,
        ),
        Loop(chunk, blocking.rows * vectors, blocking.rows, columns, blocking.rows * columns),
    ]  # fmt: skip


def loops_of_bands(workload: bands.ConvBlock, blocking: bands.BandBlocking) -> list[Loop]:
    """The loops of a kernel for an inverted residual: over tasks and over blocks of channels, and then the first loop
    of each part of a block (expansion, windows, projection)."""
    rows, width, out = blocking.rows(workload), workload.image[2], workload.out[2]
    blocks, vectors = -(-blocking.blocks(workload) // blocking.parts), blocking.block // blocking.lanes
    taps = math.prod(workload.window)
    entering = workload.image[3] if workload.expand is not None else 1
    leaving = blocking.panels(workload) * blocking.project.columns if workload.project is not None else 0
    expand = rows * width * vectors * entering if workload.expand is not None else 0
    windows = blocking.band * out * vectors * taps
    project = blocking.band * out * blocking.block * leaving / blocking.lanes
    image = rows * width * (entering if workload.expand is not None else blocking.block)
    weights = blocking.block * (entering * (workload.expand is not None) + taps + leaving)
    results = blocking.band * out * (leaving or blocking.block)
    work = expand + windows + project
    tasks = workload.out[0] * blocking.bands(workload) * blocking.parts
    return [
        Loop(tasks, blocks * work, image, blocks * weights, results),
        Loop(blocks, work, image, weights, results),
        Loop(rows, expand / rows, width * entering, blocking.block * entering, width * blocking.block),
        Loop(
            blocking.band,
            windows / blocking.band,
            width * blocking.block * workload.window[0],
            blocking.block * taps,
            out * blocking.block,
        ),
        Loop(
            blocking.band,
            project / blocking.band,
            out * blocking.block,
            blocking.block * leaving,
            out * leaving,
        ),
    ]


def weights_of_bands(workload: bands.ConvBlock) -> int:
    """The number of weights that the kernel of an inverted residual reads."""
    wide = workload.middle[3]
    expand = workload.image[3] if workload.expand is not None else 0
    return wide * (
        expand + math.prod(workload.window) + (workload.out[3] if workload.project is not None else 0)
    )


def totals(loops: Sequence[Loop]) -> list[float]:
    """How often the body of each loop runs: the product of the extents of this loop and of all loops around it."""
    runs, total = [], 1.0
    for loop in loops:
        total *= loop.extent
        runs.append(total)
    return runs
