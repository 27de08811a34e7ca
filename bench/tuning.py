"""Kernel tuners against each other: `python bench/tuning.py [--layers N] [--seeds N] [--json FILE] [--tables]`.

Layers are drawn from the networks that the One-Shot Tuner's predictor was not trained on. All tuners choose from their
algorithms and blockings, except `evolutionary`: MetaSchedule's search, of TVM's own sketches. The pool and the number
of trials are the same for every tuner, and each search starts with an empty store and without knowledge. The exceptions
are `one-shot`, whose predictor ships with the package and which has one trial, `one-shot-8`, which has eight, and
`chameleon+transfer`, whose agent has tuned layers of other networks before: it has a policy, and the measurements of
these for its surrogate (the table shows how long that took).

A block is one layer with one seed: the searches of all tuners, in rotating order, and then all their kernels that
matter timed again, in turns, as cold as between other kernels. Only that gives the quality, since the best of many
noisy measurements looks better than it is. A kernel within `--margin` of the last kernel of `evolutionary` has its
quality. The time to quality of a search is when the first such kernel became its best, by its own measurements. A
search that ends without one is censored: its time is only known to be longer than the whole search.

Blocks are stored in `--json` one by one, the first seed of every layer before the second; the same command continues.
"""

from __future__ import annotations

import argparse
import gc
import json
import math
import os
import platform
import random
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Generator, Iterable, Mapping, Sequence
from contextlib import ExitStack, closing
from dataclasses import asdict, dataclass, replace
from datetime import date
from functools import partial
from importlib.metadata import version
from pathlib import Path
from typing import Any, Protocol

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import numpy as np
import psutil

import models
from bench import pages
from bench.evolutionary import EvolutionaryConfig, EvolutionaryTuner
from bench.one_shot import HELD_OUT
from bench.space import NETWORKS, layers_in
from xrlflow.backends import system_load
from xrlflow.backends.limits import available_cpus
from xrlflow.backends.placement import last_level
from xrlflow.backends.protocol import BackendError
from xrlflow.backends.statistics import median_interval
from xrlflow.backends.tvm import detect
from xrlflow.backends.tvm.fusion.fuse import fuse
from xrlflow.backends.tvm.fusion.tiles import module_of, random_operands
from xrlflow.backends.tvm.kernels.algorithms import Algorithms
from xrlflow.backends.tvm.kernels.layer_kernels import Algorithm
from xrlflow.backends.tvm.toolchain.import_tvm import tvm
from xrlflow.backends.tvm.toolchain.target import Machine
from xrlflow.cost.machine import cpu_name
from xrlflow.storage.exclusive import measuring
from xrlflow.tuning.knobs import Candidate
from xrlflow.tuning.layer_tuning import COLD_PRIVATE_CACHES, LayerMeasurer, LayerTasks
from xrlflow.tuning.layers import Layer
from xrlflow.tuning.pool import Kernel, Pool, PoolOptions
from xrlflow.tuning.session import MakeTuner, Outcomes, tune
from xrlflow.tuning.space import DesignSpace
from xrlflow.tuning.store import Store
from xrlflow.tuning.tasks import Task, extract_tasks, target_text
from xrlflow.tuning.tuners.chameleon import Agent, ChameleonTuner
from xrlflow.tuning.tuners.factory import make_tuner
from xrlflow.tuning.tuners.protocol import Measurement, Method, Tuner
from xrlflow.tuning.worker import Timing

REFERENCE = EvolutionaryTuner.name
TRANSFER = "chameleon+transfer"
TUNERS = (
    "one-shot", "one-shot-8", "chameleon", TRANSFER, "genetic", "annealing", "beam", "random", REFERENCE,
)  # fmt: skip
# Layers of other networks that the agent of `chameleon+transfer` tunes before.
_LESSONS = 9
# Kernels are timed again in so many rounds.
_ROUNDS = 24
# Milliseconds that rounds may take, without what flushes caches, and seconds with it.
_LIMIT, _WHOLE = 10000.0, 60.0
# What a search has found after so many trials is timed again, too.
_EARLY = 16
# Kernels that their own search measured to be slower than the reference's by this factor are not measured again.
_HOPELESS = 1.25
# Assumed seconds of a search if none is recorded, and of measuring again.
_GUESS, _AGAIN = 30.0, 15.0


class Timed(Protocol):
    """A measurer that knows how many seconds it has built and run candidates."""

    @property
    def threads(self) -> int: ...

    @property
    def device(self) -> str | None: ...

    @property
    def flushed(self) -> bool: ...

    @property
    def building(self) -> float: ...

    @property
    def running(self) -> float: ...

    def outcomes(self, task: Task, candidates: Sequence[Candidate], *, until: float) -> Outcomes: ...


