"""A result is measured with few elements and with many, and not kept if it is slower with one of these sizes."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from typer.testing import CliRunner

import xrlflow
from tests.rules.harness import model
from xrlflow import api
from xrlflow.backends.protocol import BackendError, OutOfTime
from xrlflow.backends.results import RepeatedComparison, SpeedUp, Verdict
from xrlflow.cli import app
from xrlflow.cost import OverSizes, Roofline
from xrlflow.onnxio import load
from xrlflow.pipeline import confirm, prepare, sizes

FASTER = SpeedUp(1.5, 1.4, 1.6)
SLOWER = SpeedUp(0.8, 0.7, 0.9)
UNDECIDED = SpeedUp(0.98, 0.9, 1.05)


def network(rows: str = "length") -> onnx.ModelProto:
    return model(
        f"agraph (float[{rows},256] x) => (float[{rows},256] y) {{ a = Neg(x) b = Neg(a) y = Relu(b) }}"
    )


@pytest.fixture(autouse=True)
def _faster(monkeypatch: pytest.MonkeyPatch) -> None:
    """The last comparison decides, whatever is measured, that a verified result is faster."""

    def compared(*_: Any, deciding: Any, threads: int, **__: Any) -> RepeatedComparison:
        assert deciding.check() in (True, False)
        return RepeatedComparison(
            speedup=FASTER, control=None, before=None, after=None, seconds=1.0, threads=threads,
            verdict=Verdict.FASTER, decided=FASTER, processes=8, pairs=40, disturbed=False,
            fresh_processes=True, ratios=(), controls=(),
        )  # fmt: skip

    monkeypatch.setattr(confirm, "measure_in_fresh_processes", compared)


def optimized(monkeypatch: pytest.MonkeyPatch, found: list[SpeedUp], **options: Any) -> tuple[Any, list[int]]:
    """The report, and how many rows were measured. `found`: what is measured, one after the other."""
    rows: list[int] = []

    def speedup(context: Any, before: Any, after: Any, feeds: Any) -> SpeedUp:
        rows.append(len(feeds["x"]))
        return found[len(rows) - 1]

    monkeypatch.setattr(sizes, "_speedup", speedup)
    result = xrlflow.optimize(
        options.pop("source", network()),
        search="greedy", cost="roofline", backend="onnxruntime", threads=1, time_limit=60.0, **options,
    )  # fmt: skip
    return result.report, rows


def test_each_size_is_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    report, (few, many) = optimized(monkeypatch, [FASTER, UNDECIDED])
    assert not report.returned_original
    assert many == 32 * few
    assert report.at_sizes == {f"length={few}": FASTER, f"length={many}": UNDECIDED}
    assert [each["speedup"] for each in report.to_json()["at_sizes"]] == [1.5, 0.98]


def test_what_is_slower_in_both_orders_is_not_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    report, rows = optimized(monkeypatch, [FASTER, SLOWER, FASTER])
    assert report.returned_original
    assert report.reason.startswith(f"slower with length={rows[1]}: 0.800x")
    assert rows[1] == rows[2]
    assert not report.at_sizes


def test_an_order_decides_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    report, _ = optimized(monkeypatch, [SLOWER, UNDECIDED, FASTER])
    assert not report.returned_original


def test_too_few_measurements_in_the_other_order_clear_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    report, _ = optimized(monkeypatch, [SLOWER, SpeedUp(1.0, 0.0, float("inf"))])
    assert report.reason.startswith("slower with length=")


@pytest.mark.parametrize(
    ("error", "kept"), [(BackendError("no such kernel"), False), (OutOfTime("it was ended"), True)]
)
def test_a_result_that_fails_where_the_original_runs(
    monkeypatch: pytest.MonkeyPatch, error: BackendError, kept: bool
) -> None:
    def speedup(*_: Any) -> SpeedUp:
        raise error

    monkeypatch.setattr(sizes, "_speedup", speedup)
    report = xrlflow.optimize(
        network(), search="greedy", cost="roofline", backend="onnxruntime", threads=1
    ).report
    assert report.returned_original != kept
    assert kept or report.reason.startswith("it fails with length=8: no such kernel")
    assert sum("not measured with length=" in note for note in report.notes) == 2 * kept


def test_sizes_with_long_runs_are_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sizes, "_seconds", lambda _, feeds: len(feeds["x"]) / 100)
    report, rows = optimized(monkeypatch, [FASTER])
    assert rows == [8]
    assert "not measured with length=256: a run takes 2.6 s" in report.notes


@pytest.mark.parametrize(
    "options",
    [
        {"source": network("64")},
        {"shapes": {"x": (64, 256)}},
        {"shapes": {"x": (64, 256)}, "fix_shapes": True},
        {"inputs": {"x": np.ones((64, 256), np.float32)}},
    ],
    ids=["a number", "stated", "fixed", "the user's inputs"],
)
def test_sizes_that_the_user_states_are_the_only_ones(
    monkeypatch: pytest.MonkeyPatch, options: dict[str, Any]
) -> None:
    report, rows = optimized(monkeypatch, [], **options)
    assert (report.returned_original, rows) == (False, [])


def test_the_ends_of_a_range_are_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    report, rows = optimized(monkeypatch, [FASTER, UNDECIDED], shapes={"x": ((16, 400), 256)})
    assert rows == [16, 400]
    assert report.at_sizes == {"length=16": FASTER, "length=400": UNDECIDED}


def test_a_result_that_is_slower_at_an_end_is_not_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    report, _ = optimized(monkeypatch, [FASTER, SLOWER, FASTER], shapes={"x": ((16, 400), 256)})
    assert report.reason.startswith("slower with length=400: 0.800x")


def test_the_sizes_of_a_range_are_verified() -> None:
    shapes = {"x": ((16, 400), 256)}
    verification = api.verify_files(network(), network(), shapes=shapes)
    assert [dict(sizes)["length"] for sizes in verification.bindings][:3] == [80, 16, 400]


def test_costs_count_each_size_alike() -> None:
    imported = load(
        model("agraph (float[n,64] x) => (float[n,64] y) { a = Softmax(x) b = Neg(a) y = Add(a, b) }"),
        shapes={"x": ((4, 4096), 64)},
    )
    few, usual, many = (Roofline(bindings={"n": n}) for n in (4, 128, 4096))
    cost = OverSizes([usual, few, many], imported.graph)
    assert cost.cost(imported.graph) == pytest.approx(usual.cost(imported.graph))
    for node, seconds in cost.breakdown(imported.graph).items():
        parts = [
            each.breakdown(imported.graph)[node] / each.cost(imported.graph) for each in (few, usual, many)
        ]
        assert seconds == pytest.approx(usual.cost(imported.graph) * sum(parts) / 3)
        assert max(parts) > min(parts)


def test_the_search_costs_the_ends_of_a_range(monkeypatch: pytest.MonkeyPatch) -> None:
    priced: list[list[int]] = []

    class Spy(OverSizes):
        def __init__(self, models: Any, original: Any) -> None:
            priced.append([each.bindings["length"] for each in models])
            super().__init__(models, original)

    monkeypatch.setattr(prepare, "OverSizes", Spy)
    optimized(monkeypatch, [FASTER, FASTER], shapes={"x": ((16, 400), 256)})
    assert priced == [[80, 16, 400]]


def test_bench_measures_the_ends_of_a_range() -> None:
    measured = api.bench(network(), shapes={"x": ((16, 400), 256)}, time_limit=1.0, threads=1)
    assert measured["shapes"] == {"x": [80, 256]}
    assert list(measured["at_sizes"]) == ["length=16", "length=400"]
    assert measured["at_sizes"]["length=400"]["latency_ms"] > 0


@pytest.mark.parametrize(
    ("shapes", "options", "message"),
    [
        ({"x": ((16, 8), 256)}, {}, "16..8 is no range"),
        ({"x": ((16, 32), (1, 99))}, {}, "dimension 1 of input 'x' is 256 in the model, the shape 16..32,1..99"),
        ({"x": ((0, 32), 256)}, {}, "must hold positive numbers only"),
        ({"x": ((16, 32), 256)}, {"fix_shapes": True}, "has no meaning with fix_shapes: give numbers"),
        ({"x": ((16, 32, 64), 256)}, {}, "give the whole numbers of each input"),
    ],
)  # fmt: skip
def test_ranges_that_mean_nothing(shapes: Any, options: dict[str, Any], message: str) -> None:
    with pytest.raises((xrlflow.OptionError, xrlflow.ModelError), match=message.replace("(", r"\(")):
        xrlflow.optimize(network(), shapes=shapes, **options)


def test_two_ranges_of_one_dimension_contradict_each_other() -> None:
    both = model("agraph (float[n,2] x, float[n,2] z) => (float[n,2] y) { y = Add(x, z) }")
    with pytest.raises(xrlflow.ModelError, match=r"'n' would be 1\.\.4 and 1\.\.8 \(input 'z'\)"):
        load(both, shapes={"x": ((1, 4), 2), "z": ((1, 8), 2)})


def test_a_range_on_the_command_line(tmp_path: Path) -> None:
    onnx.save(network(), tmp_path / "m.onnx")
    arguments = ["bench", str(tmp_path / "m.onnx"), "--time-limit", "1", "--threads", "1", "--json"]
    found = CliRunner().invoke(app, [*arguments, "--shape", "x=16..400,256"])
    assert list(json.loads(found.stdout)["at_sizes"]) == ["length=16", "length=400"]


@pytest.mark.parametrize("shape", ["x=16..,256", "x=..16,256", "x=1...4,256", "x=-1..4,256", "x=a..b,256"])
def test_texts_that_are_no_range(shape: str, tmp_path: Path) -> None:
    onnx.save(network(), tmp_path / "m.onnx")
    found = CliRunner().invoke(app, ["bench", str(tmp_path / "m.onnx"), "--shape", shape])
    assert found.exit_code == 2
    assert "or with a range as NAME=1,16..512" in " ".join(found.stderr.split())
