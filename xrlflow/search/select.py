"""Forward selection by end-to-end measurement.

An operator measured or modelled alone cannot see what a runtime fuses, so what is decided last is decided on
whole models: the shortlist of a search, and sweeps of single rules, are measured against the original, and the
promising ones are combined one by one for as long as each is measured to be faster than what there is.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass

from xrlflow.search.result import Found, Limits
from xrlflow.search.sweep import sweep


@dataclass(frozen=True, slots=True)
class Ratio:
    """How many times faster one model is than another: median and interval, measured."""

    median: float
    low: float
    high: float


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
        kept = ratio.low > 1.0
        trials.append(Trial(name, against_name, ratio, kept))
        if log is not None:
            log(f"{name} against {against_name}: {ratio.median:.3f}x [{ratio.low:.3f}, {ratio.high:.3f}]")
        return ratio

    def left() -> bool:
        return time.monotonic() < deadline

    promising: list[tuple[float, Found, str]] = []
    current: Found | None = None
    interrupted = False
    at_most = tolerance * base.cost
    try:
        for found, name in _first_round(base, proposals, polish, at_most, deadline):
            if found.state.fingerprint in seen:
                continue
            seen.add(found.state.fingerprint)
            ratio = attempt(found, name, None, "the original")
            if ratio.low > 1.0:
                promising.append((ratio.median, found, name))
            if not left():
                break
        promising.sort(key=lambda p: -p[0])
        current, current_name = (promising[0][1], promising[0][2]) if promising else (None, "")
        for _, other, name in promising[1:]:
            # Add what the other does and the current does not, rule by rule.
            assert current is not None
            done = {s.rule for s in current.trace}
            combined = current
            for rule in dict.fromkeys(s.rule for s in other.trace if s.rule not in done):
                combined = sweep(combined, rule, Limits(deadline=deadline), at_most)
            combined = polish(combined)
            if combined.state.fingerprint in seen:
                continue
            if not left():
                break
            seen.add(combined.state.fingerprint)
            ratio = attempt(combined, f"{current_name} + {name}", current, current_name)
            if ratio.low > 1.0:
                current, current_name = combined, f"{current_name} + {name}"
    except KeyboardInterrupt:  # keep the best so far
        interrupted = True
        if current is None and promising:
            current = max(promising, key=lambda p: p[0])[1]
    return Selection(current, tuple(trials), interrupted)


def _first_round(
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
