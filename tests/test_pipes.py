"""Models from standard input, results to standard output, quiet commands, and how the program ends."""

from __future__ import annotations

import contextlib
import io
import json
import os
import pty
import signal
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from typer.testing import CliRunner

import xrlflow
from tests.rules.harness import model
from tests.test_cli import clumsy, external, invoke, refused
from xrlflow.cli import app, pipes

pytestmark = [pytest.mark.process, pytest.mark.usefixtures("reference_machine")]

ROOT = str(Path(xrlflow.__file__).parents[1])
PLAIN = ("--search", "greedy", "--cost", "roofline", "--no-measure")
PROGRAM = (sys.executable, "-m", "xrlflow.cli")


@pytest.fixture
def path(tmp_path: Path) -> Path:
    file = tmp_path / "clumsy.onnx"
    onnx.save(clumsy(), file)
    return file


def environment() -> dict[str, str]:
    return {**os.environ, "PYTHONPATH": ROOT, "OMP_NUM_THREADS": "1"}


@dataclass(frozen=True)
class Done:
    """How a command ended, and what it wrote."""

    returncode: int
    stdout: bytes
    stderr: bytes


def program(*arguments: object, given: bytes = b"") -> Done:
    """The program in this process, with descriptors of its own: what it writes past Python counts, too."""
    with contextlib.ExitStack() as stack:
        files = [stack.enter_context(tempfile.TemporaryFile()) for _ in range(3)]
        files[0].write(given)
        files[0].seek(0)
        kept = [os.dup(number) for number in range(3)]
        streams = sys.stdin, sys.stdout, sys.stderr
        for number, file in enumerate(files):
            os.dup2(file.fileno(), number)
        sys.stdin, sys.stdout, sys.stderr = (
            io.TextIOWrapper(io.FileIO(number, mode, closefd=False))
            for number, mode in enumerate("rww")  # type: ignore[type-var]
        )
        try:
            app([str(a) for a in arguments], prog_name="xrlflow")
        except SystemExit as end:
            code = int(end.code or 0)
        finally:
            for stream in (sys.stdout, sys.stderr):
                stream.flush()
            sys.stdin, sys.stdout, sys.stderr = streams
            for number, old in enumerate(kept):
                os.dup2(old, number)
                os.close(old)
        for file in files:
            file.seek(0)
        return Done(code, files[1].read(), files[2].read())


def piped(*arguments: object, given: bytes) -> Any:
    """The same by typer's runner."""
    return CliRunner().invoke(app, [str(a) for a in arguments], input=given)


def test_from_a_pipe_to_a_pipe(path: Path, tmp_path: Path) -> None:
    """The model alone is on standard output, and it is the one that is written to a file."""
    done = program("optimize", "-", "-o", "-", *PLAIN, given=path.read_bytes())
    assert done.returncode == 0, done.stderr
    made = onnx.load_from_string(done.stdout)
    onnx.checker.check_model(made, full_check=True)
    assert sorted(n.op_type for n in made.graph.node) == ["MatMul", "Relu"]
    said = done.stderr.decode()
    assert "CancelTransposes" in said
    assert "standard output: written" in said
    output = tmp_path / "fast.onnx"
    assert invoke("optimize", path, "-o", output, *PLAIN).exit_code == 0
    assert output.read_bytes() == done.stdout
    assert sorted(p.name for p in tmp_path.iterdir()) == ["clumsy.onnx", "fast.onnx"]


def test_quiet_and_json_beside_a_piped_model(path: Path, tmp_path: Path) -> None:
    done = program("optimize", path, "-o", "-", *PLAIN, "--quiet")
    assert (done.returncode, done.stderr) == (0, b"")
    assert len(onnx.load_from_string(done.stdout).graph.node) == 2
    again = program("optimize", path, "-o", "-", *PLAIN, "--json")
    assert again.stdout == done.stdout
    assert json.loads(again.stderr)["verified"] is True


def test_an_original_goes_through_byte_for_byte(tmp_path: Path) -> None:
    data = model("agraph (float[4] x) => (float[4] y) { y = Relu(x) }").SerializeToString()
    done = program("optimize", "-", "-o", "-", *PLAIN, "-q", given=data)
    assert (done.returncode, done.stdout) == (0, data)


