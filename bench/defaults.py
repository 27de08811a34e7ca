"""Which search and cost model should be the default: `python bench/defaults.py [NAMES] [--json FILE] [--write]`.

Each model is optimised with today's default and with its rivals, all within the same time limit and into one ONNX file
without kernels. The results are then measured in turns in one process, on 2 threads, against today's, with today's
against itself as the control (A/A). A ratio above 1 is faster than today's default. What is equal to today's result
node by node has no ratio of its own: it is 1.

A choice is SEARCH/COST, or SEARCH/COST/STEPS: then an agent is first trained on the model, for so many steps. The
table of rewards that are measured, of which the agent that trains in a world model is one and model-free PPO the
baseline:

    python bench/defaults.py open-nsfw mobilenetv2 bert vit-classifier rapidocr-det minilm-int8 squeezenet resnext50 \
      --today xrlflow/measured/5000 --choices rlflow/learned/2000 --time-limit 600 --table measured-reward \
      --json out/measured-reward.json --write
"""

from __future__ import annotations

import argparse
import json
import math
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))  # the checkout

import xrlflow
from bench import pages
from bench.latency import cell, circumstances, names, ratios, said, source
from xrlflow.onnxio import load

TODAY = "xrlflow/profiled"
RIVALS = ("xrlflow/auto", "xrlflow/learned", "mcts/profiled", "mcts/learned", "rlflow/learned")


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
            result = xrlflow.optimize(
                path, search=search, cost=cost, backend="onnxruntime", time_limit=time_limit, shapes=shapes,
                inputs=feeds, threads=2, train_steps=int(steps[0]) if steps else 0,
            )  # fmt: skip
            output = str(folder / f"{choice.replace('/', '-')}.onnx")
            result.save(output)
            found["reports"][choice] = result.report.to_json() | {"wall": time.monotonic() - begin}
            prints[choice] = load(output).graph.fingerprint
            variants[choice] = output
        found["same"] = [c for c in choices if prints[c] == prints[today]]
        measured = {c: variants[c] for c in choices if c not in found["same"]} | {"original": path}
        found["ratios"] = ratios(variants[today], measured, feeds, 2, seconds)
    return found


def ratio(row: dict[str, Any], choice: str) -> float:
    return 1.0 if choice in row["same"] else row["ratios"][choice][0]


def table(rows: Sequence[dict[str, Any]], choices: Sequence[str]) -> str:
    """A row for each model, the geometric means, and the worst ratio of each choice, in Markdown."""
    lines = [
        f"| model | today's ms | A/A | the original | {' | '.join(choices)} |",
        "|---" * (len(choices) + 4) + "|",
    ]
    for r in rows:
        found = r["ratios"]
        shown = ["same" if c in r["same"] else cell(found[c]) for c in choices]
        mark = "*" if found["disturbed"] else ""
        lines.append(
            f"| {r['model']}{mark} | {found['original_ms']:.2f} | {cell(found['control'])} | "
            f"{cell(found['original'])} | {' | '.join(shown)} |"
        )
    for title, of in (
        ("geometric mean", lambda v: math.exp(sum(map(math.log, v)) / len(v))),
        ("least", min),
    ):
        lines.append(
            f"| {title} | | | | {' | '.join(f'{of([ratio(r, c) for r in rows]):.3f}' for c in choices)} |"
        )
    return f"{said(rows)}.\n\n" + "\n".join(lines)


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
    parser.add_argument("--seconds", type=float, default=15.0, help="seconds of each measurement")
    parser.add_argument("--kept", action="store_true", help="measure nothing: only the rows that are kept")
    parser.add_argument("--write", action="store_true", help="put the table into docs/benchmarks")
    options = parser.parse_args()
    if unknown := set(options.names) - set(names()):
        parser.error(f"no such model: {', '.join(sorted(unknown))}")
    kept: dict[str, Any] = json.loads(options.json.read_text()) if options.json.exists() else {}
    options.json.parent.mkdir(parents=True, exist_ok=True)
    wanted = options.names or names()
    for name in [] if options.kept else wanted:
        if name not in kept:
            kept[name] = row(name, options.today, options.choices, options.time_limit, options.seconds)
            options.json.write_text(json.dumps(kept, indent=1))
            print(table([kept[name]], options.choices).splitlines()[-3], flush=True)
    text = table([kept[n] for n in wanted if n in kept], options.choices)
    print(text)
    if options.write:
        pages.write(options.table, text)


if __name__ == "__main__":
    main()
