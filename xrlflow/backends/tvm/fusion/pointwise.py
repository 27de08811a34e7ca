"""Gives images back to 1x1 convolutions of flattened images.

For ONNX Runtime, a 1x1 convolution may be faster if the pixels of its image lie in one row. For kernels they may not:
the steps after the convolution are on the image, and a kernel can have them only without the reshaping in between.
"""

from __future__ import annotations

from typing import Any

from xrlflow.backends.tvm.toolchain.reading import (
    bound,
    constant,
    known_value,
    numbers,
    operator,
    sizes,
    with_calls,
)

_CONVOLUTIONS = ("relax.nn.conv1d", "relax.nn.conv2d")


def on_images(module: Any) -> Any:
    """The module in which 1x1 convolutions of "main" read images before they are flattened. Images have channels
    first."""
    from tvm import relax

    module = relax.transform.CanonicalizeBindings()(with_calls(module, _changed))
    return relax.transform.DeadCodeElimination()(module)


def _changed(call: Any, builder: Any) -> Any | None:
    """`conv(reshape(x))` as `reshape(conv(x))`, and `reshape(reshape(x))` of x's shape as x."""
    from tvm import relax

    name = operator(call)
    if name not in (*_CONVOLUTIONS, "relax.reshape"):
        return None
    flat = bound(call.args[0], builder)
    if operator(flat) != "relax.reshape":
        return None
    x, shape = flat.args[0], sizes(flat.args[0])
    if name == "relax.reshape":
        return x if shape is not None and shape == sizes(call) else None
    weights, flattened, out = known_value(bound(call.args[1], builder)), sizes(flat), sizes(call)
    if shape is None or flattened is None or out is None or weights is None or len(shape) != 4:
        return None
    if shape[:2] != flattened[:2] or shape == flattened or not _is_pointwise(call, weights):
        return None
    square = constant(weights.reshape(*weights.shape[:2], 1, 1))
    convolved = builder.emit(relax.op.nn.conv2d(x, square, groups=int(call.attrs.groups)))
    return relax.op.reshape(convolved, out)


def _is_pointwise(call: Any, weights: Any) -> bool:
    """Whether each result of a convolution with channels first depends on one pixel."""
    attrs = call.attrs
    strides, padding = numbers(attrs.strides), numbers(attrs.padding)
    channels_first = str(attrs.data_layout).startswith("NC") and str(attrs.kernel_layout).startswith("OI")
    return channels_first and set(weights.shape[2:]) == {1} and set(strides) == {1} and not any(padding)
