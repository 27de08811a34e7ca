"""Parts of a model as functions: which values cross their border, and that nothing else changes."""

from __future__ import annotations

from collections.abc import Callable
from random import Random
from typing import Any

import numpy as np
import onnx
import onnx.parser
import onnxruntime as ort
import pytest
from hypothesis import HealthCheck, assume, given, settings
from hypothesis import strategies as st
from onnx import ModelProto, NodeProto, TensorProto, helper, numpy_helper

from tests.graphs import models
from xrlflow.onnxio.regions import (
    Region,
    cut,
    extracted,
    names_read,
    region_of,
    with_functions,
    with_guard,
)

DOMAIN = "xrlflow.0123456789abcdef"


def parsed(text: str, version: int = 8) -> ModelProto:
    return onnx.parser.parse_model(f'<ir_version: {version}, opset_import: ["": 17]> agraph {text}')


def run(model: ModelProto, feeds: dict[str, Any], optimized: bool = True) -> list[Any]:
    options = ort.SessionOptions()
    if not optimized:
        options.graph_optimization_level = ort.GraphOptimizationLevel.ORT_DISABLE_ALL
    options.log_severity_level = 4
    options.intra_op_num_threads = 1
    found: list[Any] = ort.InferenceSession(model.SerializeToString(), options).run(None, feeds)
    return found


def feeds_of(model: ModelProto) -> dict[str, Any]:
    """Random inputs. A dimension without a number is 2."""
    rng = np.random.default_rng(0)
    fixed = {tensor.name for tensor in model.graph.initializer}
    return {
        value.name: rng.standard_normal(
            [dim.dim_value or 2 for dim in value.type.tensor_type.shape.dim]
        ).astype(np.float32)
        if value.type.tensor_type.elem_type == TensorProto.FLOAT
        else np.ones([dim.dim_value or 2 for dim in value.type.tensor_type.shape.dim], bool)
        for value in model.graph.input
        if value.name not in fixed
    }


def same_bits(
    model: ModelProto, made: ModelProto, feeds: dict[str, Any] | None = None, optimized: bool = True
) -> None:
    onnx.checker.check_model(made, full_check=True)
    feeds = feeds_of(model) if feeds is None else feeds
    for a, b in zip(run(model, feeds, optimized), run(made, feeds, optimized), strict=True):
        assert (a.dtype, a.shape, a.tobytes()) == (b.dtype, b.shape, b.tobytes())


CHAIN = "(float[2,3] x, float[3] v) => (float[2,3] y, float[2,3] b) <float[3] w = {1, 2, 3}>"
CHAIN += " { a = Add(w, x) b = Mul(a, v) c = Sub(b, a) d = Relu(c) y = Add(d, w) }"


def test_values_that_cross_the_border() -> None:
    graph = parsed(CHAIN).graph
    assert region_of(graph, [2, 1]) == Region((1, 2), ("a", "v"), ("b", "c"), ())
    assert region_of(graph, range(5)) == Region((0, 1, 2, 3, 4), ("x", "v"), ("b", "y"), ("w",))
    assert region_of(graph, [0]) == Region((0,), ("x",), ("a",), ("w",))
    assert region_of(graph, [3, 4]).weights == ("w",)


@pytest.mark.parametrize("weights_as_inputs", [False, True])
@pytest.mark.parametrize("nodes", [range(5), [0], [1, 2], [3, 4]])
def test_a_region_becomes_one_node(nodes: list[int], weights_as_inputs: bool) -> None:
    model = parsed(CHAIN)
    region = region_of(model.graph, nodes)
    made = with_functions(model, {"R": region}, DOMAIN, weights_as_inputs=weights_as_inputs)
    (node,) = (n for n in made.graph.node if n.domain == DOMAIN)
    assert list(node.input) == [*region.inputs, *(region.weights if weights_as_inputs else ())]
    assert len(made.graph.node) == 5 - len(nodes) + 1
    stays = weights_as_inputs or not {0, 4} <= set(nodes)
    assert [tensor.name for tensor in made.graph.initializer] == (["w"] if stays else [])
    same_bits(model, made)


def test_two_regions_share_a_weight() -> None:
    model = parsed(CHAIN)
    regions = {"A": region_of(model.graph, [0, 1]), "B": region_of(model.graph, [3, 4])}
    made = with_functions(model, regions, DOMAIN)
    assert [node.op_type for node in made.graph.node] == ["A", "Sub", "B"]
    same_bits(model, made)