def test_what_is_read_may_be_piped(path: Path, tmp_path: Path) -> None:
    data, output = path.read_bytes(), tmp_path / "fast.onnx"
    for arguments in (
        ("optimize", "-", "-o", output, *PLAIN),
        ("compare", "-", "--searches", "greedy", "--no-measure", "--cost", "roofline"),
        ("verify", "-", path),
        ("verify", path, "-"),
        ("bench", path, "--against", "-", "--time-limit", 0.5, "--threads", 1),
        ("run", "-"),
        ("rules", "CancelTransposes", "--stats", "-"),
    ):
        result = piped(*arguments, given=data)
        assert result.exit_code == 0, (arguments, result.output)
    measured = piped(
        "bench", path, "--against", "-", "--time-limit", 0.5, "--threads", 1, "--json", given=data
    )
    assert json.loads(measured.stdout)["against"] == "standard input"


def test_outputs_and_pages_go_to_standard_output(path: Path, tmp_path: Path) -> None:
    done = program("run", "-", "-o", "-", given=path.read_bytes())
    with np.load(io.BytesIO(done.stdout)) as arrays:
        assert list(arrays) == ["y"]
    assert b"float32" in done.stderr
    trace = tmp_path / "trace.json"
    assert invoke("optimize", path, "-o", tmp_path / "o.onnx", *PLAIN, "--trace", trace).exit_code == 0
    page = program("report", "-", "-o", "-", given=trace.read_bytes())
    assert page.stdout.startswith(b"<!")
    assert page.stderr == b""


@pytest.mark.parametrize("part", [0.0, 0.3, 0.9])
def test_a_truncated_pipe(path: Path, tmp_path: Path, part: float) -> None:
    data = path.read_bytes()
    result = piped("optimize", "-", "-o", tmp_path / "o.onnx", *PLAIN, given=data[: int(part * len(data))])
    refused(result, "standard input")
    assert [p.name for p in tmp_path.iterdir()] == ["clumsy.onnx"]


def test_external_data_does_not_fit_through_a_pipe(tmp_path: Path) -> None:
    file = external(tmp_path, "weights.bin")
    (tmp_path / "weights.bin").write_bytes(bytes(256))
    refused(piped("optimize", "-", "-o", tmp_path / "o.onnx", *PLAIN, given=file.read_bytes()), "weights.bin")
    refused(invoke("optimize", file, "-o", "-", *PLAIN), "weights.bin", "name a file")


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("optimize", "{m}", "-o", "-", "--backend", "hybrid"), ("kernels", "beside")),
        (("optimize", "{m}", "-o", "-", "--backend", "tvm"), ("library",)),
        (("optimize", "{m}", "-o", "o.onnx", "--trace", "-"), ("for models",)),
        (("optimize", "{m}", "-o", "o.onnx", "--report", "-"), ("for models",)),
        (("tune", "{m}", "-o", "-"), ("library",)),
        (("train", "-", "-o", "a"), ("training",)),
        (("verify", "-", "-"), ("only once",)),
        (("bench", "-", "--kernels"), ("folder",)),
        (("report", "-"), ("-o",)),
        (("plot", "-", "-o", "p.svg"), ("file",)),
    ],
)
def test_what_cannot_be_piped(path: Path, arguments: Sequence[str], words: Sequence[str]) -> None:
    refused(piped(*(a.format(m=path) for a in arguments), given=path.read_bytes()), *words)


def in_a_terminal(*arguments: object) -> tuple[int, str]:
    """Exit code and what a terminal shows, which is standard input, output and error."""
    leader, follower = pty.openpty()
    process = subprocess.Popen(
        [*PROGRAM, *map(str, arguments)], stdin=follower, stdout=follower, stderr=follower, env=environment()
    )
    os.close(follower)
    shown = b""
    while True:
        try:
            part = os.read(leader, 4096)
        except OSError:  # the other end is closed
            break
        if not part:
            break
        shown += part
    os.close(leader)
    return process.wait(timeout=60), shown.decode()


