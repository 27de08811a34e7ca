"""After the search: each candidate is compared with the original and verified, until one is accepted.

The source of candidates depends on the backend: plain files (`choose`), files with generated kernels (`kernels`),
compiled libraries (`compiled`). The loop is the same for all sources.
"""

from __future__ import annotations

from collections.abc import Generator
from contextlib import closing
from dataclasses import dataclass
from typing import Protocol, TypeAlias

from xrlflow.backends import RepeatedComparison
from xrlflow.backends.tvm import TvmModel
from xrlflow.backends.tvm.kernels.algorithms import AlgorithmChoice
from xrlflow.backends.tvm.library.hybrid import SavedHybrid
from xrlflow.pipeline.context import Context
from xrlflow.pipeline.explore import Explored
from xrlflow.pipeline.prepare import Start
from xrlflow.pipeline.verifier import VerificationFailed
from xrlflow.search import SearchNode, Selection
from xrlflow.verify import Verification


@dataclass(frozen=True, slots=True)
class Finished:
    """The decision on a candidate, with the data that the result needs."""

    accepted: SearchNode | None  # the graph that replaces the original; None: the original stays
    reason: str
    verification: Verification | None = None
    compared: RepeatedComparison | None = None
    selection: Selection | None = None
    compiled: TvmModel | None = None  # the compiled model, if the options ask for one
    threads: int | None = None  # the number of threads for which `compiled` was compiled
    hybrid: SavedHybrid | None = None  # `accepted` with generated kernels
    costs: tuple[float, float] | None = None
    """The modelled costs of the imported graph and of `accepted`, by the cost model of the search; None: see
    `Start`."""

    @property
    def algorithms(self) -> tuple[AlgorithmChoice, ...]:
        """The algorithms of the convolutions in generated kernels."""
        if self.hybrid is not None:
            return self.hybrid.chosen
        return self.compiled.chosen if self.compiled is not None else ()


class Candidate(Protocol):
    """A model that may replace the original."""

    def judged(self) -> Finished:
        """Compare this candidate with the original, verify it, and decide. Raises BackendError, KeyboardInterrupt, and
        VerificationFailed for a graph that is wrong, with the rule to blame if it is known.
        """
        ...


Candidates: TypeAlias = "Generator[Candidate, Finished, Finished | None]"
"""A generator that yields candidates. For each one, the decision is sent to the generator, or VerificationFailed is
thrown into it. If no candidate is accepted, the result is the generator's return value or, if this is None, the last
decision.
"""


class Source(Protocol):
    """A function that returns candidates from a search. It raises what `Candidate.judged` raises."""

    def __call__(self, context: Context, start: Start, explored: Explored) -> Candidates: ...


def finish(candidates: Candidates) -> Finished:
    """The decision on the first candidate that is accepted, or on the last one. Raises what the candidates raise."""
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
                if finished.accepted is not None:
                    return finished
                candidate = candidates.send(finished)
        except StopIteration as end:
            last: Finished | None = end.value
    finished = last if last is not None else finished
    assert finished is not None, "there was neither a candidate nor a reason"
    return finished