def test_a_node_that_waits_for_a_region_stands_after_it() -> None:
    """A region stands where its last node stood: what reads its first outputs must wait."""
    model = parsed(
        "(float[4] x) => (float[4] y, float[4] z) { a = Relu(x) y = Neg(a) b = Abs(x) z = Tanh(b) }"
    )
    made = with_functions(model, {"R": region_of(model.graph, [0, 2])}, DOMAIN)
    assert [node.op_type for node in made.graph.node] == ["R", "Tanh", "Neg"]
    same_bits(model, made)


BRANCHES = (
    "(float[4] x, bool c) => (float[4] y) <float[4] w = {1, 2, 3, 4}> { a = Relu(x) y = If(c) <"
    " then_branch = g1 () => (float[4] p) { b = Neg(a) p = Add(b, w) },"
    " else_branch = g2 () => (float[4] q) { b = Abs(a) q = Tanh(b) }> }"
)


def test_bodies_read_values_from_outside() -> None:
    model = parsed(BRANCHES)
    assert names_read(model.graph.node[1]) == {"c", "a", "w"}
    region = region_of(model.graph, [1])
    assert (set(region.inputs), region.weights) == ({"c", "a"}, ("w",))
    for nodes in ([0], [1], [0, 1]):
        same_bits(model, with_functions(model, {"R": region_of(model.graph, nodes)}, DOMAIN))


@pytest.mark.parametrize("nodes", [[0], [0, 1]])
def test_an_initializer_that_callers_may_replace_stays_an_input(nodes: list[int]) -> None:
    text = "(float[3] x, float[3] w) => (float[3] y) <float[3] w = {1, 2, 3}> { a = Mul(x, w) y = Relu(a) }"
    model = parsed(text)
    assert region_of(model.graph, nodes).inputs == ("x", "w")
    made = with_functions(model, {"R": region_of(model.graph, nodes)}, DOMAIN)
    same_bits(model, made)
    same_bits(model, made, {"x": np.ones(3, np.float32), "w": np.full(3, 5, np.float32)})


def test_before_version_4_no_initializer_could_be_replaced() -> None:
    """Functions need a later version, in which those that are inputs too could be."""
    text = "(float[3] x, float[3] w) => (float[3] y) <float[3] w = {1, 2, 3}> { a = Mul(x, w) y = Relu(a) }"
    model = parsed(text, version=3)
    del model.opset_import[:]
    model.opset_import.add(version=9)
    made = with_functions(model, {"R": region_of(model.graph, [0, 1])}, DOMAIN)
    assert [value.name for value in made.graph.input] == ["x"]
    same_bits(model, made)


def test_sparse_initializers_stay() -> None:
    values = numpy_helper.from_array(np.array([2.0], np.float32), "s")
    sparse = helper.make_sparse_tensor(values, numpy_helper.from_array(np.array([1], np.int64)), [3])
    model = parsed("(float[3] x) => (float[3] y) { a = Mul(x, s) y = Relu(a) }")
    model.graph.sparse_initializer.append(sparse)
    assert region_of(model.graph, [0, 1]).inputs == ("x", "s")
    made = with_functions(model, {"R": region_of(model.graph, [0, 1])}, DOMAIN)
    for a, b in zip(run(model, feeds_of(model)), run(made, feeds_of(model)), strict=True):
        assert a.tobytes() == b.tobytes()


def test_functions_of_the_model_are_kept() -> None:
    model = onnx.parser.parse_model(
        '<ir_version: 8, opset_import: ["": 17, "own": 1]> agraph (float[3] x) => (float[3] y)'
        " { a = own.twice(x) y = Relu(a) }"
        ' <domain: "own", opset_import: ["": 17]> twice (p) => (q) { q = Add(p, p) }'
    )
    region = region_of(model.graph, [0, 1])
    same_bits(model, with_functions(model, {"R": region}, DOMAIN))
    types = {value.name: value.type for value in (*model.graph.input, *model.graph.output)}
    same_bits(model, extracted(model, region, types))


def test_an_extracted_region_has_the_ports_of_the_region() -> None:
    model = parsed(CHAIN)
    region = region_of(model.graph, [1, 2, 4, 3])
    inferred = onnx.shape_inference.infer_shapes(model).graph
    types = {value.name: value.type for value in (*inferred.value_info, *inferred.input, *inferred.output)}
    made = extracted(model, region, types)
    onnx.checker.check_model(made, full_check=True)
    assert tuple(value.name for value in made.graph.input) == region.inputs == ("a", "v")
    assert tuple(value.name for value in made.graph.output) == region.outputs == ("b", "y")
    assert [tensor.name for tensor in made.graph.initializer] == ["w"]


