"""The package's agent and sequence for XLA's passes. `CARD.md` in this folder documents their training."""

from pathlib import Path

PRETRAINED = Path(__file__).with_name("agent.safetensors")
"""The file of the package's agent."""
SEQUENCE = (
    "algsimp", "cse", "reshape-mover", "call-inliner", "constant_folding", "algsimp", "reshape-mover",
    "transpose-folding", "cse",
)  # fmt: skip
"""The fixed sequence that is best over all modules on which the agent was trained."""
