"""Substitutions measured where they stand: what is cut out of a graph, and what is made of the measurements."""

from __future__ import annotations

import math
import time
from typing import Any

import numpy as np
import onnx
import pytest

from tests.rules.harness import model
from xrlflow.backends.onnxruntime import open_model
from xrlflow.backends.protocol import BackendError
from xrlflow.cost.in_context import Gain, InContextBenchmark, excerpts
from xrlflow.ir import Edit, Graph
from xrlflow.onnxio import load
from xrlflow.ops.subgraph import NotStandalone
from xrlflow.rewrite import Library, Op, RewriteState, Rule, Val
from xrlflow.rewrite.state import build_edit

pytestmark = pytest.mark.measures


class ReplaceAddBySum(Rule):
    """add(x, y) -> sum(x, y)"""

    def source(self, op: Op, x: Val, y: Val) -> Any:
        return op.Add(x, y)

    def target(self, op: Op, x: Val, y: Val) -> Any:
        return op.Sum(x, y)


class ReplaceReluByMax(Rule):
    """relu(x) -> max(x, 0)"""

    def source(self, op: Op, x: Val) -> Any:
        return op.Relu(x)

    def target(self, op: Op, x: Val) -> Any:
        return op.Max(x, 0.0)


class ReplaceMatMulByGemm(Rule):
    """matmul(x, y) -> gemm(x, y)"""

    def source(self, op: Op, x: Val, y: Val) -> Any:
        return op.MatMul(x, y)

    def target(self, op: Op, x: Val, y: Val) -> Any:
        return op.Gemm(x, y)


def chain(length: int, dims: str = "4,8") -> onnx.ModelProto:
    """relu, exp, tanh, sigmoid, ... one after the other, with one Add in the middle that others read too."""
    ops = ["Relu", "Exp", "Tanh", "Sigmoid"]
    lines, last = [], "x"
    for i in range(length):
        lines.append(f"v{i} = {ops[i % 4]}({last})")
        last = f"v{i}"
    lines += [f"s = Add({last}, x)", "a = Neg(s)", "b = Abs(a)", "c = Ceil(b)", "y = Mul(c, s)"]
    return model(f"agraph (float[{dims}] x) => (float[{dims}] y) {{ {' '.join(lines)} }}")


def edit_of(proto: onnx.ModelProto, rule: Rule) -> tuple[Graph, Edit]:
    graph = load(proto).graph
    state = RewriteState.start(graph, Library([rule]))
    match = next(iter(state.candidates))  # an Add matches both ways round
    return graph, build_edit(graph, match)


def test_an_excerpt_reaches_two_nodes_far_on_both_sides() -> None:
    graph, edit = edit_of(chain(6), ReplaceAddBySum())
    before, after = excerpts(graph, edit, {})
    assert sorted(n.op for n in before.nodes) == ["Abs", "Add", "Exp", "Mul", "Neg", "Relu"]
    assert sorted(n.op for n in after.nodes) == ["Abs", "Exp", "Mul", "Neg", "Relu", "Sum"]
    # Abs is read by Ceil, which is left out, and Mul reads what Ceil makes.
    assert before.outputs == after.outputs
    assert {before.graph.producers[v].op for v in before.outputs} == {"Abs", "Mul"}


def test_an_excerpt_ends_at_products() -> None:
    proto = model(
        "agraph (float[4,8] x, float[8,8] w) => (float[4,8] y) {"
        " a = Exp(x) b = MatMul(a, w) c = Relu(b) d = MatMul(c, w) y = Tanh(d) }"
    )
    before, _ = excerpts(*edit_of(proto, ReplaceReluByMax()), {})
    assert [n.op for n in before.nodes] == ["MatMul", "Relu", "MatMul"]


def test_an_excerpt_goes_on_around_a_product_that_is_replaced() -> None:
    proto = model(
        "agraph (float[4,8] x, float[8,8] w) => (float[4,8] y) { a = Exp(x) b = MatMul(a, w) y = Relu(b) }"
    )
    before, after = excerpts(*edit_of(proto, ReplaceMatMulByGemm()), {})
    assert [n.op for n in before.nodes] == ["Exp", "MatMul", "Relu"]
    assert [n.op for n in after.nodes] == ["Exp", "Gemm", "Relu"]


