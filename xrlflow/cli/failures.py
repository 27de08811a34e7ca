"""The ends of commands: exit codes, and one-line messages for errors that a user can correct."""

from __future__ import annotations

import enum
import os
from collections.abc import Iterator
from contextlib import contextmanager
from typing import NoReturn

import typer

from xrlflow.common.text import printable


class ExitCode(enum.IntEnum):
    """The exit codes of commands. docs/command-line.md explains them."""

    OK = 0
    NO = 1
    """The answer is no: models differ, a rule is not proven, a trace is wrong, nothing works here."""
    WRONG = 2
    """An error that the user can correct."""
    INTERRUPTED = 130
    READER_LEFT = 141
    """The program that reads standard output has ended: 128 + SIGPIPE, as with other programs."""


def fail(message: str, code: ExitCode = ExitCode.WRONG) -> NoReturn:
    typer.echo(f"xrlflow: error: {printable(message)}", err=True)
    raise typer.Exit(code)


def output_failed(error: OSError, descriptor: int) -> NoReturn:
    """End the program because standard output cannot be written. There is no message if the reason is that the reader
    of the output has ended.

    Raises SystemExit, not typer.Exit, as this function may be called at the end of the program, when output is
    flushed.
    """
    nowhere = os.open(os.devnull, os.O_WRONLY)
    os.dup2(nowhere, descriptor)  # discards what is still in buffers
    os.close(nowhere)
    if isinstance(error, BrokenPipeError):
        raise SystemExit(ExitCode.READER_LEFT)
    typer.echo(f"xrlflow: error: standard output cannot be written ({error.strerror})", err=True)
    raise SystemExit(ExitCode.WRONG)


@contextmanager
def clear_errors() -> Iterator[None]:
    """Turn errors that a user can correct into one line."""
    try:
        from xrlflow.api import UserError, VerificationFailed  # this import takes a second
    except KeyboardInterrupt:
        interrupted()
    try:
        yield
    except VerificationFailed as error:
        fail(str(error), ExitCode.NO)
    except UserError as error:
        fail(str(error))
    except MemoryError:
        fail("out of memory: the model, or one of its values, is too large for this machine")
    except OSError as error:
        from xrlflow.storage.files import is_full

        if not is_full(error):
            raise
        fail(
            f"{error.filename or 'a temporary file'}: no room is left: make some, or name another folder in TMPDIR"
        )
    except KeyboardInterrupt:  # commands with a partial result handle Ctrl-C themselves
        interrupted()


def interrupted() -> NoReturn:
    """End the program after Ctrl-C."""
    fail("interrupted before there was a result", ExitCode.INTERRUPTED)
