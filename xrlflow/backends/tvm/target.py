"""The processor that kernels are compiled for."""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import Any

from xrlflow.backends.placement import default_threads
from xrlflow.backends.protocol import BackendError

# LLVM's names of features, and the floats in a vector register and the registers that come with them.
_VECTORS = (("avx512f", 16, 32), ("avx2", 8, 16), ("avx", 8, 16), ("neon", 4, 32), ("sse2", 4, 16))


@dataclass(frozen=True, slots=True)
class Machine:
    """What schedules depend on: LLVM's name of the processor, cores, floats in a vector, registers, bytes of caches."""

    triple: str
    cpu: str
    cores: int
    lanes: int
    registers: int
    first_level: int = 32 << 10
    second_level: int = 512 << 10

    def target(self) -> Any:
        """TVM's target."""
        from xrlflow.backends.tvm.load import tvm

        options = {"kind": "llvm", "mtriple": self.triple, "mcpu": self.cpu, "num-cores": self.cores}
        return tvm().target.Target(options)


@functools.cache
def detect(cpu: str | None = None, cores: int | None = None) -> Machine:
    """This machine, or another processor by LLVM's name (`cpu`), with so many cores (default: the physical ones).

    Raises BackendError when LLVM does not know the processor.
    """
    from xrlflow.backends.tvm.load import tvm

    package = tvm()
    call = package.get_global_func
    triple = str(call("target.llvm_get_system_triple")())
    cpu = cpu or str(call("target.llvm_get_system_cpu")())
    features = _features(package, triple, cpu)
    lanes, registers = next(((n, r) for name, n, r in _VECTORS if name in features), (4, 16))
    return Machine(triple, cpu, cores or default_threads(), lanes, registers)


def _features(package: Any, triple: str, cpu: str) -> frozenset[str]:
    call = package.get_global_func
    known = call("target.llvm_get_cpu_archlist")(package.target.Target({"kind": "llvm", "mtriple": triple}))
    if cpu not in {str(name) for name in known}:
        raise BackendError(f"LLVM does not know the processor {cpu!r} (of {triple})")
    target = package.target.Target({"kind": "llvm", "mtriple": triple, "mcpu": cpu})
    return frozenset(str(name) for name in call("target.llvm_get_cpu_features")(target))
