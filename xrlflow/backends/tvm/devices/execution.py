"""Where a compiled model runs: the processor of this machine, or a remote device."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from xrlflow.backends import BackendError, RepeatedComparison
from xrlflow.backends.protocol import CompiledModel
from xrlflow.backends.results import Comparison
from xrlflow.backends.tvm import Machine, TvmModel, detect
from xrlflow.backends.tvm.devices.device import Device
from xrlflow.backends.tvm.devices.remote import PATIENCE, Remote
from xrlflow.backends.tvm.toolchain.target import compiler, lacking, linker


@dataclass(frozen=True, slots=True)
class ExecutionTarget:
    """The processor and the remote device (None: this machine) on which a compiled model runs.

    Kernels have as many threads as the processor has cores.
    """

    machine: Machine
    remote: Remote | None = None

    @property
    def device(self) -> str | None:
        """The device's name in stored measurements; None: this machine."""
        return str(self.remote) if self.remote is not None else None

    def check_runs(self) -> None:
        """Raise BackendError if this machine lacks instructions that code for the target uses, and the model is to run
        here."""
        missing = () if self.remote is not None else lacking(self.machine.triple, self.machine.cpu)
        if missing:
            raise BackendError(
                f"code for {self.machine.cpu} cannot run here: this machine has no {', '.join(missing)}; name a remote "
                "device (--remote), or only compile (optimize --no-measure --no-verify)"
            )


def find_target(
    cpu: str | None, triple: str | None, remote: Remote | None, threads: int | None
) -> ExecutionTarget:
    """The target that the options describe. The default processor of a remote device is the processor that the device
    reports.

    Raises BackendError for a processor that LLVM does not know, or whose code the device cannot run, and DeviceError (a
    BackendError) if the device does not answer.
    """
    if remote is None:
        return _linkable(ExecutionTarget(detect(cpu, threads, triple)))
    with Device(remote, threads) as device:
        about = device.about
    if cpu is None and about.system is None:
        raise BackendError(
            f"remote device {remote} does not tell its processor: give LLVM's name of it (--cpu)"
        )
    if about.system is not None:
        triple, cpu = triple or about.system[0], cpu or about.system[1]
    machine = detect(cpu, about.threads, triple)
    missing = lacking(machine.triple, machine.cpu, about.system) if about.system is not None else ()
    if missing:
        raise BackendError(f"remote device {remote} has no {', '.join(missing)}, which code for {cpu} uses")
    return _linkable(ExecutionTarget(machine, remote))


def _linkable(target: ExecutionTarget) -> ExecutionTarget:
    triple = target.machine.triple
    if linker(triple) is None:
        raise BackendError(f"what is compiled for {triple} is linked with {compiler(triple)}: install that")
    return target


@contextlib.contextmanager
def running(target: ExecutionTarget, path: str, model: TvmModel) -> Iterator[CompiledModel]:
    """A compiled model, saved at `path`, ready to run on its target. Raises DeviceError (a BackendError)."""
    if target.remote is None:
        yield model
        return
    with Device(target.remote, target.machine.cores, patience=PATIENCE) as device:
        yield device.load(path, model.interface)


def compare_there(
    target: ExecutionTarget, models: Sequence[tuple[str, TvmModel]], feeds: Mapping[str, Any], limit: float
) -> Comparison:
    """Time the models that are saved at these paths on the remote device, in turns, for up to `limit` seconds. Raises
    DeviceError."""
    assert target.remote is not None
    with Device(target.remote, target.machine.cores, patience=PATIENCE) as device:
        loaded = [device.load(path, model.interface) for path, model in models]
        return device.compare(loaded, dict(feeds), time_limit=limit)


def repeated(measured: Comparison) -> RepeatedComparison:
    """The record for reports that a comparison of two models in one session becomes."""
    assert measured.control is not None
    before, after = measured.latencies
    return RepeatedComparison(
        measured.speedup, measured.control, before, after, measured.seconds, measured.threads,
        pairs=measured.samples, disturbed=measured.load.disturbed, fresh_processes=False,
    )  # fmt: skip
