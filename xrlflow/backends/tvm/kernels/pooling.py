"""Two-dimensional pools with channels last, without conditions or copies for the border of an image.

A tap beyond the border reads the nearest pixel of the image instead. The greatest element of a window stays the same,
since that pixel is in the window, too; a sum omits the tap.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from xrlflow.backends.tvm.schedules.windows import WINDOW
from xrlflow.backends.tvm.toolchain.reading import numbers, sizes


@dataclass(frozen=True, slots=True)
class Along:
    """The windows along one dimension. `result`, `image`: the extents of the result and of the image. `taps`, `stride`,
    `dilation`: of a window. `before`, `after`: the pixels that are added to the image on either side; the first window
    begins at the first of them."""

    result: int
    image: int
    taps: int
    stride: int
    dilation: int
    before: int
    after: int

    def position(self, pixel: Any, tap: Any) -> Any:
        """The pixel of the image that a tap reads. It may lie beyond the border."""
        return pixel * self.stride + tap * self.dilation - self.before

    @property
    def leaves(self) -> bool:
        """Whether some taps lie beyond the border."""
        return self.before > 0 or self.position(self.result - 1, self.taps - 1) >= self.image

    def inside(self, pixel: Any, tap: Any) -> Any:
        from tvm import tirx

        position = self.position(pixel, tap)
        return tirx.all(position >= 0, position < self.image)

    def nearest(self, pixel: Any, tap: Any) -> Any:
        """The pixel of the image that is nearest to the position that a tap reads."""
        from tvm import tirx

        pixel_read = self.position(pixel, tap)
        return tirx.max(tirx.min(pixel_read, self.image - 1), 0) if self.leaves else pixel_read

    def taps_inside(self, pixel: Any, whole: bool = False) -> Any:
        """The number of taps of a window inside the image; with `whole`, taps in the added pixels count, too. (If the
        number of windows is rounded up, the last window may reach beyond the added pixels.)"""
        from tvm import tirx

        before, after = (self.before, self.after) if whole else (0, 0)
        size = before + self.image + after
        if self.before == before and self.position(self.result - 1, self.taps - 1) < self.image + after:
            return self.taps
        first, step = self.position(pixel, 0) + before, self.dilation
        last = tirx.min((size - 1 - first) // step, self.taps - 1)
        return last - tirx.max((step - 1 - first) // step, 0) + 1


def with_pads(attrs: Mapping[str, Any], image: Sequence[int] | None) -> dict[str, Any]:
    """The attributes of an ONNX pool of an image of this size, in which numbers of pixels replace SAME_LOWER and
    SAME_UPPER. (TVM's importer computes too few windows for SAME_LOWER.)"""
    same = attrs.get("auto_pad", b"NOTSET").decode()
    if not same.startswith("SAME") or image is None:
        return dict(attrs)
    ones = [1] * len(image)
    strides, dilations = attrs.get("strides", ones), attrs.get("dilations", ones)
    pads = [
        max(0, (-(-size // stride) - 1) * stride + (taps - 1) * dilation + 1 - size)
        for size, stride, taps, dilation in zip(image, strides, attrs["kernel_shape"], dilations)
    ]
    less, more = [pad // 2 for pad in pads], [pad - pad // 2 for pad in pads]
    before, after = (less, more) if same == "SAME_UPPER" else (more, less)
    return {**attrs, "auto_pad": b"NOTSET", "pads": [*before, *after]}


def disputed(attrs: Mapping[str, Any], image: Sequence[int] | None) -> str | None:
    """A reason to refuse a pool of an image of this size: its windows in ONNX Runtime differ from those that ONNX
    defines, or begin after the first pixels. None for all other pools."""
    if image is None:
        return None
    ones = [1] * len(image)
    strides, dilations = attrs.get("strides", ones), attrs.get("dilations", ones)
    pads, auto = attrs.get("pads", [0] * 2 * len(image)), attrs.get("auto_pad", b"NOTSET").decode()
    spans = [(taps - 1) * dilation + 1 for taps, dilation in zip(attrs["kernel_shape"], dilations)]
    if not auto.startswith("SAME"):
        more = [0] * len(image) if auto == "VALID" else [a + b for a, b in zip(pads, pads[len(image) :])]
        fits = all(size + pad >= span for size, pad, span in zip(image, more, spans))
        return None if fits else "with windows that are larger than the image"
    if any(span != taps for span, taps in zip(spans, attrs["kernel_shape"])):
        return f"with auto_pad {auto} and dilations"
    between = [
        size - (-(-size // stride) - 1) * stride - span for size, stride, span in zip(image, strides, spans)
    ]
    if any(left > (1 if auto == "SAME_UPPER" else 2) for left in between):
        return f"with auto_pad {auto} and strides that leave pixels out"
    return None


def legal_max_pool(builder: Any, call: Any) -> Any | None:
    """The kernel for the greatest elements of windows; None for pools that this module does not compute."""
    along = windows_of(call, "NHWC")
    return (
        None
        if along is None
        else builder.call_te(lambda x: greatest(x, along), call.args[0], primfunc_name_hint="max_pool2d")
    )


def legal_average_pool(builder: Any, call: Any) -> Any | None:
    """The kernel for the means of windows; None for pools that this module does not compute."""
    along, whole = windows_of(call, "NHWC"), bool(call.attrs.count_include_pad)
    return (
        None
        if along is None
        else builder.call_te(lambda x: means(x, along, whole), call.args[0], primfunc_name_hint="avg_pool2d")
    )


def windows_of(call: Any, layout: str) -> tuple[Along, Along] | None:
    """The windows along rows and along columns of images in this layout; None for other layouts, and if a size is
    unknown or zero."""
    image, result, attrs = sizes(call.args[0], "float32"), sizes(call), call.attrs
    if attrs.layout != layout or attrs.out_layout != layout or image is None or result is None:
        return None
    if 0 in (*image, *result):
        return None
    first = layout.index("H")
    rows, columns = (
        Along(*each)
        for each in zip(
            result[first:], image[first:], numbers(attrs.pool_size), numbers(attrs.strides), numbers(attrs.dilation),
            numbers(attrs.padding)[:2],
            numbers(attrs.padding)[2:],
        )
    )  # fmt: skip
    return rows, columns


def greatest(x: Any, windows: Sequence[Along]) -> Any:
    """The greatest elements of windows of x [batch, row, column, channel]."""
    from tvm import te

    # If there are gaps between the taps, the nearest pixel may not be in the window.
    masked = any(along.leaves and along.dilation > 1 for along in windows)
    return _reduced(x, windows, "window_max", te.max, te.min_value(x.dtype) if masked else None)


def means(x: Any, windows: Sequence[Along], whole: bool) -> Any:
    """The means of windows of x [batch, row, column, channel]. `whole`: taps beyond the border count as zeros."""
    from tvm import te, tirx

    masked = any(along.leaves for along in windows)
    sums = _reduced(x, windows, "window_sum", te.sum, tirx.const(0.0, x.dtype) if masked else None)
    rows, columns = windows

    def mean(n: Any, y: Any, x: Any, c: Any) -> Any:
        count = rows.taps_inside(y, whole) * columns.taps_inside(x, whole)
        kind = sums.dtype
        share = tirx.const(1.0 / count, kind) if isinstance(count, int) else 1.0 / count.astype(kind)
        return sums[n, y, x, c] * share

    return te.compute(sums.shape, mean, name="window_mean")


def _reduced(x: Any, windows: Sequence[Along], name: str, reduce: Any, beyond: Any | None) -> Any:
    """The reduction of windows. `beyond`: the value of taps beyond the border; None if these taps read the nearest
    pixel."""
    from tvm import te, tirx

    taps = [te.reduce_axis((0, along.taps), name=name) for along, name in zip(windows, ("ky", "kx"))]

    def window(n: Any, row: Any, column: Any, c: Any) -> Any:
        at = list(zip(windows, (row, column), taps))
        value = x[(n, *(along.nearest(pixel, tap) for along, pixel, tap in at), c)]
        if beyond is not None:
            inside = (along.inside(pixel, tap) for along, pixel, tap in at if along.leaves)
            value = tirx.Select(tirx.all(*inside), value, beyond)
        return reduce(value, axis=taps)

    rows, columns = windows
    shape = (x.shape[0], rows.result, columns.result, x.shape[3])
    return te.compute(shape, window, name=name, attrs={WINDOW: True})
