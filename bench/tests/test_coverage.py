"""The bench that measures how many substitutions of other optimizers the library covers."""

from __future__ import annotations

import importlib.util
import json
import sys
from pathlib import Path

import numpy as np
import pytest

from rewrite_rules.merge import AssociateMatMulsRight
from rewrite_rules.slices import MergeConcats, PullUnaryOutOfConcat
from xrlflow.onnxio import load
from xrlflow.rewrite import Library

pytestmark = pytest.mark.corpus

BENCH = Path(__file__).resolve().parents[2] / "bench" / "coverage.py"


@pytest.fixture(scope="module")
def coverage():
    spec = importlib.util.spec_from_file_location("bench_coverage", BENCH)
    module = importlib.util.module_from_spec(spec)
    sys.modules["bench_coverage"] = module  # its dataclasses look for it
    spec.loader.exec_module(module)
    yield module
    del sys.modules["bench_coverage"]


LIBRARY = Library([AssociateMatMulsRight(), PullUnaryOutOfConcat(), MergeConcats()])


def op(name, *inputs, **attrs):
    return {"op": name, "inputs": list(inputs), "attrs": attrs}


def joined(axis, *inputs, rank=2):
    return op("concat", *inputs, axis=axis, num_dim=rank, num_inputs=len(inputs))


def conv(*inputs, activation="none"):
    sizes = {"kernel_h": 3, "kernel_w": 3, "stride_h": 1, "stride_w": 1, "pad": "same"}
    return op("conv2d", *inputs, activation=activation, **sizes)


RULES = {
    "associate": (
        [op("matmul", "in1", "in4"), op("matmul", "#0.0", "in5")],
        [op("matmul", "in4", "in5"), op("matmul", "in1", "#0.0")],
        [["#1.0", "#1.0"]],
    ),
    "fused": (
        [conv("in7", "in10"), op("relu", "#0.0")],
        [conv("in7", "in10", activation="relu")],
        [["#1.0", "#0.0"]],
    ),
    "relu": (
        [op("relu", "in1"), op("relu", "in2"), joined(1, "#0.0", "#1.0")],
        [joined(1, "in1", "in2"), op("relu", "#0.0")],
        [["#2.0", "#1.0"]],
    ),
    "uphill": (
        [op("relu", "in1"), op("relu", "in2")],
        [
            joined(0, "in1", "in2"),
            op("relu", "#0.0"),
            op("split", "#1.0", num_outputs=2, axis=0),
        ],
        [["#0.0", "#2.0"], ["#1.0", "#2.1"]],
    ),
    "flat": (
        [joined(1, "in10", "in11", rank=4), joined(1, "in12", "#0.0", rank=4), conv("#1.0", "#1.0")],
        [joined(1, "in10", "in12", rank=4), joined(1, "in11", "#0.0", rank=4), conv("#1.0", "#1.0")],
        [["#2.0", "#2.0"]],
    ),
    "missed": (
        [op("ewadd", "in1", "in2"), op("ewadd", "in3", "#0.0")],
        [op("ewadd", "in1", "in3"), op("ewadd", "in2", "#0.0")],
        [["#1.0", "#1.0"]],
    ),
    "wrong": (
        [op("matmul", "in1", "in4")],
        [op("matmul", "in4", "in1")],
        [["#0.0", "#0.0"]],
    ),
    "shapeless": (
        [joined(0, "in1", "in1"), op("ewadd", "in1", "#0.0")],
        [op("ewadd", "in1", "in1")],
        [["#1.0", "#0.0"]],
    ),
}


@pytest.fixture(scope="module")
def substitutions(coverage, tmp_path_factory):
    path = tmp_path_factory.mktemp("rules") / "rules.json"
    rules = [{"id": k, "source": s, "target": t, "outputs": o} for k, (s, t, o) in RULES.items()]
    path.write_text(json.dumps({"about": "a few", "rules": rules}))
    return {s.name: s for s in coverage.substitutions(path)}


@pytest.mark.parametrize(
    ("name", "kind", "steps"),
    [
        ("associate", "reached", 1),
        ("fused", "identical", 0),
        ("relu", "reached", 1),
        ("uphill", "cheaper", 0),
        ("flat", "cheaper", 1),
        ("missed", "missed", 4),
    ],
)
def test_outcomes(coverage, substitutions, name, kind, steps):
    row = coverage.measure(substitutions[name], LIBRARY)
    assert (row.worst.kind, row.worst.steps) == (kind, steps)
    assert row.covered == (kind != "missed")
    assert not row.wrong
    assert len(row.outcomes) == 3
    if kind == "reached":
        assert len(row.worst.rules) == steps


