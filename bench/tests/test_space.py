"""Which kernels of a layer `bench/space.py` measures, and which it calls the best."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, cast

import numpy as np
import pytest

from bench import space as bench
from tests.tuning.measured import MACHINE
from tests.tuning.test_layers import WORKLOADS
from xrlflow.tuning.knobs import Candidate
from xrlflow.tuning.layer_tuning import LayerMeasurer, LayerTasks
from xrlflow.tuning.layers import Layer
from xrlflow.tuning.space import DesignSpace
from xrlflow.tuning.tasks import Task
from xrlflow.tuning.tuners.protocol import Measurement

pytestmark = pytest.mark.measures

LAYER = Layer(WORKLOADS["a product"], False)


class Clock:
    """Pretends to measure: a kernel is slower by each step that its knobs are away from a goal. One kernel fails."""

    def __init__(self, goal: Sequence[int]) -> None:
        self.layers = LayerTasks([LAYER], MACHINE, lambda layer: layer.estimated(MACHINE))
        self.goal = np.array(goal)
        self.asked: list[str] = []

    def seconds(self, vector: Sequence[int]) -> float:
        return 1e-3 * (1 + float(np.abs(self.goal - np.array(vector)).sum()))

    def outcomes(self, task: Task, candidates: Sequence[Candidate]) -> Iterator[tuple[int, Measurement]]:
        for place, candidate in enumerate(candidates):
            self.asked.append(candidate.key)
            assert candidate.vector is not None
            failed = len(self.asked) == 2
            seconds = self.seconds(candidate.vector)
            yield place, Measurement(error="it broke") if failed else Measurement((seconds,))


def test_neighbours_of_the_fastest_are_tried_and_nothing_twice() -> None:
    space = DesignSpace.of(LAYER, MACHINE)
    one = bench.Case("here", LAYER, LAYER.estimated(MACHINE))
    first = bench.first_choices(one, space, 0)
    assert first[0] == one.usual
    goal = next(choice for choice in reversed(space.choices) if choice not in first)
    clock = Clock(space.points[space.choices.index(goal)].tolist())
    seconds, failed = bench.explored(one, cast("LayerMeasurer", clock), 0)
    assert failed == 1
    assert len(clock.asked) == len(set(clock.asked)) == len(seconds) + 1
    assert not {*seconds} <= {*first}

    def far(choice: Any) -> float:
        return clock.seconds(space.points[space.choices.index(choice)].tolist())

    assert min(map(far, seconds)) < min(map(far, first))


def test_the_best_is_chosen_by_the_even_rounds_and_judged_by_the_odd_ones() -> None:
    row = {
        "usual": "a",
        "turns": {"a": [4.0, 6.0, 4.0, 6.0], "b": [2.0, 3.0, 2.0, 3.0], "c": [3.0, 1.0, 3.0, 1.0]},
        "again": [4.0, 3.0, 4.0, 3.0],
    }
    assert bench.verdict(row) == ("b", 3e6, 2.0, 2.0)
