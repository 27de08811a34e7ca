"""A rule of your own: write it, prove it, apply it. `python examples/own_rule.py`"""

from __future__ import annotations

import sys
from typing import Any

import onnx

from rewrite_rules import LIBRARY
from xrlflow.cost import Roofline
from xrlflow.ir import text
from xrlflow.onnxio import load, save
from xrlflow.prover import prove
from xrlflow.rewrite import Library, Op, RewriteState, Rule, Val
from xrlflow.search import Limits, greedy


class FactorOutOfDifference(Rule):
    """x * y - x * z -> x * (y - z)."""

    family = "example"
    shapes = "x[...] y[...] z[...]"  # any shapes that broadcast
    may_add_nonfinite = True  # where the left side is NaN or infinite the right side may be the other

    def source(self, op: Op, x: Any, y: Any, z: Any) -> Any:
        return op.Sub(op.Mul(x, y), op.Mul(x, z))

    def target(self, op: Op, x: Val, y: Val, z: Val) -> Any:
        return op.Mul(x, op.Sub(y, z))


MODEL = """<ir_version: 11, opset_import: ["" : 23]>
agraph (float[64,512] a, float[64,512] b, float[64,512] c) => (float[64,512] d) {
    p = Mul(a, b)
    q = Mul(c, a)
    d = Sub(p, q)
}"""


def main() -> None:
    rule = FactorOutOfDifference()

    # The prover draws small graphs in which the rule applies, and compares both sides.
    certificate = prove(rule)
    print(f"proven: {certificate.proven}, {certificate.admitted} cases")
    print(f"wrong rules made of it, and rejected: {certificate.mutants_rejected} of {certificate.mutants}")
    if not certificate.proven:
        sys.exit("\n".join(certificate.failures))

    # A search with the library and the new rule.
    imported = load(onnx.parser.parse_model(MODEL))
    cost = Roofline()
    state = RewriteState.start(imported.graph, Library([*LIBRARY, rule]), cost.delta)
    result = greedy(state, cost.cost(imported.graph), Limits())
    for step in result.best.trace:
        print("applied", step.rule)
    print(text(result.best.state.graph))
    save(imported, result.best.state.graph, "own_rule.onnx")


if __name__ == "__main__":
    main()
