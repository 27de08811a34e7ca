"""A real cluster of two nodes on this machine: workers are killed, a node leaves, the head starts again.

Nothing is lost, nothing is done twice in the results, and they are those of one machine.
"""

from __future__ import annotations

import contextlib
import json
import os
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Iterator, Mapping
from contextlib import closing
from dataclasses import replace
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import psutil
import pytest
import torch
from ray.cluster_utils import Cluster as Nodes
from typer.testing import CliRunner

from tests.pipeline.test_library import RIGHT
from tests.rl.training import CONFIG, WORDS, Valleys
from tests.rules.harness import model
from tests.tuning.kernels import calls, matmul, scheduled
from tests.workers.handlers import Dying, NodeOf, Squarer, Sum, broken
from xrlflow import api
from xrlflow.cli import app
from xrlflow.learn.log import Logs
from xrlflow.rl.train import state_path, train
from xrlflow.storage.checkpoint import load_checkpoint
from xrlflow.tuning.pool import Kernel, Pool, PoolOptions
from xrlflow.tuning.worker import Timing
from xrlflow.workers import Kind, WorkerError, WorkerPool
from xrlflow.workers.cluster import Cluster, ClusterError

pytestmark = pytest.mark.cluster

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
        return (
            "ray::" in command or "raylet" in command or "gcs_server" in command or "serve_forks" in command
        )
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
    result = []
    for process in psutil.process_iter():
        with contextlib.suppress(psutil.Error):
            if process.cmdline()[:1] and process.cmdline()[0].startswith("ray::Body"):
                result.append(process)
    return result


@pytest.mark.quick
def test_orders_are_answered_once_each(cluster: Cluster) -> None:
    assert cluster.cores == 2
    assert cluster.measuring == 2
    with WorkerPool(cluster, Squarer, 2) as pool:
        result = dict(pool.work(iter(range(9))))
        assert {number: square for number, (square, _) in result.items()} == {n: n * n for n in range(9)}
        assert os.getpid() not in {process for _, process in result.values()}
    with (
        WorkerPool(cluster, Squarer, 1, "squarer") as pool,
        pytest.raises(WorkerError, match=r"^squarer 0 failed: ValueError: -1 is negative"),
    ):
        list(pool.work(iter([-1])))
    with pytest.raises(WorkerError, match="failed: ValueError: there is no hand"):
        list(WorkerPool(cluster, broken, 1).work(iter([1])))
    with pytest.raises(WorkerError, match=r"is lost: .*3 workers were lost over one task"):
        list(WorkerPool(cluster, Squarer, 1).work(iter(["die"])))


@pytest.mark.whole
def test_large_arrays_go_once_to_a_node(cluster: Cluster) -> None:
    array = np.ones(1 << 18, np.float32)
    with WorkerPool(cluster, Squarer, 2, kind=Kind.WAIT) as pool:
        result = dict(pool.work(Sum(array, number) for number in range(6)))
        assert [result[n][0] for n in range(6)] == [array.size + n for n in range(6)]
    assert len(cluster._sent) == 1
    with pytest.raises(ValueError, match="read-only"):
        array[0] = 2.0  # others have it already


@pytest.mark.whole
def test_a_killed_worker_is_replaced(cluster: Cluster, tmp_path: Path) -> None:
    with WorkerPool(cluster, partial(Dying, str(tmp_path / "died")), 2) as pool:
        assert sorted(pool.work(iter(range(8)))) == [(n, n) for n in range(8)]
    assert (tmp_path / "died").exists()


@pytest.mark.whole
def test_one_measures_on_a_node(cluster: Cluster) -> None:
    with WorkerPool(cluster, partial(NodeOf, 0.2), 4, "runner", Kind.MEASURE) as pool:
        result = [answer for _, answer in pool.work(iter(range(8)))]
    by_node: dict[str, list[tuple[float, float]]] = {}
    for node, begin, end in result:
        by_node.setdefault(node, []).append((begin, end))
    assert len(by_node) == 2
    for times in by_node.values():
        times.sort()
        assert all(end <= begin for (_, end), (begin, _) in pairwise(times))


@pytest.mark.whole
def test_a_node_that_leaves(cluster: Cluster, nodes: Nodes, tmp_path: Path) -> None:
    leaving = nodes.add_node(num_cpus=2, object_store_memory=80 << 20)
    nodes.wait_for_nodes()
    assert cluster.cores == 4
    with WorkerPool(cluster, partial(Squarer, str(tmp_path), 0.1), 4) as pool:
        answers = pool.work(iter(range(60)))
        result = [next(answers) for _ in range(12)]
        nodes.remove_node(leaving, allow_graceful=False)
        result += answers
    assert sorted((number, square) for number, (square, _) in result) == [(n, n * n) for n in range(60)]
    # An order may be carried out a second time if its answer was lost, and only then.
    times = Counter(path.name.partition(".")[0] for path in tmp_path.iterdir())
    assert sum(times.values()) <= 60 + 2


