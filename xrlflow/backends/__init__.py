"""Compile, run and time models on hardware. A model is a path or serialized bytes: nothing here knows the graph IR."""

from xrlflow.backends.protocol import Array, Backend, BackendError, CompiledModel, Feeds, ModelSource
from xrlflow.backends.results import Comparison, Latency, Load, RepeatedComparison, SpeedUp

__all__ = [
    "Array",
    "Backend",
    "BackendError",
    "Comparison",
    "CompiledModel",
    "Feeds",
    "Latency",
    "Load",
    "ModelSource",
    "RepeatedComparison",
    "SpeedUp",
]
