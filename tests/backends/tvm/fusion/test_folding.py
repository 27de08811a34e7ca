"""Constants are reshaped and transposed without a compiler."""

from __future__ import annotations

from unittest import mock

import numpy as np
import pytest

from tests.backends.tvm.kernels.test_kernels import network
from tests.backends.tvm.kernels.test_pooling import compare
from xrlflow.backends.tvm import detect
from xrlflow.backends.tvm.fusion.folding import fold_moves
from xrlflow.backends.tvm.lowering.importer import import_model
from xrlflow.backends.tvm.toolchain.import_tvm import tvm

pytestmark = pytest.mark.measures

MOVES = {
    "transposed": "c = Transpose<perm=[2,0,1]>(w)",
    "reshaped": "c = Reshape(w, shape)",
    "an axis more, then transposed": "a = Unsqueeze(w, zero)\n c = Transpose<perm=[3,1,0,2]>(a)",
    "an axis less": "a = Unsqueeze(w, zero)\n c = Squeeze(a, zero)",
    "transposed twice, and reshaped": "a = Transpose(w)\n b = Transpose<perm=[1,0,2]>(a)\n c = Reshape(b, shape)",
}


def text(move: str) -> str:
    return (
        "(float[1] x, float[2,3,4] w) => (float[a,b,c,d] y)"
        f" <int64[4] shape = {{4, 1, 2, 3}}, int64[1] zero = {{0}}> {{ {move}\n y = Add(c, x) }}"
    )


@pytest.mark.parametrize("name", MOVES)
def test_nothing_is_left_to_fold_and_the_numbers_are_those_of_onnxruntime(name: str) -> None:
    proto = network(text(MOVES[name]))
    tvm()
    from tvm import relax

    module = fold_moves(import_model(proto))
    moves = ("relax.permute_dims", "relax.reshape", "relax.expand_dims", "relax.squeeze")
    left: list[str] = []

    def look(expression: object) -> None:
        name = getattr(getattr(expression, "op", None), "name", "")
        if name in moves:
            left.append(name)

    relax.analysis.post_order_visit(module["main"], look)
    assert left == []
    compare(text(MOVES[name]), detect())


def test_what_is_no_constant_stays() -> None:
    proto = network("(float[2,3,4] x) => (float[4,2,3] y) { a = Transpose<perm=[2,0,1]>(x)\n y = Relu(a) }")
    module = fold_moves(import_model(proto))
    assert "permute_dims" in str(module)


def test_tvm_compiles_no_kernel_for_weights_in_another_order() -> None:
    """TVM's own folding would compile one kernel for each shape, which took a third of the time to compile a
    network."""
    from xrlflow.backends.tvm.fusion.fuse import fuse

    proto = network(
        "(float[1,8,9,9] x, float[16,8,3,3] w, float[8,16,1,1] v, float[16] b) => (float[1,8,7,7] y)"
        " { a = Conv(x, w, b)\n y = Conv(a, v) }"
    )
    tvm()
    module = import_model(proto)
    with mock.patch("tvm.tirx.build", side_effect=AssertionError("a kernel was compiled")):
        fused = fuse(module, detect())
    assert "main" in {variable.name_hint for variable in fused.functions}


def test_the_numbers_of_a_transposed_weight() -> None:
    """TVM's importer folds some transpositions itself. So this module is built by hand, like one from a change of
    layouts."""
    tvm()
    from tvm import relax
    from tvm.ir import GenericConst

    weight = np.arange(24, dtype=np.float32).reshape(2, 3, 4)
    builder = relax.BlockBuilder()
    x = relax.Var("x", relax.TensorType((4, 2, 3), "float32"))
    with builder.function("main", [x]):
        with builder.dataflow():
            moved = builder.emit(relax.op.permute_dims(relax.const(weight, "float32"), [2, 0, 1]))
            out = builder.emit_output(relax.op.add(x, moved))
        builder.emit_func_output(out)
    result: list[np.ndarray] = []

    def look(expression: object) -> None:
        if isinstance(expression, GenericConst):
            result.append(expression.value.numpy())

    relax.analysis.post_order_visit(fold_moves(builder.get())["main"], look)
    assert any(np.array_equal(array, weight.transpose(2, 0, 1)) for array in result if array.ndim == 3)
