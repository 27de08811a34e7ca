"""The bench that compares tuners, on times that are made up: nothing is built."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Generator, Mapping, Sequence
from pathlib import Path

import pytest

from bench import tuning as bench
from tests.tuning.measured import MACHINE
from tests.tuning.problems import matmul
from tests.tuning.spaces import PRODUCT, TINY, MadeUp, space_of
from xrlflow.backends.system_load import Reading
from xrlflow.tuning.knobs import Candidate
from xrlflow.tuning.tasks import Task
from xrlflow.tuning.tuners.chameleon import Agent
from xrlflow.tuning.tuners.factory import make_tuner
from xrlflow.tuning.tuners.protocol import Measurement, Method, Tuner

pytestmark = pytest.mark.learns

REFERENCE = bench.REFERENCE


def made(total: float, *improvements: tuple[int, float, float, str]) -> bench.Search:
    found = tuple(bench.Improvement(*one) for one in improvements)
    return bench.Search(total, 1.0, 2.0, 3.0, 4.0, 5.0, trials=64, failed=1, improvements=found)


def block(
    searches: Mapping[str, bench.Search], speed: Mapping[str, float], operator: str = "A", seed: int = 0
) -> bench.Block:
    found = {kernel: (value, value, value) for kernel, value in speed.items()}
    quality = bench.Quality(2.0, found, (1.0, 0.99, 1.01))
    return bench.Block(operator, seed, 4e9, searches, quality, 0.0, False)


# The reference ends after 40 s with z, and had as good a one, y, after 20 s. By its own measurements beam has passed it
# with p after 5 s, but p is slow when it is measured again; with q it really does, after 10 s.
REACHES = block(
    {
        REFERENCE: made(40.0, (1, 2.0, 9e-3, "x"), (30, 20.0, 2.1e-3, "y"), (60, 38.0, 2e-3, "z")),
        "beam": made(25.0, (3, 5.0, 1.9e-3, "p"), (20, 10.0, 1.8e-3, "q"), (50, 22.0, 1.7e-3, "r")),
        "random": made(16.0, (4, 6.0, 3e-3, "s")),
    },
    {"z": 1.0, "y": 0.995, "p": 0.9, "q": 1.2, "r": 1.25, "s": 0.7},
)


def test_quality_is_reached_when_what_is_measured_again_is_as_good() -> None:
    assert bench.reached(REACHES, "beam", 0.01) == bench.Reached(10.0, 20, False)
    assert bench.reached(REACHES, REFERENCE, 0.01) == bench.Reached(20.0, 30, False)
    # Without a margin only the last kernel is as good as the last.
    assert bench.reached(REACHES, REFERENCE, 0.0) == bench.Reached(38.0, 60, False)
    assert bench.time_ratio(REACHES, "beam", 0.01) == (2.0, False)
    # The reference's 40 s search over the 10 s that this one took to be as good.
    assert bench.wait_ratio(REACHES, "beam", 0.01) == (4.0, False)
    assert bench.wait_ratio(REACHES, "random", 0.01) == (40.0 / 16.0, True)
    row = bench.summary_table([REACHES], ["beam"], 0.01).splitlines()[-1]
    assert [cell.split()[0] for cell in row.split(" | ")[1:]] == ["2.00", "1", "4.00", "1.60", "1.25"]


def test_who_never_comes_there_is_censored_at_the_end_of_its_search() -> None:
    assert bench.reached(REACHES, "random", 0.01) == bench.Reached(16.0, 64, True)
    assert bench.time_ratio(REACHES, "random", 0.01) == (20.0 / 16.0, True)
    table = bench.operator_table([REACHES], ["random", "beam"], 0.01)
    assert "| >16.0, 1 of 1 never | >64, 1 of 1 never |" in table
    assert "| 10.0 | 20 |" in table


def test_quality_is_that_of_the_last_kernel_measured_again() -> None:
    assert bench.quality_ratio(REACHES, "beam") == 1.25
    assert bench.quality_ratio(REACHES, "random") == 0.7
    assert bench.total_ratio(REACHES, "beam") == 40.0 / 25.0
    # 4 GFLOP in 2 ms, and in 2 ms / 1.25.
    assert f"| {4e9 / 2e-3 / 1e9:.1f} |" in bench.operator_table([REACHES], [REFERENCE], 0.01)
    assert f"| {1.25 * 4e9 / 2e-3 / 1e9:.1f} |" in bench.operator_table([REACHES], ["beam"], 0.01)


def test_a_search_without_a_kernel_is_no_zero_in_a_mean() -> None:
    nothing = block({REFERENCE: made(40.0, (60, 38.0, 2e-3, "z")), "beam": made(25.0)}, {"z": 1.0})
    assert bench.quality_ratio(nothing, "beam") is None
    assert bench.time_ratio(nothing, "beam", 0.01) == (38.0 / 25.0, True)
    assert "beam" in bench.summary_table([nothing], [REFERENCE, "beam"], 0.01)


def test_the_middle_of_times_of_which_some_are_bounds_is_one_when_most_are() -> None:
    assert bench._shown([(10.0, False), (16.0, True), (30.0, False)]) == "30.0 [10.0, >30.0], 1 of 3 never"
    assert bench._shown([(10.0, False), (16.0, True), (17.0, True)]) == ">16.0 [10.0, >17.0], 2 of 3 never"


def ratios(values: Mapping[tuple[str, int], tuple[float, bool]]) -> bench.Aggregate | None:
    search = {REFERENCE: made(1.0)}
    blocks = [block(search, {}, operator, seed) for operator, seed in values]
    return bench.aggregate(blocks, lambda b: values[b.operator, b.seed])


def test_aggregates_are_geometric_means_over_operators_of_medians_over_seeds() -> None:
    found = ratios(
        {
            ("A", 0): (1.0, False), ("A", 1): (2.0, False), ("A", 2): (50.0, True),
            ("B", 0): (4.0, False), ("B", 1): (8.0, False), ("B", 2): (2.0, False),
        }
    )  # fmt: skip
    assert found is not None
    assert found.value == pytest.approx(math.sqrt(2.0 * 4.0))
    # By seed: of 1 and 4, of 2 and 8, of 50 and 2.
    assert (found.low, found.high) == pytest.approx((2.0, 10.0))
    assert (found.blocks, found.censored) == (6, 1)
    assert str(found).startswith("up to 2.83 ")
    assert bench.aggregate([], lambda b: (1.0, False)) is None


def test_measured_again_is_what_may_matter() -> None:
    keys = bench.contenders(
        {
            "beam": made(9.0, (1, 1.0, 9e-3, "slow"), (2, 2.0, 2.4e-3, "near"), (3, 3.0, 1e-3, "best")),
            REFERENCE: made(9.0, (1, 1.0, 8e-3, "slow too"), (3, 3.0, 2e-3, "last")),
            "random": made(9.0, (1, 1.0, 7e-3, "hopeless, but its last")),
        }
    )
    assert keys[0] == "last"
    assert sorted(keys[1:]) == ["best", "hopeless, but its last", "near"]
    assert bench.contenders({REFERENCE: made(9.0)}) == []


def test_every_tuner_has_every_place() -> None:
    tuners = ["a", "b", "c"]
    for number in range(2):
        orders = [bench.order(tuners, seed, number) for seed in range(3)]
        assert [sorted(place) for place in zip(*orders)] == [tuners] * 3


class Clock:
    """Seconds that pass only when somebody says so."""

    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


class Measurer:
    """A second to build each, two to run; every seventh fails. Of two kernels the one with the lesser key is faster."""

    threads = 2
    device: str | None = None
    flushed = False

    def __init__(self, clock: Clock) -> None:
        self.building = self.running = 0.0
        self.seen: list[list[str]] = []
        self._clock = clock

    def outcomes(
        self, task: Task, candidates: Sequence[Candidate], *, until: float
    ) -> Generator[tuple[int, Measurement], None, None]:
        self.seen.append([candidate.key for candidate in candidates])
        self._clock.now += len(candidates)
        self.building += len(candidates)
        for position, candidate in enumerate(candidates):
            self._clock.now += 2
            self.running += 2
            failed = int(candidate.key) % 7 == 6
            yield (
                position,
                Measurement(error="no") if failed else Measurement((1e-3 + 1e-6 * int(candidate.key),)),
            )


class Falling:
    """Proposes falling numbers, by so much a time: a second for a proposal, a half to learn."""

    def __init__(self, name: str, task: Task, seed: int, stride: int, clock: Clock) -> None:
        self.name, self._task, self._stride, self._clock = name, task, stride, clock
        self._next = 1000 + seed
        self.told = 0

    def propose(self, count: int) -> Sequence[Candidate]:
        self._clock.now += 1
        found = []
        for _ in range(count):
            found.append(Candidate(None, [[], []], self._task.mod, str(self._next)))
            self._next -= self._stride
        return found

    def update(self, measured: Sequence[tuple[Candidate, Measurement]]) -> None:
        self._clock.now += 0.5
        self.told += len(measured)


def maker(name: str, stride: int, clock: Clock) -> bench.MakeTuner:
    def make(task: Task, seed: int) -> Tuner:
        clock.now += 3  # to set up
        return Falling(name, task, seed % 5, stride, clock)

    return make


def compare(kernels: Sequence[Candidate]) -> list[list[float]]:
    """As they were measured, without noise."""
    times = [1e-3 + 1e-6 * int(kernel.key) for kernel in kernels]
    return [[*times, times[0]]] * 8


def run(seed: int = 0) -> tuple[bench.Block, Measurer]:
    clock = Clock()
    measurer = Measurer(clock)
    contestants = {
        name: bench.Contestant(matmul(), maker(name, stride, clock), measurer)
        for name, stride in ((REFERENCE, 1), ("beam", 3))
    }
    found = bench.run_block(
        "A", seed, 0, contestants, compare, trials=20, batch=8, clock=clock,
        read_load=lambda: Reading(0.0, 0.0, 0.0, clock.now),
    )  # fmt: skip
    return found, measurer


@pytest.mark.whole
def test_a_block_says_where_the_time_went() -> None:
    found, measurer = run()
    theirs = found.searches[REFERENCE]
    # 20 trials of three seconds, proposed and learned from in batches of 8, 8 and (a proposal of 8 in part) 4.
    assert (theirs.setup, theirs.proposing, theirs.learning) == (3.0, 3.0, 1.5)
    assert (theirs.building, theirs.running) == (20.0, 40.0)
    assert theirs.total == 3.0 + 3.0 + 1.5 + 60.0
    assert theirs.trials == 20
    assert theirs.failed > 0
    assert len(measurer.seen) == 6


@pytest.mark.whole
def test_a_block_compares_what_its_searches_found() -> None:
    found, _ = run()
    beam, theirs = found.searches["beam"], found.searches[REFERENCE]
    first, last = beam.improvements[0], beam.improvements[-1]
    # The first kernel is known when it and the seven others are built and it has run: 3 + 1 + 8 + 2 seconds.
    assert (first.elapsed, first.trials) == (14.0, 1)
    keys = [int(one.kernel) for one in beam.improvements]
    assert keys == sorted(keys, reverse=True)
    assert all(key % 7 != 6 for key in keys)
    goal = int(theirs.improvements[-1].kernel)
    expected = next(one for one in beam.improvements if 1e-3 + 1e-6 * int(one.kernel) <= 1e-3 + 1e-6 * goal)
    assert bench.reached(found, "beam", 0.0) == bench.Reached(expected.elapsed, expected.trials, False)
    assert expected.trials < theirs.improvements[-1].trials
    faster = (1e-3 + 1e-6 * goal) / (1e-3 + 1e-6 * int(last.kernel))
    assert bench.quality_ratio(found, "beam") == pytest.approx(faster)
    assert faster > 1


@pytest.mark.whole
def test_searches_know_nothing_of_each_other() -> None:
    """Every search measures its own trials: nothing is taken from another's records."""
    _, measurer = run()
    searches = [
        [key for keys in batches for key in keys] for batches in (measurer.seen[:3], measurer.seen[3:])
    ]
    assert [len(keys) for keys in searches] == [20, 20]
    assert set(searches[0]) & set(searches[1])


