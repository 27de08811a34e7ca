"""How often the last comparison is wrong: `python bench/decide.py` (simulated), `... aa --runs 100` (real models).

Simulated: each process has its own effect (where weights lie), and a few runs with heavy-tailed noise, drift, and other
programs that come and go. The functions of `xrlflow.backends.decision` decide and report on the simulated estimates.
Real: `optimize` compares small models with themselves, and accepts one or not.
"""

from __future__ import annotations

import argparse
import json
import math
import statistics
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import onnx
from onnx import helper, numpy_helper

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))  # the checkout

import xrlflow
from tests.backends.worlds import WORLDS, World, WorldSummary, simulate

GAINS = (0.0, 0.003, 0.005, 0.01, 0.02, 0.05)


def percent(value: float | None, digits: int = 2) -> str:
    return "-" if value is None else f"{100 * value:.{digits}f}%"


def simulated(
    worlds: Sequence[World], gains: Sequence[float], replications: int, seed: int
) -> list[WorldSummary]:
    """Simulate all worlds with all gains, and print a row for each."""
    print("| world | true gain | shipped | reported - true | its error | half width | covered | s |")
    print("|---|---|---|---|---|---|---|---|")
    found = []
    for world in worlds:
        for gain in gains:
            o = simulate(world, gain, replications, seed)
            found.append(o)
            print(
                f"| {o.world} | {percent(gain, 1)} | {percent(o.shipped)} | {percent(o.bias, 3)} | "
                f"{percent(o.off, 3)} | {percent(o.half_width)} | {percent(o.covered, 1)} | {o.seconds:.1f} |",
                flush=True,
            )
    return found


def twin(rows: int, width: int, layers: int, seed: int) -> onnx.ModelProto:
    """A chain of products in which one substitution is possible, of two transposes. ONNX Runtime makes it itself.

    So result and original are equal for ONNX Runtime, and a verdict that one is faster is wrong.
    """
    rng = np.random.default_rng(seed)
    nodes = [
        helper.make_node("Transpose", ["x"], ["turned"], perm=[1, 0]),
        helper.make_node("Transpose", ["turned"], ["v0"], perm=[1, 0]),
    ]
    weights = []
    for layer in range(layers):
        weight = (rng.standard_normal((width, width)) / math.sqrt(width)).astype(np.float32)
        weights.append(numpy_helper.from_array(weight, f"w{layer}"))
        nodes.append(helper.make_node("MatMul", [f"v{layer}", f"w{layer}"], [f"p{layer}"]))
        nodes.append(
            helper.make_node("Tanh", [f"p{layer}"], ["y" if layer == layers - 1 else f"v{layer + 1}"])
        )
    types = [helper.make_tensor_value_info(name, onnx.TensorProto.FLOAT, [rows, width]) for name in "xy"]
    graph = helper.make_graph(nodes, f"twin{width}x{layers}", types[:1], types[1:], weights)
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=10)


# The fields of a report that are kept.
KEPT = (
    "model", "reason", "speedup", "speedup_low", "speedup_high", "decided", "decided_low", "decided_high",
    "control_low", "control_high", "processes", "phases", "latency_before_ms",
)  # fmt: skip
TWINS = ((16, 128, 6), (64, 256, 8), (64, 512, 12))


def against_itself(runs: int, seconds: float, kept: Path) -> None:
    """Run `optimize` this many times on models that it cannot make faster.

    `kept`: a file with a row per run, resumed.
    """
    rows: list[dict[str, Any]] = json.loads(kept.read_text()) if kept.exists() else []
    kept.parent.mkdir(parents=True, exist_ok=True)
    while len(rows) < runs:
        number = len(rows)
        proto = twin(*TWINS[number % len(TWINS)], seed=number)
        began = time.monotonic()
        result = xrlflow.optimize(proto, search="greedy", cost="roofline", time_limit=seconds, seed=number)
        report = result.report.to_json()
        row = {name: report[name] for name in KEPT} | {
            "shipped": not result.returned_original,
            "wall": time.monotonic() - began,
        }
        rows.append(row)
        kept.write_text(json.dumps(rows, indent=1))
        print(f"{number + 1:4} {report['model']} {row['wall']:.1f} s: {report['reason']}", flush=True)
    print(summary(rows))


def summary(rows: Sequence[dict[str, Any]]) -> str:
    """A summary of runs of models against themselves."""
    decided = [row for row in rows if row["decided"] is not None]
    shipped = [row for row in rows if row["shipped"]]
    widths = [(r["decided_high"] - r["decided_low"]) / 2 for r in decided if r["decided_low"] is not None]
    lines = [
        f"{len(shipped)} of {len(rows)} shipped; {len(decided)} reached the last comparison; "
        f"{statistics.fmean(row['wall'] for row in rows):.1f} s each, at most {max(row['wall'] for row in rows):.1f} s"
    ]
    if decided:
        middle = statistics.fmean(row["decided"] for row in decided)
        lines.append(
            f"what decided: {middle:.4f} on average, half width {statistics.median(widths):.4f} (median)"
        )
    figures = [row["speedup"] for row in shipped if row["speedup"] is not None]
    if figures:
        lines.append(f"what was reported of those shipped: {statistics.fmean(figures):.4f} on average")
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("what", nargs="?", choices=("simulate", "aa"), default="simulate")
    parser.add_argument("--replications", type=int, default=10_000)
    parser.add_argument("--runs", type=int, default=100, help="of optimize, of an original against itself")
    parser.add_argument("--time-limit", type=float, default=13.0, help="seconds of each run of optimize")
    parser.add_argument(
        "--json", type=Path, default=Path("out/aa.json"), help="runs are kept here, and resumed"
    )
    parser.add_argument("--seed", type=int, default=0)
    arguments = parser.parse_args()
    if arguments.what == "aa":
        against_itself(arguments.runs, arguments.time_limit, arguments.json)
    else:
        simulated(WORLDS, GAINS, arguments.replications, arguments.seed)


if __name__ == "__main__":
    main()
