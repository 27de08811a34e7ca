"""Times a decoder as its users run it: step after step, each with the cache that the last one returned."""

from __future__ import annotations

import contextlib
import math
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from xrlflow.backends import system_load
from xrlflow.backends.interleave import MIN_ROUNDS, SETTLE_BELOW, no_garbage_collection, turns
from xrlflow.backends.onnxruntime.reasons import reason
from xrlflow.backends.onnxruntime.session import (
    Options,
    OrtModel,
    describe,
    open_model,
    ort_errors,
    resolve_threads,
)
from xrlflow.backends.placement import choose_cpus, pinned
from xrlflow.backends.protocol import Array, BackendError, Feeds, ModelSource, same_feeds
from xrlflow.backends.results import Load, SpeedUp
from xrlflow.backends.statistics import Floats, median_interval

if TYPE_CHECKING:
    import onnxruntime as ort

_WARMING = 8
"""The steps of an untimed run."""
_NARROW = 0.01
"""A measurement ends when the intervals of its ratios are narrower than this (a logarithm)."""


@dataclass(frozen=True, slots=True)
class Cache:
    """A cache: the output `output` of a step is the input `input` of the next one.

    `axis`: the dimension that grows with each token; None: a state, whose shape stays. `once`: what a run with an empty
    cache returns goes into all later ones, as with the cache of an encoder.
    """

    input: str
    output: str
    axis: int | None
    once: bool = False


@dataclass(frozen=True, slots=True)
class Script:
    """What a loop gives to a model.

    `start`: the caches before the first run, and the inputs that stay as they are. `prefill`: the other inputs of a
    first run with the whole prompt; None: there is none. `steps`: the other inputs of each step. `result`: the output
    that is kept of the last step. `lengths`: tokens in the cache at the start, after the prefill, after each step.
    """

    caches: tuple[Cache, ...]
    start: Feeds
    prefill: Feeds | None
    steps: tuple[Feeds, ...]
    result: str
    lengths: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Timing:
    """Seconds of one loop: the prefill (None: without one), the first and the last step, and all steps."""

    prefill: float | None
    first: float
    last: float
    total: float


@dataclass(frozen=True, slots=True, eq=False)
class Generation:
    """Several models that took turns at the same loop. Comparisons are with the first one.

    `timings`: of each model, a loop for each round. `speedups`: of each model but the first, by the seconds of all
    steps. `results`: of each model, the script's `result` after the last step.
    """

    script: Script
    timings: tuple[tuple[Timing, ...], ...]
    speedups: tuple[SpeedUp, ...]
    results: tuple[Array, ...]
    load: Load
    threads: int


class Loop:
    """A loaded model that repeats a script. No cache is copied: ONNX Runtime allocates each output, and the next step
    gets this very value."""

    def __init__(self, model: OrtModel, script: Script, name: str) -> None:
        self._name, self._session, self._names = name, model.session, model.output_names
        self._binding = model.session.io_binding()
        self._script = script
        index = {name: i for i, name in enumerate(self._names)}
        self._returned = [(cache, index[cache.output]) for cache in script.caches]
        self.result = index[script.result]
        self._start = _values(script.start)
        self._prefill = [] if script.prefill is None else [_values(script.prefill)]
        self._steps = [_values(feeds) for feeds in script.steps]
        self._errors = ort_errors()

    def run(self, most: int | None = None) -> tuple[Timing, list[ort.OrtValue]]:
        """Run the prefill and the steps (`most`: not more steps than this). Returns the seconds, and the outputs of
        the last step. Raises BackendError if ONNX Runtime fails, and if a cache does not come back in the shape that
        it needs."""
        lengths, first = self._script.lengths, int(self._script.prefill is not None)
        seconds: list[float] = []
        outputs: list[ort.OrtValue] = []
        try:
            self._bind(self._start)
            for feeds in (*self._prefill, *self._steps[:most]):
                lasted, outputs = self._once(feeds, empty=lengths[len(seconds)] == 0)
                seconds.append(lasted)
        except self._errors as error:
            length = lengths[len(seconds)]
            raise BackendError(
                f"{self._name}: ONNX Runtime cannot run it with {length} tokens in the cache: {reason(error)}"
            ) from error
        self._check(outputs, lengths[len(seconds)])
        steps = seconds[first:]
        return Timing(seconds[0] if first else None, steps[0], steps[-1], sum(steps)), outputs

    def _once(self, feeds: Mapping[str, ort.OrtValue], *, empty: bool) -> tuple[float, list[ort.OrtValue]]:
        """One run. What a user's loop does besides, binding and handing on, is in its time."""
        began = time.perf_counter()
        self._bind(feeds)
        for name in self._names:  # without this, a run would write into the outputs of the last one
            self._binding.bind_output(name)
        self._session.run_with_iobinding(self._binding)
        outputs: list[ort.OrtValue] = self._binding.get_outputs()
        for cache, at in self._returned:
            if empty or not cache.once:
                self._binding.bind_ortvalue_input(cache.input, outputs[at])
        return time.perf_counter() - began, outputs

    def _bind(self, values: Mapping[str, ort.OrtValue]) -> None:
        for name, value in values.items():
            self._binding.bind_ortvalue_input(name, value)

    def _check(self, outputs: Sequence[ort.OrtValue], length: int) -> None:
        for cache, at in self._returned:
            expected, found = list(self._script.start[cache.input].shape), list(outputs[at].shape())
            if cache.axis is not None:
                expected[cache.axis] = length
            if found != expected and not cache.once:
                raise BackendError(
                    f"{self._name}: output {cache.output!r} has shape {found}, and as the next {cache.input!r} "
                    f"it needs {expected}"
                )


