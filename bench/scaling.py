"""What workers on a Ray cluster cost, and how many it can have: `python bench/scaling.py TABLE [--json FILE]`.

    overhead    iterations of PPO by `--workers` (2) processes, and by as many workers of a cluster of this machine, in
                turns, with equal seeds; a second set of processes is the control
    throughput  rollouts a second by 1 and by more workers that sleep instead of playing, and take no core: what the
                driver and Ray can keep up with. Then what a rollout and a broadcast of weights cost in bytes, and, from
                all that, computed, what a thousand nodes would need

`--write` puts the tables into docs/benchmarks.
"""

from __future__ import annotations

import argparse
import json
import math
import pickle
import statistics
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import ExitStack, closing
from dataclasses import dataclass
from datetime import date
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import onnx
import psutil

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import models
from bench import pages
from rewrite_rules import LIBRARY
from xrlflow.cost import Roofline
from xrlflow.cost.machine import cpu_name
from xrlflow.rl.features import Vocabulary
from xrlflow.rl.parameters import AgentConfig
from xrlflow.rl.train import Files, TrainConfig, Trainer, random_agent
from xrlflow.rl.workers import Collect, Setup, make_workers, parameters_of
from xrlflow.workers import Kind, Processes, WorkerFactory, WorkerPool
from xrlflow.workers.cluster import Cluster

NETWORK = "squeezenet"
STEPS = 128
"""Steps of an iteration of PPO."""
SLEEP, STEPS_OF_SLEEP = 0.004, 50
"""A simulated rollout: so many steps of so many seconds."""


# Overhead: the same iterations, by processes and by a cluster


def task(folder: str) -> tuple[Files, Vocabulary]:
    path = Path(folder) / f"{NETWORK}.onnx"
    onnx.save(models.build(NETWORK), path)
    files = Files((str(path),), (), tuple(LIBRARY), Roofline)
    return files, Vocabulary.of(files.library())


def trainer(files: Files, vocabulary: Vocabulary, workers: int, place: WorkerFactory) -> Trainer:
    """A trainer with workers that have played one iteration: all of them have started."""
    config = TrainConfig(1000, STEPS, workers, environments=2, seed=0)
    setup = Setup(
        files, vocabulary, AgentConfig(), config.env, config.ppo, config.objective, config.environments
    )
    made = Trainer(random_agent(vocabulary, 0), make_workers(setup, workers, place), config)
    made.iterate()
    return made


def overhead(workers: int, pairs: int) -> dict[str, Any]:
    """Seconds of equal iterations: by processes, by other processes (the control), and by a cluster."""
    with ExitStack() as stack:
        files, vocabulary = task(stack.enter_context(tempfile.TemporaryDirectory()))
        cluster = stack.enter_context(closing(Cluster("local")))
        places: dict[str, WorkerFactory] = {"processes": Processes(), "again": Processes(), "ray": cluster}
        trainers = {
            name: stack.enter_context(trainer(files, vocabulary, workers, place))
            for name, place in places.items()
        }
        seconds: dict[str, list[float]] = {name: [] for name in places}
        for number in range(pairs):
            names = list(places)
            for name in names[number % 3 :] + names[: number % 3]:
                begin = time.perf_counter()
                trainers[name].iterate()
                seconds[name].append(time.perf_counter() - begin)
        ends = {name: parameters_of(t.agent).tobytes() for name, t in trainers.items()}
    return {
        "workers": workers,
        "pairs": pairs,
        "seconds": seconds,
        "ratio": interval(seconds["ray"], seconds["processes"]),
        "control": interval(seconds["again"], seconds["processes"]),
        "same": len(set(ends.values())) == 1,
    }


def interval(one: list[float], other: list[float], seed: int = 0) -> tuple[float, float, float]:
    """The median of paired ratios, and its bootstrap interval of 95%."""
    ratios = np.array(one) / np.array(other)
    drawn = np.random.default_rng(seed).choice(ratios, (2000, len(ratios)))
    low, high = np.quantile(np.median(drawn, axis=1), (0.025, 0.975))
    return float(np.median(ratios)), float(low), float(high)


# Throughput: workers that sleep


@dataclass(frozen=True, slots=True, eq=False)
class Rollout:
    """An order to play with these weights."""

    parameters: npt.NDArray[np.float32]
    seed: int


