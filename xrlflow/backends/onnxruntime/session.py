"""ONNX Runtime sessions, opened with the same options for verification, measurements and profiles.

Spinning. After an operator, the worker threads of a session spin, by default for a millisecond or more, so that the
next operator starts without waking them. Threads spin in a user's process, too, so a measurement without spinning would
not be representative. But the threads of one session go on spinning while the other model of the comparison runs.
Milliseconds on 2 cores (Zen 4, AVX-512), alone and in turns with another session of the same model:

    model                        default        no spinning     spinning, stopped after the run
    48 MatMul+Relu 64x256       2.1 / 4.1        2.7 / 2.7        2.1 / 2.2
    24 MatMul+Relu 128x768     17.3 / 91.6      17.6 / 17.7      17.3 / 17.4
    20 Conv+Relu 64x28x28       5.2 / 11.5       5.8 / 5.8        5.4 / 5.4

Without spinning, models of many small operators are a quarter slower, and another model may become the fastest; with
spinning, another session can make a model five times slower. `session.force_spinning_stop` (spin during a run, stop
when it returns) avoids both, so every session gets it unless the user's own options set it. It costs 5 to 20
microseconds per run to wake the workers.
"""

from __future__ import annotations

import atexit
import enum
import math
import os
import re
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from threading import Thread, Timer
from types import TracebackType
from typing import TYPE_CHECKING, Any, TypeAlias

from xrlflow.backends.limits import default_threads, most_threads
from xrlflow.backends.onnxruntime.reasons import reason
from xrlflow.backends.protocol import (
    Array,
    BackendError,
    Feeds,
    ModelSource,
    NotFromPython,
    OutOfTime,
    same_feeds,
)
from xrlflow.common import deadline

if TYPE_CHECKING:
    import onnxruntime as ort
    from typing_extensions import Self

CPU = "CPUExecutionProvider"
# Element types that NumPy does not have.
_LACKING = re.compile(r"bfloat16|float8\w+|float4\w+|u?int[24](?!\d)")
QUIET = 4
"""A log severity with which only fatal errors are written. Other errors are raised as exceptions, and would be reported
twice."""
DEFAULT_ENTRIES: Mapping[str, str] = {"session.force_spinning_stop": "1"}
AFFINITIES = "session.intra_op_thread_affinities"
"""The key of a session option: a CPU for each worker thread, with CPUs counted from 1, separated by semicolons."""
CUSTOM_OPERATORS = "custom_ops_library"
"""A key of session options that xrlflow adds: shared libraries of custom operators, separated like PATH."""

Options: TypeAlias = "Mapping[str, str] | ort.SessionOptions"
"""A user's session options: configuration entries as a mapping, or a SessionOptions object."""


class Optimization(enum.Enum):
    """How much ONNX Runtime itself rewrites the graph when it loads a model."""

    NONE = "ORT_DISABLE_ALL"
    BASIC = "ORT_ENABLE_BASIC"
    EXTENDED = "ORT_ENABLE_EXTENDED"
    LAYOUT = "ORT_ENABLE_LAYOUT"
    ALL = "ORT_ENABLE_ALL"


