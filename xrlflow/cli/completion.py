"""Shell completion for the values of options."""

from __future__ import annotations

from collections.abc import Callable, Iterable

from xrlflow.options import Values

Complete = Callable[[str], list[str]]


def completing(values: Values) -> Complete:
    """A completer for an option with one value."""
    return lambda incomplete: _starting(values, incomplete)


def completing_last(values: Values) -> Complete:
    """A completer for the last of several values, separated by commas."""

    def complete(incomplete: str) -> list[str]:
        before, comma, last = incomplete.rpartition(",")
        return [f"{before}{comma}{value}" for value in _starting(values, last)]

    return complete


def _starting(values: Values, beginning: str) -> list[str]:
    names: Iterable[str] = values() if callable(values) else values
    return [value for value in names if value.startswith(beginning)]
