"""Cases of a rule: a small graph, where the rule applies, and what comes of it; and the tests that a case must pass."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import numpy as np
import numpy.typing as npt

from xrlflow.backends.onnxruntime.session import Optimization, open_model
from xrlflow.backends.protocol import BackendError
from xrlflow.ir import ABSENT, FLOATS, INTEGERS, Attrs, DType, Edit, Graph, TensorType, Value, apply_edit
from xrlflow.ops.evaluate import REALS, SPECS, Field, NotEvaluable, evaluate_graph, evaluate_node, promote
from xrlflow.ops.schema import schema
from xrlflow.ops.subgraph import NotStandalone, input_name, model_of
from xrlflow.ops.tensors import numpy_dtype
from xrlflow.prover.degrees import Degrees, chance
from xrlflow.prover.machine import MACHINE, integers, round_to, with_known_casts
from xrlflow.prover.prime import PRIMES, PrimeField, ZeroDenominator
from xrlflow.prover.sketch import Problem
from xrlflow.rewrite import AnyRule, GraphBuilder, Library, Match, Refused, Val
from xrlflow.rewrite.state import build_edit, fingerprint_shift, match_all

Array = npt.NDArray[Any]
Feeds = dict[Value, Array]
# Draws the floats of a shape and of an element type, as elements.
DrawFloats = Callable[[tuple[int, ...], DType], Array]

# A false rule passes with less than this probability.
WANTED = 1e-12
_MOST_TRIALS = 40
# What float64 loses by computing in another order, relative to the largest number of an output.
_REORDERED = 1e-9
# For rules whose sides hold constants that were rounded to float32.
_ROUNDED = 2.0**-20
# Smaller outputs are judged like ones of this size: they come of numbers around 1.
_LEAST_SCALE = 1e-9
# ONNX Runtime's float32: what a side may be off, relative to the largest number, beyond what the other side is.
_UNIT = 2.0**-24


# What float64 computes of float32 numbers without rounding, if they are not too far apart.
_EXACT_OPERATORS = frozenset({"Add", "Sub", "Mul", "Neg", "MatMul", "ReduceSum", "Sum"})


class ProofBuilder(GraphBuilder):
    """Traces a target, and leaves to the proof what folding would round."""

    def constant(self, data: Any, dtype: DType | None = None) -> Val:
        """Numbers that a target writes in half keep their digits: that they are rounded is no more than all rounding
        of half is, unless nothing, or an infinity, is left of them."""
        made = super().constant(data, dtype)
        if dtype not in (DType.FLOAT16, DType.BFLOAT16) or not isinstance(data, (int, float)):
            return made
        exact = np.asarray(data, np.float32).astype(np.float64)
        rounded = made.array.astype(np.float64)
        if not np.isfinite(rounded) or (exact != 0) != (rounded != 0):
            return made
        value = self.graph.leaves.intern(exact, dtype)
        return Val(self.graph, value, self.graph.leaves.types[value])

    def _propagate(self, edit: Edit) -> Edit:
        return edit  # what follows would be computed in real numbers

    def _fold(
        self, op: str, attrs: Attrs, inputs: tuple[Value, ...], types: tuple[TensorType, ...]
    ) -> tuple[Value, ...] | None:
        spec = SPECS.get(op)
        floats = any(t.dtype in FLOATS for t in types)
        moves = spec is not None and spec.proof in ("movement", "integer")
        if not floats or moves:
            return super()._fold(op, attrs, inputs, types)
        # Of doubles nobody knows what was rounded: there is nothing finer to compare with.
        known = op in _EXACT_OPERATORS and all(t.dtype != DType.DOUBLE for t in types)
        folded = super()._fold(op, attrs, inputs, types) if known else None
        if folded is None:
            return None
        consts = self.graph.leaves.consts
        arrays = [None if v == ABSENT else promote(REALS, consts[v].numpy()) for v in inputs]
        exact = evaluate_node(op, attrs, arrays, len(types))
        same = all(np.array_equal(e, consts[v].numpy().astype(np.float64)) for e, v in zip(exact, folded))
        return folded if same else None


class Wrong(Exception):
    """The two sides of a case differ; the message says where."""


@dataclass(frozen=True, slots=True, eq=False)
class Case:
    """A rule applied once: `before` and `after` compute the same if the rule is right."""

    problem: Problem
    match: Match
    edit: Edit
    after: Graph

    @property
    def before(self) -> Graph:
        return self.problem.graph

    @property
    def replaced(self) -> frozenset[Value]:
        """The values that the right side replaces."""
        match = self.match
        if match.pattern is None:
            return frozenset(match.found.outputs)
        return frozenset(match.nodes[o.node.index].outputs[o.index] for o in match.pattern.outputs)


def find_cases(library: Library, problem: Problem) -> tuple[list[Case], list[Refused]]:
    """Every way in which a rule (the library has only this one) applies, and every near miss.

    Raises RuleError, or whatever else a wrong rule raises.
    """
    library.refusals = refusals = []
    cases = []
    for match in match_all(problem.graph, library):
        try:
            case = applied(problem, match)
        except Refused as refused:
            refusals.append(refused)
            continue
        if case is not None:
            cases.append(case)
    library.refusals = None
    return cases, refusals


def applied(problem: Problem, match: Match, builder: GraphBuilder | None = None) -> Case | None:
    """The case of one match; None if nothing changes. Raises what `build_edit` raises."""
    edit = build_edit(problem.graph, match, builder or ProofBuilder(problem.graph))
    if not fingerprint_shift(problem.graph, edit):
        return None
    return Case(problem, match, edit, apply_edit(problem.graph, edit)[0])


# Inputs


def symbols(problem: Problem) -> list[str]:
    names = {d for v in problem.graph.inputs for d in problem.type(v).shape or () if isinstance(d, str)}
    return sorted(names)


def bindings(problem: Problem, rng: np.random.Generator) -> dict[str, int]:
    """Numbers for the symbolic dimensions: 0 to 4."""
    return {name: int(rng.choice(5, p=[0.1, 0.25, 0.3, 0.2, 0.15])) for name in symbols(problem)}


def tried_bindings(
    problem: Problem, rng: np.random.Generator, nonempty: bool = False
) -> Iterator[dict[str, int]]:
    """Numbers to try one after the other, until the left side has a value: as drawn, all alike, and as drawn again.

    `nonempty`: from 1 up.
    """
    least = 1 if nonempty else 0

    def drawn() -> dict[str, int]:
        return {name: max(number, least) for name, number in bindings(problem, rng).items()}

    yield drawn()
    names = symbols(problem)
    if names:
        yield from (dict.fromkeys(names, number) for number in (2, 1, 0)[: 3 - least])
    yield from (drawn() for _ in range(3))


def _shape(type: TensorType, numbers: Mapping[str, int]) -> tuple[int, ...]:
    return tuple(d if isinstance(d, int) else numbers.get(d or "", 2) for d in type.shape or ())


# Larger tensors are not computed: their types alone are compared.
_MOST_ELEMENTS = 1 << 19
# Normal numbers of this size are in the range of a type.
_TYPICALLY_MOST = {DType.FLOAT16: 1e4, DType.BFLOAT16: 1e37, DType.FLOAT: 1e37}
_LARGE = 1 << 11


@lru_cache(maxsize=1024)
def says_where(op: str, place: int) -> bool:
    """Whether integers at this input of an operator say where or how much: they are sizes, indices, counts."""
    defined = schema(op)
    if defined is None or op in ("If", "Loop", "Scan", "Range") or (op, place) == ("OneHot", 1):
        return True
    formal = defined.inputs[min(place, len(defined.inputs) - 1)]
    allowed = {
        t
        for c in defined.type_constraints
        if c.type_param_str == formal.type_str
        for t in c.allowed_type_strs
    }
    return (allowed or {formal.type_str}) <= {"tensor(int32)", "tensor(int64)"}


@lru_cache(maxsize=256)
def placing(problem: Problem) -> frozenset[Value]:
    """The values on which depends where something is, or how large: these are no data."""
    graph = problem.graph
    found = set[Value]()
    for node in reversed(graph.topological()):
        through = node.op not in ("Shape", "Size") and not found.isdisjoint(node.outputs)
        found.update(v for i, v in enumerate(node.inputs) if through or says_where(node.op, i))
    return frozenset(found)


def draw_feeds(
    problem: Problem,
    numbers: Mapping[str, int],
    rng: np.random.Generator,
    floats: DrawFloats,
    wide: bool = False,
) -> Feeds:
    """Values of the graph's inputs and of the opaque constants; `floats` draws those of a float type.

    Integers are small, with `wide` of their types' whole range where they do not say where something is. Raises
    Unusable for a tensor that is too large to be computed.
    """
    graph = problem.graph
    if too_large(problem):
        raise Unusable("it is too large")
    kept = placing(problem) if wide else frozenset[Value]()
    feeds: Feeds = {}
    for value, type in [*((v, problem.type(v)) for v in graph.inputs), *problem.opaque.items()]:
        shape = _shape(type, numbers)
        if type.dtype in FLOATS:
            feeds[value] = floats(shape, type.dtype)
        elif numpy_dtype(type.dtype).kind == "b":
            feeds[value] = rng.random(shape) < 0.5
        elif wide and value not in kept and numpy_dtype(type.dtype).kind in "iu":
            feeds[value] = integers(rng, shape, numpy_dtype(type.dtype))
        else:
            # Now and then an index counts from the back, or leads nowhere.
            low, high = (-4, 8) if rng.random() < 0.25 else (0, 4)
            feeds[value] = rng.integers(low, high, shape).astype(numpy_dtype(type.dtype))
    return feeds


def too_large(problem: Problem) -> bool:
    """Whether a tensor has more elements than are computed with."""
    return _elements(problem) > _MOST_ELEMENTS


def large(problem: Problem) -> bool:
    """Whether a tensor has so many elements that few such graphs are tested."""
    return _elements(problem) > _LARGE


@lru_cache(maxsize=256)
def _elements(problem: Problem) -> int:
    """How many elements the largest tensor has, symbols taken for 2; also one that a window is padded to."""
    graph = problem.graph
    padded = [1]
    for node in graph.nodes():
        window = [v for name in ("pads", "dilations") if isinstance(v := node.attrs.get(name), tuple)]
        inner = (abs(v) for numbers in window for v in numbers if isinstance(v, int))
        padded.append(
            math.prod(_shape(graph.type(node.inputs[0]), {})) * max(inner, default=0) if window else 1
        )
    types = [*(problem.type(v) for v in graph.inputs), *(t for n in graph.nodes() for t in n.types)]
    return max(*padded, *(math.prod(_shape(t, {})) for t in types))


class Unusable(Exception):
    """The left side itself has no value for these inputs."""


def both_sides(case: Case, feeds: Feeds, field: Field) -> tuple[list[Array], list[Array]]:
    """The outputs of both sides. Raises Unusable, NotEvaluable, ZeroDenominator, and Wrong if only the right fails."""
    try:
        left = evaluate_graph(with_known_casts(case.before), feeds, field)
    except (NotEvaluable, ZeroDenominator):
        raise
    except Exception as error:  # whatever NumPy says of inputs that do not fit
        raise Unusable(f"{type(error).__name__}: {error}") from error
    if any(a.size > _MOST_ELEMENTS for a in left):  # of a size that only the inputs' numbers say
        raise Unusable("it is too large")
    try:
        return left, evaluate_graph(with_known_casts(case.after), feeds, field)
    except (NotEvaluable, ZeroDenominator):
        raise
    except Exception as error:
        raise Wrong(f"the right side fails: {type(error).__name__}: {error}") from error


def usable(problem: Problem, rng: np.random.Generator) -> bool:
    """Whether the graph computes anything: ONNX's inference lets through what no operator takes."""
    for numbers in tried_bindings(problem, rng):
        try:
            feeds = draw_feeds(problem, numbers, rng, _floats(rng, "positive", 1.0))
            evaluate_graph(problem.graph, feeds, MACHINE)
        except NotEvaluable:
            return True  # not for us to say
        except Exception:  # whatever NumPy says of inputs that do not fit
            continue
        return True
    return False


