"""Models of old and new opsets compute the same after import and export, in ONNX Runtime."""

from __future__ import annotations

from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any

import numpy as np
import onnx
import onnx.parser
import pytest
from onnx import TensorProto, helper

from tests.onnxio.support import assert_same_outputs, info, model, run
from tests.runtime import recent
from xrlflow import onnxio
from xrlflow.onnxio import versions
from xrlflow.onnxio.errors import ModelError
from xrlflow.ops.work import Gemm, work

F, I64 = TensorProto.FLOAT, TensorProto.INT64
X = np.random.default_rng(0).normal(size=(2, 4, 6, 5)).astype(np.float32)

STATISTICS = (X[0, :, 0, 0], X[0, :, 1, 0], X[0, :, 2, 0], X[0, :, 3, 0] ** 2)


@dataclass(frozen=True)
class Case:
    """One node of an old opset on X (or `feed`) with constants; `keys` are the adapters that it exercises."""

    opset: int
    op: str
    attrs: dict[str, Any] = field(default_factory=dict)
    consts: tuple[np.ndarray, ...] = ()
    feed: np.ndarray = field(default_factory=lambda: X)
    outputs: tuple[int, ...] = (F,)
    empty: int = 0  # absent inputs before the constants


CASES = {
    "Add, aligned": Case(6, "Add", {"broadcast": 1, "axis": 1}, (X[0, :, :, 0],)),
    "Softmax": Case(11, "Softmax"),
    "Softmax, last axis": Case(11, "Softmax", {"axis": 3}),
    "Softmax, axis -2": Case(9, "Softmax", {"axis": 2}),
    "LogSoftmax": Case(7, "LogSoftmax", {"axis": 2}),
    "Hardmax": Case(11, "Hardmax", {"axis": 1}),
    "Clip": Case(7, "Clip", {"min": 0.0, "max": 0.5}),
    "Clip, one side": Case(9, "Clip", {"min": -0.25}),
    "Clip, no side": Case(6, "Clip"),
    "Dropout": Case(7, "Dropout", {"ratio": 0.3}),
    "Dropout 10": Case(10, "Dropout", {"ratio": 0.3}),
    "Pad": Case(7, "Pad", {"pads": [0, 0, 1, 2, 0, 0, 3, 0], "value": 1.5}),
    "Pad, reflected": Case(10, "Pad", {"pads": [0, 0, 1, 2, 0, 0, 3, 0], "mode": "reflect"}),
    "Slice": Case(9, "Slice", {"starts": [1, -3], "ends": [3, 2**31 - 1], "axes": [1, 3]}),
    "Slice, all axes": Case(7, "Slice", {"starts": [0, 1], "ends": [1, 3]}),
    "Split": Case(11, "Split", {"split": [1, 3], "axis": 1}, outputs=(F, F)),
    "Split, equal": Case(7, "Split", {"axis": 1}, outputs=(F, F)),
    "Split 13, equal": Case(13, "Split", {"axis": 1}, outputs=(F, F, F, F)),
    "Squeeze": Case(11, "Squeeze", {"axes": [0, 2]}, feed=X[:1, :, :1]),
    "Squeeze, all": Case(9, "Squeeze", feed=X[:1, :, :1]),
    "Unsqueeze": Case(11, "Unsqueeze", {"axes": [0, 5]}),
    "ReduceSum": Case(11, "ReduceSum", {"axes": [1, -1], "keepdims": 0}),
    "ReduceSum, all": Case(7, "ReduceSum"),
    **{f"Reduce{n}": Case(17, f"Reduce{n}", {"axes": [1, 3], "keepdims": 0}) for n in versions.REDUCTIONS},
    "TopK": Case(7, "TopK", {"k": 3, "axis": 1}, outputs=(F, I64)),
    "Upsample, attribute": Case(7, "Upsample", {"scales": [1.0, 1.0, 2.0, 3.0], "mode": "nearest"}),
    "Upsample, input": Case(9, "Upsample", {"mode": "linear"}, (np.float32([1, 1, 2, 2.5]),)),
    "Resize, enlarged": Case(10, "Resize", {"mode": "nearest"}, (np.float32([1, 1, 1.7, 3]),)),
    "Resize, shrunk": Case(10, "Resize", {"mode": "nearest"}, (np.float32([1, 1, 0.6, 0.5]),)),
    "Resize, linear": Case(10, "Resize", {"mode": "linear"}, (np.float32([1, 1, 0.6, 2]),)),
    "BatchNormalization": Case(7, "BatchNormalization", {"epsilon": 0.1}, STATISTICS),
    "BatchNormalization 9": Case(9, "BatchNormalization", {}, STATISTICS),
    "GridSample": Case(16, "GridSample", {"mode": "bicubic"}, (np.tanh(X[:, :3, :2, :2]),)),
    "RoiAlign": Case(
        10,
        "RoiAlign",
        {"output_height": 2, "output_width": 3, "spatial_scale": 0.7},
        (np.float32([[0, 0, 4, 3], [1, 1, 3, 5]]), np.int64([0, 1])),
    ),
    "DFT": Case(17, "DFT", {"axis": 2}, feed=X[:, :, :, :1]),
    "GroupNormalization": Case(
        18, "GroupNormalization", {"num_groups": 2}, (np.float32([1.5, -2]), np.float32([0.5, 3]))
    ),
    "MeanVarianceNormalization, not ONNX's": Case(8, "MeanVarianceNormalization", {"across_channels": 1}),
    "MeanVarianceNormalization, its mean": Case(7, "MeanVarianceNormalization", {"normalize_variance": 0}),
    "Scatter": Case(9, "Scatter", {"axis": 1}, (np.int64([[1, 0]]), np.float32([[7, 8]])), X[0, 0]),
    "Gemm": Case(6, "Gemm", {"broadcast": 1}, (X[1, 0, :5, :3], X[0, 0, 0, :3]), X[0, 0]),
}  # fmt: skip


