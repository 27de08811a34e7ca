"""Operators measured alone: which are, which are not, and that the database is asked first."""

import math
import subprocess
import sys
from pathlib import Path
from random import Random
from typing import Any

import numpy as np
import pytest

from tests.cost.graphs import Builder, random_edit, random_graph, t
from xrlflow.cost.database import Database
from xrlflow.cost.machine import Machine
from xrlflow.cost.microbench import Sample, time_node
from xrlflow.cost.profiled import Profiled
from xrlflow.cost.roofline import Roofline
from xrlflow.ir import Attr, Attrs, Body, DType, Graph, TensorType, Value, apply_edit
from xrlflow.ops.subgraph import NotStandalone

pytestmark = pytest.mark.measures

MACHINE = Machine.reference()


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "m.sqlite"


def profiled(path: Path, **options: object) -> Profiled:
    options.setdefault("tolerance", math.inf)
    return Profiled(MACHINE, database=Database(path), per_operator=0.001, **options)  # type: ignore[arg-type]


def one(op: str, ins: list[TensorType], *outs: TensorType, **attrs: Attr) -> Graph:
    b = Builder()
    values = [
        b.weight(*(d for d in x.shape or () if isinstance(d, int))) if x.const else b.input(x) for x in ins
    ]
    node = b.node(op, values, *outs, **attrs)
    return b.graph(*node.outputs)


MEASURED = {
    "product": one("MatMul", [t(4, 8), t(8, 16, const=True)], t(4, 16)),
    "convolution": one("Conv", [t(1, 16, 8, 8), t(16, 16, 3, 3, const=True)], t(1, 16, 6, 6)),
    "grouped": one("Conv", [t(1, 8, 8, 8), t(8, 4, 3, 3, const=True)], t(1, 8, 6, 6), group=2),
    "index": one("Gather", [t(5, 8), t(3, 2, dtype=DType.INT64)], t(3, 2, 8)),
    "mask": one("Where", [t(4, dtype=DType.BOOL), t(4), t(4)], t(4)),
    "recurrent": one(
        "LSTM",
        [t(3, 1, 4), t(1, 16, 4, const=True), t(1, 16, 4, const=True)],
        t(3, 1, 1, 4),
        t(1, 1, 4),
        t(1, 1, 4),
        hidden_size=4,
    ),
    "contributed": one("com.microsoft::Gelu", [t(4, 8)], t(4, 8)),
    "halves": one("Add", [t(4, dtype=DType.FLOAT16)] * 2, t(4, dtype=DType.FLOAT16)),
    "quantised": one(
        "MatMulInteger", [t(2, 4, dtype=DType.UINT8), t(4, 3, dtype=DType.INT8)], t(2, 3, dtype=DType.INT32)
    ),
}


@pytest.mark.parametrize("name", MEASURED)
def test_an_operator_is_measured_once_and_then_read(path: Path, name: str) -> None:
    graph = MEASURED[name]
    first = profiled(path)
    cost = first.cost(graph)
    assert cost > 0
    assert (first.counts.measured, first.counts.remembered, first.counts.modelled.total()) == (1, 0, 0)
    assert first.cost(graph) == cost
    second = profiled(path)
    assert second.cost(graph) == cost
    assert (second.counts.measured, second.counts.remembered) == (0, 1)


def test_thread_counts_are_measured_apart(path: Path) -> None:
    graph = MEASURED["product"]
    profiled(path).cost(graph)
    other = Profiled(
        Machine(**{f: getattr(MACHINE, f) for f in Machine.__dataclass_fields__} | {"threads": 1}),
        database=Database(path),
        per_operator=0.001,
        tolerance=math.inf,
    )
    other.cost(graph)
    assert (other.counts.measured, other.counts.remembered) == (1, 0)


def test_constants_that_steer_an_operator_are_passed_and_kept_apart(path: Path) -> None:
    model = profiled(path)

    def reduce(axis: int) -> Graph:
        b = Builder()
        x = b.input(t(6, 6))
        b.last += 10 * axis
        return b.graph(b.node("ReduceMean", [x, b.ints(axis)], t(6), keepdims=0).id)

    model.cost(reduce(0))
    model.cost(reduce(1))
    assert (model.counts.measured, model.counts.modelled.total()) == (2, 0)
    again = profiled(path)
    again.cost(reduce(1))
    assert (again.counts.measured, again.counts.remembered) == (0, 1)


