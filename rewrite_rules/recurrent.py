"""Rules that turn unrolled recurrent cells into ONNX's LSTM, GRU and RNN, or that do the work of all steps at once."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np

from rewrite_rules.axes import axis_of
from rewrite_rules.elementwise import FLOAT, made_by, sum_of
from rewrite_rules.slices import piece, sizes_along
from xrlflow.ir import ABSENT, FLOATS, Node, Value
from xrlflow.rewrite import Op, Reader, Region, RegionRule, Rule, Val, common_source, profitable, require


class FuseSumOfGemms(Rule, family="recurrent"):
    """gemm(x, w, b) + gemm(y, v, c) -> gemm(x, w, gemm(y, v, b + c))  with b and c constant rows.

    The accumulation of one product begins with the result of the other, so that no addition of the two is left.
    """

    shapes = "x[m,k] w[n,k] b[n]:const y[m,j] v[n,j] c[n]:const"
    dtypes = FLOATS

    def source(self, op: Op, x: Val, w: Val, b: Val, y: Val, v: Val, c: Val) -> Any:
        return op.Add(op.Gemm(x, w, b, transB=1), op.Gemm(y, v, c, transB=1))

    def target(self, op: Op, x: Val, w: Val, b: Val, y: Val, v: Val, c: Val) -> Any:
        return op.Gemm(x, w, op.Gemm(y, v, op.Add(b, c), transB=1), transB=1)


def _of_two_rows(example: str, states: str, bias: str) -> str:
    """The first example of `FuseStepsIntoGemms` with two rows per step, other states and another bias."""
    return (
        example.replace("float[2,3] x, float[1,3] s, float[1,3] t", f"float[4,3] x, {states}")
        .replace("float[1,4] f, float[1,4] g", "float[2,4] f, float[2,4] g")
        .replace("float[4] b = {1, 2, 3, 4}, int64[2] i = {1, 1}", f"{bias}, int64[2] i = {{2, 2}}")
    )


class FuseStepsIntoGemms(RegionRule, family="recurrent"):
    """p_t + gemm(h_t, w, b) for each part p_t of split(gemm(x, v, c)) -> gemm(h_t, w, q_t) with parts q_t of x's
    product with the bias b + c.

    The addition of each step becomes the start of the accumulation in that step's product. A step whose product is
    constant (the first step, if the state is constant) keeps its addition.
    """

    anchors = ("Split",)
    reads_from = ("Gemm",)
    dtypes = FLOATS
    examples = (
        "agraph (float[2,3] x, float[1,3] s, float[1,3] t) => (float[1,4] f, float[1,4] g) "
        "<float[4,3] v = {1, 2, 3, 4, 5, 6, 7, 8, 9, -1, -2, -3}, float[4] c = {0.5, 1, 2, -1}, "
        "float[4,3] w = {1, -2, 3, -4, 5, -6, 7, -8, 9, 1, 2, 3}, float[4] b = {1, 2, 3, 4}, int64[2] i = {1, 1}> "
        "{ p = Gemm<transB=1>(x, v, c) q, r = Split<axis=0>(p, i) d = Gemm<transB=1>(s, w, b) "
        "e = Gemm<transB=1>(t, w, b) f = Add(q, d) g = Add(r, e) }",
        "agraph (float[3,2] x, float[2,2] s) => (float[2,2] f, float[1,2] g) <float[2,2] v = {1, 2, 3, 4}, "
        "float[2] c = {0.5, 1}, float[2,2] w = {1, -2, 3, -4}, float[2] b = {1, 2}, float[1,2] d = {3, 5}, "
        "int64[2] i = {2, 1}> { p = Gemm(x, v, c) q, r = Split(p, i) e = Gemm(s, w, b) f = Add(e, q) g = Add(r, d) }",
    )
    near_misses = (
        examples[0].replace("e = Gemm<transB=1>(t, w, b)", "e = Gemm<transB=1>(t, v, b)"),
        examples[0].replace("f = Add(q, d)", "f = Add(q, q)"),
        _of_two_rows(examples[0], "float[1,3] s, float[2,3] t", "float[4] b = {1, 2, 3, 4}"),
        _of_two_rows(examples[0], "float[2,3] s, float[2,3] t", "float[2,4] b = {1, 2, 3, 4, 5, 6, 7, 8}"),
        examples[0].replace("e = Gemm<transB=1>(t, w, b)", "e = Gemm<transB=1>(t, w, c)"),
    )

    def find(self, reader: Reader, node: Node) -> Region | None:
        product = made_by(reader, node.inputs[0], "Gemm")
        if product is None or len(product.inputs) != 3 or product.attrs.get("transA"):
            return None
        if node.attrs.get("axis", 0) != 0 or not reader.is_const(product.inputs[2]):
            return None
        require(product.attrs.get("beta", 1.0) == 1.0, "what is added is scaled")
        profitable(len(reader.users(node.inputs[0])) == 1, "the product is read elsewhere")
        profitable(not reader.is_output(node.inputs[0]), "the product is read elsewhere")
        bias: Value | None = None
        adds: list[Node] = []
        gemms: list[Node | None] = []
        addends: list[Value] = []
        for part in node.outputs:
            readers = reader.users(part)
            if len(readers) != 1 or readers[0].op != "Add" or reader.is_output(part):
                return None
            (add,) = readers
            addend = add.inputs[1] if add.inputs[0] == part else add.inputs[0]
            require(addend != part, "a part is added to itself")
            adds.append(add)
            gemm = reader.producer(addend)
            if reader.is_const(addend):
                gemms.append(None)
                addends.append(addend)
                continue
            if gemm is None or gemm.op != "Gemm" or len(gemm.inputs) != 3 or gemm.attrs != product.attrs:
                return None
            profitable(
                len(reader.users(addend)) == 1 and not reader.is_output(addend), "a step is read elsewhere"
            )
            require(bias in (None, gemm.inputs[2]), "the steps have different biases")
            require(reader.type(addend).shape == reader.type(part).shape, "the addition broadcasts")
            bias = gemm.inputs[2]
            gemms.append(gemm)
            addends.append(gemm.inputs[0])
        if bias is None:
            return None
        profitable(reader.is_const(bias), "the bias is not constant")
        row = reader.val(bias).shape
        require(len(row) < 2 or row[0] == 1, "the bias differs from row to row")
        weights = {g.inputs[1] for g in gemms if g is not None}
        require(len(weights) == 1, "the steps have different weights")
        heights = tuple(_size(reader, part, 0) for part in node.outputs)
        outputs = tuple(a.outputs[0] for a in adds)
        nodes = (node, product, *adds, *(g for g in gemms if g is not None))
        steps = tuple(g is not None for g in gemms)
        inputs = (*product.inputs, weights.pop(), bias, *addends)
        return Region(outputs, inputs, nodes, (product.attrs, heights, steps))

    def target(self, op: Op, region: Region, x: Val, v: Val, c: Val, w: Val, b: Val, *addends: Val) -> Any:
        attrs, heights, steps = region.data
        parts = _listed(op.Split(op.Gemm(x, v, op.Add(b, c), attrs=attrs), axis=0, sizes=heights))
        return [
            op.Gemm(addend, w, part, attrs=attrs) if step else op.Add(part, op.Sub(addend, b))
            for addend, part, step in zip(addends, parts, steps)
        ]


class SwapSplits(RegionRule, family="recurrent"):
    """split_b(p) for each part p of split_a(x) -> split_a(q) for each part q of split_b(x).

    It gains if x has many parts along a (time steps), and each part is split into a few along b (gates).
    """

    anchors = ("Split",)
    examples = (
        "agraph (float[4,6] x) => (float[2,2] a, float[2,4] b, float[2,2] c, float[2,4] d) <int64[2] s = {2, 4}> "
        "{ p, q = Split<axis=0, num_outputs=2>(x) a, b = Split<axis=1>(p, s) c, d = Split<axis=1>(q, s) }",
    )
    near_misses = (
        "agraph (float[4,6] x) => (float[2,2] a, float[2,4] b, float[2,3] c, float[2,3] d) <int64[2] s = {2, 4}> "
        "{ p, q = Split<axis=0, num_outputs=2>(x) a, b = Split<axis=1>(p, s) c, d = Split<axis=1, num_outputs=2>(q) }",
    )

    def find(self, reader: Reader, node: Node) -> Region | None:
        inner: list[Node] = []
        for part in node.outputs:
            readers = reader.users(part)
            if len(readers) != 1 or readers[0].op != "Split":
                return None
            profitable(not reader.is_output(part), "a part is read elsewhere")
            inner.append(readers[0])
        outer_axis, inner_axis = node.attrs.get("axis", 0), inner[0].attrs.get("axis", 0)
        require(outer_axis != inner_axis, "both split along one axis")
        assert isinstance(outer_axis, int)
        assert isinstance(inner_axis, int)
        widths = {tuple(_size(reader, o, inner_axis) for o in n.outputs) for n in inner}
        same_axis = all(n.attrs.get("axis", 0) == inner_axis for n in inner)
        require(same_axis and len(widths) == 1, "the parts are split differently")
        heights = tuple(_size(reader, o, outer_axis) for o in node.outputs)
        outputs = tuple(o for n in inner for o in n.outputs)
        data = (outer_axis, heights, inner_axis, widths.pop())
        return Region(outputs, node.inputs[:1], (node, *inner), data)

    def target(self, op: Op, region: Region, x: Val) -> Any:
        outer_axis, heights, inner_axis, widths = region.data
        wide = op.Split(x, axis=inner_axis, sizes=widths)
        columns = [op.Split(part, axis=outer_axis, sizes=heights) for part in _listed(wide)]
        return [_listed(column)[row] for row in range(len(heights)) for column in columns]


def _listed(parts: Any) -> Any:
    return parts if isinstance(parts, tuple) else (parts,)


def _size(reader: Reader, value: Value, axis: int) -> int:
    return reader.val(value).size(axis)


# The linear forms of gates


@dataclass(frozen=True, slots=True)
class _Weight:
    """A part of a constant matrix: its `rows` (inputs) and `columns` (results), each as (start, length)."""

    value: Value
    transposed: bool
    rows: tuple[int, int]
    columns: tuple[int, int]

    @property
    def matrix(self) -> tuple[Value, bool, tuple[int, int]]:
        """The key that the weights cut from one matrix have in common."""
        return self.value, self.transposed, self.rows


@dataclass(frozen=True, slots=True)
class _Linear:
    """A linear form: a sum of products of values with constant matrices, and of parts of constant rows."""

    terms: tuple[tuple[Value, _Weight], ...] = ()
    biases: tuple[tuple[Value, int, int], ...] = ()

    def __add__(self, other: _Linear) -> _Linear:
        return _Linear(self.terms + other.terms, self.biases + other.biases)

    def of(self, source: Value) -> list[_Weight]:
        return [w for v, w in self.terms if v == source]

    @property
    def signature(self) -> tuple[frozenset[_Weight], frozenset[tuple[Value, int, int]]]:
        """A key that is the same for all steps of a cell."""
        return frozenset(w for _, w in self.terms), frozenset(self.biases)


def _linear(reader: Reader, value: Value, start: int, length: int) -> _Linear | None:
    """Columns [start, start + length) of a value as a sum of products; None if they are no such sum."""
    type = reader.type(value)
    # A value with fewer columns would broadcast, so it is no value of all columns of a gate.
    if not type.shape or not isinstance(type.shape[-1], int) or type.shape[-1] < start + length:
        return None
    node = reader.producer(value)
    if node is not None and len(type.shape) == 2:
        # Constant values, too: if the first state is constant, the first step's product must be found like those of the
        # others.
        result = _computed(reader, node, value, start, length)
        if result is not None:
            return result
    if not type.const:
        return None
    row = len(type.shape) == 1 or (len(type.shape) == 2 and type.shape[0] == 1)
    return _Linear(biases=((value, start, length),)) if row else None


def _computed(reader: Reader, node: Node, value: Value, start: int, length: int) -> _Linear | None:
    """As `_linear`, for a value that `node` computes."""
    if node.op == "Split":
        if axis_of(node, 2) != 1:
            return None
        sizes = sizes_along(reader, node.outputs, 1)
        before = None if sizes is None else sum(sizes[: node.outputs.index(value)])
        return None if before is None else _linear(reader, node.inputs[0], before + start, length)
    if node.op == "Slice":
        part = piece(reader, value)
        if part is None or not part.keeps_axis or part.axis != 1:
            return None
        return _linear(reader, part.source, part.start + start, length)
    if node.op == "Add":
        sides = [_linear(reader, v, start, length) for v in node.inputs]
        return None if sides[0] is None or sides[1] is None else sides[0] + sides[1]
    if node.op not in ("MatMul", "Gemm") or node.attrs.keys() - {"transB"}:
        return None
    source, weight, *more = node.inputs
    shape = reader.type(weight).shape
    if not reader.is_const(weight) or shape is None or len(shape) != 2 or not reader.type(weight).is_static:
        return None
    transposed = bool(node.attrs.get("transB"))
    total = _products(reader, source, weight, transposed, start, length)
    if total is None or not more or more[0] == ABSENT:
        return total
    bias = _linear(reader, more[0], start, length) if reader.is_const(more[0]) else None
    return None if bias is None else total + bias


def _products(
    reader: Reader, source: Value, weight: Value, transposed: bool, start: int, length: int
) -> _Linear | None:
    """The product of a value, or of the parts of a Concat, with columns of a matrix; None if it has another form."""
    if reader.type(source).rank != 2:
        return None
    node = reader.producer(source)
    parts = [source]
    if node is not None and node.op == "Concat" and node.attrs["axis"] in (1, -1):
        parts = list(node.inputs)
    terms, at = [], 0
    for part in parts:
        shape = reader.type(part).shape
        if shape is None or len(shape) != 2 or not isinstance(shape[1], int):
            return None
        terms.append((part, _Weight(weight, transposed, (at, shape[1]), (start, length))))
        at += shape[1]
    return _Linear(tuple(terms))


# Shapes of expressions


def _both(node: Node | None, op: str) -> Iterator[tuple[Value, Value]]:
    """The inputs of a commutative node, in both orders."""
    if node is not None and node.op == op and len(node.inputs) == 2:
        a, b = node.inputs
        yield a, b
        yield b, a


def _argument(reader: Reader, value: Value, op: str) -> Value | None:
    """The value x if the value is op(x), else None."""
    node = reader.producer(value)
    return node.inputs[0] if node is not None and node.op == op else None


@dataclass(frozen=True, slots=True)
class _Step:
    """One step of a cell: its gates in ONNX's order, as linear forms, and the states before the step.

    `kind` is everything else that the steps must have in common. `previous` are values that may be the hidden state
    before the step.
    """

    gates: tuple[_Linear, ...]
    kind: tuple[Any, ...]
    states: tuple[
        Value, ...
    ]  # known states before this step (the cell of an LSTM, the hidden state of a GRU)
    values: tuple[Value, ...]  # the states that the step computes

    @property
    def signature(self) -> Any:
        return self.kind, tuple(g.signature for g in self.gates)


def _width(reader: Reader, value: Value) -> int | None:
    shape = reader.type(value).shape
    if shape is None or len(shape) != 2 or not isinstance(shape[1], int) or shape[1] == 0:
        return None
    return shape[1]


def _gate(reader: Reader, value: Value, op: str, size: int) -> _Linear | None:
    """The linear form of a gate's argument; None if the value is no such gate."""
    inner = _argument(reader, value, op)
    return None if inner is None else _linear(reader, inner, 0, size)


