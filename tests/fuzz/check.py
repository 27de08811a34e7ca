"""The checks of `tests/fuzz/run.py`: random substitutions on one model, and whether its outputs change.

A model is run as it came and after each of several walks: in ONNX Runtime without and with its own optimisations, and
in float64 where our evaluator can. Integers and booleans must be equal, NaN and infinities must be at the same
elements, and numbers may differ as much as the original itself differs from float64 (`xrlflow.verify.compare`).

If the original does not determine a number (it changes when inputs move by one unit in the last place), that is no
difference, unless nothing is rounded on the way: `WalkFindings.undecided` counts such outputs.
"""

from __future__ import annotations

import ctypes
import random
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any

import ml_dtypes
import numpy as np
import onnx
import onnxruntime as ort
from onnx import helper

from rewrite_rules import LIBRARY
from tests.fuzz.models import Domain, Subject
from xrlflow.backends.onnxruntime.session import ort_errors
from xrlflow.cost import Roofline
from xrlflow.ir import ABSENT, FLOATS, DType, Graph, Node, Value
from xrlflow.onnxio import ImportedModel, ModelError, load, to_proto
from xrlflow.onnxio.exporter import check_result
from xrlflow.ops.evaluate import NotEvaluable, evaluate_graph, evaluate_node
from xrlflow.ops.tensors import numpy_dtype
from xrlflow.rewrite import Library, Match, RewriteState
from xrlflow.rewrite.rule import AnyRule
from xrlflow.search.bodies import with_bodies
from xrlflow.verify.compare import by_deviation, by_reference, is_float, judge_floats
from xrlflow.verify.inputs import input_values, perturbed

Array = np.ndarray[Any, Any]
Feeds = Mapping[str, Array]
MODES = ("normal", "grid", "wide", "infinite", "special")
# A reference that differs from the original by more than this part of it is of something else.
_CREDIBLE = 2.0**-8
_STEPS = 12  # of a random walk
_GREEDY_STEPS = 200
# From this seed on, numbers that some processors flush to zero are 0 or -0; earlier seeds are other kinds of noise.
_FLUSHED = 18
# From this seed on, numbers are rounded to their type.
_ROUNDED = 12
_NOISES = 20
COST = Roofline()
# The exceptions of our evaluator for graphs without a value. Sizes that noise changes may exceed the memory.
_NO_VALUE = (NotEvaluable, ArithmeticError, IndexError, KeyError, MemoryError, TypeError, ValueError)


# --- inputs ---


@dataclass(frozen=True)
class Case:
    """One set of inputs. `mode`: how they were drawn."""

    mode: str
    feeds: Feeds


def draw_cases(subject: Subject, seed: int) -> list[Case]:
    """Cases of every mode, at the sizes in turn."""
    sizes = subject.sizes
    modes = [m for m in MODES if m not in ("infinite", "special") or subject.specials]
    count = max(len(modes), len(sizes)) + (2 if len(sizes) > 1 else 0)
    return [
        Case(mode, draw_feeds(subject, sizes[i % len(sizes)], mode, np.random.default_rng([seed, i])))
        for i, mode in ((i, modes[i % len(modes)]) for i in range(count))
    ]


def draw_feeds(
    subject: Subject, sizes: Mapping[str, int], mode: str, rng: np.random.Generator
) -> dict[str, Array]:
    """Inputs of these sizes."""
    feeds: dict[str, Array] = {}
    for info in subject.proto.graph.input:
        if info.name in subject.fixed:
            feeds[info.name] = subject.fixed[info.name]
            continue
        tensor = info.type.tensor_type
        dtype = np.dtype(helper.tensor_dtype_to_np_dtype(tensor.elem_type))
        shape = tuple(
            sizes[d.dim_param] if d.HasField("dim_param") else d.dim_value for d in tensor.shape.dim
        )
        feeds[info.name] = _drawn(dtype, shape, mode, subject.domains.get(info.name), rng)
    return feeds


def _drawn(
    dtype: np.dtype[Any], shape: tuple[int, ...], mode: str, domain: Domain | None, rng: np.random.Generator
) -> Array:
    if dtype == np.bool_:
        even = {"normal": 0.5, "grid": rng.choice([0.0, 1.0]), "wide": 0.9}.get(mode, 0.1)
        return np.asarray(rng.random(shape) < even)
    if domain is not None:
        drawn = np.asarray(rng.integers(domain.low, domain.high, shape, endpoint=True))
        if drawn.size > 1:
            drawn.flat[0], drawn.flat[-1] = domain.low, domain.high
        return drawn.astype(dtype)
    return _floats(dtype, shape, mode, rng) if dtype.kind == "f" else _integers(dtype, shape, mode, rng)


def _floats(dtype: np.dtype[Any], shape: tuple[int, ...], mode: str, rng: np.random.Generator) -> Array:
    drawn = np.asarray(rng.standard_normal(shape))
    if mode == "grid":  # sums and products are exact, and ties are frequent
        drawn = np.asarray(rng.integers(-16, 17, shape) / 4.0)
    elif mode == "wide":
        drawn = np.sign(drawn) * 10.0 ** np.asarray(rng.uniform(-3, 3, shape))
    elif mode in ("infinite", "special"):
        places = rng.random(shape) < 0.15
        some = [np.inf, -np.inf, -0.0, 0.0] + ([np.nan] * 3 if mode == "special" else [])
        specials = rng.choice(np.asarray(some), shape)
        drawn = np.where(places, specials, drawn)
    return np.asarray(drawn).astype(dtype)


