"""Search with a policy: valleys, limits, and what it owes to greedy."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from functools import cache
from typing import Any

import numpy as np
import onnx
import pytest
from scipy.special import log_softmax

import models
from rewrite_rules import LIBRARY
from tests.rewrite.test_engine import layered
from tests.rewrite.toy import TOY, CancelTransposes, PushTransposeThroughRelu
from tests.rules.harness import model
from tests.search.test_search import Weighted
from xrlflow.cost import Roofline
from xrlflow.ir import Graph
from xrlflow.onnxio import load
from xrlflow.rewrite import Captures, Library, Op, RewriteState, Rule, Val
from xrlflow.rl.features import Featuriser, Observation, Vocabulary
from xrlflow.rl.situation import Situation
from xrlflow.rl.strategy import PolicyError, StrategyConfig, agent_search
from xrlflow.search import Limits, SearchResult, greedy, replay, taso

pytestmark = pytest.mark.learns

ALL = Library(LIBRARY)


class Scripted:
    """A policy with a number for each rule (0 for those not named) and for No-Op; counts what it is asked."""

    def __init__(self, vocabulary: Vocabulary, noop: float = 0.0, **scores: float) -> None:
        self.table = np.zeros(len(vocabulary.rules) + 1)
        for name, score in scores.items():
            self.table[vocabulary.rules.index(name) + 1] = score
        self.noop = noop
        self.calls: list[int] = []

    def log_probs(self, observations: Sequence[Observation]) -> np.ndarray:
        self.calls.append(len(observations))
        return np.concatenate([log_softmax(np.append(self.table[o.rule], self.noop)) for o in observations])


class Recording(Featuriser):
    """Notes the fingerprints of what it is asked about."""

    def __init__(self, vocabulary: Vocabulary) -> None:
        super().__init__(vocabulary, Roofline())
        self.seen: list[int] = []

    def __call__(self, situation: Situation) -> Observation:
        self.seen.append(situation.state.fingerprint)
        return super().__call__(situation)


class PushAndDouble(Rule):
    """relu(transpose(x)) -> transpose(relu(relu(x))): a loss, unless the transpose meets another one."""

    def source(self, op: Op, x: Val) -> Any:
        return op.Relu(op.Transpose(x, perm="p"))

    def target(self, op: Op, m: Captures, x: Val) -> Any:
        return op.Transpose(op.Relu(op.Relu(x)), perm=m.p)


class Double(Rule):
    """exp(x) -> relu(exp(x)): a loss that nothing makes good."""

    def source(self, op: Op, x: Val) -> Any:
        return op.Exp(x)

    def target(self, op: Op, x: Val) -> Any:
        return op.Relu(op.Exp(x))


PRICES = Weighted(Transpose=8.0, Relu=1.0, Exp=2.0)
VALLEYS = (CancelTransposes(), PushAndDouble(), Double())


def valleys(count: int = 1, relus: int = 2, distractors: int = 0) -> onnx.ModelProto:
    """`count` times: transpose, relus, transpose: each relu must be passed at a loss before the transposes cancel."""
    lines, current = [], "x"

    def add(op: str) -> None:
        nonlocal current
        lines.append(f"v{len(lines)} = {op}({current})")
        current = f"v{len(lines) - 1}"

    for _ in range(count):
        add("Transpose<perm=[0,2,1]>")
        for _ in range(relus):
            add("Relu")
        add("Transpose<perm=[0,2,1]>")
        for _ in range(distractors):
            add("Exp")
        add("Neg")
    return model(f"agraph (float[2,3,4] x) => (float[2,3,4] {current}) {{" + "\n".join(lines) + "}")


def start(proto: onnx.ModelProto, library: Library, cost: Any) -> tuple[RewriteState, float]:
    graph = load(proto).graph
    return RewriteState.start(graph, library, cost.delta), cost.cost(graph)


def search(
    proto: onnx.ModelProto,
    config: StrategyConfig | None = None,
    limits: Limits | None = None,
    seed: int = 0,
    **scores: float,
) -> SearchResult:
    """In the valleys, with a policy of these scores."""
    library = Library(VALLEYS)
    words = Vocabulary.of(library)
    state, cost = start(proto, library, PRICES)
    policy = Scripted(words, **scores)
    featuriser = Featuriser(words, Roofline())
    return agent_search(state, cost, limits or Limits(), policy, featuriser, config or StrategyConfig(), seed)


def effort(proto: onnx.ModelProto, **scores: float) -> tuple[float, int]:
    """The best cost of a long search, and how many states were expanded before it was found."""
    seen: list[tuple[float, int]] = []
    limits = Limits(budget=400, progress=lambda expanded, best: seen.append((best, expanded)))
    result = search(proto, StrategyConfig(patience=None), limits, **scores)
    return result.best.cost, min(expanded for best, expanded in seen if best == result.best.cost)


@cache
def zoo(name: str) -> Graph:
    return load(models.small(name)).graph


@pytest.mark.parametrize("name", ["squeezenet", "nasrnn-shared", "bert-classifier", "dalle", "resnext50"])
def test_a_policy_that_knows_nothing_is_no_worse_than_greedy(name: str) -> None:
    graph, cost = zoo(name), Roofline()
    words = Vocabulary.of(ALL)
    state, initial = RewriteState.start(graph, ALL, cost.delta), cost.cost(graph)
    result = agent_search(state, initial, Limits(150), Scripted(words), Featuriser(words, cost))
    assert result.best.cost <= greedy(state, initial, Limits()).best.cost * (1 + 1e-9)
    # The modelled cost is that of the graph, and the trace leads there.
    for item in (result.best, *result.shortlist):
        assert np.isclose(item.cost, cost.cost(item.state.graph), rtol=1e-9)
        states = [state, *replay(state, item.trace)]
        assert states[-1].fingerprint == item.state.fingerprint
        assert item.state.delta is state.delta
        assert item.state.graph.node_count <= 2 * graph.node_count
    assert result.best.cost == min(f.cost for f in result.shortlist)
    assert len({f.families for f in result.shortlist}) == len(result.shortlist)


@pytest.mark.parametrize("relus", [1, 2, 3])
def test_valleys_of_several_losses_are_crossed(relus: int) -> None:
    library = Library(VALLEYS)
    state, cost = start(valleys(1, relus), library, PRICES)
    assert greedy(state, cost, Limits()).best.cost == cost
    assert taso(state, cost, Limits(), alpha=1.05).best.cost == cost
    result = search(valleys(1, relus))
    assert result.best.cost == cost - 16 + relus
    names = [s.rule for s in result.best.trace]
    assert names == ["PushAndDouble"] * relus + ["CancelTransposes"]


class NegToSqrt(Rule):
    """neg(x) -> sqrt(x): a loss (none of these four is a rule one could prove; it is their prices that matter)."""

    def source(self, op: Op, x: Val) -> Any:
        return op.Neg(x)

    def target(self, op: Op, x: Val) -> Any:
        return op.Sqrt(x)


class SqrtToAbs(Rule):
    """sqrt(x) -> abs(x): takes the loss back."""

    def source(self, op: Op, x: Val) -> Any:
        return op.Sqrt(x)

    def target(self, op: Op, x: Val) -> Any:
        return op.Abs(x)


class SqrtToFloor(Rule):
    """sqrt(x) -> floor(x): gains less at once."""

    def source(self, op: Op, x: Val) -> Any:
        return op.Sqrt(x)

    def target(self, op: Op, x: Val) -> Any:
        return op.Floor(x)


class FloorToCeil(Rule):
    """floor(x) -> ceil(x): gains most."""

    def source(self, op: Op, x: Val) -> Any:
        return op.Floor(x)

    def target(self, op: Op, x: Val) -> Any:
        return op.Ceil(x)


def test_what_was_lost_is_not_taken_back_in_other_words() -> None:
    prices = Weighted(Neg=10.0, Sqrt=12.0, Abs=10.0, Floor=11.0, Ceil=5.0)
    library = Library((NegToSqrt(), SqrtToAbs(), SqrtToFloor(), FloorToCeil()))
    words = Vocabulary.of(library)
    state, cost = start(model("agraph (float[2] x) => (float[2] y) { y = Neg(x) }"), library, prices)
    result = agent_search(state, cost, Limits(3), Scripted(words), Featuriser(words, Roofline()))
    assert [s.rule for s in result.best.trace] == ["NegToSqrt", "SqrtToFloor", "FloorToCeil"]
    assert result.best.cost == 5.0


def test_what_pays_once_is_taken_everywhere() -> None:
    result = search(valleys(count=6, relus=1))
    assert sorted({s.rule for s in result.best.trace}) == ["CancelTransposes", "PushAndDouble"]
    assert len(result.best.trace) == 12
    _, states = effort(valleys(count=6, relus=1))
    assert states < 40  # of 3^6 combinations


def test_the_policy_decides_what_is_tried_first() -> None:
    """With many losses to choose from, one that knows the right one needs fewer states."""
    proto = valleys(1, relus=3, distractors=6)
    cost, knowing = effort(proto, PushAndDouble=6.0, CancelTransposes=6.0)
    others = [effort(proto), effort(proto, Double=6.0)]
    assert {cost} == {item for item, _ in others}  # doubt finds the way in the end
    assert all(states > knowing for _, states in others), (knowing, others)


def test_rollouts_apply_in_bursts_what_the_policy_likes() -> None:
    """The policy's own walk, without perturbations: as many calls as there are kinds of steps."""
    library = Library(VALLEYS)
    words = Vocabulary.of(library)
    state, cost = start(valleys(count=5, relus=1), library, PRICES)
    policy = Scripted(words, PushAndDouble=8.0, CancelTransposes=8.0)
    calls: dict[float, int] = {}
    limits = Limits(progress=lambda _, best: calls.setdefault(best, len(policy.calls)) and None)
    config = StrategyConfig(perturbations=0, patience=20)
    result = agent_search(state, cost, limits, policy, Featuriser(words, Roofline()), config)
    assert len(result.best.trace) == 10
    assert calls[result.best.cost] <= 3


