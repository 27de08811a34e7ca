"""The command line. Heavy modules are imported by the commands that use them."""

from __future__ import annotations

import json
import signal
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import Annotated, Any, NoReturn

import typer

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
Shapes = Annotated[
    list[str] | None,
    typer.Option("--shape", help="Numbers for an input's dimensions: input=1,3,224,224. May be repeated."),
]
Threads = Annotated[
    int | None, typer.Option(min=1, help="Threads of the runtime; default: the physical cores.")
]
AsJson = Annotated[bool, typer.Option("--json", help="Print one JSON object to standard output.")]
Seed = Annotated[int, typer.Option(min=0, help="Seed of everything random.")]
Search = Annotated[
    str, typer.Option(help="xrlflow (an agent), taso, greedy, lookahead2, lookahead3 or random.")
]
Cost = Annotated[str, typer.Option(help="What guides the search: roofline, profiled or measured.")]
Budget = Annotated[int, typer.Option(min=0, help="Graphs that the search may expand.")]
TimeLimit = Annotated[float, typer.Option(min=0.0, help="Seconds for everything.")]
Inputs = Annotated[
    Path | None, typer.Option("--inputs", help="Your own inputs for verification and measurement (.npz).")
]

Cpu = Annotated[
    str | None, typer.Option(help="tvm: LLVM's name of the processor to compile for; default: this one.")
]
Triple = Annotated[
    str | None, typer.Option(help="tvm: LLVM's name of its system, if it is another (aarch64-linux-gnu).")
]
RemoteDevice = Annotated[
    str | None,
    typer.Option("--remote", help="tvm: run on a device of a TVM RPC tracker: HOST:PORT/KEY."),
]
TuningStore = Annotated[
    Path | None,
    typer.Option("--store", help="tvm: the file of tuned kernels; default: in the user's cache."),
]