def _integers(dtype: np.dtype[Any], shape: tuple[int, ...], mode: str, rng: np.random.Generator) -> Array:
    info = np.iinfo(dtype)
    if mode == "normal":
        return np.asarray(rng.integers(max(info.min, -8), 9, shape)).astype(dtype)
    drawn = np.asarray(rng.integers(info.min, info.max, shape, dtype=dtype, endpoint=True))
    if mode == "wide":
        return drawn
    marks = [0, 1, 2, 127, 128, 255, 256, 32768, 2**31 - 1, 2**31, 2**32, -1, -2, -129, -(2**31) - 1]
    ends = np.asarray([info.min, info.max, *(m for m in marks if info.min <= m <= info.max)], dtype)
    return np.where(rng.random(shape) < 0.6, rng.choice(ends, shape), drawn)


# --- running ---


class Refused(Exception):
    """ONNX Runtime does not load or run a model. `loading`: it does not even load it."""

    def __init__(self, message: str, loading: bool) -> None:
        super().__init__(" ".join(message.split())[:300])
        self.loading = loading


_FILLED = (0x3B, 0xC5)


@contextmanager
def _fill(byte: int) -> Iterator[None]:
    """Fill new memory with a byte (only with glibc; 0: leave it as it is)."""
    library = ctypes.CDLL(None)
    perturb = -6  # M_PERTURB
    known = hasattr(library, "mallopt")
    if known:
        library.mallopt(perturb, byte)
    try:
        yield
    finally:
        if known:
            library.mallopt(perturb, 0)


Stage = Callable[[str], None]
OPTIMIZED = (
    "the result, as ONNX Runtime optimises it"  # a crash in this stage is one of ONNX Runtime's optimiser
)


class Session:
    """A model in ONNX Runtime, without its optimisations or with all."""

    def __init__(self, proto: onnx.ModelProto, optimized: bool) -> None:
        options = ort.SessionOptions()
        levels = ort.GraphOptimizationLevel
        options.graph_optimization_level = levels.ORT_ENABLE_ALL if optimized else levels.ORT_DISABLE_ALL
        options.log_severity_level = 4
        options.intra_op_num_threads = options.inter_op_num_threads = 1
        options.enable_cpu_mem_arena = options.enable_mem_pattern = (
            False  # so that memory is filled, see _fill
        )
        try:
            self.session = ort.InferenceSession(
                proto.SerializeToString(), options, providers=["CPUExecutionProvider"]
            )
        except ort_errors() as error:
            raise Refused(str(error), True) from error

    def runs_twice(self, feeds: Feeds) -> list[Array]:
        """The outputs. Raises Refused if the model returns uninitialised memory."""
        results = []
        for byte in _FILLED:
            with _fill(byte):
                results.append(self.run(feeds))
        for one, other in zip(*results):
            if one.tobytes() != other.tobytes():
                raise Refused("it gives memory that nobody has written", False)
        return results[0]

    def run(self, feeds: Feeds) -> list[Array]:
        wanted = {i.name for i in self.session.get_inputs()}
        try:
            return list(self.session.run(None, {k: v for k, v in feeds.items() if k in wanted}))
        except ort_errors() as error:
            raise Refused(str(error), False) from error


def in_float64(imported: ImportedModel, graph: Graph, feeds: Feeds) -> list[Array | None]:
    """The outputs that our evaluator can compute, None for the others."""
    values = input_values(imported)
    given = {values[name]: array for name, array in feeds.items() if name in values}
    found: list[Array | None] = []
    with np.errstate(all="ignore"):
        try:
            return list(evaluate_graph(graph, given))
        except _NO_VALUE:
            pass
        for value in graph.outputs:  # a failure for one output does not affect the others
            try:
                found.extend(evaluate_graph(_part(graph, value), given))
            except _NO_VALUE:
                found.append(None)
    return found


def _widened(array: Array) -> Array:
    return array.astype(np.float64) if is_float(array) and array.dtype.kind != "c" else array


_HALVES = (DType.FLOAT16, DType.BFLOAT16)


class _Noise:
    """Noise of two units in the last place.

    With seed 0 all numbers become larger, with seed 1 smaller, then random. From _ROUNDED on they are rounded to their
    type (so some become whole), and weights change as well, like those that are computed when a model is loaded. With
    odd seeds half-precision numbers are then rounded to float32: ONNX Runtime keeps them as that between two kernels
    that it has for float32 only. From _FLUSHED on, subnormal numbers become 0 or -0: sums and maxima do not determine
    the sign.
    """

    def __init__(self, seed: int) -> None:
        self.seed, self.rng = seed, np.random.default_rng(seed)
        self.flushes = seed >= _FLUSHED

    def moved(self, array: Array, dtype: DType, size: Array | None = None) -> Array:
        """`size`: the magnitude of the summands, which determines the rounding of a sum."""
        if self.flushes:
            least = float(ml_dtypes.finfo(numpy_dtype(dtype)).smallest_normal)
            return np.where(np.abs(array) < least, (0.0, -0.0)[self.seed - _FLUSHED], array)
        eps = float(ml_dtypes.finfo(numpy_dtype(dtype)).eps)
        signs = self.rng.choice((-1.0, 1.0), array.shape) if self.seed > 1 else (1.0, -1.0)[self.seed]
        made = np.asarray(array + 2 * eps * signs * (array if size is None else size))
        if self.seed < _ROUNDED:
            return made
        kept = DType.FLOAT if self.seed % 2 and dtype in _HALVES else dtype
        return made.astype(numpy_dtype(kept)).astype(np.float64)

    def as_read(self, array: Array, dtype: DType) -> Array:
        """Half-precision numbers may differ between readers, and may be infinite where they overflow, because ONNX
        Runtime rounds them only for some readers."""
        if self.seed < 2 or self.flushes or dtype not in _HALVES:
            return array
        wide = self.moved(array, dtype)
        beyond = np.abs(wide) > float(ml_dtypes.finfo(numpy_dtype(dtype)).max)
        if self.seed > 2:
            beyond &= self.rng.random(wide.shape) < 0.5
        return np.where(beyond, np.copysign(np.inf, wide), wide)


