"""Removes the unnecessary transpositions that Relax's change of layouts inserts.

Relax transposes an image back before operators for which it has no other layout, and also before some operators that
could have another layout. This pass moves a transposition behind an operator if it meets its inverse behind that
operator, even if other operators read the values, too. Two transpositions in succession become one or none.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from xrlflow.backends.protocol import Array
from xrlflow.backends.tvm.toolchain.import_tvm import tvm
from xrlflow.backends.tvm.toolchain.reading import numbers, operator, sizes, with_calls, with_main
from xrlflow.backends.tvm.toolchain.weights import array_of, moved

_TRANSPOSE = "relax.permute_dims"
_POOLS = {"relax.nn.max_pool2d": "max_pool2d", "relax.nn.avg_pool2d": "avg_pool2d"}
_LAST = (0, 3, 1, 2)
"""The axes of the transposition from channels last to channels first."""
_ONE = frozenset(
    f"relax.{name}"
    for name in ("abs", "ceil", "clip", "erf", "exp", "floor", "log", "negative", "round", "rsqrt", "sigmoid")
    + ("sign", "sqrt", "square", "tanh", "logical_not", "astype", "nn.relu", "nn.leakyrelu", "nn.gelu")
    + ("nn.gelu_tanh", "nn.silu", "nn.selu", "nn.softplus")
)
_SEVERAL = frozenset(
    f"relax.{name}"
    for name in ("add", "subtract", "multiply", "divide", "power", "maximum", "minimum", "where", "greater")
    + (
        "greater_equal",
        "less",
        "less_equal",
        "equal",
        "not_equal",
        "logical_and",
        "logical_or",
        "logical_xor",
    )
)
ELEMENTWISE = _ONE | _SEVERAL
_REDUCTIONS = frozenset({"relax.mean", "relax.sum", "relax.max", "relax.min"})
_STRUCTURAL = frozenset({"relax.nn.pad", "relax.broadcast_to", "relax.concat", *_POOLS, *_REDUCTIONS})
# So that a transposition can move, another operand is transposed in addition if it has at most this part of the
# result's elements.
_SMALL = 1 / 16
_LIKE = {"nn.leakyrelu": "nn.relu", "clip": "nn.relu"}


def keep_layouts() -> None:
    """Register with Relax which operators work in any layout, for operators without such a rule in Relax."""
    from tvm.ir import Op, register_op_attr

    for name, like in _LIKE.items():
        infer = Op.get(f"relax.{like}").get_attr("FRelaxInferLayout")
        if Op.get(f"relax.{name}").get_attr("FRelaxInferLayout") is None:
            register_op_attr(f"relax.{name}", "FRelaxInferLayout", infer)


def counted_axes(module: Any) -> Any:
    """The module in which negative axes of "main" are replaced by positive axes. Relax's change of layouts takes a
    negative axis of a squeeze for a large number, and reads memory outside its lists."""

    def replace(call: Any, builder: Any) -> Any | None:
        from tvm import relax

        if operator(call) != "relax.squeeze" or call.attrs.axis is None:
            return None
        axes = numbers(call.attrs.axis)
        if min(axes, default=0) >= 0:
            return None
        return relax.op.squeeze(call.args[0], [axis % call.args[0].ty.ndim for axis in axes])

    return with_calls(module, replace)


def without_detours(module: Any) -> Any:
    """The module with fewer transpositions in "main"."""
    tvm()
    from tvm import relax

    useful = _useful(module["main"])
    if not useful:
        return module

    @relax.expr_functor.mutator
    class LayoutConverter(relax.PyExprMutator):  # type: ignore[misc]
        def visit_var_binding_(self, binding: Any) -> None:
            self.moves = useful.get(binding.var, frozenset())
            super().visit_var_binding_(binding)

        def visit_call_(self, call: Any) -> Any:
            moves = self.moves
            call = super().visit_call_(call)
            if operator(call) == _TRANSPOSE:
                return _joined(call, self.builder_)
            for axes in sorted(moves):
                turned = _before_transposition(call, axes, self.builder_)
                if turned is not None:
                    return relax.op.permute_dims(self.builder_.emit(turned), list(axes))
            return call

    module = with_main(module, LayoutConverter(module))
    return relax.transform.DeadCodeElimination()(relax.transform.CanonicalizeBindings()(module))


def border(x: Any, pads: Any | None, value: Any | None) -> Any | None:
    """A tensor with a constant border, as an operator that `without_detours` can transpose. (TVM's importer would make
    a kernel of it.)

    `pads`: the widths of the border before each dimension, then after each dimension. None if `pads` or `value`
    (default: 0) are not constant, if they crop, or for a tensor of integers.
    """
    from tvm import relax
    from tvm.ir import GenericConst

    shape = sizes(x, "float32")
    if shape is None or not isinstance(pads, GenericConst) or not isinstance(value, GenericConst | None):
        return None
    widths = array_of(pads).ravel().tolist()
    number = 0.0 if value is None else float(array_of(value).item())
    if len(widths) != 2 * len(shape) or min(widths, default=0) < 0 or not math.isfinite(number):
        return None
    pairs = [n for pair in zip(widths, widths[len(shape) :]) for n in pair]
    return relax.op.nn.pad(x, pairs, "constant", number)


def axes_of(call: Any) -> tuple[int, ...]:
    """The axes of a transposition."""
    rank = len(call.ty.shape)
    axes = range(rank)[::-1] if call.attrs.axes is None else numbers(call.attrs.axes)
    return tuple(axis % rank for axis in axes)


def _transposed(array: Array, shape: tuple[int, ...], axes: tuple[int, ...]) -> Array:
    return array.reshape(shape).transpose(axes)


def _inverse(axes: Sequence[int]) -> tuple[int, ...]:
    return tuple(sorted(range(len(axes)), key=axes.__getitem__))


def _useful(main: Any) -> Mapping[Any, frozenset[tuple[int, ...]]]:
    """For each variable, the transpositions that would meet their inverse if they were applied to the variable:
    directly, or after the operators that read it."""
    from tvm import relax

    bindings = [b for block in main.body.blocks for b in block.bindings]
    useful: dict[Any, set[tuple[int, ...]]] = {}
    for binding in reversed(bindings):
        value = binding.value
        if operator(value) == _TRANSPOSE and sizes(value) is not None:
            useful.setdefault(value.args[0], set()).add(_inverse(axes_of(value)))
        elif operator(value) in ELEMENTWISE | _STRUCTURAL:
            for operand in (x for x in _tensors(value) if isinstance(x, relax.Var)):
                useful.setdefault(operand, set()).update(useful.get(binding.var, ()))
    return {variable: frozenset(axes) for variable, axes in useful.items() if axes}


def _tensors(call: Any) -> list[Any]:
    """The operands of a call that are tensors. The operands of a concatenation are its parts."""
    from tvm import relax

    operands = call.args[0].fields if isinstance(call.args[0], relax.Tuple) else call.args
    return [x for x in operands if isinstance(x.ty, relax.TensorType)]


def _joined(call: Any, builder: Any) -> Any:
    """Merge a transposition of a transposed tensor into one transposition, or into none if the two cancel."""
    from tvm import relax

    before, axes = _transposition_of(call.args[0], builder), axes_of(call)
    source = call.args[0] if before is None else before.args[0]
    both = list(axes) if before is None else [axes_of(before)[axis] for axis in axes]
    if both == sorted(both):
        return source
    return call if before is None else relax.op.permute_dims(source, both)


def _transposition_of(operand: Any, builder: Any) -> Any | None:
    """The transposition that computes an operand; None if something else computes it."""
    from tvm import relax

    bound = builder.lookup_binding(operand) if isinstance(operand, relax.Var) else None
    return bound if bound is not None and operator(bound) == _TRANSPOSE else None


def _before_transposition(call: Any, axes: tuple[int, ...], builder: Any) -> Any | None:
    """The same operator on the operands before their transposition by `axes`. Its result, transposed by `axes`, equals
    the result of the call. None if there is no such call, or if no operand is transposed by `axes`."""
    make = _MOVED.get(operator(call))
    shape = sizes(call)
    if make is None or shape is None or len(shape) != len(axes):
        return None
    operands = _tensors(call)
    before = [_transposition_of(operand, builder) for operand in operands]
    sources = [None if b is None or axes_of(b) != axes else b.args[0] for b in before]
    if all(operand is None for operand in sources):
        return None
    turned = [
        _small(operand, shape, axes, builder) if source is None else source
        for operand, source in zip(operands, sources)
    ]
    return None if any(operand is None for operand in turned) else make(call, turned, axes)


def _small(operand: Any, result: Sequence[int], axes: Sequence[int], builder: Any) -> Any | None:
    """A constant or a small operand, expanded to the dimensions of the result and transposed by the inverse of `axes`,
    as `_before_transposition` needs it. None for larger operands."""
    from tvm import relax
    from tvm.ir import GenericConst

    shape = sizes(operand)
    if shape is None:
        return None
    full = (1,) * (len(result) - len(shape)) + shape
    back = _inverse(axes)
    if isinstance(operand, GenericConst):
        return moved(operand, _transposed, full, tuple(back))
    if math.prod(shape) > _SMALL * math.prod(result):
        return None
    if len(shape) < len(result):
        operand = builder.emit(relax.op.reshape(operand, full))
    return builder.emit(relax.op.permute_dims(operand, list(back)))


def _elementwise(call: Any, operands: Sequence[Any], axes: Sequence[int]) -> Any:
    from tvm import relax

    others = list(call.args)[len(operands) :]
    return relax.Call(call.op, [*operands, *others], call.attrs, call.ty_args)


def _padded(call: Any, operands: Sequence[Any], axes: Sequence[int]) -> Any | None:
    from tvm import relax

    widths = numbers(call.attrs.pad_width)
    if len(call.args) > 1 or len(widths) != 2 * len(axes):
        return None
    turned = [n for axis in _inverse(axes) for n in widths[2 * axis : 2 * axis + 2]]
    return relax.op.nn.pad(operands[0], turned, str(call.attrs.pad_mode), float(call.attrs.pad_value))


def _broadcast(call: Any, operands: Sequence[Any], axes: Sequence[int]) -> Any | None:
    from tvm import relax

    shape = sizes(call)
    assert shape is not None
    return relax.op.broadcast_to(operands[0], [shape[axis] for axis in _inverse(axes)])


def _concatenated(call: Any, operands: Sequence[Any], axes: Sequence[int]) -> Any | None:
    from tvm import relax

    if call.attrs.axis is None:
        return None
    return relax.op.concat(list(operands), axes[int(call.attrs.axis) % len(axes)])


def _reduced(call: Any, operands: Sequence[Any], axes: Sequence[int]) -> Any | None:
    from tvm import relax

    if not call.attrs.keepdims or call.attrs.axis is None:
        return None
    turned = [axes[axis % len(axes)] for axis in numbers(call.attrs.axis)]
    return getattr(relax.op, operator(call).removeprefix("relax."))(operands[0], turned, True)


def _pooled(call: Any, operands: Sequence[Any], axes: Sequence[int]) -> Any | None:
    from tvm import relax

    attrs = call.attrs
    if tuple(axes) != _LAST or (attrs.layout, attrs.out_layout) != ("NCHW", "NCHW"):
        return None
    make = getattr(relax.op.nn, _POOLS[operator(call)])
    return make(
        operands[0], numbers(attrs.pool_size), numbers(attrs.strides), numbers(attrs.padding),
        numbers(attrs.dilation), bool(attrs.ceil_mode), bool(attrs.count_include_pad), "NHWC",
    )  # fmt: skip


_MOVED: Mapping[str, Callable[[Any, Sequence[Any], Sequence[int]], Any | None]] = {
    **dict.fromkeys(ELEMENTWISE, _elementwise),
    **dict.fromkeys(_POOLS, _pooled),
    **dict.fromkeys(_REDUCTIONS, _reduced),
    "relax.nn.pad": _padded,
    "relax.broadcast_to": _broadcast,
    "relax.concat": _concatenated,
}
