"""The end of an optimisation with ONNX Runtime: one proposal is chosen, compared with the original, and verified."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial

from xrlflow.backends import BackendError, RepeatedComparison
from xrlflow.backends.onnxruntime import Deciding, measure_in_fresh_processes
from xrlflow.backends.results import Verdict
from xrlflow.ir import Graph
from xrlflow.onnxio import ImportedModel, ModelError, check_result
from xrlflow.pipeline.choose import Unrunnable, choose
from xrlflow.pipeline.context import Context
from xrlflow.pipeline.explore import Explored
from xrlflow.pipeline.finish import Finished
from xrlflow.pipeline.prepare import Start
from xrlflow.pipeline.verifier import Verifier, failure, on_file
from xrlflow.report import compared_with, not_verified_in_time, nothing_chosen, operators
from xrlflow.search import SearchNode, Selection
from xrlflow.verify import Status, Verification
from xrlflow.verify.apart import run_apart

# The fewest seconds of the last comparison where it decides nothing, because a compiled model is returned in any case.
_FINAL_AT_LEAST = 3.0


@dataclass(frozen=True, slots=True)
class Proposal:
    """What was chosen among the search's proposals, by measurement if there was one (`selection`).

    `chosen`: None if nothing is worth a comparison with the original.
    """

    chosen: SearchNode | None
    selection: Selection | None


def finish(context: Context, start: Start, explored: Explored) -> Finished:
    """Choose a proposal by measurement, and keep it if it is faster than the original and verified.

    Without measuring, the first proposal is chosen. See `Finisher`.
    """
    return judged(context, start, explored, propose(context, start, explored))


def propose(context: Context, start: Start, explored: Explored) -> Proposal:
    """Choose a proposal. Raises KeyboardInterrupt if the search was interrupted before anything was chosen, and
    VerificationFailed if the runtime refuses the best proposal for the sake of one rule."""
    options = context.options
    leaner = _runs_fewer(context.imported, start.base.state.graph)
    selection: Selection | None = None
    chosen: SearchNode | None = None
    if options.replay is not None:
        chosen = explored.result.best if context.fits(explored.result.best) else None
    elif options.measure and options.search != "random":
        selection = _selected(context, start, explored, leaner)
        chosen = selection.selected
    elif explored.proposals:
        best = explored.proposals[0]
        if options.search == "random" or best.cost < start.base.cost or leaner:
            chosen = best
    if chosen is not None and chosen.path is None and not leaner and not start.early:
        chosen = None
    return Proposal(chosen, selection)


def judged(context: Context, start: Start, explored: Explored, proposal: Proposal) -> Finished:
    """Keep a proposal if it is faster than the original and verified. Raises VerificationFailed."""
    chosen, selection = proposal.chosen, proposal.selection
    if chosen is None:
        return Finished(None, nothing_chosen(selection, explored.late), selection=selection)
    try:
        context.notes.extend(check_result(context.imported, chosen.state.graph))
        path = context.artifact(chosen.state.graph).file
    except ModelError as error:
        raise failure(context, start, chosen, str(error), partial(_is_model, context)) from error
    judging = Judging(context, start, chosen, path)
    return replace(judging.finished(), selection=selection)


def _runs_fewer(imported: ImportedModel, graph: Graph) -> bool:
    """Whether importing the file (folding constants, dropping dead nodes) leaves fewer operators to run."""
    return sum(operators(graph).values()) < imported.nodes_before


def _selected(context: Context, start: Start, explored: Explored, leaner: bool) -> Selection:
    """Choose among the proposals. Raises what `propose` raises."""
    improving: Sequence[SearchNode] = explored.proposals
    if not (leaner or start.early):
        improving = [f for f in improving if f.path is not None]
    with context.clock.phase("select"):
        try:
            selection = choose(context, start, improving, strict=True)
        except Unrunnable as refused:
            failed = failure(
                context, start, refused.found, str(refused), on_file(context, partial(_runs, context))
            )
            if failed.rule:
                raise failed from refused
            selection = choose(context, start, improving)
    if selection.interrupted and explored.result.interrupted:
        raise KeyboardInterrupt
    if selection.interrupted:
        context.notes.append("interrupted while whole models were compared: the best so far is kept")
        context.clock.hurry()
    return selection


def _is_model(context: Context, graph: Graph) -> bool:
    """Whether a graph can be written, as a model to which ONNX's checker has no objection."""
    try:
        check_result(context.imported, graph)
        return bool(context.artifact(graph).file)
    except ModelError:
        return False


