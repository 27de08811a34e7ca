"""Models for batches, and an executor that does the jobs in this process."""

from __future__ import annotations

from collections.abc import Callable, Generator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest

from tests.rules.harness import model
from xrlflow.batch import Job, ProgressCallback, Row, run

FAST: dict[str, Any] = {
    "search": "greedy",
    "cost": "roofline",
    "backend": "onnxruntime",
    "measure": False,
    "time_limit": 20.0,
}


@pytest.fixture(autouse=True)
def lock_of_its_own(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """Tests that run at once do not wait for each other."""
    path = tmp_path / "measuring.lock"
    monkeypatch.setenv("XRLFLOW_MEASURING_LOCK", str(path))
    return path


def clumsy(factor: float = 1.0, width: int = 8) -> onnx.ModelProto:
    """A model with operators to spare."""
    return model(
        f"agraph (float[N,{width}] x) => (float[N,{width}] y) {{"
        " a = Transpose<perm=[1,0]>(x)\n b = Transpose<perm=[1,0]>(a)\n c = MatMul(b, w)\n"
        " d = Identity(c)\n y = Relu(d) }",
        w=factor * np.eye(width, dtype=np.float32),
    )


@pytest.fixture
def put(tmp_path: Path) -> Callable[..., Path]:
    """Writes models into folders of the test's: `put("in/a/x.onnx", 2.0)`."""

    def write(name: str, factor: float = 1.0) -> Path:
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        onnx.save(clumsy(factor), path)
        return path

    return write


class Here:
    """Does jobs in this process. `ran`: their names. `stop_after`: Ctrl-C after so many."""

    def __init__(self, stop_after: int | None = None) -> None:
        self.ran: list[str] = []
        self.stop_after = stop_after

    def __call__(self, jobs: Sequence[Job], report: ProgressCallback) -> Generator[Row, None, None]:
        for job in jobs:
            if len(self.ran) == self.stop_after:
                raise KeyboardInterrupt
            self.ran.append(job.name)
            yield run(job, lambda text, name=job.name: report(name, text))  # type: ignore[misc]
