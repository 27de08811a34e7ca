"""3x3 convolutions of ours against ONNX Runtime's: the table `convolutions` of `bench/lowering.py`.

In a network no layer finds its weights in the cache. So a layer is measured as a chain of four with different weights,
each with bias and ReLU; where the numbers of channels differ, a 1x1 convolution after each layer brings them back (as
in SqueezeNet; its time counts). `direct`, `f23`, `f43`: ONNX Runtime's time over that of our kernels with only this
algorithm; `best`: with the default choice. `rms` and `max`: errors of the default choice for one layer against double
precision, over those of our direct kernel, for the same normal pixels and weights.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass
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
from xrlflow.backends.tvm.algorithms import Algorithm, Algorithms

_CHAIN = 4
VARIANTS = {
    "direct": Algorithms(only=Algorithm.DIRECT),
    "f23": Algorithms(only=Algorithm.F23),
    "f43": Algorithms(only=Algorithm.F43),
    "best": Algorithms(),
}


@dataclass(frozen=True, slots=True)
class Layer:
    """A 3x3 convolution with a border of one pixel: channels, and rows of a square image."""

    channels: int
    columns: int
    side: int

    def __str__(self) -> str:
        if self.channels == self.columns:
            return f"{self.channels} at {self.side}"
        return f"{self.channels} to {self.columns} at {self.side}"

    def model(self, layers: int = _CHAIN) -> onnx.ModelProto:
        """A chain of layers. A single one has neither ReLU nor a 1x1 convolution."""
        rng = np.random.default_rng(0)
        lines, tensors, at = [], [], "x"

        def conv(name: str, given: str, shape: tuple[int, ...], more: str = "") -> None:
            weights = rng.standard_normal(shape) * np.sqrt(2.0 / np.prod(shape[1:]))
            bias = rng.standard_normal(shape[0]) / 8
            tensors.append(numpy_helper.from_array(weights.astype(np.float32), f"w{name}"))
            tensors.append(numpy_helper.from_array(bias.astype(np.float32), f"b{name}"))
            lines.append(f"c{name} = Conv{more}({given}, w{name}, b{name})")

        channels = self.columns if layers == 1 else self.channels
        for i in range(layers):
            conv(f"{i}", at, (self.columns, self.channels, 3, 3), "<pads = [1, 1, 1, 1]>")
            at = f"c{i}"
            if layers > 1:
                lines.append(f"r{i} = Relu(c{i})")
                at = f"r{i}"
            if channels != self.columns:
                conv(f"n{i}", at, (channels, self.columns, 1, 1))
                at = f"cn{i}"
        square = f"{self.side},{self.side}"
        text = (
            f'<ir_version: 9, opset_import: ["": 20]> agraph (float[1,{self.channels},{square}] x) => '
            f"(float[1,{channels},{square}] y) {{ {' '.join(lines)} y = Identity({at}) }}"
        )
        model = onnx.parser.parse_model(text)
        model.graph.initializer.extend(tensors)
        return model

    def pixels(self) -> npt.NDArray[np.float32]:
        rng = np.random.default_rng(1)
        return rng.standard_normal((1, self.channels, self.side, self.side)).astype(np.float32)


LAYERS = [
    Layer(*sizes)
    for sizes in (
        (64, 64, 56), (128, 128, 28), (256, 256, 14), (512, 512, 7), (32, 32, 112), (64, 64, 80),
        (16, 64, 55), (32, 128, 27), (64, 256, 13),
    )
]  # fmt: skip


def measure(layer: Layer, threads: int, seconds: float) -> Comparison:
    """ONNX Runtime, and our kernels in the order of `VARIANTS`, in turns."""
    data, machine, cpus = layer.model().SerializeToString(), detect(cores=threads), choose_cpus(threads)
    feeds = {"x": layer.pixels()}
    with ExitStack() as stack:
        runtime = stack.enter_context(open_model(data, threads=threads, cpus=cpus))
        ours = [Tvm(machine, algorithms=how).compile(data, threads=threads) for how in VARIANTS.values()]
        for model in ours:  # starts threads, which must not inherit that the caller is pinned
            model.run(feeds)
        calls = [model.bound_caller(feeds) for model in (runtime, *ours)]
        stack.enter_context(pinned(cpus))
        return interleave(calls, threads=threads, time_limit=seconds, target_width=0.01)


def errors(layer: Layer) -> tuple[float, float]:
    """The error of the default choice over that of the direct kernel: root mean square, and greatest."""
    model, x = layer.model(1), layer.pixels()
    weights, bias = (numpy_helper.to_array(t).astype(np.float64) for t in model.graph.initializer)
    padded = np.pad(x[0].astype(np.float64), ((0, 0), (1, 1), (1, 1)))
    windows = np.lib.stride_tricks.sliding_window_view(padded, (3, 3), axis=(1, 2))
    exact = np.tensordot(weights, windows, axes=((1, 2, 3), (0, 3, 4))) + bias[:, None, None]

    def of(how: Algorithms) -> tuple[float, float]:
        compiled: TvmModel = Tvm(detect(), algorithms=how).compile(model.SerializeToString())
        with compiled:
            (found,) = compiled.run({"x": x})
        difference = np.abs(np.asarray(found)[0] - exact)
        return float(np.sqrt(np.mean(difference**2))), float(difference.max())

    direct, best = of(VARIANTS["direct"]), of(VARIANTS["best"])
    return best[0] / direct[0], best[1] / direct[1]


def table(names: Sequence[str], threads: int, seconds: float, path: Path | None, write: str | None) -> None:
    """Print a row for each layer. `path`: a file for {layer: figures}. `write`: the name of the table of a page."""
    unknown = sorted({*names} - {str(layer) for layer in LAYERS})
    if unknown:
        raise SystemExit(f"{unknown[0]} is none of {', '.join(map(str, LAYERS))}")
    lines = [
        "| 3x3 | ONNX Runtime ms | A/A | " + " | ".join(VARIANTS) + " | rms | max |",
        "|---" * (5 + len(VARIANTS)) + "|",
    ]
    print("\n".join(lines), flush=True)
    rows: dict[str, dict[str, Any]] = {}
    for layer in LAYERS:
        if names and str(layer) not in names:
            continue
        found = measure(layer, threads, seconds)
        rms, greatest = errors(layer)
        runtime = found.latencies[0].median_ms / _CHAIN
        assert found.control is not None
        rows[str(layer)] = {
            "ort_ms": runtime, "threads": threads, "disturbed": found.load.disturbed, "rms": rms, "max": greatest,
            "control": asdict(found.control),
            **{name: asdict(interval) for name, interval in zip(VARIANTS, found.speedups, strict=True)},
        }  # fmt: skip
        cells = [_cell(interval) for interval in (found.control, *found.speedups)]
        star = " *" if found.load.disturbed else ""
        lines.append(f"| {layer}{star} | {runtime:.3f} | {' | '.join(cells)} | {rms:.2f} | {greatest:.2f} |")
        print(lines[-1], flush=True)
        if path is not None:
            path.write_text(json.dumps(rows, indent=1))
    if write is not None:
        pages.write(write, "\n".join(lines))


def _cell(interval: SpeedUp) -> str:
    return f"{interval.median:.3f} [{interval.low:.3f}, {interval.high:.3f}]"