def _values(feeds: Feeds) -> dict[str, ort.OrtValue]:
    import onnxruntime as ort

    return {name: ort.OrtValue.ortvalue_from_numpy(array) for name, array in same_feeds(feeds).items()}


def measure_loops(
    models: Sequence[ModelSource],
    scripts: Sequence[Script],
    *,
    threads: int | None = None,
    time_limit: float = 20.0,
    session_options: Options | None = None,
) -> Generation:
    """How long each of `models` takes for the steps of a script: the first of `scripts` that the first model runs.

    All models are loaded at once, in their order, and take turns: a round is one loop of each, in rotating order, and
    ratios are those within a round. A short loop begins with a few untimed steps, because the other model has filled
    the caches of the processor. It ends when the 95% intervals of all ratios are narrower than 1%, or when another
    round would exceed `time_limit` seconds (loading included); there is at least one round.

    Raises BackendError if a model cannot be loaded or run, and for arguments that `open_model` refuses.
    """
    until = time.monotonic() + time_limit
    threads = resolve_threads(threads, session_options)
    cpus = choose_cpus(threads)
    with contextlib.ExitStack() as stack:
        opened = []
        names = [describe(model) for model in models]
        for model in models:
            session = open_model(model, threads=threads, session_options=session_options, cpus=cpus)
            opened.append(stack.enter_context(session))
            session.check_types()
        stack.enter_context(pinned(cpus))
        stack.enter_context(no_garbage_collection())
        script = _first_that_runs(opened[0], scripts, names[0])
        loops = [Loop(model, script, name) for model, name in zip(opened, names)]
        for loop in loops:
            loop.run(_WARMING)
        before = system_load.read()
        rounds, results = _take(loops, until)
        load = system_load.judge(before, system_load.read(), threads)
    return Generation(
        script, tuple(zip(*rounds, strict=True)), tuple(_ratios(rounds)), tuple(results), load, threads
    )


def _first_that_runs(model: OrtModel, scripts: Sequence[Script], name: str) -> Script:
    errors: list[BackendError] = []
    for script in scripts:
        try:
            Loop(model, script, name).run(2)
        except BackendError as error:
            errors.append(error)
        else:
            return script
    raise errors[-1]


def _take(loops: Sequence[Loop], until: float) -> tuple[list[tuple[Timing, ...]], list[Array]]:
    """Rounds until the moment `until` (time.monotonic): of each, the seconds of all models. Also the last results."""
    rounds: list[tuple[Timing, ...]] = []
    results: dict[int, Array] = {}
    longest = 0.0
    short = False
    while not rounds or time.monotonic() + longest < until:
        began = time.monotonic()
        row: dict[int, Timing] = {}
        for slot in turns(len(loops), len(rounds)):
            if short:
                loops[slot].run(_WARMING)
            row[slot], outputs = loops[slot].run()
            if not rounds:
                results[slot] = outputs[loops[slot].result].numpy().copy()
        rounds.append(tuple(row[slot] for slot in range(len(loops))))
        short = max(timing.total for timing in rounds[-1]) < SETTLE_BELOW
        longest = max(0.9 * longest, time.monotonic() - began)
        if len(rounds) >= MIN_ROUNDS and all(ratio.width < _NARROW for ratio in _ratios(rounds)):
            break
    return rounds, [results[slot] for slot in range(len(loops))]


def _ratios(rounds: Sequence[Sequence[Timing]]) -> list[SpeedUp]:
    logs = np.log([[timing.total for timing in row] for row in rounds])
    return [_interval(logs[:, 0] - logs[:, model]) for model in range(1, logs.shape[1])]


def rate(timings: Sequence[Timing], tokens: int) -> SpeedUp:
    """Tokens a second, if each loop takes `tokens`: the median over the loops, with its 95% interval."""
    return _interval(math.log(tokens) - np.log([timing.total for timing in timings]))


def _interval(logs: Floats) -> SpeedUp:
    median, low, high = median_interval(logs)
    return SpeedUp(math.exp(median), math.exp(low), math.exp(high))
