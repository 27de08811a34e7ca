"""The network of the learned cost model. `CARD.md` in this folder says how it was trained and evaluated."""

from pathlib import Path

PRETRAINED = Path(__file__).with_name("latency.safetensors")
