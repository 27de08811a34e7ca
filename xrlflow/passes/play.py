"""Optimises a module with an agent: by one order of the agent, or by a search with its policy."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import numpy as np
import torch

from xrlflow.learn.segments import SegmentCategorical
from xrlflow.learn.threads import one_thread
from xrlflow.passes.agent import Agent
from xrlflow.passes.compiler import Compiler, Metric, Module
from xrlflow.passes.environment import Masking, Observation, PassEnv, Problem
from xrlflow.passes.searches import Budget, Explorer, Meter, Node, Order, TreeConfig, tree, without_effect
from xrlflow.passes.searches.sequences import improve
from xrlflow.passes.searches.steps import until_over
from xrlflow.storage.checkpoint import CheckpointError

# A function from an observation to an action.
_Choose = Callable[[Observation], int]
_IDLE = 200  # a search ends after this many episodes in a row that ran no new pass


@one_thread()
def play(
    agent: Agent,
    compiler: Compiler,
    module: Module,
    metric: Metric = Metric.OPERATIONS,
    compared: bool = True,
) -> Order:
    """The order of the likeliest passes, until the agent stops or the horizon ends. Nothing is random.

    `compared`: whether the result is compared with the module, which takes longer than running the order itself.
    Raises CheckpointError if the agent was created for other passes.
    """
    agent.check(compiler)
    horizon = agent.config.horizon
    explorer = Explorer(compiler, module, Budget(horizon, horizon), metric, compared)
    return until_over(explorer, lambda: _episode(agent, explorer, _likeliest(agent)))


@one_thread()
def sample(
    agent: Agent,
    compiler: Compiler,
    module: Module,
    budget: Budget,
    seed: int = 0,
    metric: Metric = Metric.OPERATIONS,
) -> Order:
    """The likeliest order first, then orders that are drawn from the policy, until the budget is used up.

    A pass that is known to have no effect on a module is not drawn for it, even if the agent was trained without
    masking.
    """
    agent.check(compiler)
    explorer = Explorer(compiler, module, budget, metric)
    generator = torch.Generator().manual_seed(seed)

    def draw(observation: Observation) -> int:
        return int(_decided(agent, observation).sample(generator)[0])

    def play_on() -> None:
        _episode(agent, explorer, _likeliest(agent))
        idle = 0
        while idle < _IDLE:
            before = explorer.meter.steps
            _episode(agent, explorer, draw)
            idle = 0 if explorer.meter.steps > before else idle + 1

    return until_over(explorer, play_on)


@one_thread()
def refine(
    agent: Agent,
    compiler: Compiler,
    module: Module,
    budget: Budget,
    seed: int = 0,
    metric: Metric = Metric.OPERATIONS,
    known: Sequence[Sequence[str]] = (),
) -> Order:
    """Play known sequences and the likeliest order, then improve the best of them by `improve`, which tries passes in
    the order of their probability by the policy."""
    agent.check(compiler)
    explorer = Explorer(compiler, module, budget, metric)
    priors = _policy(agent, explorer.meter, module)

    def ranked(node: Node) -> list[str]:
        likely = priors(node)
        return sorted(explorer.open(node), key=lambda name: -likely[name])

    def play_on() -> None:
        for passes in known:
            explorer.replay(passes[: budget.horizon])
        _episode(agent, explorer, _likeliest(agent))
        improve(explorer, ranked, seed)

    return until_over(explorer, play_on)


@one_thread()
def guided(
    agent: Agent,
    compiler: Compiler,
    module: Module,
    budget: Budget,
    seed: int = 0,
    metric: Metric = Metric.OPERATIONS,
    config: TreeConfig | None = None,
) -> Order:
    """Monte Carlo tree search with the agent's policy as its priors."""
    agent.check(compiler)
    meter = Meter(compiler, budget)
    priors = _policy(agent, meter, module)
    return tree(meter, module, budget, seed, metric, config or TreeConfig(), priors)


def _policy(agent: Agent, meter: Meter, module: Module) -> Callable[[Node], Mapping[str, float]]:
    """The policy as a function of nodes of a search."""
    env = _environment(agent, meter, module)

    def priors(node: Node) -> Mapping[str, float]:
        """The policy at a node. The results of the passes that led to the node are cached, so replaying these passes
        costs no steps.
        """
        observation, _ = env.reset(seed=0)
        for name in node.passes[: agent.config.horizon - 1]:
            observation = env.step(agent.passes.index(name))[0]
        observation = narrowed(observation, meter, node.module, agent.config.masking)
        probabilities = _decided(agent, observation).probs.double().numpy()
        return dict(zip(agent.passes, probabilities + 1e-3))

    return priors


def narrowed(observation: Observation, compiler: Compiler, module: Module, masking: Masking) -> Observation:
    """The observation with a mask that also excludes the passes that the compiler knows to have no effect."""
    idle = without_effect(compiler, module) if masking is not Masking.NONE else frozenset()
    if not idle:
        return observation
    mask = observation["action_mask"].copy()
    mask[[number for number, name in enumerate(compiler.passes) if name in idle]] = 0
    return {**observation, "action_mask": mask}


def _environment(agent: Agent, compiler: Compiler, module: Module) -> PassEnv:
    return PassEnv(compiler, [Problem("module", module)], agent.config.episode())


def _likeliest(agent: Agent) -> _Choose:
    def choose(observation: Observation) -> int:
        with torch.no_grad():
            scores, _ = agent.scores([observation])
        _check_finite(scores[0][torch.from_numpy(observation["action_mask"]).bool()])
        return int(np.argmax(scores[0].numpy()))

    return choose


def _decided(agent: Agent, observation: Observation) -> SegmentCategorical:
    """The agent's distribution over passes and stop."""
    with torch.no_grad():
        distribution, _ = agent.evaluate([observation])
    _check_finite(distribution.probs)
    return distribution


def _check_finite(numbers: torch.Tensor) -> None:
    """Raise CheckpointError if an agent's scores are not finite. In a damaged file, even finite weights can cause
    this.
    """
    if not bool(numbers.isfinite().all()):
        raise CheckpointError("the agent gives scores that are not finite: its weights are damaged")


def _episode(agent: Agent, explorer: Explorer, choose: _Choose) -> None:
    """Play one episode. The explorer keeps the best module that it reaches. Raises BudgetUsedUp.

    As in training, the mask includes what was observed in this episode.
    """
    env = _environment(agent, explorer.meter, explorer.root.module)
    observation, _ = env.reset(seed=0)
    node, over = explorer.root, False
    while not over:
        masking = agent.config.masking
        action = choose(narrowed(observation, explorer.meter, node.module, masking))
        if action < len(agent.passes):
            node = explorer.apply(node, agent.passes[action]) or node
        observation, _, terminated, truncated, _ = env.step(action)
        over = terminated or truncated
