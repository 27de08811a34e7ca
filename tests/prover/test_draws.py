"""What a proof tries is enumerated where it can be: no demand is met by the luck of a seed."""

from __future__ import annotations

import os
import subprocess
import sys
from contextlib import nullcontext
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from xrlflow.ir import DType, Graph, TensorType
from xrlflow.onnxio import load
from xrlflow.prover.cases import (
    RuntimeResult,
    Wrong,
    check_floats,
    draw_feeds,
    drawn_floats,
    find_cases,
    tried_bindings,
    usable,
)
from xrlflow.prover.draw import Draw
from xrlflow.prover.equivalence_classes import Kind, shown
from xrlflow.prover.proof import Source, different, in_turn, library_of, parse
from xrlflow.prover.sketch import Problem, build, sketch_of
from xrlflow.prover.variations import _CHANGES, neighbours, resize_to
from xrlflow.rewrite import Op, Rule, Val

pytestmark = pytest.mark.proof


class Associate(Rule):
    """(x @ y) * c -> x @ (y * c): the inner dimensions have two names, and are one."""

    dtypes = frozenset({DType.FLOAT})
    shapes = "x[a,k] y[p,n] c[]"

    def source(self, op: Op, x: Any, y: Any, c: Any) -> Any:
        return op.Mul(op.MatMul(x, y), c)

    def target(self, op: Op, x: Val, y: Val, c: Val) -> Any:
        return op.MatMul(x, op.Mul(y, c))


class NegateTwice(Rule):
    """-x -> x - (x + x), which is NaN for an infinite x."""

    dtypes = frozenset({DType.FLOAT})
    shapes = "x[n]"

    def source(self, op: Op, x: Any) -> Any:
        return op.Neg(x)

    def target(self, op: Op, x: Val) -> Any:
        return op.Sub(x, op.Add(x, x))


class SpreadingNegateTwice(NegateTwice):
    """The same, of a rule that says so."""

    may_add_nonfinite = True


def read(graph: str) -> Graph:
    return load(parse(graph)).graph


@pytest.mark.parametrize("dimension", ["k", "p"])
@pytest.mark.parametrize("seed", range(8))
def test_sizes_that_depend_on_each_other_are_drawn_together(dimension: str, seed: int) -> None:
    """One draw for each other dimension, and for none, with all others alike."""
    source = Source.of(Associate(), Draw(seed))
    wish = Kind(f"dimension {dimension}", "0")
    found = [p for turn in range(0, 16, 4) if (p := source.problem(wish, turn=turn)) is not None]
    assert any(p.sketch.dims["k"] == p.sketch.dims["p"] == 0 for p in found)
    assert all(len({*p.sketch.dims.values()} - {0}) <= 1 for p in found)


def test_neighbours_differ_in_one_thing() -> None:
    sketch = sketch_of(
        read("agraph (float[N,3] x) => (y) <int64[2] s = {-1, 1}> { a = Reshape(x, s) y = Softmax(a) }")
    )
    other, *found = neighbours(sketch)
    assert [n.op for n in other.nodes] == ["Reshape", "LogSoftmax"]
    told = [n.inputs[0].shape for n in found if n.inputs != sketch.inputs]
    assert told == [
        None,
        (0, 3),
        (1, 3),
        (2, 3),
        (None, 3),
        ("N", 0),
        ("N", 1),
        ("N", 4),
        ("N", "N"),
        ("N", None),
    ]
    given = [n.consts[0].array.tolist() for n in found if n.inputs == sketch.inputs]
    assert given == [[-2, 1], [0, 1], [-1, 0], [-1, 2]]
    # What is not told is known still.
    assert {n.hidden[0] for n in found if n.hidden} == {sketch.inputs[0]}


def test_what_is_not_told_follows_what_is() -> None:
    """Input 0 has 3 rows, which the graph is not told. Its full type never contradicts what the graph is told."""
    sketch = sketch_of(read("agraph (float[3,4] x, float[4,5] w) => (y) { a = MatMul(x, w) y = Neg(a) }"))
    told = replace(
        sketch,
        inputs=(TensorType(DType.FLOAT, (None, 4)), sketch.inputs[1]),
        hidden={0: sketch.inputs[0]},
    )
    assert resize_to(told, 4, 12, Draw(0)).hidden[0].shape == (3, 12)
    for seed in range(30):
        for change in _CHANGES:
            change(told, Draw(seed))  # a contradiction would raise
    with pytest.raises(ValueError, match="for the graph"):
        replace(told, inputs=(TensorType(DType.FLOAT, (None, 7)), sketch.inputs[1]))


