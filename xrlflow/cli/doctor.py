"""The command that examines the installation and the machine."""

from __future__ import annotations

from contextlib import closing

import typer

from xrlflow.cli.arguments import AsJson
from xrlflow.cli.failures import ExitCode, fail, interrupted
from xrlflow.cli.output import print_json
from xrlflow.common.text import printable


def doctor(as_json: AsJson = False) -> None:
    """Say what works on this machine, what does not, and what to do about it.

    Exit code 1: optimising for ONNX Runtime does not work.
    """
    try:
        from xrlflow.doctor import examine, works
    except Exception as error:  # the import of a package of an unsupported version may raise anything
        fail(f"a package is broken ({type(error).__name__}: {error}): install xrlflow again", ExitCode.NO)
    shown = []
    try:
        with closing(examine()) as findings:
            for finding in findings:
                shown.append(finding)
                if not as_json:
                    typer.echo(f"{finding.status.value:4}  {finding.name}: {printable(finding.found)}")
                    if finding.advice:
                        typer.echo(f"      -> {finding.advice}")
    except KeyboardInterrupt:
        interrupted()
    good = works(shown)
    if as_json:
        print_json({"works": good, "findings": [f.to_json() for f in shown]})
    else:
        typer.echo(f"\nOptimising for ONNX Runtime {'works' if good else 'DOES NOT WORK'} here.")
    if not good:
        raise typer.Exit(ExitCode.NO)
