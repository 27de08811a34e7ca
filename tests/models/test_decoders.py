"""Decoders for prompts and single tokens: both phases of a merged one compute what the parts do."""

from __future__ import annotations

import numpy as np
import onnx
import onnxruntime as ort
import pytest

import models
from models.decoders import FLAG, decoder, merged
from tests.rules.harness import model

STEP = (
    "agraph (float[b,1] x, float[b,past] kept) => (float[b,1] y, float[b,total] present)"
    " <float[1] w = {2}> { y = Mul(x, w) present = Concat<axis = 1>(kept, y) }"
)
PROMPT = (
    "agraph (float[b,length] x, float[b] encoded) => (float[b,length] y, float[b,total] present, float[b] e)"
    " <float[1] scale = {2}> { y = Mul(x, scale) present = Neg(y) e = Neg(encoded) }"
)


def test_each_phase_is_the_part_that_the_flag_names() -> None:
    step, prompt = model(STEP), model(PROMPT)
    step.graph.input.append(onnx.helper.make_tensor_value_info("e_past", 1, ["b"]))
    both = merged(step, prompt, {"e": "e_past"})
    onnx.checker.check_model(both, full_check=True)
    assert [tensor.dims for tensor in both.graph.initializer] == [[1]]  # one weight, stored once
    session = ort.InferenceSession(both.SerializeToString())
    feeds = {
        "x": np.ones((2, 1), np.float32), "kept": np.zeros((2, 3), np.float32),
        "encoded": np.ones(2, np.float32), "e_past": np.full(2, 5, np.float32),
    }  # fmt: skip
    y, present, e = session.run(None, {**feeds, FLAG: np.array([True])})
    assert (y.tolist(), present.shape, e.tolist()) == ([[2], [2]], (2, 4), [5, 5])
    y, present, e = session.run(None, {**feeds, FLAG: np.array([False])})
    assert (present.tolist(), e.tolist()) == ([[-2], [-2]], [-1, -1])


def test_names_of_decoders() -> None:
    with pytest.raises(models.ZooError, match="there are: qwen3, whisper"):
        decoder("gpt5")
