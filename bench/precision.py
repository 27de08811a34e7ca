"""Low-precision models, measured and checked: `python bench/precision.py [FILES] [--threads 2,1] [--kept] [--write]`.

Each file of `models.precision` is optimised for each number of threads, by rewrites alone (`--backend onnxruntime`) and
with kernels (`--backend auto`). All run under ORT_ENABLE_ALL in turns in one process, with the original against itself
as the control (A/A), and with what others make of the file: ONNX Runtime's own optimiser, offline, its optimizer for
transformers, onnxslim and onnxsim. Ratios above 1 are faster.

What is said of exactness is computed without the product, from plain sessions of ONNX Runtime and from the original's
meaning (`bench/meaning.py`): the elements whose bits differ from those of the original's outputs, on three sets of
inputs; the greatest difference in steps, where an output is dequantised; and the greatest error against the meaning,
over that of the original in ONNX Runtime.

Rows are appended to `--jsonl` as they come, and the same command continues. It holds this machine's lock of
measurements. `--small` takes the small files: it shows that all works, and its figures mean nothing.
"""

from __future__ import annotations

import argparse
import json
import logging
import math
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnx.numpy_helper

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))  # the checkout

import xrlflow
from bench import latency, pages
from bench.latency import cell, circumstances, ratios, said
from bench.meaning import NotEvaluated, meaning
from models import precision, wheels
from xrlflow.storage.exclusive import measuring

Array = np.ndarray[Any, Any]
Feeds = dict[str, Array]
Row = dict[str, Any]

OURS: Mapping[str, str] = {"rewrites": "onnxruntime", "kernels": "auto"}
"""Our variants, and the backend of each."""
RIVALS = ("offline", "transformers", "onnxslim", "onnxsim")
RIVALS_AS_SHOWN = ("ORT offline", "ORT's for transformers", "onnxslim", "onnxsim")
_INPUTS = 3
_KEPT = (
    "returned_original",
    "reason",
    "nodes_before",
    "nodes_after",
    "substitutions",
    "kernel_nodes",
    "notes",
)
"""What is kept of a report."""
# Operators through which an output keeps its scale.
_MOVEMENT = frozenset({"Flatten", "Identity", "Reshape", "Slice", "Squeeze", "Transpose", "Unsqueeze"})


@dataclass(frozen=True, slots=True)
class Source:
    """A file to measure."""

    path: str
    shapes: dict[str, tuple[int, ...]] | None
    """Of the inputs, where the file leaves sizes open."""
    feeds: list[Feeds]


def source(name: str, folder: Path, small: bool = False) -> Source:
    """The file of that name, built into `folder` unless it is one of the trained ones, which have one size."""
    if name in precision.TRAINED:
        feeds = [wheels.inputs(name, seed) for seed in range(_INPUTS)]
        return Source(str(wheels.fetch(name)), wheels.ALL[name].shapes, feeds)
    path = folder / f"{name}.onnx"
    model = precision.build(name, small)
    onnx.save(model, path)
    return Source(
        str(path), None, [precision.find(name).inputs(model, small, 100 + seed) for seed in range(_INPUTS)]
    )


def offline(path: str, output: str) -> None:
    """What ONNX Runtime's optimiser makes of a file, written to another, for this processor."""
    import onnxruntime as ort

    options = ort.SessionOptions()
    options.log_severity_level = 3  # it warns that the file is for this processor
    options.optimized_model_filepath = output
    ort.InferenceSession(path, options, providers=["CPUExecutionProvider"])


def rivals(path: str, folder: Path, wanted: Sequence[str]) -> tuple[dict[str, str], dict[str, str]]:
    """The files that others make, and why some make none that runs."""
    made, failed = {}, {}
    for rival in wanted:
        output = str(folder / f"{rival}.onnx")
        try:
            (offline if rival == "offline" else latency.SIMPLIFY[rival])(path, output)
            session(output, 1)
            made[rival] = output
        except Exception as error:  # a rival's failure is a result, too
            failed[rival] = f"{type(error).__name__}: {str(error).splitlines()[0][:120]}"
    return made, failed


