"""The content of an agent's file: configuration, vocabulary and arrays. This module needs no torch.

`xrlflow.rl.agent` trains these parameters; `xrlflow.rl.network` computes with them.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, replace
from typing import Any

import numpy as np
import numpy.typing as npt

from xrlflow.common.text import printable, shortened
from xrlflow.rewrite import Library
from xrlflow.rl.features import (
    CANDIDATE_FEATURES,
    CHANGE_FEATURES,
    EDGE_FEATURES,
    GLOBAL_FEATURES,
    NODE_FEATURES,
    Vocabulary,
)
from xrlflow.storage.checkpoint import Checkpoint, CheckpointError, load_checkpoint, save_checkpoint

KIND = "agent"
# The arrays whose rows belong to the words of a vocabulary. Row 0 is for unknown words.
_NUMBERED = {
    "encoder.operator.weight": "operators",
    "changed.weight": "operators",
    "rule.weight": "rules",
    "family.weight": "families",
}


@dataclass(frozen=True, slots=True)
class EncoderConfig:
    """The size of an encoder. Raises ValueError unless `width` is a multiple of `heads`, TypeError for non-integers."""

    width: int = 64
    layers: int = 3
    heads: int = 4

    def __post_init__(self) -> None:
        if not all(type(value) is int for value in (self.width, self.layers, self.heads)):
            raise TypeError("an encoder's width, layers and heads are integers")
        if self.width < 1 or self.layers < 0 or self.heads < 1 or self.width % self.heads:
            raise ValueError(f"an encoder of width {self.width}, {self.layers} layers, {self.heads} heads")


@dataclass(frozen=True, slots=True)
class AgentConfig:
    """The size of an agent."""

    encoder: EncoderConfig = field(default_factory=EncoderConfig)

    def to_json(self) -> dict[str, Any]:
        return asdict(self)

    @staticmethod
    def from_json(value: Mapping[str, Any]) -> AgentConfig:
        """The configuration from the JSON value that `to_json` wrote. Raises TypeError, KeyError or ValueError for
        anything else.
        """
        return AgentConfig(EncoderConfig(**value["encoder"]))


@dataclass(frozen=True, slots=True, eq=False)
class Parameters:
    """An agent's vocabulary, configuration and arrays by name (float32). `about`: how it was trained, as JSON."""

    vocabulary: Vocabulary
    config: AgentConfig
    arrays: Mapping[str, npt.NDArray[Any]]
    about: Mapping[str, Any] = field(default_factory=dict)

    def extended(self, library: Library) -> Parameters:
        """Add rows of zeros for the new rules and operators of a library. The agent's decisions stay the same."""
        vocabulary = self.vocabulary.extended(library)
        if vocabulary == self.vocabulary:
            return self
        arrays = dict(self.arrays)
        for name, kind in _NUMBERED.items():
            old_rows = arrays[name]
            rows = np.zeros((len(getattr(vocabulary, kind)) + 1, old_rows.shape[1]), old_rows.dtype)
            rows[: len(old_rows)] = old_rows
            arrays[name] = rows
        return replace(self, vocabulary=vocabulary, arrays=arrays)

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write the agent. Raises CheckpointError if the file cannot be written."""
        config = {
            "agent": self.config.to_json(),
            "features": _features(),
            "vocabulary": asdict(self.vocabulary),
            "about": dict(self.about),
        }
        save_checkpoint(Checkpoint(KIND, config, self.arrays), path)

    @staticmethod
    def load(path: str | os.PathLike[str]) -> Parameters:
        """Read an agent. Raises CheckpointError if the file is damaged or is no agent of this version."""
        checkpoint = load_checkpoint(path, KIND)
        try:
            return _from_checkpoint(checkpoint)
        except CheckpointError as error:
            raise CheckpointError(f"{os.fspath(path)}: {error}") from error


def shapes(vocabulary: Vocabulary, config: AgentConfig) -> dict[str, tuple[int, ...]]:
    """The names and shapes of an agent's arrays."""
    width, heads = config.encoder.width, config.encoder.heads

    def linear(name: str, inputs: int, outputs: int, bias: bool = True) -> dict[str, tuple[int, ...]]:
        return {f"{name}.weight": (outputs, inputs)} | ({f"{name}.bias": (outputs,)} if bias else {})

    def norm(name: str) -> dict[str, tuple[int, ...]]:
        return {f"{name}.weight": (width,), f"{name}.bias": (width,)}

    def head(name: str, inputs: int) -> dict[str, tuple[int, ...]]:
        return linear(f"{name}.0", inputs, width) | linear(f"{name}.2", width, 1)

    shapes_by_name = {name: (len(getattr(vocabulary, kind)) + 1, width) for name, kind in _NUMBERED.items()}
    out: dict[str, tuple[int, ...]] = {"trust": (2,), **shapes_by_name}
    out |= linear("encoder.of_node", NODE_FEATURES, width)
    out |= linear("encoder.edges.of_edge", EDGE_FEATURES, width)
    out |= linear("encoder.edges.of_source", width, width, bias=False)
    for layer in (f"encoder.layers.{i}" for i in range(config.encoder.layers)):
        out |= {f"{layer}.bias": (width,)}
        out |= norm(f"{layer}.before")
        out |= linear(f"{layer}.of_node", width, width + 2 * heads, bias=False)
        out |= linear(f"{layer}.of_edge", EDGE_FEATURES, heads)
    out |= norm("encoder.last")
    out |= linear("encoder.pool.gate_nn", width, 1)
    out |= linear("encoder.of_graph", width, width)
    out |= linear("encoder.of_globals", GLOBAL_FEATURES, width)
    out |= linear("of_change", CHANGE_FEATURES, width)
    for name in ("from_change", "from_role", "from_graph"):
        out |= linear(name, width, width, bias=False)
    out |= linear("of_candidate", CANDIDATE_FEATURES, width)
    out |= linear("candidate", width, width)
    out |= linear("score", width, 1)
    return out | head("stop", 2 * width) | head("value", 2 * width + GLOBAL_FEATURES)


