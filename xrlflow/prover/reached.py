"""Records which lines of a rule's code run for a graph. A change of a line can show only in graphs for which it
runs.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Any

# A file and a line number.
Line = tuple[str, int]
_LINES: dict[Line, Line] = {}


@contextmanager
def lines_run(home: str) -> Iterator[set[Line]]:
    """Collect the lines of package `home` that this thread runs while the context lasts."""
    lines: set[Line] = set()
    files: dict[str, bool] = {}

    def of_home(frame: FrameType) -> bool:
        file = frame.f_code.co_filename
        if file not in files:
            files[file] = str(frame.f_globals.get("__name__", "")).partition(".")[0] == home
        return files[file]

    def within(frame: FrameType, event: str, argument: Any) -> Callable[..., Any]:
        line = (frame.f_code.co_filename, frame.f_lineno)
        lines.add(_LINES.setdefault(line, line))
        return within

    def called(frame: FrameType, event: str, argument: Any) -> Callable[..., Any] | None:
        return within if of_home(frame) else None

    before = sys.gettrace()
    sys.settrace(called)
    try:
        yield lines
    finally:
        sys.settrace(before)