Clock = Callable[[], float]


@dataclass(frozen=True, slots=True)
class Improvement:
    """A kernel, by its key, that became the best of a search after `trials` trials and `elapsed` seconds. `seconds`: of
    one call, as the search measured it."""

    trials: int
    elapsed: float
    seconds: float
    kernel: str


@dataclass(frozen=True, slots=True)
class Search:
    """The result of one search. Wall-clock seconds: `total`; of these the tuner took `setup` (sketches and knobs),
    `proposing` and `learning`, the pool `building` and `running`, and the session the others."""

    total: float
    setup: float
    proposing: float
    learning: float
    building: float
    running: float
    trials: int
    failed: int
    improvements: tuple[Improvement, ...]

    @staticmethod
    def of(found: Mapping[str, Any]) -> Search:
        return Search(**{**found, "improvements": tuple(Improvement(**i) for i in found["improvements"])})


@dataclass(frozen=True, slots=True)
class Quality:
    """Kernels timed in turns: milliseconds of the reference's last kernel, and how many times faster than it each
    kernel is, by key, as [median, low, high]. `control`: it against itself."""

    reference_ms: float
    speed: Mapping[str, Sequence[float]]
    control: Sequence[float]

    def of(self, kernel: str) -> float:
        """How many times faster a kernel is than the reference's last one; 0 if it was not timed again."""
        return self.speed[kernel][0] if kernel in self.speed else 0.0


@dataclass(frozen=True, slots=True)
class Block:
    """One layer (`operator`) and seed. `searches`: by tuner, in the order in which they ran. `quality`: None if the
    reference has no kernel. `other`: how many processors other programs used during the searches."""

    operator: str
    seed: int
    flops: float
    searches: Mapping[str, Search]
    quality: Quality | None
    other: float
    disturbed: bool

    @staticmethod
    def of(found: Mapping[str, Any]) -> Block:
        quality = found["quality"]
        searches = {name: Search.of(search) for name, search in found["searches"].items()}
        return Block(
            **{**found, "searches": searches, "quality": None if quality is None else Quality(**quality)}
        )


@dataclass(frozen=True, slots=True)
class Reached:
    """When a search reached a quality. `censored`: it did not, and would have needed more than this."""

    seconds: float
    trials: int
    censored: bool


def reached(block: Block, tuner: str, margin: float) -> Reached | None:
    """When a tuner's best kernel became as good as the reference's last one, less `margin`. None if the reference has
    no kernel."""
    search = block.searches[tuner]
    if block.quality is None:
        return None
    for one in search.improvements:
        if block.quality.of(one.kernel) >= 1 - margin:
            return Reached(one.elapsed, one.trials, False)
    return Reached(search.total, search.trials, True)


def time_ratio(block: Block, tuner: str, margin: float) -> tuple[float, bool] | None:
    """How many times sooner than the reference a tuner reached the reference's quality, and whether that is censored:
    then the ratio is at most this."""
    ours, theirs = reached(block, tuner, margin), reached(block, REFERENCE, margin)
    return None if ours is None or theirs is None else (theirs.seconds / ours.seconds, ours.censored)


def wait_ratio(block: Block, tuner: str, margin: float) -> tuple[float, bool] | None:
    """How many times longer the reference's whole search took than a tuner needed for its quality, and whether the
    tuner's time is censored: then the ratio is at most this. The reference only knows at the end of its trials that it
    had its kernel earlier."""
    ours = reached(block, tuner, margin)
    return None if ours is None else (block.searches[REFERENCE].total / ours.seconds, ours.censored)


def total_ratio(block: Block, tuner: str) -> float:
    """How many times longer the reference's whole search took than the tuner's."""
    return block.searches[REFERENCE].total / block.searches[tuner].total


def quality_ratio(block: Block, tuner: str) -> float | None:
    """How many times faster the tuner's last kernel is than the reference's; None if one of them has none."""
    improvements = block.searches[tuner].improvements
    if block.quality is None or not improvements:
        return None
    return block.quality.of(improvements[-1].kernel)


def part_of_best(block: Block, tuner: str, trials: float = math.inf) -> float | None:
    """The speed of the best kernel by a tuner's own measurements, after so many trials, over that of the best last
    kernel of any; None if it has none."""
    mine = [one for one in block.searches[tuner].improvements if one.trials <= trials]
    if block.quality is None or not mine:
        return None
    last = [search.improvements[-1].kernel for search in block.searches.values() if search.improvements]
    return block.quality.of(mine[-1].kernel) / max(map(block.quality.of, last))


