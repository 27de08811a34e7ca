"""Rules that replace operators that TVM lacks by others: recurrent cells step by step, attention, rotation.

The resulting graphs are not faster. The rules are applied on import, and only if TVM is the backend.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np

from rewrite_rules.axes import int_attr
from rewrite_rules.control import UnrollLoop
from rewrite_rules.elementwise import FLOAT
from rewrite_rules.examples import graphs
from xrlflow.ir import ABSENT, DType, Node, Value
from xrlflow.rewrite import Op, Reader, Region, RegionRule, Val, profitable, require

# The most steps of a recurrent operator: TVM takes minutes to compile a graph with this many.
_MOST_STEPS = 256
# The most parts of one Concat: for each element, TVM's Concat checks the parts one after the other.
_PARTS = 16


class _Expansion(RegionRule, family="expansion"):
    """A rule that replaces one node by several."""

    backend = "tvm"
    canonicalises = True
    dtypes = FLOAT


def _read(reader: Reader, node: Node) -> tuple[int, ...]:
    """The indices of a node's outputs that are read or are outputs of the graph."""
    return tuple(i for i, v in enumerate(node.outputs) if reader.count_users(v) or reader.is_output(v))


def _padded_inputs(node: Node, count: int) -> tuple[Value, ...]:
    """The first `count` inputs of a node, with ABSENT for inputs that are left out."""
    return (*node.inputs, *(ABSENT,) * count)[:count]


def _joined(op: Op, parts: Sequence[Any], axis: int) -> Any:
    """The concatenation of the parts. Each Concat joins only a few of them."""
    while len(parts) > 1:
        groups = [parts[i : i + _PARTS] for i in range(0, len(parts), _PARTS)]
        parts = [op.Concat(*group, axis=axis) if len(group) > 1 else group[0] for group in groups]
    return parts[0]


# Recurrent cells


@dataclass(frozen=True, slots=True)
class _Cells:
    """The data that the target of a recurrent operator needs.

    `backwards`: for each direction, whether it runs from the last step to the first; `functions`: for each direction,
    its activations. `linear`: whether a GRU's reset gate multiplies the product with the hidden state. `outputs`: the
    outputs that are read.
    """

    steps: int
    batch: int
    width: int
    size: int
    batch_first: bool
    backwards: tuple[bool, ...]
    functions: tuple[tuple[str, ...], ...]
    linear: bool
    outputs: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class _Weights:
    """One direction's weights `hidden` [size, gates * size], and its biases [gates * size] of input and state (or
    None).
    """

    hidden: Any
    of_input: Any
    of_hidden: Any


# One step's part of each product or state; the names of the activations.
_Row = tuple[Any, ...]
_Names = tuple[str, ...]

_BACKWARDS = {"forward": (False,), "reverse": (True,), "bidirectional": (False, True)}
# Activations that have no parameters, by their names in lower case.
_PLAIN = {"relu": "Relu", "sigmoid": "Sigmoid", "tanh": "Tanh"}


