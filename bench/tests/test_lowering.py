"""The benchmark of kernels: it checks networks, and times all variants."""

from __future__ import annotations

import json
from pathlib import Path

import onnx
import pytest

import models
from bench import lowering
from models.operators import operator
from xrlflow.tuning.session import tune

pytestmark = pytest.mark.measures


@pytest.mark.whole
def test_the_bench_checks_networks(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    branching = onnx.parser.parse_model(
        '<ir_version: 9, opset_import: ["": 20]> agraph (float[4,8] x, bool c) => (float[4,8] y)'
        " { y = If (c) <then_branch = g () => (float[4,8] a) { a = Relu(x) },"
        " else_branch = h () => (float[4,8] b) { b = Neg(x) }> }"
    )
    built = {"nasrnn": models.small("nasrnn"), "bert": branching}
    monkeypatch.setattr(models, "build", built.__getitem__)
    path = tmp_path / "networks.json"
    monkeypatch.setattr("sys.argv", ["lowering", "networks", "nasrnn", "bert", "--json", str(path)])
    lowering.main()
    good, bad = json.loads(path.read_text())
    assert (good["name"], good["said"]) == ("nasrnn", "verified")
    assert 0 <= good["ratio"] <= 1
    assert (bad["name"], bad["said"]) == (
        "bert",
        "TVM cannot lower If: use optimize --backend onnxruntime for this model",
    )
    assert "| bert |" in capsys.readouterr().out
    monkeypatch.setattr("sys.argv", ["lowering", "networks", "nobody"])
    with pytest.raises(SystemExit, match="nobody is none of"):
        lowering.main()
    monkeypatch.setattr("sys.argv", ["lowering", "networks", "nasrnn", "--tune", "5"])
    with pytest.raises(SystemExit):
        lowering.main()
    assert "networks are not tuned" in capsys.readouterr().err


@pytest.mark.whole
@pytest.mark.parametrize("table", ["models", "operators"])
def test_the_bench_times_all_variants(
    table: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    model = operator(
        "(float[16,32] x, float[32,48] w) => (float[16,48] y) { a = MatMul(x, w) b = Relu(a) y = Relu(b) }"
    )
    monkeypatch.setattr(lowering, "MODELS", {"tiny": lambda: model})
    monkeypatch.setattr(
        lowering, "OPERATORS", {"tiny": "(float[16,32] x) => (float[16,32] y) { y = Relu(x) }"}
    )
    monkeypatch.setattr(lowering, "operator", lambda text: model)
    monkeypatch.setattr(
        "xrlflow.tuning.models.tune", lambda *given, trials, **named: tune(*given, trials=3, **named)
    )
    path = tmp_path / "models.json"
    monkeypatch.setattr(
        "sys.argv",
        [
            "lowering",
            table,
            "tiny",
            "--tune",
            "60",
            "--methods",
            "random",
            "--seconds",
            "1",
            "--json",
            str(path),
        ],
    )
    lowering.main()
    (row,) = json.loads(path.read_text())
    variants = {"TVM", "random"} | ({"rewritten", "rewritten, random"} if table == "models" else set())
    assert {name for name, value in row.items() if name != "control" and isinstance(value, list)} == variants
    assert all(row[variant][0] > 0 for variant in variants)
    assert {row[f"{variant} measured"] for variant in variants if "random" in variant} == {3}
    header, _, line = capsys.readouterr().out.splitlines()
    assert header.count("|") == line.count("|")