class Sleeper:
    """A hand whose steps are sleep; it answers with as many bytes as an answer of a worker that plays."""

    def __init__(self, size: int) -> None:
        self._size = size

    def do(self, order: Rollout) -> bytes:
        for _ in range(STEPS_OF_SLEEP):
            time.sleep(SLEEP)
        return bytes(self._size)


class Sleepers:
    """Makes sleepers."""

    def __init__(self, size: int) -> None:
        self._size = size

    def __call__(self) -> Sleeper:
        return Sleeper(self._size)


@dataclass(frozen=True, slots=True)
class Load:
    """Rollouts a second, and seconds of processor for one: of the driver, and of Ray's processes on its machine."""

    workers: int
    rate: float
    driver: float
    ray: float


def throughput(counts: list[int], size: int, parameters: int) -> list[Load]:
    with closing(Cluster("local")) as cluster:
        return [load(cluster, count, size, parameters) for count in counts]


def load(cluster: Cluster, workers: int, size: int, parameters: int, rounds: int = 20) -> Load:
    """As in training: in each round every worker gets new weights once."""

    def orders() -> Iterator[Rollout]:
        for number in range(rounds):
            weights = np.full(parameters, number, np.float32)
            yield from (Rollout(weights, number * workers + worker) for worker in range(workers))

    with WorkerPool(cluster, Sleepers(size), workers, "sleeper", Kind.WAIT) as crew:
        for _ in crew.work(iter([Rollout(np.zeros(parameters, np.float32), w) for w in range(workers)])):
            pass  # all have started
        servers, before, begin = ray_processes(), processor([psutil.Process()]), time.perf_counter()
        there = processor(servers)
        count = sum(1 for _ in crew.work(orders()))
        seconds = time.perf_counter() - begin
        driver, ray = processor([psutil.Process()]) - before, processor(servers) - there
    return Load(workers, count / seconds, driver / count, ray / count)


def ray_processes() -> list[psutil.Process]:
    """The processes of the head and of the node, without the workers."""
    names = ("gcs_server", "raylet")
    return [p for p in psutil.Process().children(recursive=True) if p.name() in names]


def processor(processes: list[psutil.Process]) -> float:
    """Seconds of processor that they have taken, all threads together."""
    return math.fsum(sum(p.cpu_times()[:2]) for p in processes)


# Figures, and what follows from them


def figures() -> dict[str, float]:
    """Bytes of what goes to a worker and comes from it, and steps of a rollout."""
    with ExitStack() as stack:
        files, vocabulary = task(stack.enter_context(tempfile.TemporaryDirectory()))
        agent = random_agent(vocabulary, 0)
        config = TrainConfig(workers=1)
        setup = Setup(
            files, vocabulary, AgentConfig(), config.env, config.ppo, config.objective, config.environments
        )
        (worker,) = make_workers(setup, 1)
        stack.callback(worker.close)
        worker.begin(Collect(parameters_of(agent), 1, STEPS))
        begin = time.perf_counter()
        episodes = worker.episodes()
        seconds = time.perf_counter() - begin
    steps = sum(map(len, episodes))
    size = len(pickle.dumps(episodes, 5))
    return {
        "weights": float(parameters_of(agent).nbytes),
        "rollout": float(size),
        "steps": float(steps),
        "step": size / steps,
        "seconds": seconds,
    }


def thousand(
    figure: dict[str, float], loads: list[Load], nodes: int = 1000, cores: int = 8
) -> list[tuple[str, str]]:
    """What a cluster would need, computed from measured figures."""
    workers = nodes * cores
    most = loads[-1]
    task = most.driver
    busiest = 1 / task
    iteration = workers * task
    minibatches = 3 * math.ceil(workers * figure["steps"] / 64)
    return [
        ("workers", f"{workers:,}"),
        (
            "weights through the driver, a broadcast (once a node)",
            f"{nodes * figure['weights'] / 1e9:.2f} GB",
        ),
        (
            "the same at 10 Gbit/s, if the driver sends to each",
            f"{nodes * figure['weights'] * 8 / 1e10:.2f} s",
        ),
        ("rollouts to the driver, an iteration", f"{workers * figure['rollout'] / 1e6:.0f} MB"),
        ("orders a second that one driver's core can give", f"{busiest:,.0f}"),
        ("driver's processor for one order to each worker", f"{iteration:.1f} s"),
        ("gradients to the driver, one from each worker", f"{workers * figure['weights'] / 1e9:.2f} GB"),
        ("minibatches of 64 in an iteration of 3 epochs", f"{minibatches:,}"),
    ]


