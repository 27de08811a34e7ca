"""Runs in separate processes, from several threads and after a fork: each has its own outputs."""

from __future__ import annotations

import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest

from tests.verify.models import model
from xrlflow.verify.isolated import run_isolated
from xrlflow.workers.process import environment

pytestmark = pytest.mark.process

FEEDS = {"x": np.array([1, -2, 3], np.float32)}


def outputs(operator: str) -> list[list[float]]:
    """Of 30 runs."""
    proto = model(f"g (float[3] x) => (float[3] y) {{ y = {operator}(x) }}")
    return [run_isolated(proto, FEEDS)[0].tolist() for _ in range(30)]


def test_threads_do_not_get_each_others_outputs() -> None:
    with ThreadPoolExecutor(2) as threads:
        negative, absolute = threads.map(outputs, ["Neg", "Abs"])
    assert negative == [[-1, 2, -3]] * 30
    assert absolute == [[1, 2, 3]] * 30


FORKED = """
import os, sys
from tests.verify.test_isolated import outputs
assert outputs("Relu") == [[1, 0, 3]] * 30
copy = os.fork()
if copy == 0:
    sys.exit(outputs("Neg") != [[-1, 2, -3]] * 30)
assert outputs("Abs") == [[1, 2, 3]] * 30
_, status = os.waitpid(copy, 0)
assert status == 0
assert outputs("Relu") == [[1, 0, 3]] * 30
"""


def test_a_forked_copy_has_a_process_of_its_own() -> None:
    """A program of one thread, as nobody may fork a process that has more."""
    subprocess.run([sys.executable, "-c", FORKED], check=True, env=environment(), timeout=120.0)
