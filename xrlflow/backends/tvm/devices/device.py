"""A model on a remote device: loaded, run and timed on the device.

A separate process talks to the device, because TVM's client may wait for ever. If the device is gone or hangs, that
process is killed, and an error of one line is raised. The process has one session for all models, since a device serves
one client at a time.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any

from xrlflow.backends.interleave import interleave
from xrlflow.backends.protocol import Array, BackendError, Feeds
from xrlflow.backends.results import Comparison
from xrlflow.backends.system_load import Reading
from xrlflow.backends.tvm.devices.remote import (
    PATIENCE,
    DeviceError,
    Remote,
    connect,
    use_threads,
    what_happened,
)
from xrlflow.backends.tvm.lowering.compiled import Interface, arguments_of
from xrlflow.backends.tvm.toolchain.import_tvm import tvm
from xrlflow.workers import Processes, WorkerError, WorkerLate, WorkerLost

if TYPE_CHECKING:
    from typing_extensions import Self

ANSWER_SECONDS = 60.0
"""Seconds that a device may take to load or run a model, including the network, before it counts as gone."""
_START_SECONDS = 120.0  # for loading TVM on this machine


@dataclass(frozen=True, slots=True)
class _Open:
    """A request to open the session. `threads`: the number of threads of kernels; None: as many threads as the device's
    server has."""

    remote: Remote
    threads: int | None
    patience: float


@dataclass(frozen=True, slots=True)
class _Load:
    """A request to upload the library at `path` and to load it."""

    path: str


@dataclass(frozen=True, slots=True)
class _Feed:
    """A request to set the inputs of a model. `model`: the model's number in the order of loading."""

    model: int
    arrays: tuple[Array, ...]


@dataclass(frozen=True, slots=True)
class _Call:
    """A request to run a model on its inputs, and to return the outputs."""

    model: int


@dataclass(frozen=True, slots=True)
class _Time:
    """A request to run a model on its inputs, and to return the seconds of one run on the device."""

    model: int


@dataclass(frozen=True, slots=True)
class About:
    """A description of a device: its number of threads for kernels, and LLVM's names of its system and processor (None
    if its server has no LLVM)."""

    threads: int
    system: tuple[str, str] | None


@dataclass(frozen=True, slots=True)
class _Trouble:
    """The reply to a request that failed. `text`: the reason, on one line. `device`: whether the device is the
    cause."""

    text: str
    device: bool


class Device:
    """A session with a remote device. Use it in a `with` statement, or close it.

    The constructor and all methods raise DeviceError if the tracker or the device does not answer.
    """

    def __init__(self, remote: Remote, threads: int | None = None, *, patience: float = 0.0) -> None:
        """`patience`: seconds to wait for a device that the tracker does not list yet."""
        self.remote = remote
        try:
            self._worker = Processes().worker(_Session, "its process")
        except WorkerError as error:
            raise DeviceError(str(error)) from error
        try:
            self.about: About = self._ask(
                _Open(remote, threads, patience), _START_SECONDS + PATIENCE + patience
            )
        except BaseException:
            self.close()
            raise

    def load(self, path: str | os.PathLike[str], interface: Interface) -> RemoteModel:
        """Upload a library that `TvmModel.save` wrote, and load it on the device. Raises DeviceError."""
        return RemoteModel(self, self._ask(_Load(os.fspath(path))), interface)

    def compare(self, models: Sequence[RemoteModel], feeds: Feeds, *, time_limit: float) -> Comparison:
        """Time models on the device, in turns (see `interleave`). Seconds are measured by the device's clock.

        The load by other programs on the device cannot be known, and counts as none. Raises DeviceError.
        """
        spent = 0.0

        def timed(model: RemoteModel) -> Callable[[], None]:
            model.feed(feeds)

            def run() -> None:
                nonlocal spent
                spent += self._ask(_Time(model.number))

            return run

        runs = [timed(model) for model in models]
        return interleave(
            runs, threads=self.about.threads, time_limit=time_limit, target_width=0.02, clock=lambda: spent,
            watch=time.perf_counter, read_load=lambda: Reading(0.0, 0.0, 0.0, time.perf_counter()),
        )  # fmt: skip

    def close(self) -> None:
        """End the session: the socket closes, and the device ends its side. A second call does nothing."""
        self._worker.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _ask(self, message: object, seconds: float | None = None) -> Any:
        seconds = ANSWER_SECONDS if seconds is None else seconds
        try:
            self._worker.begin(message)
            reply = self._worker.reply(time.monotonic() + seconds)
        except WorkerLate:
            raise DeviceError(f"remote device {self.remote} has not answered for {seconds:g} s") from None
        except WorkerLost as lost:
            what = f"died: its process ended {lost.how}" if lost.how else "is closed"
            raise DeviceError(f"the session with remote device {self.remote} {what}") from lost
        if isinstance(reply, _Trouble):
            raise DeviceError(reply.text) if reply.device else BackendError(reply.text)
        return reply


