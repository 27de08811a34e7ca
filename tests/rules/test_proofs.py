"""Every rule of the library is proven, and its mutants are rejected.

A rule whose certificate stands is not proven again: nothing that its proof depends on has changed (`certificates`).
"""

from __future__ import annotations

import os

import pytest

from rewrite_rules import LIBRARY
from tests.rules import certificates
from tests.runtime import recent
from xrlflow.prover import prove
from xrlflow.rewrite import AnyRule

pytestmark = pytest.mark.proof

ALL = "XRLFLOW_PROVE_ALL"
"""The environment variable with which certificates count for nothing."""


@recent
@pytest.mark.parametrize("rule", LIBRARY, ids=lambda r: r.name)
def test_proven(rule: AnyRule) -> None:
    if ALL in os.environ or not certificates.stands(rule):
        _, wrong = certificates.proven(rule, certificates.seeds(rule))
        assert not wrong


def test_means_of_nothing_do_not_tell_operators_apart() -> None:
    """With this seed some reduced dimension is 0."""
    (rule,) = [r for r in LIBRARY if r.name == "PushTransposeThroughReduce"]
    assert not prove(rule, seed=1).unexplained
