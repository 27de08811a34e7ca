"""Every rule of the library is proven, and its mutants are rejected."""

from __future__ import annotations

import pytest

from rewrite_rules import LIBRARY
from tests.runtime import recent
from xrlflow.prover import prove
from xrlflow.rewrite import AnyRule

# Of a rule's mutants at least so many are rejected, and all but two at most if they are few.
_LEAST_REJECTED = 0.7


# Rules with which a demand was not met, or a mutant survived, by the luck of a seed; and seeds for each.
_ONCE_UNLUCKY: dict[str, tuple[int, ...]] = {
    "AssociateMatMulsRight": (1, 3),
    "AssociateSharedMatMuls": (2, 4),
    "FoldAffineIntoReaders": (1, 3),
    "FoldBatchNormIntoConvTranspose": (2, 4),
    "FoldBatchNormIntoMatMul": (1, 4),
    "FoldGemmIntoGemm": (3, 4),
    "FuseAttention": (2, 4),
    "FuseMomentsLayerNormalization": (1, 2),
    "FuseTransposeIntoRightOfMatMul": (2, 3),
    "FuseTransposedScale": (2, 4),
    "FuseUnrolledGRU": (1,),
    "MergeFlattenedTranspose": (1, 3),
    "MergeStackOfPieces": (2, 4),
    "PullProductOutOfConcatOfColumns": (3, 4),
    "PushKeyWeightsIntoQueries": (1, 3),
    "PushMonotoneThroughMax": (1, 4),
    "PushReshapeThroughMatMul": (2, 4),
    "PushReshapeUp": (1, 3),
    "PushReshapesDown": (1, 2),
    "PushReshapesUp": (1, 4),
    "PushSliceIntoAttention": (2, 4),
    "PushSliceThroughBroadcast": (2, 3),
    "PushSliceThroughNormalization": (1, 3),
    "PushSliceThroughWindows": (1, 2),
    "PushWeightsOutOfAttention": (3, 4),
    "ReplaceAttentionByMultiHead": (1, 4),
    "SplitDilatedConvIntoPhases": (1, 3),
    "SplitGemm": (2, 3),
}


def prove_and_check(rule: AnyRule, seed: int) -> None:
    found = prove(rule, seed)
    assert found.proven, "\n".join(found.failures)
    assert not found.unexplained
    assert found.mutants_rejected >= min(_LEAST_REJECTED * found.mutants, found.mutants - 2), found.survivors
    if rule.proof == "field":
        assert found.bound < 1e-12
    else:
        assert rule.relies_on, "say which property of a function the rule relies on"


@recent
@pytest.mark.parametrize("rule", LIBRARY, ids=lambda r: r.name)
def test_proven(rule: AnyRule) -> None:
    prove_and_check(rule, seed=0)


@recent
@pytest.mark.parametrize(("name", "seed"), [(n, s) for n, seeds in _ONCE_UNLUCKY.items() for s in seeds])
def test_proven_whatever_the_seed(name: str, seed: int) -> None:
    (rule,) = [r for r in LIBRARY if r.name == name]
    prove_and_check(rule, seed)


def test_means_of_nothing_do_not_tell_operators_apart() -> None:
    """With this seed some reduced dimension is 0."""
    (rule,) = [r for r in LIBRARY if r.name == "PushTransposeThroughReduce"]
    assert not prove(rule, seed=1).unexplained
