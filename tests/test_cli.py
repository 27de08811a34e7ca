"""The command line: results, JSON, and errors of the user's making."""

from __future__ import annotations

import dataclasses
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from typer.testing import CliRunner

from tests.rules.harness import model
from xrlflow.cli import app
from xrlflow.report import show

RNG = np.random.default_rng(0)
FAST = ["--cost", "roofline", "--time-limit", "60"]
KEYS = {
    "model", "nodes_before", "nodes_after", "substitutions", "search", "cost_model", "cost_before", "cost_after",
    "latency_before_ms", "latency_after_ms", "speedup", "speedup_low", "speedup_high", "verified", "max_error",
    "seconds", "returned_original",
}  # fmt: skip


def invoke(*arguments: object) -> Any:
    return CliRunner().invoke(app, [str(a) for a in arguments])


def clumsy() -> onnx.ModelProto:
    """A model with operators to spare."""
    return model(
        "agraph (float[N,8] x) => (float[N,8] y) {"
        " a = Transpose<perm=[1,0]>(x)\n b = Transpose<perm=[1,0]>(a)\n c = MatMul(b, w)\n"
        " d = Identity(c)\n y = Relu(d) }",
        w=RNG.standard_normal((8, 8)).astype(np.float32),
    )


@pytest.fixture
def path(tmp_path: Path) -> Path:
    file = tmp_path / "clumsy.onnx"
    onnx.save(clumsy(), file)
    return file


def test_optimize_writes_a_smaller_model(path: Path, tmp_path: Path) -> None:
    output, trace = tmp_path / "fast.onnx", tmp_path / "trace.json"
    result = invoke("optimize", path, "-o", output, *FAST, "--no-measure", "--json", "--trace", trace)
    assert result.exit_code == 0, result.output
    report = json.loads(result.stdout)
    assert report.keys() >= KEYS
    assert report["verified"] is True
    assert report["nodes_before"] == 5
    assert report["nodes_after"] == 2
    assert report["returned_original"] is False
    assert report["latency_before_ms"] is None
    proto = onnx.load(output)
    onnx.checker.check_model(proto, full_check=True)
    assert sorted(n.op_type for n in proto.graph.node) == ["MatMul", "Relu"]
    again = tmp_path / "again.onnx"
    replayed = invoke("optimize", path, "-o", again, *FAST, "--no-measure", "--json", "--replay", trace)
    assert json.loads(replayed.stdout)["substitutions"] == report["substitutions"]
    assert again.read_bytes() == output.read_bytes()
    assert sorted(p.name for p in tmp_path.iterdir()) == [
        "again.onnx",
        "clumsy.onnx",
        "fast.onnx",
        "trace.json",
    ]


@pytest.mark.usefixtures("brief_comparisons")
def test_optimize_measures(path: Path, tmp_path: Path) -> None:
    output = tmp_path / "fast.onnx"
    result = invoke("optimize", path, "-o", output, *FAST, "--threads", 1, "--json", "--shape", "x=64,8")
    assert result.exit_code == 0, result.output
    report = json.loads(result.stdout)
    # A report of a speed-up comes with its latencies; the original is returned byte for byte.
    if report["returned_original"]:
        assert output.read_bytes() == path.read_bytes()
        assert report["speedup"] is None
    else:
        # What decided is above 1; the figure was measured afterwards, and is what it is.
        assert 1 < report["decided_low"] <= report["decided"] <= report["decided_high"]
        if report["speedup"] is not None:
            assert report["speedup_low"] <= report["speedup"] <= report["speedup_high"]
        assert report["latency_after_ms"] > 0
    spent = sum(report["phases"].values())
    assert report["phases"].keys() >= {"import", "inputs", "search", "select"}
    assert 0 < spent <= report["seconds"] + 0.01


def test_table_for_people(path: Path, tmp_path: Path) -> None:
    result = invoke("optimize", path, "-o", tmp_path / "fast.onnx", *FAST, "--no-measure")
    assert result.exit_code == 0
    for word in ("CancelTransposes", "Transpose", "modelled cost", "not a latency", "equal"):
        assert word in result.stdout


def test_nothing_to_do_returns_the_original_bytes(tmp_path: Path) -> None:
    file, output = tmp_path / "relu.onnx", tmp_path / "fast.onnx"
    onnx.save(model("agraph (float[4] x) => (float[4] y) { y = Relu(x) }"), file)
    result = invoke("optimize", file, "-o", output, *FAST, "--json")
    report = json.loads(result.stdout)
    assert report["returned_original"] is True
    assert output.read_bytes() == file.read_bytes()