class _ExpandCells(_Expansion):
    """The common part of the recurrent operators: one product for the inputs of all steps, then one step after the
    other.
    """

    gates = 1
    states = 1
    default: ClassVar[tuple[str, ...]] = ("Tanh",)

    def find(self, reader: Reader, node: Node) -> Region | None:
        x, w, r = (reader.val(v) for v in node.inputs[:3])
        b, lengths, *more = _padded_inputs(node, 8)[3:]
        require("clip" not in node.attrs, "what goes into the gates is clipped")
        require(not node.attrs.get("input_forget"), "the input gate and the forget gate are coupled")
        require(self.states == 1 or more[2] == ABSENT, "it has peepholes")
        backwards = _BACKWARDS[str(node.attrs.get("direction", "forward"))]
        batch_first = int_attr(node, "layout", 0) == 1
        steps, batch, width = (x.sizes[i] for i in ((1, 0, 2) if batch_first else (0, 1, 2)))
        size = r.size(2)
        require(min(steps, batch, width, size) > 0, "a dimension is 0")
        profitable(steps <= _MOST_STEPS, f"it has {steps} time steps, more than {_MOST_STEPS}")
        if lengths != ABSENT:
            numbers = reader.val(lengths).array_or_none
            require(numbers is not None and bool((numbers == steps).all()), "sequence_lens is given")
        directions, rows = len(backwards), self.gates * size
        fits = w.sizes == (directions, rows, width) and r.sizes == (directions, rows, size)
        if b != ABSENT:
            fits = fits and reader.val(b).sizes == (directions, 2 * rows)
        state = (batch, directions, size) if batch_first else (directions, batch, size)
        initial = more[: self.states]
        fits = fits and all(v == ABSENT or reader.val(v).sizes == state for v in initial)
        fits = fits and int_attr(node, "hidden_size", size) == size
        require(fits, "the shapes of the weights do not fit together")
        data = _Cells(
            steps, batch, width, size, batch_first, backwards, self._functions(node, directions),
            bool(node.attrs.get("linear_before_reset")), _read(reader, node),
        )  # fmt: skip
        inputs = (*node.inputs[:3], b, *initial)
        return Region(tuple(node.outputs[i] for i in data.outputs), inputs, (node,), data)

    def _functions(self, node: Node, directions: int) -> tuple[tuple[str, ...], ...]:
        """The names of the activations, for each direction."""
        names = node.attrs.get("activations") or self.default * directions
        assert isinstance(names, tuple)
        for name in names:
            require(str(name).lower() in _PLAIN, f"an activation is {name}")
        count = len(self.default)
        profitable(len(names) == directions * count, "there are too many or too few activations")
        plain = [_PLAIN[str(name).lower()] for name in names]
        return tuple(tuple(plain[i * count : (i + 1) * count]) for i in range(directions))

    def target(
        self, op: Op, region: Region, x: Val, w: Val, r: Val, b: Val | None = None, *initial: Val | None
    ) -> Any:
        cells: _Cells = region.data
        sequence = op.Transpose(x, perm=[1, 0, 2]) if cells.batch_first else x
        inputs = op.Reshape(sequence, [cells.steps * cells.batch, cells.width])
        directions = len(cells.backwards)
        first = (*initial, *(None,) * self.states)[: self.states]
        hidden_states, last = [], []
        for direction, backwards in enumerate(cells.backwards):
            weights = self._weights(op, cells, r, b, direction)
            parts = self._projected(op, cells, inputs, _one(op, w, direction, directions), weights.of_input)
            states = tuple(self._initial(op, cells, s, direction) for s in first)
            hidden: list[Any] = [None] * cells.steps
            for step in range(cells.steps)[:: -1 if backwards else 1]:
                states = self.step(op, cells, parts[step], states, weights, cells.functions[direction])
                hidden[step] = states[0]
            hidden_states.append(hidden)
            last.append(states)
        return [self._output(op, cells, i, hidden_states, last) for i in cells.outputs]

    def _projected(self, op: Op, cells: _Cells, inputs: Any, w: Any, bias: Any) -> list[tuple[Any, ...]]:
        """The products of each step's input with the weights, each [batch, gates * size]."""
        columns, start = [], 0
        products = self.products(cells)
        for gates in products:
            end = start + gates * cells.size
            single = len(products) == 1
            rows = w if single else op.Slice(w, [start], [end], [0])
            product = op.MatMul(inputs, op.Transpose(rows, perm=[1, 0]))
            if bias is not None:
                product = op.Add(product, bias if single else op.Slice(bias, [start], [end], [0]))
            # A single Split cuts the product, so that TVM has one kernel for all steps and not one for each.
            sizes = [cells.batch] * cells.steps
            columns.append(op.Split(product, axis=0, sizes=sizes) if cells.steps > 1 else (product,))
            start = end
        return list(zip(*columns))

    def step(self, op: Op, cells: _Cells, x: _Row, states: _Row, weights: _Weights, f: _Names) -> _Row:
        """The states after a step. x are the products of the step's input with the weights."""
        raise NotImplementedError

    def products(self, cells: _Cells) -> tuple[int, ...]:
        """The number of gates in each product of the inputs."""
        return (self.gates,)

    def separate(self, cells: _Cells) -> int:
        """The number of gates, counted from the last, whose bias of the hidden state cannot be added to the inputs'
        product.
        """
        return 0

    def _weights(self, op: Op, cells: _Cells, r: Val, b: Val | None, direction: int) -> _Weights:
        directions, rows = len(cells.backwards), self.gates * cells.size
        hidden = op.Transpose(_one(op, r, direction, directions), perm=[1, 0])
        if b is None:
            return _Weights(hidden, None, None)
        both = _one(op, b, direction, directions)
        of_input, of_hidden = (op.Slice(both, [i * rows], [(i + 1) * rows], [0]) for i in (0, 1))
        if apart := self.separate(cells) * cells.size:
            early = op.Slice(of_hidden, [0], [rows - apart], [0])
            late = op.Slice(of_hidden, [rows - apart], [rows], [0])
            zeros = op.Expand(np.zeros(1, np.float32), [apart])
            return _Weights(hidden, op.Add(of_input, op.Concat(early, zeros, axis=0)), late)
        return _Weights(hidden, op.Add(of_input, of_hidden), None)

    @staticmethod
    def _initial(op: Op, cells: _Cells, state: Val | None, direction: int) -> Any:
        if state is None:
            return op.Expand(np.zeros((1, 1), np.float32), [cells.batch, cells.size])
        return _one(op, state, direction, len(cells.backwards), 1 if cells.batch_first else 0)

    @staticmethod
    def _output(
        op: Op,
        cells: _Cells,
        which: int,
        hidden_states: Sequence[Sequence[Any]],
        last: Sequence[tuple[Any, ...]],
    ) -> Any:
        """An output of the operator: all hidden states [steps, directions, batch, size], or a last state [directions,
        batch, size].
        """
        if which:
            axis = 1 if cells.batch_first else 0
            return _joined(op, [op.Unsqueeze(states[which - 1], [axis]) for states in last], axis)
        shape = [cells.steps, 1, cells.batch, cells.size]
        result = _joined(op, [op.Reshape(_joined(op, hidden, 0), shape) for hidden in hidden_states], 1)
        return op.Transpose(result, perm=[2, 0, 1, 3]) if cells.batch_first else result


