"""The agents that are part of the package. `CARD.md` in this folder says how they were trained and evaluated."""

from pathlib import Path

PRETRAINED = Path(__file__).with_name("agent.safetensors")
DREAMER = Path(__file__).with_name("rlflow.safetensors")
"""The agent of `search="rlflow"`, with its world model beside it."""
