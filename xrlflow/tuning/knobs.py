"""A task's knobs: every schedule that its sketches allow, as a vector of small integers.

MetaSchedule's schedule rules give sketches: programs of schedule primitives that contain sampling instructions (Shao et
al., 2022, "Tensor Program Optimization with Probabilistic Programs"). A knob is one such instruction, with its possible
decisions in an order in which neighbours are similar. The first knob is the sketch itself. Sampling instructions of
different sketches that decide the same (the i-th split of a loop of some extent) are one knob, so that changing the
sketch keeps the rest of the vector.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from enum import Enum
from functools import cache, cached_property
from typing import TYPE_CHECKING, Any, TypeVar

import numpy as np
import numpy.typing as npt

from xrlflow.backends.tvm.import_tvm import tvm
from xrlflow.tuning.tasks import Task, module_key

if TYPE_CHECKING:
    from tvm.ir import IRModule
    from tvm.s_tir import Schedule
    from tvm.s_tir.meta_schedule import TuneContext
    from tvm.s_tir.meta_schedule.space_generator import SpaceGenerator
    from tvm.s_tir.schedule import Instruction, Trace

_Item = TypeVar("_Item")
_Found = TypeVar("_Found")
Vector = tuple[int, ...]
Decision = int | tuple[int, ...]
Floats = npt.NDArray[np.float32]
Indices = npt.NDArray[np.int64]

# A compute location is an index of a loop, -1 (at the root) or -2 (inlined).
_FIRST_LOCATION = -2
# TVM replaces a location that does not exist by the last one that does.
_BEYOND = 1 << 20
# How often a sketch is tried to learn how many compute locations there are, since that depends on other decisions.
_PROBES = 6
# The number of TVM's features of a store, and of those at their beginning that count floating-point operations.
_STORE, _ARITHMETIC = 164, 7
SCHEDULE_FEATURES = 2 * _STORE
"""The number of features of a schedule."""
# The value of a knob's feature if the sketch does not use the knob.
_UNUSED = -1.0


class KnobError(ValueError):
    """The schedules of a task cannot be enumerated, or a vector is not in this space."""


class KnobKind(Enum):
    """What a knob decides."""

    SKETCH = "sketch"
    TILE = "tile"
    CATEGORICAL = "categorical"
    LOCATION = "location"


@dataclass(frozen=True, slots=True)
class Knob:
    """One decision. `values[i]` is what TVM is told for index i.

    SKETCH: the sketch's number. TILE: the factors of a loop, outermost first. CATEGORICAL: the index of the candidate,
    whose number is `levels[i]`. LOCATION: -2 (inline), -1 (root), or a loop, counted from the outside.
    """

    name: str
    kind: KnobKind
    values: tuple[Decision, ...]
    levels: tuple[float, ...] = ()

    def __len__(self) -> int:
        return len(self.values)

    @property
    def extent(self) -> int:
        """The loop's extent for a TILE, else 1."""
        first = self.values[0]
        return math.prod(first) if isinstance(first, tuple) else 1

    def near(self, index: int) -> tuple[int, ...]:
        """The indices of the decisions nearest to this one, ascending, without itself.

        For a tile: those with one prime factor moved to another level. For a sketch: all others. Else: the two
        neighbours.
        """
        if self.kind is KnobKind.SKETCH:
            return tuple(i for i in range(len(self)) if i != index)
        if self.kind is not KnobKind.TILE:
            return tuple(i for i in (index - 1, index + 1) if 0 <= i < len(self))
        factors = self.values[index]
        assert isinstance(factors, tuple)
        places = _places(self.values)
        found = {places.get(moved) for moved in _moved(factors)}
        return tuple(sorted(i for i in found if i is not None))

    def features(self) -> Floats:
        """Features of each decision for a model, [len(self), F]: for instance logarithms of factors and tile sizes."""
        if self.kind is KnobKind.SKETCH:
            return np.eye(len(self), dtype=np.float32)
        if self.kind is KnobKind.CATEGORICAL:
            amounts: Floats = np.log2(1 + np.abs(np.asarray(self.levels, np.float32)))
            return amounts[:, None]
        if self.kind is KnobKind.LOCATION:
            return np.asarray(self.values, np.float32)[:, None]
        factors = np.log2(np.asarray(self.values, np.float32))
        # Sizes of inner tiles: over the two innermost levels, over three, and so on, but not over all.
        inner = np.cumsum(factors[:, ::-1], axis=1)[:, 1:-1]
        return np.concatenate([factors, inner], axis=1)


