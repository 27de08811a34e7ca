"""Bytes that protobuf reads in one way are read in that way: every order, repetition and explicit default of fields."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import onnx
import onnxruntime as ort
import pytest
from google.protobuf.descriptor import Descriptor, FieldDescriptor  # type: ignore[import-untyped]
from onnx import TensorProto, helper, numpy_helper

from tests.levels import crossed
from tests.onnxio.support import model
from xrlflow.onnxio import ModelError, load, protos, to_proto, wire
from xrlflow.onnxio.tensors import TensorStore

pytestmark = pytest.mark.corpus

make, declare = helper.make_node, helper.make_tensor_value_info

Fields = list[tuple[FieldDescriptor, bytes]]
Edit = Callable[[Any, Fields], Fields]
LARGE, SMALL_ = (64, 64), (2, 2)


# A serialiser whose fields a test may reorder, repeat and add to.


def serialised(message: Any, edit: Edit = lambda message, fields: fields) -> bytes:
    fields: Fields = []
    for field, value in message.ListFields():
        if field.type != FieldDescriptor.TYPE_MESSAGE:
            alone = type(message)()
            if field.is_repeated:
                getattr(alone, field.name).extend(value)
            else:
                setattr(alone, field.name, value)
            fields.append((field, alone.SerializeToString()))
            continue
        for part in value if field.is_repeated else [value]:
            fields.append((field, framed(field.number, serialised(part, edit))))
    return b"".join(data for _, data in edit(message, fields))


def framed(number: int, content: bytes) -> bytes:
    return wire.header(number, len(content)) + content


def explicit_default(field: FieldDescriptor) -> bytes:
    """A singular field with the value that it has when it is absent."""
    if field.type in (FieldDescriptor.TYPE_MESSAGE, FieldDescriptor.TYPE_STRING, FieldDescriptor.TYPE_BYTES):
        return framed(field.number, b"")
    if field.type == FieldDescriptor.TYPE_FLOAT:
        return wire.varint(field.number << 3 | 5) + bytes(4)
    assert field.default_value == 0
    return wire.varint(field.number << 3) + b"\0"


def message_types() -> list[Descriptor]:
    """Every message type that a ModelProto may contain."""
    found: dict[str, Descriptor] = {}
    work = [onnx.ModelProto.DESCRIPTOR]
    while work:
        type = work.pop()
        if type.full_name not in found:
            found[type.full_name] = type
            work.extend(f.message_type for f in type.fields if f.message_type is not None)
    return list(found.values())


OPTIONAL = [field for type in message_types() for field in type.fields if not field.is_repeated]


def name(field: FieldDescriptor) -> str:
    return f"{field.containing_type.name}.{field.name}"


def unset(message: Any, field: FieldDescriptor) -> bool:
    oneof = field.containing_oneof
    return not (message.HasField(field.name) if oneof is None else message.WhichOneof(oneof.name))


def with_default(added: FieldDescriptor, first: bool) -> Edit:
    """Put the explicit default before all fields of each message that may have it, or behind them if that is unset."""

    def edit(message: Any, fields: Fields) -> Fields:
        if message.DESCRIPTOR is not added.containing_type:
            return fields
        more = [(added, explicit_default(added))]
        if first:
            return [*more, *fields]
        return [*fields, *more] if unset(message, added) else fields

    return edit


def backwards(message: Any, fields: Fields) -> Fields:
    """The fields in descending order of their numbers; the parts of a repeated field stay in order."""
    return sorted(fields, key=lambda field: -field[0].number)


# Models: one with everything that onnx.proto has, and one that runs.


def tensor(label: str, shape: tuple[int, ...], typed: bool = False, dtype: Any = np.float32) -> TensorProto:
    array = (np.arange(np.prod(shape)) % 7).astype(dtype).reshape(shape)
    if typed:
        return helper.make_tensor(label, helper.np_dtype_to_tensor_dtype(array.dtype), shape, array.ravel())
    return numpy_helper.from_array(array, label)


def everything(shape: tuple[int, ...], typed: bool = False) -> onnx.ModelProto:
    """A model with every field of every message type, and tensors wherever they may be. It does not run."""

    def fill(message: Any, above: tuple[str, ...] = ()) -> Any:
        type = message.DESCRIPTOR
        if type is TensorProto.DESCRIPTOR:
            message.CopyFrom(tensor("w", shape, typed))
            message.metadata_props.add(key="k", value="v")
            return message
        seen = set[str]()
        for field in type.fields:
            if field.containing_oneof is not None:
                if field.containing_oneof.name in seen:
                    continue
                seen.add(field.containing_oneof.name)
            if field.message_type is not None:
                if above.count(field.message_type.name) > 1:
                    continue
                inner = getattr(message, field.name)
                inner = inner.add() if field.is_repeated else inner
                inner.SetInParent()
                fill(inner, (*above, type.name))
                continue
            value: Any = field.number
            if field.type == FieldDescriptor.TYPE_STRING:
                value = field.name
            elif field.type == FieldDescriptor.TYPE_BYTES:
                value = field.name.encode()
            elif field.enum_type is not None:
                value = field.enum_type.values[-1].number
            if field.is_repeated:
                getattr(message, field.name).extend([value, value])
            else:
                setattr(message, field.name, value)
        return message

    made: onnx.ModelProto = fill(onnx.ModelProto())
    return made


def sparse(label: str, shape: tuple[int, ...]) -> onnx.SparseTensorProto:
    values = tensor(label, (int(np.prod(shape)) // 2,))
    indices = numpy_helper.from_array(2 * np.arange(values.dims[0], dtype=np.int64), f"{label}_indices")
    return helper.make_sparse_tensor(values, indices, list(shape))


def running(shape: tuple[int, ...], typed: bool = False, dtype: Any = np.float32) -> onnx.ModelProto:
    """A model that ONNX Runtime runs, with tensors in the graph, attributes, bodies and a function."""
    elem = helper.np_dtype_to_tensor_dtype(np.dtype(dtype))

    def weight(label: str) -> TensorProto:
        return tensor(label, shape, typed, dtype)

    def branch(label: str, op: str) -> onnx.GraphProto:
        nodes = [
            make("Constant", [], [f"{label}_k"], value=weight(f"{label}_k")),
            make(op, ["f", f"{label}_k"], [f"{label}_s"]),
            make(op, [f"{label}_s", f"{label}_w"], [f"{label}_y"]),
        ]
        outputs = [declare(f"{label}_y", elem, list(shape))]
        return helper.make_graph(nodes, label, [], outputs, [weight(f"{label}_w")])

    plus = [make("Constant", [], ["k"], value=weight("k")), make("Add", ["a", "k"], ["b"])]
    function = helper.make_function("my", "Plus", ["a"], ["b"], plus, [helper.make_opsetid("", 21)])
    nodes = [
        make("Constant", [], ["c"], value=weight("c"), name="constant", doc_string="text"),
        make("Add", ["x", "c"], ["d"]),
        make("Add", ["d", "w"], ["e"]),
        make("Plus", ["e"], ["f"], domain="my"),
        make("If", ["t"], ["g"], then_branch=branch("p", "Add"), else_branch=branch("q", "Sub")),
        make("ReduceSum", ["g", "axes"], ["y"], keepdims=1),
    ]
    if dtype is np.float32:
        nodes.insert(1, make("Constant", [], ["sv"], sparse_value=sparse("", shape)))
        nodes[2].input[1] = "sum"
        nodes[2:2] = [make("Add", ["c", "sv"], ["cs"]), make("Add", ["cs", "si"], ["sum"])]
    x, t = declare("x", elem, [*shape[:1], "n"]), declare("t", TensorProto.BOOL, [])
    y = declare("y", elem, None)
    proto = model(nodes, [x, t], [y], {"axes": np.array([1])}, opset=21, domains=["my"], functions=[function])
    proto.graph.initializer.append(weight("w"))
    proto.graph.value_info.append(declare("d", elem, ["m", None]))
    if dtype is np.float32:
        proto.graph.sparse_initializer.append(sparse("si", shape))
    proto.metadata_props.add(key="k", value="v")
    proto.graph.quantization_annotation.add(tensor_name="d").quant_parameter_tensor_names.add(
        key="SCALE_TENSOR", value="w"
    )
    return proto


# What protobuf makes of the bytes.


def check_agrees(data: bytes) -> int:
    """Check that a model without its large tensors, with them put back, is what protobuf reads; the number of these."""
    wanted = onnx.ModelProto.FromString(data)
    got = onnx.ModelProto.FromString(wire.strip_model(memoryview(data)))
    for proto in (wanted, got):
        proto.DiscardUnknownFields()
    stripped = 0
    for a, b in zip(protos.all_tensors(got), protos.all_tensors(wanted), strict=True):
        if any(e.value == wire.EMBEDDED for e in a.external_data):
            stripped += 1
            assert b.data_location != TensorProto.EXTERNAL
            raw = b.raw_data if b.HasField("raw_data") else packed(b)
            del b.external_data[:]
            b.ClearField("data_location")
            for field in ("float_data", "double_data"):  # where there is raw data, nobody reads these
                a.ClearField(field)
                b.ClearField(field)
            b.raw_data = raw
    TensorStore("m", memoryview(data), None).fill(protos.all_tensors(got))
    assert got == wanted
    return stripped


def packed(proto: TensorProto) -> bytes:
    values = proto.float_data or proto.double_data
    return np.array(values, "<f4" if proto.float_data else "<f8").tobytes()


def results(proto: bytes, feeds: dict[str, Any]) -> list[np.ndarray] | None:
    """What ONNX Runtime computes; None if it refuses the model."""
    options = ort.SessionOptions()
    options.log_severity_level = 4
    options.graph_optimization_level = ort.GraphOptimizationLevel.ORT_DISABLE_ALL
    try:
        found: list[np.ndarray] = ort.InferenceSession(proto, options, ["CPUExecutionProvider"]).run(
            None, feeds
        )
    except Exception:  # it has many kinds of errors, all of which mean that nobody can run the model
        return None
    return found


def check_loads(data: bytes, dtype: Any = np.float32) -> bool:
    """Whether ONNX Runtime runs the model; check that we read it, and write one that computes the same."""
    proto = onnx.ModelProto.FromString(data)
    shape = proto.graph.initializer[-1].dims
    feeds = {"x": np.ones(shape, dtype), "t": np.array(True)}
    wanted = results(data, feeds)
    if wanted is None:
        return False
    imported = load(data)
    got = results(to_proto(imported, imported.graph).SerializeToString(), feeds)
    assert got is not None
    for a, b in zip(got, wanted, strict=True):
        np.testing.assert_array_equal(a, b)
    return True


def test_everything_has_every_message_type_and_field() -> None:
    found: dict[str, set[str]] = {}

    def note(message: Any, fields: Fields) -> Fields:
        found.setdefault(message.DESCRIPTOR.full_name, set()).update(field.name for field, _ in fields)
        return fields

    for proto in (everything(LARGE), everything(SMALL_)):
        assert onnx.ModelProto.FromString(serialised(proto, note)) == proto
    assert found.keys() == {t.full_name for t in message_types() if t.name != "Segment"} - alternatives()


def alternatives() -> set[str]:
    """Message types that only a second member of a oneof has."""
    return {f"onnx.TypeProto.{name}" for name in ("Sequence", "Map", "Optional", "SparseTensor", "Opaque")}


@pytest.mark.parametrize("typed", [False, True], ids=["raw", "typed"])
@pytest.mark.parametrize(
    ("make_model", "shape"),
    crossed(
        [everything, running],
        [(4, 4), (2, 2)],
        [(everything, (4, 4)), (running, (4, 4)), (running, (2, 2))],  # of small tensors protobuf reads all
    ),
)
def test_explicit_defaults_and_any_order_are_read_as_protobuf_reads_them(
    make_model: Callable[..., onnx.ModelProto],
    typed: bool,
    shape: tuple[int, ...],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(wire, "LARGE", 32)  # small files are quick
    proto = make_model(shape, typed)
    plain = check_agrees(serialised(proto))
    assert bool(plain) == (shape == (4, 4))
    assert check_agrees(serialised(proto, backwards)) == plain
    for field in OPTIONAL:
        before, behind = with_default(field, True), with_default(field, False)
        check_agrees(serialised(proto, lambda m, f, edit=before: edit(m, backwards(m, f))))
        check_agrees(serialised(proto, behind))


@pytest.mark.parametrize("field", OPTIONAL, ids=name)
def test_what_onnx_runtime_loads_with_explicit_defaults_is_loaded(field: FieldDescriptor) -> None:
    # Where ONNX Runtime refuses the model, these say what it refuses: attributes with two values, and a value that is
    # the empty text or number in a place where it means something else than nothing.
    refused = {"AttributeProto", "TrainingInfoProto"}
    for shape in (LARGE, SMALL_):
        for first in (True, False):
            ran = check_loads(serialised(running(shape), with_default(field, first)))
            assert ran or not first or field.containing_type.name in refused, first
    check_loads(serialised(running(LARGE, typed=True), with_default(field, True)))


@pytest.mark.parametrize("dtype", [np.float32, np.float64, np.float16, np.int32])
@pytest.mark.parametrize("typed", [False, True], ids=["raw", "typed"])
def test_fields_in_descending_order(typed: bool, dtype: Any) -> None:
    for shape in (LARGE, SMALL_):
        assert check_loads(serialised(running(shape, typed, dtype), backwards), dtype)


# Tensors by hand.

DATA = np.arange(4096, dtype="<f4")
DIMS = framed(1, b"\x80\x20")  # [4096], packed
HEAD = DIMS + b"\x10\x01" + framed(8, b"w")  # float, named w
RAW, FLOATS = framed(9, DATA.tobytes()), framed(4, DATA.tobytes())
HALF = DATA.nbytes // 2
SOMEWHERE = framed(13, framed(1, b"location") + framed(2, b"nowhere.bin"))
DEFAULT, EXTERNAL, UNKNOWN = b"\x70\x00", b"\x70\x01", b"\x70\x07"
GROUP = b"\xa3\x06" + b"\x08\x05" + b"\xab\x06\xac\x06" + b"\xa4\x06"  # 100 { 1: 5, 101 {} }
TENSORS = {
    "default_behind": HEAD + RAW + DEFAULT,
    "default_before": DEFAULT + RAW + HEAD,
    "default_between": RAW + DEFAULT + HEAD,
    "default_and_stale_place": SOMEWHERE + HEAD + RAW + SOMEWHERE + DEFAULT,
    "external_then_default": HEAD + EXTERNAL + RAW + DEFAULT,
    "an_unknown_location_is_none": HEAD + RAW + DEFAULT + UNKNOWN,
    "raw_twice": HEAD + framed(9, bytes(DATA.nbytes)) + RAW,
    "raw_small_then_large": framed(9, b"abcd") + RAW + HEAD,
    "raw_before_typed": HEAD + framed(4, bytes(DATA.nbytes)) + RAW,
    "raw_then_typed": HEAD + RAW + framed(4, bytes(DATA.nbytes)),
    "type_twice": b"\x10\x0b" + RAW + HEAD,
    "type_twice_typed": b"\x10\x0b" + FLOATS + HEAD,
    "typed": HEAD + FLOATS + DEFAULT,
    "typed_in_two": HEAD + framed(4, DATA.tobytes()[:HALF]) + framed(4, DATA.tobytes()[HALF:]),
    "typed_and_single": HEAD + b"\x25" + DATA.tobytes()[:4] + framed(4, DATA.tobytes()[4:]),
    "typed_singly": HEAD + b"".join(b"\x25" + v.tobytes() for v in DATA),
    "names_twice": framed(8, b"v") + RAW + HEAD,
    "unknown_fields": GROUP + HEAD + GROUP + RAW + b"\x98\x06\x01" + GROUP,
}


def graph_of(*tensors: bytes) -> bytes:
    relu = make("Add", ["x", "w"], ["y"]).SerializeToString()
    x, y = (declare(v, TensorProto.FLOAT, [4096]).SerializeToString() for v in "xy")
    graph = framed(1, relu) + b"".join(framed(5, t) for t in tensors) + framed(11, x) + framed(12, y)
    return graph + framed(2, b"g")


def model_of(*graphs: bytes) -> bytes:
    return b"\x08\x08" + framed(8, b"\x10\x11") + b"".join(framed(7, graph) for graph in graphs)


@pytest.mark.parametrize("content", TENSORS.values(), ids=TENSORS)
def test_tensors_whose_fields_come_in_any_order_or_twice(content: bytes) -> None:
    data = model_of(graph_of(content))
    check_agrees(data)
    np.testing.assert_array_equal(value_of_w(data), DATA)
    assert results(data, {"x": np.ones(4096, np.float32)}) is not None


def value_of_w(data: bytes) -> np.ndarray:
    imported = load(data)
    (w,) = imported.graph.leaves.consts.values()
    return w.numpy()


def test_a_constant_in_two_parts_is_one_tensor() -> None:
    parts = [(HEAD, RAW), (RAW, HEAD), (HEAD + framed(9, b"abcd"), RAW), (RAW + EXTERNAL, HEAD + DEFAULT)]
    parts.append((HEAD + framed(4, DATA.tobytes()[:HALF]), framed(4, DATA.tobytes()[HALF:])))
    for first, second in parts:
        value = framed(1, b"value") + b"\xa0\x01\x04" + framed(5, first) + framed(5, second)
        constant = framed(2, b"w") + framed(4, b"Constant") + framed(5, value)
        data = model_of(framed(1, constant) + graph_of())
        check_agrees(data)
        np.testing.assert_array_equal(value_of_w(data), DATA)


def test_a_graph_in_two_parts_is_one_graph() -> None:
    data = model_of(framed(5, HEAD + RAW), graph_of())
    assert check_agrees(data) == 1
    np.testing.assert_array_equal(value_of_w(data), DATA)


def test_external_data_is_left_where_it_is() -> None:
    for content in (HEAD + RAW + SOMEWHERE + EXTERNAL, HEAD + DEFAULT + EXTERNAL + SOMEWHERE + RAW):
        data = model_of(graph_of(content))
        assert check_agrees(data) == 0
        with pytest.raises(ModelError, match=r"nowhere\.bin"):
            load(data)


def test_a_tensor_beside_an_attributes_value_is_kept() -> None:
    stray = framed(1, b"beta") + b"\x15\x00\x00\x80\x3f" + b"\xa0\x01\x01" + framed(5, HEAD + RAW)
    node = make("Other", ["x"], ["z"], domain="custom").SerializeToString() + framed(5, stray)
    z = declare("z", TensorProto.FLOAT, [4096]).SerializeToString()
    data = model_of(framed(1, node) + graph_of(HEAD + RAW) + framed(12, z))
    assert check_agrees(data) == 2
    imported = load(data)
    written = to_proto(imported, imported.graph)
    assert all(e.value != wire.EMBEDDED for t in protos.all_tensors(written) for e in t.external_data)


def test_groups_that_do_not_end_are_refused() -> None:
    for end in (GROUP[:-2], b"\xa4\x06", b"\xa3\x06\xac\x06"):
        with pytest.raises(ModelError, match="not an ONNX model, or cut off"):
            load(model_of(graph_of(HEAD + RAW)) + end)


def test_a_model_that_was_loaded_from_external_data_and_saved_in_one_file(tmp_path: Any) -> None:
    path = tmp_path / "external.onnx"
    onnx.save(running(LARGE), path, save_as_external_data=True, location="d", size_threshold=0)
    proto = onnx.load(path)
    assert all(t.HasField("data_location") for t in proto.graph.initializer)
    assert check_loads(proto.SerializeToString())
