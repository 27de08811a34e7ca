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
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import onnx
from onnx import helper, numpy_helper

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))  # the checkout

import xrlflow
from xrlflow.backends.decision import settle
from xrlflow.backends.pairs import Estimate

GAINS = (0.0, 0.003, 0.005, 0.01, 0.02, 0.05)


@dataclass(frozen=True, slots=True)
class World:
    """A machine and a model: the errors of a process's estimate, and the number of processes that there is time for.

    Standard deviations and shifts are logarithms of ratios (0.01 is 1%).

    - `process`: of what is fixed in a process; `two_sided`: it is one of two values, like the layout of weights.
    - `run`: of one comparison of two neighbouring runs, Student's t with `tail` degrees of freedom; `runs`: the number
      of comparisons in a process.
    - `bursts`: the part of the processes in which that of a comparison is ten times as much.
    - `disturbed`: the part of the processes in which another program slows down one of the models, by `blow`.
    - `order`: the shift in favour of the model that was loaded first; the order alternates.
    - `wander`: of a slow wave over all processes, which affects neighbours in time alike.
    """

    name: str
    process: float
    run: float
    runs: int
    affordable: int
    seconds: float  # of one process
    tail: float = 3.0
    two_sided: bool = False
    bursts: float = 0.0
    disturbed: float = 0.0
    blow: float = 0.0
    order: float = 0.0
    wander: float = 0.0

    def estimates(self, rng: np.random.Generator, truth: float) -> list[Estimate]:
        """What the processes of one comparison find, in the order in which they run. `truth`: a logarithm."""
        count = self.affordable
        effect = rng.standard_normal(count)
        if self.two_sided:
            effect = np.sign(effect)
        each = self.run * rng.standard_t(self.tail, (count, self.runs))
        if self.bursts:
            each *= np.where(rng.random((count, 1)) < self.bursts, 10.0, 1.0)
        off = np.median(each, axis=1)
        noise = 1.4826 * np.median(np.abs(each - off[:, None]), axis=1)
        hit = rng.random(count) < self.disturbed
        blows = hit * rng.normal(0.0, self.blow, count) if self.blow else 0.0
        first = self.order * np.where(np.arange(count) % 2 == 0, 1.0, -1.0) * rng.choice((-1.0, 1.0))
        phase, period = rng.uniform(0.0, 2.0 * math.pi), rng.uniform(5.0, 40.0)
        wave = self.wander * math.sqrt(2.0) * np.sin(2.0 * math.pi * np.arange(count) / period + phase)
        off += truth + self.process * effect + blows + first + wave
        return [Estimate(ratio, None, self.runs, n) for ratio, n in zip(off.tolist(), noise.tolist())]


WORLDS = (
    World("quiet", 0.004, 0.01, 16, 40, 0.25),
    World("one of two layouts", 0.01, 0.01, 16, 40, 0.25, two_sided=True),
    World("neighbours", 0.01, 0.05, 12, 40, 0.4, tail=2.0, disturbed=0.15, blow=0.10),
    World("drift, and a wave", 0.005, 0.02, 12, 40, 0.25, order=0.005, wander=0.003),
    World("slow model", 0.006, 0.02, 3, 10, 3.0, disturbed=0.1, blow=0.05),
    World("slow model, noisy", 0.006, 0.10, 3, 16, 1.2),
    World("slow model, bursts", 0.006, 0.01, 5, 10, 4.2, bursts=0.4),
    World("very slow model", 0.006, 0.03, 1, 6, 8.0),
    World("very slow, two layouts", 0.01, 0.01, 1, 6, 8.0, two_sided=True),
)


@dataclass(frozen=True, slots=True)
class WorldSummary:
    """The results of many comparisons in one world, with one true gain."""

    world: str
    gain: float
    shipped: float  # the part of all comparisons
    bias: (
        float | None
    )  # the mean of reported minus true gain of those shipped, as a ratio; None: nothing was reported
    off: float | None  # standard error of the bias
    half_width: float | None  # the median over reported intervals
    covered: float | None  # how often the interval contains the true gain
    seconds: float


def simulate(world: World, gain: float, replications: int, seed: int) -> WorldSummary:
    """Make this many comparisons with a true gain (0.01: 1% faster)."""
    rng = np.random.default_rng([seed, round(gain * 1e6), *world.name.encode()])
    truth = math.log1p(gain)
    shipped, seconds = 0, 0.0
    errors: list[float] = []
    halves: list[float] = []
    hits = 0
    for _ in range(replications):
        answer = settle(_draw(world.estimates(rng, truth)), world.affordable)
        seconds += world.seconds * (len(answer.decision.estimates) + answer.confirming)
        shipped += answer.faster
        if answer.faster and answer.figure is not None:
            errors.append(answer.figure.median - (1.0 + gain))
            halves.append((answer.figure.high - answer.figure.low) / 2)
            hits += answer.figure.low <= 1.0 + gain <= answer.figure.high
    reported = len(errors)
    return WorldSummary(
        world.name,
        gain,
        shipped / replications,
        statistics.fmean(errors) if reported else None,
        statistics.stdev(errors) / math.sqrt(reported) if reported > 1 else None,
        statistics.median(halves) if reported else None,
        hits / reported if reported else None,
        seconds / replications,
    )


def _draw(estimates: Sequence[Estimate]) -> Callable[[], Estimate | None]:
    left = iter(estimates)
    return lambda: next(left, None)


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
