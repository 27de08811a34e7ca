"""Forward selection by end-to-end measurement.

A cost model of single operators does not know what a runtime fuses, so the last decision is made by measuring models.
The best state of a search is measured against the original. Then one family of rules or one rule at a time is added or
left out, for as long as the result is measured to be faster.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Protocol

from xrlflow.search.result import Limits, SearchNode, leave_out
from xrlflow.search.sweep import sweep

# A speed-up that a short measurement of a slow model cannot prove, although it is more than noise.
_PROMISING = 1.015
# If the best proposal was measured to be slower than the original: the part of the time to improve this proposal.
_MENDING = 0.75
# If the interval of a change ends below this ratio, the change is not tried again together with other changes.
_HOPELESS = 0.97
# If the interval of a result reaches this ratio, the result may be faster although the measurement does not show it.
_POSSIBLE = 1.01


@dataclass(frozen=True, slots=True)
class Ratio:
    """How many times faster one model is than another, as measured: median and interval."""

    median: float
    low: float
    high: float

    @property
    def ran(self) -> bool:
        """Whether the ratio was measured: the median is 0 if the runtime refuses the model or the file is too large."""
        return self.median > 0.0

    @property
    def promising(self) -> bool:
        """Whether the model is certainly faster, or so much faster that a longer measurement is worthwhile; the last
        comparison decides."""
        return self.low > 1.0 or (self.median > _PROMISING and self.high > 1.0)

    @property
    def convincing(self) -> bool:
        """Whether the result is promising enough to replace the incumbent, to which no later measurement would return.

        A slow model, or one measured just before the deadline, has few rounds and a meaningless interval.
        """
        return self.low > 1.0 or (self.median > _PROMISING and self.low > _HOPELESS)

    def weaker(self, other: Ratio) -> Ratio:
        """The more cautious of two measurements of the same pair."""
        return Ratio(min(self.median, other.median), min(self.low, other.low), min(self.high, other.high))


_PRECISION = "precision"  # the family of the rules of low precision


class Survey(Protocol):
    """Seconds that substitutions save (negative: lose), each measured with its neighbours and summed by rule.

    Rules may be missing. 0 means that the gain was within the noise.
    """

    def candidates(self, node: SearchNode, rules: Sequence[str]) -> Mapping[str, float]:
        """Seconds saved by the state's candidates of these rules."""
        ...

    def steps(self, node: SearchNode) -> Mapping[str, float]:
        """Seconds saved by the substitutions that led to a state."""
        ...


# compare(a, b): how many times faster b runs than a, in new sessions. If a is None, it is the original file.
Compare = Callable[[SearchNode | None, SearchNode], Ratio]


ORIGINAL = "the original"
"""What a trial is against that compares with the original."""


@dataclass(frozen=True, slots=True)
class Trial:
    """One end-to-end comparison that the selection made."""

    proposal: str
    against: str
    ratio: Ratio
    accepted: bool

    @property
    def measured(self) -> bool:
        return self.ratio.ran


@dataclass(frozen=True, slots=True)
class Selection:
    """The selected search node (None: no node can be faster than the original), and all comparisons.

    If no node was measured to be faster, the selected node is one that may be faster: noise hides a gain of a few
    percent, and the last comparison, which decides, has more time. If there was no time to measure, it is the first
    proposal.
    """

    selected: SearchNode | None
    trials: tuple[Trial, ...]
    interrupted: bool = False

    @property
    def gain(self) -> float:
        """How many times faster than the original the selected node was measured to be, the lower end of the interval;
        1 if that was not measured.
        """
        ratios = [t.ratio.low for t in self.trials if t.accepted and t.against == ORIGINAL]
        return max(ratios, default=1.0)


def sweeping_rules(node: SearchNode, at_most: float) -> list[str]:
    """Rules that have a candidate with a modelled delta of at most `at_most` seconds, the most promising first.

    Rules whose gain a cost model of single operators cannot see (`unpriced`) come first, then other rules by the sum of
    their deltas. Rules are left out if none of those that they follow was applied.
    """
    total: dict[str, tuple[bool, float]] = {}
    applied = {step.rule for step in node.trace}
    for match in node.state.candidates:
        after = match.rule.swept_after
        if match.delta <= at_most and (not after or not applied.isdisjoint(after)):
            _, before = total.get(match.rule.name, (False, 0.0))
            total[match.rule.name] = (not match.rule.unpriced, before + match.delta)
    return sorted(total, key=lambda name: (*total[name], name))


@dataclass(frozen=True, slots=True)
class _Recipe:
    """How to build a state from the original: search with `rules`, then sweeps of rules."""

    rules: frozenset[str]
    sweeps: tuple[str, ...] = ()
    dropped: frozenset[str] = frozenset()  # rules that may not be used to clean up after a sweep

    def without(self, rules: frozenset[str]) -> _Recipe:
        return _Recipe(self.rules - rules, self.sweeps, self.dropped | rules)


