"""What several tests report together, and what they share."""

from __future__ import annotations

import contextlib
import functools
import gc
import os
import shutil
import signal
import tempfile
from collections import Counter
from collections.abc import Callable, Generator, Iterator
from importlib.util import find_spec
from pathlib import Path
from pkgutil import resolve_name
from typing import Any

import pytest

from xrlflow.backends.children import Child
from xrlflow.storage.sqlite import cache_directory
from xrlflow.workers import ProcessWorker

# Tests of what an extra installs are left out where it is not installed (`make test-python`). In the environment of
# `make test` all of it is (tests/test_install.py).
EXTRAS = {
    "torch": ("tests/learn", "tests/rl", "tests/tuning", "bench/tests"),
    "tvm": ("tests/backends/tvm", "tests/tuning", "bench/tests"),
    "jax": ("tests/models/test_hlo.py", "tests/passes/test_xla.py", "bench/tests"),
    "matplotlib": ("tests/report/test_plots.py", "bench/tests"),
    "gymnasium": (
        "tests/passes/test_agents.py",
        "tests/passes/test_environment.py",
        "tests/passes/test_orders.py",
    ),
    "ray": ("tests/workers/test_cluster.py",),
    "psycopg": ("tests/storage/test_postgres.py",),
    "mkdocs": ("tests/repository/test_docs.py",),
}
collect_ignore = [path for package, paths in EXTRAS.items() if find_spec(package) is None for path in paths]


def pytest_configure(config: pytest.Config) -> None:
    """Tests have a cache of their own, with the user's calibrations and downloads. What they measure beside other tests
    is not kept, and what the user has measured does not decide whether they pass."""
    if hasattr(config, "workerinput"):  # the processes of pytest-xdist have the environment of the first
        return
    known = cache_directory()
    folder = Path(tempfile.mkdtemp(prefix="xrlflow-tests-"))
    before = os.environ.get("XDG_CACHE_HOME")
    os.environ["XDG_CACHE_HOME"] = str(folder)
    cache_directory().mkdir(parents=True)
    for calibration in known.glob("machine-*.json"):
        shutil.copy(calibration, cache_directory())
    downloads = known / "wheels"
    downloads.mkdir(parents=True, exist_ok=True)
    (cache_directory() / "wheels").symlink_to(downloads)

    def remove() -> None:
        if before is None:
            del os.environ["XDG_CACHE_HOME"]
        else:
            os.environ["XDG_CACHE_HOME"] = before
        shutil.rmtree(folder)

    config.add_cleanup(remove)


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Generator[None, Any, Any]:
    """Collecting imports packages with millions of objects. To look for garbage among them, again and again, would take
    a third of its time."""
    gc.disable()
    try:
        return (yield)
    finally:
        gc.enable()


def pytest_terminal_summary(terminalreporter: Any) -> None:
    """The share of ONNX's backend models in which a substitution fired, and the rules that fired nowhere."""
    totals: Counter[str] = Counter()
    fired: set[str] = set()
    for report in terminalreporter.getreports("passed"):
        for name, value in report.user_properties:
            if name == "backend models":
                totals.update(value["counts"])
                fired.update(value["fired"])
    if not totals:
        return
    from rewrite_rules import LIBRARY

    nowhere = sorted({r.name for r in LIBRARY if r.backend in (None, "onnxruntime")} - fired)
    terminalreporter.write_sep("-", "ONNX backend models")
    terminalreporter.write_line(
        f"{totals['models']} models, {totals['runnable']} run in ONNX Runtime; a substitution fired in "
        f"{totals['rewritten']} ({100 * totals['rewritten'] / max(1, totals['runnable']):.1f}%)"
    )
    terminalreporter.write_line(f"rules that fired nowhere: {', '.join(nowhere) or 'none'}")


@pytest.fixture
def python_handles_interrupts() -> Iterator[None]:
    """Ctrl-C is a KeyboardInterrupt, also where the tests run in the background, and nothing stays behind."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    after = signal.signal(signal.SIGINT, before)
    assert after is signal.default_int_handler


@pytest.fixture(scope="session", autouse=True)
def reference_machine() -> Iterator[None]:
    """Results do not depend on the machine that runs the tests. Besides, it is never quiet then, so that what was
    measured of it is not kept: each optimisation would measure it again, for seconds."""
    from xrlflow.cost import Machine

    with pytest.MonkeyPatch.context() as patch:
        for module in ("placement", "prepare"):
            patch.setattr(f"xrlflow.pipeline.{module}.calibrated", lambda threads: Machine.reference())
        yield


@pytest.fixture(scope="session", autouse=True)
def files_need_not_outlive_a_power_cut() -> Iterator[None]:
    """A file is not waited for until it is on the disk: that takes milliseconds, for thousands of files."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(os, "fsync", lambda descriptor: None)
        yield


def _in(folder: str) -> None:
    """Files without a name of their own come into this folder."""
    os.environ["TMPDIR"] = tempfile.tempdir = folder


@pytest.fixture(scope="session", autouse=True)
def compilers_serve_several_tests() -> Iterator[None]:
    """The process that compiles for a run is used again by the next one: it takes seconds to load TVM."""
    begin_call, end = Child._begin, Child.__exit__
    idle: list[ProcessWorker] = []

    def begin(child: Child, function: Callable[..., Any], arguments: tuple[Any, ...]) -> ProcessWorker:
        if child._worker is None and child._processes._variables.keys() == {"TMPDIR"} and idle:
            child._worker = idle.pop()
            child.prepare(functools.partial(_in, child._processes._variables["TMPDIR"]))
        return begin_call(child, function, arguments)

    def leave(child: Child, kind: type[BaseException] | None, *error: Any) -> None:
        kept = child._worker if kind is None and not child._prepares else None
        if kept is not None and not kept.closed and child._processes._variables.keys() == {"TMPDIR"}:
            idle.append(kept)
            child._worker = None
        end(child, kind, *error)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Child, "_begin", begin)
        patch.setattr(Child, "__exit__", leave)
        yield
    for worker in idle:
        worker.close()


# Seconds: of a comparison in this process, and in fresh processes, of which at least three have to start.
_BRIEF = {
    "xrlflow.pipeline.choose.measure": 0.3,
    "xrlflow.pipeline.kernels.measure": 0.3,
    "xrlflow.pipeline.compiled.measure": 0.3,
    "xrlflow.tuning.models.measure": 0.3,
    "xrlflow.backends.tvm.devices.device.interleave": 0.3,
    "xrlflow.pipeline.confirm.measure_in_fresh_processes": 4.0,
}


def _limited(function: Callable[..., Any], most: float) -> Callable[..., Any]:
    @functools.wraps(function)
    def called(*given: Any, time_limit: float, **named: Any) -> Any:
        return function(*given, time_limit=min(time_limit, most), **named)

    return called


@pytest.fixture
def compiled_here(monkeypatch: pytest.MonkeyPatch) -> None:
    """TVM compiles in this process, where a test can put something in its place."""
    for module in ("compiled", "kernels"):
        monkeypatch.setattr(f"xrlflow.pipeline.{module}.Child", lambda **_: contextlib.nullcontext(None))


@pytest.fixture
def brief_comparisons(monkeypatch: pytest.MonkeyPatch) -> None:
    """Models are compared as always, but for a moment: for tests that do not depend on how sure the answer is."""
    for name, seconds in _BRIEF.items():
        monkeypatch.setattr(name, _limited(resolve_name(name), seconds))
    monkeypatch.setattr("xrlflow.backends.onnxruntime.processes._MOST_PROCESSES", 6)
