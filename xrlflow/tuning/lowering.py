"""Compiles graphs of a model with TVM to files and libraries with kernels, in a process that can be ended.

Kernels are chosen by times: measured times from the store, predicted times, or estimated times.
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
from xrlflow.backends.tvm.library.hybrid import SavedHybrid, hybrid
from xrlflow.backends.tvm.library.operator_times import Operator, Times, operator_times
from xrlflow.backends.tvm.lowering.compiled import Interface
from xrlflow.cost.machine import cpu_name
from xrlflow.storage.stores import Where
from xrlflow.tuning.layer_times import StoredTimes
from xrlflow.tuning.one_shot.predictor import Predictor, shipped
from xrlflow.tuning.one_shot.times import PredictedTimes, version_of
from xrlflow.tuning.store import Store


def load_tvm() -> None:
    """Load TVM in a process that will compile."""
    detect()


@dataclass(frozen=True, slots=True)
class _Recipe:
    """The arguments with which another process creates an equal `Lowering`: without open files, and without the
    arguments that only measurements need."""

    target: ExecutionTarget
    shapes: Mapping[str, Sequence[int]]
    folder: str
    store: Where
    algorithms: Algorithms
    predicts: bool

    @contextlib.contextmanager
    def lowering(self) -> Iterator[Lowering]:
        with Store(self.store) as store:
            predictor = shipped() if self.predicts else None
            yield Lowering(self.target, self.shapes, self.folder, store, None, self.algorithms, predictor)


def _hybrid_there(
    recipe: _Recipe, path: str, sizes: Sequence[Mapping[str, Sequence[int]]], to: str
) -> SavedHybrid:
    """`Lowering.hybrid`, run in a process of its own."""
    with recipe.lowering() as lowering:
        return lowering.hybrid(path, sizes, to)


def _compiled_there(recipe: _Recipe, path: str, to: str) -> tuple[Interface, tuple[AlgorithmChoice, ...]]:
    """`Lowering.compiled`, run in a process of its own."""
    with recipe.lowering() as lowering:
        model = lowering.backend().compile(path, threads=lowering.threads)
        model.save(to)
        return model.interface, model.chosen


def _operators_there(
    recipe: _Recipe, operators: Sequence[Operator], channels_last: bool
) -> Sequence[Times | None]:
    """`Lowering.operator_times`, run in a process of its own."""
    with recipe.lowering() as lowering:
        return lowering.operator_times(operators, channels_last)


@dataclass(frozen=True, slots=True)
class Lowering:
    """All that is needed to compile the graphs of a model."""

    target: ExecutionTarget
    shapes: Mapping[str, Sequence[int]]
    """The shapes of inputs with open dimensions (whose sizes the model does not fix), by the name of the input."""
    folder: str
    """The folder for libraries."""
    store: Store
    """The store with the measurements of kernels."""
    session_options: Any = None
    """The options of ONNX Runtime, with which results are compared."""
    algorithms: Algorithms = DEFAULT
    predictor: Predictor | None = None
    """Predicts times, by which kernels are chosen for layers that were not measured; None: they are chosen by estimated
    times."""
    child: Child | None = None
    """The process in which TVM compiles; None: this process, in which nothing can end a compilation. When the time of
    `deadline` is over, the child is ended, and its call raises OutOfTime (a BackendError)."""

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
        """The TVM backend. `tuned`: whether it chooses kernels by the times in the store."""
        timings = self._predicted(self.layer_times) if tuned else self.untuned_times
        return Tvm(self.target.machine, self.shapes or None, replace(self.algorithms, timings=timings))

    @property
    def tuned_algorithms(self) -> Algorithms:
        """The algorithms that layers may use, with times from the store, and predicted times where the store has
        none."""
        return replace(self.algorithms, timings=self._predicted(self.layer_times))

    @property
    def untuned_times(self) -> Timings | None:
        """The times by which untuned compilations choose kernels: predicted times; None: estimated times."""
        return self._predicted(None)

    def _predicted(self, measured: Timings | None) -> Timings | None:
        if self.predictor is None:
            return measured
        return PredictedTimes(self.predictor, self.target.machine, measured)

    @property
    def layer_times(self) -> StoredTimes:
        """The times of layers and of inverted residuals in the store."""
        return StoredTimes.on(self.store, self.target.machine, self.threads, self.target.device)

    def hybrid(self, path: str, sizes: Sequence[Mapping[str, Sequence[int]]], to: str) -> SavedHybrid:
        """The model of a file with generated kernels, saved at `to`. Raises BackendError (see `library.hybrid`)."""
        if self.child is not None:
            return self.child.call(_hybrid_there, self._recipe, path, sizes, to)
        made = hybrid(path, sizes, self.target.machine, self.tuned_algorithms)
        return SavedHybrid.at(to, made)

    def compiled(self, path: str, to: str) -> TvmModel:
        """The model of a file, compiled and saved at `to`. Raises BackendError (see `Tvm.compile`)."""
        if self.child is not None:
            saved = self.child.call(_compiled_there, self._recipe, path, to)
            return TvmModel.settled(to, saved[0], self.threads, saved[1])
        model = self.backend().compile(path, threads=self.threads)
        model.settle(to)
        return model

    def operator_times(self, operators: Sequence[Operator], channels_last: bool) -> Sequence[Times | None]:
        """The times of generated kernels for single operators on this machine. Raises BackendError (see
        `library.operator_times`)."""
        if self.child is not None:
            return self.child.call(_operators_there, self._recipe, operators, channels_last)
        return operator_times(
            operators, self.target.machine, self.threads,
            channels_last=channels_last, algorithms=self.tuned_algorithms,
        )  # fmt: skip

    @property
    def kernels_version(self) -> str:
        """A text that changes if compilations may choose other kernels: when the algorithms change, and after further
        tuning."""
        exact = " exact" if self.algorithms.exact else ""
        exact += f" predicted {version_of(self.predictor)}" if self.predictor is not None else ""
        state = self.store.state(self.target.device or cpu_name())
        return f"tuned {self.store.path} {state}{exact}" if state is not None else f"untuned{exact}"
