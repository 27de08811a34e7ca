"""Small files that ask for terabytes or years: what is too large stays as nodes, and is never evaluated."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper

from tests.onnxio.support import model
from xrlflow import onnxio
from xrlflow.ir import Attrs, DType, TensorType
from xrlflow.ops import weights
from xrlflow.ops.bounds import IMPOSSIBLE, effort
from xrlflow.rewrite import propagate

make = helper.make_node
Node = onnx.NodeProto
MILLION = 10**6


def bomb(*nodes: Node, **consts: Any) -> onnx.ModelProto:
    """The nodes make `b` of constants; its largest element is added to the input."""
    last = [make("ReduceMax", ["b"], ["r0"], keepdims=0), make("Cast", ["r0"], ["r"], to=TensorProto.FLOAT)]
    x = helper.make_tensor_value_info("x", TensorProto.FLOAT, [3])
    y = helper.make_tensor_value_info("y", TensorProto.FLOAT, None)
    arrays = {name: np.asarray(value) for name, value in consts.items()}
    return model([*nodes, *last, make("Add", ["x", "r"], ["y"])], [x], [y], arrays)


ONE = np.ones((1, 1), np.float32)
HUGE = [MILLION, MILLION]
COLUMN, ROW = np.ones((MILLION, 1), np.float32), np.ones((1, MILLION), np.float32)
FILLED = make("ConstantOfShape", ["s"], ["f"])
BOMBS = {
    "ReduceSum": bomb(FILLED, make("ReduceSum", ["f"], ["b"]), s=HUGE),
    "Expand": bomb(make("Expand", ["one", "s"], ["b"]), one=ONE, s=HUGE),
    "Tile": bomb(make("Tile", ["one", "s"], ["b"]), one=ONE, s=HUGE),
    "Range": bomb(make("Range", ["a", "e", "d"], ["b"]), a=0, e=10**9, d=1),
    "Pad": bomb(make("Pad", ["one", "p"], ["b"]), one=ONE, p=[0, 0, MILLION, MILLION]),
    "OneHot": bomb(make("OneHot", ["i", "d", "v"], ["b"]), i=np.zeros(10_000, int), d=10**8, v=[0, 1]),
    "NonZero": bomb(FILLED, make("NonZero", ["f"], ["b"]), s=HUGE),
    "Gather": bomb(FILLED, make("Gather", ["f", "i"], ["b"]), s=HUGE, i=[0]),
    "MatMul": bomb(make("MatMul", ["u", "v"], ["b"]), u=COLUMN, v=ROW),
    "Add": bomb(make("Add", ["u", "v"], ["b"]), u=COLUMN, v=ROW),
    "Einsum": bomb(make("Einsum", ["v", "v", "v"], ["b"], equation="ai,bj,ck->ijk"), v=ROW[:, :20_000]),
    "Conv": bomb(
        make("Expand", ["p", "s"], ["i"]), make("Conv", ["i", "w"], ["b"], pads=[500] * 4),
        p=ONE.reshape(1, 1, 1, 1), s=[1, 1, 3000, 3000], w=np.ones((1, 1, 1000, 1000), np.float32),
    ),
    "products that take long": bomb(
        make("Expand", ["one", "s"], ["f"]), make("MatMul", ["f", "f"], ["b"]), one=ONE, s=[7000, 7000]
    ),
    "many at a time": bomb(
        *(make("Expand", [f"one{i}", "s"], [f"f{i}"]) for i in range(30)),
        make("Sum", [f"f{i}" for i in range(30)], ["b"]),
        s=[2000, 2000], **{f"one{i}": i * ONE for i in range(30)},
    ),
    "sizes beyond 64 bits": bomb(FILLED, make("ReduceSum", ["f"], ["b"]), s=[2**62, 4]),
    "sizes that wrap to 0": bomb(FILLED, make("ReduceSum", ["f"], ["b"]), s=[2**32, 2**32]),
    "repeats that wrap": bomb(make("Tile", ["one", "s"], ["b"]), one=np.ones((4, 4), np.float32), s=[2**60, 1]),
}  # fmt: skip


@pytest.mark.parametrize("name", BOMBS)
def test_what_is_too_large_stays_nodes(name: str) -> None:
    """The plan alone: nothing is evaluated to make it."""
    graph = onnxio.load(BOMBS[name]).graph
    run = [node.op for node in weights.plan(graph).nodes]
    assert "ReduceMax" in run


@pytest.mark.parametrize("name", BOMBS)
def test_it_is_written(name: str) -> None:
    imported = onnxio.load(BOMBS[name])
    result = onnxio.to_proto(imported, imported.graph)
    assert len(result.graph.node) >= 3
    assert result.ByteSize() < 2 * BOMBS[name].ByteSize() + 2000


def test_what_is_not_too_large_is_folded() -> None:
    """A product of weights, a sum of tables: what exports have."""
    wide = np.ones((512, 512), np.float32)
    proto = bomb(make("MatMul", ["w", "w"], ["p"]), make("Add", ["p", "w"], ["b"]), w=wide)
    assert [n.op for n in weights.plan(onnxio.load(proto).graph).nodes] == ["Add"]


def test_many_small_ones_are_too_much() -> None:
    """Each alone would be evaluated: the time for all is one."""
    count = 400
    nodes, consts = [], {}
    for i in range(count):
        consts[f"w{i}"] = np.full((64, 64), i, np.float32)
        nodes += [
            make("Resize", [f"w{i}", "", "", "size"], [f"u{i}"]), make("ReduceMax", [f"u{i}"], [f"m{i}"], keepdims=0),
        ]  # fmt: skip
    nodes.append(make("Sum", ["x", *(f"m{i}" for i in range(count))], ["y"]))
    x = helper.make_tensor_value_info("x", TensorProto.FLOAT, [3])
    y = helper.make_tensor_value_info("y", TensorProto.FLOAT, [3])
    proto = model(nodes, [x], [y], {**consts, "size": np.array([3000, 3000])})
    run = [node.op for node in weights.plan(onnxio.load(proto).graph).nodes]
    assert 0 < run.count("ReduceMax") < count


@pytest.mark.parametrize(
    ("op", "attrs", "shapes"),
    [
        ("MaxPool", {"kernel_shape": (10**9, 10**9), "pads": (10**9 - 1,) * 4}, [(1, 1, 4, 4)]),
        (
            "AveragePool",
            {"kernel_shape": (2, 2), "pads": (10**9,) * 4, "strides": (10**9,) * 2},
            [(1, 1, 4, 4)],
        ),
        ("Conv", {"group": 0}, [(1, 1, 4, 4), (1, 1, 1, 1)]),
        ("Einsum", {"equation": "ab,cd,ef->"}, [(32, 32)] * 3),
        ("StringConcat", {}, [(1,), (1,)]),
    ],
)
def test_small_outputs_may_take_much(op: str, attrs: Any, shapes: list[tuple[int, ...]]) -> None:
    text = op == "StringConcat"
    kind = DType.STRING if text else DType.FLOAT
    types = [TensorType(kind, shape, True) for shape in shapes]
    found = effort(op, Attrs(attrs), types, [TensorType(kind, (1, 1, 1, 1), True)])
    assert found == IMPOSSIBLE or found.seconds > 1 or found.bytes > 1 << 28
    arrays = [np.full(shape, "a", object) if text else np.ones(shape, np.float32) for shape in shapes]
    with pytest.raises(weights.NotEvaluable):
        weights.evaluate(op, Attrs(attrs), arrays, [TensorType(kind, (1, 1, 1, 1), True)])
    data = [onnxio.tensors.array_const(a, kind) for a in arrays]
    assert propagate.evaluate_small(op, Attrs(attrs), data, [TensorType(kind, (1, 1, 1, 1), True)]) is None


def test_patterns_and_texts_are_left_to_the_runtime() -> None:
    """A pattern may take for ever on thirty characters, and a text doubles with each node."""
    text = np.array(["a" * 40 + "!"], object)
    nodes = [make("RegexFullMatch", ["t"], ["b"], pattern="(a+)+$")]
    proto = bomb(*nodes, t=text)
    proto.graph.node[1].CopyFrom(make("Cast", ["b"], ["r0"], to=TensorProto.FLOAT))
    assert "RegexFullMatch" in [n.op for n in onnxio.load(proto).graph.nodes()]


def test_within_the_time_limit(tmp_path: Path) -> None:
    path, output = tmp_path / "m.onnx", tmp_path / "out.onnx"
    onnx.save(BOMBS["ReduceSum"], path)
    done = subprocess.run(
        [sys.executable, "-m", "xrlflow.cli", "optimize", str(path), "-o", str(output), "--no-measure",
         "--no-verify", "--search", "greedy", "--cost", "roofline", "--time-limit", "10"],
        capture_output=True, text=True, timeout=60,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert "ReduceSum" in [n.op_type for n in onnx.load(output).graph.node]