def _same_form(left: list[Array], right: list[Array]) -> None:
    for i, (a, b) in enumerate(zip(left, right, strict=True)):
        if a.shape != b.shape:
            raise Wrong(f"output {i} has shape {b.shape} instead of {a.shape}")
        if a.dtype.kind != b.dtype.kind:
            raise Wrong(f"output {i} has element type {b.dtype} instead of {a.dtype}")


# The field


@dataclass(frozen=True, slots=True)
class FieldResult:
    """What the field leg showed: how many trials agreed, and how likely a false rule would have passed them."""

    trials: int
    bound: float


def check_field(case: Case, rng: np.random.Generator, wanted: float = WANTED) -> FieldResult | None:
    """Evaluate both sides over prime fields until a false rule would pass with less than `wanted`.

    None if an operator means nothing over a field, or if the left side has no value. Raises Wrong.
    """
    degrees = Degrees()
    found = _degrees(case, rng, degrees)
    if found is None:
        return None
    numbers, left_degrees, right_degrees = found
    trials, bound, failures = 0, 1.0, 0
    while trials < _MOST_TRIALS and bound >= wanted:
        field = PrimeField(PRIMES[(trials + failures) % 2], int(rng.integers(1 << 62)))
        wide = (trials + failures) % 3 == 1
        try:
            feeds = draw_feeds(
                case.problem,
                numbers,
                rng,
                lambda shape, dtype, field=field: field.draw(rng, shape),  # type: ignore[misc]
                wide,
            )
            left, right = both_sides(case, feeds, field)
        except NotEvaluable:
            return None
        except (ZeroDenominator, Unusable):
            failures += 1
            if failures > _MOST_TRIALS:
                return None
            continue
        _same_form(left, right)
        for i, (a, b) in enumerate(zip(left, right)):
            if not np.array_equal(a, b):
                place = tuple(int(k) for k in np.argwhere(np.asarray(a != b))[0])
                raise Wrong(f"modulo {field.prime} output {i} differs at {list(place)}")
        bound *= chance(left_degrees, right_degrees, degrees, field.prime)
        trials += 1
    return FieldResult(trials, bound)


