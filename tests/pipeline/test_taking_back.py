"""A rule that makes a wrong graph is taken back, and what is left is tried again. In the end the original stays."""

from __future__ import annotations

import dataclasses
import time
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from typer.testing import CliRunner

import xrlflow
from tests.rules.harness import assert_equivalent, model, random_feeds
from xrlflow.api import VerificationFailed
from xrlflow.backends.onnxruntime import Deciding
from xrlflow.backends.results import RepeatedComparison, Verdict
from xrlflow.cli import app
from xrlflow.cost import Roofline
from xrlflow.options import Options
from xrlflow.pipeline import choose, confirm
from xrlflow.pipeline.prepare import cost_model, opened, start
from xrlflow.pipeline.verifier import Verifier
from xrlflow.rewrite import AnyRule, Captures, Op, Rule, Val, require
from xrlflow.search import Selection, TraceStep
from xrlflow.verify import Reference, Status, Verification

pytestmark = pytest.mark.measures


class DropNegations(Rule):
    """neg(neg(x)) -> x."""

    def source(self, op: Op, x: Any) -> Any:
        return op.Neg(op.Neg(x))

    def target(self, op: Op, x: Val) -> Any:
        return x


class ForgetTransposes(Rule):
    """transpose(x) -> x  for squares, which is wrong."""

    shapes = "x[a,a]"

    def source(self, op: Op, x: Any) -> Any:
        return op.Transpose(x, perm="p")

    def where(self, m: Captures) -> None:
        require(m.p in (None, (1, 0)), "it moves nothing")

    def target(self, op: Op, x: Val) -> Any:
        return x


class UseNoSuchOperator(Rule):
    """abs(sin(x)) -> nosuchoperator(x), which ONNX Runtime does not load."""

    def source(self, op: Op, x: Any) -> Any:
        return op.Abs(op.Sin(x))

    def target(self, op: Op, x: Val) -> Any:
        return op["com.microsoft::NoSuchOperator"](x, type=x.type)


class FillUp(Rule):
    """relu(x) -> relu of x with a row of zeros if it has none."""

    nonempty = True

    def source(self, op: Op, x: Any) -> Any:
        return op.Relu(x)

    def target(self, op: Op, x: Val) -> Any:
        rows = op.Shape(x, start=0, end=1)
        more = op.Sub(op.Max(rows, [1]), rows)
        return op.Pad(op.Elu(op.Clip(x, np.float32(0.0))), op.Concat([0, 0], more, [0], axis=0))


WRONG = (
    "agraph (float[8,8] x) => (float[8,8] first, float[8,8] second) "
    "{ a = Neg(x) b = Neg(a) first = Cos(b) t = Transpose<perm=[1,0]>(b) second = Tanh(t) }"
)
UNLOADABLE = "agraph (float[8,8] x) => (float[8,8] y) { a = Neg(x) b = Neg(a) s = Sin(b) y = Abs(s) }"
BODY = (
    "agraph (bool c, float[8,8] x) => (float[8,8] y) { n = Neg(x) m = Neg(n) "
    "y = If(c)<then_branch = g1 () => (float[8,8] o) { a = Transpose<perm=[1,0]>(m) o = Sigmoid(a) }, "
    "else_branch = g2 () => (float[8,8] p) { b = Neg(x) e = Neg(b) p = Abs(e) }> }"
)


@pytest.fixture(autouse=True)
def rules(monkeypatch: pytest.MonkeyPatch) -> None:
    planted: tuple[AnyRule, ...] = (DropNegations(), ForgetTransposes(), UseNoSuchOperator())
    monkeypatch.setattr("xrlflow.pipeline.library.LIBRARY", planted)


def optimize(proto: onnx.ModelProto, **options: Any) -> xrlflow.Result:
    given = {"search": "greedy", "cost": Roofline(), "measure": False, "threads": 1, "backend": "onnxruntime"}
    return xrlflow.optimize(proto, **{**given, **options})


def taken_back(result: xrlflow.Result) -> list[str]:
    return [
        note.partition(" was taken back: ")[0] for note in result.report.notes if " was taken back: " in note
    ]


@pytest.mark.parametrize("search", ["greedy", "taso"])
@pytest.mark.parametrize(("source", "wrong"), [(WRONG, ForgetTransposes), (UNLOADABLE, UseNoSuchOperator)])
def test_the_right_rule_stays(source: str, wrong: type[Rule], search: str) -> None:
    proto = model(source)
    result = optimize(proto, search=search)
    assert taken_back(result) == [wrong.__name__]
    assert [step.rule for step in result.trace] == ["DropNegations"]
    assert result.report.verified
    assert_equivalent(proto, result.model, random_feeds(proto))


