"""After the search: candidates are compared with the original and verified, one after the other, until one is kept.

Where candidates come from depends on the backend: plain files (`choose`), files with kernels of our own (`kernels`),
compiled libraries (`compiled`). The loop is the same.
"""

from __future__ import annotations

from collections.abc import Generator
from contextlib import closing
from dataclasses import dataclass
from typing import Protocol, TypeAlias

from xrlflow.backends import RepeatedComparison
from xrlflow.backends.tvm import TvmModel
from xrlflow.backends.tvm.kernels.algorithms import AlgorithmChoice
from xrlflow.backends.tvm.library.hybrid import Hybrid
from xrlflow.pipeline.context import Context
from xrlflow.pipeline.explore import Explored
from xrlflow.pipeline.prepare import Start
from xrlflow.pipeline.verifier import VerificationFailed
from xrlflow.search import SearchNode, Selection
from xrlflow.verify import Verification


@dataclass(frozen=True, slots=True)
class Finished:
    """The decision: `kept` replaces the original (None: the original stays), and `reason` says why.

    `compiled`: the compiled model, if one was asked for; `threads`: the number of threads that it was compiled for.
    `hybrid`: `kept` with kernels of our own. `costs`: the modelled cost of the imported graph and of `kept`, by the
    prices that led there; None: those of the search.
    """

    kept: SearchNode | None
    reason: str
    verification: Verification | None = None
    compared: RepeatedComparison | None = None
    selection: Selection | None = None
    compiled: TvmModel | None = None
    threads: int | None = None
    hybrid: Hybrid | None = None
    costs: tuple[float, float] | None = None

    @property
    def algorithms(self) -> tuple[AlgorithmChoice, ...]:
        """The algorithms of convolutions in kernels of our own."""
        if self.hybrid is not None:
            return self.hybrid.chosen
        return self.compiled.chosen if self.compiled is not None else ()


class Candidate(Protocol):
    """What may take the original's place."""

    def judged(self) -> Finished:
        """Compare it with the original, verify it, and decide. Raises BackendError, KeyboardInterrupt, and
        VerificationFailed for a graph that is wrong, with the rule to blame if it is known."""
        ...


Candidates: TypeAlias = "Generator[Candidate, Finished, Finished | None]"
"""The first candidate first. Each is answered by the decision on it, or by VerificationFailed. What is returned in the
end is the result where no candidate is kept; None: the last decision."""


class Source(Protocol):
    """The candidates of a search. They raise what `Candidate.judged` raises."""

    def __call__(self, context: Context, start: Start, explored: Explored) -> Candidates: ...


def finish(candidates: Candidates) -> Finished:
    """The first candidate that is kept, or why none is. Raises what the candidates raise."""
    finished: Finished | None = None
    with closing(candidates):
        try:
            candidate = next(candidates)
            while True:
                try:
                    finished = candidate.judged()
                except VerificationFailed as failed:
                    candidate = candidates.throw(failed)
                    continue
                if finished.kept is not None:
                    return finished
                candidate = candidates.send(finished)
        except StopIteration as end:
            last: Finished | None = end.value
    finished = last if last is not None else finished
    assert finished is not None, "there was neither a candidate nor a reason"
    return finished
