"""Nodes that ONNX's inference accepts although a runtime refuses them: our inference refuses them, too."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from xrlflow.ir import Attrs, DType, TensorType
from xrlflow.onnxio.tensors import array_const
from xrlflow.ops.infer import UNKNOWN, InferenceError, TooLarge, infer

F = DType.FLOAT


def floats(*shape: Any) -> TensorType:
    return TensorType(F, tuple(shape))


@pytest.mark.parametrize(
    ("op", "attrs", "types", "told"),
    [
        ("Split", {"num_outputs": 3}, [floats(6)], "Split into 1 outputs with 3 parts"),
        ("Transpose", {"perm": (1, 0)}, [floats("n", 3, 4)], r"has \[1, 0\] for a permutation"),
        ("Concat", {"axis": 0}, [floats(2), UNKNOWN, floats()], r"of ranks \[0, 1\]"),
        ("Concat", {"axis": 1}, [floats(2), UNKNOWN], "of rank 1 along axis 1"),
        ("Gemm", {}, [floats(2, 3), floats(3, 4), floats(2, 3)], "adds float"),
        ("Gemm", {"transA": 1}, [floats(3, 2), floats(3, 4), floats(1, 2, 4)], "adds float"),
        ("Conv", {}, [floats(1, 1, 5, 5), floats(1, 1, 3, 3, 3)], "a convolution of"),
        ("Conv", {"kernel_shape": (2, 3)}, [floats(1, 1, 5, 5), floats(1, 1, 3, 3)], "the kernel_shape"),
        ("ConvTranspose", {"kernel_shape": (3,)}, [UNKNOWN, floats(1, 1, 3, 3)], "the kernel_shape"),
    ],
)
def test_what_does_not_fit(op: str, attrs: Any, types: list[TensorType], told: str) -> None:
    with pytest.raises(InferenceError, match=told):
        infer(op, Attrs(attrs), types, [None] * len(types))


@pytest.mark.parametrize(
    ("op", "attrs", "types"),
    [
        ("Transpose", {"perm": (1, 0)}, [TensorType(F, None)]),
        ("Concat", {"axis": -1}, [floats("n", 2), UNKNOWN]),
        ("Gemm", {}, [floats("m", 3), floats(3, "n"), floats(4)]),
        ("Gemm", {"transA": 1, "transB": 1}, [floats(3, 2), floats(4, 3), floats(2, 1)]),
        ("Gemm", {}, [floats(2, 3), floats(3, 4), floats()]),
        ("Conv", {"kernel_shape": (3, 3)}, [floats(1, 1, 5, 5), floats(1, 1, "k", 3)]),
        ("Conv", {}, [UNKNOWN, floats(1, 1, 3, 3)]),
    ],
)
def test_what_may_fit(op: str, attrs: Any, types: list[TensorType]) -> None:
    infer(op, Attrs(attrs), types, [None] * len(types))


def test_more_elements_than_any_machine_holds() -> None:
    with pytest.raises(TooLarge, match="MatMul makes float"):
        infer("MatMul", Attrs(), [floats(1 << 30, 2), floats(2, 1 << 30)], [None, None])


def test_a_split_by_given_sizes() -> None:
    sizes = array_const(np.array([2, 4]), DType.INT64)
    types = [floats(6), TensorType(DType.INT64, (2,))]
    assert [t.shape for t in infer("Split", Attrs(), types, [None, sizes], 2)] == [(2,), (4,)]
    with pytest.raises(InferenceError, match="into 3 outputs with 2 parts"):
        infer("Split", Attrs(), types, [None, sizes], 3)
