"""Commands on models: make them faster, compare, look, verify, measure and run them."""

from __future__ import annotations

import sys
from dataclasses import replace
from pathlib import Path
from typing import Annotated

import typer

from xrlflow.cli.arguments import Arguments, AsJson, Kernels, Model, Quiet, ReportTo, taking, with_shapes
from xrlflow.cli.completion import completing_last
from xrlflow.cli.failures import ExitCode, clear_errors, fail
from xrlflow.cli.output import print_json
from xrlflow.cli.pipes import PIPE, Output, check_files, check_streams, one_file, source
from xrlflow.options import COMPARED, KEEP, SEARCHES, SHAPES, Options, flags


@taking(Options)
def optimize(
    model: Model,
    output: Annotated[
        Path, typer.Option("-o", "--output", help="Where the result goes; -: standard output.")
    ],
    options: Arguments,
    trace: Annotated[
        Path | None, typer.Option(help="Write the substitutions to this file.", rich_help_panel="Search")
    ] = None,
    report: ReportTo = None,
    as_json: AsJson = False,
    quiet: Quiet = False,
) -> None:
    """Write a faster model that computes the same, or the original if none was found."""
    check_streams(model, output)
    with clear_errors():
        from xrlflow import api
        from xrlflow.report import progress, show

        options = with_shapes(options, several=True)
        asked = Options(**options)
        check_files("standard output is for models", trace, report)
        if trace is not None and asked.precision != KEEP:
            fail("--trace has no meaning with --precision, which changes the file before the substitutions")
        _check_extra_files(model, output, trace=trace, report=report)
        if output == PIPE:
            one_file(model, compiled=asked.compiling, hybrid=asked.backend == "hybrid")
            asked = replace(asked, portable=not asked.compiling)
        else:
            api.check_writable(output, library=asked.compiling, kernels=asked.with_kernels)
        read = source(model)
        target = Output(output)
        if output == PIPE and asked.with_kernels and not (as_json or quiet):
            typer.echo("note: no generated kernels: they would be a second file (name one with -o)")
        with progress(not (as_json or quiet) and sys.stderr.isatty(), asked.time_limit) as listener:
            result = api.optimize(read, options=asked, listener=listener)
        target.put(result.save)
        if report is not None:
            api.save_page(result.page, report)
        if trace is not None:
            result.save_trace(trace)
        if as_json:
            print_json(result.report.to_json() | ({} if report is None else {"page": result.page}))
        elif not quiet:
            show.optimization(result.report, str(target))
            show.page(report)


def _check_extra_files(model: Path, output: Path, **paths: Path | None) -> None:
    """Raise OptionError or ModelError if another file than the result cannot be written, or would overwrite one."""
    from xrlflow import api
    from xrlflow.backends.library_files import library_path

    for name, path in paths.items():
        if path is not None:
            api.check_distinct_paths(model=model, **{name: path})
            api.check_writable(path)
    results = {} if output == PIPE else {"output": output, "library": library_path(output)}
    api.check_distinct_paths(**results, **paths)


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
    shapes=SHAPES,
)
def compare(
    model: Model,
    options: Arguments,
    searches: Annotated[
        str,
        typer.Option(help="Strategies, separated by commas.", autocompletion=completing_last(SEARCHES)),
    ] = ",".join(COMPARED),
    report: ReportTo = None,
    as_json: AsJson = False,
) -> None:
    """Optimise with several strategies, and print a table of what each brings."""
    with clear_errors():
        from xrlflow import api
        from xrlflow.report import show

        strategies = tuple(s.strip() for s in searches.split(",") if s.strip())
        check_files("a page is written to a file", report)
        if report is not None:
            api.check_distinct_paths(model=model, report=report)
            api.check_writable(report)
        comparison = api.compare(source(model), searches=strategies, **with_shapes(options))
        if report is not None:
            api.save_page(comparison.page, report)
        if as_json:
            reports = [r.to_json() for r in comparison.reports]
            print_json(reports if report is None else {"reports": reports, "page": comparison.page})
        else:
            show.comparison(comparison.reports)
            show.page(report)


def report_of(
    trace: Annotated[
        Path, typer.Argument(help="A file that `xrlflow optimize --trace` wrote; -: standard input.")
    ],
    output: Annotated[
        Path | None,
        typer.Option("-o", "--output", help="Where the page goes; -: standard output; default: TRACE.html."),
    ] = None,
    quiet: Quiet = False,
) -> None:
    """Write the report page of an earlier optimisation from its trace."""
    with clear_errors():
        from xrlflow import api
        from xrlflow.report import show

        if output is None and trace == PIPE:
            fail("-: a trace from standard input gives the page no name: name it with -o")
        path = trace.with_suffix(".html") if output is None else output
        if path != PIPE:
            api.check_distinct_paths(trace=trace, output=path)
        data = api.page_of_trace(source(trace))
        if path != PIPE:
            api.check_writable(path)
        target = Output(path)
        target.put(lambda file: api.save_page(data, file))
        if not quiet:
            show.page(target.path)


