"""Finds softmax(f(q k)) v (attention) in a Relax function, and replaces its operators by one kernel."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any

from xrlflow.backends.tvm.kernels.attention import STEPS, Array, Attention, Extra, ScoreStep, kernel
from xrlflow.backends.tvm.toolchain.import_tvm import tvm
from xrlflow.backends.tvm.toolchain.reading import operator, sizes, with_main
from xrlflow.backends.tvm.toolchain.target import Machine
from xrlflow.backends.tvm.toolchain.weights import array_of

_FLOAT = "float32"
# A row of scores has at least this many vectors. In shorter rows, an incomplete vector would be most of the row.
_FEWEST_VECTORS = 2

Match = tuple[Attention, Sequence[Any]]
"""The computation, and the expressions of q, k, v and of the extra operands of its steps."""


def fuse_attention(module: Any, machine: Machine) -> Any:
    """The module with one kernel for each softmax(f(q k)) v in "main" whose scores no other operator reads."""
    tvm()
    from tvm import relax

    matches = {
        variable: match
        for variable, match in _Reader(module["main"]).matches().items()
        if match[0].keys >= _FEWEST_VECTORS * machine.lanes
    }
    if not matches:
        return module
    functions: dict[Attention, Any] = {}

    @relax.expr_functor.mutator
    class Fuser(relax.PyExprMutator):  # type: ignore[misc]
        def visit_var_binding_(self, binding: Any) -> None:
            if binding.var not in matches:
                super().visit_var_binding_(binding)
                return
            workload, arguments = matches[binding.var]
            if workload not in functions:
                functions[workload] = self.builder_.add_func(kernel(workload, machine), "attention")
            read = [self.visit_expr(argument) for argument in arguments]
            call = relax.call_tir(functions[workload], read, relax.TensorType(workload.out.shape, _FLOAT))
            self.builder_.emit_normalized(relax.VarBinding(binding.var, self.builder_.normalize(call)))

    return relax.transform.DeadCodeElimination()(with_main(module, Fuser(module)))


class _Reader:
    """Finds the attentions of a Relax function."""

    def __init__(self, function: Any) -> None:
        from tvm import relax

        self._values: dict[Any, Any] = {}
        self._uses: Counter[Any] = Counter()

        def count(expression: Any) -> None:
            for part in parts_of(expression):
                if isinstance(part, relax.Var):
                    self._uses[part] += 1

        def look(block: Any) -> None:
            for binding in block.bindings:
                self._values[binding.var] = binding.value
                count(binding.value)

        for block in function.body.blocks:
            look(block)
        count(function.body.body)

    def matches(self) -> dict[Any, Match]:
        """The matches, by the variable of their result. If the result is only transposed afterwards, by the variable of
        the transposed result."""
        matches: dict[Any, Match] = {}
        for variable, value in self._values.items():
            if operator(value) == "relax.matmul" and (match := self._attention(value)) is not None:
                matches[variable] = match
            elif operator(value) == "relax.permute_dims" and value.args[0] in matches:
                inner = value.args[0]
                if self._uses[inner] == 1:
                    workload, arguments = matches.pop(inner)
                    matches[variable] = (
                        replace(workload, out=_before_transposition(workload.out.shape, value)),
                        arguments,
                    )
        return matches

    def _attention(self, call: Any) -> Match | None:
        weights = self._own(self._reshaped(call.args[0]))
        scores = None if weights is None else sizes(weights, _FLOAT)
        if weights is None or scores is None or operator(weights) != "relax.nn.softmax":
            return None
        if int(weights.attrs.axis) not in (-1, len(scores) - 1):
            return None
        chain = self._chain(weights.args[0], scores)
        if chain is None:
            return None
        product, steps, extras = chain
        factors = [self._scaled(a) for a in product.args]
        steps = (*(step for _, step in factors if step is not None), *steps)
        q, k, v = (self._array(a) for a in (*(a for a, _ in factors), call.args[1]))
        out = sizes(call, _FLOAT)
        if q is None or k is None or v is None or out is None:
            return None
        # Operands must not be broadcast.
        used = (sizes(a) for a in (*product.args, product, *call.args, call))
        if len({math.prod(shape[:-2]) for shape in used if shape is not None}) > 1:
            return None
        if 0 in (*scores, *out, q[0].sizes[-1]):
            return None
        workload = Attention(q[0], k[0], v[0], Array(out, tuple(range(len(out)))), steps)
        return workload, [q[1], k[1], v[1], *extras]

    def _reshaped(self, expression: Any) -> Any:
        """The operand of a reshape that only changes the dimensions of the heads; any other expression is returned as
        it is."""
        value = self._own(expression)
        if value is None or operator(value) != "relax.reshape" or not _keeps_rows(value):
            return expression
        return self._reshaped(value.args[0])

    def _scaled(self, operand: Any) -> tuple[Any, ScoreStep | None]:
        """Split a multiplication or division by a number off an operand of the first product. Returns the operand
        without the number, and a step that multiplies or divides the scores by the number instead (None: the operand
        has no such number)."""
        value = self._own(operand)
        if value is None or operator(value) not in ("relax.multiply", "relax.divide"):
            return operand, None
        first, second = value.args
        if operator(value) == "relax.multiply" and isinstance(_step_operand(first, ()), float):
            first, second = second, first
        number = _step_operand(second, ())
        if not isinstance(number, float) or sizes(first, _FLOAT) != sizes(operand):
            return operand, None
        return first, ScoreStep(operator(value), (None, number))

    def _own(self, expression: Any) -> Any | None:
        """The call that computes an expression which is read once; None for other expressions."""
        return self._values.get(expression) if self._uses[expression] == 1 else None

    def _chain(
        self, expression: Any, scores: tuple[int, ...]
    ) -> tuple[Any, tuple[ScoreStep, ...], tuple[Any, ...]] | None:
        """The product that computes the scores, the steps after it, and the extra operands of these steps; None if the
        expression has no such steps and product. `scores`: the dimensions of the scores."""
        value = self._own(expression)
        if value is None or sizes(expression, _FLOAT) != scores:
            return None
        if operator(value) == "relax.reshape" and _keeps_rows(value):
            return self._chain(value.args[0], sizes(value.args[0]) or ())
        if operator(value) == "relax.matmul":
            return value, (), ()
        if operator(value) not in STEPS:
            return None
        for position, operand in enumerate(value.args):
            if (before := self._chain(operand, scores)) is not None:
                product, steps, extras = before
                others = [a for i, a in enumerate(value.args) if i != position]
                read = [_step_operand(a, scores[:-2]) for a in others]
                if any(r is None for r in read):
                    return None
                operands: list[float | Extra | None] = [*read]
                operands.insert(position, None)
                more = [a for a, r in zip(others, read) if isinstance(r, Extra)]
                return product, (*steps, ScoreStep(operator(value), tuple(operands))), (*extras, *more)
        return None

    def _array(self, expression: Any) -> tuple[Array, Any] | None:
        """How an operand is stored, and the expression of the stored tensor; None for an operand that a kernel cannot
        read. The operand may be the stored tensor itself, its transpose, a reshape that only changes the dimensions of
        the heads, or one of several operands that are stacked in the tensor."""
        shape = sizes(expression, _FLOAT)
        if shape is None or len(shape) < 2:
            return None
        value = self._values.get(expression)
        inner = self._stored(value, len(shape)) if isinstance(value, _call_type()) else None
        return inner or (Array(shape, tuple(range(len(shape)))), expression)

    def _stored(self, call: Any, rank: int) -> tuple[Array, Any] | None:
        """The result of `_array` for a call that only reshapes, transposes or selects; None for any other call."""
        name = operator(call)
        if name == "relax.reshape":
            return self._array(call.args[0]) if _keeps_rows(call) else None
        if name == "relax.take":
            return self._selected(call)
        if name != "relax.permute_dims" or (inner := self._array(call.args[0])) is None:
            return None
        array, holder = inner
        axes, shape = _axes(rank, call), sizes(call.args[0])
        if array.sizes == shape:
            return replace(array, axes=tuple(array.axes[a] for a in axes)), holder
        if axes[:-2] != list(range(rank - 2)):
            return Array(shape or (), tuple(axes)), call.args[0]
        return replace(
            array, axes=(*array.axes[:-2], array.axes[axes[-2] - rank], array.axes[axes[-1] - rank])
        ), holder

    def _selected(self, call: Any) -> tuple[Array, Any] | None:
        """The result of `_array` for a `take` that selects one of several stacked tensors by a constant index; None for
        any other."""
        from tvm.ir import GenericConst

        shape, index = sizes(call.args[0], _FLOAT), call.args[1]
        if (
            shape is None
            or not isinstance(index, GenericConst)
            or sizes(index) != ()
            or call.attrs.axis is None
        ):
            return None
        inner = self._array(call.args[0])
        axis, at = int(call.attrs.axis) % len(shape), int(array_of(index))
        if inner is None or inner[0].sizes != shape or not 0 <= at < shape[axis]:
            return None
        array, holder = inner
        axes = list(array.axes)
        fixed = (*array.fixed, (axes.pop(axis), at))
        return replace(array, axes=tuple(axes), fixed=fixed), holder


def _call_type() -> Any:
    from tvm import relax

    return relax.Call


def _keeps_rows(reshape: Any) -> bool:
    """Whether a tensor has the same rows and columns after it was reshaped."""
    before, after = sizes(reshape.args[0], _FLOAT), sizes(reshape, _FLOAT)
    if before is None or after is None:
        return False
    return min(len(before), len(after)) >= 2 and before[-2:] == after[-2:]


def parts_of(expression: Any) -> Iterator[Any]:
    from tvm import relax

    if isinstance(expression, relax.Call):
        for argument in expression.args:
            yield from parts_of(argument)
    elif isinstance(expression, relax.Tuple):
        for field in expression.fields:
            yield from parts_of(field)
    elif isinstance(expression, relax.TupleGetItem):
        yield from parts_of(expression.tuple_value)
    elif isinstance(expression, relax.If):
        yield from relax.analysis.all_vars(expression)
    else:
        yield expression


def _axes(rank: int, transposition: Any) -> list[int]:
    axes = transposition.attrs.axes
    return list(range(rank))[::-1] if axes is None else [int(a) % rank for a in axes]


def _before_transposition(shape: tuple[int, ...], transposition: Any) -> Array:
    """How a tensor of this shape is stored if a kernel stores its transpose instead."""
    axes = _axes(len(shape), transposition)
    return Array(tuple(shape[a] for a in axes), tuple(axes.index(i) for i in range(len(shape))))


def _step_operand(expression: Any, heads: tuple[int, ...]) -> float | Extra | None:
    """An operand of a step on scores whose dimensions before rows and columns are `heads`: a number or a tensor; None
    if the kernel cannot read it."""
    from tvm.ir import GenericConst

    for dtype in (_FLOAT, "bool"):
        shape = sizes(expression, dtype)
        if shape is None or len(shape) > len(heads) + 2:
            continue
        if dtype == _FLOAT and isinstance(expression, GenericConst) and math.prod(shape) == 1:
            return float(array_of(expression).reshape(-1)[0])
        return Extra(shape, dtype, heads)
    return None
