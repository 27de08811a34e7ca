"""Forward selection by end-to-end measurement.

A cost model that looks at single operators cannot see what a runtime fuses, so the last decision is made by measuring
whole models. The best state of a search is measured against the original. Then one family or one rule at a time is
changed, for as long as the result is measured to be faster.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Protocol

from xrlflow.search.result import Limits, SearchNode, leave_out
from xrlflow.search.sweep import sweep

# A short measurement of a slow model cannot prove a gain of this size, but it is more than noise.
_WORTH_A_LOOK = 1.015
# The part of the time that may be used to mend a best proposal that was measured to be slower than the original.
_MENDING = 0.75
# A change whose interval ends below this is not tried again together with others.
_HOPELESS = 0.97
# A result that was not measured to be faster may still be faster if its interval reaches this far.
_POSSIBLE = 1.01


@dataclass(frozen=True, slots=True)
class Ratio:
    """How many times faster one model is than another, as measured: median and interval."""

    median: float
    low: float
    high: float

    @property
    def ran(self) -> bool:
        """Whether it was measured: the median is 0 if the runtime refuses the model or the file is too large."""
        return self.median > 0.0

    @property
    def promising(self) -> bool:
        """Certainly faster, or by so much that a longer measurement is profitable: the last comparison decides."""
        return self.low > 1.0 or (self.median > _WORTH_A_LOOK and self.high > 1.0)

    @property
    def convincing(self) -> bool:
        """Promising enough to replace an earlier choice, which no later measurement would bring back.

        A slow model, or one measured just before the deadline, has few rounds and a meaningless interval.
        """
        return self.low > 1.0 or (self.median > _WORTH_A_LOOK and self.low > _HOPELESS)

    def weaker(self, other: Ratio) -> Ratio:
        """The more cautious of two measurements of the same pair."""
        return Ratio(min(self.median, other.median), min(self.low, other.low), min(self.high, other.high))


class Survey(Protocol):
    """Seconds that substitutions save (negative: cost), each measured in context and summed by rule.

    Rules may be missing. 0 means that the measurement was not clear.
    """

    def candidates(self, found: SearchNode, rules: Sequence[str]) -> Mapping[str, float]:
        """Seconds saved by the state's candidates of these rules."""
        ...

    def steps(self, found: SearchNode) -> Mapping[str, float]:
        """Seconds saved by the substitutions that led to a state."""
        ...


# compare(a, b): how many times faster b runs than a, in new sessions. If a is None, it is the original file.
Compare = Callable[[SearchNode | None, SearchNode], Ratio]


@dataclass(frozen=True, slots=True)
class Trial:
    """One end-to-end comparison that the selection made."""

    proposal: str
    against: str
    ratio: Ratio
    kept: bool

    @property
    def measured(self) -> bool:
        return self.ratio.ran


@dataclass(frozen=True, slots=True)
class Selection:
    """The chosen node, and every comparison on the way. None: nothing can be faster than the original.

    If nothing was measured to be faster, the choice is what may be faster: noise hides a gain of a few percent, and the
    last comparison, which decides, has more time. If there was no time to measure, it is the first proposal.
    """

    chosen: SearchNode | None
    trials: tuple[Trial, ...]
    interrupted: bool = False


def sweeping_rules(found: SearchNode, at_most: float) -> list[str]:
    """Rules that have a candidate with a modelled delta of at most `at_most` seconds, the most promising first.

    Rules whose gain no model of single operators sees come first, then the others by the sum of their deltas.
    """
    total: dict[str, tuple[bool, float]] = {}
    for match in found.state.candidates:
        if match.delta <= at_most:
            _, before = total.get(match.rule.name, (False, 0.0))
            total[match.rule.name] = (not match.rule.unpriced, before + match.delta)
    return sorted(total, key=lambda name: (*total[name], name))


@dataclass(frozen=True, slots=True)
class _Recipe:
    """How a state is made: what a search found, improved with `rules`, then sweeps of rules.

    `dropped`: rules that may not be used when the graph is tidied up after a sweep.
    """

    rules: frozenset[str]
    sweeps: tuple[str, ...] = ()
    dropped: frozenset[str] = frozenset()

    def without(self, rules: frozenset[str]) -> _Recipe:
        return _Recipe(self.rules - rules, self.sweeps, self.dropped | rules)


