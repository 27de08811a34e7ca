"""Random quantised and float16 models through `optimize`: `python -m tests.fuzz.low_precision --graphs 200`.

Kinds: QDQ networks (activations and weights of 8 bits, signed or not, by tensor or by channel), dynamic quantisation,
QLinear operators, 4-bit weights in blocks, and float16, at opsets from 13 to 23. Each is optimised without measuring,
in a process of its own. A fault is any of: an error, a changed result that is not verified, a result that ONNX Runtime
does not load at a level at which it loads the original, outputs that differ by more than a tenth of their range from
those of the original, both with ONNX Runtime's optimisations off. Models that ONNX Runtime does not load at its default
level are skipped.

`--only qdq --seed 17 --graphs 1` repeats one model. Exit code 1 if there are faults.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import onnx
from onnx import TensorProto, helper, numpy_helper

_SECONDS = 180.0  # for one model
_RANGE = 0.1


@dataclass
class Builder:
    """Nodes and constants of a model; values are names. `half`: floats are float16."""

    rng: np.random.Generator
    opset: int
    half: bool = False
    nodes: list[onnx.NodeProto] = field(default_factory=list)
    constants: list[onnx.TensorProto] = field(default_factory=list)

    @property
    def float(self) -> Any:
        return np.float16 if self.half else np.float32

    def const(self, array: Any) -> str:
        name = f"c{len(self.constants)}"
        array = np.asarray(array)
        self.constants.append(numpy_helper.from_array(array, name))
        return name

    def node(self, op: str, *inputs: str, **attrs: Any) -> str:
        name = f"v{len(self.nodes)}"
        self.nodes.append(helper.make_node(op, list(inputs), [name], **attrs))
        return name

    def weight(self, *shape: int) -> Any:
        return (self.rng.standard_normal(shape) / np.sqrt(np.prod(shape[1:]) or 1)).astype(self.float)

    def model(self, x: str, shape: tuple[int, ...], y: str) -> onnx.ModelProto:
        kind = TensorProto.FLOAT16 if self.half else TensorProto.FLOAT
        graph = helper.make_graph(
            self.nodes, "g", [helper.make_tensor_value_info(x, kind, shape)],
            [helper.make_tensor_value_info(y, kind, None)], self.constants,
        )  # fmt: skip
        opsets = [helper.make_opsetid("", self.opset)]
        return onnx.shape_inference.infer_shapes(
            helper.make_model(graph, opset_imports=opsets, ir_version=min(10, 8 + (self.opset >= 19)))
        )


@dataclass
class Network:
    """A random sequential network: what stands between layers is drawn, and `around` says how a layer is quantised."""

    b: Builder
    value: str
    shape: tuple[int, ...]

    def layers(self, around: Callable[[Network], None], count: int) -> None:
        for _ in range(count):
            around(self)
            self.between()

    def between(self) -> None:
        """An operator that needs no weights."""
        b, rank = self.b, len(self.shape)
        plain = ["Relu", "Sigmoid", "Tanh", "LeakyRelu", "reshape", "twice", "add", "concat", "", ""]
        choice = str(b.rng.choice([*plain, "MaxPool", "AveragePool"] if rank == 4 else [*plain, "Softmax"]))
        if choice == "reshape":
            flat = b.node("Reshape", self.value, b.const(np.int64([self.shape[0], -1])))
            self.value = b.node("Reshape", flat, b.const(np.int64(self.shape)))
        elif choice == "twice":
            perm = [*range(rank - 2), rank - 1, rank - 2]
            turned = b.node("Transpose", self.value, perm=perm)
            self.value = b.node("Transpose", turned, perm=perm)
        elif choice == "add":
            self.value = b.node("Add", self.value, b.const(b.float(b.rng.standard_normal())))
        elif choice == "concat":
            self.value = b.node("Concat", self.value, b.node("Relu", self.value), axis=1)
            self.shape = (self.shape[0], 2 * self.shape[1], *self.shape[2:])
        elif choice in ("MaxPool", "AveragePool"):
            if min(self.shape[2:]) >= 2:
                self.value = b.node(choice, self.value, kernel_shape=[2, 2], strides=[2, 2])
                self.shape = (*self.shape[:2], self.shape[2] // 2, self.shape[3] // 2)
        elif choice:
            self.value = b.node(choice, self.value)

    def apply(self, x: str, w: str, channels: int) -> None:
        """A convolution or product of `x` with a weight of `weight_shape`."""
        if len(self.shape) == 4:
            self.value = self.b.node("Conv", x, w, pads=[1] * 4)
            self.shape = (self.shape[0], channels, *self.shape[2:])
        else:
            self.value = self.b.node("MatMul", x, w)
            self.shape = (*self.shape[:-1], channels)

    def weight_shape(self, channels: int) -> tuple[int, ...]:
        return (channels, self.shape[1], 3, 3) if len(self.shape) == 4 else (self.shape[-1], channels)


def _start(b: Builder) -> Network:
    shape = (1, 4, 8, 8) if b.rng.integers(2) else (2, 8, 16)
    return Network(b, "x", shape)


def _pair(net: Network, signed: bool) -> str:
    """A QuantizeLinear and a DequantizeLinear on the network's value."""
    b = net.b
    kind, zero = (np.int8, 0) if signed else (np.uint8, 128)
    scale, point = b.const(b.float(0.03)), b.const(kind(zero))
    quantised = b.node("QuantizeLinear", net.value, scale, point)
    return b.node("DequantizeLinear", quantised, scale, point)


