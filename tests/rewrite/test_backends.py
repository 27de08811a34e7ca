"""Substitutions do not write what the backend lacks."""

from __future__ import annotations

from typing import Any

from rewrite_rules import LIBRARY
from tests.rewrite.toy import CancelTransposes
from tests.rules.harness import model
from xrlflow.onnxio import load
from xrlflow.rewrite import Library, Op, RewriteState, Rule, Val


class ReplaceReluByMax(Rule):
    """relu(x) -> max(x, 0)."""

    def source(self, op: Op, x: Val) -> Any:
        return op.Relu(x)

    def target(self, op: Op, x: Val) -> Any:
        return op.Max(x, 0.0)


def test_operators_that_the_backend_lacks_are_refused() -> None:
    graph = load(
        model(
            "agraph (float[2,3,4] x) => (float[2,3,4] y) {"
            " a = Transpose<perm=[0,2,1]>(x)\n b = Transpose<perm=[0,2,1]>(a)\n y = Relu(b) }"
        )
    ).graph
    rules = (CancelTransposes(), ReplaceReluByMax())
    everything = RewriteState.start(graph, Library(rules), None)
    assert {m.rule.name for m in everything.candidates} == {"CancelTransposes", "ReplaceReluByMax"}
    library = Library(rules, runs=lambda op: op != "Max")
    some = RewriteState.start(graph, library, None)
    assert {m.rule.name for m in some.candidates} == {"CancelTransposes"}
    assert library.stats["ReplaceReluByMax"].refused == {"the backend has no Max": 1}
    part = RewriteState.start(graph, library.only(["ReplaceReluByMax"]), None)
    assert not part.candidates


def test_a_pointwise_convolution_stays_one_for_tvm() -> None:
    """Its kernels are this product already: the matrix would only bring conversions of layouts."""
    assert "ReplacePointwiseConvByMatMul" in Library(LIBRARY).rules
    assert "ReplacePointwiseConvByMatMul" not in Library(LIBRARY, backend="tvm").rules
