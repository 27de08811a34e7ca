"""What is assumed of the processor, and what the report says of it."""

from __future__ import annotations

from dataclasses import replace
from unittest.mock import Mock

import pytest

from xrlflow.options import SATURATES, VNNI, Options
from xrlflow.pipeline import library
from xrlflow.pipeline.results import _notes
from xrlflow.pipeline.verifier import together
from xrlflow.verify.equivalence import Status, Verification
from xrlflow.verify.quantised import Exactness


@pytest.mark.parametrize(
    ("options", "exact", "assumed"),
    [
        (Options(), True, VNNI),
        (Options(), False, SATURATES),
        (Options(portable=True), True, SATURATES),
        (Options(portable=True, assuming=(VNNI,)), False, VNNI),
        (Options(backend="hybrid", cpu="znver3"), True, SATURATES),
    ],
)
def test_this_processor_is_tried_where_the_result_is_for_it(
    options: Options, exact: bool, assumed: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(library, "saturates", lambda: not exact)
    assuming = library.library_for(options).assuming
    assert {VNNI, SATURATES}.intersection(assuming) == {assumed}


@pytest.mark.parametrize(
    ("options", "says"),
    [(Options(), "exact on this one"), (Options(assuming=(VNNI,)), "you say that it is exact")],
)
def test_a_result_that_depends_on_the_processor_says_so(options: Options, says: str) -> None:
    context = Mock(options=options, notes=[])
    context.imported.notes, context.imported.frame.opset_import = (), ()
    finished = Mock(accepted=None, compared=None, verification=None)
    assert _notes(context, finished, {"RectifyBytes"}) == ()
    (note,) = _notes(context, finished, {"UseSignedWeights"})
    assert says in note


def test_a_size_without_judged_layers_leaves_exactness_open() -> None:
    first = Verification(Status.VERIFIED, exactness=Exactness(0, 3))
    second = replace(first, exactness=Exactness(1))
    assert together([first, second]).exactness == Exactness(1)
    assert together([first, replace(first, exactness=None)]).exactness is None
