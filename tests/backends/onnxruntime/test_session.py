"""Loading and running models, and the errors of models that are refused."""

from __future__ import annotations

import gc
import os
import subprocess
import sys
import threading
import time
import weakref
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnxruntime as ort
import pytest

from tests.backends.models import feeds, matmuls, strings, unknown_operator
from xrlflow.backends import Backend, BackendError, CompiledModel
from xrlflow.backends.onnxruntime import OnnxRuntime, Optimization, open_model, supports, time_model
from xrlflow.backends.placement import choose_cpus, pinned
from xrlflow.backends.protocol import OutOfTime
from xrlflow.common import deadline


def test_a_model_runs_from_bytes_and_from_a_path(tmp_path: Path) -> None:
    data = matmuls(2)
    path = tmp_path / "model.onnx"
    path.write_bytes(data)
    backend = OnnxRuntime()
    assert isinstance(backend, Backend)
    with backend.compile(data, threads=1) as first, backend.compile(path) as second:
        assert isinstance(first, CompiledModel)
        assert first.threads == 1
        assert first.input_names == ("x",)
        assert first.output_names == ("y",)
        np.testing.assert_allclose(first.run(feeds())[0], second.run(feeds())[0], rtol=1e-5)
    assert backend.version == ort.__version__


def test_external_data_beside_a_path(tmp_path: Path) -> None:
    path = tmp_path / "model.onnx"
    model = onnx.load_from_string(matmuls(1))
    onnx.save_model(model, path, save_as_external_data=True, location="weights.bin", size_threshold=0)
    with open_model(path) as loaded:
        assert loaded.run(feeds())[0].shape == (4, 64)


@pytest.mark.parametrize("optimization", list(Optimization))
def test_every_optimization_level(optimization: Optimization) -> None:
    with open_model(matmuls(1), optimization=optimization) as model:
        assert model.run(feeds())[0].shape == (4, 64)


def test_a_closed_model_does_not_run() -> None:
    model = open_model(matmuls(1))
    model.close()
    model.close()
    with pytest.raises(BackendError, match="closed"):
        model.run(feeds())


