"""Nodes that do not fit their operators are refused when the file is read, in one line that names the node."""

from __future__ import annotations

from typing import Any

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper

import xrlflow
from tests.onnxio.support import assert_same_outputs, model, run
from xrlflow import onnxio
from xrlflow.ir import Body
from xrlflow.onnxio import ModelError, load, to_proto

make, declare = helper.make_node, helper.make_tensor_value_info
X = declare("x", TensorProto.FLOAT, [2, 3])
C = declare("c", TensorProto.BOOL, [])
Y = declare("y", TensorProto.FLOAT, None)


def of(*nodes: onnx.NodeProto, opset: int = 17, **consts: Any) -> onnx.ModelProto:
    return model(nodes, [X, C], [Y], consts, opset=opset)


def changed(node: onnx.NodeProto, **fields: Any) -> onnx.NodeProto:
    """The node with other fields in its first attribute."""
    for name, value in fields.items():
        if isinstance(value, list):
            getattr(node.attribute[0], name).extend(value)
        else:
            setattr(node.attribute[0], name, value)
    return node


def emptied(node: onnx.NodeProto) -> onnx.NodeProto:
    """The node with a first attribute that has a type and no value."""
    node.attribute[0].ClearField("f")
    return node


def again(node: onnx.NodeProto) -> onnx.NodeProto:
    """The node with its first attribute twice."""
    node.attribute.append(node.attribute[0])
    return node


def in_branch(*nodes: onnx.NodeProto) -> onnx.ModelProto:
    """A model in whose branches the nodes make `o`."""
    arms = [
        helper.make_graph(list(nodes), "b", [], [declare("o", TensorProto.FLOAT, None)]) for _ in range(2)
    ]
    return of(
        make("If", ["c"], ["y"], then_branch=arms[0], else_branch=arms[1]), w=np.ones((4, 4), np.float32)
    )


def in_loop(*nodes: onnx.NodeProto) -> onnx.ModelProto:
    """A model with a loop in whose body the nodes make `o` of the state `s`."""
    i, go = declare("i", TensorProto.INT64, []), declare("go", TensorProto.BOOL, [])
    state, out = declare("s", TensorProto.FLOAT, None), declare("o", TensorProto.FLOAT, None)
    on = declare("on", TensorProto.BOOL, [])
    body = helper.make_graph([make("Identity", ["go"], ["on"]), *nodes], "b", [i, go, state], [on, out])
    loop = make("Loop", ["", "c", "x"], ["y"], body=body)
    return of(loop, w=np.ones((4, 4), np.float32), n=np.int64(2))


def in_function(*nodes: onnx.NodeProto) -> onnx.ModelProto:
    """A model with a function whose nodes make `o` of `a`."""
    imports = [helper.make_opsetid("", 17)]
    made = helper.make_function("my", "F", ["a"], ["o"], list(nodes), imports)
    return model([make("F", ["x"], ["y"], domain="my")], [X], [Y], opset=17, domains=["my"], functions=[made])


