"""Models with open dimensions: `python bench/open_dimensions.py [NAMES] [--rules] [--kept] [--write]`.

Each export of `models.exports` in its open form is optimised once, without sizes, and the one result is measured at
several sizes of its dimensions, in turns with the original in one process: ratios above 1 are faster, the original
against itself is the control (A/A), and rivals are beside: onnxslim and ONNX Runtime's optimizer for transformers. Rows
are appended to `--jsonl` as they come, and the same command continues. It holds this machine's lock of measurements.

`--rules` measures nothing: for each export, the substitutions that greedy search by roofline costs makes with open
dimensions, and with the usual numbers in their place, by rule, where they differ.
"""

from __future__ import annotations

import argparse
import json
import math
import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import onnx

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))  # the checkout

import xrlflow
from bench import latency, pages
from bench.latency import cell, circumstances, ratios
from models import exports
from xrlflow.storage.exclusive import measuring

Row = dict[str, Any]
SIZES: Mapping[str, Sequence[int]] = {
    "length": (16, 64, 128, 333, 512),
    "past": (16, 128, 1024),
    "encoded": (16, 128),
    "samples": (8000, 16000, 40000),
    "frames": (50, 100, 333),
    "height": (224, 320),
    "batch": (1, 2, 5),
}
"""The sizes that are measured of a dimension, while the others have their usual ones and one batch."""


def _transformers_optimizer(path: str, target: str) -> None:
    """ONNX Runtime's own optimizer for transformers. It fuses by the names of families; this one fits most."""
    from onnxruntime.transformers import optimizer

    optimizer.optimize_model(path, model_type="bert", opt_level=0).save_model_to_file(target)


RIVALS: Mapping[str, Callable[[str, str], object]] = {
    "onnxslim": latency.SIMPLIFY["onnxslim"],
    "transformers": _transformers_optimizer,
}
# CLIP has positions for 77 tokens.
_MOST = {"clip-text": 77}
TABLE = "open-dimensions"


def sizes_of(name: str) -> Iterator[dict[str, int]]:
    """The sizes at which an export is measured: those of its first open dimension that is not the batch, if it has
    one."""
    opened = [n for entry in exports.find(name).network(False).inputs.values() for n in entry.names if n]
    dimension = next((n for n in opened if n != "batch"), "batch")
    for size in SIZES[dimension]:
        if size <= _MOST.get(name, size):
            yield {"batch": 1, dimension: size} | ({"width": size} if dimension == "height" else {})


def measured(name: str, options: argparse.Namespace) -> Row:
    """All ratios of one export, by size, and what its report says."""
    found: Row = {"name": name, "threads": options.threads, "sizes": []} | circumstances()
    with tempfile.TemporaryDirectory(prefix="xrlflow-bench-") as folder:
        path, variants = str(Path(folder) / "open.onnx"), {}
        onnx.save(exports.export(name, open=True), path)
        for rival, make in RIVALS.items():
            try:
                make(path, made := str(Path(folder) / f"{rival}.onnx"))
                variants[rival] = made
            except Exception as error:  # a rival's failure is a result, too
                found[rival] = f"{type(error).__name__}: {str(error).splitlines()[0][:120]}"
        with measuring(lambda holder: print(f"waiting: {holder}", file=sys.stderr)):
            result = xrlflow.optimize(path, time_limit=options.time_limit, threads=options.threads)
            variants["ours"] = str(Path(folder) / "ours.onnx")
            result.save(variants["ours"])
            report = result.report.to_json()
            found["report"] = {
                key: report[key] for key in ("returned_original", "reason", "kernel_nodes", "notes")
            }
            for sizes in sizes_of(name):
                feeds = exports.inputs(name, sizes=sizes)
                found["sizes"].append(
                    {"at": sizes} | ratios(path, variants, feeds, options.threads, options.seconds)
                )
    return found


def table(rows: Sequence[Row]) -> str:
    lines = [
        "| export | threads | sizes | original ms | A/A | onnxslim | transformers optimizer | ours |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for row in rows:
        for entry in row["sizes"]:
            at = ", ".join(f"{name} {size}" for name, size in entry["at"].items())
            ours = "1 (original)" if row["report"]["returned_original"] else cell(entry["ours"])
            missing = {name: "fails" if name in row else "-" for name in RIVALS}
            rivals = " | ".join(cell(entry[name]) if name in entry else missing[name] for name in RIVALS)
            lines.append(
                f"| {row['name']} | {row['threads']} | {at} | {entry['original_ms']:.2f} | {cell(entry['control'])} "
                f"| {rivals} | {ours} |"
            )
    kept = [
        1.0 if row["report"]["returned_original"] else entry["ours"][0]
        for row in rows
        for entry in row["sizes"]
    ]
    if kept:
        mean = math.exp(sum(map(math.log, kept)) / len(kept))
        lines.append(f"\nGeometric mean of {len(kept)} rows: {mean:.3f}, least {min(kept):.3f}.")
    return "\n".join(lines)


def rules(name: str) -> tuple[dict[str, int], dict[str, int]]:
    """The substitutions of greedy search, by rule: with open dimensions, and with numbers in their place."""
    shapes = {key: entry.shape for key, entry in exports.find(name).network(False).inputs.items()}
    with tempfile.TemporaryDirectory(prefix="xrlflow-bench-") as folder:
        path = str(Path(folder) / "open.onnx")
        onnx.save(exports.export(name, open=True), path)
        made = [
            xrlflow.optimize(
                path, search="greedy", cost="roofline", backend="onnxruntime", measure=False, verify=False,
                shapes=shapes, fix_shapes=fixed,
            ).report.substitutions
            for fixed in (False, True)
        ]  # fmt: skip
    return dict(made[0]), dict(made[1])


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("names", nargs="*", help="exports; default: all")
    parser.add_argument("--rules", action="store_true", help="count substitutions, measure nothing")
    parser.add_argument(
        "--jsonl", type=Path, default=Path("out/open-dimensions.jsonl"), help="a row in each line"
    )
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--time-limit", type=float, default=60.0, help="seconds of each optimisation")
    parser.add_argument("--seconds", type=float, default=4.0, help="seconds of each measurement")
    parser.add_argument("--kept", action="store_true", help="measure nothing: only the rows that are kept")
    parser.add_argument("--write", action="store_true", help=f"put the table {TABLE} into docs/benchmarks")
    options = parser.parse_args(arguments)
    names = options.names or list(exports.EXPORTS)
    if options.rules:
        for name in names:
            opened, fixed = rules(name)
            differing = {r: (opened.get(r, 0), fixed.get(r, 0)) for r in sorted({*opened, *fixed})}
            lost = {rule: counts for rule, counts in differing.items() if counts[0] != counts[1]}
            print(
                f"{name}: {sum(opened.values())} with symbols, {sum(fixed.values())} with numbers; {lost}",
                flush=True,
            )
        return
    options.jsonl.parent.mkdir(parents=True, exist_ok=True)
    kept = (
        [json.loads(line) for line in options.jsonl.read_text().splitlines()]
        if options.jsonl.exists()
        else []
    )
    done = {(row["name"], row["threads"]) for row in kept}
    for name in () if options.kept else names:
        if (name, options.threads) in done:
            continue
        row = measured(name, options)
        kept.append(row)
        with options.jsonl.open("a") as file:
            file.write(json.dumps(row) + "\n")
        print(table([row]), flush=True)
    text = table(kept)
    print(text)
    if options.write:
        pages.write(TABLE, text)


if __name__ == "__main__":
    main()
