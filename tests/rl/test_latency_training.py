"""Training the network of the learned cost model: torch computes what NumPy computes, and it learns."""

from __future__ import annotations

import random

import numpy as np
import pytest

from rewrite_rules import LIBRARY
from tests.cost.test_learned import network, small
from xrlflow.cost import Learned, Roofline
from xrlflow.cost.comparisons import Comparisons
from xrlflow.cost.latency_network import NetworkConfig
from xrlflow.cost.neighbourhoods import Neighbourhoods
from xrlflow.ir import Graph
from xrlflow.learn.ppo import TrainingError
from xrlflow.rewrite import Library, RewriteState
from xrlflow.rl.latency_training import FitConfig, Judged, calibrate, fit, judge

pytestmark = pytest.mark.learns

ALL = Library(LIBRARY)
SMALL = FitConfig(NetworkConfig(width=16, radius=2, members=2), epochs=40)


def compared(
    name: str, seconds: Learned | Roofline, count: int = 12, seed: int = 0
) -> tuple[Comparisons, list[Graph]]:
    """Random walks on a network, "measured" by a cost model: what there is to learn is known."""
    rng = random.Random(seed)
    start = small(name)
    graphs = [start]
    while len(graphs) <= count:
        state = RewriteState.start(start, ALL)
        for _ in range(rng.randint(1, 12)):
            if state.candidates:
                state = state.apply(rng.choice(state.candidates))
        graphs.append(state.graph)
    known = Neighbourhoods(Roofline(), 3)
    logs = [float(np.log(seconds.cost(start) / seconds.cost(g))) for g in graphs[1:]]
    counts = [known.view(g).counts() for g in graphs]
    return Comparisons.of(known, counts, logs, [0.002] * count, {"name": name}), graphs


def test_torch_and_numpy_compute_the_same() -> None:
    result, graphs = compared("squeezenet", Roofline())
    parameters = network()
    learned = Learned(Roofline(), parameters)
    expected = [np.log(learned.predict(graphs[0], g).median) for g in graphs[1:]]
    assert judge(parameters, result).predicted == pytest.approx(expected, abs=1e-5)


def test_it_learns_what_prices_do_not_say_and_the_same_seed_learns_the_same() -> None:
    """A hidden network is the truth. Prices alone order graphs worse than what was learned from other walks."""
    truth = Learned(Roofline(), network(seed=3, spread=0.5))
    known = [compared(name, truth, seed=1)[0] for name in ("squeezenet", "nasrnn", "bert")]
    parameters = fit(known, SMALL)
    again = fit(known, SMALL)
    assert all(np.array_equal(parameters.arrays[n], again.arrays[n]) for n in parameters.arrays)
    ratios = []
    for name in ("squeezenet", "nasrnn", "bert"):
        judged = judge(parameters, compared(name, truth, count=20, seed=2)[0])
        wrong, priced = (np.abs(judged.measured - x).mean() for x in (judged.predicted, judged.priced))
        ratios.append(wrong / priced)
    assert max(ratios) < 1
    assert np.prod(ratios) < 0.5**3


def test_intervals_are_widened_until_they_hold_what_was_asked() -> None:
    rng = np.random.default_rng(0)
    measured = rng.normal(0, 0.05, 400)
    narrow = Judged("x", measured, np.zeros(400), np.full(400, 0.01), np.zeros(400))
    assert narrow.held() < 0.5
    scale = float(calibrate(network(), [narrow]).arrays["scale"][0])
    assert narrow.held(scale) == pytest.approx(0.9, abs=0.01)


def test_ranks_and_pairs() -> None:
    measured = np.array([0.1, 0.2, -0.1])
    judged = Judged("x", measured, measured, np.ones(3), -measured)
    assert judged.correlation(judged.predicted) == pytest.approx(1.0)
    assert judged.correlation(judged.priced) == pytest.approx(-1.0)
    assert judged.ordered(judged.predicted) == (6, 6)
    assert judged.ordered(judged.priced) == (0, 6)
    assert judged.ordered(judged.priced, least=0.15) == (0, 3)
    assert np.isnan(judged.correlation(np.zeros(3)))
    assert judged.chosen(judged.predicted) == 0.2
    assert judged.chosen(judged.priced) == -0.1
    assert judged.chosen(np.zeros(3)) == 0.0


def test_nothing_to_learn_from_is_an_error() -> None:
    with pytest.raises(TrainingError, match="no comparisons"):
        fit([])
    result, _ = compared("nasrnn", Roofline(), count=2)
    with pytest.raises(TrainingError, match="radius 3 cannot train a network of radius 4"):
        fit([result], FitConfig(NetworkConfig(width=4, radius=4)))


def test_networks_that_were_not_compared_are_left_out() -> None:
    known = Neighbourhoods(Roofline(), 2)
    alone = Comparisons.of(known, [known.view(small("nasrnn")).counts()], [], [], {"name": "alone"})
    parameters = network()
    with pytest.raises(TrainingError, match="no comparisons"):
        fit([alone], FitConfig(epochs=1))
    with pytest.raises(TrainingError, match="no comparisons"):
        calibrate(parameters, [judge(parameters, alone)])