def main() -> None:
    """Run the command line; errors of the user's making end in one line and exit code 2.

    SIGTERM (of a closed terminal SIGHUP) ends it at once, with nothing left behind and exit code 143 (129).
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
    """Unwind all that is being done, so that it cleans up. Being told twice does not interrupt that."""
    signal.signal(number, signal.SIG_IGN)
    raise _Terminated(128 + number)


def fail(message: str, code: int = 2) -> NoReturn:
    typer.echo(f"xrlflow: error: {printable(message)}", err=True)
    raise typer.Exit(code)


@contextmanager
def clear_errors() -> Iterator[None]:
    """Turn what a user can put right into one line."""
    from xrlflow.api import UserError, VerificationFailed

    try:
        yield
    except VerificationFailed as error:
        fail(str(error), code=1)
    except UserError as error:
        fail(str(error))
    except MemoryError:
        fail("out of memory: the model, or one of its values, is too large for this machine")
    except KeyboardInterrupt:  # where there is something to keep, it ends otherwise
        fail("interrupted before there was a result", code=130)


def parse_shapes(options: list[str] | None) -> dict[str, tuple[int, ...]] | None:
    if not options:
        return None
    shapes: dict[str, tuple[int, ...]] = {}
    for option in options:
        name, equals, dims = option.rpartition("=")
        try:
            shapes[name] = tuple(int(d) for d in dims.split(",") if d.strip()) if equals else ()
        except ValueError:
            equals = ""
        if not equals or not name or any(d < 0 for d in shapes[name]):
            fail(f"--shape {option}: write it as NAME=1,3,224,224")
    return shapes


@app.command()
def optimize(
    model: Model,
    output: Annotated[Path, typer.Option("-o", "--output", help="Where the result goes.")],
    search: Search = "xrlflow",
    cost: Cost = "profiled",
    backend: Annotated[
        str, typer.Option(help="onnxruntime, or tvm: -o names a shared library.")
    ] = "onnxruntime",
    cpu: Cpu = None,
    triple: Triple = None,
    remote: RemoteDevice = None,
    backend_ops: Annotated[
        bool, typer.Option(help="Allow operators that only this runtime has (com.microsoft).")
    ] = False,
    allow_approximate: Annotated[
        bool,
        typer.Option("--allow-approximate", help="Allow rules that may lose more than two bits of accuracy."),
    ] = False,
    assume: Annotated[
        list[str] | None,
        typer.Option(help="What holds: finite (no infinities, no NaN), vnni (the processor)."),
    ] = None,
    budget: Budget = 1000,
    time_limit: TimeLimit = 60.0,
    alpha: Annotated[
        float, typer.Option(min=1.0, help="TASO: how much worse than the best may a graph be.")
    ] = 1.05,
    agent: Annotated[
        Path | None, typer.Option(help="xrlflow: an agent of your own (`xrlflow train`).", show_default=False)
    ] = None,
    train_steps: Annotated[
        int, typer.Option(min=0, help="xrlflow: train the agent on this model first, for so many steps.")
    ] = 0,
    shape: Shapes = None,
    fix_shapes: Annotated[bool, typer.Option(help="Write the numbers of --shape into the file.")] = False,
    store: TuningStore = None,
    threads: Threads = None,
    seed: Seed = 0,
    measure: Annotated[bool, typer.Option(help="Measure the result against the original.")] = True,
    verify: Annotated[
        bool, typer.Option(help="Compare the result with the original on random inputs.")
    ] = True,
    inputs: Inputs = None,
    max_growth: Annotated[
        float, typer.Option(min=0.0, help="Largest size of the result, in sizes of the input.")
    ] = 1.2,
    opset: Annotated[int | None, typer.Option(help="The opset of the result; default: 23.")] = None,
    trace: Annotated[Path | None, typer.Option(help="Write the substitutions to this file.")] = None,
    replay: Annotated[
        Path | None, typer.Option(help="Apply the substitutions of this file; no search.")
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Write a faster model that computes the same, or the original if none was found."""
    with clear_errors():
        from xrlflow import api
        from xrlflow.report import progress, show

        shapes = parse_shapes(shape)
        api.check_writable(output, library=backend == "tvm")
        if trace is not None:
            api.check_writable(trace)
        with progress(enabled=not as_json and sys.stderr.isatty()) as listener:
            result = api.optimize(
                model, search=search, cost=cost, backend=backend, cpu=cpu, triple=triple, remote=remote,
                backend_ops=backend_ops,
                allow_approximate=allow_approximate, assuming=assume or (), budget=budget,
                time_limit=time_limit, alpha=alpha, agent=agent, train_steps=train_steps, shapes=shapes,
                fix_shapes=fix_shapes, store=store, threads=threads, seed=seed,
                measure=measure, verify=verify, inputs=inputs, max_growth=max_growth, opset=opset, replay=replay,
                listener=listener,
            )  # fmt: skip
        result.save(output)
        if trace is not None:
            result.save_trace(trace)
        if as_json:
            print_json(result.report.to_json())
        else:
            show.optimization(result.report, str(output))


@app.command()
def compare(
    model: Model,
    searches: Annotated[
        str, typer.Option(help="Strategies, separated by commas.")
    ] = "xrlflow,taso,greedy,random",
    cost: Cost = "profiled",
    budget: Budget = 1000,
    time_limit: Annotated[float, typer.Option(min=0.0, help="Seconds for each strategy.")] = 60.0,
    shape: Shapes = None,
    threads: Threads = None,
    seed: Seed = 0,
    measure: bool = True,
    as_json: AsJson = False,
) -> None:
    """Optimise with several strategies, and print a table of what each brings."""
    with clear_errors():
        from xrlflow import api
        from xrlflow.report import show

        comparison = api.compare(
            model, searches=tuple(s.strip() for s in searches.split(",") if s.strip()), cost=cost, budget=budget,
            time_limit=time_limit, shapes=parse_shapes(shape), threads=threads, seed=seed, measure=measure,
        )  # fmt: skip
        if as_json:
            print_json([r.to_json() for r in comparison.reports])
        else:
            show.comparison(comparison.reports)


