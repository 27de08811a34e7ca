"""The command-line program: its commands, and how it ends."""

from __future__ import annotations

import io
import os
import signal
import sys
import threading
import warnings
from collections.abc import Callable, Mapping
from types import FrameType
from typing import TYPE_CHECKING, Annotated, NoReturn

import typer

from xrlflow.cli import batch, doctor, learning, models, passes, plot, rules
from xrlflow.cli.failures import output_failed
from xrlflow.cli.help import GroupedCommand
from xrlflow.common.text import printable

if TYPE_CHECKING:
    from typing_extensions import Buffer

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
    "plot": plot.plot,
    "doctor": doctor.doctor,
}
"""The commands by name, in the order in which the help lists them."""
PASS_COMMANDS: Mapping[str, Callable[..., None]] = {
    "list": passes.list_passes,
    "optimize": passes.optimize_passes,
    "train": passes.train_passes,
    "bench": passes.bench_passes,
}


def _program(
    commands: Mapping[str, Callable[..., None]], help: str, *, completion: bool = False
) -> typer.Typer:
    program = typer.Typer(
        help=help, no_args_is_help=True, add_completion=completion, pretty_exceptions_enable=False,
        rich_markup_mode=None,
    )  # fmt: skip
    for name, command in commands.items():
        program.command(name, cls=GroupedCommand)(command)
    return program


app = _program(
    COMMANDS,
    "Make ONNX models faster: verified graph substitutions, chosen by search, measured on this machine.",
    completion=True,
)
app.add_typer(
    _program(
        PASS_COMMANDS,
        "Order XLA's HLO passes better than XLA does. Needs the extra xla; agents need the extra train, too.",
    ),
    name="passes",
)


def _print_version(requested: bool) -> None:
    if requested:
        from xrlflow import __version__

        typer.echo(f"xrlflow {__version__}")
        raise typer.Exit


@app.callback()
def _everywhere(
    version: Annotated[
        bool,
        typer.Option("--version", callback=_print_version, is_eager=True, help="Print the version and exit."),
    ] = False,
) -> None:
    pass


def main() -> None:
    """Run the command line. `ExitCode` lists the exit codes.

    After SIGTERM the program cleans up and ends with exit code 143, after SIGHUP (a closed terminal) with 129.
    """
    _open_descriptors()
    _watch_output()
    warnings.showwarning = _show_warning
    for number in (signal.SIGTERM, getattr(signal, "SIGHUP", signal.SIGTERM)):
        if signal.getsignal(number) is signal.SIG_DFL:
            signal.signal(number, _end)
    try:
        try:
            app()
        except ImportError as error:  # what a module in C makes of an exception while it is loaded
            if isinstance(error.__cause__, _Terminated):
                raise error.__cause__ from None
            raise
    except _Terminated as end:
        typer.echo("xrlflow: error: terminated", err=True)
        _leave_threads(end)
        raise
    except SystemExit as end:
        _leave_threads(end)
        raise
    finally:
        if sys.stdout is not None:
            sys.stdout.flush()  # here, because nobody would handle an error at exit


def _leave_threads(end: SystemExit) -> None:
    """End at once if threads run for which Python would wait: the compilation of a kernel cannot be stopped."""
    # If this module was never imported (its import takes time or fails), no such threads exist.
    interrupts = sys.modules.get("xrlflow.backends.interrupts")
    if interrupts is not None and any(t.name.startswith(interrupts.COMPILING) for t in threading.enumerate()):
        for stream in (sys.stdout, sys.stderr):
            if stream is not None:
                stream.flush()
        os._exit(end.code if isinstance(end.code, int) else int(end.code is not None))


def _open_descriptors() -> None:
    """Connect closed standard descriptors to /dev/null. Otherwise the next file that is opened might get the number of
    standard error, and messages of libraries would be written to it."""
    for number in range(3):
        try:
            os.fstat(number)
        except OSError:
            os.open(os.devnull, os.O_RDWR)  # gets the lowest number that is free
    if sys.stderr is None:
        sys.stderr = io.TextIOWrapper(io.FileIO(2, "w", closefd=False), line_buffering=True)


class _Watched(io.FileIO):
    """Standard output that ends the program when it cannot be written (see `output_failed`)."""

    def write(self, data: Buffer, /) -> int:
        try:
            return super().write(data)
        except OSError as error:
            output_failed(error, self.fileno())


def _watch_output() -> None:
    """Handle errors of standard output here: libraries would end the program with exit code 1, or ignore the errors."""
    out = sys.stdout
    if isinstance(out, io.TextIOWrapper) and out is sys.__stdout__:
        watched = io.BufferedWriter(_Watched(out.fileno(), "wb", closefd=False))
        sys.stdout = io.TextIOWrapper(
            watched, encoding=out.encoding, errors=out.errors, line_buffering=out.line_buffering,
            write_through=out.write_through,
        )  # fmt: skip


def _show_warning(
    message: Warning | str, category: type[Warning], filename: str, lineno: int, file: object = None,
    line: str | None = None,
) -> None:  # fmt: skip
    """Print a warning in the style of errors, without its position in the code."""
    typer.echo(f"xrlflow: warning: {printable(message)}", err=True)


class _Terminated(SystemExit):
    pass


def _end(number: int, frame: FrameType | None) -> NoReturn:
    """Raise _Terminated, so that all running code cleans up. A second signal does not interrupt the clean-up."""
    signal.signal(number, signal.SIG_IGN)
    raise _Terminated(128 + number)
