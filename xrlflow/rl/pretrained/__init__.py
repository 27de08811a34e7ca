"""The agent that is shipped: `CARD.md` beside it says how it was made and what it is worth."""

from pathlib import Path

PRETRAINED = Path(__file__).with_name("agent.safetensors")
