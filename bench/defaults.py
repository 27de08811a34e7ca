"""Which search and cost model should be the default: `python bench/defaults.py [NAMES] [--json FILE] [--write]`.

Each model is optimised with a baseline (`--today`) and with its rivals, all within the same time limit and into one
ONNX file without kernels. Each begins as on a machine that is calibrated and has measured nothing else: what one has
measured would help those that follow. The results are then measured in many fresh processes, on 2 threads, against the
baseline's, with the baseline's against itself as the control (A/A): two sessions of one file in one process may differ
by 1.5%, whatever their intervals say. A ratio above 1 is faster than the baseline. What is equal to its result node by
node is not measured: its ratio is 1. Two runs of one choice differ, too: as a control, `--choices` may name the
baseline with 0 steps.

A choice is SEARCH/COST, or SEARCH/COST/STEPS: then an agent is first trained on the model, for so many steps.
`ppo/profiled` is model-free PPO with measured rewards (`bench/model_free.py`). The table of measured rewards, with an
agent that trains in a world model:

    python bench/defaults.py open-nsfw mobilenetv2 bert vit-classifier rapidocr-det minilm-int8 squeezenet resnext50 \
      --today ppo/profiled --choices rlflow/learned/20000 --time-limit 600 --table measured-reward \
      --json docs/benchmarks/data/measured-reward.json --write
"""

from __future__ import annotations

import argparse
import json
import math
import os
import shutil
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any
from unittest import mock

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))  # the checkout

import xrlflow
from bench import model_free, pages
from bench.latency import cell, circumstances, names, said, source
from xrlflow.backends import SpeedUp
from xrlflow.backends.onnxruntime import measure_in_fresh_processes
from xrlflow.onnxio import load
from xrlflow.storage.sqlite import cache_directory

TODAY = "xrlflow/profiled"
ORIGINAL = "original"
PPO = "ppo"
# Notes of a report that say what an agent learned from.
_OF_TRAINING = (
    "whole models were measured",
    "costs were not corrected",
    "the agent trained",
    "agent was trained",
)
RIVALS = ("xrlflow/auto", "xrlflow/learned", "mcts/profiled", "mcts/learned", "rlflow/learned")


@contextmanager
def nothing_measured(folder: Path) -> Iterator[None]:
    """In this context the user's cache is a new one in `folder`, which has the calibrations of the machine alone."""
    known = cache_directory()
    with mock.patch.dict(os.environ, {"XDG_CACHE_HOME": str(folder)}):
        cache_directory().mkdir(parents=True)
        for calibration in known.glob("machine-*.json"):
            shutil.copy(calibration, cache_directory())
        yield


def row(name: str, today: str, choices: Sequence[str], time_limit: float, seconds: float) -> dict[str, Any]:
    """The results of one model: what each choice found, and its speed over the baseline (`today`)."""
    found: dict[str, Any] = {"model": name, "reports": {}, "same": [], **circumstances()}
    with tempfile.TemporaryDirectory(prefix="xrlflow-bench-") as temporary:
        folder = Path(temporary)
        path, shapes, feeds = source(name, folder)
        variants, prints = {}, {}
        for choice in (today, *choices):
            search, cost, *steps = choice.split("/")
            begin = time.monotonic()
            ppo = search == PPO
            with (
                nothing_measured(folder / f"cache-{choice.replace('/', '-')}"),
                model_free.instead_of_search() if ppo else nullcontext(),
            ):
                result = xrlflow.optimize(
                    path, search="xrlflow" if ppo else search, cost=cost, backend="onnxruntime",
                    time_limit=time_limit, shapes=shapes, inputs=feeds, threads=2,
                    train_steps=int(steps[0]) if steps else 0,
                )  # fmt: skip
            output = str(folder / f"{choice.replace('/', '-')}.onnx")
            result.save(output)
            wall = time.monotonic() - begin
            found["reports"][choice] = result.report.to_json() | {"model": name, "wall": wall}
            # What reading a file folds is not seen in its graph.
            prints[choice] = (result.report.returned_original, load(output).graph.fingerprint)
            variants[choice] = output
        found["same"] = [c for c in choices if prints[c] == prints[today]]
        if found["reports"][today]["returned_original"]:
            found["same"].append(ORIGINAL)
        measured = {
            c: p for c, p in ({ORIGINAL: path} | variants).items() if c not in (today, *found["same"])
        }
        found["ratios"] = {c: compared(variants[today], p, feeds, seconds) for c, p in measured.items()}
    return found


