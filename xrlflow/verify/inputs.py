"""Inputs on which two models are compared: random ones that the original can run, or the user's own."""

from __future__ import annotations

import os
import zipfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import islice, product
from math import prod
from types import MappingProxyType
from typing import Any, TypeAlias

import ml_dtypes
import numpy as np
import onnx

from xrlflow.ir import FLOATS, INTEGERS, SMALL, Const, Dim, DType, TensorType, Value, digest
from xrlflow.onnxio import ImportedModel
from xrlflow.ops.infer import type_of_proto
from xrlflow.ops.tensors import dtype_of, numpy_dtype
from xrlflow.verify.dims import Bindings, Dimensions
from xrlflow.verify.errors import BadInputs, InputsNeeded
from xrlflow.verify.input_constraints import Demands, TensorConstraint, input_constraints
from xrlflow.verify.runner import Array
from xrlflow.verify.signature import Port, describe
from xrlflow.verify.values import ORDINARY, InputTraits, Integers, Masks, Spread, Values

Feeds: TypeAlias = Mapping[str, Any]

_WORDS = (
    "alpha",
    "beta",
    "gamma",
    "delta",
    "the quick brown fox",
    "12",
    "3.5",
    "Zürich",
    "",
    "ONNX",
    "a b  c",
)
_USER = "the user's inputs"
_FACTORS = 1 << 16


@dataclass(frozen=True, slots=True)
class Case:
    """One set of inputs."""

    bindings: Bindings  # sizes of the dynamic dimensions
    sample: int  # numbers the sets of ordinary values
    feeds: Feeds
    label: str = ""
    values: Values = ORDINARY

    def __str__(self) -> str:
        if self.label:
            return self.label
        kind = self.values.name or f"sample {self.sample}"
        return ", ".join([*(f"{k}={v}" for k, v in self.bindings.items()), kind])


# More choices of flags than this are not tried one by one.
_MOST_SETTINGS = 8


