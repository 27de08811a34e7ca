"""Reductions."""

from __future__ import annotations

import numpy as np
import onnx
import pytest

from rewrite_rules.reduction import (
    FuseReduceL1,
    FuseReduceL2,
    FuseReduceMean,
    FuseReduceSumSquare,
    MoveConstantBehindMean,
    ReplaceUnitReduceBySqueeze,
)
from tests.rules.harness import applies, model, normal, refuses

ONE, ZERO, SIX, THREE = (np.float32(v) for v in (1, 0, 6, 3))


def reduced(body: str, x: str = "2,3,4", y: str = "2,1,4", **constants) -> onnx.ModelProto:
    return model(f"agraph (float[{x}] x) => (float[{y}] y) {{ {body} }}", **constants)


def test_reductions():
    i = np.array([1])
    applies(FuseReduceMean(), reduced("s = ReduceSum(x, i) y = Div(s, n)", i=i, n=THREE), ops=["ReduceMean"])
    third = np.array([1 / 3], np.float32)
    applies(FuseReduceMean(), reduced("s = ReduceSum(x, i) y = Mul(n, s)", i=i, n=third), ops=["ReduceMean"])
    refuses(FuseReduceMean(), reduced("s = ReduceSum(x, i) y = Div(s, n)", i=i, n=SIX), "another number")
    refuses(FuseReduceMean(), reduced("s = ReduceSum(x, i) y = Div(n, s)", i=i, n=THREE))
    applies(FuseReduceSumSquare(), reduced("s = Mul(x, x) y = ReduceSum(s, i)", i=i), ops=["ReduceSumSquare"])
    refuses(FuseReduceSumSquare(), reduced("a = Relu(x) s = Mul(x, a) y = ReduceSum(s, i)", i=i))
    few, many = "agraph (float[3,8,8] x)", "agraph (float[3,8,9] x)"
    for rule, inner in ((FuseReduceSumSquare(), "Mul(x, x)"), (FuseReduceL1(), "Abs(x)")):
        graph = " => (float[3] y) { s = " + inner + " y = ReduceSum<keepdims=0>(s, i) }"
        applies(rule, model(few + graph, i=np.array([1, 2])))
        refuses(rule, model(many + graph, i=np.array([1, 2])), "loses accuracy")
    applies(FuseReduceL1(), reduced("s = Abs(x) y = ReduceSum(s, i)", i=i), ops=["ReduceL1"])
    applies(
        FuseReduceL2(),
        reduced("s = ReduceSumSquare<keepdims=0>(x, i) y = Sqrt(s)", y="2,4", i=i),
        ops=["ReduceL2"],
    )


@pytest.mark.parametrize("op", ["Mul", "Add"])
def test_constants_behind_means(op):
    rule, channel = MoveConstantBehindMean(), normal(3, 1, 1)
    source = "agraph (float[N,3,4,4] x) => (float[] y) {{ m = {}(c, x) y = {}(m{}) }}"
    for mean in ("GlobalAveragePool", "AveragePool<kernel_shape=[2,3], pads=[1,1,0,0]>"):
        applies(rule, model(source.format(op, mean, ""), c=channel), ops=[op, mean.partition("<")[0]])
    for keep in (0, 1):
        mean = f"ReduceMean<keepdims={keep}>"
        applies(
            rule,
            model(source.format(op, mean, ", i"), c=channel, i=np.array([2, -1])),
            ops=[op, "ReduceMean"],
        )
        refuses(rule, model(source.format(op, mean, ", i"), c=channel, i=np.array([1])), "differs")
    for shape in ((3, 4, 1), (3, 1, 4)):
        refuses(rule, model(source.format(op, "GlobalAveragePool", ""), c=normal(*shape)), "differs")
    counted = "AveragePool<kernel_shape=[2,2], pads=[1,1,0,0], count_include_pad=1>"
    total = source.format(op, "ReduceSum", ", i")
    if op == "Add":
        refuses(rule, model(source.format(op, counted, ""), c=channel), "counted")
        refuses(rule, model(total, c=channel, i=np.array([2])))
    else:
        applies(rule, model(source.format(op, counted, ""), c=channel), ops=["AveragePool", "Mul"])
        applies(rule, model(total, c=channel, i=np.array([2])), ops=["Mul", "ReduceSum"])


def test_a_mean_of_one_number() -> None:
    applies(
        ReplaceUnitReduceBySqueeze(),
        model(
            "agraph (float[N,1,1] x) => (float[N,1] y) { i = Constant<value_ints = [-1]>()"
            " m = ReduceMean<keepdims = 0>(x, i) y = Relu(m) }"
        ),
        ops=["Relu", "Squeeze"],
    )
    refuses(
        ReplaceUnitReduceBySqueeze(),
        model(
            "agraph (float[N,2] x) => (float[N] y) { i = Constant<value_ints = [1]>()"
            " y = ReduceMean<keepdims = 0>(x, i) }"
        ),
        "not 1",
    )
