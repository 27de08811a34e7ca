"""What verification leaves out when its time is over, and what is drawn where runs take long.

No test waits: time is over at once, or after a number of questions for it.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path
from threading import Event
from typing import Any

import numpy as np
import onnxruntime as ort
import pytest

from tests.verify.models import model
from xrlflow.backends.onnxruntime import open_model, session
from xrlflow.backends.protocol import BackendError, OutOfTime
from xrlflow.common import deadline
from xrlflow.onnxio import load
from xrlflow.verify import InputsNeeded, Reference, Status, feeds_for_measurement
from xrlflow.verify.inputs import InputPlan
from xrlflow.verify.runner import opened

RELU = model("g (float[n, 4] x) => (float[n, 4] y) { y = Relu(x) }")
DOUBLED = model("g (float[n, 4] x) => (float[n, 4] y) { z = Relu(x) y = Add(z, z) }")


def past() -> float:
    return time.monotonic() - 1.0


@pytest.fixture
def over_after(monkeypatch: pytest.MonkeyPatch) -> Callable[[int], None]:
    """Let the time be over after so many questions, while there is no moment at which anything is ended."""

    def set_to(asked: int) -> None:
        def over() -> bool:
            nonlocal asked
            asked -= 1
            return asked < 0

        monkeypatch.setattr(deadline, "over", over)

    return set_to


def test_the_earlier_deadline_holds() -> None:
    assert not deadline.over()
    with deadline.within(past()):
        with deadline.within(time.monotonic() + 100.0):
            assert deadline.over()
            assert deadline.remaining() == 0.0
            with pytest.raises(deadline.DeadlineExceeded):
                deadline.check()
        assert deadline.over()
    assert not deadline.over()


def test_loading_and_runs_are_ended() -> None:
    proto = RELU.SerializeToString()
    with deadline.within(past()), pytest.raises(OutOfTime, match="loading"), opened(proto):
        raise AssertionError("it was loaded")
    feeds = {"x": np.ones((2, 4), np.float32)}
    with opened(proto) as runner, open_model(proto) as loaded:
        with deadline.within(past()):
            for run in (runner.run, loaded.run):
                with pytest.raises(OutOfTime, match="the time for a run was over"):
                    run(feeds)
        assert loaded.run(feeds)[0].shape == (2, 4)


def test_without_time_for_the_original_nothing_is_known() -> None:
    with deadline.within(past()):
        verification = Reference.of(RELU).check(RELU)
    assert verification.status is Status.NOT_COMPARABLE
    assert verification.reason == "there was no time to run the original"


def test_without_time_for_the_new_model_it_is_not_verified() -> None:
    reference = Reference.of(RELU)
    with deadline.within(past()):
        verification = reference.check(RELU)
    assert (verification.status, verification.reason) == (
        Status.NOT_COMPARABLE,
        "there was no time to run the new model",
    )


def test_one_case_is_compared_and_the_others_are_named(over_after: Callable[[int], None]) -> None:
    reference = Reference.of(RELU)
    assert len(reference.cases) > 3
    over_after(0)
    verification = reference.check(RELU)
    assert verification.verified
    assert verification.cases < len(reference.cases)
    assert len(verification.bindings) < len(reference.bindings) + len(reference.empty)
    assert "there was no time" in verification.left_out[-1]


def test_the_original_runs_on_fewer_cases(over_after: Callable[[int], None]) -> None:
    usual = Reference.of(RELU)
    over_after(0)
    reference = Reference.of(RELU)
    assert 0 < len(reference.cases) < len(usual.cases)
    assert "other sizes (there was no time)" in reference.left_out
    assert "not compared with a dimension of 0: there was no time" in reference.notes
    assert "there was no time for the float64 evaluation" in reference.notes
    assert not reference.empty


def test_a_difference_without_time_to_look_at_it_again_is_no_verdict(
    over_after: Callable[[int], None],
) -> None:
    reference = Reference.of(RELU)
    assert reference.check(DOUBLED).status is Status.FAILED
    over_after(0)
    verification = reference.check(DOUBLED)
    assert verification.status is Status.NOT_COMPARABLE
    assert verification.reason.startswith("there was no time to decide whether this is rounding")


# --- inputs for measurements ---


def test_smaller_sizes_are_tried_where_a_run_takes_long() -> None:
    tried: list[int] = []

    def run(feeds: Any) -> None:
        tried.append(feeds["x"].shape[1])
        if tried[-1] > 10:
            raise OutOfTime("it takes long")

    proto = load(model("g (float[batch, s] x) => (float[batch, s] y) { y = Relu(x) }"))
    assert feeds_for_measurement(proto, run=run)["x"].shape == (1, 4)
    assert tried == [64, 16, 4]
    mine = load(model("g (float[batch, s] x) => (float[batch, s] y) { y = Relu(x) }"), shapes={"x": (1, 64)})
    tried.clear()
    with pytest.raises(OutOfTime, match="it takes long"):
        feeds_for_measurement(mine, run=run)
    assert set(tried) == {64}


def test_no_inputs_are_drawn_when_the_time_is_over() -> None:
    with deadline.within(past()), pytest.raises(OutOfTime, match="no inputs were found"):
        feeds_for_measurement(load(RELU), run=lambda feeds: True)

    def fail(feeds: Any) -> None:
        raise BackendError("it never runs")

    with pytest.raises(InputsNeeded):
        feeds_for_measurement(load(RELU), run=fail)


def test_a_speed_is_one_at_first() -> None:
    """A small one makes everything that follows many times larger."""
    proto = model(
        "g (float[s] x, float[1] speed) => (float[] y) { d = Div(x, speed) r = Round(d) c = Cast<to=7>(r)"
        " n = ReduceMax(c) z = Reshape(n, k) y = ConstantOfShape(z) }",
        k=np.int64([1]),
    )
    plan = InputPlan.of(load(proto))
    assert plan.demands["speed"].divides
    first, *others = (plan.case(plan.dimensions.default({}), 0, i).feeds["speed"].item() for i in range(4))
    assert first == 1.0
    assert set(others) != {1.0}


@pytest.mark.parametrize(("rows", "greatest"), [(2, 1), (3, 1), (9, 8)])
def test_a_mask_is_of_zeros_and_ones_first_of_all(rows: int, greatest: int) -> None:
    """One of which 2 has a meaning, too; but where the name says "mask" of positions, they are drawn as such."""
    proto = model(
        "g (int64[1, 40] attention_mask) => (float[] y) { y = Gather(table, attention_mask) }",
        table=np.zeros((rows, 2), np.float32),
    )
    plan = InputPlan.of(load(proto))
    drawn = [plan.case({}, 0, sample).feeds["attention_mask"] for sample in range(3)]
    assert max(int(d.max()) for d in drawn) == greatest


def test_a_mask_that_is_an_index_is_drawn_within_its_table() -> None:
    """Two masks are added, and the model fails where both are 1: the last attempt has the least values."""
    proto = model(
        "g (int64[1, 8] attention_mask, int64[1, 8] global_mask) => (float[] y) {"
        " i = Add(attention_mask, global_mask) y = Gather(table, i) }",
        table=np.zeros((2, 2), np.float32),
    )
    imported = load(proto)
    with open_model(proto.SerializeToString()) as loaded:
        result = feeds_for_measurement(imported, run=loaded.run)
    assert not result["attention_mask"].any()


def test_a_run_apart_has_the_time_that_is_left(tmp_path: Path) -> None:
    from xrlflow.verify.isolated import run_isolated

    with deadline.within(past()), pytest.raises(OutOfTime):
        run_isolated(RELU, {"x": np.ones((2, 4), np.float32)})


def test_a_load_that_does_not_end_is_left_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """ONNX Runtime looks whether it is to end between two passes of its optimiser, and one of them may take long."""
    going_on = Event()
    true = ort.InferenceSession

    def slow(*given: Any, **named: Any) -> Any:
        going_on.wait(60.0)
        return true(*given, **named)

    monkeypatch.setattr(ort, "InferenceSession", slow)
    monkeypatch.setattr(session, "_GRACE", 0.0)
    monkeypatch.setattr(deadline, "remaining", lambda: 0.0)
    with deadline.within(time.monotonic() + 1000.0), pytest.raises(OutOfTime, match="loading"):
        open_model(RELU.SerializeToString())
    (thread,) = session._abandoned
    going_on.set()
    thread.join()


def test_sizes_are_as_large_as_can_be_compared_in_the_time() -> None:
    """A size that takes a second to run takes many to compare: then nothing is left for a dimension of 0."""
    proto = model(
        "g (float[s, n, 16] x) => (float[s, 1, n, 32] y) { y = LSTM<hidden_size=32>(x, w, r) }",
        w=np.zeros((1, 128, 16), np.float32), r=np.zeros((1, 128, 32), np.float32),
    )  # fmt: skip
    with deadline.within(time.monotonic() + 10.0):
        reference = Reference.of(proto, further=[1024])
    assert all(b["s"] * b["n"] < 1 << 20 for b in reference.bindings)
    assert any("s=1025, n=1025" in text and "more than is left" in text for text in reference.left_out)


def test_an_original_that_had_no_time_is_not_said_to_fail() -> None:
    reference = Reference.of(RELU)
    with deadline.within(past()):
        (note,) = reference.reruns.unoptimised(reference.cases)
    assert note == "there was no time to run the original without ONNX Runtime's optimisations"


def test_what_cannot_be_loaded_says_why_with_a_deadline_too() -> None:
    with deadline.within(time.monotonic() + 100.0), pytest.raises(BackendError, match="cannot load"):
        open_model(b"no model")
