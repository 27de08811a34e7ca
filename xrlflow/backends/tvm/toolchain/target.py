"""The processor that kernels are compiled for."""

from __future__ import annotations

import functools
import shutil
from dataclasses import dataclass, replace
from typing import Any, TypeAlias

from xrlflow.backends.limits import default_threads
from xrlflow.backends.placement import cache_levels
from xrlflow.backends.protocol import BackendError
from xrlflow.backends.tvm.toolchain.import_tvm import tvm

# LLVM's names of features, each with the floats in a vector register and the number of registers.
_VECTORS = (("avx512f", 16, 32), ("avx2", 8, 16), ("avx", 8, 16), ("neon", 4, 32), ("sse2", 4, 16))
# Processors that multiply and add full vectors half by half (Agner Fog, "The microarchitecture of Intel, AMD and VIA
# CPUs"), so that a half vector takes half the time. On all other processors a half vector takes as long as a full
# vector.
_IN_HALVES = frozenset({"znver4", "cannonlake", "icelake-client", "tigerlake", "rocketlake", "znver1"})
# The prefixes of the names of those LLVM features that are instructions which a compiler uses by itself: for x86, then
# for ARM. Most other features only guide tuning, or are used only if a program requests them (AES, random numbers).
_INSTRUCTIONS = (
    *("sse", "ssse", "avx", "fma", "f16c", "bmi", "lzcnt", "popcnt", "crc32", "movbe", "xop", "tbm", "gfni", "vaes"),
    *("vpcl", "amx", "egpr", "ndd", "ccmp", "nf", "ppx", "push2pop2", "zu"),
    *("neon", "sve", "sme", "dotprod", "fullfp16", "fp-armv8", "bf16", "i8mm", "fp16fml", "lse", "rdm", "rcpc", "crc"),
    *("complxnum", "cssc", "faminmax", "flagm", "altnzcv", "fptoint", "hbc", "jsconv", "mops", "sha3"),
)  # fmt: skip

# The first part of a system's name, and LLVM's name of the architecture.
_ARCHITECTURES = {
    **{name: name for name in ("x86_64", "aarch64", "riscv64")},
    "i686": "i386",
    "arm64": "aarch64",
    "armv7l": "arm",
    "armv7a": "arm",
}


@dataclass(frozen=True, slots=True)
class Machine:
    """The properties of a processor on which schedules depend: LLVM's names of the system and the processor, the number
    of cores, the number of floats in a vector, the number of vector registers, and the bytes of a core's second-level
    cache. `in_halves`: vectors are computed half by half."""

    triple: str
    cpu: str
    cores: int
    lanes: int
    registers: int
    second_level: int = 512 << 10
    in_halves: bool = False

    def keeps(self, rows: int, vectors: int) -> bool:
        """Whether LLVM keeps a tile of `rows` x `vectors` sums in registers, together with a row of vectors and a
        broadcast number.

        With AVX2's 16 vector registers, LLVM spills some sums if fewer than four registers remain free. More than 8
        rows have more addresses than the general registers hold (measured: such kernels take two to four times as
        long).
        """
        few = self.registers <= 16
        return rows * vectors <= self.registers - max(4, vectors + 1) and not (few and rows > 8)

    def target(self) -> Any:
        """The target as an object of TVM."""
        options = {"kind": "llvm", "mtriple": self.triple, "mcpu": self.cpu, "num-cores": self.cores}
        return tvm().target.Target(options)


