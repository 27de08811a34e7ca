"""Estimates the rounding error of Winograd's 3x3 convolutions, relative to the error of the direct kernel.

Both are computed for some tiles and output channels as the kernels compute them, in single precision, and compared with
double precision. Weights are the layer's own. Pixels are random numbers of distributions that occur in networks. The
error depends on the pixels: a large pixel makes the error of its neighbours in the tile large, and weights of both
signs cancel pixels that are nearly equal. These estimates hold for usual images. A bound that holds for every image is
computed from the magnitudes of the transformed weights.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import TypeAlias

import numpy as np
import numpy.typing as npt

from xrlflow.backends.tvm.kernels.winograd import CHUNK, transforms

Floats: TypeAlias = npt.NDArray[np.float32]
Doubles: TypeAlias = npt.NDArray[np.float64]
_TILES, _COLUMNS, _SIDE = 8, 16, 4
_WORST = 4
"""The number of output channels that are examined because the bound of their error is largest. As many more are
examined because their weights cancel nearly equal pixels most."""
_SLOPE = 0.03
_PLAIN_FLOOR = 2.0**-26
"""The least rounding error that the direct kernel is assumed to have, relative to its results. (Its real error may be
0.)"""
_OUTLIERS, _LARGE = 8, 50.0
# The number of terms in a sum of the direct kernel: ONNX Runtime sums over blocks of 16 channels, our kernel in chunks
# of up to 192 terms.
_DIRECT_CHUNK = 16 * 9


def _outlier_channels(rng: np.random.Generator, shape: tuple[int, ...]) -> Doubles:
    """Random numbers with heavy tails (Student's t). One of eight channels has numbers that are 50 times as large."""
    scales = np.where(np.arange(shape[-1]) % _OUTLIERS == 0, _LARGE, 1.0)
    return rng.standard_t(3.0, shape) * scales


def _smooth(rng: np.random.Generator, shape: tuple[int, ...]) -> Doubles:
    """Random images of nearly constant brightness, with a different slope in each channel."""
    slopes = _SLOPE * rng.standard_normal((2, shape[0], 1, 1, shape[3]))
    rows, columns = np.mgrid[: shape[1], : shape[2]][..., None]
    return np.asarray(1.0 + slopes[0] * rows + slopes[1] * columns)


DISTRIBUTIONS: Mapping[str, Callable[[np.random.Generator, tuple[int, ...]], Doubles]] = MappingProxyType(
    {
        "normal": lambda rng, shape: rng.standard_normal(shape),
        "after relu": lambda rng, shape: np.maximum(rng.standard_normal(shape), 0.0),
        "0 to 255": lambda rng, shape: rng.integers(0, 256, shape).astype(np.float64),
        "outlier channels": _outlier_channels,
        "smooth": _smooth,
    }
)


@dataclass(frozen=True, slots=True)
class Errors:
    """The rounding errors of F(m, 3), divided by the errors of the direct kernel.

    `usual`: root mean squares over tiles and output channels, by distribution of pixels. `channel`: the largest error
    of one of the examined output channels. `most`: the largest bound of an output channel, for every image whose pixels
    are at most of one common magnitude.
    """

    usual: Mapping[str, float]
    channel: float
    most: float

    @property
    def error(self) -> float:
        return max(self.usual.values())

    @property
    def finite(self) -> bool:
        return bool(np.isfinite([*self.usual.values(), self.channel, self.most]).all())


@np.errstate(over="ignore", invalid="ignore")
def relative_errors(weights: Floats, *sizes: int, seed: int = 0) -> list[Errors]:
    """The errors of F(m, 3) for each m of `sizes`.

    `weights`: [3, 3, channels of a group, output channels of all groups]. An error is not finite if the sums are not.
    """
    rng = np.random.default_rng(seed)
    evenly = np.unique(np.linspace(0, weights.shape[3] - 1, _COLUMNS).astype(int))
    bounds = [_bounds(weights, m) for m in sizes]
    suspects = [np.argsort(each)[-_WORST:] for each in (*bounds, -_uncancelled(weights))]
    worst = np.setdiff1d(np.concatenate(suspects), evenly)
    some = weights[..., np.concatenate([evenly, worst])]
    size = (_TILES, _SIDE + 2, _SIDE + 2, weights.shape[2])
    pixels = np.stack([draw(rng, size).astype(np.float32) for draw in DISTRIBUTIONS.values()])
    exact = _exact(pixels, some)
    floor = np.maximum(_PLAIN_FLOOR**2 * _square(exact), np.finfo(np.float64).tiny)
    direct = np.maximum(_square(_direct(pixels, some) - exact), floor)
    results = []
    for m, bound in zip(sizes, bounds):
        fast = _square(_fast(pixels, some, m) - exact)
        usual = np.sqrt(fast[:, : len(evenly)].mean(axis=1) / direct[:, : len(evenly)].mean(axis=1))
        channel = float(np.sqrt(fast / direct).max())
        results.append(Errors(dict(zip(DISTRIBUTIONS, usual.tolist())), channel, float(bound.max())))
    return results


def _square(difference: Doubles) -> Doubles:
    """The mean square of a difference over tiles and their results: [distribution, output channel]."""
    return np.asarray(np.mean(difference**2, axis=(1, 2, 3)))


def _bounds(weights: Floats, m: int) -> Doubles:
    """For each output channel, the sum of the magnitudes that F(m, 3) adds up, divided by the sum of the magnitudes
    that the direct kernel adds up. All pixels are at most of one common magnitude; the result of a tile with the
    largest quotient counts.

    Every addition rounds by at most half a unit of its result, and F(m, 3) has fewer additions in sequence than the
    direct kernel.
    """
    matrices = transforms(m)
    results, pixels = np.abs(matrices.results), np.abs(matrices.pixels).sum(axis=1)
    terms = np.einsum("a,b,abck->abk", pixels, pixels, np.abs(_transformed(weights, m)))
    sums = np.einsum("ia,jb,abk->ijk", results, results, terms)
    return np.asarray(sums.max(axis=(0, 1)) / _magnitude(weights))


def _uncancelled(weights: Floats) -> Doubles:
    """For each output channel, the fraction of the sum of magnitudes that does not cancel if the pixels of each input
    channel are equal."""
    return np.asarray(np.abs(weights.sum(axis=(0, 1), dtype=np.float64)).sum(axis=0) / _magnitude(weights))


def _magnitude(weights: Floats) -> Doubles:
    total = np.abs(weights).sum(axis=(0, 1, 2), dtype=np.float64)
    return np.asarray(np.maximum(total, np.finfo(np.float64).tiny))


def _transformed(weights: Floats, m: int) -> Doubles:
    matrix = transforms(m).weights
    return np.asarray(np.einsum("ai,bj,ijck->abck", matrix, matrix, weights.astype(np.float64)))


def _exact(pixels: Floats, weights: Floats) -> Doubles:
    """The convolution [distribution, tile, row, column, output channel] in double precision."""
    wide, factors = pixels.astype(np.float64), weights.astype(np.float64)
    parts = (wide[:, :, i : i + _SIDE, j : j + _SIDE] @ factors[i, j] for i in range(3) for j in range(3))
    return np.asarray(sum(parts))


def _summed(a: Floats, b: Floats, chunk: int) -> Doubles:
    """The sums over the first axis of a[r, ..., 1] b[r, ...], one term after the other in chunks, then one chunk after
    the other. Each addition is rounded to single precision. (The product of two single-precision numbers is exact in
    double precision.)"""
    total: Doubles | None = None
    for begin in range(0, len(a), chunk):
        part: Doubles = np.zeros(())
        for x, y in zip(a[begin : begin + chunk], b[begin : begin + chunk]):
            part = _rounded(part + x.astype(np.float64) * y.astype(np.float64))
        total = part if total is None else _rounded(total + part)
    assert total is not None
    return total


def _rounded(value: Doubles) -> Doubles:
    return np.asarray(value.astype(np.float32), np.float64)


def _direct(pixels: Floats, weights: Floats) -> Doubles:
    windows = np.lib.stride_tricks.sliding_window_view(pixels, (3, 3), axis=(2, 3))
    terms = windows.transpose(4, 5, 6, 0, 1, 2, 3)
    flat = terms.reshape(-1, *terms.shape[3:], 1)
    return _summed(flat, weights.transpose(2, 0, 1, 3).reshape(len(flat), 1, 1, 1, 1, -1), _DIRECT_CHUNK)


def _fast(pixels: Floats, weights: Floats, m: int) -> Doubles:
    matrices = transforms(m)
    windows = np.lib.stride_tricks.sliding_window_view(pixels, (m + 2, m + 2), axis=(2, 3))[:, :, ::m, ::m]
    before = _from_both_sides(matrices.pixels, windows.transpose(5, 6, 4, 0, 1, 2, 3))
    wide = _transformed(weights, m).astype(np.float32)
    a = np.moveaxis(before, 2, 0)[..., None]
    b = np.moveaxis(wide, 2, 0)[:, :, :, None, None, None, None, :]
    total = _summed(a, b, CHUNK)
    after = _from_both_sides(
        matrices.results, total.astype(np.float32)
    )  # [m, m, distribution, tile, y, x, column]
    _, _, kinds, tiles, high, across, columns = after.shape
    convolved = after.transpose(2, 3, 4, 0, 5, 1, 6).reshape(kinds, tiles, high * m, across * m, columns)
    return np.asarray(convolved, np.float64)


def _from_both_sides(matrix: Doubles, values: Floats) -> Floats:
    """matrix x values x matrix transposed, over the first two axes, rounded after each addition."""
    return _applied(matrix, _applied(matrix, values).swapaxes(0, 1)).swapaxes(0, 1)


def _applied(matrix: Doubles, values: Floats) -> Floats:
    small = matrix.astype(np.float32)
    rows = []
    for row in small:
        total = np.zeros(values.shape[1:], np.float32)
        for factor, value in zip(row, values):
            if factor:
                total = total + factor * value
        rows.append(total)
    return np.stack(rows)
