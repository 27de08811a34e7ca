"""Cases of a rule, and the tests that a case must pass. A case is a small graph, a match in it, and the graph after the
substitution.
"""

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
from xrlflow.ops.eval_qlinear import ROUNDINGS
from xrlflow.ops.evaluate import REALS, SPECS, Field, NotEvaluable, evaluate_graph, evaluate_node, promote
from xrlflow.ops.schema import schema
from xrlflow.ops.subgraph import NotStandalone, input_name, model_of
from xrlflow.ops.tensors import numpy_dtype
from xrlflow.prover.degrees import Degrees, chance
from xrlflow.prover.draw import weighted, weights
from xrlflow.prover.half import exact_within, rounded_results
from xrlflow.prover.machine import MACHINE, evaluation, integers, round_to
from xrlflow.prover.prime import PRIMES, PrimeField, ZeroDenominator
from xrlflow.prover.sketch import Problem
from xrlflow.rewrite import AnyRule, GraphBuilder, Library, Match, Refused, Val
from xrlflow.rewrite.state import build_edit, fingerprint_shift, match_all

Array = npt.NDArray[Any]
Feeds = dict[Value, Array]
# A function that draws floats of a shape and an element type, as elements of the field.
DrawFloats = Callable[[tuple[int, ...], DType], Array]

# A wrong rule passes the test over prime fields with less than this probability.
MAX_FALSE_PASS = 1e-12
_MOST_TRIALS = 40
# Tolerance for the sides' different orders of float64 operations, relative to the largest number of an output.
_REORDERED = 1e-9
# The same tolerance for rules whose sides hold constants that were rounded to float32.
_ROUNDED = 2.0**-20
# The least scale of a tolerance. If the largest number of an output is smaller, the output is compared as if that
# number were this: it results from numbers around 1.
_LEAST_SCALE = 1e-9
# The unit of float32 errors in ONNX Runtime, relative to the largest number of an output.
_UNIT = 2.0**-24


# Operators that float64 computes exactly for float32 numbers, if the magnitudes of these do not differ too much.
_EXACT_OPERATORS = frozenset({"Add", "Sub", "Mul", "Neg", "MatMul", "ReduceSum", "Sum"})


class ProofBuilder(GraphBuilder):
    """Traces a target. Constants that rounding would change are not folded; the proof evaluates them instead."""

    def constant(self, data: Any, dtype: DType | None = None) -> Val:
        """Make a constant. If a Python number becomes float16 or bfloat16, it keeps its float32 digits.

        A proof ignores the rounding to these types, so the number is rounded only if that makes it 0 or infinite.
        """
        result = super().constant(data, dtype)
        if dtype not in (DType.FLOAT16, DType.BFLOAT16) or not isinstance(data, (int, float)):
            return result
        exact = np.asarray(data, np.float32).astype(np.float64)
        rounded = result.array.astype(np.float64)
        if not np.isfinite(rounded) or (exact != 0) != (rounded != 0):
            return result
        value = self.graph.leaves.intern(exact, dtype)
        return Val(self.graph, value, self.graph.leaves.types[value])

    def _propagate(self, edit: Edit) -> Edit:
        return edit  # propagation would evaluate constants in real numbers, without rounding

    def _fold(
        self, op: str, attrs: Attrs, inputs: tuple[Value, ...], types: tuple[TensorType, ...]
    ) -> tuple[Value, ...] | None:
        spec = SPECS.get(op)
        floats = any(t.dtype in FLOATS for t in types)
        moves = spec is not None and spec.proof in ("movement", "integer")
        if not floats or moves:
            return super()._fold(op, attrs, inputs, types)
        # Rounding of doubles cannot be detected, because NumPy has no wider type to compare with.
        is_exact = op in _EXACT_OPERATORS and all(t.dtype != DType.DOUBLE for t in types)
        folded = super()._fold(op, attrs, inputs, types) if is_exact else None
        if folded is None:
            return None
        consts = self.graph.leaves.consts
        arrays = [None if v == ABSENT else promote(REALS, consts[v].numpy()) for v in inputs]
        exact = evaluate_node(op, attrs, arrays, len(types))
        same = all(np.array_equal(e, consts[v].numpy().astype(np.float64)) for e, v in zip(exact, folded))
        return folded if same else None


