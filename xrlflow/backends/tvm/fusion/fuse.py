"""Lists the passes between import and schedules in their order. Some of them replace operators by generated kernels."""

from __future__ import annotations

from typing import Any

from xrlflow.backends.tvm.fusion.attention import fuse_attention
from xrlflow.backends.tvm.fusion.bands import fuse_bands
from xrlflow.backends.tvm.fusion.bytes import handle_bytes
from xrlflow.backends.tvm.fusion.checks import check_constants
from xrlflow.backends.tvm.fusion.direct_norm import use_direct_norm
from xrlflow.backends.tvm.fusion.folding import fold_moves
from xrlflow.backends.tvm.fusion.last_passes import last_passes
from xrlflow.backends.tvm.fusion.layers import choose_kernels
from xrlflow.backends.tvm.fusion.layouts import counted_axes, keep_layouts, without_detours
from xrlflow.backends.tvm.fusion.open_sizes import answering
from xrlflow.backends.tvm.fusion.passes import Pass, applied
from xrlflow.backends.tvm.fusion.pointwise import on_images
from xrlflow.backends.tvm.fusion.transposed import by_phases
from xrlflow.backends.tvm.kernels.algorithms import DEFAULT, Algorithms
from xrlflow.backends.tvm.toolchain.import_tvm import tvm
from xrlflow.backends.tvm.toolchain.reading import operator
from xrlflow.backends.tvm.toolchain.target import Machine
from xrlflow.backends.tvm.toolchain.weights import folded

LAYOUTS = {
    "relax.nn.conv1d": ["NWC", "WIO"],
    "relax.nn.conv2d": ["NHWC", "HWIO"],
    "relax.nn.conv3d": ["NDHWC", "DHWIO"],
    "relax.nn.conv1d_transpose": ["NCW", "IOW"],
    "relax.nn.conv2d_transpose": ["NCHW", "IOHW"],
    "relax.nn.conv3d_transpose": ["NCDHW", "IODHW"],
}
"""Channels last, for convolutions: the channels of a pixel are the columns of a product, and an output row is a row of
tiles. TVM has no transposed convolution of that layout. Transposed convolutions are listed with the layout that they
have already, since TVM would convert them otherwise."""

# Depthwise convolutions whose rows have fewer pixels are faster with channels last.
_SHORT_ROW = 16


def fuse(
    module: Any,
    machine: Machine,
    channels_last: bool | None = None,
    algorithms: Algorithms = DEFAULT,
) -> Any:
    """Apply layouts, constant folding and fusion. Afterwards the Relax function only calls primitive functions.

    `channels_last`: whether images have this layout; None: only if convolutions of the module are faster so.
    `algorithms`: those that layers and inverted residuals may use; `layers.chosen_in` returns the chosen algorithms.
    Raises BackendError if TVM refuses the module.
    """
    keep_layouts()
    with answering("compile", module):
        return applied("model", module, passes(machine, channels_last, algorithms), machine)


def passes(machine: Machine, channels_last: bool | None, algorithms: Algorithms) -> list[Pass]:
    """All passes, in their order. For the arguments see `fuse`."""
    tvm()
    from tvm import relax

    def channels_to_the_end(module: Any) -> Any:
        wanted = _gains_from_channels_last(module) if channels_last is None else channels_last
        return relax.transform.ConvertLayout(LAYOUTS)(module) if wanted else module

    return [
        Pass("decompose", relax.transform.DecomposeOpsForInference()),
        Pass("canonicalize", relax.transform.CanonicalizeBindings()),
        Pass("fold_moves", fold_moves),
        Pass("fold_constants", folded),
        Pass("check_constants", check_constants),
        Pass("transposed_convolutions", by_phases),
        Pass("pointwise", on_images),
        Pass("counted_axes", counted_axes),
        Pass("channels_last", channels_to_the_end),
        Pass("fold_moves", fold_moves),
        Pass("fold_constants", folded),
        Pass("without_detours", without_detours),
        Pass("bytes", handle_bytes),
        Pass("attention", lambda module: fuse_attention(module, machine)),
        Pass("bands", lambda module: fuse_bands(module, machine, algorithms)),
        Pass("direct_norm", lambda module: use_direct_norm(module, machine)),
        Pass("layers", lambda module: choose_kernels(module, machine, algorithms)),
        *last_passes(machine),
    ]


def _gains_from_channels_last(module: Any) -> bool:
    """Whether a module has a convolution that sums over channels, or a convolution with short rows.

    If it has neither, channels first are faster than channels last with two conversions between the layouts (1.1 to 5
    times as fast for rows of 17 and more pixels, but 0.9 times for 14 and 0.3 times for 7 pixels).
    """
    from tvm import relax

    gains = False

    def look(expression: Any) -> None:
        nonlocal gains
        if operator(expression) in ("relax.nn.conv1d", "relax.nn.conv3d"):
            gains = True
        if operator(expression) == "relax.nn.conv2d":
            channels, width = expression.args[0].ty.shape[1], expression.ty.shape[3]
            sized = hasattr(channels, "value") and hasattr(width, "value")
            depthwise = (
                sized and int(expression.attrs.groups) == int(channels) > 1 and int(width) >= _SHORT_ROW
            )
            gains |= not depthwise

    relax.analysis.post_order_visit(module["main"], look)
    return gains
