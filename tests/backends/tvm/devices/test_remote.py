"""Remote devices, simulated with a tracker and a server of TVM on the loopback interface.

TVM's own client waits for ever if a device is unknown or in use, or if a tracker does not answer. That these tests end
shows that our client does not.
"""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import onnx
import onnx.numpy_helper
import onnx.parser
import psutil
import pytest
from typer.testing import CliRunner

import xrlflow
from tests.tuning.kernels import calls, matmul, scheduled, unscheduled
from xrlflow import api
from xrlflow.backends import BackendError
from xrlflow.backends.onnxruntime import open_model
from xrlflow.backends.results import Comparison, Latency, Load, SpeedUp
from xrlflow.backends.tvm import Tvm, detect, load_compiled
from xrlflow.backends.tvm.devices.device import Device
from xrlflow.backends.tvm.devices.remote import DeviceError, Remote, connect, count_devices
from xrlflow.cli import app
from xrlflow.cost.machine import cpu_name
from xrlflow.pipeline import compiled
from xrlflow.tuning import models
from xrlflow.tuning.crew import PoolError
from xrlflow.tuning.pool import Pool, PoolOptions
from xrlflow.tuning.store import Store
from xrlflow.tuning.worker import Timing

pytestmark = [pytest.mark.cluster, pytest.mark.usefixtures("brief_comparisons")]

QUICK = Timing(samples=2, sample_ms=0.2)


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


class Board:
    """A tracker, and servers that register with it. Their processes run without torch, which TVM would load in each of
    them."""

    def __init__(self, folder: Path) -> None:
        (folder / "torch.py").write_text("raise ImportError('there is no torch on the board')\n")
        self._path = os.pathsep.join([str(folder), *filter(None, [os.environ.get("PYTHONPATH")])])
        self.port = free_port()
        self._started: list[subprocess.Popen[bytes]] = []
        self._start(
            "rpc_tracker", "--host", "127.0.0.1", "--port", str(self.port), "--port-end", str(self.port + 1)
        )

    @property
    def remote(self) -> Remote:
        return Remote("127.0.0.1", self.port, "board")

    def serve(self) -> subprocess.Popen[bytes]:
        """A new server. It returns when the tracker knows the server."""
        port = free_port()
        server = self._start(
            "rpc_server", "--host", "127.0.0.1", "--port", str(port), "--port-end", str(port + 1),
            "--tracker", f"127.0.0.1:{self.port}", "--key", "board",
        )  # fmt: skip
        connect(self.remote, patience=60.0)
        return server

    def _start(self, program: str, *options: str) -> subprocess.Popen[bytes]:
        process = subprocess.Popen(
            [sys.executable, "-m", f"tvm.exec.{program}", "--silent", *options],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            env={**os.environ, "TVM_NUM_THREADS": "2", "PYTHONPATH": self._path},
        )
        self._started.append(process)
        return process

    def end(self, process: subprocess.Popen[bytes]) -> None:
        """Kill a tracker or a server, together with its child processes."""
        for child in psutil.Process(process.pid).children(recursive=True):
            child.kill()
        process.kill()
        process.wait()

    def close(self) -> None:
        for process in reversed(self._started):
            if process.poll() is None:
                self.end(process)


@pytest.fixture(scope="module")
def board(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Board]:
    board = Board(tmp_path_factory.mktemp("board"))
    try:
        board.serve()
        yield board
    finally:
        board.close()


def network() -> onnx.ModelProto:
    """Two products with activations. The result of the second is doubled."""
    model = onnx.parser.parse_model(
        '<ir_version: 9, opset_import: ["": 20]>'
        " agraph (float[16,32] x, float[32,32] u, float[32,48] w) => (float[16,48] y, float[16,32] z) {"
        " a = MatMul(x, u)\n z = Relu(a)\n r = Relu(z)\n b = MatMul(r, w)\n y = Softmax(b) }"
    )
    rng = np.random.default_rng(0)
    for value in list(model.graph.input)[1:]:
        shape = [d.dim_value for d in value.type.tensor_type.shape.dim]
        weight = rng.standard_normal(shape).astype(np.float32) / 6
        model.graph.initializer.append(onnx.numpy_helper.from_array(weight, value.name))
        model.graph.input.remove(value)
    return model


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "model.onnx"
    onnx.save(network(), path)
    return path