# Tables


def head(what: str) -> str:
    machine = f"{cpu_name()}, {psutil.cpu_count()} processors, load average {psutil.getloadavg()[0]:.1f}"
    return f"{machine}, {what}, {date.today()}."


def overhead_table(found: dict[str, Any]) -> str:
    rows = [("Ray", found["ratio"]), ("processes again (control)", found["control"])]
    lines = [
        head(f"{found['pairs']} iterations of {STEPS} steps, {found['workers']} workers"), "",
        "| workers | median seconds of an iteration | over processes, with interval |", "|---|---|---|",
    ]  # fmt: skip
    seconds = found["seconds"]
    lines.append(f"| processes | {statistics.median(seconds['processes']):.2f} | |")
    for (name, (middle, low, high)), key in zip(rows, ("ray", "again")):
        lines.append(
            f"| {name} | {statistics.median(seconds[key]):.2f} | {middle:.3f} [{low:.3f}, {high:.3f}] |"
        )
    same = "The weights are the same to the bit." if found["same"] else "The weights DIFFER."
    return "\n".join([*lines, "", same])


def throughput_table(loads: list[Load]) -> str:
    step = f"rollouts of {STEPS_OF_SLEEP} steps of {SLEEP * 1e3:g} ms"
    lines = [
        head(step), "",
        "| workers | rollouts a second | times one worker | driver's processor, ms a rollout | Ray's, ms a rollout |",
        "|---|---|---|---|---|",
    ]  # fmt: skip
    for each in loads:
        times = each.rate / loads[0].rate
        lines.append(
            f"| {each.workers} | {each.rate:.1f} | {times:.1f} | {each.driver * 1e3:.2f} | {each.ray * 1e3:.2f} |"
        )
    return "\n".join(lines)


def figures_table(figure: dict[str, float]) -> str:
    rows = [
        ("weights of the agent, and a gradient", f"{figure['weights'] / 1e3:.0f} kB"),
        (
            "the answer to an order to play",
            f"{figure['rollout'] / 1e3:.1f} kB for {figure['steps']:.0f} steps",
        ),
        ("the same, a step", f"{figure['step']:.0f} bytes"),
    ]
    return "\n".join(
        [head(NETWORK), "", "| what | measured |", "|---|---|", *(f"| {a} | {b} |" for a, b in rows)]
    )


def computed_table(figure: dict[str, float], loads: list[Load]) -> str:
    rows = thousand(figure, loads)
    return "\n".join(
        ["| 1,000 nodes of 8 cores | computed |", "|---|---|", *(f"| {a} | {b} |" for a, b in rows)]
    )


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("table", choices=["overhead", "throughput"])
    parser.add_argument("--workers", type=int, nargs="+", help="default: 2 (overhead), 1 8 32 (throughput)")
    parser.add_argument("--pairs", type=int, default=12, help="iterations that are compared")
    parser.add_argument("--json", type=Path, help="write the figures to this file")
    parser.add_argument("--write", action="store_true", help="put the tables into docs/")
    given = parser.parse_args()
    texts, data = (
        _overhead((given.workers or [2])[0], given.pairs)
        if given.table == "overhead"
        else _throughput(given.workers or [1, 8, 32])
    )
    print("\n\n".join(texts.values()))
    if given.json is not None:
        given.json.write_text(json.dumps(data, indent=2))
    if given.write:
        for name, text in texts.items():
            pages.write(name, text)


def _overhead(workers: int, pairs: int) -> tuple[dict[str, str], Any]:
    found = overhead(workers, pairs)
    return {"scaling-overhead": overhead_table(found)}, found


def _throughput(counts: list[int]) -> tuple[dict[str, str], Any]:
    figure = figures()
    loads = throughput(counts, int(figure["rollout"]), int(figure["weights"]) // 4)
    texts = {
        "scaling-throughput": throughput_table(loads),
        "scaling-figures": figures_table(figure),
        "scaling-computed": computed_table(figure, loads),
    }
    return texts, {"measured": figure, "loads": [_plain(each) for each in loads]}


def _plain(each: Load) -> dict[str, float]:
    return {"workers": each.workers, "rate": each.rate, "driver": each.driver, "ray": each.ray}


if __name__ == "__main__":
    main()
