"""The agent for XLA's passes that is part of the package. `CARD.md` in this folder says how it was trained."""

from pathlib import Path

PRETRAINED = Path(__file__).with_name("agent.safetensors")