@dataclass(frozen=True, slots=True, eq=False)
class InputPlan:
    """How to draw inputs for one model: its declared inputs, and the constraints that its graph puts on them."""

    ports: tuple[Port, ...]
    defaults: tuple[tuple[Port, Const], ...]
    demands: Mapping[str, Demands]
    dimensions: Dimensions
    bound: Bindings
    thresholds: tuple[float, ...] = ()
    ties: bool = False

    @staticmethod
    def of(imported: ImportedModel) -> InputPlan:
        """The plan for a model. The constraints on an input come from the operators that it reaches."""
        values = input_values(imported)
        declared = {
            v.name: _as_in_graph(type_of_proto(v.type), imported, values.get(v.name))
            for v in imported.frame.graph.input
        }
        ports = tuple(Port(n, t) for n, t in declared.items() if n not in imported.overridable)
        defaults = tuple(
            (Port(n, declared[n], True), c) for n, c in imported.overridable.items() if n in declared
        )
        demands = {
            p.name: input_constraints(imported.graph, values[p.name], imported.declared)
            for p in ports
            if p.name in values
        }
        return InputPlan(ports, defaults, demands, Dimensions.of(ports, imported.ranges), imported.bindings)

    @property
    def dynamic(self) -> bool:
        return bool(self.dimensions.slots)

    @property
    def settings(self) -> tuple[Mapping[str, bool], ...]:
        """The values of all inputs of one truth value, which choose what the model does ("use_cache_branch"): first all
        true, in all combinations if there are few. Empty if the model has no such input.
        """
        flags = [p.name for p in self.ports if self._is_flag(p)]
        choices = product((True, False), repeat=len(flags)) if flags else ()
        return tuple(dict(zip(flags, values)) for values in islice(choices, _MOST_SETTINGS))

    def setting(self, case: Case) -> tuple[bool, ...]:
        """The values of these inputs in a case."""
        return tuple(bool(case.feeds[p.name].item()) for p in self.ports if self._is_flag(p))

    def _is_flag(self, port: Port) -> bool:
        fixed = self.demands.get(port.name, Demands()).constraint is not None
        single = port.type.other is None and port.type.shape in ((), (1,))
        return single and port.type.dtype == DType.BOOL and not fixed and "mask" not in port.name.lower()

    def traits(self) -> InputTraits:
        """The properties of these inputs that decide which kinds of values are worth a run."""
        of = [(p, self.demands.get(p.name, Demands())) for p in self.ports if p.type.other is None]
        integers = [(p, d) for p, d in of if p.type.dtype in INTEGERS and not d.steers and not _is_mask(p, d)]
        return InputTraits(
            floats=any(p.type.dtype in FLOATS and not d.bounds and not _is_mask(p, d) for p, d in of),
            bounded=any(d.loose for _, d in integers),
            loose=any(d.loose for _, d in integers),
            free=any(p.type.dtype.bits > 8 and not d.bounds and d.constraint is None for p, d in integers),
            masks=any(_is_mask(p, d) for p, d in of),
            thresholds=self.thresholds,
            ties=self.ties,
        )

    def nbytes(self, bindings: Bindings) -> int:
        """Bytes of all inputs at these sizes."""
        dense = [p for p in self.ports if p.type.other is None]
        return sum(prod(self.dimensions.shape(p, bindings)) * p.type.dtype.bits for p in dense) // 8

    def case(
        self,
        bindings: Bindings,
        seed: int,
        sample: int,
        cautious: bool = False,
        values: Values = ORDINARY,
        setting: Mapping[str, bool] = MappingProxyType({}),
    ) -> Case:
        """Inputs of these sizes. `cautious`: draw the smallest values that the constraints allow. `setting`: one of
        `settings`, in place of what is drawn.

        Raises InputsNeeded for an input that is not a dense tensor.
        """

        def size(dim: Dim) -> int | None:
            return dim if isinstance(dim, int) or dim is None else bindings.get(dim)

        feeds: dict[str, Any] = {}
        shapes = {p.name: self.dimensions.shape(p, bindings) for p in self.ports if p.type.other is None}
        longest = max((d for shape in shapes.values() for d in shape[1:2]), default=4)
        for port in self.ports:
            if port.type.other is not None or port.type.dtype == DType.UNDEFINED:
                raise InputsNeeded(
                    f"input {port.name!r} is {describe(port.type)}, for which nothing can be drawn: "
                    f"give inputs with --inputs data.npz (a sequence as {port.name}.0, {port.name}.1, ...)"
                )
            draw = _Draw(
                port,
                shapes[port.name],
                self.demands.get(port.name, Demands()),
                size,
                _generator(seed, bindings, sample, port.name),
                sample,
                cautious,
                longest,
                values,
                self.thresholds,
            )
            feeds[port.name] = draw.array()
            if port.name in setting:
                feeds[port.name] = np.full(shapes[port.name], setting[port.name])
        if sample == 1 and values.ordinary:  # in this sample inputs override their defaults
            for port, const in self.defaults:
                if port.type.dtype in (DType.FLOAT, DType.DOUBLE, DType.FLOAT16):
                    array = const.numpy()
                    noise = _generator(seed, bindings, sample, port.name).standard_normal(array.shape)
                    overridden = np.where(array == 0, 0.1 * noise, array * (1 + 0.1 * noise))
                    feeds[port.name] = overridden.astype(array.dtype)
        return Case(dict(bindings), sample, feeds, values=values)


def _as_in_graph(declared: TensorType, imported: ImportedModel, value: Value | None) -> TensorType:
    """An input's type with the graph's symbols: import renames a symbol that has several meanings in the file."""
    own = imported.graph.type(value).shape if value is not None else None
    if declared.shape is None or own is None or len(own) != len(declared.shape):
        return declared
    shape = tuple(b if isinstance(a, str) and isinstance(b, str) else a for a, b in zip(declared.shape, own))
    return TensorType(declared.dtype, shape, declared.const, declared.other)


def _is_mask(port: Port, demands: Demands) -> bool:
    """Whether an input is a mask, judged by the operators that read it or by its name and type."""
    if demands.constraint is not None:
        return demands.constraint is TensorConstraint.MASK
    named = "mask" in port.name.lower() and port.type.dtype not in FLOATS  # floats may be added to logits
    return port.type.dtype == DType.BOOL or (named and not demands.bounds)


def input_values(imported: ImportedModel) -> dict[str, Value]:
    """The values of the graph's inputs by name."""
    names = imported.graph.leaves.names
    return {names[v]: v for v in imported.graph.inputs if v in names}


