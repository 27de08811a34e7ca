"""The command line. Each command imports the heavy modules that it needs."""

from __future__ import annotations

import functools
import inspect
import json
import signal
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import Annotated, Any, NoReturn

import typer

from xrlflow.options import COMPARED, Flag, Options, TrainOptions, TuneOptions, flags
from xrlflow.text import printable

app = typer.Typer(
    name="xrlflow",
    help="Make ONNX models faster: verified graph substitutions, chosen by search, measured on this machine.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
)

Model = Annotated[Path, typer.Argument(help="The ONNX file.")]
ReportTo = Annotated[
    Path | None,
    typer.Option("--report", help="Write a report page (HTML, one file) here; times the operators for it."),
]
AsJson = Annotated[bool, typer.Option("--json", help="Print one JSON object to standard output.")]
Kernels = Annotated[
    bool, typer.Option("--kernels", help="Load the library of kernels in the model's folder (NAME.so).")
]
PASS_SEARCHES = ("beam", "greedy", "mcts", "evolution", "random", "agent", "guided", "refined")
"""The names of `xrlflow.passes.orders.Search`, which the help must not import."""
PASS_METRICS = ("operations", "bytes", "flops", "seconds")
Given = dict[str, Any]
"""Values of flags by the names of their options."""


def taking(kind: type, *names: str, **texts: str) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Give a command the flags of a class of options: those in `names`, or all. The command gets their values as its
    parameter `options`. `texts` replaces the help of an option."""
    known = {name: found for name, found in flags(kind).items() if not names or name in names}

    def parameter(name: str, flag: Flag, default: Any) -> inspect.Parameter:
        declared = () if flag.name is None else (flag.name,)
        info = typer.Option(
            *declared, help=texts.get(name, flag.help), min=flag.least, show_default=flag.shown
        )
        several = default == ()
        return inspect.Parameter(
            name,
            inspect.Parameter.KEYWORD_ONLY,
            default=None if several else default,
            annotation=Annotated[(flag.type | None) if several else flag.type, info],
        )

    def decorated(command: Callable[..., None]) -> Callable[..., None]:
        parameters = [parameter(name, *found) for name, found in known.items()]
        own = inspect.signature(command, eval_str=True).parameters.values()
        parameters[:0] = [p.replace(kind=inspect.Parameter.KEYWORD_ONLY) for p in own if p.name != "options"]

        @functools.wraps(command)
        def wrapper(**values: Any) -> None:
            given = {name: values.pop(name) for name in known}
            command(
                options={n: () if v is None and known[n][1] == () else v for n, v in given.items()}, **values
            )

        del wrapper.__wrapped__
        wrapper.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
        wrapper.__annotations__ = {p.name: p.annotation for p in parameters}
        return wrapper

    return decorated


def main() -> None:
    """Run the command line. An error that the user can correct prints one line and gives exit code 2.

    SIGTERM ends the program after its clean-up with exit code 143, SIGHUP (a closed terminal) with 129.
    """
    for number in (signal.SIGTERM, getattr(signal, "SIGHUP", signal.SIGTERM)):
        if signal.getsignal(number) is signal.SIG_DFL:
            signal.signal(number, _end)
    try:
        app()
    except _Terminated:
        typer.echo("xrlflow: error: terminated", err=True)
        raise


class _Terminated(SystemExit):
    pass


def _end(number: int, frame: FrameType | None) -> NoReturn:
    """Raise _Terminated, so that all running code cleans up. A second signal does not interrupt the clean-up."""
    signal.signal(number, signal.SIG_IGN)
    raise _Terminated(128 + number)


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


def parse_shapes(options: list[str] | None) -> list[dict[str, tuple[int, ...]]]:
    """The shapes by input name. An input that is given several times has a shape in as many mappings."""
    found: list[dict[str, tuple[int, ...]]] = []
    for option in options or ():
        name, equals, dims = option.rpartition("=")
        shape: tuple[int, ...] = ()
        try:
            shape = tuple(int(d) for d in dims.split(",") if d.strip()) if equals else ()
        except ValueError:
            equals = ""
        if not equals or not name or any(d < 0 for d in shape):
            fail(f"--shape {option}: write it as NAME=1,3,224,224")
        into = next((known for known in found if name not in known), None)
        if into is None:
            found.append(into := {})
        into[name] = shape
    return found


def with_shapes(options: Given, *, several: bool = False) -> Given:
    """The options with --shape parsed to shapes by input name. `several`: an input may have more than one."""
    found = parse_shapes(options["shapes"])
    first, further = found[0] if found else None, found[1:]
    if further and not several:
        fail(f"--shape: {next(iter(further[0]))} is given twice")
    return options | {"shapes": first} | ({"further_shapes": further} if several else {})


@app.command()
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


@app.command()
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


@app.command("report")
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


@app.command()
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


@app.command()
def rules(
    names: Annotated[list[str] | None, typer.Argument(help="Only these rules.", show_default=False)] = None,
    prove: Annotated[bool, typer.Option("--prove", help="Prove the rules, and print certificates.")] = False,
    stats: Annotated[
        Path | None, typer.Option(help="Match the rules against this model: hits, time, near misses.")
    ] = None,
    own: Annotated[
        Path | None, typer.Option("--rules", help="Rules of your own, in the place of the library's.")
    ] = None,
    seed: Annotated[int, typer.Option(min=0, help="Seed of everything random.")] = 0,
    as_json: AsJson = False,
) -> None:
    """List the rewrite rules (equation, family, backend, proof), or prove them.

    Exit code 1: a rule is not proven, or a wrong one made of it passes and nobody knows why.
    """
    with clear_errors():
        from xrlflow import api
        from xrlflow.report import show

        if prove:
            certificates = api.prove_rules(
                names or (), own=own, seed=seed, listener=None if as_json else show.proven
            )
            if as_json:
                print_json([c.to_json() for c in certificates])
            else:
                show.certificates(certificates)
            if not all(c.proven and not c.unexplained for c in certificates):
                raise typer.Exit(1)
            return
        if stats is not None:
            listed = api.rule_stats(stats, names or (), own)
        else:
            listed = api.list_rules(names or (), own)
        if as_json:
            print_json(listed)
        else:
            show.rules(listed)


@app.command()
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


@app.command()
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


@app.command()
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


@app.command()
@taking(TuneOptions)
def tune(
    model: Model,
    output: Annotated[Path, typer.Option("-o", "--output", help="Where the shared library (.so) goes.")],
    options: Given,
    as_json: AsJson = False,
) -> None:
    """Compile a model with TVM, its kernels tuned on this machine or a remote device."""
    with clear_errors():
        from xrlflow import api
        from xrlflow.report import progress, show

        api.check_apart(model=model, output=output)
        api.check_writable(output, library=True)
        with progress(enabled=not as_json and sys.stderr.isatty()) as listener:
            tuned = api.tune(model, **with_shapes(options), listener=listener)
        tuned.save(output)
        if as_json:
            print_json(tuned.to_json())
        else:
            show.tuned(tuned.to_json(), tuned.speedup, tuned.control, str(output))


@app.command()
@taking(TrainOptions)
def train(
    models: Annotated[list[Path], typer.Argument(help="The ONNX files to learn from.")],
    output: Annotated[Path, typer.Option("-o", "--output", help="Where the agent goes.")],
    options: Given,
    as_json: AsJson = False,
) -> None:
    """Train an agent that chooses substitutions. Goes on where it stopped, when it is run again."""
    with clear_errors():
        from xrlflow import pipeline

        trained = pipeline.train(models, output, TrainOptions(**options), quiet=as_json)
        if as_json:
            print_json({
                "agent": str(output),
                "iterations": trained.iterations,
                "steps": trained.steps,
                "seconds": trained.seconds,
                "interrupted": trained.interrupted,
                "gain": trained.score.gain,
                "evaluation": {o.problem: o.gain for o in trained.score.outcomes},
            })  # fmt: skip
        else:
            for outcome in trained.score.outcomes:
                typer.echo(f"{outcome.problem}: {outcome.gain:.4f} times cheaper by the model")
            stopped = " (interrupted: run the same command to go on)" if trained.interrupted else ""
            typer.echo(f"{output}: after {trained.iterations} iterations, {trained.steps} steps{stopped}")


passes_app = typer.Typer(
    no_args_is_help=True,
    help="Order XLA's HLO passes better than XLA does. Needs the extra xla; agents need the extra train, too.",
)
app.add_typer(passes_app, name="passes")

HloFile = Annotated[
    Path, typer.Argument(help="HLO text, StableHLO, or a serialized HLO module.", metavar="FILE")
]
Searching = Annotated[
    str | None,
    typer.Option(
        "--search",
        help=f"One of: {', '.join(PASS_SEARCHES)}. Default: refined; beam without the extra train.",
    ),
]
AgentFile = Annotated[
    Path | None, typer.Option("--agent", help="The file of an agent. Default: that of the package.")
]
Steps = Annotated[int, typer.Option(min=1, help="Passes that the compiler may run.")]
Horizon = Annotated[int, typer.Option(min=1, help="The longest order.")]
PassSeed = Annotated[int, typer.Option("--seed", min=0, help="Seed of everything random.")]
Reduce = Annotated[str, typer.Option("--metric", help=f"What is to become less: {', '.join(PASS_METRICS)}.")]
Seconds = Annotated[float | None, typer.Option("--time-limit", min=0.0, help="Seconds.", show_default=False)]


@contextmanager
def clear_pass_errors() -> Iterator[None]:
    """Turn errors about modules, passes and agents that a user can correct into one line."""
    from xrlflow.checkpoint import CheckpointError
    from xrlflow.passes import CompilerError
    from xrlflow.passes.orders import OrderError, OutputsDiffer

    try:
        yield
    except OutputsDiffer as error:
        fail(f"{error}; nothing is written", code=1)
    except (CheckpointError, CompilerError, OrderError) as error:
        fail(str(error))
    except KeyboardInterrupt:
        fail("interrupted before there was a result", code=130)


def one_of(option: str, value: str, known: Sequence[str]) -> str:
    """The value of an option, if it is one of those that there are."""
    if value not in known:
        fail(f"{option} {value}: choose one of {', '.join(known)}")
    return value


@passes_app.command("list")
def list_passes(as_json: AsJson = False) -> None:
    """List the passes that orders are made of."""
    from xrlflow.passes.hlo_passes import PASSES

    if as_json:
        print_json([{"name": p.name, "does": p.does} for p in PASSES])
        return
    width = max(len(p.name) for p in PASSES)
    for each in PASSES:
        typer.echo(f"{each.name:{width}}  {each.does}")


@passes_app.command("optimize")
def optimize_passes(
    file: HloFile,
    output: Annotated[Path, typer.Option("-o", "--output", help="Where the result goes, as HLO text.")],
    *,
    search: Searching = None,
    agent: AgentFile = None,
    steps: Steps = 500,
    horizon: Horizon = 30,
    metric: Reduce = PASS_METRICS[0],
    time_limit: Seconds = None,
    seed: PassSeed = 0,
    as_json: AsJson = False,
) -> None:
    """Look for a better order of passes, compare outputs with the original's, and write the module after it."""
    if search is not None:
        one_of("--search", search, PASS_SEARCHES)
    one_of("--metric", metric, PASS_METRICS)
    with clear_errors(), clear_pass_errors():
        from xrlflow import api
        from xrlflow.passes import Metric, orders

        api.check_apart(file=file, output=output, agent=agent)
        api.check_writable(output)
        how = orders.Search(search) if search is not None else None
        found = orders.optimize(
            file, search=how, agent=agent, steps=steps, horizon=horizon, metric=Metric(metric),
            time_limit=time_limit, seed=seed,
        )  # fmt: skip
        found.save(output)
        if as_json:
            print_json({"file": str(file), "metric": metric, **found.to_json()})
            return
        less = 100 * orders.reduction(found.default, found.after)
        if found.interrupted:
            typer.echo("interrupted: the best so far is kept")
        typer.echo(
            f"{metric}: {found.before:g} before, {found.default:g} after XLA's order, {found.after:g} after this one"
        )
        typer.echo(
            "order: XLA's own; none was found that is better" if found.is_default
            else f"order: {', '.join(found.order.passes) or 'no pass'}"
        )  # fmt: skip
        for step in found.refused:
            typer.echo(f"refused, because it changes what the module computes: {step}", err=True)
        if found.compared.blind:
            typer.echo(f"not compared, because it is no number: {', '.join(found.compared.blind)}", err=True)
        typer.echo(
            f"{output}: {less:.1f}% less than by XLA's order; outputs compared with the original's: equal "
            f"({found.order.steps} steps, {found.seconds:.0f} s)"
        )


