"""TVM against ONNX Runtime: `python bench/lowering.py TABLE [--tune SECONDS] [--json FILE] [NAMES]`; TABLE is one of
operators, models, networks, bounds, convolutions.

Operators: single operators of sizes that are common in networks, with tensors that stay in the runtime. Models: whole
networks, from arrays to arrays, as a program calls them: ONNX Runtime on the original; TVM on the original graph,
untuned; TVM on the graph that greedy search finds. With `--tune`, also the original graph with kernels tuned by each of
`--methods` for so many seconds, or until nothing is left to measure, and the rewritten graph tuned by the first method;
none knows the others' measurements. Where compilations use a predictor, tuning begins with its choices; untuned kernels
are those of the estimates. All variants are timed in turns in one process; A/A is ONNX Runtime against itself.
Networks: every network of the zoo at full size, and every model of a package, as `optimize --backend tvm --search
greedy --cost roofline --no-measure` handles it: compiled and verified, or the error. Bounds: the cost of moving indices
inside their tables and checking them: models that look rows up, compiled with and without that, timed in turns.
Convolutions: see `bench/convolutions.py`.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack, redirect_stdout
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest import mock

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import numpy as np
import onnx

import models
import xrlflow
from bench import convolutions, pages
from bench.latency import cell
from models import wheels
from models.operators import OPERATORS, operator
from xrlflow.api import UserError, VerificationFailed
from xrlflow.backends.interleave import interleave
from xrlflow.backends.onnxruntime import open_model
from xrlflow.backends.placement import choose_cpus, pinned
from xrlflow.backends.results import Comparison
from xrlflow.backends.tvm import Tvm, TvmModel, detect
from xrlflow.backends.tvm.devices.execution import ExecutionTarget
from xrlflow.backends.tvm.lowering import bounds
from xrlflow.cost import Roofline
from xrlflow.onnxio.exporter import to_proto
from xrlflow.onnxio.importer import load
from xrlflow.tuning.lowering import Lowering
from xrlflow.tuning.models import TuningPlan, tune_model
from xrlflow.tuning.one_shot.predictor import for_compiling
from xrlflow.tuning.store import Store
from xrlflow.tuning.tuners.protocol import Method

_STANDARD_OUTPUT = Path("-")
MODELS: Mapping[str, Callable[[], onnx.ModelProto]] = {
    "resnet18": lambda: models.build("resnet18"),
    "mobilenetv2": lambda: models.build("mobilenetv2"),
    "efficientnet-b0": lambda: models.build("efficientnet-b0"),
    "bert, 2 layers": lambda: models.build("bert", depth=2),
    "vit, 2 layers": lambda: models.build("vit", depth=2),
    "nasrnn-shared": lambda: models.build("nasrnn-shared"),
    "gru-unrolled": lambda: models.build("gru-unrolled"),
    "resnext50": lambda: models.build("resnext50"),
    "nasnet-a": lambda: models.build("nasnet-a"),
    "squeezenet": lambda: models.build("squeezenet"),
    "inceptionv3": lambda: models.build("inceptionv3"),
    "resnet50": lambda: models.build("resnet50"),
    "unet": lambda: models.build("unet"),
    "yolo": lambda: models.build("yolo"),
    "nudenet": lambda: wheel("nudenet"),
    "gpt2, 2 layers": lambda: models.build("gpt2", depth=2),
    "rapidocr-det": lambda: wheel("rapidocr-det"),
    "rapidocr-rec": lambda: wheel("rapidocr-rec"),
    "magika": lambda: wheel("magika"),
    "basic-pitch": lambda: wheel("basic-pitch"),
    "open-nsfw": lambda: wheel("open-nsfw"),
}
LOOK_UP: Mapping[str, Callable[[], onnx.ModelProto]] = {
    "bert, 2 layers": MODELS["bert, 2 layers"],
    "gpt2, 2 layers": MODELS["gpt2, 2 layers"],
    "dalle, 2 layers": lambda: models.build("dalle", depth=2),
    "minilm": lambda: wheel("minilm-int8"),
    # Nothing but two tables and a product: the worst case.
    "two tables": lambda: onnx.parser.parse_model(
        '<ir_version: 9, opset_import: ["": 20]> agraph (int64[64] i, int32[64] j, float[1000,256] t, '
        "float[512,256] p, float[256,256] w) => (float[64,256] y) { a = Gather(t, i) b = Gather(p, j) c = Add(a, b) "
        "y = MatMul(c, w) }"
    ),
}
"""Models whose inputs are indices."""
# In addition to `OPERATORS`: chains that become one kernel.
CHAINS = {
    f"attention 12 x {tokens}x64": f"(float[1,{tokens},12,64] q, float[1,{tokens},12,64] k, float[1,{tokens},12,64] v,"
    f" float[1,1,1,{tokens}] m) => (float[1,{tokens},12,64] y) <float t = {{0.125}}> {{"
    " a = Transpose<perm=[0,2,1,3]>(q) c = Transpose<perm=[0,2,3,1]>(k) d = Transpose<perm=[0,2,1,3]>(v)"
    " p = MatMul(a, c) r = Mul(p, t) z = Add(r, m) u = Softmax<axis=-1>(z) o = MatMul(u, d)"
    " y = Transpose<perm=[0,2,1,3]>(o) }"
    for tokens in (64, 128, 197, 384, 1024)
}


def wheel(name: str) -> onnx.ModelProto:
    """A model of a package, with the sizes at which it is measured."""
    imported = load(str(wheels.fetch(name)), shapes=wheels.WHEELS[name].shapes, fix_shapes=True)
    return to_proto(imported, imported.graph)


def inputs(compiled: TvmModel) -> dict[str, Any]:
    rng = np.random.default_rng(0)
    return {
        value.name: rng.standard_normal(value.shape).astype(value.dtype)
        if "float" in value.dtype
        else np.ones(value.shape, value.dtype)
        for value in compiled.interface.inputs
    }


@dataclass(frozen=True, slots=True)
class Tuned:
    """A model tuned by one method: the number of measured kernels, and the seconds."""

    model: TvmModel
    measured: int
    seconds: float


def tuned(proto: onnx.ModelProto, seconds: float, threads: int, method: Method) -> Tuned:
    plan = TuningPlan(method, trials=1_000_000, batch=16, time_limit=seconds, seed=0)
    with tempfile.TemporaryDirectory() as folder, Store(Path(folder) / "tuning.sqlite") as store:
        path = str(Path(folder) / "model.onnx")
        onnx.save(proto, path)
        machine = detect(cores=threads)
        how = Lowering(ExecutionTarget(machine), {}, folder, store, predictor=for_compiling(machine))
        begin = time.monotonic()
        found = tune_model(how, path, [path], None, plan)
        return Tuned(found.model, found.tuning.measured, time.monotonic() - begin)


def timed(
    proto: onnx.ModelProto, variants: Sequence[TvmModel], threads: int, seconds: float, bound: bool
) -> Comparison:
    cpus = choose_cpus(threads)
    with ExitStack() as stack:
        runtime = stack.enter_context(open_model(proto.SerializeToString(), threads=threads, cpus=cpus))
        feeds = inputs(variants[0])
        expected = runtime.run(feeds)
        for variant in variants:
            for a, b in zip(expected, variant.run(feeds), strict=True):
                scale = float(np.abs(a).max())
                if not np.allclose(a, b, rtol=1e-4, atol=1e-5 * max(scale, 1.0)):
                    raise SystemExit(
                        f"TVM computes something else: off by {float(np.abs(a - b).max()):g} of {scale:g}"
                    )
        everything = [runtime, *variants]
        calls = [m.bound_caller(feeds) if bound else m.caller(feeds) for m in everything]
        stack.enter_context(pinned(cpus))
        return interleave(calls, threads=threads, time_limit=seconds, target_width=0.01)


def methods(text: str) -> list[Method]:
    return list(Method) if text == "all" else [Method(word) for word in text.split(",")]


def row(name: str, names: Sequence[str], comparison: Comparison, facts: Mapping[str, Any]) -> dict[str, Any]:
    control = comparison.control
    found: dict[str, Any] = {
        "name": name, "onnxruntime_ms": comparison.latencies[0].median_ms,
        "control": [control.median, control.low, control.high] if control else None,
        "disturbed": comparison.load.disturbed, "threads": comparison.threads, **facts,
    }  # fmt: skip
    for variant, speedup in zip(names, comparison.speedups):
        found[variant] = [speedup.median, speedup.low, speedup.high]
    star = " *" if comparison.load.disturbed else ""
    shown = ["-" if control is None else cell(found["control"]), *(cell(found[v]) for v in names)]
    found["line"] = f"| {name}{star} | {comparison.latencies[0].median_ms:.3f} | {' | '.join(shown)} |"
    print(found["line"], flush=True)
    return found


def networks(names: Sequence[str], threads: int, path: Path | None) -> None:
    known = [*models.ZOO, *wheels.WHEELS]
    for name in names:
        if name not in known:
            raise SystemExit(f"{name} is none of {', '.join(known)}")
    print("| network | seconds | compiled | greatest difference | of the tolerance |")
    print("|---|---|---|---|---|", flush=True)
    rows = []
    for name in names or known:
        packaged = name in wheels.WHEELS
        begin = time.monotonic()
        found: dict[str, Any] = {"name": name, "said": "verified"}
        try:
            result = xrlflow.optimize(
                str(wheels.fetch(name)) if packaged else models.build(name),
                backend="tvm", search="greedy", cost="roofline", measure=False, threads=threads,
                shapes=wheels.WHEELS[name].shapes if packaged else None,
            )  # fmt: skip
        except (*UserError, VerificationFailed) as error:
            found["said"] = str(error)
        else:
            assert result.verification is not None
            assert result.verification.worst is not None
            found["difference"] = result.verification.max_error
            found["ratio"] = result.verification.worst.judgement.ratio
        found["seconds"] = time.monotonic() - begin
        cells = f"{found['difference']:.1e} | {found['ratio']:.2f}" if "ratio" in found else "- | -"
        print(f"| {name} | {found['seconds']:.0f} | {found['said']} | {cells} |", flush=True)
        rows.append(found)
        if path is not None:
            path.write_text(json.dumps(rows, indent=1))


def cost_of_bounds(names: Sequence[str], threads: int, seconds: float, path: Path | None) -> None:
    print("| model | without checks ms | A/A | with checks |")
    print("|---|---|---|---|", flush=True)
    rows = []
    for name in names or LOOK_UP:
        if name not in LOOK_UP:
            raise SystemExit(f"{name} is none of {', '.join(LOOK_UP)}")
        proto, machine = LOOK_UP[name]().SerializeToString(), detect(cores=threads)
        checked = Tvm(machine).compile(proto, threads=threads)
        with mock.patch.dict(bounds.RULES, clear=True):
            without = Tvm(machine).compile(proto, threads=threads)
        if not checked.interface.checks or without.interface.checks:
            raise SystemExit(
                f"{name}: {len(checked.interface.checks)} checks, {len(without.interface.checks)} without"
            )
        feeds = inputs(checked)
        with pinned(choose_cpus(threads)):
            calls = [without.caller(feeds), checked.caller(feeds)]
            comparison = interleave(calls, threads=threads, time_limit=seconds, target_width=0.005)
        rows.append(row(name, ["with checks"], comparison, {"checks": len(checked.interface.checks)}))
        rows[-1]["without_ms"] = rows[-1].pop("onnxruntime_ms")
        if path is not None:
            path.write_text(json.dumps(rows, indent=1))


def _parsed() -> argparse.Namespace:
    """The parsed command line. Ends the program if options do not fit together."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("table", choices=("operators", "models", "networks", "bounds", "convolutions"))
    parser.add_argument("names", nargs="*", help="some of them; default: all")
    parser.add_argument("--tune", type=float, default=0.0, help="seconds of tuning for each")
    parser.add_argument(
        "--methods", type=methods, default=[Method.CHAMELEON], help="of tuning, with commas; or: all"
    )
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--seconds", type=float, default=10.0, help="of each measurement")
    parser.add_argument(
        "--json", type=Path, nargs="?", const=_STANDARD_OUTPUT,
        help="put the figures into this file; without a name: print them, and the table as an error",
    )  # fmt: skip
    parser.add_argument(
        "--write",
        action="store_true",
        help="operators, models, convolutions: put the table into docs/benchmarks",
    )
    options = parser.parse_intermixed_args()
    if options.write and (options.names or options.table in ("networks", "bounds")):
        parser.error(
            "--write takes a whole table (of operators, models or convolutions): leave the names out"
        )
    if options.write and _table_name(options) not in pages.tables():
        parser.error(f"--write: no page has a table {_table_name(options)}")
    if options.table == "networks" and options.tune:
        parser.error("networks are not tuned: leave --tune out")
    if options.table in ("bounds", "convolutions") and options.tune:
        parser.error(f"{options.table} are not tuned: leave --tune out")
    return options