def noisy(
    imported: ImportedModel, feeds: Feeds, seed: int, weights: bool = False
) -> tuple[list[Array | None], bool] | None:
    """The outputs with noise on each intermediate float, and whether all of these are finite. None if an operator
    cannot be evaluated. `weights`: constants change, too."""
    graph, noise, values = imported.graph, _Noise(seed), input_values(imported)
    held: dict[Value, Array] = {
        values[name]: _widened(array) for name, array in feeds.items() if name in values
    }
    if noise.flushes:
        held = {v: noise.moved(a, graph.type(v).dtype) if a.dtype.kind == "f" else a for v, a in held.items()}

    def read(value: Value) -> Array | None:
        if value == ABSENT:
            return None
        dtype = graph.type(value).dtype
        if value not in held:
            held[value] = _widened(graph.leaves.consts[value].numpy())
            if (weights or noise.flushes) and held[value].dtype.kind == "f":
                held[value] = noise.moved(held[value], dtype)
        return noise.as_read(held[value], dtype)

    finite = all(np.isfinite(a).all() for a in held.values() if a.dtype.kind == "f")
    try:
        with np.errstate(all="ignore"):
            for node in graph.topological():
                inputs = [read(v) for v in node.inputs]
                results = evaluate_node(node.op, node.attrs, inputs, len(node.outputs))
                size = None if noise.flushes else _size_of_sum(node, inputs)
                for value, type, result in zip(node.outputs, node.types, results):
                    if type.dtype in FLOATS and result.dtype.kind == "f":
                        largest = float(ml_dtypes.finfo(numpy_dtype(type.dtype)).max)
                        result = noise.moved(result, type.dtype, size)
                        finite = finite and bool((np.abs(result) <= largest).all())
                    held[value] = result
    except _NO_VALUE:
        return None
    return [read(value) for value in graph.outputs], finite


# Operators that sum: their rounding errors are relative to the summands, not to the sum.
_SUMS = frozenset(
    {
        "Add",
        "AveragePool",
        "Conv",
        "Gemm",
        "GlobalAveragePool",
        "MatMul",
        "ReduceMean",
        "ReduceSum",
        "Sub",
        "Sum",
    }
)


def _size_of_sum(node: Node, inputs: Sequence[Array | None]) -> Array | None:
    """The sum of the magnitudes of what a node adds; None if it is not a sum."""
    if node.op not in _SUMS:
        return None
    sizes = [np.abs(a) if a is not None and a.dtype.kind == "f" else a for a in inputs]
    (size,) = evaluate_node("Add" if node.op == "Sub" else node.op, node.attrs, sizes, 1)
    return size


def _held_exactly(dtype: DType) -> Any:
    """The type whose numbers are exact results: float32 for doubles, since float64 has no further digits to compare."""
    return np.float32 if dtype == DType.DOUBLE else numpy_dtype(dtype)


def is_exact(imported: ImportedModel, graph: Graph, feeds: Feeds, index: int) -> bool:
    """Whether every intermediate float of an output is exact in its type, so that nothing is rounded."""

    def rounded(node: Node, dtype: DType, result: Array) -> Array:
        exact = result.astype(_held_exactly(dtype)).astype(np.float64)
        if not np.array_equal(exact, result, equal_nan=True):
            raise ValueError("a number is rounded")
        return result

    return _evaluated(imported, graph, feeds, index, rounded) is not None


# ONNX Runtime's Sigmoid is a quotient of polynomials. Its absolute error (1.65e-7 over 400,001 numbers from -30 to 30)
# does not shrink with the result.
_COARSE = {"Sigmoid": 2.0**-22}


def _within_kernels(
    imported: ImportedModel, graph: Graph, feeds: Feeds, index: int, exact: Array, new: Array
) -> Array:
    """Where the new model's error is within the known errors of its coarse kernels."""
    within = np.zeros(exact.shape, np.bool_)
    for sign in (1.0, -1.0):

        def moved(node: Node, dtype: DType, result: Array, sign: float = sign) -> Array:
            return result + sign * _COARSE[node.op] if node.op in _COARSE else result

        other = _evaluated(imported, graph, feeds, index, moved)
        if other is not None and other.shape == exact.shape == new.shape:
            with np.errstate(all="ignore"):
                within |= np.abs(new - exact) <= np.abs(other - exact)
    return within


def _evaluated(
    imported: ImportedModel,
    graph: Graph,
    feeds: Feeds,
    index: int,
    change: Callable[[Node, DType, Array], Array],
) -> Array | None:
    """An output in float64. `change` is applied to each float result. None if an operator cannot be evaluated, or if
    `change` raises ValueError."""
    part, values = _part(graph, graph.outputs[index]), input_values(imported)
    held: dict[Value, Array] = {
        values[name]: _widened(array) for name, array in feeds.items() if name in values
    }

    def read(value: Value) -> Array | None:
        if value == ABSENT:
            return None
        return held[value] if value in held else _widened(graph.leaves.consts[value].numpy())

    try:
        with np.errstate(all="ignore"):
            for node in part.topological():
                results = evaluate_node(
                    node.op, node.attrs, [read(v) for v in node.inputs], len(node.outputs)
                )
                for value, type, result in zip(node.outputs, node.types, results):
                    is_real = type.dtype in FLOATS and result.dtype.kind == "f"
                    held[value] = change(node, type.dtype, result.astype(np.float64)) if is_real else result
            return read(part.outputs[0])
    except _NO_VALUE:
        return None


def _part(graph: Graph, value: Value) -> Graph:
    nodes, pending = {}, [value]
    while pending:
        node = graph.producers.get(pending.pop())
        if node is not None and node.id not in nodes:
            nodes[node.id] = node
            pending.extend(node.inputs)
    return Graph.make(nodes.values(), graph.inputs, (value,), graph.leaves)


# --- what the original computes ---


