"""The backend: what it refuses, what it writes, and that what it wrote runs."""

from __future__ import annotations

import json
import math
from pathlib import Path

import numpy as np
import onnx
import onnx.parser
import pytest

import xrlflow
from xrlflow.api import OptionError, VerificationFailed
from xrlflow.backends import BackendError
from xrlflow.backends.onnxruntime import measure, open_model
from xrlflow.backends.protocol import Feeds
from xrlflow.backends.tvm import Tvm, detect, load_compiled
from xrlflow.verify import Status, Verification

WEIGHTS = ", ".join(str(round(math.sin(i), 3)) for i in range(128))
TEXT = (
    '<ir_version: 9, opset_import: ["": 20]>'
    " agraph (float[4,8] x, float[4,8] other) => (float[4,16] y, float[4,8] z)"
    f" <float[8,16] w = {{{WEIGHTS}}}> {{ a = MatMul(x, w)\n y = Relu(a)\n b = Relu(other)\n z = Relu(b) }}"
)


@pytest.fixture(scope="module")
def file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("tvm") / "model.onnx"
    onnx.save(onnx.parser.parse_model(TEXT), path)
    return path


@pytest.fixture(scope="module")
def library(file: Path) -> Path:
    path = file.with_suffix(".so")
    Tvm().compile(str(file)).save(path)
    return path


@pytest.fixture
def feeds() -> Feeds:
    rng = np.random.default_rng(0)
    return {name: rng.standard_normal((4, 8)).astype(np.float32) for name in ("x", "other")}


def test_a_saved_library_runs_by_name(file: Path, library: Path, feeds: Feeds) -> None:
    with load_compiled(library, threads=2) as loaded, open_model(str(file)) as runtime:
        assert loaded.input_names == ("x", "other")
        assert loaded.output_names == ("y", "z")
        assert loaded.sizes == {"x": (4, 8), "other": (4, 8)}
        for a, b in zip(runtime.run(feeds), loaded.run(dict(reversed(feeds.items()))), strict=True):
            np.testing.assert_allclose(b, a, rtol=1e-5, atol=1e-6)
    with pytest.raises(BackendError, match="closed"):
        loaded.run(feeds)


def test_compiled_models_are_measured_beside_others(file: Path, library: Path, feeds: Feeds) -> None:
    comparison = measure([str(file), str(library)], feeds, threads=1, time_limit=2.0)
    assert comparison.samples >= 1
    assert comparison.speedup.median > 0.0


def test_other_sizes_are_refused(library: Path, feeds: Feeds) -> None:
    with load_compiled(library) as loaded:
        with pytest.raises(
            BackendError, match=r"input x was compiled as float32\[4, 8\], not float32\[1, 8\]"
        ):
            loaded.run({**feeds, "x": np.zeros((1, 8), np.float32)})
        with pytest.raises(BackendError, match="input other is missing"):
            loaded.run({"x": feeds["x"]})


def test_what_cannot_be_loaded(library: Path, tmp_path: Path) -> None:
    with pytest.raises(BackendError, match="there is no such file"):
        load_compiled(tmp_path / "nothing.so")
    copy = tmp_path / "copy.so"
    copy.write_bytes(library.read_bytes()[:1000])
    description = copy.with_name("copy.so.json")
    with pytest.raises(BackendError, match=r"copy\.so\.json: there is no such file"):
        load_compiled(copy)
    stored = json.loads(library.with_name(library.name + ".json").read_text())
    description.write_text(json.dumps(stored))
    with pytest.raises(BackendError, match=r"copy\.so: damaged"):
        load_compiled(copy)
    description.write_text(json.dumps({**stored, "version": "0.1"}))
    with pytest.raises(BackendError, match=r"compiled with TVM 0\.1"):
        load_compiled(copy)
    description.write_text("{")
    with pytest.raises(BackendError, match="damaged"):
        load_compiled(copy)


def test_names_of_libraries(file: Path, tmp_path: Path) -> None:
    compiled = Tvm().compile(str(file))
    with pytest.raises(BackendError, match=r"ends in \.so"):
        compiled.save(tmp_path / "model.onnx")
    with pytest.raises(BackendError, match="cannot be written"):
        compiled.save(tmp_path / "missing" / "model.so")
    assert not list(tmp_path.iterdir())


def test_operators_that_cannot_be_lowered() -> None:
    backend = Tvm()
    assert backend.supports("Conv", dtypes=["float"])
    assert not any(backend.supports(op) for op in ("LSTM", "GRU", "Loop", "Scan"))
    assert not backend.supports("Attention")  # TVM knows com.microsoft's
    assert not backend.supports("Gelu", "com.microsoft")
    assert not backend.supports("Add", dtypes=["string"])
    text = """<ir_version: 9, opset_import: ["": 20]>
    agraph (float[5,1,4] x) => (float[5,1,1,3] y)
    <float[1,9,4] w = {%s}, float[1,9,3] r = {%s}> { y, h = GRU<hidden_size=3>(x, w, r) }"""
    model = onnx.parser.parse_model(text % (", ".join(["0.5"] * 36), ", ".join(["0.25"] * 27)))
    with pytest.raises(BackendError, match="TVM cannot lower GRU"):
        backend.compile(model.SerializeToString())
    with pytest.raises(BackendError, match="TVM cannot lower GRU"):
        xrlflow.optimize(model, backend="tvm", measure=False)


def test_open_dimensions_are_asked_for() -> None:
    model = onnx.parser.parse_model(
        '<ir_version: 9, opset_import: ["": 20]> agraph (float[n,8] x) => (float[n,8] y) { y = Relu(x) }'
    )
    with pytest.raises(BackendError, match=r"input x has the dimensions n: give them with --shape x="):
        Tvm().compile(model.SerializeToString())
    with Tvm(shapes={"x": (3, 8)}).compile(model.SerializeToString()) as compiled:
        assert compiled.run({"x": np.full((3, 8), -1, np.float32)})[0].max() == 0.0


def test_processors() -> None:
    assert detect(cpu="skylake-avx512").lanes == 16
    with pytest.raises(BackendError, match="no-such-processor"):
        detect(cpu="no-such-processor")


def test_optimize_compiles_and_verifies(
    file: Path, tmp_path: Path, feeds: Feeds, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("xrlflow.tuning.store.cache_directory", lambda: tmp_path / "cache")
    result = xrlflow.optimize(file, backend="tvm", search="greedy", cost="roofline", measure=False)
    assert result.report.backend == "tvm"
    assert result.report.verified
    assert result.report.nodes_after < result.report.nodes_before  # relu(relu(x)) = relu(x)
    result.save(tmp_path / "fast.so")
    with load_compiled(tmp_path / "fast.so") as loaded, open_model(str(file)) as runtime:
        for a, b in zip(runtime.run(feeds), loaded.run(feeds), strict=True):
            np.testing.assert_allclose(b, a, rtol=1e-5, atol=1e-6)
    with pytest.raises(OptionError, match="choose of onnxruntime, tvm"):
        xrlflow.optimize(file, backend="cuda")


def test_what_cannot_be_compared_is_not_said_to_differ(
    file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("xrlflow.tuning.store.cache_directory", lambda: tmp_path / "cache")
    verdict = Verification(Status.NOT_COMPARABLE, reason="it has random operators")
    monkeypatch.setattr("xrlflow.api.Reference.check_compiled", lambda *_: verdict)
    with pytest.raises(
        VerificationFailed, match=r"cannot be verified: it has random operators \(--no-verify\)"
    ):
        xrlflow.optimize(file, backend="tvm", search="greedy", cost="roofline", measure=False)
