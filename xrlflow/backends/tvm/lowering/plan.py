"""The execution plan of a compiled graph: the sequence of its kernels, and where each tensor is in memory.

After Relax's passes, "main" of a module of scheduled kernels only allocates tensors, calls kernels and names results.
The plan is read from this list. Memory is planned here: tensors that are not in use at the same time share it.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from enum import Enum
from typing import Any

import numpy as np

from xrlflow.backends.protocol import Array, BackendError
from xrlflow.backends.tvm.fusion.checks import Check, checks_of
from xrlflow.backends.tvm.toolchain.import_tvm import tvm
from xrlflow.backends.tvm.toolchain.reading import operator, sizes
from xrlflow.backends.tvm.toolchain.weights import Made, folded, made_of, plain_array

ALIGNMENT = 64
"""Each tensor in the arena, and each constant, begins at a multiple of this number of bytes."""
_MOST_DIMENSIONS = 64
"""The limit of `native/runtime.h`."""
COPY = "xrlflow_copy"
"""A kernel of the C runtime, which copies its first tensor to its second."""


class Location(Enum):
    """Where the elements of a tensor are. In the arena, `offset` of a `Tensor` is in bytes. For other locations, it is
    the number of the input, output or constant."""

    INPUT = "INPUT"
    OUTPUT = "OUTPUT"
    ARENA = "ARENA"
    CONSTANT = "CONSTANT"


@dataclass(frozen=True, slots=True)
class Tensor:
    """A tensor or a view of one. For `offset` see `Location`."""

    location: Location
    offset: int
    shape: tuple[int, ...]
    dtype: str

    @property
    def bytes(self) -> int:
        return math.prod(self.shape) * np_dtype(self.dtype).itemsize


@dataclass(frozen=True, slots=True)
class Call:
    """A call of a kernel. An argument is the number of a tensor, or -1 - i for integer i of the plan."""

    kernel: str
    arguments: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class ExecutionPlan:
    """What a region does in one run. Inputs and outputs are numbers of tensors, outputs in the order of the region.

    `checked`: the tensor with the least and the greatest of the indices that `checks` compares. `arena`: the bytes of
    the arena.
    """

    tensors: tuple[Tensor, ...]
    calls: tuple[Call, ...]
    integers: tuple[int, ...]
    constants: tuple[Array, ...]
    inputs: tuple[int, ...]
    outputs: tuple[int, ...]
    checks: tuple[Check, ...]
    checked: int | None
    arena: int
    made: tuple[Made | None, ...] = ()
    """How each constant is made of a weight; None if it depends on no weight, or if that is unknown."""

    def kernels(self) -> frozenset[str]:
        """The names of all kernels that are called."""
        return frozenset(call.kernel for call in self.calls)

    def crossing(self) -> frozenset[str]:
        """The names of the kernels that read or write memory of the caller."""
        outside = {
            n for n, tensor in enumerate(self.tensors) if tensor.location in (Location.INPUT, Location.OUTPUT)
        }
        return frozenset(call.kernel for call in self.calls if outside & set(call.arguments))


def np_dtype(name: str) -> np.dtype[Any]:
    """NumPy's type for TVM's name of a type. Raises BackendError for types that kernels in a library do not support."""
    try:
        dtype = np.dtype(name)
    except TypeError:
        dtype = None
    if dtype is None or dtype.kind not in "iufb":  # further types may be registered, such as bfloat16
        raise BackendError(f"tensors of {name} cannot be in a library of kernels")
    return dtype


def memory_of(array: Array) -> memoryview:
    """The bytes of an array's elements, without a copy if they are in order, for digests and files."""
    return np.ascontiguousarray(array).reshape(-1).view(np.uint8).data


def sequence(module: Any) -> Any:
    """A module of scheduled kernels whose "main" is a list of allocations and calls (in TVM's terms:
    destination-passing style)."""
    package = tvm()
    from tvm import relax

    passes = [
        relax.transform.SplitLayoutRewritePreproc(),
        folded,
        relax.transform.DeadCodeElimination(),
        relax.transform.RewriteDataflowReshape(),
        relax.transform.ToNonDataflow(),
        relax.transform.RemovePurityChecking(),
        relax.transform.CallTIRRewrite(),
    ]
    with package.transform.PassContext(opt_level=3):
        for step in passes:
            module = step(module)
    return module


def plan_of(module: Any) -> ExecutionPlan:
    """The plan of a module that `sequence` returned.

    Raises BackendError for modules that a library of kernels cannot have: with functions of TVM's runtime, sizes that
    are not numbers, or values that are no tensors.
    """
    reading = _Reading(checks_of(module))
    reading.read(module["main"])
    return reading.plan()


