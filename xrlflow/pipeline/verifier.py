"""Checks whether a result computes the same as the original and, if not, which rule is to blame."""

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

# The minimum time limit of a verification in seconds, and the fraction of its time that the runs of the original may
# take.
_LEAST, _ORIGINAL = 2.0, 0.6


class VerificationFailed(Exception):
    """A graph does not compute the same as the original, or the runtime refuses it. No result was written.

    `why`: what differs, or the error. `rule`: the name of the rule to blame; "" if it is unknown, or if no rule is to
    blame.
    """

    def __init__(self, message: str, why: str = "", rule: str = "") -> None:
        super().__init__(message)
        self.why, self.rule = why or message, rule


class _NoTime(VerificationError):
    """The time limit ended before the rule to blame was found."""


@dataclass(slots=True)
class Verifier:
    """Verifies results of one optimisation. The original is run once, for the first result."""

    context: Context
    limited: bool = True  # verifications end at the deadline of the optimisation
    _reference: Reference | None = field(default=None, init=False)

    def check(self, path: str, steps: Iterable[TraceStep], near: Iterable[int] = ()) -> Verification:
        """Verify the file to which these substitutions led. Sizes of inputs include numbers near those that the
        substitutions' rules mention, and near the numbers in `near`.

        If no inputs are found on which the original runs, the result is "not comparable".
        """
        steps = tuple(steps)
        further = {
            number for rule in self._rules(steps) for number in limits(integers_in_code(rule, types=False))
        } | set(near)
        with deadline.within(self._until()):
            try:
                original = self._original(path, further)
            except InputsNeeded as error:
                return Verification(Status.NOT_COMPARABLE, reason=str(error))
            return original.check(path, nonempty=self._nonempty(steps))

    def check_kernels(
        self,
        path: str,
        steps: Iterable[TraceStep],
        sizes_of_kernels: Sequence[Mapping[str, tuple[int, ...]]],
        rows: int = 0,
    ) -> Verification:
        """Verify a file with generated kernels, on inputs of each of these sizes. `rows`: see `Hybrid`."""
        context, steps = self.context, tuple(steps)
        checks = [self.check(path, steps, [rows] if rows else ())]
        if not checks[0].verified:
            return checks[0]
        references = [self._original()]
        for sizes in sizes_of_kernels[1:]:
            imported = load(context.original.source, shapes={**context.shapes, **sizes})
            with deadline.within(self._until()):
                try:
                    references.append(self._reference_of(imported, against=path))
                except InputsNeeded as error:
                    return Verification(Status.NOT_COMPARABLE, reason=str(error))
                checks.append(references[-1].check(path, nonempty=self._nonempty(steps)))
            if not checks[-1].verified:
                return checks[-1]
        verification = together(checks)
        every_size = all(reference.tries(sizes) for reference, sizes in zip(references, sizes_of_kernels))
        if verification.verified and not every_size:
            why = "no input has the sizes that its kernels are for"
            return Verification(Status.NOT_COMPARABLE, reason=why)
        return verification

    def check_compiled(self, model: CompiledModel, sizes: Mapping[str, tuple[int, ...]]) -> Verification:
        """Verify a compiled model. Raises VerificationFailed unless it is verified."""
        with deadline.within(self._until()):
            verification = self._original().check_compiled(model, sizes)
        if verification.status is Status.NOT_COMPARABLE:
            raise VerificationFailed(
                f"the compiled model cannot be verified: {verification.reason} (--no-verify)"
            )
        if not verification.verified:
            raise VerificationFailed(
                f"the compiled model does not compute the same: {'; '.join(verification.failures)}"
            )
        return verification

    def failure(self, start: Start, node: SearchNode, failed: Verification) -> VerificationFailed:
        """The exception for a graph that differs. It names the rule of the first substitution that broke the model."""
        steps = (*start.early, *node.trace)
        right = on_file(self.context, lambda path: self.check(path, steps).verified)
        return failure(self.context, start, node, failed.message(), right)

    def _rules(self, steps: Sequence[TraceStep]) -> list[AnyRule]:
        rules = self.context.library.rules
        return [rules[name] for name in sorted({step.rule for step in steps} & rules.keys())]

    def _nonempty(self, steps: Sequence[TraceStep]) -> list[str]:
        """The rules of these steps that require sizes of at least 1."""
        return [rule.name for rule in self._rules(steps) if rule.nonempty]

    def _original(self, against: str | None = None, further: Iterable[int] = ()) -> Reference:
        """The original's outputs, for all verifications.

        `against`: the first result, whose constants suggest inputs. `further`: numbers that the rules of its
        substitutions mention.
        """
        context, options = self.context, self.context.options
        context.say("verify", note="on random inputs")
        if self._reference is None:
            self._reference = self._reference_of(
                context.imported, against=against, inputs=options.inputs, further=further
            )
        return self._reference

    def _reference_of(self, imported: ImportedModel, **how: Any) -> Reference:
        """Run the original. If the options assume that no dimension is 0, no input has a size of 0."""
        context, options = self.context, self.context.options
        # The time that remains is for the runs of the result.
        with deadline.within(time.monotonic() + _ORIGINAL * deadline.remaining()):
            reference = Reference.of(
                context.meant or context.original.runnable, imported=imported, seed=options.seed,
                threads=context.threads, session_options=options.session_options, **how,
            )  # fmt: skip
        return replace(reference, empty=()) if NONEMPTY in options.assumptions else reference

    def _until(self) -> float:
        """The deadline of a verification that begins now. It always leaves enough time for one or two cases."""
        return max(self.context.clock.budget.until, time.monotonic() + _LEAST) if self.limited else math.inf


