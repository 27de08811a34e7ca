"""Rewrites transposed convolutions as convolutions, which have kernels in tiles (see `schedules`).

With stride s, the output pixels whose index is p modulo s (phase p) use the taps p, p + s, p + 2 s, ... of the kernel.
So each phase is the result of a convolution of stride 1. All phases together are one convolution with s times as many
channels along each dimension, which are interleaved afterwards (Shi et al., Is the deconvolution layer the same as a
convolutional layer?, 2016). TVM's own kernel puts zeros between the pixels and multiplies these, too.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from xrlflow.backends.tvm.toolchain.reading import constant, numbers, operator, sizes, with_calls
from xrlflow.backends.tvm.toolchain.weights import array_of


def by_phases(module: Any) -> Any:
    """The module in which convolutions replace two-dimensional transposed convolutions of "main", if their weights are
    constant and they have no groups or dilation."""
    return with_calls(module, _rewritten)


def _rewritten(call: Any, builder: Any) -> Any | None:
    from tvm import relax
    from tvm.ir import GenericConst

    if operator(call) != "relax.nn.conv2d_transpose" or not isinstance(call.args[1], GenericConst):
        return None
    shapes, attrs = [sizes(e) for e in (call, *call.args)], call.attrs
    sized = [shape for shape in shapes if shape and 0 not in shape]
    if len(sized) < len(shapes) or int(attrs.groups) != 1 or numbers(attrs.dilation) != [1, 1]:
        return None
    if (attrs.data_layout, attrs.kernel_layout) != ("NCHW", "IOHW"):
        return None
    (batch, channels, *result), (_, _, *image), (_, _, *kernel) = sized
    strides, begin = numbers(attrs.strides), numbers(attrs.padding)[:2]
    taps = [-(-k // s) for k, s in zip(kernel, strides)]
    end = [b + r for b, r in zip(begin, result)]
    # A phase has a pixel for each pixel of the image and of its border of taps - 1, unless it is cropped.
    pixels = [size + t - 1 for size, t in zip(image, taps)]
    if any(e > p * s for e, p, s in zip(end, pixels, strides)):
        return None  # output_padding adds pixels that do not depend on the image
    before = [min(t - 1, b // s) for t, b, s in zip(taps, begin, strides)]
    after = [min(t - 1, p - -(-e // s)) for t, p, e, s in zip(taps, pixels, end, strides)]
    padding = [t - 1 - cut for cuts in (before, after) for t, cut in zip(taps, cuts)]
    pixels = [p - b - a for p, b, a in zip(pixels, before, after)]
    first = [b - cut * s for b, cut, s in zip(begin, before, strides)]

    # With channels last, the channels of a pixel of a phase are neighbours in memory, and move together.
    weights = constant(phase_weights(array_of(call.args[1]), strides))
    image_last = builder.emit(relax.op.permute_dims(call.args[0], [0, 2, 3, 1]))
    phases = relax.op.nn.conv2d(
        image_last, weights, padding=padding, data_layout="NHWC", kernel_layout="HWIO", out_layout="NHWC"
    )
    apart = builder.emit(relax.op.reshape(builder.emit(phases), (batch, *pixels, *strides, channels)))
    interleaved = builder.emit(relax.op.permute_dims(apart, [0, 1, 3, 2, 4, 5]))
    full = (batch, *(p * s for p, s in zip(pixels, strides)), channels)
    output = builder.emit(relax.op.reshape(interleaved, full))
    last = [f + r for f, r in zip(first, result)]
    if (first, last) != ([0, 0], list(full[1:3])):
        output = builder.emit(relax.op.strided_slice(output, axes=[1, 2], begin=first, end=last))
    return relax.op.permute_dims(output, [0, 3, 1, 2])


def phase_weights(weights: Any, strides: Sequence[int]) -> Any:
    """Weights [in, out, height, width] of a transposed convolution as those of one convolution for all phases: [taps,
    taps, in, row phases x column phases x out]. Taps beyond the kernel are zeros."""
    import numpy as np

    inputs, outputs, *kernel = weights.shape
    taps = [-(-k // s) for k, s in zip(kernel, strides)]
    missing = [(0, t * s - k) for t, s, k in zip(taps, strides, kernel)]
    full = np.pad(weights, [(0, 0), (0, 0), *missing])
    split = full.reshape(inputs, outputs, taps[0], strides[0], taps[1], strides[1])
    # A convolution reads the image forwards, a transposed convolution backwards.
    phases = split[:, :, ::-1, :, ::-1, :].transpose(2, 4, 0, 3, 5, 1)
    return np.ascontiguousarray(phases.reshape(*taps, inputs, strides[0] * strides[1] * outputs))
