"""Imports TVM. All other modules get it from here."""

from __future__ import annotations

import os
import sys
import types
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from xrlflow.backends.limits import default_threads
from xrlflow.backends.protocol import BackendError, one_line
from xrlflow.backends.tvm.toolchain import functions, gathers, powers, stack, unaligned

# Tensor intrinsics of other targets. MetaSchedule imports them all, and parsing their scripts takes 25 s in every fresh
# process. Empty modules replace them.
_FOREIGN = ("cuda", "arm_cpu", "hexagon", "metal", "riscv_cpu", "rocm")
# TVM's threads spin while they wait for the next kernel, by default so long (300,000 iterations) that they disturb
# other programs. Kernels of one model are microseconds apart: 200 iterations suffice, while 0 made MobileNetV2 1.5
# times slower.
_SPINS = ("TVM_THREAD_POOL_SPIN_COUNT", "200")
# TVM pins each of its threads to a CPU, but not the calling thread, which then often shares a CPU with one of TVM's
# threads.
_BINDING = ("TVM_BIND_THREADS", "0")
# By default TVM's pool has half as many threads as there are CPUs. This is the upper limit: models may use fewer
# threads.
_THREADS = "TVM_NUM_THREADS"


_loaded: Any = None


def tvm() -> Any:
    """The `tvm` package, with `tvm.relax`, `tvm.s_tir.meta_schedule` and the ONNX importer loaded.

    Raises BackendError if TVM is not installed, or if its version does not work.
    """
    global _loaded  # not functools.cache, which could be cleared: TVM accepts the registrations of `_load` only once
    if _loaded is None:
        _loaded = _load()
    return _loaded


def from_json(text: str) -> Any:
    """The object that `tvm.ir.save_json` of this version wrote. (TVM's own `load_json` first searches the text for
    constructs of older versions, which takes as long as compiling.)"""
    tvm()
    from tvm_ffi.serialization import from_json_graph_str

    return from_json_graph_str(text)


def _load() -> Any:
    for name in _FOREIGN:
        full = f"tvm.s_tir.tensor_intrin.{name}"
        sys.modules.setdefault(full, types.ModuleType(full))
    os.environ.setdefault(*_SPINS)
    os.environ.setdefault(*_BINDING)
    os.environ.setdefault(_THREADS, str(default_threads()))
    try:
        with _without_torch():
            import tvm as package
            import tvm.relax.frontend.onnx
            import tvm.s_tir.meta_schedule
    except ImportError as error:
        raise BackendError(
            f"TVM cannot be loaded ({one_line(error)}): install it with `pip install 'xrlflow[tvm]'`"
        ) from error
    functions.register()
    gathers.register()
    powers.register()
    stack.register()
    unaligned.register()
    return package


@contextmanager
def _without_torch() -> Iterator[None]:
    """Inside the block, an import does not find torch, unless it is loaded already. Afterwards torch can be imported.

    TVM imports torch if it can, to exchange tensors with it, which xrlflow does not do. Torch takes more than half of
    the time to load TVM, and every process that builds or runs kernels loads TVM.
    """
    if "torch" in sys.modules:
        yield
        return
    sys.modules["torch"] = None  # type: ignore[assignment]
    try:
        yield
    finally:
        del sys.modules["torch"]


def last_line(error: BaseException) -> str:
    """The message of a TVM error, which follows a stack trace."""
    lines = [line for line in str(error).strip().splitlines() if line.strip()]
    return one_line(lines[-1] if lines else type(error).__name__)
