"""Models whose own declarations are wrong: ONNX Runtime runs them, and they are optimised, with a note."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import onnx
import onnx.parser
import onnxruntime
import pytest
from onnx import TensorProto, helper

import xrlflow
from tests.onnxio.support import assert_same_outputs, info, model, run
from xrlflow import onnxio
from xrlflow.cost import Roofline
from xrlflow.onnxio import ModelError

F = TensorProto.FLOAT
X = np.random.default_rng(0).normal(size=(2, 4, 8)).astype(np.float32)
W = np.random.default_rng(1).normal(size=(8, 8)).astype(np.float32)
make, declare = helper.make_node, helper.make_tensor_value_info

Shape = Sequence[int | str] | None


def chain(output: Shape, middle: Shape = None, x: Shape = (2, 4, 8), last: str = "Relu") -> onnx.ModelProto:
    nodes = [make("Identity", ["x"], ["i"]), make("MatMul", ["i", "w"], ["h"]), make(last, ["h"], ["y"])]
    infos = [] if middle is None else [declare("h", F, middle)]
    out = model(nodes, [declare("x", F, x)], [declare("y", F, output)], {"w": W})
    out.graph.value_info.extend(infos)
    return out


def branch(name: str, shape: Shape) -> onnx.GraphProto:
    nodes = [make("Identity", ["x"], [f"{name}0"]), make("Neg", [f"{name}0"], [name])]
    return helper.make_graph(nodes, name, [], [declare(name, F, shape)])


def conditional(then: Shape, other: Shape) -> onnx.ModelProto:
    node = make("If", ["c"], ["i"], then_branch=branch("p", then), else_branch=branch("q", other))
    nodes = [node, make("Identity", ["i"], ["y"])]
    inputs = [declare("x", F, X.shape), declare("c", TensorProto.BOOL, [])]
    return model(nodes, inputs, [info("y", X)])


def loop(state: Shape, scan: Shape) -> onnx.ModelProto:
    """A state that is doubled, twice, and what it was."""
    nodes = [
        make("Identity", ["going"], ["on"]),
        make("Add", ["s", "s"], ["t"]),
        make("Identity", ["t"], ["u"]),
    ]
    formals = [
        declare("n", TensorProto.INT64, []), declare("going", TensorProto.BOOL, []), declare("s", F, state),
    ]  # fmt: skip
    results = [declare("on", TensorProto.BOOL, []), declare("t", F, state), declare("u", F, scan)]
    node = make("Loop", ["k", "", "x"], ["y", "z"], body=helper.make_graph(nodes, "b", formals, results))
    consts = {"k": np.array(2)}
    return model([node], {"x": X}, [info("y", X), declare("z", F, None)], consts)


WRONG = {
    "an output's rank": (chain((2, 8)), "'y' is declared float[2,8] and is float[2,4,8]"),
    "the rank of one that is open": (chain(("n", 8), x=("n", "m", 8)), "'y' is declared float[?,8]"),
    "a scalar": (chain(()), "'y' is declared float[]"),
    "an output's size": (chain((2, 4, 9)), "'y' is declared float[2,4,9] and is float[2,4,8]"),
    "an output that a rule would find": (chain((2, 8), last="Identity"), "'y' is declared float[2,8]"),
    "a value's rank": (chain((2, 4, 8), (2, 8)), "'h' is declared float[2,8] and is float[2,4,8]"),
    "a value's size": (chain((2, 4, 8), (2, 4, 9)), "'h' is declared float[2,4,9]"),
    "a number for what is open": (
        chain((2, "m", 8), (2, "m", 8), x=("n", "m", 8)),
        "'h' is declared float[2,?,8] and is float[n,m,8]",
    ),
    "a branch's output": (conditional((2, 8), (2, 4, 8)), "'p' is declared float[2,8] and is float[2,4,8]"),
    "a loop's state": (loop((2, 8), (2, 8)), "'s' is declared float[2,8] and is float[2,4,8]"),
    "a loop's other output": (loop((2, 4, 8), (9,)), "'u' is declared float[9] and is float[2,4,8]"),
}


def test_a_wrong_output_says_nothing_of_other_values() -> None:
    """What is declared of an operator that ONNX does not know is all there is."""
    nodes = [make("Op", ["x"], ["h"], domain="other"), make("Relu", ["h"], ["y"])]
    proto = model(nodes, [declare("x", F, (2, 4))], [declare("y", F, (8,))], domains=["other"])
    proto.graph.value_info.append(declare("h", F, (2, 4)))
    imported = onnxio.load(proto)
    assert imported.notes
    assert imported.graph.type(imported.graph.outputs[0]).shape == (2, 4)


def test_what_may_hold_is_not_believed_either() -> None:
    """The branch decides the size, and the file says that of one branch. ONNX Runtime takes both."""
    graph = onnx.parser.parse_model("""<ir_version: 9, opset_import: ["" : 20]>
        g (float[n,1] x) => (float[1] y, float z) <int64[1] zero = {0}, int64[1] one = {1}> {
            s = Shape <start = 0, end = 1> (x)
            c = Equal (s, one)
            i = If (c) <then_branch = t () => (float[1] a) { a = Squeeze (x, zero) },
                        else_branch = e () => (float[n,1] b) { b = Identity (x) }>
            y = Neg (i)
            z = ReduceMean <keepdims = 0> (y, zero)
        }""")
    imported = onnxio.load(graph)
    assert [imported.graph.type(v).shape for v in imported.graph.outputs] == [None, None]
    result = xrlflow.optimize(graph, search="greedy", cost=Roofline(), measure=False)
    for n in (1, 3):
        values = {"x": np.full((n, 1), 2, np.float32)}
        assert_same_outputs(run(graph, values), run(result.model, values))


CLAIMS = {
    "a sequence from a branch": """
        sn = Sin (x) mean = ReduceMean <keepdims = 0> (sn) c = Greater (mean, lim)
        q = If (c) <then_branch = t () => (seq(float[1,8]) a) { a = SequenceConstruct (x) },
                    else_branch = e () => (seq(float[1,8]) b) {
                        i = ReduceMax <keepdims = 1> (x, ax) b = SequenceConstruct (i) }>
        h = SequenceAt (q, z) r = ReduceSum (h, ax) y = Neg (r)""",
    "an operator of the second domain of ONNX": """
        h = ai.onnx.ml.Normalizer <norm = "MAX"> (x) r = ReduceSum <keepdims = 1> (h, ax) y = Neg (r)""",
}


@pytest.mark.parametrize("name", CLAIMS)
def test_claims_that_hold_for_some_inputs(name: str) -> None:
    """Each says of a dimension that it is 1, which it is on the inputs that are verified, and not of others."""
    proto = onnx.parser.parse_model(f"""<ir_version: 9, opset_import: ["" : 20, "ai.onnx.ml" : 3]>
        g (float[n,8] x) => (float[a,b] y)
        <int64 z = {{0}}, int64[1] ax = {{0}}, float lim = {{0.9999}}>
        {{ {CLAIMS[name]} }}""")
    if "operator" in name:
        proto.graph.value_info.append(declare("h", F, (1, 8)))
    given = {"x": np.ones((1, 8), np.float32)}
    result = xrlflow.optimize(proto, search="greedy", cost=Roofline(), measure=False, inputs=given)
    for n in (1, 3):
        values = {"x": np.full((n, 8), np.pi / 2, np.float32)}
        assert_same_outputs(run(proto, values), run(result.model, values))


def test_what_a_loop_collects_is_of_the_size_that_follows() -> None:
    proto = onnx.parser.parse_model("""<ir_version: 9, opset_import: ["" : 20]>
        g (float[n,8] x, bool[m] c) => (float[a,b,e] y) <int64 k = {2}, int64[1] ax = {1}> {
            s, u = Loop (k, , x) <body = b (int64 i, bool g, float[n,8] state) => (bool g2, float[n,8] s2, float[1,8] w)
                { g2 = Identity (g) s2 = Add (state, state) w = Compress <axis = 0> (state, c) }>
            r = ReduceSum <keepdims = 1> (u, ax) y = Neg (r)
        }""")
    x = np.ones((3, 8), np.float32)
    given = {"x": x, "c": np.array([True, False, False])}
    result = xrlflow.optimize(proto, search="greedy", cost=Roofline(), measure=False, inputs=given)
    assert any("'w' is declared float[1,8]" in note for note in result.report.notes)
    more = {"x": x, "c": np.array([True, True, False])}
    assert_same_outputs(run(proto, more), run(result.model, more))


def test_no_further_node_reads_what_is_declared_wrongly() -> None:
    """ONNX Runtime, which believes declarations, folds a Shape of such an output."""
    proto = onnx.parser.parse_model("""<ir_version: 9, opset_import: ["" : 20]>
        g (float[n,8] x) => (float[1,8] y, float[a,b] z, int64[2] s) <int64[1] ax = {0}> {
            y = Relu (x) i = Identity (x) h = Relu (i) s = Shape (h)
            r = ReduceSum <keepdims = 1> (h, ax) z = Expand (r, s)
        }""")
    result = xrlflow.optimize(proto, search="greedy", cost=Roofline(), measure=False)
    assert result.report.substitutions["MergeCommonSubexpressions"] == 1
    for n in (1, 3):
        values = {"x": np.full((n, 8), 2, np.float32)}
        assert_same_outputs(run(proto, values), fast(result.model, values))


def fast(proto: onnx.ModelProto, values: dict[str, np.ndarray]) -> list[np.ndarray]:
    """As ONNX Runtime optimises it."""
    options = onnxruntime.SessionOptions()
    options.log_severity_level = 4
    session = onnxruntime.InferenceSession(
        proto.SerializeToString(), options, providers=["CPUExecutionProvider"]
    )
    return list(session.run(None, values))


RIGHT = {
    "an output": chain((2, 4, 8), (2, 4, 8)),
    "symbols": chain(("n", "m", 8), ("n", "m", 8), x=("n", "m", 8)),
    "other symbols": chain(("n", "other", 8), ("own", "two", 8), x=("n", "m", 8)),
    "a branch": conditional((2, 4, 8), (2, 4, 8)),
    "a loop": loop((2, 4, 8), (2, 4, 8)),
    "a loop, open": loop(("n", "m", 8), ("n", "m", 8)),
}


def feeds(proto: onnx.ModelProto) -> dict[str, np.ndarray]:
    return {v.name: X if v.name == "x" else np.array(True) for v in proto.graph.input}


@pytest.mark.parametrize("name", WRONG)
def test_a_wrong_declaration_is_noted(name: str) -> None:
    proto, expected = WRONG[name]
    (note,) = onnxio.load(proto).notes
    assert note.startswith("what the model declares of its values is not believed: ")
    assert expected in note


@pytest.mark.parametrize("name", WRONG)
@pytest.mark.parametrize("search", ["greedy", "random"])
def test_such_a_model_is_optimised(name: str, search: str) -> None:
    proto, expected = WRONG[name]
    result = xrlflow.optimize(proto, search=search, budget=20, cost=Roofline(), measure=False)
    assert result.report.verified or result.returned_original
    assert search == "random" or not result.returned_original or "loop" in name
    assert any(expected in note for note in result.report.notes)
    assert_same_outputs(run(proto, feeds(proto)), run(result.model, feeds(proto)))
    assert result.model.graph.output == proto.graph.output  # as callers know it


@pytest.mark.parametrize("name", RIGHT)
def test_right_declarations_are_believed(name: str) -> None:
    assert onnxio.load(RIGHT[name]).notes == ()


def test_a_wrong_element_type_is_an_error() -> None:
    """No runtime takes that."""
    proto = chain((2, 4, 8))
    proto.graph.value_info.append(declare("h", TensorProto.INT64, X.shape))
    with pytest.raises(ModelError, match=r"'h' is declared int64.* and is float"):
        onnxio.load(proto)


def test_what_only_the_result_shows() -> None:
    """ONNX's checker evaluates nothing, so that it does not see the rank of the original's output."""
    nodes = [make("Mul", ["a", "b"], ["s"]), make("Unsqueeze", ["x", "s"], ["r"]), make("Relu", ["r"], ["y"])]
    consts = {"a": np.array([3]), "b": np.array([1])}
    proto = model(nodes, {"x": X}, [declare("y", F, (8, 8))], consts)
    onnx.checker.check_model(proto, full_check=True)
    imported = onnxio.load(proto)
    (note,) = onnxio.check_result(imported, imported.graph)
    assert note.startswith("the model declares shapes that contradict what it computes: ")
    assert "\n" not in note
    result = xrlflow.optimize(proto, search="greedy", cost=Roofline(), measure=False)
    assert result.report.verified
    assert note in result.report.notes
    assert_same_outputs(run(proto, {"x": X}), run(result.model, {"x": X}))


def test_a_result_that_is_wrong_itself_is_an_error() -> None:
    """What the computation is, no declaration excuses."""
    imported = onnxio.load(chain((2, 4, 8)))
    proto = model([make("MatMul", ["x", "w"], ["y"])], {"x": X[:, :, :3]}, [info("y", X)], {"w": W[:3]})
    wrong = onnxio.load(proto)
    with pytest.raises(ModelError, match="a bug of xrlflow"):
        onnxio.check_result(imported, wrong.graph)


@pytest.mark.parametrize("open_", [False, True])
def test_a_range_of_vectors(open_: bool) -> None:
    """ONNX wants scalars; ONNX Runtime takes vectors of one element, where it does not see that they are."""
    shape: Shape = ("n",) if open_ else (1,)
    nodes = [
        make("Shape", ["x"], ["s"]), make("Slice", ["s", "one", "two"], ["v"]),
        make("Range", ["zero", "v", "step"], ["r"]), make("Identity", ["r"], ["y"]),
    ]  # fmt: skip
    consts = {"one": np.array([1]), "two": np.array([2]), "zero": np.array([0]), "step": np.array([1])}
    proto = model(nodes, [declare("x", F, (2, "m"))], [declare("y", TensorProto.INT64, shape)], consts)
    imported = onnxio.load(proto)
    result = onnxio.to_proto(imported, imported.graph)
    onnx.checker.check_model(result, full_check=True)
    (got,) = run(result, {"x": np.zeros((2, 5), np.float32)})
    np.testing.assert_array_equal(got, np.arange(5))


def test_a_note_has_no_long_formula() -> None:
    """Nobody reads a formula of several hundred characters: it names the sizes that it is of."""
    nodes, before = [], "x"
    for k in range(4):
        nodes.append(f"a{k} = MaxPool<kernel_shape=[3], strides=[2], pads=[{k % 2}, 1]>({before})")
        nodes.append(f"c{k} = Concat<axis=2>(a{k}, {before}, z)")
        before = f"c{k}"
    proto = onnx.parser.parse_model(
        '<ir_version: 8, opset_import: ["": 17]> agraph (float[1,2,n] x, float[1,2,m] z) => (float[1,2,3,4] y) '
        f"{{ {' '.join(nodes)} y = Relu({before}) }}"
    )
    (note,) = onnxio.load(proto).notes
    assert "f(m, n" in note
    assert len(note) < 160


@pytest.mark.parametrize("shape", [(), (3,)])
def test_a_loop_that_declares_a_shape_that_does_not_follow(shape: tuple[int, ...]) -> None:
    """The state has no shape in the body, so neither has what is computed of it."""
    i, go, on = (
        declare(n, t, ())
        for n, t in (("i", TensorProto.INT64), ("go", TensorProto.BOOL), ("on", TensorProto.BOOL))
    )
    state = onnx.ValueInfoProto(name="v", type=onnx.helper.make_tensor_type_proto(F, None))
    nodes = [make("Identity", ["go"], ["on"]), make("Neg", ["v"], ["w"]), make("Identity", ["v"], ["s"])]
    body = helper.make_graph(nodes, "b", [i, go, state], [on, declare("w", F, None), declare("s", F, shape)])
    node = make("Loop", ["n", "", "x"], ["y", "all"], body=body)
    x, outputs = declare("x", F, (2, 3)), [declare("y", F, None), declare("all", F, None)]
    (loop,) = onnxio.load(model([node], [x], outputs, {"n": np.int64(2)})).graph.nodes()
    assert [t.shape for t in loop.types] == [None, None]
