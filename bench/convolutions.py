"""Convolutions of ours against ONNX Runtime's: the table `convolutions` of `bench/lowering.py`.

In a network no layer finds its weights in the cache. So a layer is measured as a chain of four with different weights.
A 3x3 convolution has bias and ReLU; where the numbers of channels differ, a 1x1 convolution after each layer brings
them back (as in SqueezeNet; its time counts). An inverted residual is a 1x1, a depthwise and a 1x1 convolution, with
Clip and a residual; those with a stride stand side by side, and their results are added up.

`direct`, `f23`, `f43`: ONNX Runtime's time over that of our kernels with only this algorithm (an inverted residual as
three kernels); `best`: with the default choice. `rms` and `max`: errors of the default choice for one layer against
double precision, over those of `direct`, for the same normal pixels and weights.
"""

from __future__ import annotations

import json
from abc import ABC, abstractmethod
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import onnx
import onnx.parser
from onnx import numpy_helper

from bench import pages
from xrlflow.backends.interleave import interleave
from xrlflow.backends.onnxruntime import open_model
from xrlflow.backends.placement import choose_cpus, pinned
from xrlflow.backends.results import Comparison, SpeedUp
from xrlflow.backends.tvm import Tvm, TvmModel, detect
from xrlflow.backends.tvm.kernels.algorithms import Algorithms
from xrlflow.backends.tvm.kernels.layer_kernels import Algorithm
from xrlflow.onnxio import load
from xrlflow.ops.evaluate import evaluate_graph

_CHAIN = 4
VARIANTS = {
    "direct": Algorithms(exact=True, blocks=False),  # a kernel for each convolution
    "f23": Algorithms(only=Algorithm.F23),
    "f43": Algorithms(only=Algorithm.F43),
    "best": Algorithms(),
}


@dataclass(slots=True)
class _Body:
    """The nodes of a model, and its weights."""

    rng: np.random.Generator = field(default_factory=lambda: np.random.default_rng(0))
    lines: list[str] = field(default_factory=list)
    tensors: list[onnx.TensorProto] = field(default_factory=list)

    def conv(self, given: str, shape: tuple[int, ...], more: str = "") -> str:
        """Append a convolution with weights of this shape and a bias, and return its result."""
        name = f"c{len(self.tensors)}"
        weights = self.rng.standard_normal(shape) * np.sqrt(2.0 / np.prod(shape[1:]))
        bias = self.rng.standard_normal(shape[0]) / 8
        for kind, array in (("w", weights), ("b", bias)):
            self.tensors.append(numpy_helper.from_array(array.astype(np.float32), f"{kind}{name}"))
        return self.node(f"Conv{more}({given}, w{name}, b{name})")

    def node(self, call: str) -> str:
        name = f"v{len(self.lines)}"
        self.lines.append(f"{name} = {call}")
        return name


class Chain(ABC):
    """Layers one after the other."""

    variants: Sequence[str] = tuple(VARIANTS)
    image: tuple[int, int, int]
    """Channels, rows and columns."""

    @abstractmethod
    def layers(self, body: _Body, count: int) -> str:
        """Append so many layers to a model whose input is x, and return the result."""

    def model(self, count: int = _CHAIN) -> onnx.ModelProto:
        body = _Body()
        result = self.layers(body, count)
        sizes = ",".join(map(str, self.image))
        text = (
            f'<ir_version: 9, opset_import: ["": 20]> agraph (float[1,{sizes}] x) => (float[1,c,h,w] y) '
            f"<float low = {{0}}, float high = {{6}}> {{ {' '.join(body.lines)} y = Identity({result}) }}"
        )
        model = onnx.parser.parse_model(text)
        model.graph.initializer.extend(body.tensors)
        return onnx.shape_inference.infer_shapes(model, strict_mode=True, data_prop=True)

    def pixels(self) -> npt.NDArray[np.float32]:
        return np.random.default_rng(1).standard_normal((1, *self.image)).astype(np.float32)


@dataclass(frozen=True, slots=True)
class Layer(Chain):
    """A 3x3 convolution with a border of one pixel: channels, and rows of a square image."""

    channels: int
    columns: int
    side: int

    def __str__(self) -> str:
        if self.channels == self.columns:
            return f"{self.channels} at {self.side}"
        return f"{self.channels} to {self.columns} at {self.side}"

    @property
    def image(self) -> tuple[int, int, int]:  # type: ignore[override]
        return self.channels, self.side, self.side

    def layers(self, body: _Body, count: int) -> str:
        """A single layer has neither ReLU nor a 1x1 convolution."""
        at = "x"
        for _ in range(count):
            at = body.conv(at, (self.columns, self.channels, 3, 3), "<pads = [1, 1, 1, 1]>")
            if count > 1:
                at = body.node(f"Relu({at})")
            if count > 1 and self.columns != self.channels:
                at = body.conv(at, (self.channels, self.columns, 1, 1))
        return at