def _one(op: Op, value: Val, direction: int, directions: int, axis: int = 0) -> Any:
    """The part of a value that belongs to one direction."""
    return op.Squeeze(
        value if directions == 1 else op.Slice(value, [direction], [direction + 1], [axis]), [axis]
    )


def _columns(op: Op, x: Any, start: int, count: int) -> Any:
    return op.Slice(x, [start], [start + count], [1])


def _cell_example(
    name: str, gates: int, attributes: str = "", more: str = "", *, directions: int = 1, results: str = "y"
) -> str:
    """ONNX text of an operator over x[2,2,3] with hidden size 2. `more` are further inputs after the weights.

    With gates and two directions the hidden size is 1, because more activations make a proof less certain.
    """
    size, batch = 1 if directions > 1 and gates > 1 else 2, 2
    rows, state = gates * size, f"float[{directions},{batch},{size}]"
    types = {"b": f"float[{directions},{2 * rows}]", "h": state, "c": state}
    inputs = "".join(f", {types[v]} {v}" for v in more.replace(",", " ").split())
    shapes = {"y": f"float[2,{directions},{batch},{size}]", "p": state, "q": state}
    outputs = ", ".join(f"{shapes[v]} {v}" for v in results)
    names = ", ".join("ypq"[: 3 if name == "LSTM" else 2])
    return (
        f"agraph (float[2,{batch},3] x, float[{directions},{rows},3] w, float[{directions},{rows},{size}] r{inputs}) =>"
        f" ({outputs}) {{ {names} = {name}<hidden_size={size}{attributes}>(x, w, r{', ' + more if more else ''}) }}"
    )


_BOTH = ', direction="bidirectional"'
_REVERSE = ', direction="reverse"'


def _batch_first(name: str, gates: int, attributes: str = "", directions: int = 1) -> str:
    """The text of an example whose first dimension is the batch."""
    size, batch = 1 if directions > 1 and gates > 1 else 2, 2
    return (
        f"agraph (float[{batch},2,3] x, float[{directions},{gates * size},3] w,"
        f" float[{directions},{gates * size},{size}] r, float[{batch},{directions},{size}] h)"
        f" => (float[{batch},2,{directions},{size}] y, float[{batch},{directions},{size}] p)"
        f" {{ y, p = {name}<hidden_size={size}, layout=1{attributes}>(x, w, r, , , h) }}"
    )


def _lengths(example: str, lengths: str) -> str:
    """The text of an example with the input sequence_lens: a constant, or the input n."""
    with_lengths = example.replace("(x, w, r, b", "(x, w, r, b, n")
    if not lengths:
        return with_lengths.replace(" r, float", " r, int32[2] n, float", 1)
    return with_lengths.replace(" { ", f" <int32[2] n = {{{lengths}}}> {{ ", 1)


def _near_misses(name: str, gates: int) -> tuple[str, ...]:
    plain = _cell_example(name, gates, more="b")
    return (
        _cell_example(name, gates, ", clip=0.25"),
        _cell_example(name, gates, ', activations=["Affine", "Affine", "Affine"]'),
        _cell_example(name, gates, ', activations=["Relu", "Relu", "Relu", "Relu"]'),
        _lengths(plain, ""),
        _lengths(plain, "2, 1"),
        plain.replace("float[2,2,3] x", "float[0,2,3] x"),
    )


