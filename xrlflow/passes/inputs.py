"""Random inputs that are meaningful for a module.

The uses of each parameter of the entry are followed through the module. Integers that become indices, or that are
compared with class numbers, are below the number of entries from which they select. Floats of which the module
computes a root or logarithm are positive. Matrices are scaled, so that products of many matrices stay near 1 and no
function saturates.
"""

from __future__ import annotations

import pickle
from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from enum import Enum
from typing import Any, TypeAlias

import ml_dtypes
import numpy as np
import numpy.typing as npt

from xrlflow.passes import hlo
from xrlflow.passes.compiler import CompilerError

Array: TypeAlias = npt.NDArray[Any]

# NumPy's types by the number of `PrimitiveType`.
DTYPES: dict[int, Any] = {
    1: np.bool_,
    2: np.int8,
    3: np.int16,
    4: np.int32,
    5: np.int64,
    6: np.uint8,
    7: np.uint16,
    8: np.uint32,
    9: np.uint64,
    10: np.float16,
    11: np.float32,
    12: np.float64,
    15: np.complex64,
    18: np.complex128,
    16: ml_dtypes.bfloat16,
}
# The names of types of which no parameters can be drawn, for messages.
_NARROW = {
    17: "token",
    19: "f8e5m2",
    20: "f8e4m3fn",
    21: "s4",
    22: "u4",
    23: "f8e4m3b11fnuz",
    24: "f8e5m2fnuz",
    25: "f8e4m3fnuz",
    26: "s2",
    27: "u2",
    28: "f8e4m3",
    29: "f8e3m4",
    32: "f4e2m1fn",
    33: "f8e8m0fnu",
}
# The upper limit of integers for which the module implies no limit.
_MOST = 64


class Floats(Enum):
    """How floats are drawn."""

    NORMAL = "normal"  # mean 0; the variance of matrices is such that products stay near 1
    POSITIVE = "positive"  # between 0.5 and 1.5
    SPARSE = "sparse"
    """Like NORMAL, but half of the tensors are 0, so that small terms of a sum are not hidden by large ones."""


@dataclass(frozen=True, slots=True)
class Draw:
    """Random inputs. `nudge`: the seed by which each drawn float is changed by one unit in the last place, up or down;
    0: no change.
    """

    seed: int
    floats: Floats = Floats.POSITIVE
    nudge: int = 0


@dataclass(frozen=True, slots=True)
class Given:
    """Inputs from the caller. `pickled`: a pickled list of arrays. `nudge`: as for Draw."""

    pickled: bytes
    nudge: int = 0


Inputs: TypeAlias = Draw | Given


def given(arrays: Sequence[Array]) -> Given:
    """Inputs from arrays, one for each parameter."""
    return Given(pickle.dumps([np.asarray(a) for a in arrays], protocol=5))


def arrays(data: bytes, how: Inputs) -> list[Array]:
    """An array for each parameter of a serialized module's entry. Raises CompilerError if inputs do not fit."""
    module = hlo.parse(data, full=True)
    parameters = hlo.parameters(module)
    for number, parameter in enumerate(parameters):
        if min(parameter.dimensions, default=0) < 0:
            raise CompilerError(
                f"parameter {number} has a size that is not known: give the module static shapes"
            )
    if isinstance(how, Given):
        values = _fitting(how, parameters)
    else:
        generator = np.random.default_rng(how.seed)
        uses = _Uses(module)
        values = [
            _random(parameter, uses.of(number), how.floats, generator)
            for number, parameter in enumerate(parameters)
        ]
    return (
        [nudged(a, np.random.default_rng((how.nudge, n))) for n, a in enumerate(values)]
        if how.nudge
        else values
    )