@dataclass
class Known:
    """One case with the original's outputs: plain, optimised by ONNX Runtime, in float64, and on moved inputs."""

    case: Case
    plain: list[Array]
    optimized: list[Array] | None
    exact: list[Array | None]
    moved: tuple[list[Array], ...]
    imported: ImportedModel
    _noise: list[tuple[int, list[Array | None]]] | None = None
    _finite: bool | None = None

    def noise(self) -> list[tuple[int, list[Array | None]]]:
        """By seed, the outputs with noise on every computed float: the possible effects of rounding."""
        if self._noise is None:
            made = (
                (seed, noisy(self.imported, self.case.feeds, seed, weights=_ROUNDED <= seed < _FLUSHED))
                for seed in range(_NOISES)
            )
            self._noise = [(seed, n[0]) for seed, n in made if n is not None]
        return self._noise

    @property
    def finite(self) -> bool:
        """Whether all intermediate floats are known to be finite."""
        if self._finite is None:
            found = noisy(self.imported, self.case.feeds, 0)
            self._finite = self.case.mode in ("normal", "grid") if found is None else found[1]
        return self._finite


@dataclass(frozen=True)
class Original:
    """A model and its outputs."""

    subject: Subject
    imported: ImportedModel
    known: tuple[Known, ...]
    runtime: tuple[str, ...]  # differences between ONNX Runtime's own optimisation levels


class NotComparable(Exception):
    """The original does not load or run."""


def examine(subject: Subject, cases: Sequence[Case], stage: Stage) -> Original:
    """Run the original. Raises NotComparable, and ModelError if the loader refuses it."""
    stage("the original in ONNX Runtime")
    suspicions: list[str] = []
    try:
        plain = Session(subject.proto, False)
    except Refused as error:
        raise NotComparable(f"ONNX Runtime does not load it: {error}") from error
    optimized: Session | None = None
    try:
        optimized = Session(subject.proto, True)
    except Refused as error:
        suspicions.append(f"loads without optimisations only: {error}")
    results: list[tuple[Case, list[Array], list[Array] | None, tuple[list[Array], ...]]] = []
    failure = ""
    for case in cases:
        try:
            expected = plain.runs_twice(case.feeds)
            with np.errstate(all="ignore"):
                moved = tuple(plain.run(perturbed(case.feeds, i)) for i in range(4))
        except Refused as error:
            failure = str(error)
            continue
        other = None
        if optimized is not None:
            try:
                other = optimized.run(case.feeds)
            except Refused as error:
                suspicions.append(f"runs without optimisations only: {error}")
        results.append((case, expected, other, moved))
    if not results:
        raise NotComparable(f"ONNX Runtime does not run it: {failure}")
    stage("import")
    imported = load(subject.proto)
    stage("the original in float64")
    known = tuple(
        Known(case, expected, other, in_float64(imported, imported.graph, case.feeds), moved, imported)
        for case, expected, other, moved in results
    )
    for k in known:
        for i, name in enumerate(o.name for o in subject.proto.graph.output):
            if k.optimized is not None:
                verdict = judged(k, i, k.plain[i], k.optimized[i])
                if verdict.reason:
                    suspicions.append(f"output {name}: {verdict.reason} with optimisations ({k.case.mode})")
    return Original(subject, imported, known, tuple(dict.fromkeys(suspicions)))


# --- judging ---


@dataclass(frozen=True)
class Verdict:
    """`reason`: what is wrong, or "". `unstable`: it is only right because the original is undecided. `runtime`: the
    original is wrong, judged by the definitions of its operators.
    """

    reason: str = ""
    unstable: bool = False
    runtime: bool = False


def judged(
    known: Known,
    index: int,
    expected: Array,
    new: Array,
    agree: bool | None = None,
    exact: Callable[[int], bool] = lambda index: False,
) -> Verdict:
    """Whether an output equals the original's (`expected`, at the same level of optimisation).

    `agree`: whether both graphs give the same in float64 (None: unknown). `exact`: no intermediate number of either
    graph is rounded, so that rounding is no excuse.
    """
    expected, new = np.asarray(expected), np.asarray(new)
    if expected.shape != new.shape or expected.dtype != new.dtype:
        return Verdict(f"{new.dtype}{list(new.shape)} instead of {expected.dtype}{list(expected.shape)}")
    reason = _differs(known, index, expected, new)
    if not reason:
        return Verdict()
    reference = known.exact[index]
    if reference is not None and reference.shape != expected.shape:
        reference = None
    loose = np.zeros(expected.shape, np.bool_)
    if reference is not None and is_float(expected):
        # Some kernels ignore NaN, depending on its position.
        loose |= np.isnan(reference) != np.isnan(expected.astype(np.float64))
    decided = loose.all() or exact(index)
    if not decided:
        for moved in known.moved:
            loose |= _apart(known.plain[index], np.asarray(moved[index]), expected, new)
    if reference is not None:
        for seed, noise in known.noise():
            other = noise[index]
            if other is not None and (
                seed >= _FLUSHED or not decided
            ):  # the sign of zero is not a matter of rounding
                loose |= _apart(reference, other, expected, new)
    settled = np.where(loose, expected, new).astype(expected.dtype)
    left = _differs(known, index, expected, settled)
    runtime = bool(left) and agree is True and _contradicts(reference, expected, settled)
    return Verdict(left, unstable=not left, runtime=runtime)


def _contradicts(reference: Array | None, expected: Array, new: Array) -> bool:
    """Whether the original's kernels are wrong: where the two differ, the new model has the defined result."""
    if reference is None:
        return False
    if not is_float(expected):
        wrong = np.asarray(expected != new)
        return bool(np.array_equal(np.asarray(new)[wrong], reference[wrong]))
    with np.errstate(all="ignore"):
        off = np.abs(expected.astype(np.float64) - reference)
        scale = np.max(np.abs(reference), initial=0.0, where=np.isfinite(reference))
        near = np.abs(new.astype(np.float64) - reference) <= 2.0**-16 * scale
    return bool(np.all(near) and np.max(off, initial=0.0) > _CREDIBLE * scale)


