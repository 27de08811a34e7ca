"""MetaSchedule's own search, driven from outside (Shao et al., 2022, "Tensor Program Optimization with Probabilistic
Programs"): the baseline of TVM's users."""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import numpy as np

from xrlflow.backends.tvm.toolchain.import_tvm import tvm
from xrlflow.tuning.knobs import Candidate
from xrlflow.tuning.tasks import Task
from xrlflow.tuning.tuners.protocol import Measurement

# It wants to know the number of trials in advance. Here the caller decides that.
_TRIALS = 1 << 30
# It is exhausted after this many batches in a row without anything new: for tasks without knobs it would go on for
# ever.
_PATIENCE = 3


@dataclass(frozen=True, slots=True)
class EvolutionaryConfig:
    """Defaults are MetaSchedule's, except for the threads."""

    population: int = 512
    generations: int = 4
    explore: float = 0.05
    # With fewer measurements, its cost model returns random numbers.
    warmup: int = 100
    # With several threads, the same seed does not give the same candidates.
    threads: int = 1

    def __post_init__(self) -> None:
        if min(self.population, self.generations, self.threads) < 1:
            raise ValueError(f"evolutionary search takes positive numbers, not {self}")


class EvolutionaryTuner:
    """EvolutionarySearch with its mutators and its XGBoost cost model, over TVM's own schedules of a task's module."""

    name = "evolutionary"

    def __init__(self, task: Task, seed: int, config: EvolutionaryConfig = EvolutionaryConfig()) -> None:
        meta = tvm().s_tir.meta_schedule
        self._task = task
        self._context = meta.TuneContext(
            task.mod,
            target=task.target,
            space_generator=meta.space_generator.PostOrderApply(),
            search_strategy=meta.search_strategy.EvolutionarySearch(
                population_size=config.population,
                # The default, except for smaller populations.
                init_min_unmeasured=min(50, config.population),
                genetic_num_iters=config.generations,
                eps_greedy=config.explore,
            ),
            rand_state=1 + seed % (2**31 - 2),
            num_threads=config.threads,
            task_name=task.name,
            logger=_silent(),
        )
        self._database = meta.database.MemoryDatabase()
        self._workload = self._database.commit_workload(task.mod)
        booster = meta.cost_model.xgb_model.XGBConfig(seed=seed % 2**31, nthread=1)
        self._model = meta.cost_model.XGBModel(
            config=booster, num_warmup_samples=config.warmup, num_tuning_cores=1
        )
        self._random = np.random.RandomState(seed % 2**32).get_state()
        # What was generated, or measured by others; what was generated but not yet asked for; and the search's own
        # candidates, by key.
        self._known: set[str] = set()
        self._waiting: list[Candidate] = []
        self._theirs: dict[str, Any] = {}
        self._batch: int | None = None

    def propose(self, count: int) -> Sequence[Candidate]:
        if count < 1:
            return []
        if self._batch is None:
            self._batch = count
            self._context.pre_tuning(
                max_trials=_TRIALS,
                num_trials_per_iter=count,
                database=self._database,
                cost_model=self._model,
            )
        idle = 0
        while len(self._waiting) < count and idle < _PATIENCE:
            fresh = self._generate()
            self._waiting += fresh
            idle = 0 if fresh else idle + 1
        # Other tuners may have measured some of them meanwhile.
        chosen, self._waiting = self._waiting[:count], self._waiting[count:]
        return chosen

    def update(self, measured: Sequence[tuple[Candidate, Measurement]]) -> None:
        meta = tvm().s_tir.meta_schedule
        candidates, results = [], []
        for candidate, outcome in measured:
            theirs = self._theirs.pop(candidate.key, None) or self._rebuild(candidate)
            seconds = [float(s) for s in outcome.seconds]
            candidates.append(theirs)
            results.append(meta.runner.RunnerResult(seconds or None, outcome.error))
            self._database.commit_tuning_record(
                meta.database.TuningRecord(
                    theirs.sch.trace,
                    self._workload,
                    # MetaSchedule's AddToDatabase writes failures in this way.
                    seconds or [1e10],
                    self._task.target,
                    theirs.args_info,
                )
            )
        known = {candidate.key for candidate, _ in measured}
        self._known |= known
        self._waiting = [c for c in self._waiting if c.key not in known]
        if candidates:
            with self._own_random_numbers():
                self._model.update(self._context, candidates, results)
            if self._batch is not None:
                self._context.notify_runner_results(candidates, results)

    def _generate(self) -> list[Candidate]:
        """The new candidates of the next batch, claimed; empty if there are none."""
        with self._own_random_numbers():
            theirs = self._context.generate_measure_candidates() or ()
        fresh = []
        for one in theirs:
            candidate = Candidate.of(None, plain(one.sch.trace.as_json()), one.sch.mod)
            if candidate.key not in self._known:
                self._known.add(candidate.key)
                self._theirs[candidate.key] = one
                fresh.append(candidate)
        return fresh

    def _rebuild(self, candidate: Candidate) -> Any:
        """A candidate from elsewhere in MetaSchedule's form."""
        package = tvm()
        meta = package.s_tir.meta_schedule
        schedule = package.s_tir.Schedule(self._task.mod)
        package.s_tir.schedule.Trace.apply_json_to_schedule(candidate.trace, schedule)
        return meta.MeasureCandidate(schedule, meta.arg_info.ArgInfo.from_entry_func(schedule.mod, True))

    @contextmanager
    def _own_random_numbers(self) -> Iterator[None]:
        """NumPy's global generator, which the cost model uses, with this tuner's state; restored afterwards."""
        before = np.random.get_state()
        np.random.set_state(self._random)
        try:
            yield
        finally:
            self._random = np.random.get_state()
            np.random.set_state(before)


def plain(value: Any) -> Any:
    """TVM's containers and immediate numbers as values that JSON can hold."""
    if value is None or isinstance(value, bool | int | float):
        return value
    if isinstance(value, str):
        return str(value)
    if hasattr(value, "value"):
        return value.value
    if isinstance(value, Mapping) or hasattr(value, "items"):
        return {str(k): plain(v) for k, v in value.items()}
    return [plain(v) for v in value]


def _silent() -> logging.Logger:
    """A logger that does not print MetaSchedule's tables."""
    logger = logging.getLogger("xrlflow.tuning.evolutionary")
    logger.setLevel(logging.CRITICAL)
    return logger
