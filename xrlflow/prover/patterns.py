"""Draws sketches of a pattern rule's left side from its `shapes` and the schemas of its operators."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np

from xrlflow.ir import FLOATS, INTEGERS, ArrayHandle, Attr, Const, DType, TensorType
from xrlflow.ops.infer import InferenceError, infer
from xrlflow.ops.schema import canonical_attrs, schema
from xrlflow.ops.tensors import numpy_dtype
from xrlflow.prover.draw import Draw, Shapes, attribute, attributes, index_input
from xrlflow.prover.equivalence_classes import (
    DegenerateSample,
    Family,
    Kind,
    attribute_names,
    attribute_subject,
    family,
    index_family,
    index_subject,
)
from xrlflow.prover.machine import integers
from xrlflow.prover.sketch import Sketch, SketchConst, SketchNode, ValueRef
from xrlflow.rewrite import Rule
from xrlflow.rewrite.pattern import Capture, Number, Out, Pattern, PNode, Var
from xrlflow.rewrite.rule import VarSpec

# The element types with which a rule is tried, whether it admits them or not.
TYPES = (DType.FLOAT, DType.DOUBLE, DType.FLOAT16, DType.BFLOAT16, DType.BOOL, *sorted(INTEGERS))
_OTHER_TYPES = (DType.INT64, DType.INT32, *TYPES[1:])
_RANKS = range(6)
# What the subject of a dimension begins with; the dimension's name follows.
_DIMENSION = "dimension "


def pattern_kinds(patterns: list[Pattern]) -> list[Kind]:
    """The kinds that sketches of a rule must show: those of everything that its declaration leaves open."""
    kinds: dict[Kind, None] = {}

    def note(subject: str, names: Iterable[str]) -> None:
        kinds.update(dict.fromkeys(Kind(subject, n) for n in names))

    for pattern in patterns:
        if pattern.arity is not None:
            note("arity", [str(pattern.arity)])
        if pattern.form is not None:
            note("form", [str(pattern.form)])
        for name in sorted(pattern.optional):
            note(name, ["given", "left out"])
        for node in pattern.nodes:
            captured = [n for n, v in node.attrs.items() if isinstance(v, Capture)]
            if len(node.ops) > 1:
                note(operator_subject(node), node.ops)
            open = [
                index
                for index, value in enumerate(node.inputs)
                if isinstance(value, Var) and any(_undescribed(alt.get(value.name)) for alt in pattern.shapes)
            ]
            for op in node.ops:
                uncaptured = (
                    [n for n in attribute_names(op) if n not in node.attrs] if node.rest is not None else []
                )
                for attr in (*captured, *uncaptured):
                    note(attribute_subject(op, attr), (s.name for s in family(op, attr)))
                for index in open:
                    note(index_subject(op, index), (s.name for s in index_family(op, index)))
        specs = [alt.get(v.name) for alt in pattern.shapes for v in pattern.variables]
        taps = _taps(pattern)
        for spec in specs:
            for dim in () if spec is None else spec.dims or ():
                if isinstance(dim, str):
                    note(dimension_subject(dim), "1" if dim in taps else "01")
        if any(_undescribed(spec) or (spec is not None and spec.open) for spec in specs):
            note("rank", map(str, _RANKS))
    note("size", ("0", "1", "a name", "not known"))
    note("type", (t.name.lower() for t in TYPES))
    return list(kinds)


def operator_subject(node: PNode) -> str:
    """The subject that stands for the choice of operator at a pattern's node that may have several."""
    return f"operator {node.op_name or node.index}"


def dimension_subject(name: str) -> str:
    return f"{_DIMENSION}{name}"


def dimension_of(kind: Kind) -> str | None:
    """The name of the dimension that is the subject of a kind; None if the subject is no dimension."""
    name = kind.subject.removeprefix(_DIMENSION)
    return name if name != kind.subject else None


def _taps(pattern: Pattern) -> set[int | str]:
    """The dimensions that are sizes of kernels (windows); these are never 0."""
    return {
        dim
        for node in pattern.nodes
        if node.op in ("Conv", "ConvTranspose") and isinstance(weight := node.inputs[1], Var)
        for alternative in pattern.shapes
        if (spec := alternative.get(weight.name)) is not None and not spec.open
        for dim in (spec.dims or ())[2:]
    }


