"""A certificate falls with everything that its proof depends on, and with nothing else."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from types import FrameType
from typing import Any

import pytest

from rewrite_rules import LIBRARY
from tests.rules import certificates
from tests.rules.certificates import digest, faults, seeds
from tests.rules.dependencies import PACKAGES, ROOT, Sources, versions
from tests.runtime import recent
from xrlflow.prover import prove
from xrlflow.rewrite import AnyRule

pytestmark = pytest.mark.proof


def rule(name: str) -> AnyRule:
    (found,) = (r for r in LIBRARY if r.name == name)
    return found


@cache
def sources() -> Sources:
    return Sources()


def edited(module: str, before: str, after: str) -> Sources:
    """The sources with one passage of a module changed."""
    text = sources().path(module).read_text()
    assert text.count(before) == 1, text.count(before)
    return Sources(texts={module: text.replace(before, after)})


@pytest.mark.parametrize(
    ("name", "module", "before", "after"),
    [
        pytest.param(
            "FuseReduceMean", "rewrite_rules.reduction",
            'require(c.rank <= rank, "it may broadcast")', 'require(c.rank < rank, "it may broadcast")', id="its class",
        ),
        pytest.param(
            "FuseReduceMean", "rewrite_rules.reduction",
            "{ s = ReduceSum(x, [-1]) y = Div(s, 4.0) }", "{ s = ReduceSum(x, [-1]) y = Div(s, 5.0) }",
            id="its examples",
        ),
        pytest.param(
            "RemoveIdentity", "rewrite_rules.identity",
            "def target(self, op: Op, x: Val) -> Any:\n        return x\n\n\nclass RemoveIdentity",
            "def target(self, op: Op, x: Val) -> Any:\n        return (x)  , \n\n\nclass RemoveIdentity", id="its base",
        ),
        pytest.param(
            "MergeMovement", "rewrite_rules.access", "_VIEW = Price(0, 0, 1)", "_VIEW = Price(0, 0, 2)",
            id="a constant of a helper",
        ),
        pytest.param(
            "RemoveIdentity", "xrlflow.prover.cases", "_MOST_TRIALS = 40", "_MOST_TRIALS = 41", id="the prover",
        ),
        pytest.param(
            "RemoveIdentity", "xrlflow.ops.eval_norm", "EPSILON = f32(1e-5)", "EPSILON = f32(1e-6)",
            id="an operator in a table",
        ),
        pytest.param(
            "RemoveIdentity", "xrlflow.ops.evaluate",
            'with np.errstate(all="ignore"):\n        return _evaluated(op, attrs',
            'with np.errstate():\n        return _evaluated(op, attrs', id="evaluation",
        ),
        pytest.param(
            "RemoveIdentity", "xrlflow.ir.dims", "LARGEST = 2**31 - 1", "LARGEST = 2**30 - 1", id="sizes",
        ),
        pytest.param(
            "RemoveIdentity", "xrlflow.rewrite.rule", "super().__init_subclass__()\n", "pass\n", id="the rewriter",
        ),
        pytest.param(
            "FuseReduceMean", "rewrite_rules.reduction", "from math import prod", "from math import fsum as prod",
            id="an import",
        ),
        pytest.param(
            "FuseReduceMean", "rewrite_rules.reduction", "import FLOAT, WIDE", "import WIDE as FLOAT, FLOAT as WIDE",
            id="an import under another name",
        ),
        pytest.param(
            "FuseReduceMean", "xrlflow.rewrite", "    profitable,\n    require,",
            "    require as profitable, profitable as require,", id="an import of a package",
        ),
        pytest.param(
            "RemoveIdentity", "xrlflow.ops.evaluate", "import numpy as np", "import numpy.ma as np",
            id="an imported module",
        ),
        pytest.param(
            "RemoveIdentity", "xrlflow.ops.eval_norm", "EPSILON = f32(1e-5)",
            "_ = setattr(np, 'add', np.subtract)\nEPSILON = f32(1e-5)", id="a call of setattr",
        ),
        pytest.param(
            "RemoveIdentity", "xrlflow.ops.eval_norm", "EPSILON = f32(1e-5)",
            "EPSILON = f32(1e-6)\nEPSILON = f32(1e-5)", id="a name that is bound twice",
        ),
    ],
)  # fmt: skip
def test_a_certificate_falls(name: str, module: str, before: str, after: str) -> None:
    now = edited(module, before, after)
    assert digest(rule(name), now, versions()) != digest(rule(name), sources(), versions())


@pytest.mark.parametrize("changed", ["numpy", "onnxruntime", "python"])
def test_it_falls_with_a_version(changed: str) -> None:
    now = {**versions(), changed: "0"}
    assert digest(LIBRARY[0], sources(), now) != digest(LIBRARY[0], sources(), versions())


def test_it_falls_with_what_is_demanded(monkeypatch: pytest.MonkeyPatch) -> None:
    before = digest(LIBRARY[0], sources(), versions())
    monkeypatch.setattr(certificates, "_LEAST_REJECTED", 0.8)
    assert digest(LIBRARY[0], sources(), versions()) != before


@pytest.mark.parametrize(
    ("module", "before", "after"),
    [
        ("rewrite_rules.reduction", '"""sum(x) / n -> mean(x) ', '"""The sum(x) / n -> mean(x) '),
        (
            "rewrite_rules.reduction",
            "        expected = count if",
            "        # a comment\n        expected = count if",
        ),
        ("rewrite_rules.identity", "return op.Identity(x)", "return op.Identity(op.Identity(x))"),
        ("xrlflow.pipeline.confirm", "_FINAL_AT_LEAST = 3.0", "_FINAL_AT_LEAST = 4.0"),
        ("rewrite_rules.reduction", "from math import prod", "from math import floor, prod"),
    ],
    ids=["a docstring", "a comment", "another rule", "the pipeline", "an import that it does not use"],
)
def test_a_certificate_stands(module: str, before: str, after: str) -> None:
    now, chosen = edited(module, before, after), rule("FuseReduceMean")
    assert digest(chosen, now, versions()) == digest(chosen, sources(), versions())


@recent
@pytest.mark.parametrize("name", ["RemoveIdentity", "FuseReduceMean"])
def test_a_proof_runs_nothing_else(name: str) -> None:
    """Every function of ours that a proof enters is in a unit that its digest has."""
    chosen = rule(name)
    known = sources().prover | sources().of_rule(type(chosen).__module__, name)
    ran = {unit for unit in units_run(lambda: prove(chosen, seed=0)) if unit not in known}
    assert not ran, sorted((module, shown(module, at)) for module, at in ran)


def units_run(run: Any) -> Iterator[tuple[str, int]]:
    """The units whose functions are entered."""
    entered: set[tuple[str, int]] = set()

    def enter(frame: FrameType, event: str, _: Any) -> None:
        if event == "call":
            entered.add((frame.f_code.co_filename, frame.f_code.co_firstlineno))

    before = sys.getprofile()
    sys.setprofile(enter)
    try:
        run()
    finally:
        sys.setprofile(before)
    for file, line in entered:
        path = Path(file)
        if (
            not path.is_absolute()
            or ROOT not in path.parents
            or path.relative_to(ROOT).parts[0] not in PACKAGES
        ):
            continue
        parts = path.relative_to(ROOT).with_suffix("").parts
        name = ".".join(parts[:-1] if parts[-1] == "__init__" else parts)
        module = sources().module(name)
        assert module is not None
        for at, statement in enumerate(module.statements):
            first = min([statement.lineno, *(d.lineno for d in getattr(statement, "decorator_list", []))])
            if first <= line <= (statement.end_lineno or line):
                yield name, at


def shown(module: str, at: int) -> str:
    return sources().text((module, at))[:120]


def test_what_is_wrong_with_a_proof_is_told() -> None:
    class Wrong(type(rule("RemoveIdentity"))):  # type: ignore[misc]
        """relu(x) -> x."""

        def source(self, op: Any, x: Any) -> Any:
            return op.Relu(x)

    assert faults(Wrong(), prove(Wrong(), seed=0))


def test_unlucky_seeds_are_tried() -> None:
    assert seeds(rule("PushReshapesDown")) == (0, 1, 2)
