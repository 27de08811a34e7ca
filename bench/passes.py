"""Orders of XLA's passes against XLA's own: `python bench/passes.py TABLE [NAMES] [--kept FILE] [--write]`; TABLE is

- searches: what random choice, greedy choice, beam, tree search, evolution, a fixed sequence and an agent bring, at
  equal steps of the compiler, by family of networks; and by module, what the best order is.
- learning: agents trained with the same number of steps: plain PPO, PPO with each enhancement, both networks, DQN.
- agent: train the agent of the package (`--agent FILE` is where it goes).
- time: measured time of the modules after the best orders against the default order, in pairs, with A/A.
- picture: one episode of the agent on a module (docs/pictures/passes.svg).

`--quick --json` runs a small choice of `searches` in at most 20 minutes and prints one JSON object.

A reduction is 1 - operations after an order / operations after XLA's own order of the same passes, repeated to its
fixpoint. A function counts once, however often it is called, as in XLA's own statistics; so an order that does not
inline calls has fewer operations, and computes as many. The column "calls inlined" counts what is computed: the same
result after all calls were inlined. Programs are those of `models/hlo`; the outputs of each result are compared.

`reducing` is XLA's own order without the passes that do not reduce operations on the modules that agents are trained on
(`xrlflow.passes.searches.reducing`): it looks for no order and learns nothing, so it is what others must beat.
"""

from __future__ import annotations

import argparse
import json
import math
import multiprocessing
import multiprocessing.connection
import os
import sys
import threading
import time
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from dataclasses import asdict, dataclass, replace
from hashlib import blake2b
from itertools import product
from pathlib import Path
from statistics import fmean, median
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from bench import pages, pictures
from models import hlo
from xrlflow.learn.log import Logs, Terminal
from xrlflow.passes import Compiler, CompilerError, Metric, Module, run
from xrlflow.passes.agent import Agent, AgentConfig, Network
from xrlflow.passes.dqn import DQNConfig
from xrlflow.passes.dqn import train as train_dqn
from xrlflow.passes.environment import Problem
from xrlflow.passes.lessons import Teaching
from xrlflow.passes.orders import timed, xla
from xrlflow.passes.play import guided, play, refine, sample
from xrlflow.passes.ppo import TrainConfig, train
from xrlflow.passes.pretrained import PRETRAINED, SEQUENCE
from xrlflow.passes.searches import (
    Budget,
    Order,
    beam,
    evolve,
    fixed,
    follow,
    greedy,
    random,
    reducing,
    refined,
    tree,
)

FAMILIES = (hlo.Family.GPT2, hlo.Family.BERT, hlo.Family.RESNET)
GPT2_TRAINING = tuple(
    b.name for b in hlo.BENCHMARKS.values() if b.family is hlo.Family.GPT2 and b.kind is hlo.Kind.TRAINING
)
OVERALL = tuple(b.name for b in hlo.BENCHMARKS.values() if b.family in FAMILIES)
HELD_OUT = tuple(b.name for b in hlo.BENCHMARKS.values() if b.held_out)
GROUPS = {
    "gpt2 training": GPT2_TRAINING,
    "gpt2": tuple(n for n in OVERALL if n.startswith("gpt2")),
    "bert": tuple(n for n in OVERALL if n.startswith("bert")),
    "resnet": tuple(n for n in OVERALL if n.startswith("resnet")),
    "three families": OVERALL,
    "held out": HELD_OUT,
}
# The modules that agents are trained on, and that the fixed sequence and the reducing passes are chosen by.
TAUGHT = (
    "mlp-3-training", "resnet-bottleneck-4-inference", "gpt2-decode-4-inference", "bert-3-inference",
    "resnet-2-training", "gpt2-2-training", "gpt2-dropout-2-training", "bert-2-training",
)  # fmt: skip
# Of families that no agent is trained on; small, so that each agent of the table `learning` can play them.
UNSEEN = ("lstm-4-inference", "unet-5-inference", "vit-6-inference")
QUICK = (*GPT2_TRAINING, "bert-2-training", "bert-3-inference", "resnet-2-training", "resnet-8-inference")
QUICK_STEPS, QUICK_SEEDS = 80, 2
HORIZON = 25
# Steps at which the table of steps looks.
_MARKS = (10, 20, 40, 70)
# How the agent of the package is trained.
SHIPPED = TrainConfig(evaluate_every=5, agent=AgentConfig(horizon=15))
Row = dict[str, Any]