def test_random_is_a_function_of_the_seed(path: Path, tmp_path: Path) -> None:
    def run(seed: int) -> bytes:
        output = tmp_path / "out.onnx"
        arguments = ["--search", "random", "--budget", 1, "--seed", seed, "--no-measure", *FAST]
        assert invoke("optimize", path, "-o", output, *arguments).exit_code == 0
        return output.read_bytes()

    assert run(3) == run(3)
    assert len({run(s) for s in range(6)}) > 1


def test_compare(path: Path) -> None:
    result = invoke(
        "compare", path, "--searches", "greedy,taso", "--no-measure", "--cost", "roofline", "--json"
    )
    assert result.exit_code == 0, result.output
    assert [r["search"] for r in json.loads(result.stdout)] == ["greedy", "taso"]


def test_rules(path: Path) -> None:
    listed = json.loads(invoke("rules", "--json").stdout)
    assert all(r.keys() >= {"name", "family", "equation", "backend", "proof"} for r in listed)
    assert all(r["equation"] and r["proof"] in ("field", "numeric") for r in listed)
    stats = json.loads(invoke("rules", "--stats", path, "--json").stdout)
    assert next(r for r in stats if r["name"] == "CancelTransposes")["admitted"] == 1
    assert "CancelTransposes" in invoke("rules").stdout
    assert "CancelTransposes" in invoke("rules", "--stats", path).stdout


def test_verify(path: Path, tmp_path: Path) -> None:
    good, bad = tmp_path / "good.onnx", tmp_path / "bad.onnx"
    assert invoke("optimize", path, "-o", good, *FAST, "--no-measure").exit_code == 0
    assert invoke("verify", path, good).exit_code == 0
    proto = onnx.load(path)
    proto.graph.node[-1].op_type = "Abs"
    onnx.save(proto, bad)
    result = invoke("verify", path, bad, "--json")
    assert result.exit_code == 1
    assert json.loads(result.stdout)["verified"] is False


def test_bench(path: Path) -> None:
    result = invoke("bench", path, "--time-limit", 1, "--threads", 1, "--json")
    assert result.exit_code == 0, result.output
    outcome = json.loads(result.stdout)
    assert outcome["latency_ms"] > 0
    assert all(shape for shape in outcome["shapes"].values())


def test_bench_says_which_model_is_how_many_times_as_fast(capsys: pytest.CaptureFixture[str]) -> None:
    measured = {
        "model": "fast.onnx", "latency_ms": 1.0, "against": "slow.onnx", "speedup": 2.0, "speedup_low": 1.9,
        "speedup_high": 2.1, "disturbed": True, "shapes": {"x": [1, 3]},
    }  # fmt: skip
    show.bench(measured)
    *_, shapes, disturbed, output = capsys.readouterr().out.splitlines()
    assert shapes == "measured with x 1x3"
    assert disturbed == "note: other programs used the processor while it was measured"
    assert output == "speed-up of fast.onnx over slow.onnx: 2.000x [1.900, 2.100]"


# --- what users get wrong ---


def refused(result: Any, *words: str) -> None:
    """Exit code 2, one line that says what is wrong, no traceback."""
    assert result.exit_code == 2, (result.exit_code, result.output)
    assert result.exception is None or isinstance(result.exception, SystemExit)
    lines = [line for line in result.stderr.splitlines() if line.strip()]
    assert len(lines) == 1, result.stderr
    assert lines[0].startswith("xrlflow: error: ")
    for word in words:
        assert word in lines[0]


@pytest.mark.parametrize(
    ("name", "content", "words"),
    [
        ("missing.onnx", None, ("missing.onnx", "no such file")),
        ("empty.onnx", b"", ("empty.onnx", "empty")),
        ("text.onnx", b"this is not a model, but a letter\n" * 20, ("text.onnx", "not an ONNX model")),
        ("image.onnx", b"\x89PNG\r\n\x1a\n" + bytes(range(256)), ("image.onnx", "not an ONNX model")),
    ],
)
def test_bad_files(tmp_path: Path, name: str, content: bytes | None, words: tuple[str, ...]) -> None:
    file, output = tmp_path / name, tmp_path / "out.onnx"
    if content is not None:
        file.write_bytes(content)
    refused(invoke("optimize", file, "-o", output, *FAST), *words)
    assert not output.exists()
    assert len(list(tmp_path.iterdir())) == (content is not None)


@pytest.mark.parametrize("part", [0.3, 0.6, 0.9])
def test_truncated(path: Path, tmp_path: Path, part: float) -> None:
    data = path.read_bytes()
    path.write_bytes(data[: int(part * len(data))])
    refused(invoke("optimize", path, "-o", tmp_path / "out.onnx", *FAST), "clumsy.onnx")
    assert [p.name for p in tmp_path.iterdir()] == ["clumsy.onnx"]


