"""Session creation and memory with generated kernels: `python bench/loading.py [NAMES] [--turns N] [--write]`.

For each model: the original, the file with kernels and its library, and the same file without the library. Each session
is created and run once in a process of its own; the variants take turns. Seconds are those of creating the session,
megabytes are what the process's peak resident memory has grown by since before, medians over turns. Sizes are those of
the files. The ratio of the seconds of two runs of the original is the control.

`--guard` measures another thing: for models of open sizes, how many times as fast the same kernels are in a model of
fixed sizes, without the comparison of sizes, in turns in one process.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import numpy as np
import onnx

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))  # for `models`

from bench import latency, pages
from xrlflow.backends.library_files import library_path
from xrlflow.backends.onnxruntime import measure
from xrlflow.backends.tvm import detect
from xrlflow.backends.tvm.library.code_generation import compile_region
from xrlflow.backends.tvm.library.hybrid import hybrid
from xrlflow.backends.tvm.library.kernel_library import kernel_library
from xrlflow.backends.tvm.lowering.value_types import types_of
from xrlflow.onnxio import ImportedModel, load, save, to_proto
from xrlflow.onnxio.regions import region_of, with_functions
from xrlflow.pipeline.use import options_with_kernels

DEFAULT = ("squeezenet", "mobilenetv2", "resnet50", "bert-classifier", "rapidocr-rec", "basic-pitch")
VARIANTS = ("original", "with kernels", "without the library", "weights as inputs", "original again")
"""Weights as inputs: the choice that was not made, where the weights are inputs of the region's node."""
_CHILD = """
import json, re, sys, time
import numpy as np, onnxruntime as ort
model, library, feeds, threads = sys.argv[1:]
given = dict(np.load(feeds))
peak = lambda: int(re.search("VmHWM: *(.*) kB", open("/proc/self/status").read())[1]) / 1000
before = peak()
begin = time.perf_counter()
options = ort.SessionOptions()
options.intra_op_num_threads = int(threads)
if library:
    options.register_custom_ops_library(library)
session = ort.InferenceSession(model, options, providers=["CPUExecutionProvider"])
created = time.perf_counter() - begin
session.run(None, given)
print(json.dumps([created, peak() - before]))
"""


def sample(model: str, library: str, feeds: Path, threads: int) -> tuple[float, float]:
    """Seconds of creating a session, and megabytes after its first run."""
    done = subprocess.run(
        [sys.executable, "-c", _CHILD, model, library, str(feeds), str(threads)],
        capture_output=True, text=True, check=True,
    )  # fmt: skip
    created, grown = json.loads(done.stdout)
    return created, grown


def row(name: str, turns: int, threads: int) -> dict[str, Any]:
    with tempfile.TemporaryDirectory(prefix="xrlflow-bench-") as temporary:
        folder = Path(temporary)
        path, shapes, given = latency.source(name, folder)
        feeds = folder / "feeds.npz"
        np.savez(feeds, **given)
        imported = load(path, shapes=shapes)
        plain, with_kernels = folder / "plain.onnx", folder / "kernels.onnx"
        save(imported, imported.graph, plain, max_growth=10.0)
        sizes = {input: np.shape(value) for input, value in given.items()}
        hybrid(onnx.load(plain), sizes, detect(None, threads)).save(with_kernels)
        library = library_path(with_kernels)
        other = folder / "inputs.onnx"
        _with_weights_as_inputs(load(path, shapes=sizes, fix_shapes=True), other, threads)
        chosen = {
            "original": (path, ""),
            "with kernels": (str(with_kernels), str(library)),
            "without the library": (str(with_kernels), ""),
            "weights as inputs": (str(other), str(library_path(other))),
            "original again": (path, ""),
        }
        found: dict[str, list[tuple[float, float]]] = {variant: [] for variant in chosen}
        for turn in range(turns):
            order = list(chosen) if turn % 2 == 0 else list(reversed(chosen))
            for variant in order:
                found[variant].append(sample(*chosen[variant], feeds, threads))
        files = {
            "original": Path(path).stat().st_size,
            "with kernels": with_kernels.stat().st_size,
            "library": library.stat().st_size,
        }
    return {
        "model": name,
        "bytes": files,
        "seconds": {v: statistics.median(s for s, _ in samples) for v, samples in found.items()},
        "megabytes": {v: statistics.median(m for _, m in samples) for v, samples in found.items()},
        "turns": turns,
        **latency.circumstances(),
    }


