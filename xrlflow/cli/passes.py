"""Commands on XLA's passes: `xrlflow passes ...`."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated

import typer

from xrlflow.cli.arguments import AsJson, Quiet
from xrlflow.cli.completion import completing, completing_last
from xrlflow.cli.failures import ExitCode, clear_errors, fail
from xrlflow.cli.output import print_json
from xrlflow.cli.pipes import PIPE, Output, check_files, source

PASS_SEARCHES = ("beam", "greedy", "mcts", "evolution", "random", "agent", "guided", "refined")
"""The names of `xrlflow.passes.orders.Search`, which the help must not import."""
PASS_METRICS = ("operations", "bytes", "flops", "seconds")
HloFile = Annotated[
    Path,
    typer.Argument(
        help="HLO text, StableHLO, or a serialized HLO module; -: standard input.", metavar="FILE"
    ),
]
Searching = Annotated[
    str | None,
    typer.Option(
        "--search",
        help=f"One of: {', '.join(PASS_SEARCHES)}. Default: refined.",
        autocompletion=completing(PASS_SEARCHES),
        show_default=False,
    ),
]
AgentFile = Annotated[
    Path | None, typer.Option("--agent", help="The file of an agent. Default: that of the package.")
]
Steps = Annotated[int, typer.Option(min=1, help="Passes that the compiler may run.")]
Horizon = Annotated[int, typer.Option(min=1, help="The longest order.")]
PassSeed = Annotated[int, typer.Option("--seed", min=0, help="Seed of everything random.")]
Reduce = Annotated[
    str,
    typer.Option(
        "--metric",
        help=f"What is to become less: {', '.join(PASS_METRICS)}.",
        autocompletion=completing(PASS_METRICS),
    ),
]
Seconds = Annotated[float | None, typer.Option("--time-limit", min=0.0, help="Seconds.", show_default=False)]


@contextmanager
def clear_pass_errors() -> Iterator[None]:
    """Turn errors that a user can correct, about modules, passes and agents, into one line."""
    from xrlflow.passes import CompilerError
    from xrlflow.passes.orders import OrderError, OutputsDiffer
    from xrlflow.storage.checkpoint import CheckpointError

    try:
        yield
    except OutputsDiffer as error:
        fail(f"{error}; nothing is written", ExitCode.NO)
    except (CheckpointError, CompilerError, OrderError) as error:
        fail(str(error))


def one_of(option: str, value: str, choices: Sequence[str]) -> str:
    """The value of an option; raises OptionError unless it is one of `choices`."""
    if value not in choices:
        fail(f"{option} {value}: choose one of {', '.join(choices)}")
    return value


def list_passes(as_json: AsJson = False) -> None:
    """List the passes of which orders consist."""
    from xrlflow.passes.hlo_passes import PASSES

    if as_json:
        print_json([{"name": p.name, "does": p.does} for p in PASSES])
        return
    width = max(len(p.name) for p in PASSES)
    for each in PASSES:
        typer.echo(f"{each.name:{width}}  {each.does}")


def optimize_passes(
    file: HloFile,
    output: Annotated[
        Path, typer.Option("-o", "--output", help="Where the result goes, as HLO text; -: standard output.")
    ],
    *,
    search: Searching = None,
    agent: AgentFile = None,
    steps: Steps = 200,
    horizon: Horizon = 30,
    metric: Reduce = PASS_METRICS[0],
    time_limit: Seconds = None,
    seed: PassSeed = 0,
    as_json: AsJson = False,
    quiet: Quiet = False,
) -> None:
    """Look for a better order of passes, compare outputs with the original's, and write the module after it."""
    if search is not None:
        one_of("--search", search, PASS_SEARCHES)
    one_of("--metric", metric, PASS_METRICS)
    with clear_errors(), clear_pass_errors():
        from xrlflow import api
        from xrlflow.passes import Metric, orders

        if output != PIPE:
            api.check_distinct_paths(file=file, output=output, agent=agent)
            api.check_writable(output)
        read = source(file)
        target = Output(output)
        how = orders.Search(search) if search is not None else None
        result = orders.optimize(
            read, search=how, agent=agent, steps=steps, horizon=horizon, metric=Metric(metric),
            time_limit=time_limit, seed=seed,
        )  # fmt: skip
        target.put(result.save)
        if as_json:
            print_json({"file": str(file), "metric": metric, **result.to_json()})
        if as_json or quiet:
            return
        less = 100 * orders.reduction(result.default, result.after)
        if result.interrupted:
            typer.echo("interrupted: the best so far is kept")
        typer.echo(
            f"{metric}: {result.before:g} before, {result.default:g} after XLA's order, {result.after:g} after this one"
        )
        typer.echo(
            "order: XLA's own; none was found that is better" if result.is_default
            else f"order: {', '.join(result.order.passes) or 'no pass'}"
        )  # fmt: skip
        for step in result.refused:
            typer.echo(f"refused, because it changes what the module computes: {step}", err=True)
        if result.compared.blind:
            typer.echo(f"not compared, because it is no number: {', '.join(result.compared.blind)}", err=True)
        typer.echo(
            f"{target}: {less:.1f}% less than by XLA's order; outputs compared with the original's: equal "
            f"({result.order.steps} steps, {result.seconds:.0f} s)"
        )


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
    quiet: Quiet = False,
) -> None:
    """Train an agent by PPO. Ctrl-C keeps the best one so far; the same command goes on with a run that was stopped."""
    one_of("--metric", metric, PASS_METRICS)
    with clear_errors(), clear_pass_errors():
        from xrlflow import api
        from xrlflow.passes import Metric, orders

        check_files("training reads and writes its files many times", output, *modules)
        for file in modules:
            api.check_distinct_paths(module=file, output=output)
        api.check_writable(output)
        trained = orders.train(
            modules, output, iterations=iterations, steps=steps, horizon=horizon, graph=graph, plain=plain,
            metric=Metric(metric), time_limit=time_limit, seed=seed, restart=restart, log=log,
            quiet=as_json or quiet,
        )  # fmt: skip
        facts = {
            "agent": str(output), "iterations": trained.iterations, "steps": trained.steps,
            "seconds": round(trained.seconds, 1), "reduction": trained.reduction, "interrupted": trained.interrupted,
        }  # fmt: skip
        if as_json:
            print_json(facts)
        elif not quiet:
            typer.echo(
                f"{output}: after {trained.iterations} iterations, {trained.steps} steps; its orders leave "
                f"{100 * (1 - trained.reduction):.1f}% of the modules' {metric}"
            )


