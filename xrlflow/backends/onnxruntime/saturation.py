"""Whether ONNX Runtime saturates sums of products of 8-bit integers on this machine."""

from __future__ import annotations

import functools

import numpy as np
import onnx.parser

from xrlflow.backends.onnxruntime.session import open_model

_PRODUCT = """<ir_version: 9, opset_import: ["": 17]>
agraph (uint8[2,64] x, int8[64,16] w) => (int32[2,16] y) { y = MatMulInteger(x, w) }"""


@functools.cache
def saturates() -> bool:
    """Whether products of unsigned with signed 8-bit integers can be wrong. Without VNNI instructions, two products are
    added in 16 bits, which may overflow."""
    feeds = {"x": np.full((2, 64), 255, np.uint8), "w": np.full((64, 16), 127, np.int8)}
    with open_model(onnx.parser.parse_model(_PRODUCT).SerializeToString(), threads=1) as model:
        (sums,) = model.run(feeds)
    return bool((sums != 64 * 255 * 127).any())
