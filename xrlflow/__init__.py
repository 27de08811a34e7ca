"""xrlflow: a superoptimizer for ONNX models.

    result = xrlflow.optimize("model.onnx")
    result.save("fast.onnx")

The functions are loaded when they are first used: importing the package costs nothing.
"""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Any

# ONNX Runtime reads this when it is loaded, and by default it collects what is run with it and sends it away. Processes
# of ours inherit it. Whoever wants it to collect sets the variable to 0.
os.environ["ORT_DISABLE_TELEMETRY"] = os.environ.get("ORT_DISABLE_TELEMETRY") or "1"

if TYPE_CHECKING:
    from xrlflow.api import (
        Batch,
        Comparison,
        Result,
        Tuned,
        compare,
        optimize,
        optimize_all,
        session,
        train,
        tune,
    )

__version__ = "0.1.0"

__all__ = [
    "Batch", "Comparison", "Result", "Tuned", "__version__", "compare", "optimize", "optimize_all", "session", "train",
    "tune",
]  # fmt: skip


def __getattr__(name: str) -> Any:
    if name in __all__:
        from xrlflow import api

        return getattr(api, name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