@pytest.mark.parametrize("name", ["wrong", "shapeless"])
def test_wrong_substitutions(coverage, substitutions, name):
    row = coverage.measure(substitutions[name], LIBRARY)
    assert row.wrong
    assert not row.covered
    assert row.note


def test_summary(coverage, substitutions):
    rows = [coverage.measure(s, LIBRARY) for n, s in substitutions.items() if n in ("fused", "relu", "wrong")]
    found = coverage.summary(rows)
    assert (found["substitutions"], found["covered"], found["identical"], found["reached"]) == (3, 2, 1, 1)
    assert found["missed_names"] == ["wrong"]
    json.dumps([r.to_json() for r in rows])


def test_formulas(coverage, substitutions):
    sub = substitutions["relu"]
    assert coverage.readable(sub.left, ["#2.0"]) == "[relu(x1)|relu(x2)]"
    assert coverage.readable(sub.right, ["#1.0"]) == "relu([x1|x2])"
    assert coverage.readable(substitutions["associate"].left, ["#1.0"]) == "(x1 @ x4) @ x5"
    assert coverage.readable(substitutions["fused"].right, ["#0.0"]) == "relu(conv(x7, x10))"


def test_dimensions(coverage):
    dims = coverage.Dimensions()
    dims.equate(("a", "b"), ("c", "b"))
    assert dims.resolve(("a",)) == dims.resolve(("c",))
    dims.equate(("s",), ("a", "d"))
    assert dims.resolve(("s", "3")) == (*dims.resolve(("a",)), "d", "3")
    with pytest.raises(coverage.Unsolvable):
        dims.equate(("d", "e"), ("d",))
    with pytest.raises(coverage.Unsolvable):
        dims.equate(("3",), ("5",))


def test_graphs_are_compared_up_to_commutation(coverage):
    head = "agraph (float[2,3] x, float[2,3] z) => (float[2,3] y) "

    def graph(text, **data):
        return coverage.from_text(head + text, {}, data)

    right = graph("{{ a = Sub(x, z) y = Add(a, w) }}", w=np.full(3, 2.0, np.float32))
    compared = coverage.Comparison(right)
    assert compared.holds(graph("{{ a = Sub(x, z) y = Add(v, a) }}", v=np.full(3, 2.0, np.float32)))
    assert not compared.holds(graph("{{ a = Sub(z, x) y = Add(v, a) }}", v=np.full(3, 2.0, np.float32)))
    assert not compared.holds(graph("{{ a = Sub(x, z) y = Add(v, a) }}", v=np.full(3, 2.5, np.float32)))
    assert not compared.holds(graph("{{ a = Sub(x, z) b = Sub(x, z) y = Add(b, a) }}"))


def test_written_substitutions_hold(coverage):
    groups = set()
    for group, entry in coverage.written():
        groups.add(group)
        for sizes in ({"n": 1, "c": 8, "m": 4, "p": 3, "h": 5, "w": 6, "a": 4, "k": 3, "q": 2},):
            data = entry.data(sizes, np.random.default_rng(1))
            left = coverage.from_text(entry.left, sizes, data)
            for right in entry.rights:
                assert not coverage.differs(left, coverage.from_text(right, sizes, data)), entry.name
    assert groups == set(coverage.TITLES)


def test_grouped_convolutions_are_built(coverage, tmp_path):
    rule = {
        "id": 1,
        "source": [conv("in7", "in10"), conv("in8", "in11"), joined(1, "#0.0", "#1.0", rank=4)],
        "target": [
            joined(1, "in7", "in8", rank=4),
            joined(0, "in10", "in11", rank=4),
            conv("#0.0", "#1.0"),
        ],
        "outputs": [["#2.0", "#2.0"]],
    }
    path = tmp_path / "rules.json"
    path.write_text(json.dumps({"rules": [rule]}))
    (sub,) = coverage.substitutions(path)
    shapes = coverage.solve(sub)
    assert shapes.groups
    sizes = {u: 2 + i for i, u in enumerate(shapes.unknowns)}
    graphs = [load(coverage.build(sub, shapes, s, sizes, (), "a")).graph for s in (0, 1)]
    assert not coverage.differs(*graphs)
    assert [n.attrs.get("group") for n in graphs[1].nodes() if n.op == "Conv"] == [2]
