"""The command that lists and proves rewrite rules."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from xrlflow.cli.arguments import AsJson
from xrlflow.cli.completion import completing
from xrlflow.cli.failures import ExitCode, clear_errors
from xrlflow.cli.output import print_json
from xrlflow.cli.pipes import source
from xrlflow.options import RAY, rule_names


def rules(
    names: Annotated[
        list[str] | None,
        typer.Argument(help="Only these rules.", show_default=False, autocompletion=completing(rule_names)),
    ] = None,
    prove: Annotated[bool, typer.Option("--prove", help="Prove the rules, and print certificates.")] = False,
    stats: Annotated[
        Path | None, typer.Option(help="Match the rules against this model: hits, time, near misses.")
    ] = None,
    own: Annotated[
        Path | None, typer.Option("--rules", help="Rules of your own, in the place of the library's.")
    ] = None,
    seed: Annotated[int, typer.Option(min=0, help="Seed of everything random.")] = 0,
    ray: Annotated[str | None, typer.Option(help=f"--prove: {RAY}", show_default=False)] = None,
    as_json: AsJson = False,
    quiet: Annotated[
        bool, typer.Option("--quiet", "-q", help="With --prove: print nothing; the exit code tells.")
    ] = False,
) -> None:
    """List the rewrite rules (equation, family, backend, proof), or prove them.

    Exit code 1: a rule is not proven, or a wrong one made of it passes and nobody knows why.
    """
    with clear_errors():
        from xrlflow import api
        from xrlflow.report import show

        if prove:
            certificates = api.prove_rules(
                names or (),
                own=own,
                seed=seed,
                ray=ray,
                listener=None if as_json or quiet else show.proven,
            )
            if as_json:
                print_json([c.to_json() for c in certificates])
            elif not quiet:
                show.certificates(certificates)
            if not all(c.proven and not c.unexplained for c in certificates):
                raise typer.Exit(ExitCode.NO)
            return
        if stats is not None:
            listed = api.rule_stats(source(stats), names or (), own)
        else:
            listed = api.list_rules(names or (), own)
        if as_json:
            print_json(listed)
        else:
            show.rules(listed)
