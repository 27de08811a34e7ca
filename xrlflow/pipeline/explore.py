"""The search: by the user's strategy, or by the substitutions of a trace."""

from __future__ import annotations

import math
import os
import time
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from xrlflow.cost import AdditiveCost, CostModel, PlacementCost, Roofline, in_time
from xrlflow.options import LOOKAHEAD, RLFLOW, TREE, WITH_AGENT, OptionError
from xrlflow.pipeline.context import Context
from xrlflow.pipeline.prepare import Start
from xrlflow.report import no_search
from xrlflow.search import (
    Limits,
    SearchNode,
    SearchResult,
    greedy,
    lookahead,
    random_walk,
    retraced,
    taso,
)

if TYPE_CHECKING:
    from collections.abc import Mapping

    from xrlflow.rl.features import Featuriser
    from xrlflow.rl.parameters import Parameters
    from xrlflow.rl.world_model.learning import Learner

# The minimum duration of a search in seconds (with an agent, counted after the agent is loaded), unless later phases
# would lack this time.
_SEARCH_AT_LEAST = 2.0
# The time limit of the greedy search before an agent searches: in seconds, and as a fraction of the agent's training
# time.
_GREEDY_SECONDS, _GREEDY_AT_MOST = 1.5, 0.1
# How much slower results are without the agent: from the geometric means of docs/benchmarks/latency.md, 1.131 and
# 1.133.
_LOST = "greedy search took its place, whose results are 0.2% slower on average"
# Seconds to load the agent, and to load torch for an agent that will be trained.
_AGENT_LOADING, _TORCH_LOADING = 0.5, 3.0
# The training of an agent before it searches with `rlflow`: steps in the user's graph, from which its world model
# learns; the minimum number of rounds in the world model; and the maximum numbers of steps and of updates in each
# round.
_DREAM_STEPS, _DREAM_ROUNDS, _DREAM_ROUND, _DREAM_UPDATES = 200, 5, 400, 30


@dataclass(frozen=True, slots=True)
class Explored:
    """The result of a search.

    `proposals`: graphs whose files are not too large, the best by modelled cost first. `late`: why there was no time
    to search, or "". `progress`: the number of graphs expanded, and the modelled seconds of the best graph so far, at
    each improvement.
    """

    result: SearchResult
    proposals: tuple[SearchNode, ...]
    late: str = ""
    progress: tuple[tuple[int, float], ...] = ()


def explore(context: Context, start: Start) -> Explored:
    """Search, or replay a trace. After Ctrl-C, `Clock.hurry` moves the deadline. Raises OptionError."""
    model = start.model
    clock, options = context.clock, context.options
    train_until = clock.budget.train_until if options.train_steps and not clock.hurried else None
    now, budget = time.monotonic(), clock.budget
    in_time = train_until is not None or now < max(budget.search_until, budget.select_until)
    late = "" if in_time else no_search(now - clock.begin, options.time_limit, clock.phases)
    progress: list[tuple[int, float]] = []
    with clock.phase("search"):
        if options.replay is None:
            result = search(context, start.base, model, progress, train_until)
        else:
            result = _replayed(start)
    if result.interrupted:
        context.notes.append("interrupted: the best so far is kept")
        clock.hurry()
    proposals = tuple(f for f in (result.best, *result.shortlist) if context.fits(f))
    if not context.fits(result.best):
        growth = options.max_growth
        context.notes.append(f"the best graph exceeds {growth:g} times the input's size (--max-growth)")
    return Explored(result, proposals, late, tuple(progress))


def search(
    context: Context, base: SearchNode, model: CostModel, history: list[tuple[int, float]] | None = None,
    train_until: float | None = None,
) -> SearchResult:  # fmt: skip
    """Search from a state, by the user's strategy. `history` receives the entries of `Explored.progress`.

    `train_until`: the agent trains on this state until then (time.monotonic), and the time that remains after the
    training is divided among the phases again. By default training uses a part of the search's time.
    """
    options, clock = context.options, context.clock
    limits = Limits(options.budget, _at_least(context, clock.budget.search_until))

    def progress(done: int, best: float) -> None:
        if history is not None and (not history or history[-1][1] != best):
            history.append((done, best))
        context.say("search", done, options.budget, f"best so far {best * 1e3:.3f} ms, modelled")

    limits.progress = progress
    if options.search == "greedy":
        return greedy(base.state, base.cost, limits)
    if options.search == "random":
        return random_walk(base.state, base.cost, limits, options.seed)
    if options.search in LOOKAHEAD:
        return lookahead(base.state, base.cost, limits, LOOKAHEAD[options.search])
    if options.search in WITH_AGENT:
        return _with_agent(context, base, model, limits, train_until)
    return taso(base.state, base.cost, limits, options.alpha)


