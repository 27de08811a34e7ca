"""Measured latencies of rewritten graphs, the data of the learned cost model: `python bench/latencies.py FOLDER`.

Networks of the zoo in several sizes, exports, valleys and wheel models are rewritten by searches, by sweeps of rules
and by random walks. A search follows each cost model, the learned one included: a search goes where its costs are
wrong, so that is what they must learn (as in DAgger; Ross, Gordon, Bagnell, 2011). Each variant is measured in turns
with the network that it came from. A file per network and round; files that exist are not made again. Nothing else may
run on the machine. `--list` names the networks.
"""

from __future__ import annotations

import argparse
import random
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import chain, zip_longest
from pathlib import Path

import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import models
from models import exports, wheels
from models.training import zoo_sources
from models.valleys import FAMILIES, Valley
from rewrite_rules import LIBRARY
from xrlflow.backends import BackendError
from xrlflow.backends.onnxruntime import measure, open_model
from xrlflow.backends.results import SpeedUp
from xrlflow.cost import Machine, Profiled, Roofline, calibrated
from xrlflow.cost.calibrate import runtime
from xrlflow.cost.comparisons import Comparisons
from xrlflow.cost.learned import Learned, load_network
from xrlflow.cost.machine import cpu_name
from xrlflow.cost.model import AdditiveCost
from xrlflow.cost.neighbourhoods import Neighbourhoods
from xrlflow.cost.pretrained import PRETRAINED
from xrlflow.ir import Graph
from xrlflow.onnxio import ImportedModel, ModelError, load, to_proto
from xrlflow.rewrite import Library, RewriteState
from xrlflow.search import Limits, SearchNode, greedy, simplify, sweep, taso
from xrlflow.search.result import extend
from xrlflow.verify import feeds_for_measurement

# Networks slower than this (seconds of a run) would take too long, and faster ones are all overhead.
_SLOWEST, _FASTEST = 0.02, 8e-5
# Graphs may grow to so many times their operators (or by so many).
_GROWTH, _MORE = 2.0, 16
_AT_ONCE = 8  # variants that are measured in turns with the original
_ROUNDS, _WIDTH = 24, 0.01
_RADIUS = 3
_SEARCHING = 2.0  # seconds of each search
_SEARCHED = 0.6  # the part of the variants that searches may give
_PROPOSING = 6.0  # seconds to propose further variants of a network
# A comparison whose control is off by more (logarithm) is thrown away.
_OFF = 0.03
_UNSEEN = ("mobilenetv2", "inceptionv3", "gru-unrolled", "dalle", "unet", "yolo")


@dataclass(frozen=True, slots=True)
class Network:
    """A network to rewrite: `read` imports it; `feeds` draws its inputs."""

    name: str
    read: Callable[[], ImportedModel]
    feeds: Callable[[ImportedModel], dict[str, np.ndarray]]


def _zoo(name: str, depth: int | None, options: dict[str, int]) -> ImportedModel:
    return load(models.build(name, depth, **options))


def _wheel(name: str) -> ImportedModel:
    return load(str(wheels.fetch(name)), shapes=wheels.WHEELS[name].shapes, fix_shapes=True)


def _export(name: str, small: bool) -> ImportedModel:
    return load(exports.export(name, small))


def networks() -> Iterator[Network]:
    """Every network, the architectures in turns."""
    found: dict[str, list[Network]] = {}
    for source in zoo_sources():
        if source.scrambled:
            continue
        name, depth, options = source.build.args  # type: ignore[attr-defined]
        read = partial(_zoo, name, depth, dict(options))
        found.setdefault(name, []).append(Network(source.name, read, feeds_for_measurement))
    for name in _UNSEEN:
        small = models.ZOO[name]
        for depth in (small.small_depth, small.small_depth + 1):
            for sizes in ({}, dict(small.small_options)):
                label = "-".join(f"{k}{v}" for k, v in sizes.items()) or "full"
                read = partial(_zoo, name, depth, sizes)
                found.setdefault(name, []).append(
                    Network(f"{name}-{depth}-{label}", read, feeds_for_measurement)
                )
    whole = partial(_zoo, "mobilenetv2", None, {})
    found["mobilenetv2"].insert(0, Network("mobilenetv2", whole, feeds_for_measurement))
    for name in wheels.WHEELS:
        found[name] = [Network(name, partial(_wheel, name), lambda _, name=name: wheels.inputs(name))]  # type: ignore[misc]
    for name in exports.EXPORTS:
        for small in (True, False):
            found.setdefault(name, []).append(
                Network(
                    f"{name}-export-{'small' if small else 'full'}",
                    partial(_export, name, small),
                    lambda _, name=name, small=small: exports.inputs(name, small),  # type: ignore[misc]
                )
            )
    for family in FAMILIES.values():
        for depth, width in family.shapes:
            valley = Valley(family, depth, width, 1000)
            read = lambda valley=valley: load(valley.model())  # noqa: E731
            found.setdefault(family.name, []).append(Network(valley.name, read, feeds_for_measurement))
    queues = [iter(each) for each in found.values()]
    while queues:
        for queue in list(queues):
            network = next(queue, None)
            if network is None:
                queues.remove(queue)
            else:
                yield network


