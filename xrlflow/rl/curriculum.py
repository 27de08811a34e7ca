"""What an agent that is meant to work everywhere is trained on: graphs from several sources, some of them held out.

A `Source` is a named recipe for a graph. This package has none: the zoo at small depth, valleys, and random graphs made
of the rules' left-hand sides come from outside (`bench/agents.py` puts them together). A `Curriculum` is drawn from
them by group, and makes their problems in each worker's own process, only as they are asked for.
"""

from __future__ import annotations

import hashlib
import math
import random
from collections import OrderedDict, defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import overload

from xrlflow.cost import Machine, Roofline
from xrlflow.ir import Graph
from xrlflow.rewrite import AnyRule, Library, RewriteState
from xrlflow.rewrite.state import Delta
from xrlflow.rl.env import Problem
from xrlflow.rl.features import Featuriser, Observation, Vocabulary
from xrlflow.rl.situation import Situation
from xrlflow.rl.workers import Task
from xrlflow.search import Limits, random_walk, simplify


class CurriculumError(ValueError):
    """A curriculum cannot be made of these sources; the message says why."""


@dataclass(frozen=True, slots=True)
class Source:
    """A graph that can be built in any process: `build` and `machine` are pickled on their way there.

    `group` says what kind of graph it is: a curriculum draws by it. Episodes begin after `scrambled` random
    substitutions, whose undoing is then worth something. Costs are those of the roofline on what `machine` gives.
    Rules of the names in `without` are off.
    """

    name: str
    group: str
    build: Callable[[], Graph]
    scrambled: int = 0
    machine: Callable[[], Machine] = Machine.reference
    without: frozenset[str] = frozenset()


def split(sources: Iterable[Source], part: float) -> tuple[tuple[Source, ...], tuple[Source, ...]]:
    """Sources to train on, and about this part of them to hold out.

    The name alone decides, so that a source stays on its side whatever else there is.
    """
    if not 0 <= part <= 1:
        raise CurriculumError(f"the part to hold out is between 0 and 1, not {part:g}")
    train: list[Source] = []
    held_out: list[Source] = []
    for source in sources:
        digest = hashlib.blake2b(source.name.encode(), digest_size=8).digest()
        drawn = int.from_bytes(digest, "big") / 2**64
        (held_out if drawn < part else train).append(source)
    return tuple(train), tuple(held_out)


def mixed(
    sources: Iterable[Source], shares: Mapping[str, float], count: int, seed: int = 0
) -> tuple[Source, ...]:
    """About `count` sources, drawn group by group in these shares; of a group that has fewer, all of them.

    Raises CurriculumError if a group is not there or no share is positive.
    """
    groups: dict[str, list[Source]] = defaultdict(list)
    for source in sources:
        groups[source.group].append(source)
    if missing := sorted(shares.keys() - groups.keys()):
        raise CurriculumError(
            f"no source is of the group {missing[0]!r}; there are: {', '.join(sorted(groups))}"
        )
    total = math.fsum(shares.values())
    if total <= 0 or min(shares.values()) < 0:
        raise CurriculumError("shares have to be positive")
    rng = random.Random(seed)
    chosen: list[Source] = []
    for group, share in shares.items():
        wanted = round(count * share / total)
        chosen += rng.sample(groups[group], min(wanted, len(groups[group])))
    return tuple(chosen)


class Problems(Sequence[Problem]):
    """Problems that are made when they are asked for; those that were asked for last are kept."""

    def __init__(self, sources: Sequence[Source], make: Callable[[Source], Problem], kept: int) -> None:
        self.sources = tuple(sources)
        self._make = make
        self._kept = kept
        self._made: OrderedDict[int, Problem] = OrderedDict()

    def __len__(self) -> int:
        return len(self.sources)

    @overload
    def __getitem__(self, index: int) -> Problem: ...
    @overload
    def __getitem__(self, index: slice) -> Sequence[Problem]: ...
    def __getitem__(self, index: int | slice) -> Problem | Sequence[Problem]:
        if isinstance(index, slice):
            return [self[i] for i in range(*index.indices(len(self)))]
        if not -len(self) <= index < len(self):
            raise IndexError(index)
        index %= len(self)
        problem = self._made.pop(index, None) or self._make(self.sources[index])
        self._made[index] = problem
        if len(self._made) > self._kept:
            self._made.popitem(last=False)
        return problem

    def __iter__(self) -> Iterator[Problem]:
        return (self[i] for i in range(len(self)))


