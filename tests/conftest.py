"""What several tests report together, and what they share."""

from __future__ import annotations

import signal
from collections import Counter
from collections.abc import Iterator
from importlib.util import find_spec
from typing import Any

import pytest

# Tests of what an extra installs are left out where it is not installed (`make test-python`). In the environment of
# `make test` all of it is (tests/test_install.py).
EXTRAS = {
    "torch": ("learn", "rl", "tuning"),
    "tvm": ("backends/tvm", "bench/test_tuning.py", "tuning"),
    "jax": ("models/test_hlo.py", "passes/test_xla.py"),
    "matplotlib": ("report/test_plots.py",),
    "gymnasium": ("passes/test_agents.py", "passes/test_environment.py", "passes/test_orders.py"),
    "psycopg": ("test_postgres.py",),
    "mkdocs": ("repository/test_docs.py",),
}
collect_ignore = [path for package, paths in EXTRAS.items() if find_spec(package) is None for path in paths]


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


@pytest.fixture
def reference_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    """Results do not depend on the machine that runs the tests."""
    from xrlflow.cost import Machine

    monkeypatch.setattr("xrlflow.pipeline.prepare.calibrated", lambda threads: Machine.reference())