def _fitting(how: Given, parameters: Sequence[hlo.Parameter]) -> list[Array]:
    values: list[Array] = pickle.loads(how.pickled)
    if len(values) != len(parameters):
        raise CompilerError(
            f"{len(values)} inputs are given, and the module has {len(parameters)} parameters"
        )
    for number, (array, parameter) in enumerate(zip(values, parameters)):
        dtype = DTYPES.get(parameter.element_type)
        if dtype is None or array.dtype != dtype or array.shape != parameter.dimensions:
            raise CompilerError(
                f"input {number} is {array.dtype}{list(array.shape)}, and the parameter "
                f"{np.dtype(dtype) if dtype else 'of another type'}{list(parameter.dimensions)}"
            )
    return values


def nudged(array: Array, generator: np.random.Generator) -> Array:
    """The floats changed by one unit in the last place of their own type, up or down; 0 stays 0."""
    if array.dtype.kind == "c":
        parts = np.ascontiguousarray(array).reshape(-1).view(array.real.dtype)
        return nudged(parts, generator).view(array.dtype).reshape(array.shape)
    if not _is_float(array.dtype):
        return array
    unit = float(ml_dtypes.finfo(array.dtype).eps)  # type: ignore[no-untyped-call]
    signs = generator.choice(np.array([-1.0, 1.0]), array.shape)
    with np.errstate(invalid="ignore", over="ignore"):
        return np.asarray(array.astype(np.float64) * (1.0 + unit * signs)).astype(array.dtype)


def wide(array: Array) -> Array:
    """The array with floats as float64 and complex numbers as complex128; other types unchanged."""
    if array.dtype.kind == "c":
        return array.astype(np.complex128)
    return array.astype(np.float64) if _is_float(array.dtype) else array


def _is_float(dtype: np.dtype[Any]) -> bool:
    return dtype.kind == "f" or dtype == ml_dtypes.bfloat16


@dataclass(frozen=True, slots=True)
class Use:
    """How the module uses a parameter."""

    bound: int | None = None  # integers must be below this; None: the parameter is no index
    positive: bool = False  # the module computes a root or logarithm of the parameter


def _random(
    parameter: hlo.Parameter, use: Use, distribution: Floats, generator: np.random.Generator
) -> Array:
    dtype = DTYPES.get(parameter.element_type)
    if dtype is None:
        number = parameter.element_type
        raise CompilerError(f"parameters of type {_NARROW.get(number, number)} cannot be drawn")
    kind, shape = np.dtype(dtype), parameter.dimensions
    if kind == np.bool_:
        return generator.integers(0, 2, shape).astype(kind)
    if kind.kind in "iu":
        return _integers(kind, shape, use, distribution, generator)
    if distribution is Floats.SPARSE and shape and generator.random() < 0.5:
        return np.zeros(shape, kind)

    def floats() -> Array:
        # A scalar is a rate, a scale or a count, and is never 0.
        if distribution is Floats.POSITIVE or use.positive or not shape:
            return generator.uniform(0.5, 1.5, shape)
        fan = int(np.prod(shape[:-1])) if len(shape) > 1 else 1
        return np.asarray(generator.normal(size=shape) / max(1.0, fan) ** 0.5)

    return (floats() + 1j * floats()).astype(kind) if kind.kind == "c" else np.asarray(floats()).astype(kind)


def _integers(
    kind: np.dtype[Any],
    shape: tuple[int, ...],
    use: Use,
    distribution: Floats,
    generator: np.random.Generator,
) -> Array:
    if use.bound is not None:
        return generator.integers(0, min(use.bound, _MOST), shape).astype(kind)
    if kind.kind == "u" and kind.itemsize > 1:  # the key of a random number generator
        return generator.integers(0, np.iinfo(kind).max, shape, dtype=kind, endpoint=True)
    if not shape:  # a count of steps, or the trip count of a loop
        return generator.integers(1, _MOST, shape).astype(kind)
    low = -_MOST if distribution is Floats.NORMAL and kind.kind == "i" else 0
    return generator.integers(low, _MOST, shape).astype(kind)


