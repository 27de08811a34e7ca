"""What the agent is worth: `python bench/agents.py TABLE [--agents FILE ...] [--json FILE]`.

Tables, each of one run on one machine, with the same rules and the same modelled cost for everybody:

    valleys         networks that no single substitution improves (models/valleys.py): how often the optimum is reached
    networks        the zoo and the wheel models, by modelled cost, against TASO (alpha 1.05, budget 1000)
    precision       the files of models/precision.py in low precision, the same, with alpha 1.3, too
    generalisation  depths, sizes and architectures that were not trained on, against everything that was tried
    decisions       the time of one decision: features, encoder, candidate scores; both encodings
    steps           environment steps per second in training, updates included
    scratch         how long an agent that knows nothing takes to beat greedy search on one network
    encodings       training with `encoding="successors"` beside ours, in equal time
    rewards         training further by the modelled reward, by the measured one and by both, in equal time, measured
    train           makes an agent from `models/training.py`, to be tested by the tables above

With several `--agents` each is one of the seeds; with one, `--seeds` searches are made with it. Controls stand in every
table of results: random policy, greedy with 2 and 3 steps of look-ahead, and `uniform`, the agent's own search
procedure with a policy that thinks everything equally good: what it reaches is not the agent's merit. The JSON has a
row for each search.
"""

from __future__ import annotations

import argparse
import copy
import functools
import json
import math
import random
import statistics
import sys
import time
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))  # for `models`

import models
from bench import pages
from models import precision, training, wheels
from models.valleys import FAMILIES, ValleyRecord, catalogue, valley_library
from rewrite_rules import LIBRARY
from xrlflow.backends.onnxruntime import measure
from xrlflow.cost import Roofline
from xrlflow.ir import Graph
from xrlflow.learn.log import Logs
from xrlflow.learn.ppo import Episode, PPOConfig, Rollout, collect, update
from xrlflow.onnxio import ImportedModel, load, to_proto
from xrlflow.rewrite import Library, RewriteState
from xrlflow.rl.agent import Agent, InTorch
from xrlflow.rl.env import EnvConfig, Problem, Reward, RewriteEnv
from xrlflow.rl.features import Featuriser, Observation, Vocabulary
from xrlflow.rl.latency import PairedLatency
from xrlflow.rl.network import Network
from xrlflow.rl.situation import Situation, choices
from xrlflow.rl.strategy import Scorer, StrategyConfig, agent_search
from xrlflow.rl.successors import SuccessorAgent, SuccessorFeaturiser
from xrlflow.rl.train import TrainConfig, train
from xrlflow.rl.workers import Task
from xrlflow.search import Limits, SearchNode, SearchResult, extend, greedy, lookahead, replay, simplify, taso
from xrlflow.verify import feeds_for_measurement

PRETRAINED = Path(__file__).resolve().parent.parent / "xrlflow" / "rl" / "pretrained" / "agent.safetensors"
# A budget of expanded states that no time limit reaches.
ENDLESS = 1 << 40


# Contestants


@dataclass(frozen=True, slots=True)
class Start:
    """The common start: a priced state, and the cost model."""

    name: str
    found: SearchNode
    prices: Roofline


Method = Callable[[Start, Limits, int], SearchResult]


class Uniform:
    """A policy for which all candidates, and No-Op, are equally good."""

    def log_probs(self, observations: Sequence[Observation]) -> npt.NDArray[np.float64]:
        counts = np.array([o.candidates + 1 for o in observations])
        return np.repeat(-np.log(counts), counts)


def random_policy(start: Start, limits: Limits, seed: int, horizon: int = 100) -> SearchResult:
    """Rollouts that draw uniformly among candidates and No-Op. Returns the best graph on any of them."""
    begin = time.monotonic()
    rng = random.Random(seed)
    best, expanded, at, steps = start.found, 0, start.found, 0
    try:
        while not limits.over(expanded, best.cost):
            offered = at.state.candidates
            number = rng.randrange(len(offered) + 1)
            expanded += 1  # so that it ends even if there are no candidates
            if number == len(offered) or steps == horizon:
                at, steps = start.found, 0
                continue
            match = offered[number]
            cost, edit = at.cost + match.delta, at.state.edit(match)
            path = extend(at.path, match, edit, cost)
            at, steps = SearchNode(at.state.apply(match, edit), path, cost), steps + 1
            if cost < best.cost:
                best = at
    except KeyboardInterrupt:
        pass
    return SearchResult(best, (best,), expanded, expanded, time.monotonic() - begin, False)


def plain(search: Callable[..., SearchResult], **options: Any) -> Method:
    """A search that needs no seed."""

    def run(start: Start, limits: Limits, seed: int) -> SearchResult:
        return search(start.found.state, start.found.cost, limits, **options)

    return run


