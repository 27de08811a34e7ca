"""Searches for orders: what they find, at what price, and that they repeat themselves."""

from __future__ import annotations

import time
from collections.abc import Callable

import pytest

from tests.levels import whole
from tests.passes.toy import VALLEY, Words
from xrlflow.passes import Applied, Comparison, Metric, Module, run
from xrlflow.passes.searches import (
    Budget,
    BudgetUsedUp,
    Explorer,
    Meter,
    Node,
    Order,
    beam,
    evolve,
    fixed,
    follow,
    greedy,
    random,
    reducing,
    refined,
    tree,
)

pytestmark = pytest.mark.learns

Search = Callable[..., Order]
SEARCHES: dict[str, Search] = {
    "random": random,
    "greedy": greedy,
    "beam": beam,
    "tree": tree,
    "evolve": evolve,
    "refined": lambda compiler, module, budget, seed=0: refined(
        compiler, module, ("noise", "tidy", "merge"), budget, seed
    ),
}
WORDS = ("d", VALLEY, "aaaaaa", "bbbbbb", "dadbbcacd", "e")


@pytest.mark.parametrize("name", SEARCHES)
@pytest.mark.parametrize("word", WORDS)
def test_an_order_leads_to_its_module_and_is_never_worse(name: str, word: str) -> None:
    compiler = Words()
    module = compiler.load(word)
    for steps in (0, 1, 5, 100):
        order = SEARCHES[name](compiler, module, Budget(steps, horizon=8), seed=1)
        assert order.initial == len(word)
        assert order.value == order.module.summary.operations <= order.initial
        assert order.steps <= steps
        assert len(order.passes) <= 8
        assert run(compiler, module, order.passes) == order.module
        for end in range(len(order.passes)):
            # It ends at its best prefix, and no pass of it is without effect.
            before = run(compiler, module, order.passes[:end])
            assert before.summary.operations > order.value
            assert compiler.apply(before, order.passes[end]).changed


@pytest.mark.parametrize("name", SEARCHES)
def test_equal_seeds_give_equal_orders(name: str) -> None:
    module = Words().load("dbbdbbddb")
    orders = [SEARCHES[name](Words(), module, Budget(60, 10), seed=3) for _ in range(2)]
    assert orders[0].passes == orders[1].passes
    assert orders[0].curve == orders[1].curve


@pytest.mark.parametrize("name", whole(["beam", "tree", "evolve", "random"], ("beam", "evolve", "random")))
def test_a_valley_is_crossed_where_greedy_stays(name: str) -> None:
    compiler = Words()
    module = compiler.load(VALLEY)
    assert greedy(compiler, module, Budget(400, 8)).passes == ()
    for seed in range(3):
        order = SEARCHES[name](compiler, module, Budget(400, 8), seed)
        assert order.module.digest == "dad"
        assert order.reduction == pytest.approx(0.25)


def test_tree_search_needs_fewer_steps_than_chance_on_a_long_way() -> None:
    """Means over seeds of what is left after equal steps."""
    compiler = Words()
    module = compiler.load("dbbdbbdd")
    left = {
        search: sum(search(compiler, module, Budget(120, 12), seed).value for seed in range(20))
        for search in (tree, random)
    }
    assert left[tree] < left[random]


def test_what_is_asked_again_costs_nothing() -> None:
    compiler = Words()
    meter = Meter(compiler, Budget(3))
    module = compiler.load("aab")
    for _ in range(5):
        assert meter.apply(module, "merge").module.digest == "ab"
    assert meter.steps == compiler.steps == 1
    assert not meter.idle(module, "merge")
    meter.apply_each(module, ["drop", "merge", "drop"])
    assert meter.idle(module, "drop")
    assert meter.steps == 2
    with pytest.raises(BudgetUsedUp):
        meter.apply_each(module, ["open", "tidy"])
    assert meter.steps == 2
    assert meter.apply(module, "open").changed
    with pytest.raises(BudgetUsedUp):
        meter.apply(module, "tidy")
    assert meter.apply(module, "merge").changed


def test_what_the_compiler_foresees_costs_nothing() -> None:
    compiler = Words()
    meter = Meter(compiler, Budget(0))
    module = compiler.load("aab")
    assert meter.idle(module, "idle")
    assert meter.apply(module, "idle") == Applied(module, False)
    assert meter.steps == compiler.steps == 0
    assert "idle" not in Explorer(meter, module, Budget(0)).open(Node(module, (), 3.0))


def test_a_round_that_the_budget_cuts_short_is_used_as_far_as_it_goes() -> None:
    order = greedy(Words(), Words().load("aab"), Budget(steps=1))
    assert order.passes == ("merge",)
    assert order.steps == 1