def test_both_excerpts_compute_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    """On what they are measured with: the same inputs go into both."""
    graph, edit = edit_of(chain(6), ReplaceAddBySum())
    compared: list[list[Any]] = []

    def fake(models: list[bytes], feeds: dict[str, Any], **_: Any) -> Any:
        for each in models:
            with open_model(each, threads=1) as opened:
                compared.append(list(opened.run(feeds)))
        raise BackendError("seen enough")

    monkeypatch.setattr("xrlflow.cost.in_context.measure", fake)
    benchmark = InContextBenchmark(1)
    assert benchmark.gain(graph, edit) is None
    assert benchmark.refused == ["ReplaceAddBySum: seen enough"]
    before, after = compared
    assert len(before) == 2
    for a, b in zip(before, after, strict=True):
        np.testing.assert_array_equal(a, b)


def test_symbols_need_numbers() -> None:
    graph, edit = edit_of(chain(2, "N,8"), ReplaceAddBySum())
    assert InContextBenchmark(1).gain(graph, edit) is None
    gain = InContextBenchmark(1, {"N": 4}, seconds=0.05).gain(graph, edit)
    assert gain is not None
    assert math.isfinite(gain.seconds)


def test_what_is_too_large_is_left_out() -> None:
    readers = " ".join(f"r{i} = Exp(s)" for i in range(70))
    total = ", ".join(f"r{i}" for i in range(70))
    proto = model(f"agraph (float[4] x) => (float[4] y) {{ s = Relu(x) {readers} y = Sum({total}) }}")
    graph, edit = edit_of(proto, ReplaceReluByMax())
    with pytest.raises(NotStandalone, match="too many"):
        excerpts(graph, edit, {})
    assert InContextBenchmark(1).gain(graph, edit) is None


class Known(InContextBenchmark):
    """Gains by operator, and how often each was asked for."""

    def __init__(self, gains: dict[str, Gain | None]) -> None:
        super().__init__(1)
        self.gains = gains
        self.asked: list[str] = []

    def _measured(self, graph: Graph, edit: Edit, limit: float) -> Gain:
        self.asked.append(f"{edit.rule} {limit:g} s")
        gain = self.gains[edit.rule]
        if gain is None:
            raise NotStandalone("on purpose")
        return gain if limit < 0.5 or gain.sure else Gain(gain.seconds, True)


def survey(gains: dict[str, Gain | None], until: float = math.inf) -> tuple[dict[str, float], list[str]]:
    proto = model(
        "agraph (float[4,8] x) => (float[4,8] y) { a = Relu(x) b = Add(a, x) c = Relu(b) d = Add(c, a) y = Neg(d) }"
    )
    rules = [ReplaceAddBySum(), ReplaceReluByMax()]
    state = RewriteState.start(load(proto).graph, Library(rules), lambda graph, edit: 0.0)
    known = Known(gains)
    return known.survey(state, [r.name for r in rules], 0.0, until), known.asked


def test_alike_substitutions_are_measured_once_and_count_each() -> None:
    found, asked = survey(
        {"ReplaceAddBySum": Gain(2e-3, True), "ReplaceReluByMax": Gain(-1e-3, True)}, time.monotonic() + 60
    )
    assert found == {"ReplaceAddBySum": pytest.approx(4e-3), "ReplaceReluByMax": pytest.approx(-2e-3)}
    assert asked == ["ReplaceAddBySum 0.3 s", "ReplaceReluByMax 0.3 s"]


def test_steps_are_weighed_in_the_states_that_they_were_made_in() -> None:
    """The second Relu reads what the first Add's substitute makes; alike steps of different states are one kind."""
    proto = model(
        "agraph (float[4,8] x) => (float[4,8] y) { a = Relu(x) b = Add(a, x) c = Relu(b) d = Add(c, a) y = Neg(d) }"
    )
    state = RewriteState.start(load(proto).graph, Library([ReplaceAddBySum(), ReplaceReluByMax()]))
    steps = []
    while state.candidates:
        match = min(state.candidates, key=lambda m: m.key)
        steps.append((state, match))
        state = state.apply(match)
    assert len(steps) == 4
    known = Known({"ReplaceAddBySum": Gain(2e-3, True), "ReplaceReluByMax": Gain(-1e-3, True)})
    assert known.retrace(steps, math.inf) == {
        "ReplaceAddBySum": pytest.approx(4e-3), "ReplaceReluByMax": pytest.approx(-2e-3)
    }  # fmt: skip
    assert sorted(known.asked) == ["ReplaceAddBySum 0.3 s", "ReplaceReluByMax 0.3 s"]
    assert Known({}).retrace(iter(steps), time.monotonic()) == {}


