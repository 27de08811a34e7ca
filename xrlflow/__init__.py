"""xrlflow: a superoptimizer for ONNX models.

    result = xrlflow.optimize("model.onnx")
    result.save("fast.onnx")

The functions, the options and the errors are loaded when they are first used: importing the package costs nothing. The
errors that a caller can correct are `UserError`, a tuple to catch: their messages are one line, which says what to do.
"""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Any

# ONNX Runtime reads this when it is loaded, and by default it collects what is run with it and sends it away. Processes
# of ours inherit it. Whoever wants it to collect sets the variable to 0.
os.environ["ORT_DISABLE_TELEMETRY"] = os.environ.get("ORT_DISABLE_TELEMETRY") or "1"

if TYPE_CHECKING:
    from xrlflow.api import (
        BackendError,
        Batch,
        Comparison,
        ModelError,
        OptionError,
        Options,
        Result,
        StoreError,
        TraceError,
        Tuned,
        UserError,
        VerificationError,
        VerificationFailed,
        compare,
        optimize,
        optimize_all,
        session,
        train,
        tune,
    )

__version__ = "0.1.0"

__all__ = [
    "BackendError",
    "Batch",
    "Comparison",
    "ModelError",
    "OptionError",
    "Options",
    "Result",
    "StoreError",
    "TraceError",
    "Tuned",
    "UserError",
    "VerificationError",
    "VerificationFailed",
    "__version__",
    "compare",
    "optimize",
    "optimize_all",
    "session",
    "train",
    "tune",
]


def __getattr__(name: str) -> Any:
    if name in __all__:
        from xrlflow import api

        return getattr(api, name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
