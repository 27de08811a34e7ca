"""Training on many graphs: an agent learns from several sources of graphs, and some sources are held out for
evaluation.

A `Source` is a named recipe for a graph. This package contains no sources: `models.training` collects the zoo's models
at small depth, valleys, and random graphs built from the sources of rules. A `Curriculum` draws from the sources by
group. Each worker builds the problems in its own process, on first use.
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
    """A curriculum cannot be built from these sources. The message says why."""


@dataclass(frozen=True, slots=True)
class Source:
    """A graph that can be built in any process. `build` and `machine` are pickled and sent to that process.

    `group` names the kind of graph; a curriculum draws by group. Episodes begin after `scrambled` random
    substitutions, so that undoing these can gain something. Costs come from the roofline model of the machine that
    `machine` returns. Rules named in `without` are not used.
    """

    name: str
    group: str
    build: Callable[[], Graph]
    scrambled: int = 0
    machine: Callable[[], Machine] = Machine.reference
    without: frozenset[str] = frozenset()


def split(sources: Iterable[Source], part: float) -> tuple[tuple[Source, ...], tuple[Source, ...]]:
    """Split sources into those to train on and those to hold out. About `part` (0 to 1) of all sources are held out.

    The side of a source depends on its name only, so adding other sources does not change it. Raises CurriculumError
    if `part` is outside 0 to 1.
    """
    if not 0 <= part <= 1:
        raise CurriculumError(f"the part to hold out is between 0 and 1, not {part:g}")
    train: list[Source] = []
    held_out: list[Source] = []
    for source in sources:
        digest = hashlib.blake2b(source.name.encode(), digest_size=8).digest()
        number = int.from_bytes(digest, "big") / 2**64
        (held_out if number < part else train).append(source)
    return tuple(train), tuple(held_out)


def mixed(
    sources: Iterable[Source], shares: Mapping[str, float], count: int, seed: int = 0
) -> tuple[Source, ...]:
    """Draw about `count` sources, from each group the share that `shares` states. A group with too few sources gives
    all of them.

    Raises CurriculumError if a group does not exist, if a share is negative or if no share is positive.
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
    sources_drawn: list[Source] = []
    for group, share in shares.items():
        size = round(count * share / total)
        sources_drawn += rng.sample(groups[group], min(size, len(groups[group])))
    return tuple(sources_drawn)


class Problems(Sequence[Problem]):
    """A sequence of problems that are built on access. The `kept` problems that were used last stay in memory."""

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
    """Creates a training task: the agent trains on the problems of `sources`, and is evaluated on those of `held_out`.

    `rules` and `contrib` define the library. A worker holds at most `kept` problems in memory at a time, because
    problems contain weights. Raises CurriculumError if two sources have the same name, if there is no source to train
    on, or if `kept` is below 1.
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
        """The library of all rules except those named in `without`."""
        return Library((r for r in self.rules if r.name not in without), contrib=self.contrib)

    def __call__(self, vocabulary: Vocabulary) -> Task:
        """The task of a worker. Its graphs are built later, on access."""
        maker = _Maker(self, vocabulary)
        return Task(
            Problems(self.sources, maker.problem, self.kept),
            Problems(self.held_out, maker.problem, self.kept),
            maker.observe,
        )


class _Maker:
    """Builds graphs and observes them. Each machine has its own featuriser, because a featuriser caches the costs of
    nodes.
    """

    def __init__(self, curriculum: Curriculum, vocabulary: Vocabulary) -> None:
        self.curriculum = curriculum
        self.vocabulary = vocabulary
        self._libraries: dict[frozenset[str], Library] = {}
        self._machines: dict[str, tuple[Roofline, Featuriser]] = {}
        # By the delta function that computes the costs of candidates in a problem's states.
        self._observers: dict[Delta, Featuriser] = {}

    def problem(self, source: Source) -> Problem:
        """Build a source's graph, simplify it (without a cost model) and scramble it. Episodes begin with the
        result."""
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
        """Observe a situation with the featuriser of its machine."""
        delta = situation.state.delta
        assert delta is not None, "the problems of a curriculum have prices"
        return self._observers[delta](situation)


__all__ = ["Curriculum", "CurriculumError", "Problems", "Source", "mixed", "split"]
