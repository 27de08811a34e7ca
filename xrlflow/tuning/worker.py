"""The code of the processes that build and run candidates for a pool.

These worker processes are forked from a process that has loaded TVM (3 s, 400 MB) and runs no candidate itself. Forking
a worker takes a few milliseconds, so a candidate that kills its worker costs little. If a job raises an exception, the
reply is `Failed`. The pool notices crashes and hangs.
"""

from __future__ import annotations

import ctypes
import ctypes.util
import functools
import importlib
import math
import os
import shutil
import statistics
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np

from xrlflow.backends.placement import cache_levels
from xrlflow.backends.protocol import Array, BackendError, one_line
from xrlflow.backends.tvm.devices.remote import DeviceError, Remote, connect, use_threads, what_happened
from xrlflow.backends.tvm.toolchain.import_tvm import from_json, tvm
from xrlflow.backends.tvm.toolchain.target import compiler, linker
from xrlflow.workers import Unable

Argument: TypeAlias = tuple[str, tuple[int, ...]]
"""The data type and shape of a kernel's parameter."""
# The names of functions that TVM's timer can call before each sample to empty caches: TVM's function, and ours (see
# `_evicting`).
_TVMS_FLUSH = "cache_flush_cpu_non_first_arg"
_EVICT = "xrlflow.evict_private_caches"


class ToolError(BackendError):
    """A tool that builds kernels is missing or does not work."""


@dataclass(frozen=True, slots=True)
class Timing:
    """How a kernel is timed.

    A sample is the mean of as many successive calls as take `sample_ms`. There are `samples` samples, fewer if all of
    them would take more than `limit_ms`, and twice as many if they disagree. Slow samples are dropped (see `steady`).

    `flush`: time the kernel as if other kernels of a model had just run. Before each sample, which is then a single
    call, the private caches of the cores are filled with other data. Shared caches keep the kernel's weights, unless
    `others` bytes of other data replace them, as in a model that is larger than these caches. A remote device has only
    TVM's own function, which removes the kernel's operands (except the first) from all caches.
    """

    samples: int = 5
    sample_ms: float = 10.0
    limit_ms: float = 500.0
    flush: bool = False
    others: int = 0

    def __post_init__(self) -> None:
        if self.samples < 1 or self.sample_ms < 0 or self.limit_ms <= 0:
            raise ValueError(f"timing needs samples, and a positive limit: {self}")


@dataclass(frozen=True, slots=True)
class Build:
    """A job: compile a module for a target (both in TVM's JSON) to a shared library at `path`.

    `elsewhere`: whether the library is loaded on another machine, so that it must name the libraries on which it
    depends.
    """

    module: str
    target: str
    path: str
    elsewhere: bool = False


@dataclass(frozen=True, slots=True)
class Run:
    """A job: time the library at `path` on arguments that the worker creates."""

    path: str
    arguments: tuple[Argument, ...]
    timing: Timing


@dataclass(frozen=True, slots=True)
class RunThere:
    """A job like `Run`, but on a remote device, for at most `seconds`, with `threads` threads. `patience`: see
    `connect`."""

    path: str
    arguments: tuple[Argument, ...]
    timing: Timing
    remote: Remote
    seconds: float
    threads: int
    patience: float


@dataclass(frozen=True, slots=True)
class Turns:
    """A job: time libraries in turns, with one sample of each library in a round, so that a change of the processor's
    clock rate affects all libraries.

    There are as many rounds as `timing` has samples, but fewer if all rounds would exceed its time limit.
    """

    kernels: tuple[tuple[str, tuple[Argument, ...]], ...]
    timing: Timing


@dataclass(frozen=True, slots=True)
class Evaluate:
    """A job: call the library at `path` once, with `inputs` for its first parameters, and zeros for all other
    parameters."""

    path: str
    arguments: tuple[Argument, ...]
    inputs: tuple[Array, ...]


@dataclass(frozen=True, slots=True)
class Built:
    """The reply to `Build`: the data types and shapes of the kernel's parameters."""

    arguments: tuple[Argument, ...]


@dataclass(frozen=True, slots=True)
class Ran:
    """The reply to `Run` and `RunThere`: seconds of one call, for each sample."""

    seconds: tuple[float, ...]


@dataclass(frozen=True, slots=True)
class RanInTurns:
    """The reply to `Turns`: for each round, the seconds of one call of each kernel."""

    seconds: tuple[tuple[float, ...], ...]


@dataclass(frozen=True, slots=True)
class Evaluated:
    """The reply to `Evaluate`: the values, after the call, of the parameters that follow the inputs."""

    outputs: tuple[Array, ...]


