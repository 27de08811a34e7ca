"""Element types as NumPy types. The package ml_dtypes has the types that NumPy lacks."""

from __future__ import annotations

from functools import cache
from typing import Any

import numpy as np
import onnx.helper

from xrlflow.ir import DType


@cache
def numpy_dtype(dtype: DType) -> np.dtype[Any]:
    """The NumPy type of an element type. Raises KeyError for UNDEFINED."""
    result: np.dtype[Any] = np.dtype(onnx.helper.tensor_dtype_to_np_dtype(int(dtype)))
    return result


@cache
def dtype_of(dtype: np.dtype[Any]) -> DType:
    """The element type of a NumPy type."""
    if dtype.kind in "OUS":
        return DType.STRING
    return DType(onnx.helper.np_dtype_to_tensor_dtype(dtype))