def _degrees(
    case: Case, rng: np.random.Generator, degrees: Degrees
) -> tuple[dict[str, int], list[Array], list[Array]] | None:
    """Numbers for the dimensions, and both sides as rational functions; None if the left side has no value."""
    for numbers in tried_bindings(
        case.problem, rng
    ):  # integers and booleans may decide, too, whether it has one
        try:
            left, right = both_sides(
                case,
                draw_feeds(case.problem, numbers, rng, lambda shape, dtype: degrees.variable(shape)),
                degrees,
            )
        except NotEvaluable:
            return None
        except Unusable:
            continue
        return numbers, left, right
    return None


# Floats


def magnitudes(case: Case, numeric: bool) -> Iterator[tuple[str, float]]:
    """What inputs are drawn: standard normal, positive, what a cast to a narrow type makes infinite, and for numeric
    rules very small and very large ones."""
    yield "normal", 1.0
    yield "positive", 1.0
    narrow = {n.types[0].dtype for n in case.before.nodes() if n.op in ("Cast", "CastLike")}
    if DType.FLOAT16 in narrow:
        yield "normal", 1e5
    if not narrow.isdisjoint((DType.FLOAT, DType.BFLOAT16)):
        yield "normal", 1e39
    if numeric:
        yield from (("normal", m) for m in (1e-6, 1e-3, 30.0, 1e4))


