"""Forward selection by end-to-end measurement.

An operator measured or modelled alone cannot see what a runtime fuses, so what is decided last is decided on
whole models: the shortlist of a search, and sweeps of single rules, are measured against the original, and the
promising ones are kept and combined with the next, for as long as that is measured to be faster still.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator, Sequence
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


def select(
    base: Found,
    proposals: Sequence[Found],
    compare: Compare,
    polish: Callable[[Found], Found],
    deadline: float,
    tolerance: float = 0.02,
    log: Callable[[str], None] | None = None,
) -> Selection:
    """Choose among `proposals` and sweeps of single rules, until `deadline` (time.monotonic).

    `base` is the original as imported. A sweep applies one rule wherever the model sees a loss of no more than
    `tolerance` of the whole cost in it. `polish` improves a state by the modelled cost with the families that
    it uses already (sweeps leave Concat and Split behind that cancel).
    """
    trials: list[Trial] = []
    seen = {base.state.fingerprint}

    def attempt(found: Found, name: str, against: Found | None, against_name: str) -> Ratio:
        ratio = compare(against, found)
        kept = ratio.promising
        trials.append(Trial(name, against_name, ratio, kept))
        if log is not None:
            log(f"{name} against {against_name}: {ratio.median:.3f}x [{ratio.low:.3f}, {ratio.high:.3f}]")
        return ratio

    def left() -> bool:
        return time.monotonic() < deadline

    current: Found | None = None
    current_name = "the original"
    interrupted = False
    at_most = tolerance * base.cost
    try:
        for proposal, name in _proposals(base, proposals, polish, at_most, deadline):
            if not left():
                break
            found = proposal
            if current is not None:
                # Add what the proposal does and the current state does not, rule by rule.
                done = {s.rule for s in current.trace}
                found = current
                for rule in dict.fromkeys(s.rule for s in proposal.trace if s.rule not in done):
                    found = sweep(found, rule, Limits(deadline=deadline), at_most)
                found = polish(found)
                name = f"{current_name} + {name}"
            if found.state.fingerprint in seen:
                continue
            seen.add(found.state.fingerprint)
            if attempt(found, name, current, current_name).promising:
                current, current_name = found, name
    except KeyboardInterrupt:  # keep the best so far
        interrupted = True
    return Selection(current, tuple(trials), interrupted)


def _proposals(
    base: Found, proposals: Iterable[Found], polish: Callable[[Found], Found], at_most: float, deadline: float
) -> Iterator[tuple[Found, str]]:
    """The search's best, then one sweep per rule, then the rest of the shortlist."""
    listed = list(proposals)
    for index, found in enumerate(listed[:1]):
        yield found, f"the best by modelled cost ({index + 1})"
    for rule in sweeping_rules(base, at_most):
        if time.monotonic() >= deadline:
            return
        swept = sweep(base, rule, Limits(deadline=deadline), at_most)
        if swept.path is not None:
            yield polish(swept), rule
    for index, found in enumerate(listed[1:]):
        yield found, f"number {index + 2} by modelled cost"