def _with_weights_as_inputs(imported: ImportedModel, path: Path, threads: int) -> None:
    """Write a model of fixed sizes as one region that has its weights as inputs, and its library."""
    model, machine = to_proto(imported, imported.graph), detect(None, threads)
    region = region_of(model.graph, range(len(model.graph.node)))
    compiled = compile_region(model, region, types_of(model, {}), machine, weights_as_inputs=True)
    library = kernel_library({"R": compiled}, machine)
    library.save(library_path(path))
    onnx.save(with_functions(model, {"R": region}, library.domain, weights_as_inputs=True), path)


def guard(name: str, seconds: float, threads: int) -> str:
    """A line: how many times as fast a model of fixed sizes is as one whose sizes are compared first."""
    with tempfile.TemporaryDirectory(prefix="xrlflow-bench-") as temporary:
        folder = Path(temporary)
        path, _, given = latency.source(name, folder)
        sizes = {input: np.shape(value) for input, value in given.items()}
        files = [folder / "guarded.onnx", folder / "fixed.onnx"]
        for file, imported in zip(files, (load(path), load(path, shapes=sizes, fix_shapes=True))):
            hybrid(to_proto(imported, imported.graph), sizes, detect(None, threads)).save(file)
        nodes = [len(onnx.load(file).graph.node) for file in files]
        compared = measure(
            list(map(str, files)), given, threads=threads, time_limit=seconds, control=True,
            session_options=options_with_kernels(*map(str, files)),
        )  # fmt: skip
    return f"| {name} | {nodes[0]} and {nodes[1]} nodes | {compared.control} | {compared.speedup} |"


def table(rows: list[dict[str, Any]]) -> str:
    lines = [
        "| model | original MB | with kernels MB + library MB | session s: original | with kernels | "
        "without the library | weights as inputs | A/A | memory MB: original | with kernels | without the library | "
        "weights as inputs |",
        "|---|" + "---|" * 11,
    ]
    for r in rows:
        size, seconds, memory = r["bytes"], r["seconds"], r["megabytes"]
        cells = [
            f"{size['original'] / 1e6:.1f}",
            f"{size['with kernels'] / 1e6:.1f} + {size['library'] / 1e6:.1f}",
            *(f"{seconds[v]:.3f}" for v in VARIANTS[:4]),
            f"{seconds['original again'] / seconds['original']:.2f}",
            *(f"{memory[v]:.0f}" for v in VARIANTS[:4]),
        ]
        lines.append(f"| {r['model']} | {' | '.join(cells)} |")
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("names", nargs="*", default=DEFAULT, help=f"models; default: {', '.join(DEFAULT)}")
    parser.add_argument("--turns", type=int, default=7, help="processes for each variant")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--json", type=Path, default=Path("out/loading.json"), help="rows are kept here")
    parser.add_argument("--write", action="store_true", help="put the table into docs/benchmarks")
    parser.add_argument("--guard", action="store_true", help="the cost of comparing sizes, instead")
    arguments = parser.parse_args()
    if unknown := set(arguments.names) - set(latency.names()):
        sys.exit(f"no such model: {', '.join(sorted(unknown))}; there are {', '.join(latency.names())}")
    if arguments.guard:
        for name in arguments.names:
            print(guard(name, 20.0, arguments.threads), flush=True)
        return
    rows = []
    for name in arguments.names:
        rows.append(row(name, arguments.turns, arguments.threads))
        print(table(rows[-1:]).splitlines()[2], flush=True)
    arguments.json.parent.mkdir(parents=True, exist_ok=True)
    arguments.json.write_text(json.dumps(rows, indent=1))
    text = f"{latency.said(rows)}, {rows[0]['turns']} processes each.\n\n{table(rows)}"
    print(text)
    if arguments.write:
        pages.write("loading", text)


if __name__ == "__main__":
    main()
