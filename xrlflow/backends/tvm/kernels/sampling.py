"""GridSample of images, linear and nearest: channels are beside each other while pixels are gathered.

A block of channels of the image is transposed once, so that a pixel is a vector. The pixels around a place, and their
weights, are found for a vector of places together. A block of places is transposed back in registers. Outside of the
image is one more pixel, of zeros.

As in ONNX Runtime, a place that is no number, or too far to count pixels, is that of the coordinate -1.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from xrlflow.backends.tvm.kernels.building import FLOAT, OPAQUE, SCHEDULED, number, ramp, spread
from xrlflow.backends.tvm.toolchain.reading import sizes
from xrlflow.backends.tvm.toolchain.target import Machine

_WORTH_A_THREAD = 8_000
# A parallel loop has as many parts for each core, if there are as many blocks.
_PARTS = 4
# An image of more pixels for each place is not worth transposing.
_MOST_PIXELS = 16
# Places that are further, in pixels, are none in ONNX Runtime. TVM counts pixels in 32 bits.
_FURTHEST, _FURTHEST_OF_TVM = 2.0**62, 2.0**30


@dataclass(frozen=True, slots=True)
class Sampling:
    """The sizes of the image [batch, channel, row, column], the places of each image, and the attributes: `nearest` or
    linear, the padding ("zeros", "border", "reflection") and `align_corners`."""

    image: tuple[int, ...]
    results: tuple[int, int]
    nearest: bool
    padding: str
    corners: bool

    @property
    def places(self) -> int:
        return self.results[0] * self.results[1]

    @property
    def pixels(self) -> int:
        return self.image[2] * self.image[3]


def legal_grid_sample(builder: Any, call: Any, machine: Machine) -> Any | None:
    """A linear or nearest GridSample of two dimensions; None for others, or if few pixels are read."""
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
    if workload.pixels > _MOST_PIXELS * workload.places:
        return None
    function = builder.add_func(kernel(workload, machine), "grid_sample")
    out = relax.TensorType((*image[:2], *workload.results), FLOAT)
    return relax.call_tir(function, list(call.args), out)


def legal_other_samples(builder: Any, call: Any) -> Any | None:
    """TVM's kernel, with coordinates whose pixels it can count; None if it is not for single precision."""
    from tvm import relax, te, tirx
    from tvm.ir import Op

    image, grid = sizes(call.args[0], FLOAT), sizes(call.args[1], FLOAT)
    if image is None or grid is None or str(call.attrs.layout) not in ("NCHW", "NCDHW") or 0 in image:
        return None

    def counted(grid: Any) -> Any:
        # Of the largest size: a place beyond is outside of the others, too.
        far, most = (tirx.const(bound * 2 / max(image[2:]), FLOAT) for bound in (_FURTHEST, _FURTHEST_OF_TVM))

        def value(*at: Any) -> Any:
            x = grid[at]
            held = tirx.Min(tirx.Max(x, -most), most)
            return tirx.Select(tirx.And(x > -far, x < far), held, tirx.const(-1.0, FLOAT))

        return te.compute(grid.shape, value, name="places")

    places = builder.emit(builder.call_te(counted, call.args[1], primfunc_name_hint="places"))
    same = relax.Call(call.op, [call.args[0], places], call.attrs, call.ty_args, call.span)
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
                body.parallel(workload.pixels, body.lanes, body.turn)
                body.parallel(workload.places, body.together, body.sample)
        return builder.get()


def _power(value: int) -> int:
    """The greatest power of two that is not greater."""
    return 1 << value.bit_length() - 1


