"""Which edits of a file change the digest of its regions."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import onnx
import pytest

from xrlflow.onnxio.region_digest import digest_of_file, region_digest
from xrlflow.onnxio.regions import whole_region, with_functions, with_guard

DOMAIN = "xrlflow.0123"
W = np.linspace(-1, 1, 4096, dtype=np.float32).reshape(64, 64)


def model(rows: str = "3") -> onnx.ModelProto:
    made = onnx.parser.parse_model(
        f'<ir_version: 10, opset_import: ["" : 20]> g (float[{rows},64] x) => (float[{rows},64] y) '
        "{ a = MatMul(x, w) b = Transpose<perm = [0, 1]>(a) y = Add(b, v) }"
    )
    for name, array in (("w", W), ("v", W[:1])):
        made.graph.initializer.append(onnx.numpy_helper.from_array(array, name))
    return made


def carrying(domain: str = DOMAIN, **options: bool) -> onnx.ModelProto:
    plain = model()
    return with_functions(plain, {"R": whole_region(plain.graph)}, domain, **options)


def guarded(domain: str = DOMAIN) -> onnx.ModelProto:
    """A guard in a guard: names of the inner one have the domain in them."""
    made = model("N")
    for n in (3, 5):
        made = with_guard(made, f"Size{n}", {"x": [n, 64]}, domain)
    return made


def scaled(tensor: onnx.TensorProto, factor: float) -> None:
    array = onnx.numpy_helper.to_array(tensor)
    tensor.CopyFrom(onnx.numpy_helper.from_array((array * factor).astype(array.dtype), tensor.name))


def body(made: onnx.ModelProto) -> onnx.FunctionProto:
    """The function that computes what the model does."""
    return next(f for f in made.functions if any(node.op_type == "MatMul" for node in f.node))


def constant(made: onnx.ModelProto) -> onnx.TensorProto:
    return body(made).node[0].attribute[0].t


EDITS: dict[str, Callable[[onnx.ModelProto], object]] = {
    "a weight": lambda m: scaled(constant(m), 1.001),
    "the type of a weight": lambda m: constant(m).MergeFrom(
        onnx.TensorProto(data_type=onnx.TensorProto.INT32)
    ),
    "an operator": lambda m: setattr(body(m).node[-1], "op_type", "Sub"),
    "an operand": lambda m: body(m).node[-1].input.__setitem__(1, "a"),
    "an attribute": lambda m: body(m).node[-2].attribute[0].ints.__setitem__(0, 1),
    "a node more": lambda m: body(m).node.add(op_type="Relu", input=["y"], output=["z"]),
    "an input's size": lambda m: setattr(m.graph.input[0].type.tensor_type.shape.dim[1], "dim_value", 65),
    "the opset": lambda m: setattr(body(m).opset_import[0], "version", 19),
}


@pytest.mark.parametrize("edit", EDITS)
@pytest.mark.parametrize("made", [carrying, guarded])
def test_an_edit_changes_it(edit: str, made: Callable[[], onnx.ModelProto]) -> None:
    changed = made()
    EDITS[edit](changed)
    assert region_digest(changed, DOMAIN) != region_digest(made(), DOMAIN)


def test_an_edit_of_weights_that_are_inputs_changes_it() -> None:
    changed = carrying(weights_as_inputs=True)
    scaled(changed.graph.initializer[0], 1.001)
    assert region_digest(changed, DOMAIN) != region_digest(carrying(weights_as_inputs=True), DOMAIN)


def test_an_edit_of_a_guard_changes_it() -> None:
    changed = guarded()
    (sizes,) = [tensor for tensor in changed.graph.initializer if tensor.name.endswith(".sizes")]
    scaled(sizes, 2)
    assert region_digest(changed, DOMAIN) != region_digest(guarded(), DOMAIN)


@pytest.mark.parametrize("made", [carrying, guarded])
def test_it_does_not_depend_on_the_name_of_the_domain(made: Callable[[str], onnx.ModelProto]) -> None:
    """It is part of that name."""
    assert region_digest(made("xrlflow.4567"), "xrlflow.4567") == region_digest(made(DOMAIN), DOMAIN)


def renamed(made: onnx.ModelProto) -> None:
    made.doc_string = body(made).node[-1].name = body(made).node[-1].doc_string = "other"
    made.functions.insert(0, onnx.FunctionProto(name="f", domain="another"))
    made.metadata_props.add(key="a", value="b")


def kept_typed(made: onnx.ModelProto) -> None:
    """As `float_data`, not as bytes."""
    tensor = constant(made)
    values = onnx.numpy_helper.to_array(tensor).reshape(-1)
    tensor.ClearField("raw_data")
    tensor.float_data.extend(values.tolist())


SAME: dict[str, Callable[[onnx.ModelProto], object]] = {
    "texts": renamed,
    "another field": kept_typed,
    "what else the graph does": lambda m: m.graph.node.add(op_type="Relu", input=["y"], output=["z"]),
}


@pytest.mark.parametrize("edit", SAME)
def test_what_computes_the_same_has_the_same(edit: str, tmp_path: Path) -> None:
    made = carrying()
    SAME[edit](made)
    onnx.save(made, tmp_path / "m.onnx")
    assert digest_of_file(tmp_path / "m.onnx", DOMAIN) == region_digest(carrying(), DOMAIN)


def test_weights_in_a_file_of_their_own(tmp_path: Path) -> None:
    made = carrying(weights_as_inputs=True)
    expected = region_digest(made, DOMAIN)
    onnx.save(made, tmp_path / "m.onnx", save_as_external_data=True, size_threshold=0, location="data")
    assert digest_of_file(tmp_path / "m.onnx", DOMAIN) == expected


def test_a_file_without_its_data_has_none(tmp_path: Path) -> None:
    made = carrying(weights_as_inputs=True)
    onnx.save(made, tmp_path / "m.onnx", save_as_external_data=True, size_threshold=0, location="data")
    (tmp_path / "data").unlink()
    assert digest_of_file(tmp_path / "m.onnx", DOMAIN) is None
    (tmp_path / "m.onnx").write_bytes(b"\xff")
    assert digest_of_file(tmp_path / "m.onnx", DOMAIN) is None
