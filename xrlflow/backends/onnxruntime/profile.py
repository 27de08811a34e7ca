"""The time of each operator, from ONNX Runtime's own profile."""

from __future__ import annotations

import json
import os
import tempfile
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from xrlflow.backends.onnxruntime.session import open_model
from xrlflow.backends.protocol import BackendError, Feeds, ModelSource
from xrlflow.storage.files import no_room

_WARM_UP = 2
_MOST_RUNS = 100


@dataclass(frozen=True, slots=True)
class OperatorTime:
    """The number of kernels of one operator in a run, and their milliseconds. The time of a kernel does not include
    kernels of its subgraphs, which count by themselves."""

    op: str
    calls: float
    ms: float


@dataclass(frozen=True, slots=True)
class OperatorProfile:
    """Times by operator, the longest first, as means over `runs`. `run_ms`: milliseconds of a complete run under the
    profiler."""

    operators: tuple[OperatorTime, ...]
    runs: int
    run_ms: float

    def to_json(self) -> dict[str, Any]:
        return {
            "runs": self.runs,
            "run_ms": self.run_ms,
            "operators": [{"op": o.op, "calls": o.calls, "ms": o.ms} for o in self.operators],
        }


def profile_operators(
    model: ModelSource,
    feeds: Feeds,
    *,
    threads: int | None = None,
    session_options: Mapping[str, str] | None = None,
    seconds: float = 1.0,
) -> OperatorProfile:
    """Run a model for about `seconds` and return the time that ONNX Runtime's profile gives to each operator.

    Operators are those that run after the runtime's own fusions. Profiling slows small operators, so the sum of the
    times is no latency. Raises BackendError if the model cannot be loaded or run, or if the profile cannot be written.
    """
    with tempfile.TemporaryDirectory(prefix="xrlflow-profile-") as folder:
        with open_model(
            model, threads=threads, session_options=session_options, profile=os.path.join(folder, "run")
        ) as opened:
            run = opened.caller(feeds)
            begin, runs = time.perf_counter(), 0
            while runs < _WARM_UP + 1 or (
                time.perf_counter() - begin < seconds and runs < _WARM_UP + _MOST_RUNS
            ):
                run()
                runs += 1
            file = opened.session.end_profiling()
        try:
            events = json.loads(Path(file).read_text(encoding="utf-8", errors="replace"))
        except (OSError, ValueError) as error:  # ONNX Runtime does not report a failed write
            raise BackendError(f"ONNX Runtime did not write its profile: {no_room()}") from error
    return summed(events, 1 + _WARM_UP)


def summed(events: Iterable[Mapping[str, Any]], skipped: int = 0) -> OperatorProfile:
    """The profile that is computed from the events of a trace, without the first `skipped` runs."""
    timed = sorted((e for e in events if "dur" in e), key=lambda e: (e["ts"], -e["dur"]))
    runs = [e for e in timed if e.get("cat") == "Session" and e.get("name") == "model_run"][skipped:]
    if not runs:
        return OperatorProfile((), 0, 0.0)
    kernels = [
        e
        for e in timed
        if e.get("cat") == "Node" and e["name"].endswith("_kernel_time") and e["ts"] >= runs[0]["ts"]
    ]
    by_operator: dict[str, list[float]] = {}
    for event, own in zip(kernels, _own_times(kernels)):
        calls = by_operator.setdefault(event.get("args", {}).get("op_name", "?"), [])
        calls.append(own)
    count = len(runs)
    operators = [
        OperatorTime(op, len(times) / count, sum(times) / count / 1e3) for op, times in by_operator.items()
    ]
    operators.sort(key=lambda o: (-o.ms, o.op))
    return OperatorProfile(tuple(operators), count, sum(e["dur"] for e in runs) / count / 1e3)


def _own_times(events: Sequence[Mapping[str, Any]]) -> list[float]:
    """The microseconds of each event, without the time of the events inside it (the kernels of a subgraph)."""
    own = [float(e["dur"]) for e in events]
    open_: list[int] = []
    for index, event in enumerate(events):
        while open_ and events[open_[-1]]["ts"] + events[open_[-1]]["dur"] <= event["ts"]:
            open_.pop()
        if open_:
            own[open_[-1]] -= event["dur"]
        open_.append(index)
    return [max(each, 0.0) for each in own]
