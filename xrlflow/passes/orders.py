"""Searches for orders of XLA's passes for a file: the functions behind `xrlflow passes`.

from xrlflow.passes import orders

    found = orders.optimize("model.hlo", steps=200)
    print(found.before, found.default, found.after, found.order.passes)
    found.save("better.hlo")

A file is HLO text, StableHLO text or bytecode, or a serialized HloModuleProto.
"""

from __future__ import annotations

import math
import os
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from enum import Enum
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING, Any

import numpy as np

from xrlflow.backends.statistics import median_interval
from xrlflow.passes.cache import Cache
from xrlflow.passes.compiler import Comparison, Compiler, CompilerError, Metric, Module
from xrlflow.passes.pretrained import PRETRAINED, SEQUENCE
from xrlflow.passes.searches import Budget, Interrupted, Order, beam, evolve, greedy, random, refined, tree
from xrlflow.passes.xla import XlaCompiler, XlaOptions
from xrlflow.storage import files

if TYPE_CHECKING:
    from xrlflow.learn.log import Logs
    from xrlflow.passes.agent import Agent
    from xrlflow.passes.lessons import Trained

Source = str | os.PathLike[str]
# The number of pairs of runs in a measurement.
_PAIRS = 40


class Search(Enum):
    """The strategy of a search for an order."""

    RANDOM = "random"
    GREEDY = "greedy"
    BEAM = "beam"
    TREE = "mcts"
    EVOLUTION = "evolution"
    AGENT = "agent"  # orders drawn from an agent's policy
    GUIDED = "guided"  # tree search with an agent's policy
    REFINED = "refined"  # evolution from an order of an agent, or from the sequence of the package


WITHOUT_AGENT: dict[Search, Callable[..., Order]] = {
    Search.RANDOM: random,
    Search.GREEDY: greedy,
    Search.BEAM: beam,
    Search.TREE: tree,
    Search.EVOLUTION: evolve,
}


class OrderError(ValueError):
    """An option is wrong, an extra is missing, or training failed. The message is one line."""


class OutputsDiffer(RuntimeError):
    """A result computes something else than the original, and is not returned."""


@dataclass(frozen=True, slots=True)
class SearchOutcome:
    """An optimised module, and how it was found."""

    search: Search
    order: Order
    contents: str | bytes
    before: float  # the metric of the original module
    default: float  # the metric after the compiler's own order, repeated to its fixpoint
    after: float  # the metric of the result
    compared: Comparison  # the outputs of the result with those of the original
    is_default: bool  # no order was better than the compiler's own, so this is the result of that order
    seconds: float
    refused: tuple[str, ...] = ()
    """A line for each step (or for the compiler's own order) that would change what the module computes."""
    interrupted: bool = False  # Ctrl-C ended the search, and this is the best result until then

    def save(self, path: Source) -> None:
        """Write the result. Raises CompilerError."""
        data = self.contents.encode() if isinstance(self.contents, str) else self.contents
        try:
            files.write(path, data)
        except OSError as error:
            raise CompilerError(f"{os.fspath(path)} cannot be written: {error.strerror or error}") from error

    def to_json(self) -> dict[str, Any]:
        return {
            "search": self.search.value,
            "passes": [] if self.is_default else list(self.order.passes),
            "default_order": self.is_default,
            "before": self.before,
            "default": self.default,
            "after": self.after,
            "reduction_against_default": reduction(self.default, self.after),
            "outputs_equal": self.compared.equal,
            "worst_error": self.compared.worst,
            "outputs_note": self.compared.note,
            "outputs_not_compared": list(self.compared.blind),
            "refused": list(self.refused),
            "steps": self.order.steps,
            "interrupted": self.interrupted,
            "seconds": round(self.seconds, 2),
        }


def reduction(before: float, after: float) -> float:
    """The relative reduction from `before` to `after`."""
    return 1.0 - after / before if before > 0 else 0.0


@contextmanager
def xla(workers: int | None = None) -> Iterator[Compiler]:
    """XLA's compiler, with the cache in the user's cache directory. Raises CompilerError if jax is missing."""
    options = XlaOptions() if workers is None else XlaOptions(workers=workers)
    cache = Cache()
    try:
        with XlaCompiler(options, cache) as compiler:
            yield compiler
    finally:
        cache.close()


def read(compiler: Compiler, source: Source | files.StandardInput) -> Module:
    """The module in a file. Raises CompilerError, with the file's name, if it cannot be read or is not valid."""
    name = _name(source)
    try:
        data = source if isinstance(source, bytes) else files.read(source)
    except OSError as error:
        raise CompilerError(f"{name} cannot be read: {error.strerror or error}") from error
    try:
        return compiler.load(_text(data))
    except CompilerError as error:
        raise CompilerError(f"{name}: {error}") from error


