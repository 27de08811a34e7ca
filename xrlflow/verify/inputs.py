"""Inputs to compare two models on: random ones that the original can run, or the user's own."""

from __future__ import annotations

import os
import zipfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import Any, TypeAlias, TypeVar

import ml_dtypes
import numpy as np
import onnx

from xrlflow.ir import FLOATS, INTEGERS, Const, Dim, DType, Value, digest
from xrlflow.onnxio import ImportedModel
from xrlflow.ops.infer import type_of_proto
from xrlflow.ops.tensors import dtype_of, numpy_dtype
from xrlflow.verify.dims import Bindings, Dimensions, Role
from xrlflow.verify.errors import BadInputs, InputsNeeded
from xrlflow.verify.follow import Demands, Form, follow
from xrlflow.verify.runner import Array
from xrlflow.verify.signature import Port, describe

Feeds: TypeAlias = Mapping[str, Any]
T = TypeVar("T")

# Bindings that are tried before the user is asked for inputs.
MAX_TRIES = 150
# Draws of values for one binding before it is given up.
_REDRAWS = 3
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


@dataclass(frozen=True, slots=True)
class Case:
    """One set of inputs. `bindings`: the numbers of the dynamic dimensions; `sample` counts within a binding."""

    bindings: Bindings
    sample: int
    feeds: Feeds
    label: str = ""

    def __str__(self) -> str:
        if self.label:
            return self.label
        return ", ".join([*(f"{k}={v}" for k, v in self.bindings.items()), f"sample {self.sample}"])


@dataclass(frozen=True, slots=True, eq=False)
class InputPlan:
    """How to draw inputs for one model: what it declares, and what its graph demands."""

    ports: tuple[Port, ...]
    defaults: tuple[tuple[Port, Const], ...]
    demands: Mapping[str, Demands]
    dimensions: Dimensions
    bound: Bindings

    @staticmethod
    def of(imported: ImportedModel) -> InputPlan:
        """Follows every input of the model to its consumers."""
        declared = {v.name: type_of_proto(v.type) for v in imported.frame.graph.input}
        values = input_values(imported)
        ports = tuple(Port(n, t) for n, t in declared.items() if n not in imported.overridable)
        defaults = tuple(
            (Port(n, declared[n], True), c) for n, c in imported.overridable.items() if n in declared
        )
        demands = {p.name: follow(imported.graph, values[p.name]) for p in ports if p.name in values}
        return InputPlan(ports, defaults, demands, Dimensions.of(ports), imported.bindings)

    @property
    def dynamic(self) -> bool:
        return bool(self.dimensions.slots)

    def case(self, bindings: Bindings, seed: int, sample: int, cautious: bool = False) -> Case:
        """Inputs of these dimensions. `cautious`: the least values that are allowed everywhere.

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
            )
            feeds[port.name] = draw.array()
        if sample == 1:  # one sample of each binding overrides what can be overridden
            for port, const in self.defaults:
                if port.type.dtype in (DType.FLOAT, DType.DOUBLE, DType.FLOAT16):
                    array = const.numpy()
                    noise = _generator(seed, bindings, sample, port.name).standard_normal(array.shape)
                    feeds[port.name] = (array * (1 + 0.1 * noise)).astype(array.dtype)
        return Case(dict(bindings), sample, feeds)


def input_values(imported: ImportedModel) -> dict[str, Value]:
    """The values of the graph's inputs by name."""
    names = imported.graph.leaves.names
    return {names[v]: v for v in imported.graph.inputs if v in names}


