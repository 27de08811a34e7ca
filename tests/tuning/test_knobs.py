"""Knob spaces: what is enumerated, decoded, encoded and refused."""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from itertools import pairwise

import numpy as np
import pytest

from tests.tuning.problems import convolution, knobless, matmul, softmax
from xrlflow.backends.tvm.import_tvm import tvm
from xrlflow.tuning.knobs import Knob, KnobError, KnobKind, KnobSpace, Vector, factorisations
from xrlflow.tuning.tasks import Task, module_key

TASKS = [matmul, convolution, softmax, knobless]


def samples(space: KnobSpace, count: int, seed: int = 0) -> list[Vector]:
    generator = np.random.default_rng(seed)
    return [space.random(generator) for _ in range(count)]


@pytest.mark.parametrize(
    ("extent", "levels", "innermost"), [(12, 3, 4), (16, 3, 0), (7, 2, 4), (1, 4, 64), (60, 2, 64)]
)
def test_factorisations_are_all_within_the_limit(extent: int, levels: int, innermost: int) -> None:
    found = factorisations(extent, levels, innermost)
    every = {
        tuple(int(f) + 1 for f in place)
        for place in np.ndindex(*[extent] * levels)
        if math.prod(int(f) + 1 for f in place) == extent and (not innermost or place[-1] < innermost)
    }
    assert len(set(found)) == len(found)
    assert set(found) == every


def test_factorisations_of_a_power_are_counted_by_stars_and_bars() -> None:
    assert len(factorisations(2**9, 4, 0)) == math.comb(12, 3)


@pytest.mark.parametrize("extent", [512, 60, 56])
def test_neighbours_in_the_list_of_factorisations_are_alike(extent: int) -> None:
    found = factorisations(extent, 4, 64)
    apart = [sum(a != b for a, b in zip(one, other)) for one, other in pairwise(found)]
    # Two levels at least must change; the reflected order never changes all four.
    assert min(apart) == 2
    assert max(apart) <= 3
    last = [f[-1] for f in found]
    assert last == sorted(last)


def test_a_tile_is_near_those_with_one_prime_moved() -> None:
    knob = Knob("t", KnobKind.TILE, factorisations(12, 2, 4))
    assert knob.extent == 12
    near = {knob.values[i] for i in knob.near(knob.values.index((6, 2)))}
    assert near == {(12, 1), (3, 4)}  # (2, 6) is beyond the limit


@pytest.mark.parametrize("task", TASKS)
def test_decoding_and_encoding_round_trip(task: Callable[[], Task]) -> None:
    space = KnobSpace.of(task(), 0)
    for vector in samples(space, 12):
        candidate = space.decode(vector)
        assert candidate is not None
        assert candidate.vector is not None
        again = space.decode(candidate.vector)
        assert again is not None
        assert (again.vector, again.key) == (candidate.vector, candidate.key)
        assert space.encode(json.loads(json.dumps(candidate.trace))) == candidate.vector


def test_a_vector_that_names_what_is_on_offer_is_kept() -> None:
    space = KnobSpace.of(matmul(), 0)
    for vector in samples(space, 12):
        candidate = space.decode(vector)
        assert candidate is not None
        assert candidate.vector == vector


def test_a_location_that_is_not_on_offer_becomes_one_that_is() -> None:
    space = KnobSpace.of(convolution(), 0)
    k = next(k for k, knob in enumerate(space.knobs) if knob.kind is KnobKind.LOCATION)
    made = set()
    for index in range(len(space.knobs[k])):
        vector = [0] * len(space.knobs)
        vector[k] = index
        candidate = space.decode(vector)
        assert candidate is not None
        assert candidate.vector is not None
        assert candidate.vector[k] <= index
        made.add(candidate.vector[k])
    assert {0, 1} < made  # inlined, at the root, and in a loop


def test_the_trace_gives_the_same_schedule_elsewhere() -> None:
    space = KnobSpace.of(convolution(), 0)
    candidate = space.decode(samples(space, 1)[0])
    assert candidate is not None
    schedule = tvm().s_tir.Schedule(space.task.mod)
    trace = json.loads(json.dumps(candidate.trace))
    tvm().s_tir.schedule.Trace.apply_json_to_schedule(trace, schedule)
    assert module_key(schedule.mod) == candidate.key == module_key(candidate.mod)


def test_schedules_by_tvm_have_vectors() -> None:
    space = KnobSpace.of(softmax(), 0)
    other = KnobSpace.of(softmax(), 5).context.generate_design_space()
    found = [space.encode(s.trace.simplified(True).as_json()) for s in other]
    assert [v is not None and v[0] for v in found] == list(range(len(space.sketches)))


def test_a_trace_of_another_task_has_no_vector() -> None:
    space, other = KnobSpace.of(matmul(8), 0), KnobSpace.of(matmul(16), 0)
    foreign = next(c for v in samples(other, 20) if (c := other.decode(v)) is not None)
    # The same instructions: only a tile that is no factorisation of 8 tells.
    assert space.encode(foreign.trace) is None
    assert KnobSpace.of(softmax(), 0).encode(foreign.trace) is None