def build(case: Case) -> onnx.ModelProto:
    names = [f"c{i}" for i in range(len(case.consts))]
    outputs = [f"y{i}" for i in range(len(case.outputs))]
    node = helper.make_node(case.op, ["x", *names], outputs, **case.attrs)
    proto = model(
        [node],
        {"x": case.feed},
        [helper.make_tensor_value_info(n, t, None) for n, t in zip(outputs, case.outputs)],
        dict(zip(names, case.consts)),
        opset=case.opset,
    )
    return onnx.shape_inference.infer_shapes(proto)


# Operators that ONNX Runtime has no kernel for at the old opset.
EXPECTED = {
    "Add, aligned": lambda x, c: x + c[:, :, None],
    "Gemm": lambda x, b, c: x @ b + c,
}


@pytest.mark.parametrize("name", CASES)
def test_an_old_operator_computes_the_same(name: str) -> None:
    case = CASES[name]
    proto = build(case)
    if name in EXPECTED:
        expected = [EXPECTED[name](case.feed, *case.consts)]
    else:
        expected = run(proto, {"x": case.feed})
    for value, array in zip(proto.graph.output, expected):
        value.CopyFrom(info(value.name, array))  # ONNX infers no shape for some
    imported = onnxio.load(proto)
    assert imported.opset == max(case.opset, versions.OLDEST)
    result = onnxio.to_proto(imported, imported.graph)
    assert onnxio.check(result) is None
    assert_same_outputs(expected, run(result, {"x": case.feed}))


def adapters_of(case: Case) -> set[tuple[str, int]]:
    op, found = case.op, set()
    for _ in range(2):  # an adapter may make another operator of it
        found |= {(o, v) for o, v in versions.ADAPTERS if o == op and v > case.opset}
        op = {"Upsample": "Resize"}.get(op, op)
    return found


def test_every_adapter_has_a_case() -> None:
    covered = set().union(*(adapters_of(case) for case in CASES.values()))
    elsewhere = {("Scan", 9), ("BatchNormalization", 9)}  # below
    elsewhere |= {(op, 7) for op in versions.BINARY}  # one of them stands for all
    assert set(versions.ADAPTERS) - covered - elsewhere == set()


def test_every_change_of_a_signature_has_an_adapter() -> None:
    """An operator whose inputs were renumbered, or lost an attribute, cannot be taken over as it is."""
    by_name: dict[str, dict[int, onnx.defs.OpSchema]] = {}
    for schema in onnx.defs.get_all_schemas_with_history():
        if schema.domain == "" and schema.since_version <= 23:
            by_name.setdefault(schema.name, {})[schema.since_version] = schema
    missing = set()
    for op, found in by_name.items():
        chain = [max((v for v in found if v <= 7), default=None), *sorted(v for v in found if v > 7)]
        for before, after in pairwise(chain):
            if before is None or (op, after) in versions.ADAPTERS:
                continue
            old, new = found[before], found[after]
            lost = set(old.attributes) - set(new.attributes)
            defaults = [
                n
                for n in set(old.attributes) & set(new.attributes)
                if old.attributes[n].default_value != new.attributes[n].default_value
            ]
            required = new.min_input > old.min_input or new.max_input < old.max_input
            if lost or defaults or required or new.deprecated or new.max_output < old.max_output:
                missing.add((op, after))
    # Resize-13 made optional what Resize-11 required.
    assert missing == set()


