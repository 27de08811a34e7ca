"""After the search: a backend chooses among the proposals, verifies and measures."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

from xrlflow.backends import RepeatedComparison
from xrlflow.backends.tvm import TvmModel
from xrlflow.backends.tvm.kernels.algorithms import Chosen
from xrlflow.backends.tvm.library.hybrid import Hybrid
from xrlflow.pipeline.context import Context
from xrlflow.pipeline.explore import Explored
from xrlflow.pipeline.prepare import Start
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
    def algorithms(self) -> tuple[Chosen, ...]:
        """The algorithms of convolutions in kernels of our own."""
        if self.hybrid is not None:
            return self.hybrid.chosen
        return self.compiled.chosen if self.compiled is not None else ()


class Finisher(Protocol):
    """What a backend does with proposals. Raises BackendError and KeyboardInterrupt, and VerificationFailed for a graph
    that is wrong, with the rule to blame if it is known."""

    def __call__(self, context: Context, start: Start, explored: Explored) -> Finished: ...
