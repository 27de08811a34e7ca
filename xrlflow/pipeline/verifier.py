"""Whether a result computes what the original does, and if not, which substitution is to blame."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field

from xrlflow.backends.protocol import CompiledModel
from xrlflow.pipeline.context import Context
from xrlflow.pipeline.prepare import Start
from xrlflow.prover.thresholds import limits, written
from xrlflow.search import SearchNode, TraceStep, replay
from xrlflow.verify import NotASubstitution, NotRepeatable, Reference, Status, Verification, blame


class VerificationFailed(Exception):
    """The result does not compute what the original does: it was not written."""


@dataclass(slots=True)
class Verifier:
    """Judges results of one optimisation. The original runs once, for the first of them."""

    context: Context
    _reference: Reference | None = field(default=None, init=False)

    def check(self, path: str, steps: Iterable[TraceStep]) -> Verification:
        """Judge a file that these substitutions led to, also around the numbers that their rules compare with."""
        known = self.context.library.rules
        rules = [known[name] for name in sorted({s.rule for s in steps} & known.keys())]
        further = {number for rule in rules for number in limits(written(rule, types=False))}
        nonempty = [rule.name for rule in rules if rule.nonempty]
        return self._original(path, further).check(path, nonempty=nonempty)

    def check_compiled(self, model: CompiledModel, sizes: Mapping[str, tuple[int, ...]]) -> Verification:
        """Raises VerificationFailed for a compiled model that is not known to compute the same."""
        found = self._original().check_compiled(model, sizes)
        if found.status is Status.NOT_COMPARABLE:
            raise VerificationFailed(f"the compiled model cannot be verified: {found.reason} (--no-verify)")
        if not found.verified:
            raise VerificationFailed(
                f"the compiled model does not compute the same: {'; '.join(found.failures)}"
            )
        return found

    def blame(self, start: Start, chosen: SearchNode, failed: Verification) -> str:
        """A message that names the substitution that broke the model."""
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
        """What is known of the original. `against`: the first result, whose numbers say what to try as well, and
        `further` those of the rules that made it."""
        context, options = self.context, self.context.options
        context.say("verify", note="on random inputs")
        if self._reference is None:
            self._reference = Reference.of(
                context.original, imported=context.imported, against=against, inputs=options.inputs, further=further,
                seed=options.seed, threads=context.threads, session_options=options.session_options,
            )  # fmt: skip
        return self._reference


def remarks(verification: Verification) -> Iterator[str]:
    """What a reader should know of a verification that passed: the sizes that were run, what was not."""
    if verification.bindings:
        yield f"verified with {verification.sizes}"
    if verification.left_out:
        yield f"not verified with {'; '.join(verification.left_out)}"
    yield from (f"verification: {note}" for note in verification.notes)