def geometric_mean(values: Sequence[float]) -> float:
    return math.exp(math.fsum(map(math.log, values)) / len(values))


@dataclass(frozen=True, slots=True)
class Aggregate:
    """The geometric mean over operators of the medians over seeds. `low` and `high`: the least and the greatest of the
    means for a single seed. `censored` of the `blocks` are."""

    value: float
    low: float
    high: float
    blocks: int
    censored: int = 0

    def __str__(self) -> str:
        bound = "up to " if self.censored else ""
        return f"{bound}{self.value:.2f} [{self.low:.2f}, {self.high:.2f}]"


def aggregate(
    blocks: Sequence[Block], ratio: Callable[[Block], tuple[float, bool] | None]
) -> Aggregate | None:
    """The aggregate over blocks with this ratio (and whether it is censored); None if there are none."""
    found = [(block, known) for block in blocks if (known := ratio(block)) is not None]
    if not found:
        return None

    def of(key: Callable[[Block], object], inner: Callable[[Sequence[float]], float]) -> list[float]:
        keys = dict.fromkeys(key(block) for block, _ in found)
        return [inner([value for block, (value, _) in found if key(block) == one]) for one in keys]

    by_seed = of(lambda block: block.seed, geometric_mean)
    return Aggregate(
        value=geometric_mean(of(lambda block: block.operator, statistics.median)),
        low=min(by_seed),
        high=max(by_seed),
        blocks=len(found),
        censored=sum(censored for _, (_, censored) in found),
    )


class Watched:
    """A tuner whose time is measured."""

    def __init__(self, tuner: Tuner, clock: Clock) -> None:
        self.name, self.tuner, self._clock = tuner.name, tuner, clock
        self.proposing = self.learning = 0.0

    def propose(self, count: int) -> Sequence[Candidate]:
        start = self._clock()
        found = self.tuner.propose(count)
        self.proposing += self._clock() - start
        return found

    def update(self, measured: Sequence[tuple[Candidate, Measurement]]) -> None:
        start = self._clock()
        self.tuner.update(measured)
        self.learning += self._clock() - start


class Watch:
    """A measurer that records improvements and failures, with their times."""

    def __init__(self, measurer: Timed, clock: Clock) -> None:
        self.threads, self.device, self.flushed = measurer.threads, measurer.device, measurer.flushed
        self.improvements: list[Improvement] = []
        self.kernels: dict[str, Candidate] = {}
        self.trials = self.failed = 0
        self._measurer, self._clock, self._start = measurer, clock, clock()

    def outcomes(
        self, task: Task, candidates: Sequence[Candidate], *, until: float
    ) -> Generator[tuple[int, Measurement], None, None]:
        with closing(self._measurer.outcomes(task, candidates, until=until)) as outcomes:
            for position, outcome in outcomes:
                self._note(candidates[position], outcome)
                yield position, outcome

    def _note(self, candidate: Candidate, outcome: Measurement) -> None:
        self.trials += 1
        self.failed += outcome.error is not None
        best = self.improvements[-1].seconds if self.improvements else math.inf
        if outcome.median < best:
            elapsed = self._clock() - self._start
            self.improvements.append(Improvement(self.trials, elapsed, outcome.median, candidate.key))
            self.kernels[candidate.key] = candidate


def search(
    task: Task,
    make: MakeTuner,
    measurer: Timed,
    *,
    seed: int,
    trials: int,
    batch: int,
    clock: Clock = time.monotonic,
) -> tuple[Search, dict[str, Candidate], Tuner]:
    """One search with a new store: the result, its improvements' kernels, and the tuner afterwards."""
    gc.collect()  # so that no search pays for the garbage of another
    made: list[Watched] = []
    setup = 0.0

    def watched(task: Task, seed: int) -> Tuner:
        nonlocal setup
        start = clock()
        made.append(Watched(make(task, seed), clock))
        setup = clock() - start
        return made[0]

    with tempfile.TemporaryDirectory() as folder, Store(Path(folder) / "tuning.sqlite") as store:
        building, running, start = measurer.building, measurer.running, clock()
        watch = Watch(measurer, clock)
        tune([task], watched, trials=trials, batch=batch, seed=seed, store=store, pool=watch)
        total = clock() - start
    (tuner,) = made
    found = Search(
        total=total, setup=setup, proposing=tuner.proposing, learning=tuner.learning,
        building=measurer.building - building, running=measurer.running - running,
        trials=watch.trials, failed=watch.failed, improvements=tuple(watch.improvements),
    )  # fmt: skip
    return found, watch.kernels, tuner.tuner