@taking(
    Options, "shapes", "threads", "inputs", "seed", "measure", measure="Time the operators.", shapes=SHAPES
)
def view(
    model: Model,
    options: Arguments,
    other: Annotated[Path | None, typer.Argument(help="Another one, shown beside it.")] = None,
    port: Annotated[int, typer.Option(min=0, max=65535, help="Serve here; 0: at any port that is free.")] = 0,
    networkx: Annotated[
        Path | None,
        typer.Option(help="Write the graph to this file (.graphml or .gexf) instead, for other programs."),
    ] = None,
) -> None:
    """Show a model, or two side by side, in a browser on this machine, until Ctrl-C. Nothing is optimised."""
    with clear_errors():
        from xrlflow import api

        if networkx is not None:
            if other is not None:
                fail("--networkx takes one model: leave the other out")
            unused = {name: default for name, (_, default) in flags(Options).items()} | {"port": 0}
            set_by_user = [
                name for name, value in (*options.items(), ("port", port)) if value != unused[name]
            ]
            if set_by_user:
                flag = {"shapes": "shape", "measure": "no-measure"}.get(set_by_user[0], set_by_user[0])
                fail(f"--networkx writes the graph as it is: --{flag} has no meaning with it")
            check_files("a graph's file says by its ending which format it has", networkx)
            graph = api.save_networkx(source(model), networkx)
            typer.echo(f"{networkx}: {graph.number_of_nodes()} nodes, {graph.number_of_edges()} edges")
            return
        data = api.view(
            source(model, other), None if other is None else source(other), **with_shapes(options)
        )
        with api.serving(data, port) as server:
            typer.echo(f"{server.url} (Ctrl-C ends it)")
            try:
                server.serve_forever()
            except KeyboardInterrupt:
                typer.echo("", err=True)


@taking(Options, "shapes", "inputs", "seed", shapes=SHAPES)
def verify(
    original: Annotated[Path, typer.Argument(help="The model that is right; -: standard input.")],
    new: Annotated[Path, typer.Argument(help="The model that should compute the same; -: standard input.")],
    options: Arguments,
    kernels: Kernels = False,
    as_json: AsJson = False,
    quiet: Quiet = False,
) -> None:
    """Compare two models on random inputs, with a tolerance that float64 evaluation of the first one gives."""
    with clear_errors():
        from xrlflow import api
        from xrlflow.report import show

        if kernels:
            check_files("a model has its kernels in its folder", original, new)
        verification = api.verify_files(
            source(original, new), source(new), kernels=kernels, **with_shapes(options)
        )
        if as_json:
            print_json(verification.to_json())
        elif not quiet:
            show.verification(verification)
        if not verification.verified:
            raise typer.Exit(ExitCode.NO)


@taking(Options, "shapes", "threads", "inputs", "seed", shapes=SHAPES)
def bench(
    model: Model,
    options: Arguments,
    against: Annotated[Path | None, typer.Option(help="Compare with this model.")] = None,
    generate: Annotated[
        int | None,
        typer.Option(
            help="Measure this many steps of a decoder instead, each with the cache that the last one returned.",
            metavar="N",
        ),
    ] = None,
    prompt: Annotated[
        int | None, typer.Option(help="Tokens before these steps; default: 128.", metavar="P")
    ] = None,
    time_limit: Annotated[float, typer.Option(help="Seconds.")] = 20.0,
    kernels: Kernels = False,
    as_json: AsJson = False,
) -> None:
    """Measure a model's latency, or the ratio of two models' latencies with its interval.

    With --generate, the exit code is 1 if the outputs of the last step differ by more than a hundredth of their RMS."""
    with clear_errors():
        from xrlflow import api
        from xrlflow.report import show

        if kernels:
            check_files("a model has its kernels in its folder", model, against)
        measured = api.bench(
            source(model, against),
            None if against is None else source(against),
            time_limit=time_limit,
            kernels=kernels,
            generate=generate,
            prompt=prompt,
            **with_shapes(options),
        )
        if as_json:
            print_json(measured)
        else:
            show.bench(measured)
        if measured.get("outputs_differ"):
            raise typer.Exit(ExitCode.NO)


@taking(
    Options,
    "shapes",
    "threads",
    "inputs",
    "seed",
    inputs="Your own inputs (.npz); default: drawn ones.",
    shapes=SHAPES,
)
def run(
    model: Model,
    options: Arguments,
    output: Annotated[
        Path | None,
        typer.Option("-o", "--output", help="Write the outputs to this .npz file; -: standard output."),
    ] = None,
    quiet: Quiet = False,
) -> None:
    """Run a model once, with the library of kernels in its folder (NAME.so), and show its outputs."""
    with clear_errors():
        from xrlflow import api
        from xrlflow.backends.library_files import library_path
        from xrlflow.report import show

        if output is not None and output != PIPE:
            api.check_distinct_paths(
                model=model, inputs=options["inputs"], output=output, library=library_path(model)
            )
            api.check_writable(output)
        read = source(model)
        target = None if output is None else Output(output)
        outputs = api.run_once(read, **with_shapes(options))
        if target is not None:
            target.put(lambda file: api.save_outputs(outputs, file))
        if not quiet:
            show.outputs(outputs)