# --- Guards

OPEN = (
    "(float[N,3] x, float[M,2] v) => (float[N,3] y, float[M,2] z) <float[3] w = {1, 2, 3}>"
    " { a = Add(x, w) y = Relu(a) z = Neg(v) }"
)


def test_a_guard_chooses_by_sizes() -> None:
    """Every input has to fit. Here the two functions differ, so that the choice shows."""
    model = parsed(OPEN)
    made = with_guard(model, "R", {"x": (4, 3), "v": (5, 2)}, DOMAIN)
    changed = next(function for function in made.functions if function.name == "R")
    del changed.node[:]
    changed.node.extend(helper.make_node("Identity", [a], [b]) for a, b in zip(changed.input, changed.output))
    onnx.checker.check_model(made, full_check=True)
    for n, m in ((4, 5), (4, 4), (5, 4), (5, 5), (0, 5), (4, 1), (1, 1)):
        feeds = {"x": np.full((n, 3), -9, np.float32), "v": np.ones((m, 2), np.float32)}
        expected = [feeds["x"], feeds["v"]] if (n, m) == (4, 5) else run(model, feeds)
        for a, b in zip(run(made, feeds), expected, strict=True):
            assert (a.shape, a.tobytes()) == (b.shape, b.tobytes())


@pytest.mark.parametrize("sizes", [(4, 5), (1, 1), (3, 7)])
def test_a_guarded_model_computes_the_same_bits(sizes: tuple[int, int]) -> None:
    model = parsed(OPEN)
    made = with_guard(model, "R", {"x": (4, 3), "v": (5, 2)}, DOMAIN)
    n, m = sizes
    same_bits(model, made, {"x": np.ones((n, 3), np.float32), "v": np.ones((m, 2), np.float32)})


def test_names_of_a_guard_are_not_those_of_the_model() -> None:
    model = parsed(OPEN.replace("x", "R_shape_0").replace("y", "R_sizes"))
    for value in (model.graph.input[0], model.graph.output[0]):
        value.name = value.name.replace("_", ".", 1)
    model.graph.node[0].input[0] = model.graph.input[0].name
    model.graph.node[1].output[0] = model.graph.output[0].name
    feeds = {"R.shape_0": np.ones((4, 3), np.float32), "v": np.ones((5, 2), np.float32)}
    made = with_guard(model, "R", {"R.shape_0": (4, 3), "v": (5, 2)}, DOMAIN)
    same_bits(model, made, feeds)


def test_a_guarded_model_can_be_guarded_again() -> None:
    model = parsed(OPEN)
    feeds = {"x": np.ones((4, 3), np.float32), "v": np.ones((5, 2), np.float32)}
    once = with_guard(model, "R", {"x": (4, 3), "v": (5, 2)}, DOMAIN)
    same_bits(model, with_guard(once, "R", {"x": (6, 3), "v": (6, 2)}, DOMAIN.replace("0", "f")), feeds)


# --- Cutting


def refused(*kinds: str) -> Callable[[NodeProto], bool]:
    return lambda node: node.op_type not in kinds


def test_a_node_that_does_not_fit_is_a_border() -> None:
    graph = parsed(
        "(float[4] x) => (float[4] y) { a = Relu(x) b = Neg(a) c = Erf(b) d = Abs(b) e = Add(c, d) y = Neg(e) }"
    ).graph
    assert [region.nodes for region in cut(graph, refused("Erf"))] == [(0, 1, 3), (4, 5)]
    assert [region.nodes for region in cut(graph, refused("Erf"), minimum=3)] == [(0, 1, 3)]
    assert [region.nodes for region in cut(graph, refused())] == [(0, 1, 2, 3, 4, 5)]
    assert cut(graph, lambda node: False) == []


