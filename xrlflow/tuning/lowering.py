"""Graphs of a model become files and libraries with kernels, by TVM, in a process that can be ended.

What is known of kernels decides how they are made: measurements of the store, a predictor, or estimates.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from xrlflow.backends.children import Child
from xrlflow.backends.tvm import Tvm, TvmModel, detect
from xrlflow.backends.tvm.devices.execution import ExecutionTarget
from xrlflow.backends.tvm.kernels.algorithms import DEFAULT, AlgorithmChoice, Algorithms, Timings
from xrlflow.backends.tvm.library.hybrid import Hybrid, HybridMetadata, hybrid
from xrlflow.backends.tvm.library.operator_times import Operator, Times, operator_times
from xrlflow.backends.tvm.lowering.compiled import Interface
from xrlflow.cost.machine import cpu_name
from xrlflow.storage.stores import Where
from xrlflow.tuning.layer_times import StoredTimes
from xrlflow.tuning.one_shot.predictor import Predictor, shipped
from xrlflow.tuning.one_shot.times import PredictedTimes, version_of
from xrlflow.tuning.store import Store


def load_tvm() -> None:
    """What a process does first that will compile."""
    detect()


@dataclass(frozen=True, slots=True)
class _Recipe:
    """A `Lowering` as another process makes it: without open files, and without what only measuring needs."""

    target: ExecutionTarget
    shapes: Mapping[str, Sequence[int]]
    folder: str
    store: Where
    algorithms: Algorithms
    predicts: bool

    @contextlib.contextmanager
    def made(self) -> Iterator[Lowering]:
        with Store(self.store) as store:
            predictor = shipped() if self.predicts else None
            yield Lowering(self.target, self.shapes, self.folder, store, None, self.algorithms, predictor)


def _hybrid_there(
    recipe: _Recipe, path: str, sizes: Sequence[Mapping[str, Sequence[int]]], to: str
) -> HybridMetadata:
    """`Lowering.hybrid` in a process of its own."""
    with recipe.made() as lowering:
        return HybridMetadata.of(lowering.hybrid(path, sizes, to))


def _compiled_there(recipe: _Recipe, path: str, to: str) -> tuple[Interface, tuple[AlgorithmChoice, ...]]:
    """`Lowering.compiled` in a process of its own."""
    with recipe.made() as lowering:
        model = lowering.backend().compile(path, threads=lowering.threads)
        model.save(to)
        return model.interface, model.chosen


def _operators_there(
    recipe: _Recipe, operators: Sequence[Operator], channels_last: bool
) -> Sequence[Times | None]:
    """`Lowering.operator_times` in a process of its own."""
    with recipe.made() as lowering:
        return lowering.operator_times(operators, channels_last)


@dataclass(frozen=True, slots=True)
class Lowering:
    """What is needed to compile the graphs of a model: input sizes, a folder for libraries, stored measurements of
    kernels, the options of ONNX Runtime, with which the results are compared, the algorithms that convolutions may use,
    and the predictor that chooses kernels where nothing is measured (None: estimates choose).

    `child`: the process in which TVM compiles; None: this one, where nothing can end it. The child is ended when the
    time is over (`deadline`), and what was asked for raises OutOfTime (a BackendError).
    """

    target: ExecutionTarget
    shapes: Mapping[str, Sequence[int]]
    folder: str
    store: Store
    session_options: Any = None
    algorithms: Algorithms = DEFAULT
    predictor: Predictor | None = None
    child: Child | None = None

    @property
    def threads(self) -> int:
        return self.target.machine.cores

    @property
    def _recipe(self) -> _Recipe:
        plain = replace(self.algorithms, timings=None)
        return _Recipe(
            self.target, self.shapes, self.folder, self.store.where, plain, self.predictor is not None
        )

    def backend(self, tuned: bool = True) -> Tvm:
        """The TVM backend. `tuned`: use the times of kernels that the store has."""
        timings = self._predicted(self.layer_times) if tuned else self.untuned_times
        return Tvm(self.target.machine, self.shapes or None, replace(self.algorithms, timings=timings))

    @property
    def tuned_algorithms(self) -> Algorithms:
        """The algorithms, with the times that the store has of them, or a predictor."""
        return replace(self.algorithms, timings=self._predicted(self.layer_times))

    @property
    def untuned_times(self) -> Timings | None:
        """Those of untuned compilations: predictions; None: estimates."""
        return self._predicted(None)

    def _predicted(self, measured: Timings | None) -> Timings | None:
        if self.predictor is None:
            return measured
        return PredictedTimes(self.predictor, self.target.machine, measured)

    @property
    def layer_times(self) -> StoredTimes:
        """What the store knows of convolutions and blocks of them."""
        return StoredTimes.on(self.store, self.target.machine, self.threads, self.target.device)

    def hybrid(self, path: str, sizes: Sequence[Mapping[str, Sequence[int]]], to: str) -> Hybrid:
        """The model of a file, with generated kernels, saved at `to`. Raises BackendError (see `hybrid`)."""
        if self.child is not None:
            told = self.child.call(_hybrid_there, self._recipe, path, sizes, to)
            return told.loaded(to)
        import onnx

        made = hybrid(onnx.load(path), sizes, self.target.machine, self.tuned_algorithms)
        made.save(to)
        return made

    def compiled(self, path: str, to: str) -> TvmModel:
        """The model of a file, compiled and saved at `to`. Raises BackendError (see `Tvm.compile`)."""
        if self.child is not None:
            made = self.child.call(_compiled_there, self._recipe, path, to)
            return TvmModel.settled(to, made[0], self.threads, made[1])
        model = self.backend().compile(path, threads=self.threads)
        model.settle(to)
        return model

    def operator_times(self, operators: Sequence[Operator], channels_last: bool) -> Sequence[Times | None]:
        """How long kernels of single operators take on this machine. Raises BackendError (see `operator_times`)."""
        if self.child is not None:
            return self.child.call(_operators_there, self._recipe, operators, channels_last)
        return operator_times(
            operators, self.target.machine, self.threads,
            channels_last=channels_last, algorithms=self.tuned_algorithms,
        )  # fmt: skip

    @property
    def kernels_version(self) -> str:
        """Changes with the algorithms, and when kernels may have been tuned further."""
        exact = " exact" if self.algorithms.exact else ""
        exact += f" predicted {version_of(self.predictor)}" if self.predictor is not None else ""
        state = self.store.state(self.target.device or cpu_name())
        return f"tuned {self.store.path} {state}{exact}" if state is not None else f"untuned{exact}"
