"""Trains the network of the learned cost model on measured comparisons. See `xrlflow.cost.latency_network`.

All graphs of one model form one minibatch. Nodes with the same context share one evaluation. The loss is the negative
log-likelihood of the measured log-ratios under Student's t distribution. The scale of the distribution is the measured
noise plus a variance that the network learns for the part it cannot explain.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor, nn

from xrlflow.cost.comparisons import Comparisons
from xrlflow.cost.latency_network import (
    BYTES_PER_SECOND,
    FIRST,
    MAX_LOG,
    MIN_LOG,
    NetworkConfig,
    NetworkParameters,
    shapes,
)
from xrlflow.cost.learned import HALF_OF_90
from xrlflow.learn.ppo import TrainingError

Doubles = npt.NDArray[np.float64]

# Degrees of freedom of the loss. Few, so that ratios far from their prediction weigh less: such ratios occur because
# latency depends on the addresses of weights.
_DEGREES_OF_FREEDOM = 4.0
_FIRST_NOISE = (0.01, 0.1)
# The relative change of latency from session to session: each session places weights at other addresses (see
# `search.select`).
_SESSION = 0.01


@dataclass(frozen=True, slots=True)
class FitConfig:
    """How a network is trained. `epochs`: passes over the comparisons of all models. The learning rate falls to 0
    along a cosine.
    """

    network: NetworkConfig = field(default_factory=NetworkConfig)
    epochs: int = 20
    learning_rate: float = 2e-3
    weight_decay: float = 1e-3
    max_grad_norm: float = 1.0
    seed: int = 0


class _Data:
    """The comparisons of one model's graphs as tensors. Contexts have the radius of the network that is trained."""

    def __init__(self, comparisons: Comparisons, radius: int, operators: Mapping[str, int]) -> None:
        if radius > comparisons.radius:
            raise TrainingError(
                f"comparisons of radius {comparisons.radius} cannot train a network of radius {radius}"
            )
        arrays = comparisons.arrays
        self.ops = torch.tensor([operators.get(op, 0) for op in comparisons.ops])
        self.contents = torch.from_numpy(arrays["contents"])
        self.edges = torch.from_numpy(arrays["edges"])
        self.levels = []
        for level in range(1, radius + 1):
            starts = arrays[f"starts.{level}"].astype(np.int64)
            owner = np.repeat(np.arange(len(starts) - 1), np.diff(starts))
            indices = (arrays[f"inner.{level}"], arrays[f"sources.{level}"], arrays[f"kinds.{level}"], owner)
            self.levels.append(tuple(torch.from_numpy(i.astype(np.int64)) for i in indices))
        self.counts = torch.from_numpy(comparisons.counts(radius))
        rows = np.arange(self.counts.shape[1])
        for level in range(radius, 0, -1):
            rows = arrays[f"inner.{level}"].astype(np.int64)[rows]
        self.prices = torch.from_numpy(arrays["seconds"][rows])
        self.moving = torch.from_numpy(arrays["moved"][rows] / BYTES_PER_SECOND)
        self.differing = (self.counts[1:] - self.counts[0]).abs()
        self.logs = torch.from_numpy(arrays["logs"])
        self.noise = torch.from_numpy(arrays["errors"]).square() + _SESSION**2