@functools.cache
def detect(cpu: str | None = None, cores: int | None = None, triple: str | None = None) -> Machine:
    """This machine, or another processor by LLVM's name (`cpu`), with `cores` cores (default: the number of physical
    cores).

    `triple`: LLVM's name of another system (`aarch64-linux-gnu`), for which `cpu` must be given. For this machine's
    processor, the size of the second-level cache is read from the system; for other processors a usual size is assumed.
    Raises BackendError if LLVM does not know the system or the processor.
    """
    ours, own = _here()
    if cpu is None and triple is not None:
        raise BackendError(f"a processor is needed for {triple}: give LLVM's name of it (--cpu)")
    system, name = triple or ours, cpu or own
    features = _features(system, name)
    lanes, registers = next(((n, r) for feature, n, r in _VECTORS if feature in features), (4, 16))
    machine = Machine(
        system, name, cores or default_threads(), lanes, registers, in_halves=name in _IN_HALVES
    )
    if (system, name) != (ours, own):
        return machine
    return replace(machine, second_level=cache_levels().get(2, machine.second_level))


System: TypeAlias = tuple[str, str]
"""LLVM's names of a system (a triple) and of a processor."""


@functools.cache
def lacking(triple: str, cpu: str, there: System | None = None) -> tuple[str, ...]:
    """What another machine (default: this one) lacks to run code for a processor: the system, or instructions.

    Raises BackendError if LLVM does not know one of the processors.
    """
    system, name = there or _here()
    if (triple, cpu) == (system, name):
        return ()
    used = _features(triple, cpu)
    if _loader(triple) != _loader(system):
        return (triple,)
    offered = _features(system, name) if there is not None else _features_here()
    return tuple(sorted(f for f in used - offered if f.startswith(_INSTRUCTIONS)))


def instructions(triple: str, cpu: str) -> tuple[str, ...]:
    """The instructions, by LLVM's names, that code for a processor may contain, and that another processor of the same
    architecture may lack. Instructions of AMX and SME are left out, since LLVM generates none of them by itself."""
    names = (f for f in _features(triple, cpu) if f.startswith(_INSTRUCTIONS))
    return tuple(sorted(f for f in names if not f.startswith(("amx", "sme"))))


def _features_here() -> frozenset[str]:
    """The features that the processor reports. A virtual machine may hide some features."""
    features = tvm().get_global_func("tvm.codegen.llvm.GetHostCPUFeatures")()
    return frozenset(str(name) for name, present in features.items() if present)


def compiler(triple: str) -> str:
    """The usual name of the C compiler that links for a system."""
    return "cc" if _loader(triple) == _loader(_here()[0]) else f"{triple}-gcc"


def linker(triple: str) -> str | None:
    """The path of the C compiler that links for a system, if there is one."""
    native = compiler(triple) == "cc"
    return next(filter(None, map(shutil.which, ("cc", "gcc") if native else (compiler(triple),))), None)


@functools.cache
def _here() -> System:
    """LLVM's names of this system and processor."""
    call = tvm().get_global_func
    return str(call("target.llvm_get_system_triple")()), str(call("target.llvm_get_system_cpu")())


def _loader(triple: str) -> tuple[str, bool]:
    """The parts of a system's name that decide whether libraries can be loaded: the architecture, and whether it is
    Linux."""
    return triple.partition("-")[0], "linux" in triple


def _features(triple: str, cpu: str) -> frozenset[str]:
    package = tvm()
    call = package.get_global_func
    arch = triple.partition("-")[0]
    # LLVM crashes if a system is requested for which it was not built.
    if "-" not in triple or _ARCHITECTURES.get(arch) not in {
        str(n) for n in call("target.llvm_get_targets")()
    }:
        known = ", ".join(_ARCHITECTURES)
        raise BackendError(
            f"the system {triple!r} is not known: name it as aarch64-linux-gnu, with one of {known}"
        )
    kind = package.target.Target({"kind": "llvm", "mtriple": triple})
    if cpu not in {str(name) for name in call("target.llvm_get_cpu_archlist")(kind)}:
        raise BackendError(f"LLVM does not know the processor {cpu!r} (of {triple})")
    target = package.target.Target({"kind": "llvm", "mtriple": triple, "mcpu": cpu})
    return frozenset(str(name) for name in call("target.llvm_get_cpu_features")(target))
