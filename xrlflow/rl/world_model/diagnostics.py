"""The accuracy of a world model: its errors by horizon and by temperature, on episodes that it did not learn from, and
the savings that an agent has in dreams."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
import torch

from xrlflow.rl.world_model.dream import dream
from xrlflow.rl.world_model.dynamics import Truth, latent_of
from xrlflow.rl.world_model.experience import SCALE, Play
from xrlflow.rl.world_model.learning import Learner

HORIZONS = (1, 5, 10, 20)
TEMPERATURES = (0.0, 0.1, 0.5, 1.0, 2.0, 3.0)
# For a log during training: the number of episodes that are followed, and the number of imagined steps after which
# temperatures are compared.
_WATCHED, _DIVERGED = 8, 5
# The number of dreams over which `promised` takes the mean.
_DREAMS = 32


@dataclass(frozen=True, slots=True)
class Errors:
    """The errors of a world model after `horizon` imagined steps."""

    horizon: int
    temperature: float
    saving: float  # error of the sum of the savings, as a fraction of the initial cost
    masks: float  # the F1 score of the predicted set of rules that have candidates
    latent: float  # the root mean squared distance of the latents
    episodes: int  # the number of episodes over which the errors are computed


def errors(
    learner: Learner,
    plays: Sequence[Play],
    horizons: Sequence[int] = HORIZONS,
    temperature: float = 0.0,
    seed: int = 0,
) -> list[Errors]:
    """The errors of the world model when it predicts real episodes from their first states and their real actions.

    Actions are passed as their real vectors, so the errors are those of the dynamics alone.
    """
    world, generator = learner.world, torch.Generator().manual_seed(seed)
    rows: dict[int, list[tuple[float, float, float]]] = {h: [] for h in horizons}
    for play in plays:
        if not len(play):
            continue
        with torch.no_grad():
            embedded, rule = learner.embed(play.observations)
            truth = Truth.of(embedded, rule, world.config.rules)
            real = latent_of(embedded)
            sizes = torch.bincount(embedded.owner, minlength=len(play.observations))
            firsts = sizes.cumsum(0) - sizes
            latents, memory, saved = real[:1], world.memory(1), 0.0
            for step in range(min(len(play), max(horizons))):
                rows_of_actions = firsts[step : step + 1] + play.actions[step]
                forecast, memory = world.step(
                    latents, embedded.candidates[rows_of_actions], embedded.delta[rows_of_actions], memory
                )
                latents = forecast.sample(temperature, generator)
                saved += float(forecast.saving)
                if step + 1 in rows:
                    present = torch.sigmoid(world.decode(latents).present[0]) >= 0.5
                    wrong = abs(saved - float(np.sum(play.savings[: step + 1]))) / SCALE
                    distance = float((latents[0] - real[step + 1]).square().mean().sqrt())
                    rows[step + 1].append((wrong, f1(present, truth.present[step + 1] > 0), distance))
    means = {h: np.mean(values, axis=0).tolist() for h, values in rows.items() if values}
    return [
        Errors(h, temperature, saving, masks, latent, len(rows[h]))
        for h, (saving, masks, latent) in means.items()
    ]


def promised(learner: Learner, plays: Sequence[Play], seed: int = 0) -> float:
    """The fraction of the initial cost that the agent saves in dreams: the mean over dreams that begin at the first
    states of these plays, cyclically.
    """
    firsts = [play.observations[0] for play in plays if play.observations[0].candidates]
    with torch.no_grad():
        starts, _ = learner.embed([firsts[i % len(firsts)] for i in range(_DREAMS)])
    episodes = dream(
        learner.agent, learner.world, starts, horizon=learner.config.horizon,
        temperature=learner.config.temperature, generator=torch.Generator().manual_seed(seed),
    )  # fmt: skip
    return float(np.mean([episode.total for episode in episodes])) / SCALE


def figures(learner: Learner, plays: Sequence[Play]) -> dict[str, float]:
    """Figures for a log: the errors of a world model on plays from which it has not learned yet."""
    plays = plays[:_WATCHED]
    values: dict[str, float] = {}
    for temperature in TEMPERATURES:
        for e in errors(learner, plays, HORIZONS if temperature == 0 else (_DIVERGED,), temperature):
            if temperature == 0:
                values[f"errors/saving_{e.horizon}"] = e.saving
                values[f"errors/masks_{e.horizon}"] = e.masks
                values[f"errors/latent_{e.horizon}"] = e.latent
            else:
                values[f"errors/latent_{e.horizon}_at_{temperature:g}"] = e.latent
    return values


@dataclass(slots=True)
class Watching:
    """Adds the errors on the plays of each round to the log of a training run, and stores the plays of the latest
    round.
    """

    plays: list[Play] = field(default_factory=list)

    def __call__(self, learner: Learner, plays: Sequence[Play]) -> dict[str, float]:
        self.plays = list(plays)
        return figures(learner, plays)

    def promised(self, learner: Learner) -> float:
        """See the function `promised`, applied to the latest plays."""
        return promised(learner, self.plays)


def f1(predicted: torch.Tensor, right: torch.Tensor) -> float:
    """The F1 score of a predicted set of rules; 1 if both sets are empty."""
    both = float((predicted & right).sum())
    total = float(predicted.sum() + right.sum())
    return 2 * both / total if total else 1.0
