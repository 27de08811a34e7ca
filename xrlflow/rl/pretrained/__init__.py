"""The agents that are part of the package. `CARD.md` in this folder documents their training and evaluation."""

from pathlib import Path

PRETRAINED = Path(__file__).with_name("agent.safetensors")
DREAMER = Path(__file__).with_name("rlflow.safetensors")
"""The agent of `search="rlflow"`. The file of its world model is next to it."""
