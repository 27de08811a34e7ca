"""The examination: what works here, and what it says where something does not."""

from __future__ import annotations

import importlib.metadata
import json
import os
import re
import sqlite3
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import psutil
import pytest

import xrlflow
from tests.backends.test_limits import V2, files
from xrlflow.backends.results import Load
from xrlflow.cost.database import Database
from xrlflow.doctor import Finding, Status, disk, examination, machine, software, works
from xrlflow.workers import Processes, ProcessWorker

pytestmark = pytest.mark.process

ROOT = str(Path(xrlflow.__file__).parents[1])
NEEDED = {"ONNX Runtime", "agent", "temporary files", "store on a server"}


def doctor(*arguments: str, **variables: str) -> subprocess.CompletedProcess[str]:
    path = os.pathsep.join(filter(None, [ROOT, variables.pop("path", None), os.environ.get("PYTHONPATH")]))
    return subprocess.run(
        [sys.executable, "-m", "xrlflow.cli", "doctor", *arguments],
        env={**os.environ, "PYTHONPATH": path, **variables}, capture_output=True, text=True, check=False,
    )  # fmt: skip


def found_by(done: subprocess.CompletedProcess[str]) -> dict[str, dict[str, Any]]:
    return {f["name"]: f for f in json.loads(done.stdout)["findings"]}


def test_here_it_works() -> None:
    done = doctor("--json")
    assert done.returncode == 0, done.stdout + done.stderr
    assert json.loads(done.stdout)["works"] is True
    result = found_by(done)
    assert len(result) == len(examination.HERE) + len(examination.APART)
    assert {name for name, f in result.items() if f["needed"]} == NEEDED
    assert result["ONNX Runtime"]["status"] == result["agent"]["status"] == "ok"
    assert all(f["found"] for f in result.values())
    for name, f in result.items():
        assert f["advice"] or f["status"] == "ok", name
    if software._missing(software.EXTRAS["tvm"].modules):
        assert result["TVM"]["status"] == "warn"
    else:
        assert (result["TVM"]["status"], result["C compiler"]["status"]) == ("ok", "ok")


def broken(folder: Path, package: str, code: str) -> str:
    """A package that is found before the one that is installed; the folder to put on the path."""
    (folder / package).mkdir()
    (folder / package / "__init__.py").write_text(code)
    return str(folder)


def test_a_runtime_that_kills_its_process_is_found(tmp_path: Path) -> None:
    """As ONNX Runtime does on a processor that lacks an instruction. TVM is not asked (it would take seconds)."""
    path = broken(tmp_path, "onnxruntime", "import os, signal\nos.kill(os.getpid(), signal.SIGILL)\n")
    broken(tmp_path, "tvm", "raise ImportError('libtvm.so: no such file\\nof that name')\n")
    done = doctor(path=path)
    assert done.returncode == 1
    assert "fail  ONNX Runtime: its process ended by SIGILL\n      -> reinstall" in done.stdout
    assert re.search(r"fail +agent", done.stdout)
    if not software._missing(software.EXTRAS["tvm"].modules):
        assert re.search(r"fail +TVM: \w+: .*libtvm\.so: no such file of that name", done.stdout)
    assert done.stdout.endswith("DOES NOT WORK here.\n")
    assert "Traceback" not in done.stdout + done.stderr


def test_a_package_that_raises_anything_is_one_line(tmp_path: Path) -> None:
    done = doctor(path=broken(tmp_path, "numpy", "raise AttributeError('_ARRAY_API not found')\n"))
    assert done.returncode == 1
    assert done.stderr.splitlines() == [
        "xrlflow: error: a package is broken (AttributeError: _ARRAY_API not found): install xrlflow again"
    ]