@dataclass(frozen=True, slots=True)
class _Native:
    """The data that the target needs."""

    steps: int
    size: int
    kind: tuple[Any, ...]
    gates: tuple[tuple[_Weight, _Weight], ...]  # weights of the input and of the hidden state, by gate
    biases: tuple[tuple[tuple[Value, int, int], ...], ...]
    constants: tuple[Value, ...]  # the values of these constants, in the order of the region's inputs
    outputs: tuple[int, ...]  # the steps whose hidden state is read
    cell: bool  # whether the last cell state is read


class _Unrolled(RegionRule, family="native_recurrent"):
    """The common part of the rules for cells: it walks back from the last step, and builds the weights."""

    nonempty = True
    dtypes = FLOAT
    # ONNX Runtime's recurrent operators clamp the arguments of their activations, so NaN and infinity become finite
    # numbers.
    may_add_nonfinite = True
    may_remove_nonfinite = True
    native = ""
    states = 1

    def step(self, reader: Reader, hidden: Value) -> _Step | None:
        """The step that computes a hidden state; None if the value is no hidden state."""
        raise NotImplementedError

    def last(self, reader: Reader, step: _Step) -> bool:
        """Whether a cheap check shows that no step follows."""
        raise NotImplementedError

    def find(self, reader: Reader, node: Node) -> Region | None:
        step = self.step(reader, node.outputs[0])
        if step is None or not self.last(reader, step):
            return None
        steps = self.walk(reader, step)
        profitable(len(steps) > 1, "it is a single step")
        size = _width(reader, node.outputs[0])
        assert size is not None
        hiddens = [s.values[0] for s in steps]
        first = self.hidden_before(steps, reader)
        require(first is not None, "what the hidden state before the first step is, is not clear")
        assert first is not None
        befores = [first, *hiddens[:-1]]
        inputs, gates = self.separate(steps, befores)
        require(common_source(reader, inputs), "an input may depend on a state")
        shapes = {reader.type(x).shape for x in inputs}
        shape = shapes.pop()
        require(not shapes and shape is not None and len(shape) == 2, "the inputs differ in shape")
        assert shape is not None
        states = [first, *steps[0].states[1:]] if self.states == 2 else [first]
        require(
            None not in shape and all(reader.type(s).shape == (shape[0], size) for s in states),
            "the states differ in shape",
        )
        outside = self.outside(reader, steps, {*inputs, *states})
        results = tuple(i for i, h in enumerate(hiddens) if h in outside)
        cell = self.states == 2 and steps[-1].values[1] in outside
        if self.states == 2:
            inner = {s.values[1] for s in steps[:-1]}
            profitable(not any(c in outside for c in inner), "a cell state is read elsewhere")
        outputs = [hiddens[i] for i in results] + ([steps[-1].values[1]] if cell else [])
        biases = tuple(g.biases for g in steps[0].gates)
        constants = tuple(
            dict.fromkeys([w.value for pair in gates for w in pair] + [v for b in biases for v, _, _ in b])
        )
        data = _Native(len(steps), size, steps[0].kind, gates, biases, constants, results, cell)
        return Region(tuple(outputs), (*inputs, *states, *constants), (node,), data)

    def walk(self, reader: Reader, last: _Step) -> list[_Step]:
        """The steps in their order, back to the first that is like the last one."""
        steps = [last]
        visited = {last.values[0]}
        while True:
            before = None
            for candidate in self.before(steps[0]):
                if candidate in visited:
                    continue
                step = self.step(reader, candidate)
                if step is not None and step.signature == last.signature and self.follows(step, steps[0]):
                    before = step
                    break
            if before is None:
                return steps
            visited.add(before.values[0])
            steps.insert(0, before)

    def before(self, step: _Step) -> list[Value]:
        """Values that may be the hidden state before a step."""
        return list(dict.fromkeys(v for g in step.gates for v, _ in g.terms))

    def follows(self, earlier: _Step, later: _Step) -> bool:
        """Whether one step follows another: the later step's states, except the hidden one, are those that the earlier
        computes.
        """
        return earlier.values[1:] == later.states[1:]

    def hidden_before(self, steps: Sequence[_Step], reader: Reader) -> Value | None:
        """The hidden state before the first step: the operand with the weights that the second step has for the first
        step's state.
        """
        second, hidden = steps[1], steps[0].values[0]
        own = {w.matrix for g in second.gates for v, w in g.terms if v == hidden}
        values = {v for g in steps[0].gates for v, w in g.terms if w.matrix in own}
        return values.pop() if len(values) == 1 else None

    def separate(
        self, steps: Sequence[_Step], befores: Sequence[Value]
    ) -> tuple[list[Value], tuple[tuple[_Weight, _Weight], ...]]:
        """The inputs of the steps, and each gate's weights of the input and of the hidden state."""
        inputs = []
        for step, before in zip(steps, befores):
            sequences = {v for g in step.gates for v, _ in g.terms if v != before}
            require(len(sequences) == 1, "a step has more than one input")
            inputs.append(sequences.pop())
        gates = []
        for gate in steps[0].gates:
            hidden, of_input = gate.of(befores[0]), gate.of(inputs[0])
            require(len(hidden) == 1 and len(of_input) == 1, "a gate has not one product with each")
            gates.append((of_input[0], hidden[0]))
        return inputs, tuple(gates)

    def outside(self, reader: Reader, steps: Sequence[_Step], ends: Collection[Value]) -> set[Value]:
        """The states that nodes other than the steps read. The steps lie between `ends` and the last states."""
        inner: set[Value] = set()
        work = list(steps[-1].values)
        while work:
            node = reader.producer(work.pop())
            if node is not None and node.id not in inner:
                inner.add(node.id)
                work.extend(v for v in node.inputs if v not in ends)
        states = {v for s in steps for v in s.values}
        return {v for v in states if reader.is_output(v) or any(u.id not in inner for u in reader.users(v))}

    # The target

    def weights(self, op: Op, native: _Native, vals: dict[Value, Val], which: int) -> Any:
        """The weights [1, gates * size, width] of the input (`which` 0) or the hidden state (1)."""
        rows = []
        for pair in native.gates:
            w = pair[which]
            starts, lengths = zip(*((w.columns, w.rows) if w.transposed else (w.rows, w.columns)))
            ends = [s + n for s, n in zip(starts, lengths)]
            part = op.Slice(vals[w.value], list(starts), ends, [0, 1])
            rows.append(part if w.transposed else op.Transpose(part, perm=[1, 0]))
        return op.Unsqueeze(op.Concat(*rows, axis=0) if len(rows) > 1 else rows[0], [0])

    def bias(
        self, op: Op, biases: Sequence[tuple[Value, int, int]], vals: dict[Value, Val], size: int
    ) -> Any:
        """A gate's bias [size]: the sum of its parts, or zeros."""
        total: Any = None
        for value, start, length in biases:
            row = vals[value] if vals[value].rank == 1 else op.Reshape(vals[value], [-1])
            part = op.Slice(row, [start], [start + length], [0])
            total = sum_of(op, total, part)
        return op.Expand(np.zeros(1, np.float32), [size]) if total is None else total

    def biases(self, op: Op, native: _Native, vals: dict[Value, Val]) -> Any:
        """The biases [1, 2 * gates * size] of all gates; None if there are none."""
        if not any(native.biases):
            return None
        own = [self.bias(op, b, vals, native.size) for b in native.biases]
        zeros = op.Expand(np.zeros(1, np.float32), [native.size * len(own)])
        return op.Unsqueeze(op.Concat(*own, zeros, axis=0), [0])

    def attributes(self, native: _Native) -> dict[str, Any]:
        return {}

    def target(self, op: Op, region: Region, *inputs: Val) -> Any:
        native: _Native = region.data
        xs, more = inputs[: native.steps], inputs[native.steps :]
        states, consts = more[: self.states], more[self.states :]
        vals = dict(zip(native.constants, consts))
        sequence = op.Concat(*[op.Unsqueeze(x, [0]) for x in xs], axis=0)
        initial = [op.Unsqueeze(s, [0]) for s in states]
        outputs = op[self.native](
            sequence,
            self.weights(op, native, vals, 0),
            self.weights(op, native, vals, 1),
            self.biases(op, native, vals),
            None,
            *initial,
            hidden_size=native.size,
            outputs=1 + self.states,
            **self.attributes(native),
        )
        hidden, *last = outputs
        if native.outputs == (native.steps - 1,):
            results = [op.Squeeze(last[0], [0])]
        else:
            rows = op.Split(op.Squeeze(hidden, [1]), axis=0, sizes=[1] * native.steps)
            results = [op.Squeeze(rows[i], [0]) for i in native.outputs]
        if native.cell:
            results.append(op.Squeeze(last[1], [0]))
        return results


