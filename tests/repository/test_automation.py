"""The action and the image of examples/: their files are well-formed, and their commands do what they say.

No image is built here, and no runner of GitHub is used: the shell steps run as they stand, with the variables that a
runner sets.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import onnx
import pytest

from tests.test_cli import clumsy

pytestmark = pytest.mark.process

yaml = pytest.importorskip("yaml")

ROOT = Path(__file__).resolve().parents[2]
ACTION = ROOT / "examples" / "action" / "action.yml"
DOCKERFILE = ROOT / "examples" / "docker" / "Dockerfile"


@pytest.fixture(scope="module")
def action() -> dict[str, Any]:
    found: dict[str, Any] = yaml.safe_load(ACTION.read_text())
    return found


def test_the_action_is_composite_and_refers_to_what_there_is(action: Mapping[str, Any]) -> None:
    assert action.keys() == {"name", "description", "inputs", "outputs", "runs"}
    assert action["runs"]["using"] == "composite"
    steps = action["runs"]["steps"]
    assert all(
        step.keys() <= {"name", "id", "shell", "env", "run"} and step["shell"] == "bash" for step in steps
    )
    text = ACTION.read_text().split("\ninputs:")[1]
    used = set(re.findall(r"\$\{\{ inputs\.([\w-]+) \}\}", text))
    assert used == action["inputs"].keys()
    identifiers = {step["id"] for step in steps if "id" in step}
    for step, name in re.findall(r"\$\{\{ steps\.(\w+)\.outputs\.(\w+) \}\}", text):
        assert step in identifiers
        assert f'echo "{name}=' in text
    # What a user gives reaches the shell as a variable, never as a part of the script.
    assert all("${{" not in step["run"] for step in steps)
    for given in action["inputs"].values():
        assert given["description"]
        assert "default" in given or given["required"]


class Runner:
    """Runs the steps of an action as a runner does, in a folder."""

    def __init__(self, action: Mapping[str, Any], folder: Path, **given: str) -> None:
        self.action, self.folder = action, folder
        self.inputs = {
            name: given.get(name, each.get("default", "")) for name, each in action["inputs"].items()
        }
        tools = folder / "tools"
        tools.mkdir()
        # What `pip install` would do; every other call is Python's.
        (tools / "python").write_text(
            f'#!/bin/sh\nif [ "$1 $2 $3" = "-m pip install" ]; then echo "$@" > {folder}/installed; exit 0; fi\n'
            f'exec {sys.executable} "$@"\n'
        )
        (tools / "xrlflow").write_text(f'#!/bin/sh\nexec {sys.executable} -m xrlflow.cli "$@"\n')
        for tool in tools.iterdir():
            tool.chmod(0o755)
        self.work = folder / "work"
        self.work.mkdir()
        self.environment = {
            **os.environ, "PATH": f"{tools}{os.pathsep}{os.environ['PATH']}", "OMP_NUM_THREADS": "1",
            "PYTHONPATH": os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")])),
            "GITHUB_ACTION_PATH": str(ACTION.parent), "GITHUB_OUTPUT": str(folder / "output"),
            "GITHUB_STEP_SUMMARY": str(folder / "summary"),
        }  # fmt: skip

    def run(self, name: str) -> subprocess.CompletedProcess[str]:
        (step,) = [step for step in self.action["runs"]["steps"] if step["name"] == name]
        script = self.folder / "step.sh"
        script.write_text(step["run"])
        variables = {
            key: re.sub(r"\$\{\{ inputs\.([\w-]+) \}\}", lambda found: self.inputs[found[1]], value)
            for key, value in step.get("env", {}).items()
        }
        return subprocess.run(
            ["bash", "--noprofile", "--norc", "-eo", "pipefail", str(script)], cwd=self.work,
            env={**self.environment, **variables}, capture_output=True, text=True, check=False, timeout=300,
        )  # fmt: skip


def test_its_steps_run(action: Mapping[str, Any], tmp_path: Path) -> None:
    runner = Runner(
        action, tmp_path, models="in/*.onnx", arguments="--cost roofline --search greedy", output="out put"
    )
    (runner.work / "in").mkdir()
    onnx.save(clumsy(), runner.work / "in" / "a.onnx")
    relu = onnx.parser.parse_model(
        '<ir_version: 8, opset_import: ["": 18]> g (float[4] x) => (float[4] y) { y = Relu(x) }'
    )
    onnx.save(relu, runner.work / "in" / "b.onnx")
    assert runner.run("Install xrlflow").returncode == 0
    installed = (tmp_path / "installed").read_text().split()
    assert Path(installed[-1]).resolve() == ROOT
    done = runner.run("Optimise")
    assert done.returncode == 0, done.stderr
    assert (tmp_path / "output").read_text() == "folder=out put\ncount=1\n"
    assert len(onnx.load(runner.work / "out put" / "a.onnx").graph.node) == 2
    assert (runner.work / "out put" / "b.onnx").read_bytes() == (runner.work / "in" / "b.onnx").read_bytes()
    summary = (tmp_path / "summary").read_text().splitlines()
    assert summary[0] == "| model | operators before | after | speed-up |"
    assert summary[2:] == ["| in/a.onnx | 5 | 2 | not measured |", "| in/b.onnx | 1 | 1 | original |"]
    assert sorted(p.name for p in runner.work.iterdir()) == ["in", "out put"]


def test_it_fails_where_a_model_is_broken_or_there_is_none(action: Mapping[str, Any], tmp_path: Path) -> None:
    runner = Runner(action, tmp_path, models="*.onnx")
    done = runner.run("Optimise")
    assert (done.returncode, done.stdout) == (2, "::error::no model matches *.onnx\n")
    (runner.work / "x.onnx").write_text("no model")
    done = runner.run("Optimise")
    assert done.returncode == 2
    assert "not an ONNX model" in done.stderr


def test_no_result_replaces_another(action: Mapping[str, Any], tmp_path: Path) -> None:
    runner = Runner(action, tmp_path, models="*/*.onnx", arguments="--cost roofline --search greedy")
    for name in ("a/m.onnx", "b/m.onnx", "b/n.onnx"):
        (runner.work / name).parent.mkdir(exist_ok=True)
        onnx.save(clumsy(), runner.work / name)
    done = runner.run("Optimise")
    assert (done.returncode, done.stdout) == (
        2, "::error::results keep their names, and several models are named m.onnx\n"
    )  # fmt: skip
    assert not list((runner.work / "optimised").iterdir())
    (runner.work / "a" / "m.onnx").rename(runner.work / "a" / "o|p.onnx")
    (runner.work / "b" / "n.onnx").unlink()
    assert runner.run("Optimise").returncode == 0
    assert (tmp_path / "summary").read_text().splitlines()[2].startswith("| a/o\\|p.onnx | 5 | 2 |")


def test_what_a_user_gives_is_no_command(action: Mapping[str, Any], tmp_path: Path) -> None:
    runner = Runner(
        action, tmp_path, models="$(touch pwned)`touch pwned`; touch pwned", output="$(touch pwned)"
    )
    assert runner.run("Optimise").returncode == 2
    assert not list(tmp_path.rglob("pwned"))


# --- the image ---


def instructions() -> list[tuple[str, str]]:
    """The instructions of the Dockerfile: name and arguments, continued lines joined."""
    lines = "\n".join(line for line in DOCKERFILE.read_text().splitlines() if not line.startswith("#"))
    joined = re.sub(r"\\\n\s*", " ", lines)
    return [(name, rest.strip()) for name, rest in re.findall(r"^([A-Z]+)\s+(.*)$", joined, re.MULTILINE)]


def test_the_image_is_made_of_what_there_is() -> None:
    found = instructions()
    kinds = {name for name, _ in found}
    assert kinds == {"FROM", "WORKDIR", "COPY", "RUN", "ARG", "USER", "ENV", "VOLUME", "ENTRYPOINT", "CMD"}
    for _, image in (each for each in found if each[0] == "FROM"):
        assert re.fullmatch(r"python:3\.1[0-3]-slim( AS \w+)?", image)  # a name, and no host
    for _, copied in (each for each in found if each[0] == "COPY"):
        for name in copied.split()[:-1]:
            assert (ROOT / name).exists(), name
    assert [rest for name, rest in found if name == "USER"] == ["user"]  # not root
    (entry,) = (json.loads(rest) for name, rest in found if name == "ENTRYPOINT")
    assert f'\n{entry[0]} = "xrlflow.cli:main"\n' in (ROOT / "pyproject.toml").read_text()
    for _, command in (each for each in found if each[0] == "RUN"):
        script = re.sub(r"^--mount=\S+ ", "", command)
        subprocess.run(["bash", "-n", "-c", script], check=True)


@pytest.mark.parametrize(
    ("extras", "asked"), [("", "w.whl"), ("tvm", "w.whl[tvm]"), ("tvm,train", "w.whl[tvm,train]")]
)
def test_the_wheel_is_installed_with_its_extras(extras: str, asked: str, tmp_path: Path) -> None:
    (install,) = (rest for name, rest in instructions() if name == "RUN" and "pip install" in rest)
    script = re.sub(r"^--mount=\S+ ", "", install).replace("/wheels", str(tmp_path))
    (tmp_path / "w.whl").touch()
    done = subprocess.run(
        ["sh", "-c", f'pip() {{ for last; do :; done; echo "$last"; }}; {script}'],
        env={**os.environ, "EXTRAS": extras}, capture_output=True, text=True, check=True,
    )  # fmt: skip
    assert done.stdout.strip() == f"{tmp_path}/{asked}"


def test_the_wheel_is_built_of_what_is_copied() -> None:
    """The same files of which tests/test_install.py builds one, and tests it where nothing else is."""
    copied = {name for kind, rest in instructions() if kind == "COPY" for name in rest.split()[:-1]}
    assert copied == {"pyproject.toml", "README.md", "LICENSE", "xrlflow", "rewrite_rules"}
