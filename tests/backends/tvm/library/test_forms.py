"""Regions that differ in their weights alone are compiled once, and get the constants that they would get alone."""

from __future__ import annotations

from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import onnx
import onnxruntime as ort
import pytest

from tests.rules.harness import model

pytest.importorskip("tvm")

from xrlflow.backends.library_files import library_path
from xrlflow.backends.tvm import detect
from xrlflow.backends.tvm.library import hybrid
from xrlflow.backends.tvm.library.code_generation import compile_region
from xrlflow.backends.tvm.library.forms import Forms
from xrlflow.backends.tvm.lowering.value_types import types_of
from xrlflow.backends.tvm.toolchain.reading import known_value
from xrlflow.backends.tvm.toolchain.weights import (
    Made,
    array_of,
    following,
    made_of,
    moved,
    plain_array,
    weight,
)
from xrlflow.onnxio.regions import region_of

WIDE, LAYERS = 200, 3


class Counted(Forms):
    made: ClassVar[list[Forms]] = []

    def __post_init__(self) -> None:
        Forms.__post_init__(self)
        Counted.made.append(self)


@pytest.fixture(autouse=True)
def _counted(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Counted, "made", [])
    monkeypatch.setattr(hybrid, "Forms", Counted)


def network(layer: str, shape: str = "B,T,200", **changed: Any) -> onnx.ModelProto:
    """Layers with other weights, between which rows are mixed, so that each is a region. `changed`: weights of the last
    layer."""
    rng, nodes = np.random.default_rng(0), list[str]()
    weights: dict[str, Any] = {}
    for n in range(LAYERS):
        weights |= {
            f"w{n}": rng.standard_normal((WIDE, WIDE)).astype(np.float32) / 14,
            f"b{n}": rng.standard_normal(WIDE).astype(np.float32),
            f"g{n}": rng.standard_normal(WIDE).astype(np.float32),
            f"s{n}": np.float32(2),
        }
        text = layer
        for name in "wbgs":
            text = text.replace(f"${name}", f"{name}{n}")
        nodes.append(text.replace("$x", f"x{n}").replace("$y", f"y{n}").replace("$t", f"t{n}"))
        nodes.append(f"x{n + 1} = Softmax<axis=1>(y{n})")
    weights |= {f"{name}{LAYERS - 1}": value for name, value in changed.items()}
    used = {
        name: value
        for name, value in weights.items()
        if any(f"{name})" in n or f"{name}," in n for n in nodes)
    }
    return model(f"agraph (float[{shape}] x0) => (float[{shape}] x{LAYERS}) {{ {' '.join(nodes)} }}", **used)


def compiled(proto: onnx.ModelProto) -> hybrid.Hybrid:
    return hybrid.hybrid(proto, [], detect(None, 2))


def sessions(proto: onnx.ModelProto, path: Path) -> tuple[ort.InferenceSession, ort.InferenceSession]:
    """Of a model with its library, and of the plain model."""
    options = ort.SessionOptions()
    options.log_severity_level = 3
    plain = ort.InferenceSession(proto.SerializeToString(), options, providers=["CPUExecutionProvider"])
    options.register_custom_ops_library(str(library_path(path)))
    return ort.InferenceSession(str(path), options, providers=["CPUExecutionProvider"]), plain


def check(proto: onnx.ModelProto, folder: Path) -> int:
    """How many regions were compiled for one number of rows. The library must be the same, byte for byte, as if each
    were compiled for itself, and the results those of the plain model."""
    made = compiled(proto)
    blocks = {each.compiled for each in Counted.made}
    path = folder / "fast.onnx"
    made.save(path)
    fast, plain = sessions(proto, path)
    for rows in (1, 7, 131):
        given = {"x0": np.random.default_rng(rows).standard_normal((1, rows, WIDE)).astype(np.float32)}
        for a, b in zip(plain.run(None, given), fast.run(None, given)):
            np.testing.assert_allclose(b, a, rtol=1e-4, atol=1e-6)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Forms, "_form", lambda *_: None)
        assert compiled(proto).library.domain == made.library.domain  # type: ignore[union-attr]
    (count,) = blocks
    assert len(made.regions) == LAYERS
    return count // 4  # numbers of rows


LAYER = "$t = MatMul($x, $w) $tb = Add($t, $b) $tr = Relu($tb) $y = LayerNormalization($tr, $g)"


def test_layers_of_one_form_are_compiled_once(tmp_path: Path) -> None:
    assert check(network(LAYER), tmp_path) == 1


