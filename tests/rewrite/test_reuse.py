"""A node that a substitution replaces is not reused by its target, counts that crash ONNX are errors, and what is
remembered of a match keeps nothing else alive."""

from __future__ import annotations

import weakref
from typing import Any

import numpy as np
import pytest

from rewrite_rules.merge import MergeMatMuls
from tests.rules.harness import model
from xrlflow.ir import Attrs, DType, TensorType
from xrlflow.onnxio import load
from xrlflow.ops.infer import InferenceError, infer
from xrlflow.rewrite import Captures, Library, Op, RewriteState, Rule, Val, require


def test_what_is_replaced_is_not_reused() -> None:
    """[w|nothing] is w: the merged product is the very node whose place its Split takes."""
    proto = model(
        "agraph (float[2,3] x) => (float[2,2] y, float[2,0] z) { y = MatMul(x, w) z = MatMul(x, e) }",
        w=np.ones((3, 2), np.float32),
        e=np.ones((3, 0), np.float32),
    )
    state = RewriteState.start(load(proto).graph, Library([MergeMatMuls()]))
    assert state.candidates
    for match in state.candidates:
        successor = state.apply(match)
        assert [n.op for n in successor.graph.topological()] == ["MatMul", "Split"]  # raises on a cycle


def test_a_split_whose_counts_disagree() -> None:
    """ONNX's own inference reads beyond the end of them, and the process with it."""
    with pytest.raises(InferenceError, match="2 outputs with 3 parts"):
        infer("Split", Attrs({"num_outputs": 3}), [TensorType(DType.FLOAT, (6,))], [None], 2)


class Never(Rule):
    """neg(neg(x)) -> x, never."""

    def source(self, op: Op, x: Any) -> Any:
        return op.Neg(op.Neg(x))

    def where(self, m: Captures, x: Val) -> None:
        require(x.rank > 9, "never")

    def target(self, op: Op, m: Captures, x: Val) -> Any:
        return x


def test_a_refusal_that_is_remembered_keeps_nothing_alive() -> None:
    """A traceback holds the frames of all callers: every state of the search that met the refusal first."""

    class Local:
        pass

    proto = model("agraph (float[2,3] x) => (float[2,3] y) { a = Neg(x) y = Neg(a) }")
    library = Library([Never()])

    def search(library: Library) -> weakref.ref[Local]:
        held = Local()
        RewriteState.start(load(proto).graph, library)
        return weakref.ref(held)

    assert search(library)() is None
    assert library.stats["Never"].refused == {"never": 1}
    assert search(library)() is None
    assert library.stats["Never"].refused == {"never": 2}
    other = Library([Never()])
    other.refusals = []
    assert search(other)() is None
    assert [str(reason) for reason in other.refusals] == ["never"]
