"""ONNX Runtime collects telemetry by default: with xrlflow nothing is collected, and nothing is sent."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import onnx
import onnxruntime
import pytest

from tests.rules.harness import model

pytestmark = pytest.mark.process

TINY = "agraph (float[4] x) => (float[4] y) { a = Neg(x)\n b = Neg(a)\n y = Relu(b) }"
PASSED_ON = ["PATH", "PYTHONPATH", "LD_LIBRARY_PATH", "SYSTEMROOT"]
"""All that a process here is told of its surroundings. ONNX Runtime collects nothing where CI, GITHUB_ACTIONS, TF_BUILD
or the like is set, and these tests must not depend on where they run."""
SESSION = """
import sys
import xrlflow, onnxruntime
from pathlib import Path
options = onnxruntime.SessionOptions()
options.intra_op_num_threads = 1
session = xrlflow.session(sys.argv[1], options)
links = []
for entry in Path("/proc/self/fd").iterdir():
    try: links.append(str(entry.readlink()))
    except OSError: pass  # the folder itself
print(len(list(Path("/proc/self/task").iterdir())), sum("socket:" in link for link in links))
"""
"""A session with one thread. Prints the threads of the process, and its sockets."""

Run = Callable[..., str]


@pytest.fixture
def run(tmp_path: Path) -> Run:
    """Run Python with a home, a cache and a folder of temporary files that nothing else has: `home` and `temporary`."""
    home, temporary = tmp_path / "home", tmp_path / "temporary"

    def runs(*arguments: str, **variables: str) -> str:
        home.mkdir()
        temporary.mkdir()
        kept = {name: os.environ[name] for name in PASSED_ON if name in os.environ}
        own = {"HOME": str(home), "TMPDIR": str(temporary), "OPENBLAS_NUM_THREADS": "1", **variables}
        done = subprocess.run(
            [sys.executable, *arguments], env=kept | own, capture_output=True, text=True, timeout=120
        )
        assert done.returncode == 0, done.stderr
        return done.stdout

    return runs


@pytest.fixture
def tiny(tmp_path: Path) -> str:
    path = tmp_path / "tiny.onnx"
    onnx.save(model(TINY), path)
    return str(path)


def files(folder: Path) -> set[str]:
    return {str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file()}


@pytest.mark.parametrize("given", [{}, {"ORT_DISABLE_TELEMETRY": ""}])
def test_a_session_writes_no_file_starts_no_thread_and_opens_no_connection(
    run: Run, tiny: str, tmp_path: Path, given: dict[str, str]
) -> None:
    assert run("-c", SESSION, tiny, **given) == "1 0\n"
    assert files(tmp_path / "home") | files(tmp_path / "temporary") == set()


@pytest.mark.skipif(
    sys.platform != "linux" or tuple(map(int, onnxruntime.__version__.split(".")[:2])) < (1, 31),
    reason="this ONNX Runtime collects nothing here",
)
def test_who_asks_for_it_gets_it_and_these_tests_see_it(run: Run, tiny: str, tmp_path: Path) -> None:
    threads, _ = run("-c", SESSION, tiny, ORT_DISABLE_TELEMETRY="0").split()
    assert int(threads) > 1
    assert any(name.endswith("deviceid") for name in files(tmp_path / "home"))


def test_no_process_of_an_optimisation_collects_anything(run: Run, tiny: str, tmp_path: Path) -> None:
    run("-m", "xrlflow.cli", "optimize", tiny, "-o", str(tmp_path / "fast.onnx"), "--time-limit", "4")
    assert {name.split("/")[:2] == [".cache", "xrlflow"] for name in files(tmp_path / "home")} == {True}
    assert files(tmp_path / "temporary") == set()