@dataclass(frozen=True, slots=True)
class Tools:
    """What methods need beside a compiler: an agent, if there is one, the fixed sequence and the reducing passes."""

    agent: Agent | None = None
    fixed: tuple[str, ...] = ()
    reducing: tuple[str, ...] = ()

    def of(self, method: str) -> tuple[object, ...]:
        """What a method takes of these, as values that are equal if they are the same."""
        weights = None
        if self.agent is not None and method in WITH_AGENT:
            arrays = (t.numpy().tobytes() for t in self.agent.state_dict().values())
            weights = blake2b(b"".join(arrays)).hexdigest(), self.agent.config
        fixed = self.fixed if method in ("fixed", "fixed+evolution", "refined") else ()
        return weights, fixed, self.reducing if method == "reducing" else ()


Method = Callable[[Compiler, Module, Budget, int, Tools], Order]


def _with(play_on: Callable[..., Order]) -> Method:
    def method(compiler: Compiler, module: Module, budget: Budget, seed: int, tools: Tools) -> Order:
        return play_on(_needed(tools.agent), compiler, module, budget, seed)

    return method


def _needed(agent: Agent | None) -> Agent:
    assert agent is not None
    return agent


def _plain(search: Callable[..., Order]) -> Method:
    return lambda compiler, module, budget, seed, tools: search(compiler, module, budget, seed)


def _reduced(compiler: Compiler, module: Module, budget: Budget, seed: int, tools: Tools) -> Order:
    """XLA's own order of the reducing passes. The passes of the result are no sequence: see `result`."""
    begin = time.monotonic()
    after = compiler.default(module, tools.reducing)
    before, value = (float(m.summary.operations) for m in (module, after))
    return Order(tools.reducing, after, before, value, 0, time.monotonic() - begin, ((0, value),))


METHODS: dict[str, Method] = {
    "reducing": _reduced,
    "random": _plain(random),
    "greedy": _plain(greedy),
    "beam": _plain(beam),
    "mcts": _plain(tree),
    "evolution": _plain(evolve),
    "fixed": lambda compiler, module, budget, seed, tools: follow(compiler, module, tools.fixed, budget),
    "fixed+evolution": lambda compiler, module, budget, seed, tools: refined(
        compiler, module, tools.fixed, budget, seed
    ),
    "zero-shot": _with(lambda agent, compiler, module, budget, seed: play(agent, compiler, module)),
    "agent": _with(sample),
    "guided": _with(guided),
    "agent+evolution": _with(refine),
    "refined": lambda compiler, module, budget, seed, tools: refine(
        _needed(tools.agent), compiler, module, budget, seed, known=[tools.fixed]
    ),
}
WITH_AGENT = ("zero-shot", "agent", "guided", "agent+evolution", "refined")
# Methods that draw nothing need one seed.
_CERTAIN = ("reducing", "greedy", "beam", "fixed", "zero-shot")


@dataclass(frozen=True, slots=True)
class Reference:
    """A module, and operations: before, after XLA's order once and repeated (which takes `seconds`)."""

    module: Module
    before: int
    once: int
    default: int
    seconds: float
    default_equal: bool


def equal(compiler: Compiler, name: str, module: Module, other: Module, seed: int) -> tuple[bool, str | None]:
    """Whether a module computes what a benchmark does, on random inputs and on those of its own; if not, why."""
    try:
        found = compiler.compare(module, other, seed, [hlo.inputs(name, seed)])
    except CompilerError as error:  # nothing was compared, so nothing is known to be equal
        return False, str(error)
    return found.equal, found.difference


def reference(compiler: Compiler, name: str) -> Reference:
    module = compiler.load(hlo.text(name))
    begin = time.perf_counter()
    default = compiler.default(module)
    seconds = time.perf_counter() - begin
    once = compiler.default_once(module) if hasattr(compiler, "default_once") else default
    counted = (m.summary.operations for m in (module, once, default))
    return Reference(module, *counted, seconds, equal(compiler, name, module, default, 0)[0])


def inlined(compiler: Compiler, module: Module) -> int:
    """Operations when each call has a copy of the function."""
    return run(compiler, module, ("flatten-call-graph", "call-inliner")).summary.operations


def result(compiler: Compiler, module: Module, row: Row) -> Module:
    """The module that a row of the table of searches is about."""
    if row["method"] == "reducing":
        return compiler.default(module, row["passes"])
    return run(compiler, module, row["passes"])


def measured(
    compiler: Compiler, name: str, ref: Reference, method: str, seed: int, budget: Budget, tools: Tools
) -> Row:
    """A row of the table of searches."""
    order = METHODS[method](compiler, ref.module, budget, seed, tools)
    same, difference = equal(compiler, name, ref.module, order.module, 0)
    return {
        "module": name, "method": method, "seed": seed, "budget": budget.steps,
        "before": ref.before, "once": ref.once, "default": ref.default, "default_seconds": ref.seconds,
        "operations": order.module.summary.operations,
        "inlined": inlined(compiler, order.module),
        "steps": order.steps, "seconds": order.seconds, "curve": [list(point) for point in order.curve],
        "passes": list(order.passes), "equal": same, "difference": difference,
        "refused": list(order.refused), "default_equal": ref.default_equal,
    }  # fmt: skip


