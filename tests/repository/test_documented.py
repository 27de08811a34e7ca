"""Examples in README and docs/ run as they stand, in a folder that has what their text takes for granted.

What names something that a reader has to choose (MODEL, HOST, a cluster, a server) is not run: its options are those of
the command. Programs of docs/ that are files of examples/ are run by `test_examples`.
"""

from __future__ import annotations

import re
import shlex
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
import typer
from typer.testing import CliRunner

from tests.batch.conftest import Here
from tests.levels import whole
from tests.repository.test_docs import DOCS, FENCE, ROOT
from tests.rules.harness import model
from xrlflow import api
from xrlflow.cli import app

pytestmark = pytest.mark.process

PAGES = [ROOT / "README.md", *(page for page in DOCS if page.parent == ROOT / "docs")]
_PROGRAM = re.compile(r"^(?:\.venv/bin/)?xrlflow (?=[a-z])")
_CHOSEN = re.compile(r"\b(?!NAME\b)[A-Z]{3,}\b|\b[ABC]\b|\.\.\.")
# What takes minutes, or reads logs of an hour.
_NOT_RUN = ("train", "passes", "doctor", "rules", "plot")


def blocks(page: Path) -> Iterator[tuple[str, str]]:
    """The language and the text of the examples on a page."""
    yield from ((language.strip(), text) for language, text in FENCE.findall(page.read_text()))


def commands(page: Path) -> list[str]:
    """The lines of a page that begin with `xrlflow`, without comments."""
    found = []
    for language, text in blocks(page):
        if not language:
            lines = text.replace("\\\n", " ").splitlines()
            found += [re.sub(r"\s+#.*", "", line) for line in lines if _PROGRAM.match(line)]
    return found


def python(page: Path) -> str:
    """The lines of Python on a page, but for rules, which `test_examples` runs with what they import."""
    return "\n".join(text for language, text in blocks(page) if language == "python" and "class " not in text)


ALL = sorted({line for page in PAGES for line in commands(page)})
RUN = [
    line
    for line in ALL
    if not _CHOSEN.search(line) and not re.search(r"[|<]", line) and shlex.split(line)[1] not in _NOT_RUN
    and "out/" not in line  # what `make demo` does
]  # fmt: skip
PYTHON = {page.name: programs for page in PAGES if (programs := python(page))}


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The working folder: `model.onnx` of open dimensions, which is fast to optimise, and others like it."""
    small = model(
        "agraph (float[N,3,H,W] input) => (float[N,3,1,1] y) { p = GlobalAveragePool(input) y = Tanh(p) }"
    )
    for name in ("model.onnx", "models/b/encoder.onnx"):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        onnx.save(small, tmp_path / name)
    (tmp_path / "list.txt").write_text("model.onnx\n")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("xrlflow.batch.Processes", lambda workers: Here())
    return tmp_path


@pytest.mark.usefixtures("brief_comparisons")
@pytest.mark.parametrize("line", RUN)
def test_a_command_runs(line: str, folder: Path) -> None:
    words = shlex.split(line)[1:]
    if "aarch64-linux-gnu" in words and shutil.which("aarch64-linux-gnu-gcc") is None:
        pytest.skip("needs aarch64-linux-gnu-gcc")
    if "hybrid" in words:
        pytest.importorskip("tvm")
    ran = CliRunner().invoke(app, words)
    assert ran.exit_code == 0, ran.output
    written = Path(words[words.index("-o") + 1])
    assert any(written.iterdir()) if written.is_dir() else written.stat().st_size


def test_commands_are_run() -> None:
    assert {shlex.split(line)[1] for line in RUN} == {"optimize", "optimize-all"}
    assert len(RUN) >= 6


@pytest.mark.parametrize("line", ALL)
def test_options_are_those_of_the_command(line: str) -> None:
    words = line.split(" | ")[0].replace("[", " ").replace("]", " ").split()
    command: Any = typer.main.get_command(app)
    for word in words[1:]:
        if not hasattr(command, "commands"):
            break
        command = command.commands[word]
    known = {
        option for parameter in command.params for option in (*parameter.opts, *parameter.secondary_opts)
    }
    used = {word.partition("=")[0] for word in words if re.match(r"--?[a-z]", word)}
    assert used <= known | {"--help"}


def carried(folder: Path) -> None:
    """`fast.onnx` with its kernels."""
    api.optimize(
        "model.onnx", backend="hybrid", measure=False, search="greedy", cost="roofline",
        shapes={"input": (1, 3, 8, 8)},
    ).save(folder / "fast.onnx")  # fmt: skip


def compiled(folder: Path) -> None:
    """`fast.so`, compiled for the sizes of `image`."""
    api.optimize(
        "model.onnx", backend="tvm", measure=False, search="greedy", cost="roofline",
        shapes={"input": (1, 3, 8, 8)},
    ).save(folder / "fast.so")  # fmt: skip


@pytest.mark.usefixtures("brief_comparisons")
@pytest.mark.parametrize("name", whole(PYTHON, [*PYTHON.keys() - {"python.md"}]))
def test_a_program_runs(name: str, folder: Path) -> None:
    given: dict[str, Any] = {}
    if name == "kernels.md":
        pytest.importorskip("tvm")
        carried(folder)
    elif name == "tvm.md":
        pytest.importorskip("tvm")
        compiled(folder)
        given["image"] = np.zeros((1, 3, 8, 8), np.float32)
    elif name == "passes.md":
        pytest.importorskip("jax")
        import jax

        given.update(jax=jax, Path=Path, step=jax.numpy.tanh, arguments=(np.zeros(4, np.float32),))
    exec(compile(PYTHON[name], name, "exec"), given)


def test_programs_are_run() -> None:
    assert set(PYTHON) == {"README.md", "kernels.md", "passes.md", "python.md", "tvm.md"}


def test_a_library_is_named_by_a_path() -> None:
    """The system's loader does not look for a bare name in the working folder."""
    named = {
        name
        for page in PAGES
        for name in re.findall(r'register_custom_ops_library\("([^"]+)"\)', page.read_text())
    }
    assert named
    assert all("/" in name for name in named)
