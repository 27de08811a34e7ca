"""Models for tests of report pages, and their results. Nothing is measured: measurements are made up."""

from __future__ import annotations

from dataclasses import replace
from functools import cache
from typing import Any

import numpy as np
import onnx
from onnx import TensorProto, helper, numpy_helper

import xrlflow
from tests.rules.harness import model
from xrlflow.backends.onnxruntime.profile import OperatorProfile, OperatorTime
from xrlflow.backends.results import Latency, RepeatedComparison, SpeedUp, Verdict
from xrlflow.cost import Roofline
from xrlflow.pipeline.pages import Evidence
from xrlflow.search import Ratio, Trial

HOSTILE = (
    "</script><script>window.broken = 1</script>",
    "<img src=x onerror='window.broken = 1'>",
    "\"'`${window.broken = 1}`&lt;b&gt;\\\u2028\u2029",
    "\u202egnirts\u202c \u2066\u200f",
    "n" * 10_000,
)


def layered(layers: int, tail: int, width: int = 8) -> onnx.ModelProto:
    """Equal layers of 14 operators, of which a few cancel each other, one operator before them and `tail` after."""
    rng = np.random.default_rng(0)
    nodes, weights = [helper.make_node("Relu", ["x"], ["h0"], name="/stem/Relu")], []

    def op(layer: int, kind: str, inputs: list[str], **attributes: Any) -> str:
        name = f"/layer.{layer}/{kind}_{len(nodes)}"
        nodes.append(helper.make_node(kind, inputs, [f"{name}_out"], name=name, **attributes))
        return f"{name}_out"

    at = "h0"
    for layer in range(layers):
        weights.append(
            numpy_helper.from_array(rng.standard_normal((width, width)).astype(np.float32) / 3, f"w{layer}")
        )
        turned = op(layer, "Transpose", [op(layer, "Transpose", [at], perm=[1, 0])], perm=[1, 0])
        product = op(layer, "MatMul", [turned, f"w{layer}"])
        gate = op(layer, "Mul", [op(layer, "Sigmoid", [product]), op(layer, "Tanh", [product])])
        back = op(layer, "Neg", [op(layer, "Neg", [gate])])
        left = op(layer, "Softplus", [back])
        right = op(layer, "Exp", [op(layer, "Softsign", [back])])
        joined = op(layer, "Div", [left, right])
        at = op(layer, "Add", [op(layer, "Tanh", [joined]), at])
    for index in range(tail):
        name = "y" if index == tail - 1 else f"t{index}"
        kind = ("Softplus", "Tanh", "Erf", "Sigmoid")[index % 4]
        nodes.append(helper.make_node(kind, [at], [name], name=f"/head/{kind}_{index}"))
        at = name
    info = [helper.make_tensor_value_info(name, TensorProto.FLOAT, [4, width]) for name in ("x", "y")]
    graph = helper.make_graph(nodes, "layers", info[:1], info[1:], weights)
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=10)


def control_flow() -> onnx.ModelProto:
    """An If whose branches have operators to spare, a Loop in one of them."""
    return model(
        "agraph (bool c, float[4] x, int64 n, bool go) => (float[4] y) {\n"
        " a = Relu(x)\n"
        " r = If(c) <then_branch = yes () => (float[4] t) { p = Neg(a) q = Neg(p) t = Exp(q) },"
        " else_branch = no () => (float[4] e) { e = Loop(n, go, a) <body = step (int64 i, bool k, float[4] s) =>"
        " (bool l, float[4] z) { l = Identity(k) m = Neg(s) o = Neg(m) z = Tanh(o) }> }>\n"
        " y = Sigmoid(r) }"
    )


def hostile() -> onnx.ModelProto:
    """A model whose names would be markup, code or confusion if they were not text."""
    nodes = []
    at = HOSTILE[0]
    for index, name in enumerate((*HOSTILE[1:], "y")):
        kind = "Identity" if index == 1 else "Tanh"
        nodes.append(helper.make_node(kind, [at], [name], name=f"{name}{index}", doc_string=name))
        at = name
    info = [helper.make_tensor_value_info(name, TensorProto.FLOAT, [4]) for name in (HOSTILE[0], "y")]
    graph = helper.make_graph(nodes, HOSTILE[0], info[:1], info[1:])
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=10)


@cache
def optimised(name: str) -> xrlflow.Result:
    """The result for one of these models: "small" (65 operators), "large" (1,400), "control" or "hostile"."""
    made = {
        "small": lambda: layered(4, tail=8),
        "large": lambda: layered(100, tail=2),
        "control": control_flow,
        "hostile": hostile,
    }
    return xrlflow.optimize(
        made[name](), search="greedy", cost=Roofline(), backend="onnxruntime", measure=False, time_limit=60.0,
        threads=1, verify=name != "large",
    )  # fmt: skip


def measured(result: xrlflow.Result) -> xrlflow.Result:
    """The result as if it had been measured."""
    speedup, control = SpeedUp(1.84, 1.75, 1.93), SpeedUp(0.99, 0.96, 1.02)
    decided = SpeedUp(1.86, 1.7, 2.0)
    before, after = Latency(3.1, 3.0, 3.3, 90), Latency(1.7, 1.6, 1.8, 90)
    rng = np.random.default_rng(1)
    compared = RepeatedComparison(
        speedup, control, before, after, 9.0, 2, Verdict.FASTER, decided, 20, 180,
        ratios=tuple(1.84 * np.exp(rng.normal(0, 0.03, 20))), controls=tuple(np.exp(rng.normal(0, 0.02, 20))),
    )  # fmt: skip
    trials = (
        Trial("the best proposal", "the original", Ratio(1.8, 1.6, 2.0), True),
        Trial("the best proposal - CancelTransposes", "the best", Ratio(0.97, 0.93, 1.01), False),
        Trial("proposal 2", "the best", Ratio(1.0, 0.0, float("inf")), False),
    )
    report = replace(
        result.report, speedup=speedup, control=control, decided=decided, latency_before=before, latency_after=after,
        processes=20, reason=f"measured {speedup}", trials=trials,
    )  # fmt: skip
    evidence: Evidence = replace(result.evidence, compared=compared)
    return replace(result, report=report, evidence=evidence)


def profiles() -> tuple[OperatorProfile, OperatorProfile]:
    """Made-up times by operator, before and after."""
    return (
        OperatorProfile((OperatorTime("MatMul", 5, 1.5), OperatorTime("Transpose", 10, 1.1)), 50, 2.9),
        OperatorProfile((OperatorTime("MatMul", 5, 1.4),), 60, 1.5),
    )
