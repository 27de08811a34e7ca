"""Which outputs are defined where inputs are NaN or infinite.

A rewrite may spread values that are not finite (`may_add_nonfinite`: sums in another order, zeros of a merged kernel
times an infinity) or remove them (`may_remove_nonfinite`), and runtimes disagree on the maximum of a number and NaN.
This module follows values that are not finite from the inputs to the outputs. Operators that only move, select or test
values are exact; an operator that removes NaN (a Where on IsNaN) makes values finite again at the same elements as in
the original. Sums may spread NaN; after comparisons and approximations nothing is defined.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import IntEnum

import numpy as np

from xrlflow.ir import ABSENT, FLOATS, DType, Graph, Node, Value
from xrlflow.ops.evaluate import NotEvaluable, evaluate_node, promote
from xrlflow.ops.field import REALS
from xrlflow.verify.runner import Array

# Larger arrays are not evaluated.
_LARGEST = 1 << 22


class Fate(IntEnum):
    """What holds for a value with elements that may be NaN or infinite, in every correct model; from best to worst."""

    EXACT = 0  # the same elements are NaN or infinite
    SPREADS = 1  # more elements may be NaN or infinite; those that are finite are the same
    UNDEFINED = 2  # elements may have any value


def fates(graph: Graph, feeds: Mapping[Value, Array], numbers: Mapping[str, int]) -> tuple[Fate, ...]:
    """The fate of each output. `numbers`: the sizes of dimensions by symbol."""
    walk = _Walk(graph, numbers)
    for value, array in feeds.items():
        walk.evaluated[value] = promote(REALS, array)
    for node in graph.topological():
        walk.step(node)
    return tuple(walk.fate.get(value, Fate.EXACT) for value in graph.outputs)


_MOVING = frozenset(
    {
        "Identity", "Reshape", "Squeeze", "Unsqueeze", "Flatten", "Transpose", "Slice", "Split", "Expand", "Tile",
        "Gather",
        "GatherElements", "GatherND", "Pad", "Concat", "Where", "ScatterElements", "ScatterND", "DepthToSpace",
        "SpaceToDepth", "Trilu", "IsNaN", "IsInf", "Not", "And", "Or", "Xor", "Less", "LessOrEqual", "Greater",
        "GreaterOrEqual", "Equal", "Shape", "Size", "Dropout", "ReverseSequence",
    }
)  # fmt: skip
"""Operators that move elements, choose among them, or test them one by one."""

_ARITHMETIC = frozenset({"Add", "Sub", "Mul", "Div", "Neg", "Abs", "Sqrt", "Reciprocal", "Sum", "Mean"})
"""Operators that map NaN to NaN in any order of evaluation, and may map an infinity to NaN."""

_ORDER = frozenset({"Relu", "Clip", "Min", "Max", "LeakyRelu", "PRelu", "Sign", "Floor", "Ceil", "Round"})
"""Operators that compute with infinities as with numbers; for NaN the result depends on the runtime."""

_SUMS = frozenset(
    {
        "MatMul", "Gemm", "Conv", "ConvTranspose", "Einsum", "ReduceSum", "ReduceMean", "ReduceSumSquare", "ReduceL2",
        "LayerNormalization", "InstanceNormalization", "GroupNormalization", "RMSNormalization", "BatchNormalization",
        "AveragePool", "GlobalAveragePool", "CumSum", "Resize",
    }
)  # fmt: skip


@dataclass(slots=True)
class _Walk:
    """Follows values through a graph. `evaluated`: the arrays of values evaluated so far. `fate`: the fates of values
    that were not evaluated and may not be finite.
    """

    graph: Graph
    numbers: Mapping[str, int]
    evaluated: dict[Value, Array] = field(default_factory=dict)
    fate: dict[Value, Fate] = field(default_factory=dict)

    def step(self, node: Node) -> None:
        inputs = [v for v in node.inputs if v != ABSENT]
        worst = max((self.fate[v] for v in inputs if v in self.fate), default=None)
        arrays = [self._array(v) for v in node.inputs]
        wrong = [a for a in arrays if a is not None and not _is_finite(a)]
        complete = all(a is not None or v == ABSENT for a, v in zip(arrays, node.inputs))
        supported = node.op in _MOVING or node.op in _ARITHMETIC or node.op in _ORDER or node.op == "Cast"
        if worst is None and not wrong:
            if complete and supported:
                self._evaluate(node, arrays)
            return
        if worst is None and self._is_exact(node, wrong):
            if not (complete and self._evaluate(node, arrays)):
                self._set(node, Fate.EXACT)
            return
        if (
            worst is None
            and node.op in _SUMS
            and any(np.isnan(a).all() for a in wrong)
            and self._all_nan(node)
        ):
            return
        adds = node.op in _ARITHMETIC or node.op in _SUMS or node.op in _MOVING
        if worst is Fate.EXACT and node.op in _MOVING:
            self._set(node, Fate.EXACT)
        elif worst is Fate.UNDEFINED or not adds or node.types[0].dtype not in FLOATS:
            self._set(node, Fate.UNDEFINED)
        else:
            self._set(node, Fate.SPREADS)

    def _array(self, value: Value) -> Array | None:
        if value in self.evaluated:
            return self.evaluated[value]
        const = self.graph.const(value) if value != ABSENT else None
        if const is None or (const.type.size or 0) > _LARGEST or const.type.dtype is DType.STRING:
            return None
        return promote(REALS, const.numpy())

    def _is_exact(self, node: Node, wrong: list[Array]) -> bool:
        if node.op in _MOVING or (node.op == "Cast" and node.types[0].dtype in FLOATS):
            return True
        if node.op in _ARITHMETIC:
            return not any(np.isinf(a).any() for a in wrong)
        return node.op in _ORDER and not any(np.isnan(a).any() for a in wrong)

    def _evaluate(self, node: Node, arrays: list[Array | None]) -> bool:
        if any(a is not None and a.size > _LARGEST for a in arrays):
            return False
        try:
            results = evaluate_node(node.op, node.attrs, arrays, len(node.outputs))
        except (NotEvaluable, ArithmeticError, IndexError, MemoryError, TypeError, ValueError):
            return False  # our evaluator does not support this use, so the outputs are unknown
        for value, result in zip(node.outputs, results):
            self.evaluated[value] = promote(REALS, result)
        return True

    def _all_nan(self, node: Node) -> bool:
        """Whether all terms of the sums that the node computes are NaN, so that its outputs are NaN in any order of
        the additions.
        """
        shapes = []
        for type in node.types:
            dims = (None,) if type.shape is None else type.shape
            shape = [self.numbers.get(d) if isinstance(d, str) else d for d in dims]
            sizes = [d for d in shape if d is not None]
            if len(sizes) != len(shape) or int(np.prod(sizes)) > _LARGEST:
                return False
            shapes.append(sizes)
        for value, sizes in zip(node.outputs, shapes):
            self.evaluated[value] = np.full(sizes, np.nan)
        return True

    def _set(self, node: Node, fate: Fate) -> None:
        self.fate.update(dict.fromkeys(node.outputs, fate))


def _is_finite(array: Array) -> bool:
    return array.dtype.kind not in "fc" or bool(np.isfinite(array).all())
