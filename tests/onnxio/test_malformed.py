"""Files that are damaged, or made to do damage: one line that names the file and what is wrong in it."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnxruntime as ort
import pytest
from onnx import TensorProto, helper, numpy_helper

from tests.onnxio.support import model
from tests.onnxio.test_errors import external, refused
from xrlflow.onnxio import ModelError, load, to_proto, wire

make, declare = helper.make_node, helper.make_tensor_value_info
X = declare("x", TensorProto.FLOAT, [2, 3])
C = declare("c", TensorProto.BOOL, [])
Y = declare("y", TensorProto.FLOAT, None)


def of(*nodes: onnx.NodeProto, **consts: Any) -> onnx.ModelProto:
    return model(nodes, [X, C], [Y], consts)


def with_attribute(op: str, name: str, **fields: Any) -> onnx.NodeProto:
    """A node with an attribute that no helper makes."""
    node = make(op, ["x"], ["y"], name="bad")
    node.attribute.add(name=name, **fields)
    return node


def weight(**fields: Any) -> onnx.ModelProto:
    proto = of(make("Add", ["x", "bad"], ["y"]))
    proto.graph.initializer.append(TensorProto(name="bad", **fields))
    return proto


def body(inputs: int, outputs: int) -> onnx.GraphProto:
    formals = [declare(f"i{k}", TensorProto.FLOAT, None) for k in range(inputs)]
    results = [declare(f"o{k}", TensorProto.FLOAT, None) for k in range(outputs)]
    return helper.make_graph([make("Relu", ["x"], [o.name]) for o in results], "b", formals, results)


def nested(depth: int) -> bytes:
    """Branches in branches, written by hand: ONNX's own classes do not nest so deeply."""

    def field(number: int, content: bytes) -> bytes:
        return wire.header(number, len(content)) + content

    inner = b""
    for _ in range(depth):
        branch = field(1, b"then_branch") + b"\xa0\x01\x05" + field(6, inner)
        inner = field(1, field(2, b"y") + field(4, b"If") + field(5, branch))
    graph = inner + field(12, Y.SerializeToString())
    return b"\x08\x08" + field(8, b"\x10\x11") + field(7, graph)


def functions(*calls: tuple[str, list[str]]) -> onnx.ModelProto:
    """Functions of domain "my", each a chain of calls."""
    imports = [helper.make_opsetid("", 17), helper.make_opsetid("my", 1)]
    made = []
    for name, called in calls:
        values = ["a", *(f"v{i}" for i in range(len(called) - 1)), "b"]
        nodes = [
            make(op, [values[i]], [values[i + 1]], domain="" if op == "Relu" else "my")
            for i, op in enumerate(called)
        ]
        made.append(helper.make_function("my", name, ["a"], ["b"], nodes, imports))
    nodes = [make(calls[0][0], ["x"], ["y"], domain="my")]
    return model(nodes, [X], [Y], opset=17, domains=["my"], functions=made)


def branch() -> onnx.GraphProto:
    return body(0, 1)


def replaced(text: str) -> bytes:
    """A model with bytes that are no text in place of this one."""
    proto = of(make("Relu" if text != "QQQQ" else text, ["x"], ["y"], name="WWWW"))
    return proto.SerializeToString().replace(text.encode(), b"\xff\xfe\xff\xfe")


def einsum_in_function(equation: str) -> onnx.ModelProto:
    imports = [helper.make_opsetid("", 12)]
    node = make("Einsum", ["a"], ["b"], equation=equation)
    made = helper.make_function("my", "F", ["a"], ["b"], [node], imports)
    return model([make("F", ["x"], ["y"], domain="my")], [X], [Y], opset=13, domains=["my"], functions=[made])


def in_body(change: Callable[[onnx.GraphProto], object]) -> bytes:
    """A model with a branch that was changed, and bytes that are no text in place of QQQQ."""
    arm = branch()
    change(arm)
    proto = of(make("If", ["c"], ["y"], then_branch=arm, else_branch=branch()), c=True)
    return proto.SerializeToString().replace(b"QQQQ", b"\xff\xfe\xff\xfe")


