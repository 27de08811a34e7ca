"""Sketches of a pattern rule's left side, drawn from its own `shapes` and from what its operators take."""

from __future__ import annotations

from typing import Any

import numpy as np

from xrlflow.ir import FLOATS, ArrayHandle, Attr, Const, DType, TensorType
from xrlflow.ops.infer import InferenceError, infer
from xrlflow.ops.schema import canonical_attrs
from xrlflow.ops.tensors import numpy_dtype
from xrlflow.rewrite import Rule
from xrlflow.rewrite.pattern import Capture, Number, Out, Pattern, PNode, Var
from xrlflow.rewrite.rule import VarSpec
from xrlflow.verify.rules.draw import Draw, attribute, attributes, index_input
from xrlflow.verify.rules.sketch import Place, Sketch, SketchConst, SketchNode

_OTHER_TYPES = (DType.INT64, DType.INT32, DType.DOUBLE, DType.BOOL)


class Unlucky(Exception):
    """This draw comes to nothing: its parts do not fit together."""


class _Sample:
    """One draw of a pattern."""

    def __init__(self, rule: Rule, pattern: Pattern, draw: Draw) -> None:
        self.rule = rule
        self.pattern = pattern
        self.draw = draw
        self.specs = draw.choice(pattern.shapes)
        self.dims: dict[int | str, int] = {}
        # What open dimensions, and variables without dimensions, broadcast to.
        self.base = tuple(draw.dim() for _ in range(draw.integer(0, 5 if draw.chance(0.2) else 3)))
        self.absent = {n for n in pattern.optional if draw.chance(0.4)}
        self.dtype = self._element_type()
        # What constants hold: numbers that rules cannot read, that they can, or one number everywhere.
        self.constants = draw.choice(["opaque", "opaque", "opaque", "read", "uniform", "uniform"])
        self.captured: dict[str, Attr | None] = {}
        self.rests: dict[str, dict[str, Attr]] = {}  # all attributes of the last node of an operator
        self.inputs: list[TensorType] = []
        self.consts: list[SketchConst] = []
        self.places: dict[str, Place | None] = {}
        self.shapes: dict[str, tuple[int, ...]] = {}
        self.given: dict[int, Any] = {}  # the constant inputs of the node at hand, by their places
        self.types: dict[int, tuple[TensorType, ...]] = {}

    def _element_type(self) -> DType:
        allowed = self.rule.dtypes
        if self.draw.chance(0.85) and (allowed is None or DType.FLOAT in allowed):
            return DType.FLOAT
        options = [t for t in _OTHER_TYPES if allowed is None or t in allowed]
        return self.draw.choice(options or [DType.FLOAT])

    def sketch(self) -> Sketch:
        nodes = [self._node(node) for node in self.pattern.nodes]
        outputs = tuple(Place("node", o.node.index, o.index) for o in self.pattern.outputs)
        return Sketch(tuple(self.inputs), tuple(self.consts), tuple(nodes), outputs)

    # Variables

    def _shape_of(self, spec: VarSpec | None) -> tuple[int, ...]:
        if spec is None or spec.dims is None:
            return self.base if self.draw.chance(0.7) else self._variant()
        sizes = []
        for dim in spec.dims:
            if isinstance(dim, int):
                sizes.append(dim)
            else:
                if dim not in self.dims:
                    self.dims[dim] = self.draw.dim() if dim[:1] != "k" else self.draw.integer(1, 3)
                sizes.append(self.dims[dim])
        return (*self._variant(), *sizes) if spec.open else tuple(sizes)

    def _variant(self) -> tuple[int, ...]:
        """Something that broadcasts against the base."""
        draw = self.draw
        if draw.chance(0.5):
            return self.base
        start = draw.integer(0, len(self.base))
        return tuple(1 if draw.chance(0.3) else d for d in self.base[start:])

    def _variable(self, name: str, op: str, place: int, shapes: list[tuple[int, ...] | None]) -> Place | None:
        if name in self.places:
            return self.places[name]
        if name in self.absent:
            self.places[name] = None
            return None
        spec = self.specs.get(name)
        index = index_input(self.draw, op, place, shapes, self.given)
        if index is not None and spec is not None and spec.dims is not None and op not in ("Clip", "Dropout"):
            index = None
        if index is not None:
            array = np.asarray(index)
            dtype = {"i": DType.INT64, "f": self.dtype, "b": DType.BOOL}[array.dtype.kind]
            if dtype in FLOATS or array.dtype.kind != "f":
                return self._constant(name, array, dtype, False)
            raise Unlucky(op)
        shape = self._shape_of(spec)
        dtype = self.dtype
        if spec is not None and spec.dtype is not None:
            if spec.dtype == "float":
                dtype = dtype if dtype in FLOATS else DType.FLOAT
            else:
                dtype = DType.INT64 if spec.dtype == "int" else DType.BOOL
        self.shapes[name] = shape
        if (spec is not None and spec.const) or (spec is None and self.draw.chance(0.05)):
            return self._constant(name, self._data(shape, dtype), dtype, self.constants == "opaque")
        self.inputs.append(TensorType(dtype, shape))
        found = self.places[name] = Place("input", len(self.inputs) - 1)
        return found

    def _constant(self, name: str, array: Any, dtype: DType, opaque: bool) -> Place:
        self.consts.append(SketchConst(np.asarray(array).astype(numpy_dtype(dtype)), dtype, opaque))
        self.shapes[name] = tuple(np.shape(array))
        found = self.places[name] = Place("const", len(self.consts) - 1)
        return found

    def _data(self, shape: tuple[int, ...], dtype: DType) -> Any:
        draw = self.draw
        if dtype == DType.BOOL:
            return draw.rng.random(shape) < 0.5
        if self.constants == "uniform":
            return np.full(shape, draw.choice([0.0, 1.0, 2.0, 0.5, 3.0, 6.0, -1.0]))
        if dtype not in FLOATS:
            return draw.rng.integers(-3, 4, shape)
        return draw.normals(shape) if self.constants == "opaque" else draw.eighths(shape)

    # Nodes

    def _node(self, node: PNode) -> SketchNode:
        self.given = {}
        places: list[Place | None] = []
        shapes: list[tuple[int, ...] | None] = []
        types: list[TensorType | None] = []
        for i, value in enumerate(node.inputs):
            found = self._input(node.op, i, value, shapes, types)
            if found is not None and found.kind == "const":
                self.given[i] = self.consts[found.index].array
            places.append(found)
            types.append(self._type(found))
            shapes.append(None if found is None else self._sizes(found))
        attrs = self._attributes(node, shapes)
        try:
            canonical = canonical_attrs(node.op, attrs, types)
            data = [self._data_of(p) for p in places]
            self.types[node.index] = infer(node.op, canonical, types, data, node.outputs)
        except (InferenceError, IndexError, ZeroDivisionError) as error:
            raise Unlucky(str(error)) from error
        return SketchNode(node.op, tuple(places), attrs, node.outputs)

    def _input(
        self,
        op: str,
        place: int,
        value: Any,
        shapes: list[tuple[int, ...] | None],
        types: list[TensorType | None],
    ) -> Place | None:
        if value is None:
            return None
        if isinstance(value, Out):
            return Place("node", value.node.index, value.index)
        if isinstance(value, Number):
            like = next((t.dtype for t in types if t is not None), self.dtype)
            rank = 0 if op == "Clip" else self.draw.choice([0, 0, 1])
            array = np.full((1,) * rank, value.value).astype(numpy_dtype(like))
            self.consts.append(SketchConst(array, like))
            return Place("const", len(self.consts) - 1)
        assert isinstance(value, Var)
        return self._variable(value.name, op, place, shapes)

    def _attributes(self, node: PNode, shapes: list[tuple[int, ...] | None]) -> dict[str, Attr]:
        out: dict[str, Attr] = {}
        if node.rest is not None:
            if node.op in self.rests and self.draw.chance(0.7):
                out.update(self.rests[node.op])
            else:
                out.update(attributes(self.draw, node.op, shapes))
                self.rests[node.op] = dict(out)
        for name, value in node.attrs.items():
            if isinstance(value, Capture):
                if value.name not in self.captured:
                    self.captured[value.name] = attribute(self.draw, node.op, name, shapes)
                drawn = self.captured[value.name]
                out.pop(name, None)
                if drawn is not None:
                    out[name] = drawn
            else:
                out[name] = value
        return out

    def _type(self, place: Place | None) -> TensorType | None:
        if place is None:
            return None
        if place.kind == "input":
            return self.inputs[place.index]
        if place.kind == "const":
            const = self.consts[place.index]
            return TensorType(const.dtype, tuple(const.array.shape), True)
        return self.types[place.index][place.output]

    def _data_of(self, place: Place | None) -> Const | None:
        if place is None or place.kind != "const":
            return None
        const = self.consts[place.index]
        type = self._type(place)
        assert type is not None
        return Const(type, ArrayHandle(const.array), const.array)

    def _sizes(self, place: Place) -> tuple[int, ...]:
        type = self._type(place)
        if type is None or type.shape is None:
            raise Unlucky("a rank is not known")
        return tuple(d if isinstance(d, int) else 1 for d in type.shape)


def draw_pattern(rule: Rule, patterns: list[Pattern], draw: Draw) -> Sketch:
    """One sketch of the rule's left side. Raises Unlucky."""
    return _Sample(rule, draw.choice(patterns), draw).sketch()
