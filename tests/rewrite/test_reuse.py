"""A node that a substitution replaces is not reused by its target, and counts that crash ONNX are errors."""

from __future__ import annotations

import numpy as np
import pytest

from rewrite_rules.merge import MergeMatMuls
from tests.rules.harness import model
from xrlflow.ir import Attrs, DType, TensorType
from xrlflow.onnxio import load
from xrlflow.ops.infer import InferenceError, infer
from xrlflow.rewrite import Library, RewriteState


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
