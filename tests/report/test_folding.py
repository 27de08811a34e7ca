"""Repeated layers are found, and levels stay small enough to look at."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np
import pytest

from xrlflow.report.page.folding import CROWDED, Interval, fold


def everything(parts: Sequence[Interval]) -> Iterator[Interval]:
    for part in parts:
        yield part
        yield from everything(part.parts)


def check(parts: Sequence[Interval], start: int, end: int) -> None:
    """Parts are in order, apart from each other, inside what they are parts of, and not too many."""
    at, single = start, 0
    for part in parts:
        assert at <= part.start < part.end <= end
        single += part.start - at
        at = part.end
        check(part.parts, part.start, part.end)
    # Equal layers may be as many as there are: they are behind one stack.
    repeated = len({(p.end - p.start, len(p.parts)) for p in parts}) == 1 and not single
    assert repeated or single + (end - at) + len(parts) <= CROWDED


def test_equal_layers_are_one_part() -> None:
    layer = [1, 2, 3, 4, 5]
    (stack,) = fold([9, 8, *layer * 7, 7, 6])
    assert (stack.start, stack.end, stack.times) == (2, 37, 7)
    assert [(p.start, p.end, p.times) for p in stack.parts] == [(s, s + 5, 1) for s in range(2, 37, 5)]


def test_layers_in_layers() -> None:
    block = [1, 2, 3, 4] * 3 + [5, 6]
    (stack,) = fold([0, *block * 4])
    assert stack.times == 4
    for part in stack.parts:
        (inner,) = part.parts
        assert (inner.start - part.start, inner.end - part.start, inner.times) == (0, 12, 3)


def test_the_repetition_that_saves_most_comes_first() -> None:
    small, large = [1, 2, 3, 4], [5, 6, 7, 8, 9, 10, 11, 12, 13, 14]
    found = fold([*small * 2, *large * 3])
    assert [(p.end - p.start, p.times) for p in found] == [(8, 2), (30, 3)]


def test_a_chain_of_one_operator_is_no_layer() -> None:
    assert fold([1] * 30) == ()


def test_a_crowded_level_has_sections() -> None:
    parts = fold(range(1000))
    assert all(part.times == 1 for part in everything(parts))
    assert (parts[0].start, parts[-1].end) == (0, 1000)
    check(parts, 0, 1000)


@pytest.mark.parametrize("seed", range(5))
def test_any_sequence(seed: int) -> None:
    rng = np.random.default_rng(seed)
    pieces = [rng.integers(0, 6, rng.integers(4, 30)) for _ in range(4)]
    kinds = np.concatenate([np.tile(pieces[i], rng.integers(1, 9)) for i in rng.integers(0, 4, 8)])
    parts = fold(kinds.tolist())
    check(parts, 0, len(kinds))
    for part in everything(parts):
        if part.times > 1:
            rows = kinds[part.start : part.end].reshape(part.times, -1)
            assert (rows == rows[0]).all()