def external(tmp_path: Path, location: str) -> Path:
    proto = clumsy()
    proto.graph.initializer[0].CopyFrom(
        onnx.numpy_helper.from_array(RNG.standard_normal((8, 8)).astype(np.float32), "w")
    )
    onnx.external_data_helper.set_external_data(proto.graph.initializer[0], location)
    proto.graph.initializer[0].ClearField("raw_data")
    proto.graph.initializer[0].data_location = onnx.TensorProto.EXTERNAL
    file = tmp_path / "external.onnx"
    file.write_bytes(proto.SerializeToString())
    return file


def test_external_data_missing(tmp_path: Path) -> None:
    refused(invoke("optimize", external(tmp_path, "gone.bin"), "-o", tmp_path / "o.onnx", *FAST), "gone.bin")


def test_external_data_outside_the_folder(tmp_path: Path) -> None:
    inner = tmp_path / "inner"
    inner.mkdir()
    (tmp_path / "secret.bin").write_bytes(bytes(256))
    refused(
        invoke("optimize", external(inner, "../secret.bin"), "-o", tmp_path / "o.onnx", *FAST),
        "secret.bin",
        "outside",
    )


def test_opset_from_the_future(path: Path, tmp_path: Path) -> None:
    proto = onnx.load(path)
    proto.opset_import[0].version = 99
    onnx.save(proto, path)
    refused(invoke("optimize", path, "-o", tmp_path / "o.onnx", *FAST), "clumsy.onnx", "99")


@pytest.mark.parametrize(
    ("shape", "words"),
    [
        ("x=4,9", ("x", "8", "9")),
        ("x=4,8,1", ("x", "2 dimensions")),
        ("z=4,8", ("z", "x")),
        ("x=four", ("--shape", "NAME=")),
        ("x", ("--shape", "NAME=")),
    ],
)
def test_contradictory_shapes(path: Path, tmp_path: Path, shape: str, words: tuple[str, ...]) -> None:
    refused(invoke("optimize", path, "-o", tmp_path / "o.onnx", *FAST, "--shape", shape), *words)


def test_unwritable_output(path: Path, tmp_path: Path) -> None:
    refused(invoke("optimize", path, "-o", tmp_path / "no" / "where" / "o.onnx", *FAST), "no folder")
    refused(invoke("optimize", path, "-o", tmp_path, *FAST), "folder")


@pytest.mark.parametrize(
    ("option", "value", "word"),
    [
        ("--search", "magic", "xrlflow, taso, greedy, random"),
        ("--cost", "guess", "roofline"),
        ("--backend", "tpu", "onnxruntime"),
    ],
)
def test_unknown_names(path: Path, tmp_path: Path, option: str, value: str, word: str) -> None:
    refused(invoke("optimize", path, "-o", tmp_path / "o.onnx", option, value), value, word)


def test_wrong_inputs_file(path: Path, tmp_path: Path) -> None:
    data = tmp_path / "data.npz"
    np.savez(data, y=np.zeros(3))
    refused(invoke("optimize", path, "-o", tmp_path / "o.onnx", *FAST, "--inputs", data), "x")


