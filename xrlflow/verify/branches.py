"""Which branches of a model its inputs reach: a copy of the model counts how often each branch is taken.

The copy counts the executions of each side of every If, and those of every Loop with no, one and several iterations,
also in nested bodies. A counter inside a branch becomes a further output of the If, which is 0 in the other branch; a
counter inside a loop becomes a further state of the Loop.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import count
from typing import Any

import numpy as np
import onnx
import onnx.numpy_helper
from google.protobuf.message import DecodeError  # type: ignore[import-untyped]
from onnx import helper, inliner

from xrlflow.backends.onnxruntime.session import Options
from xrlflow.backends.protocol import BackendError
from xrlflow.ir import Body, Graph, Value
from xrlflow.onnxio import ImportedModel
from xrlflow.onnxio.branches import FOR_EMPTY
from xrlflow.onnxio.protos import live_nodes, subgraphs
from xrlflow.verify.runner import Model, Runner, first_line, opened

# Models with more data than this are not instrumented.
_LARGEST = 1 << 30
_INT64 = onnx.TensorProto.INT64
GUARD = re.compile(r"If xrlflow\.[0-9a-f]{32}\.(?P<region>\w+)\.guard.*, (?P<taken>then|else)")
"""A branch of an If that compares sizes of dimensions (`regions.with_guard`), as `str(Arm)` names it."""


@dataclass(frozen=True, slots=True)
class Arm:
    """One outcome of a node of control flow: ("If", "choose", "else"), ("Loop", "l", "no steps")."""

    op: str
    node: str
    outcome: str

    def __str__(self) -> str:
        return f"{self.op} {self.node}, {self.outcome}"


@dataclass(slots=True)
class Watch:
    """An instrumented model. `reached`: the arms that its runs have taken so far."""

    arms: tuple[Arm, ...]
    runner: Runner | None  # None: there is nothing to watch
    reached: set[Arm] = field(default_factory=set)

    @property
    def missing(self) -> list[Arm]:
        return [arm for arm in self.arms if arm not in self.reached]

    def run(self, feeds: Mapping[str, Any], limit: float | None = None) -> bool:
        """Run the model. Returns whether an arm is reached for the first time; False if the run fails."""
        if self.runner is None:
            return False
        try:
            counts = self.runner.run(feeds, limit)
        except BackendError:
            return False  # the original fails on these inputs as well: they reveal no difference
        reached = {arm for arm, taken in zip(self.arms, counts) if int(taken) > 0} - self.reached
        self.reached |= reached
        return bool(reached)


def has_branches(model: ImportedModel) -> bool:
    """Whether a model has an If or a Loop, in bodies too. Branches for sizes of 0 that the exporter wrote do not count:
    no input drawn here reaches them, and models are run at such sizes anyway.
    """
    graph = model.graph
    labels = (model.labels.get(node.id) for node in graph.nodes() if node.op == "If")
    ours = sum(label is not None and label.name.startswith(FOR_EMPTY) for label in labels)
    return _branches(graph) > ours


def _branches(graph: Graph) -> int:
    bodies = (a.graph for node in graph.nodes() for a in node.attrs.values() if isinstance(a, Body))
    return sum(node.op in ("If", "Loop") for node in graph.nodes()) + sum(map(_branches, bodies))


def deciding(graph: Graph) -> frozenset[float]:
    """Numbers from which the conditions of Ifs and Loops are computed, bodies included."""
    numbers: set[float] = set()
    for node in graph.nodes():
        if node.op in ("If", "Loop"):
            numbers |= _constants(graph, node.inputs[:1] if node.op == "If" else node.inputs[:2])
        for attr in node.attrs.values():
            if isinstance(attr, Body):
                numbers |= deciding(attr.graph)
                if node.op == "Loop":
                    numbers |= _constants(attr.graph, attr.graph.outputs[:1])
    return frozenset(numbers)


def _constants(graph: Graph, values: tuple[Value, ...]) -> set[float]:
    """The numbers in the small constants from which these values are computed."""
    numbers: set[float] = set()
    visited: set[Value] = set()
    work = [v for v in values if v]
    while work:
        value = work.pop()
        if value in visited:
            continue
        visited.add(value)
        const = graph.const(value)
        if const is not None:
            array = const.array
            if array is not None and array.size <= 8 and array.dtype.kind in "iuf":
                numbers.update(float(n) for n in array.reshape(-1) if np.isfinite(n))
        node = graph.producers.get(value)
        if node is not None:
            work.extend(v for v in node.inputs if v)
    return numbers


@contextmanager
def watched(
    model: Model, *, threads: int | None = None, session_options: Options | None = None
) -> Iterator[Watch]:
    """The instrumented model, in a session that is closed at the end of the block. Raises BackendError."""
    proto, arms = instrumented(_read(model))
    if not arms:
        yield Watch((), None)
        return
    with opened(proto, threads=threads, session_options=session_options) as runner:
        yield Watch(arms, runner)


def _read(model: Model) -> onnx.ModelProto:
    """A copy of the model with its data. Raises BackendError if it is too large or cannot be read."""
    try:
        if isinstance(model, onnx.ModelProto):
            proto = onnx.ModelProto()
            proto.CopyFrom(model)
        elif isinstance(model, bytes):
            proto = onnx.load_model_from_string(model)
        else:
            proto = onnx.load_model(model)
        if proto.ByteSize() > _LARGEST:
            raise BackendError("the model is too large to be copied")
        if any(n.op_type in ("If", "Loop", "Scan") for f in proto.functions for n in f.node):
            proto = inliner.inline_local_functions(proto)
    except (OSError, ValueError, RuntimeError, DecodeError) as error:
        raise BackendError(first_line(error)) from error
    return proto


def instrumented(proto: onnx.ModelProto) -> tuple[onnx.ModelProto, tuple[Arm, ...]]:
    """Replace the model's outputs, in place, by counters. Returns the model, and the arm that each output counts."""
    writer = _Writer()
    counters = writer.graph(proto.graph)
    del proto.graph.output[:]
    proto.graph.output.extend(_info(name) for _, name in counters)
    live = live_nodes(proto.graph)
    nodes = [onnx.NodeProto.FromString(node.SerializeToString()) for node in live]
    del proto.graph.node[:]
    proto.graph.node.extend(nodes)
    return proto, tuple(arm for arm, _ in counters)


