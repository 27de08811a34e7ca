"""The program: its commands, and how signals end it."""

from __future__ import annotations

import signal
from collections.abc import Callable, Mapping
from types import FrameType
from typing import NoReturn

import typer

from xrlflow.cli import batch, learning, models, passes, rules

COMMANDS: Mapping[str, Callable[..., None]] = {
    "optimize": models.optimize,
    "optimize-all": batch.optimize_all,
    "compare": models.compare,
    "report": models.report_of,
    "view": models.view,
    "rules": rules.rules,
    "verify": models.verify,
    "bench": models.bench,
    "run": models.run,
    "tune": learning.tune,
    "train": learning.train,
}
"""The commands by name, in the order of the help."""
PASS_COMMANDS: Mapping[str, Callable[..., None]] = {
    "list": passes.list_passes,
    "optimize": passes.optimize_passes,
    "train": passes.train_passes,
    "bench": passes.bench_passes,
}


def _program(commands: Mapping[str, Callable[..., None]], help: str) -> typer.Typer:
    made = typer.Typer(
        help=help, no_args_is_help=True, add_completion=False, pretty_exceptions_enable=False,
        rich_markup_mode=None,
    )  # fmt: skip
    for name, command in commands.items():
        made.command(name)(command)
    return made


app = _program(
    COMMANDS,
    "Make ONNX models faster: verified graph substitutions, chosen by search, measured on this machine.",
)
app.add_typer(
    _program(
        PASS_COMMANDS,
        "Order XLA's HLO passes better than XLA does. Needs the extra xla; agents need the extra train, too.",
    ),
    name="passes",
)


def main() -> None:
    """Run the command line. An error that the user can correct prints one line and gives exit code 2.

    SIGTERM ends the program after its clean-up with exit code 143, SIGHUP (a closed terminal) with 129.
    """
    for number in (signal.SIGTERM, getattr(signal, "SIGHUP", signal.SIGTERM)):
        if signal.getsignal(number) is signal.SIG_DFL:
            signal.signal(number, _end)
    try:
        app()
    except _Terminated:
        typer.echo("xrlflow: error: terminated", err=True)
        raise


class _Terminated(SystemExit):
    pass


def _end(number: int, frame: FrameType | None) -> NoReturn:
    """Raise _Terminated, so that all running code cleans up. A second signal does not interrupt the clean-up."""
    signal.signal(number, signal.SIG_IGN)
    raise _Terminated(128 + number)