class Killing:
    """A log that kills workers after the first iteration: one now, one in the next iteration."""

    def __init__(self) -> None:
        self.killed: list[int] = []

    def scalars(self, values: Mapping[str, float], step: int) -> None:
        if step == 1:
            self.kill()
            threading.Timer(0.3, self.kill).start()

    def kill(self) -> None:
        process = actors()[-1]
        process.kill()
        self.killed.append(process.pid)

    def close(self) -> None: ...


@pytest.mark.whole
def test_training_is_the_same_to_the_bit(cluster: Cluster, tmp_path: Path) -> None:
    """Two workers here, and two on the cluster, both of which are killed: one in front of an iteration, one within."""
    here, there = tmp_path / "here.safetensors", tmp_path / "there.safetensors"
    config = replace(CONFIG, iterations=3, workers=2)
    alone = train(Valleys(), WORDS, config, here)
    killing = Killing()
    far = train(Valleys(), WORDS, config, there, log=lambda first: Logs(killing), place=cluster)
    assert len(killing.killed) == 2
    assert far.score == alone.score
    assert far.steps == alone.steps
    for mine, theirs in zip(alone.agent.parameters(), far.agent.parameters(), strict=True):
        assert torch.equal(mine, theirs)
    states = [load_checkpoint(state_path(path), "training").tensors for path in (here, there)]
    assert all(np.array_equal(states[0][name], states[1][name]) for name in states[0])


@pytest.mark.whole
def test_proofs_are_the_same(nodes: Nodes, tmp_path: Path) -> None:
    names = ["CancelTransposes", "FoldPadIntoMaxPool"]
    timeless = [{**c.to_json(), "seconds": 0} for c in api.prove_rules(names, jobs=1)]
    result = api.prove_rules(names, ray=nodes.address)
    assert [{**c.to_json(), "seconds": 0} for c in result] == timeless
    (tmp_path / "mine.py").write_text(RIGHT)
    (own,) = api.prove_rules(own=tmp_path / "mine.py", ray=nodes.address)
    assert (own.name, own.proven) == ("MySum", True)


@pytest.mark.whole
def test_kernels_are_built_and_timed(cluster: Cluster, tmp_path: Path) -> None:
    """On both nodes; a worker that is killed in the middle costs no measurement."""
    task = matmul(64)
    candidates = [scheduled(task, step) for step in (1, 2, 4, 8, 16, 32)]
    options = PoolOptions(2, 1, Timing(samples=2, sample_ms=0.2), factory=cluster)
    with Pool(options) as pool:
        outcomes = pool.outcomes(task, [*candidates, calls("abort")])
        result = dict([next(outcomes)])
        actors()[0].kill()
        result |= dict(outcomes)
        assert sorted(result) == list(range(7))
        assert all(result[number].error is None and result[number].seconds for number in range(6))
        assert "the process ended" in (result[6].error or "")
        given = [np.ones((64, 64), np.float32)] * 2
        (product,) = pool.evaluate(task, candidates[0], given)
        assert np.allclose(product, 64.0)
        with pool.built(task.target, [one.mod for one in candidates[:2]]) as built:
            kernels = [kernel for kernel in built if isinstance(kernel, Kernel)]
            rounds = pool.in_turns([*kernels, kernels[0]], Timing(samples=2))
            assert isinstance(rounds, list)
            assert [len(seconds) for seconds in rounds] == [3, 3]


@pytest.mark.whole
def test_a_batch_of_models(nodes: Nodes, tmp_path: Path) -> None:
    """The same files as by one process, and nothing is done again."""
    source = tmp_path / "models"
    source.mkdir()
    for number in range(2):
        onnx.save(small(number), source / f"m{number}.onnx")
    (source / "broken.onnx").write_bytes(b"no model")
    asked: dict[str, Any] = {"search": "greedy", "cost": "roofline", "measure": False, "seed": 0}
    here = api.optimize_all(source, tmp_path / "here", **asked)
    there = api.optimize_all(source, tmp_path / "there", ray=nodes.address, **asked)
    for batch in (here, there):
        assert [row.name for row in batch.failed] == ["broken.onnx"]
    for number in range(2):
        mine, theirs = (tmp_path / f / f"m{number}.onnx" for f in ("here", "there"))
        assert mine.read_bytes() == theirs.read_bytes()
    again = api.optimize_all(source, tmp_path / "there", ray=nodes.address, **asked)
    assert sum(row.earlier for row in again.rows) == 2


def small(number: int) -> onnx.ModelProto:
    return model(
        f"agraph (float[2,{number + 3}] x) => (float[2,{number + 3}] y) {{"
        " a = Transpose<perm=[1,0]>(x)\n b = Relu(a)\n y = Transpose<perm=[1,0]>(b) }"
    )


