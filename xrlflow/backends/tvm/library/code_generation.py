"""Lowers regions of models, and generates the object code of their kernels."""

from __future__ import annotations

import tempfile
from collections.abc import Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any

from onnx import ModelProto, TensorProto, TypeProto

from xrlflow.backends.interrupts import COMPILING, heeding_interrupts
from xrlflow.backends.limits import available_cpus
from xrlflow.backends.tvm.fusion.fuse import fuse
from xrlflow.backends.tvm.fusion.layers import chosen_in
from xrlflow.backends.tvm.fusion.open_sizes import answering
from xrlflow.backends.tvm.fusion.slices import in_place
from xrlflow.backends.tvm.kernels.algorithms import DEFAULT, AlgorithmChoice, Algorithms
from xrlflow.backends.tvm.lowering.executable import schedule_all
from xrlflow.backends.tvm.lowering.importer import import_model
from xrlflow.backends.tvm.lowering.plan import ExecutionPlan, plan_of, sequence
from xrlflow.backends.tvm.toolchain.import_tvm import tvm
from xrlflow.backends.tvm.toolchain.target import Machine
from xrlflow.backends.tvm.toolchain.unaligned import marked
from xrlflow.onnxio.regions import Region, extracted

_OBJECTS, _TOGETHER = 8, 4
"""The greatest number of object files that are begun at once, and the least number of kernels in one of them while
further regions are lowered: each file takes some time of its own."""


@dataclass(frozen=True, slots=True)
class RowPort:
    """An input or output of a region for any number of rows. `dimensions`: how many of its dimensions count rows.
    `like`: the first input of the region that has the same row dimensions; -1: all but the last are 1."""

    dimensions: int
    like: int


@dataclass(frozen=True, slots=True)
class CompiledRegion:
    """A region's execution plan, and the module with its kernels. `inputs` and `outputs`: their names in the model.

    `weights`: further inputs of the region's node, with their types as ONNX numbers them. Kernels do not read these
    inputs, since the library has copies of the weights. `chosen`: the algorithms that were chosen for layers.

    A region for any number of rows has plans for blocks of several numbers of rows: `rows` for this plan (0: the region
    has fixed sizes), and those of `smaller` blocks. `ports`: its inputs, then its outputs.
    """

    plan: ExecutionPlan
    module: Any
    inputs: tuple[str, ...]
    outputs: tuple[str, ...]
    weights: tuple[tuple[str, int], ...] = ()
    chosen: tuple[AlgorithmChoice, ...] = ()
    rows: int = 0
    ports: tuple[RowPort, ...] = ()
    smaller: tuple[CompiledRegion, ...] = ()

    @property
    def blocks(self) -> tuple[CompiledRegion, ...]:
        """The region for each number of rows, the largest first."""
        return (self, *self.smaller)


def compile_region(
    model: ModelProto,
    region: Region,
    types: Mapping[str, TypeProto],
    machine: Machine,
    **options: Any,
) -> CompiledRegion:
    """Lower and schedule a region of a model. `types`: the types, with fixed sizes, of the values that cross the
    region's border. `options`: see `compile_part`."""
    return compile_part(extracted(model, region, types), region, machine, {}, **options)


def compile_part(
    part: ModelProto,
    region: Region,
    machine: Machine,
    weights: Mapping[str, TensorProto],
    *,
    weights_as_inputs: bool = False,
    channels_last: bool | None = None,
    algorithms: Algorithms = DEFAULT,
) -> CompiledRegion:
    """Lower and schedule a region that is a model of its own, with fixed sizes (`regions.extracted`). The inputs and
    outputs of its node have the region's order. `weights`: its weights whose elements it lacks.

    `weights_as_inputs`: see
    `regions.with_functions`. `channels_last`, `algorithms`: see `fusion.fuse`. Raises BackendError for models that
    cannot be lowered (see `importer.import_model`), or not without TVM's runtime.
    """
    module = import_model(part, weights=weights)
    fused = fuse(module, machine, channels_last, algorithms)
    scheduled = schedule_all(fused, machine)
    with answering("compile", scheduled), machine.target(), heeding_interrupts():
        listed = in_place(sequence(scheduled), machine)
        plan = plan_of(listed)
    ignored = [(t.name, t.data_type) for t in part.graph.initializer] if weights_as_inputs else []
    return CompiledRegion(plan, listed, region.inputs, region.outputs, tuple(ignored), chosen_in(fused))


