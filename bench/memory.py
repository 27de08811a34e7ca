"""Peak anonymous memory while a 2.5 GB model goes in and out with some of its weights changed.

    python bench/memory.py [--gigabytes 2.5] [--changed 4] [--folder /tmp] [--json]

Generates a chain of MatMuls with external data, scales the weights of the first `--changed` of them by a constant
expression, and saves. The target: 1.3 times the bytes of the changed weights plus 400 MB. Linux only.
"""

from __future__ import annotations

import argparse
import json
import tempfile
import threading
import time
from pathlib import Path

import numpy as np
import onnx
from onnx import TensorProto, helper

WIDTH = 8192


def generate(path: Path, layers: int) -> None:
    """A model of `layers` weights of 8192 x 8192 float32 (268 MB each), written piece by piece."""
    rng = np.random.default_rng(0)
    nodes, tensors, at = [], [], 0
    with open(path.with_suffix(".data"), "wb") as file:
        for i in range(layers):
            nodes.append(helper.make_node("MatMul", [f"h{i}", f"w{i}"], [f"h{i + 1}"]))
            tensor = TensorProto(name=f"w{i}", data_type=TensorProto.FLOAT, dims=[WIDTH, WIDTH])
            tensor.data_location = TensorProto.EXTERNAL
            length = 4 * WIDTH * WIDTH
            for key, value in (("location", f"{path.stem}.data"), ("offset", at), ("length", length)):
                tensor.external_data.add(key=key, value=str(value))
            tensors.append(tensor)
            for _ in range(16):
                file.write(rng.standard_normal((WIDTH // 16, WIDTH), np.float32) * np.float32(0.01))
            at += length
    info = [helper.make_tensor_value_info(n, TensorProto.FLOAT, ("n", WIDTH)) for n in ("h0", f"h{layers}")]
    graph = helper.make_graph(nodes, "chain", info[:1], info[1:], tensors)
    onnx.save(helper.make_model(graph, opset_imports=[helper.make_opsetid("", 20)], ir_version=9), path)


def anonymous() -> int:
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith("RssAnon:"):
            return int(line.split()[1]) * 1024
    raise OSError("this system does not tell anonymous memory")


class Peak(threading.Thread):
    """Watches the process until told to stop."""

    def __init__(self) -> None:
        super().__init__(daemon=True)
        self.bytes = 0
        self.done = threading.Event()

    def run(self) -> None:
        while not self.done.wait(0.005):
            self.bytes = max(self.bytes, anonymous())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--gigabytes", type=float, default=2.5)
    parser.add_argument("--changed", type=int, default=4)
    parser.add_argument("--folder", default=None)
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    layers = max(1, round(options.gigabytes * 1e9 / (4 * WIDTH * WIDTH)))
    with tempfile.TemporaryDirectory(dir=options.folder) as folder:
        path = Path(folder) / "big.onnx"
        generate(path, layers)
        watch = Peak()
        before = anonymous()
        watch.start()
        began = time.perf_counter()
        changed = trip(path, Path(folder) / "out.onnx", min(options.changed, layers))
        seconds = time.perf_counter() - began
        watch.done.set()
        watch.join()
        result = {
            "model_gb": layers * 4 * WIDTH * WIDTH / 1e9,
            "changed_mb": changed / 1e6,
            "peak_anonymous_mb": watch.bytes / 1e6,
            "before_mb": before / 1e6,
            "target_mb": (1.3 * changed + 400e6) / 1e6,
            "seconds": seconds,
            "written_gb": (Path(folder) / "out.onnx.data").stat().st_size / 1e9,
        }
    if options.json:
        print(json.dumps(result))
    else:
        for name, number in result.items():
            print(f"{name:18} {number:10.1f}")


def trip(source: Path, target: Path, count: int) -> int:
    """Load, scale the first `count` weights by a lazy expression, save; bytes of those weights."""
    from xrlflow import onnxio
    from xrlflow.ir import NO_ATTRS, DType, Graph, Node, mix, output_key
    from xrlflow.ops.infer import infer

    imported = onnxio.load(source)
    graph = imported.graph
    factor = graph.leaves.intern(np.full((WIDTH, 1), 0.5, np.float32)[:1], DType.FLOAT)
    nodes, changed = [], 0
    for index, node in enumerate(graph.topological()):
        if index < count:
            types = [graph.type(node.inputs[1]), graph.type(factor)]
            scaled = infer("Mul", NO_ATTRS, types, [None, None], 1)
            out = output_key(mix(index + 1, node.key), 0)
            nodes.append(Node("Mul", (node.inputs[1], factor), (out,), scaled))
            node = node.with_inputs((node.inputs[0], out))
            changed += scaled[0].nbytes or 0
        nodes.append(node)
    onnxio.save(imported, Graph.make(nodes, graph.inputs, graph.outputs, graph.leaves), target)
    return changed


if __name__ == "__main__":
    main()
