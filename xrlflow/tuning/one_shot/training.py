"""Trains the predictor of the One-Shot Tuner with measurements of kernels of many layers."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor, nn
from torch.nn import functional

from xrlflow.learn.tensors import to_arrays
from xrlflow.tuning.one_shot.predictor import Predictor, Shape, Standard
from xrlflow.tuning.one_shot.tokens import ALGORITHMS, Tokens


@dataclass(frozen=True, slots=True, eq=False)
class Measured:
    """N measured kernels of a layer: their tokens, and their seconds, [N]."""

    tokens: Tokens
    seconds: npt.NDArray[np.float64]

    @property
    def rates(self) -> npt.NDArray[np.float64]:
        """The logarithm (base 2) of estimated time / seconds, [N]."""
        rates: npt.NDArray[np.float64] = self.tokens.estimates.astype(np.float64) - np.log2(self.seconds)
        return rates


@dataclass(frozen=True, slots=True)
class TrainingConfig:
    """How a predictor is trained. A batch has `layers` layers, with at most `choices` choices (kernels) of each.
    `ranking`: the weight of the ranking loss next to the squared error (0: none); with `squared` False there is no
    squared error. The learning rate follows a cosine."""

    steps: int = 4000
    layers: int = 8
    choices: int = 32
    learning_rate: float = 1e-3
    weight_decay: float = 1e-2
    ranking: float = 1.0
    squared: bool = True
    shape: Shape = field(default_factory=Shape)

    def __post_init__(self) -> None:
        if min(self.steps, self.layers, self.choices) < 1 or self.learning_rate <= 0:
            raise ValueError(f"training takes positive numbers, not {self}")
        if self.ranking < 0 or not (self.ranking > 0 or self.squared):
            raise ValueError("training needs the squared error, the ranking loss, or both")


class Network(nn.Module):
    """The network of `Predictor`, in torch."""

    def __init__(self, shape: Shape, seed: int) -> None:
        super().__init__()
        self.shape = shape
        generator = torch.Generator().manual_seed(seed)
        self.arrays = nn.ParameterDict()
        for name, size in shape.arrays().items():
            self.arrays[name.replace(".", "_")] = nn.Parameter(_initial(name, size, generator))

    def weights(self) -> dict[str, npt.NDArray[Any]]:
        named = {name: self.arrays[name.replace(".", "_")] for name in self.shape.arrays()}
        return to_arrays({name: parameter.detach() for name, parameter in named.items()})

    def _of(self, name: str) -> Tensor:
        parameter: Tensor = self.arrays[name.replace(".", "_")]
        return parameter

    def forward(self, loops: Tensor, knobs: Tensor, kernel: Tensor, task: Tensor) -> Tensor:
        """The scores of N choices, [N]. The features: of loops [N, LOOPS, .], of knobs [N, .], of kernels [N, .], and
        of the layer of each choice [N, .]."""
        w = self._of
        kinds = (knobs[:, :ALGORITHMS] @ w("algorithm")).unsqueeze(1)
        tokens = [
            loops @ w("loop") + w("loops"),
            knobs[:, ALGORITHMS:].unsqueeze(-1) * w("knob") + w("knobs") + kinds,
            (kernel @ w("kernel") + w("kernel.bias")).unsqueeze(1),
            (task @ w("task") + w("task.bias")).unsqueeze(1),
        ]
        x = torch.cat(tokens, 1)
        for i in range(self.shape.layers):
            x = x + self._attended(self._normalised(x, f"{i}.norm1"), i)
            inner = self._normalised(x, f"{i}.norm2") @ w(f"{i}.up") + w(f"{i}.up.bias")
            x = x + torch.relu(inner) @ w(f"{i}.down") + w(f"{i}.down.bias")
        mean = self._normalised(x.mean(1), "norm")
        scores = torch.relu(mean @ w("head") + w("head.bias")) @ w("score") + w("score.bias")
        return scores.squeeze(-1)

    def _normalised(self, x: Tensor, name: str) -> Tensor:
        return functional.layer_norm(
            x, x.shape[-1:], self._of(f"{name}.weight"), self._of(f"{name}.bias"), 1e-5
        )

    def _attended(self, x: Tensor, i: int) -> Tensor:
        size, count, width = x.shape
        heads = self.shape.heads
        each = (x @ self._of(f"{i}.in") + self._of(f"{i}.in.bias")).view(
            size, count, 3, heads, width // heads
        )
        q, k, v = each.permute(2, 0, 3, 1, 4)
        mixed = functional.scaled_dot_product_attention(q, k, v).transpose(1, 2).reshape(size, count, width)
        return mixed @ self._of(f"{i}.out") + self._of(f"{i}.out.bias")


def _initial(name: str, size: tuple[int, ...], generator: torch.Generator) -> Tensor:
    if name.endswith(".weight"):
        return torch.ones(size)
    if name.endswith("bias"):
        return torch.zeros(size)
    if name in ("loops", "knobs", "knob", "algorithm"):
        return 0.1 * torch.randn(size, generator=generator)
    # The features of loops and layers are logarithms of up to 30, so the initial weights for them are small.
    scale = 0.1 if name in ("loop", "task", "kernel") else 1.0
    return scale * torch.randn(size, generator=generator) / math.sqrt(size[0])


Listener = Callable[[int, float], None]
"""A function that is called with the number of steps, and the mean training loss of the latest 100 steps."""


def train(
    measured: Sequence[Measured],
    config: TrainingConfig = TrainingConfig(),
    seed: int = 0,
    about: Mapping[str, Any] | None = None,
    listener: Listener | None = None,
) -> Predictor:
    """A predictor that has learned from these measurements. Raises ValueError if there are none."""
    if not measured:
        raise ValueError("there are no measurements to learn from")
    logs = np.concatenate([layer.rates for layer in measured])
    standard = Standard(float(logs.mean()), max(float(logs.std()), 1e-3))
    targets = [((layer.rates - standard.mean) / standard.deviation).astype(np.float32) for layer in measured]
    network = Network(config.shape, seed)
    optimizer = torch.optim.AdamW(
        network.parameters(), lr=config.learning_rate, weight_decay=config.weight_decay
    )
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, config.steps)
    rng, recent = np.random.default_rng(seed), 0.0
    for step in range(config.steps):
        batch = _random_batch(measured, targets, standard, config, rng)
        scores = network(*batch.inputs)
        loss = _loss(scores, batch, config)
        optimizer.zero_grad()
        loss.backward()  # type: ignore[no-untyped-call]
        nn.utils.clip_grad_norm_(network.parameters(), 1.0)
        optimizer.step()
        schedule.step()
        recent += loss.item()
        if listener is not None and (step + 1) % 100 == 0:
            listener(step + 1, recent / 100)
            recent = 0.0
    return Predictor(config.shape, network.weights(), standard, dict(about or {}))


@dataclass(frozen=True, slots=True, eq=False)
class _Batch:
    """Choices of several layers. `owner`: the number of each choice's layer. `estimates`: logarithms of estimated
    times, in the unit of the targets."""

    inputs: tuple[Tensor, Tensor, Tensor, Tensor]
    targets: Tensor
    estimates: Tensor
    owner: Tensor


def _random_batch(
    measured: Sequence[Measured],
    targets: Sequence[npt.NDArray[np.float32]],
    standard: Standard,
    config: TrainingConfig,
    rng: np.random.Generator,
) -> _Batch:
    layers = rng.choice(len(measured), size=min(config.layers, len(measured)), replace=False)
    loops, knobs, kernels, tasks, batch_targets, estimates, owner = [], [], [], [], [], [], []
    for i in layers:
        tokens = measured[i].tokens
        positions = rng.permutation(len(tokens))[: config.choices]
        loops.append(tokens.loops[positions])
        knobs.append(tokens.knobs[positions])
        kernels.append(tokens.kernel[positions])
        tasks.append(np.repeat(tokens.task[None], len(positions), axis=0))
        batch_targets.append(targets[i][positions])
        estimates.append(tokens.estimates[positions] / np.float32(standard.deviation))
        owner.append(np.full(len(positions), i))
    parts = [torch.from_numpy(np.concatenate(some)) for some in (loops, knobs, kernels, tasks)]
    return _Batch(
        (parts[0], parts[1], parts[2], parts[3]), torch.from_numpy(np.concatenate(batch_targets)),
        torch.from_numpy(np.concatenate(estimates)), torch.from_numpy(np.concatenate(owner)),
    )  # fmt: skip


def _loss(scores: Tensor, batch: _Batch, config: TrainingConfig) -> Tensor:
    """The squared error, plus a ranking loss: for each pair of choices of one layer, the logistic loss of ranking this
    pair, weighted by the difference of their speeds (as in LambdaRank, Burges 2010)."""
    total = functional.mse_loss(scores, batch.targets) if config.squared else torch.zeros(())
    if config.ranking:
        speeds, predicted = batch.targets - batch.estimates, scores - batch.estimates
        apart = speeds[:, None] - speeds[None, :]
        pairs = (batch.owner[:, None] == batch.owner[None, :]) & (apart > 0)
        weights = apart[pairs].clamp(max=1.0)
        logits = (predicted[:, None] - predicted[None, :])[pairs]
        ranked = (weights * functional.softplus(-4.0 * logits)).sum() / weights.sum().clamp(min=1e-6)
        total = total + config.ranking * ranked
    return total
