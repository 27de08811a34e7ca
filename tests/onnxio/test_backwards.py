"""Slices backwards to one of the largest numbers, which ONNX Runtime takes for the beginning."""

from __future__ import annotations

import itertools

import numpy as np
import onnx
import onnx.parser
import pytest

import xrlflow
from tests.onnxio.support import assert_same_outputs, run
from xrlflow import onnxio
from xrlflow.cost import Roofline
from xrlflow.ir import Attrs
from xrlflow.ops.evaluate import evaluate_node

pytestmark = pytest.mark.corpus

LARGEST = (2**31 - 1, 2**63 - 1)
ENDS = (*LARGEST, 2**31 - 2, 2**31, 2**62, 2**63 - 2, -1, -(2**31), -(2**63))


def sliced(end: int, step: int, computed: bool, kind: str = "int64") -> onnx.ModelProto:
    """A slice of what is computed from sizes, with its end as a constant or computed from one."""
    made = f"e = Cast<to = {6 if kind == 'int32' else 7}> (c)" if computed else "e = Identity (c)"
    return onnx.parser.parse_model(f"""<ir_version: 9, opset_import: ["" : 20]>
        g (float[n,3,4] x) => ({kind}[m] y, {kind}[?] z)
        <{kind}[1] c = {{{end}}}, {kind}[1] b = {{2147483647}}, {kind}[1] a = {{0}}, {kind}[1] t = {{{step}}}> {{
            s64 = Shape (x)
            s = Cast<to = {6 if kind == "int32" else 7}> (s64)
            {made if computed else ""}
            y = Slice (s, b, {"e" if computed else "c"}, a, t)
            z = Neg (y)
        }}""")


@pytest.mark.parametrize("computed", [False, True])
@pytest.mark.parametrize(("end", "step"), itertools.product(ENDS, (-1, -2, 1)))
def test_a_slice_is_what_the_runtime_makes_of_it(end: int, step: int, computed: bool) -> None:
    _check(sliced(end, step, computed))


@pytest.mark.parametrize("step", [-1, -2, 1])
def test_in_int32(step: int) -> None:
    _check(sliced(2**31 - 1, step, False, "int32"))


def _check(proto: onnx.ModelProto) -> None:
    feeds = {"x": np.zeros((2, 3, 4), np.float32)}
    expected = run(proto, feeds)
    imported = onnxio.load(proto)
    for value, array in zip(imported.graph.outputs, expected):
        assert imported.graph.type(value).shape in (array.shape, None, (None,))
    assert_same_outputs(expected, run(onnxio.to_proto(imported, imported.graph), feeds))
    result = xrlflow.optimize(proto, search="greedy", cost=Roofline(), measure=False)
    assert result.report.verified or result.returned_original
    assert_same_outputs(expected, run(result.model, feeds))


@pytest.mark.parametrize(("end", "step", "size"), itertools.product(ENDS, (-1, -3, 2), (0, 1, 7)))
def test_evaluation_is_what_the_runtime_does(end: int, step: int, size: int) -> None:
    numbers = [np.array([n]) for n in (2**63 - 1 if step < 0 else 0, end, 0, step)]
    proto = onnx.parser.parse_model("""<ir_version: 9, opset_import: ["" : 20]>
        g (int64[n] x, int64[1] b, int64[1] e, int64[1] a, int64[1] t) => (int64[m] y) { y = Slice (x, b, e, a, t) }""")
    (expected,) = run(proto, dict(zip("xbeat", (np.arange(size), *numbers))))
    (found,) = evaluate_node("Slice", Attrs(), [np.arange(size), *numbers], 1)
    np.testing.assert_array_equal(found, expected)


def test_in_a_body() -> None:
    proto = onnx.parser.parse_model("""<ir_version: 9, opset_import: ["" : 20]>
        g (bool c, float[4,n] x) => (float[k,n] y)
        <int64[1] b = {9}, int64[1] e = {2147483647}, int64[1] a = {0}, int64[1] t = {-1}> {
            y = If (c) <
                then_branch = then () => (float[k,n] p) { p = Slice (x, b, e, a, t) },
                else_branch = other () => (float[k,n] q) { q = Identity (x) }>
        }""")
    result = xrlflow.optimize(proto, search="greedy", cost=Roofline(), measure=False)
    for c in (True, False):
        feeds = {"c": np.array(c), "x": np.arange(12, dtype=np.float32).reshape(4, 3)}
        assert_same_outputs(run(proto, feeds), run(result.model, feeds))


def test_an_end_that_a_caller_may_give_stays() -> None:
    proto = sliced(2**31 - 1, -1, False)
    proto.graph.input.append(onnx.helper.make_tensor_value_info("c", onnx.TensorProto.INT64, [1]))
    imported = onnxio.load(proto)
    again = onnxio.to_proto(imported, imported.graph)
    feeds = {"x": np.zeros((2, 3, 4), np.float32), "c": np.array([0])}
    assert_same_outputs(run(proto, feeds), run(again, feeds))