FEEDS = {"x": np.random.default_rng(1).standard_normal((16, 32)).astype(np.float32)}


def test_devices_are_named_by_tracker_and_key() -> None:
    assert Remote.parse("tracker.lan:9190/board") == Remote("tracker.lan", 9190, "board")
    assert str(Remote.parse("[::1]:9190/rack/3")) == "[::1]:9190/rack/3"
    assert Remote.parse("[::1]:9190/board").host == "::1"
    for text in (
        "board",
        "tracker:9190",
        "tracker/board",
        ":9190/board",
        "tracker:99999/board",
        "tracker:1/a b",
    ):
        with pytest.raises(BackendError, match=r"^remote device '.*': "):
            Remote.parse(text)


@pytest.mark.quick
def test_models_compute_there_what_onnxruntime_does_here(board: Board, file: Path, tmp_path: Path) -> None:
    compiled = Tvm().compile(str(file))
    path = tmp_path / "fast.so"
    compiled.save(path)
    with Device(board.remote, 1) as device, open_model(str(file)) as runtime:
        assert device.about.threads == 1
        assert device.about.system == (detect().triple, detect().cpu)
        model = device.load(path, compiled.interface)
        for theirs, ours in zip(model.run(FEEDS), runtime.run(FEEDS), strict=True):
            np.testing.assert_allclose(theirs, ours, rtol=1e-5, atol=1e-6)
        with pytest.raises(BackendError, match=r"input x was compiled as float32\[16, 32\]"):
            model.run({"x": np.zeros((1, 32), np.float32)})
        compared = device.compare([model, device.load(path, compiled.interface)], FEEDS, time_limit=3.0)
        assert compared.samples >= 1
        assert all(latency.median_ms > 0.0 for latency in compared.latencies)
        assert not compared.load.disturbed
    with pytest.raises(DeviceError, match="is closed"):
        model.run(FEEDS)


def test_indices_outside_of_their_tables_there(board: Board, tmp_path: Path) -> None:
    """Such an index is an error of the caller. The device remains usable."""
    table = onnx.parser.parse_model(
        '<ir_version: 9, opset_import: ["": 20]> agraph (float[3,4] x, int64[2] ids) => (float[2,4] y)'
        " { y = Gather(x, ids) }"
    )
    compiled = Tvm().compile(table.SerializeToString())
    compiled.save(tmp_path / "table.so")
    x = np.arange(12, dtype=np.float32).reshape(3, 4)
    with Device(board.remote, 1) as device:
        model = device.load(tmp_path / "table.so", compiled.interface)
        for outside in (3, -4, 1 << 40):
            with pytest.raises(BackendError, match=rf"^Gather y: index {outside} \(input ids\) is outside"):
                model.run({"x": x, "ids": np.array([0, outside])})
        [result] = model.run({"x": x, "ids": np.array([2, -3])})
        np.testing.assert_array_equal(result, x[[2, 0]])


def test_more_threads_than_the_server_has_are_refused(board: Board) -> None:
    with pytest.raises(
        BackendError, match=r"has 2 threads, not 64: start its server with TVM_NUM_THREADS=64$"
    ):
        Device(board.remote, 64)


@pytest.mark.whole
def test_optimised_on_the_device(board: Board, file: Path, tmp_path: Path) -> None:
    output = tmp_path / "fast.so"
    result = CliRunner().invoke(
        app,
        [
            "optimize", str(file), "-o", str(output), "--backend", "tvm", "--remote", str(board.remote), "--cpu",
            detect().cpu, "--search", "greedy", "--cost", "roofline", "--threads", "1", "--time-limit", "25", "--json",
        ],
    )  # fmt: skip
    assert result.exit_code == 0, result.output
    report = json.loads(result.stdout)
    assert report["verified"] is True
    assert report["threads"] == 1
    assert any(str(board.remote) in note for note in report["notes"])
    assert not any("ONNX Runtime runs" in note for note in report["notes"])
    with load_compiled(output) as loaded, open_model(str(file)) as runtime:
        for theirs, ours in zip(loaded.run(FEEDS), runtime.run(FEEDS), strict=True):
            np.testing.assert_allclose(theirs, ours, rtol=1e-5, atol=1e-6)