LOWERED = [
    "Softmax, last axis",
    "Clip",
    "Pad",
    "Slice",
    "Split",
    "Squeeze",
    "Unsqueeze",
    "ReduceSum",
    "ReduceMean",
]
LOWERED += ["TopK", "BatchNormalization", "GridSample", "Dropout", "DFT", "RoiAlign", "Split, equal"]


@pytest.mark.parametrize("name", LOWERED)
def test_an_operator_goes_back_to_its_old_opset(name: str) -> None:
    case = CASES[name]
    proto = build(case)
    imported = onnxio.load(proto)
    result = onnxio.to_proto(imported, imported.graph, opset=case.opset)
    assert versions.opset_of(result) == case.opset
    assert onnxio.check(result) is None
    assert_same_outputs(run(proto, {"x": case.feed}), run(result, {"x": case.feed}))


def test_an_opset_that_cannot_be_had_names_the_nodes_in_the_way() -> None:
    gelu = helper.make_node("Gelu", ["x"], ["y"], name="activation")
    imported = onnxio.load(model([gelu], {"x": X}, [info("y", X)]))
    with pytest.raises(ModelError, match=r"opset 17.*Gelu \('activation'\)"):
        onnxio.to_proto(imported, imported.graph, opset=17)


def test_statistics_per_element_become_arithmetic() -> None:
    """BatchNormalization with spatial=0, which ONNX Runtime does not run."""
    rng = np.random.default_rng(1)
    scale, bias, mean, var = (rng.random((4, 6, 5), np.float32) for _ in range(4))
    node = helper.make_node("BatchNormalization", ["x", "s", "b", "m", "v"], ["y"], spatial=0, epsilon=0.5)
    consts = {"s": scale, "b": bias, "m": mean, "v": var}
    imported = onnxio.load(model([node], {"x": X}, [info("y", X)], consts, opset=7))
    expected = (X - mean) / np.sqrt(var + 0.5) * scale + bias
    assert_same_outputs([expected], run(onnxio.to_proto(imported, imported.graph), {"x": X}))


@pytest.mark.parametrize("directions", [None, [0], [1]])
def test_a_scan_with_a_batch_dimension(directions: list[int] | None) -> None:
    body = helper.make_graph(
        [helper.make_node("Add", ["s", "x"], ["t"]), helper.make_node("Mul", ["t", "two"], ["y"]),
         helper.make_node("Identity", ["t"], ["u"])],
        "body",
        [helper.make_tensor_value_info("s", F, (3,)), helper.make_tensor_value_info("x", F, (3,))],
        [helper.make_tensor_value_info("u", F, (3,)), helper.make_tensor_value_info("y", F, (3,))],
    )  # fmt: skip
    attrs = {} if directions is None else {"directions": directions}
    scan = helper.make_node("Scan", ["", "start", "xs"], ["end", "ys"], body=body, num_scan_inputs=1, **attrs)
    start, xs = X[:, 0, 0, :3], X[:, :, 0, :3]
    outputs = [info("end", start), info("ys", xs)]
    proto = model([scan], {"start": start, "xs": xs}, outputs, {"two": np.float32([2])}, opset=8)
    imported = onnxio.load(proto)
    result = onnxio.to_proto(imported, imported.graph)
    feeds = {"start": start, "xs": xs}
    assert_same_outputs(run(proto, feeds), run(result, feeds))


def test_bodies_are_converted_too() -> None:
    def branch(name: str, op: str, **attrs: Any) -> onnx.GraphProto:
        nodes = [helper.make_node(op, ["x"], [f"{name}_y"], **attrs)]
        return helper.make_graph(nodes, name, [], [helper.make_tensor_value_info(f"{name}_y", F, None)])

    node = helper.make_node(
        "If", ["c"], ["y"], then_branch=branch("then", "Clip", max=0.0), else_branch=branch("else", "Softmax")
    )
    proto = model([node], {"x": X, "c": np.array(True)}, [info("y", X)], opset=10)
    imported = onnxio.load(proto)
    result = onnxio.to_proto(imported, imported.graph)
    for condition in (True, False):
        feeds = {"x": X, "c": np.array(condition)}
        assert_same_outputs(run(proto, feeds), run(result, feeds))