# Examples: unrolled cells with three steps, as exporters write them


def _numbers(n: int) -> str:
    return ", ".join(f"{((7 * i) % 11 - 5) / 8}" for i in range(n))


def _unrolled(
    cell: str, gates: int, *, joined: bool = False, states: str = "float[2,2] h0", steps: int = 3
) -> str:
    """ONNX text of an unrolled cell over x[2,steps,3] with hidden size 2. `cell` is the text of one step; {t} is its
    number, {p} that of the step before.

    The text can read z{t}, the sum of the projections of x and h, or, if not `joined`, the two projections a{t} and
    b{t}.
    """
    n = 2 * gates
    lines = []
    for t in range(steps):
        lines.append(f"i{t} = Constant<value_int={t}>() x{t} = Gather<axis=1>(x, i{t})")
        if joined:
            lines.append(f"j{t} = Concat<axis=1>(x{t}, h{t}) m{t} = MatMul(j{t}, u) z{t} = Add(m{t}, bw)")
        else:
            lines.append(f"a{t} = Gemm<transB=1>(x{t}, w, bw) b{t} = Gemm<transB=1>(h{t}, r, br)")
        lines.append(cell.replace("{t}", str(t)).replace("{n}", str(t + 1)))
    stacked = " ".join(f"o{t} = Unsqueeze(h{t}, one)" for t in range(1, steps + 1))
    parts = ", ".join(f"o{t}" for t in range(1, steps + 1))
    if joined:
        consts = f"float[5,{n}] u = {{{_numbers(5 * n)}}}, float[{n}] bw = {{{_numbers(n)}}}"
    else:
        consts = (
            f"float[{n},3] w = {{{_numbers(3 * n)}}}, float[{n},2] r = {{{_numbers(2 * n)}}}, "
            f"float[{n}] bw = {{{_numbers(n)}}}, float[{n}] br = {{{_numbers(n)}}}"
        )
    return (
        f"agraph (float[2,{steps},3] x, {states}) => (float[2,{steps},2] y) <{consts}, int64[1] one = {{1}}, "
        f"float unit = {{1}}> {{ {' '.join(lines)} {stacked} y = Concat<axis=1>({parts}) }}"
    )