@dataclass(frozen=True, slots=True)
class Block(Chain):
    """An inverted residual: channels, expanded channels, rows of a square image, and the depthwise stride."""

    channels: int
    wide: int
    side: int
    stride: int = 1

    def __str__(self) -> str:
        strided = f", stride {self.stride}" if self.stride > 1 else ""
        return f"block of {self.channels} to {self.wide} at {self.side}{strided}"

    @property
    def variants(self) -> Sequence[str]:  # type: ignore[override]
        return "direct", "best"

    @property
    def image(self) -> tuple[int, int, int]:  # type: ignore[override]
        return self.channels, self.side, self.side

    def layers(self, body: _Body, count: int) -> str:
        at = "x"
        for turn in range(count):
            given, before = ("x" if self.stride > 1 else at), at
            at = body.node(f"Clip({body.conv(given, (self.wide, self.channels, 1, 1))}, low, high)")
            window = f"<group = {self.wide}, pads = [1, 1, 1, 1], strides = [{self.stride}, {self.stride}]>"
            at = body.node(f"Clip({body.conv(at, (self.wide, 1, 3, 3), window)}, low, high)")
            at = body.conv(at, (self.channels, self.wide, 1, 1))
            if self.stride == 1 or turn:
                at = body.node(f"Add({before}, {at})")
        return at


LAYERS: Sequence[Chain] = (
    *(
        Layer(*sizes)
        for sizes in (
            (64, 64, 56), (128, 128, 28), (256, 256, 14), (512, 512, 7), (32, 32, 112), (64, 64, 80),
            (16, 64, 55), (32, 128, 27), (64, 256, 13),
        )
    ),
    *(
        Block(*sizes)
        for sizes in ((16, 96, 112), (24, 144, 56), (32, 192, 28), (96, 576, 14), (160, 960, 7), (16, 96, 112, 2))
    ),
)  # fmt: skip


def compiled(model: onnx.ModelProto, name: str, threads: int) -> TvmModel:
    backend = Tvm(detect(cores=threads), algorithms=VARIANTS[name])
    return backend.compile(model.SerializeToString(), threads=threads)


def measure(chain: Chain, threads: int, seconds: float) -> Comparison:
    """ONNX Runtime, and our kernels in the order of the chain's variants, in turns."""
    model, cpus, feeds = chain.model(), choose_cpus(threads), {"x": chain.pixels()}
    with ExitStack() as stack:
        runtime = stack.enter_context(open_model(model.SerializeToString(), threads=threads, cpus=cpus))
        ours = [compiled(model, name, threads) for name in chain.variants]
        for variant in ours:  # starts threads, which must not inherit that the caller is pinned
            variant.run(feeds)
        calls = [runtime.bound_caller(feeds), *(each.bound_caller(feeds) for each in ours)]
        stack.enter_context(pinned(cpus))
        return interleave(calls, threads=threads, time_limit=seconds, target_width=0.01)


def errors(chain: Chain) -> tuple[float, float]:
    """The error of the default choice over that of the direct kernels: root mean square, and greatest."""
    model, x = chain.model(1), chain.pixels()
    graph = load(model).graph
    (exact,) = evaluate_graph(graph, {graph.inputs[0]: x})

    def of(name: str) -> tuple[float, float]:
        with compiled(model, name, 1) as kernels:
            (found,) = kernels.run({"x": x})
        difference = np.abs(np.asarray(found) - exact)
        return float(np.sqrt(np.mean(difference**2))), float(difference.max())

    direct, best = of("direct"), of("best")
    return best[0] / direct[0], best[1] / direct[1]


def table(names: Sequence[str], threads: int, seconds: float, path: Path | None, write: str | None) -> None:
    """Print a row for each layer. `path`: a file for {layer: figures}. `write`: the name of the table of a page."""
    unknown = sorted({*names} - {str(chain) for chain in LAYERS})
    if unknown:
        raise SystemExit(f"{unknown[0]} is none of {', '.join(map(str, LAYERS))}")
    lines = [
        "| layer | ONNX Runtime ms | A/A | " + " | ".join(VARIANTS) + " | rms | max |",
        "|---" * (5 + len(VARIANTS)) + "|",
    ]
    print("\n".join(lines), flush=True)
    rows: dict[str, dict[str, Any]] = {}
    for chain in LAYERS:
        if names and str(chain) not in names:
            continue
        found = measure(chain, threads, seconds)
        rms, greatest = errors(chain)
        runtime = found.latencies[0].median_ms / _CHAIN
        assert found.control is not None
        speedups = dict(zip(chain.variants, found.speedups, strict=True))
        rows[str(chain)] = {
            "ort_ms": runtime, **{name: speedup.median for name, speedup in speedups.items()},
            "rms": rms, "max": greatest, "threads": threads, "disturbed": found.load.disturbed,
            "intervals": {name: asdict(each) for name, each in {"A/A": found.control, **speedups}.items()},
        }  # fmt: skip
        cells = [_cell(found.control), *(_cell(speedups.get(name)) for name in VARIANTS)]
        star = " *" if found.load.disturbed else ""
        lines.append(f"| {chain}{star} | {runtime:.3f} | {' | '.join(cells)} | {rms:.2f} | {greatest:.2f} |")
        print(lines[-1], flush=True)
        if path is not None:
            path.write_text(json.dumps(rows, indent=1))
    if write is not None:
        pages.write(write, "\n".join(lines))


def _cell(interval: SpeedUp | None) -> str:
    return "-" if interval is None else f"{interval.median:.3f} [{interval.low:.3f}, {interval.high:.3f}]"
