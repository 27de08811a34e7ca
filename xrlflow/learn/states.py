"""Checks the states of training runs that are read from files, which may be damaged, before a run is resumed."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn


def under(tensors: Mapping[str, Tensor], prefix: str) -> dict[str, Tensor]:
    """The tensors whose names begin with `prefix`, by the rest of their names."""
    return {name[len(prefix) :]: t for name, t in tensors.items() if name.startswith(prefix)}


def check_weights(module: nn.Module, tensors: Mapping[str, Tensor]) -> None:
    """Raise ValueError unless weights have the names, shapes and types of the module's own, and are finite."""
    mine = module.state_dict()
    if odd := mine.keys() ^ tensors.keys():
        raise ValueError(f"{min(odd)} is missing, or is none of its weights")
    for name, own in mine.items():
        tensor = tensors[name]
        if (tensor.shape, tensor.dtype) != (own.shape, own.dtype):
            raise ValueError(
                f"{name} is {tensor.dtype}{list(tensor.shape)} instead of {own.dtype}{list(own.shape)}"
            )
        if not bool(tensor.isfinite().all()):
            raise ValueError(f"{name} has numbers that are not finite")


def adam_state(module: nn.Module, tensors: Mapping[str, Tensor]) -> dict[int, dict[str, Tensor]]:
    """Adam's state by the index of each parameter, from the tensors `<name>.step`, `<name>.exp_avg` and
    `<name>.exp_avg_sq`. A parameter may have no state. Raises ValueError if a tensor has a wrong shape or value,
    KeyError if one is missing.
    """
    return {
        index: _moments(name, parameter, own)
        for index, (name, parameter) in enumerate(module.named_parameters())
        if (own := under(tensors, f"{name}."))
    }


def _moments(name: str, parameter: Tensor, own: Mapping[str, Tensor]) -> dict[str, Tensor]:
    expected = {
        "step": (torch.Size(()), 1.0),
        "exp_avg": (parameter.shape, -math.inf),
        "exp_avg_sq": (parameter.shape, 0.0),
    }
    for key, (shape, minimum) in expected.items():
        part = own[key]
        if part.shape != shape or not bool(part.isfinite().all() and (part >= minimum).all()):
            raise ValueError(f"the optimizer's {key} of {name} is damaged")
    return dict(own)


def number(config: Mapping[str, Any], name: str, minimum: float = 0.0) -> float:
    """A finite number from a JSON configuration. Raises ValueError if the entry is no such number, or less than
    `minimum`."""
    value = config[name]
    numeric = isinstance(value, int | float) and not isinstance(value, bool)
    try:
        if numeric and math.isfinite(value) and value >= minimum:
            return float(value)
    except OverflowError:  # an integer of hundreds of digits
        pass
    raise ValueError(f"{name} is {str(value)[:40]}")