@pytest.mark.parametrize(
    ("model", "message"),
    [
        (b"this is no model", "protobuf"),
        (b"", "cannot load"),
        ("/does/not/exist.onnx", "no such file"),
        (unknown_operator(), "nowhere"),
        (matmuls(1)[:200], "cannot load"),
    ],
    ids=["garbage", "empty", "missing", "unknown-operator", "truncated"],
)
def test_what_cannot_be_loaded_gives_one_line(
    model: str | bytes, message: str, capfd: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(BackendError, match=message) as caught:
        open_model(model)
    assert "\n" not in str(caught.value)
    assert "ONNXRuntimeError" not in str(caught.value)
    assert capfd.readouterr().err == ""


@pytest.mark.parametrize(
    "wrong", [{}, {"z": np.zeros(2)}, {"x": np.zeros((4, 65), np.float32)}, {"x": np.zeros((4, 64))}]
)
def test_wrong_feeds(wrong: dict[str, np.ndarray]) -> None:
    with open_model(matmuls(1)) as model, pytest.raises(BackendError, match="cannot run"):
        model.caller(wrong)


def test_other_providers_are_refused() -> None:
    with pytest.raises(BackendError, match="CUDAExecutionProvider"):
        open_model(matmuls(1), providers=["CUDAExecutionProvider"])
    with pytest.raises(BackendError, match="only the CPU"):
        OnnxRuntime(providers=())


def test_a_users_entries_win() -> None:
    entries = {"session.force_spinning_stop": "0", "session.set_denormal_as_zero": "1"}
    with open_model(matmuls(1), session_options=entries) as model:
        options = model.session.get_session_options()
        assert options.get_session_config_entry("session.force_spinning_stop") == "0"
        assert options.get_session_config_entry("session.set_denormal_as_zero") == "1"
    with open_model(matmuls(1)) as model:
        options = model.session.get_session_options()
        assert options.get_session_config_entry("session.force_spinning_stop") == "1"


def test_a_users_options_object_is_completed_and_not_overruled() -> None:
    options = ort.SessionOptions()
    options.intra_op_num_threads = 1
    options.graph_optimization_level = ort.GraphOptimizationLevel.ORT_ENABLE_BASIC
    with open_model(matmuls(1), session_options=options) as model:
        assert model.threads == 1
    assert options.graph_optimization_level == ort.GraphOptimizationLevel.ORT_ENABLE_BASIC
    assert options.get_session_config_entry("session.force_spinning_stop") == "1"
    with pytest.raises(BackendError, match="3 threads"):
        open_model(matmuls(1), threads=3, session_options=options)
    with pytest.raises(BackendError, match="at least 1"):
        open_model(matmuls(1), threads=0)
    options.intra_op_num_threads = 100_000
    with pytest.raises(BackendError, match="100000 threads are too many for this machine"):
        open_model(matmuls(1), session_options=options)


def test_timing_one_model() -> None:
    result = time_model(matmuls(1), feeds(), threads=1)
    assert 0 < result.p10_ms <= result.median_ms <= result.p90_ms
    text = {"x": np.array(["a", "b"], dtype=object)}
    assert time_model(strings(), text, threads=1).samples >= 5


@pytest.mark.parametrize(
    ("op", "domain", "dtypes", "expected"),
    [
        ("Conv", "", ["float"], True),
        ("Conv", "", ["float32"], True),
        ("Conv", "", ["double"], False),
        ("Where", "", ["bool", "float"], True),
        ("Gather", "", ["float", "int64"], True),
        ("NonMaxSuppression", "", ["float", "int64"], True),
        ("Constant", "", ["float"], True),
        ("HardSwish", "", ["float"], True),  # a function: expanded
        ("HardSwish", "", ["double"], False),
        ("Attention", "", ["float", "bool"], True),
        ("FusedMatMul", "com.microsoft", ["float"], True),
        ("FusedMatMul", "", ["float"], False),
        ("Frobnicate", "", [], False),
    ],
)
def test_supported_operators(op: str, domain: str, dtypes: list[str], expected: bool) -> None:
    assert supports(op, domain, dtypes) is expected
    assert OnnxRuntime().supports(op, domain, dtypes) is expected


def test_importing_the_backend_does_not_import_the_runtime() -> None:
    code = "import sys, xrlflow.backends.onnxruntime; sys.exit('onnxruntime' in sys.modules or 'onnx' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


@pytest.mark.skipif(not hasattr(os, "sched_getaffinity"), reason="this system has no affinities")
def test_pinning_is_undone() -> None:
    allowed = os.sched_getaffinity(0)
    cpus = choose_cpus(1)
    assert cpus is not None
    with pinned(cpus):
        assert os.sched_getaffinity(0) == {cpus[0]}
    assert os.sched_getaffinity(0) == allowed
    assert choose_cpus(100_000) is None
    with pinned(None):
        assert os.sched_getaffinity(0) == allowed


def test_a_load_that_is_abandoned_owns_the_weights(monkeypatch: pytest.MonkeyPatch) -> None:
    """ONNX Runtime keeps only their addresses."""
    held: list[weakref.ref[Any]] = []
    release = threading.Event()
    made = ort.OrtValue.ortvalue_from_numpy

    def value(array: Any) -> Any:
        created = made(array)
        held.append(weakref.ref(created))
        return created

    monkeypatch.setattr(ort.OrtValue, "ortvalue_from_numpy", staticmethod(value))
    monkeypatch.setattr(ort, "InferenceSession", lambda *_, **__: release.wait(30))
    with deadline.within(time.monotonic() + 0.1), pytest.raises(OutOfTime):
        open_model(b"", threads=1, weights={"w": np.ones(1000, np.float32)})
    gc.collect()
    assert held[0]() is not None
    release.set()
