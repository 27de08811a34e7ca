"""Conversion between the NumPy arrays of checkpoints and torch tensors."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import numpy.typing as npt
import torch


def to_arrays(tensors: Mapping[str, torch.Tensor]) -> dict[str, npt.NDArray[Any]]:
    """Copy tensors to arrays, by name."""
    return {name: np.array(t.detach().cpu().numpy()) for name, t in tensors.items()}


def to_tensors(arrays: Mapping[str, npt.NDArray[Any]]) -> dict[str, torch.Tensor]:
    """Copy arrays to tensors, by name."""
    return {name: torch.from_numpy(np.array(a)) for name, a in arrays.items()}
