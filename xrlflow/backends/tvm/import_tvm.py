"""The one way in which TVM is imported."""

from __future__ import annotations

import functools
import os
import sys
import types
from typing import Any

from xrlflow.backends.placement import default_threads
from xrlflow.backends.protocol import BackendError, one_line
from xrlflow.backends.tvm import functions, stack

# Tensor intrinsics of targets that are not ours: MetaSchedule imports them all, and parsing their scripts takes 25 s in
# every fresh process. An empty module in their place takes nothing.
_FOREIGN = ("cuda", "arm_cpu", "hexagon", "metal", "riscv_cpu", "rocm")
# TVM's threads wait for the next kernel awake, by default so long (300,000 turns) that they disturb whoever runs next.
# Between the kernels of one model it is microseconds: 200 turns are enough, while none cost MobileNetV2 half again.
_SPINS = ("TVM_THREAD_POOL_SPIN_COUNT", "200")
# TVM ties each of its threads to a CPU but not the caller's, which then often shares one with another of them.
_BINDING = ("TVM_BIND_THREADS", "0")
# Its pool has as many threads as it thinks that there are cores, by default half of the CPUs: models use fewer if told.
_THREADS = "TVM_NUM_THREADS"


@functools.cache
def tvm() -> Any:
    """The `tvm` package, with `tvm.relax`, `tvm.s_tir.meta_schedule` and the ONNX importer loaded.

    Raises BackendError when TVM is not installed, or not in a version that works.
    """
    for name in _FOREIGN:
        full = f"tvm.s_tir.tensor_intrin.{name}"
        sys.modules.setdefault(full, types.ModuleType(full))
    os.environ.setdefault(*_SPINS)
    os.environ.setdefault(*_BINDING)
    os.environ.setdefault(_THREADS, str(default_threads()))
    try:
        import tvm as package
        import tvm.relax.frontend.onnx
        import tvm.s_tir.meta_schedule
    except ImportError as error:
        raise BackendError(
            f"TVM cannot be loaded ({one_line(error)}): install it with `pip install 'xrlflow[tvm]'`"
        ) from error
    functions.register()
    stack.register()
    return package


def last_line(error: BaseException) -> str:
    """What an error of TVM's says: it puts a stack trace of its own before the message."""
    lines = [line for line in str(error).strip().splitlines() if line.strip()]
    return one_line(lines[-1] if lines else type(error).__name__)
