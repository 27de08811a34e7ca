"""The measured cost model, which runs models."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import numpy.typing as npt

from xrlflow.backends.interleave import time_alone
from xrlflow.backends.onnxruntime.session import Options, open_model
from xrlflow.cost.model import Provenance
from xrlflow.ir import Edit, Graph, apply_edit


class Measured:
    """The median latency of the exported graph in ONNX Runtime. Each graph is measured once.

    Differences below the noise of a measurement (about 2%) mean nothing. Decisions need measurements that run both
    models alternately (`xrlflow.backends`).
    """

    provenance: Provenance = "measured"

    def __init__(
        self,
        export: Callable[[Graph], bytes],
        feeds: Mapping[str, npt.NDArray[Any]],
        *,
        threads: int,
        time_limit: float = 1.0,
        session_options: Options | None = None,
    ) -> None:
        """`export` writes a graph as a model; `feeds` has an array for each of its inputs.

        `time_limit`: seconds for each graph.
        """
        self.export = export
        self.feeds = feeds
        self.threads = threads
        self.time_limit = time_limit
        self.session_options = session_options
        self._seconds: dict[int, float] = {}

    @property
    def name(self) -> str:
        return "measured"

    def cost(self, graph: Graph) -> float:
        """Seconds of one run. Raises BackendError if ONNX Runtime refuses the model."""
        seconds = self._seconds.get(graph.fingerprint)
        if seconds is None:
            model = self.export(graph)
            with open_model(model, threads=self.threads, session_options=self.session_options) as opened:
                latency = time_alone(opened.caller(self.feeds), time_limit=self.time_limit)
            seconds = self._seconds[graph.fingerprint] = latency.seconds
        return seconds

    def delta(self, graph: Graph, edit: Edit) -> float:
        """Seconds of the successor minus those of the graph. Measures each of the two that was not measured yet."""
        return self.cost(apply_edit(graph, edit)[0]) - self.cost(graph)
