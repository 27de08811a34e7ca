"""What shells offer: commands, options and the values of options."""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
from pathlib import Path

import pytest

import xrlflow
from xrlflow.cli.completion import completing, completing_last
from xrlflow.options import METHODS, PROCESSORS, SYSTEMS, flags, rule_names

pytestmark = pytest.mark.process

ROOT = str(Path(xrlflow.__file__).parents[1])
SHELLS = ("bash", "zsh", "fish")


def xrlflow_command(tmp_path: Path) -> Path:
    """The installed command, as a script."""
    command = tmp_path / "bin" / "xrlflow"
    command.parent.mkdir(exist_ok=True)
    command.write_text(
        f"#!{sys.executable}\nimport sys\nsys.path.insert(0, {ROOT!r})\nfrom xrlflow.cli import main\nmain()\n"
    )
    command.chmod(0o755)
    return command


def offered(tmp_path: Path, line: str) -> list[str]:
    """What bash gets for a line that ends where the cursor is."""
    words = line.split(" ")
    environment = {
        **os.environ, "COMP_WORDS": line, "COMP_CWORD": str(len(words) - 1),
        "_XRLFLOW_COMPLETE": "complete_bash",
    }  # fmt: skip
    done = subprocess.run(
        [xrlflow_command(tmp_path)], env=environment, capture_output=True, text=True, check=True, cwd=tmp_path
    )
    assert done.stderr == ""
    return done.stdout.split()


@pytest.mark.parametrize(
    ("line", "expected"),
    [
        ("xrlflow optim", ["optimize", "optimize-all"]),
        ("xrlflow passes op", ["optimize"]),
        ("xrlflow optimize --sear", ["--search"]),
        ("xrlflow optimize --search look", ["lookahead2", "lookahead3"]),
        ("xrlflow optimize m.onnx -o o.onnx --cost pro", ["profiled"]),
        ("xrlflow tune --cpu znver4", ["znver4"]),
        ("xrlflow compare --searches greedy,tas", ["greedy,taso"]),
        ("xrlflow optimize --exclude CancelTr", ["CancelTransposes"]),
        ("xrlflow optimize mod", []),  # bash then offers files
    ],
)
def test_what_bash_offers(tmp_path: Path, line: str, expected: list[str]) -> None:
    assert offered(tmp_path, line) == expected


@pytest.mark.parametrize("shell", SHELLS)
def test_scripts_for_shells(tmp_path: Path, shell: str) -> None:
    environment = {**os.environ, "_XRLFLOW_COMPLETE": f"source_{shell}"}
    done = subprocess.run(
        [xrlflow_command(tmp_path)], env=environment, capture_output=True, text=True, check=True
    )
    assert "_XRLFLOW_COMPLETE" in done.stdout


def test_it_is_installed_where_the_shell_looks(tmp_path: Path) -> None:
    """And bash, with what was installed, completes."""
    environment = {**os.environ, "HOME": str(tmp_path), "_TYPER_COMPLETE_TEST_DISABLE_SHELL_DETECTION": "1"}
    command = xrlflow_command(tmp_path)
    done = subprocess.run(
        [command, "--install-completion", "bash"], env=environment, capture_output=True, text=True, check=True
    )
    assert "installed" in done.stdout
    assert "xrlflow" in (tmp_path / ".bashrc").read_text()
    (script,) = (tmp_path / ".bash_completions").iterdir()
    asked = (
        f"source {script}; COMP_WORDS=(xrlflow optimize --search gr); COMP_CWORD=3; "
        f'_xrlflow_completion xrlflow; echo "${{COMPREPLY[@]}}"'
    )
    path = f"{command.parent}{os.pathsep}{os.environ['PATH']}"
    done = subprocess.run(
        ["bash", "-c", asked], env={**environment, "PATH": path}, capture_output=True, text=True, check=True
    )
    assert done.stdout.strip() == "greedy"


def test_several_values_are_separated_by_commas() -> None:
    complete = completing_last(("taso", "greedy"))
    assert complete("") == ["taso", "greedy"]
    assert complete("taso,") == ["taso,taso", "taso,greedy"]
    assert complete("taso,gre") == ["taso,greedy"]
    assert completing(lambda: ["a", "b"])("b") == ["b"]


def test_rules_are_those_that_there_are() -> None:
    from rewrite_rules import LIBRARY

    assert set(rule_names()) == {r.name for r in LIBRARY} | {r.family for r in LIBRARY}


def test_values_that_are_offered_are_accepted() -> None:
    from xrlflow.options import Options

    for name, (flag, default) in flags(Options).items():
        if flag.values and not callable(flag.values) and name not in ("cpu", "triple"):
            for value in flag.values:
                if value == "tvm":
                    continue  # needs an extra
                needed = {"inputs": "data.npz"} if value == "int8" else {}
                Options(**{name: (value,) if default == () else value} | needed)


@pytest.mark.skipif(importlib.util.find_spec("tvm") is None, reason="the extra tvm is not installed")
def test_processors_and_methods_are_known() -> None:
    from xrlflow.backends.tvm.toolchain.target import detect
    from xrlflow.tuning.tuners.protocol import Method

    assert tuple(m.value for m in Method) == METHODS
    x86 = PROCESSORS[: PROCESSORS.index("cortex-a53")]
    arm = PROCESSORS[PROCESSORS.index("cortex-a53") :]
    for system, names in (("x86_64-linux-gnu", x86), ("aarch64-linux-gnu", arm)):
        for name in names:
            assert detect(name, 1, system).cpu == name
    assert set(SYSTEMS) >= {"x86_64-linux-gnu", "aarch64-linux-gnu"}
