"""Sets of inputs for calibrating and for checking, and the error of a converted model's outputs on them."""

from __future__ import annotations

import math
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from xrlflow.backends.onnxruntime import Options, open_model
from xrlflow.backends.protocol import Array, ModelSource
from xrlflow.onnxio import ImportedModel
from xrlflow.options import OptionError
from xrlflow.verify import feeds_for_measurement
from xrlflow.verify.inputs import user_case

Feeds = Mapping[str, Any]
Outputs = Sequence[Sequence[Any]]
"""The outputs of a model on each of several sets of inputs."""

# The fraction of the user's sets that is held out: at least one set, if there are two.
_HELD_OUT = 1 / 3
# The most sets with which ranges are calibrated, and on which errors are measured: a folder may have thousands.
_CALIBRATED, _CHECKED = 128, 16
# The number of random sets, if the user gives none (conversion to float16 or float32 needs no calibration).
_DRAWN = 4


@dataclass(frozen=True, slots=True)
class Sets:
    """Sets of inputs. `held_out` is empty if there was only one set; errors are then measured on `calibrating`."""

    calibrating: tuple[Feeds, ...]
    held_out: tuple[Feeds, ...]
    whole: Feeds
    """The set for measuring times: one of the user's, before it is split along its batch."""

    @property
    def checking(self) -> tuple[Feeds, ...]:
        """The sets on which the error is measured that the bound limits."""
        return (self.held_out or self.calibrating)[:_CHECKED]


def user_sets(
    imported: ImportedModel,
    inputs: str | os.PathLike[str] | Mapping[str, Any],
    seed: int,
    calibrated: bool = True,
) -> Sets:
    """The user's sets of inputs: a folder of .npz files (one set each), one such file, or a mapping.

    A single set whose inputs have an open first dimension, of the same size above 1, is split along this dimension. A
    third of the sets, drawn with `seed`, is held out; all of them, if nothing is `calibrated`. Of more than 144 sets,
    144 are drawn. Raises OptionError for a folder without .npz files, and BadInputs for a set that does not fit the
    model.
    """
    sources: Sequence[str | os.PathLike[str] | Mapping[str, Any]] = [inputs]
    if isinstance(inputs, (str, os.PathLike)) and Path(inputs).is_dir():
        sources = sorted(Path(inputs).glob("*.npz"))
        if not sources:
            raise OptionError(f"inputs {os.fspath(inputs)}: the folder has no .npz files")
    rng = np.random.default_rng(seed)
    drawn = [sources[index] for index in rng.permutation(len(sources))[: _CALIBRATED + _CHECKED]]
    sets = [dict(user_case(imported, source).feeds) for source in drawn]
    whole = sets[0]
    if len(sets) == 1:
        sets = _split(imported, whole)
        sets = [sets[index] for index in rng.permutation(len(sets))[: _CALIBRATED + _CHECKED]]
    held_out = min(max(1, round(_HELD_OUT * len(sets))), _CHECKED) if len(sets) > 1 else 0
    held_out = held_out if calibrated else len(sets)
    return Sets(tuple(sets[held_out:]), tuple(sets[:held_out]), whole)


def random_sets(imported: ImportedModel, source: ModelSource, seed: int) -> Sets:
    """Random sets of inputs on which the original runs, all for checking: nothing is calibrated with them."""
    with open_model(source) as model:
        sets = tuple(feeds_for_measurement(imported, seed + each, model.run) for each in range(_DRAWN))
    return Sets((), sets, sets[0])


def _split(imported: ImportedModel, feeds: Feeds) -> list[dict[str, Any]]:
    """The set as sets of batch 1, if its first dimension is a batch."""
    arrays = list(feeds.values())
    sizes = {a.shape[0] if isinstance(a, np.ndarray) and a.ndim else 0 for a in arrays}
    opened = all(
        (shape := imported.graph.type(value).shape) is not None and shape and not isinstance(shape[0], int)
        for value in imported.graph.inputs
    )
    size = next(iter(sizes)) if len(sizes) == 1 else 0
    if size < 2 or not opened or len(arrays) != len(imported.graph.inputs):
        return [dict(feeds)]
    return [{name: a[at : at + 1] for name, a in feeds.items()} for at in range(size)]


@dataclass(frozen=True, slots=True, order=True)
class Deviation:
    """The error of a model's outputs relative to those of the original, for the worst output of the worst set.

    `rms`: the root mean square of the differences over that of the original's elements; `largest`: the largest
    difference over the largest magnitude. For outputs that are not floats, both are the fraction of elements that
    differ. Infinite if one model gives NaN or infinity where the other does not.
    """

    rms: float
    largest: float


def run_all(
    model: ModelSource, sets: Sequence[Feeds], *, threads: int | None, session_options: Options | None = None
) -> Outputs:
    """The model's outputs on each set. Raises BackendError if it cannot be loaded or run."""
    with open_model(model, threads=threads, session_options=session_options) as opened:
        return [opened.run(feeds) for feeds in sets]


def deviation(expected: Outputs, found: Outputs) -> Deviation:
    """The error of `found`, the outputs of another model on the same sets."""
    errors = [
        _deviation(e, f)
        for before, after in zip(expected, found, strict=True)
        for e, f in zip(before, after, strict=True)
    ]
    return Deviation(
        max((error.rms for error in errors), default=0.0),
        max((error.largest for error in errors), default=0.0),
    )


def _deviation(expected: Any, found: Any) -> Deviation:
    if isinstance(expected, list) and isinstance(found, list):  # a sequence
        worst = Deviation(math.inf, math.inf)
        return worst if len(expected) != len(found) else deviation([expected], [found])
    if expected is None or found is None:  # an optional without a value
        same = expected is None and found is None
        return Deviation(0.0, 0.0) if same else Deviation(math.inf, math.inf)
    x, y = np.asarray(expected), np.asarray(found)
    if x.shape != y.shape:
        return Deviation(math.inf, math.inf)
    if x.dtype.kind in "biuOUS":
        share = float((x != y).mean()) if x.size else 0.0
        return Deviation(share, share)
    return _of_floats(x.astype(np.float64), y.astype(np.float64))


def _of_floats(x: Array, y: Array) -> Deviation:
    finite = np.isfinite(x)
    if not np.array_equal(x[~finite], y[~finite], equal_nan=True) or not np.isfinite(y[finite]).all():
        return Deviation(math.inf, math.inf)
    x, differences = x[finite], y[finite] - x[finite]
    if not x.size:
        return Deviation(0.0, 0.0)
    return Deviation(
        _over(float(np.sqrt(np.mean(differences**2))), float(np.sqrt(np.mean(x**2)))),
        _over(float(np.abs(differences).max()), float(np.abs(x).max())),
    )


def _over(error: float, size: float) -> float:
    if not math.isfinite(error) or not math.isfinite(size):  # squares of large float64 numbers overflow
        return math.inf
    return error / size if size else (math.inf if error else 0.0)
