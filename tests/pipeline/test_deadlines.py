"""What an optimisation does where the time for a phase is over. No test waits: the time is over at once."""

from __future__ import annotations

import math
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NoReturn

import numpy as np
import onnx
import pytest

import xrlflow
from tests.rules.harness import model
from xrlflow.backends import BackendError
from xrlflow.backends.protocol import OutOfTime
from xrlflow.cost import Roofline
from xrlflow.onnxio import load
from xrlflow.options import Options
from xrlflow.pipeline import compiled, kernels, prepare, roundtrip, verifier
from xrlflow.pipeline.library import library_for
from xrlflow.search import Budget, simplify

MLP = model(
    "g (float[8,32] x) => (float[8,32] y) { a = MatMul(x, w) b = Identity(a) c = Relu(b) y = Add(c, c) }",
    w=np.eye(32, dtype=np.float32),
)
PLAIN = {"search": "greedy", "cost": "roofline"}


def past(*_: object) -> float:
    return time.monotonic() - 1.0


def slowly(*_: object, **__: object) -> NoReturn:
    raise OutOfTime("the time was over")


def test_without_time_for_inputs_nothing_is_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(prepare, "feeds_for_measurement", slowly)
    result = xrlflow.optimize(MLP, **PLAIN)
    message = "nothing is measured: the time was over (--time-limit, --inputs, --shape)"
    assert message in result.report.notes
    assert result.report.substitutions
    assert result.report.verified
    assert result.speedup is None
    assert result.hybrid is None  # kernels are kept by measurements only


def test_without_time_for_the_users_inputs_nothing_is_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(prepare.OrtModel, "run", slowly)
    result = xrlflow.optimize(MLP, inputs={"x": np.ones((8, 32), np.float32)}, verify=False, **PLAIN)
    assert "nothing is measured: the time was over (--time-limit, --inputs, --shape)" in result.report.notes


def test_measured_costs_cannot_do_without_inputs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(prepare, "feeds_for_measurement", slowly)
    with pytest.raises(BackendError, match="the time was over"):
        xrlflow.optimize(MLP, search="greedy", cost="measured")


def test_what_there_is_no_time_to_verify_is_not_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(verifier.Verifier, "_until", past)
    result = xrlflow.optimize(MLP, measure=False, **PLAIN)
    assert result.returned_original
    assert result.report.reason == "the result cannot be verified: there was no time to run the original"
    result.save(tmp_path / "same.onnx")
    assert onnx.load(tmp_path / "same.onnx") == MLP


def test_what_was_tuned_is_verified_after_the_time_for_tuning() -> None:
    class Clock:
        budget = Budget(0.0, 0.0)

    context: Any = SimpleNamespace(clock=Clock())
    assert verifier.Verifier(context)._until() < time.monotonic() + 100.0
    assert verifier.Verifier(context, limited=False)._until() == math.inf


def test_without_time_for_the_round_trip_the_search_begins(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(roundtrip, "_outputs", slowly)
    result = xrlflow.optimize(MLP, measure=False, **PLAIN)
    assert any(note.startswith("there was no time to try whether") for note in result.report.notes)
    assert result.report.substitutions
    assert result.report.verified


def test_without_time_to_match_the_search_has_less(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(prepare, "_LOOKING", -100.0)
    result = xrlflow.optimize(MLP, measure=False, **PLAIN)
    assert "not all substitutions were looked for: there was no time (--time-limit)" in result.report.notes
    assert not result.report.substitutions


def test_simplifying_ends() -> None:
    proto = model(
        "g (float[n,4] x) => (int64[1] y) { s = Shape(x) y = Slice(s, one, two) }",
        one=np.int64([1]), two=np.int64([2]),
    )  # fmt: skip
    imported = load(proto)
    library = library_for(Options())
    _, steps = simplify(imported.graph, library, lambda _: 0.0)
    assert steps
    assert simplify(imported.graph, library, lambda _: 0.0, until=0.0) == (imported.graph, None)


def test_kernels_that_take_too_long_to_compile_are_left(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kernels._Trials, "_compile_until", past)
    message = "no generated kernels: there was no time to compile them (--time-limit); "
    message += "with them a model is 1.26 times as fast on average"
    with prepare.opened(MLP, Options(), None, time.monotonic()) as context, kernels._lowering(context) as how:
        node = prepare.start(context, Roofline()).base
        candidates = kernels._Candidates([node, node], node.state.graph)
        assert kernels._Trials(context, asked=False).best(how, None, candidates) is None
        assert context.notes == [message]
    with pytest.raises(BackendError, match="there was no time to compile them"):
        xrlflow.optimize(MLP, backend="hybrid", measure=False, **PLAIN)


def test_a_compiled_model_that_takes_too_long_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(compiled.Child, "call", slowly)
    with pytest.raises(
        BackendError, match="60 s were over before TVM had compiled the model: give --time-limit more"
    ):
        xrlflow.optimize(MLP, backend="tvm", measure=False, **PLAIN)
