"""Where ONNX Runtime is slow on this machine: `python bench/weak.py [--threads N] [--json FILE] [--write] [NAMES]`.

Pairs of an operator (or a few that exporters write for one) and a shape that networks have. `of the bound`: the part of
the speed that arithmetic (the machine's peak, for products) or memory (inputs and outputs, once) would allow, from the
machine's calibration. `rewritten`: what greedy search by measured prices of operators finds, in ONNX Runtime;
`kernels`: the original with our kernels. Both are ONNX Runtime's time over theirs, timed in turns with an A/A control.
The weakest operators stand first: what to improve next on a machine.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import numpy as np
import onnx

import xrlflow
from bench import pages
from models.operators import operator
from xrlflow.backends import BackendError
from xrlflow.backends.interleave import interleave
from xrlflow.backends.onnxruntime import open_model
from xrlflow.backends.placement import choose_cpus, pinned
from xrlflow.backends.results import SpeedUp
from xrlflow.backends.tvm import Tvm, detect
from xrlflow.cost.calibrate import calibrated
from xrlflow.cost.machine import Machine
from xrlflow.onnxio.exporter import to_proto
from xrlflow.onnxio.importer import load
from xrlflow.ops.work import work

IMAGE = "float[1,64,56,56]"


def _one(shape: str, call: str, out: str | None = None, more: str = "") -> str:
    """The text of a model: y = call(x), with constants `more`."""
    return f"(float[{shape}] x{more}) => (float[{out or shape}] y) {{ y = {call} }}"


def _conv(image: str, weights: str, out: str, attributes: str) -> str:
    return _one(image, f"Conv<{attributes}>(x, w)", out, f", float[{weights}] w")


PAIRS = {
    # Over the channels of an image.
    "Softmax axis 1, 21x256x256": _one("1,21,256,256", "Softmax<axis=1>(x)"),
    "Softmax axis 1, 64x56x56": _one("1,64,56,56", "Softmax<axis=1>(x)"),
    "LogSoftmax axis 1, 19x128x128": _one("1,19,128,128", "LogSoftmax<axis=1>(x)"),
    "Softmax over 8, 4096x8": _one("4096,8", "Softmax<axis=-1>(x)"),
    "Softmax over 49, 192x49x49": _one("192,49,49", "Softmax<axis=-1>(x)"),
    "Softmax over 128, 12x128x128": _one("12,128,128", "Softmax<axis=-1>(x)"),
    "ArgMax axis 1, 21x256x256": "(float[1,21,256,256] x) => (int64[1,1,256,256] y) { y = ArgMax<axis=1>(x) }",
    "ReduceMean axis 1, 64x56x56": _one("1,64,56,56", "ReduceMean(x, a)", "1,1,56,56").replace(
        "{", "<int64[1] a = {1}> {"
    ),
    "ReduceMax axis 1, 64x56x56": _one("1,64,56,56", "ReduceMax(x, a)", "1,1,56,56").replace(
        "{", "<int64[1] a = {1}> {"
    ),
    "ReduceMean axes 2 3, 64x56x56": _one("1,64,56,56", "ReduceMean(x, a)", "1,64,1,1").replace(
        "{", "<int64[2] a = {2, 3}> {"
    ),
    "CumSum, 128x1024": _one("128,1024", "CumSum(x, a)").replace("{", "<int64 a = {1}> {"),
    "TopK 100 of 8400": "(float[80,8400] x) => (float[80,100] y, int64[80,100] i)"
    " <int64[1] k = {100}> { y, i = TopK(x, k) }",
    # Elementwise functions.
    **{
        f"{name}, 64x56x56": _one("1,64,56,56", f"{name}(x)")
        for name in ("Mish", "Softplus", "Elu", "Selu", "Celu", "HardSwish", "Gelu", "Erf", "Tanh", "Sigmoid")
    },
    "SiLU as Sigmoid and Mul, 64x56x56": _one("1,64,56,56", "Sigmoid(x)").replace(
        "y = Sigmoid(x)", "s = Sigmoid(x) y = Mul(x, s)"
    ),
    "Pow 3.3, 64x56x56": _one("1,64,56,56", "Pow(x, p)").replace("{", "<float p = {3.3}> {", 1),
    "Pow 3, 64x56x56": _one("1,64,56,56", "Pow(x, p)").replace("{", "<float p = {3.0}> {", 1),
    "PRelu, 64x56x56": _one("1,64,56,56", "PRelu(x, w)", None, ", float[64,1,1] w"),
    # Resizing and moving.
    "Resize linear x2, 32x64x64": _one("1,32,64,64", 'Resize<mode="linear">(x, , z)', "1,32,128,128").replace(
        "{", "<float[4] z = {1, 1, 2, 2}> {", 1
    ),
    "Resize cubic x2, 3x128x128": _one("1,3,128,128", 'Resize<mode="cubic">(x, , z)', "1,3,256,256").replace(
        "{", "<float[4] z = {1, 1, 2, 2}> {", 1
    ),
    "Resize nearest x2, 64x40x40": _one("1,64,40,40", 'Resize<mode="nearest">(x, , z)', "1,64,80,80").replace(
        "{", "<float[4] z = {1, 1, 2, 2}> {", 1
    ),
    "GridSample, 32x64x64": "(float[1,32,64,64] x, float[1,64,64,2] g) => (float[1,32,64,64] y)"
    " { y = GridSample(x, g) }",
    "PixelShuffle, 48x128x128": _one("1,48,128,128", 'DepthToSpace<blocksize=4, mode="CRD">(x)', "1,3,512,512"),
    "SpaceToDepth 2, 3x640x640": _one("1,3,640,640", "SpaceToDepth<blocksize=2>(x)", "1,12,320,320"),
    # Normalisations.
    "InstanceNormalization, 64x56x56": _one(
        "1,64,56,56", "InstanceNormalization(x, s, b)", None, ", float[64] s, float[64] b"
    ),
    "GroupNorm spelt out, 128x64x64": (
        "(float[1,128,64,64] x, float[128,1,1] s, float[128,1,1] b) => (float[1,128,64,64] y)"
        " <int64[3] h = {0, 32, -1}, int64[4] k = {1, 128, 64, 64}, float[32] o = {"
        + ",".join(["1"] * 32) + "}, float[32] z = {" + ",".join(["0"] * 32) + "}> {"
        " r = Reshape(x, h) n = InstanceNormalization(r, o, z) u = Reshape(n, k) m = Mul(u, s) y = Add(m, b) }"
    ),
    "LayerNorm channels first, 96x56x56": (
        "(float[1,96,56,56] x, float[96,1,1] s, float[96,1,1] b) => (float[1,96,56,56] y)"
        " <int64[1] a = {1}, float e = {0.000001}, float p = {2.0}> { m = ReduceMean(x, a) d = Sub(x, m) q = Pow(d, p)"
        " v = ReduceMean(q, a) w1 = Add(v, e) t = Sqrt(w1) n = Div(d, t) g = Mul(s, n) y = Add(g, b) }"
    ),
    "LayerNormalization 197x768": _one(
        "1,197,768", "LayerNormalization(x, s, b)", None, ", float[768] s, float[768] b"
    ),
    "L2 norm axis 1, 128x1024": _one("128,1024", "LpNormalization<axis=1>(x)"),
    # Convolutions.
    "Conv 3x3 3 to 64, stride 2 at 224": _conv(
        "1,3,224,224", "64,3,3,3", "1,64,112,112", "pads=[1,1,1,1], strides=[2,2]"
    ),
    "Conv 7x7 3 to 64, stride 2 at 224": _conv(
        "1,3,224,224", "64,3,7,7", "1,64,112,112", "pads=[3,3,3,3], strides=[2,2]"
    ),
    "Conv 3x3 64 to 3 at 128": _conv("1,64,128,128", "3,64,3,3", "1,3,128,128", "pads=[1,1,1,1]"),
    "Conv 3x3 64 at 56": _conv("1,64,56,56", "64,64,3,3", "1,64,56,56", "pads=[1,1,1,1]"),
    "Conv 3x3 65 to 67 at 56": _conv("1,65,56,56", "67,65,3,3", "1,67,56,56", "pads=[1,1,1,1]"),
    "Conv 1x1 64 to 256 at 56": _conv("1,64,56,56", "256,64,1,1", "1,256,56,56", "strides=[1,1]"),
    "Conv 1x1 960 to 160 at 7": _conv("1,960,7,7", "160,960,1,1", "1,160,7,7", "strides=[1,1]"),
    "Conv 32 groups of 4 at 56": _conv("1,128,56,56", "128,4,3,3", "1,128,56,56", "pads=[1,1,1,1], group=32"),
    "Conv 32 groups of 8 at 28": _conv("1,256,28,28", "256,8,3,3", "1,256,28,28", "pads=[1,1,1,1], group=32"),
    "Conv 24 groups of 5 at 28": _conv("1,120,28,28", "120,5,3,3", "1,120,28,28", "pads=[1,1,1,1], group=24"),
    "depthwise 3x3 144 at 56": _conv("1,144,56,56", "144,1,3,3", "1,144,56,56", "pads=[1,1,1,1], group=144"),
    "depthwise 5x5 240 at 28": _conv("1,240,28,28", "240,1,5,5", "1,240,28,28", "pads=[2,2,2,2], group=240"),
    "depthwise 7x7 96 at 56": _conv("1,96,56,56", "96,1,7,7", "1,96,56,56", "pads=[3,3,3,3], group=96"),
    "depthwise 7x7 768 at 7": _conv("1,768,7,7", "768,1,7,7", "1,768,7,7", "pads=[3,3,3,3], group=768"),
    "Conv 3x3 dilated 2, 64 at 56": _conv("1,64,56,56", "64,64,3,3", "1,64,56,56", "pads=[2,2,2,2], dilations=[2,2]"),
    "Conv1d 80 to 384, 3 at 3000": _conv("1,80,3000", "384,80,3", "1,384,3000", "pads=[1,1]"),
    "Conv3d 3x3x3 32 at 16x28x28": _conv("1,32,16,28,28", "32,32,3,3,3", "1,32,16,28,28", "pads=[1,1,1,1,1,1]"),
    "ConvTranspose 2x2, 64 to 32 at 64": _one(
        "1,64,64,64", "ConvTranspose<strides=[2,2]>(x, w)", "1,32,128,128", ", float[64,32,2,2] w"
    ),
    "ConvTranspose 4x4, 128 to 64 at 16": _one(
        "1,128,16,16", "ConvTranspose<strides=[2,2], pads=[1,1,1,1]>(x, w)", "1,64,32,32", ", float[128,64,4,4] w"
    ),
    "MaxPool 3x3, 64 at 112": _one(
        "1,64,112,112", "MaxPool<kernel_shape=[3,3], strides=[2,2], pads=[1,1,1,1]>(x)", "1,64,56,56"
    ),
    "AveragePool 3x3, 64 at 56": _one("1,64,56,56", "AveragePool<kernel_shape=[3,3], pads=[1,1,1,1]>(x)"),
    # Products.
    "MatMul 1x768x3072": _one("1,768", "MatMul(x, w)", "1,3072", ", float[768,3072] w"),
    "MatMul 8x768x3072": _one("8,768", "MatMul(x, w)", "8,3072", ", float[768,3072] w"),
    "MatMul 32x768x3072": _one("32,768", "MatMul(x, w)", "32,3072", ", float[768,3072] w"),
    "MatMul 128x768x768": _one("128,768", "MatMul(x, w)", "128,768", ", float[768,768] w"),
    "windows of Swin, 192 x 49x32x49": "(float[192,49,32] x, float[192,32,49] z) => (float[192,49,49] y)"
    " { y = MatMul(x, z) }",
    "scores of BERT, 12 x 128x64x128": "(float[12,128,64] x, float[12,64,128] z) => (float[12,128,128] y)"
    " { y = MatMul(x, z) }",
    "Einsum bhid,bhjd->bhij": "(float[1,12,128,64] x, float[1,12,128,64] z) => (float[1,12,128,128] y)"
    ' { y = Einsum<equation="bhid,bhjd->bhij">(x, z) }',
    **{
        f"{op} 256, {steps} steps": _one(
            f"{steps},1,256", f"{op}<hidden_size=256>(x, w, s, b)", f"{steps},1,1,256",
            f", float[1,{gates * 256},256] w, float[1,{gates * 256},256] s, float[1,{gates * 512}] b",
        )
        for op, gates, steps in (("LSTM", 4, 64), ("GRU", 3, 64))
    },
    "Gemm 64x1024x1024": _one("64,1024", "Gemm(x, w, b)", None, ", float[1024,1024] w, float[1024] b"),
}  # fmt: skip


@dataclass(frozen=True, slots=True)
class Row:
    """One pair. `bound`: the part of the machine's speed that ONNX Runtime reaches. `why`: why a variant is missing."""

    name: str
    onnxruntime_ms: float
    bound: float
    control: SpeedUp | None
    rewritten: SpeedUp | None
    kernels: SpeedUp | None
    disturbed: bool
    why: str = ""

    def cells(self) -> str:
        star = " *" if self.disturbed else ""
        shown = [
            _shown(self.control),
            _shown(self.rewritten) or "-",
            _shown(self.kernels) or self.why.partition(":")[0],
        ]
        return f"| {self.name}{star} | {self.onnxruntime_ms:.3f} | {self.bound:.2f} | {' | '.join(shown)} |"