_LSTM_STATES = "float[2,2] h0, float[2,2] c0"

_LSTM_CELL = (
    "i{t}g, f{t}g, g{t}g, o{t}g = Split<axis=1, num_outputs=4>(z{t}) i{t}s = Sigmoid(i{t}g) f{t}s = Sigmoid(f{t}g) "
    "g{t}s = Tanh(g{t}g) o{t}s = Sigmoid(o{t}g) k{t} = Mul(f{t}s, c{t}) n{t} = Mul(i{t}s, g{t}s) "
    "c{n} = Add(k{t}, n{t}) s{n} = Tanh(c{n}) h{n} = Mul(o{t}s, s{n})"
)

_GRU_CELL = (
    "ra{t}, za{t}, na{t} = Split<axis=1, num_outputs=3>(a{t}) rb{t}, zb{t}, nb{t} = Split<axis=1, num_outputs=3>(b{t}) "
    "rs{t} = Add(ra{t}, rb{t}) r{t}s = Sigmoid(rs{t}) zs{t} = Add(za{t}, zb{t}) u{t} = Sigmoid(zs{t}) "
    "p{t} = Mul(r{t}s, nb{t}) q{t} = Add(na{t}, p{t}) n{t} = Tanh(q{t}) "
)

_GRU_BLEND = "d{t} = Sub(h{t}, n{t}) e{t} = Mul(u{t}, d{t}) h{n} = Add(e{t}, n{t})"