class _Sampler:
    """Writes the loops into the function that is being built. `buffers`: image, grid and result. Their rows follow each
    other in memory, so that vectors go on from one to the next: an index counts from the first row."""

    def __init__(self, workload: Sampling, machine: Machine, buffers: Sequence[Any]) -> None:
        from tvm.script.ir_builder import tirx as T

        self._workload, self._cores = workload, machine.cores
        self._image, self._grid, self._out = buffers
        count, channels = workload.image[:2]
        self.lanes = _power(min(machine.lanes, max(channels, 4), workload.places, workload.pixels))
        self.together = _power(min(machine.lanes, workload.places))
        self._groups = -(-channels // self.lanes)
        self._turned = T.alloc_buffer((count, self._groups, workload.pixels + 1, self.lanes), FLOAT)

    def parallel(self, extent: int, block: int, body: Callable[[Any, Any, Any], None]) -> None:
        """`body` for each image, group of channels, and block, which it gets as its first element. The last block
        begins earlier if it is not whole: what is computed twice is the same."""
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
            with T.serial(0, tirx.Min(number(share), blocks - task % parts * share)) as turn:
                first = tirx.Min((task % parts * share + turn) * block, number(extent - block))
                body(plane // self._groups, plane % self._groups, first)

    def _channel(self, group: Any) -> Any:
        """The first channel of a group: the last one begins earlier if it is not whole."""
        from tvm import tirx

        return tirx.Max(tirx.Min(group * self.lanes, number(self._workload.image[1] - self.lanes)), number(0))

    def turn(self, n: Any, group: Any, pixel: Any) -> None:
        """Transpose a block of pixels."""
        from tvm.script.ir_builder import tirx as T

        begin, last = self._channel(group), self._workload.image[1] - 1
        at = ramp(pixel, self.lanes)
        rows = [self._image[n, begin + min(i, last), 0, at] for i in range(self.lanes)]
        for i, value in enumerate(_transposed(rows, self.lanes)):
            T.buffer_store(self._turned, value, [n, group, pixel + i, ramp(number(0), self.lanes)])
        outside = [n, group, number(self._workload.pixels), ramp(number(0), self.lanes)]
        with T.If(pixel == 0), T.Then():
            T.buffer_store(self._turned, spread(0.0, self.lanes), outside)

    def sample(self, n: Any, group: Any, place: Any) -> None:
        """The results of a block of places."""
        from tvm.script.ir_builder import tirx as T

        lanes, channels = self.lanes, self._workload.image[1]
        pixels, weights = self._found(n, place)
        begin = self._channel(group)
        mixed, whole = T.alloc_buffer((lanes, lanes), FLOAT), ramp(number(0), lanes)
        with T.serial(0, self.together // lanes) as part:
            with T.serial(0, lanes) as i:
                T.buffer_store(mixed, self._mixed(n, group, pixels, weights, part * lanes + i), [i, whole])
            rows = [mixed[i, whole] for i in range(lanes)]
            for i, value in enumerate(_transposed(rows, lanes)[: min(lanes, channels)]):
                at = [n, begin + i, number(0), ramp(place + part * lanes, lanes)]
                T.buffer_store(self._out, value, at)

    def _mixed(self, n: Any, group: Any, pixels: Any, weights: Any, i: Any) -> Any:
        """The channels of one place."""
        from tvm import tirx
        from tvm.script.ir_builder import tirx as T

        lanes = self.lanes

        def pixel(which: int) -> Any:
            return self._turned[n, group, pixels[which, i], ramp(number(0), lanes)]

        if self._workload.nearest:
            return T.bind(pixel(0))

        def weight(which: int) -> Any:
            value = weights[which, i]
            return T.bind(value if lanes == 1 else tirx.Broadcast(value, lanes))

        near, far = weight(0), weight(1)
        above, below = (T.bind(near * pixel(k) + far * pixel(k + 1)) for k in (0, 2))
        return T.bind(weight(2) * above + weight(3) * below)

    def _found(self, n: Any, place: Any) -> tuple[Any, Any]:
        """The pixels of a block of places [upper left, upper right, lower left, lower right; place], and the weights of
        the left, the right, the upper and the lower ones."""
        from tvm.script.ir_builder import tirx as T

        workload, together = self._workload, self.together
        kinds = 1 if workload.nearest else 2
        pixels = T.alloc_buffer((kinds * kinds, together), "int32")
        weights = T.alloc_buffer((4, together), FLOAT)
        at = ramp(number(0), together)
        found = []
        for axis, extent in enumerate((workload.image[3], workload.image[2])):
            x = T.bind(self._place(self._grid[n, axis, 0, ramp(place, together)], extent))
            one = spread(1.0, together)
            low = T.bind(_nearby(x) if workload.nearest else _floor(x))
            if not workload.nearest:
                T.buffer_store(weights, (low + one) - x, [number(2 * axis), at])
                T.buffer_store(weights, x - low, [number(2 * axis + 1), at])
            found.append([self._pixel(low + one * spread(float(k), together), extent) for k in range(kinds)])
        for i, (row, above) in enumerate(found[1]):
            for j, (column, beside) in enumerate(found[0]):
                T.buffer_store(pixels, self._joined(row, above, column, beside), [number(i * kinds + j), at])
        return pixels, weights

    def _joined(self, row: Any, above: Any, column: Any, beside: Any) -> Any:
        """The number of a pixel; the last one, of zeros, if it is outside."""
        from tvm import tirx

        workload, together = self._workload, self.together
        pixel = row * _whole(workload.image[3], together) + column
        if workload.padding != "zeros":
            return pixel
        return tirx.Select(above & beside, pixel, _whole(workload.pixels, together))

    def _place(self, x: Any, extent: int) -> Any:
        """The place in pixels of a coordinate from -1 to 1, rounded as in ONNX Runtime: a product is not added to
        something before it is rounded, since that decides which pixel is the nearest."""
        from tvm import tirx
        from tvm.script.ir_builder import tirx as T

        together = self.together
        one, wide = spread(1.0, together), f"float64x{together}" if together > 1 else "float64"
        narrow = f"float32x{together}" if together > 1 else FLOAT
        size = spread(float(extent - 1 if self._workload.corners else extent), together)

        def product(a: Any, b: Any) -> Any:
            return (a.astype(wide) * b.astype(wide)).astype(narrow)

        half, corners = spread(0.5, together), self._workload.corners
        place = T.bind(product((x + one) * half, size) if corners else (product(x + one, size) - one) * half)
        near = (place > spread(-_FURTHEST, together)) & (place < spread(_FURTHEST, together))
        return tirx.Select(near, place, spread(0.0 if corners else -0.5, together))

    def _pixel(self, x: Any, extent: int) -> tuple[Any, Any]:
        """The number of a row or column of the image, and whether x (a whole number, or none) is one."""
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
        # The greater of two is the second if the first is not a number.
        held = tirx.Min(tirx.Max(x, zero), last)
        return T.bind(held.astype(f"int32x{together}" if together > 1 else "int32")), inside


def _whole(value: int, lanes: int) -> Any:
    from tvm import tirx

    return number(value) if lanes == 1 else tirx.Broadcast(number(value), lanes)


def _floor(x: Any) -> Any:
    from tvm import tirx

    return tirx.floor(x)


def _nearby(x: Any) -> Any:
    """The nearest whole number, the even one of two."""
    from tvm import tirx

    return tirx.nearbyint(x)


def _transposed(rows: Sequence[Any], lanes: int) -> list[Any]:
    """As many vectors as they have lanes, transposed: in each step, pairs of vectors exchange halves of blocks."""
    from tvm import tirx
    from tvm.script.ir_builder import tirx as T

    found, step = [T.bind(row) for row in rows], 1
    while step < lanes:
        for i in range(lanes):
            if i & step:
                continue
            pair = [found[i], found[i + step]]
            low = [lanes + j - step if j & step else j for j in range(lanes)]
            high = [lanes + j if j & step else j + step for j in range(lanes)]
            found[i], found[i + step] = (
                T.bind(tirx.Shuffle(pair, [number(j) for j in order])) for order in (low, high)
            )
        step *= 2
    return found
