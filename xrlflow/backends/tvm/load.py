"""The one way in which TVM is imported."""

from __future__ import annotations

import functools
import sys
import types
from typing import Any

from xrlflow.backends.protocol import BackendError, one_line
from xrlflow.backends.tvm import functions

# Tensor intrinsics of targets that are not ours: MetaSchedule imports them all, and parsing their scripts takes 25 s in
# every fresh process. An empty module in their place takes nothing.
_FOREIGN = ("cuda", "arm_cpu", "hexagon", "metal", "riscv_cpu", "rocm")


@functools.cache
def tvm() -> Any:
    """The `tvm` package, with `tvm.relax`, `tvm.s_tir.meta_schedule` and the ONNX importer loaded.

    Raises BackendError when TVM is not installed, or not in a version that works.
    """
    for name in _FOREIGN:
        full = f"tvm.s_tir.tensor_intrin.{name}"
        sys.modules.setdefault(full, types.ModuleType(full))
    try:
        import tvm as package
        import tvm.relax.frontend.onnx
        import tvm.s_tir.meta_schedule
    except ImportError as error:
        raise BackendError(
            f"TVM cannot be loaded ({one_line(error)}): install it with `pip install xrlflow[tvm]`"
        ) from error
    functions.register()
    return package