# Instructions whose results consist of elements of these operands (None: of all operands).
_MOVES: dict[str, tuple[int, ...] | None] = {
    **dict.fromkeys(
        ("bitcast", "broadcast", "convert", "copy", "dynamic-slice", "gather", "pad", "reshape"), (0,)
    ),
    **dict.fromkeys(("reverse", "set-dimension-size", "slice", "transpose"), (0,)),
    "clamp": (1,),
    "concatenate": None,
    "dynamic-update-slice": (0, 1),
    "opt-barrier": None,
    "select": (1, 2),
}
# Sums of indices are indices, as jax adds the size to negative ones.
_INDEX_MOVES = {**_MOVES, "add": None, "maximum": None, "minimum": None}
_ROOTS = frozenset({"sqrt", "rsqrt", "log"})

_At: TypeAlias = tuple[int, tuple[int, ...]]  # an instruction's id, and a path in the tuple that it returns


@dataclass(slots=True)
class _Uses:
    """Finds how the parameters of a module's entry are used, by following uses back to the parameters."""

    module: Any
    _by_id: dict[int, Any] = field(init=False)
    _computation: dict[int, Any] = field(init=False)
    _callers: dict[int, list[tuple[Any, int]]] = field(init=False)
    _found: dict[int, Use] = field(init=False)

    def __post_init__(self) -> None:
        parts = list(hlo.live(self.module))
        self._by_id, self._computation = {}, {}
        self._callers = defaultdict(list)
        for computation, _ in parts:
            for instruction in computation.instructions:
                self._by_id[instruction.id] = instruction
                self._computation[instruction.id] = computation
        for _, instructions in parts:
            for instruction in instructions:
                for index, called in enumerate(instruction.called_computation_ids):
                    self._callers[called].append((instruction, index))
        self._roots = {c.id: c.root_id for c, _ in parts}
        self._entry = parts[0][0].id
        bounds: dict[int, int] = {}
        positive: set[int] = set()
        for _, instructions in parts:
            for instruction in instructions:
                for at, bound in self._indexing_operands(instruction):
                    if bound > 1:  # if there is one entry, every index selects it
                        for number in self._sources(at, indices=True):
                            bounds[number] = min(bound, bounds.get(number, bound))
                if instruction.opcode in _ROOTS:
                    positive |= set(self._sources(instruction.operand_ids[0], indices=False))
        self._found = {n: Use(bounds.get(n), n in positive) for n in bounds.keys() | positive}

    _roots: dict[int, int] = field(init=False)
    _entry: int = field(init=False)

    def of(self, number: int) -> Use:
        """The use of a parameter, by its number."""
        return self._found.get(number, Use())

    def _indexing_operands(self, instruction: Any) -> Iterator[tuple[int, int]]:
        """The operands of an instruction that are indices, each with the number of entries from which it selects."""
        operands = instruction.operand_ids

        def sizes(of: int) -> list[int]:
            return list(self._by_id[of].shape.dimensions)

        match instruction.opcode:
            case "gather":
                counts = [n - part + 1 for n, part in zip(sizes(operands[0]), instruction.gather_slice_sizes)]
                yield from self._along(operands[1], instruction.gather, counts)
            case "scatter":
                yield from self._along(
                    operands[(len(operands) - 1) // 2], instruction.scatter, sizes(operands[0])
                )
            case "dynamic-slice" | "dynamic-update-slice":
                first = 1 if instruction.opcode == "dynamic-slice" else 2
                extents = sizes(operands[0])
                part = list(instruction.shape.dimensions) if first == 1 else sizes(operands[1])
                for dimension, operand in enumerate(operands[first:]):
                    yield operand, extents[dimension] - part[dimension] + 1
            case "compare":  # one-hot: indices are compared with the class numbers
                for one, other in (operands, reversed(operands)):
                    if (count := self._counted(other)) is not None:
                        yield one, count

    def _along(self, indices: int, indexing: Any, counts: Sequence[int]) -> Iterator[tuple[int, int]]:
        """The instructions whose elements become the indices `indices` (the operands of a concatenation, or `indices`
        itself), each with the number of entries from which it selects.
        """
        # Scatters have their own name for this field: scatter_dims_to_operand_dims.
        dimensions = list(indexing.start_index_map)
        instruction = self._by_id[indices]
        along = indexing.index_vector_dim
        if instruction.opcode == "concatenate" and list(instruction.dimensions) == [along]:
            for part in instruction.operand_ids:
                count = self._by_id[part].shape.dimensions[along]
                yield part, min(counts[d] for d in dimensions[:count])
                dimensions = dimensions[count:]
        else:
            yield indices, min((counts[d] for d in dimensions), default=1)

    def _counted(self, number: int) -> int | None:
        """The length of an iota, possibly broadcast or reshaped; None if the instruction is no iota."""
        instruction = self._by_id[number]
        while instruction.opcode in ("broadcast", "reshape", "convert"):
            instruction = self._by_id[instruction.operand_ids[0]]
        if instruction.opcode != "iota":
            return None
        return int(instruction.shape.dimensions[instruction.dimensions[0]])

    def _sources(self, number: int, indices: bool) -> Iterator[int]:
        """The numbers of the entry's parameters from which the elements of an instruction's result come."""
        pending: list[_At] = [(number, ())]
        visited: set[_At] = set()
        while pending:
            at = pending.pop()
            if at in visited:
                continue
            visited.add(at)
            instruction = self._by_id[at[0]]
            if instruction.opcode == "parameter" and self._computation[at[0]].id == self._entry:
                if not at[1]:
                    yield instruction.parameter_number
                continue
            pending += self._behind(instruction, at[1], indices)

    def _behind(self, instruction: Any, path: tuple[int, ...], indices: bool) -> list[_At]:
        """The operands from which the elements of a result come."""
        operands = list(instruction.operand_ids)
        called = list(instruction.called_computation_ids)
        match instruction.opcode:
            case "get-tuple-element":
                return [(operands[0], (instruction.tuple_index, *path))]
            case "tuple":
                return [(operands[path[0]], path[1:])] if path else []
            case "while":
                body = self._roots.get(called[0])
                return [(operands[0], path), *([(body, path)] if body is not None else [])]
            case "call" | "conditional":
                return [(self._roots[c], path) for c in called if c in self._roots]
            case "parameter":
                return self._before_call(instruction, path, indices)
        moving = (_INDEX_MOVES if indices else _MOVES).get(instruction.opcode, ())
        if not indices and instruction.opcode in ("add", "multiply", "divide"):
            moving = self._weighted(instruction)
        return [(o, path) for n, o in enumerate(operands) if moving is None or n in moving]

    def _before_call(self, parameter: Any, path: tuple[int, ...], indices: bool) -> list[_At]:
        """The arguments that callers of a function pass for one of its parameters."""
        number = parameter.parameter_number
        arguments: list[_At] = []
        for caller, index in self._callers[self._computation[parameter.id].id]:
            operands = list(caller.operand_ids)
            match caller.opcode:
                case "call" | "map":
                    arguments.append((operands[number], path))
                case "conditional":
                    arguments.append((operands[index + 1], path))
                case "while":
                    arguments += self._behind(caller, path, indices)
        return arguments

    def _weighted(self, instruction: Any) -> tuple[int, ...]:
        """The operands that must be positive for the result to be positive: terms of a sum, and tensors that a scalar
        scales.
        """
        if instruction.opcode == "add":
            return (0, 1)
        scales = [self._is_scalar(o) for o in instruction.operand_ids]
        if instruction.opcode == "divide":
            return (0,) if scales[1] else ()
        return tuple(n for n, other in enumerate(reversed(scales)) if other)

    def _is_scalar(self, number: int) -> bool:
        """Whether all elements of the result of instruction `number` are certainly equal."""
        instruction = self._by_id[number]
        while instruction.opcode in ("broadcast", "reshape", "convert"):
            if not instruction.shape.dimensions:
                return True
            instruction = self._by_id[instruction.operand_ids[0]]
        return not instruction.shape.dimensions