class _Payload:
    """Runs a command when it is unpickled."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> tuple[object, ...]:
        return os.mkdir, (str(self.path),)


def test_inputs_are_not_unpickled(path: Path, tmp_path: Path) -> None:
    data, trap = tmp_path / "data.npz", tmp_path / "trap"
    np.savez(data, x=np.array([_Payload(trap)], object))
    refused(invoke("optimize", path, "-o", tmp_path / "o.onnx", *FAST, "--inputs", data), "without pickle")
    assert not trap.exists()


def test_out_of_memory(path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def exhausted(*_: object, **__: object) -> None:
        raise MemoryError

    monkeypatch.setattr("xrlflow.api.optimize", exhausted)
    refused(invoke("optimize", path, "-o", tmp_path / "o.onnx", *FAST), "out of memory")


def test_a_trace_that_cannot_be_written_is_told_before_the_search(path: Path, tmp_path: Path) -> None:
    trace = tmp_path / "none" / "trace.json"
    refused(invoke("optimize", path, "-o", tmp_path / "o.onnx", *FAST, "--trace", trace), "none")
    assert not (tmp_path / "o.onnx").exists()


def test_wrong_trace(path: Path, tmp_path: Path) -> None:
    trace = tmp_path / "trace.json"
    trace.write_text("[]")
    refused(invoke("optimize", path, "-o", tmp_path / "o.onnx", *FAST, "--replay", trace), "trace.json")


def test_interrupted_with_nothing_to_keep(
    path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupted(*_: object, **__: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("xrlflow.pipeline.prepare.load", interrupted)
    result = CliRunner().invoke(app, ["optimize", str(path), "-o", str(tmp_path / "fast.onnx")])
    assert result.exit_code == 130
    assert result.stderr == "xrlflow: error: interrupted before there was a result\n"
    assert list(tmp_path.glob("fast*")) == []


def test_as_a_program(tmp_path: Path) -> None:
    """The installed command: no traceback, exit code 2; help without loading what is heavy."""
    ran = subprocess.run(
        [sys.executable, "-m", "xrlflow.cli", "optimize", "none.onnx", "-o", "o.onnx"],
        cwd=tmp_path, capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert ran.returncode == 2
    assert "Traceback" not in ran.stderr
    code = "import sys, xrlflow, xrlflow.cli; sys.exit(any(m in sys.modules for m in ('torch', 'onnxruntime', 'onnx')))"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def test_prove(capsys: pytest.CaptureFixture[str]) -> None:
    """Certificates as JSON, also of a rule that the runtime cannot run alone (it has a body)."""
    with pytest.raises(SystemExit) as exit:
        app(["rules", "--prove", "--json", "CancelTransposes", "InlineConstantIf"])
    assert exit.value.code == 0
    result = json.loads(capsys.readouterr().out)
    assert [c["name"] for c in result] == ["CancelTransposes", "InlineConstantIf"]
    for certificate in result:
        assert certificate["proven"]
        assert certificate["trials"] > 0
        assert certificate["bound"] < 1e-12
        assert certificate["mutants_rejected"] <= certificate["mutants"]


def test_prove_with_a_survivor(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    """A wrong rule that passes, and nobody knows why, is a failure; one that is explained is not."""
    from xrlflow import api
    from xrlflow.prover.mutation_testing import Survivor

    (proven,) = api.prove_rules(["CancelTransposes"], jobs=1)
    for why, code in (("", 1), ("equivalent", 0)):
        certificate = dataclasses.replace(proven, survivors=(Survivor("omit it", 3, why, "omit"),))
        monkeypatch.setattr(api, "prove_rules", lambda *args, found=certificate, **options: [found])
        with pytest.raises(SystemExit) as exit:
            app(["rules", "--prove", "CancelTransposes"])
        assert exit.value.code == code
        assert "omit it" in capsys.readouterr().out


def test_prove_what_is_no_rule(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as exit:
        app(["rules", "--prove", "CancelTransposers"])
    assert exit.value.code == 2
    assert "did you mean CancelTransposes" in capsys.readouterr().err


HOSTILE = "\x1b[31m[/x] \u202e[bold]"


def test_names_of_a_model_are_printed_as_text(tmp_path: Path) -> None:
    proto = onnx.parser.parse_model(
        '<ir_version: 9, opset_import: ["": 20]> g (float[n,4] x) => (float[n,4] y) { a = Abs(x) y = Neg(a) }'
    )
    data = proto.SerializeToString()
    for place in (proto.graph.output[0], proto.graph.node[1]):
        if isinstance(place, onnx.NodeProto):
            place.output[0] = HOSTILE
        else:
            place.name = HOSTILE
    proto.graph.input[0].type.tensor_type.shape.dim[0].dim_param = HOSTILE
    proto.graph.output[0].type.tensor_type.shape.dim[0].dim_param = HOSTILE
    assert data != proto.SerializeToString()
    path = tmp_path / "m.onnx"
    onnx.save(proto, path)
    for arguments in (["verify", path, path], ["optimize", path, "-o", tmp_path / "o.onnx", *FAST]):
        result = invoke(*arguments)
        assert result.exit_code == 0, result.output
        assert "\x1b" not in result.output
        assert "\u202e" not in result.output
        assert "[/x]" in result.output or arguments[0] == "optimize"


@pytest.mark.parametrize(
    "arguments",
    [
        ["optimize", "{m}", "-o", "{o}", "--trace", "{m}"],
        ["optimize", "{m}", "-o", "{o}", "--trace", "{o}"],
        ["train", "{m}", "-o", "{m}"],
        ["train", "{m}", "-o", "{o}", "--held-out", "{o}"],
        ["tune", "{m}", "-o", "{m}"],
    ],
)
def test_no_file_is_written_over_another(arguments: list[str], path: Path, tmp_path: Path) -> None:
    if arguments[0] == "train":
        pytest.importorskip("torch")
    output = tmp_path / "other.onnx"
    output.write_bytes(path.read_bytes())
    before = path.read_bytes()
    result = invoke(*(a.format(m=path, o=output) for a in arguments))
    assert result.exit_code == 2
    assert "are one file" in result.stderr
    assert path.read_bytes() == output.read_bytes() == before