def bench_passes(
    file: HloFile,
    searches: Annotated[
        str,
        typer.Option(help="Searches, separated by commas.", autocompletion=completing_last(PASS_SEARCHES)),
    ] = ",".join(PASS_SEARCHES[:5]),
    agent: AgentFile = None,
    steps: Steps = 200,
    horizon: Horizon = 30,
    seed: PassSeed = 0,
    as_json: AsJson = False,
) -> None:
    """Compare searches at equal steps, and measure the speed-up of the best order over XLA's."""
    selected = [one_of("--searches", s.strip(), PASS_SEARCHES) for s in searches.split(",") if s.strip()]
    with clear_errors(), clear_pass_errors():
        from dataclasses import asdict

        from xrlflow.passes import orders

        table = orders.bench(
            source(file),
            searches=[orders.Search(s) for s in selected],
            agent=agent,
            steps=steps,
            horizon=horizon,
            seed=seed,
        )
        if as_json:
            print_json(asdict(table))
            return
        typer.echo(
            f"operations: {table.before} before, {table.default} after XLA's order"
            + ("" if table.default_equal else "; its outputs DIFFER")
        )
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
        same, control_low, control_high = table.control
        typer.echo(
            f"time after XLA's order / after the best: {ratio:.3f} [{low:.3f}, {high:.3f}]; "
            f"A/A: {same:.3f} [{control_low:.3f}, {control_high:.3f}]"
        )
