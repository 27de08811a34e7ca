"""Integers and casts of the proofs are those of ONNX Runtime."""

from __future__ import annotations

import numpy as np
import pytest

from tests.rules.harness import model, run
from xrlflow.ir import DType
from xrlflow.onnxio import load
from xrlflow.ops.evaluate import evaluate_graph
from xrlflow.ops.tensors import numpy_dtype
from xrlflow.prover.cases import Case, check_runtime, find_cases, placing, says_where, whole_types
from xrlflow.prover.degrees import Degrees
from xrlflow.prover.machine import MACHINE, Undefined, integers, round_to, with_known_casts
from xrlflow.prover.prime import PRIMES, PrimeField
from xrlflow.prover.sketch import Problem, sketch_of

SIGNED = ("int8", "int16", "int32", "int64")
WHOLE = (*SIGNED, "uint8", "uint16", "uint32", "uint64")


def drawn(name: str, seed: int = 0) -> np.ndarray:
    return integers(np.random.default_rng(seed), (400,), np.dtype(name))


def both(graph: str, **feeds: np.ndarray) -> None:
    """ONNX Runtime and the evaluator agree."""
    proto = model(graph)
    imported = load(proto).graph
    given = dict(zip(imported.inputs, feeds.values(), strict=True))
    (ours,) = evaluate_graph(with_known_casts(imported), given, MACHINE)
    (theirs,) = run(proto, feeds)
    np.testing.assert_array_equal(ours, theirs)


@pytest.mark.parametrize("name", WHOLE)
def test_the_whole_range_is_drawn(name: str) -> None:
    found, info = drawn(name), np.iinfo(name)
    assert {info.min, info.max, 1} <= set(found.tolist())
    assert len(set(found.tolist())) > 90


@pytest.mark.parametrize("name", WHOLE)
@pytest.mark.parametrize("op", ["Add", "Sub", "Mul"])
def test_arithmetic_wraps_around(op: str, name: str) -> None:
    graph = f"agraph ({name}[400] a, {name}[400] b) => ({name}[400] y) {{ y = {op}(a, b) }}"
    both(graph, a=drawn(name), b=drawn(name, 1))


@pytest.mark.parametrize("name", WHOLE)
@pytest.mark.parametrize("op", ["Div", "Mod"])
def test_division_rounds_towards_zero(op: str, name: str) -> None:
    b = drawn(name, 1)
    b[(b == 0) | (b.astype(object) == -1)] = 7
    graph = f"agraph ({name}[400] a, {name}[400] b) => ({name}[400] y) {{ y = {op}(a, b) }}"
    both(graph, a=drawn(name), b=b)


@pytest.mark.parametrize("name", SIGNED)
@pytest.mark.parametrize("op", ["Neg", "Abs"])
def test_the_least_integer_has_no_opposite(op: str, name: str) -> None:
    both(f"agraph ({name}[400] a) => ({name}[400] y) {{ y = {op}(a) }}", a=drawn(name))


@pytest.mark.parametrize("name", ["int32", "int64", "int8", "uint8"])
def test_floats_out_of_range_become_what_the_runtime_makes_of_them(name: str) -> None:
    x = np.array([1e10, -1e10, 300.0, -1.5, 1e20, np.nan, np.inf, -np.inf, 70_000.0], np.float32)
    if name in ("int8", "uint8"):
        x = x[[2, 3, 8]]  # the rest differs from one processor to the next
    to = int(DType[name.upper()])
    both(f"agraph (float[N] a) => ({name}[N] y) {{ y = Cast<to = {to}>(a) }}", a=x)


@pytest.mark.parametrize("to", [DType.FLOAT16, DType.FLOAT])
def test_casts_round(to: DType) -> None:
    x = np.array([1.0, 1 + 2.0**-12, 1 + 2.0**-30, 1e5, -1e39, np.nan])
    both(f"agraph (double[6] a) => (y) {{ y = Cast<to = {int(to)}>(a) }}", a=x)
    assert np.isinf(round_to(x, to)[4])


def test_a_cast_that_holds_everything_rounds_nothing() -> None:
    """What is computed of floats is more exact than they are."""
    graph = load(
        model("agraph (float[3] x) => (y) { e = Exp(x) c = Cast<to = 1>(e) y = Cast<to = 11>(c) }")
    ).graph
    x = np.array([0.1, 0.2, 0.3])
    (found,) = evaluate_graph(with_known_casts(graph), {graph.inputs[0]: x}, MACHINE)
    np.testing.assert_array_equal(found, np.exp(x))


@pytest.mark.parametrize(
    "field", [MACHINE, PrimeField(PRIMES[0], 1), Degrees()], ids=lambda f: type(f).__name__
)
def test_what_ends_the_process_is_undefined(field: object) -> None:
    least = np.array([-128], np.int8)
    for a, b in ((least, np.array([-1], np.int8)), (least, np.array([0], np.int8))):
        with pytest.raises(Undefined):
            field.div(a, b)  # type: ignore[attr-defined]
        with pytest.raises(Undefined):
            field.binary("mod", a, b)  # type: ignore[attr-defined]


def test_functions_of_integers_are_integers_in_every_field() -> None:
    x = np.array([-3, 4], np.int32)
    for field in (PrimeField(PRIMES[0], 1), Degrees()):
        found = field.unary("abs", x)
        assert found.dtype == np.int32
        assert found.tolist() == [3, 4]


def test_what_says_where_something_is_stays_small() -> None:
    assert says_where("Gather", 1)
    assert says_where("Reshape", 1)
    assert not says_where("Add", 0)
    assert not says_where("Where", 1)
    graph = load(
        model(
            "agraph (float[4,3] x, int64[2] i, int64[2] d) => (y, z)"
            " <int64 one = {1}> { j = Sub(i, one) y = Gather(x, j) z = Mul(d, d) }"
        )
    ).graph
    problem = Problem(graph, {}, sketch_of(graph))
    _, i, d = graph.inputs
    assert i in placing(problem)
    assert d not in placing(problem)


def test_types_of_data() -> None:
    from rewrite_rules.identity import RemoveZeroAdd
    from xrlflow.prover.proof import library_of

    graph = load(model("agraph (uint8[40] x) => (y) <uint8 z = {0}> { y = Add(x, z) }")).graph
    (case,), _ = find_cases(library_of(RemoveZeroAdd()), Problem(graph, {}, sketch_of(graph)))
    assert isinstance(case, Case)
    assert whole_types(case) == {DType.UINT8}
    assert check_runtime(case, np.random.default_rng(0), wide=True) is not None
    assert numpy_dtype(DType.UINT8) == np.uint8