def _features() -> dict[str, int]:
    """The number of features of each kind in this version. An agent works only with the features with which it was
    trained.
    """
    return {
        "node": NODE_FEATURES,
        "edge": EDGE_FEATURES,
        "candidate": CANDIDATE_FEATURES,
        "change": CHANGE_FEATURES,
        "globals": GLOBAL_FEATURES,
    }


def _shown(value: object) -> str:
    return shortened(printable(value), 200)


def _from_checkpoint(checkpoint: Checkpoint) -> Parameters:
    """Check a checkpoint and convert it. Raises CheckpointError if its parts do not fit together, or if the numbers of
    features differ from this version's.
    """
    config = checkpoint.config
    if config.get("features") != _features():
        raise CheckpointError(
            f"the agent was made for other features ({_shown(config.get('features'))}, now {_features()}): "
            "train it again with this version"
        )
    try:
        words = {name: tuple(map(str, config["vocabulary"][name])) for name in Vocabulary.__slots__}
        vocabulary, config_of_agent = Vocabulary(**words), AgentConfig.from_json(config["agent"])
        if config_of_agent.encoder.layers > len(checkpoint.tensors):
            raise ValueError(f"{config_of_agent.encoder.layers} layers")
        expected = shapes(vocabulary, config_of_agent)
    except (KeyError, TypeError, ValueError) as error:
        raise CheckpointError(f"the agent's configuration is damaged: {_shown(repr(error))}") from error
    if expected.keys() != checkpoint.tensors.keys():
        odd = min(expected.keys() ^ checkpoint.tensors.keys())
        raise CheckpointError(f"the agent's parameters are not those of its configuration: {odd}")
    for name, array in checkpoint.tensors.items():
        if array.shape != expected[name]:
            what = "vocabulary" if name in _NUMBERED else "configuration"
            raise CheckpointError(
                f"the agent's {name} has shape {array.shape}, its {what} wants {expected[name]}"
            )
        if array.dtype != np.float32:
            raise CheckpointError(f"the agent's {name} has elements of type {array.dtype}, not float32")
        if not np.isfinite(array).all():
            raise CheckpointError(f"the agent's {name} has numbers that are not finite")
    return Parameters(vocabulary, config_of_agent, checkpoint.tensors, config.get("about", {}))