DAMAGED: dict[str, tuple[onnx.ModelProto | bytes, str]] = {
    "shallow nesting": (nested(50), "bodies are nested too deeply"),
    "deep nesting": (nested(3000), "bodies are nested too deeply"),
    "a recursive function": (functions(("F", ["F"])), "function my::F calls itself"),
    "functions of each other": (functions(("F", ["G"]), ("G", ["F"])), "calls itself"),
    "functions without end": (
        functions(*((f"F{i}", [f"F{i + 1}"] * 2) for i in range(40)), ("F40", ["Relu"])),
        r"1,099,511,627,776 nodes when they are inlined",
    ),
    "a Constant without value": (
        of(make("Constant", [], ["y"], name="bad")),
        r"node 'bad' \(Constant\) has no value",
    ),
    "a Constant that is no text": (
        model(
            [make("Constant", [], ["y"], name="bad", value_string=b"\xff")],
            [],
            [declare("y", TensorProto.STRING, None)],
        ),
        r"node 'bad' \(Constant\) is not as ONNX has it",
    ),
    "an unknown element type": (weight(data_type=99, dims=[3], raw_data=b"0" * 12), "tensor 'bad'.*99"),
    "no element type": (weight(data_type=0, dims=[3], raw_data=b"0" * 12), "tensor 'bad'"),
    "too little data": (
        weight(data_type=1, dims=[3], raw_data=b"0" * 11),
        "'bad' has 11 bytes of data and needs 12",
    ),
    "too much data": (
        weight(data_type=1, dims=[3], raw_data=b"0" * 13),
        "'bad' has 13 bytes of data and needs 12",
    ),
    "too few numbers": (weight(data_type=1, dims=[3], float_data=[1.0]), "tensor 'bad'"),
    "too many numbers": (weight(data_type=1, dims=[3], float_data=[1.0] * 4), "tensor 'bad'"),
    "no data": (weight(data_type=1, dims=[3]), "tensor 'bad'"),
    "negative dimensions": (
        weight(data_type=1, dims=[-3], raw_data=b"0" * 12),
        r"tensor 'bad'.*dimensions \[-3\]",
    ),
    "two of them": (weight(data_type=1, dims=[-3, -1], raw_data=b"0" * 12), "tensor 'bad'.*dimensions"),
    "dimensions beyond 64 bits": (
        weight(data_type=1, dims=[2**62, 4], raw_data=b""),
        "tensor 'bad'|'bad' has 0 bytes",
    ),
    "huge dimensions and a 0": (weight(data_type=1, dims=[2**62, 4, 0], raw_data=b""), "tensor 'bad'"),
    "half a byte too little": (weight(data_type=22, dims=[5], raw_data=b"00"), "tensor 'bad'"),
    "texts that are not UTF-8": (weight(data_type=8, dims=[1], string_data=[b"\xff"]), "tensor 'bad'"),
    "too few texts": (weight(data_type=8, dims=[2], string_data=[b"a"]), "tensor 'bad'"),
    "an operator's name that is no text": (replaced("QQQQ"), "not UTF-8"),
    "a node's name that is no text": (replaced("WWWW"), "not UTF-8"),
    **{
        f"the equation {equation}": (
            of(make("Einsum", ["x"], ["y"], name="bad", equation=equation)),
            r"node 'bad' \(Einsum\) has the equation",
        )
        for equation in ("a>b", "......", "i......", "ai..a...", "...A...->...a...", "a->b->c", "a1>1b")
    },
    "an equation of an old opset": (
        model([make("Einsum", ["x"], ["y"], name="bad", equation="a1>1b")], [X], [Y], opset=11),
        r"node 'bad' \(Einsum\) has the equation",
    ),
    "an equation in a function": (einsum_in_function("......"), r"\(Einsum\) has the equation"),
    "an equation of no letters": (
        of(make("Einsum", ["x"], ["y"], name="bad", equation=b"\xff\xfe\xc3")),
        r"node 'bad' \(Einsum\) has the equation",
    ),
    "an output's name in a body that is no text": (
        in_body(lambda g: (g.output.add(name="QQQQ"), g.initializer.add(name="QQQQ", data_type=1, dims=[0]))),
        "not UTF-8",
    ),
    "a Loop without body": (
        of(make("Loop", ["k", "", "x"], ["y"], name="bad"), k=3),
        r"node 'bad' \(Loop\) lacks 'body'",
    ),
    "a Loop without inputs": (
        of(make("Loop", [], ["y"], name="bad", body=body(2, 1))),
        r"'bad' \(Loop\) has 0 inputs",
    ),
    "a Loop whose body takes less": (
        of(make("Loop", ["k", "", "x"], ["y"], name="bad", body=body(2, 2)), k=3),
        "has 3 inputs, and its body 2",
    ),
    "a Loop whose body gives less": (
        of(make("Loop", ["k", "", "x"], ["y"], name="bad", body=body(3, 1)), k=3),
        "has 1 outputs, and its body 1",
    ),
    "an If without then": (
        of(make("If", ["c"], ["y"], name="bad", else_branch=branch())),
        "lacks 'then_branch'",
    ),
    "an If without else": (
        of(make("If", ["c"], ["y"], name="bad", then_branch=branch())),
        "lacks 'else_branch'",
    ),
    "a branch that is a number": (
        of(make("If", ["c"], ["y"], name="bad", then_branch=3, else_branch=branch())),
        "'then_branch' of type INT, not GRAPH",
    ),
    "a branch that gives nothing": (
        of(make("If", ["c"], ["y"], name="bad", then_branch=branch(), else_branch=body(0, 0))),
        "0 in 'else_branch'",
    ),
    "a Scan of all": (
        of(make("Scan", ["x"], ["y"], name="bad", num_scan_inputs=9, body=body(1, 1))),
        "too few for what it scans",
    ),
    "a Scan that does not say": (
        of(make("Scan", ["x"], ["y"], name="bad", body=body(1, 1))),
        "lacks 'num_scan_inputs'",
    ),
    "an axis that is a text": (
        of(make("Softmax", ["x"], ["y"], name="bad", axis="1")),
        "'axis' of type STRING, not INT",
    ),
    "a list that is texts": (
        of(make("Transpose", ["x"], ["y"], name="bad", perm=["1"])),
        "'perm' of type STRINGS, not INTS",
    ),
    "no permutation": (
        of(make("Transpose", ["x"], ["y"], name="bad", perm=[0, 5])),
        r"has \[0, 5\] for a permutation",
    ),
    "groups of none": (
        of(make("Conv", ["x", "w"], ["y"], name="bad", group=0), w=[[[1.0]]]),
        "'group' below 1",
    ),
    "steps of none": (
        of(make("MaxPool", ["x"], ["y"], name="bad", kernel_shape=[1], strides=[0])),
        "'strides' below 1",
    ),
    "no inputs": (of(make("Relu", [], ["y"], name="bad")), r"'bad' \(Relu\) has 0 inputs and needs 1"),
    "no outputs": (
        of(make("Relu", ["x"], ["y"]), make("Relu", ["x"], [], name="bad")),
        "has 0 outputs and needs 1",
    ),
}