def qdq(b: Builder) -> onnx.ModelProto:
    net = _start(b)
    first, signed, unsigned = net.shape, bool(b.rng.integers(2)), bool(b.rng.integers(4) == 0)
    by_channel = bool(b.rng.integers(2))

    def layer(net: Network) -> None:
        x = _pair(net, signed)
        if b.rng.integers(4) == 0:  # between DequantizeLinear and its reader
            x = b.node("Reshape", x, b.const(np.int64(net.shape)))
        channels = int(b.rng.choice([4, 8]))
        weight = b.weight(*net.weight_shape(channels))
        axis = 0 if weight.ndim == 4 else 1
        others = tuple(i for i in range(weight.ndim) if i != axis)
        scale = np.abs(weight).max(others if by_channel else None).astype(np.float32) / 127 + 1e-6
        wide = np.expand_dims(scale, others) if by_channel else scale
        kind, zero = (np.uint8, 128) if unsigned else (np.int8, 0)
        stored = (np.clip(np.rint(weight / wide), -127, 127) + zero).astype(kind)
        point = np.full(scale.shape, zero, kind)
        attrs = {"axis": axis} if by_channel else {}
        w = b.node("DequantizeLinear", b.const(stored), b.const(scale), b.const(point), **attrs)
        net.apply(x, w, channels)

    net.layers(layer, int(b.rng.integers(1, 4)))
    return b.model("x", first, _pair(net, signed) if b.rng.integers(2) else net.value)


def dynamic(b: Builder) -> onnx.ModelProto:
    net = _start(b)
    first, kind = net.shape, [np.uint8, np.int8][int(b.rng.integers(2))]

    def layer(net: Network) -> None:
        b.nodes.append(
            helper.make_node("DynamicQuantizeLinear", [net.value], [f"{n}{len(b.nodes)}" for n in "qsz"])
        )
        quantised, scale, point = b.nodes[-1].output
        channels = int(b.rng.choice([4, 8]))
        shape = net.weight_shape(channels)
        low = 0 if kind is np.uint8 else -127
        weight, zero = b.const(b.rng.integers(low, low + 255, shape).astype(kind)), b.const(kind(low + 127))
        if len(shape) == 4:
            total = b.node("ConvInteger", quantised, weight, point, zero, pads=[1] * 4)
            net.shape = (net.shape[0], channels, *net.shape[2:])
        else:
            total = b.node("MatMulInteger", quantised, weight, point, zero)
            net.shape = (*net.shape[:-1], channels)
        scaled = b.node("Mul", scale, b.const(np.float32(0.002)))
        net.value = b.node("Mul", b.node("Cast", total, to=TensorProto.FLOAT), scaled)

    net.layers(layer, int(b.rng.integers(1, 4)))
    return b.model("x", first, net.value)