def _name(source: Source | files.StandardInput) -> str:
    return source.name if isinstance(source, files.StandardInput) else os.fspath(source)


def _comparable(compiler: Compiler, source: Source | files.StandardInput) -> Module:
    """The module in a file. Raises CompilerError, with the file's name, if a search would be useless because results
    cannot be compared: the module does not run on this machine, or two runs of the module differ.
    """
    module, name = read(compiler, source), _name(source)
    try:
        comparison = compiler.compare(module, module)
    except CompilerError as error:
        raise CompilerError(f"{name}: {error}") from error
    if not comparison.equal:
        raise CompilerError(f"{name}: two runs of the module differ: {comparison.difference}")
    return module


def _text(data: bytes) -> str | bytes:
    """The content of a file as text, or as bytes if it is not text."""
    if b"\0" in data:
        return data
    try:
        return data.decode()
    except UnicodeDecodeError:
        return data


def searched(
    search: Search,
    compiler: Compiler,
    module: Module,
    budget: Budget,
    seed: int = 0,
    metric: Metric = Metric.OPERATIONS,
    agent: Agent | None = None,
) -> Order:
    """Search for an order. Raises OrderError if the search needs an agent and there is none."""
    if search in WITHOUT_AGENT:
        return WITHOUT_AGENT[search](compiler, module, budget, seed, metric)
    if search is Search.REFINED and agent is None:
        return refined(compiler, module, _fixed_sequence(compiler), budget, seed, metric)
    if agent is None:
        raise OrderError(f"the search {search.value} needs an agent: name its file")
    from xrlflow.passes.play import guided, refine, sample

    if search is Search.REFINED:
        return refine(agent, compiler, module, budget, seed, metric, [_fixed_sequence(compiler)])
    search_with = sample if search is Search.AGENT else guided
    return search_with(agent, compiler, module, budget, seed, metric)


def _fixed_sequence(compiler: Compiler) -> tuple[str, ...]:
    """The package's fixed sequence for this compiler; empty if it has none."""
    return SEQUENCE if set(SEQUENCE) <= set(compiler.passes) else ()


def search_and_agent(
    search: Search | None, agent: Source | None, compiler: Compiler
) -> tuple[Search, Agent | None]:
    """The search and the agent to use with a compiler. The default search is REFINED, with the agent of the package if
    this agent fits the compiler and the extra for agents is installed; it is EVOLUTION if there is neither an agent
    nor a sequence.

    Raises OrderError if the extra that the search needs is missing, and CheckpointError for an invalid file of an
    agent.
    """
    if agent is not None:
        return search or Search.REFINED, load_agent(agent)
    if search in WITHOUT_AGENT:
        return search, None
    if search in (None, Search.REFINED):
        shipped = None if _missing() else load_agent(PRETRAINED)
        if shipped is not None and not shipped.fits(compiler):
            shipped = None
        usual = Search.REFINED if shipped is not None or _fixed_sequence(compiler) else Search.EVOLUTION
        return search or usual, shipped
    return search, load_agent(PRETRAINED)


def optimize(
    source: Source | files.StandardInput,
    *,
    search: Search | None = None,
    agent: Source | None = None,
    steps: int = 200,
    horizon: int = 30,
    time_limit: float | None = None,
    metric: Metric = Metric.OPERATIONS,
    seed: int = 0,
    workers: int | None = None,
    compiler: Compiler | None = None,
) -> SearchOutcome:
    """Search for an order of passes that reduces a module's operations further than the compiler's own order.

    - `search`: the strategy (see `search_and_agent`). `agent`: the file of an agent. `metric`: the figure to reduce.
    - `steps`: passes that the compiler may run. `horizon`: the longest order. `time_limit`: seconds for the search.
    - `workers`: processes that run passes. `compiler`: a compiler instead of XLA's.

    Raises CompilerError for a module that cannot be read or run, OrderError for options, CheckpointError for an
    agent's file, and OutputsDiffer if the result does not compute the same.
    """
    _check_seed(seed)
    begin = time.monotonic()
    with _compiler(compiler, workers) as used:
        module = _comparable(used, source)
        how, loaded = search_and_agent(search, agent, used)
        deadline = None if time_limit is None else begin + time_limit
        interrupted = False
        try:
            order = searched(how, used, module, Budget(steps, horizon, deadline), seed, metric, loaded)
        except Interrupted as interrupt:
            order, interrupted = interrupt.order, True
        default = used.default(module)
        before, usual, after = _values(used, metric, module, default, order)
        refused = order.refused
        is_default = usual < after
        if is_default and not (own := used.compare(module, default, seed)).equal:
            is_default, refused = False, (*refused, f"the compiler's own order: {own.difference}")
        result = default if is_default else order.module
        compared = _checked(used, module, result, () if is_default else order.passes, seed)
        return SearchOutcome(
            how, order, used.write(result), before, usual, usual if is_default else after, compared, is_default,
            time.monotonic() - begin, refused, interrupted,
        )  # fmt: skip


