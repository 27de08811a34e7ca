"""The loops of our kernels, from the outermost to the innermost, as numbers: what a turn computes and touches.

They are read off a layer and a blocking, without writing the kernel: a model of times asks for thousands of them.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from xrlflow.backends.tvm.kernels import bands, direct, products, winograd
from xrlflow.backends.tvm.kernels.ways import Algorithm, LayerForm, Way, product_of, winograd_of
from xrlflow.backends.tvm.schedules import ratings

_FLOAT = 4


@dataclass(frozen=True, slots=True)
class Loop:
    """`extent` turns. One turn multiplies and adds `work` vectors, and touches so many different numbers of the image
    (or of what was made of it), of the weights, and of the sums or results."""

    extent: int
    work: float
    image: float
    weights: float
    results: float

    @property
    def numbers(self) -> tuple[float, ...]:
        return self.extent, self.work, self.image, self.weights, self.results


def loops_of(form: LayerForm, way: Way) -> list[Loop]:
    """The loops of a layer's kernel; none if tiles have no choice."""
    match way.plan:
        case ratings.TileBlocking():
            return _tiles(form, way.plan)
        case direct.DirectBlocking():
            assert isinstance(form, direct.Convolution)
            return _direct(form, way.plan)
        case products.ProductBlocking():
            return _product(product_of(form), way.plan)
        case winograd.WinogradBlocking():
            m = way.algorithm.m
            assert m is not None
            return _winograd(winograd_of(form, m), way.plan)
    assert way.algorithm is Algorithm.TILES
    return []


def weights_of(form: LayerForm, way: Way) -> int:
    """How many weights a layer's kernel reads: those of Winograd's are transformed."""
    m = way.algorithm.m
    plain = form.terms * form.out[-1]
    return plain if m is None else plain * (m + 2) ** 2 // 9