def _differs(known: Known, index: int, expected: Array, new: Array) -> str:
    if not is_float(expected):
        wrong = np.asarray(expected != new)
        if not wrong.any():
            return ""
        place = tuple(int(i) for i in np.argwhere(wrong)[0]) if wrong.ndim else ()
        return f"{np.count_nonzero(wrong)} of {wrong.size} elements differ: {new[place]} instead of {expected[place]}"
    reference = known.exact[index]
    others = [a for a in (known.plain[index], (known.optimized or {index: None})[index]) if a is not None]
    targets = [
        by_reference(expected, reference) if reference is not None else None,
        by_deviation(expected, next((a for a in others if a is not expected), None)),
    ]
    judged = [judge_floats(y, new) for y in targets if y is not None]
    found = next((j for j in judged if j.passed), judged[0])
    return found.reason + (f", {found.worst}" if found.reason and found.worst is not None else "")


def _apart(plain: Array, moved: Array, expected: Array, new: Array) -> Array:
    """The elements at which the original itself moves as much as the new model differs."""
    if plain.shape != moved.shape:
        return np.ones(expected.shape, np.bool_)
    if not is_float(plain):
        return np.asarray(plain != moved)
    with np.errstate(all="ignore"):
        a, b, e, n = (x.astype(np.float64) for x in (plain, moved, expected, new))
        kinds = (np.isfinite(a) != np.isfinite(b)) | (np.isinf(a) & np.isinf(b) & (a != b))
        return np.asarray(kinds | (np.abs(n - e) <= 64 * np.abs(a - b)))


@dataclass(frozen=True)
class Fault:
    """A model that computes something else. `runtime`: only after ONNX Runtime's optimisations."""

    what: str
    runtime: bool = False


def compare(
    original: Original, graph: Graph, stage: Stage, undecided: Counter[str], strict: bool = True
) -> Fault | None:
    """The first difference between the original and a graph derived from it.

    Unless `strict`, elements count only if all numbers that they depend on are finite.
    """
    stage("export")
    try:
        check_result(original.imported, graph)
        proto = to_proto(original.imported, graph)
    except ModelError as error:
        return Fault(f"export: {error}")
    stage("the result in ONNX Runtime")
    try:
        plain = Session(proto, False)
    except Refused as error:
        return Fault(f"the result does not load: {error}")
    stage(OPTIMIZED)
    try:
        optimized: Session | None = Session(proto, True)
    except Refused as error:
        optimized = None
        if all(k.optimized is not None for k in original.known):
            return Fault(f"the result loads without optimisations only: {error}", True)
    for known in original.known:
        if strict or known.finite:
            fault = _on_case(original, known, graph, (plain, optimized), stage, undecided)
            if fault is not None:
                return fault
    return None


def _on_case(
    original: Original,
    known: Known,
    graph: Graph,
    sessions: tuple[Session, Session | None],
    stage: Stage,
    undecided: Counter[str],
) -> Fault | None:
    """The first difference on one set of inputs. `sessions`: without and with ONNX Runtime's optimisations."""
    names = [o.name for o in original.subject.proto.graph.output]
    stage("the result in float64")
    exact = in_float64(original.imported, graph, known.case.feeds)
    agree = [_agree(a, b) for a, b in zip(known.exact, exact)]

    def plainly(index: int) -> bool:
        both = (original.imported.graph, graph)
        return all(is_exact(original.imported, g, known.case.feeds, index) for g in both)

    for runtime, session, expected in zip((False, True), sessions, (known.plain, known.optimized)):
        if session is None or expected is None:
            continue
        stage(OPTIMIZED if runtime else "the result in ONNX Runtime")
        level = " with ONNX Runtime's optimisations" if runtime else ""
        try:
            found = session.run(known.case.feeds)
        except Refused as error:
            return Fault(f"the result does not run{level} ({known.case.mode}): {error}", runtime)
        for i, name in enumerate(names):
            verdict = judged(known, i, expected[i], found[i], agree[i], plainly)
            undecided["outputs compared"] += 1
            undecided["undecided by the original"] += verdict.unstable
            if verdict.reason:
                what = f"output {name}{level} ({known.case.mode}): {verdict.reason}"
                if verdict.runtime:
                    what += ", which is right: the original's kernels are wrong"
                elif agree[i] and _is_of_kernels(original.imported, known, graph, i, expected[i], found[i]):
                    what += ", which ONNX Runtime's kernel for such numbers makes of it"
                    return Fault(what, True)
                return Fault(what, runtime or verdict.runtime)
    for i, name in enumerate(names):
        if agree[i] is False and not _explained(known, i, exact[i], plainly):
            return Fault(f"output {name} in float64 ({known.case.mode}): {_shown(known.exact[i], exact[i])}")
    return None


# Kernels of ONNX Runtime that may ignore NaN, depending on its position.
_BLIND = frozenset({"Clip", "Max", "MaxPool", "Min", "ReduceMax", "ReduceMin", "Relu"})
# Kernels of ONNX Runtime that are wrong for int64 beyond 32 bits: vectors compare the lower half, and sums are computed
# in double. So are powers, unless base and exponent have shapes for a faster kernel ([9] and [], but not [9, 1] and
# []).
_FAULTY = frozenset({"Clip", "Min", "Max", "Pow", "ReduceMax", "ReduceMin", "ReduceSum", "Sign"})