class ExpandLSTM(_ExpandCells):
    """lstm(x, h, c) -> c' = sigmoid(f) * c + sigmoid(i) * tanh(g), h' = sigmoid(o) * tanh(c'), step by step.

    i, o, f, g = W x_t + R h + b. One product computes W x_t for all steps.
    """

    anchors = ("LSTM",)
    gates = 4
    states = 2
    default = ("Sigmoid", "Tanh", "Tanh")
    examples = (
        _cell_example("LSTM", 4, more="b, , h, c", results="ypq"),
        _cell_example("LSTM", 4, _REVERSE, more="b", results="yq"),
        _cell_example("LSTM", 4, _BOTH, more="b, , h, c", directions=2, results="ypq"),
        _cell_example("LSTM", 4, ', activations=["sigmoid", "Relu", "tanh"]', results="p"),
        _batch_first("LSTM", 4),
        _batch_first("LSTM", 4, _BOTH, 2),
        _cell_example(
            "LSTM",
            4,
            _BOTH + ', activations=["Sigmoid", "Tanh", "Tanh", "Sigmoid", "Relu", "Tanh"]',
            directions=2,
        ),
        _batch_first("LSTM", 4)
        .replace("float[2,2,3] x", "float[2,1,3] x")
        .replace("float[2,2,1,2] y", "float[2,1,1,2] y"),
        _lengths(_cell_example("LSTM", 4, more="b"), "2, 2"),
    )
    near_misses = (
        *_near_misses("LSTM", 4),
        _cell_example("LSTM", 4, more="b, , h, c").replace("float[1,2,2] c", "float[1,1,2] c"),
        _cell_example("LSTM", 4, ", input_forget=1"),
        _cell_example("LSTM", 4, more="b, , h, c")
        .replace("float[1,2,2] c", "float[1,2,2] c, float[1,6] k")
        .replace("h, c)", "h, c, k)"),
    )

    def step(self, op: Op, cells: _Cells, x: _Row, states: _Row, weights: _Weights, f: _Names) -> _Row:
        hidden, cell = states
        total = op.Add(op.MatMul(hidden, weights.hidden), x[0])
        let_in, out, forget, new = (_columns(op, total, i * cells.size, cells.size) for i in range(4))
        cell = op.Add(op.Mul(op[f[0]](forget), cell), op.Mul(op[f[0]](let_in), op[f[1]](new)))
        return op.Mul(op[f[0]](out), op[f[2]](cell)), cell


class ExpandGRU(_ExpandCells):
    """gru(x, h) -> h' = (1 - z) * n + z * h, step by step, with z, r = sigmoid(W x_t + R h + b), and n = tanh(W x_t + R
    (r * h) + b), or n = tanh(W x_t + b + r * (R h + c)).

    One product computes W x_t for all steps, or one for each of z, r and n.
    """

    anchors = ("GRU",)
    gates = 3
    default = ("Sigmoid", "Tanh")
    examples = (
        _cell_example("GRU", 3, more="b, , h", results="yp"),
        _cell_example("GRU", 3, ", linear_before_reset=1", more="b, , h", results="yp"),
        _cell_example("GRU", 3, ", linear_before_reset=1", results="p"),
        _cell_example("GRU", 3, _REVERSE, more="b"),
        _cell_example("GRU", 3, _BOTH + ", linear_before_reset=1", more="b, , h", directions=2, results="yp"),
        _cell_example("GRU", 3, ', activations=["sigmoid", "Relu"]', results="p"),
        _batch_first("GRU", 3),
        _batch_first("GRU", 3, _BOTH, 2),
        _lengths(_cell_example("GRU", 3, more="b"), "2, 2"),
    )
    near_misses = _near_misses("GRU", 3)

    def products(self, cells: _Cells) -> tuple[int, ...]:
        # A step should add whole products, because TVM cannot cut a product and add it in the same kernel.
        return (3,) if cells.linear else (1, 1, 1)

    def separate(self, cells: _Cells) -> int:
        return 1 if cells.linear else 0

    def step(self, op: Op, cells: _Cells, x: _Row, states: _Row, weights: _Weights, f: _Names) -> _Row:
        (hidden,) = states
        if cells.linear:
            update, total = self._reset_after(op, cells, x[0], hidden, weights, f[0])
        else:
            of_update, of_reset, own = (
                _columns(op, weights.hidden, i * cells.size, cells.size) for i in range(3)
            )
            update = op[f[0]](op.Add(op.MatMul(hidden, of_update), x[0]))
            reset = op[f[0]](op.Add(op.MatMul(hidden, of_reset), x[1]))
            total = op.Add(op.MatMul(op.Mul(reset, hidden), own), x[2])
        new = op[f[1]](total)
        return (op.Add(op.Mul(op.Sub(1.0, update), new), op.Mul(update, hidden)),)

    @staticmethod
    def _reset_after(
        op: Op, cells: _Cells, x: Any, hidden: Any, weights: _Weights, gate: str
    ) -> tuple[Any, Any]:
        """The update gate, and the argument of the candidate state's activation."""
        size = cells.size
        products = op.MatMul(hidden, weights.hidden)
        update, reset = (
            op[gate](op.Add(_columns(op, products, i * size, size), _columns(op, x, i * size, size)))
            for i in (0, 1)
        )
        inner = _columns(op, products, 2 * size, size)
        if weights.of_hidden is not None:
            inner = op.Add(inner, weights.of_hidden)
        return update, op.Add(op.Mul(reset, inner), _columns(op, x, 2 * size, size))


