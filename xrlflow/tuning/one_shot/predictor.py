"""The predictor of the One-Shot Tuner, in NumPy, so that compilations need no torch.

The predictor is a transformer encoder over the tokens of a choice (a kernel of a layer), as in the paper (section 3.3:
3 layers, 4 heads). There is one token for each loop, one for each knob, one for the kernel and one for the layer. The
score is computed from the mean of all tokens. The score says how many times faster the kernel is than its analytic
estimate, as a standardised logarithm. (The paper's model predicts throughput itself, and has neither analytic estimates
nor a token for the kernel.)
"""

from __future__ import annotations

import math
import os
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from functools import cache
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from xrlflow.backends.tvm.kernels.layer_kernels import Floats
from xrlflow.backends.tvm.toolchain.target import Machine
from xrlflow.storage.checkpoint import Checkpoint, CheckpointError, load_checkpoint, save_checkpoint
from xrlflow.tuning.one_shot.tokens import (
    ALGORITHMS,
    KERNEL_FEATURES,
    KNOB_FEATURES,
    LOOP_FEATURES,
    LOOPS,
    TASK_FEATURES,
    Tokens,
)
from xrlflow.tuning.pretrained import PRETRAINED

if TYPE_CHECKING:
    from typing_extensions import Self

KNOB_TOKENS = KNOB_FEATURES - ALGORITHMS
COUNT = LOOPS + KNOB_TOKENS + 2
"""The number of tokens of a choice."""
_KIND = "one-shot predictor"
_EPSILON = 1e-5
# The number of choices that are scored at a time. It is small enough for activations to stay in the caches.
_BATCH = 512


@dataclass(frozen=True, slots=True)
class Shape:
    """The dimensions of a predictor's network."""

    width: int = 64
    hidden: int = 128
    layers: int = 3
    heads: int = 4

    def __post_init__(self) -> None:
        if min(self.width, self.hidden, self.layers, self.heads) < 1 or self.width % self.heads:
            raise ValueError(f"a predictor takes positive sizes, and a width that heads divide, not {self}")
        if max(self.width, self.hidden) > 4096 or self.layers > 64:
            raise ValueError(f"{self} is too large")

    def arrays(self) -> dict[str, tuple[int, ...]]:
        """The names and shapes of the weights."""
        d, h = self.width, self.hidden
        shapes: dict[str, tuple[int, ...]] = {
            "loop": (LOOP_FEATURES, d), "loops": (LOOPS, d), "knob": (KNOB_TOKENS, d), "knobs": (KNOB_TOKENS, d),
            "algorithm": (ALGORITHMS, d), "kernel": (KERNEL_FEATURES, d), "kernel.bias": (d,),
            "task": (TASK_FEATURES, d), "task.bias": (d,), "norm.weight": (d,),
            "norm.bias": (d,), "head": (d, h), "head.bias": (h,), "score": (h, 1), "score.bias": (1,),
        }  # fmt: skip
        for i in range(self.layers):
            shapes |= {
                f"{i}.norm1.weight": (d,), f"{i}.norm1.bias": (d,), f"{i}.in": (d, 3 * d), f"{i}.in.bias": (3 * d,),
                f"{i}.out": (d, d), f"{i}.out.bias": (d,), f"{i}.norm2.weight": (d,), f"{i}.norm2.bias": (d,),
                f"{i}.up": (d, h), f"{i}.up.bias": (h,), f"{i}.down": (h, d), f"{i}.down.bias": (d,),
            }  # fmt: skip
        return shapes


@dataclass(frozen=True, slots=True)
class Standard:
    """The mean and deviation of log2(estimated time / seconds) over all kernels with which the predictor was
    trained."""

    mean: float
    deviation: float


