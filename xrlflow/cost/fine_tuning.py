"""Fits the network of the learned cost model to one machine, from a few comparisons, without torch.

Only the last layer of each member moves, in one Gauss-Newton step of Bayesian linear regression: the network as it was
trained is the prior, and the error of each comparison its weight. So few comparisons change little, and none is needed.
"""

from __future__ import annotations

import math
import time
from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import numpy.typing as npt

from xrlflow.cost.comparisons import Comparisons
from xrlflow.cost.latency_network import Evaluator, NetworkParameters

Doubles = npt.NDArray[np.float64]

# The standard deviation of the last layer's weights around those that were trained.
_PRIOR = 0.3
# Fewer comparisons than this say little about a machine.
LEAST = 8


def fine_tuned(
    parameters: NetworkParameters, comparisons: Sequence[Comparisons], deadline: float = math.inf
) -> NetworkParameters:
    """The network after it has learned from comparisons of this machine; itself if they are fewer than LEAST.

    Comparisons of smaller neighbourhoods than the network sees are left out, and the last ones if there is no time for
    them before `deadline` (time.monotonic).
    """
    comparisons = [c for c in comparisons if c.radius >= parameters.config.radius]
    if sum(c.graphs - 1 for c in comparisons) < LEAST:
        return parameters
    members, width = parameters.config.members, parameters.config.width
    precision = np.repeat(np.eye(2 * (width + 1))[None], members, 0) / _PRIOR**2
    pull = np.zeros((members, 2 * (width + 1)))
    noise = parameters.arrays["noise"].astype(np.float64)
    learned = 0
    for found in comparisons:
        if time.monotonic() >= deadline:
            break
        learned += found.graphs - 1
        slopes, logs, changed = _slopes(parameters, found)
        variance = (
            found.arrays["errors"] ** 2 + noise[:, :1] ** 2 + (noise[:, 1:] * changed) ** 2
        )  # [members, G - 1]
        weighted = slopes / variance[..., None]
        precision += np.swapaxes(weighted, 1, 2) @ slopes
        pull += np.einsum("mgd,mg->md", weighted, found.arrays["logs"] - logs)
    if learned < LEAST:
        return parameters
    moved = np.linalg.solve(precision, pull[..., None])[..., 0].reshape(members, width + 1, 2)
    with np.errstate(over="ignore"):
        head = {
            "head.weight": (parameters.arrays["head.weight"] + moved[:, :width]).astype(np.float32),
            "head.bias": (parameters.arrays["head.bias"] + moved[:, width]).astype(np.float32),
        }
    if not all(np.isfinite(array).all() for array in head.values()):  # figures that are beyond all measure
        return parameters
    return replace(parameters, arrays={**parameters.arrays, **head})


def _slopes(parameters: NetworkParameters, found: Comparisons) -> tuple[Doubles, Doubles, Doubles]:
    """For each member and comparison: the derivative of the predicted log-ratio by the last layer [members, G - 1, D],
    the prediction, and the part of the seconds that changed [members, G - 1]."""
    evaluator = Evaluator(parameters, found.table())
    counts = found.counts(parameters.config.radius)
    used = np.flatnonzero(counts.any(0))
    counts = counts[:, used]
    vectors, parts = evaluator.parts(used.tolist())
    ones = np.ones((*vectors.shape[:2], 1))
    inputs = np.concatenate((vectors, ones), 2)  # [members, K, width + 1]
    seconds = parts.sum(2)
    totals = seconds @ counts.T  # [members, G]
    # d log T / d w = sum of counts * part * input / T, for each of the two parts of a node's seconds.
    of_each = np.einsum("gk,mkp,mkd->mgdp", counts, parts, inputs, optimize=True) / totals[:, :, None, None]
    flat = of_each.reshape(*of_each.shape[:2], -1)
    logs = np.log(totals[:, :1] / totals[:, 1:])
    changed = (seconds @ np.abs(counts[1:] - counts[0]).T) / totals[:, :1]
    return flat[:, :1] - flat[:, 1:], logs, changed