def _at_least(context: Context, until: float) -> float:
    """The deadline of a search that begins now: `until`, or a little later if the search begins late."""
    return max(until, min(time.monotonic() + _SEARCH_AT_LEAST, context.clock.budget.select_until))


def _with_agent(
    context: Context, base: SearchNode, model: CostModel, limits: Limits, train_until: float | None
) -> SearchResult:
    """Search with the user's agent. If greedy search finds a better graph, this graph is the result."""
    options = context.options
    if not base.state.candidates and options.agent is None:
        return SearchResult(base, (base,), 0, 0, 0.0, False)
    loading = _TORCH_LOADING if options.search == RLFLOW or options.train_steps else _AGENT_LOADING
    late = time.monotonic() + loading > context.clock.budget.select_until
    if options.agent is None and train_until is None and late:
        where = " in the search by the prices of kernels" if isinstance(model, PlacementCost) else ""
        context.notes.append(f"there was no time for the agent{where} (--time-limit): {_LOST}")
        return greedy(base.state, base.cost, limits)
    # Its time is limited because, with slow cost models, greedy search would take all the time. (The agent's search
    # begins greedily anyway.)
    now = time.monotonic()
    quickly = now + (_GREEDY_SECONDS if train_until is None else _GREEDY_AT_MOST * (train_until - now))
    if limits.deadline is not None:
        quickly = min(quickly, limits.deadline)
    quick = greedy(base.state, base.cost, Limits(options.budget, quickly))
    if quick.interrupted:
        return quick
    try:
        result = _by_agent(context, base, model, limits, train_until)
    except KeyboardInterrupt:  # during the loading of the agent, which takes seconds if torch is needed
        return replace(quick, interrupted=True)
    if quick.best.cost < result.best.cost:
        context.notes.append(f"greedy search found a better graph than {options.search}, and its is kept")
        return replace(quick, interrupted=result.interrupted)
    return result


def _by_agent(
    context: Context, base: SearchNode, model: CostModel, limits: Limits, train_until: float | None
) -> SearchResult:
    """Search with the agent, after training it on this model if the options ask for that. Raises OptionError for a file
    that is no agent."""
    from xrlflow.rl.features import Featuriser
    from xrlflow.rl.mcts import tree_search
    from xrlflow.rl.network import Network
    from xrlflow.rl.parameters import Parameters
    from xrlflow.rl.pretrained import DREAMER, PRETRAINED
    from xrlflow.rl.situation import choices
    from xrlflow.rl.strategy import PolicyError, agent_search
    from xrlflow.storage.checkpoint import CheckpointError

    options = context.options
    shipped = DREAMER if options.search == RLFLOW else PRETRAINED
    path = options.agent if options.agent is not None else shipped
    interrupted = False
    try:
        parameters = Parameters.load(path).extended(context.library)
        prices = model if isinstance(model, AdditiveCost) else Roofline(bindings=context.imported.bindings)
        featuriser = Featuriser(parameters.vocabulary, prices)
        if limits.deadline is not None:  # loading the agent took time
            limits.deadline = _at_least(context, limits.deadline)
        until = train_until
        if until is None:
            until = context.clock.budget.train_in_search_until
        # Without candidates the agent has nothing to learn.
        usable = bool(choices(base.state, {base.state.fingerprint}))
        if usable and options.search == RLFLOW:
            parameters, interrupted = _dreamt(context, base, path, featuriser, until)
        elif usable and options.train_steps:
            parameters, interrupted = _fine_tuned(context, base, parameters, featuriser, until)
        if interrupted:
            limits.deadline = time.monotonic()
        elif train_until is not None:
            context.clock.share()
            limits.deadline = _at_least(context, context.clock.budget.search_until)
        network = Network(parameters)
        if options.search == TREE:
            result = tree_search(base.state, base.cost, limits, network, featuriser)
        else:
            result = agent_search(base.state, base.cost, limits, network, featuriser, seed=options.seed)
    except CheckpointError as error:
        raise OptionError(f"agent: {error}") from error
    except PolicyError as error:
        raise OptionError(f"agent {os.fspath(path)}: {error}") from error
    return replace(result, interrupted=result.interrupted or interrupted)