def draw_cases(
    plan: InputPlan,
    attempt: Callable[[Case], T | None],
    sensible: Callable[[Case, T], bool] = lambda case, result: True,
    *,
    seed: int = 0,
    samples: int = 3,
    wanted: int = 3,
    tries: int = MAX_TRIES,
) -> list[tuple[Case, T]]:
    """Cases on which the model runs, with what `attempt` made of each (None: it does not run).

    Bindings that are not `sensible` (outputs have no elements, say, because a dimension is too small) are taken only
    if there are too few others.

    With dynamic dimensions: `wanted` bindings, never of ones only, that differ from each other, and the user's own
    besides if it has only ones. Without: one. `samples` sets of inputs for each binding. A binding that fails is
    replaced by another one, at most `tries` times. Raises InputsNeeded if too few work.
    """
    found: list[tuple[Case, T]] = []
    if not plan.dynamic:
        found = _samples(plan, {}, attempt, seed, samples)
        if not found:
            raise InputsNeeded(
                "the original fails on every input drawn for it: give inputs that it runs on with --inputs data.npz"
            )
        return found
    mine = plan.dimensions.default(plan.bound)
    if all(
        mine.get(s.name) == 1 and s.name in plan.bound for s in plan.dimensions.slots if s.role != Role.RANK
    ):
        found.extend(_samples(plan, mine, attempt, seed, samples))
    working, tried = 0, 0
    spare: list[list[tuple[Case, T]]] = []
    for bindings in islice(plan.dimensions.candidates(plan.bound, seed), tries):
        tried += 1
        cases = _samples(plan, bindings, attempt, seed, samples)
        if not all(sensible(case, result) for case, result in cases):
            spare.extend([cases] if len(spare) < wanted else [])
            continue
        found.extend(cases)
        working += bool(cases)
        if working == wanted:
            return found
    for cases in spare[: wanted - working]:
        found.extend(cases)
        working += 1
    if working == wanted:
        return found
    symbols = ", ".join(slot.name for slot in plan.dimensions.slots)
    raise InputsNeeded(
        f"the original runs with {working} of the {tried} choices tried for its dimensions ({symbols}), and "
        f"{wanted} are needed: give inputs that it runs on with --inputs data.npz"
    )


def _samples(
    plan: InputPlan, bindings: Bindings, attempt: Callable[[Case], T | None], seed: int, samples: int
) -> list[tuple[Case, T]]:
    """The samples of one binding on which the model runs; values are drawn again a few times."""
    found: list[tuple[Case, T]] = []
    # Other values cannot help a model of floats only.
    redraws = _REDRAWS if any(p.type.dtype not in FLOATS for p in plan.ports) else 1
    for sample in range(samples):
        for redraw in range(redraws + 1):
            cautious = redraw == redraws
            if cautious and redraws == 1:
                break
            case = plan.case(bindings, seed + 7919 * redraw, sample, cautious)
            result = attempt(case)
            if result is not None:
                found.append((case, result))
                break
        if not found:
            break
    return found


def feeds_for_measurement(
    imported: ImportedModel, seed: int = 0, runs: Callable[[Feeds], bool] | None = None
) -> dict[str, Any]:
    """One set of inputs at the user's dimensions, by default those that the cost model takes (batch 1).

    With `runs` (whether the model runs on some inputs), other values and then other dimensions are tried until it
    does. Raises InputsNeeded if nothing that is tried runs.
    """
    plan = InputPlan.of(imported)
    usual = plan.dimensions.default(plan.bound)
    if runs is None:
        return dict(plan.case(usual, seed, 0).feeds)

    def attempt(case: Case) -> bool | None:
        return runs(case.feeds) or None

    for bindings in [
        usual,
        *islice(plan.dimensions.candidates(plan.bound, seed), MAX_TRIES if plan.dynamic else 0),
    ]:
        found = _samples(plan, bindings, attempt, seed, 1)
        if found:
            return dict(found[0][0].feeds)
    raise InputsNeeded(
        "no inputs could be drawn on which the model runs: give some with --inputs data.npz, or shapes with --shape"
    )


def _generator(seed: int, bindings: Bindings, sample: int, name: str) -> np.random.Generator:
    """Numbers that depend on nothing but these."""
    return np.random.default_rng([seed, sample, digest(name), *bindings.values()])


