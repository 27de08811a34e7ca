"""The accuracy level of products with packed weights that the user asks for."""

from __future__ import annotations

import numpy as np
import onnx
import pytest

import xrlflow
from tests.rules.harness import model
from xrlflow.onnxio import load, to_proto
from xrlflow.pipeline.accuracy import at_level

pytestmark = pytest.mark.measures

K = 256


def chain(level: int | None = None, body: bool = False) -> onnx.ModelProto:
    """Two products, one behind the other; or one in the branch of an If."""
    attrs = f"K={K}, N={K}, bits=4, block_size=32" + ("" if level is None else f", accuracy_level={level}")
    product = f"com.microsoft.MatMulNBits<{attrs}>"
    rng = np.random.default_rng(0)
    weights = {
        name: array
        for i in "ab"
        for name, array in (
            (f"w{i}", rng.integers(0, 256, (K, K // 32, 16)).astype(np.uint8)),
            (f"s{i}", (rng.random((K, K // 32)) * 0.01).astype(np.float32)),
        )
    }
    if body:
        source = f"""agraph (float[4,{K}] x, bool c) => (float[4,{K}] y) {{
          y = If(c) <then_branch = t () => (float[4,{K}] p) {{ p = {product}(x, wa, sa) }},
                     else_branch = e () => (float[4,{K}] q) {{ q = {product}(x, wb, sb) }}> }}"""
    else:
        source = f"""agraph (float[4,{K}] x) => (float[4,{K}] y)
          {{ h = {product}(x, wa, sa) r = Relu(h) y = {product}(r, wb, sb) }}"""
    return model(source, **weights)


def levels(proto: onnx.ModelProto) -> set[int]:
    """The levels of all products, in bodies, too."""
    found, pending = set[int](), [proto.graph]
    while pending:
        for node in pending.pop().node:
            pending += [a.g for a in node.attribute if a.type == onnx.AttributeProto.GRAPH]
            if node.op_type == "MatMulNBits":
                found.add(next((a.i for a in node.attribute if a.name == "accuracy_level"), 0))
    return found


@pytest.mark.parametrize("body", [False, True])
@pytest.mark.parametrize("level", [1, 4])
def test_all_products_get_the_level(level: int, body: bool) -> None:
    imported = load(chain(body=body))
    changed = at_level(imported, level)
    assert levels(to_proto(changed, changed.graph)) == {level}
    assert levels(to_proto(imported, imported.graph)) == {0}


@pytest.mark.parametrize("body", [False, True])
def test_a_model_at_the_level_is_left_alone(body: bool) -> None:
    for stored, level in ((None, 0), (0, 0), (4, 4)):
        imported = load(chain(stored, body))
        assert at_level(imported, level) is imported


def test_the_result_has_the_level_and_the_report_its_error() -> None:
    result = xrlflow.optimize(
        chain(), int4_accuracy=4, backend="onnxruntime", search="greedy", time_limit=20, measure=False
    )
    assert not result.returned_original
    assert result.report.verified
    assert levels(result.model) == {4}
    (note,) = (n for n in result.report.notes if "accuracy level 4" in n)
    error = float(note.split("up to ")[1].split()[0])
    assert 1e-4 < error < 3e-2


def test_a_level_is_measured_without_another_change() -> None:
    """The graph at the level is the one that the search begins with: it is a proposal nevertheless."""
    result = xrlflow.optimize(
        chain(), int4_accuracy=4, backend="onnxruntime", search="greedy", time_limit=10, portable=True
    )
    assert [trial.against for trial in result.report.trials][:1] == ["the original"]


def test_by_default_the_level_stays() -> None:
    result = xrlflow.optimize(chain(4), backend="onnxruntime", search="greedy", time_limit=20, measure=False)
    assert levels(result.model) == {4}
    assert not any("accuracy level" in n for n in result.report.notes)


def test_a_level_without_an_effect_is_said() -> None:
    result = xrlflow.optimize(
        chain(4), int4_accuracy=4, backend="onnxruntime", search="greedy", time_limit=20, measure=False
    )
    assert any("no product of packed weights is at another level than 4" in n for n in result.report.notes)
    assert result.returned_original