@dataclass(slots=True)
class _Storage:
    """The elements of a tensor, which several views may share. `number`: the number of the input, output or constant.
    `first` and `last`: the first and the last call that uses the elements."""

    location: Location
    bytes: int
    number: int = -1
    first: int | None = None
    last: int = -1


@dataclass(frozen=True, slots=True)
class _View:
    storage: int
    shape: tuple[int, ...]
    dtype: str


@dataclass(slots=True)
class _Reading:
    """Translates "main" into a plan."""

    checks: tuple[Check, ...]
    storages: list[_Storage] = field(default_factory=list)
    views: list[_View] = field(default_factory=list)
    numbers: dict[_View, int] = field(default_factory=dict)
    bound: dict[Any, Any] = field(default_factory=dict)  # for each variable: a view, or a tuple of views
    calls: list[Call] = field(default_factory=list)
    integers: list[int] = field(default_factory=list)
    constants: list[Array] = field(default_factory=list)
    made: list[Made | None] = field(default_factory=list)
    constant_storages: dict[tuple[str, tuple[int, ...], Made | bytes], int] = field(default_factory=dict)
    inputs: list[int] = field(default_factory=list)
    outputs: list[int] = field(default_factory=list)
    checked: int | None = None

    def read(self, main: Any) -> None:
        for number, parameter in enumerate(main.params):
            view = self._tensor(parameter, Location.INPUT, number)
            self.bound[parameter] = view
            self.inputs.append(self._number(view))
        for block in main.body.blocks:
            for binding in block.bindings:
                self.bound[binding.var] = self._value(binding.value, binding.var)
        result = self._value(main.body.body, None)
        views = [self._output_view(part) for part in (result if isinstance(result, tuple) else (result,))]
        if self.checks:
            self._note_use(ends := views.pop())
            self.checked = self._number(ends)
        self.outputs = [self._output(view, number) for number, view in enumerate(views)]

    def _tensor(self, expression: Any, location: Location, number: int = -1) -> _View:
        """A new tensor of an expression's type."""
        shape = sizes(expression)
        if shape is None:
            raise BackendError("a library of kernels has tensors of fixed sizes only")
        return self._new(location, shape, str(expression.ty.dtype), number)

    def _new(self, location: Location, shape: tuple[int, ...], dtype: str, number: int = -1) -> _View:
        if len(shape) > _MOST_DIMENSIONS:
            raise BackendError(f"a tensor of {len(shape)} dimensions cannot be in a library of kernels")
        size = math.prod(shape) * np_dtype(dtype).itemsize
        self.storages.append(_Storage(location, size, number))
        return _View(len(self.storages) - 1, shape, dtype)

    def _number(self, view: _View) -> int:
        if view not in self.numbers:
            self.numbers[view] = len(self.views)
            self.views.append(view)
        return self.numbers[view]

    def _value(self, value: Any, variable: Any) -> Any:
        """The tensor of an expression, or its tuple of tensors. If the expression calls a kernel, the call is added to
        the plan, and there is no value."""
        from tvm import relax
        from tvm.ir import GenericConst, GlobalVar

        if isinstance(value, relax.Var):
            return self.bound[value]
        if isinstance(value, GenericConst):
            return self._constant(plain_array(value), made_of(value))
        if isinstance(value, relax.Tuple):
            return tuple(self._value(part, None) for part in value.fields)
        if isinstance(value, relax.TupleGetItem):
            return self._value(value.tuple_value, None)[int(value.index)]
        if isinstance(value, relax.ShapeExpr):
            return value
        if operator(value) == "relax.builtin.alloc_tensor":
            return self._tensor(variable, Location.ARENA)
        if operator(value) == "relax.reshape":
            view, shape = self._value(value.args[0], None), sizes(variable)
            if shape is not None and isinstance(view, _View):
                return _View(view.storage, shape, view.dtype)
        if isinstance(value, relax.Call) and isinstance(value.op, GlobalVar):
            return self._call(value.op.name_hint, value.args)
        raise BackendError(f"{_title(value)} needs TVM's runtime")

    def _output_view(self, value: Any) -> _View:
        """The tensor of an output. If the output is a shape, it becomes a tensor, as in ONNX."""
        from tvm import relax, tirx

        if isinstance(value, relax.ShapeExpr) and all(isinstance(n, tirx.IntImm) for n in value.values):
            return self._constant(np.asarray([int(n) for n in value.values], np.int64))
        if not isinstance(value, _View):
            raise BackendError(f"an output is {type(value).__name__}, not a tensor")
        return value

    def _constant(self, array: Array, made: Made | None = None) -> _View:
        """The tensor of a constant. Constants of other weights are others, also if they are equal."""
        key = (
            str(array.dtype),
            array.shape,
            made or hashlib.blake2b(memory_of(array)).digest(),
        )
        if key not in self.constant_storages:
            view = self._new(Location.CONSTANT, tuple(array.shape), str(array.dtype), len(self.constants))
            self.constant_storages[key] = view.storage
            self.constants.append(np.ascontiguousarray(array))
            self.made.append(made)
        return _View(self.constant_storages[key], tuple(array.shape), str(array.dtype))

    def _call(self, kernel: str, arguments: Sequence[Any]) -> None:
        from tvm import tirx

        numbers: list[int] = []
        for argument in arguments:
            if isinstance(argument, tirx.IntImm):
                self.integers.append(int(argument))
                numbers.append(-len(self.integers))
                continue
            view = self._value(argument, None)
            if not isinstance(view, _View):
                raise BackendError(f"kernel {kernel} takes what is not a tensor")
            self._note_use(view)
            numbers.append(self._number(view))
        self.calls.append(Call(kernel, tuple(numbers)))

    def _note_use(self, view: _View) -> None:
        storage, now = self.storages[view.storage], len(self.calls)
        storage.first = now if storage.first is None else storage.first
        storage.last = now

    def _output(self, view: _View, number: int) -> int:
        """The number of the tensor of an output in the caller's memory. If a kernel computes the tensor only for this
        output, the kernel writes to that memory; otherwise the tensor is copied."""
        storage = self.storages[view.storage]
        if storage.location is Location.ARENA and self._number(view) != self.checked:
            storage.location, storage.number = Location.OUTPUT, number
            return self._number(view)
        copied = self._new(Location.OUTPUT, view.shape, view.dtype, number)
        self._note_use(view)
        self.calls.append(Call(COPY, (self._number(view), self._number(copied))))
        return self._number(copied)

    def plan(self) -> ExecutionPlan:
        offsets, arena = arranged(
            {
                number: Life(storage.bytes, storage.first, storage.last)
                for number, storage in enumerate(self.storages)
                if storage.location is Location.ARENA and storage.first is not None
            }
        )
        tensors = []
        for view in self.views:
            storage = self.storages[view.storage]
            offset = offsets[view.storage] if storage.location is Location.ARENA else storage.number
            tensors.append(Tensor(storage.location, offset, view.shape, view.dtype))
        return ExecutionPlan(
            tuple(tensors), tuple(self.calls), tuple(self.integers), tuple(self.constants), tuple(self.inputs),
            tuple(self.outputs), self.checks, self.checked, arena, tuple(self.made),
        )  # fmt: skip


