"""What the rules of the library say that they may lose, they do lose: without saying so they are not proven."""

from __future__ import annotations

import pytest

from rewrite_rules import LIBRARY
from xrlflow.prover.proof import Proof
from xrlflow.rewrite import AnyRule

_NAMED = {rule.name: rule for rule in LIBRARY}

# Rules of which the proof finds many graphs where they lose sizes that do not fit, or indices out of range.
_LOSING = {
    "sizes": (
        "MergeConcatOfPieces",
        "MergeStackOfPieces",
        "PullBinaryOutOfSplit",
        "PushSliceIntoConcat",
        "RemoveEmptyParts",
        "ReplaceSplitBySlice",
    ),
    "indices": ("PushSliceThroughMovement", "RemoveExpandBeforeBroadcast"),
}


def _changed(rule: AnyRule, **attributes: object) -> AnyRule:
    kind = type(rule)
    made: AnyRule = type(kind.__name__, (kind,), {"__doc__": kind.__doc__, **attributes})()
    return made


def _failure(rule: AnyRule) -> str:
    """What the proof finds, with the first seed that finds something."""
    for seed in range(4):
        proof = Proof(rule, seed)
        proof.gather()
        if proof.failures:
            return proof.failures[0]
    return ""


@pytest.mark.parametrize("name", [r.name for r in LIBRARY if r.may_round_inputs])
def test_it_rounds_inputs(name: str) -> None:
    assert "digits cancel" in _failure(_changed(_NAMED[name], may_round_inputs=False))


@pytest.mark.parametrize(("what", "name"), [(w, n) for w, names in _LOSING.items() for n in names])
def test_it_loses_errors(what: str, name: str) -> None:
    rule = _NAMED[name]
    left = tuple(w for w in rule.may_lose_errors if w != what)
    assert f"does not ({what})" in _failure(_changed(rule, may_lose_errors=left))