def _shown(found: SpeedUp | None) -> str:
    return "" if found is None else f"{found.median:.2f} [{found.low:.2f}, {found.high:.2f}]"


def least_seconds(model: onnx.ModelProto, machine: Machine) -> float:
    """The time that products take at the machine's peak, or inputs and outputs at its bandwidth."""
    graph = load(model).graph
    nodes = [n for n in graph.nodes() if not n.const]
    done = [work(n, [None if not v else graph.type(v) for v in n.inputs], {}) for n in nodes]
    flops = sum(w.flops for w in done if w.gemm is not None)
    values = [*model.graph.input, *model.graph.output]
    shapes = [[d.dim_value for d in v.type.tensor_type.shape.dim] for v in values]
    shapes += [list(tensor.dims) for tensor in model.graph.initializer]
    moved = 4.0 * sum(np.prod(shape) for shape in shapes)
    bandwidth = machine.cache_bandwidth if moved <= machine.cache else machine.memory_bandwidth
    return max(flops / machine.peak, moved / bandwidth)


def feeds_of(model: onnx.ModelProto) -> dict[str, Any]:
    rng = np.random.default_rng(0)
    return {
        v.name: rng.standard_normal([d.dim_value for d in v.type.tensor_type.shape.dim]).astype(np.float32)
        for v in model.graph.input
    }


