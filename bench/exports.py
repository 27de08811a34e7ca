"""What exported networks spend their time on: `python bench/exports.py [NAMES] [--json FILE] [--write]`.

For each network of `models/exports.py` at full size: its operators, the operators that ONNX Runtime spends most of its
time on (shares of the time of all, in the median of `--runs` runs under ORT_ENABLE_ALL with two threads), and the
substitutions that greedy search makes by roofline costs, with the numbers of operators before and after.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import numpy as np
import onnx
import onnxruntime as ort

import xrlflow
from bench import pages
from models import exports

_SHOWN = 5


def shares(path: Path, feeds: dict[str, Any], runs: int) -> dict[str, float]:
    """The part of the time that each kind of operator takes, the greatest first."""
    options = ort.SessionOptions()
    options.intra_op_num_threads = 2
    options.enable_profiling = True
    options.profile_file_prefix = str(path.with_suffix(""))
    session = ort.InferenceSession(path, options, providers=["CPUExecutionProvider"])
    for _ in range(runs + 1):
        session.run(None, feeds)
    events = json.loads(Path(session.end_profiling()).read_text())
    whole = [(e["ts"], e["ts"] + e["dur"]) for e in events if e["name"] == "model_run"]
    kernels = [e for e in events if e["cat"] == "Node" and e["name"].endswith("_kernel_time")]
    times: list[Counter[str]] = []
    for begin, end in whole[1:]:  # the first run allocates memory
        times.append(Counter())
        for event in kernels:
            if begin <= event["ts"] <= end:
                times[-1][event["args"]["op_name"]] += event["dur"]
    kinds = {kind for run in times for kind in run}
    part = {k: float(np.median([run[k] / max(run.total(), 1) for run in times])) for k in kinds}
    return dict(sorted(part.items(), key=lambda item: -item[1]))


def row(name: str, runs: int) -> dict[str, Any]:
    with tempfile.TemporaryDirectory(prefix="xrlflow-exports-") as folder:
        path = Path(folder) / f"{name}.onnx"
        onnx.save(exports.export(name), path)
        feeds = exports.inputs(name)
        found = shares(path, feeds, runs)
        report = xrlflow.optimize(
            path, search="greedy", cost="roofline", backend="onnxruntime", measure=False, inputs=feeds
        ).report
    return {
        "name": name,
        "held_out": name in exports.HELD_OUT,
        "nodes": [report.nodes_before, report.nodes_after],
        "shares": found,
        "substitutions": dict(report.substitutions),
        "verified": report.verified,
    }


def table(rows: Sequence[dict[str, Any]]) -> str:
    lines = [
        "| network | operators | after | what takes its time | substitutions |",
        "|---|---|---|---|---|",
    ]
    for r in rows:
        most = list(r["shares"].items())[:_SHOWN]
        times = ", ".join(f"{kind} {share:.0%}" for kind, share in most)
        made = sorted(r["substitutions"].items(), key=lambda item: (-item[1], item[0]))
        steps = ", ".join(f"{rule} {count}" for rule, count in made)
        mark = " (held out)" if r["held_out"] else ""
        lines.append(f"| {r['name']}{mark} | {r['nodes'][0]} | {r['nodes'][1]} | {times} | {steps} |")
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("names", nargs="*", help="networks; default: all")
    parser.add_argument("--runs", type=int, default=5)
    parser.add_argument("--json", type=Path, help="rows are kept here, and resumed")
    parser.add_argument("--write", action="store_true", help="put the table into docs/benchmarks")
    options = parser.parse_args()
    unknown = set(options.names) - set(exports.EXPORTS)
    if unknown:
        parser.error(f"no such network: {', '.join(sorted(unknown))}")
    kept: dict[str, Any] = (
        json.loads(options.json.read_text()) if options.json and options.json.exists() else {}
    )
    names = options.names or list(exports.EXPORTS)
    for name in names:
        if name not in kept:
            kept[name] = row(name, options.runs)
            if options.json:
                options.json.write_text(json.dumps(kept, indent=1))
            print(table([kept[name]]).splitlines()[-1], flush=True)
    text = table([kept[name] for name in names])
    if options.write:
        pages.write("exports", text)


if __name__ == "__main__":
    main()