@passes_app.command("train")
def train_passes(
    modules: Annotated[list[Path], typer.Argument(help="The modules to learn from.", metavar="FILES")],
    output: Annotated[Path, typer.Option("-o", "--output", help="Where the agent goes.")],
    *,
    iterations: Annotated[int, typer.Option(min=1)] = 100,
    steps: Annotated[int, typer.Option(min=1, help="Steps of an iteration.")] = 256,
    horizon: Horizon = 25,
    graph: Annotated[bool, typer.Option("--graph", help="The agent sees the graph of instructions.")] = False,
    plain: Annotated[
        bool, typer.Option("--plain", help="No masking, reward shaping and curriculum.")
    ] = False,
    metric: Reduce = PASS_METRICS[0],
    time_limit: Seconds = None,
    log: Annotated[Path | None, typer.Option(help="A folder for TensorBoard.")] = None,
    restart: Annotated[
        bool, typer.Option("--restart", help="Do not go on with a run that was stopped.")
    ] = False,
    seed: PassSeed = 0,
    as_json: AsJson = False,
) -> None:
    """Train an agent by PPO. Ctrl-C keeps the best one so far; the same command goes on with a run that was stopped."""
    one_of("--metric", metric, PASS_METRICS)
    with clear_errors(), clear_pass_errors():
        from xrlflow import api
        from xrlflow.passes import Metric, orders

        for file in modules:
            api.check_apart(module=file, output=output)
        api.check_writable(output)
        trained = orders.train(
            modules, output, iterations=iterations, steps=steps, horizon=horizon, graph=graph, plain=plain,
            metric=Metric(metric), time_limit=time_limit, seed=seed, restart=restart, log=log, quiet=as_json,
        )  # fmt: skip
        facts = {
            "agent": str(output), "iterations": trained.iterations, "steps": trained.steps,
            "seconds": round(trained.seconds, 1), "reduction": trained.reduction, "interrupted": trained.interrupted,
        }  # fmt: skip
        if as_json:
            print_json(facts)
        else:
            typer.echo(
                f"{output}: after {trained.iterations} iterations, {trained.steps} steps; its orders leave "
                f"{100 * (1 - trained.reduction):.1f}% of the modules' {metric}"
            )


