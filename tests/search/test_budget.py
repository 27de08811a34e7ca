"""The time limit, shared out: for models of all speeds, and limits of all lengths."""

from __future__ import annotations

from dataclasses import replace

import pytest

from xrlflow.search import Budget

LATENCIES = [1e-4, 3e-3, 0.02, 0.1, 0.5, 2.0]
LIMITS = [1.0, 10.0, 60.0, 600.0]


@pytest.mark.parametrize("latency", LATENCIES)
@pytest.mark.parametrize("limit", LIMITS)
def test_everything_has_its_place_within_the_limit(latency: float, limit: float) -> None:
    budget = Budget(100.0, limit, latency, loading=10 * latency)
    assert budget.begin < budget.search_until <= budget.select_until <= budget.end <= budget.until
    assert budget.until == 100.0 + limit
    assert budget.end - budget.select_until == pytest.approx(budget.ending)
    assert budget.begin_comparing_until < budget.select_until
    # What fits into the limit has its time after the selection.
    wanted = budget.verification + budget.comparison
    most = 0.7 if latency > 0.3 else 0.5
    assert budget.ending == pytest.approx(min(wanted, most * (budget.end - budget.begin)))


def test_a_fast_model_takes_no_minute() -> None:
    assert Budget(0.0, 60.0, 3e-3).end < 20.0
    assert Budget(0.0, 60.0, 0.1).end == 60.0
    # A user who gives more time gets more, and one who gives less no more than that.
    assert Budget(0.0, 600.0, 3e-3).end == pytest.approx(10 * Budget(0.0, 60.0, 3e-3).end)
    assert Budget(0.0, 5.0, 3e-3).end == 5.0


@pytest.mark.parametrize("latency", LATENCIES)
@pytest.mark.parametrize("limit", [*LIMITS, 120.0])
@pytest.mark.parametrize("compiling", [0.0, 17.0])
def test_training_leaves_the_time_for_all_else(latency: float, limit: float, compiling: float) -> None:
    budget = Budget(100.0, limit, latency, 2 * latency, compiling=compiling, reserved=compiling)
    until = budget.train_until
    if until is None:
        return
    assert budget.train_in_search_until < until <= 100.0 + limit / 2
    rest, least = replace(budget, begin=until, limit=budget.until - until), replace(budget, limit=60.0)
    assert rest.useful >= budget.useful
    assert rest.end - rest.begin >= least.end - least.begin - 1e-9
    selecting, at_least = (max(b.select_until - b.search_until, 0.0) for b in (rest, least))
    assert selecting >= at_least - 1e-9


def test_training_that_was_asked_for_has_half_of_a_limit_that_is_long_enough() -> None:
    assert Budget(0.0, 60.0, 3e-3).train_until == 30.0
    assert Budget(0.0, 60.0, 3e-3, compiling=17.0, reserved=17.0).train_until == pytest.approx(26.0)
    assert Budget(0.0, 600.0, 0.15).train_until == 300.0
    # With half of it, or three tenths, there would be no time for kernels.
    assert Budget(0.0, 120.0, 3e-3, 0.05, compiled=True, compiling=10.0, reserved=10.0).train_until == 24.0
    for short in (Budget(0.0, 60.0, 0.1), Budget(0.0, 10.0, 3e-3)):
        assert short.train_until is None
        assert short.train_in_search_until == pytest.approx(0.18 * short.end)


@pytest.mark.parametrize("latency", LATENCIES)
@pytest.mark.parametrize("limit", LIMITS)
@pytest.mark.parametrize("passed", [0.0, 0.2, 0.5])
def test_kernels_leave_the_time_for_a_short_search(latency: float, limit: float, passed: float) -> None:
    """Also where much of the limit has passed before: it is what is left that is shared out."""
    reserved = 0.35 * limit
    budget = Budget(100.0, limit * (1 - passed), latency, latency, compiling=reserved, reserved=reserved)
    assert budget.select_until <= budget.compile_until
    assert budget.select_until - budget.begin >= min(4.0, budget.compile_until - budget.begin)
    if limit == 60.0 and latency <= 0.1:
        assert budget.begin_comparing_until - budget.begin >= 4.0


