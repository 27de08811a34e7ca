"""How fast the rewrite engine is, with the whole rule library: `python bench/engine.py [--json] [--shares]`.

Uniformly random moves on BERT, ResNeXt and NasNet graphs of about 1,000 and 10,000 nodes. A move is `apply`: the
successor graph with its candidates updated, including conditions and the roofline's delta of each new candidate. Also a
first full match from scratch (`match`: with conditions; `start`: with the price of every candidate), and the memory of
100 retained successors of a 1,000-node graph.

With `--shares` instead: the part of a first full match that each rule takes, summed over the networks of the zoo at the
depths of the papers and of the tests (the least of several matches, each with a new library).
"""

from __future__ import annotations

import argparse
import gc
import json
import random
import statistics
import sys
import time
import tracemalloc
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))  # for `models`

import onnx

import models
from bench import pages
from rewrite_rules import LIBRARY
from xrlflow.cost import Roofline
from xrlflow.ir import Graph
from xrlflow.onnxio import load
from xrlflow.rewrite import Library, RewriteState
from xrlflow.rewrite.state import match_all

NETWORKS = {
    "bert": {"width": 64},
    "resnext50": {"width": 8, "image": 32},
    "nasnet-a": {"width": 8, "image": 32},
}


def graph(name: str, nodes: int) -> Graph:
    """A graph with about this many nodes that run."""
    return load(models.build(name, depth=models.depth_for(name, nodes), **NETWORKS[name])).graph


def seconds(action: Callable[[], object], repeats: int = 5) -> float:
    """The median of a few runs."""
    taken = []
    for _ in range(repeats):
        begin = time.perf_counter()
        action()
        taken.append(time.perf_counter() - begin)
    return statistics.median(taken)


def moves(start: Graph, library: Library, count: int, seed: int) -> Iterator[float]:
    """Seconds of each of `count` uniformly random moves; a walk starts afresh every 50 moves."""
    rng = random.Random(seed)
    delta = Roofline().delta
    first = RewriteState.start(start, library, delta)
    state = first
    for index in range(count):
        if index % 50 == 0:
            state = first
        candidates = state.candidates
        if not candidates:
            state = first
            continue
        match = rng.choice(candidates)
        begin = time.perf_counter()
        state = state.apply(match)
        yield time.perf_counter() - begin


def retained_kb(start: Graph, library: Library, count: int = 100) -> float:
    """KiB for each of `count` successors that are kept with their candidates."""
    state = RewriteState.start(start, library, Roofline().delta)
    rng = random.Random(0)
    chosen = rng.choices(state.candidates, k=count)
    for match in chosen:  # what is remembered once does not belong to the successors
        state.apply(match)
    gc.collect()
    tracemalloc.start()
    before = tracemalloc.get_traced_memory()[0]
    kept = [state.apply(match) for match in chosen]
    gc.collect()
    used = tracemalloc.get_traced_memory()[0] - before
    tracemalloc.stop()
    return used / len(kept) / 1024


def shares(protos: Sequence[onnx.ModelProto], repeats: int) -> tuple[dict[str, float], int]:
    """Milliseconds of each rule in matching the models from scratch (the least, summed over models), and the nodes.

    The times are microseconds in thousands of places, so other programs disturb single rules: hence the least. Graphs,
    library and rules are made anew each time, so nothing is remembered except what chains of operators have given a map
    (`rewrite_rules.access`).
    """
    taken: dict[tuple[int, str], list[float]] = {}
    nodes = [0] * len(protos)
    for _ in range(repeats):
        for number, proto in enumerate(protos):
            start = load(proto).graph
            nodes[number] = start.node_count
            library = Library([type(rule)() for rule in LIBRARY], timed=True)
            match_all(start, library)
            for name, stats in library.stats.items():
                taken.setdefault((number, name), []).append(stats.seconds * 1e3)
    total = dict.fromkeys(Library(LIBRARY).rules, 0.0)
    for (_, name), each in taken.items():
        total[name] += min(each)
    return total, sum(nodes)


def zoo(*, small: bool) -> list[onnx.ModelProto]:
    """Every network of the zoo with few weights, at the depth of the tests or of the papers."""
    return [
        models.small(name) if small else models.build(name, **model.small_options)
        for name, model in models.ZOO.items()
    ]