def row(name: str, threads: int, options: argparse.Namespace) -> Row:
    """Everything about one file on so many threads. A refusal of ours is in `failed`."""
    found: Row = {"file": name, "threads": threads, "held_out": name in precision.HELD_OUT, "reports": {}}
    found |= circumstances()
    with tempfile.TemporaryDirectory(prefix="xrlflow-bench-") as temporary:
        folder = Path(temporary)
        at = source(name, folder, options.small)
        variants, found["failed"] = rivals(at.path, folder, options.rivals)
        with measuring(lambda holder: print(f"waiting: {holder}", file=sys.stderr)):
            for ours in options.ours:
                backend = OURS[ours]
                try:
                    result = xrlflow.optimize(
                        at.path, backend=backend, time_limit=options.time_limit, shapes=at.shapes,
                        inputs=at.feeds[0], threads=threads,
                    )  # fmt: skip
                except xrlflow.UserError as error:
                    found["failed"][ours] = f"{type(error).__name__}: {error}"
                    continue
                variants[ours] = str(folder / f"{ours}.onnx")
                result.save(variants[ours])
                report = result.report.to_json()
                found["reports"][ours] = {key: report[key] for key in _KEPT}
            found["ratios"] = ratios(at.path, variants, at.feeds[0], threads, options.seconds)
        found["exact"] = (
            {"original": {}} if options.without_exactness else exactness(name, at, variants, threads)
        )
    return found


# ---------------------------------------------------------------- exactness, without the product


def exactness(name: str, at: Source, variants: Mapping[str, str], threads: int) -> dict[str, Any]:
    """For the original its error and, for each variant, the share of elements with other bits, steps and error."""
    original = outputs(at.path, at.feeds, threads)
    steps = [step(onnx.load(at.path), output) for output in range(len(original[0]))]
    meant = meant_by(name, at)
    found: dict[str, Any] = {"original": {"error": error(original[0], meant)}}
    if isinstance(meant, str):
        found["original"]["not_evaluated"] = meant
    for variant, path in variants.items():
        got = outputs(path, at.feeds, threads)
        pairs = [pair for a, b in zip(original, got, strict=True) for pair in zip(a, b, strict=True)]
        sizes = sum(a.size for a, _ in pairs)
        found[variant] = {
            "differ": sum(int(other_bits(a, b).sum()) for a, b in pairs) / sizes,
            "steps": in_steps(original, got, steps),
            "error": error(got[0], meant),
        }
    return found


def outputs(path: str, feeds: Sequence[Feeds], threads: int) -> list[list[Array]]:
    """What ONNX Runtime computes at its default level, for each set of inputs."""
    opened = session(path, threads)
    return [opened.run(None, given) for given in feeds]


def session(path: str, threads: int) -> Any:
    """A plain session of a file, with the library beside it."""
    import onnxruntime as ort

    options = ort.SessionOptions()
    options.intra_op_num_threads = threads
    options.log_severity_level = 3
    library = Path(path).with_suffix(".so")
    if library.exists():
        options.register_custom_ops_library(str(library))
    return ort.InferenceSession(path, options, providers=["CPUExecutionProvider"])


def other_bits(a: Array, b: Array) -> Array:
    """Which elements have other bits. All, if types or shapes differ."""
    if a.dtype != b.dtype or a.shape != b.shape:
        return np.ones(a.shape, np.bool_)
    unsigned = np.dtype(f"u{a.dtype.itemsize}")
    return np.asarray(np.ascontiguousarray(a).view(unsigned) != np.ascontiguousarray(b).view(unsigned))


def step(model: onnx.ModelProto, output: int) -> float | None:
    """The scale of an output that is dequantised with one; None for others."""
    makers = {name: node for node in model.graph.node for name in node.output}
    constants = {tensor.name: tensor for tensor in model.graph.initializer}
    node = makers.get(model.graph.output[output].name)
    while node is not None and node.op_type in _MOVEMENT:
        node = makers.get(node.input[0])
    if node is None or node.op_type != "DequantizeLinear" or node.input[1] not in constants:
        return None
    scale = onnx.numpy_helper.to_array(constants[node.input[1]])
    return float(scale.reshape(())) if scale.size == 1 else None