class Member(nn.Module):
    """One network of the ensemble. Its parameters have the names and shapes of `latency_network.shapes`."""

    def __init__(self, config: NetworkConfig, operators: int) -> None:
        super().__init__()
        self.config = config
        self.names = {name: name.replace(".", "_") for name in shapes(config, operators)}
        for name, shape in shapes(config, operators).items():
            value = torch.zeros(shape)
            if name == "operator":
                nn.init.normal_(value[1:], std=0.1)
            elif len(shape) == 2 and not name.startswith("head"):
                nn.init.kaiming_normal_(value.T)
            self.register_parameter(self.names[name], nn.Parameter(value))
        self.noise = nn.Parameter(torch.tensor(_FIRST_NOISE).log())

    def weight(self, name: str) -> Tensor:
        weight: Tensor = getattr(self, self.names[name])
        return weight

    def arrays(self) -> dict[str, npt.NDArray[np.float32]]:
        arrays = {name: self.weight(name).detach().numpy().copy() for name in self.names}
        return arrays | {"noise": self.noise.detach().exp().numpy().copy()}

    def seconds(self, data: _Data) -> Tensor:
        """The seconds of each context, as `latency_network.Evaluator` computes them."""
        weight = self.weight
        vectors = torch.relu(
            data.contents @ weight("content.weight") + weight("content.bias") + weight("operator")[data.ops]
        )
        for level, (inner, sources, kinds, owner) in enumerate(data.levels, 1):
            name = f"level.{level}"
            of_edge = (data.edges @ weight(f"{name}.edge"))[kinds]
            of_source = (vectors @ weight(f"{name}.source"))[sources]
            messages = torch.relu(of_edge + of_source + weight(f"{name}.message"))
            total = messages.new_zeros(len(inner), messages.shape[1]).index_add(0, owner, messages)
            own = vectors[inner]
            change = own @ weight(f"{name}.own") + torch.log1p(total) @ weight(f"{name}.heard")
            vectors = own + torch.relu(change + weight(f"{name}.bias"))
        outputs = (vectors @ weight("head.weight") + weight("head.bias")).double()
        factors = (outputs + torch.tensor(FIRST, dtype=torch.float64)).clamp(MIN_LOG, MAX_LOG).exp()
        return factors[:, 0] * data.prices + factors[:, 1] * data.moving

    def forward(self, data: _Data) -> tuple[Tensor, Tensor]:
        """Predicted log-ratios [G - 1], and the variances of their unexplained parts [G - 1]."""
        seconds = self.seconds(data)
        totals = data.counts @ seconds
        logs = totals[0].log() - totals[1:].log()
        changed = (data.differing @ seconds.detach()) / totals[0].detach()
        noise = self.noise.exp()
        return logs, noise[0] ** 2 + (noise[1] * changed) ** 2

    def loss(self, data: _Data) -> Tensor:
        logs, own = self(data)
        variance = own + data.noise
        error = (logs - data.logs).square() / variance
        losses: Tensor = (
            0.5 * (_DEGREES_OF_FREEDOM + 1) * torch.log1p(error / _DEGREES_OF_FREEDOM) + 0.5 * variance.log()
        ).mean()
        return losses


Progress = Callable[[int, int, float], None]


def fit(
    comparisons: Sequence[Comparisons],
    config: FitConfig = FitConfig(),
    about: Mapping[str, Any] | None = None,
    progress: Progress | None = None,
) -> NetworkParameters:
    """Train an ensemble. `progress(member, epoch, loss)` is called after each epoch.

    Members differ in their first weights, in the order of the models, and in how often they see each model (drawn with
    replacement). Raises TrainingError if there are no comparisons, or if a loss is not finite.
    """
    comparisons = [c for c in comparisons if c.graphs > 1]
    if not comparisons:
        raise TrainingError("there are no comparisons to learn from")
    names = sorted({op for c in comparisons for op in c.ops})
    numbers = {name: number for number, name in enumerate(names, 1)}
    data = [_Data(c, config.network.radius, numbers) for c in comparisons]
    members = []
    for number in range(config.network.members):
        members.append(_fit_member(data, len(names), config, number, progress))
    arrays = {name: np.stack([m[name] for m in members]) for name in members[0]}
    arrays["scale"] = np.ones(config.network.members, np.float32)
    return NetworkParameters(config.network, tuple(names), arrays, dict(about or {}))


def _fit_member(
    data: Sequence[_Data], operators: int, config: FitConfig, number: int, progress: Progress | None
) -> dict[str, npt.NDArray[np.float32]]:
    rng = np.random.default_rng((config.seed, number))
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(int(rng.integers(2**31)))
        member = Member(config.network, operators)
    optimizer = torch.optim.AdamW(
        member.parameters(), lr=config.learning_rate, weight_decay=config.weight_decay
    )
    numbers = rng.integers(len(data), size=len(data)) if config.network.members > 1 else np.arange(len(data))
    steps = config.epochs * len(numbers)
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, steps)
    for epoch in range(config.epochs):
        total = 0.0
        for index in rng.permutation(numbers).tolist():
            optimizer.zero_grad()
            loss = member.loss(data[index])
            if not math.isfinite(float(loss.detach())):
                raise TrainingError("the loss is not finite")
            loss.backward()  # type: ignore[no-untyped-call]
            nn.utils.clip_grad_norm_(member.parameters(), config.max_grad_norm)
            optimizer.step()
            scheduler.step()
            total += float(loss.detach())
        if progress is not None:
            progress(number, epoch, total / len(numbers))
    return member.arrays()