class OrtModel:
    """A model loaded in an ONNX Runtime session."""

    def __init__(self, session: ort.InferenceSession, threads: int, weights: Sequence[Any] = ()) -> None:
        self._session: ort.InferenceSession | None = session
        self._weights = weights  # which it reads
        self._errors = ort_errors()
        self.threads = threads
        self.input_names: tuple[str, ...] = tuple(value.name for value in session.get_inputs())
        self._output_names: tuple[str, ...] = tuple(value.name for value in session.get_outputs())

    @property
    def output_names(self) -> tuple[str, ...]:
        return self._output_names

    @property
    def session(self) -> ort.InferenceSession:
        """The session itself. Raises BackendError if the model has been closed."""
        if self._session is None:
            raise BackendError("this model has been closed")
        return self._session

    def run(self, feeds: Feeds) -> Sequence[Any]:
        """The outputs, in the order of `output_names`. Raises BackendError if ONNX Runtime refuses or fails, and
        OutOfTime if the run was ended, between two operators, when the time of `deadline` was over."""
        import onnxruntime as ort

        options = ort.RunOptions()
        try:
            with ending(deadline.until(), lambda: setattr(options, "terminate", True)):
                outputs: Sequence[Any] = self.session.run(list(self._output_names), dict(feeds), options)
        except self._errors as error:
            if options.terminate:
                raise OutOfTime("ONNX Runtime was ended: the time for a run was over") from error
            self.check_types()
            raise BackendError(f"ONNX Runtime cannot run the model: {reason(error)}") from error
        return outputs

    def check_types(self) -> None:
        """Raise NotFromPython if an input or output has an element type that NumPy does not have: such a model cannot
        be run from Python."""
        ports = [("input", v) for v in self.session.get_inputs()]
        ports += [("output", v) for v in self.session.get_outputs()]
        for what, value in ports:
            if (match := _LACKING.search(value.type)) is not None:
                raise NotFromPython(
                    f"{what} {value.name!r} is {match[0]}, which NumPy lacks, so the model cannot be run from Python: "
                    "put a Cast to float there, or optimize with --no-measure"
                )

    def caller(self, feeds: Feeds) -> Callable[[], object]:
        """A function that runs the model once on `feeds`, as a user's program would.

        It is the plain `session.run` with contiguous NumPy arrays: it makes no copies, accepts any type of input, and
        costs 5 microseconds of Python (IO binding would cost 2.5, OrtValues 33), equally for all compared models. The
        model is run once here, so that wrong feeds raise BackendError now.
        """
        arrays = same_feeds(feeds)
        self.run(arrays)
        names = list(self._output_names)
        session = self.session
        return lambda: session.run(names, arrays)

    def bound_caller(self, feeds: Feeds) -> Callable[[], object]:
        """Like `caller`, with IO binding if feeds and outputs are plain tensors: outputs stay in the session's arena.

        Operators that are timed alone use this: inside a model, an operator's outputs are not passed to Python either.
        """
        import onnxruntime as ort

        arrays = same_feeds(feeds)
        self.run(arrays)
        session = self.session
        numeric = all(array.dtype.kind in "biuf" for array in arrays.values())
        tensors = all(
            value.type.startswith("tensor(") and value.type != "tensor(string)"
            for value in session.get_outputs()
        )
        if not (numeric and tensors):
            names = list(self._output_names)
            return lambda: session.run(names, arrays)
        binding = session.io_binding()
        for name, array in arrays.items():
            binding.bind_ortvalue_input(name, ort.OrtValue.ortvalue_from_numpy(array))
        for name in self._output_names:
            binding.bind_output(name)
        return lambda: session.run_with_iobinding(binding)

    def close(self) -> None:
        """Release the session with its weights, its arena and its threads."""
        self._session, self._weights = None, ()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


def open_model(
    model: ModelSource,
    *,
    threads: int | None = None,
    optimization: Optimization = Optimization.ALL,
    providers: Sequence[str] = (CPU,),
    session_options: Options | None = None,
    cpus: Sequence[int] | None = None,
    profile: str | None = None,
    weights: Mapping[str, Array] | None = None,
) -> OrtModel:
    """Load a model into a new session.

    Operators run one after the other, each with `threads` threads (default: the number of physical cores).
    `session_options` are the user's. A mapping of configuration entries takes precedence over ours. A SessionOptions
    object is used itself, and missing entries (thread count, spinning) are added to it; its optimisation level holds if
    `optimization` is ALL. `cpus` pins the worker threads: it has one CPU per thread, the first of which belongs to the
    calling thread and is not used here (see `placement`). A library of kernels runs only if the options name it (see
    `with_library`). `profile`: the session writes a profile to a file whose name begins with this text. `weights`:
    arrays that take the place of the model's weights of these names; the options must not be an object of the user's,
    which would keep them.

    Raises BackendError if a provider other than the CPU is requested, if `threads` contradicts the options, if a file
    is missing, and if ONNX Runtime cannot load the model; OutOfTime if the time of `deadline` was over before the model
    was loaded.
    """
    check_providers(providers)
    name = describe(model)
    source: str | bytes = bytes(model) if isinstance(model, bytes) else os.fspath(model)
    if isinstance(source, str) and not os.path.isfile(source):
        raise BackendError(f"{name}: there is no such file")
    try:
        options = _options(threads, optimization, session_options, cpus)
        if profile is not None:
            options.enable_profiling, options.profile_file_prefix = True, profile
        values = [_add_weight(options, name, array) for name, array in (weights or {}).items()]
        session = _session(source, options, values)
    except OutOfTime as error:
        raise OutOfTime(f"loading {name} was ended: its time was over") from error
    except ort_errors() as error:
        if deadline.over():
            raise OutOfTime(f"loading {name} was ended: its time was over") from error
        raise BackendError(f"ONNX Runtime cannot load {name}: {reason(error)}") from error
    session.disable_fallback()
    return OrtModel(session, options.intra_op_num_threads, values)


