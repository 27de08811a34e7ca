"""Models with open dimensions: `python bench/open_dimensions.py [NAMES] [--rules] [--shapes] [--kept] [--write]`.

Each export of `models.exports` in its open form is optimised once, without sizes, and the one result is measured at
several sizes of its dimensions, in turns with the original in one process: ratios above 1 are faster, the original
against itself is the control (A/A), and rivals are beside: onnxslim and ONNX Runtime's optimizer for transformers. Rows
are appended to `--jsonl` as they come, and the same command continues. It holds this machine's lock of measurements.

`--rules` and `--shapes` measure nothing. `--rules`: for each export, the substitutions that greedy search by roofline
costs makes with open dimensions, with the usual numbers in their place, and with a batch of 2, by rule, where they
differ. `--shapes`: the operators that compute with sizes alone, in each export, in what onnxsim and onnxslim make of
it, and in the result of that search.
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
from bench import latency, pages, shape_arithmetic
from bench.latency import cell, circumstances, ratios
from models import exports, unseen
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
TABLE, TABLE_OF_SHAPES = "open-dimensions", "open-shapes"
SIMPLIFIERS = ("onnxsim", "onnxslim")
"""The rivals of `--shapes`."""


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


def greedy(name: str, path: str, batch: int = 0) -> xrlflow.Result:
    """Greedy search by roofline costs on an export in its open form at `path`. `batch`: with the usual numbers instead
    of symbols, and this batch.
    """
    inputs = exports.find(name).network(False).inputs
    shapes = {key: entry.sized({"batch": batch or 1}).shape for key, entry in inputs.items()}
    return xrlflow.optimize(
        path, search="greedy", cost="roofline", backend="onnxruntime", measure=False, verify=False,
        shapes=shapes, fix_shapes=bool(batch),
    )  # fmt: skip


def rules(name: str) -> list[Mapping[str, int]]:
    """The substitutions of greedy search, by rule: with open dimensions, with numbers in their place, and with numbers
    and a batch of 2 (some rules need a batch of 1, which an open batch is not).
    """
    with tempfile.TemporaryDirectory(prefix="xrlflow-bench-") as folder:
        path = str(Path(folder) / "open.onnx")
        onnx.save(exports.export(name, open=True), path)
        return [greedy(name, path, batch).report.substitutions for batch in (0, 1, 2)]


def shapes(name: str) -> dict[str, shape_arithmetic.Counts | str]:
    """The operators of an export that compute with sizes alone, by who made the file. A rival's failure is a text."""
    found: dict[str, shape_arithmetic.Counts | str] = {}
    with tempfile.TemporaryDirectory(prefix="xrlflow-bench-") as folder:
        path, made = str(Path(folder) / "open.onnx"), str(Path(folder) / "made.onnx")
        onnx.save(exports.export(name, open=True), path)
        found["original"] = shape_arithmetic.count(onnx.load(path))
        for rival in SIMPLIFIERS:
            try:
                latency.SIMPLIFY[rival](path, made)
                found[rival] = shape_arithmetic.count(onnx.load(made))
            except Exception as error:  # a rival's failure is a result, too
                found[rival] = f"fails ({type(error).__name__})"
        greedy(name, path).save(made)
        found["ours"] = shape_arithmetic.count(onnx.load(made))
    return found


def table_of_shapes(rows: Mapping[str, Mapping[str, shape_arithmetic.Counts | str]]) -> str:
    columns = ("original", *SIMPLIFIERS, "ours")
    lines = [f"| export | {' | '.join(columns)} |", "|---" * (1 + len(columns)) + "|"]
    for name, row in rows.items():
        cells = [
            c if isinstance(c, str) else f"{c.shapes} + {c.masks}" for c in map(row.__getitem__, columns)
        ]
        lines.append(f"| {name} | {' | '.join(cells)} |")
    return "\n".join(lines)


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("names", nargs="*", help="exports; default: all")
    parser.add_argument("--rules", action="store_true", help="count substitutions, measure nothing")
    parser.add_argument(
        "--shapes", action="store_true", help="count what computes with sizes alone, measure nothing"
    )
    parser.add_argument(
        "--jsonl", type=Path, default=Path("out/open-dimensions.jsonl"), help="a row in each line"
    )
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--time-limit", type=float, default=60.0, help="seconds of each optimisation")
    parser.add_argument("--seconds", type=float, default=4.0, help="seconds of each measurement")
    parser.add_argument("--kept", action="store_true", help="measure nothing: only the rows that are kept")
    parser.add_argument("--write", action="store_true", help="put the table into docs/benchmarks")
    options = parser.parse_args(arguments)
    names = options.names or list(exports.EXPORTS)
    if options.shapes:
        counted = {}
        for name in options.names or [*exports.EXPORTS, *unseen.UNSEEN]:
            counted[name] = shapes(name)
            print(f"{name}: {counted[name]}", flush=True)
        print(text := table_of_shapes(counted))
        if options.write:
            pages.write(TABLE_OF_SHAPES, text)
        return
    if options.rules:
        for name in names:
            found = rules(name)
            counts = {
                rule: tuple(made.get(rule, 0) for made in found) for rule in sorted({*found[0], *found[1]})
            }
            lost = {rule: made for rule, made in counts.items() if made[0] != made[1]}
            total = [sum(made.values()) for made in found]
            print(
                f"{name}: {total[0]} with symbols, {total[1]} with numbers, {total[2]} with a batch of 2; {lost}",
                flush=True,
            )
        return
    options.jsonl.parent.mkdir(parents=True, exist_ok=True)
    kept = pages.kept(options.jsonl)
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
