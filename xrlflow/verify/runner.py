"""Runs a model once, with inputs and outputs of any ONNX type that ONNX Runtime supports, one session at a time."""

from __future__ import annotations

import ctypes
import math
import os
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, TypeAlias

import numpy as np
import numpy.typing as npt

from xrlflow.backends.onnxruntime.reasons import reason
from xrlflow.backends.onnxruntime.session import (
    Optimization,
    Options,
    OrtModel,
    ending,
    open_model,
    ort_errors,
)
from xrlflow.backends.protocol import BackendError, OutOfTime
from xrlflow.common import deadline
from xrlflow.common.text import shortened
from xrlflow.ir import DType
from xrlflow.ops.tensors import dtype_of, numpy_dtype

if TYPE_CHECKING:
    import onnx

Array: TypeAlias = npt.NDArray[Any]
Model: TypeAlias = "str | os.PathLike[str] | bytes | onnx.ModelProto"
"""A model: a path (external data is in its folder), a serialised ModelProto, or a ModelProto."""

# Element types that ONNX Runtime's bindings exchange only as bytes.
_FLOAT8 = (DType.FLOAT8E4M3FN, DType.FLOAT8E4M3FNUZ, DType.FLOAT8E5M2, DType.FLOAT8E5M2FNUZ)
_BY_BYTES = frozenset({DType.BFLOAT16, *_FLOAT8})


class Runner:
    """A loaded model. Inputs and outputs are NumPy arrays (with the types of ml_dtypes), or lists and dicts of them."""

    def __init__(self, model: OrtModel) -> None:
        self._model = model
        ports = [*model.session.get_inputs(), *model.session.get_outputs()]
        special = {f"tensor({dtype.name.lower()})" for dtype in _BY_BYTES}
        self._by_bytes = any(port.type in special for port in ports)

    def run(self, feeds: Mapping[str, Any], limit: float | None = None) -> list[Any]:
        """The outputs in order: arrays, lists, dicts, and None for an empty optional.

        Raises BackendError if the run fails or exceeds `limit` seconds (on some inputs a Loop does not end); OutOfTime
        if it was stopped because the deadline of the caller passed (`deadline`).
        """
        import onnxruntime as ort

        options = ort.RunOptions()
        until = min(deadline.until(), math.inf if limit is None else time.monotonic() + limit)
        try:
            with ending(until, lambda: setattr(options, "terminate", True)):
                if self._by_bytes:
                    return self._run_by_bytes(feeds, options)
                return list(self._model.session.run(None, dict(feeds), options))
        except ort_errors() as error:
            if deadline.over():
                raise OutOfTime("ONNX Runtime was ended: the time for a run was over") from error
            raise BackendError(f"ONNX Runtime cannot run the model: {reason(error)}") from error

    def _run_by_bytes(self, feeds: Mapping[str, Any], options: Any) -> list[Any]:
        import onnxruntime as ort

        values = {}
        for name, array in feeds.items():
            element = dtype_of(array.dtype)
            if element in _BY_BYTES:
                raw = np.ascontiguousarray(array).view(np.uint16 if array.itemsize == 2 else np.uint8)
                values[name] = ort.OrtValue.ortvalue_from_numpy_with_onnx_type(
                    raw.reshape(array.shape), int(element)
                )
            else:
                values[name] = ort.OrtValue.ortvalue_from_numpy(
                    np.ascontiguousarray(array).reshape(array.shape)
                )
        out: list[Any] = []
        for value in self._model.session.run_with_ort_values(None, values, options):
            dtype = DType(value.element_type())
            if dtype not in _BY_BYTES:
                out.append(value.numpy())
                continue
            content = ctypes.string_at(value.data_ptr(), value.tensor_size_in_bytes())
            array = np.frombuffer(content, numpy_dtype(dtype)) if content else np.empty(0, numpy_dtype(dtype))
            out.append(array.reshape(value.shape()))
        return out


@contextmanager
def opened(
    model: Model,
    *,
    optimized: bool = True,
    threads: int | None = None,
    session_options: Options | None = None,
    weights: Mapping[str, Array] | None = None,
) -> Iterator[Runner]:
    """The model in a session that is closed at the end of the block.

    `optimized`: with the user's session options (by default all optimisations of ONNX Runtime); else without
    optimisations. `weights`: arrays that take the place of the model's. Raises BackendError if the model cannot be
    loaded, OutOfTime if the deadline passes first.
    """
    source: str | os.PathLike[str] | bytes = (
        model if isinstance(model, (str, os.PathLike, bytes)) else model.SerializeToString()
    )
    level = getattr(session_options, "graph_optimization_level", None)
    try:
        loaded = open_model(
            source,
            threads=threads,
            optimization=Optimization.ALL if optimized else Optimization.NONE,
            session_options=session_options,
            weights=weights,
        )
    finally:
        if level is not None and session_options is not None and not isinstance(session_options, Mapping):
            session_options.graph_optimization_level = level
    with loaded:
        yield Runner(loaded)


def first_line(error: BaseException, limit: int = 300) -> str:
    """An error's message on one line."""
    return shortened(" ".join(str(error).split()), limit, limit // 2)


def flat(value: Any, label: str = "") -> Sequence[tuple[str, Any]]:
    """The arrays of an output, each with a label: "" for a tensor, "[2]" in a sequence, "['cat']" in a map."""
    if isinstance(value, Mapping):
        keys = np.asarray(sorted(value, key=str), dtype=object)
        out = [(f"{label}.keys", keys)]
        for key in keys:
            out.extend(flat(value[key], f"{label}[{key!r}]"))
        return out
    if isinstance(value, (list, tuple)):
        out = [(f"{label}.length", np.asarray(len(value)))]
        for index, item in enumerate(value):
            out.extend(flat(item, f"{label}[{index}]"))
        return out
    if value is None:
        return [(f"{label}.value", np.asarray("none", dtype=object))]
    return [(label, np.asarray(value))]