def _add_weight(options: ort.SessionOptions, name: str, array: Array) -> Any:
    """Let a session read an array in the place of a weight. The result must exist as long as the session."""
    import onnxruntime as ort

    value = ort.OrtValue.ortvalue_from_numpy(array)
    options.add_initializer(name, value)
    return value


# Threads that still load a model although they were told to end. ONNX Runtime looks for that request only between two
# passes of its optimiser.
_abandoned: list[Thread] = []
# Seconds to wait for a thread that was told to end.
_GRACE = 0.5


def _session(
    source: str | bytes, options: ort.SessionOptions, weights: Sequence[Any] = ()
) -> ort.InferenceSession:
    """Open a session. If there is a deadline, another thread opens it, and is abandoned when the time is over. Such a
    thread may still read `weights`: it owns them.

    Raises OutOfTime, and what ONNX Runtime raises.
    """
    import onnxruntime as ort

    if math.isinf(deadline.until()):
        return ort.InferenceSession(source, options, providers=[CPU])
    if deadline.over():
        raise OutOfTime("the time was over before it began")
    sessions: list[ort.InferenceSession] = []
    errors: list[Exception] = []

    def load(_: Sequence[Any] = weights) -> None:
        try:
            sessions.append(ort.InferenceSession(source, options, providers=[CPU]))
        except Exception as error:
            errors.append(error)
        finally:
            options.set_load_cancellation_flag(False)  # the options may be the user's

    thread = Thread(target=load, daemon=True)
    thread.start()
    try:
        thread.join(deadline.remaining())
    finally:  # Ctrl-C, too
        if thread.is_alive():
            options.set_load_cancellation_flag(True)
            _abandoned[:] = [*filter(Thread.is_alive, _abandoned), thread]
    thread.join(_GRACE)
    if errors:
        raise errors[0]
    if not sessions:
        raise OutOfTime("its time was over")
    return sessions[0]


@atexit.register
def _wait_for_abandoned() -> None:
    """At exit, wait for abandoned threads: a library must not be unloaded while a thread runs in it."""
    for thread in _abandoned:
        thread.join()


@contextmanager
def ending(until: float, end: Callable[[], object]) -> Iterator[None]:
    """Call `end` in another thread if the block is not over at the moment `until` (time.monotonic)."""
    if math.isinf(until):
        yield
        return
    timer = Timer(max(0.0, until - time.monotonic()), end)
    timer.daemon = True
    timer.start()
    try:
        yield
    finally:
        timer.cancel()


def check_providers(providers: Sequence[str]) -> None:
    """Raise BackendError unless the CPU is the only one of `providers`."""
    others = [provider for provider in providers if provider not in (CPU, "cpu", "CPU")]
    if others or not providers:
        wanted = ", ".join(others) or "none"
        raise BackendError(f"only the CPU provider ({CPU}) can be used for now, not {wanted}")


def describe(model: ModelSource) -> str:
    """The name of a model in messages."""
    return f"the model of {len(model)} bytes" if isinstance(model, bytes) else os.fspath(model)


def ort_errors() -> tuple[type[Exception], ...]:
    """The classes of errors that ONNX Runtime raises. They have no common base but Exception."""
    from onnxruntime.capi import onnxruntime_pybind11_state as native

    own = (
        value for value in vars(native).values() if isinstance(value, type) and issubclass(value, Exception)
    )
    return (*own, RuntimeError, ValueError, TypeError)


