"""Fits the network of the learned cost model to one machine, from a few comparisons, without torch.

Only the last layer of each member of the ensemble changes, by Bayesian linear regression: the trained network is the
prior, and a comparison has the more weight, the smaller its error. So few comparisons change the network little. Errors
follow Student's t distribution, as in training, so that outliers weigh little (iteratively reweighted least squares;
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

# The prior's standard deviation of the last layer's weights around the trained weights.
_PRIOR = 0.3
# Degrees of freedom of the errors' t distribution, as in training; and the rounds of reweighting.
_DEGREES_OF_FREEDOM, _ROUNDS = 4.0, 4
# Fewer comparisons than this say little about a machine.
MIN_COMPARISONS = 4


def fine_tuned(
    parameters: NetworkParameters, comparisons: Sequence[Comparisons], deadline: float = math.inf
) -> NetworkParameters:
    """The network after it was fitted to comparisons of this machine; unchanged if they are fewer than MIN_COMPARISONS.

    Comparisons are left out if they describe a smaller neighbourhood of each node (`radius`) than the network
    reads. The last comparisons are left out if there is no time for them before `deadline` (time.monotonic).
    """
    comparisons = [c for c in comparisons if c.radius >= parameters.config.radius]
    if sum(c.graphs - 1 for c in comparisons) < MIN_COMPARISONS:
        return parameters
    members, width = parameters.config.members, parameters.config.width
    noise = parameters.arrays["noise"].astype(np.float64)
    slopes, residuals, variances = [], [], []
    learned = 0
    for comparison in comparisons:
        if time.monotonic() >= deadline:
            break
        learned += comparison.graphs - 1
        slope, logs, changed = _slopes(parameters, comparison)
        slopes.append(slope)
        residuals.append(comparison.arrays["logs"] - logs)
        variances.append(
            comparison.arrays["errors"] ** 2 + noise[:, :1] ** 2 + (noise[:, 1:] * changed) ** 2
        )  # [members, G - 1]
    if learned < MIN_COMPARISONS:
        return parameters
    shift = _shift(*(np.concatenate(part, 1) for part in (slopes, residuals, variances)))
    shift = shift.reshape(members, width + 1, 2)
    with np.errstate(over="ignore"):
        head = {
            "head.weight": (parameters.arrays["head.weight"] + shift[:, :width]).astype(np.float32),
            "head.bias": (parameters.arrays["head.bias"] + shift[:, width]).astype(np.float32),
        }
    if not all(np.isfinite(array).all() for array in head.values()):  # the comparisons had absurd figures
        return parameters
    return replace(parameters, arrays={**parameters.arrays, **head})


def _shift(slopes: Doubles, residuals: Doubles, variances: Doubles) -> Doubles:
    """The change of each member's last layer [members, D].

    `slopes`: the derivatives of the predictions [members, N, D]; `residuals`: measured minus predicted [members, N];
    `variances`: of the comparisons [members, N]. The first weights follow from the prior, later ones from the fit.
    """
    prior = np.eye(slopes.shape[2]) / _PRIOR**2
    shift = np.zeros((len(slopes), slopes.shape[2]))
    scale = variances + _PRIOR**2 * (slopes**2).sum(2)
    for _ in range(_ROUNDS):
        errors = residuals - np.einsum("mnd,md->mn", slopes, shift)
        with np.errstate(over="ignore"):  # an infinite error gives the weight 0
            weights = (_DEGREES_OF_FREEDOM + 1) / (_DEGREES_OF_FREEDOM + errors**2 / scale)
        weighted = slopes * (weights / variances)[..., None]
        precision = prior + np.swapaxes(weighted, 1, 2) @ slopes
        pull = np.einsum("mnd,mn->md", weighted, residuals)
        shift = np.linalg.solve(precision, pull[..., None])[..., 0]
        scale = variances
    return shift


def _slopes(parameters: NetworkParameters, comparisons: Comparisons) -> tuple[Doubles, Doubles, Doubles]:
    """For each member and comparison: the derivative of the predicted log-ratio with respect to the last layer
    [members, G - 1, D], the prediction, and the part of the seconds that changed [members, G - 1]."""
    evaluator = Evaluator(parameters, comparisons.table())
    counts = comparisons.counts(parameters.config.radius)
    columns = np.flatnonzero(counts.any(0))
    counts = counts[:, columns]
    vectors, parts = evaluator.parts(columns.tolist())
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