def test_no_state_is_expanded_or_evaluated_twice(monkeypatch: pytest.MonkeyPatch) -> None:
    library = Library(TOY)
    words = Vocabulary.of(library)
    graph = load(layered(2)).graph
    made: list[int] = []
    apply: Callable[..., RewriteState] = RewriteState.apply

    def noting(*args: Any) -> RewriteState:
        state = apply(*args)
        made.append(state.fingerprint)
        return state

    monkeypatch.setattr(RewriteState, "apply", noting)
    cost = Weighted(MatMul=5.0, Transpose=2.0)
    state = RewriteState.start(graph, library, cost.delta)
    featuriser, policy = Recording(words), Scripted(words, noop=-2.0)
    config = StrategyConfig(batch=3, rollouts=2, patience=None)
    result = agent_search(state, cost.cost(graph), Limits(budget=300), policy, featuriser, config)
    assert result.expanded == len(made) == len(set(made))
    assert len(made) > 30
    assert len(featuriser.seen) == len(set(featuriser.seen)) == sum(policy.calls)
    assert max(policy.calls) == 3


def test_a_seed_fixes_the_search() -> None:
    proto = valleys(3, 2, 2)

    def once(seed: int) -> tuple[object, ...]:
        result = search(proto, StrategyConfig(patience=None), Limits(budget=80), seed, PushAndDouble=1.0)
        return result.best.trace, result.expanded, tuple(f.cost for f in result.shortlist)

    assert once(1) == once(1)


