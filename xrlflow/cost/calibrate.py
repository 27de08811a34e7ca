"""Measures the roofline's figures of this machine with a dozen operators, once, and caches them.

Measuring takes about two seconds, or six on a busy machine. The cache file is named after the processor, the version of
ONNX Runtime and the number of threads.
"""

from __future__ import annotations

import json
import time
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from hashlib import blake2b
from pathlib import Path
from types import MappingProxyType
from typing import Any

import numpy as np

from xrlflow.cost.machine import REFERENCE, Machine, Speed, cache_bytes, cpu_name, vector_lanes
from xrlflow.cost.microbench import Sample, call_seconds, in_quiet, time_node, time_nodes
from xrlflow.ir import Attr, Attrs, DType, Node, TensorType, Value
from xrlflow.ops.work import OpKind, Work, work
from xrlflow.storage import files
from xrlflow.storage.sqlite import cache_directory

VERSION = 2
_TINY = 1e-7


@dataclass(frozen=True, slots=True)
class Probe:
    """One operator to be timed, in float32."""

    op: str
    inputs: tuple[tuple[int, ...], ...]  # their shapes
    output: tuple[int, ...]  # its shape
    attrs: tuple[tuple[str, Attr], ...] = ()
    weights: int = 0  # how many of the last inputs are constant
    kernel_only: bool = False  # time the kernel without the call of the session

    @property
    def in_types(self) -> tuple[TensorType, ...]:
        first_weight = len(self.inputs) - self.weights
        return tuple(TensorType(DType.FLOAT, s, i >= first_weight) for i, s in enumerate(self.inputs))

    @property
    def node(self) -> Node:
        inputs = tuple(Value(i + 1) for i in range(len(self.inputs)))
        outputs = tuple(Value(100 + i) for i in range(1 if self.op != "LSTM" else 3))
        types = (TensorType(DType.FLOAT, self.output),) * len(outputs)
        if self.op == "LSTM":
            state = (self.output[1], self.output[2], self.output[3])
            types = (types[0], TensorType(DType.FLOAT, state), TensorType(DType.FLOAT, state))
        return Node(self.op, inputs, outputs, types, Attrs(dict(self.attrs)))

    @property
    def work(self) -> Work:
        return work(self.node, self.in_types, {})