@dataclass(frozen=True, slots=True, eq=False)
class Predictor:
    """Predicts the times of choices. `about`: a description of the training data, such as the processor."""

    shape: Shape
    weights: Mapping[str, Floats]
    standard: Standard
    about: Mapping[str, Any]

    def scores(self, tokens: Tokens) -> Floats:
        """For N choices of a layer, the standardised logarithms of estimate / time: [N]."""
        parts = [
            self._scores(tokens.some(np.arange(i, min(i + _BATCH, len(tokens)))))
            for i in range(0, len(tokens), _BATCH)
        ]
        return np.concatenate(parts) if parts else np.zeros(0, np.float32)

    def seconds(self, tokens: Tokens) -> npt.NDArray[np.float64]:
        """The predicted seconds of N choices of a layer: [N]."""
        rates = self.standard.mean + self.standard.deviation * self.scores(tokens).astype(np.float64)
        seconds: npt.NDArray[np.float64] = np.exp2(tokens.estimates.astype(np.float64) - rates)
        return seconds

    def _scores(self, tokens: Tokens) -> Floats:
        w = self.weights
        loops = tokens.loops @ w["loop"] + w["loops"]
        kinds = (tokens.knobs[:, :ALGORITHMS] @ w["algorithm"])[:, None, :]
        knobs = tokens.knobs[:, ALGORITHMS:, None] * w["knob"] + w["knobs"] + kinds
        kernel = (tokens.kernel @ w["kernel"] + w["kernel.bias"])[:, None, :]
        task = np.broadcast_to(tokens.task @ w["task"] + w["task.bias"], (len(tokens), 1, self.shape.width))
        x = np.concatenate([loops, knobs, kernel, task], axis=1)
        for i in range(self.shape.layers):
            x = x + self._attended(_normalised(x, w, f"{i}.norm1"), i)
            inner = _normalised(x, w, f"{i}.norm2") @ w[f"{i}.up"] + w[f"{i}.up.bias"]
            x = x + np.maximum(inner, 0) @ w[f"{i}.down"] + w[f"{i}.down.bias"]
        mean = _normalised(x.mean(axis=1), w, "norm")
        scores: Floats = (np.maximum(mean @ w["head"] + w["head.bias"], 0) @ w["score"] + w["score.bias"])[
            :, 0
        ]
        return scores

    def _attended(self, x: Floats, i: int) -> Floats:
        """Attention of all tokens of a choice to each other, [N, COUNT, width]."""
        w, heads = self.weights, self.shape.heads
        size, count, width = x.shape
        each = (x @ w[f"{i}.in"] + w[f"{i}.in.bias"]).reshape(size, count, 3, heads, width // heads)
        q, k, v = each.transpose(2, 0, 3, 1, 4)
        logits = q @ k.transpose(0, 1, 3, 2) / np.float32(math.sqrt(width // heads))
        probabilities = np.exp(logits - logits.max(axis=-1, keepdims=True))
        probabilities /= probabilities.sum(axis=-1, keepdims=True)
        mixed = (probabilities @ v).transpose(0, 2, 1, 3).reshape(size, count, width)
        attended: Floats = mixed @ w[f"{i}.out"] + w[f"{i}.out.bias"]
        return attended

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write the predictor to a file. Raises CheckpointError if that fails."""
        config = {"shape": asdict(self.shape), "standard": asdict(self.standard), "about": dict(self.about)}
        save_checkpoint(Checkpoint(_KIND, config, dict(self.weights)), path)

    @classmethod
    def load(cls, path: str | os.PathLike[str]) -> Self:
        """Read a predictor. Raises CheckpointError if the file is not one, is damaged, or of another version."""
        checkpoint = load_checkpoint(path, _KIND)
        try:
            shape, standard = Shape(**checkpoint.config["shape"]), Standard(**checkpoint.config["standard"])
            about = dict(checkpoint.config["about"])
            numbers = float(standard.mean), float(standard.deviation)
        except (KeyError, TypeError, ValueError) as error:
            raise CheckpointError(f"{path}: its configuration is damaged: {error}") from error
        weights = {name: np.asarray(array) for name, array in checkpoint.tensors.items()}
        if {name: array.shape for name, array in weights.items()} != shape.arrays():
            raise CheckpointError(f"{path} is a predictor of another version of xrlflow")
        finite = all(np.isfinite(array).all() and array.dtype == np.float32 for array in weights.values())
        if not finite or not all(map(math.isfinite, numbers)) or standard.deviation <= 0:
            raise CheckpointError(f"{path}: its weights are damaged")
        return cls(shape, weights, standard, about)


@cache
def shipped() -> Predictor:
    """The predictor that is part of the package."""
    return Predictor.load(PRETRAINED)


def for_compiling(machine: Machine) -> Predictor | None:
    """The predictor by which compilations for a machine choose kernels, if measurements on this processor with as many
    threads showed that it is better than estimates. Otherwise None: kernels are chosen by estimated times."""
    predictor = shipped()
    return predictor if f"{machine.cpu}:{machine.cores}" in predictor.about["better_on"] else None


def _normalised(x: Floats, weights: Mapping[str, Floats], name: str) -> Floats:
    centred = x - x.mean(axis=-1, keepdims=True)
    scaled = centred / np.sqrt(np.mean(centred * centred, axis=-1, keepdims=True) + np.float32(_EPSILON))
    normalised: Floats = scaled * weights[f"{name}.weight"] + weights[f"{name}.bias"]
    return normalised