@dataclass(frozen=True, slots=True)
class _Change:
    """One thing to try: further sweeps of rules, or to do without some rules."""

    text: str
    sweeps: tuple[str, ...] = ()
    without: frozenset[str] = frozenset()

    def of(self, recipe: _Recipe) -> _Recipe:
        return replace(recipe.without(self.without), sweeps=(*recipe.sweeps, *self.sweeps))


def gains(found: SearchNode, cost: float) -> dict[str, float]:
    """The modelled seconds that the substitutions of each rule have saved; `cost` is the cost before them."""
    total: dict[str, float] = {}
    for step in found.trace:
        total[step.rule] = total.get(step.rule, 0.0) + cost - step.cost
        cost = step.cost
    return total


def _recipe(found: SearchNode) -> _Recipe:
    """All rules of the families that made a state: if one rule is dropped, another may take its place."""
    rules = found.state.library.rules
    return _Recipe(frozenset(name for name, rule in rules.items() if rule.family in found.families))


def _drops(recipe: _Recipe, found: SearchNode, cost: float, surveyed: Mapping[str, float]) -> list[_Change]:
    """Changes that do without a family or rule that `found` used.

    First come rules that cost time when they were measured, then those with the largest modelled gains: a large error
    of the model must be in a large gain.
    """
    rules = found.state.library.rules
    of_rule = {rule: gain for rule, gain in gains(found, cost).items() if rule in recipe.rules}
    of_family: dict[str, list[float]] = {}
    for rule, gain in of_rule.items():
        of_family.setdefault(rules[rule].family, []).append(gain)
    weighted = [
        (min(0.0, surveyed.get(rule, 0.0)), gain, _Change(f"- {rule}", without=frozenset({rule})))
        for rule, gain in of_rule.items()
    ]
    for family, each in of_family.items():
        if len(each) > 1:
            whole = frozenset(name for name, rule in rules.items() if rule.family == family)
            lost = min(0.0, sum(surveyed.get(rule, 0.0) for rule in of_rule if rule in whole))
            weighted.append((lost, sum(each), _Change(f"- {family}", without=whole)))
    return [change for _, _, change in sorted(weighted, key=lambda w: (w[0], -abs(w[1]), w[2].text))]


def _with_sweeps(
    drops: list[_Change], found: SearchNode, at_most: float, surveyed: Mapping[str, float]
) -> list[_Change]:
    """Changes to try, in this order: sweeps that saved time when they were measured, the largest saving first; sweeps
    whose gain no model sees; drops; other sweeps; sweeps that cost time when they were measured."""
    rules = found.state.library.rules
    sweeps = sweeping_rules(found, at_most)
    good = [r for r in _saving(surveyed) if r in sweeps]
    bad = [r for r in sweeps if surveyed.get(r, 0.0) < 0.0]
    unpriced = [r for r in sweeps if rules[r].unpriced and r not in good and r not in bad]
    others = [r for r in sweeps if r not in good and r not in bad and r not in unpriced]

    def changes(names: Sequence[str]) -> list[_Change]:
        return [_Change(f"+ {r}", sweeps=(r,)) for r in names]

    together = [_together(good, [])] if len(good) > 1 else []
    return [*together, *changes(good), *changes(unpriced), *drops, *changes(others), *changes(bad)]


def _saving(surveyed: Mapping[str, float]) -> list[str]:
    """The rules that saved time when they were measured, the largest saving first."""
    return sorted((r for r, seconds in surveyed.items() if seconds > 0.0), key=lambda r: (-surveyed[r], r))


def _together(saving: Sequence[str], losing: Sequence[str]) -> _Change:
    text = " ".join([*(f"+ {rule}" for rule in saving), *(f"- {rule}" for rule in losing)])
    return _Change(text, sweeps=tuple(saving), without=frozenset(losing))