ONES = np.ones((4, 4), np.float32)
CAST = make("Cast", ["x"], ["d"], to=TensorProto.DOUBLE)
TEXT = make("Cast", ["x"], ["t"], to=TensorProto.STRING)
WRONG: dict[str, tuple[onnx.ModelProto, str]] = {
    "no operand": (of(make("MatMul", ["x", ""], ["y"], name="bad")), "node 'bad' (MatMul) lacks its operand 'B'"),
    "too few": (of(make("MatMul", ["x"], ["y"], name="bad")), "node 'bad' (MatMul) has 1 inputs and needs 2"),
    "too many": (of(make("Relu", ["x", ""], ["y"], name="bad")), "node 'bad' (Relu) has 2 inputs and needs 1"),
    "none of several": (of(make("Sum", ["x", ""], ["y"])), "that makes 'y' (Sum) lacks its operand 'data_0'"),
    "no output": (
        of(make("TopK", ["x", "k"], ["", "i"], name="bad"), make("Cast", ["i"], ["y"], to=1), k=np.array([1])),
        "node 'bad' (TopK) lacks a name for its output 'Values'",
    ),
    "an unknown attribute": (
        of(make("Equal", ["x", "x"], ["q"], name="bad", strange=3), make("Relu", ["x"], ["y"])),
        "node 'bad' (Equal) has the attribute 'strange', which Equal does not have",
    ),
    "an attribute of another opset": (
        of(make("Relu", ["x"], ["y"], consumed_inputs=[0])),
        "has the attribute 'consumed_inputs', which Relu does not have",
    ),
    "an attribute of another type": (
        of(make("Softmax", ["x"], ["y"], axis=1.0)),
        "has the attribute 'axis' of type FLOAT, not INT",
    ),
    "an attribute without type": (
        of(changed(make("Softmax", ["x"], ["y"], axis=1), type=0)),
        "has the attribute 'axis' of type UNDEFINED, not INT",
    ),
    "an attribute with two values": (
        of(changed(make("Softmax", ["x"], ["y"], axis=1), ints=[0, 1])),
        "has the attribute 'axis' with a value that is not of type INT",
    ),
    "an attribute twice": (of(again(make("Softmax", ["x"], ["y"], axis=1))), "has the attribute 'axis' twice"),
    "an attribute that must be there": (of(make("Cast", ["x"], ["y"])), "lacks 'to'"),
    "an axis": (
        of(make("Concat", ["x", "x"], ["y"], name="bad", axis=99)),
        "node 'bad' (Concat) does not fit its operands (float[2,3], float[2,3]): axis",
    ),
    "an axis of older opsets": (of(make("Softmax", ["x"], ["y"], axis=7), opset=11), "(Softmax) does not fit"),
    "axes": (of(make("ReduceSum", ["x", "a"], ["y"]), a=np.array([5])), "(ReduceSum) does not fit its operands"),
    "a permutation": (of(make("Transpose", ["x"], ["y"], perm=[0, 1, 2])), "(Transpose) does not fit"),
    "sizes": (
        of(make("Mul", ["x", "w"], ["y"]), w=ONES),
        "(Mul) does not fit its operands (float[2,3], float[4,4]): Incompatible dimensions",
    ),
    "sizes of products": (of(make("MatMul", ["x", "w"], ["y"]), w=ONES), "(MatMul) does not fit its operands"),
    "two element types": (
        of(CAST, make("Add", ["x", "d"], ["y"])),
        "(Add) does not fit its operands (float[2,3], double[2,3]): B has inconsistent type tensor(double)",
    ),
    "an element type": (
        of(TEXT, make("Relu", ["t"], ["r"]), make("Relu", ["x"], ["y"])),
        "(Relu) does not fit its operands (string[2,3])",
    ),
    "in a branch": (in_branch(make("Add", ["x", "w"], ["o"])), "makes 'o' (Add) does not fit"),
    "in a loop": (in_loop(make("Add", ["x", "w"], ["a"]), make("Identity", ["s"], ["o"])), "(Add) does not fit"),
    "in a function": (in_function(make("Concat", ["a", "a"], ["o"], axis=9)), "(Concat) does not fit"),
    "an attribute in a function": (in_function(make("Relu", ["a"], ["o"], b=9)), "has the attribute 'b'"),
    "an axis beyond 32 bits": (of(make("Flatten", ["x"], ["y"], axis=-(2**63))), "'axis' of -9223372036854775808"),
    "a way to pad": (of(make("MaxPool", ["x"], ["y"], kernel_shape=[1], auto_pad="ROUND")), "'auto_pad' of b'ROUND'"),
    "the type of a loop's result": (
        in_loop(make("Cast", ["s"], ["d"], to=TensorProto.DOUBLE), make("Identity", ["d"], ["o"])), "is declared"
    ),
    "a name twice": (
        of(make("Relu", ["x"], ["a"], name="p"), make("Neg", ["a"], ["b"]), make("Abs", ["b"], ["a"], name="q"),
           make("Exp", ["a"], ["y"])),
        "the name 'a' is defined twice, by node 'p' (Relu) and by node 'q' (Abs): give one of them another name",
    ),
    "a name twice in a node": (of(make("Split", ["x"], ["y", "y"], name="p")), "'y' is defined twice, by node 'p'"),
    "the name of an input": (of(make("Relu", ["x"], ["x"]), make("Neg", ["x"], ["y"])), "by an input of the graph"),
    "the name of a constant": (
        of(make("Relu", ["x"], ["w"]), make("Neg", ["w"], ["y"]), w=ONES),
        "the name 'w' is defined twice, by an initialiser and by node '' (Relu)",
    ),
    "a name twice in a branch": (
        in_branch(make("Neg", ["x"], ["o"]), make("Abs", ["x"], ["o"])), "the name 'o' is defined twice"
    ),
}  # fmt: skip


@pytest.mark.parametrize("case", WRONG)
def test_what_does_not_fit_is_refused(case: str) -> None:
    proto, told = WRONG[case]
    with pytest.raises(ModelError) as caught:
        load(proto)
    assert told in str(caught.value)
    assert "\n" not in str(caught.value)


