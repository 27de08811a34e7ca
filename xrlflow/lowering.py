"""Compiling what a search found with TVM: which graph, how fast, and whether it is still the same function."""

from __future__ import annotations

import functools
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from xrlflow.backends import BackendError
from xrlflow.backends.onnxruntime import measure
from xrlflow.backends.tvm import Tvm, TvmModel, detect
from xrlflow.ir import Graph
from xrlflow.search.result import Found

Export = Callable[[Graph], str]
"""A graph as an ONNX file: its path."""
# Proposals beside the original graph that are compiled, if the time allows.
_AT_MOST = 3


@dataclass(frozen=True, slots=True)
class Lowered:
    """One graph compiled: the shared library's path, and its milliseconds if it was measured."""

    found: Found
    path: str
    model: TvmModel
    milliseconds: float | None = None


@functools.cache
def runs(op: str) -> bool:
    """Whether TVM has an operator, given as the IR names it (those of other domains as `domain::name`)."""
    domain, _, name = op.rpartition("::")
    return _backend(None, {}).supports(name, domain)


def check_supported(graph: Graph) -> None:
    """Raise BackendError, naming them, for operators that TVM cannot lower."""
    missing = sorted(op for op in {node.op for node in graph.nodes()} if not runs(op))
    if missing:
        raise BackendError(f"TVM cannot lower {', '.join(missing)}: use --backend onnxruntime for this model")


def _backend(threads: int | None, shapes: Mapping[str, Sequence[int]]) -> Tvm:
    return Tvm(detect(cores=threads), shapes or None)


def lower_best(
    original: str | bytes,
    base: Found,
    proposals: Sequence[Found],
    export: Export,
    feeds: Mapping[str, Any] | None,
    *,
    threads: int,
    shapes: Mapping[str, Sequence[int]],
    folder: str,
    time_left: Callable[[], float],
    session_options: Any = None,
) -> tuple[Lowered, tuple[str, ...]]:
    """Compile the graph as imported and the best proposals, and choose what runs fastest; (choice, remarks).

    With `feeds` all are measured in turns, together with the original in ONNX Runtime; without, the best by modelled
    cost is compiled alone. Compiling more ends when a further one would not fit into the time left. Raises BackendError
    if the original's graph cannot be compiled.
    """
    backend = _backend(threads, shapes)
    cheaper = [found for found in proposals if found.cost < base.cost][:_AT_MOST]
    wanted = [base, *cheaper] if feeds is not None else [cheaper[0] if cheaper else base]
    made: list[Lowered] = []
    longest = 0.0
    for index, found in enumerate(wanted):
        before = time_left()
        if made and before < 3 * longest:
            break
        model = backend.compile(export(found.state.graph), threads=threads)
        path = os.path.join(folder, f"compiled{index}.so")
        model.save(path)
        made.append(Lowered(found, path, model))
        longest = max(longest, before - time_left())
    if feeds is None:
        return made[0], ()
    measured = measure(
        [original, *(lowered.path for lowered in made)], dict(feeds), threads=threads,
        time_limit=max(2.0, min(15.0, 0.3 * time_left())), target_width=0.02, control=False,
        session_options=session_options,
    )  # fmt: skip
    timed = [
        Lowered(lowered.found, lowered.path, lowered.model, latency.median_ms)
        for lowered, latency in zip(made, measured.latencies[1:])
    ]
    best = min(timed, key=lambda lowered: lowered.milliseconds or 0.0)
    remarks = [f"ONNX Runtime runs the original in {measured.latencies[0].median_ms:.2f} ms"]
    remarks.append(f"TVM runs the original graph in {timed[0].milliseconds:.2f} ms")
    if len(timed) > 1:
        others = ", ".join(f"{lowered.milliseconds:.2f}" for lowered in timed[1:])
        remarks.append(f"and what the search found in {others} ms")
    return best, tuple(remarks)