@dataclass(frozen=True, eq=False)
class Candidate:
    """A schedule of a task, valid as far as TVM can tell without building it.

    `vector` decodes to it; it is None for a schedule from elsewhere that is not in the space. Candidates with equal
    `key` are the same kernel. `steps`: the instructions that made it, in TVM's form or as JSON.
    """

    vector: Vector | None
    steps: Trace | list[Any]
    mod: IRModule
    key: str

    @staticmethod
    def of(vector: Vector | None, steps: Trace | list[Any], mod: IRModule) -> Candidate:
        return Candidate(vector, steps, mod, module_key(mod))

    @cached_property
    def trace(self) -> list[Any]:
        """TVM's trace, with postprocessing, as JSON. This takes milliseconds, but few candidates are recorded."""
        found: list[Any] = self.steps if isinstance(self.steps, list) else _plain(self.steps.as_json())
        return found


@dataclass(frozen=True, slots=True, eq=False)
class Sketch:
    """One program of schedule primitives. `sites`: its sampling instructions, each with its knob."""

    instructions: tuple[Instruction, ...]
    sites: tuple[tuple[int, int], ...]
    text: str

    @property
    def knobs(self) -> frozenset[int]:
        """The positions of the sketch's knobs in a vector, including the knob for the sketch."""
        return frozenset(knob for _, knob in self.sites) | {0}


