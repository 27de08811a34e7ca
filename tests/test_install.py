"""What is installed: every import is declared, and a wheel works where nothing else is."""

from __future__ import annotations

import ast
import json
import os
import re
import shutil
import subprocess
import sys
import tarfile
import venv
import zipfile
from collections.abc import Iterator
from importlib.metadata import Distribution, distribution, packages_distributions
from importlib.util import find_spec
from pathlib import Path

import onnx
import pytest
from packaging.requirements import Requirement

from conftest import EXTRAS as TESTED
from tests.rules.harness import model

pytestmark = pytest.mark.process

ROOT = Path(__file__).parents[1]
# Which of our own modules need which extra; all others need none.
EXTRAS = {
    "train": (
        "xrlflow/learn",
        *(f"xrlflow/passes/{name}" for name in ("agent", "dqn", "environment", "lessons", "play", "ppo")),
        "xrlflow/rl",
    ),
    "tvm": ("xrlflow/backends/tvm", "xrlflow/tuning"),
    "postgres": ("xrlflow/storage/postgres",),
    "xla": ("models/hlo/", "xrlflow/passes/worker"),
    "models": ("models",),
    "plots": ("xrlflow/report/plots",),
    "ray": ("xrlflow/workers/remote", "xrlflow/workers/cluster"),
}
# Packages that are imported by another name than they are installed by (where they are not installed).
BY_OTHER_NAMES = {
    "google.protobuf": ["protobuf"],
    "tvm": ["apache-tvm"],
    "tvm_ffi": ["apache-tvm-ffi"],
    "xgboost": ["xgboost-cpu"],
}
# Of packages with an extra, the modules that need none: what a search with the agent that is shipped loads.
PLAIN = {
    f"xrlflow/{name}.py"
    for name in (
        "rl/__init__", "rl/features", "rl/mcts", "rl/network", "rl/parameters", "rl/pretrained/__init__",
        "rl/situation", "rl/states", "rl/strategy",
    )
}  # fmt: skip


def normal(name: str) -> str:
    return re.sub(r"[-_.]+", "-", name).lower()


def required(of: Distribution, extra: str | None = None) -> set[str]:
    """The distributions that one asks for by its metadata, here and now; with an extra what that adds to them."""
    found = set()
    for text in of.requires or ():
        wanted = Requirement(text)
        always = wanted.marker is None or wanted.marker.evaluate({"extra": ""})
        # An extra may be empty with an old Python, for which its packages are not made.
        given = {"extra": extra or "", "python_version": "3.13"}
        if always if extra is None else not always and wanted.marker.evaluate(given):
            found.add(normal(wanted.name))
    return found