class Wrong(Exception):
    """The two sides of a case differ. The message says where."""


@dataclass(frozen=True, slots=True, eq=False)
class Case:
    """One application of a rule: the graph before and after it. Both compute the same if the rule is right."""

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
            return frozenset(match.binding.outputs)
        return frozenset(match.nodes[o.node.index].outputs[o.index] for o in match.pattern.outputs)


@lru_cache(maxsize=64)
def sides(case: Case) -> tuple[Graph, Graph]:
    """The two graphs of a case as the proof computes them: see `half` for rules that round once."""
    if not case.match.rule.rounds_once:
        return case.before, case.after
    left = exact_within(case.before, case.match.nodes, case.replaced)
    return left, rounded_results(case.after, case.edit.added, case.match.nodes)


def find_cases(library: Library, problem: Problem) -> tuple[list[Case], list[Refused]]:
    """All cases of the library's only rule in a graph, and all near misses.

    Raises RuleError, and any other exception that a wrong rule raises.
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
    """The case that a match gives; None if the edit changes nothing. Raises what `build_edit` raises."""
    edit = build_edit(problem.graph, match, builder or ProofBuilder(problem.graph))
    if not fingerprint_shift(problem.graph, edit):
        return None
    return Case(problem, match, edit, apply_edit(problem.graph, edit)[0])


# Inputs


def symbols(problem: Problem) -> list[str]:
    names = {d for v in problem.graph.inputs for d in problem.type(v).shape or () if isinstance(d, str)}
    return sorted(names)


_BOUND = weights({0: 0.1, 1: 0.25, 2: 0.3, 3: 0.2, 4: 0.15})


def bindings(problem: Problem, rng: np.random.Generator) -> dict[str, int]:
    """Random sizes, 0 to 4, for the symbolic dimensions."""
    return {name: weighted(rng, _BOUND) for name in symbols(problem)}


def tried_bindings(
    problem: Problem, rng: np.random.Generator, nonempty: bool = False
) -> Iterator[dict[str, int]]:
    """Sizes for the symbolic dimensions, by name. The caller tries one after the other until the left side has a value.

    First come random sizes, then the same size for all dimensions, then random ones again. With `nonempty` all sizes
    are at least 1.
    """
    minimum = 1 if nonempty else 0

    def draw() -> dict[str, int]:
        return {name: max(number, minimum) for name, number in bindings(problem, rng).items()}

    yield draw()
    names = symbols(problem)
    if names:
        yield from (dict.fromkeys(names, number) for number in (2, 1, 0)[: 3 - minimum])
    yield from (draw() for _ in range(3))


def shape_of(type: TensorType, numbers: Mapping[str, int]) -> tuple[int, ...]:
    """The sizes of a type whose names are bound to `numbers`. An unknown dimension, and a name that is not bound, are
    2; if `numbers` has the key "", unknown dimensions are its number.
    """
    return tuple(d if isinstance(d, int) else numbers.get(d or "", 2) for d in type.shape or ())


# Graphs with a larger tensor are not evaluated.
_MOST_ELEMENTS = 1 << 19
# Numbers from a normal distribution with this standard deviation are in the range of the type.
_TYPICALLY_MOST = {DType.FLOAT16: 1e4, DType.BFLOAT16: 1e37, DType.FLOAT: 1e37}
_LARGE = 1 << 11


@lru_cache(maxsize=1024)
def says_where(op: str, index: int) -> bool:
    """Whether integers at this input of an operator are sizes, indices or counts, not data."""
    defined = schema(op)
    if defined is None or op in ("If", "Loop", "Scan", "Range") or (op, index) == ("OneHot", 1):
        return True
    formal = defined.inputs[min(index, len(defined.inputs) - 1)]
    allowed = {
        t
        for c in defined.type_constraints
        if c.type_param_str == formal.type_str
        for t in c.allowed_type_strs
    }
    return (allowed or {formal.type_str}) <= {"tensor(int32)", "tensor(int64)"}


@lru_cache(maxsize=256)
def placing(problem: Problem) -> frozenset[Value]:
    """The values from which the graph computes sizes, indices or counts. Their integers are not data."""
    graph = problem.graph
    values = set[Value]()
    for node in reversed(graph.topological()):
        through = node.op not in ("Shape", "Size") and not values.isdisjoint(node.outputs)
        values.update(v for i, v in enumerate(node.inputs) if through or says_where(node.op, i))
    return frozenset(values)


def draw_feeds(
    problem: Problem,
    numbers: Mapping[str, int],
    rng: np.random.Generator,
    floats: DrawFloats,
    wide: bool = False,
) -> Feeds:
    """Random values of the graph's inputs and opaque constants. `floats` draws the values of float types.

    Integers are small. With `wide`, integers that are data are drawn from the full range of their type. Raises Unusable
    if a tensor is too large to be evaluated.
    """
    graph = problem.graph
    if too_large(problem):
        raise Unusable("it is too large")
    positions = placing(problem) if wide else frozenset[Value]()
    feeds: Feeds = {}
    for value, type in [*((v, problem.type(v)) for v in graph.inputs), *problem.opaque.items()]:
        shape = shape_of(type, numbers)
        if type.dtype in FLOATS:
            feeds[value] = floats(shape, type.dtype)
        elif numpy_dtype(type.dtype).kind == "b":
            feeds[value] = rng.random(shape) < 0.5
        elif wide and value not in positions and numpy_dtype(type.dtype).kind in "iu":
            feeds[value] = integers(rng, shape, numpy_dtype(type.dtype))
        else:
            # Indices are sometimes negative (counted from the back) or out of range.
            low, high = (-4, 8) if rng.random() < 0.25 else (0, 4)
            feeds[value] = rng.integers(low, high, shape).astype(numpy_dtype(type.dtype))
    return feeds


def too_large(problem: Problem) -> bool:
    """Whether the graph has a tensor with too many elements to be evaluated."""
    return elements(problem) > _MOST_ELEMENTS


def large(problem: Problem) -> bool:
    """Whether the graph has a tensor so large that only a few such graphs are tested."""
    return elements(problem) > _LARGE


@lru_cache(maxsize=256)
def elements(problem: Problem) -> int:
    """The number of elements of the graph's largest tensor. Inputs of windows (Conv, pooling) count with their padding,
    symbolic dimensions as 2.
    """
    graph = problem.graph
    padded = [1]
    for node in graph.nodes():
        window = [v for name in ("pads", "dilations") if isinstance(v := node.attrs.get(name), tuple)]
        inner = (abs(v) for numbers in window for v in numbers if isinstance(v, int))
        padded.append(
            math.prod(shape_of(graph.type(node.inputs[0]), {})) * max(inner, default=0) if window else 1
        )
    types = [*(problem.type(v) for v in graph.inputs), *(t for n in graph.nodes() for t in n.types)]
    return max(*padded, *(math.prod(shape_of(t, {})) for t in types))


class Unusable(Exception):
    """The left side itself has no value for these inputs."""


def both_sides(case: Case, feeds: Feeds, field: Field) -> tuple[list[Array], list[Array]]:
    """The outputs of the left and of the right side.

    Raises NotEvaluable, ZeroDenominator, Unusable if the left side fails, and Wrong if only the right side fails.
    """
    before, after = sides(case)
    try:
        left = evaluation(before).run(feeds, field)
    except (NotEvaluable, ZeroDenominator):
        raise
    except Exception as error:  # NumPy may raise anything for inputs that do not fit
        raise Unusable(f"{type(error).__name__}: {error}") from error
    if any(a.size > _MOST_ELEMENTS for a in left):  # the sizes of an output depend on the inputs' numbers
        raise Unusable("it is too large")
    try:
        return left, evaluation(after).run(feeds, field)
    except (NotEvaluable, ZeroDenominator):
        raise
    except Exception as error:
        raise Wrong(f"the right side fails: {type(error).__name__}: {error}") from error


def usable(problem: Problem, rng: np.random.Generator) -> bool:
    """Whether the graph can be evaluated for some inputs. ONNX's shape inference admits some graphs that operators
    refuse.
    """
    for numbers in tried_bindings(problem, rng):
        try:
            feeds = draw_feeds(problem, numbers, rng, drawn_floats(rng, "positive", 1.0))
            evaluate_graph(problem.graph, feeds, MACHINE)
        except NotEvaluable:
            return True  # the evaluator lacks an operator, so the graph may be usable
        except Exception:  # NumPy may raise anything for inputs that do not fit
            continue
        return True
    return False


def _check_types_and_shapes(left: list[Array], right: list[Array]) -> None:
    for i, (a, b) in enumerate(zip(left, right, strict=True)):
        if a.shape != b.shape:
            raise Wrong(f"output {i} has shape {b.shape} instead of {a.shape}")
        if a.dtype.kind != b.dtype.kind:
            raise Wrong(f"output {i} has element type {b.dtype} instead of {a.dtype}")


# The field


@dataclass(frozen=True, slots=True)
class FieldResult:
    """The result of the test over prime fields: the number of trials that agreed, and a bound of the probability that a
    wrong rule passes all of them.
    """

    trials: int
    bound: float


def check_field(
    case: Case, rng: np.random.Generator, probability: float = MAX_FALSE_PASS
) -> FieldResult | None:
    """Evaluate both sides over prime fields until a wrong rule would pass with a probability below `probability`.

    Returns None if an operator is not defined over a field or the left side has no value. Raises Wrong if the sides
    differ.
    """
    if any(map(_compares_rounded, sides(case))):
        return None
    degrees = Degrees()
    bounds = _degrees(case, rng, degrees)
    if bounds is None:
        return None
    numbers, left_degrees, right_degrees = bounds
    trials, bound, failures = 0, 1.0, 0
    while trials < _MOST_TRIALS and bound >= probability:
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
        _check_types_and_shapes(left, right)
        for i, (a, b) in enumerate(zip(left, right)):
            if not np.array_equal(a, b):
                position = tuple(int(k) for k in np.argwhere(np.asarray(a != b))[0])
                raise Wrong(f"modulo {field.prime} output {i} differs at {list(position)}")
        bound *= chance(left_degrees, right_degrees, degrees, field.prime)
        trials += 1
    return FieldResult(trials, bound)


def _compares_rounded(graph: Graph) -> bool:
    """Whether a graph rounds numbers to steps and compares integers for equality. In a field, two different results of
    rounding are hardly ever equal; but a byte has 256 values.
    """
    nodes = list(graph.nodes())
    return any(n.op in ROUNDINGS for n in nodes) and any(
        n.op == "Equal" and any(graph.type(v).dtype not in FLOATS for v in n.inputs) for n in nodes
    )


def _degrees(
    case: Case, rng: np.random.Generator, degrees: Degrees
) -> tuple[dict[str, int], list[Array], list[Array]] | None:
    """Sizes for the symbolic dimensions, and both sides evaluated over `degrees`; None if the left side has
    no value.
    """
    for numbers in tried_bindings(
        case.problem, rng
    ):  # integers and booleans are drawn anew in each attempt: they may decide whether the left side has a value
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
    """The kinds and the scales of inputs to draw.

    They are standard normal numbers, positive numbers, numbers that overflow where the graph casts to a narrow type,
    and for numeric rules very small and very large numbers.
    """
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
    """Evaluate both sides in float64, with ordinary numbers and with NaN, infinities and negative zeros.

    The rule's `may_add_nonfinite` and `may_remove_nonfinite` say how the sides may differ where a number is not finite.
    Returns the number of draws for which the left side has a value. Raises Wrong, NotEvaluable.
    """
    draws = 0
    numeric = rule.proof == "numeric"
    tolerance = _ROUNDED if numeric else _REORDERED
    for turn, (kind, size) in enumerate(magnitudes(case, numeric)):
        results = _evaluated(case, rng, drawn_floats(rng, kind, size), wide=turn % 2 == 1)
        if results is None:
            continue
        _compare_case(case, *results, tolerance, rule)
        draws += 1
    for turn, special in enumerate((np.nan, np.inf, -np.inf, -0.0)):
        # An empty sum is 0, but 0 times infinity, as another order of operations computes it, is NaN. Hence `nonempty`.
        normal = drawn_floats(rng, "normal", 1.0)
        results = _evaluated(case, rng, normal, special, wide=turn % 2 == 0, nonempty=rule.nonempty)
        if results is None:
            continue
        try:
            _compare_case(case, *results, tolerance, rule)
        except Wrong as error:
            raise Wrong(f"{error} (an input holds {special})") from error
        draws += 1
    return draws


def _evaluated(
    case: Case,
    rng: np.random.Generator,
    floats: DrawFloats,
    special: float | None = None,
    wide: bool = False,
    nonempty: bool = False,
) -> tuple[Feeds, list[Array], list[Array]] | None:
    """Inputs, and both sides for them; None if the left side has no value. Each float input holds the number `special`,
    if it is given.
    """
    for numbers in tried_bindings(case.problem, rng, nonempty):
        try:
            feeds = draw_feeds(case.problem, numbers, rng, floats, wide)
            if special is not None:
                _plant(case, feeds, rng, special)
            return feeds, *both_sides(case, feeds, MACHINE)
        except Unusable:
            continue
    return None


def drawn_floats(rng: np.random.Generator, kind: str, size: float) -> DrawFloats:
    """A function that draws standard normal numbers times `size`, or for the kind "positive" positive numbers from 0.05
    on.
    """

    def draw(shape: tuple[int, ...], dtype: DType) -> Array:
        numbers = rng.standard_normal(shape)
        if kind == "positive":
            numbers = np.abs(numbers) + 0.05
        # The numbers are finite and rounded to the type, as the runtime will get them.
        return round_to(numbers * min(size, _TYPICALLY_MOST.get(dtype, size)), dtype)

    return draw


def _plant(case: Case, feeds: Feeds, rng: np.random.Generator, special: float) -> None:
    """Put a special number at a random position of each float input (not of constants)."""
    for value in case.before.inputs:
        array = feeds[value]
        if array.dtype.kind == "f" and array.size:
            array.reshape(-1)[rng.integers(array.size)] = special


def _compare_case(
    case: Case, feeds: Feeds, left: list[Array], right: list[Array], tolerance: float, rule: AnyRule
) -> None:
    """Compare the outputs of both sides. Raises Wrong if they differ.

    If some numbers are not finite, and the rule may change those, only the replaced values are compared. The graph's
    other outputs may then differ in finite numbers, too, since exp(-inf) is 0.
    """
    loose = (rule.may_add_nonfinite or rule.may_remove_nonfinite) and not _finite(left)
    if not loose:
        try:
            compare(left, right, tolerance)
        except Wrong:
            if not (rule.may_add_nonfinite or rule.may_remove_nonfinite) or _finite(_replaced(case, feeds)):
                raise
        else:
            return
    replaced = [i for i, v in enumerate(case.before.outputs) if v in case.replaced]
    left, right = [left[i] for i in replaced], [right[i] for i in replaced]
    compare(left, right, tolerance, rule.may_add_nonfinite, rule.may_remove_nonfinite)


def _finite(arrays: Iterable[Array]) -> bool:
    return all(np.isfinite(a).all() for a in arrays if a.dtype.kind == "f")


def _replaced(case: Case, feeds: Feeds) -> list[Array]:
    """The values that the right side replaces, as the left side computes them."""
    graph = case.before
    inner = Graph.make(graph.topological(), graph.inputs, tuple(case.replaced), graph.leaves)
    return evaluation(inner).run(feeds, MACHINE)


def compare(
    left: list[Array], right: list[Array], tolerance: float, spreads: bool = False, mends: bool = False
) -> None:
    """Raises Wrong unless the right side's outputs equal those of the left side.

    `tolerance` is relative to the largest number of an output. With `spreads` (`may_add_nonfinite`) infinity and NaN
    count as equal, and the right side may be NaN anywhere. With `mends` (`may_remove_nonfinite`) the right side may be
    anything where the left side is not finite.
    """
    _check_types_and_shapes(left, right)
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
            position = np.argwhere(~np.atleast_1d(same))[0].tolist()
            raise Wrong(
                f"output {i} is {b.reshape(same.shape)[~same][0]} instead of {a[~same][0]} at {position}"
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
    """For each float output the greatest errors of the left and of the right side, in units of rounding (`_UNIT`)."""

    errors: tuple[tuple[float, float], ...]

    @property
    def bits(self) -> float:
        """How many bits of accuracy the right side loses (negative: gains); -inf if there are no float outputs."""
        return max((math.log2(max(new, 1.0) / max(own, 1.0)) for own, new in self.errors), default=-math.inf)

    def joined(self, other: RuntimeResult) -> RuntimeResult:
        """The greatest errors over two runs of one case. In a single run the left side may be exact by luck."""
        pairs = zip(self.errors, other.errors, strict=True)
        return RuntimeResult(tuple((max(a, c), max(b, d)) for (a, b), (c, d) in pairs))


def whole_types(case: Case) -> frozenset[DType]:
    """The element types of the inputs that hold integers as data, not as sizes or indices."""
    graph, positions = case.before, placing(case.problem)
    return frozenset(t for v in graph.inputs if v not in positions and (t := graph.type(v).dtype) in INTEGERS)


def check_runtime(case: Case, rng: np.random.Generator, wide: bool = False) -> RuntimeResult | None:
    """Run both sides in ONNX Runtime without its optimisations, and compare them with xrlflow's own float64 results.

    With `wide`, integers that are data are drawn from their full range. Returns None if the runtime does not run the
    left side, or if a tensor is empty: several kernels refuse empty tensors, and some (ConvTranspose) crash. Raises
    Wrong.
    """
    if any(case.before.type(v).dtype == DType.BFLOAT16 for v in case.before.inputs):
        return None  # the runtime takes no NumPy arrays of this type
    try:
        results = _evaluated(case, rng, drawn_floats(rng, "positive", 1.0), wide=wide)
    except NotEvaluable:
        return None
    if results is None:
        return None
    feeds, exact, _ = results
    graph = case.before
    floats = {v for v in feeds if graph.type(v).dtype in FLOATS}
    if (
        _has_empty(case.before)
        or _has_empty(case.after)
        or any(a.size == 0 for a in (*feeds.values(), *exact))
    ):
        return None
    inputs = {v: a.astype(numpy_dtype(graph.type(v).dtype)) if v in floats else a for v, a in feeds.items()}
    try:
        before = run_graph(graph, inputs)
    except (BackendError, NotStandalone):
        return None
    try:
        after = run_graph(case.after, inputs)
    except BackendError as error:
        raise Wrong(f"ONNX Runtime refuses the right side: {error}") from error
    if any(y.shape != a.shape for y, a in zip(exact, before)):
        return None  # it computes the left side differently (ConvTranspose: SAME, a stride above the kernel)
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
            errors.append((0.0, 0.0))  # all numbers are 0 or not finite: there is no rounding error
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
    """The outputs of a graph in ONNX Runtime without its optimisations. Raises BackendError, NotStandalone."""
    nodes = graph.topological()
    computed = {v for n in nodes for v in n.outputs}
    operands = {v for n in nodes for v in n.inputs if v}
    inputs = {v: graph.type(v).as_const(False) for v in graph.inputs if v in operands}
    consts = {
        v: feeds[v] if v in feeds else c.numpy().astype(numpy_dtype(c.type.dtype))
        for v in operands - computed - inputs.keys()
        if (c := graph.leaves.consts.get(v)) is not None
    }
    requested = list(dict.fromkeys(v for v in graph.outputs if v in computed))
    results: dict[Value, Array] = {}
    if requested:
        model = model_of(nodes, inputs, consts, requested)
        with open_model(model, threads=1, optimization=Optimization.NONE) as opened:
            out = opened.run({input_name(v): feeds[v] for v in inputs})
            results = dict(zip(requested, out))
    return [
        results[v] if v in results else feeds[v] if v in feeds else graph.leaves.consts[v].numpy()
        for v in graph.outputs
    ]