def contenders(searches: Mapping[str, Search]) -> list[str]:
    """The kernels, by key, that are timed again, the reference's last first: the last kernel of each search, the best
    one of its first trials, and earlier ones that may be as good as the reference's last. Empty if the reference has
    none."""
    if not searches[REFERENCE].improvements:
        return []
    last = searches[REFERENCE].improvements[-1]
    found = {last.kernel: None}
    for one in searches.values():
        early = [improvement for improvement in one.improvements if improvement.trials <= _EARLY]
        for improvement in one.improvements:
            wanted = improvement is one.improvements[-1] or improvement in early[-1:]
            if wanted or improvement.seconds <= _HOPELESS * last.seconds:
                found[improvement.kernel] = None
    return list(found)


def order(tuners: Sequence[str], seed: int, number: int) -> list[str]:
    """The order in which a block runs the tuners: over the seeds, each is equally often at each position."""
    first = (seed + number) % len(tuners)
    return [*tuners[first:], *tuners[:first]]


@dataclass(frozen=True, slots=True)
class Contestant:
    """A tuner with its task, and what measures its kernels."""

    task: Task
    make: MakeTuner
    measurer: Timed


Compare = Callable[[Sequence[Candidate]], "list[list[float]]"]
"""Times kernels in turns: in each round the seconds of each, then those of the first one again."""


def run_block(
    name: str, seed: int, number: int, contestants: Mapping[str, Contestant], compare: Compare, *,
    trials: int, batch: int, clock: Clock = time.monotonic, read_load: Callable[[], system_load.Reading] | None = None,
) -> Block:  # fmt: skip
    """Make all searches of a layer (number `number` of the bench) with a seed, then compare their kernels."""
    read = read_load or whole_load
    searches: dict[str, Search] = {}
    kernels: dict[str, Candidate] = {}
    before = read()
    for tuner in order(list(contestants), seed, number):
        one = contestants[tuner]
        searches[tuner], found, _ = search(
            one.task, one.make, one.measurer, seed=seed, trials=trials, batch=batch, clock=clock
        )
        kernels |= found
    cpus = psutil.cpu_count() or 1
    others = system_load.judge(before, read(), cpus, cpus)
    keys = contenders(searches)
    return Block(
        operator=name, seed=seed, flops=contestants[REFERENCE].task.flops, searches=searches,
        quality=quality(keys, compare([kernels[key] for key in keys])) if keys else None,
        other=others.other, disturbed=others.disturbed,
    )  # fmt: skip


def quality(keys: Sequence[str], rounds: Sequence[Sequence[float]]) -> Quality:
    """The result of comparing the first of these kernels with itself (at the end of each round) and all others."""
    seconds = np.array(rounds)
    ratios = np.log(seconds[:, :1] / seconds)

    def shown(column: int) -> list[float]:
        return [math.exp(value) for value in median_interval(ratios[:, column])]

    return Quality(
        reference_ms=1e3 * float(np.median(seconds[:, 0])),
        speed={keys[0]: [1.0, 1.0, 1.0], **{key: shown(i) for i, key in enumerate(keys) if i}},
        control=shown(len(keys)),
    )


def in_turns(pool: Pool, target: Any, timing: Timing) -> Compare:
    """Times kernels as in the searches."""

    def compare(candidates: Sequence[Candidate]) -> list[list[float]]:
        with pool.built(target, [candidate.mod for candidate in candidates]) as built:
            kernels = [kernel for kernel in built if isinstance(kernel, Kernel)]
            assert len(kernels) == len(candidates), "a kernel that was measured is built no more"
            found = pool.in_turns([*kernels, kernels[0]], replace(timing, samples=_ROUNDS, limit_ms=_LIMIT))
            if isinstance(found, Measurement):
                raise BackendError(found.error)
            return [list(seconds) for seconds in found]

    return compare


@dataclass(frozen=True, slots=True)
class Stock:
    """Measures schedules of TVM's, which are not checked, on a pool."""

    pool: Pool
    timing: Timing

    @property
    def threads(self) -> int:
        return self.pool.threads

    @property
    def device(self) -> str | None:
        return self.pool.device

    @property
    def flushed(self) -> bool:
        return self.timing.flush

    @property
    def building(self) -> float:
        return self.pool.building

    @property
    def running(self) -> float:
        return self.pool.running

    def outcomes(self, task: Task, candidates: Sequence[Candidate], *, until: float = math.inf) -> Outcomes:
        with self.pool.built(task.target, [candidate.mod for candidate in candidates], until) as built:
            for position, kernel in enumerate(built):
                if isinstance(kernel, Measurement):
                    yield position, kernel
                elif kernel is not None:
                    yield position, self.pool.timed(kernel, self.timing)


