"""An agent of your own: train it on your models, and search with it. `python examples/own_agent.py [MODEL.onnx ...]`

A few seconds of training show how it is done. A useful agent takes minutes: see `xrlflow train --help`, which does the
same from the command line.
"""

from __future__ import annotations

import sys

import onnx
from slow_model import slow_model

import xrlflow
from rewrite_rules import LIBRARY
from xrlflow.cost import Roofline
from xrlflow.rl.env import EnvConfig
from xrlflow.rl.features import Vocabulary
from xrlflow.rl.train import Files, TrainConfig, train


def main() -> None:
    paths = sys.argv[1:]
    if not paths:
        paths = ["slow.onnx"]
        onnx.save(slow_model(steps=4, width=32), paths[0])

    files = Files(problems=tuple(paths), held_out=(), rules=tuple(LIBRARY), model=Roofline)
    config = TrainConfig(iterations=2, steps=32, workers=0, env=EnvConfig(horizon=20))
    vocabulary = Vocabulary.of(files.library())
    trained = train(files, vocabulary, config, "own.safetensors", resume=False)
    print("trained for", trained.iterations, "iterations")

    # The agent guides the search; its choices are verified as always.
    result = xrlflow.optimize(paths[0], agent="own.safetensors", cost="roofline", time_limit=5, measure=False)
    print("nodes after:", len(result.model.graph.node), "- verified:", result.report.verified)


if __name__ == "__main__":
    main()