@dataclass(frozen=True, eq=False)
class KnobSpace:
    """All schedules of a task that its sketches allow. The knobs do not depend on the seed."""

    task: Task
    knobs: tuple[Knob, ...]
    sketches: tuple[Sketch, ...]
    context: TuneContext = field(repr=False)
    threads: int = 1

    @staticmethod
    def of(
        task: Task, seed: int, space_generator: SpaceGenerator | None = None, threads: int = 1
    ) -> KnobSpace:
        """The knobs of a task. `space_generator`: a PostOrderApply with other schedule rules than TVM's. `threads`:
        used to decode vectors and to compute features; the results do not depend on it.

        Raises KnobError if there is no sketch, or if it has an unknown kind of sampling instruction.
        """
        meta = tvm().s_tir.meta_schedule
        context = meta.TuneContext(
            task.mod,
            target=task.target,
            space_generator=space_generator or meta.space_generator.PostOrderApply(),
            rand_state=1 + seed % (2**31 - 2),
            num_threads=threads,
            task_name=task.name,
        )
        schedules = context.generate_design_space()
        if not schedules:
            raise KnobError(f"task {task.name}: the schedule rules give no sketch")
        found: dict[tuple[Any, ...], tuple[int, Knob]] = {}
        sketches = [_sketch(task, schedule.trace, found) for schedule in schedules]
        first = Knob("sketch", KnobKind.SKETCH, tuple(range(len(sketches))))
        knobs = (first, *(knob for _, knob in sorted(found.values(), key=lambda entry: entry[0])))
        return KnobSpace(task, knobs, tuple(sketches), context, threads)

    @cached_property
    def size(self) -> int:
        """The number of normal vectors. Not all of them are valid, and several may decode to one kernel."""
        return sum(math.prod(len(self.knobs[k]) for k in sketch.knobs if k > 0) for sketch in self.sketches)

    @property
    def kinds(self) -> int:
        return len(self.sketches)

    @property
    def flops(self) -> float:
        return self.task.flops

    @property
    def width(self) -> int:
        return SCHEDULE_FEATURES

    def described(self, candidates: Sequence[Candidate]) -> Floats:
        """TVM's features of stores, which are logarithms: their sum, and those of the store that computes most. [N,
        width], for any task."""
        package = tvm()
        meta = package.s_tir.meta_schedule
        extractor = meta.feature_extractor.PerStoreFeature()
        wanted = self.spread(lambda c: meta.MeasureCandidate(package.s_tir.Schedule(c.mod), []), candidates)
        found = []
        for stores in extractor.extract_from(self.context, wanted):
            array: Floats = stores.numpy().astype(np.float32)
            main = array[array[:, :_ARITHMETIC].sum(axis=1).argmax()]
            found.append(np.concatenate([array.sum(axis=0), main]))
        return np.stack(found)

    def active(self, vector: Sequence[int]) -> frozenset[int]:
        """The positions that the vector's sketch uses."""
        return self._active[vector[0]]

    def normal(self, vector: Sequence[int]) -> Vector:
        """The vector with 0 at positions that its sketch does not use: equal schedules have equal normal vectors.

        Raises KnobError if it is not in this space.
        """
        if len(vector) != len(self.knobs):
            raise KnobError(f"a vector of {len(vector)} knobs for a space of {len(self.knobs)}")
        for knob, index in zip(self.knobs, vector):
            if not 0 <= index < len(knob):
                raise KnobError(f"knob {knob.name} has {len(knob)} values; {index} is none of them")
        active = self._active[vector[0]]
        return tuple(int(index) if k in active else 0 for k, index in enumerate(vector))

    def random(self, generator: np.random.Generator) -> Vector:
        """A random vector: all sketches are equally likely, and so are the values of each knob."""
        return self.normal([int(generator.integers(len(knob))) for knob in self.knobs])

    def draw(self, generator: np.random.Generator, count: int) -> Indices:
        """`count` vectors, drawn like `random`: [count, K]."""
        return self.masked(generator.integers(self.sizes, size=(count, len(self.knobs))))

    def masked(self, indices: Indices) -> Indices:
        """The normal vectors of vectors [N, K] with valid indices: `normal` for all at once."""
        return np.where(self._used[indices[:, 0]], indices, 0)

    def movable(self, indices: Indices) -> npt.NDArray[np.bool_]:
        """Which knobs of vectors [N, K] are used by their sketch and have several values: [N, K]."""
        found: npt.NDArray[np.bool_] = self._used[indices[:, 0]] & (self.sizes > 1)
        return found

    def neighbours(self, vector: Sequence[int]) -> list[Vector]:
        """The normal vectors that differ in one decision and are near (see Knob.near), without duplicates."""
        start = self.normal(vector)
        found: dict[Vector, None] = {}
        for k in sorted(self.active(start)):
            for index in self.knobs[k].near(start[k]):
                found[self.normal((*start[:k], index, *start[k + 1 :]))] = None
        found.pop(start, None)
        return list(found)

    def enumerate(self) -> Iterator[Vector]:
        """All normal vectors (`size` of them), sketch by sketch."""
        for number, sketch in enumerate(self.sketches):
            used = sorted(sketch.knobs - {0})
            for choice in np.ndindex(*(len(self.knobs[k]) for k in used)):
                vector = [number] + [0] * (len(self.knobs) - 1)
                for k, index in zip(used, choice):
                    vector[k] = int(index)
                yield tuple(vector)

    def features(self, vectors: Indices | Sequence[Vector]) -> Floats:
        """The features of vectors, [N, F], without decoding them.

        These are each knob's features (see Knob.features), -1 for unused knobs, and for each level the logarithm of the
        tile size over all loops.
        """
        indices = np.asarray(vectors, np.int64).reshape(-1, len(self.knobs))
        columns = []
        sums: dict[tuple[int, int], Floats] = {}
        for k, (knob, table) in enumerate(zip(self.knobs, self._tables)):
            used = self._used[indices[:, 0], k][:, None]
            columns.append(np.where(used, table[indices[:, k]], np.float32(_UNUSED)))
            if knob.kind is KnobKind.TILE:
                levels = len(knob.values[0]) if isinstance(knob.values[0], tuple) else 0
                for level in range(levels):
                    part = np.where(used[:, 0], table[indices[:, k], level], np.float32(0))
                    sums[levels, level] = sums.get((levels, level), np.float32(0)) + part
        columns += [sums[place][:, None] for place in sorted(sums)]
        return np.concatenate(columns, axis=1).astype(np.float32)

    def decode(self, vector: Sequence[int]) -> Candidate | None:
        """The schedule of a vector; None if TVM or a postprocessor refuses it.

        The candidate's vector is canonical: TVM moves a compute location that does not exist. Raises KnobError if the
        vector is not in this space.
        """
        wanted = self.normal(vector)
        sketch = self.sketches[wanted[0]]
        decisions = {
            sketch.instructions[i]: _for_tvm(self.knobs[k].values[wanted[k]]) for i, k in sketch.sites
        }
        schedule = self._apply(sketch, decisions)
        if schedule is None:
            return None
        trace = schedule.trace
        instructions = trace.insts
        decided = [(i, trace.get_decision(instructions[i])) for i, _ in sketch.sites]
        made = self._vector(wanted[0], _plain(decided))
        return Candidate(wanted if made is None else made, trace, schedule.mod, module_key(schedule.mod))

    def spread(self, function: Callable[[_Item], _Found], items: Sequence[_Item]) -> list[_Found]:
        """Apply the function to all items, in the space's threads: TVM releases Python's lock while it works."""
        if min(self.threads, len(items)) < 2:
            return [function(item) for item in items]
        with ThreadPoolExecutor(self.threads) as executor:
            return list(executor.map(function, items))

    def candidate(self, schedule: Schedule) -> Candidate:
        """The candidate for a postprocessed schedule of the task from elsewhere."""
        trace = _plain(schedule.trace.as_json())
        return Candidate(self.encode(trace), trace, schedule.mod, module_key(schedule.mod))

    def encode(self, trace: Sequence[Any]) -> Vector | None:
        """The vector of a trace (a Candidate's, or `as_json()` of a simplified one), postprocessed or not.

        None if no sketch of this space has this trace, or if a decision is not among its knob's values.
        """
        instructions, decisions = _plain(trace)
        number = self._numbers.get(json.dumps(_before_postprocessing(instructions)))
        return None if number is None else self._vector(number, decisions)

    def _vector(self, number: int, decisions: Sequence[Any]) -> Vector | None:
        """The vector of a sketch's decisions: pairs of an instruction's position and its decision."""
        decided = {int(i): tuple(d) if isinstance(d, list) else int(d) for i, d in decisions}
        vector = [number] + [0] * (len(self.knobs) - 1)
        for i, k in self.sketches[number].sites:
            index = _places(self.knobs[k].values).get(decided.get(i, ()))
            if index is None:
                return None
            vector[k] = index
        return tuple(vector)

    @cached_property
    def sizes(self) -> Indices:
        """The number of values of each knob, [K]."""
        return np.array([len(knob) for knob in self.knobs], np.int64)

    @cached_property
    def _active(self) -> tuple[frozenset[int], ...]:
        return tuple(sketch.knobs for sketch in self.sketches)

    @cached_property
    def _used(self) -> npt.NDArray[np.bool_]:
        return np.array([[k in active for k in range(len(self.knobs))] for active in self._active])

    @cached_property
    def _tables(self) -> tuple[Floats, ...]:
        return tuple(knob.features() for knob in self.knobs)

    @cached_property
    def _numbers(self) -> Mapping[str, int]:
        # Of equal sketches use the first: they decode to the same schedules.
        return {sketch.text: i for i, sketch in reversed(list(enumerate(self.sketches)))}

    def _apply(self, sketch: Sketch, decisions: Mapping[Instruction, Any]) -> Schedule | None:
        schedule = _schedule(self.task, sketch.instructions, decisions)
        if schedule is None:
            return None
        try:
            schedule.enter_postproc()
            fine = all(p.apply(schedule) for p in self.context.space_generator.postprocs)
        except (RuntimeError, ValueError):  # TVM cannot apply this schedule
            return None
        return schedule if fine else None