def test_a_search_ends_at_its_deadline() -> None:
    module = Words().load("bbbbbbbb")
    for search in SEARCHES.values():
        order = search(Words(), module, Budget(10**9, 8, deadline=time.monotonic() - 1))
        assert order.passes == ()
        assert order.steps == 0


@pytest.mark.parametrize("name", SEARCHES)
def test_a_search_ends_when_nothing_is_new(name: str) -> None:
    order = SEARCHES[name](Words(), Words().load("ab"), Budget(10**6, 3))
    assert order.steps < 200


def test_the_curve_tells_when_the_gains_came() -> None:
    order = random(Words(), Words().load("aaaabb"), Budget(200, 8), seed=0)
    steps = [step for step, _ in order.curve]
    values = [value for _, value in order.curve]
    assert steps == sorted(steps)
    assert values == sorted(values, reverse=True)
    assert order.value_at(0) == 6
    assert order.value_at(200) == order.value


def test_other_metrics() -> None:
    module = Words().load("aaab")
    by_bytes = beam(Words(), module, Budget(100, 6), metric=Metric.BYTES)
    assert by_bytes.initial == 16
    assert by_bytes.value < 16
    by_time = greedy(Words(), module, Budget(100, 6), metric=Metric.SECONDS)
    assert by_time.initial == 1.0
    assert by_time.value == pytest.approx(len(by_time.module.digest) / 4)
    # The toy counts no flops: there is nothing to reduce.
    assert greedy(Words(), module, Budget(100, 6), metric=Metric.FLOPS).reduction == 0.0


@pytest.mark.whole
def test_a_fixed_sequence_serves_several_modules() -> None:
    compiler = Words()
    modules = [compiler.load(w) for w in ("dbbd", "bb", "aad", "ddbbdd")]
    result = fixed(compiler, modules, Budget(3000, 8), seed=0)
    left = [follow(compiler, m, result.passes, Budget(20, 8)) for m in modules]
    assert [o.module.digest for o in left] == ["dad", "a", "ad", "dad"]
    assert result.ratio == pytest.approx((3 / 4 * 1 / 2 * 2 / 3 * 1 / 2) ** 0.25)
    assert result.steps <= 3000
    assert fixed(compiler, modules, Budget(3000, 8), seed=0).passes == result.passes
    # Without evolution, greedy construction would not have crossed the valley.
    assert fixed(compiler, modules, Budget(60, 8), seed=0).ratio > result.ratio
    assert fixed(compiler, modules, Budget(0, 8)).passes == ()


def test_a_budget_is_checked() -> None:
    with pytest.raises(ValueError, match="steps >= 0"):
        Budget(-1)
    with pytest.raises(ValueError, match="horizon >= 1"):
        Budget(5, 0)


def test_a_sequence_for_several_modules_goes_on_without_a_wrong_step() -> None:
    modules = [Words().load(word) for word in (VALLEY, "aaadd", "dbbd" * 2)]
    result = fixed(Words(wrong=True), modules, Budget(150, 8), seed=1)
    assert "wrong" not in result.passes
    assert result.ratio < 1.0


def test_comparisons_are_few(monkeypatch: pytest.MonkeyPatch) -> None:
    """They compile modules: the best one is compared at the quarters of a search, if it is new, and at the end."""
    asked = []

    def compare(
        self: Words, reference: Module, module: Module, seed: int = 0, inputs: object = ()
    ) -> Comparison:
        asked.append(module.digest)
        return Comparison(True, 0.0, 1.0)

    monkeypatch.setattr(Words, "compare", compare)
    for search in SEARCHES.values():
        asked.clear()
        search(Words(), Words().load("dbbdbbdbb"), Budget(60, 12), seed=2)
        assert len(asked) == len(set(asked)) <= 5


def test_the_passes_of_the_default_order_that_reduce() -> None:
    compiler = Words()
    modules = [compiler.load(word) for word in ("aab", "ddaa")]
    output: list[str] = []
    # "open" makes words longer, "drop" has nothing to do: without them no more is left.
    assert reducing(compiler, modules, say=output.append) == ("merge", "tidy")
    assert len(output) == len(compiler.passes) - 2
    assert reducing(compiler, [compiler.load("aab")]) == ("merge",)
    # What passes make possible for others counts: "bb" needs open, merge and drop.
    assert set(reducing(compiler, [compiler.load("dbbd")])) == {"merge", "open", "drop"}


def test_evolution_goes_on_from_a_sequence() -> None:
    compiler = Words()
    module = compiler.load("dbbdbbdd")
    start = ("open", "merge", "drop", "merge")
    at_once = refined(compiler, module, start, Budget(4, 8))
    assert at_once.passes == start
    for seed in range(3):
        order = refined(compiler, module, start, Budget(60, 8), seed)
        assert order.value <= at_once.value
        assert run(compiler, module, order.passes) == order.module
    assert refined(compiler, module, start, Budget(60, 8)).module.digest == "dadad"
