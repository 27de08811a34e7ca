"""Commands on models: make them faster, compare, look, verify, measure and run them."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated

import typer

from xrlflow.cli.arguments import AsJson, Given, Kernels, Model, ReportTo, taking, with_shapes
from xrlflow.cli.failures import clear_errors
from xrlflow.cli.output import print_json
from xrlflow.options import COMPARED, Options


@taking(Options)
def optimize(
    model: Model,
    output: Annotated[Path, typer.Option("-o", "--output", help="Where the result goes.")],
    options: Given,
    trace: Annotated[Path | None, typer.Option(help="Write the substitutions to this file.")] = None,
    report: ReportTo = None,
    as_json: AsJson = False,
) -> None:
    """Write a faster model that computes the same, or the original if none was found."""
    with clear_errors():
        from xrlflow import api
        from xrlflow.backends.beside import library_path
        from xrlflow.report import progress, show

        options = with_shapes(options, several=True)
        asked = Options(**options)
        api.check_writable(output, library=asked.compiling, kernels=asked.with_kernels)
        for name, path in (("trace", trace), ("report", report)):
            if path is not None:
                api.check_apart(model=model, **{name: path})
                api.check_writable(path)
        api.check_apart(output=output, trace=trace, report=report, library=library_path(output))
        with progress(not as_json and sys.stderr.isatty(), asked.time_limit) as listener:
            result = api.optimize(model, **options, listener=listener)
        result.save(output)
        if report is not None:
            api.save_page(result.page, report)
        if trace is not None:
            result.save_trace(trace)
        if as_json:
            print_json(result.report.to_json() | ({} if report is None else {"page": result.page}))
        else:
            show.optimization(result.report, str(output))
            show.page(report)


@taking(
    Options,
    "cost",
    "budget",
    "time_limit",
    "shapes",
    "threads",
    "seed",
    "measure",
    time_limit="Seconds for each strategy.",
)
def compare(
    model: Model,
    options: Given,
    searches: Annotated[str, typer.Option(help="Strategies, separated by commas.")] = ",".join(COMPARED),
    report: ReportTo = None,
    as_json: AsJson = False,
) -> None:
    """Optimise with several strategies, and print a table of what each brings."""
    with clear_errors():
        from xrlflow import api
        from xrlflow.report import show

        strategies = tuple(s.strip() for s in searches.split(",") if s.strip())
        if report is not None:
            api.check_apart(model=model, report=report)
            api.check_writable(report)
        comparison = api.compare(model, searches=strategies, **with_shapes(options))
        if report is not None:
            api.save_page(comparison.page, report)
        if as_json:
            reports = [r.to_json() for r in comparison.reports]
            print_json(reports if report is None else {"reports": reports, "page": comparison.page})
        else:
            show.comparison(comparison.reports)
            show.page(report)


def report_of(
    trace: Annotated[Path, typer.Argument(help="A file that `xrlflow optimize --trace` wrote.")],
    output: Annotated[
        Path | None, typer.Option("-o", "--output", help="Where the page goes; default: TRACE.html.")
    ] = None,
) -> None:
    """Write the report page of an earlier optimisation from its trace."""
    with clear_errors():
        from xrlflow import api
        from xrlflow.report import show

        target = trace.with_suffix(".html") if output is None else output
        api.check_apart(trace=trace, output=target)
        data = api.page_of_trace(trace)
        api.check_writable(target)
        api.save_page(data, target)
        show.page(target)


@taking(Options, "shapes", "threads", "inputs", "seed", "measure", measure="Time the operators.")
def view(
    model: Model,
    options: Given,
    other: Annotated[Path | None, typer.Argument(help="Another one, shown beside it.")] = None,
    port: Annotated[int, typer.Option(min=0, max=65535, help="Serve here; 0: at any port that is free.")] = 0,
) -> None:
    """Show a model, or two side by side, in a browser on this machine, until Ctrl-C. Nothing is optimised."""
    with clear_errors():
        from xrlflow import api

        data = api.view(model, other, **with_shapes(options))
        with api.serving(data, port) as server:
            typer.echo(f"{server.url} (Ctrl-C ends it)")
            try:
                server.serve_forever()
            except KeyboardInterrupt:
                typer.echo("", err=True)


@taking(Options, "shapes", "inputs", "seed")
def verify(
    original: Annotated[Path, typer.Argument(help="The model that is right.")],
    new: Annotated[Path, typer.Argument(help="The model that should compute the same.")],
    options: Given,
    kernels: Kernels = False,
    as_json: AsJson = False,
) -> None:
    """Compare two models on random inputs, with a tolerance that float64 evaluation of the first one gives."""
    with clear_errors():
        from xrlflow import api
        from xrlflow.report import show

        verification = api.verify_files(original, new, kernels=kernels, **with_shapes(options))
        if as_json:
            print_json(verification.to_json())
        else:
            show.verification(verification)
        if not verification.verified:
            raise typer.Exit(1)


@taking(Options, "shapes", "threads", "inputs", "seed")
def bench(
    model: Model,
    options: Given,
    against: Annotated[Path | None, typer.Option(help="Compare with this model.")] = None,
    time_limit: Annotated[float, typer.Option(min=0.0, help="Seconds.")] = 20.0,
    kernels: Kernels = False,
    as_json: AsJson = False,
) -> None:
    """Measure a model's latency, or the ratio of two models' latencies with its interval."""
    with clear_errors():
        from xrlflow import api
        from xrlflow.report import show

        measured = api.bench(model, against, time_limit=time_limit, kernels=kernels, **with_shapes(options))
        if as_json:
            print_json(measured)
        else:
            show.bench(measured)


@taking(Options, "shapes", "threads", "inputs", "seed", inputs="Your own inputs (.npz); default: drawn ones.")
def run(
    model: Model,
    options: Given,
    output: Annotated[
        Path | None, typer.Option("-o", "--output", help="Write the outputs to this .npz file.")
    ] = None,
) -> None:
    """Run a model once, with the library of kernels in its folder (NAME.so), and show its outputs."""
    with clear_errors():
        from xrlflow import api
        from xrlflow.backends.beside import library_path
        from xrlflow.report import show

        if output is not None:
            api.check_apart(model=model, inputs=options["inputs"], output=output, library=library_path(model))
            api.check_writable(output)
        outputs = api.run_once(model, **with_shapes(options))
        if output is not None:
            api.save_outputs(outputs, output)
        show.outputs(outputs)
