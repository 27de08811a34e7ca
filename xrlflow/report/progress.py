"""Progress on a terminal."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

# listener(phase, done, total, note): the current phase and how far it is.
Listener = Callable[[str, int, int, str], None]


@contextmanager
def progress(enabled: bool) -> Iterator[Listener | None]:
    """A progress bar on standard error; None if not `enabled`."""
    if not enabled:
        yield None
        return
    from rich.console import Console
    from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn

    bar = Progress(
        TextColumn("{task.description}"),
        BarColumn(),
        TextColumn("{task.fields[note]}"),
        TimeElapsedColumn(),
        console=Console(stderr=True),
        transient=True,
    )
    with bar:
        tasks: dict[str, int] = {}

        def listen(phase: str, done: int, total: int, note: str) -> None:
            if phase not in tasks:
                tasks[phase] = bar.add_task(phase, total=total or None, note="")
            bar.update(tasks[phase], completed=done, total=total or None, note=note)  # type: ignore[arg-type]

        yield listen
