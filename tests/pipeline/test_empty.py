"""No operator is put in that would not run where an open dimension is 0 and the graph does: rules refuse."""

from __future__ import annotations

import numpy as np
import onnx
import pytest

import xrlflow
from rewrite_rules import LIBRARY
from rewrite_rules.examples import graphs
from tests.rules.harness import model, normal, rewritten, run
from xrlflow.cost import Roofline
from xrlflow.ir import Attrs, DType, TensorType, dims
from xrlflow.ir.dims import dim, floor_div, symbol
from xrlflow.onnxio import load, to_proto
from xrlflow.onnxio.branches import _causes, _telling
from xrlflow.ops.empty import needed, where_empty
from xrlflow.options import Options
from xrlflow.pipeline.library import library_for
from xrlflow.rewrite import RewriteState
from xrlflow.rewrite.state import MAY_BE_EMPTY

RULES = {rule.name: rule for rule in LIBRARY}
EXAMPLES = {rule.name: rule.examples for rule in LIBRARY}
LSTM = (
    EXAMPLES["FuseUnrolledLSTM"][0]
    .replace("float[2,3,3] x, float[2,2] h0, float[2,2] c0", "float[n,3,3] x, float[n,2] h0, float[n,2] c0")
    .replace("float[2,3,2] y", "float[n,3,2] y")
)  # fmt: skip
GRU = EXAMPLES["FuseUnrolledGRU"][0].replace(
    "float[2,3,3] x, float[2,2] h0) => (float[2,3,2] y)", "float[n,3,3] x, float[n,2] h0) => (float[n,3,2] y)"
)
PAD = EXAMPLES["FoldPadIntoMaxPool"][1].replace("float[N,2,5] x", "float[N,2,h] x")
BEHIND_CONV = PAD.replace(
    "> { r = Sigmoid(x)", ", float[2,2,1] w = {1, 2, 3, 4}> { c = Conv(x, w) r = Sigmoid(c)"
)
TRANSPOSED = EXAMPLES["PushTransposeIntoMatMul"][0].replace("float[2,3,4,5] x", "float[n,3,4,5] x").replace(
    "float[2,3,6,4] y", "float[n,3,6,4] y"
)  # fmt: skip


def floats(*shape: int | str) -> TensorType:
    return TensorType(DType.FLOAT, shape)


def found(source: str, rule: str, **options: object) -> tuple[int, bool]:
    """The number of places of a rule in a model, and whether it was refused because a dimension may be 0."""
    library = library_for(Options(only=[rule], **options))  # type: ignore[arg-type]
    state = RewriteState.start(load(model(source)).graph, library)
    return len(state.candidates), MAY_BE_EMPTY in library.stats[rule].refused


@pytest.mark.parametrize(
    ("rule", "source"),
    [
        ("FoldPadIntoMaxPool", PAD),
        ("PushTransposeIntoMatMul", TRANSPOSED),
    ],
)
def test_what_needs_elements_is_refused_where_there_may_be_none(rule: str, source: str) -> None:
    assert found(source, rule) == (0, True)
    assert found(source, rule, assuming=["nonempty"]) == (1, False)


@pytest.mark.parametrize("rule", ["FuseUnrolledLSTM", "FuseUnrolledGRU", "PushTransposeIntoMatMul"])
def test_fixed_sizes_are_enough(rule: str) -> None:
    assert found(EXAMPLES[rule][0], rule) == (1, False)


def test_what_the_graph_needs_in_any_case_is_no_obstacle() -> None:
    """A convolution does not run on an image without pixels, so the pool behind it need not either."""
    assert found(BEHIND_CONV, "FoldPadIntoMaxPool") == (1, False)


