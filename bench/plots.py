"""Draws the results of benchmarks: `python bench/plots.py FILE.json ... -o PLOT.svg`; without files the plots of docs/.

Files are what `--json` of bench/agents.py and bench/world_model.py and `--kept` of bench/passes.py write: cost against
time by method. Or what `xrlflow plot --json` printed: learning curves.
"""

from __future__ import annotations

import argparse
import json
import math
import sys
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from bench import pages
from xrlflow.report.plots import Curve, MethodResult, Texts, cost_against_time, learning_curves, save

if TYPE_CHECKING:
    from matplotlib.figure import Figure

DATA = pages.ROOT / "docs" / "benchmarks" / "data"
FOLDER = pages.ROOT / "docs" / "pictures"
_WORLD = {"ppo": "PPO, all steps", "fifth": "world model, a fifth of the steps"}
"""The methods of bench/world_model.py whose seconds are known."""
_OTHERS = {"tree": "tree search, all steps", "nothing": "random agent", "chance": "chance, all steps"}
_TIME, _COST = "seconds (log)", "part of the original's cost"


class UnknownFile(ValueError):
    """A file holds nothing that can be drawn."""


def reached(data: Any) -> list[MethodResult]:
    """What a benchmark's file says about cost and time. Raises UnknownFile."""
    if isinstance(data, Mapping):
        rows = list(data.values())
        if rows and all("network" in row and "ppo" in row for row in rows):
            return _of_world_model(rows)
    else:
        rows = list(data)
    found = defaultdict[tuple[str, str], list[tuple[float, float]]](list)
    for row in rows:
        for part in filter(None, (_of_agents(row), _of_passes(row))):
            method, subject, cost, seconds = part
            found[method, subject].append((cost, seconds))
    if not found:
        raise UnknownFile("no rows with a method, a cost and seconds")
    return [MethodResult(*key, *zip(*values)) for key, values in found.items()]


def _of_agents(row: Any) -> tuple[str, str, float, float] | None:
    if not _has(row, "graph", "method", "initial", "cost", "seconds"):
        return None
    return row["method"], row["graph"], row["cost"] / row["initial"], row["seconds"]


def _of_passes(row: Any) -> tuple[str, str, float, float] | None:
    if not _has(row, "module", "method", "default", "operations", "seconds"):
        return None
    return row["method"], row["module"], row["operations"] / row["default"], row["seconds"]


def _has(row: Any, *keys: str) -> bool:
    return isinstance(row, Mapping) and row.keys() >= set(keys)


def _of_world_model(rows: Iterable[Mapping[str, Any]]) -> list[MethodResult]:
    """Gains become costs. The other methods have no seconds: they are lines."""
    found = []
    for row in rows:
        for key, name in _WORLD.items():
            found.append(MethodResult(name, row["network"], _costs(row[key]), row["seconds"][key]))
        for key, name in _OTHERS.items():
            found.append(MethodResult(name, row["network"], _costs(row[key])))
    return found


def _costs(gains: Sequence[float]) -> list[float]:
    return [1 / gain for gain in gains]


def _read(file: Path) -> Any:
    try:
        return json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise UnknownFile(f"{file}: cannot be read as JSON ({error})") from error


def _positive(results: list[MethodResult]) -> list[MethodResult]:
    """The results, whose means are geometric ones. Raises UnknownFile."""
    for result in results:
        if not all(0 < value < math.inf for value in (*result.costs, *result.seconds)):
            raise UnknownFile(
                f"{result.method} on {result.subject}: a cost or seconds that are not above zero"
            )
    return results


def draw(files: Sequence[Path], title: str, y: str | None = None) -> Figure:
    """One plot of these files: learning curves, or cost against time. Raises UnknownFile."""
    data = [_read(file) for file in files]
    if all(_has(each, "x", "y", "curves") for each in data):
        try:
            curves = [Curve.from_json(curve) for each in data for curve in each["curves"]]
        except (KeyError, TypeError) as error:
            raise UnknownFile(f"{', '.join(map(str, files))}: no learning curves ({error!r})") from error
        return learning_curves(curves, Texts(title, data[0]["x"], y or data[0]["y"]))
    results: list[MethodResult] = []
    for file, each in zip(files, data):
        try:
            results += _positive(reached(each))
        except (UnknownFile, ArithmeticError, KeyError, TypeError) as error:
            raise UnknownFile(f"{file}: {error}") from error
    return cost_against_time(results, Texts(title, _TIME, y or _COST))


PLOTS: Mapping[str, Callable[[], Figure]] = {
    "world-model": lambda: draw(
        [DATA / "world-model-efficiency.json"],
        "Learning on one network: what is left of the modelled cost",
    ),
    "learning": lambda: draw(
        [DATA / "learning.json"], "Agents that learn from nothing, each on one network", "gain of an episode"
    ),
}
"""The plots of docs/, by the names of their files in docs/pictures."""


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("files", nargs="*", type=Path)
    parser.add_argument("-o", "--output", type=Path)
    parser.add_argument("--title", default="Cost against time")
    parser.add_argument("--y", help="what the vertical axis is")
    options = parser.parse_intermixed_args()
    if bool(options.files) != (options.output is not None):
        parser.error("name files and -o PLOT.svg, or neither for the plots of docs/")
    if options.files:
        try:
            save(draw(options.files, options.title, options.y), options.output)
        except (UnknownFile, ValueError) as error:
            parser.error(str(error))
        return
    for name, figure in PLOTS.items():
        save(figure(), FOLDER / f"{name}.svg")


if __name__ == "__main__":
    main()