@dataclass(frozen=True)
class Curriculum:
    """Makes a training task: the problems of some sources, evaluated on those of others.

    `rules` and `contrib` make the library. A worker keeps so many problems at a time (`kept`), since they hold weights.
    Raises CurriculumError for sources of one name.
    """

    sources: tuple[Source, ...]
    held_out: tuple[Source, ...]
    rules: tuple[AnyRule, ...]
    contrib: bool = False
    seed: int = 0
    kept: int = 256

    def __post_init__(self) -> None:
        if self.kept < 1:
            raise CurriculumError("at least one problem has to be kept")
        if not self.sources:
            raise CurriculumError("there is nothing to train on")
        for sources in (self.sources, self.held_out):
            names = [s.name for s in sources]
            if twice := sorted({n for n in names if names.count(n) > 1}):
                raise CurriculumError(f"two sources are called {twice[0]!r}")
        if both := sorted({s.name for s in self.sources} & {s.name for s in self.held_out}):
            raise CurriculumError(f"{both[0]!r} is trained on and held out")

    def library(self, without: frozenset[str] = frozenset()) -> Library:
        """All rules, or all but those of some names."""
        return Library((r for r in self.rules if r.name not in without), contrib=self.contrib)

    def __call__(self, vocabulary: Vocabulary) -> Task:
        """The task, as a worker makes it. Nothing is built yet."""
        maker = _Maker(self, vocabulary)
        return Task(
            Problems(self.sources, maker.problem, self.kept),
            Problems(self.held_out, maker.problem, self.kept),
            maker.observe,
        )


class _Maker:
    """Builds graphs and observes them: a featuriser for each machine, since it keeps what nodes cost."""

    def __init__(self, curriculum: Curriculum, vocabulary: Vocabulary) -> None:
        self.curriculum = curriculum
        self.vocabulary = vocabulary
        self._libraries: dict[frozenset[str], Library] = {}
        self._machines: dict[str, tuple[Roofline, Featuriser]] = {}
        # By the delta that a problem's states are priced with.
        self._observers: dict[Delta, Featuriser] = {}

    def problem(self, source: Source) -> Problem:
        """Where episodes of a source begin: what needs no price is done, then it is scrambled."""
        machine = source.machine()
        if machine.name not in self._machines:
            prices = Roofline(machine)
            self._machines[machine.name] = prices, Featuriser(self.vocabulary, prices)
        model, featuriser = self._machines[machine.name]
        if source.without not in self._libraries:
            self._libraries[source.without] = self.curriculum.library(source.without)
        library = self._libraries[source.without]
        graph, _ = simplify(source.build(), library, model.cost)
        if source.scrambled:
            seed = random.Random(f"{self.curriculum.seed} {source.name}").getrandbits(32)
            state = RewriteState.start(graph, library, model.delta)
            walk = random_walk(state, model.cost(graph), Limits(budget=source.scrambled), seed)
            graph = walk.best.state.graph
        problem = Problem.of(source.name, graph, library, model)
        assert problem.state.delta is not None, "a problem has prices"
        self._observers[problem.state.delta] = featuriser
        return problem

    def observe(self, situation: Situation) -> Observation:
        """The observation, with the shares of cost that the situation's machine gives."""
        delta = situation.state.delta
        assert delta is not None, "the problems of a curriculum have prices"
        return self._observers[delta](situation)


__all__ = ["Curriculum", "CurriculumError", "Problems", "Source", "mixed", "split"]
