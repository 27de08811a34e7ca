"""Judges one candidate that ONNX Runtime runs: compares it with the original in fresh processes, and verifies it."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial

from xrlflow.backends import BackendError, RepeatedComparison
from xrlflow.backends.onnxruntime import Deciding, measure_in_fresh_processes
from xrlflow.backends.results import Verdict
from xrlflow.pipeline.context import Context
from xrlflow.pipeline.finish import Finished
from xrlflow.pipeline.prepare import Start
from xrlflow.pipeline.sizes import seconds_at_sizes, slower_with
from xrlflow.pipeline.verifier import Verifier, failure, on_file
from xrlflow.report import compared_with, not_verified_in_time
from xrlflow.search import SearchNode
from xrlflow.verify import Status, Verification
from xrlflow.verify.isolated import run_isolated

NOT_MEASURED = "the result could not be measured"
# The smallest time limit in seconds of a last comparison that decides nothing, because a compiled model is returned in
# any case.
_FINAL_AT_LEAST = 3.0


def runs(context: Context, path: str) -> bool:
    """Whether the runtime loads a file and runs it on the inputs of measurements, in a separate process."""
    options = context.options.session_options
    assert context.feeds is not None
    try:
        run_isolated(path, context.feeds, threads=context.threads, session_options=options)
    except BackendError:
        return False
    return True


@dataclass(slots=True)
class Judging:
    """A proposal, written at `path`, as a `Candidate`.

    It is verified only if it is faster, because verification may take longer than everything else.
    """

    context: Context
    start: Start
    node: SearchNode
    path: str
    decision: Finished  # the parts of the decision that exist already, such as the selection
    kernels: Sequence[Mapping[str, tuple[int, ...]]] = ()
    """The file has generated kernels for inputs of each of these sizes. If the file computes something else, it is
    rejected, and no substitution is blamed.
    """
    decides: bool = True  # whether the file is accepted only if a comparison shows that it is faster
    verification: Verification | None = field(default=None, init=False)
    slower: str = field(default="", init=False)  # with which sizes it is slower than the original

    def judged(self) -> Finished:
        options = self.context.options
        compared: RepeatedComparison | None = None
        if self._deciding:
            try:
                compared = decided(self.context, self.path, self.usable)
            except BackendError as error:
                self._blame(str(error))
                return self._decision(None, f"it could not be measured: {error}")
            if compared.verdict is not Verdict.FASTER:
                return self._decision(None, compared_with(compared), compared)
            if self.slower:
                return self._decision(None, self.slower, compared)
            if options.verify and self.verification is None:
                return self._decision(None, not_verified_in_time(compared), compared)
        elif self.right() and options.measure:
            compared = final(self.context, self.path, self.verification)
        if self.verification is not None and not self.verification.verified:
            why = self.verification.reason or "; ".join(self.verification.failures)
            reason = f"the result cannot be verified: {why}"
            return self._decision(None, reason, compared)
        reason = compared_with(compared) if compared else NOT_MEASURED if options.measure else "not measured"
        return self._decision(self.node, reason, compared)

    def _decision(
        self, accepted: SearchNode | None, reason: str, compared: RepeatedComparison | None = None
    ) -> Finished:
        return replace(
            self.decision, accepted=accepted, reason=reason, verification=self.verification, compared=compared
        )

    def _blame(self, error: str) -> None:
        """Raise VerificationFailed if a rule caused a graph that does not run in a separate process."""
        if not self.kernels and not runs(self.context, self.path):
            right = on_file(self.context, partial(runs, self.context))
            raise failure(self.context, self.start, self.node, error, right)

    @property
    def _deciding(self) -> bool:
        options = self.context.options
        return self.decides and options.measure

    def usable(self) -> bool:
        """Whether the result was verified, and is slower than the original with none of the measured sizes. Raises what
        `right` raises."""
        if not self.right():
            return False
        self.slower = slower_with(self.context, self.path)
        return not self.slower

    def right(self) -> bool:
        """Whether the result was verified. Raises VerificationFailed if it computes something else or fails."""
        clock = self.context.clock
        if not self.context.options.verify:
            return True
        if self._deciding and not clock.budget.can_verify(time.monotonic()):
            return False
        with clock.phase("verify"):
            verifier = Verifier(self.context)
            steps = (*self.start.early, *self.node.trace)
            if self.kernels:
                hybrid = self.decision.hybrid
                rows = 0 if hybrid is None else hybrid.rows
                self.verification = verifier.check_kernels(self.path, steps, self.kernels, rows)
                return self.verification.verified
            self.verification = verifier.check(self.path, steps)
            if self.verification.status is Status.FAILED:
                raise verifier.failure(self.start, self.node, self.verification)
        return self.verification.verified


def final(
    context: Context, path: str, verification: Verification | None, seconds: float | None = None
) -> RepeatedComparison | None:
    """The reported speed-up of a result over the original, measured in fresh processes; None, with a note, if these
    processes fail for a result that was verified (and so does run).

    `seconds`: the time limit; by default all time that is left for the optimisation. Raises BackendError if a result
    that was not verified cannot be measured.
    """
    if seconds is None:
        seconds = max(_FINAL_AT_LEAST, context.clock.budget.until - time.monotonic())
    try:
        return _compared(context, path, seconds)
    except BackendError as error:
        if verification is None:
            raise
        context.notes.append(f"{NOT_MEASURED}: {error}")
        return None


def decided(context: Context, path: str, check: Callable[[], bool]) -> RepeatedComparison:
    """The comparison that decides whether a result is faster than the original. If the result is faster, and passes
    `check`, its reported speed-up is measured as well.
    """
    now, budget = time.monotonic(), context.clock.budget
    patience = max(budget.end - budget.verification - now, 0.0)
    checking = budget.verification + seconds_at_sizes(context)
    return _compared(context, path, budget.final(now), Deciding(check, checking, patience))


def _compared(
    context: Context, path: str, seconds: float, deciding: Deciding | None = None
) -> RepeatedComparison:
    assert context.feeds is not None
    with context.clock.phase("measure"):
        original = context.original.file
        context.say("measure", note="in fresh processes")
        return measure_in_fresh_processes(
            original, path, dict(context.feeds), deciding=deciding, threads=context.threads, time_limit=seconds,
            session_options=context.options.session_options,
        )  # fmt: skip
