"""Logs of a training run: scalars for TensorBoard and a progress bar on the terminal."""

from __future__ import annotations

import os
from collections.abc import Mapping
from types import TracebackType
from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from rich.progress import Progress, TaskID
    from torch.utils.tensorboard import SummaryWriter
    from typing_extensions import Self


class Log(Protocol):
    """Receives the scalars of a training run."""

    def scalars(self, values: Mapping[str, float], step: int) -> None: ...

    def close(self) -> None: ...


class TensorBoard:
    """Writes event files to a folder. `tensorboard --logdir FOLDER` shows them."""

    def __init__(self, folder: str | os.PathLike[str], since: int | None = None) -> None:
        """`since`: the first step of a resumed run. TensorBoard hides the events that an earlier run wrote from this
        step on."""
        from torch.utils.tensorboard import SummaryWriter

        self._writer: SummaryWriter = SummaryWriter(os.fspath(folder), purge_step=since)

    def scalars(self, values: Mapping[str, float], step: int) -> None:
        for name, value in values.items():
            self._writer.add_scalar(name, value, step)
        self._writer.flush()

    def close(self) -> None:
        self._writer.close()


class Terminal:
    """Shows a progress bar with some of the scalars. Prints one line per step if standard error is no terminal."""

    def __init__(
        self, total: int, formats: Mapping[str, str], done: int = 0, title: str = "training"
    ) -> None:
        """`total`: the number of all steps; `done`: the steps before a resumed run; `formats`: format strings of
        scalars by name, such as "return {:.2f}"."""
        from rich.console import Console
        from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

        console = Console(stderr=True)
        self._console = console
        self._formats = dict(formats)
        self._total, self._title = total, title
        self._bar: Progress | None = None
        self._task: TaskID | None = None
        if console.is_terminal:
            self._bar = Progress(
                TextColumn("{task.description}"),
                BarColumn(bar_width=20),
                MofNCompleteColumn(),
                TextColumn("{task.fields[note]}"),
                TimeRemainingColumn(),
                console=console,
            )
            self._bar.start()
            self._task = self._bar.add_task(title, total=total, completed=done, note="")

    def scalars(self, values: Mapping[str, float], step: int) -> None:
        note = "  ".join(
            pattern.format(values[name]) for name, pattern in self._formats.items() if name in values
        )
        if self._bar is not None and self._task is not None:
            self._bar.update(self._task, completed=step, note=note)
        else:
            self._console.print(
                f"{self._title} {step}/{self._total}  {note}", highlight=False, soft_wrap=True
            )

    def close(self) -> None:
        if self._bar is not None:
            self._bar.stop()


class Logs:
    """Sends scalars to several logs. As a context manager, it closes all of them."""

    def __init__(self, *logs: Log) -> None:
        self._logs = logs

    def scalars(self, values: Mapping[str, float], step: int) -> None:
        for log in self._logs:
            log.scalars(values, step)

    def close(self) -> None:
        for log in self._logs:
            log.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()
