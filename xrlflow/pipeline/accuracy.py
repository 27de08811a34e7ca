"""The accuracy of products with packed weights that the user asks for (`int4_accuracy`), and what it changes.

A substitution keeps what a model means; this level is part of the meaning. So it is set once, before the search, and
the result is verified against the original at this level. How far it is from the original as it is in the file is
measured, and reported.
"""

from __future__ import annotations

import os
import time
from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Any

import numpy as np

from xrlflow.backends.protocol import OutOfTime
from xrlflow.common import deadline
from xrlflow.ir import Attrs, Body, Graph, Node
from xrlflow.onnxio import ImportedModel, save
from xrlflow.ops.packed import PRODUCT
from xrlflow.pipeline.context import Context
from xrlflow.verify import InputsNeeded, feeds_for_measurement
from xrlflow.verify.runner import Runner, flat, opened

_LEVEL = "accuracy_level"
# The sets of random inputs on which the error is measured. The search and the measurements use others.
_SETS = 3
# The least seconds for measuring the error.
_SECONDS = 5.0


def with_level(context: Context) -> Context:
    """The context of the model at the level that the user asks for; unchanged, with a note, if that changes nothing."""
    level = context.options.int4_accuracy
    if level is None or context.unwritable:
        return context
    imported = at_level(context.imported, level)
    if imported is context.imported:
        context.notes.append(
            f"no product of packed weights is at another level than {level} (--int4-accuracy)"
        )
        return context
    path = os.path.join(context.folder, "at-level.onnx")
    save(imported, imported.graph, path, max_growth=float("inf"), durable=False)
    return replace(context, imported=imported, meant=path)


def at_level(imported: ImportedModel, level: int) -> ImportedModel:
    """The model with all products of packed weights at this accuracy level; itself if they are."""
    graph = _graph_at(imported.graph, level)
    return imported if graph is imported.graph else replace(imported, graph=graph)


def _graph_at(graph: Graph, level: int) -> Graph:
    nodes = list(graph.topological())
    changed = [_node_at(node, level) for node in nodes]
    if all(new is old for new, old in zip(changed, nodes)):
        return graph
    return Graph.make(changed, graph.inputs, graph.outputs, graph.leaves)


def _node_at(node: Node, level: int) -> Node:
    attrs = dict(node.attrs)
    if node.op == PRODUCT:
        attrs[_LEVEL] = level
        same = node.attrs.get(_LEVEL, 0) == level
    else:
        bodies = {name: value for name, value in attrs.items() if isinstance(value, Body)}
        new = {name: replace(body, graph=_graph_at(body.graph, level)) for name, body in bodies.items()}
        same = all(new[name].graph is body.graph for name, body in bodies.items())
        attrs |= new
    return node if same else replace(node, attrs=Attrs(attrs))


def error_of_level(context: Context, graph: Graph) -> str:
    """A note: how far the outputs of a result at another level are from those of the original in its file, as a part
    of each output's range. Inputs are the user's or, without these, new random ones.
    """
    with deadline.within(max(context.clock.limit, time.monotonic() + _SECONDS)):
        try:
            errors = _errors(context, context.artifact(graph).file)
        except (OutOfTime, InputsNeeded) as error:
            return f"the error of accuracy level {context.options.int4_accuracy} is not known: {error}"
    worst = max(errors, key=lambda name: errors[name], default=None)
    if worst is None:
        return "no output of floats shows the error of the accuracy level"
    return (
        f"accuracy level {context.options.int4_accuracy} instead of the file's: output {worst!r} differs from the "
        f"original's by up to {errors[worst]:.2g} of its range"
    )


def _errors(context: Context, path: str) -> dict[str, float]:
    """For each output of floats, the greatest difference to the original as a part of the output's range."""
    options, threads = context.options.session_options, context.threads
    with opened(context.original.runnable, threads=threads, session_options=options) as runner:
        sets = list(_inputs(context, runner))
        first = [runner.run(feeds) for feeds in sets]
    with opened(path, threads=threads, session_options=options) as runner:
        second = [runner.run(feeds) for feeds in sets]
    names = [output.name for output in context.imported.frame.graph.output]
    errors: dict[str, float] = {}
    for before, after in zip(first, second, strict=True):
        for name, old, new in zip(names, before, after, strict=True):
            for (_, a), (_, b) in zip(flat(old), flat(new), strict=True):
                if a.dtype.kind == "f" and a.size:
                    errors[name] = max(errors.get(name, 0.0), _difference(a, b))
    return errors


def _difference(a: np.ndarray[Any, Any], b: np.ndarray[Any, Any]) -> float:
    """The greatest difference of finite numbers, as a part of the range of those of `a`."""
    x, y = a.astype(np.float64), b.astype(np.float64)
    finite = np.isfinite(x) & np.isfinite(y)
    if not finite.any():
        return 0.0
    apart = float(np.abs(x - y)[finite].max())
    return apart / (float(np.ptp(x[finite])) or 1.0)


def _inputs(context: Context, runner: Runner) -> Iterator[Mapping[str, Any]]:
    if context.options.inputs is not None and context.feeds is not None:
        yield context.feeds
        return
    for number in range(_SETS):
        yield feeds_for_measurement(context.imported, context.options.seed + 1 + number, runner.run)