def test_the_user_is_told_which_assumption_helps() -> None:
    options = {"search": "greedy", "cost": Roofline(), "measure": False, "threads": 1}
    result = xrlflow.optimize(model(PAD), only=["FoldPadIntoMaxPool"], **options)
    assert not result.trace
    assert any("FoldPadIntoMaxPool" in n and "--assume nonempty" in n for n in result.report.notes)
    assumed = xrlflow.optimize(model(PAD), only=["FoldPadIntoMaxPool"], assuming=["nonempty"], **options)
    assert [step.rule for step in assumed.trace] == ["FoldPadIntoMaxPool"]
    assert assumed.report.verified
    assert not any("=0" in note for note in assumed.report.notes), "a size that is assumed away is not run"


def test_the_sizes_that_operators_need() -> None:
    def of(op: str, *shapes: str | None, **attrs: int) -> list[tuple[int, int]]:
        types = [None if s is None else TensorType(DType.FLOAT, tuple(s)) for s in shapes]
        return list(needed(op, Attrs(attrs), types))

    assert of("LSTM", "sbi") == [(0, 0), (0, 1), (0, 2)]
    assert of("Conv", "nchw") == of("MaxPool", "nchw") == [(0, 1), (0, 2), (0, 3)]
    assert of("LayerNormalization", "nsd") == [(0, 2)]
    assert of("LayerNormalization", "nsd", axis=1) == [(0, 1), (0, 2)]
    assert of("Relu", "nchw") == of("MatMul", "bmk", "kn") == of("MatMul", "bmk", "bkn") == []
    assert of("MatMul", "mk", "bkn") == [(1, 0), (0, 1)]
    assert list(needed("MatMul", Attrs({}), [floats("b", 2, "m", "k"), floats(2, "k", "n")])) == [
        (0, 0),
        (0, 3),
    ]
    assert list(needed("MatMul", Attrs({}), [floats("b", 2, "m", "k"), floats(1, 1, "k", "n")])) == []
    assert of("Attention", "qd", None, "kd") == [(0, 0), (0, 1), (2, 0), (2, 1)]
    assert list(needed("LSTM", Attrs({}), [TensorType(DType.FLOAT, None)])) == []


def test_only_results_that_are_zeros_get_a_branch() -> None:
    def of(op: str, inputs: list[TensorType], *results: TensorType) -> bool:
        return where_empty(op, inputs, results) is not None

    q, k, v = floats("n", 2, "q", 4), floats("n", 2, "k", 4), floats("n", 2, "k", 6)
    assert of("Attention", [q, k, v], floats("n", 2, "q", 6))
    deep = [floats("n", 2, "q", "d"), floats("n", 2, "k", "d"), v]
    assert not of("Attention", deep, floats("n", 2, "q", 6)), "without a depth it is the mean of the values"
    x = floats(3, "b", 4)
    assert of("LSTM", [x], floats(3, 1, "b", 5), floats(1, "b", 5))
    assert not of("LSTM", [x], floats(3, 1, "b", 5), floats(1, 2, 5)), "the last state has elements"


def test_what_may_run_without_elements_says_nothing_of_the_graph() -> None:
    """An operator may need a size that others of its kind do without: then the graph may run at 0."""

    def surely(op: str, *types: TensorType, **attrs: object) -> list[tuple[int, int]]:
        return list(needed(op, Attrs(attrs), types, surely=True))  # type: ignore[arg-type]

    image, weight = floats("n", 3, "h", "w"), floats(4, 3, 3, 3)
    assert surely("InstanceNormalization", image) == []
    assert (
        surely("Conv", image, weight, pads=(1, 1, 1, 1)) == surely("Conv", image, weight) == [(0, 2), (0, 3)]
    )
    assert surely("Conv", image, weight, pads=(2, 1, 2, 1)) == [(0, 3)]
    assert surely("Conv", image, weight, auto_pad="SAME_UPPER") == []
    assert surely("LSTM", floats("s", "b", "i")) == [(0, 1)]


