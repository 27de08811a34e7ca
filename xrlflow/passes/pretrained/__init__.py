"""What the package knows of XLA's passes. `CARD.md` in this folder says where it is from."""

from pathlib import Path

PRETRAINED = Path(__file__).with_name("agent.safetensors")
"""An agent."""
SEQUENCE = (
    "algsimp", "cse", "reshape-mover", "call-inliner", "constant_folding", "algsimp", "reshape-mover",
    "transpose-folding", "cse",
)  # fmt: skip
"""The best fixed sequence over the modules that the agent was trained on."""
