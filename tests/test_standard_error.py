"""Standard error has the notes and the progress of xrlflow, and nothing that a library says: in every command."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import urllib.request
from collections.abc import Iterator
from pathlib import Path

import onnx
import pytest

import models
from tests.passes.test_xla import TWO
from xrlflow.cli.program import COMMANDS, PASS_COMMANDS

pytestmark = pytest.mark.process
OURS = re.compile(r"xrlflow: .+|(training )?\d+/\d+ .+")
PROGRAM = [sys.executable, "-m", "xrlflow.cli"]

PREPARING = "optimize bert.onnx -o fast.onnx --trace trace.json --no-measure --cost roofline"
"""Writes what other commands read."""
QUICK = (
    "verify bert.onnx fast.onnx",
    "bench bert.onnx --against fast.onnx --time-limit 1",
    "run bert.onnx",
    "report trace.json -o report.html",
    "rules",
    "rules CancelTransposes --prove",
    "doctor",
    "passes list",
    "passes optimize two.hlo -o less.hlo --search greedy --steps 8",
    "passes bench two.hlo --searches random --steps 8",
)
SLOW = (
    "optimize bert.onnx -o measured.onnx --cost profiled --backend onnxruntime --time-limit 8",
    "tune bert.onnx -o tuned.so --trials 4 --batch 2 --time-limit 10 --no-measure",
)
SLOWER = (
    "optimize bert.onnx -o kernels.onnx --cost roofline --backend hybrid --no-measure --report page.html",
    "optimize bert.onnx -o compiled.so --cost roofline --backend tvm --no-measure",
    "optimize-all *.onnx -o all --cost roofline --no-measure --backend onnxruntime",
    "compare bert.onnx --searches greedy,xrlflow --time-limit 4 --cost roofline",
)
LEARNING = (
    "train bert.onnx -o agent.safetensors --iterations 1 --steps 8 --workers 1 --log log",
    "plot log -o curve.svg",
    "passes train two.hlo -o orders.safetensors --iterations 1 --steps 8",
)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model that gathers, a module of HLO, and what the first command makes of the model."""
    folder = tmp_path_factory.mktemp("commands")
    onnx.save(models.small("bert"), folder / "bert.onnx")
    (folder / "two.hlo").write_text(TWO)
    check(folder, PREPARING)
    return folder


def foreign(said: str) -> list[str]:
    """Lines that are not ours."""
    return [line for line in said.splitlines() if not OURS.fullmatch(line)]


def check(folder: Path, command: str) -> None:
    home = folder / "home"
    home.mkdir(exist_ok=True)
    done = subprocess.run(
        [*PROGRAM, *command.split()], cwd=folder, env={**os.environ, "HOME": str(home)}, stdin=subprocess.DEVNULL,
        capture_output=True, text=True, timeout=300,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert foreign(done.stderr) == []


def test_what_is_foreign_is_seen() -> None:
    warning = "[12:54:05] transform.h:1261: Warning: Fast mode segfaults"
    assert foreign(f"xrlflow: warning: rough\n{warning}\ntraining 1/1  return 2.0\n") == [warning]


@pytest.mark.parametrize("command", QUICK)
def test_quick_commands(folder: Path, command: str) -> None:
    check(folder, command)


@pytest.mark.whole
@pytest.mark.measures
@pytest.mark.parametrize("command", SLOW)
def test_commands_that_measure_and_compile(folder: Path, command: str) -> None:
    check(folder, command)


@pytest.mark.measures
@pytest.mark.whole
@pytest.mark.parametrize("command", SLOWER)
def test_more_commands_that_measure_and_compile(folder: Path, command: str) -> None:
    check(folder, command)


@pytest.mark.learns
@pytest.mark.whole
def test_commands_that_learn(folder: Path) -> None:
    for command in LEARNING:
        check(folder, command)


@pytest.fixture
def viewer(folder: Path, python_handles_interrupts: None) -> Iterator[subprocess.Popen[str]]:
    with subprocess.Popen(
        [*PROGRAM, "view", "bert.onnx", "--port", "0", "--no-measure"], cwd=folder, stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
    ) as process:  # fmt: skip
        yield process
        process.kill()


def test_a_viewer_that_is_asked_and_ended(viewer: subprocess.Popen[str]) -> None:
    assert viewer.stdout is not None
    address = re.search(r"http://\S+", viewer.stdout.readline())
    assert address is not None
    with urllib.request.urlopen(address[0]) as answer:
        assert answer.status == 200
    viewer.send_signal(signal.SIGINT)
    _, said = viewer.communicate(timeout=60)
    assert foreign(said.strip()) == []  # a new line follows the ^C of a terminal


def test_every_command_is_among_them() -> None:
    tried = [c.split() for c in (PREPARING, *QUICK, *SLOW, *SLOWER, *LEARNING, "view")]
    assert {words[0] for words in tried} == {*COMMANDS, "passes"}
    assert {words[1] for words in tried if words[0] == "passes"} == {*PASS_COMMANDS}
