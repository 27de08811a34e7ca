"""Measurements of layers and blocks that a test puts into a store."""

from __future__ import annotations

import contextlib
import time
from typing import Any

from xrlflow.backends.tvm import detect
from xrlflow.tuning.layer_times import StoredTimes
from xrlflow.tuning.layer_tuning import LayerMeasurer, LayerTasks
from xrlflow.tuning.measurable import Measurable, key_of
from xrlflow.tuning.pool import PoolOptions
from xrlflow.tuning.session import TuningResult, tune
from xrlflow.tuning.store import Record, Setting, Store
from xrlflow.tuning.tuners.protocol import Measurement, Method
from xrlflow.tuning.worker import Timing

MACHINE = detect(cores=2)
QUICK = PoolOptions(builders=2, threads=2, timing=Timing(samples=2, sample_ms=0.2, flush=True))


def setting() -> Setting:
    return Setting.here(MACHINE.target(), 2, flushed=True)


def put(
    store: Store,
    layer: Measurable[Any],
    choice: Any,
    *seconds: float,
    error: str | None = None,
    key: str | None = None,
) -> None:
    """Store measurements of a choice. Small offsets make them differ from each other."""
    outcomes = [Measurement((s + 1e-9 * i,)) for i, s in enumerate(seconds)]
    for outcome in [*outcomes, *([Measurement(error=error)] if error else [])]:
        candidate = key_of(layer, choice, MACHINE) if key is None else key
        now = time.time()
        store.put(Record(layer.key, setting(), candidate, choice.text, outcome.seconds, outcome.error, now))


def tune_one(store: Store, layer: Measurable[Any], trials: int, *, confirm: bool = False) -> TuningResult:
    """Measure the untuned kernels of a layer and random others. `confirm`: measure the fastest of them again."""
    tasks = LayerTasks([layer], MACHINE, lambda known: known.untuned(MACHINE)[0])
    with contextlib.ExitStack() as at_end:
        return tune(
            tasks.tasks, tasks.maker(Method.RANDOM), trials=trials, batch=trials, store=store,
            pool=LayerMeasurer(tasks, QUICK, at_end), kernels=tasks if confirm else None,
        )  # fmt: skip


def times(store: Store) -> StoredTimes:
    return StoredTimes.on(store, MACHINE, 2)
