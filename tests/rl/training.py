"""A small task that the tests of training share; workers make it in their own process."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache

import torch

from tests.rewrite.toy import CancelTransposes, Distribute, PushTransposeThroughRelu
from tests.rules.harness import model
from xrlflow.cost import Roofline
from xrlflow.ir import Graph
from xrlflow.learn.ppo import PPOConfig
from xrlflow.onnxio import load
from xrlflow.rewrite import Library
from xrlflow.rl.env import EnvConfig, Problem
from xrlflow.rl.features import Featuriser, Vocabulary
from xrlflow.rl.parameters import AgentConfig, EncoderConfig
from xrlflow.rl.train import TrainConfig
from xrlflow.rl.workers import Task

RULES = (CancelTransposes(), PushTransposeThroughRelu())
WORDS = Vocabulary.of(Library(RULES))
AGENT = AgentConfig(EncoderConfig(width=16, layers=1, heads=2))
CONFIG = TrainConfig(
    iterations=4, steps=48, workers=0, environments=4, evaluate_every=1, agent=AGENT, env=EnvConfig(horizon=6),
    ppo=PPOConfig(learning_rate=3e-3, minibatch=16, epochs=3, reward_scale=0.05),
)  # fmt: skip


@cache
def valley(size: int) -> Graph:
    """Twice: transpose, relu, transpose. A relu must be passed, which gains nothing, before transposes cancel."""
    return load(
        model(
            f"agraph (float[2,{size},{size}] x) => (float[2,{size},{size}] y) {{"
            " a = Transpose<perm=[0,2,1]>(x)\n b = Relu(a)\n c = Transpose<perm=[0,2,1]>(b)\n d = Neg(c)\n"
            " e = Transpose<perm=[0,2,1]>(d)\n f = Relu(e)\n y = Transpose<perm=[0,2,1]>(f) }"
        )
    ).graph


@dataclass(frozen=True, slots=True)
class Valleys:
    """Graphs of these sizes to train on; one of another size is held out."""

    sizes: tuple[int, ...] = (256, 384)
    held_out: tuple[int, ...] = (320,)

    def __call__(self, vocabulary: Vocabulary) -> Task:
        torch.set_num_threads(1)
        library, costs = Library(RULES), Roofline()
        featuriser = Featuriser(vocabulary, costs)

        def problem(size: int) -> Problem:
            return Problem.of(f"valley {size}", valley(size), library, costs, featuriser.pricing)

        return Task([problem(s) for s in self.sizes], [problem(s) for s in self.held_out], featuriser)


def loss(vocabulary: Vocabulary) -> Task:
    """One graph, where all that can be done is a loss."""
    library, costs = Library([Distribute()]), Roofline()
    featuriser = Featuriser(vocabulary, costs)
    graph = load(
        model(
            "agraph (float[64,64] x, float[64,64] y, float[64,64] z) => (float[64,64] r) {"
            " a = Add(x, y)\n r = Mul(a, z) }"
        )
    ).graph
    return Task([Problem.of("loss", graph, library, costs, featuriser.pricing)], [], featuriser)


def broken(vocabulary: Vocabulary) -> Task:
    """A task that cannot be made."""
    raise ValueError("there are no such files")