def searches(
    compiler: Compiler,
    names: Iterable[str],
    methods: Sequence[str],
    seeds: int,
    steps: int,
    tools: Tools,
    kept: Kept,
) -> list[Row]:
    """All rows. Those that are kept are not made again."""
    rows: list[Row] = []
    for name in names:
        ref: Reference | None = None
        for method in methods:
            for seed in range(1 if method in _CERTAIN else seeds):
                key = f"{name} {method} {seed} {steps}"
                made_by = compiler.name, HORIZON, tools.of(method)
                if kept.of(key, *made_by) is None:
                    ref = ref or reference(compiler, name)
                    found = measured(compiler, name, ref, method, seed, Budget(steps, HORIZON), tools)
                    kept.put(key, found, *made_by)
                    say(
                        f"{key}: {ref.default} -> {found['operations']} in {found['seconds']:.0f} s"
                        + ("" if found["equal"] else f" DIFFERS: {found['difference']}")
                    )
                rows.append(kept.rows[key])
    return rows


class Kept:
    """Rows by key, each a line of a file, so that a stopped run goes on and several processes share the file. Without
    a file they are in memory. `of` in a row is a digest of what made it: another agent makes another."""

    def __init__(self, path: Path | None = None) -> None:
        self.path = path
        self.rows: dict[str, Row] = {}
        self._said = False
        for line in path.read_text().splitlines() if path is not None and path.exists() else ():
            try:
                key, row = json.loads(line)
            except ValueError:
                say(f"{path}: a line that was cut off is left out")
            else:
                self.rows[key] = row

    def of(self, key: str, *made_by: object) -> Row | None:
        """The row of a key, if it was made by these; None if it is to be made. One that does not say what made it is
        taken, and that is said."""
        row = self.rows.get(key)
        if row is None or row.get("of") == digest(made_by):
            return row
        if "of" in row:
            say(f"{key}: the row that is kept was made by something else, so it is made again")
            return None
        if not self._said:
            say(
                f"{self.path}: rows of an earlier version do not say what made them, as {key}: they are taken"
            )
            self._said = True
        return row

    def put(self, key: str, row: Row, *made_by: object) -> None:
        if made_by:
            row = {**row, "of": digest(made_by)}
        self.rows[key] = row
        if self.path is not None:
            with self.path.open("ab+") as file:
                file.seek(0, os.SEEK_END)
                cut = file.tell() > 0 and (file.seek(-1, os.SEEK_END), file.read())[1] != b"\n"
                file.write(b"\n" * cut + json.dumps([key, row]).encode() + b"\n")


def digest(of: object) -> str:
    return blake2b(repr(of).encode(), digest_size=8).hexdigest()


def say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


def less(row: Row, column: str = "operations") -> float:
    """The relative reduction against the default order; 0 for a result that computes something else."""
    if not row["equal"]:
        return 0.0
    return 1.0 - float(row[column]) / float(row["default"])


def mean_less(
    rows: Sequence[Row], method: str, names: Sequence[str], column: str = "operations"
) -> float | None:
    """The mean over modules of the mean over seeds; None if there is no row."""
    by_module = [
        fmean(less(r, column) for r in mine)
        for name in names
        if (mine := [r for r in rows if r["module"] == name and r["method"] == method])
    ]
    return fmean(by_module) if by_module else None


def spread(rows: Sequence[Row], method: str, names: Sequence[str]) -> str:
    """The mean reduction of a group, and the least and greatest mean of a seed."""
    mine = [r for r in rows if r["method"] == method and r["module"] in names]
    middle = mean_less(mine, method, names)
    if middle is None:
        return ""
    seeds = sorted({r["seed"] for r in mine})
    each = [fmean(less(r) for r in mine if r["seed"] == seed) for seed in seeds]
    return f"{100 * middle:.1f}%" + (
        f" [{100 * min(each):.1f}, {100 * max(each):.1f}]" if len(seeds) > 1 else ""
    )


def over_reducing(rows: Sequence[Row], method: str, names: Sequence[str]) -> float | None:
    """The mean reduction against the reducing passes in XLA's own order; None if there are no rows of it. What computes
    something else counts as XLA's own order."""

    def left(row: Row) -> float:
        return float(row["operations"] if row["equal"] else row["default"])

    control = {r["module"]: left(r) for r in rows if r["method"] == "reducing"}
    by_module = [
        fmean(1.0 - left(r) / control[name] for r in mine)
        for name in names
        if name in control and (mine := [r for r in rows if r["module"] == name and r["method"] == method])
    ]
    return fmean(by_module) if by_module else None