@pytest.mark.parametrize("name", DAMAGED)
def test_damaged_models(tmp_path: Path, name: str) -> None:
    content, pattern = DAMAGED[name]
    path = tmp_path / "m.onnx"
    path.write_bytes(content if isinstance(content, bytes) else content.SerializeToString())
    refused(path, pattern)


def test_damage_in_a_body_is_found() -> None:
    inner = helper.make_graph([make("Softmax", ["x"], ["z"], name="bad", axis="1")], "b", [], [Y])
    inner.output[0].name = "z"
    proto = of(make("If", ["c"], ["y"], then_branch=inner, else_branch=branch()))
    with pytest.raises(onnx.checker.ValidationError):
        onnx.checker.check_model(proto)
    from xrlflow import onnxio

    with pytest.raises(
        onnxio.ModelError, match=r"node 'bad' \(Softmax\) has the attribute 'axis' of type STRING"
    ):
        onnxio.load(proto)


@pytest.mark.parametrize(
    ("key", "value", "pattern"),
    [
        ("offset", "-4", "too short"),
        ("offset", "9" * 30, "too short"),
        ("length", "9" * 30, "too short"),
        ("length", "5", "5 bytes of data and needs"),
        ("offset", "four", "'four' in its external data"),
        ("offset", "9" * 5000, "in its external data"),
        ("location", "pipe", "not a regular file"),
        ("location", "folder", "directory"),
        ("location", "x" * 5000, "too long"),
        ("location", "a\0b", "outside the model's folder"),
    ],
)
def test_places_in_external_data(tmp_path: Path, key: str, value: str, pattern: str) -> None:
    os.mkfifo(tmp_path / "pipe")
    (tmp_path / "folder").mkdir()
    path = external(tmp_path)
    proto = onnx.load(path, load_external_data=False)
    for entry in proto.graph.initializer[0].external_data:
        if entry.key == key:
            entry.value = value
    path.write_bytes(proto.SerializeToString())
    refused(path, f"(?i){pattern}")