def in_steps(
    original: Sequence[Sequence[Array]], got: Sequence[Sequence[Array]], steps: Sequence[float | None]
) -> int | None:
    """The greatest difference in steps of the outputs' scales; None if no output has one."""
    found = [
        round(float(np.abs(a.astype(np.float64) - b).max() / scale))
        for one, other in zip(original, got, strict=True)
        for a, b, scale in zip(one, other, steps, strict=True)
        if scale is not None and a.size
    ]
    return max(found, default=None)


def error(got: Sequence[Array], meant: Sequence[Array] | str) -> float | None:
    """The greatest deviation of an output from its meaning, in parts of its greatest finite number."""
    if isinstance(meant, str):
        return None
    found = []
    for a, b in zip(got, meant, strict=True):
        finite = np.isfinite(b) if b.size else np.zeros(b.shape, np.bool_)
        if finite.any():
            wide = np.abs(a[finite].astype(np.float64) - b[finite]).max()
            found.append(float(wide / (np.abs(b[finite]).max() or 1.0)))
    return max(found, default=0.0)


_MEANT: dict[str, list[Array] | str] = {}


def meant_by(name: str, at: Source) -> list[Array] | str:
    """The meaning of a file on its first inputs, evaluated once for all numbers of threads; or why there is none."""
    if name not in _MEANT:
        try:
            with np.errstate(all="ignore"):
                _MEANT[name] = meaning(onnx.load(at.path), at.feeds[0])
        except NotEvaluated as reason:
            _MEANT[name] = str(reason)
    return _MEANT[name]


# ---------------------------------------------------------------- tables


def ratio(row: Row, variant: str) -> float | None:
    """How many times as fast a variant is; None if there is none."""
    if row["reports"].get(variant, {}).get("returned_original"):
        return 1.0
    found = row["ratios"].get(variant)
    return None if found is None else float(found[0])


def ours(row: Row, variant: str) -> str:
    if variant in row["failed"]:
        return f"refused: {row['failed'][variant]}"
    if variant not in row["reports"]:
        return "-"
    if row["reports"][variant]["returned_original"]:
        return "1 (original)"
    return f"{cell(row['ratios'][variant])}; {exact(row, variant)}"


def exact(row: Row, variant: str) -> str:
    """In words, how a variant's outputs differ from the original's."""
    found, original = row["exact"].get(variant), row["exact"]["original"].get("error")
    if found is None:
        return "not checked"
    if found["differ"] == 0:
        return "equal bits"
    share = f"{found['differ']:.1%}" if found["differ"] >= 0.001 else "under 0.1%"
    parts = [f"{share} of elements differ"]
    if found["steps"] is not None:
        parts.append(f"{found['steps']} steps")
    if found["error"] is not None and original:
        parts.append(f"error {found['error'] / original:.2f}")
    return ", ".join(parts)


def table(rows: Sequence[Row]) -> str:
    """A row for each file and number of threads, in Markdown. Milliseconds and error are those of the original."""
    lines = [
        f"| file | threads | ms | error | A/A | {' | '.join(RIVALS_AS_SHOWN)} | rewrites | with kernels |",
        "|---" * (7 + len(RIVALS)) + "|",
    ]
    for r in rows:
        others = [latency.theirs(r, rival, r["ratios"]) for rival in RIVALS]
        name = f"{r['file']}{'*' if r['ratios']['disturbed'] else ''}{' (held out)' if r['held_out'] else ''}"
        off = r["exact"]["original"].get("error")
        original = [
            str(r["threads"]),
            f"{r['ratios']['original_ms']:.2f}",
            "-" if off is None else f"{off:.0e}",
        ]
        control = cell(r["ratios"]["control"])
        lines.append(f"| {' | '.join([name, *original, control, *others, *(ours(r, v) for v in OURS)])} |")
    return f"{said(rows)}.\n\n" + "\n".join(lines)


def kind(name: str) -> str:
    """What a file's row in the summary is called."""
    return "trained" if name in precision.TRAINED else precision.find(name).form