_GRU_RESET_FIRST = (
    "ra{t}, za{t}, na{t} = Split<axis=1, num_outputs=3>(a{t}) rb{t}, zb{t}, nb{t} = Split<axis=1, num_outputs=3>(b{t}) "
    "rs{t} = Add(ra{t}, rb{t}) r{t}s = Sigmoid(rs{t}) zs{t} = Add(za{t}, zb{t}) u{t} = Sigmoid(zs{t}) "
    "k{t} = Mul(r{t}s, h{t}) j{t} = Gemm<transB=1>(k{t}, r, br) "
    "jr{t}, jz{t}, jn{t} = Split<axis=1, num_outputs=3>(j{t}) q{t} = Add(na{t}, jn{t}) n{t} = Tanh(q{t}) "
)


def _fed_back(example: str) -> str:
    """The text of a cell in which the second step's input depends on the first state."""
    return example.replace(
        "x1 = Gather<axis=1>(x, i1)", "y1 = Gather<axis=1>(x, i1) y2 = ReduceMean(h1, one) x1 = Add(y1, y2)"
    )


def _short(example: str, state: str, shape: str) -> str:
    """The text of a cell whose first state broadcasts."""
    return example.replace(f"float[2,2] {state}", f"float[{shape}] {state}")


def _other_input(example: str) -> str:
    """The text of a cell whose second step has an input that broadcasts."""
    return example.replace("agraph (", "agraph (float[1,3] v, ").replace(
        "x1 = Gather<axis=1>(x, i1)", "x1 = Identity(v)"
    )


