"""Fits the network of the learned cost model to one machine, from a few comparisons, without torch.

Only the last layer of each member moves, by Bayesian linear regression: the network as it was trained is the prior, and
the error of each comparison its weight. So few comparisons change little, and none is needed. Errors follow Student's t
distribution, as in training, so that a comparison that is far off counts little (iteratively reweighted least squares;
Lange, Little, Taylor 1989).
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
# Degrees of freedom of the errors, as in training; and how often comparisons are weighed anew.
_FREEDOM, _ROUNDS = 4.0, 4
# Fewer comparisons than this say little about a machine.
LEAST = 4


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
    noise = parameters.arrays["noise"].astype(np.float64)
    slopes, residuals, variances = [], [], []
    learned = 0
    for found in comparisons:
        if time.monotonic() >= deadline:
            break
        learned += found.graphs - 1
        slope, logs, changed = _slopes(parameters, found)
        slopes.append(slope)
        residuals.append(found.arrays["logs"] - logs)
        variances.append(
            found.arrays["errors"] ** 2 + noise[:, :1] ** 2 + (noise[:, 1:] * changed) ** 2
        )  # [members, G - 1]
    if learned < LEAST:
        return parameters
    moved = _moved(*(np.concatenate(found, 1) for found in (slopes, residuals, variances)))
    moved = moved.reshape(members, width + 1, 2)
    with np.errstate(over="ignore"):
        head = {
            "head.weight": (parameters.arrays["head.weight"] + moved[:, :width]).astype(np.float32),
            "head.bias": (parameters.arrays["head.bias"] + moved[:, width]).astype(np.float32),
        }
    if not all(np.isfinite(array).all() for array in head.values()):  # figures that are beyond all measure
        return parameters
    return replace(parameters, arrays={**parameters.arrays, **head})


def _moved(slopes: Doubles, residuals: Doubles, variances: Doubles) -> Doubles:
    """By how much each member's last layer moves [members, D].

    `slopes`: the derivatives of the predictions [members, N, D]; `residuals`: what they lack; `variances`: of the
    comparisons [members, N]. How far off a comparison is, is first judged by the prior, then by what was learned.
    """
    prior = np.eye(slopes.shape[2]) / _PRIOR**2
    moved = np.zeros((len(slopes), slopes.shape[2]))
    spread = variances + _PRIOR**2 * (slopes**2).sum(2)
    for _ in range(_ROUNDS):
        left = residuals - np.einsum("mnd,md->mn", slopes, moved)
        with np.errstate(over="ignore"):  # beyond all measure: no weight
            weights = (_FREEDOM + 1) / (_FREEDOM + left**2 / spread)
        weighted = slopes * (weights / variances)[..., None]
        precision = prior + np.swapaxes(weighted, 1, 2) @ slopes
        pull = np.einsum("mnd,mn->md", weighted, residuals)
        moved = np.linalg.solve(precision, pull[..., None])[..., 0]
        spread = variances
    return moved


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