@cache
def factorisations(extent: int, levels: int, innermost: int) -> tuple[tuple[int, ...], ...]:
    """All products of `levels` factors, outermost first, that equal a loop's extent.

    The last factor is at most `innermost` (0: any). The order is by the innermost factor, then by the next one,
    alternating between ascending and descending (a reflected order, as in a Gray code), so that neighbours differ
    little.
    """
    if levels == 1:
        return ((extent,),) if not innermost or extent <= innermost else ()
    found: list[tuple[int, ...]] = []
    divisors = [d for d in range(1, min(extent, innermost or extent) + 1) if extent % d == 0]
    for i, last in enumerate(divisors):
        outer = factorisations(extent // last, levels - 1, 0)
        found += [(*rest, last) for rest in (outer if i % 2 == 0 else reversed(outer))]
    return tuple(found)


def _sketch(task: Task, trace: Trace, found: dict[tuple[Any, ...], tuple[int, Knob]]) -> Sketch:
    """A sketch of the task. New knobs are added to `found`, by what they decide."""
    # MetaSchedule's search simplifies its traces in the same way, and they must be recognised.
    trace = trace.simplified(remove_postproc=True)
    instructions = tuple(trace.insts)
    seen: dict[tuple[Any, ...], int] = {}
    sites = []
    locations: dict[int, int] | None = None
    for i, instruction in enumerate(instructions):
        name = str(instruction.kind.name)
        if not name.startswith("Sample"):
            continue
        attrs = _plain(instruction.attrs)
        levels: tuple[float, ...] = ()
        if name == "SamplePerfectTile":
            extent = math.prod(int(f) for f in trace.decisions[instruction])
            kind, limit = KnobKind.TILE, max(int(attrs[1]), 0)
            values: tuple[Decision, ...] = factorisations(extent, int(attrs[0]), limit)
        elif name == "SampleCategorical":
            kind, values = KnobKind.CATEGORICAL, tuple(range(len(attrs[0])))
            levels = tuple(float(c) for c in attrs[0])
        elif name == "SampleComputeLocation":
            if locations is None:
                locations = _locations(task, trace)
            kind, values = KnobKind.LOCATION, tuple(range(_FIRST_LOCATION, locations[i] + 1))
        else:
            raise KnobError(f"task {task.name}: {name} is no sampling instruction that is known here")
        # The number of locations may differ between sketches: the knob has the largest.
        what = (kind, *(() if kind is KnobKind.LOCATION else (values, levels)))
        seen[what] = seen.get(what, -1) + 1
        signature = (*what, seen[what])
        position = found[signature][0] if signature in found else 1 + len(found)
        known = found[signature][1].values if signature in found else ()
        if len(values) > len(known):
            found[signature] = position, Knob(f"{kind.value} {position}", kind, values, levels)
        sites.append((i, position))
    text = json.dumps(_plain(trace.as_json())[0])
    return Sketch(instructions, tuple(sites), text)


def _locations(task: Task, trace: Trace) -> dict[int, int]:
    """The last loop that each compute location of a sketch can take, by the instruction's position.

    TVM tells this only while it schedules, and it depends on other decisions. So some decisions are tried, with each
    location at its end or at the root, and TVM's corrections are read. The trace's own decisions have no influence.
    """
    instructions = tuple(trace.insts)
    places = [i for i, inst in enumerate(instructions) if str(inst.kind.name) == "SampleComputeLocation"]
    last = dict.fromkeys(places, -1)
    generator = np.random.default_rng(0)
    for attempt in range(_PROBES):
        decisions = {
            instructions[i]: _BEYOND if attempt == 0 or generator.random() < 0.7 else -1 for i in places
        }
        schedule = _schedule(task, instructions, decisions, seed=1 + attempt)
        if schedule is None:
            continue
        made = dict(_plain(schedule.trace.as_json())[1])
        for i in places:
            if decisions[instructions[i]] == _BEYOND:
                last[i] = max(last[i], int(made[i]))
    return last


def _schedule(
    task: Task, instructions: Sequence[Instruction], decisions: Mapping[Instruction, Any], seed: int = 1
) -> Schedule | None:
    """The task's schedule by these instructions, before postprocessing; None if TVM refuses it.

    Missing decisions are drawn. The seed is a positive number.
    """
    package = tvm()
    schedule = package.s_tir.Schedule(task.mod, seed=seed, error_render_level="none")
    trace = package.s_tir.schedule.Trace(list(instructions), dict(decisions))
    try:
        trace.apply_to_schedule(schedule, remove_postproc=True)
    except (RuntimeError, ValueError):  # TVM cannot apply this schedule
        return None
    return schedule


@cache
def _places(values: tuple[Decision, ...]) -> Mapping[Decision, int]:
    return {value: i for i, value in enumerate(values)}


def _moved(factors: tuple[int, ...]) -> Iterator[tuple[int, ...]]:
    """All results of moving one prime factor from one level to another."""
    for i, factor in enumerate(factors):
        for prime in _primes(factor):
            for j in range(len(factors)):
                if j != i:
                    moved = list(factors)
                    moved[i] //= prime
                    moved[j] *= prime
                    yield tuple(moved)


@cache
def _primes(number: int) -> tuple[int, ...]:
    """The distinct prime factors, ascending."""
    found, left, p = [], number, 2
    while p * p <= left:
        if left % p == 0:
            found.append(p)
            while left % p == 0:
                left //= p
        p += 1
    return tuple(found + [left] * (left > 1))


def _for_tvm(decision: Decision) -> int | list[int]:
    return list(decision) if isinstance(decision, tuple) else decision


def _before_postprocessing(instructions: Sequence[Any]) -> list[Any]:
    names = [entry[0] for entry in instructions]
    return list(instructions[: names.index("EnterPostproc")] if "EnterPostproc" in names else instructions)


def _plain(value: Any) -> Any:
    """TVM's containers and immediate numbers as values that JSON can hold."""
    if value is None or isinstance(value, bool | int | float):
        return value
    if isinstance(value, str):
        return str(value)
    if hasattr(value, "value"):
        return value.value
    if isinstance(value, Mapping) or hasattr(value, "items"):
        return {str(k): _plain(v) for k, v in value.items()}
    return [_plain(v) for v in value]
