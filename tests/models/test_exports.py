"""Networks exported from `transformers`: every one loads, runs, and is optimised. See models/exports.py."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import onnx
import pytest

import models
import xrlflow
from models import exports, training
from models.exports import EXPORTS, HELD_OUT
from models.unseen import UNSEEN
from tests.levels import whole
from xrlflow.onnxio import load
from xrlflow.verify import Status

pytestmark = pytest.mark.corpus

pytest.importorskip("transformers")


@pytest.fixture(scope="module", autouse=True)
def cache(tmp_path_factory: pytest.TempPathFactory):
    with pytest.MonkeyPatch.context() as patch:
        folder = tmp_path_factory.mktemp("exports")
        patch.setattr(exports, "cache_folder", lambda: folder)
        yield folder


@pytest.mark.parametrize(
    "name", whole([*EXPORTS, *UNSEEN], ("convnext", "fnet", "llama-step", "lstm-acoustic", "segformer"))
)
def test_export_runs_and_is_optimised(name: str) -> None:
    ort = pytest.importorskip("onnxruntime")
    model = exports.export(name, small=True)
    assert model.ByteSize() < 5e6
    assert load(model).graph.outputs

    session = ort.InferenceSession(model.SerializeToString())
    first, second = (session.run(None, exports.inputs(name, small=True, seed=seed)) for seed in (0, 1))
    for one, other in zip(first, second, strict=True):
        assert np.isfinite(one).all()
        assert np.abs(one - other).mean() > 0.01 * one.std()  # the weights do not drown the inputs

    result = xrlflow.optimize(model, search="greedy", cost="roofline", measure=False, backend="onnxruntime")
    assert result.verification is not None
    assert result.verification.status is Status.VERIFIED


def test_the_cache_is_read_and_tells_sizes_seeds_and_exporters_apart(cache: Path) -> None:
    paths = {
        exports.cached("swin", small, seed, exporter)
        for small in (False, True)
        for seed in (0, 1)
        for exporter in ("dynamo", "torchscript")
    }
    assert len(paths) == 8
    path = exports.cached("swin", small=True, seed=7)
    assert path.is_relative_to(cache)
    onnx.save(models.small("squeezenet"), path)
    assert exports.export("swin", small=True, seed=7) == models.small("squeezenet")


def test_half_is_held_out() -> None:
    assert set(EXPORTS) > HELD_OUT
    assert len(HELD_OUT) == len(EXPORTS) // 2


def test_errors_list_what_there_is() -> None:
    with pytest.raises(models.ZooError, match=r"no export is called 'mamba2'.*llama.*mamba"):
        exports.export("mamba2")
    with pytest.raises(models.ZooError, match='"dynamo" or "torchscript"'):
        exports.export("llama", exporter="tf")


def test_half_of_them_are_trained_on_and_the_others_never() -> None:
    names = {source.name.split("-export")[0] for source in training.export_sources()}
    assert names == set(exports.EXPORTS) - exports.HELD_OUT
    assert abs(len(names) - len(exports.HELD_OUT)) <= 1
    graph = next(s for s in training.export_sources() if s.name == "llama-export").build()
    assert graph.node_count > 20


@pytest.mark.parametrize(
    ("name", "sizes"), [("t5-encoder", {"batch": 3, "length": 5}), ("llama-step", {"batch": 2, "past": 1})]
)
def test_open_exports_run_at_any_size(name: str, sizes: dict[str, int]) -> None:
    ort = pytest.importorskip("onnxruntime")
    model = exports.export(name, small=True, open=True)
    session = ort.InferenceSession(model.SerializeToString())
    declared = {dim for value in session.get_inputs() for dim in value.shape if isinstance(dim, str)}
    assert declared == sizes.keys()
    first = session.run(None, exports.inputs(name, small=True, sizes=sizes))[0]
    assert first.shape[0] == sizes["batch"]
    assert np.isfinite(first).all()


def test_open_exports_are_of_dynamo() -> None:
    with pytest.raises(models.ZooError, match="open dimensions are exported by dynamo"):
        exports.export("swin", small=True, exporter="torchscript", open=True)
