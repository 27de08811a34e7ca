"""What a report says of a measurement: nothing that was not measured, no interval that is none."""

from __future__ import annotations

import math

import pytest

from xrlflow.backends.results import RepeatedComparison, SpeedUp, Verdict
from xrlflow.report import bounds, compared_with, no_search, nothing_chosen
from xrlflow.search import Ratio, Selection, Trial

DECIDED, FIGURE = SpeedUp(1.05, 1.02, 1.08), SpeedUp(1.04, 1.03, 1.05)


def trial(ratio: Ratio) -> Trial:
    return Trial("a", "the original", ratio, False)


def test_nothing_measured_faster_is_said_only_of_what_was_measured() -> None:
    slower, refused = Ratio(0.9, 0.89, 0.91), Ratio(0.0, 0.0, 0.0)
    assert nothing_chosen(None) == "no cheaper graph was found"
    assert nothing_chosen(Selection(None, ())) == "nothing was found to change"
    assert nothing_chosen(Selection(None, ()), late="it was late") == "it was late"
    assert nothing_chosen(Selection(None, (), interrupted=True)).startswith("interrupted before")
    assert nothing_chosen(Selection(None, (trial(refused),))) == "nothing that was found could be measured"
    measured = nothing_chosen(Selection(None, (trial(slower), trial(slower), trial(refused))))
    assert measured == "nothing measured faster: 2 graphs were compared with another"


def test_who_had_no_time_to_search_learns_what_took_it() -> None:
    said = no_search(5.4, 60.0, {"import": 0.3, "calibrate": 4.1, "inputs": 1.0})
    assert said.startswith(
        "there was no time to search: 5 of 60 s had passed, most of it for operators, and the rest"
    )
    assert said.endswith("(give it more with --time-limit)")


def test_an_interval_that_tells_nothing_is_called_so() -> None:
    restless = "1.151x [0.680, 1.950] (the machine was too restless to say)"
    assert str(SpeedUp(1.151, 0.68, 1.95)) == restless
    assert restless in compared(Verdict.NOT_FASTER, SpeedUp(1.151, 0.68, 1.95), None)
    assert str(SpeedUp(1.9, 1.2, 3.0)) == "1.900x [1.200, 3.000]", "it is faster, by whatever it is"
    assert str(SpeedUp(1.0, 0.9, 1.1)) == "1.000x [0.900, 1.100]"


def compared(verdict: Verdict | None, decided: SpeedUp | None, figure: SpeedUp | None) -> str:
    return compared_with(RepeatedComparison(figure, None, None, None, 1.0, 2, verdict, decided))


@pytest.mark.parametrize(
    ("verdict", "decided", "figure", "said"),
    [
        (Verdict.FASTER, DECIDED, FIGURE, "measured 1.040x [1.030, 1.050]"),
        (Verdict.FASTER, DECIDED, None, "decided at 1.050x [1.020, 1.080]; there was no time"),
        (Verdict.NOT_FASTER, SpeedUp(1.01, 0.9, 1.1), None, "measured 1.010x [0.900, 1.100]: not clearly faster"),
        (Verdict.NOT_FASTER, SpeedUp(0.9, 0.8, 1.1), None, "measured 0.900x [0.800, 1.100]: not faster"),
        (Verdict.REFUTED, DECIDED, SpeedUp(0.9, 0.8, 0.95), "but 0.900x [0.800, 0.950] when it was measured again"),
        (Verdict.TOO_FEW, None, None, "not decided in the time: too few measurements"),
        (None, None, FIGURE, "measured 1.040x [1.030, 1.050]"),
        (None, None, None, "too few measurements for a figure"),
    ],
)  # fmt: skip
def test_what_the_last_comparison_says(
    verdict: Verdict | None, decided: SpeedUp | None, figure: SpeedUp | None, said: str
) -> None:
    assert said in compared(verdict, decided, figure)


@pytest.mark.parametrize("open_", [SpeedUp(1.1, 0.0, math.inf), Ratio(1.1, 0.0, math.inf)])
def test_an_interval_that_could_not_be_formed_is_not_printed(open_: SpeedUp | Ratio) -> None:
    assert bounds("speedup", open_) == {"speedup_low": None, "speedup_high": None}
    assert bounds("speedup", None) == {"speedup_low": None, "speedup_high": None}
    assert bounds("a", FIGURE) == {"a_low": 1.03, "a_high": 1.05}
    if isinstance(open_, SpeedUp):
        assert str(open_) == "1.100x (too few measurements for an interval)"
