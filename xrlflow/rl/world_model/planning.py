"""Planning in latents: Gumbel MuZero's tree search inside the world model (Danihelka et al., 2022).

A plan imagines what follows from the candidates of one real state, and never calls the engine. At the root, several
actions are drawn without replacement by the Gumbel trick, and sequential halving divides the simulations among them.
Below the root, the next action is the one whose visits are farthest below an improved policy. Latents are
deterministic.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt
import torch

from xrlflow.rl.agent import Agent, Embedded
from xrlflow.rl.world_model.dream import Heads, Imagined, tell
from xrlflow.rl.world_model.dynamics import Memory, World, latent_of
from xrlflow.rl.world_model.experience import SCALE

Doubles = npt.NDArray[np.float64]


@dataclass(frozen=True, slots=True)
class PlanConfig:
    """The parameters of planning with the world model."""

    simulations: int = 32  # simulations of one plan
    considered: int = 8  # actions of the root that are simulated
    depth: int = 12  # the greatest number of steps of a simulation
    visit: float = 50.0
    scale: float = 0.1
    """`visit` and `scale` decide how fast the results of simulations outweigh the policy (50 and 0.1 in the paper's
    experiments).
    """
    gamma: float = 0.99


@dataclass(slots=True, eq=False)
class _State:
    """An imagined state in the tree: A actions, the last of which is No-Op."""

    latent: torch.Tensor
    memory: Memory
    imagined: Imagined
    cost: float
    best: float
    depth: int
    logits: Doubles
    value: float
    visits: Doubles = field(init=False)
    total: Doubles = field(init=False)
    children: dict[int, tuple[float, _State]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.visits, self.total = np.zeros(len(self.logits)), np.zeros(len(self.logits))

    def worth(self) -> Doubles:
        """The mean return of each action; for actions without visits, the value of the state."""
        visited = self.visits > 0
        means = np.where(visited, self.total / np.maximum(self.visits, 1), 0.0)
        if not visited.any():
            return np.full(len(self.logits), self.value)
        chances = np.exp(self.logits)
        mixed = float((chances * means)[visited].sum() / max(float(chances[visited].sum()), 1e-12))
        often = self.visits.sum()
        return np.where(visited, means, (self.value + often * mixed) / (1 + often))


class Planner:
    """Plans an agent's actions with a world model."""

    def __init__(self, agent: Agent, world: World, config: PlanConfig = PlanConfig(), seed: int = 0) -> None:
        self.heads, self.world, self.config = Heads(agent), world, config
        self.rng = np.random.default_rng(seed)
        self.least, self.greatest = math.inf, -math.inf

    def plan(self, start: Embedded, noisy: bool = False) -> int:
        """The number of the candidate to apply to a real state (B = 1). The number of No-Op is one more than the last
        candidate's.

        `noisy`: draw an action at random, as for an agent that learns from its plans; otherwise choose the best
        action.
        """
        self.least, self.greatest = math.inf, -math.inf
        with torch.no_grad():
            state = Imagined.split(start)[0]
            cost = float(state.globals[0])
            root = self._state(latent_of(start), self.world.memory(1), state, cost, cost, 0)
            noise = self.rng.gumbel(size=len(root.logits)) if noisy else np.zeros(len(root.logits))
            alive = np.argsort(-(root.logits + noise), kind="stable")[: self.config.considered].tolist()
            remaining = self.config.simulations
            phases = max(1, math.ceil(math.log2(max(len(alive), 2))))
            while len(alive) > 1 and remaining > 0:
                each = max(1, self.config.simulations // (phases * len(alive)))
                for action in alive:
                    for _ in range(min(each, remaining)):
                        self._simulate(root, action)
                        remaining -= 1
                scores = root.logits + noise + self._sigma(root)
                alive = sorted(alive, key=lambda a: -scores[a])[: max(1, len(alive) // 2)]
            return int(alive[0])

    def _simulate(self, root: _State, action: int) -> None:
        """Walk down to a state that was not visited before, and add its value to the actions of the path."""
        path: list[tuple[_State, int, float]] = []
        state, value = root, 0.0
        while True:
            new = state.visits[action] == 0
            reward, after = self._follow(state, action)
            path.append((state, action, reward))
            if after is None:
                break
            if new or after.depth >= self.config.depth or len(after.logits) == 1:
                value = after.value
                break
            state, action = after, self._inside(after)
        for state, action, reward in reversed(path):
            value = reward + self.config.gamma * value
            state.visits[action] += 1
            state.total[action] += value
            self.least, self.greatest = min(self.least, value), max(self.greatest, value)

    def _inside(self, state: _State) -> int:
        improved = state.logits + self._sigma(state)
        chances = np.exp(improved - improved.max())
        chances /= chances.sum()
        return int(np.argmax(chances - state.visits / (1 + state.visits.sum())))

    def _sigma(self, state: _State) -> Doubles:
        span = self.greatest - self.least
        worth = (state.worth() - self.least) / span if span > 0 else np.zeros(len(state.logits))
        scaled: Doubles = (self.config.visit + state.visits.max()) * self.config.scale * worth
        return scaled

    def _follow(self, state: _State, action: int) -> tuple[float, _State | None]:
        """The reward of an action and the state after it; None after No-Op."""
        if action == len(state.logits) - 1:
            return 0.0, None
        child = state.children.get(action)
        if child is None:
            vector, delta = (
                state.imagined.candidates[action : action + 1],
                state.imagined.delta[action : action + 1],
            )
            forecast, memory = self.world.step(state.latent, vector, delta, state.memory)
            latent = forecast.sample(0.0)
            cost = max(state.cost - float(forecast.saving) / SCALE, 0.0)
            imagined, _ = self.world.imagined(latent, self.world.decode(latent))
            tell(imagined, [cost], max(0.0, float(state.imagined.globals[2]) - 1 / max(self.config.depth, 1)))
            state_after = Imagined.split(imagined)[0]
            best = min(state.best, cost)
            after = self._state(latent, memory, state_after, cost, best, state.depth + 1)
            child = state.children[action] = (SCALE * max(state.best - cost, 0.0), after)
        return child

    def _state(
        self, latent: torch.Tensor, memory: Memory, imagined: Imagined, cost: float, best: float, depth: int
    ) -> _State:
        distribution, values = self.heads.evaluate([imagined])
        logits = distribution.log_probs.double().numpy()
        return _State(latent, memory, imagined, cost, best, depth, logits, max(float(values), 0.0))