def with_agent(agent: Agent | None, vocabulary: Vocabulary) -> Method:
    """The agent's search, or that of a policy without knowledge. Nothing is remembered between graphs.

    Like the other methods, it goes on until the limits.
    """

    network = None if agent is None else Network(agent.arrays())

    def run(start: Start, limits: Limits, seed: int) -> SearchResult:
        featuriser = Featuriser(vocabulary, start.prices)
        policy = network or Uniform()
        config = StrategyConfig(patience=None)
        return agent_search(
            start.found.state, start.found.cost, limits, policy, featuriser, config, seed=seed
        )

    return run


@dataclass(frozen=True, slots=True)
class Contestants:
    """Methods by name. Those of `seeded` have several runs; the agent's is one for each agent or seed."""

    methods: Mapping[str, tuple[Method, ...]]
    seeded: int

    @staticmethod
    def of(agents: Sequence[Agent], seeds: int, library: Library, alphas: Sequence[float]) -> Contestants:
        known = [_knowing(a, library) for a in agents]
        vocabulary = known[0].vocabulary if known else Vocabulary.of(library)
        if len(known) == 1:
            known *= seeds
        runs = len(known) or seeds
        methods: dict[str, tuple[Method, ...]] = {
            "random": (random_policy,) * runs,
            "greedy": (plain(greedy),),
            "lookahead2": (plain(lookahead, depth=2),),
            "lookahead3": (plain(lookahead, depth=3),),
            **{f"taso {alpha:g}": (plain(taso, alpha=alpha),) for alpha in alphas},
            "uniform": (with_agent(None, vocabulary),) * runs,
        }
        if known:
            methods["agent"] = tuple(with_agent(a, a.vocabulary) for a in known)
        return Contestants(methods, runs)

    def compete(
        self, start: Start, limits: Callable[[str], Limits], only: Iterable[str] | None = None
    ) -> Iterator[dict[str, Any]]:
        """A row for each run from this start."""
        for name, runs in self.methods.items():
            if only is not None and name not in only:
                continue
            for seed, method in enumerate(runs):
                begin = time.monotonic()
                result = method(start, limits(name), seed)
                yield {
                    "graph": start.name,
                    "method": name,
                    "seed": seed,
                    "initial": start.found.cost,
                    "cost": start.prices.cost(result.best.state.graph),
                    "seconds": round(time.monotonic() - begin, 3),
                    "expanded": result.expanded,
                    "steps": len(result.best.trace),
                }


def _knowing(agent: Agent, library: Library) -> Agent:
    """The agent, with embeddings for rules that are newer than it."""
    return agent.extended(library).eval()


def within(seconds: float) -> Limits:
    return Limits(ENDLESS, time.monotonic() + seconds)


def until(known: ValleyRecord, seconds: float) -> Limits:
    """Limits that end after `seconds`, or when the optimum is reached."""

    def stop(expanded: int, best: float) -> None:
        if known.reached(best):
            raise KeyboardInterrupt  # every search stops at it

    return Limits(ENDLESS, time.monotonic() + seconds, stop)


# Rows and tables

Row = dict[str, Any]


class Rows:
    """The rows of a run, stored in a file. A stopped run continues after the graphs that are in it."""

    def __init__(self, path: Path | None) -> None:
        self.path = path
        self.rows: list[Row] = json.loads(path.read_text()) if path is not None and path.exists() else []

    def has(self, graph: str) -> bool:
        return any(r["graph"] == graph for r in self.rows)

    def add(self, rows: Iterable[Row]) -> list[Row]:
        made = list(rows)
        self.rows += made
        if self.path is not None:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            part = self.path.with_suffix(".part")
            part.write_text(json.dumps(self.rows, indent=1))
            part.replace(self.path)
        return made


def markdown(header: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    lines = [header, ["---"] * len(header), *rows]
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)


def spread(values: Sequence[float], pattern: str = "{:.0%}") -> str:
    """The mean, and the range if there are different values."""
    mean, low, high = pattern.format(statistics.fmean(values)), min(values), max(values)
    return (
        mean
        if len(values) < 2 or low == high
        else f"{mean} ({pattern.format(low)} to {pattern.format(high)})"
    )


def ordered(rows: Iterable[Row], key: str) -> list[str]:
    return list(dict.fromkeys(r[key] for r in rows))


# Valleys


def valleys(arguments: argparse.Namespace) -> str:
    library = valley_library()
    contestants = Contestants.of(arguments.agents, arguments.seeds, library, (1.05, 1.1, 1.3))
    charted = {
        c.valley.name: c
        for c in catalogue()
        if not arguments.names or c.valley.family.name in arguments.names
    }
    if arguments.quick:
        charted = {n: c for i, (n, c) in enumerate(charted.items()) if i % arguments.quick == 0}
    rows = Rows(arguments.json)
    for name, known in charted.items():
        if rows.has(name):
            continue
        start = Start(name, known.valley.start(library), known.valley.cost_model())
        made = rows.add(
            row
            | {
                "family": known.valley.family.name,
                "up": len(known.climbs),
                "height": known.height,
                "optimum": known.optimum,
                "reached": known.reached(row["cost"]),
            }
            for row in contestants.compete(start, lambda _, known=known: until(known, arguments.seconds))  # type: ignore[misc]
        )
        reached = [m for m in ordered(made, "method") if all(r["reached"] for r in made if r["method"] == m)]
        print(f"{name} ({known.height:.0%}): {', '.join(reached) or 'nobody'}", file=sys.stderr, flush=True)
    return valley_table([r for r in rows.rows if r["graph"] in charted], charted)