def test_a_pipe_is_not_waited_for(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    refused(tmp_path / "pipe", "not a regular file")


@pytest.mark.parametrize(
    "change",
    [
        lambda sparse: sparse.dims.__setitem__(0, -2),
        lambda sparse: sparse.values.__setattr__("data_type", 99),
    ],
)
def test_sparse_initialisers(tmp_path: Path, change: Callable[[onnx.SparseTensorProto], None]) -> None:
    proto = of(make("Add", ["x", "bad"], ["y"]))
    sparse = proto.graph.sparse_initializer.add(dims=[2, 3])
    sparse.values.CopyFrom(numpy_helper.from_array(np.ones(2, np.float32), "bad"))
    sparse.indices.CopyFrom(numpy_helper.from_array(np.array([0, 1])))
    change(sparse)
    (tmp_path / "m.onnx").write_bytes(proto.SerializeToString())
    refused(tmp_path / "m.onnx", "not as ONNX has it|'bad' has the dimensions")


def test_a_shape_of_a_billion_dimensions() -> None:
    """ONNX's inference would take the memory for all of them."""
    inputs = [X, declare("shape", TensorProto.INT64, [1 << 32])]
    proto = model([make("Expand", ["x", "shape"], ["y"], name="bad")], inputs, [Y])
    with pytest.raises(ModelError, match=r"node 'bad' .*no tensor has so many dimensions"):
        load(proto)


def test_texts_that_nothing_depends_on_need_not_be_text() -> None:
    body = helper.make_graph(
        [make("Neg", ["x"], ["t"])], "BODYNAME", [], [declare("t", TensorProto.FLOAT, None)]
    )
    node = make("If", ["c"], ["y"], then_branch=body, else_branch=body, doc_string="DOCSTRING")
    data = (
        of(node)
        .SerializeToString()
        .replace(b"BODYNAME", b"BODY\xff\xfeME")
        .replace(b"DOCSTRING", b"DOC\xfdTRING")
    )
    imported = load(data)
    onnx.load_from_string(to_proto(imported, imported.graph).SerializeToString())


@pytest.mark.parametrize("hostile", ["two\nlines", "\x1b[31mred\x07", "x" * 100_000, "\u202eturned"])
def test_hostile_names_stay_within_one_line(hostile: str) -> None:
    for node in (
        make(hostile, ["nowhere"], ["y"]),
        make("Relu", [hostile], ["y"]),
        make("Relu", ["nowhere"], ["y"], name=hostile),
    ):
        with pytest.raises(ModelError) as caught:
            load(of(node))
        told = str(caught.value)
        assert told.isprintable()
        assert len(told) < 2100


def test_a_dimension_whose_name_is_no_text_is_not_known() -> None:
    body = helper.make_graph(
        [make("Neg", ["x"], ["t"])], "b", [], [declare("t", TensorProto.FLOAT, ["DIMENSION", 3])]
    )
    proto = of(make("If", ["c"], ["y"], then_branch=body, else_branch=body))
    proto.graph.input.append(declare("z", TensorProto.FLOAT, ["DIMENSION"]))
    imported = load(proto.SerializeToString().replace(b"DIMENSION", b"DIM\xff\xfeSION"))
    onnx.load_from_string(to_proto(imported, imported.graph).SerializeToString())


def test_a_body_that_only_an_own_operator_has_is_kept() -> None:
    body = helper.make_graph([make("Neg", ["x"], ["t"])], "b", [], [declare("t", TensorProto.FLOAT, None)])
    proto = model(
        [make("Odd", ["s"], ["y"], domain="my", else_branch=body)],
        [X, declare("s", TensorProto.FLOAT, ["N", 4])],
        [Y],
        domains=["my"],
    )
    imported = load(proto)
    (node,) = to_proto(imported, imported.graph).graph.node
    assert [a.name for a in node.attribute] == ["else_branch"]


@pytest.mark.parametrize(
    "change",
    [
        lambda g: g.initializer.add(name="QQQQ", data_type=1, dims=[1], float_data=[1.0]),
        lambda g: g.value_info.add(name="QQQQ"),
    ],
)
def test_what_nobody_can_read_need_not_have_a_name(change: Callable[[onnx.GraphProto], object]) -> None:
    data = in_body(change)
    ort.InferenceSession(data, providers=["CPUExecutionProvider"])
    imported = load(data)
    onnx.load_from_string(to_proto(imported, imported.graph).SerializeToString())


@pytest.mark.parametrize("own", [[11], [13], [13, 11], [11, 13]])
@pytest.mark.parametrize("opset", [11, 13])
def test_a_function_is_of_the_models_opset(opset: int, own: list[int]) -> None:
    """As in ONNX Runtime."""
    node = make("Softmax", ["a"], ["b"])
    made = helper.make_function("my", "F", ["a"], ["b"], [node], [helper.make_opsetid("", v) for v in own])
    x = declare("x", TensorProto.FLOAT, [2, 3, 2])
    proto = model(
        [make("F", ["x"], ["y"], domain="my")], [x], [Y], opset=opset, domains=["my"], functions=[made]
    )
    assert_as_in_the_runtime(proto)


@pytest.mark.parametrize("opsets", [(13, 12), (12, 13), (13, 13)])
@pytest.mark.parametrize("alias", ["", "ai.onnx"])
def test_of_several_opsets_of_a_domain_the_last_counts(opsets: tuple[int, int], alias: str) -> None:
    """As in ONNX Runtime. A Softmax without an axis meant the last two dimensions until opset 12."""
    proto = model([make("Softmax", ["x"], ["y"])], [declare("x", TensorProto.FLOAT, [2, 3, 2])], [Y])
    del proto.opset_import[:]
    for domain, version in zip(("", alias), opsets):
        proto.opset_import.add(domain=domain, version=version)
    assert_as_in_the_runtime(proto)


def assert_as_in_the_runtime(proto: onnx.ModelProto) -> None:
    imported = load(proto)
    x = np.arange(12, dtype=np.float32).reshape(2, 3, 2)
    results = [
        ort.InferenceSession(p.SerializeToString(), providers=["CPUExecutionProvider"]).run(None, {"x": x})[0]
        for p in (proto, to_proto(imported, imported.graph))
    ]
    np.testing.assert_allclose(*results, atol=1e-6)
