"""Peak anonymous memory of `optimize` on a 2.5 GB model of which it changes some weights.

    python bench/memory.py [--gigabytes 2.5] [--changed 4] [--folder FOLDER] [--json]

Generates a chain of MatMul and Relu with external data; the products of the first `--changed` are scaled by a
constant, which `optimize(measure=False, verify=False)` folds into their weights. The target: 1.3 times the bytes of
the changed weights plus 400 MB. Linux only.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
import time
from pathlib import Path

import numpy as np
import onnx
from onnx import TensorProto, helper

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))  # the checkout

from tests.memory import Peak, anonymous

WIDTH = 8192


def generate(path: Path, layers: int, scaled: int) -> None:
    """Write a model with `layers` weights of 8192 x 8192 float32 (268 MB each), piece by piece.

    The products of the first `scaled` are multiplied by a constant that can be folded into the weights.
    """
    rng = np.random.default_rng(0)
    nodes, tensors, at = [], [], 0
    tensors.append(helper.make_tensor("half", TensorProto.FLOAT, [], [0.5]))
    with open(path.with_suffix(".data"), "wb") as file:
        for i in range(layers):
            nodes.append(helper.make_node("MatMul", [f"h{i}", f"w{i}"], [f"p{i}"]))
            if i < scaled:
                nodes.append(helper.make_node("Mul", [f"p{i}", "half"], [f"s{i}"]))
            nodes.append(helper.make_node("Relu", [f"s{i}" if i < scaled else f"p{i}"], [f"h{i + 1}"]))
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
        count = min(options.changed, layers)
        generate(path, layers, count)
        changed = count * 4 * WIDTH * WIDTH
        watch = Peak()
        before = anonymous()
        watch.start()
        began = time.perf_counter()
        trip(path, Path(folder) / "out.onnx")
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


def trip(source: Path, target: Path) -> None:
    """Run `optimize` without verification and measurement, which would load the model into a runtime."""
    import xrlflow

    result = xrlflow.optimize(source, cost="roofline", search="greedy", measure=False, verify=False)
    assert result.report.substitutions, "nothing was changed"
    result.save(target)


if __name__ == "__main__":
    main()
