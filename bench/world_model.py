"""The world model against model-free PPO: `python bench/world_model.py TABLE [NAMES] [--json FILE] [--write]`; TABLE is

- efficiency: on each training network, the gain that PPO has after `--steps` real steps, and what an agent that trained
  in the world model has after a fifth of them. Both begin with the same random agent.
- fine-tuning: the same on architectures that no training has seen, beginning with the agents that are shipped.
- errors: of a world model that learned from `--steps` steps of the network, by horizon and by temperature, on episodes
  that it did not see; and what the agent saves in dreams, in the engine, and in the engine when it plans each step in
  latents (`rl/world_model/planning.py`).
- modelled: what `optimize` finds by modelled cost (roofline) in a minute, on the convolutional networks of the zoo at
  full size: greedy search, TASO's search, the agent, tree search, and the agent that trains in the world model.

`pretrain -o FILE` makes the world model that is shipped, of the shipped agent, which stays as it is. It learns from
`--steps` steps of the curriculum that the agent was trained on (`models/training.py`).

A gain is the modelled cost of the original over that of the cheapest graph of an episode with the likeliest actions.
Figures are medians over the seeds, with the least and the greatest. Controls: greedy search, a random agent's likeliest
actions (0 steps), the best graph of episodes that chance plays with a fifth of the steps and with all, and tree search
with the engine, which makes as many states as chance.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import models
import xrlflow
from bench import pages
from models.training import UNSEEN, curriculum
from rewrite_rules import LIBRARY
from xrlflow.cost import Roofline
from xrlflow.onnxio import load
from xrlflow.rewrite import Library
from xrlflow.rl.agent import Agent, InTorch
from xrlflow.rl.env import EnvConfig, Problem, RewriteEnv
from xrlflow.rl.features import Featuriser, Vocabulary
from xrlflow.rl.mcts import TreeConfig, tree_search
from xrlflow.rl.pretrained import DREAMER, PRETRAINED
from xrlflow.rl.train import fine_tune
from xrlflow.rl.workers import Task, play
from xrlflow.rl.world_model.diagnostics import HORIZONS, TEMPERATURES, errors, promised
from xrlflow.rl.world_model.dynamics import World
from xrlflow.rl.world_model.experience import SCALE, explore
from xrlflow.rl.world_model.files import load_world, save_world
from xrlflow.rl.world_model.learning import Learner, LearningConfig, train_world_model
from xrlflow.rl.world_model.planning import Planner
from xrlflow.search import Limits, greedy, simplify

NETWORKS = tuple(name for name in models.ZOO if name not in UNSEEN)
CONVOLUTIONAL = (
    "resnet18", "resnet50", "resnext50", "inceptionv3", "squeezenet", "mobilenetv2", "efficientnet-b0", "nasnet-a",
    "unet", "yolo",
)  # fmt: skip
SEARCHES = ("greedy", "taso", "xrlflow", "mcts", "rlflow")
HORIZON = 30
_PART = 5
METHODS = {
    "nothing": "random agent",
    "chance fifth": "chance, a fifth",
    "chance": "chance, all",
    "tree fifth": "tree search, a fifth",
    "tree": "tree search, all",
    "ppo": "PPO, all",
    "fifth": "world model, a fifth",
}


@dataclass(frozen=True, slots=True)
class Subject:
    """A network to learn on."""

    problem: Problem
    featuriser: Featuriser
    greedy: float


def subject(name: str, vocabulary: Vocabulary, library: Library) -> Subject:
    model = Roofline()
    featuriser = Featuriser(vocabulary, model)
    graph, _ = simplify(load(models.small(name)).graph, library, model.cost)
    problem = Problem.of(name, graph, library, model, featuriser.pricing)
    found = greedy(problem.state, problem.cost, Limits())
    return Subject(problem, featuriser, problem.cost / found.best.cost)


def fresh(vocabulary: Vocabulary, seed: int) -> Agent:
    torch.manual_seed(seed)
    return Agent(vocabulary)


def gain(agent: Agent, on: Subject) -> float:
    return play(agent, [on.problem], on.featuriser, EnvConfig(horizon=HORIZON))[0].gain


def dreamt(agent: Agent, on: Subject, steps: int, seed: int, world: World | None = None) -> float:
    """The gain of the best agent of a training in the world model, as PPO keeps its best agent."""
    best = gain(agent, on)

    def progress(figures: Any, number: int, learner: Any) -> None:
        nonlocal best
        best = max(best, gain(agent, on))

    learner = Learner(agent, LearningConfig(env=EnvConfig(horizon=HORIZON)), seed, world)
    train_world_model(learner, [on.problem], on.featuriser, steps=steps, progress=progress)
    return best


def by_chance(agent: Agent, on: Subject, steps: int, seed: int) -> float:
    """The gain of the cheapest graph of episodes in which chance draws a rule, and a candidate of it."""
    env = EnvConfig(horizon=HORIZON)
    plays = explore(agent, [on.problem], on.featuriser, steps, seed=seed, config=env, curious=1.0)
    saved = max(float(np.cumsum(p.savings).max(initial=0.0)) for p in plays) / SCALE
    return 1 / (1 - saved)


def by_tree(agent: Agent, on: Subject, steps: int) -> float:
    """The gain of tree search with this agent's policy and critic, and as many new states."""
    judge = InTorch(agent)
    limits = Limits(budget=steps)
    config = TreeConfig(patience=None)
    found = tree_search(on.problem.state, on.problem.cost, limits, judge, on.featuriser, config)
    return on.problem.cost / found.best.cost