def valley_table(rows: Sequence[Row], charted: Mapping[str, ValleyRecord]) -> str:
    """How many instances of a family reach their optimum, by method, with the range over the seeds of a method."""
    methods = ordered(rows, "method")

    def share(chosen: Callable[[Row], bool], method: str) -> str:
        by_seed: dict[int, list[bool]] = defaultdict(list)
        for r in rows:
            if r["method"] == method and chosen(r):
                by_seed[r["seed"]].append(r["reached"])
        return spread([statistics.fmean(found) for found in by_seed.values()]) if by_seed else ""

    groups: dict[str, Callable[[Row], bool]] = {}
    for name, family in FAMILIES.items():
        if any(r["family"] == name for r in rows):
            mark = "held out" if family.held_out else "real" if family.real else "made up"
            groups[f"{name} ({mark})"] = lambda r, name=name: r["family"] == name  # type: ignore[misc]
    groups["1 step up"] = lambda r: r["up"] == 1
    groups["2 steps up"] = lambda r: r["up"] == 2
    groups["3 or 4 steps up"] = lambda r: r["up"] > 2
    groups["hills up to 10%"] = lambda r: r["height"] <= 0.10
    groups["hills of 10% to 30%"] = lambda r: 0.10 < r["height"] <= 0.30
    groups["hills over 30%"] = lambda r: r["height"] > 0.30
    groups["not held out"] = lambda r: not FAMILIES[r["family"]].held_out
    groups["all"] = lambda r: True
    table = []
    for label, chosen in groups.items():
        count = len({r["graph"] for r in rows if chosen(r)})
        if count:
            table.append([label, str(count), *(share(chosen, m) for m in methods)])
    seconds = [f"{statistics.median(r['seconds'] for r in rows if r['method'] == m):.2f} s" for m in methods]
    table.append(["median time", "", *seconds])
    return markdown(["optimum reached", "instances", *methods], table)


# Networks


def whole_start(name: str, library: Library) -> Start:
    """A network of the zoo at full size, or one in low precision, or a trained model at its measured size, after the
    rules without a price.
    """
    if name in models.ZOO:
        return _start(name, models.build(name), library)
    if name in precision.names() and name not in precision.TRAINED:
        return _start(name, precision.build(name), library)
    wheel = wheels.find(name)
    imported = load(str(wheels.fetch(name)), shapes=wheel.shapes)
    prices = Roofline(bindings=imported.bindings)
    graph, _ = simplify(imported.graph, library, prices.cost)
    return Start(
        name, SearchNode(RewriteState.start(graph, library, prices.delta), None, prices.cost(graph)), prices
    )


def _start(name: str, proto: Any, library: Library) -> Start:
    prices = Roofline()
    graph, _ = simplify(load(proto).graph, library, prices.cost)
    return Start(
        name, SearchNode(RewriteState.start(graph, library, prices.delta), None, prices.cost(graph)), prices
    )


# Searches on graphs with more nodes than this have this part of TASO's time.
LARGE, PART = 300, 0.2


def networks(arguments: argparse.Namespace, low: bool = False) -> str:
    library = Library(LIBRARY, backend="onnxruntime", contrib=True) if low else Library(LIBRARY)
    alphas = (1.05, 1.3) if low else (1.05,)
    contestants = Contestants.of(arguments.agents, arguments.seeds, library, alphas)
    rows = Rows(arguments.json)
    for name in arguments.names or (precision.names() if low else [*models.ZOO, *wheels.WHEELS]):
        if rows.has(name):
            continue
        start = whole_start(name, library)
        nodes = start.found.state.graph.node_count
        reference = list(contestants.compete(start, lambda _: Limits(1000), ["taso 1.05"]))
        taken = reference[0]["seconds"]
        given = PART * taken if nodes > LARGE else max(taken, 1.0)

        def limits(method: str, given: float = given, taken: float = taken) -> Limits:
            return within(given if method in ("agent", "uniform") else max(taken, 1.0))

        others = [m for m in contestants.methods if m != "taso 1.05"]
        made = rows.add(
            row | {"nodes": nodes} for row in [*reference, *contestants.compete(start, limits, others)]
        )
        summary = {
            m: min(r["cost"] for r in made if r["method"] == m) / start.found.cost
            for m in contestants.methods
        }
        print(name, {m: round(c, 4) for m, c in summary.items()}, file=sys.stderr, flush=True)
    return network_table(rows.rows)


