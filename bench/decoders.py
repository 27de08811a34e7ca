"""Decoders as their users run them: `python bench/decoders.py [NAMES] [--write]`.

Each decoder of `models.decoders`, and each export of `models.exports` that runs single steps, is optimised once,
without sizes. The result, and what onnxslim and ONNX Runtime's optimizer for transformers make of the file, then run
loops of `--steps` tokens with a growing cache in turns with the original (`xrlflow bench --generate`), after prompts of
several lengths. Ratios of the seconds of all steps are above 1 where the file is faster; the original against itself is
the control (A/A). A prompt is timed where the model takes one. Rows are appended to `--jsonl` as they come, and the
same command continues. It holds this machine's lock of measurements.
"""

from __future__ import annotations

import argparse
import json
import math
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import onnx

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))  # the checkout

import xrlflow
from bench import pages
from bench.latency import cell, circumstances
from bench.open_dimensions import RIVALS
from models import exports
from models.decoders import DECODERS, decoder
from xrlflow import api
from xrlflow.backends.library_files import library_path
from xrlflow.storage.exclusive import measuring

Row = dict[str, Any]
STEPS = ("qwen3-step", "llama-step", "t5-step", "whisper-step")
PROMPTS = {"qwen3": (128, 1024), "whisper": (4, 128), "whisper-step": (128,), "t5-step": (128,)}
"""Tokens before the first step: Whisper has positions for 448, and its prompts have 4."""
TABLE = "decoders"


def measured(name: str, options: argparse.Namespace) -> Row:
    """The figures of `xrlflow bench --generate` of one decoder, by prompt and file, and what its report says."""
    found: Row = {"name": name, "threads": options.threads, "prompts": {}} | circumstances()
    with tempfile.TemporaryDirectory(prefix="xrlflow-bench-") as folder:
        path, variants = Path(folder) / "decoder.onnx", {}
        onnx.save(decoder(name) if name in DECODERS else exports.export(name, open=True), path)
        for rival, make in RIVALS.items():
            try:
                make(str(path), made := str(Path(folder) / f"{rival}.onnx"))
                variants[rival] = made
            except Exception as error:  # a rival's failure is a result, too
                found[rival] = f"{type(error).__name__}: {str(error).splitlines()[0][:120]}"
        with measuring(lambda holder: print(f"waiting: {holder}", file=sys.stderr)):
            result = xrlflow.optimize(path, time_limit=options.time_limit, threads=options.threads)
            report = result.report.to_json()
            found["report"] = {k: report[k] for k in ("returned_original", "reason", "kernel_nodes", "notes")}
            if not result.returned_original:
                result.save(ours := str(Path(folder) / "ours.onnx"))
                variants["ours"] = ours
            for prompt in PROMPTS.get(name, (128, 1024)):
                found["prompts"][prompt] = {
                    variant: api.bench(
                        file, path, generate=options.steps, prompt=prompt, threads=options.threads,
                        time_limit=options.seconds, kernels=Path(library_path(file)).exists(),
                    )
                    for variant, file in variants.items()
                }  # fmt: skip
    return found


def _ratio(bench: Row, key: str) -> list[float]:
    return [bench[key], bench[f"{key}_low"] or 0.0, bench[f"{key}_high"] or math.inf]


def table(rows: Sequence[Row]) -> str:
    lines = [
        "| decoder | threads | prompt | original tokens/s | A/A | onnxslim | transformers optimizer | ours "
        "| prompt ms, original and ours |",
        "|---|---|---|---|---|---|---|---|---|",
    ]
    for row in rows:
        for prompt, variants in row["prompts"].items():
            first = next(iter(variants.values()))
            cells = [
                cell(_ratio(variants[v], "speedup")) if v in variants else "-" for v in (*RIVALS, "ours")
            ]
            if row["report"]["returned_original"]:
                cells[-1] = "1 (original)"
            ours = variants.get("ours", first)
            times = (ours["against_prefill_ms"], ours["prefill_ms"])
            shown = ", ".join(f"{ms:.1f}" for ms in times if ms is not None and "ours" in variants)
            lines.append(
                f"| {row['name']} | {row['threads']} | {prompt} | {first['against_tokens_per_second']:.1f} "
                f"| {cell(_ratio(first, 'control'))} | {' | '.join(cells)} | {shown or '-'} |"
            )
    return "\n".join(lines)


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("names", nargs="*", help="decoders; default: all")
    parser.add_argument("--jsonl", type=Path, default=Path("out/decoders.jsonl"), help="a row in each line")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--steps", type=int, default=16, help="tokens of a loop")
    parser.add_argument("--time-limit", type=float, default=60.0, help="seconds of each optimisation")
    parser.add_argument("--seconds", type=float, default=15.0, help="seconds of each measurement")
    parser.add_argument("--kept", action="store_true", help="measure nothing: only the rows that are kept")
    parser.add_argument("--write", action="store_true", help=f"put the table {TABLE} into docs/benchmarks")
    options = parser.parse_args(arguments)
    options.jsonl.parent.mkdir(parents=True, exist_ok=True)
    kept = pages.kept(options.jsonl)
    done = {(row["name"], row["threads"]) for row in kept}
    for name in () if options.kept else options.names or (*DECODERS, *STEPS):
        if (name, options.threads) in done:
            continue
        kept.append(row := measured(name, options))
        with options.jsonl.open("a") as file:
            file.write(json.dumps(row) + "\n")
        print(table([row]), flush=True)
    print(text := table(kept))
    if options.write:
        pages.write(TABLE, text)


if __name__ == "__main__":
    main()
