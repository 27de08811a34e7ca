"""Transposed convolutions as convolutions, whose kernels are blocked (see `schedules`).

With stride s an output pixel s q + p is a sum over the taps p, p + s, p + 2 s, ... of the kernel alone. So the pixels
of one phase p are a convolution of stride 1, and all phases together one with s times as many channels along each
dimension, which are put beside each other afterwards (Shi et al., Is the deconvolution layer the same as a
convolutional layer?, 2016). TVM's own spreads the image with zeros and multiplies these too.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from xrlflow.backends.tvm.load import tvm


def by_phases(module: Any) -> Any:
    """The module with the transposed convolutions of two dimensions in "main" as convolutions, those of constant
    weights, without groups or dilation."""
    tvm()
    from tvm import relax

    @relax.expr_functor.mutator
    class Rewriter(relax.PyExprMutator):  # type: ignore[misc]
        def visit_call_(self, call: Any) -> Any:
            call = super().visit_call_(call)
            if str(getattr(call.op, "name", "")) != "relax.nn.conv2d_transpose":
                return call
            rewritten = _rewritten(call, self.builder_.emit)
            return call if rewritten is None else rewritten

    rewriter = Rewriter(module)
    main = rewriter.visit_expr(module["main"])
    done = rewriter.builder_.get()
    done.update_func(done.get_global_var("main"), main)
    return done


def _rewritten(call: Any, emit: Any) -> Any | None:
    from tvm import relax
    from tvm.ir import GenericConst

    data, weights = call.args
    attrs = call.attrs
    sizes = [*_numbers(data.ty.shape), *_numbers(call.ty.shape)]
    if not isinstance(weights, GenericConst) or int(attrs.groups) != 1 or not all(sizes):
        return None
    strides, padding = _numbers(attrs.strides), _numbers(attrs.padding)
    if _numbers(attrs.dilation) != [1, 1] or (attrs.data_layout, attrs.kernel_layout) != ("NCHW", "IOHW"):
        return None
    batch, _, *image = _numbers(data.ty.shape)
    channels, *result = _numbers(call.ty.shape)[1:]
    kernel = _numbers(weights.ty.shape)[2:]
    taps = [-(-k // s) for k, s in zip(kernel, strides)]
    # Of each phase there are so many pixels, the first of them before the image begins.
    pixels = [size + t - 1 for size, t in zip(image, taps)]
    first = padding[:2]
    if any(f + r > p * s for f, r, p, s in zip(first, result, pixels, strides)):
        return None  # output_padding reaches beyond what the image has a part in
    around = [t - 1 for t in taps]
    phases = emit(
        relax.op.nn.conv2d(
            data, relax.const(phase_weights(weights.value.numpy(), strides)), padding=[*around, *around]
        )
    )
    apart = emit(relax.op.reshape(phases, (batch, *strides, channels, *pixels)))
    beside = emit(relax.op.permute_dims(apart, [0, 3, 4, 1, 5, 2]))
    whole = emit(relax.op.reshape(beside, (batch, channels, *(p * s for p, s in zip(pixels, strides)))))
    last = [f + r for f, r in zip(first, result)]
    return relax.op.strided_slice(whole, axes=[2, 3], begin=first, end=last)


def phase_weights(weights: Any, strides: Sequence[int]) -> Any:
    """Weights [in, out, height, width] of a transposed convolution as those of a convolution to all phases [phases of
    rows x phases of columns x out, in, taps, taps]; taps beyond the kernel are zeros."""
    import numpy as np

    inputs, outputs, *kernel = weights.shape
    taps = [-(-k // s) for k, s in zip(kernel, strides)]
    missing = [(0, t * s - k) for t, s, k in zip(taps, strides, kernel)]
    whole = np.pad(weights, [(0, 0), (0, 0), *missing])
    split = whole.reshape(inputs, outputs, taps[0], strides[0], taps[1], strides[1])
    # A convolution reads the image forwards, a transposed one backwards.
    phases = split[:, :, ::-1, :, ::-1, :].transpose(3, 5, 1, 0, 2, 4)
    return np.ascontiguousarray(phases.reshape(strides[0] * strides[1] * outputs, inputs, *taps))


def _numbers(values: Any) -> list[int]:
    """The values, 0 for those that are not known."""
    return [int(v) if isinstance(v, int) or hasattr(v, "value") else 0 for v in list(values)]
