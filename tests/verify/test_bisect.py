"""Bisection finds the step that was planted."""

import numpy as np
import onnx
import pytest

from tests.verify.models import changed, mlp, normal
from xrlflow.verify import NotASubstitution, NotRepeatable, Reference, blame


@pytest.mark.parametrize("n", [1, 2, 3, 7, 64])
def test_every_planted_step_is_found(n: int) -> None:
    for planted in range(n):
        made: list[int] = []

        def graph_at(k: int, made: list[int] = made) -> int:
            made.append(k)
            return k

        assert blame(graph_at, n, lambda k, planted=planted: k <= planted) == planted
        assert len(made) <= 2 + np.ceil(np.log2(n))


def test_with_several_breaking_steps_one_of_them_is_named() -> None:
    wrong = {3, 4, 9, 10, 11, 12}  # broken by step 2, repaired by step 4, broken by step 8
    result = blame(lambda k: k, 12, lambda k: k not in wrong)
    assert result in (2, 8)


def test_what_no_step_caused_is_not_blamed_on_one() -> None:
    with pytest.raises(NotASubstitution):
        blame(lambda k: k, 5, lambda k: False)
    with pytest.raises(NotASubstitution):
        blame(lambda k: k, 0, lambda k: False)
    with pytest.raises(NotRepeatable, match="is right"):
        blame(lambda k: k, 5, lambda k: True)


def test_on_models() -> None:
    """Steps 0 to 4 each change a weight by what rounding might, step 3 by more."""

    def graph_at(k: int) -> onnx.ModelProto:
        weight = normal(32, 8)
        for step in range(k):
            weight = changed(weight, (step, step), 0.05 if step == 3 else 1e-8)
        return mlp(w2=weight)

    reference = Reference.of(mlp(), samples=1)
    step = blame(graph_at, 5, lambda m: reference.check(m).verified)
    assert step == 3
    text = reference.check(graph_at(5)).message(f"substitution {step}")
    assert "output 'y'" in text
    assert "substitution 3" in text