def compared(baseline: str, variant: str, feeds: Mapping[str, Any], seconds: float) -> dict[str, Any]:
    """How many times as fast as `baseline` a variant is, and the baseline itself, with their intervals."""
    found = measure_in_fresh_processes(baseline, variant, feeds, threads=2, time_limit=seconds)
    return {
        "ratio": interval(found.speedup),
        "control": interval(found.control),
        "processes": found.processes,
        "disturbed": found.disturbed,
        "ms": None if found.before is None else found.before.median_ms,
    }


def interval(found: SpeedUp | None) -> list[float] | None:
    return None if found is None else [found.median, found.low, found.high]


def ratio(row: dict[str, Any], choice: str) -> float:
    """NaN where there was no time for enough processes."""
    if choice in row["same"]:
        return 1.0
    found = row["ratios"][choice]["ratio"]
    return math.nan if found is None else float(found[0])


def cells(row: dict[str, Any], choice: str) -> str:
    """The ratio of a choice with its interval, and that of the baseline over itself."""
    if choice in row["same"]:
        return "same"
    found = row["ratios"][choice]
    if found["ratio"] is None or found["control"] is None:
        return "too few processes"
    mark = "*" if found["disturbed"] else ""
    return f"{cell(found['ratio'])}{mark}, A/A {cell(found['control'])}"


def line(row: dict[str, Any], choices: Sequence[str]) -> str:
    """The row of a table."""
    return f"| {row['model']} | {' | '.join(cells(row, c) for c in (ORIGINAL, *choices))} |"


def table(rows: Sequence[dict[str, Any]], choices: Sequence[str]) -> str:
    """A row for each model, the geometric means, and the worst ratio of each choice, in Markdown."""
    lines = [f"| model | the original | {' | '.join(choices)} |", "|---" * (len(choices) + 2) + "|"]
    lines += [line(r, choices) for r in rows]
    for title, of in (
        ("geometric mean", lambda v: math.exp(sum(map(math.log, v)) / len(v))),
        ("least", lambda v: math.nan if any(map(math.isnan, v)) else min(v)),
    ):
        lines.append(
            f"| {title} | | {' | '.join(f'{of([ratio(r, c) for r in rows]):.3f}' for c in choices)} |"
        )
    lines += ["", *training(rows, choices)]
    return f"{said(rows)}. A star: other programs used the processor.\n\n" + "\n".join(lines).rstrip()


def training(rows: Sequence[dict[str, Any]], choices: Sequence[str]) -> list[str]:
    """What the reports say of agents that were trained, and of the costs that they learned from: a line for each."""
    return [
        f"- {row['model']}, {choice}: {'; '.join(notes)}."
        for row in rows
        for choice in choices
        if (notes := [n for n in row["reports"][choice]["notes"] if any(word in n for word in _OF_TRAINING)])
    ]


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("names", nargs="*", help="models; default: all")
    parser.add_argument(
        "--json", type=Path, default=Path("out/defaults.json"), help="rows are kept, and resumed"
    )
    parser.add_argument(
        "--choices", type=lambda text: text.split(","), default=RIVALS, help="search/cost[/steps], ..."
    )
    parser.add_argument("--today", default=TODAY, help="the baseline, search/cost[/steps]")
    parser.add_argument("--table", default="defaults", help="the table of docs/benchmarks for --write")
    parser.add_argument("--time-limit", type=float, default=60.0, help="seconds of each optimisation")
    parser.add_argument("--seconds", type=float, default=60.0, help="at most, for each measurement")
    parser.add_argument("--kept", action="store_true", help="measure nothing: only the rows that are kept")
    parser.add_argument("--write", action="store_true", help="put the table into docs/benchmarks")
    options = parser.parse_args()
    if len({options.today, *options.choices}) <= len(options.choices):
        parser.error("each choice has another name, and not the baseline's: add /0 (no steps) for a control")
    ppo = [choice for choice in (options.today, *options.choices) if choice.startswith(f"{PPO}/")]
    if set(ppo) - {f"{PPO}/profiled"}:
        parser.error(
            f"{ppo[0]}: its features have profiled costs, and it has no number of steps: {PPO}/profiled"
        )
    if unknown := set(options.names) - set(names()):
        parser.error(f"no such model: {', '.join(sorted(unknown))}")
    kept: dict[str, Any] = json.loads(options.json.read_text()) if options.json.exists() else {}
    options.json.parent.mkdir(parents=True, exist_ok=True)
    wanted = options.names or names()
    for name in [] if options.kept else wanted:
        if name not in kept:
            kept[name] = row(name, options.today, options.choices, options.time_limit, options.seconds)
            options.json.write_text(json.dumps(kept, indent=1))
            print(line(kept[name], options.choices), flush=True)
    text = table([kept[n] for n in wanted if n in kept], options.choices)
    print(text)
    if options.write:
        pages.write(options.table, text)


if __name__ == "__main__":
    main()