def main() -> None:
    options = _parsed()
    if options.json != _STANDARD_OUTPUT:
        _print_table(options)
        return
    with tempfile.TemporaryDirectory() as folder:
        options.json = Path(folder) / "figures.json"
        with redirect_stdout(sys.stderr):
            _print_table(options)
        print(options.json.read_text())


def _print_table(options: argparse.Namespace) -> None:
    if options.table == "networks":
        networks(options.names, options.threads, options.json)
    elif options.table == "bounds":
        cost_of_bounds(options.names, options.threads, options.seconds, options.json)
    elif options.table == "convolutions":
        name = _table_name(options) if options.write else None
        convolutions.table(options.names, options.threads, options.seconds, options.json, name)
    else:
        _compare_variants(options)


def _compare_variants(options: argparse.Namespace) -> None:
    """Print the tables of operators and of models, row by row."""
    known: Mapping[str, Any] = {**OPERATORS, **CHAINS} if options.table == "operators" else MODELS
    rows = []
    whole = options.table == "models"
    # Pairs of a graph (the original one, the rewritten one) and a method.
    tunings = [(0, method) for method in options.methods] + [(1, options.methods[0])] * whole
    labels = [f"rewritten, {method.value}" if graph else method.value for graph, method in tunings]
    names = ["TVM", *["rewritten"] * whole, *(labels if options.tune else ())]
    head = [
        f"| {options.table} | ONNX Runtime ms | A/A | " + " | ".join(names) + " |",
        "|---" * (3 + len(names)) + "|",
    ]
    print("\n".join(head), flush=True)
    for name in options.names or known:
        if name not in known:
            raise SystemExit(f"{name} is none of {', '.join(known)}")
        proto = operator(known[name]) if options.table == "operators" else known[name]()
        machine = detect(cores=options.threads)
        variants = [Tvm(machine).compile(proto.SerializeToString(), threads=options.threads)]
        facts: dict[str, Any] = {}
        graphs = [proto]
        if whole:
            rewritten, its_graph = _rewritten(proto, options.threads)
            variants.append(rewritten)
            graphs.append(its_graph)
        for label, (graph, method) in zip(labels, tunings if options.tune else ()):
            found = tuned(graphs[graph], options.tune, options.threads, method)
            variants.append(found.model)
            facts[f"{label} measured"], facts[f"{label} s"] = found.measured, found.seconds
            print(f"{name}, {label}: {found.measured} in {found.seconds:.0f} s", file=sys.stderr, flush=True)
        comparison = timed(proto, variants, options.threads, options.seconds, options.table == "operators")
        rows.append(row(name, names, comparison, facts))
        if options.json is not None:
            options.json.write_text(json.dumps(rows, indent=1))
    if options.write:
        pages.write(_table_name(options), "\n".join([*head, *(row["line"] for row in rows)]))


def _rewritten(proto: onnx.ModelProto, threads: int) -> tuple[TvmModel, onnx.ModelProto]:
    """The result of greedy search on a model, compiled, and its graph."""
    with tempfile.TemporaryDirectory() as folder:
        with Store(Path(folder) / "tuning.sqlite") as nothing:  # not the user's, which may know tuned kernels
            nothing.check()
        result = xrlflow.optimize(
            proto, backend="tvm", search="greedy", cost=Roofline(), measure=False, verify=False,
            threads=threads, store=nothing.path,
        )  # fmt: skip
    assert result.compiled is not None
    return result.compiled, to_proto(result.imported, result.graph)


def _table_name(options: argparse.Namespace) -> str:
    """The name of the table in docs/benchmarks: those of 2 threads, untuned, have plain names."""
    threads = {1: "-1-thread", 2: ""}.get(options.threads, f"-{options.threads}-threads")
    return f"lowering-{options.table}{threads}{'-tuned' if options.tune else ''}"


if __name__ == "__main__":
    main()