def check_without(context: Context, start: Start, node: SearchNode) -> None:
    """Raise VerificationFailed if a graph that is wrong with generated kernels is also wrong without them."""
    verifier = Verifier(context)
    path = context.artifact(without_placement(node.state.graph)).file
    with context.clock.phase("verify"):
        checked = verifier.check(path, (*start.early, *node.trace))
        if checked.status is Status.FAILED:
            raise verifier.failure(start, node, checked)


def on_file(context: Context, right: Callable[[str], bool]) -> Callable[[Graph], bool]:
    """A function that writes a graph and returns whether the file is right."""

    return lambda graph: right(context.artifact(graph).file)


def failure(
    context: Context, start: Start, node: SearchNode, why: str, right: Callable[[Graph], bool]
) -> VerificationFailed:
    """The exception for a graph that is wrong (`why`), with the rule to blame. `right`: whether a graph is right."""
    nothing = f"{context.imported.name}: nothing was written: {why}; the substitution that caused it"
    try:
        rule = _culprit(context, start, node, right)
    except (NotASubstitution, NotRepeatable, _NoTime) as error:
        return VerificationFailed(f"{nothing}: {error}", f"{why} ({error})")
    return VerificationFailed(f"{nothing}: {rule}", why, rule)


def _culprit(context: Context, start: Start, node: SearchNode, right: Callable[[Graph], bool]) -> str:
    """The name of the rule whose substitution was the first to break the model, in the search or before it.

    Raises NotASubstitution, NotRepeatable and _NoTime.
    """

    def checked(graph: Graph) -> bool:
        if time.monotonic() > context.clock.deadline:
            raise _NoTime("there was no time to find the substitution to blame (--time-limit)")
        return right(without_placement(graph))

    base, steps = start.base.state.graph, node.trace
    after = replay(RewriteState.start(base, node.state.library), steps)
    graphs = [base, *(state.graph for state in after)]
    try:
        return steps[blame(lambda k: graphs[k], len(steps), checked)].rule
    except NotASubstitution:
        if not start.early:
            raise
    rules = list(dict.fromkeys(step.rule for step in start.early))
    return rules[blame(lambda k: restarted(context, start, rules[k:]).base.state.graph, len(rules), checked)]


def together(checks: Sequence[Verification]) -> Verification:
    """Several verifications of one model as one: the verdict of the last one, on the inputs of all. `outputs`: the
    worst result of each output.

    A guard for one size is never true on inputs of another size. So a branch of a guard counts as reached, since each
    size was verified by itself.
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
    exactness = [check.exactness for check in checks]
    return replace(
        last,
        outputs=max(checks, key=lambda check: check.max_error).outputs,
        notes=tuple(notes),
        bindings=tuple(b for check in checks for b in check.bindings),
        cases=sum(check.cases for check in checks),
        values=tuple(dict.fromkeys(value for check in checks for value in check.values)),
        left_out=tuple(dict.fromkeys(text for check in checks for text in check.left_out)),
        unexercised=unexercised,
        exactness=None if None in exactness else max(e for e in exactness if e is not None),
    )


def remarks(verification: Verification) -> Iterator[str]:
    """Remarks for the user on a verification that passed: the sizes that were run, and the cases that were not."""
    if verification.bindings:
        yield f"verified with {verification.sizes}"
    if verification.left_out:
        yield f"not verified with {'; '.join(verification.left_out)}"
    yield from (f"verification: {note}" for note in verification.notes)