class Ours(LayerMeasurer):
    """Measures kernels of ours, which are checked, on a pool."""

    @property
    def building(self) -> float:
        return self._open_pool().building

    @property
    def running(self) -> float:
        return self._open_pool().running


def whole_load() -> system_load.Reading:
    """The counters of `system_load.read`, with the time of all child processes as this process's own."""
    reading = system_load.read()
    own = reading.own
    for child in psutil.Process().children(recursive=True):
        try:
            times = child.cpu_times()
        except psutil.NoSuchProcess:  # it has ended, and its time was added to its parent's
            continue
        own += times.user + times.system + times.children_user + times.children_system
    return replace(reading, own=own)


@dataclass(frozen=True, slots=True)
class Subject:
    """A layer on a machine, as a task of our tuners and of MetaSchedule."""

    layer: Layer
    machine: Machine

    @property
    def tasks(self) -> LayerTasks:
        return LayerTasks([self.layer], self.machine, lambda layer: layer.untuned(self.machine)[0])

    @property
    def timing(self) -> Timing:
        return replace(COLD_PRIVATE_CACHES, others=last_level() if self.layer.far else 0)

    def stock(self) -> Task:
        """Its own kernel, without changes of layout around it."""
        workload, only = self.layer.workload, Algorithms(only=Algorithm.TILES)
        module = fuse(
            module_of(workload, random_operands(workload)), self.machine, channels_last=False, algorithms=only
        )
        tasks = extract_tasks(module, self.machine.target())
        return replace(max(tasks, key=lambda task: task.flops), weight=1)

    def contestant(self, tuner: str, agent: Agent | None, pool: Pool, at_end: ExitStack) -> Contestant:
        """A tuner, which proposes with all cores, since nothing is measured meanwhile."""
        if tuner == REFERENCE:
            config = EvolutionaryConfig(threads=available_cpus())
            return Contestant(
                self.stock(), partial(EvolutionaryTuner, config=config), Stock(pool, self.timing)
            )
        method = Method.CHAMELEON if tuner == TRANSFER else Method(tuner)
        make = partial(self._tuner, method, agent if tuner == TRANSFER else None)
        tasks = self.tasks
        return Contestant(tasks.tasks[0], make, Ours(tasks, pool.options, at_end, pool))

    def _tuner(self, method: Method, agent: Agent | None, task: Task, seed: int) -> Tuner:
        return make_tuner(method, DesignSpace.of(self.layer, self.machine), seed, agent=agent)


def some_layers(names: Sequence[str], count: int, machine: Machine) -> dict[str, Subject]:
    """Layers of networks that are drawn, by name."""
    known: dict[str, tuple[str, Layer]] = {}
    for name in names:
        for layer in layers_in(models.build(name), machine):
            if isinstance(layer, Layer):
                known.setdefault(layer.key, (name, layer))
    drawn_keys = random.Random(0).sample(sorted(known), min(count, len(known)))
    found: dict[str, Subject] = {}
    for source, layer in (known[key] for key in drawn_keys):
        title = f"{layer.name}{', weights from memory' if layer.far else ''} ({source})"
        steps = f" {len(layer.workload.steps)} steps" if title in found else ""
        found[title + steps] = Subject(layer, machine)
    return found


@dataclass(frozen=True, slots=True)
class Training:
    """The training of the agent of `chameleon+transfer`: seconds and trials."""

    seconds: float
    trials: int
    operators: tuple[str, ...]


def train_agent(
    lessons: Mapping[str, Callable[[Agent | None], Contestant]], path: Path, *,
    trials: int, batch: int, clock: Clock = time.monotonic,
) -> Training:  # fmt: skip
    """Tune layers, given as the tuner with an agent on each, in turn, and save the agent. Each search knows the
    measurements of earlier ones."""
    agent: Agent | None = None
    start, spent = clock(), 0
    for lesson in lessons.values():
        one = lesson(agent)
        found, _, tuner = search(
            one.task, one.make, one.measurer, seed=0, trials=trials, batch=batch, clock=clock
        )
        assert isinstance(tuner, ChameleonTuner)
        agent, spent = tuner.agent, spent + found.trials
    if agent is not None:
        agent.save(path)
    return Training(clock() - start, spent, tuple(lessons))


# The file of a run.


