"""LSTM and GRU with constant weights: one product projects the inputs of all steps, one kernel goes along the steps.

Recurrent weights are packed into panels when the model is compiled: of some hidden columns, all gates side by side, so
that gate functions follow a tile of sums at once. The hidden size is padded to whole panels with weights and biases of
zero, which keep states of zero.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeAlias

import numpy as np
import numpy.typing as npt

from xrlflow.backends.tvm.bounds import known_value
from xrlflow.backends.tvm.building import (
    FLOAT,
    OPAQUE,
    SCHEDULED,
    along,
    number,
    product,
    ramp,
    spread,
    tiles,
)
from xrlflow.backends.tvm.import_tvm import tvm
from xrlflow.backends.tvm.products import CHUNK
from xrlflow.backends.tvm.reading import constant, operator, sizes, with_calls
from xrlflow.backends.tvm.schedules import WORTH_A_THREAD
from xrlflow.backends.tvm.target import Machine

if TYPE_CHECKING:
    from xrlflow.backends.tvm.operators import Imported

_PREFIX = "xrlflow.recurrent"
_GATES = {"LSTM": 4, "GRU": 3}
_ACTIVATIONS = {"LSTM": ("sigmoid", "tanh", "tanh"), "GRU": ("sigmoid", "tanh")}
_DIRECTIONS = {"forward": (False,), "reverse": (True,), "bidirectional": (False, True)}
_MOST_ROWS = 8
# Weights that stay in the first-level cache.
_NEAR = 4 << 10
# Multiply-adds that take as long as loading a number, and a vector, for a tile.
_BROADCAST, _VECTOR = 0.6, 0.9


@dataclass(frozen=True, slots=True)
class Form:
    """An LSTM or GRU. `backward`: for each direction, whether it goes from the last step to the first. `after`: the
    reset gate of a GRU follows the product (`linear_before_reset`). `given`: the initial states that are operands."""

    op: str
    steps: int
    batch: int
    hidden: int
    backward: tuple[bool, ...]
    after: bool
    given: tuple[bool, ...]

    @property
    def ways(self) -> int:
        return len(self.backward)

    @property
    def gates(self) -> int:
        return _GATES[self.op]

    @property
    def phases(self) -> tuple[tuple[int, ...], ...]:
        """The gates that are computed together, by their places in the weights."""
        if self.op == "GRU" and not self.after:
            return ((0, 1), (2,))
        return (tuple(range(self.gates)),)

    @property
    def flops(self) -> int:
        """Of the products with hidden states."""
        return 2 * self.ways * self.steps * self.batch * self.gates * self.hidden**2

    @property
    def outputs(self) -> list[tuple[int, ...]]:
        """The shapes of all hidden states, the last one, and the last cell state."""
        last = (self.ways, self.batch, self.hidden)
        return [(self.steps, *last)] + [last] * len(self.given)


@dataclass(frozen=True, slots=True)
class Plan:
    """A tile: `rows` of the batch, and for each gate `vectors` of `lanes` columns. `panels`: how many cover all.
    `block`: the rows of a task, which are independent of others."""

    rows: int
    vectors: int
    lanes: int
    panels: int
    block: int

    @property
    def columns(self) -> int:
        """Of a gate in a panel."""
        return self.vectors * self.lanes

    def chunk(self, form: Form) -> int:
        """The terms of each sum for which all rows are multiplied, while weights stay in the first-level cache."""
        if self.block <= self.rows:
            return CHUNK
        return max(8, min(CHUNK, _NEAR // (len(form.phases[0]) * self.columns)))

    @property
    def wide(self) -> int:
        """The padded hidden size."""
        return self.panels * self.columns


def plans(form: Form, machine: Machine) -> Iterator[Plan]:
    """The tiles to choose from."""
    lanes = machine.lanes
    while lanes > 1 and lanes // 2 >= form.hidden:
        lanes //= 2
    gates = len(form.phases[0])
    blocks = min(form.batch, -(-machine.cores // form.ways)) if form.flops >= WORTH_A_THREAD else 1
    block = -(-form.batch // blocks)
    for rows in range(1, min(_MOST_ROWS, block) + 1):
        for vectors in range(1, -(-form.hidden // lanes) + 1):
            # Of one row, weights are operands in memory.
            fits = machine.keeps(rows, gates * vectors) or (
                rows == 1 and gates * vectors <= machine.registers // 2
            )
            if fits or (rows, vectors) == (1, 1):
                yield Plan(rows, vectors, lanes, -(-form.hidden // (vectors * lanes)), block)


def plan(form: Form, machine: Machine) -> Plan:
    """The tile with the least estimated time."""

    def cost(how: Plan) -> float:
        vectors = len(form.phases[0]) * how.vectors

        def tile(rows: int) -> float:
            return max(rows * vectors, 8) + _BROADCAST * rows + _VECTOR * vectors

        whole, rest = divmod(how.block, how.rows)
        return how.panels * (whole * tile(how.rows) + (tile(rest) if rest else 0.0))

    return min(plans(form, machine), key=cost)


def recurrent(op: str, node: Imported) -> Any:
    """An LSTM or GRU as a call that `use_recurrent` replaces. Raises BackendError for what has no kernel."""
    from tvm import relax

    x, weights = node.inputs[0], [node.given(i) for i in (1, 2, 3)]
    shape = sizes(x, FLOAT)
    if shape is None or 0 in shape:
        raise node.refused("of other than floats of known sizes")
    matrices = [None if w is None else known_value(w) for w in weights]
    if matrices[0] is None or matrices[1] is None or (weights[2] is not None and matrices[2] is None):
        raise node.refused("with weights that are no constants")
    direction = _text(node.attributes.get("direction", "forward"))
    ways, hidden = len(_DIRECTIONS[direction]), matrices[1].shape[2]
    _check(op, node, ways)
    if hidden == 0:
        raise node.refused("without hidden columns")
    if matrices[2] is None:
        matrices[2] = np.zeros((ways, 2 * _GATES[op] * hidden), np.float32)
    states = [node.given(i) for i in ((5, 6) if op == "LSTM" else (5,))]
    last = (ways, shape[1], hidden)
    if any(state is not None and sizes(state, FLOAT) != last for state in states):
        raise node.refused("with initial states of unknown sizes")
    given = "".join("01"[state is not None] for state in states)
    after = int(node.attributes.get("linear_before_reset", 0)) if op == "GRU" else 0
    name = f"{_PREFIX}.{op}.{direction}.{after}.{given}"
    operands = [x, *map(constant, matrices), *(state for state in states if state is not None)]
    types = [relax.TensorType(each, FLOAT) for each in [(shape[0], *last)] + [last] * len(states)]
    found = node.emit(relax.call_dps_packed(name, operands, types))
    return relax.Tuple([node.emit(relax.TupleGetItem(found, i)) for i in range(len(types))])


def _text(value: Any) -> str:
    return value.decode() if isinstance(value, bytes) else str(value)


def _check(op: str, node: Imported, ways: int) -> None:
    """Raise BackendError for operands and attributes that kernels do not know."""
    attributes = node.attributes
    if node.given(4) is not None:
        raise node.refused("with sequence_lens")
    if node.given(7) is not None:
        raise node.refused("with peepholes")
    names = tuple(_text(name).lower() for name in attributes.get("activations", ()))
    if names not in ((), _ACTIVATIONS[op] * ways):
        raise node.refused("with other activations")
    for name in ("clip", "input_forget", "layout"):
        if attributes.get(name, 0):
            raise node.refused(f"with {name}")


def use_recurrent(module: Any, machine: Machine) -> Any:
    """The module with a product and a kernel for each LSTM and GRU in "main"."""
    tvm()
    from tvm import relax

    def replace(call: Any, builder: Any) -> Any | None:
        if operator(call) != "relax.call_dps_packed":
            return None
        name = str(getattr(call.args[0], "global_symbol", ""))
        if not name.startswith(_PREFIX):
            return None
        op, direction, after, given = name.removeprefix(_PREFIX + ".").split(".")
        x, *weights = list(call.args[1].fields)
        states = weights[3:]
        w, r, b = (each.value.numpy() for each in weights[:3])
        steps, batch, _ = sizes(x) or ()
        flags = tuple(flag == "1" for flag in given)
        form = Form(op, steps, batch, r.shape[2], _DIRECTIONS[direction], after == "1", flags)
        how = plan(form, machine)
        matrix, bias, rest = _projection(form, how, w, b)
        matrix, bias = constant(matrix), constant(bias)
        projected = builder.emit(relax.op.add(builder.emit(relax.op.matmul(x, matrix)), bias))
        read = [projected, *(constant(packed(form, how, r, phase)) for phase in form.phases)]
        if form.after:
            read.append(constant(rest))
        function = builder.add_func(kernel(form, how), op.lower())
        types = [relax.TensorType(shape, FLOAT) for shape in form.outputs]
        return relax.call_tir(function, [*read, *states], types)

    return with_calls(module, replace)


Array = npt.NDArray[np.float32]


def _projection(form: Form, how: Plan, w: Array, b: Array) -> tuple[Array, Array, Array]:
    """The weights [term, direction * gate * column] and biases of the inputs, and the recurrent bias [direction,
    column] of the last gate, which is part of the other biases unless `after`."""
    gates, hidden = form.gates, form.hidden
    wide = np.zeros((form.ways, gates, how.wide, w.shape[2]), np.float32)
    wide[:, :, :hidden] = w.reshape(form.ways, gates, hidden, -1)
    both = b.reshape(form.ways, 2, gates, hidden)
    bias = np.zeros((form.ways, gates, how.wide), np.float32)
    bias[:, :, :hidden] = both[:, 0] + both[:, 1]
    rest = np.zeros((form.ways, how.wide), np.float32)
    if form.after:
        bias[:, -1, :hidden] = both[:, 0, -1]
        rest[:, :hidden] = both[:, 1, -1]
    return np.ascontiguousarray(wide.reshape(-1, w.shape[2]).T), bias.reshape(-1), rest


def packed(form: Form, how: Plan, r: Array, phase: Sequence[int]) -> Array:
    """Panels [direction, panel, term, gate * column] of the recurrent weights of some gates."""
    hidden = form.hidden
    wide = np.zeros((form.ways, len(phase), how.wide, hidden), np.float32)
    wide[:, :, :hidden] = r.reshape(form.ways, form.gates, hidden, hidden)[:, list(phase)]
    split = wide.reshape(form.ways, len(phase), how.panels, how.columns, hidden).transpose(0, 2, 4, 1, 3)
    return np.ascontiguousarray(split.reshape(form.ways, how.panels, hidden, -1))


def kernel(form: Form, how: Plan) -> Any:
    """The PrimFunc with parameters: projected inputs [step, row, direction * gate * column], panels of each phase, the
    last gate's bias (if `after`), the given initial states, and the results."""
    tvm()
    from tvm import tirx
    from tvm.script.ir_builder import IRBuilder
    from tvm.script.ir_builder import tirx as T

    with IRBuilder() as builder:
        with T.prim_func(is_private=True, s_tir=True):
            T.func_attr({SCHEDULED: True, "op_pattern": OPAQUE, "tirx.noalias": True})

            def argument(name: str, shape: Sequence[int]) -> Any:
                return T.arg(name, T.buffer(shape, FLOAT))

            inputs = argument("inputs", (form.steps, form.batch, form.ways * form.gates * how.wide))
            panels = [
                argument(f"r{i}", (form.ways, how.panels, form.hidden, len(phase) * how.columns))
                for i, phase in enumerate(form.phases)
            ]
            bias = argument("bias", (form.ways, how.wide)) if form.after else None
            first = [argument(f"s{i}", form.outputs[1]) if g else None for i, g in enumerate(form.given)]
            results = [argument(f"y{i}", shape) for i, shape in enumerate(form.outputs)]
            blocks = -(-form.batch // how.block)
            count = form.ways * blocks
            loop = T.parallel if count > 1 and form.flops >= WORTH_A_THREAD else T.serial
            with T.sblock("root"), loop(0, count) as task, T.sblock("recurrent"):
                T.reads([])
                T.writes([])
                # The last block begins earlier if it is not whole: what is computed twice is the same.
                row = tirx.Min(task % blocks * how.block, number(form.batch - how.block))
                _Steps(form, how, inputs, panels, bias, (task // blocks, row)).write(first, results)
        return builder.get()


_Place: TypeAlias = tuple[Any, list[Any]]
"""A buffer, and its first indices."""


class _Steps:
    """Writes the loops of a task, some rows in one direction, into the function that is being built.

    Hidden states are those before and after a step, in turns. `_more` are the cell states of an LSTM, and the update
    gates of a GRU; `_reset` are the reset states that its last product reads.
    """

    def __init__(
        self, form: Form, how: Plan, inputs: Any, panels: Sequence[Any], bias: Any | None, task: Any
    ) -> None:
        from tvm.script.ir_builder import tirx as T

        self._form, self._how = form, how
        self._inputs, self._panels, self._bias = inputs, panels, bias
        self._way, self._first = task
        self._states = T.alloc_buffer((2, how.block, how.wide), FLOAT)
        self._more = T.alloc_buffer((how.block, how.wide), FLOAT)
        self._reset = T.alloc_buffer((how.block, how.wide), FLOAT)
        self._sums = T.alloc_buffer((how.block, len(form.phases[0]) * how.columns), FLOAT)
        self._step: Any = None
        self._now: Any = None

    def write(self, first: Sequence[Any | None], results: Sequence[Any]) -> None:
        from tvm import tirx
        from tvm.script.ir_builder import tirx as T

        form, way = self._form, self._way
        self._begin(first)
        with T.serial(0, form.steps) as turn:
            back = number(form.steps - 1) - turn
            self._step = back if form.backward[0] else turn
            if form.ways > 1:
                self._step = tirx.Select(way == 0, turn, back)
            self._now = turn % 2
            for phase in range(len(form.phases)):
                with T.serial(0, self._how.panels) as panel:
                    self._panel(phase, panel)
            self._leave((self._states, [1 - self._now]), results[0], [self._step, way])
        self._leave((self._states, [number(form.steps % 2)]), results[1], [way])
        if form.op == "LSTM":
            self._leave((self._more, []), results[2], [way])

    def _begin(self, first: Sequence[Any | None]) -> None:
        """Set the states before the first step."""
        from tvm.script.ir_builder import tirx as T

        how = self._how
        with T.serial(0, how.block) as row, T.serial(0, how.wide // how.lanes) as vector:
            at = ramp(vector * how.lanes, how.lanes)
            T.buffer_store(self._states, spread(0.0, how.lanes), [number(0), row, at])
            T.buffer_store(self._more, spread(0.0, how.lanes), [row, at])
        for given, (states, index) in zip(first, ((self._states, [number(0)]), (self._more, []))):
            if given is not None:
                self._copy((given, [self._way]), self._first, (states, index), number(0))

    def _leave(self, states: _Place, result: Any, index: list[Any]) -> None:
        self._copy(states, number(0), (result, index), self._first)

    def _copy(self, source: _Place, begin: Any, target: _Place, into: Any) -> None:
        """Copy the columns of all rows, without those that are padded, between the rows from these on."""
        from tvm.script.ir_builder import tirx as T

        def vector(row: Any, start: Any, lanes: int) -> None:
            at = ramp(start, lanes)
            value = source[0][(*source[1], begin + row, at)]
            T.buffer_store(target[0], value, [*target[1], into + row, at])

        with T.serial(0, self._how.block) as row:
            along(self._form.hidden, self._how.lanes, lambda start, lanes: vector(row, start, lanes))

    def _panel(self, phase: int, panel: Any) -> None:
        """The gates of one phase in the columns of a panel, for all rows."""
        from tvm.script.ir_builder import tirx as T

        form, how = self._form, self._how
        gates = form.phases[phase]

        def terms(start: Any, length: int) -> None:
            tiles(how.block, how.rows, lambda first, rows: tile(first, rows, start, length))

        def tile(first: Any, rows: int, start: Any, length: int) -> None:
            def leave(row: Any, column: Any, total: Any) -> None:
                at = [first + row, ramp(column, how.lanes)]
                T.buffer_store(self._sums, self._sums[tuple(at)] + total, at)

            def state(row: Any, term: Any) -> Any:
                if phase == 1:
                    return self._reset[first + row, start + term]
                return self._states[self._now, first + row, start + term]

            product(
                (rows, len(gates) * how.columns, how.lanes), length, state,
                lambda term, n: self._panels[phase][self._way, panel, start + term, n], leave,
            )  # fmt: skip

        def each(body: Callable[[Any, Any], None]) -> None:
            with T.serial(0, how.block) as row, T.serial(0, how.vectors) as vector:
                body(row, vector * how.lanes)

        each(lambda row, column: self._start(gates, panel, row, column))
        tiles(form.hidden, how.chunk(form), terms)
        cell = self._lstm if form.op == "LSTM" else self._gru
        each(
            lambda row, column: cell(phase, row, ramp(panel * how.columns + column, how.lanes), [row, column])
        )

    def _input(self, gate: int, row: Any, at: Any) -> Any:
        """A vector of a gate's projected inputs."""
        first = (self._way * self._form.gates + gate) * self._how.wide
        return self._inputs[self._step, self._first + row, first + at]

    def _start(self, gates: Sequence[int], panel: Any, row: Any, column: Any) -> None:
        """Begin the sums of a vector of columns with what is added to the products."""
        from tvm.script.ir_builder import tirx as T

        at = ramp(panel * self._how.columns + column, self._how.lanes)
        for place, gate in enumerate(gates):
            value = self._input(gate, row, at)
            if (
                self._bias is not None and gate == self._form.gates - 1
            ):  # its inputs are added after the reset
                value = self._bias[self._way, at]
            into = ramp(place * self._how.columns + column, self._how.lanes)
            T.buffer_store(self._sums, value, [row, into])

    def _gate(self, place: int, tile: Sequence[Any], function: Any, value: Any = None) -> Any:
        """A gate's function of its sums, or of another value. The sums get the result: it is computed once."""
        from tvm.script.ir_builder import tirx as T

        at = [tile[0], ramp(tile[1] + place * self._how.columns, self._how.lanes)]
        T.buffer_store(self._sums, function(self._sums[tuple(at)] if value is None else value), at)
        return self._sums[tuple(at)]

    def _lstm(self, phase: int, row: Any, at: Any, tile: Sequence[Any]) -> None:
        """c' = f c + i g and h' = o tanh(c') of a vector."""
        from tvm import tirx
        from tvm.script.ir_builder import tirx as T

        i, o, f = (self._gate(place, tile, tirx.sigmoid) for place in (0, 1, 2))
        g = self._gate(3, tile, tirx.tanh)
        T.buffer_store(self._more, f * self._more[row, at] + i * g, [row, at])
        made = self._gate(3, tile, tirx.tanh, self._more[row, at])
        T.buffer_store(self._states, o * made, [1 - self._now, row, at])

    def _gru(self, phase: int, row: Any, at: Any, tile: Sequence[Any]) -> None:
        """h' = (1 - z) n + z h of a vector; in the first of two phases z, and r h for the product of the second."""
        from tvm import tirx
        from tvm.script.ir_builder import tirx as T

        old = self._states[self._now, row, at]
        if phase == 0:
            z, r = (self._gate(place, tile, tirx.sigmoid) for place in (0, 1))
            if not self._form.after:
                T.buffer_store(self._more, z, [row, at])
                T.buffer_store(self._reset, r * old, [row, at])
                return
            product = self._sums[tile[0], ramp(tile[1] + 2 * self._how.columns, self._how.lanes)]
            n = self._gate(2, tile, tirx.tanh, self._input(2, row, at) + r * product)
        else:
            z, n = self._more[row, at], self._gate(0, tile, tirx.tanh)
        new = (spread(1.0, self._how.lanes) - z) * n + z * old
        T.buffer_store(self._states, new, [1 - self._now, row, at])