class ExpandRNN(_ExpandCells):
    """rnn(x, h) -> h' = tanh(W x_t + R h + b), step by step;  Relu alike. The products W x_t of all steps are one."""

    anchors = ("RNN",)
    examples = (
        _cell_example("RNN", 1, more="b, , h", results="yp"),
        _cell_example("RNN", 1, ', activations=["relu"]', results="p"),
        _cell_example("RNN", 1, _REVERSE, more="b"),
        _cell_example("RNN", 1, _BOTH, more="b, , h", directions=2, results="yp"),
        _batch_first("RNN", 1),
        _batch_first("RNN", 1, _BOTH, 2),
        _lengths(_cell_example("RNN", 1, more="b"), "2, 2"),
    )
    near_misses = _near_misses("RNN", 1)

    def step(self, op: Op, cells: _Cells, x: _Row, states: _Row, weights: _Weights, f: _Names) -> _Row:
        return (op[f[0]](op.Add(op.MatMul(states[0], weights.hidden), x[0])),)


# Attention


@dataclass(frozen=True, slots=True)
class _Heads:
    """The data that the target of an Attention needs. `keys` is the number of the node's own keys, `past` of earlier
    keys.
    """

    batch: int
    heads: int
    shared: int  # the number of heads of keys and values
    rows: int
    keys: int
    past: int
    depth: int
    width: int
    flat: bool  # whether inputs and output have three dimensions
    scale: float
    cap: float
    causal: bool
    outputs: tuple[int, ...]


