"""What a user's own process sees of a reported speed-up: `python bench/claims.py NAMES [--time-limit 40] [--portable]`.

Each model is optimised, and `optimize` reports a speed-up. Then original and result run in fresh processes of their
own, one model in each, in shuffled turns, with the original once more as the control (A/A), as three kinds of programs
load them: `default` says nothing of threads (ONNX Runtime then pins its workers to CPUs), `told` gives their number
(then it does not), `pinned` gives their number and pins them, as our measurements do. Ratios above 1 are faster; 95%
intervals come from the spread between processes. Nothing else may run on the machine.
"""

from __future__ import annotations

import argparse
import json
import math
import random
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import xrlflow
from bench.latency import names, source
from xrlflow.backends.limits import default_threads

KINDS = ("default", "told", "pinned")
_CHILD = """
import json, os, sys, time
import numpy as np, onnxruntime as ort
kind, path, feeds, threads = sys.argv[1], sys.argv[2], dict(np.load(sys.argv[3])), int(sys.argv[4])
options = ort.SessionOptions()
options.log_severity_level = 4
if kind != "default":
    options.intra_op_num_threads = threads
if kind == "pinned":
    cpus = sorted(os.sched_getaffinity(0))[:threads]
    if threads > 1:
        text = ";".join(str(cpu + 1) for cpu in cpus[1:])
        options.add_session_config_entry("session.intra_op_thread_affinities", text)
library = path.removesuffix(".onnx") + ".so"
if os.path.exists(library):
    options.register_custom_ops_library(library)
session = ort.InferenceSession(path, options, providers=["CPUExecutionProvider"])
if kind == "pinned":
    os.sched_setaffinity(0, {cpus[0]})
for _ in range(3):
    session.run(None, feeds)
taken, begun = [], time.perf_counter()
while len(taken) < 10 or (time.perf_counter() - begun < 0.6 and len(taken) < 2000):
    begin = time.perf_counter()
    session.run(None, feeds)
    taken.append(time.perf_counter() - begin)
print(json.dumps(sorted(taken)[len(taken) // 2]))
"""


def alone(kind: str, files: Sequence[str], feeds: str, threads: int, processes: int) -> list[list[float]]:
    """The logarithms of median seconds of each file, one of each process."""
    found: list[list[float]] = [[] for _ in files]
    for turn in range(processes):
        order = random.Random(turn).sample(range(len(files)), len(files))
        for index in order:
            command = [sys.executable, "-c", _CHILD, kind, files[index], feeds, str(threads)]
            done = subprocess.run(command, capture_output=True, text=True, check=True)
            found[index].append(math.log(json.loads(done.stdout)))
    return found


def ratio(before: Sequence[float], after: Sequence[float]) -> str:
    """How many times faster, with the 95% interval of the mean of pairs."""
    pairs = [a - b for a, b in zip(before, after)]
    mean, error = statistics.fmean(pairs), statistics.stdev(pairs) / math.sqrt(len(pairs))
    low, middle, high = (math.exp(mean + sign * 2.2 * error) for sign in (-1, 0, 1))
    return f"{middle:.3f} [{low:.3f}, {high:.3f}]"


def examined(name: str, time_limit: float, portable: bool, processes: int) -> None:
    threads = default_threads()
    with tempfile.TemporaryDirectory(prefix="xrlflow-claims-") as temporary:
        path, shapes, inputs = source(name, Path(temporary))
        result = xrlflow.optimize(path, shapes=shapes, time_limit=time_limit, portable=portable)
        if result.report.returned_original:
            print(f"{name}: the original ({result.report.reason})", flush=True)
            return
        output, feeds = str(Path(temporary) / "result.onnx"), str(Path(temporary) / "feeds.npz")
        result.save(output)
        np.savez(feeds, **inputs)
        print(f"{name}: {result.report.reason}", flush=True)
        for kind in KINDS:
            before, after, again = alone(kind, [path, output, path], feeds, threads, processes)
            milliseconds = f"{math.exp(statistics.median(before)) * 1e3:.2f} ms"
            print(
                f"  {kind:8} {ratio(before, after)}  A/A {ratio(before, again)}  {milliseconds}", flush=True
            )


def main() -> None:
    parser = argparse.ArgumentParser(description="What fresh processes see of reported speed-ups.")
    parser.add_argument("names", nargs="+", choices=names(), metavar="NAMES")
    parser.add_argument("--time-limit", type=float, default=40.0)
    parser.add_argument("--portable", action="store_true")
    parser.add_argument("--processes", type=int, default=10, help="of each model and kind")
    given = parser.parse_args()
    for name in given.names:
        examined(name, given.time_limit, given.portable, given.processes)


if __name__ == "__main__":
    main()
