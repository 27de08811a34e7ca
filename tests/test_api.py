"""The Python interface: what comes in, what is kept, what is refused, what is caught."""

from __future__ import annotations

import json
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper, numpy_helper

import xrlflow
from tests.rules.harness import assert_equivalent, model, random_feeds, run
from tests.runtime import recent
from xrlflow.backends import BackendError, RepeatedComparison
from xrlflow.backends.results import Verdict
from xrlflow.cost import Roofline
from xrlflow.ir import Edit, Graph
from xrlflow.pipeline.context import Clock
from xrlflow.rewrite import AnyRule, Captures, Op, Rule, Val, require
from xrlflow.search import Selection
from xrlflow.search.result import SearchNode

RNG = np.random.default_rng(0)
W = RNG.standard_normal((8, 8)).astype(np.float32)


def optimize(source: Any, **options: Any) -> xrlflow.Result:
    defaults: dict[str, Any] = {"search": "greedy", "cost": Roofline(), "measure": False, "threads": 1}
    return xrlflow.optimize(source, **(defaults | options))


def clumsy(rows: str = "N") -> onnx.ModelProto:
    """A model with operators to spare: two transposes and an identity."""
    return model(
        f"agraph (float[{rows},8] x) => (float[{rows},8] y) {{"
        " a = Transpose<perm=[1,0]>(x)\n b = Transpose<perm=[1,0]>(a)\n c = MatMul(b, w)\n"
        " d = Identity(c)\n y = Relu(d) }",
        w=W,
    )


def lean() -> onnx.ModelProto:
    """A model in which there is nothing to gain."""
    return model("agraph (float[N,8] x) => (float[N,8] y) { c = MatMul(x, w)\n y = Relu(c) }", w=W)


def ops(proto: onnx.ModelProto) -> list[str]:
    return [n.op_type for n in proto.graph.node]


def assert_same(a: onnx.ModelProto, b: onnx.ModelProto, feeds: dict[str, np.ndarray] | None = None) -> None:
    feeds = feeds or random_feeds(a)
    assert_equivalent(a, b, feeds)


# --- in and out ---


def test_path_bytes_and_proto_give_the_same(tmp_path: Path) -> None:
    proto = clumsy()
    file = tmp_path / "clumsy.onnx"
    onnx.save(proto, file)
    results = [optimize(source) for source in (file, str(file), proto.SerializeToString(), proto)]
    for result in results:
        assert not result.returned_original
        assert result.report.verified
        assert result.speedup is None
        assert ops(result.model) == ["MatMul", "Relu"]
        assert result.model == results[0].model
    assert [s.rule for s in results[0].trace] == [s.rule for s in results[-1].trace]
    assert proto == clumsy()  # the caller's own is not touched


def test_what_is_saved_is_the_model(tmp_path: Path) -> None:
    result = optimize(clumsy())
    result.save(tmp_path / "fast.onnx")
    assert onnx.load(tmp_path / "fast.onnx") == result.model
    onnx.checker.check_model(result.model, full_check=True)
    assert_same(clumsy(), result.model)
    assert [p.name for p in tmp_path.iterdir()] == ["fast.onnx"]


def test_nothing_found_gives_an_equal_model(tmp_path: Path) -> None:
    proto = lean()
    proto.graph.node[0].name, proto.graph.node[0].doc_string = "product", "as it was"
    result = optimize(proto)
    assert result.returned_original
    assert result.model == proto
    assert result.trace == ()
    data = proto.SerializeToString()
    optimize(data).save(tmp_path / "same.onnx")
    assert (tmp_path / "same.onnx").read_bytes() == data