def _product(form: products.Product, how: products.ProductBlocking) -> list[Loop]:
    """Tasks, panels, chunks, tiles of rows, terms."""
    block, columns, terms = min(how.block, form.rows), how.columns, form.terms
    panels, vectors = -(-how.panels(form) // how.parts), columns // how.lanes
    chunk, rows = products.chunk_of(terms), min(how.rows, block)
    return [
        Loop(
            how.parts * -(-form.rows // how.block), block * panels * vectors * terms, block * terms,
            terms * columns * panels, block * columns * panels,
        ),
        Loop(panels, block * vectors * terms, block * terms, terms * columns, block * columns),
        Loop(-(-terms // chunk), block * vectors * chunk, block * chunk, chunk * columns, block * columns),
        Loop(-(-block // rows), rows * vectors * chunk, rows * chunk, chunk * columns, rows * columns),
        Loop(chunk, rows * vectors, rows, columns, rows * columns),
    ]  # fmt: skip


def _tiles(form: LayerForm, how: ratings.TileBlocking) -> list[Loop]:
    """Tiles along one dimension of the results, then along the other; taps; chunks of channels; channels."""
    tile = how.tile
    rows, columns, vectors = tile.rows, tile.columns, tile.columns // tile.lanes
    if isinstance(form, products.Product):
        pixels, taps, channels, wide, groups = form.rows, 1, form.terms, form.columns, 1
    else:
        pixels, taps = math.prod(form.out[:-1]), math.prod(form.window)
        channels, wide, groups = form.channels, form.columns, form.groups
        if channels == 1:
            wide, groups = form.out[-1], 1
    terms, chunk = taps * channels, min(channels, 128)
    down, across = -(-pixels // rows), groups * -(-wide // columns)
    first, second = (across, down) if how.columns_first else (down, across)
    work, one = rows * vectors * terms, rows * columns
    whole = (second * rows, terms * columns) if how.columns_first else (rows, terms * columns * second)
    return [
        Loop(first, second * work, whole[0] * terms, whole[1], second * one),
        Loop(second, work, rows * terms, terms * columns, one),
        Loop(taps, rows * vectors * channels, rows * channels, channels * columns, one),
        Loop(-(-channels // chunk), rows * vectors * chunk, rows * chunk, chunk * columns, one),
        Loop(chunk, rows * vectors, rows, columns, one),
    ]


def _direct(form: direct.Convolution, how: direct.DirectBlocking) -> list[Loop]:
    """Tasks, panels, rows of a band, tiles of pixels, lines of the window, channels."""
    lines, across = form.window[0] * form.window[1], form.window[2]
    band, span, panels = min(how.band, form.results[1]), min(how.span, form.results[2]), how.panels(form)
    columns = how.vectors * how.lanes
    tasks = form.out[0] * form.results[0] * how.bands(form) * how.spans(form) * how.units(form)
    copied = form.window[0] * how.rows(form) * how.width(form) * how.slot(form)
    line = how.width(form) * how.slot(form)
    weights, pixels = lines * across * form.channels * columns, min(how.pixels, span)
    row = span * how.vectors * lines * across * form.channels
    near = (pixels - 1) * form.strides[2] + (across - 1) * form.dilations[2] + 1
    step = pixels * how.vectors * across
    return [
        Loop(tasks, panels * band * row, copied, panels * weights, band * span * columns * panels),
        Loop(panels, band * row, copied, weights, band * span * columns),
        Loop(band, row, lines * line, weights, span * columns),
        Loop(
            -(-span // pixels),
            step * lines * form.channels,
            near * how.slot(form) * lines,
            weights,
            pixels * columns,
        ),
        Loop(lines, step * form.channels, near * how.slot(form), weights // lines, pixels * columns),
        Loop(form.channels, step, near, across * columns, pixels * columns),
    ]


def _winograd(form: winograd.WinogradConvolution, how: winograd.WinogradBlocking) -> list[Loop]:
    """Tasks, panels, points, chunks of channels, tiles of rows, channels."""
    points, vectors = form.n * form.n, how.columns // how.lanes
    panels = -(-how.panels(form) // how.parts)
    block, columns, channels = how.block, how.columns, form.channels
    chunk = min(channels, winograd.CHUNK)
    point = block * vectors * channels
    return [
        Loop(
            form.groups * -(-form.tiles // block) * how.parts, panels * points * point, points * block * channels,
            points * channels * columns * panels, form.m * form.m * block * columns * panels,
        ),
        Loop(panels, points * point, points * block * channels, points * channels * columns, points * block * columns),
        Loop(points, point, block * channels, channels * columns, block * columns),
        Loop(-(-channels // chunk), block * vectors * chunk, block * chunk, chunk * columns, block * columns),
        Loop(-(-block // how.rows), how.rows * vectors * chunk, how.rows * chunk, chunk * columns, how.rows * columns),
        Loop(chunk, how.rows * vectors, how.rows, columns, how.rows * columns),
    ]  # fmt: skip


def loops_of_bands(form: bands.ConvBlock, how: bands.BandBlocking) -> list[Loop]:
    """Tasks, blocks of channels, then what is done with a block: expansion, windows, projection."""
    rows, width, out = how.rows(form), form.image[2], form.out[2]
    blocks, vectors = -(-how.blocks(form) // how.parts), how.block // how.lanes
    taps = math.prod(form.window)
    entering = form.image[3] if form.expand is not None else 1
    leaving = how.panels(form) * how.project.columns if form.project is not None else 0
    expand = rows * width * vectors * entering if form.expand is not None else 0
    windows = how.band * out * vectors * taps
    project = how.band * out * how.block * leaving / how.lanes
    image = rows * width * (entering if form.expand is not None else how.block)
    weights = how.block * (entering * (form.expand is not None) + taps + leaving)
    results = how.band * out * (leaving or how.block)
    work = expand + windows + project
    tasks = form.out[0] * how.bands(form) * how.parts
    return [
        Loop(tasks, blocks * work, image, blocks * weights, results),
        Loop(blocks, work, image, weights, results),
        Loop(rows, expand / rows, width * entering, how.block * entering, width * how.block),
        Loop(
            how.band,
            windows / how.band,
            width * how.block * form.window[0],
            how.block * taps,
            out * how.block,
        ),
        Loop(how.band, project / how.band, out * how.block, how.block * leaving, out * leaving),
    ]


def weights_of_bands(form: bands.ConvBlock) -> int:
    """How many weights a block's kernel reads."""
    wide = form.middle[3]
    expand = form.image[3] if form.expand is not None else 0
    return wide * (expand + math.prod(form.window) + (form.out[3] if form.project is not None else 0))


def totals(loops: Sequence[Loop]) -> list[float]:
    """How often each loop's body runs in all: the product of the extents down to it."""
    found, total = [], 1.0
    for loop in loops:
        total *= loop.extent
        found.append(total)
    return found
