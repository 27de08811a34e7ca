"""Whether a result computes the same as the original, and if not, which rule is to blame."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from rewrite_rules.placement import without_placement
from xrlflow.backends.protocol import CompiledModel
from xrlflow.common import deadline
from xrlflow.ir import Graph
from xrlflow.onnxio import ImportedModel, load
from xrlflow.options import NONEMPTY
from xrlflow.pipeline.context import Context
from xrlflow.pipeline.prepare import Start, restarted
from xrlflow.prover.thresholds import integers_in_code, limits
from xrlflow.rewrite import AnyRule, RewriteState
from xrlflow.search import SearchNode, TraceStep, replay
from xrlflow.verify import (
    GUARD,
    InputsNeeded,
    NotASubstitution,
    NotRepeatable,
    Reference,
    Status,
    Verification,
    VerificationError,
    blame,
    not_exercised,
)

# Seconds that a verification has in any case; the part of its time that the original has.
_LEAST, _ORIGINAL = 2.0, 0.6


class VerificationFailed(Exception):
    """A graph does not compute the same as the original, or the runtime refuses it. It was not written.

    `why`: what was seen. `rule`: the name of the rule to blame; "" if it is not known, or none is.
    """

    def __init__(self, message: str, why: str = "", rule: str = "") -> None:
        super().__init__(message)
        self.why, self.rule = why or message, rule


class _NoTime(VerificationError):
    """The time limit ended before it was known which rule is to blame."""


@dataclass(slots=True)
class Verifier:
    """Verifies results of one optimisation. The original is run once, for the first result.

    `held`: a verification is over when the optimisation has to be.
    """

    context: Context
    held: bool = True
    _reference: Reference | None = field(default=None, init=False)

    def check(self, path: str, steps: Iterable[TraceStep]) -> Verification:
        """Verify a file that these substitutions led to. Inputs include the numbers that their rules compare with.

        Where no inputs are found on which the original runs, it is not comparable.
        """
        steps = tuple(steps)
        further = {
            number for rule in self._rules(steps) for number in limits(integers_in_code(rule, types=False))
        }
        with deadline.within(self._until()):
            try:
                original = self._original(path, further)
            except InputsNeeded as error:
                return Verification(Status.NOT_COMPARABLE, reason=str(error))
            return original.check(path, nonempty=self._nonempty(steps))

    def check_kernels(
        self, path: str, steps: Iterable[TraceStep], wanted: Sequence[Mapping[str, tuple[int, ...]]]
    ) -> Verification:
        """Verify a file with kernels of our own for inputs of each of these sizes."""
        context, steps = self.context, tuple(steps)
        checks = [self.check(path, steps)]
        if not checks[0].verified:
            return checks[0]
        references = [self._original()]
        for sizes in wanted[1:]:
            imported = load(context.original.source, shapes={**context.shapes, **sizes})
            with deadline.within(self._until()):
                try:
                    references.append(self._reference_of(imported, against=path))
                except InputsNeeded as error:
                    return Verification(Status.NOT_COMPARABLE, reason=str(error))
                checks.append(references[-1].check(path, nonempty=self._nonempty(steps)))
            if not checks[-1].verified:
                return checks[-1]
        found = together(checks)
        tried = all(reference.tries(sizes) for reference, sizes in zip(references, wanted))
        if found.verified and not tried:
            why = "no input has the sizes that its kernels are for"
            return Verification(Status.NOT_COMPARABLE, reason=why)
        return found

    def check_compiled(self, model: CompiledModel, sizes: Mapping[str, tuple[int, ...]]) -> Verification:
        """Verify a compiled model. Raises VerificationFailed if it is not known to compute the same."""
        with deadline.within(self._until()):
            found = self._original().check_compiled(model, sizes)
        if found.status is Status.NOT_COMPARABLE:
            raise VerificationFailed(f"the compiled model cannot be verified: {found.reason} (--no-verify)")
        if not found.verified:
            raise VerificationFailed(
                f"the compiled model does not compute the same: {'; '.join(found.failures)}"
            )
        return found

    def failure(self, start: Start, chosen: SearchNode, failed: Verification) -> VerificationFailed:
        """What is raised for a graph that differs. It names the rule of the first substitution that broke the model."""
        steps = (*start.early, *chosen.trace)
        right = on_file(self.context, lambda path: self.check(path, steps).verified)
        return failure(self.context, start, chosen, failed.message(), right)

    def _rules(self, steps: Sequence[TraceStep]) -> list[AnyRule]:
        known = self.context.library.rules
        return [known[name] for name in sorted({step.rule for step in steps} & known.keys())]

    def _nonempty(self, steps: Sequence[TraceStep]) -> list[str]:
        """The rules that made these steps and need sizes from 1."""
        return [rule.name for rule in self._rules(steps) if rule.nonempty]

    def _original(self, against: str | None = None, further: Iterable[int] = ()) -> Reference:
        """The reference runs of the original.

        `against`: the first result; inputs include the constants that it compares with. `further`: such numbers of the
        rules that made it.
        """
        context, options = self.context, self.context.options
        context.say("verify", note="on random inputs")
        if self._reference is None:
            self._reference = self._reference_of(
                context.imported, against=against, inputs=options.inputs, further=further
            )
        return self._reference

    def _reference_of(self, imported: ImportedModel, **how: Any) -> Reference:
        """The original, run once more. Under the assumption that no dimension is 0 none is."""
        context, options = self.context, self.context.options
        # The result needs time, too.
        with deadline.within(time.monotonic() + _ORIGINAL * deadline.remaining()):
            found = Reference.of(
                context.original.runnable, imported=imported, seed=options.seed, threads=context.threads,
                session_options=options.session_options, **how,
            )  # fmt: skip
        return replace(found, empty=()) if NONEMPTY in options.assumptions else found

    def _until(self) -> float:
        """When a verification that begins now is over. One case or two are run in any case."""
        return max(self.context.clock.budget.until, time.monotonic() + _LEAST) if self.held else math.inf


def check_without(context: Context, start: Start, found: SearchNode) -> None:
    """Raise VerificationFailed if a graph that is wrong with kernels of our own is wrong without them, too."""
    verifier = Verifier(context)
    path = context.artifact(without_placement(found.state.graph)).file
    with context.clock.phase("verify"):
        checked = verifier.check(path, (*start.early, *found.trace))
        if checked.status is Status.FAILED:
            raise verifier.failure(start, found, checked)


def on_file(context: Context, right: Callable[[str], bool]) -> Callable[[Graph], bool]:
    """Whether the file of a graph is right."""

    return lambda graph: right(context.artifact(graph).file)


def failure(
    context: Context, start: Start, chosen: SearchNode, why: str, right: Callable[[Graph], bool]
) -> VerificationFailed:
    """What is raised for a graph that is wrong (`why`), with the rule to blame. `right`: whether a graph is."""
    nothing = f"{context.imported.name}: nothing was written: {why}; the substitution that caused it"
    try:
        rule = _culprit(context, start, chosen, right)
    except (NotASubstitution, NotRepeatable, _NoTime) as error:
        return VerificationFailed(f"{nothing}: {error}", f"{why} ({error})")
    return VerificationFailed(f"{nothing}: {rule}", why, rule)


def _culprit(context: Context, start: Start, chosen: SearchNode, right: Callable[[Graph], bool]) -> str:
    """The name of the rule of the first substitution that broke a model, the search's or one made before it.

    Raises NotASubstitution, NotRepeatable and _NoTime.
    """

    def checked(graph: Graph) -> bool:
        if time.monotonic() > context.clock.deadline:
            raise _NoTime("there was no time to find the substitution to blame (--time-limit)")
        return right(without_placement(graph))

    base, steps = start.base.state.graph, chosen.trace
    after = replay(RewriteState.start(base, chosen.state.library), steps)
    graphs = [base, *(state.graph for state in after)]
    try:
        return steps[blame(lambda k: graphs[k], len(steps), checked)].rule
    except NotASubstitution:
        if not start.early:
            raise
    rules = list(dict.fromkeys(step.rule for step in start.early))
    return rules[blame(lambda k: restarted(context, start, rules[k:]).base.state.graph, len(rules), checked)]


def together(checks: Sequence[Verification]) -> Verification:
    """What several verifications of one model say: the last verdict, on all that was tried. `outputs`: the worst.

    A guard of one size inside the graph for another size is never true. That each size was tried is known otherwise.
    """
    last = checks[-1]
    unexercised = tuple(
        arm
        for arm in last.unexercised
        if not GUARD.match(arm) and all(arm in check.unexercised for check in checks)
    )
    exercised = {
        not_exercised(arm) for check in checks for arm in check.unexercised if arm not in unexercised
    }
    notes = dict.fromkeys(note for check in checks for note in check.notes if note not in exercised)
    return replace(
        last,
        outputs=max(checks, key=lambda check: check.max_error).outputs,
        notes=tuple(notes),
        bindings=tuple(b for check in checks for b in check.bindings),
        cases=sum(check.cases for check in checks),
        values=tuple(dict.fromkeys(value for check in checks for value in check.values)),
        left_out=tuple(dict.fromkeys(text for check in checks for text in check.left_out)),
        unexercised=unexercised,
    )


def remarks(verification: Verification) -> Iterator[str]:
    """What a reader should know about a verification that passed: sizes that were run, and what was not run."""
    if verification.bindings:
        yield f"verified with {verification.sizes}"
    if verification.left_out:
        yield f"not verified with {'; '.join(verification.left_out)}"
    yield from (f"verification: {note}" for note in verification.notes)