def check_floats(case: Case, rng: np.random.Generator, rule: AnyRule) -> int:
    """Evaluate both sides over float64, with ordinary numbers and with NaN, infinities and negative zeros.

    The rule says what may differ where something is not finite (`may_add_nonfinite`, `may_remove_nonfinite`). Gives the
    number of draws that the left side took. Raises Wrong, NotEvaluable.
    """
    done = 0
    numeric = rule.proof == "numeric"
    tolerance = _ROUNDED if numeric else _REORDERED
    for turn, (kind, size) in enumerate(magnitudes(case, numeric)):
        found = _evaluated(case, rng, _floats(rng, kind, size), wide=turn % 2 == 1)
        if found is None:
            continue
        _compare_case(case, *found, tolerance, rule)
        done += 1
    for turn, special in enumerate((np.nan, np.inf, -np.inf, -0.0)):
        # Of nothing a product is 0 in one order, and of what is not finite NaN in another.
        normal = _floats(rng, "normal", 1.0)
        found = _evaluated(case, rng, normal, special, wide=turn % 2 == 0, nonempty=rule.nonempty)
        if found is None:
            continue
        try:
            _compare_case(case, *found, tolerance, rule)
        except Wrong as error:
            raise Wrong(f"{error} (an input holds {special})") from error
        done += 1
    return done


def _evaluated(
    case: Case,
    rng: np.random.Generator,
    floats: DrawFloats,
    special: float | None = None,
    wide: bool = False,
    nonempty: bool = False,
) -> tuple[Feeds, list[Array], list[Array]] | None:
    """Inputs, each with a `special` number in it if there is one, and both sides; None if the left has no value."""
    for numbers in tried_bindings(case.problem, rng, nonempty):
        try:
            feeds = draw_feeds(case.problem, numbers, rng, floats, wide)
            if special is not None:
                _plant(case, feeds, rng, special)
            return feeds, *both_sides(case, feeds, MACHINE)
        except Unusable:
            continue
    return None


