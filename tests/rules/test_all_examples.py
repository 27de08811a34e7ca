"""Every example of a rule, and what it becomes, in ONNX Runtime."""

from __future__ import annotations

import numpy as np
import onnx
import pytest
from onnx.reference import ReferenceEvaluator

from rewrite_rules import LIBRARY
from tests.rules.harness import applies, assert_equivalent, model, random_feeds, refuses, rewritten, run
from tests.rules.results import known
from tests.runtime import recent
from xrlflow.rewrite import AnyRule

pytestmark = pytest.mark.corpus

# Rules that write for TVM what ONNX Runtime need not have.
_FOR_TVM = frozenset(("expansion",))
# Their matrices are as large as what is multiplied out can be.
_LARGE = frozenset(("AssociateMatMulsRight",))
RULES = [r for r in LIBRARY if r.family not in _FOR_TVM and r.name not in _LARGE]
# Rules with examples of operators that an old ONNX Runtime lacks.
_RECENT = ("PushSliceThroughNormalization",)
EXAMPLES = [
    pytest.param(r, i, marks=[recent] if r.name in _RECENT else [])
    for r in RULES
    for i in range(len(r.examples))
]
# Rules of which inputs do not tell whether the left side runs at all.
_NOT_RUN = ("DropFailingBranch",)


@pytest.mark.parametrize(("rule", "number"), EXAMPLES, ids=lambda v: getattr(v, "name", str(v)))
def test_examples(rule: AnyRule, number: int) -> None:
    proto = model(rule.examples[number])
    if not known()[rule.name][number]:
        refuses(rule, proto)
    elif rule.name in _NOT_RUN:
        rewritten(rule, proto)
    elif rule.rounds_once:
        _gives_what_onnx_says(rule, proto)
    elif _indices(proto):
        after, _ = rewritten(rule, proto)
        assert_equivalent(proto, after, {k: v % 2 for k, v in random_feeds(proto).items()})
    else:
        applies(rule, proto)


def _indices(proto: onnx.ModelProto) -> bool:
    """Whether the only input are indices, of tables of two rows at least."""
    inputs = [v for v in proto.graph.input if v.name == "i"]
    return bool(inputs) and all(np.issubdtype(v.dtype, np.integer) for v in random_feeds(proto).values())


def _gives_what_onnx_says(rule: AnyRule, proto: onnx.ModelProto) -> None:
    """ONNX Runtime leaves out roundings to float16 itself, of the original and of the result, and not the same ones."""
    after, _ = rewritten(rule, proto)
    for seed in range(3):
        feeds = random_feeds(proto, seed)
        for expected, found in zip(ReferenceEvaluator(proto).run(None, feeds), run(after, feeds)):
            assert (found.dtype, found.shape) == (expected.dtype, expected.shape)
            if found.dtype.kind == "f":
                np.testing.assert_allclose(found, expected, rtol=2**-9, atol=2**-9)
            else:
                np.testing.assert_array_equal(found, expected)
