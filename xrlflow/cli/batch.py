"""The command on many models."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from xrlflow.cli.arguments import Arguments, AsJson, Quiet, taking, with_shapes
from xrlflow.cli.failures import ExitCode, clear_errors
from xrlflow.cli.output import print_json
from xrlflow.cli.pipes import check_files
from xrlflow.options import RAY, Options, flags

if TYPE_CHECKING:
    from xrlflow.batch import Listener

_OF_ONE_MODEL = ("replay",)


@taking(
    Options, *(name for name in flags(Options) if name not in _OF_ONE_MODEL),
    time_limit="Seconds for each model.", inputs="Your own inputs (.npz), the same for all models.",
    shapes="Numbers for the dimensions of the inputs of this name: input=1,3,224,224. May be repeated.",
)  # fmt: skip
def optimize_all(
    models: Annotated[str, typer.Argument(help="A folder, a pattern in quotes, or a text file with paths.")],
    output: Annotated[Path, typer.Option("-o", "--output", help="The folder of the results.")],
    options: Arguments,
    workers: Annotated[int, typer.Option(min=1, help="Processes; jobs that measure take turns.")] = 1,
    ray: Annotated[str | None, typer.Option(help=RAY, show_default=False)] = None,
    as_json: AsJson = False,
    quiet: Quiet = False,
) -> None:
    """Make many models faster, each in OUTPUT, with one page. Run it again to go on: what is done is not done again.

    Exit code 1: at least one model failed; all other models are done.
    """
    with clear_errors():
        from xrlflow import api
        from xrlflow.batch import INDEX
        from xrlflow.report import show

        check_files("a batch reads and writes folders", Path(models), output)
        with _listener(as_json or quiet) as listener:
            done = api.optimize_all(
                models,
                output,
                workers=workers,
                ray=ray,
                listener=listener,
                **with_shapes(options, several=True),
            )
        if as_json:
            print_json(done.to_json())
        elif not quiet:
            show.batch(done.to_json(), output / INDEX)
        if done.interrupted:
            typer.echo(
                f"xrlflow: interrupted: {len(done.rows)} of {len(done.names)} models are done and kept: "
                "run the same command to go on",
                err=True,
            )
            raise typer.Exit(ExitCode.INTERRUPTED)
        if done.failed:
            raise typer.Exit(ExitCode.NO)


@contextmanager
def _listener(quiet: bool) -> Iterator[Listener | None]:
    """A listener that shows the progress on a terminal, or writes one line for each model to standard error if that is
    no terminal.
    """
    from xrlflow.batch import terminal

    if quiet:
        yield None
    elif sys.stderr.isatty():
        with terminal.bars() as listener:
            yield listener
    else:
        yield terminal.lines