def _runs(context: Context, path: str) -> bool:
    """Whether the runtime loads a file and runs it on the inputs of measurements, in a process of its own."""
    options = context.options.session_options
    assert context.feeds is not None
    try:
        run_apart(path, context.feeds, threads=context.threads, session_options=options)
    except BackendError:
        return False
    return True


@dataclass(slots=True)
class Judging:
    """One proposal, at `path`, against the original.

    It is verified only if it is faster, because verifying may take longer than everything else. `kernels`: the file has
    kernels of our own, for inputs of each of these sizes; if it computes something else it is not kept, and no
    substitution is to blame. `decides`: a comparison decides whether it is kept.
    """

    context: Context
    start: Start
    chosen: SearchNode
    path: str
    kernels: Sequence[Mapping[str, tuple[int, ...]]] = ()
    decides: bool = True
    verification: Verification | None = field(default=None, init=False)

    def finished(self) -> Finished:
        options = self.context.options
        compared: RepeatedComparison | None = None
        if self._deciding:
            try:
                compared = decided(self.context, self.path, self.right)
            except BackendError as error:
                self._blame(str(error))
                return Finished(None, f"it could not be measured: {error}", self.verification)
            if compared.verdict is not Verdict.FASTER:
                return Finished(None, compared_with(compared), self.verification, compared)
            if options.verify and self.verification is None:
                return Finished(None, not_verified_in_time(compared), None, compared)
        elif self.right() and options.measure:
            compared = final(self.context, self.path)
        if self.verification is not None and not self.verification.verified:
            said = self.verification.reason or "; ".join(self.verification.failures)
            reason = f"the result cannot be verified: {said}"
            return Finished(None, reason, self.verification, compared)
        reason = compared_with(compared) if compared else "not measured"
        return Finished(self.chosen, reason, self.verification, compared)

    def _blame(self, error: str) -> None:
        """Raise VerificationFailed if a rule made a graph that does not run in a process of its own."""
        if not self.kernels and not _runs(self.context, self.path):
            right = on_file(self.context, partial(_runs, self.context))
            raise failure(self.context, self.start, self.chosen, error, right)

    @property
    def _deciding(self) -> bool:
        options = self.context.options
        return self.decides and options.measure

    def right(self) -> bool:
        """Whether the result was verified. Raises VerificationFailed if it computes something else or fails."""
        clock = self.context.clock
        if not self.context.options.verify:
            return True
        if self._deciding and not clock.budget.can_verify(time.monotonic()):
            return False
        with clock.phase("verify"):
            verifier = Verifier(self.context)
            steps = (*self.start.early, *self.chosen.trace)
            if self.kernels:
                self.verification = verifier.check_kernels(self.path, steps, self.kernels)
                return self.verification.verified
            self.verification = verifier.check(self.path, steps)
            if self.verification.status is Status.FAILED:
                raise verifier.failure(self.start, self.chosen, self.verification)
        return self.verification.verified


def final(context: Context, path: str, seconds: float | None = None) -> RepeatedComparison:
    """The reported speed-up of a result over the original, from fresh processes.

    `seconds`: the time limit; by default what is left of the whole.
    """
    if seconds is None:
        seconds = max(_FINAL_AT_LEAST, context.clock.budget.until - time.monotonic())
    return _compared(context, path, seconds)


def decided(context: Context, path: str, check: Callable[[], bool]) -> RepeatedComparison:
    """Whether a result is faster than the original; if so, and if `check` admits it, also by how much."""
    now, left = time.monotonic(), context.clock.budget
    patience = max(left.end - left.verification - now, 0.0)
    return _compared(context, path, left.final(now), Deciding(check, left.verification, patience))


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