def _is_of_kernels(
    imported: ImportedModel, known: Known, graph: Graph, index: int, expected: Array, new: Array
) -> bool:
    """Whether known errors of ONNX Runtime's kernels explain why a new model differs, but not in float64."""
    exact = known.exact[index]
    if exact is None or exact.shape != expected.shape or new.shape != expected.shape:
        return False
    if not is_float(expected):
        return _is_known_fault(exact, (imported.graph, graph), (expected, new), index)
    within = _within_kernels(imported, graph, known.case.feeds, index, exact, new.astype(np.float64))
    if any(node.op in _BLIND for node in _part(graph, graph.outputs[index]).nodes()):
        within |= np.isnan(exact)
    return not _differs(known, index, expected, np.where(within, expected, new).astype(expected.dtype))


def _is_known_fault(exact: Array, graphs: Sequence[Graph], made: Sequence[Array], index: int) -> bool:
    """Whether known faulty kernels explain why equal graphs give different integers: each graph that is wrong,
    according to our evaluator, has such a kernel."""
    for graph, found in zip(graphs, made):
        kernels = any(
            n.op in _FAULTY and n.types[0].dtype in (DType.INT64, DType.INT32)
            for n in _part(graph, graph.outputs[index]).nodes()
        )
        if not kernels and not np.array_equal(exact, found):
            return False
    return True


def _agree(a: Array | None, b: Array | None) -> bool | None:
    """Whether two float64 evaluations are equal, up to the rounding of computed weights to float32; None if unknown."""
    if a is None or b is None:
        return None
    if a.shape != b.shape:
        return False
    if a.dtype.kind not in "fc":
        return bool(np.array_equal(a, b))
    finite = np.isfinite(a) & np.isfinite(b)
    scale = float(np.max(np.abs(a), initial=0.0, where=finite))
    same = np.where(finite, np.abs(np.where(finite, a, 0) - np.where(finite, b, 0)) <= 1e-6 * scale, True)
    kinds = np.where(finite, True, (a == b) | (np.isnan(a) & np.isnan(b)))
    return bool(np.all(same & kinds))


def _explained(known: Known, index: int, exact: Array | None, plainly: Callable[[int], bool]) -> bool:
    """Whether a difference only in float64 is too small for float32, or is not determined by the original."""
    expected, reference = np.asarray(known.plain[index]), known.exact[index]
    if exact is None or reference is None or exact.shape != expected.shape:
        return False
    if not is_float(expected):
        return not judged(known, index, expected, exact.astype(expected.dtype), None, plainly).reason
    with np.errstate(all="ignore"):
        rounded = exact.astype(expected.dtype)
        if _agree(reference.astype(expected.dtype).astype(np.float64), rounded.astype(np.float64)):
            return True
        if not judged(known, index, expected, rounded, None, plainly).reason:
            return True
        # A sum in which large numbers cancel shows the rounding of computed weights.
        made = (noisy(known.imported, known.case.feeds, seed, weights=True) for seed in range(_FLUSHED))
        others = [m[0][index] for m in made if m is not None]
        loose = [_apart(reference, o, reference, exact) for o in others if o is not None]
        settled = np.where(np.any(loose, axis=0), reference, exact) if loose else exact
        return _agree(reference, settled) is True


def _shown(a: Array | None, b: Array | None) -> str:
    if a is None or b is None or a.shape != b.shape:
        return "another shape"
    wrong = np.argwhere(~((a == b) | ((a != a) & (b != b))))
    if not len(wrong):
        return "another element type"
    with np.errstate(all="ignore"):
        places = [tuple(int(i) for i in w) for w in wrong]
        far = max(
            places, key=lambda p: float(np.nan_to_num(abs(a[p] - b[p]))) if a.dtype.kind == "f" else 0.0
        )
    return f"{b[far]} instead of {a[far]} at {list(far)}"


# --- walks ---


@dataclass(frozen=True)
class Walk:
    """How a graph is derived. `steps` limits the substitutions; those in bodies come first."""

    kind: str  # "greedy" or "random"
    library: str
    seed: int = 0
    steps: int = _STEPS

    def __str__(self) -> str:
        return f"{self.kind} ({self.library})"


def walks(index: int) -> tuple[Walk, ...]:
    """The walks of a model: the default one, and random ones with rules of all kinds."""
    third = ("contrib", "tvm", "finite")[index % 3]
    return (
        Walk("greedy", "default", steps=_GREEDY_STEPS),
        Walk("random", "strict", 3 * index),
        Walk("random", "all", 3 * index + 1),
        Walk("random", third, 3 * index + 2),
    )


def is_strict(rule: AnyRule) -> bool:
    """Whether a rule promises to keep NaN and infinities."""
    return not (rule.may_add_nonfinite or rule.may_remove_nonfinite or rule.assumes == "finite")


# In ONNX Runtime's kernels the position decides whether NaN wins.
_BLIND = frozenset(
    {"ReduceMax", "ReduceMin", "MaxPool", "GlobalMaxPool", "ArgMax", "ArgMin", "TopK", "GRU", "LSTM", "RNN"}
)


def sees_nan(proto: onnx.ModelProto) -> bool:
    """Whether the result for NaN is defined: there is no comparison of numbers, and no integer made from floats."""
    casts = any(
        n.op_type == "Cast" and helper.get_node_attr_value(n, "to") not in (1, 10, 11)
        for n in proto.graph.node
    )
    return not casts and _BLIND.isdisjoint(n.op_type for n in proto.graph.node)


class Libraries:
    """The libraries for walks. Each is made once.

    default: that of a search. strict: its rules that promise to keep NaN and infinities. all: also those that have to
    be allowed. contrib: with ONNX Runtime's own operators. tvm: rules that write out operators for TVM. finite: with
    rules that are only right for finite numbers.
    """

    def __init__(self, rules: Sequence[AnyRule] = LIBRARY) -> None:
        self.rules = tuple(rules)
        self._made: dict[str, tuple[Library, Library]] = {}

    def get(self, name: str) -> tuple[Library, Library]:
        """A library, and its rules that need no price."""
        if name not in self._made:
            made = self._make(name)
            self._made[name] = made, made.canonicalising()
        return self._made[name]

    def _make(self, name: str) -> Library:
        if name.startswith("rule:"):
            rules = [r for r in self.rules if r.name == name[5:]]
            assuming = (rules[0].assumes,) if rules[0].assumes else ()
            return Library(rules, backend=rules[0].backend or "onnxruntime", contrib=True, assuming=assuming)
        if name == "strict":
            return Library([r for r in self.rules if is_strict(r)])
        if name == "tvm":
            return Library(self.rules, backend="tvm")
        if name == "finite":
            return Library(self.rules, assuming=("finite",))
        return Library(self.rules, contrib=name == "contrib")


