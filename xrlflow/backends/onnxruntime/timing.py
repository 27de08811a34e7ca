"""Measures models in ONNX Runtime, in this process."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Sequence
from dataclasses import dataclass

from xrlflow.backends import system_load
from xrlflow.backends.interleave import Run, interleave, time_alone
from xrlflow.backends.onnxruntime.session import (
    Optimization,
    Options,
    OrtModel,
    open_model,
    resolve_threads,
)
from xrlflow.backends.pairs import Turn, take_turns
from xrlflow.backends.placement import choose_cpus, pinned
from xrlflow.backends.protocol import BackendError, Feeds, ModelSource
from xrlflow.backends.results import Comparison, Latency, Load
from xrlflow.backends.tvm import TvmModel, is_compiled, load_compiled


def measure(
    models: Sequence[ModelSource],
    feeds: Feeds,
    *,
    threads: int | None = None,
    time_limit: float = 30.0,
    target_width: float = 0.01,
    control: bool = True,
    margin: float | None = None,
    optimization: Optimization = Optimization.ALL,
    session_options: Options | None = None,
    load_reversed: bool = False,
) -> Comparison:
    """How many times faster each of `models` is than the first, end to end, on the same `feeds`.

    A model may also be a shared library that TVM compiled.

    All models are loaded at once (the A/A control needs no session of its own) and take turns: `interleave` says how,
    when it ends, and what `control`, `margin` and `target_width` mean. `time_limit`: seconds, including loading.
    `threads`: by default the number of physical cores. Threads of all models are pinned to the same CPUs (see
    `placement`), and so is the calling thread during the measurement. `load_reversed`: the last model is loaded first.

    Raises BackendError if a model cannot be loaded or run on `feeds`, and for arguments that `open_model` refuses.
    """
    started = time.perf_counter()
    if len(models) < 2:
        raise BackendError("measuring needs at least two models: a baseline and something to compare it with")
    threads = resolve_threads(threads, session_options)
    cpus = choose_cpus(threads)
    with contextlib.ExitStack() as stack:
        order = list(enumerate(models))

        opened: dict[int, OrtModel | TvmModel] = {}
        for index, model in reversed(order) if load_reversed else order:
            opened[index] = _load(model, threads, optimization, session_options, cpus)
            stack.callback(opened[index].close)
        callers = [opened[index].caller(feeds) for index in range(len(models))]
        stack.enter_context(pinned(cpus))
        return interleave(
            callers,
            threads=threads,
            time_limit=max(time_limit - (time.perf_counter() - started), 1e-3),
            target_width=target_width,
            control=control,
            margin=margin,
        )


@dataclass(frozen=True, slots=True)
class Sample:
    """The turns of two models in one process, the load by other programs, and the seconds of loading and of
    measuring."""

    turns: tuple[Turn, ...]
    load: Load
    loading: float
    measuring: float


def sample(
    models: tuple[ModelSource, ModelSource],
    feeds: Feeds,
    *,
    turns: int | None,
    swapped: bool = False,
    threads: int,
    optimization: Optimization = Optimization.ALL,
    session_options: Options | None = None,
) -> Sample:
    """Load two models, run each once, and take `turns` turns (None: a few). `swapped`: the second model is loaded and
    timed first.

    Either may be a shared library that TVM compiled. Raises BackendError if a model cannot be loaded or run.
    """
    started = time.perf_counter()
    cpus = choose_cpus(threads)
    order = (1, 0) if swapped else (0, 1)
    with contextlib.ExitStack() as stack:
        opened: dict[int, OrtModel | TvmModel] = {}
        for index in order:
            opened[index] = _load(models[index], threads, optimization, session_options, cpus)
            stack.callback(opened[index].close)
        stack.enter_context(pinned(cpus))
        singles = [0.0, 0.0]
        callers: list[Run] = [int, int]
        for index in order:
            begin = time.perf_counter()
            callers[index] = opened[index].caller(feeds)
            singles[index] = time.perf_counter() - begin
        loaded = time.perf_counter()
        before = system_load.read()
        timed = take_turns(callers, singles, turns, first=order[0])
        after = system_load.read()
    ended = time.perf_counter()
    return Sample(timed, system_load.judge(before, after, threads), loaded - started, ended - loaded)


def _load(
    model: ModelSource,
    threads: int,
    optimization: Optimization,
    session_options: Options | None,
    cpus: Sequence[int] | None,
) -> OrtModel | TvmModel:
    if is_compiled(model):
        return load_compiled(model, threads=threads)
    return open_model(
        model, threads=threads, optimization=optimization, session_options=session_options, cpus=cpus
    )


def time_model(
    model: ModelSource,
    feeds: Feeds,
    *,
    threads: int | None = None,
    time_limit: float = 0.02,
    min_samples: int = 5,
    optimization: Optimization = Optimization.ALL,
    session_options: Options | None = None,
) -> Latency:
    """The latency of one model, measured cheaply: for a model of one node, loading takes 1 ms, and measuring takes
    `time_limit` seconds.

    This function is meant for profiles of operators. Two such latencies do not tell which model is faster: use
    `measure` for that. At least `min_samples` samples are taken, even if that takes up to four times `time_limit`.
    Raises BackendError if the model cannot be loaded or run on `feeds`.
    """
    threads = resolve_threads(threads, session_options)
    cpus = choose_cpus(threads)
    with (
        open_model(
            model, threads=threads, optimization=optimization, session_options=session_options, cpus=cpus
        ) as loaded,
        pinned(cpus),
    ):
        return time_alone(loaded.bound_caller(feeds), time_limit=time_limit, min_samples=min_samples)