@pytest.mark.parametrize("source", [lean, clumsy])
def test_external_data(tmp_path: Path, source: Any) -> None:
    """The original, or a result, has a data file of its own."""
    proto = source()
    proto.graph.ClearField("initializer")
    wide = RNG.standard_normal((8, 8)).astype(np.float32)
    proto.graph.initializer.append(numpy_helper.from_array(wide, "w"))
    here, there = tmp_path / "here", tmp_path / "there"
    here.mkdir()
    there.mkdir()
    onnx.save(proto, here / "m.onnx", save_as_external_data=True, location="weights.bin", size_threshold=0)
    result = optimize(here / "m.onnx")
    assert result.returned_original == (source is lean)
    result.save(there / "out.onnx")
    if result.returned_original:
        (data,) = there.glob("out.onnx.*.data")
        assert data.read_bytes() == (here / "weights.bin").read_bytes()
        assert onnx.load(there / "out.onnx") == onnx.load(here / "m.onnx")
    assert_same(onnx.load(here / "m.onnx"), onnx.load(there / "out.onnx"))
    assert_same(onnx.load(here / "m.onnx"), result.model)


def test_fixed_shapes_are_all_that_changes_in_an_original() -> None:
    proto = lean()
    result = optimize(proto, shapes={"x": (4, 8)}, fix_shapes=True)
    assert result.returned_original
    expected = lean()
    for value in (expected.graph.input[0], expected.graph.output[0]):
        value.type.tensor_type.shape.dim[0].dim_value = 4
    assert result.model == expected


def test_rules_see_shapes_only_when_they_are_fixed() -> None:
    """The first four rows are all of x only if it has four."""
    proto = model(
        "agraph (float[N,8] x) => (float[M,8] y) { a = Slice(x, zero, four, zero)\n y = Relu(a) }",
        zero=np.int64([0]),
        four=np.int64([4]),
    )
    free = optimize(proto, shapes={"x": (4, 8)})
    fixed = optimize(proto, shapes={"x": (4, 8)}, fix_shapes=True)
    assert ops(free.model) == ["Slice", "Relu"]
    assert free.model.graph.input == proto.graph.input
    assert ops(fixed.model) == ["Relu"]
    assert [d.dim_value for d in fixed.model.graph.input[0].type.tensor_type.shape.dim] == [4, 8]


def test_what_the_file_says_is_kept() -> None:
    proto = clumsy()
    proto.producer_name, proto.producer_version, proto.domain = "tool", "1.2", "org.example"
    proto.model_version, proto.doc_string, proto.graph.doc_string = 7, "a model", "a graph"
    proto.metadata_props.add(key="author", value="me")
    proto.graph.input[0].doc_string = "pixels"
    proto.graph.input.append(helper.make_tensor_value_info("unused", TensorProto.FLOAT, ["M", 3]))
    result = optimize(proto).model
    assert ops(result) == ["MatMul", "Relu"]
    for name in (
        "producer_name",
        "producer_version",
        "domain",
        "model_version",
        "doc_string",
        "metadata_props",
    ):
        assert getattr(result, name) == getattr(proto, name), name
    for name in ("name", "doc_string", "input", "output"):
        assert getattr(result.graph, name) == getattr(proto.graph, name), name
    assert result.graph.input[0].type.tensor_type.shape.dim[0].dim_param == "N"


def test_overridable_initialisers_stay_overridable() -> None:
    proto = model(
        "agraph (float[N,8] x, float[8] b) => (float[N,8] y) { a = Identity(x)\n c = MatMul(a, w)\n y = Add(c, b) }",
        w=W,
        b=np.zeros(8, np.float32),  # x + 0 is x, unless the caller says otherwise
    )
    result = optimize(proto).model
    assert "Identity" not in ops(result)
    x = RNG.standard_normal((3, 8)).astype(np.float32)
    for feeds in ({"x": x}, {"x": x, "b": np.arange(8, dtype=np.float32)}):
        assert_same(proto, result, feeds)


# --- what passes through ---


def test_custom_operators_are_carried_through() -> None:
    proto = clumsy()
    proto.graph.node.insert(3, helper.make_node("Warp", ["c"], ["d0"], domain="my.ops", gain=1.5))
    proto.graph.node[4].input[0] = "d0"
    proto.opset_import.append(helper.make_opsetid("my.ops", 1))
    result = optimize(proto, verify=False).model
    assert ops(result) == ["MatMul", "Warp", "Relu"]
    warp = result.graph.node[1]
    assert (warp.domain, warp.attribute[0].f) == ("my.ops", 1.5)
    assert any(o.domain == "my.ops" for o in result.opset_import)


