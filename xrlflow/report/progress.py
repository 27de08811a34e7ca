"""Progress on a terminal."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from rich.console import Console

# listener(phase, done, total, note): the current phase, how many of its `total` steps are done, and a note.
Listener = Callable[[str, int, int, str], None]


def time_left(limit: float, elapsed: float) -> str:
    """The remaining seconds of a limit, as text for people."""
    remaining = limit - elapsed
    return (
        f"at most {remaining:.0f} s left"
        if remaining > 0
        else f"{elapsed:.0f} s, the limit is over: it ends now"
    )


@contextmanager
def progress(
    enabled: bool, limit: float | None = None, console: Console | None = None
) -> Iterator[Listener | None]:
    """A listener that shows each phase, its best result so far, and the rest of `limit` seconds (None: the time of each
    phase), on standard error or the given `console`. None if not `enabled`."""
    if not enabled:
        yield None
        return
    from rich.console import Console
    from rich.progress import BarColumn, Progress, ProgressColumn, Task, TextColumn, TimeElapsedColumn
    from rich.text import Text

    begin = time.monotonic()
    running: list[str] = []

    class RemainingTime(ProgressColumn):
        """A column that shows the remaining time of the whole optimisation next to the running phase, and next to other
        phases the time that they took."""

        def render(self, task: Task) -> Text:
            if limit is not None and running and task.description == running[-1]:
                return Text(time_left(limit, time.monotonic() - begin))
            return TimeElapsedColumn().render(task)

    bar = Progress(
        TextColumn("{task.description}", markup=False),
        BarColumn(bar_width=24),
        TextColumn("{task.fields[note]}", markup=False),
        RemainingTime(),
        console=console if console is not None else Console(stderr=True),
        transient=True,
    )
    with bar:
        tasks: dict[str, int] = {}

        def listen(phase: str, done: int, total: int, note: str) -> None:
            if phase not in tasks:
                tasks[phase] = bar.add_task(phase, total=total or None, note="")
            if running and running[-1] != phase:
                bar.stop_task(tasks[running.pop()])  # type: ignore[arg-type]
            running[:] = [phase]
            bar.update(tasks[phase], completed=done, total=total or None, note=note)  # type: ignore[arg-type]

        yield listen
