"""Generated kernels for operators where TVM's are slower or less exact.

A sum of thousands of elements in sequence is wrong by ten to a hundred units in the last place, and cannot use vectors.
The schedule sums in lanes if vectors divide the row. If they do not, the reductions of this module split the row into
two parts: full vectors, and the few remaining elements.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from operator import add
from typing import Any

from xrlflow.backends.tvm.kernels.elementwise import legal_power
from xrlflow.backends.tvm.kernels.pooling import legal_average_pool, legal_max_pool
from xrlflow.backends.tvm.kernels.pooling_rows import legal_average_pool_rows, legal_max_pool_rows
from xrlflow.backends.tvm.kernels.resizing import legal_resize
from xrlflow.backends.tvm.kernels.sampling import legal_grid_sample, legal_other_samples
from xrlflow.backends.tvm.schedules.rows import partial_lanes
from xrlflow.backends.tvm.toolchain.reading import numbers, sizes
from xrlflow.backends.tvm.toolchain.target import Machine


def legalizations(machine: Machine) -> Mapping[str, Callable[[Any, Any], Any]]:
    """Replacements of calls, by operator, for `relax.transform.LegalizeOps`."""

    def legal_softmax(builder: Any, call: Any) -> Any:
        axis = int(call.attrs.axis)
        return builder.call_te(softmax, call.args[0], axis, machine.lanes, primfunc_name_hint="softmax")

    def along_rows(name: str, make: Callable[..., Any]) -> Callable[[Any, Any], Any]:
        def legal(builder: Any, call: Any) -> Any:
            shape, axes = sizes(call.args[0]), _last_axes(call.args[0], call.attrs.axis)
            scalar = not sizes(call)
            keeps = scalar or bool(call.attrs.keepdims)
            if shape is None or axes is None or not (keeps or _first_part(shape[-1], machine.lanes)):
                return _default(name)(builder, call)
            # A scalar becomes a row first, since partial sums are not possible next to a block without loops.
            row = builder.call_te(make, call.args[0], axes, keeps, machine.lanes, primfunc_name_hint=name)
            return builder.call_te(_only, builder.emit(row), primfunc_name_hint="only") if scalar else row

        return legal

    def legal_log_softmax(builder: Any, call: Any) -> Any:
        arguments = (call.args[0], int(call.attrs.axis), machine.lanes)
        return builder.call_te(log_softmax, *arguments, primfunc_name_hint="log_softmax")

    def legal_layer_norm(builder: Any, call: Any) -> Any:
        x, scale, bias = call.args
        shape, axes = sizes(x), _last_axes(x, call.attrs.axes)
        if shape is None or axes is None or not _first_part(shape[-1], machine.lanes):
            return _default("nn.layer_norm")(builder, call)  # the same if the row is one part
        return builder.call_te(
            layer_norm, x, scale, bias, axes, float(call.attrs.epsilon), machine.lanes,
            primfunc_name_hint="layer_norm",
        )  # fmt: skip

    return {
        "relax.nn.relu": _legal_relu,
        "relax.power": _pick("power", legal_power),
        "relax.image.resize2d": _pick("image.resize2d", lambda b, call: legal_resize(b, call, machine)),
        "relax.image.grid_sample": _pick(
            "image.grid_sample", lambda b, call: legal_grid_sample(b, call, machine), legal_other_samples
        ),
        "relax.nn.max_pool2d": _pick(
            "nn.max_pool2d", legal_max_pool, lambda b, call: legal_max_pool_rows(b, call, machine)
        ),
        "relax.nn.avg_pool2d": _pick(
            "nn.avg_pool2d",
            legal_average_pool,
            lambda b, call: legal_average_pool_rows(b, call, machine),
        ),
        "relax.scatter_elements": _legal_scatter,
        "relax.nn.softmax": legal_softmax,
        "relax.nn.log_softmax": legal_log_softmax,
        "relax.nn.layer_norm": legal_layer_norm,
        "relax.max": along_rows("max", greatest),
        "relax.min": along_rows("min", least),
        "relax.sum": along_rows("sum", total),
        "relax.mean": along_rows("mean", mean),
        "relax.variance": along_rows("variance", variance),
    }


def _pick(name: str, *makes: Callable[[Any, Any], Any | None]) -> Callable[[Any, Any], Any]:
    """A function that returns the kernel for a call: the first that one of the functions `makes` returns, or TVM's
    default if all return None. `name`: the operator."""

    def legal(builder: Any, call: Any) -> Any:
        results = (make(builder, call) for make in makes)
        result = next((each for each in results if each is not None), None)
        return _default(name)(builder, call) if result is None else result

    return legal


def _legal_scatter(builder: Any, call: Any) -> Any:
    axis, reduction = int(call.attrs.axis), str(call.attrs.reduction)
    return builder.call_te(scatter, *call.args, axis, reduction, primfunc_name_hint="scatter")


def _legal_relu(builder: Any, call: Any) -> Any:
    return builder.call_te(relu, call.args[0], primfunc_name_hint="relu")


def relu(x: Any) -> Any:
    """max(0, x), which is NaN for NaN. TVM's own max(x, 0) is 0 for NaN: it returns the second operand unless the first
    one is greater."""
    from tvm import te, tirx

    zero = tirx.const(0, x.dtype)
    return te.compute(x.shape, lambda *i: te.max(zero, x[i]), name="relu")


def _default(name: str) -> Callable[[Any, Any], Any]:
    from tvm.ir import Op

    legalize: Callable[[Any, Any], Any] = Op.get(f"relax.{name}").get_attr("FLegalize")
    return legalize


def _last_axes(x: Any, axes: Any | None) -> list[int] | None:
    """The axes `axes` of a tensor (None: all axes) in ascending order; None if the last axis in memory is not among
    them."""
    shape = sizes(x, "float32")
    if not shape or 0 in shape:
        return None
    ordered = sorted(axis % len(shape) for axis in numbers(range(len(shape)) if axes is None else axes))
    return ordered if ordered and ordered[-1] == len(shape) - 1 else None


def _first_part(along: int, lanes: int) -> int:
    """The length of the first of the two parts of a row; 0 if the row is reduced in one part."""
    return 0 if along < 2 * lanes or partial_lanes(along, lanes) else along // lanes * lanes


def scatter(x: Any, indices: Any, updates: Any, axis: int, reduction: str) -> Any:
    """ScatterElements with a copy of its indices. TVM's scatter is a single block, and passes that look for blocks
    inside a block would fail with an internal error."""
    from tvm import te, topi

    copied = te.compute(indices.shape, lambda *i: indices[i], name="indices")
    return topi.scatter_elements(x, copied, updates, axis, reduction)


def softmax(x: Any, axis: int, lanes: int) -> Any:
    """exp(x - max) * (1 / sum): one division per row instead of one per element, if the schedule works by rows."""
    from tvm import te, tirx

    axes = [axis % len(x.shape)]
    maxima, rows = _reduced("softmax_max", te.max, tirx.max, x, axes, lanes), _rows(x, axes)
    powers = te.compute(x.shape, lambda *i: te.exp(x[i] - maxima(rows(i))), name="softmax_exp")
    sums = _reduced("softmax_sum", te.sum, add, powers, axes, lanes)
    one = tirx.const(1.0, x.dtype)
    return te.compute(x.shape, lambda *i: powers[i] * (one / sums(rows(i))), name="softmax")


def log_softmax(x: Any, axis: int, lanes: int) -> Any:
    """x - max - log(sum of exp(x - max))."""
    from tvm import te, tirx

    axes = [axis % len(x.shape)]
    maxima, rows = _reduced("log_softmax_max", te.max, tirx.max, x, axes, lanes), _rows(x, axes)
    powers = te.compute(x.shape, lambda *i: te.exp(x[i] - maxima(rows(i))), name="log_softmax_exp")
    sums = _reduced("log_softmax_sum", te.sum, add, powers, axes, lanes)
    logs = te.compute(
        [x.shape[axis] for axis in range(len(x.shape)) if axis not in axes],
        lambda *i: te.log(sums(i)),
        name="log_softmax_log",
    )
    return te.compute(x.shape, lambda *i: x[i] - maxima(rows(i)) - logs[rows(i)], name="log_softmax")


def total(x: Any, axes: Sequence[int], keepdims: bool, lanes: int) -> Any:
    """The sum along some axes."""
    from tvm import te

    return _by_row(x, axes, keepdims, _reduced("sum", te.sum, add, x, axes, lanes))


def greatest(x: Any, axes: Sequence[int], keepdims: bool, lanes: int) -> Any:
    """The greatest element along some axes."""
    from tvm import te, tirx

    return _by_row(x, axes, keepdims, _reduced("max", te.max, tirx.max, x, axes, lanes))


def least(x: Any, axes: Sequence[int], keepdims: bool, lanes: int) -> Any:
    """The least element along some axes."""
    from tvm import te, tirx

    return _by_row(x, axes, keepdims, _reduced("min", te.min, tirx.min, x, axes, lanes))


def mean(x: Any, axes: Sequence[int], keepdims: bool, lanes: int) -> Any:
    """The mean along some axes."""
    from tvm import te, tirx

    sums = _reduced("sum", te.sum, add, x, axes, lanes)
    count = tirx.const(1.0, x.dtype)
    for axis in axes:
        count = count * x.shape[axis].astype(x.dtype)
    return _by_row(x, axes, keepdims, lambda i: sums(i) / count)


def variance(x: Any, axes: Sequence[int], keepdims: bool, lanes: int) -> Any:
    """The mean of the squared distances from the mean along some axes."""
    return _variance(x, mean(x, axes, True, lanes), axes, keepdims, lanes)


def _variance(x: Any, middle: Any, axes: Sequence[int], keepdims: bool, lanes: int) -> Any:
    from tvm import te

    def squared(*indices: Any) -> Any:
        distance = x[indices] - middle[_first(indices, axes)]
        return distance * distance

    return mean(te.compute(x.shape, squared, name="squared"), axes, keepdims, lanes)


def layer_norm(x: Any, scale: Any, bias: Any, axes: Sequence[int], epsilon: float, lanes: int) -> Any:
    """(x - mean) / sqrt(variance + epsilon) * scale + bias, mean and variance along some axes."""
    from tvm import te, tirx

    middle = mean(x, axes, True, lanes)
    spread = _variance(x, middle, axes, True, lanes)
    small = tirx.const(epsilon, x.dtype)

    def normalized(*indices: Any) -> Any:
        row, along = _first(indices, axes), tuple(indices[axis] for axis in axes)
        return (x[indices] - middle[row]) * te.rsqrt(spread[row] + small) * scale[along] + bias[along]

    return te.compute(x.shape, normalized, name="layer_norm")


def _first(indices: Sequence[Any], axes: Sequence[int]) -> tuple[Any, ...]:
    """For the index of an element, the index of the result of its row's reduction. Reduced axes remain with size 1."""
    return tuple(0 if axis in axes else i for axis, i in enumerate(indices))