@dataclass(frozen=True, slots=True)
class Failed:
    """The reply to a job that raised an exception. `error` is one line. `fatal`: whether other jobs would fail for the
    same reason."""

    error: str
    fatal: bool = False


Job: TypeAlias = Build | Run | RunThere | Turns | Evaluate
Answer: TypeAlias = Built | Ran | RanInTurns | Evaluated | Failed


def paths_of(job: Job) -> tuple[str, ...]:
    """The libraries that a job writes or reads."""
    return tuple(path for path, _ in job.kernels) if isinstance(job, Turns) else (job.path,)


def relocated(job: Job, paths: Sequence[str]) -> Job:
    """The job with its libraries at other paths."""
    if isinstance(job, Turns):
        kernels = zip(paths, (arguments for _, arguments in job.kernels), strict=True)
        return replace(job, kernels=tuple(kernels))
    (path,) = paths
    return replace(job, path=path)


def steady(samples: Sequence[float]) -> tuple[float, ...]:
    """`samples` without those that other programs have slowed down: more than 10% above the lower quartile.

    Other programs can make a kernel slower, but not faster. So the fast samples count, but not only the fastest sample.
    The median would be wrong if most samples are disturbed (two threads, and another program on one of the cores).

    >>> steady((1.0, 1.001, 0.999, 1.3))
    (1.0, 1.001, 0.999)
    """
    return tuple(sample for sample in samples if sample <= 1.1 * _quartile(samples))


def agree(samples: Sequence[float]) -> bool:
    """Whether at least half of the samples lie within 5% of their lower quartile."""
    return statistics.median(samples) <= 1.05 * _quartile(samples)