def resolve_threads(threads: int | None, session_options: Options | None) -> int:
    """The thread count that `open_model` would use. Raises BackendError if the arguments contradict each other, and for
    more threads than `most_threads`."""
    own = 0
    if session_options is not None and not isinstance(session_options, Mapping):
        own = session_options.intra_op_num_threads
    if threads is not None and threads < 1:
        raise BackendError(f"the thread count must be at least 1, not {threads}")
    if threads is not None and own not in (0, threads):
        raise BackendError(f"{threads} threads were asked for, but the session options say {own}")
    count = threads or own or default_threads()
    if count > (most := most_threads()):
        raise BackendError(f"{count} threads are too many for this machine: give at most {most}")
    return count


def _options(
    threads: int | None, optimization: Optimization, user: Options | None, cpus: Sequence[int] | None
) -> ort.SessionOptions:
    import onnxruntime as ort

    count = resolve_threads(threads, user)
    entries = dict(DEFAULT_ENTRIES)
    if cpus is not None and len(cpus) == count > 1:
        entries[AFFINITIES] = ";".join(str(cpu + 1) for cpu in cpus[1:])

    if isinstance(user, ort.SessionOptions):
        user.intra_op_num_threads = count
        for key, value in entries.items():
            if not _has_entry(user, key):
                user.add_session_config_entry(key, value)
        if optimization is not Optimization.ALL:
            user.graph_optimization_level = getattr(ort.GraphOptimizationLevel, optimization.value)
        return user
    options = ort.SessionOptions()
    options.intra_op_num_threads = count
    options.inter_op_num_threads = 1
    options.execution_mode = ort.ExecutionMode.ORT_SEQUENTIAL
    options.graph_optimization_level = getattr(ort.GraphOptimizationLevel, optimization.value)
    options.log_severity_level = QUIET
    for key, value in {**entries, **(user or {})}.items():
        if key == CUSTOM_OPERATORS:
            for library in value.split(os.pathsep):
                load_library(options, library)
        else:
            options.add_session_config_entry(key, str(value))
    return options


_loaded: dict[str, list[os.stat_result]] = {}
"""For each path of a library: the files that this process has loaded from this path, one after the other."""


def load_library(options: ort.SessionOptions, library: str) -> None:
    """Register a library of custom operators, even if this process has loaded another file from the same path before.

    Raises BackendError if the file has been overwritten since this process loaded it, and what ONNX Runtime raises.
    """
    if not os.path.isfile(library):  # the system's loader may find it elsewhere
        options.register_custom_ops_library(library)
        return
    path, status = os.path.abspath(library), os.stat(library)
    files = _loaded.setdefault(path, [])
    number = next((i for i, other in enumerate(files) if os.path.samestat(status, other)), len(files))
    if number == len(files):
        files.append(status)
    if (status.st_mtime_ns, status.st_size) != (files[number].st_mtime_ns, files[number].st_size):
        raise BackendError(f"{library}: was overwritten while this process uses it: start a new process")
    # The system's loader identifies files by their paths. So a file that has replaced another one is loaded by another
    # spelling of its path.
    folder, name = os.path.split(path)
    options.register_custom_ops_library(os.path.join(folder, *["."] * (number + 1), name))


def with_library(user: Options | None, library: str) -> Options:
    """A user's session options with a library of custom operators added. A SessionOptions object is changed in place.

    Raises BackendError if ONNX Runtime cannot load the library.
    """
    import onnxruntime as ort

    if isinstance(user, ort.SessionOptions):
        try:
            load_library(user, library)
        except ort_errors() as error:
            raise BackendError(f"ONNX Runtime cannot load {library}: {reason(error)}") from error
        return user
    libraries = (user or {}).get(CUSTOM_OPERATORS)
    return {
        **(user or {}),
        CUSTOM_OPERATORS: library if libraries is None else f"{libraries}{os.pathsep}{library}",
    }


def _has_entry(options: ort.SessionOptions, key: str) -> bool:
    try:
        options.get_session_config_entry(key)
    except RuntimeError:  # the entry is not set
        return False
    return True
