"""Every rule of the library is proven, and its mutants are rejected."""

from __future__ import annotations

import pytest

from rewrite_rules import LIBRARY
from xrlflow.rewrite import AnyRule
from xrlflow.verify.rules import prove

# Of a rule's mutants at least so many are rejected, and all but two at most if they are few.
_LEAST_REJECTED = 0.7


@pytest.mark.parametrize("rule", LIBRARY, ids=lambda r: r.name)
def test_proven(rule: AnyRule) -> None:
    found = prove(rule)
    assert found.proven, "\n".join(found.failures)
    assert not found.unexplained
    assert found.mutants_rejected >= min(_LEAST_REJECTED * found.mutants, found.mutants - 2), found.survivors
    if rule.proof == "field":
        assert found.bound < 1e-12
    else:
        assert rule.relies_on, "say which property of a function the rule relies on"


def test_means_of_nothing_do_not_tell_operators_apart() -> None:
    """With this seed some reduced dimension is 0."""
    (rule,) = [r for r in LIBRARY if r.name == "PushTransposeThroughReduce"]
    assert not prove(rule, seed=1).unexplained
