"""A graph as the page draws it: nodes in topological order, edges, and parts that can be folded."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from xrlflow.common.text import printable, shortened
from xrlflow.ir import ABSENT, Attr, Body, Graph, Node, RawAttr, TensorType, Value, digest
from xrlflow.report.page.folding import Interval, fold

LONGEST = 160
"""Names and attributes of more characters are shortened in the middle: a file may hold any."""
INPUT, OUTPUT = "Input", "Output"
NodeKey = tuple[str, Value]
"""A node of a graph or of one of its bodies: the body's path ("If.then_branch/"; "" for the graph), the node's id."""


class Label(Protocol):
    """The name of a node in its file."""

    @property
    def name(self) -> str: ...


@dataclass(frozen=True, slots=True)
class Box:
    """One node, or an input or output of the graph."""

    op: str
    name: str
    type: str  # type of the first output
    attributes: str = ""
    reads: str = ""  # types of the weights that the node reads
    key: NodeKey | None = None  # None for inputs and outputs

    def to_json(self) -> list[str]:
        return [self.op, self.name, self.type, self.attributes, self.reads]


@dataclass(frozen=True, slots=True)
class Part:
    """The boxes from `start` to before `end`, which can be folded."""

    start: int
    end: int
    parent: int  # index of the part around it, or -1
    times: (
        int  # 0: a section or a body; 1: one of several equal layers; more: the number of equal layers in it
    )
    title: str

    def to_json(self) -> list[int | str]:
        return [self.start, self.end, self.parent, self.times, self.title]


@dataclass(frozen=True, slots=True)
class Drawing:
    """A graph with its bodies. Boxes are in topological order; those of a body come before the node that runs it."""

    title: str
    boxes: tuple[Box, ...]
    edges: tuple[tuple[int, int], ...]
    parts: tuple[Part, ...]

    @property
    def indices(self) -> Mapping[NodeKey, int]:
        """The index of each node."""
        return {box.key: index for index, box in enumerate(self.boxes) if box.key is not None}

    def to_json(self) -> dict[str, Any]:
        return {
            "title": self.title,
            "boxes": [box.to_json() for box in self.boxes],
            "edges": [list(edge) for edge in self.edges],
            "parts": [part.to_json() for part in self.parts],
        }


def draw(
    title: str,
    graph: Graph,
    labels: Mapping[Value, Label] | None = None,
    names: Sequence[Sequence[str]] = ((), ()),
) -> Drawing:
    """Draw a graph. `labels`: labels of its nodes; `names`: names of its inputs and outputs in the file."""
    drawer = _Drawer(labels or {})
    intervals, _ = drawer.graph(graph, "", {}, names)
    return Drawing(
        title, tuple(drawer.boxes), tuple(dict.fromkeys(drawer.edges)), tuple(drawer.parts(intervals))
    )


def one_line(text: str) -> str:
    """Text of a file on one line, of a length that a page can show."""
    return shortened(printable(text), LONGEST, 40)


def type_text(type: TensorType) -> str:
    """A type as ONNX writes it: float[1,128]."""
    if type.other is not None:
        return "no tensor"
    name = type.dtype.name.lower()
    return name if type.shape is None else f"{name}[{','.join(map(str, type.shape))}]"


@dataclass(slots=True)
class _Drawer:
    labels: Mapping[Value, Label]
    boxes: list[Box] = field(default_factory=list)
    edges: list[tuple[int, int]] = field(default_factory=list)
    # Titles of intervals (start, end) that are a body of a node, or a node with its bodies.
    bodies: dict[tuple[int, int], str] = field(default_factory=dict)
    # How many equal layers each part is.
    repeats: dict[int, int] = field(default_factory=dict)

    def graph(
        self, graph: Graph, scope: str, outer: Mapping[Value, int], names: Sequence[Sequence[str]] = ((), ())
    ) -> tuple[tuple[Interval, ...], list[int]]:
        """Add a graph's boxes. `outer`: the boxes that compute captured values. Returns its intervals, and the boxes of
        its outputs."""
        outputs: list[int] = []
        box_of: dict[Value, int] = dict(outer)
        spans: list[tuple[int, int, tuple[Interval, ...]]] = []
        kinds: list[int] = []

        def one(kind: str, box: Box) -> int:
            kinds.append(digest(kind))
            spans.append((len(self.boxes), len(self.boxes) + 1, ()))
            self.boxes.append(box)
            return spans[-1][0]

        for index, value in enumerate(graph.inputs):
            if value not in box_of:
                name = _name_of(graph, value, names[0], index)
                box_of[value] = one(INPUT, Box(INPUT, name, type_text(graph.type(value))))
        for node in graph.topological():
            if node.const:
                continue
            begin = len(self.boxes)
            inner = self._bodies(node, scope, box_of)
            at = len(self.boxes)
            self.boxes.append(self._box(graph, node, scope))
            self.edges += [(box_of[v], at) for v in node.explicit_inputs if v in box_of]
            box_of.update(dict.fromkeys(node.outputs, at))
            kinds.append(digest(node.op))
            spans.append((begin, len(self.boxes), inner))
            if inner:
                self.bodies[begin, len(self.boxes)] = node.op
        for index, value in enumerate(graph.outputs):
            name = _name_of(graph, value, names[1], index)
            at = one(OUTPUT, Box(OUTPUT, name, type_text(graph.type(value))))
            if value in box_of:
                self.edges.append((box_of[value], at))
            outputs.append(at)
        return tuple(_box_intervals(fold(kinds), spans, 0, len(spans))), outputs

    def _bodies(self, node: Node, scope: str, box_of: Mapping[Value, int]) -> tuple[Interval, ...]:
        """Add the boxes of a node's bodies. Returns, for each body, the range of the numbers of its boxes."""
        intervals: list[Interval] = []
        outer = iter(node.inputs[len(node.explicit_inputs) :])
        outputs: list[int] = []
        for name, body in node.attrs.items():
            if not isinstance(body, Body):
                continue
            captured = {
                inside: box_of[value] for inside, value in zip(body.captured, outer) if value in box_of
            }
            begin = len(self.boxes)
            inner, results = self.graph(body.graph, f"{scope}{node.op}.{name}/", captured)
            if begin == len(self.boxes):
                continue
            intervals.append(Interval(begin, len(self.boxes), inner))
            self.bodies[begin, len(self.boxes)] = name
            outputs += results
        self.edges += [(output, len(self.boxes)) for output in outputs]
        return tuple(intervals)

    def _box(self, graph: Graph, node: Node, scope: str) -> Box:
        label = self.labels.get(node.id)
        name = label.name if label is not None and label.name else graph.leaves.names.get(node.id, "")
        consts = (graph.type(v) for v in node.explicit_inputs if v != ABSENT and graph.const(v) is not None)
        attributes = [f"{k}={_attribute(v)}" for k, v in node.attrs.items() if not isinstance(v, Body)]
        if node.on_runtime:
            attributes.append("run by ONNX Runtime, not by a generated kernel")
        return Box(
            one_line(node.op), one_line(name), type_text(node.types[0]), shortened(", ".join(attributes), 300),
            shortened(", ".join(map(type_text, consts)), 300), (scope, node.id),
        )  # fmt: skip

    def parts(self, intervals: Sequence[Interval]) -> Iterator[Part]:
        """All parts, outer ones before inner ones."""
        pending = [(interval, -1) for interval in reversed(intervals)]
        number = 0
        while pending:
            interval, parent = pending.pop()
            body = self.bodies.get((interval.start, interval.end))
            layers = parent >= 0 and self.repeats.get(parent, 0) > 1
            times = interval.times if interval.times > 1 else int(layers)
            self.repeats[number] = times
            title = body or self._title(interval, times)
            yield Part(interval.start, interval.end, parent, 0 if body else times, title)
            pending += [(part, number) for part in reversed(interval.parts)]
            number += 1

    def _title(self, interval: Interval, times: int) -> str:
        """The common scope of these nodes' names, if there is one; else the most frequent operators."""
        boxes = [box for box in self.boxes[interval.start : interval.end] if box.op not in (INPUT, OUTPUT)]
        scope = _common_scope([box.name for box in boxes])
        if scope:
            return scope
        ops = Counter(box.op.rpartition("::")[2] for box in boxes[: len(boxes) // max(times, 1)])
        return ", ".join(op if n == 1 else f"{n} {op}" for op, n in ops.most_common(3))


def _name_of(graph: Graph, value: Value, names: Sequence[str], index: int) -> str:
    return one_line(names[index] if index < len(names) else graph.leaves.names.get(value, ""))


def _common_scope(names: Sequence[str]) -> str:
    """The folders that all names share: "/encoder/layer.3"; "" if there are none."""
    split = [name.split("/")[:-1] for name in names]
    common: list[str] = []
    for parts in zip(*split):
        if len(set(parts)) > 1:
            break
        common.append(parts[0])
    return "/".join(common)


def _box_intervals(
    intervals: Sequence[Interval],
    spans: Sequence[tuple[int, int, tuple[Interval, ...]]],
    start: int,
    end: int,
) -> Iterator[Interval]:
    """Convert intervals of a graph's nodes to intervals of boxes, and add those of nodes that have bodies."""
    at = start
    for interval in (*intervals, None):
        until = interval.start if interval is not None else end
        yield from (Interval(*spans[i]) for i in range(at, until) if spans[i][2])
        if interval is not None:
            inner = tuple(_box_intervals(interval.parts, spans, interval.start, interval.end))
            yield Interval(spans[interval.start][0], spans[interval.end - 1][1], inner, interval.times)
            at = interval.end


def _attribute(value: Attr) -> str:
    if isinstance(value, RawAttr):
        return f"{len(value.proto)} bytes"
    if isinstance(value, bytes):
        return one_line(value.decode(errors="replace"))
    if isinstance(value, float):
        return f"{value:g}"
    return one_line(repr(list(value)) if isinstance(value, tuple) else str(value))
