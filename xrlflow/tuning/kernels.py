"""A model's kernels as tuning tasks, and tuned schedules back in the model."""

from __future__ import annotations

import statistics
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from xrlflow.backends.interrupts import heeding_interrupts
from xrlflow.backends.tvm.import_tvm import tvm
from xrlflow.backends.tvm.lower import Tuned
from xrlflow.backends.tvm.schedules import choices, design_space, schedule
from xrlflow.backends.tvm.target import Machine
from xrlflow.tuning.knobs import Candidate, KnobSpace
from xrlflow.tuning.store import CONFIRMED, Setting, Store
from xrlflow.tuning.tasks import Task, module_key
from xrlflow.tuning.tuners.factory import make_tuner
from xrlflow.tuning.tuners.protocol import Measurement, Method, Tuner

if TYPE_CHECKING:
    from xrlflow.tuning.session import MakeTuner


@heeding_interrupts()
def kernel_tasks(module: Any, machine: Machine) -> list[Task]:
    """The functions of a fused module (`lower.fuse`) whose schedules leave a choice. Equal ones are merged."""
    from tvm import relax, tirx

    calls: Counter[str] = Counter()

    def count(expression: Any) -> None:
        if isinstance(expression, relax.Call) and expression.args:
            callee = expression.args[0]
            if isinstance(callee, tvm().ir.GlobalVar):
                calls[callee.name_hint] += 1

    relax.analysis.post_order_visit(module["main"], count)
    target = machine.target()
    found: dict[str, Task] = {}
    for name, function in module.functions.items():
        if not isinstance(function, tirx.PrimFunc) or not calls[name.name_hint]:
            continue
        task = Task.of(name.name_hint, function, target, calls[name.name_hint])
        if len(choices(task.mod, machine)) > 1:
            known = found.get(task.key)
            found[task.key] = replace(known, weight=known.weight + task.weight) if known else task
    return list(found.values())


def blocked(method: Method, machine: Machine) -> MakeTuner:
    """Makes tuners that choose among our own kernels (`schedules.design_space`), beginning with the untuned one."""

    def make(task: Task, seed: int) -> Tuner:
        space = KnobSpace.of(task, seed, design_space(machine))
        tuner = make_tuner(method, task, seed, space=space)
        untuned = space.encode(schedule(task.mod, machine).trace.simplified(False).as_json())
        first = space.decode(untuned) if untuned is not None else None
        return tuner if first is None else _BeginWith(first, tuner)

    return make


class _BeginWith:
    """A tuner that first proposes a given candidate, so that the tuned kernel is never slower than the untuned one."""

    def __init__(self, first: Candidate, tuner: Tuner) -> None:
        self.name = tuner.name
        self._first = first
        self._proposed = False
        self._tuner = tuner

    def propose(self, count: int) -> Sequence[Candidate]:
        begin: list[Candidate] = []
        if count > 0 and not self._proposed:
            self._proposed = True
            begin.append(self._first)
        others: list[Candidate] = []
        while len(begin) + len(others) < count and not others:
            own = self._tuner.propose(count - len(begin))
            others = [candidate for candidate in own if candidate.key != self._first.key]
            if not own:
                break
        return [*begin, *others]

    def update(self, measured: Sequence[tuple[Candidate, Measurement]]) -> None:
        self._tuner.update(measured)


def untuned_kernel(machine: Machine) -> Callable[[Task], Candidate]:
    """Returns the untuned schedule of a task's kernel."""

    def untuned(task: Task) -> Candidate:
        done = schedule(task.mod, machine)
        return Candidate(None, done.trace, done.mod, module_key(done.mod))

    return untuned


# A tuned kernel must take less than this part of the untuned one's time. The best of many noisy measurements looks
# better than it is, and a kernel measured alone has its operands in the cache.
_WORTH = 0.97


def tuned_by(
    store: Store, machine: Machine, threads: int, device: str | None = None, *, flushed: bool
) -> Tuned:
    """A function that schedules kernels by the store's best records of a device (default: this machine).

    Only records that beat the untuned schedule are used. `flushed`: records of kernels timed so (see `worker.Timing`).
    """
    target = machine.target()
    setting = Setting.on(device, target, threads, flushed=flushed)

    def tuned(module: Any) -> Any | None:
        task = Task.of("main", module, target)
        known = store.best(task.key, setting=setting, least=CONFIRMED)
        if not known:
            return None
        usual = untuned_kernel(machine)(task).key
        # Also if it failed once, or was measured less often than others.
        times = [
            record.outcome.median
            for record in store.known(task.key, setting)
            if record.candidate == usual and record.outcome.error is None
        ]
        if times and known[0].outcome.median > _WORTH * statistics.median(times):
            return None
        return store.scheduled(task, known[0])

    return tuned
