"""Slices with a negative step whose end is one of the largest integers.

ONNX Runtime takes the largest int32 and int64 as "up to the last element" in either direction. ONNX specifies this only
for positive steps; for negative ones its inference gives an empty result. Exporters test models with ONNX Runtime, so
such an end is replaced with one that means the same to both.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from itertools import count

import numpy as np
import numpy.typing as npt
import onnx
import onnx.numpy_helper

from xrlflow.onnxio.protos import all_names, subgraphs
from xrlflow.ops.eval_shape import ends_of_slice

_Constants = Mapping[str, onnx.TensorProto]
# No tensor has more dimensions, so a longer list does not hold the ends of a Slice.
_MAX_LENGTH = 64


def write_ends(graph: onnx.GraphProto) -> None:
    """Replace the ends of Slices with negative steps that ONNX and ONNX Runtime read differently, in place, in bodies,
    too.
    """
    _write(graph, {}, _free_names(graph))


def _write(graph: onnx.GraphProto, outer: _Constants, names: Iterator[str]) -> None:
    inputs = {v.name for v in graph.input}  # initialisers that are inputs, too, can be overridden
    consts = {k: v for k, v in outer.items() if k not in inputs}
    consts |= {t.name: t for t in graph.initializer if t.name not in inputs}
    for node in graph.node:
        if node.op_type == "Constant":
            consts.update((node.output[0], a.t) for a in node.attribute if a.name == "value")
        if node.op_type == "Slice" and node.domain in ("", "ai.onnx") and len(node.input) > 4:
            old, steps = (_array(consts.get(node.input[i])) for i in (2, 4))
            if old is not None and steps is not None and (new := ends_of_slice(old, steps)) is not old:
                node.input[2] = next(names)
                graph.initializer.append(onnx.numpy_helper.from_array(new, node.input[2]))
        for body in subgraphs(node):
            _write(body, consts, names)


def _array(tensor: onnx.TensorProto | None) -> npt.NDArray[np.integer] | None:
    """The elements of a small constant of integers, or None."""
    kinds = (onnx.TensorProto.INT32, onnx.TensorProto.INT64)
    if tensor is None or tensor.data_type not in kinds or tensor.data_location == onnx.TensorProto.EXTERNAL:
        return None
    return onnx.numpy_helper.to_array(tensor) if list(tensor.dims) and tensor.dims[0] <= _MAX_LENGTH else None


def _free_names(graph: onnx.GraphProto) -> Iterator[str]:
    """Names that are not used in the graph."""
    used_names = all_names(graph)
    return (name for k in count() if (name := f"ends_{k}") not in used_names)