def test_sequences_pass_through() -> None:
    proto = model(
        "agraph (float[2,8] x) => (float[2,8] y, seq(float[2,8]) s) {"
        " i = Identity(x)\n s = SequenceConstruct(i, x)\n k = Constant<value_int=1>()\n y = SequenceAt(s, k) }"
    )
    result = optimize(proto)
    assert "SequenceConstruct" in ops(result.model)
    feeds = random_feeds(proto)
    (y, s), (y2, s2) = run(proto, feeds), run(result.model, feeds)
    np.testing.assert_array_equal(y, y2)
    assert len(s) == len(s2) == 2


@recent
def test_quantised_pairs_stay_together() -> None:
    proto = model(
        "agraph (float[2,8] x) => (float[2,8] y) {"
        " a = Identity(x)\n q = QuantizeLinear(a, s, z)\n d = DequantizeLinear(q, s, z)\n"
        " wd = DequantizeLinear(wq, s, zw)\n m = MatMul(d, wd)\n"
        " p = QuantizeLinear(m, s, z)\n y = DequantizeLinear(p, s, z) }",
        s=np.float32(0.05),
        z=np.uint8(128),
        zw=np.int8(0),
        wq=RNG.integers(-100, 100, (8, 8)).astype(np.int8),
    )
    result = optimize(proto).model
    kept = [op for op in ops(proto) if op != "Identity"]
    assert sorted(ops(result)) == sorted(kept)
    assert [t.data_type for t in result.graph.initializer if t.name == "wq"] == [TensorProto.INT8]
    assert_same(proto, result)


def body(result: onnx.ModelProto, op: str, name: str) -> list[str]:
    node = next(n for n in result.graph.node if n.op_type == op)
    graph = next(a.g for a in node.attribute if a.name == name)
    return [n.op_type for n in graph.node]


def test_control_flow_bodies_are_optimised() -> None:
    proto = model(
        "agraph (bool c, int64 n, float[2,8] x) => (float[2,8] y, float[2,8] z) {"
        " y = If(c)<then_branch = g1 () => (float[2,8] o) { a = Neg(x)\n b = Neg(a)\n o = Sigmoid(b) },"
        " else_branch = g2 () => (float[2,8] p) { p = Abs(x) }>\n"
        " t = Constant<value=bool {1}>()\n"
        " z = Loop(n, t, x)<body = g3 (int64 i, bool k, float[2,8] v) => (bool ko, float[2,8] vo) {"
        "  ko = Identity(k)\n u = Transpose<perm=[1,0]>(v)\n w = Transpose<perm=[1,0]>(u)\n vo = Tanh(w) }> }"
    )
    result = optimize(proto)
    assert body(result.model, "If", "then_branch") == ["Sigmoid"]
    assert [op for op in body(result.model, "Loop", "body") if op != "Identity"] == ["Tanh"]
    assert result.report.substitutions["CancelInvolution"] == 1
    assert result.report.substitutions["CancelTransposes"] == 1
    assert result.report.nodes_after < result.report.nodes_before
    for condition in (True, False):
        x = RNG.standard_normal((2, 8)).astype(np.float32)
        assert_same(proto, result.model, {"c": np.asarray(condition), "n": np.asarray(3), "x": x})


# --- stopping ---


def chain(length: int) -> onnx.ModelProto:
    """Many pairs of transposes, a substitution each."""
    lines, at = [], "x"
    for i in range(length):
        lines.append(
            f"a{i} = Transpose<perm=[1,0]>({at})\n b{i} = Transpose<perm=[1,0]>(a{i})\n c{i} = Sin(b{i})"
        )
        at = f"c{i}"
    return model("agraph (float[N,8] x) => (float[N,8] y) { " + "\n".join(lines) + f"\n y = Relu({at}) }}")