def _rows(x: Any, axes: Sequence[int]) -> Callable[[Sequence[Any]], tuple[Any, ...]]:
    """A function that maps the index of an element to the index of the result of its row's reduction. Reduced axes are
    removed."""
    return lambda indices: tuple(indices[axis] for axis in range(len(x.shape)) if axis not in axes)


def _only(x: Any) -> Any:
    """The only element of a tensor, as a scalar."""
    from tvm import te

    return te.compute((), lambda: x[(0,) * len(x.shape)], name="only")


def _by_row(x: Any, axes: Sequence[int], keepdims: bool, of: Callable[[tuple[Any, ...]], Any]) -> Any:
    """The tensor of the results of a reduction. `of` maps the index of a row to its result. With `keepdims`, the
    reduced axes remain with size 1."""
    from tvm import te

    rows = _rows(x, axes)
    shape = [1 if axis in axes else n for axis, n in enumerate(x.shape) if keepdims or axis not in axes]
    return te.compute(shape, lambda *i: of(rows(i) if keepdims else i), name="kept")


def _reduced(
    name: str,
    reduce: Callable[..., Any],
    join: Callable[[Any, Any], Any],
    x: Any,
    axes: Sequence[int],
    lanes: int,
) -> Callable[[tuple[Any, ...]], Any]:
    """The reduction of `x` over some axes, as a function from an index without these axes to the result. `join`
    combines two parts.

    The last axis is reduced in two parts if it is also the last axis in memory and vectors do not divide it.
    """
    from tvm import te

    last, dimensions = axes[-1], len(x.shape)
    rows = [axis for axis in range(dimensions) if axis not in axes]

    def part(name: str, begin: int, count: Any) -> Any:
        along = {a: te.reduce_axis((0, count if a == last else x.shape[a]), name="k") for a in axes}

        def element(*indices: Any) -> Any:
            at = {**dict(zip(rows, indices)), **along}
            index = tuple(at[a] + begin if a == last and begin else at[a] for a in range(dimensions))
            return reduce(x[index], axis=list(along.values()))

        return te.compute([x.shape[axis] for axis in rows] or [1], element, name=name)

    extent = x.shape[last]
    split = _first_part(int(extent), lanes) if last == dimensions - 1 and hasattr(extent, "value") else 0
    if not split:
        only = part(name, 0, extent)
        return lambda i: only[i or (0,)]
    first, second = part(f"{name}_most", 0, split), part(f"{name}_rest", split, extent - split)
    return lambda i: join(first[i or (0,)], second[i or (0,)])