def variants(starts: Sequence[SearchNode], count: int, rng: random.Random) -> list[SearchNode]:
    """Different rewritten graphs: the shortlists of searches from each start (one for each cost model); then sweeps of
    a few rules and random walks from the first start."""
    first = starts[0]
    seen = {first.state.fingerprint}
    found: list[SearchNode] = []
    most = max(_GROWTH * first.state.graph.node_count, first.state.graph.node_count + _MORE)

    def offer(node: SearchNode) -> None:
        if node.state.fingerprint not in seen and node.state.graph.node_count <= most:
            seen.add(node.state.fingerprint)
            found.append(node)

    shortlists = []
    for start in starts:
        for search in (greedy, taso):
            limits = Limits(budget=60, deadline=time.monotonic() + _SEARCHING)
            shortlists.append(search(start.state, start.cost, limits).shortlist)
    for node in chain.from_iterable(zip_longest(*shortlists)):
        if node is not None and len(found) < _SEARCHED * count:
            offer(node)
    attempts = 0
    until = time.monotonic() + _PROPOSING
    while len(found) < count and attempts < 4 * count and first.state.candidates and time.monotonic() < until:
        attempts += 1
        offer(_swept(first, rng) if rng.random() < 0.55 else _walked(first, rng))
    return found


def cost_models(prices: Profiled, roofline: Roofline, rng: random.Random) -> list[AdditiveCost]:
    """What searches follow: both kinds of prices, the network that corrects them, and one of its ensemble, drawn at
    random, which is wrong elsewhere (as in Thompson sampling)."""
    network = load_network(PRETRAINED)
    drawn = rng.randrange(network.config.members)
    arrays = {name: array[drawn : drawn + 1] for name, array in network.arrays.items()}
    alone = replace(network, config=replace(network.config, members=1), arrays=arrays)
    return [roofline, prices, Learned(prices, network), Learned(prices, alone)]


def _swept(start: SearchNode, rng: random.Random) -> SearchNode:
    """One to four rules, each applied wherever it can be, or at a part of these places."""
    node = start
    for _ in range(rng.randint(1, 4)):
        rules = sorted({m.rule.name for m in node.state.candidates})
        if not rules:
            break
        most = 10**6 if rng.random() < 0.6 else rng.randint(1, 8)
        node = sweep(
            node, rng.choice(rules), Limits(budget=most, deadline=time.monotonic() + 1), float("inf")
        )
    return node


def _walked(start: SearchNode, rng: random.Random) -> SearchNode:
    """Random substitutions: the rule is drawn first, so that rules with few places get their share."""
    node = start
    for _ in range(rng.randint(2, 30)):
        rules = sorted({m.rule.name for m in node.state.candidates})
        if not rules:
            break
        rule = rng.choice(rules)
        match = rng.choice([m for m in node.state.candidates if m.rule.name == rule])
        cost, edit = node.cost + match.delta, node.state.edit(match)
        node = SearchNode(node.state.apply(match, edit), extend(node.path, match, edit, cost), cost)
    return node