def same(expected: Sequence[Any], found: Sequence[Any]) -> bool:
    """Whether results agree to rounding."""
    return all(
        a.shape == b.shape
        and np.allclose(a, b, rtol=1e-4, atol=1e-5 * max(float(np.nanmax(np.abs(a))), 1.0), equal_nan=True)
        for a, b in zip(expected, found, strict=True)
    )


def measured(name: str, machine: Machine, threads: int, seconds: float) -> Row:
    """One pair, with the variants that there are."""
    model = operator(PAIRS[name])
    data, cpus, feeds = model.SerializeToString(), choose_cpus(threads), feeds_of(model)
    result = xrlflow.optimize(
        model, backend="onnxruntime", search="greedy", measure=False, threads=threads, time_limit=20.0
    )
    changed = result.graph.fingerprint != result.imported.graph.fingerprint
    with ExitStack() as stack:
        variants = [stack.enter_context(open_model(data, threads=threads, cpus=cpus))]
        if changed:
            better = to_proto(result.imported, result.graph).SerializeToString()
            variants.append(stack.enter_context(open_model(better, threads=threads, cpus=cpus)))
        why = ""
        try:
            ours = Tvm(detect(cores=threads)).compile(data, threads=threads)
        except BackendError as error:
            why = str(error)
        else:  # runs also start threads, which must not inherit that the caller is pinned
            if same(variants[0].run(feeds), ours.run(feeds)):
                variants.append(ours)
            else:
                why = "computes something else"
        if changed and not same(variants[0].run(feeds), variants[1].run(feeds)):
            raise SystemExit(f"{name}: the rewritten graph computes something else")
        calls = [v.bound_caller(feeds) for v in (variants if len(variants) > 1 else 2 * variants)]
        stack.enter_context(pinned(cpus))
        found = interleave(calls, threads=threads, time_limit=seconds, target_width=0.01)
    speedups = list(found.speedups) if len(variants) > 1 else []
    rewritten = speedups.pop(0) if changed else None
    runtime = found.latencies[0].median_ms
    bound = 1e3 * least_seconds(model, machine) / runtime
    return Row(
        name,
        runtime,
        bound,
        found.control,
        rewritten,
        speedups.pop() if not why else None,
        found.load.disturbed,
        why,
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("names", nargs="*", help="some of them; default: all")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--seconds", type=float, default=3.0, help="of each measurement")
    parser.add_argument("--json", type=Path)
    parser.add_argument("--write", action="store_true", help="put the table into docs/benchmarks")
    options = parser.parse_args()
    unknown = sorted({*options.names} - PAIRS.keys())
    if unknown:
        parser.error(f"{unknown[0]} is none of {', '.join(PAIRS)}")
    if options.write and options.names:
        parser.error("--write takes the whole table: leave the names out")
    machine = calibrated(options.threads)
    rows = []
    for name in options.names or PAIRS:
        rows.append(measured(name, machine, options.threads, options.seconds))
        print(rows[-1].cells(), file=sys.stderr, flush=True)
        if options.json is not None:
            options.json.write_text(json.dumps([asdict(row) for row in rows], indent=1))
    rows.sort(key=lambda row: row.bound)
    head = ["| operator | ONNX Runtime ms | of the bound | A/A | rewritten | kernels |", "|---" * 6 + "|"]
    lines = [*head, *(row.cells() for row in rows)]
    print("\n".join(lines))
    if options.write:
        pages.write("weak" if options.threads == 2 else f"weak-{options.threads}-threads", "\n".join(lines))


if __name__ == "__main__":
    main()