def _conv(channels: int, groups: int, size: int) -> Probe:
    weight = (channels, channels // groups, 3, 3)
    image = (1, channels, size, size)
    attrs: dict[str, Attr] = {"pads": (1, 1, 1, 1)}
    if groups > 1:
        attrs["group"] = groups
    return Probe("Conv", (image, weight), image, tuple(attrs.items()), 1, kernel_only=True)


_ROWS, _COLUMNS = 512, 1024  # 2 MB: fits into any cache, and keeps all threads busy
_TENSOR = (_ROWS, _COLUMNS)
_HUGE = 1 << 23  # elements: three tensors of 32 MB exceed most caches
_PEAK = Probe("MatMul", ((256, 768), (768, 768)), (256, 768), weights=1)
_CONV = _conv(64, 1, 56)
_DEPTHWISE = _conv(128, 128, 56)
_GROUPED = {2: _conv(128, 64, 28), 4: _conv(128, 32, 28), 8: _conv(128, 16, 28)}
_FULL_GROUPS = _conv(128, 4, 28)
_RECURRENT = Probe(
    "LSTM", ((16, 1, 256), (1, 1024, 256), (1, 1024, 256)), (16, 1, 1, 256), (("hidden_size", 256),), 2
)
_ADD = Probe("Add", (_TENSOR, _TENSOR), _TENSOR)
_STREAM = Probe("Add", ((_HUGE,), (_HUGE,)), (_HUGE,))
_TANH = Probe("Tanh", (_TENSOR,), _TENSOR)
_SMALL_TANH = Probe("Tanh", ((16384,),), (16384,))
_SOFTMAX = Probe("Softmax", (_TENSOR,), _TENSOR)
_POOL = Probe("GlobalAveragePool", ((1, 512, 32, 32),), (1, 512, 1, 1))
_CONCAT = Probe("Concat", (_TENSOR, _TENSOR), (_ROWS, 2 * _COLUMNS), (("axis", 1),))
_TRANSPOSE = Probe("Transpose", (_TENSOR,), (_COLUMNS, _ROWS), (("perm", (1, 0)),))


class _Meter:
    """Times operators. `noisy` counts the figures that were measured on a busy machine."""

    def __init__(self, threads: int, time_limit: float) -> None:
        self._threads, self._time_limit = threads, time_limit
        self._seconds: dict[Probe, float] = {}
        self.noisy = 0
        self.call = self.fastest(lambda: call_seconds(threads))
        """Seconds that one call of the runtime takes."""

    def fastest(self, once: Callable[[], Sample]) -> float:
        """Seconds of one sample that `once` measures; it is repeated while the machine is busy (see `in_quiet`).

        After one noisy figure the calibration will not be stored, so later samples are not repeated.
        """
        if self.noisy:
            return once().low
        sample, quiet = in_quiet(once)
        self.noisy += not quiet
        return sample.low

    def alone(self, probe: Probe) -> float:
        """Seconds of the probe's kernel. It is timed once."""
        if probe not in self._seconds:
            seconds = self.fastest(lambda: self._timed(probe))
            self._seconds[probe] = max(_TINY, seconds - (0.0 if probe.kernel_only else self.call))
        return self._seconds[probe]

    def _timed(self, probe: Probe) -> Sample:
        return time_node(
            probe.node,
            probe.in_types,
            {},
            threads=self._threads,
            time_limit=self._time_limit,
            kernel_only=probe.kernel_only,
        )


@dataclass(frozen=True, slots=True)
class _Rates:
    """How close kernels come to the machine's peak rate and to the bandwidth of its cache."""

    meter: _Meter
    peak: float  # operations per second
    cached: float  # bytes per second

    def compute(self, probe: Probe) -> float:
        """The part of the peak rate that the probe reaches."""
        return _clamp(probe.work.flops / self.meter.alone(probe) / self.peak, 0.005, 1.0)

    def bandwidth(self, probe: Probe) -> float:
        """The part of the cache's bandwidth that the probe reaches."""
        return _clamp(probe.work.bytes / self.meter.alone(probe) / self.cached, 0.02, 1.0)

    def speeds(self) -> dict[OpKind, Speed]:
        vector, reduction = self.compute(_TANH), self.compute(_SOFTMAX)
        return {
            OpKind.GEMM: Speed(self.compute(_PEAK), 1.0),
            OpKind.CONV: Speed(self.compute(_CONV), 1.0),
            OpKind.GROUPED_CONV: Speed(self.compute(_FULL_GROUPS), 1.0),
            OpKind.DEPTHWISE_CONV: Speed(self.compute(_DEPTHWISE), 1.0),
            OpKind.RECURRENT: Speed(self.compute(_RECURRENT), 1.0),
            OpKind.ELEMENTWISE: Speed(vector, 1.0),
            OpKind.REDUCE: Speed(reduction, self.bandwidth(_POOL)),
            OpKind.MOVE: Speed(vector, self.bandwidth(_CONCAT)),
            OpKind.SHUFFLE: Speed(vector, self.bandwidth(_TRANSPOSE)),
            OpKind.VIEW: Speed(1.0, 1.0),
            OpKind.OTHER: REFERENCE.speeds[OpKind.OTHER],
        }

    def grouped(self) -> tuple[tuple[int, float], ...]:
        """The part of the peak rate that grouped convolutions reach, by the number of channels in a group."""
        measured = [(channels, self.compute(probe)) for channels, probe in _GROUPED.items()]
        return ((1, measured[0][1] / 2), *measured)

    def fork(self) -> float:
        """Seconds to distribute work to several threads: the time of a small operator minus the time for its work."""
        small = self.meter.alone(_SMALL_TANH)
        return _clamp(small - _SMALL_TANH.work.flops / (self.peak * self.compute(_TANH)), 0.2e-6, 20e-6)


def calibrate(threads: int, time_limit: float = 0.05) -> tuple[Machine, bool]:
    """The figures of this machine with this number of threads, and whether no other program disturbed the measurements.

    If one did, the parts of the peak rate are those of the reference machine. `time_limit`: seconds for each operator.
    """
    meter = _Meter(threads, time_limit)
    chain = meter.fastest(lambda: _chain(threads))
    rates = _Rates(
        meter,
        peak=max(p.work.flops / meter.alone(p) for p in (_PEAK, _CONV)),
        cached=_ADD.work.bytes / meter.alone(_ADD),
    )
    memory = min(rates.cached, _STREAM.work.bytes / meter.alone(_STREAM))
    fork = rates.fork()
    speeds, grouped = REFERENCE.speeds, REFERENCE.grouped
    if not meter.noisy:
        speeds, grouped = rates.speeds(), rates.grouped()
    if meter.noisy:  # a ratio of a quiet and a disturbed measurement is the least reliable figure
        speeds, grouped = REFERENCE.speeds, REFERENCE.grouped
    machine = Machine(
        name=cpu_name(),
        threads=threads,
        peak=rates.peak,
        cache_bandwidth=rates.cached,
        memory_bandwidth=memory,
        cache=cache_bytes(),
        overhead=_clamp((chain - meter.call) / _LENGTH, 0.05e-6, 20e-6),
        fork=fork if threads > 1 else 0.0,
        speeds=MappingProxyType(speeds),
        grouped=grouped,
        lanes=vector_lanes(),
    )
    return machine, meter.noisy == 0


def calibrated(
    threads: int, directory: Path | None = None, measure: Callable[[int], tuple[Machine, bool]] = calibrate
) -> Machine:
    """The figures of this machine with this number of threads: from the cache file, or measured now and then cached.

    `directory`: the folder of the cache file, by default the user's cache directory. Warns if the file is damaged (and
    replaces it), if it cannot be written, and if the figures are not cached because the machine was busy.
    """
    path = (directory or cache_directory()) / machine_file(cpu_name(), runtime(), threads)
    if path.exists():
        try:
            return from_json(path.read_text())
        except (ValueError, KeyError, TypeError, OSError) as error:
            warnings.warn(f"{path}: calibrating afresh ({error!r})", RuntimeWarning, stacklevel=2)
    machine, quiet = measure(threads)
    if not quiet:
        warnings.warn(
            "others are using this machine's processors: the calibration is rough and not kept",
            RuntimeWarning,
            stacklevel=2,
        )
        return machine
    try:
        _write(path, to_json(machine))
    except OSError as error:
        warnings.warn(f"{path}: the calibration is not kept ({error})", RuntimeWarning, stacklevel=2)
    return machine


def machine_file(cpu: str, runtime: str, threads: int) -> str:
    """The name of the cache file for a processor, a runtime with its version, and a number of threads."""
    key = blake2b(f"{VERSION}\n{cpu}\n{runtime}\n{threads}".encode(), digest_size=8).hexdigest()
    return f"machine-{key}.json"


def runtime() -> str:
    """The name and version of the runtime."""
    import onnxruntime

    return f"onnxruntime {onnxruntime.__version__}"


def to_json(machine: Machine) -> str:
    fields: dict[str, Any] = {name: getattr(machine, name) for name in Machine.__dataclass_fields__}
    fields["speeds"] = {k.value: [v.compute, v.bandwidth] for k, v in machine.speeds.items()}
    return json.dumps({"version": VERSION, "taken": time.time(), "machine": fields}, indent=1)


def from_json(text: str) -> Machine:
    """The inverse of `to_json`. Raises ValueError, KeyError or TypeError for any other text."""
    data = json.loads(text)
    if data["version"] != VERSION:
        raise ValueError(f"version {data['version']}, and {VERSION} is wanted")
    fields = dict(data["machine"])
    fields["speeds"] = MappingProxyType({OpKind(k): Speed(*v) for k, v in fields["speeds"].items()})
    fields["grouped"] = tuple((int(c), float(p)) for c, p in fields["grouped"])
    if set(fields["speeds"]) != set(OpKind):
        raise ValueError("a kind of operator is missing")
    return Machine(**fields)


_LENGTH = 64


def _chain(threads: int) -> Sample:
    """Products and sines of 16 numbers, one after the other: almost nothing but the overhead of calls."""
    vector = TensorType(DType.FLOAT, (1, 16))
    weight, first = Value(1), Value(2)
    nodes = [
        Node("MatMul" if i % 2 else "Sin", (Value(i + 2), weight)[: 1 + i % 2], (Value(i + 3),), (vector,))
        for i in range(_LENGTH)
    ]
    feeds = {first: np.zeros((1, 16), np.float32)}
    return time_nodes(nodes, feeds, {weight: np.full((16, 16), 0.1, np.float32)}, threads=threads)


def _clamp(x: float, low: float, high: float) -> float:
    return min(max(x, low), high)


def _write(path: Path, text: str) -> None:
    """Write a file atomically: other processes read the old text or the new one."""
    path.parent.mkdir(parents=True, exist_ok=True)
    files.write(path, text.encode())
