"""The measured reward: a graph's latency divided by the latency of the original."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from xrlflow.backends import BackendError
from xrlflow.backends.onnxruntime import measure
from xrlflow.ir import Graph
from xrlflow.onnxio import ImportedModel, ModelError, to_proto

# The relative latency of a graph that the runtime cannot run.
UNRUNNABLE = 2.0


class PairedLatency:
    """Measures each graph once, in this process; its runs alternate with runs of the original.

    `original`: the path or bytes of the original model; `feeds`: its inputs; `seconds`: the limit of one measurement.
    The relative latency is UNRUNNABLE if the runtime refuses the graph, or if the graph cannot be written to one file.
    Such a graph is measured again the next time, since memory may have been short.
    """

    def __init__(
        self,
        imported: ImportedModel,
        original: str | bytes,
        feeds: Mapping[str, Any],
        threads: int | None = None,
        seconds: float = 5.0,
    ) -> None:
        self.imported, self.original, self.feeds = imported, original, dict(feeds)
        self.threads, self.seconds = threads, seconds
        self._latencies: dict[int, float] = {}

    def __call__(self, graph: Graph) -> float:
        latency = self._latencies.get(graph.fingerprint)
        if latency is None and (latency := self._measure(graph)) is not None:
            self._latencies[graph.fingerprint] = latency
        return UNRUNNABLE if latency is None else latency

    def _measure(self, graph: Graph) -> float | None:
        try:
            candidate = to_proto(self.imported, graph).SerializeToString()
            measured = measure(
                [self.original, candidate],
                self.feeds,
                threads=self.threads,
                time_limit=self.seconds,
                target_width=0.02,
                control=False,
            )
        except (BackendError, ModelError):
            return None
        return 1.0 / measured.speedup.median