@dataclass(frozen=True, slots=True)
class _Change:
    """A change of a recipe: further sweeps of rules, or some rules left out."""

    text: str
    sweeps: tuple[str, ...] = ()
    without: frozenset[str] = frozenset()

    def of(self, recipe: _Recipe) -> _Recipe:
        return replace(recipe.without(self.without), sweeps=(*recipe.sweeps, *self.sweeps))


def gains(node: SearchNode, cost: float) -> dict[str, float]:
    """The modelled seconds that the substitutions of each rule have saved; `cost` is the cost before them."""
    total: dict[str, float] = {}
    for step in node.trace:
        total[step.rule] = total.get(step.rule, 0.0) + cost - step.cost
        cost = step.cost
    return total


def _recipe(node: SearchNode) -> _Recipe:
    """All rules of the families that led to a state: if one rule is dropped, another may replace it."""
    rules = node.state.library.rules
    return _Recipe(frozenset(name for name, rule in rules.items() if rule.family in node.families))


def _drops(recipe: _Recipe, node: SearchNode, cost: float, surveyed: Mapping[str, float]) -> list[_Change]:
    """Changes that leave out a family or rule that `node` used.

    First come rules that were measured to lose time, then those with the largest modelled gains: only a large modelled
    gain can be wrong by much.
    """
    rules = node.state.library.rules
    of_rule = {rule: gain for rule, gain in gains(node, cost).items() if rule in recipe.rules}
    of_family: dict[str, list[float]] = {}
    for rule, gain in of_rule.items():
        of_family.setdefault(rules[rule].family, []).append(gain)
    weighted = [
        (min(0.0, surveyed.get(rule, 0.0)), gain, _Change(f"- {rule}", without=frozenset({rule})))
        for rule, gain in of_rule.items()
    ]
    for family, each in of_family.items():
        if len(each) > 1:
            members = frozenset(name for name, rule in rules.items() if rule.family == family)
            loss = min(0.0, sum(surveyed.get(rule, 0.0) for rule in of_rule if rule in members))
            weighted.append((loss, sum(each), _Change(f"- {family}", without=members)))
    return [change for _, _, change in sorted(weighted, key=lambda w: (w[0], -abs(w[1]), w[2].text))]


def _with_sweeps(
    drops: list[_Change], node: SearchNode, at_most: float, surveyed: Mapping[str, float]
) -> list[_Change]:
    """Changes to try, in this order: sweeps that saved time in the survey, the largest saving first; sweeps of unpriced
    rules; drops; other sweeps; sweeps that lost time in the survey."""
    rules = node.state.library.rules
    sweeps = sweeping_rules(node, at_most)
    good = [r for r in _saving(surveyed) if r in sweeps]
    bad = [r for r in sweeps if surveyed.get(r, 0.0) < 0.0]
    unpriced = [r for r in sweeps if rules[r].unpriced and r not in good and r not in bad]
    remaining = [r for r in sweeps if r not in good and r not in bad and r not in unpriced]

    def changes(names: Sequence[str]) -> list[_Change]:
        return [_Change(f"+ {r}", sweeps=(r,)) for r in names]

    together = [_together(good, [])] if len(good) > 1 else []
    return [*together, *changes(good), *changes(unpriced), *drops, *changes(remaining), *changes(bad)]


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
    """Choose the fastest graph by measurements. No comparison begins after `deadline` (time.monotonic).

    `base` is the original as imported. `proposals` are states that a search found, the most promising first.
    `search(node, rules)` improves a state by its modelled cost, with these rules only.

    0. All rules of low precision that have no price are swept over the original together: what they gain depends on
       what the runtime fuses, and single ones may be slower than none.
    1. The best proposal is changed as `survey` suggests: sweeps of rules that save time are added, rules that lose time
       are left out. The result is measured against the original; if it is no faster, so is the unchanged proposal.
    2. One change is made at a time and accepted if it is measured to be faster: a family or rule is dropped, or a rule
       is swept over the graph wherever the modelled loss is at most `tolerance` of the cost. `tidying` rules clean up
       after a sweep. If the best proposal was slower than the original, the results of drops are measured against the
       original again.
    3. Sweeps are added to the original, and the result is measured against the incumbent.
    4. The other proposals are measured.

    If no graph was faster, the proposal with the best median is chosen, unless it was certainly slower. If there was no
    time to measure, the best proposal is chosen. The last comparison decides.
    """
    selector = _Selector(base, compare, search, deadline, tolerance * base.cost, tidying, survey)
    interrupted = False
    try:
        selector.sweep_unpriced()
        if proposals and selector.is_new(proposals[0]):
            selector.improve(proposals[0])
        selector.improve_original()
        selector.try_others(proposals[1:])
        selector.choose_likeliest(proposals)
    except KeyboardInterrupt:  # keep the best so far
        interrupted = True
    return Selection(selector.current, tuple(selector.trials), interrupted)