def print_shares(repeats: int, as_json: bool, most: int = 10) -> None:
    """Print the rules that take most of the time of matching."""
    found: dict[str, dict[str, float | dict[str, float]]] = {}
    for label, small in (("zoo", False), ("small zoo", True)):
        spent, nodes = shares(zoo(small=small), repeats)
        total = sum(spent.values())
        slowest = sorted(spent, key=lambda name: -spent[name])[:most]
        found[label] = {
            "nodes": nodes,
            "total_ms": total,
            "percent": {name: 100 * spent[name] / total for name in slowest},
            "ms": {name: spent[name] for name in slowest},
        }
        if not as_json:
            print(f"{label}: {total:.1f} ms in the rules, of which")
            for name in slowest:
                print(f"  {100 * spent[name] / total:4.1f}%  {spent[name]:7.2f} ms  {name}")
    if as_json:
        print(json.dumps(found, indent=2))


def p95(values: list[float]) -> float:
    return sorted(values)[int(0.95 * (len(values) - 1))]


def table(result: Mapping[str, Any]) -> str:
    """The main figures over all networks, in Markdown."""
    lines = [
        "| | 1,000 nodes | 10,000 nodes |",
        "|---|---|---|",
        f"| a move, median | {result['apply_ms_1k']:.2g} ms | {result['apply_ms_10k']:.2g} ms |",
        f"| a move, 95th percentile | {result['apply_p95_ms_1k']:.2g} ms | {result['apply_p95_ms_10k']:.2g} ms |",
        "| first match from scratch, conditions included (slowest of the three) "
        f"| {_slowest(result, '1k', 'match_s'):.2f} s | {result['match_s_10k']:.2f} s |",
        "| the same with every candidate priced "
        f"| {_slowest(result, '1k', 'start_s'):.2f} s | {result['start_s_10k']:.2f} s |",
        f"| a retained successor | {result['state_kb_1k']:.0f} KiB | |",
    ]
    return "\n".join(lines)


def _slowest(result: Mapping[str, Any], label: str, key: str) -> float:
    return max(row[key] for name, row in result["networks"].items() if name.endswith(label))


def measured(count: int) -> dict[str, Any]:
    """The main figures over all networks, with `count` random moves on each graph, and `networks`: those of each."""
    library = Library(LIBRARY)
    result: dict[str, Any] = {}
    rows: dict[str, dict[str, float]] = {}
    for size, label in ((1_000, "1k"), (10_000, "10k")):
        pooled: list[float] = []
        for name in NETWORKS:
            rows[f"{name} {label}"], taken = _of_network(graph(name, size), library, count, label == "1k")
            pooled += taken
        result[f"apply_ms_{label}"] = statistics.median(pooled) * 1e3
        result[f"apply_p95_ms_{label}"] = p95(pooled) * 1e3
    whole = {"networks": rows}
    result["match_s_10k"] = _slowest(whole, "10k", "match_s")
    result["start_s_10k"] = _slowest(whole, "10k", "start_s")
    result["state_kb_1k"] = max(row["state_kb"] for row in rows.values() if "state_kb" in row)
    result["rules"] = len(library.rules)
    return {**result, **whole}


def _of_network(
    start: Graph, library: Library, count: int, with_memory: bool
) -> tuple[dict[str, float], list[float]]:
    """The figures of one graph, and the seconds of its moves."""
    row = {
        "match_s": seconds(lambda: match_all(start, library)),
        "start_s": seconds(lambda: RewriteState.start(start, library, Roofline().delta)),
    }
    taken = list(moves(start, library, count, seed=0))
    row = {"nodes": start.node_count, "candidates": RewriteState.start(start, library).count, **row}
    if taken:
        row |= {"apply_ms": statistics.median(taken) * 1e3, "apply_p95_ms": p95(taken) * 1e3}
    if with_memory and row["candidates"]:
        row["state_kb"] = retained_kb(start, library)
    return row, taken


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--json", action="store_true", help="print one object")
    parser.add_argument("--moves", type=int, default=300, help="random moves on each graph")
    parser.add_argument("--shares", action="store_true", help="what part of matching the zoo each rule takes")
    parser.add_argument(
        "--repeats", type=int, default=9, help="matches of the zoo, of which the quickest count"
    )
    parser.add_argument("--write", action="store_true", help="put the table into docs/benchmarks")
    arguments = parser.parse_args()
    if arguments.shares:
        print_shares(arguments.repeats, arguments.json)
        return
    result = measured(arguments.moves)
    if arguments.write:
        pages.write("engine", table(result))
    if arguments.json:
        print(json.dumps(result, indent=2))
        return
    for name, row in result["networks"].items():
        print(f"{name:16}", "  ".join(f"{k} {v:.3f}" if v < 1000 else f"{k} {v:.0f}" for k, v in row.items()))
    for key, value in result.items():
        if key != "networks":
            print(f"{key:20} {value:.3f}")


if __name__ == "__main__":
    main()