_PROVE = """
import json, sys
from rewrite_rules import LIBRARY
from xrlflow.prover import prove
for rule in LIBRARY:
    if rule.name in sys.argv[1:]:
        print(json.dumps({**prove(rule).to_json(), "seconds": 0}))
"""


def test_a_seed_gives_one_certificate() -> None:
    """Whatever the order of Python's sets, which differs from process to process."""
    running = [
        subprocess.Popen(
            [sys.executable, "-c", _PROVE, "PushConvBeforeResize", "CancelTransposes"],
            env={**os.environ, "PYTHONHASHSEED": seed},
            stdout=subprocess.PIPE,
        )
        for seed in ("0", "1")
    ]
    first, second = (process.communicate()[0] for process in running)
    assert first.count(b"\n") == 2
    assert first == second


@pytest.mark.parametrize("seed", range(8))
def test_a_graph_for_one_size_is_found_usable(seed: int) -> None:
    graph = read(
        "agraph (float[N,3] x) => (y) <int64[2] s = {0, 3}> { a = Reshape<allowzero=1>(x, s) y = Neg(a) }"
    )
    problem = Problem(graph, {}, sketch_of(graph))
    rng = np.random.default_rng(seed)
    assert {"N": 0} in tried_bindings(problem, rng)
    assert usable(problem, rng)


def test_a_zero_that_copies_nothing_is_a_number() -> None:
    """What is 0 anyway does not show whether a Reshape copies it."""
    for rows, copies in ((0, False), (2, True)):
        graph = read(f"agraph (float[{rows},3] x) => (y) <int64[2] s = {{0, 3}}> {{ y = Reshape(x, s) }}")
        assert (Kind("Reshape input 1", "with a 0") in shown(graph, {"Reshape input 1"})) == copies


def test_errors_of_several_runs_are_compared_at_their_greatest() -> None:
    """One number may be right by luck on the left side."""
    lucky, usual = RuntimeResult(((0.5, 8.0),)), RuntimeResult(((6.0, 7.0),))
    assert lucky.bits == 3.0
    assert lucky.joined(usual).errors == ((6.0, 8.0),)


def test_what_a_reader_hides_may_spread() -> None:
    """exp(-inf) is 0, and the exponential of what the rule makes of it NaN: no other number, whatever is read."""
    graph = read("agraph (float[3] x) => (y) { a = Abs(x) b = Neg(a) y = Exp(b) }")
    for rule, wrong in ((NegateTwice(), True), (SpreadingNegateTwice(), False)):
        (case,), _ = find_cases(library_of(rule), Problem(graph, {}, sketch_of(graph)))
        with pytest.raises(Wrong, match="nan instead of 0") if wrong else nullcontext():
            assert check_floats(case, np.random.default_rng(0), rule) == 6


def test_in_turn() -> None:
    assert list(in_turn(iter("abc"), iter(""), iter("xy"))) == ["a", "x", "b", "y", "c"]


def test_each_problem_once() -> None:
    graphs = [read(f"agraph (float[{d}] x) => (y) {{ y = Neg(x) }}") for d in ("2", "N", "2")]
    assert len(list(different(build(sketch_of(g)) for g in graphs))) == 2


def test_numbers_that_a_rule_reads_are_not_drawn() -> None:
    """The proof draws the numbers of an opaque constant, unless a rule has read them: it may depend on them."""
    graph = read(
        "agraph (float[3] x) => (y) <float[3] c = {1,2,3}, float[3] d = {4,5,6}> { a = Mul(x, c) y = Add(a, d) }"
    )
    sketch = sketch_of(graph)
    problem = build(replace(sketch, consts=tuple(replace(c, opaque=True) for c in sketch.consts)))
    consts = problem.graph.leaves.consts
    values = list(problem.opaque)
    assert len(values) == 2
    assert all(consts[v].array is None for v in values)
    assert consts[values[0]].numpy().tolist() in ([1, 2, 3], [4, 5, 6])
    assert list(problem.opaque) == values[1:]
    drawn = draw_feeds(
        problem, {}, np.random.default_rng(0), drawn_floats(np.random.default_rng(0), "normal", 1.0)
    )
    assert values[1] in drawn
    assert values[0] not in drawn