class ExpandAttention(_Expansion):
    """attention(q, k, v, mask) -> softmax(q @ transpose(k) * scale + mask) @ v.

    Also covered are heads of keys and values that several heads of queries share, past keys and values, a soft cap and
    the causal mask. Masked positions have weight 0, even if a mask hides a whole row.
    """

    proof = "numeric"
    relies_on = "the scale is rounded to float32"
    anchors = ("Attention",)
    examples = graphs(
        "(float[2,4,3,5] q, float[2,4,6,5] k, float[2,4,6,7] v) => (float[2,4,3,7] y) { y = Attention(q, k, v) }",
        "(float[2,4,3,5] q, float[2,2,6,5] k, float[2,2,6,7] v, float[3,6] m) => (float[2,4,3,7] y) "
        "{ y = Attention<scale=0.75>(q, k, v, m) }",
        "(float[2,4,3,5] q, float[2,2,6,5] k, float[2,2,6,7] v, bool[2,1,3,6] m) => (float[2,4,3,7] y) "
        "{ y = Attention<is_causal=1, softcap=1.5>(q, k, v, m) }",
        "(float[2,4,3,5] q, float[2,4,6,5] k, float[2,4,6,7] v, float[4,1,6] m) => (float[2,4,3,7] y) "
        "{ y = Attention<is_causal=1>(q, k, v, m) }",
        "(float[2,3,8] q, float[2,6,4] k, float[2,6,10] v) => (float[2,3,20] y) "
        "{ y = Attention<q_num_heads=4, kv_num_heads=2, is_causal=1>(q, k, v) }",
        "(float[2,3,8] q, float[2,3,8] k, float[2,3,8] v, float[1,1,3,5] m, float[2,4,2,2] pk, float[2,4,2,2] pv) "
        "=> (float[2,3,8] y, float[2,4,5,2] sk, float[2,4,5,2] sv) { y, sk, sv "
        "= Attention<q_num_heads=4, kv_num_heads=4>(q, k, v, m, pk, pv) }",
        "(float[2,4,3,2] q, float[2,2,3,2] k, float[2,2,3,2] v, float[2,2,2,2] pk, float[2,2,2,2] pv) "
        "=> (float[2,4,3,2] y) { y, sk, sv = Attention<is_causal=1>(q, k, v, , pk, pv) }",
    )
    near_misses = graphs(
        "(float[2,4,3,5] q, float[2,4,6,5] k, float[2,4,6,7] v, double[3,6] m) => (float[2,4,3,7] y) "
        "{ y = Attention(q, k, v, m) }",
        "(float[2,4,3,5] q, float[2,4,6,5] k, float[2,4,6,7] v) => (float[2,4,3,7] y, float[2,4,3,6] s) "
        "{ y, sk, sv, s = Attention(q, k, v) }",
        "(float[2,4,3,5] q, float[2,4,6,5] k, float[2,4,6,7] v, float[3,1] m) => (float[2,4,3,7] y) "
        "{ y = Attention(q, k, v, m) }",
        "(float[2,4,3,5] q, float[2,4,0,5] k, float[2,4,0,7] v) => (float[2,4,3,7] y) { y = Attention(q, k, v) }",
        "(float[2,4,3,5] q, float[2,4,6,5] k, float[2,4,6,7] v, float[2,3,6] m) => (float[2,4,3,7] y) "
        "{ y = Attention(q, k, v, m) }",
        "(float[2,4,3,5] q, float[2,4,6,5] k, float[2,4,6,7] v, float[1,2,4,3,6] m) => (float[2,4,3,7] y) "
        "{ y = Attention(q, k, v, m) }",
        "(float[2,4,3,5] q, float[2,3,6,5] k, float[2,3,6,7] v) => (float[2,4,3,7] y) { y = Attention(q, k, v) }",
        "(float[2,4,3,5] q, float[2,4,6,6] k, float[2,4,6,7] v) => (float[2,4,3,7] y) { y = Attention(q, k, v) }",
        "(float[2,4,3,5] q, float[2,4,6,5] k, float[2,4,7,7] v) => (float[2,4,3,7] y) { y = Attention(q, k, v) }",
    )

    def find(self, reader: Reader, node: Node) -> Region | None:
        mask, past_key, past_value, lengths = _padded_inputs(node, 7)[3:]
        profitable(lengths == ABSENT, "nonpad_kv_seqlen is given")
        results = _read(reader, node)
        require(3 not in results, "the scores are read")
        q, k, v = (reader.val(i) for i in node.inputs[:3])
        require(q.rank == k.rank == v.rank and q.rank in (3, 4), "the ranks differ")
        heads, shared = (
            (q.size(1), k.size(1))
            if q.rank == 4
            else (int_attr(node, "q_num_heads", 0), int_attr(node, "kv_num_heads", 0))
        )
        require(heads > 0 and shared > 0 and heads % shared == 0, "the numbers of heads do not fit together")
        queries, keys, values = _split_heads(q, heads), _split_heads(k, shared), _split_heads(v, shared)
        batch, _, rows, depth = queries
        require(
            keys[:3] == values[:3] and (keys[0], keys[3]) == (batch, depth) and values[1] == shared,
            "the shapes of queries, keys and values do not fit together",
        )
        past = 0
        inputs = list(node.inputs[:3])
        if past_key != ABSENT and past_value != ABSENT:
            before = [reader.val(i).sizes for i in (past_key, past_value)]
            past = sum(before[0][2:3])  # empty if there are fewer dimensions
            require(
                before == [(batch, shared, past, depth), (batch, shared, past, values[3])],
                "the keys and values from before have other shapes",
            )
        profitable(min(batch, rows, keys[2], depth, values[3]) > 0, "a dimension is 0")
        if mask != ABSENT:
            mask_val = reader.val(mask)
            require(mask_val.dtype in (DType.BOOL, q.dtype), "the mask has another type")
            full = (batch, heads, rows, past + keys[2])
            fits = 2 <= mask_val.rank <= 4 and mask_val.sizes[-1] == full[-1]
            fits = fits and all(m in (1, d) for m, d in zip(mask_val.sizes[::-1], full[::-1]))
            # Later opsets pad a mask that is too short, so that the remaining keys are hidden.
            profitable(fits, "the mask has another shape")
        inputs += [mask, past_key, past_value] if past else [mask, ABSENT, ABSENT]
        scale, cap = node.attrs.get("scale"), node.attrs.get("softcap", 0.0)
        assert isinstance(cap, float)
        data = _Heads(
            batch, heads, shared, rows, keys[2], past, depth, values[3], q.rank == 3,
            scale if isinstance(scale, float) else float(np.float32(1.0 / math.sqrt(depth))), cap,
            bool(node.attrs.get("is_causal")), results,
        )  # fmt: skip
        return Region(tuple(node.outputs[i] for i in results), tuple(inputs), (node,), data)

    def target(
        self, op: Op, region: Region, q: Val, k: Val, v: Val, mask: Val | None = None, *before: Val | None
    ) -> Any:
        data: _Heads = region.data
        queries = self._heads(op, data, q, data.heads, data.rows, data.depth)
        keys = self._heads(op, data, k, data.shared, data.keys, data.depth)
        values = self._heads(op, data, v, data.shared, data.keys, data.width)
        if data.past:
            keys, values = (op.Concat(b, x, axis=2) for b, x in zip(before, (keys, values)))
        columns = data.past + data.keys
        scores = self._product(
            op, data, op.Mul(queries, data.scale), op.Transpose(keys, perm=[0, 1, 3, 2]), columns
        )
        if data.cap:
            scores = op.Mul(op.Tanh(op.Div(scores, data.cap)), data.cap)
        visible: Any = None
        if data.causal:
            positions = [
                op.Range(np.int64(a), np.int64(b), np.int64(1)) for a, b in ((0, columns), (0, data.rows))
            ]
            lasts = op.Unsqueeze(op.Add(positions[1], np.int64(data.past)), [1])
            visible = op.LessOrEqual(op.Unsqueeze(positions[0], [0]), lasts)
        if mask is not None and mask.dtype == DType.BOOL:
            visible = mask if visible is None else op.And(visible, mask)
        elif mask is not None:
            scores = op.Add(scores, mask)
        if visible is not None:
            scores = op.Where(visible, scores, np.float32(-np.inf))
        weights = op.Softmax(scores)
        if mask is not None:
            if mask.dtype != DType.BOOL:
                unmasked = op.Not(op.Equal(mask, np.float32(-np.inf)))
                visible = unmasked if visible is None else op.And(visible, unmasked)
            weights = op.Where(visible, weights, np.float32(0.0))
        y = self._product(op, data, weights, values, data.width)
        if data.flat:
            y = op.Reshape(
                op.Transpose(y, perm=[0, 2, 1, 3]), [data.batch, data.rows, data.heads * data.width]
            )
        results = (y, keys, values)
        return [results[i] for i in data.outputs]

    @staticmethod
    def _heads(op: Op, data: _Heads, x: Val, heads: int, rows: int, width: int) -> Any:
        """x of shape [batch, rows, heads * width] as [batch, heads, rows, width]."""
        if not data.flat:
            return x
        return op.Transpose(op.Reshape(x, [data.batch, rows, heads, width]), perm=[0, 2, 1, 3])

    @staticmethod
    def _product(op: Op, data: _Heads, x: Any, y: Any, columns: int) -> Any:
        """The product of x [batch, heads, rows, n] and y [batch, shared, n, columns]. A group of heads shares each head
        of y.
        """
        if data.heads == data.shared:
            return op.MatMul(x, y)
        together = data.heads // data.shared * data.rows
        product = op.MatMul(op.Reshape(x, [data.batch, data.shared, together, -1]), y)
        return op.Reshape(product, [data.batch, data.heads, data.rows, columns])