def test_what_the_sketch_has_no_use_for_is_normalised_away() -> None:
    space = KnobSpace.of(softmax(), 0)
    assert len({s.knobs for s in space.sketches}) > 1
    for vector in samples(space, 20):
        idle = [k for k in range(len(space.knobs)) if k not in space.active(vector)]
        changed = list(vector)
        for k in idle:
            changed[k] = len(space.knobs[k]) - 1
        assert space.normal(changed) == vector
        assert all(vector[k] == 0 for k in idle)


def test_sketches_share_the_knobs_that_decide_the_same() -> None:
    space = KnobSpace.of(matmul(), 0)
    assert len(space.sketches) == 3
    # The sketch, three loops, and unrolling.
    assert [k.kind for k in space.knobs] == [KnobKind.SKETCH] + [KnobKind.TILE] * 3 + [KnobKind.CATEGORICAL]
    assert all(s.knobs == frozenset(range(5)) for s in space.sketches)


@pytest.mark.parametrize("task", TASKS)
def test_the_knobs_do_not_depend_on_the_seed(task: Callable[[], Task]) -> None:
    one, other = KnobSpace.of(task(), 0), KnobSpace.of(task(), 2**31)
    assert one.knobs == other.knobs
    assert [s.sites for s in one.sketches] == [s.sites for s in other.sketches]
    vector = samples(one, 1)[0]
    a, b = one.decode(vector), other.decode(vector)
    assert a is not None
    assert b is not None
    assert a.key == b.key


def test_every_vector_is_enumerated_once() -> None:
    space = KnobSpace.of(matmul(2), 0)
    every = list(space.enumerate())
    assert len(every) == len(set(every)) == space.size
    assert all(space.normal(v) == v for v in every)
    assert set(samples(space, 50)) <= set(every)


@pytest.mark.parametrize("task", TASKS)
def test_neighbours_differ_in_one_decision(task: Callable[[], Task]) -> None:
    space = KnobSpace.of(task(), 0)
    for vector in samples(space, 5):
        near = space.neighbours(vector)
        assert len(set(near)) == len(near)
        for other in near:
            assert space.normal(other) == other
            both = space.active(vector) & space.active(other)
            assert sum(vector[k] != other[k] for k in both) == 1
        if task is not softmax:  # there, a sketch may have knobs that the other lacks
            assert all(vector in space.neighbours(other) for other in near)


def test_a_task_without_knobs_has_one_schedule() -> None:
    space = KnobSpace.of(knobless(), 0)
    assert (space.size, list(space.enumerate()), space.neighbours((0,))) == (1, [(0,)], [])


@pytest.mark.parametrize("vector", [(), (0, 0), (3, 0, 0, 0, 0), (0, 0, 0, 0, -1)])
def test_vectors_of_no_schedule_are_refused(vector: Vector) -> None:
    with pytest.raises(KnobError):
        KnobSpace.of(matmul(), 0).decode(vector)


def test_schedules_that_a_postprocessor_rejects_are_none() -> None:
    meta = tvm().s_tir.meta_schedule
    refused = []

    @tvm().ir.utils.derived_object
    class Refuse(meta.postproc.PyPostproc):  # type: ignore[misc]
        """Refuses whatever is not unrolled."""

        def _initialize_with_tune_context(self, context: object) -> None:
            pass

        def apply(self, schedule: object) -> bool:
            trace = schedule.trace  # type: ignore[attr-defined]
            fine = any(d == 3 for d in trace.decisions.values() if isinstance(d, int))
            refused.append(not fine)
            return fine

        def clone(self) -> object:
            return Refuse()

    generator = meta.space_generator.PostOrderApply(postprocs=[Refuse()])
    space = KnobSpace.of(matmul(), 0, generator)
    verdicts = {v[4]: space.decode(v) is None for v in samples(space, 30)}
    assert verdicts == {0: True, 1: True, 2: True, 3: False}
    assert any(refused)


def test_other_schedule_rules_give_other_knobs() -> None:
    meta = tvm().s_tir.meta_schedule
    rule = meta.schedule_rule.MultiLevelTiling(structure="SRS", max_innermost_factor=4)
    space = KnobSpace.of(matmul(), 0, meta.space_generator.PostOrderApply(sch_rules=[rule]))
    # The reduction has one level: nothing to split.
    assert [k.kind for k in space.knobs] == [KnobKind.SKETCH, KnobKind.TILE, KnobKind.TILE]
    assert space.knobs[1].values == factorisations(8, 2, 4)


def test_features_tell_vectors_apart_and_mark_what_is_unused() -> None:
    space = KnobSpace.of(softmax(), 0)
    vectors = sorted(set(samples(space, 100)))
    features = space.features(vectors)
    assert features.shape[0] == len(vectors)
    assert np.isfinite(features).all()
    assert len(np.unique(features, axis=0)) == len(vectors)
    # One at a time or all together is the same.
    assert np.array_equal(space.features(vectors[3:4])[0], features[3])


def test_features_of_a_tile_are_logarithms() -> None:
    space = KnobSpace.of(matmul(), 0)
    tile = space.knobs[1].values.index((1, 2, 2, 2))
    features = space.features([(0, tile, 0, 0, 0)])[0]
    # After the sketch's three: four levels, then the sizes of the inner two and three.
    assert features[3:9].tolist() == [0, 1, 1, 1, 2, 3]
