"""How much there is to find: `python bench/bound.py [NAMES] [--seconds 3600] [--json FILE] [--write]`.

Tree search with the engine, which is given an hour and no patience, against what greedy search, TASO's search and the
agent find in a minute; the agent has its patience, as in `optimize`. All go by learned costs of the network as it is
shipped, and share the prices of operators, which are measured with one thread when a search first meets them, in that
order. The gain is the modelled cost of the original, after the rules that need no price, over that of the cheapest
graph; what tree search had after one, ten and sixty minutes comes with the number of states. Where the last two are
equal, the rules give no more by these costs, as far as tree search sees; it is no proof. Networks may be searched side
by side, each with a `--json` file of its own.

Nothing here is a measurement of a whole model.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from bench import pages
from bench.latency import names, source
from rewrite_rules import LIBRARY
from xrlflow.cost import Learned, Profiled, calibrated, load_network
from xrlflow.cost.pretrained import PRETRAINED as LATENCIES
from xrlflow.onnxio import load
from xrlflow.rewrite import Library
from xrlflow.rl.env import Problem
from xrlflow.rl.features import Featuriser
from xrlflow.rl.mcts import TreeConfig, tree_search
from xrlflow.rl.network import Network
from xrlflow.rl.parameters import Parameters
from xrlflow.rl.pretrained import PRETRAINED
from xrlflow.rl.strategy import agent_search
from xrlflow.search import Limits, SearchResult, greedy, simplify, taso

NETWORKS = ("vit-classifier", "bert")
MINUTE = 60.0
_MANY = 10_000_000


@dataclass(slots=True)
class Watched:
    """The cost of the best graph whenever it changed: (seconds since the beginning, states, modelled seconds)."""

    begin: float = field(default_factory=time.monotonic)
    history: list[tuple[float, int, float]] = field(default_factory=list)

    def __call__(self, states: int, best: float) -> None:
        if not self.history or self.history[-1][2] != best:
            self.history.append((time.monotonic() - self.begin, states, best))

    def at(self, seconds: float, otherwise: float) -> float:
        """The cost of the best graph after so many seconds."""
        return min((best for moment, _, best in self.history if moment <= seconds), default=otherwise)


def row(name: str, seconds: float) -> dict[str, Any]:
    """The gains of one network by what was found."""
    library = Library(LIBRARY)
    with tempfile.TemporaryDirectory(prefix="xrlflow-bench-") as folder:
        path, shapes, _ = source(name, Path(folder))
        imported = load(path, shapes=shapes)
    prices = Profiled(calibrated(1), bindings=imported.bindings)
    model = Learned(prices, load_network(LATENCIES))
    parameters = Parameters.load(PRETRAINED).extended(library)
    featuriser = Featuriser(parameters.vocabulary, model)
    graph, _ = simplify(imported.graph, library, model.cost)
    problem = Problem.of(name, graph, library, model)
    network = Network(parameters)

    def within(limit: float, search: Callable[[Limits], SearchResult]) -> tuple[SearchResult, Watched]:
        watched = Watched()
        found = search(Limits(_MANY, watched.begin + limit, watched))
        return found, watched

    def gain(cost: float) -> float:
        return problem.cost / cost

    minute = {
        "greedy": lambda limits: greedy(problem.state, problem.cost, limits),
        "taso": lambda limits: taso(problem.state, problem.cost, limits),
        "agent": lambda limits: agent_search(problem.state, problem.cost, limits, network, featuriser),
    }
    gains = {method: gain(within(MINUTE, search)[0].best.cost) for method, search in minute.items()}
    config = TreeConfig(patience=None)
    found, watched = within(
        seconds, lambda limits: tree_search(problem.state, problem.cost, limits, network, featuriser, config)
    )
    return {
        "network": name,
        **gains,
        "tree": [gain(watched.at(moment, problem.cost)) for moment in (MINUTE, 10 * MINUTE)],
        "hour": gain(found.best.cost),
        "states": found.expanded,
        "seconds": found.seconds,
        "limit": seconds,
        "last gain": watched.history[-1][0],
    }


def table(rows: Sequence[dict[str, Any]]) -> str:
    lines = [
        "| network | greedy | TASO, a minute | agent, a minute | tree search: a minute | ten | all its time | minutes "
        "| states | minutes to its last gain |",
        "|---" * 10 + "|",
    ]
    for r in rows:
        minute, ten = r["tree"]
        lines.append(
            f"| {r['network']} | {r['greedy']:.3f} | {r['taso']:.3f} | {r['agent']:.3f} | {minute:.3f} | {ten:.3f} "
            f"| {r['hour']:.3f} | {r['seconds'] / 60:.0f} | {r['states']:,} | {r['last gain'] / 60:.1f} |"
        )
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("names", nargs="*", help=f"models of bench/latency.py; default: {' '.join(NETWORKS)}")
    parser.add_argument("--seconds", type=float, default=3600.0, help="of tree search")
    parser.add_argument("--json", type=Path, help="rows are kept here, and resumed")
    parser.add_argument("--write", action="store_true", help="put the table into docs/benchmarks")
    options = parser.parse_args()
    unknown = set(options.names) - set(names())
    if unknown:
        parser.error(f"no such model: {', '.join(sorted(unknown))}")
    kept: dict[str, Any] = (
        json.loads(options.json.read_text()) if options.json and options.json.exists() else {}
    )
    wanted = options.names or NETWORKS
    if other := [name for name in wanted if name in kept and kept[name]["limit"] != options.seconds]:
        parser.error(f"{options.json} has other --seconds of {', '.join(other)}: give another file")
    for name in wanted:
        if name not in kept:
            kept[name] = row(name, options.seconds)
            if options.json:
                options.json.write_text(json.dumps(kept, indent=1))
    text = table([kept[name] for name in wanted])
    print(text)
    if options.write:
        pages.write("world-model-bound", text)


if __name__ == "__main__":
    main()