def test_transposed_weights_are_moved_again(tmp_path: Path) -> None:
    assert (
        check(network("$tw = Transpose<perm=[1,0]>($w) $t = MatMul($x, $tw) $y = Add($t, $b)"), tmp_path) == 1
    )


def test_other_numbers_are_another_form(tmp_path: Path) -> None:
    assert check(network("$t = MatMul($x, $w) $y = Mul($t, $s)", s=np.float32(3)), tmp_path) == 2


def test_other_attributes_are_another_form(tmp_path: Path) -> None:
    proto = network("$t = MatMul($x, $w) $y = LeakyRelu<alpha=0.1>($t)")
    [n for n in proto.graph.node if n.op_type == "LeakyRelu"][-1].attribute[0].f = 0.2
    assert check(proto, tmp_path) == 2


def test_other_sizes_are_another_form(tmp_path: Path) -> None:
    proto = network("$t = MatMul($x, $w) $tb = Add($t, $b) $y = Relu($tb)")
    bias = next(t for t in proto.graph.initializer if t.name == f"b{LAYERS - 1}")
    bias.CopyFrom(onnx.numpy_helper.from_array(np.ones((1, 1, WIDE), np.float32), bias.name))
    assert check(proto, tmp_path) == 2


@pytest.mark.parametrize(
    ("layer", "count"),
    [
        ("$tw = Mul($w, $b) $t = MatMul($x, $tw) $y = Add($t, $b)", LAYERS),
        ("$tw = ReduceSum<keepdims=1>($w) $t = MatMul($x, $w) $y = Add($t, $tw)", LAYERS),
        ("$tw = Abs($b) $t = MatMul($x, $w) $y = Add($t, $tw)", LAYERS),
        ("$tw = Cast<to=11>($b) $tc = Cast<to=1>($tw) $t = MatMul($x, $w) $y = Add($t, $tc)", LAYERS),
        ("$tw = Transpose<perm=[1,0]>($w) $t = MatMul($x, $tw) $y = Add($t, $b)", 1),
        ("$tw = Identity($b) $t = MatMul($x, $w) $y = Mul($t, $tw)", 1),
    ],
)
def test_computing_with_weights_compiles_each_layer(layer: str, count: int) -> None:
    """What is computed from a weight may be a number in the code. What is only moved is not."""
    proto, machine = network(layer, "1,5,200"), detect(None, 2)
    compiling, types = Forms(proto, machine), types_of(proto, {})
    ends = [i for i, node in enumerate(proto.graph.node) if node.op_type == "Softmax"]
    for start, end in zip((0, *(i + 1 for i in ends)), ends):
        region = region_of(proto.graph, range(start, end))
        made = compiling.compile(region, types)
        for one, other in zip(
            made.plan.constants, compile_region(proto, region, types, machine).plan.constants, strict=True
        ):
            np.testing.assert_array_equal(one, other)
    assert compiling.compiled == count


def test_weights_of_one_layer_used_in_another_place_are_another_form(tmp_path: Path) -> None:
    proto = network("$t = MatMul($x, $w) $tb = Add($t, $b) $y = Mul($tb, $g)")
    for node in proto.graph.node:  # the last layer adds and multiplies with one weight
        for at, name in enumerate(node.input):
            if name == f"g{LAYERS - 1}":
                node.input[at] = f"b{LAYERS - 1}"
    assert check(proto, tmp_path) == 2


def test_names_do_not_matter(tmp_path: Path) -> None:
    """The order of nodes in the file does not, either."""
    proto = network("$t = MatMul($x, $w) $tb = Sigmoid($t) $tc = Tanh($t) $y = Mul($tb, $tc)")
    nodes = list(proto.graph.node)
    second = [n for n in nodes if n.op_type in ("Sigmoid", "Tanh")][2:4]
    a, b = (nodes.index(n) for n in second)
    nodes[a], nodes[b] = nodes[b], nodes[a]
    copies = [onnx.NodeProto.FromString(n.SerializeToString()) for n in nodes]
    del proto.graph.node[:]
    proto.graph.node.extend(copies)
    assert check(proto, tmp_path) == 1