def own(claim: list[int]) -> onnx.ModelProto:
    """A model with an operator that ONNX does not define; its file says what shape that makes."""
    proto = model(
        [make("Odd", ["x"], ["o"], domain="my"), make("Concat", ["o", "x"], ["y"], axis=0)], [X], [Y],
        domains=["my"], opset=17,
    )  # fmt: skip
    proto.graph.value_info.append(declare("o", TensorProto.FLOAT, claim))
    return proto


def only_in_a_branch() -> onnx.ModelProto:
    """A branch that fails if it is taken, as sizes tell that are computed from an input's width."""
    nodes = [
        make("Shape", ["x"], ["s"]), make("Gather", ["s", "one"], ["w"]), make("Mul", ["w", "two"], ["w2"]),
        make("Unsqueeze", ["w2", "zero"], ["w3"]), make("Concat", ["rest", "w3"], ["sizes"], axis=0),
        make("Reshape", ["x", "sizes"], ["r"]), make("Add", ["r", "k"], ["o"], name="bad"),
    ]  # fmt: skip
    numbers = {"one": np.int64(1), "two": np.int64(2), "zero": np.array([0]), "rest": np.array([-1])}
    arms = [
        helper.make_graph(arm, "b", [], [declare("o", TensorProto.FLOAT, None)])
        for arm in (nodes, [make("Relu", ["x"], ["o"])])
    ]
    node = make("If", ["c"], ["y"], then_branch=arms[0], else_branch=arms[1])
    wide = declare("x", TensorProto.FLOAT, ["n", 4])
    return model([node], [wide, C], [Y], {"k": np.ones(5, np.float32), **numbers}, opset=17)


RIGHT: dict[str, onnx.ModelProto] = {
    "a branch that is not taken": only_in_a_branch(),
    "a Constant with two values": of(make("Constant", ["x"], ["y"], value_float=1.0, value_int=2)),
    "a Constant of nothing": of(
        emptied(make("Constant", [], ["k"], value_float=1.0)), make("Add", ["x", "k"], ["y"])
    ),
    "a Constant of another name": of(make("Constant", [], ["y"], axis=np.float32(1).item())),
    "three for yes or no": model(
        [make("ReduceSum", ["x", "a"], ["s"], keepdims=3), make("Gemm", ["s", "w"], ["y"], transB=3)],
        [declare("x", TensorProto.FLOAT, [2, 3, 4])],
        [Y],
        {"a": np.array([1]), "w": np.ones((5, 4), np.float32)},
        opset=17,
    ),
    "padding without a name": model(
        [make("Conv", ["x", "w"], ["y"], auto_pad="", strides=[2, 2])],
        [declare("x", TensorProto.FLOAT, [1, 1, 5, 5])],
        [Y],
        {"w": np.ones((1, 1, 3, 3), np.float32)},
        opset=17,
    ),
    **{
        f"an attribute that only a runtime has, {opset}": of(
            make("LayerNormalization", ["x", "w"], ["y"], strange=3), w=np.ones(3, np.float32), opset=opset
        )
        for opset in (16, 17)
    },
    "an operator that the runtime had first": model(
        [
            make("Gelu", ["x"], ["g"], domain="com.microsoft"),
            make("MeanVarianceNormalization", ["g"], ["y"], across_channels=1),
        ],
        [declare("x", TensorProto.FLOAT, [1, 2, 3, 4])],
        [Y],
        domains=["com.microsoft"],
        opset=8,
    ),
    "numbers of heads that are not set": model(
        [make("Attention", ["x", "x", "x"], ["y"], q_num_heads=0, kv_num_heads=0)],
        [declare("x", TensorProto.FLOAT, [1, 2, 3, 4])],
        [Y],
        opset=23,
    ),
    "notes of a runtime": of(make("Relu", ["x"], ["y"], __note=1)),
    "outputs that nobody reads": of(make("Dropout", ["x"], ["y", ""])),
    "operands left out": of(make("Clip", ["x", "", "m"], ["y"]), m=np.float32(1)),
    "nodes in any order": of(make("Relu", ["r"], ["y"]), make("Neg", ["x"], ["r"])),
    "an operator that is newer than the model": of(
        make("LayerNormalization", ["x", "w"], ["y"]), w=np.ones(3, np.float32), opset=16
    ),
    "a declared shape that is wrong": of(make("Relu", ["x"], ["r"]), make("Neg", ["r"], ["y"])),
    "a name that a branch has, too": in_branch(
        make("Identity", ["w"], ["k"]), make("ReduceSum", ["k"], ["o"])
    ),
}
RIGHT["a declared shape that is wrong"].graph.value_info.append(declare("r", TensorProto.FLOAT, [7, 7, 7]))


