"""The agent's network in ONNX Runtime: what it computes is what torch computes."""

from __future__ import annotations

import random
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import onnx
import pytest
import torch

import models
from rewrite_rules import LIBRARY
from tests.levels import whole
from tests.rewrite.test_engine import layered
from tests.rewrite.toy import TOY, CancelTransposes
from tests.rules.harness import model
from xrlflow.cost import Roofline
from xrlflow.onnxio import load
from xrlflow.rewrite import Library, RewriteState
from xrlflow.rl.agent import Agent, InTorch
from xrlflow.rl.features import Featuriser, Observation, Pricing, Vocabulary
from xrlflow.rl.network import Network
from xrlflow.rl.parameters import AgentConfig, EncoderConfig, Parameters, shapes
from xrlflow.rl.pretrained import PRETRAINED
from xrlflow.rl.situation import Situation, choices

pytestmark = pytest.mark.learns

torch.set_num_threads(1)

ALL = Library(LIBRARY)
CONFIGS = [
    AgentConfig(EncoderConfig(width=16, layers=2, heads=2)),
    AgentConfig(EncoderConfig(width=12, layers=0, heads=3)),
    AgentConfig(EncoderConfig(width=1, layers=1, heads=1)),
]


def random_agent(vocabulary: Vocabulary, config: AgentConfig = CONFIGS[0], seed: int = 0) -> Parameters:
    """Every parameter matters."""
    rng = np.random.default_rng(seed)
    arrays = {
        name: rng.normal(0.0, 0.3, shape).astype(np.float32)
        for name, shape in shapes(vocabulary, config).items()
    }
    return Parameters(vocabulary, config, arrays)


def observations(
    proto: onnx.ModelProto, library: Library, words: Vocabulary, steps: int, seed: int = 0
) -> Iterator[Observation]:
    """What is seen on a random walk."""
    yield from walked(begun(proto, library, words), steps, seed)


Begun = tuple[RewriteState, Featuriser, float]


def begun(proto: onnx.ModelProto, library: Library, words: Vocabulary) -> Begun:
    """Where walks begin, and what they cost there."""
    prices, graph = Roofline(), load(proto).graph
    state = RewriteState.start(graph, library, Pricing.of(prices.delta))
    return state, Featuriser(words, prices), prices.cost(graph)


def walked(start: Begun, steps: int, seed: int) -> Iterator[Observation]:
    state, featuriser, initial = start
    cost, rng = initial, random.Random(seed)
    for step in range(steps):
        candidates = choices(state)
        yield featuriser(Situation(state, candidates, cost, initial, 1 - step / steps))
        if not candidates:
            return
        match = rng.choice(candidates)
        state, cost = state.apply(match), cost + match.delta


def both(parameters: Parameters) -> tuple[InTorch[Observation], Network]:
    return InTorch(Agent.of(parameters).eval()), Network(parameters)


@pytest.mark.parametrize("config", CONFIGS)
def test_parameters_are_those_of_torch(config: AgentConfig) -> None:
    words = Vocabulary.of(Library(TOY))
    expected = {name: tuple(t.shape) for name, t in Agent(words, config).state_dict().items()}
    assert shapes(words, config) == expected


@pytest.mark.parametrize("config", CONFIGS)
def test_random_agents_score_as_in_torch(config: AgentConfig) -> None:
    words = Vocabulary.of(ALL)
    theirs, ours = both(random_agent(words, config))
    for name in ("squeezenet", "bert", "nasrnn-shared"):
        seen = list(observations(models.small(name), ALL, words, 4))
        expected = theirs.log_probs(seen)
        assert np.ptp(expected) > 0.05
        np.testing.assert_allclose(ours.log_probs(seen), expected, atol=2e-4)


@pytest.mark.parametrize(
    "proto",
    [
        model("agraph (float[2] x) => (float[2] x) { }"),  # neither operators nor edges
        model("agraph (float[2] x) => (float[2] y) { y = Exp(x) }"),  # no candidates
        layered(1),
    ],
)
def test_what_is_empty(proto: onnx.ModelProto) -> None:
    library = Library(TOY)
    words = Vocabulary.of(library)
    theirs, ours = both(random_agent(words, CONFIGS[0]))
    seen = [*observations(proto, library, words, 1), *observations(layered(2), library, words, 2)]
    for some in (seen[:1], seen, seen[::-1]):
        np.testing.assert_allclose(ours.log_probs(some), theirs.log_probs(some), atol=1e-4)


def test_probabilities_add_up() -> None:
    words = Vocabulary.of(ALL)
    seen = list(observations(models.small("bert"), ALL, words, 3))
    probs = np.exp(Network(random_agent(words)).log_probs(seen))
    ends = np.cumsum([o.candidates + 1 for o in seen])
    assert len(probs) == ends[-1]
    np.testing.assert_allclose([part.sum() for part in np.split(probs, ends[:-1])], 1.0)


def test_an_extended_agent_is_that_of_torch() -> None:
    old, new = Library([r for r in TOY if not isinstance(r, CancelTransposes)]), Library(TOY)
    parameters = random_agent(Vocabulary.of(old), CONFIGS[0])
    grown = parameters.extended(new)
    assert grown.vocabulary == parameters.vocabulary.extended(new) != parameters.vocabulary
    assert grown.extended(new) is grown
    seen = list(observations(layered(2), new, grown.vocabulary, 3))
    expected = InTorch(Agent.of(parameters).extended(new)).log_probs(seen)
    np.testing.assert_allclose(Network(grown).log_probs(seen), expected, atol=1e-4)


@pytest.mark.parametrize("decisions", whole([300, 1000], (300,)))
def test_the_shipped_agent_takes_the_same_choices_as_in_torch(decisions: int) -> None:
    """In decisions of random walks over small networks."""
    parameters = Parameters.load(PRETRAINED).extended(ALL)
    theirs, ours = both(parameters)
    names = ("squeezenet", "bert", "nasrnn-shared", "resnext50", "mobilenetv2", "dalle")
    starts = [begun(models.small(name), ALL, parameters.vocabulary) for name in names]
    seen = [o for seed in range(decisions // 50) for start in starts for o in walked(start, 10, seed)]
    assert len(seen) >= decisions
    for start in range(0, decisions, 4):
        some = seen[start : start + 4]
        expected, got = theirs.log_probs(some), ours.log_probs(some)
        np.testing.assert_allclose(got, expected, atol=1e-4)
        ends = np.cumsum([o.candidates + 1 for o in some])[:-1]
        for a, b in zip(np.split(expected, ends), np.split(got, ends)):
            assert a.argmax() == b.argmax()


def test_a_search_with_the_agent_needs_no_torch(tmp_path: Path) -> None:
    onnx.save(models.small("resnext50"), tmp_path / "in.onnx")
    code = (
        "import sys\n"
        "for name in ('torch', 'torch_geometric', 'gymnasium', 'tensorboard', 'onnxscript', 'tvm', 'xgboost'):\n"
        "    sys.modules[name] = None  # to import it is an error\n"
        "import xrlflow\n"
        "found = xrlflow.optimize('in.onnx', search='xrlflow', cost='roofline', measure=False, budget=50)\n"
        "assert found.report.search == 'xrlflow'\n"
        "assert found.report.cost_after < found.report.cost_before\n"
        "assert found.report.verified\n"
        "assert not any('no time for the agent' in note for note in found.report.notes)\n"
    )
    subprocess.run([sys.executable, "-c", code], cwd=tmp_path, check=True)
