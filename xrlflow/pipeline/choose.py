"""Choosing by measurement, end to end, among the search's proposals and changes of them."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace

from xrlflow.backends import BackendError
from xrlflow.backends.onnxruntime import measure
from xrlflow.cost import InContextBenchmark
from xrlflow.pipeline.context import Context
from xrlflow.pipeline.prepare import Start
from xrlflow.rewrite import RewriteState
from xrlflow.search import Limits, Ratio, SearchNode, Selection, append, greedy, retrace, select

# Substitutions that the model sees as a loss of no more than this part of the cost are left to measurement.
_TOLERANCE = 0.02
# Comparing two models ends early when the interval is clear of 1 by this much, or so narrow.
_DECIDED, _NARROW = 0.01, 0.02
# Seconds that a comparison has in any case.
_COMPARE_AT_LEAST = 0.5
# The parts of the time of the selection that is left that may go into one look at substitutions in their surroundings:
# those that were made (they make up the best proposal, which is measured first), and those that could be.
_LOOKING_BACK, _LOOKING_AHEAD = 0.25, 0.15
# Families whose substitutions clear away what others leave behind.
_TIDYING = frozenset({"identity", "reshape", "slices", "transpose"})
_REFUSED = Ratio(0.0, 0.0, 0.0)


def choose(context: Context, start: Start, proposals: Sequence[SearchNode]) -> Selection:
    """What runs fastest end to end, of those of the proposals that are not too large."""
    clock, library = context.clock, context.library
    in_context = InContextBenchmark(
        context.threads, context.imported.bindings, session_options=context.options.session_options
    )
    deadline = clock.budget.begin_comparing_until
    trials = _Trials(context, clock.budget.select_until)
    tidying = frozenset(name for name, rule in library.rules.items() if rule.family in _TIDYING)
    selection = select(
        start.base, [f for f in proposals if context.fits(f)], trials.compare, trials.search, deadline, _TOLERANCE,
        tidying, _Survey(in_context, start.base, deadline, trials.say),
    )  # fmt: skip
    context.notes.extend(f"not measured where it stands: {refusal}" for refusal in in_context.refused)
    return selection


@dataclass(slots=True)
class _Trials:
    """Comparisons of whole models, and the searches for what to compare, until `deadline` (time.monotonic)."""

    context: Context
    deadline: float
    count: int = field(default=0, init=False)

    def say(self) -> None:
        self.context.say("select", self.count, 0, "measuring substitutions where they stand")

    def compare(self, against: SearchNode | None, found: SearchNode) -> Ratio:
        """How many times faster `found` is, than the original (None) or another state; 0 if it cannot be run."""
        context = self.context
        if not context.fits(found):
            growth = context.options.max_growth
            context.notes.append(
                f"a proposal was dropped: over {growth:g} times the input's size (--max-growth)"
            )
            return _REFUSED
        self.count += 1
        context.say("select", self.count, 0, "measuring whole models")
        written = [context.write(f.state.graph) for f in (against, found) if f is not None]
        models = written if against is not None else [context.original, *written]
        left = max(_COMPARE_AT_LEAST, self.deadline - time.monotonic())
        assert context.feeds is not None
        try:
            measured = measure(
                models, dict(context.feeds), threads=context.threads,
                time_limit=min(context.clock.budget.each_comparison, left), target_width=_NARROW, control=False,
                margin=_DECIDED, session_options=context.options.session_options, load_reversed=self.count % 2 == 0,
            )  # fmt: skip
        except BackendError as error:  # the original ran: it is the proposal that the runtime refuses
            context.notes.append(f"a proposal was dropped: {error}")
            return _REFUSED
        for path in written:
            context.remove(path)
        return Ratio(measured.speedup.median, measured.speedup.low, measured.speedup.high)

    def search(self, found: SearchNode, rules: frozenset[str]) -> SearchNode:
        """Greedy with some rules, and all rules' candidates at the end."""
        library = self.context.library
        state = RewriteState.start(found.state.graph, library.only(rules), found.state.delta)
        result = greedy(state, found.cost, Limits(self.context.options.budget, self.deadline))
        if result.interrupted:  # it is the selection that keeps what it has
            raise KeyboardInterrupt
        better = result.best
        if better.path is None:
            return found
        path = found.path
        for step in better.trace:
            path = append(path, step)
        full = RewriteState.start(better.state.graph, library, found.state.delta)
        return replace(better, state=full, path=path)


@dataclass(frozen=True, slots=True)
class _Survey:
    """Substitutions measured where they stand, within the time of the selection."""

    in_context: InContextBenchmark
    base: SearchNode
    deadline: float
    say: Callable[[], None]

    def candidates(self, found: SearchNode, rules: Sequence[str]) -> Mapping[str, float]:
        return self.in_context.survey(
            found.state, rules, _TOLERANCE * self.base.cost, self._until(_LOOKING_AHEAD)
        )

    def steps(self, found: SearchNode) -> Mapping[str, float]:
        made = ((state, match) for state, match, _ in retrace(self.base.state, found.trace))
        return self.in_context.retrace(made, self._until(_LOOKING_BACK))

    def _until(self, share: float) -> float:
        self.say()
        now = time.monotonic()
        return now + share * (self.deadline - now)
