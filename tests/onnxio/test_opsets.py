"""At every opset, a model that is read and written again runs where it ran before, with the same outputs."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import ml_dtypes
import numpy as np
import onnx
import onnxruntime as ort
import pytest
from onnx import TensorProto, helper, numpy_helper

from tests.onnxio.support import model
from xrlflow.onnxio import check, load, to_proto, versions

make, declare = helper.make_node, helper.make_tensor_value_info
OPSETS = range(13, 27)  # ONNX Runtime 1.31 loads no later one, and 1.32 lacks QuantizeLinear of opset 28
LEVELS = [
    ort.GraphOptimizationLevel.ORT_DISABLE_ALL,
    ort.GraphOptimizationLevel.ORT_ENABLE_BASIC,
    ort.GraphOptimizationLevel.ORT_ENABLE_EXTENDED,
    ort.GraphOptimizationLevel.ORT_ENABLE_ALL,
]
X = np.random.default_rng(0).standard_normal((4, 64)).astype(np.float32)
FLOAT, HALF = TensorProto.FLOAT, TensorProto.FLOAT16


def rng(*shape: int, low: int = -100, high: int = 100) -> np.ndarray:
    return np.random.default_rng(1).integers(low, high, shape)


def quantised(dtype: Any, weights: Any, per_channel: bool = False) -> Callable[[int], onnx.ModelProto]:
    """A QDQ net with a Reshape and a Transpose between a DequantizeLinear and its reader."""

    def build(opset: int) -> onnx.ModelProto:
        zero = np.asarray(128 if dtype is np.uint8 else 0, dtype)
        channels = 16 if per_channel else 1
        scales = np.linspace(0.01, 0.02, channels, dtype=np.float32)
        zeros = np.zeros(channels, weights)
        axis = {"axis": 1} if per_channel else {}
        consts = {
            "s": np.float32(0.03),
            "z": zero,
            "shape": np.array([32, 8]),
            "w": rng(8, 16).astype(weights),
            "ws": scales if per_channel else scales[0],
            "wz": zeros if per_channel else zeros[0],
        }
        nodes = [
            make("QuantizeLinear", ["x", "s", "z"], ["q"]),
            make("DequantizeLinear", ["q", "s", "z"], ["d"]),
            make("Reshape", ["d", "shape"], ["r"]),
            make("DequantizeLinear", ["w", "ws", "wz"], ["wd"], **axis),
            make("MatMul", ["r", "wd"], ["m"]),
            make("QuantizeLinear", ["m", "s", "z"], ["mq"]),
            make("DequantizeLinear", ["mq", "s", "z"], ["md"]),
            make("Transpose", ["md"], ["t"], perm=[1, 0]),
            make("Transpose", ["t"], ["u"], perm=[1, 0]),
            make("Relu", ["u"], ["y"]),
        ]
        return model(nodes, {"x": X}, [declare("y", FLOAT, [32, 16])], consts, opset=opset)

    return build


def convolved(opset: int) -> onnx.ModelProto:
    consts = {
        "shape": np.array([1, 4, 8, 8]),
        "s": np.float32(0.03),
        "z": np.uint8(128),
        "w": rng(6, 4, 3, 3).astype(np.int8),
        "ws": np.linspace(0.01, 0.02, 6, dtype=np.float32),
        "wz": np.zeros(6, np.int8),
        "b": rng(6).astype(np.int32),
        "bs": np.float32(0.03) * np.linspace(0.01, 0.02, 6, dtype=np.float32),
        "bz": np.zeros(6, np.int32),
    }
    nodes = [
        make("Reshape", ["x", "shape"], ["r"]),
        make("QuantizeLinear", ["r", "s", "z"], ["q"]),
        make("DequantizeLinear", ["q", "s", "z"], ["d"]),
        make("DequantizeLinear", ["w", "ws", "wz"], ["wd"], axis=0),
        make("DequantizeLinear", ["b", "bs", "bz"], ["bd"], axis=0),
        make("Conv", ["d", "wd", "bd"], ["c"], pads=[1] * 4),
        make("Relu", ["c"], ["v"]),
        make("QuantizeLinear", ["v", "s", "z"], ["q2"]),
        make("DequantizeLinear", ["q2", "s", "z"], ["d2"]),
        make("GlobalAveragePool", ["d2"], ["y"]),
    ]
    return model(nodes, {"x": X}, [declare("y", FLOAT, None)], consts, opset=opset)


def int4_blocked(opset: int) -> onnx.ModelProto:
    scales = np.full((2, 16), 0.1, np.float32)
    nodes = [
        make("DequantizeLinear", ["w", "ws"], ["wd"], axis=0, block_size=32),
        make("MatMul", ["x", "wd"], ["m"]),
        make("Relu", ["m"], ["y"]),
    ]
    weights = rng(64, 16, low=-8, high=8).astype(ml_dtypes.int4)
    consts = {"w": weights, "ws": scales}
    return model(nodes, {"x": X}, [declare("y", FLOAT, [4, 16])], consts, opset=opset, ir_version=10)


def half(opset: int) -> onnx.ModelProto:
    consts = {
        "w": rng(64, 32).astype(np.float16) / np.float16(100),
        "two": np.float16(2),
        "scale": np.ones(32, np.float16),
    }
    nodes = [
        make("Cast", ["x"], ["h"], to=HALF),
        make("MatMul", ["h", "w"], ["m"]),
        make("Pow", ["m", "two"], ["p"]),
        make("Softmax", ["p"], ["o"], axis=-1),
        make("Mul", ["o", "scale"], ["n"]),
        make("Clip", ["n"], ["c"]),
        make("Cast", ["c"], ["y"], to=FLOAT),
    ]
    return model(nodes, {"x": X}, [declare("y", FLOAT, [4, 32])], consts, opset=opset)


def reduced(opset: int) -> onnx.ModelProto:
    """Operators whose attributes became inputs."""
    consts = {"axes": np.array([1]), "sizes": np.array([24, 40]), "one": np.array([0])}
    mean = (
        make("ReduceMean", ["x"], ["m"], axes=[-1])
        if opset < 18
        else make("ReduceMean", ["x", "axes"], ["m"])
    )
    equal = {"num_outputs": 2} if opset >= 18 else {}
    nodes = [
        mean,
        make("ReduceSum", ["x", "axes"], ["s"]),
        make("Split", ["x", "sizes"], ["a", "b"], axis=1),
        make("Split", ["x"], ["c", "d"], axis=-1, **equal),
        make("Unsqueeze", ["m", "one"], ["u"]),
        make("Squeeze", ["u", "one"], ["v"]),
        make("Add", ["v", "s"], ["t"]),
        make("Mul", ["c", "d"], ["e"]),
        make("Concat", ["a", "b", "t", "e"], ["f"], axis=1),
        make("LogSoftmax", ["f"], ["y"], axis=0),
    ]
    return model(nodes, {"x": X}, [declare("y", FLOAT, None)], consts, opset=opset)


def branches(opset: int) -> onnx.ModelProto:
    def branch(name: str, op: str) -> onnx.GraphProto:
        weight = numpy_helper.from_array(np.full(64, 1.5, np.float32), f"{name}_w")
        axes = numpy_helper.from_array(np.array([1]), f"{name}_axes")
        nodes = [
            make(op, ["r", f"{name}_w"], [f"{name}_a"]),
            make("Squeeze", [f"{name}_a", f"{name}_axes"], [f"{name}_y"]),
        ]
        return helper.make_graph(nodes, name, [], [declare(f"{name}_y", FLOAT, [4, 64])], [weight, axes])

    nodes = [
        make("Unsqueeze", ["x", "axes"], ["r"]),
        make("ReduceSum", ["x"], ["total"], keepdims=0),
        make("Less", ["total", "zero"], ["c"]),
        make("If", ["c"], ["y"], then_branch=branch("p", "Add"), else_branch=branch("n", "Mul")),
    ]
    consts = {"axes": np.array([1]), "zero": np.float32(0)}
    return model(nodes, {"x": X}, [declare("y", FLOAT, [4, 64])], consts, opset=opset)


def loop(opset: int) -> onnx.ModelProto:
    """A Loop whose body reads a value of the graph around it, and whose axes are constants around it, too."""
    mean = ["ReduceMax", ["s", "axes"]] if opset >= 18 else ["ReduceMax", ["s"]]
    axes = {} if opset >= 18 else {"axes": [1]}
    nodes = [
        make(mean[0], mean[1], ["top"], **axes),
        make("Sub", ["s", "top"], ["d"]),
        make("Add", ["d", "outer"], ["s_out"]),
        make("Squeeze", ["top", "axes"], ["row"]),
        make("Identity", ["more"], ["more_out"]),
    ]
    body = helper.make_graph(
        nodes,
        "body",
        [declare("i", TensorProto.INT64, []), declare("more", TensorProto.BOOL, []), declare("s", FLOAT, [4, 64])],
        [declare("more_out", TensorProto.BOOL, []), declare("s_out", FLOAT, [4, 64]), declare("row", FLOAT, [4])],
    )  # fmt: skip
    outer = [make("Relu", ["x"], ["outer"]), make("Loop", ["n", "yes", "x"], ["y", "rows"], body=body)]
    outputs = [declare("y", FLOAT, [4, 64]), declare("rows", FLOAT, None)]
    consts = {"n": np.array(3), "yes": np.array(True), "axes": np.array([1])}
    return model(outer, {"x": X}, outputs, consts, opset=opset)


def functions(opset: int) -> onnx.ModelProto:
    nodes = [
        make("Constant", [], ["axes"], value=numpy_helper.from_array(np.array([1]))),
        make("ReduceSum", ["a", "axes"], ["s"]),
        make("Div", ["a", "s"], ["b"]),
    ]
    inner = helper.make_function("my", "Share", ["a"], ["b"], nodes, [helper.make_opsetid("", opset)])
    calls = [make("Share", ["c"], ["d"], domain="my"), make("Tanh", ["d"], ["e"])]
    imports = [helper.make_opsetid("", opset), helper.make_opsetid("my", 1)]
    outer = helper.make_function("my", "Twice", ["c"], ["e"], calls, imports)
    body = [
        make("Abs", ["x"], ["v"]),
        make("Twice", ["v"], ["w"], domain="my"),
        make("Share", ["w"], ["y"], domain="my"),
    ]
    return model(
        body, {"x": X}, [declare("y", FLOAT, [4, 64])], opset=opset, domains=["my"], functions=[inner, outer]
    )  # fmt: skip


MODELS: dict[str, Callable[[int], onnx.ModelProto]] = {
    "qdq u8": quantised(np.uint8, np.int8),
    "qdq u8 u8": quantised(np.uint8, np.uint8),
    "qdq s8": quantised(np.int8, np.int8),
    "qdq s8 per channel": quantised(np.int8, np.int8, per_channel=True),
    "qdq u8 per channel": quantised(np.uint8, np.int8, per_channel=True),
    "qdq conv": convolved,
    "int4 blocked": int4_blocked,
    "float16": half,
    "inputs that were attributes": reduced,
    "If": branches,
    "Loop": loop,
    "functions": functions,
}
FIRST = {"int4 blocked": 21}
CASES = [(name, opset) for name in MODELS for opset in OPSETS if opset >= FIRST.get(name, 13)]


def session(proto: onnx.ModelProto, level: ort.GraphOptimizationLevel) -> ort.InferenceSession:
    options = ort.SessionOptions()
    options.log_severity_level = 4
    options.graph_optimization_level = level
    options.intra_op_num_threads = 1
    return ort.InferenceSession(proto.SerializeToString(), options, ["CPUExecutionProvider"])


@pytest.mark.parametrize(("name", "opset"), CASES)
def test_a_model_that_is_read_and_written_runs_as_before(name: str, opset: int) -> None:
    proto = MODELS[name](opset)
    imported = load(proto)
    written = to_proto(imported, imported.graph)
    assert versions.opset_of(written) == opset
    assert check(onnx.shape_inference.infer_shapes(written)) is None
    ran = 0
    for level in LEVELS:
        try:
            before = session(proto, level)
        except Exception:  # what the original cannot do, the result need not
            continue
        after = session(written, level)
        for a, b in zip(before.run(None, {"x": X}), after.run(None, {"x": X}), strict=True):
            np.testing.assert_array_equal(a, b)
        ran += 1
    assert ran


@pytest.mark.parametrize(
    ("opset", "ir_version", "expected"), [(13, 3, 7), (13, 8, 8), (17, 4, 8), (21, 12, 12)]
)
def test_the_ir_version_stays_where_it_is_valid(opset: int, ir_version: int, expected: int) -> None:
    proto = reduced(opset)
    proto.ir_version = ir_version
    if ir_version < 4:
        proto.graph.input.extend(declare(t.name, t.data_type, t.dims) for t in proto.graph.initializer)
    imported = load(proto)
    assert to_proto(imported, imported.graph).ir_version == expected


# The first opset that has what a result needs.
NEEDED = {
    "Gelu": (make("Gelu", ["x"], ["y"]), 20),
    "RMSNormalization": (make("RMSNormalization", ["x", "w"], ["y"]), 23),
    "LayerNormalization": (make("LayerNormalization", ["x", "w"], ["y"]), 17),
    "Mish": (make("Mish", ["x"], ["y"]), 18),
    "a later value": (make("Pad", ["x", "pads"], ["y"], mode="wrap"), 19),
    "a later attribute": (make("Resize", ["x", "", "scales"], ["y"], mode="linear", antialias=1), 18),
    "a required input": (make("Resize", ["x", "", "scales"], ["y"], mode="linear"), 13),
    "nothing": (make("Relu", ["x"], ["y"]), 11),
    "in a body": (None, 20),
}


@pytest.mark.parametrize(("node", "needed"), NEEDED.values(), ids=NEEDED)
def test_a_result_has_the_lowest_opset_that_it_needs(node: onnx.NodeProto | None, needed: int) -> None:
    consts = {
        "w": np.ones(64, np.float32), "pads": np.array([0, 1, 0, 1]), "scales": np.array([1, 0.5], np.float32),
    }  # fmt: skip
    if node is None:
        inner = helper.make_graph([make("Gelu", ["x"], ["z"])], "b", [], [declare("z", FLOAT, [4, 64])])
        node = make("If", ["c"], ["y"], then_branch=inner, else_branch=inner)
        consts["c"] = np.array(True)
    proto = model([node], {"x": X}, [declare("y", FLOAT, None)], consts, opset=23)
    result = load(proto)
    old = load(model([make("Relu", ["x"], ["y"])], {"x": X}, [declare("y", FLOAT, None)], opset=11))
    assert versions.opset_of(to_proto(old, result.graph)) == needed


def test_what_an_old_opset_has_as_an_attribute_leaves_no_weights_behind() -> None:
    proto = model(
        [make("Squeeze", ["u"], ["y"], axes=[1])],
        [declare("u", FLOAT, [4, 1, 64])],
        [declare("y", FLOAT, [4, 64])],
        opset=11,
    )
    imported = load(proto)
    written = to_proto(imported, imported.graph)
    assert [a.name for a in written.graph.node[0].attribute] == ["axes"]
    assert not written.graph.initializer
    assert versions.opset_of(written) == 11


def test_axes_count_from_the_front_before_opset_11() -> None:
    nodes = [make("ReduceMean", ["x"], ["m"], axes=[-1]), make("Softmax", ["m"], ["y"], axis=-1)]
    new = load(model(nodes[1:], {"m": X}, [declare("y", FLOAT, None)], opset=13))
    old = load(model([make("Relu", ["m"], ["y"])], {"m": X}, [declare("y", FLOAT, None)], opset=9))
    written = to_proto(old, new.graph)
    assert versions.opset_of(written) == 9
    assert [a.i for a in written.graph.node[0].attribute] == [1]


def test_an_attention_of_another_meaning_keeps_a_result_at_the_canonical_opset() -> None:
    cube = np.ones((1, 2, 4, 8), np.float32)
    attention = make("Attention", ["q", "q", "q"], ["y"])
    new = load(model([attention], {"q": cube}, [declare("y", FLOAT, None)], opset=23))
    old = load(model([make("Relu", ["q"], ["y"])], {"q": cube}, [declare("y", FLOAT, None)], opset=24))
    assert old.opset == 24
    assert versions.opset_of(to_proto(old, old.graph)) == 24
    assert versions.opset_of(to_proto(old, new.graph)) == 23


@pytest.mark.parametrize("name", ["inputs that were attributes", "qdq conv", "float16"])
@pytest.mark.parametrize("opset", [13, 17, 23])
def test_a_file_is_raised_to_the_canonical_opset_for_a_compiler(name: str, opset: int) -> None:
    proto = MODELS[name](opset)
    before = proto.SerializeToString()
    new = versions.raised(proto)
    assert proto.SerializeToString() == before
    changes = name.startswith("inputs") and opset < 18
    assert (new is proto) == (not changes)
    assert versions.opset_of(new) == (23 if changes else opset)
    assert "Constant" not in {node.op_type for node in new.graph.node}
    a, b = (session(m, LEVELS[-1]).run(None, {"x": X}) for m in (proto, new))
    np.testing.assert_array_equal(a[0], b[0])


def test_weights_in_functions_stay_in_the_file(monkeypatch: pytest.MonkeyPatch) -> None:
    """ONNX's inliner copies a model several times, and its inference once more."""
    weights = np.arange(64 * 64, dtype=np.float32).reshape(64, 64)
    body = [
        make("Constant", [], ["w"], value=numpy_helper.from_array(weights)),
        make("MatMul", ["a", "w"], ["b"]),
    ]
    times = helper.make_function("my", "Times", ["a"], ["b"], body, [helper.make_opsetid("", 17)])
    proto = model(
        [make("Times", ["x"], ["y"], domain="my")], {"x": X}, [declare("y", FLOAT, [4, 64])], opset=17,
        domains=["my"], functions=[times],
    )  # fmt: skip
    inlined, sizes = onnx.inliner.inline_local_functions, []

    def counted(given: onnx.ModelProto, **options: bool) -> onnx.ModelProto:
        sizes.append(given.ByteSize())
        return inlined(given, **options)

    monkeypatch.setattr("onnx.inliner.inline_local_functions", counted)
    imported = load(proto)
    assert sizes[0] < weights.nbytes / 8
    (found,) = (c for c in imported.graph.leaves.consts.values() if c.type.shape == (64, 64))
    np.testing.assert_array_equal(found.numpy(), weights)