@dataclass
class _Walker:
    """Makes a walk on a graph and its bodies."""

    walk: Walk
    library: Library
    certain: Library
    trace: list[str] = field(default_factory=list)
    strict: bool = True

    def __post_init__(self) -> None:
        self.random = random.Random(self.walk.seed)

    def apply(self, state: RewriteState, match: Match) -> RewriteState:
        self.trace.append(match.rule.name)
        self.strict = self.strict and is_strict(match.rule)
        return state.apply(match)

    def left(self) -> int:
        return self.walk.steps - len(self.trace)

    def prepare(self, graph: Graph, name: str = "") -> Graph:
        """Apply the rules that need no price, as before any search."""
        if self.walk.kind != "greedy":
            return graph
        state = RewriteState.start(graph, self.certain)
        for _ in range(100):
            candidates = state.candidates
            if not candidates or self.left() <= 0:
                break
            state = self.apply(state, min(candidates, key=lambda m: m.key))
        return state.graph

    def improve(self, graph: Graph, label: str = "") -> Graph:
        if self.walk.kind == "greedy":
            state = RewriteState.start(graph, self.library, COST.delta)
            least = 1e-9 * COST.cost(graph)
            while self.left() > 0 and (best := state.gains_most(least)) is not None:
                state = self.apply(state, best)
            return state.graph
        state = RewriteState.start(graph, self.library)
        for _ in range(_STEPS if not label else 3):
            candidates = state.candidates
            if not candidates or self.left() <= 0:
                break
            # Draw a rule first, then a match: some rules have many.
            rule = self.random.choice(sorted({m.rule.name for m in candidates}))
            state = self.apply(state, self.random.choice([m for m in candidates if m.rule.name == rule]))
        return state.graph

    def run(self, graph: Graph) -> Graph:
        return self.improve(with_bodies(self.prepare(graph), self.improve, self.prepare))


def derive(original: Original, walk: Walk, libraries: Libraries) -> tuple[Graph, list[str], bool]:
    """The result of a walk, its substitutions, and whether all of them promise to keep NaN and infinities."""
    library, certain = libraries.get(walk.library)
    walker = _Walker(walk, library, certain)
    graph = walker.run(original.imported.graph)
    return graph, walker.trace, walker.strict


# --- one model ---


@dataclass(frozen=True)
class Difference:
    """A finding: the walk (None: only reading and writing), its substitutions, and the difference."""

    what: str
    walk: Walk | None
    trace: tuple[str, ...]
    runtime: bool


@dataclass
class WalkFindings:
    """The results for one model."""

    nodes: int = 0
    substitutions: Counter[str] = field(default_factory=Counter)
    counts: Counter[str] = field(default_factory=Counter)
    differences: list[Difference] = field(default_factory=list)
    runtime: tuple[str, ...] = ()
    not_comparable: str = ""


def fuzz_one(subject: Subject, index: int, libraries: Libraries, stage: Stage) -> WalkFindings:
    """Make all walks on one model."""
    outcome = WalkFindings(nodes=len(subject.proto.graph.node))
    try:
        original = examine(subject, draw_cases(subject, index), stage)
    except NotComparable as error:
        outcome.not_comparable = str(error)
        return outcome
    except ModelError as error:
        outcome.differences.append(Difference(f"the loader refuses it: {error}", None, (), False))
        return outcome
    outcome.runtime = original.runtime
    outcome.counts["models with a float64 reference"] += any(
        e is not None for k in original.known for e in k.exact
    )
    fault = compare(original, original.imported.graph, stage, outcome.counts)
    if fault is not None:
        outcome.differences.append(Difference(f"round trip: {fault.what}", None, (), fault.runtime))
        if not fault.runtime:
            return outcome
    for walk in walks(index):
        stage(f"{walk}")
        graph, trace, strict = derive(original, walk, libraries)
        outcome.substitutions.update(trace)
        if not trace:
            continue
        fault = compare(original, graph, stage, outcome.counts, strict)
        if fault is not None:
            outcome.differences.append(Difference(fault.what, walk, tuple(trace), fault.runtime))
    return outcome


# --- making it small ---


def culprit(original: Original, difference: Difference, libraries: Libraries) -> int | None:
    """The index of the first substitution after which the model differs; None if there is none."""
    if difference.walk is None:
        return None

    def wrong(steps: int) -> bool:
        assert difference.walk is not None
        graph, _, strict = derive(original, replace(difference.walk, steps=steps), libraries)
        fault = compare(original, graph, _silent, Counter(), strict)
        return fault is not None and fault.runtime == difference.runtime

    low, high = 0, len(difference.trace)
    if wrong(0) or not wrong(high):
        return None
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (low, middle) if wrong(middle) else (middle, high)
    return low


def _silent(stage: str) -> None:
    pass


Wrong = Callable[[onnx.ModelProto, Sequence[Case]], "Fault | None"]


def one_rule(rule: str, runtime: bool, libraries: Libraries) -> Wrong:
    """A test whether one application of a rule makes a model differ (no name: only reading and writing)."""

    def wrong(proto: onnx.ModelProto, cases: Sequence[Case]) -> Fault | None:
        try:
            original = examine(Subject(proto), cases, _silent)
        except (NotComparable, ModelError):
            return None
        for graph, strict in _applications(original, rule, libraries):
            fault = compare(original, graph, _silent, Counter(), strict)
            if fault is not None and fault.runtime == runtime:
                return fault
        return None

    return wrong