def _undescribed(spec: VarSpec | None) -> bool:
    return spec is None or spec.dims is None


class _Sample:
    """One random sketch of a pattern. With a `wish` it shows this kind if it can.

    A rule may compare sizes. So if the wish is a size of a dimension, `turn` selects another dimension that gets the
    same size, or none. In every second turn all remaining dimensions have one size.
    """

    def __init__(self, rule: Rule, pattern: Pattern, draw: Draw, wish: Kind | None, turn: int) -> None:
        self.rule = rule
        self.pattern = pattern
        self.draw = draw
        self.wish = wish or Kind("", "")
        self.alike = self._dimension_alike(turn // 2)
        self.even = draw.integer(1, 3) if dimension_of(self.wish) is not None and turn % 2 == 0 else 0
        self.specs = draw.choice(self._alternatives())
        self.dims: dict[int | str, int] = {}
        # The shape to which dimensions left open, and variables without declared dimensions, broadcast.
        self.base = tuple(draw.dim() for _ in range(draw.integer(0, 5 if draw.chance(0.2) else 3)))
        self.used_base = False
        self.absent = {n for n in sorted(pattern.optional) if draw.chance(0.4)}
        self.dtype = self._element_type()
        self._apply_wish()
        # How constants are drawn: "opaque" (rules cannot read their numbers), "read" (they can), or "uniform" (they
        # can, and all numbers of a constant are equal).
        self.constants = draw.choice(["opaque", "opaque", "opaque", "read", "uniform", "uniform"])
        self.captured: dict[str, Attr | None] = {}
        self.rests: dict[str, dict[str, Attr]] = {}  # by operator: all attributes of its last node
        self.inputs: list[TensorType] = []
        self.consts: list[SketchConst] = []
        self.refs: dict[str, ValueRef | None] = {}
        self.shapes: dict[str, tuple[int, ...]] = {}
        self.ops = self._operators()
        self.absent |= self._surplus_inputs()
        self.constant_inputs: dict[int, Any] = {}  # the constant inputs of the current node, by position
        self.types: dict[int, tuple[TensorType, ...]] = {}

    def _dimension_alike(self, turn: int) -> int | str | None:
        """Another dimension of a declared alternative that gets the wished size, too; None in some turns."""
        dim = dimension_of(self.wish)
        named = [{d for s in a.values() for d in s.dims or ()} for a in self.pattern.shapes]
        partners = (
            set[int | str]().union(*(dims for dims in named if dim in dims))
            - _taps(self.pattern)
            - {dim or ""}
        )
        options = [None, *sorted(d for d in partners if isinstance(d, str))]
        return options[turn % len(options)]

    def _alternatives(self) -> Sequence[Mapping[str, VarSpec]]:
        """The declared alternatives that have the dimensions wished for. Raises DegenerateSample if there are none."""
        required = {d for d in (dimension_of(self.wish), self.alike) if d is not None}
        alternatives = [
            a for a in self.pattern.shapes if required <= {d for s in a.values() for d in s.dims or ()}
        ]
        if not alternatives:
            raise DegenerateSample("this pattern has no such dimension")
        return alternatives

    def _element_type(self) -> DType:
        allowed = self.rule.dtypes
        if self.draw.chance(0.85) and (allowed is None or DType.FLOAT in allowed):
            return DType.FLOAT
        options = [t for t in _OTHER_TYPES if allowed is None or t in allowed]
        return self.draw.choice(options or [DType.FLOAT])

    def _apply_wish(self) -> None:
        """Set the sizes and types and leave out the inputs that are wished for. Raises DegenerateSample if the wish
        names another arity or form of the pattern.
        """
        draw, subject, name = self.draw, self.wish.subject, self.wish.name
        if subject == "arity" and name != str(self.pattern.arity):
            raise DegenerateSample("another arity is wished for")
        if subject == "form" and name != str(self.pattern.form):
            raise DegenerateSample("another form is wished for")
        if subject == "rank":
            self.base = tuple(max(draw.dim(), draw.integer(0, 1)) for _ in range(int(name)))
        elif subject == "size" and name in ("0", "1") and self.base:
            at = draw.integer(0, len(self.base) - 1)
            self.base = (*self.base[:at], int(name), *self.base[at + 1 :])
        elif subject == "type":
            self.dtype = DType[name.upper()]
        elif subject in self.pattern.optional:
            self.absent = (self.absent | {subject}) if name == "left out" else (self.absent - {subject})
        elif (dim := dimension_of(self.wish)) is not None:
            self.dims[dim] = int(name)
            if self.alike is not None:
                self.dims[self.alike] = int(name)

    def _operators(self) -> list[str]:
        """An operator for each node of the pattern. Nodes with one name get the same operator."""
        operators = dict[str, str]()
        for node in self.pattern.nodes:
            subject = operator_subject(node)
            if subject == self.wish.subject and self.wish.name not in node.ops:
                raise DegenerateSample("another operator is wished for")
            operators.setdefault(
                subject, self.wish.name if subject == self.wish.subject else self.draw.choice(node.ops)
            )
        return [operators[operator_subject(n)] for n in self.pattern.nodes]

    def _surplus_inputs(self) -> set[str]:
        """The inputs that the pattern has, but the drawn operators do not."""
        inputs = (
            (v, i, schema(op)) for n, op in zip(self.pattern.nodes, self.ops) for i, v in enumerate(n.inputs)
        )
        return {
            v.name
            for v, i, definition in inputs
            if isinstance(v, Var) and definition is not None and i >= definition.max_input
        }

    def _wished(self, subject: str, sorts: Family) -> Callable[[Draw, Shapes], Any] | None:
        if self.wish.subject != subject:
            return None
        return next(s.make for s in sorts if s.name == self.wish.name)

    def sketch(self) -> Sketch:
        nodes = [self._node(node) for node in self.pattern.nodes]
        outputs = tuple(ValueRef("node", o.node.index, o.index) for o in self.pattern.outputs)
        dims = {str(name): size for name, size in self.dims.items()}
        shown = frozenset(self._shown())
        return Sketch(
            tuple(self.inputs), tuple(self.consts), tuple(nodes), outputs, shown_kinds=shown, dims=dims
        )

    def _shown(self) -> Iterator[Kind]:
        """The kinds that this sketch shows and that cannot be read from its graph."""
        if self.pattern.arity is not None:
            yield Kind("arity", str(self.pattern.arity))
        if self.pattern.form is not None:
            yield Kind("form", str(self.pattern.form))
        for node, op in zip(self.pattern.nodes, self.ops):
            if len(node.ops) > 1:
                yield Kind(operator_subject(node), op)
        for name in self.pattern.optional:
            yield Kind(name, "left out" if name in self.absent else "given")
        if self.used_base:
            yield Kind("rank", str(len(self.base)))
        for dim, size in self.dims.items():
            if size in (0, 1):
                yield Kind(dimension_subject(str(dim)), str(size))

    # Variables

    def _shape_of(self, spec: VarSpec | None) -> tuple[int, ...]:
        if spec is None or spec.dims is None or spec.open:
            self.used_base = True
        if spec is None or spec.dims is None:
            return self.base if self.draw.chance(0.7) else self._variant()
        sizes = []
        for dim in spec.dims:
            if isinstance(dim, int):
                sizes.append(dim)
            else:
                if dim not in self.dims:
                    size = self.draw.dim() if dim[:1] != "k" else self.draw.integer(1, 3)
                    self.dims[dim] = self.even or size
                sizes.append(self.dims[dim])
        return (*self._variant(), *sizes) if spec.open else tuple(sizes)

    def _variant(self) -> tuple[int, ...]:
        """A random shape that broadcasts to the base shape."""
        draw = self.draw
        if draw.chance(0.5):
            return self.base
        start = draw.integer(0, len(self.base))
        return tuple(1 if draw.chance(0.3) else d for d in self.base[start:])

    def _variable(
        self, name: str, op: str, position: int, shapes: list[tuple[int, ...] | None]
    ) -> ValueRef | None:
        if name in self.refs:
            return self.refs[name]
        if name in self.absent:
            self.refs[name] = None
            return None
        spec = self.specs.get(name)
        wished = self._wished(index_subject(op, position), index_family(op, position))
        if wished is not None and _undescribed(spec):
            numbers = self.constant_inputs
            actual = [np.shape(numbers[i]) if i in numbers else s for i, s in enumerate(shapes)]
            index = wished(self.draw, actual)
        else:
            index = index_input(self.draw, op, position, shapes, self.constant_inputs)
        if index is not None and spec is not None and spec.dims is not None and op not in ("Clip", "Dropout"):
            index = None
        if index is not None:
            array = np.asarray(index)
            dtype = {"i": DType.INT64, "f": self.dtype, "b": DType.BOOL}[array.dtype.kind]
            if dtype in FLOATS or array.dtype.kind != "f":
                return self._constant(name, array, dtype, False)
            raise DegenerateSample(op)
        shape = self._shape_of(spec)
        dtype = self.dtype
        if spec is not None and spec.dtype is not None:
            if spec.dtype == "float":
                dtype = dtype if dtype in FLOATS else DType.FLOAT
            else:
                integer = DType.INT32 if dtype == DType.INT32 else DType.INT64
                dtype = integer if spec.dtype == "int" else DType.BOOL
        self.shapes[name] = shape
        if (spec is not None and spec.const) or (spec is None and self.draw.chance(0.05)):
            return self._constant(name, self._data(shape, dtype), dtype, self.constants == "opaque")
        self.inputs.append(TensorType(dtype, shape))
        ref = self.refs[name] = ValueRef("input", len(self.inputs) - 1)
        return ref

    def _constant(self, name: str, array: Any, dtype: DType, opaque: bool) -> ValueRef:
        self.consts.append(SketchConst(np.asarray(array).astype(numpy_dtype(dtype)), dtype, opaque))
        self.shapes[name] = tuple(np.shape(array))
        ref = self.refs[name] = ValueRef("const", len(self.consts) - 1)
        return ref

    def _data(self, shape: tuple[int, ...], dtype: DType) -> Any:
        draw = self.draw
        if dtype == DType.BOOL:
            return draw.rng.random(shape) < 0.5
        if self.constants == "uniform":
            return np.full(shape, draw.choice([0.0, 1.0, 2.0, 0.5, 3.0, 6.0, -1.0]))
        if dtype not in FLOATS:
            number = numpy_dtype(dtype)
            if dtype == self.dtype and draw.chance(0.4):  # the constant's numbers are data
                return integers(draw.rng, shape, number)
            return draw.rng.integers(0 if number.kind == "u" else -3, 4, shape)
        return draw.normals(shape) if self.constants == "opaque" else draw.eighths(shape)

    # Nodes

    def _node(self, node: PNode) -> SketchNode:
        self.constant_inputs = {}
        op = self.ops[node.index]
        refs: list[ValueRef | None] = []
        shapes: list[tuple[int, ...] | None] = []
        types: list[TensorType | None] = []
        for i, value in enumerate(node.inputs):
            ref = (
                self._number(node, i, value.value, shapes, types)
                if isinstance(value, Number)
                else self._input(op, i, value, shapes)
            )
            if ref is not None and ref.kind == "const":
                self.constant_inputs[i] = self.consts[ref.index].array
            refs.append(ref)
            types.append(self._type(ref))
            shapes.append(None if ref is None else self._sizes(ref))
        attrs = self._attributes(node, shapes)
        while refs and refs[-1] is None:
            refs.pop()
            types.pop()
        try:
            canonical = canonical_attrs(op, attrs, types)
            data = [self._data_of(p) for p in refs]
            self.types[node.index] = infer(op, canonical, types, data, node.outputs)
        except (InferenceError, IndexError, ValueError, ArithmeticError) as error:
            raise DegenerateSample(str(error)) from error
        return SketchNode(op, tuple(refs), attrs, node.outputs)

    def _input(
        self,
        op: str,
        position: int,
        value: Any,
        shapes: list[tuple[int, ...] | None],
    ) -> ValueRef | None:
        if value is None:
            return None
        if isinstance(value, Out):
            return ValueRef("node", value.node.index, value.index)
        assert isinstance(value, Var)
        return self._variable(value.name, op, position, shapes)

    def _number(
        self,
        node: PNode,
        position: int,
        number: float,
        shapes: list[tuple[int, ...] | None],
        types: list[TensorType | None],
    ) -> ValueRef:
        """A constant of this number: a scalar, or a tensor that broadcasts to the node's other input."""
        like = next((t.dtype for t in types if t is not None), self.dtype)
        partner = shapes[0] if position else None
        if not position and len(node.inputs) > 1 and isinstance(last_input := node.inputs[-1], Out):
            partner = self._sizes(ValueRef("node", last_input.node.index, last_input.index))
        shape: tuple[int, ...] = ()
        if self.ops[node.index] != "Clip" and self.draw.chance(0.5):
            last = (partner or (1,))[-self.draw.integer(1, 3) :]
            shape = tuple(self.draw.choice([1, d]) for d in last)
        self.consts.append(SketchConst(np.full(shape, number).astype(numpy_dtype(like)), like))
        return ValueRef("const", len(self.consts) - 1)

    def _attributes(self, node: PNode, shapes: list[tuple[int, ...] | None]) -> dict[str, Attr]:
        op = self.ops[node.index]
        out: dict[str, Attr] = {}
        if node.rest is not None:
            if op in self.rests and self.draw.chance(0.7):
                out.update(self.rests[op])
            else:
                out.update(attributes(self.draw, op, shapes))
                self._set_wished(op, out, [n for n in attribute_names(op) if n not in node.attrs], shapes)
                self.rests[op] = dict(out)
        for name, value in node.attrs.items():
            if isinstance(value, Capture):
                if value.name not in self.captured:
                    value_ = attribute(self.draw, op, name, shapes)
                    single = {} if value_ is None else {name: value_}
                    self._set_wished(op, single, [name], shapes)
                    self.captured[value.name] = single.get(name)
                value_ = self.captured[value.name]
                out.pop(name, None)
                if value_ is not None:
                    out[name] = value_
            else:
                out[name] = value
        return out

    def _set_wished(self, op: str, attrs: dict[str, Attr], names: Sequence[str], shapes: Shapes) -> None:
        """Set the attribute that is wished for, if it is among `names`."""
        for name in names:
            make = self._wished(attribute_subject(op, name), family(op, name))
            if make is not None and name != "group":  # the number of groups follows from the shapes
                give(attrs, name, make(self.draw, shapes))

    def _type(self, ref: ValueRef | None) -> TensorType | None:
        if ref is None:
            return None
        if ref.kind == "input":
            return self.inputs[ref.index]
        if ref.kind == "const":
            const = self.consts[ref.index]
            return TensorType(const.dtype, tuple(const.array.shape), True)
        return self.types[ref.index][ref.output]

    def _data_of(self, ref: ValueRef | None) -> Const | None:
        if ref is None or ref.kind != "const":
            return None
        const = self.consts[ref.index]
        type = self._type(ref)
        assert type is not None
        return Const(type, ArrayHandle(const.array), const.array)

    def _sizes(self, ref: ValueRef) -> tuple[int, ...]:
        type = self._type(ref)
        if type is None or type.shape is None:
            raise DegenerateSample("a rank is not known")
        return tuple(d if isinstance(d, int) else 1 for d in type.shape)


def give(attrs: dict[str, Attr], name: str, value: Attr | None) -> None:
    """Set an attribute, or remove it if `value` is None. Remove attributes that contradict it."""
    attrs.pop(name, None)
    if value is None:
        return
    attrs[name] = value
    for contradicting in {"pads": ("auto_pad",), "auto_pad": ("pads", "output_padding")}.get(name, ()):
        if value != "NOTSET":
            attrs.pop(contradicting, None)


def draw_pattern(
    rule: Rule, patterns: list[Pattern], draw: Draw, wish: Kind | None = None, turn: int = 0
) -> Sketch:
    """Draw a sketch of the rule's left side. `turn`: how many sketches were drawn for this wish before. Raises
    DegenerateSample.
    """
    return _Sample(rule, draw.choice(patterns), draw, wish, turn).sketch()