def qlinear(b: Builder) -> onnx.ModelProto:
    net = _start(b)
    first = net.shape
    kind, zero = (np.uint8, 128) if b.rng.integers(2) else (np.int8, 0)

    def layer(net: Network) -> None:
        scale, point = b.const(np.float32(0.03)), b.const(kind(zero))
        quantised = b.node("QuantizeLinear", net.value, scale, point)
        channels = int(b.rng.choice([4, 8]))
        shape = net.weight_shape(channels)
        weight = b.const(b.rng.integers(-127, 128, shape).astype(np.int8))
        of_weight = (b.const(np.float32(0.005)), b.const(np.int8(0)))
        given = (quantised, scale, point, weight, *of_weight, scale, point)
        if len(shape) == 4:
            total = b.node("QLinearConv", *given, pads=[1] * 4)
            net.shape = (net.shape[0], channels, *net.shape[2:])
        else:
            total = b.node("QLinearMatMul", *given)
            net.shape = (*net.shape[:-1], channels)
        net.value = b.node("DequantizeLinear", total, scale, point)

    net.layers(layer, int(b.rng.integers(1, 4)))
    return b.model("x", first, net.value)


def int4(b: Builder) -> onnx.ModelProto:
    b.opset = max(21, b.opset)
    first = (2, 8, 32)
    net = Network(b, "x", first)

    def layer(net: Network) -> None:
        channels = 32 if b.rng.integers(2) else 64
        inner, block = net.shape[-1], 16
        name = f"c{len(b.constants)}"
        values = b.rng.integers(-8, 8, inner * channels)
        b.constants.append(helper.make_tensor(name, TensorProto.INT4, (inner, channels), values))
        scale = b.const(
            np.abs(b.rng.standard_normal((inner // block, channels))).astype(np.float32) / 20 + 0.01
        )
        net.apply(net.value, b.node("DequantizeLinear", name, scale, axis=0, block_size=block), channels)

    for _ in range(int(b.rng.integers(1, 4))):
        layer(net)
        if net.b.rng.integers(2):
            net.value = b.node(str(b.rng.choice(["Relu", "Tanh", "Sigmoid"])), net.value)
    return b.model("x", first, net.value)


def float16(b: Builder) -> onnx.ModelProto:
    b.half = True
    net = _start(b)
    first = net.shape

    def layer(net: Network) -> None:
        channels = int(b.rng.choice([4, 8]))
        x, w = net.value, b.const(b.weight(*net.weight_shape(channels)))
        wide = b.rng.integers(3) == 0  # computed in float32, as converters leave some operators
        if wide:
            x, w = (b.node("Cast", v, to=TensorProto.FLOAT) for v in (x, w))
        net.apply(x, w, channels)
        if wide:
            net.value = b.node("Cast", net.value, to=TensorProto.FLOAT16)

    net.layers(layer, int(b.rng.integers(1, 4)))
    return b.model("x", first, net.value)


KINDS: dict[str, Callable[[Builder], onnx.ModelProto]] = {
    "qdq": qdq, "dynamic": dynamic, "qlinear": qlinear, "int4": int4, "float16": float16,
}  # fmt: skip
OPSETS = (13, 15, 17, 19, 20, 21, 22, 23)


def made(kind: str, seed: int) -> onnx.ModelProto:
    """The model of this kind and seed."""
    rng = np.random.default_rng([sorted(KINDS).index(kind), seed])
    return KINDS[kind](Builder(rng, int(rng.choice(OPSETS))))


# --- one model, in a process of its own ---


def _outputs(data: bytes, level: Any, feeds: dict[str, Any]) -> list[Any] | None:
    """None if ONNX Runtime does not load or run the model."""
    import onnxruntime as ort

    from xrlflow.backends.onnxruntime.session import ort_errors

    options = ort.SessionOptions()
    options.graph_optimization_level, options.log_severity_level = level, 4
    try:
        return list(ort.InferenceSession(data, options, providers=["CPUExecutionProvider"]).run(None, feeds))
    except ort_errors():
        return None


def examined(kind: str, seed: int) -> dict[str, Any]:
    """The fault of one model ("" if there is none), and what was done to it."""
    import onnxruntime as ort

    import xrlflow

    proto = made(kind, seed)
    original = proto.SerializeToString()
    shape = [d.dim_value for d in proto.graph.input[0].type.tensor_type.shape.dim]
    numbers = np.random.default_rng(seed).standard_normal(shape)
    feeds = {"x": numbers.astype(np.float16 if kind == "float16" else np.float32)}
    levels = [ort.GraphOptimizationLevel(n) for n in (0, 1, 2, 99)]
    before = [_outputs(original, level, feeds) for level in levels]
    if before[3] is None:
        return {"fault": "", "skipped": "ONNX Runtime does not run the original"}
    result = xrlflow.optimize(
        original, measure=False, portable=True, cost="roofline", time_limit=30.0, seed=seed
    )
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "out.onnx"
        result.save(path)
        data = path.read_bytes()
    after = [_outputs(data, level, feeds) for level in levels]
    faults = [
        f"does not load at level {level}"
        for level, a, b in zip((0, 1, 2, 99), before, after)
        if a is not None and b is None
    ]
    if before[0] is not None and after[0] is not None:
        for a, b in zip(before[0], after[0]):
            a, b = a.astype(np.float64), b.astype(np.float64)
            apart = float(np.abs(a - b).max(initial=0)) if a.shape == b.shape else float("inf")
            if apart > _RANGE * max(1e-3, float(np.ptp(a))):
                faults.append(f"outputs {apart:.3g} apart, of a range of {np.ptp(a):.3g}")
    report = result.report
    if not report.verified and not report.returned_original:
        faults.append("not verified")
    return {
        "fault": "; ".join(faults),
        "substitutions": dict(report.substitutions),
        "notes": list(report.notes),
    }


def run(only: str | None, first: int, graphs: int) -> list[dict[str, Any]]:
    """The results of this many models, the kinds in turn."""
    kinds = [only] if only else list(KINDS)
    found = []
    for at in range(graphs):
        kind, seed = kinds[at % len(kinds)], first + at // len(kinds)
        begin = time.monotonic()
        try:
            done = subprocess.run(
                [sys.executable, __file__, "--one", kind, "--seed", str(seed)],
                capture_output=True, text=True, timeout=_SECONDS, check=False,
            )  # fmt: skip
        except subprocess.TimeoutExpired:
            told: dict[str, Any] = {"fault": f"no answer in {_SECONDS:g} s"}
        else:
            last = (done.stderr.strip().splitlines() or ["nothing was said"])[-1]
            told = json.loads(done.stdout) if done.returncode == 0 else {"fault": last}
        found.append({"kind": kind, "seed": seed, "seconds": round(time.monotonic() - begin, 1), **told})
        if told["fault"]:
            print(f"{kind} {seed}: {told['fault']}", flush=True)
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description="Random quantised and float16 models through optimize.")
    parser.add_argument("--graphs", type=int, default=200)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--only", choices=sorted(KINDS))
    parser.add_argument("--one", choices=sorted(KINDS), help="examine one model in this process")
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    if arguments.one:
        print(json.dumps(examined(arguments.one, arguments.seed)))
        return
    found = run(arguments.only, arguments.seed, arguments.graphs)
    if arguments.json:
        arguments.json.write_text(json.dumps(found, indent=1))
    for kind, count in Counter(f["kind"] for f in found).items():
        own = [f for f in found if f["kind"] == kind]
        changed = sum(bool(f.get("substitutions")) for f in own)
        skipped = sum("skipped" in f for f in own)
        faults = sum(bool(f["fault"]) for f in own)
        print(f"{kind}: {count} models, {changed} changed, {skipped} skipped, {faults} faults")
    sys.exit(any(f["fault"] for f in found))


if __name__ == "__main__":
    main()