@passes_app.command("bench")
def bench_passes(
    file: HloFile,
    searches: Annotated[str, typer.Option(help="Searches, separated by commas.")] = ",".join(
        PASS_SEARCHES[:5]
    ),
    agent: AgentFile = None,
    steps: Steps = 200,
    horizon: Horizon = 30,
    seed: PassSeed = 0,
    as_json: AsJson = False,
) -> None:
    """Compare searches at equal steps, and measure what the best order is worth against XLA's."""
    chosen = [one_of("--searches", s.strip(), PASS_SEARCHES) for s in searches.split(",") if s.strip()]
    with clear_errors(), clear_pass_errors():
        from dataclasses import asdict

        from xrlflow.passes import orders

        table = orders.bench(
            file,
            searches=[orders.Search(s) for s in chosen],
            agent=agent,
            steps=steps,
            horizon=horizon,
            seed=seed,
        )
        if as_json:
            print_json(asdict(table))
            return
        typer.echo(f"operations: {table.before} before, {table.default} after XLA's order")
        for row in table.rows:
            typer.echo(
                f"{row.search:10} {row.operations:6} operations, {100 * row.reduction:5.1f}% less; outputs "
                f"{'equal' if row.equal else 'DIFFER'}; {row.steps} steps, {row.seconds:.1f} s"
            )
            for step in row.refused:
                typer.echo(
                    f"{row.search}: refused, because it changes what the module computes: {step}", err=True
                )
        ratio, low, high = table.time
        same, least, most = table.control
        typer.echo(
            f"time after XLA's order / after the best: {ratio:.3f} [{low:.3f}, {high:.3f}]; "
            f"A/A: {same:.3f} [{least:.3f}, {most:.3f}]"
        )


def print_json(value: Any) -> None:
    print(json.dumps(value, indent=2, allow_nan=False))


if __name__ == "__main__":
    main()