@recent
def test_a_newer_model_comes_down_where_nothing_changed() -> None:
    node = helper.make_node("Cast", ["x"], ["y"], to=TensorProto.DOUBLE)
    proto = model([node], {"x": X}, [info("y", X.astype(np.float64))], opset=24, ir_version=10)
    imported = onnxio.load(proto)
    assert [n.op for n in imported.graph.nodes()] == ["Cast"]
    for opset in (None, 23, 26):
        result = onnxio.to_proto(imported, imported.graph, opset=opset)
        assert versions.opset_of(result) == (opset or 24)
        assert_same_outputs(run(proto, {"x": X}), run(result, {"x": X}))


def test_a_newer_operator_keeps_its_opset_and_is_opaque() -> None:
    nodes = [helper.make_node("Relu", ["x"], ["r"]), helper.make_node("Swish", ["r"], ["y"])]
    proto = model(nodes, {"x": X}, [info("y", X)], opset=24, ir_version=11)
    imported = onnxio.load(proto)
    assert imported.opset == 24
    assert [n.op for n in imported.graph.topological()] == ["Relu", "ai.onnx@24::Swish"]
    result = onnxio.to_proto(imported, imported.graph)
    assert versions.opset_of(result) == 24
    assert onnxio.check(result) is None
    assert [n.domain for n in result.graph.node] == ["", ""]


@pytest.mark.parametrize("opset", [29, 99])
def test_an_opset_from_the_future_is_refused(opset: int) -> None:
    proto = model([helper.make_node("Relu", ["x"], ["y"])], {"x": X}, [info("y", X)], opset=opset)
    with pytest.raises(ModelError, match=f"opset {opset} is from the future"):
        onnxio.load(proto)


@pytest.mark.parametrize(
    ("op", "inputs", "attributes", "kept"),
    [
        ("Relu", ["x"], {}, "Relu"),
        ("SwiGLU", ["x", "x"], {}, "ai.onnx@28::SwiGLU"),
        ("Mod", ["x", "x"], {}, "ai.onnx@28::Mod"),  # of floats without fmod: new
        ("Celu", ["x"], {}, "Celu"),
    ],
)
def test_the_newest_opsets_are_read(
    op: str, inputs: list[str], attributes: dict[str, Any], kept: str
) -> None:
    node = helper.make_node(op, inputs, ["y"], **attributes)
    proto = model([node], {"x": X}, [info("y", X)], opset=28, ir_version=14)
    imported = onnxio.load(proto)
    assert [n.op for n in imported.graph.nodes()] == [kept]
    result = onnxio.to_proto(imported, imported.graph)
    assert versions.opset_of(result) == 28
    assert onnxio.check(result) is None
    assert [(n.domain, n.op_type) for n in result.graph.node] == [("", op)]


def test_an_operator_that_changed_before_opset_7_is_refused() -> None:
    node = helper.make_node("BatchNormalization", ["x", "a", "a", "a", "b"], ["y"], name="bn", is_test=1)
    consts = {"a": X[0, :, 0, 0], "b": np.ones(4, np.float32)}
    with pytest.raises(ModelError, match=r"'bn' \(BatchNormalization of opset 6\) is too old"):
        onnxio.load(model([node], {"x": X}, [info("y", X)], consts, opset=6))


def test_a_resize_that_shrinks_and_enlarges_at_once_is_refused() -> None:
    node = helper.make_node("Resize", ["x", "s"], ["y"], name="r")
    scales = np.float32([1, 1, 0.5, 2])
    with pytest.raises(ModelError, match="shrinks and enlarges at once"):
        onnxio.load(model([node], {"x": X}, [info("y", X[:, :, :3].repeat(2, 3))], {"s": scales}, opset=10))