def _applications(original: Original, rule: str, libraries: Libraries) -> Iterator[tuple[Graph, bool]]:
    graph = original.imported.graph
    if not rule:
        yield graph, True
        return
    library = libraries.get(f"rule:{rule}")[0]
    state = RewriteState.start(graph, library)
    for match in state.candidates[:40]:
        yield state.apply(match).graph, is_strict(match.rule)
    for seed in range(4):
        changed, trace, strict = derive(original, Walk("random", f"rule:{rule}", seed, 1), libraries)
        if trace:
            yield changed, strict


def shrink(
    proto: onnx.ModelProto, cases: Sequence[Case], wrong: Wrong, attempts: int = 150
) -> tuple[onnx.ModelProto, list[Case]]:
    """The smallest part found that still differs: outputs are dropped, and computed values become inputs."""
    cases = list(cases)
    for case in cases:  # one set of inputs is enough, if it works
        if wrong(proto, [case]):
            cases = [case]
            break
    changed = True
    while changed and attempts > 0:
        changed = False
        for smaller in _smaller(proto, cases):
            attempts -= 1
            if attempts <= 0:
                break
            if wrong(*smaller):
                (proto, cases), changed = smaller, True
                break
    return proto, cases


def _smaller(proto: onnx.ModelProto, cases: Sequence[Case]) -> Iterator[tuple[onnx.ModelProto, list[Case]]]:
    types = _types(proto)
    outputs = list(proto.graph.output)
    if len(outputs) > 1:
        for kept in outputs:
            yield _cut(proto, [kept], [], cases)
    for node in proto.graph.node:
        for name in node.output:
            if name in types and [name] != [o.name for o in outputs]:
                yield _cut(proto, [types[name]], [], cases)
    arrays = _intermediates(proto, types, cases)
    for node in reversed(proto.graph.node):
        for name in node.output:
            if arrays and name in arrays[0]:
                moved = [Case(c.mode, {**c.feeds, name: a[name]}) for c, a in zip(cases, arrays)]
                yield _cut(proto, outputs, [_input(types[name], [a[name] for a in arrays])], moved)


def _types(proto: onnx.ModelProto) -> dict[str, onnx.ValueInfoProto]:
    inferred = onnx.shape_inference.infer_shapes(proto, data_prop=True)
    found = {v.name: v for v in [*inferred.graph.value_info, *inferred.graph.output]}
    return {k: v for k, v in found.items() if v.type.HasField("tensor_type")}


def _input(info: onnx.ValueInfoProto, arrays: Sequence[Array]) -> onnx.ValueInfoProto:
    """The declaration of a value as an input. Unknown sizes become those seen, or symbols."""
    tensor, dims = info.type.tensor_type, []
    for axis, sizes in enumerate(zip(*(a.shape for a in arrays))):
        known = tensor.shape.dim[axis] if axis < len(tensor.shape.dim) else None
        if known is not None and known.dim_param:
            dims.append(known.dim_param)
        else:
            dims.append(sizes[0] if len(set(sizes)) == 1 else f"{info.name}_{axis}")
    return helper.make_tensor_value_info(info.name, tensor.elem_type, dims)


def _intermediates(
    proto: onnx.ModelProto, types: Mapping[str, onnx.ValueInfoProto], cases: Sequence[Case]
) -> list[dict[str, Array]]:
    """Every value of the model in each case."""
    whole = onnx.ModelProto()
    whole.CopyFrom(proto)
    del whole.graph.output[:]
    names = [name for node in proto.graph.node for name in node.output if name in types]
    whole.graph.output.extend(
        helper.make_tensor_value_info(n, types[n].type.tensor_type.elem_type, None) for n in names
    )
    try:
        session = Session(whole, False)
        return [dict(zip(names, session.run(c.feeds))) for c in cases]
    except Refused:
        return []


def _cut(
    proto: onnx.ModelProto,
    outputs: Sequence[onnx.ValueInfoProto],
    inputs: Sequence[onnx.ValueInfoProto],
    cases: Sequence[Case],
) -> tuple[onnx.ModelProto, list[Case]]:
    """The part of a model that computes some values from others."""
    given = {i.name for i in inputs}
    needed, pending = set(), [o.name for o in outputs if o.name not in given]
    by_output = {name: node for node in proto.graph.node for name in node.output if name}
    nodes: dict[int, onnx.NodeProto] = {}
    while pending:
        name = pending.pop()
        if name in needed or name in given:
            continue
        needed.add(name)
        node = by_output.get(name)
        if node is not None:
            nodes[id(node)] = node
            pending.extend(_reads(node))
    part = onnx.ModelProto()
    part.CopyFrom(proto)
    kept = [n for n in proto.graph.node if id(by_output.get(next(filter(None, n.output), ""))) in nodes]
    for listed, items in (
        (part.graph.node, kept),
        (part.graph.initializer, [t for t in proto.graph.initializer if t.name in needed]),
        (part.graph.input, [*(v for v in proto.graph.input if v.name in needed), *inputs]),
        (part.graph.output, [o for o in outputs if o.name not in given]),
    ):
        del listed[:]
        listed.extend(items)
    del part.graph.value_info[:]
    wanted = {i.name for i in part.graph.input}
    return part, [Case(c.mode, {k: v for k, v in c.feeds.items() if k in wanted}) for c in cases]


def _reads(node: onnx.NodeProto) -> set[str]:
    """Names that a node and its bodies read, and some that its bodies define."""
    found = {name for name in node.input if name}
    for attribute in node.attribute:
        for graph in [attribute.g, *attribute.graphs] if attribute.type in (5, 10) else []:
            found |= {o.name for o in graph.output}
            for inner in graph.node:
                found |= _reads(inner)
    return found