class RemoteModel:
    """A compiled model on a device. See `CompiledModel`."""

    def __init__(self, device: Device, number: int, interface: Interface) -> None:
        self._device = device
        self.number = number
        self.interface = interface

    @property
    def output_names(self) -> tuple[str, ...]:
        return self.interface.outputs

    def feed(self, feeds: Feeds) -> None:
        """Set the inputs. Raises BackendError for arrays of other shapes or types than the model's inputs."""
        self._device._ask(_Feed(self.number, tuple(arguments_of(self.interface, feeds))))

    def run(self, feeds: Feeds) -> Sequence[Any]:
        """The outputs, in the order of `output_names`. Raises BackendError."""
        self.feed(feeds)
        return self.interface.results(self._device._ask(_Call(self.number)))

    def close(self) -> None:
        """Do nothing: the session owns the model."""


class _Session:
    """The handler in the process that talks to the device for `Device`."""

    def __init__(self) -> None:
        self.remote: Remote | None = None
        self._session: Any = None
        self._models: list[Any] = []

    def do(self, task: object) -> object:
        try:
            return self._handle(task)
        except DeviceError as error:
            return _Trouble(str(error), device=True)
        except BackendError as error:
            return _Trouble(str(error), device=False)
        except Exception as error:  # whatever TVM's client raises about a connection or a model
            return _Trouble(what_happened(error, self.remote), device=True)

    def _handle(self, message: object) -> object:
        match message:
            case _Open(remote, threads, patience):
                return self._open(remote, threads, patience)
            case _Load(path):
                return self._load(path)
            case _Feed(model, arrays):
                device = self._session.cpu(0)
                tensors = [tvm().runtime.tensor(array, device) for array in arrays]
                self._models[model].set_input("main", *tensors)
                return None
            case _Call(model):
                self._models[model].invoke_stateful("main")
                outputs = self._models[model].get_outputs("main")
                return [v.numpy() for v in (outputs if isinstance(outputs, (tuple, list)) else (outputs,))]
            case _Time(model):
                timer = self._models[model].time_evaluator(
                    "invoke_stateful", self._session.cpu(0), number=1, repeat=1
                )
                return max(float(timer("main").mean), 1e-9)
        raise AssertionError(f"unexpected request {message!r}")

    def _open(self, remote: Remote, threads: int | None, patience: float) -> About:
        self.remote = remote
        self._session = connect(remote, patience=patience)
        return About(use_threads(self._session, remote, threads), _system(self._session))

    def _load(self, path: str) -> int:
        from tvm import relax

        name = f"{len(self._models)}{Path(path).suffix}"
        self._session.upload(path, name)
        library = self._session.load_module(name)
        self._models.append(relax.VirtualMachine(library, self._session.cpu(0)))
        return len(self._models) - 1


def _system(session: Any) -> tuple[str, str] | None:
    names = ("target.llvm_get_system_triple", "target.llvm_get_system_cpu")
    try:
        triple, cpu = (str(session.get_function(name)()) for name in names)
    except (AttributeError, RuntimeError):  # the server has TVM's runtime only, without LLVM
        return None
    return triple, cpu