@pytest.mark.whole
def test_tuned_on_the_device(board: Board, file: Path, tmp_path: Path) -> None:
    place, output = tmp_path / "store.sqlite", tmp_path / "fast.so"
    options = {"method": "random", "trials": 4, "batch": 2, "threads": 1, "store": place}
    tuned = api.tune(file, remote=str(board.remote), **options)  # type: ignore[arg-type]
    assert tuned.verification is not None
    assert tuned.verification.verified
    assert tuned.result.tuning.measured == 4
    assert all(result.failed == 0 for result in tuned.result.tuning.tasks)
    report = tuned.to_json()
    assert report["onnxruntime_ms"] is None
    assert (report["device"], report["against"]) == (str(board.remote), "untuned")
    assert min(report["untuned_ms"], report["tuned_ms"], report["speedup"]) > 0.0
    tuned.save(output)
    with load_compiled(output) as loaded, open_model(str(file)) as runtime:
        for theirs, ours in zip(loaded.run(FEEDS), runtime.run(FEEDS), strict=True):
            np.testing.assert_allclose(theirs, ours, rtol=1e-5, atol=1e-6)
    with Store(place) as store:
        settings = {record.setting for key in store.tasks() for record in store.records(key)}
    assert {setting.device for setting in settings} == {str(board.remote)}
    # Times of the device do not count for this machine. They are stored under the device's name.
    here = api.tune(file, **options, measure=False, verify=False)  # type: ignore[arg-type]
    assert here.result.tuning.measured == 4
    with Store(place) as store:
        settings = {record.setting for key in store.tasks() for record in store.records(key)}
    assert {setting.device for setting in settings} == {str(board.remote), cpu_name()}
    again = api.tune(file, remote=board.remote, **options, measure=False, verify=False)  # type: ignore[arg-type]
    assert again.result.tuning.measured == 0


def test_what_a_device_lacks_is_refused(board: Board, file: Path) -> None:
    with pytest.raises(
        BackendError, match=rf"{board.remote} has no .*amx-tile.*, which code for sapphirerapids uses"
    ):
        api.tune(file, remote=board.remote, cpu="sapphirerapids")


