"""What a proof changes in the rule language for a while."""

from __future__ import annotations

import pytest

from tests.rules.harness import model
from xrlflow.onnxio import load
from xrlflow.prover.hooks import watched, without
from xrlflow.rewrite import Captures, Refused, Val, require


def refuse() -> None:
    require(False, "first")
    require(False, "second")


def refusal() -> Refused:
    with pytest.raises(Refused) as caught:
        refuse()
    return caught.value


def test_a_condition_is_dropped_for_a_while() -> None:
    first = refusal()
    assert first.site == (__file__, refuse.__code__.co_firstlineno + 1)
    with without(first.site):
        second = refusal()
        assert (str(second), second.site) == ("second", (__file__, first.site[1] + 1))
    assert str(refusal()) == "first"


def test_a_condition_that_nothing_calls_is_not_dropped() -> None:
    with pytest.raises(LookupError, match="no_such_file"), without(("no_such_file.py", 1)):
        pass


def test_numbers_are_watched_for_a_while() -> None:
    graph = load(model("agraph (float[4,8] x, float[8,8] w) => (float[4,8] z) { z = MatMul(x, w) }")).graph
    value = Val(graph, graph.inputs[0], graph.type(graph.inputs[0]))
    captures = Captures({"axis": 1})
    seen: list[object] = []

    def show(number: object) -> object:
        seen.append(number)
        return number

    with watched(show):
        assert (value.shape, value.rank, captures.axis) == ((4, 8), 2, 1)
    assert seen == [(4, 8), (4, 8), 2, 1]
    assert value.size(1) == 8
    assert len(seen) == 4