class CodeGenerator:
    """Generates the code of kernels, in as many threads as may run at once, while the caller lowers further regions.
    Equal kernels of several regions are compiled once.

    `symbols`: for each plan that was added, the symbols of its kernels by their names. It is a context manager, whose
    end waits for the threads: threads that go on would disturb the next measurement.
    """

    def __init__(self, machine: Machine) -> None:
        self.symbols: list[dict[str, str]] = []
        self._machine = machine
        self._known: dict[int, list[tuple[str, Any]]] = {}
        self._pending: dict[str, Any] = {}
        self._objects: list[Future[bytes]] = []
        # The folder is not created by the threads. When the program has to end, it does not wait for the threads, but
        # it removes the folder with all that they wrote.
        self._folder = tempfile.TemporaryDirectory(prefix="xrlflow-")
        self._pool = ThreadPoolExecutor(available_cpus(), COMPILING)

    def __enter__(self) -> CodeGenerator:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        # If the program is to end, it does not wait for a function, which may take a minute.
        waiting = kind is None or issubclass(kind, Exception | KeyboardInterrupt)
        self._pool.shutdown(wait=waiting, cancel_futures=kind is not None)
        self._folder.cleanup()

    def add(self, region: CompiledRegion) -> None:
        """Begin to compile those kernels of a region that no earlier region has, once there are enough of them."""
        for block in region.blocks:
            self._add(block)

    def _add(self, region: CompiledRegion) -> None:
        from tvm_ffi import structural_equal, structural_hash

        called, crossing = region.plan.kernels(), region.plan.crossing()
        symbols: dict[str, str] = {}
        for name, function in region.module.functions.items():
            if name.name_hint in called:
                kernel = marked(function) if name.name_hint in crossing else function
                kernel = kernel.without_attr("global_symbol")
                alike = self._known.setdefault(structural_hash(kernel), [])
                symbol = next((other for other, each in alike if structural_equal(each, kernel)), None)
                if symbol is None:
                    symbol = f"region{len(self.symbols)}_{name.name_hint}"
                    alike.append((symbol, kernel))
                    self._pending[symbol] = kernel.with_attr("global_symbol", symbol)
                symbols[name.name_hint] = symbol
        self.symbols.append(symbols)
        if len(self._pending) >= 2 * _TOGETHER:
            self.generate(self._pending, min(_OBJECTS, len(self._pending) // _TOGETHER))
            self._pending = {}

    def generate(self, functions: Mapping[str, Any], count: int) -> None:
        """Begin to compile functions into `count` object files. The number of files does not depend on this machine,
        because the library's name depends on it."""
        names = list(functions)
        # Functions that take long to compile are similar and follow one another, so each file gets every `count`-th
        # function.
        for number in range(count):
            share = {name: functions[name] for name in names[number::count]}
            path = Path(self._folder.name) / f"kernels{len(self._objects)}.o"
            self._objects.append(self._pool.submit(_object_file, share, self._machine, path))

    def objects(self) -> tuple[bytes, ...]:
        """The object files, when all are complete. There is none if all regions only copy. Raises BackendError if TVM
        refuses a kernel."""
        self.generate(self._pending, min(_OBJECTS, len(self._pending)))
        self._pending = {}
        with heeding_interrupts():
            return tuple(each.result() for each in self._objects)


def _object_file(functions: Mapping[str, Any], machine: Machine, path: Path) -> bytes:
    package = tvm()
    with answering("compile"), machine.target(), package.transform.PassContext(opt_level=3):
        built = package.tirx.build(package.IRModule(dict(functions)), machine.target())
        built.write_to_file(str(path), "o")
        return path.read_bytes()
