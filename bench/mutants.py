"""Mutants of the rules' own code: `python bench/mutants.py [RULE ...] [--jobs N] [--seed S] [--out FILE] [--sample N]`.

The mutants are those of tests/rules/mutants.py. Rows are written to FILE (JSON lines, default out/mutants.jsonl) as
they are found; existing rows are not repeated. At the end there is a summary: how many mutants of each kind were
killed, and how. If there are survivors that `tests/rules/survivors.json` does not explain, the exit code is 1.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import sys
from concurrent.futures import ProcessPoolExecutor, as_completed
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))  # the checkout
for _variable in ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS"):
    os.environ.setdefault(_variable, "1")

from bench import pages
from rewrite_rules import LIBRARY
from tests.rules.mutant_graphs import INDEX, collect
from tests.rules.mutants import ROOT, Judging, explained, hunt, names, pieces, summary, tasks
from xrlflow.backends.limits import available_cpus
from xrlflow.prover.codehunt import KILLED


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("rules", nargs="*", help="only the code of these rules")
    parser.add_argument("--jobs", type=int, default=available_cpus())
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", type=Path, default=ROOT / "out" / "mutants.jsonl")
    parser.add_argument("--quick", action="store_true", help="run no files of tests, draw no further graphs")
    parser.add_argument(
        "--draw", action=argparse.BooleanOptionalAction, default=True, help="draw further graphs"
    )
    parser.add_argument(
        "--again", action="store_true", help="try survivors in FILE without a reason once more"
    )
    parser.add_argument("--graphs", type=Path, default=ROOT / "out" / "graphs", help="tests' graphs, kept")
    parser.add_argument("--named", default="", metavar="TEXT", help="only mutants in whose names this stands")
    parser.add_argument("--sample", type=float, default=1.0, help="share of the mutants that is tried")
    parser.add_argument("--write", action="store_true", help="put the table into docs/benchmarks")
    options = parser.parse_args()
    if options.write and options.rules:
        parser.error("--write takes the whole table: leave the rules out")
    unknown = set(options.rules) - {r.name for r in LIBRARY}
    if unknown:
        parser.error(f"no rule is called {min(unknown)}")
    options.out.parent.mkdir(parents=True, exist_ok=True)
    rows = [json.loads(line) for line in options.out.read_text().splitlines()] if options.out.exists() else []
    there, reasons = names(), explained() if options.again else {}
    rows = [
        row
        for row in rows
        if row["name"] in there and (not options.again or row["verdict"] in KILLED or row["name"] in reasons)
    ]
    options.out.write_text("".join(json.dumps(row) + "\n" for row in rows))
    done = {row["name"] for row in rows}
    if not (options.graphs / INDEX).exists():
        collect(options.graphs)
    drawing = options.draw and not options.quick
    plan = Judging(options.seed, options.graphs, drawing, not options.quick, options.named)
    work = pieces(tasks(options.rules))
    spawn = multiprocessing.get_context("spawn")
    with options.out.open("a") as out, ProcessPoolExecutor(options.jobs, mp_context=spawn) as pool:
        waiting = [pool.submit(hunt, piece, plan, done, options.sample) for piece in work]
        for n, future in enumerate(as_completed(waiting), 1):
            found = future.result()
            rows += found
            out.writelines(json.dumps(row) + "\n" for row in found)
            out.flush()
            print(f"{n}/{len(waiting)}: {len(found)} mutants", file=sys.stderr, flush=True)
    table, left = summary(rows)
    print(table)
    if options.write:
        pages.write("mutants", table)
    for row in left:
        print(f"{row['verdict']:6} {row['cases']:3} {row['rule']}: {row['name']}")
    sys.exit(1 if left else 0)


if __name__ == "__main__":
    main()
