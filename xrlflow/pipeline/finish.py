"""What happens after the search: a backend chooses among the proposals, verifies and measures."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

from xrlflow.backends import RepeatedComparison
from xrlflow.backends.tvm import TvmModel
from xrlflow.pipeline.context import Context
from xrlflow.pipeline.explore import Explored
from xrlflow.pipeline.prepare import Start
from xrlflow.search import SearchNode, Selection
from xrlflow.verify import Verification


@dataclass(frozen=True, slots=True)
class Finished:
    """What becomes of the proposals: `kept` takes the original's place (None: nothing does), and `reason` says why.

    `compiled`: what was asked for in the place of an ONNX file; `threads` that it was compiled for.
    """

    kept: SearchNode | None
    reason: str
    verification: Verification | None = None
    compared: RepeatedComparison | None = None
    selection: Selection | None = None
    compiled: TvmModel | None = None
    threads: int | None = None


class Finisher(Protocol):
    """One backend's way from proposals to a result. Raises VerificationFailed, BackendError, KeyboardInterrupt."""

    def __call__(self, context: Context, start: Start, explored: Explored) -> Finished: ...