def test_limits() -> None:
    proto = valleys(3, 2, 2)
    for budget in (0, 1, 7):
        result = search(proto, StrategyConfig(patience=None), Limits(budget=budget))
        assert result.expanded == budget
    late = search(proto, limits=Limits(deadline=time.monotonic() - 1))
    assert late.expanded == 0
    assert late.best.trace == ()
    assert not late.interrupted
    seen: list[tuple[int, float]] = []
    search(proto, limits=Limits(budget=20, progress=lambda done, best: seen.append((done, best))))
    assert seen[-1][0] > 10
    assert [best for _, best in seen] == sorted((best for _, best in seen), reverse=True)


def test_ctrl_c_keeps_the_best() -> None:
    library = Library(TOY)
    words = Vocabulary.of(library)
    cost = Weighted(MatMul=5.0, Transpose=2.0)
    state, initial = start(layered(2), library, cost)

    class Interrupting(Scripted):
        def log_probs(self, observations: Sequence[Observation]) -> Any:
            raise KeyboardInterrupt

    result = agent_search(state, initial, Limits(), Interrupting(words), Featuriser(words, Roofline()))
    assert result.interrupted
    assert result.best.cost <= greedy(state, initial, Limits()).best.cost < initial


def test_the_search_ends_where_nothing_is_left() -> None:
    library = Library((CancelTransposes(), PushTransposeThroughRelu()))
    words = Vocabulary.of(library)
    for body in ("y = Exp(x)", "a = Transpose<perm=[0,2,1]>(x)\n y = Transpose<perm=[0,2,1]>(a)"):
        proto = model(f"agraph (float[2,3,4] x) => (float[2,3,4] y) {{ {body} }}")
        state, cost = start(proto, library, Weighted())
        config = StrategyConfig(patience=None)
        result = agent_search(state, cost, Limits(), Scripted(words), Featuriser(words, Roofline()), config)
        assert result.expanded == len(result.best.trace) == body.count("Transpose") // 2


def test_a_policy_that_is_broken_is_refused() -> None:
    with pytest.raises(PolicyError, match="train it again"):
        search(valleys(), PushAndDouble=float("nan"))

    class WithoutNoOp(Scripted):
        def log_probs(self, observations: Sequence[Observation]) -> Any:
            return np.zeros(sum(o.candidates for o in observations))

    library = Library(VALLEYS)
    words = Vocabulary.of(library)
    state, cost = start(valleys(), library, PRICES)
    with pytest.raises(PolicyError, match="No-Op"):
        agent_search(state, cost, Limits(), WithoutNoOp(words), Featuriser(words, Roofline()))