def _values(
    compiler: Compiler, metric: Metric, module: Module, default: Module, order: Order
) -> tuple[float, float, float]:
    """Three values of the metric: of the original module, after the default order, and after the order of the search.
    A measured metric is measured again, because the minimum of the search's measurements is biased.
    """
    modules = (module, default, order.module)
    if metric is not Metric.SECONDS:
        before, usual, after = (m.summary.of(metric) for m in modules)
    else:
        before, usual, after = (median(times) for times in compiler.seconds(modules, _PAIRS))
    return before, usual, after


def _checked(
    compiler: Compiler, original: Module, result: Module, passes: Sequence[str], seed: int
) -> Comparison:
    """The comparison of the outputs. Raises OutputsDiffer, which names the pass that changed the outputs, if there is
    one.
    """
    comparison = compiler.compare(original, result, seed)
    if comparison.equal:
        return comparison
    present = original
    for name in passes:
        after = compiler.apply(present, name).module
        if not compiler.compare(present, after, seed).equal:
            raise OutputsDiffer(f"the pass {name} changes what the module computes: {comparison.difference}")
        present = after
    raise OutputsDiffer(f"the result computes something else than the original: {comparison.difference}")


@contextmanager
def _compiler(compiler: Compiler | None, workers: int | None) -> Iterator[Compiler]:
    if compiler is not None:
        yield compiler
    else:
        with xla(workers) as opened:
            yield opened


def _check_seed(seed: int) -> None:
    """Raise OrderError for a seed that some random generators do not accept."""
    if not 0 <= seed < 1 << 64:
        raise OrderError(f"a seed is an integer of 0 to {(1 << 64) - 1}, not {seed}")


def load_agent(path: Source) -> Agent:
    """Read an agent. Raises OrderError if the extra for agents is missing, CheckpointError for an invalid file."""
    _need_training()
    from xrlflow.passes.agent import Agent

    return Agent.load(path)


def _missing() -> list[str]:
    """The packages that agents need and that are not installed."""
    from importlib.util import find_spec

    return [name for name in ("torch", "gymnasium") if find_spec(name) is None]


def _need_training() -> None:
    if missing := _missing():
        raise OrderError(
            f"agents need {' and '.join(missing)}: install them with `pip install 'xrlflow[train]'`"
        )


def train(
    sources: Sequence[Source],
    output: Source,
    *,
    iterations: int = 100,
    steps: int = 256,
    horizon: int = 25,
    graph: bool = False,
    plain: bool = False,
    metric: Metric = Metric.OPERATIONS,
    time_limit: float | None = None,
    seed: int = 0,
    restart: bool = False,
    workers: int | None = None,
    log: Source | None = None,
    quiet: bool = True,
    compiler: Compiler | None = None,
) -> Trained:
    """Train an agent by PPO on modules, and write it to `output` whenever its evaluation is better than before. If an
    earlier run was stopped, it continues, unless `restart` is set.

    `graph`: the agent sees the graph of instructions. `plain`: without masking, shaping and curriculum. `log`: a
    folder for TensorBoard. Unless `quiet`, standard error shows the progress. Raises CompilerError, CheckpointError,
    and OrderError if a loss is not finite.
    """
    _check_seed(seed)
    _need_training()
    from xrlflow.learn.ppo import TrainingError
    from xrlflow.passes import ppo
    from xrlflow.passes.agent import AgentConfig, Network
    from xrlflow.passes.environment import Problem
    from xrlflow.passes.lessons import Teaching

    _check_log(log)
    state = ppo.state_path(output).resolve()
    if any(Path(source).resolve() == state for source in sources):
        raise OrderError(f"{state} would be overwritten by the state of the training: name another output")
    deadline = None if time_limit is None else time.monotonic() + time_limit
    network = Network.GRAPH if graph else Network.COUNTS
    try:
        config = ppo.TrainConfig(
            iterations, steps, seed=seed, evaluate_every=min(10, iterations), teaching=Teaching(metric=metric),
            agent=AgentConfig(network, horizon=horizon),
        )  # fmt: skip
    except ValueError as error:
        raise OrderError(str(error)) from error
    with _compiler(compiler, workers) as used:
        problems = [Problem(os.fspath(path), read(used, path)) for path in sources]
        try:
            return ppo.train(
                used, problems, config.plain() if plain else config, output, restart=restart, deadline=deadline,
                log=lambda done: _logs(log, iterations, done, quiet),
            )  # fmt: skip
        except TrainingError as error:
            raise OrderError(f"training failed: {error}") from error