def percent(value: float | None) -> str:
    return "" if value is None else f"{100 * value:.1f}%"


def searches_table(rows: Sequence[Row]) -> str:
    """By family and method."""
    methods = [m for m in METHODS if any(r["method"] == m for r in rows)]
    there = {r["module"] for r in rows}
    groups = {g: names for g, names in GROUPS.items() if there.intersection(names)}

    def head(group: str, names: Collection[str]) -> str:
        count = len(there.intersection(names))
        return group if count == len(names) else f"{group} ({count} of {len(names)})"

    everywhere = head("all", hlo.BENCHMARKS)
    heads = [
        "method", *(head(g, names) for g, names in groups.items()),
        f"{everywhere}, over `reducing`", f"{everywhere}, calls inlined", "steps", "seconds", "equal",
    ]  # fmt: skip
    lines = [f"| {' | '.join(heads)} |", "|---" * len(heads) + "|"]
    everything = tuple(dict.fromkeys(r["module"] for r in rows))
    for method in methods:
        mine = [r for r in rows if r["method"] == method]
        cells = [
            *(spread(rows, method, names) for names in groups.values()),
            percent(over_reducing(rows, method, everything)),
            percent(mean_less(mine, method, everything, "inlined")),
            f"{median(r['steps'] for r in mine):.0f}",
            f"{median(r['seconds'] for r in mine):.1f}",
            f"{sum(r['equal'] for r in mine)} of {len(mine)}",
        ]
        lines.append(f"| {method} | {' | '.join(cells)} |")
    return "\n".join(lines)


def at(row: Row, steps: int) -> float:
    """The relative reduction against the default order after some of the steps; 0 for a result that computes something
    else."""
    if not row["equal"]:
        return 0.0
    values = [value for step, value in row["curve"] if step <= steps]
    return 1.0 - min(values, default=row["before"]) / row["default"]


def steps_table(rows: Sequence[Row]) -> str:
    """What each method has found after a part of its steps, over all modules."""
    marks = sorted({*_MARKS, max((r["budget"] for r in rows), default=0)})
    lines = [f"| method | {' | '.join(f'{m} steps' for m in marks)} |", "|---" * (len(marks) + 1) + "|"]
    for method in (m for m in METHODS if any(r["method"] == m for r in rows)):
        mine = [r for r in rows if r["method"] == method]
        names = dict.fromkeys(r["module"] for r in mine)
        means = [
            fmean(fmean(at(r, mark) for r in mine if r["module"] == name) for name in names) for mark in marks
        ]
        lines.append(f"| {method} | {' | '.join(percent(m) for m in means)} |")
    return "\n".join(lines)


def modules_table(rows: Sequence[Row]) -> str:
    """By module: operations before, after XLA's order once and repeated, and the best that any method found."""
    lines = [
        "| module | before | XLA's order once | repeated | best | less | calls inlined | by | passes |",
        "|---|---|---|---|---|---|---|---|---|",
    ]
    for name in dict.fromkeys(r["module"] for r in rows):
        mine = [r for r in rows if r["module"] == name and r["equal"]]
        if not mine:
            continue
        best = min(mine, key=lambda r: (r["operations"], r["steps"]))
        wrong = "" if best["default_equal"] else " (computes something else)"
        lines.append(
            f"| {name} | {best['before']} | {best['once']} | {best['default']}{wrong} | {best['operations']} "
            f"| {100 * less(best):.1f}% | {100 * less(best, 'inlined'):.1f}% | {best['method']} "
            f"| {', '.join(best['passes'])} |"
        )
    return "\n".join(lines)


def times(compiler: Compiler, rows: Sequence[Row], pairs: int) -> list[Row]:
    """Measured time of the best result of each module."""
    found = []
    for name in dict.fromkeys(r["module"] for r in rows):
        mine = [r for r in rows if r["module"] == name and r["equal"]]
        if not mine:
            continue
        best = min(mine, key=lambda r: (r["operations"], r["steps"]))
        module = compiler.load(hlo.text(name))
        ratio, control = timed(compiler, compiler.default(module), result(compiler, module, best), pairs)
        found.append({"module": name, "less": less(best), "ratio": ratio, "control": control})
        say(f"{name}: {ratio}, A/A {control}")
    return found


def times_table(rows: Sequence[Row]) -> str:
    def cell(interval: Sequence[float]) -> str:
        return "{:.3f} [{:.3f}, {:.3f}]".format(*interval)

    lines = ["| module | operations | time, XLA's order / best order | A/A |", "|---|---|---|---|"]
    lines += [
        f"| {r['module']} | {-100 * r['less']:+.1f}% | {cell(r['ratio'])} | {cell(r['control'])} |"
        for r in rows
    ]
    ratios = [math.log(r["ratio"][0]) for r in rows]
    controls = [math.log(r["control"][0]) for r in rows]
    lines.append(f"| geometric mean | | {math.exp(fmean(ratios)):.3f} | {math.exp(fmean(controls)):.3f} |")
    return "\n".join(lines)


