"""The files and messages between a measurement and its processes: JSON, and an npz file of inputs. No pickle."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import numpy as np

from xrlflow.backends.onnxruntime.timing import Sample
from xrlflow.backends.pairs import Turn
from xrlflow.backends.protocol import Array, BackendError, Feeds
from xrlflow.backends.results import Load


def save_feeds(path: Path, feeds: Feeds) -> list[str]:
    """Write the arrays of `feeds`. Returns their names in the file's order, since an npz cannot have every name.

    Raises BackendError for element types that NumPy lacks.
    """
    arrays: dict[str, Array] = {}
    for index, (name, array) in enumerate(feeds.items()):
        if array.dtype.kind == "O":
            array = np.char.asarray(array, unicode=True).view(np.ndarray)
        if array.dtype.kind not in "biufcU":
            raise BackendError(f"input {name}: arrays of {array.dtype} cannot be handed to a fresh process")
        arrays[f"feed{index}"] = array
    with path.open("wb") as file:
        np.savez(file, allow_pickle=False, **arrays)
    return list(feeds)


def load_feeds(path: Path, names: list[str]) -> dict[str, Array]:
    """The arrays that `save_feeds` wrote. Strings have dtype object, as ONNX Runtime expects."""
    with np.load(path, allow_pickle=False) as file:
        arrays = [file[f"feed{index}"] for index in range(len(names))]
    return {
        name: array.astype(object) if array.dtype.kind == "U" else array for name, array in zip(names, arrays)
    }


def to_json(sample: Sample) -> dict[str, Any]:
    """A sample of a process as plain data."""
    return dataclasses.asdict(sample)


def from_json(data: dict[str, Any]) -> Sample:
    """The inverse of `to_json`. Raises KeyError or TypeError for other data."""
    return Sample(
        turns=tuple(Turn(**turn) for turn in data["turns"]),
        load=Load(**data["load"]),
        loading=data["loading"],
        measuring=data["measuring"],
    )