def test_a_terminal_gets_no_bytes_and_gives_none(path: Path, tmp_path: Path) -> None:
    for arguments, word in (((path, "-o", "-"), "terminal"), (("-", "-o", "o.onnx"), "terminal")):
        code, shown = in_a_terminal("optimize", *arguments, *PLAIN)
        assert code == 2
        assert word in shown
        assert len(shown.splitlines()) == 1
    assert not (tmp_path / "o.onnx").exists()


def test_quiet_commands_say_nothing(path: Path, tmp_path: Path) -> None:
    trace, output, page = tmp_path / "t.json", tmp_path / "o.onnx", tmp_path / "p.html"
    for arguments in (
        ("optimize", path, "-o", output, *PLAIN, "--trace", trace),
        ("report", trace, "-o", page),
        ("verify", path, output),
        ("run", path),
        ("rules", "--prove", "CancelTransposes"),
    ):
        result = invoke(*arguments, "--quiet")
        assert (result.exit_code, result.output) == (0, ""), arguments
    onnx.save(model("agraph (float[N,8] x) => (float[N,8] y) { y = Relu(x) }"), output)
    assert invoke("verify", path, output, "-q").exit_code == 1
    refused(invoke("optimize", tmp_path / "none.onnx", "-o", output, "-q"), "none.onnx")


def test_warnings_are_one_line_and_no_errors(path: Path) -> None:
    warned = (
        "import sys, warnings, xrlflow.api\n"
        "from xrlflow.cli.program import main\n"
        "def run_once(*arguments, **options):\n"
        "    warnings.warn('the store\\ncannot be written', RuntimeWarning)\n"
        "    return {}\n"
        "xrlflow.api.run_once = run_once\n"
        "main()\n"
    )
    for quiet, said in (((), b"xrlflow: warning: the store cannot be written\n"), (("-q",), b"")):
        done = subprocess.run(
            [sys.executable, "-c", warned, "run", path, *quiet],
            capture_output=True, env=environment(), check=False,
        )  # fmt: skip
        assert (done.returncode, done.stderr) == (0, said)


