"""The networks that ONNX ships with its backend tests, without weights: read and written, they compute the same."""

from __future__ import annotations

from glob import glob
from pathlib import Path

import numpy as np
import onnx.backend.test
import pytest

from tests.onnxio.support import assert_same_outputs, run
from xrlflow import onnxio

pytestmark = pytest.mark.corpus
LIGHT = sorted(glob(f"{Path(onnx.backend.test.__file__).parent}/data/light/*.onnx"))


@pytest.mark.parametrize("path", LIGHT, ids=lambda p: Path(p).stem)
def test_whole_networks_compute_the_same(path: str, tmp_path: Path) -> None:
    imported = onnxio.load(path)
    (image,) = imported.frame.graph.input
    shape = [d.dim_value for d in image.type.tensor_type.shape.dim]
    feeds = {image.name: np.random.default_rng(0).normal(size=shape).astype(np.float32)}
    onnxio.save(imported, imported.graph, tmp_path / "out.onnx", max_growth=1)
    assert onnxio.check_result(imported, imported.graph) == ()
    assert imported.graph.node_count < imported.nodes_before
    assert_same_outputs(run(path, feeds), run(str(tmp_path / "out.onnx"), feeds))