def _quartile(samples: Sequence[float]) -> float:
    return sorted(samples)[len(samples) // 4]


def build(job: Build) -> Built:
    """Compile and link a library. It is complete when this function returns."""
    package = tvm()
    from tvm.driver import build as lower_and_compile

    module = from_json(job.module)
    # The kernel expects weights in the layout of its schedule. In a model, weights are converted to this layout once,
    # outside of the kernel.
    module = package.s_tir.transform.RemoveWeightLayoutRewriteBlock(skip_tensor_rewrite=True)(module)
    arguments = tuple(
        (str(info.dtype), tuple(int(size) for size in info.shape))
        for info in package.s_tir.meta_schedule.arg_info.ArgInfo.from_entry_func(module, False)
    )
    target = from_json(job.target)
    library = lower_and_compile(module, target=target)
    if library.imports:  # more than one LLVM module: TVM packs them
        library.export_library(job.path)
        return Built(arguments)
    compiled = f"{job.path}.o"
    library.write_to_file(compiled, "o")
    triple = str(target.attrs["mtriple"]) if job.elsewhere else None
    try:
        _link(compiled, job.path, triple)
    finally:
        Path(compiled).unlink(missing_ok=True)
    return Built(arguments)


def _link(compiled: str, library: str, triple: str | None = None) -> None:
    """Link one object file to a shared library. `triple`: LLVM's name of the system of another machine.

    Raises ToolError if the linker fails.
    """
    if triple is None:
        command = [*_linker(), "-o", library, compiled, *_builtins()]
    else:
        command = [_linker_for(triple), "-shared", "-fPIC", "-o", library, compiled, "-lm"]
    result = subprocess.run(
        command, stdin=subprocess.DEVNULL, capture_output=True, text=True, errors="replace"
    )
    if result.returncode != 0:
        raise ToolError(f"linking failed: {one_line(result.stderr)}")


@functools.cache
def _linker_for(triple: str) -> str:
    if (driver := linker(triple)) is None:
        raise ToolError(f"kernels for {triple} are linked with {compiler(triple)}, which is not installed")
    return driver


@functools.cache
def _linker() -> tuple[str, ...]:
    """The plain linker (4 ms) if there is one, otherwise the compiler's driver (25 ms)."""
    if sys.platform == "linux" and (ld := shutil.which("ld")):
        return (ld, "-shared")
    if driver := _driver():
        return (driver, "-shared", "-fPIC")
    raise ToolError("neither a linker nor a C compiler is installed: TVM's kernels cannot be linked")


@functools.cache
def _driver() -> str | None:
    from tvm.support.cc import get_cc

    command = get_cc()
    return None if command is None else str(command)


@functools.cache
def _builtins() -> tuple[str, ...]:
    """The compiler's support library, with conversions of half precision. (The compiler's driver would add it by
    itself.)"""
    driver = _driver()
    if driver is None:
        return ()
    result = subprocess.run(
        [driver, "-print-libgcc-file-name"], stdin=subprocess.DEVNULL, capture_output=True, text=True
    )
    path = result.stdout.strip()
    return (path,) if result.returncode == 0 and Path(path).is_file() else ()


def run(job: Run) -> Ran:
    """Time a library."""
    package = tvm()
    library = package.runtime.load_module(job.path)
    device = package.cpu(0)
    arguments = [_filled(kind, shape, device) for kind, shape in job.arguments]
    evicting = functools.partial(_evicting, job.timing.others)
    return _timed(library, device, arguments, job.timing, evicting, _keep_apart)


def run_in_turns(job: Turns) -> RanInTurns:
    """Time libraries in turns."""
    package = tvm()
    device, timing, filled = package.cpu(0), job.timing, {}
    calls = []
    for path, arguments in job.kernels:
        library = package.runtime.load_module(path)
        for operand in enumerate(arguments):  # kernels share operands, but no kernel has an operand twice
            if operand not in filled:
                filled[operand] = _filled(*operand[1], device)
        operands = [filled[operand] for operand in enumerate(arguments)]
        library["main"](*operands)
        calls.append((library, operands))
    _keep_apart()
    flush = _evicting(timing.others) if timing.flush else ""
    evaluators = [library.time_evaluator("main", device, 1, 1, f_preproc=flush) for library, _ in calls]

    def round_() -> tuple[float, ...]:
        return tuple(
            max(float(evaluator(*operands).results[0]), 1e-9)
            for evaluator, (_, operands) in zip(evaluators, calls)
        )

    rounds_so_far = [round_()]
    rounds = min(timing.samples, max(1, int(timing.limit_ms / 1e3 / sum(rounds_so_far[0]))))
    return RanInTurns((*rounds_so_far, *(round_() for _ in range(rounds - 1))))


def run_there(job: RunThere) -> Ran:
    """Time a library on a remote device, in a session of its own, so that a crash affects no other session.

    The device ends a session that takes too long. Raises DeviceError if the device has disappeared.
    """
    session = connect(job.remote, patience=job.patience, limit=job.seconds)
    try:
        use_threads(session, job.remote, job.threads)
        name = Path(job.path).name
        session.upload(job.path, name)
        device = session.cpu(0)
        arguments = [_filled(kind, shape, device) for kind, shape in job.arguments]
        return _timed(session.load_module(name), device, arguments, job.timing, lambda: _TVMS_FLUSH)
    except BackendError:
        raise
    except Exception as error:  # TVM's client raises exceptions of many types
        raise BackendError(what_happened(error, job.remote, job.seconds)) from error


def _timed(
    library: Any,
    device: Any,
    arguments: Sequence[Any],
    timing: Timing,
    flush: Callable[[], str],
    warm: Callable[[], None] | None = None,
) -> Ran:
    """Time a library's kernel. `flush`: returns the name of the flushing function. `warm`: a function that is called
    once, after TVM's threads have started."""
    kernel = library["main"]
    start = time.perf_counter()
    kernel(*arguments)
    first = time.perf_counter() - start
    if warm is not None:
        warm()
    limit = timing.limit_ms / 1e3
    if first >= limit:  # the kernel is so slow that cold caches at its first call do not matter
        return Ran((first,))

    def samples(number: int, repeat: int) -> list[float]:
        # TVM calls the kernel once before it measures, so caches are warm unless they are flushed.
        evaluator = library.time_evaluator(
            "main",
            device,
            number=number,
            repeat=repeat,
            f_preproc=flush() if timing.flush else "",
        )
        return [max(float(seconds), 1e-9) for seconds in evaluator(*arguments).results]

    (once,) = samples(1, 1)
    number = 1 if timing.flush else max(1, math.ceil(timing.sample_ms / 1e3 / once))
    repeat = min(timing.samples, max(1, int(limit / (number * once))))
    seconds_of_samples = samples(number, repeat)
    if not agree(seconds_of_samples) and 2 * repeat * number * once <= limit:
        seconds_of_samples += samples(number, repeat)
    return Ran(steady(seconds_of_samples))


@functools.cache
def _evicting(others: int = 0) -> str:
    """The name of a function for TVM's timer. The function fills the private caches of its threads' cores with other
    data, and at least `others` bytes of the shared caches.

    If all caches were emptied, weights would come from memory, as they do only in a model that is larger than all
    caches. A product of one row with 512x512 weights would take 27 us instead of 7 us, and the kernel that is the
    fastest with empty caches made a model 1.8 times slower. For kernels that are limited by memory, emptying caches
    makes little difference.
    """
    package = tvm()
    import tvm_ffi
    from tvm import te

    threads = int(tvm_ffi.get_global_func("runtime.NumThreads")())
    # Twice the size of the cache is read, and as many bytes are written, because caches do not evict strictly by age.
    size = max(2 * cache_levels().get(2, 1 << 20), others // threads)
    shape = (threads, size // 4)
    x = te.placeholder(shape, name="x")
    y = te.compute(shape, lambda i, j: x[i, j] + 1.0, name="y")
    sch = package.s_tir.Schedule(te.create_prim_func([x, y]))
    sch.parallel(sch.get_loops(sch.get_sblock("y"))[0])
    kernel = package.compile(sch.mod, package.target.Target("llvm"))["main"]
    arrays = [package.runtime.tensor(np.zeros(shape, np.float32)) for _ in range(2)]

    def evict(*_: Any) -> None:
        kernel(*arrays)

    name = f"{_EVICT}.{others}"
    tvm_ffi.register_global_func(name, evict, override=True)
    return name


def _keep_apart() -> None:
    """Keep this thread off the CPUs of TVM's threads, with which it shares the work.

    TVM pins each of its threads to a CPU, but not the calling thread. The calling thread is often on the CPU of one of
    these threads, and a kernel with two threads then takes twice as long.
    """
    if sys.platform != "linux" or len(allowed := os.sched_getaffinity(0)) == 1:
        return
    others = {int(thread) for thread in os.listdir("/proc/self/task")} - {threading.get_native_id()}
    pinned = [cpus for thread in others if len(cpus := os.sched_getaffinity(thread)) == 1]
    free = allowed.difference(*pinned)
    if pinned and free:
        os.sched_setaffinity(0, {min(free)})


def evaluate(job: Evaluate) -> Evaluated:
    """Call a library once. Raises BackendError if the inputs do not fit its parameters."""
    library = tvm().runtime.load_module(job.path)
    expected = job.arguments[: len(job.inputs)]
    for position, (array, (kind, shape)) in enumerate(zip(job.inputs, expected, strict=True)):
        if str(array.dtype) != kind or array.shape != shape:
            raise BackendError(
                f"input {position} is {array.dtype}{list(array.shape)}, not {kind}{list(shape)}"
            )
    tensor = tvm().runtime.tensor
    inputs = [tensor(array) for array in job.inputs]
    outputs = [tensor(np.zeros(shape, kind)) for kind, shape in job.arguments[len(inputs) :]]
    library["main"](*inputs, *outputs)
    return Evaluated(tuple(output.numpy() for output in outputs))


def _filled(kind: str, shape: tuple[int, ...], device: Any) -> Any:
    """A tensor of harmless values: floats of ordinary magnitude (denormals are slow), and integers that are all 1 (they
    may be indices or divisors)."""
    package = tvm()
    if kind == "bfloat16":  # NumPy does not have it
        tensor = package.runtime.empty(shape, kind)
        package.get_global_func("tvm.contrib.random.random_fill_for_measure")(tensor)
        return tensor.copyto(device)
    if kind.startswith("float"):
        values = np.random.default_rng(0).uniform(0.1, 1.0, size=shape).astype(kind)
    else:
        values = np.ones(shape, dtype=kind)
    return package.runtime.tensor(values, device)


@functools.cache
def load() -> Failed | None:
    """Load everything that workers need, so that it is in memory when they are forked. Returns an error if a tool is
    missing."""
    try:
        tvm()
        importlib.import_module("tvm.driver")
        _linker()
        _builtins()
    except BackendError as error:
        return Failed(str(error), fatal=True)
    # Kernels call libm, but the plain linker does not record that in the library.
    if name := ctypes.util.find_library("m"):
        ctypes.CDLL(name, mode=ctypes.RTLD_GLOBAL)
    return None


class JobHandler:
    """The handler of jobs in a worker process. `threads`: the number of threads of the kernels that it runs."""

    def __init__(self, threads: int) -> None:
        for name in ("TVM_NUM_THREADS", "OMP_NUM_THREADS"):
            os.environ[name] = str(threads)
        os.environ["TVM_BIND_THREADS"] = "1"  # see _keep_apart

    def do(self, order: Job) -> Answer:
        if (failed := load()) is not None:
            return failed
        try:
            match order:
                case Build():
                    return build(order)
                case Run():
                    return run(order)
                case RunThere():
                    return run_there(order)
                case Turns():
                    return run_in_turns(order)
                case Evaluate():
                    return evaluate(order)
        except DeviceError as error:
            raise Unable(str(error)) from error
        except BackendError as error:
            return Failed(str(error), fatal=isinstance(error, ToolError))
        except Exception as error:  # TVM raises exceptions of many types for schedules that it cannot compile
            return Failed(one_line(f"{type(error).__name__}: {_gist(str(error))}"))


def _gist(text: str) -> str:
    """The first meaningful line of an error message of TVM, without C++ stack frames."""
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    return next(
        (line for line in lines if not line.startswith(("File ", "Traceback", "Stack"))), "no message"
    )