@pytest.mark.parametrize("search", ["greedy", "taso", "random", "xrlflow"])
def test_an_interrupted_search_keeps_the_best_so_far(search: str) -> None:
    def listener(phase: str, done: int, total: int, note: str) -> None:
        if phase == "search" and done == 3:
            raise KeyboardInterrupt

    result = optimize(chain(8), search=search, listener=listener)
    # Before the agent searches, there is what greedy search finds, and that is kept.
    steps = 8 if search == "xrlflow" else 3
    assert result.report.expanded == steps
    assert len(result.trace) == steps
    assert "interrupted" in " ".join(result.report.notes)
    assert result.report.verified
    assert_same(chain(8), result.model)


@pytest.mark.parametrize("interrupting", [True, False])
def test_an_interrupt_hurries_what_follows(interrupting: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whoever interrupts does not wait for the rest of the time limit, here hours."""
    seconds = []

    def listener(phase: str, done: int, total: int, note: str) -> None:
        if interrupting and phase == "search" and done == 3:
            raise KeyboardInterrupt

    def selected(base: Any, proposals: Any, compare: Any, search: Any, deadline: float, *_: Any) -> Selection:
        seconds.append(deadline - time.monotonic())
        return Selection(None, (), False)

    monkeypatch.setattr("xrlflow.pipeline.choose.select", selected)
    result = optimize(chain(8), measure=True, time_limit=1e4, listener=listener)
    assert ("interrupted: the best so far is kept" in result.report.notes) == interrupting
    assert [s < 100.0 for s in seconds] == [interrupting]


def clock(begin: float, limit: float) -> Clock:
    """The clock of an optimisation of a model of 20 ms that takes 0.3 s to load, begun so long ago."""
    now = time.monotonic()
    return Clock(now - begin, now - begin + limit, latency=0.02, loading=0.3)


@pytest.mark.parametrize("begin", [1.0, 100.0, 3000.0])
def test_however_late_an_interrupt_comes_there_is_time_to_compare(begin: float) -> None:
    late = clock(begin, 3600.0)
    late.hurry()
    now = time.monotonic()
    left = late.budget
    assert left.select_until - now == pytest.approx(2 * left.each_comparison, abs=1.0)
    assert left.end - left.select_until == pytest.approx(left.verification + left.comparison)


def test_an_interrupt_gives_no_more_time_than_there_was() -> None:
    late = clock(59.0, 60.0)
    before = late.deadline
    late.hurry()
    assert late.deadline == before


def test_a_second_interrupt_ends_it(monkeypatch: pytest.MonkeyPatch) -> None:
    def listener(phase: str, done: int, total: int, note: str) -> None:
        if phase == "search" and done == 3:
            raise KeyboardInterrupt

    monkeypatch.setattr("xrlflow.pipeline.choose.select", lambda *_: Selection(None, (), interrupted=True))
    with pytest.raises(KeyboardInterrupt):
        optimize(chain(8), measure=True, listener=listener)
    result = optimize(chain(8), measure=True)
    assert "interrupted while whole models were compared: the best so far is kept" in result.report.notes


def test_an_interrupt_within_the_selection_is_its_business(monkeypatch: pytest.MonkeyPatch) -> None:
    """Greedy search keeps what it has, but it is asked for one proposal of many."""

    def selected(base: SearchNode, proposals: Any, compare: Any, search: Any, *_: Any) -> Selection:
        monkeypatch.setattr("xrlflow.rewrite.RewriteState.apply", interrupted)
        search(base, frozenset(base.state.library.rules))
        return Selection(None, ())

    def interrupted(*_: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("xrlflow.pipeline.choose.select", selected)
    with pytest.raises(KeyboardInterrupt):
        optimize(chain(8), measure=True)


def test_the_time_limit_ends_a_search() -> None:
    """Without it this one would go to and fro between MatMul with Add and Gemm for ever."""
    proto = model(
        "agraph (float[4,8] x) => (float[4,8] y) { a = MatMul(x, w)\n y = Add(a, w0) }", w=W, w0=W[0]
    )
    result = optimize(proto, search="random", budget=10**12, time_limit=1.5)
    assert 0 < result.report.expanded < 10**12
    assert_same(proto, result.model)


@pytest.mark.parametrize("verdict", list(Verdict))
def test_random_edits_are_kept_only_if_they_are_faster(
    verdict: Verdict, monkeypatch: pytest.MonkeyPatch
) -> None:
    compared = RepeatedComparison(None, None, None, None, 1.0, 1, verdict)
    monkeypatch.setattr("xrlflow.pipeline.confirm.decided", lambda *_: compared)
    result = optimize(chain(2), search="random", budget=2, measure=True, verify=False)
    assert result.returned_original is (verdict is not Verdict.FASTER)


# --- what grows is refused ---


class UseTwoWeights(Rule):
    """x @ w -> x @ [w, half of w], its first columns  for constant w: right, and wasteful."""

    shapes = "x[m,k] w[k,n]:const"

    def source(self, op: Op, x: Any, w: Any) -> Any:
        return op.MatMul(x, w)

    def where(self, m: Captures, x: Val, w: Val) -> None:
        require(w.size(1) == 256, "done already")

    def target(self, op: Op, x: Val, w: Val) -> Any:
        half = op.Slice(w, [0], [100], [1])
        return op.Split(op.MatMul(x, op.Concat(w, half, axis=1)), axis=1, sizes=[256, 100])[0]


def use(monkeypatch: pytest.MonkeyPatch, *rules: AnyRule) -> None:
    monkeypatch.setattr("xrlflow.pipeline.library.LIBRARY", rules)


class Cheap:
    """A cost model that likes large weights."""

    name = "cheap"
    measured = False

    def cost(self, graph: Graph) -> float:
        return 1.0 - 0.1 * sum(n.op == "Split" for n in graph.nodes())

    def delta(self, graph: Graph, edit: Edit) -> float:
        def splits(nodes: Sequence[Any]) -> int:
            return sum(n.op == "Split" for n in nodes)

        return 0.1 * (splits(edit.removed) - splits(edit.added))


def test_growth_is_capped(monkeypatch: pytest.MonkeyPatch) -> None:
    use(monkeypatch, UseTwoWeights())
    proto = model(
        "agraph (float[4,2048] x) => (float[4,256] y) { y = MatMul(x, w) }",
        w=RNG.standard_normal((2048, 256)).astype(np.float32),
    )
    refused = optimize(proto, cost=Cheap())
    assert refused.returned_original
    assert "1.2 times" in " ".join(refused.report.notes)
    grown = optimize(proto, cost=Cheap(), max_growth=1.5)
    assert not grown.returned_original
    assert 1.3 * proto.ByteSize() < grown.model.ByteSize() < 1.5 * proto.ByteSize()
    assert_same(proto, grown.model)


def test_other_providers_are_refused() -> None:
    with pytest.raises(BackendError, match="CPU"):
        optimize(clumsy(), providers=["CUDAExecutionProvider"])


@pytest.mark.parametrize(
    ("option", "words"),
    [
        ({"search": "magic"}, "xrlflow, taso, greedy, random"),
        ({"cost": "guess"}, "roofline"),
        ({"backend": "tpu"}, "onnxruntime"),
        ({"budget": -1}, "negative"),
        ({"time_limit": 0}, "seconds"),
        ({"alpha": 0.9}, "alpha"),
        ({"max_growth": 0}, "max_growth"),
    ],
)
def test_options_that_make_no_sense(option: dict[str, Any], words: str) -> None:
    with pytest.raises(ValueError, match=words):
        optimize(clumsy(), **option)


def test_compare() -> None:
    compared = xrlflow.compare(
        clumsy(), searches=("greedy", "taso"), cost=Roofline(), measure=False, threads=1
    )
    assert [r.search for r in compared.reports] == ["greedy", "taso"]
    assert all(r.verified and r.nodes_after == 2 for r in compared.reports)
    json.dumps([r.to_json() for r in compared.reports])
