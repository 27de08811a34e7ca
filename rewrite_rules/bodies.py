"""Helpers for control-flow bodies. They take loops apart, build them again, and map values between a body and the graph
around it.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from rewrite_rules.axes import front
from xrlflow.ir import (
    ABSENT,
    Attr,
    Attrs,
    Body,
    Graph,
    Node,
    TensorType,
    Value,
    apply_edit,
    digest,
    mix,
    plan_edit,
)
from xrlflow.ops.schema import is_deterministic
from xrlflow.rewrite import GraphBuilder, Op, Reader, Region, Val
from xrlflow.rewrite.propagate import propagated

# A loop's parts


@dataclass(frozen=True, slots=True)
class State:
    """A value that a loop carries from step to step: `before` at the start of a step and `after` at its end."""

    initial: Val
    before: Value
    after: Value
    type: TensorType


@dataclass(frozen=True, slots=True)
class Scanned:
    """A sequence over which a Scan iterates, and the element that a step sees."""

    sequence: Val
    element: Value
    axis: int
    backwards: int


@dataclass(frozen=True, slots=True)
class Collected:
    """An output that each step computes; the loop concatenates these results."""

    value: Value
    axis: int
    backwards: int
    type: TensorType


@dataclass(slots=True)
class Parts:
    """The parts of a loop. `captured` has pairs: a value outside, and the name by which the body reads it.

    `graph` is the loop's body, or an edited version with the same outputs in the same order.
    """

    graph: Graph
    states: list[State]
    scans: list[Scanned]
    captured: list[tuple[Val, Value]]
    collected: list[Collected]

    def outputs(self, loop: Loop) -> list[Value]:
        """The outputs of the body."""
        now = dict(zip(loop.graph.outputs, self.graph.outputs))  # an edit may have merged outputs
        listed = [*loop.condition, *(s.after for s in self.states), *(c.value for c in self.collected)]
        return [now.get(v, v) for v in listed]


@dataclass(frozen=True, slots=True)
class Loop:
    """A Loop or Scan, with properties that describe its body."""

    node: Node
    body: Body
    explicit: tuple[Value, ...]
    scans: int

    @property
    def graph(self) -> Graph:
        return self.body.graph

    @property
    def lead(self) -> int:
        """The number of first inputs that are no states: a Loop has trip count and condition, its body iteration and
        condition.
        """
        return 2 if self.node.op == "Loop" else 0

    @property
    def states(self) -> int:
        return len(self.explicit) - self.lead - self.scans

    @property
    def condition(self) -> tuple[Value, ...]:
        """The output of a Loop's body that decides whether the loop continues."""
        return self.graph.outputs[: self.lead // 2]

    @property
    def before(self) -> tuple[Value, ...]:
        return self.graph.inputs[self.lead : self.lead + self.states]

    @property
    def after(self) -> tuple[Value, ...]:
        start = len(self.condition)
        return self.graph.outputs[start : start + self.states]

    @property
    def elements(self) -> tuple[Value, ...]:
        start = self.lead + self.states
        return self.graph.inputs[start : start + self.scans]

    @property
    def collected(self) -> tuple[Value, ...]:
        return self.graph.outputs[len(self.condition) + self.states :]

    @property
    def scan_axes(self) -> tuple[tuple[int, int], ...]:
        """The axis and the direction of each sequence of a Scan."""
        return self._axes("scan_input", self.scans)

    @property
    def collected_axes(self) -> tuple[tuple[int, int], ...]:
        return self._axes("scan_output", len(self.collected))

    def _axes(self, name: str, count: int) -> tuple[tuple[int, int], ...]:
        axes, directions = (
            self.node.attrs.get(f"{name}_{what}", (0,) * count) for what in ("axes", "directions")
        )
        assert isinstance(axes, tuple)
        assert isinstance(directions, tuple)
        return tuple(zip(axes, directions))  # type: ignore[arg-type]

    def region(self, data: Any = None) -> Region:
        captured = self.node.inputs[len(self.node.explicit_inputs) :]
        return Region(self.node.outputs, (*self.explicit, *captured), (self.node,), data)

    def is_constant(self, value: Value) -> bool:
        """Whether a value in the body is constant."""
        return value not in self.graph.inputs and self.graph.type(value).const

    def parts(self, inputs: Sequence[Val | None]) -> Parts:
        """The loop's parts, from the values that a region's target gets as inputs."""
        types = self.node.types
        vals = [v for v in inputs[self.lead :] if v is not None]
        initial, sequences = vals[: self.states], vals[self.states : self.states + self.scans]
        states = [State(*s) for s in zip(initial, self.before, self.after, types)]
        scans = [Scanned(v, e, *a) for v, e, a in zip(sequences, self.elements, self.scan_axes)]
        captured = list(zip(vals[self.states + self.scans :], self.body.captured))
        listed = zip(self.collected, self.collected_axes, types[self.states :])
        return Parts(self.graph, states, scans, captured, [Collected(v, *a, t) for v, a, t in listed])

    def starts_true(self, reader: Reader) -> bool:
        """Whether a Loop's initial condition is true or left out."""
        condition = self.explicit[1]
        if condition == ABSENT:
            return True
        return known_condition(reader.graph, condition) is True

    def steps(self, reader: Reader) -> int | None:
        """A Loop's trip count; None if it is not known."""
        const = reader.graph.const(self.explicit[0]) if self.explicit[0] != ABSENT else None
        if const is None or const.array is None or const.array.size != 1:
            return None
        return int(const.array.item())

    def has_a_step(self, reader: Reader) -> bool:
        """Whether a loop is known to run its body at least once."""
        if self.node.op == "Scan":
            shape = reader.type(self.explicit[self.states]).shape
            dim = None if shape is None else shape[front(self.scan_axes[0][0], len(shape))]
            return isinstance(dim, int) and dim > 0
        steps = self.steps(reader)
        return self.starts_true(reader) and (self.explicit[0] == ABSENT or (steps is not None and steps > 0))


def known_condition(graph: Graph, condition: Value) -> bool | None:
    """The value of a condition, if it is a constant; else None."""
    const = graph.const(condition)
    return None if const is None or const.array is None or const.array.size != 1 else bool(const.array.item())


def take_apart(node: Node) -> Loop | None:
    """The parts of a Loop or Scan as a `Loop`; None for other nodes, and if an input or output is missing."""
    body = node.attrs.get("body")
    if not isinstance(body, Body):
        return None
    explicit = node.explicit_inputs
    scans = 0
    if node.op == "Loop":
        explicit = (*explicit, *(ABSENT,) * (2 - len(explicit)))
    else:
        count = node.attrs["num_scan_inputs"]
        assert isinstance(count, int)
        scans = count
    loop = Loop(node, body, explicit, scans)
    if ABSENT in explicit[loop.lead :]:
        return None
    return loop if loop.states + len(loop.collected) == len(node.outputs) else None


def taken_apart(region: Region) -> Loop:
    """The loop of a region that `Loop.region` has built."""
    loop = take_apart(region.nodes[0])
    assert loop is not None
    return loop


def put_together(op: Op, loop: Loop, parts: Parts, inputs: Sequence[Val | None]) -> list[Val]:
    """Build a loop from these parts. Returns its final states and collected outputs.

    Sequences and captured values that no step reads any more are left out.
    """
    graph = parts.graph
    outputs = parts.outputs(loop)
    scans = parts.scans
    if loop.scans:
        read_values = {v for n in needed(graph, outputs) for v in n.inputs} | set(outputs)
        scans = [s for s in scans if s.element in read_values] or scans[
            :1
        ]  # at least one must stay to give the number of steps
    lead = list(inputs[: loop.lead])
    formals = (
        *loop.graph.inputs[: loop.lead],
        *(s.before for s in parts.states),
        *(s.element for s in scans),
    )
    body, captured = with_captured(graph, formals, outputs, parts.captured, loop.body.name)
    declared = [*(s.type for s in parts.states), *(c.type for c in parts.collected)]
    if not declared:
        return []
    attrs: dict[str, Attr] = {"body": body}
    if not loop.lead:
        attrs["num_scan_inputs"] = len(scans)
        listed = {
            "scan_input_axes": tuple(s.axis for s in scans),
            "scan_input_directions": tuple(s.backwards for s in scans),
            "scan_output_axes": tuple(c.axis for c in parts.collected),
            "scan_output_directions": tuple(c.backwards for c in parts.collected),
        }
        attrs.update({k: v for k, v in listed.items() if any(v)})
    explicit = [*lead, *(s.initial for s in parts.states), *(s.sequence for s in scans)]
    results = op[loop.node.op](
        *with_condition(op, explicit, captured), *captured, attrs=Attrs(attrs), declared=declared
    )
    return [results] if len(declared) == 1 else list(results)


def with_condition(op: Op, explicit: Sequence[Val | None], captured: Sequence[Val]) -> list[Val | None]:
    """The inputs of a node. If a Loop's condition is left out, it stays between other inputs, but is removed at the
    end.
    """
    inputs = list(explicit)
    if inputs and inputs[-1] is None and not captured:
        inputs[-1] = op.Identity(np.array(True))
    return inputs


def needed(graph: Graph, outputs: Sequence[Value]) -> list[Node]:
    """The nodes of a graph on which these values depend."""
    nodes: dict[Value, Node] = {}
    work = list(outputs)
    while work:
        node = graph.producers.get(work.pop())
        if node is not None and node.id not in nodes:
            nodes[node.id] = node
            work.extend(node.inputs)
    return list(nodes.values())


def with_captured(
    graph: Graph,
    formals: Sequence[Value],
    outputs: Sequence[Value],
    captured: Sequence[tuple[Val, Value]],
    name: str,
) -> tuple[Body, list[Val]]:
    """A body without unused nodes, and the values that it captures. Constants from outside become constants of the
    body.
    """
    inputs = (*formals, *(inside for _, inside in captured))
    graph = Graph.make(needed(graph, outputs), inputs, tuple(outputs), graph.leaves)
    for val, inside in captured:
        if val.const and val.value > 0 and inside in (*graph.uses, *graph.outputs):
            graph = _bound(graph, val, inside)
    nodes = needed(graph, graph.outputs)
    read_values = {v for n in nodes for v in n.inputs} | set(graph.outputs)
    remaining = {inside: val for val, inside in captured if inside in read_values}
    body = Graph.make(nodes, (*formals, *remaining), graph.outputs, graph.leaves)
    return Body(body, tuple(remaining), name), list(remaining.values())


def _bound(graph: Graph, val: Val, inside: Value) -> Graph:
    """The body with one of its inputs replaced by a constant of the graph around it."""
    outer = val.graph
    nodes = needed(outer, [val.value])
    for value in (val.value, *(v for n in nodes for v in n.inputs)):
        if value in outer.leaves.consts and value not in outer.producers:
            _share(outer, graph, value)
    added = [n for n in nodes if n.id not in graph.producers]
    return apply_edit(graph, propagated(graph, plan_edit(graph, "bind", added, {inside: val.value})))[0]


def _share(source: Graph, target: Graph, value: Value) -> None:
    """Add a constant of one graph to another."""
    target.leaves.add_const(value, source.leaves.consts[value])
    name = source.leaves.names.get(value)
    if name is not None:
        target.leaves.names.setdefault(value, name)


# Values inside and outside of a body


class Outside:
    """Maps values of a body to values of the graph around it. The map begins with the pairs in `known` and grows as
    needed.

    `sizes_only`: copied types lose the body's symbols, whose numbers may differ from step to step.
    """

    def __init__(
        self, op: Op, graph: Graph, around: Graph, known: Mapping[Value, Val], *, sizes_only: bool = False
    ) -> None:
        self.op = op
        self.graph = graph
        self.around = around
        self.values = dict(known)
        self.sizes_only = sizes_only

    def __call__(self, value: Value) -> Val:
        """The value outside. The node or constant that computes it is copied to the outside, unless it already was."""
        val = self.values.get(value)
        if val is not None:
            return val
        node = self.graph.producers.get(value)
        if node is not None:
            self.copy(node)
        else:
            _share(self.graph, self.around, value)
            self.values[value] = Val(self.around, value, self.around.leaves.types[value])
        return self.values[value]

    def copy(self, node: Node) -> None:
        """Copy a node of the body to the outside."""
        inputs = [None if v == ABSENT else self(v) for v in node.inputs]
        types = [_sizes(t) for t in node.types] if self.sizes_only else node.types
        results = self.op[node.op](*inputs, attrs=node.attrs, declared=types)
        self.values.update(zip(node.outputs, results if len(node.outputs) > 1 else (results,)))


def _sizes(type: TensorType) -> TensorType:
    if type.shape is None:
        return type
    dims = tuple(d if isinstance(d, int) else None for d in type.shape)
    return TensorType(type.dtype, dims, type.const, type.other)


def around(inputs: Sequence[Val | None]) -> Graph:
    """The graph that contains the match with these inputs."""
    return next(v.graph for v in inputs if v is not None)


def bodies(node: Node) -> Iterator[tuple[str, Body]]:
    """A node's bodies, in the order in which the node lists their captured values."""
    for name, value in node.attrs.items():
        if isinstance(value, Body):
            yield name, value


def repeats(graph: Graph) -> bool:
    """Whether two runs of a graph give the same result."""
    for node in graph.nodes():
        inner = [body.graph for _, body in bodies(node)]
        if not all(map(repeats, inner)) or not (inner or is_deterministic(node.op)):
            return False
    return True


def through_identity(graph: Graph, value: Value) -> Value:
    """The value from which any chain of Identity nodes copies this value."""
    while (node := graph.producers.get(value)) is not None and node.op == "Identity":
        value = node.inputs[0]
    return value


def without_nodes(graph: Graph, nodes: Sequence[Node]) -> Graph:
    """A graph without these nodes. Their results become values from outside, with the same names."""
    removed = {n.id for n in nodes}
    for node in nodes:
        for value, type in zip(node.outputs, node.types):
            graph.leaves.types.setdefault(value, type)
    return Graph.make(
        [n for n in graph.nodes() if n.id not in removed], graph.inputs, graph.outputs, graph.leaves
    )


def outside_name(value: Value) -> Value:
    """The name that a body has for the value computed outside instead of `value`."""
    return mix(digest("made outside"), value)


def made_outside(graph: Graph, value: Value, type: TensorType) -> Val:
    """The value that is computed outside instead of `value`, as the body sees it."""
    name = outside_name(value)
    graph.leaves.types[name] = type.as_const(False)
    return Val(graph, name, graph.leaves.types[name])


def put_in_place(op: GraphBuilder, value: Value, replacement: Any) -> Graph:
    """The builder's graph, with `value` replaced by `replacement`."""
    return apply_edit(op.graph, op.edit("hoist", [value], [replacement]))[0]