def test_a_dimension_that_is_positive() -> None:
    half = dim(floor_div(symbol("h"), 2))
    strided = dim(floor_div(symbol("h") - 1, 2) + 1)
    assert dims.positive(3)
    assert not dims.positive(0)
    assert not dims.positive(None)
    assert not dims.positive("h")
    assert dims.positive("h", {"h"})
    assert not dims.positive(half, {"h"}), "1 // 2"
    assert dims.positive(half, {half})
    assert dims.positive(strided, {"h"})
    assert not dims.positive(strided)
    assert dims.positive(dim(symbol("h") + 2))


_Q_K_V = "float[N,2,Q,4] q, float[N,2,K,4] k, float[N,2,K,6] v, float[1,1,Q,K] m"
_SCORES = "t = Transpose<perm=[0,1,3,2]>(k) a = MatMul(q, t) s = Mul(a, 0.5) b = Add(s, m) p = Softmax(b)"
ATTENTION = f"({_Q_K_V}) => (float[N,2,Q,6] y) {{ {_SCORES} y = MatMul(p, v) }}"
GUARDED = (
    f"({_Q_K_V}) => (float[N,2,Q,6] y) {{ {_SCORES} n = IsNaN(p) w = Where(n, 0.0, p) y = MatMul(w, v) }}"
)
SHAPES: dict[str, tuple[int | str, ...]] = {
    "q": ("N", 2, "Q", 4),
    "k": ("N", 2, "K", 4),
    "v": ("N", 2, "K", 6),
    "m": (1, 1, "Q", "K"),
}


def operators(proto: onnx.ModelProto) -> list[str]:
    return [node.op_type for node in proto.graph.node]


@pytest.mark.parametrize("zero", ["N", "Q", "K", ""])
@pytest.mark.parametrize(
    ("rule", "source"), [("FuseAttention", ATTENTION), ("FuseGuardedAttention", GUARDED)]
)
def test_attention_gets_a_branch_for_sizes_of_0(rule: str, source: str, zero: str) -> None:
    """ONNX Runtime's Attention raises an error there, the operators that it replaces do not."""
    (original,) = map(model, graphs(source))
    result, _ = rewritten(RULES[rule], original)
    assert operators(result).count("If") == 1
    sizes = {"N": 3, "Q": 5, "K": 7, zero: 0}
    feeds = {name: normal(*(sizes.get(str(d), d) for d in dims)) for name, dims in SHAPES.items()}  # type: ignore[arg-type]
    np.testing.assert_allclose(run(result, feeds)[0], run(original, feeds)[0], atol=1e-6)


@pytest.mark.parametrize("batch", [0, 3])
@pytest.mark.parametrize(("rule", "source"), [("FuseUnrolledLSTM", LSTM), ("FuseUnrolledGRU", GRU)])
def test_a_recurrent_network_gets_a_branch_for_an_empty_batch(rule: str, source: str, batch: int) -> None:
    original = model(source)
    result, _ = rewritten(RULES[rule], original)
    (branch,) = (n for n in result.graph.node if n.op_type == "If")
    (then,) = (a.g for a in branch.attribute if a.name == "then_branch")
    assert [n.op_type for n in then.node] == [rule.removeprefix("FuseUnrolled")]
    feeds = {
        v.name: normal(*(d.dim_value or batch for d in v.type.tensor_type.shape.dim))
        for v in original.graph.input
        if v.name not in {i.name for i in original.graph.initializer}
    }
    for y, expected in zip(run(result, feeds), run(original, feeds), strict=True):
        np.testing.assert_allclose(y, expected, atol=1e-6)


def test_the_branch_is_left_out_and_verified() -> None:
    (original,) = map(model, graphs(ATTENTION))
    options = {
        "search": "greedy",
        "cost": Roofline(),
        "measure": False,
        "threads": 1,
        "only": ["FuseAttention"],
    }
    result = xrlflow.optimize(original, **options)
    assert operators(result.model).count("If") == 1
    assert result.report.verified
    assert any("Q=0" in note for note in result.report.notes)
    assert not any("not exercised" in note for note in result.report.notes)
    without = xrlflow.optimize(original, assuming=["nonempty"], **options)
    assert "If" not in operators(without.model)


