"""The files of a world model and its agent: the usual file for the agent, and next to it a file for the world model."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import asdict
from hashlib import blake2b
from pathlib import Path
from typing import Any

import torch

from xrlflow.learn.tensors import to_arrays, to_tensors
from xrlflow.rl.agent import Agent
from xrlflow.rl.world_model.dynamics import World, WorldConfig
from xrlflow.storage.checkpoint import Checkpoint, CheckpointError, load_checkpoint, save_checkpoint

KIND = "world model"


def world_path(agent: str | os.PathLike[str]) -> Path:
    """The path of the world model of an agent, from the path of the agent."""
    path = Path(agent)
    return path.with_name(f"{path.stem}.world{path.suffix}")


def save_world(
    agent: Agent, world: World, path: str | os.PathLike[str], about: Mapping[str, Any] | None = None
) -> None:
    """Write the agent to `path` and its world model to `world_path(path)`. Raises CheckpointError."""
    config = {"world": asdict(world.config), "agent": _digest(agent), "about": dict(about or {})}
    save_checkpoint(Checkpoint(KIND, config, to_arrays(world.state_dict())), world_path(path))
    agent.save(path, about)


def save_alone(agent: Agent, path: str | os.PathLike[str], about: Mapping[str, Any] | None = None) -> None:
    """Write an agent without a world model, and remove the world model of an earlier agent with this path. Raises
    CheckpointError."""
    agent.save(path, about)
    try:
        world_path(path).unlink(missing_ok=True)
    except OSError as error:
        raise CheckpointError(f"{world_path(path)} cannot be removed: {error.strerror or error}") from error


def load_world(path: str | os.PathLike[str]) -> tuple[Agent, World]:
    """Read the agent in `path` and its world model. Raises CheckpointError if one is damaged or does not fit."""
    agent = Agent.load(path)
    where = world_path(path)
    checkpoint = load_checkpoint(where, KIND)
    if checkpoint.config.get("agent") != _digest(agent):
        raise CheckpointError(f"{where}: it belongs to another agent than {os.fspath(path)}")
    try:
        config = WorldConfig(**checkpoint.config["world"])
        _check_sizes(config, agent, checkpoint)
        world = World(config)
        world.load_state_dict(to_tensors(checkpoint.tensors))
    except (KeyError, TypeError, ValueError, RuntimeError) as error:
        raise CheckpointError(f"{where}: its parts do not fit: {error}") from error
    if not all(torch.isfinite(p).all() for p in world.parameters()):
        raise CheckpointError(f"{where}: it has numbers that are not finite")
    return agent, world


def _check_sizes(config: WorldConfig, agent: Agent, checkpoint: Checkpoint) -> None:
    """Raise ValueError if the file's arrays do not fit a world model of this size, before one is created."""
    if (config.width, config.rules) != (agent.config.encoder.width, len(agent.vocabulary.rules) + 1):
        raise ValueError("it has not the width or the rules of its agent")
    mixture = (config.mixtures * (1 + 2 * config.latent), config.hidden)
    if checkpoint.tensors["mixture.weight"].shape != mixture:
        raise ValueError(f"the mixture is not of shape {mixture}")


def _digest(agent: Agent) -> str:
    """A digest of an agent's parameters: a world model works only with the vectors of its own agent."""
    digest = blake2b(digest_size=16)
    for name, array in sorted(to_arrays(agent.state_dict()).items()):
        digest.update(f"{name} {array.dtype} {array.shape}".encode())
        digest.update(array.tobytes())
    return digest.hexdigest()