def collect(network: Network, count: int, threads: int, machine: Machine, seed: int) -> Comparisons | str:
    """Measure variants of a network; why not, if it cannot be done."""
    imported = network.read()
    library = Library(LIBRARY)
    roofline = Roofline(machine, imported.bindings)
    graph, _ = simplify(imported.graph, library, roofline.cost)
    feeds = network.feeds(imported)

    def written(graph: Graph) -> bytes:
        return to_proto(imported, graph).SerializeToString()

    original = written(graph)
    if not _runs(original, feeds, threads):
        return "the runtime refuses it with these sizes"
    quick = measure([original, original], feeds, threads=threads, time_limit=0.3, control=False)
    latency = quick.latencies[0].seconds
    if not _FASTEST < latency < _SLOWEST:
        return f"{latency * 1e3:.3f} ms a run"
    rng = random.Random(f"{seed} {network.name}")
    prices = Profiled(machine, bindings=imported.bindings, per_operator=0.015)
    starts = [
        SearchNode(RewriteState.start(graph, library, model.delta), None, model.cost(graph))
        for model in cost_models(prices, roofline, rng)
    ]
    graphs: list[Graph] = [graph]
    logs: list[float] = []
    errors: list[float] = []
    proposed = variants(starts, count, rng)
    for first in range(0, len(proposed), _AT_ONCE):
        files = {id(n): written(n.state.graph) for n in proposed[first : first + _AT_ONCE]}
        runnable = [n for n in proposed[first : first + _AT_ONCE] if _runs(files[id(n)], feeds, threads)]
        if not runnable:
            continue
        limit = 0.5 + len(runnable) * 0.1 + 2 * _ROUNDS * (1 + len(runnable)) * max(2 * latency, 4e-3)
        compared = measure(
            [original, *(files[id(n)] for n in runnable)],
            feeds,
            threads=threads,
            time_limit=limit,
            target_width=_WIDTH,
        )
        control = compared.control
        if control is None or abs(np.log(control.median)) > _OFF or compared.load.disturbed:
            continue
        for node, speedup in zip(runnable, compared.speedups):
            graphs.append(node.state.graph)
            logs.append(float(np.log(speedup.median)))
            errors.append(_error(speedup))
    if not logs:
        return "nothing could be measured"
    known = Neighbourhoods(prices, _RADIUS)
    counts = [known.view(g).counts() for g in graphs]
    about = {
        "name": network.name, "machine": cpu_name(), "runtime": runtime(), "threads": threads,
        "latency": latency, "taken": time.time(),
    }  # fmt: skip
    return Comparisons.of(known, counts, logs, errors, about)


def _runs(model: bytes, feeds: dict[str, np.ndarray], threads: int) -> bool:
    try:
        with open_model(model, threads=threads) as opened:
            opened.run(feeds)
    except (BackendError, ModelError):
        return False
    return True


def _error(speedup: SpeedUp) -> float:
    """The standard deviation of a log-ratio, from its 95% interval; that of few measurements is a guess."""
    return max(speedup.width / 3.92, 1e-3) if speedup.bounded else 0.03


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("folder", type=Path)
    parser.add_argument("names", nargs="*", help="beginnings of networks' names; default: all")
    parser.add_argument("--list", action="store_true", help="name the networks and measure nothing")
    parser.add_argument("--count", type=int, default=64, help="variants of each network")
    parser.add_argument("--minutes", type=float, default=60.0, help="begin no network after so many")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument(
        "--round", type=int, default=0, help="the seed of the variants; further rounds add data"
    )
    options = parser.parse_args()
    chosen: Sequence[Network] = [
        n for n in networks() if not options.names or any(n.name.startswith(p) for p in options.names)
    ]
    if options.list:
        print(*[n.name for n in chosen], sep="\n")
        return
    options.folder.mkdir(parents=True, exist_ok=True)
    machine = calibrated(options.threads)
    end = time.monotonic() + 60 * options.minutes
    for network in chosen:
        path = options.folder / f"{network.name}-{options.threads}-{options.round}.npz"
        skipped = path.with_suffix(".skipped")
        if path.exists() or skipped.exists():
            continue
        if time.monotonic() > end:
            break
        begin = time.monotonic()
        found = collect(network, options.count, options.threads, machine, options.round)
        took = time.monotonic() - begin
        if isinstance(found, str):
            skipped.write_text(found)
            print(f"{network.name}: {found}", flush=True)
            continue
        found.save(path)
        print(
            f"{network.name}: {found.graphs - 1} graphs in {took:.0f} s, {found.about['latency'] * 1e3:.2f} ms, "
            f"{path.stat().st_size / 1e3:.0f} kB",
            flush=True,
        )


if __name__ == "__main__":
    main()
