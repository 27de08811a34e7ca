"""Forward selection by end-to-end measurement.

An operator measured or modelled alone cannot see what a runtime fuses, so what is decided last is decided on
whole models: the best state of a search is measured against the original, then changed family by family and rule by
rule for as long as that is measured to be faster still.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from xrlflow.search.result import Found, Limits
from xrlflow.search.sweep import sweep

# A gain that a short measurement of a slow model cannot establish, but that is more than its noise.
_WORTH_A_LOOK = 1.015


@dataclass(frozen=True, slots=True)
class Ratio:
    """How many times faster one model is than another: median and interval, measured."""

    median: float
    low: float
    high: float

    @property
    def promising(self) -> bool:
        """Faster for sure, or by so much that it deserves a longer look: the last measurement decides."""
        return self.low > 1.0 or (self.median > _WORTH_A_LOOK and self.high > 1.0)


# compare(a, b): how many times faster b runs than a; a None is the original file.
Compare = Callable[[Found | None, Found], Ratio]


@dataclass(frozen=True, slots=True)
class Trial:
    """One end-to-end comparison that the selection made."""

    proposal: str
    against: str
    ratio: Ratio
    kept: bool


@dataclass(frozen=True, slots=True)
class Selection:
    """What was chosen (None: nothing beats the original), and every comparison on the way."""

    chosen: Found | None
    trials: tuple[Trial, ...]
    interrupted: bool = False


def sweeping_rules(found: Found, at_most: float) -> list[str]:
    """Rules that have a candidate whose modelled delta is at most `at_most`, the most promising first.

    That is: those whose worth no model of single operators sees, then by the sum of their modelled deltas.
    """
    total: dict[str, tuple[bool, float]] = {}
    for match in found.state.candidates:
        if match.delta <= at_most:
            _, before = total.get(match.rule.name, (False, 0.0))
            total[match.rule.name] = (not match.rule.unpriced, before + match.delta)
    return sorted(total, key=lambda name: (*total[name], name))


@dataclass(frozen=True, slots=True)
class _Plan:
    """How a state is made: a search with some rule families, then sweeps of some rules."""

    families: frozenset[str]
    sweeps: tuple[str, ...] = ()

    def without(self, family: str) -> _Plan:
        return _Plan(self.families - {family}, self.sweeps)

    def with_sweep(self, rule: str) -> _Plan:
        return _Plan(self.families, (*self.sweeps, rule))


def _changes(plan: _Plan, found: Found, at_most: float) -> list[str]:
    """What can be changed of a plan that made `found`: "+ rule", a sweep of it; "- family", a search without it.

    Sweeps whose worth no model sees come first, then families, then other sweeps.
    """
    rules = found.state.library.rules
    sweeps = sweeping_rules(found, at_most)
    unpriced = [f"+ {r}" for r in sweeps if rules[r].unpriced]
    return [
        *unpriced,
        *(f"- {f}" for f in sorted(plan.families)),
        *(f"+ {r}" for r in sweeps if not rules[r].unpriced),
    ]


def select(
    base: Found,
    proposals: Sequence[Found],
    compare: Compare,
    search: Callable[[Found, frozenset[str]], Found],
    deadline: float,
    tolerance: float = 0.02,
    tidying: frozenset[str] = frozenset(),
) -> Selection:
    """Choose what runs fastest, until `deadline` (time.monotonic).

    `base` is the original as imported, `proposals` are a search's states, the best by modelled cost first.
    `search(found, families)` improves a state by the modelled cost, with the rules of some families alone. First
    the best proposal is measured. Then one thing is changed at a time, and kept if that is measured to be faster,
    until nothing is: a sweep is added (one rule wherever the model sees a loss of no more than `tolerance` of the
    whole cost in it; what it leaves behind is cleared away by the `tidying` families), or a family is dropped. At last
    the other proposals.
    """
    trials: list[Trial] = []
    seen = {base.state.fingerprint}
    at_most = tolerance * base.cost
    current: Found | None = None
    name = "the original"

    def build(plan: _Plan) -> Found:
        found = best if plan.families == best.families else search(base, plan.families)
        for rule in plan.sweeps:
            swept = sweep(found, rule, Limits(deadline=deadline), at_most)
            if swept.path is not found.path:
                found = search(swept, swept.families | tidying)
        return found

    def attempt(found: Found, proposal: str) -> bool:
        """Measure a state against the current one; whether it takes its place."""
        nonlocal current, name
        if found.state.fingerprint in seen or time.monotonic() >= deadline:
            return False
        seen.add(found.state.fingerprint)
        ratio = compare(current, found)
        trials.append(Trial(proposal, name, ratio, ratio.promising))
        if ratio.promising:
            current, name = found, proposal
        return ratio.promising

    interrupted = False
    best = proposals[0] if proposals else base
    try:
        kept = attempt(best, "the best by modelled cost")
        plan = _Plan(best.families if kept else frozenset())
        if not kept:
            best = base
        changing = True  # what is kept makes place for more
        while changing and time.monotonic() < deadline:
            changing = False
            for change in _changes(plan, current or base, at_most):
                if time.monotonic() >= deadline:
                    break
                what = change[2:]
                if change[0] == "-" and what not in plan.families:
                    continue
                changed = plan.with_sweep(what) if change[0] == "+" else plan.without(what)
                if attempt(build(changed), what if plan == _Plan(frozenset()) else f"{name} {change}"):
                    plan, changing = changed, True
        for index, found in enumerate(proposals[1:]):
            attempt(found, f"number {index + 2} by modelled cost")
    except KeyboardInterrupt:  # keep the best so far
        interrupted = True
    return Selection(current, tuple(trials), interrupted)
