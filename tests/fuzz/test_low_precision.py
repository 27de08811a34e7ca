"""The generator of quantised and float16 models, and what counts as a fault of theirs."""

from __future__ import annotations

import onnx
import pytest

from tests.fuzz.low_precision import KINDS, OPSETS, examined, made

pytestmark = pytest.mark.corpus


@pytest.mark.parametrize("kind", KINDS)
def test_models_are_valid_and_depend_on_the_seed_alone(kind: str) -> None:
    for seed in range(6):
        model = made(kind, seed)
        onnx.checker.check_model(model, full_check=True)
        assert model == made(kind, seed)
        assert model.opset_import[0].version in OPSETS
    assert len({made(kind, seed).SerializeToString() for seed in range(6)}) == 6


def test_a_model_goes_through_optimize_without_a_fault() -> None:
    told = examined("qdq", 3)
    assert told["fault"] == ""
    assert "RemoveNoopReshape" in told["substitutions"]