def network_table(rows: Sequence[Row]) -> str:
    """The final modelled cost as a part of the first, and seconds."""
    methods = ordered(rows, "method")
    table = []
    at_most = below = 0
    for name in ordered(rows, "graph"):
        here = [r for r in rows if r["graph"] == name]
        part = {m: [r["cost"] / r["initial"] for r in here if r["method"] == m] for m in methods}
        seconds = {m: statistics.fmean(r["seconds"] for r in here if r["method"] == m) for m in methods}
        if "agent" in part:
            worst, rival = max(part["agent"]), part["taso 1.05"][0]
            at_most += worst <= rival * (1 + 1e-6)
            below += worst < rival * (1 - 1e-4)
        cells = [f"{spread(part[m], '{:.4f}')}, {seconds[m]:.1f} s" for m in methods]
        table.append([name, str(here[0]["nodes"]), *cells])
    text = markdown(["cost after / before", "nodes", *methods], table)
    if "agent" in methods:
        text += (
            f"\n\nThe agent's worst seed: at or below TASO on {at_most} of {len(table)}, below on {below}."
        )
    return text


# Generalisation

UNSEEN: Mapping[str, tuple[str, int, Mapping[str, int]]] = {
    "bert, 12 layers": ("bert", 12, {"width": 256, "tokens": 64}),
    "bert, 12 layers, 384 tokens": ("bert", 12, {"width": 256, "tokens": 384}),
    "bert, 6 layers, width 768": ("bert", 6, {"width": 768}),
    "gpt2, 12 layers": ("gpt2", 12, {"width": 256, "tokens": 128}),
    "vit, 12 layers": ("vit", 12, {"width": 256, "image": 160}),
    "vit-classifier, 12 layers": ("vit-classifier", 12, {"width": 256, "image": 160}),
    "lstm-unrolled, 24 steps": ("lstm-unrolled", 24, {"width": 256}),
    "nasrnn, 5 steps": ("nasrnn", 5, {"width": 512}),
    "resnet50": ("resnet50", 16, {}),
    "resnext50": ("resnext50", 16, {}),
    "nasnet-a, 6 cells": ("nasnet-a", 6, {"width": 32, "image": 112}),
    **{f"{name} (architecture)": (name, models.ZOO[name].depth, {}) for name in sorted(training.UNSEEN)},
}


def generalisation(arguments: argparse.Namespace) -> str:
    library = Library(LIBRARY)
    contestants = Contestants.of(arguments.agents, arguments.seeds, library, (1.05, 1.1, 1.3))
    rows = Rows(arguments.json)
    for label, (name, depth, options) in UNSEEN.items():
        if rows.has(label) or (arguments.names and name not in arguments.names):
            continue
        start = _start(label, models.build(name, depth, **options), library)
        made = list(contestants.compete(start, lambda _: within(arguments.seconds)))
        if arguments.own:
            made.append(own_agent(start, library, arguments.own, arguments.seconds))
        rows.add(made)
        print(
            label,
            {r["method"]: round(r["cost"] / r["initial"], 4) for r in made},
            file=sys.stderr,
            flush=True,
        )
    return generalisation_table(rows.rows)


def own_agent(start: Start, library: Library, seconds: float, search: float) -> Row:
    """A search with an agent that was trained only on this graph, for `seconds`."""
    vocabulary = Vocabulary.of(library)
    trained = train(
        _Given(_task(start, vocabulary)), vocabulary,
        TrainConfig(iterations=10_000, steps=512, workers=0, environments=4, evaluate_every=2),
        deadline=time.monotonic() + seconds,
    )  # fmt: skip
    begin = time.monotonic()
    result = with_agent(trained.agent, vocabulary)(start, within(search), 0)
    return {
        "graph": start.name,
        "method": "own agent",
        "seed": 0,
        "initial": start.found.cost,
        "cost": start.prices.cost(result.best.state.graph),
        "seconds": round(time.monotonic() - begin, 3),
        "expanded": result.expanded,
        "steps": len(result.best.trace),
    }


def _problem(start: Start) -> Problem:
    state = start.found.state
    return Problem.of(start.name, state.graph, state.library, start.prices)


def _task(start: Start, vocabulary: Vocabulary) -> Task:
    return Task([_problem(start)], [], Featuriser(vocabulary, start.prices))


@dataclass(frozen=True, slots=True, eq=False)
class _Given:
    """A task that exists already: it stays in this process."""

    task: Task

    def __call__(self, vocabulary: Vocabulary) -> Task:
        return self.task


def generalisation_table(rows: Sequence[Row]) -> str:
    """Each method's gain as a part of the best gain of any run."""
    methods = ordered(rows, "method")
    table = []
    for name in ordered(rows, "graph"):
        here = [r for r in rows if r["graph"] == name]
        initial = here[0]["initial"]
        best = initial - min(r["cost"] for r in here)
        cells = []
        for method in methods:
            gains = [(initial - r["cost"]) / best if best > 0 else 1.0 for r in here if r["method"] == method]
            cells.append(spread(gains, "{:.1%}") if gains else "")
        table.append([name, f"{best / initial:.1%}", *cells])
    return markdown(["part of the best gain", "best gain", *methods], table)