def _fine_tuned(
    context: Context, base: SearchNode, parameters: Parameters, featuriser: Featuriser, until: float
) -> tuple[Parameters, bool]:
    """The agent's parameters after training on this model until `until` (time.monotonic), and whether Ctrl-C stopped
    the training. Raises OptionError."""
    from xrlflow.learn.threads import one_thread
    from xrlflow.rl.agent import Agent
    from xrlflow.rl.env import Problem
    from xrlflow.rl.features import Pricing
    from xrlflow.rl.train import TrainingError, fine_tune
    from xrlflow.rl.workers import Task

    assert base.state.delta is not None, "candidates have no prices"
    options = context.options
    state = replace(base.state, delta=Pricing(in_time(base.state.delta, until)))
    task = Task([Problem(context.imported.name, state, base.cost)], (), featuriser)
    try:
        with one_thread():
            trained = fine_tune(
                Agent.of(parameters), task, options.train_steps, seed=options.seed, deadline=until,
                progress=lambda values, done: context.say("train", done, 0, f"gain {values['evaluation/gain']:.3f}"),
            )  # fmt: skip
    except TrainingError as error:
        raise OptionError(f"train_steps: {error}") from error
    if trained.steps or trained.interrupted:
        context.notes.append(f"the agent was trained on this model for {trained.steps} steps")
    else:
        context.notes.append("the agent did not learn: there was no time for an iteration (--time-limit)")
    return trained.agent.arrays(), trained.interrupted


def _dreamt(
    context: Context, base: SearchNode, path: str | os.PathLike[str], featuriser: Featuriser, until: float
) -> tuple[Parameters, bool]:
    """The agent's parameters after training in a world model of this model until `until` (time.monotonic), and whether
    Ctrl-C stopped the training.

    An agent whose file has no world model gets a new one. Raises CheckpointError, and OptionError.
    """
    from xrlflow.learn.threads import one_thread
    from xrlflow.rl.agent import Agent
    from xrlflow.rl.env import Problem
    from xrlflow.rl.features import Pricing
    from xrlflow.rl.train import TrainingError
    from xrlflow.rl.world_model.files import load_world, world_path
    from xrlflow.rl.world_model.learning import Learner, LearningConfig, train_world_model

    assert base.state.delta is not None, "candidates have no prices"
    options = context.options
    agent, world = load_world(path) if world_path(path).exists() else (Agent.load(path), None)
    agent = agent.extended(context.library)
    state = replace(base.state, delta=Pricing(in_time(base.state.delta, until)))
    problem = Problem(context.imported.name, state, base.cost)
    steps = options.train_steps or _DREAM_STEPS
    rounds = max(_DREAM_ROUNDS, math.ceil(steps / _DREAM_ROUND))
    done = 0

    def progress(figures: Mapping[str, float], number: int, learner: Learner) -> None:
        nonlocal done
        done = number + 1
        context.say("train", done, rounds, f"savings {figures['world/saving']:.4f}")

    interrupted = False
    try:
        with one_thread():
            train_world_model(
                Learner(agent, LearningConfig(updates=_DREAM_UPDATES), options.seed, world), [problem], featuriser,
                steps=steps, rounds=rounds, deadline=until, progress=progress,
            )  # fmt: skip
    except TrainingError as error:
        raise OptionError(f"search 'rlflow': {error}") from error
    except KeyboardInterrupt:  # the search uses what the agent has learned so far
        interrupted = True
    trained = "1 round" if done == 1 else f"{done} rounds"
    context.notes.append(f"the agent trained in a world model of this model for {trained}")
    return agent.arrays(), interrupted


def _replayed(start: Start) -> SearchResult:
    steps = start.to_replay
    nodes = retraced(start.base, steps, len(start.early) + 1)
    return SearchResult(nodes, (nodes,), len(steps), len(steps), 0.0, False)