@pytest.mark.parametrize("case", RIGHT)
def test_what_the_runtime_takes_is_read(case: str) -> None:
    feeds = {v.name: np.ones([d.dim_value or 2 for d in v.type.tensor_type.shape.dim], bool if v.name == "c" else "f4")
             for v in RIGHT[case].graph.input}  # fmt: skip
    if case == "a branch that is not taken":
        feeds["c"] = np.array(False)
    imported = load(RIGHT[case])
    assert_same_outputs(run(RIGHT[case], feeds), run(to_proto(imported, imported.graph), feeds))


def test_no_rule_sees_a_node_that_fails_where_it_is_run() -> None:
    """It is written as it was, and the rest is searched."""
    (choice,) = load(only_in_a_branch()).graph.nodes()
    names = {n.op for body in choice.attrs.values() if isinstance(body, Body) for n in body.graph.nodes()}
    assert "ai.onnx@23::Add" in names
    result = xrlflow.optimize(only_in_a_branch(), search="greedy", measure=False, verify=False, portable=True)
    arms = [a.g for n in result.model.graph.node for a in n.attribute]
    assert {n.domain for arm in arms for n in arm.node} == {""}
    assert any(n.op_type == "Add" and n.name == "bad" for arm in arms for n in arm.node)


def test_operators_of_others_are_not_looked_at() -> None:
    node = make("Odd", ["x", "", "x"], ["y", ""], domain="my", strange=3)
    imported = load(model([node], [X], [Y], domains=["my"]))
    assert imported.notes == ()
    assert [n.op for n in imported.graph.nodes()] == ["my::Odd"]


def test_a_shape_that_only_the_file_knows_is_believed_until_it_contradicts() -> None:
    assert load(own([5, 3])).notes == ()
    imported = load(own([5, 4]))
    (note,) = imported.notes
    assert note.startswith(
        "what the model declares of its values is not believed: the node that makes 'y' (Concat)"
    )
    (odd,) = [n for n in imported.graph.nodes() if n.op == "my::Odd"]
    assert odd.types[0].shape is None


def test_types_that_inference_takes_for_known_are_there(monkeypatch: pytest.MonkeyPatch) -> None:
    """ONNX's inference reads the type of an EyeLike's operand, even where no node before it tells."""
    seen: list[onnx.ModelProto] = []
    infer = onnx.shape_inference.infer_shapes
    monkeypatch.setattr(
        onnx.shape_inference,
        "infer_shapes",
        lambda m, *args, **more: (seen.append(m), infer(m, *args, **more))[1],
    )
    nodes = [make("EyeLike", ["o"], ["y"]), make("Odd", ["x"], ["o"], domain="my")]
    imported = load(model(nodes, [X], [Y], domains=["my"], opset=17))
    onnxio.check_result(imported, imported.graph)
    assert len(seen) >= 4
    assert all(
        any(v.name == "o" and v.type.HasField("tensor_type") for v in m.graph.value_info) for m in seen
    )
    assert imported.graph.type(imported.graph.producers[imported.graph.outputs[0]].inputs[0]).shape is None


def test_elements_without_a_type_are_told_by_the_checker() -> None:
    proto = model([make("Relu", ["x"], ["y"])], [X], [declare("y", TensorProto.FLOAT, [2, 3])], opset=17)
    value = proto.graph.input.add(name="q")
    value.type.sequence_type.elem_type.tensor_type.SetInParent()
    proto.graph.node.append(make("SequenceMap", ["q"], ["r"], body=helper.make_graph(
        [make("Identity", ["i"], ["o"])], "b",
        [declare("i", TensorProto.FLOAT, ["N"])], [declare("o", TensorProto.FLOAT, ["M"])],
    )))  # fmt: skip
    made = proto.graph.output.add(name="r").type.sequence_type.elem_type.tensor_type
    made.elem_type = TensorProto.FLOAT
    made.shape.dim.add(dim_param="N")
    assert "data type 0" in str(onnxio.check(proto))


def test_types_that_a_file_declares_of_its_constants_hide_nothing() -> None:
    """Beside a type of `axes` without a shape, ONNX's inference slices the first axis: exporters declare such types."""
    slices = [make("Slice", ["x", "s", "e", "axes"], ["a"]), make("Slice", ["x", "e", "far", "axes"], ["b"])]
    numbers = {"s": np.int64([0]), "e": np.int64([2]), "far": np.int64([9]), "axes": np.int64([1])}
    proto = of(*slices, make("Concat", ["b", "a"], ["y"], axis=-1), **numbers)
    proto.graph.value_info.extend(declare(name, TensorProto.INT64, [1]) for name in numbers)
    assert load(proto).graph.type(load(proto).graph.outputs[0]).shape == (2, 3)
