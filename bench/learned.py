"""The learned cost model: `python bench/learned.py FOLDER [--save] [--write]`.

Trains a network on the comparisons that `bench/latencies.py` left in FOLDER, and judges it on architectures that it did
not see (`HELD_OUT`), beside the profiled prices that it corrects: Spearman's correlation with what was measured,
pairs of graphs that differ by more than 3% that are ordered right, and how many times faster than the original the
graph is that each calls the fastest. Intervals are calibrated on folds of the other architectures. `--save` puts the
network into the package.
"""

from __future__ import annotations

import argparse
import math
import sys
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from bench import pages
from models import exports
from models.training import UNSEEN
from xrlflow.cost.comparisons import Comparisons
from xrlflow.cost.latency_network import NetworkConfig, NetworkParameters
from xrlflow.cost.learned import save_network
from xrlflow.cost.pretrained import PRETRAINED
from xrlflow.rl.latency_training import FitConfig, Judged, calibrate, fit, judge

# Architectures that no training sees: those that the agent has not seen, and trained models from wheels.
HELD_OUT = (
    *sorted(UNSEEN | exports.HELD_OUT),
    "open-nsfw",
    "rapidocr-rec",
    "magika",
    "minilm-int8",
    "nudenet",
)
_FOLDS = 3
_CLEAR = 0.03
_SLOWER = 0.01  # a choice is slower than the original from here on (logarithm)


def architecture(name: str) -> str:
    """The architecture of a network's name, such as bert of bert-2-tokens64-width256, or llama of llama-export-full."""
    parts = name.split("-export")[0].split("-")
    while len(parts) > 1 and (
        parts[-1][-1:].isdigit() and not parts[-1].startswith("int") and name not in HELD_OUT
    ):
        parts.pop()
    return "-".join(parts)


def held_out(found: Comparisons) -> bool:
    name = str(found.about["name"])
    return any(name == h or name.startswith(f"{h}-") for h in HELD_OUT)


def line(judged: Judged, scale: float) -> str:
    measured = np.append(judged.measured, 0.0)
    cells = [judged.name, str(len(judged.measured)), f"{math.exp(measured.max()):.2f}"]
    for by in (judged.priced, judged.predicted):
        right, pairs = judged.ordered(by, _CLEAR)
        cells += [f"{judged.correlation(by):.2f}", f"{right / pairs:.0%}" if pairs else "-"]
        cells.append(f"{math.exp(judged.chosen(by)):.2f}")
    return f"| {' | '.join([*cells, f'{judged.held(scale):.0%}'])} |"


HEAD = (
    "| network | graphs | the best | profiled: correlation | pairs right | its choice "
    "| learned: correlation | pairs right | its choice | in the 90% interval |\n" + "|---" * 10 + "|"
)


def means(title: str, judged: Sequence[Judged], scale: float) -> str:
    best = float(np.mean([np.append(j.measured, 0.0).max() for j in judged]))
    cells = [title, str(sum(len(j.measured) for j in judged)), f"{math.exp(best):.3f}"]
    for by in ("priced", "predicted"):
        correlations = [j.correlation(getattr(j, by)) for j in judged]
        counts = [j.ordered(getattr(j, by), _CLEAR) for j in judged]
        right, pairs = (sum(c) for c in zip(*counts))
        cells += [f"{np.nanmean(correlations):.3f}", f"{right / max(pairs, 1):.1%}"]
        chosen = [j.chosen(getattr(j, by)) for j in judged]
        slower = sum(c < -_SLOWER for c in chosen)
        cells.append(f"{math.exp(float(np.mean(chosen))):.3f}, {slower} slower")
    held = float(np.mean([j.held(scale) for j in judged]))
    return f"| {' | '.join([*cells, f'{held:.1%}'])} |"


def table(parameters: NetworkParameters, unseen: Sequence[Comparisons], scale: float) -> str:
    """The networks by machine, and the means of each, in Markdown."""
    lines = [HEAD]
    for machine in sorted({str(c.about["machine"]) for c in unseen}):
        judged = [judge(parameters, c) for c in unseen if c.about["machine"] == machine]
        lines += [*(line(j, scale) for j in judged), means(f"all, {machine}", judged, scale)]
    return "\n".join(lines)


def fold_scale(known: Sequence[Comparisons], config: FitConfig) -> float:
    """What intervals are to be widened by, from networks whose architecture a network did not see."""
    kinds = sorted({architecture(str(c.about["name"])) for c in known})
    fold = {kind: index % _FOLDS for index, kind in enumerate(kinds)}
    judged: list[Judged] = []
    last: NetworkParameters | None = None
    for number in range(_FOLDS):
        inside = [c for c in known if fold[architecture(str(c.about["name"]))] != number]
        last = fit(inside, replace(config, network=replace(config.network, members=2)))
        judged += [judge(last, c) for c in known if fold[architecture(str(c.about["name"]))] == number]
    assert last is not None
    return float(calibrate(last, judged).arrays["scale"][0])


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("folder", type=Path)
    parser.add_argument("--epochs", type=int, default=20)
    parser.add_argument("--width", type=int, default=32)
    parser.add_argument("--radius", type=int, default=2)
    parser.add_argument("--members", type=int, default=8)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--no-calibration", action="store_true")
    parser.add_argument("--save", action="store_true", help="put the network into the package")
    parser.add_argument("--write", action="store_true", help="put the table into docs/benchmarks")
    options = parser.parse_args()
    everything = [Comparisons.load(p) for p in sorted(options.folder.glob("*.npz"))]
    everything = [c for c in everything if c.graphs > 1]
    known = [c for c in everything if not held_out(c)]
    unseen = [c for c in everything if held_out(c)]
    graphs = [sum(c.graphs - 1 for c in part) for part in (known, unseen)]
    print(
        f"{len(known)} networks and {graphs[0]} graphs to learn from, {len(unseen)} and {graphs[1]} held out",
        file=sys.stderr,
    )
    config = FitConfig(
        NetworkConfig(options.width, options.radius, options.members),
        epochs=options.epochs,
        seed=options.seed,
    )
    begin = time.monotonic()

    def progress(member: int, epoch: int, loss: float) -> None:
        if (epoch + 1) % 10 == 0:
            print(
                f"member {member}, epoch {epoch + 1}: {loss:.4f}, {time.monotonic() - begin:.0f} s",
                file=sys.stderr,
            )

    about = {
        "networks": len(known), "graphs": graphs[0], "held out": list(HELD_OUT), "epochs": options.epochs,
        "machines": sorted({str(c.about["machine"]) for c in known}),
        "runtimes": sorted({str(c.about["runtime"]) for c in known}), "seed": options.seed,
    }  # fmt: skip
    parameters = fit(known, config, about, progress)
    if not options.no_calibration:
        scale = fold_scale(known, config)
        arrays = {**parameters.arrays, "scale": np.full(options.members, scale, np.float32)}
        parameters = replace(parameters, arrays=arrays)
    scale = float(parameters.arrays["scale"][0])
    text = table(parameters, unseen, scale)
    seen = [judge(parameters, c) for c in known]
    print(text)
    print(f"\n{means('seen in training', seen, scale)}\nintervals widened by {scale:.2f}")
    if options.save:
        save_network(parameters, PRETRAINED)
    if options.write:
        pages.write("learned", text)


if __name__ == "__main__":
    torch.set_num_threads(1)
    main()