def select(
    base: SearchNode,
    proposals: Sequence[SearchNode],
    compare: Compare,
    search: Callable[[SearchNode, frozenset[str]], SearchNode],
    deadline: float,
    tolerance: float = 0.02,
    tidying: frozenset[str] = frozenset(),
    survey: Survey | None = None,
) -> Selection:
    """Choose what runs fastest. No comparison begins after `deadline` (time.monotonic).

    `base` is the original as imported. `proposals` are states that a search found, the most promising first.
    `search(found, rules)` improves a state by its modelled cost, with these rules only.

    1. The best proposal is changed as `survey` suggests: sweeps of rules that save time are added, rules that cost time
       are left out. It is measured against the original; if it is no faster, the unchanged proposal is measured.
    2. One thing is changed at a time and kept if it is measured to be faster: a family or rule is dropped, or a rule is
       swept over the graph wherever the model sees a loss of at most `tolerance` of the cost. `tidying` rules clean up
       after a sweep. If the best proposal was slower than the original, the results of drops are measured against the
       original again.
    3. Sweeps are added to the original, and the result is measured against the current choice.
    4. The other proposals are measured.

    If nothing was faster, the proposal with the best median is chosen, unless it was certainly slower. If there was no
    time to measure, the best proposal is chosen. The last comparison decides.
    """
    selecting = _Selecting(base, compare, search, deadline, tolerance * base.cost, tidying, survey)
    interrupted = False
    try:
        if proposals and proposals[0].state.fingerprint not in selecting.seen:
            selecting.improve(proposals[0])
        selecting.improve_original()
        selecting.try_others(proposals[1:])
        selecting.take_the_likeliest(proposals)
    except KeyboardInterrupt:  # keep the best so far
        interrupted = True
    return Selection(selecting.current, tuple(selecting.trials), interrupted)