def test_a_slice_takes_the_part_it_should(path: Path) -> None:
    b = Builder()
    x = b.input(t(10, 6))
    y = b.node("Slice", [x, b.ints(2), b.ints(7), b.ints(0)], t(5, 6))
    model = profiled(path)
    model.cost(b.graph(y.id))
    assert model.counts.measured == 1
    wrong = b.node("Slice", [x, b.ints(2), b.ints(7), b.ints(0)], t(9, 6))
    with pytest.raises(NotStandalone, match=r"alone gives \[\(5, 6\)\] and not \[\(9, 6\)\]"):
        time_node(
            wrong,
            [t(10, 6), *[t(1, dtype=DType.INT64, const=True)] * 3],
            {v: b.leaves.consts[v].numpy() for v in wrong.inputs[1:]},
            threads=1,
            time_limit=0.001,
        )


def test_views_are_not_measured(path: Path) -> None:
    model = profiled(path)
    graph = one("Reshape", [t(4, 8), t(1, dtype=DType.INT64)], t(32))
    assert model.cost(graph) == MACHINE.overhead
    assert (model.counts.measured, model.counts.modelled.total()) == (0, 0)


@pytest.mark.parametrize(
    ("graph", "reason"),
    [
        (one("Relu", [t("N", 8)], t("N", 8)), "dimension"),
        (one("Relu", [TensorType(DType.FLOAT, None)], TensorType(DType.FLOAT, None)), "dimension"),
        (one("my.domain::Strange", [t(8)], t(8)), "Strange"),
        (one("StringNormalizer", [t(8, dtype=DType.STRING)], t(8, dtype=DType.STRING)), "StringNormalizer"),
        # The shape that it is to take is a number of the run's, so that alone it would do something else.
    ],
)
def test_what_cannot_be_measured_is_modelled_and_counted(path: Path, graph: Graph, reason: str) -> None:
    model = profiled(path)
    assert model.cost(graph) == Roofline(MACHINE).cost(graph)
    assert model.counts.measured == 0
    [(why, times)] = model.counts.modelled.items()
    assert (reason in why, times) == (True, 1)
    assert reason in str(model.counts)


def test_an_operator_whose_shape_the_model_computes_is_measured(path: Path) -> None:
    model = profiled(path)
    model.cost(one("Expand", [t(1, 8), t(2, dtype=DType.INT64)], t(5, 8)))
    assert model.counts.measured == 1


def test_a_bound_dimension_is_measured(path: Path) -> None:
    model = profiled(path, bindings={"N": 3})
    model.cost(one("Relu", [t("N", 8)], t("N", 8)))
    assert model.counts.measured == 1


def test_when_the_time_is_over_the_rest_is_modelled(path: Path) -> None:
    model = profiled(path, time_budget=0.0)
    assert model.cost(MEASURED["product"]) == Roofline(MACHINE).cost(MEASURED["product"])
    assert "time for measuring was over" in str(model.counts)
    profiled(path).cost(MEASURED["product"])
    model = profiled(path, time_budget=0.0)
    model.cost(MEASURED["product"])
    assert (model.counts.remembered, model.counts.modelled.total()) == (1, 0)


