"""Errors that a user can correct: one line, and an exit code."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import NoReturn

import typer

from xrlflow.text import printable


def fail(message: str, code: int = 2) -> NoReturn:
    typer.echo(f"xrlflow: error: {printable(message)}", err=True)
    raise typer.Exit(code)


@contextmanager
def clear_errors() -> Iterator[None]:
    """Turn errors that a user can correct into one line."""
    from xrlflow.api import UserError, VerificationFailed

    try:
        yield
    except VerificationFailed as error:
        fail(str(error), code=1)
    except UserError as error:
        fail(str(error))
    except MemoryError:
        fail("out of memory: the model, or one of its values, is too large for this machine")
    except KeyboardInterrupt:  # commands with a partial result handle it themselves
        fail("interrupted before there was a result", code=130)
