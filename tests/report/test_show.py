"""What commands print: names that can be copied, and nothing that was not found out."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from xrlflow.report import show
from xrlflow.verify import Status, Verification

LONG = "FuseTransposeIntoRightOfMatMulOfANameThatIsLong"


def test_names_are_not_cut_off(capsys: pytest.CaptureFixture[str]) -> None:
    """They are what --exclude and a path take."""
    refused = {"a dimension is not a known number, and other words that make a long line": 3}
    show.rules([{"name": LONG, "matched": 1, "admitted": 1, "refused": refused, "ms": 1.0}])
    assert LONG in capsys.readouterr().out


def test_models_that_came_back_unchanged_have_their_reason(capsys: pytest.CaptureFixture[str]) -> None:
    kept = {
        "latency_before_ms": None, "latency_after_ms": None, "nodes_before": 3, "nodes_after": 3,
        "returned_original": True, "reason": "no cheaper graph was found", "verified": None,
    }  # fmt: skip
    row = {"name": "a.onnx", "report": kept, "earlier": False, "seconds": 1.0, "error": None, "notes": []}
    counts = {"mean_speedup": None, "done": 1, "models": 1, "earlier": 0, "failed": 0, "seconds": 1.0}
    show.batch({"rows": [row], **counts}, "report.html")  # type: ignore[arg-type]
    assert "a.onnx: the original, unchanged (no cheaper graph was found)" in capsys.readouterr().out


def test_without_a_comparison_there_is_no_table(capsys: pytest.CaptureFixture[str]) -> None:
    show.verification(Verification(Status.FAILED, failures=("input 'x' is missing",)))
    assert capsys.readouterr().out == "the models differ: input 'x' is missing\n"


def test_an_unproven_rule_is_said_to_be_so_without_markup(capsys: pytest.CaptureFixture[str]) -> None:
    show.proven(SimpleNamespace(proven=False, name="A", unexplained=()), 1, 2)  # type: ignore[arg-type]
    assert capsys.readouterr().out == "   1/2 A: NOT PROVEN\n"