def test_what_is_unsure_saves_nothing_and_what_cannot_be_measured_is_left_out() -> None:
    found, _ = survey(
        {"ReplaceAddBySum": Gain(2e-3, False), "ReplaceReluByMax": None}, time.monotonic() + 0.5
    )
    assert found == {"ReplaceAddBySum": 0.0}


def test_what_is_unsure_is_measured_longer_where_the_time_allows() -> None:
    found, asked = survey({"ReplaceAddBySum": Gain(1e-3, False), "ReplaceReluByMax": Gain(-9e-3, False)})
    assert asked[2:] == ["ReplaceReluByMax 0.9 s", "ReplaceAddBySum 0.9 s"]
    assert found == {"ReplaceAddBySum": pytest.approx(2e-3), "ReplaceReluByMax": pytest.approx(-18e-3)}


def test_a_survey_ends_in_time() -> None:
    assert survey({}, time.monotonic()) == ({}, [])


def test_a_shape_that_the_model_computes_fits() -> None:
    """The Reshape and the Expand read shapes that are computed from other inputs, outside of what is measured."""
    proto = model(
        "agraph (float[n,3,2,4] x, float[n,3] z) => (float[n,6,4] r, float[n,3,2,4] y) "
        "<int64[2] tail = {6, 4}, int64[2] inner = {2, 4}> "
        "{ b = Shape<start=0,end=1>(z) c = Concat<axis=0>(b, tail) m = Max(c, c) o = Max(m, m) q = Min(o, o) "
        "p = Shape(z) d = Concat<axis=0>(p, inner) "
        "s = Add(x, x) r = Reshape(s, q) y = Expand(s, d) }"
    )
    graph, edit = edit_of(proto, ReplaceAddBySum())
    benchmark = InContextBenchmark(1, {"n": 5}, seconds=0.05)
    gain = benchmark.gain(graph, edit)
    assert (gain is not None, benchmark.refused) == (True, [])


def test_sizes_that_are_computed_outside_are_computed_within() -> None:
    """The shape is joined near to what is measured, from pieces that are computed further away."""
    proto = model(
        "agraph (float[n,m,2,4] x, float[n,m] z) => (float[n,k,4] y) <int64[1] two = {2}> "
        "{ b = Shape<start=0,end=1>(z) a = Max(b, b) c = Min(a, a) e = Max(c, c) "
        "p = Shape<start=1,end=2>(z) t = Mul(p, two) f = Max(t, t) g = Min(f, f) "
        "h = Shape<start=3,end=4>(x) o = Concat<axis=0>(e, g, h) r = Reshape(x, o) y = Add(r, r) }"
    )
    graph, edit = edit_of(proto, ReplaceAddBySum())
    benchmark = InContextBenchmark(1, {"n": 5, "m": 3, "k": 6}, seconds=0.05)
    gain = benchmark.gain(graph, edit)
    assert (gain is not None, benchmark.refused) == (True, [])


class ReplaceExpByItsShape(Rule):
    """exp(x) -> exp(x) * size(x) / size(x), with the size from far away: only the right side reads it."""

    def source(self, op: Op, x: Val) -> Any:
        return op.Exp(x)

    def target(self, op: Op, x: Val) -> Any:
        far = op.graph.inputs[1]
        count = op.Cast(op.Size(op.val(far)), to=1)
        return op.Div(op.Mul(op.Exp(x), count), count)


def test_both_sides_have_the_inputs_of_either() -> None:
    proto = model("agraph (float[3,4] x, float[5] z) => (float[3,4] y, float[5] w) { y = Exp(x) w = Neg(z) }")
    graph, edit = edit_of(proto, ReplaceExpByItsShape())
    benchmark = InContextBenchmark(1, {}, seconds=0.05)
    gain = benchmark.gain(graph, edit)
    assert (gain is not None, benchmark.refused) == (True, [])