def _floats(rng: np.random.Generator, kind: str, size: float) -> DrawFloats:
    def drawn(shape: tuple[int, ...], dtype: DType) -> Array:
        numbers = rng.standard_normal(shape)
        if kind == "positive":
            numbers = np.abs(numbers) + 0.05
        # As the type rounds them, which is what the runtime will get, and finite.
        return round_to(numbers * min(size, _TYPICALLY_MOST.get(dtype, size)), dtype)

    return drawn


def _plant(case: Case, feeds: Feeds, rng: np.random.Generator, special: float) -> None:
    """Put a special number into each input of floats (not into constants)."""
    for value in case.before.inputs:
        array = feeds[value]
        if array.dtype.kind == "f" and array.size:
            array.reshape(-1)[rng.integers(array.size)] = special


def _compare_case(
    case: Case, feeds: Feeds, left: list[Array], right: list[Array], tolerance: float, rule: AnyRule
) -> None:
    """Compare all outputs; where what is not finite may differ, those that the rule replaces (exp(-inf) is 0)."""
    loose = (rule.may_add_nonfinite or rule.may_remove_nonfinite) and not _finite(left)
    if not loose:
        try:
            compare(left, right, tolerance)
        except Wrong:
            if not (rule.may_add_nonfinite or rule.may_remove_nonfinite) or _finite(_replaced(case, feeds)):
                raise
        else:
            return
    kept = [i for i, v in enumerate(case.before.outputs) if v in case.replaced]
    left, right = [left[i] for i in kept], [right[i] for i in kept]
    compare(left, right, tolerance, rule.may_add_nonfinite, rule.may_remove_nonfinite)


def _finite(arrays: Iterable[Array]) -> bool:
    return all(np.isfinite(a).all() for a in arrays if a.dtype.kind == "f")


def _replaced(case: Case, feeds: Feeds) -> list[Array]:
    """What the left side has for the values that the right side replaces, whatever its outputs make of them."""
    graph = case.before
    inner = Graph.make(graph.topological(), graph.inputs, tuple(case.replaced), graph.leaves)
    return evaluate_graph(with_known_casts(inner), feeds, MACHINE)


def compare(
    left: list[Array], right: list[Array], tolerance: float, spreads: bool = False, mends: bool = False
) -> None:
    """Raises Wrong unless the right side equals the left one.

    With `may_add_nonfinite` what is not finite on the left only has to be not finite on the right (infinity or NaN),
    and the right may be NaN anywhere. With `may_remove_nonfinite` the right may be anything where the left is not
    finite.
    """
    _same_form(left, right)
    for i, (a, b) in enumerate(zip(left, right)):
        if a.dtype.kind != "f":
            if not np.array_equal(a, b):
                raise Wrong(f"output {i} differs")
            continue
        finite = np.isfinite(a)
        skipped = np.isnan(b) | ~(finite | np.isfinite(b)) if spreads else np.zeros(a.shape, np.bool_)
        if mends:
            skipped = skipped | ~finite
        same = np.where(finite, np.isfinite(b), (a == b) | (np.isnan(a) & np.isnan(b))) | skipped
        if not same.all():
            place = np.argwhere(~np.atleast_1d(same))[0].tolist()
            raise Wrong(
                f"output {i} is {b.reshape(same.shape)[~same][0]} instead of {a[~same][0]} at {place}"
            )
        both = finite & np.isfinite(b)
        if not both.any():
            continue
        scale = float(np.abs(a[both]).max())
        error = float(np.abs(a[both] - b[both]).max())
        if error > tolerance * max(scale, _LEAST_SCALE):
            raise Wrong(f"output {i} is off by {error:.3g}, with numbers up to {scale:.3g}")


# The runtime


@dataclass(frozen=True, slots=True)
class RuntimeResult:
    """Of each output of floats the greatest errors of the left and of the right side, in units of float32."""

    errors: tuple[tuple[float, float], ...]

    @property
    def bits(self) -> float:
        """How many bits of accuracy the right side loses (negative: gains); -inf without outputs of floats."""
        return max((math.log2(max(new, 1.0) / max(own, 1.0)) for own, new in self.errors), default=-math.inf)

    def joined(self, other: RuntimeResult) -> RuntimeResult:
        """The greatest errors of two runs of one case: with a few numbers the left side may be right by luck."""
        pairs = zip(self.errors, other.errors, strict=True)
        return RuntimeResult(tuple((max(a, c), max(b, d)) for (a, b), (c, d) in pairs))