def decide(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every result is measured to be faster, in no time."""

    def decided(before: str, after: str, feeds: Any, *, deciding: Deciding, **how: Any) -> RepeatedComparison:
        result = RepeatedComparison(None, None, None, None, 0.0, 1, Verdict.FASTER)
        return result if deciding.check() else dataclasses.replace(result, verdict=Verdict.NOT_FASTER)

    monkeypatch.setattr(confirm, "measure_in_fresh_processes", decided)


def test_the_right_rule_stays_where_models_are_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    decide(monkeypatch)
    monkeypatch.setattr(choose, "choose", lambda context, start, nodes, **how: Selection(nodes[0], ()))
    result = optimize(model(WRONG), measure=True, time_limit=20.0)
    assert taken_back(result) == ["ForgetTransposes"]
    assert [step.rule for step in result.trace] == ["DropNegations"]
    assert result.report.verified


@pytest.mark.parametrize("verify", [True, False])
def test_what_cannot_be_measured_is_taken_back(verify: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    decide(monkeypatch)
    result = optimize(model(UNLOADABLE), measure=True, verify=verify, time_limit=20.0)
    assert taken_back(result) == ["UseNoSuchOperator"]
    assert "UseNoSuchOperator" not in {step.rule for step in result.trace}
    assert not any("was dropped" in note for note in result.report.notes)


def test_what_was_made_before_the_search_is_taken_back() -> None:
    proto = model(BODY)
    result = optimize(proto)
    assert taken_back(result) == ["ForgetTransposes"]
    assert {step.rule for step in result.trace} == {"DropNegations"}
    assert len(result.trace) == 2, "one in the model and one in a body"
    feeds = random_feeds(proto)
    assert_equivalent(proto, result.model, *({**feeds, "c": np.array(c)} for c in (True, False)))


def test_what_canonicalises_is_taken_back(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ForgetTransposes, "canonicalises", True)
    result = optimize(model(WRONG))
    assert taken_back(result) == ["ForgetTransposes"]
    assert [step.rule for step in result.trace] == ["DropNegations"]


def test_the_original_is_written_if_nothing_else_is_left(tmp_path: Path) -> None:
    proto = model("agraph (float[8,8] x) => (float[8,8] y) { t = Transpose<perm=[1,0]>(x) y = Tanh(t) }")
    file, output = tmp_path / "m.onnx", tmp_path / "out.onnx"
    onnx.save(proto, file)
    ran = CliRunner().invoke(
        app, ["optimize", str(file), "-o", str(output), "--cost", "roofline", "--no-measure"]
    )
    assert ran.exit_code == 0, ran.output
    assert "ForgetTransposes was taken back" in " ".join(ran.output.split())
    assert output.read_bytes() == file.read_bytes()


def test_a_trace_that_is_wrong_is_an_error(tmp_path: Path) -> None:
    """It is what the user asked for."""
    trace, output = tmp_path / "trace.json", tmp_path / "out.onnx"
    file = tmp_path / "m.onnx"
    onnx.save(model(WRONG), file)
    optimize(onnx.load(file), verify=False).save_trace(trace)
    with pytest.raises(VerificationFailed, match=r"output 'second'.*caused it: ForgetTransposes"):
        optimize(onnx.load(file), replay=trace)
    ran = CliRunner().invoke(
        app, ["optimize", str(file), "-o", str(output), "--no-measure", "--replay", str(trace)]
    )
    assert ran.exit_code == 1
    assert "nothing was written" in ran.stderr
    assert not output.exists()


def test_a_failure_that_does_not_repeat_is_blamed_on_no_rule(monkeypatch: pytest.MonkeyPatch) -> None:
    real, calls = Reference.check, []

    def once_wrong(self: Reference, path: Any, **options: Any) -> Verification:
        calls.append(path)
        if len(calls) == 1:
            return Verification(Status.FAILED, failures=("output 'y': something",))
        return real(self, path, **options)

    monkeypatch.setattr(Reference, "check", once_wrong)
    result = optimize(model(UNLOADABLE), only=["DropNegations"])
    assert result.returned_original
    assert not taken_back(result)
    assert "'y': something (none: checked again" in result.report.reason


def test_without_time_to_find_the_rule_the_original_stays(monkeypatch: pytest.MonkeyPatch) -> None:
    real = Reference.check

    def slow(self: Reference, path: Any, **options: Any) -> Verification:
        outcome = real(self, path, **options)
        now = time.monotonic()
        monkeypatch.setattr("xrlflow.pipeline.verifier.time.monotonic", lambda: now + 1e6)
        return outcome

    monkeypatch.setattr(Reference, "check", slow)
    result = optimize(model(WRONG))
    assert result.returned_original
    assert "no time to find" in result.report.reason


def test_kernels_for_several_sizes_need_what_the_plain_file_needs(monkeypatch: pytest.MonkeyPatch) -> None:
    """A rule that needs sizes from 1 may differ at 0 whatever sizes there are kernels for."""
    monkeypatch.setattr("xrlflow.pipeline.library.LIBRARY", (FillUp(),))
    proto = model("agraph (float[n,4] x) => (float[n,4] y) { y = Relu(x) }")
    options = Options(search="greedy", cost="roofline", measure=False, threads=1)
    with opened(proto, options, None, time.monotonic()) as context:
        begin = start(context, cost_model(context, "roofline"))
        (match,) = begin.base.state.candidates
        steps = [TraceStep("FillUp", "", match.key, 0.0)]
        path = context.artifact(begin.base.state.apply(match).graph).file
        verifier = Verifier(context)
        plain = verifier.check(path, steps)
        both = verifier.check_kernels(path, steps, [{"x": (2, 4)}, {"x": (3, 4)}])
    for item in (plain, both):
        assert item.verified, item.message()
        assert any("FillUp needs sizes from 1" in note for note in item.notes)