# Speed


def decisions(arguments: argparse.Namespace) -> str:
    """Milliseconds of a decision on random walks: features of a new state, and the network."""
    library = Library(LIBRARY)
    vocabulary = Vocabulary.of(library)
    agent = _knowing(arguments.agents[0], library) if arguments.agents else Agent(vocabulary).eval()
    rows = Rows(None)
    for label, name, options, encodings in (
        ("bert, 12 layers", "bert", {}, ("candidates", "successors")),
        ("resnet50", "resnet50", {}, ("candidates", "successors")),
        ("resnext50", "resnext50", {}, ("candidates", "successors")),
        ("nasnet-a", "nasnet-a", {"width": 32}, ("candidates",)),
    ):
        if arguments.names and name not in arguments.names:
            continue
        start = _start(label, models.build(name, **options), library)
        for encoding in encodings:
            featuriser = Featuriser(agent.vocabulary, start.prices)
            observe: Any = featuriser
            policy: Scorer[Any] = Network(agent.arrays())
            if encoding == "successors":
                observe, policy = (
                    SuccessorFeaturiser(featuriser),
                    InTorch(SuccessorAgent(agent.vocabulary).eval()),
                )
            count = arguments.decisions if encoding == "candidates" else max(3, arguments.decisions // 10)
            rows.add([{"encoding": encoding, **timed_decisions(start, observe, policy, count)}])
            print(rows.rows[-1], file=sys.stderr, flush=True)
    if arguments.json is not None:
        Rows(arguments.json).add(rows.rows)
    header = [
        "one decision",
        "encoding",
        "nodes",
        "candidates",
        "apply",
        "features",
        "network",
        "all but apply",
    ]
    return markdown(
        header,
        (
            [
                r["graph"], r["encoding"], f"{r['nodes']}", f"{r['candidates']:.0f}",
                *(f"{r[k]:.1f} ms" for k in ("apply", "features", "network", "decision")),
            ]
            for r in rows.rows
        ),
    )  # fmt: skip


def timed_decisions(start: Start, observe: Callable[[Situation], Any], policy: Any, count: int) -> Row:
    """Medians over the states of a random walk. The first states, in which everything is new, do not count."""
    problem = _problem(start)
    rng = random.Random(0)
    state, cost = problem.state, problem.cost
    applying, observing, judging, offered = [], [], [], []
    for step in range(count + 3):
        candidates = choices(state)
        situation = Situation(state, candidates, cost, problem.cost)
        begin = time.perf_counter()
        observation = observe(situation)
        observed = time.perf_counter()
        policy.log_probs([observation])
        judged = time.perf_counter()
        if not candidates:
            break
        match = rng.choice(candidates)
        begin_apply = time.perf_counter()
        state, cost = state.apply(match), cost + match.delta
        if step >= 3:
            applying.append(time.perf_counter() - begin_apply)
            observing.append(observed - begin)
            judging.append(judged - observed)
            offered.append(len(candidates))
    together = [a + b for a, b in zip(observing, judging)]
    milliseconds = {
        "apply": applying, "features": observing, "network": judging, "decision": together,
    }  # fmt: skip
    return {
        "graph": start.name,
        "nodes": start.found.state.graph.node_count,
        "candidates": statistics.fmean(offered),
        **{k: round(1e3 * statistics.median(v), 3) for k, v in milliseconds.items()},
        "p90": round(1e3 * sorted(together)[int(0.9 * len(together))], 3),
    }


@dataclass(slots=True)
class _Scalars:
    """A log that keeps everything."""

    kept: list[dict[str, float]]

    def scalars(self, values: Mapping[str, float], step: int) -> None:
        self.kept.append(dict(values))

    def close(self) -> None:
        pass


def network_task(vocabulary: Vocabulary, name: str, composites: bool = True) -> Task:
    """A network of the zoo as a task, which a worker builds."""
    library = Library(LIBRARY) if composites else valley_library()
    start = _start(name, models.build(name), library)
    return _task(start, vocabulary)


def steps(arguments: argparse.Namespace) -> str:
    """Environment steps per second of training on one network, including updates, without the first iteration."""
    vocabulary = Vocabulary.of(Library(LIBRARY))
    table, rows = [], []
    for name in arguments.names or ["resnet50"]:
        for workers in sorted({0, arguments.workers}):
            kept: list[dict[str, float]] = []
            train(
                functools.partial(network_task, name=name), vocabulary,
                TrainConfig(iterations=arguments.iterations + 1, workers=workers, evaluate_every=10_000),
                log=lambda first, kept=kept: Logs(_Scalars(kept)),  # type: ignore[misc]
            )  # fmt: skip
            rates = [k["time/steps_per_second"] for k in kept if "time/steps_per_second" in k][1:]
            rows.append({"graph": name, "workers": workers, "rates": rates})
            table.append([name, str(workers or "this process"), spread(rates, "{:.0f}")])
            print(table[-1], file=sys.stderr, flush=True)
    Rows(arguments.json).add(rows)
    return markdown(["environment steps per second", "workers", "updates included"], table)


def scratch(arguments: argparse.Namespace) -> str:
    """Seconds of training until a new agent beats greedy search, without composite rules."""
    library = valley_library()
    vocabulary = Vocabulary.of(library)
    table, rows = [], []
    for name in arguments.names or ["resnext50"]:
        start = _start(name, models.build(name), library)
        rival = greedy(start.found.state, start.found.cost, Limits(ENDLESS)).best.cost
        for seed in range(arguments.seeds):
            begin = time.monotonic()
            found: list[tuple[float, float]] = []

            gains = _Gains(found, begin, start.found.cost / rival)

            trained = train(
                functools.partial(network_task, name=name, composites=False), vocabulary,
                TrainConfig(iterations=10_000, workers=arguments.workers, seed=seed, evaluate_every=1),
                deadline=begin + arguments.seconds,
                log=lambda first, gains=gains: Logs(gains),  # type: ignore[misc]
            )  # fmt: skip
            seconds = found[0][0] if found else math.inf
            cost = start.found.cost / trained.score.gain
            rows.append({"graph": name, "seed": seed, "seconds": seconds, "greedy": rival, "cost": cost})
            table.append(
                [name, str(seed), f"{rival / start.found.cost:.4f}", f"{cost / start.found.cost:.4f}",
                 f"{seconds:.0f} s" if found else "not reached"]
            )  # fmt: skip
            print(table[-1], file=sys.stderr, flush=True)
    Rows(arguments.json).add(rows)
    return markdown(["from scratch", "seed", "greedy", "agent in the end", "greedy beaten after"], table)


class _Beaten(KeyboardInterrupt):
    """Ends a training run as Ctrl-C does."""


@dataclass(slots=True)
class _Gains:
    """A log that notes when the evaluation's gain is above a rival's, and ends the run."""

    found: list[tuple[float, float]]
    begin: float
    rival: float

    def scalars(self, values: Mapping[str, float], step: int) -> None:
        gain = values.get("evaluation/gain", 0.0)
        if gain > self.rival * (1 + 1e-6):
            self.found.append((time.monotonic() - self.begin, gain))
            raise _Beaten

    def close(self) -> None:
        pass


# Encodings


def encodings(arguments: argparse.Namespace) -> str:
    """Both encodings, trained on one graph for equal time by the same PPO in this process."""
    library = Library(LIBRARY)
    vocabulary = Vocabulary.of(library)
    table, rows = [], []
    for name in arguments.names or ["squeezenet", "resnext50", "bert"]:
        start = _start(name, models.small(name), library)
        for encoding in ("candidates", "successors"):
            for seed in range(arguments.seeds):
                row = trained_alone(start, vocabulary, encoding, seed, arguments.seconds)
                rows.append(row)
                print(row, file=sys.stderr, flush=True)
            mine = [r for r in rows if r["graph"] == name and r["encoding"] == encoding]
            table.append(
                [
                    name, encoding, spread([r["steps"] / r["seconds"] for r in mine], "{:.0f}"),
                    spread([r["best"] / r["initial"] for r in mine], "{:.4f}"),
                    spread([r["last"] / r["initial"] for r in mine], "{:.4f}"),
                ]
            )  # fmt: skip
    Rows(arguments.json).add(rows)
    header = [
        "equal time",
        "encoding",
        "steps per second",
        "best cost seen",
        "mean cost of the last episodes",
    ]
    return markdown(header, table)


def trained_alone(start: Start, vocabulary: Vocabulary, encoding: str, seed: int, seconds: float) -> Row:
    """PPO on one graph for `seconds`."""
    torch.manual_seed(seed)
    featuriser = Featuriser(vocabulary, start.prices)
    successors = encoding == "successors"
    observe: Any = SuccessorFeaturiser(featuriser) if successors else featuriser
    policy: Any = SuccessorAgent(vocabulary) if successors else Agent(vocabulary)
    environments = [RewriteEnv([_problem(start)], observe, EnvConfig(horizon=50)) for _ in range(4)]
    row = learn(policy, environments, 256, seed, seconds)
    return {"graph": start.name, "encoding": encoding, "seed": seed, "initial": start.found.cost, **row}


def learn(
    policy: Any,
    environments: Sequence[RewriteEnv[Any]],
    steps: int,
    seed: int,
    seconds: float,
    note: Callable[[Episode[Any]], None] = lambda _: None,
) -> Row:
    """PPO in this process for a time, with at least `steps` steps per update. Returns the results of the episodes, each
    of which is noted."""
    config = PPOConfig(epochs=3, minibatch=64, reward_scale=0.05)
    optimizer = config.optimizer(policy)
    generator = torch.Generator().manual_seed(seed)
    begin, taken, best, last = time.monotonic(), 0, math.inf, [math.inf]
    while time.monotonic() - begin < seconds:
        episodes = collect(policy, environments, steps, generator)
        taken += sum(map(len, episodes))
        best = min(best, *(e.info["best"] for e in episodes))
        last = [e.info["cost"] for e in episodes]
        for episode in episodes:
            note(episode)
        update(policy, optimizer, Rollout.of(episodes, config), config, generator)
    return {
        "best": best, "last": statistics.fmean(last), "steps": taken, "seconds": time.monotonic() - begin,
    }  # fmt: skip


# Rewards


def rewards(arguments: argparse.Namespace) -> str:
    """What the measured reward gains and costs: the agent is trained on one network for equal time, by each reward.

    It is compared with greedy search, TASO's search and the unchanged agent, which use the model. A training run counts
    with the best graph by its reward, among those where its episodes began and ended. All graphs of a network are
    measured again, in turns, in one process.
    """
    library = Library(LIBRARY)
    agent = _knowing(arguments.agents[0], library)
    plainly: dict[str, Method] = {
        "greedy": plain(greedy), "taso 1.05": plain(taso, alpha=1.05), "agent": with_agent(agent, agent.vocabulary),
    }  # fmt: skip
    rows = Rows(arguments.json)
    for name in arguments.names or ["open-nsfw", "mobilenetv2"]:
        if rows.has(name):
            continue
        start = whole_start(name, library)
        imported, source, feeds = measurable(name)
        made: list[tuple[Row, Graph]] = []
        for method, search in plainly.items():
            begin = time.monotonic()
            best = search(start, within(arguments.seconds), 0).best
            row = {"reward": method, "seed": 0, "seconds": time.monotonic() - begin, "steps": len(best.trace)}
            made.append((row, best.state.graph))
        for reward in Reward:
            for seed in range(arguments.seeds):
                latency = PairedLatency(imported, source, feeds, seconds=0.5)
                row, graph = taught(
                    agent, replace(_problem(start), latency=latency), start, reward, seed, arguments
                )
                made.append((row, graph))
                print(row, file=sys.stderr, flush=True)
        control, measured = _measured_in_turns(imported, source, feeds, [graph for _, graph in made])
        common = {"graph": name, "initial": start.found.cost, "control": control}
        rows.add(
            {**common, **row, "cost": start.prices.cost(graph), "speedup": ratio}
            for (row, graph), ratio in zip(made, measured)
        )
        print(rewards_table([r for r in rows.rows if r["graph"] == name]), file=sys.stderr, flush=True)
    return rewards_table(rows.rows)


def taught(
    agent: Agent, problem: Problem, start: Start, reward: Reward, seed: int, arguments: argparse.Namespace
) -> tuple[Row, Graph]:
    """Train for `seconds` by one reward. Returns the results, and the best graph where an episode began or ended."""
    torch.manual_seed(seed)
    policy = copy.deepcopy(agent).train()
    # By modelled cost, or by latency as a part of the start's.
    modelled = reward is Reward.MODELLED
    ends: dict[float, Any] = {problem.cost if modelled else 1.0: ()}

    def note(episode: Episode[Any]) -> None:
        value = episode.info["cost" if modelled else "latency"]
        ends.setdefault(value, episode.info["trace"])

    env = RewriteEnv([problem], Featuriser(policy.vocabulary, start.prices), EnvConfig(reward, horizon=30))
    row = learn(policy, [env], 64, seed, arguments.seconds, note)
    graph = [start.found.state, *replay(start.found.state, ends[min(ends)])][-1].graph
    return {"reward": reward.value, "seed": seed, **row}, graph


# Median, and the ends of the 95% interval.
Interval = tuple[float, float, float]


def _measured_in_turns(
    imported: ImportedModel, source: str | bytes, feeds: Mapping[str, Any], graphs: Sequence[Graph]
) -> tuple[Interval, list[Interval]]:
    """The original's latency divided by each graph's (and by its own). Equal graphs are measured once."""
    different = {g.fingerprint: g for g in graphs}
    files = [to_proto(imported, g).SerializeToString() for g in different.values()]
    measured = measure([source, *files], feeds, time_limit=8.0 * (1 + len(files)))
    assert measured.control is not None
    control, *others = [(s.median, s.low, s.high) for s in (measured.control, *measured.speedups)]
    found = dict(zip(different, others))
    return control, [found[g.fingerprint] for g in graphs]


def rewards_table(rows: Sequence[Row]) -> str:
    def line(graph: str, reward: str) -> list[str]:
        mine = [r for r in rows if r["graph"] == graph and r["reward"] == reward]
        return [
            graph, reward, spread([r["seconds"] for r in mine], "{:.0f}"),
            spread([r["steps"] / r["seconds"] for r in mine], "{:.1f}") if "last" in mine[0] else "",
            spread([r["cost"] / r["initial"] for r in mine], "{:.4f}"),
            "{:.3f} [{:.3f}, {:.3f}]".format(*mine[0]["control"]),
            ", ".join("{:.3f} [{:.3f}, {:.3f}]".format(*r["speedup"]) for r in mine),
        ]  # fmt: skip

    header = [
        "network",
        "search or reward",
        "seconds",
        "steps per second",
        "modelled cost",
        "A/A",
        "measured speed-up",
    ]
    return markdown(
        header,
        [
            line(g, m)
            for g in ordered(rows, "graph")
            for m in ordered(rows, "reward")
            if any(r["graph"] == g and r["reward"] == m for r in rows)
        ],
    )


def measurable(name: str) -> tuple[ImportedModel, str | bytes, Mapping[str, Any]]:
    """A network as the runtime takes it, and inputs."""
    if name in models.ZOO:
        proto = models.build(name)
        imported = load(proto)
        return imported, proto.SerializeToString(), feeds_for_measurement(imported)
    path = str(wheels.fetch(name))
    return load(path, shapes=wheels.find(name).shapes), path, wheels.inputs(name)


# Training


def make(arguments: argparse.Namespace) -> str:
    """Train on the curriculum. The agent's file has the settings."""
    curriculum = training.curriculum(arguments.problems, seed=arguments.seed)
    vocabulary = Vocabulary.of(curriculum.library())
    config = TrainConfig(iterations=arguments.iterations, workers=arguments.workers, seed=arguments.seed)
    from xrlflow.learn.log import Terminal

    shown = {"evaluation/gain": "gain {:.4f}", "time/steps_per_second": "{:.0f} steps/s"}
    deadline = time.monotonic() + arguments.seconds if arguments.seconds else None
    trained = train(
        curriculum, vocabulary, config, arguments.output, deadline=deadline,
        log=lambda first: Logs(Terminal(config.iterations, shown, done=first)),
        about={"curriculum": {"problems": arguments.problems, "seed": arguments.seed}},
    )  # fmt: skip
    return json.dumps({"gain": trained.score.gain, "iterations": trained.iterations, "steps": trained.steps})


TABLES: Mapping[str, Callable[[argparse.Namespace], str]] = {
    "valleys": valleys,
    "networks": networks,
    "precision": functools.partial(networks, low=True),
    "generalisation": generalisation,
    "decisions": decisions,
    "steps": steps,
    "scratch": scratch,
    "encodings": encodings,
    "rewards": rewards,
    "train": make,
}
# Seconds of a search or a training run.
SECONDS = {
    "valleys": 5.0,
    "generalisation": 30.0,
    "scratch": 600.0,
    "encodings": 120.0,
    "rewards": 120.0,
    "train": 0.0,
}


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("table", choices=TABLES)
    parser.add_argument("names", nargs="*", help="only these networks or families")
    parser.add_argument(
        "--agents", type=Path, nargs="+", metavar="FILE", help="default: the agent that is shipped"
    )
    parser.add_argument("--seeds", type=int, default=5, help="searches with one agent, or training runs")
    parser.add_argument("--seconds", type=float, help=f"of each search or training run; defaults: {SECONDS}")
    parser.add_argument("--json", type=Path, help="rows are kept here, and resumed")
    parser.add_argument("--threads", type=int, default=1, help="of the network")
    parser.add_argument("--workers", type=int, default=2, help="processes that play episodes in training")
    parser.add_argument("--quick", type=int, default=0, metavar="N", help="valleys: every N-th instance only")
    parser.add_argument("--decisions", type=int, default=100, help="decisions: how many are timed")
    parser.add_argument("--iterations", type=int, default=5, help="steps, train: iterations of training")
    parser.add_argument(
        "--own", type=float, default=0.0, help="generalisation: seconds of training on each graph"
    )
    parser.add_argument("--problems", type=int, default=800, help="train: problems of the curriculum")
    parser.add_argument("--seed", type=int, default=0, help="train: of the curriculum and the run")
    parser.add_argument(
        "--output", "-o", type=Path, default=Path("agent.safetensors"), help="train: the agent's file"
    )
    parser.add_argument("--write", action="store_true", help="put the table into docs/benchmarks")
    arguments = parser.parse_args()
    if arguments.write and arguments.names:
        parser.error("--write takes the whole table: leave the names out")
    if arguments.write and f"agents-{arguments.table}" not in pages.tables():
        parser.error(f"--write: no page has a table of {arguments.table}")
    torch.set_num_threads(arguments.threads)
    files = arguments.agents or ([PRETRAINED] if PRETRAINED.exists() else [])
    arguments.agents = [Agent.load(f) for f in files]
    if arguments.seconds is None:
        arguments.seconds = SECONDS.get(arguments.table, 0.0)
    text = TABLES[arguments.table](arguments)
    print(text)
    if arguments.write:
        pages.write(f"agents-{arguments.table}", text)


if __name__ == "__main__":
    main()
