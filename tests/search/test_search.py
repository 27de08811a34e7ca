"""Strategies on small graphs whose best rewriting is known."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import onnx
import pytest

from tests.rewrite.test_engine import layered
from tests.rewrite.toy import TOY, CancelTransposes, Collect, Distribute, PushTransposeThroughRelu
from tests.rules.harness import model
from xrlflow.ir import Edit, Graph
from xrlflow.onnxio import load
from xrlflow.rewrite import AnyRule, Library, Op, RewriteState, Rule, Val
from xrlflow.search import (
    Limits,
    Ratio,
    SearchNode,
    extend,
    greedy,
    joined,
    random_walk,
    replay,
    select,
    sweep,
    taso,
)
from xrlflow.search.result import leave_out
from xrlflow.search.select import Compare, sweeping_rules


class Weighted:
    """A cost model for tests: a price for each operator."""

    def __init__(self, **prices: float) -> None:
        self.prices = prices

    def cost(self, graph: Graph) -> float:
        return sum(self.prices.get(n.op, 1.0) for n in graph.nodes() if not n.const)

    def delta(self, graph: Graph, edit: Edit) -> float:
        new = [n for _, n in edit.rewired] + list(edit.added)
        old = [n for n, _ in edit.rewired] + list(edit.removed)
        return sum(self.prices.get(n.op, 1.0) for n in new if not n.const) - sum(
            self.prices.get(n.op, 1.0) for n in old if not n.const
        )


def start(proto: onnx.ModelProto, rules: tuple[AnyRule, ...], cost: Weighted) -> SearchNode:
    graph = load(proto).graph
    return SearchNode(RewriteState.start(graph, Library(rules), cost.delta), None, cost.cost(graph))


def timed(truth: Weighted, base: SearchNode) -> Compare:
    """Comparisons of which `truth` has the medians, with narrow intervals."""

    def compare(against: SearchNode | None, found: SearchNode) -> Ratio:
        median = truth.cost((against or base).state.graph) / truth.cost(found.state.graph)
        return Ratio(median, median * 0.99, median * 1.01)

    return compare


def searching(modelled: Weighted) -> Callable[[SearchNode, frozenset[str]], SearchNode]:
    """Greedy search with some of the rules. Its result has the candidates of all rules, and the whole path."""

    def search(found: SearchNode, rules: frozenset[str]) -> SearchNode:
        library = found.state.library
        state = RewriteState.start(found.state.graph, library.only(rules), modelled.delta)
        best = greedy(state, found.cost, Limits()).best
        full = RewriteState.start(best.state.graph, library, modelled.delta)
        return SearchNode(full, joined(found.path, best.path), best.cost)

    return search


def valley() -> onnx.ModelProto:
    """transpose, relu, transpose: the relu must be passed (no gain) before the transposes cancel."""
    return model(
        "agraph (float[2,3,4] x) => (float[2,3,4] y) {"
        " a = Transpose<perm=[0,2,1]>(x)\n b = Relu(a)\n y = Transpose<perm=[0,2,1]>(b) }"
    )


RULES = (CancelTransposes(), PushTransposeThroughRelu())


def test_greedy_stops_where_nothing_gains() -> None:
    base = start(valley(), RULES, Weighted())
    result = greedy(base.state, base.cost, Limits())
    assert result.best.cost == base.cost
    assert result.best.trace == ()


def test_taso_passes_through_a_graph_that_is_no_better() -> None:
    base = start(valley(), RULES, Weighted())
    result = taso(base.state, base.cost, Limits(), alpha=1.05)
    assert [s.rule for s in result.best.trace] == ["PushTransposeThroughRelu", "CancelTransposes"]
    assert result.best.cost == 1.0
    assert result.best.cost == Weighted().cost(result.best.state.graph)


def test_taso_does_not_pass_what_alpha_forbids() -> None:
    base = start(valley(), RULES, Weighted())
    assert taso(base.state, base.cost, Limits(), alpha=1.0).best.cost == base.cost


def test_greedy_takes_what_gains() -> None:
    proto = model(
        "agraph (float[4] x, float[4] y, float[4] z) => (float[4] r) { a = Mul(x, z)\n b = Mul(y, z)\n r = Add(a, b) }"
    )
    base = start(proto, (Collect(), Distribute()), Weighted())
    result = greedy(base.state, base.cost, Limits())
    assert [s.rule for s in result.best.trace] == ["Collect"]
    assert result.best.cost == 2.0
    # With multiplications free, the other direction gains, and greedy takes that.
    again = start(proto, (Collect(), Distribute()), Weighted(Mul=5.0))
    assert greedy(again.state, again.cost, Limits()).best.cost == 6.0


@pytest.mark.parametrize("strategy", ["greedy", "taso", "random"])
def test_modelled_cost_is_that_of_the_graph_and_the_trace_replays(strategy: str) -> None:
    proto = layered(2)
    cost = Weighted(MatMul=5.0, Transpose=2.0)
    base = start(proto, TOY, cost)
    limits = Limits(budget=60)
    if strategy == "greedy":
        result = greedy(base.state, base.cost, limits)
    elif strategy == "taso":
        result = taso(base.state, base.cost, limits)
    else:
        result = random_walk(base.state, base.cost, limits, seed=5)
    assert np.isclose(result.best.cost, cost.cost(result.best.state.graph))
    states = [base.state, *replay(base.state, result.best.trace)]
    assert states[-1].fingerprint == result.best.state.fingerprint
    for found in result.shortlist:
        assert np.isclose(found.cost, cost.cost(found.state.graph))
    assert len({f.families for f in result.shortlist}) == len(result.shortlist)


def test_random_walk_depends_on_its_seed_alone() -> None:
    proto = layered(2)

    def walk(seed: int) -> int:
        base = start(proto, TOY, Weighted())
        return random_walk(base.state, base.cost, Limits(budget=15), seed).best.state.fingerprint

    assert walk(1) == walk(1)
    assert len({walk(s) for s in range(4)}) > 1


def test_limits() -> None:
    base = start(layered(2), TOY, Weighted())
    assert taso(base.state, base.cost, Limits(budget=7), alpha=2.0).expanded == 7
    assert taso(base.state, base.cost, Limits(deadline=time.monotonic())).expanded == 0


@pytest.mark.parametrize("strategy", [greedy, taso, random_walk])
def test_interrupt_keeps_the_best_so_far(strategy) -> None:  # type: ignore[no-untyped-def]
    def interrupt(expanded: int, best: float) -> None:
        if expanded == 2:
            raise KeyboardInterrupt

    base = start(layered(3), TOY, Weighted(MatMul=5.0))
    result = strategy(base.state, base.cost, Limits(progress=interrupt))
    assert result.interrupted
    assert result.expanded == 2
    assert result.best.state.fingerprint == result.best.state.graph.rebuilt_fingerprint()


def test_sweep_applies_one_rule_everywhere() -> None:
    base = start(layered(3), (PushTransposeThroughRelu(), CancelTransposes()), Weighted())
    swept = sweep(base, "PushTransposeThroughRelu", Limits(), at_most=0.0)
    assert [s.rule for s in swept.trace] == ["PushTransposeThroughRelu"] * 3
    assert swept.cost == base.cost
    assert sweeping_rules(base, at_most=0.0) == ["PushTransposeThroughRelu"]


def test_selection_combines_what_is_measured_to_be_faster() -> None:
    """The true speed differs from the modelled one: cancelling transposes gains, collecting loses."""
    proto = layered(1)
    rules = (PushTransposeThroughRelu(), CancelTransposes(), Collect(), Distribute())
    base = start(proto, rules, Weighted())
    modelled = greedy(base.state, base.cost, Limits()).best
    truth = Weighted(Transpose=10.0, Relu=0.5)

    def compare(against: SearchNode | None, found: SearchNode) -> Ratio:
        old = truth.cost((against or base).state.graph)
        median = old / truth.cost(found.state.graph)
        return Ratio(median, median * 0.99, median * 1.01)

    selection = select(
        base, [modelled], compare, lambda f, rules: greedy_from(f), time.monotonic() + 60, tolerance=0.5
    )
    assert selection.selected is not None
    assert truth.cost(selection.selected.state.graph) < truth.cost(base.state.graph)
    assert not any(n.op == "Transpose" for n in selection.selected.state.graph.nodes())
    assert any(t.accepted for t in selection.trials)


class ReplaceReluByMax(Rule):
    """relu(x) -> max(x, 0): a bargain by the model, a loss in truth."""

    def source(self, op: Op, x: Val) -> Any:
        return op.Relu(x)

    def target(self, op: Op, x: Val) -> Any:
        return op.Max(x, 0.0)


@pytest.mark.parametrize("loss", [20.0, 30.0], ids=["faster than the original", "slower than the original"])
def test_selection_drops_a_rule_that_is_measured_to_lose(loss: float) -> None:
    proto = model(
        "agraph (float[2,3,4] x) => (float[2,3,4] y) {"
        " a = Transpose<perm=[0,2,1]>(x)\n b = Transpose<perm=[0,2,1]>(a)\n y = Relu(b) }"
    )
    modelled, truth = Weighted(Max=0.1), Weighted(Max=loss, Transpose=10.0)
    base = start(proto, (CancelTransposes(), ReplaceReluByMax()), modelled)
    best = greedy(base.state, base.cost, Limits()).best
    assert best.families == {"toy", "test_search"}

    selection = select(base, [best], timed(truth, base), searching(modelled), time.monotonic() + 60)
    assert selection.selected is not None
    assert [n.op for n in selection.selected.state.graph.nodes()] == ["Relu"]
    assert selection.trials[0].accepted is (loss == 20.0)


def found_by_lookahead() -> tuple[SearchNode, SearchNode]:
    """A start, and what greedy search does not find there: transposes cancel after a level step. Then a bargain."""
    base = start(valley(), (*RULES, ReplaceReluByMax()), Weighted(Max=0.1))
    found = made(base, "PushTransposeThroughRelu", "CancelTransposes", "ReplaceReluByMax")
    assert [n.op for n in found.state.graph.nodes() if not n.const] == ["Max"]
    return base, found


def test_selection_without_a_rule_keeps_what_greedy_search_does_not_find() -> None:
    base, best = found_by_lookahead()
    modelled, truth = Weighted(Max=0.1), Weighted(Transpose=10.0, Max=5.0)
    assert any(n.op == "Transpose" for n in greedy_from(base).state.graph.nodes())

    selection = select(base, [best], timed(truth, base), searching(modelled), time.monotonic() + 60)
    (trial,) = [t for t in selection.trials if t.proposal == "the best proposal - ReplaceReluByMax"]
    assert trial.accepted
    assert selection.selected is not None
    assert [n.op for n in selection.selected.state.graph.nodes()] == ["Relu"]


class SwapMax(Rule, family="swaps"):
    """max(x, y) -> max(y, x): twice is nothing."""

    def source(self, op: Op, x: Val, y: Val) -> Any:
        return op.Max(x, y)

    def target(self, op: Op, x: Val, y: Val) -> Any:
        return op.Max(y, x)


def test_selection_without_a_rule_does_not_repeat_sweeps() -> None:
    """A sweep that was measured to be faster is among the substitutions that are kept."""
    proto = model("agraph (float[4] x, float[4] z) => (float[4] y) { a = Max(x, z)\n y = Relu(a) }")
    modelled, truth = Weighted(LeakyRelu=0.5), Weighted(LeakyRelu=2.0)
    base = start(proto, (SwapMax(), ReplaceReluByLeakyRelu()), modelled)
    best = greedy(base.state, base.cost, Limits()).best

    def seconds(graph: Graph) -> float:
        (maximum,) = [n for n in graph.nodes() if n.op == "Max"]
        return truth.cost(graph) + (0.0 if maximum.inputs[0] == graph.inputs[1] else 3.0)

    swaps = Surveyed({"SwapMax": 1.0}, {})
    selection = select(
        base, [best], by_graph(seconds, base), searching(modelled), time.monotonic() + 60, survey=swaps
    )
    kept = [t.proposal for t in selection.trials if t.accepted]
    assert kept == ["the best proposal + SwapMax", "the best proposal + SwapMax - ReplaceReluByLeakyRelu"]


def test_steps_that_do_not_apply_without_a_rule_are_left_out() -> None:
    base, best = found_by_lookahead()

    def rules(left: SearchNode) -> list[str]:
        return [step.rule for step in left.trace]

    without = leave_out(base, best.trace, {"PushTransposeThroughRelu"})
    assert rules(without) == []  # nothing else has the ids that pushing the transpose made
    without = leave_out(base, best.trace, {"ReplaceReluByMax"})
    assert rules(without) == ["PushTransposeThroughRelu", "CancelTransposes"]
    assert without.cost == Weighted(Max=0.1).cost(without.state.graph)
    assert leave_out(base, best.trace, ()).state.fingerprint == best.state.fingerprint


class ReplaceReluByLeakyRelu(Rule):
    """relu(x) -> leakyrelu(x, 0): level by the model, a great gain in truth."""

    def source(self, op: Op, x: Val) -> Any:
        return op.Relu(x)

    def target(self, op: Op, x: Val) -> Any:
        return op.LeakyRelu(x, alpha=0.0)


ALTERNATIVES = (ReplaceReluByLeakyRelu(), ReplaceReluByMax())


class ReplaceLeakyReluByThresholdedRelu(Rule):
    """leakyrelu(x, 0) -> thresholdedrelu(x, 0)"""

    def source(self, op: Op, x: Val) -> Any:
        return op.LeakyRelu(x, alpha=0.0)

    def target(self, op: Op, x: Val) -> Any:
        return op.ThresholdedRelu(x, alpha=0.0)


class CancelNeg(Rule):
    """-(-x) -> x"""

    def source(self, op: Op, x: Val) -> Any:
        return op.Neg(op.Neg(x))

    def target(self, op: Op, x: Val) -> Any:
        return x


def by_graph(seconds: Callable[[Graph], float], base: SearchNode) -> Compare:
    """Comparisons of graphs whose seconds are known."""

    def compare(against: SearchNode | None, found: SearchNode) -> Ratio:
        median = seconds((against or base).state.graph) / seconds(found.state.graph)
        return Ratio(median, median * 0.99, median * 1.01)

    return compare


def made(base: SearchNode, *rules: str) -> SearchNode:
    """The node after one substitution of each rule."""
    for rule in rules:
        (match,) = [m for m in base.state.candidates if m.rule.name == rule]
        cost = base.cost + match.delta
        base = SearchNode(
            base.state.apply(match), extend(base.path, match, base.state.edit(match), cost), cost
        )
    return base


def test_selection_without_a_rule_does_not_keep_a_loss_that_prepared_for_it() -> None:
    """Then greedy search finds a cheaper graph, and the sweeps that were kept are made there, too."""
    proto = model("agraph (float[4] x, float[4] z) => (float[4] y) { a = Max(x, z)\n y = Relu(a) }")
    rules = (SwapMax(), ReplaceReluByLeakyRelu(), ReplaceLeakyReluByThresholdedRelu())
    modelled = Weighted(LeakyRelu=3.0, ThresholdedRelu=0.1)
    truth = Weighted(LeakyRelu=3.0, ThresholdedRelu=4.0)
    base = start(proto, rules, modelled)
    best = made(base, "ReplaceReluByLeakyRelu", "ReplaceLeakyReluByThresholdedRelu")

    def seconds(graph: Graph) -> float:
        (maximum,) = [n for n in graph.nodes() if n.op == "Max"]
        return truth.cost(graph) + (0.0 if maximum.inputs[0] == graph.inputs[1] else 10.0)

    swaps = Surveyed({"SwapMax": 1.0}, {})
    selection = select(
        base, [best], by_graph(seconds, base), searching(modelled), time.monotonic() + 60, survey=swaps
    )
    without = "the best proposal + SwapMax - ReplaceLeakyReluByThresholdedRelu"
    (trial,) = [t for t in selection.trials if t.proposal == without]
    assert trial.ratio.median == 5.0 / 2.0  # the maximum and its threshold, over the maximum and relu


def test_selection_without_a_rule_tries_what_it_has_not_tried() -> None:
    """What is cheaper by the model was measured already: without what costs time where it stands."""
    proto = model(
        "agraph (float[2,3,4] x) => (float[2,3,4] y) {"
        " a = Transpose<perm=[0,2,1]>(x)\n b = Relu(a)\n c = Transpose<perm=[0,2,1]>(b)\n"
        " d = Neg(c)\n y = Neg(d) }"
    )
    modelled = Weighted(Max=0.1)
    base = start(proto, (*RULES, CancelNeg(), ReplaceReluByMax()), modelled)
    best = made(base, "PushTransposeThroughRelu", "CancelTransposes", "CancelNeg", "ReplaceReluByMax")

    def seconds(graph: Graph) -> float:
        ops = sorted(n.op for n in graph.nodes() if not n.const)
        return 1.0 if ops == ["Relu", "Transpose", "Transpose"] else 5.0

    loses = Surveyed({}, {"ReplaceReluByMax": -1.0})
    selection = select(
        base, [best], by_graph(seconds, base), searching(modelled), time.monotonic() + 60, survey=loses
    )
    assert [t.proposal for t in selection.trials if t.accepted][:1] == [
        "the best proposal - ReplaceReluByMax"
    ]


def test_selection_sweeps_the_original_though_the_best_by_model_won() -> None:
    """What the model prefers is faster than the original, and leaves nothing that the better rule matches."""
    proto = model("agraph (float[2,3] x) => (float[2,3] y) { y = Relu(x) }")
    modelled, truth = Weighted(Max=0.1), Weighted(Relu=10.0, Max=9.0, LeakyRelu=2.0)
    base = start(proto, (ReplaceReluByMax(), ReplaceReluByLeakyRelu()), modelled)
    best = greedy(base.state, base.cost, Limits()).best

    selection = select(base, [best], timed(truth, base), searching(modelled), time.monotonic() + 60)
    assert selection.trials[0].accepted
    assert selection.selected is not None
    assert [n.op for n in selection.selected.state.graph.nodes()] == ["LeakyRelu"]


class Rectify(ReplaceReluByLeakyRelu):
    """relu(x) -> leakyrelu(x), as a rule of low precision without a price."""

    unpriced = True
    family = "precision"


def test_selection_begins_with_what_has_no_price_in_low_precision() -> None:
    """What the model prefers is faster than the original, and slower than that."""
    proto = model("agraph (float[2,3] x) => (float[2,3] y) { y = Relu(x) }")
    modelled, truth = Weighted(Max=0.1), Weighted(Relu=10.0, Max=9.0, LeakyRelu=2.0)
    base = start(proto, (ReplaceReluByMax(), Rectify()), modelled)
    best = greedy(base.state, base.cost, Limits()).best

    selection = select(base, [best], timed(truth, base), searching(modelled), time.monotonic() + 60)
    assert [(t.proposal, t.against, t.accepted) for t in selection.trials[:2]] == [
        ("the original + Rectify", "the original", True),
        ("the best proposal", "the original + Rectify", False),
    ]
    assert selection.selected is not None
    assert [n.op for n in selection.selected.state.graph.nodes()] == ["LeakyRelu"]


class Threshold(ReplaceLeakyReluByThresholdedRelu):
    """leakyrelu(x, 0) -> thresholdedrelu(x, 0), as a rule of low precision without a price."""

    unpriced = True
    family = "precision"


def test_selection_begins_with_what_applies_only_behind_that() -> None:
    """The first rule alone is slower."""
    proto = model("agraph (float[2,3] x) => (float[2,3] y) { y = Relu(x) }")
    truth = Weighted(Relu=10.0, LeakyRelu=20.0, ThresholdedRelu=2.0)
    base = start(proto, (Rectify(), Threshold()), Weighted())

    selection = select(base, [base], timed(truth, base), searching(Weighted()), time.monotonic() + 60)
    first = selection.trials[0]
    assert (first.proposal, first.accepted) == ("the original + Rectify + Threshold", True)
    assert selection.selected is not None
    assert [n.op for n in selection.selected.state.graph.nodes()] == ["ThresholdedRelu"]


class ThresholdAfter(Threshold):
    """The same, for graphs to which the other rule was applied."""

    swept_after = ("Rectify",)


def test_a_rule_that_follows_another_is_not_swept_without_it() -> None:
    truth = Weighted(Relu=10.0, LeakyRelu=20.0, ThresholdedRelu=2.0)
    for operator, expected in [("Relu", "ThresholdedRelu"), ("LeakyRelu<alpha=0.0>", "LeakyRelu")]:
        proto = model(f"agraph (float[2,3] x) => (float[2,3] y) {{ y = {operator}(x) }}")
        base = start(proto, (Rectify(), ThresholdAfter()), Weighted())
        selection = select(base, [base], timed(truth, base), searching(Weighted()), time.monotonic() + 60)
        graph = (selection.selected or base).state.graph
        assert [n.op for n in graph.nodes()] == [expected]


class Surveyed:
    """A survey whose result is known, and the rules whose candidates it was asked for."""

    def __init__(self, ahead: dict[str, float], back: dict[str, float]) -> None:
        self.ahead, self.back = ahead, back
        self.asked: list[list[str]] = []

    def candidates(self, found: SearchNode, rules: Sequence[str]) -> dict[str, float]:
        self.asked.append(sorted(rules))
        return self.ahead

    def steps(self, found: SearchNode) -> dict[str, float]:
        return self.back


def test_selection_begins_without_what_costs_time_where_it_stands() -> None:
    proto = model(
        "agraph (float[2,3,4] x) => (float[2,3,4] y) {"
        " a = Transpose<perm=[0,2,1]>(x)\n b = Transpose<perm=[0,2,1]>(a)\n y = Relu(b) }"
    )
    modelled, truth = Weighted(Max=0.1), Weighted(Max=30.0, Transpose=10.0)
    base = start(proto, (CancelTransposes(), ReplaceReluByMax()), modelled)
    best = greedy(base.state, base.cost, Limits()).best
    assert {s.rule for s in best.trace} == {"CancelTransposes", "ReplaceReluByMax"}

    survey = Surveyed({}, {"CancelTransposes": 9.0, "ReplaceReluByMax": -20.0})
    selection = select(
        base, [best], timed(truth, base), searching(modelled), time.monotonic() + 60, survey=survey
    )
    assert selection.trials[0].proposal == "the best proposal - ReplaceReluByMax"
    assert selection.trials[0].accepted
    assert selection.selected is not None
    assert [n.op for n in selection.selected.state.graph.nodes()] == ["Relu"]


def test_drops_begin_with_what_costs_time_where_it_stands() -> None:
    """Of a best proposal that is slower for another reason than the survey says, everything is tried, in that order."""
    proto = model(
        "agraph (float[2,3,4] x) => (float[2,3,4] y) {"
        " a = Transpose<perm=[0,2,1]>(x)\n b = Transpose<perm=[0,2,1]>(a)\n y = Relu(b) }"
    )
    modelled = Weighted(Max=0.1)
    base = start(proto, (CancelTransposes(), ReplaceReluByMax()), modelled)
    best = greedy(base.state, base.cost, Limits()).best

    def proposals(back: dict[str, float]) -> list[str]:
        selection = select(
            base, [best], lambda a, b: Ratio(0.9, 0.89, 0.91), searching(modelled), time.monotonic() + 60,
            survey=Surveyed({}, back),
        )  # fmt: skip
        return [t.proposal for t in selection.trials]

    # By the model CancelTransposes weighs more: 2 against 0.9.
    best_alone = "the best proposal"
    assert proposals({})[:2] == [best_alone, f"{best_alone} - CancelTransposes"]
    # Without both it is the original.
    both = proposals({"CancelTransposes": -1.0, "ReplaceReluByMax": -2.0})
    assert both[:2] == [best_alone, f"{best_alone} - ReplaceReluByMax"]


def test_selection_begins_with_what_saves_time_where_it_stands() -> None:
    """What the model prefers gains too little to be seen; with the rules that a survey found it is."""
    proto = model(
        "agraph (float[2,3,4] x) => (float[2,3,4] y) {"
        " a = Transpose<perm=[0,2,1]>(x)\n b = Transpose<perm=[0,2,1]>(a)\n y = Relu(b) }"
    )
    modelled, truth = Weighted(), Weighted(Transpose=0.001, Relu=10.0, LeakyRelu=2.0, Max=20.0)
    base = start(proto, (CancelTransposes(), ReplaceReluByMax(), ReplaceReluByLeakyRelu()), modelled)
    best = greedy(base.state, base.cost, Limits()).best
    survey = Surveyed({"ReplaceReluByLeakyRelu": 8.0, "ReplaceReluByMax": -10.0}, {"CancelTransposes": 0.0})

    selection = select(
        base,
        [best],
        timed(truth, base),
        searching(modelled),
        time.monotonic() + 60,
        tolerance=0.5,
        survey=survey,
    )
    assert selection.trials[0].proposal == "the best proposal + ReplaceReluByLeakyRelu"
    assert selection.trials[0].accepted
    assert selection.selected is not None
    assert [n.op for n in selection.selected.state.graph.nodes()] == ["LeakyRelu"]
    assert survey.asked[0] == ["ReplaceReluByLeakyRelu", "ReplaceReluByMax"]


@pytest.mark.parametrize("tidied", ["the best by the model", "the original"])
def test_what_costs_time_where_it_stands_does_not_tidy(tidied: str) -> None:
    """A rule that was dropped does not come back with those that clear away what a sweep leaves behind."""
    proto = model(
        "agraph (float[2,3,4] x) => (float[2,3,4] y) {"
        " a = Transpose<perm=[0,2,1]>(x)\n b = Relu(a)\n y = Transpose<perm=[0,2,1]>(b) }"
    )
    modelled, truth = Weighted(Max=0.1), Weighted(Max=30.0, Transpose=10.0)
    base = start(proto, (PushTransposeThroughRelu(), CancelTransposes(), ReplaceReluByMax()), modelled)
    best = greedy(base.state, base.cost, Limits()).best
    assert {s.rule for s in best.trace} == {"ReplaceReluByMax"}

    ahead = {"PushTransposeThroughRelu": 5.0} if tidied == "the best by the model" else {}
    selection = select(
        base, [best], timed(truth, base), searching(modelled), time.monotonic() + 60, tolerance=0.5,
        tidying=frozenset({"CancelTransposes", "ReplaceReluByMax"}),
        survey=Surveyed(ahead, {"ReplaceReluByMax": -20.0}),
    )  # fmt: skip
    assert selection.selected is not None
    assert [n.op for n in selection.selected.state.graph.nodes()] == ["Relu"]


def test_what_was_measured_to_cost_time_does_not_tidy() -> None:
    proto = model(
        "agraph (float[2,3,4] x) => (float[2,3,4] y) {"
        " a = Transpose<perm=[0,2,1]>(x)\n b = Transpose<perm=[0,2,1]>(a)\n c = Transpose<perm=[0,2,1]>(b)\n"
        " d = Relu(c)\n y = Transpose<perm=[0,2,1]>(d) }"
    )
    modelled, truth = Weighted(Max=0.1), Weighted(Max=30.0, Transpose=10.0)
    base = start(proto, (PushTransposeThroughRelu(), CancelTransposes(), ReplaceReluByMax()), modelled)
    best = greedy(base.state, base.cost, Limits()).best
    restricted = searching(modelled)

    def search(found: SearchNode, rules: frozenset[str]) -> SearchNode:
        better = restricted(found, rules)
        state = RewriteState.start(better.state.graph, base.state.library, base.state.delta)
        return replace(better, state=state)

    selection = select(
        base, [best], timed(truth, base), search, time.monotonic() + 60, tolerance=0.5,
        tidying=frozenset({"CancelTransposes", "ReplaceReluByMax"}),
    )  # fmt: skip
    assert selection.selected is not None
    assert [n.op for n in selection.selected.state.graph.nodes()] == ["Relu"]


@pytest.mark.parametrize("known", [-1.0, 1.0], ids=["costs time", "saves time"])
def test_sweeps_that_save_time_where_they_stand_come_first(known: float) -> None:
    base = start(model("agraph (float[2,3] x) => (float[2,3] y) { y = Relu(x) }"), ALTERNATIVES, Weighted())
    selection = select(
        base,
        [],
        lambda a, b: Ratio(0.9, 0.89, 0.91),
        lambda f, rules: f,
        time.monotonic() + 60,
        tolerance=0.5,
        survey=Surveyed({"ReplaceReluByLeakyRelu": known}, {}),
    )
    expected = ["ReplaceReluByLeakyRelu", "ReplaceReluByMax"]
    assert [t.proposal for t in selection.trials] == (expected if known > 0 else expected[::-1])


def test_selection_gives_nothing_up_for_what_an_open_interval_says() -> None:
    """A comparison just before the deadline has hardly a round: its median alone is no reason."""
    proto = model(
        "agraph (float[2,3,4] x) => (float[2,3,4] y) {"
        " a = Transpose<perm=[0,2,1]>(x)\n b = Transpose<perm=[0,2,1]>(a)\n y = Relu(b) }"
    )
    modelled = Weighted(Max=0.1)
    base = start(proto, (CancelTransposes(), ReplaceReluByMax()), modelled)
    best = greedy(base.state, base.cost, Limits()).best

    def compare(against: SearchNode | None, found: SearchNode) -> Ratio:
        return Ratio(1.5, 1.4, 1.6) if against is None else Ratio(1.04, 0.0, float("inf"))

    selection = select(base, [best], compare, searching(modelled), time.monotonic() + 60)
    assert selection.selected is best
    assert selection.trials[0].accepted
    assert len(selection.trials) > 1
    assert not any(t.accepted for t in selection.trials[1:])


@pytest.mark.parametrize(
    ("both", "one", "chosen"), [(0.99, 0.98, 2), (0.98, 0.99, 1), (0.99, None, 2), (None, 0.99, 1)]
)
def test_selection_leaves_what_noise_hides_to_the_last_measurement(
    both: float | None, one: float | None, chosen: int
) -> None:
    """Both Relus replaced, or one of them: neither is faster for sure, and None is slower for sure."""
    proto = model("agraph (float[2,3] x) => (float[2,3] y) { a = Relu(x)\n b = Neg(a)\n y = Relu(b) }")
    modelled = Weighted(Max=0.1)
    base = start(proto, (ReplaceReluByMax(),), modelled)
    best = greedy(base.state, base.cost, Limits()).best
    second = greedy(base.state, base.cost, Limits(1)).best

    def replaced(found: SearchNode) -> int:
        return sum(n.op == "Max" for n in found.state.graph.nodes())

    def compare(against: SearchNode | None, found: SearchNode) -> Ratio:
        median = both if replaced(found) == 2 else one
        return Ratio(0.9, 0.89, 0.91) if median is None or against is not None else Ratio(median, 0.9, 1.1)

    selection = select(base, [best, second], compare, searching(modelled), time.monotonic() + 60)
    assert not any(t.accepted for t in selection.trials)
    assert selection.selected is not None
    assert replaced(selection.selected) == chosen


def test_selection_of_what_is_undecided_beside_something_slower() -> None:
    """A mend of the best that may be as fast as the best says nothing of the original."""
    proto = model(
        "agraph (float[2,3,4] x) => (float[2,3,4] y) {"
        " a = Transpose<perm=[0,2,1]>(x)\n b = Transpose<perm=[0,2,1]>(a)\n y = Relu(b) }"
    )
    modelled = Weighted(Max=0.1)
    base = start(proto, (CancelTransposes(), ReplaceReluByMax()), modelled)
    best = greedy(base.state, base.cost, Limits()).best

    def compare(against: SearchNode | None, found: SearchNode) -> Ratio:
        return Ratio(0.9, 0.89, 0.91) if against is None else Ratio(1.0, 0.9, 1.1)

    selection = select(base, [best], compare, searching(modelled), time.monotonic() + 60)
    assert any(t.ratio.high > 1.01 for t in selection.trials)
    assert selection.selected is None


def test_selection_keeps_only_what_is_faster_twice() -> None:
    """One session in three is luckily placed and 5% faster than any other: nothing else differs."""
    base = start(layered(2), (PushTransposeThroughRelu(), CancelTransposes(), Collect()), Weighted())
    sessions = 0

    def compare(against: SearchNode | None, found: SearchNode) -> Ratio:
        nonlocal sessions
        sessions += 1
        median = 1.05 if sessions % 3 == 1 else 1.0
        return Ratio(median, median - 0.01, median + 0.01)

    best = greedy(base.state, base.cost, Limits()).best
    selection = select(base, [best], compare, lambda f, rules: greedy_from(f), time.monotonic() + 60)
    assert selection.selected is None
    assert sessions > len(selection.trials) >= 1


def greedy_from(found: SearchNode) -> SearchNode:
    better = greedy(found.state, found.cost, Limits()).best
    path = found.path
    state = found.state
    for step in better.trace:
        match = state.find(step.key)
        assert match is not None
        path = extend(path, match, state.edit(match), step.cost)
        state = state.apply(match)
    return SearchNode(state, path, better.cost)


def test_selection_of_nothing() -> None:
    base = start(valley(), RULES, Weighted())
    selection = select(
        base,
        [],
        lambda a, b: Ratio(0.9, 0.89, 0.91),
        lambda f, rules: f,
        time.monotonic() + 60,
        tolerance=0.1,
    )
    assert selection.selected is None
    assert [t.accepted for t in selection.trials] == [False]


@pytest.mark.parametrize("late", [False, True])
def test_where_there_is_no_time_to_measure_the_last_measurement_decides(late: bool) -> None:
    proto = model("agraph (float[2,3] x) => (float[2,3] y) { y = Relu(x) }")
    modelled = Weighted(Max=0.1)
    base = start(proto, (ReplaceReluByMax(),), modelled)
    best = greedy(base.state, base.cost, Limits()).best
    deadline = time.monotonic() + (-1.0 if late else 60.0)
    slower = Ratio(0.9, 0.89, 0.91)
    selection = select(base, [best], lambda a, b: slower, searching(modelled), deadline)
    assert bool(selection.trials) is not late
    assert (selection.selected is best) is late
    # But not the original against itself.
    assert select(base, [base], lambda a, b: slower, searching(modelled), deadline).selected is None


def test_what_looks_faster_is_not_measured_again_when_time_is_over() -> None:
    proto = model("agraph (float[2,3] x) => (float[2,3] y) { y = Relu(x) }")
    modelled = Weighted(Max=0.1)
    base = start(proto, (ReplaceReluByMax(),), modelled)
    best = greedy(base.state, base.cost, Limits()).best
    deadline = time.monotonic() + 0.2
    compared: list[SearchNode] = []

    def compare(against: SearchNode | None, found: SearchNode) -> Ratio:
        compared.append(found)
        time.sleep(max(0.0, deadline - time.monotonic()) + 0.01)
        return Ratio(1.2, 1.1, 1.3)

    assert select(base, [best], compare, searching(modelled), deadline).selected is best
    assert len(compared) == 1
