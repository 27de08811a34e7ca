"""Small models to compare, from ONNX's text form."""

import numpy as np
import onnx
import onnx.numpy_helper
import onnx.parser

HEADER = '<ir_version: 10, opset_import: ["" : 21, "com.example" : 1]>\n'


def model(text: str, **weights: np.ndarray) -> onnx.ModelProto:
    """A model whose graph is `text`, with these initialisers."""
    proto = onnx.parser.parse_model(HEADER + text)
    proto.graph.initializer.extend(onnx.numpy_helper.from_array(a, n) for n, a in weights.items())
    return proto


def normal(*shape: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng([seed, *shape]).standard_normal(shape).astype(np.float32)


def changed(array: np.ndarray, index: tuple[int, ...], by: float) -> np.ndarray:
    out = array.copy()
    out[index] += by
    return out


MLP = """
mlp (float[batch, 16] x) => (float[batch, 8] y) {
  h = MatMul(x, w1)
  a = Add(h, b1)
  r = Relu(a)
  m = MatMul(r, w2)
  y = Add(m, b2)
}"""


def mlp(**replaced: np.ndarray) -> onnx.ModelProto:
    weights = {
        "w1": normal(16, 32),
        "b1": normal(32),
        "w2": normal(32, 8),
        "b2": normal(8),
    }
    return model(MLP, **(weights | replaced))
