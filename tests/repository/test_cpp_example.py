"""The example in C++: it is built by the commands in it, and runs a model with its kernels.

Where ONNXRUNTIME_HOME names a folder with ONNX Runtime's headers, they are taken. Its Python package has none: then a
stand-in for the header is, with the library of the package.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
from pathlib import Path

import numpy as np
import onnx
import onnxruntime as ort
import pytest

pytest.importorskip("tvm")

from tests.backends.tvm.library.carried import TEXTS, built, parsed, with_another_body
from xrlflow.backends.tvm import detect

ROOT = Path(__file__).resolve().parents[2]
EXAMPLE = ROOT / "examples" / "cpp"
pytestmark = [
    pytest.mark.process,
    pytest.mark.skipif(shutil.which("c++") is None, reason="needs a C++ compiler"),
]


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder as ONNX Runtime's releases have it."""
    if given := os.environ.get("ONNXRUNTIME_HOME"):
        return Path(given)
    folder = tmp_path_factory.mktemp("onnxruntime")
    (folder / "include").symlink_to(Path(__file__).parent / "stand_in")
    (folder / "lib").mkdir()
    package = Path(ort.__file__).parent / "capi"
    libraries = [file for file in package.glob("libonnxruntime.so*") if "providers" not in file.name]
    if not libraries:
        pytest.skip("this package of ONNX Runtime has no libonnxruntime.so: set ONNXRUNTIME_HOME")
    for name in ("libonnxruntime.so", "libonnxruntime.so.1", libraries[0].name):
        (folder / "lib" / name).symlink_to(libraries[0])
    return folder


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model whose body computes something else than its kernels, so that it shows which of them ran."""
    folder = tmp_path_factory.mktemp("model")
    library, made = built({"symbolic": parsed(TEXTS["symbolic"].replace("N", "1"))}, detect(None, 2, None))
    onnx.save(with_another_body(made["symbolic"], library.domain), folder / "fast.onnx")
    library.save(folder / "fast.so")
    return folder / "fast.onnx"


def check(program: Path, model: Path) -> None:
    def said(*arguments: str) -> str:
        return subprocess.run(
            [str(program), *arguments],
            cwd=model.parent,
            capture_output=True,
            text=True,
            check=True,
            timeout=60,
        ).stdout

    def total(text: str) -> float:
        (found,) = re.findall(r"^y: 8 elements, their sum is (\S+)$", text, re.MULTILINE)
        return float(found)

    with_kernels = said(str(model))
    assert f"with the kernels of {model.with_suffix('.so')}" in with_kernels
    assert said(model.name, "fast.so") == with_kernels.replace(f"{model.parent}/", "")
    np.testing.assert_allclose(total(with_kernels), 8 * np.tanh(0.25), rtol=1e-5)
    np.testing.assert_allclose(total(said(str(model), "none.so")), 8 / (1 + np.exp(-0.25)), rtol=1e-5)
    wrong = subprocess.run([str(program), "none.onnx"], capture_output=True, text=True, check=False)
    assert wrong.returncode == 1
    assert "error: " in wrong.stderr


def test_the_command_in_the_example(home: Path, model: Path, tmp_path: Path) -> None:
    (command,) = re.findall(r"^//     (c\+\+ .*)$", (EXAMPLE / "run.cpp").read_text(), re.MULTILINE)
    shutil.copy(EXAMPLE / "run.cpp", tmp_path)
    subprocess.run(
        f"{command} -Wall -Wextra -Werror", shell=True, cwd=tmp_path, check=True,
        env={**os.environ, "ONNXRUNTIME_HOME": str(home)},
    )  # fmt: skip
    check(tmp_path / "run", model)


@pytest.mark.skipif(shutil.which("cmake") is None, reason="needs CMake")
def test_the_example_with_cmake(home: Path, model: Path, tmp_path: Path) -> None:
    for arguments in (
        ["-S", str(EXAMPLE), "-B", str(tmp_path), f"-DONNXRUNTIME_HOME={home}"],
        ["--build", str(tmp_path)],
    ):
        subprocess.run(["cmake", *arguments], check=True, capture_output=True)
    check(tmp_path / "run", model)