@dataclass(frozen=True, slots=True, eq=False)
class _Draw:
    """One input tensor to be drawn."""

    port: Port
    shape: tuple[int, ...]
    demands: Demands
    size: Callable[[Dim], int | None]
    rng: np.random.Generator
    sample: int
    cautious: bool
    longest: int

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
        """The elements, in float64 or int64."""
        form = self.demands.form
        interval = self.demands.interval(self.size)
        if form in (Form.TRUE, Form.FALSE):
            return np.full(self.shape, form is Form.TRUE)
        if form is Form.RESHAPE and dtype != DType.BOOL:
            shape = np.ones(self.shape, dtype=np.int64)
            if shape.size:
                shape.reshape(-1)[(self.sample - 1) % shape.size] = -1
            return shape
        if form is Form.EXPAND:
            return np.ones(self.shape, dtype=np.int64)
        if form is Form.AXES:
            rank = self.size(self.demands.extent) or 1
            count = min(int(np.prod(self.shape)), rank)
            return np.resize(np.sort(self.rng.permutation(rank)[:count]), self.shape)
        if form is Form.SPLIT:
            return self.composition(self.size(self.demands.extent))
        wide = interval is not None and interval[1] > 1
        if (form is Form.MASK and not wide) or dtype == DType.BOOL or ("mask" in self.name and not wide):
            return self.mask()
        if dtype in FLOATS and interval is None:
            return self.floats()
        if dtype in INTEGERS or interval is not None:
            return self.integers(dtype, interval)
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
        drawn = self.rng.standard_normal(self.shape)
        landmarks = self.demands.landmarks
        if landmarks and drawn.size == 1:
            return np.full(self.shape, landmarks[self.sample % len(landmarks)])
        # What is negative may give NaN everywhere, which tells little; but a root has to be compared there as well.
        positive = self.cautious or (self.demands.positive and self.sample == 0)
        return np.abs(drawn) + 0.125 if positive else drawn

    def mask(self) -> Any:
        """0 and 1 with at least a 1 in each row: everything, a prefix, or any."""
        mask = np.ones(self.shape, dtype=np.int64)
        if self.cautious or self.sample % 3 == 0 or mask.size == 0:
            return mask if mask.size != 1 or self.cautious else np.full(self.shape, 1)
        if mask.size == 1 and self.port.type.dtype == DType.BOOL and "mask" not in self.name:
            return np.full(self.shape, self.sample % 2 == 0)
        length = self.shape[-1] if self.shape else 1
        if self.sample % 3 == 1:
            kept = self.rng.integers(1, length, self.shape[:-1], endpoint=True)
            return (np.arange(length) < np.asarray(kept)[..., None]).astype(np.int64)
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
        if count <= span <= 1 << 20:  # as many different ones as can be
            drawn = low + self.rng.permutation(span)[:count]
        else:
            drawn = self.rng.integers(low, high, count, endpoint=True)
        if marks and count > 1:
            places = self.rng.permutation(count)[: max(1, count // 10)]
            drawn[places] = self.rng.choice(np.asarray(marks), places.size).astype(drawn.dtype)
        if self.sample == 0 and count > 1:  # both ends of the table
            drawn[0], drawn[-1] = low, high
        return drawn.reshape(self.shape)

    def usual(self, dtype: DType) -> tuple[int, int]:
        """What integers of this name and type tend to be."""
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
        """Sizes that add up to `total`, positive if that can be; ones if it is not known."""
        count = int(np.prod(self.shape))
        if total is None or count == 0:
            return np.ones(self.shape, dtype=np.int64)
        if total < count:
            return (np.arange(count) < total).astype(np.int64).reshape(self.shape)
        cuts = np.sort(self.rng.permutation(total - 1)[: count - 1] + 1)
        return np.diff(np.concatenate(([0], cuts, [total]))).reshape(self.shape)


# --- the user's inputs ---


def user_case(imported: ImportedModel, inputs: str | os.PathLike[str] | Mapping[str, Any]) -> Case:
    """The user's inputs: a .npz file, or arrays by name. A sequence is given as name.0, name.1, ...

    Raises BadInputs, naming the input and what is expected of it.
    """
    given = dict(inputs) if isinstance(inputs, Mapping) else _read(os.fspath(inputs))
    declared = {v.name: v.type for v in imported.frame.graph.input}
    feeds: dict[str, Any] = {}
    bindings: dict[str, int] = {}
    for name, proto in declared.items():
        port = Port(name, type_of_proto(proto), name in imported.overridable)
        if port.type.other is not None:
            found = _structure(name, proto, given)
        elif name in given:
            found = _checked(port, given.pop(name), bindings)
        elif port.default:
            continue
        else:
            raise BadInputs(f"input {name!r} is missing: expected {describe(port.type)}")
        if found is not None or not port.default:
            feeds[name] = found
    if given:
        expected = ", ".join(declared)
        raise BadInputs(f"there is no input {sorted(given)[0]!r}: the model's inputs are {expected}")
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
        wanted = numpy_dtype(port.type.dtype)
        raw = (
            array.dtype.kind == "V" and array.dtype.names is None and array.dtype.itemsize == wanted.itemsize
        )
        if raw and wanted.kind not in "biufc":  # np.savez forgets the names of bfloat16 and its like
            array = array.view(wanted)
        if array.dtype != wanted:
            raise BadInputs(
                f"input {port.name!r} is {array.dtype.name}, {expected}: convert it with .astype({wanted.name!r})"
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


def _structure(name: str, proto: onnx.TypeProto, given: dict[str, Any]) -> Any:
    """A sequence or optional from arrays by name; None for an optional that is not given."""
    optional = proto.HasField("optional_type")
    inner = proto.optional_type.elem_type if optional else proto
    if inner.HasField("tensor_type"):
        return _checked(Port(name, type_of_proto(inner)), given.pop(name), {}) if name in given else None
    if not inner.HasField("sequence_type") or not inner.sequence_type.elem_type.HasField("tensor_type"):
        raise BadInputs(
            f"input {name!r} is {describe(type_of_proto(proto))}, which cannot be given in a file"
        )
    items: Sequence[Any] = []
    if name in given:
        items = list(given.pop(name))
    else:
        keys: list[str] = []
        while f"{name}.{len(keys)}" in given:
            keys.append(f"{name}.{len(keys)}")
        items = [given.pop(key) for key in keys]
        if not items and not optional:
            raise BadInputs(f"input {name!r} is missing: give its items as {name}.0, {name}.1, ...")
        if not items:
            return None
    port = Port(name, type_of_proto(inner.sequence_type.elem_type))
    return [_checked(port, item, {}) for item in items]


def evaluable_feeds(imported: ImportedModel, feeds: Feeds) -> dict[Value, Array] | None:
    """The feeds by value, for the evaluator; None if some are not tensors."""
    values = input_values(imported)
    if not all(isinstance(a, np.ndarray) for a in feeds.values()):
        return None
    return {values[name]: array for name, array in feeds.items() if name in values}


def perturbed(feeds: Feeds, seed: int) -> dict[str, Any]:
    """The feeds with every float moved to one of its neighbours."""
    rng = np.random.default_rng(seed)
    out: dict[str, Any] = {}
    for name, array in feeds.items():
        if isinstance(array, np.ndarray) and array.dtype.kind == "f" and dtype_of(array.dtype) in FLOATS:
            ends = np.where(rng.integers(0, 2, array.shape) == 1, np.inf, -np.inf).astype(array.dtype)
            moved = np.nextafter(array, ends)
            out[name] = np.where(np.isfinite(array) & np.isfinite(moved), moved, array)
        else:
            out[name] = array
    return out