def test_what_was_measured_beside_others_is_repeated_and_not_kept(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls = 0

    def disturbed(*args: Any, **options: Any) -> Sample:
        nonlocal calls
        calls += 1
        return Sample(5e-3, (4 - calls) * 1e-3, 9e-3, 10, waiting=0.3)

    monkeypatch.setattr("xrlflow.cost.profiled.time_node", disturbed)
    model = profiled(path, tolerance=0.1)
    monkeypatch.setattr(model, "_call", 1e-4)
    assert model.cost(MEASURED["mask"]) == pytest.approx(1e-3 - 1e-4 + MACHINE.overhead)
    assert calls == 3
    assert (model.counts.measured, model.counts.disturbed) == (1, 1)
    assert "others used the processors" in str(model.counts)
    monkeypatch.undo()
    again = profiled(path)
    again.cost(MEASURED["mask"])
    assert (again.counts.measured, again.counts.disturbed, again.counts.remembered) == (1, 0, 0)


@pytest.mark.skipif(not Path("/proc/self/task").exists(), reason="only Linux counts it")
def test_waiting_for_a_processor_is_seen() -> None:
    """Two processes that may use one processor: each waits while the other one runs."""
    script = """
import os, time
from xrlflow.cost.microbench import waited
os.sched_setaffinity(0, {min(os.sched_getaffinity(0))})
before = waited()
stop = time.perf_counter() + 0.3
def spin():
    while time.perf_counter() < stop:
        hash(b"x" * 100)
child = os.fork()
spin()
if child == 0:
    os._exit(0)
print(waited() - before)
os.waitpid(child, 0)
"""
    out = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    assert 0.05 < float(out.stdout) < 10


def test_a_body_is_the_sum_of_its_nodes(path: Path) -> None:
    inner = MEASURED["mask"]
    b = Builder()
    x = b.input(t(dtype=DType.BOOL))
    branch = Body(inner, ())
    node = b.node("If", [x], t(4), then_branch=branch, else_branch=branch)
    model = profiled(path)
    # Either branch may run, and costs something to enter.
    assert model.cost(b.graph(node.id)) == pytest.approx(3 * MACHINE.overhead + 2 * model.cost(inner))
    assert model.counts.measured == 1


def test_the_delta_is_the_difference_of_the_costs(path: Path) -> None:
    draw = Random(3)
    model = profiled(path, bindings={"N": 4})
    graph = random_graph(draw, 12)
    for step in range(10):
        edit = random_edit(draw, graph, step)
        successor, _ = apply_edit(graph, edit)
        assert model.cost(successor) == pytest.approx(model.cost(graph) + model.delta(graph, edit))
        graph = successor


def test_a_convolution_is_timed_without_its_change_of_layout() -> None:
    b = Builder()
    x, w = b.input(t(1, 16, 6, 6)), b.weight(16, 16, 1, 1)
    node = b.node("Conv", [x, w], t(1, 16, 6, 6))
    types = (t(1, 16, 6, 6), t(16, 16, 1, 1, const=True))
    sample = time_node(node, types, {}, threads=1, time_limit=0.001, kernel_only=True)
    assert isinstance(sample, Sample)
    assert sample.count >= 3
    assert 0 <= sample.low <= sample.high


def test_a_scalar_exponent_is_passed_as_it_is(path: Path) -> None:
    b = Builder()
    x = b.input(t(4))
    square = b.const(np.array(2.0, np.float32), DType.FLOAT)
    cube = b.const(np.array(3.0, np.float32), DType.FLOAT)
    y, z = b.node("Pow", [x, square], t(4)), b.node("Pow", [x, cube], t(4))
    model = profiled(path)
    model.cost(b.graph(y.id, z.id))
    assert model.counts.measured == 2


@pytest.mark.parametrize("dtype", [DType.FLOAT, DType.DOUBLE, DType.INT64, DType.INT32])
@pytest.mark.parametrize("shape", [(), (64,)])
def test_divisors_that_are_computed_are_measured(path: Path, dtype: DType, shape: tuple[int, ...]) -> None:
    """They "did not run alone": NumPy draws a number where the shape is (), and 0 divides nothing."""
    b = Builder()
    x, divisor = b.input(t(64, dtype=dtype)), b.input(t(*shape, dtype=dtype))
    y = b.node("Div", [x, divisor], t(64, dtype=dtype))
    z = b.node("Mul", [divisor, divisor], t(*shape, dtype=dtype))
    rest = b.node("Mod", [x, divisor], t(64, dtype=dtype), fmod=1)
    model = profiled(path)
    model.cost(b.graph(y.id, z.id, rest.id))
    assert (model.counts.measured, model.counts.modelled.total()) == (3, 0)


def test_a_depth_that_is_computed_is_measured() -> None:
    b = Builder()
    types = (t(4, dtype=DType.INT64), t(dtype=DType.INT64), t(2))
    node = b.node("OneHot", [b.input(type) for type in types], t(4, "D"))
    assert time_node(node, types, {}, threads=1, time_limit=0.001).count >= 1


@pytest.mark.parametrize(
    ("shape", "told"), [((1 << 20, 1 << 20), "needs 16384 GB"), ((1,) * 65, "more than 64 dimensions")]
)
def test_what_this_machine_cannot_hold_is_not_measured(shape: tuple[int, ...], told: str, path: Path) -> None:
    b = Builder()
    node = b.node("Relu", [b.input(t(*shape))], t(*shape))
    with pytest.raises(NotStandalone, match=told):
        time_node(node, [t(*shape)], {}, threads=1)
    model = profiled(path)
    model.cost(b.graph(node.id))
    assert (model.counts.measured, model.counts.modelled.total()) == (0, 1)


def test_what_takes_long_is_not_measured(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("xrlflow.cost.profiled._LONGEST", 0.0)
    model = profiled(path)
    model.cost(one("Relu", [t(8)], t(8)))
    assert model.counts.modelled == {"Relu that takes long": 1}


def test_attributes_that_hold_bodies_are_refused() -> None:
    b = Builder()
    branch = Body(MEASURED["mask"], ())
    node = b.node("If", [b.input(t(dtype=DType.BOOL))], t(4), then_branch=branch, else_branch=branch)
    assert node.attrs == Attrs({"then_branch": branch, "else_branch": branch})
    with pytest.raises(NotStandalone, match="body"):
        time_node(node, [t(dtype=DType.BOOL)], {}, threads=1)
    assert node.id != Value(0)
