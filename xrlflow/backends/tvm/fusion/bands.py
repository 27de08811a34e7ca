"""Finds inverted residuals in a Relax function (a depthwise convolution with a pointwise one before it, after it, or
both), and replaces each by one kernel. The kernel computes one block of rows (a band) after the other."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

from xrlflow.backends.tvm.fusion.following import Followed, Function
from xrlflow.backends.tvm.fusion.replacing import Replacement, with_kernels
from xrlflow.backends.tvm.kernels.algorithms import DEFAULT, Algorithms
from xrlflow.backends.tvm.kernels.bands import (
    BandBlocking,
    ConvBlock,
    by_channel,
    kernel,
    packed_expansion,
    packed_projection,
)
from xrlflow.backends.tvm.kernels.bands_plan import possible, untuned_blocking
from xrlflow.backends.tvm.kernels.building import FLOAT
from xrlflow.backends.tvm.toolchain.reading import constant, numbers, operator, sizes, weights_from_memory
from xrlflow.backends.tvm.toolchain.target import Machine
from xrlflow.backends.tvm.toolchain.weights import array_of


@dataclass(frozen=True, slots=True)
class _Convolution:
    """A convolution with constant weights, and the element-wise operators that follow it."""

    call: Any
    followed: Followed

    @property
    def weights(self) -> Any:
        return array_of(self.call.args[1])


@dataclass(frozen=True, slots=True)
class _Match:
    """A depthwise convolution with the pointwise convolutions before it (`expand`) and after it (`project`); None:
    there is no such convolution."""

    expand: _Convolution | None
    depthwise: _Convolution
    project: _Convolution | None

    @property
    def parts(self) -> list[_Convolution]:
        return [part for part in (self.expand, self.depthwise, self.project) if part is not None]

    @property
    def first(self) -> _Convolution:
        return self.parts[0]

    @property
    def last(self) -> _Convolution:
        return self.parts[-1]

    @property
    def inside(self) -> frozenset[Any]:
        return frozenset().union(*(part.followed.inside for part in self.parts))

    def workload(self) -> ConvBlock:
        attrs = self.depthwise.call.attrs
        (top, left, _, _), weights = numbers(attrs.padding), sizes(self.depthwise.call.args[1])
        strides = numbers(attrs.strides)
        image, middle, out = map(sizes, (self.first.call.args[0], self.depthwise.call, self.last.call))
        assert image is not None
        assert middle is not None
        assert out is not None
        assert weights is not None
        return ConvBlock(
            image, middle, out, (weights[0], weights[1]), (strides[0], strides[1]), top, left,
            None if self.expand is None else self.expand.followed.steps,
            self.depthwise.followed.steps,
            None if self.project is None else self.project.followed.steps,
        )  # fmt: skip

    def operands(self, workload: ConvBlock, blocking: BandBlocking) -> list[Any]:
        """The arguments of the kernel but the result: the image, packed weights, and the extra operands of the
        steps."""

        def wide(values: Sequence[Any]) -> list[Any]:
            return [constant(by_channel(array_of(value), workload, blocking)) for value in values]

        arguments = [self.first.call.args[0]]
        if self.expand is not None:
            arguments.append(constant(packed_expansion(_matrix(self.expand.weights), workload, blocking)))
            arguments += wide(self.expand.followed.extras)
        window = self.depthwise.weights
        arguments.append(constant(by_channel(window.reshape(*window.shape[:2], -1), workload, blocking)))
        arguments += wide(self.depthwise.followed.extras)
        if self.project is not None:
            arguments.append(constant(packed_projection(_matrix(self.project.weights), workload, blocking)))
            arguments += self.project.followed.extras
        return arguments


def _matrix(weights: Any) -> Any:
    """The weights of a 1x1 convolution, [row, column, channel, expanded], as [channel, expanded]."""
    return weights.reshape(weights.shape[2:])


def fuse_bands(module: Any, machine: Machine, algorithms: Algorithms = DEFAULT) -> Any:
    """The module with one kernel for each inverted residual in "main" for which one kernel is faster than separate
    kernels, as measured or as estimated."""
    if not algorithms.blocks:
        return module
    main = module["main"]
    far = algorithms.timings is not None and weights_from_memory(main)

    def choose(workload: ConvBlock) -> BandBlocking | None:
        measured = None if algorithms.timings is None else algorithms.timings.of_block(workload, far)
        return untuned_blocking(workload, machine) if measured is None else measured.blocking

    replacements = {
        match.last.followed.last: _replacement(match, blocking)
        for match, blocking in _matches(Function(main), machine, choose)
    }
    return with_kernels(module, replacements)


def _replacement(match: _Match, blocking: BandBlocking) -> Replacement:
    workload = match.workload()
    make, read = partial(kernel, workload, blocking), partial(match.operands, workload, blocking)
    return Replacement("bands", (workload, blocking), make, read, workload.out)


def _matches(
    function: Function, machine: Machine, choose: Callable[[ConvBlock], BandBlocking | None]
) -> list[tuple[_Match, BandBlocking]]:
    """The inverted residuals for which `choose` returns a blocking, each with its blocking. No two of them share an
    operator."""
    pointwise: dict[Any, _Convolution] = {}
    """1x1 convolutions by their last variable."""
    for variable, call in function.values.items():
        if _is_pointwise(call):
            followed = function.followed(variable, by_channel=True)
            pointwise[followed.last] = _Convolution(call, followed)
    matches: list[tuple[_Match, BandBlocking]] = []
    used: set[Any] = set()
    for variable, call in function.values.items():
        if not _is_depthwise(call):
            continue
        alone = _Convolution(call, function.followed(variable, used, by_channel=True))
        before = pointwise.get(call.args[0])
        if before is not None and (function.uses[call.args[0]] > 1 or before.followed.inside & used):
            before = None
        after = _projection(function, alone, used)
        choices = [_Match(before, alone, after), _Match(None, alone, after), _Match(before, alone, None)]
        match = next((c for c in choices if len(c.parts) > 1 and possible(c.workload(), machine)), None)
        if match is not None and (blocking := choose(match.workload())) is not None:
            matches.append((match, blocking))
            used |= match.inside
    return matches


def _projection(function: Function, depthwise: _Convolution, used: set[Any]) -> _Convolution | None:
    """The 1x1 convolution that reads the result of a depthwise convolution; None if another operator reads this result,
    too."""
    reader = function.reader(depthwise.followed.last)
    call = None if reader is None or reader in used else function.values[reader]
    if call is None or not _is_pointwise(call) or call.args[0] != depthwise.followed.last:
        return None
    return _Convolution(call, function.followed(reader, used))


def _is_convolution(call: Any) -> bool:
    """Whether an expression is a convolution with channels last, known sizes, constant weights and no dilation."""
    from tvm.ir import GenericConst

    if operator(call) != "relax.nn.conv2d" or not isinstance(call.args[1], GenericConst):
        return False
    attrs = call.attrs
    layouts = (attrs.data_layout, attrs.kernel_layout, attrs.out_layout or "NHWC")
    shapes = [sizes(x, FLOAT) for x in (*call.args, call)]
    known = all(shape is not None and 0 not in shape for shape in shapes)
    return layouts == ("NHWC", "HWIO", "NHWC") and known and numbers(attrs.dilation) == [1, 1]


def _is_pointwise(call: Any) -> bool:
    if not _is_convolution(call):
        return False
    attrs, weights = call.attrs, sizes(call.args[1])
    plain = numbers(attrs.strides) == [1, 1] and not any(numbers(attrs.padding)) and int(attrs.groups) == 1
    return plain and weights is not None and weights[:2] == (1, 1)


def _is_depthwise(call: Any) -> bool:
    if not _is_convolution(call):
        return False
    image, out = sizes(call.args[0]), sizes(call)
    assert image is not None
    assert out is not None
    return int(call.attrs.groups) == image[3] == out[3] > 1
