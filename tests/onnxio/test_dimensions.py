"""Which dimensions share a name: those of inputs that the file gives one, and nothing that it merely claims."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
import onnx
import onnx.parser
import pytest
from packaging.version import Version

from tests.runtime import VERSION, recent
from xrlflow.backends import BackendError
from xrlflow.ir import Body, Dim, Graph
from xrlflow.onnxio import load, to_proto
from xrlflow.verify.runner import opened

HEAD = '<ir_version: 8, opset_import: ["" : 18]> '


def parsed(text: str) -> onnx.ModelProto:
    return onnx.parser.parse_model(HEAD + text)


def shape(graph: Graph, name: str) -> Sequence[Dim] | None:
    """The shape of a named value of a graph, or of one of its bodies."""
    for value, known in graph.leaves.names.items():
        if known == name:
            return graph.type(value).shape
    bodies = (a.graph for n in graph.nodes() for a in n.attrs.values() if isinstance(a, Body))
    return next((found for body in bodies if (found := shape(body, name)) is not None), None)


@pytest.mark.parametrize(
    ("first", "second"),
    [("unk__0", "_unk__0"), ("_unk__0", "unk__0"), ("=N", "_=N"), ("", "x.0"), ("", "z.0"), ("x.0", "")],
)
def test_other_names_stay_other_names(first: str, second: str) -> None:
    """A name that is made up, for a dimension without one or in place of a reserved one, is not in use."""
    model = parsed("g (float[A] x, float[B] z) => (float[a] y) { y = Add(x, z) }")
    for value, name in zip(model.graph.input, (first, second)):
        dim = value.type.tensor_type.shape.dim[0]
        dim.Clear()
        if name:
            dim.dim_param = name
    graph = load(model).graph
    assert shape(graph, "x") != shape(graph, "z")
    assert shape(graph, "y") not in (shape(graph, "x"), shape(graph, "z"))


def test_one_name_stays_one() -> None:
    model = parsed("g (float[A] x, float[A] z) => (float[a] y) { y = Add(x, z) }")
    for value in model.graph.input:
        value.type.tensor_type.shape.dim[0].dim_param = "=N"
    graph = load(model).graph
    assert shape(graph, "x") == shape(graph, "z") == shape(graph, "y")


SEQUENCES = (
    "seq(float[N]) q0, int64[P] k, int64 i, int64 j) => (float[a] y) { q = Identity(q0)",
    "seq(float[3]) q0, int64[P] k, int64 i, int64 j) => (float[a] y) { q = Identity(q0)",
    "float[S] x, int64[P] k, int64 i, int64 j) => (float[a] y) { q = SplitToSequence<axis=0>(x, k)",
    "float[S] x, float[T] z, int64 i, int64 j) => (float[a] y) { p = SequenceConstruct(x) q = SequenceInsert(p, z)",
    "seq(float[N]) q0, bool c, int64 i, int64 j) => (float[a] y) { q = If(c) <"
    "then_branch = b () => (seq(float[N]) v) { v = SequenceErase(q0) },"
    " else_branch = e () => (seq(float[N]) w) { w = SequenceErase(q0, i) }>",
    "seq(float[N]) q0, float[N] z, int64 n, bool c, int64 i, int64 j) => (float[a] y) { q = Loop(n, c, q0) <"
    "body = b (int64 t, bool d, seq(float[N]) v) => (bool e, seq(float[N]) w) {"
    " e = Identity(d) w = SequenceInsert(v, z) }>",
)


@pytest.mark.parametrize("text", SEQUENCES)
def test_elements_of_a_sequence_have_sizes_of_their_own(text: str) -> None:
    graph = load(
        parsed(f"g ({text} u = SequenceAt(q, i) v = SequenceAt(q, j) s = Shape(v) y = Reshape(u, s) }}")
    ).graph
    assert shape(graph, "u") == shape(graph, "v")
    assert shape(graph, "u") in (None, (None,))


def test_elements_that_are_all_of_one_size_are_of_one_size() -> None:
    graph = load(
        parsed(
            "g (float[S] x, float[S] z, int64 i) => (float[a] y) { q = SequenceConstruct(x, z) y = SequenceAt(q, i) }"
        )
    ).graph
    assert shape(graph, "y") == ("S",)


@pytest.mark.parametrize("shapes", [{}, {"x": (3,)}])
def test_a_claim_in_a_body_is_no_fact_when_sizes_are_fixed(shapes: Mapping[str, Sequence[int]]) -> None:
    """The state of a Loop grows, whatever its declared symbol is bound to."""
    model = parsed(
        "g (float[N] x, int64 n, bool c) => (float[a] y, float[b,d] z) { y, z = Loop(n, c, x) <body = b "
        "(int64 i, bool ci, float[N] v) => (bool co, float[K] w, float[N] o) {"
        " co = Identity(ci) w = Concat<axis=0>(v, v) s = Shape(v) r = Relu(v) o = Reshape(r, s) }> }"
    )
    imported = load(model, shapes=shapes, fix_shapes=bool(shapes))
    assert not imported.notes
    (size,) = shape(imported.graph, "v") or ()
    assert isinstance(size, str)
    assert size != "N"


@pytest.mark.parametrize(
    "node", ["Reshape(x, s)", "Expand(x, s)", "Slice(x, s, s)", "Tile(x, s)", "Resize(x, , , s)"]
)
def test_the_default_of_an_input_says_nothing_of_its_value(node: str) -> None:
    model = parsed(f"g (float[1,1] x, int64[2] s) => (float[a,b] y) <int64[2] s = {{4, 9}}> {{ y = {node} }}")
    graph = load(model).graph
    assert not any(isinstance(d, int) for d in shape(graph, "y") or ())


@recent
def test_sizes_are_written_where_the_runtime_would_lose_them() -> None:
    """ONNX Runtime puts Reshapes around a sum of two convolutions that it does not know to be of one size, and these
    fail for an empty batch.
    """
    weights = np.random.default_rng(0).standard_normal((16, 1, 3, 3)).astype(np.float32)
    shape = onnx.numpy_helper.from_array(np.int64([-1, 1, 6, 6]), "s")
    proto = onnx.parser.parse_model(
        '<ir_version: 10, opset_import: ["": 23]> '
        "g (float[unk__5, 36] x, float[unk__5, 36] z) => (float[m, 16, 4, 4] y) "
        "{ a = Reshape(x, s) b = Reshape(z, s) c = Conv(a, w) d = Conv(b, w) e = Add(c, d) y = Relu(e) }"
    )
    proto.graph.initializer.extend([shape, onnx.numpy_helper.from_array(weights, "w")])
    imported = load(proto)
    written = to_proto(imported, imported.graph)
    of = {
        v.name: [d.dim_param or d.dim_value for d in v.type.tensor_type.shape.dim]
        for v in written.graph.value_info
    }
    assert of == {"a": ["unk__5", 1, 6, 6], "b": ["unk__5", 1, 6, 6]}
    feeds = {name: np.zeros((0, 36), np.float32) for name in "xz"}
    if Version("1.32") > VERSION:  # which does not have this fault
        with pytest.raises(BackendError, match="Reshape"), opened(proto) as runner:
            runner.run(feeds)
    with opened(written) as runner:
        assert runner.run(feeds)[0].shape == (0, 16, 4, 4)


def test_sizes_that_inference_finds_are_not_written() -> None:
    proto = onnx.parser.parse_model(
        '<ir_version: 10, opset_import: ["": 23]> g (float[n, 2, 3] x) => (float[n, 6] y) '
        "{ i = Constant<value_ints=[1]>() s = Constant<value_ints=[0, 6]>() a = Unsqueeze(x, i) b = Squeeze(a, i) "
        "c = Reshape(b, s) y = Relu(c) }"
    )
    imported = load(proto)
    assert not to_proto(imported, imported.graph).graph.value_info


def test_sizes_that_are_fixed_replace_reserved_names_too() -> None:
    """Converters write such names; inside they mean something else."""
    model = parsed("g (float[A] x) => (float[A] y) { y = Neg(x) }")
    for value in (*model.graph.input, *model.graph.output):
        value.type.tensor_type.shape.dim[0].dim_param = "unk__0"
    imported = load(model, shapes={"x": (3,)}, fix_shapes=True)
    written = to_proto(imported, imported.graph)
    for value in (*written.graph.input, *written.graph.output):
        assert [d.dim_value for d in value.type.tensor_type.shape.dim] == [3]