def summary(rows: Sequence[Row]) -> str:
    """A row for each form and number of threads, and for all: geometric means, and the least ratio."""
    lines = [
        "| form | threads | files | ORT offline | rewrites: mean | least | with kernels: mean | least | refused |",
        "|---" * 9 + "|",
    ]
    kinds = [*dict.fromkeys(kind(r["file"]) for r in rows), "all"]
    for label in kinds:
        for threads in sorted({r["threads"] for r in rows}, reverse=True):
            some = [r for r in rows if r["threads"] == threads and label in ("all", kind(r["file"]))]
            if some:
                cells = [mean(some, "offline")]
                for variant in OURS:
                    cells += [mean(some, variant), least(some, variant)]
                refused = sum(any(v in r["failed"] for v in OURS) for r in some)
                lines.append(f"| {label} | {threads} | {len(some)} | {' | '.join(cells)} | {refused} |")
    return f"{said(rows)}.\n\n" + "\n".join(lines)


def _ratios(rows: Sequence[Row], variant: str) -> list[float]:
    return [found for r in rows if (found := ratio(r, variant)) is not None]


def mean(rows: Sequence[Row], variant: str) -> str:
    found = _ratios(rows, variant)
    return f"{math.exp(sum(map(math.log, found)) / len(found)):.3f}" if found else "-"


def least(rows: Sequence[Row], variant: str) -> str:
    return f"{min(found):.3f}" if (found := _ratios(rows, variant)) else "-"


def _words(text: str) -> list[str]:
    return [word for word in text.split(",") if word]


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("names", nargs="*", help="files of models/precision.py; default: all")
    parser.add_argument("--jsonl", type=Path, default=Path("out/precision.jsonl"), help="a row in each line")
    parser.add_argument("--threads", type=lambda text: [int(n) for n in _words(text)], default=[2, 1])
    parser.add_argument("--time-limit", type=float, default=60.0, help="seconds of each optimisation")
    parser.add_argument("--seconds", type=float, default=20.0, help="seconds of each measurement")
    parser.add_argument("--ours", type=_words, default=list(OURS), help="our variants; default: all")
    parser.add_argument("--rivals", type=_words, default=list(RIVALS))
    parser.add_argument("--small", action="store_true", help="small files, to see whether all works")
    parser.add_argument("--without-exactness", action="store_true", help="measure only")
    parser.add_argument("--kept", action="store_true", help="measure nothing: only the rows that are kept")
    parser.add_argument("--write", action="store_true", help="put the tables into docs/benchmarks")
    parser.add_argument("--table", default="precision", help="with --write: tables NAME and NAME-files")
    options = parser.parse_args()
    if unknown := set(options.names) - set(precision.names()):
        parser.error(f"no such file: {', '.join(sorted(unknown))}; there are {', '.join(precision.names())}")
    if unknown := set(options.ours) - set(OURS):
        parser.error(f"--ours {', '.join(sorted(unknown))}: choose of {', '.join(OURS)}")
    if options.small and options.write:
        parser.error("figures of small files are not written")
    return options


def main() -> None:
    options = _arguments()
    logging.disable(logging.WARNING)  # the optimizer for transformers advises on every file
    wanted = options.names or precision.names()
    options.jsonl.parent.mkdir(parents=True, exist_ok=True)
    lines = options.jsonl.read_text().splitlines() if options.jsonl.exists() else []
    kept = {(found["file"], found["threads"]): found for found in map(json.loads, lines)}
    for name in [] if options.kept else wanted:
        for threads in options.threads:
            if (name, threads) in kept:
                continue
            begin = time.monotonic()
            found = kept[name, threads] = row(name, threads, options)
            found["wall"] = time.monotonic() - begin
            with options.jsonl.open("a") as file:
                file.write(json.dumps(found) + "\n")
            print(table([found]).splitlines()[-1], flush=True)
    rows = [kept[n, t] for n in wanted for t in options.threads if (n, t) in kept]
    if not rows:
        raise SystemExit(f"{options.jsonl} has no row of these files")
    print(text := summary(rows))
    if options.write:
        pages.write(options.table, text)
        pages.write(f"{options.table}-files", table(rows))


if __name__ == "__main__":
    main()