@dataclass(slots=True)
class _Selector:
    """The state of a selection."""

    base: SearchNode
    compare: Compare
    search: Callable[[SearchNode, frozenset[str]], SearchNode]
    deadline: float
    at_most: float  # modelled seconds by which one substitution of a sweep may raise the cost
    tidying: frozenset[str]  # rules that clean up after a sweep
    survey: Survey | None
    current: SearchNode | None = None  # the incumbent; None: the original
    name: str = ORIGINAL  # of the incumbent
    trials: list[Trial] = field(default_factory=list)
    undecided: list[tuple[float, SearchNode]] = field(
        default_factory=list
    )  # nodes that may be faster, with the median ratio
    untidy: frozenset[str] = frozenset()  # rules that were measured to lose time
    visited: set[int] = field(init=False)  # fingerprints of the graphs that were tried
    unpriced: tuple[SearchNode, str, _Recipe] | None = None  # what `sweep_unpriced` made the incumbent

    def __post_init__(self) -> None:
        self.visited = {self.base.state.fingerprint}

    def is_new(self, proposal: SearchNode) -> bool:
        """Whether a proposal was not measured yet. The original as imported is one if it differs from its file."""
        return proposal.path is None or proposal.state.fingerprint not in self.visited

    @property
    def _late(self) -> bool:
        return time.monotonic() >= self.deadline

    def sweep_unpriced(self) -> None:
        """Measure the original with sweeps of all rules of low precision that have no price, and of those that apply
        only then.
        """
        node, recipe, what = self.base, _Recipe(frozenset()), ORIGINAL
        while change := self._sweeping_unpriced(node, recipe):
            before, recipe = recipe, change.of(recipe)
            node, what = self._build(node, before, recipe), f"{what} {change.text}"
        if node.state.fingerprint not in self.visited and self._challenge(node, what):
            self.unpriced = node, what, recipe

    def _sweeping_unpriced(self, node: SearchNode, recipe: _Recipe) -> _Change | None:
        """Sweeps of all unpriced rules of low precision that apply and that the recipe does not have."""
        rules = node.state.library.rules
        names = [r for r in sweeping_rules(node, self.at_most) if rules[r].unpriced]
        names = [r for r in names if rules[r].family == _PRECISION and r not in recipe.sweeps]
        parts = {part for r in names for part in rules[r].composite_of}
        names = [r for r in names if r not in parts]
        return _together(names, []) if names else None

    def improve(self, best: SearchNode) -> None:
        """Measure the best proposal, unchanged or improved, and then change one rule or family at a time."""
        what = "the best proposal"
        recipe = _recipe(best)
        accepted = False
        losses = self._survey_steps(best)
        losing = sorted((r for r in recipe.rules if losses.get(r, 0.0) < 0.0), key=lambda r: (losses[r], r))
        self.untidy = frozenset(losing)
        saving = _saving(self._survey_candidates(best))
        if saving or losing:
            change = _together(saving, losing)
            fuller = self._build(best, recipe, change.of(recipe))
            accepted = fuller.state.fingerprint not in self.visited and self._challenge(
                fuller, f"{what} {change.text}"
            )
            if accepted:
                best, what, recipe = fuller, f"{what} {change.text}", change.of(recipe)
        accepted = accepted or self._challenge(best, what)
        if not accepted:
            now = time.monotonic()
            until = now + _MENDING * (self.deadline - now)
            mended, what, recipe = self._climb(best, what, recipe, until, proven=False, sweeping=False)
            accepted = mended is not best and self._challenge(mended, what)
            self.untidy |= recipe.dropped
            best, recipe = mended, _recipe(mended).without(recipe.dropped)
        if accepted:
            self._climb(best, what, recipe, self.deadline, proven=True, sweeping=True)

    def improve_original(self) -> None:
        """Measure the original with sweeps against the incumbent. If `sweep_unpriced` made the incumbent, change it
        instead.
        """
        if self.unpriced is not None and self.current is self.unpriced[0]:
            self._climb(*self.unpriced, self.deadline, proven=True, sweeping=True)
            return
        nothing = self.current is None
        bare = _Recipe(frozenset(), dropped=self.untidy)
        swept, what, _ = self._climb(self.base, ORIGINAL, bare, self.deadline, proven=nothing, sweeping=True)
        if not nothing and swept is not self.base:
            self._challenge(swept, what)

    def try_others(self, proposals: Sequence[SearchNode]) -> None:
        for index, node in enumerate(proposals):
            if self.is_new(node):
                self._challenge(node, f"proposal {index + 2}")

    def choose_likeliest(self, proposals: Sequence[SearchNode]) -> None:
        """If the original is still the incumbent: select a node that may be faster, or the first proposal if no node
        was measured."""
        if self.current is None and self.undecided:
            self.current = max(self.undecided, key=lambda u: u[0])[1]
        if not self.trials and proposals and proposals[0].state.fingerprint != self.base.state.fingerprint:
            self.current = proposals[0]

    def _build(self, start: SearchNode, recipe: _Recipe, changed: _Recipe) -> SearchNode:
        """The search node of the recipe `changed`. `start` is the search node of `recipe`.

        If rules are dropped, a node is built in two ways: from the other substitutions of `start` that still apply, and
        by a new search from the original. Returns the cheaper node that was not tried yet.
        """
        new = changed.sweeps[len(recipe.sweeps) :]
        if recipe.rules == changed.rules:
            return self._swept(start, new, changed)
        reduced = self.search(leave_out(self.base, start.trace, changed.dropped), changed.rules)
        anew = self.search(self.base, changed.rules)
        both = self._swept(reduced, new, changed), self._swept(anew, changed.sweeps, changed)
        return min(both, key=lambda node: (node.state.fingerprint in self.visited, node.cost))

    def _swept(self, node: SearchNode, rules: Sequence[str], changed: _Recipe) -> SearchNode:
        """A state after sweeps of rules, each followed by a search."""
        for rule in rules:
            swept = sweep(node, rule, Limits(deadline=self.deadline), self.at_most)
            if swept.path is not node.path:
                node = self.search(swept, changed.rules | (self.tidying - changed.dropped))
        return node

    def _faster(self, node: SearchNode, proposal: str, than: SearchNode | None, name: str) -> Trial:
        """Measure whether a node is faster, and measure again if it seems to be.

        The addresses of a session's weights in memory change its speed by a percent or more for all its runs. The best
        of many comparisons is therefore too good: of nine gains in a row, 19% together, 1% turned out to be real.
        """
        sure = self.current is not None  # a wrong decision could lose the incumbent

        def holds(ratio: Ratio) -> bool:
            return ratio.convincing if sure else ratio.promising

        ratio = self.compare(than, node)
        if holds(ratio) and not self._late:
            ratio = ratio.weaker(self.compare(than, node))
        trial = Trial(proposal, name, ratio, holds(ratio))
        self.trials.append(trial)
        if than is None and not trial.accepted and ratio.high > _POSSIBLE:
            self.undecided.append((ratio.median, node))
        return trial

    def _survey_candidates(self, node: SearchNode) -> Mapping[str, float]:
        if self.survey is None or self._late:
            return {}
        return self.survey.candidates(node, sweeping_rules(node, self.at_most))

    def _survey_steps(self, node: SearchNode) -> Mapping[str, float]:
        return {} if self.survey is None or self._late else self.survey.steps(node)

    def _climb(
        self, node: SearchNode, at: str, recipe: _Recipe, until: float, proven: bool, sweeping: bool
    ) -> tuple[SearchNode, str, _Recipe]:
        """Change one rule or family at a time, while results are measured to be faster. `sweeping`: also try sweeps.

        `proven`: `node` is faster than the original, so a node that is faster than `node` becomes the incumbent.
        """
        against = None if node is self.base else node
        ahead, back = self._survey_candidates(node) if sweeping else {}, self._survey_steps(node)
        hopeless: set[str] = set()
        changing = True
        while changing and time.monotonic() < until:
            changing = False
            drops = _drops(recipe, node, self.base.cost, back)
            changes = _with_sweeps(drops, node, self.at_most, ahead) if sweeping else drops
            for change in changes:
                if change.text in hopeless or not (change.sweeps or change.without & recipe.rules):
                    continue
                if time.monotonic() >= until:
                    break
                changed = change.of(recipe)
                candidate = self._build(node, recipe, changed)
                if candidate.state.fingerprint in self.visited or time.monotonic() >= until:
                    continue
                self.visited.add(candidate.state.fingerprint)
                proposal = change.text[2:] if node is self.base else f"{at} {change.text}"
                trial = self._faster(candidate, proposal, against, at)
                if trial.accepted:
                    node, against, at, recipe, changing = candidate, candidate, proposal, changed, True
                    if proven:
                        self.current, self.name = node, at
                elif trial.ratio.high < _HOPELESS:
                    hopeless.add(change.text)
        return node, at, recipe

    def _challenge(self, node: SearchNode, proposal: str) -> bool:
        """Measure a node against the incumbent. Returns whether the node becomes the incumbent."""
        if self._late:
            return False
        self.visited.add(node.state.fingerprint)
        accepted = self._faster(node, proposal, self.current, self.name).accepted
        if accepted:
            self.current, self.name = node, proposal
        return accepted
