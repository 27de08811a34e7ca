"""Shows the progress of a batch, as bars on a terminal or as lines."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

from xrlflow.batch.batch import Listener, Progress
from xrlflow.common.text import printable, shortened

if TYPE_CHECKING:
    from rich.console import Console


def duration(seconds: float) -> str:
    """A rounded duration, for estimates: 40 s, 12 min, 3 h 20 min."""
    if seconds < 60:
        return f"{seconds:.0f} s"
    minutes = round(seconds / 60)
    return f"{minutes} min" if minutes < 60 else f"{minutes // 60} h {minutes % 60} min"


def line(progress: Progress) -> str:
    """The row of the job that has just finished, in one line."""
    row = progress.row
    assert row is not None
    speedup = "" if row.speedup is None else f"{row.speedup:.2f} times as fast, "
    text = f"{speedup}{row.seconds:.0f} s" if row.done else f"failed: {row.error}"
    remaining = f" (about {duration(progress.left)} left)" if progress.left else ""
    return f"{progress.done + progress.failed}/{progress.total} {printable(row.name)}: {printable(text)}{remaining}"


def lines(progress: Progress) -> None:
    """Print the row of each finished job to standard error."""
    if progress.row is not None:
        print(line(progress), file=sys.stderr, flush=True)


@contextmanager
def bars(console: Console | None = None) -> Iterator[Listener]:
    """A listener that shows the progress, the remaining time, and what each running job does, on standard error or on
    `console`. A line remains for each failed job.
    """
    from rich import progress as rich
    from rich.console import Console

    with rich.Progress(
        rich.TextColumn("{task.description}", markup=False),
        rich.BarColumn(bar_width=24),
        rich.TextColumn("{task.fields[note]}", markup=False),
        console=console if console is not None else Console(stderr=True),
        transient=True,
    ) as bar:
        all_models = bar.add_task("models", total=None, note="")
        running: dict[str, rich.TaskID] = {}

        def listen(progress: Progress) -> None:
            failures = f"{progress.failed} failed, " if progress.failed else ""
            remaining = "" if progress.left is None else f"about {duration(progress.left)} left"
            at = progress.done + progress.failed
            note = f"{at}/{progress.total}, {failures}{remaining}".rstrip(", ")
            bar.update(all_models, completed=at, total=progress.total, note=note)
            if progress.row is not None:
                if (task := running.pop(progress.row.name, None)) is not None:
                    bar.remove_task(task)
                if not progress.row.done:
                    bar.console.print(line(progress), markup=False, highlight=False)
            elif progress.name:
                if progress.name not in running:
                    name = shortened(printable(progress.name), 40, 20)
                    running[progress.name] = bar.add_task(f"  {name}", total=None, note="")
                bar.update(running[progress.name], note=shortened(printable(progress.doing), 60))

        yield listen
