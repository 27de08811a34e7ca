"""No operator is put in that would not run where an open dimension is 0 and the graph does: rules refuse."""

from __future__ import annotations

import pytest

import xrlflow
from rewrite_rules import LIBRARY
from tests.rules.harness import model
from xrlflow.cost import Roofline
from xrlflow.ir import Attrs, DType, TensorType, dims
from xrlflow.ir.dims import dim, floor_div, symbol
from xrlflow.onnxio import load
from xrlflow.ops.empty import needed
from xrlflow.options import Options
from xrlflow.pipeline.library import library_for
from xrlflow.rewrite import RewriteState
from xrlflow.rewrite.state import MAY_BE_EMPTY

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
        ("FuseUnrolledLSTM", LSTM),
        ("FuseUnrolledGRU", GRU),
        ("FuseAttention", EXAMPLES["FuseAttention"][0]),
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
    result = xrlflow.optimize(model(LSTM), only=["FuseUnrolledLSTM"], **options)
    assert not result.trace
    assert any("FuseUnrolledLSTM" in n and "--assume nonempty" in n for n in result.report.notes)
    assumed = xrlflow.optimize(model(LSTM), only=["FuseUnrolledLSTM"], assuming=["nonempty"], **options)
    assert [step.rule for step in assumed.trace] == ["FuseUnrolledLSTM"]
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
