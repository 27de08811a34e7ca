"""Trials go to the tasks where they gain most."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import pytest

from xrlflow.tuning.allocation import Allocation

Curve = Callable[[int], float]


def spent(curves: Sequence[Curve], weights: Sequence[float], batches: int, batch: int = 8) -> list[int]:
    """The number of trials that each task gets if its best time after t trials follows its curve."""
    allocation = Allocation(weights)
    trials = [0] * len(curves)
    for _ in range(batches):
        task = allocation.next()
        assert task is not None
        trials[task] += batch
        allocation.update(task, batch, curves[task](trials[task]))
        assert allocation.trials(task) == trials[task]
    return trials


def total(curves: Sequence[Curve], weights: Sequence[float], trials: Sequence[int]) -> float:
    return sum(weight * curve(t) for weight, curve, t in zip(weights, curves, trials))


def falling(start: float, end: float, rate: float) -> Curve:
    """A curve that falls exponentially from `start` to `end` seconds."""
    return lambda trials: end + (start - end) * math.exp(-rate * trials)


def test_every_task_gets_one_batch_first_in_their_order() -> None:
    allocation = Allocation([1.0, 100.0, 1.0])
    order = []
    for _ in range(3):
        task = allocation.next()
        assert task is not None
        order.append(task)
        allocation.update(task, 8, 1.0)
    assert order == [0, 1, 2]


def test_alike_tasks_share_alike() -> None:
    curve = falling(1.0, 0.5, 0.01)
    assert spent([curve] * 4, [1.0] * 4, 40) == [80] * 4


def test_the_slower_and_the_more_often_called_get_more() -> None:
    fast, slow = falling(1e-4, 5e-5, 0.02), falling(1e-2, 5e-3, 0.02)
    assert spent([fast, slow], [1.0, 1.0], 30)[1] > 200
    curve = falling(1e-3, 5e-4, 0.02)
    once, often = spent([curve, curve], [1.0, 9.0], 60)
    assert often > 2 * once


def test_what_still_improves_gets_more_than_what_is_stuck() -> None:
    stuck, improving = (lambda trials: 1.0), falling(10.0, 1.0, 0.01)
    first, second = spent([stuck, improving], [1.0, 1.0], 40)
    assert second > 1.5 * first
    assert first > 8, "a task that is stuck is not given up at once"


def test_the_sum_falls_lower_than_by_equal_shares() -> None:
    curves = [
        falling(1e-2, 2e-3, 0.01),
        falling(2e-3, 1.9e-3, 0.1),
        falling(1e-4, 5e-5, 0.05),
        falling(5e-2, 1e-2, 0.005),
    ]
    weights = [1.0, 4.0, 10.0, 2.0]
    ours = total(curves, weights, spent(curves, weights, 80))
    equal = total(curves, weights, [160] * 4)
    best = total(curves, weights, greedy(curves, weights, 80))
    assert best <= ours < equal
    assert ours - best < 0.6 * (equal - best)


def greedy(curves: Sequence[Curve], weights: Sequence[float], batches: int) -> list[int]:
    """The allocation of an observer who knows the curves. It is optimal if they are convex."""
    trials = [0] * len(curves)
    for _ in range(batches):
        gains = [w * (c(t) - c(t + 8)) for w, c, t in zip(weights, curves, trials)]
        trials[gains.index(max(gains))] += 8
    return trials


def test_tasks_that_leave_get_nothing_more() -> None:
    allocation = Allocation([1.0, 1.0])
    allocation.leave(0)
    assert allocation.next() == 1
    allocation.update(1, 8, 1.0)
    assert allocation.next() == 1
    allocation.leave(1)
    assert allocation.next() is None
    assert Allocation([]).next() is None


def test_a_task_of_which_nothing_runs_is_tried_less_and_less() -> None:
    hopeless, curve = (lambda trials: math.inf), falling(1.0, 0.5, 0.01)
    first, second = spent([hopeless, curve], [1.0, 1.0], 60)
    assert 16 <= first < second / 2
    assert spent([hopeless, hopeless], [1.0, 1.0], 10) == [40, 40]


def test_a_best_time_does_not_get_worse() -> None:
    allocation = Allocation([1.0, 1.0])
    for task, best in ((0, 1.0), (1, 1.0), (0, 5.0)):
        allocation.update(task, 8, best)
    assert allocation.next() == 1  # the first had more trials, and they brought nothing


@pytest.mark.parametrize(
    ("weights", "options"),
    [([0.0], {}), ([math.nan], {}), ([1.0], {"alpha": 1.5}), ([1.0], {"window": 0})],
)
def test_figures_that_make_no_sense_are_refused(weights: list[float], options: dict[str, float]) -> None:
    with pytest.raises(ValueError, match="must be"):
        Allocation(weights, **options)  # type: ignore[arg-type]