def _users(reader: Reader, value: Value, op: str) -> list[Node]:
    return [n for n in reader.users(value) if n.op == op]


# Gates that are cut twice: slices of a Split's outputs, and a Split of a slice.
_LSTM_CUTS = _LSTM_CELL.replace(
    "i{t}g, f{t}g, g{t}g, o{t}g = Split<axis=1, num_outputs=4>(z{t})",
    "p{t}, q{t} = Split<axis=-1, num_outputs=2>(z{t}) v{t} = Slice(z{t}, to0, to4, one) "
    "o{t}g = Slice(q{t}, to2, to4, one) f{t}g, i{t}g = Split<axis=1, num_outputs=2>(v{t}) "
    "u{t} = Slice(z{t}, to2, to6, one) s{t}g, g{t}g = Split<axis=1, num_outputs=2>(u{t})",
)

_CUTS_AT = "".join(f"int64[1] to{i} = {{{i}}}, " for i in (0, 2, 3, 4, 6, 8))


def _with(example: str, constants: str) -> str:
    """The text of a cell with more constants."""
    return example.replace("int64[1] one", f"{constants}int64[1] one")


class FuseUnrolledLSTM(_Unrolled):
    """c' = sigmoid(f) * c + sigmoid(i) * tanh(g), h' = sigmoid(o) * tanh(c'), step by step -> lstm(x, h, c).

    i, f, g, o are linear functions of x_t and h, the same in every step. They may be cut out of one product or several,
    of concat(x_t, h) or of x_t and h, with or without biases, in any order. Cells with peepholes are not matched.
    """

    anchors = ("Mul",)
    reads_from = ("Sigmoid",)
    examples = (
        _unrolled(f"z{{t}} = Add(a{{t}}, b{{t}}) {_LSTM_CELL}", 4, states=_LSTM_STATES),
        _unrolled(_LSTM_CELL, 4, states=_LSTM_STATES, joined=True, steps=2),
        _with(
            _unrolled(f"z{{t}} = Add(a{{t}}, b{{t}}) {_LSTM_CUTS}", 4, states=_LSTM_STATES, steps=2), _CUTS_AT
        ),
        # A cell in which only one gate has a bias.
        _with(
            _unrolled(
                f"z{{t}} = Add(a{{t}}, b{{t}}) {_LSTM_CELL}".replace(
                    "f{t}s = Sigmoid(f{t}g)", "e{t} = Add(f{t}g, own) f{t}s = Sigmoid(e{t})"
                ),
                4,
                states=_LSTM_STATES,
                steps=2,
            ),
            "float[1,2] own = {0.5, -0.25}, ",
        )
        .replace(", bw)", ")")
        .replace(", br)", ")"),
        # A cell whose second step uses the first cell state again.
        _unrolled(f"z{{t}} = Add(a{{t}}, b{{t}}) {_LSTM_CELL}", 4, states=_LSTM_STATES).replace(
            "k1 = Mul(f1s, c1)", "k1 = Mul(f1s, c0)"
        ),
        _unrolled(_LSTM_CELL, 4, states=_LSTM_STATES, joined=True, steps=2).replace(
            "Concat<axis=1>(x0", "Concat<axis=-1>(x0"
        ),
    )
    near_misses = (
        # A cell of which an inner cell state is read.
        examples[0].replace("=> (float[2,3,2] y)", "=> (float[2,3,2] y, float[2,2] c1)"),
        # A cell whose forget gate has one column, which broadcasts.
        _with(
            _unrolled(
                f"z{{t}} = Add(a{{t}}, b{{t}}) {_LSTM_CELL}".replace(
                    "f{t}s = Sigmoid(f{t}g)", "e{t} = Slice(z{t}, to2, to3, one) f{t}s = Sigmoid(e{t})"
                ),
                4,
                states=_LSTM_STATES,
            ),
            _CUTS_AT,
        ),
        # A cell in which each gate has two products with the hidden state.
        _unrolled(
            "e{t} = Gemm<transB=1>(h{t}, r) y{t} = Add(a{t}, b{t}) z{t} = Add(y{t}, e{t}) " + _LSTM_CELL,
            4,
            states=_LSTM_STATES,
        ),
        _with(
            examples[0].replace(
                "f0s = Sigmoid(f0g)", "f0q = Slice(z0, to0, to8, one, to4) f0s = Sigmoid(f0q)"
            ),
            _CUTS_AT,
        ),
        _fed_back(examples[0]),
        _short(examples[0], "h0", "1,2"),
        _short(examples[0], "c0", "2,1"),
        _other_input(examples[0]),
    )
    native = "LSTM"
    states = 2

    def step(self, reader: Reader, hidden: Value) -> _Step | None:
        size = _width(reader, hidden)
        if size is None:
            return None
        for out, squashed in _both(reader.producer(hidden), "Mul"):
            cell = _argument(reader, squashed, "Tanh")
            if cell is None:
                continue
            for remembered, new in _both(reader.producer(cell), "Add"):
                for forget, before in _both(reader.producer(remembered), "Mul"):
                    for let_in, candidate in _both(reader.producer(new), "Mul"):
                        gates = (
                            _gate(reader, let_in, "Sigmoid", size),
                            _gate(reader, out, "Sigmoid", size),
                            _gate(reader, forget, "Sigmoid", size),
                            _gate(reader, candidate, "Tanh", size),
                        )
                        if all(gates):
                            linear_gates = tuple(g for g in gates if g is not None)
                            return _Step(linear_gates, (), (hidden, before), (hidden, cell))
        return None

    def last(self, reader: Reader, step: _Step) -> bool:
        # A further step would multiply the cell by a gate.
        return not _users(reader, step.values[1], "Mul")


