"""The command that draws learning curves."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from xrlflow.cli.arguments import AsJson, Quiet
from xrlflow.cli.completion import completing
from xrlflow.cli.failures import fail, interrupted
from xrlflow.cli.output import print_json
from xrlflow.cli.pipes import check_files

OVER = ("steps", "seconds")


def plot(
    logs: Annotated[
        list[Path],
        typer.Argument(help="Folders that --log wrote. Runs within one folder are seeds of one curve."),
    ],
    output: Annotated[Path, typer.Option("-o", "--output", help="Where the plot goes: .svg, .png or .pdf.")],
    scalar: Annotated[
        str, typer.Option(help="What is drawn: episode/gain, evaluation/gain, ...")
    ] = "episode/return",
    over: Annotated[
        str,
        typer.Option(
            help="Over steps of the log (iterations of PPO), or seconds.", autocompletion=completing(OVER)
        ),
    ] = OVER[0],
    title: Annotated[str | None, typer.Option(help="Default: the scalar.", show_default=False)] = None,
    as_json: AsJson = False,
    quiet: Quiet = False,
) -> None:
    """Draw learning curves: the median of each folder's runs, in a band from the least to the greatest."""
    if over not in OVER:
        fail(f"--over {over}: choose one of {', '.join(OVER)}")
    check_files("the format of a plot is that of its file's name", output, *logs)
    from xrlflow.learn.curves import CurveError, read_scalars
    from xrlflow.options import OptionError, check_installed

    try:
        check_installed("plots", "plots", "matplotlib")
        check_installed("plots of logs", "train", "tensorboard")
        from xrlflow.report import plots

        plots.check_format(output)
        curves = []
        for folder, label in zip(logs, _labels(logs)):
            runs = read_scalars(folder, scalar)
            curves.append(
                plots.Curve(label, [(r.steps if over == "steps" else r.seconds, r.values) for r in runs])
            )
        texts = plots.Texts(title or scalar, over, scalar)
        plots.save(plots.learning_curves(curves, texts), output)
    except (CurveError, OptionError, ValueError) as error:
        fail(str(error))
    except OSError as error:
        fail(f"{output}: cannot be written ({error.strerror}): choose another file")
    except KeyboardInterrupt:
        interrupted()
    if as_json:
        print_json({"x": over, "y": scalar, "curves": [curve.to_json() for curve in curves]})
    elif not quiet:
        typer.echo(f"{output}: {scalar} of {sum(len(c.runs) for c in curves)} runs")


def _labels(folders: list[Path]) -> list[str]:
    """The names of the folders; their paths if two have the same name."""
    names = [folder.resolve().name for folder in folders]
    return names if len(set(names)) == len(names) else [str(folder) for folder in folders]