SETTING = {"machine": "here", "trials": 20}


@pytest.mark.whole
def test_a_run_goes_on_where_it_was(tmp_path: Path) -> None:
    file = tmp_path / "new" / "tuning.json"
    tuners = [REFERENCE, "beam"]
    results = bench.Results(file, SETTING)
    # The first seed of every operator comes before the second.
    everything = [("A", 0), ("B", 0), ("A", 1), ("B", 1)]
    assert results.missing("AB", 2, tuners) == everything
    first, _ = run()
    results.put(first)
    again = bench.Results(file, SETTING)
    assert again.blocks == [json_of(first)]
    assert again.missing("AB", 2, tuners) == everything[1:]
    # What lacks a tuner is taken again as a whole.
    assert again.missing("AB", 1, [*tuners, "random"]) == everything[:2]
    assert bench.tables(again, tuners, 0.01) == bench.tables(results, tuners, 0.01)
    assert [path.name for path in file.parent.iterdir()] == [file.name]


def json_of(block: bench.Block) -> bench.Block:
    return bench.Block.of(json.loads(json.dumps(bench.asdict(block))))


@pytest.mark.whole
def test_a_block_is_kept_once(tmp_path: Path) -> None:
    results = bench.Results(tmp_path / "x.json", SETTING)
    for _ in range(2):
        results.put(run()[0])
    results.put(run(seed=1)[0])
    assert [(b.operator, b.seed) for b in bench.Results(tmp_path / "x.json", SETTING).blocks] == [
        ("A", 0),
        ("A", 1),
    ]