_SHOWN = {
    "episode/return": "return {:.3f}",
    "evaluation/reduction": "evaluation {:.3f}",
    "ppo/entropy": "entropy {:.2f}",
    "time/steps_per_second": "{:.0f} steps/s",
}


def _check_log(folder: Source | None) -> None:
    """Raise OrderError if the folder for the log is a file."""
    if folder is not None and os.path.isfile(folder):
        raise OrderError(f"log {os.fspath(folder)} is a file: name a folder")


def _logs(folder: Source | None, iterations: int, done: int, quiet: bool) -> Logs:
    """The logs of a training run after `done` iterations."""
    from xrlflow.learn.log import Logs, TensorBoard, Terminal

    board = [] if folder is None else [TensorBoard(folder, since=done + 1 if done else 0)]
    return Logs(*board, *([] if quiet else [Terminal(iterations, _SHOWN, done)]))


@dataclass(frozen=True, slots=True)
class Row:
    """The result of one search on one module. `steps`, `seconds`: how many the search took. `refused`: see
    `SearchOutcome`.
    """

    search: str
    operations: int
    reduction: float
    equal: bool
    passes: tuple[str, ...]
    steps: int
    seconds: float
    refused: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Table:
    """The results of several searches on one module."""

    before: int
    default: int
    default_equal: bool  # whether the module after the compiler's own order computes the same as the original
    rows: tuple[Row, ...]
    time: tuple[float, float, float]
    """Median time after the default order divided by that after the best order, with its 95% interval."""
    control: tuple[float, float, float]  # the same ratio for the default order against itself


def bench(
    source: Source | files.StandardInput,
    *,
    searches: Sequence[Search] = tuple(WITHOUT_AGENT),
    agent: Source | None = None,
    steps: int = 200,
    horizon: int = 30,
    seed: int = 0,
    workers: int | None = None,
    compiler: Compiler | None = None,
) -> Table:
    """Compare searches at equal steps, and measure the speed-up of the best order. Raises what `optimize` raises, and
    OrderError without a search."""
    _check_seed(seed)
    if not searches:
        raise OrderError("no search is named to compare")
    with _compiler(compiler, workers) as used:
        module = _comparable(used, source)
        loaded = None
        for search in searches:  # the searches that need an agent share one agent
            loaded = search_and_agent(search, agent, used)[1] or loaded
        default = used.default(module)
        default_equal = used.compare(module, default, seed).equal
        rows, best = [], module
        for search in searches:
            order = searched(search, used, module, Budget(steps, horizon), seed, agent=loaded)
            equal = used.compare(module, order.module, seed).equal
            operations = order.module.summary.operations
            if equal and operations < best.summary.operations:
                best = order.module
            less = reduction(default.summary.operations, operations)
            row = Row(
                search.value, operations, less, equal, order.passes, order.steps, order.seconds, order.refused
            )
            rows.append(row)
        time_ratio, control = timed(used, default, best)
    before, after = module.summary.operations, default.summary.operations
    return Table(before, after, default_equal, tuple(rows), time_ratio, control)


Ratio = tuple[float, float, float]


def timed(compiler: Compiler, default: Module, best: Module, pairs: int = _PAIRS) -> tuple[Ratio, Ratio]:
    """Two ratios with their 95% intervals, from pairs of runs: the time after the default order divided by the time
    after the best order (above 1, the best order is faster), and A/A, the default order against itself.
    """
    # The default module is passed twice, so that the runs of all three modules alternate.
    first, other, again = compiler.seconds([default, best, default], pairs)
    return _ratio(first, other), _ratio(first, again)


def _ratio(old: Sequence[float], new: Sequence[float]) -> Ratio:
    """The median ratio of pairs, with its 95% interval."""
    logs = np.log(np.asarray(old, np.float64)) - np.log(np.asarray(new, np.float64))
    middle, low, high = (math.exp(x) for x in median_interval(logs))
    return middle, low, high
