"""What rules make of their examples does not change unseen."""

from __future__ import annotations

import pytest

from rewrite_rules import LIBRARY
from tests.rules.results import graphs_of, known, result_of
from xrlflow.ir import text
from xrlflow.prover.proof import library_of
from xrlflow.rewrite import AnyRule

pytestmark = pytest.mark.proof

RULES = [r for r in LIBRARY if r.examples or r.near_misses]


@pytest.mark.parametrize("rule", RULES, ids=lambda r: r.name)
def test_results_are_those_that_are_known(rule: AnyRule) -> None:
    library = library_of(rule)
    wanted = known().get(rule.name, [])
    graphs = graphs_of(rule)
    assert len(wanted) == len(graphs), "run `python -m tests.rules.results`, and look at what changes"
    for graph, result in zip(graphs, wanted, strict=True):
        assert result_of(graph, library) == result, text(graph)


def test_all_that_is_known_is_of_a_rule() -> None:
    assert set(known()) == {r.name for r in RULES}
