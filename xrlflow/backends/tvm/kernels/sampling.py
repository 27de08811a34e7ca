"""GridSample of images, linear and nearest: pixels are gathered with all their channels, after a transposition that
makes these neighbours in memory.

A block of channels of the image is transposed once, so that a pixel is a vector. The pixels around sampling points, and
their weights, are computed for a vector of points together. The results of a block of points are transposed back in
registers. Points outside of the image read an additional pixel of zeros.

As in ONNX Runtime, a coordinate that is NaN, or too large for an integer number of pixels, is treated as -1.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from xrlflow.backends.tvm.kernels.building import FLOAT, OPAQUE, SCHEDULED, number, ramp, spread
from xrlflow.backends.tvm.toolchain.reading import sizes
from xrlflow.backends.tvm.toolchain.target import Machine

_WORTH_A_THREAD = 8_000
# A parallel loop has at least this many parts for each core, if there are as many blocks.
_PARTS = 4
# An image with more pixels for each sampling point than this is not worth transposing.
_MOST_PIXELS = 16
# ONNX Runtime treats points that are further away, in pixels, as NaN. TVM counts pixels in 32 bits.
_FURTHEST, _FURTHEST_OF_TVM = 2.0**62, 2.0**30


@dataclass(frozen=True, slots=True)
class Sampling:
    """The workload: the shape of the image [batch, channel, row, column], the rows and columns of sampling points, and
    the attributes: `nearest` or linear, the padding ("zeros", "border", "reflection") and `align_corners`."""

    image: tuple[int, ...]
    results: tuple[int, int]
    nearest: bool
    padding: str
    corners: bool

    @property
    def points(self) -> int:
        return self.results[0] * self.results[1]

    @property
    def pixels(self) -> int:
        return self.image[2] * self.image[3]


def legal_grid_sample(builder: Any, call: Any, machine: Machine) -> Any | None:
    """The kernel for a linear or nearest GridSample of two dimensions; None for other GridSample operators, and if
    there are few sampling points."""
    from tvm import relax

    image, grid, attrs = sizes(call.args[0], FLOAT), sizes(call.args[1], FLOAT), call.attrs
    method, padding = str(attrs.method), str(attrs.padding_mode)
    if image is None or grid is None or len(image) != 4 or len(grid) != 4 or 0 in (*image, *grid):
        return None
    if str(attrs.layout) != "NCHW" or method not in ("bilinear", "nearest"):
        return None
    if padding not in ("zeros", "border", "reflection"):
        return None
    workload = Sampling(image, (grid[2], grid[3]), method == "nearest", padding, bool(attrs.align_corners))
    if workload.pixels > _MOST_PIXELS * workload.points:
        return None
    function = builder.add_func(kernel(workload, machine), "grid_sample")
    out = relax.TensorType((*image[:2], *workload.results), FLOAT)
    return relax.call_tir(function, list(call.args), out)


def legal_other_samples(builder: Any, call: Any) -> Any | None:
    """TVM's kernel, with coordinates limited to pixels that it can count in 32 bits; None for types other than single
    precision."""
    from tvm import relax, te, tirx
    from tvm.ir import Op

    image, grid = sizes(call.args[0], FLOAT), sizes(call.args[1], FLOAT)
    if image is None or grid is None or str(call.attrs.layout) not in ("NCHW", "NCDHW") or 0 in image:
        return None

    def counted(grid: Any) -> Any:
        # The largest dimension determines the bound: a point beyond it is outside of smaller dimensions, too.
        far, most = (tirx.const(bound * 2 / max(image[2:]), FLOAT) for bound in (_FURTHEST, _FURTHEST_OF_TVM))

        def value(*at: Any) -> Any:
            x = grid[at]
            limited = tirx.Min(tirx.Max(x, -most), most)
            return tirx.Select(tirx.And(x > -far, x < far), limited, tirx.const(-1.0, FLOAT))

        return te.compute(grid.shape, value, name="places")

    points = builder.emit(builder.call_te(counted, call.args[1], primfunc_name_hint="places"))
    same = relax.Call(call.op, [call.args[0], points], call.attrs, call.ty_args, call.span)
    legal = Op.get("relax.image.grid_sample").get_attr("FLegalize")
    return legal(builder, builder.normalize(same))


def kernel(workload: Sampling, machine: Machine) -> Any:
    """The PrimFunc with parameters image, grid [batch, 2, row, column], result [batch, channel, row, column]."""
    from tvm.script.ir_builder import IRBuilder
    from tvm.script.ir_builder import tirx as T

    count, channels = workload.image[:2]
    with IRBuilder() as builder:
        with T.prim_func(is_private=True, s_tir=True):
            T.func_attr({SCHEDULED: True, "op_pattern": OPAQUE, "tirx.noalias": True})
            image = T.arg("image", T.buffer(workload.image, FLOAT))
            grid = T.arg("grid", T.buffer((count, 2, *workload.results), FLOAT))
            out = T.arg("out", T.buffer((count, channels, *workload.results), FLOAT))
            with T.sblock("root"), T.sblock("grid_sample"):
                T.reads([])
                T.writes([])
                body = _Sampler(workload, machine, [image, grid, out])
                body.parallel(workload.pixels, body.lanes, body.transpose)
                body.parallel(workload.points, body.together, body.sample)
        return builder.get()


def _power(value: int) -> int:
    """The greatest power of two that is at most `value`."""
    return 1 << value.bit_length() - 1


class _Sampler:
    """Writes the loops into the function that is being built. `buffers`: image, grid and result. Indices of columns may
    exceed a row: rows follow each other in memory, so that a vector goes on in the next row."""

    def __init__(self, workload: Sampling, machine: Machine, buffers: Sequence[Any]) -> None:
        from tvm.script.ir_builder import tirx as T

        self._workload, self._cores = workload, machine.cores
        self._image, self._grid, self._out = buffers
        count, channels = workload.image[:2]
        self.lanes = _power(min(machine.lanes, max(channels, 4), workload.points, workload.pixels))
        self.together = _power(min(machine.lanes, workload.points))
        self._groups = -(-channels // self.lanes)
        self._image_by_pixel = T.alloc_buffer((count, self._groups, workload.pixels + 1, self.lanes), FLOAT)

    def parallel(self, extent: int, block: int, body: Callable[[Any, Any, Any], None]) -> None:
        """Call `body` for each image, group of channels, and first element of a block. If blocks do not divide the
        extent, the last block overlaps the block before. Results that are computed twice are equal."""
        from tvm import tirx
        from tvm.script.ir_builder import tirx as T

        planes, blocks = self._workload.image[0] * self._groups, -(-extent // block)
        share = -(-blocks // min(blocks, -(-_PARTS * self._cores // planes)))
        parts = -(-blocks // share)
        loop = T.parallel if planes * extent * self.lanes >= _WORTH_A_THREAD else T.serial
        with loop(0, planes * parts) as task, T.sblock("part"):
            T.reads([])
            T.writes([])
            plane = task // parts
            with T.serial(0, tirx.Min(number(share), blocks - task % parts * share)) as transpose:
                first = tirx.Min((task % parts * share + transpose) * block, number(extent - block))
                body(plane // self._groups, plane % self._groups, first)

    def _channel(self, group: Any) -> Any:
        """The first channel of a group. If groups do not divide the channels, the last group overlaps the group
        before."""
        from tvm import tirx

        return tirx.Max(tirx.Min(group * self.lanes, number(self._workload.image[1] - self.lanes)), number(0))

    def transpose(self, n: Any, group: Any, pixel: Any) -> None:
        """Transpose a block of pixels, so that the channels of each pixel are neighbours in memory."""
        from tvm.script.ir_builder import tirx as T

        begin, last = self._channel(group), self._workload.image[1] - 1
        at = ramp(pixel, self.lanes)
        rows = [self._image[n, begin + min(i, last), 0, at] for i in range(self.lanes)]
        for i, value in enumerate(_transposed(rows, self.lanes)):
            T.buffer_store(self._image_by_pixel, value, [n, group, pixel + i, ramp(number(0), self.lanes)])
        outside = [n, group, number(self._workload.pixels), ramp(number(0), self.lanes)]
        with T.If(pixel == 0), T.Then():
            T.buffer_store(self._image_by_pixel, spread(0.0, self.lanes), outside)

    def sample(self, n: Any, group: Any, point: Any) -> None:
        """Compute the results of a block of sampling points."""
        from tvm.script.ir_builder import tirx as T

        lanes, channels = self.lanes, self._workload.image[1]
        pixels, weights = self._around(n, point)
        begin = self._channel(group)
        mixed, whole = T.alloc_buffer((lanes, lanes), FLOAT), ramp(number(0), lanes)
        with T.serial(0, self.together // lanes) as part:
            with T.serial(0, lanes) as i:
                T.buffer_store(mixed, self._mixed(n, group, pixels, weights, part * lanes + i), [i, whole])
            rows = [mixed[i, whole] for i in range(lanes)]
            for i, value in enumerate(_transposed(rows, lanes)[: min(lanes, channels)]):
                at = [n, begin + i, number(0), ramp(point + part * lanes, lanes)]
                T.buffer_store(self._out, value, at)

    def _mixed(self, n: Any, group: Any, pixels: Any, weights: Any, i: Any) -> Any:
        """All channels of the result at one sampling point."""
        from tvm import tirx
        from tvm.script.ir_builder import tirx as T

        lanes = self.lanes

        def pixel(which: int) -> Any:
            return self._image_by_pixel[n, group, pixels[which, i], ramp(number(0), lanes)]

        if self._workload.nearest:
            return T.bind(pixel(0))

        def weight(which: int) -> Any:
            value = weights[which, i]
            return T.bind(value if lanes == 1 else tirx.Broadcast(value, lanes))

        near, far = weight(0), weight(1)
        above, below = (T.bind(near * pixel(k) + far * pixel(k + 1)) for k in (0, 2))
        return T.bind(weight(2) * above + weight(3) * below)

    def _around(self, n: Any, point: Any) -> tuple[Any, Any]:
        """The pixels around a block of sampling points, [upper left, upper right, lower left, lower right; point], and
        the weights of the left, the right, the upper and the lower pixels."""
        from tvm.script.ir_builder import tirx as T

        workload, together = self._workload, self.together
        kinds = 1 if workload.nearest else 2
        pixels = T.alloc_buffer((kinds * kinds, together), "int32")
        weights = T.alloc_buffer((4, together), FLOAT)
        at = ramp(number(0), together)
        axes = []
        for axis, extent in enumerate((workload.image[3], workload.image[2])):
            x = T.bind(self._position(self._grid[n, axis, 0, ramp(point, together)], extent))
            one = spread(1.0, together)
            low = T.bind(_nearby(x) if workload.nearest else _floor(x))
            if not workload.nearest:
                T.buffer_store(weights, (low + one) - x, [number(2 * axis), at])
                T.buffer_store(weights, x - low, [number(2 * axis + 1), at])
            axes.append([self._pixel(low + one * spread(float(k), together), extent) for k in range(kinds)])
        for i, (row, row_inside) in enumerate(axes[1]):
            for j, (column, column_inside) in enumerate(axes[0]):
                T.buffer_store(
                    pixels, self._number(row, row_inside, column, column_inside), [number(i * kinds + j), at]
                )
        return pixels, weights

    def _number(self, row: Any, row_inside: Any, column: Any, column_inside: Any) -> Any:
        """The number of a pixel. Outside of the image it is the number of the additional pixel of zeros."""
        from tvm import tirx

        workload, together = self._workload, self.together
        pixel = row * _whole(workload.image[3], together) + column
        if workload.padding != "zeros":
            return pixel
        return tirx.Select(row_inside & column_inside, pixel, _whole(workload.pixels, together))

    def _position(self, x: Any, extent: int) -> Any:
        """The position in pixels of a coordinate from -1 to 1. It is rounded as in ONNX Runtime, because the rounding
        decides which pixel is the nearest: a product is rounded before something is added to it."""
        from tvm import tirx
        from tvm.script.ir_builder import tirx as T

        together = self.together
        one, wide = spread(1.0, together), f"float64x{together}" if together > 1 else "float64"
        narrow = f"float32x{together}" if together > 1 else FLOAT
        size = spread(float(extent - 1 if self._workload.corners else extent), together)

        def product(a: Any, b: Any) -> Any:
            return (a.astype(wide) * b.astype(wide)).astype(narrow)

        half, corners = spread(0.5, together), self._workload.corners
        point = T.bind(product((x + one) * half, size) if corners else (product(x + one, size) - one) * half)
        near = (point > spread(-_FURTHEST, together)) & (point < spread(_FURTHEST, together))
        return tirx.Select(near, point, spread(0.0 if corners else -0.5, together))

    def _pixel(self, x: Any, extent: int) -> tuple[Any, Any]:
        """The row or column of the image that is read for position x (an integer, or NaN), and whether x is inside."""
        from tvm import tirx
        from tvm.script.ir_builder import tirx as T

        together, workload = self.together, self._workload
        zero, last = spread(0.0, together), spread(float(extent - 1), together)
        inside = (x >= zero) & (x <= last)
        if workload.padding == "reflection":
            gap = 0 if workload.corners else 1
            period = 2 * (extent - 1 + gap)
            if period:
                length = spread(float(period), together)
                x = T.bind(x - _floor(x / length) * length)
                x = tirx.Min(x, spread(float(period - gap), together) - x)
        # If x is NaN, Max returns its second operand.
        limited = tirx.Min(tirx.Max(x, zero), last)
        return T.bind(limited.astype(f"int32x{together}" if together > 1 else "int32")), inside


def _whole(value: int, lanes: int) -> Any:
    from tvm import tirx

    return number(value) if lanes == 1 else tirx.Broadcast(number(value), lanes)


def _floor(x: Any) -> Any:
    from tvm import tirx

    return tirx.floor(x)


def _nearby(x: Any) -> Any:
    """The nearest integer; of two equally near integers, the even one."""
    from tvm import tirx

    return tirx.nearbyint(x)


def _transposed(rows: Sequence[Any], lanes: int) -> list[Any]:
    """Transpose a square of vectors. In each step, pairs of vectors exchange halves of their blocks."""
    from tvm import tirx
    from tvm.script.ir_builder import tirx as T

    vectors, step = [T.bind(row) for row in rows], 1
    while step < lanes:
        for i in range(lanes):
            if i & step:
                continue
            pair = [vectors[i], vectors[i + step]]
            low = [lanes + j - step if j & step else j for j in range(lanes)]
            high = [lanes + j if j & step else j + step for j in range(lanes)]
            vectors[i], vectors[i + step] = (
                T.bind(tirx.Shuffle(pair, [number(j) for j in order])) for order in (low, high)
            )
        step *= 2
    return vectors
