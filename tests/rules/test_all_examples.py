"""Every example of a rule, and what it becomes, in ONNX Runtime."""

from __future__ import annotations

import numpy as np
import onnx
import pytest

from rewrite_rules import LIBRARY
from tests.rules.harness import applies, assert_equivalent, model, random_feeds, refuses, rewritten
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
    elif _indices(proto):
        after, _ = rewritten(rule, proto)
        assert_equivalent(proto, after, {k: v % 3 for k, v in random_feeds(proto).items()})
    else:
        applies(rule, proto)


def _indices(proto: onnx.ModelProto) -> bool:
    """Whether the only input are indices, of tables of three rows at least."""
    inputs = [v for v in proto.graph.input if v.name == "i"]
    return bool(inputs) and all(np.issubdtype(v.dtype, np.integer) for v in random_feeds(proto).values())
