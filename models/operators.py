"""Single operators with shapes that are common in networks, as ONNX models."""

from __future__ import annotations

import numpy as np
import onnx
import onnx.numpy_helper
import onnx.parser

OPERATORS = {
    "MatMul 512x512x512": "(float[512,512] x, float[512,512] w) => (float[512,512] y) { y = MatMul(x, w) }",
    "MatMul 128x768x768": "(float[128,768] x, float[768,768] w) => (float[128,768] y) { y = MatMul(x, w) }",
    "MatMul 128x768x3072": "(float[128,768] x, float[768,3072] w) => (float[128,3072] y) { y = MatMul(x, w) }",
    "MatMul 12 x 128x64x128": "(float[12,128,64] x, float[12,64,128] z) => (float[12,128,128] y) {"
    " y = MatMul(x, z) }",
    "MatMul 12 x 128x128x64": "(float[12,128,128] x, float[12,128,64] z) => (float[12,128,64] y) {"
    " y = MatMul(x, z) }",
    "Conv 3x3 64 at 56x56": "(float[1,64,56,56] x, float[64,64,3,3] w) => (float[1,64,56,56] y) {"
    " y = Conv<pads=[1,1,1,1]>(x, w) }",
    "Conv 3x3 256 at 14x14": "(float[1,256,14,14] x, float[256,256,3,3] w) => (float[1,256,14,14] y) {"
    " y = Conv<pads=[1,1,1,1]>(x, w) }",
    "Conv 1x1 256 to 512 at 28x28": "(float[1,256,28,28] x, float[512,256,1,1] w) => (float[1,512,28,28] y) {"
    " y = Conv(x, w) }",
    "Conv depthwise 3x3 144 at 56x56": "(float[1,144,56,56] x, float[144,1,3,3] w) => (float[1,144,56,56] y) {"
    " y = Conv<pads=[1,1,1,1], group=144>(x, w) }",
    "Softmax 12x128x128": "(float[12,128,128] x) => (float[12,128,128] y) { y = Softmax(x) }",
    "LayerNormalization 128x768": "(float[128,768] x, float[768] s, float[768] b) => (float[128,768] y) {"
    " y = LayerNormalization(x, s, b) }",
}
"""ONNX's text form; inputs named w, b and s are constants."""
CONSTANTS = ("b", "s", "w")


def operator(text: str) -> onnx.ModelProto:
    """A model with one operator, from a text like those in this file. Its constants are drawn at random."""
    model = onnx.parser.parse_model(f'<ir_version: 9, opset_import: ["": 20]> agraph {text}')
    rng = np.random.default_rng(0)
    for value in list(model.graph.input):
        if value.name in CONSTANTS:
            shape = [d.dim_value for d in value.type.tensor_type.shape.dim]
            tensor = onnx.numpy_helper.from_array(
                rng.standard_normal(shape).astype(np.float32) / 16, value.name
            )
            model.graph.initializer.append(tensor)
            model.graph.input.remove(value)
    return model