def test_what_is_too_short_to_compare_anything_is_of_no_use() -> None:
    assert Budget(0.0, 60.0, 0.1).useful
    assert Budget(0.0, 30.0, 3e-3).useful
    assert not Budget(0.0, 20.0, 0.1, 0.1).useful
    assert not Budget(0.0, 1.0, 3e-3).useful


def test_what_is_not_known_takes_the_limit() -> None:
    assert Budget(0.0, 60.0).end == 60.0


def test_no_comparison_begins_that_would_end_too_late() -> None:
    """A model of two seconds: eight runs and two sessions."""
    budget = Budget(0.0, 60.0, 2.0, 1.0)
    assert budget.begin_comparing_until == pytest.approx(budget.select_until - 18.0)


def test_verification_begins_only_if_it_is_over_in_time() -> None:
    budget = Budget(0.0, 60.0, 0.5, 0.0)
    assert budget.verification == 10.5
    assert budget.can_verify(52.5)
    assert not budget.can_verify(52.6)
    assert Budget(0.0, 60.0, 0.5, verifying=False).can_verify(59.0)


@pytest.mark.parametrize("now", [1.0, 1800.0, 3599.0])
def test_an_interrupt_leaves_the_time_to_compare_but_no_more_than_there_was(now: float) -> None:
    budget = Budget(0.0, 3600.0, 0.02, 0.3)
    hurried = budget.hurry(now)
    assert hurried.end == hurried.until <= budget.until
    assert hurried.until - now <= 100.0


def test_the_last_comparison_has_what_is_left() -> None:
    """Of a model of 3 ms, for which 17 of the 60 s are enough on a quiet machine."""
    budget = Budget(0.0, 60.0, 3e-3, 0.02)
    assert budget.final(budget.select_until) == 60.0 - budget.select_until
    assert budget.final(59.0) == 1.0


def test_slow_models_are_not_selected_but_compared() -> None:
    assert Budget(0.0, 60.0, 1.0).select_until == pytest.approx(18.0)
    assert Budget(0.0, 60.0, 0.1).select_until == pytest.approx(30.0)


def test_compiled_models_take_longer_to_load() -> None:
    plain, compiled = Budget(0.0, 60.0, 3e-3), Budget(0.0, 60.0, 3e-3, compiled=True)
    assert compiled.comparison - plain.comparison == pytest.approx(4.0)
    assert compiled.hurry(1.0).compiled


def test_layers_of_a_quantised_model_take_time_to_verify() -> None:
    plain, quantised = Budget(0.0, 60.0, 0.02), Budget(0.0, 60.0, 0.02, quantised=True)
    assert quantised.verification > 2 * plain.verification
    assert quantised.ending > plain.ending + 6.0
    # A fast one may use more of its limit.
    assert Budget(0.0, 60.0, 3e-3, quantised=True).end > Budget(0.0, 60.0, 3e-3).end
    assert Budget(0.0, 60.0, 3e-3, verifying=False, quantised=True).end == Budget(0.0, 60.0, 3e-3).end
    # Verification leaves time for the processes that decide.
    slow = Budget(0.0, 45.0, 0.07, 0.1, quantised=True)
    assert slow.ending == pytest.approx(slow.verification + slow.comparison / 3)
    assert slow.ending > 22.5
    # Sessions of a large model count, but a busy machine on which one is slow to load leaves time for the rest.
    large, busy = (Budget(0.0, 60.0, 0.02, loading, quantised=True) for loading in (0.4, 3.0))
    assert large.verification > quantised.verification + 12 * 0.4
    assert busy.verification == pytest.approx(replace(busy, quantised=False).verification + 0.3 * 60.0)
