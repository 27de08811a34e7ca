"""Measuring two models in several fresh processes: the only figure that is reported as a speed-up."""

from __future__ import annotations

import json
import math
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from xrlflow.backends.children import environment
from xrlflow.backends.onnxruntime.session import Optimization, Options, resolve_threads
from xrlflow.backends.onnxruntime.timing import measure
from xrlflow.backends.onnxruntime.wire import from_json, save_feeds
from xrlflow.backends.protocol import BackendError, Feeds, ModelSource, one_line
from xrlflow.backends.results import Comparison, Latency, RepeatedComparison, SpeedUp
from xrlflow.backends.statistics import combine

WORKER = "xrlflow.backends.onnxruntime.worker"
_MOST = 3
"""How many times as many processes as are asked for may measure, if the first leave time and doubt."""
GRACE = 5.0
"""Seconds that a child may exceed its share of the time: it starts up, and finishes the round that it is in."""


def measure_in_fresh_processes(
    before: ModelSource,
    after: ModelSource,
    feeds: Feeds,
    *,
    pairs: int = 5,
    threads: int | None = None,
    time_limit: float = 60.0,
    target_width: float = 0.01,
    optimization: Optimization = Optimization.ALL,
    session_options: Options | None = None,
) -> RepeatedComparison:
    """How many times faster `after` is than `before`, measured anew in `pairs` processes and combined.

    What is fixed for the life of a process (addresses of weights, placement of threads) can make one session
    a percent or more faster than another of the same model, so one process cannot tell a small speed-up from
    luck. Each child opens its own two sessions, every other child in reverse order, and measures as `measure`
    does, the A/A control included. `combine` counts the spread between them: with 3 processes the interval is
    2.5 times their standard deviation to either side, with 5 it is 1.2 times, which is why 5 is the default.

    `time_limit` is in seconds for everything; the children share it evenly. One that ends early because its
    interval is narrow leaves its time to the others, and those for which no time is left are not started:
    with one process the interval is (0, inf). When all have ended with time left, and the interval is neither narrower
    than `target_width` nor that far from 1, up to twice as many again follow. Ctrl-C ends the running child.

    A SessionOptions object cannot be handed to another process. With one the pairs are fresh sessions in this process,
    and the result's `fresh_processes` is False: a mapping of configuration entries is better.

    Raises BackendError when a child crashes (with the end of what it wrote to standard error), when a model
    cannot be loaded or run, and when not even one measurement fits into the time limit.
    """
    if pairs < 1:
        raise BackendError("at least one pair of sessions has to be measured")
    started = time.monotonic()
    deadline = started + time_limit
    threads = resolve_threads(threads, session_options)
    in_child = session_options is None or isinstance(session_options, Mapping)
    runs: list[Comparison] = []
    with tempfile.TemporaryDirectory(prefix="xrlflow-measure-") as folder:
        root = Path(folder)
        request: dict[str, Any] = {
            "models": [_as_path(before, root / "before.onnx"), _as_path(after, root / "after.onnx")],
            "feeds": save_feeds(root / "feeds.npz", feeds) if in_child else [],
            "threads": threads,
            "target_width": target_width,
            "optimization": optimization.value,
            "session_options": dict(session_options) if isinstance(session_options, Mapping) else None,
        }
        for index in range(_MOST * pairs):
            left = deadline - time.monotonic()
            if index < pairs:
                share = left / (pairs - index)
                if runs and share < 0.5 * min(run.seconds / max(run.samples, 1) for run in runs):
                    break
            else:
                share = (time.monotonic() - started) / index
                if share > left or _decided(_combine_speedups([run.speedup for run in runs]), target_width):
                    break
            # Starting Python and importing the runtime takes part of the share.
            request["time_limit"] = max(share - _startup(runs, started), 0.2 * share, 0.01)
            request["load_reversed"] = index % 2 == 1
            patience = max(deadline - time.monotonic(), 0.0) + GRACE
            result: Comparison | None
            if in_child:
                result = _run_child(root, request, patience)
            else:
                result = measure(
                    request["models"],
                    feeds,
                    threads=threads,
                    time_limit=share,
                    target_width=target_width,
                    optimization=optimization,
                    session_options=session_options,
                    load_reversed=index % 2 == 1,
                )
            if result is None:
                break
            runs.append(result)
    if not runs:
        raise BackendError(f"the time limit of {time_limit:g} s is too short to load and measure the models")
    return _combined(runs, time.monotonic() - started, threads, in_child)


def _decided(speedup: SpeedUp, width: float) -> bool:
    """More processes would not change what is said of the two models."""
    return speedup.width <= width or abs(math.log(speedup.median)) - speedup.width / 2 > width


def _startup(runs: Sequence[Comparison], started: float) -> float:
    """Seconds that a child needs besides measuring, as far as those so far can tell."""
    if not runs:
        return 0.5
    return max((time.monotonic() - started - sum(run.seconds for run in runs)) / len(runs), 0.0)


def _as_path(model: ModelSource, path: Path) -> str:
    if isinstance(model, bytes):
        path.write_bytes(model)
        return str(path)
    return os.path.abspath(model)


def _run_child(folder: Path, request: dict[str, Any], patience: float) -> Comparison | None:
    """One child's comparison; None when it was still busy after `patience` seconds. It never outlives this call."""
    answer_file = folder / "result.json"
    answer_file.unlink(missing_ok=True)
    (folder / "request.json").write_text(json.dumps(request))
    child = subprocess.Popen(
        [sys.executable, "-m", WORKER, str(folder)],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        env=environment(),
        text=True,
        errors="replace",
    )
    try:
        _, stderr = child.communicate(timeout=patience)
    except subprocess.TimeoutExpired:
        return None
    finally:
        if child.poll() is None:
            child.kill()
            child.communicate()
    if child.returncode != 0 or not answer_file.exists():
        tail = one_line(stderr[-300:]) or "it said nothing"
        raise BackendError(f"a measuring process ended with status {child.returncode}: {tail}")
    answer = json.loads(answer_file.read_text())
    if "error" in answer:
        raise BackendError(answer["error"])
    return from_json(answer["comparison"])


def _combined(
    runs: Sequence[Comparison], seconds: float, threads: int, fresh_processes: bool
) -> RepeatedComparison:
    controls = [run.control for run in runs if run.control is not None]
    return RepeatedComparison(
        speedup=_combine_speedups([run.speedup for run in runs]),
        control=_combine_speedups(controls),
        before=_median_latency([run.latencies[0] for run in runs]),
        after=_median_latency([run.latencies[1] for run in runs]),
        runs=tuple(runs),
        seconds=seconds,
        threads=threads,
        fresh_processes=fresh_processes,
    )


def _combine_speedups(speedups: Sequence[SpeedUp]) -> SpeedUp:
    mean, low, high = combine(
        [math.log(speedup.median) for speedup in speedups], [speedup.width / 2 for speedup in speedups]
    )
    return SpeedUp(math.exp(mean), math.exp(low), math.exp(high))


def _median_latency(latencies: Sequence[Latency]) -> Latency:
    return Latency(
        median_ms=statistics.median(latency.median_ms for latency in latencies),
        p10_ms=statistics.median(latency.p10_ms for latency in latencies),
        p90_ms=statistics.median(latency.p90_ms for latency in latencies),
        samples=sum(latency.samples for latency in latencies),
    )
