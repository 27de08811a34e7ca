"""Commands that take long: tuning of kernels, and training of agents."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated

import typer

from xrlflow.cli.arguments import Arguments, AsJson, Model, Quiet, taking, with_shapes
from xrlflow.cli.failures import clear_errors
from xrlflow.cli.output import print_json
from xrlflow.cli.pipes import check_files, source
from xrlflow.options import TrainOptions, TuneOptions


@taking(TuneOptions)
def tune(
    model: Model,
    output: Annotated[Path, typer.Option("-o", "--output", help="Where the shared library (.so) goes.")],
    options: Arguments,
    as_json: AsJson = False,
    quiet: Quiet = False,
) -> None:
    """Compile a model with TVM, its kernels tuned on this machine or a remote device."""
    with clear_errors():
        from xrlflow import api
        from xrlflow.report import progress, show

        check_files("a compiled model is a library with a description beside it", output)
        api.check_distinct_paths(model=model, output=output)
        api.check_writable(output, library=True)
        with progress(enabled=not (as_json or quiet) and sys.stderr.isatty()) as listener:
            tuned = api.tune(source(model), **with_shapes(options), listener=listener)
        tuned.save(output)
        if as_json:
            print_json(tuned.to_json())
        elif not quiet:
            show.tuned(tuned.to_json(), tuned.speedup, tuned.control, str(output))


def _world_of(agent: Path) -> Path | None:
    """The file of an agent's world model, if there is one."""
    from xrlflow.rl.world_model.files import world_path

    path = world_path(agent)
    return path if path.exists() else None


@taking(TrainOptions)
def train(
    models: Annotated[list[Path], typer.Argument(help="The ONNX files to learn from.")],
    output: Annotated[Path, typer.Option("-o", "--output", help="Where the agent goes.")],
    options: Arguments,
    as_json: AsJson = False,
    quiet: Quiet = False,
) -> None:
    """Train an agent that chooses substitutions. Goes on where it stopped, when it is run again."""
    with clear_errors():
        from xrlflow import pipeline

        check_files("training reads and writes its files many times", output, *models)
        train_options = TrainOptions(**options)
        trained = pipeline.train(models, output, train_options, quiet=as_json or quiet)
        world = _world_of(output) if train_options.world_model else None
        if as_json:
            print_json({
                "agent": str(output) if output.exists() else None,
                "world_model": None if world is None else str(world),
                "iterations": trained.iterations,
                "steps": trained.steps,
                "seconds": trained.seconds,
                "interrupted": trained.interrupted,
                "gain": trained.score.gain,
                "evaluation": {o.problem: o.gain for o in trained.score.outcomes},
            })  # fmt: skip
        elif not quiet:
            for outcome in trained.score.outcomes:
                typer.echo(f"{outcome.problem}: {outcome.gain:.4f} times cheaper by the model")
            if not output.exists():
                typer.echo(f"{output} was not written: interrupted before there was an agent")
                return
            goes_on = "" if train_options.restart else ": run the same command to go on"
            stopped = f" (interrupted{goes_on})" if trained.interrupted else ""
            typer.echo(f"{output}: after {trained.iterations} iterations, {trained.steps} steps{stopped}")
            if train_options.world_model and world is None and trained.iterations:
                typer.echo(f"{output} has no world model: no round was better than the beginning")
