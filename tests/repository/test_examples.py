"""The examples run as they are, in an empty folder, and do what they say."""

from __future__ import annotations

import os
import re
import runpy
import subprocess
import sys
from pathlib import Path

import onnx
import pytest

from tests.levels import whole

pytestmark = pytest.mark.process

ROOT = Path(__file__).resolve().parents[2]
EXAMPLES = ROOT / "examples"

# What each prints, and the files that it leaves behind.
SAYS = {
    # How fast the result is depends on the machine.
    "optimize_a_file": (
        r"(verified: True|the result is the original)(.|\n)*wrote slow.fast.onnx",
        ["slow.onnx", "slow.fast.onnx"],
    ),
    "log_to_a_file": (
        r"phases: .*search.*verify.*\nwrote \d+ lines to progress.jsonl",
        ["slow.fast.onnx", "progress.jsonl"],
    ),
    "own_rule": (r"proven: True(.|\n)*applied FactorOutOfDifference", ["own_rule.onnx"]),
    "own_agent": (r"trained for 2 iterations\n.* verified: True", ["own.safetensors"]),
    "compare_strategies": (r"greedy +modelled cost .*\ntaso +modelled cost", ["slow.onnx"]),
    "run_with_kernels": (
        r"generated kernels run \d+ of \d+ nodes(.|\n)*differs from that without kernels by \d(\.\d+)?e-0[5-9]",
        ["slow.fast.onnx", "slow.fast.so"],
    ),
    "compile_with_tvm": (r"an output of shape \(1, 256\)", ["slow.so", "slow.so.json"]),
}
# Run as programs: their rules are proven by their source.
ALONE = ("own_rule",)
# Packages of extras.
NEEDS = {"own_agent": "torch", "compile_with_tvm": "tvm", "run_with_kernels": "tvm"}


def run_alone(name: str, folder: Path) -> str:
    """What an example prints as a program of its own."""
    path = os.pathsep.join([str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])])
    done = subprocess.run(
        [sys.executable, str(EXAMPLES / f"{name}.py")],
        cwd=folder, env={**os.environ, "PYTHONPATH": path}, capture_output=True, text=True, timeout=300, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.mark.usefixtures("brief_comparisons")
@pytest.mark.parametrize("name", whole(SAYS, ("own_rule", "run_with_kernels")))
def test_an_example_runs(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    if name in NEEDS:
        pytest.importorskip(NEEDS[name])
    said, files = SAYS[name]
    if name in ALONE:
        told = run_alone(name, tmp_path)
    else:  # here, where all packages are loaded
        monkeypatch.chdir(tmp_path)
        monkeypatch.syspath_prepend(EXAMPLES)
        monkeypatch.setattr(sys, "argv", [f"{name}.py"])
        runpy.run_path(str(EXAMPLES / f"{name}.py"), run_name="__main__")
        told = capsys.readouterr().out
    assert re.search(said, told), told
    for file in files:
        assert (tmp_path / file).stat().st_size > 0
        if file.endswith(".onnx"):
            onnx.checker.check_model(tmp_path / file, full_check=True)


def test_every_example_is_run_and_listed() -> None:
    scripts = {p.stem for p in EXAMPLES.glob("*.py") if "def main()" in p.read_text()}
    assert scripts == set(SAYS)
    listed = set(re.findall(r"^\| `(\w+)\.py` \|", (EXAMPLES / "README.md").read_text(), re.MULTILINE))
    assert listed == scripts