class FuseUnrolledGRU(_Unrolled):
    """h' = (1 - z) * tanh(n) + z * h, or n + z * (h - n), step by step -> gru(x, h)  with gates z, r, n.

    n = W x + r * (R h + b), or W x + R (r * h): the reset gate multiplies either the product R h + b or the state h.
    """

    anchors = ("Add",)
    reads_from = ("Mul",)
    examples = (
        _unrolled(_GRU_CELL + _GRU_BLEND, 3),
        _unrolled(
            _GRU_CELL
            + "d{t} = Sub(unit, u{t}) e{t} = Mul(d{t}, n{t}) l{t} = Mul(u{t}, h{t}) h{n} = Add(e{t}, l{t})",
            3,
        ),
        _unrolled(_GRU_CELL + _GRU_BLEND, 3, steps=2).replace(", bw)", ")").replace(", br)", ")"),
        _unrolled(_GRU_RESET_FIRST + _GRU_BLEND, 3, steps=2),
    )
    near_misses = (
        _fed_back(examples[0]),
        _short(examples[0], "h0", "1,2"),
        _other_input(examples[0]),
        _unrolled(_GRU_RESET_FIRST.replace("r{t}s = Sigmoid", "r{t}s = Tanh") + _GRU_BLEND, 3, steps=2),
        _unrolled(
            _GRU_RESET_FIRST.replace("k{t} = Mul(r{t}s, h{t})", "k{t} = Mul(r{t}s, v)") + _GRU_BLEND,
            3,
            steps=2,
        ).replace("agraph (", "agraph (float[2,2] v, "),
        # A cell whose reset gate scales the product with the input.
        _unrolled(
            _GRU_CELL.replace("Mul(r{t}s, nb{t})", "Mul(r{t}s, na{t})").replace(
                "Add(na{t}, p", "Add(nb{t}, p"
            )
            + _GRU_BLEND,
            3,
            steps=2,
        ),
    )
    native = "GRU"

    def step(self, reader: Reader, hidden: Value) -> _Step | None:
        size = _width(reader, hidden)
        node = reader.producer(hidden)
        if size is None or node is None or node.op != "Add":
            return None
        for update, candidate, before in self._blends(reader, node):
            z = _gate(reader, update, "Sigmoid", size)
            inner = _argument(reader, candidate, "Tanh")
            if z is None or inner is None:
                continue
            candidate_ = self._candidate(reader, inner, before, size)
            if candidate_ is not None:
                reset, of_input, of_hidden, after = candidate_
                gates = (z, reset, of_input + of_hidden)
                kind = (after, of_hidden.biases if after else ())
                return _Step(gates, kind, (before,), (hidden,))
        return None

    @staticmethod
    def _blends(reader: Reader, node: Node) -> Iterator[tuple[Value, Value, Value]]:
        """The ways to read a sum as a blend: (update gate, candidate, state before)."""
        for a, b in _both(node, "Add"):
            # n + z * (h - n)
            for update, difference in _both(reader.producer(a), "Mul"):
                minus = reader.producer(difference)
                if minus is not None and minus.op == "Sub" and minus.inputs[1] == b:
                    yield update, b, minus.inputs[0]
            # (1 - z) * n + z * h
            for complement, candidate in _both(reader.producer(a), "Mul"):
                minus = reader.producer(complement)
                if minus is None or minus.op != "Sub" or not reader.is_const(minus.inputs[0]):
                    continue
                if reader.graph.leaves.uniform(minus.inputs[0]) != 1.0:
                    continue
                for update, before in _both(reader.producer(b), "Mul"):
                    if update == minus.inputs[1]:
                        yield update, candidate, before

    @staticmethod
    def _candidate(
        reader: Reader, value: Value, before: Value, size: int
    ) -> tuple[_Linear, _Linear, _Linear, bool] | None:
        """The parts of a candidate: reset gate, product with the input, product with the state, and whether the reset
        gate comes after the latter product. None if the value is no candidate.
        """
        for added, product in _both(reader.producer(value), "Add"):
            for gate, projected in _both(reader.producer(product), "Mul"):
                reset = _gate(reader, gate, "Sigmoid", size)
                of_hidden = _linear(reader, projected, 0, size)
                of_input = _linear(reader, added, 0, size)
                if reset is None or of_hidden is None or of_input is None:
                    continue
                if {v for v, _ in of_hidden.terms} == {before}:
                    return reset, of_input, of_hidden, True
        total = _linear(reader, value, 0, size)
        if total is None:
            return None
        for source, weight in total.terms:
            for gate, state in _both(reader.producer(source), "Mul"):
                reset = _gate(reader, gate, "Sigmoid", size)
                if reset is not None and state == before:
                    remaining = tuple(t for t in total.terms if t[0] != source)
                    return reset, _Linear(remaining, total.biases), _Linear(((before, weight),)), False
        return None

    def before(self, step: _Step) -> list[Value]:
        return [step.states[0]]

    def hidden_before(self, steps: Sequence[_Step], reader: Reader) -> Value | None:
        return steps[0].states[0]

    def last(self, reader: Reader, step: _Step) -> bool:
        # A further step would blend the state with a candidate, and multiply it by a matrix.
        hidden = step.values[0]
        return not (_users(reader, hidden, "Mul") or _users(reader, hidden, "Sub"))

    def biases(self, op: Op, native: _Native, vals: dict[Value, Val]) -> Any:
        _, of_hidden = native.kind
        if not any(native.biases):
            return None
        candidate = list(native.biases[2])
        for bias in of_hidden:
            candidate.remove(bias)
        own = [*native.biases[:2], tuple(candidate)]
        rows = [self.bias(op, b, vals, native.size) for b in own]
        rows.append(op.Expand(np.zeros(1, np.float32), [2 * native.size]))
        rows.append(self.bias(op, of_hidden, vals, native.size))
        return op.Unsqueeze(op.Concat(*rows, axis=0), [0])

    def attributes(self, native: _Native) -> dict[str, Any]:
        return {"linear_before_reset": 1} if native.kind[0] else {}