class Results:
    """The blocks of a run, in a file that is complete at any time."""

    def __init__(self, path: Path | None, setting: Mapping[str, Any], foreign: bool = False) -> None:
        """`foreign`: accept any setting in the file. Raises SystemExit for a file with another setting."""
        self._path = path
        self.setting = dict(setting)
        self.training: Training | None = None
        self.blocks: list[Block] = []
        if path is None or not path.exists():
            return
        stored = json.loads(path.read_text())
        differ = [k for k in setting if stored["setting"].get(k) != setting[k]]
        if differ and not foreign:
            raise SystemExit(f"{path} was measured with other {', '.join(differ)}: give another file")
        self.setting = stored["setting"]
        if stored["training"] is not None:
            self.training = Training(
                **{**stored["training"], "operators": tuple(stored["training"]["operators"])}
            )
        self.blocks = [Block.of(block) for block in stored["blocks"]]

    def missing(self, operators: Iterable[str], seeds: int, tuners: Sequence[str]) -> list[tuple[str, int]]:
        """The blocks (operator, seed) without all of these tuners; all of one seed before the next."""
        there = {(b.operator, b.seed) for b in self.blocks if set(tuners) <= set(b.searches)}
        names = list(operators)
        return [(name, seed) for seed in range(seeds) for name in names if (name, seed) not in there]

    def put(self, block: Block) -> None:
        """Store a block in place of an older one."""
        self.blocks = [b for b in self.blocks if (b.operator, b.seed) != (block.operator, block.seed)] + [
            block
        ]
        self.write()

    def write(self) -> None:
        if self._path is None:
            return
        self._path.parent.mkdir(parents=True, exist_ok=True)
        content = {
            "setting": self.setting,
            "training": None if self.training is None else asdict(self.training),
            "blocks": [asdict(block) for block in self.blocks],
        }
        part = self._path.with_name(f"{self._path.name}.part")
        part.write_text(json.dumps(content, indent=1))
        part.replace(self._path)

    def seconds(self, tuners: Sequence[str]) -> float:
        """The expected seconds of the searches of a block, from those that are recorded."""
        known = [b.searches[t].total for b in self.blocks for t in tuners if t in b.searches]
        return len(tuners) * (statistics.fmean(known) if known else _GUESS)


# Tables.


def spread(values: Sequence[float], form: str = ".1f") -> str:
    """The median, with the least and the greatest in brackets."""
    shown = format(statistics.median(values), form)
    return shown if len(values) == 1 else f"{shown} [{min(values):{form}}, {max(values):{form}}]"


def operator_table(blocks: Sequence[Block], tuners: Sequence[str], margin: float) -> str:
    """The searches for one operator over the seeds, in Markdown."""
    lines = [
        "| tuner | search s | set up, propose, learn, build, run s | failed | GFLOP/s | s to quality "
        "| trials to quality |",
        "|---" * 7 + "|",
    ]
    for tuner in tuners:
        mine = [b for b in blocks if tuner in b.searches]
        if not mine:
            continue
        found = [b.searches[tuner] for b in mine]
        parts = [
            f"{statistics.median(getattr(s, part) for s in found):.1f}"
            for part in ("setup", "proposing", "learning", "building", "running")
        ]
        rates = [
            b.flops / (b.quality.reference_ms * 1e6) * q
            for b in mine
            if b.quality is not None and (q := quality_ratio(b, tuner)) is not None
        ]
        times = [r for b in mine if (r := reached(b, tuner, margin)) is not None]
        lines.append(
            f"| {tuner} | {spread([s.total for s in found])} | {', '.join(parts)} "
            f"| {sum(s.failed for s in found)} of {sum(s.trials for s in found)} "
            f"| {spread(rates) if rates else '-'} | {_shown([(r.seconds, r.censored) for r in times])} "
            f"| {_shown([(float(r.trials), r.censored) for r in times], '.0f')} |"
        )
    return "\n".join(lines)