@pytest.mark.parametrize("command", [["optimize", "--backend", "tvm"], ["tune"]])
def test_unknown_keys_and_dead_trackers(
    command: list[str], board: Board, file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("xrlflow.backends.tvm.devices.execution.PATIENCE", 0.5)
    for remote, expected in (
        (
            f"127.0.0.1:{board.port}/bored",
            f"the tracker at 127.0.0.1:{board.port} has no device 'bored' (it has board)",
        ),
        (f"127.0.0.1:{free_port()}/board", "no tracker of TVM's answers at 127.0.0.1:"),
        ("board", "remote device 'board': write it as HOST:PORT/KEY"),
    ):
        result = CliRunner().invoke(
            app, [*command, str(file), "-o", str(tmp_path / "f.so"), "--remote", remote]
        )
        assert result.exit_code == 2
        assert expected in result.stderr
        assert len(result.stderr.strip().splitlines()) == 1
    assert not (tmp_path / "f.so").exists()


def test_a_tracker_that_says_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("xrlflow.backends.tvm.devices.remote._REPLY_SECONDS", 0.5)
    with socket.create_server(("127.0.0.1", 0)) as silent:
        remote = Remote("127.0.0.1", silent.getsockname()[1], "board")
        with pytest.raises(DeviceError, match="no tracker of TVM's answers"):
            connect(remote, patience=0.0)


def test_a_device_that_others_use(board: Board) -> None:
    with Device(board.remote), pytest.raises(DeviceError, match="is in use, or does not answer"):
        connect(board.remote, patience=0.0)
    connect(board.remote)  # and it is free again


def test_kernels_that_hang_are_ended_by_the_device(board: Board) -> None:
    task = matmul(8)
    options = PoolOptions(1, 1, QUICK, run_seconds=3.0, remote=board.remote)
    with Pool(options) as pool:
        hung, good = pool.measure(task, [calls("pause"), unscheduled(task)])
        assert hung.error == f"remote device {board.remote} ended the session after 3 s"
        assert good.error is None
        with pytest.raises(BackendError, match="are not evaluated here"):
            pool.evaluate(task, scheduled(task, 8), [])


def test_a_crash_is_the_kernels_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """TVM's server dies with a kernel that crashes, so the next kernel finds no device."""
    monkeypatch.setattr("xrlflow.tuning.pool.PATIENCE", 2.0)
    own = Board(tmp_path)
    try:
        own.serve()
        task = matmul(8)
        with Pool(PoolOptions(1, 1, QUICK, remote=own.remote)) as pool:
            outcomes = pool.outcomes(task, [calls("abort"), unscheduled(task)])
            _, crashed = next(outcomes)
            assert (
                crashed.error
                == f"the session with remote device {own.remote} ended: its process died, or the network"
            )
            with pytest.raises(PoolError, match="has no device 'board'"):
                next(outcomes)
    finally:
        own.close()


@pytest.mark.whole
def test_devices_of_one_key_take_times_together(tmp_path: Path) -> None:
    """A kernel that crashes takes its device down. The others are measured on the remaining device."""
    own = Board(tmp_path)
    try:
        own.serve()
        own.serve()
        while count_devices(own.remote) < 2:  # a tracker that the second has found
            time.sleep(0.1)
        task = matmul(8)
        with Pool(PoolOptions(1, 1, QUICK, remote=own.remote)) as pool:
            assert pool._runners.crew.count == 2
            crashed, *good = pool.measure(task, [calls("abort"), *(scheduled(task, n) for n in (1, 2, 4, 8))])
        assert "ended: its process died, or the network" in (crashed.error or "")
        assert [outcome.error for outcome in good] == [None] * 4
    finally:
        own.close()


@pytest.mark.whole
def test_a_device_that_is_gone_or_silent(file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    own = Board(tmp_path)
    compiled = Tvm().compile(str(file))
    compiled.save(tmp_path / "fast.so")
    try:
        server = own.serve()
        with Device(own.remote) as device:
            model = device.load(tmp_path / "fast.so", compiled.interface)
            own.end(server)
            with pytest.raises(DeviceError, match=r"^the session with remote device .* ended"):
                model.run(FEEDS)
        server = own.serve()
        with Device(own.remote) as device:
            model = device.load(tmp_path / "fast.so", compiled.interface)
            for process in psutil.Process(server.pid).children(recursive=True):
                process.suspend()
            monkeypatch.setattr("xrlflow.backends.tvm.devices.device.ANSWER_SECONDS", 1.0)
            with pytest.raises(DeviceError, match=r"^remote device .* has not answered for 1 s$"):
                model.run(FEEDS)
            with pytest.raises(DeviceError, match="is closed"):
                model.run(FEEDS)
    finally:
        own.close()


@pytest.mark.whole
def test_a_server_killed_while_tuning(file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("xrlflow.tuning.pool.PATIENCE", 2.0)
    board = Board(tmp_path)
    place = tmp_path / "store.sqlite"
    try:
        server = board.serve()
        seen: list[int] = []

        def kill(phase: str, done: int, total: int, note: str) -> None:
            if phase == "tune":
                seen.append(done)
            if len(seen) == 3 and server.poll() is None:
                board.end(server)

        with pytest.raises(
            BackendError, match=r"has no device 'board' .*\(what was measured is kept"
        ) as raised:
            api.tune(
                file,
                method="random",
                trials=30,
                batch=5,
                threads=1,
                store=place,
                remote=board.remote,
                listener=kill,
            )
        assert isinstance(raised.value.__cause__, PoolError)
        with Store(place) as store:
            measured = [record for key in store.tasks() for record in store.records(key)]
        assert len([record for record in measured if record.error is None]) >= 3
    finally:
        board.close()


def test_options_of_the_other_backend(file: Path, tmp_path: Path) -> None:
    for option, value in (("cpu", "haswell"), ("triple", "aarch64-linux-gnu"), ("remote", "here:1/board")):
        result = CliRunner().invoke(
            app, ["optimize", str(file), "-o", str(tmp_path / "f.onnx"), f"--{option}", value]
        )
        assert result.exit_code == 2
        assert f"{option} has no meaning with backend 'auto'" in result.stderr
    with pytest.raises(BackendError, match="LLVM does not know the processor 'z80'"):
        xrlflow.optimize(file, backend="tvm", cpu="z80")
    with pytest.raises(BackendError, match="the system 'pdp11' is not known"):
        xrlflow.optimize(file, backend="tvm", cpu="z80", triple="pdp11")
    with pytest.raises(BackendError, match="a processor is needed for aarch64-linux-gnu"):
        api.tune(file, triple="aarch64-linux-gnu")


def comparison(*ratios: tuple[float, float, float]) -> Comparison:
    """A comparison whose first model takes 3 ms. `ratios`: the speedups of the other models over it, with their
    intervals."""
    speedups = tuple(SpeedUp(*each) for each in ratios)
    latencies = (Latency(3.0, 3.0, 3.0, 9), *(Latency(3.0 / s.median, 1.0, 9.0, 9) for s in speedups))
    load = Load(0.0, 0.0, 1.0, cpus=1, threads=1, seconds=1.0, disturbed=False)
    control = SpeedUp(1.0, 0.99, 1.01)
    return Comparison(latencies, speedups, control, load, 9, 1.0, threads=1, converged=True)


@pytest.mark.parametrize(
    ("first", "second", "chosen"),
    [([0.9], None, 0), ([1.1], None, 1), ([1.1, 1.2], 1.15, 2), ([1.2, 1.1], 0.9, 0), ([0.8, 0.9], 1.01, 2)],
)
def test_of_the_tuned_models_the_better_one_is_compared_with_the_untuned_one(
    first: list[float], second: float | None, chosen: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[list[str]] = []

    def compare_there(_: object, files: list[tuple[str, Any]], *__: object) -> Comparison:
        asked.append([path for path, _ in files])
        ratios = first if len(asked) == 1 else [second or 0.0]
        return comparison(*((ratio, ratio, ratio) for ratio in ratios))

    monkeypatch.setattr(models, "compare_there", compare_there)
    candidates: list[Any] = [(name, None) for name in ("untuned", "tuned", "rewritten")[: 1 + len(first)]]
    times, best, compared = models._fastest_there(cast(Any, None), candidates, {}, 1.0)
    assert best == chosen
    better = 1 + first.index(max(first))
    if second is not None:
        assert asked[1:] == [["untuned", candidates[better][0]]]
        assert compared.speedup.median == second
        assert times[better] == pytest.approx(3.0 / second)
    else:
        assert len(asked) == 1
        assert compared.speedup.median == first[0]


@pytest.mark.parametrize(
    ("looks", "second", "chosen"),
    [
        (1.5, (1.1, 1.05, 1.15), "found"),
        (1.5, (1.02, 0.98, 1.06), "the original"),
        (0.8, None, "the original"),
    ],
)
def test_the_fastest_has_to_be_faster_once_more(
    looks: float,
    second: tuple[float, float, float] | None,
    chosen: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """There are two graphs beside the original. In the first session the second graph seems faster, truly or by luck,
    or neither does."""
    compared = iter([[(0.7, 0.7, 0.7), (looks, looks, looks)], [second]])
    asked: list[list[str]] = []

    def compare_there(_: object, files: list[tuple[str, Any]], *__: object) -> Comparison:
        asked.append([path for path, _ in files])
        return comparison(*(each for each in next(compared) if each is not None))

    monkeypatch.setattr(compiled, "compare_there", compare_there)
    candidates: list[Any] = [
        compiled.Lowered(None, path, None) for path in ("the original", "found first", "found")
    ]  # type: ignore[arg-type]
    place: Any = SimpleNamespace(remote="tracker:9190/board")
    best, remarks = compiled._best_there(place, candidates, {}, 1.0)
    assert asked[0] == ["the original", "found first", "found"]
    assert asked[1:] == ([["the original", "found"]] if second else [])
    assert best.path == chosen
    assert any("another session" in remark for remark in remarks) is (second is not None)
    if chosen == "found":
        assert best.compared is not None
        assert second is not None
        assert best.compared.speedup == SpeedUp(*second)
        assert best.compared.control == SpeedUp(1.0, 0.99, 1.01)
        assert best.milliseconds == pytest.approx(3.0 / 1.1)
    else:
        assert best.compared is None
        assert best.milliseconds == 3.0
        assert ("not clearly faster" in remarks[-1]) is (second is not None)
