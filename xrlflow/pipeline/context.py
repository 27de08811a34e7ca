"""The context that all phases of an optimisation read: options, the model, paths of files, and the clock."""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

from xrlflow.backends.onnxruntime import default_threads
from xrlflow.backends.protocol import Feeds
from xrlflow.backends.results import SpeedUp
from xrlflow.backends.tvm.devices.execution import ExecutionTarget
from xrlflow.backends.tvm.kernels.algorithms import Algorithms
from xrlflow.common.sizes import Shapes, numbers_only
from xrlflow.cost import Database
from xrlflow.ir import Graph
from xrlflow.onnxio import ImportedModel
from xrlflow.options import Options
from xrlflow.pipeline.artifact import Artifact, Artifacts, Original
from xrlflow.report import Listener
from xrlflow.rewrite import Library
from xrlflow.search import Budget, SearchNode
from xrlflow.tuning.lowering import Lowering
from xrlflow.tuning.one_shot.predictor import for_compiling
from xrlflow.tuning.store import Store

# A result may be this many bytes larger than the original, even if the original is small.
_SPARE = 1 << 16


def largest_result(options: Options, size: int) -> float:
    """The most bytes of a result for an original of so many bytes."""
    return max(options.max_growth * size, size + _SPARE)


@dataclass(slots=True)
class Clock:
    """The time of one optimisation. Points in time are those of time.monotonic; durations are in seconds."""

    begin: float
    limit: float  # the user's deadline
    verifying: bool = True
    compiled: bool = False
    latency: float = 0.0  # rough duration of one run of the original; 0: unknown
    loading: float = 0.0  # rough time to open a session with the original; 0: unknown
    compiling: float = 0.0  # expected time to choose and compile generated kernels
    reserved: float = 0.0  # the part of `compiling` that is still reserved
    quantised: bool = False  # verification goes layer by layer
    phases: dict[str, float] = field(default_factory=dict)
    deadline: float = field(init=False)  # at first equal to `limit`; `hurry` sets an earlier deadline
    _begun_at: float | None = field(default=None, init=False)
    _hurried_at: float | None = field(default=None, init=False)
    _within: list[float] = field(default_factory=list, init=False)
    """For each phase that is running, the seconds that phases inside it have taken."""

    def __post_init__(self) -> None:
        self.deadline = self.limit

    @property
    def hurried(self) -> bool:
        return self._hurried_at is not None

    @property
    def budget(self) -> Budget:
        """The division of the remaining time among the phases."""
        begin = next((at for at in (self._hurried_at, self._begun_at) if at is not None), self.begin)
        return Budget(
            begin, self.deadline - begin, self.latency, self.loading, self.verifying,
            quantised=self.quantised, hurried=self.hurried, compiled=self.compiled,
            compiling=0.0 if self.hurried else self.compiling,
            reserved=0.0 if self.hurried else self.reserved,
        )  # fmt: skip

    def share(self) -> None:
        """Divide the time that remains now among the phases again."""
        self._begun_at = time.monotonic()

    def again(self) -> bool:
        """Divide the remaining time among the phases of another attempt. Returns False, and changes nothing, if the
        time is too short for an attempt, and after Ctrl-C.
        """
        earlier = self._begun_at
        self.share()
        if not self.hurried and self.budget.useful:
            return True
        self._begun_at = earlier
        return False

    def hurry(self) -> None:
        """After Ctrl-C: move the deadline so that time is left only to compare, verify and measure the best result."""
        now = time.monotonic()
        self.deadline = self.budget.hurry(now).until
        self._hurried_at = now

    @contextmanager
    def phase(self, name: str, since: float | None = None) -> Iterator[None]:
        """Add the duration of a block to a phase, without the duration of phases inside the block."""
        begin = time.monotonic() if since is None else since
        self._within.append(0.0)
        try:
            yield
        finally:
            seconds = time.monotonic() - begin
            own = seconds - self._within.pop()
            self.phases[name] = round(self.phases.get(name, 0.0) + own, 3)
            if self._within:
                self._within[-1] += seconds


@dataclass(frozen=True, slots=True, eq=False)
class Context:
    """One optimisation, read by all phases. Only its clock and its notes change."""

    options: Options
    original: Original
    imported: ImportedModel
    library: Library
    clock: Clock
    artifacts: Artifacts  # graphs as files, in a temporary folder
    listener: Listener | None = None
    feeds: Mapping[str, Any] | None = None  # inputs for measurements; None: no model is measured
    target: ExecutionTarget | None = None  # processor and device of a compiled model; None: ONNX Runtime
    store: Store | None = None  # measurements of kernels; None with ONNX Runtime
    database: Database | None = None  # measured costs of operators; None: `Profiled` opens a database
    unwritable: str = ""
    """Why no file that is written of the model can replace the original; "" if one can. If it is not "", nothing may
    be compared.
    """
    notes: list[str] = field(default_factory=list)
    at_sizes: list[list[tuple[str, Feeds]]] = field(default_factory=list)
    """The inputs of other sizes, once they are made (`pipeline.sizes`)."""
    found_at: dict[str, SpeedUp] = field(default_factory=dict)
    """How many times faster the result is with other sizes, which the text says."""
    meant: str | None = None
    """The file that says what a result computes, if that is not the original (`pipeline.accuracy`)."""

    @property
    def folder(self) -> str:
        """The path of the temporary folder."""
        return self.artifacts.folder

    @property
    def threads(self) -> int:
        return self.options.threads or default_threads()

    @property
    def shapes(self) -> Shapes:
        return self.options.shapes or {}

    @property
    def sizes(self) -> dict[str, tuple[int, ...]]:
        """The user's shapes of those inputs that have no range."""
        return numbers_only(self.shapes)

    @property
    def lowering(self) -> Lowering:
        """The compiler to TVM, with its settings."""
        assert self.target is not None
        assert self.store is not None
        options = self.options
        return Lowering(
            self.target, self.sizes, self.folder, self.store, options.session_options,
            Algorithms(exact=options.exact_kernels), for_compiling(self.target.machine),
        )  # fmt: skip

    def say(self, phase: str, done: int = 0, total: int = 0, note: str = "") -> None:
        if self.listener is not None:
            self.listener(phase, done, total, note)

    def artifact(self, graph: Graph) -> Artifact:
        """A graph of this model as an artifact."""
        return self.artifacts.of(self.imported, graph)

    def fits(self, node: SearchNode) -> bool:
        """Whether the file of this graph is small enough for a result."""
        return self.artifact(node.state.graph).size <= largest_result(self.options, self.imported.size)