def test_integers_are_a_part_of_the_form(tmp_path: Path) -> None:
    """However many there are: sizes of a Split become numbers in the code."""
    parts = [f"$tp{n}" for n in range(66)]
    split, joined = f"{', '.join(parts)} = Split<axis=2>($t, $s)", f"Concat<axis=2>({', '.join(parts[::-1])})"
    proto = network(f"$t = MatMul($x, $w) {split} $tc = {joined} $y = Relu($tc)")
    for n in range(LAYERS):
        sizes = np.array([4 + n, 4 - n, *[3] * 63, WIDE - 8 - 3 * 63], np.int64)
        tensor = next(t for t in proto.graph.initializer if t.name == f"s{n}")
        tensor.CopyFrom(onnx.numpy_helper.from_array(sizes, tensor.name))
    assert check(proto, tmp_path) == LAYERS


def test_integers_joined_with_a_shape(tmp_path: Path) -> None:
    """TVM's importer reads them itself, and makes a shape of them."""
    rng, nodes, weights = np.random.default_rng(0), list[str](), dict[str, Any]()
    for n in range(LAYERS):
        weights[f"w{n}"] = rng.standard_normal((WIDE, WIDE)).astype(np.float32) / 14
        weights[f"t{n}"] = np.arange(100) + 1000 * n
        nodes.append(
            f"m{n} = MatMul(x{n}, w{n}) h{n} = Shape(m{n}) c{n} = Concat<axis=0>(h{n}, t{n}) g{n} = Gather(c{n}, i) "
            f"a{n} = ArgMax<axis=2,keepdims=1>(m{n}) f{n} = Cast<to=1>(a{n}) s{n} = Sigmoid(f{n}) "
            f"x{n + 1} = Add(m{n}, s{n})"
        )
    outputs = ", ".join(f"int64[4] g{n}" for n in range(LAYERS))
    proto = model(
        f"agraph (float[1,5,{WIDE}] x0) => (float[1,5,{WIDE}] x{LAYERS}, {outputs}) {{ {' '.join(nodes)} }}",
        i=np.array([0, 13, 14, 15]), **weights,
    )  # fmt: skip
    path = tmp_path / "fast.onnx"
    hybrid.hybrid(proto, {}, detect(None, 2)).save(path)
    fast, plain = sessions(proto, path)
    given = {"x0": rng.standard_normal((1, 5, WIDE)).astype(np.float32)}
    for a, b in zip(plain.run(None, given)[1:], fast.run(None, given)[1:]):
        np.testing.assert_array_equal(b, a)


@pytest.mark.parametrize("sizes", [[], [{"x0": (1, 4, WIDE)}, {"x0": (1, 8, WIDE)}]], ids=["rows", "guards"])
def test_names_of_the_model_stay(sizes: list[dict[str, Any]], tmp_path: Path) -> None:
    proto = network("$t = MatMul($x, $w) $y = Add($t, $b)")
    names = {f"x{n}": f"xrlflow.unnamed.x{n}" for n in range(LAYERS + 1)}
    names |= {"y0": "xrlflow.unnamed", "w1": "xrlflow.unnamed_w"}
    for node in proto.graph.node:
        for of in (node.input, node.output):
            for at, name in enumerate(of):
                of[at] = names.get(name, name)
    for each in (*proto.graph.input, *proto.graph.output, *proto.graph.initializer):
        each.name = names.get(each.name, each.name)
    path = tmp_path / "fast.onnx"
    named = [{names[name]: shape for name, shape in each.items()} for each in sizes]
    hybrid.hybrid(proto, named, detect(None, 2)).save(path)
    for session in sessions(proto, path):
        assert [v.name for v in (*session.get_inputs(), *session.get_outputs())] == [
            names["x0"],
            names[f"x{LAYERS}"],
        ]
        session.run(None, {names["x0"]: np.zeros((1, 4, WIDE), np.float32)})


def test_numbers_of_constants_are_read_in_one_place() -> None:
    """What reads them elsewhere would not be noted (`toolchain.weights.array_of`)."""
    folder = Path(hybrid.__file__).parent.parent
    readers = {path.name for path in folder.rglob("*.py") if ".value.numpy()" in path.read_text()}
    assert readers == set()


def test_who_looks_at_numbers_is_noted() -> None:
    numbers = np.arange(100, dtype=np.float32)
    for read, noted in ((array_of, True), (known_value, True), (plain_array, False)):
        with following() as followed:
            constant = moved(weight("w", lambda: numbers), np.reshape, (10, 10))
            np.testing.assert_array_equal(read(constant), numbers.reshape(10, 10))
            assert made_of(constant) == Made("w", ((np.reshape, ((10, 10),)),))
        assert followed.looked_at == noted