def _split_heads(x: Val, heads: int) -> tuple[int, ...]:
    """The sizes [batch, heads, rows, width] of a tensor that has three or four dimensions."""
    sizes = x.sizes
    if len(sizes) == 4:
        return sizes
    require(sizes[2] % heads == 0, "the heads do not divide the width")
    return sizes[0], heads, sizes[1], sizes[2] // heads


class ExpandRotaryEmbedding(_Expansion):
    """rotary(x, cos, sin) -> concat(a * cos - b * sin, a * sin + b * cos, c)  with a, b, c = x cut in three.

    a and b are the two halves of the rotated part, or its even and odd elements; c is the part that is not rotated.
    """

    anchors = ("RotaryEmbedding",)
    examples = (
        "agraph (float[2,3,4,6] x, float[5,3] c, float[5,3] s, int64[2,4] p) => (float[2,3,4,6] y)"
        " { y = RotaryEmbedding(x, c, s, p) }",
        "agraph (float[2,3,4,6] x, float[2,4,3] c, float[2,4,3] s) => (float[2,3,4,6] y)"
        " { y = RotaryEmbedding<interleaved=1>(x, c, s) }",
        "agraph (float[2,4,18] x, float[5,2] c, float[5,2] s, int64[2,4] p) => (float[2,4,18] y)"
        " { y = RotaryEmbedding<num_heads=3, rotary_embedding_dim=4>(x, c, s, p) }",
        "agraph (float[2,4,18] x, float[2,4,2] c, float[2,4,2] s) => (float[2,4,18] y)"
        " { y = RotaryEmbedding<num_heads=3, rotary_embedding_dim=4, interleaved=1>(x, c, s) }",
    )
    near_misses = graphs(
        "(float[2,3,4,6] x, float[5,3] c, float[5,3] s, int64[1,4] p) => (float[2,3,4,6] y) "
        "{ y = RotaryEmbedding(x, c, s, p) }",
        "(float[0,3,4,6] x, float[0,4,3] c, float[0,4,3] s) => (float[0,3,4,6] y) { y = RotaryEmbedding(x, c, s) }",
        "(float[2,3,4,6] x, float[2,4,4] c, float[2,4,4] s) => (float[2,3,4,6] y) "
        "{ y = RotaryEmbedding<rotary_embedding_dim=8>(x, c, s) }",
        "(float[2,3,4,6] x, float[2,4,1] c, float[2,4,1] s) => (float[2,3,4,6] y) "
        "{ y = RotaryEmbedding<rotary_embedding_dim=3>(x, c, s) }",
    )

    def find(self, reader: Reader, node: Node) -> Region | None:
        x, cosine, sine = (reader.val(v) for v in node.inputs[:3])
        flat = x.rank == 3
        heads = int_attr(node, "num_heads", 0) if flat else x.size(1)
        require(heads > 0, "the number of heads is not given")
        batch, _, rows, depth = _split_heads(x, heads)
        profitable(min(batch, rows, depth) > 0, "a dimension is 0")
        width = int_attr(node, "rotary_embedding_dim", 0) or depth
        require(width <= depth and width % 2 == 0, "what is turned is no even part of a head")
        positions = _padded_inputs(node, 4)[3]
        if positions == ABSENT:
            table: tuple[int, ...] = (batch, rows, width // 2)
        else:
            table = (cosine.size(0), width // 2)
            profitable(reader.val(positions).sizes == (batch, rows), "the positions have another shape")
        require(cosine.sizes == sine.sizes == table, "the tables of cosines and sines have another shape")
        data = (flat, (batch, rows, heads, depth), width, bool(node.attrs.get("interleaved")))
        return Region(node.outputs, (*node.inputs[:3], positions), (node,), data)

    def target(
        self, op: Op, region: Region, x: Val, cosine: Val, sine: Val, positions: Val | None = None
    ) -> Any:
        flat, (batch, rows, heads, depth), width, interleaved = region.data
        cut = op.Reshape(x, [batch, rows, heads, depth]) if flat else x
        tables = (cosine, sine) if positions is None else (op.Gather(t, positions) for t in (cosine, sine))
        c, s = (op.Unsqueeze(t, [2 if flat else 1]) for t in tables)
        start, step = (1, 2) if interleaved else (width // 2, 1)
        a = op.Slice(cut, [0], [width - start if interleaved else start], [3], [step])
        b = op.Slice(cut, [start], [width], [3], [step])
        rotated = [op.Sub(op.Mul(a, c), op.Mul(b, s)), op.Add(op.Mul(a, s), op.Mul(b, c))]
        unrotated = [op.Slice(cut, [width], [depth], [3])] if width < depth else []
        if interleaved:
            pairs = op.Concat(*(op.Unsqueeze(t, [4]) for t in rotated), axis=4)
            rotated = [
                op.Reshape(pairs, [batch, rows, heads, width] if flat else [batch, heads, rows, width])
            ]
        parts = [*rotated, *unrotated]
        y = op.Concat(*parts, axis=3) if len(parts) > 1 else parts[0]
        return op.Reshape(y, [batch, rows, heads * depth]) if flat else y


# Loops


class ExpandLoop(UnrollLoop, family="expansion"):
    """loop(n, s -> f(s)) -> f(f(... f(s)))  for a known number n, even if the graph becomes slower."""

    backend = "tvm"
    canonicalises = True
    most_steps = _MOST_STEPS
    most_nodes = 16 * _MOST_STEPS
