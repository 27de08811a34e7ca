from __future__ import annotations

import onnx

from xrlflow.onnxio.errors import ModelError
from xrlflow.onnxio.tensors import TensorStore
from xrlflow.ops.schema import OPSET

# Operators that are defined otherwise than at the canonical opset have this before their version, as a domain.
QUALIFIED = "ai.onnx@"


def to_canonical(proto: onnx.ModelProto, store: TensorStore) -> int:
    set_opset(proto, OPSET)
    return OPSET


def set_opset(proto: onnx.ModelProto, opset: int) -> None:
    """Make `opset` the model's version of ONNX's own operators, in place."""
    others = [o for o in proto.opset_import if o.domain not in ("", "ai.onnx")]
    kept = [onnx.helper.make_opsetid(o.domain, o.version) for o in others]
    del proto.opset_import[:]
    proto.opset_import.extend([onnx.helper.make_opsetid("", opset), *kept])


def lower(name: str, proto: onnx.ModelProto, opset: int) -> None:
    """Bring a model down to an older opset, in place."""
    raise ModelError(f"{name}: opset {opset}")
