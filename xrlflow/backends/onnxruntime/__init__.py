"""ONNX Runtime as a backend. The runtime is imported on first use."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from xrlflow.backends.limits import default_threads
from xrlflow.backends.onnxruntime.kernels import supports
from xrlflow.backends.onnxruntime.processes import Deciding, measure_in_fresh_processes
from xrlflow.backends.onnxruntime.session import (
    CPU,
    Optimization,
    Options,
    OrtModel,
    check_providers,
    load_library,
    open_model,
    with_library,
)
from xrlflow.backends.onnxruntime.timing import measure, time_model
from xrlflow.backends.protocol import ModelSource

__all__ = [
    "Deciding",
    "OnnxRuntime",
    "Optimization",
    "Options",
    "OrtModel",
    "check_providers",
    "default_threads",
    "load_library",
    "measure",
    "measure_in_fresh_processes",
    "open_model",
    "supports",
    "time_model",
    "with_library",
]


@dataclass(frozen=True, slots=True)
class OnnxRuntime:
    """The `Backend` of ONNX Runtime. Raises BackendError for other providers than the CPU."""

    optimization: Optimization = Optimization.ALL
    providers: Sequence[str] = (CPU,)
    session_options: Options | None = None

    def __post_init__(self) -> None:
        check_providers(self.providers)

    @property
    def name(self) -> str:
        return "onnxruntime"

    @property
    def version(self) -> str:
        import onnxruntime as ort

        return str(ort.__version__)

    def supports(self, op: str, domain: str = "", dtypes: Iterable[str] = ()) -> bool:
        """See `kernels.supports`."""
        return supports(op, domain, dtypes)

    def compile(self, model: ModelSource, *, threads: int | None = None) -> OrtModel:
        """See `open_model`."""
        return open_model(
            model,
            threads=threads,
            optimization=self.optimization,
            providers=self.providers,
            session_options=self.session_options,
        )