@dataclass(frozen=True, slots=True, eq=False)
class Judged:
    """Predictions and measurements for the G graphs of one model: log-ratios to the first graph [G - 1]."""

    name: str
    measured: Doubles
    predicted: Doubles
    spreads: Doubles  # standard deviations of the predictions, with the noise of measuring
    priced: Doubles  # log-ratios predicted by the sum of the operators' costs

    def held(self, scale: float = 1.0) -> float:
        """The fraction of the measured values that lie inside the 90% intervals, after these are widened by the factor
        `scale`.
        """
        return float((np.abs(self.measured - self.predicted) <= HALF_OF_90 * scale * self.spreads).mean())

    def correlation(self, by: Doubles) -> float:
        """Spearman's rank correlation of `by` with the measured values, the first graph included; NaN if all are
        equal."""
        return _spearman(np.append(self.measured, 0.0), np.append(by, 0.0))

    def ordered(self, by: Doubles, least: float = 0.03) -> tuple[int, int]:
        """How well `by` orders the pairs of graphs that differ by more than `least`: the number of pairs in the right
        order, and the number of all these pairs.
        """
        measured, other = np.append(self.measured, 0.0), np.append(by, 0.0)
        first, second = np.triu_indices(len(measured), 1)
        apart = measured[first] - measured[second]
        clear = np.abs(apart) > least
        right = apart * (other[first] - other[second]) > 0
        return int((right & clear).sum()), int(clear.sum())

    def chosen(self, by: Doubles) -> float:
        """The measured log-ratio of the graph that is the fastest according to `by`; 0 if that is the first graph."""
        return float(np.append(0.0, self.measured)[np.argmax(np.append(0.0, by))])


def judge(parameters: NetworkParameters, comparisons: Comparisons) -> Judged:
    """Predict the comparisons of one model's graphs."""
    numbers = {name: number for number, name in enumerate(parameters.operators, 1)}
    data = _Data(comparisons, parameters.config.radius, numbers)
    logs, own = [], []
    with torch.no_grad():
        for number in range(parameters.config.members):
            member = Member(parameters.config, len(parameters.operators))
            for name in member.names:
                member.weight(name).copy_(torch.from_numpy(parameters.arrays[name][number]))
            member.noise.copy_(torch.from_numpy(parameters.arrays["noise"][number]).log())
            predicted, variance = member(data)
            logs.append(predicted.numpy())
            own.append(variance.numpy())
    spread = np.sqrt(np.var(logs, axis=0) + np.mean(own, axis=0) + data.noise.numpy())
    prices = comparisons.prices()
    return Judged(
        str(comparisons.about["name"]),
        data.logs.numpy(),
        np.mean(logs, axis=0),
        spread,
        np.log(prices[0] / prices[1:]),
    )


def calibrate(
    parameters: NetworkParameters, judged: Sequence[Judged], coverage: float = 0.9
) -> NetworkParameters:
    """Widen the intervals so that they contain the fraction `coverage` of the measured values in `judged`, whose
    models must not be among those of the training (conformal prediction, Vovk et al., 2005). Each model has the same
    weight. Raises TrainingError if `judged` is empty.
    """
    judged = [j for j in judged if len(j.measured)]
    if not judged:
        raise TrainingError("there are no comparisons to calibrate intervals by")
    apart = [np.abs(j.measured - j.predicted) / (HALF_OF_90 * j.spreads) for j in judged]
    weights = np.concatenate([np.full(len(a), 1 / len(a)) for a in apart])
    flat = np.concatenate(apart)
    order = np.argsort(flat)
    index = int(np.searchsorted(np.cumsum(weights[order]) / weights.sum(), coverage))
    scale = float(flat[order][min(index, len(flat) - 1)])
    arrays = {**parameters.arrays, "scale": np.full(parameters.config.members, scale, np.float32)}
    return replace(parameters, arrays=arrays)


def _spearman(a: Doubles, b: Doubles) -> float:
    from scipy.stats import rankdata

    ranks = rankdata([a, b], axis=1)  # equal values share the mean of their ranks
    return math.nan if ranks.std(axis=1).min() == 0.0 else float(np.corrcoef(ranks)[0, 1])