def test_what_does_not_end_is_refused(path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    size = path.stat().st_size
    monkeypatch.setattr(pipes, "MAX_BYTES", size)
    monkeypatch.setattr(pipes, "_PART", 16)
    assert program("verify", "-", path, given=path.read_bytes()).returncode == 0
    done = program("verify", "-", path, given=path.read_bytes() + b"x")
    assert (done.returncode, len(done.stderr.splitlines())) == (2, 1)
    assert b"does not end" in done.stderr


# --- how it ends ---


def test_version() -> None:
    result = invoke("--version")
    assert (result.exit_code, result.output) == (0, f"xrlflow {xrlflow.__version__}\n")


@pytest.mark.parametrize("arguments", [("rules",), ("passes", "list"), ("--help",)])
def test_a_reader_that_ends_early(arguments: Sequence[str]) -> None:
    """No traceback, and the exit code of a program that a closed pipe ended."""
    reading, writing = os.pipe()
    os.close(reading)
    done = subprocess.run(
        [*PROGRAM, *arguments], stdout=writing, stderr=subprocess.PIPE, env=environment(), check=False
    )
    os.close(writing)
    assert (done.returncode, done.stderr) == (141, b"")


def test_a_reader_of_a_model_that_ends_early(path: Path) -> None:
    reading, writing = os.pipe()
    os.close(reading)
    done = subprocess.run(
        [*PROGRAM, "optimize", path, "-o", "-", *PLAIN, "-q"], stdout=writing, stderr=subprocess.PIPE,
        env=environment(), check=False,
    )  # fmt: skip
    os.close(writing)
    assert (done.returncode, done.stderr) == (141, b"")


@pytest.mark.skipif(not os.path.exists("/dev/full"), reason="this system has no full device")
def test_a_full_disk_is_one_line() -> None:
    with open("/dev/full", "wb") as full:
        done = subprocess.run(
            [*PROGRAM, "--version"], stdout=full, stderr=subprocess.PIPE, env=environment(), check=False
        )
    assert done.returncode == 2
    assert done.stderr.decode().splitlines() == [
        "xrlflow: error: standard output cannot be written (No space left on device)"
    ]


def test_a_wrong_option_is_the_users() -> None:
    done = program("optimize", "--nonsense")
    assert done.returncode == 2
    assert b"nonsense" in done.stderr
    assert b"Traceback" not in done.stderr


@pytest.mark.usefixtures("python_handles_interrupts")
def test_ctrl_c_while_it_reads_a_pipe(tmp_path: Path) -> None:
    process = subprocess.Popen(
        [*PROGRAM, "optimize", "-", "-o", "o.onnx"], stdin=subprocess.PIPE, stderr=subprocess.PIPE,
        env=environment(), cwd=tmp_path,
    )  # fmt: skip
    assert process.stdin is not None
    process.stdin.write(bytes(1 << 20))  # more than a pipe holds: when that has gone through, it reads
    process.stdin.flush()
    process.send_signal(signal.SIGINT)
    _, said = process.communicate(timeout=60)
    assert process.returncode == 130
    assert len(said.splitlines()) == 1
    assert list(tmp_path.iterdir()) == []


def test_sigterm_does_not_wait_for_a_kernel_that_is_compiled(path: Path, tmp_path: Path) -> None:
    compiling = (
        "import time, xrlflow.api\n"
        "from xrlflow.backends.tvm.library import code_generation\n"
        "from xrlflow.cli.program import main\n"
        "def compile(*arguments):\n"
        "    print('begun', flush=True)\n"
        "    time.sleep(60)\n"
        "code_generation._object_file = compile\n"
        "def run(*a, **o):\n"
        "    with code_generation.CodeGenerator(None) as generator:\n"
        "        generator.generate({'a': None}, 1)\n"
        "        generator.objects()\n"
        "xrlflow.api.run_once = run\n"
        "main()\n"
    )
    temporary = tmp_path / "temporary"
    temporary.mkdir()
    process = subprocess.Popen(
        [sys.executable, "-c", compiling, "run", path], stdout=subprocess.PIPE, stderr=subprocess.PIPE,
        env={**environment(), "TMPDIR": str(temporary)},
    )  # fmt: skip
    assert process.stdout is not None
    assert process.stdout.readline() == b"begun\n"
    process.terminate()
    _, said = process.communicate(timeout=20)
    assert (process.returncode, said) == (143, b"xrlflow: error: terminated\n")
    assert not [each for each in temporary.iterdir() if each.name.startswith("xrlflow-")]


@pytest.mark.parametrize(
    ("broken", "arguments"),
    [
        ("xrlflow.doctor.examine", ["doctor"]),
        ("xrlflow.learn.curves.read_scalars", ["plot", ".", "-o", "a.svg"]),
    ],
)
def test_ctrl_c_is_one_line(monkeypatch: pytest.MonkeyPatch, broken: str, arguments: Sequence[str]) -> None:
    def interrupted(*arguments: object) -> Any:
        raise KeyboardInterrupt

    monkeypatch.setattr(broken, interrupted)
    done = program(*arguments)
    assert (done.returncode, done.stdout) == (130, b"")
    assert done.stderr == b"xrlflow: error: interrupted before there was a result\n"


def test_closed_descriptors(path: Path, tmp_path: Path) -> None:
    """Without standard error, its number is not that of the next file. A closed stream is named."""
    command = f"exec {sys.executable} -m xrlflow.cli optimize - -o - {' '.join(PLAIN)}"
    with path.open("rb") as given:
        done = subprocess.run(
            ["sh", "-c", f"{command} 2>&-"],
            stdin=given,
            stdout=subprocess.PIPE,
            env=environment(),
            check=True,
        )
    assert len(onnx.load_from_string(done.stdout).graph.node) == 2
    failed = subprocess.run(
        ["sh", "-c", f"{command} <&- >&-"], stderr=subprocess.PIPE, env=environment(), check=False
    )
    assert failed.returncode == 2
    (line,) = failed.stderr.splitlines()
    assert b"standard input is closed" in line
