"""Monte Carlo tree search: valleys, limits, transpositions, and what it owes to greedy."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any
from unittest.mock import Mock

import numpy as np
import onnx
import pytest

from rewrite_rules import LIBRARY
from tests.rewrite.test_engine import layered
from tests.rewrite.toy import TOY
from tests.rl.test_strategy import PRICES, VALLEYS, Scripted, start, valleys, zoo
from tests.search.test_search import Weighted
from xrlflow.cost import Roofline
from xrlflow.pipeline import explore
from xrlflow.rewrite import Library, RewriteState
from xrlflow.rl.features import Featuriser, Observation, Vocabulary
from xrlflow.rl.mcts import TreeConfig, _TreeSearch, tree_search
from xrlflow.rl.strategy import PolicyError
from xrlflow.search import Limits, SearchNode, SearchResult, greedy, replay, taso

pytestmark = pytest.mark.learns

ALL = Library(LIBRARY)


class Judging(Scripted):
    """A scripted policy, with a critic that always promises the same."""

    promise = 0.0

    def evaluate(self, observations: Sequence[Observation]) -> tuple[np.ndarray, np.ndarray]:
        return self.log_probs(observations), np.full(len(observations), self.promise)


def search(
    proto: onnx.ModelProto,
    config: TreeConfig | None = None,
    limits: Limits | None = None,
    **scores: float,
) -> SearchResult:
    """In the valleys, with a policy of these scores."""
    library = Library(VALLEYS)
    words = Vocabulary.of(library)
    state, cost = start(proto, library, PRICES)
    judge = Judging(words, **scores)
    return tree_search(
        state, cost, limits or Limits(), judge, Featuriser(words, Roofline()), config or TreeConfig()
    )


@pytest.mark.parametrize("name", ["squeezenet", "nasrnn-shared", "bert-classifier", "dalle"])
def test_it_is_no_worse_than_greedy_and_its_traces_lead_to_its_graphs(name: str) -> None:
    graph, cost = zoo(name), Roofline()
    words = Vocabulary.of(ALL)
    state, initial = RewriteState.start(graph, ALL, cost.delta), cost.cost(graph)
    result = tree_search(state, initial, Limits(150), Judging(words), Featuriser(words, cost))
    assert result.best.cost <= greedy(state, initial, Limits()).best.cost * (1 + 1e-9)
    for item in (result.best, *result.shortlist):
        assert np.isclose(item.cost, cost.cost(item.state.graph), rtol=1e-9)
        states = [state, *replay(state, item.trace)]
        assert states[-1].fingerprint == item.state.fingerprint
        assert item.state.delta is state.delta


@pytest.mark.parametrize("relus", [1, 2, 3])
def test_valleys_of_several_losses_are_crossed(relus: int) -> None:
    library = Library(VALLEYS)
    state, cost = start(valleys(1, relus), library, PRICES)
    assert taso(state, cost, Limits(), alpha=1.05).best.cost == cost
    assert search(valleys(1, relus)).best.cost == cost - 16 + relus


def test_several_valleys_are_crossed_one_after_the_other() -> None:
    library = Library(VALLEYS)
    _, cost = start(valleys(3, 2), library, PRICES)
    assert search(valleys(3, 2)).best.cost == cost - 3 * 14


@pytest.mark.whole
def test_the_policy_decides_what_is_tried_first() -> None:
    proto = valleys(1, relus=3, distractors=6)

    def effort(**scores: float) -> int:
        seen: list[tuple[float, int]] = []
        limits = Limits(budget=2000, progress=lambda expanded, best: seen.append((best, expanded)))
        result = search(proto, TreeConfig(patience=None), limits, **scores)
        return min(expanded for best, expanded in seen if best == result.best.cost)

    assert effort(PushAndDouble=6.0) < effort(Double=6.0)


def test_no_state_is_made_or_evaluated_twice(monkeypatch: pytest.MonkeyPatch) -> None:
    library = Library(TOY)
    words = Vocabulary.of(library)
    made: list[int] = []
    apply: Callable[..., RewriteState] = RewriteState.apply

    def noting(*args: Any) -> RewriteState:
        state = apply(*args)
        made.append(state.fingerprint)
        return state

    monkeypatch.setattr(RewriteState, "apply", noting)
    cost = Weighted(MatMul=5.0, Transpose=2.0)
    state, initial = start(layered(2), library, cost)
    judge = Judging(words)
    result = tree_search(
        state, initial, Limits(budget=200), judge, Featuriser(words, Roofline()), TreeConfig(batch=3)
    )
    assert result.expanded == len(made) == len(set(made))
    assert len(made) > 20
    assert sum(judge.calls) <= len(made) + 1
    assert max(judge.calls) <= 3


def test_it_gives_the_same_each_time() -> None:
    def once() -> tuple[object, ...]:
        result = search(valleys(3, 2, 2), TreeConfig(patience=None), Limits(budget=80), PushAndDouble=1.0)
        return result.best.trace, result.expanded, tuple(f.cost for f in result.shortlist)

    assert once() == once()


def test_limits_and_ctrl_c() -> None:
    proto = valleys(3, 2, 2)
    for budget in (0, 1, 7):
        assert search(proto, TreeConfig(patience=None), Limits(budget=budget)).expanded == budget
    late = search(proto, limits=Limits(deadline=time.monotonic() - 1))
    assert (late.expanded, late.best.trace, late.interrupted) == (0, (), False)

    def interrupt(expanded: int, best: float) -> None:
        if expanded > 10:
            raise KeyboardInterrupt

    stopped = search(proto, TreeConfig(patience=None), Limits(progress=interrupt))
    assert stopped.interrupted
    assert stopped.best.cost <= search(proto, limits=Limits(budget=0)).best.cost


@pytest.mark.parametrize("body", ["y = Exp(x)", "a = Neg(x)\n b = Relu(a)\n y = Neg(b)"])
def test_the_search_ends_where_nothing_is_left(body: str) -> None:
    from tests.rules.harness import model

    library = Library(VALLEYS[:1])
    words = Vocabulary.of(library)
    state, cost = start(model(f"agraph (float[2,3,4] x) => (float[2,3,4] y) {{ {body} }}"), library, PRICES)
    config = TreeConfig(patience=None)
    result = tree_search(state, cost, Limits(), Judging(words), Featuriser(words, Roofline()), config)
    assert (result.expanded, result.best.trace) == (0, ())


@pytest.mark.parametrize("broken", ["policy", "critic"])
def test_an_agent_that_is_broken_is_refused(broken: str) -> None:
    library = Library(VALLEYS)
    words = Vocabulary.of(library)
    state, cost = start(valleys(), library, PRICES)
    judge = Judging(words, PushAndDouble=float("nan") if broken == "policy" else 0.0)
    judge.promise = float("nan") if broken == "critic" else 0.0
    with pytest.raises(PolicyError, match="train it again"):
        tree_search(state, cost, Limits(), judge, Featuriser(words, Roofline()))


def test_a_graph_that_costs_nothing_has_priors() -> None:
    """Every loss is without measure against no cost, so that all would be worth nothing."""
    library = Library(VALLEYS)
    words = Vocabulary.of(library)
    state, _ = start(valleys(1, 2, 2), library, PRICES)
    assert not state.gaining
    with np.errstate(invalid="raise", divide="raise"):
        result = tree_search(state, 0.0, Limits(20), Judging(words), Featuriser(words, Roofline()))
    assert result.expanded > 0


def test_what_greedy_found_is_kept_if_the_agent_is_interrupted(monkeypatch: pytest.MonkeyPatch) -> None:
    graph, cost = zoo("nasrnn-shared"), Roofline()
    base = SearchNode(RewriteState.start(graph, ALL, cost.delta), None, cost.cost(graph))
    monkeypatch.setattr(explore, "_by_agent", lambda *_: SearchResult(base, (base,), 0, 0, 0.0, True))
    context = Mock()
    context.options.budget, context.options.agent = 50, "a"
    context.clock.budget.select_until = time.monotonic() + 60
    result = explore._with_agent(context, base, cost, Limits(50), None)
    assert result.interrupted
    assert result.best.cost == greedy(base.state, base.cost, Limits(50)).best.cost < base.cost


@pytest.mark.parametrize("left", [60.0, 0.1])
def test_slow_prices_leave_the_agent_its_time(monkeypatch: pytest.MonkeyPatch, left: float) -> None:
    """Greedy search ends early if an agent follows, and has all the time if there is none for an agent."""
    graph, cost = zoo("nasrnn-shared"), Roofline()
    base = SearchNode(RewriteState.start(graph, ALL, cost.delta), None, cost.cost(graph))
    nothing = SearchResult(base, (base,), 0, 0, 0.0, False)
    given: list[Limits] = []
    monkeypatch.setattr(explore, "greedy", lambda *which: (given.append(which[2]), nothing)[1])
    monkeypatch.setattr(explore, "_by_agent", lambda *_: replace(nothing, expanded=1))
    context = Mock(notes=[])
    context.options.budget, context.options.agent, context.options.train_steps = 50, None, 0
    now = time.monotonic()
    context.clock.budget.select_until = now + left
    limits = Limits(50, now + 30.0)
    result = explore._with_agent(context, base, cost, limits, None)
    (deadline,) = (limit.deadline for limit in given)
    assert deadline is not None
    if left > 1.0:
        assert result.expanded == 1
        assert deadline < now + 10.0
        assert context.notes == []
    else:
        assert result.expanded == 0
        assert deadline == limits.deadline
        assert "no time for the agent" in context.notes[0]


def test_the_tree_begins_where_the_first_descent_ends() -> None:
    graph, cost = zoo("squeezenet"), Roofline()
    words = Vocabulary.of(ALL)
    state, initial = RewriteState.start(graph, ALL, cost.delta), cost.cost(graph)
    search = _TreeSearch(
        state, initial, Limits(40), Judging(words), Featuriser(words, cost), TreeConfig(batch=2)
    )
    search.run()
    end = greedy(state, initial, Limits()).best.state.fingerprint
    assert next(iter(search.tree)) == end != state.fingerprint