def whole_types(case: Case) -> frozenset[DType]:
    """The types of the inputs that hold integers as data, not sizes or indices."""
    graph, kept = case.before, placing(case.problem)
    return frozenset(t for v in graph.inputs if v not in kept and (t := graph.type(v).dtype) in INTEGERS)


def check_runtime(case: Case, rng: np.random.Generator, wide: bool = False) -> RuntimeResult | None:
    """Run both sides in ONNX Runtime without its optimisations, in float32, against our float64.

    With `wide` integers are of their whole range. None if the runtime does not take the left side, or where a tensor is
    empty: several of its kernels refuse those, and some (ConvTranspose) crash. Raises Wrong.
    """
    if any(case.before.type(v).dtype == DType.BFLOAT16 for v in case.before.inputs):
        return None  # NumPy arrays of it are not taken
    try:
        found = _evaluated(case, rng, _floats(rng, "positive", 1.0), wide=wide)
    except NotEvaluable:
        return None
    if found is None:
        return None
    feeds, exact, _ = found
    graph = case.before
    floats = {v for v in feeds if graph.type(v).dtype in FLOATS}
    if (
        _has_empty(case.before)
        or _has_empty(case.after)
        or any(a.size == 0 for a in (*feeds.values(), *exact))
    ):
        return None
    given = {v: a.astype(numpy_dtype(graph.type(v).dtype)) if v in floats else a for v, a in feeds.items()}
    try:
        before = run_graph(graph, given)
    except (BackendError, NotStandalone):
        return None
    try:
        after = run_graph(case.after, given)
    except BackendError as error:
        raise Wrong(f"ONNX Runtime refuses the right side: {error}") from error
    if any(y.shape != a.shape for y, a in zip(exact, before)):
        return (
            None  # it takes the left side for something else (ConvTranspose: SAME, a stride above the kernel)
        )
    errors: list[tuple[float, float]] = []
    for i, (y, a, b) in enumerate(zip(exact, before, after, strict=True)):
        if a.shape != b.shape or a.dtype != b.dtype:
            raise Wrong(f"in ONNX Runtime output {i} is {b.dtype}{b.shape} instead of {a.dtype}{a.shape}")
        if a.dtype.kind != "f":
            if not np.array_equal(a, b):
                raise Wrong(f"in ONNX Runtime output {i} differs")
            continue
        finite = np.isfinite(y) & np.isfinite(a) & np.isfinite(b)
        if not finite.any() or not np.abs(y[finite]).max():
            errors.append((0.0, 0.0))  # nothing is lost
            continue
        unit = _UNIT * 2 ** (10 if a.dtype.itemsize == 2 else 0) * float(np.abs(y[finite]).max())
        own, new = (float(np.abs(s[finite].astype(np.float64) - y[finite]).max()) for s in (a, b))
        if new > 8 * own + 64 * unit:
            raise Wrong(f"in ONNX Runtime output {i} is off by {new:.3g}, the left side by {own:.3g}")
        errors.append((own / unit, new / unit))
    return RuntimeResult(tuple(errors))


def _has_empty(graph: Graph) -> bool:
    return any(0 in (t.shape or ()) for n in graph.nodes() for t in n.types)


def run_graph(graph: Graph, feeds: Feeds) -> list[Array]:
    """The outputs of a graph in ONNX Runtime, its own optimisations off. Raises BackendError, NotStandalone."""
    nodes = graph.topological()
    made = {v for n in nodes for v in n.outputs}
    read = {v for n in nodes for v in n.inputs if v}
    inputs = {v: graph.type(v).as_const(False) for v in graph.inputs if v in read}
    consts = {
        v: feeds[v] if v in feeds else c.numpy().astype(numpy_dtype(c.type.dtype))
        for v in read - made - inputs.keys()
        if (c := graph.leaves.consts.get(v)) is not None
    }
    wanted = list(dict.fromkeys(v for v in graph.outputs if v in made))
    found: dict[Value, Array] = {}
    if wanted:
        model = model_of(nodes, inputs, consts, wanted)
        with open_model(model, threads=1, optimization=Optimization.NONE) as opened:
            out = opened.run({input_name(v): feeds[v] for v in inputs})
            found = dict(zip(wanted, out))
    return [
        found[v] if v in found else feeds[v] if v in feeds else graph.leaves.consts[v].numpy()
        for v in graph.outputs
    ]