@dataclass(frozen=True, slots=True)
class Beginner:
    """Where trainings begin: random agents of a seed, or, `shipped`, those of the package."""

    library: Library
    vocabulary: Vocabulary
    shipped: bool

    def agent(self, seed: int) -> Agent:
        return Agent.load(PRETRAINED).extended(self.library) if self.shipped else fresh(self.vocabulary, seed)

    def dreamer(self, seed: int) -> tuple[Agent, World | None]:
        if not self.shipped:
            return self.agent(seed), None
        agent, world = load_world(DREAMER)
        return agent.extended(self.library), world


def efficiency(name: str, steps: int, seeds: Sequence[int], shipped: bool = False) -> dict[str, Any]:
    """Gains of one network by method."""
    library = Library(LIBRARY)
    vocabulary = Agent.load(PRETRAINED).extended(library).vocabulary if shipped else Vocabulary.of(library)
    begins = Beginner(library, vocabulary, shipped)
    on = subject(name, vocabulary, library)
    row: dict[str, Any] = {
        "network": name,
        "greedy": on.greedy,
        **{method: [] for method in METHODS},
    }
    row["seconds"] = {"ppo": [], "fifth": []}
    for seed in seeds:
        row["nothing"].append(gain(begins.agent(seed), on))
        for label, part in (("", 1), (" fifth", _PART)):
            row["chance" + label].append(by_chance(begins.agent(seed), on, steps // part, seed))
            row["tree" + label].append(by_tree(begins.agent(seed), on, steps // part))
        begin = time.monotonic()
        task = Task([on.problem], (), on.featuriser)
        trained = fine_tune(begins.agent(seed), task, steps, seed=seed, horizon=HORIZON)
        row["ppo"].append(gain(trained.agent, on))
        row["seconds"]["ppo"].append(time.monotonic() - begin)
        begin = time.monotonic()
        agent, world = begins.dreamer(seed)
        row["fifth"].append(dreamt(agent, on, steps // _PART, seed, world))
        row["seconds"]["fifth"].append(time.monotonic() - begin)
    return row


def shown(values: Sequence[float]) -> str:
    return f"{np.median(values):.3f} [{min(values):.3f}, {max(values):.3f}]"


def fine_tuning(name: str, steps: int, seeds: Sequence[int]) -> dict[str, Any]:
    """Gains of one network by method, beginning with the agents that are shipped."""
    return efficiency(name, steps, seeds, shipped=True)


def efficiency_table(rows: Sequence[dict[str, Any]], nothing: str = METHODS["nothing"]) -> str:
    titles = METHODS | {"nothing": nothing}
    lines = [
        f"| network | greedy | {' | '.join(titles.values())} | seconds: PPO / world model |",
        "|---" * (len(METHODS) + 3) + "|",
    ]
    for r in rows:
        cells = [f"{r['greedy']:.3f}", *(shown(r[k]) for k in METHODS)]
        seconds = " / ".join(f"{np.median(r['seconds'][k]):.0f}" for k in ("ppo", "fifth"))
        lines.append(f"| {r['network']} | {' | '.join(cells)} | {seconds} |")
    reached = sum(np.median(r["fifth"]) >= np.median(r["ppo"]) * 0.999 for r in rows)
    lines.append(f"\nA fifth of the steps reaches PPO's gain on {reached} of {len(rows)} networks.")
    return "\n".join(lines)


def fine_tuning_table(rows: Sequence[dict[str, Any]]) -> str:
    return efficiency_table(rows, "agent as shipped")


def planned(learner: Learner, on: Subject, seed: int) -> float:
    """The part of the initial cost that an episode saves whose steps are planned in latents."""
    planner = Planner(learner.agent, learner.world, seed=seed)
    env = RewriteEnv([on.problem], on.featuriser, EnvConfig(horizon=HORIZON))
    observation, info = env.reset(seed=seed)
    over = not observation.candidates
    while not over:
        with torch.no_grad():
            seen, _ = learner.embed([observation])
        observation, _, terminated, truncated, info = env.step(planner.plan(seen))
        over = terminated or truncated or not observation.candidates
    return float(1 - info["best"] / info["initial"])


def model_errors(name: str, steps: int, seeds: Sequence[int]) -> dict[str, Any]:
    """Errors of a world model of one network, and what dreams promise."""
    library = Library(LIBRARY)
    vocabulary = Vocabulary.of(library)
    on = subject(name, vocabulary, library)
    env = EnvConfig(horizon=HORIZON)
    row: dict[str, Any] = {"network": name, "errors": [], "promised": [], "given": [], "planned": []}
    for seed in seeds:
        agent = fresh(vocabulary, seed)
        learner = Learner(agent, LearningConfig(env=env), seed)
        train_world_model(learner, [on.problem], on.featuriser, steps=steps)
        unseen = explore(agent, [on.problem], on.featuriser, 10 * HORIZON, seed=seed + 10_000, config=env)
        for temperature in TEMPERATURES:
            for e in errors(learner, unseen, HORIZONS, temperature, seed):
                row["errors"].append([e.horizon, temperature, e.saving, e.masks, e.latent])
        row["promised"].append(promised(learner, unseen[:1], seed))
        outcome = play(agent, [on.problem], on.featuriser, env)[0]
        row["given"].append(1 - outcome.best / outcome.initial)
        row["planned"].append(planned(learner, on, seed))
    return row


def errors_table(rows: Sequence[dict[str, Any]]) -> str:
    lines = [
        "| horizon | temperature | error of the savings | F1 of the masks | distance of latents |",
        "|---|---|---|---|---|",
    ]
    every = np.array([e for r in rows for e in r["errors"]])
    for horizon in HORIZONS:
        for temperature in TEMPERATURES:
            mine = every[(every[:, 0] == horizon) & (every[:, 1] == temperature)]
            if len(mine):
                saving, masks, latent = mine[:, 2:].mean(0)
                lines.append(f"| {horizon} | {temperature:g} | {saving:.4f} | {masks:.3f} | {latent:.3f} |")
    lines += ["", "| network | a dream promises | the engine gives | with plans |", "|---|---|---|---|"]
    lines += [
        f"| {r['network']} | {' | '.join(shown(r[k]) for k in ('promised', 'given', 'planned'))} |"
        for r in rows
    ]
    return "\n".join(lines)


def pretrain(output: Path, steps: int, rounds: int, problems: int, seed: int) -> None:
    """Write the agent, as it is, and its world model, and print how far that is right on graphs that are held out."""
    plan = curriculum(problems, held_out=40, seed=seed)
    agent = Agent.load(PRETRAINED).extended(plan.library())
    task = plan(agent.vocabulary)
    env = EnvConfig(horizon=HORIZON)
    unseen = explore(agent, list(task.held_out), task.observe, 40 * HORIZON, seed=seed + 10_000, config=env)

    def progress(figures: Any, number: int, learner: Learner) -> None:
        shown = {n: round(x, 4) for n, x in figures.items()}
        print(number + 1, shown, flush=True)
        if (number + 1) % 5 == 0 or number + 1 == rounds:
            for e in errors(learner, unseen):
                print(f"  {e.horizon} steps: savings {e.saving:.4f}, masks {e.masks:.3f}", flush=True)
        about = {"steps": steps, "rounds": rounds, "problems": problems, "seed": seed, "round": number + 1}
        save_world(agent, learner.world, output, about)

    config = LearningConfig(updates=200, env=env, learning_rate=2e-3, encoder=False, dreams=0)
    train_world_model(
        Learner(agent, config, seed), list(task.problems), task.observe,
        steps=steps, rounds=rounds, progress=progress,
    )  # fmt: skip


def modelled(name: str, steps: int, seeds: Sequence[int]) -> dict[str, Any]:
    """The modelled cost of one network over that of what each search finds. Only `rlflow` draws anything that matters
    where there is time for all; the others have the first seed alone."""
    row: dict[str, Any] = {"network": name} | {search: [] for search in SEARCHES}
    with tempfile.TemporaryDirectory(prefix="xrlflow-bench-") as folder:
        path = Path(folder) / f"{name}.onnx"
        onnx.save(models.build(name), path)
        for search in SEARCHES:
            for seed in seeds if search == "rlflow" else seeds[:1]:
                report = xrlflow.optimize(
                    path, search=search, cost="roofline", backend="onnxruntime", measure=False, verify=False,
                    threads=2, seed=seed,
                ).report  # fmt: skip
                row[search].append(report.cost_before / report.cost_after)
    return row


def modelled_table(rows: Sequence[dict[str, Any]]) -> str:
    lines = [f"| network | {' | '.join(SEARCHES)} |", "|---" * (len(SEARCHES) + 1) + "|"]
    for r in rows:
        cells = [shown(r[s]) if len(r[s]) > 1 else f"{r[s][0]:.3f}" for s in SEARCHES]
        lines.append(f"| {r['network']} | {' | '.join(cells)} |")
    reached = sum(np.median(r["rlflow"]) >= 0.9995 * r["taso"][0] for r in rows)
    lines.append(f"\nThe agent of the world model is at or above TASO on {reached} of {len(rows)} networks.")
    return "\n".join(lines)


TABLES = {
    "efficiency": (efficiency, efficiency_table),
    "fine-tuning": (fine_tuning, fine_tuning_table),
    "errors": (model_errors, errors_table),
    "modelled": (modelled, modelled_table),
}
DEFAULTS = {"fine-tuning": tuple(sorted(UNSEEN)), "modelled": CONVOLUTIONAL}
"""The networks of a table that are not those on which agents were trained."""


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("table", choices=(*TABLES, "pretrain"))
    parser.add_argument("names", nargs="*", help="networks of the zoo; default: those of the table")
    parser.add_argument("--steps", type=int, default=2000, help="real steps of PPO")
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--rounds", type=int, default=20, help="pretrain: of playing and learning")
    parser.add_argument("--problems", type=int, default=200, help="pretrain: of the curriculum")
    parser.add_argument("-o", "--output", type=Path, help="pretrain: the agent's file")
    parser.add_argument("--json", type=Path, help="rows are kept here, and resumed")
    parser.add_argument("--write", action="store_true", help="put the table into docs/benchmarks")
    options = parser.parse_intermixed_args()
    unknown = set(options.names) - set(models.ZOO)
    if unknown:
        parser.error(f"no such network: {', '.join(sorted(unknown))}")
    if options.table == "pretrain":
        if options.output is None:
            parser.error("pretrain needs -o FILE")
        pretrain(options.output, options.steps, options.rounds, options.problems, 0)
        return
    measure, table = TABLES[options.table]
    kept: dict[str, Any] = (
        json.loads(options.json.read_text()) if options.json and options.json.exists() else {}
    )
    wanted = options.names or DEFAULTS.get(options.table, NETWORKS)
    for name in wanted:
        if name not in kept:
            kept[name] = measure(name, options.steps, range(options.seeds))
            if options.json:
                options.json.write_text(json.dumps(kept, indent=1))
            print(table([kept[name]]), file=sys.stderr, flush=True)
    text = table([kept[name] for name in wanted])
    print(text)
    if options.write:
        pages.write(f"world-model-{options.table}", text)


if __name__ == "__main__":
    torch.set_num_threads(1)
    main()
