"""A model over 2 GB goes in and out, with little memory; the file is sparse, so that making it costs nothing."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper

import xrlflow
from tests.memory import Peak, anonymous
from xrlflow.cost import Roofline
from xrlflow.onnxio import ModelError

pytestmark = pytest.mark.corpus

WIDTH, LAYERS = 4096, 34
BYTES = 4 * WIDTH * WIDTH  # of one weight: 67 MB


@pytest.fixture
def folder(tmp_path: Path) -> Iterator[Path]:
    """A folder that goes at once: pytest keeps those of the last three runs, gigabytes each."""
    with tempfile.TemporaryDirectory(dir=tmp_path) as name:
        yield Path(name)


def generate(path: Path) -> None:
    """Layers whose weights are `i + 1` in one place and 0 elsewhere; the second product is halved."""
    nodes, tensors = [], [helper.make_tensor("half", TensorProto.FLOAT, [], [0.5])]
    with open(path.with_suffix(".bin"), "wb") as file:
        file.truncate(LAYERS * BYTES)
        for i in range(LAYERS):
            file.seek(i * BYTES + 4 * i)
            file.write(np.float32(i + 1).tobytes())
            nodes.append(helper.make_node("MatMul", [f"h{i}", f"w{i}"], ["p" if i == 1 else f"p{i}"]))
            if i == 1:
                nodes.append(helper.make_node("Mul", ["p", "half"], ["p1"]))
            nodes.append(helper.make_node("Relu", [f"p{i}"], [f"h{i + 1}"]))
            tensor = TensorProto(name=f"w{i}", data_type=TensorProto.FLOAT, dims=[WIDTH, WIDTH])
            tensor.data_location = TensorProto.EXTERNAL
            for key, value in (("location", f"{path.stem}.bin"), ("offset", i * BYTES), ("length", BYTES)):
                tensor.external_data.add(key=key, value=str(value))
            tensors.append(tensor)
    ends = [helper.make_tensor_value_info(n, TensorProto.FLOAT, ("n", WIDTH)) for n in ("h0", f"h{LAYERS}")]
    graph = helper.make_graph(nodes, "chain", ends[:1], ends[1:], tensors)
    onnx.save(helper.make_model(graph, opset_imports=[helper.make_opsetid("", 20)], ir_version=9), path)


@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="only Linux tells anonymous memory")
def test_over_2_gb_in_and_out(folder: Path) -> None:
    source, target = folder / "big.onnx", folder / "out.onnx"
    generate(source)
    assert (folder / "big.bin").stat().st_size > 1 << 31
    before = anonymous()
    watch = Peak()
    watch.start()
    result = xrlflow.optimize(source, search="greedy", cost=Roofline(), measure=False, verify=False)
    result.save(target)
    watch.done.set()
    watch.join()
    assert watch.bytes - before < 1.3 * BYTES + 400e6
    assert not result.returned_original
    assert result.report.substitutions == {"FoldScaleIntoMatMul": 1}
    with pytest.raises(ModelError, match="2 GB"):
        _ = result.model
    proto = onnx.load(target, load_external_data=False)
    assert [n.op_type for n in proto.graph.node] == ["MatMul", "Relu"] * LAYERS
    written = {t.name: {e.key: e.value for e in t.external_data} for t in proto.graph.initializer}
    (file,) = folder.glob("out.onnx.*.data")
    data = np.memmap(file, np.float32, "r")
    for i, node in enumerate(proto.graph.node[::2]):
        place = written[node.input[1]]
        assert place["location"] == file.name
        assert int(place["length"]) == BYTES
        row = data[int(place["offset"]) // 4 :][: 2 * LAYERS]
        assert row[i] == (1.0 if i == 1 else i + 1)
        assert np.count_nonzero(row) == 1
