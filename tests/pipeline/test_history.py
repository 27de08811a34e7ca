"""Comparisons that an optimisation makes are kept, and the learned cost is fitted to them."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any, NoReturn
from unittest.mock import Mock

import pytest

import models
import xrlflow
from xrlflow.backends import BackendError
from xrlflow.backends.results import Comparison, SpeedUp
from xrlflow.cost import Profiled
from xrlflow.cost.calibrate import runtime
from xrlflow.cost.database import Database
from xrlflow.cost.history import History
from xrlflow.cost.machine import Machine, cpu_name
from xrlflow.onnxio import load
from xrlflow.pipeline import choose, history
from xrlflow.pipeline.choose import Trials
from xrlflow.pipeline.history import prices_of
from xrlflow.rewrite import Library, RewriteState
from xrlflow.search import SearchNode

pytestmark = [pytest.mark.measures, pytest.mark.usefixtures("brief_comparisons")]


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    return tmp_path / "xrlflow" / "comparisons.sqlite"


def kept(path: Path) -> int:
    with History(cpu_name(), runtime(), 1, path) as result:
        return len(result.latest(100))


def optimized(cost: str = "profiled", **options: Any) -> xrlflow.Result:
    return xrlflow.optimize(
        models.small("nasrnn-shared"), search="greedy", cost=cost, backend="onnxruntime", threads=1, time_limit=8,
        verify=False, **options,
    )  # fmt: skip


def certain(monkeypatch: pytest.MonkeyPatch, disturbed: bool = False) -> None:
    """Comparisons that say the same on any machine: 10% faster, for sure."""

    measure = choose.measure

    def once(*arguments: Any, **options: Any) -> Comparison:
        result = measure(*arguments, **options)
        load = replace(result.load, disturbed=disturbed)
        return replace(result, speedups=(SpeedUp(1.10, 1.09, 1.11),), load=load)

    def not_again(*_: Any, **__: Any) -> NoReturn:
        raise BackendError("the last comparison keeps nothing")

    monkeypatch.setattr(choose, "measure", once)
    monkeypatch.setattr("xrlflow.pipeline.confirm.measure_in_fresh_processes", not_again)


def test_what_was_compared_is_kept(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    certain(monkeypatch)
    monkeypatch.setattr(
        history, "prices_of", lambda model: model
    )  # there may be no time to measure all of them
    result = optimized()
    assert result.report.trials
    assert kept(cache) >= 1


def test_what_was_compared_on_a_busy_machine_is_not(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    certain(monkeypatch, disturbed=True)
    optimized()
    assert not cache.exists() or kept(cache) == 0


@pytest.mark.parametrize("options", [{"cost": "roofline"}, {"measure": False}])
def test_without_measured_prices_nothing_is_kept(
    cache: Path, monkeypatch: pytest.MonkeyPatch, options: dict[str, object]
) -> None:
    certain(monkeypatch)
    optimized(**options)
    assert not cache.exists() or kept(cache) == 0


def test_the_learned_cost_guides_a_search(cache: Path) -> None:
    result = xrlflow.optimize(
        models.small("nasrnn-shared"), search="greedy", cost="learned", backend="onnxruntime", threads=1,
        measure=False,
    )  # fmt: skip
    assert result.report.cost_model == "learned"
    assert result.report.cost_after < result.report.cost_before


def test_an_original_that_was_simplified_is_not_the_graph_that_was_measured() -> None:
    graphs = [load(models.small(name)).graph for name in ("nasrnn-shared", "squeezenet")]
    nodes = [SearchNode(RewriteState.start(g, Library(())), None, 1.0) for g in graphs]
    for base, expected in ((nodes[0], graphs[0]), (nodes[1], None)):
        context, start = Mock(meant=None), Mock()
        context.imported.graph, start.base = graphs[0], base
        trials = Trials(context, start, Mock(), 0.0)
        assert trials._of(None) is expected
        assert trials._of(nodes[1]) is graphs[1]


def test_prices_that_there_was_no_time_to_measure_are_not_called_measured(cache: Path) -> None:
    prices = Profiled(Machine.reference(), database=Database(cache.with_name("d.sqlite")), time_budget=0.0)
    assert prices_of(prices) is prices
    prices.cost(load(models.small("nasrnn-shared")).graph)
    assert prices_of(prices) is None