def variants(iterations: int, steps: int) -> dict[str, TrainConfig | DQNConfig]:
    """Training runs to compare: nothing added to PPO, all enhancements, the other network, deep Q-learning, and
    each enhancement alone."""
    full = TrainConfig(
        iterations, steps, evaluate_every=max(1, iterations // 10), agent=AgentConfig(horizon=15)
    )
    plain = full.plain()
    # PPO plays the episodes of an iteration to their end, three quarters of which are still to come on the average.
    total = iterations * (steps + full.environments * full.agent.horizon * 3 // 4)
    return {
        "PPO": plain,
        "PPO, all": full,
        "PPO, all, graph": replace(full, agent=replace(full.agent, network=Network.GRAPH)),
        "DQN, all": DQNConfig(total, evaluate_every=max(1, total // 10), agent=full.agent),
        "PPO, masking": replace(plain, agent=full.agent),
        "PPO, shaping": replace(plain, teaching=Teaching(curriculum=False)),
        "PPO, curriculum": replace(plain, teaching=Teaching(shaping=False)),
    }


def learned(
    compiler: Compiler,
    variant: str,
    seed: int,
    names: Sequence[str],
    unseen: Sequence[str],
    iterations: int,
    steps: int,
) -> Row:
    """A row of the table of learning: what an agent leaves zero-shot of modules of training and of others."""
    modules = {name: compiler.load(hlo.text(name)) for name in (*names, *unseen)}
    problems = [Problem(name, modules[name]) for name in names]
    config = replace(variants(iterations, steps)[variant], seed=seed)
    trained = (
        train_dqn(compiler, problems, config)
        if isinstance(config, DQNConfig)
        else train(compiler, problems, config)
    )
    orders = {n: play(trained.agent, compiler, m) for n, m in modules.items()}
    return {
        "variant": variant,
        "seed": seed,
        **leaves(compiler, modules, orders),
        "steps": trained.steps,
        "seconds": trained.seconds,
    }


def leaves(compiler: Compiler, modules: Mapping[str, Module], orders: Mapping[str, Order]) -> Row:
    """Operations that orders leave, all of them if the result computes something else; which are `equal`."""
    same = {n: equal(compiler, n, modules[n], order.module, 0)[0] for n, order in orders.items()}
    return {
        "left": {n: order.value if same[n] else order.initial for n, order in orders.items()},
        "equal": same,
    }


def learning(
    compiler: Compiler,
    chosen: Iterable[tuple[str, int]],
    names: Sequence[str],
    unseen: Sequence[str],
    iterations: int,
    steps: int,
    kept: Kept,
) -> list[Row]:
    """The rows of some variants and seeds. Those that are kept are not made again."""
    rows = []
    for variant, seed in chosen:
        key = f"{variant} {seed} {iterations * steps} {' '.join(names)}"
        made_by = compiler.name, iterations, steps, tuple(unseen), variants(iterations, steps)[variant]
        if kept.of(key, *made_by) is None:
            kept.put(key, learned(compiler, variant, seed, names, unseen, iterations, steps), *made_by)
            say(f"{key}: {kept.rows[key]}")
        rows.append(kept.rows[key])
    return rows


def controls(compiler: Compiler, names: Sequence[str], tools: Tools, kept: Kept) -> list[Row]:
    """What two controls leave of the same modules: they are chosen by those of training, and learn nothing."""
    rows = []
    for method in ("reducing", "fixed"):
        key = f"{method} {' '.join(getattr(tools, method))} on {' '.join(names)}"
        if kept.of(key, compiler.name) is None:
            begin = time.monotonic()
            modules = {name: compiler.load(hlo.text(name)) for name in names}
            orders = {
                name: METHODS[method](compiler, module, Budget(HORIZON, HORIZON), 0, tools)
                for name, module in modules.items()
            }
            row = {"variant": f"{method} (control)", "seed": 0, "steps": 0}
            row |= leaves(compiler, modules, orders)
            kept.put(key, row | {"seconds": time.monotonic() - begin}, compiler.name)
        rows.append(kept.rows[key])
    return rows


def defaults(compiler: Compiler, names: Iterable[str], kept: Kept) -> dict[str, int]:
    """Operations after XLA's own order."""
    for name in names:
        if kept.of(key := f"default {name}", compiler.name) is None:
            module = compiler.default(compiler.load(hlo.text(name)))
            kept.put(key, {"operations": module.summary.operations}, compiler.name)
    return {name: kept.rows[f"default {name}"]["operations"] for name in names}


def learning_table(
    rows: Sequence[Row], default: dict[str, int], names: Sequence[str], unseen: Sequence[str]
) -> str:
    lines = [
        "| agent | seeds | modules of training: mean [least, greatest of the seeds] | other architectures | steps "
        "| seconds | equal |",
        "|---|---|---|---|---|---|---|",
    ]

    def cell(of: Sequence[str], mine: Sequence[Row]) -> str:
        each = [fmean(1.0 - r["left"][name] / default[name] for name in of) for r in mine]
        return percent(fmean(each)) + (
            f" [{100 * min(each):.1f}, {100 * max(each):.1f}]" if len(each) > 1 else ""
        )

    for variant in dict.fromkeys(r["variant"] for r in rows):
        mine = [r for r in rows if r["variant"] == variant]
        same = [r["equal"][name] for r in mine for name in (*names, *unseen) if "equal" in r]
        total = len(mine) * len((*names, *unseen))
        equals = f"{sum(same)} of {total}" if len(same) == total else "not compared"
        lines.append(
            f"| {variant} | {len(mine)} | {cell(names, mine)} | {cell(unseen, mine)} "
            f"| {median(r['steps'] for r in mine):.0f} | {median(r['seconds'] for r in mine):.0f} | {equals} |"
        )
    return "\n".join(lines)


def quick(
    compiler: Compiler,
    agent: Agent | None,
    names: Sequence[str] = QUICK,
    steps: int = QUICK_STEPS,
    seeds: int = QUICK_SEEDS,
) -> Row:
    """The figures of `--quick --json`: our default search against chance at equal steps."""
    begin = time.monotonic()
    ours = "refined" if agent is not None else "evolution"
    rows = searches(compiler, names, (ours, "random"), seeds, steps, Tools(agent, SEQUENCE), Kept())
    gpt2 = [n for n in names if n in GPT2_TRAINING]
    three = [n for n in names if n in OVERALL]
    return {
        "gpt2_training": mean_less(rows, ours, gpt2),
        "overall": mean_less(rows, ours, three),
        "random_gpt2_training": mean_less(rows, "random", gpt2),
        "random_overall": mean_less(rows, "random", three),
        "gpt2_training_calls_inlined": mean_less(rows, ours, gpt2, "inlined"),
        "all_equal": all(r["equal"] for r in rows),
        "default_equal": all(r["default_equal"] for r in rows),
        "refused": sum(len(r["refused"]) for r in rows),
        "method": ours,
        "steps": steps,
        "seeds": seeds,
        "modules": {name: mean_less(rows, ours, [name]) for name in names},
        "seconds": round(time.monotonic() - begin, 1),
    }


def picture(title: str, counts: Sequence[int], passes: Sequence[str], default: int) -> str:
    """The operations after each pass of an episode, and those after the default order."""
    left, top, step, height = 70, 50, 46, 220
    low = min(*counts, default)
    high = max(*counts, default)
    low, high = low - (high - low) // 8 - 1, high + 1

    def x(position: int) -> float:
        return left + step * position

    def y(value: float) -> float:
        return top + height * (high - value) / (high - low)

    width, bottom = int(x(len(counts) - 1)) + 150, top + height
    parts = [pictures.words(20, 26, title, size=15)]
    parts.append(
        f'<line x1="{left}" y1="{bottom}" x2="{x(len(counts) - 1):g}" y2="{bottom}" stroke="{pictures.INK}"/>'
    )
    parts.append(
        f'<line x1="{left}" y1="{y(default):.1f}" x2="{x(len(counts) - 1):g}" y2="{y(default):.1f}" '
        f'stroke="{pictures.GREY}" stroke-dasharray="5 4"/>'
    )
    parts.append(pictures.words(x(len(counts) - 1) + 8, y(default) + 4, f"XLA's order: {default}", size=12))
    points = " ".join(f"{x(i):g},{y(c):.1f}" for i, c in enumerate(counts))
    parts.append(f'<polyline points="{points}" fill="none" stroke="{pictures.BLUE}" stroke-width="2"/>')
    for i, count in enumerate(counts):
        parts.append(f'<circle cx="{x(i):g}" cy="{y(count):.1f}" r="3.5" fill="{pictures.BLUE}"/>')
        parts.append(pictures.words(x(i), y(count) - 9, str(count), anchor="middle", size=11))
        name = "start" if i == 0 else passes[i - 1]
        label = pictures.words(0, 0, name, anchor="end", size=12)
        parts.append(f'<g transform="translate({x(i) + 4:g} {bottom + 14}) rotate(-40)">{label}</g>')
    return pictures.svg(width, bottom + 130, parts, title)


def draw(compiler: Compiler, name: str, tools: Tools) -> Path:
    """Draw an episode of the agent, or without an agent the greedy order. Returns the picture's file."""
    ref = reference(compiler, name)
    order = (
        play(tools.agent, compiler, ref.module)
        if tools.agent is not None
        else greedy(compiler, ref.module, Budget(1000, HORIZON))
    )
    counts, module = [ref.before], ref.module
    for each in order.passes:
        module = compiler.apply(module, each).module
        counts.append(module.summary.operations)
    by = "the agent" if tools.agent is not None else "greedy choice"
    path = pictures.FOLDER / "passes.svg"
    path.write_text(picture(f"Operations of {name}: an episode of {by}", counts, order.passes, ref.default))
    return path


def fixed_sequence(
    compiler: Compiler, names: Sequence[str], steps: int, seed: int, kept: Kept
) -> tuple[str, ...]:
    """The fixed best sequence over training modules, which is made once."""
    key = f"fixed sequence {steps} {seed} {' '.join(names)}"
    if kept.of(key, compiler.name, HORIZON) is None:
        modules = [compiler.load(hlo.text(name)) for name in names]
        found = fixed(compiler, modules, Budget(steps, HORIZON), seed, Metric.OPERATIONS)
        kept.put(key, asdict(found), compiler.name, HORIZON)
        say(f"{key}: {kept.rows[key]}")
    return tuple(kept.rows[key]["passes"])


def reducing_passes(compiler: Compiler, names: Sequence[str], kept: Kept) -> tuple[str, ...]:
    """The passes that reduce operations on training modules in XLA's own order, which are found once."""
    key = f"reducing passes {' '.join(names)}"
    if kept.of(key, compiler.name) is None:
        begin = time.monotonic()
        modules = [compiler.load(hlo.text(name)) for name in names]
        passes = reducing(compiler, modules, Metric.OPERATIONS, say)
        kept.put(key, {"passes": passes, "seconds": time.monotonic() - begin}, compiler.name)
        say(f"{key}: {kept.rows[key]}")
    return tuple(kept.rows[key]["passes"])


def tools_of(compiler: Compiler, options: argparse.Namespace, kept: Kept) -> Tools:
    """What the methods that are asked for need."""
    return Tools(
        Agent.load(options.agent) if set(options.methods) & set(WITH_AGENT) else None,
        fixed_sequence(compiler, TAUGHT, options.fixed_steps, 0, kept)
        if {"fixed", "fixed+evolution", "refined"} & set(options.methods) or options.table == "learning"
        else (),
        reducing_passes(compiler, TAUGHT, kept)
        if "reducing" in options.methods or options.table == "learning"
        else (),
    )


# A part of a table: a module, or a variant and a seed.
Part = str | tuple[str, int]


def parts(options: argparse.Namespace) -> list[Part]:
    """The parts of the table that is asked for."""
    if options.table == "learning":
        return list(product(variants(options.iterations, options.steps), range(options.seeds)))
    return list(options.names or (*OVERALL, *HELD_OUT))


def _dear(part: Part) -> tuple[int, int]:
    """Greater for parts that take longer."""
    if isinstance(part, str):
        return int(hlo.BENCHMARKS[part].kind is hlo.Kind.TRAINING), hlo.BENCHMARKS[part].layers
    return int("graph" in part[0]), 0


def make(compiler: Compiler, options: argparse.Namespace, part: Part, tools: Tools, kept: Kept) -> list[Row]:
    """The rows of a part of a table."""
    if isinstance(part, str):
        return searches(compiler, [part], options.methods, options.seeds, options.steps, tools, kept)
    names, unseen = (options.names or TAUGHT), UNSEEN
    return learning(compiler, [part], names, unseen, options.iterations, options.steps, kept)


def _ends_with_its_parent() -> None:
    """This process ends when its parent does, which may be killed. Its queue would not close: it holds both ends."""
    parent = multiprocessing.parent_process()
    assert parent is not None

    def wait() -> None:
        multiprocessing.connection.wait([parent.sentinel])
        os._exit(1)

    threading.Thread(target=wait, daemon=True).start()


def _made(options: argparse.Namespace, part: Part) -> None:
    """`make` in a process of its own. The rows go to the file."""
    kept = Kept(options.kept)
    with xla(workers=1) as compiler:
        make(compiler, options, part, tools_of(compiler, options, kept), kept)


def made(compiler: Compiler, options: argparse.Namespace, kept: Kept) -> list[Row]:
    """All rows of a table, by several processes if that is asked for."""
    tools = tools_of(compiler, options, kept)
    if options.jobs > 1:
        context = multiprocessing.get_context("spawn")
        with ProcessPoolExecutor(options.jobs, context, initializer=_ends_with_its_parent) as pool:
            dear_first = sorted(parts(options), key=_dear, reverse=True)
            for done in as_completed([pool.submit(_made, options, part) for part in dear_first]):
                done.result()
        kept = Kept(options.kept)
    rows = [row for part in parts(options) for row in make(compiler, options, part, tools, kept)]
    if options.table == "learning":
        return controls(compiler, (*(options.names or TAUGHT), *UNSEEN), tools, kept) + rows
    return rows


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument(
        "table",
        nargs="?",
        choices=("searches", "learning", "agent", "time", "picture"),
        default="searches",
    )
    parser.add_argument("names", nargs="*", help="modules; default: all of the table")
    parser.add_argument("--quick", action="store_true", help="few modules and steps")
    parser.add_argument("--json", action="store_true", help="with --quick: print one JSON object")
    parser.add_argument("--methods", default=",".join(METHODS), help="searches: which, by commas")
    parser.add_argument(
        "--steps", type=int, help="of the compiler (100); learning, agent: of an iteration (128)"
    )
    parser.add_argument("--iterations", type=int, default=25, help="learning, agent")
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--seed", type=int, default=0, help="agent: the seed of its training")
    parser.add_argument("--pairs", type=int, default=100, help="time: pairs of runs")
    parser.add_argument("--fixed-steps", type=int, default=1500, help="steps to make the fixed sequence")
    parser.add_argument("--agent", type=Path, help="the file of an agent (that of the package)")
    parser.add_argument("--kept", type=Path, help="rows are kept in this file, and resumed")
    parser.add_argument("--jobs", type=int, default=1, help="processes, which need --kept")
    parser.add_argument("--write", action="store_true", help="put the tables into docs/benchmarks")
    options = parser.parse_intermixed_args()
    unknown = set(options.names) - set(hlo.BENCHMARKS)
    if unknown:
        parser.error(f"no such module: {', '.join(sorted(unknown))}")
    # Once each, so that no row counts twice.
    options.names = tuple(dict.fromkeys(options.names))
    options.methods = list(dict.fromkeys(m.strip() for m in options.methods.split(",")))
    for name, value in (
        ("seeds", options.seeds),
        ("iterations", options.iterations),
        ("pairs", options.pairs),
    ):
        if value < 1:
            parser.error(f"--{name} must be at least 1")
    for method in options.methods:
        if method not in METHODS:
            parser.error(f"no such method: {method}")
    if options.jobs > 1 and options.kept is None:
        parser.error("--jobs needs --kept: processes share their rows in this file")
    if options.agent is None:
        if options.table == "agent":
            parser.error("name the file of the agent by --agent")
        options.agent = PRETRAINED
    if options.steps is None:
        options.steps = 128 if options.table in ("learning", "agent") else 100
    return options


def main() -> None:
    options = arguments()
    kept = Kept(options.kept)
    with xla() as compiler:
        if options.quick:
            names = options.names or QUICK
            steps, seeds = min(options.steps, QUICK_STEPS), min(options.seeds, QUICK_SEEDS)
            found = quick(compiler, Agent.load(options.agent), names, steps, seeds)
            print(json.dumps(found, indent=1) if options.json else found)
            return
        if options.table == "agent":
            print(taught(compiler, options))
            return
        for name, text in tables(compiler, options, kept).items():
            print(text)
            if options.write:
                pages.write(name, text)


def taught(compiler: Compiler, options: argparse.Namespace) -> str:
    """Train the agent of the package. A run that was stopped goes on."""
    names = options.names or TAUGHT
    problems = [Problem(name, compiler.load(hlo.text(name))) for name in names]
    config = replace(SHIPPED, iterations=options.iterations, steps=options.steps, seed=options.seed)
    trained = train(
        compiler,
        problems,
        config,
        options.agent,
        log=lambda done: Logs(Terminal(config.iterations, {}, done)),
    )
    return f"{options.agent}: {trained.reduction:.4f} after {trained.steps} steps, {trained.seconds:.0f} s"


def tables(compiler: Compiler, options: argparse.Namespace, kept: Kept) -> dict[str, str]:
    """The tables that are asked for, by their names on the page."""
    if options.table == "picture":
        name = options.names[0] if options.names else "gpt2-2-training"
        return {"": str(draw(compiler, name, Tools(Agent.load(options.agent))))}
    rows = made(compiler, options, kept)
    if options.table == "learning":
        names = options.names or TAUGHT
        default = defaults(compiler, (*names, *UNSEEN), kept)
        return {"passes-learning": learning_table(rows, default, names, UNSEEN)}
    if options.table == "time":
        return {"passes-time": times_table(times(compiler, rows, options.pairs))}
    return {
        "passes-searches": searches_table(rows),
        "passes-steps": steps_table(rows),
        "passes-modules": modules_table(rows),
    }


if __name__ == "__main__":
    main()