def test_a_result_that_is_read_and_written_again_gets_no_second_branch() -> None:
    (original,) = map(model, graphs(ATTENTION))
    result, _ = rewritten(RULES["FuseAttention"], original)
    imported = load(result)
    again = to_proto(imported, imported.graph)
    (branch,) = (n for n in again.graph.node if n.op_type == "If")
    assert [n.op_type for a in branch.attribute if a.name == "then_branch" for n in a.g.node] == ["Attention"]


def test_one_condition_serves_all_branches_of_the_same_sizes() -> None:
    source = ATTENTION.replace("4] q,", "4] q, float[N,2,Q,4] r,").replace("y)", "y, float[N,2,Q,6] z)", 1)
    source = source.replace(
        " }", " e = Transpose<perm=[0,1,3,2]>(k) f = MatMul(r, e) g = Softmax(f) z = MatMul(g, v) }"
    )
    (original,) = map(model, graphs(source))
    once, _ = rewritten(RULES["FuseAttention"], original)
    assert (operators(once).count("If"), operators(once).count("Size")) == (1, 2)
    result = xrlflow.optimize(
        original, search="greedy", cost=Roofline(), measure=False, threads=1, only=["FuseAttention"]
    ).model
    assert (operators(result).count("If"), operators(result).count("Size")) == (2, 2)


def test_a_condition_asks_few_inputs() -> None:
    """What makes a product of symbols 0 is one of them."""
    assert _causes("N", frozenset()) == {"N"}
    assert _causes(dim(symbol("N") * symbol("M") * 4), frozenset()) == {"N", "M"}
    assert _causes(dim(symbol("N") * symbol("M") * 4), frozenset({"M"})) == {"N"}
    either = dim(symbol("N") + symbol("M"))
    assert _causes(either, frozenset()) == {either}
    assert _causes(dim(floor_div(symbol("N"), 2)), frozenset()) == {dim(floor_div(symbol("N"), 2))}
    assert _telling({0: frozenset("NQ"), 1: frozenset("NK"), 2: frozenset("NK")}) == [0, 1]
    assert _telling({0: frozenset("N"), 1: frozenset("NK"), 2: frozenset("K")}) == [1]
    unknown = {0: frozenset({(0, 0), "N"}), 1: frozenset({(1, 0)})}
    assert _telling(unknown) == [0, 1]


@pytest.mark.parametrize("batch", [0, 3])
def test_windows_of_a_batch_are_empty_with_the_batch(batch: int) -> None:
    """Attention in four windows of each image: one condition for both, whatever the number of windows."""
    step = (
        " e{0} = Transpose<perm=[0,1,3,2]>(r{0}) f{0} = MatMul(r{0}, e{0}) g{0} = Softmax(f{0})"
        " h{0} = MatMul(g{0}, r{0}) {1} = Reshape(h{0}, [{2}])"
    )
    source = (
        "(float[N,2,8,6] x) => (float[N,2,8,6] y) { r0 = Reshape(x, [-1, 2, 2, 6])"
        + step.format(0, "a", "-1, 2, 8, 6")
        + " r1 = Reshape(a, [-1, 2, 4, 6])"
        + step.format(1, "y", "-1, 2, 8, 6")
        + " }"
    )
    (original,) = map(model, graphs(source))
    result = xrlflow.optimize(
        original, search="greedy", cost=Roofline(), measure=False, threads=1, only=["FuseAttention"]
    ).model
    assert (operators(result).count("If"), operators(result).count("Size")) == (2, 1)
    feeds = {"x": normal(batch, 2, 8, 6)}
    np.testing.assert_allclose(run(result, feeds)[0], run(original, feeds)[0], atol=1e-6)


