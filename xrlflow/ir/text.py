"""Graphs as text, for people and for tests."""

from __future__ import annotations

from xrlflow.ir.graph import Graph
from xrlflow.ir.types import ABSENT, Value


def text(graph: Graph) -> str:
    """The text has one line per node in topological order, after a line of inputs and before a line of outputs.

    Values are numbered in the order of their appearance.

    (x: float[1,3])
    %0: float[1,3] = Relu(x)
    -> %0
    """
    names: dict[Value, str] = {ABSENT: "_"}
    for value in graph.inputs:
        names[value] = graph.leaves.names.get(value, f"in{len(names)}")
    numbered = 0

    def name(value: Value) -> str:
        nonlocal numbered
        if value not in names:
            const = graph.const(value)
            if const is not None:
                small = const.array is not None and const.array.size <= 8
                names[value] = str(const.numpy().tolist()) if small else f"{const.type}"
            else:
                names[value] = f"%{numbered}"
                numbered += 1
        return names[value]

    lines = ["(" + ", ".join(f"{names[v]}: {graph.type(v)}" for v in graph.inputs) + ")"]
    for node in graph.topological():
        inputs = ", ".join(name(v) for v in node.inputs)
        attrs = f"; {node.attrs!r}" if node.attrs else ""
        outs = ", ".join(f"{name(v)}: {t}" for v, t in zip(node.outputs, node.types))
        lines.append(f"{outs} = {node.op}({inputs}{attrs})")
    lines.append("-> " + ", ".join(name(v) for v in graph.outputs))
    return "\n".join(lines)