@app.command()
def rules(
    names: Annotated[list[str] | None, typer.Argument(help="Only these rules.", show_default=False)] = None,
    prove: Annotated[bool, typer.Option("--prove", help="Prove the rules, and print certificates.")] = False,
    stats: Annotated[
        Path | None, typer.Option(help="Match the rules against this model: hits, time, near misses.")
    ] = None,
    seed: Seed = 0,
    as_json: AsJson = False,
) -> None:
    """List the rewrite rules (equation, family, backend, proof), or prove them.

    Exit code 1: a rule is not proven, or a wrong one made of it passes and nobody knows why.
    """
    with clear_errors():
        from xrlflow import api
        from xrlflow.report import show

        if prove:
            certificates = api.prove_rules(names or (), seed=seed, listener=None if as_json else show.proven)
            if as_json:
                print_json([c.to_json() for c in certificates])
            else:
                show.certificates(certificates)
            if not all(c.proven and not c.unexplained for c in certificates):
                raise typer.Exit(1)
            return
        listed = api.rule_stats(stats, names or ()) if stats is not None else api.list_rules(names or ())
        if as_json:
            print_json(listed)
        else:
            show.rules(listed)


@app.command()
def verify(
    original: Annotated[Path, typer.Argument(help="The model that is right.")],
    new: Annotated[Path, typer.Argument(help="The model that should compute the same.")],
    shape: Shapes = None,
    inputs: Inputs = None,
    seed: Seed = 0,
    as_json: AsJson = False,
) -> None:
    """Compare two models on random inputs, with a tolerance that float64 evaluation of the first one gives."""
    with clear_errors():
        from xrlflow import api
        from xrlflow.report import show

        verification = api.verify_files(original, new, shapes=parse_shapes(shape), inputs=inputs, seed=seed)
        if as_json:
            print_json(verification.to_json())
        else:
            show.verification(verification)
        if not verification.verified:
            raise typer.Exit(1)


@app.command()
def bench(
    model: Model,
    against: Annotated[Path | None, typer.Option(help="Compare with this model.")] = None,
    shape: Shapes = None,
    threads: Threads = None,
    time_limit: Annotated[float, typer.Option(min=0.0, help="Seconds.")] = 20.0,
    inputs: Inputs = None,
    seed: Seed = 0,
    as_json: AsJson = False,
) -> None:
    """Measure a model's latency, or the ratio of two models' latencies with its interval."""
    with clear_errors():
        from xrlflow import api
        from xrlflow.report import show

        measured = api.bench(
            model,
            against,
            shapes=parse_shapes(shape),
            threads=threads,
            time_limit=time_limit,
            inputs=inputs,
            seed=seed,
        )
        if as_json:
            print_json(measured)
        else:
            show.bench(measured)


@app.command()
def tune(
    model: Model,
    output: Annotated[Path, typer.Option("-o", "--output", help="Where the shared library (.so) goes.")],
    method: Annotated[
        str, typer.Option(help="chameleon, evolutionary, random, annealing or beam.")
    ] = "chameleon",
    trials: Annotated[int, typer.Option(min=0, help="Kernels that are built and measured.")] = 512,
    batch: Annotated[int, typer.Option(min=1, help="Of one kernel at a time.")] = 16,
    time_limit: Annotated[float, typer.Option(min=0.0, help="Seconds of tuning.")] = 600.0,
    cpu: Cpu = None,
    triple: Triple = None,
    remote: RemoteDevice = None,
    shape: Shapes = None,
    threads: Threads = None,
    seed: Seed = 0,
    store: TuningStore = None,
    rewrite: Annotated[bool, typer.Option(help="Tune what greedy search makes of the graph, too.")] = True,
    measure: Annotated[bool, typer.Option(help="Measure the result.")] = True,
    verify: Annotated[
        bool, typer.Option(help="Compare the result with the original on random inputs.")
    ] = True,
    inputs: Inputs = None,
    as_json: AsJson = False,
) -> None:
    """Compile a model with TVM, its kernels tuned on this machine or a remote device."""
    with clear_errors():
        from xrlflow import api
        from xrlflow.report import progress, show

        api.check_writable(output, library=True)
        with progress(enabled=not as_json and sys.stderr.isatty()) as listener:
            tuned = api.tune(
                model, method=method, trials=trials, batch=batch, time_limit=time_limit, cpu=cpu, triple=triple,
                remote=remote, shapes=parse_shapes(shape), threads=threads, seed=seed, store=store, rewrite=rewrite,
                measure=measure, verify=verify, inputs=inputs, listener=listener,
            )  # fmt: skip
        tuned.save(output)
        if as_json:
            print_json(tuned.to_json())
        else:
            show.tuned(tuned.to_json(), tuned.speedup, tuned.control, str(output))