@pytest.mark.parametrize(("opset", "fuses"), [(17, False), (23, True), (24, False), (None, True)])
def test_no_operator_is_put_in_that_the_named_opset_lacks(opset: int | None, fuses: bool) -> None:
    (original,) = map(model, graphs(ATTENTION))
    result = xrlflow.optimize(
        original,
        search="greedy",
        cost=Roofline(),
        measure=False,
        threads=1,
        only=["FuseAttention"],
        opset=opset,
    )
    assert ("If" in operators(result.model)) == fuses
    assert result.report.verified or not fuses


def test_an_attention_in_a_body_of_the_users_own_gets_no_branch() -> None:
    source = """agraph (float[N,2,Q,4] q, int64 n) => (float[N,2,Q,4] y) <bool c = {1}> {
      y = Loop(n, c, q) <body = b (int64 i, bool go, float[N,2,Q,4] s) => (bool on, float[N,2,Q,4] t)
        { on = Identity(go) t = Attention(s, s, s) }> }"""
    imported = load(model(source))
    (loop,) = to_proto(imported, imported.graph).graph.node
    assert [n.op_type for a in loop.attribute for n in a.g.node] == ["Identity", "Attention"]


def test_an_attention_that_is_the_same_in_each_step_leaves_the_loop() -> None:
    source = """agraph (float[N,2,Q,4] q, int64 n) => (float[N,2,Q,4] y) <bool c = {1}> {
      y = Loop(n, c, q) <body = b (int64 i, bool go, float[N,2,Q,4] s) => (bool on, float[N,2,Q,4] t)
        { on = Identity(go) a = Attention(q, q, q) t = Add(s, a) }> }"""
    result, graph = rewritten(RULES["MoveInvariantsOutOfLoop"], model(source))
    assert "Attention" in {node.op for node in graph.nodes()}
    assert "If" in operators(result), "with no steps the original runs at sizes of 0"


def test_an_attention_of_the_users_own_gets_no_branch() -> None:
    source = "agraph (float[N,2,Q,4] q, float[N,2,K,4] k, float[N,2,K,4] v) => (float[N,2,Q,4] y) "
    imported = load(model(source + "{ a = Attention(q, k, v) b = Neg(a) y = Neg(b) }"))
    assert operators(to_proto(imported, imported.graph)) == ["Attention", "Neg", "Neg"]


@pytest.mark.parametrize("zero", ["N", "M", "K", "L", ""])
def test_branches_of_other_sizes_have_conditions_of_their_own(zero: str) -> None:
    """What one attention lacks is no reason for zeros in another one."""
    inputs = f"{_Q_K_V.split(', float[1')[0]}, float[M,2,Q,4] r, float[M,2,L,4] c, float[M,2,L,6] d"
    text = "".join(
        f" t{n} = Transpose<perm=[0,1,3,2]>({k}) a{n} = MatMul({q}, t{n}) p{n} = Softmax(a{n}) y{n} = MatMul(p{n}, {v})"
        for n, q, k, v in ((1, "q", "k", "v"), (2, "r", "c", "d"))
    )
    (original,) = map(model, graphs(f"({inputs}) => (float[N,2,Q,6] y1, float[M,2,Q,6] y2) {{{text} }}"))
    result = xrlflow.optimize(
        original, search="greedy", cost=Roofline(), measure=False, verify=False, threads=1, only=["FuseAttention"]
    ).model  # fmt: skip
    assert operators(result).count("If") == 2
    sizes = {"N": 3, "M": 2, "Q": 5, "K": 7, "L": 4, zero: 0}
    feeds = {
        v.name: normal(*(d.dim_value or sizes[d.dim_param] for d in v.type.tensor_type.shape.dim))
        for v in original.graph.input
    }
    for y, expected in zip(run(result, feeds), run(original, feeds), strict=True):
        np.testing.assert_allclose(y, expected, atol=1e-6)
