"""Operators that may read a number before it is rounded, and those that may not."""

from __future__ import annotations

import numpy as np
import onnx
import onnx.defs
import pytest

from tests.rules.harness import model, run
from xrlflow.onnxio import load
from xrlflow.ops.continuity import CONTINUOUS, JUMPING, MOVING, keeps_rounding, nonnegative

# Numbers around those at which functions of one number jump, and their neighbours.
_AROUND = np.array([-4, -1, -0.5, 0, 0.5, 1, np.pi / 2, 3, 6], np.float32)
_STEP = 1e-6
NUMBERS = np.sort(np.concatenate([_AROUND - _STEP, _AROUND, _AROUND + _STEP, np.linspace(-7, 7, 99)]), axis=0)
_UNARY = """
Abs Acos Acosh Asin Asinh Atan Atanh Ceil Cos Cosh Elu Erf Exp Floor Gelu HardSigmoid HardSwish LeakyRelu Log Mish Neg
Relu Round Selu Sigmoid Sign Sin Sinh Softplus Softsign Sqrt Tan Tanh
"""


def _jumps(op: str) -> bool:
    """Whether a step of a millionth changes a result by more than a thousandth, or makes NaN of it."""
    proto = model(f"agraph (float[N] x) => (float[N] y) {{ y = {op}(x) }}")
    near, far = (run(proto, {"x": (NUMBERS + step).astype(np.float32)})[0] for step in (0, _STEP))
    scale = np.maximum(1, np.nan_to_num(np.abs(near), posinf=1))
    return bool(
        (np.isnan(near) != np.isnan(far)).any() or (np.nan_to_num(np.abs(far - near)) > 1e-3 * scale).any()
    )


@pytest.mark.parametrize("op", _UNARY.split())
def test_what_jumps_is_known(op: str) -> None:
    assert _jumps(op) == (op in JUMPING)
    assert (op in CONTINUOUS) != (op in JUMPING)


def test_the_names_are_those_of_operators() -> None:
    known = {s.name for s in onnx.defs.get_all_schemas() if s.domain == ""}
    assert not (CONTINUOUS | JUMPING) - known
    assert not CONTINUOUS & JUMPING
    assert MOVING <= CONTINUOUS


@pytest.mark.parametrize(
    ("node", "kept"),
    [
        ("y = Add(x, z)", []),
        ("y = Div(x, z)", []),
        ("y = Floor(x)", [0]),
        ("y = Sqrt(x)", [0]),
        ("s = Mul(x, x) m = ReduceMean(s) v = Add(m, tiny) y = Sqrt(v)", []),
        ("s = Mul(x, z) m = ReduceMean(s) v = Add(m, tiny) y = Sqrt(v)", [0]),
        ("s = Abs(x) v = Sub(s, tiny) y = Sqrt(v)", [0]),
        ("y = Pow(x, two)", [1]),
        ("y = Pow(x, half)", [0, 1]),
        ("s = Pow(x, two) y = Sqrt(s)", []),
        ("s = Pow(x, three) y = Sqrt(s)", [0]),
        ("y = LayerNormalization(x, z)", []),
        ("y = LayerNormalization<epsilon=0.0>(x, z)", [0, 1]),
        ("s = Abs(x) c = Cast<to=3>(s) d = Cast<to=10>(c) y = Sqrt(d)", [0]),  # the integer wraps
        ("y, i = MaxPool<kernel_shape=[2]>(x)", [0]),
        ("y = Less(x, z)", [0, 1]),
        ("y = Hardmax(x)", [0]),  # in neither table
    ],
)
def test_operands_that_keep_their_rounding(node: str, kept: list[int]) -> None:
    consts = {"tiny": 1e-3, "two": 2, "three": 3, "half": 0.5}
    used = {name: np.float16(number) for name, number in consts.items() if name in node}
    graph = load(model(f"agraph (float16[1,1,4] x, float16[4] z) => (y) {{ {node} }}", **used)).graph
    last = graph.producers[graph.outputs[0]]
    assert [i for i in range(len(last.inputs)) if keeps_rounding(graph, last, i)] == kept


def test_a_sum_of_many_is_looked_through_to_an_end() -> None:
    chain = " ".join(f"s{i + 1} = Add(s{i}, s{i})" for i in range(60))
    graph = load(model(f"agraph (float16[4] x) => (s60) {{ s0 = Abs(x) {chain} }}")).graph
    assert not nonnegative(graph, graph.outputs[0])