_Counter = tuple[Arm, str]
"""An arm, and the name of the scalar that counts how often the model took it."""


def _info(name: str) -> onnx.ValueInfoProto:
    return helper.make_tensor_value_info(name, _INT64, [])


@dataclass(slots=True)
class _Writer:
    """Adds counters to graphs, under unused names."""

    numbers: Iterator[int] = field(default_factory=count)

    def name(self) -> str:
        return f"xrlflow.watch.{next(self.numbers)}"

    def graph(self, graph: onnx.GraphProto) -> list[_Counter]:
        """Add the counters of a graph and its bodies. Returns them as values of this graph."""
        counters: list[_Counter] = []
        nodes: list[onnx.NodeProto] = []
        for node in graph.node:
            nodes.append(node)
            if node.op_type == "If" and node.domain in ("", "ai.onnx"):
                counters.extend(self._if(node, nodes))
            elif node.op_type == "Loop" and node.domain in ("", "ai.onnx"):
                counters.extend(self._loop(node, nodes))
            elif node.op_type == "Scan" and node.domain in ("", "ai.onnx"):
                counters.extend(self._scan(node, nodes))
        copies = [onnx.NodeProto.FromString(node.SerializeToString()) for node in nodes]
        del graph.node[:]
        graph.node.extend(copies)
        return counters

    def _number(self, nodes: list[onnx.NodeProto], value: int) -> str:
        name = self.name()
        tensor = onnx.numpy_helper.from_array(np.asarray(value, np.int64))
        nodes.append(helper.make_node("Constant", [], [name], value=tensor))
        return name

    def _node(self, nodes: list[onnx.NodeProto], op: str, *inputs: str, **attrs: Any) -> str:
        name = self.name()
        nodes.append(helper.make_node(op, list(inputs), [name], **attrs))
        return name

    def _flag(self, nodes: list[onnx.NodeProto], value: str) -> str:
        """Add nodes that turn a boolean of one element into a scalar 0 or 1. Returns its name."""
        number = self._node(nodes, "Cast", value, to=_INT64)
        empty = self.name()
        shape = onnx.numpy_helper.from_array(np.zeros(0, np.int64))
        nodes.append(helper.make_node("Constant", [], [empty], value=shape))
        return self._node(nodes, "Reshape", number, empty)

    def _if(self, node: onnx.NodeProto, nodes: list[onnx.NodeProto]) -> Iterator[_Counter]:
        shown = node.name or node.output[0]
        if shown.startswith(FOR_EMPTY):
            return
        flag = self._flag(nodes, node.input[0])
        yield Arm("If", shown, "then"), flag
        yield Arm("If", shown, "else"), self._node(nodes, "Sub", self._number(nodes, 1), flag)
        sides = {a.name: a.g for a in node.attribute if a.name in ("then_branch", "else_branch")}
        for side, other in (("then_branch", "else_branch"), ("else_branch", "then_branch")):
            for arm, inner in self.graph(sides[side]):
                added: list[onnx.NodeProto] = []
                none = self._number(added, 0)
                sides[other].node.extend(added)
                sides[side].output.append(_info(inner))
                sides[other].output.append(_info(none))
                node.output.append(self.name())
                yield arm, node.output[-1]

    def _loop(self, node: onnx.NodeProto, nodes: list[onnx.NodeProto]) -> Iterator[_Counter]:
        shown = node.name or next((o for o in node.output if o), "")
        body = next(subgraphs(node))
        node.input.extend([""] * (2 - len(node.input)))
        inner = self.graph(body)
        added: list[onnx.NodeProto] = []
        steps = [(Arm("Loop", shown, ""), self._number(added, 1)), *inner]
        states = len(body.input) - 2
        before = nodes.pop()  # the loop node: the nodes that compute its states go before it
        totals = []
        for arm, value in steps:
            total, state = self._state(nodes, added, body, value, 1 + states)
            node.input.append(total[0])
            node_outputs = list(node.output)
            node_outputs.insert(states, total[1])
            del node.output[:]
            node.output.extend(node_outputs)
            body.input.append(_info(state))
            states += 1
            totals.append((arm, total[1]))
        body.node.extend(added)
        nodes.append(before)
        (_, steps_taken), *counters = totals
        one = self._number(nodes, 1)
        for outcome, op in (("no steps", "Less"), ("one step", "Equal"), ("several steps", "Greater")):
            yield Arm("Loop", shown, outcome), self._flag(nodes, self._node(nodes, op, steps_taken, one))
        yield from counters

    def _scan(self, node: onnx.NodeProto, nodes: list[onnx.NodeProto]) -> Iterator[_Counter]:
        body = next(subgraphs(node))
        added: list[onnx.NodeProto] = []
        before = nodes.pop()
        for arm, value in self.graph(body):
            total, state = self._state(nodes, added, body, value, 0)
            for names, new in ((node.input, total[0]), (node.output, total[1])):
                extended = [new, *names]
                del names[:]
                names.extend(extended)
            inputs = [_info(state), *body.input]
            kept_inputs = [onnx.ValueInfoProto.FromString(i.SerializeToString()) for i in inputs]
            del body.input[:]
            body.input.extend(kept_inputs)
            yield arm, total[1]
        body.node.extend(added)
        nodes.append(before)

    def _state(
        self,
        nodes: list[onnx.NodeProto],
        added: list[onnx.NodeProto],
        body: onnx.GraphProto,
        value: str,
        at: int,
    ) -> tuple[tuple[str, str], str]:
        """Add a state that sums `value` over the iterations. Returns the names of its initial and final values outside
        the body, and of its value inside.

        The new output of the body is inserted at position `at`.
        """
        start, end, state = self._number(nodes, 0), self.name(), self.name()
        total = self._node(added, "Add", state, value)
        outputs = [onnx.ValueInfoProto.FromString(o.SerializeToString()) for o in body.output]
        outputs.insert(at, _info(total))
        del body.output[:]
        body.output.extend(outputs)
        return (start, end), state