@pytest.mark.whole
def test_another_setting_is_another_file(tmp_path: Path) -> None:
    results = bench.Results(tmp_path / "x.json", SETTING)
    results.put(run()[0])
    with pytest.raises(SystemExit, match="other trials"):
        bench.Results(tmp_path / "x.json", {**SETTING, "trials": 64})
    assert bench.Results(tmp_path / "x.json", {}, foreign=True).setting == SETTING


@pytest.mark.whole
def test_tables_of_nothing_and_of_a_block(tmp_path: Path) -> None:
    results = bench.Results(None, SETTING)
    assert "0 blocks" in bench.tables(results, [REFERENCE], 0.01)
    results.put(run()[0])
    text = bench.tables(results, [REFERENCE, "beam"], 0.01)
    row = next(line for line in text.splitlines() if line.startswith("| beam | ") and " of 1 |" in line)
    assert row.startswith(f"| beam | {bench.time_ratio(results.blocks[0], 'beam', 0.01)[0]:.2f} ")  # type: ignore[index]


@pytest.mark.whole
def test_an_agent_learns_on_one_operator_after_the_other(tmp_path: Path) -> None:
    class Numbers(Measurer):
        """For candidates whose keys are no numbers."""

        def outcomes(
            self, task: Task, candidates: Sequence[Candidate], *, until: float
        ) -> Generator[tuple[int, Measurement], None, None]:
            for position, candidate in enumerate(candidates):
                self._clock.now += 1
                yield position, Measurement((1e-3 + 1e-4 * sum(candidate.vector or ()),))

    clock = Clock()

    def lesson(layer: MadeUp) -> Callable[[Agent | None], bench.Contestant]:
        task = Task(layer.name, None, MACHINE.target(), 1, layer.name)

        def with_agent(agent: Agent | None) -> bench.Contestant:
            def make(task: Task, seed: int) -> Tuner:
                return make_tuner(Method.CHAMELEON, space_of(layer), seed, agent=agent)

            return bench.Contestant(task, make, Numbers(clock))

        return with_agent

    lessons = {"A": lesson(PRODUCT), "B": lesson(TINY)}
    done = bench.train_agent(lessons, tmp_path / "agent", trials=24, batch=12, clock=clock)
    assert (done.trials, done.seconds, done.operators) == (48, 48.0, ("A", "B"))
    one = bench.train_agent({"A": lessons["A"]}, tmp_path / "one", trials=24, batch=12, clock=clock)
    assert one.trials == 24
    assert Agent.load(tmp_path / "agent").updates > Agent.load(tmp_path / "one").updates > 0


def test_a_kernel_is_compared_with_the_best_of_any() -> None:
    assert bench.part_of_best(REACHES, "random") == pytest.approx(0.7 / 1.25)
    assert bench.part_of_best(REACHES, "beam") == 1.0
    assert bench.part_of_best(REACHES, "beam", trials=3) == pytest.approx(0.9 / 1.25)
    assert bench.part_of_best(REACHES, "beam", trials=2) is None
    table = bench.best_table([REACHES], ["beam", "random"])
    assert "| beam | 1.000 [1.000, 1.000] | 0.720 [0.720, 0.720] | 25.0 |" in table