class Head:
    """A cluster of its own, in processes of its own: a head that can be killed."""

    def __init__(self, port: int, folder: str) -> None:
        self.process = subprocess.Popen(
            [
                Path(sys.executable).with_name("ray"), "start", "--head", "--block", f"--port={port}",
                "--num-cpus=1", "--include-dashboard=false", f"--temp-dir={folder}", "--object-store-memory=80000000",
            ],
            stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, start_new_session=True,
        )  # fmt: skip

    def kill(self) -> None:
        whole = [*psutil.Process(self.process.pid).children(recursive=True), psutil.Process(self.process.pid)]
        for process in whole:
            with contextlib.suppress(psutil.NoSuchProcess):
                process.kill()
        self.process.wait()


DRIVER = """
import sys
from contextlib import closing
from functools import partial
from tests.workers.handlers import Squarer
from xrlflow.workers import WorkerPool
from xrlflow.workers.cluster import Cluster
with closing(Cluster(sys.argv[1])) as cluster, WorkerPool(cluster, partial(Squarer, None, 0.05), 2) as pool:
    for number, (square, _) in pool.work(iter(range(80))):
        print(number, int(square), flush=True)
"""


@pytest.mark.whole
def test_a_head_that_starts_again(ours: None) -> None:
    """The command waits for it, and goes on: each order has one answer."""
    port = free_port()
    with tempfile.TemporaryDirectory(prefix="xr", dir="/tmp") as folder:
        heads = [Head(port, f"{folder}/a")]
        output, errors = Path(folder, "said"), Path(folder, "errors")
        try:
            listening(port)
            with output.open("w") as out, errors.open("w") as err:
                driver = subprocess.Popen(
                    [sys.executable, "-c", DRIVER, f"127.0.0.1:{port}"], cwd=ROOT, stdout=out, stderr=err
                )
            while output.read_text().count("\n") < 10:
                assert driver.poll() is None, errors.read_text()
                time.sleep(0.01)
            heads[0].kill()
            heads.append(Head(port, f"{folder}/b"))
            assert driver.wait(timeout=200) == 0, errors.read_text()
            lines = output.read_text().splitlines()
            assert sorted(lines) == sorted(f"{n} {n * n}" for n in range(80))
        finally:
            for head in heads:
                if head.process.poll() is None:
                    head.kill()


def listening(port: int) -> None:
    """Wait until something listens there."""
    for _ in range(600):
        with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", port)):
            return
        time.sleep(0.1)
    raise AssertionError("nothing listens")


@pytest.mark.whole
def test_what_is_no_cluster_is_said_in_a_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    port = free_port()
    with pytest.raises(ClusterError, match=f"no Ray cluster answers at 127.0.0.1:{port}: start its head"):
        Cluster(f"127.0.0.1:{port}")
    monkeypatch.setattr("xrlflow.workers.cluster._JOIN", 2.0)
    with (
        socket.create_server(("127.0.0.1", port)),
        pytest.raises(ClusterError, match="is no head of a Ray cluster"),
    ):
        Cluster(f"127.0.0.1:{port}")
    result = CliRunner().invoke(
        app, ["rules", "CancelTransposes", "--prove", "--ray", f"127.0.0.1:{free_port()}"]
    )
    assert result.exit_code == 2
    assert len(result.output.splitlines()) == 1


@pytest.mark.whole
def test_this_machine_alone(ours: None, tmp_path: Path) -> None:
    """In a process of its own, as a command is: Ray gives the cluster a token."""
    output = subprocess.run(
        [sys.executable, "-m", "xrlflow.cli", "rules", "CancelTransposes", "--prove", "--ray", "local", "--json"],
        cwd=ROOT, env={**os.environ, "HOME": str(tmp_path)}, capture_output=True, text=True, timeout=300,
    )  # fmt: skip
    assert output.returncode == 0, output.stderr
    assert [c["proven"] for c in json.loads(output.stdout)] == [True]
    assert output.stderr == ""


@pytest.mark.whole
def test_a_node_without_what_is_needed(tmp_path: Path) -> None:
    """Its Python does not find the package, and it takes no times."""
    (tmp_path / "sitecustomize.py").write_text(
        "import sys\n"
        "class None_:\n"
        "    def find_spec(self, name, path=None, target=None):\n"
        "        if name.partition('.')[0] == 'xrlflow':\n"
        "            raise ModuleNotFoundError(\"No module named 'xrlflow'\", name='xrlflow')\n"
        "sys.meta_path.insert(0, None_())\n"
    )
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PYTHONPATH", str(tmp_path))
        bare = Nodes(initialize_head=True, head_node_args={**NODE, "resources": {}})
    try:
        with (
            closing(Cluster(bare.address)) as cluster,
            WorkerPool(cluster, Squarer, 1) as pool,
            pytest.raises(
                ClusterError, match=r"^node [\d.]+ of the Ray cluster has no module xrlflow: install xrlflow"
            ),
        ):
            list(pool.work(iter([1])))
        with (
            closing(Cluster(bare.address)) as cluster,
            pytest.raises(
                ClusterError, match=r"takes times: start one with .*--resources='\{\"latency\": 1\}'"
            ),
        ):
            Pool(PoolOptions(1, 1, factory=cluster))
    finally:
        bare.shutdown()
