"""Chooses the tuning task that gets the next measurements. A task is one kernel to tune; several tasks share a
budget."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field


@dataclass(slots=True)
class _Curve:
    """The progress of a tuning task: (number of trials, best seconds so far) after each batch, in order of trials."""

    weight: float
    points: list[tuple[int, float]] = field(default_factory=list)
    open: bool = True

    @property
    def trials(self) -> int:
        return self.points[-1][0] if self.points else 0

    @property
    def best(self) -> float:
        return self.points[-1][1] if self.points else math.inf


class Allocation:
    """The gradient scheduler of Ansor (Zheng et al., OSDI 2020, section 6) but without the guess that Ansor derives
    from similar tasks. MetaSchedule uses the same scheduler.

    The latency to minimise is the sum, over the tasks, of the task's weight times its best time g. The gain from the
    next trial of a task is a mixture of two estimates: `alpha` times the slope of g over the last `window` batches, and
    1 - `alpha` times g/t after t trials. The second estimate would be the slope if the time fell as 1/t. It is
    optimistic, so that a task that does not improve for a while is not given up at once. First every task gets one
    batch, in order. From then on, the task with the largest estimated gain is next.

    The gain of a task without a working candidate cannot be estimated. It counts as the largest gain of another task,
    divided by the number of batches that this task has had.
    """

    def __init__(self, weights: Sequence[float], *, alpha: float = 0.2, window: int = 3) -> None:
        """`weights`: how often the model calls each task's kernel. Raises ValueError for weights or parameters out of
        range."""
        if not all(math.isfinite(weight) and weight > 0 for weight in weights):
            raise ValueError(f"weights must be positive: {list(weights)}")
        if not 0 <= alpha <= 1 or window < 1:
            raise ValueError(f"alpha must be in [0, 1] and the window positive, not {alpha} and {window}")
        self._alpha, self._window = alpha, window
        self._curves = [_Curve(float(weight)) for weight in weights]

    def next(self) -> int | None:
        """The index of the task to measure next; None if no task has candidates left."""
        open_tasks = [number for number, curve in enumerate(self._curves) if curve.open]
        unmeasured = [number for number in open_tasks if not self._curves[number].points]
        if not open_tasks or unmeasured:
            return unmeasured[0] if unmeasured else None
        gains = self._gains(open_tasks)
        return max(open_tasks, key=lambda number: (gains[number], -self._curves[number].trials, -number))

    def update(self, task: int, trials: int, best: float) -> None:
        """Record that a task had `trials` more trials, and that its best time is now `best` seconds (infinite: no
        candidate ran)."""
        curve = self._curves[task]
        curve.points.append((curve.trials + max(trials, 0), min(best, curve.best)))

    def leave(self, task: int) -> None:
        """Note that the task has no candidates left."""
        self._curves[task].open = False

    def trials(self, task: int) -> int:
        """The number of trials that the task has had."""
        return self._curves[task].trials

    def _gains(self, tasks: Sequence[int]) -> dict[int, float]:
        """For each task, the estimated seconds of a run of the entire model that one more trial saves."""
        gains = {n: self._gain(self._curves[n]) for n in tasks if self._curves[n].best < math.inf}
        greatest = max(gains.values(), default=1.0)
        return gains | {n: greatest / len(self._curves[n].points) for n in tasks if n not in gains}

    def _gain(self, curve: _Curve) -> float:
        finite = [point for point in curve.points if point[1] < math.inf]
        trials, best = finite[-1]
        before, slower = finite[-1 - min(self._window, len(finite) - 1)]
        backward = (slower - best) / (trials - before) if trials > before else 0.0
        forward = best / max(trials, 1)
        return curve.weight * (self._alpha * backward + (1.0 - self._alpha) * forward)