@dataclass(slots=True)
class _Selecting:
    """The state of a selection. `current` is the choice so far (None: the original), `name` what it is called.

    `at_most`: modelled seconds that a substitution of a sweep may lose. `undecided`: what may be faster than the
    original. `untidy`: rules that cost time when they were measured.
    """

    base: SearchNode
    compare: Compare
    search: Callable[[SearchNode, frozenset[str]], SearchNode]
    deadline: float
    at_most: float
    tidying: frozenset[str]
    survey: Survey | None
    current: SearchNode | None = None
    name: str = "the original"
    trials: list[Trial] = field(default_factory=list)
    undecided: list[tuple[float, SearchNode]] = field(default_factory=list)
    untidy: frozenset[str] = frozenset()
    seen: set[int] = field(init=False)

    def __post_init__(self) -> None:
        self.seen = {self.base.state.fingerprint}

    @property
    def _late(self) -> bool:
        return time.monotonic() >= self.deadline

    def improve(self, best: SearchNode) -> None:
        """Measure the best proposal, as it is or mended, and then change one thing at a time."""
        what = "the best proposal"
        recipe = _recipe(best)
        kept = False
        lost = self._look_back(best)
        losing = sorted((r for r in recipe.rules if lost.get(r, 0.0) < 0.0), key=lambda r: (lost[r], r))
        self.untidy = frozenset(losing)
        saving = _saving(self._look(best))
        if saving or losing:
            change = _together(saving, losing)
            fuller = self._build(best, recipe, change.of(recipe))
            kept = fuller.state.fingerprint not in self.seen and self._challenge(
                fuller, f"{what} {change.text}"
            )
            if kept:
                best, what, recipe = fuller, f"{what} {change.text}", change.of(recipe)
        kept = kept or self._challenge(best, what)
        if not kept:
            now = time.monotonic()
            until = now + _MENDING * (self.deadline - now)
            mended, what, recipe = self._climb(best, what, recipe, until, proven=False, sweeping=False)
            kept = mended is not best and self._challenge(mended, what)
            self.untidy |= recipe.dropped
            best, recipe = mended, _recipe(mended).without(recipe.dropped)
        if kept:
            self._climb(best, what, recipe, self.deadline, proven=True, sweeping=True)

    def improve_original(self) -> None:
        """Measure the original with sweeps against the current choice."""
        nothing = self.current is None
        bare = _Recipe(frozenset(), dropped=self.untidy)
        swept, what, _ = self._climb(
            self.base, "the original", bare, self.deadline, proven=nothing, sweeping=True
        )
        if not nothing and swept is not self.base:
            self._challenge(swept, what)

    def try_others(self, proposals: Sequence[SearchNode]) -> None:
        for index, found in enumerate(proposals):
            if found.state.fingerprint not in self.seen:
                self._challenge(found, f"proposal {index + 2}")

    def take_the_likeliest(self, proposals: Sequence[SearchNode]) -> None:
        """If nothing is chosen: choose what may be faster, or the first proposal if nothing was measured."""
        if self.current is None and self.undecided:
            self.current = max(self.undecided, key=lambda u: u[0])[1]
        if not self.trials and proposals and proposals[0].state.fingerprint != self.base.state.fingerprint:
            self.current = proposals[0]

    def _build(self, start: SearchNode, recipe: _Recipe, changed: _Recipe) -> SearchNode:
        """A state that `start`, made as `recipe` says, becomes by a change.

        If rules are dropped, the other substitutions that still apply are kept: a greedy search from the original need
        not find again what another search found. Of the two the cheaper one that was not tried yet.
        """
        new = changed.sweeps[len(recipe.sweeps) :]
        if recipe.rules == changed.rules:
            return self._swept(start, new, changed)
        rest = self.search(leave_out(self.base, start.trace, changed.dropped), changed.rules)
        anew = self.search(self.base, changed.rules)
        both = self._swept(rest, new, changed), self._swept(anew, changed.sweeps, changed)
        return min(both, key=lambda node: (node.state.fingerprint in self.seen, node.cost))

    def _swept(self, found: SearchNode, rules: Sequence[str], changed: _Recipe) -> SearchNode:
        """A state after sweeps of rules, each followed by a search."""
        for rule in rules:
            swept = sweep(found, rule, Limits(deadline=self.deadline), self.at_most)
            if swept.path is not found.path:
                found = self.search(swept, changed.rules | (self.tidying - changed.dropped))
        return found

    def _faster(self, found: SearchNode, proposal: str, than: SearchNode | None, name: str) -> Trial:
        """Measure, and measure again if it looks faster.

        Where a session's weights lie in memory changes its speed by a percent or more, for as long as it lives. The
        best of many comparisons is therefore too good: of nine gains in a row, 19% together, 1% turned out to be real.
        """
        sure = self.current is not None  # a wrong decision could lose it

        def holds(ratio: Ratio) -> bool:
            return ratio.convincing if sure else ratio.promising

        ratio = self.compare(than, found)
        if holds(ratio) and not self._late:
            ratio = ratio.weaker(self.compare(than, found))
        trial = Trial(proposal, name, ratio, holds(ratio))
        self.trials.append(trial)
        if than is None and not trial.kept and ratio.high > _POSSIBLE:
            self.undecided.append((ratio.median, found))
        return trial

    def _look(self, found: SearchNode) -> Mapping[str, float]:
        if self.survey is None or self._late:
            return {}
        return self.survey.candidates(found, sweeping_rules(found, self.at_most))

    def _look_back(self, found: SearchNode) -> Mapping[str, float]:
        return {} if self.survey is None or self._late else self.survey.steps(found)

    def _climb(
        self, found: SearchNode, at: str, recipe: _Recipe, until: float, proven: bool, sweeping: bool
    ) -> tuple[SearchNode, str, _Recipe]:
        """Change one thing at a time for as long as it is measured to be faster. `sweeping`: also try sweeps.

        `proven`: `found` is faster than the original, so what is faster than `found` becomes the current choice.
        """
        against = None if found is self.base else found
        ahead, back = self._look(found) if sweeping else {}, self._look_back(found)
        hopeless: set[str] = set()
        changing = True
        while changing and time.monotonic() < until:
            changing = False
            drops = _drops(recipe, found, self.base.cost, back)
            changes = _with_sweeps(drops, found, self.at_most, ahead) if sweeping else drops
            for change in changes:
                if change.text in hopeless or not (change.sweeps or change.without & recipe.rules):
                    continue
                if time.monotonic() >= until:
                    break
                changed = change.of(recipe)
                candidate = self._build(found, recipe, changed)
                if candidate.state.fingerprint in self.seen or time.monotonic() >= until:
                    continue
                self.seen.add(candidate.state.fingerprint)
                proposal = change.text[2:] if found is self.base else f"{at} {change.text}"
                trial = self._faster(candidate, proposal, against, at)
                if trial.kept:
                    found, against, at, recipe, changing = candidate, candidate, proposal, changed, True
                    if proven:
                        self.current, self.name = found, at
                elif trial.ratio.high < _HOPELESS:
                    hopeless.add(change.text)
        return found, at, recipe

    def _challenge(self, found: SearchNode, proposal: str) -> bool:
        """Measure a state against the current choice. True if it becomes the current choice."""
        if self._late:
            return False
        self.seen.add(found.state.fingerprint)
        kept = self._faster(found, proposal, self.current, self.name).kept
        if kept:
            self.current, self.name = found, proposal
        return kept
