"""Checkpoints: arrays and their configuration in one safetensors file, never pickle."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
from safetensors import SafetensorError, safe_open
from safetensors.numpy import save as to_bytes

from xrlflow.storage import files

FORMAT = 1
# Element types that are read, by their names in safetensors.
_DTYPES = frozenset({"F64", "F32", "F16", "I64", "I32", "I16", "I8", "U64", "U32", "U16", "U8", "BOOL"})


class CheckpointError(ValueError):
    """A checkpoint cannot be read or written, is damaged, or is of another version or kind."""


@dataclass(frozen=True, slots=True, eq=False)
class Checkpoint:
    """Arrays by name, and a configuration that JSON can hold. `kind` names the type of content, such as "agent"."""

    kind: str
    config: Mapping[str, Any]
    tensors: Mapping[str, npt.NDArray[Any]]


def save_checkpoint(checkpoint: Checkpoint, path: str | os.PathLike[str]) -> None:
    """Write a checkpoint atomically: a reader never sees half of it, even if the writer is killed.

    Raises CheckpointError if the file cannot be written, ValueError if the configuration is not JSON.
    """
    metadata = {
        "format": str(FORMAT),
        "kind": checkpoint.kind,
        "config": json.dumps(checkpoint.config, allow_nan=False, sort_keys=True),
    }
    tensors = {name: np.array(array, order="C") for name, array in checkpoint.tensors.items()}
    target = Path(path)
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        files.write(target, to_bytes(tensors, metadata))
    except OSError as error:
        raise CheckpointError(f"{target} cannot be written: {error.strerror or error}") from error


def check_savable(path: str | os.PathLike[str]) -> None:
    """Raise CheckpointError if a checkpoint could not be written to `path`. Its folder may be missing. Nothing is
    changed."""
    target = Path(path)
    try:
        folder = next(parent for parent in target.absolute().parents if parent.exists())
        files.check(target if target.parent.exists() else folder / target.name)
    except OSError as error:
        raise CheckpointError(f"{target} cannot be written: {error.strerror or error}") from error


def load_checkpoint(path: str | os.PathLike[str], kind: str) -> Checkpoint:
    """Read a checkpoint of this kind. Raises CheckpointError if the file is anything else."""
    try:
        # Python's own error is clearer if the file is missing or may not be read.
        with open(path, "rb"):
            pass
        with safe_open(os.fspath(path), "np") as file:
            metadata = file.metadata() or {}
            tensors = {name: _array(file, name) for name in file.keys()}  # noqa: SIM118 (not a dict)
    except OSError as error:
        raise CheckpointError(f"{path} cannot be read: {error.strerror or error}") from error
    except TypeError as error:
        raise CheckpointError(f"{path}: its {error}") from error
    except SafetensorError as error:
        raise CheckpointError(f"{path} is no checkpoint, or is damaged: {error}") from error
    version = metadata.get("format")
    if version is None or "config" not in metadata:
        raise CheckpointError(f"{path} is a safetensors file, but no checkpoint of xrlflow")
    if version != str(FORMAT):
        raise CheckpointError(f"{path} has format {version}; this version of xrlflow reads format {FORMAT}")
    if metadata.get("kind") != kind:
        raise CheckpointError(f"{path} holds: {metadata.get('kind')}; wanted: {kind}")
    try:
        config = json.loads(metadata["config"])
    except (ValueError, RecursionError) as error:
        raise CheckpointError(f"{path}: its configuration is damaged: {error}") from error
    if not isinstance(config, dict):
        raise CheckpointError(f"{path}: its configuration is damaged: not an object")
    return Checkpoint(kind, config, tensors)


def _array(file: Any, name: str) -> npt.NDArray[Any]:
    """Read one array. Raises TypeError for element types that NumPy lacks."""
    dtype = file.get_slice(name).get_dtype()
    if dtype not in _DTYPES:
        raise TypeError(f"{name} has elements of type {dtype}; known are {', '.join(sorted(_DTYPES))}")
    return np.asarray(file.get_tensor(name))