def test_what_makes_weights_belongs_to_their_reader() -> None:
    """Behind a border, too; not if two regions read them, or they are read outside."""
    text = (
        "(float[2] x) => (float[2] y, float[2] k) "
        "<float16[2] a = {1, 2}, float16[2] b = {3, 4}, float16[2] c = {5, 6}> "
        "{ u = Cast<to=1>(a) v = Cast<to=1>(b) w = Neg(v) k = Cast<to=1>(c) p = Add(x, w) q = Mul(p, u) e = Erf(q) "
        "r = Sub(e, u) s = Add(r, k) y = Exp(s) }"
    )
    graph = parsed(text).graph
    first, second = cut(graph, refused("Erf"))
    assert [graph.node[i].output[0] for i in first.nodes] == ["v", "w", "p", "q"]
    assert [graph.node[i].output[0] for i in second.nodes] == ["r", "s", "y"]
    assert first.weights == ("b",)


def test_parts_that_are_not_connected_are_regions_of_their_own() -> None:
    """They may read the same input or weight."""
    graph = parsed(
        "(float[4] x) => (float[4] y, float[4] z) <float[4] w = {1, 2, 3, 4}>"
        " { a = Add(x, w) b = Mul(x, w) y = Relu(a) z = Neg(b) }"
    ).graph
    assert [region.nodes for region in cut(graph, refused())] == [(0, 2), (1, 3)]


def convex(model: ModelProto, region: Region) -> bool:
    """Whether no path leaves the region and comes back."""
    graph, inside = model.graph, set(region.nodes)
    made = {name: i for i, node in enumerate(graph.node) for name in node.output if name}
    after = set[int]()  # outside, and computed from the region
    for i, node in enumerate(graph.node):
        sources = {made[name] for name in names_read(node) if name in made}
        if i in inside:
            if sources & after:
                return False
        elif sources & (inside | after):
            after.add(i)
    return True


@given(models(), st.integers(0, 2**16), st.sampled_from([20, 50, 80]), st.booleans())
@settings(max_examples=60, deadline=None, suppress_health_check=list(HealthCheck))
def test_models_cut_at_random_compute_the_same_bits(
    model: ModelProto, seed: int, percent: int, weights_as_inputs: bool
) -> None:
    """Without ONNX Runtime's optimiser: it fuses some operators (a Gelu) only where all of them are in one graph."""
    try:
        run(model, feeds_of(model), optimized=False)
    except Exception:  # ONNX Runtime loses a value that only a branch reads, and fails
        assume(False)
    random = Random(seed)
    fits = [random.randrange(100) < percent for _ in model.graph.node]
    answers = iter(fits)
    regions = cut(model.graph, lambda node: next(answers), minimum=1)
    nodes = [i for region in regions for i in region.nodes]
    assert len(nodes) == len(set(nodes))
    assert all(fits[i] for i in nodes)
    assert all(convex(model, region) for region in regions)
    named = {f"Region_{i}": region for i, region in enumerate(regions)}
    made = with_functions(model, named, DOMAIN, weights_as_inputs=weights_as_inputs)
    same_bits(model, made, optimized=False)


def test_outputs_of_a_guarded_model_keep_their_order() -> None:
    """Also where the graph computes the last one first, and one is an input."""
    text = "(float[N,3] x, float[N,3] v) => (float[N,3] b, float[N,3] v, float[N,3] a) { a = Relu(x) b = Neg(a) }"
    model = parsed(text)
    made = with_guard(model, "R", {"x": (4, 3)}, DOMAIN)
    for rows in (4, 5):
        same_bits(
            model,
            made,
            {name: np.random.default_rng(rows).standard_normal((rows, 3), np.float32) for name in "xv"},
        )


def test_a_guard_chooses_a_graph_with_regions() -> None:
    """With an operator between the regions whose bodies read values of the branch."""
    text = (
        "(float[N,3] x, bool c) => (float[N,3] y, float[N,3] z) <float[3] w = {1, 2, 3}> { a = Add(x, w) b = Relu(a)"
        " d = If(c)<then_branch = g1 () => (float[N,3] p) { p = Add(b, w) }, else_branch = g2 () => (float[N,3] q)"
        " { q = Sub(b, x) }> e = Neg(d) y = Mul(e, a) z = Identity(b) }"
    )
    model, fixed = parsed(text), parsed(text.replace("N,", "4,"))
    regions = cut(fixed.graph, lambda node: node.op_type != "If")
    assert len(regions) == 2
    inner = with_functions(fixed, {f"R{i}": region for i, region in enumerate(regions)}, DOMAIN)
    made = with_guard(model, "R", {"x": (4, 3)}, DOMAIN, inner)
    for rows in (4, 5):
        x = np.random.default_rng(rows).standard_normal((rows, 3), np.float32)
        for chosen in (True, False):
            same_bits(model, made, {"x": x, "c": np.array(chosen)})
