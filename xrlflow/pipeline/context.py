"""What all phases of an optimisation read: options, the model, paths of files, and the clock."""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

from xrlflow.backends.onnxruntime import default_threads
from xrlflow.backends.tvm.devices.execution import ExecutionTarget
from xrlflow.backends.tvm.kernels.algorithms import Algorithms
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

# A result may be this many bytes larger than the original, however small the original is.
_SPARE = 1 << 16


@dataclass(slots=True)
class Clock:
    """The time of one optimisation, and what it was spent on. Moments are those of time.monotonic, times in seconds.

    `deadline` begins as the user's `limit`; `hurry` brings it forward. `latency` and `loading`: rough seconds of one
    run of the original, and of opening a session with it; 0 if not known. `compiling`: seconds that finding and
    compiling kernels are expected to take, and `reserved` what is left of them.
    """

    begin: float
    limit: float
    verifying: bool = True
    compiled: bool = False
    latency: float = 0.0
    loading: float = 0.0
    compiling: float = 0.0
    reserved: float = 0.0
    phases: dict[str, float] = field(default_factory=dict)
    deadline: float = field(init=False)
    _begun_at: float | None = field(default=None, init=False)
    _hurried_at: float | None = field(default=None, init=False)
    _within: list[float] = field(
        default_factory=list, init=False
    )  # seconds of inner phases, for each running phase

    def __post_init__(self) -> None:
        self.deadline = self.limit

    @property
    def hurried(self) -> bool:
        return self._hurried_at is not None

    @property
    def budget(self) -> Budget:
        """The budget of the time that is left."""
        begin = next((at for at in (self._hurried_at, self._begun_at) if at is not None), self.begin)
        return Budget(
            begin, self.deadline - begin, self.latency, self.loading, self.verifying,
            hurried=self.hurried, compiled=self.compiled,
            compiling=0.0 if self.hurried else self.compiling,
            reserved=0.0 if self.hurried else self.reserved,
        )  # fmt: skip

    def share(self) -> None:
        """Share the time that is left out anew."""
        self._begun_at = time.monotonic()

    def again(self) -> bool:
        """Share the time that is left out anew, for another attempt. False, and nothing changes, if it is too short for
        one, and after Ctrl-C."""
        earlier = self._begun_at
        self.share()
        if not self.hurried and self.budget.useful:
            return True
        self._begun_at = earlier
        return False

    def hurry(self) -> None:
        """After Ctrl-C: leave only the time to compare, verify and measure what was found so far."""
        now = time.monotonic()
        self.deadline = self.budget.hurry(now).until
        self._hurried_at = now

    @contextmanager
    def phase(self, name: str, since: float | None = None) -> Iterator[None]:
        """Add the time of a block to a phase, without the time of phases inside the block."""
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
    """One optimisation, read by all phases. Only its clock and its notes change.

    `artifacts` has the graphs as files, in a temporary folder. `feeds` are inputs to measure with, or None if nothing
    is measured. `target` is where a compiled model runs, and `store` has what is known of its kernels; both are None
    with ONNX Runtime. `database` has the prices of operators; None: what `Profiled` opens. `unwritable`: why no file
    that is written of the model can take the original's place, if so. (It may be that nothing can be compared with it.)
    """

    options: Options
    original: Original
    imported: ImportedModel
    library: Library
    clock: Clock
    artifacts: Artifacts
    listener: Listener | None = None
    feeds: Mapping[str, Any] | None = None
    target: ExecutionTarget | None = None
    store: Store | None = None
    database: Database | None = None
    unwritable: str = ""
    notes: list[str] = field(default_factory=list)

    @property
    def folder(self) -> str:
        """A temporary folder."""
        return self.artifacts.folder

    @property
    def threads(self) -> int:
        return self.options.threads or default_threads()

    @property
    def shapes(self) -> Mapping[str, Sequence[int]]:
        return self.options.shapes or {}

    @property
    def lowering(self) -> Lowering:
        """What compiling with TVM needs."""
        assert self.target is not None
        assert self.store is not None
        options = self.options
        return Lowering(
            self.target, self.shapes, self.folder, self.store, options.session_options,
            Algorithms(exact=options.exact_kernels), for_compiling(self.target.machine),
        )  # fmt: skip

    def say(self, phase: str, done: int = 0, total: int = 0, note: str = "") -> None:
        if self.listener is not None:
            self.listener(phase, done, total, note)

    def artifact(self, graph: Graph) -> Artifact:
        """A graph of this model, with its file."""
        return self.artifacts.of(self.imported, graph)

    def fits(self, found: SearchNode) -> bool:
        """Whether the file of this result would not be too large."""
        size = self.imported.size
        most = max(self.options.max_growth * size, size + _SPARE)
        return self.artifact(found.state.graph).size <= most