def imports(path: Path) -> Iterator[str]:
    """The names of packages that a module imports, but for types alone."""

    def visit(node: ast.AST) -> Iterator[str]:
        if isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING":
            return
        if isinstance(node, ast.Import):
            yield from (alias.name.split(".")[0] for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.level == 0 and node.module:
            yield "google.protobuf" if node.module.startswith("google.") else node.module.split(".")[0]
        for child in ast.iter_child_nodes(node):
            yield from visit(child)

    return visit(ast.parse(path.read_text()))


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A wheel, made from a source distribution."""
    folder = tmp_path_factory.mktemp("dist")
    copy = folder / "copy"  # a build leaves folders behind
    for name in ("xrlflow", "rewrite_rules"):
        shutil.copytree(ROOT / name, copy / name, ignore=shutil.ignore_patterns("__pycache__"))
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, copy / name)

    def build(kind: str, where: Path) -> None:
        code = f"import sys, setuptools.build_meta as b; b.build_{kind}(sys.argv[1])"
        subprocess.run([sys.executable, "-c", code, folder], cwd=where, check=True, capture_output=True)

    build("sdist", copy)
    (source,) = folder.glob("*.tar.gz")
    with tarfile.open(source) as archive:
        archive.extractall(folder / "source", filter="data")
    build("wheel", next((folder / "source").iterdir()))
    return next(folder.glob("*.whl"))


@pytest.fixture(scope="module")
def ours(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Distribution:
    """The wheel, unpacked: its metadata are those of the sources at hand."""
    folder = tmp_path_factory.mktemp("unpacked")
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(folder)
    return Distribution.at(next(folder.glob("*.dist-info")))


def test_every_import_is_declared(ours: Distribution) -> None:
    core = required(ours)
    more = {extra: required(ours, extra) for extra in EXTRAS}
    owners = {**BY_OTHER_NAMES, **packages_distributions()}
    missing = []
    for path in [
        *ROOT.glob("xrlflow/**/*.py"),
        *ROOT.glob("rewrite_rules/*.py"),
        *ROOT.glob("models/**/*.py"),
    ]:
        name = path.relative_to(ROOT).as_posix()
        allowed = set(core)
        for extra, places in EXTRAS.items():
            if name.startswith(places) and name not in PLAIN:
                allowed |= more[extra]
        for package in set(imports(path)):
            if package in sys.stdlib_module_names or package in ("xrlflow", "rewrite_rules", "models"):
                continue
            if not {normal(d) for d in owners.get(package, [package])} & allowed:
                missing.append(f"{name} imports {package}")
    assert not missing


def test_the_core_needs_no_heavy_packages(ours: Distribution) -> None:
    core = closure(ours)
    heavy = {
        "torch",
        "torch-geometric",
        "jax",
        "gymnasium",
        "tensorboard",
        "onnxscript",
        "transformers",
        "apache-tvm",
    }
    assert not core & heavy
    assert {"numpy", "onnx", "onnxruntime"} <= core


def closure(of: Distribution) -> set[str]:
    """All distributions that one needs, directly or not."""
    found: set[str] = set()
    waiting = required(of)
    while waiting:
        name = waiting.pop()
        if name not in found:
            found.add(name)
            waiting |= required(distribution(name))
    return found


@pytest.fixture(scope="module")
def elsewhere(ours: Distribution, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An environment that has the wheel and what it requires, and nothing else; its interpreter.

    Packages are linked to, not fetched: this does not depend on a network.
    """
    folder = tmp_path_factory.mktemp("env")
    venv.create(folder, with_pip=False, symlinks=True)
    (site,) = folder.glob("lib/python*/site-packages")
    shutil.copytree(ours.locate_file(""), site, dirs_exist_ok=True)
    for name in closure(ours):
        files = distribution(name).files or ()
        for top in {file.parts[0] for file in files} - {"..", "__pycache__"}:
            if not (site / top).exists():
                (site / top).symlink_to(Path(str(distribution(name).locate_file(top))).resolve())
    return folder / "bin" / "python"


def run(python: Path, where: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    code = "from xrlflow.cli import main; main()"
    environment = {k: v for k, v in os.environ.items() if not k.startswith("PYTHON")}
    return subprocess.run(
        [python, "-I", "-c", code, *arguments], cwd=where, env=environment, capture_output=True, text=True
    )


def test_the_wheel_has_what_it_needs_and_no_more(wheel: Path) -> None:
    with zipfile.ZipFile(wheel) as archive:
        names = set(archive.namelist())
    assert {name.split("/")[0] for name in names if ".dist-info" not in name} == {"xrlflow", "rewrite_rules"}
    assert {"xrlflow/py.typed", "rewrite_rules/py.typed", "xrlflow/rl/pretrained/agent.safetensors"} <= names
    assert any(name.endswith("licenses/LICENSE") for name in names)


def test_the_wheel_optimises_where_nothing_else_is(elsewhere: Path, tmp_path: Path) -> None:
    proto = model(
        "agraph (float[2,3,4] x) => (float[2,3,4] y) { a = Transpose<perm=[0,2,1]>(x) b = Exp(a) "
        "c = Relu(b) y = Transpose<perm=[0,2,1]>(c) }"
    )
    onnx.save(proto, tmp_path / "in.onnx")
    done = run(
        elsewhere,
        tmp_path,
        "optimize",
        "in.onnx",
        "-o",
        "out.onnx",
        "--cost",
        "roofline",
        "--no-measure",
        "--json",
    )
    assert done.returncode == 0, done.stderr
    report = json.loads(done.stdout)
    assert (report["search"], report["verified"]) == ("xrlflow", True)
    assert [node.op_type for node in onnx.load(tmp_path / "out.onnx").graph.node] == ["Exp", "Relu"]


@pytest.mark.parametrize(
    ("arguments", "extra"),
    [
        (("train", "in.onnx", "-o", "agent.safetensors"), "train"),
        (("optimize", "in.onnx", "-o", "out.onnx", "--train-steps", "10"), "train"),
        (("tune", "in.onnx", "-o", "out.so"), "tvm"),
        (("optimize", "in.onnx", "-o", "out.so", "--backend", "tvm"), "tvm"),
        (("optimize", "in.onnx", "-o", "out.onnx", "--store", "postgresql://host/database"), "postgres"),
    ],
)
def test_what_needs_an_extra_says_so(
    elsewhere: Path, tmp_path: Path, arguments: tuple[str, ...], extra: str
) -> None:
    onnx.save(model("agraph (float[2] x) => (float[2] y) { y = Exp(x) }"), tmp_path / "in.onnx")
    done = run(elsewhere, tmp_path, *arguments)
    assert done.returncode == 2
    assert f"pip install 'xrlflow[{extra}]'" in " ".join(done.stderr.split())
    assert "Traceback" not in done.stderr
    assert [f.name for f in tmp_path.iterdir()] == ["in.onnx"]


def test_nothing_is_left_out_where_we_develop() -> None:
    if find_spec("ruff") is not None:
        assert all(find_spec(package) for package in TESTED)