@app.command()
def train(
    models: Annotated[list[Path], typer.Argument(help="The ONNX files to learn from.")],
    output: Annotated[Path, typer.Option("-o", "--output", help="Where the agent goes.")],
    held_out: Annotated[
        list[Path] | None, typer.Option(help="A file to evaluate on and not to learn from. May be repeated.")
    ] = None,
    iterations: Annotated[int, typer.Option(min=1, help="Updates of the agent.")] = 200,
    steps: Annotated[int, typer.Option(min=1, help="Substitutions tried for each update.")] = 2048,
    horizon: Annotated[int, typer.Option(min=1, help="Substitutions of an episode.")] = 100,
    workers: Annotated[int, typer.Option(min=0, help="Processes; 0: only this one.")] = 2,
    start: Annotated[Path | None, typer.Option(help="An agent to begin with.")] = None,
    restart: Annotated[bool, typer.Option(help="Do not go on where a run with this output stopped.")] = False,
    time_limit: Annotated[float | None, typer.Option(min=0.0, help="Seconds after which it ends.")] = None,
    log: Annotated[Path | None, typer.Option(help="A folder for TensorBoard.")] = None,
    seed: Seed = 0,
    as_json: AsJson = False,
) -> None:
    """Train an agent that chooses substitutions. Goes on where it stopped, when it is run again."""
    with clear_errors():
        import time

        from rewrite_rules import LIBRARY
        from xrlflow.cost import Roofline
        from xrlflow.learn.checkpoint import CheckpointError
        from xrlflow.learn.log import Logs, TensorBoard, Terminal
        from xrlflow.learn.ppo import TrainingError
        from xrlflow.rl import train as training
        from xrlflow.rl.agent import Agent, AgentConfig
        from xrlflow.rl.env import EnvConfig
        from xrlflow.rl.features import Vocabulary
        from xrlflow.rl.workers import WorkerError

        for path in (*models, *(held_out or ())):
            if not path.is_file():
                fail(f"{path} is no file")
        shown = {
            "episode/return": "return {:.3f}",
            "episode/gain": "gain {:.4f}",
            "evaluation/gain": "evaluation {:.4f}",
            "ppo/approx_kl": "kl {:.3f}",
            "ppo/entropy": "entropy {:.2f}",
            "time/steps_per_second": "{:.0f} steps/s",
        }

        def logs(done: int) -> Logs:
            told = [] if as_json else [Terminal(iterations, shown, done)]
            return Logs(
                *told, *([TensorBoard(log, since=done + 1 if done else 0)] if log is not None else ())
            )

        try:
            begin = None if start is None else Agent.load(start)
            files = training.Files(
                tuple(map(str, models)), tuple(map(str, held_out or ())), tuple(LIBRARY), Roofline
            )
            if begin is not None:
                begin = begin.extended(files.library())
            config = training.TrainConfig(
                iterations, steps, workers, seed=seed, env=EnvConfig(horizon=horizon),
                agent=AgentConfig() if begin is None else begin.config,
            )  # fmt: skip
            trained = training.train(
                files, Vocabulary.of(files.library()) if begin is None else begin.vocabulary, config, output,
                start=begin, resume=not restart,
                deadline=None if time_limit is None else time.monotonic() + time_limit,
                log=logs, about={"command": " ".join(["xrlflow", *sys.argv[1:]])},
            )  # fmt: skip
        except (CheckpointError, TrainingError, WorkerError) as error:
            fail(str(error))
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


def print_json(value: Any) -> None:
    print(json.dumps(value, indent=2, allow_nan=False))


if __name__ == "__main__":
    main()