def _shown(times: Sequence[tuple[float, bool]], form: str = ".1f") -> str:
    """Times of which some are lower bounds. These are marked with >."""
    if not times:
        return "-"
    missed = sum(censored for _, censored in times)
    ordered = sorted(times)
    # Censored times count as the slowest. Their order is unknown.
    ranked = sorted(times, key=lambda entry: (entry[1], entry[0]))
    middle = ranked[len(ranked) // 2] if len(ranked) % 2 else ranked[len(ranked) // 2 - 1]
    text = f"{'>' if middle[1] else ''}{middle[0]:{form}}"
    if len(times) > 1:
        text += f" [{ordered[0][0]:{form}}, {'>' if missed else ''}{ordered[-1][0]:{form}}]"
    return text + (f", {missed} of {len(times)} never" if missed else "")


def summary_table(blocks: Sequence[Block], tuners: Sequence[str], margin: float) -> str:
    """The geometric means over operators, in Markdown."""
    lines = [
        f"| tuner | {REFERENCE}'s time to its quality over the tuner's | reached it | {REFERENCE}'s search time over "
        "the tuner's to that quality | and over the tuner's search time | kernel at equal trials |",
        "|---" * 6 + "|",
    ]
    for tuner in tuners:
        mine = [b for b in blocks if tuner in b.searches and REFERENCE in b.searches]
        times = aggregate(mine, lambda b, t=tuner: time_ratio(b, t, margin))
        waits = aggregate(mine, lambda b, t=tuner: wait_ratio(b, t, margin))
        totals = aggregate(mine, lambda b, t=tuner: (total_ratio(b, t), False))
        kernels = aggregate(mine, lambda b, t=tuner: None if not (q := quality_ratio(b, t)) else (q, False))
        count = f"{times.blocks - times.censored} of {times.blocks}" if times else "-"
        lines.append(
            f"| {tuner} | {times or '-'} | {count} | {waits or '-'} | {totals or '-'} | {kernels or '-'} |"
        )
    return "\n".join(lines)


def best_table(blocks: Sequence[Block], tuners: Sequence[str]) -> str:
    """How near tuners come to the best kernel that any found, and how long their searches take, in Markdown."""
    lines = [
        f"| tuner | its kernel over the best of any | after {_EARLY} measurements | search s |", "|---|---|---|---|",
    ]  # fmt: skip

    def parts(mine: Sequence[Block], tuner: str, trials: float) -> str:
        names = dict.fromkeys(block.operator for block in mine)
        found = [
            statistics.median(values)
            for name in names
            if (values := [p for b in mine if b.operator == name and (p := part_of_best(b, tuner, trials))])
        ]
        return f"{statistics.median(found):.3f} [{min(found):.3f}, {max(found):.3f}]" if found else "-"

    for tuner in tuners:
        mine = [block for block in blocks if tuner in block.searches]
        seconds = [block.searches[tuner].total for block in mine]
        lines.append(
            f"| {tuner} | {parts(mine, tuner, math.inf)} | {parts(mine, tuner, _EARLY)} "
            f"| {spread(seconds) if seconds else '-'} |"
        )
    return "\n".join(lines)


def tables(results: Results, tuners: Sequence[str], margin: float) -> str:
    """All tables of a file."""
    setting, blocks = results.setting, results.blocks
    disturbed = [b for b in blocks if b.disturbed]
    controls = [abs(math.log(b.quality.control[0])) for b in blocks if b.quality]
    text = [
        ", ".join(f"{key} {value}" for key, value in setting.items()),
        f"{len(blocks)} blocks; {len(disturbed)} beside other load (a star); medians over seeds with the least and the "
        f"greatest in brackets. Kernels are timed in turns; the reference's against itself is off by "
        f"{100 * (math.exp(statistics.median(controls)) - 1):.1f}%, {100 * (math.exp(max(controls)) - 1):.1f}% at most."
        if controls else f"{len(blocks)} blocks",
    ]  # fmt: skip
    if results.training is not None:
        done = results.training
        text.append(
            f"The agent of {TRANSFER} had {done.trials} trials of {', '.join(done.operators)}: {done.seconds:.0f} s."
        )
    if blocks:
        text += [
            "", "Medians over layers of the medians over seeds; the worst and the best layer.", "",
            best_table(blocks, tuners), "",
            "Geometric means over layers of the medians over seeds; in brackets the least and the greatest of one "
            f"seed. Who never comes within {100 * margin:g}% of {REFERENCE}'s kernel counts with the time of the whole "
            'search ("up to").', "", summary_table(blocks, tuners, margin),
        ]  # fmt: skip
    for name in dict.fromkeys(b.operator for b in blocks):
        mine = sorted((b for b in blocks if b.operator == name), key=lambda b: b.seed)
        star = " *" if any(b in disturbed for b in mine) else ""
        text += ["", f"{name}{star}, {len(mine)} seeds:", "", operator_table(mine, tuners, margin)]
    return "\n".join(text)


def setting_of(arguments: argparse.Namespace) -> dict[str, Any]:
    """What results depend on. A file has results of one setting."""
    return {
        "machine": cpu_name(), "system": platform.system(), "tvm": str(tvm().__version__),
        "xgboost": version("xgboost-cpu"), "torch": version("torch"),
        "target": target_text(detect(cores=arguments.threads).target()),
        "cores": os.cpu_count(), "threads": arguments.threads, "trials": arguments.trials, "batch": arguments.batch,
    }  # fmt: skip


def measure(arguments: argparse.Namespace, results: Results) -> None:
    """Measure the missing blocks, until the time limit."""
    import torch  # noqa: F401  (nobody's search pays for loading it)
    import xgboost  # noqa: F401

    machine, began = detect(cores=arguments.threads), time.monotonic()
    subjects = some_layers(HELD_OUT, arguments.layers, machine)
    missing = results.missing(subjects, arguments.seeds, arguments.tuners)

    def expected() -> float:
        return len(missing) * (results.seconds(arguments.tuners) + _AGAIN)

    print(f"{len(missing)} blocks to take, about {expected() / 60:.0f} minutes", file=sys.stderr, flush=True)
    with ExitStack() as at_end:
        at_end.enter_context(measuring(lambda holder: print(f"waiting: {holder}", file=sys.stderr)))
        options = PoolOptions(threads=arguments.threads, timing=COLD_PRIVATE_CACHES, run_seconds=_WHOLE)
        pool = at_end.enter_context(Pool(options))
        pool.settle()
        agent = None
        if TRANSFER in arguments.tuners and missing:
            agent = agent_of(arguments, results, machine, pool, at_end)
        while missing:
            name, seed = missing.pop(0)
            subject = subjects[name]
            contestants = {
                tuner: subject.contestant(tuner, agent, pool, at_end) for tuner in arguments.tuners
            }
            block = run_block(
                name, seed, list(subjects).index(name), contestants,
                in_turns(pool, machine.target(), subject.timing), trials=arguments.trials, batch=arguments.batch,
            )  # fmt: skip
            results.put(block)
            took = time.monotonic() - began
            print(
                f"{name}, seed {seed}{' *' if block.disturbed else ''}: "
                + ", ".join(f"{t} {s.total:.0f} s" for t, s in block.searches.items())
                + f"; {took / 60:.1f} minutes so far, {len(missing)} blocks and {expected() / 60:.0f} minutes to go",
                file=sys.stderr,
                flush=True,
            )
            if took > arguments.time_limit:
                print("the time limit is reached; the same command goes on", file=sys.stderr)
                return


def agent_of(
    arguments: argparse.Namespace, results: Results, machine: Machine, pool: Pool, at_end: ExitStack
) -> Agent:
    """The agent that was trained on layers of other networks: a stored one, or a new one."""
    with tempfile.TemporaryDirectory() as folder:
        beside = arguments.json.with_suffix(".agent") if arguments.json else Path(folder) / "agent"
        if results.training is None or not beside.exists():
            beside.parent.mkdir(parents=True, exist_ok=True)
            others = [name for name in NETWORKS if name not in HELD_OUT]
            lessons = {
                name: partial(subject.contestant, TRANSFER, pool=pool, at_end=at_end)
                for name, subject in some_layers(others, _LESSONS, machine).items()
            }
            results.training = train_agent(
                lessons, beside, trials=arguments.training_trials, batch=arguments.batch
            )
            results.write()
        return Agent.load(beside)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--layers", type=int, default=12, help="that are drawn (12)")
    parser.add_argument("--tuners", type=lambda text: text.split(","), default=list(TUNERS))
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--trials", type=int, default=64, help="of each search")
    parser.add_argument("--batch", type=int, default=16, help="trials between which a tuner learns")
    parser.add_argument("--threads", type=int, default=1, help="that kernels run with")
    parser.add_argument(
        "--training-trials", type=int, default=64, help=f"for each layer that {TRANSFER} learns on"
    )
    parser.add_argument("--margin", type=float, default=0.01, help="what is within it is of one quality")
    parser.add_argument(
        "--time-limit", type=float, default=math.inf, help="seconds; the block at work is finished"
    )
    parser.add_argument("--json", type=Path, help="blocks are kept here, and resumed")
    parser.add_argument("--tables", action="store_true", help="measure nothing: only what the file has")
    parser.add_argument("--write", action="store_true", help="put the tables into docs/benchmarks")
    arguments = parser.parse_args()
    if REFERENCE not in arguments.tuners or not set(arguments.tuners) <= set(TUNERS):
        parser.error(
            f"the tuners are {', '.join(TUNERS)}, and {REFERENCE} is one that others are compared with"
        )
    results = Results(arguments.json, setting_of(arguments), foreign=arguments.tables)
    if not arguments.tables:
        measure(arguments, results)
    text = f"{date.today().isoformat()}: {tables(results, arguments.tuners, arguments.margin)}"
    print(text)
    if arguments.write:
        pages.write("tuners", text)


if __name__ == "__main__":
    main()