def test_what_does_not_end_is_ended(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = broken(tmp_path, "onnxruntime", "import time\ntime.sleep(1000)\n")
    monkeypatch.syspath_prepend(path)
    monkeypatch.setattr(examination, "APART", {"onnx_runtime": examination.APART["onnx_runtime"]})
    monkeypatch.setattr(examination, "HERE", ())
    begin = time.monotonic()
    (finding,) = examination.examine(limit=1.0)
    assert time.monotonic() - begin < 10
    assert (finding.status, finding.found) == (Status.FAIL, "no answer in 1 s")


def test_processes_end_with_the_examination(monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[ProcessWorker] = []
    worker = Processes.worker

    def watched(self: Processes, *arguments: Any) -> ProcessWorker:
        made.append(worker(self, *arguments))
        return made[-1]

    monkeypatch.setattr(Processes, "worker", watched)
    monkeypatch.setattr(examination, "HERE", (examination.Check("one", software.packages),))
    findings = examination.examine()
    next(findings)
    assert not made
    next(findings)
    findings.close()
    assert len(made) == len(examination.APART)
    assert not any(psutil.pid_exists(worker.process.pid) for worker in made)


def test_a_check_that_raises_is_a_finding() -> None:
    def failing() -> Finding:
        raise OSError("no\nluck")

    result = examination._checked(examination.Check("it", failing, "do something", needed=True))
    assert result == Finding("it", Status.FAIL, "OSError: no luck", "do something", needed=True)
    assert not works([result])
    assert works([Finding("it", Status.FAIL, "", "do something")])


def test_extras_are_those_of_the_package() -> None:
    declared = re.search(
        r"^\[project.optional-dependencies\]\n(.*?)^\[",
        (Path(ROOT) / "pyproject.toml").read_text(),
        re.M | re.S,
    )
    assert declared is not None
    names = set(re.findall(r"^(\w+) = ", declared[1], re.M)) - {"all", "docs", "dev", "release", "test"}
    assert set(software.EXTRAS) == names


def test_a_package_that_is_not_installed_is_no_error(monkeypatch: pytest.MonkeyPatch) -> None:
    def none(name: str) -> str:
        raise importlib.metadata.PackageNotFoundError(name)

    monkeypatch.setattr(software, "version", none)
    assert "xrlflow (on the path)" in software.packages().found
    monkeypatch.setattr(software, "_missing", lambda modules: list(modules))
    result = software.extras()
    assert result.found.startswith("installed: none; not: train (agents of your own)")
    assert "xrlflow[train,tvm" in result.advice
    assert software.kernels().status is Status.WARN
    monkeypatch.setattr(software.shutil, "which", lambda name: None)
    assert (software.compiler().status, software.compiler().found) == (Status.WARN, "none")


# --- the machine ---


@pytest.mark.parametrize(
    ("quota", "stat", "status", "word"),
    [
        ("max 100000", "", "ok", "by default"),
        ("200000 100000", "nr_periods 1000\nnr_throttled 3\n", "ok", "2 processors by quota"),
        ("50000 100000", "", "warn", "0.5 processors by quota"),
        ("200000 100000", "nr_periods 1000\nnr_throttled 300\n", "warn", "stopped in 300 of 1000"),
    ],
)
def test_quotas(tmp_path: Path, quota: str, stat: str, status: str, word: str) -> None:
    root = files(tmp_path, "0::/\n", V2, **{"": {"cpu.max": quota, "cpu.stat": stat}})
    result = machine.threads(root)
    assert (result.status.value, bool(result.advice)) == (status, status == "warn")
    assert word in result.found


def test_the_limit_of_memory(tmp_path: Path) -> None:
    root = files(tmp_path, "0::/\n", V2, **{"": {"memory.max": str(1 << 30), "memory.current": str(1 << 29)}})
    result = machine.memory(root)
    assert result.status is Status.WARN
    assert "0.5 GiB free of 1.0 GiB" in result.found


def test_frequencies(tmp_path: Path) -> None:
    assert machine.frequency(tmp_path).status is Status.OK
    cpus = tmp_path / "sys/devices/system/cpu"
    for number, governor in enumerate(("performance", "powersave", "powersave")):
        folder = cpus / f"cpu{number}/cpufreq"
        folder.mkdir(parents=True)
        (folder / "scaling_governor").write_text(f"{governor}\n")
    (cpus / "cpufreq").mkdir()
    (cpus / "cpufreq/boost").write_text("1\n")
    result = machine.frequency(tmp_path)
    assert (result.status, result.found) == (
        Status.WARN, "governor performance (1), powersave (2), boost on",
    )  # fmt: skip
    for number in (1, 2):
        (cpus / f"cpu{number}/cpufreq/scaling_governor").write_text("performance")
    assert machine.frequency(tmp_path).status is Status.OK


@pytest.mark.parametrize("disturbed", [False, True])
def test_load(monkeypatch: pytest.MonkeyPatch, disturbed: bool) -> None:
    seen = Load(1.5, 0.5, 0.0, 4, 2, 0.25, disturbed)
    monkeypatch.setattr(machine.system_load, "judge", lambda *_: seen)
    result = machine.load()
    assert result.status is (Status.WARN if disturbed else Status.OK)
    assert "1.5 of 4 processors" in result.found
    assert "0.50 are given to other virtual machines" in result.found


# --- files ---

OPERATORS = disk.STORES[0]


def test_a_store_is_read_and_not_changed(tmp_path: Path) -> None:
    folder = tmp_path / "cache" / "xrlflow"
    assert disk.store(OPERATORS, folder).status is Status.OK
    assert not folder.exists()
    with Database(folder / OPERATORS.file) as database:
        assert len(database) == 0
    before = (folder / OPERATORS.file).read_bytes()
    result = disk.store(OPERATORS, folder)
    assert result.status is Status.OK
    assert "0 measurements" in result.found
    assert (folder / OPERATORS.file).read_bytes() == before


def test_a_store_that_is_something_else(tmp_path: Path) -> None:
    (tmp_path / OPERATORS.file).write_bytes(b"no database" * 100)
    result = disk.store(OPERATORS, tmp_path)
    assert result.status is Status.WARN
    assert ".damaged" in result.advice


@pytest.mark.parametrize("kind", disk.STORES, ids=lambda kind: kind.file)
def test_an_empty_file_is_a_store_without_measurements(kind: disk.StoreFile, tmp_path: Path) -> None:
    (tmp_path / kind.file).touch()
    result = disk.store(kind, tmp_path)
    assert result.status is Status.OK
    assert "0 measurements" in result.found


def test_a_store_that_another_process_writes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(disk, "_PATIENCE", 0.05)
    with Database(tmp_path / OPERATORS.file) as database:
        assert len(database) == 0
    writer = sqlite3.connect(tmp_path / OPERATORS.file, isolation_level=None)
    writer.execute("BEGIN IMMEDIATE")
    result = disk.store(OPERATORS, tmp_path)
    writer.close()
    assert result.status is Status.WARN
    assert "locked" in result.found


def test_a_folder_that_cannot_be_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(disk.os, "access", lambda path, mode: False)
    result = disk.store(OPERATORS, tmp_path / "new")
    assert result.status is Status.WARN
    assert "XDG_CACHE_HOME" in result.advice


@pytest.mark.parametrize("url", ["nonsense", "postgresql://user:secret@127.0.0.1:1/nothing"])
def test_a_server_that_cannot_be_used(url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("psycopg")
    monkeypatch.delenv("XRLFLOW_STORE", raising=False)
    assert disk.server().status is Status.OK
    monkeypatch.setenv("XRLFLOW_STORE", url)
    result = disk.server()
    assert (result.status, result.needed) == (Status.FAIL, True)
    assert "XRLFLOW_STORE" in result.advice
    assert "secret" not in result.found
    assert "server" in disk.store(OPERATORS).found


def test_temporary_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(disk.tempfile, "tempdir", str(tmp_path))
    result = disk.temporary()
    assert result.status is not Status.FAIL
    assert str(tmp_path) in result.found
    monkeypatch.setattr(disk.tempfile, "tempdir", str(tmp_path / "none"))
    result = disk.temporary()
    assert (result.status, result.needed) == (Status.FAIL, True)
    assert "TMPDIR" in result.advice


@pytest.mark.parametrize("saturating", [False, True])
def test_products_of_bytes_are_tried(monkeypatch: pytest.MonkeyPatch, saturating: bool) -> None:
    monkeypatch.setattr("xrlflow.backends.onnxruntime.saturation.saturates", lambda: saturating)
    result = software.products_of_bytes()
    assert result.status is (Status.WARN if saturating else Status.OK)
    assert ("x64quantprecision" in result.advice) == saturating