def _generator(seed: int, bindings: Bindings, sample: int, name: str) -> np.random.Generator:
    """A random generator whose numbers depend on these arguments only."""
    return np.random.default_rng([seed, sample, digest(name), *bindings.values()])


@dataclass(frozen=True, slots=True, eq=False)
class _Draw:
    """Draws one input tensor."""

    port: Port
    shape: tuple[int, ...]
    demands: Demands
    size: Callable[[Dim], int | None]
    rng: np.random.Generator
    sample: int
    cautious: bool
    longest: int
    values: Values
    thresholds: tuple[float, ...]

    @property
    def name(self) -> str:
        return self.port.name.lower()

    def array(self) -> Array:
        dtype = self.port.type.dtype
        if dtype == DType.STRING:
            return np.asarray(self.rng.choice(np.asarray(_WORDS, dtype=object), self.shape), dtype=object)
        numbers = self.numbers(dtype)
        target = numpy_dtype(dtype)
        return np.ascontiguousarray(np.asarray(numbers).astype(target)).reshape(self.shape)

    def numbers(self, dtype: DType) -> Any:
        """The elements, as float64 or int64."""
        constraint = self.demands.constraint
        interval = self.demands.interval(self.size)
        if constraint in (TensorConstraint.TRUE, TensorConstraint.FALSE):
            return np.full(self.shape, constraint is TensorConstraint.TRUE)
        declared = self.demands.declared
        if declared is not None and self.shape == (len(declared),):
            return np.asarray(declared, dtype=np.int64)
        if constraint is TensorConstraint.RESHAPE and dtype != DType.BOOL:
            shape = np.ones(self.shape, dtype=np.int64)
            if shape.size:
                shape.reshape(-1)[(self.sample - 1) % shape.size] = -1
            return shape
        if constraint is TensorConstraint.EXPAND:
            return np.ones(self.shape, dtype=np.int64)
        if constraint is TensorConstraint.AXES:
            rank = self.size(self.demands.extent) or 1
            count = min(int(np.prod(self.shape)), rank)
            return np.resize(np.sort(self.rng.permutation(rank)[:count]), self.shape)
        if constraint is TensorConstraint.SPLIT:
            return self.composition(self.size(self.demands.extent))
        # An input that may also be 2 is still drawn as a mask, as zeros and ones are tried first; an input that may be
        # larger is not.
        wide = interval is not None and interval[1] > 2
        usual = dtype not in FLOATS or (self.values.ordinary and self.sample != 1)
        named = "mask" in self.name and usual and not (self.cautious and interval is not None)
        if (not wide and (constraint is TensorConstraint.MASK or named)) or dtype == DType.BOOL:
            return self.mask()
        if dtype in FLOATS and interval is None:
            return self.floats()
        if (
            dtype in INTEGERS
            and interval is None
            and self.values.integers is Integers.WIDE
            and self.wide_enough
        ):
            return self.wide(dtype)
        if (
            dtype in INTEGERS
            and self.demands.loose
            and self.values.integers in (Integers.ENDS, Integers.BEYOND)
        ):
            return self.ends(dtype)
        if dtype in INTEGERS or interval is not None:
            values = self.integers(dtype, interval)
            return self.between(values, interval) if dtype in FLOATS and interval is not None else values
        if dtype in (DType.COMPLEX64, DType.COMPLEX128):
            return self.rng.standard_normal(self.shape) + 1j * self.rng.standard_normal(self.shape)
        if dtype.bits < 8:
            limits = (
                ml_dtypes.iinfo(numpy_dtype(dtype))  # type: ignore[no-untyped-call]
                if "INT" in dtype.name
                else None
            )
            low, high = (limits.min, limits.max) if limits is not None else (-2, 2)
            return self.rng.integers(int(low), int(high), self.shape, endpoint=True)
        return self.floats()

    def floats(self) -> Any:
        """Floats of the requested kind. Those that decide how much is computed (`Demands.steers`) stay finite."""
        kind = self.values.floats
        landmarks = self.demands.landmarks
        values = self.rng.standard_normal(self.shape)
        # A scalar that the model compares with a number: it gets that number, and in one sample another number.
        free = self.values.ordinary and self.sample == 1 and not self.demands.steers
        if landmarks and values.size == 1 and kind.spread is not Spread.FILLED and not free:
            return np.full(self.shape, landmarks[self.sample % len(landmarks)])
        if self.values.ordinary and self.sample == 0 and values.size == 1 and self.demands.divides:
            # The scalar may be a speed or a scale, and a small value may make tensors a hundred times larger.
            return np.ones(self.shape)
        if kind.spread is Spread.UNIFORM:
            values = self.rng.uniform(0.0, kind.scale, self.shape)
        elif kind.spread is Spread.FILLED:
            values = np.full(self.shape, kind.scale)
        elif kind.spread is Spread.THRESHOLDS:
            near = self.rng.choice(np.asarray(self.thresholds), self.shape)
            near = near * self.rng.choice(np.asarray([1.0, 1.0 + 2**-7, 1.0 - 2**-7, 2.0, 0.5]), self.shape)
            values = np.where(values > -0.5, np.copysign(near, self.rng.standard_normal(self.shape)), values)
        elif kind.spread is Spread.TIES and not self.demands.steers:
            return self.ties()
        elif kind.finite or self.demands.steers:
            values = values * kind.scale
        elif kind.spread is Spread.NAN:
            return np.full(self.shape, np.nan)
        else:
            return self.poisoned(values)
        # Square roots of negative numbers may make all outputs NaN, which reveals little; one sample has negative
        # numbers anyway.
        if self.cautious or (self.demands.positive and (self.sample == 0 or not self.values.ordinary)):
            values = np.abs(values) + 0.125
        limits = ml_dtypes.finfo(numpy_dtype(self.port.type.dtype))  # type: ignore[no-untyped-call]
        largest = float(limits.max) / 4
        return np.clip(values, -largest, largest)

    def between(self, integers: Any, interval: tuple[int, int]) -> Any:
        """Floats that index a table after a Cast; in one sample with fractions, if the interval allows fractions."""
        if self.sample != 1 or self.cautious or self.demands.steers:
            return integers
        return np.clip(integers + self.rng.uniform(size=np.shape(integers)), *interval)

    def ties(self) -> Array:
        """Multiples of one half from -8 to 8; every fourth element is a zero of random sign."""
        halves = self.rng.integers(-16, 16, self.shape, endpoint=True) / 2
        zeros = np.copysign(0.0, self.rng.standard_normal(self.shape))
        return np.where(self.rng.uniform(size=self.shape) < 0.25, zeros, halves)

    def poisoned(self, values: Array) -> Array:
        """A copy with a few elements NaN, infinite and minus infinite. An array of one element gets one of these."""
        flat = values.reshape(-1)
        each = max(1, flat.size // 32)
        indices = self.rng.permutation(flat.size)[: 3 * each]
        bad = np.resize(np.asarray([np.nan, np.inf, -np.inf]), indices.size)
        flat[indices] = np.roll(bad, self.sample) if flat.size < 3 else bad
        return flat.reshape(self.shape)

    def mask(self) -> Any:
        """0 and 1, with at least one 1 in each row. The sample decides: all ones, a prefix, or any pattern."""
        mask = np.ones(self.shape, dtype=np.int64)
        if self.values.masks is Masks.EMPTY and not self.cautious:
            return np.zeros(self.shape, dtype=np.int64)
        if self.cautious or self.sample % 3 == 0 or mask.size == 0:
            return mask if mask.size != 1 or self.cautious else np.full(self.shape, 1)
        if mask.size == 1 and self.port.type.dtype == DType.BOOL and "mask" not in self.name:
            return np.full(self.shape, self.sample % 2 == 0)
        length = self.shape[-1] if self.shape else 1
        if self.sample % 3 == 1:
            lengths = self.rng.integers(1, length, self.shape[:-1], endpoint=True)
            return (np.arange(length) < np.asarray(lengths)[..., None]).astype(np.int64)
        mask = self.rng.integers(0, 2, self.shape)
        first = self.rng.integers(0, length, (*self.shape[:-1], 1))
        if self.shape:
            np.put_along_axis(mask, first, 1, axis=-1)
        return mask

    def integers(self, dtype: DType, interval: tuple[int, int] | None) -> Any:
        low, high = interval if interval is not None else self.usual(dtype)
        if dtype in INTEGERS:
            limits = np.iinfo(numpy_dtype(dtype))
            low, high = max(low, int(limits.min)), min(high, int(limits.max))
        high = max(low, high)
        count = int(np.prod(self.shape))
        marks = [v for v in self.demands.landmarks if interval is None or low <= v <= high]
        if self.cautious:
            return np.full(self.shape, marks[0] if marks and count == 1 else low)
        if count == 1 and marks:
            return np.full(self.shape, marks[self.sample % len(marks)])
        if self.demands.positive:
            low, high = max(1, low), max(1, high)
        span = high - low + 1
        if count <= span <= 1 << 20:  # draw without repetition
            values = low + self.rng.permutation(span)[:count]
        else:
            values = self.rng.integers(low, high, count, endpoint=True)
        if marks and count > 1:
            indices = self.rng.permutation(count)[: max(1, count // 10)]
            values[indices] = self.rng.choice(np.asarray(marks), indices.size).astype(values.dtype)
        if self.sample == 0 and count > 1:  # include both ends of the table
            values[0], values[-1] = low, high
        return values.reshape(self.shape)

    @property
    def wide_enough(self) -> bool:
        return not self.demands.steers and not self.cautious and self.port.type.dtype.bits > 8

    def wide(self, dtype: DType) -> Array:
        """Integers of all magnitudes of the type but its least: powers of two, their neighbours, and random ones."""
        limits = np.iinfo(numpy_dtype(dtype))
        low, high = int(limits.min) + 1, int(limits.max)
        powers = [2**k for k in (8, 15, 16, 24, 31, 32, 33, 53, 62, 63) if 2**k - 1 <= high]
        edges = [e for p in powers for e in (p - 1, p, p + 1) if e <= high]
        near = [*edges, *(-e for e in edges if -e >= low), 0, 1, high]
        count = int(np.prod(self.shape))
        if self.demands.positive:
            near, low = [n for n in near if n > 0], 1
        values = np.asarray(near, dtype=object)[self.rng.integers(0, len(near), count)]
        # Half of the numbers are below 2^40: such numbers are plausible seconds, counts and hashes.
        some = self.rng.integers(max(low, -(2**40)), min(high, 2**40), count, endpoint=True)
        values = np.where(self.rng.integers(0, 2, count) == 1, values, some.astype(object))
        if count:
            # Each input has a number that a narrower type cannot hold.
            values[count // 2] = min(high, 2**32 + 5) if dtype.bits > 32 else high
        return values.reshape(self.shape)

    def ends(self, dtype: DType) -> Array:
        """Indices at both ends of their tables, counted from either end. For the kind BEYOND, one index in eight is
        outside the table.
        """
        low, high = self.demands.interval(self.size, negative=True) or (0, 0)
        if np.iinfo(numpy_dtype(dtype)).min == 0:
            low = max(0, low)
        near = [n for n in (low, low + 1, -1, 0, 1, high - 1, high) if low <= n <= high]
        values = self.rng.choice(np.asarray(near), self.shape)
        if self.values.integers is Integers.BEYOND and not self.cautious:
            outside = self.rng.choice(
                np.asarray([high + 1, 2 * high + 2, low - 1 if low < 0 else high + 3]), self.shape
            )
            values = np.where(self.rng.integers(0, 8, self.shape) == 0, outside, values)
            values.reshape(-1)[:1] = high + 1
        return np.asarray(values)

    def usual(self, dtype: DType) -> tuple[int, int]:
        """The usual range of integers with this name and type."""
        if dtype in (DType.UINT8, DType.INT8):
            limits = np.iinfo(numpy_dtype(dtype))
            return int(limits.min), int(limits.max)
        if self.name in ("sr", "sample_rate", "sampling_rate"):
            return 16000, 16000
        if "len" in self.name:
            return 1, max(1, self.longest)
        if "timestep" in self.name:
            return 0, 999
        return 0, 9

    def composition(self, total: int | None) -> Any:
        """Sizes that sum to `total`, positive if possible; ones if `total` is None."""
        count = int(np.prod(self.shape))
        if total is None or count == 0:
            return np.ones(self.shape, dtype=np.int64)
        if total < count:
            return (np.arange(count) < total).astype(np.int64).reshape(self.shape)
        cuts = np.sort(self.rng.permutation(total - 1)[: count - 1] + 1)
        return np.diff(np.concatenate(([0], cuts, [total]))).reshape(self.shape)


# --- the user's inputs ---


def user_case(imported: ImportedModel, inputs: str | os.PathLike[str] | Mapping[str, Any]) -> Case:
    """The user's inputs: a .npz file, or arrays by name. The items of a sequence are named name.0, name.1, ...

    Raises BadInputs, whose message names the file, the input and what the model expects of this input.
    """
    if isinstance(inputs, Mapping):
        return _case_of(imported, dict(inputs))
    if not isinstance(inputs, (str, os.PathLike)):
        raise BadInputs(
            "inputs: give a mapping of arrays by name, or a file (precision: also a folder of files)"
        )
    path = os.fspath(inputs)
    arrays = _read(path)
    try:
        return _case_of(imported, arrays)
    except BadInputs as error:
        raise BadInputs(f"{path}: {error}") from error


def _case_of(imported: ImportedModel, arrays: dict[str, Any]) -> Case:
    declared = {v.name: v.type for v in imported.frame.graph.input}
    feeds: dict[str, Any] = {}
    bindings: dict[str, int] = {}
    values = input_values(imported)
    for name, proto in declared.items():
        type = _as_in_graph(type_of_proto(proto), imported, values.get(name))
        port = Port(name, type, name in imported.overridable)
        if port.type.other is not None:
            value = _structure(name, proto, arrays)
        elif name in arrays:
            value = _checked(port, arrays.pop(name), bindings)
        elif port.default:
            continue
        else:
            raise BadInputs(f"input {name!r} is missing: expected {describe(port.type)}")
        if value is not None or not port.default:
            feeds[name] = value
    if arrays:
        expected = ", ".join(declared)
        raise BadInputs(f"there is no input {sorted(arrays)[0]!r}: the model's inputs are {expected}")
    return Case(bindings, 0, feeds, _USER)


def _read(path: str) -> dict[str, Any]:
    try:
        with np.load(path, allow_pickle=False) as file:
            if not isinstance(file, np.lib.npyio.NpzFile):
                raise BadInputs(
                    f"{path}: holds one array without a name: save it with np.savez(path, name=array)"
                )
            return {name: file[name] for name in file.files}
    except FileNotFoundError as error:
        raise BadInputs(f"{path}: there is no such file") from error
    except IsADirectoryError as error:
        raise BadInputs(
            f"{path}: is a folder, of which only --precision takes the files: name one"
        ) from error
    except (OSError, EOFError, zipfile.BadZipFile, TypeError) as error:
        raise BadInputs(f"{path}: cannot be read as an .npz file: save it with np.savez") from error
    except ValueError as error:
        if isinstance(error, BadInputs):
            raise
        raise BadInputs(
            f"{path}: cannot be read without pickle: save strings as arrays of type str, others as numbers"
        ) from error


def _checked(port: Port, value: Any, bindings: dict[str, int]) -> Array:
    array = np.asarray(value)
    expected = f"expected {describe(port.type)}"
    if port.type.dtype == DType.STRING:
        if array.dtype.kind not in "OUS":
            raise BadInputs(f"input {port.name!r} is {array.dtype.name}, {expected}")
        array = array.astype(object)
    else:
        dtype = numpy_dtype(port.type.dtype)
        raw = array.dtype.kind == "V" and array.dtype.names is None and array.dtype.itemsize == dtype.itemsize
        if raw and dtype.kind not in "biufc":  # np.savez loses the dtype of bfloat16 and similar types
            array = array.view(dtype)
        if array.dtype != dtype:
            raise BadInputs(
                f"input {port.name!r} is {array.dtype.name}, {expected}: convert it with .astype({dtype.name!r})"
            )
    dims = port.type.shape
    if dims is None:
        return array
    shown = f"input {port.name!r} has shape {list(array.shape)}, {expected}"
    if array.ndim != len(dims):
        raise BadInputs(shown)
    for axis, (dim, number) in enumerate(zip(dims, array.shape)):
        if isinstance(dim, int):
            if dim != number:
                raise BadInputs(shown)
            continue
        key = dim if dim is not None else f"{port.name}.{axis}"
        if bindings.setdefault(key, number) != number:
            raise BadInputs(f"{shown}: {key} is {bindings[key]} in another input")
    return array


def _structure(name: str, proto: onnx.TypeProto, arrays: dict[str, Any]) -> Any:
    """A sequence or optional, built from arrays by name; None for an optional without arrays."""
    optional = proto.HasField("optional_type")
    inner = proto.optional_type.elem_type if optional else proto
    if inner.HasField("tensor_type"):
        return _checked(Port(name, type_of_proto(inner)), arrays.pop(name), {}) if name in arrays else None
    if not inner.HasField("sequence_type") or not inner.sequence_type.elem_type.HasField("tensor_type"):
        raise BadInputs(
            f"input {name!r} is {describe(type_of_proto(proto))}, which cannot be given in a file"
        )
    items: Sequence[Any] = []
    if name in arrays:
        items = list(arrays.pop(name))
    else:
        keys: list[str] = []
        while f"{name}.{len(keys)}" in arrays:
            keys.append(f"{name}.{len(keys)}")
        items = [arrays.pop(key) for key in keys]
        if not items and not optional:
            raise BadInputs(f"input {name!r} is missing: give its items as {name}.0, {name}.1, ...")
        if not items:
            return None
    port = Port(name, type_of_proto(inner.sequence_type.elem_type))
    return [_checked(port, item, {}) for item in items]


def evaluable_feeds(imported: ImportedModel, feeds: Feeds) -> dict[Value, Array] | None:
    """The feeds by value, for the evaluator; None if some of them are not tensors."""
    values = input_values(imported)
    if not all(isinstance(a, np.ndarray) for a in feeds.values()):
        return None
    defaults = {n: const.numpy() for n, const in imported.overridable.items() if n not in feeds}
    return {values[name]: array for name, array in {**feeds, **defaults}.items() if name in values}


def moved_weights(imported: ImportedModel, seed: int) -> dict[str, Array]:
    """Large weights of float32 by name, with each element replaced by a number as near as its neighbours.

    Weights of whole numbers (masks, positions) are left out: their sums are exact. So are weights of which such an
    element would not be finite.
    """
    rng = np.random.default_rng(seed)
    # Drawing a number for each of many weights would take longer than running the model.
    factors = (1 + np.float32(2.0**-23) * rng.choice([-1, 1], _FACTORS)).astype(np.float32)
    found = {}
    for tensor in onnx.ModelProto.FromString(imported.stripped).graph.initializer:
        if tensor.data_type != onnx.TensorProto.FLOAT or prod(tensor.dims) <= SMALL:
            continue
        array = imported.store.const(tensor).numpy()
        flat = array.reshape(-1)
        if (np.trunc(flat[:SMALL]) == flat[:SMALL]).all() and (np.trunc(flat) == flat).all():
            continue
        start = int(rng.integers(_FACTORS // 2))
        row = factors[start : start + _FACTORS // 2]
        moved = np.empty_like(flat)
        whole = flat.size // row.size * row.size
        with np.errstate(over="ignore", invalid="ignore"):
            np.multiply(flat[:whole].reshape(-1, row.size), row, out=moved[:whole].reshape(-1, row.size))
            np.multiply(flat[whole:], row[: flat.size - whole], out=moved[whole:])
        if np.isfinite(moved).all():
            found[tensor.name] = moved.reshape(array.shape)
    return found


def perturbed(feeds: Feeds, seed: int) -> dict[str, Any]:
    """The feeds with every float replaced by one of its two neighbours."""
    rng = np.random.default_rng(seed)
    out: dict[str, Any] = {}
    for name, array in feeds.items():
        if isinstance(array, np.ndarray) and array.dtype.kind == "f" and dtype_of(array.dtype) in FLOATS:
            ends = np.where(rng.integers(0, 2, array.shape) == 1, np.inf, -np.inf).astype(array.dtype)
            neighbours = np.nextafter(array, ends)
            out[name] = np.where(np.isfinite(array) & np.isfinite(neighbours), neighbours, array)
        else:
            out[name] = array
    return out