@dataclass(frozen=True, slots=True)
class Life:
    """The size of a tensor in bytes, and the first and the last call that uses it."""

    bytes: int
    first: int
    last: int


def arranged(lives: Mapping[int, Life]) -> tuple[dict[int, int], int]:
    """The offset of each tensor in one block of memory, and the size of the block, in bytes.

    Tensors that are in use at the same time do not overlap. The largest are placed first, each at the lowest offset
    where it fits (Pisarchyk and Lee 2020, "Efficient Memory Management for Deep Neural Net Inference": greedy by size).
    """
    placed: list[tuple[int, int, Life]] = []
    offsets: dict[int, int] = {}
    for number, life in sorted(lives.items(), key=lambda item: (-item[1].bytes, item[1].first)):
        size = -(-max(life.bytes, 1) // ALIGNMENT) * ALIGNMENT
        start = 0
        for low, high, other in placed:
            if other.last < life.first or life.last < other.first:
                continue
            if low - start >= size:
                break
            start = max(start, high)
        offsets[number] = start
        placed.append((start, start + size, life))
        placed.sort(key=lambda entry: entry[:2])
    return offsets, max((high for _, high, _ in placed), default=0)


def _title(value: Any) -> str:
    """The name of an expression in messages: the operator or the function that it calls."""
    name = operator(value)
    if name.startswith("relax.call_") and value.args:
        name = str(getattr(value.args[0], "global_symbol", name))
    outside = str(getattr(getattr(value, "op", None), "global_symbol", ""))  # for a function of the runtime
    return (name or outside).rpartition(".")[2] or type(value).__name__