# The reason why mutants that exchange the two halves of a bias are right.
_SUM = "an RNN adds up its two biases"


class FuseUnrolledRNN(_Unrolled):
    """h' = tanh(W x_t + R h + b), step by step -> rnn(x, h);  Relu alike."""

    anchors = ("Tanh", "Relu")
    reads_from = ("Add", "Gemm", "MatMul")
    examples = (
        _unrolled("s{t} = Add(a{t}, b{t}) h{n} = Tanh(s{t})", 1),
        _unrolled("h{n} = Relu(z{t})", 1, joined=True, steps=2),
    )
    near_misses = (_fed_back(examples[0]), _short(examples[0], "h0", "1,2"), _other_input(examples[0]))
    survivors: ClassVar[Mapping[str, str]] = {
        "swap 0 1 of Concat (call 12)": _SUM,
        "swap 0 1 of Concat (call 13)": _SUM,
    }
    native = "RNN"

    def step(self, reader: Reader, hidden: Value) -> _Step | None:
        size = _width(reader, hidden)
        node = reader.producer(hidden)
        if size is None or node is None or node.op not in self.anchors:
            return None
        gate = _linear(reader, node.inputs[0], 0, size)
        if gate is None or len(gate.terms) != 2:
            return None
        return _Step((gate,), (node.op,), (hidden,), (hidden,))

    def last(self, reader: Reader, step: _Step) -> bool:
        # A further step would multiply the state by a square matrix; a layer after the cell may do so, too.
        kinds: set[str] = set()
        for user in reader.users(step.values[0]):
            if user.op in ("MatMul", "Gemm", "Concat"):
                kinds.update(
                    w.op for n in reader.users(user.outputs[0]) for w in (n, *reader.users(n.outputs[0]))
                )
                kinds.update(n.op for n in reader.users(user.outputs[0]))
        return step.kind[0] not in kinds

    def attributes(self, native: _Native) -> dict[str, Any]:
        return {"activations": (native.kind[0],)} if native.kind[0] != "Tanh" else {}
