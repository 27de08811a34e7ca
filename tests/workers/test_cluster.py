"""A real cluster of two nodes on this machine: workers are killed, a node leaves, the head starts again. Nothing is lost,
nothing is done twice in the results, and they are those of one machine.
"""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import closing
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pytest
import ray
from ray.cluster_utils import Cluster as Nodes
from typer.testing import CliRunner

from tests.workers.hands import Dying, NodeOf, Squarer, Sum, broken
from xrlflow import api
from xrlflow.cli import app
from xrlflow.options import OptionError
from xrlflow.workers import Crew, Kind, WorkerError
from xrlflow.workers.cluster import Cluster, ClusterError

ROOT = Path(__file__).resolve().parents[2]
NODE = {"num_cpus": 1, "resources": {"latency": 1}, "object_store_memory": 80 << 20}


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


@pytest.fixture(scope="module", autouse=True)
def ours() -> Iterator[None]:
    """Workers find these tests, take one thread each, and all processes are gone at the end."""
    with pytest.MonkeyPatch.context() as patch:
        paths = [str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])]
        patch.setenv("PYTHONPATH", os.pathsep.join(paths))
        patch.setenv("RAY_USAGE_STATS_ENABLED", "0")
        before = set(psutil.pids())
        yield
        left = [p for p in psutil.process_iter() if p.pid not in before and is_of_a_cluster(p)]
        _, left = psutil.wait_procs(left, timeout=20)
        assert [p.name() for p in left] == []


def is_of_a_cluster(process: psutil.Process) -> bool:
    with contextlib.suppress(psutil.Error):
        command = " ".join([process.name(), *process.cmdline()])
        return "ray::" in command or "raylet" in command or "gcs_server" in command or "serve_forks" in command
    return False


@pytest.fixture(scope="module")
def nodes(ours: None) -> Iterator[Nodes]:
    made = Nodes(initialize_head=True, head_node_args=NODE)
    made.add_node(**NODE)
    yield made
    made.shutdown()


@pytest.fixture
def cluster(nodes: Nodes) -> Iterator[Cluster]:
    with closing(Cluster(nodes.address)) as joined:
        yield joined


def actors() -> list[psutil.Process]:
    """The processes of workers, on all nodes."""
    found = []
    for process in psutil.process_iter():
        with contextlib.suppress(psutil.Error):
            if process.cmdline()[:1] and process.cmdline()[0].startswith("ray::Body"):
                found.append(process)
    return found


def test_orders_are_answered_once_each(cluster: Cluster) -> None:
    assert cluster.cores == 2
    assert cluster.measuring == 2
    with Crew(cluster, Squarer, 2) as crew:
        found = dict(crew.work(iter(range(9))))
        assert {number: square for number, (square, _) in found.items()} == {n: n * n for n in range(9)}
        assert os.getpid() not in {process for _, process in found.values()}
    with (
        Crew(cluster, Squarer, 1, "squarer") as crew,
        pytest.raises(WorkerError, match="^squarer 0 failed: ValueError: -1 is negative"),
    ):
        list(crew.work(iter([-1])))
    with pytest.raises(WorkerError, match="failed: ValueError: there is no hand"):
        list(Crew(cluster, broken, 1).work(iter([1])))
    with pytest.raises(WorkerError, match=r"is lost: .*3 workers were lost over one order"):
        list(Crew(cluster, Squarer, 1).work(iter(["die"])))


def test_large_arrays_go_once_to_a_node(cluster: Cluster) -> None:
    array = np.ones(1 << 18, np.float32)
    with Crew(cluster, Squarer, 2, kind=Kind.WAIT) as crew:
        found = dict(crew.work(Sum(array, number) for number in range(6)))
        assert [found[n][0] for n in range(6)] == [array.size + n for n in range(6)]
    assert len(cluster._sent) == 1
    with pytest.raises(ValueError, match="read-only"):
        array[0] = 2.0  # others have it already


def test_a_killed_worker_is_replaced(cluster: Cluster, tmp_path: Path) -> None:
    with Crew(cluster, partial(Dying, str(tmp_path / "died")), 2) as crew:
        assert sorted(crew.work(iter(range(8)))) == [(n, n) for n in range(8)]
    assert (tmp_path / "died").exists()


def test_one_measures_on_a_node(cluster: Cluster) -> None:
    with Crew(cluster, partial(NodeOf, 0.2), 4, "runner", Kind.MEASURE) as crew:
        found = [answer for _, answer in crew.work(iter(range(8)))]
    by_node: dict[str, list[tuple[float, float]]] = {}
    for node, begin, end in found:
        by_node.setdefault(node, []).append((begin, end))
    assert len(by_node) == 2
    for times in by_node.values():
        times.sort()
        assert all(end <= begin for (_, end), (begin, _) in zip(times, times[1:]))


def test_a_node_that_leaves(cluster: Cluster, nodes: Nodes, tmp_path: Path) -> None:
    leaving = nodes.add_node(num_cpus=2, object_store_memory=80 << 20)
    nodes.wait_for_nodes()
    assert cluster.cores == 4
    with Crew(cluster, partial(Squarer, str(tmp_path), 0.1), 4) as crew:
        answers = crew.work(iter(range(60)))
        found = [next(answers) for _ in range(12)]
        nodes.remove_node(leaving, allow_graceful=False)
        found += answers
    assert sorted((number, square) for number, (square, _) in found) == [(n, n * n) for n in range(60)]
    # An order may be carried out a second time if its answer was lost, and only then.
    times = Counter(path.name.partition(".")[0] for path in tmp_path.iterdir())
    assert sum(times.values()) <= 60 + 2
