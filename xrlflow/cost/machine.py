"""How fast a machine is: the figures of the roofline."""

from __future__ import annotations

import platform
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType

from xrlflow.backends.placement import last_level
from xrlflow.ops.work import OpKind


@dataclass(frozen=True, slots=True)
class Speed:
    """The parts of the machine's peak rate and of its bandwidth that kernels of one kind reach."""

    compute: float
    bandwidth: float


@dataclass(frozen=True, slots=True)
class Machine:
    """A CPU with a runtime. Rates are sums over all `threads`."""

    name: str
    threads: int
    peak: float  # operations per second of a large float32 matrix product
    cache_bandwidth: float  # bytes per second of elementwise kernels on tensors that fit into the cache
    memory_bandwidth: float  # the same on larger tensors
    cache: float  # bytes of the largest cache
    overhead: float  # seconds that the runtime takes to call a kernel
    fork: float  # further seconds to use all threads
    speeds: Mapping[OpKind, Speed]
    grouped: tuple[tuple[int, float], ...]
    """(Channels per group, part of the peak) of grouped convolutions with fewer channels per group than lanes."""
    lanes: int = 16
    """Channels of the blocks in which the runtime convolves, on x86 a vector of float32: channels are padded to it."""

    @staticmethod
    def reference() -> Machine:
        """Fixed figures, so that results can be repeated on any machine. Tests use them.

        Measured in November 2026 with ONNX Runtime 1.31 and two threads on an AMD EPYC of the Zen 4 generation
        (AVX-512).
        """
        return REFERENCE


REFERENCE = Machine(
    name="reference",
    threads=2,
    peak=225e9,
    cache_bandwidth=150e9,
    memory_bandwidth=70e9,
    cache=32e6,
    overhead=0.5e-6,
    fork=2e-6,
    speeds=MappingProxyType(
        {
            OpKind.GEMM: Speed(0.93, 1.0),
            OpKind.CONV: Speed(1.0, 1.0),
            OpKind.GROUPED_CONV: Speed(1.0, 1.0),
            OpKind.DEPTHWISE_CONV: Speed(0.4, 1.0),
            OpKind.RECURRENT: Speed(0.5, 1.0),
            OpKind.ELEMENTWISE: Speed(0.35, 1.0),
            OpKind.REDUCE: Speed(0.35, 0.5),
            OpKind.MOVE: Speed(0.35, 0.9),
            OpKind.SHUFFLE: Speed(0.35, 0.1),
            OpKind.VIEW: Speed(1.0, 1.0),
            OpKind.OTHER: Speed(0.05, 0.5),
        }
    ),
    grouped=((1, 0.04), (2, 0.085), (4, 0.2), (8, 0.36)),
)


def cpu_name() -> str:
    """The processor's model name, as the operating system gives it."""
    fields = _processor()
    if "model name" in fields:
        # Virtual machines shorten the model name: family, model and stepping distinguish generations.
        detail = "/".join(fields.get(k, "?") for k in ("cpu family", "model", "stepping"))
        return f"{fields['model name']} ({detail})"
    return platform.processor() or platform.machine()


def vector_lanes() -> int:
    """The number of channels in a block of ONNX Runtime's convolutions (MLAS): 16, but 8 on x86 if /proc/cpuinfo does
    not list AVX-512."""
    if platform.machine().lower() not in ("x86_64", "amd64"):
        return 16
    return 16 if "avx512f" in _processor().get("flags", "").split() else 8


def _processor() -> dict[str, str]:
    """The fields of the first processor in /proc/cpuinfo; empty if there is no such file."""
    info = Path("/proc/cpuinfo")
    fields: dict[str, str] = {}
    if info.exists():
        for line in info.read_text(errors="replace").splitlines():
            key, _, value = line.partition(":")
            fields.setdefault(key.strip(), value.strip())
    return fields


def cache_bytes() -> float:
    """Bytes of the largest cache of the first core, or 32 MB if the system does not tell."""
    return float(last_level())
