"""Whether a result computes the same as the original, and if not, which substitution is to blame."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace

from xrlflow.backends.protocol import CompiledModel
from xrlflow.onnxio import load
from xrlflow.pipeline.context import Context
from xrlflow.pipeline.prepare import Start
from xrlflow.prover.thresholds import limits, written
from xrlflow.search import SearchNode, TraceStep, replay
from xrlflow.verify import (
    NotASubstitution,
    NotRepeatable,
    Reference,
    Status,
    Verification,
    blame,
    not_exercised,
)

# A branch of a comparison of sizes (`regions.with_guard`), as `branches` names it.
_GUARD = re.compile(r"If xrlflow\.[0-9a-f]{16}\.\w+\.guard")


class VerificationFailed(Exception):
    """The result does not compute the same as the original. It was not written."""


@dataclass(slots=True)
class Verifier:
    """Verifies results of one optimisation. The original is run once, for the first result."""

    context: Context
    _reference: Reference | None = field(default=None, init=False)

    def check(self, path: str, steps: Iterable[TraceStep]) -> Verification:
        """Verify a file that these substitutions led to. Inputs include the numbers that their rules compare with."""
        known = self.context.library.rules
        rules = [known[name] for name in sorted({s.rule for s in steps} & known.keys())]
        further = {number for rule in rules for number in limits(written(rule, types=False))}
        nonempty = [rule.name for rule in rules if rule.nonempty]
        return self._original(path, further).check(path, nonempty=nonempty)

    def check_kernels(
        self, path: str, steps: Iterable[TraceStep], wanted: Sequence[Mapping[str, tuple[int, ...]]]
    ) -> Verification:
        """Verify a file with kernels of our own for inputs of each of these sizes."""
        context = self.context
        checks = [self.check(path, steps)]
        references = [self._original()]
        for sizes in wanted[1:]:
            if not checks[-1].verified:
                return checks[-1]
            imported = load(context.source, shapes={**context.shapes, **sizes})
            references.append(
                Reference.of(
                    context.original, imported=imported, against=path, seed=context.options.seed,
                    threads=context.threads, session_options=context.options.session_options,
                )
            )  # fmt: skip
            checks.append(references[-1].check(path))
        found = together(checks)
        tried = all(reference.tries(sizes) for reference, sizes in zip(references, wanted))
        if found.verified and not tried:
            why = "no input has the sizes that its kernels are for"
            return Verification(Status.NOT_COMPARABLE, reason=why)
        return found

    def check_compiled(self, model: CompiledModel, sizes: Mapping[str, tuple[int, ...]]) -> Verification:
        """Verify a compiled model. Raises VerificationFailed if it is not known to compute the same."""
        found = self._original().check_compiled(model, sizes)
        if found.status is Status.NOT_COMPARABLE:
            raise VerificationFailed(f"the compiled model cannot be verified: {found.reason} (--no-verify)")
        if not found.verified:
            raise VerificationFailed(
                f"the compiled model does not compute the same: {'; '.join(found.failures)}"
            )
        return found

    def blame(self, start: Start, chosen: SearchNode, failed: Verification) -> str:
        """A message that names the first substitution that broke the model."""
        context, steps = self.context, (*start.early, *chosen.trace)
        graphs = [start.base.state.graph, *(s.graph for s in replay(start.base.state, chosen.trace))]
        culprits = [f"{s.rule} (step {i} of {len(chosen.trace)})" for i, s in enumerate(chosen.trace, 1)]
        if start.early:
            graphs.insert(0, context.imported.graph)
            rules = ", ".join(sorted({s.rule for s in start.early}))
            culprits.insert(0, f"one of those before the search ({rules})")

        def right(path: str) -> bool:
            return self.check(path, steps).verified

        try:
            culprit = culprits[blame(lambda k: context.write(graphs[k]), len(culprits), right)]
        except (NotASubstitution, NotRepeatable) as error:
            culprit = str(error)
        return f"{context.imported.name}: nothing was written: {failed.message(culprit)}"

    def _original(self, against: str | None = None, further: Iterable[int] = ()) -> Reference:
        """The reference runs of the original.

        `against`: the first result; inputs include the constants that it compares with. `further`: such numbers of the
        rules that made it.
        """
        context, options = self.context, self.context.options
        context.say("verify", note="on random inputs")
        if self._reference is None:
            self._reference = Reference.of(
                context.original, imported=context.imported, against=against, inputs=options.inputs, further=further,
                seed=options.seed, threads=context.threads, session_options=options.session_options,
            )  # fmt: skip
        return self._reference


def together(checks: Sequence[Verification]) -> Verification:
    """What several verifications of one model say: the last verdict, on all that was tried. `outputs`: the worst.

    A guard of one size inside the graph for another size is never true. That each size was tried is known otherwise.
    """
    last = checks[-1]
    unexercised = tuple(
        arm
        for arm in last.unexercised
        if not _GUARD.match(arm) and all(arm in check.unexercised for check in checks)
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
