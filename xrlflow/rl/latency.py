"""The measured reward: how long a graph takes, as a part of what the original takes, end to end."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from xrlflow.backends import BackendError
from xrlflow.backends.onnxruntime import measure
from xrlflow.ir import Graph
from xrlflow.onnxio import ImportedModel, ModelError, to_proto

# What a graph counts that the runtime cannot run, in latencies of the original.
UNRUNNABLE = 2.0


class PairedLatency:
    """Measures graphs against the original, in turns, in this process. A graph is measured once.

    `original` is the file as the runtime takes it, `feeds` its inputs, `seconds` the most that one measurement takes.
    A graph that the runtime refuses, or that does not fit into one file, counts UNRUNNABLE.
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
        self._known: dict[int, float] = {}

    def __call__(self, graph: Graph) -> float:
        found = self._known.get(graph.fingerprint)
        if found is None:
            found = self._known[graph.fingerprint] = self._measure(graph)
        return found

    def _measure(self, graph: Graph) -> float:
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
            return UNRUNNABLE
        return 1.0 / measured.speedup.median