@recent
@pytest.mark.parametrize("op", sorted(versions.DECOMPOSED))
def test_what_the_runtime_spells_out_at_some_opsets_alone_is_spelt_out(op: str) -> None:
    """ONNX Runtime has no kernel for these element types, and runs them at opset 18 all the same."""
    for dtype in versions.DECOMPOSED[op]:
        names = ["x", "w"] if op == "PRelu" else ["x"]
        graph = helper.make_graph(
            [helper.make_node(op, names, ["y"])],
            "g",
            [helper.make_tensor_value_info(n, dtype, [2, 3]) for n in names],
            [helper.make_tensor_value_info("y", dtype, [2, 3])],
        )
        proto = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 18)], ir_version=8)
        imported = onnxio.load(proto)
        assert op not in {n.op for n in imported.graph.nodes()}
        numbers = np.asarray([[-3.0, -0.5, 0.0], [0.25, 1.0, 4.0]])
        numpy_type = helper.tensor_dtype_to_np_dtype(dtype)
        if numpy_type.kind != "f":
            numbers = numbers.astype(np.int64)
        feeds = {n: numbers.astype(numpy_type) for n in names}
        assert_same_outputs(run(proto, feeds), run(onnxio.to_proto(imported, imported.graph), feeds))


@pytest.mark.parametrize(("old", "opset"), [(True, 21), (False, versions.OPSET)])
def test_an_old_runtime_gets_the_opset_that_it_has_kernels_for(
    old: bool, opset: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("xrlflow.onnxio.versions._old_runtime", lambda: old)
    nodes = [
        helper.make_node("QuantizeLinear", ["x", "s", "z"], ["q"]),
        helper.make_node("DequantizeLinear", ["q", "s", "z"], ["y"]),
    ]
    proto = model(nodes, {"x": X}, [info("y", X)], {"s": np.float32(0.1), "z": np.uint8(3)}, opset=23)
    imported = onnxio.load(proto)
    assert onnxio.to_proto(imported, imported.graph).opset_import[0].version == opset
    assert onnxio.to_proto(imported, imported.graph, opset=22).opset_import[0].version == 22


def test_operators_of_later_opsets_have_types() -> None:
    """And their work is counted as that of the operators of these names."""
    proto = onnx.parser.parse_model(
        '<ir_version: 11, opset_import: ["" : 24]> g (float[b, 2, s, 4] x, float[b, 2, t, 4] cache, int64[b] at, '
        "int64[b] filled) => (float[b, 2, s, 4] z) "
        "{ k = TensorScatter(cache, x, at) y = Attention(x, k, k, , , , filled) z = Relu(y) }"
    )
    graph = onnxio.load(proto).graph
    types = {node.op: node.types[0].shape for node in graph.nodes()}
    assert types == {
        "ai.onnx@24::TensorScatter": ("b", 2, "t", 4),
        "ai.onnx@24::Attention": ("b", 2, "s", 4),
        "Relu": ("b", 2, "s", 4),
    }
    attention = next(node for node in graph.nodes() if node.op.endswith("Attention"))
    types_in = [graph.type(v) if v else None for v in attention.inputs]
    assert work(attention, types_in, {"b": 1, "s": 3, "t": 5}).gemm == Gemm(2, 3, 5, 8)


@pytest.mark.parametrize("opset", [17, 21])
def test_operators_that_onnx_does_not_define_are_written_with_any_opset(opset: int) -> None:
    """ONNX Runtime has operators of its own in the domain of ONNX."""
    proto = onnx.parser.parse_model(
        '<ir_version: 8, opset_import: ["" : 17]> g (float[b, 4] x) => (float[b, 4] y) <float[4] w = {1, 2, 3, 4}> '
        "{ n = SimplifiedLayerNormalization<axis = -1>(x, w) y = Relu(n) }"
    )
    imported = onnxio.load(proto)
    for written in (
        onnxio.to_proto(imported, imported.graph),
        onnxio.to_proto(imported, imported.graph, opset=opset),
    ):
        feeds = {"x": np.ones((2, 4), np.float32)}
        assert_same_outputs(run(proto, feeds), run(written, feeds))
    assert versions.opset_of(onnxio.to_proto(imported, imported.graph)) == 17
    assert versions.opset_of(written) == opset


def test_a_squeeze_of_no_axes_drops_all_dimensions_of_1() -> None:
    """ONNX Runtime takes an empty tensor of axes like a missing one."""
    text = "g (float[2,1,3,1] x) => (float[2,3] y) <int64[0] none = {}> { y = Squeeze(x, none) }"
    proto = onnx.parser.parse_model(f'<ir_version: 10, opset_import: ["" : 21]> {text}')
    imported = onnxio.load(proto)
    (node,) = imported.graph.nodes()
    assert (len(node.inputs), node.types[0].shape) == (1, (2, 3))
