"""Types of products with packed weights."""

from __future__ import annotations

import pytest

from xrlflow.ir import Attrs, DType, TensorType
from xrlflow.ops.infer import InferenceError, infer
from xrlflow.ops.packed import PRODUCT


def tensor(*shape: int | str | None, dtype: DType = DType.FLOAT) -> TensorType:
    return TensorType(dtype, shape)


def packed(*shape: int) -> TensorType:
    return tensor(*shape, dtype=DType.UINT8)


FIT = [tensor("N", 5, 100), packed(6, 4, 16), tensor(24), packed(6, 2), None, tensor(6)]


def result(inputs: list[TensorType | None], **changed: int) -> TensorType:
    attrs = {"K": 100, "N": 6, "bits": 4, "block_size": 32, **changed}
    (found,) = infer(PRODUCT, Attrs(attrs), inputs, [None] * len(inputs))
    return found


def test_a_product_has_the_rows_of_its_operand_and_n_columns() -> None:
    assert result(FIT) == tensor("N", 5, 6)
    assert result([TensorType(DType.FLOAT, None), *FIT[1:]]).shape is None
    assert result([TensorType(DType.UNDEFINED, None), *FIT[1:]]).dtype == DType.FLOAT
    assert result([FIT[0], packed(6, 4, 32), FIT[2], packed(24), None, FIT[5]], bits=8) == tensor("N", 5, 6)


@pytest.mark.parametrize(
    ("at", "wrong"),
    [
        (0, tensor("N", 5, 99)),
        (0, tensor()),
        (0, tensor("N", 5, 100, dtype=DType.UINT64)),
        (1, packed(6, 3, 16)),
        (1, tensor(6, 4, 16)),
        (1, None),
        (2, tensor(23)),
        (2, tensor(24, dtype=DType.FLOAT16)),
        (3, packed(6, 4)),
        (4, tensor(99, dtype=DType.INT32)),
        (5, tensor(7)),
    ],
)
def test_inputs_that_do_not_fit_are_refused(at: int, wrong: TensorType | None) -> None:
    with pytest.raises(InferenceError, match="MatMulNBits"):
        result([*FIT[:at], wrong, *FIT[at + 1 :]])


@pytest.mark.parametrize("changed", [{"bits": 3}, {"block_size": 8}, {"block_size": 48}, {"K": 0}, {"N": 0}])
def test_attributes_that_do_not_fit_are_refused(changed: dict[str, int]) -> None:
    with pytest.raises(InferenceError, match="MatMulNBits"):
        result(FIT, **changed)
